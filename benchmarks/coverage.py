"""Coverage of the intervals of calibration errors, and validity and power of their p-values, in simulations.

    python -m benchmarks.coverage              writes benchmarks/results/coverage.md, in about an hour
    python -m benchmarks.coverage --sets 100   fewer data sets for each cell; writes nothing

A cell is a distribution of the confidences, a relation of the true probabilities to them, and a number of samples N.
In each cell many data sets are drawn. For ECE, ACE and RMSCE, the table shows how often interval minus noise floor
contains the mean excess, 0 if the model is calibrated. `benchmarks.interval_targets` measures the coverage of the
stated target, the expected error over samples. For ESCE the target is the mean gap, for the debiased RMSCE the error
without noise.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchcalib as tc
from torchcalib.inference import CalibrationTest
from torchcalib.inference.testing import ErrorTest, run_error_tests
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import ece_from_bins, esce_from_bins, mce_from_bins, rmsce_from_bins

PAGE = Path(__file__).resolve().parent / "results" / "coverage.md"
SIZES = (200, 500, 3_000, 20_000)
N_REPLICATES = 199
AT_ONCE = 2**22  # samples
LARGE = 2**18  # samples for expected values

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""Function of a number of samples that returns confidences and true probabilities of their events."""


DEBIASED = "RMSCE, debiased"
OVER_BINS = {
    "ECE": ErrorTest(ece_from_bins, interval="absolute"),
    "RMSCE": ErrorTest(rmsce_from_bins, interval="root_mean_square"),
    DEBIASED: ErrorTest(partial(rmsce_from_bins, debiased=True), rmsce_from_bins, interval="debiased"),
    "ESCE": ErrorTest(esce_from_bins, signed=True, interval="mean_gap"),
    "MCE": ErrorTest(mce_from_bins),
}
OTHERS = {"ACE": tc.ACE, "KS": tc.KS, "ATB": tc.ATB, "CORP MCB": tc.CORP}
WITH_INTERVAL = ("ECE", "ACE", "RMSCE", DEBIASED, "ESCE")
LARGEST = {"KS": 200, "ATB": 200, "CORP MCB": 200}
"""Largest number of samples for p-values of errors whose replicates require sorted samples."""


def _beta(a: float, b: float, n: int, generator: torch.Generator) -> Tensor:
    """Draw from beta(a, 1) or beta(1, b), by inversion."""
    u = torch.rand(n, generator=generator, dtype=torch.float64)
    return u ** (1 / a) if b == 1 else 1 - u ** (1 / b)


def _two_points(n: int, generator: torch.Generator) -> Tensor:
    return torch.where(torch.rand(n, generator=generator) < 0.5, 0.2, 0.9).double()


def _many_certain(n: int, generator: torch.Generator) -> Tensor:
    kind, p = torch.rand(2, n, generator=generator, dtype=torch.float64)
    return torch.where(kind < 0.3, 0.0, torch.where(kind < 0.6, 1.0, p))


LAWS: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "uniform": partial(_beta, 1, 1),
    "near 0: beta(1, 12)": partial(_beta, 1, 12),
    "near 1: beta(8, 1)": partial(_beta, 8, 1),
    "two values": _two_points,
    "60% exactly 0 or 1": _many_certain,
}


def _scaled(scale: float, shift: float, p: Tensor) -> Tensor:
    return (scale * p.logit() + shift).sigmoid()


TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "calibrated": lambda p: p,
    "log-odds times 0.7": partial(_scaled, 0.7, 0.0),
    "log-odds times 1.3": partial(_scaled, 1.3, 0.0),
    "log-odds times 1.5": partial(_scaled, 1.5, 0.0),
    "log-odds plus 0.3": partial(_scaled, 1.0, 0.3),
    "from 0.02 to 0.98": lambda p: p.clamp(0.02, 0.98),
    "0.3 lower in (0.55, 0.8)": lambda p: torch.where((p > 0.55) & (p < 0.8), p - 0.3, p),
}


def binary(law: str, truth: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw confidences and true probabilities of a binary task."""
    p = LAWS[law](n, generator)
    return p, TRUTHS[truth](p)


def top_label(n_classes: int, truth: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw confidences of the predicted class, and its true probabilities, from normal logits."""
    logits = 2 * torch.randn(n, n_classes, generator=generator).double()
    confidence, predicted = logits.softmax(-1).max(-1)
    if truth.startswith("log-odds times"):
        true = (float(truth.split()[-1]) * logits).softmax(-1).gather(-1, predicted.unsqueeze(-1)).squeeze(-1)
    else:
        true = TRUTHS[truth](confidence)
    return confidence, true


def one_of_three(truth: str, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw the probability of the first of three classes, and its true probability."""
    logits = 2 * torch.randn(n, 3, generator=generator).double()
    p = logits.softmax(-1)[:, 0]
    if truth.startswith("log-odds times"):
        return p, (float(truth.split()[-1]) * logits).softmax(-1)[:, 0]
    return p, TRUTHS[truth](p)


class Cell(NamedTuple):
    """One cell of the tables."""

    law: str
    truth: str
    n: int
    draw: Draw


def cells() -> Iterator[Cell]:
    """Yield all cells. Large samples of 100 classes are left out, because a batch of their logits needs several GB."""
    for truth in TRUTHS:
        draws: dict[str, tuple[Draw, int]] = {law: (partial(binary, law, truth), SIZES[-1]) for law in LAWS}
        draws["top label of 10 classes"] = partial(top_label, 10, truth), SIZES[-1]
        draws["top label of 100 classes"] = partial(top_label, 100, truth), 3_000
        draws["one of 3 classes"] = partial(one_of_three, truth), SIZES[-1]
        for law, (draw, largest) in draws.items():
            yield from (Cell(law, truth, n, draw) for n in SIZES if n <= largest)


class Coverage(NamedTuple):
    """Coverage in percent, share of intervals above and below the expected value, and mean width."""

    covered: float
    above: float
    below: float
    width: float


def sets_of(cell: Cell, n_sets: int) -> int:
    """Return the number of data sets of a cell: a quarter for the largest samples, which take most of the time."""
    return n_sets // 4 if cell.n == SIZES[-1] else n_sets


def samples(cell: Cell, n_sets: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield confidences and outcomes of the data sets `(d, N)` of a cell, in batches."""
    generator = torch.Generator().manual_seed(1)
    for start in range(0, n_sets, max(1, AT_ONCE // cell.n)):
        d = min(max(1, AT_ONCE // cell.n), n_sets - start)
        p, true = (x.reshape(d, cell.n) for x in cell.draw(d * cell.n, generator))
        yield p, (torch.rand(p.shape, generator=generator, dtype=torch.float64) < true).long()


def tests_of(p: Tensor, y: Tensor, others: Iterable[str]) -> dict[str, CalibrationTest]:
    """Return the tests of data sets `(D, N)`: those of all errors over equal-width bins, and of `others`."""
    metric = updated(tc.ECE, p, y)
    found = run_error_tests(OVER_BINS, metric.statistic(), n_replicates=N_REPLICATES)
    return found | {name: updated(OTHERS[name], p, y).test(n_replicates=N_REPLICATES) for name in others}


def updated(cls: type[CalibrationMetric[Any]], p: Tensor, target: Tensor) -> CalibrationMetric[Any]:
    """Return a metric of the data sets `(D, N)`."""
    metric = cls(task="binary", batch_shape=(len(p),))
    metric.update(p, target)
    return metric


def coverage_of(cell: Cell, n_sets: int) -> dict[str, Coverage]:
    """Return the coverage of the interval of every error."""
    ends: dict[str, list[Tensor]] = defaultdict(list)
    for p, y in samples(cell, n_sets):
        for name, found in tests_of(p, y, ("ACE",)).items():
            base = torch.zeros_like(found.low) if name in (DEBIASED, "ESCE") else found.noise_floor
            ends[name].append(torch.stack((found.statistic, found.low, found.high)) - base)
    p, true = cell.draw(LARGE, torch.Generator().manual_seed(2))
    tables = {}
    for name in WITH_INTERVAL:
        value, low, high = torch.cat(ends[name], -1)
        if torch.equal(p, true):
            target = 0.0
        elif name == "ESCE":
            target = float((true - p).mean())
        elif name == DEBIASED:
            target = float(rmsce_from_bins(updated(tc.ECE, p.unsqueeze(0), true.unsqueeze(0)).statistic()))
        else:
            target = float(value.mean())
            # The excess of an almost calibrated model is 0 up to the error of this mean.
            if abs(target) < 3 * float(value.std()) / math.sqrt(len(value)):
                target = 0.0
        above, below = (100 * float(x.double().mean()) for x in (low > target + 1e-12, high < target - 1e-12))
        tables[name] = Coverage(100 - above - below, above, below, float((high - low).mean()))
    return tables


def p_values_of(cell: Cell, n_sets: int) -> dict[str, Tensor]:
    """Return the p-values `(D,)` of every error."""
    others = [name for name in OTHERS if cell.n <= LARGEST.get(name, cell.n)]
    found: dict[str, list[Tensor]] = defaultdict(list)
    for p, y in samples(cell, n_sets):
        for name, test in tests_of(p, y, others).items():
            if name != DEBIASED:  # the p-value of RMSCE
                found[name].append(test.p_value)
    return {name: torch.cat(parts) for name, parts in found.items()}


def coverage_lines(rows: dict[Cell, dict[str, Coverage]]) -> Iterator[str]:
    """Yield a summary of the coverage, and one table for each error."""
    yield "| error | cells | least coverage | most coverage | cells below 93% | cells above 99% |"
    yield "|---|---|---|---|---|---|"
    for name in WITH_INTERVAL:
        shares = [row[name].covered for row in rows.values()]
        few, many = sum(share < 93 for share in shares), sum(share > 99 for share in shares)
        yield f"| {name} | {len(shares)} | {min(shares):.1f} | {max(shares):.1f} | {few} | {many} |"
    for name in WITH_INTERVAL:
        yield from ("", f"### {name}", "", "| confidences | truth | N | coverage | above | below | mean width |")
        yield "|---|---|---|---|---|---|---|"
        for cell, row in rows.items():
            found = row[name]
            yield (
                f"| {cell.law} | {cell.truth} | {cell.n:,} | {found.covered:.1f} | {found.above:.1f} | "
                f"{found.below:.1f} | {found.width:.4f} |"
            )


def p_value_lines(rows: dict[Cell, dict[str, Tensor]], calibrated: bool) -> Iterator[str]:
    """Yield a table of the shares of p-values at or below 1, 5 and 10%; of 5% only for miscalibrated models."""
    levels = (0.01, 0.05, 0.1) if calibrated else (0.05,)
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    yield f"| confidences | truth | N | {' | '.join(names)} |"
    yield "|---" * (3 + len(names)) + "|"
    for cell, row in rows.items():
        shares = {
            name: " / ".join(f"{100 * float((p <= level + 1e-9).double().mean()):.1f}" for level in levels)
            for name, p in row.items()
        }
        yield f"| {cell.law} | {cell.truth} | {cell.n:,} | {' | '.join(shares.get(name, '–') for name in names)} |"


def invalid(rows: dict[Cell, dict[str, Tensor]]) -> int:
    """Return the number of shares of p-values above their level by more than 2.6 standard errors."""
    return sum(
        float((p <= level + 1e-9).double().mean()) > level + 2.6 * math.sqrt(level * (1 - level) / len(p))
        for row in rows.values()
        for p in row.values()
        for level in (0.01, 0.05, 0.1)
    )


def publish(page: list[str], path: Path, is_complete: bool, start: float) -> None:
    """Write the lines of a page if it has the default number of data sets, else print them. Print the time."""
    if is_complete:
        path.write_text("\n".join(page) + "\n")
    else:
        print("\n".join(page))
    print(f"{time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=1_000, help="data sets for each cell (default 1000)")
    given = parser.parse_args()
    start, coverage = time.perf_counter(), {}
    calibrated: dict[Cell, dict[str, Tensor]] = {}
    power: dict[Cell, dict[str, Tensor]] = {}
    for cell in cells():
        coverage[cell] = coverage_of(cell, sets_of(cell, given.sets))
        if cell.truth == "calibrated":
            calibrated[cell] = p_values_of(cell, 2 * sets_of(cell, given.sets))
        elif cell.n <= 500:
            power[cell] = p_values_of(cell, max(1, given.sets // 5))
        shares = "  ".join(f"{name} {found.covered:.1f}" for name, found in coverage[cell].items())
        print(f"{cell.law:24} {cell.truth:26} {cell.n:6,}  {shares}", flush=True)
    n_shares = 3 * sum(map(len, calibrated.values()))
    page = [
        "# Coverage of intervals, and validity and power of p-values",
        "",
        f"Computed by `python -m benchmarks.coverage` with torch {torch.__version__}. Cells of {SIZES[-1]:,} samples "
        "have a quarter of the data sets of the others.",
        "",
        "## Intervals",
        "",
        f"Share of {given.sets:,} data sets whose 95% interval contains the expected value, share of intervals above "
        "and below it, all in percent, and mean width. The standard error of a coverage of 95% is "
        f"{100 * math.sqrt(0.95 * 0.05 / given.sets):.1f}.",
        "",
        *coverage_lines(coverage),
        "",
        "## p-values of calibrated models",
        "",
        f"Share of {2 * given.sets:,} data sets with p at or below 1 / 5 / 10%, in percent. {invalid(calibrated)} of "
        f"{n_shares} shares exceed their level by more than 2.6 standard errors; {0.0047 * n_shares:.0f} are expected "
        "if all p-values are uniform. ESCE, and errors of few distinct confidences, have ties, and are conservative.",
        "",
        *p_value_lines(calibrated, calibrated=True),
        "",
        "## Power",
        "",
        f"Share of {max(1, given.sets // 5)} data sets of miscalibrated models with p at or below 5%, in percent.",
        "",
        *p_value_lines(power, calibrated=False),
    ]
    publish(page, PAGE, given.sets == parser.get_default("sets"), start)


if __name__ == "__main__":
    main()
