"""Common implementation of all metrics.

An accumulator reduces predictions to a statistic (sums or samples), from which a formula computes the value. A factory
converts the options of a metric to an `Estimator`. `metric_function` makes it the public function, with the name and
the docstring of the factory, and stores its metadata, a `Declaration`. The streaming class
(`torchcalib.metrics.base.CalibrationMetric`) and reports use the same factory and declaration.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    task_read_as,
    unknown_argument,
    with_input_options,
    with_own_names,
    with_task,
)
from torchcalib.core.arrays import are_plain
from torchcalib.core.events import Mode, TopK, resolve_mode
from torchcalib.core.inputs import InputFormat, input_format_of
from torchcalib.core.pieces import add_rows, detail_of, is_divisible, rows_of, split, takes_pieces
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.sums import Sums, SumsAccumulator
from torchcalib.core.tasks import as_tensors, infer_task, with_tensors
from torchcalib.io.errors import shown

if TYPE_CHECKING:
    from torchcalib.core.images import Images
    from torchcalib.core.ranked import ExactSample
    from torchcalib.core.state import SampleState, SumState
    from torchcalib.inference.testing import CalibrationTest
    from torchcalib.ops.softmax_stats import Detail

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


Better = Literal["higher", "lower", "nearer to 0"]


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Metadata of a metric, for reports, comparisons, diagrams, pages, classes and tests."""

    key: str = ""  # Key in reports; by default the name of the function
    name: str  # Display name
    question: str  # One-line description, for reports
    source: str  # Publication and equation that define the metric
    unit: str  # Unit of the value
    perfect: float  # Value for a perfect predictor, which assigns probability 1 to every true class
    value_range: tuple[float, float] = (-math.inf, math.inf)  # Smallest and largest value for any options
    better: Better | None = "lower"  # Direction of better values; None if it depends on options
    # Norm over bins, unless it is an option: "l1", "l2", "max", or "mean" for a signed mean
    norm: str | None = None
    # Whether sampling noise increases the expected value. If so, compare the value with its noise floor.
    noise_increases: bool = False
    stream_options: tuple[str, ...] = ()  # Options of a stream only, which are passed to `Estimator.streamed`
    has_test: bool = False  # Whether `Estimator.test_from` tests calibration
    needs_labels: bool = False  # Whether the metric with default options rejects soft targets
    # Function for `plot`, as "module:function": called with the metric, `ax` and `title`. None plots the value.
    diagram: str | None = None
    diagram_of_classes: str | None = None  # Like `diagram`, for a metric with one value per class
    allows_clusters: bool = True  # Whether `Clustered` can wrap the metric


def of_arrays(formula: F) -> F:
    """Decorate a formula that also accepts sums as numpy arrays, whose operations are faster for a small batch."""
    vars(formula)["of_arrays"] = True
    return formula


@dataclass(frozen=True, eq=False)
class Estimator(Generic[S]):
    """Metric with fixed options, defined by input format, accumulator and formula."""

    input_format: InputFormat  # Checks and converts tensors to `Predictions`
    # Computes the statistic (`Sums` or a `RankedSample`) from `Predictions`
    accumulator: "SumsAccumulator[S] | ExactSample"
    # Function from the statistic to values `(...)`, or `(..., *)` if there are several per batch element
    formula: Callable[[Any], Tensor]
    averages: bool  # Whether values are averaged over classes or labels, the last batch axis
    # Options of values per image, the first axis of the input; None for one value of all images
    images: "Images | None" = field(default=None, kw_only=True)

    @classmethod
    def of_events(
        cls,
        accumulator: Callable[[Mode], Any],
        formula: Callable[[Any], Tensor],
        task: Task | None,
        mode: Mode | None,
        average: Average | None,
        options: Mapping[str, Any],
        *fields: Any,
        per_image: "bool | Images" = False,
        **requirements: Any,
    ) -> Self:
        """Create the estimator of a metric of events, whose probabilities are the confidences.

        `accumulator` is a function of the mode. `options` are `InputOptions`, `requirements` further fields of the
        `InputFormat`, and `fields` those of a subclass.
        """
        mode = resolve_mode(task_read_as(task, options), mode)
        averages = check_average(average, mode == "classwise")
        input_format = input_format_of(task, options, **requirements)
        made = cls(input_format, accumulator(mode), formula, averages, *fields)
        return made if per_image is False else made.per_image(per_image, mode == "classwise")

    def per_image(self, options: "bool | Images", has_classes: bool) -> Self:
        """Return the estimator of the mean over images, the first axis of the input; see `core.images.images_of`."""
        from torchcalib.core.images import images_of

        if self.input_format.batch_dims:
            raise ValueError(f"`batch_dims` must be 0 with `per_image`, got {self.input_format.batch_dims}. Omit it.")
        input_format = replace(self.input_format, batch_dims=1)
        return replace(self, input_format=input_format, images=images_of(options, has_classes))

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the metric value `(...)` in the dtype of `preds` (at least float32)."""
        if not is_compiling():
            found = self._in_one_pass(preds, target, weights)
            if found is not None:
                return found
            found = self._in_pieces(preds, target, weights)
            if found is not None:
                return found
        if type(preds) is Tensor and not preds.is_cpu and not is_compiling():
            found = self._on_accelerator(preds, target, weights)
            if found is not None:
                return found
        p = self.read(preds, target, weights)
        if p.replicates:
            return by_replicates(self.from_predictions, p, self.accumulator.n_events(p)).to(p.dtype)
        return self.from_predictions(p).to(p.dtype)

    def _on_accelerator(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor | None:
        """Return the value for labels by one pass over the batch; None if `read` must convert them, or raise."""
        accumulator: Any = self.accumulator
        has_replicates = weights is not None and weights.dim() > target.dim()
        has_sums = hasattr(accumulator, "demand") and accumulator.demand(self.input_format.task, True) is not None
        if self.input_format.batch_dims or has_replicates or not has_sums:
            return None
        from torchcalib.core.batch import error_of_batch, states_after

        kind: Any = self.state_kind()
        given = preds, target, weights
        found = states_after(self.input_format, [kind], [None], *given)
        if found is None:  # a batch with gradient
            norm = getattr(self.formula, "norm", None)
            of_error = error_of_batch(self.input_format, kind, norm, None, *given, self._value_of_batch)
            return None if of_error is None or of_error[0].isnan() else of_error[0]
        if int(kind.n_ignored(found[0])[0]):  # `read` names the invalid rows
            return None
        return self.value(kind.of_batch(found[0])).to(torch.promote_types(preds.dtype, torch.float32))

    def _value_of_batch(self, how: InputFormat, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor:
        """Return the value by differentiable operations."""
        return self.from_predictions(how.read(preds, target, weights))

    def _in_one_pass(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor | None:
        """Return the value for labels by the pass of `core.pieces`; None if `read` must convert them."""
        if not self.takes_pieces or not (type(preds) is type(target) is Tensor):
            return None
        if not (weights is None or type(weights) is Tensor):
            return None
        if self.images is not None:
            return self._of_images_in_one_pass(preds, target, weights)
        accumulator: Any = self.accumulator
        rows = rows_of(self.input_format, preds, target, weights)
        if rows is None:
            return None
        sums = np.zeros(accumulator.shape(self.input_format.task, rows.n_classes))
        if not add_rows(rows, self.detail, [accumulator], [sums]):
            return None
        # numpy warns of 0 / 0
        has_data = (rows.weights is None and self.input_format.ignore_index is None) or sums[0].any()
        if getattr(self.formula, "of_arrays", False) and not self.averages and has_data:
            value = self.value(accumulator.wrap(sums))
            return torch.from_numpy(np.asarray(value, np.float64 if preds.dtype == torch.float64 else np.float32))
        value = self.value(accumulator.wrap(torch.from_numpy(sums)))
        return value.to(torch.promote_types(preds.dtype, torch.float32))

    def _of_images_in_one_pass(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Tensor | None:
        """Return the mean over images as `_in_one_pass` does."""
        from torchcalib.core.images import add_images
        from torchcalib.core.partition import SumsByPart

        found = self._format_of_images(preds, target, weights)
        if found is None:
            return None
        how, weights, n_classes = found
        accumulator: Any = self.accumulator
        by_image: SumsByPart[Any] = SumsByPart(accumulator, len(preds))
        sums = np.zeros(by_image.shape(how.task, n_classes))
        if not add_images(by_image, sums, how, self.detail, preds, target, weights):
            return None
        value = self.value(accumulator.wrap(torch.from_numpy(sums)))
        return value.to(torch.promote_types(preds.dtype, torch.float32))

    def _in_pieces(self, preds: Any, target: Any, weights: Any) -> Tensor | None:
        """Return the value of a large batch with the memory of a piece; None if `read` must convert it as a whole."""
        if not is_divisible(self.accumulator) or type(self).from_predictions is not Estimator.from_predictions:
            return None

        def read(how: InputFormat, x: Tensor, y: Tensor, w: Tensor | None) -> Predictions:
            return replace(self, input_format=how).read(x, y, w)

        accumulator: Any = self.accumulator
        statistic: Any = None
        try:
            if self.images is not None:
                statistic = self._of_images_in_pieces(read, preds, target, weights)
            elif (pieces := split(self.input_format, preds, target, weights)) is not None:
                sums = [accumulator.from_predictions(read(how, x, y, w)).sums for how, x, y, w, _ in pieces]
                statistic = accumulator.wrap(torch.stack(sums).sum(0))
        except (TypeError, ValueError):
            return None  # the error for the whole batch has the numbers of its rows
        return None if statistic is None else self.value(statistic).to(torch.promote_types(preds.dtype, torch.float32))

    def _of_images_in_pieces(self, read: Any, preds: Any, target: Any, weights: Any) -> Any:
        """Return the statistic of each image as `_in_pieces` does; None if `read` must convert the batch as a whole."""
        found = self._format_of_images(preds, target, weights)
        if found is None:
            return None
        from torchcalib.core.images import ImageState

        how, weights, n_classes = found
        accumulator: Any = self.accumulator
        kind = ImageState(accumulator, accumulator.shape(how.read_as, n_classes))
        state = kind.in_pieces(how, read, preds, target, weights)
        return None if state is None else kind.statistic(state).each

    def _format_of_images(
        self, preds: Any, target: Any, weights: Any
    ) -> "tuple[InputFormat, Tensor | None, int | None] | None":
        """Return the results of `image_axes` and the number of classes or labels; None for an invalid shape."""
        from torchcalib.core.images import image_axes

        if not (isinstance(preds, Tensor) and isinstance(target, Tensor) and preds.dim()):
            return None
        how, weights = image_axes(self.input_format, preds, target, weights)
        if how.task == "binary":
            return how, weights, None
        return (how, weights, preds.shape[how.axis]) if -preds.dim() <= how.axis < preds.dim() else None

    @cached_property
    def takes_pieces(self) -> bool:
        """Whether the pass of `core.pieces` can replace the conversion of a batch of labels."""
        return takes_pieces(self.accumulator, self.input_format.task, self.input_format.from_logits)

    @cached_property
    def detail(self) -> "Detail":
        """Statistics of multi-class rows that the accumulator needs."""
        return detail_of([self.accumulator], self.input_format.task)

    def statistic(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Any:
        """Return the statistic of tensors: sums or samples."""
        return self.accumulator.from_predictions(self.read(preds, target, weights))

    def read(self, preds: Tensor, target: Tensor, weights: Tensor | None, **how: Any) -> Predictions:
        """Convert the input. The accumulator may check the values in the pass that computes its sums."""
        input_format = self.input_format
        if self.images is not None and input_format.batch_dims:  # not rows of one image
            from torchcalib.core.images import image_axes

            preds, target, weights = as_tensors(preds, target, weights, **input_format.conversion)
            input_format, weights = image_axes(input_format, preds, target, weights)
            how["batch_shape"] = preds.shape[:1]
        return input_format.read(
            preds,
            target,
            weights,
            **how,
            checked_by=getattr(self.accumulator, "checks", None),
            detail=detail_of([self.accumulator], self.input_format.task),  # `torch.compile` cannot trace `self.detail`
        )

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the metric value `(...)` for validated predictions, in the dtype of the statistic."""
        return self.value(self.accumulator.from_predictions(p))

    def value(self, statistic: Any) -> Tensor:
        """Return the metric value `(...)` for sums or samples, averaged over classes or labels if `self.averages`.

        Values per image are averaged over classes first, and then over images.
        """
        if self.images is not None:
            from torchcalib.core.images import mean_over_images

            return mean_over_images(self.values_of_images(statistic), self.averages)
        values = self.values(statistic)
        if not self.averages:
            return values
        # Batch axes of samples `(..., N)` or sums `(..., F, K)`. The class or label axis is the last one.
        batch_axes = statistic.sums.dim() - 2 if isinstance(statistic, Sums) else statistic.score.dim() - 1
        return values.mean(batch_axes - 1)

    def values(self, statistic: Any) -> Tensor:
        """Return the metric value `(...)` per batch element and per class or label, without averaging over classes."""
        if isinstance(statistic, Sums):
            return self.formula(statistic)
        from torchcalib.core.ranked import by_pieces

        return by_pieces(self.formula, statistic)

    def values_of_images(self, statistic: Any) -> Tensor:
        """Return the value of each image `(G,)`, or of each image and chosen class `(G, K)`, from their statistics."""
        assert self.images is not None  # an estimator of values per image
        chosen = self.images.chosen(statistic)
        return self.images.without_empty(self.values(chosen), chosen)

    def test_from(self, statistic: S, **how: Any) -> "CalibrationTest":
        """Return the calibration test, with one entry per batch element, for accumulated sums or samples.

        Only for metrics whose `Declaration.has_test` is True.

        Args:
            statistic: Sums over bins, including sums for the noise floor; or a `RankedSample`. Extra leading axes are
                batch axes.
            **how: Arguments of `CalibrationMetric.test`.
        """
        raise NotImplementedError

    def state_kind(self, batch_shape: tuple[int, ...] = ()) -> "SumState[Any] | SampleState":
        """Return the operations on the state of a stream, for an estimator from `streamed`."""
        from torchcalib.core.ranked import ExactSample
        from torchcalib.core.state import SampleState, SumState

        task, num_classes = self.input_format.read_as, self.input_format.num_classes
        if self.images is not None:
            from torchcalib.core.images import ImageState

            if isinstance(self.accumulator, ExactSample):
                raise ValueError(
                    "`per_image` must be False for bins that depend on the data, got True. Use bins='equal_width'."
                )
            return ImageState(self.accumulator, self.accumulator.shape(task, num_classes))
        if isinstance(self.accumulator, ExactSample):
            lead = (*batch_shape, *self.accumulator.leading_shape(task, num_classes))
            return SampleState(self.accumulator, lead, self.input_format.from_logits)
        return SumState(self.accumulator, (*batch_shape, *self.accumulator.shape(task, num_classes)))

    def streamed(self, num_classes: int | None, *, resolution: int | None = None) -> Self:
        """Return a copy for a streaming metric; `num_classes` is None if unknown.

        `resolution` is the number of cells per unit of log-odds in a sketch of the samples. None stores all samples.
        """
        accumulator: Any = self.accumulator
        if resolution is not None:
            from torchcalib.core.ranked import ExactSample, LogitCells

            if isinstance(accumulator, ExactSample):
                accumulator = LogitCells(accumulator.mode, resolution, self.input_format.from_logits)
        return replace(self, input_format=replace(self.input_format, num_classes=num_classes), accumulator=accumulator)


_PLAIN_TYPES = (bool, int, float, str, type(None), TopK)
_MAX_CACHED = 256
_estimators: dict[Any, Estimator[Any]] = {}


def _estimator(factory: Callable[..., Estimator[Any]], options: Mapping[str, Any]) -> Estimator[Any]:
    """Return the estimator for the options, cached for plain values because validation is slow for small inputs."""
    parts: list[Any] = [factory]
    is_plain = True
    for name, option in options.items():
        if name != "weights":
            is_plain = is_plain and isinstance(option, _PLAIN_TYPES)
            parts += (name, type(option), option)
    key = tuple(parts) if is_plain else None
    if found := _estimators.get(key):
        return found
    known = {"preds", "target", *InputOptions.__annotations__, *(p.name for p in options_of(factory))}
    if unknown := [name for name in options if name not in known]:
        raise unknown_argument(unknown[0], known, factory.__name__)
    made = factory(**options)
    if is_plain:
        if len(_estimators) >= _MAX_CACHED:
            _estimators.clear()  # safe even if another thread also clears it
        _estimators[key] = made
    return made


def options_of(factory: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a factory without `**options`; the first one is `task`."""
    return [p for p in signature(factory).parameters.values() if p.kind != Parameter.VAR_KEYWORD]


FUNCTION_OPTIONS = ("weights", "batch_dims", "num_classes", "num_labels", "reduction")
"""Options of metric functions that a stream does not accept, or accepts as arguments of its own."""


def stream_parameters(factory: Callable[..., Any]) -> list[Parameter]:
    """Return the options of a factory that a stream also accepts; the first one is `task`."""
    return [p for p in options_of(factory) if p.name not in FUNCTION_OPTIONS]


@dataclass
class _Registered:
    """What is known about the public function of a metric."""

    factory: Any  # from which `metric_function` or `tuple_function` created the function
    stream_factory: Any  # for streams, whose value is one tensor
    declaration: Declaration | None  # None for a function that is not a metric of its own


_METRICS: dict[Callable[..., Any], _Registered] = {}


def factory_of(function: Callable[..., Any]) -> Callable[..., Estimator[Any]]:
    """Return the factory from which `metric_function` or `tuple_function` created a function."""
    return _METRICS[function].factory  # type: ignore[no-any-return]


def streamed_by(function: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate the factory for streams of the metric of a function, if it differs from that of the function."""

    def decorate(factory: F) -> F:
        _METRICS[function].stream_factory = factory
        return factory

    return decorate


def stream_factory_of(function: Callable[..., Any]) -> Callable[..., Estimator[Any]]:
    """Return the factory of a metric for streams, whose value is one tensor."""
    return _METRICS[function].stream_factory  # type: ignore[no-any-return]


def is_metric(function: object) -> bool:
    """Return whether this is the function of a metric, which has a declaration."""
    return callable(function) and function in _METRICS and _METRICS[function].declaration is not None


def declaration_of(function: Callable[..., Any]) -> Declaration:
    """Return the declaration of a metric by its function. Raise TypeError for a function without one."""
    found = _METRICS[function].declaration if function in _METRICS else None
    if found is None:
        raise TypeError(
            f"`function` must have a declaration of its metric, got {shown(function)}. Decorate it with "
            "metric_function(Declaration(name=..., question=..., source=..., unit=..., perfect=...))."
        )
    return found


def declared(declaration: Declaration | None, factory: Callable[..., Estimator[Any]]) -> Callable[[F], F]:
    """Decorate a metric function with what it is, and with its factory."""

    def decorate(function: F) -> F:
        named = declaration and replace(declaration, key=declaration.key or function.__name__)
        _METRICS[function] = _Registered(factory, factory, named)
        return function

    return decorate


def metric_function(
    declaration: Declaration | None = None,
) -> Callable[[Callable[P, Estimator[Any]]], Callable[Concatenate[Tensor, Tensor, P], Tensor]]:
    """Decorate a factory: return the public function of a metric, with the name and the docstring of the factory.

    The function has the arguments `preds`, `target`, those of the factory, and `InputOptions`. The factory accepts
    `task`, further options by name, and `**options: Unpack[InputOptions]`. A function without a `declaration` is not a
    metric of its own.
    """
    return lambda factory: _function_of(factory, Tensor, None, declaration)


def tuple_function(
    result: Callable[..., R],
    declaration: Declaration | None = None,
) -> Callable[[Callable[P, Estimator[Any]]], Callable[Concatenate[Tensor, Tensor, P], R]]:
    """Return a decorator like `metric_function`. `result` creates a named tuple from the last axis of the value."""
    return lambda factory: _function_of(factory, result, result, declaration)


def _function_of(
    factory: Callable[..., Estimator[Any]],
    annotation: Any,
    result: Callable[..., Any] | None,
    declaration: Declaration | None,
) -> Callable[..., Any]:
    @wraps(factory)
    def function(preds: Any = None, target: Any = None, *task: Task, **options: Any) -> Any:
        if task:
            options = with_task(options, *task)
        if target is None or "sample_weight" in options:
            options = with_own_names({**options, "preds": preds, "target": target})
            preds, target = options.pop("preds"), options.pop("target")
        if not (type(preds) is type(target) is Tensor) and not is_compiling():
            options = with_tensors({**options, "preds": preds, "target": target})
            preds, target = options.pop("preds"), options.pop("target")
        if options.get("task") is None:
            if not are_plain((preds, target)):
                preds, target, _ = as_tensors(preds, target)
            options = {**options, "task": infer_task(preds, target, options)}
        estimator = factory(**options) if is_compiling() else _estimator(factory, options)
        value = estimator(preds, target, options.get("weights"))
        return value if result is None else result(*value.unbind(-1))

    data = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for name in ("preds", "target")]
    own = signature(factory)
    own = own.replace(parameters=[*data, *own.parameters.values()], return_annotation=annotation)
    vars(function)["__signature__"] = with_input_options(own)
    return declared(declaration, factory)(function)
