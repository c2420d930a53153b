"""What penalties for training have in common: how a batch is read, and the module around a penalty."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchcalib.core.arguments import Average, InputOptions, NanPolicy, Task, check_task, task_read_as
from torchcalib.core.events import Reduction, reduce_to_events, resolve_reduction
from torchcalib.core.inputs import InputFormat, read_input
from torchcalib.core.predictions import Predictions, by_replicates, in_all_replicates
from torchcalib.ops.logs import wide_dtype


class Penalty(Protocol):
    """A miscalibration of a batch that has a gradient; a frozen value, which says what is measured."""

    def of(self, p: Predictions) -> Tensor:
        """Return the value of predictions, `(...)`, or `(..., C)` for classes that are not averaged."""

    def n_events(self, p: Predictions) -> int:
        """Return how many numbers one way of weighing works on."""


class Claims(NamedTuple):
    """What is claimed with which confidence, and whether it came true, each `(..., N)` of the sums' dtype.

    Rows of weight 0 hold harmless values. Weights are 1 where none were given, and may have axes in front.
    """

    confidence: Tensor
    outcome: Tensor
    weights: Tensor


def claims(p: Predictions, reduction: Reduction) -> Claims:
    """Reduce predictions to claims."""
    events = reduce_to_events(p, reduction)
    wide = wide_dtype(events.confidence.device)
    confidence, outcome = events.confidence.to(wide), events.outcome.to(wide)
    if events.weights is None:
        return Claims(confidence, outcome, torch.ones_like(confidence))
    absent = in_all_replicates(events.weights == 0, confidence.dim())
    return Claims(confidence.masked_fill(absent, 0.5), outcome.masked_fill(absent, 0), events.weights)


def reduction_of(task: Task, options: Mapping[str, Any], reduction: Reduction | None) -> Reduction:
    """Return the reduction asked for, or the usual one of the task that the input is read as; raise on a wrong one."""
    check_task(task)
    return resolve_reduction(task_read_as(task, options), reduction)


def averaged(value: Tensor, reduction: Reduction, average: Average | None) -> Tensor:
    """Average over classes or labels, if there are any and it is asked."""
    return value.mean(-1) if reduction == "classwise" and average is not None else value


def evaluate(penalty: Penalty, task: Task, preds: Tensor, target: Tensor, options: InputOptions) -> Tensor:
    """Read the input and the value; only on the CPU are bad values raised, for elsewhere that waits for the device."""
    p = read_input(task, preds, target, options, wait=may_wait(preds))
    return by_replicates(penalty.of, p, penalty.n_events(p)).to(p.dtype)


def may_wait(preds: object) -> bool:
    """Whether looking at values stops nothing."""
    return not isinstance(preds, Tensor) or preds.device.type == "cpu"


class PenaltyLoss(nn.Module):
    """A penalty as a module, to be added to the loss that a model is trained with.

    Every axis but the class axis is samples: the value is one number, of at least float32, also where autocast makes
    logits half types. It is NaN for a batch of which nothing counts, as that of `torch.nn.functional.cross_entropy` is.
    A bad value (NaN logits, a label out of range) is an error on the CPU; elsewhere, and where the module is compiled,
    it makes the value NaN, so that no step waits for the device.

    Args:
        penalty: what is measured.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        from_logits, ignore_index, positive_classes, class_axis, validate_args, nan_policy: see
            `torchcalib.InputOptions`.
        whole_weights: whether weights must be counts of copies.
    """

    def __init__(
        self,
        penalty: Penalty,
        *,
        task: Task,
        from_logits: bool = False,
        ignore_index: int | None = None,
        positive_classes: Sequence[int] | None = None,
        class_axis: int = -1,
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
            target: labels, soft targets or counts of votes; see `torchcalib.nll`.
            weights: one non-negative weight per sample; 0 leaves it out.

        Raises:
            TypeError, ValueError: for bad input; the message says what must hold.
        """
        p = self.input_format.read(preds, target, weights, batch_shape=(), wait=may_wait(preds))
        return self.penalty.of(p).to(p.dtype)

    def extra_repr(self) -> str:
        """Say what is measured, and of what."""
        return f"{self.penalty}, task={self.input_format.task!r}, from_logits={self.input_format.from_logits}"
