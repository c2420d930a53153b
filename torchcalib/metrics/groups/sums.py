"""Accumulator of sums per group of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.clusters import MAX_CLUSTERS, ClusteredSums, num_clusters_for
from torchcalib.core.events import reduce_to_events
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import Cells, Sums, SumsAccumulator, has_noise_flag, noise_flag_of
from torchcalib.ops.segments import cell_sums

S = TypeVar("S", covariant=True)


class CellsAccumulator(SumsAccumulator[S], Protocol[S]):
    """Accumulator with a method `cells`, which returns the cell of every event. It is required for sums per group."""

    def cells(self, p: Predictions) -> Cells:
        """Return the cell index and the summands (one per sum) for every event."""


@dataclass(frozen=True)
class SumsByGroup(Generic[S]):
    """Accumulator that computes the sums of another accumulator separately per group, `(G, ..., F, K)`.

    Attributes:
        accumulator: Accumulator for a single group.
        num_groups: Number of groups G.
    """

    accumulator: CellsAccumulator[S]
    num_groups: int

    @property
    def with_noise(self) -> bool:
        """Whether the sums for the noise floor are included."""
        return has_noise_flag(self.accumulator)

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape `(G, ..., F, K)` of the sums, for F sums over K cells."""
        return (self.num_groups, *self.accumulator.shape(task, num_classes))

    def of(self, p: Predictions) -> Sums:
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
        events = None if p.hard else reduce_to_events(p, accumulator.mode)
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

    `Predictions.groups` contains cluster numbers in [0, `MAX_CLUSTERS`), which are merged if G is smaller.
    """

    @classmethod
    def for_shape(cls, accumulator: CellsAccumulator[Any], shape: Sequence[int]) -> "SumsByCluster[Any]":
        """Return an accumulator with the number of clusters that fits sums of `shape` per cluster."""
        return cls(accumulator, num_clusters_for(shape))

    def of(self, p: Predictions) -> Sums:
        """Return the sums `(G, ..., F, K)` per cluster."""
        assert p.groups is not None  # set by `in_groups`
        return super().of(p.in_groups(p.groups * self.num_groups // MAX_CLUSTERS, p.weights, p.n_invalid))

    def wrap(self, sums: Tensor) -> Any:
        """Convert a tensor `(G, ..., F, K)` to `ClusteredSums`."""
        return ClusteredSums(sums, self.accumulator)
