"""`compare` and `ComparisonBuilder`: compare systems that predicted the same targets."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, Self
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
from torchcalib.core.arrays import check_columns, check_has_values, is_frame
from torchcalib.core.checks import MAX_COPIES, are_counts
from torchcalib.core.clusters import (
    are_text,
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
from torchcalib.core.tasks import Prepared, cluster_ids, per_sample, prepare
from torchcalib.display.progress import in_parts
from torchcalib.inference.testing import clusters_in_words
from torchcalib.io.errors import first_of, limited, shown
from torchcalib.io.opening import PredictionFiles, open_predictions
from torchcalib.reporting.base import Builder, agreed
from torchcalib.reporting.catalogue import names_of
from torchcalib.reporting.comparison.differences import compared_lines
from torchcalib.reporting.comparison.reading import batches_of, settings_of
from torchcalib.reporting.comparison.row_ids import (
    NO_ROWS,
    RowIds,
    check_type_of_ids,
    contents_of,
    hashes_of_ids,
    merged_rows,
    with_rows,
)
from torchcalib.reporting.comparison.system import (
    MAX_KEPT,
    MAX_RANKED,
    RANKED_REPLICATES,
    Draws,
    SystemBuilder,
    keys_of,
    keys_of_samples,
)
from torchcalib.reporting.lines import Data
from torchcalib.reporting.options import ONLY_REPORTS, ReportOptions
from torchcalib.reporting.testing import LEVEL
from torchcalib.results.comparison import Comparison, PairedRows, comparison_sentence

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
    ids: Any = None,
) -> Comparison:
    """Compare systems that predicted the same targets, with paired bootstrap intervals of all differences.

    With `ids`, systems may have different rows, in any order. The values of a system are those of all its rows. Common
    rows have the same weights in all replicates. Other rows have independent weights, which add to the variance of
    differences.

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

    The verdict is `"better"` or `"worse"` if p is at most 0.05. The interval then excludes 0, and only then.
    Sentences, diagrams and the table of systems use this verdict. Adjusted p-values account for all differences of the
    comparison. All p-values hold for one look at the data: repeated looks at growing data give more false alarms. Use
    `torchcalib.SequentialTest` for repeated looks at one system.

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
            With `ids`, `target`, `weights` and `clusters` may be dicts by system name. If all systems are DataFrames
            with all columns, `target`, `ids`, `weights` and `clusters` are names of columns.
        task: `"binary"`, `"multiclass"`, `"multilabel"` or `"confidence"`; see `torchcalib.report`. None infers it from
            the data and sets `task_is_inferred`.
        class_names: names of the classes or labels in the order of the class axis; the negative class first if binary.
        n_bins: number of equal-width or equal-mass bins.
        right: bins are `(a, b]` instead of `[a, b)`.
        n_replicates: number of bootstrap replicates; rank-based errors and selective prediction use at most 199.
        seed: seed of the replicates, which are the same on every device.
        nan_policy: `"drop"` drops a row from all systems if any system predicts NaN, an infinite probability, or only
            -inf logits. With `ids`, it is dropped from this system. `Comparison.n_dropped` counts these rows. `"raise"`
            raises an error.
        from_logits: whether predictions are logits; a bool for all systems, or a dict of bools by name.
            None infers for each system whether more than 5% of all values are negative.
        weights: non-negative weights of the samples `(N,)`, shared by all systems.
        clusters: cluster of each row, integers or strings, such as a patient or a document. Replicates resample
            clusters, because their rows may be dependent. For few clusters, intervals are moved outwards; see
            `torchcalib.inference.Interval`.
        ids: id of each row `(N,)`, integers or text, as a dict by system name, or shared by all systems. Ids are
            distinct in a system. Equal ids of two systems are the same row, with the same target and cluster.
            `Comparison.rows` has the numbers of common rows. They are exact for up to 100,000 rows of a system.
            Above that, only 100,000 random ids are compared, also to find repeated ids and different targets.

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
        >>> systems, targets = {"a": honest[:1500], "b": honest[500:]}, {"a": target[:1500], "b": target[500:]}
        >>> compare(systems, targets, ids={"a": range(1500), "b": range(500, 2000)}).rows["b"].common
        1000
    """
    if not isinstance(systems, Mapping):
        raise TypeError(
            f"`systems` must be a dict of predictions by name, got {type(systems).__name__}. "
            "Call compare({'a': preds, 'b': other_preds}, target)."
        )
    weights = weights_from(weights, sample_weight)
    names = _checked_names(tuple(systems))
    of_logits = {
        name: from_logits.get(name, False) if isinstance(from_logits, Mapping) else from_logits for name in names
    }
    columns = {"target": target, "weights": weights, "clusters": clusters, "ids": ids}
    shared: dict[str, Any] = {"task": task, "ignore_index": ignore_index}
    of_arrays: dict[str, Any] = {"positive_classes": positive_classes, "class_axis": class_axis}
    settings: dict[str, Any] = {
        "n_replicates": n_replicates,
        "seed": seed,
        "n_bins": n_bins,
        "right": right,
        "nan_policy": nan_policy,
    }
    if isinstance(target, str) and all(map(is_frame, systems.values())):
        files = _opened_frames(systems, columns, of_arrays, of_logits, class_names, nan_policy=nan_policy, **shared)
        builder = ComparisonBuilder(**settings_of(files), **settings)
        for _, batch in batches_of(files):
            builder.update(**batch)
    else:
        is_by_system = isinstance(target, Mapping) and not set(names).isdisjoint(target)  # or columns of labels
        may_differ = ids is not None or task == "confidence"
        targets = _by_system("target", target, names, may_differ) if is_by_system else dict.fromkeys(names, target)
        prepared: dict[str, Prepared] = {}
        for name in names:
            with _naming_system(name):
                known = class_names or next((each.class_names for each in prepared.values()), None)
                options = {**shared, "class_names": known or None, "positive_classes": positive_classes}
                prepared[name] = prepare(systems[name], targets[name], from_logits=of_logits[name], **options)
        first = prepared[names[0]]
        shared["task"] = task if task == "confidence" else first.task
        shared["from_logits"] = from_logits
        if not isinstance(from_logits, Mapping):
            shared["from_logits"] = {name: each.from_logits for name, each in prepared.items()}
        builder = ComparisonBuilder(names, class_names=first.class_names, **shared, **of_arrays, **settings)

        def converted(argument: str, convert: Callable[[Any, Tensor], Tensor]) -> Any:
            given = columns[argument]
            if given is None:
                return None
            if not isinstance(given, Mapping):
                return convert(given, first.preds)
            given = _by_system(argument, given, names, ids is not None)
            return {name: convert(column, prepared[name].preds) for name, column in given.items()}

        builder.update(
            {name: each.preds for name, each in prepared.items()},
            {name: each.target for name, each in prepared.items()} if is_by_system else first.target,
            weights=converted("weights", partial(per_sample, "weights")),
            clusters=converted("clusters", cluster_ids),
            ids=ids,
        )
    return replace(builder.comparison(), task_is_inferred=task is None)


def _opened_frames(
    systems: Mapping[str, Any],
    columns: Mapping[str, Any],
    of_arrays: Mapping[str, Any],
    of_logits: Mapping[str, bool | None],
    class_names: Sequence[str] | None,
    **opening: Any,
) -> dict[str, PredictionFiles]:
    """Return DataFrames with all columns as prediction files. `columns` are names; `of_arrays` must be omitted."""
    check_columns(columns, of_arrays)
    files: dict[str, PredictionFiles] = {}
    for name, frame in systems.items():
        known = class_names or next((x.source.class_names for x in files.values()), None) or None
        opening |= {"from_logits": of_logits[name], "class_names": known}
        with _naming_system(name):
            files[name] = open_predictions((), frame=frame, **columns, **opening)
    return files


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
        # Rows with missing values are dropped by `_without_missing_rows`.
        shared = {**self._options.to_dict(), "nan_policy": "raise", "with_calibration": False, "with_intervals": False}
        self._systems = {name: SystemBuilder(**{**shared, "from_logits": declared[name]}) for name in self._names}
        self._n_rows = dict.fromkeys(self._names, 0)
        self._n_dropped = 0
        self._are_counts = True
        self._clusters: Tensor | None = None  # distinct identifiers of the clusters; None without clusters
        self._ids: Mapping[str, RowIds] | None = None  # rows of each system; None without ids
        self._ids_are_text = False

    @torch.no_grad()
    def update(
        self,
        preds: Mapping[str, Tensor],
        target: Tensor | Mapping[str, Tensor],
        *,
        weights: Tensor | Mapping[str, Tensor] | None = None,
        clusters: Any = None,
        ids: Any = None,
    ) -> None:
        """Add a batch of predictions by system name. If an error is raised, the builder is unchanged.

        Without `ids`, a batch has the same rows of all systems. With `ids`, it has any rows of one or more systems, in
        any order. The other arguments may then be dicts by system name. Ids are compared on the host, so that `update`
        waits for the device. Pass ids with all batches or with none.

        Without `ids`, targets are shared. For the task `"confidence"`, `target` may be a dict by system name of whether
        each answer is correct: systems can give different answers to a question.
        """
        check_in_all_batches("clusters", self._has_clusters, clusters is not None)
        check_in_all_batches("ids", self._has_ids, ids is not None)
        batches = self._batches(preds, target, weights, clusters, ids)
        are_texts = set() if ids is None else {are_text(batch.ids) for batch in batches.values()}
        check_type_of_ids(are_texts | ({self._ids_are_text} if self._has_ids else set()))
        n_dropped = 0
        if self._options.input_format.nan_policy == "drop":
            batches, n_dropped = self._without_missing_rows(batches)
        systems, n_rows = {**self._systems}, {**self._n_rows}
        known_clusters, known_ids = self._clusters, self._ids
        for name, batch in batches.items():
            with _naming_system(name):
                keys = torch.arange(n_rows[name], n_rows[name] + batch.n_rows, device=batch.preds.device)
                if batch.clusters is not None:
                    keys = of_samples(identifiers(batch.clusters, keys.device), (batch.n_rows,))
                    if batch.ids is not None or name == self._names[0]:
                        counted = keys if batch.weights is None else keys[batch.with_weight]
                        known = () if known_clusters is None else (known_clusters,)
                        known_clusters = distinct(torch.cat([*known, counted]))
                if batch.ids is None:
                    words = keys_of(cluster_words(keys), 0)
                else:
                    words, known_ids = self._identified(name, batch, keys, known_ids)
                systems[name] = copy(systems[name])
                systems[name].update(batch.preds, batch.target, weights=batch.weights, clusters=words)
                n_rows[name] += batch.n_rows
        _check_classes(systems)
        are_whole = all(are_counts(batch.weights) for batch in batches.values())
        self._systems, self._n_rows, self._n_dropped = systems, n_rows, self._n_dropped + n_dropped
        self._are_counts &= are_whole
        self._clusters, self._ids = known_clusters, known_ids
        self._ids_are_text = True in are_texts
        self._parts = self._parts or {uuid4().hex: ""}

    def _batches(self, preds: Any, target: Any, weights: Any, clusters: Any, ids: Any) -> dict[str, "_SystemBatch"]:
        """Return the batch of each system, after a check of names, types and shapes."""
        is_subset = ids is not None and bool(preds) and set(preds) <= set(self._names)
        if set(preds) != set(self._names) and not is_subset:
            raise ValueError(
                f"`preds` must contain predictions of {first_of(self._names)}, got "
                f"{first_of(preds) or 'none'}. Use the same names for every batch."
            )
        names = [name for name in self._names if name in preds]
        columns: dict[str, Mapping[str, Any]] = {"preds": preds}
        for argument, given in (("target", target), ("weights", weights), ("clusters", clusters), ("ids", ids)):
            may_differ = ids is not None or (argument == "target" and self._options.are_confidences)
            columns[argument] = _by_system(argument, given, names, may_differ)
        for name in names:
            check_has_values("preds", preds[name])
        batches = {}
        for name in names:
            batch = _SystemBatch(**{key: column[name] for key, column in columns.items()})
            with _naming_system(name):
                input_format = self._systems[name].input_format.resolved(batch.preds, batch.target)
                input_format.check_axis(batch.preds)
                input_format.check(batch.preds, batch.target, batch.weights)
            batches[name] = batch._replace(samples=input_format.samples_of(batch.preds, batch.target))
        shapes = {tuple(batch.preds.shape) for batch in batches.values() if batch.ids is None}
        if len(shapes) > 1:
            raise ValueError(
                f"`preds` must have the same shape for all systems, got {' and '.join(map(str, sorted(shapes)))}. "
                "Pass predictions for the same rows, or the `ids` of different rows."
            )
        return batches

    def _identified(
        self, name: str, batch: "_SystemBatch", groups: Tensor, known: Mapping[str, RowIds] | None
    ) -> tuple[Tensor, Mapping[str, RowIds]]:
        """Return the keys of all samples of a batch with ids, and the rows of all systems with its rows.

        `groups` are the identifiers of clusters `(n,)`, or the numbers of the rows.
        """
        ids = identifiers(batch.ids, name="ids").cpu()
        if tuple(ids.shape) not in ((batch.n_rows,), (batch.n_rows, 1)):
            raise ValueError(
                f"`ids` must have one id for each row, shape ({batch.n_rows},), got {tuple(ids.shape)}. Pass one for "
                "each entry of the first axis."
            )
        ids = ids.reshape(-1)
        shared = []  # columns that common rows share
        if not self._options.are_confidences:
            bits = (batch.target.detach().cpu().float() + 0.0).view(torch.int32)
            shared.append(bits.long().reshape(batch.n_rows, math.prod(bits.shape[1:])))
        if batch.clusters is not None:
            shared.append(groups.cpu().unsqueeze(-1))
        hashes, of_rows = hashes_of_ids(ids)
        contents = contents_of(torch.cat([ids.new_zeros(batch.n_rows, 1), *shared], -1))
        counts = torch.ones_like(ids, dtype=torch.bool) if batch.weights is None else batch.with_weight.cpu()
        rows = with_rows(known or dict.fromkeys(self._names, NO_ROWS), name, hashes, contents, counts, batch.ids)
        words = cluster_words(groups if batch.clusters is not None else ids.to(groups.device))
        return keys_of_samples(words, of_rows.to(words), batch.samples or (1,)), rows

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the builder, as a dict of plain Python values."""
        shared = {name: value for name, value in self._options.to_dict().items() if name not in ONLY_REPORTS}
        declared = {name: each.input_format.from_logits for name, each in self._systems.items()}
        draws = {"n_replicates": self._n_replicates, "seed": self._seed}
        return {"names": list(self._names), **shared, "from_logits": declared, **draws}

    @torch.no_grad()
    def merge(self, other: "ComparisonBuilder") -> None:
        """Append the predictions of another builder, with the same arguments and with clusters or ids; it is unchanged.

        Clusters or ids determine the replicates, whatever the order of the rows. Without them row numbers determine
        the replicates, which are unknown in a part of the data.

        Raises:
            ValueError: if the arguments differ, without clusters and ids, if a row is in both builders, or if `other`
                was merged before. The builder is then unchanged.
        """
        self._check_other(other)
        agreed("clusters", self._has_clusters, other._has_clusters)
        agreed("ids", self._has_ids, other._has_ids)
        if not other._has_rows:
            return
        if self._has_rows and not (self._has_clusters or self._has_ids):
            raise ValueError(
                "`other` must have clusters or ids, as this builder, got none. Pass `ids` or `clusters` to `update` of "
                "both, for example the numbers of the rows."
            )
        ids = self._ids or other._ids
        if self._ids is not None and other._ids is not None:
            check_type_of_ids({self._ids_are_text, other._ids_are_text})
            ids = merged_rows(self._ids, other._ids)
        systems = {name: copy(system) for name, system in self._systems.items()}
        for name, system in systems.items():
            system.merge(other._systems[name])
        self._systems, self._ids, self._ids_are_text = systems, ids, self._ids_are_text or other._ids_are_text
        self._n_rows = {name: n + other._n_rows[name] for name, n in self._n_rows.items()}
        self._n_dropped += other._n_dropped
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
            "ids": None if self._ids is None else {name: rows.state() for name, rows in self._ids.items()},
            "ids_are_text": self._ids_are_text,
            "parts": dict(sorted(self._parts.items())),
            "systems": {name: system.state() for name, system in self._systems.items()} if self._has_rows else {},
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
        n_rows = saved_value(state, "n_rows", dict)
        n_rows = {name: saved_count(n_rows, name) for name in builder._names}
        expected = {name: system.settings for name, system in builder._systems.items()}
        is_complete = all(bool(system.sums) == (n_rows[name] > 0) for name, system in systems.items())
        _check_classes(systems)
        if not is_complete or {name: system.settings for name, system in systems.items()} != expected:
            raise ValueError("`systems` must have rows and the settings of the comparison. The file is corrupt.")
        builder._systems = systems
        builder._n_rows, builder._n_dropped = n_rows, saved_count(state, "n_dropped")
        builder._are_counts = saved_value(state, "are_counts", bool)
        if state["clusters"] is not None:
            builder._clusters = distinct(saved_tensor(state, "clusters", torch.int64, (None,)))
        if state["ids"] is not None:
            ids = saved_value(state, "ids", dict)
            builder._ids = {name: RowIds.of_state(saved_value(ids, name, dict)) for name in builder._names}
            builder._ids_are_text = saved_value(state, "ids_are_text", bool)
        return builder

    @property
    def _has_rows(self) -> bool:
        return any(self._n_rows.values())

    @property
    def _has_clusters(self) -> bool | None:
        """Whether rows have clusters; None before the first batch."""
        return self._clusters is not None if self._has_rows else None

    @property
    def _has_ids(self) -> bool | None:
        """Whether rows have ids; None before the first batch."""
        return self._ids is not None if self._has_rows else None

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the predictions; None for a binary task, and before the first batch."""
        return next((n for each in self._systems.values() if (n := each.num_classes) is not None), None)

    def comparison(self, sources: Mapping[str, Mapping[str, Any]] | None = None) -> Comparison:
        """Return the comparison of all predictions added so far; `sources` are their origins, by system name."""
        systems = self._systems
        n_samples = {name: systems[name].accumulated().n if n else 0.0 for name, n in self._n_rows.items()}
        for name, n in n_samples.items():
            if not n > 0:
                with _naming_system(name) if self._has_ids else nullcontext():
                    raise no_samples()
        # float64 represents counts up to `MAX_COPIES` exactly. Rank-based errors need exact counts, of all systems.
        ranked = [each.ranks.keys() for each in systems.values()]
        if max(n_samples.values()) > MAX_COPIES or any(names != ranked[0] for names in ranked):
            systems = {name: system.without_ranks() for name, system in systems.items()}
        has_labels = all(are_labels(each.whole) for system in systems.values() for each in system.ranks.values())
        baseline, has_clusters, has_ids = systems[self._names[0]], self._clusters is not None, self._ids is not None
        draws = Draws(self._seed, self._n_replicates, next(iter(baseline.sums.values())).sums.device)
        lines, replicates, data = [], {}, {}
        # The binary accuracy of confidences depends on the threshold 0.5.
        omitted = [_OMITTED, *["Accuracy"] * self._options.are_confidences]
        for name in in_parts(systems, str):
            system = systems[name]
            data[name] = replace(system.accumulated(), has_labels=has_labels)
            lines.append([line for line in data[name].lines() if line.name not in omitted])
            replicates[name] = system.replicates(draws, data[name], has_clusters, has_ids)
        first = data[self._names[0]]
        notes, clusters, n_clusters = self._notes(systems, data), {}, None
        if self._clusters is not None:
            sizes = [[x.sizes for x in each.sums.values() if len(x.sums) > 1] for each in systems.values()]
            n_clusters = min(least_of_batch(effective_number(n)) for of_system in sizes for n in of_system)
            clusters["clusters"] = number_of(self._clusters)
            totals = [torch.stack(same).sum(0) for same in zip(*sizes, strict=True)]
            n_merged = max(int((n.reshape(len(n), -1) > 0).any(-1).sum()) for n in totals)
            words = clusters_in_words("independent clusters of rows", clusters["clusters"], n_merged)
            notes.insert(0, f"Replicates resample {words}.")
        pairs = self._pairs()
        notes = [*(pair.in_words(name, self._names[0]) for name, pair in pairs.items()), *notes]
        by_system = [dict(zip(self._names, same, strict=True)) for same in zip(*lines, strict=True)]
        better = {each.key: way for each in first.catalogue.members if (way := each.declaration.better) is not None}
        compared = compared_lines(by_system, better, replicates, n_clusters)
        sentences = {name: comparison_sentence(compared, self._names[0], name) for name in self._names[1:]}
        only = next(filter(None, (each.only_class_in_words for each in data.values())), "")
        if only and not self._options.are_confidences:
            notes.insert(len(pairs) + has_clusters, f"All targets are {only}. Check that `target` is the right array.")
            sentences = dict.fromkeys(sentences, f"Calibration cannot be compared: all targets are {only}.")
        # Empty for a single group, which has no replicates
        scores = [x for each in replicates.values() if (x := each.bootstrap.get("brier")) is not None]
        if 1 in self._n_rows.values() or any(bool(x.isnan().any()) for x in scores):
            notes.append("Intervals are omitted: some replicates are empty, because there are few rows (first axis).")
        input_format = self._options.input_format
        return Comparison(
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
                **first.catalogue.kind,
            },
            sources=dict(sources or {}),
            rows=pairs,
            notes=tuple(notes),
            class_names=() if input_format.positive_classes is not None else self._options.class_names,
        )

    def _without_missing_rows(self, batches: Mapping[str, "_SystemBatch"]) -> tuple[dict[str, "_SystemBatch"], int]:
        """Return batches with weight 0 for rows with a missing prediction or target, and the number of dropped rows.

        Without ids, rows that are missing in any system are dropped from all.
        """
        missing = {}
        for name, batch in batches.items():
            input_format = self._systems[name].input_format.resolved(batch.preds, batch.target)
            rows = input_format.missing_in(batch.preds, batch.target)
            missing[name] = rows.any(input_format.axis) if input_format.task == "multilabel" else rows
        if all(batch.ids is None for batch in batches.values()):
            missing = dict.fromkeys(batches, reduce(torch.logical_or, missing.values()))
        n_dropped, kept = [], {}
        for name, batch in batches.items():
            present = torch.ones_like(missing[name]) if batch.weights is None else batch.weights != 0
            n_dropped.append(int((missing[name] & present).sum()))
            weights = (~missing[name]).long() if batch.weights is None else batch.weights.masked_fill(missing[name], 0)
            kept[name] = batch._replace(weights=weights)
        return kept, sum(n_dropped) if next(iter(batches.values())).ids is not None else n_dropped[0]

    def _pairs(self) -> dict[str, PairedRows]:
        """Return the numbers of common rows with the baseline, by name of the other systems; empty without ids."""
        found: dict[str, PairedRows] = {}
        if self._ids is None:
            return found
        first = self._ids[self._names[0]]
        for name in self._names[1:]:
            rows = self._ids[name]
            n = first.n_common(rows)
            is_exact = first.are_all_stored and rows.are_all_stored
            found[name] = PairedRows(common=n, only=rows.n - n, only_baseline=first.n - n, is_exact=is_exact)
        return found

    def _notes(self, systems: Mapping[str, SystemBuilder], data: Mapping[str, Data]) -> list[str]:
        """Return notes on omitted values and less accurate intervals. They apply to all systems."""
        system, of_first = systems[self._names[0]], data[self._names[0]]
        ranked = [each for each in system.catalogue.ranked if each.declaration.name != _OMITTED]
        names = names_of(ranked)
        notes = []
        if self._n_dropped:
            where = "their systems" if self._has_ids else "all systems"
            notes.append(f"{self._n_dropped:,} rows are dropped from {where}: a prediction or target is NaN.")
        if not system.ranks:
            why = f"there are more than {MAX_KEPT:,} samples"
            if not self._are_counts:
                why = "they need weights that are whole numbers"
            notes.append(f"{names} are omitted: {why}.")
        else:
            if not of_first.has_labels:
                labelled = names_of(each for each in ranked if each.declaration.needs_labels)
                notes.append(f"{labelled} are omitted: they need labels, and targets are soft.")
            if not all(each.weights_are_copies for each in data.values()):
                errors = names_of(each for each in ranked if each.is_error)
                notes.append(f"Intervals and p of {errors} are omitted: floating weights do not count samples.")
            if max(each.size for each in systems.values()) > MAX_RANKED:
                notes.append(f"Intervals of {names} are omitted above {MAX_RANKED:,} samples.")
            elif self._n_replicates > RANKED_REPLICATES:
                notes.append(f"Intervals of {names} are computed from {RANKED_REPLICATES} replicates.")
        by_groups: dict[int, list[str]] = defaultdict(list)
        for name, sums in system.sums.items():
            by_groups[len(sums.sums)].append(system.catalogue.in_words(name))
        n_rows = max(self._n_rows.values())
        for n_groups, few in by_groups.items():
            lines = ", ".join(few)
            if n_groups == 1 < n_rows:
                notes.append(f"Intervals of {lines} are omitted: too many classes times bins.")
            elif n_groups < n_rows and n_groups <= _FEW_GROUPS:
                notes.append(
                    f"Intervals of {lines} are computed from {n_groups:,} random groups of rows. The standard error of "
                    f"their width is about {math.sqrt(0.5 / n_groups):.0%}."
                )
        return notes


def _by_system(argument: str, given: Any, names: Sequence[str], may_differ: bool) -> Mapping[str, Any]:
    """Return the value of an argument for each system, which is shared, or a dict if values `may_differ`."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    if not may_differ or set(given) != set(names):
        tasks = ", or for the task 'confidence'" if argument == "target" else ""
        raise ValueError(
            f"`{argument}` must be shared by all systems, or contain the name of each with `ids`{tasks}, got "
            f"{first_of(given) or 'none'}. Pass one tensor, or the ids of the rows."
        )
    return given


class _SystemBatch(NamedTuple):
    """A batch of one system."""

    preds: Tensor
    target: Tensor
    weights: Tensor | None
    clusters: Any
    ids: Any
    samples: tuple[int, ...] = ()  # shape of the samples, known after a check

    @property
    def n_rows(self) -> int:
        """Length of the first axis."""
        return self.samples[0] if self.samples else 1

    @property
    def with_weight(self) -> Tensor:
        """Whether rows have a positive weight, bool `(n_rows,)`."""
        assert self.weights is not None
        return (self.weights != 0).unsqueeze(-1).flatten(1).any(-1)


def _check_classes(systems: Mapping[str, SystemBuilder]) -> None:
    """Raise ValueError if systems have different numbers of classes."""
    found = {n: name for name, each in systems.items() if (n := each.num_classes) is not None}
    if len(found) > 1:
        (n, a), (other, b), *_ = found.items()
        raise ValueError(
            f"`preds` must have the same number of classes for all systems, got {n} in system {shown(a)} and {other} "
            f"in system {shown(b)}. Pass predictions of the same classes."
        )


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
