"""False alarms of repeated looks at p-values: `python -m benchmarks.looks` writes results/looks.md.

A calibrated model is tested 40 times, either with all rows so far, or with the rows of each look alone. A false alarm
is a p-value below the level at one of the looks so far.
"""

import math
from pathlib import Path

import torch

from torchcalib import ECE

RESULT = Path(__file__).resolve().parent / "results" / "looks.md"
N_RUNS, N_LOOKS, ROWS, N_REPLICATES = 1000, 40, 250, 199
LEVELS = 0.05, 0.01
SHOWN = 1, 2, 5, 10, 20, 40  # numbers of looks in the table


def p_values(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the p-values of ECE at each look in each run `(looks, runs)`, by the rows of a look."""
    g = torch.Generator().manual_seed(seed)
    growing, single = (ECE(task="binary", batch_shape=(N_RUNS,)) for _ in range(2))
    found: dict[str, list[torch.Tensor]] = {"all rows so far": [], "new rows only": []}
    for look in range(N_LOOKS):
        p = (1.5 * torch.randn(N_RUNS, ROWS, generator=g, dtype=torch.float64)).sigmoid()
        target = torch.bernoulli(p, generator=g).long()
        single.reset()
        for columns, metric in zip(found.values(), (growing, single), strict=True):
            metric.update(p, target)
            columns.append(metric.test(n_replicates=N_REPLICATES, seed=seed + look).p_value)
    return {name: torch.stack(columns) for name, columns in found.items()}


def table(found: dict[str, torch.Tensor]) -> str:
    """Return the shares of runs with a false alarm in Markdown."""
    error = 100 * math.sqrt(0.25 / N_RUNS)
    lines = [
        "# False alarms of repeated looks",
        "",
        "Share of runs in percent with a p-value of ECE below the level at one or more looks so far, for a calibrated "
        f"binary model. {N_RUNS:,} runs, {ROWS} new rows for each look, {N_REPLICATES} replicates. "
        f"Standard error at most {error:.1f}. "
        "Computed by `python -m benchmarks.looks`.",
        "",
        f"| rows of a look | level | {' | '.join(f'after {n}' for n in SHOWN)} |",
        f"|---|---:|{'---:|' * len(SHOWN)}",
    ]
    for name, p in found.items():
        for level in LEVELS:
            ever = (p < level).double().cummax(0).values.mean(1)
            shares = " | ".join(f"{100 * float(ever[n - 1]):.1f}" for n in SHOWN)
            lines.append(f"| {name} | {level:.0%} | {shares} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Simulate the runs, and write the table."""
    torch.set_num_threads(1)
    RESULT.write_text(table(p_values()))
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
