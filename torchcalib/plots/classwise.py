"""Reliability diagrams of classes, as small panels with shared axes."""

import math
from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from torchcalib.core.arguments import InputOptions, Task, check_count
from torchcalib.core.bins import BinTable
from torchcalib.io.errors import short_name
from torchcalib.plots.canvas import LIGHT, Canvas, ProbabilityAxis, Style, columns_of, given_box
from torchcalib.plots.reliability import draw_bins, draw_keys
from torchcalib.plots.sources import DiagramData, error_text, errors_of
from torchcalib.results.report import Report

_COLUMNS = 3
_LEAST_PANEL = 84  # width and height of a panel with its labels in given axes, in points
_MAX_NAME = 18  # number of characters of a class name that fit above a panel with its error


def classwise_reliability_diagrams(
    preds: Any,
    target: Any = None,
    ax: Axes | None = None,
    *,
    most: int = 6,
    task: Task | None = None,
    n_bins: int = 15,
    class_names: Sequence[str] | None = None,
    title: str | None = None,
    style: Style = LIGHT,
    **options: Unpack[InputOptions],
) -> NDArray[np.object_]:
    """Draw a reliability diagram of each class against all others, or of each label, in panels with shared axes.

    The classes with the largest error are drawn, the largest first. Given axes have as many
    panels as fit. The title of a panel contains the name of the
    class and its error: the value of `preds` if it is a metric, or else the expected calibration error (ECE). The marks
    are those of `reliability_diagram`.

    Args:
        preds: Predictions, or a tuple of predictions and targets; or a `BinTable` `(C, B)`; or a metric over bins with
            `mode="classwise"`, such as `torchcalib.ECE`.
        target: Labels for predictions.
        ax: Axes to draw on; None creates a figure.
        most: Maximum number of classes.
        task: Task of the predictions; None infers it from the shapes.
        n_bins: Number of equal-width bins of predictions.
        class_names: Names of the classes.
        title: Title of the diagram.
        style: Colours of the diagram.
        **options: Options for predictions, see `torchcalib.functional.InputOptions`, without `batch_dims`.

    Returns:
        The axes of the panels, an array `(K,)` of at most `most` matplotlib axes. Their figure is `axes[0].figure`.

    Raises:
        TypeError: if predictions have no targets, or `preds` is a report, which does not contain the bins.
        ValueError: if there is no axis of classes.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.9, 0.0], [0.2, 0.2, 0.6]])
        >>> axes = classwise_reliability_diagrams(probs, torch.tensor([0, 2, 2]), class_names=["a", "b", "c"], most=2)
        >>> [panel.get_title(loc="left") for panel in axes]
        ['c: ECE 0.5', 'b: ECE 0.433']
    """
    check_count("most", most)
    if isinstance(preds, Report):
        raise TypeError(
            "`preds` must contain bins for each class, got a report, which has them for all classes together. "
            "Pass the predictions, or ECE(mode='classwise')."
        )
    source = DiagramData(preds, target, "classwise", class_names, {"task": task, "n_bins": n_bins, **options})
    table = source.bins()
    if table.n.dim() != 2:
        raise ValueError(
            f"`preds` must have an axis of classes, got bins of shape {tuple(table.n.shape)}. "
            "Pass multi-class or multi-label predictions, or a metric with mode='classwise'."
        )
    names = source.curve_names(None, "class", len(table.n))
    errors = errors_of(preds, table).tolist()
    # The error of a class without data is NaN. It is last.
    worst = sorted(range(len(names)), key=lambda k: math.inf if math.isnan(errors[k]) else -abs(errors[k]))[:most]
    n_columns = min(_COLUMNS, len(worst))
    if (box := given_box(ax)) is not None:
        n_columns = int(np.clip(box.width / _LEAST_PANEL, 1, n_columns))
        worst = worst[: n_columns * max(1, int(box.height / _LEAST_PANEL))]
    n_rows = math.ceil(len(worst) / n_columns)
    n_legend_rows = math.ceil(3 / n_columns)
    size = 0.9 + 2.0 * n_columns, 0.9 + 0.2 * n_legend_rows + 2.1 * n_rows
    top = 1 - (0.45 + 0.2 * n_legend_rows) / size[1]
    canvas = Canvas.create(ax, style, title, size, top=top, pad=22 + 15 * n_legend_rows).only_panels()
    canvas.label("mean predicted probability of the bin", "observed frequency", (20, 24))
    across, down = canvas.points
    # The panels fill columns from top to bottom. Reading order is by rows.
    gap = min(24 * canvas.scale / down, 0.5 / n_rows)
    panels = canvas.panels(n_rows * n_columns, gap, columns=n_columns, across=20 * canvas.scale / across)
    grid = np.array(panels, dtype=object).reshape(n_columns, n_rows).T.ravel()
    for panel in grid[len(worst) :]:
        panel.ax.remove()
    axes = np.empty(len(worst), dtype=object)
    for place, k in enumerate(worst):
        has_no_panel_below = place + n_columns >= len(worst)
        axes[place] = grid[place].ax
        _draw_class(grid[place], table[k], f"{short_name(names[k], _MAX_NAME)}: {error_text(preds, errors[k])}")
        axes[place].tick_params(labelleft=place % n_columns == 0, labelbottom=has_no_panel_below)
    draw_keys(canvas, columns_of(table[worst[0]]))
    spacing = {"borderaxespad": 0, "borderpad": 0, "handletextpad": 0.1, "handlelength": 1.4, "columnspacing": 1.2}
    canvas.legend(handles=canvas.keys, ncols=n_columns, bbox_to_anchor=(0, 1 + 22 * canvas.scale / down), **spacing)
    return axes


def _draw_class(canvas: Canvas, table: BinTable, title: str) -> None:
    bins = columns_of(table)
    canvas.title(title, fontsize="small", pad=4, parse_math=False)
    canvas.ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    for axis in (canvas.ax.xaxis, canvas.ax.yaxis):
        axis.set_ticks([0, 0.5, 1], ["0", "0.5", "1"])
    canvas.ax.tick_params(pad=6 * canvas.scale)  # space for a large mark in the corner
    canvas.diagonal()
    if (bins.n > 0).any():
        draw_bins(canvas, bins, ProbabilityAxis(), scale=0.5)
    else:
        canvas.no_data()
