"""Level and power of the tests of groups and labels in a report: `python -m benchmarks.groups`, in about 2 minutes.

A data set has N rows of a law of the confidences, each in one of G groups by chance. For power, the log-odds of one
group are changed after the labels were drawn. Labels have the test of groups with N rows each.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.laws import beta, moved, normal_log_odds
from benchmarks.study import Part, Study, batches, joined, main, percent
from torchcalib.core.sums import BinStats
from torchcalib.inference.intervals import ErrorIntervals
from torchcalib.inference.roots import large_groups, roots_of_differences, roots_of_gaps
from torchcalib.inference.simulation import BinCells

N_BINS, AT_ONCE = 15, 2**19  # rows in memory
LEVEL, SHARED = 0.025, 0.00625  # level of all causes together, and of one of four causes
SIZES, N_GROUPS = (2_000, 8_000), (5, 10, 40)


def inner_beta(a: float, b: float, n: int, g: torch.Generator) -> Tensor:
    """Draw from beta(a, b), without 0 and 1, whose log-odds are infinite."""
    return beta(a, b, n, g).nan_to_num(0.5).clamp(1e-12, 1 - 1e-12)


LAWS = {
    "logit SD 2": partial(normal_log_odds, 0, 2),
    "logit SD 4": partial(normal_log_odds, 0, 4),
    "beta(.2, .2)": partial(inner_beta, 0.2, 0.2),
    "beta(.5, 4)": partial(inner_beta, 0.5, 4),
}
RARE = {  # median or mean of 1%
    "logit -4.6, SD 1": partial(normal_log_odds, -4.6, 1),
    "logit -4.6, SD 2": partial(normal_log_odds, -4.6, 2),
    "beta(.2, 19.8)": partial(inner_beta, 0.2, 19.8),
}
FAULTS = {
    "log-odds plus 1": partial(moved, 1, 1),
    "log-odds times 2": partial(moved, 2, 0),
    "log-odds times 0.5": partial(moved, 0.5, 0),
}


def data_sets(
    law: str, n: int, n_groups: int, sets: int, change: Callable[[Tensor], Tensor] | None = None
) -> Iterator[BinCells]:
    """Yield the bins of all groups `(D, G, B)` of data sets, in batches; group 0 is changed."""
    generator = torch.Generator().manual_seed(1)
    for d in batches(sets, AT_ONCE // n):
        p = (LAWS | RARE)[law](d * n, generator)
        y = torch.bernoulli(p, generator=generator)
        group = torch.randint(n_groups, (d * n,), generator=generator)
        p = p if change is None else torch.where(group == 0, change(p), p)
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
    """Return the p-values of each test `(sets,)`; for a fault also whether the interval of the named group covers.

    "covered" has an entry for each data set in which a test names a group.
    """
    change, gap = FAULTS.get(fault), 0.0
    if change is not None:
        big = LAWS[law](2**20, torch.Generator().manual_seed(2))
        gap = float((big - change(big)).mean())

    def tested(cells: BinCells) -> dict[str, Tensor]:
        large, roots = large_groups(cells), roots_of_gaps(cells)
        of_tests = {"normal": normal_scores(cells), "gaps": roots, "differences": roots_of_differences(cells)}
        found = {name: p_values(statistics, large) for name, statistics in of_tests.items()}
        covered = {} if change is None else {"covered": is_covered(cells, large, roots, found["gaps"] < SHARED, gap)}
        return found | covered

    return joined(map(tested, data_sets(law, n, n_groups, sets, change)))


def is_covered(cells: BinCells, large: Tensor, roots: Tensor, named: Tensor, gap: float) -> Tensor:
    """Return whether the interval of the named group, as `GroupGaps.gap_of`, contains its true gap, for `named` sets.

    The true gap is `gap` in group 0, and 0 in the others.
    """
    row = named.nonzero().squeeze(-1)
    group = roots.abs().amax(-1).masked_fill(~large, -1).argmax(-1)[row]
    # The level is 1 - 0.05 / G for G large groups.
    z = torch.special.ndtri(1 - 0.025 / large[row].sum(-1).double())
    low, high = ErrorIntervals(cells.map(lambda x: x[row, group]), z).mean_gap
    truth = torch.where(group == 0, gap, 0.0)
    return (low <= truth) & (truth <= high)


def rates(p: dict[str, Tensor], *columns: tuple[str, float]) -> list[str]:
    """Return the shares of p-values of tests below a level, in percent."""
    return [percent(p[name] < level) for name, level in columns]


OF_TESTS = [(name, level) for name in ("gaps", "normal") for level in (LEVEL, SHARED)]


def level(law: str, n: int, n_groups: int, n_sets: int) -> list[str]:
    return rates(cell(law, n, n_groups, n_sets), *OF_TESTS, ("differences", 0.05))


def level_of_labels(law: str, n: int, n_labels: int, n_sets: int) -> list[str]:
    return rates(cell(law, n * n_labels, n_labels, n_sets), *OF_TESTS)


def power(law: str, n: int, n_groups: int, fault: str, n_sets: int) -> list[str]:
    found = cell(law, n, n_groups, n_sets, fault)
    covered = found["covered"]
    shares = rates(found, ("gaps", LEVEL), ("normal", LEVEL), ("differences", 0.05))
    return [*shares, f"{percent(covered)} ({len(covered):,})" if len(covered) else "–"]


STUDY = Study(
    "groups",
    1_000,
    [
        Part(list(product(LAWS, SIZES, N_GROUPS)), level),
        Part(list(product(LAWS, SIZES, (10,), FAULTS)), power),
        Part(list(product(RARE, (500, 2_000), (40,))), level_of_labels),
    ],
)

if __name__ == "__main__":
    main(STUDY)
