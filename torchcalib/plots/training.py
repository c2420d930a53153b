"""Diagram of the calibration metrics recorded during a training."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from torchcalib.plots.canvas import LIGHT, Canvas, Column, Style
from torchcalib.results.history import History

_SOLID = (1.0, 0.0)

_CURVES = {
    "nll": ("NLL", "ink", _SOLID),
    "ecd": ("ECD", "below", _SOLID),
    "confidence": ("confidence", "below", (3, 1.5)),
    "accuracy": ("accuracy", "outcome", _SOLID),
    "ece": ("ECE", "above", _SOLID),
}
"""Label, colour in `Style` and dashes of each curve, by column of the history."""

_PANELS = (("nats", ["nll"]), ("nats", ["ecd"]), ("fraction", ["confidence", "accuracy"]), ("probability", ["ece"]))
"""Unit of the vertical axis, and columns of the history, for each panel."""


def training_curve(history: History, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the metric values that a `torchcalib.Monitor` recorded at each validation.

    Up to four panels, one below the other, show the recorded values:

    - Negative log-likelihood (NLL).
    - Entropic calibration difference (ECD). Positive values mean over-confidence, and are shaded.
    - Accuracy, and mean confidence for multi-class tasks. The gap is shaded if confidence is above accuracy.
    - Expected calibration error (ECE).

    A vertical line marks the lowest NLL. Red lines mark warnings of over-confidence.

    Args:
        history: Recorded validations, `Monitor.history`.
        ax: Axes to draw on; None creates a figure.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Example:
        >>> from torchcalib.results.history import History, HistoryRow
        >>> rows = [HistoryRow(k, k, {"nll": 0.5, "ecd": -0.1, "ece": 0.1, "accuracy": 0.8}) for k in (1, 2, 3)]
        >>> [panel.get_ylabel() for panel in training_curve(History(tuple(rows))).child_axes]
        ['nats', 'nats', 'fraction', 'probability']
    """
    drawn = [(unit, finite) for unit, keys in _PANELS if (finite := _finite_columns(history, keys))]
    canvas = Canvas.create(ax, style, title, (6.4, 0.9 + 1.3 * max(1, len(drawn))), top=0.94, pad=20).only_panels()
    if not drawn:
        return canvas.no_data()
    at = np.array([row.epoch if history.unit == "epoch" else row.step for row in history.rows], dtype=np.float64)
    panels = canvas.panels(len(drawn), gap=0.05)
    for (unit, columns), panel in zip(drawn, panels, strict=True):
        _draw_curves(panel, at, columns)
        panel.ax.set_ylabel(unit, fontsize="small")
        is_last = panel is panels[-1]
        panel.ax.tick_params(axis="x", labelbottom=is_last)
        panel.ax.set_xlabel(history.unit if is_last else "")
        _draw_marks(panel, history, at, labelled=panel is panels[0])
    return canvas.ax


def _finite_columns(history: History, keys: Sequence[str]) -> dict[str, Column]:
    """Return the columns `keys` that have a finite value, with NaN in place of infinite and missing values."""
    columns = {key: np.array(history.column(key), dtype=np.float64) for key in keys}
    return {key: np.where(np.isfinite(x), x, np.nan) for key, x in columns.items() if np.isfinite(x).any()}


def _draw_curves(canvas: Canvas, at: Column, columns: Mapping[str, Column]) -> None:
    ax, style = canvas.ax, canvas.style
    ends = []
    for key, column in columns.items():
        name, color, dashes = _CURVES[key]
        ax.plot(
            at,
            column,
            color=getattr(style, color),
            dashes=dashes,
            linewidth=1.6,
            marker="o" if len(at) <= 30 else "",
            markersize=2.5,
            label=name,
            clip_on=False,
            zorder=3,
        )
        ends.append((column[np.isfinite(column)][-1], name, getattr(style, color)))
    if "ecd" in columns:
        ax.axhline(0, color=style.ink, linewidth=0.8)
    for over, base in (("ecd", np.zeros_like(at)), ("confidence", columns.get("accuracy"))):
        if over in columns and base is not None:  # shade over-confidence
            y, where = columns[over], list(columns[over] > base)
            ax.fill_between(at, base, y, where=where, interpolate=True, color=style.below, alpha=0.18, linewidth=0)
    if "accuracy" in columns:
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    ax.set_xlim(at.min() - 0.5 * (len(at) == 1), at.max() + 0.5 * (len(at) == 1))
    ax.yaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.margins(y=0.12)
    # Label each curve at its right end with its name and last value. Overlapping labels are moved up.
    low, high = ax.get_ylim()
    place = -np.inf
    for last, name, color in sorted(ends):
        place = max(last, place + 0.16 * (high - low))
        canvas.annotate(f"{name} {last:.3f}", at[-1], place, (6, 0), color=color, va="center")


def _draw_marks(canvas: Canvas, history: History, at: Column, labelled: bool) -> None:
    """Draw vertical lines at the lowest negative log-likelihood and at warnings, with text if `labelled`."""
    ax, style, best = canvas.ax, canvas.style, history.best
    marks = [(history.rows.index(best), style.muted, (1, 1.5), "lowest NLL", 15)] if best is not None else []
    marks += [(index, style.rejected, (4, 2), "warning", 4) for index, row in enumerate(history.rows) if row.warning]
    for index, color, dashes, name, height in marks:
        ax.axvline(at[index], color=color, dashes=dashes, linewidth=1.2, zorder=2)
        if labelled:
            side = "right" if at[index] > 0.4 * at.min() + 0.6 * at.max() else "left"
            options = {"xycoords": ax.get_xaxis_transform(), "color": color, "ha": side}
            canvas.annotate(f"{name}, {history.unit} {at[index]:,.0f}", at[index], 1, (0, height), **options)
