"""Common implementation of all metrics.

An accumulator reduces predictions to a statistic (sums or samples), from which a formula computes the value. A factory
converts the options of a metric to an `Estimator`. `metric_function` decorates it: the public function has its name and
docstring. The streaming class (`torchcalib.metrics.base.CalibrationMetric`) uses the same factory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

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
    with_task,
)
from torchcalib.core.arrays import are_plain, as_tensors
from torchcalib.core.batch_summary import detail_of, summary_of, takes_summary
from torchcalib.core.events import Mode, TopK, resolve_mode
from torchcalib.core.inputs import InputFormat, input_format_of
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.ranked import ExactSample, LogitCells, RankedSample, by_pieces
from torchcalib.core.sums import SumsAccumulator
from torchcalib.core.tasks import from_lists, in_own_order, inferred_task
from torchcalib.ops.softmax_stats import Detail

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def of_arrays(formula: F) -> F:
    """Decorate a formula that also accepts sums as numpy arrays, whose operations are faster for a small batch."""
    vars(formula)["of_arrays"] = True
    return formula


@dataclass(frozen=True, eq=False)
class Estimator(Generic[S]):
    """Metric with fixed options, defined by input format, accumulator and formula."""

    input_format: InputFormat  # Checks and converts tensors to `Predictions`
    # Computes the statistic (`Sums` or a `RankedSample`) from `Predictions`
    accumulator: SumsAccumulator[S] | ExactSample
    # Function from the statistic to values `(...)`, or `(..., *)` if there are several per batch element
    formula: Callable[[Any], Tensor]
    averages: bool  # Whether values are averaged over classes or labels, the last batch axis

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
        **requirements: Any,
    ) -> Self:
        """Create the estimator of a metric of events, whose probabilities are the confidences.

        `accumulator` is a function of the mode. `options` are `InputOptions`, `requirements` further fields of the
        `InputFormat`, and `fields` those of a subclass.
        """
        mode = resolve_mode(task_read_as(task, options), mode)
        averages = check_average(average, mode == "classwise")
        return cls(input_format_of(task, options, **requirements), accumulator(mode), formula, averages, *fields)

    def __call__(self, preds: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the metric value `(...)` in the dtype of `preds` (at least float32)."""
        if weights is None and not is_compiling():
            found = self._from_summary(preds, target)
            if found is not None:
                return found
        p = self._read(preds, target, weights)
        if p.replicates:
            return by_replicates(self.from_predictions, p, self.accumulator.n_events(p)).to(p.dtype)
        return self.from_predictions(p).to(p.dtype)

    def _from_summary(self, preds: Tensor, target: Tensor) -> Tensor | None:
        """Return the value for labels without weights by a `BatchSummary`; None if `read` must convert them."""
        if not self.takes_summary or not (type(preds) is type(target) is Tensor):
            return None
        summary = summary_of(self.input_format, preds, target, self.detail)
        if summary is None:
            return None
        accumulator: Any = self.accumulator
        sums = np.zeros(accumulator.shape(self.input_format.task, preds.shape[-1]))
        if not accumulator.add_summary(summary, self.input_format.from_logits, sums):
            return None
        if getattr(self.formula, "of_arrays", False):
            value = self.value(accumulator.wrap(sums))
            return torch.from_numpy(np.asarray(value, np.float64 if preds.dtype == torch.float64 else np.float32))
        value = self.value(accumulator.wrap(torch.from_numpy(sums)))
        return value.to(torch.promote_types(preds.dtype, torch.float32))

    @cached_property
    def takes_summary(self) -> bool:
        """Whether a `BatchSummary` can replace the conversion of a batch of labels without weights."""
        return takes_summary(self.accumulator, self.input_format.task, self.input_format.from_logits)

    @cached_property
    def detail(self) -> Detail:
        """Statistics of multi-class rows that the accumulator needs."""
        return detail_of([self.accumulator], self.input_format.task)

    def statistic(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Any:
        """Return the statistic of tensors: sums or samples."""
        return self.accumulator.from_predictions(self._read(preds, target, weights))

    def _read(self, preds: Tensor, target: Tensor, weights: Tensor | None) -> Predictions:
        """Convert the input. The accumulator may check the values in the pass that computes its sums."""
        return self.input_format.read(
            preds,
            target,
            weights,
            checked_by=getattr(self.accumulator, "checks", None),
            detail=detail_of([self.accumulator], self.input_format.task),  # `torch.compile` cannot trace `self.detail`
        )

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the metric value `(...)` for validated predictions, in the dtype of the statistic."""
        return self.value(self.accumulator.from_predictions(p))

    def value(self, statistic: Any) -> Tensor:
        """Return the metric value `(...)` for sums or samples, averaged over classes or labels if `self.averages`."""
        values = self.values(statistic)
        if not self.averages:
            return values
        # Batch axes of samples `(..., N)` or sums `(..., F, K)`. The class or label axis is the last one.
        batch_axes = statistic.score.dim() - 1 if isinstance(statistic, RankedSample) else statistic.sums.dim() - 2
        return values.mean(batch_axes - 1)

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
    def function(preds: Any = None, target: Any = None, *task: Task, **options: Any) -> Any:
        if task:
            options = with_task(options, *task)
        if target is None or "sample_weight" in options:
            preds, target, options = in_own_order(preds, target, options)
        if type(preds) is not Tensor and not is_compiling():
            preds = from_lists(preds, target, options.get("from_logits", False))
        if options.get("task") is None:
            if not are_plain((preds, target)):
                preds, target, _ = as_tensors(preds, target)
            options = {**options, "task": inferred_task(preds, target, options)}
        estimator = factory(**options) if is_compiling() else _estimator(factory, options)
        value = estimator(preds, target, options.get("weights"))
        return value if result is None else result(*value.unbind(-1))

    data = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for name in ("preds", "target")]
    own = signature(factory)
    own = own.replace(parameters=[*data, *own.parameters.values()], return_annotation=annotation)
    vars(function)["__signature__"] = with_input_options(own)
    _FACTORIES[function] = factory
    return function
