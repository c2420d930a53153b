"""Coverage of intervals, and validity and power of p-values, for clusters of dependent rows, in simulations.

    python -m benchmarks.clusters              writes benchmarks/results/clusters.md, in about 10 minutes
    python -m benchmarks.clusters --sets 100   fewer data sets for each cell; writes nothing

A cell of the tables is a distribution of the confidences, a number of clusters, the number of rows in each, and a
correlation. Outcomes in a cluster are dependent by a Gaussian copula: y = 1 if sqrt(rho) a + sqrt(1 - rho) e is below
the quantile of the true probability, with a normal a for the cluster and a normal e for the row.

The first table has clusters of equal size, and sizes by Zipf's law: the k-th largest cluster has a share proportional
to 1 / k. Its laws are a beta mixture, rare outcomes, and clusters whose rows have one confidence and one class.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.coverage import LAWS, TRUTHS, publish
from torchcalib.inference import CalibrationTest
from torchcalib.inference.clusters import FEW_CLUSTERS
from torchcalib.inference.testing import ErrorTest, run_error_tests
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import ece_from_bins, esce_from_bins

PAGE = Path(__file__).resolve().parent / "results" / "clusters.md"
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


class Cell(NamedTuple):
    """One cell of the tables."""

    law: str
    n_clusters: int
    rows: str  # rows for each cluster
    rho: float

    def sizes(self, generator: torch.Generator) -> Tensor:
        """Return the number of rows of each cluster; "1 to 100" is log-uniform."""
        if self.rows in ("equal", ZIPF):
            share = 1 / torch.arange(1, self.n_clusters + 1, dtype=torch.float64)
            share = torch.ones_like(share) if self.rows == "equal" else share
            return (max(2_000, 10 * self.n_clusters) * share / share.sum()).round().long().clamp(min=1)
        if self.rows == "1 to 100":
            return (100 ** torch.rand(self.n_clusters, generator=generator)).round().long()
        return torch.full((self.n_clusters,), int(self.rows))


def cells() -> Iterator[Cell]:
    """Yield all cells with coverage for miscalibrated models."""
    for law in ("uniform", "near 0: beta(1, 12)"):
        for rows in ("10", "1 to 100"):
            for rho in (0.0, 0.5):
                yield Cell(law, 30, rows, rho)


def unequal_cells() -> Iterator[Cell]:
    """Yield the cells of the first table."""
    for law in (MIXTURE, RARE):
        for n_clusters in (20, 60, 400):
            for rows in ("equal", ZIPF):
                yield Cell(law, n_clusters, rows, 0.3)
    yield Cell(RARE, 100, "equal", 0.3)
    yield Cell(RARE, 200, "equal", 0.3)
    yield Cell(ONE_CLASS, 20, "equal", 1.0)
    yield Cell(ONE_CLASS, 60, ZIPF, 1.0)


def _beta(a: float, b: float, n: int, generator: torch.Generator) -> Tensor:
    x, y = (torch._standard_gamma(torch.full((n,), k, dtype=torch.float64), generator=generator) for k in (a, b))
    return x / (x + y)


def confidences(law: str, clusters: Tensor, generator: torch.Generator) -> Tensor:
    """Return confidences for rows of the given clusters `(d, N)`."""
    n = clusters.numel()
    if law == MIXTURE:
        is_first = torch.rand(n, generator=generator) < 0.5
        return torch.where(is_first, _beta(2, 5, n, generator), _beta(5, 2, n, generator)).reshape(clusters.shape)
    if law == RARE:
        return _beta(0.5, 20, n, generator).reshape(clusters.shape)
    if law == ONE_CLASS:
        of_cluster = torch.rand(len(clusters), int(clusters.max()) + 1, generator=generator, dtype=torch.float64)
        return of_cluster.gather(1, clusters)
    return LAWS[law](n, generator).reshape(clusters.shape)


def data_sets(cell: Cell, truth: str, n_sets: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield confidences, outcomes and clusters of the data sets `(d, N)` of a cell, in batches of equal sizes."""
    generator = torch.Generator().manual_seed(1)
    done = 0
    while done < n_sets:
        sizes = cell.sizes(generator)
        n = int(sizes.sum())
        d = min(13, max(1, AT_ONCE // n), n_sets - done)  # more would merge clusters: 1,024 need d <= 13
        clusters = torch.repeat_interleave(torch.arange(cell.n_clusters), sizes).expand(d, -1)
        p = confidences(cell.law, clusters, generator)
        of_cluster = torch.randn(d, cell.n_clusters, generator=generator, dtype=torch.float64).gather(1, clusters)
        of_row = torch.randn(d, n, generator=generator, dtype=torch.float64)
        z = math.sqrt(cell.rho) * of_cluster + math.sqrt(1 - cell.rho) * of_row
        yield p, (torch.special.ndtr(z) < TRUTHS[truth](p)).long(), clusters
        done += d


def clustered(cls: Any, p: Tensor, y: Tensor, clusters: Tensor) -> tc.Clustered:
    """Return a metric of the data sets `(D, N)`."""
    metric = tc.Clustered(cls(task="binary", batch_shape=(len(p),)))
    metric.update(p, y, clusters=clusters)
    return metric


def of_rows(cls: Any, p: Tensor, y: Tensor) -> CalibrationMetric[Any]:
    """Return a metric of the data sets `(D, N)` for independent rows."""
    metric: CalibrationMetric[Any] = cls(task="binary", batch_shape=(len(p),))
    metric.update(p, y)
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


def coverage_of(cell: Cell, truth: str, n_sets: int) -> dict[str, float]:
    """Return the coverage of the interval of every score and error, in percent."""
    ends: dict[str, list[Tensor]] = defaultdict(list)
    for p, y, clusters in data_sets(cell, truth, n_sets):
        for name, cls in SCORES.items():
            found = clustered(cls, p, y, clusters).interval(n_replicates=N_REPLICATES)
            ends[name].append(torch.stack((found.value, found.low, found.high)))
        for name in ("ESCE", "ECE", "RMSCE"):
            test = clustered(ERRORS[name], p, y, clusters).test(n_replicates=499)
            base = 0 if name == "ESCE" else test.noise_floor
            ends[name].append(torch.stack((test.statistic, test.low, test.high)) - base)
    targets = expected_values(cell.law, truth)
    found = {}
    for name, parts in ends.items():
        value, low, high = torch.cat(parts, -1)
        target = targets.get(name, 0.0 if truth == "calibrated" else float(value.mean()))
        found[name] = 100 * float(((low <= target + 1e-12) & (high >= target - 1e-12)).double().mean())
    return found


def validity_of(cell: Cell, n_sets: int) -> dict[str, str]:
    """Return p-values, coverage, noise floor and effective number of clusters for calibrated models."""
    tests = {
        "ECE": ErrorTest(ece_from_bins, interval="absolute"),
        "ESCE": ErrorTest(esce_from_bins, signed=True, interval="mean_gap"),
    }
    parts: dict[str, list[CalibrationTest]] = defaultdict(list)
    scores = []
    for p, y, clusters in data_sets(cell, "calibrated", n_sets):
        of_clusters: Any = clustered(tc.ECE, p, y, clusters).statistic()
        for name, test in run_error_tests(
            tests, of_clusters.whole, clusters=of_clusters, n_replicates=N_REPLICATES
        ).items():
            parts[name].append(test)
        score = clustered(tc.NLL, p, y, clusters).interval(n_replicates=N_REPLICATES)
        scores.append(torch.stack((score.low, score.high)))
    found = {"effective number": f"{_median([x.effective_clusters for x in parts['ECE']]):.3g}"}
    for name, of_error in parts.items():
        found[f"p of {name}"] = shares(torch.cat([x.p_value for x in of_error]), (0.01, 0.05, 0.1))
    for name, of_error in parts.items():
        covered = [(x.low <= y + 1e-12) & (x.high >= y - 1e-12) for x in of_error for y in (_target(name, x),)]
        found[f"{name} covered"] = f"{100 * float(torch.cat(covered).double().mean()):.1f}"
    low, high = torch.cat(scores, -1)
    nll = expected_values(cell.law, "calibrated")["NLL"]
    found["NLL covered"] = f"{100 * float(((low <= nll) & (high >= nll)).double().mean()):.1f}"
    floor, value = (torch.cat([getattr(x, name) for x in parts["ECE"]]) for name in ("noise_floor", "statistic"))
    found["floor / mean ECE"] = f"{float(floor.mean() / value.mean()):.2f}"
    return found


def _target(name: str, test: CalibrationTest) -> Tensor:
    return torch.zeros_like(test.low) if name == "ESCE" else test.noise_floor


def _median(parts: list[Tensor | None]) -> float:
    return float(torch.cat([x for x in parts if x is not None]).median())


def p_values_of(cell: Cell, truth: str, n_sets: int, with_rows: bool) -> dict[str, tuple[Tensor, ...]]:
    """Return the p-values `(D,)` of every error, for clusters and, with `with_rows`, also for independent rows."""
    found: dict[str, list[tuple[Tensor, ...]]] = defaultdict(list)
    for p, y, clusters in data_sets(cell, truth, n_sets):
        others = OTHERS if p.shape[-1] <= LARGEST_OF_OTHERS else {"Spiegelhalter": tc.Spiegelhalter}
        for name, cls in (ERRORS | others).items():
            metrics = [clustered(cls, p, y, clusters), *([of_rows(cls, p, y)] if with_rows else [])]
            found[name].append(tuple(metric.test(n_replicates=N_REPLICATES).p_value for metric in metrics))
    return {name: tuple(map(torch.cat, zip(*parts, strict=True))) for name, parts in found.items()}


def shares(p: Tensor, levels: tuple[float, ...]) -> str:
    """Return the shares of p-values at or below the levels, in percent."""
    return " / ".join(f"{100 * float((p <= level + 1e-9).double().mean()):.1f}" for level in levels)


def table(rows: dict[Cell, dict[str, str]]) -> Iterator[str]:
    """Yield a table with one row for each cell."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    yield f"| confidences | clusters | rows each | correlation | {' | '.join(names)} |"
    yield "|---" * (4 + len(names)) + "|"
    for cell, row in rows.items():
        values = " | ".join(row.get(name, "–") for name in names)
        yield f"| {cell.law} | {cell.n_clusters:,} | {cell.rows} | {cell.rho} | {values} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=200, help="data sets for each cell (default 200)")
    n_sets = parser.parse_args().sets
    torch.set_num_threads(1)
    start, levels = time.perf_counter(), (0.01, 0.05, 0.1)
    coverage: dict[str, dict[Cell, dict[str, str]]] = {"calibrated": {}, MISCALIBRATED: {}}
    validity: dict[Cell, dict[str, str]] = {}
    power: dict[Cell, dict[str, str]] = {}
    unequal = {}
    for cell in unequal_cells():
        unequal[cell] = validity_of(cell, 5 * n_sets)
        print(*cell, unequal[cell], flush=True)
    for cell in cells():
        for truth, rows in coverage.items():
            found = coverage_of(cell, truth, n_sets)
            rows[cell] = {name: f"{share:.1f}" for name, share in found.items()}
        p_values = p_values_of(cell, "calibrated", n_sets, with_rows=False)
        validity[cell] = {name: shares(p, levels) for name, (p,) in p_values.items()}
        if cell.rho == 0 and cell.n_clusters == 30:
            p_values = p_values_of(cell, MISCALIBRATED, n_sets, with_rows=True)
            power[cell] = {
                name: f"{shares(p, (0.05,))} ({shares(rows, (0.05,))})" for name, (p, rows) in p_values.items()
            }
        print(*cell, coverage["calibrated"][cell], coverage[MISCALIBRATED][cell], validity[cell], flush=True)
    page = [
        "# Clusters: coverage of intervals, and validity and power of p-values",
        "",
        f"Computed by `python -m benchmarks.clusters` with torch {torch.__version__}, {n_sets:,} data sets for each "
        "cell. Scores have bootstrap intervals of `Clustered.interval`, errors those of `Clustered.test`. An interval "
        "of ECE or RMSCE covers if, minus the noise floor, it contains the mean excess over all data sets of the cell "
        "(0 if calibrated).",
        "",
        "## Equal and unequal clusters of calibrated models",
        "",
        f"{5 * n_sets:,} data sets for each cell, with 2,000 rows, or 10 rows for each cluster if that is more. The "
        'columns of p contain the share of p-values at or below 1 / 5 / 10%, in percent. The columns "covered" contain '
        "the coverage of 95% intervals, in percent. The last column is the mean noise floor of ECE divided by the mean "
        "ECE, which is 1 for an exact noise floor.",
        "",
        *table(unequal),
        "",
        "For the beta mixture, p-values are valid even for 20 clusters of very unequal sizes. Below an "
        f"effective number of {FEW_CLUSTERS}, small p-values occur too often for rare outcomes, and "
        "for ECE if each cluster has one confidence and one class. A report then has a note. For 60 such "
        "clusters with sizes by the law of Zipf, the noise floor is too low.",
        "",
        *(
            line
            for truth, rows in coverage.items()
            for line in (f"## Coverage of 95% intervals, {truth}", "", "In percent.", "", *table(rows), "")
        ),
        "## p-values of calibrated models",
        "",
        "Share of data sets with p at or below 1 / 5 / 10%, in percent.",
        "",
        *table(validity),
        "",
        "## Power without correlation",
        "",
        f"Share of data sets with p at or below 5%, in percent, truth: {MISCALIBRATED}. In parentheses: the test for "
        "independent rows, which is right here.",
        "",
        *table(power),
    ]
    publish(page, PAGE, n_sets == parser.get_default("sets"), start)


if __name__ == "__main__":
    main()
