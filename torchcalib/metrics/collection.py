"""Collection of metrics with shared input processing and synchronisation."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import signature
from itertools import starmap
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling
from torchmetrics.collections import MetricCollection
from torchmetrics.metric import Metric

from torchcalib.core.arguments import check_flag
from torchcalib.core.batch import has_sums_of_batch, states_after
from torchcalib.core.inputs import InputFormat
from torchcalib.core.pieces import LabelledRows, add_rows, detail_of, rows_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.saved import contains_state, content_of, loading, saved_bytes
from torchcalib.core.tasks import as_tensors
from torchcalib.io.errors import quoted
from torchcalib.metrics.base import RULED_OUT, CalibrationMetric
from torchcalib.metrics.engine import (
    UpdatesFromHidden,
    refuse_if_captured,
    refuse_if_synced,
    unchanged_on_error,
    unsynced_on_error,
)
from torchcalib.metrics.sync import dropped_over_ranks, synced_states
from torchcalib.ops.softmax_stats import Detail

_KIND = "states of a collection"  # of the saved form


class CalibrationCollection(UpdatesFromHidden, MetricCollection):
    """Collection of torchcalib metrics that are updated and synchronised together.

    Each batch is validated once. Metrics with the same input format and accumulator share the sums or samples of the
    batch. All states are synchronised in two collectives per process group. Every metric has its own state. If
    an update, or loading a state, fails for one metric, all metrics are unchanged.

    Args:
        metrics: A metric, a list of metrics, or a dict of metrics by name, as for `torchmetrics.MetricCollection`.
        *additional_metrics: Further metrics.
        prefix: Prefix for the keys of `compute`.
        postfix: Postfix for the keys of `compute`.
        persistent: Include the states of all metrics in `state_dict`, including metrics added later; see
            `CalibrationMetric.state_dict`.

    Raises:
        TypeError: For a metric from another package.

    Example:
        >>> import torch
        >>> from torchcalib import ECE, NLL, CalibrationCollection
        >>> metrics = CalibrationCollection([NLL(task="binary"), ECE(task="binary", n_bins=10)])
        >>> metrics.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> {name: round(value.item(), 4) for name, value in metrics.compute().items()}
        {'NLL': 0.2284, 'ECE': 0.2}
    """

    __jit_unused_properties__: ClassVar[list[str]] = ["compute_groups", "metric_state"]
    __jit_ignored_attributes__: ClassVar[list[str]] = ["_latest_readings"]

    def __init__(
        self,
        metrics: Any,
        *additional_metrics: Metric,
        prefix: str | None = None,
        postfix: str | None = None,
        persistent: bool = False,
    ) -> None:
        check_flag("persistent", persistent)
        self._latest_readings: tuple[Hashable, list[_Reading] | None] = ((), None)
        self._all_persistent = persistent  # before `super().__init__`, which calls `add_metrics`
        super().__init__(metrics, *additional_metrics, prefix=prefix, postfix=postfix, compute_groups=False)

    def add_metrics(self, metrics: Any, *additional_metrics: Metric) -> None:
        """Add metrics to the collection, as `torchmetrics.MetricCollection.add_metrics` does.

        Args:
            metrics: A metric, a list of metrics, or a dict of metrics by name.
            *additional_metrics: Further metrics.

        Raises:
            TypeError: For a metric from another package.
        """
        before = dict(self._modules)
        super().add_metrics(metrics, *additional_metrics)
        for name, metric in self._modules.items():
            if not isinstance(metric, CalibrationMetric):
                self._modules = before
                raise TypeError(
                    f"`metrics` must be torchcalib metrics, got {type(metric).__name__} as {name!r}. "
                    "Add metrics from other packages to a separate torchmetrics.MetricCollection."
                )
        if self._all_persistent:
            self.persistent(True)

    def update(  # type: ignore[override]  # MetricCollection also overrides ModuleDict.update incompatibly
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        groups: Tensor | None = None,
        clusters: Any = None,
        case: Any = None,
        sample_weight: Tensor | None = None,
    ) -> None:
        """Add a batch to the state of every metric.

        Args:
            preds: Probabilities or logits; see `CalibrationMetric.update`.
            target: Labels or soft targets; see `CalibrationMetric.update`.
            weights: Non-negative weight per sample.
            groups: Group number per sample, passed to every `ByGroup` metric in the collection.
            clusters: Cluster per sample, integers or text, passed to every `Clustered` and `Bootstrapped` metric in the
                collection. Other metrics treat rows as independent.
            case: Names of images, passed to every metric with `per_image`.
            sample_weight: Alias of `weights`.
        """
        if is_compiling():  # the compiler computes common operations once
            for metric in self._members():
                metric.update(preds, target, **_without_none(weights=weights, sample_weight=sample_weight))
            return
        is_plain = groups is None and clusters is None and case is None
        are_tensors = type(preds) is type(target) is Tensor and (weights is None or type(weights) is Tensor)
        if is_plain and are_tensors and sample_weight is None and self._are_added(preds, target, weights):
            return
        preds, target, weights = as_tensors(preds, target, weights, sample_weight)
        members = self._members()
        readings = self._readings(members, weights is not None, target.is_floating_point()) if is_plain else None
        if readings is not None:
            self._update_together(members, readings, preds, target, weights)
            return
        self._check_used(groups=groups, clusters=clusters, case=case)
        with self._sharing():
            # Omit keywords that are None: torchmetrics slowly filters keywords by the signature of every metric.
            given = _without_none(weights=weights, groups=groups, clusters=clusters, case=case)
            super().update(preds, target, **given)

    @torch.jit.unused
    def forward(
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        groups: Tensor | None = None,
        clusters: Any = None,
        case: Any = None,
        sample_weight: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Add a batch to every metric and return the differentiable values for this batch, by name; see `update`."""
        preds, target, weights = as_tensors(preds, target, weights, sample_weight)
        self._check_used(groups=groups, clusters=clusters, case=case)
        with self._sharing():
            given = _without_none(weights=weights, groups=groups, clusters=clusters, case=case)
            values: dict[str, Tensor] = super().forward(preds, target, **given)
        return values

    def _readings(self, members: list[Any], weighted: bool, floating: bool) -> "list[_Reading] | None":
        """Return the metrics by the conversion and the state that they share; None if some update in another way."""
        key = (weighted, floating, *map(id, members), *[id(vars(metric).get("input_format")) for metric in members])
        if key != self._latest_readings[0]:
            self._latest_readings = key, _readings_of(members, weighted, floating)
        readings = self._latest_readings[1]
        if readings is not None:
            for metric in members:
                is_replaced = getattr(metric.update, "adds_a_batch", False) is not True  # for example by a mock
                if is_replaced or metric.compute_on_cpu or metric._enable_grad or metric._is_synced:
                    return None
        return readings

    def _are_added(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> bool:
        """Add a batch of labels to all metrics by the pass of `core.pieces`, as `CalibrationMetric` does for one.

        Return False otherwise, also for invalid values. All metrics are then unchanged.
        """
        members: list[Any] = list(self._modules.values())
        readings = self._readings(members, weights is not None, False)
        if readings is None or not all(reading.takes_pieces for reading in readings):
            return False
        values = preds.detach() if preds.requires_grad else preds
        changes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for reading in readings:
            found = reading.changes_after(values, target, weights)
            if found is None:
                return False
            changes += found
        # Python handles an interrupt before or after this call, which runs no Python code. So all metrics change.
        deque(starmap(dict.update, changes), maxlen=0)
        return True

    @staticmethod
    def _update_together(
        members: list[CalibrationMetric[Any]],
        readings: "list[_Reading]",
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None,
    ) -> None:
        """Add a batch to all metrics. States are replaced after all of them have been computed."""
        states: list[tuple[CalibrationMetric[Any], Any]] = []
        shared: dict[Hashable, Any] = {}
        refuse_if_captured(members[0], preds)
        before = [(metric, vars(metric).copy()) for metric in members]
        try:
            with torch.no_grad():
                for reading in readings:
                    states += _states_after(reading, preds, target, weights, shared)
            for metric, state in states:
                metric.count_update(state)
                if preds.dim() > 2:
                    metric.keep_axis(preds, target)
        except BaseException:  # also KeyboardInterrupt
            for metric, attributes in before:
                vars(metric).update(attributes)
            raise

    def _check_used(self, **columns: Any) -> None:
        """Raise ValueError if groups, clusters or names of images are given and no metric uses them."""
        if columns["case"] is not None and all(m.images is None for m in self._members()):
            raise ValueError(
                "`case` must be None for a collection without `per_image` metrics, got a value. Create a metric with "
                "per_image=True."
            )
        for name, wrappers in (("groups", "`ByGroup`"), ("clusters", "`Clustered` or `Bootstrapped`")):
            if columns[name] is None or any(name in signature(m.update).parameters for m in self._members()):
                continue
            raise ValueError(
                f"`{name}` must be None for a collection without {wrappers} metrics, got a value. "
                f"Wrap a metric, for example {wrappers.split('`')[1]}(ECE(...))."
            )

    def compute(self) -> dict[str, Tensor]:
        """Return the values of all metrics by name, over all ranks if `torch.distributed` is running."""
        with self._synced():
            values: dict[str, Tensor] = super().compute()
        return values

    def n_dropped(self) -> dict[str, int]:
        """Return the number of rows dropped by each metric, by name; see `CalibrationMetric.n_dropped`."""
        over_ranks: dict[int, int] = {}  # keys are `id(metric)`, because torchmetrics overloads `==` for metrics
        for process_group, group in self._to_be_synced(lambda m: m.dist_sync_fn is None and m._would_sync).items():
            counts = dropped_over_ranks(group, process_group)
            over_ranks.update(zip(map(id, group), counts, strict=True))
        return {
            self._set_name(name): over_ranks[id(metric)] if id(metric) in over_ranks else metric.n_dropped()
            for name, metric in self._by_name().items()
        }

    def state_bytes(self) -> bytes:
        """Return the states of all metrics as bytes for `from_bytes`; see `CalibrationMetric.state_bytes`."""
        return saved_bytes(_KIND, {name: metric._content() for name, metric in self._by_name().items()})

    def from_bytes(self, content: bytes) -> Self:
        """Return a copy of this collection with states from `state_bytes`; see `CalibrationMetric.from_bytes`.

        Merge it by `merge_state` of its metrics.

        Raises:
            ValueError: If the bytes are damaged, or belong to other metrics or another format.
        """
        with loading(_KIND, "content", "`state_bytes`"):
            states = content_of(content, _KIND)
            saved = {f"{name}.{part}": value for name, state in states.items() for part, value in state.items()}
        for name, metric in self._by_name().items():
            metric._read_state("content", saved, f"{name}.")
        if others := states.keys() - self._by_name().keys():
            raise ValueError(
                f"`content` must contain the states of this collection only, got {quoted(sorted(others))}. "
                "Create both collections with the same metrics."
            )
        collection = deepcopy(self)
        collection.reset()
        collection.load_state_dict(saved, strict=False)
        return collection

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load states saved by `state_dict`. If this raises, all metrics are unchanged."""
        with unchanged_on_error(*self._members()):
            return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Validate the states of all metrics before torch loads them one by one."""
        for name, metric in self._by_name().items():
            member_prefix = f"{prefix}{name}."
            if contains_state(state_dict, member_prefix):
                refuse_if_synced(metric, "load_state_dict")
                metric._read_state("state_dict", state_dict, member_prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getitem__(self, key: str, copy_state: bool = True) -> CalibrationMetric[Any]:
        metric = super().__getitem__(key, copy_state)
        assert isinstance(metric, CalibrationMetric)  # checked by `add_metrics`
        return metric

    def _members(self) -> list[CalibrationMetric[Any]]:
        return list(self._by_name().values())

    def _by_name(self) -> dict[str, CalibrationMetric[Any]]:
        return {name: m for name, m in self._modules.items() if isinstance(m, CalibrationMetric)}

    def _to_be_synced(
        self, condition: Callable[[CalibrationMetric[Any]], bool]
    ) -> dict[Any, list[CalibrationMetric[Any]]]:
        """Return the metrics for which `condition` returns True, by process group."""
        groups: dict[Any, list[CalibrationMetric[Any]]] = defaultdict(list)
        for metric in self._members():
            if condition(metric):
                groups[metric.process_group].append(metric)
        return groups

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """Share one cache between all metrics within the `with` block. If the block raises, restore all metrics."""
        shared: dict[Hashable, Any] = {}
        with unchanged_on_error(*self._members()):
            for metric in self._members():
                vars(metric)["_shared"] = shared
            try:
                yield
            finally:
                for metric in self._members():
                    vars(metric)["_shared"] = None

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """Sync all metrics by two collectives per process group. Each unsyncs itself after its `compute`."""
        # Metrics with a cached value return it without a sync, as in torchmetrics.
        groups = self._to_be_synced(lambda m: m._computed is None and m.dist_sync_fn is None and m._would_sync)
        to_sync = [metric for group in groups.values() for metric in group]
        with ExitStack() as stack:
            for metric in to_sync:
                stack.enter_context(unsynced_on_error(metric))
            for process_group, group in groups.items():
                for metric, state in zip(group, synced_states(group, process_group), strict=True):
                    metric._cache = metric._copy_state_dict()
                    metric.state, metric._is_synced, metric._to_sync = state, True, False
            try:
                yield
            finally:
                for metric in to_sync:
                    metric._to_sync = metric.sync_on_compute


@dataclass
class _Reading:
    """Metrics of a collection that share the conversion of a batch."""

    input_format: InputFormat  # format of the shared conversion
    formats: list[InputFormat]  # distinct formats of the metrics, which check the batch
    by_state: list[list[CalibrationMetric[Any]]]  # metrics whose states for a batch are equal, in one list each
    sizes: set[int | None]  # numbers of classes that the formats require
    takes_pieces: bool  # whether the pass of `core.pieces` can add a batch to all metrics
    detail: Detail  # statistics of multi-class rows that they need
    joined: "_JoinedStates | None" = None  # states after the latest batch that was added by this pass

    def states_after(
        self, preds: Tensor, target: Tensor, weights: Tensor | None, shared: dict[Hashable, Any]
    ) -> list[tuple[CalibrationMetric[Any], Any]]:
        """Check a batch, with the errors of `CalibrationMetric.update`. Return the metrics with their states after it.

        Metrics with the same samples share them in the cache.
        """
        for metrics in self.by_state:
            for metric in metrics:
                refuse_if_synced(metric, "update")
                metric.check_device(preds)
        states: list[tuple[CalibrationMetric[Any], Any]] = []
        p = self._predictions(preds, target, weights)
        for metrics in self.by_state:
            batch = metrics[0].kind.from_predictions(p)
            states += [(metric, metric.added(batch, shared)) for metric in metrics]
        return states

    def changes_after(
        self, preds: Tensor, target: Tensor, weights: Tensor | None
    ) -> list[tuple[dict[str, Any], dict[str, Any]]] | None:
        """Return the attributes of each metric with their changes by a batch of labels; None if it is not added."""
        rows = rows_of(self.input_format, preds, target, weights)
        if rows is None or (self.sizes and self.sizes != {rows.n_classes}):
            return None  # a format raises the error
        if self.joined is None or not self.joined.is_current():
            if any(metric.device.type != "cpu" for metrics in self.by_state for metric in metrics):
                return None
            self.joined = _JoinedStates(self.by_state)
        changes = self.joined.changes_after(rows, self.detail)
        if changes is None:  # the states of the metrics, which a person may change, are not those of `joined`
            self.joined = None
        elif preds.dim() > 2:
            for attributes, of_metric in changes:
                of_metric["input_format"] = attributes["input_format"].following(preds, target)
        return changes

    def _predictions(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Predictions:
        metric = self.by_state[-1][-1]
        resolved = [each.resolved(preds, target, len(metric.batch_shape)) for each in self.formats]
        for each in resolved:
            each.check(preds, target, weights)
        return metric._read(self.input_format.preferring(resolved[0].axis), preds, target, weights)


class _JoinedStates:
    """Sums of several metrics on the CPU, one after another in an array, which a batch replaces in one step."""

    def __init__(self, by_state: list[list[CalibrationMetric[Any]]]) -> None:
        """Join the states of metrics. Those in one list have equal states after a batch if they were equal before."""
        self._metrics: list[tuple[CalibrationMetric[Any], str, int]] = []  # with the name and the number of the state
        self._kinds: list[Any] = []
        self._states: list[Tensor] = []
        for metrics in by_state:
            (name,) = metrics[0].state_names
            for metric in metrics:
                state = vars(metric)[name]
                if metric is metrics[0] or not torch.equal(state, self._states[-1]):
                    self._states.append(state)
                    self._kinds.append(metric.kind)
                self._metrics.append((metric, name, len(self._states) - 1))
        ends = np.cumsum([len(state) for state in self._states]).tolist()
        self._parts = [slice(end - len(state), end) for state, end in zip(self._states, ends, strict=True)]
        self._sums = torch.cat(self._states).numpy()

    def is_current(self) -> bool:
        """Return whether the metrics have the states of the latest changes."""
        states = self._states
        return all(vars(metric)[name] is states[k] for metric, name, k in self._metrics)

    def changes_after(self, rows: LabelledRows, detail: Detail) -> list[tuple[dict[str, Any], dict[str, Any]]] | None:
        """Return the attributes of each metric with their changes by a batch; None if the batch is invalid."""
        sums = self._sums.copy()
        parts = [sums[part] for part in self._parts]
        if not add_rows(rows, detail, self._kinds, parts):
            return None
        self._sums, self._states = sums, [torch.from_numpy(part) for part in parts]
        changes = []
        for metric, name, k in self._metrics:
            attributes = vars(metric)
            count = attributes["_update_count"] + 1
            changed = {name: self._states[k], "_computed": None, "_update_count": count, "_evidence": RULED_OUT}
            changes.append((attributes, changed))
        return changes


def _states_after(
    reading: _Reading, preds: Tensor, target: Tensor, weights: Tensor | None, shared: dict[Hashable, Any]
) -> list[tuple[CalibrationMetric[Any], Any]]:
    """Return `_Reading.states_after`, on an accelerator by one pass over the batch for all metrics that allow it."""
    by_pass: dict[bool, list[list[CalibrationMetric[Any]]]] = {True: [], False: []}
    for same in reading.by_state:
        by_pass[has_sums_of_batch(same[0].kind, reading.input_format.task)].append(same)
    metrics = [metric for same in by_pass[True] for metric in same]
    if preds.is_cpu or not metrics or any(m._is_synced or m.device != preds.device for m in metrics):
        return reading.states_after(preds, target, weights, shared)
    for how in reading.formats:
        how.resolved(preds, target).check(preds, target, weights)
    kinds, before = [metric.kind for metric in metrics], [metric.state for metric in metrics]
    after = states_after(reading.input_format, kinds, before, preds, target, weights)
    if after is None:
        return reading.states_after(preds, target, weights, shared)
    others = replace(reading, by_state=by_pass[False]) if by_pass[False] else None
    rest = [] if others is None else others.states_after(preds, target, weights, shared)
    return [*zip(metrics, after, strict=True), *rest]


def _readings_of(metrics: list[CalibrationMetric[Any]], weighted: bool, floating: bool) -> list[_Reading] | None:
    """Group metrics by the conversion and the state that they share.

    Return None if a metric has its own `update`, or is a member under two names, which counts each batch twice.
    """
    if len({id(metric) for metric in metrics}) < len(metrics):
        return None
    if not all(isinstance(metric, CalibrationMetric) for metric in metrics):
        return None
    by_conversion: dict[tuple[InputFormat, tuple[int, ...]], list[CalibrationMetric[Any]]] = defaultdict(list)
    for metric in metrics:
        if type(metric).update is not CalibrationMetric.update:
            return None
        by_conversion[metric.conversion_key(weighted, floating)].append(metric)
    readings = []
    for (input_format, _), sharing in by_conversion.items():
        by_state: dict[Hashable, list[CalibrationMetric[Any]]] = defaultdict(list)
        for metric in sharing:
            by_state[metric.kind].append(metric)
        formats: list[InputFormat] = list(dict.fromkeys(metric.input_format for metric in sharing))
        takes_pieces = all(metric.takes_pieces for metric in sharing)
        detail = detail_of((same[0].accumulator for same in by_state.values()), input_format.task)
        sizes = {how.num_classes for how in formats} - {None}
        readings.append(_Reading(input_format, formats, list(by_state.values()), sizes, takes_pieces, detail))
    return readings


def _without_none(**columns: Any) -> dict[str, Any]:
    return {name: column for name, column in columns.items() if column is not None}
