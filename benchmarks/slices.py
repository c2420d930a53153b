"""Level and power of the search for slices: `python -m benchmarks.slices`, in about 10 minutes.

A data set has 2,000 rows of a law of the confidences, and three columns that are independent of them. For power, the
log-odds of one slice are changed after the labels were drawn.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.groups import inner_beta
from benchmarks.laws import moved, normal_log_odds, random
from benchmarks.study import Part, Study, main, percent

ROWS, N_REPLICATES, LEVEL = 2_000, 199, 0.05
CLUSTER, SHARED = 5, 0.7  # rows of a cluster, and probability that a row has the uniform number of its cluster
LAWS = {
    "uniform": lambda n, g: random(n, g=g),
    "logit SD 2": partial(normal_log_odds, 0, 2),
    "beta(.5, 4)": partial(inner_beta, 0.5, 4),
    "beta(.2, 19.8)": partial(inner_beta, 0.2, 19.8),
}
COLUMNS = {"values 3, 3, 2": (3, 3, 2), "ranges 4, 4, 4": None}
FAULTS = {
    "log-odds plus 0.5": partial(moved, 1, 0.5),
    "log-odds plus 1": partial(moved, 1, 1),
    "log-odds times 2": partial(moved, 2, 0),
    "log-odds times 0.5": partial(moved, 0.5, 0),
}
CHANGED = {"a=0": lambda a, _: a == 0, "a=0, b=0": lambda a, b: (a == 0) & (b == 0)}


def columns_of(sizes: tuple[int, ...] | None, g: torch.Generator) -> dict[str, Tensor]:
    """Return columns with numbers of values, or three columns of numbers that are divided into ranges."""
    if sizes is None:
        return {name: random(ROWS, g=g) for name in "abc"}
    return {name: torch.randint(size, (ROWS,), generator=g) for name, size in zip("abc", sizes, strict=True)}


def p_of_range(x: float) -> float:
    """Return the probability that the range of a Brownian motion on [0, 1] is at least x.

    Reference:
        Feller: The asymptotic distribution of the range of sums of independent random variables (Annals of
        Mathematical Statistics, 1951), eq. 3.6, in the form of Arrieta-Ibarra et al. (JMLR 2022).
    """
    k = np.arange(100) + 0.5
    terms = (8 / x**2 + 2 / (k * math.pi) ** 2) * np.exp(-2 * (k * math.pi / x) ** 2)
    return 1 - float(terms.sum())


def p_values(law: str, columns: str, k: int, fault: str = "", changed: str = "a=0, b=0") -> tuple[float, ...]:
    """Return the p-values of the search, of Bonferroni for both statistics and for one, of MCGrad, and the slices."""
    g = torch.Generator().manual_seed(k)
    p, found = LAWS[law](ROWS, g), columns_of(COLUMNS[columns], g)
    y = torch.bernoulli(p, generator=g)
    if fault:
        p = torch.where(CHANGED[changed](found["a"], found["b"]), FAULTS[fault](p), p)
    how = {"task": "binary", "min_size": 10, "n_replicates": N_REPLICATES, "seed": k}
    table = tc.slices(p, y, found, cumulative=True, **how)
    z = max(abs(gap) / spread for gap, spread in zip(table.gap, table.spread, strict=True))
    both = 2 * table.n_slices * math.erfc(max(table.statistic) / math.sqrt(2))
    signed = table.n_slices * math.erfc(z / math.sqrt(2))
    spread_of_all = float((p * (1 - p)).sum().sqrt()) / ROWS
    mcgrad = p_of_range(table.multicalibration_error / spread_of_all)
    return table.smallest_p_value, both, signed, mcgrad, table.n_slices


def level(law: str, columns: str, n_sets: int) -> list[str]:
    found = torch.tensor([p_values(law, columns, k) for k in range(n_sets)], dtype=torch.float64)
    return [f"{found[:, 4].mean():.0f}", *(percent(found[:, k] <= LEVEL + 1e-9) for k in range(4))]


def power(law: str, changed: str, fault: str, n_sets: int) -> list[str]:
    found = torch.tensor([p_values(law, "values 3, 3, 2", k, fault, changed) for k in range(n_sets)])
    return [percent(found[:, k] <= LEVEL + 1e-9) for k in range(3)]


def of_clusters(law: str, columns: str, n_sets: int) -> list[str]:
    """Return the level for clusters of rows, with and without `clusters`.

    Outcomes are independent of the forecasts of other rows, but 70% of a cluster have a common uniform number.
    """
    found = []
    for k in range(n_sets):
        g = torch.Generator().manual_seed(k)
        cluster = torch.arange(ROWS) // CLUSTER
        p = LAWS[law](ROWS // CLUSTER, g)[cluster]
        u = torch.where(random(ROWS, g=g) < SHARED, random(ROWS // CLUSTER, g=g)[cluster], random(ROWS, g=g))
        values = columns_of(COLUMNS["values 3, 3, 2"], g)
        if columns == "of clusters":
            values = {name: column[cluster] for name, column in values.items()}
        how = {"task": "binary", "min_size": 10, "n_replicates": N_REPLICATES, "seed": k}
        tables = [tc.slices(p, (u < p).double(), values, clusters=by, **how) for by in (cluster, None)]
        found.append([table.smallest_p_value for table in tables])
    p_values = torch.tensor(found, dtype=torch.float64)
    return [percent(p_values[:, k] <= LEVEL + 1e-9) for k in range(2)]


STUDY = Study(
    "slices",
    2_000,
    [
        Part([(law, columns) for law in LAWS for columns in COLUMNS], level),
        Part(
            [(law, changed, fault) for law in ("uniform", "logit SD 2") for changed in CHANGED for fault in FAULTS],
            power,
            share=lambda _: 0.2,
        ),
        Part(
            [(law, columns) for law in ("uniform", "beta(.5, 4)") for columns in ("of clusters", "of rows")],
            of_clusters,
            share=lambda _: 0.1,
            name="clusters",
        ),
    ],
)

if __name__ == "__main__":
    main(STUDY)
