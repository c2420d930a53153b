"""The base class of all metrics: an estimator over a stream, as a torchmetrics metric."""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from inspect import Parameter, signature
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from torchcalib.core.arguments import (
    Task,
    check_count,
    check_flag,
    count_of_outputs,
    only_task_by_position,
    task_of,
    unknown_argument,
)
from torchcalib.core.arrays import as_tensors
from torchcalib.core.documentation import document, input_parameters, parameters_of, with_implied_task
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.state import SamplesKind, SumsKind
from torchcalib.inference.testing import CalibrationTest
from torchcalib.metrics.checkpoint import DESCRIPTION, Description, holds_state, read_state
from torchcalib.metrics.estimator import Estimator
from torchcalib.metrics.rollback import refuse_if_synced, unchanged_on_error, unsynced_on_error
from torchcalib.metrics.sync import dropped_over_ranks, fingerprint, met_by_gather, met_over_ranks
from torchcalib.ops.host_values import is_captured
from torchcalib.ops.logs import wide_dtype

S = TypeVar("S")

_OF_FUNCTIONS = ("weights", "batch_dims", "num_classes", "num_labels")
"""Input options of functions alone."""

_TORCHMETRICS_OPTIONS = (
    "compute_on_cpu",
    "dist_sync_on_step",
    "process_group",
    "dist_sync_fn",
    "distributed_available_fn",
    "sync_on_compute",
    "compute_with_cache",
)


class CalibrationMetric(Metric, Generic[S]):
    """A streaming metric: an `Estimator` as a `torchmetrics.Metric`.

    The state is float64 sums, or samples. It keeps its dtype under `.to(dtype)`, `.half()`, `set_dtype` and Lightning's
    precision plugins; sums stay on the CPU for devices without float64. Values are float64, NaN without data. `forward`
    returns the value of the batch, with its gradient. An `update` or `forward` that raises leaves the metric unchanged.

    On the CPU a bad value raises an error in `update`. On CUDA `update` does not synchronise: bad rows are counted and
    left out, and `compute` raises. A CUDA graph can capture `update` if the state is sums and one update came before;
    each replay adds the batch that is then in the input of the graph.

    Between `sync` and `unsync` the state is that of all ranks and read-only: `update`, `forward`, `merge_state` and
    `load_state_dict` raise, and `reset` discards both states. A `dist_sync_fn(tensor, group=process_group)` returns the
    list of the tensors of all ranks, which have the same shape and dtype (float64 or uint8). With a
    `distributed_available_fn` it replaces `torch.distributed`, for Ray, MPI or Horovod.

    `torch.jit.script` can compile a module that holds a metric. It leaves the metric out, as with other torchmetrics.

    A subclass names its `factory`, which makes the estimator from the options, and its metadata.

    Args:
        num_classes: Number of classes C of a multi-class task. It is needed where classes are kept apart, and checked
            elsewhere.
        num_labels: Number of labels L of a multi-label task, which is needed.
        batch_shape: Leading axes to keep apart, one value each. All other axes but the class axis are samples.
        persistent: `state_dict` contains the state, so that checkpoints do.
        **options: Options of the function of the same name without `weights`, and those of `torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = True
    higher_is_better: bool | None = False

    unit: ClassVar[str]
    """Unit of the value."""
    perfect: ClassVar[float]
    """Value of a perfect and certain predictor."""
    question: ClassVar[str]
    """The question that the value answers, in one line for a report."""
    source: ClassVar[str]
    """Publication and equation."""
    is_signed: ClassVar[bool] = False
    """Whether the value is a mean gap, on both sides of 0."""

    factory: ClassVar[Callable[..., Estimator[Any]]]
    """Function from keyword options to the estimator."""
    stream_options: ClassVar[tuple[str, ...]] = ()
    """Options of the class alone, for `Estimator.streamed`."""

    kind: SumsKind[S] | SamplesKind
    """How the state adds, is saved and is synced across ranks."""
    state_names: tuple[str, ...]
    """Attributes that hold the parts of the state."""
    _shared: dict[Hashable, Any] | None = None
    """Results that members of a collection share during an update."""
    _in_graph = False
    """Whether a CUDA graph adds to the state."""

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
        own = [] if cls.__init__ is CalibrationMetric.__init__ else _without_task(cls.__init__)
        of_class = _without_task(CalibrationMetric.__init__)
        of_stream = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in cls.stream_options]
        given = [
            *parameters_of(cls.factory),
            *of_stream,
            *input_parameters(without=_OF_FUNCTIONS),
            *of_class,
        ]
        document(cls, cls.__doc__, with_implied_task([*given[:1], *own, *given[1:]]), entries=cls.factory.__doc__)

    def __init__(
        self,
        task: Task | None = None,
        *positional: Any,
        num_classes: int | None = None,
        num_labels: int | None = None,
        batch_shape: tuple[int, ...] = (),
        persistent: bool = False,
        **options: Any,
    ) -> None:
        if positional:
            raise only_task_by_position(positional[0])
        known = signature(type(self)).parameters
        if unknown := [name for name in options if name not in known and name not in _TORCHMETRICS_OPTIONS]:
            raise unknown_argument(unknown[0], known, type(self).__name__)
        task = task_of(task, num_classes, num_labels)
        kwargs = {name: options.pop(name) for name in _TORCHMETRICS_OPTIONS if name in options}
        of_stream = {name: options.pop(name) for name in self.stream_options if name in options}
        estimator = self.factory(task=task, **options)
        estimator = estimator.streamed(count_of_outputs(task, num_classes, num_labels), **of_stream)
        self._build(estimator, batch_shape, persistent, **kwargs)
        defaults = {p.name: p.default for p in parameters_of(self.factory)}
        self.settings = {**defaults, **options, **of_stream, "task": task}

    def _build(self, estimator: Estimator[S], batch_shape: tuple[int, ...], persistent: bool, **kwargs: Any) -> None:
        """Set up the state."""
        super().__init__(**kwargs)
        check_flag("persistent", persistent)
        self.estimator = estimator
        self.input_format, self.accumulator = estimator.input_format, estimator.accumulator
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"`batch_shape` must be a tuple of ints, got {batch_shape!r}.")
        self.batch_shape = tuple(batch_shape)
        for size in self.batch_shape:
            check_count("batch_shape", size)
        self.kind = self._state_kind()
        # torchmetrics' compute groups and state dicts go by names. The fingerprint keeps them from mixing metrics of
        # different configurations.
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
        """Share results with other members of a collection during an update, in this dict; None ends it."""
        vars(self)["_shared"] = computed

    def _state_kind(self) -> SumsKind[Any] | SamplesKind:
        """Return the kind of state that the accumulator needs."""
        task, num_classes = self.input_format.read_as, self.input_format.num_classes
        if isinstance(self.accumulator, ExactSample):
            lead = (*self.batch_shape, *self.accumulator.lead(task, num_classes))
            return SamplesKind(self.accumulator, lead, self.input_format.from_logits)
        return SumsKind(self.accumulator, (*self.batch_shape, *self.accumulator.shape(task, num_classes)))

    def _state_of(self, p: Predictions) -> Any:
        """Return the state of one batch of predictions."""
        return self.kind.of(p)

    @property
    def _counts_what(self) -> tuple[object, ...]:
        """Key of the state among those that members of a collection compute from the same predictions."""
        return (self.accumulator,)

    def _value(self, statistic: S) -> Tensor:
        """Return the value of a statistic."""
        return self.estimator.value(statistic)

    def update(self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            preds: probabilities (or logits with `from_logits=True`). Every axis behind `batch_shape` but the class axis
                is samples.
            target: labels or soft targets, as for the function.
            weights: non-negative weight of each sample.

        Raises:
            TypeError: for a wrong dtype.
            ValueError: for a wrong shape or device and, on the CPU, for a bad value.
            RuntimeError: in the capture of a CUDA graph, if the state is not sums.
            TorchMetricsUserError: between `sync` and `unsync`.
        """
        if self._is_synced:
            refuse_if_synced(self, "update")
        if not (type(preds) is type(target) is Tensor and (weights is None or type(weights) is Tensor)):
            preds, target, weights = as_tensors(preds, target, weights)
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
        """Add in place, in each replay again. Python does not see replays, so values are no longer cached."""
        if not self._adds_up or self._enable_grad:  # `forward` enables it
            raise RuntimeError(
                f"`{type(self).__name__}` must be updated outside of the capture of a CUDA graph. Only `update` of "
                "sums can be captured: call it rather than the metric, and pass `resolution` where there is one."
            )
        self.state.add_(batch)
        self._in_graph, self.compute_with_cache = True, False

    @property
    def _adds_up(self) -> bool:
        """Whether the state is a sum over batches that depend on nothing else."""
        return isinstance(self.kind, SumsKind)

    def reset(self) -> None:
        """Reset the state; between `sync` and `unsync` also that of this rank."""
        if self._is_synced:
            self.unsync()
        with self._in_its_place():
            super().reset()
        if self._in_graph:
            self._update_count = 1  # torchmetrics warns if there was none, and replays are not counted

    def compute(self) -> Tensor:
        """Return the value over all updates, of all ranks if `torch.distributed` is running.

        Raises:
            ValueError: if rows on CUDA were bad.
        """
        if not self._enable_grad:  # within `forward`, which must not synchronise
            self._raise_if_invalid()
        return self._value(self._statistic)

    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Update with a batch and return the value of the batch, with its gradient."""
        with unchanged_on_error(self), self._in_its_place():
            value = super().forward(*args, **kwargs)
            self.state = self.kind.detach(self.state)
        # torchmetrics keeps the value for loggers. With its graph it would keep the batch and break `clone`.
        self._forward_cache = value.detach()
        return value

    def merge_state(self, incoming_state: dict[str, Any] | Metric) -> None:
        """Add the state of another metric of the same class, input format and bins.

        Args:
            incoming_state: the metric, its `metric_state`, or its `state_dict`. `nan_policy` may differ.

        Raises:
            ValueError: if configurations differ, or a dict has no description of its configuration.
            TorchMetricsUserError: between `sync` and `unsync`.
        """
        refuse_if_synced(self, "merge_state")
        if isinstance(incoming_state, CalibrationMetric):
            incoming_state = incoming_state.metric_state
        if isinstance(incoming_state, dict):
            state, _ = read_state(self, "incoming_state", incoming_state)
            incoming_state = dict(zip(self.state_names, self.kind.parts(state), strict=True))
        with unchanged_on_error(self), self._in_its_place():
            super().merge_state(incoming_state)
        self._computed = None
        self._update_count += 1

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Plot `val` (default: `compute()`), one value or a sequence over time, on `ax`. Return figure and axes."""
        _, drawn = self._plot(val, ax)  # torchmetrics returns no figure for given axes
        return drawn.get_figure(), drawn  # type: ignore[union-attr]  # one plot is one axes

    def extra_repr(self) -> str:
        """Return the task, and the arguments that differ from their defaults."""
        if not hasattr(self, "settings"):  # a wrapper has only the settings that its state depends on
            return ", ".join(f"{name}={value!r}" for name, value in self._configuration().items() if name != "class")
        given = {"batch_shape": self.batch_shape or None, **self.settings}
        known = signature(type(self)).parameters
        shown = {name: x for name, x in given.items() if name not in known or x != known[name].default}
        outputs = "num_labels" if self.input_format.task == "multilabel" else "num_classes"
        shown = {"task": self.input_format.task, outputs: self.num_classes} | shown
        return ", ".join(f"{name}={value!r}" for name, value in shown.items() if value is not None)

    def n_dropped(self) -> int:
        """Return the number of rows that `nan_policy="drop"` left out (multi-label: of entries).

        It is summed over ranks where `compute` is; all ranks must call it then. It synchronises the device.
        """
        count = self.kind.left_out(self.state)[1:].detach()
        if self._would_sync and self.dist_sync_fn is not None:
            count = torch.stack(self.dist_sync_fn(count, group=self.process_group)).sum(0)
        elif self._would_sync:
            return dropped_over_ranks([self], self.process_group)[0]
        return int(count)

    @property
    def _would_sync(self) -> bool:
        """Whether `compute` syncs."""
        return bool(self._to_sync and not self._is_synced and self.distributed_available_fn())

    def statistic(self) -> S:
        """Return the accumulated statistic of this rank, or between `sync` and `unsync` of all ranks.

        Raises:
            ValueError: if rows on CUDA were bad.
        """
        self._raise_if_invalid()
        return self._statistic

    @property
    def _statistic(self) -> S:
        return self.kind.statistic(self.state)

    def test(
        self, *, level: float = 0.95, n_replicates: int = 999, seed: int = 0, with_interval: bool = True
    ) -> CalibrationTest:
        """Return a calibration error with its noise floor, a p-value and an interval; see `inference.calibration_test`.

        Only the state is needed, of all ranks if `torch.distributed` is running. Arguments are those of the function.

        Raises:
            TypeError: for a metric that is no calibration error: sampling noise does not bias a score.
            ValueError: for bad arguments, and if rows on CUDA were bad.
        """
        how = {"level": level, "n_replicates": n_replicates, "seed": seed, "with_interval": with_interval}
        return self.test_from(self._synced_statistic(), **how)

    def test_from(self, statistic: S, **how: Any) -> CalibrationTest:  # noqa: ARG002 - for subclasses
        """Return the evidence of a statistic of this metric, which may have further batch axes.

        Args:
            statistic: bins with sums of noise, or a ranked sample.
            **how: arguments of `test`.
        """
        raise TypeError(
            f"`metric` must be a calibration error to have a noise floor, got {type(self).__name__}. "
            "Use ECE or KS, for example. `torchcalib.inference.bootstrap` computes intervals of any metric."
        )

    def _synced_statistic(self) -> S:
        """Return the statistic of all ranks, checked as in `compute`."""
        if self._is_synced:
            return self.statistic()
        with self.sync_context(dist_sync_fn=self.dist_sync_fn, should_sync=self._to_sync):
            return self.statistic()

    def _configuration(self) -> dict[str, object]:
        """Return the settings that the state depends on, for descriptions and comparisons of states."""
        settings: dict[str, object] = {"class": type(self).__name__, "task": self.input_format.task}
        for value in (self.input_format, self.accumulator):
            for field in fields(value):  # type: ignore[arg-type]  # every accumulator is a frozen dataclass
                if not field.compare:
                    continue
                setting = getattr(value, field.name)
                settings[field.name] = getattr(setting, "__qualname__", setting)  # no addresses: ranks compare settings
        return {**settings, "batch_shape": self.batch_shape}

    def _reading(
        self, preds: Tensor, target: Tensor, weights: Tensor | None
    ) -> tuple[tuple[Hashable, ...], Predictions]:
        """Return a key for this way to read a batch, and its predictions."""
        if self._shared is None:
            return (), self._read(self.input_format, preds, target, weights)
        self.input_format.check(preds, target, weights)
        shareable = self.input_format.shareable(weights)
        reading = (shareable, self.batch_shape)
        return reading, self._once(reading, lambda: self._read(shareable, preds, target, weights))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a result that members of a collection share, computed once in an update."""
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
        """Whether bad rows are counted and left out, because an error would synchronise the device."""
        return self.device.type != "cpu"

    def _added(self, state: Any, batch: Any) -> Any:
        """Add the state of a batch. Members of a collection that hold the same samples share the result."""
        if self._shared is None or not isinstance(self.kind, SamplesKind):
            return self.kind.add(state, batch)
        key = (self.kind, *((t.data_ptr(), t.shape) for t in (*state.scores, *batch.scores)))
        if key not in self._shared:  # with the chunks, so that their addresses in the key stay theirs
            self._shared[key] = (self.kind.add(state, batch), state)
        return self._shared[key][0]

    def _raise_if_invalid(self) -> None:
        if invalid := int(self.kind.left_out(self.state)[0]):
            raise ValueError(
                f"`update` must get valid rows, got {invalid} with NaN, values out of range or labels out of range; "
                "they were left out. Call reset() and run that data on the CPU to see which rows and why."
            )

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        """Sync in one collective (torchmetrics: a barrier and two gathers a part), or by a given `dist_sync_fn`."""
        group = process_group or self.process_group
        if dist_sync_fn is not gather_all_tensors:
            self.state = met_by_gather(self, dist_sync_fn, group)
            return
        (self.state,) = met_over_ranks([self], group)

    @property
    def state(self) -> Any:
        """The state: for sums a tensor that begins with the counts of rows left out; for samples a `Samples`."""
        parts = tuple(map(self.__getattribute__, self.state_names))
        return parts[0] if isinstance(self.kind, SumsKind) else self.kind.join(parts)

    @state.setter
    def state(self, value: Any) -> None:
        for name, part in zip(self.state_names, self.kind.parts(value), strict=True):
            # `vars` avoids the search for parameters in nn.Module. `reset` empties lists, hence the copy.
            vars(self)[name] = list(part) if isinstance(part, list) else part

    @contextmanager
    def _in_its_place(self) -> Iterator[None]:
        """Write the new state into the memory to which a CUDA graph adds, if there is one."""
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
        """The parts of the state and a description of the configuration, for `merge_state`."""
        parts = zip(self.kind.names, self.kind.parts(self.state), strict=True)
        copies = {name: list(part) if isinstance(part, list) else part for name, part in parts}
        return {**copies, DESCRIPTION: self._description().encoded()}

    def state_dict(  # type: ignore[override]  # as in torchmetrics
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return a dict for checkpoints. That of a persistent metric contains the state.

        It has the parts of the state (`sums`; or `scores`, `outcomes`, `weights`, `left_out`) and `description`, a
        uint8 tensor of JSON with the format, the version of torchcalib, and the arguments that the state depends on.
        `torch.load(weights_only=True)` reads all of it, safetensors that of sums.

        Each rank saves its own state and loads it again. Between `sync` and `unsync` the dict has the state of all
        ranks, which one process or one rank loads. `load_state_dict` raises ValueError for a state of other arguments
        (`nan_policy` may differ) or another format, and changes nothing. With `strict=True` it raises for a missing
        state, too.
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
        """Load a saved state; see `state_dict`. An error leaves the metric unchanged."""
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
        """Load a checked state. torchmetrics takes any tensors, keeps the old value and reports no missing keys."""
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

    # Overrides of torchmetrics.Metric, which loses state after an error and under `.to(dtype)`, and axes of a value

    def _copy_state_dict(self) -> dict[str, Tensor | list[Any]]:
        """Copy no tensors: states are replaced, never written into. torchmetrics copies them in each `forward`."""
        return {name: list(part) if isinstance(part := getattr(self, name), list) else part for name in self._defaults}

    def _wrap_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Undo an update that fails. torchmetrics counts it before it runs."""
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
        """Keep the axes of a value that is a single number, which torchmetrics squeezes."""
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
        """Undo a sync that fails. torchmetrics keeps its copy of the state then."""
        with unchanged_on_error(self):
            super().sync(*args, **kwargs)

    @contextmanager
    def sync_context(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Undo the sync if the body raises. torchmetrics leaves the metric synced."""
        with unsynced_on_error(self), super().sync_context(*args, **kwargs):
            yield

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Move the state to another device, but keep its dtype, which torchmetrics casts."""

        def moved(tensor: Tensor) -> Tensor:
            device = fn(tensor.new_empty(0, dtype=torch.float32)).device
            stays = tensor.dtype == torch.float64 and wide_dtype(device) != torch.float64
            return tensor.cpu() if stays else tensor.to(device)

        return super()._apply(moved, *args, **kwargs)


def _without_task(function: Callable[..., Any]) -> list[Parameter]:
    return [p for p in parameters_of(function) if p.name != "task"]
