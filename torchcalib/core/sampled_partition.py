"""Samples of each part of the rows, such as a group or a cluster of dependent rows; see `core.partition` for sums.

A `SampledPartition` has samples with the key of the part of each. `SampledPartState` stores them.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.clusters import MAX_CLUSTERS, distinct, number_of, numbered
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import RankedSample
from torchcalib.core.state import SampleState
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import cell_sums

MAX_PARTS = 2**31 - 1
"""Maximum number of numbered parts of stored samples, because the numbers are stored as int32."""


@dataclass(frozen=True, eq=False)
class SampledPartition:
    """Samples of all parts, with the key of the part of each: its number, or the identifier of a cluster."""

    whole: RankedSample  # samples from all parts, (*B, *S, M), with batch axes B and class or label axes S
    keys: Tensor  # (*B, M), integers in [0, n_parts), or any identifiers
    n_parts: int | None  # number of parts G; None for identifiers, of which more than 1,024 are merged

    @cached_property
    def numbers(self) -> Tensor:
        """Number of the part of each sample in [0, G), int64 `(*B, M)`."""
        return self.keys.long() if self.n_parts is not None else numbered(self.keys, MAX_CLUSTERS)

    @cached_property
    def n_distinct(self) -> int | None:
        """Number of clusters before merging, at most `MAX_DISTINCT` + 1; None for numbered parts."""
        if self.n_parts is not None:
            return None
        present = ~self.whole.score.isnan()
        return number_of(distinct(self._by_sample(self.keys)[present]))

    @property
    def n_values(self) -> int:
        """Number of values in memory for a replicate."""
        return self.whole.score.numel()

    @property
    def sizes(self) -> Tensor:
        """Total weight of each part in each batch element, float64 `(G, ...)`."""
        n = weight_and_residual(self.whole)[..., :1, :]
        return cell_sums(self._by_sample(self.numbers), n, self._n_used).squeeze(-2).movedim(-1, 0)

    def evaluate(self, function: Callable[[RankedSample], Tensor]) -> Tensor:
        """Return the values `(G, *B, *)` of a function of samples for all G numbered parts.

        The function maps samples `(g, *S, m)` of g parts, padded with NaN, to values `(g, *)`. All samples of an empty
        part are NaN.
        """
        assert self.n_parts is not None  # parts are numbered
        found = [(numbers, function(sample)) for numbers, sample in self.by_size()]
        values = torch.cat([value for _, value in found])
        order = torch.cat([numbers for numbers, _ in found])
        values = torch.zeros_like(values).index_copy(0, order, values)
        n_batch = self.keys.dim() - 1
        return values.reshape(*self.keys.shape[:-1], self.n_parts, *values.shape[1:]).movedim(n_batch, 0)

    def restricted(self, numbers: Tensor) -> "SampledPartition":
        """Return the parts with the given numbers `(g,)`, renumbered from 0. Batch axes are not supported."""
        assert self.n_parts is not None  # parts are numbered
        renumbered = torch.full((self.n_parts,), -1, device=numbers.device)
        renumbered[numbers] = torch.arange(len(numbers), device=numbers.device)
        keys = renumbered[self.numbers]
        chosen = keys >= 0
        whole, n = self.whole, self.whole.n
        columns = whole.score[..., chosen], whole.positives[..., chosen], n if n is None else n[..., chosen]
        sample = RankedSample(*columns, whole.from_logits, copies=whole.copies)
        return SampledPartition(sample, keys[chosen], len(numbers))

    def replicate(self, counts: Tensor) -> RankedSample:
        """Return the sample of replicates, `(r, ..., M)`, in which each part occurs `counts` times, `(r, G)`."""
        whole, wide = self.whole, wide_dtype(self.keys.device)
        copies = counts.to(wide)[:, self._by_sample(self.numbers)]
        n = copies if whole.n is None else copies * whole.n
        score = whole.score.expand(n.shape).masked_fill(n == 0, torch.nan)  # samples without a copy are ignored
        return RankedSample(score, copies * whole.positives.to(wide), n, whole.from_logits)

    def residuals(self, upper: Tensor | None) -> Tensor:
        """Return weights and residuals of every part in runs of sorted samples; see `Partition.residuals`."""
        assert upper is not None  # cells of a ranked sample are runs
        n_cells, n_parts = upper.shape[-1], self._n_used
        index = self._by_sample(self.numbers) * n_cells + cell_of(self.whole, upper)
        sums = cell_sums(index, weight_and_residual(self.whole), n_parts * n_cells)
        return sums.reshape(*sums.shape[:-1], n_parts, n_cells).movedim(-3, -2)

    @property
    def _n_used(self) -> int:
        if self.n_parts is not None:
            return self.n_parts
        return int(self.numbers.max()) + 1 if self.numbers.numel() else 1

    def _by_sample(self, column: Tensor) -> Tensor:
        """Return a column `(*B, M)` with the class and label axes of the samples, `(*B, *S, M)`."""
        shape = self.whole.score.shape
        return column.reshape(*column.shape[:-1], *[1] * (len(shape) - column.dim()), column.shape[-1]).expand(shape)

    def by_size(self) -> Iterator[tuple[Tensor, RankedSample]]:
        """Yield indices `(g,)` of parts of similar size, and their samples `(g, *S, m)`, padded to the same length m.

        The sizes differ by less than a factor of 2, which limits the padding. The indices are in [0, B * G) for all
        batch elements.
        """
        score, positives, n, keys = self._flat
        n_total = math.prod(self.keys.shape[:-1]) * (self.n_parts or 0)
        order = torch.argsort(keys, stable=True)
        sizes = torch.bincount(keys, minlength=n_total)
        begins = sizes.cumsum(0) - sizes
        # Size class k contains parts with 2^(k-1) to 2^k - 1 samples. Class 0 contains the empty parts.
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
        """Scores, positives and counts `(*S, B * M)`, and the joint index of batch element and part `(B * M,)`."""
        n_batch = self.keys.dim() - 1

        def flat(column: Tensor) -> Tensor:
            column = column.expand_as(self.whole.score)
            return column.movedim(tuple(range(n_batch)), tuple(range(-1 - n_batch, -1))).flatten(-1 - n_batch)

        batches = self.numbers.flatten(0, -2) if n_batch else self.numbers.unsqueeze(0)
        first = torch.arange(len(batches), device=batches.device).unsqueeze(-1) * (self.n_parts or 0)
        n = None if self.whole.n is None else flat(self.whole.n)
        return flat(self.whole.score), flat(self.whole.positives), n, (batches + first).flatten()


def cell_of(sample: RankedSample, upper: Tensor) -> Tensor:
    """Return the cell of each element `(..., M)`, found by its score."""
    score = sample.score.detach().nan_to_num(torch.inf, posinf=torch.inf, neginf=-torch.inf).contiguous()
    cell = torch.searchsorted(upper.to(score.dtype).contiguous(), score)
    return cell.clamp(max=upper.shape[-1] - 1)


def weight_and_residual(sample: RankedSample) -> Tensor:
    """Return the weight, and the sum of outcomes minus confidences, of each element `(..., 2, M)`."""
    wide = wide_dtype(sample.score.device)
    score = sample.score.detach().to(wide)
    confidence = score.sigmoid() if sample.from_logits else score
    n = torch.ones_like(confidence) if sample.n is None else sample.n.to(wide)
    columns = torch.stack((n, sample.positives.detach().to(wide) - n * confidence), -2)
    return columns.masked_fill(score.isnan().unsqueeze(-2), 0)


class SamplesByPart(NamedTuple):
    """Metric state that consists of samples with keys of parts; see `core.state.Samples`."""

    scores: list[Tensor]
    outcomes: list[Tensor]
    weights: list[Tensor]
    keys: list[Tensor]  # (*B, n) for each chunk of n samples, without class or label axes
    n_ignored: Tensor


@dataclass(frozen=True)
class SampledPartState(SampleState):
    """Operations on a state of stored samples with numbers of parts (4 bytes each), or identifiers of clusters (8)."""

    batch_shape: tuple[int, ...]  # sizes of the batch axes
    n_parts: int | None  # number of parts G; None: any integer identifies a cluster
    names: ClassVar[tuple[str, ...]] = SamplesByPart._fields

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int64 if self.n_parts is None else torch.int32

    @property
    def _more_dtypes(self) -> tuple[tuple[torch.dtype, ...], ...]:  # type: ignore[override]  # depends on the keys
        return ((self._dtype,),)

    def join(self, parts: Sequence[Any]) -> SamplesByPart:
        """Combine the parts of a state into a `SamplesByPart` tuple."""
        return SamplesByPart(*parts)

    def _chunk(self, p: Predictions) -> list[Tensor]:
        assert p.groups is not None  # set by `in_groups` or `in_clusters`
        return [*super()._chunk(p), p.groups.to(self._dtype, copy=True).reshape(*self.batch_shape, p.samples[-1])]

    def statistic(self, state: SamplesByPart) -> SampledPartition:
        """Concatenate the chunks of a state, and return all samples with their keys."""
        score, outcome, n, keys = self._whole(state)
        return SampledPartition(self._sample(score, outcome, n), keys, self.n_parts)

    def check(self, parts: Sequence[Any], like: SamplesByPart) -> SamplesByPart | None:
        """Return a copy of a saved state, or None if its shapes or numbers are invalid."""
        state: SamplesByPart | None = super().check(parts, like)
        for score, keys in [] if state is None else zip(state.scores, state.keys, strict=True):
            if keys.shape != (*self.batch_shape, score.shape[-1]):
                return None
            if self.n_parts is not None and not bool(((keys >= 0) & (keys < self.n_parts)).all()):
                return None
        return state

    def _columns(self, row: Sequence[float]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        return [*super()._columns(row), (self._dtype, (*self.batch_shape, int(row[0])))]
