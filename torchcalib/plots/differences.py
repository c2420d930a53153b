"""How far several systems lie from the first one, number by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from torchcalib.io.reader import printable
from torchcalib.plots.canvas import LIGHT, Style, dress, height_in_points, new_axes, width_in_points

if TYPE_CHECKING:
    from torchcalib.reporting.data import ComparedLine, Comparison, Difference

MAX_NAME = 28  # letters of a system's name that are written

_COLUMNS = 2


def difference_plot(
    comparison: Comparison, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT
) -> Axes:
    """Draw the differences of systems to the first one, with their intervals.

    A panel for each score, and for each error of the confidence that is looked at first, if it has an interval; with a
    scale of its own and 0, where the first system lies, as a line. In a panel a row for each other system:

    - A mark at the difference, and a line along its 95 % interval: filled and blue for better, filled and orange for
      worse, hollow and grey where the two cannot be told apart. Without an interval there is the mark alone.
    - A triangle: it lies beyond the end of the scale.

    The shaded side is the better one.

    Args:
        comparison: as made by `torchcalib.compare`.
        ax: where to draw; by default on a new figure, of the height that it takes. The panels are insets in its frame,
            `ax.child_axes`.
        title: written above the picture; by default which system the others are compared with.
        style: colours. With `DARK`, give the figure of `ax` a dark face.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Example:
        >>> import torch
        >>> from torchcalib import compare
        >>> p, y = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1])
        >>> ax = difference_plot(compare({"a": p, "b": p.sqrt()}, y, task="binary"))
        >>> ax.child_axes[1].get_title(loc="left")
        'NLL (nats)'
    """
    lines, others = _drawn(comparison.main_lines), comparison.systems[1:]
    n_rows = math.ceil(len(lines) / _COLUMNS)
    if ax is None:
        height = 0.9 + n_rows * (0.72 + 0.2 * len(others))
        ax = new_axes(style, 9.2, height, top=1 - 0.55 / height)
    names = [_short(name) for name in others]
    said = f"Difference to {_short(comparison.baseline)}, 95 % intervals" if title is None else title
    dress(ax, style, None)
    ax.set_title(said, loc="left", color=style.ink, fontsize="medium", pad=20, parse_math=False)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set(xticks=[], yticks=[])
    # Names stand beside the panels of the first column, and say of which row all the panels beside them are.
    margin = min(0.4, (12 + 5.6 * max(map(len, names))) / width_in_points(ax))
    gap = min(0.06, 26 / width_in_points(ax))
    width = (1 - margin - gap * (_COLUMNS - 1)) / _COLUMNS
    below = min(46 / height_in_points(ax), 0.5 / n_rows)
    height = (1 + below) / n_rows - below
    for index, line in enumerate(lines):
        row, column = index % n_rows, index // n_rows
        at = (margin + column * (width + gap), 1 - height - row * (height + below), width, height)
        panel = ax.inset_axes(at)
        _draw_panel(panel, line, others, style)
        panel.set_yticks(range(len(others)), labels=names if column == 0 else [""] * len(others))
        for label in panel.get_yticklabels():
            label.set_parse_math(False)
    _draw_key(ax, style)
    return ax


def _drawn(lines: Sequence[ComparedLine]) -> Sequence[ComparedLine]:
    """The lines that have intervals, or would if the difference were defined; all, if none has any."""
    with_intervals = [line for line in lines if any(map(_is_told, line.differences.values()))]
    return with_intervals or lines


def _is_told(found: Difference) -> bool:
    return found.interval is not None or math.isnan(found.value)


def _draw_panel(panel: Axes, line: ComparedLine, others: Sequence[str], style: Style) -> None:
    dress(panel, style, None)
    unit = "" if line.unit == "probability" else f" ({line.unit})"
    name = f"|{line.name}|" if line.better == "nearer to 0" else line.name
    panel.set_title(f"{name}{unit}", loc="left", color=style.ink, fontsize="small", pad=4, parse_math=False)
    panel.grid(False, axis="y")
    panel.spines["left"].set_visible(False)
    panel.tick_params(axis="y", length=0)
    low, high = _limits([line.differences[name] for name in others])
    panel.set(xlim=(low, high), ylim=(len(others) - 0.4, -0.6))
    panel.xaxis.set_major_locator(MaxNLocator(4, symmetric=False))
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:+.3g}".replace("-", "−") if x else "0")
    panel.axvspan(*((0, high) if line.better == "higher" else (low, 0)), color=style.grid, alpha=0.5, linewidth=0)
    panel.axvline(0, color=style.ink, linewidth=0.8, zorder=1.5)
    for row, name in enumerate(others):
        _draw_difference(panel, row, line.differences[name], style)


def _draw_difference(panel: Axes, row: int, found: Difference, style: Style) -> None:
    color = {"better": style.above, "worse": style.below}.get(found.verdict, style.muted)
    low, high = panel.get_xlim()
    if math.isnan(found.value):
        panel.text(0, row, " undefined ", color=style.muted, fontsize="x-small", ha="left", va="center")
        return
    if found.interval is not None:
        ends = np.clip([found.interval.low, found.interval.high], low, high)
        panel.plot(ends, [row, row], color=color, linewidth=1.8, solid_capstyle="butt", zorder=2)
    marker = "<" if found.value < low else ">" if found.value > high else "o"
    panel.plot(
        [np.clip(found.value, low, high)],
        [row],
        marker=marker,
        markersize=5.5,
        markerfacecolor=style.paper if found.verdict == "not told apart" else color,
        markeredgecolor=color,
        markeredgewidth=1.2,
        linestyle="none",
        zorder=3,
        clip_on=False,
    )


def _limits(differences: Sequence[Difference]) -> tuple[float, float]:
    """The scale on which all that is finite shows, and 0, with some room."""
    shown = [0.0]
    for found in differences:
        ends = [] if found.interval is None else [found.interval.low, found.interval.high]
        shown += [x for x in (found.value, *ends) if math.isfinite(x)]
    low, high = min(shown), max(shown)
    room = 0.08 * (high - low) or 1e-3  # where all are equal there is still a scale
    return low - room, high + room


def _draw_key(ax: Axes, style: Style) -> None:
    """What the marks mean, above the panels on the right."""
    kinds = (("better", style.above, style.above), ("worse", style.below, style.below))
    marks = [
        Line2D(
            [],
            [],
            marker="o",
            markersize=5.5,
            markeredgecolor=edge,
            markerfacecolor=face,
            linestyle="none",
            label=words,
        )
        for words, edge, face in (*kinds, ("not told apart", style.muted, style.paper))
    ]
    ax.legend(
        handles=marks,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=1.5,
        ncols=len(marks),
        frameon=False,
        fontsize="small",
        labelcolor=style.ink,
        handletextpad=0.1,
        columnspacing=1.2,
    )


def _short(name: str) -> str:
    """A name as it can be written: on one line, its end cut off if it is long."""
    shown = printable(name)
    return shown if len(shown) <= MAX_NAME else shown[: MAX_NAME - 1] + "…"
