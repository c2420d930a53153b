"""Joint histogram of confidence and frequency over images."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap

from torchcalib.io.errors import shown
from torchcalib.plots.canvas import LIGHT, Canvas, ProbabilityAxis, Style
from torchcalib.results.cases import Cases


def reliability_histogram(
    cases: Any,
    ax: Axes | None = None,
    *,
    label: int | str | None = None,
    n_frequencies: int = 15,
    title: str | None = None,
    style: Style = LIGHT,
) -> Axes:
    """Draw how many images have a frequency of the event in each bin of the confidence.

    - Columns: bins of the confidence. Cells: intervals of the frequency in an image. Darker cells have more images, as
      a fraction of the images with voxels in the bin.
    - Dashed diagonal: perfect calibration. If all images are on one side, the model has the same error everywhere. If
      they are on both sides, errors of images cancel in a diagram of all voxels.

    Args:
        cases: Result of `metric.cases()`, or a metric over bins with `per_image`.
        ax: Axes to draw on; None creates a figure.
        label: Class to draw, an index or a name in `cases.labels`. None adds the histograms of all classes.
        n_frequencies: Number of intervals of the frequency.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Raises:
        TypeError: If the metric has no bins.
        ValueError: For an unknown label.

    Reference:
        Barfoot et al.: Average Calibration Losses for Reliable Uncertainty in Medical Image Segmentation (2025), arXiv
        2506.03942: dataset reliability histogram.

    Example:
        >>> import torch
        >>> from torchcalib import ECE
        >>> metric = ECE(task="binary", per_image=True)
        >>> metric.update(torch.rand(20, 50), torch.ones(20, 50, dtype=torch.long))
        >>> reliability_histogram(metric).get_xlabel()
        'predicted probability'
    """
    found = cases if isinstance(cases, Cases) else cases.cases()
    counts = found.reliability_histogram(n_frequencies).cpu().numpy()
    labels = found.labels
    if labels is not None:
        if label is not None and label not in labels:
            raise ValueError(f"`label` must be one of {', '.join(map(str, labels))}, got {shown(label)}.")
        counts = counts.sum(0) if label is None else counts[labels.index(label)]
    elif label is not None:
        raise ValueError(f"`label` must be None for one value per image, got {shown(label)}.")
    canvas = Canvas.create(ax, style, title, (4.6, 4.6), top=0.9)
    canvas.label("predicted probability", "frequency in an image")
    ProbabilityAxis().apply(canvas, "x")
    ProbabilityAxis().apply(canvas, "y")
    share = counts / np.maximum(1, counts.sum(1, keepdims=True))
    colours = LinearSegmentedColormap.from_list("images", [style.paper, style.above])
    edges = (np.linspace(0, 1, size + 1) for size in counts.shape)
    canvas.ax.pcolormesh(*edges, share.T, cmap=colours, vmin=0, vmax=max(share.max(), 1e-9), zorder=0.5)
    canvas.ax.plot([0, 1], [0, 1], color=style.muted, linestyle="--", linewidth=1)
    if not counts.any():
        canvas.no_data()
    return canvas.ax
