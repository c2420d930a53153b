"""How often errors tell a miscalibrated model from a calibrated one: the power of their p-values.

    python -m benchmarks.power              writes benchmarks/results/power.json and power.md
    python -m benchmarks.power --sets 50    fewer data sets in each cell; writes nothing
    python -m benchmarks.power --few        writes power_few.json and power_few.md, in about two minutes

Every cell draws data sets of N samples from a generator of a source paper, or from confidences whose true frequencies
are moved by a temperature or a shift of the log-odds, and counts p-values of at most 5 %. Rows named "calibrated" say
how often a calibrated model is rejected, which should be at most 5 % of the time.

A second table shows the power that is lost to ties at few samples. A valid p-value counts all replicates that equal the
data. A randomised p-value counts a random part of them, and rejects a calibrated model in 5 % of data sets at any
number of samples. But it differs from run to run.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
from benchmarks import simulate
from torchcalib.metrics.tested import TestedMetric

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (200, 1_000, 5_000)
LEVEL = 0.05
N_REPLICATES = 99
FEW_SAMPLES = (5, 10, 20, 50, 100, 200)
SETS_OF_FEW = 1_000

Data = tuple[Tensor, Tensor]
"""P(y=1) and labels of one data set, `(N,)`."""


def moved_log_odds(temperature: float, shift: float, n: int, seed: int) -> Data:
    """Confidences of a skewed model, of which the true log-odds are these divided by a temperature, and shifted."""
    generator = torch.Generator().manual_seed(seed)
    log_odds = 1 + 2 * torch.randn(n, generator=generator, dtype=torch.float64)
    true = (log_odds / temperature + shift).sigmoid()
    return log_odds.sigmoid(), (torch.rand(n, generator=generator, dtype=torch.float64) < true).long()


def mismatched(system: str, n: int, seed: int) -> Data:
    """Two classes of [EPSR] app. C: P(second class)."""
    systems = simulate.mismatched_systems(2, n + 1, seed=seed)  # counts are truncated
    order = torch.randperm(len(systems.target), generator=torch.Generator().manual_seed(seed))[:n]
    return getattr(systems, system)[order, 1].exp(), systems.target[order]


def discriminant(train_share: float, test_share: float, n: int, seed: int) -> Data:
    """[TCE] sec. 4.1."""
    sample = simulate.gaussian_discriminant(train_share, test_share, n_test=n, seed=seed)
    return sample.preds, sample.target


def noisy(sigma: float, n: int, seed: int) -> Data:
    """[ECD] sec. V-A."""
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

ERRORS: dict[str, Callable[..., TestedMetric]] = {
    "ECE": tc.ECE,
    "ESCE": tc.ESCE,
    "MCE": tc.MCE,
    "RMSCE": tc.RMSCE,
    "ACE": tc.ACE,
    "KS": tc.KS,
    "CORP MCB": tc.CORP,
    "TCE": tc.TCE,
}
SLOW = {"KS": 4, "CORP MCB": 5, "TCE": 10}
"""Of these there are that many times fewer data sets."""
LARGEST = {"TCE": 200}
"""Up to this size, for minutes rather than hours: each of its replicates takes thousands of exact tests."""


def share_rejected(error: Callable[..., TestedMetric], preds: Tensor, target: Tensor) -> float:
    """Return the share of data sets `(D, N)` with a p-value of at most 5 %."""
    metric = error(task="binary", batch_shape=(len(preds),))
    metric.update(preds, target)
    found = metric.evidence(n_replicates=N_REPLICATES, with_interval=False)
    return float((found.p_value <= LEVEL + 1e-9).double().mean())


def tenths(temperature: float, shift: float, n: int, seed: int) -> Data:
    """Draw confidences of 0.1, 0.2, ..., 0.9, which give many ties, with true frequencies as in `moved_log_odds`."""
    generator = torch.Generator().manual_seed(seed)
    preds = torch.randint(1, 10, (n,), generator=generator) / torch.tensor(10, dtype=torch.float64)
    true = (preds.logit() / temperature + shift).sigmoid()
    return preds, (torch.rand(n, generator=generator, dtype=torch.float64) < true).long()


SMALL_MODELS: dict[str, Callable[[int, int], Data]] = {
    "calibrated: log-odds N(1, 2^2)": partial(moved_log_odds, 1.0, 0.0),
    "log-odds N(1, 2^2), temperature 3": partial(moved_log_odds, 3.0, 0.0),
    "calibrated: tenths": partial(tenths, 1.0, 0.0),
    "tenths, temperature 3": partial(tenths, 3.0, 0.0),
}
SMALL_ERRORS: dict[str, tuple[Callable[..., TestedMetric], Callable[..., Tensor]]] = {
    "ECE": (tc.ECE, tc.ece),
    "ESCE": (tc.ESCE, tc.esce),
}


def share_rejected_at_random(function: Callable[..., Tensor], preds: Tensor, target: Tensor) -> float:
    """Return the share of rejected data sets if ties are broken at random. Labels are simulated for every row."""
    generator = torch.Generator().manual_seed(0)
    observed = function(preds, target, task="binary").abs()
    larger, ties = torch.zeros_like(observed), torch.zeros_like(observed)
    for _ in range(N_REPLICATES):
        labels = (torch.rand(preds.shape, generator=generator, dtype=torch.float64) < preds).long()
        replicate = function(preds, labels, task="binary").abs()
        larger += replicate > observed + 1e-9
        ties += (replicate - observed).abs() <= 1e-9
    part = (torch.rand(observed.shape, generator=generator, dtype=torch.float64) * (ties + 1)).floor()
    p_value = (1 + larger + part) / (N_REPLICATES + 1)
    return float((p_value <= LEVEL + 1e-9).double().mean())


def table_of_few() -> list[dict[str, object]]:
    """Return a row for every model and small size: the shares rejected by the valid and the randomised p-value."""
    rows: list[dict[str, object]] = []
    for name, draw in SMALL_MODELS.items():
        for n in FEW_SAMPLES:
            preds, target = (part.reshape(SETS_OF_FEW, n) for part in draw(SETS_OF_FEW * n, n))
            power = {
                error: [share_rejected(make, preds, target), share_rejected_at_random(function, preds, target)]
                for error, (make, function) in SMALL_ERRORS.items()
            }
            rows.append({"model": name, "n": n, "power": power})
            print(f"{name:40} {n:6,}  {power}", flush=True)
    return rows


def table(n_sets: int) -> list[dict[str, object]]:
    """Return a row for every model and size."""
    rows: list[dict[str, object]] = []
    for name, draw in MODELS.items():
        for n in SIZES:
            sets = [draw(n, seed) for seed in range(n_sets)]
            size = min(len(p) for p, _ in sets)
            preds, target = (torch.stack([part[:size] for part in column]) for column in zip(*sets, strict=True))
            power = {}
            for error, make in ERRORS.items():
                if n > LARGEST.get(error, n):
                    continue
                few = max(1, n_sets // SLOW.get(error, 1))
                power[error] = share_rejected(make, preds[:few], target[:few])
            rows.append({"model": name, "n": n, "power": power})
            print(
                f"{name:40} {n:6,}  " + "  ".join(f"{error} {share:.2f}" for error, share in power.items()), flush=True
            )
    return rows


def as_markdown(rows: list[dict[str, object]], n_sets: int) -> str:
    """Return the table for readers."""
    fewer = ", ".join(f"{name} {n_sets // by}" for name, by in SLOW.items())
    lines = [
        "# Power of the p-values",
        "",
        f"Share of {n_sets} data sets ({fewer}) in which `evidence()` gives a p-value of at most 5 %, in percent. "
        "`python -m benchmarks.power` made it.",
        "",
        "| model | N | " + " | ".join(ERRORS) + " |",
        "|---" * (2 + len(ERRORS)) + "|",
    ]
    for row in rows:
        power = row["power"]
        assert isinstance(power, dict)
        cells = " | ".join(f"{100 * power[error]:.0f}" if error in power else "–" for error in ERRORS)
        lines.append(f"| {row['model']} | {row['n']:,} | {cells} |")
    return "\n".join(lines) + "\n"


def few_as_markdown(rows: list[dict[str, object]]) -> str:
    """Return the table of few samples as Markdown."""
    lines = [
        "# Power lost to ties at few samples",
        "",
        f"Share of {SETS_OF_FEW:,} data sets with a p-value of at most 5 %, in percent. The valid p-value is that of "
        "`evidence()`, which counts replicates equal to the data. The randomised one counts a random part of them. "
        "Made by `python -m benchmarks.power --few`.",
        "",
        "| model | N | " + " | ".join(f"{error}, valid | {error}, randomised" for error in SMALL_ERRORS) + " |",
        "|---" * (2 + 2 * len(SMALL_ERRORS)) + "|",
    ]
    for row in rows:
        power = row["power"]
        assert isinstance(power, dict)
        cells = " | ".join(f"{100 * share:.1f}" for error in SMALL_ERRORS for share in power[error])
        lines.append(f"| {row['model']} | {row['n']:,} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sets", type=int, default=200, help="data sets in each cell (default 200)")
    parser.add_argument("--few", action="store_true", help="make the table of few samples (about two minutes)")
    given = parser.parse_args()
    start = time.perf_counter()
    settings: dict[str, object] = {"level": LEVEL, "replicates": N_REPLICATES}
    if given.few:
        rows = table_of_few()
        write("power_few", few_as_markdown(rows), {**settings, "data_sets": SETS_OF_FEW}, rows)
    else:
        rows = table(given.sets)
        if given.sets == parser.get_default("sets"):
            settings |= {"data_sets": given.sets, "fewer": SLOW}
            write("power", as_markdown(rows, given.sets), settings, rows)
    print(f"{time.perf_counter() - start:.0f} s")


def write(name: str, page: str, settings: dict[str, object], rows: list[dict[str, object]]) -> None:
    """Write a table as JSON and as Markdown."""
    versions = {"torch": torch.__version__, "numpy": np.__version__}
    found = json.dumps({**settings, "versions": versions, "rows": rows}, indent=1)
    (RESULTS / f"{name}.json").write_text(found + "\n")
    (RESULTS / f"{name}.md").write_text(page)


if __name__ == "__main__":
    main()
