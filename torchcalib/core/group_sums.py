"""Accumulator of sums per group of rows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.clusters import (
    MAX_CLUSTERS,
    ClusteredSums,
    cluster_numbers,
    distinct,
    distinct_in,
    num_clusters_for,
    number_of,
)
from torchcalib.core.events import reduce_to_events
from torchcalib.core.predictions import Predictions
from torchcalib.core.state import SumState
from torchcalib.core.sums import Cells, Sums, SumsAccumulator, has_noise_flag, noise_flag_of
from torchcalib.ops.segments import cell_sums

S = TypeVar("S", covariant=True)


class CellsAccumulator(SumsAccumulator[S], Protocol[S]):
    """Accumulator with a method `cells`, which returns the cell of every event. It is required for sums per group."""

    def cells(self, p: Predictions) -> Cells:
        """Return the cell index and the summands (one per sum) for every event."""


@dataclass(frozen=True)
class SumsByGroup(Generic[S]):
    """Accumulator that computes the sums of another accumulator separately per group, `(G, ..., F, K)`."""

    accumulator: CellsAccumulator[S]  # of a single group
    num_groups: int

    @property
    def with_noise(self) -> bool:
        """Whether the sums for the noise floor are included."""
        return has_noise_flag(self.accumulator)

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
        return self.accumulator.wrap(sums)

    def n_events(self, p: Predictions) -> int:
        """Return the number of events in a batch."""
        return self.accumulator.n_events(p)


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

    @classmethod
    def for_shape(cls, accumulator: CellsAccumulator[Any], shape: Sequence[int]) -> "SumsByCluster[Any]":
        """Return an accumulator with the number of clusters that fits sums of `shape` per cluster."""
        return cls(accumulator, num_clusters_for(shape))

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
