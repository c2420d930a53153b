"""Accumulators that sum functions of the confidence and outcome of events over cells."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.events import Events, Reduction, n_events, reduce_to_events
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import Cells, Sums, series_shape, sums_of_replicates, weighted
from torchcalib.ops.logs import wide_dtype

S = TypeVar("S", bound=Sums)


@dataclass(frozen=True)
class EventSums(Generic[S]):
    """Sums over cells of quantities of events, each a function of its confidence and outcome. They add, in any order.

    Attributes:
        reduction: what the events are.
    """

    reduction: Reduction

    n_cells: ClassVar[int]

    @property
    @abstractmethod
    def n_quantities(self) -> int:
        """How many quantities are summed."""

    @abstractmethod
    def cell(self, confidence: Tensor) -> Tensor:
        """Return the cell of every event, int64 `(..., N)`."""

    @abstractmethod
    def quantities(self, events: Events) -> Sequence[Tensor]:
        """Return the F summands of every event before weighting, each `(..., N)` in the dtype of sums."""

    def columns(self, events: Events, p: Predictions) -> list[Tensor]:  # noqa: ARG002
        """Return the weighted summands of every event, one tensor for each quantity."""
        return [weighted(x, events.weights, x.dtype) for x in self.quantities(events)]

    def events(self, p: Predictions) -> Events:
        """Return the events of `p`."""
        return reduce_to_events(p, self.reduction)

    @abstractmethod
    def wrap(self, sums: Tensor) -> S:
        """Return sums `(..., F, K)` as the statistic they are."""

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return `(F, K)`, or `(C, F, K)` for C classes apart."""
        return (*series_shape(self.reduction, task, num_classes), self.n_quantities, self.n_cells)

    def of(self, p: Predictions) -> S:
        """Take the sums over the events of `p`."""
        events = self.events(p)
        if not p.replicates or events.weights is None:
            return self.of_events(events, p)
        cell = self.cell(self._wide(events)[0])
        return self.wrap(sums_of_replicates(cell, self.quantities(events), events.weights, self.n_cells))

    @abstractmethod
    def of_events(self, events: Events, p: Predictions) -> S:
        """Take the sums over events of `p`, weighed in one way."""

    def cells(self, p: Predictions) -> Cells:
        """Say in which cell every event counts, and what is counted of it."""
        events = self.events(p)
        cell = self.cell(self._wide(events)[0])
        return Cells(cell, torch.stack(self.columns(events, p), -2), self.n_cells)

    def n_events(self, p: Predictions) -> int:
        """Return the number of events, or of sums where these are more."""
        n = max(1, p.samples[-1])
        return n_events(p, self.reduction) // n * max(n, self.n_quantities * self.n_cells)

    def _wide(self, events: Events) -> tuple[Tensor, Tensor]:
        wide = wide_dtype(events.confidence.device)
        return events.confidence.to(wide), events.outcome.to(wide)
