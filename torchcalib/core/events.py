"""Conversion of predictions to binary events, each with a confidence and an outcome.

A mode defines the events. Class-wise events have the classes as one more batch axis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from torchcalib.core.arguments import Task, check_count, check_flag, check_task
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.core.predictions import Predictions
from torchcalib.io.errors import shown
from torchcalib.ops import logs
from torchcalib.ops.operation import is_plain


@dataclass(frozen=True)
class TopK:
    """Event that the true class is among the k most probable classes, as the `mode` of a multi-class metric.

    The confidence is the sum of the k largest probabilities. The outcome is 1 if the true class is one of these
    classes. For soft targets, the outcome is the sum of their target probabilities. Ties for the k-th rank go to the
    classes with the lower index. `TopK(1)` is "top_label". With k = C, confidence and outcome are 1.

    Args:
        k: number of classes, from 1 to C.
        only: whether to use only the k-th most probable class.

    Reference:
        Gupta et al.: Calibration of Neural Networks using Splines (ICLR 2021), sec. 2: within-top-r calibration;
        r-th top-label calibration with `only=True`.

    Example:
        >>> import torch
        >>> from torchcalib.functional import ece
        >>> preds = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]])
        >>> ece(preds, torch.tensor([1, 0]), task="multiclass", mode=TopK(2))
        tensor(0.1500)
    """

    k: int
    only: bool = False

    def __post_init__(self) -> None:
        check_count("k", self.k)
        check_flag("only", self.only)


NamedMode = Literal["positive", "top_label", "classwise"]
Mode = NamedMode | TopK


@dataclass(frozen=True, eq=False)
class Events:
    """Binary events with their predicted probabilities."""

    confidence: Tensor  # predicted probability of the event in [0, 1], `(..., N)`
    outcome: Tensor  # 1 if the event occurred, else 0; a probability for soft targets. `(..., N)`, any real dtype.
    weights: Tensor | None  # Broadcastable to `confidence`, or None for 1. Rows with weight 0 are ignored.
    ecd: Tensor | None = None  # entropic calibration difference (ECD) in nats `(..., N)`; None unless requested
    complement: Tensor | None = None  # 1 - `confidence`, exact where `confidence` rounds to 1; None unless requested

    def map(self, function: Callable[[Tensor], Tensor]) -> "Events":
        """Return events with `function` applied to each tensor that is not None."""
        parts = (self.confidence, self.outcome, self.weights, self.ecd, self.complement)
        return Events(*(None if part is None else function(part) for part in parts))  # type: ignore[arg-type]


def positive_class(p: Predictions) -> Events:
    """Return the events y=1 with confidence P(y=1), `(..., N)`, or multi-label `(..., L, N)`."""
    # Keep the dtype of the input: `weighted` converts each column to float64.
    confidence = p.probs if p.from_logits else p.input_preds.to(p.dtype)
    return Events(confidence, p.input_target, p.weights)


def top_label(p: Predictions) -> Events:
    """Return the event that the most probable class is the true class, for each sample. Ties go to the first class.

    The confidence is max_k q_k. For soft targets, the outcome is the target probability of this class.
    """
    if p.task == "multiclass" and p.soft:
        top = p.values.argmax(-1, keepdim=True)
        confidence, outcome = p.probs.gather(-1, top).squeeze(-1), p.target.gather(-1, top).squeeze(-1)
        outcome = outcome.to(confidence.dtype)
    elif p.task == "multiclass":
        rows = p.rows
        confidence, outcome = rows.confidence, p.input_target == rows.top
    else:
        confidence = p.values.abs().sigmoid() if p.from_logits else torch.where(p.predicts_one, p.values, p.not_probs)
        if p.has_labels:
            outcome = (p.input_target == 1) == p.predicts_one
        else:
            outcome = torch.where(p.predicts_one, p.target, 1 - p.target)
    return Events(confidence, outcome, p.weights)


def top_k(p: Predictions, which: TopK) -> Events:
    """Return the events of a `TopK`."""
    from torchcalib.ops.largest import largest

    k = which.k
    _check_k(p, which)
    if isinstance(p.input_preds, LinearLogits):
        probabilities, classes = p.input_preds.largest(k, p.zero_weight)
        is_label = classes == p.target.unsqueeze(-1)
        if which.only:
            return Events(probabilities[..., -1], is_label[..., -1], p.weights)
        return Events(probabilities.sum(-1).clamp(max=1), is_label.any(-1), p.weights)
    if p.input_preds.dtype != p.dtype and not is_plain(p.input_preds):
        p = p.with_values(p.input_preds.to(p.dtype))  # rounds the sum of gradients to 16 bits, not each of them
    if p.soft:
        entries = p.values.topk(k, -1).values
        outcome = _soft_outcome(p, entries, which)
    else:
        entries, rank = largest(p.input_preds.detach(), p.input_target, k, from_logits=p.from_logits)
        outcome = _hard_outcome(rank, which)
        if not is_plain(p.input_preds):  # `p.values` replaces NaN where the weight is 0, whose gradient would be NaN
            entries = p.values.topk(k, -1).values
    if p.from_logits and p.soft:
        mass = p.probs.topk(k, -1).values
    elif p.from_logits:  # q_j = q_1 exp(z_j - z_1) for sorted logits z, with q_1 from `p.rows`
        mass = p.rows.confidence.unsqueeze(-1) * (entries - entries[..., :1]).to(p.rows.confidence.dtype).exp()
    else:
        mass = entries.to(logs.wide_dtype(entries.device))
    if which.only:
        confidence = mass[..., -1]
    elif k == p.num_classes:  # exactly 1 without rounding error; the empty sum is part of the autograd graph
        confidence = 1 + mass[..., :0].sum(-1)
    else:
        confidence = mass.sum(-1).clamp(max=1)
    return Events(confidence, outcome, p.weights)


def _check_k(p: Predictions, which: TopK) -> None:
    if which.k > p.num_classes:
        raise ValueError(f"`mode` must be TopK(k) with k of at most the {p.num_classes} classes, got {which}.")


def _hard_outcome(rank: Tensor, which: TopK) -> Tensor:
    """Return whether the class with a rank, counted from 0, belongs to the classes of a `TopK`."""
    return rank == which.k - 1 if which.only else rank < which.k


def _soft_outcome(p: Predictions, entries: Tensor, which: TopK) -> Tensor:
    """Return the sum of soft targets over the classes of a `TopK` `(..., N)`, from the k largest predictions."""
    values, last = p.values.detach(), entries.detach()[..., -1:]
    # rank of each class that is tied with the k-th largest value, counted from 1
    ties = (values == last).to(torch.int32).cumsum(-1) + (values > last).sum(-1, keepdim=True)
    chosen = (values == last) & (ties == which.k)
    if not which.only:
        chosen = (values > last) | ((values == last) & (ties <= which.k))
    return p.target.masked_fill(~chosen, 0).sum(-1)


def classwise(p: Predictions) -> Events:
    """Return the one-vs-rest events of all classes or labels `(..., C, N)`, with outcome 1 for the true class."""
    if p.task == "multilabel":
        return positive_class(p)
    weights = None if p.weights is None else p.weights.unsqueeze(-2)
    return Events(p.probs.transpose(-1, -2), _outcomes_of_classes(p).to(p.dtype), weights)


def reduce_to_scores(p: Predictions, mode: Mode) -> tuple[Tensor, Tensor]:
    """Convert predictions to scores and outcomes `(..., N)` of the events of a mode, for rank-based metrics.

    A score is the probability of the event, or for logits its log-odds, which do not saturate. The dtype is that of the
    input, at least float32. Only multi-class logits are converted, to float64 log-odds; other logits are log-odds
    already. Outcomes are uint8 labels, or probabilities in the dtype of the scores.
    """
    from torchcalib.ops.labelled import most_probable

    if p.task == "multiclass" and p.from_logits:
        score, outcome = _log_odds_of_classes(p, mode)
    elif p.task == "multiclass" and mode == "classwise":
        score, outcome = p.probs.transpose(-1, -2), _outcomes_of_classes(p)
    elif mode == "top_label" and _is_simple(p):
        score, outcome = most_probable(p.input_preds, p.input_target)
    elif p.task == "multiclass" or (mode == "top_label" and not p.from_logits):
        events = reduce_to_events(p, mode)
        score, outcome = events.confidence, events.outcome
        if p.task == "multiclass" and mode == "top_label":  # an entry of the input, unlike a sum or 1 - p
            score = score.to(p.dtype)
    elif mode == "top_label":
        score, outcome = p.values.abs().to(p.dtype), top_label(p).outcome
    else:
        score, outcome = p.input_preds.to(p.dtype), p.input_target
    return score, outcome.to(torch.uint8 if p.has_labels else score.dtype)


def _is_simple(p: Predictions) -> bool:
    """Return whether `most_probable` is applicable: binary probabilities and labels on the CPU, without gradient."""
    simple = p.task != "multiclass" and not p.from_logits and p.has_labels and p.complement is None
    plain = simple and p.input_preds.is_cpu and is_plain(p.input_preds)
    return plain and p.input_preds.dtype in (torch.float32, torch.float64)


def _log_odds_of_classes(p: Predictions, mode: Mode) -> tuple[Tensor, Tensor]:
    """Return the log-odds and outcomes of the events, each `(..., N)` or `(..., C, N)`, from multi-class logits."""
    from torchcalib.ops.largest import largest
    from torchcalib.ops.log_odds import log_odds

    if mode == "classwise":
        return log_odds(p.input_preds).transpose(-1, -2), _outcomes_of_classes(p)
    which = mode if isinstance(mode, TopK) else TopK(1)
    _check_k(p, which)
    if isinstance(p.input_preds, LinearLogits):
        events = reduce_to_events(p, mode)
        return events.confidence.logit(), events.outcome
    if which.k == 1:
        top = (p.values.detach().argmax(-1) if p.soft else p.rows.top).unsqueeze(-1)
        outcome = p.target.gather(-1, top).squeeze(-1) if p.soft else p.target == top.squeeze(-1)
        return log_odds(p.input_preds, top), outcome
    entries, classes = p.values.detach().topk(which.k, -1)
    members = classes[..., -1:] if which.only else classes
    if p.soft:
        return log_odds(p.input_preds, members), _soft_outcome(p, entries, which)
    _, rank = largest(p.input_preds.detach(), p.input_target, which.k, from_logits=True)
    return log_odds(p.input_preds, members), _hard_outcome(rank, which)


def _outcomes_of_classes(p: Predictions) -> Tensor:
    """Return one-hot labels or soft targets with the class axis before the samples, `(..., C, N)`."""
    if p.soft:
        return p.target.transpose(-1, -2)
    return p.target.unsqueeze(-2) == torch.arange(p.num_classes, device=p.values.device).unsqueeze(-1)


_MODES: dict[Task, dict[NamedMode, Callable[[Predictions], Events]]] = {
    "binary": {"positive": positive_class, "top_label": top_label},
    "multiclass": {"top_label": top_label, "classwise": classwise},
    "multilabel": {"classwise": classwise},
}


def modes_of(task: Task) -> tuple[NamedMode, ...]:
    """Return the names of the modes that a task supports, with the default mode first."""
    return tuple(_MODES[task])


def resolve_mode(task: Task, mode: Mode | None, modes: Sequence[NamedMode] | None = None) -> Mode:
    """Return `mode`, or the default (first) mode for None. Raise ValueError if it is not supported.

    If `modes` is None, they are `modes_of(task)`.
    """
    check_task(task)
    offered = modes_of(task) if modes is None else modes
    if mode is None:
        return next(iter(offered))
    if isinstance(mode, TopK) and task == "multiclass":
        return mode
    if mode not in offered:
        names = ", ".join(map(repr, offered)) + (" or TopK(k)" if task == "multiclass" else "")
        raise ValueError(f"`mode` must be one of {names} for task={task!r}, got {shown(mode)}.")
    return mode


def n_events(p: Predictions, mode: Mode) -> int:
    """Return the number of events: one per sample, or one per sample and class for "classwise"."""
    return p.input_preds.numel() if mode == "classwise" else p.samples.numel()


def reduce_to_events(p: Predictions, mode: Mode, with_ecd: bool = False) -> Events:
    """Convert predictions to the events of a mode, which must be supported by the task.

    `with_ecd` adds the entropic calibration difference (ECD): of each class against the rest if the mode is
    "classwise", otherwise of all class probabilities.
    """
    events = top_k(p, mode) if isinstance(mode, TopK) else _MODES[p.task][mode](p)
    if not with_ecd:
        return events
    if mode != "classwise" or p.task == "multilabel":
        return replace(events, ecd=p.ecd)
    log_q, log_rest = (x.transpose(-1, -2) for x in logs.one_vs_rest_log_probs(p.probs, p.log_probs.to(p.probs.dtype)))
    cross_entropy = logs.binary_cross_entropy(log_q, log_rest, events.outcome)
    return replace(events, ecd=logs.binary_neg_entropy(log_q, log_rest) + cross_entropy)
