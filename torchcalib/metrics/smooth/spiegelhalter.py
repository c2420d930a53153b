"""Spiegelhalter's test of calibration."""

import math
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Unpack, get_args

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, check_choice, task_read_as
from torchcalib.core.events import Events, Reduction, resolve_reduction
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import Sums
from torchcalib.metrics.smooth.reading import EventMetric, EventReading, EventSums, kept_apart

_EVENTS = 2**13  # of a series that are summed at a time: by one thread, in memory that is at hand

SpiegelhalterComponent = Literal["z", "p_value"]


class SpiegelhalterTest(NamedTuple):
    """Spiegelhalter's test.

    Attributes:
        z: how many standard deviations the Brier score lies above what a calibrated model has.
        p_value: how often chance alone would take |z| that far in a calibrated model.
    """

    z: Tensor
    p_value: Tensor


@dataclass(frozen=True)
class SpiegelhalterRecipe(EventSums[Sums]):
    """Weight, excess of the Brier score over its expectation, and the variance of that."""

    n_cells = 1

    @property
    def n_quantities(self) -> int:
        """Return 3."""
        return 3

    def cell(self, confidence: Tensor) -> Tensor:
        """Return the only cell."""
        return torch.zeros_like(confidence, dtype=torch.int64)

    def quantities(self, events: Events) -> tuple[Tensor, ...]:
        """Return 1, (y - p) (1 - 2 p), (1 - 2 p)^2 p (1 - p), with 1 - p taken from the events where they have it."""
        p, y = self._wide(events)
        not_p = 1 - p if events.complement is None else events.complement
        lever = not_p - p
        return torch.ones_like(p), (y * not_p - (1 - y) * p) * lever, lever.square() * p * not_p

    def events(self, p: Predictions) -> Events:
        """Return the events of `p`, with complements if P(y=0) is known more exactly than as 1 - P(y=1)."""
        events = super().events(p)
        if p.absent is not None:  # products of NaN have NaN derivatives, even times a weight of 0
            per_class = p.task == "multiclass" and self.reduction == "classwise"
            absent = p.absent.unsqueeze(-2) if per_class else p.absent
            events = replace(events, confidence=events.confidence.masked_fill(absent, 0.5))
        if p.task == "multiclass" or not (p.from_logits or p.rest is not None):
            return events
        if self.reduction == "top_label":
            return replace(events, complement=torch.where(p.predicts_one, p.not_probs, p.probs))
        return replace(events, complement=p.not_probs)

    def of_events(self, events: Events, p: Predictions) -> Sums:
        """Take the sums over events of `p`, a chunk of them at a time."""
        totals: list[Tensor] = []
        for start in range(0, max(1, events.confidence.shape[-1]), _EVENTS):
            columns = self.columns(events.map(itemgetter((..., slice(start, start + _EVENTS)))), p)
            sums = [column.sum(-1, keepdim=True) for column in columns]
            totals = [total + more for total, more in zip(totals, sums, strict=True)] if totals else sums
        return self.wrap(torch.stack(totals, -2))

    def wrap(self, sums: Tensor) -> Sums:
        """Return `sums` as `Sums`."""
        return Sums(sums)


def spiegelhalter_from_sums(s: Sums) -> Tensor:
    """The z value and its p-value, the fields of `SpiegelhalterTest`, as `(..., 2)`."""
    _, excess, variance = s.sums.squeeze(-1).unbind(-1)
    z = excess / variance.sqrt()
    return torch.stack((z, torch.erfc(z.abs() / math.sqrt(2))), -1)


def spiegelhalter(
    preds: Tensor,
    target: Tensor,
    *,
    task: Task,
    reduction: Reduction | None = None,
    **options: Unpack[InputOptions],
) -> SpiegelhalterTest:
    """Spiegelhalter's test of calibration, by the Brier score: what it is, and what it should be.

    z = sum (y - p) (1 - 2 p) / sqrt(sum (1 - 2 p)^2 p (1 - p)), about standard normal for a calibrated model. Above 0
    the score is worse than the probabilities claim (mostly over-confident), below 0 better. Errors on both sides of
    1/2 can cancel, so a small |z| is no proof of calibration.

    Args:
        preds: probabilities (or logits): binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: labels. (A soft target's variance is unknown.)
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        reduction: what the confidence is of; see `ece`. Class-wise there is a test for each class or label, and no
            average: p-values have none.
        **options: see `torchcalib.InputOptions`. `weights` count as copies, of independent samples; with others than
            whole numbers of samples the p-value is of a sample of that size.

    Returns:
        A `SpiegelhalterTest` of `(...)`, or `(..., C)` for classes, in the dtype of `preds` (at least float32). Where
        every probability is 0, 1/2 or 1 nothing can vary: z is +inf, and the p-value 0, if one of 0 or 1 was wrong, and
        else NaN, as without data.

    Raises:
        TypeError, ValueError: for bad input; the message says what must hold.

    Gradient:
        In the confidences, where z is finite.

    Source:
        Spiegelhalter: Probabilistic prediction in patient management and clinical trials (Statistics in Medicine 1986).

    Example:
        >>> spiegelhalter(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]), task="binary")
        SpiegelhalterTest(z=tensor(-0.8296), p_value=tensor(0.4068))
    """
    read_as = task_read_as(task, options)
    recipe = SpiegelhalterRecipe(resolve_reduction(read_as, reduction))
    reading = EventReading(read_as, recipe, kept_apart(task, reduction, options), hard_targets=True)
    return SpiegelhalterTest(*reading.evaluate(spiegelhalter_from_sums, task, preds, target, options).unbind(-1))


class Spiegelhalter(EventMetric[Sums]):
    """Spiegelhalter's test, streamed in 3 sums (for each class); see `spiegelhalter`.

    Args:
        component: `"z"` or `"p_value"`: what `compute` returns.
        **options: those of `EventMetric`, but for `average`: every class keeps its own.
    """

    unit = "standard deviations"
    question = "is the Brier score what it should be if the probabilities were right"
    source = "Spiegelhalter, Statistics in Medicine 1986"
    higher_is_better = None  # z is best at 0
    plot_lower_bound = None
    plot_upper_bound = None
    hard_targets = True

    def __init__(
        self,
        *,
        task: Task,
        component: SpiegelhalterComponent = "z",
        reduction: Reduction | None = None,
        **options: Any,
    ) -> None:
        check_choice("component", component, get_args(SpiegelhalterComponent))
        average = kept_apart(task, reduction, options)
        super().__init__(SpiegelhalterRecipe, task=task, reduction=reduction, average=average, **options)
        self.component = component
        if component == "p_value":
            self.perfect, self.unit = 1.0, "probability"  # type: ignore[misc]

    def _value(self, statistic: Sums) -> Tensor:
        return getattr(self._test(statistic), self.component)  # type: ignore[no-any-return]

    def test(self) -> SpiegelhalterTest:
        """Return z and its p-value, over all ranks if `torch.distributed` is running."""
        return self._test(self._synced_statistic())

    def _test(self, sums: Sums) -> SpiegelhalterTest:
        return SpiegelhalterTest(*self.reading.read(spiegelhalter_from_sums, sums).unbind(-1))
