"""Test-based reliability diagram: predictions and outcomes in each bin, and predictions rejected by a test."""

from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.core.ranked_bins import Test
from torchcalib.display.words import edges_in_words, short_count, short_percent
from torchcalib.plots.canvas import (
    LIGHT,
    Canvas,
    Column,
    ProbabilityAxis,
    Style,
    columns_of,
)
from torchcalib.plots.sources import DiagramData

_SLOT = 0.84
"""Width of a violin or bar, relative to the distance between bins."""

_MAX_CELLS = 48
"""Largest number of bars in the histogram of all predictions."""


def tce_diagram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    logit: bool = False,
    alpha: float = 0.05,
    test: Test = "binomial",
    mode: Mode | None = None,
    task: Task | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw the test-based reliability diagram: predictions and outcomes of bins, with the rejected predictions.

    Bins are evenly spaced, in the order of their predictions. Labels below the diagram show their edges.

    - Top left: a violin for each bin shows the distribution of its predictions, from the smallest to the largest. It is
      estimated from the quantiles of the bin. All violins have the same width, and a bin with a single value is a short
      line. The diamond on a line is the empirical probability (mean outcome). For a calibrated model, the violin is
      short and contains the diamond. A triangle marks an empirical probability beyond the end of a logit axis.
    - Top right: a histogram of all predictions, on the same axis.
    - Bottom: the number of samples in each bin. The coloured part is rejected by the test, in percent if the label
      fits. The rejected fraction of all samples is the test-based calibration error (TCE).

    Args:
        preds: Predictions; or a `TCETable` without batch axes, see `torchcalib.functional.tce_table`; or a
            `torchcalib.TCE`, or a `torchcalib.Report`.
        target: Labels for predictions.
        ax: Axes to draw on; None creates a figure.
        logit: Use a logit scale for probabilities, to show values near 0 and 1.
        alpha: Level of the test of predictions. Tables, metrics and reports contain their own decisions.
        test: Test of predictions: `"binomial"`, `"t"`, or a function; see `torchcalib.functional.tce`. For other bins,
            pass a table or a metric.
        mode: Kind of confidence; None selects the first kind of the task.
        task: Task of the predictions; None infers it from the shapes.
        title: Title of the diagram.
        style: Colours of the diagram.
        **options: Options for predictions, see `torchcalib.functional.InputOptions`, without `batch_dims`.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if the table has batch axes.

    Reference:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error, UAI 2023, fig. 1.

    Example:
        >>> import torch
        >>> ax = tce_diagram(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 1, 1]))
        >>> [panel.get_ylabel() for panel in ax.child_axes]
        ['probability', '', 'samples']
    """
    tested = {"task": task, "alpha": alpha, "test": test, **options}
    bins = columns_of(DiagramData(preds, target, mode, options=tested).decisions())
    canvas = Canvas.create(ax, style, title, (4.6, 5.6), top=0.88, pad=20).only_panels()
    violins = canvas.panel(0, 0.36, 0.84, 0.64)
    histogram = canvas.panel(0.87, 0.36, 0.13, 0.64)
    sizes = canvas.panel(0, 0, 0.84, 0.24)
    limits = (0, max(len(bins.n), 1))
    violins.ax.set(xlim=limits, ylim=(0, 1))
    violins.label(y="probability")
    violins.ax.tick_params(axis="x", length=0, labelbottom=False)
    sizes.ax.set(xlim=limits)
    sizes.label("edges of the bins (probability)", "samples")
    has_data = bins.n > 0
    if not has_data.any():
        for panel in (violins, histogram, sizes):
            panel.ax.set(xticks=[], yticks=[])
        violins.no_data()
        return canvas.ax
    shown = np.concatenate([bins.quantiles[has_data].ravel(), bins.frequency[has_data]])
    axis = ProbabilityAxis.logit_of(shown, bins.n.sum()) if logit else ProbabilityAxis()
    _draw_violins(violins, bins, axis)
    _draw_histogram(histogram, bins, axis)
    _draw_sizes(sizes, bins)
    _label_edges(sizes, bins)
    violins.ax.set_xticks(sizes.ax.get_xticks())
    return canvas.ax


def _draw_violins(canvas: Canvas, bins: SimpleNamespace, axis: ProbabilityAxis) -> None:
    ax, style = canvas.ax, canvas.style
    transform = axis.apply(canvas, "y")
    filled = np.flatnonzero(bins.n)
    stroke = np.clip(30 / len(bins.n), 0.4, 1.0)
    shapes = []
    for index in filled:
        at, width = _violin(transform.transform(axis.clip(bins.quantiles[index])))
        half = np.concatenate([width, -width[::-1]]) * _SLOT / 2
        outline = transform.inverted().transform(np.concatenate([at, at[::-1]]))
        shapes.append(np.column_stack([index + 0.5 + half, outline]))
    # A violin of height 0 would be invisible without an edge.
    options = {"facecolor": style.bar, "edgecolor": style.bar, "linewidth": stroke, "zorder": 2, "clip_on": False}
    violins = PolyCollection(shapes, label="predictions of the bin", **options)
    violins.set_in_layout(False)  # their extent, which matplotlib cannot compute, is within the panel
    ax.add_collection(violins, autolim=False)
    empirical = axis.clip(bins.frequency[filled])
    ax.hlines(
        empirical,
        filled + 0.08,
        filled + 0.92,
        color=style.outcome,
        linewidth=1.4 * stroke,
        zorder=3,
        clip_on=False,
    )
    beyond = np.sign(bins.frequency[filled] - empirical)
    for side, marker in ((0, "D"), (-1, "v"), (1, "^")):
        held = beyond == side
        look = {
            "marker": marker,
            "color": style.outcome,
            "markeredgecolor": style.paper,
            "markeredgewidth": 0.6 * stroke,
            "markersize": canvas.scale * (1.5 + 4 * stroke),
        }
        if held.any():
            ax.plot(filled[held] + 0.5, empirical[held], linestyle="none", zorder=3.5, clip_on=False, **look)
        if side == 0:
            ax.plot([], [], linestyle="none", label="empirical probability", **look)
    canvas.legend(borderpad=0)


def _violin(at: Column) -> tuple[Column, Column]:
    """Return positions along a violin and its relative widths there, from evenly spaced quantiles `at`.

    The width is a Gaussian kernel density estimate with Silverman's bandwidth 0.9 min(sd, IQR / 1.34) n^(-1/5). Here n
    quantiles have standard deviation sd and interquartile range IQR.
    """
    length = at[-1] - at[0]
    if length <= 1e-9:
        return at[[0, -1]], np.ones(2)
    grid = np.linspace(at[0], at[-1], 41)
    ranks = np.linspace(0, 1, len(at))
    points = np.interp(np.linspace(0, 1, 8 * len(at)), ranks, at)  # 33 quantiles are too few for a smooth density
    lower, upper = np.interp([0.25, 0.75], ranks, at)
    bandwidth = 0.9 * min(points.std(), (upper - lower) / 1.34) * len(at) ** -0.2
    bandwidth = max(bandwidth, length / 40)  # a narrower peak could be between two grid points
    density = np.exp(-(((grid[:, None] - points) / bandwidth) ** 2) / 2).sum(-1)
    return grid, density / density.max()


def _draw_histogram(canvas: Canvas, bins: SimpleNamespace, axis: ProbabilityAxis) -> None:
    """Draw a histogram of all predictions along the axis of the violins.

    Neighbouring quantiles of a bin enclose equal numbers of samples, which count at the middle between them.
    """
    transform = axis.apply(canvas, "y")
    has_data = bins.n > 0
    quantiles = axis.clip(bins.quantiles[has_data])
    places = transform.transform(quantiles.ravel()).reshape(quantiles.shape)
    middles = (places[:, :-1] + places[:, 1:]) / 2
    low, high = transform.transform(np.array([axis.low, axis.high]))
    weights = np.broadcast_to(bins.n[has_data, None] / middles.shape[1], middles.shape)
    n_cells = int(np.clip(2 * np.sqrt(bins.n.sum()), 12, _MAX_CELLS))
    counts, cells = np.histogram(middles, n_cells, (low, high), weights=weights)
    cells = transform.inverted().transform(cells)
    canvas.ax.stairs(counts, cells, orientation="horizontal", fill=True, color=canvas.style.bar, linewidth=0)
    canvas.ax.set(xlim=(0, counts.max() * 1.05), xticks=[], xlabel="all")
    canvas.ax.tick_params(axis="y", length=0, labelleft=False)


def _draw_sizes(canvas: Canvas, bins: SimpleNamespace) -> None:
    ax, style = canvas.ax, canvas.style
    middles = np.arange(len(bins.n)) + 0.5
    width = _SLOT if len(bins.n) <= 50 else 1.0  # no gaps, because gaps narrower than a pixel differ in width
    ax.bar(middles, bins.n, width, color=style.bar)
    ax.bar(middles, bins.rejected, width, color=style.rejected, hatch="////", edgecolor=style.paper, linewidth=0)
    ax.set_yticks([0, bins.n.max()], ["0", short_count(bins.n.max())])
    ax.grid(False)
    rejected, n = bins.rejected.sum(), bins.n.sum()
    heading = f"■ rejected: {rejected:,.10g} of {n:,.10g}, TCE {100 * rejected / n:.4g}%"
    if "\n" in canvas.lines(heading, "small", canvas.points[0]):  # no space
        heading = f"■ TCE {100 * rejected / n:.4g}%"
    canvas.text(0, 1.04, heading, style.rejected, va="bottom", transform=ax.transAxes)
    slot = canvas.points[0] / len(bins.n)
    upright = slot < 20  # points required for "100%" and a space
    fits = slot >= 7  # points required for the height of a line
    ax.set_ylim(0, bins.n.max() * (1.05 if not fits else 1.5 if upright else 1.25))
    for middle, size, share in zip(middles, bins.n, bins.rejected / np.maximum(bins.n, 1), strict=True):
        if fits and size > 0:
            color = style.rejected if share > 0 else style.muted
            canvas.label_bar(short_percent(share), middle, size, color, va="bottom", rotation=90 if upright else 0)


def _label_edges(canvas: Canvas, bins: SimpleNamespace) -> None:
    """Write the edges of the bins, vertically if horizontal labels would overlap, and only every k-th if needed."""
    shown = [*bins.lower.tolist(), float(bins.upper[-1])]
    texts = edges_in_words(shown, 2)
    labels = [texts[edge] for edge in shown]
    n_bins = len(bins.n)
    slot = canvas.points[0] / n_bins
    horizontal = slot >= 5 * max(map(len, labels))
    step = 1 if horizontal else max(1, int(np.ceil(9 / slot)))
    # The last edge is always labelled. A label that would overlap it is omitted.
    edges = [*range(0, n_bins - step + 1, step), n_bins]
    rotation = 0 if horizontal else 90
    canvas.ax.set_xticks(edges, [labels[index] for index in edges], rotation=rotation, fontsize=canvas.size("x-small"))
