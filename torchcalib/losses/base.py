"""Base class of training penalties as modules, and functions that penalties share."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from inspect import signature
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    Task,
    check_average,
    check_task,
    task_of,
    task_read_as,
    unknown_argument,
    weights_from,
)
from torchcalib.core.batch import Batch, events_of_batch
from torchcalib.core.events import Mode, n_events, reduce_to_events, resolve_mode
from torchcalib.core.inputs import input_format_of, read_input
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.penalties import Options, error

_OPTIONS = InputOptions.__annotations__.keys() - {"weights", "batch_dims"}
"""Input options of modules: weights are given with each batch, and all axes are sample axes."""


class Penalty(Protocol):
    """Interface of differentiable calibration errors. Implementations are frozen dataclasses of their settings."""

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the penalty for each batch element, `(...)`; class-wise for each class or label, `(..., C)`."""

    def of_batch(self, batch: Batch) -> Tensor | None:
        """Return the penalty of a batch of labels in few launches of Triton; None for other batches and devices.

        Invalid rows make it NaN. It has the dtype of the predictions, at least float32.
        """


class EventPenalty(ABC):
    """Base class of penalties that are functions of the events of a batch."""

    mode: Mode
    """Definition of the events."""

    @property
    @abstractmethod
    def options(self) -> Options:
        """Options of the kernels of the penalty."""

    @abstractmethod
    def formula(self, confidence: Tensor, outcome: Tensor, weights: Tensor) -> Tensor:
        """Return the penalty `(...)` for the results of `weighted_events`, `(..., N)`."""

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the penalty for each batch element; see `Penalty.from_predictions`."""
        return self.formula(*weighted_events(p, self.mode))

    def of_batch(self, batch: Batch) -> Tensor | None:
        """Return the penalty of a batch in few launches of Triton; see `Penalty.of_batch`."""
        events = events_of_batch(batch, self.mode, lambda p: weighted_events(p, self.mode))
        if events is None:
            return None
        (confidence, *others), dtype = events, value_dtype(batch)

        def formula(confidence: Tensor) -> Tensor:
            return self.formula(confidence, *others).to(dtype)

        if not self.options.has_kernel(len(confidence), 1):
            return formula(confidence)
        return error(confidence, tuple(others), self.options, dtype, formula)


class PenaltyLoss(nn.Module):
    """Base class of training penalties as modules. The value is to be added to the training loss.

    All axes except the class axis are sample axes. The value is a scalar of dtype float32 or float64, even under
    autocast. It is NaN if no sample has a positive weight, as in `torch.nn.functional.cross_entropy`. Invalid values,
    such as NaN logits and labels out of range, raise an error on the CPU. On other devices and under `torch.compile`,
    they make the result NaN, because a check would synchronise the device in every step.

    Args:
        penalty: The calibration error and its settings.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        whole_weights: Require weights to be whole numbers.
        **options: Options of `torchcalib.functional.InputOptions`, except `weights` and `batch_dims`.

    Example:
        >>> from torchcalib.losses.binned import SoftBins
        >>> penalty = PenaltyLoss(SoftBins("positive", n_bins=15, temperature=0.01, norm="l2"), task="binary")
        >>> penalty(torch.tensor([0.2, 0.7, 0.9]), torch.tensor([0, 1, 1]))
        tensor(0.2123)
    """

    def __init__(
        self,
        penalty: Penalty,
        *,
        task: Task | None = None,
        whole_weights: bool = False,
        **options: Unpack[InputOptions],
    ) -> None:
        super().__init__()
        known = (signature(type(self)).parameters.keys() | _OPTIONS) - {"options"}
        if unknown := [name for name in options if name not in known]:
            raise unknown_argument(unknown[0], known, type(self).__name__)
        task = task_of(task, options.get("num_classes"), options.get("num_labels"))
        self.penalty = penalty
        self.input_format = input_format_of(task, options, whole_weights=whole_weights)

    def forward(
        self, preds: Tensor, target: Tensor, weights: Tensor | None = None, *, sample_weight: Tensor | None = None
    ) -> Tensor:
        """Return the penalty for a batch as a scalar."""
        weights = weights_from(weights, sample_weight)
        is_on_cpu = _is_on_cpu(preds)
        found = None
        if not is_on_cpu and isinstance(weights, Tensor | None):
            found = self.penalty.of_batch(Batch(self.input_format, preds, target, weights))
        if found is not None:
            return found
        p = self.input_format.read(preds, target, weights, batch_shape=(), wait=is_on_cpu)
        value = self.penalty.from_predictions(p)
        return (value.mean() if value.dim() else value).to(p.dtype)

    def extra_repr(self) -> str:
        """Return the penalty, the task and `from_logits` as text, which `repr` includes."""
        return f"{self.penalty}, task={self.input_format.task!r}, from_logits={self.input_format.from_logits}"


def value_dtype(batch: Batch) -> torch.dtype:
    """Return the dtype of the penalty of a batch: that of the predictions, at least float32."""
    return torch.promote_types(batch.preds.dtype, torch.float32)


def weighted_events(p: Predictions, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidences, outcomes and weights, `(..., N)` of dtype `wide_dtype`; class-wise `(..., C, N)`.

    Samples of weight 0 get confidence 0.5 and outcome 0, because NaN would make the gradient NaN.
    """
    events = reduce_to_events(p, mode)
    wide = wide_dtype(events.confidence.device)
    confidence, outcome = events.confidence.to(wide), events.outcome.to(wide)
    if events.weights is None:
        return confidence, outcome, torch.ones_like(confidence)
    absent = in_all_replicates(events.weights == 0, confidence.dim())
    weights: Tensor = torch.broadcast_tensors(events.weights, confidence)[0]  # type: ignore[no-untyped-call]
    return confidence.masked_fill(absent, 0.5), outcome.masked_fill(absent, 0), weights


def event_mode(task: Task, options: Mapping[str, Any], mode: Mode | None) -> Mode:
    """Return the kind of confidence: `mode`, or the default of the task. Raise ValueError for an unsupported `mode`."""
    check_task(task)
    return resolve_mode(task_read_as(task, options), mode)


def evaluate(
    penalty: Penalty,
    mode: Mode,
    preds: Tensor,
    target: Tensor,
    task: Task,
    average: Average | None,
    options: InputOptions,
    per_event: int = 1,
) -> Tensor:
    """Return the penalty for each batch element, `(...)`; class-wise with `average=None` for each class, `(..., C)`.

    Replicate weights are processed a few at a time. `per_event` is the number of values in memory for each event.
    """
    averages = check_average(average, mode == "classwise")
    p = read_input(task, preds, target, options, wait=_is_on_cpu(preds))
    value = by_replicates(penalty.from_predictions, p, n_events(p, mode) * per_event)
    return (value.mean(-1) if averages else value).to(p.dtype)


def _is_on_cpu(preds: object) -> bool:
    """Return True if `preds` is on the CPU or not a tensor. Then checks do not synchronise a device."""
    return not isinstance(preds, Tensor) or preds.device.type == "cpu"
