"""Accumulator of sums per group of rows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.clusters import (
    MAX_CLUSTERS,
    ClusteredSums,
    cluster_numbers,
    distinct,
    distinct_in,
    number_of,
)
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import reduce_to_events
from torchcalib.core.groups import NO_GROUP, check_group_range, check_names, in_groups
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.core.state import SumState
from torchcalib.core.sums import BinStats, Ranges, Sums, check_sums, has_noise_flag, noise_flag_of, with_noise_row
from torchcalib.ops.segments import cell_sums

S = TypeVar("S", covariant=True)


@dataclass(frozen=True)
class SumsByGroup(Generic[S]):
    """Accumulator that computes the sums of another accumulator separately per group, `(G, ..., F, K)`."""

    accumulator: Any  # of a single group: a `SumsAccumulator` with a method `cells` or `of_groups`
    num_groups: int

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
        return (self.num_groups, *self.accumulator.shape(task, num_classes))

    def from_predictions(self, p: Predictions) -> Sums:
        """Return the sums `(G, ..., F, K)` per group; `p.groups` contains the group number of each sample."""
        accumulator: Any = self.accumulator
        if hasattr(accumulator, "of_groups"):  # faster, because it does not store the summands of every event
            assert p.groups is not None  # set by `in_groups`
            found: Sums = accumulator.of_groups(p, p.groups, self.num_groups)
            return found
        cells = self.accumulator.cells(p)
        index = group_of_events(p, cells.index) * cells.n_cells + cells.index
        sums = cell_sums(index, cells.columns, self.num_groups * cells.n_cells)
        sums = sums.reshape(*sums.shape[:-1], self.num_groups, cells.n_cells).movedim(-2, 0)
        if not self.with_noise:
            return Sums(sums)
        events = None if p.has_labels else reduce_to_events(p, accumulator.mode)
        return Sums(sums, noise_flag=noise_flag_of(p, sums, events, group_of_events(p, cells.index), self.num_groups))

    def wrap(self, sums: Tensor) -> S:
        """Convert a tensor `(G, ..., F, K)` to the statistic type of the accumulator."""
        statistic: S = self.accumulator.wrap(sums)
        return statistic

    def n_events(self, p: Predictions) -> int:
        """Return the number of events in a batch."""
        n: int = self.accumulator.n_events(p)
        return n


def group_of_events(p: Predictions, index: Tensor) -> Tensor:
    """Return the group number of every event, broadcastable to the cell indices `index`.

    A sample may have several events on the last axis, and `index` may have an additional class axis.
    """
    assert p.groups is not None  # set by `in_groups`
    groups = p.groups.unsqueeze(-2) if index.dim() > p.groups.dim() else p.groups
    events_per_sample = index.shape[-1] // max(1, groups.shape[-1])
    return groups if events_per_sample == 1 else torch.repeat_interleave(groups, events_per_sample, -1)


@dataclass(frozen=True)
class SumsByCluster(SumsByGroup[S]):
    """Accumulator of sums per cluster of dependent rows, `(G, ..., F, K)`.

    `Predictions.groups` contains identifiers of clusters. Clusters with the same hash are merged.
    """

    def from_predictions(self, p: Predictions) -> Sums:
        """Return the sums `(G, ..., F, K)` per cluster."""
        assert p.groups is not None  # set by `in_groups`
        numbers = cluster_numbers(p.groups) * self.num_groups // MAX_CLUSTERS
        return super().from_predictions(p.in_groups(numbers, p.weights, p.n_invalid))

    def wrap(self, sums: Tensor) -> Any:
        """Convert a tensor `(G, ..., F, K)` to `ClusteredSums`."""
        return ClusteredSums(sums, self.accumulator)


class SumsOfClusters(NamedTuple):
    """State of sums per cluster."""

    sums: Tensor  # see `SumState`
    identifiers: list[Tensor]  # int64 (n,) for each chunk; see `core.clusters.distinct`


@dataclass(frozen=True)
class ClusteredSumState(SumState[Any]):
    """Operations on a state of sums per cluster, and of at most 100,001 distinct identifiers of the clusters.

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
        return SumsOfClusters(super().add(state.sums, more.sums), _joined(identifiers))

    def detach(self, state: Any) -> Any:
        """Return the state without its autograd graph."""
        return state._replace(sums=state.sums.detach())

    def n_ignored(self, state: Any) -> Tensor:
        """Return the numbers of ignored invalid rows and ignored missing rows, float64 `(2,)`."""
        return super().n_ignored(state.sums)

    def statistic(self, state: Any) -> Any:
        """Return `ClusteredSums` with the number of distinct clusters."""
        return replace(super().statistic(state.sums), n_distinct=sum(map(number_of, _joined(state.identifiers))))

    def check(self, parts: Sequence[Any], like: Any) -> Any:
        """Return a copy of a saved state on the device of `like`, or None if its parts are not valid."""
        sums, identifiers = parts
        if (checked := super().check([sums], like.sums)) is None or not isinstance(identifiers, list | tuple):
            return None
        if not all(isinstance(x, Tensor) and (x.dim(), x.dtype) == (1, torch.int64) for x in identifiers):
            return None
        return SumsOfClusters(checked, _joined([x.to(checked.device, copy=True) for x in identifiers]))

    def announce(self, state: Any) -> Tensor:
        """Return the numbers that a rank sends first: the sums, and the number of identifiers."""
        n = sum(map(len, _joined(state.identifiers)))
        return torch.cat((super().announce(state.sums), state.sums.new_tensor([n])))

    def payload(self, state: Any) -> Tensor:
        """Return the bytes of the identifiers for an all-gather, uint8 `(n,)`."""
        empty = torch.zeros(0, dtype=torch.uint8, device=state.sums.device)
        return torch.cat([empty, *(x.view(torch.uint8) for x in _joined(state.identifiers))])

    def payload_size(self, announced: Tensor) -> int:
        """Return the length of the `payload` of the rank that sent `announced`."""
        return 8 * int(announced[-1])

    def merged(self, announced: Sequence[Tensor], payloads: Sequence[Tensor]) -> Any:
        """Return the merged state of all ranks."""
        # Clone, because a view with another dtype must be aligned to its item size.
        identifiers = [payload.clone().view(torch.int64) for payload in payloads]
        return SumsOfClusters(super().merged([one[:-1] for one in announced], payloads), _joined(identifiers))


def _joined(identifiers: Sequence[Tensor]) -> list[Tensor]:
    """Return the distinct identifiers of all chunks as one chunk; an empty list without chunks."""
    return [distinct(torch.cat(list(identifiers)))] if len(identifiers) > 1 else list(identifiers)


MAX_GROUPS = 10_000
"""Maximum number of groups. With more, no p-value would be significant after adjustment for multiple testing."""

_MAX_SUMS = 2**27  # maximum number of float64 sums (1 GiB)


class NamedSums(NamedTuple):
    """State of sums for G named groups. The name of an unnamed group is its number."""

    names: tuple[str, ...]
    sums: Tensor  # `BinStats.sums` of all groups `(G, ..., F, B)`
    noise_flag: Tensor  # `BinStats.noise_flag` of all groups `(G, ...)`


@dataclass(frozen=True)
class NamedGroupState:
    """Operations on the sums over bins of named groups. Groups with equal names are added."""

    accumulator: EqualWidthBins  # accumulator of the bins of one group, with sums of noise
    shape: tuple[int, ...]  # shape of `BinStats.sums` for one group

    def empty(self, names: Sequence[str] = ()) -> NamedSums:
        """Return sums of 0 for the groups `names`."""
        most = min(MAX_GROUPS, _MAX_SUMS // math.prod(self.shape))
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
        by_group: SumsByGroup[BinStats] = SumsByGroup(self.accumulator, len(places))
        bins = by_group.from_predictions(in_groups(p, numbers, len(places)))
        assert bins.noise_flag is not None  # not None, because the accumulator sums the noise
        return NamedSums(batch.names, bins.sums.detach().to(batch.sums), bins.noise_flag.to(batch.noise_flag))

    def add(self, state: NamedSums, more: NamedSums) -> NamedSums:
        """Return the sum of two states: groups of `state`, followed by the other groups of `more`."""
        total = self.empty(list(dict.fromkeys([*state.names, *more.names])))
        places = {name: k for k, name in enumerate(total.names)}
        for part in (state, more):
            index = torch.tensor([places[name] for name in part.names], dtype=torch.int64, device="cpu")
            total.sums.index_add_(0, index, part.sums)
            total.noise_flag.index_add_(0, index, part.noise_flag)
        return total

    def statistic(self, state: NamedSums) -> BinStats:
        """Return the bins of all groups `(G, ..., B)`, in the order of `state.names`."""
        return self.accumulator.wrap(with_noise_row(state.sums, state.noise_flag))

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
