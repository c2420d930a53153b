"""Bootstrap of random groups of rows, in bounded memory.

Each row belongs to a random group, and a replicate weights each group by a Poisson variable of mean 1. With far more
groups than rows this is the bootstrap of rows. With more rows than groups it is a bootstrap of random groups, which
estimates the same variance from as many units as there are groups. Replicates are made from the sums of the groups.

Groups and weights depend on seed and row number alone. Systems that predict the same rows therefore have the same
replicates, and errors that they share cancel in their difference. The partition of rows into pieces has no effect.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.events import NamedMode
from torchcalib.core.groups import in_groups
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.metrics.groups.samples import GroupedSample, GroupedSamplesKind
from torchcalib.ops.counter_rng import poisson_counts, random_words
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import weighed_sums
from torchcalib.reporting.accumulators import Accumulated

MOST_GROUPS, FEWEST_GROUPS = 2**13, 2**7
"""The standard error of a standard deviation from G groups is 1 / sqrt(2 G) of it: 1 % and 6 %."""

_MOST_NUMBERS = 2**20  # of all sums together; with more numbers a group there are fewer groups, down to the fewest
_TOO_MANY = 2**23  # numbers of all sums, above which there are no groups: 64 MB

_DEAL = -1  # random stream of the assignment of rows to groups; streams from 0 on are replicates


def words_of(seed: int, first: int, n: int, device: torch.device) -> Tensor:
    """Return random numbers in [0, 2^32) that determine the groups of n rows from row `first` on, `(n,)`."""
    counters = torch.arange(first, first + n, device=device)
    return random_words(seed, torch.full((1,), _DEAL, device=device), counters)[0]


def group_of(words: Tensor, n_groups: int) -> Tensor:
    """Return the group of rows, int64."""
    return (words * n_groups) >> 32


class Draws:
    """Weights of groups in replicates, drawn once for each number of groups.

    Args:
        seed: of the weights.
        n: number of replicates.
        device: of the weights.
    """

    def __init__(self, seed: int, n: int, device: torch.device) -> None:
        self._seed, self._streams = seed, torch.arange(n, device=device)
        self._drawn: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def of(self, n_groups: int) -> Tensor:
        """Return the weights of groups, uint8 `(R, G)`."""
        if n_groups not in self._drawn:
            counters = torch.arange(n_groups, device=self._streams.device)
            self._drawn[n_groups] = poisson_counts(self._seed, self._streams, counters, torch.uint8)
        return self._drawn[n_groups]


class GroupedSums:
    """Sums by group of rows, to which batches add in place: there may be far more groups than rows in a batch.

    Args:
        accumulator: of the sums.
        shape: of the sums of a group.
        device: of the sums.

    Attributes:
        sums: of groups `(G, ..., F, K)`; of one group, without replicates, if there are too many sums.
    """

    def __init__(self, accumulator: Any, shape: tuple[int, ...], device: torch.device) -> None:
        size = math.prod(shape)
        n_groups = max(FEWEST_GROUPS, min(MOST_GROUPS, _MOST_NUMBERS // size))
        n_groups = n_groups if n_groups * size <= _TOO_MANY else 1
        self.accumulator = accumulator
        *lead, n_cells = shape
        self._sums = torch.zeros(*lead, n_groups, n_cells, dtype=wide_dtype(device), device=device)
        self.sums = self._sums.movedim(-2, 0)

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add rows, given the random numbers that determine their groups."""
        cells = self.accumulator.cells(p)
        group = group_of(words, len(self.sums)).repeat_interleave(cells.index.shape[-1] // max(1, len(words)))
        place = (group * cells.n_cells + cells.index).unsqueeze(-2).expand(cells.columns.shape)
        self._sums.flatten(-2).scatter_add_(-1, place, cells.columns)

    def statistic(self) -> Any:
        """Return the statistic of all rows."""
        return self.accumulator.wrap(self.sums.sum(0))

    def replicates(self, draws: Draws) -> Iterator[Any]:
        """Yield the statistic of replicates, some at a time, `(r, ...)`."""
        table = self.sums.flatten(1)
        finite = bool(table.isfinite().all())
        for some in torch.split(draws.of(len(table)), replicates_at_once(max(table.shape))):
            sums = weighed_sums(some.to(table), table, finite)
            yield self.accumulator.wrap(sums.reshape(len(some), *self.sums.shape[1:]))


def grouped_sample(mode: NamedMode, like: Predictions, num_classes: int) -> Accumulated[GroupedSample]:
    """Return an accumulator of ranked samples with their groups."""
    sample = ExactSample(mode)
    lead = sample.lead(like.task, num_classes)
    return Accumulated(GroupedSamplesKind(sample, lead, like.from_logits, (), MOST_GROUPS))


def in_random_groups(p: Predictions, words: Tensor) -> Predictions:
    """Return predictions in random groups, given the random numbers of their rows."""
    groups = group_of(words, MOST_GROUPS).repeat_interleave(p.samples[-1] // max(1, len(words)))
    return in_groups(p, groups, MOST_GROUPS, validate_args=False)


def replicates_of_sample(sample: GroupedSample, draws: Draws, most: int) -> Iterator[RankedSample]:
    """Yield the sample of the first replicates, some at a time, `(r, ..., N)`."""
    whole, groups = sample.whole, sample.groups.long()
    n = torch.ones_like(whole.score, dtype=wide_dtype(groups.device)) if whole.n is None else whole.n
    for some in torch.split(draws.of(sample.num_groups)[:most], replicates_at_once(whole.score.numel())):
        counts = some[:, groups].to(n).reshape(len(some), *[1] * (whole.score.dim() - 1), -1)
        weights, score = counts * n, whole.score.expand(len(some), *whole.score.shape)
        positives = counts * whole.positives.to(n)
        yield RankedSample(score.masked_fill(weights == 0, torch.nan), positives, weights, whole.from_logits)
