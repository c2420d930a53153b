"""`System`: accumulated statistics of one system of a comparison, and their bootstrap replicates."""

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
    selective_values,
)
from torchcalib.reporting.sample_or_sketch import are_labels

MAX_KEPT = 2**20
"""Maximum number of stored samples for rank-based errors (multi-label: samples times labels)."""

MAX_RANKED, RANKED_REPLICATES = 2**14, 199
"""Maximum number of samples for intervals of rank-based errors, and maximum number of their replicates."""

_FEW_GROUPS = 1000  # up to this number of groups, the standard error of an interval width exceeds 2%


class System:
    """Accumulated sums and ranked samples of one system, for each random group of rows.

    Args:
        like: first batch of predictions, which defines the task, the number of classes and the device.
        n_bins: number of equal-width bins.
        right: use bins `(a, b]` instead of `[a, b)`.
        are_confidences: see `Statistics`.

    Attributes:
        samples: ranked samples with their groups, for each mode with rank-based errors. Empty if there are too many
            samples, or if any weight is fractional.
    """

    def __init__(self, like: Predictions, n_bins: int, right: bool, are_confidences: bool) -> None:
        task, num_classes = like.task, like.samples[0] if like.task == "multilabel" else like.num_classes
        self._task, self._n_bins, self._are_confidences = task, n_bins, are_confidences
        self._sums = [
            (each, GroupedSums(each.accumulator, each.accumulator.shape(task, num_classes), like.given.device))
            for each in (*score_estimators(task), *bin_estimators(task, n_bins, right))
        ]
        self.samples: dict[NamedMode, Accumulated[GroupedSample]] = {
            mode: grouped_sample(mode, like, num_classes) for mode in modes_of(task) if has_table(task, mode)
        }

    def add(self, p: Predictions, words: Tensor, are_counts: bool) -> None:
        """Add a batch. `words` is the result of `words_of`; `are_counts` is True if all weights are whole numbers."""
        for _, sums in self._sums:
            sums.add(p, words)
        if are_counts and self.samples:
            grouped = in_random_groups(p, words)
            self.samples = {mode: each + each.of(grouped) for mode, each in self.samples.items()}
        if not are_counts or self.size > MAX_KEPT:
            self.samples = {}

    @property
    def sizes(self) -> list[Tensor]:
        """Total weight of each random group of rows, `(G, ...)` for each of the sums."""
        return [grouped.clusters.sizes for _, grouped in self._sums if len(grouped.sums) > 1]

    @property
    def size(self) -> int:
        """Number of stored samples (multi-label: samples times labels), the maximum over modes."""
        return max((sum(x.numel() for x in each.content.scores) for each in self.samples.values()), default=0)

    @property
    def has_labels(self) -> bool:
        """True if all outcomes in the ranked samples are 0 or 1."""
        return all(are_labels(each.statistic.whole) for each in self.samples.values())

    @property
    def few_groups(self) -> dict[int, str]:
        """Comma-separated names of the scores and errors with at most 1,000 groups of rows, by number of groups."""
        names_by_size: dict[int, list[str]] = defaultdict(list)
        for estimator, grouped in self._sums:
            if len(grouped.sums) <= _FEW_GROUPS:
                names_by_size[len(grouped.sums)].append(estimator.name)
        return {n: ", ".join(names) for n, names in names_by_size.items()}

    def statistics(self, has_labels: bool) -> Statistics:
        """Return the sums and ranked samples of all rows. `has_labels`: all outcomes of all systems are 0 or 1."""
        return Statistics(
            task=self._task,
            n_bins=self._n_bins,
            sums={each.key: grouped.clusters.whole for each, grouped in self._sums},
            samples={mode: each.statistic.whole for mode, each in self.samples.items()},
            has_labels=has_labels,
            are_confidences=self._are_confidences,
        )

    @torch.no_grad()
    def replicates(self, draws: Draws, s: Statistics) -> dict[str, Tensor]:
        """Return each line in R bootstrap replicates `(R,)`, by `Line.key`; `s` is the result of `statistics`.

        R is at most `RANKED_REPLICATES` for rank-based errors and metrics of selective prediction.
        """
        found: dict[str, list[Tensor]] = defaultdict(list)
        for values in self._values(draws, s):
            for key, value in values.items():
                found[key].append(value.cpu())
        return {key: torch.cat(values) for key, values in found.items()}

    def _values(self, draws: Draws, s: Statistics) -> Iterator[Mapping[str, Tensor]]:
        for each, sums in self._sums:
            for statistic in sums.replicates(draws) if len(sums.sums) > 1 else ():
                yield each.values(statistic)
        for mode, grouped in self.samples.items() if self.size <= MAX_RANKED else ():
            for sample in replicates_of_sample(grouped.statistic, draws, RANKED_REPLICATES):
                yield order_values(sample, s.has_labels, mode, self._n_bins)
                if mode == s.selective_mode:
                    yield selective_values(sample, mode)


def expected_ece(s: Statistics) -> dict[str, float]:
    """Return the mean expected calibration error (ECE) of a calibrated system with these confidences, by `Line.key`.

    A bin with n samples has a mean confidence c and a gap, frequency minus c. If weights are counts, the gap is
    approximately normal with variance c (1 - c) / n. Its mean absolute value is sqrt(2 c (1 - c) / (pi n)).
    """
    found = {}
    for mode, b in s.bins.items():
        deviation = (b.share * (b.confidence * (1 - b.confidence) / b.n).sqrt()).nan_to_num()
        found[f"ece/{mode}"] = math.sqrt(2 / math.pi) * float(deviation.sum(-1).mean())
    return found
