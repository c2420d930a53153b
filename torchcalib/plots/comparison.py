"""Diagrams that compare several binnings of the same data, or several systems with the first system."""

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from torchcalib.display.words import rounded
from torchcalib.io.errors import short_name
from torchcalib.plots.canvas import LIGHT, Canvas, ProbabilityAxis, Style, columns_of, given_box, scale_of
from torchcalib.plots.sources import DiagramData
from torchcalib.results.comparison import Comparison
from torchcalib.results.lines import ComparedLine, Difference

_COLUMNS = 2

_FIRST = ("ece/positive", "ece/top_label", "ece/classwise", "nll", "brier", "accuracy")
"""Keys of the first lines to draw if there is no space for all."""

_ABOVE, _ROW = 46, 14
"""Height of a panel in points, without systems and for each system."""

_TWO_COLUMNS = 320
"""Smallest width of given axes with two columns of panels, in points."""

_MARKS = {"better": "o", "worse": "s"}
"""Mark of each verdict, which distinguishes them without colours."""


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
    series = {name: columns_of(DiagramData(table).bins(), f"tables[{name!r}]") for name, table in tables.items()}
    canvas = Canvas.create(ax, style, title, (4.6, 1.0 + 1.6 * len(series)), top=0.9, pad=20).only_panels()
    # The distances are space for bin edges and tick labels of the panels.
    canvas.label("prediction (probability)", "empirical probability", (24, 44 if logit else 30))
    axis = _logit_axis(list(series.values())) if logit else ProbabilityAxis()
    gap = min(34 * canvas.scale / canvas.points[1], 0.5 / len(series))  # space for bin edges and a heading
    panels = canvas.panels(len(series), gap)
    for (name, bins), panel in zip(series.items(), panels, strict=True):
        panel.title(_heading(name, bins), fontsize="small", parse_math=False)
        axis.apply(panel, "x")
        axis.apply(panel, "y")
        panel.ax.tick_params(axis="x", length=0, pad=11 * canvas.scale, labelbottom=panel is panels[-1])
        if bins.n.any():
            _draw_steps(panel, bins, axis)
        else:
            panel.no_data()
    return canvas.ax


def _logit_axis(series: list[SimpleNamespace]) -> ProbabilityAxis:
    """Return a logit axis for all binnings. The outer edges of the bins are ignored, because they are often 0 and 1."""
    shown = [values[b.n > 0] for b in series for values in (b.confidence, b.frequency)]
    inner = [b.lower[1:] for b in series]
    n = max(float(b.effective_n.sum()) for b in series)
    return ProbabilityAxis.logit_of(np.concatenate(shown + inner), n) if n > 0 else ProbabilityAxis()


def _heading(name: str, bins: SimpleNamespace) -> str:
    sizes = bins.effective_n[bins.n > 0].round()  # Kish's numbers are fractions
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


def difference_plot(
    comparison: Comparison, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT
) -> Axes:
    """Draw the differences between several systems and the first system, with 95% confidence intervals.

    Each score and each main calibration error has a panel with its own scale, if its differences have intervals. Given
    axes have as many panels as fit: ECE, NLL, Brier score and accuracy first. A line
    at 0 marks the first system, and the better side is shaded. Each further system has a row:

    - A mark at the difference beyond chance, and a line for its interval. Scores have no noise floor: their mark is at
      the difference. The mark is a blue circle for a better system, an orange square for a worse system, and a hollow
      grey circle if the difference is not significant. Significance is not adjusted for the number of differences, as
      in the sentences; see `torchcalib.results.Difference`.
    - A triangle instead of the mark, if the difference is beyond the end of the scale.

    Args:
        comparison: Result of `torchcalib.compare`.
        ax: Axes to draw on; None creates a figure.
        title: Title of the diagram. None names the first system.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Example:
        >>> import torch
        >>> from torchcalib import compare
        >>> p, y = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1])
        >>> ax = difference_plot(compare({"a": p, "b": p.sqrt()}, y, task="binary"))
        >>> ax.child_axes[1].get_title(loc="left")
        'NLL (nats)'
    """
    lines, others = comparison.main_lines, comparison.systems[1:]
    drawn = [  # a difference of NaN is drawn as "undefined"
        line for line in lines if any(d.interval is not None or math.isnan(d.value) for d in line.differences.values())
    ] or lines
    columns = _COLUMNS
    if (box := given_box(ax)) is not None:
        columns = _COLUMNS if box.width >= _TWO_COLUMNS else 1
        fit = columns * max(1, int(box.height / scale_of(box) / (_ABOVE + _ROW * len(others))))
        if len(drawn) > fit:
            drawn = sorted(drawn, key=lambda line: _FIRST.index(line.key) if line.key in _FIRST else len(_FIRST))[:fit]
    n_rows = math.ceil(len(drawn) / columns)
    names = [short_name(name) for name in others]
    if title is None:
        title = f"Difference from {short_name(comparison.baseline)} beyond chance, 95% intervals"
    size = 9.2, 0.9 + n_rows * (0.72 + 0.2 * len(others))
    canvas = Canvas.create(ax, style, title, size, top=1 - 0.55 / size[1], parse_math=False, pad=20).only_panels()
    # System names are the tick labels of the first column of panels, and apply to all columns.
    across, down = canvas.points
    margin = min(0.4, canvas.scale * (12 + 5.6 * max(map(len, names))) / across)
    gap = min(0.06, 26 * canvas.scale / across)
    panels = canvas.panels(
        len(drawn), min(46 * canvas.scale / down, 0.5 / n_rows), columns=columns, left=margin, across=gap
    )
    for index, (line, panel) in enumerate(zip(drawn, panels, strict=True)):
        _draw_panel(panel, line, others)
        panel.ax.set_yticks(range(len(others)), labels=names if index < n_rows else [""] * len(others))
        for label in panel.ax.get_yticklabels():
            label.set_parse_math(False)
    verdicts = "better", "worse", "not significantly different"
    handles = [_mark(*_colors(verdict, style), label=verdict, marker=_MARKS.get(verdict, "o")) for verdict in verdicts]
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 1.5}
    legend = canvas.legend(handles=handles, handletextpad=0.1, columnspacing=1.2, **where)
    if canvas.is_given:  # they may not fit into one line, so the title is above the legend
        canvas.title(title, pad=22 + canvas.extent(legend).height / canvas.scale, parse_math=False)
    return canvas.ax


def _draw_panel(canvas: Canvas, line: ComparedLine, others: Sequence[str]) -> None:
    panel, style = canvas.ax, canvas.style
    unit = "" if line.unit == "probability" else f" ({line.unit})"
    name = f"|{line.name}|" if line.better == "nearer to 0" else line.name
    full = f"{name}{unit}"
    has_space = "\n" not in canvas.lines(full, "small", canvas.points[0])
    canvas.title(full if has_space else name, fontsize="small", pad=4, parse_math=False)
    panel.grid(False, axis="y")
    panel.spines["left"].set_visible(False)
    panel.tick_params(axis="y", length=0)
    low, high = _limits([line.differences[name] for name in others])
    panel.set(xlim=(low, high), ylim=(len(others) - 0.4, -0.6))
    panel.xaxis.set_major_locator(MaxNLocator(4, symmetric=False))
    panel.xaxis.set_major_formatter(lambda x, _: rounded(x, "+.3g") if x else "0")
    panel.axvspan(*((0, high) if line.better == "higher" else (low, 0)), color=style.grid, alpha=0.5, linewidth=0)
    panel.axvline(0, color=style.ink, linewidth=0.8, zorder=1.5)
    for row, name in enumerate(others):
        _draw_difference(canvas, row, line.differences[name])


def _draw_difference(canvas: Canvas, row: int, difference: Difference) -> None:
    panel = canvas.ax
    low, high = panel.get_xlim()
    if math.isnan(difference.value):
        canvas.text(0, row, " undefined ", canvas.style.muted, fontsize="x-small", ha="left", va="center")
        return
    edge, face = _colors(difference.verdict, canvas.style)
    if difference.interval is not None:
        ends = np.clip([difference.interval.low, difference.interval.high], low, high)
        panel.plot(ends, [row, row], color=edge, linewidth=1.8, solid_capstyle="butt", zorder=2)
    value = _drawn_value(difference)
    marker = "<" if value < low else ">" if value > high else _MARKS.get(difference.verdict, "o")
    mark = _mark(edge, face, [np.clip(value, low, high)], [row], marker=marker, markeredgewidth=1.2)
    panel.add_line(mark)


def _drawn_value(difference: Difference) -> float:
    return difference.value if difference.beyond_chance is None else difference.beyond_chance


def _colors(verdict: str, style: Style) -> tuple[str, str]:
    """Return the edge and face colours of a mark, hollow if not significant."""
    color = {"better": style.above, "worse": style.below}.get(verdict)
    return (color, color) if color else (style.muted, style.paper)


def _mark(edge: str, face: str, x: Sequence[float] = (), y: Sequence[float] = (), **options: Any) -> Line2D:
    options = {"marker": "o", "markersize": 5.5, "linestyle": "none", "zorder": 3, "clip_on": False, **options}
    return Line2D(x, y, markeredgecolor=edge, markerfacecolor=face, **options)


def _limits(differences: Sequence[Difference]) -> tuple[float, float]:
    """Return axis limits that include 0 and all finite differences and interval ends."""
    shown = [0.0]
    for difference in differences:
        ends = [] if difference.interval is None else [difference.interval.low, difference.interval.high]
        shown += [x for x in (_drawn_value(difference), *ends) if math.isfinite(x)]
    low, high = min(shown), max(shown)
    room = 0.08 * (high - low) or 1e-3  # not 0 if all values are equal
    return low - room, high + room
