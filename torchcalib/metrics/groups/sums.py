"""Sums of every group of rows: groups are one more axis in front."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.events import reduce_to_events
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import Cells, Sums, SumsAccumulator, apart_of, with_apart
from torchcalib.ops.segments import cell_sums

S = TypeVar("S", covariant=True)


class CellsAccumulator(SumsAccumulator[S], Protocol[S]):
    """An accumulator that gives the cell of every event, so that groups can be kept apart."""

    def cells(self, p: Predictions) -> Cells:
        """Return the cell and the summands of every event."""


@dataclass(frozen=True)
class SumsByGroup(Generic[S]):
    """Sums as another accumulator takes them, of every group `(G, ..., F, K)`: a cell for each pair of group and cell.

    Attributes:
        accumulator: which sums.
        num_groups: G.
    """

    accumulator: CellsAccumulator[S]
    num_groups: int

    @property
    def with_noise(self) -> bool:
        """Whether there are sums of noise."""
        return with_apart(self.accumulator)

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return `(G, ..., F, K)`."""
        return (self.num_groups, *self.accumulator.shape(task, num_classes))

    def of(self, p: Predictions) -> Sums:
        """Return the sums of every group; `p.groups` has the group of each sample."""
        accumulator: Any = self.accumulator
        if hasattr(accumulator, "of_groups"):  # without a table of the summands of every event
            assert p.groups is not None  # that is what tells groups
            found: Sums = accumulator.of_groups(p, p.groups, self.num_groups)
            return found
        cells = self.accumulator.cells(p)
        place = group_of_events(p, cells.index) * cells.n_cells + cells.index
        sums = cell_sums(place, cells.columns, self.num_groups * cells.n_cells)
        sums = sums.reshape(*sums.shape[:-1], self.num_groups, cells.n_cells).movedim(-2, 0)
        if not self.with_noise:
            return Sums(sums)
        events = None if p.hard else reduce_to_events(p, accumulator.mode)
        return Sums(sums, apart=apart_of(p, sums, events, group_of_events(p, cells.index), self.num_groups))

    def wrap(self, sums: Tensor) -> S:
        """Return `sums` as the statistic they are, groups in front."""
        return self.accumulator.wrap(sums)

    def n_events(self, p: Predictions) -> int:
        """Return the number of events."""
        return self.accumulator.n_events(p)


def group_of_events(p: Predictions, index: Tensor) -> Tensor:
    """Return the group of every event, of which samples may make several, and series of classes as many each."""
    assert p.groups is not None  # that is what tells groups
    groups = p.groups.unsqueeze(-2) if index.dim() > p.groups.dim() else p.groups
    times = index.shape[-1] // max(1, groups.shape[-1])
    return groups if times == 1 else torch.repeat_interleave(groups, times, -1)
