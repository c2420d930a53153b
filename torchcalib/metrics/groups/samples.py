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
    """Samples with one group number per sample.

    Attributes:
        whole: Samples from all groups, `(*B, *S, M)`, with batch axes B and class or label axes S.
        groups: Group number per sample `(*B, M)`, integers in [0, num_groups).
        num_groups: Number of groups G.
    """

    whole: RankedSample
    groups: Tensor
    num_groups: int

    def evaluate(self, function: Callable[[RankedSample], Tensor]) -> Tensor:
        """Evaluate a function of samples for all G groups, and return the values `(G, *B, *)` with batch axes B.

        Args:
            function: Function from samples `(g, *S, m)` of g groups, padded with NaN, to values `(g, *)`. S is the
                class or label axis. For an empty group, all samples are NaN.
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
        sample = RankedSample(
            whole.score[..., chosen],
            whole.positives[..., chosen],
            n if n is None else n[..., chosen],
            whole.from_logits,
        )
        return GroupedSample(sample, groups[chosen], len(numbers))

    def by_size(self) -> Iterator[tuple[Tensor, RankedSample]]:
        """Yield the samples of groups with similar sizes, padded to the same length m.

        The sizes of groups that are yielded together differ by less than a factor of 2, which limits the padding.

        Yields:
            Indices `(g,)` of the groups, in [0, B * G) for all batch elements, and the samples `(g, *S, m)`.
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
            yield numbers, RankedSample(*columns, self.whole.from_logits)

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
    """Metric state that consists of samples with group numbers.

    Attributes:
        scores, outcomes, weights, n_ignored: See `core.state.Samples`.
        groups: Group numbers, int32 `(*B, n)` for each chunk of n samples, without class or label axes.
    """

    scores: list[Tensor]
    outcomes: list[Tensor]
    weights: list[Tensor]
    groups: list[Tensor]
    n_ignored: Tensor


@dataclass(frozen=True)
class GroupedSampleState(SampleState):
    """Operations on a state of stored samples with group numbers (4 bytes per sample).

    Attributes:
        batch_shape: Sizes of the batch axes.
        num_groups: Number of groups G.
    """

    batch_shape: tuple[int, ...]
    num_groups: int
    names: ClassVar[tuple[str, ...]] = GroupedSamples._fields
    _more_dtypes: ClassVar[tuple[tuple[torch.dtype, ...], ...]] = ((torch.int32,),)

    def join(self, parts: Sequence[Any]) -> GroupedSamples:
        """Combine the parts of a state into a `GroupedSamples` tuple."""
        return GroupedSamples(*parts)

    def _chunk(self, p: Predictions) -> list[Tensor]:
        assert p.groups is not None  # set by `in_groups`
        (dtype,) = self._more_dtypes[-1]
        return [*super()._chunk(p), p.groups.to(dtype).reshape(*self.batch_shape, p.samples[-1])]

    def statistic(self, state: GroupedSamples) -> GroupedSample:
        """Concatenate the chunks of a state, and return all samples with their group numbers."""
        score, outcome, n, groups = self._whole(state)
        return GroupedSample(self._sample(score, outcome, n), groups, self.num_groups)

    def check(self, parts: Sequence[Any], like: GroupedSamples) -> GroupedSamples | None:
        """Return a copy of a saved state, or None if its shapes or group numbers are invalid."""
        state: GroupedSamples | None = super().check(parts, like)
        for score, groups in [] if state is None else zip(state.scores, state.groups, strict=True):
            if groups.shape != (*self.batch_shape, score.shape[-1]):
                return None
            if not self._are_groups(groups):
                return None
        return state

    def _are_groups(self, groups: Tensor) -> bool:
        return bool(((groups >= 0) & (groups < self.num_groups)).all())

    def _columns(self, row: Sequence[float]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        (dtype,) = self._more_dtypes[-1]
        return [*super()._columns(row), (dtype, (*self.batch_shape, int(row[0])))]


@dataclass(frozen=True)
class ClusteredSampleState(GroupedSampleState):
    """Operations on a state of stored samples with identifiers of clusters (8 bytes per sample)."""

    _more_dtypes: ClassVar[tuple[tuple[torch.dtype, ...], ...]] = ((torch.int64,),)

    def _are_groups(self, groups: Tensor) -> bool:  # noqa: ARG002 - any integer identifies a cluster
        return True
