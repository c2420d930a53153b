"""The engine of every metric: predictions -> accumulator -> value.

A metric is a factory: a function of its options that returns an `Estimator`. `functional` makes the function of the
metric from the factory, and `torchcalib.metrics.base.CalibrationMetric` its class.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from torch import Tensor
from torch.compiler import is_compiling

from torchcalib.core.arguments import only_task_by_position, task_of, unknown_argument
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
    """A metric with its options.

    Attributes:
        input_format: how tensors are checked and converted.
        accumulator: what is summed or kept of predictions.
        formula: the value `(..., *)` of every batch element of the accumulated statistic.
        averages: whether the last batch axis, that of classes or labels, is averaged.
    """

    input_format: InputFormat
    accumulator: SumsAccumulator[S] | ExactSample
    formula: Callable[[Any], Tensor]
    averages: bool

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the value of predictions, in their dtype (at least float32)."""
        p = self.input_format.read(preds, target, weights)
        value = by_replicates(self.of, p, self.accumulator.n_events(p)) if p.replicates else self.of(p)
        return value.to(p.dtype)

    def of(self, p: Predictions) -> Tensor:
        """Return the value of checked predictions, in the dtype of sums."""
        return self.value(self.accumulator.of(p))

    def value(self, statistic: Any) -> Tensor:
        """Return the value of a statistic `(..., *)`, averaged over classes if asked."""
        values = self.values(statistic)
        return values.mean(batch_axes(statistic) - 1) if self.averages else values

    def values(self, statistic: Any) -> Tensor:
        """Return the value of every batch element of a statistic."""
        return by_pieces(self.formula, statistic) if isinstance(statistic, RankedSample) else self.formula(statistic)

    def streamed(self, num_classes: int | None, *, resolution: int | None = None) -> Self:
        """Return the estimator of a stream.

        Args:
            num_classes: number of classes or labels, if it is known.
            resolution: cells for each unit of log-odds of a sketch in place of all samples; None keeps these.
        """
        accumulator: Any = self.accumulator
        if resolution is not None and isinstance(accumulator, ExactSample):
            accumulator = LogitCells(accumulator.mode, resolution, self.input_format.from_logits)
        return replace(self, input_format=replace(self.input_format, num_classes=num_classes), accumulator=accumulator)


def batch_axes(statistic: Sums | RankedSample) -> int:
    """Return the number of batch axes of a statistic."""
    return statistic.score.dim() - 1 if isinstance(statistic, RankedSample) else statistic.sums.dim() - 2


_PLAIN = (bool, int, float, str, type(None), TopK)
_MOST_ESTIMATORS = 256
_estimators: dict[Any, Estimator[Any]] = {}


def _estimator(
    factory: Callable[..., Estimator[Any]], options: Mapping[str, Any], function: Callable[..., Any]
) -> Estimator[Any]:
    """Return the estimator of a call. Those of plain options are kept, so that each is checked and made once."""
    parts: list[Any] = [factory]
    for name, option in options.items():
        if name == "weights":
            continue
        if not isinstance(option, _PLAIN):
            check_names(function, options)
            return factory(**options)
        parts += (name, type(option), option)
    key = tuple(parts)
    found = _estimators.get(key)
    if found is None:
        check_names(function, options)
        if len(_estimators) >= _MOST_ESTIMATORS:
            _estimators.clear()  # another thread may do so, too
        found = _estimators[key] = factory(**options)
    return found


def completed(options: Mapping[str, Any], task: Any = None, *others: Any) -> dict[str, Any]:
    """Return options with the task by position or implied, and `weights` for scikit-learn's `sample_weight`."""
    found = dict(options)
    if others or (task is not None and "task" in found):
        raise only_task_by_position(others[0] if others else task)
    if task is not None:
        found["task"] = task
    if "sample_weight" in found:
        weights = found.pop("sample_weight")
        if weights is not None and found.get("weights") is not None:
            raise TypeError("`sample_weight` must be left out with `weights`, got both. They have the same meaning.")
        found["weights"] = found.get("weights") if weights is None else weights
    found["task"] = task_of(found.get("task"), found.get("num_classes"), found.get("num_labels"))
    return found


def check_names(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise if a function has no argument of the name of an option."""
    known = signature(function).parameters
    if unknown := [name for name in options if name not in known]:
        raise unknown_argument(unknown[0], known, function.__name__)


def functional(
    factory: Callable[P, Estimator[Any]], result: Callable[..., R] | None = None
) -> Callable[Concatenate[Tensor, Tensor, P], Any]:
    """Return the function of a metric: it takes `preds` and `target`, and by keyword the options of the factory.

    Args:
        factory: keyword options to an `Estimator`. Its docstring becomes that of the function.
        result: makes the result from the entries on the last axis of the value; None returns the value.
    """
    name = factory.__name__.removeprefix("_")

    @wraps(factory)
    def function(preds: Tensor, target: Tensor, *args: P.args, **options: P.kwargs) -> Any:
        if args or "task" not in options or "sample_weight" in options:
            options = completed(options, *args)  # type: ignore[assignment]  # those of the factory
        weights: Any = options.get("weights")
        estimator = factory(**options) if is_compiling() else _estimator(factory, options, function)  # type: ignore[call-arg]
        value = estimator(preds, target, weights)
        return value if result is None else result(*value.unbind(-1))

    factory.__qualname__ = function.__name__ = function.__qualname__ = name  # errors name the function
    data = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for name in ("preds", "target")]
    document(
        function,
        factory.__doc__,
        [*data, *with_implied_task(parameters_of(factory)), *input_parameters()],
        result or Tensor,
    )
    factory.__doc__ = arguments_section(factory.__doc__)  # for the class; doctest must not run the example twice
    return cast(Callable[Concatenate[Tensor, Tensor, P], Any], function)
