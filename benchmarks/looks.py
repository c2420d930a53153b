"""False alarms of repeated looks at p-values: `python -m benchmarks.looks`.

A calibrated model is tested 40 times, either with all rows so far, or with the rows of each look alone. A false alarm
is a p-value below the level at one of the looks so far.
"""

from collections.abc import Iterator

import torch

from benchmarks.study import Cell, Found, Part, Row, Study, main, percent
from torchcalib import ECE

N_LOOKS, ROWS, N_REPLICATES = 40, 250, 199
LEVELS = 0.05, 0.01
NEW_ROWS = "new rows only"
SHOWN = 1, 2, 5, 10, 20, 40  # numbers of looks in the table


def shares(rows: str, n_sets: int) -> list[list[str]]:
    """Return the share of runs with a false alarm after each number of looks, for each level."""
    g = torch.Generator().manual_seed(0)
    metric, found = ECE(task="binary", batch_shape=(n_sets,)), []
    for look in range(N_LOOKS):
        p = (1.5 * torch.randn(n_sets, ROWS, generator=g, dtype=torch.float64)).sigmoid()
        target = torch.bernoulli(p, generator=g).long()
        if rows == NEW_ROWS:
            metric.reset()
        metric.update(p, target)
        found.append(metric.test(n_replicates=N_REPLICATES, seed=look).p_value)
    ever = [(torch.stack(found) < level).double().cummax(0).values for level in LEVELS]
    return [[percent(of_level[n - 1]) for n in SHOWN] for of_level in ever]


def table(found: dict[Cell, Found]) -> Iterator[list[Row]]:
    yield [
        (*cell, f"{level:.0%}", *x) for cell, of in found.items() for level, x in zip(LEVELS, of.values, strict=True)
    ]


STUDY = Study("looks", 1_000, [Part([("all rows so far",), (NEW_ROWS,)], shares, table)])

if __name__ == "__main__":
    main(STUDY)
