"""Bootstrap of random groups of rows, in bounded memory.

Each row is assigned to a random group, and each replicate weights the groups by Poisson variables of mean 1. With many
more groups than rows, this is the bootstrap of single rows. Fewer groups estimate the same variance. Each replicate is
computed from the weighted sum of the group sums.

Groups and weights depend only on the seed and the row number, and not on the batch size. All systems therefore have the
same replicates, and common errors cancel in their differences.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.clusters import ClusteredSample, ClusteredSums
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.groups import in_groups
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sums import BinStats
from torchcalib.inference.resampling import Weights
from torchcalib.inference.simulation import BinCells, OrderedSample
from torchcalib.metrics.groups.samples import GroupedSample, GroupedSampleState
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.sorting import order_of
from torchcalib.reporting.comparison.null import (
    UNIFORM_STREAMS,
    bins_of_calibrated,
    samples_of_calibrated,
    samples_of_flipped,
)

RANKED_REPLICATES = 199
"""Maximum number of replicates of rank-based errors and metrics of selective prediction."""

MAX_NULL_SUMS = 2**22
"""Intended maximum number of simulated sums over bins, in all null replicates of one system."""

MAX_GROUPS, MIN_GROUPS = 2**13, 2**7
"""Limits of the number of groups G. Bootstrap standard deviations have a relative error of 1 / sqrt(2 G): 1% and 6%."""

_TARGET_SIZE = 2**20  # intended number of sums over all groups; at least `MIN_GROUPS` groups may need more
_MAX_SIZE = 2**23  # maximum number of sums over all groups (64 MB); above it there are no replicates

_GROUP_STREAM = -1  # number of the random stream that assigns rows to groups; replicates use 0, 1, ...


def words_of(seed: int, numbers: Tensor) -> Tensor:
    """Return a random integer in [0, 2^32) for each row `(n,)`, from the number of the row."""
    return random_words(seed, torch.full((1,), _GROUP_STREAM, device=numbers.device), numbers)[0]


def group_of(words: Tensor, n_groups: int) -> Tensor:
    """Map random integers `words` in [0, 2^32) to group numbers in [0, n_groups), int64."""
    return (words * n_groups) >> 32


class Draws:
    """Poisson weights and signs of random groups of rows in `n` = R replicates, which all systems share."""

    def __init__(self, seed: int, n: int, device: torch.device) -> None:
        self.seed, self._replicates = seed, torch.arange(n, device=device)
        self._drawn: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._replicates)

    def weights(self, groups: Tensor) -> Tensor:
        """Return the weights of the groups with these numbers `(g,)` in R replicates, uint8 `(R, g)`; cached."""
        numbers, weights = self._drawn.get(len(groups), (groups[:0], None))
        if weights is None or not torch.equal(numbers, groups):
            weights = Weights(self.seed, groups, "poisson").in_replicates(self._replicates, torch.uint8)
            self._drawn[len(groups)] = groups, weights
        return weights

    def signs(self, groups: Tensor) -> Tensor:
        """Return random signs -1 and 1 of the groups with these numbers `(g,)`, float64 `(R, g)`."""
        return Weights(self.seed, groups, "sign", first=UNIFORM_STREAMS).in_replicates(self._replicates, torch.float64)


class GroupedSums:
    """Sums of an accumulator for each random group of rows.

    `shape` `(..., F, K)` is that of one group, for F summands and K cells (bins or classes). `add` changes `sums` in
    place, because there can be many more groups than rows in a batch.
    """

    def __init__(self, accumulator: Any, shape: tuple[int, ...], device: torch.device) -> None:
        size = math.prod(shape)
        n_groups = max(MIN_GROUPS, min(MAX_GROUPS, _TARGET_SIZE // size))
        n_groups = n_groups if n_groups * size <= _MAX_SIZE else 1
        self.accumulator = accumulator
        *lead, n_cells = shape
        self._sums = torch.zeros(*lead, n_groups, n_cells, dtype=wide_dtype(device), device=device)
        # (G, ..., F, K); with a single group there are no replicates
        self.sums = self._sums.movedim(-2, 0)

    @property
    def has_replicates(self) -> bool:
        """Whether there are several groups, which can be resampled."""
        return len(self.sums) > 1

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add a batch with the random integer of each row from `words_of`. A row can contain several samples."""
        cells = self.accumulator.cells(p)
        group = group_of(words, len(self.sums)).repeat_interleave(cells.index.shape[-1] // max(1, len(words)))
        place = (group * cells.n_cells + cells.index).unsqueeze(-2).expand(cells.columns.shape)
        self._sums.flatten(-2).scatter_add_(-1, place, cells.columns)

    @property
    def clusters(self) -> ClusteredSums[Any]:
        """The groups as clusters of rows."""
        return ClusteredSums(self.sums.contiguous(), self.accumulator)

    @property
    def occupied(self) -> Tensor:
        """Numbers of the groups with data, int64 `(g,)`."""
        return (self.clusters.sizes.reshape(len(self.sums), -1) > 0).any(-1).nonzero().squeeze(-1)

    def replicates(self, draws: Draws) -> Iterator[Any]:
        """Yield the sums of all bootstrap replicates, in chunks of r replicates `(r, ...)` to bound the memory."""
        if not self.has_replicates:
            return
        groups = self.occupied
        clusters = ClusteredSums(self.sums[groups], self.accumulator)
        for weights in torch.split(draws.weights(groups), replicates_at_once(max(len(groups), self.sums[0].numel()))):
            yield clusters.replicate(weights)

    def null_replicates(self, draws: Draws, flips: bool) -> Iterator[Any]:  # noqa: ARG002
        """Yield the sums of null replicates `(r, ...)`; none for scores, which calibration does not determine."""
        yield from ()


class GroupedBins(GroupedSums):
    """Sums over equal-width bins for each random group of rows, and their noise in all rows."""

    accumulator: EqualWidthBins
    _whole: BinStats | None = None

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add a batch; see `GroupedSums.add`."""
        super().add(p, words)
        a = self.accumulator
        bins = EqualWidthBins(a.mode, a.n_bins, a.right, with_noise=True).from_predictions(p)
        self._whole = bins if self._whole is None else self._whole + bins

    def null_replicates(self, draws: Draws, flips: bool) -> Iterator[BinStats]:
        """Yield the bins of a calibrated system in R replicates `(R, ..., B)`, with random signs of groups if `flips`.

        R is reduced for many bins, but is at least 199.
        """
        if self._whole is None or not self.has_replicates:
            return
        b = self._whole
        n_replicates = min(len(draws), max(RANKED_REPLICATES, MAX_NULL_SUMS // b.n.numel()))
        factors = (draws.signs if flips else draws.weights)(self.occupied)
        residuals = self._residuals(factors[:n_replicates])
        if flips:
            yield BinCells.from_bins(b).with_gaps(residuals / b.n.masked_fill(b.n == 0, 1))
        else:
            yield bins_of_calibrated(b, residuals, draws.seed)

    def _residuals(self, factors: Tensor) -> Tensor:
        """Return the sum of outcomes minus confidences in each bin `(R, ..., B)`, for factors `(R, g)` of groups."""
        sums = self.sums[self.occupied]
        table = (sums[..., 2, :] - sums[..., 1, :]).flatten(1)
        parts = torch.split(factors, replicates_at_once(max(table.shape)))
        return torch.cat([part.to(table) @ table for part in parts]).reshape(len(factors), *sums[0, ..., 0, :].shape)


class GroupedRanks:
    """Ranked samples, with the random group of each row."""

    def __init__(self, accumulator: ExactSample, like: Predictions, num_classes: int) -> None:
        lead = accumulator.leading_shape(like.task, num_classes)
        self._kind = GroupedSampleState(accumulator, lead, like.from_logits, (), MAX_GROUPS)
        self._state = self._kind.empty()

    def add(self, p: Predictions) -> None:
        """Add a batch whose rows have groups; see `in_random_groups`."""
        more = self._kind.detach(self._kind.from_predictions(p))
        self._state = self._kind.add(self._state, more) if self._state.scores else more

    @property
    def size(self) -> int:
        """Number of stored samples (multi-label: samples times labels)."""
        return sum(scores.numel() for scores in self._state.scores)

    @property
    def sample(self) -> GroupedSample:
        """All samples with their groups."""
        return self._kind.statistic(self._state)

    def replicates(self, draws: Draws) -> Iterator[RankedSample]:
        """Yield the ranked samples of at most 199 bootstrap replicates, in chunks of r replicates `(r, ..., N)`."""
        sample = self.sample
        groups, index = sample.groups.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        clusters = ClusteredSample(sample.whole, index)
        weights = draws.weights(groups)[:RANKED_REPLICATES]
        for some in torch.split(weights, replicates_at_once(sample.whole.score.numel())):
            yield OrderedSample.from_sample(clusters.replicate(some))  # sorted once for all metrics

    def null_replicates(self, draws: Draws, flips: bool) -> Iterator[RankedSample]:
        """Yield the ranked samples of at most 199 null replicates, in chunks of r replicates `(r, ..., N)`.

        `flips` multiplies the residuals of each group by a random sign. Otherwise outcomes are simulated for each row.
        """
        sample = self.sample
        order = order_of(sample.whole.score)
        ordered = OrderedSample.from_sample(sample.whole)  # the same stable order
        if flips:
            groups, index = sample.groups.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
            signs = draws.signs(groups)[:RANKED_REPLICATES]
            return samples_of_flipped(ordered, index.expand(order.shape).gather(-1, order), signs)
        rows = torch.arange(order.numel(), device=order.device).reshape(order.shape).gather(-1, order)
        return samples_of_calibrated(ordered, rows, draws.seed, min(RANKED_REPLICATES, len(draws)))


def in_random_groups(p: Predictions, words: Tensor) -> Predictions:
    """Return predictions with the random group of each row; `words` contains its random integer from `words_of`."""
    groups = group_of(words, MAX_GROUPS).repeat_interleave(p.samples[-1] // max(1, len(words)))
    return in_groups(p, groups, MAX_GROUPS, validate_args=False)
