"""Reliability diagrams, with bins or isotonic regression, and the histogram of confidence."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.display.words import short_count
from torchcalib.functional.smooth import SmoothCurve
from torchcalib.plots.canvas import LIGHT, Canvas, Column, ProbabilityAxis, Style, columns_of
from torchcalib.plots.sources import DiagramData, Series, binned_series, smooth_series

MAX_LABELLED_BINS = 20
"""Largest number of bins with a label for each count. With more bins, an axis shows the counts."""

_FEW = 30
"""Smallest number of samples of a bin in colour, unless the bin has at least half of the mean number per bin."""

_CORP_BARS = 40
"""Number of bars in the histogram of `corp_diagram`."""

_COUNTS = "counts"
"""Label of the axes above a diagram that show the counts."""


def reliability_diagram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    label: str | None = None,
    smooth: bool = False,
    logit: bool = False,
    mode: Mode | None = None,
    task: Task | None = None,
    n_bins: int = 15,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    r"""Draw the observed frequency against the mean prediction of bins, with the expected calibration error (ECE).

    Each bin with data has a mark at (mean prediction, frequency), whose area increases with the fraction of samples in
    the bin. A line shows the gap to the diagonal. Marks below the diagonal are filled (over-confident, for confidences
    above 0.5), and marks above it are hollow. A bin with fewer than 30 samples, and less than half of the mean number
    per bin, has few samples: its mark is hollow and grey, with a thin line and a pale band. For floating weights,
    samples are the effective number of `BinTable`. The strip at the top shows counts.

    Grey boxes are consistency bands, if the table contains them: the mark of a calibrated model is inside its box with
    probability 95%, for each bin separately. A triangle marks a frequency beyond the end of a logit axis. For a report,
    the legend also contains the 95% interval of the ECE and its expected value under perfect calibration.

    Each of several models, or each class with `mode="classwise"`, is drawn as a curve without bands, which connects
    the bins without few samples. Up to six curves differ in colour and in mark. A further call on the same `ax` adds a
    curve.

    With `smooth`, a curve shows the kernel regression of the outcomes on the confidence, and the legend the smooth
    calibration error (smECE) for the same kernel; see `torchcalib.functional.smece`. Its width increases with the
    density of the confidence, which the strip at the top shows too.

    Args:
        preds: Predictions, or a tuple of predictions and targets; or a `BinTable`, a metric over bins such as
            `torchcalib.ECE`, or a `torchcalib.Report`, or its attribute `calibration`, for the predictions after
            calibration; or a mapping of model names to any of these.
        target: Labels for predictions.
        ax: Axes to draw on; None creates a figure. Labels and histogram stay within given axes. The legend is omitted
            if it does not fit.
        label: Name of the model in the legend.
        smooth: Draw smooth curves instead of bins. `preds` must be predictions, a `torchcalib.SmECE`, or a metric that
            stores samples or a sketch of them, such as `torchcalib.ACE`; or a mapping of names to any of these.
        logit: Use a logit scale for probabilities, to show values near 0 and 1.
        mode: Kind of confidence; None selects the first kind of the task.
        task: Task of the predictions; None infers it from the shapes.
        n_bins: Number of equal-width bins of predictions.
        class_names: Names of the classes, for class-wise curves and for text targets.
        title: Title of the diagram.
        style: Colours of the diagram.
        **options: Options for predictions, see `torchcalib.functional.InputOptions`, without `batch_dims`.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if a table has batch axes, there are more than ten curves, or `smooth` is True for bins.

    Reference:
        Smooth curves: Blasiok, Nakkiran: Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing (ICLR 2024),
        sec. 4.

    Example:
        >>> import torch
        >>> probs, target = torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 0])
        >>> reliability_diagram(probs, target).get_xlabel()
        'mean predicted probability of the bin'
        >>> ax = reliability_diagram({"first": probs, "second": probs.square()}, target)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['first\nECE 0.3', 'second\nECE 0.197']
    """
    source = DiagramData(preds, target, mode, class_names, {"task": task, "n_bins": n_bins, **options})
    return draw_reliability(source, ax, label=label, smooth=smooth, logit=logit, title=title, style=style).ax


def draw_reliability(
    source: DiagramData,
    ax: Axes | Figure | None,
    *,
    label: str | None = None,
    smooth: bool = False,
    logit: bool = False,
    title: str | None = None,
    style: Style = LIGHT,
    line: Mapping[str, Any] | None = None,
    is_square: bool = False,
) -> Canvas:
    """Draw the diagram of `reliability_diagram`, and return its canvas.

    `is_square` means that a new figure has no space beside the diagram, whose legend is then inside the axes.
    `line` are options of the curves. With them, the bins of a single model have a name and a curve too, unless another
    curve is on the axes.
    """
    series = source.by_model(label, smooth_series if smooth else binned_series)
    canvas = unit_square(ax, style, title, is_square)
    words = source.confidence_name()
    canvas.label(words if smooth else f"mean {words} of the bin", "observed frequency")
    canvas.ax.tick_params(pad=6 * canvas.scale)  # space for a large mark in the corner
    axis = _axis_for(canvas, [one.data for one in series]) if logit else ProbabilityAxis()
    axis.apply(canvas, "x")
    axis.apply(canvas, "y")
    canvas.diagonal(axis.low, axis.high)
    has_bins = line is not None or (label is None and series[0].name is None)
    is_single = has_bins and len(series) == 1 and not canvas.curves
    for one in series:
        data = one.data
        shown = _shown(canvas, one, len(series), is_single)
        if data is None or (isinstance(data, SimpleNamespace) and not (data.n > 0).any()):
            if len(series) == 1:
                canvas.no_data()
            else:
                canvas.key(shown._replace(error="no data").label, "model")
        elif isinstance(data, SmoothCurve):
            _draw_smooth(canvas, data, shown, axis)
        elif is_single:
            draw_bins(canvas, data, axis)
            if line is None:
                canvas.key(one.error, "model")
            else:
                held = data.n > 0
                points = axis.clip(data.confidence[held]), axis.clip(data.frequency[held])
                canvas.curve(*points, one.label, **{"linewidth": 1.0, "zorder": 1.9, **line})
            draw_keys(canvas, data)
            _draw_counts(canvas, data.lower, data.upper - data.lower, data.n, MAX_LABELLED_BINS, axis)
        else:
            _draw_curve(canvas, data, shown, axis, line or {})
    canvas.curve_legend()
    return canvas


def _shown(canvas: Canvas, one: Series, count: int, is_single: bool) -> Series:
    """Return a series with a name, unless it is the only one, and with a short text if there are many."""
    if count > 4:  # more lines do not fit beside the diagram
        one = one._replace(error=one.error.partition("\n")[0])
    return one if is_single or one.name is not None else one._replace(name=f"model {len(canvas.curves) + 1}")


def _axis_for(canvas: Canvas, drawn: Sequence[Any]) -> ProbabilityAxis:
    """Return a logit axis for bins and smooth curves, and for the earlier limits if the axes already contain curves."""
    shown, n = [], 1.0
    for data in drawn:
        if isinstance(data, SmoothCurve):
            held = data.density > 1e-3 * data.density.max()
            shown += [data.confidence[held].cpu().numpy(), data.frequency[held].cpu().numpy()]
            n = max(n, 1e3)  # the evaluation points are about 1/200 apart
        elif data is not None:
            shown += [data.confidence[data.n > 0], data.frequency[data.n > 0]]
            n = max(n, float(data.effective_n.sum()))
    if canvas.curves and canvas.ax.get_xscale() == "logit":
        shown.append(np.array(canvas.ax.get_xlim()))
    # Frequencies of 0 and 1 are common in bins with few samples, and would extend the axis beyond all other values.
    values = np.concatenate([*shown, np.array([0.4, 0.6])])
    return ProbabilityAxis.logit_of(values[(values > 0) & (values < 1)], n)


def _draw_curve(
    canvas: Canvas, bins: SimpleNamespace, one: Series, axis: ProbabilityAxis, options: Mapping[str, Any]
) -> None:
    """Draw the bins of one of several models as a curve, and the outline of its counts."""
    held = bins.n > 0
    x, y = axis.clip(bins.confidence[held]), axis.clip(bins.frequency[held])
    few = has_few_samples(bins)[held]
    canvas.curve(
        x[~few], y[~few], one.label, marked=True, **{"markevery": [], "zorder": 3, **options}
    )  # the legend shows the mark
    line = canvas.curves[-1]
    canvas.ax.scatter(
        x,
        y,
        s=canvas.scale**2 * (10 + 70 * np.sqrt(bins.share[held])),  # small marks for bins with few samples
        marker=line.get_marker(),
        facecolors=list(np.where(few, canvas.style.paper, line.get_markerfacecolor())),
        edgecolors=list(np.where(few, canvas.style.muted, line.get_markeredgecolor())),
        linewidths=np.where(few, 0.5, 1.1).tolist(),
        zorder=3.2,
        clip_on=False,
    )
    _add_outline(canvas, np.append(bins.lower, bins.upper[-1]), bins.n, axis)


def _draw_smooth(canvas: Canvas, curve: SmoothCurve, one: Series, axis: ProbabilityAxis) -> None:
    """Draw a smooth curve whose width increases with the density, and the density in the strip above."""
    confidence, frequency, density = (x.cpu().numpy() for x in curve[:3])
    look = canvas.look(canvas.next_look, marked=True)
    held = np.isfinite(frequency) & (density > 1e-3 * density.max())
    confidence, frequency, held_density = axis.clip(confidence[held]), axis.clip(frequency[held]), density[held]
    # A few marks distinguish several curves without colours.
    marks = [] if one.name is None else np.linspace(0, len(confidence) - 1, 9).round().astype(int)[1:-1].tolist()
    canvas.curve(confidence, frequency, one.label, marked=bool(marks), markevery=marks, zorder=3.2)
    pieces = np.stack([np.column_stack([confidence, frequency])[k : len(confidence) - 1 + k] for k in (0, 1)], 1)
    width = 0.8 + 4.2 * np.sqrt(held_density[:-1] / density.max())
    ribbon = {"colors": look["color"], "linewidths": width, "capstyle": "round", "clip_on": False, "zorder": 3}
    lines = LineCollection(list(pieces), **ribbon)
    lines.set_in_layout(False)  # matplotlib cannot compute its extent, which is about that of the curve
    canvas.ax.add_collection(lines, autolim=False)
    _add_outline(canvas, axis.clip(curve.confidence.cpu().numpy()), density, axis)


def _add_outline(canvas: Canvas, x: Column, y: Column, axis: ProbabilityAxis) -> None:
    """Add the counts of bins with edges `x`, or the density at `x`, to the strip above the frame."""
    panel, is_new = _strip(canvas, axis)
    strip, look = panel.ax, canvas.look(canvas.next_look - 1)
    if strip.texts:
        return  # an outline would cross the labels of an earlier call
    x = axis.clip(x)
    is_density = len(x) == len(y)
    if is_density:
        strip.plot(x, y, **{**look, "linewidth": 1.0})
        strip.fill_between(x, y, color=look["color"], alpha=0.1, linewidth=0)
    else:
        strip.stairs(y, x, color=look["color"], linewidth=1.0, linestyle=(0, look["dashes"]))
        strip.stairs(y, x, color=look["color"], alpha=0.1, fill=True, linewidth=0)
    strip.set_ylabel("density" if is_density else "count")
    top = max(0.0 if is_new else strip.get_ylim()[1], 1.15 * float(y.max()))
    strip.set_ylim(0, top)
    if not is_density:
        strip.set_yticks([top / 1.15], [short_count(top / 1.15)])


def has_few_samples(bins: SimpleNamespace) -> Any:
    """Return a mask `(B,)` of bins whose gap is mostly sampling noise and hardly changes ECE; see the diagram."""
    return (bins.effective_n < _FEW) & (bins.share < 0.5 / len(bins.n))


def _has_band(bins: SimpleNamespace) -> Any:
    return (bins.n > 0) & np.isfinite(bins.band_low)


def draw_bins(canvas: Canvas, bins: SimpleNamespace, axis: ProbabilityAxis, scale: float = 1.0) -> None:
    """Draw the bins of a single model, with gaps and consistency bands. `scale` multiplies the area of the marks."""
    ax, style = canvas.ax, canvas.style
    has_data = bins.n > 0
    width = bins.upper - bins.lower
    known = _has_band(bins)
    if known.any():
        inset = (0.06 if len(width) <= 50 else 0) * width  # gap between the boxes of neighbouring bins
        left, right = axis.clip(bins.lower + inset), axis.clip(bins.upper - inset)
        # A band of height 0 would be invisible.
        least = 0 if axis.is_logit else 0.004
        low = axis.clip(np.minimum(bins.band_low, 1 - least))
        high = axis.clip(np.maximum(bins.band_high, low + least))
        few = has_few_samples(bins)
        for mask, options in ((known & ~few, _band(style)), (known & few, {**_band(style), "alpha": 0.16})):
            boxes = (values[mask] for values in (left, high - low, right - left, low))
            ax.bar(*boxes, align="edge", **options)
    x, y, gap = axis.clip(bins.confidence[has_data]), axis.clip(bins.frequency[has_data]), bins.gap[has_data]
    color = np.where(gap > 0, style.above, np.where(gap < 0, style.below, style.ink))
    few = has_few_samples(bins)[has_data]
    color = np.where(few, style.muted, color)
    stroke = np.clip(60 / len(width), 0.5, 1.6)  # hundreds of bins require thin lines
    strokes = np.where(few, 0.5, stroke)
    ax.vlines(x, x, y, colors=list(color), linewidths=strokes, zorder=2)
    size = scale * canvas.scale**2 * (4 * stroke + 220 * bins.share[has_data])  # visible even for bins with few samples
    beyond = np.sign(bins.frequency[has_data] - y)
    for side, marker in ((0, "o"), (-1, "v"), (1, "^")):
        held = beyond == side
        if held.any():
            ax.scatter(
                x[held],
                y[held],
                s=size[held],
                marker=marker,
                facecolors=list(np.where((gap > 0) | few, style.paper, color)[held]),
                edgecolors=list(color[held]),
                linewidths=strokes[held],
                zorder=3,
                clip_on=False,  # do not cut marks at 0 and 1 in half
            )


def smooth_diagram(metric: Any, ax: Any, title: str) -> Any:
    """Draw the smooth reliability diagram of a metric."""
    return reliability_diagram(metric, ax=ax, title=title, smooth=True)


def corp_diagram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    mode: Mode | None = None,
    task: Task | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw a CORP reliability diagram: isotonic regression of outcomes on confidence, with a consistency band.

    CORP means consistent, optimally binned, reproducible and based on the pool-adjacent-violators algorithm.
    A curve within the band is no evidence against calibration. The outcome is less frequent than predicted where the
    curve is below the diagonal, and more frequent where it is above. The strip at the top shows counts.

    Args:
        preds: Predictions; or a curve without batch axes, see `torchcalib.functional.corp_curve`; or a metric that
            stores samples, such as `torchcalib.CORP`.
        target: Labels for predictions.
        ax: Axes to draw on; None creates a figure.
        mode: Kind of confidence; None selects the first kind of the task.
        task: Task of the predictions; None infers it from the shapes.
        title: Title of the diagram.
        style: Colours of the diagram.
        **options: Options for predictions, see `torchcalib.functional.InputOptions`, without `batch_dims`.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if the curve has batch axes.

    Reference:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), fig. 2.

    Example:
        >>> import torch
        >>> ax = corp_diagram(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
        >>> ax.get_ylabel()
        'recalibrated probability'
    """
    source = DiagramData(preds, target, mode, options={"task": task, **options})
    curve = source.isotonic_curve()
    if curve.n.dim() != 1:
        raise ValueError(
            f"`preds` must have no batch axes, got curves of shape {tuple(curve.n.shape)}. Draw one curve: `curves[k]`."
        )
    canvas = unit_square(ax, style, title)
    ax = canvas.ax
    canvas.label(source.confidence_name(), "recalibrated probability")
    has_data = curve.n.cpu().numpy() > 0
    columns = (curve.confidence, curve.frequency, curve.band_low, curve.band_high, curve.n)
    confidence, frequency, low, high, n = (column.cpu().numpy()[has_data] for column in columns)
    if not n.size:
        return canvas.no_data()
    ax.fill_between(confidence, low, high, **_band(style))
    side = np.where(frequency > confidence, style.above, style.below)
    ax.plot(confidence, frequency, color=style.ink, linewidth=1.0, zorder=2)
    face = np.where(frequency > confidence, style.paper, style.below)
    marks: dict[str, Any] = {"facecolors": list(face), "edgecolors": list(side), "linewidths": 0.7}
    ax.scatter(confidence, frequency, s=8, zorder=3, clip_on=False, **marks)
    _side_keys(canvas)
    _band_key(canvas, f"{100 * curve.level:.10g}% band if calibrated")
    counts, edges = np.histogram(confidence, bins=_CORP_BARS, range=(0, 1), weights=n)
    _draw_counts(canvas, edges[:-1], np.diff(edges), counts, 0, ProbabilityAxis())
    canvas.curve_legend()
    return ax


def confidence_histogram(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    log: bool | None = None,
    mode: Mode | None = None,
    task: Task | None = None,
    n_bins: int = 15,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> Axes:
    """Draw the number of samples in each bin, and the mean prediction and the mean outcome of all samples.

    For the top label, the mean outcome is the accuracy. The distance between the two lines is the absolute value of the
    expected signed calibration error (ESCE).

    Args:
        preds: Predictions; or a `BinTable` without batch axes, a metric over bins, or a `torchcalib.Report`.
        target: Labels for predictions.
        ax: Axes to draw on; None creates a figure.
        log: Use a logarithmic scale for counts. None uses it if the largest count is above 20 times the median of the
            bins with data.
        mode: Kind of confidence; None selects the first kind of the task.
        task: Task of the predictions; None infers it from the shapes.
        n_bins: Number of equal-width bins of predictions.
        title: Title of the diagram.
        style: Colours of the diagram.
        **options: Options for predictions, see `torchcalib.functional.InputOptions`, without `batch_dims`.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: if predictions have no targets.
        ValueError: if the table has batch axes.

    Example:
        >>> import torch
        >>> ax = confidence_histogram(torch.tensor([0.2, 0.9, 0.6]), torch.tensor([0, 1, 0]))
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['mean predicted probability 0.567', 'mean outcome 0.333']
    """
    source = DiagramData(preds, target, mode, options={"task": task, "n_bins": n_bins, **options})
    table, words = source.bins(), source.confidence_name()
    bins = columns_of(table)
    canvas = Canvas.create(ax, style, title, (5.2, 4.2), top=0.88, pad=20)
    ax = canvas.ax
    ax.set(xlim=(0, 1))
    counts = bins.n[bins.n > 0]
    if not counts.size:
        ax.set(ylim=(0, 1))
        canvas.label(words, "count per bin")
        return canvas.no_data()
    if log is None:
        log = bool(counts.max() > 20 * np.median(counts))
    canvas.label(words, f"count per bin{' (logarithmic scale)' if log else ''}")
    ax.set_yscale("log" if log else "linear")
    ax.set_ylim(counts.min() / 2 if log else 0, counts.max() * (2 if log else 1.06))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    draw_bars(canvas, bins.lower, bins.upper - bins.lower, bins.n)
    for name, column, dashes, color in (
        (words, "confidence", (1, 0), style.ink),
        ("outcome", "frequency", (4, 2), style.outcome),
    ):
        mean = table.mean(column).item()
        ax.axvline(mean, color=color, dashes=dashes, linewidth=1.6, clip_on=False, label=f"mean {name} {mean:.3f}")
    canvas.legend(borderpad=0, handlelength=3.2)
    return ax


def unit_square(ax: Axes | Figure | None, style: Style, title: str | None, is_square: bool = False) -> Canvas:
    """Return a square canvas with limits 0 and 1 on both axes, and the diagonal.

    `is_square` means that a new figure has no space for a legend beside the axes.
    """
    size, top = ((4.7, 5.3), 0.875) if is_square else ((5.9, 4.2), 0.8)
    canvas = Canvas.create(ax, style, title, size, top=top, left=0.11)
    outer = canvas.outer if canvas.is_given else None
    if outer is None or max(outer.size) <= 2 * min(outer.size):
        canvas.ax.set_box_aspect(1)
    if outer is None:
        canvas.ax.apply_aspect()  # the number of ticks depends on the size
    if canvas.space:
        canvas.ax.set_anchor("W")  # the legend is at the right
    canvas.ax.set(xlim=(0, 1), ylim=(0, 1))
    canvas.diagonal()
    return canvas


def draw_keys(canvas: Canvas, bins: SimpleNamespace) -> None:
    """Add the meaning of the marks and of the consistency band, if `bins` contain it, to the legend."""
    _side_keys(canvas)
    if _has_band(bins).any():
        _band_key(canvas, "95% of bins if calibrated")


def _side_keys(canvas: Canvas) -> None:
    above, below, paper = canvas.style.above, canvas.style.below, canvas.style.paper
    for text, color, face in (("more", above, paper), ("less", below, below)):
        look = {"markersize": 5, "markerfacecolor": face, "markeredgecolor": color, "markeredgewidth": 1.2}
        canvas.key(f"{text} often than predicted", "side", marker="o", **look)


def _band_key(canvas: Canvas, text: str) -> None:
    band = _band(canvas.style)
    canvas.key(text, marker="s", markersize=9, markeredgewidth=0, color=band["color"], alpha=band["alpha"])


def _band(style: Style) -> dict[str, Any]:
    return {"color": style.bar, "alpha": 0.28, "linewidth": 0, "zorder": 1.2}


def _strip(canvas: Canvas, axis: ProbabilityAxis) -> tuple[Canvas, bool]:
    """Return the canvas of the strip above the frame, and whether it is new. A later call on the axes shares it."""
    children: list[Any] = [child for child in canvas.ax.child_axes if child.get_label() == _COUNTS]
    if children:
        panel = replace(canvas, ax=children[0])
        axis.apply(panel, "x")
        panel.ax.set_xticks([])
        panel.ax.yaxis.label.set_fontsize(canvas.size("x-small"))
        return panel, False
    panel = canvas.panel(0, 1.02, 1, 0.14)
    axis.apply(panel, "x")
    panel.ax.set_label(_COUNTS)
    panel.ax.grid(False)
    panel.ax.set(xticks=[], yticks=[])
    panel.ax.spines["left"].set_visible(False)
    panel.ax.yaxis.label.set_fontsize(canvas.size("x-small"))
    return panel, True


def _draw_counts(
    canvas: Canvas, lower: Column, width: Column, n: Column, most_labels: int, axis: ProbabilityAxis
) -> None:
    """Draw bars of counts above the frame. Label each bar if there is space for all labels, else the largest count."""
    can_label = not axis.is_logit and len(n) <= most_labels
    labelled = can_label and canvas.points[0] / len(n) >= 13  # points per label of four characters
    panel, _ = _strip(canvas, axis)
    strip = panel.ax
    strip.set(ylim=(0, n.max() * (1.45 if labelled else 1.2)), ylabel="count")
    left = axis.clip(lower)
    draw_bars(panel, left, axis.clip(lower + width) - left, n)
    if not labelled:
        strip.set_yticks([n.max()], [short_count(n.max())])
        return
    for middle, count in zip(lower + width / 2, n, strict=True):
        if count > 0:
            panel.label_bar(short_count(count), middle, count, panel.style.muted)


def draw_bars(canvas: Canvas, lower: Column, width: Column, n: Column) -> None:
    """Draw a bar of height `n` for each bin."""
    style, line = canvas.style, 0.8 if len(n) <= 50 else 0.0
    canvas.ax.bar(lower, n, width, align="edge", color=style.bar, edgecolor=style.paper, linewidth=line, zorder=1.5)
