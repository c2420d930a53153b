"""Diagram of each class of metrics, for `metric.plot()`."""

from collections.abc import Callable
from typing import Any

from matplotlib import pyplot

from torchcalib.core.events import Mode, TopK, resolve_mode
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import BinnedMetric
from torchcalib.metrics.ranked import CORP
from torchcalib.metrics.selective import SelectiveMetric
from torchcalib.metrics.smooth import SmECE
from torchcalib.metrics.test_based import TCE
from torchcalib.plots.classwise import classwise_reliability_diagrams
from torchcalib.plots.reliability import corp_diagram, reliability_diagram
from torchcalib.plots.selective import risk_coverage_curve
from torchcalib.plots.sources import MAX_CURVES
from torchcalib.plots.tce import tce_diagram

Draw = Callable[..., Any]


def _smooth_diagram(metric: SmECE, ax: Any, title: str) -> Any:
    return reliability_diagram(metric, ax=ax, title=title, smooth=True)


DIAGRAMS: tuple[tuple[type[CalibrationMetric[Any]], Draw, Draw | None], ...] = (
    (TCE, tce_diagram, classwise_reliability_diagrams),
    (BinnedMetric, reliability_diagram, classwise_reliability_diagrams),
    (SmECE, _smooth_diagram, _smooth_diagram),
    (CORP, corp_diagram, None),
    (SelectiveMetric, risk_coverage_curve, risk_coverage_curve),
)
"""Class of metrics, its diagram, and its diagram for one value per class, if any. The first matching class applies."""

_EVENTS = {"positive": "positive class", "top_label": "top label", "classwise": "each class"}


def draw_metric(metric: CalibrationMetric[Any], ax: Any = None) -> tuple[Any, Any] | None:
    """Return the figure and the axes with the diagram of a metric, or None if it has no diagram.

    Args:
        metric: metric with its state.
        ax: axes to draw on. None creates a pyplot figure.
    """
    draw = _diagram_of(metric)
    if draw is None:
        return None
    figure = pyplot.figure() if ax is None else None
    try:
        axes = draw(metric, ax=ax if figure is None else figure, title=_title(metric))
    except BaseException:
        if figure is not None:
            pyplot.close(figure)  # pyplot would show the empty figure later
        raise
    return (axes if hasattr(axes, "figure") else axes[0]).figure, axes


def _diagram_of(metric: CalibrationMetric[Any]) -> Draw | None:
    if metric.batch_shape:
        return None
    for kind, diagram, of_classes in DIAGRAMS:
        if not isinstance(metric, kind):
            continue
        if _mode_of(metric) != "classwise":
            return diagram
        if of_classes is not classwise_reliability_diagrams and (metric.num_classes or 0) > MAX_CURVES:
            return None
        # A sample has one confidence per class against the rest, but only one risk.
        has_curve = kind is not SelectiveMetric or metric.input_format.read_as == "multilabel"
        return of_classes if has_curve else None
    return None


def _mode_of(metric: CalibrationMetric[Any]) -> Mode:
    accumulator: Any = metric.accumulator
    return resolve_mode(metric.input_format.read_as, accumulator.mode)


def _title(metric: CalibrationMetric[Any]) -> str:
    name, mode = type(metric).__name__, _mode_of(metric)
    if isinstance(metric, SelectiveMetric | CORP) and (value := metric.compute()).dim() == 0:
        name = f"{name} {value:.3g}"  # their diagrams do not contain the value
    if isinstance(metric, SelectiveMetric):
        return name  # the event is always an error of the predicted class
    if isinstance(mode, TopK):
        return f"{name}, {f'class of rank {mode.k}' if mode.only else f'{mode.k} most probable classes'}"
    return f"{name}, {_EVENTS[mode]}"
