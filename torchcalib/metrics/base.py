"""Base class for all streaming metrics: metadata, options, and the conversion of batches."""

import math
import zlib
from collections.abc import Callable, Hashable
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torchmetrics.metric import Metric

from torchcalib._bridges import unknown_attribute
from torchcalib.core.arguments import (
    INPUT_DEFAULTS,
    Task,
    check_count,
    check_flag,
    count_of_outputs,
    only_task_by_position,
    task_of,
    unknown_argument,
)
from torchcalib.core.batch import error_of_batch, samples_of, states_after
from torchcalib.core.images import Images, ImageState, case_names, image_axes
from torchcalib.core.inputs import InputFormat
from torchcalib.core.mistakes import Evidence
from torchcalib.core.partition import ClusterState
from torchcalib.core.pieces import Parts, add_rows, is_divisible, rows_of, split, takes_pieces
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.state import SampleState, SumState
from torchcalib.core.tasks import as_tensors
from torchcalib.functional.estimator import (
    FUNCTION_OPTIONS,
    Better,
    Declaration,
    Estimator,
    declaration_of,
    stream_factory_of,
    stream_parameters,
)
from torchcalib.inference.testing import CalibrationTest
from torchcalib.io.errors import shown
from torchcalib.metrics.engine import StatefulMetric, UpdatesFromHidden, refuse_if_captured, refuse_if_synced
from torchcalib.ops.softmax_stats import Detail

if TYPE_CHECKING:
    from torchcalib.results.cases import Cases

S = TypeVar("S")

RULED_OUT = Evidence(None, None)
"""Evidence after a batch that rules out all mistakes. It is never modified: see `_read`."""

_TORCHMETRICS_OPTIONS = (
    "compute_on_cpu",
    "dist_sync_on_step",
    "process_group",
    "dist_sync_fn",
    "distributed_available_fn",
    "sync_on_compute",
    "compute_with_cache",
)


def check_counts(statistic: Any) -> None:
    """Raise ValueError if a test would count floating weights as copies."""
    sample = getattr(statistic, "whole", statistic)  # of groups and clusters
    if isinstance(sample, RankedSample) and not sample.is_counted:
        raise ValueError(
            "`weights` must be integers, which count copies, for the test of a rank-based error, got floating numbers "
            "other than 0 and 1. Convert counts with weights.long(), or test ECE if weights express importance."
        )


class CalibrationMetric(UpdatesFromHidden, StatefulMetric[S]):
    """Base class for streaming calibration metrics, a subclass of `torchmetrics.Metric`.

    The state consists of float64 sums or of stored samples. Its dtype does not change under `.to(dtype)`, `.half()`,
    `set_dtype` and Lightning's precision plugins. Sums stay on the CPU if the device does not support float64. Values
    are float64, and NaN without data. `forward` returns the differentiable value for the batch. If `update` or
    `forward` raises, the metric is unchanged.

    On the CPU, `update` raises for invalid values. On CUDA it does not synchronise the device: invalid rows are ignored
    and counted, and `compute` raises. `torch.compile` can trace a step that contains `update`, with invalid rows as on
    CUDA; `update_count` is then 1.

    Between `sync` and `unsync` the state covers all ranks and is read-only. `update`, `forward`, `merge_state` and
    `load_state_dict` then raise. `reset` discards both the global and the local state. For Ray, MPI or Horovod, pass a
    `distributed_available_fn` and a `dist_sync_fn(tensor, group=process_group)`. `dist_sync_fn` returns a list with the
    tensor from each rank. These tensors have the same shape and dtype (float64 or uint8).

    `torch.jit.script` can compile a module that contains a metric. The compiled module does not contain the metric.

    A subclass names its function, whose declaration has the metadata: `class ECE(BinnedMetric, function=ece)`.

    Args:
        num_classes: Number of classes C for a multi-class task. Required if there is one value per class.
        num_labels: Number of labels L. Required for a multi-label task.
        batch_shape: Sizes of the leading batch axes. There is one value per batch element.
        persistent: Include the state in `state_dict` and therefore in checkpoints.
        **options: Options of the corresponding function except `weights`, and options of `torchmetrics.Metric`.
    """

    full_state_update = False
    is_differentiable = True
    higher_is_better: bool | None = False

    # Metadata from the `Declaration` of the function. `__init__` sets those attributes that depend on options.
    key: ClassVar[str]
    name: ClassVar[str]
    question: ClassVar[str]
    source: ClassVar[str]
    unit: str
    perfect: float
    value_range: ClassVar[tuple[float, float]]
    better: ClassVar[Better | None]
    norm: ClassVar[str | None]
    noise_increases: ClassVar[bool]
    stream_options: ClassVar[tuple[str, ...]]
    has_test: ClassVar[bool]
    needs_labels: ClassVar[bool]
    diagram: ClassVar[str | None]
    diagram_of_classes: ClassVar[str | None]
    allows_clusters: ClassVar[bool]

    estimator: Estimator[Any]
    """Metric with its options, without a state."""

    _column: str | None = None
    """Argument of `update` that assigns rows to parts, such as groups."""

    takes_pieces = False
    """Whether the pass of `core.pieces` can replace the conversion of a batch of labels."""

    function: ClassVar[Callable[..., Any]]
    """Function that computes the same metric."""
    factory: ClassVar[Callable[..., Estimator[Any]]]
    """Function from options to the `Estimator` of the metric; see `stream_factory_of`."""

    def __init_subclass__(cls, function: Callable[..., Any] | None = None, **kwargs: Any) -> None:
        """Copy the declaration of the function of the same metric to class attributes; None for a base class."""
        super().__init_subclass__(**kwargs)
        # TorchScript ignores properties and annotated attributes.
        bases = [vars(base) for base in cls.__mro__]
        properties = {name for base in bases for name, member in base.items() if isinstance(member, property)}
        annotated = {name for base in bases for name in base.get("__annotations__", {})}
        cls.__jit_unused_properties__ = sorted(properties)
        cls.__jit_ignored_attributes__ = sorted({*Metric.__jit_ignored_attributes__, *annotated})
        own = vars(cls)
        if function is None:
            return
        declaration = declaration_of(function)
        for field in fields(declaration):
            type.__setattr__(cls, field.name, getattr(declaration, field.name))
        low, high = (bound if math.isfinite(bound) else None for bound in declaration.value_range)
        cls.plot_lower_bound, cls.plot_upper_bound = low, own.get("plot_upper_bound", high)
        cls.higher_is_better = {"lower": False, "higher": True}.get(declaration.better or "")
        type.__setattr__(cls, "function", staticmethod(function))
        type.__setattr__(cls, "factory", staticmethod(stream_factory_of(function)))
        cls.__signature__ = Signature(_parameters_of(cls))  # type: ignore[attr-defined]  # read by `inspect`

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
        stream_options = {name: options.pop(name) for name in self.stream_options if name in options}
        estimator = self.factory(task=task, **options)
        estimator = estimator.streamed(count_of_outputs(task, num_classes, num_labels), **stream_options)
        self._build(estimator, batch_shape, persistent, **kwargs)
        defaults = {p.name: p.default for p in stream_parameters(self.factory)}
        self.settings = {**defaults, **options, **stream_options, "task": task}

    def _build(self, estimator: Estimator[S], batch_shape: tuple[int, ...], persistent: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_flag("persistent", persistent)
        self.estimator = estimator
        self.input_format, self.accumulator = estimator.input_format, estimator.accumulator
        if not isinstance(batch_shape, tuple | list):
            raise TypeError(f"`batch_shape` must be a tuple of ints, got {shown(batch_shape)}. Pass (n,) for one axis.")
        self.batch_shape = tuple(batch_shape)
        self._evidence = Evidence()
        for size in self.batch_shape:
            check_count("batch_shape", size)
        if self.images is not None and self.batch_shape:
            raise ValueError(
                f"`batch_shape` must be () with `per_image`, got {self.batch_shape}. The images are the first axis."
            )
        self.kind = self._state_kind()
        is_plain = type(self).update is type(self)._own_update and not self.batch_shape and self.images is None
        # A subclass of the state may add more to it than sums.
        self._has_plain_sums = type(self.kind) in (SumState, ClusterState)
        of_kind: Any = self.kind
        is_plain = is_plain and self._has_plain_sums
        self.takes_pieces = is_plain and takes_pieces(
            of_kind.accumulator, self.input_format.task, self.input_format.from_logits
        )
        # torchmetrics identifies states by name, for example in compute groups. The checksum in the name therefore
        # differs between metrics with different options. It does not depend on the class.
        settings = {name: value for name, value in self._configuration().items() if name != "class"}
        checksum = zlib.crc32(repr(settings).encode()) & 0xFFFFF
        self.state_names = tuple(f"{name}_{checksum:05x}" for name in self.kind.names)
        for name, part in zip(self.state_names, self.kind.parts(self.kind.empty()), strict=True):
            reduction = "sum" if isinstance(part, Tensor) else "cat"
            self.add_state(name, part, dist_reduce_fx=reduction, persistent=persistent)

    @property
    def num_classes(self) -> int | None:
        """Number of classes C, or number of labels L for a multi-label task; None if binary or not given.

        Wrappers in torchmetrics read this attribute.
        """
        return self.input_format.num_classes

    @property
    def num_labels(self) -> int | None:
        """Number of labels L for a multi-label task; None for other tasks."""
        return self.input_format.num_classes if self.input_format.task == "multilabel" else None

    @property
    def images(self) -> Images | None:
        """Options of values per image; None without `per_image`."""
        return self.estimator.images

    def _state_kind(self) -> SumState[Any] | SampleState:
        return self.estimator.state_kind(self.batch_shape)

    def _value(self, statistic: S) -> Tensor:
        return self.estimator.value(statistic if self.images is None else cast(Any, statistic).each)

    def update(
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None = None,
        *,
        case: Any = None,
        sample_weight: Tensor | None = None,
    ) -> None:
        """Add a batch to the state.

        Args:
            preds: Probabilities, or logits with `from_logits=True`. After the axes of `batch_shape`, all axes except
                the class axis are samples.
            target: Labels with the shape of the samples, or soft targets.
            weights: Non-negative weight per sample, or a mask of the samples to use.
            case: With `per_image`, the name of each image, text or an int, or one name for all images. Images with
                equal names, such as windows of a volume, are one image. None makes each image one of its own.
            sample_weight: Alias of `weights`, as in scikit-learn.

        Raises:
            TypeError: For an invalid dtype.
            ValueError: For an invalid shape or device and, on the CPU, for an invalid value.
            RuntimeError: If a CUDA graph captures the call.
            TorchMetricsUserError: If called between `sync` and `unsync`.
        """
        if self._is_synced:
            refuse_if_synced(self, "update")
        is_plain = type(preds) is type(target) is Tensor and (weights is None or type(weights) is Tensor)
        if not is_plain or sample_weight is not None:
            preds, target, weights = as_tensors(preds, target, weights, sample_weight, **self.input_format.conversion)
        batch: Any = None
        if self._shared is None:
            if preds.device == self.device and not is_compiling():
                states = states_after(self.input_format, [self.kind], [self.state], preds, target, weights)
                if states is not None:
                    refuse_if_captured(self, preds)
                    self._store(states[0])
                    self.keep_axis(preds, target)
                    return
                batch = samples_of(self.input_format, self.kind, preds, target, weights)
            if batch is None:
                batch = self._state_of(preds, target, weights)
            if preds.dim() > 2:
                self.keep_axis(preds, target)
        else:
            key, p = self._keyed_predictions(preds, target, weights)
            batch = self._cached((*key, self.kind), lambda: self.kind.from_predictions(p))
        if case is not None:
            batch = self._named(batch, case)
        self._add(preds, batch)

    def _named(self, batch: Any, case: Any) -> Any:
        """Return the state of a batch with names of its images."""
        if isinstance(self.kind, ImageState):
            return self.kind.named(batch, case_names(case, len(batch.sums[0])))
        if self._shared is None:  # a collection passes names to all metrics
            raise ValueError(
                f"`case` must be None without `per_image`, got {shown(case)}. Create the metric with per_image=True."
            )
        return batch

    _own_update = update  # which `_is_added` and `_forward_in_one_pass` can replace

    @torch.jit.unused
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch to the state and return the differentiable metric value for this batch."""
        value = None if kwargs or is_compiling() else self._forward_in_one_pass(*args)
        return super().forward(*args, **kwargs) if value is None else value

    def _forward_in_one_pass(
        self, preds: Any = None, target: Any = None, weights: Any = None, *others: Any
    ) -> Tensor | None:
        """Add a batch of labels on an accelerator in few operations, and return its value; see `core.batch`.

        Return None if `update` must convert the batch. The metric is then unchanged.
        """
        is_own = type(self).update is type(self)._own_update and self._shared is None and not others
        if not is_own or self._is_synced or self.dist_sync_on_step or not type(preds) is type(target) is Tensor:
            return None
        if preds.is_cpu or preds.device != self.device or not (weights is None or type(weights) is Tensor):
            return None
        kind: Any = self.kind
        given = preds, target, weights
        found = states_after(self.input_format, [kind] * 2, [None, self.state], *given)
        if found is None:  # a batch with gradient
            norm = getattr(self.estimator.formula, "norm", None)
            of_error = error_of_batch(self.input_format, kind, norm, self.state, *given, self._value_of_batch)
            if of_error is None:
                return None
            value, state = of_error
        else:
            value, state = self._value(kind.of_batch(found[0])), found[1]
        refuse_if_captured(self, preds)
        self.count_update(state)
        self.keep_axis(preds, target)
        vars(self)["_forward_cache"] = value.detach()
        return value

    def _value_of_batch(self, how: InputFormat, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        """Return the value of the valid rows of a batch by differentiable operations."""
        p = how.read(preds, target, weights, batch_shape=(), drop_invalid=True)
        accumulator: Any = self.accumulator
        return self._value(accumulator.from_predictions(p))

    def _is_added(self, preds: Any = None, target: Any = None, weights: Any = None, *others: Any, **named: Any) -> bool:
        """Add a batch of labels by the pass of `core.pieces`, if it has the form for it.

        Return False otherwise, also for invalid values. The metric is then unchanged.
        """
        if others or not self.takes_pieces or self._shared is not None or self._is_synced:
            return False
        if not (type(preds) is type(target) is Tensor and (weights is None or type(weights) is Tensor)):
            return False
        if self.device.type != "cpu" or not preds.is_cpu or (preds.requires_grad and self._enable_grad):
            return False
        parts = None
        if named or self._column:
            parts = self._parts_of(preds, target, **named)
            if parts is None:
                return False
        rows = rows_of(self.input_format, preds.detach() if preds.requires_grad else preds, target, weights, parts)
        if rows is None:
            return False
        attributes, name = vars(self), self.state_names[0]
        total = attributes[name].numpy().copy()
        if not add_rows(rows, self.estimator.detail, [self.kind], [total]):
            return False
        count, state = attributes["_update_count"] + 1, torch.from_numpy(total)
        changes = {name: state, "_computed": None, "_update_count": count, "_evidence": RULED_OUT}
        if parts is not None:
            changes |= self._changes_by_parts(parts)
        if preds.dim() > 2:
            changes["input_format"] = self.input_format.following(preds, target)
        attributes.update(changes)
        return True

    def _state_of(self, preds: Tensor, target: Tensor, weights: Tensor | None, keys: Tensor | None = None) -> Any:
        """Return the state for a batch, whose parts have `keys`. A large batch is converted in pieces."""
        kind: Any = self.kind
        evidence = self._evidence
        detail: Detail = "entropy" if is_compiling() else self.estimator.detail
        has_images = isinstance(kind, ImageState) and self.device.type == "cpu" and not is_compiling()
        if has_images:
            how, of_voxels = image_axes(self.input_format, preds, target, weights)
            state = kind.in_one_pass(how, detail, preds, target, of_voxels)
            if state is not None:
                return state
        is_divided = self._has_plain_sums and not self.batch_shape and not is_compiling()
        is_divided = is_divided and is_divisible(kind.accumulator)
        pieces = split(self.input_format, preds, target, weights, keys) if is_divided else None
        try:
            state = None
            if has_images:
                state = kind.in_pieces(how, partial(self._read, detail=detail), preds, target, of_voxels)
            for how, x, y, w, g in pieces or ():
                of_piece = self._state_of_piece(self._read(how, x, y, w, detail), g)
                state = of_piece if state is None else kind.add(state, of_piece)
        except (TypeError, ValueError):  # the error for the whole batch has the numbers of its rows
            vars(self)["_evidence"], state = evidence, None
        if state is not None:
            return state
        return self._state_of_piece(self._read(self.input_format, preds, target, weights, detail), keys)

    def _state_of_piece(self, p: Predictions, keys: Tensor | None) -> Any:  # noqa: ARG002 - used by wrappers
        return self.kind.from_predictions(p)

    def _parts_of(self, preds: Tensor, target: Tensor, **named: Any) -> Parts | None:  # noqa: ARG002
        """Return the parts of the rows, from arguments of `update` given by name; None for other arguments."""
        return None

    def _changes_by_parts(self, parts: Parts) -> dict[str, Any]:  # noqa: ARG002
        """Return further changes of the state by a batch with parts."""
        return {}

    def compute(self) -> Tensor:
        """Return the metric value for all updates, over all ranks if `torch.distributed` is running.

        Raises:
            ValueError: If an update contained invalid rows on CUDA.
            RuntimeError: If metrics or their options differ between ranks: the same error on all ranks. Also if a rank
                does not answer within the timeout of the process group.
        """
        if not self._enable_grad:  # `forward`, where `_enable_grad` is True, must not synchronise the device
            self._raise_if_invalid()
        return self._value(self.kind.statistic(self.state))

    def cases(self) -> "Cases":
        """Return the value of each image, with their mean, pooled value, test and intervals, over all ranks.

        Raises:
            ValueError: Without `per_image`, or if an update contained invalid rows on CUDA.
        """
        from torchcalib.results.cases import Cases

        if self.images is None:
            raise ValueError(
                f"`per_image` must be True for a table of images, got False. Create {type(self).__name__}(..., "
                "per_image=True)."
            )
        return Cases(self.estimator, cast(Any, self._synced_statistic()), self.name)

    def plot(self, val: Any = None, ax: Any = None) -> Any:
        """Draw the diagram of the metric, or plot given values. Return the figure and the axes.

        Metrics over bins draw the reliability diagram (with `mode="classwise"`, of each class), `SmECE` the smooth
        reliability diagram, `TCE` and `CORP` their diagrams, and metrics of selective prediction the risk-coverage
        curve. Other metrics plot their value.

        Args:
            val: A value or a sequence of values over time, which are plotted as in torchmetrics. None draws the
                diagram of the state.
            ax: Matplotlib axes. None creates a new pyplot figure.

        Returns:
            The figure and the axes. Without `ax`, the second is an array of axes for a diagram of each class.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        if val is None:
            from torchcalib.metrics.diagram import draw_metric  # which imports matplotlib

            if (drawn := draw_metric(self, ax)) is not None:
                return drawn
        _, axes = self._plot(val, ax)  # with `ax`, torchmetrics does not return the figure
        return axes.get_figure(), axes  # type: ignore[union-attr]  # one plot returns one `Axes`

    def extra_repr(self) -> str:
        """Return the text in the parentheses of `repr`: the task and all non-default arguments."""
        given = {"batch_shape": self.batch_shape or None, **self.settings}
        known = signature(type(self)).parameters
        shown = {name: x for name, x in given.items() if name not in known or not _is_default(x, known[name].default)}
        outputs = "num_labels" if self.input_format.task == "multilabel" else "num_classes"
        shown = {"task": self.input_format.task, outputs: self.num_classes} | shown
        return ", ".join(f"{name}={_named(value)}" for name, value in shown.items() if value is not None)

    def __getattr__(self, name: str) -> Any:
        """Raise AttributeError for an unknown attribute, with the one that a person means."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise unknown_attribute(self, name) from None

    def test(self, *, level: float = 0.95, n_replicates: int = 999, seed: int = 0) -> CalibrationTest:
        """Test calibration from the accumulated state, over all ranks if `torch.distributed` is running.

        The returned `CalibrationTest` contains the calibration error, its noise floor (expected value for a calibrated
        model), the p-value and an interval. See `torchcalib.inference.calibration_test` for the method. With
        `per_image`, see `torchcalib.results.cases.Cases.test`. The p-value holds for one look at the data: a test after
        every batch or epoch gives more false alarms. Use `SequentialTest` for repeated looks.

        Args:
            level: Level of the interval, in (0, 1).
            n_replicates: Number R of simulated replicates. The smallest possible p-value is 1 / (R + 1).
            seed: Seed for the simulation.

        Raises:
            TypeError: If the metric is not a calibration error.
            ValueError: For invalid arguments, or if an update contained invalid rows on CUDA. Also for floating weights
                of a rank-based error, unless all are 0 or 1. A sketch does not store whether weights were floating.
        """
        if self.images is not None:
            return self.cases().test(level=level, n_replicates=n_replicates, seed=seed)
        statistic = self._synced_statistic()
        check_counts(statistic)
        return self.test_from(statistic, level=level, n_replicates=n_replicates, seed=seed)

    def test_from(self, statistic: S, **how: Any) -> CalibrationTest:
        """Return the calibration test for accumulated sums or samples; see `Estimator.test_from`."""
        if not self.has_test:
            raise TypeError(
                f"`metric` must be a calibration error to have a noise floor, got {type(self).__name__}. "
                "Use ECE or KS, for example. `torchcalib.inference.bootstrap` computes intervals for any metric."
            )
        return self.estimator.test_from(statistic, **how)

    def _configuration(self) -> dict[str, object]:
        settings: dict[str, object] = {"class": type(self).__name__, "task": self.input_format.task}
        for value in (self.input_format, self.accumulator):
            for field in fields(value):  # type: ignore[arg-type]  # every accumulator is a frozen dataclass
                if not field.compare:
                    continue
                setting = getattr(value, field.name)
                # Represent functions by name: their `repr` contains an address, which differs between ranks.
                settings[field.name] = getattr(setting, "__qualname__", setting)
        images = {} if self.images is None else {"per_image": True}
        return {**settings, "batch_shape": self.batch_shape, **images}

    def _keyed_predictions(
        self, preds: Tensor, target: Tensor, weights: Tensor | None
    ) -> tuple[tuple[Hashable, ...], Predictions]:
        """Return the cache key and the validated predictions of a batch. The key is empty outside a collection."""
        key: tuple[Hashable, ...] = ()
        if self._shared is None:
            p = self._read(self.input_format, preds, target, weights)
        else:
            resolved = self.input_format.resolved(preds, target, len(self.batch_shape))
            resolved.check(preds, target, weights)
            input_format, _ = key = self.conversion_key(weights is not None, target.is_floating_point())
            p = self._cached(key, lambda: self._read(input_format.preferring(resolved.axis), preds, target, weights))
        self.keep_axis(preds, target)
        return key, p

    def keep_axis(self, preds: Tensor, target: Tensor) -> None:
        """Use the class axis of a valid batch for all later batches whose shapes allow several class axes."""
        vars(self)["input_format"] = self.input_format.following(preds, target, len(self.batch_shape))

    def conversion_key(self, weighted: bool, floating: bool) -> tuple[InputFormat, tuple[int, ...]]:
        """Return the format and the batch shape of the conversion. Metrics with equal ones can share a conversion.

        For the arguments see `InputFormat.shareable`.
        """
        return self.input_format.shareable(weighted, floating), self.batch_shape

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`. Within one update of a collection, metrics with the same key share the result."""
        if self._shared is None:
            return make()
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

    def check_device(self, preds: Tensor) -> None:
        """Raise ValueError unless predictions are on the device of the metric."""
        if isinstance(preds, Tensor) and preds.device != self.device:
            raise ValueError(
                f"`preds` must be on the metric's device ({self.device}), got {preds.device}. "
                "Move the metric with metric.to(preds.device)."
            )

    def _read(
        self, how: InputFormat, preds: Tensor, target: Tensor, weights: Tensor | None, detail: Detail = "entropy"
    ) -> Predictions:
        if preds.device != self.device:
            self.check_device(preds)
        if is_compiling():  # without values, as on an accelerator
            return how.read(preds, target, weights, batch_shape=self.batch_shape, drop_invalid=True)
        batch_shape = self.batch_shape
        if self.images is not None and how.batch_dims:  # not rows of one image
            how, weights = image_axes(how, preds, target, weights)
            batch_shape = tuple(preds.shape[:1])
        evidence = Evidence(self._evidence.probabilities, self._evidence.decisions)  # unchanged if this raises
        p = how.read(
            preds,
            target,
            weights,
            batch_shape=batch_shape,
            drop_invalid=self.device.type != "cpu",  # elsewhere an error would synchronise the device
            evidence=evidence,
            checked_by=getattr(self.accumulator, "checks", None),
            detail=detail,
        )
        vars(self)["_evidence"] = evidence
        return p


def _parameters_of(cls: type[CalibrationMetric[Any]]) -> list[Parameter]:
    """Return the parameters of a metric class: `task` by position, all other options by name."""
    task, *options = stream_parameters(cls.factory)
    known = {p.name for p in options} | {"self", "task"}
    of_init = [
        [p for p in signature(init).parameters.values() if p.name not in known and p.kind == Parameter.KEYWORD_ONLY]
        for init in (cls.__init__, CalibrationMetric.__init__)
    ]
    of_class = [] if cls.__init__ is CalibrationMetric.__init__ else of_init[0]
    by_name = [
        *(Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in cls.stream_options),
        *(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default)
            for name, default in INPUT_DEFAULTS.items()
            if name not in FUNCTION_OPTIONS
        ),
    ]
    return [task.replace(kind=Parameter.POSITIONAL_OR_KEYWORD), *of_class, *options, *by_name, *of_init[1]]


def _named(value: object) -> str:
    """Return the qualified name of a function, because its `repr` has an address; else the `repr` of the value."""
    if isinstance(value, partial):
        bound = [*map(_named, value.args), *(f"{name}={_named(x)}" for name, x in value.keywords.items())]
        return f"partial({', '.join([_named(value.func), *bound])})"
    return str(getattr(value, "__qualname__", None) or repr(value))


def _is_default(value: object, default: object) -> bool:
    """Return whether a setting equals its default. An array never does, because its `==` is elementwise."""
    return value is default or (type(value) is type(default) and value == default)


class WrappedMetric(CalibrationMetric[S]):
    """Base class for metrics that wrap another metric and accept the same input.

    Args:
        metric: Wrapped metric. Only its configuration and its device are used; its accumulated state is ignored.
        accumulator: Accumulator for the state. None uses the accumulator of `metric`.
        **kwargs: Arguments of `torchmetrics.Metric`.
    """

    def __init__(self, metric: CalibrationMetric[Any], accumulator: Any = None, **kwargs: Any) -> None:
        # A tuple prevents registration as a submodule, which would add a second state. `_build` uses this attribute.
        self._wrapped: tuple[CalibrationMetric[Any]] = (deepcopy(metric),)
        persistent = kwargs.pop("persistent", False)
        estimator = replace(metric.estimator, accumulator=accumulator or metric.accumulator)
        self._build(estimator, metric.batch_shape, persistent, **kwargs)
        self.to(metric.device)

    def extra_repr(self) -> str:
        """Return the text in the parentheses of `repr`: the wrapped metric and all non-default arguments."""
        parameters = signature(type(self)).parameters.values()
        given = {p.name: (getattr(self, p.name, p.default), p.default) for p in parameters if p.name != "metric"}
        shown = (f"{name}={value!r}" for name, (value, default) in given.items() if value != default)
        return ", ".join((repr(self.metric), *shown))

    @property
    def metric(self) -> CalibrationMetric[Any]:
        """Copy of the wrapped metric, whose configuration is used. Its accumulated state is ignored."""
        return self._wrapped[0]


def _forwarded(name: str) -> property:
    return property(lambda self: getattr(self.metric, name))  # a function, as TorchScript requires


# A wrapper has the metadata of the wrapped metric.
for _name in (
    *(field.name for field in fields(Declaration)),
    *("settings", "is_differentiable", "higher_is_better", "plot_lower_bound", "plot_upper_bound"),
):
    type.__setattr__(WrappedMetric, _name, _forwarded(_name))
