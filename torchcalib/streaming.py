"""Statistics as torchmetrics states: metrics that stream and sync across ranks.

What a state is, and how it adds, is its `StateKind`'s to say. `CalibrationCollection` reads the input once for all of
its members and syncs them together: sums in one collective, whole samples in one more.
"""

import functools
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
from torchcalib.samples import ExactSample
from torchcalib.states import Samples, SamplesKind, StateKind, SumsKind
from torchcalib.statistics import SumsRecipe

S = TypeVar("S")


class StreamingMetric(Metric, Generic[S]):
    """A reading of a statistic that streams. A subclass names the statistic (`recipe`) and reads it (`_value`).

    Sums are float64 (on a device that has none they stay on the CPU). A state keeps its dtype under `.to(dtype)`,
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
        self,
        input_format: InputFormat,
        recipe: SumsRecipe[S] | ExactSample,
        batch_shape: tuple[int, ...] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.input_format = input_format
        self.recipe = recipe
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"`batch_shape` must be a tuple of ints, got {batch_shape!r}.")
        self.batch_shape = tuple(batch_shape)
        for size in self.batch_shape:
            check_count("batch_shape", size)
        self.kind: StateKind[Any, S] = _kind_of(input_format, recipe, self.batch_shape)
        self._shared: dict[Hashable, Any] | None = None
        # The names tell what the parts are: torchmetrics' compute groups and state dicts go by them, and must never mix
        # two kinds.
        self.state_names = tuple(f"{name}_{_fingerprint([self]):05x}" for name in self.kind.names)
        for name, part in zip(self.state_names, self.kind.parts(self.kind.empty()), strict=True):
            self.add_state(name, part, dist_reduce_fx="sum" if isinstance(part, Tensor) else "cat")

    @property
    def state(self) -> Any:
        """The whole state: for sums a tensor, the number of bad rows before them; for samples a `Samples`."""
        return self.kind.join([getattr(self, name) for name in self.state_names])

    @state.setter
    def state(self, value: Any) -> None:
        for name, part in zip(self.state_names, self.kind.parts(value), strict=True):
            setattr(self, name, list(part) if isinstance(part, list) else part)  # `reset` of torchmetrics empties lists

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
        self.state = self._added(self.state, self._batch_state(preds, target, weights))

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
        self.state = self.kind.detach(self.state)
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
            incoming_state = dict(
                zip(self.state_names, self.kind.parts(self._checked_state(incoming_state)), strict=True)
            )
        super().merge_state(incoming_state)
        self._computed = None
        self._update_count += 1

    def _checked_state(self, saved: Mapping[str, Any], prefix: str = "") -> Any:
        """The state in a dict of states, on this metric's device."""
        names = [prefix + name for name in self.state_names]
        complete = all(name in saved for name in names)
        state = self.kind.check([saved[name] for name in names], self.state) if complete else None
        if state is None:
            mine = dict(zip(self.state_names, self.kind.parts(self.state), strict=True))
            raise ValueError(
                f"the saved state must hold { {name: _shape(part) for name, part in mine.items()} }, "
                f"got { {name: _shape(value) for name, value in saved.items()} }. "
                "Merge or load the state of a metric that was made with the same arguments."
            )
        return state

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw `val` (by default `compute()`), one value or a sequence over time, on `ax`. Returns (figure, axes)."""
        _, drawn = self._plot(val, ax)  # torchmetrics gives no figure where it was given axes
        return drawn.get_figure(), drawn  # type: ignore[union-attr]  # one plot is one axes

    def extra_repr(self) -> str:
        """Say which settings the state depends on."""
        return ", ".join(f"{name}={value!r}" for name, value in self._configuration().items() if name != "class")

    def statistic(self) -> S:
        """Return the statistic so far: of this rank alone, or of all ranks between `sync` and `unsync`.

        Raises:
            ValueError: if rows that came on CUDA were bad.
        """
        self._raise_if_invalid()
        return self._statistic

    @property
    def _statistic(self) -> S:
        return self.kind.statistic(self.state)

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

    def _batch_state(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Any:
        """State of one batch alone. What members of a collection have in common is computed once."""
        shared = {} if self._shared is None else self._shared
        if isinstance(preds, Tensor) and preds.device != self.device:
            raise ValueError(
                f"`preds` must be on the metric's device ({self.device}), got {preds.device}. "
                "Move the metric with metric.to(preds.device)."
            )
        self.input_format.check(preds, target, weights)
        shareable = self.input_format.shareable(weights)
        reading = (shareable, self.batch_shape)
        if reading not in shared:
            shared[reading] = shareable.read(
                preds,
                target,
                weights,
                batch_shape=self.batch_shape,
                drop_invalid=preds.device.type != "cpu",
            )
        if (*reading, self.recipe) not in shared:
            shared[(*reading, self.recipe)] = self.kind.of(shared[reading])
        return shared[(*reading, self.recipe)]

    def _added(self, state: Any, batch: Any) -> Any:
        """Add a batch's state. Members of a collection that hold the same samples go on sharing them."""
        if self._shared is None or not isinstance(state, Samples):
            return self.kind.add(state, batch)
        key = (self.kind, *((t.data_ptr(), t.shape) for t in (*state.scores, *batch.scores)))
        if key not in self._shared:  # kept with the chunks that the key tells by their place, so that it stays theirs
            self._shared[key] = (self.kind.add(state, batch), state)
        return self._shared[key][0]

    def _raise_if_invalid(self) -> None:
        if invalid := int(self.kind.n_invalid(self.state)):
            raise ValueError(
                f"`update` must get valid rows, got {invalid} with NaN, values out of range or labels out of range; "
                "they were left out of the sums. Call reset() and run that data on the CPU to see which rows and why."
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Torchmetrics takes whatever is there, keeps the value computed before, and counts no update."""
        stems = tuple(f"{prefix}{name}_" for name in (*SumsKind.names, *SamplesKind.names))
        if any(name.startswith(stems) for name in state_dict):
            state = self.kind.parts(self._checked_state(state_dict, prefix))
            state_dict.update({prefix + name: part for name, part in zip(self.state_names, state, strict=True)})
            self._computed, self._update_count = None, max(1, self._update_count)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # Where torchmetrics would lose something --------------------------------------------------------------------

    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        """Torchmetrics copies every tensor, all samples so far in each `forward`; states are never written into."""
        return {name: list(part) if isinstance(part := getattr(self, name), list) else part for name in self._defaults}

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
        """Torchmetrics takes a barrier and two gathers for each part. A given `dist_sync_fn` is used, and gathers."""
        group = process_group or self.process_group
        if dist_sync_fn is not gather_all_tensors:
            world, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
            announced = torch.stack(dist_sync_fn(self.kind.announce(self.state, rank, world), group)).sum(0)
            payloads = dist_sync_fn(self.kind.payload(self.state), group)
            self.state = self.kind.meet(announced, payloads)
            return
        (self.state,) = _met_over_ranks([self], group)

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
                for metric, state in zip(group, _met_over_ranks(group, process_group), strict=True):
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


def _met_over_ranks(metrics: Sequence[StreamingMetric[Any]], process_group: Any) -> list[Any]:
    """Return the states of all ranks together: sums in one collective, samples in one more.

    With the sums travel a number that stands for what they are and its square: ranks that sync different things, as
    when one of them computes a metric once more than the others, would otherwise add them up unseen.
    """
    n_ranks, rank = torch.distributed.get_world_size(process_group), torch.distributed.get_rank(process_group)
    announced = [metric.kind.announce(metric.state, rank, n_ranks) for metric in metrics]
    mark = float(_fingerprint(metrics))
    packed = torch.cat([*announced, announced[0].new_tensor([mark, mark**2])])
    torch.distributed.all_reduce(packed, group=process_group)
    if packed[-2:].tolist() != [n_ranks * mark, n_ranks * mark**2]:
        names = ", ".join(type(metric).__name__ for metric in metrics)
        raise RuntimeError(
            f"all ranks must sync the same metrics at the same time, got others where this rank syncs {names}. "
            "Call compute, plot and bin_table on every rank alike."
        )
    announced = list(torch.split(packed[:-2], [part.numel() for part in announced]))
    sizes = [metric.kind.payload_sizes(part, n_ranks) for metric, part in zip(metrics, announced, strict=True)]
    payloads = _gathered([metric.kind.payload(metric.state) for metric in metrics], sizes, process_group)
    return [metric.kind.meet(part, payload) for metric, part, payload in zip(metrics, announced, payloads, strict=True)]


def _gathered(payloads: Sequence[Tensor], sizes: Sequence[Sequence[int]], process_group: Any) -> list[list[Tensor]]:
    """Return every payload of every rank, `[metric][rank]`, of these sizes, from one gather (none if all are empty)."""
    by_rank = list(zip(*sizes, strict=True))
    longest = max(sum(row) for row in by_rank)
    mine = torch.cat(list(payloads))
    if not longest:
        return [[mine] * len(by_rank) for _ in payloads]
    padded = torch.cat((mine, mine.new_zeros(longest - mine.numel())))
    everyone = [torch.empty_like(padded) for _ in by_rank]
    torch.distributed.all_gather(everyone, padded, group=process_group)
    split = [torch.split(theirs[: sum(row)], list(row)) for theirs, row in zip(everyone, by_rank, strict=True)]
    return [list(ranks) for ranks in zip(*split, strict=True)]


def _kind_of(
    input_format: InputFormat, recipe: SumsRecipe[Any] | ExactSample, batch_shape: tuple[int, ...]
) -> StateKind[Any, Any]:
    """How the statistic of a recipe streams."""
    task, num_classes = input_format.read_as, input_format.num_classes
    if isinstance(recipe, ExactSample):
        lead = (*batch_shape, *recipe.lead(task, num_classes))
        return SamplesKind(recipe, lead, task != "multiclass" and input_format.from_logits)
    return SumsKind(recipe, (*batch_shape, *recipe.shape(task, num_classes)))


def _shape(part: Any) -> Any:
    """Describe a part of a state, for an error."""
    return tuple(part.shape) if isinstance(part, Tensor) else f"{len(part)} chunks" if isinstance(part, list) else part


@contextmanager
def _unchanged_on_error(*metrics: StreamingMetric[Any]) -> Iterator[None]:
    """Put the metrics back as they were if the body raises. Tensors of a state are replaced, never written into."""
    before = [{**metric.__dict__, **metric._copy_state_dict()} for metric in metrics]
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
