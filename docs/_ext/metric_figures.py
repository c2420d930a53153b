"""Figures of the metric pages: the response of each metric to miscalibration, and its diagram.

A figure is drawn once, in the light colours of `torchcalib.plots`. The dark figure is the same file with other colours.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributions import Normal

import torchcalib
from torchcalib.metrics.diagram import draw_metric
from torchcalib.plots import DARK, LIGHT, to_svg

FACTORS = torch.logspace(-0.398, 0.398, 11, 10.0, dtype=torch.float64)  # 0.4 to 2.5, with 1 in the middle
N_CLASSES = 3
N_ANNOTATORS = 10
SIZES = {
    "canonical_error": (200, 30),
    "cox": (1000, 40),
    "ici": (200, 40),
    "smece": (1000, 20),
    **dict.fromkeys(("calibration_loss", "relative_calibration_loss", "score_divergence"), (1000, 5)),
}
"""Number of samples and of simulated data sets, where the usual numbers would take longer than a second."""
LABELS = {
    "scaling": "Factor of the logits (below 1: under-confident, above 1: over-confident)",
    "gaussian": "True divided by predicted standard deviation (above 1: over-confident)",
    "noise": "Standard deviation of noise added to the logits",
}
"""Label of the horizontal axis of each kind of figure."""

STYLE = {
    "figure.constrained_layout.use": True,
    "figure.facecolor": LIGHT.paper,
    "text.color": LIGHT.ink,
    "axes.facecolor": LIGHT.paper,
    "axes.edgecolor": LIGHT.muted,
    "axes.labelcolor": LIGHT.ink,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "grid.color": LIGHT.grid,
    "grid.linewidth": 0.6,
    "xtick.color": LIGHT.muted,
    "xtick.labelcolor": LIGHT.ink,
    "ytick.color": LIGHT.muted,
    "ytick.labelcolor": LIGHT.ink,
    "legend.frameon": False,
}
"""Settings of matplotlib for the figures of metric pages and examples."""


@cache
def simulated(kind: str, data: str, n: int, replicates: int) -> SimpleNamespace:
    """Simulate R data sets of N samples of a calibrated model, and change its predictions for a kind of figure.

    Returns:
        Positions `x` on the horizontal axis `(K,)`; for each of them, `preds`, which are probabilities `(K, R, N, ...)`
        or K normal distributions, `target` of the calibrated model, and targets for which `preds` are `calibrated`.
    """
    generator = torch.Generator().manual_seed(0)
    if kind == "gaussian":
        target = torch.randn(replicates, n, generator=generator, dtype=torch.float64)
        preds = [Normal(torch.zeros_like(target), float(1 / factor)) for factor in FACTORS]
        calibrated = target / FACTORS[:, None, None]
        return SimpleNamespace(x=FACTORS, preds=preds, target=target.expand(11, -1, -1), calibrated=calibrated)
    logits = 1.5 * torch.randn((replicates, n, *([] if data == "binary" else [N_CLASSES])), generator=generator)
    x = torch.linspace(0, 3, 11) if kind == "noise" else FACTORS
    position = x.reshape(-1, *[1] * logits.dim())
    # Factors are float64, because a float32 probability of 1 has infinite log-odds.
    changed = (
        logits + position * torch.randn(logits.shape, generator=generator) if kind == "noise" else logits * position
    )
    to_probs = torch.sigmoid if data == "binary" else lambda x: x.softmax(-1)
    preds = to_probs(changed)
    target = drawn(to_probs(logits), data, generator)
    calibrated = drawn(preds, data, generator)
    return SimpleNamespace(x=x, preds=preds, target=target.expand(11, *target.shape), calibrated=calibrated)


def drawn(probs: Tensor, data: str, generator: torch.Generator) -> Tensor:
    """Sample targets from probabilities: labels, or annotator counts."""
    if data == "binary":
        return (torch.rand(probs.shape, generator=generator) < probs).long()
    uniform = torch.rand((*probs.shape[:-1], N_ANNOTATORS if data == "counts" else 1), generator=generator)
    edges = probs.cumsum(-1)[..., :-1]
    labels = (uniform.unsqueeze(-1) > edges.unsqueeze(-2)).sum(-1)
    return torch.nn.functional.one_hot(labels, N_CLASSES).sum(-2) if data == "counts" else labels.squeeze(-1)


def values(page: Any, preds: Any, target: Tensor) -> Tensor:
    """Return the value `(K, R)` of the metric of a page, for one position at a time."""
    task = {} if page.entry["data"] == "gaussian" else {"task": page.task, "batch_dims": 1}
    found = (page.function(p, t, **task, **page.options) for p, t in zip(preds, target, strict=True))
    value = attrgetter(page.entry["result"][1:]) if page.entry["result"] else lambda each: each
    return torch.stack([value(each).double() for each in found])


def response(page: Any) -> Figure | None:
    """Draw how a metric responds to miscalibration, or return None if its entry selects no figure."""
    kind, entry = page.entry["figure"], page.entry
    if kind == "none":
        return None
    figure = Figure(figsize=(6.4, 3.2))
    n, replicates = SIZES.get(page.name, (1000, 100))
    data = simulated(kind, entry["data"], n, replicates)
    if kind == "risk_curve":
        models = {f"logits times {FACTORS[k]:.2g}": data.preds[k].flatten() for k in (0, 5, 10)}
        torchcalib.plots.bayes_risk_diagram(models, data.target[0].flatten(), task="binary", ax=figure)
        return figure
    ax = figure.add_subplot()
    found = values(page, data.preds, data.target)
    if kind == "noise":
        draw_band(ax, data.x, found, "95% of test sets")
    elif entry["band"]:
        null = values(page, data.preds, data.calibrated)
        draw_band(ax, data.x, null, f"95% of calibrated models ({n:,} samples)")
    mean, label = found.mean(-1), "mean" if kind == "noise" else f"mean of {replicates} simulated test sets"
    ax.plot(data.x, mean, color=LIGHT.above, marker="o", markersize=4, linewidth=1.8, label=label)
    if float(mean.max() - mean.min()) < 1e-9:  # otherwise the axis would show rounding errors
        ax.set_ylim(float(mean[0]) - 0.05, float(mean[0]) + 0.05)
    if kind != "noise":
        ticks = [0.4, 0.5, 0.7, 1, 1.5, 2, 2.5]
        ax.set_xscale("log")
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_xticks([], minor=True)
        ax.axvline(1, color=LIGHT.muted, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    ax.set(xlabel=LABELS[kind], ylabel=entry["label"])
    figure.legend(loc="outside upper center", ncols=3, fontsize="small")
    return figure


def draw_band(ax: Any, x: Tensor, found: Tensor, label: str) -> None:
    """Draw the central 95% of values `(K, R)`; for few data sets those of a normal distribution."""
    if found.shape[-1] >= 100:
        low, high = found.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=-1)
    else:
        low, high = (found.mean(-1) + sign * 1.96 * found.std(-1) for sign in (-1, 1))
    ax.fill_between(x, low, high, color=LIGHT.bar, alpha=0.4, linewidth=0, label=label)


def diagram(page: Any) -> Figure | None:
    """Draw the diagram of a metric for the data of its example, or return None if it has none."""
    figure = Figure(figsize=(6.4, 5.2))
    names, _ = page.executed
    if page.name == "calibration_curve":
        table = page.function(2 * names["logits"], names["target"], from_logits=True, **page.options)
        torchcalib.plots.reliability_diagram(table, ax=figure)
    elif page.cls is None or draw_metric(names["metric"], figure) is None:
        return None
    return figure


def svg_files(figure: Figure) -> dict[str, str]:
    """Return the figure as SVG text in light and in dark colours."""
    light = to_svg(figure.axes[0])
    colours = {getattr(LIGHT, field.name): getattr(DARK, field.name) for field in fields(LIGHT)}
    colours |= {LIGHT.paper: "#131416", "#000000": DARK.ink}  # background of the dark theme, and text
    dark = re.sub(r"#[0-9a-f]{6}\b", lambda found: colours.get(found[0], found[0]), light)
    return {"light": light, "dark": dark}


@contextmanager
def settings() -> Iterator[None]:
    """Set the style of the figures, and ignore warnings of fits that do not converge for extreme factors."""
    with warnings.catch_warnings(), matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}):
        warnings.simplefilter("ignore")
        yield
