"""Metrics that wrap another metric."""

from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

from torchcalib.metrics.base import CalibrationMetric

S = TypeVar("S")


def _of_metric(name: str) -> Any:
    """Return a property with the value of the wrapped metric."""
    return property(lambda self: getattr(self.metric, name))


class WrappedMetric(CalibrationMetric[S]):
    """A metric over the same input as another metric.

    Args:
        metric: the other metric. Only its configuration is used; its accumulated state is ignored.
        accumulator: the accumulator; None for that of the metric.
        **kwargs: those of `torchmetrics.Metric`.
    """

    is_differentiable, higher_is_better = _of_metric("is_differentiable"), _of_metric("higher_is_better")
    plot_lower_bound, plot_upper_bound = _of_metric("plot_lower_bound"), _of_metric("plot_upper_bound")
    unit, perfect = _of_metric("unit"), _of_metric("perfect")
    question, source = _of_metric("question"), _of_metric("source")

    def __init__(self, metric: CalibrationMetric[Any], accumulator: Any = None, **kwargs: Any) -> None:
        # In a tuple, because a submodule would have a state of its own. First, because `_build` reads it.
        self._of: tuple[CalibrationMetric[Any]] = (deepcopy(metric),)
        persistent = kwargs.pop("persistent", False)
        estimator = replace(metric.estimator, accumulator=accumulator or metric.accumulator)
        self._build(estimator, metric.batch_shape, persistent, **kwargs)

    @property
    def metric(self) -> CalibrationMetric[Any]:
        """The wrapped metric, without data."""
        return self._of[0]
