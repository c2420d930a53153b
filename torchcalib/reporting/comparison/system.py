"""`System`: accumulated statistics of one system of a comparison, and their bootstrap replicates."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sample_or_sketch import are_labels
from torchcalib.reporting.catalogue import Catalogue, values
from torchcalib.reporting.comparison.groups import Draws, GroupedBins, GroupedRanks, GroupedSums, in_random_groups
from torchcalib.reporting.lines import Data

MAX_KEPT = 2**20
"""Maximum number of stored samples for rank-based errors (multi-label: samples times labels)."""

MAX_RANKED = 2**14
"""Maximum number of samples for intervals of rank-based errors."""

_FEW_GROUPS = 1000  # up to this number of groups, the standard error of an interval width exceeds 2%


class System:
    """Accumulated sums and ranked samples of one system, for each random group of rows.

    Args:
        like: first batch of predictions, which defines the number of classes and the device.
        catalogue: the metrics, and the sums and samples that they need.

    Attributes:
        samples: ranked samples with their groups, by name. Empty if there are too many samples, or if any weight is
            fractional.
    """

    def __init__(self, like: Predictions, catalogue: Catalogue) -> None:
        task, num_classes = like.task, like.samples[0] if like.task == "multilabel" else like.num_classes
        self.device = like.given.device
        self._catalogue = catalogue
        self._sums: dict[str, GroupedSums] = {}
        self.samples: dict[str, GroupedRanks] = {}
        for name, accumulator in catalogue.accumulators.items():
            if isinstance(accumulator, ExactSample):
                self.samples[name] = GroupedRanks(accumulator, like, num_classes)
            else:
                kind = GroupedBins if isinstance(accumulator, EqualWidthBins) else GroupedSums
                self._sums[name] = kind(accumulator, accumulator.shape(task, num_classes), self.device)

    def add(self, p: Predictions, words: Tensor, are_counts: bool) -> None:
        """Add a batch. `words` is the result of `words_of`; `are_counts` is True if all weights are whole numbers."""
        for sums in self._sums.values():
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
        return [sums.clusters.sizes for sums in self._sums.values() if sums.has_replicates]

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
        for name, sums in self._sums.items():
            if len(sums.sums) <= _FEW_GROUPS:
                names[len(sums.sums)].append(self._catalogue.in_words(name))
        return {n: ", ".join(of_size) for n, of_size in names.items()}

    def data(self, has_labels: bool) -> Data:
        """Return the sums and ranked samples of all rows. `has_labels`: all outcomes of all systems are 0 or 1."""
        sums = {name: sums.clusters.whole for name, sums in self._sums.items()}
        samples = {name: ranks.sample.whole for name, ranks in self.samples.items()}
        return Data(self._catalogue, sums | samples, has_labels)

    @torch.no_grad()
    def replicates(self, draws: Draws, data: Data) -> dict[str, Tensor]:
        """Return each line in R bootstrap replicates `(R,)`, by `Line.key`; `data` is the result of `data`.

        R is at most 199 for rank-based errors and metrics of selective prediction.
        """
        return _columns(
            values(data.of(name), {name: statistic})
            for name, part in self._parts()
            for statistic in part.replicates(draws)
        )

    @torch.no_grad()
    def null_replicates(self, draws: Draws, data: Data, has_clusters: bool) -> list[dict[str, Tensor]]:
        """Return each calibration error in the null replicates `(R,)`, by `Line.key`; see `comparison.null`.

        The list contains the replicates for independent rows. With clusters, it also contains those of random signs.
        """
        return [
            _columns(
                values([each for each in data.of(name) if each.has_null_distribution], {name: statistic})
                for name, part in self._parts()
                for statistic in part.null_replicates(draws, flips)
            )
            for flips in (False, True)[: 1 + has_clusters]
        ]

    def _parts(self) -> Iterator[tuple[str, GroupedSums | GroupedRanks]]:
        """Yield all sums and samples with replicates, with their names."""
        yield from self._sums.items()
        yield from self.samples.items() if self.size <= MAX_RANKED else ()


def _columns(rows: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate values `(r,)` of chunks of replicates by key."""
    found: dict[str, list[Tensor]] = defaultdict(list)
    for row in rows:
        for key, value in row.items():
            found[key].append(value.cpu())
    return {key: torch.cat(columns) for key, columns in found.items()}
