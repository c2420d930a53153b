"""Common implementation of all metrics.

An accumulator reduces predictions to a statistic (sums or samples), from which a formula computes the value. A factory
converts the options of a metric to an `Estimator`. `functional` creates the public function of a metric from its
factory. The streaming class (`torchcalib.metrics.base.CalibrationMetric`) uses the same factory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from torch import Tensor
from torch.compiler import is_compiling

from torchcalib.core.arguments import completed, unknown_argument, with_task
from torchcalib.core.documentation import (
    arguments_section,
    document,
    input_parameters,
    parameters_of,
    with_implied_task,
)
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
    """Metric with fixed options, defined by input format, accumulator and formula.

    Attributes:
        input_format: Checks and converts tensors to `Predictions`.
        accumulator: Computes the statistic (`Sums` or a `RankedSample`) from `Predictions`.
        formula: Function from the statistic to values `(...)`, or `(..., *)` if there are several per batch element.
        averages: Whether values are averaged over classes or labels, the last batch axis.
    """

    input_format: InputFormat
    accumulator: SumsAccumulator[S] | ExactSample
    formula: Callable[[Any], Tensor]
    averages: bool

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the metric value `(...)` in the dtype of `preds` (at least float32)."""
        p = self.input_format.read(preds, target, weights)
        value = (
            by_replicates(self.from_predictions, p, self.accumulator.n_events(p))
            if p.replicates
            else self.from_predictions(p)
        )
        return value.to(p.dtype)

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
        """Return a copy for a streaming metric, with a sketch as its accumulator if `resolution` is given.

        Args:
            num_classes: Number of classes or labels; None if unknown.
            resolution: Number of cells per unit of log-odds in a sketch of the samples. None stores all samples.
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


def _estimator(
    factory: Callable[..., Estimator[Any]], options: Mapping[str, Any], function: Callable[..., Any]
) -> Estimator[Any]:
    """Return the estimator for the options, cached for plain values because validation is slow for small inputs."""
    parts: list[Any] = [factory]
    for name, option in options.items():
        if name == "weights":
            continue
        if not isinstance(option, _PLAIN_TYPES):
            check_names(function, options)
            return factory(**options)
        parts += (name, type(option), option)
    key = tuple(parts)
    found = _estimators.get(key)
    if found is None:
        check_names(function, options)
        if len(_estimators) >= _MAX_CACHED:
            _estimators.clear()  # safe even if another thread also clears it
        found = _estimators[key] = factory(**options)
    return found


def check_names(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise TypeError if `options` contains a name that is not an argument of `function`."""
    known = signature(function).parameters
    if unknown := [name for name in options if name not in known]:
        raise unknown_argument(unknown[0], known, function.__name__)


def functional(
    factory: Callable[P, Estimator[Any]], result: Callable[..., R] | None = None, *, entries: str | None = None
) -> Callable[Concatenate[Tensor, Tensor, P], Any]:
    """Return the public function of a metric: a function of `preds`, `target` and the options of the factory.

    Args:
        factory: Function from keyword options to an `Estimator`. The public function gets its docstring.
        result: Constructor of a named tuple from the entries of the last axis of the value. None returns the value.
        entries: Descriptions of arguments that several factories share; see `document`.
    """
    name = factory.__name__.removeprefix("_")

    @wraps(factory)
    def function(preds: Tensor, target: Tensor, *args: P.args, **options: P.kwargs) -> Any:
        if args:
            options = with_task(options, *args)  # type: ignore[assignment]
        if options.get("task") is None or "sample_weight" in options:
            options = completed(options)  # type: ignore[assignment]  # P.kwargs of the factory
        weights: Any = options.get("weights")
        estimator = factory(**options) if is_compiling() else _estimator(factory, options, function)  # type: ignore[call-arg]
        value = estimator(preds, target, weights)
        return value if result is None else result(*value.unbind(-1))

    factory.__qualname__ = function.__name__ = function.__qualname__ = name  # error messages contain the public name
    data = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for name in ("preds", "target")]
    document(
        function,
        factory.__doc__,
        [*data, *with_implied_task(parameters_of(factory)), *input_parameters()],
        result or Tensor,
        entries,
    )
    factory.__doc__ = arguments_section(function.__doc__)  # without the example, which doctest would run twice
    return cast(Callable[Concatenate[Tensor, Tensor, P], Any], function)
