"""Samples of groups that are put in order: a number beside each sample tells its group."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.state import SamplesKind

MOST_GROUPS = 2**31 - 1
"""Numbers of groups are kept in 4 bytes."""


@dataclass(frozen=True, eq=False)
class GroupedSample:
    """Samples of all groups.

    Attributes:
        whole: all samples, of all groups together, `(*B, *S, M)`: B batch axes, and S what the mode keeps apart.
        groups: the group of every sample `(*B, M)`, integers in [0, num_groups).
        num_groups: G.
    """

    whole: RankedSample
    groups: Tensor
    num_groups: int

    def read(self, value_of: Callable[[RankedSample], Tensor]) -> Tensor:
        """Read a value of every group, `(G, *B, *)`: that of no samples for a group that has none.

        Args:
            value_of: samples of several groups `(g, *S, m)`, padded with NaN, to values `(g, *)`.
        """
        parts = [(series, value_of(sample)) for series, sample in self.by_size()]
        values = torch.cat([value for _, value in parts])
        order = torch.cat([series for series, _ in parts])
        values = torch.zeros_like(values).index_copy(0, order, values)
        n_batch = self.groups.dim() - 1
        return values.reshape(*self.groups.shape[:-1], self.num_groups, *values.shape[1:]).movedim(n_batch, 0)

    def of_groups(self, numbers: Tensor) -> "GroupedSample":
        """Return the samples of some groups, given by their numbers, which become 0, 1 ..."""
        renumbered = torch.full((self.num_groups,), -1, device=numbers.device)
        renumbered[numbers] = torch.arange(len(numbers), device=numbers.device)
        groups = renumbered[self.groups.long()]
        held = groups >= 0  # one series of groups; those of a batch have elements of their own
        whole, n = self.whole, self.whole.n
        some = RankedSample(
            whole.score[..., held], whole.positives[..., held], n if n is None else n[..., held], whole.from_logits
        )
        return GroupedSample(some, groups[held], len(numbers))

    def by_size(self) -> Iterator[tuple[Tensor, RankedSample]]:
        """Yield groups of like sizes together, so that what pads them is less than what they hold.

        Yields:
            Which of the `B * G` groups of all batches, `(g,)`, and their samples `(g, *S, m)`.
        """
        score, positives, n, groups = self._flat
        n_series = math.prod(self.groups.shape[:-1]) * self.num_groups
        order = torch.argsort(groups, stable=True)
        sizes = torch.bincount(groups, minlength=n_series)
        begins = sizes.cumsum(0) - sizes
        # The exponent of the power of two above a size; 0 for none, and then 1, 2 ...
        classes = sizes.to(torch.float64).frexp().exponent
        for size_class in sorted(set(classes.tolist())):
            series = (classes == size_class).nonzero().squeeze(-1)
            longest = int(sizes[series].max())
            places = torch.arange(longest, device=order.device)
            absent = places >= sizes[series].unsqueeze(-1)
            rows = order[(begins[series].unsqueeze(-1) + places).masked_fill(absent, 0)] if longest else places
            rows = rows.expand(len(series), longest)
            absent = absent.reshape(len(series), *[1] * (score.dim() - 1), longest)

            def padded(column: Tensor, rows: Tensor, absent: Tensor, filling: float) -> Tensor:
                return column[..., rows].movedim(-2, 0).masked_fill(absent, filling)

            counts = None if n is None else padded(n, rows, absent, 0)
            held = padded(score, rows, absent, torch.nan), padded(positives, rows, absent, 0), counts
            yield series, RankedSample(*held, self.whole.from_logits)

    @property
    def _flat(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Scores, positives and counts `(*S, B * M)`, and which group of which batch each sample is in `(B * M,)`."""
        n_batch = self.groups.dim() - 1

        def flat(column: Tensor) -> Tensor:
            column = column.expand_as(self.whole.score)
            return column.movedim(tuple(range(n_batch)), tuple(range(-1 - n_batch, -1))).flatten(-1 - n_batch)

        batches = self.groups.flatten(0, -2) if n_batch else self.groups.unsqueeze(0)
        first = torch.arange(len(batches), device=batches.device).unsqueeze(-1) * self.num_groups
        n = None if self.whole.n is None else flat(self.whole.n)
        return flat(self.whole.score), flat(self.whole.positives), n, (batches.long() + first).flatten()


class GroupedSamples(NamedTuple):
    """A state of samples with their groups; see `core.state.Samples`.

    Attributes:
        scores, outcomes, weights, left_out: see there.
        groups: int32 `(*B, n)`, without the axis of classes or labels that a mode keeps apart.
    """

    scores: list[Tensor]
    outcomes: list[Tensor]
    weights: list[Tensor]
    groups: list[Tensor]
    left_out: Tensor


@dataclass(frozen=True)
class GroupedSamplesKind(SamplesKind):
    """Every sample and the number of its group, which is 4 bytes more.

    Attributes:
        batch_shape: leading axes that are kept apart.
        num_groups: G.
    """

    batch_shape: tuple[int, ...]
    num_groups: int
    names: ClassVar[tuple[str, ...]] = GroupedSamples._fields
    _more_dtypes: ClassVar[tuple[tuple[torch.dtype, ...], ...]] = ((torch.int32,),)

    def join(self, parts: Sequence[Any]) -> GroupedSamples:
        """Return the parts by their names."""
        return GroupedSamples(*parts)

    def _chunk(self, p: Predictions) -> list[Tensor]:
        assert p.groups is not None  # that is what tells groups
        return [*super()._chunk(p), p.groups.to(torch.int32).reshape(*self.batch_shape, p.samples[-1])]

    def statistic(self, state: GroupedSamples) -> GroupedSample:
        """Return all samples, with their groups."""
        score, outcome, n, groups = self._whole(state)
        return GroupedSample(self._sample(score, outcome, n), groups, self.num_groups)

    def check(self, parts: Sequence[Any], like: GroupedSamples) -> GroupedSamples | None:
        """Return copies of saved chunks, if they are of the same series, and of groups that there are."""
        state: GroupedSamples | None = super().check(parts, like)
        for score, groups in [] if state is None else zip(state.scores, state.groups, strict=True):
            if groups.shape != (*self.batch_shape, score.shape[-1]):
                return None
            if not bool(((groups >= 0) & (groups < self.num_groups)).all()):
                return None
        return state

    def _columns(self, row: Sequence[float]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [*super()._columns(row), (torch.int32, (*self.batch_shape, int(row[0])))]
