"""Metrics that are another metric, seen in another way."""

from copy import deepcopy
from dataclasses import replace
from typing import Any, TypeVar

from torchcalib.metrics.base import StreamingMetric

S = TypeVar("S")


def _of_metric(name: str) -> Any:
    """Make a property that is the attribute of the metric that is wrapped."""
    return property(lambda self: getattr(self.metric, name))


class WrappedMetric(StreamingMetric[S]):
    """A metric that reads what another metric reads.

    Args:
        metric: the other one. It is taken for what it is, not for what it has seen.
        recipe: the statistic; None for that of the metric.
        **kwargs: those of `torchmetrics.Metric`.
    """

    is_differentiable, higher_is_better = _of_metric("is_differentiable"), _of_metric("higher_is_better")
    plot_lower_bound, plot_upper_bound = _of_metric("plot_lower_bound"), _of_metric("plot_upper_bound")
    unit, perfect = _of_metric("unit"), _of_metric("perfect")
    question, source = _of_metric("question"), _of_metric("source")

    def __init__(self, metric: StreamingMetric[Any], recipe: Any = None, **kwargs: Any) -> None:
        # In a tuple, for as a module it would bring a state of its own; and first, for what the state is made of.
        self._of: tuple[StreamingMetric[Any]] = (deepcopy(metric),)
        persistent = kwargs.pop("persistent", False)
        estimator = replace(metric.estimator, accumulator=recipe or metric.recipe)
        self._build(estimator, metric.batch_shape, persistent, **kwargs)

    @property
    def metric(self) -> StreamingMetric[Any]:
        """What is wrapped, as it was made."""
        return self._of[0]
