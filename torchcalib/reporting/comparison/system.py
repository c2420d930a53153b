"""`System`: accumulated statistics of one system of a comparison, and their bootstrap replicates."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sample_or_sketch import are_labels
from torchcalib.reporting.catalogue import Member, catalogue_of, names_of, values
from torchcalib.reporting.comparison.differences import SystemReplicates
from torchcalib.reporting.comparison.groups import Draws, GroupedBins, GroupedRanks, GroupedSums, in_random_groups
from torchcalib.reporting.lines import Data

MAX_KEPT = 2**20
"""Maximum number of stored samples for rank-based errors (multi-label: samples times labels)."""

MAX_RANKED = 2**14
"""Maximum number of samples for intervals of rank-based errors."""

OMITTED_LINES = ("UNC",)
"""Names of report lines to omit. Uncertainty (UNC) depends only on the outcomes."""

_FEW_GROUPS = 1000  # up to this number of groups, the standard error of an interval width exceeds 2%


class System:
    """Accumulated sums and ranked samples of one system, for each random group of rows.

    `like` is a batch that defines the task, the number of classes and the device. `ranks` contains ranked samples by
    name of the statistic; it is empty for too many samples and for fractional weights.
    """

    def __init__(self, like: Predictions, n_bins: int, right: bool, are_confidences: bool) -> None:
        num_classes = like.samples[0] if like.task == "multilabel" else like.num_classes
        self.device = like.input_preds.device
        self._catalogue = catalogue_of(like.task, n_bins, right, are_confidences=are_confidences, with_noise=False)
        self._sums: dict[str, GroupedSums] = {}
        self.ranks: dict[str, GroupedRanks] = {}
        for name, accumulator in self._catalogue.accumulators.items():
            if isinstance(accumulator, ExactSample):
                self.ranks[name] = GroupedRanks(accumulator, like, num_classes)
            else:
                kind = GroupedBins if isinstance(accumulator, EqualWidthBins) else GroupedSums
                self._sums[name] = kind(accumulator, accumulator.shape(like.task, num_classes), self.device)

    def add(self, p: Predictions, words: Tensor, are_counts: bool) -> None:
        """Add a batch. `words` is the result of `words_of`; `are_counts` is True if all weights are whole numbers."""
        for sums in self._sums.values():
            sums.add(p, words)
        if not are_counts:
            self.ranks = {}
        grouped = in_random_groups(p, words) if self.ranks else p
        for ranks in self.ranks.values():
            ranks.add(grouped)
        if self.size > MAX_KEPT:
            self.ranks = {}

    @property
    def sizes(self) -> list[Tensor]:
        """Total weight of each random group of rows, `(G, ...)` for each of the sums."""
        return [sums.clusters.sizes for sums in self._sums.values() if sums.has_replicates]

    @property
    def size(self) -> int:
        """Number of stored samples (multi-label: samples times labels), the maximum over modes."""
        return max((ranks.size for ranks in self.ranks.values()), default=0)

    @property
    def has_labels(self) -> bool:
        """True if all outcomes in the ranked samples are 0 or 1."""
        return all(are_labels(ranks.sample.whole) for ranks in self.ranks.values())

    @property
    def few_groups(self) -> dict[int, str]:
        """Comma-separated names of the scores and errors with at most 1,000 groups of rows, by number of groups."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, sums in self._sums.items():
            if len(sums.sums) <= _FEW_GROUPS:
                names[len(sums.sums)].append(self._catalogue.in_words(name))
        return {n: ", ".join(of_size) for n, of_size in names.items()}

    def ranked_in_words(self, *, only_labelled: bool) -> str:
        """Return the names of all metrics of ranked samples, or of those that need labels."""
        members = [each for each in self._catalogue.ranked if each.metric.needs_labels or not only_labelled]
        return names_of([each for each in members if each.described["name"] not in OMITTED_LINES])

    def data(self, has_labels: bool) -> Data:
        """Return the sums and ranked samples of all rows. `has_labels`: all outcomes of all systems are 0 or 1."""
        statistics: dict[str, Any] = {name: sums.clusters.whole for name, sums in self._sums.items()}
        statistics |= {name: ranks.sample.whole for name, ranks in self.ranks.items()}
        return Data(self._catalogue, statistics, has_labels)

    @torch.no_grad()
    def replicates(self, draws: Draws, data: Data, has_clusters: bool) -> SystemReplicates:
        """Return each line of `data` in R bootstrap replicates, and each calibration error in the null replicates.

        R is at most 199 for metrics of ranked samples. With clusters, there is a second set of null replicates.
        """
        # The bootstrap is invalid for debiased errors: debiasing does not subtract the noise of repeated samples.
        members = [each for each in data.members if not each.metric.settings.get("debiased")]
        errors = [each for each in members if each.is_error and not each.cancels]
        bootstrap = self._values(members, lambda part: part.replicates(draws))
        null = [self._values(errors, lambda part: part.null_replicates(draws, flips=False))]
        if has_clusters:
            null.append(self._values(errors, lambda part: part.null_replicates(draws, flips=True)))
        return SystemReplicates(bootstrap, null)

    def _values(
        self, members: list[Member], replicates: Callable[[GroupedSums | GroupedRanks], Iterator[Any]]
    ) -> dict[str, Tensor]:
        """Return each metric in the replicates of its statistic `(R,)`, by `Line.key`."""
        parts: dict[str, GroupedSums | GroupedRanks] = {**self._sums, **(self.ranks if self.size <= MAX_RANKED else {})}
        found: dict[str, list[Tensor]] = defaultdict(list)
        for name, part in parts.items():
            sharing = [each for each in members if each.statistic == name]
            for statistic in replicates(part) if sharing else ():
                for key, column in values(sharing, {name: statistic}).items():
                    found[key].append(column.cpu())
        return {key: torch.cat(columns) for key, columns in found.items()}
