"""Risk-coverage curves of selective prediction."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from matplotlib.axes import Axes

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.io.errors import printable
from torchcalib.metrics.risk_coverage import RiskCoverageCurve
from torchcalib.metrics.risk_coverage import risk_coverage_curve as functional_curve
from torchcalib.metrics.selective import SelectiveMetric
from torchcalib.plots.canvas import LIGHT, Canvas, Style, diagram
from torchcalib.plots.sources import TableOptions, by_model, from_predictions, names_of_curves


class _NamedCurve(NamedTuple):
    """Curve without batch axes, with its name in the legend."""

    name: str
    curve: RiskCoverageCurve


@diagram
def risk_coverage_curve(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    label: str | None = None,
    mode: Mode | None = None,
    task: Task | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw the error rate of the most confident samples (selective risk) against their fraction (coverage).

    A lower curve is better. The right end is the error rate of all samples. A call with `label` adds a curve to `ax`.

    Args:
        preds: Predictions; or a `torchcalib.functional.RiskCoverageCurve`; or a metric of selective prediction, such as
            `torchcalib.AURC`; or a mapping of model names to any of these.
        label: Name of the model in the legend.
        class_names: Names of the labels of multi-label predictions, and class names for text targets.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if there are more than ten curves.

    Example:
        >>> import torch
        >>> ax = risk_coverage_curve(torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 0]))
        >>> ax.get_xlabel()
        'coverage (fraction of samples)'
    """
    curves = _named_curves(preds, target, label, TableOptions(mode, class_names, {"task": task, **options}))
    canvas = Canvas.create(ax, style, title, (5.4, 3.8), top=0.92)
    ax = canvas.ax
    ax.set(xlim=(0, 1), xlabel="coverage (fraction of samples)", ylabel="selective risk (error rate)")
    for name, curve in curves:
        held = curve.coverage.isfinite().cpu()
        if held.any():
            canvas.curve(curve.coverage.cpu()[held].numpy(), curve.risk.cpu()[held].numpy(), printable(name))
        else:
            canvas.no_data()
    ax.set_ylim(bottom=0)
    canvas.curve_legend()
    return ax


def _named_curves(source: Any, target: Any, label: str | None, given: TableOptions) -> list[_NamedCurve]:
    """Return the curves of a source: one per entry of a mapping, and one per label of multi-label predictions."""

    def curves_of(one: Any, name: str | None) -> list[_NamedCurve]:
        curve = _curve_from(one, target, given)
        if curve.coverage.dim() == 1:
            return [_NamedCurve(name or "", curve)]
        if curve.coverage.dim() > 2:
            raise ValueError(
                f"`preds` must have at most one batch axis, got a curve of shape {tuple(curve.coverage.shape)}. "
                "Draw each curve."
            )
        names = names_of_curves(name, "label", len(curve.coverage), given)
        return [_NamedCurve(each, RiskCoverageCurve(*(x[k] for x in curve))) for k, each in enumerate(names)]

    return by_model(source, label, curves_of)


def _curve_from(source: Any, target: Any, given: TableOptions) -> RiskCoverageCurve:
    """Return the curve for `source`: a curve, a metric of selective prediction, or predictions."""
    if hasattr(source, "tables"):
        raise TypeError(
            "`preds` must be predictions, a curve or a metric of selective prediction, got a report, which has no "
            "risk-coverage curve. Pass the predictions."
        )
    if isinstance(source, RiskCoverageCurve):
        return source
    if isinstance(source, SelectiveMetric):
        return source.curve()
    curve: RiskCoverageCurve = from_predictions(functional_curve, source, target, given)
    return curve
