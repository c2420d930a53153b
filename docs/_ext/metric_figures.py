"""Figures of the metric pages: how each metric responds to miscalibration, and its diagram.

A figure is drawn once, in the light colours of `torchcalib.plots`. The dark figure is the same file with other colours.
"""

import re
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

import torchcalib
import torchcalib.functional as F
from torchcalib.metrics.binned import BinnedMetric
from torchcalib.metrics.selective import SelectiveMetric
from torchcalib.plots import DARK, LIGHT, to_svg

N_FACTORS = 11
FACTORS = torch.logspace(-0.398, 0.398, N_FACTORS, 10.0, dtype=torch.float64)  # 0.4 to 2.5, with 1 in the middle
N_CLASSES = 3
N_ANNOTATORS = 10
REPLICATES = 100
EXPENSIVE = {"canonical_error": (200, 30), "cox": (1000, 40), "ici": (200, 40), "smece": (1000, 20)}
"""Number of samples and of simulated data sets, where the usual numbers would take longer than a second."""
FITTED = {"calibration_loss", "relative_calibration_loss", "score_divergence"}
"""Metrics that fit a calibrator, which are computed for few data sets."""
FIELDS = {"corp": "mcb", "cox": "slope", "score_divergence": "divergence"}
"""Field of the result that a figure shows."""
PAPER = "#131416"  # background of the dark theme


class Simulated(NamedTuple):
    """Predictions for each factor, targets of the true model, and targets for which each prediction is calibrated.

    Tensors have the shapes `(K, R, N, ...)` for K factors and R data sets of N samples.
    """

    preds: Tensor
    target: Tensor
    calibrated: Tensor


def drawn(probs: Tensor, data: str, generator: torch.Generator) -> Tensor:
    """Sample targets from probabilities: labels, or annotator counts."""
    if data == "binary":
        return (torch.rand(probs.shape, generator=generator) < probs).long()
    uniform = torch.rand((*probs.shape[:-1], N_ANNOTATORS if data == "counts" else 1), generator=generator)
    edges = probs.cumsum(-1)[..., :-1]
    labels = (uniform.unsqueeze(-1) > edges.unsqueeze(-2)).sum(-1)
    return torch.nn.functional.one_hot(labels, N_CLASSES).sum(-2) if data == "counts" else labels.squeeze(-1)


@cache
def simulated(data: str, n: int, replicates: int) -> Simulated:
    """Simulate data sets of a calibrated model, and multiply its logits by each factor."""
    generator = torch.Generator().manual_seed(0)
    shape = (replicates, n) if data == "binary" else (replicates, n, N_CLASSES)
    logits = 1.5 * torch.randn(shape, generator=generator)
    to_probs = torch.sigmoid if data == "binary" else lambda x: x.softmax(-1)
    # Float64, because a float32 probability of 1 has infinite log-odds.
    preds = to_probs(logits * FACTORS.reshape(-1, *[1] * logits.dim()))
    target = drawn(to_probs(logits), data, generator)
    return Simulated(preds, target.expand(N_FACTORS, *target.shape), drawn(preds, data, generator))


def _value(name: str, found: Any) -> Tensor:
    return getattr(found, FIELDS[name]) if name in FIELDS else found


def values(name: str, data: str, options: dict[str, Any], preds: Tensor, target: Tensor) -> Tensor:
    """Return the metric value `(K, R)` for predictions `(K, R, N, ...)`, one factor at a time."""
    function = getattr(F, name, None) or getattr(torchcalib.calibration, name)
    task = "binary" if data == "binary" else "multiclass"
    return torch.stack(
        [
            _value(name, function(p, t, task=task, batch_dims=1, **options)).double()
            for p, t in zip(preds, target, strict=True)
        ]
    )


def _axes(x_label: str, y_label: str, height: float = 3.2) -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, height), layout="constrained", facecolor=LIGHT.paper)
    ax = figure.add_subplot()
    ax.set_facecolor(LIGHT.paper)
    ax.grid(True, color=LIGHT.grid, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_xlabel(x_label, color=LIGHT.ink)
    ax.set_ylabel(y_label, color=LIGHT.ink)
    ax.tick_params(colors=LIGHT.muted, labelcolor=LIGHT.ink, which="both")
    for side, spine in ax.spines.items():
        spine.set_color(LIGHT.muted)
        spine.set_visible(side in ("left", "bottom"))
    return figure, ax


def _legend(ax: Any) -> None:
    ax.figure.legend(loc="outside upper center", ncols=3, frameon=False, labelcolor=LIGHT.ink, fontsize="small")


def _log_ticks(ax: Any) -> None:
    ax.set_xscale("log")
    ticks = [0.4, 0.5, 0.7, 1, 1.5, 2, 2.5]
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_xticks([], minor=True)
    ax.axvline(1, color=LIGHT.muted, linewidth=1, linestyle=(0, (4, 3)), zorder=1)


def _central(found: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of the central 95% of values `(K, R)`; for few data sets those of a normal distribution."""
    if found.shape[-1] >= REPLICATES:
        low, high = found.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=-1)
        return low, high
    margin = 1.96 * found.std(-1)
    return found.mean(-1) - margin, found.mean(-1) + margin


def _curve(ax: Any, found: Tensor, null: Tensor | None, n: int) -> None:
    if null is not None:
        low, high = _central(null)
        label = f"95% of calibrated models ({n:,} samples)"
        ax.fill_between(
            FACTORS.numpy(), low.numpy(), high.numpy(), color=LIGHT.bar, alpha=0.4, linewidth=0, label=label
        )
    mean = found.mean(-1)
    label = f"mean of {found.shape[-1]} simulated test sets"
    ax.plot(FACTORS.numpy(), mean.numpy(), color=LIGHT.above, marker="o", markersize=4, linewidth=1.8, label=label)
    spread = float(mean.max() - mean.min())
    if spread < 1e-9:  # otherwise the axis would show rounding errors
        centre = float(mean[0])
        ax.set_ylim(centre - 0.05, centre + 0.05)
    _legend(ax)


def scaling_figure(name: str, short: str, entry: dict[str, Any], options: dict[str, Any]) -> Figure:
    """Draw the metric for predictions whose logits are multiplied by a factor."""
    n, replicates = EXPENSIVE.get(name, (1000, 5 if name in FITTED else REPLICATES))
    data = simulated(entry["data"], n, replicates)
    found = values(name, entry["data"], options, data.preds, data.target)
    null = values(name, entry["data"], options, data.preds, data.calibrated) if entry["band"] else None
    figure, ax = _axes("Factor of the logits (below 1: under-confident, above 1: over-confident)", short)
    _curve(ax, found, null, n)
    _log_ticks(ax)
    return figure


def gaussian_figure(name: str, short: str) -> Figure:
    """Draw the metric for Gaussian predictions whose standard deviation is too small or too large."""
    n = 1000
    x = torch.randn(REPLICATES, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    function = getattr(F, name)
    null = function(torch.distributions.Normal(torch.zeros_like(x), 1.0), x)
    scaled = [torch.distributions.Normal(torch.zeros_like(x), float(1 / factor)) for factor in FACTORS]
    found = torch.stack([function(distribution, x) for distribution in scaled])
    figure, ax = _axes("True divided by predicted standard deviation (above 1: over-confident)", short)
    _curve(ax, found, null.expand(N_FACTORS, -1), n)
    _log_ticks(ax)
    return figure


def noise_figure(name: str, short: str, entry: dict[str, Any], options: dict[str, Any]) -> Figure:
    """Draw the metric for logits with added noise, which disturbs the order of the confidences."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.linspace(0, 3, N_FACTORS)
    logits = 1.5 * torch.randn(REPLICATES, 1000, N_CLASSES, generator=generator)
    noise = torch.randn(logits.shape, generator=generator)
    target = drawn(logits.softmax(-1), entry["data"], generator)
    preds = torch.stack([(logits + scale * noise).softmax(-1) for scale in scales])
    found = values(name, entry["data"], options, preds, target.expand(N_FACTORS, *target.shape))
    figure, ax = _axes("Standard deviation of noise added to the logits", short)
    low, high = _central(found)
    ax.fill_between(
        scales.numpy(), low.numpy(), high.numpy(), color=LIGHT.bar, alpha=0.4, linewidth=0, label="95% of test sets"
    )
    ax.plot(
        scales.numpy(), found.mean(-1).numpy(), color=LIGHT.above, marker="o", markersize=4, linewidth=1.8, label="mean"
    )
    _legend(ax)
    return figure


def risk_curve_figure() -> Figure:
    """Draw the normalised Bayes risk of an under-confident, a calibrated and an over-confident model."""
    data = simulated("binary", 1000, REPLICATES)
    figure, ax = _axes("Operating point c", "Risk divided by that of\nthe best constant decision")
    models = ((0, LIGHT.outcome, ":"), (N_FACTORS // 2, LIGHT.above, "-"), (N_FACTORS - 1, LIGHT.below, "--"))
    for k, colour, dashes in models:
        curve = F.bayes_risk_curve(data.preds[k].flatten(), data.target[k].flatten(), task="binary")
        label = f"logits times {float(FACTORS[k]):.2g}"
        ax.plot(curve.operating_point, curve.normalized, color=colour, linestyle=dashes, label=label)
    _legend(ax)
    return figure


def diagram(metric: Any, table: Any = None) -> Figure | None:
    """Draw the diagram of a metric, as `metric.plot()` does, or return None if it has none."""
    plots = torchcalib.plots
    figure = Figure(figsize=(6.4, 5.2), layout="constrained", facecolor=LIGHT.paper)
    if table is not None:
        plots.reliability_diagram(table, ax=figure)
    elif isinstance(metric, torchcalib.TCE):
        plots.tce_diagram(metric, ax=figure)
    elif isinstance(metric, BinnedMetric):
        plots.reliability_diagram(metric, ax=figure)
    elif isinstance(metric, torchcalib.SmECE):
        plots.reliability_diagram(metric, ax=figure, smooth=True)
    elif isinstance(metric, torchcalib.CORP):
        plots.corp_diagram(metric, ax=figure)
    elif isinstance(metric, SelectiveMetric):
        plots.risk_coverage_curve(metric, ax=figure)
    else:
        return None
    return figure


def figure_of(name: str, short: str, entry: dict[str, Any], options: dict[str, Any]) -> Figure | None:
    """Draw the figure of a metric that its entry selects."""
    kind = entry["figure"]
    if kind == "scaling":
        return scaling_figure(name, short, entry, options)
    if kind == "noise":
        return noise_figure(name, short, entry, options)
    if kind == "gaussian":
        return gaussian_figure(name, short)
    return risk_curve_figure() if kind == "risk_curve" else None


def svg_files(figure: Figure) -> dict[str, str]:
    """Return the figure as SVG text in light and in dark colours."""
    light = to_svg(figure.axes[0])
    colours = {getattr(LIGHT, field.name): getattr(DARK, field.name) for field in fields(LIGHT)}
    colours |= {LIGHT.paper: PAPER, "#000000": DARK.ink}
    dark = re.sub(r"#[0-9a-f]{6}\b", lambda found: colours.get(found[0], found[0]), light)
    return {"light": light, "dark": dark}


def settings() -> Any:
    """Return a context with the matplotlib settings of all figures, which other extensions may have changed."""
    return matplotlib.rc_context({**matplotlib.rcParamsDefault, "font.size": 10, "backend": "agg"})
