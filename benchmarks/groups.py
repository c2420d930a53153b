"""Level and power of the tests of groups in a report, in simulations: writes benchmarks/results/groups.md.

    python -m benchmarks.groups               all cells, in about 5 minutes
    python -m benchmarks.groups --sets 100    fewer data sets for each cell; writes nothing

A data set has N rows of a law of the confidences, each in one of G groups by chance. For power, the log-odds of one
group are changed after the labels were drawn.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.coverage import publish
from torchcalib.core.sums import BinStats
from torchcalib.inference.simulation import BinCells
from torchcalib.reporting.groups import GroupGaps, large_groups, roots_of_differences, roots_of_gaps

PAGE = Path(__file__).resolve().parent / "results" / "groups.md"
N_BINS, AT_ONCE = 15, 2**19  # rows in memory
LEVEL, SHARED = 0.025, 0.00625  # level of all causes together, and of one of four causes
SIZES, N_GROUPS = (2_000, 8_000), (5, 10, 40)


def _normal(deviation: float) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, g: (deviation * torch.randn(n, generator=g, dtype=torch.float64)).sigmoid()


def _beta(a: float, b: float) -> Callable[[int, torch.Generator], Tensor]:
    def draw(n: int, g: torch.Generator) -> Tensor:
        x, y = (torch._standard_gamma(torch.full((n,), k, dtype=torch.float64), generator=g) for k in (a, b))
        return (x / (x + y)).nan_to_num(0.5).clamp(1e-12, 1 - 1e-12)

    return draw


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
    done = 0
    while done < sets:
        d = min(sets - done, max(1, AT_ONCE // n))
        p = LAWS[law](d * n, generator)
        y = torch.bernoulli(p, generator=generator)
        group = torch.randint(n_groups, (d * n,), generator=generator)
        p = p if change is None else torch.where(group == 0, change(p.logit()).sigmoid(), p)
        cell = torch.arange(d).repeat_interleave(n) * n_groups + group
        cell = cell * N_BINS + (p * N_BINS).long().clamp(max=N_BINS - 1)
        columns = (torch.ones_like(p), p, y, p * (1 - p), p * (1 - p))
        sums = [torch.bincount(cell, x, minlength=d * n_groups * N_BINS).reshape(d, n_groups, N_BINS) for x in columns]
        yield BinCells.from_bins(BinStats(torch.stack(sums, -2), has_noise=True))
        done += d


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


def rate(p: Tensor, level: float) -> str:
    """Return the share of p-values below a level, in percent."""
    return f"{100 * float((p < level).double().mean()):.1f}"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", type=int, default=1000, help="data sets for each cell (default 1000)")
    sets = parser.parse_args().sets
    torch.set_num_threads(1)
    start = time.perf_counter()
    level = ["| confidences | rows | groups | gap or slope | at 0.625% | normal | at 0.625% | differences, at 5% |"]
    level.append("|---|---:|---:|---:|---:|---:|---:|---:|")
    power = ["| confidences | rows | groups | fault of one group | gap or slope | normal | differences, at 5% |"]
    power[0] += " coverage (intervals) |"
    power.append("|---|---:|---:|---|---:|---:|---:|---:|")
    for law in LAWS:
        for n in SIZES:
            for n_groups in N_GROUPS:
                found = cell(law, n, n_groups, sets)
                rates = [rate(found[name], x) for name in ("gaps", "normal") for x in (LEVEL, SHARED)]
                rates.append(rate(found["differences"], 0.05))
                level.append(f"| {law} | {n:,} | {n_groups} | {' | '.join(rates)} |")
                print(level[-1], flush=True)
            for fault in FAULTS:
                found = cell(law, n, 10, sets, fault)
                rates = [
                    rate(found[name], x) for name, x in (("gaps", LEVEL), ("normal", LEVEL), ("differences", 0.05))
                ]
                rates.append(covered(law, n, 10, max(1, sets // 5), fault))
                power.append(f"| {law} | {n:,} | 10 | {fault} | {' | '.join(rates)} |")
                print(power[-1], flush=True)
    error = 100 * (LEVEL * (1 - LEVEL) / sets) ** 0.5
    page = [
        "# Tests of groups",
        "",
        f"Computed by `python -m benchmarks.groups` with {sets:,} data sets for each cell and 15 bins. Rows are "
        "assigned to groups by chance. A report tests the mean gap and the slope of each group by the signed root of "
        "its deviance, and multiplies the smallest p-value by the number of statistics (Bonferroni). The columns "
        '"normal" use both statistics in standard errors instead.',
        "",
        "## Calibrated models",
        "",
        "Percentage of data sets with an alarm at a level of 2.5%, the level of all causes together, and at "
        "0.625%, that of one of four causes. The last column contains the test of differences between groups, which "
        "decides whether the first screen names a worst group. Its level is 5%. The standard error at 2.5% is "
        f"{error:.1f}%.",
        "",
        *level,
        "",
        "## One miscalibrated group of 10",
        "",
        "Percentage of data sets with an alarm at a level of 2.5%. The normal statistics also have more false alarms. "
        "Coverage is that of the interval of the mean gap of the group which the verdict names at 0.625%, from "
        f"{max(1, sets // 5):,} data sets, with the number of intervals in parentheses. Intervals are adjusted for the "
        "choice among 10 groups (Benjamini and Yekutieli).",
        "",
        *power,
    ]
    publish(page, PAGE, sets == parser.get_default("sets"), start)


if __name__ == "__main__":
    main()
