"""Sums over a batch in plain torch, in few operations.

On a device, starting an operation takes longer than the operation itself.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops import logs
from torchcalib.ops.batch.formula import (
    FIRST_SQUARE,
    N_QUANTITIES,
    SCORES,
    Columns,
    Plan,
)
from torchcalib.ops.segments import LEAST_WEIGHT, MOST_WEIGHT


class _Batch(NamedTuple):
    """Rows with finite confidences in place of those of invalid rows."""

    weight: Tensor  # float64 `(N,)`; 0 for ignored and invalid rows
    n_invalid: Tensor  # number of invalid rows, float64
    events: dict[bool, tuple[Tensor, Tensor]]  # confidence and outcome by `BinRule.of_top`, float64
    scores: Tensor  # `(5, N)` in the order of `SCORES`, finite where the weight is 0; those not needed are undefined


def added(states: Tensor | None, columns: Columns, rows: tuple[Tensor, Tensor] | None, plan: Plan) -> Tensor:
    """Compute `batch.added`; `rows` are scores and top classes of multi-class rows."""
    batch = _binary(columns, plan) if rows is None else _multiclass(columns, *rows, plan)
    weight = batch.weight
    parts = [batch.n_invalid.view(1), weight.sum(0, keepdim=True)]
    parts.append((batch.scores * weight).sum(-1) if plan.scores else weight.new_empty(len(SCORES)))
    for rule, edges in zip(plan.rules, plan.edges, strict=True):
        confidence, outcome = batch.events[rule.of_top]
        index = torch.bucketize(confidence, edges, right=not rule.right)  # as in `segments.bin_index`
        spread = torch.addcmul(confidence, confidence, confidence, value=-1)
        residual = (outcome - confidence).square_()
        terms = torch.stack([weight, confidence, outcome, spread, residual, *[spread, weight] * plan.is_squared])
        terms[1:].mul_(weight)
        if plan.is_squared:
            terms[FIRST_SQUARE].mul_(weight)
        into = weight.new_zeros(N_QUANTITIES, rule.n_bins)
        into.scatter_add_(-1, index.expand(len(terms), -1), terms)
        parts.append(into.view(-1))
    n_new = plan.terms.shape[1] - (0 if states is None else len(states))
    after = plan.factors.new_zeros(n_new) if states is None else pad(states, (n_new, 0)) if n_new else states
    for sums, factors in zip(torch.cat(parts)[plan.terms], plan.factors, strict=True):
        after = torch.addcmul(after, sums, factors)
    return after


def _weighted(columns: Columns, is_invalid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights `(N,)`, a mask of the rows of weight 0 `(N,)`, and the number of invalid rows `()`.

    `is_invalid` is a mask of the rows with invalid values `(N,)`.
    """
    weights, absent = columns.weights, is_invalid
    ignored = None if columns.ignore_index is None else columns.target == columns.ignore_index
    if ignored is not None:
        absent = absent | ignored
    if weights is not None:
        weights = weights.to(torch.float64)
        absent = absent | (weights != weights.clamp(LEAST_WEIGHT, MOST_WEIGHT))
        ignored = weights == 0 if ignored is None else ignored | (weights == 0)
    n_invalid = (absent if ignored is None else absent ^ ignored).sum(dtype=torch.float64)
    return (~absent).to(torch.float64) if weights is None else weights.masked_fill(absent, 0), absent, n_invalid


def _binary(columns: Columns, plan: Plan) -> _Batch:
    from_logits = columns.from_logits
    x, label = columns.values.to(torch.float64), columns.target
    is_invalid = x != (x if from_logits else x.clamp(0, 1))  # True for NaN
    weight, absent, n_invalid = _weighted(columns, is_invalid | (label != label.clamp(0, 1)))
    x, y = x.masked_fill(absent, 0), label.clamp(0, 1).to(torch.float64)
    p = x.sigmoid() if from_logits else x
    events, scores = {False: (p, y)}, dict.fromkeys(SCORES, y)
    if any(rule.of_top for rule in plan.rules) or not plan.scores.isdisjoint(("confidence", "hit")):
        is_one = x > (0 if from_logits else 0.5)
        scores["confidence"] = x.abs().sigmoid() if from_logits else torch.where(is_one, p, 1 - p)
        scores["hit"] = (is_one == y).to(torch.float64)
        events[True] = scores["confidence"], scores["hit"]
    if "squared_error" in plan.scores:
        # (1 - y) p - y (1 - p), without the cancellation in 1 - p
        difference = (1 - y) * p - y * (-x).sigmoid() if from_logits else p - y
        scores["squared_error"] = difference.square()
    if not plan.scores.isdisjoint(("log_prob", "neg_entropy")):
        log_p, log_not_p = logs.binary_log_probs(x, from_logits)
        scores["log_prob"] = torch.where(label == 1, log_p, log_not_p).masked_fill_(absent, 0)
        if "neg_entropy" in plan.scores:
            scores["neg_entropy"] = logs.binary_neg_entropy(log_p, log_not_p)
    return _Batch(weight, n_invalid, events, torch.stack(list(scores.values())) if plan.scores else y)


def _multiclass(columns: Columns, scores: Tensor, top: Tensor, plan: Plan) -> _Batch:
    weight, absent, n_invalid = _weighted(columns, scores[0].isnan())
    scores, hit = scores.masked_fill(absent, 0), (columns.target == top).to(torch.float64)
    whole = torch.cat((scores, hit.unsqueeze(0))) if plan.scores else scores
    return _Batch(weight, n_invalid, {True: (scores[3], hit)}, whole)
