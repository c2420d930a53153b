"""Diagram of a metric, for `metric.plot()`."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from matplotlib import pyplot

from torchcalib.core.events import Mode, TopK, resolve_mode
from torchcalib.functional.selective import SelectiveEstimator
from torchcalib.plots.sources import MAX_CURVES

if TYPE_CHECKING:
    from torchcalib.metrics.base import CalibrationMetric

_EVENTS = {"positive": "positive class", "top_label": "top label", "classwise": "each class"}


def draw_metric(metric: "CalibrationMetric[Any]", ax: Any = None) -> tuple[Any, Any] | None:
    """Return the figure and the axes with the diagram of a metric, or None if it has no diagram.

    Without `ax`, create a pyplot figure.
    """
    diagram = _diagram_of(metric)
    if diagram is None:
        return None
    draw = resolve_name(diagram)
    figure = pyplot.figure() if ax is None else None
    try:
        axes = draw(metric, ax=ax if figure is None else figure, title=_title(metric))
    except BaseException:
        if figure is not None:
            pyplot.close(figure)  # pyplot would show the empty figure later
        raise
    return (axes if hasattr(axes, "figure") else axes[0]).figure, axes


def _diagram_of(metric: "CalibrationMetric[Any]") -> str | None:
    """Return `diagram` or `diagram_of_classes` of a metric; None if it has none for its options."""
    if metric.batch_shape or metric.diagram is None:
        return None
    if _mode_of(metric) != "classwise":
        return metric.diagram
    has_axes = metric.diagram_of_classes == "torchcalib.plots.classwise:classwise_reliability_diagrams"
    if not has_axes and (metric.num_classes or 0) > MAX_CURVES:
        return None
    # A sample has one confidence per class against the rest, but only one risk.
    has_curve = not isinstance(metric.estimator, SelectiveEstimator) or metric.input_format.read_as == "multilabel"
    return metric.diagram_of_classes if has_curve else None


def _mode_of(metric: "CalibrationMetric[Any]") -> Mode:
    accumulator: Any = metric.accumulator
    return resolve_mode(metric.input_format.read_as, accumulator.mode)


def _title(metric: "CalibrationMetric[Any]") -> str:
    name, mode = type(metric).__name__, _mode_of(metric)
    is_selective = isinstance(metric.estimator, SelectiveEstimator)
    if (is_selective or metric.key == "corp") and (value := metric.compute()).dim() == 0:
        name = f"{name} {value:.3g}"  # their diagrams do not contain the value
    if is_selective:
        return name  # the event is always an error of the predicted class
    if isinstance(mode, TopK):
        return f"{name}, {f'class of rank {mode.k}' if mode.only else f'{mode.k} most probable classes'}"
    return f"{name}, {_EVENTS[mode]}"
