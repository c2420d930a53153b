"""`compare` and `ComparisonBuilder`: compare systems that predicted the same targets."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import reduce
from typing import Any, Self
from uuid import uuid4

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    NanPolicy,
    Task,
    advising,
    check_count,
    check_flag,
    check_in_all_batches,
    check_seed,
    weights_from,
)
from torchcalib.core.arrays import check_has_values
from torchcalib.core.checks import MAX_COPIES, are_counts
from torchcalib.core.clusters import (
    cluster_words,
    distinct,
    effective_number,
    identifiers,
    least_of_batch,
    number_of,
    of_samples,
)
from torchcalib.core.mistakes import no_samples
from torchcalib.core.sample_or_sketch import are_labels
from torchcalib.core.saved import saved_count, saved_tensor, saved_value
from torchcalib.core.tasks import cluster_ids, per_sample, prepare
from torchcalib.display.progress import in_parts
from torchcalib.inference.testing import clusters_in_words
from torchcalib.io.errors import first_of, limited, shown
from torchcalib.reporting.builder import Builder, check_distinct
from torchcalib.reporting.catalogue import names_of
from torchcalib.reporting.comparison.differences import compared_lines
from torchcalib.reporting.comparison.system import (
    MAX_KEPT,
    MAX_RANKED,
    RANKED_REPLICATES,
    Draws,
    SystemBuilder,
)
from torchcalib.reporting.confidences import comparison_of_confidences
from torchcalib.reporting.options import ONLY_REPORTS, ReportOptions
from torchcalib.reporting.testing import LEVEL
from torchcalib.results.comparison import Comparison, comparison_sentence

N_REPLICATES = 999
"""Default number of bootstrap replicates. At level 95%, 24 of them lie below the interval and 24 above."""

_OMITTED = "UNC"  # name of the lines of a report that are omitted: uncertainty depends only on the outcomes
_FEW_GROUPS = 1000  # up to this number of groups, notes state the standard error of the width of intervals


@advising("Pass the systems by name: compare({'a': preds, 'b': other_preds}, target).")
def compare(
    systems: Mapping[str, Any],
    target: Any,
    *,
    task: Task | None = None,
    class_names: Sequence[str] | None = None,
    n_bins: int = 15,
    right: bool = False,
    n_replicates: int = N_REPLICATES,
    seed: int = 0,
    nan_policy: NanPolicy = "raise",
    from_logits: bool | Mapping[str, bool] | None = None,
    weights: Any = None,
    sample_weight: Any = None,
    ignore_index: int | None = None,
    positive_classes: Sequence[int] | None = None,
    class_axis: int | None = None,
    clusters: Any = None,
) -> Comparison:
    """Compare systems that predicted the same targets, with paired bootstrap intervals of all differences.

    The scores, errors and metrics of selective prediction are those of `torchcalib.report`, except UNC (uncertainty),
    which depends only on outcomes.

    A difference is the value of a system minus the value of the first system. For the entropic calibration difference
    (ECD) and the expected signed calibration error (ESCE), it is the difference of absolute values. Its 95% percentile
    interval is computed from replicates that all systems share. A bias of the replicates above a quarter of their
    standard deviation is subtracted, also from intervals of values.

    Calibration errors contain sampling noise. `Difference.chance` is the difference of the noise floors: the expected
    difference if both systems are calibrated. `Difference.beyond_chance` is the rest, and the interval is that of the
    rest. The hypothesis of the test is that the expected difference lies between 0 and `chance`. It holds approximately
    for two systems with the same pattern of gaps; see the guide on noise floors. The p-value is the larger one of two:
    that of the bootstrap, and that of null replicates. In null replicates, the outcomes of both systems are simulated
    from their confidences, with the dependence between the systems. The interval contains those of both. The bootstrap
    alone is not valid for rare outcomes, because a bin without events has no noise in the replicates.

    The verdict is `"better"` or `"worse"` if p is at most 0.05, which is the case if and only if the interval excludes
    0. Sentences, diagrams and the table of systems use this verdict. Adjusted p-values account for all differences of
    the comparison. All p-values hold for one look at the data: repeated looks at growing data give more false alarms.
    Use `torchcalib.SequentialTest` for repeated looks at one system.

    Replicates resample rows, the entries of the first axis; all pixels of an image stay together. To bound memory, more
    than 1,024 rows are assigned to 1,024 groups, which are resampled instead. For class-wise errors of 1,000 classes
    there are 128 groups. `notes` lists intervals that are less accurate because of few groups.

    Intervals are omitted for class-wise errors with 3 C `n_bins` > 65,536, and for rank-based errors above 2^14 samples
    (multi-label: samples times labels). The debiased root mean squared calibration error (RMSCE) has no interval,
    because the bootstrap is invalid for it. Rank-based errors are omitted above 2^20 samples. The limits of rank-based
    errors also apply to the metrics of selective prediction.

    Args:
        systems: predictions of at least two systems by name, the baseline first. Probabilities or logits: binary
            `(N,)`, multi-class `(N, C)`, multi-label `(N, L)`. Further axes are samples. Any array-like is accepted.
        target: labels or soft targets, shared by all systems; see `torchcalib.functional.nll`. Strings are class names.
        task: `"binary"`, `"multiclass"`, `"multilabel"` or `"confidence"`; see `torchcalib.report`. None infers it from
            the data and sets `task_is_inferred`.
        class_names: names of the classes or labels in the order of the class axis; the negative class first if binary.
        n_bins: number of equal-width or equal-mass bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        n_replicates: number of bootstrap replicates; rank-based errors and selective prediction use at most 199.
        seed: seed of the replicates, which are the same on every device.
        nan_policy: `"drop"` drops a row from all systems if any system predicts NaN, an infinite probability, or only
            -inf logits. `Comparison.n_dropped` counts these rows. `"raise"` raises an error.
        from_logits: whether predictions are logits; a bool for all systems, or a dict of bools by name.
            None infers for each system whether more than 5% of all values are negative.
        weights: non-negative weights of the samples `(N,)`, shared by all systems.
        clusters: cluster of each row, integers or strings, such as a patient or a document. Replicates resample
            clusters, because their rows may be dependent. For few clusters, intervals are moved outwards; see
            `torchcalib.inference.Interval`.

    Returns:
        A `Comparison`. Print it, look up a line (`compared["nll"].differences["b"]`), export it (`to_pandas()`), or
        write it to files (`save("compared/")`).

    Raises:
        TypeError, ValueError: for invalid input; the message contains the name of the system.

    Gradient:
        None.

    Reference:
        Efron, Tibshirani: An Introduction to the Bootstrap (1993), ch. 13.3, for percentile intervals; Oza, Russell:
        Online bagging and boosting (AISTATS 2001), for Poisson weights; Wolter: Introduction to Variance Estimation
        (2007), ch. 2, for random groups; Broecker, Smith: Increasing the reliability of reliability diagrams (Weather
        and Forecasting, 2007), for simulated outcomes; Iman, Conover: A distribution-free approach to inducing rank
        correlation among input variables (Communications in Statistics, 1982), for their dependence; Berger:
        Multiparameter hypothesis testing and acceptance sampling (Technometrics, 1982), for the larger p-value;
        Westfall, Young: Resampling-Based Multiple Testing (1993), algorithm 4.1, for adjusted p-values.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> honest = torch.rand(2000, generator=g)
        >>> target = torch.bernoulli(honest, generator=g).long()
        >>> compared = compare({"honest": honest, "sure": (3 * honest.logit()).sigmoid()}, target, task="binary")
        >>> compared["nll"].differences["sure"].verdict
        'worse'
        >>> compared["accuracy"].differences["sure"].value
        0.0
    """
    if not isinstance(systems, Mapping):
        raise TypeError(
            f"`systems` must be a dict of predictions by name, got {type(systems).__name__}. "
            "Call compare({'a': preds, 'b': other_preds}, target)."
        )
    weights = weights_from(weights, sample_weight)
    names = _checked_names(tuple(systems))
    prepared = {}
    for name in names:
        with _naming_system(name):
            prepared[name] = prepare(
                systems[name],
                target,
                task,
                class_names=class_names,
                positive_classes=positive_classes,
                from_logits=from_logits.get(name, False) if isinstance(from_logits, Mapping) else from_logits,
                ignore_index=ignore_index,
            )
    first = prepared[names[0]]
    builder = ComparisonBuilder(
        names,
        task=task if task == "confidence" else first.task,
        n_replicates=n_replicates,
        seed=seed,
        from_logits=from_logits
        if isinstance(from_logits, Mapping)
        else {name: each.from_logits for name, each in prepared.items()},
        class_names=first.class_names,
        n_bins=n_bins,
        right=right,
        nan_policy=nan_policy,
        ignore_index=ignore_index,
        positive_classes=positive_classes,
        class_axis=class_axis,
    )
    weights = None if weights is None else per_sample("weights", weights, first.preds)
    clusters = None if clusters is None else cluster_ids(clusters, first.preds)
    preds = {name: each.preds for name, each in prepared.items()}
    builder.update(preds, first.target, weights=weights, clusters=clusters)
    return replace(builder.comparison(), task_is_inferred=task is None)


class ComparisonBuilder(Builder):
    """Compute a `Comparison` from batches of predictions in bounded memory; see `compare` for the arguments."""

    KIND = "comparison state"
    _WRITERS = "`ComparisonBuilder.state_bytes`"

    def __init__(
        self,
        names: Sequence[str],
        *,
        task: Task,
        n_replicates: int = N_REPLICATES,
        seed: int = 0,
        from_logits: bool | Mapping[str, bool] = False,
        **options: Any,
    ) -> None:
        super().__init__()
        check_count("n_replicates", n_replicates, at_least=math.ceil(2 / (1 - LEVEL)) - 1)
        check_seed(seed)
        self._names = _checked_names(names)
        declared = from_logits if isinstance(from_logits, Mapping) else dict.fromkeys(self._names, from_logits)
        if set(declared) != set(self._names):
            raise ValueError(
                f"`from_logits` must have the keys {first_of(self._names)}, "
                f"got {first_of(declared) or 'none'}. Pass one bool for each system, or one for all."
            )
        for value in declared.values():
            check_flag("from_logits", value)
        self._options = ReportOptions.from_arguments(task, options, is_comparison=True)
        self._n_replicates, self._seed = n_replicates, seed
        # Rows with missing values are dropped from all systems, by `_without_missing_rows`.
        self._systems = {name: self._system(declared[name]) for name in self._names}
        self._n_rows = self._n_dropped = 0
        self._are_counts = True
        self._clusters: Tensor | None = None  # distinct identifiers of the clusters; None without clusters

    @torch.no_grad()
    def update(
        self,
        preds: Mapping[str, Tensor],
        target: Tensor | Mapping[str, Tensor],
        *,
        weights: Tensor | None = None,
        clusters: Any = None,
    ) -> None:
        """Add a batch of predictions by system name. If an error is raised, the builder is unchanged.

        With the task `"confidence"`, `target` may contain whether each answer is correct by system name, because
        systems can give different answers to a question. The other tasks have shared targets.
        """
        check_in_all_batches("clusters", self._has_clusters, clusters is not None)
        targets = target if isinstance(target, Mapping) else dict.fromkeys(self._names, target)
        if targets is target and (not self._options.are_confidences or set(targets) != set(self._names)):
            raise ValueError(
                "`target` must be shared by all systems, or contain the name of each for the task 'confidence', got "
                f"{first_of(targets) or 'none'}. Pass one tensor."
            )
        self._check(preds, targets, weights)
        n_dropped = 0
        if self._options.input_format.nan_policy == "drop":
            weights, n_dropped = self._without_missing_rows(preds, targets, weights)
        first, input_format = preds[self._names[0]], self._systems[self._names[0]].input_format
        samples = input_format.samples_of(first, targets[self._names[0]])
        n_rows = samples[0] if samples else 1
        keys, found = torch.arange(self._n_rows, self._n_rows + n_rows, device=first.device), self._clusters
        if clusters is not None:
            keys = of_samples(identifiers(clusters, first.device), (n_rows,))
            with_weight = slice(None) if weights is None else (weights != 0).unsqueeze(-1).flatten(1).any(-1)
            found = distinct(torch.cat([*(() if found is None else (found,)), keys[with_weight]]))
        words = cluster_words(keys)
        systems = {name: copy(system) for name, system in self._systems.items()}
        for name, system in systems.items():
            with _naming_system(name):
                system.update(preds[name], targets[name], weights=weights, clusters=words)
        self._systems = systems
        self._n_rows, self._n_dropped = self._n_rows + n_rows, self._n_dropped + n_dropped
        self._are_counts &= are_counts(weights)
        self._clusters = found
        self._parts = self._parts or {uuid4().hex: ""}

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the builder, as a dict of plain Python values."""
        shared = {name: value for name, value in self._options.to_dict().items() if name not in ONLY_REPORTS}
        declared = {name: each.input_format.from_logits for name, each in self._systems.items()}
        draws = {"n_replicates": self._n_replicates, "seed": self._seed}
        return {"names": list(self._names), **shared, "from_logits": declared, **draws}

    @torch.no_grad()
    def merge(self, other: "ComparisonBuilder") -> None:
        """Append the predictions of another builder, with the same arguments and with clusters; it is unchanged.

        Clusters determine the replicates, whatever the order of the rows. Without clusters row numbers determine them,
        which are unknown in a part of the data.

        Raises:
            ValueError: if the arguments differ, if there are no clusters, or if `other` was merged before. The builder
                is then unchanged.
        """
        mine, theirs = self.settings, other.settings
        if self._n_rows and other._n_rows:
            mine["classes"], theirs["classes"] = self._num_classes, other._num_classes
        if differing := [name for name in mine if mine[name] != theirs.get(name, mine[name])]:
            raise ValueError(
                f"`other` must have the same {differing[0]}, got {shown(theirs[differing[0]])} instead of "
                f"{shown(mine[differing[0]])}. Create all parts with the same arguments."
            )
        if not other._n_rows:
            return
        if self._n_rows and False in (self._has_clusters, other._has_clusters):
            raise ValueError(
                "`other` must have clusters, got none in one of two builders. Pass `clusters` to `update` of both, for "
                "example the numbers of the rows."
            )
        check_distinct(self._parts, other._parts)
        systems = {name: copy(system) for name, system in self._systems.items()}
        for name, system in systems.items():
            system.merge(other._systems[name])
        self._systems = systems
        self._n_rows, self._n_dropped = self._n_rows + other._n_rows, self._n_dropped + other._n_dropped
        self._are_counts &= other._are_counts
        clusters = [each for each in (self._clusters, other._clusters) if each is not None]
        self._clusters = distinct(torch.cat(clusters)) if clusters else None
        self._parts = self._parts | other._parts

    def state(self) -> dict[str, Any]:
        """Return settings and accumulated data as a dict of tensors and Python values, which `of_state` restores."""
        return {
            "settings": self.settings,
            "n_rows": self._n_rows,
            "n_dropped": self._n_dropped,
            "are_counts": self._are_counts,
            "clusters": self._clusters,
            "parts": dict(sorted(self._parts.items())),
            "systems": {name: system.state() for name, system in self._systems.items()} if self._n_rows else {},
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return a builder on the CPU from a result of `state()`. An invalid state raises an exception of any type."""
        builder = cls(**saved_value(state, "settings", dict))
        builder._take_parts(state)
        saved = saved_value(state, "systems", dict)
        if not saved:
            return builder
        if saved.keys() != set(builder._names):
            raise ValueError(f"`systems` must have the keys {first_of(builder._names)}, got {first_of(saved)}.")
        systems = {name: SystemBuilder.of_state(saved_value(saved, name, dict)) for name in builder._names}
        classes = {system.input_format.num_classes for system in systems.values()}
        expected = {name: system.settings for name, system in builder._systems.items()}
        is_complete = all(system.sums for system in systems.values()) and len(classes) == 1
        if not is_complete or {name: system.settings for name, system in systems.items()} != expected:
            raise ValueError("`systems` must have rows and the settings of the comparison. The file is corrupt.")
        builder._systems = systems
        builder._n_rows, builder._n_dropped = saved_count(state, "n_rows"), saved_count(state, "n_dropped")
        builder._are_counts = saved_value(state, "are_counts", bool)
        if state["clusters"] is not None:
            builder._clusters = distinct(saved_tensor(state, "clusters", torch.int64, (None,)))
        return builder

    @property
    def _has_clusters(self) -> bool | None:
        """Whether rows have clusters; None before the first batch."""
        return self._clusters is not None if self._n_rows else None

    @property
    def _num_classes(self) -> int | None:
        return self._systems[self._names[0]].input_format.num_classes

    def _system(self, from_logits: bool) -> SystemBuilder:
        settings = {**self._options.to_dict(), "from_logits": from_logits, "nan_policy": "raise"}
        return SystemBuilder(**{**settings, "with_calibration": False, "with_intervals": False})

    def comparison(self, sources: Mapping[str, Mapping[str, Any]] | None = None) -> Comparison:
        """Return the comparison of all predictions added so far; `sources` are their origins, by system name."""
        systems = self._systems
        if not self._n_rows or not (first := systems[self._names[0]].data(True)).n > 0:
            raise no_samples()
        # float64 represents counts up to `MAX_COPIES` exactly. Rank-based errors need exact counts.
        if first.n > MAX_COPIES:
            systems = {name: system.without_ranks() for name, system in systems.items()}
        has_labels = all(are_labels(each.whole) for system in systems.values() for each in system.ranks.values())
        baseline, has_clusters = systems[self._names[0]], self._clusters is not None
        draws = Draws(self._seed, self._n_replicates, next(iter(baseline.sums.values())).sums.device)
        lines, replicates = [], {}
        for name in in_parts(systems, str):
            system = systems[name]
            data = system.data(has_labels)
            lines.append([line for line in data.lines() if line.name != _OMITTED])
            replicates[name] = system.replicates(draws, data, has_clusters)
        notes, clusters, n_clusters = self._notes(baseline, has_labels), {}, None
        if self._clusters is not None:
            sizes = [each.sizes for each in baseline.sums.values() if len(each.sums) > 1]
            n_clusters = min(map(least_of_batch, map(effective_number, sizes)))
            clusters["clusters"] = number_of(self._clusters)
            n_merged = max(int((n.reshape(len(n), -1) > 0).any(-1).sum()) for n in sizes)
            words = clusters_in_words("independent clusters of rows", clusters["clusters"], n_merged)
            notes.insert(0, f"Replicates resample {words}.")
        by_system = [dict(zip(self._names, same, strict=True)) for same in zip(*lines, strict=True)]
        better = {each.key: way for each in first.catalogue.members if (way := each.declaration.better) is not None}
        compared = compared_lines(by_system, better, replicates, n_clusters)
        sentences = {name: comparison_sentence(compared, self._names[0], name) for name in self._names[1:]}
        if (only := first.only_class_in_words) and not self._options.are_confidences:
            notes.insert(has_clusters, f"All targets are {only}. Check that `target` is the right array.")
            sentences = dict.fromkeys(sentences, f"Calibration cannot be compared: all targets are {only}.")
        scores = replicates[self._names[0]].bootstrap.get("brier")  # None for one group, which has no replicates
        if self._n_rows == 1 or (scores is not None and bool(scores.isnan().any())):
            notes.append("Intervals are omitted: some replicates are empty, because there are few rows (first axis).")
        input_format = self._options.input_format
        comparison = Comparison(
            task=first.task,
            n=first.n,
            n_dropped=self._n_dropped,
            num_classes=first.num_classes,
            systems=self._names,
            lines=compared,
            sentences=sentences,
            settings={
                **self._options.bins,
                "from_logits": self.settings["from_logits"],
                "ignore_index": input_format.ignore_index,
                "n_replicates": self._n_replicates,
                "level": LEVEL,
                "seed": self._seed,
                **clusters,
            },
            sources=dict(sources or {}),
            notes=tuple(notes),
            class_names=() if input_format.positive_classes is not None else self._options.class_names,
        )
        return comparison_of_confidences(comparison) if self._options.are_confidences else comparison

    def _check(self, preds: Mapping[str, Tensor], targets: Mapping[str, Tensor], weights: Tensor | None) -> None:
        if set(preds) != set(self._names):
            raise ValueError(
                f"`preds` must contain predictions of {first_of(self._names)}, got "
                f"{first_of(preds) or 'none'}. Use the same names for every batch."
            )
        for each in preds.values():
            check_has_values("preds", each)
        for name in self._names:
            with _naming_system(name):
                input_format = self._systems[name].input_format.resolved(preds[name], targets[name])
                input_format.check_axis(preds[name])
                input_format.check(preds[name], targets[name], weights)
        if len(shapes := {tuple(preds[name].shape) for name in self._names}) > 1:
            raise ValueError(
                f"`preds` must have the same shape for all systems, got {' and '.join(map(str, sorted(shapes)))}. "
                "Pass predictions for the same rows."
            )

    def _without_missing_rows(
        self, preds: Mapping[str, Tensor], targets: Mapping[str, Tensor], weights: Tensor | None
    ) -> tuple[Tensor, int]:
        """Return weights that are 0 for rows with a missing prediction or target, and the number of dropped rows."""

        def missing_of(name: str) -> Tensor:
            input_format = self._systems[name].input_format.resolved(preds[name], targets[name])
            rows = input_format.missing_in(preds[name], targets[name])
            return rows.any(input_format.axis) if input_format.task == "multilabel" else rows

        missing = reduce(torch.logical_or, map(missing_of, self._names))
        if weights is None:
            return (~missing).long(), int(missing.sum())
        return weights.masked_fill(missing, 0), int((missing & (weights != 0)).sum())

    def _notes(self, system: SystemBuilder, has_labels: bool) -> list[str]:
        """Return notes on omitted values and less accurate intervals. They apply to all systems."""
        ranked = [each for each in system.catalogue.ranked if each.declaration.name != _OMITTED]
        names = names_of(ranked)
        notes = []
        if self._n_dropped:
            notes.append(f"{self._n_dropped:,} rows are dropped from all systems: a prediction or target is NaN.")
        if not system.ranks:
            why = f"there are more than {MAX_KEPT:,} samples"
            if not self._are_counts:
                why = "they need weights that are whole numbers"
            notes.append(f"{names} are omitted: {why}.")
        else:
            if not has_labels:
                labelled = names_of(each for each in ranked if each.declaration.needs_labels)
                notes.append(f"{labelled} are omitted: they need labels, and targets are soft.")
            if not system.data(has_labels).weights_are_copies:
                errors = names_of(each for each in ranked if each.is_error)
                notes.append(f"Intervals and p of {errors} are omitted: floating weights do not count samples.")
            if system.size > MAX_RANKED:
                notes.append(f"Intervals of {names} are omitted above {MAX_RANKED:,} samples.")
            elif self._n_replicates > RANKED_REPLICATES:
                notes.append(f"Intervals of {names} are computed from {RANKED_REPLICATES} replicates.")
        by_groups: dict[int, list[str]] = defaultdict(list)
        for name, sums in system.sums.items():
            by_groups[len(sums.sums)].append(system.catalogue.in_words(name))
        for n_groups, few in by_groups.items():
            lines = ", ".join(few)
            if n_groups == 1 < self._n_rows:
                notes.append(f"Intervals of {lines} are omitted: too many classes times bins.")
            elif n_groups < self._n_rows and n_groups <= _FEW_GROUPS:
                notes.append(
                    f"Intervals of {lines} are computed from {n_groups:,} random groups of rows. The standard error of "
                    f"their width is about {math.sqrt(0.5 / n_groups):.0%}."
                )
        return notes


@contextmanager
def _naming_system(name: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(limited(f"system {shown(name)}: {error}")) from error


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if not isinstance(name, str) or not name.strip():
            raise TypeError(f"`systems` must have non-empty strings as names, got {shown(name)}. Name each system.")
    if len(names) < 2:
        raise ValueError(
            f"`systems` must contain at least two systems, got {len(names)}. Call torchcalib.report for one system."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"`systems` must have unique names, got {first_of(names)}. Rename one of them.")
    return tuple(names)
