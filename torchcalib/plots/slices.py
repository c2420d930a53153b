"""Diagram of the signed errors of slices."""

import math

import numpy as np
from matplotlib.axes import Axes

from torchcalib.core.arguments import check_count
from torchcalib.display.words import rounded
from torchcalib.io.errors import short_name
from torchcalib.plots.canvas import LIGHT, Canvas, Style
from torchcalib.results.group_table import SMALL_P
from torchcalib.results.slice_table import SliceTable

_ROW = 15
"""Height of a slice in points."""


def slice_diagram(
    table: SliceTable,
    ax: Axes | None = None,
    *,
    most: int = 12,
    title: str | None = "Signed error of the largest slices",
    style: Style = LIGHT,
) -> Axes:
    """Draw the signed errors of the largest slices in a table.

    - A mark at the signed error, mean outcome minus mean confidence. It is filled if the adjusted p-value of the slice
      is below 0.05. A blue circle marks confidences that are too low, an orange square those that are too high.
    - Grey bar: signed errors that a calibrated model has by chance. With probability 0.95, all slices are in theirs. A
      filled mark may be inside, because slices are also tested for over-confidence.

    Args:
        table: Result of `torchcalib.slices`, or `Report.slices`.
        ax: Axes to draw on; None creates a figure. Given axes have as many slices as fit.
        most: Largest number of slices.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Example:
        >>> import torch, torchcalib
        >>> p, y, sex = torch.full((200,), 0.7), torch.arange(200) % 2, torch.arange(200) // 100
        >>> ax = slice_diagram(torchcalib.slices(p, y, {"sex": sex}))
        >>> [label.get_text() for label in ax.get_yticklabels()]
        ['sex=0', 'sex=1']
    """
    check_count("most", most)
    n_shown = min(most, len(table))
    size = 6.4, 1.1 + 0.26 * max(2, n_shown)
    names = [short_name(name, 40) for name in table.slice]
    width = max(map(len, names), default=0)
    canvas = Canvas.create(ax, style, title, size, top=1 - 0.4 / size[1], left=min(0.5, 0.06 + 0.0135 * width))
    if canvas.is_given:
        n_shown = min(n_shown, max(1, int(canvas.points[1] / canvas.scale / _ROW)))
    largest = sorted(range(len(table)), key=lambda k: -table.n[k])[:n_shown]
    if not largest:
        return canvas.no_data()
    panel = canvas.ax
    for row, k in enumerate(largest):
        by_chance = table.critical_value * table.spread[k]
        panel.barh(row, 2 * by_chance, left=-by_chance, height=0.62, color=style.grid, linewidth=0, zorder=1)
        is_found, gap = table.p_value[k] < SMALL_P, table.gap[k]
        color = style.muted if not is_found else style.above if gap > 0 else style.below
        face = color if is_found else style.paper
        marker = "s" if is_found and gap <= 0 else "o"
        panel.plot([gap], [row], marker=marker, markersize=5.5 * canvas.scale, color=color, markerfacecolor=face)
    panel.axvline(0, color=style.ink, linewidth=0.8, zorder=1.5)
    panel.grid(False, axis="y")
    panel.tick_params(axis="y", length=0)
    panel.set_yticks(range(len(largest)), labels=[names[k] for k in largest])
    for label in panel.get_yticklabels():
        label.set_parse_math(False)
    ends = [abs(table.gap[k]) for k in largest] + [table.critical_value * table.spread[k] for k in largest]
    farthest = max(filter(math.isfinite, ends), default=0) or 1e-3
    panel.set(xlim=np.array([-1.1, 1.1]) * farthest, ylim=(len(largest) - 0.4, -0.6))
    panel.xaxis.set_major_formatter(lambda x, _: rounded(x, "+.3g") if x else "0")
    canvas.label("mean outcome minus mean confidence")
    return panel
