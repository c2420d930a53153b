"""From predictions to sums over events, and from those to a value: what smECE and Spiegelhalter's z have in common."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    NanPolicy,
    Task,
    check_average,
    count_of_outputs,
    task_read_as,
)
from torchcalib.core.events import Events, Reduction, n_events, reduce_to_events, resolve_reduction
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import Predictions, by_replicates
from torchcalib.core.sums import Cells, Sums, series_shape, sums_of_replicates, weighted
from torchcalib.metrics.base import StreamingMetric
from torchcalib.ops.logs import wide_dtype

S = TypeVar("S", bound=Sums)

_MOST = 2**22  # numbers that the series read at a time hold


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


def _series(events: Events, most: int) -> Iterator[Events]:
    """Yield at most `most` batch elements at a time, in order, with a single batch axis."""
    shape = events.confidence.shape
    flat = events.map(lambda x: x.expand(shape).reshape(-1, shape[-1]))
    for start in range(0, len(flat.confidence), most):
        yield flat.map(itemgetter(slice(start, start + most)))


def kept_apart(task: Task, reduction: Reduction | None, options: Mapping[str, Any]) -> Average | None:
    """Return the `average` of a metric that never averages over classes or labels.

    Raises:
        TypeError: if `options` has an `average`, which such a metric does not take.
    """
    if "average" in options:
        raise TypeError(
            f"`average` must not be given, got {options['average']!r}. Each class or label keeps a value of its own."
        )
    return None if resolve_reduction(task_read_as(task, options), reduction) == "classwise" else "macro"


@dataclass(frozen=True)
class EventReading(Generic[S]):
    """From sums over events to a value.

    Attributes:
        task: that predictions are one of once they are read.
        recipe: what is summed.
        average: `"macro"`, or None for a value for each class.
        hard_targets: whether the reading takes labels only.
    """

    task: Task
    recipe: EventSums[S]
    average: Average | None = "macro"
    hard_targets: bool = False

    def __post_init__(self) -> None:
        check_average(self.average, self.classwise)

    @property
    def classwise(self) -> bool:
        """Whether there is a value for each class or label."""
        return self.recipe.reduction == "classwise"

    @property
    def averages(self) -> bool:
        """Whether the values of classes are averaged."""
        return self.classwise and self.average is not None

    def read(self, from_sums: Callable[[S], Tensor], statistic: S) -> Tensor:
        """Read the value `(..., *)` of values `(*)` for a series; classes are averaged if asked."""
        return self.averaged(from_sums(statistic), statistic.sums.dim() - 3)

    def averaged(self, values: Tensor, axis: int) -> Tensor:
        """Average values over the axis of the classes, if asked."""
        return values.mean(axis) if self.averages else values

    def evaluate(
        self, from_sums: Callable[[S], Tensor], task: Task, preds: Tensor, target: Tensor, options: InputOptions
    ) -> Tensor:
        """Read the input, sum over it, and read the value of each series, a few series at a time."""
        p = read_input(task, preds, target, options, hard_targets=self.hard_targets)

        def value_of(p: Predictions) -> Tensor:
            if p.replicates and p.weights is not None:
                return self.read(from_sums, self.recipe.of(p))
            events = self.recipe.events(p)
            *lead, n = events.confidence.shape
            most = max(1, _MOST // max(1, n, self.recipe.n_quantities * self.recipe.n_cells))
            if not lead or math.prod(lead) <= most:
                return self.read(from_sums, self.recipe.of_events(events, p))
            values = torch.cat([from_sums(self.recipe.of_events(some, p)) for some in _series(events, most)])
            return self.averaged(values.reshape(*lead, *values.shape[1:]), len(lead) - 1)

        return by_replicates(value_of, p, self.recipe.n_events(p)).to(p.dtype)


class EventMetric(StreamingMetric[S]):
    """A reading of sums over events, over a stream: the state is constant, and the value that of one call over all.

    Args:
        recipe: makes the accumulator specification for a reduction. Passed by subclasses.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_classes: C of a multi-class task; needed with `reduction="classwise"`, else only checked.
        num_labels: L of a multi-label task; needed.
        from_logits, ignore_index, positive_classes, class_axis, validate_args, nan_policy: see
            `torchcalib.InputOptions`.
        reduction, average: see the function of the same name.
        batch_shape: leading axes to keep apart, one value each; all other axes but the class axis are samples.
        **kwargs: those of `torchmetrics.Metric`.
    """

    perfect = 0.0
    hard_targets: ClassVar[bool] = False
    """Whether the reading takes labels only."""

    def __init__(
        self,
        recipe: Callable[[Reduction], EventSums[S]],
        /,
        *,
        task: Task,
        num_classes: int | None = None,
        num_labels: int | None = None,
        from_logits: bool = False,
        reduction: Reduction | None = None,
        average: Average | None = "macro",
        ignore_index: int | None = None,
        positive_classes: Sequence[int] | None = None,
        class_axis: int = -1,
        batch_shape: tuple[int, ...] = (),
        validate_args: bool = True,
        nan_policy: NanPolicy = "raise",
        **kwargs: Any,
    ) -> None:
        read_as = task_read_as(task, {"positive_classes": positive_classes})
        input_format = InputFormat(
            task,
            from_logits=from_logits,
            ignore_index=ignore_index,
            positive_classes=positive_classes,
            class_axis=class_axis,
            num_classes=count_of_outputs(task, num_classes, num_labels),
            validate_args=validate_args,
            nan_policy=nan_policy,
            hard_targets=self.hard_targets,
        )
        reading = EventReading(read_as, recipe(resolve_reduction(read_as, reduction)), average, self.hard_targets)
        super().__init__(input_format, reading.recipe, batch_shape, **kwargs)
        self.reading = reading
