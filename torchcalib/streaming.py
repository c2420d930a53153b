"""Statistics as torchmetrics states: metrics that stream in constant memory and sync across ranks.

A metric's whole state is ONE tensor of sums, so adding a batch, merging two metrics and syncing ranks are each one
addition. `CalibrationCollection` reads the input once for all of its members and syncs them in one collective.
"""

import functools
import math
import zlib
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from torchcalib.kernels.row_stats import wide_dtype
from torchcalib.predictions import InputFormat, check_count
from torchcalib.statistics import Recipe, Sums

S = TypeVar("S", bound=Sums)


class StreamingMetric(Metric, Generic[S]):
    """A reading of sums that stream. A subclass names the sums (`recipe`) and reads them (`_value`).

    The state is float64 (on a device that has none it stays on the CPU) and keeps its dtype under `.to(dtype)`,
    `.half()` and Lightning's precision plugins. An `update` or `forward` that raises leaves the metric as it was.
    Values are float64; `compute` without data gives NaN; `forward` returns the batch's value with its gradient.

    On the CPU a bad value raises in `update`. On CUDA `update` never waits for the device: bad rows are counted
    there, kept out of the sums, and `compute` raises.
    """

    full_state_update = False
    is_differentiable = True
    higher_is_better: bool | None = False

    unit: ClassVar[str]
    """What the value is measured in."""
    perfect: ClassVar[float]
    """The value of a predictor that is right and sure every time."""
    question: ClassVar[str]
    """What the metric answers, in one line for a report."""
    source: ClassVar[str]
    """Publication and equation."""

    def __init__(
        self, input_format: InputFormat, recipe: Recipe[S], batch_shape: tuple[int, ...] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.input_format = input_format
        self.recipe = recipe
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"`batch_shape` must be a tuple of ints, got {batch_shape!r}.")
        self.batch_shape = tuple(batch_shape)
        for size in self.batch_shape:
            check_count("batch_shape", size)
        self.sums_shape = (*self.batch_shape, *recipe.shape(input_format.task, input_format.num_classes))
        self._shared: dict[Hashable, Any] | None = None
        # The first entry counts rows that were left out because they were bad; the others are the sums. The name tells
        # what they are sums of: torchmetrics' compute groups and state dicts go by it, and must never mix two kinds.
        self.state_name = f"sums_{_fingerprint([self]):05x}"
        size = 1 + math.prod(self.sums_shape)
        self.add_state(self.state_name, torch.zeros(size, dtype=torch.float64), dist_reduce_fx="sum")

    @property
    def state(self) -> Tensor:
        """The whole state, float64: the number of bad rows, then the sums."""
        state: Tensor = getattr(self, self.state_name)
        return state

    @state.setter
    def state(self, value: Tensor) -> None:
        setattr(self, self.state_name, value)

    @abstractmethod
    def _value(self, statistic: S) -> Tensor:
        """Read the value off the statistic."""

    def update(self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            preds: probabilities (or logits with `from_logits=True`). Every axis but the class axis is samples, after
                the leading `batch_shape`.
            target: labels, or floating soft targets.
            weights: one non-negative weight per sample.

        Raises:
            TypeError: for a wrong dtype.
            ValueError: for a wrong shape or device and, on the CPU, for a bad value.
        """
        self.state = self.state + self._batch_state(preds, target, weights).to(self.state)

    def compute(self) -> Tensor:
        """Return the value over everything seen, by all ranks if `torch.distributed` is running.

        Raises:
            ValueError: if rows that came on CUDA were bad.
        """
        if not self._enable_grad:  # `forward` reads its batch here, and must not wait for the device
            self._raise_if_invalid()
        return self._value(self._statistic)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch as `update` does and return the batch's own value, with its gradient."""
        with _unchanged_on_error(self):
            value = super().forward(*args, **kwargs)
        # torchmetrics keeps the value for loggers. Kept with its graph it would hold the batch and break `clone`.
        self._forward_cache = value.detach()
        return value

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another metric of the same class, input format and bins.

        Raises:
            ValueError: if the two do not count the same thing.
        """
        if isinstance(incoming_state, StreamingMetric):
            mine, other = self._configuration(), incoming_state._configuration()
            if differing := [
                f"{name}={other[name]!r} into {name}={mine[name]!r}" for name in mine if mine[name] != other[name]
            ]:
                raise ValueError(
                    f"`incoming_state` must count the same thing, got {'; '.join(differing)}. "
                    "Merge metrics that were made with the same arguments."
                )
            incoming_state = incoming_state.metric_state
        if isinstance(incoming_state, dict):
            incoming_state = {self.state_name: self._checked_state(incoming_state)}
        super().merge_state(incoming_state)
        self._computed = None
        self._update_count += 1

    def _checked_state(self, saved: Mapping[str, Any], prefix: str = "") -> Tensor:
        """The state in a dict of states, as float64 on this metric's device."""
        state = saved.get(prefix + self.state_name)
        if getattr(state, "shape", None) != self.state.shape:
            raise ValueError(
                f"the saved state must hold `{self.state_name}`, a tensor of shape {tuple(self.state.shape)}, got "
                f"{ {name: tuple(getattr(value, 'shape', ())) for name, value in saved.items()} }. "
                "Merge or load the state of a metric that was made with the same arguments."
            )
        assert isinstance(state, Tensor)
        return state.to(self.state)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw `val` (by default `compute()`), one value or a sequence over time, on `ax`. Returns (figure, axes)."""
        _, drawn = self._plot(val, ax)  # torchmetrics gives no figure where it was given axes
        return drawn.get_figure(), drawn  # type: ignore[union-attr]  # one plot is one axes

    def extra_repr(self) -> str:
        """Say which settings the state depends on."""
        return ", ".join(f"{name}={value!r}" for name, value in self._configuration().items() if name != "class")

    def statistic(self) -> S:
        """Return the sums so far: of this rank alone, or of all ranks between `sync` and `unsync`.

        Raises:
            ValueError: if rows that came on CUDA were bad.
        """
        self._raise_if_invalid()
        return self._statistic

    @property
    def _statistic(self) -> S:
        return self.recipe.wrap(self.state[1:].reshape(self.sums_shape))

    def _synced_statistic(self) -> S:
        """The statistic over all ranks, checked as `compute` checks it."""
        with (
            _unsynced_on_error(self),
            self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync),
        ):
            return self.statistic()

    def _configuration(self) -> dict[str, object]:
        """Everything that two states must agree on to be added, by the name of its argument; the task first."""
        settings: dict[str, object] = {"class": type(self).__name__, "task": self.input_format.task}
        for value in (self.input_format, self.recipe):
            for field in fields(value):  # type: ignore[arg-type]  # every recipe is a frozen dataclass
                setting = getattr(value, field.name)
                settings[field.name] = getattr(setting, "__qualname__", setting)  # no addresses: ranks compare this
        return {**settings, "batch_shape": self.batch_shape}

    def _batch_state(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        """State of one batch alone. What members of a collection have in common is computed once."""
        shared = {} if self._shared is None else self._shared
        if isinstance(preds, Tensor) and preds.device != self.device:
            raise ValueError(
                f"`preds` must be on the metric's device ({self.device}), got {preds.device}. "
                "Move the metric with metric.to(preds.device)."
            )
        self.input_format.check(preds, target, weights)
        reading = (self.input_format.shareable, self.batch_shape)
        if reading not in shared:
            shared[reading] = self.input_format.shareable.read(
                preds,
                target,
                weights,
                batch_shape=self.batch_shape,
                drop_invalid=preds.device.type != "cpu",
            )
        if (*reading, self.recipe) not in shared:
            p = shared[reading]
            sums = self.recipe.of(p).sums.reshape(-1)
            invalid = sums.new_zeros(1) if p.n_invalid is None else p.n_invalid.to(sums).reshape(1)
            shared[(*reading, self.recipe)] = torch.cat((invalid, sums))
        state: Tensor = shared[(*reading, self.recipe)]
        return state

    def _raise_if_invalid(self) -> None:
        if invalid := int(self.state[0]):
            raise ValueError(
                f"`update` must get valid rows, got {invalid} with NaN, values out of range or labels out of range; "
                "they were left out of the sums. Call reset() and run that data on the CPU to see which rows and why."
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Torchmetrics takes whatever is there, keeps the value computed before, and counts no update."""
        if any(name.startswith(f"{prefix}sums_") for name in state_dict):
            state_dict[prefix + self.state_name] = self._checked_state(state_dict, prefix)
            self._computed, self._update_count = None, max(1, self._update_count)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Where torchmetrics would lose something --------------------------------------------------------------------

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Torchmetrics counts an update before it runs; one that fails must leave no trace."""
        wrapped = super()._wrap_update(update)

        @functools.wraps(update)
        def atomic(*args: Any, **kwargs: Any) -> None:
            with _unchanged_on_error(self):
                wrapped(*args, **kwargs)

        return atomic

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Torchmetrics leaves a metric synced if `compute` raises."""
        wrapped = super()._wrap_compute(compute)

        @functools.wraps(compute)
        def safe(*args: Any, **kwargs: Any) -> Any:
            with _unsynced_on_error(self):
                return wrapped(*args, **kwargs)

        return safe

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        """Torchmetrics takes a barrier and two gathers; sums need one all-reduce. A given `dist_sync_fn` is used."""
        if dist_sync_fn is not gather_all_tensors:
            super()._sync_dist(dist_sync_fn, process_group)
            return
        (self.state,) = _summed_over_ranks([self], process_group or self.process_group)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Torchmetrics lets `.to(dtype)` cast the state; sums follow the module's device and keep their dtype."""

        def moved(tensor: Tensor) -> Tensor:
            device = fn(tensor.new_empty(0, dtype=torch.float32)).device
            stays = tensor.dtype == torch.float64 and wide_dtype(device) != torch.float64
            return tensor.cpu() if stays else tensor.to(device)

        return super()._apply(moved, *args, **kwargs)


class CalibrationCollection(MetricCollection):
    """Metrics that are updated from one reading of the input and synced in one collective.

    Takes what `torchmetrics.MetricCollection` takes (a list or a dict of metrics, `prefix`, `postfix`), all of them
    torchcalib metrics. Members whose input format and sums agree share the work; their states stay their own, so none
    is ever mistaken for another. An update that fails for one member changes none.

    Example:
        >>> from torchcalib import ECE, NLL, CalibrationCollection
        >>> metrics = CalibrationCollection([NLL(task="binary"), ECE(task="binary", n_bins=10)])
        >>> metrics.update(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        >>> {name: round(value.item(), 4) for name, value in metrics.compute().items()}
        {'NLL': 0.2284, 'ECE': 0.2}
    """

    def __init__(
        self, metrics: Any, *additional_metrics: Metric, prefix: str | None = None, postfix: str | None = None
    ) -> None:
        super().__init__(metrics, *additional_metrics, prefix=prefix, postfix=postfix, compute_groups=False)

    def add_metrics(self, metrics: Any, *additional_metrics: Metric) -> None:
        """Add members, as `MetricCollection` does.

        Raises:
            TypeError: for a metric that is not torchcalib's.
        """
        before = dict(self._modules)
        super().add_metrics(metrics, *additional_metrics)
        for name, metric in self._modules.items():
            if not isinstance(metric, StreamingMetric):
                self._modules = before
                raise TypeError(
                    f"`metrics` must be torchcalib metrics, got {type(metric).__name__} as {name!r}. "
                    "Keep others in a torchmetrics.MetricCollection beside this one."
                )

    def update(  # type: ignore[override]  # MetricCollection itself overrides ModuleDict.update with another meaning
        self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None
    ) -> None:
        """Add a batch to every member; see `StreamingMetric.update`."""
        with self._sharing():
            super().update(preds, target, weights=weights)

    def forward(self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None) -> dict[str, Tensor]:
        """Add a batch to every member and return the batch's own values, with their gradients."""
        with self._sharing():
            values: dict[str, Tensor] = super().forward(preds, target, weights=weights)
        return values

    def compute(self) -> dict[str, Tensor]:
        """Return all values, over all ranks; the members' states meet in one collective."""
        with self._synced():
            values: dict[str, Tensor] = super().compute()
        return values

    def __getitem__(self, key: str, copy_state: bool = True) -> StreamingMetric[Any]:
        """Return a member by its name."""
        metric = super().__getitem__(key, copy_state)
        assert isinstance(metric, StreamingMetric)  # add_metrics lets in no other
        return metric

    def _members(self) -> list[StreamingMetric[Any]]:
        return [m for m in self._modules.values() if isinstance(m, StreamingMetric)]

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        shared: dict[Hashable, Any] = {}
        with _unchanged_on_error(*self._members()):
            for metric in self._members():
                metric._shared = shared
            try:
                yield
            finally:
                for metric in self._members():
                    metric._shared = None

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """Sync all members that would each sync for themselves; each undoes it on its own after its compute."""
        groups: dict[Any, list[StreamingMetric[Any]]] = defaultdict(list)
        for metric in self._members():
            if (
                metric._computed is None  # else its value stands, as torchmetrics has it, and needs no sync
                and metric._to_sync
                and not metric._is_synced
                and metric.dist_sync_fn is None
                and metric.distributed_available_fn()
            ):
                groups[metric.process_group].append(metric)
        together = [metric for group in groups.values() for metric in group]
        with ExitStack() as stack:
            for metric in together:
                stack.enter_context(_unsynced_on_error(metric))
            for process_group, group in groups.items():
                for metric, state in zip(group, _summed_over_ranks(group, process_group), strict=True):
                    metric._cache = metric._copy_state_dict()
                    metric.state, metric._is_synced, metric._to_sync = state, True, False
            try:
                yield
            finally:
                for metric in together:
                    metric._to_sync = metric.sync_on_compute


def _fingerprint(metrics: Sequence[StreamingMetric[Any]]) -> int:
    """20 bits that tell metrics of different configurations apart, the same on every rank.

    No more, so that the sum of their squares over thousands of ranks is exact in float64.
    """
    settings = [{name: value for name, value in m._configuration().items() if name != "class"} for m in metrics]
    return zlib.crc32(repr(settings).encode()) & 0xFFFFF


def _summed_over_ranks(metrics: Sequence[StreamingMetric[Any]], process_group: Any) -> Sequence[Tensor]:
    """Sum the states over ranks in one collective.

    With them travel a number that stands for what they are and its square: ranks that sync different things, as when
    one of them computes a metric once more than the others, would otherwise add them up unseen.
    """
    mark = float(_fingerprint(metrics))
    marks = metrics[0].state.new_tensor([mark, mark**2])
    packed = torch.cat([*(metric.state.detach() for metric in metrics), marks])
    torch.distributed.all_reduce(packed, group=process_group)
    n_ranks = torch.distributed.get_world_size(process_group)
    if packed[-2:].tolist() != [n_ranks * mark, n_ranks * mark**2]:
        names = ", ".join(type(metric).__name__ for metric in metrics)
        raise RuntimeError(
            f"all ranks must sync the same metrics at the same time, got others where this rank syncs {names}. "
            "Call compute, plot and bin_table on every rank alike."
        )
    return torch.split(packed[:-2], [metric.state.numel() for metric in metrics])


@contextmanager
def _unchanged_on_error(*metrics: StreamingMetric[Any]) -> Iterator[None]:
    """Put the metrics back as they were if the body raises. States are replaced, never written into."""
    before = [dict(metric.__dict__) for metric in metrics]
    try:
        yield
    except BaseException:
        for metric, attributes in zip(metrics, before, strict=True):
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
        raise


@contextmanager
def _unsynced_on_error(metric: StreamingMetric[Any]) -> Iterator[None]:
    """Return to the rank's own state if the body raises while the ranks' sum is in place."""
    was_synced = metric._is_synced
    try:
        yield
    except BaseException:
        if metric._is_synced and not was_synced:
            metric.unsync()
        raise
