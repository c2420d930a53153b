"""Curve of the entropic calibration difference (ECD) for a single sample."""

import numpy as np
import torch
from matplotlib.axes import Axes

from torchcalib.metrics.proper_scores import ecd
from torchcalib.plots.canvas import LIGHT, Canvas, Style

ECD_MINIMUM = -0.27846454276107380
"""Minimum of the entropic calibration difference (ECD) of one binary sample: -W(1/e), with the Lambert function W.

For outcome x = 1, the minimum is at p = 1 / (1 + W(1/e)). Source: [ECD] fig. 2.
"""


def ecd_curve(ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the entropic calibration difference (ECD) of one binary sample against its predicted probability p.

    The diagram has one curve for each outcome x. The ECD is the log loss minus its expectation under the prediction. It
    is positive for over-confident predictions, negative for under-confident ones, and infinite if x has probability 0.

    Args:
        ax: Axes to draw on; None creates a figure.
        title: Title of the diagram.
        style: Colours of the diagram.

    Returns:
        The axes; their figure is `ax.figure`.

    Reference:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, fig. 2.

    Example:
        >>> ecd_curve().get_ylabel()
        'ECD (nats)'
    """
    canvas = Canvas.create(ax, style, title, (5.4, 3.8), top=0.92)
    ax = canvas.ax
    ax.set(xlim=(0, 1), ylim=(-0.5, 2), ylabel="ECD (nats)", xlabel="p, the predicted probability of x = 1")
    ax.axhline(0, color=style.ink, linewidth=0.8)
    p = torch.linspace(0, 1, 1025, dtype=torch.float64)
    at = 1 / (1 - ECD_MINIMUM)
    for x, formula, color, dashes, lowest, side, edge in (
        (1, "(p − 1) log(p / (1 − p))", style.above, (1, 0), at, 0.2, "left"),
        (0, "p log(p / (1 − p))", style.below, (4, 1.5), 1 - at, 0.8, "right"),
    ):
        score = ecd(p, torch.full_like(p, x, dtype=torch.int64), task="binary", reduction="none").numpy()
        curve = np.where(np.isfinite(score), score, np.nan)
        ax.plot(p.numpy(), curve, color=color, dashes=dashes, linewidth=1.8, label=f"x = {x}: {formula}")
        ax.plot([lowest], [ECD_MINIMUM], "o", color=color, markersize=4.5, label=f"minimum, x = {x}")
        canvas.text(lowest, ECD_MINIMUM - 0.04, f"p = {lowest:.4f}", color, ha="center", va="top")
        canvas.text(side, 1.6, f"x = {x}\n{formula}", color, ha=edge, va="center")
    minimum = f"minimum: −W(1/e) = −{-ECD_MINIMUM:.4f}"
    for y, text in ((ECD_MINIMUM - 0.04, minimum), (1.1, "above 0: over-confident\nbelow 0: under-confident")):
        canvas.text(0.5, y, text, style.muted, ha="center", va="top")
    return ax
