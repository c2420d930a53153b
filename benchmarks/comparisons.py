"""Share of false verdicts of `torchcalib.compare`, and its power: benchmarks/results/comparisons.md.

Run `python -m benchmarks.comparisons` from the root of the repository. In each law both systems are calibrated, so that
every verdict on a calibration error is false. For exact calibration, predictions are drawn from their distribution
given the outcome: if p has the density f, the density given y = 1 is proportional to p f(p).
"""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.data import Comparison

RESULTS = Path(__file__).parent / "results" / "comparisons.md"
N = 500
N_SETS = 1000

Sample = tuple[dict[str, Tensor], Tensor, Tensor | None]
"""Predictions by system, targets, and clusters or None."""


def beta_given(a: float, b: float, target: Tensor, g: torch.Generator) -> Tensor:
    """Return probabilities with the distribution beta(a, b), drawn given the outcomes."""
    y = target.double()
    ones = torch._standard_gamma(a + y, generator=g)
    zeros = torch._standard_gamma(b + 1 - y, generator=g)
    return ones / (ones + zeros)


def beta_views(a: float, b: float, g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with beta(a, b) that share only the outcome, or one and the constant mean."""
    target = torch.bernoulli(torch.full((N,), a / (a + b), dtype=torch.float64), generator=g).long()
    other = torch.full((N,), a / (a + b), dtype=torch.float64) if constant else beta_given(a, b, target, g)
    return {"a": beta_given(a, b, target, g), "b": other}, target, None


def mixture(g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with the mixture of beta(2, 8) and beta(8, 2), or one and its two-valued coarsening."""
    target = torch.bernoulli(torch.full((N,), 0.5, dtype=torch.float64), generator=g).long()

    def view() -> tuple[Tensor, Tensor]:
        # P(second component | y = 1) = 0.8
        second = torch.rand(N, generator=g, dtype=torch.float64) < torch.where(target == 1, 0.8, 0.2)
        return torch.where(second, beta_given(8, 2, target, g), beta_given(2, 8, target, g)), second

    a, component = view()
    return {"a": a, "b": torch.where(component, 0.8, 0.2).double() if constant else view()[0]}, target, None


def normal_log_odds(g: torch.Generator, scale: float = 1.5, other_scale: float | None = None) -> Sample:
    """Return two systems with log-odds N(+-s^2 / 2, s^2) given the outcome; the second scale may differ."""
    target = torch.bernoulli(torch.full((N,), 0.5, dtype=torch.float64), generator=g).long()
    sign = 2.0 * target - 1

    def view(s: float) -> Tensor:
        return (sign * s**2 / 2 + s * torch.randn(N, generator=g, dtype=torch.float64)).sigmoid()

    return {"a": view(scale), "b": view(scale if other_scale is None else other_scale)}, target, None


def nested_log_odds(g: torch.Generator) -> Sample:
    """Return a system with log-odds of two features, and one with the log-odds of the first of them."""
    target = torch.bernoulli(torch.full((N,), 0.5, dtype=torch.float64), generator=g).long()
    first, second = (
        (2.0 * target - 1) * 0.5 + torch.randn(N, generator=g, dtype=torch.float64) for _ in range(2)
    )
    return {"a": (first + second).sigmoid(), "b": first.sigmoid()}, target, None


def clustered(g: torch.Generator) -> Sample:
    """Return nested systems for 50 clusters of 10 rows with outcomes that share part of the noise.

    Features are independent; y = 1 if a normal variable with correlation 0.3 within clusters is below a limit.
    """
    p = (1.5 * torch.randn(N, generator=g, dtype=torch.float64)).sigmoid()
    cluster = torch.arange(N) % 50
    shared = torch.randn(50, generator=g, dtype=torch.float64)[cluster]
    own = torch.randn(N, generator=g, dtype=torch.float64)
    target = (math.sqrt(0.3) * shared + math.sqrt(0.7) * own < torch.special.ndtri(p)).long()
    grid = (1.5 * torch.special.ndtri((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)).sigmoid()
    above = float(grid[grid > 0.5].mean())
    return {"a": p, "b": torch.where(p > 0.5, above, 1 - above).double()}, target, cluster


def classes(g: torch.Generator, num_classes: int, scale: float = 2.0, other_scale: float | None = None) -> Sample:
    """Return two posteriors of classes with Gaussian features, which share only the label."""
    target = torch.randint(num_classes, (N,), generator=g)
    means = torch.nn.functional.one_hot(target, num_classes).double()

    def view(s: float) -> Tensor:
        features = s * means + torch.randn(N, num_classes, generator=g, dtype=torch.float64)
        return (s * features).softmax(-1)

    return {"a": view(scale), "b": view(scale if other_scale is None else other_scale)}, target, None


LAWS: dict[str, tuple[Task, Callable[[torch.Generator], Sample]]] = {
    "normal log-odds, equal accuracy": ("binary", normal_log_odds),
    "normal log-odds, 1.5 and 0.5": ("binary", lambda g: normal_log_odds(g, 1.5, 0.5)),
    "normal log-odds, nested": ("binary", nested_log_odds),
    "beta mixture, equal accuracy": ("binary", mixture),
    "beta mixture and two values": ("binary", lambda g: mixture(g, True)),
    "beta(0.5, 9.5), equal accuracy": ("binary", lambda g: beta_views(0.5, 9.5, g)),
    "beta(0.5, 9.5) and constant": ("binary", lambda g: beta_views(0.5, 9.5, g, True)),
    "beta(0.5, 20), equal accuracy": ("binary", lambda g: beta_views(0.5, 20, g)),
    "beta(0.5, 20) and constant": ("binary", lambda g: beta_views(0.5, 20, g, True)),
    "5 classes, equal accuracy": ("multiclass", lambda g: classes(g, 5)),
    "5 classes, different accuracy": ("multiclass", lambda g: classes(g, 5, 2.0, 0.7)),
    "10 classes, equal accuracy": ("multiclass", lambda g: classes(g, 10)),
    "10 classes, different accuracy": ("multiclass", lambda g: classes(g, 10, 2.0, 0.7)),
    "normal log-odds and two values, 50 clusters": ("binary", clustered),
}


def compared(sample: Sample, task: Task, seed: int) -> Comparison:
    """Return the comparison of one data set."""
    preds, target, clusters = sample
    builder = ComparisonBuilder(tuple(preds), task=task, seed=seed)
    builder.update(preds, target, clusters=clusters)
    return builder.comparison()


def verdicts(task: Task, draw: Callable[[torch.Generator], Sample], n_sets: int) -> dict[str, float]:
    """Return the share of data sets with a verdict by line, and with an adjusted verdict on any error (`"any"`)."""
    found: Counter[str] = Counter()
    for seed in range(n_sets):
        result = compared(draw(torch.Generator().manual_seed(seed)), task, seed)
        adjusted = False
        for key, line in result.items():
            difference = line.differences["b"]
            found[key] += difference.verdict != "not significant"
            is_error = "/" in key and not key.startswith("dsc/")
            adjusted |= is_error and difference.adjusted_p_value is not None and difference.adjusted_p_value <= 0.05
        found["any"] += adjusted
    return {key: count / n_sets for key, count in found.items()}
