"""The test-based reliability diagram: which predictions of a bin do not fit its outcomes."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from torchcalib.core.bins import TCETable
from torchcalib.plots.canvas import LIGHT, Style, compact, dress, new_axes, say_no_data, width_in_points
from torchcalib.plots.probability_axis import ProbabilityAxis, short
from torchcalib.plots.series import Column, columns_of

_SLOT = 0.84
"""Width of a violin or bar, where bins are one apart."""

_MOST_CELLS = 48
"""Cells of the histogram of all predictions; fewer where samples are few."""


def tce_diagram(
    table: TCETable, ax: Axes | None = None, *, logit: bool = False, title: str | None = None, style: Style = LIGHT
) -> Axes:
    """Draw the predictions of every bin, the empirical probability they are tested against, and how many it rejects.

    Bins stand side by side at even spacing, from the least predictions to the largest, their edges written below.

    - Top left, a violin for each bin: where its predictions lie, from the least to the largest, drawn from the bin's
      quantiles. All violins are equally wide. A bin of a single value is a short line. The diamond on a line is the
      empirical probability: the share of outcomes of the bin that are 1. In a calibrated model it lies within the
      violin, and the violin is short. A triangle marks one that is beyond the end of a logit axis, such as 0.
    - Top right, on the same axis, a histogram of all predictions.
    - Below, the size of each bin. The coloured part is what the test rejects, also in percent of the bin where there is
      room to write. Its share of all samples is the TCE.

    Args:
        table: one series of bins, as made by `torchcalib.tce_table`.
        ax: where to draw; by default on a new figure. The panels are insets in its frame, `ax.child_axes`: violins,
            histogram, sizes.
        logit: whether probabilities are on the logit scale, which shows those near 0 and near 1. The axis ends at about
            1 / (10 N) and 1 minus that, for N samples cannot tell what lies beyond from 0 or 1: it is drawn at the end.
        title: written above the picture.
        style: colours. With `DARK`, give the figure of `ax` a dark face.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Raises:
        ValueError: for a batch of tables.

    Source:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error, UAI 2023, fig. 1.
    """
    bins = _tested(table)
    ax = new_axes(style, 4.6, 5.6, top=0.88) if ax is None else ax
    dress(ax, style, title, above_legend=True)
    ax.set_axis_off()
    violins = ax.inset_axes((0, 0.36, 0.84, 0.64))
    histogram = ax.inset_axes((0.87, 0.36, 0.13, 0.64))
    sizes = ax.inset_axes((0, 0, 0.84, 0.24))
    for panel in (violins, histogram, sizes):
        dress(panel, style, None)
    violins.set(xlim=(0, max(len(bins.n), 1)), ylim=(0, 1), ylabel="probability")
    violins.tick_params(axis="x", length=0, labelbottom=False)
    sizes.set(xlim=(0, max(len(bins.n), 1)), ylabel="samples", xlabel="edges of the bins (probability)")
    if not bins.n.any():
        for panel in (violins, histogram, sizes):
            panel.set(xticks=[], yticks=[])
        say_no_data(violins, style)
        return ax
    held = bins.n > 0
    shown = np.concatenate([bins.quantiles[held].ravel(), bins.frequency[held]])
    axis = ProbabilityAxis.logit_of(shown, bins.n.sum()) if logit else ProbabilityAxis()
    axis.apply(violins, "y")
    _draw_violins(violins, bins, axis, style)
    _draw_histogram(histogram, bins, axis, style)
    _draw_sizes(sizes, bins, style)
    _label_edges(sizes, bins)
    violins.set_xticks(sizes.get_xticks())
    return ax


class _Tested(NamedTuple):
    """The columns that are drawn, without bins that only fill up a row of a batch."""

    edges: Column  # (B + 1,)
    n: Column
    frequency: Column
    rejected: Column
    quantiles: Column  # (B, 33)


def _tested(table: TCETable) -> _Tested:
    bins = columns_of(table)
    real, columns = bins.is_real, table.to_dict()
    return _Tested(
        edges=np.append(bins.lower[real], bins.upper[real][-1:]),
        n=bins.n[real],
        frequency=bins.frequency[real],
        rejected=columns["rejected"][real],
        quantiles=columns["quantiles"][real].astype(np.float64),  # 1 - p must tell what lies near 1 apart
    )


def _draw_violins(ax: Axes, bins: _Tested, axis: ProbabilityAxis, style: Style) -> None:
    held = np.flatnonzero(bins.n)
    stroke = np.clip(30 / len(bins.n), 0.4, 1.0)
    shapes = []
    for index in held:
        at, width = _violin(axis.place(bins.quantiles[index]))
        half = np.concatenate([width, -width[::-1]]) * _SLOT / 2
        shapes.append(np.column_stack([index + 0.5 + half, axis.value(np.concatenate([at, at[::-1]]))]))
    violins = PolyCollection(
        shapes,
        facecolor=style.bar,
        edgecolor=style.bar,
        linewidth=stroke,  # a violin of no height shows as a line
        zorder=2,
        clip_on=False,
        label="predictions of the bin",
    )
    ax.add_collection(violins, autolim=False)
    empirical = np.clip(bins.frequency[held], axis.low, axis.high)
    ax.hlines(empirical, held + 0.08, held + 0.92, color=style.outcome, linewidth=1.4 * stroke, zorder=3, clip_on=False)
    beyond = np.sign(bins.frequency[held] - empirical)
    for side, marker in ((0, "D"), (-1, "v"), (1, "^")):
        ax.plot(
            held[beyond == side] + 0.5,
            empirical[beyond == side],
            marker,
            color=style.outcome,
            markeredgecolor=style.paper,
            markeredgewidth=0.6 * stroke,
            markersize=1.5 + 4 * stroke,
            zorder=3.5,
            clip_on=False,
            label=None if side else "empirical probability",
        )
    ax.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=2,
        borderpad=0,
        frameon=False,
        labelcolor=style.ink,
        fontsize="small",
    )


def _violin(at: Column) -> tuple[Column, Column]:
    """Return places along a violin and its width there, at most 1, from evenly spaced quantiles.

    A Gaussian kernel estimate with Silverman's bandwidth; the quantiles count as so many samples.
    """
    length = at[-1] - at[0]
    if length <= 1e-9:
        return at[[0, -1]], np.ones(2)
    grid = np.linspace(at[0], at[-1], 41)
    ranks = np.linspace(0, 1, len(at))
    points = np.interp(np.linspace(0, 1, 8 * len(at)), ranks, at)
    lower, upper = np.interp([0.25, 0.75], ranks, at)
    bandwidth = 0.9 * min(points.std(), (upper - lower) / 1.34) * len(at) ** -0.2
    bandwidth = max(bandwidth, length / 40)  # else the grid would miss a peak
    density = np.exp(-(((grid[:, None] - points) / bandwidth) ** 2) / 2).sum(-1)
    return grid, density / density.max()


def _draw_histogram(ax: Axes, bins: _Tested, axis: ProbabilityAxis, style: Style) -> None:
    """Bars of all predictions, along the axis of the violins: each part between two quantiles of a bin counts alike."""
    held = bins.n > 0
    places = axis.place(bins.quantiles[held])
    middles = (places[:, :-1] + places[:, 1:]) / 2
    low, high = axis.place(np.array([axis.low, axis.high]))
    weights = np.broadcast_to(bins.n[held, None] / middles.shape[1], middles.shape)
    n_cells = int(np.clip(2 * np.sqrt(bins.n.sum()), 12, _MOST_CELLS))
    counts, cells = np.histogram(middles, n_cells, (low, high), weights=weights)
    cells = axis.value(cells)
    ax.barh(cells[:-1], counts, np.diff(cells), align="edge", color=style.bar, linewidth=0)
    axis.apply(ax, "y")
    ax.set(xlim=(0, counts.max() * 1.05), xticks=[], xlabel="all")
    ax.tick_params(axis="y", length=0, labelleft=False)


def _draw_sizes(ax: Axes, bins: _Tested, style: Style) -> None:
    middles = np.arange(len(bins.n)) + 0.5
    width = _SLOT if len(bins.n) <= 50 else 1.0  # gaps narrower than a pixel would flicker
    ax.bar(middles, bins.n, width, color=style.bar)
    ax.bar(middles, bins.rejected, width, color=style.rejected)
    ax.set_yticks([0, bins.n.max()], ["0", compact(bins.n.max())])
    ax.grid(False)
    rejected, n = bins.rejected.sum(), bins.n.sum()
    words = f"■ rejected: {rejected:,.10g} of {n:,.10g}, TCE {100 * rejected / n:.4g}%"
    slot = width_in_points(ax) / len(bins.n)
    turned = slot < 20  # points of "100%" and a space
    fits = slot >= 7  # points of a line of text
    ax.set_ylim(0, bins.n.max() * (1.05 if not fits else 1.5 if turned else 1.25))
    ax.text(0, 1.04, words, color=style.rejected, va="bottom", fontsize="small", transform=ax.transAxes)
    for middle, size, share in zip(middles, bins.n, bins.rejected / np.maximum(bins.n, 1), strict=True):
        if fits and size > 0:
            ax.annotate(
                _percent(share),
                (middle, size),
                (0, 1.5),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90 if turned else 0,
                color=style.rejected if share > 0 else style.muted,
                fontsize=6,
            )


def _percent(share: float) -> str:
    """A share in at most four characters, which says 0 and 100 only where this is so."""
    if 0 < share < 0.01:
        return "<1%"
    return ">99%" if 0.99 < share < 1 else f"{share:.0%}"


def _label_edges(ax: Axes, bins: _Tested) -> None:
    """Write the edges where bins meet: level if there is room, else upright, else only some of them."""
    words = [short(edge) for edge in bins.edges]
    slot = width_in_points(ax) / len(bins.n)
    level = slot >= 5 * max(map(len, words))
    step = 1 if level else max(1, int(np.ceil(9 / slot)))
    kept = list(range(0, len(bins.n), step))
    if len(bins.n) - kept[-1] < step:
        kept.pop()
    kept.append(len(bins.n))
    ax.set_xticks(kept, [words[index] for index in kept], rotation=0 if level else 90, fontsize="x-small")
