"""Power of the p-values of calibration errors: how often they reject a miscalibrated model.

    python -m benchmarks.power              writes benchmarks/results/power.json and power.md
    python -m benchmarks.power --sets 50    fewer data sets for each cell; writes nothing
    python -m benchmarks.power --few        writes power_few.json and power_few.md, in about two minutes
    python -m benchmarks.power --classes    writes power_classes.json and power_classes.md, in about ten minutes

Each cell draws data sets of N samples, from a generator of a source paper or from confidences whose true log-odds
differ by a temperature or a shift, and counts p-values of at most 5 %. Rows for calibrated models are false-positive
rates, which should be at most 5 %.

A second table shows the power that is lost to ties with few samples. A valid p-value counts all replicates that equal
the data. A randomised p-value counts a random part of them, and rejects a calibrated model in 5 % of data sets at any
number of samples, but differs from run to run.

A third table is for the average of the ECE over many classes, at a level of 1 %. The joint p-value needs stored rows;
the combined one is that of a streaming metric.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import simulate
from torchcalib.inference import calibration_test
from torchcalib.metrics.base import CalibrationMetric

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (200, 1_000, 5_000)
LEVEL = 0.05
N_REPLICATES = 99
FEW_SAMPLES = (5, 10, 20, 50, 100, 200)
SETS_OF_FEW = 1_000
CLASS_COUNTS, SETS_OF_CLASSES, LEVEL_OF_CLASSES = (10, 50), 1_000, 0.01
SLOPES = {"calibrated: logits N(0, 2^2)": 1.0, "logits times 1.1": 1.1, "logits times 1.3": 1.3}

Data = tuple[Tensor, Tensor]
"""P(y=1) and labels of one data set, `(N,)`."""
Rows = list[dict[str, Any]]


def with_labels(preds: Tensor, log_odds: Tensor, temperature: float, shift: float, generator: torch.Generator) -> Data:
    """Draw labels whose log-odds are those of the predictions, divided by a temperature and shifted."""
    true = (log_odds / temperature + shift).sigmoid()
    return preds, (torch.rand(len(true), generator=generator, dtype=torch.float64) < true).long()


def moved_log_odds(temperature: float, shift: float, n: int, seed: int) -> Data:
    """Draw confidences with log-odds N(1, 2^2), and labels."""
    generator = torch.Generator().manual_seed(seed)
    log_odds = 1 + 2 * torch.randn(n, generator=generator, dtype=torch.float64)
    return with_labels(log_odds.sigmoid(), log_odds, temperature, shift, generator)


def tenths(temperature: float, shift: float, n: int, seed: int) -> Data:
    """Draw confidences of 0.1, 0.2, ..., 0.9, which have many ties, and labels."""
    generator = torch.Generator().manual_seed(seed)
    preds = torch.randint(1, 10, (n,), generator=generator) / torch.tensor(10, dtype=torch.float64)
    return with_labels(preds, preds.logit(), temperature, shift, generator)


def mismatched(system: str, n: int, seed: int) -> Data:
    """Draw two classes of [EPSR] app. C. Return P(second class) and labels."""
    systems = simulate.mismatched_systems(2, n + 1, seed=seed)  # class counts are truncated
    order = torch.randperm(len(systems.target), generator=torch.Generator().manual_seed(seed))[:n]
    return getattr(systems, system)[order, 1].exp(), systems.target[order]


def discriminant(train_share: float, test_share: float, n: int, seed: int) -> Data:
    """Draw predictions and labels of [TCE] sec. 4.1."""
    sample = simulate.gaussian_discriminant(train_share, test_share, n_test=n, seed=seed)
    return sample.preds, sample.target


def noisy(sigma: float, n: int, seed: int) -> Data:
    """Draw predictions and labels of [ECD] sec. V-A."""
    return simulate.noisy_evidence(sigma, n, seed=seed)


MODELS: dict[str, Callable[[int, int], Data]] = {
    "calibrated: log-odds N(1, 2^2)": partial(moved_log_odds, 1.0, 0.0),
    "temperature 1.2 (over-confident)": partial(moved_log_odds, 1.2, 0.0),
    "temperature 1.5 (over-confident)": partial(moved_log_odds, 1.5, 0.0),
    "temperature 0.7 (under-confident)": partial(moved_log_odds, 0.7, 0.0),
    "shift of the log-odds by 0.3": partial(moved_log_odds, 1.0, 0.3),
    "calibrated: ECD paper, sigma 0": partial(noisy, 0.0),
    "ECD paper, sigma 0.5": partial(noisy, 0.5),
    "ECD paper, sigma 2": partial(noisy, 2.0),
    "calibrated: EPSR paper, cal": partial(mismatched, "cal"),
    "EPSR paper, mcp (wrong priors)": partial(mismatched, "mcp"),
    "EPSR paper, mcs (scaled by 5)": partial(mismatched, "mcs"),
    "TCE paper, 50 % trained, 50 % tested": partial(discriminant, 0.5, 0.5),
    "TCE paper, 50 % trained, 40 % tested": partial(discriminant, 0.5, 0.4),
    "TCE paper, 1 % trained, 2 % tested": partial(discriminant, 0.01, 0.02),
}
SMALL_MODELS: dict[str, Callable[[int, int], Data]] = {
    "calibrated: log-odds N(1, 2^2)": partial(moved_log_odds, 1.0, 0.0),
    "log-odds N(1, 2^2), temperature 3": partial(moved_log_odds, 3.0, 0.0),
    "calibrated: tenths": partial(tenths, 1.0, 0.0),
    "tenths, temperature 3": partial(tenths, 3.0, 0.0),
}

ERRORS: dict[str, Callable[..., CalibrationMetric]] = {
    "ECE": tc.ECE,
    "ESCE": tc.ESCE,
    "MCE": tc.MCE,
    "RMSCE": tc.RMSCE,
    "ACE": tc.ACE,
    "KS": tc.KS,
    "CORP MCB": tc.CORP,
    "TCE": tc.TCE,
}
SMALL_ERRORS = {"ECE": (tc.ECE, F.ece), "ESCE": (tc.ESCE, F.esce)}
SLOW = {"KS": 4, "CORP MCB": 5, "TCE": 10}
"""These errors have that many times fewer data sets."""
LARGEST = {"TCE": 200}
"""Largest size: each replicate of TCE takes thousands of exact tests."""


def share_rejected(error: Callable[..., CalibrationMetric], preds: Tensor, target: Tensor) -> float:
    """Return the fraction of data sets `(D, N)` with a p-value of at most 5 %."""
    metric = error(task="binary", batch_shape=(len(preds),))
    metric.update(preds, target)
    found = metric.test(n_replicates=N_REPLICATES)
    return float((found.p_value <= LEVEL + 1e-9).double().mean())


def share_rejected_at_random(function: Callable[..., Tensor], preds: Tensor, target: Tensor) -> float:
    """Return the fraction of rejected data sets if ties are broken at random. Labels are simulated for every row."""
    generator = torch.Generator().manual_seed(0)
    observed = function(preds, target, task="binary", batch_dims=1).abs()
    larger, ties = torch.zeros_like(observed), torch.zeros_like(observed)
    for _ in range(N_REPLICATES):
        labels = (torch.rand(preds.shape, generator=generator, dtype=torch.float64) < preds).long()
        replicate = function(preds, labels, task="binary", batch_dims=1).abs()
        larger += replicate > observed + 1e-9
        ties += (replicate - observed).abs() <= 1e-9
    part = (torch.rand(observed.shape, generator=generator, dtype=torch.float64) * (ties + 1)).floor()
    p_value = (1 + larger + part) / (N_REPLICATES + 1)
    return float((p_value <= LEVEL + 1e-9).double().mean())


def power_of_few(draw: Callable[[int, int], Data], n: int) -> dict[str, float]:
    """Return the fractions rejected by the valid and the randomised p-value of every error."""
    preds, target = (part.reshape(SETS_OF_FEW, n) for part in draw(SETS_OF_FEW * n, n))
    power = {}
    for name, (error, function) in SMALL_ERRORS.items():
        power[f"{name}, valid"] = share_rejected(error, preds, target)
        power[f"{name}, randomised"] = share_rejected_at_random(function, preds, target)
    return power


def power_over_classes(slope: float, num_classes: int, n: int = 700) -> dict[str, float]:
    """Return the fractions rejected by the joint and the combined p-value of the class-wise ECE."""
    rejected = {"joint": 0, "combined": 0}
    for seed in range(SETS_OF_CLASSES):
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(n, num_classes, generator=generator)
        target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
        metric = tc.ECE(task="multiclass", num_classes=num_classes, mode="classwise", from_logits=True)
        joint = calibration_test(metric, slope * logits, target, n_replicates=199)
        metric.update(slope * logits, target)
        for name, found in (("joint", joint), ("combined", metric.test(n_replicates=199))):
            rejected[name] += bool(found.p_value <= LEVEL_OF_CLASSES + 1e-9)
    return {name: count / SETS_OF_CLASSES for name, count in rejected.items()}


def power_of(n_sets: int, draw: Callable[[int, int], Data], n: int) -> dict[str, float]:
    """Return the fraction rejected by the p-value of every error."""
    sets = [draw(n, seed) for seed in range(n_sets)]
    size = min(len(p) for p, _ in sets)
    preds, target = (torch.stack([part[:size] for part in column]) for column in zip(*sets, strict=True))
    power = {}
    for name, error in ERRORS.items():
        if n <= LARGEST.get(name, n):
            few = max(1, n_sets // SLOW.get(name, 1))
            power[name] = share_rejected(error, preds[:few], target[:few])
    return power


def table(models: dict[str, Any], sizes: Iterable[int], power: Callable[[Any, int], dict[str, float]]) -> Rows:
    """Print and return a row for every model and size."""
    rows = []
    for name, draw in models.items():
        for n in sizes:
            rows.append({"model": name, "n": n, "power": power(draw, n)})
            shares = "  ".join(f"{error} {share:.3f}" for error, share in rows[-1]["power"].items())
            print(f"{name:40} {n:6,}  {shares}", flush=True)
    return rows


def write(name: str, title: str, explanation: str, rows: Rows, digits: int, size: str = "N", **settings: Any) -> None:
    columns = list(rows[0]["power"])
    page = [
        f"# {title}",
        "",
        explanation,
        "",
        f"| model | {size} | {' | '.join(columns)} |",
        "|---" * (2 + len(columns)) + "|",
    ]
    for row in rows:
        cells = (f"{100 * row['power'][c]:.{digits}f}" if c in row["power"] else "–" for c in columns)
        page.append(f"| {row['model']} | {row['n']:,} | {' | '.join(cells)} |")
    settings |= {"versions": {"torch": torch.__version__, "numpy": np.__version__}, "rows": rows}
    (RESULTS / f"{name}.md").write_text("\n".join(page) + "\n")
    (RESULTS / f"{name}.json").write_text(json.dumps(settings, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=200, help="data sets for each cell (default 200)")
    parser.add_argument("--few", action="store_true", help="compute the table for few samples (about two minutes)")
    parser.add_argument("--classes", action="store_true", help="compute the table for averages over classes")
    given = parser.parse_args()
    start = time.perf_counter()
    settings: dict[str, Any] = {"level": LEVEL, "replicates": N_REPLICATES}
    if given.few:
        rows = table(SMALL_MODELS, FEW_SAMPLES, power_of_few)
        explanation = (
            f"Share of {SETS_OF_FEW:,} data sets with a p-value of at most 5 %, in percent. The valid p-value is that "
            "of `metric.test()`, which counts replicates equal to the data. The randomised one counts a random part of "
            "them. Computed by `python -m benchmarks.power --few`."
        )
        title = "Power lost to ties at few samples"
        write("power_few", title, explanation, rows, digits=1, **settings, data_sets=SETS_OF_FEW)
    elif given.classes:
        rows = table(SLOPES, CLASS_COUNTS, power_over_classes)
        explanation = (
            f"Share of {SETS_OF_CLASSES:,} data sets of 700 samples with a p-value of at most 1 %, in percent, for ECE "
            "averaged over the classes. The joint p-value is that of `torchcalib.inference.calibration_test`, which "
            "simulates the label of each row. The combined one is that of `metric.test()` of a metric without stored "
            "rows. Computed by `python -m benchmarks.power --classes`."
        )
        settings = {"level": LEVEL_OF_CLASSES, "replicates": 199, "data_sets": SETS_OF_CLASSES}
        title = "Power of averages over classes"
        write("power_classes", title, explanation, rows, digits=1, size="classes", **settings)
    else:
        rows = table(MODELS, SIZES, partial(power_of, given.sets))
        if given.sets == parser.get_default("sets"):
            fewer = ", ".join(f"{name} {given.sets // by}" for name, by in SLOW.items())
            explanation = (
                f"Share of {given.sets} data sets ({fewer}) in which `metric.test()` returns a p-value of at most 5 %, "
                "in percent. Computed by `python -m benchmarks.power`."
            )
            write("power", "Power of the p-values", explanation, rows, 0, **settings, data_sets=given.sets, fewer=SLOW)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
