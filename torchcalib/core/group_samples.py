"""Samples with group numbers, from which rank-based metrics are computed per group."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.state import SampleState

MAX_GROUPS = 2**31 - 1
"""Maximum number of groups, because group numbers are stored as int32."""


@dataclass(frozen=True, eq=False)
class GroupedSample:
    """Samples with one group number per sample, or one identifier of a cluster."""

    whole: RankedSample  # samples from all groups, (*B, *S, M), with batch axes B and class or label axes S
    groups: Tensor  # group number per sample (*B, M), integers in [0, num_groups), or identifiers of clusters
    num_groups: int  # number of groups G; 0 for clusters

    def evaluate(self, function: Callable[[RankedSample], Tensor]) -> Tensor:
        """Evaluate a function of samples for all G groups, and return the values `(G, *B, *)` with batch axes B.

        The function maps samples `(g, *S, m)` of g groups, padded with NaN, to values `(g, *)`. All samples of an empty
        group are NaN.
        """
        parts = [(numbers, function(sample)) for numbers, sample in self.by_size()]
        values = torch.cat([value for _, value in parts])
        order = torch.cat([numbers for numbers, _ in parts])
        values = torch.zeros_like(values).index_copy(0, order, values)
        n_batch = self.groups.dim() - 1
        return values.reshape(*self.groups.shape[:-1], self.num_groups, *values.shape[1:]).movedim(n_batch, 0)

    def of_groups(self, numbers: Tensor) -> "GroupedSample":
        """Return the samples of the groups `numbers` `(g,)`, renumbered from 0. Batch axes are not supported."""
        renumbered = torch.full((self.num_groups,), -1, device=numbers.device)
        renumbered[numbers] = torch.arange(len(numbers), device=numbers.device)
        groups = renumbered[self.groups.long()]
        chosen = groups >= 0
        whole, n = self.whole, self.whole.n
        columns = whole.score[..., chosen], whole.positives[..., chosen], n if n is None else n[..., chosen]
        sample = RankedSample(*columns, whole.from_logits, copies=whole.copies)
        return GroupedSample(sample, groups[chosen], len(numbers))

    def by_size(self) -> Iterator[tuple[Tensor, RankedSample]]:
        """Yield indices `(g,)` of groups of similar size, and their samples `(g, *S, m)`, padded to the same length m.

        The sizes differ by less than a factor of 2, which limits the padding. The indices are in [0, B * G) for all
        batch elements.
        """
        score, positives, n, groups = self._flat
        n_total = math.prod(self.groups.shape[:-1]) * self.num_groups
        order = torch.argsort(groups, stable=True)
        sizes = torch.bincount(groups, minlength=n_total)
        begins = sizes.cumsum(0) - sizes
        # Size class k contains groups with 2^(k-1) to 2^k - 1 samples. Class 0 contains the empty groups.
        classes = sizes.to(torch.float64).frexp().exponent
        for size_class in sorted(set(classes.tolist())):
            numbers = (classes == size_class).nonzero().squeeze(-1)
            longest = int(sizes[numbers].max())
            offsets = torch.arange(longest, device=order.device)
            absent = offsets >= sizes[numbers].unsqueeze(-1)
            rows = order[(begins[numbers].unsqueeze(-1) + offsets).masked_fill(absent, 0)] if longest else offsets
            rows = rows.expand(len(numbers), longest)
            absent = absent.reshape(len(numbers), *[1] * (score.dim() - 1), longest)

            def padded(column: Tensor, rows: Tensor, absent: Tensor, filling: float) -> Tensor:
                return column[..., rows].movedim(-2, 0).masked_fill(absent, filling)

            counts = None if n is None else padded(n, rows, absent, 0)
            columns = padded(score, rows, absent, torch.nan), padded(positives, rows, absent, 0), counts
            yield numbers, RankedSample(*columns, self.whole.from_logits, copies=self.whole.copies)

    @property
    def _flat(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Scores, positives and counts `(*S, B * M)`, and the joint index of batch element and group `(B * M,)`."""
        n_batch = self.groups.dim() - 1

        def flat(column: Tensor) -> Tensor:
            column = column.expand_as(self.whole.score)
            return column.movedim(tuple(range(n_batch)), tuple(range(-1 - n_batch, -1))).flatten(-1 - n_batch)

        batches = self.groups.flatten(0, -2) if n_batch else self.groups.unsqueeze(0)
        first = torch.arange(len(batches), device=batches.device).unsqueeze(-1) * self.num_groups
        n = None if self.whole.n is None else flat(self.whole.n)
        return flat(self.whole.score), flat(self.whole.positives), n, (batches.long() + first).flatten()


class GroupedSamples(NamedTuple):
    """Metric state that consists of samples with group numbers; see `core.state.Samples`."""

    scores: list[Tensor]
    outcomes: list[Tensor]
    weights: list[Tensor]
    groups: list[Tensor]  # (*B, n) for each chunk of n samples, without class or label axes
    n_ignored: Tensor


@dataclass(frozen=True)
class GroupedSampleState(SampleState):
    """Operations on a state of stored samples with group numbers (4 bytes each), or identifiers of clusters (8)."""

    batch_shape: tuple[int, ...]  # sizes of the batch axes
    num_groups: int | None  # number of groups G; None: any integer identifies a cluster
    names: ClassVar[tuple[str, ...]] = GroupedSamples._fields

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int64 if self.num_groups is None else torch.int32

    @property
    def _more_dtypes(self) -> tuple[tuple[torch.dtype, ...], ...]:  # type: ignore[override]  # depends on the groups
        return ((self._dtype,),)

    def join(self, parts: Sequence[Any]) -> GroupedSamples:
        """Combine the parts of a state into a `GroupedSamples` tuple."""
        return GroupedSamples(*parts)

    def _chunk(self, p: Predictions) -> list[Tensor]:
        assert p.groups is not None  # set by `in_groups`
        return [*super()._chunk(p), p.groups.to(self._dtype).reshape(*self.batch_shape, p.samples[-1])]

    def statistic(self, state: GroupedSamples) -> GroupedSample:
        """Concatenate the chunks of a state, and return all samples with their group numbers."""
        score, outcome, n, groups = self._whole(state)
        return GroupedSample(self._sample(score, outcome, n), groups, self.num_groups or 0)

    def check(self, parts: Sequence[Any], like: GroupedSamples) -> GroupedSamples | None:
        """Return a copy of a saved state, or None if its shapes or group numbers are invalid."""
        state: GroupedSamples | None = super().check(parts, like)
        for score, groups in [] if state is None else zip(state.scores, state.groups, strict=True):
            if groups.shape != (*self.batch_shape, score.shape[-1]):
                return None
            if self.num_groups is not None and not bool(((groups >= 0) & (groups < self.num_groups)).all()):
                return None
        return state

    def _columns(self, row: Sequence[float]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [*super()._columns(row), (self._dtype, (*self.batch_shape, int(row[0])))]
