"""The base class of all metrics: an estimator over a stream, as a torchmetrics metric."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from inspect import Parameter
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from torchcalib.core.arguments import Task, check_count, check_flag, count_of_outputs
from torchcalib.core.documentation import document, input_parameters, parameters_of
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.state import SamplesKind, SumsKind
from torchcalib.metrics.checkpoint import DESCRIPTION, Description, holds_state, read_state
from torchcalib.metrics.estimator import Estimator
from torchcalib.metrics.rollback import refuse_if_synced, unchanged_on_error, unsynced_on_error
from torchcalib.metrics.sync import dropped_over_ranks, fingerprint, met_by_gather, met_over_ranks
from torchcalib.ops.host_values import is_captured
from torchcalib.ops.logs import wide_dtype

S = TypeVar("S")

_TORCHMETRICS_OPTIONS = (
    "compute_on_cpu",
    "dist_sync_on_step",
    "process_group",
    "dist_sync_fn",
    "distributed_available_fn",
    "sync_on_compute",
    "compute_with_cache",
)


class StreamingMetric(Metric, Generic[S]):
    """A metric that streams.

    Sums are float64 (on a device that has none they stay on the CPU). A state keeps its dtype under `.to(dtype)`,
    `.half()` and Lightning's precision plugins. An `update` or `forward` that raises leaves the metric as it was.
    Values are float64; `compute` without data gives NaN; `forward` returns the batch's value with its gradient.

    On the CPU a bad value raises in `update`. On CUDA `update` never waits for the device: bad rows are counted
    there, kept out of the sums, and `compute` raises. Where the state is sums, `update` can be captured in a CUDA graph
    after one that was not: each replay adds the batch that lies in the graph's input by then.

    Between `sync` and `unsync` the state is that of all ranks, to be read: `statistic`, `n_dropped`, `state_dict` and a
    pickle are of all ranks then. `update`, `forward`, `merge_state` and `load_state_dict` raise, for what they add
    would be lost with the sum; `reset` forgets both.

    `set_dtype` changes nothing: sums stay float64, and `dtype` stays float32.

    A `dist_sync_fn` is called as `dist_sync_fn(tensor, group=process_group)` and returns the list of the tensors of all
    ranks. With a `distributed_available_fn` beside it, ranks may be those of Ray, MPI or Horovod: `torch.distributed`
    is not needed. Every gathered tensor has the same shape and dtype (float64 or uint8) on all ranks.

    A module that holds a metric can be compiled by `torch.jit.script`, as with other torchmetrics metrics. The metric
    itself is left out, and raises an error if the compiled code calls it.

    A subclass names its `factory`, which makes the `Estimator` from the options of the metric, and its metadata.

    Args:
        num_classes: number of classes C of a multi-class task. It is needed where classes are kept apart, else checked.
        num_labels: number of labels L of a multi-label task, which is needed.
        batch_shape: leading axes to keep apart, one value each. All other axes but the class axis are samples.
        persistent: whether `state_dict` carries the state, so that checkpoints of the module that the metric is part of
            do; see `state_dict`.
        **options: the options of the function of the same name but `weights`, and those of `torchmetrics.Metric`.
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

    factory: ClassVar[Callable[..., Estimator[Any]]]
    """Keyword options to the estimator."""
    stream_options: ClassVar[tuple[str, ...]] = ()
    """Options of the class alone, which `Estimator.streamed` takes."""

    kind: SumsKind[S] | SamplesKind
    """How the state adds, is saved and meets across ranks."""
    state_names: tuple[str, ...]
    """Names of the parts of the state among the attributes."""
    _shared: dict[Hashable, Any] | None = None
    """Results that members of a collection share in an update that is under way."""
    _in_graph = False
    """Whether a CUDA graph adds to the state, without Python."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Document every option by name, and hide properties and annotated attributes from TorchScript."""
        super().__init_subclass__(**kwargs)
        bases = [vars(base) for base in cls.__mro__]
        properties = {name for base in bases for name, member in base.items() if isinstance(member, property)}
        annotated = {name for base in bases for name in base.get("__annotations__", {})}
        cls.__jit_unused_properties__ = sorted(properties)
        cls.__jit_ignored_attributes__ = sorted({*Metric.__jit_ignored_attributes__, *annotated})
        if "factory" not in vars(cls):
            return
        own = [] if cls.__init__ is StreamingMetric.__init__ else parameters_of(cls.__init__)
        of_class = [p for p in parameters_of(StreamingMetric.__init__) if p.name not in ("task", "factory")]
        of_stream = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in cls.stream_options]
        given = [*parameters_of(cls.factory), *of_stream, *input_parameters(without=["weights"]), *of_class]
        document(cls, cls.__doc__, [*given[:1], *own, *given[1:]], entries=cls.factory.__doc__)

    def __init__(
        self,
        factory: Callable[..., Estimator[Any]] | None = None,
        /,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        batch_shape: tuple[int, ...] = (),
        persistent: bool = False,
        **options: Any,
    ) -> None:
        if not (factory is None or callable(factory)):
            raise TypeError(
                f"arguments must be given by name, got {factory!r} by position. Write `task=`, for example."
            )
        kwargs = {name: options.pop(name) for name in _TORCHMETRICS_OPTIONS if name in options}
        of_stream = {name: options.pop(name) for name in self.stream_options if name in options}
        factory = factory or type(self).factory
        estimator = factory(task=task, **options)
        estimator = estimator.streamed(count_of_outputs(task, num_classes, num_labels), **of_stream)
        self._build(estimator, batch_shape, persistent, **kwargs)
        defaults = {p.name: p.default for p in parameters_of(factory)}
        self.settings = {**defaults, **options}

    def _build(self, estimator: Estimator[S], batch_shape: tuple[int, ...], persistent: bool, **kwargs: Any) -> None:
        """Set up the state."""
        super().__init__(**kwargs)
        check_flag("persistent", persistent)
        self.estimator = estimator
        self.input_format, self.recipe = estimator.input_format, estimator.accumulator
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"`batch_shape` must be a tuple of ints, got {batch_shape!r}.")
        self.batch_shape = tuple(batch_shape)
        for size in self.batch_shape:
            check_count("batch_shape", size)
        self.kind = self._state_kind()
        # The names tell what the parts are: torchmetrics' compute groups and state dicts go by them, and must never mix
        # two kinds.
        self.state_names = tuple(f"{name}_{fingerprint([self]):05x}" for name in self.kind.names)
        for name, part in zip(self.state_names, self.kind.parts(self.kind.empty()), strict=True):
            reduction = "sum" if isinstance(part, Tensor) else "cat"
            self.add_state(name, part, dist_reduce_fx=reduction, persistent=persistent)

    @property
    def num_classes(self) -> int | None:
        """Number of outputs: C for multi-class, L for multi-label; None for binary or if not given.

        The wrappers of torchmetrics read this attribute.
        """
        return self.input_format.num_classes

    @property
    def num_labels(self) -> int | None:
        """Number of labels L of a multi-label task; None for other tasks."""
        return self.input_format.num_classes if self.input_format.task == "multilabel" else None

    def share(self, computed: dict[Hashable, Any] | None) -> None:
        """Take from there, and put there, what members of a collection have in common in an update; None ends it."""
        vars(self)["_shared"] = computed

    def _state_kind(self) -> SumsKind[Any] | SamplesKind:
        """How the statistic streams."""
        task, num_classes = self.input_format.read_as, self.input_format.num_classes
        if isinstance(self.recipe, ExactSample):
            lead = (*self.batch_shape, *self.recipe.lead(task, num_classes))
            return SamplesKind(self.recipe, lead, self.input_format.from_logits)
        return SumsKind(self.recipe, (*self.batch_shape, *self.recipe.shape(task, num_classes)))

    def _state_of(self, p: Predictions) -> Any:
        """State of predictions alone."""
        return self.kind.of(p)

    @property
    def _counts_what(self) -> tuple[object, ...]:
        """What tells apart states of the same predictions."""
        return (self.recipe,)

    def _value(self, statistic: S) -> Tensor:
        """Return the value of a statistic."""
        return self.estimator.value(statistic)

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
            RuntimeError: in the capture of a CUDA graph, if the state is not sums alone.
            TorchMetricsUserError: between `sync` and `unsync`.
        """
        if self._is_synced:
            refuse_if_synced(self, "update")
        if self._shared is None:
            batch = self._state_of(self._read(self.input_format, preds, target, weights))
        else:
            reading, p = self._reading(preds, target, weights)
            batch = self._once((*reading, *self._counts_what), lambda: self._state_of(p))
        self._add(preds, batch)

    def _add(self, preds: Tensor, batch: Any) -> None:
        """Add the state of a batch."""
        if is_captured(preds):
            self._add_in_graph(batch)
            return
        add = self.kind.add if self._shared is None else self._added
        if self._in_graph:
            with self._in_its_place():
                self.state = add(self.state, batch)
        else:
            self.state = add(self.state, batch)

    def _add_in_graph(self, batch: Any) -> None:
        """Add in place. Every replay does so again, unseen by Python: from now on no computed value is kept."""
        if not self._adds_up or self._enable_grad:  # `forward` enables it
            raise RuntimeError(
                f"`{type(self).__name__}` must be updated outside of the capture of a CUDA graph. Only `update` of "
                "sums can be captured: call it rather than the metric, and pass `resolution` where there is one."
            )
        self.state.add_(batch)
        self._in_graph, self.compute_with_cache = True, False

    @property
    def _adds_up(self) -> bool:
        """Whether the state of a batch follows from the batch alone, and is added."""
        return isinstance(self.kind, SumsKind)

    def reset(self) -> None:
        """Forget everything seen; between `sync` and `unsync` what this rank has seen too."""
        if self._is_synced:
            self.unsync()
        with self._in_its_place():
            super().reset()
        if self._in_graph:
            self._update_count = 1  # for all that is known: torchmetrics warns of none

    def compute(self) -> Tensor:
        """Return the value over everything seen, by all ranks if `torch.distributed` is running.

        Raises:
            ValueError: if rows that came on CUDA were bad.
        """
        if not self._enable_grad:  # `forward` reads its batch here, and must not wait for the device
            self._raise_if_invalid()
        return self._value(self._statistic)

    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch as `update` does and return the batch's own value, with its gradient."""
        with unchanged_on_error(self), self._in_its_place():
            value = super().forward(*args, **kwargs)
            self.state = self.kind.detach(self.state)
        # torchmetrics keeps the value for loggers. Kept with its graph it would hold the batch and break `clone`.
        self._forward_cache = value.detach()
        return value

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another metric of the same class, input format and bins.

        Args:
            incoming_state: the metric, its `metric_state`, or what `state_dict` saved of it. `nan_policy` may differ.

        Raises:
            ValueError: if the two do not count the same thing, or the dict does not say what it counts.
            TorchMetricsUserError: between `sync` and `unsync`.
        """
        refuse_if_synced(self, "merge_state")
        if isinstance(incoming_state, StreamingMetric):
            incoming_state = incoming_state.metric_state
        if isinstance(incoming_state, dict):
            state, _ = read_state(self, "incoming_state", incoming_state)
            incoming_state = dict(zip(self.state_names, self.kind.parts(state), strict=True))
        with unchanged_on_error(self), self._in_its_place():
            super().merge_state(incoming_state)
        self._computed = None
        self._update_count += 1

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw `val` (by default `compute()`), one value or a sequence over time, on `ax`. Returns (figure, axes)."""
        _, drawn = self._plot(val, ax)  # torchmetrics gives no figure where it was given axes
        return drawn.get_figure(), drawn  # type: ignore[union-attr]  # one plot is one axes

    def extra_repr(self) -> str:
        """Say which settings the state depends on."""
        return ", ".join(f"{name}={value!r}" for name, value in self._configuration().items() if name != "class")

    def n_dropped(self) -> int:
        """Return how many rows `nan_policy="drop"` has left out; of multi-label input how many entries.

        Of all ranks if `torch.distributed` is running, wherever `compute` is: then it is a collective, which all ranks
        must call. It waits for the device.
        """
        count = self.kind.left_out(self.state)[1:].detach()
        if self._would_sync and self.dist_sync_fn is not None:
            count = torch.stack(self.dist_sync_fn(count, group=self.process_group)).sum(0)
        elif self._would_sync:
            return dropped_over_ranks([self], self.process_group)[0]
        return int(count)

    @property
    def _would_sync(self) -> bool:
        """Whether `compute` would sync."""
        return bool(self._to_sync and not self._is_synced and self.distributed_available_fn())

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
        if self._is_synced:
            return self.statistic()
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            return self.statistic()

    def _configuration(self) -> dict[str, object]:
        """See `PersistentMetric`."""
        settings: dict[str, object] = {"class": type(self).__name__, "task": self.input_format.task}
        for value in (self.input_format, self.recipe):
            for field in fields(value):  # type: ignore[arg-type]  # every recipe is a frozen dataclass
                if not field.compare:
                    continue
                setting = getattr(value, field.name)
                settings[field.name] = getattr(setting, "__qualname__", setting)  # no addresses: ranks compare this
        return {**settings, "batch_shape": self.batch_shape}

    def _reading(
        self, preds: Tensor, target: Tensor, weights: Tensor | None
    ) -> tuple[tuple[Hashable, ...], Predictions]:
        """Read one batch; also return what tells this reading from others of the same batch."""
        if self._shared is None:
            return (), self._read(self.input_format, preds, target, weights)
        self.input_format.check(preds, target, weights)
        shareable = self.input_format.shareable(weights)
        reading = (shareable, self.batch_shape)
        return reading, self._once(reading, lambda: self._read(shareable, preds, target, weights))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Make what members of a collection have in common once in an update, whichever of them needs it first."""
        if self._shared is None:
            return make()
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def _read(self, how: InputFormat, preds: Tensor, target: Tensor, weights: Tensor | None) -> Predictions:
        if isinstance(preds, Tensor) and preds.device != self.device:
            raise ValueError(
                f"`preds` must be on the metric's device ({self.device}), got {preds.device}. "
                "Move the metric with metric.to(preds.device)."
            )
        return how.read(preds, target, weights, batch_shape=self.batch_shape, drop_invalid=self._drops_invalid)

    @property
    def _drops_invalid(self) -> bool:
        """Whether bad rows are counted and left out, for looking for them would make the host wait."""
        return self.device.type != "cpu"

    def _added(self, state: Any, batch: Any) -> Any:
        """Add a batch's state. Members of a collection that hold the same samples go on sharing them."""
        if self._shared is None or not isinstance(self.kind, SamplesKind):
            return self.kind.add(state, batch)
        key = (self.kind, *((t.data_ptr(), t.shape) for t in (*state.scores, *batch.scores)))
        if key not in self._shared:  # kept with the chunks that the key tells by their place, so that it stays theirs
            self._shared[key] = (self.kind.add(state, batch), state)
        return self._shared[key][0]

    def _raise_if_invalid(self) -> None:
        if invalid := int(self.kind.left_out(self.state)[0]):
            raise ValueError(
                f"`update` must get valid rows, got {invalid} with NaN, values out of range or labels out of range; "
                "they were left out of the sums. Call reset() and run that data on the CPU to see which rows and why."
            )

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        """Torchmetrics takes a barrier and two gathers for each part. A given `dist_sync_fn` is used, and gathers."""
        group = process_group or self.process_group
        if dist_sync_fn is not gather_all_tensors:
            self.state = met_by_gather(self, dist_sync_fn, group)
            return
        (self.state,) = met_over_ranks([self], group)

    @property
    def state(self) -> Any:
        """The whole state: for sums a tensor that begins with the counts of rows left out; for samples a `Samples`."""
        return self.kind.join(tuple(map(self.__getattribute__, self.state_names)))

    @state.setter
    def state(self, value: Any) -> None:
        for name, part in zip(self.state_names, self.kind.parts(value), strict=True):
            # Past nn.Module, which searches for parameters. A list is copied, because `reset` empties it.
            vars(self)[name] = list(part) if isinstance(part, list) else part

    @contextmanager
    def _in_its_place(self) -> Iterator[None]:
        """Write the new state into the memory to which a CUDA graph adds."""
        if not self._in_graph:
            yield
            return
        held, self._in_graph = self.state, False
        try:
            yield
            held = held.copy_(self.state)
        finally:
            self.state, self._in_graph = held, True

    @property
    def metric_state(self) -> dict[str, Tensor | list[Tensor]]:
        """The parts of the state, and a description of what it counts, as `merge_state` takes them."""
        parts = zip(self.kind.names, self.kind.parts(self.state), strict=True)
        copies = {name: list(part) if isinstance(part, list) else part for name, part in parts}
        return {**copies, DESCRIPTION: self._description().encoded()}

    def state_dict(  # type: ignore[override]  # as in torchmetrics
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return a dict for checkpoints. That of a persistent metric contains a copy of the state.

        Beside the parts of the state (`sums`; or `scores`, `outcomes`, `weights`, `left_out`) stands `description`, a
        uint8 tensor of JSON: the format of the state, the version of torchcalib, and the arguments that the state
        depends on. All are tensors or lists of tensors, so that `torch.load(weights_only=True)` reads them, and
        safetensors where the state is sums.

        Each rank saves its own state, which the same rank is to load. Between `sync` and `unsync` it is the sum of all
        ranks, which one process or one of the ranks is to load.

        `load_state_dict` takes the state of a metric of the same class that was made with the same arguments
        (`nan_policy` may differ), in this format. Anything else is a ValueError that names the difference, and leaves
        the metric as it was. A persistent metric that finds no state reports its keys as missing, an error where
        `strict=True`.
        """
        saved: dict[str, Any] = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if self.is_persistent:
            for name, own in zip(self.kind.names, self.state_names, strict=True):
                saved[prefix + name] = saved.pop(prefix + own)
            saved[prefix + DESCRIPTION] = self._description().encoded()
        return saved

    @property
    def is_persistent(self) -> bool:
        """Whether `state_dict` contains the state."""
        return all(self._persistent.values())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Take over a saved state; see `state_dict`. If it raises, the metric is as it was."""
        with unchanged_on_error(self):
            return super().load_state_dict(state_dict, strict, assign)

    def _description(self) -> Description:
        return Description(self._configuration(), self._update_count, None)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        *args: Any,
    ) -> None:
        """Check the state. torchmetrics takes any tensors, keeps the old value, and reports no missing keys."""
        if holds_state(state_dict, prefix):
            refuse_if_synced(self, "load_state_dict")
            state, described = read_state(self, "state_dict", state_dict, prefix)
            for name in (*self.kind.names, DESCRIPTION):
                del state_dict[prefix + name]  # the rest is reported as unexpected
            with self._in_its_place():
                self.state = state
            self._computed, self._update_count = None, described.n_updates
        elif self.is_persistent:
            missing_keys.extend(prefix + name for name in (*self.kind.names, DESCRIPTION))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, *args)

    # torchmetrics.Metric, where it would lose something: after an error, under `.to(dtype)`, or axes of a value

    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        """Torchmetrics copies every tensor, all samples so far in each `forward`; states are never written into."""
        return {name: list(part) if isinstance(part := getattr(self, name), list) else part for name in self._defaults}

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Torchmetrics counts an update before it runs; one that fails must leave no trace."""
        wrapped = super()._wrap_update(update)

        @functools.wraps(update)
        def atomic(*args: Any, **kwargs: Any) -> None:
            before = vars(self).copy()
            try:
                wrapped(*args, **kwargs)
            except BaseException:
                vars(self).clear()
                vars(self).update(before)
                raise

        return atomic

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Torchmetrics takes the axes from a value that is a single number, as of one series of a batch."""
        shapes: list[torch.Size] = []

        @functools.wraps(compute)
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            value: Tensor = compute(*args, **kwargs)
            shapes.append(value.shape)
            return value

        wrapped = super()._wrap_compute(noted)

        @functools.wraps(compute)
        def whole(*args: Any, **kwargs: Any) -> Any:
            shapes.clear()
            value = wrapped(*args, **kwargs)
            if shapes and value.shape != shapes[-1]:  # there is none if the value was there already
                value = value.reshape(shapes[-1])
                self._computed = None if self._computed is None else value
            return value

        return whole

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Torchmetrics keeps a copy of the state if a rank does not answer, or if the metric is synced already."""
        with unchanged_on_error(self):
            super().sync(*args, **kwargs)

    @contextmanager
    def sync_context(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Torchmetrics leaves a metric synced if the body raises, as `compute` may."""
        with unsynced_on_error(self), super().sync_context(*args, **kwargs):
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Torchmetrics lets `.to(dtype)` cast the state; sums follow the module's device and keep their dtype."""

        def moved(tensor: Tensor) -> Tensor:
            device = fn(tensor.new_empty(0, dtype=torch.float32)).device
            stays = tensor.dtype == torch.float64 and wide_dtype(device) != torch.float64
            return tensor.cpu() if stays else tensor.to(device)

        return super()._apply(moved, *args, **kwargs)
