"""Risk-coverage curves of selective prediction."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Unpack

from matplotlib.axes import Axes

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.io.errors import printable
from torchcalib.metrics.risk_coverage import RiskCoverageCurve
from torchcalib.plots.canvas import LIGHT, Canvas, Style
from torchcalib.plots.sources import Source


class _NamedCurve(NamedTuple):
    """Curve without batch axes."""

    name: str
    curve: RiskCoverageCurve


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
        target: Labels for predictions.
        ax: Axes to draw on; None creates a figure.
        label: Name of the model in the legend.
        mode: Kind of confidence; None selects the first kind of the task.
        task: Task of the predictions; None infers it from the shapes.
        class_names: Names of the labels of multi-label predictions, and class names for text targets.
        title: Title of the diagram.
        style: Colours of the diagram.
        **options: Options for predictions, see `torchcalib.functional.InputOptions`, without `batch_dims`.

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
    source = Source(preds, target, mode, class_names, {"task": task, **options})
    canvas = Canvas.create(ax, style, title, (5.4, 3.8), top=0.92)
    ax = canvas.ax
    ax.set(xlim=(0, 1), xlabel="coverage (fraction of samples)", ylabel="selective risk (error rate)")
    for name, curve in source.by_model(label, _named_curves):
        held = curve.coverage.isfinite().cpu()
        if held.any():
            canvas.curve(curve.coverage.cpu()[held].numpy(), curve.risk.cpu()[held].numpy(), printable(name))
        else:
            canvas.no_data()
    ax.set_ylim(bottom=0)
    canvas.curve_legend()
    return ax


def _named_curves(source: Source, name: str | None) -> list[_NamedCurve]:
    """Return the curve of a model, or of each label of multi-label predictions."""
    curve = source.risk_curve()
    if curve.coverage.dim() == 1:
        return [_NamedCurve(name or "", curve)]
    if curve.coverage.dim() > 2:
        raise ValueError(
            f"`preds` must have at most one batch axis, got a curve of shape {tuple(curve.coverage.shape)}. "
            "Draw each curve."
        )
    names = source.curve_names(name, "label", len(curve.coverage))
    return [_NamedCurve(each, RiskCoverageCurve(*(x[k] for x in curve))) for k, each in enumerate(names)]
