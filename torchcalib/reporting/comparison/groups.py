"""Bootstrap of random groups of rows, in bounded memory.

Each row belongs to a random group, and a replicate weights each group by a Poisson variable of mean 1. With far more
groups than rows this is the bootstrap of rows. With more rows than groups it is a bootstrap of random groups, which
estimates the same variance from as many units as there are groups. Replicates are made from the sums of the groups.

Groups and weights depend on seed and row number alone. Systems that predict the same rows therefore have the same
replicates, and errors that they share cancel in their difference. The partition of rows into pieces has no effect.
"""

import math
from collections.abc import Iterator
from typing import Generic, TypeVar

import torch
from torch import Tensor

from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sums import ScoreRecipe, Sums, SumsRecipe
from torchcalib.ops.counter_rng import poisson_counts, random_words
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import weighed_sums

S = TypeVar("S", bound=Sums)

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


class GroupedSums(Generic[S]):
    """Sums of a statistic by group of rows.

    Attributes:
        n_groups: G; 1 if there are too many sums for groups, so that there are no replicates.
    """

    def __init__(self, recipe: ScoreRecipe | EqualWidthBins, like: Predictions) -> None:
        shape = recipe.shape(like.task, like.samples[0] if like.task == "multilabel" else like.num_classes)
        size = math.prod(shape)
        few = max(FEWEST_GROUPS, min(MOST_GROUPS, _MOST_NUMBERS // size))
        self.recipe: SumsRecipe[S] = recipe  # type: ignore[assignment]  # S is the statistic of the recipe
        self.n_groups = few if few * size <= _TOO_MANY else 1
        self._cells = recipe.cells
        *self._lead, self._n_columns, self._n_cells = shape
        device = like.given.device
        width = self.n_groups * self._n_cells
        self._sums = torch.zeros(*self._lead, self._n_columns, width, dtype=wide_dtype(device), device=device)

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add rows, given the random numbers that determine their groups."""
        cells = self._cells(p)
        group = group_of(words, self.n_groups).repeat_interleave(cells.index.shape[-1] // max(1, len(words)))
        place = (group * cells.n_cells + cells.index).unsqueeze(-2).expand(cells.columns.shape)
        self._sums.scatter_add_(-1, place, cells.columns)

    def statistic(self) -> S:
        """Return the statistic of all rows."""
        return self.recipe.wrap(self._by_group().sum(0))

    def replicates(self, draws: Draws) -> Iterator[S]:
        """Yield the statistic of replicates, some at a time, `(r, ...)`."""
        by_group = self._by_group()
        table = by_group.flatten(1)
        finite = bool(table.isfinite().all())
        for some in torch.split(draws.of(self.n_groups), replicates_at_once(max(table.shape))):
            sums = weighed_sums(some.to(table), table, finite)
            yield self.recipe.wrap(sums.reshape(len(some), *by_group.shape[1:]))

    def _by_group(self) -> Tensor:
        """`(G, ..., F, K)`."""
        return self._sums.reshape(*self._lead, self._n_columns, self.n_groups, self._n_cells).movedim(-2, 0)


class GroupedSample:
    """Ranked samples with their groups, up to a maximal number.

    Attributes:
        is_full: whether there were more samples than that, so that none are kept.
    """

    def __init__(self, recipe: ExactSample, most: int) -> None:
        self.is_full = False
        self._recipe, self._most, self._n = recipe, most, 0
        self._pieces: list[tuple[RankedSample, Tensor]] = []

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add rows, given the random numbers that determine their groups."""
        sample = self._recipe.of(p)
        self._n += sample.score.numel()
        self.is_full |= self._n > self._most
        if self.is_full:
            self._pieces = []
            return
        group = group_of(words, MOST_GROUPS)
        self._pieces.append((sample, group.repeat_interleave(sample.score.shape[-1] // max(1, len(words)))))

    @property
    def size(self) -> int:
        """Number of samples, every label of a sample being one."""
        return self._n

    def sample(self) -> RankedSample:
        """Return all samples."""
        samples = [sample for sample, _ in self._pieces]
        score = torch.cat([sample.score.clone() for sample in samples], -1)
        if all(sample.n is None for sample in samples):
            return RankedSample(score, torch.cat([s.positives for s in samples], -1), None, samples[0].from_logits)
        wide = wide_dtype(score.device)
        n = torch.cat([torch.ones_like(s.score, dtype=wide) if s.n is None else s.n.to(wide) for s in samples], -1)
        positives = torch.cat([s.positives.to(wide) for s in samples], -1)
        return RankedSample(score, positives, n, samples[0].from_logits)

    def replicates(self, draws: Draws, most: int) -> Iterator[RankedSample]:
        """Yield the sample of the first replicates, some at a time, `(r, ..., N)`."""
        whole, group = self.sample(), torch.cat([group for _, group in self._pieces])
        n = torch.ones_like(whole.score, dtype=wide_dtype(group.device)) if whole.n is None else whole.n
        for some in torch.split(draws.of(MOST_GROUPS)[:most], replicates_at_once(whole.score.numel())):
            counts = some[:, group].to(n).reshape(len(some), *[1] * (whole.score.dim() - 1), -1)
            weights, score = counts * n, whole.score.expand(len(some), *whole.score.shape)
            positives = counts * whole.positives.to(n)
            absent = weights == 0
            yield RankedSample(score.masked_fill(absent, torch.nan), positives, weights, whole.from_logits)
