"""`ReportBuilder`: compute a `Report` from batches of predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack
from uuid import uuid4

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.core.arguments import Task, check_in_all_batches
from torchcalib.core.arrays import as_tensors, check_has_values
from torchcalib.core.checks import MAX_COPIES, are_counts
from torchcalib.core.clusters import (
    ClusteredSample,
    ClusteredSums,
    Clusters,
    determine_label,
    identifiers,
    in_clusters,
    num_clusters_for,
    numbered,
    of_samples,
)
from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.groups import check_groups
from torchcalib.core.inputs import InputFormat
from torchcalib.core.mistakes import Evidence, no_samples
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.state import SampleState, SumState
from torchcalib.core.tasks import check_name_count
from torchcalib.io.saved import saved_value, write_whole
from torchcalib.io.source import Source
from torchcalib.metrics.groups.sums import SumsByCluster, SumsByGroup
from torchcalib.metrics.proper_scores import NLL
from torchcalib.reporting.accumulators import Accumulated, Accumulator, DistinctClusters, check_size
from torchcalib.reporting.assembling import Collected, report_of
from torchcalib.reporting.buffer import PredictionBuffer
from torchcalib.reporting.calibration import fitted
from torchcalib.reporting.groups import GroupBins
from torchcalib.reporting.lines import (
    Statistics,
    bin_estimators,
    cluster_sums_name,
    has_table,
    sample_name,
    score_estimators,
)
from torchcalib.reporting.options import ReportOptions, ReportOptionsDict
from torchcalib.reporting.sample_or_sketch import SampleOrSketch
from torchcalib.reporting.testing import failure
from torchcalib.results.report import Report

BUFFER, GROUPS, CLUSTERS = "predictions", "groups", "clusters"
"""Names of the accumulators for predictions, for groups, and for the identifiers of clusters."""

_MAX_CLUSTER_SUMS = 2**24  # maximum number of float64 sums by cluster for a mode (128 MB)
_MAX_CLUSTERS = 2**12  # maximum number of clusters in tests of errors over bins, if all predictions are available

T = TypeVar("T", bound=Calibrator)


class ReportBuilder:
    """Compute a `Report` from batches of predictions.

    `merge` adds the predictions of another builder, and `gather` merges the builders of all ranks. `save` and `load`
    move a builder between processes.

    Memory is bounded. Rank-based errors are exact for up to 2^24 samples. For more samples they are computed from a
    sketch of the probabilities; see `torchcalib.reporting.sample_or_sketch.SampleOrSketch`. Calibration gains and
    bootstrap intervals are omitted above 2^20 samples or 2^26 predicted values, because they need all predictions.

    Args:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        source: origin of the predictions, such as file names, for the report.
        **options: see `torchcalib.reporting.options.ReportOptionsDict`, without `weights`.

    Example:
        >>> import torch
        >>> builder = ReportBuilder(task="binary", class_names=["cat", "dog"])
        >>> for preds, target in (([0.2, 0.7], [0, 1]), ([0.9, 0.4], [1, 1])):
        ...     builder.update(torch.tensor(preds), torch.tensor(target))
        >>> builder.report().n
        4.0
    """

    def __init__(self, *, task: Task, source: Source | None = None, **options: Unpack[ReportOptionsDict]) -> None:
        self.source = source
        self._options = ReportOptions.of(task, options)
        self._format, self._task = self._options.input_format, self._options.task
        self._parts: frozenset[str] = frozenset()  # identifiers of all merged builders, to reject a second merge
        self._has_groups: bool | None = None  # None before the first batch
        self._has_clusters: bool | None = None
        self._has_items = False  # whether an item on the first axis has several samples, such as pixels
        self._axis = -1  # class axis of the last batch; `fit` passes it to calibrators
        self._evidence = Evidence()  # evidence for mistakes in the batches of this builder, which is not saved
        self._accumulators: dict[str, Any] = {}  # empty until the first batch determines the number of classes

    def update(
        self,
        preds: Tensor,
        target: Tensor,
        *,
        weights: Tensor | None = None,
        sample_weight: Tensor | None = None,
        groups: Tensor | None = None,
        group_names: Sequence[str] | None = None,
        clusters: Any = None,
    ) -> None:
        """Add a batch of predictions. If an error is raised, the builder is unchanged.

        Args:
            preds: probabilities or logits; see `torchcalib.report`.
            target: labels or soft targets.
            weights: non-negative weight of each sample.
            sample_weight: alias of `weights`, as in scikit-learn.
            groups: group number of each sample, or -1 for no group. Pass groups with all batches or with none.
            group_names: names of the groups, indexed by group number; None uses the numbers as names. Groups with the
                same name are merged, even if their numbers differ between batches.
            clusters: cluster of each sample, integers or text, or one for each item of the first axis. Only samples of
                different clusters are treated as independent. Pass clusters with all batches or with none.

        Raises:
            TypeError, ValueError: for invalid input.
        """
        preds, target, weights = as_tensors(preds, target, weights, sample_weight)
        check_has_values("preds", preds)
        on_cpu = preds.device.type == "cpu"
        evidence = replace(self._evidence)
        p = self._format.read(preds, target, weights, batch_shape=(), drop_invalid=not on_cpu, evidence=evidence)
        check_in_all_batches("groups", self._has_groups, groups is not None)
        check_in_all_batches("clusters", self._has_clusters, clusters is not None)
        input_format = replace(self._format, num_classes=self._classes_of(preds, target))
        check_name_count(self._options.class_names, input_format.num_classes or 2)
        samples = torch.Size(input_format.samples_of(preds, target))
        if clusters is not None:
            p = in_clusters(p, of_samples(identifiers(clusters, preds.device), samples))
        empty = self._accumulators or self._empty(input_format)
        counts = are_counts(p.weights if p.weighted else None)
        batch = {
            name: each.from_predictions(p)
            for name, each in empty.items()
            if name != GROUPS
            and (clusters is not None or not is_of_clusters(name))
            and (counts or not isinstance(each, SampleOrSketch))
        }
        if groups is not None:
            check_groups(groups, preds.device, samples)
            batch[GROUPS] = empty[GROUPS].of_rows(p, groups, group_names)
        self._accumulators = _sum(self._accumulators, batch) if self._accumulators else batch
        self._evidence, self._axis = evidence, self._format.resolved(preds, target).axis
        self._format = input_format.following(preds, target)
        self._has_groups, self._has_clusters = groups is not None, clusters is not None
        self._has_items |= prod(samples[1:]) > 1
        self._parts = self._parts or frozenset((uuid4().hex,))

    def report(self, source: Mapping[str, Any] | None = None) -> Report:
        """Return the report on all predictions added so far.

        Args:
            source: origin of the predictions, as a dict such as `{"file": "valid.npz"}`; None uses the `source` of the
                builder.

        Raises:
            ValueError: if no predictions were added, or if invalid rows were added on CUDA.
        """
        p, why_not = self._buffered()
        statistics = self._statistics(p)
        options = {name: getattr(self._format, name) for name in ("from_logits", "ignore_index", "nan_policy")}
        ranked = self._ranked_samples
        return report_of(
            Collected(
                statistics=statistics,
                predictions=p,
                why_not=why_not,
                has_ranked_samples=bool(ranked),
                resolution=next((sample.resolution for sample in ranked.values()), None),
                groups=self._accumulators[GROUPS] if self._has_groups else None,
                has_several_samples_per_item=self._has_items and not self._has_clusters,
                n_dropped=self._accumulators[NLL.__name__].n_ignored[1],
                class_names=() if self._format.positive_classes is not None else self._options.class_names,
                with_calibration=self._options.with_calibration,
                with_intervals=self._options.with_intervals,
                settings=self._options.bins,
                options=options,
                source=source or ({} if self.source is None else self.source.in_words()),
            )
        )

    def _statistics(self, p: Predictions | None) -> Statistics:
        """Return the accumulated sums and ranked samples; those by cluster are computed from all predictions `p`.

        Raises:
            ValueError: if no predictions were added, or if invalid rows were added on CUDA.
        """
        score_sums = self._accumulators.get(NLL.__name__)
        if score_sums is None or not bool((score_sums.statistic.total > 0).any()):
            raise no_samples()
        self._raise_if_invalid()
        ranked = self._ranked_samples if score_sums.statistic.total.sum() <= MAX_COPIES else {}
        return Statistics(
            task=self._task,
            n_bins=self._options.n_bins,
            right=self._options.right,
            sums={name: a.statistic for name, a in self._accumulators.items() if isinstance(a, Accumulated)},
            samples={mode: sample.statistic for mode, sample in ranked.items()},
            clusters=self._clusters(p) if self._has_clusters else None,
            clusters_determine_label=p is not None and determine_label(p),
            has_labels=all(sample.has_labels for sample in ranked.values()),
            are_confidences=self.source is not None and self.source.are_confidences,
        )

    def _clusters(self, p: Predictions | None) -> dict[str, Clusters]:
        """Return sums over bins by cluster for each mode, and ranked samples if all predictions are available.

        Sums of up to 4,096 clusters are not merged if all predictions are available and the sums are small.
        """
        n_distinct = self._accumulators[CLUSTERS].number
        found: dict[str, Clusters] = {}
        for name, each in self._accumulators.items():
            if is_cluster_sums(name):
                merged: ClusteredSums[Any] = each.statistic
                if p is not None and p.groups is not None:
                    numbers = numbered(p.groups, num_clusters_for(each.kind.shape[1:], _MAX_CLUSTERS))
                    n = int(numbers.max()) + 1
                    accumulator: Any = each.kind.accumulator
                    by_number = SumsByGroup(accumulator.accumulator, n)
                    kind: SumState[Any] = SumState(by_number, (n, *each.kind.shape[1:]))
                    sums = kind.statistic(kind.from_predictions(p.in_groups(numbers, p.weights, p.n_invalid))).sums
                    merged = replace(merged, sums=sums)
                found[name] = replace(merged, n_distinct=n_distinct)
        if p is not None and p.groups is not None:
            for mode in self._ranked_samples:
                found[sample_name(mode)] = ClusteredSample.from_sample(ExactSample(mode).from_predictions(p), p.groups)
        return found

    @property
    def _ranked_samples(self) -> dict[NamedMode, SampleOrSketch]:
        """Accumulators of ranked samples by mode; empty if any weight is fractional."""
        names = {mode: sample_name(mode) for mode in modes_of(self._task)}
        return {r: self._accumulators[name] for r, name in names.items() if name in self._accumulators}

    @property
    def _buffer(self) -> PredictionBuffer:
        buffer: PredictionBuffer = self._accumulators.get(BUFFER, PredictionBuffer(self._format))
        return buffer

    def _raise_if_invalid(self) -> None:
        """Raise a ValueError if invalid rows were added on CUDA, where `update` counts them without synchronising."""
        if n_invalid := self._accumulators[NLL.__name__].n_ignored[0]:
            raise ValueError(
                f"`preds` and `target` must be valid, got {n_invalid} rows with NaN, or with values or labels out of "
                "range. Add the data on the CPU to get a detailed error."
            )

    def _buffered(self) -> tuple[Predictions | None, str]:
        """Return all predictions and an empty string, or None and the reason why they are not available."""
        if self._buffer.why_not or not self._buffer.pieces:
            return None, self._buffer.why_not
        try:
            return self._buffer.predictions(), ""
        except RuntimeError as error:  # usually out of memory; the rest of the report needs less memory
            return None, f"concatenating the predictions failed with {failure(error)}"

    def why_no_calibration(self) -> str:
        """Return the reason why `fit` cannot fit a calibrator, as a clause; an empty string if it can."""
        if not self._options.with_calibration:
            return "with_calibration is False"
        return self._buffer.why_not or ("some targets are soft" if self._buffer.has_shares else "")

    def fit(self, calibrator: T) -> T:
        """Return a copy of a calibrator, fitted to all predictions added so far.

        Args:
            calibrator: the calibrator to copy, for example `report().calibration.calibrator`.

        Returns:
            The fitted copy. Its input must have the class axis of the last batch.

        Raises:
            ValueError: if the buffer contains no predictions with labels, or the calibrator does not support the task.

        Warns:
            UserWarning: see `Calibrator.fit`.
        """
        why_not = self.why_no_calibration() or ("" if self._buffer.pieces else "no predictions were added")
        if why_not:
            raise ValueError(
                f"`fit` must have buffered predictions with labels, got none: {why_not}. "
                "Call `calibrator.fit(preds, target)`."
            )
        self._raise_if_invalid()
        fit = fitted(calibrator, self._buffer.predictions(), self._axis, self._format.positive_classes)
        fit.warn()
        return fit

    @property
    def settings(self) -> dict[str, Any]:
        """All arguments of the builder except `source`, as a dict of plain Python values."""
        return self._options.to_dict()

    def merge(self, other: "ReportBuilder") -> None:
        """Append the predictions of another builder.

        The result is the same as after adding all predictions to this builder, up to rounding of sums. The size limits
        apply to the merged predictions.

        Args:
            other: a builder with the same arguments; it is unchanged.

        Raises:
            ValueError: if the arguments or file formats differ, or if `other` was merged before. The builder is then
                unchanged.
        """
        source = self._joined_source(other)
        groups_given = {self._has_groups, other._has_groups} - {None}
        if len(groups_given) > 1:
            raise ValueError(
                "`other` must have groups if this builder has groups, got groups in only one of them. "
                "Pass `groups` to `update` of both builders."
            )
        clusters_given = {self._has_clusters, other._has_clusters} - {None}
        if len(clusters_given) > 1:
            raise ValueError(
                "`other` must have clusters if this builder has clusters, got clusters in only one of them. "
                "Pass `clusters` to `update` of both builders."
            )
        if self._parts & other._parts:
            raise ValueError(
                "`other` must contain no predictions of this builder, got a part that was merged before. "
                "Merge each builder once."
            )
        if other._accumulators:
            self._axis = other._axis
        if not self._accumulators:
            self._accumulators = dict(other._accumulators)
        elif other._accumulators:
            self._accumulators = _sum(self._accumulators, other._accumulators)
        self._format = replace(self._format, num_classes=self._format.num_classes or other._format.num_classes)
        self._has_groups = next(iter(groups_given), None)
        self._has_clusters = next(iter(clusters_given), None)
        self._has_items |= other._has_items
        self._parts |= other._parts
        self.source = source

    def __add__(self, other: "ReportBuilder") -> "ReportBuilder":
        """Return a new builder with the predictions of `self` and `other`; see `merge`."""
        both = ReportBuilder(**self.settings)
        both.merge(self)
        both.merge(other)
        return both

    def save(self, path: str | Path) -> None:
        """Write the state to a file. An interrupted write leaves no incomplete file.

        `ReportBuilder.load` restores the builder. The command `torchcalib merge FILE ...` computes one report from
        several files. A file contains sums, ranked samples, and a copy of the predictions if the builder stores one. It
        is much smaller if both `with_calibration` and `with_intervals` are False.

        Args:
            path: path of the file. An existing file is replaced.

        Raises:
            OSError: if the file cannot be written.
        """
        from torchcalib.reporting.saving import state_bytes

        write_whole(Path(path), state_bytes(self))

    @classmethod
    def load(cls, path: str | Path) -> "ReportBuilder":
        """Load a builder from a file that `save` or `torchcalib report --save-state` wrote.

        Untrusted files are safe: no code is executed, all values are checked, and the file size limits the memory.

        Args:
            path: path of the file.

        Returns:
            The builder, on the CPU.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the file is not a report state, is damaged, or has another version.

        Example:
            >>> import tempfile, torch
            >>> parts = [ReportBuilder(task="binary"), ReportBuilder(task="binary")]
            >>> parts[0].update(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
            >>> parts[1].update(torch.tensor([0.9, 0.4]), torch.tensor([1, 1]))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for k in range(2):
            ...         parts[k].save(f"{folder}/part{k}.pt")
            ...     whole = ReportBuilder.load(f"{folder}/part0.pt")
            ...     whole.merge(ReportBuilder.load(f"{folder}/part1.pt"))
            >>> whole.report().n
            4.0
        """
        from torchcalib.reporting.saving import load_builder

        return load_builder(path)

    def gather(self, process_group: Any = None) -> "ReportBuilder | None":
        """Merge the builders of all ranks on rank 0, in the order of ranks. Every rank must call this method.

        All states are sent in one collective, between small ones for sizes and errors. Above a size limit, every rank
        drops its copy of the predictions, or converts its ranked samples to a sketch.

        Args:
            process_group: process group with backend Gloo or NCCL; None is the default group.

        Returns:
            The merged builder on rank 0 of the group, None on the other ranks.

        Raises:
            RuntimeError: the same error on all ranks if the builders cannot be merged, see `merge`; or if a rank does
                not answer.
        """
        from torchcalib.reporting.saving import merged_over_ranks

        return merged_over_ranks(self, process_group)

    def _joined_source(self, other: "ReportBuilder") -> Source | None:
        """Check that both builders have the same arguments, and return the source of the merged builder."""
        mine, theirs = self.settings, other.settings
        if self._accumulators and other._accumulators:
            mine["classes"], theirs["classes"] = self._format.num_classes, other._format.num_classes
        differing = [n for n in mine if mine[n] != theirs.get(n, mine[n]) and n != "validate_args"]
        if differing:
            found = ", ".join(f"{name}={theirs[name]!r} instead of {name}={mine[name]!r}" for name in differing)
            raise ValueError(
                f"`other` must have the same arguments, got {found}. Create all parts with the same arguments."
            )
        if not (self._accumulators and other._accumulators):
            return self.source or other.source
        return None if self.source is None or other.source is None else self.source + other.source

    @property
    def held(self) -> tuple[int, int, int]:
        """Numbers of samples and of predicted values added to the buffer, and number of exact ranked samples."""
        n_ranked = max((sample.size for sample in self._ranked_samples.values()), default=0)
        return self._buffer.n_samples, self._buffer.n_values, n_ranked

    def limit(self, n_samples: int, n_values: int, n_ranked: int) -> None:
        """Apply the size limits to the totals of `held` over all builders to be merged."""
        if BUFFER in self._accumulators:
            self._accumulators[BUFFER] = self._buffer.limited(n_samples, n_values)
        for mode, sample in self._ranked_samples.items():
            self._accumulators[sample_name(mode)] = sample.limited(n_ranked)

    def state(self) -> dict[str, Any]:
        """Return settings and accumulated data as a dict of tensors and Python values, which `of_state` restores."""
        return {
            "settings": self.settings,
            "source": None if self.source is None else self.source.state(),
            "num_classes": self._format.num_classes,
            "class_axis": self._axis,
            "has_items": self._has_items,
            "parts": sorted(self._parts),
            "accumulators": {name: each.state() for name, each in self._accumulators.items()},
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return a builder on the CPU, restored from a result of `state()`. The state is checked.

        Raises:
            Exception: of any type, if the state is invalid.
        """
        settings, source = saved_value(state, "settings", dict), state.get("source")
        builder = cls(**settings, source=None if source is None else Source.of_state(source))
        builder._parts = frozenset(map(str, saved_value(state, "parts", list)))
        saved = saved_value(state, "accumulators", dict)
        if not saved:
            return builder
        if builder._format.task != "binary":
            builder._format = replace(builder._format, num_classes=saved_value(state, "num_classes", int))
        builder._axis = saved_value(state, "class_axis", int)
        empty = builder._empty(builder._format)
        optional = {name for name in empty if name == GROUPS or is_of_clusters(name)}
        optional |= set(map(sample_name, modes_of(builder._task)))
        if not empty.keys() - optional <= saved.keys() <= empty.keys():
            raise ValueError(
                f"`accumulators` must have {', '.join(empty)}, got {', '.join(map(str, saved))}. The file is corrupt."
            )
        builder._accumulators = {name: each.loaded(saved[name]) for name, each in empty.items() if name in saved}
        builder._has_groups = GROUPS in saved
        builder._has_clusters = CLUSTERS in saved
        if builder._has_clusters != any(map(is_cluster_sums, saved)):
            raise ValueError(f"`accumulators` must have {CLUSTERS!r} with sums by cluster. The file is corrupt.")
        builder._has_items = saved_value(state, "has_items", bool)
        return builder

    def _classes_of(self, preds: Tensor, target: Tensor) -> int | None:
        """Return the number of classes or labels in `preds`; None for a binary task."""
        if self._format.task == "binary" or not preds.dim():
            return None
        return preds.shape[self._format.resolved(preds, target).axis]

    def _empty(self, input_format: InputFormat) -> dict[str, Any]:
        """Return a dict of empty accumulators by name. `input_format` must contain the number of classes.

        Raises:
            ValueError: if the sums would take more than 1 GiB.
        """
        task, num_classes = input_format.read_as, input_format.num_classes
        if num_classes is not None:
            check_size(task, num_classes, self._options.n_bins)
        bins = bin_estimators(task, **self._options.bins, with_noise=True)
        accumulators: dict[str, Accumulator] = {}
        for key, accumulator, *_ in (*score_estimators(task), *bins):
            accumulators[key] = Accumulated(SumState(accumulator, accumulator.shape(task, num_classes)))
        for key, accumulator, *_ in bins:
            shape = accumulator.shape(task, num_classes)
            by_cluster = SumsByCluster.for_shape(accumulator, shape)
            if key == bins[0].key or by_cluster.num_groups * prod(shape) <= _MAX_CLUSTER_SUMS:
                of_clusters: SumState[Any] = SumState(by_cluster, (by_cluster.num_groups, *shape))
                accumulators[cluster_sums_name(key)] = Accumulated(of_clusters)
        accumulators[CLUSTERS] = DistinctClusters()
        for mode in modes_of(task):
            if has_table(task, mode):
                sample = ExactSample(mode)
                kind = SampleState(sample, sample.lead(task, num_classes), input_format.from_logits)
                accumulators[sample_name(mode)] = SampleOrSketch.empty(kind)
        if self._options.with_calibration or self._options.with_intervals:
            accumulators[BUFFER] = PredictionBuffer(input_format)
        main = bins[0].accumulator
        return {**accumulators, GROUPS: GroupBins.empty(main, main.shape(task, num_classes))}


def is_cluster_sums(name: str) -> bool:
    """Return whether an accumulator has a name from `cluster_sums_name`."""
    return name.startswith(cluster_sums_name(""))


def is_of_clusters(name: str) -> bool:
    """Return whether an accumulator requires clusters."""
    return name == CLUSTERS or is_cluster_sums(name)


def _sum(mine: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Add accumulators by name. Ranked samples are dropped unless both mappings contain them."""
    return {name: each + others[name] for name, each in mine.items() if name in others}
