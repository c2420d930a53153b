"""Coverage of intervals, and validity and power of p-values, for clusters of dependent rows.

`python -m benchmarks.clusters` takes about 10 minutes. A cell of the tables is a distribution of the confidences, a
number of clusters, the number of rows in each, and a correlation. Outcomes in a cluster are dependent by a Gaussian
copula: y = 1 if sqrt(rho) a + sqrt(1 - rho) e is below the quantile of the true probability, with a normal a for the
cluster and a normal e for the row.

The first table has clusters of equal size, and sizes by Zipf's law: the k-th largest cluster has a share proportional
to 1 / k. Its laws are a beta mixture, rare outcomes, and clusters whose rows have one confidence and one class.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks import laws
from benchmarks.coverage import LEVELS
from benchmarks.laws import TRUTHS, beta, normal, random, updated
from benchmarks.study import Cell, Found, Part, Row, Study, joined, main, percent, rejected, rows
from torchcalib.functional.binned import ece_from_bins, esce_from_bins
from torchcalib.inference.testing import ErrorTest, run_error_tests

N_REPLICATES = 199
ZIPF, MIXTURE, RARE, ONE_CLASS = "Zipf", "beta mixture", "rare: beta(0.5, 20)", "one class per cluster"
MISCALIBRATED = "log-odds times 1.5"
LARGE = 2**20  # samples for expected values
AT_ONCE = 2**20  # rows
SCORES = {"NLL": tc.NLL, "Brier": tc.BrierScore, "accuracy": tc.Accuracy}
ERRORS = {"ESCE": tc.ESCE, "ECE": tc.ECE, "RMSCE": tc.RMSCE, "MCE": tc.MCE}
OTHERS = {"KS": tc.KS, "Spiegelhalter": tc.Spiegelhalter, "Cox": tc.Cox}
LARGEST_OF_OTHERS = 300
"""Largest number of rows for p-values of errors whose replicates require sorted samples."""


CELLS: list[Cell] = list(product(("uniform", "near 0: beta(1, 12)"), (30,), ("10", "1 to 100"), (0.0, 0.5)))
"""Confidences, number of clusters, rows of each, and correlation."""
UNEQUAL: list[Cell] = [
    *product((MIXTURE, RARE), (20, 60, 400), ("equal", ZIPF), (0.3,)),
    (RARE, 100, "equal", 0.3),
    (RARE, 200, "equal", 0.3),
    (ONE_CLASS, 20, "equal", 1.0),
    (ONE_CLASS, 60, ZIPF, 1.0),
]


def sizes_of(n_clusters: int, rows: str, generator: torch.Generator) -> Tensor:
    """Return the number of rows of each cluster; "1 to 100" is log-uniform."""
    if rows in ("equal", ZIPF):
        share = 1 / torch.arange(1, n_clusters + 1, dtype=torch.float64)
        share = torch.ones_like(share) if rows == "equal" else share
        return (max(2_000, 10 * n_clusters) * share / share.sum()).round().long().clamp(min=1)
    if rows == "1 to 100":
        return (100 ** torch.rand(n_clusters, generator=generator)).round().long()
    return torch.full((n_clusters,), int(rows))


def mixture(n: int, g: torch.Generator) -> Tensor:
    is_first = torch.rand(n, generator=g) < 0.5
    return torch.where(is_first, beta(2, 5, n, g), beta(5, 2, n, g))


LAWS = laws.LAWS | {MIXTURE: mixture, RARE: partial(beta, 0.5, 20)}


def confidences(law: str, clusters: Tensor, g: torch.Generator) -> Tensor:
    """Return confidences for rows of the given clusters `(d, N)`."""
    if law == ONE_CLASS:
        return random(len(clusters), int(clusters.max()) + 1, g=g).gather(1, clusters)
    return LAWS[law](clusters.numel(), g).reshape(clusters.shape)


def data_sets(cell: Cell, truth: str, n_sets: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield confidences, outcomes and clusters of the data sets `(d, N)` of a cell, in batches of equal sizes."""
    law, n_clusters, rows, rho = cell
    generator = torch.Generator().manual_seed(1)
    done = 0
    while done < n_sets:
        sizes = sizes_of(n_clusters, rows, generator)
        n = int(sizes.sum())
        d = min(13, max(1, AT_ONCE // n), n_sets - done)  # more would merge clusters: 1,024 need d <= 13
        clusters = torch.repeat_interleave(torch.arange(n_clusters), sizes).expand(d, -1)
        p = confidences(law, clusters, generator)
        of_cluster, of_row = normal(d, n_clusters, g=generator).gather(1, clusters), normal(d, n, g=generator)
        z = math.sqrt(rho) * of_cluster + math.sqrt(1 - rho) * of_row
        yield p, (torch.special.ndtr(z) < TRUTHS[truth](p)).long(), clusters
        done += d


def clustered(cls: Any, p: Tensor, y: Tensor, clusters: Tensor) -> tc.Clustered:
    """Return a metric of the data sets `(D, N)`."""
    metric = tc.Clustered(cls(task="binary", batch_shape=(len(p),)))
    metric.update(p, y, clusters=clusters)
    return metric


def expected_values(law: str, truth: str) -> dict[str, float]:
    """Return the expected scores and signed error."""
    p = confidences(law, torch.arange(LARGE)[None], torch.Generator().manual_seed(2)).squeeze(0)
    q = TRUTHS[truth](p)
    return {
        "NLL": float(-(torch.xlogy(q, p) + torch.xlogy(1 - q, 1 - p)).mean()),
        "Brier": float((q * (1 - p).square() + (1 - q) * p.square()).mean()),
        "accuracy": float(torch.where(p > 0.5, q, 1 - q).mean()),
        "ESCE": float((q - p).mean()),
    }


def coverage_of(*cell: Any, n_sets: int) -> dict[str, list[str]]:
    """Return the coverage of the interval of every score and error in percent, by truth."""
    return {truth: _coverage_of(cell, truth, n_sets) for truth in ("calibrated", MISCALIBRATED)}


def _coverage_of(cell: Cell, truth: str, n_sets: int) -> list[str]:
    def ends(*data: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, cls in SCORES.items():
            interval = clustered(cls, *data).interval(n_replicates=N_REPLICATES)
            found[name] = torch.stack((interval.value, interval.low, interval.high))
        for name in ("ESCE", "ECE", "RMSCE"):
            test = clustered(ERRORS[name], *data).test(n_replicates=499)
            base = 0 if name == "ESCE" else test.noise_floor
            found[name] = torch.stack((test.statistic, test.low, test.high)) - base
        return found

    targets, covered = expected_values(cell[0], truth), []
    for name, (value, low, high) in joined(ends(*data) for data in data_sets(cell, truth, n_sets)).items():
        target = targets.get(name, 0.0 if truth == "calibrated" else float(value.mean()))
        covered.append(percent(contains(low, high, target)))
    return covered


def contains(low: Tensor, high: Tensor, target: Tensor | float) -> Tensor:
    return (low <= target + 1e-12) & (high >= target - 1e-12)


def coverage_tables(found: dict[Cell, Found]) -> Iterator[list[Row]]:
    for truth in ("calibrated", MISCALIBRATED):
        yield [(*cell, *each.values[truth]) for cell, each in found.items()]


def validity_of(*cell: Any, n_sets: int) -> list[str]:
    """Return effective number of clusters, p-values, coverage and noise floor for calibrated models."""
    tests = {
        "ECE": ErrorTest(ece_from_bins, interval="absolute"),
        "ESCE": ErrorTest(esce_from_bins, signed=True, interval="mean_gap"),
    }
    nll = expected_values(cell[0], "calibrated")["NLL"]

    def tested(*data: Tensor) -> dict[str, Tensor]:
        of_clusters: Any = clustered(tc.ECE, *data).statistic()
        found = run_error_tests(tests, of_clusters.whole, clusters=of_clusters, n_replicates=N_REPLICATES)
        ece, esce, score = found["ECE"], found["ESCE"], clustered(tc.NLL, *data).interval(n_replicates=N_REPLICATES)
        assert ece.effective_clusters is not None
        return {
            "effective": ece.effective_clusters,
            "floor": ece.noise_floor,
            "value": ece.statistic,
            **{f"p of {name}": test.p_value for name, test in found.items()},
            "ECE covered": contains(ece.low, ece.high, ece.noise_floor),
            "ESCE covered": contains(esce.low, esce.high, 0.0),
            "NLL covered": (score.low <= nll) & (score.high >= nll),
        }

    x = joined(tested(*data) for data in data_sets(cell, "calibrated", n_sets))
    return [
        f"{float(x['effective'].median()):.3g}",
        *(rejected(x[f"p of {name}"], *LEVELS) for name in tests),
        *(percent(x[f"{name} covered"]) for name in (*tests, "NLL")),
        f"{float(x['floor'].mean() / x['value'].mean()):.2f}",
    ]


def p_values_of(cell: Cell, truth: str, n_sets: int, with_rows: bool) -> dict[str, Tensor]:
    """Return the p-values `(1, D)` of every error for clusters, or also for independent rows `(2, D)`."""

    def tested(p: Tensor, y: Tensor, clusters: Tensor) -> dict[str, Tensor]:
        found, others = {}, OTHERS if p.shape[-1] <= LARGEST_OF_OTHERS else {"Spiegelhalter": tc.Spiegelhalter}
        for name, cls in (ERRORS | others).items():
            metrics = [clustered(cls, p, y, clusters), *([updated(cls, p, y)] if with_rows else [])]
            found[name] = torch.stack([metric.test(n_replicates=N_REPLICATES).p_value for metric in metrics])
        return found

    return joined(tested(*data) for data in data_sets(cell, truth, n_sets))


def levels_of(*cell: Any, n_sets: int) -> dict[str, str]:
    found = p_values_of(cell, "calibrated", n_sets, with_rows=False)
    return {name: rejected(p, *LEVELS) for name, (p,) in found.items()}


def power_of(*cell: Any, n_sets: int) -> dict[str, str]:
    found = p_values_of(cell, MISCALIBRATED, n_sets, with_rows=True)
    return {name: f"{rejected(p, 0.05)} ({rejected(rows, 0.05)})" for name, (p, rows) in found.items()}


of_every_error = partial(rows, columns=(*ERRORS, *OTHERS))
STUDY = Study(
    "clusters",
    200,
    [
        Part(UNEQUAL, validity_of, share=lambda _: 5),
        Part(CELLS, coverage_of, coverage_tables, name="coverage"),
        Part(CELLS, levels_of, of_every_error, name="p-values"),
        Part([cell for cell in CELLS if cell[-1] == 0], power_of, of_every_error, name="power"),
    ],
)

if __name__ == "__main__":
    main(STUDY)
