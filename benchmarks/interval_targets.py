"""Coverage of the intervals of calibration errors for their stated targets: `python -m benchmarks.interval_targets`.

The target of ECE and RMSCE is the expected error over samples (confidences and outcomes) of the same size: the mean
over 20 times as many data sets. That of ESCE is the expected mean gap, that of the debiased RMSCE the error over the
same bins for infinitely many samples, and that of the negative log-likelihood (NLL) its expected value.
"""

from itertools import product

import torch
from torch import Tensor

from benchmarks.coverage import DEBIASED, tests_of
from benchmarks.debiased import LAWS, SIZES, TRUTHS
from benchmarks.laws import LARGE, bins_of, data_sets, expected
from benchmarks.study import Part, Study, main, missed, percent
from torchcalib.functional.binned import ece_from_bins, rmsce_from_bins
from torchcalib.inference.resampling import Interval
from torchcalib.reporting.testing import LEVEL, MIN_EVENTS, N_REPLICATES

LEAST_PRINTED = 50  # fewer printed intervals tell nothing about their coverage


def targets(law: str, truth: str, n: int, n_sets: int) -> dict[str, float]:
    """Return the target of every interval."""
    parts = [bins_of(p, y) for seed in range(10, 30) for p, y in data_sets(law, truth, n, n_sets, seed)]
    p, true = expected(law, truth, 8 * LARGE)
    return {
        "ECE": float(torch.cat([ece_from_bins(b) for b in parts]).mean()),
        "RMSCE": float(torch.cat([rmsce_from_bins(b) for b in parts]).mean()),
        DEBIASED: 0.0 if truth == "calibrated" else float(rmsce_from_bins(bins_of(p, true))),
        "ESCE": float((true - p).mean()),
        "NLL": -float((torch.xlogy(true, p) + torch.xlogy(1 - true, 1 - p)).mean()),
    }


def share_covered(low: Tensor, high: Tensor, target: float) -> str:
    """Return the shares of intervals that contain a target, and that are above and below it; NaN is not printed."""
    printed = low.isfinite()
    if int(printed.sum()) < LEAST_PRINTED:
        return "not printed"
    above, below = missed(low[printed], high[printed], target)
    some = "" if bool(printed.all()) else f", {percent(printed, 0)}% printed"
    return f"{100 - above - below:.1f} ({above:.1f} / {below:.1f}{some})"


def bootstrap_of_nll(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends of the bootstrap intervals of NLL `(D,)` as in a report; NaN for few events."""
    nll = -torch.where(y == 1, p, 1 - p).log()
    generator = torch.Generator().manual_seed(4)
    ends = []
    for row in nll:
        drawn = torch.randint(len(row), (N_REPLICATES, len(row)), generator=generator)
        ends.append(Interval(row.mean(), row[drawn].mean(-1), LEVEL, None).without_bias)
    low, high = (torch.stack([torch.as_tensor(end) for end in each]) for each in zip(*ends, strict=True))
    n = p.shape[-1]
    events = torch.stack([torch.minimum(x.sum(-1), n - x.sum(-1)) for x in (p, y.double())]).amax(0)
    return low.masked_fill(events < MIN_EVENTS, torch.nan), high


def shares_covered(law: str, truth: str, n: int, n_sets: int) -> list[str]:
    ((p, y),) = data_sets(law, truth, n, n_sets)
    found = {name: (test.low, test.high) for name, test in tests_of(p, y, ()).items()}
    found["NLL"] = bootstrap_of_nll(p, y)
    return [share_covered(*found[name], target) for name, target in targets(law, truth, n, n_sets).items()]


STUDY = Study(
    "interval_targets",
    1_000,
    [
        Part(
            [(law, truth, n) for n, law, truth in product(SIZES, LAWS, TRUTHS)],
            shares_covered,
            share=lambda cell: 1 if cell[2] < SIZES[-1] else 1 / 4,
        )
    ],
)

if __name__ == "__main__":
    main(STUDY)
