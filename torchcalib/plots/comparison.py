"""Several binnings of the same data, one below the other."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from torchcalib.core.bins import BinTable
from torchcalib.plots.canvas import LIGHT, Style, dress, height_in_points, new_axes, say_no_data
from torchcalib.plots.probability_axis import ProbabilityAxis
from torchcalib.plots.series import Bins, columns_of


def bin_comparison(
    tables: Mapping[str, BinTable],
    ax: Axes | None = None,
    *,
    logit: bool = False,
    title: str | None = None,
    style: Style = LIGHT,
) -> Axes:
    """Draw what several binnings of the same data make of the probability that a prediction comes true.

    One panel for each binning, in the order given, over a shared axis of predictions. Its heading counts the bins and
    says how many samples the smallest and the largest of those hold that are not empty.

    - The steps: from edge to edge of a bin, the empirical probability, which is the share of outcomes that are 1. An
      empty bin leaves a gap.
    - The dashed diagonal: where the steps of a calibrated model run.
    - The ticks below the frame: the edges of the bins.

    Args:
        tables: tables of one series of bins, by the name of the binning.
        ax: where to draw; by default on a new figure. The panels are insets in its frame, `ax.child_axes`.
        logit: whether both axes are on the logit scale; see `tce_diagram`.
        title: written above the picture.
        style: colours. With `DARK`, give the figure of `ax` a dark face.

    Returns:
        The `ax` that was drawn on; its figure is `ax.figure`.

    Raises:
        ValueError: for a batch of tables, or none.

    Source:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error, UAI 2023, fig. 2.

    Example:
        >>> import torch
        >>> from torchcalib import bin_table
        >>> preds, target = torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1])
        >>> tables = {f"{n} bins": bin_table(preds, target, task="binary", n_bins=n) for n in (2, 5)}
        >>> [panel.get_title(loc="left") for panel in bin_comparison(tables).child_axes]
        ['2 bins: 2 bins of 1 to 2 samples', '5 bins: 3 bins of 1 sample, 2 empty']
    """
    if not tables:
        raise ValueError("`tables` must hold at least one table, got none. Pass tables by the names of their binnings.")
    series = {name: columns_of(table, f"tables[{name!r}]") for name, table in tables.items()}
    ax = new_axes(style, 4.6, 1.0 + 1.6 * len(series), top=0.9) if ax is None else ax
    dress(ax, style, title, above_legend=True)
    ax.grid(False)
    ax.spines[:].set_visible(False)
    ax.set(xticks=[], yticks=[])
    ax.set_xlabel("prediction (probability)", labelpad=24)  # beyond the rug and the ticks of the panels
    ax.set_ylabel("empirical probability", labelpad=44 if logit else 30)
    axis = _axis_of(list(series.values())) if logit else ProbabilityAxis()
    below = min(34 / height_in_points(ax), 0.5 / len(series))  # a rug and a heading
    height = (1 + below) / len(series) - below
    for index, (name, bins) in enumerate(reversed(series.items())):
        panel = ax.inset_axes((0, index * (height + below), 1, height))
        dress(panel, style, None)
        panel.set_title(_heading(name, bins), loc="left", color=style.ink, fontsize="small", parse_math=False)
        axis.apply(panel, "x")
        axis.apply(panel, "y")
        panel.tick_params(axis="x", length=0, pad=11, labelbottom=index == 0)
        if bins.n.any():
            _draw_steps(panel, bins, axis, style)
        else:
            say_no_data(panel, style)
    ax.child_axes.reverse()  # drawn from the bottom up, listed from the top down
    return ax


def _axis_of(series: list[Bins]) -> ProbabilityAxis:
    """The logit axis on which all the binnings show. The outer edges, mostly 0 and 1, need not."""
    shown = [values[b.n > 0] for b in series for values in (b.confidence, b.frequency)]
    inner = [b.lower[b.is_real][1:] for b in series]
    n = max(float(b.n.sum()) for b in series)
    return ProbabilityAxis.logit_of(np.concatenate(shown + inner), n) if n > 0 else ProbabilityAxis()


def _heading(name: str, bins: Bins) -> str:
    held = bins.n[bins.n > 0]
    empty = int(bins.is_real.sum()) - len(held)
    if not held.size:
        return name
    least, most = held.min(), held.max()
    size = f"{most:,.10g}" if least == most else f"{least:,.10g} to {most:,.10g}"
    many, samples = "" if len(held) == 1 else "s", "sample" if most == 1 else "samples"
    return f"{name}: {len(held):,} bin{many} of {size} {samples}" + (f", {empty:,} empty" if empty else "")


def _draw_steps(ax: Axes, bins: Bins, axis: ProbabilityAxis, style: Style) -> None:
    real = bins.is_real
    ends = np.stack([bins.lower[real], bins.upper[real]], -1)
    ax.plot([axis.low, axis.high], [axis.low, axis.high], color=style.ink, linewidth=0.8, dashes=(5, 3), zorder=1.5)
    ax.plot(
        np.clip(ends.ravel(), axis.low, axis.high),
        np.clip(bins.frequency[real].repeat(2), axis.low, axis.high),
        color=style.outcome,
        linewidth=np.clip(150 / real.sum(), 0.6, 1.6),
        solid_joinstyle="miter",
        zorder=2,
        clip_on=False,
    )
    edges = np.unique(ends)
    ax.vlines(
        np.clip(edges, axis.low, axis.high),
        -0.09,
        -0.02,
        color=style.muted,
        linewidth=np.clip(60 / len(edges), 0.3, 1.0),  # hundreds of edges must not run together
        transform=ax.get_xaxis_transform(),
        clip_on=False,
    )
