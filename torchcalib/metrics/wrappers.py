"""Base class for metrics that wrap another metric."""

from copy import deepcopy
from dataclasses import fields, replace
from inspect import signature
from typing import Any, TypeVar

from torchcalib.functional.estimator import Declaration
from torchcalib.metrics.base import CalibrationMetric

S = TypeVar("S")


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
    *("is_differentiable", "higher_is_better", "plot_lower_bound", "plot_upper_bound"),
):
    type.__setattr__(WrappedMetric, _name, _forwarded(_name))
