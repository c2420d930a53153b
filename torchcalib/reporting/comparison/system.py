"""`System`: accumulated statistics of one system of a comparison, and their bootstrap replicates."""

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode, modes_of
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats
from torchcalib.inference.simulation import BinCells
from torchcalib.metrics.groups.samples import GroupedSample
from torchcalib.reporting.accumulators import Accumulated
from torchcalib.reporting.comparison.groups import (
    Draws,
    GroupedSums,
    grouped_sample,
    in_random_groups,
    null_samples,
    replicates_of_sample,
)
from torchcalib.reporting.comparison.null import bins_of_calibrated
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

MAX_NULL_SUMS = 2**22
"""Intended maximum number of simulated sums over bins, in all null replicates of one system."""

_ERRORS_BY_RANK = ("ace", "tce", "ks", "atb", "mcb")
"""Rank-based calibration errors, by the key without the mode. Discrimination and uncertainty are no errors."""

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
        self._with_noise = {mode: EqualWidthBins(mode, n_bins, right, with_noise=True) for mode in modes_of(task)}
        self._bins: dict[NamedMode, BinStats] = {}
        self.samples: dict[NamedMode, Accumulated[GroupedSample]] = {
            mode: grouped_sample(mode, like, num_classes) for mode in modes_of(task) if has_table(task, mode)
        }

    def add(self, p: Predictions, words: Tensor, are_counts: bool) -> None:
        """Add a batch. `words` is the result of `words_of`; `are_counts` is True if all weights are whole numbers."""
        for _, sums in self._sums:
            sums.add(p, words)
        for mode, accumulator in self._with_noise.items():
            bins = accumulator.from_predictions(p)
            self._bins[mode] = self._bins[mode] + bins if mode in self._bins else bins
        if are_counts and self.samples:
            grouped = in_random_groups(p, words)
            self.samples = {mode: each + each.from_predictions(grouped) for mode, each in self.samples.items()}
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

    @torch.no_grad()
    def null_replicates(self, draws: Draws, s: Statistics, has_clusters: bool) -> list[dict[str, Tensor]]:
        """Return each calibration error in the null replicates `(R,)`, by `Line.key`; see `comparison.null`.

        The list contains the replicates for independent rows. With clusters, it also contains those of random signs.
        """
        by_source = [self._null_values(draws, s, flips) for flips in (False, True)[: 1 + has_clusters]]
        found = []
        for source in by_source:
            columns: dict[str, list[Tensor]] = defaultdict(list)
            for values in source:
                for key, value in values.items():
                    columns[key].append(value.cpu())
            found.append({key: torch.cat(values) for key, values in columns.items()})
        return found

    def _null_values(self, draws: Draws, s: Statistics, flips: bool) -> Iterator[Mapping[str, Tensor]]:
        """Yield the errors in chunks of null replicates, with random signs of clusters if `flips`."""
        estimators = {each.key: (each, sums) for each, sums in self._sums}
        for mode, b in self._bins.items():
            each, sums = estimators[mode]
            if len(sums.sums) == 1:
                continue
            n_replicates = min(len(draws), max(RANKED_REPLICATES, MAX_NULL_SUMS // b.n.numel()))
            factors = (draws.signs if flips else draws.of)(sums.occupied)
            residuals = sums.residuals(factors[:n_replicates])
            if flips:
                bins = BinCells.from_bins(b).with_gaps(residuals / b.n.masked_fill(b.n == 0, 1))
            else:
                bins = bins_of_calibrated(b, residuals, draws.seed)
            values = dict(each.values(bins))
            del values[f"rmsce_debiased/{mode}"]
            if mode == "classwise" and self._task == "multiclass":
                del values[f"esce/{mode}"]  # always 0, because the classes are exclusive
            yield values
        for mode, grouped in self.samples.items() if self.size <= MAX_RANKED else ():
            for sample in null_samples(grouped.statistic, draws, RANKED_REPLICATES, flips):
                values = order_values(sample, s.has_labels, mode, self._n_bins)
                yield {key: value for key, value in values.items() if key.partition("/")[0] in _ERRORS_BY_RANK}
