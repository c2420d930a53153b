"""The curve of the ECD of one datum."""

import numpy as np
import torch
from matplotlib.axes import Axes

from torchcalib.metrics.proper_scores import ecd_per_sample
from torchcalib.plots.canvas import LIGHT, Style, dress, new_axes

ECD_MINIMUM = -0.27846454276107380
"""-W(1/e), the least ECD of one binary datum; it is reached at p = 1 / (1 + W(1/e)) if x = 1. [ECD] fig. 2."""


def ecd_curve(ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the entropic calibration difference of one binary datum over the probability it was given.

    Below zero the datum was likelier than the prediction itself expected (under-confident), above zero less likely
    (over-confident). Both curves go to infinity where a probability of 0 was given to what happened.

    Args:
        ax: where to draw; by default on a new figure.
        title: written above the picture.
        style: colours.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Source:
        [ECD] Sumler et al.: An Entropic Metric for Measuring Calibration of Machine Learning Models, fig. 2.

    Example:
        >>> ecd_curve().get_ylabel()
        'ECD (nats)'
    """
    ax = new_axes(style, 5.4, 3.8, top=0.92) if ax is None else ax
    dress(ax, style, title)
    ax.set(xlim=(0, 1), ylim=(-0.5, 2), ylabel="ECD (nats)", xlabel="p, the predicted probability of x = 1")
    ax.axhline(0, color=style.ink, linewidth=0.8)
    p = torch.linspace(0, 1, 1025, dtype=torch.float64)
    at = 1 / (1 - ECD_MINIMUM)
    for x, formula, color, dashes, lowest, side in (
        (1, "(p − 1) log(p / (1 − p))", style.above, (1, 0), at, 0.2),
        (0, "p log(p / (1 − p))", style.below, (4, 1.5), 1 - at, 0.8),
    ):
        ecd = ecd_per_sample(p, torch.full_like(p, x, dtype=torch.int64), task="binary").numpy()
        curve = np.where(np.isfinite(ecd), ecd, np.nan)
        ax.plot(p.numpy(), curve, color=color, dashes=dashes, linewidth=1.8, label=f"x = {x}: {formula}")
        ax.plot([lowest], [ECD_MINIMUM], "o", color=color, markersize=4.5, label=f"minimum, x = {x}")
        ax.text(lowest, ECD_MINIMUM - 0.04, f"p = {lowest:.4f}", color=color, ha="center", va="top", fontsize="small")
        edge = "left" if x else "right"
        ax.text(side, 1.6, f"x = {x}\n{formula}", color=color, ha=edge, va="center", fontsize="small")
    for y, words in (
        (ECD_MINIMUM - 0.04, f"least: −W(1/e) = −{-ECD_MINIMUM:.4f}"),
        (1.1, "above 0: over-confident\nbelow 0: under-confident"),
    ):
        ax.text(0.5, y, words, color=style.muted, ha="center", va="top", fontsize="small")
    return ax
