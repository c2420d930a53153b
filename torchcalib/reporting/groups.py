"""Groups of rows, and labels of a multi-label task, as candidates for causes of miscalibration."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchcalib.core.sums import BinStats
from torchcalib.functional.binned import rmsce_from_bins
from torchcalib.inference.intervals import ErrorIntervals, normal_quantile
from torchcalib.inference.roots import (
    cells_of,
    large_groups,
    p_values_of_roots,
    roots_of_differences,
    roots_of_gaps,
    scores_of_gaps,
)
from torchcalib.inference.simulation import BinCells
from torchcalib.reporting.decision import LEVEL, CandidateCause
from torchcalib.results.decision import Kind


class GroupGaps(NamedTuple):
    """Gaps of the large groups or labels, for which the number of outcomes has a variance of at least 3."""

    names: tuple[Any, ...]  # of the groups, or indices of the labels
    bins: BinStats  # bins of each group, with all labels in one axis, `(G, K)`
    cells: BinCells  # the same bins, with the noise of clusters
    roots: Tensor  # signed roots of mean gap and slope `(G, 2)`, standard normal under calibration

    @classmethod
    def from_bins(cls, names: Sequence[Any], bins: BinStats, effect: float = 1.0) -> Self:
        """Return the gaps of groups from their bins `(G, B)` or `(G, L, B)`; `effect` is the design effect."""
        sums = bins.sums
        bins = replace(bins, sums=sums if sums.dim() == 3 else sums.movedim(1, -2).flatten(-2), noise_flag=None)
        cells = cells_of(bins, effect)
        index = large_groups(cells).nonzero().squeeze(-1)
        cells = cells.map(lambda x: x[index])
        roots = roots_of_gaps(cells)
        return cls(tuple(names[k] for k in index.tolist()), replace(bins, sums=bins.sums[index]), cells, roots)

    @property
    def worst_group(self) -> CandidateCause:
        """Largest evidence for a fault of one group, and the group with the largest root. There must be a group."""
        index = int(self.roots.abs().argmax()) // 2
        gap, slope = self.roots[index].tolist()
        return self._cause("bad group", index)._replace(value=slope, gap=gap)

    @property
    def worst_label(self) -> CandidateCause:
        """Largest evidence for a fault of one label, and the significant label with the largest ECE."""
        if not self.names:
            return CandidateCause("bad label", 0.0, 2, which=0, tail=1.0)
        p = p_values_of_roots(self.roots)
        found = (p < LEVEL).nonzero().squeeze(-1).tolist()
        sizes = (self.cells.share * self.cells.gap.abs()).sum(-1).tolist()
        which = max(found, key=sizes.__getitem__) if found else int(p.argmin())
        return self._cause("bad label", self.names[which])._replace(gap=float(self.roots[which, 0]))

    def _cause(self, kind: Kind, which: int) -> CandidateCause:
        statistic, p = float(scores_of_gaps(self.cells).max()), p_values_of_roots(self.roots)
        return CandidateCause(kind, statistic, 2, len(self.names), which, tail=float(p.min()))

    def p_value_of_differences(self) -> float:
        """Return the p-value of the hypothesis that all groups have the same frequency at the same confidence.

        Each group is compared with all rows of a bin. Its gap then has the variance of a stratified contingency table.
        The smallest p-value is multiplied by the number of statistics (Bonferroni). NaN for less than two groups.

        Reference:
            Mantel, Haenszel: Statistical aspects of the analysis of data from retrospective studies of disease (Journal
            of the National Cancer Institute, 1959), for the variance. Barocas, Hardt, Narayanan: Fairness and machine
            learning (2023), ch. 3, for the hypothesis (sufficiency).
        """
        n_groups = len(self.names)
        if n_groups < 2:
            return math.nan
        n_tests = 2 * (n_groups if n_groups > 2 else 1)  # the gaps of two groups are equal, with opposite signs
        return min(1.0, n_tests * math.erfc(float(roots_of_differences(self.cells).abs().max()) / math.sqrt(2)))

    def gap_of(self, group: int, confident: bool = False) -> tuple[float, float, tuple[float, float]]:
        """Return mean confidence and frequency of a group, and the interval of their difference.

        With `confident`, the event of a bin is its more probable outcome. For a group that was selected among G, the
        level is 1 - 0.05 / G, so that 95% of the intervals of selected groups cover on average.

        Reference:
            Benjamini, Yekutieli: False discovery rate-adjusted multiple confidence intervals (Journal of the American
            Statistical Association, 2005), for one selected parameter.
        """
        cells = self.cells.map(lambda x: x[group : group + 1])
        if confident:
            swap = cells.confidence < 0.5
            cells = replace(
                cells,
                expected=torch.where(swap, cells.n - cells.expected, cells.expected),
                outcomes=torch.where(swap, cells.n - cells.outcomes, cells.outcomes),
            )
        low, high = self._intervals(cells).mean_gap
        mean, frequency = (float(x.sum() / cells.n.sum()) for x in (cells.expected, cells.outcomes))
        return mean, frequency, (float(low), float(high))

    def rmsce_of(self, group: int) -> tuple[float, tuple[float, float]]:
        """Return the debiased root mean squared calibration error of a group, and its interval; see `gap_of`."""
        cells = self.cells.map(lambda x: x[group : group + 1])
        value = float(rmsce_from_bins(replace(self.bins, sums=self.bins.sums[group]), debiased=True))
        nothing = torch.full_like(cells.n.sum(-1), torch.nan)
        low, high = (float(x) for x in self._intervals(cells).ends("debiased", nothing, nothing))
        return value, (min(low, value), max(high, value))

    def _intervals(self, cells: BinCells) -> ErrorIntervals:
        return ErrorIntervals(cells, normal_quantile(1 - 0.05 / len(self.names), cells.n))
