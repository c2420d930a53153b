"""Reliability diagrams, with bins or isotonic regression, and the histogram of confidence."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.plots.canvas import LIGHT, Canvas, Column, Style, columns_of, count_label, diagram
from torchcalib.plots.sources import TableOptions, bins_from, curve_from, series_from

MAX_LABELLED_BINS = 20
"""Largest number of bins with a label for each count. With more bins, an axis shows the counts."""

_CORP_BARS = 40
"""Number of bars in the histogram of `corp_diagram`."""


@diagram
def reliability_diagram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    label: str | None = None,
    mode: Mode | None = None,
    task: Task | None = None,
    n_bins: int = 15,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw the observed frequency against the mean confidence of bins, with the expected calibration error (ECE).

    Each bin with data has a mark at (mean confidence, frequency), whose area increases with the fraction of samples in
    the bin. A line shows the gap to the diagonal. Marks below the diagonal are filled (over-confident, for confidences
    above 0.5), and marks above it are hollow. The strip at the top shows counts. Grey boxes are consistency bands, if
    the table contains them: the mark of a calibrated model is inside its box with probability 95%.

    Each of several models, or each class with `mode="classwise"`, is drawn as a curve, with a legend. A call with
    `label` adds a curve to `ax`.

    Args:
        preds: Predictions; or a `BinTable`, a metric over bins such as `torchcalib.ECE`, or a `torchcalib.Report`; or a
            mapping of model names to any of these.
        label: Name of the model in the legend.
        n_bins: Number of equal-width bins of predictions.
        class_names: Names of the classes, for class-wise curves and for text targets.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if a table has batch axes, or there are more than ten curves.

    Example:
        >>> import torch
        >>> probs, target = torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 0])
        >>> reliability_diagram(probs, target).get_xlabel()
        'mean confidence of the bin (probability)'
        >>> ax = reliability_diagram({"first": probs, "second": probs.square()}, target)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['first: ECE 0.3', 'second: ECE 0.197']
    """
    given = TableOptions(mode, class_names, {"task": task, "n_bins": n_bins, **options})
    series = series_from(preds, target, label, given)
    tables = [columns_of(one.table) for one in series]
    canvas = _unit_square(ax, style, title)
    ax = canvas.ax
    ax.set(xlabel="mean confidence of the bin (probability)", ylabel="observed frequency (fraction of the bin)")
    ax.tick_params(pad=6)  # space for a large mark in the corner
    if label is None and len(series) == 1 and series[0].name is None:
        return _draw_bins(canvas, tables[0], series[0].error)
    for one, bins in zip(series, tables, strict=True):
        has_data = bins.n > 0
        canvas.curve(
            bins.confidence[has_data],
            bins.frequency[has_data],
            f"{one.name}: {one.error}",
            marker="osD^v"[len(canvas.curves) % 5],
            markersize=4.5,
            markeredgecolor=style.paper,
            markeredgewidth=0.6,
            clip_on=False,
            zorder=3,
        )
    canvas.curve_legend()
    return ax


def _draw_bins(canvas: Canvas, bins: SimpleNamespace, error: str) -> Axes:
    """Draw the bins of a single model, with gaps, consistency bands and counts."""
    ax, style = canvas.ax, canvas.style
    has_data = bins.n > 0
    if not has_data.any():
        return canvas.no_data()
    width = bins.upper - bins.lower
    known = has_data & np.isfinite(bins.band_low)
    if known.any():
        inset = (0.06 if len(width) <= 50 else 0) * width  # gap between the boxes of neighbouring bins
        ax.bar(
            (bins.lower + inset)[known],
            np.maximum(bins.band_high - bins.band_low, 0.004)[known],  # a band of height 0 would be invisible
            (width - 2 * inset)[known],
            np.minimum(bins.band_low, 0.996)[known],
            align="edge",
            **_band(style),
        )
    _explain(canvas, error, level=0.95 if known.any() else None, kinds=("hollow: ", "filled: "))
    x, y, gap = bins.confidence[has_data], bins.frequency[has_data], bins.gap[has_data]
    color = np.where(gap > 0, style.above, np.where(gap < 0, style.below, style.ink))
    stroke = np.clip(60 / len(width), 0.5, 1.6)  # hundreds of bins require thin lines
    ax.vlines(x, x, y, colors=list(color), linewidth=stroke, zorder=2)
    ax.scatter(
        x,
        y,
        s=4 * stroke + 220 * bins.share[has_data],  # visible even for bins with few samples
        facecolors=list(np.where(gap > 0, style.paper, color)),
        edgecolors=list(color),
        linewidths=stroke,
        zorder=3,
        clip_on=False,  # do not cut marks at 0 and 1 in half
    )
    _draw_counts(canvas, bins.lower, width, bins.n, most_labels=MAX_LABELLED_BINS)
    return ax


@diagram
def corp_diagram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    mode: Mode | None = None,
    task: Task | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw a CORP reliability diagram: isotonic regression of outcomes on confidence, with a consistency band.

    CORP means consistent, optimally binned, reproducible and based on the pool-adjacent-violators algorithm.
    A curve within the band is no evidence against calibration. The outcome is less frequent than predicted where the
    curve is below the diagonal, and more frequent where it is above. The strip at the top shows counts.

    Args:
        preds: Predictions; or a curve without batch axes, see `torchcalib.functional.corp_curve`; or a metric that
            stores samples, such as `torchcalib.CORP`.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if the curve has batch axes.

    Reference:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), fig. 2.

    Example:
        >>> import torch
        >>> ax = corp_diagram(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
        >>> ax.get_ylabel()
        'recalibrated probability'
    """
    curve = curve_from(preds, target, TableOptions(mode, None, {"task": task, **options}))
    if curve.n.dim() != 1:
        raise ValueError(
            f"`preds` must have no batch axes, got curves of shape {tuple(curve.n.shape)}. Draw one curve: `curves[k]`."
        )
    canvas = _unit_square(ax, style, title)
    ax = canvas.ax
    ax.set(xlabel="confidence (probability)", ylabel="recalibrated probability")
    has_data = curve.n.cpu().numpy() > 0
    columns = (curve.confidence, curve.frequency, curve.band_low, curve.band_high, curve.n)
    confidence, frequency, low, high, n = (column.cpu().numpy()[has_data] for column in columns)
    if not n.size:
        return canvas.no_data()
    ax.fill_between(confidence, low, high, **_band(style))
    side = np.where(frequency > confidence, style.above, style.below)
    ax.plot(confidence, frequency, color=style.ink, linewidth=1.0, zorder=2)
    ax.scatter(confidence, frequency, s=7, color=list(side), linewidths=0, zorder=3, clip_on=False)
    _explain(canvas, "", curve.level, kinds=("", ""))
    counts, edges = np.histogram(confidence, bins=_CORP_BARS, range=(0, 1), weights=n)
    _draw_counts(canvas, edges[:-1], np.diff(edges), counts, most_labels=0)
    return ax


@diagram
def confidence_histogram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    log: bool | None = None,
    mode: Mode | None = None,
    task: Task | None = None,
    n_bins: int = 15,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw the number of samples in each bin, and the mean confidence and the mean outcome of all samples.

    For the top label, the mean outcome is the accuracy. The distance between the two lines is the absolute value of the
    expected signed calibration error (ESCE).

    Args:
        preds: Predictions; or a `BinTable` without batch axes, a metric over bins, or a `torchcalib.Report`.
        n_bins: Number of equal-width bins of predictions.
        log: Use a logarithmic scale for counts. None uses it if the largest count is above 20 times the median of the
            bins with data.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if the table has batch axes.

    Example:
        >>> import torch
        >>> ax = confidence_histogram(torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 0]))
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['mean confidence 0.567', 'mean outcome 0.333']
    """
    table = bins_from(preds, target, TableOptions(mode, None, {"task": task, "n_bins": n_bins, **options}))
    bins = columns_of(table)
    canvas = Canvas.of(ax, style, title, (4.6, 4.8), top=0.9, pad=20)
    ax = canvas.ax
    ax.set(xlim=(0, 1), xlabel="confidence (probability)")
    counts = bins.n[bins.n > 0]
    if not counts.size:
        ax.set(ylim=(0, 1), ylabel="count per bin")
        return canvas.no_data()
    if log is None:
        log = bool(counts.max() > 20 * np.median(counts))
    ax.set_ylabel(f"count per bin{' (logarithmic scale)' if log else ''}")
    ax.set_yscale("log" if log else "linear")
    ax.set_ylim(counts.min() / 2 if log else 0, counts.max() * (2 if log else 1.06))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    _draw_bars(canvas, bins.lower, bins.upper - bins.lower, bins.n)
    for name, column, dashes, color in (
        ("confidence", "confidence", (1, 0), style.ink),
        ("outcome", "frequency", (4, 2), style.outcome),
    ):
        mean = table.mean(column).item()
        ax.axvline(mean, color=color, dashes=dashes, linewidth=1.6, clip_on=False, label=f"mean {name} {mean:.3f}")
    canvas.legend(borderpad=0)
    return ax


def _unit_square(ax: Axes | None, style: Style, title: str | None) -> Canvas:
    """Return a square canvas with limits 0 and 1 on both axes, and the diagonal."""
    canvas = Canvas.of(ax, style, title, (4.6, 5.2), top=0.84)
    canvas.ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    canvas.diagonal()
    return canvas


def _explain(canvas: Canvas, error: str, level: float | None, kinds: tuple[str, str]) -> None:
    """Write the text `error`, and short explanations of the diagonal and of the consistency band at `level`."""
    style = canvas.style
    lines = [
        (error, style.ink),
        (f"{kinds[0]}more often than predicted", style.above),
        ("" if level is None else f"shaded: {100 * level:.10g}% band if calibrated", style.muted),
    ]
    for row, (text, color) in enumerate((text, color) for text, color in lines if text):
        canvas.text(0.03, 0.97 - 0.05 * row, text, color, va="top")
    canvas.text(0.97, 0.03, f"{kinds[1]}less often than predicted", style.below, ha="right")


def _band(style: Style) -> dict[str, Any]:
    return {"color": style.bar, "alpha": 0.28, "linewidth": 0, "zorder": 1.2}


def _draw_counts(canvas: Canvas, lower: Column, width: Column, n: Column, most_labels: int) -> None:
    """Draw bars of counts above the frame. Label each bar if there is space for all labels, else the largest count."""
    labelled = len(n) <= most_labels and canvas.points[0] / len(n) >= 16  # points per label of four characters
    panel = canvas.panel(0, 1.02, 1, 0.14)
    strip = panel.ax
    strip.grid(False)
    strip.set(xlim=(0, 1), ylim=(0, n.max() * (1.45 if labelled else 1.2)), xticks=[], yticks=[])
    strip.spines["left"].set_visible(False)
    strip.set_ylabel("count", fontsize="x-small")
    _draw_bars(panel, lower, width, n)
    if not labelled:
        strip.set_yticks([n.max()], [count_label(n.max())])
        return
    for middle, count in zip(lower + width / 2, n, strict=True):
        if count > 0:
            panel.label_bar(count_label(count), middle, count, panel.style.muted)


def _draw_bars(canvas: Canvas, lower: Column, width: Column, n: Column) -> None:
    style, line = canvas.style, 0.8 if len(n) <= 50 else 0.0
    canvas.ax.bar(lower, n, width, align="edge", color=style.bar, edgecolor=style.paper, linewidth=line, zorder=1.5)
