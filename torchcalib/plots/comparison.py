"""Diagram of several binnings of the same data, one below the other."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from torchcalib.plots.canvas import LIGHT, Canvas, ProbabilityAxis, Style, columns_of
from torchcalib.plots.sources import Source


def bin_comparison(
    tables: Mapping[str, Any],
    ax: Axes | None = None,
    *,
    logit: bool = False,
    title: str | None = None,
    style: Style = LIGHT,
) -> Axes:
    """Draw the empirical probabilities of several binnings of the same data.

    Each binning has a panel, in the given order. All panels have the same axis of predictions. The heading of a panel
    contains the number of non-empty bins, and the smallest and largest number of samples in a bin.

    - Steps: the empirical probability (mean outcome) of each bin, from edge to edge. Empty bins are gaps.
    - Dashed diagonal: perfect calibration.
    - Ticks below the frame: edges of the bins.

    Args:
        tables: Mapping of names to binnings without batch axes: a `BinTable`, a metric over bins, or a report each.
        ax: Axes to draw on; None creates a figure.
        logit: Use a logit scale for probabilities, to show values near 0 and 1.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        ValueError: if a table has batch axes, or `tables` is empty.

    Reference:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error, UAI 2023, fig. 2.

    Example:
        >>> import torch
        >>> from torchcalib.functional import calibration_curve
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])
        >>> tables = {f"{n} bins": calibration_curve(preds, target, task="binary", n_bins=n) for n in (2, 5)}
        >>> [panel.get_title(loc="left") for panel in bin_comparison(tables).child_axes]
        ['2 bins: 2 bins of 1 to 2 samples', '5 bins: 3 bins of 1 sample, 2 empty']
    """
    if not tables:
        raise ValueError("`tables` must contain at least one table, got none. Pass a mapping of names to tables.")
    series = {name: columns_of(Source(table).bins(), f"tables[{name!r}]") for name, table in tables.items()}
    canvas = Canvas.create(ax, style, title, (4.6, 1.0 + 1.6 * len(series)), top=0.9, pad=20).only_panels()
    canvas.ax.set_xlabel("prediction (probability)", labelpad=24)  # space for bin edges and tick labels of the panels
    canvas.ax.set_ylabel("empirical probability", labelpad=44 if logit else 30)
    axis = _logit_axis(list(series.values())) if logit else ProbabilityAxis()
    gap = min(34 / canvas.points[1], 0.5 / len(series))  # space for bin edges and a heading
    panels = canvas.panels(len(series), gap)
    for (name, bins), panel in zip(series.items(), panels, strict=True):
        panel.title(_heading(name, bins), fontsize="small", parse_math=False)
        axis.apply(panel, "x")
        axis.apply(panel, "y")
        panel.ax.tick_params(axis="x", length=0, pad=11, labelbottom=panel is panels[-1])
        if bins.n.any():
            _draw_steps(panel, bins, axis)
        else:
            panel.no_data()
    return canvas.ax


def _logit_axis(series: list[SimpleNamespace]) -> ProbabilityAxis:
    """Return a logit axis for all binnings. The outer edges of the bins are ignored, because they are often 0 and 1."""
    shown = [values[b.n > 0] for b in series for values in (b.confidence, b.frequency)]
    inner = [b.lower[1:] for b in series]
    n = max(float(b.n.sum()) for b in series)
    return ProbabilityAxis.logit_of(np.concatenate(shown + inner), n) if n > 0 else ProbabilityAxis()


def _heading(name: str, bins: SimpleNamespace) -> str:
    sizes = bins.n[bins.n > 0]
    if not sizes.size:
        return name
    least, most, empty = sizes.min(), sizes.max(), len(bins.n) - len(sizes)
    size = f"{most:,.10g}" if least == most else f"{least:,.10g} to {most:,.10g}"
    plural, samples = "" if len(sizes) == 1 else "s", "sample" if most == 1 else "samples"
    return f"{name}: {len(sizes):,} bin{plural} of {size} {samples}" + (f", {empty:,} empty" if empty else "")


def _draw_steps(canvas: Canvas, bins: SimpleNamespace, axis: ProbabilityAxis) -> None:
    ends = np.stack([bins.lower, bins.upper], -1)
    canvas.diagonal(axis.low, axis.high)
    canvas.ax.plot(
        axis.clip(ends.ravel()),
        axis.clip(bins.frequency.repeat(2)),
        color=canvas.style.outcome,
        linewidth=np.clip(150 / len(bins.n), 0.6, 1.6),
        solid_joinstyle="miter",
        zorder=2,
        clip_on=False,
    )
    edges = np.unique(ends)
    canvas.ax.vlines(
        axis.clip(edges),
        -0.09,
        -0.02,
        color=canvas.style.muted,
        linewidth=np.clip(60 / len(edges), 0.3, 1.0),  # hundreds of edges require thin lines
        transform=canvas.ax.get_xaxis_transform(),
        clip_on=False,
    )
