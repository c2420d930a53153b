"""`ReportBuilder`: compute a `Report` from batches of predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from operator import add
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack
from uuid import uuid4

import torch
from torch import Tensor

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.core.arguments import Task, check_in_all_batches
from torchcalib.core.arrays import check_has_values
from torchcalib.core.checks import MAX_COPIES, are_counts
from torchcalib.core.clusters import (
    cluster_numbers,
    determine_label,
    identifiers,
    in_clusters,
    num_clusters_for,
    numbered,
    of_samples,
)
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.gathering import exchanged, gathered_bytes
from torchcalib.core.groups import check_groups, numbered_groups
from torchcalib.core.inputs import InputFormat
from torchcalib.core.mistakes import Evidence, no_samples
from torchcalib.core.partition import AnyPartition, ClusterState, NamedPartState, NamedSums, Partition, SumsByPart
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sample_or_sketch import SampleOrSketchState
from torchcalib.core.sampled_partition import SampledPartition
from torchcalib.core.saved import saved_value
from torchcalib.core.state import SampleState, SumState
from torchcalib.core.sums import BinStats
from torchcalib.core.tasks import as_tensors, check_name_count, per_sample
from torchcalib.io.errors import shown
from torchcalib.io.source import Source
from torchcalib.io.text import parts_of_group, shown_group
from torchcalib.io.writing import write_whole
from torchcalib.reporting.assembling import report_of
from torchcalib.reporting.base import Builder, agreed
from torchcalib.reporting.buffer import PredictionBuffer
from torchcalib.reporting.calibration import fitted
from torchcalib.reporting.catalogue import BY_CLASS, Catalogue, bins_of, catalogue_of, check_size, counts_of
from torchcalib.reporting.lines import Data
from torchcalib.reporting.options import BuilderOptionsDict, ReportOptions
from torchcalib.reporting.testing import failure
from torchcalib.results.report import Report

_GATHER = "gather a report"  # call of all ranks, for errors
_GROUPS, _BY_CLUSTER = "groups", " by cluster"  # name of the sums of groups, and suffix of the names of sums by cluster

_MAX_CLUSTER_SUMS = 2**24  # maximum number of float64 sums by cluster for a mode (128 MB)
_MAX_CLUSTERS = 2**12  # maximum number of clusters in tests of errors over bins, if all predictions are available

T = TypeVar("T", bound=Calibrator)


class ReportBuilder(Builder):
    """Compute a `Report` from batches of predictions.

    `merge` adds the predictions of another builder, and `gather` merges the builders of all ranks. `save` and `load`
    move a builder between processes.

    Memory is bounded. Rank-based errors are exact for up to 2^24 samples. For more samples they are computed from a
    sketch of the probabilities; see `torchcalib.core.sample_or_sketch.SampleOrSketchState`. Calibration gains and
    bootstrap intervals are omitted above 2^20 samples or 2^26 predicted values, because they need all predictions.

    Args:
        task: `"binary"`, `"multiclass"`, `"multilabel"` or `"confidence"`; see `torchcalib.report`.
        source: origin of the predictions, such as file names, for the report.
        **options: see `torchcalib.reporting.options.BuilderOptionsDict`, without `weights`.

    Example:
        >>> import torch
        >>> builder = ReportBuilder(task="binary", class_names=["cat", "dog"])
        >>> for preds, target in (([0.2, 0.7], [0, 1]), ([0.9, 0.4], [1, 1])):
        ...     builder.update(torch.tensor(preds), torch.tensor(target))
        >>> builder.report().n
        4.0
    """

    KIND = "report state"
    _WRITERS = "`torchcalib report --save-state` or `ReportBuilder.save`"

    def __init__(self, *, task: Task, source: Source | None = None, **options: Unpack[BuilderOptionsDict]) -> None:
        super().__init__()
        self.source = source
        self._options = ReportOptions.from_arguments(task, options)
        self.input_format = self._options.input_format  # with the number of classes after the first batch
        self._has_groups: bool | None = None  # None before the first batch
        self._has_clusters: bool | None = None
        self._has_items = False  # whether an item on the first axis has several samples, such as pixels
        self._axis = -1  # class axis of the last batch; `fit` passes it to calibrators
        self._evidence = Evidence()  # evidence for mistakes in the batches of this builder, which is not saved
        self._buffer = PredictionBuffer(self.input_format)
        # Operations on the sums and samples, and their states, by name. Both are empty until the first batch determines
        # the number of classes.
        self._kinds: dict[str, Any] = {}
        self._states: dict[str, Any] = {}

    def update(
        self,
        preds: Tensor,
        target: Tensor,
        *,
        weights: Tensor | None = None,
        sample_weight: Tensor | None = None,
        groups: Any = None,
        group_names: Sequence[str] | None = None,
        clusters: Any = None,
    ) -> None:
        """Add a batch of predictions. If an error is raised, the builder is unchanged.

        Args:
            groups: group of each sample: text, empty for no group, or a number, -1 for no group. Several columns (a
                DataFrame, a dict or a list of arrays) form the groups "age=old, sex=f"; see `Report.slices`. Pass
                groups with all batches or with none.
            group_names: names of the groups, indexed by group number; None uses the numbers as names. Groups with the
                same name are merged, even if their numbers differ between batches.
            clusters: cluster of each sample, integers or text, or one for each item of the first axis. Only samples of
                different clusters are treated as independent. Pass clusters with all batches or with none.
        """
        preds, target, weights = as_tensors(preds, target, weights, sample_weight, **self.input_format.conversion)
        check_has_values("preds", preds)
        on_cpu = preds.device.type == "cpu"
        evidence = replace(self._evidence)
        p = self.input_format.read(preds, target, weights, batch_shape=(), drop_invalid=not on_cpu, evidence=evidence)
        check_in_all_batches("groups", self._has_groups, groups is not None)
        check_in_all_batches("clusters", self._has_clusters, clusters is not None)
        resolved = self.input_format.resolved(preds, target)
        num_classes = None if resolved.task == "binary" or not preds.dim() else preds.shape[resolved.axis]
        input_format = replace(self.input_format, num_classes=num_classes)
        check_name_count(self._options.class_names, input_format.num_classes or 2)
        samples = torch.Size(input_format.samples_of(preds, target))
        if clusters is not None:
            p = in_clusters(p, of_samples(identifiers(clusters, preds.device), samples))
        kinds = self._kinds or self._kinds_of(input_format)
        are_whole = are_counts(p.weights if p.weighted else None)
        batch: dict[str, Any] = {}
        for name, kind in kinds.items():
            if isinstance(kind, NamedPartState):
                if groups is not None:
                    numbers, names = numbered_groups(groups, group_names, preds.device, samples, keep_partial=True)
                    numbers = per_sample("groups", numbers, preds)
                    check_groups(numbers, preds.device, samples)
                    batch[name] = kind.from_groups(p, numbers, names)
            elif (are_whole or not is_ranked(kind)) and (clusters is not None or not isinstance(kind, ClusterState)):
                batch[name] = kind.detach(kind.from_predictions(p))
        buffer = self._buffer + self._buffer.from_predictions(p) if self._is_buffered else self._buffer
        states = self._sum(kinds, self._states, batch)
        input_format = input_format.following(preds, target)
        # An interrupted update changes nothing: no call of the package follows.
        self._kinds, self._states, self._buffer, self._evidence = kinds, states, buffer, evidence
        self._axis, self.input_format = resolved.axis, input_format
        self._has_groups, self._has_clusters = groups is not None, clusters is not None
        self._has_items |= prod(samples[1:]) > 1
        self._parts = self._parts or {uuid4().hex: ""}

    def report(self, source: Mapping[str, Any] | None = None) -> Report:
        """Return the report on all predictions added so far.

        Args:
            source: origin of the predictions, as a dict such as `{"file": "valid.npz"}`; None uses the `source` of the
                builder.

        Raises:
            ValueError: if no predictions were added, or if invalid rows were added on CUDA.
        """
        words = {} if self.source is None else self.source.in_words()
        return report_of(self.accumulated(), self._options, source or words)

    def accumulated(self) -> Data:
        """Return the data from which `report` computes all lines; it raises the same errors."""
        if BY_CLASS not in self._states or not bool((self._statistic(BY_CLASS).total > 0).any()):
            raise no_samples()
        n_dropped = self._dropped()
        p, why_not = self._buffered()
        ranked = self._ranked
        # float64 represents counts up to `MAX_COPIES` exactly. Rank-based errors need exact counts.
        too_many = bool(self._statistic(BY_CLASS).total.sum() > MAX_COPIES)
        names = [*self.catalogue.accumulators, *counts_of(self._options.task)]
        names = [name for name in names if name in self._states and not (too_many and name in ranked)]
        return Data(
            catalogue=self.catalogue,
            statistics={name: self._statistic(name) for name in names},
            has_labels=too_many or all(kind.has_labels(self._states[name]) for name, kind in ranked.items()),
            predictions=p,
            why_not=why_not,
            resolution=next((kind.resolution(self._states[name]) for name, kind in ranked.items()), None),
            n_rows=next((kind.n_rows(self._states[name]) for name, kind in ranked.items()), None),
            clusters=self._clusters(p) if self._has_clusters else None,
            clusters_determine_label=p is not None and determine_label(p),
            **self._groups(),
            n_dropped=n_dropped,
            has_several_samples_per_item=self._has_items and not self._has_clusters,
        )

    @property
    def catalogue(self) -> Catalogue:
        """The metrics of the report."""
        options = self._options
        kind = {"are_confidences": options.are_confidences, "with_classes": options.with_classes}
        return catalogue_of(options.task, **options.bins, **kind)

    @property
    def _is_buffered(self) -> bool:
        return self._options.with_calibration or self._options.with_intervals

    @property
    def main_bins(self) -> BinStats:
        """Sums over the equal-width bins of the main mode. There must be predictions."""
        bins: BinStats = self._statistic(bins_of(self.catalogue.modes[0]))
        return bins

    def _statistic(self, name: str) -> Any:
        """Return accumulated sums or samples, such as `BinStats`."""
        return self._kinds[name].statistic(self._states[name])

    def _groups(self) -> dict[str, Any]:
        """Return the names and the bins of the groups, and of the combinations of several columns, for `Data`."""
        if not self._has_groups:
            return {}
        kind, state = self._kinds[_GROUPS], self._states[_GROUPS]
        parts = list(map(parts_of_group, state.names))
        n_columns = {len(each) for each in parts}
        if n_columns <= {1}:
            return {"groups": (state.names, kind.statistic(state))}
        complete = [k for k, each in enumerate(parts) if all(each)]
        names = tuple(shown_group(state.names[k]) for k in complete)
        groups = (names, kind.statistic(NamedSums(names, state.sums[complete], state.noise_flag[complete])))
        return {"groups": groups, **({"combinations": (parts, kind.statistic(state))} if len(n_columns) == 1 else {})}

    @property
    def _ranked(self) -> dict[str, SampleOrSketchState]:
        """Operations on the ranked samples, by name; empty if any weight is fractional."""
        return {name: self._kinds[name] for name in self._states if isinstance(self._kinds[name], SampleOrSketchState)}

    def _clusters(self, p: Predictions | None) -> dict[str, AnyPartition]:
        """Return sums over bins by cluster for each mode, and ranked samples if `p` has all predictions.

        With `p` and small sums, up to 4,096 clusters are not merged.
        """
        found: dict[str, AnyPartition] = {}
        for name, kind in self._kinds.items():
            if not isinstance(kind, ClusterState):
                continue
            merged: Partition[Any] = self._statistic(name)
            if p is not None and p.groups is not None:
                of_all = self._kinds[name.removesuffix(_BY_CLUSTER)]
                numbers = numbered(p.groups, num_clusters_for(of_all.shape, _MAX_CLUSTERS))
                n = int(numbers.max()) + 1
                by_number: SumState[Any] = SumState(SumsByPart(merged.accumulator, n), (n, *kind.shape[1:]))
                state = by_number.from_predictions(p.in_groups(numbers, p.weights, p.n_invalid))
                merged = replace(merged, sums=by_number.statistic(state).sums)
            found[name.removesuffix(_BY_CLUSTER)] = merged
        if p is not None and p.groups is not None:
            for name, kind in self._ranked.items():
                found[name] = SampledPartition(kind.exact.accumulator.from_predictions(p), p.groups.reshape(-1), None)
        return found

    def _dropped(self) -> int:
        """Return the number of rows dropped by `nan_policy="drop"`; raise a ValueError if any row is invalid.

        On CUDA, `update` counts invalid rows without synchronising.
        """
        n_invalid, n_dropped = self._kinds[BY_CLASS].n_ignored(self._states[BY_CLASS]).long().tolist()
        if n_invalid:
            raise ValueError(
                f"`preds` and `target` must be valid, got {n_invalid} rows with NaN, or with values or labels out of "
                "range. Add the data on the CPU to get a detailed error."
            )
        return int(n_dropped)

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
        return self._buffer.why_not

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
        self._dropped()
        fit = fitted(calibrator, self._buffer.predictions(), self._axis, self.input_format.positive_classes)
        fit.warn()
        return fit

    @property
    def num_classes(self) -> int | None:
        """Number of classes of the predictions; None for a binary task, and before the first batch."""
        return self.input_format.num_classes

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
        self._check_other(other)
        source = self.source or other.source
        if self._states and other._states:
            source = None if self.source is None or other.source is None else self.source + other.source
        has_groups = agreed("groups", self._has_groups, other._has_groups)
        has_clusters = agreed("clusters", self._has_clusters, other._has_clusters)
        if other._states:
            kinds = self._kinds or other._kinds
            states, buffer = self._sum(kinds, self._states, other._states), self._buffer + other._buffer
            self._kinds, self._states, self._buffer, self._axis = kinds, states, buffer, other._axis
        self.input_format = replace(self.input_format, num_classes=self.num_classes or other.num_classes)
        if (axis := other.input_format.likely_axis) is not None:
            self.input_format = self.input_format.preferring(axis)
        self._has_groups, self._has_clusters = has_groups, has_clusters
        self._has_items |= other._has_items
        self._parts = self._parts | other._parts
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
        write_whole(Path(path), self.state_bytes())

    @classmethod
    def load(cls, path: str | Path) -> Self:
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
            ...         parts[k].save(f"{folder}/part{k}.safetensors")
            ...     whole = ReportBuilder.load(f"{folder}/part0.safetensors")
            ...     whole.merge(ReportBuilder.load(f"{folder}/part1.safetensors"))
            >>> whole.report().n
            4.0
        """
        return cls._loaded(Path(path), str(path))

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
        sizes = exchanged(_GATHER, self.held, process_group)
        is_first = torch.distributed.get_rank(process_group) == 0
        content, whole, problem = b"", None, None
        try:
            self.limit(*map(sum, zip(*sizes, strict=True)))
            content = b"" if is_first else self.state_bytes()
        except Exception as error:  # for example too little memory; without an answer, other ranks would wait
            problem = error
        received = gathered_bytes(_GATHER, content, process_group, problem=problem)
        try:
            if is_first:
                whole = reduce(add, map(ReportBuilder.from_bytes, received[1:]), self)
        except Exception as error:  # all ranks raise the same errors
            problem = error
        exchanged(_GATHER, (), process_group, problem=problem)
        return whole

    @property
    def held(self) -> tuple[int, int, int]:
        """Numbers of samples and of predicted values added to the buffer, and number of exact ranked samples."""
        n_ranked = max((kind.size(self._states[name]) for name, kind in self._ranked.items()), default=0)
        return self._buffer.n_samples, self._buffer.n_values, n_ranked

    def limit(self, n_samples: int, n_values: int, n_ranked: int) -> None:
        """Apply the size limits to the totals of `held` over all builders to be merged."""
        self._buffer = self._buffer.limited(n_samples, n_values)
        for name, kind in self._ranked.items():
            self._states[name] = kind.limited(self._states[name], n_ranked)

    def state(self) -> dict[str, Any]:
        """Return settings and accumulated data as a dict of tensors and Python values, which `of_state` restores."""
        return {
            "settings": self.settings,
            "source": None if self.source is None else self.source.state(),
            "num_classes": self.input_format.num_classes,
            "class_axis": self._axis,
            "likely_axis": self.input_format.likely_axis,
            "has_items": self._has_items,
            "parts": dict(sorted(self._parts.items())),
            "states": {name: list(self._kinds[name].parts(state)) for name, state in self._states.items()},
            "predictions": self._buffer.state() if self._is_buffered and self._states else None,
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return a builder on the CPU from a result of `state()`. An invalid state raises an exception of any type."""
        settings, source = saved_value(state, "settings", dict), state.get("source")
        builder = cls(**settings, source=None if source is None else Source.of_state(source))
        builder._take_parts(state)
        saved = saved_value(state, "states", dict)
        if not saved:
            return builder
        if builder.input_format.task != "binary":
            builder.input_format = replace(builder.input_format, num_classes=saved_value(state, "num_classes", int))
        builder._axis = saved_value(state, "class_axis", int)
        if (axis := state["likely_axis"]) is not None:
            if type(axis) is not int or axis not in (-1, 1):
                raise ValueError(f"`likely_axis` must be None, -1 or 1, got {shown(axis)}. The file is corrupt.")
            builder.input_format = builder.input_format.preferring(axis)
        kinds = builder._kinds_of(builder.input_format)
        by_cluster = {name for name, kind in kinds.items() if isinstance(kind, ClusterState)}
        ranked = {name for name, kind in kinds.items() if is_ranked(kind)}
        required = kinds.keys() - {_GROUPS} - by_cluster - ranked
        if not required <= saved.keys() <= kinds.keys() or by_cluster & saved.keys() not in (set(), by_cluster):
            raise ValueError(
                f"`states` must have {', '.join(kinds)}, got {', '.join(map(str, saved))}. The file is corrupt."
            )
        builder._kinds = kinds
        builder._states = {name: _loaded(name, kinds[name], saved[name]) for name in kinds if name in saved}
        builder._has_groups, builder._has_clusters = _GROUPS in saved, by_cluster <= saved.keys()
        builder._has_items = saved_value(state, "has_items", bool)
        if builder._is_buffered:
            builder._buffer = PredictionBuffer(builder.input_format).loaded(saved_value(state, "predictions", dict))
        return builder

    def _sum(self, kinds: Mapping[str, Any], states: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        """Add states by name. Ranked samples are dropped unless both mappings contain them."""
        if not states:
            return dict(more)
        return {name: kinds[name].add(state, more[name]) for name, state in states.items() if name in more}

    def _kinds_of(self, input_format: InputFormat) -> dict[str, Any]:
        """Return the operations on all states, by name. Sums of more than 1 GiB raise a ValueError."""
        task, num_classes = input_format.read_as, input_format.num_classes
        if num_classes is not None:
            check_size(task, num_classes, self._options.n_bins)
        kinds: dict[str, Any] = {}
        accumulators = {**self.catalogue.accumulators, **counts_of(task)}
        for name, accumulator in accumulators.items():
            if isinstance(accumulator, ExactSample):
                lead = accumulator.leading_shape(task, num_classes)
                kinds[name] = SampleOrSketchState(SampleState(accumulator, lead, input_format.from_logits))
                continue
            shape = accumulator.shape(task, num_classes)
            kinds[name] = SumState(accumulator, shape)
            if isinstance(accumulator, EqualWidthBins):
                kinds.setdefault(_GROUPS, NamedPartState(accumulator, shape))  # the bins of the main mode
                is_main, n_clusters = kinds[_GROUPS].accumulator is accumulator, num_clusters_for(shape)
                if is_main or n_clusters * prod(shape) <= _MAX_CLUSTER_SUMS:
                    # Tests of clusters need only weights and residuals.
                    residuals = replace(accumulator, with_noise=False, with_ecd=False)
                    shape = (n_clusters, *residuals.shape(task, num_classes))
                    kinds[name + _BY_CLUSTER] = ClusterState(SumsByPart(residuals, n_clusters, cluster_numbers), shape)
        return kinds


def is_ranked(kind: Any) -> bool:
    """Return whether a state consists of ranked samples, which fractional weights do not allow."""
    return isinstance(kind, SampleState | SampleOrSketchState)


def _loaded(name: str, kind: Any, parts: Any) -> Any:
    """Return a state from its saved parts, after a check of their sizes and values: the file may be malicious."""
    state = None
    if isinstance(parts, list):
        with torch.device("meta"):  # allocates no memory: a damaged file may declare any number of classes
            expected = _numel(kind.parts(kind.empty()))
        if not isinstance(kind, SumState) or _numel(parts) == expected:
            state = kind.check(parts, kind.empty())
    if state is None:
        found = f"{_numel(parts):,} numbers" if isinstance(parts, list) else shown(parts)
        raise ValueError(
            f"`states` must have the parts of {name!r} with their types and shapes, got {found} that do not fit. "
            "The file is corrupt: save the report again."
        )
    return state


def _numel(parts: Sequence[Any]) -> int:
    return sum(part.numel() for part in parts if isinstance(part, Tensor))
