"""Verdicts and intervals of `torchcalib.compare`: `python -m benchmarks.comparisons`.

Laws of the first table have two calibrated systems, so that every verdict on a calibration error is false. For exact
calibration, predictions are drawn from their distribution given the outcome: if p has the density f, the density given
y = 1 is proportional to p f(p). Laws of the second table have a difference, which the intervals should contain.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.study import Cell, Found, Part, Row, Study, main
from torchcalib.core.arguments import Task
from torchcalib.core.events import modes_of
from torchcalib.reporting.testing import LEVEL

N_REPLICATES = 199

Sample = tuple[dict[str, Tensor], Tensor, Tensor | None]
"""Predictions by system, targets, and clusters or None."""

Scales = tuple[float, float]
"""One number for each system."""


def beta_given(a: float, b: float, target: Tensor, g: torch.Generator) -> Tensor:
    """Return probabilities with the distribution beta(a, b), drawn given the outcomes."""
    y = target.double()
    ones = torch._standard_gamma(a + y, generator=g)
    zeros = torch._standard_gamma(b + 1 - y, generator=g)
    return ones / (ones + zeros)


def binary_targets(n: int, p: float, g: torch.Generator) -> Tensor:
    """Return n labels with the frequency p."""
    return torch.bernoulli(torch.full((n,), p, dtype=torch.float64), generator=g).long()


def beta_views(a: float, b: float, n: int, g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with beta(a, b) that share only the outcome, or one and the constant mean."""
    target = binary_targets(n, a / (a + b), g)
    other = torch.full((n,), a / (a + b), dtype=torch.float64) if constant else beta_given(a, b, target, g)
    return {"a": beta_given(a, b, target, g), "b": other}, target, None


def mixture(n: int, g: torch.Generator, constant: bool = False) -> Sample:
    """Return two systems with the mixture of beta(2, 8) and beta(8, 2), or one and its two-valued coarsening."""
    target = binary_targets(n, 0.5, g)

    def view() -> tuple[Tensor, Tensor]:
        # P(second component | y = 1) = 0.8
        second = torch.rand(n, generator=g, dtype=torch.float64) < torch.where(target == 1, 0.8, 0.2)
        return torch.where(second, beta_given(8, 2, target, g), beta_given(2, 8, target, g)), second

    a, component = view()
    return {"a": a, "b": torch.where(component, 0.8, 0.2).double() if constant else view()[0]}, target, None


def normal_log_odds(n: int, g: torch.Generator, scales: Scales = (1.5, 1.5), factors: Scales = (1.0, 1.0)) -> Sample:
    """Return two systems with log-odds N(+-s^2 / 2, s^2) given the outcome, multiplied by a factor for each system."""
    target = binary_targets(n, 0.5, g)
    sign = 2.0 * target - 1
    a, b = (
        (factor * (sign * s**2 / 2 + s * torch.randn(n, generator=g, dtype=torch.float64))).sigmoid()
        for s, factor in zip(scales, factors, strict=True)
    )
    return {"a": a, "b": b}, target, None


def nested_log_odds(n: int, g: torch.Generator) -> Sample:
    """Return a system with log-odds of two features, and one with the log-odds of the first of them."""
    target = binary_targets(n, 0.5, g)
    first, second = ((2.0 * target - 1) * 0.5 + torch.randn(n, generator=g, dtype=torch.float64) for _ in range(2))
    return {"a": (first + second).sigmoid(), "b": first.sigmoid()}, target, None


def clustered(n: int, g: torch.Generator) -> Sample:
    """Return nested systems for 50 clusters of rows with outcomes that share part of the noise.

    Features are independent; y = 1 if a normal variable with correlation 0.3 within clusters is below a limit.
    """
    p = (1.5 * torch.randn(n, generator=g, dtype=torch.float64)).sigmoid()
    cluster = torch.arange(n) % 50
    shared = torch.randn(50, generator=g, dtype=torch.float64)[cluster]
    own = torch.randn(n, generator=g, dtype=torch.float64)
    target = (math.sqrt(0.3) * shared + math.sqrt(0.7) * own < torch.special.ndtri(p)).long()
    grid = (1.5 * torch.special.ndtri((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)).sigmoid()
    above = float(grid[grid > 0.5].mean())
    return {"a": p, "b": torch.where(p > 0.5, above, 1 - above).double()}, target, cluster


def classes(
    num_classes: int, n: int, g: torch.Generator, scales: Scales = (2.0, 2.0), factors: Scales = (1.0, 1.0)
) -> Sample:
    """Return two posteriors of classes with Gaussian features that share only the label, with `factors` of logits."""
    target = torch.randint(num_classes, (n,), generator=g)
    means = torch.nn.functional.one_hot(target, num_classes).double()
    a, b = (
        (factor * s * (s * means + torch.randn(n, num_classes, generator=g, dtype=torch.float64))).softmax(-1)
        for s, factor in zip(scales, factors, strict=True)
    )
    return {"a": a, "b": b}, target, None


def changed(n: int, g: torch.Generator, factor: float = 1.0, shift: float = 0.0) -> Sample:
    """Return a calibrated system with normal log-odds z, and the log-odds `factor` z + `shift` of the same rows."""
    z = 1.5 * torch.randn(n, generator=g, dtype=torch.float64)
    target = torch.bernoulli(z.sigmoid(), generator=g).long()
    return {"a": z.sigmoid(), "b": (factor * z + shift).sigmoid()}, target, None


class Law(NamedTuple):
    """Distribution of two systems and their targets."""

    name: str
    task: Task
    draw: Callable[[int, torch.Generator], Sample]
    n: int = 500
    is_calibrated: bool = True


CALIBRATED = (
    Law("normal log-odds, equal accuracy", "binary", normal_log_odds),
    Law("normal log-odds, 1.5 and 0.5", "binary", partial(normal_log_odds, scales=(1.5, 0.5))),
    Law("normal log-odds, nested", "binary", nested_log_odds),
    Law("beta mixture, equal accuracy", "binary", mixture),
    Law("beta mixture and two values", "binary", partial(mixture, constant=True)),
    Law("beta(0.5, 9.5), equal accuracy", "binary", partial(beta_views, 0.5, 9.5)),
    Law("beta(0.5, 9.5) and constant", "binary", partial(beta_views, 0.5, 9.5, constant=True)),
    Law("beta(0.5, 20), equal accuracy", "binary", partial(beta_views, 0.5, 20)),
    Law("beta(0.5, 20) and constant", "binary", partial(beta_views, 0.5, 20, constant=True)),
    Law("5 classes, equal accuracy", "multiclass", partial(classes, 5)),
    Law("5 classes, different accuracy", "multiclass", partial(classes, 5, scales=(2.0, 0.7))),
    Law("10 classes, equal accuracy", "multiclass", partial(classes, 10)),
    Law("10 classes, different accuracy", "multiclass", partial(classes, 10, scales=(2.0, 0.7))),
    Law("normal log-odds and two values, 50 clusters", "binary", clustered),
)
DIFFERENT = (
    Law("z and 1.3 z", "binary", partial(changed, factor=1.3), is_calibrated=False),
    Law("z and 2 z", "binary", partial(changed, factor=2.0), is_calibrated=False),
    Law("z and z + 0.5", "binary", partial(changed, shift=0.5), is_calibrated=False),
    Law(
        "both over-confident by 1.5, sharpness 1.5 and 0.5",
        "binary",
        partial(normal_log_odds, scales=(1.5, 0.5), factors=(1.5, 1.5)),
        is_calibrated=False,
    ),
    Law("10 classes, logits times 1 and 1.5", "multiclass", partial(classes, 10, factors=(1.0, 1.5)), 500, False),
)
LARGE = ("normal log-odds, equal accuracy", "normal log-odds, 1.5 and 0.5", "normal log-odds, nested")
LARGE += ("10 classes, equal accuracy", "10 classes, different accuracy")
LAWS = (*CALIBRATED, *(law._replace(n=2000) for law in CALIBRATED if law.name in LARGE), *DIFFERENT)
LAWS += tuple(law._replace(n=2000) for law in DIFFERENT)


def outcomes(name: str, n_sets: int) -> dict[str, dict[str, float]]:
    """Return shares of data sets by `Line.key`, and the mean difference beyond chance.

    `significant`: p <= 5%. `excludes_0`: the interval excludes 0. `agree`: both or none. `covered`: the interval
    contains the mean difference beyond chance of all data sets.
    """
    law, found = KINDS[name], defaultdict[str, list[tuple[float, ...]]](list)
    for seed in range(n_sets):
        preds, target, clusters = law.draw(law.n, torch.Generator().manual_seed(seed))
        given: dict[str, Any] = {
            "task": law.task,
            "from_logits": False,
            "clusters": clusters,
            "n_replicates": N_REPLICATES,
        }
        for line in tc.compare(preds, target, **given).lines:
            difference = line.differences["b"]
            if difference.interval is not None:
                interval = difference.interval.low, difference.interval.high
                found[line.key].append((difference.beyond_chance, *interval, difference.p_value))
    return {key: summary(*torch.tensor(rows, dtype=torch.float64).T) for key, rows in found.items()}


def summary(beyond: Tensor, low: Tensor, high: Tensor, p_value: Tensor) -> dict[str, float]:
    """Return the shares and the mean of `outcomes` for one line, from its values in all data sets."""
    significant, excludes = p_value <= (1 - LEVEL) * (1 + 1e-9), (low > 0) | (high < 0)
    truth = beyond.mean()
    shares = {
        "significant": significant,
        "excludes_0": excludes,
        "agree": significant == excludes,
        "covered": (low <= truth) & (truth <= high),
    }
    return {"beyond": float(truth), **{name: float(each.double().mean()) for name, each in shares.items()}}


KINDS = {f"{law.name}, n = {law.n}": law for law in LAWS}
RANKED = ("ace", "tce", "ks", "atb", "mcb")


def tables(found: dict[Cell, Found]) -> Iterator[list[Row] | str]:
    """Yield the share of lines whose interval and p-value agree, false verdicts, coverage and power."""
    agreeing = [(each.sets, x["agree"]) for each in found.values() for x in each.values.values() if "agree" in x]
    n_agree, n_lines = sum(round(n * share) for n, share in agreeing), sum(n for n, _ in agreeing)
    yield f"They agree in {n_agree:,} of {n_lines:,} lines."
    false, covered, excluding = list[Row](), list[Row](), list[Row]()
    for (name,), of_law in found.items():
        law, values = KINDS[name], of_law.values
        row = law.name, law.n, of_law.sets
        if law.is_calibrated:
            keys = [f"{error}/{modes_of(law.task)[0]}" for error in RANKED]
            of_ranks = [f"{100 * values[key]['significant']:.1f}" for key in keys if key in values] or [""] * len(keys)
            sets = of_law.sets if keys[0] in values else ""
            false.append((*row, *both_modes(law, values, "excludes_0"), sets, *of_ranks))
            continue
        for rows, share in ((covered, "covered"), (excluding, "excludes_0")):
            scores = (f"{100 * values[key][share]:.1f}" for key in ("nll", "brier"))
            rows.append((*row, *both_modes(law, values, share), *scores))
    yield from (false, covered, excluding)


def both_modes(law: Law, values: dict[str, dict[str, float]], share: str) -> list[str]:
    """Return the share in percent of each error over bins, in both modes."""
    cells = []
    for name in ("ece", "esce", "mce", "rmsce"):
        keys = [f"{name}/{mode}" for mode in modes_of(law.task)]
        # The class-wise ESCE is always 0.
        shares = [f"{100 * values[key][share]:.1f}" for key in keys if key in values and key != "esce/classwise"]
        cells.append(" / ".join(shares))
    return cells


STUDY = Study("comparisons", 1_000, [Part([(name,) for name in KINDS], outcomes, tables)])

if __name__ == "__main__":
    main(STUDY)
