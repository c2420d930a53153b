"""Pictures of bin tables and of the ECD, each drawn on the `ax` it is given and nowhere else.

Without an `ax` a figure of its own is made, outside pyplot: `ax.figure.savefig(...)`, or `to_svg(ax)` and `to_png(ax)`,
whose bytes are the same for the same picture. To see a picture with `plt.show()` pass `ax=plt.gca()`.
"""

import io
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from torchcalib.bins import BinTable
from torchcalib.scores import ecd_per_sample

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter
except ImportError as error:
    raise ImportError(
        "`torchcalib.plots` must have matplotlib to draw with, got none. Install it: pip install 'torchcalib[plot]'."
    ) from error

Column = NDArray[np.float64]

MAX_LABELLED_BINS = 20
"""With more bins the counts are read off an axis, as labels would touch."""

ECD_MINIMUM = -0.27846454276107380
"""-W(1/e), the least ECD of one binary datum; it is reached at p = 1 / (1 + W(1/e)) if x = 1. [ECD] fig. 2."""


@dataclass(frozen=True)
class Style:
    """Colours of a picture. `LIGHT` and `DARK` keep apart what must be for colour-blind readers (Okabe and Ito).

    Attributes:
        paper: background.
        ink: text, axes and the diagonal.
        muted: secondary text.
        grid: grid lines.
        bar: bars of counts.
        above: frequency above confidence.
        below: frequency below confidence.
        outcome: the mean outcome.
    """

    paper: str
    ink: str
    muted: str
    grid: str
    bar: str
    above: str
    below: str
    outcome: str


LIGHT = Style("#ffffff", "#1b1f24", "#5c646d", "#e3e6e9", "#8b95a0", "#0072b2", "#bf5200", "#009e73")
DARK = Style("#15181c", "#e4e6e8", "#9aa3ac", "#2c3238", "#626c77", "#56b4e9", "#e69f00", "#33c49a")


def reliability_diagram(
    table: BinTable, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT
) -> Axes:
    """Draw frequency against confidence, with the gap to the diagonal and the count of every bin.

    One mark per bin that holds data, at (mean confidence, frequency). Its area grows with the bin's share of the
    samples, so that a bin of few samples is not over-read. A line joins it to the diagonal: the gap. Filled marks lie
    below the diagonal (over-confident, for confidences above 0.5), hollow ones above. The strip on top counts.

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
        >>> from torchcalib import bin_table
        >>> ax = reliability_diagram(bin_table(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]), task="binary"))
        >>> ax.get_xlabel()
        'mean confidence of the bin (probability)'
    """
    bins = _columns(table)
    ax = _new_axes(style, 4.6, 5.2, top=0.84) if ax is None else ax
    _dress(ax, style, title)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.tick_params(pad=6)  # room for a large mark in the corner
    ax.set_xlabel("mean confidence of the bin (probability)")
    ax.set_ylabel("observed frequency (share of the bin)")
    ax.plot([0, 1], [0, 1], color=style.ink, linewidth=0.8, dashes=(5, 3), zorder=1.5, label="diagonal")
    if not bins.n.any():
        _say_no_data(ax, style)
        return ax
    ax.text(0.03, 0.97, "○ more often than claimed", color=style.above, va="top", fontsize="small")
    ax.text(0.97, 0.03, "● less often than claimed", color=style.below, ha="right", fontsize="small")
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
    bins = _columns(table)
    ax = _new_axes(style, 4.6, 4.8, top=0.9) if ax is None else ax
    _dress(ax, style, title, above_legend=True)
    ax.set(xlim=(0, 1), xlabel="confidence (probability)")
    held = bins.n[bins.n > 0]
    if not held.size:
        ax.set(ylim=(0, 1), ylabel="count per bin")
        _say_no_data(ax, style)
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


def ecd_curve(ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the entropic calibration difference of one binary datum over the probability it was given.

    Below zero the datum was likelier than the prediction itself expected (under-confident), above zero less likely
    (over-confident). Both curves go to infinity where a probability of 0 was given to what happened.

    Args:
        ax: where to draw; by default on a new figure.
        title: written above the picture.
        style: colours.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, fig. 2.

    Example:
        >>> ecd_curve().get_ylabel()
        'ECD (nats)'
    """
    ax = _new_axes(style, 5.4, 3.8, top=0.92) if ax is None else ax
    _dress(ax, style, title)
    ax.set(xlim=(0, 1), ylim=(-0.5, 2), ylabel="ECD (nats)", xlabel="p, the predicted probability of x = 1")
    ax.axhline(0, color=style.ink, linewidth=0.8)
    p = torch.linspace(0, 1, 1025, dtype=torch.float64)
    at = 1 / (1 - ECD_MINIMUM)
    for x, formula, color, dashes, lowest, side in (
        (1, "(p − 1) log(p / (1 − p))", style.above, (1, 0), at, 0.2),
        (0, "p log(p / (1 − p))", style.below, (4, 1.5), 1 - at, 0.8),
    ):
        ecd = ecd_per_sample(p, torch.full_like(p, x, dtype=torch.int64), task="binary").numpy()
        curve = np.where(np.isfinite(ecd), ecd, np.nan)
        ax.plot(p.numpy(), curve, color=color, dashes=dashes, linewidth=1.8, label=f"x = {x}: {formula}")
        ax.plot([lowest], [ECD_MINIMUM], "o", color=color, markersize=4.5, label=f"minimum, x = {x}")
        ax.text(lowest, ECD_MINIMUM - 0.04, f"p = {lowest:.4f}", color=color, ha="center", va="top", fontsize="small")
        edge = "left" if x else "right"
        ax.text(side, 1.6, f"x = {x}\n{formula}", color=color, ha=edge, va="center", fontsize="small")
    for y, words in (
        (ECD_MINIMUM - 0.04, f"least: −W(1/e) = −{-ECD_MINIMUM:.4f}"),
        (1.1, "above 0: over-confident\nbelow 0: under-confident"),
    ):
        ax.text(0.5, y, words, color=style.muted, ha="center", va="top", fontsize="small")
    return ax


def to_svg(ax: Axes) -> str:
    """Return the figure that `ax` is on as SVG, text as text; the same bytes for the same picture, without a date."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "torchcalib", "svg.fonttype": "none"}):
        _save(ax, buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return buffer.getvalue()


def to_png(ax: Axes, dpi: float = 200) -> bytes:
    """Return the figure that `ax` is on as PNG; the same bytes for the same picture, without a date."""
    buffer = io.BytesIO()
    _save(ax, buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def _save(ax: Axes, buffer: IO[Any], **options: Any) -> None:
    # The canvas knows the whole figure even if `ax` lies on a part of one.
    ax.figure.canvas.figure.savefig(buffer, bbox_inches="tight", pad_inches=0.06, **options)


class _Bins(NamedTuple):
    """The columns of one series that are drawn, on the CPU."""

    lower: Column
    upper: Column
    n: Column
    share: Column
    confidence: Column
    frequency: Column
    gap: Column

    def mean(self, column: Column) -> float:
        """Mean of a column over all samples; empty bins hold NaN, and no share."""
        held = self.n > 0
        return float((self.share * column)[held].sum())


def _columns(table: BinTable) -> _Bins:
    if table.n.dim() != 1:
        raise ValueError(
            f"`table` must hold one series of bins, got a batch of shape {tuple(table.n.shape)}. "
            "Draw one of them: `table[k]`."
        )
    columns = table.to_dict()
    return _Bins(**{name: columns[name] for name in _Bins._fields})


def _new_axes(style: Style, width: float, height: float, top: float) -> Axes:
    """A figure that pyplot does not know of, so that none is kept alive and no window opens."""
    figure = Figure(figsize=(width, height), facecolor=style.paper)
    # Fixed margins: an automatic layout moves on with every save, and saving crops to what is drawn anyway.
    return figure.subplots(gridspec_kw={"left": 0.15, "right": 0.96, "bottom": 0.12, "top": top})


def _dress(ax: Axes, style: Style, title: str | None, above_legend: bool = False) -> None:
    ax.set_facecolor(style.paper)
    ax.set_axisbelow(True)
    ax.grid(True, color=style.grid, linewidth=0.6)
    ax.tick_params(color=style.muted, labelcolor=style.ink, which="both", labelsize="small")
    ax.xaxis.label.set_color(style.ink)
    ax.yaxis.label.set_color(style.ink)
    for side, spine in ax.spines.items():
        spine.set_color(style.muted)
        spine.set_visible(side in ("left", "bottom"))
    if title is not None:
        ax.set_title(title, loc="left", color=style.ink, fontsize="medium", pad=20 if above_legend else 6)


def _say_no_data(ax: Axes, style: Style) -> None:
    ax.text(
        0.5,
        0.5,
        "no data",
        color=style.muted,
        ha="center",
        va="center",
        transform=ax.transAxes,
        backgroundcolor=style.paper,
    )


def _draw_gaps(ax: Axes, bins: _Bins, style: Style) -> None:
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


def _draw_counts(ax: Axes, bins: _Bins, style: Style) -> None:
    """Bars of counts above the frame, on the same x axis: labelled where there is room, else with one tick."""
    strip = ax.inset_axes((0, 1.02, 1, 0.14))
    _dress(strip, style, None)
    strip.grid(False)
    strip.set(xlim=(0, 1), ylim=(0, bins.n.max() * 1.45), xticks=[], yticks=[])
    strip.spines["left"].set_visible(False)
    strip.set_ylabel("count", fontsize="x-small")
    _draw_bars(strip, bins, style)
    if _fits_labels(ax, len(bins.n)):
        for middle, n in zip((bins.lower + bins.upper) / 2, bins.n, strict=True):
            if n > 0:
                strip.annotate(
                    _compact(n),
                    (middle, n),
                    (0, 1.5),
                    textcoords="offset points",
                    ha="center",
                    color=style.muted,
                    fontsize=6,
                )
    else:
        strip.set_yticks([bins.n.max()], [_compact(bins.n.max())])


def _draw_bars(ax: Axes, bins: _Bins, style: Style) -> None:
    width = bins.upper - bins.lower
    line = 0.8 if len(bins.n) <= 50 else 0.0
    ax.bar(bins.lower, bins.n, width, align="edge", color=style.bar, edgecolor=style.paper, linewidth=line, zorder=1.5)


def _fits_labels(ax: Axes, n_bins: int) -> bool:
    """Whether a count of four characters is narrower than a bin, in points."""
    width = ax.get_window_extent().width / ax.figure.dpi * 72
    return n_bins <= MAX_LABELLED_BINS and width / n_bins >= 16


def _compact(n: float) -> str:
    """A count of at most four characters: 876, 4.5k, 42k, 5.1M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= size:
            return f"{n / size:.{1 if n < 9.95 * size else 0}f}{unit}"
    return f"{n:.3g}"
