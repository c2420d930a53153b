"""Histogram of the confidence."""

from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from torchcalib.core.arguments import InputOptions, Task
from torchcalib.core.events import Mode
from torchcalib.plots.canvas import LIGHT, Canvas, Style, columns_of
from torchcalib.plots.reliability import draw_bars
from torchcalib.plots.sources import Source


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
    source = Source(preds, target, mode, options={"task": task, "n_bins": n_bins, **options})
    table, words = source.bins(), source.confidence_name()
    bins = columns_of(table)
    canvas = Canvas.create(ax, style, title, (5.2, 4.2), top=0.88, pad=20)
    ax = canvas.ax
    ax.set(xlim=(0, 1), xlabel=words)
    counts = bins.n[bins.n > 0]
    if not counts.size:
        ax.set(ylim=(0, 1), ylabel="count per bin")
        return canvas.no_data()
    if log is None:
        log = bool(counts.max() > 20 * np.median(counts))
    ax.set_ylabel(f"count per bin{' (logarithmic scale)' if log else ''}")
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
    canvas.legend(borderpad=0)
    return ax
