"""Diagrams of frequency against confidence, in bins or by isotonic regression, and the histogram of confidence."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from torchcalib.core.bins import BinTable
from torchcalib.metrics.ranked import CORPCurve
from torchcalib.plots.canvas import LIGHT, Canvas, Column, Style, columns_of, count_label, diagram

MAX_LABELLED_BINS = 20
"""With more bins an axis shows the counts, because labels would overlap."""

_CORP_BARS = 40


@diagram
def reliability_diagram(
    table: BinTable, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT
) -> Axes:
    """Draw frequency against confidence, with the gap to the diagonal and the count of every bin.

    Every bin with data has a mark at (mean confidence, frequency), whose area grows with its share of the samples. A
    line joins it to the diagonal: the gap. Filled marks lie below the diagonal (over-confident, for confidences above
    0.5), hollow ones above. The strip on top shows counts. Grey boxes are consistency bands, if the table has them: a
    calibrated model has its mark in the box of a bin in 95% of samples.

    Args:
        table: bins without batch axes.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        ValueError: for a batch of tables.

    Example:
        >>> import torch
        >>> from torchcalib.functional import calibration_curve
        >>> ax = reliability_diagram(calibration_curve(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]), task="binary"))
        >>> ax.get_xlabel()
        'mean confidence of the bin (probability)'
    """
    bins = columns_of(table)
    canvas = _unit_square(ax, style, title)
    ax = canvas.ax
    ax.set(xlabel="mean confidence of the bin (probability)", ylabel="observed frequency (share of the bin)")
    ax.tick_params(pad=6)  # room for a large mark in the corner
    held = bins.n > 0
    if not held.any():
        return canvas.no_data()
    width = bins.upper - bins.lower
    known = held & np.isfinite(bins.band_low)
    if known.any():
        inset = (0.06 if len(width) <= 50 else 0) * width  # keep neighbouring boxes apart while there is room
        ax.bar(
            (bins.lower + inset)[known],
            np.maximum(bins.band_high - bins.band_low, 0.004)[known],  # a band of no height stays visible
            (width - 2 * inset)[known],
            np.minimum(bins.band_low, 0.996)[known],
            align="edge",
            **_band(style),
        )
    _explain(canvas, "○", level=0.95 if known.any() else None)
    x, y, gap = bins.confidence[held], bins.frequency[held], bins.gap[held]
    color = np.where(gap > 0, style.above, np.where(gap < 0, style.below, style.ink))
    stroke = np.clip(60 / len(width), 0.5, 1.6)  # the lines of hundreds of bins must not merge
    ax.vlines(x, x, y, colors=list(color), linewidth=stroke, zorder=2)
    ax.scatter(
        x,
        y,
        s=4 * stroke + 220 * bins.share[held],  # the smallest share is still a dot
        facecolors=list(np.where(gap > 0, style.paper, color)),
        edgecolors=list(color),
        linewidths=stroke,
        zorder=3,
        clip_on=False,  # marks at 0 and 1 are drawn whole
    )
    _draw_counts(canvas, bins.lower, width, bins.n, most_labels=MAX_LABELLED_BINS)
    return ax


@diagram
def corp_diagram(curve: CORPCurve, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the CORP reliability diagram: isotonic regression of outcomes on confidence, with its consistency band.

    A curve within the band is no evidence against calibration. Below the diagonal outcomes were less frequent than
    predicted, above it more frequent. The strip on top shows counts.

    Args:
        curve: curve without batch axes; see `corp_curve`.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        ValueError: for a batch of curves.

    Source:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), fig. 2.

    Example:
        >>> import torch
        >>> from torchcalib.functional import corp_curve
        >>> ax = corp_diagram(corp_curve(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]), task="binary"))
        >>> ax.get_ylabel()
        'recalibrated (frequency)'
    """
    if curve.n.dim() != 1:
        raise ValueError(
            f"`curve` must have no batch axes, got shape {tuple(curve.n.shape)}. Draw one of the batch: `curve[k]`."
        )
    canvas = _unit_square(ax, style, title)
    ax = canvas.ax
    ax.set(xlabel="confidence (probability)", ylabel="recalibrated (frequency)")
    held = curve.n.cpu().numpy() > 0
    columns = (curve.confidence, curve.frequency, curve.band_low, curve.band_high, curve.n)
    confidence, frequency, low, high, n = (column.cpu().numpy()[held] for column in columns)
    if not n.size:
        return canvas.no_data()
    ax.fill_between(confidence, low, high, **_band(style))
    side = np.where(frequency > confidence, style.above, style.below)
    ax.plot(confidence, frequency, color=style.ink, linewidth=1.0, zorder=2)
    ax.scatter(confidence, frequency, s=7, color=list(side), linewidths=0, zorder=3, clip_on=False)
    _explain(canvas, "●", curve.level)
    counts, edges = np.histogram(confidence, bins=_CORP_BARS, range=(0, 1), weights=n)
    _draw_counts(canvas, edges[:-1], np.diff(edges), counts, most_labels=0)
    return ax


@diagram
def confidence_histogram(
    table: BinTable,
    ax: Axes | None = None,
    *,
    log: bool | None = None,
    title: str | None = None,
    style: Style = LIGHT,
) -> Axes:
    """Draw how many samples each bin holds, with the mean confidence and the mean outcome of all samples.

    For the top label the mean outcome is the accuracy. The distance between the two lines is |ESCE|.

    Args:
        table: bins without batch axes.
        log: whether counts have a logarithmic scale, named on the axis; by default if the largest bin holds more than
            20 times the median.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        ValueError: for a batch of tables.
    """
    bins = columns_of(table)
    canvas = Canvas.of(ax, style, title, (4.6, 4.8), top=0.9, pad=20)
    ax = canvas.ax
    ax.set(xlim=(0, 1), xlabel="confidence (probability)")
    held = bins.n[bins.n > 0]
    if not held.size:
        ax.set(ylim=(0, 1), ylabel="count per bin")
        return canvas.no_data()
    if log is None:
        log = bool(held.max() > 20 * np.median(held))
    ax.set_ylabel(f"count per bin{' (logarithmic scale)' if log else ''}")
    ax.set_yscale("log" if log else "linear")
    ax.set_ylim(held.min() / 2 if log else 0, held.max() * (2 if log else 1.06))
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
    """Return square axes of two probabilities, with the diagonal."""
    canvas = Canvas.of(ax, style, title, (4.6, 5.2), top=0.84)
    canvas.ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    canvas.diagonal()
    return canvas


def _explain(canvas: Canvas, mark_above: str, level: float | None) -> None:
    """Explain the marks on both sides of the diagonal, and the consistency band, if there is one."""
    canvas.text(0.03, 0.97, f"{mark_above} more often than predicted", canvas.style.above, va="top")
    canvas.text(0.97, 0.03, "● less often than predicted", canvas.style.below, ha="right")
    if level is not None:
        canvas.text(0.03, 0.92, f"■ {100 * level:.10g}% if calibrated", canvas.style.muted, va="top")


def _band(style: Style) -> dict[str, Any]:
    """Return the options of a consistency band."""
    return {"color": style.bar, "alpha": 0.28, "linewidth": 0, "zorder": 1.2}


def _draw_counts(canvas: Canvas, lower: Column, width: Column, n: Column, most_labels: int) -> None:
    """Draw bars of counts above the frame, with labels if they fit and else with one tick."""
    labelled = len(n) <= most_labels and canvas.points[0] / len(n) >= 16  # points of four characters
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
