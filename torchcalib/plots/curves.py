"""Curves: entropic calibration difference of a sample, risk and coverage, and metrics recorded during a training."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.display.words import printable
from torchcalib.functional.proper_scores import ecd
from torchcalib.functional.risk_area import AreaWeight, weights_at
from torchcalib.functional.selective import RiskCoverageCurve
from torchcalib.io.errors import shown
from torchcalib.plots.canvas import LIGHT, Canvas, Column, Style
from torchcalib.plots.sources import DiagramData
from torchcalib.results.history import History

ECD_MINIMUM = -0.27846454276107380
"""Minimum of the entropic calibration difference (ECD) of one binary sample: -W(1/e), with the Lambert function W.

For outcome x = 1, the minimum is at p = 1 / (1 + W(1/e)). Source: [ECD] fig. 2.
"""

_SOLID = (1.0, 0.0)

_OPERATING_POINTS = 512
"""The Bayes risk is drawn at the operating points i / 512."""
_HEIGHT = 2.0
"""Height of the diagram of the Bayes risk, divided by the largest risk of the constant decision."""

_HATCHES = ("", "////", "....", "xxxx", "----", "\\\\\\\\")
"""Hatches of the bars of systems, which distinguish them without colours."""

_CURVES = {
    "nll": ("NLL", "ink", _SOLID),
    "ecd": ("ECD", "below", _SOLID),
    "confidence": ("confidence", "below", (3, 1.5)),
    "accuracy": ("accuracy", "outcome", _SOLID),
    "ece": ("ECE", "above", _SOLID),
}
"""Label, colour in `Style` and dashes of each curve, by column of the history."""

_PANELS = (("nats", ["nll"]), ("nats", ["ecd"]), ("fraction", ["confidence", "accuracy"]), ("probability", ["ece"]))
"""Unit of the vertical axis, and columns of the history, for each panel."""


def ecd_curve(ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the entropic calibration difference (ECD) of one binary sample against its predicted probability p.

    The diagram has one curve for each outcome x. The ECD is the log loss minus its expectation under the prediction. It
    is positive for over-confident predictions, negative for under-confident ones, and infinite if x has probability 0.

    Args:
        ax: Axes to draw on; None creates a figure.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, fig. 2.

    Example:
        >>> ecd_curve().get_ylabel()
        'ECD (nats)'
    """
    canvas = Canvas.create(ax, style, title, (5.4, 3.8), top=0.92)
    ax = canvas.ax
    ax.set(xlim=(0, 1), ylim=(-0.5, 2))
    canvas.label("p, the predicted probability of x = 1", "ECD (nats)")
    ax.axhline(0, color=style.ink, linewidth=0.8)
    p = torch.linspace(0, 1, 1025, dtype=torch.float64, device="cpu")
    at = 1 / (1 - ECD_MINIMUM)
    for x, formula, color, dashes, lowest, side, edge in (
        (1, "(p − 1) log(p / (1 − p))", style.above, (1, 0), at, 0.2, "left"),
        (0, "p log(p / (1 − p))", style.below, (4, 1.5), 1 - at, 0.8, "right"),
    ):
        score = ecd(p, torch.full_like(p, x, dtype=torch.int64), task="binary", reduction="none").numpy()
        curve = np.where(np.isfinite(score), score, np.nan)
        ax.plot(p.numpy(), curve, color=color, dashes=dashes, linewidth=1.8, label=f"x = {x}: {formula}")
        ax.plot([lowest], [ECD_MINIMUM], "o", color=color, markersize=4.5, label=f"minimum, x = {x}")
        words = f"x = {x}\n{formula}" if canvas.scale == 1 else f"x = {x}"
        canvas.text(side, 1.6, words, color, ha=edge, va="center")
        if canvas.scale == 1:
            canvas.text(lowest, ECD_MINIMUM - 0.04, f"p = {lowest:.4f}", color, ha="center", va="top")
    if canvas.scale < 1:  # no space for explanations
        return ax
    minimum = f"minimum: −W(1/e) = −{-ECD_MINIMUM:.4f}"
    for y, text in ((ECD_MINIMUM - 0.11, minimum), (1.1, "above 0: over-confident\nbelow 0: under-confident")):
        canvas.text(0.5, y, text, style.muted, ha="center", va="top")
    return ax


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
    source = DiagramData(preds, target, mode, class_names, {"task": task, **options})
    canvas = Canvas.create(ax, style, title, (5.4, 3.8), top=0.92)
    ax = canvas.ax
    ax.set(xlim=(0, 1))
    canvas.label("coverage (fraction of samples)", "selective risk (error rate)")
    for name, curve in source.by_model(label, _named_curves):
        held = curve.coverage.isfinite().cpu()
        if held.any():
            canvas.curve(curve.coverage.cpu()[held].numpy(), curve.risk.cpu()[held].numpy(), printable(name))
        else:
            canvas.no_data()
    ax.set_ylim(bottom=0)
    canvas.curve_legend()
    return ax


def bayes_risk_diagram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    label: str | None = None,
    weight: AreaWeight = "uniform",
    task: Task | None = None,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw the Bayes risk for two classes against the operating point c, multiplied by a weight w(c).

    The area under the curve is the score of the weight: the cross entropy for the uniform weight. The legend states it.
    A thin dashed curve is the risk of the better constant decision for the class frequencies of the first model. Where
    a model is above it, its decisions are worse than this decision. The axis ends at twice the largest such risk,
    because costs are not bounded. A call with `label` adds a curve to `ax`.

    Args:
        preds: Predictions, or a mapping of model names to predictions.
        target: Labels or soft targets.
        ax: Axes to draw on; None creates a figure.
        label: Name of the model in the legend.
        weight: Weight w; see `torchcalib.functional.bayes_risk_area`.
        task: Task of the predictions; None infers it from the shapes.
        class_names: Names of the labels of multi-label predictions, and class names for text targets.
        title: Title of the diagram.
        style: Colours of the diagram.
        **options: Options for predictions, see `torchcalib.functional.InputOptions`, without `batch_dims`.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: for a multi-class task without `positive_classes`, a wrong weight, or more than ten curves.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.3.4, eq. 34 and fig. 4.

    Example:
        >>> import torch
        >>> ax = bayes_risk_diagram(torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 0]), weight="beta22")
        >>> ax.get_xlabel()
        'operating point c'
    """
    source = DiagramData(preds, target, None, class_names, {"task": task, **options})
    canvas = Canvas.create(ax, style, title, (5.4, 3.8), top=0.92)
    ax = canvas.ax
    unweighted = isinstance(weight, str) and weight == "uniform"
    ax.set(xlim=(0, 1))
    canvas.label("operating point c", "Bayes risk" if unweighted else "Bayes risk, weighted")
    c = torch.arange(1, _OPERATING_POINTS, dtype=torch.float64, device="cpu") / _OPERATING_POINTS
    w = weights_at(weight, c)
    constant: dict[str, Any] | None = None  # look of the curve of the constant decision
    for name, risk, cheapest, area in source.by_model(label, partial(_risk_curves, c=c, weight=weight)):
        if not canvas.curves and cheapest.isfinite().all():
            constant = {"color": style.muted, "linewidth": 0.9, "linestyle": (0, (2, 2))}
            ax.plot(c.numpy(), (w * cheapest).numpy(), label="_constant decision", **constant)
            ax.set_ylim(0, _HEIGHT * float((w * cheapest).max()) or None)
        if risk.isfinite().all():
            canvas.curve(c.numpy(), (w * risk).numpy(), "\n".join(filter(None, (name, f"area {area:.3g}"))))
        else:
            canvas.no_data()
    if constant is not None:
        canvas.key("better constant decision", **constant)
    canvas.curve_legend()
    return ax


def _risk_curves(
    source: DiagramData, name: str | None, *, c: Tensor, weight: AreaWeight
) -> list[tuple[str, Tensor, Tensor, float]]:
    """Return the name, the risk and the cost of the constant decision at points c, and the area, for each curve."""
    curve, area = source.bayes_risk(c, weight)
    columns = [x.cpu() for x in (curve.risk, curve.cheapest, area)]
    if curve.risk.dim() == 1:
        return [(name or "", columns[0], columns[1], float(columns[2]))]
    names = source.curve_names(name, "label", len(curve.risk))
    return [(each, risk, cheapest, float(own)) for each, risk, cheapest, own in zip(names, *columns, strict=True)]


def score_chart(
    scores: Mapping[str, Mapping[str, float | Tensor]],
    ax: Axes | None = None,
    *,
    title: str | None = None,
    style: Style = LIGHT,
) -> Axes:
    """Draw the scores of several systems as bars: a group for each score, with a bar for each system.

    Args:
        scores: Mapping of system names to mappings of score names to values. All systems have the same scores.
        ax: Axes to draw on; None creates a figure.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        ValueError: if there are no scores, or systems with different scores.

    Reference:
        [EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), fig. 5, 6 and 8.

    Example:
        >>> ax = score_chart({"raw": {"NCE": 0.9, "NBS": 0.8}, "calibrated": {"NCE": 0.7, "NBS": 0.6}})
        >>> [bars.get_label() for bars in ax.containers]
        ['raw', 'calibrated']
    """
    names = [list(of_system) for of_system in scores.values()]
    if not names or not names[0] or any(other != names[0] for other in names):
        raise ValueError(
            f"`scores` must have the same scores for every system, got {shown(names)}. "
            "Pass {'system': {'NCE': 0.7, ...}, ...}."
        )
    canvas = Canvas.create(ax, style, title, (max(5.4, 0.35 * len(names) * len(names[0])), 3.4), top=0.9)
    ax, width = canvas.ax, 0.8 / len(scores)
    for index, (system, of_system) in enumerate(scores.items()):
        values = np.array([float(value) for value in of_system.values()])
        at = np.arange(len(values)) + (index - (len(scores) - 1) / 2) * width
        look = {
            "color": canvas.look(index)["color"],
            "hatch": _HATCHES[index % len(_HATCHES)],
            "edgecolor": style.paper,
        }
        heights = np.where(np.isfinite(values), values, 0)
        ax.bar(at, heights, width, linewidth=0, label=printable(system), **look)
        for x, value in zip(at, values, strict=True):
            canvas.label_bar(f"{value:.3g}", x, value if np.isfinite(value) and value > 0 else 0, style.ink)
    ax.set_xticks(range(len(names[0])), [printable(name) for name in names[0]])
    ax.axhline(0, color=style.ink, linewidth=0.8)
    canvas.legend(ncols=4)
    return ax


def _named_curves(source: DiagramData, name: str | None) -> list[tuple[str, RiskCoverageCurve]]:
    """Return the curve of a model, or of each label of multi-label predictions."""
    curve = source.risk_curve()
    if curve.coverage.dim() == 1:
        return [(name or "", curve)]
    if curve.coverage.dim() > 2:
        raise ValueError(
            f"`preds` must have at most one batch axis, got a curve of shape {tuple(curve.coverage.shape)}. "
            "Draw each curve."
        )
    names = source.curve_names(name, "label", len(curve.coverage))
    return [(each, RiskCoverageCurve(*(x[k] for x in curve))) for k, each in enumerate(names)]


def training_curve(history: History, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the metric values that a `torchcalib.Monitor` recorded at each validation.

    Up to four panels, one below the other, show the recorded values:

    - Negative log-likelihood (NLL).
    - Entropic calibration difference (ECD). Positive values mean over-confidence, and are shaded.
    - Accuracy, and mean confidence for multi-class tasks. The gap is shaded if confidence is above accuracy.
    - Expected calibration error (ECE).

    A vertical line marks the lowest NLL. Red lines mark warnings of over-confidence.

    Args:
        history: Recorded validations, `Monitor.history`.
        ax: Axes to draw on; None creates a figure.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Example:
        >>> from torchcalib.results.history import History, HistoryRow
        >>> rows = [HistoryRow(k, k, {"nll": 0.5, "ecd": -0.1, "ece": 0.1, "accuracy": 0.8}) for k in (1, 2, 3)]
        >>> [panel.get_ylabel() for panel in training_curve(History(tuple(rows))).child_axes]
        ['nats', 'nats', 'fraction', 'probability']
    """
    drawn = []
    for unit, keys in _PANELS:
        all_columns = {key: np.array(history.column(key), dtype=np.float64) for key in keys}
        # NaN replaces infinite and missing values.
        finite = {key: np.where(np.isfinite(x), x, np.nan) for key, x in all_columns.items() if np.isfinite(x).any()}
        if finite:
            drawn.append((unit, finite))
    canvas = Canvas.create(ax, style, title, (6.4, 0.9 + 1.3 * max(1, len(drawn))), top=0.94, pad=20).only_panels()
    if not drawn:
        return canvas.no_data()
    at = np.array([row.epoch if history.unit == "epoch" else row.step for row in history.rows], dtype=np.float64)
    panels = canvas.panels(len(drawn), gap=0.05)
    for (unit, columns), panel in zip(drawn, panels, strict=True):
        _draw_curves(panel, at, columns)
        if canvas.scale == 1:  # less space is not enough for the units
            panel.ax.set_ylabel(unit, fontsize="small")
        is_last = panel is panels[-1]
        panel.ax.tick_params(axis="x", labelbottom=is_last)
        panel.ax.set_xlabel(history.unit if is_last else "")
        _draw_marks(panel, history, at, labelled=panel is panels[0])
    return canvas.ax


def _draw_curves(canvas: Canvas, at: Column, columns: Mapping[str, Column]) -> None:
    ax, style = canvas.ax, canvas.style
    ends = []
    for key, column in columns.items():
        name, color, dashes = _CURVES[key]
        ax.plot(
            at,
            column,
            color=getattr(style, color),
            dashes=dashes,
            linewidth=1.6,
            marker="o" if len(at) <= 30 else "",
            markersize=2.5,
            label=name,
            clip_on=False,
            zorder=3,
        )
        ends.append((column[np.isfinite(column)][-1], name, getattr(style, color)))
    if "ecd" in columns:
        ax.axhline(0, color=style.ink, linewidth=0.8)
    for over, base in (("ecd", np.zeros_like(at)), ("confidence", columns.get("accuracy"))):
        if over in columns and base is not None:  # shade over-confidence
            y, where = columns[over], list(columns[over] > base)
            ax.fill_between(at, base, y, where=where, interpolate=True, color=style.below, alpha=0.18, linewidth=0)
    if "accuracy" in columns:
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_xlim(at.min() - 0.5 * (len(at) == 1), at.max() + 0.5 * (len(at) == 1))
    ax.yaxis.set_major_locator(MaxNLocator(4 if canvas.scale == 1 else 2))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.margins(y=0.12)
    # Label each curve at its right end with its name and last value. Overlapping labels are moved up.
    low, high = ax.get_ylim()
    place = -np.inf
    for last, name, color in sorted(ends):
        place = max(last, place + 0.16 * (high - low))
        canvas.annotate(f"{name} {last:.3f}", at[-1], place, (6, 0), color=color, va="center")


def _draw_marks(canvas: Canvas, history: History, at: Column, labelled: bool) -> None:
    """Draw vertical lines at the lowest negative log-likelihood and at warnings, with text if `labelled`."""
    ax, style, best = canvas.ax, canvas.style, history.best
    marks = [(history.rows.index(best), style.muted, (1, 1.5), "lowest NLL", 15)] if best is not None else []
    marks += [(index, style.rejected, (4, 2), "warning", 4) for index, row in enumerate(history.rows) if row.warning]
    for index, color, dashes, name, height in marks:
        ax.axvline(at[index], color=color, dashes=dashes, linewidth=1.2, zorder=2)
        if labelled:
            side = "right" if at[index] > 0.4 * at.min() + 0.6 * at.max() else "left"
            options = {"xycoords": ax.get_xaxis_transform(), "color": color, "ha": side}
            canvas.annotate(f"{name}, {history.unit} {at[index]:,.0f}", at[index], 1, (0, height), **options)
