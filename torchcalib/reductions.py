"""`Predictions` to `Events`: what is claimed with which confidence, and whether it came true.

A reduction adds an axis or takes one away, never a branch further up: class-wise values come from the code of the
scalar, with classes as one more batch axis.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchcalib.kernels import row_stats
from torchcalib.predictions import Predictions, Task

Reduction = Literal["positive_class", "top_label", "classwise"]


@dataclass(frozen=True, eq=False)
class Events:
    """Claims with a confidence each, and their outcomes.

    Attributes:
        confidence: probability in [0, 1] given to the event, `(..., N)`.
        outcome: 1 if it came true, 0 if not; a share of votes for soft targets. `(..., N)`, of any real dtype.
        weights: broadcastable to `confidence`, or None for all ones. 0 marks a row that is left out.
        ecd: entropic calibration difference of the claim, in nats `(..., N)`; None unless asked for.
    """

    confidence: Tensor
    outcome: Tensor
    weights: Tensor | None
    ecd: Tensor | None = None


def positive_class(p: Predictions, with_ecd: bool = False) -> Events:
    """P(y=1) and y, for every sample (multi-label: of every label, `(..., L, N)`)."""
    # Columns as they were given: who sums them widens, one by one.
    confidence = p.probs if p.from_logits else p.given.to(p.dtype)
    return Events(confidence, p.given_target, p.weights, p.ecd if with_ecd else None)


def top_label(p: Predictions, with_ecd: bool = False) -> Events:
    """max_k q_k and whether that class is the true one; the first maximum on ties.

    With soft targets the outcome is the share of votes for the class. The ECD is that of the whole prediction.
    """
    if p.task == "multiclass" and p.soft:
        top = p.values.argmax(-1, keepdim=True)
        confidence, outcome = p.probs.gather(-1, top).squeeze(-1), p.target.gather(-1, top).squeeze(-1)
        outcome = outcome.to(confidence.dtype)
    elif p.task == "multiclass":
        confidence = p.rows.confidence
        outcome = p.target == p.rows.top
    else:
        claims_one = p.values > (0 if p.from_logits else 0.5)  # on a tie class 0, the first, is claimed
        confidence = p.values.abs().sigmoid() if p.from_logits else torch.where(claims_one, p.values, 1 - p.values)
        outcome = torch.where(claims_one, p.target, 1 - p.target)
    return Events(confidence, outcome, p.weights, p.ecd if with_ecd else None)


def classwise(p: Predictions, with_ecd: bool = False) -> Events:
    """q_k and 1[h = k] for every class k (multi-label: every label), as `(..., C, N)`: one against the rest."""
    if p.task == "multilabel":
        return positive_class(p, with_ecd)
    one_hot = p.target if p.soft else _one_hot(p.target, p.num_classes, p.dtype)
    ecd = None
    if with_ecd:
        log_q, log_rest = row_stats.one_vs_rest_log_probs(p.probs, p.log_probs.to(p.probs.dtype))
        ecd = row_stats.binary_neg_entropy(log_q, log_rest) + row_stats.binary_cross_entropy(log_q, log_rest, one_hot)
        ecd = ecd.transpose(-1, -2)
    weights = None if p.weights is None else p.weights.unsqueeze(-2)
    return Events(p.probs.transpose(-1, -2), one_hot.transpose(-1, -2), weights, ecd)


@dataclass(frozen=True, eq=False)
class Scores:
    """Claims by the number that puts them in order.

    Attributes:
        score: probability of the event, or with `from_logits` its log-odds, which do not saturate. `(..., N)`, in the
            narrowest dtype that holds it as it was given.
        outcome: uint8 labels, or shares of votes in the dtype of `score`. `(..., N)`.
        from_logits: whether `score` is log-odds.
    """

    score: Tensor
    outcome: Tensor
    from_logits: bool


def reduce_to_scores(p: Predictions, reduction: Reduction) -> Scores:
    """Apply a reduction that `resolve_reduction` has let through, to what an order is made of.

    Binary and multi-label logits stay as they are. Other confidences are probabilities: of logits in float64.
    """
    if p.task == "multiclass" and reduction == "classwise":
        classes = torch.arange(p.num_classes, device=p.values.device).unsqueeze(-1)
        outcome = p.target.transpose(-1, -2) if p.soft else p.target.unsqueeze(-2) == classes
        scores = Scores(p.probs.transpose(-1, -2), outcome, False)
    elif p.task == "multiclass" or (reduction == "top_label" and not p.from_logits):
        events = top_label(p)
        scores = Scores(events.confidence, events.outcome, False)
    elif reduction == "top_label":
        scores = Scores(p.values.abs().to(p.dtype), top_label(p).outcome, True)
    else:
        scores = Scores(p.given.to(p.dtype), p.given_target, p.from_logits)
    return Scores(scores.score, scores.outcome.to(torch.uint8 if p.hard else scores.score.dtype), scores.from_logits)


def _one_hot(target: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    classes = torch.arange(num_classes, device=target.device)
    return (target.unsqueeze(-1) == classes).to(dtype)


_REDUCTIONS: dict[Task, dict[Reduction, Callable[[Predictions, bool], Events]]] = {
    "binary": {"positive_class": positive_class, "top_label": top_label},
    "multiclass": {"top_label": top_label, "classwise": classwise},
    "multilabel": {"classwise": classwise},
}


def reductions_of(task: Task) -> tuple[Reduction, ...]:
    """Return the reductions that a task offers, the usual one first."""
    return tuple(_REDUCTIONS[task])


def resolve_reduction(task: Task, reduction: Reduction | None) -> Reduction:
    """Return the reduction asked for, or the task's usual one (its first) for None; raise if the task has no such."""
    offered = _REDUCTIONS[task]
    if reduction is None:
        return next(iter(offered))
    if reduction not in offered:
        raise ValueError(
            f"`reduction` must be one of {', '.join(map(repr, offered))} for task={task!r}, got {reduction!r}."
        )
    return reduction


def n_events(p: Predictions, reduction: Reduction) -> int:
    """Return how many events a reduction makes of the samples."""
    return p.given.numel() if reduction == "classwise" else p.samples.numel()


def reduce_to_events(p: Predictions, reduction: Reduction, with_ecd: bool = False) -> Events:
    """Apply a reduction that `resolve_reduction` has let through."""
    return _REDUCTIONS[p.task][reduction](p, with_ecd)
