"""Pictures of a bin table: what was observed against what was claimed, and where the confidences lie."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from torchcalib.core.bins import BinTable
from torchcalib.plots.canvas import LIGHT, Style, compact, dress, new_axes, say_no_data, width_in_points
from torchcalib.plots.series import Bins, columns_of

MAX_LABELLED_BINS = 20
"""With more bins the counts are read off an axis, as labels would touch."""


def reliability_diagram(
    table: BinTable, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT
) -> Axes:
    """Draw frequency against confidence, with the gap to the diagonal and the count of every bin.

    One mark per bin that holds data, at (mean confidence, frequency). Its area grows with the bin's share of the
    samples, so that a bin of few samples is not over-read. A line joins it to the diagonal: the gap. Filled marks lie
    below the diagonal (over-confident, for confidences above 0.5), hollow ones above. The strip on top counts. Grey
    boxes are where the marks of 95 % of calibrated models would lie, bin by bin, if the table knows: a mark outside of
    its box is more than chance.

    Args:
        table: one series of bins.
        ax: where to draw; by default on a new figure. The strip is an inset, just above the frame of `ax`.
        title: written above the picture.
        style: colours. With `DARK`, give the figure of `ax` a dark face.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Raises:
        ValueError: for a batch of tables.

    Example:
        >>> import torch
        >>> from torchcalib import bin_table
        >>> ax = reliability_diagram(bin_table(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]), task="binary"))
        >>> ax.get_xlabel()
        'mean confidence of the bin (probability)'
    """
    bins = columns_of(table)
    ax = new_axes(style, 4.6, 5.2, top=0.84) if ax is None else ax
    dress(ax, style, title)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.tick_params(pad=6)  # room for a large mark in the corner
    ax.set_xlabel("mean confidence of the bin (probability)")
    ax.set_ylabel("observed frequency (share of the bin)")
    ax.plot([0, 1], [0, 1], color=style.ink, linewidth=0.8, dashes=(5, 3), zorder=1.5, label="diagonal")
    if not bins.n.any():
        say_no_data(ax, style)
        return ax
    ax.text(0.03, 0.97, "○ more often than claimed", color=style.above, va="top", fontsize="small")
    ax.text(0.97, 0.03, "● less often than claimed", color=style.below, ha="right", fontsize="small")
    _draw_bands(ax, bins, style)
    _draw_gaps(ax, bins, style)
    _draw_counts(ax, bins, style)
    return ax


def confidence_histogram(
    table: BinTable,
    ax: Axes | None = None,
    *,
    log: bool | None = None,
    title: str | None = None,
    style: Style = LIGHT,
) -> Axes:
    """Draw how many samples each bin holds, with the mean confidence and the mean outcome of all of them.

    For the top label the mean outcome is the accuracy. How far the two lines are apart is |ESCE|.

    Args:
        table: one series of bins.
        ax: where to draw; by default on a new figure.
        log: whether the counts are on a logarithmic scale; by default where few bins hold nearly everything. The axis
            says so.
        title: written above the picture.
        style: colours.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Raises:
        ValueError: for a batch of tables.
    """
    bins = columns_of(table)
    ax = new_axes(style, 4.6, 4.8, top=0.9) if ax is None else ax
    dress(ax, style, title, above_legend=True)
    ax.set(xlim=(0, 1), xlabel="confidence (probability)")
    held = bins.n[bins.n > 0]
    if not held.size:
        ax.set(ylim=(0, 1), ylabel="count per bin")
        say_no_data(ax, style)
        return ax
    if log is None:
        log = bool(held.max() > 20 * np.median(held))
    ax.set_ylabel(f"count per bin{' (logarithmic scale)' if log else ''}")
    if log:
        ax.set_yscale("log")
    ax.set_ylim(held.min() / 2 if log else 0, held.max() * (2 if log else 1.06))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    _draw_bars(ax, bins, style)
    for name, mean, dashes, color in (
        ("confidence", bins.mean(bins.confidence), (1, 0), style.ink),
        ("outcome", bins.mean(bins.frequency), (4, 2), style.outcome),
    ):
        ax.axvline(mean, color=color, dashes=dashes, linewidth=1.6, clip_on=False, label=f"mean {name} {mean:.3f}")
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        borderpad=0,
        frameon=False,
        labelcolor=style.ink,
        fontsize="small",
    )
    return ax


def _draw_bands(ax: Axes, bins: Bins, style: Style) -> None:
    """A box around the diagonal for every bin, as wide as the bin: where its mark would be by chance."""
    known = (bins.n > 0) & np.isfinite(bins.band_low)
    if not known.any():
        return
    lower, upper, low, high = (x[known] for x in (bins.lower, bins.upper, bins.band_low, bins.band_high))
    width = upper - lower
    inset = 0.06 * width if len(bins.n) <= 50 else 0 * width  # neighbours stay apart as long as there is room
    ax.bar(
        lower + inset,
        np.maximum(high - low, 0.004),  # a band of no height still shows
        width - 2 * inset,
        np.minimum(low, 0.996),
        align="edge",
        color=style.bar,
        alpha=0.28,
        linewidth=0,
        zorder=1.2,
    )
    ax.text(0.03, 0.92, "■ 95 % if calibrated", color=style.muted, va="top", fontsize="small")


def _draw_gaps(ax: Axes, bins: Bins, style: Style) -> None:
    held = bins.n > 0
    x, y, gap = bins.confidence[held], bins.frequency[held], bins.gap[held]
    line = np.where(gap > 0, style.above, np.where(gap < 0, style.below, style.ink))
    stroke = np.clip(60 / len(bins.n), 0.5, 1.6)  # hundreds of bins must not run together
    ax.vlines(x, x, y, colors=list(line), linewidth=stroke, zorder=2)
    ax.scatter(
        x,
        y,
        # The smallest share still shows as a dot; beyond that area, not width, is the share.
        s=4 * stroke + 220 * bins.share[held],
        facecolors=list(np.where(gap > 0, style.paper, line)),
        edgecolors=list(line),
        linewidths=stroke,
        zorder=3,
        clip_on=False,  # a mark at 0 or 1 is as large as any other
    )


def _draw_counts(ax: Axes, bins: Bins, style: Style) -> None:
    """Bars of counts above the frame, on the same x axis: labelled where there is room, else with one tick."""
    strip = ax.inset_axes((0, 1.02, 1, 0.14))
    dress(strip, style, None)
    strip.grid(False)
    strip.set(xlim=(0, 1), ylim=(0, bins.n.max() * 1.45), xticks=[], yticks=[])
    strip.spines["left"].set_visible(False)
    strip.set_ylabel("count", fontsize="x-small")
    _draw_bars(strip, bins, style)
    if _fits_labels(ax, len(bins.n)):
        for middle, n in zip((bins.lower + bins.upper) / 2, bins.n, strict=True):
            if n > 0:
                strip.annotate(
                    compact(n),
                    (middle, n),
                    (0, 1.5),
                    textcoords="offset points",
                    ha="center",
                    color=style.muted,
                    fontsize=6,
                )
    else:
        strip.set_yticks([bins.n.max()], [compact(bins.n.max())])


def _draw_bars(ax: Axes, bins: Bins, style: Style) -> None:
    width = bins.upper - bins.lower
    line = 0.8 if len(bins.n) <= 50 else 0.0
    ax.bar(bins.lower, bins.n, width, align="edge", color=style.bar, edgecolor=style.paper, linewidth=line, zorder=1.5)


def _fits_labels(ax: Axes, n_bins: int) -> bool:
    """Whether a count of four characters is narrower than a bin, in points."""
    return n_bins <= MAX_LABELLED_BINS and width_in_points(ax) / n_bins >= 16
