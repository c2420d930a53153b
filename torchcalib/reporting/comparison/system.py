"""One system of a comparison: its sums and samples by group of rows, and their replicates."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.predictions import Predictions
from torchcalib.metrics.groups.samples import GroupedSample
from torchcalib.reporting.accumulators import Accumulated
from torchcalib.reporting.comparison.groups import (
    Draws,
    GroupedSums,
    grouped_sample,
    in_random_groups,
    replicates_of_sample,
)
from torchcalib.reporting.lines import (
    Statistics,
    bin_estimators,
    has_table,
    order_values,
    score_estimators,
)
from torchcalib.reporting.sample_or_sketch import are_labels

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

    Attributes:
        samples: with their groups, for each mode with rank-based lines; none if there are too many, or if weights
            are no counts.
    """

    def __init__(self, like: Predictions, n_bins: int, right: bool) -> None:
        task, num_classes = like.task, like.samples[0] if like.task == "multilabel" else like.num_classes
        self._task, self._n_bins = task, n_bins
        self._sums = [
            (each, GroupedSums(each.accumulator, each.accumulator.shape(task, num_classes), like.given.device))
            for each in (*score_estimators(task), *bin_estimators(task, n_bins, right))
        ]
        self.samples: dict[NamedMode, Accumulated[GroupedSample]] = {
            r: grouped_sample(r, like, num_classes) for r in modes_of(task) if has_table(task, r)
        }

    def add(self, p: Predictions, words: Tensor, are_counts: bool) -> None:
        """Add rows, given the random numbers that determine their groups."""
        for _, sums in self._sums:
            sums.add(p, words)
        if are_counts and self.samples:
            grouped = in_random_groups(p, words)
            self.samples = {r: each + each.of(grouped) for r, each in self.samples.items()}
        if not are_counts or self.size > MOST_KEPT:
            self.samples = {}

    @property
    def size(self) -> int:
        """Largest number of samples of a mode, every label of a sample being one."""
        return max((sum(x.numel() for x in each.content.scores) for each in self.samples.values()), default=0)

    @property
    def has_labels(self) -> bool:
        """Whether all outcomes of ranked samples are labels."""
        return all(are_labels(each.statistic.whole) for each in self.samples.values())

    @property
    def few_groups(self) -> dict[int, str]:
        """Names of the lines whose sums have few groups, by the number of groups."""
        found: dict[int, list[str]] = defaultdict(list)
        for each, grouped in self._sums:
            if len(grouped.sums) <= _FEW:
                found[len(grouped.sums)].append(each.name)
        return {n: ", ".join(names) for n, names in found.items()}

    def statistics(self, has_labels: bool) -> Statistics:
        """Return the sums and samples of all rows."""
        return Statistics(
            task=self._task,
            n_bins=self._n_bins,
            sums={each.key: grouped.statistic() for each, grouped in self._sums},
            samples={mode: each.statistic.whole for mode, each in self.samples.items()},
            has_labels=has_labels,
        )

    @torch.no_grad()
    def replicates(self, draws: Draws, has_labels: bool) -> dict[str, Tensor]:
        """Return the values of replicates `(R,)`, by the keys of lines; fewer for rank-based values."""
        found: dict[str, list[Tensor]] = defaultdict(list)
        for values in self._values(draws, has_labels):
            for key, value in values.items():
                found[key].append(value.cpu())
        return {key: torch.cat(values) for key, values in found.items()}

    def _values(self, draws: Draws, has_labels: bool) -> Iterator[Mapping[str, Tensor]]:
        for each, sums in self._sums:
            for statistic in sums.replicates(draws) if len(sums.sums) > 1 else ():
                yield each.values(statistic)
        for mode, grouped in self.samples.items() if self.size <= MOST_IN_ORDER else ():
            for sample in replicates_of_sample(grouped.statistic, draws, REPLICATES_IN_ORDER):
                yield order_values(sample, has_labels, mode, self._n_bins)


def expected_ece(s: Statistics) -> dict[str, float]:
    """Return the expected ECE of a calibrated system with these confidences, by the keys of lines.

    The gap of a bin is approximately normal with variance c (1 - c) / n, where weights are counts, so that its absolute
    value has the mean sqrt(2 c (1 - c) / (pi n)).
    """
    found = {}
    for mode, b in s.bins.items():
        deviation = (b.share * (b.confidence * (1 - b.confidence) / b.n).sqrt()).nan_to_num()
        found[f"ece/{mode}"] = math.sqrt(2 / math.pi) * float(deviation.sum(-1).mean())
    return found
