"""Power of the p-values of calibration errors: how often they reject a miscalibrated model.

    python -m benchmarks.power              writes benchmarks/results/power.json and power.md
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

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import simulate
from benchmarks.laws import normal, random, updated
from benchmarks.study import Cell, Found, Part, Row, Study, main, percent
from torchcalib.inference import calibration_test
from torchcalib.metrics.base import CalibrationMetric

SIZES = (200, 1_000, 5_000)
LEVEL = 0.05
N_REPLICATES = 99
FEW_SAMPLES = (5, 10, 20, 50, 100, 200)
CLASS_COUNTS, LEVEL_OF_CLASSES = (10, 50), 0.01
SLOPES = {"calibrated: logits N(0, 2^2)": 1.0, "logits times 1.1": 1.1, "logits times 1.3": 1.3}

Data = tuple[Tensor, Tensor]
"""P(y=1) and labels of one data set, `(N,)`."""


def moved(temperature: float, shift: float, n: int, seed: int, tenths: bool = False) -> Data:
    """Draw confidences with log-odds N(1, 2^2) or, with many ties, of 0.1, 0.2, ..., 0.9.

    The log-odds of the labels are those of the confidences, divided by a temperature and shifted.
    """
    g = torch.Generator().manual_seed(seed)
    if tenths:
        preds = torch.randint(1, 10, (n,), generator=g) / torch.tensor(10, dtype=torch.float64)
        log_odds = preds.logit()
    else:
        log_odds = 1 + 2 * normal(n, g=g)
        preds = log_odds.sigmoid()
    return preds, (random(n, g=g) < (log_odds / temperature + shift).sigmoid()).long()


def mismatched(system: str, n: int, seed: int) -> Data:
    """Draw two classes of [EPSR] app. C. Return P(second class) and labels."""
    systems = simulate.mismatched_systems(2, n + 1, seed=seed)  # class counts are truncated
    order = torch.randperm(len(systems.target), generator=torch.Generator().manual_seed(seed))[:n]
    return getattr(systems, system)[order, 1].exp(), systems.target[order]


def discriminant(train_share: float, test_share: float, n: int, seed: int) -> Data:
    """Draw predictions and labels of [TCE] sec. 4.1."""
    sample = simulate.gaussian_discriminant(train_share, test_share, n_test=n, seed=seed)
    return sample.preds, sample.target


MODELS: dict[str, Callable[..., Data]] = {
    "calibrated: log-odds N(1, 2^2)": partial(moved, 1.0, 0.0),
    "temperature 1.2 (over-confident)": partial(moved, 1.2, 0.0),
    "temperature 1.5 (over-confident)": partial(moved, 1.5, 0.0),
    "temperature 0.7 (under-confident)": partial(moved, 0.7, 0.0),
    "shift of the log-odds by 0.3": partial(moved, 1.0, 0.3),
    "calibrated: ECD paper, sigma 0": partial(simulate.noisy_evidence, 0.0),
    "ECD paper, sigma 0.5": partial(simulate.noisy_evidence, 0.5),
    "ECD paper, sigma 2": partial(simulate.noisy_evidence, 2.0),
    "calibrated: EPSR paper, cal": partial(mismatched, "cal"),
    "EPSR paper, mcp (wrong priors)": partial(mismatched, "mcp"),
    "EPSR paper, mcs (scaled by 5)": partial(mismatched, "mcs"),
    "TCE paper, 50 % trained, 50 % tested": partial(discriminant, 0.5, 0.5),
    "TCE paper, 50 % trained, 40 % tested": partial(discriminant, 0.5, 0.4),
    "TCE paper, 1 % trained, 2 % tested": partial(discriminant, 0.01, 0.02),
}
SMALL_MODELS: dict[str, Callable[..., Data]] = {
    "calibrated: log-odds N(1, 2^2)": partial(moved, 1.0, 0.0),
    "log-odds N(1, 2^2), temperature 3": partial(moved, 3.0, 0.0),
    "calibrated: tenths": partial(moved, 1.0, 0.0, tenths=True),
    "tenths, temperature 3": partial(moved, 3.0, 0.0, tenths=True),
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
    found = updated(error, preds, target).test(n_replicates=N_REPLICATES)
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


def power_of_few(model: str, n: int, n_sets: int) -> dict[str, float]:
    """Return the fractions rejected by the valid and the randomised p-value of every error."""
    preds, target = (part.reshape(n_sets, n) for part in SMALL_MODELS[model](n=n_sets * n, seed=n))
    power = {}
    for name, (error, function) in SMALL_ERRORS.items():
        power[f"{name}, valid"] = share_rejected(error, preds, target)
        power[f"{name}, randomised"] = share_rejected_at_random(function, preds, target)
    return power


def power_over_classes(model: str, num_classes: int, n_sets: int, n: int = 700) -> dict[str, float]:
    """Return the fractions rejected by the joint and the combined p-value of the class-wise ECE."""
    rejected = {"joint": 0, "combined": 0}
    for seed in range(n_sets):
        generator = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(n, num_classes, generator=generator)
        target = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)
        metric = tc.ECE(task="multiclass", num_classes=num_classes, mode="classwise", from_logits=True)
        preds = SLOPES[model] * logits
        joint = calibration_test(metric, preds, target, n_replicates=199)
        metric.update(preds, target)
        for name, found in (("joint", joint), ("combined", metric.test(n_replicates=199))):
            rejected[name] += bool(found.p_value <= LEVEL_OF_CLASSES + 1e-9)
    return {name: count / n_sets for name, count in rejected.items()}


def power_of(model: str, n: int, n_sets: int) -> dict[str, float]:
    """Return the fraction rejected by the p-value of every error."""
    sets = [MODELS[model](n=n, seed=seed) for seed in range(n_sets)]
    size = min(len(p) for p, _ in sets)
    preds, target = (torch.stack([part[:size] for part in column]) for column in zip(*sets, strict=True))
    power = {}
    for name, error in ERRORS.items():
        if n <= LARGEST.get(name, n):
            few = max(1, n_sets // SLOW.get(name, 1))
            power[name] = share_rejected(error, preds[:few], target[:few])
    return power


def study_of(
    page: str,
    sets: int,
    models: Sequence[str],
    sizes: Sequence[int],
    power: Callable[..., dict[str, float]],
    errors: Sequence[str],
    digits: int = 1,
) -> Study:
    """Return the study of a table with a row for each model and size, and a column for each error."""

    def table(found: dict[Cell, Found]) -> Iterator[list[Row]]:
        shown = ({error: percent(x, digits) for error, x in each.values.items()} for each in found.values())
        yield [(*cell, *map(of_cell.get, errors)) for cell, of_cell in zip(found, shown, strict=True)]

    return Study(page, sets, [Part(list(product(models, sizes)), power, table)])


POWER = study_of("power", 200, list(MODELS), SIZES, power_of, list(ERRORS), digits=0)
TWO_P_VALUES = [f"{error}, {kind}" for error in SMALL_ERRORS for kind in ("valid", "randomised")]
FEW = study_of("power_few", 1_000, list(SMALL_MODELS), FEW_SAMPLES, power_of_few, TWO_P_VALUES)
CLASSES = study_of("power_classes", 1_000, list(SLOPES), CLASS_COUNTS, power_over_classes, ("joint", "combined"))

if __name__ == "__main__":
    main(POWER, few=FEW, classes=CLASSES)
