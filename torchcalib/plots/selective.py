"""Risk-coverage curves of selective prediction."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

from matplotlib.axes import Axes

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.core.tasks import check_name_count
from torchcalib.io.errors import printable
from torchcalib.metrics import selective
from torchcalib.metrics.selective import RiskCoverageCurve, SelectiveMetric
from torchcalib.plots.canvas import LIGHT, Canvas, Style, diagram
from torchcalib.plots.sources import MAX_SERIES, TableOptions, from_predictions

_CURVE = "torchcalib: risk-coverage curve"
"""Group id that marks the curves on matplotlib axes."""


class _Series(NamedTuple):
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
    series = _series(preds, target, label, TableOptions(mode, class_names, {"task": task, **options}))
    if len(series) > MAX_SERIES:
        raise ValueError(
            f"`preds` must contain at most {MAX_SERIES} curves for one diagram, got {len(series)}. "
            "Pass fewer models or labels."
        )
    canvas = Canvas.of(ax, style, title, (5.4, 3.8), top=0.92)
    ax = canvas.ax
    ax.set(xlim=(0, 1), xlabel="coverage (fraction of samples)", ylabel="selective risk (error rate)")
    colors = (style.above, style.below, style.outcome, style.rejected, style.muted)
    for name, curve in series:
        held = curve.coverage.isfinite().cpu()
        if not held.any():
            canvas.no_data()
            continue
        index = sum(line.get_gid() == _CURVE for line in ax.lines)
        ax.plot(
            curve.coverage.cpu()[held].numpy(),
            curve.risk.cpu()[held].numpy(),
            color=colors[index % len(colors)],
            linestyle="-" if index < len(colors) else "--",
            linewidth=1.4,
            label=printable(name) if name else "_",
            gid=_CURVE,
        )
    ax.set_ylim(bottom=0)
    handles = [line for line in ax.lines if line.get_gid() == _CURVE and not str(line.get_label()).startswith("_")]
    if handles:
        colors_of_text: dict[str, Any] = {
            "labelcolor": style.ink,
            "facecolor": style.paper,
            "edgecolor": style.grid,
        }
        for text in ax.legend(handles=handles, fontsize="small", **colors_of_text).get_texts():
            text.set_parse_math(False)
    return ax


def _series(source: Any, target: Any, label: str | None, given: TableOptions) -> list[_Series]:
    """Return the curves of a source: one per entry of a mapping, and one per label of multi-label predictions."""
    if isinstance(source, Mapping) and not hasattr(source, "tables"):
        if not source:
            raise ValueError(
                "`preds` must contain at least one model, got none. Pass a mapping of model names to predictions."
            )
        return [each for name, one in source.items() for each in _series(one, target, str(name), given)]
    if hasattr(source, "tables"):
        raise TypeError(
            "`preds` must be predictions, a curve or a metric of selective prediction, got a report, which has no "
            "risk-coverage curve. Pass the predictions."
        )
    curve: RiskCoverageCurve
    if isinstance(source, RiskCoverageCurve):
        curve = source
    elif isinstance(source, SelectiveMetric):
        curve = source.curve()
    else:
        curve = from_predictions(selective.risk_coverage_curve, source, target, given)
    if curve.coverage.dim() == 1:
        return [_Series(label or "", curve)]
    if curve.coverage.dim() > 2:
        raise ValueError(
            f"`preds` must have at most one batch axis, got a curve of shape {tuple(curve.coverage.shape)}. "
            "Draw each curve."
        )
    names = tuple(given.class_names or ())
    check_name_count(names, len(curve.coverage))
    names = names or tuple(f"label {k}" for k in range(len(curve.coverage)))
    of = "" if label is None else f"{label}, "
    return [_Series(f"{of}{name}", RiskCoverageCurve(*(x[k] for x in curve))) for k, name in enumerate(names)]
