"""Coverage of the intervals of calibration errors for their stated targets, in simulations.

    python -m benchmarks.interval_targets              writes benchmarks/results/interval_targets.md
    python -m benchmarks.interval_targets --sets 100   fewer data sets for each cell; writes nothing

The target of ECE and RMSCE is the expected error over samples (confidences and outcomes) of the same size: the mean
over 20 times as many data sets. That of ESCE is the expected mean gap, and that of the debiased RMSCE the error over
the same bins for infinitely many samples.
"""

import argparse
import time
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.coverage import DEBIASED, LARGE, WITH_INTERVAL, publish, tests_of
from benchmarks.debiased import LAWS, SIZES, TRUTHS, bins_of, draw
from torchcalib.metrics.binned import ece_from_bins, rmsce_from_bins

PAGE = Path(__file__).resolve().parent / "results" / "interval_targets.md"
ERRORS = tuple(name for name in WITH_INTERVAL if name != "ACE")
LEAST_PRINTED = 50  # fewer printed intervals tell nothing about their coverage


def outcomes(law: str, truth: str, n: int, n_sets: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw data sets of confidences and outcomes, `(D, N)`."""
    generator = torch.Generator().manual_seed(seed)
    p, true = (x.reshape(n_sets, n) for x in draw(law, truth, n_sets * n, generator))
    return p, (torch.rand(p.shape, generator=generator, dtype=torch.float64) < true).long()


def targets(law: str, truth: str, n: int, n_sets: int) -> dict[str, float]:
    """Return the target of the interval of every error."""
    parts = [bins_of(*outcomes(law, truth, n, n_sets, seed)) for seed in range(10, 30)]
    p, true = draw(law, truth, 8 * LARGE, torch.Generator().manual_seed(2))
    whole = bins_of(p.unsqueeze(0), true.unsqueeze(0))
    return {
        "ECE": float(torch.cat([ece_from_bins(b) for b in parts]).mean()),
        "RMSCE": float(torch.cat([rmsce_from_bins(b) for b in parts]).mean()),
        DEBIASED: 0.0 if truth == "calibrated" else float(rmsce_from_bins(whole)),
        "ESCE": float((true - p).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=1_000, help="data sets for each cell (default 1000)")
    given = parser.parse_args()
    start = time.perf_counter()
    lines = []
    for n, law, truth in product(SIZES, LAWS, TRUTHS):
        n_sets = given.sets if n < SIZES[-1] else max(1, given.sets // 4)
        found, shares = tests_of(*outcomes(law, truth, n, n_sets, 1), ()), []
        for name, target in targets(law, truth, n, n_sets).items():
            low, high = found[name].low, found[name].high
            printed = low.isfinite()
            if int(printed.sum()) < LEAST_PRINTED:
                shares.append("not printed")
                continue
            above = 100 * float((low[printed] > target + 1e-12).double().mean())
            below = 100 * float((high[printed] < target - 1e-12).double().mean())
            some = "" if bool(printed.all()) else f", {100 * float(printed.double().mean()):.0f}% printed"
            text = f"{100 - above - below:.1f} ({above:.1f} / {below:.1f}{some})"
            shares.append(text)
        lines.append(f"| {law} | {truth} | {n:,} | {' | '.join(shares)} |")
        print(lines[-1], flush=True)
    page = [
        "# Coverage of intervals for their stated targets",
        "",
        f"Computed by `python -m benchmarks.interval_targets` with torch {torch.__version__}: share of {given.sets:,} "
        "data sets whose 95% interval contains its target, in percent, and in parentheses the shares of intervals "
        f"above and below it. Cells of {SIZES[-1]:,} samples have a quarter of the data sets. Intervals of ECE and "
        "RMSCE are not printed if fewer than 5 events or complements are expected; the coverage is "
        f"that of printed intervals, if there are at least {LEAST_PRINTED}.",
        "",
        f"| confidences | truth | N | {' | '.join(ERRORS)} |",
        "|---" * (3 + len(ERRORS)) + "|",
        *lines,
    ]
    publish(page, PAGE, given.sets == parser.get_default("sets"), start)


if __name__ == "__main__":
    main()
