"""Parts that all penalties share: the module, and for penalties of events the function."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchcalib.core.arguments import (
    Average,
    InputOptions,
    NanPolicy,
    Task,
    check_average,
    check_task,
    task_read_as,
)
from torchcalib.core.documentation import arguments_section, document, parameters_of
from torchcalib.core.events import Mode, n_events, reduce_to_events, resolve_mode
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.ops.logs import wide_dtype


class Penalty(Protocol):
    """A differentiable calibration error with its settings; frozen, so that equal penalties share compiled code."""

    def of(self, p: Predictions) -> Tensor:
        """Return the value `(...)`, or `(..., C)` with one for each class or label."""


class PenaltyLoss(nn.Module):
    """A penalty as a module, to be added to the training loss.

    All axes except the class axis are samples. The value is one number, at least float32, also under autocast. It is
    NaN if no sample has weight, as for `torch.nn.functional.cross_entropy`. A bad value (NaN logits, a label out of
    range) is an error on the CPU. On other devices and under `torch.compile` it makes the value NaN instead, because a
    check would make every step wait for the device.

    Args:
        penalty: the calibration error.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        from_logits, ignore_index, positive_classes, class_axis, validate_args, nan_policy: see
            `torchcalib.functional.InputOptions`.
        whole_weights: whether weights must be whole numbers.
    """

    def __init_subclass__(cls, function: Callable[..., Tensor] | None = None) -> None:
        """Document the options that the subclass shares with a function, and with all penalties."""
        own = parameters_of(cls.__init__)
        shared = [p for p in parameters_of(PenaltyLoss.__init__) if p.name not in ("penalty", "whole_weights", "task")]
        document(cls, cls.__doc__, [*own, *shared], entries=arguments_section(function.__doc__ if function else None))

    def __init__(
        self,
        penalty: Penalty,
        *,
        task: Task,
        from_logits: bool = False,
        ignore_index: int | None = None,
        positive_classes: Sequence[int] | None = None,
        class_axis: int | None = None,
        validate_args: bool = True,
        nan_policy: NanPolicy = "raise",
        whole_weights: bool = False,
    ) -> None:
        super().__init__()
        self.penalty = penalty
        self.input_format = InputFormat(
            task,
            from_logits=from_logits,
            ignore_index=ignore_index,
            positive_classes=positive_classes,
            class_axis=class_axis,
            validate_args=validate_args,
            nan_policy=nan_policy,
            whole_weights=whole_weights,
        )

    def forward(self, preds: Tensor, target: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """Return the penalty of a batch, a scalar.

        Args:
            preds: probabilities, or logits with `from_logits=True`: binary `(...)`, else with a class axis.
            target: labels, soft targets or annotator counts; see `torchcalib.functional.nll`.
            weights: one non-negative weight per sample; 0 leaves it out.

        Raises:
            TypeError, ValueError: for invalid input.
        """
        p = self.input_format.read(preds, target, weights, batch_shape=(), wait=_is_on_cpu(preds))
        return self.penalty.of(p).mean().to(p.dtype)

    def extra_repr(self) -> str:
        """Return the penalty and the kind of predictions, for `repr`."""
        return f"{self.penalty}, task={self.input_format.task!r}, from_logits={self.input_format.from_logits}"


def weighted_events(p: Predictions, mode: Mode) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidences, outcomes and weights, in the dtype of sums; rows of weight 0 hold harmless values."""
    events = reduce_to_events(p, mode)
    wide = wide_dtype(events.confidence.device)
    confidence, outcome = events.confidence.to(wide), events.outcome.to(wide)
    if events.weights is None:
        return confidence, outcome, torch.ones_like(confidence)
    absent = in_all_replicates(events.weights == 0, confidence.dim())
    weights: Tensor = torch.broadcast_tensors(events.weights, confidence)[0]  # type: ignore[no-untyped-call]
    return confidence.masked_fill(absent, 0.5), outcome.masked_fill(absent, 0), weights


def event_mode(task: Task, options: Mapping[str, Any], mode: Mode | None) -> Mode:
    """Return the mode, by default the first of the task; raise on one that the task does not have."""
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
    """Return the penalty of events in every batch element; each event needs `per_event` values in memory."""
    classwise = mode == "classwise"
    check_average(average, classwise)
    p = read_input(task, preds, target, options, wait=_is_on_cpu(preds))
    value = by_replicates(penalty.of, p, n_events(p, mode) * per_event)
    return (value.mean(-1) if classwise and average is not None else value).to(p.dtype)


def _is_on_cpu(preds: object) -> bool:
    """Return whether values can be checked without waiting for a device; anything else than a tensor is refused."""
    return not isinstance(preds, Tensor) or preds.device.type == "cpu"
