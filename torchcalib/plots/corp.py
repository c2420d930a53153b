"""The CORP reliability diagram: a rising regression instead of bins."""

import numpy as np
from matplotlib.axes import Axes

from torchcalib.metrics.ranked import CORPCurve
from torchcalib.plots.canvas import LIGHT, Style, compact, dress, new_axes, say_no_data

_N_BARS = 40


def corp_diagram(curve: CORPCurve, ax: Axes | None = None, *, title: str | None = None, style: Style = LIGHT) -> Axes:
    """Draw the frequency that isotonic regression finds over the confidence, and the band where it would be by chance.

    A curve within the band is no evidence against calibration; below the diagonal outcomes came true less often than
    claimed, above it more often. The strip on top shows where the samples lie.

    Args:
        curve: one series; see `corp_curve`.
        ax: where to draw; by default on a new figure. The strip is an inset, just above the frame of `ax`.
        title: written above the picture.
        style: colours. With `DARK`, give the figure of `ax` a dark face.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Raises:
        ValueError: for a batch of curves.

    Source:
        Dimitriadis, Gneiting, Jordan: Stable reliability diagrams for probabilistic classifiers (PNAS 2021), fig. 2.

    Example:
        >>> import torch
        >>> from torchcalib import corp_curve
        >>> ax = corp_diagram(corp_curve(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]), task="binary"))
        >>> ax.get_ylabel()
        'recalibrated (frequency)'
    """
    if curve.n.dim() != 1:
        raise ValueError(
            f"`curve` must be of one series, got a batch of shape {tuple(curve.n.shape)}. Draw one of them: `curve[k]`."
        )
    ax = new_axes(style, 4.6, 5.2, top=0.84) if ax is None else ax
    dress(ax, style, title)
    ax.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    ax.set_xlabel("confidence (probability)")
    ax.set_ylabel("recalibrated (frequency)")
    ax.plot([0, 1], [0, 1], color=style.ink, linewidth=0.8, dashes=(5, 3), zorder=1.5)
    held = curve.n.cpu().numpy() > 0
    columns = (curve.confidence, curve.frequency, curve.band_low, curve.band_high, curve.n)
    confidence, frequency, low, high, n = (column.cpu().numpy()[held] for column in columns)
    if not n.size:
        say_no_data(ax, style)
        return ax
    ax.fill_between(confidence, low, high, color=style.bar, alpha=0.28, linewidth=0, zorder=1.2)
    side = np.where(frequency > confidence, style.above, style.below)
    ax.plot(confidence, frequency, color=style.ink, linewidth=1.0, zorder=2)
    ax.scatter(confidence, frequency, s=7, color=list(side), linewidths=0, zorder=3, clip_on=False)
    ax.text(0.03, 0.97, "● more often than claimed", color=style.above, va="top", fontsize="small")
    ax.text(0.03, 0.92, f"■ {100 * curve.level:.10g} % if calibrated", color=style.muted, va="top", fontsize="small")
    ax.text(0.97, 0.03, "● less often than claimed", color=style.below, ha="right", fontsize="small")
    _draw_counts(ax, confidence, n, style)
    return ax


def _draw_counts(ax: Axes, confidence: np.ndarray, n: np.ndarray, style: Style) -> None:
    """Bars of counts above the frame, on the same x axis."""
    counts, edges = np.histogram(confidence, bins=_N_BARS, range=(0, 1), weights=n)
    strip = ax.inset_axes((0, 1.02, 1, 0.14))
    dress(strip, style, None)
    strip.grid(False)
    strip.set(xlim=(0, 1), ylim=(0, counts.max() * 1.2), xticks=[])
    strip.spines["left"].set_visible(False)
    strip.set_ylabel("count", fontsize="x-small")
    strip.set_yticks([counts.max()], [compact(counts.max())])
    strip.bar(edges[:-1], counts, 1 / _N_BARS, align="edge", color=style.bar, edgecolor=style.paper, linewidth=0.5)
