"""Coverage of the intervals of calibration errors, and validity and power of p-values: `python -m benchmarks.coverage`.

A cell is a distribution of the confidences, a relation of the true probabilities to them, and a number of samples N.
In each cell many data sets are drawn. For ECE, ACE and RMSCE, the table shows how often interval minus noise floor
contains the mean excess, 0 if the model is calibrated. `benchmarks.interval_targets` measures the coverage of the
stated target, the expected error over samples. For ESCE the target is the mean gap, for the debiased RMSCE the error
without noise.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.laws import CLASSES, bins_of, data_sets, expected, updated
from benchmarks.study import Cell, Found, Part, Row, Study, joined, main, missed, rejected, rows
from torchcalib.functional.binned import ece_from_bins, esce_from_bins, mce_from_bins, rmsce_from_bins
from torchcalib.inference import CalibrationTest
from torchcalib.inference.testing import ErrorTest, run_error_tests

SIZES = (200, 500, 3_000, 20_000)
N_REPLICATES = 199
DEBIASED = "RMSCE, debiased"
OVER_BINS = {
    "ECE": ErrorTest(ece_from_bins, interval="absolute"),
    "RMSCE": ErrorTest(rmsce_from_bins, interval="root_mean_square"),
    DEBIASED: ErrorTest(partial(rmsce_from_bins, debiased=True), rmsce_from_bins, interval="debiased"),
    "ESCE": ErrorTest(esce_from_bins, signed=True, interval="mean_gap"),
    "MCE": ErrorTest(mce_from_bins),
}
OTHERS = {"ACE": tc.ACE, "KS": tc.KS, "ATB": tc.ATB, "CORP MCB": tc.CORP}
TESTED = (*(name for name in OVER_BINS if name != DEBIASED), *OTHERS)
LEVELS = (0.01, 0.05, 0.1)
WITH_INTERVAL = ("ECE", "ACE", "RMSCE", DEBIASED, "ESCE")
LARGEST = {"KS": 200, "ATB": 200, "CORP MCB": 200}
"""Largest number of samples for p-values of errors whose replicates require sorted samples."""

LAWS = ("uniform", "near 0: beta(1, 12)", "near 1: beta(8, 1)", "two values", "60% exactly 0 or 1", *CLASSES)
MISCALIBRATED = ("times 0.7", "times 1.3", "times 1.5", "plus 0.3")
TRUTHS = ("calibrated", *(f"log-odds {how}" for how in MISCALIBRATED), "from 0.02 to 0.98", "0.3 lower in (0.55, 0.8)")
# Large samples of 100 classes are left out, because a batch of their logits needs several GB.
CELLS = [
    (law, truth, n) for truth, law, n in product(TRUTHS, LAWS, SIZES) if law != "top label of 100 classes" or n <= 3_000
]


def share_of(cell: Cell) -> float:
    """Return the part of the data sets: a quarter for the largest samples, which take most of the time."""
    return 1 / 4 if cell[2] == SIZES[-1] else 1


def tests_of(p: Tensor, y: Tensor, others: Iterable[str]) -> dict[str, CalibrationTest]:
    """Return the tests of data sets `(D, N)`: those of all errors over equal-width bins, and of `others`."""
    found = run_error_tests(OVER_BINS, bins_of(p, y), n_replicates=N_REPLICATES)
    return found | {name: updated(OTHERS[name], p, y).test(n_replicates=N_REPLICATES) for name in others}


def coverage_of(law: str, truth: str, n: int, n_sets: int) -> dict[str, list[float]]:
    """Return coverage, shares of intervals above and below the target in percent, and mean width, by error."""

    def ends(name: str, test: CalibrationTest) -> Tensor:
        base = 0 if name in (DEBIASED, "ESCE") else test.noise_floor
        return torch.stack((test.statistic, test.low, test.high)) - base

    sets = (tests_of(p, y, ("ACE",)) for p, y in data_sets(law, truth, n, n_sets))
    found = joined({name: ends(name, test) for name, test in tests.items()} for tests in sets)
    p, true = expected(law, truth)
    tables = {}
    for name in WITH_INTERVAL:
        value, low, high = found[name]
        if torch.equal(p, true):
            target = 0.0
        elif name == "ESCE":
            target = float((true - p).mean())
        elif name == DEBIASED:
            target = float(rmsce_from_bins(bins_of(p, true)))
        else:
            target = float(value.mean())
            # The excess of an almost calibrated model is 0 up to the error of this mean.
            if abs(target) < 3 * float(value.std()) / math.sqrt(len(value)):
                target = 0.0
        above, below = missed(low, high, target)
        tables[name] = [100 - above - below, above, below, float((high - low).mean())]
    return tables


def coverage_tables(found: dict[Cell, Found]) -> Iterator[list[Row]]:
    """Yield a summary of the coverage, and one table for each error."""
    summary = []
    for name in WITH_INTERVAL:
        shares = [each.values[name][0] for each in found.values()]
        few, many = sum(share < 93 for share in shares), sum(share > 99 for share in shares)
        summary.append((name, len(shares), f"{min(shares):.1f}", f"{max(shares):.1f}", few, many))
    yield summary
    for name in WITH_INTERVAL:
        of_cells = ((cell, each.values[name]) for cell, each in found.items())
        yield [(*cell, *(f"{share:.1f}" for share in shares), f"{width:.4f}") for cell, (*shares, width) in of_cells]


def p_values_of(law: str, truth: str, n: int, n_sets: int) -> dict[str, Tensor]:
    """Return the p-values `(D,)` of every error."""
    others = [name for name in OTHERS if n <= LARGEST.get(name, n)]
    sets = (tests_of(p, y, others) for p, y in data_sets(law, truth, n, n_sets))
    return joined({name: test.p_value for name, test in tests.items() if name in TESTED} for tests in sets)


def validity_of(law: str, truth: str, n: int, n_sets: int) -> dict[str, tuple[str, int]]:
    """Return the shares of p-values at or below each level by error, and how many are above it by 2.6 errors."""
    limits = {level: level + 2.6 * math.sqrt(level * (1 - level) / n_sets) for level in LEVELS}
    return {
        name: (
            rejected(p, *LEVELS),
            sum(float((p <= level + 1e-9).double().mean()) > limit for level, limit in limits.items()),
        )
        for name, p in p_values_of(law, truth, n, n_sets).items()
    }


def validity_table(found: dict[Cell, Found]) -> Iterator[list[Row] | str]:
    of_errors = [of_error for each in found.values() for of_error in each.values.values()]
    n_shares = len(LEVELS) * len(of_errors)
    yield (
        f"{sum(n_invalid for _, n_invalid in of_errors)} of {n_shares} shares exceed their level by more than 2.6 "
        f"standard errors; {0.0047 * n_shares:.0f} are expected if all p-values are uniform."
    )
    yield [(*cell, *(each.values.get(name, (None,))[0] for name in TESTED)) for cell, each in found.items()]


def power_of(law: str, truth: str, n: int, n_sets: int) -> dict[str, str]:
    return {name: rejected(p, 0.05) for name, p in p_values_of(law, truth, n, n_sets).items()}


STUDY = Study(
    "coverage",
    1_000,
    [
        Part(CELLS, coverage_of, coverage_tables, share_of),
        Part(
            [cell for cell in CELLS if cell[1] == "calibrated"],
            validity_of,
            validity_table,
            lambda cell: 2 * share_of(cell),
            "p-values",
        ),
        Part(
            [cell for cell in CELLS if cell[1] != "calibrated" and cell[2] <= 500],
            power_of,
            partial(rows, columns=TESTED),
            lambda _: 1 / 5,
            "power",
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
