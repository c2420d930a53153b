"""One system of a comparison: its sums and samples by group of rows, and their replicates."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedReduction, reductions_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.reporting.comparison.groups import Draws, GroupedSample, GroupedSums
from torchcalib.reporting.intervals import Estimator, bin_estimators, score_estimators
from torchcalib.reporting.lines import SCORES, Statistics, has_table, order_values

MOST_KEPT = 2**20
"""Samples that are kept for rank-based values, every label of a sample being one."""

MOST_IN_ORDER, REPLICATES_IN_ORDER = 2**14, 199
"""Samples up to which rank-based values have intervals, and the largest number of their replicates."""

_FEW = 1000  # groups, whose intervals are uncertain by 2 % and more


class System:
    """Sums and samples of one system, by group.

    Args:
        like: some of its predictions.
        n_bins: of equal width.
        right: see `torchcalib.report`.
    """

    def __init__(self, like: Predictions, n_bins: int, right: bool) -> None:
        self._task, self._n_bins = like.task, n_bins
        self._reductions = reductions_of(like.task)
        found = [*score_estimators(like), *bin_estimators(EqualWidthBins(r, n_bins, right) for r in self._reductions)]
        self._sums: list[tuple[Estimator, GroupedSums[Any]]] = [
            (each, GroupedSums(each.recipe, like)) for each in found if not isinstance(each.recipe, ExactSample)
        ]
        self.samples: dict[NamedReduction, GroupedSample] = {
            r: GroupedSample(ExactSample(r), MOST_KEPT) for r in self._reductions if has_table(like.task, r)
        }

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add rows, given the random numbers that determine their groups."""
        for _, sums in self._sums:
            sums.add(p, words)
        for sample in self.samples.values():
            sample.add(p, words)

    @property
    def few_groups(self) -> dict[int, str]:
        """Names of the lines whose sums have few groups, by the number of groups."""
        found: dict[int, list[str]] = defaultdict(list)
        for each, sums in self._sums:
            if sums.n_groups <= _FEW:
                found[sums.n_groups].append(each.name)
        return {n: ", ".join(names) for n, names in found.items()}

    def statistics(self, ordered: bool, has_labels: bool) -> Statistics:
        """Return the sums and samples of all rows, the samples only if they are `ordered`."""
        statistics = [sums.statistic() for _, sums in self._sums]
        return Statistics(
            task=self._task,
            n_bins=self._n_bins,
            scores=dict(zip(SCORES, statistics, strict=False)),
            bins=dict(zip(self._reductions, statistics[len(SCORES) :], strict=True)),
            samples={r: kept.sample() for r, kept in self.samples.items()} if ordered else {},
            has_labels=has_labels,
        )

    @torch.no_grad()
    def replicates(self, draws: Draws, ordered: bool, has_labels: bool) -> dict[str, Tensor]:
        """Return the values of replicates `(R,)`, by the keys of lines; fewer for rank-based values."""
        found: dict[str, list[Tensor]] = defaultdict(list)
        for values in self._values(draws, ordered, has_labels):
            for key, value in values.items():
                found[key].append(value.cpu())
        return {key: torch.cat(values) for key, values in found.items()}

    def _values(self, draws: Draws, ordered: bool, has_labels: bool) -> Iterator[Mapping[str, Tensor]]:
        for each, sums in self._sums:
            for statistic in sums.replicates(draws) if sums.n_groups > 1 else ():
                yield each.values(statistic)
        for reduction, kept in self.samples.items() if ordered else ():
            for sample in kept.replicates(draws, REPLICATES_IN_ORDER) if kept.size <= MOST_IN_ORDER else ():
                yield order_values(sample, has_labels, reduction, self._n_bins)


def expected_ece(s: Statistics) -> dict[str, float]:
    """Return the expected ECE of a calibrated system with these confidences, by the keys of lines.

    The gap of a bin is approximately normal with variance c (1 - c) / n, where weights are counts, so that its absolute
    value has the mean sqrt(2 c (1 - c) / (pi n)).
    """
    found = {}
    for reduction, b in s.bins.items():
        deviation = (b.share * (b.confidence * (1 - b.confidence) / b.n).sqrt()).nan_to_num()
        found[f"ece/{reduction}"] = math.sqrt(2 / math.pi) * float(deviation.sum(-1).mean())
    return found
