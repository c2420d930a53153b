"""Level and power of the tests of groups in a report: `python -m benchmarks.groups`, in about 5 minutes.

A data set has N rows of a law of the confidences, each in one of G groups by chance. For power, the log-odds of one
group are changed after the labels were drawn.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks.laws import beta
from benchmarks.study import Part, Study, batches, main, percent, row_of_each
from torchcalib.core.sums import BinStats
from torchcalib.inference.simulation import BinCells
from torchcalib.reporting.groups import GroupGaps, large_groups, roots_of_differences, roots_of_gaps

N_BINS, AT_ONCE = 15, 2**19  # rows in memory
LEVEL, SHARED = 0.025, 0.00625  # level of all causes together, and of one of four causes
SIZES, N_GROUPS = (2_000, 8_000), (5, 10, 40)


def _normal(deviation: float) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, g: (deviation * torch.randn(n, generator=g, dtype=torch.float64)).sigmoid()


def _beta(a: float, b: float) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, g: beta(a, b, n, g).nan_to_num(0.5).clamp(1e-12, 1 - 1e-12)


LAWS = {
    "logit SD 2": _normal(2),
    "logit SD 4": _normal(4),
    "beta(.2, .2)": _beta(0.2, 0.2),
    "beta(.5, 4)": _beta(0.5, 4),
}
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "log-odds plus 1": lambda z: z + 1,
    "log-odds times 2": lambda z: 2 * z,
    "log-odds times 0.5": lambda z: z / 2,
}


def data_sets(
    law: str, n: int, n_groups: int, sets: int, change: Callable[[Tensor], Tensor] | None = None
) -> Iterator[BinCells]:
    """Yield the bins of all groups `(D, G, B)` of data sets, in batches; group 0 is changed."""
    generator = torch.Generator().manual_seed(1)
    for d in batches(sets, AT_ONCE // n):
        p = LAWS[law](d * n, generator)
        y = torch.bernoulli(p, generator=generator)
        group = torch.randint(n_groups, (d * n,), generator=generator)
        p = p if change is None else torch.where(group == 0, change(p.logit()).sigmoid(), p)
        cell = torch.arange(d).repeat_interleave(n) * n_groups + group
        cell = cell * N_BINS + (p * N_BINS).long().clamp(max=N_BINS - 1)
        columns = (torch.ones_like(p), p, y, p * (1 - p), p * (1 - p))
        sums = [torch.bincount(cell, x, minlength=d * n_groups * N_BINS).reshape(d, n_groups, N_BINS) for x in columns]
        yield BinCells.from_bins(BinStats(torch.stack(sums, -2), has_noise=True))


def p_values(roots: Tensor, large: Tensor) -> Tensor:
    """Return the smallest p-values `(D,)` of statistics `(D, G, 2)`, times the number of statistics of large groups."""
    p = torch.special.erfc(roots.abs() / 2**0.5).masked_fill(~large.unsqueeze(-1), 1)
    n_groups = large.sum(-1)
    return torch.where(n_groups > 1, p.amin((-1, -2)) * 2 * n_groups, 1)


def normal_scores(cells: BinCells) -> Tensor:
    """Return mean gap and slope in standard errors, `(D, G, 2)`: the statistics without the correction of the tails."""
    log_odds = cells.confidence.clamp(1e-4, 1 - 1e-4).logit()
    weight = torch.stack((torch.ones_like(log_odds), log_odds), -2)
    gap, noise = ((cells.outcomes - cells.expected).unsqueeze(-2), cells.noise.unsqueeze(-2))
    return (weight * gap).sum(-1) / (weight.square() * noise).sum(-1).sqrt()


def cell(law: str, n: int, n_groups: int, sets: int, fault: str = "") -> dict[str, Tensor]:
    """Return the p-values of each test `(sets,)`; for a fault also whether the interval of group 0 covers its gap."""
    found: dict[str, list[Tensor]] = {"normal": [], "gaps": [], "differences": []}
    for cells in data_sets(law, n, n_groups, sets, FAULTS.get(fault)):
        large = large_groups(cells)
        found["normal"].append(p_values(normal_scores(cells), large))
        found["gaps"].append(p_values(roots_of_gaps(cells), large))
        found["differences"].append(p_values(roots_of_differences(cells), large))
    return {name: torch.cat(parts) for name, parts in found.items()}


def rates(p: dict[str, Tensor], *columns: tuple[str, float]) -> list[str]:
    """Return the shares of p-values of tests below a level, in percent."""
    return [percent(p[name] < level) for name, level in columns]


def level(law: str, n: int, n_groups: int, n_sets: int) -> list[str]:
    of_tests = [(name, level) for name in ("gaps", "normal") for level in (LEVEL, SHARED)]
    return rates(cell(law, n, n_groups, n_sets), *of_tests, ("differences", 0.05))


def power(law: str, n: int, n_groups: int, fault: str, n_sets: int) -> list[str]:
    found = cell(law, n, n_groups, n_sets, fault)
    shares = rates(found, ("gaps", LEVEL), ("normal", LEVEL), ("differences", 0.05))
    return [*shares, covered(law, n, n_groups, max(1, n_sets // 5), fault)]


def covered(law: str, n: int, n_groups: int, sets: int, fault: str) -> str:
    """Return how many intervals of the groups that a test names cover their true gap, in percent, and their number."""
    change, big = FAULTS[fault], LAWS[law](2**20, torch.Generator().manual_seed(2))
    gap = float((big - change(big.logit()).sigmoid()).mean())
    n_named = n_covered = 0
    for batch in data_sets(law, n, n_groups, sets, change):
        large, roots = large_groups(batch), roots_of_gaps(batch)
        for k in (p_values(roots, large) < SHARED).nonzero().flatten().tolist():
            cells = batch.map(lambda x, rows=large[k], k=k: x[k][rows])
            names = [str(g) for g in range(n_groups) if large[k, g]]
            sums = torch.stack((cells.n, cells.expected, cells.outcomes, cells.spread, cells.noise), -2)
            group = GroupGaps(tuple(names), BinStats(sums, has_noise=True), cells, roots[k][large[k]])
            which = int(group.roots.abs().argmax()) // 2
            _, _, (low, high) = group.gap_of(which)
            n_named += 1
            n_covered += low <= (gap if names[which] == "0" else 0.0) <= high
    return f"{100 * n_covered / n_named:.1f} ({n_named:,})" if n_named else "–"


row = row_of_each(lambda cell, found: (*cell, *found))
STUDY = Study(
    "groups",
    1_000,
    [
        Part(list(product(LAWS, SIZES, N_GROUPS)), level, row),
        Part(list(product(LAWS, SIZES, (10,), FAULTS)), power, row),
    ],
)

if __name__ == "__main__":
    main(STUDY)
