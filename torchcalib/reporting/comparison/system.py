"""`System`: accumulated statistics of one system of a comparison, and their bootstrap replicates."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.reporting.comparison.groups import Draws, GroupedBins, GroupedRanks, GroupedSums, in_random_groups
from torchcalib.reporting.lines import (
    LineEstimator,
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

MAX_RANKED = 2**14
"""Maximum number of samples for intervals of rank-based errors."""

_TESTED = ("ece", "esce", "mce", "rmsce", "ece_debiased", "ace", "tce", "ks", "atb", "mcb")
"""Calibration errors with a null distribution, by the key without the mode."""

_FEW_GROUPS = 1000  # up to this number of groups, the standard error of an interval width exceeds 2%


Values = Callable[[Any], Mapping[str, Tensor]]
"""Function from sums or a ranked sample to the values of lines `(...)`, by `Line.key`."""


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
        self.device = like.given.device
        self._task, self._n_bins, self._are_confidences = task, n_bins, are_confidences

        self._sums: list[tuple[LineEstimator, GroupedSums]] = []
        for each in (*score_estimators(task), *bin_estimators(task, n_bins, right)):
            kind = GroupedBins if isinstance(each.accumulator, EqualWidthBins) else GroupedSums
            shape = each.accumulator.shape(task, num_classes)
            self._sums.append((each, kind(each.accumulator, shape, self.device)))
        self.samples = {mode: GroupedRanks(mode, like, num_classes) for mode in modes_of(task) if has_table(task, mode)}

    def add(self, p: Predictions, words: Tensor, are_counts: bool) -> None:
        """Add a batch. `words` is the result of `words_of`; `are_counts` is True if all weights are whole numbers."""
        for _, sums in self._sums:
            sums.add(p, words)
        if not are_counts:
            self.samples = {}
        grouped = in_random_groups(p, words) if self.samples else p
        for ranks in self.samples.values():
            ranks.add(grouped)
        if self.size > MAX_KEPT:
            self.samples = {}

    @property
    def sizes(self) -> list[Tensor]:
        """Total weight of each random group of rows, `(G, ...)` for each of the sums."""
        return [sums.clusters.sizes for _, sums in self._sums if sums.has_replicates]

    @property
    def size(self) -> int:
        """Number of stored samples (multi-label: samples times labels), the maximum over modes."""
        return max((ranks.size for ranks in self.samples.values()), default=0)

    @property
    def has_labels(self) -> bool:
        """True if all outcomes in the ranked samples are 0 or 1."""
        return all(are_labels(ranks.sample.whole) for ranks in self.samples.values())

    @property
    def few_groups(self) -> dict[int, str]:
        """Comma-separated names of the scores and errors with at most 1,000 groups of rows, by number of groups."""
        names: dict[int, list[str]] = defaultdict(list)
        for estimator, sums in self._sums:
            if len(sums.sums) <= _FEW_GROUPS:
                names[len(sums.sums)].append(estimator.name)
        return {n: ", ".join(of_size) for n, of_size in names.items()}

    def statistics(self, has_labels: bool) -> Statistics:
        """Return the sums and ranked samples of all rows. `has_labels`: all outcomes of all systems are 0 or 1."""
        return Statistics(
            task=self._task,
            n_bins=self._n_bins,
            sums={each.key: sums.clusters.whole for each, sums in self._sums},
            samples={mode: ranks.sample.whole for mode, ranks in self.samples.items()},
            has_labels=has_labels,
            are_confidences=self._are_confidences,
        )

    @torch.no_grad()
    def replicates(self, draws: Draws, s: Statistics) -> dict[str, Tensor]:
        """Return each line in R bootstrap replicates `(R,)`, by `Line.key`; `s` is the result of `statistics`.

        R is at most 199 for rank-based errors and metrics of selective prediction.
        """
        return _columns(values(statistic) for part, values in self._parts(s) for statistic in part.replicates(draws))

    @torch.no_grad()
    def null_replicates(self, draws: Draws, s: Statistics, has_clusters: bool) -> list[dict[str, Tensor]]:
        """Return each calibration error in the null replicates `(R,)`, by `Line.key`; see `comparison.null`.

        The list contains the replicates for independent rows. With clusters, it also contains those of random signs.
        """
        return [
            _columns(
                {key: value for key, value in values(statistic).items() if self._is_tested(key)}
                for part, values in self._parts(s)
                for statistic in part.null_replicates(draws, flips)
            )
            for flips in (False, True)[: 1 + has_clusters]
        ]

    def _parts(self, s: Statistics) -> Iterator[tuple[GroupedSums | GroupedRanks, Values]]:
        """Yield all sums and samples with replicates, and the function from their statistic to the values of lines."""
        for estimator, sums in self._sums:
            yield sums, estimator.values

        def ranked_values(sample: RankedSample, mode: NamedMode) -> Mapping[str, Tensor]:
            selective = selective_values(sample, mode) if mode == s.selective_mode else {}
            return order_values(sample, s.has_labels, mode, self._n_bins) | selective

        for mode, ranks in self.samples.items() if self.size <= MAX_RANKED else ():
            yield ranks, partial(ranked_values, mode=mode)

    def _is_tested(self, key: str) -> bool:
        """Return whether a line is a calibration error with a null distribution."""
        name, _, mode = key.partition("/")
        if name == "esce" and mode == "classwise" and self._task == "multiclass":
            return False  # always 0, because the classes are exclusive
        return name in _TESTED


def _columns(rows: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate values `(r,)` of chunks of replicates by key."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for values in rows:
        for key, value in values.items():
            found[key].append(value.cpu())
    return {key: torch.cat(values) for key, values in found.items()}
