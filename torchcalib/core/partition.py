"""Sums of each part of the rows. A part is a group, a cluster of dependent rows, a random group, or a replicate.

A `Partition` has sums with a leading axis of parts. It gives the statistic of all rows, of each part, and of replicates
in which parts are resampled, as a `SampledPartition` does for samples. `SumsByPart` accumulates a `Partition` for
numbered parts, `ClusterState` counts clusters exactly, and `NamedPartState` adds parts with equal names.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.clusters import distinct, distinct_in, number_of
from torchcalib.core.events import reduce_to_events
from torchcalib.core.groups import NO_GROUP, check_group_range, check_names, in_groups
from torchcalib.core.pieces import Piece, takes_pieces
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.core.sampled_partition import SampledPartition, cell_of, weight_and_residual
from torchcalib.core.state import SumState
from torchcalib.core.sums import (
    BinStats,
    Ranges,
    Sums,
    SumsAccumulator,
    check_sums,
    has_noise_flag,
    noise_flag_of,
    with_noise_row,
)
from torchcalib.ops.segments import cell_sums, weighted_sums

S = TypeVar("S")

MAX_NAMED = 10_000
"""Maximum number of named parts. With more, no p-value would be significant after adjustment for multiple testing."""

_MAX_CLASS_PARTS = 2**6  # largest number of parts for which sums of all classes are added part by part
_MAX_SUMS = 2**27  # maximum number of float64 sums of named parts (1 GiB)


@dataclass(frozen=True, eq=False)
class Partition(Generic[S]):
    """Sums over the rows of every part."""

    sums: Tensor  # of G parts (G, ..., F, K); the first sum of each cell is its weight
    accumulator: SumsAccumulator[S]
    n_distinct: int | None = None  # number of clusters before merging, see `ClusterState`; None if not counted

    @property
    def whole(self) -> S:
        """Statistic of all rows, such as `BinStats`, or a `RankedSample` of a sketch."""
        return self.accumulator.wrap(self.sums.sum(0))

    @property
    def sizes(self) -> Tensor:
        """Total weight of each part in each batch element, float64 `(G, ...)`."""
        return self.sums[..., 0, :].sum(-1)

    @property
    def n_values(self) -> int:
        """Number of values in memory for a replicate."""
        return self.sums.numel()

    @property
    def each(self) -> S:
        """Statistic of every part, with a leading axis of parts."""
        return self.accumulator.wrap(self.sums)

    def evaluate(self, function: Callable[[S], Tensor]) -> Tensor:
        """Return the values `(G, ...)` of a function of the statistic, which is evaluated for all parts at once."""
        return function(self.each)

    def restricted(self, numbers: Tensor) -> "Partition[S]":
        """Return the parts with the given numbers `(g,)`, renumbered from 0."""
        return replace(self, sums=self.sums[numbers])

    def replicate(self, counts: Tensor) -> S:
        """Return the statistic of replicates, `(r, ...)`, in which each part occurs `counts` times, `(r, G)`."""
        table = self.sums.flatten(1)
        sums = weighted_sums(counts.to(table), table, bool(table.isfinite().all()))
        return self.accumulator.wrap(sums.reshape(len(counts), *self.sums.shape[1:]))

    def residuals(self, upper: Tensor | None) -> Tensor:
        """Return the weight and the residual (outcomes minus confidences) of every part in each cell, `(..., G, 2, K)`.

        `upper` is the largest score in each cell `(..., K)`, if the cells are runs of sorted samples; else None.
        """
        parts: Any = self.each
        if isinstance(parts, BinStats):
            n, confidence, outcomes = parts.sums[..., :3, :].unbind(-2)
            return torch.stack((n, outcomes - confidence), -2).movedim(0, -3)
        assert upper is not None  # a sketch, whose cells are runs, too
        whole: Any = self.whole
        columns = weight_and_residual(parts).movedim(0, -3)  # (..., G, 2, M) for M elements of the sketch
        cell = cell_of(whole, upper).unsqueeze(-2).expand(*columns.shape[:-2], -1)
        return cell_sums(cell, columns, upper.shape[-1])


AnyPartition = Partition[Any] | SampledPartition


def _unchanged(keys: Tensor, n_parts: int) -> Tensor:  # noqa: ARG001
    """Return keys that are numbers of parts."""
    return keys


@dataclass(frozen=True)
class SumsByPart(Generic[S]):
    """Accumulator that computes the sums of another accumulator separately for each part, `(G, ..., F, K)`.

    `Predictions.groups` contains the key of the part of each sample.
    """

    accumulator: Any  # of a single part: a `SumsAccumulator` with a method `cells` or `of_groups`
    n_parts: int
    number_of: Callable[[Tensor, int], Tensor] = (
        _unchanged  # maps keys to numbers in [0, G); a module-level function, which can be pickled
    )

    @property
    def with_noise(self) -> bool:
        """Whether the sums for the noise floor are included."""
        return has_noise_flag(self.accumulator)

    @property
    def ranges(self) -> Ranges:
        """Range of each quantity, by which saved sums are checked."""
        ranges: Ranges = self.accumulator.ranges
        return ranges

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape `(G, ..., F, K)` of the sums, for F sums over K cells."""
        return (self.n_parts, *self.accumulator.shape(task, num_classes))

    def from_predictions(self, p: Predictions) -> Sums:
        """Return the sums `(G, ..., F, K)` of all parts."""
        assert p.groups is not None  # set by `in_groups` or `in_clusters`
        accumulator, numbers = self.accumulator, self.number_of(p.groups, self.n_parts)
        number = numbers.reshape(-1)[:1]
        # For example, all rows of a piece of an image are in one part.
        if numbers.is_cpu and numbers.numel() and bool((numbers == number).all()):
            return self._of_one(accumulator.from_predictions(p.in_groups(None, p.weights, p.n_invalid)), number)
        has_loop = hasattr(accumulator, "of_groups")
        if has_loop:  # faster, because it does not store the summands of every event
            found: Sums = accumulator.of_groups(p, numbers, self.n_parts)
            return found
        cells = accumulator.cells(p)
        part = _of_events(numbers, cells.index)
        sums = cell_sums(part * cells.n_cells + cells.index, cells.columns, self.n_parts * cells.n_cells)
        sums = sums.reshape(*sums.shape[:-1], self.n_parts, cells.n_cells).movedim(-2, 0)
        if not self.with_noise:
            return Sums(sums)
        events = None if p.has_labels else reduce_to_events(p, accumulator.mode)
        return Sums(sums, noise_flag=noise_flag_of(p, sums, events, part, self.n_parts))

    def _of_one(self, found: Sums, number: Tensor) -> Sums:
        """Return the sums `(G, ..., F, K)` of all parts, of which only that with the `number` `(1,)` has rows."""

        def in_parts(x: Tensor) -> Tensor:
            return x.new_zeros(self.n_parts, *x.shape).index_add(0, number, x.unsqueeze(0))

        return Sums(in_parts(found.sums), noise_flag=None if found.noise_flag is None else in_parts(found.noise_flag))

    def takes_pieces(self, task: Task, from_logits: bool) -> bool:
        """Return whether `add_piece` can replace `from_predictions` for labels; see `core.pieces`."""
        return takes_pieces(self.accumulator, task, from_logits)

    def add_piece(self, piece: Piece, sums: Any) -> bool:
        """Add a piece to the numpy array `sums` `(G, ..., F, K)` in place. Return False if it is not added."""
        accumulator: Any = self.accumulator
        if piece.only_group is not None:
            return bool(accumulator.add_piece(piece, sums[piece.only_group]))
        if sums.ndim > 3:  # with an axis of classes
            if piece.n_groups > _MAX_CLASS_PARTS:
                return False
            return all(accumulator.add_piece(part, sums[part.only_group]) for part in piece.by_group())
        n_parts, n_sums, n_cells = sums.shape
        of_piece = np.zeros((n_sums, n_parts * n_cells))
        is_added = bool(accumulator.add_piece(piece, of_piece))
        sums += of_piece.reshape(n_sums, n_parts, n_cells).swapaxes(0, 1)
        return is_added

    def wrap(self, sums: Tensor) -> Partition[S]:
        """Convert a tensor `(G, ..., F, K)` to a `Partition`."""
        return Partition(sums, self.accumulator)

    def n_events(self, p: Predictions) -> int:
        """Return the number of events in a batch."""
        n: int = self.accumulator.n_events(p)
        return n


def _of_events(numbers: Tensor, index: Tensor) -> Tensor:
    """Return the number of the part of every event, broadcastable to the cell indices `index`.

    A sample may have several events on the last axis, and `index` may have an additional class axis.
    """
    numbers = numbers.unsqueeze(-2) if index.dim() > numbers.dim() else numbers
    events_per_sample = index.shape[-1] // max(1, numbers.shape[-1])
    return numbers if events_per_sample == 1 else torch.repeat_interleave(numbers, events_per_sample, -1)


class SumsOfClusters(NamedTuple):
    """State of sums per cluster."""

    sums: Tensor  # see `SumState`
    identifiers: list[Tensor]  # int64 (n,) for each chunk; see `core.clusters.distinct`


@dataclass(frozen=True)
class ClusterState(SumState[Any]):
    """Operations on a state of sums by cluster, and of at most 100,001 distinct identifiers of the clusters.

    The identifiers take 8 bytes each. They count the clusters exactly, although sums of clusters are merged.
    """

    names: ClassVar[tuple[str, ...]] = SumsOfClusters._fields
    has_payload: ClassVar[bool] = True

    def empty(self) -> Any:
        """Return the state without data."""
        return SumsOfClusters(super().empty(), [])

    def join(self, parts: Sequence[Any]) -> Any:
        """Return a state with the given parts, in the order of `names`."""
        return SumsOfClusters(*parts)

    def parts(self, state: Any) -> Any:
        """Return the parts of a state to save: the state itself, which is a tuple."""
        return state

    def from_predictions(self, p: Predictions) -> Any:
        """Return the state for one batch, whose `groups` contain the identifiers of clusters."""
        return SumsOfClusters(super().from_predictions(p), [distinct_in(p)])

    def add(self, state: Any, more: Any) -> Any:
        """Return the sum of two states, on the device of the first."""
        identifiers = [*state.identifiers, *(x.to(state.sums.device) for x in more.identifiers)]
        return SumsOfClusters(super().add(state.sums, more.sums), joined(identifiers))

    def detach(self, state: Any) -> Any:
        """Return the state without its autograd graph."""
        return state._replace(sums=state.sums.detach())

    def n_ignored(self, state: Any) -> Tensor:
        """Return the numbers of ignored invalid rows and ignored missing rows, float64 `(2,)`."""
        return super().n_ignored(state.sums)

    def statistic(self, state: Any) -> Any:
        """Return a `Partition` with the number of distinct clusters."""
        return replace(super().statistic(state.sums), n_distinct=sum(map(number_of, joined(state.identifiers))))

    def check(self, parts: Sequence[Any], like: Any) -> Any:
        """Return a copy of a saved state on the device of `like`, or None if its parts are not valid."""
        sums, identifiers = parts
        if (checked := super().check([sums], like.sums)) is None or not isinstance(identifiers, list | tuple):
            return None
        if not all(isinstance(x, Tensor) and (x.dim(), x.dtype) == (1, torch.int64) for x in identifiers):
            return None
        return SumsOfClusters(checked, joined([distinct(x.to(checked.device, copy=True)) for x in identifiers]))

    def announce(self, state: Any) -> Tensor:
        """Return the numbers that a rank sends first: the sums, and the number of identifiers."""
        n = sum(map(len, joined(state.identifiers)))
        return torch.cat((super().announce(state.sums), state.sums.new_tensor([n])))

    def payload(self, state: Any) -> Tensor:
        """Return the bytes of the identifiers for an all-gather, uint8 `(n,)`."""
        empty = torch.zeros(0, dtype=torch.uint8, device=state.sums.device)
        return torch.cat([empty, *(x.view(torch.uint8) for x in joined(state.identifiers))])

    def payload_size(self, announced: Tensor) -> int:
        """Return the length of the `payload` of the rank that sent `announced`."""
        return 8 * int(announced[-1])

    def merged(self, announced: Sequence[Tensor], payloads: Sequence[Tensor]) -> Any:
        """Return the merged state of all ranks."""
        # Clone, because a view with another dtype must be aligned to its item size.
        identifiers = [payload.clone().view(torch.int64) for payload in payloads]
        return SumsOfClusters(super().merged([one[:-1] for one in announced], payloads), joined(identifiers))


def joined(identifiers: Sequence[Tensor]) -> list[Tensor]:
    """Return the distinct identifiers of all chunks as one chunk; an empty list without chunks."""
    return [distinct(torch.cat(list(identifiers)))] if len(identifiers) > 1 else list(identifiers)


class NamedSums(NamedTuple):
    """State of sums for G named parts. The name of an unnamed part is its number."""

    names: tuple[str, ...]
    sums: Tensor  # `BinStats.sums` of all parts `(G, ..., F, B)`
    noise_flag: Tensor  # `BinStats.noise_flag` of all parts `(G, ...)`


@dataclass(frozen=True)
class NamedPartState:
    """Operations on the sums over bins of named parts, such as groups. Parts with equal names are added."""

    accumulator: Any  # of the bins of one part, with sums of noise
    shape: tuple[int, ...]  # shape of `BinStats.sums` for one part

    def empty(self, names: Sequence[str] = ()) -> NamedSums:
        """Return sums of 0 for the parts `names`."""
        most = min(MAX_NAMED, _MAX_SUMS // math.prod(self.shape))
        if len(names) > most:
            raise ValueError(
                f"`groups` must contain at most {most:,} different groups for a report, got {len(names):,} or more. "
                "Use coarser groups, or torchcalib.ByGroup, which has no limit."
            )
        sums = torch.zeros(len(names), *self.shape, dtype=torch.float64)
        return NamedSums(tuple(names), sums, sums.new_zeros(sums.shape[:-2]))

    def from_groups(self, p: Predictions, groups: Tensor, names: Sequence[str] | None) -> NamedSums:
        """Return the sums of a batch `p`, for the groups that occur in it.

        `groups` contains a number for each sample, or -1 for no group. It is ignored for rows of weight 0. `names` are
        indexed by these numbers; None uses the numbers as names.
        """
        check_names(names)
        numbers = groups.flatten().long()
        if p.weights is not None:  # ignore the group of a row with weight 0 for all labels
            absent = in_all_replicates((p.weights == 0).reshape(-1, len(numbers)), 1)
            numbers = numbers.masked_fill(absent, NO_GROUP)
        check_group_range(numbers, 2**63 - 1 if names is None else len(names))
        present, place = torch.unique(numbers[numbers != NO_GROUP], return_inverse=True)
        present_names = [str(k) if names is None else names[k] for k in present.tolist()]
        batch = self.empty(list(dict.fromkeys(present_names)))
        if not present_names:
            return batch
        places = {name: k for k, name in enumerate(batch.names)}
        index = torch.tensor([places[name] for name in present_names], device=numbers.device)
        numbers = numbers.masked_scatter(numbers != NO_GROUP, index[place])
        by_part: SumsByPart[BinStats] = SumsByPart(self.accumulator, len(places))
        bins = by_part.from_predictions(in_groups(p, numbers, len(places)))
        assert bins.noise_flag is not None  # not None, because the accumulator sums the noise
        return NamedSums(batch.names, bins.sums.detach().to(batch.sums), bins.noise_flag.to(batch.noise_flag))

    def add(self, state: NamedSums, more: NamedSums) -> NamedSums:
        """Return the sum of two states: parts of `state`, followed by the other parts of `more`."""
        total = self.empty(list(dict.fromkeys([*state.names, *more.names])))
        places = {name: k for k, name in enumerate(total.names)}
        for part in (state, more):
            index = torch.tensor([places[name] for name in part.names], dtype=torch.int64, device="cpu")
            total.sums.index_add_(0, index, part.sums)
            total.noise_flag.index_add_(0, index, part.noise_flag)
        return total

    def statistic(self, state: NamedSums) -> BinStats:
        """Return the bins of all parts `(G, ..., B)`, in the order of `state.names`."""
        found: BinStats = self.accumulator.wrap(with_noise_row(state.sums, state.noise_flag))
        return found

    def parts(self, state: NamedSums) -> list[Any]:
        """Return the parts of a state to save."""
        return [list(state.names), state.sums, state.noise_flag]

    def check(self, parts: Sequence[Any], like: NamedSums) -> NamedSums | None:
        """Return a saved state, or None if its parts are not valid."""
        names, *tensors = parts
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return None
        check_names(names)
        shapes = [(len(names), *part.shape[1:]) for part in like[1:]]
        if len(set(names)) < len(names) or len(tensors) != len(shapes):
            return None
        for tensor, shape in zip(tensors, shapes, strict=True):
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float64 or tuple(tensor.shape) != shape:
                return None
        self.empty(names)  # raises an error for too many groups
        check_sums(tensors[0], self.accumulator.ranges, tensors[1])
        return NamedSums(tuple(names), *tensors)
