"""Calibration over the epochs of a training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from torchcalib.plots.canvas import LIGHT, Style, dress, new_axes, say_no_data

if TYPE_CHECKING:
    from torchcalib.reporting.monitoring.history import History

Column = NDArray[np.float64]


class _Curve(NamedTuple):
    """A line of a panel: what it is called in a history, what people call it, how it is drawn."""

    key: str
    name: str
    color: str
    dashes: tuple[float, ...] = (1, 0)


def training_curve(history: History, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw what a `Monitor` saw, validation by validation.

    Four panels, one above the other, over the same epochs; what was not measured is left out.

    - NLL.
    - ECD. Where it is above 0 the model is over-confident: that part is shaded.
    - Accuracy and, for classes, mean confidence. Where confidence is above accuracy the gap is shaded.
    - ECE.

    A vertical line stands at the least NLL, and one, in red, where over-confidence was warned of.

    Args:
        history: at least one row.
        ax: where to draw; by default on a new figure. The panels are insets in its frame, `ax.child_axes`.
        title: written above the picture.
        style: colours. With `DARK`, give the figure of `ax` a dark face.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Example:
        >>> from torchcalib.reporting.monitoring.history import History, HistoryRow
        >>> rows = [HistoryRow(k, k, {"nll": 0.5, "ecd": -0.1, "ece": 0.1, "accuracy": 0.8}) for k in (1, 2, 3)]
        >>> [panel.get_ylabel() for panel in training_curve(History(tuple(rows))).child_axes]
        ['nats', 'nats', 'of samples', 'probability']
    """
    panels = (
        ("nats", (_Curve("nll", "NLL", style.ink),)),
        ("nats", (_Curve("ecd", "ECD", style.below),)),
        (
            "of samples",
            (_Curve("confidence", "confidence", style.below, (3, 1.5)), _Curve("accuracy", "accuracy", style.outcome)),
        ),
        ("probability", (_Curve("ece", "ECE", style.above),)),
    )
    drawn = [
        (unit, shown)
        for unit, curves in panels
        if (shown := [curve for curve in curves if np.isfinite(history.column(curve.key)).any()])
    ]
    ax = new_axes(style, 6.4, 0.9 + 1.3 * max(1, len(drawn)), top=0.94) if ax is None else ax
    dress(ax, style, title, above_legend=True)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set(xticks=[], yticks=[])
    if not drawn:
        say_no_data(ax, style)
        return ax
    at = np.array([row.epoch if history.unit == "epoch" else row.step for row in history.rows], dtype=np.float64)
    gap = 0.05
    height = (1 + gap) / len(drawn) - gap
    for index, (unit, curves) in enumerate(drawn):
        is_last = index == len(drawn) - 1
        panel = ax.inset_axes((0, 1 - (index + 1) * height - index * gap, 1, height))
        dress(panel, style, None)
        _draw_panel(panel, history, at, curves, style)
        panel.set_ylabel(unit, fontsize="small")
        panel.tick_params(axis="x", labelbottom=is_last)
        if is_last:
            panel.set_xlabel(history.unit)
        _draw_marks(panel, history, at, style, labelled=index == 0)
    return ax


def _draw_panel(ax: Axes, history: History, at: Column, curves: Sequence[_Curve], style: Style) -> None:
    columns = {curve.key: np.array(history.column(curve.key), dtype=np.float64) for curve in curves}
    columns = {key: np.where(np.isfinite(column), column, np.nan) for key, column in columns.items()}
    for curve in curves:
        ax.plot(
            at,
            columns[curve.key],
            color=curve.color,
            dashes=curve.dashes,
            linewidth=1.6,
            marker="o" if len(at) <= 30 else "",
            markersize=2.5,
            label=curve.name,
            clip_on=False,
            zorder=3,
        )
    if "ecd" in columns:
        ax.axhline(0, color=style.ink, linewidth=0.8)
        _shade(ax, at, np.zeros_like(at), columns["ecd"], style)
    if "accuracy" in columns and "confidence" in columns:
        _shade(ax, at, columns["accuracy"], columns["confidence"], style)
    if "accuracy" in columns:
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_xlim(at.min() - 0.5 * (len(at) == 1), at.max() + 0.5 * (len(at) == 1))
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.margins(y=0.12)
    _name_ends(ax, at, [(curve, columns[curve.key]) for curve in curves])


def _shade(ax: Axes, at: Column, low: Column, high: Column, style: Style) -> None:
    """Fill in where `high` is above `low`: over-confidence."""
    ax.fill_between(at, low, high, where=list(high > low), interpolate=True, color=style.below, alpha=0.18, linewidth=0)


def _name_ends(ax: Axes, at: Column, lines: Sequence[tuple[_Curve, Column]]) -> None:
    """Write the name and last value of every line at its right end, pushed apart where they would touch."""
    ends = [(column[np.isfinite(column)][-1], curve) for curve, column in lines]
    ends.sort(key=lambda end: end[0])
    low, high = ax.get_ylim()
    line = 0.16 * (high - low)
    place = -np.inf
    for value, curve in ends:
        place = max(value, place + line)
        ax.annotate(
            f"{curve.name} {value:.3f}",
            (at[-1], place),
            (6, 0),
            textcoords="offset points",
            color=curve.color,
            va="center",
            fontsize="small",
            annotation_clip=False,
        )


def _draw_marks(ax: Axes, history: History, at: Column, style: Style, labelled: bool) -> None:
    """Vertical lines where the NLL was least and where something was warned of, with words above the first panel."""
    best = history.best
    marks = [(history.rows.index(best), style.muted, (1, 1.5), "least NLL")] if best is not None else []
    marks += [(index, style.rejected, (4, 2), "warning") for index, row in enumerate(history.rows) if row.warning]
    for index, color, dashes, words in marks:
        ax.axvline(at[index], color=color, dashes=dashes, linewidth=1.2, zorder=2)
        if labelled:
            is_right = at[index] > 0.4 * at.min() + 0.6 * at.max()
            ax.annotate(
                f"{words}, {history.unit} {at[index]:,.0f}",
                (at[index], 1),
                (0, 4 if words == "warning" else 15),
                xycoords=ax.get_xaxis_transform(),
                textcoords="offset points",
                color=color,
                ha="right" if is_right else "left",
                fontsize="small",
                annotation_clip=False,
            )
