"""Common implementation of all metrics.

An accumulator reduces predictions to a statistic (sums or samples), from which a formula computes the value. A factory
converts the options of a metric to an `Estimator`. `metric_function` decorates it: the public function has its name and
docstring. The streaming class (`torchcalib.metrics.base.CalibrationMetric`) uses the same factory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

from torchcalib.core.arguments import InputOptions, Task, unknown_argument, with_input_options, with_task, with_weights
from torchcalib.core.events import TopK
from torchcalib.core.inputs import InputFormat
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.ranked import ExactSample, LogitCells, RankedSample, by_pieces
from torchcalib.core.sums import Sums, SumsAccumulator

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Estimator(Generic[S]):
    """Metric with fixed options, defined by input format, accumulator and formula."""

    input_format: InputFormat  # Checks and converts tensors to `Predictions`
    # Computes the statistic (`Sums` or a `RankedSample`) from `Predictions`
    accumulator: SumsAccumulator[S] | ExactSample
    # Function from the statistic to values `(...)`, or `(..., *)` if there are several per batch element
    formula: Callable[[Any], Tensor]
    averages: bool  # Whether values are averaged over classes or labels, the last batch axis

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the metric value `(...)` in the dtype of `preds` (at least float32)."""
        p = self.input_format.read(preds, target, weights)
        if p.replicates:
            return by_replicates(self.from_predictions, p, self.accumulator.n_events(p)).to(p.dtype)
        return self.from_predictions(p).to(p.dtype)

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the metric value `(...)` for validated predictions, in the dtype of the statistic."""
        return self.value(self.accumulator.from_predictions(p))

    def value(self, statistic: Any) -> Tensor:
        """Return the metric value `(...)` for sums or samples, averaged over classes or labels if `self.averages`."""
        values = self.values(statistic)
        return values.mean(batch_axes(statistic) - 1) if self.averages else values

    def values(self, statistic: Any) -> Tensor:
        """Return the metric value `(...)` per batch element and per class or label, without averaging over classes."""
        return by_pieces(self.formula, statistic) if isinstance(statistic, RankedSample) else self.formula(statistic)

    def streamed(self, num_classes: int | None, *, resolution: int | None = None) -> Self:
        """Return a copy for a streaming metric; `num_classes` is None if unknown.

        `resolution` is the number of cells per unit of log-odds in a sketch of the samples. None stores all samples.
        """
        accumulator: Any = self.accumulator
        if resolution is not None and isinstance(accumulator, ExactSample):
            accumulator = LogitCells(accumulator.mode, resolution, self.input_format.from_logits)
        return replace(self, input_format=replace(self.input_format, num_classes=num_classes), accumulator=accumulator)


def batch_axes(statistic: Sums | RankedSample) -> int:
    """Return the number of batch axes of accumulated sums `(..., F, K)` or of samples `(..., N)`."""
    return statistic.score.dim() - 1 if isinstance(statistic, RankedSample) else statistic.sums.dim() - 2


_PLAIN_TYPES = (bool, int, float, str, type(None), TopK)
_MAX_CACHED = 256
_estimators: dict[Any, Estimator[Any]] = {}


def _estimator(factory: Callable[..., Estimator[Any]], options: Mapping[str, Any]) -> Estimator[Any]:
    """Return the estimator for the options, cached for plain values because validation is slow for small inputs."""
    parts: list[Any] = [factory]
    for name, option in options.items():
        if name == "weights":
            continue
        if not isinstance(option, _PLAIN_TYPES):
            return _checked(factory, options)
        parts += (name, type(option), option)
    key = tuple(parts)
    found = _estimators.get(key)
    if found is None:
        found = _checked(factory, options)
        if len(_estimators) >= _MAX_CACHED:
            _estimators.clear()  # safe even if another thread also clears it
        _estimators[key] = found
    return found


def _checked(factory: Callable[..., Estimator[Any]], options: Mapping[str, Any]) -> Estimator[Any]:
    """Return the estimator for the options. Raise TypeError for an unknown name, with a suggestion."""
    known = {"preds", "target", *InputOptions.__annotations__, *(p.name for p in options_of(factory))}
    if unknown := [name for name in options if name not in known]:
        raise unknown_argument(unknown[0], known, factory.__name__)
    return factory(**options)


def options_of(factory: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters of a factory without `**options`; the first one is `task`."""
    return [p for p in signature(factory).parameters.values() if p.kind != Parameter.VAR_KEYWORD]


_FACTORIES: dict[Callable[..., Any], Callable[..., Estimator[Any]]] = {}


def factory_of(function: Callable[..., Any]) -> Callable[..., Estimator[Any]]:
    """Return the factory from which `metric_function` or `tuple_function` created a function."""
    return _FACTORIES[function]


def metric_function(factory: Callable[P, Estimator[Any]]) -> Callable[Concatenate[Tensor, Tensor, P], Tensor]:
    """Decorate a factory: return the public function of a metric, with the name and the docstring of the factory.

    The function has the arguments `preds`, `target`, those of the factory, and `InputOptions`. The factory accepts
    `task`, further options by name, and `**options: Unpack[InputOptions]`.
    """
    return _function_of(factory, Tensor, None)


def tuple_function(
    result: Callable[..., R],
) -> Callable[[Callable[P, Estimator[Any]]], Callable[Concatenate[Tensor, Tensor, P], R]]:
    """Return a decorator like `metric_function`. `result` creates a named tuple from the last axis of the value."""
    return lambda factory: _function_of(factory, result, result)


def _function_of(
    factory: Callable[..., Estimator[Any]], annotation: Any, result: Callable[..., Any] | None
) -> Callable[..., Any]:
    @wraps(factory)
    def function(preds: Tensor, target: Tensor, *task: Task, **options: Any) -> Any:
        if task:
            options = with_task(options, *task)
        if "sample_weight" in options:
            options = with_weights(options)
        estimator = factory(**options) if is_compiling() else _estimator(factory, options)
        value = estimator(preds, target, options.get("weights"))
        return value if result is None else result(*value.unbind(-1))

    data = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for name in ("preds", "target")]
    own = signature(factory)
    own = own.replace(parameters=[*data, *own.parameters.values()], return_annotation=annotation)
    vars(function)["__signature__"] = with_input_options(own)
    _FACTORIES[function] = factory
    return function
