"""Bias of estimators of the expected calibration error (ECE), and of the debiased squared error.

`python -m benchmarks.debiased` takes two minutes. The target is the ECE over the same 15 equal-width bins for
infinitely many samples.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.laws import LARGE, bins_of, data_sets, expected, normal, random
from benchmarks.study import Cell, Found, Part, Row, Study, joined, main
from torchcalib.core.sums import BinStats
from torchcalib.functional.binned import ece_from_bins, rmsce_from_bins
from torchcalib.inference.testing import ErrorTest, run_error_test

SIZES = (60, 150, 700, 5_000)
N_REPLICATES = 99


LAWS = ("beta mixture", "normal log-odds", "rare: beta(0.5, 20)")
TRUTHS = ("calibrated", "log-odds times 1.3", "log-odds times 0.7", "log-odds plus 0.4")


def folded_mean(gap: Tensor, variance: Tensor) -> Tensor:
    """Return the mean of |x| for normal x: eq. 1 of Leone, Nelson, Nottingham (Technometrics 1961)."""
    deviation = variance.sqrt().clamp(min=1e-12)
    ratio = gap / deviation
    density = math.sqrt(2 / math.pi) * deviation * (-ratio.square() / 2).exp()
    return density + gap * (2 * torch.special.ndtr(ratio) - 1)


def kumar(b: BinStats) -> Tensor:
    """Twice the ECE minus the mean ECE of normal frequencies: Kumar, Liang, Ma (NeurIPS 2019), app. G."""
    again = (b.share * folded_mean(b.gap, b.gap_variance)).sum(-1)
    return (2 * ece_from_bins(b) - again).clamp(min=0)


def scaled(b: BinStats) -> Tensor:
    """ECE times the debiased RMSCE divided by the RMSCE."""
    return (ece_from_bins(b) * rmsce_from_bins(b, debiased=True) / rmsce_from_bins(b)).nan_to_num(0)


def inverted(b: BinStats) -> Tensor:
    """Mean of the gaps whose expected absolute value under normal noise is that observed; 0 if none is so small."""
    low, high, v = torch.zeros_like(b.gap), b.gap.abs(), b.gap_variance
    for _ in range(30):
        middle = (low + high) / 2
        below = folded_mean(middle, v) < b.gap.abs()
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (b.share * low).sum(-1)


def excess(b: BinStats) -> Tensor:
    """ECE minus its noise floor, the expected ECE of a calibrated model."""
    return run_error_test(ErrorTest(ece_from_bins), b, n_replicates=N_REPLICATES).excess


def sweep(p: Tensor, y: Tensor) -> Tensor:
    """ECE over the largest number of equal-mass bins with increasing frequencies: Roelofs et al. (AISTATS 2022)."""
    order = p.sort(-1)
    p, y = order.values, y.gather(-1, order.indices).double()
    n, found, active = p.shape[-1], torch.zeros(len(p)).double(), torch.ones(len(p), dtype=torch.bool)
    sums = torch.stack([torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in (p, y)])
    for n_bins in range(1, n + 1):
        ends = torch.arange(n_bins + 1) * n // n_bins
        confidence, frequency = sums[..., ends].diff(dim=-1) / ends.diff()
        active = active & (frequency.diff(dim=-1) >= 0).all(-1)
        if not active.any():
            break
        value = ((frequency - confidence).abs() * ends.diff() / n).sum(-1)
        found = torch.where(active, value, found)
    return found


OVER_BINS: dict[str, Callable[[BinStats], Tensor]] = {
    "ECE": ece_from_bins,
    "excess": excess,
    "Kumar": kumar,
    "squares": partial(ece_from_bins, debiased=True),
    "inverted": inverted,
    "scaled": scaled,
    "RMSCE debiased": partial(rmsce_from_bins, debiased=True),
}
DATA = (
    "labels",
    "labels, exponential weights",
    "labels, lognormal(2) weights",
    "5 annotators",
    "soft labels",
)
N_ROWS, SCALES = 400, (1.0, 1.8)


def squares(data: str, scale: float, n_sets: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return the squared RMSCE of the population `()`, and debiased ones of data sets `(D,)` before the clamp at 0.

    Log-odds of true probabilities are normal with standard deviation 1.5 / `scale`, and those of predictions are
    `scale` times as large. A target is a label, the fraction of 5 labels, or the true probability (soft labels).
    """
    g = torch.Generator().manual_seed(seed)

    def sets(d: int, n: int) -> tuple[Tensor, Tensor]:
        log_odds = 1.5 * normal(d, n, g=g)
        return log_odds.sigmoid(), (log_odds / scale).sigmoid()

    b = bins_of(*sets(1, 2**21))
    population = (b.share * b.gap.square()).sum(-1)[0]
    p, true = sets(n_sets, N_ROWS)
    target = (random(5 if data == "5 annotators" else 1, *p.shape, g=g) < true).double().mean(0)
    weights = None
    if data == "soft labels":
        target = true
    elif data == "labels, exponential weights":
        weights = -random(*p.shape, g=g).log()
    elif data == "labels, lognormal(2) weights":
        weights = (2 * normal(*p.shape, g=g)).exp()
    b = bins_of(p, target.long() if data.startswith("labels") else target, weights)
    return population, (b.share * (b.gap.square() - b.gap_variance)).sum(-1)


def means_of_squares(data: str, scale: float, n_sets: int) -> list[str]:
    """Return population, mean with its standard error, and mean after the clamp of squares times 10,000."""
    population, x = squares(data, scale, n_sets)
    error = 1e4 * float(x.std() / len(x) ** 0.5)
    clamped = f"{1e4 * float(x.clamp(min=0).mean()):.1f}"
    return [f"{1e4 * float(population):.1f}", f"{1e4 * float(x.mean()):.1f} ({error:.1f})", clamped]


def estimates(law: str, truth: str, n: int, n_sets: int) -> dict[str, Any]:
    """Return the target, and the mean and root mean squared error of each estimator over the data sets."""
    target = 0.0 if truth == "calibrated" else float(ece_from_bins(bins_of(*expected(law, truth, 8 * LARGE))))

    def estimated(p: Tensor, y: Tensor) -> dict[str, Tensor]:
        b = bins_of(p, y)
        return {name: estimate(b) for name, estimate in OVER_BINS.items()} | {"sweep": sweep(p, y)}

    columns = joined(estimated(p, y) for p, y in data_sets(law, truth, n, n_sets)).values()
    return {"target": target, "found": [(float(x.mean()), float((x - target).square().mean().sqrt())) for x in columns]}


def tables(found: dict[Cell, Found]) -> Iterator[list[Row]]:
    """Yield mean absolute bias, mean root mean squared error and median ratio over cells, and all cells."""
    bias, error, ratio = list[Row](), list[Row](), list[Row]()
    for n in SIZES:
        of_size = [each.values for cell, each in found.items() if cell[2] == n]
        target = torch.tensor([each["target"] for each in of_size], dtype=torch.float64).unsqueeze(-1)
        mean, deviation = torch.tensor([each["found"] for each in of_size], dtype=torch.float64).unbind(-1)
        of_target = (mean / target)[target.squeeze(-1) != 0].quantile(0.5, 0)
        bias.append((n, *(f"{x:.4f}" for x in (mean - target).abs().mean(0).tolist())))
        error.append((n, *(f"{x:.4f}" for x in deviation.mean(0).tolist())))
        ratio.append((n, *(f"{x:.2f}" for x in of_target.tolist())))
    yield from (bias, error, ratio)
    yield [
        (*cell, f"{each.values['target']:.4f}", *(f"{mean:.4f} ({error:.4f})" for mean, error in each.values["found"]))
        for cell, each in found.items()
    ]


STUDY = Study(
    "debiased",
    1_000,
    [
        Part(list(product(LAWS, TRUTHS, SIZES)), estimates, tables),
        Part(list(product(DATA, SCALES)), means_of_squares, share=lambda _: 5),
    ],
)

if __name__ == "__main__":
    main(STUDY)
