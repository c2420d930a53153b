"""Reported gains of calibrators against their true gains: `python -m benchmarks.gains` writes results/gains.md.

    python -m benchmarks.gains --sets 20    fewer data sets for each cell; prints only

A data set has N samples with logits N(0, 2^2) for C classes, and labels from a law. Each calibrator is cross-validated
as in a report. Its true gain is that of the fit to all samples, from the conditional risk on fresh logits, whose class
probabilities are known. The advice is followed if a gain of any size is worthwhile, as for clear miscalibration, which
is the harder case.
"""

import argparse
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.calibration.calibrator import Calibrator
from torchcalib.core.inputs import read_input
from torchcalib.reporting.calibration import calibration_stage

RESULTS = Path(__file__).resolve().parent / "results"
N_FRESH = {2: 20_000, 10: 6_000, 100: 1_500}
SIZES = (100, 500, 5_000)

LAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "calibrated": lambda z: z,
    "log-odds x 1.3": lambda z: z / 1.3,
    "one class +1": lambda z: torch.cat((z[:, :1] - 1, z[:, 1:]), -1),
}
"""Functions from the logits of the model to those of the labels."""


SHARES = {2: (1, 1, 0.3), 10: (1, 0.5, 0.1), 100: (0.2, 0.1, 0.02)}
"""Fraction of the data sets by number of classes, for each size: fewer where a set takes long, and noise is small."""


def sets_of(num_classes: int, n: int, most: int) -> int:
    """Return the number of data sets of a cell."""
    return max(8, round(most * SHARES[num_classes][SIZES.index(n)]))


class Outcome(NamedTuple):
    """Result of one data set: gain, interval and true gain by calibrator in percent, preferred and advised names."""

    gains: dict[str, tuple[float, float, float, float]]
    preferred: str
    gain: float
    low: float
    high: float
    is_advised: bool


def log_probs(values: Tensor) -> Tensor:
    """Return log-probabilities `(N, C)` of logits `(N, C)`, or of log-odds `(N,)`."""
    return values.log_softmax(-1) if values.dim() == 2 else torch.stack((logsigmoid(-values), logsigmoid(values)), -1)


def drawn(num_classes: int, n: int, law: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (log-odds for two classes), true class probabilities `(N, C)` and labels."""
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, num_classes, generator=generator, dtype=torch.float64)
    q = LAWS[law](z).softmax(-1)
    labels = torch.multinomial(q, 1, generator=generator).squeeze(-1)
    return (z if num_classes > 2 else z[:, 1] - z[:, 0]), q, labels


def outcome(num_classes: int, n: int, law: str, seed: int) -> Outcome | None:
    """Return the outcome of one data set; None if all labels are equal."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    values, _, labels = drawn(num_classes, n, law, seed)
    fresh, q, _ = drawn(num_classes, N_FRESH[num_classes], law, -1 - seed % 8)

    def risk(fit: Calibrator | None) -> float:
        found = log_probs(fresh if fit is None else fit.calibrated(fresh, True))
        return -float((q * found).masked_fill(q == 0, 0).sum(-1).mean())

    p = read_input("multiclass" if num_classes > 2 else "binary", values, labels, {"from_logits": True})
    stage, whole, _ = calibration_stage(p, "")
    if stage is None or whole is None:
        return None
    raw, fits = risk(None), {type(fit).name: fit for fit in whole.fits.values()}
    gains = {}
    found = stage.recommendation.advised(0.0)
    for line in stage.lines[1:]:
        low, high = found.intervals.get(line.calibrator, (math.nan, math.nan))
        gains[line.calibrator] = (
            found.rcl[line.calibrator], low, high, 100 * (1 - risk(fits[line.calibrator]) / raw)
        )  # fmt: skip
    low, high = found.interval or (math.nan, math.nan)
    return Outcome(gains, found.preferred, found.gain, low, high, found.best is not None)


def cell(outcomes: list[Outcome]) -> dict[str, float]:
    """Return the statistics of the preferred and of the advised calibrators."""
    true = torch.tensor([each.gains[each.preferred][3] for each in outcomes], dtype=torch.float64)
    gain, low, high = (
        torch.tensor([getattr(each, name) for each in outcomes], dtype=torch.float64)
        for name in ("gain", "low", "high")
    )
    advised = torch.tensor([each.is_advised for each in outcomes])
    error = gain - true
    return {
        "sets": len(outcomes),
        "gain": float(gain.mean()),
        "true": float(true.mean()),
        "bias": float(error.mean()),
        "standard error": float(error.std() / math.sqrt(len(outcomes))),
        "coverage": float(((low <= true) & (true <= high)).double().mean()),
        "advised": float(advised.double().mean()),
        "harm": float((true[advised] < 0).double().mean()) if advised.any() else math.nan,
        "advised gain": float(gain[advised].mean()),
        "advised true": float(true[advised].mean()),
        "advised coverage": float(((low <= true) & (true <= high))[advised].double().mean()),
        "followed": float(true.masked_fill(~advised, 0).mean()),
    }


def by_calibrator(outcomes: list[Outcome]) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield name, mean true gain, bias, its standard error and coverage of each calibrator with finite gains."""
    for name in outcomes[0].gains:
        x = torch.tensor([each.gains[name] for each in outcomes if name in each.gains], dtype=torch.float64)
        x = x[x[:, (0, 3)].isfinite().all(-1)]
        if len(x) < max(2, len(outcomes) // 2):
            continue
        gain, low, high, true = x.unbind(-1)
        error = gain - true
        covered = ((low <= true) & (true <= high)).double().mean()
        yield name, float(true.mean()), float(error.mean()), float(error.std() / math.sqrt(len(x))), float(covered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=1000, help="data sets for each cell (default 1000)")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    rows, details, start = [], [], time.perf_counter()
    with Pool(given.processes) as pool:
        for n in SIZES:
            for num_classes in N_FRESH:
                for law in LAWS:
                    seeds = range(1, 1 + sets_of(num_classes, n, given.sets))
                    found = pool.map(partial(outcome, num_classes, n, law), seeds, chunksize=4)
                    outcomes = [each for each in found if each is not None]
                    rows.append({"classes": num_classes, "n": n, "law": law, **cell(outcomes)})
                    details += [(num_classes, n, law, *each) for each in by_calibrator(outcomes)]
                    print(json.dumps(rows[-1]), flush=True)
                    if given.sets == parser.get_default("sets"):
                        write(rows, details)
    print(f"{time.perf_counter() - start:.0f} s")


def write(rows: list[dict[str, float]], details: list[tuple[int, int, str, str, float, float, float, float]]) -> None:
    """Write the tables of the cells that are finished."""
    page = [
        "# Gains of calibrators in reports",
        "",
        "Gains are decreases of the NLL in percent. Reported: of the preferred calibrator, corrected for its choice. "
        "True: of the same calibrator, fitted to all samples, on new data. Bias: reported minus true, with the "
        "standard error of its mean. Coverage: of the true gain by the 95% interval. Advised: share of data sets with "
        "a significant gain; then its mean reported and true gain, and the coverage in these data sets. Harm: share of "
        "the advised calibrators that increase the NLL of new data. Followed: mean true gain of following the advice "
        "in all data sets. Computed by `python -m benchmarks.gains`.",
        "",
        "| classes | N | law | sets | reported | true | bias | coverage | advised | reported | true | coverage | harm "
        "| followed |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        of_advised = " | | | "
        if r["advised"]:
            of_advised = (
                f"{r['advised gain']:.2f} | {r['advised true']:.2f} | {r['advised coverage']:.0%} | {r['harm']:.1%}"
            )
        page.append(
            f"| {r['classes']} | {r['n']:,} | {r['law']} | {r['sets']:,} | {r['gain']:.2f} | {r['true']:.2f} | "
            f"{r['bias']:+.2f} ± {r['standard error']:.2f} | {r['coverage']:.1%} | {r['advised']:.1%} | {of_advised} | "
            f"{r['followed']:.2f} |"
        )
    page += [
        "",
        "## Every calibrator",
        "",
        "| classes | N | law | calibrator | true | bias | coverage |",
        "|---:|---:|---|---|---:|---:|---:|",
        *(
            f"| {c} | {n:,} | {law} | {name} | {true:.2f} | {bias:+.2f} ± {error:.2f} | {covered:.1%} |"
            for c, n, law, name, true, bias, error, covered in details
        ),
    ]
    (RESULTS / "gains.md").write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
