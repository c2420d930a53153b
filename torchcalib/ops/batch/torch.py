"""Sums over a batch in plain torch, in few operations: on a device, starting an operation takes longer than its work."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops import logs
from torchcalib.ops.batch.formula import N_QUANTITIES, SCORES, Columns, Plan, Rule
from torchcalib.ops.segments import bin_index
from torchcalib.ops.softmax_stats import Rows


class _Batch(NamedTuple):
    """Rows with safe values in place of invalid ones."""

    weight: Tensor  # float64 `(N,)`; 0 for ignored and invalid rows
    n_invalid: Tensor  # number of invalid rows
    events: dict[bool, tuple[Tensor, Tensor]]  # confidence and outcome by `Rule.of_top`
    scores: dict[str, Tensor]


def added(states: Tensor, columns: Columns, rows: Rows | None, plan: Plan) -> Tensor:
    """Compute `batch.added`; `rows` are the statistics of multi-class rows."""
    batch = _binary(columns, plan) if rows is None else _multiclass(columns, rows, plan)
    zero = batch.weight.new_zeros(1)
    # Totals: the sums over one bin of all rows.
    needed = [batch.scores[name] * batch.weight for name in SCORES if name in plan.scores]
    totals = torch.stack([batch.weight, *needed]).sum(-1)
    score_of = dict(zip((name for name in SCORES if name in plan.scores), range(1, len(totals)), strict=True))
    parts = [batch.n_invalid.to(zero.dtype).view(1), zero, totals[:1]]
    parts += [totals[score_of[name], None] if name in score_of else zero for name in SCORES]
    parts += [_bin_sums(*batch.events[rule.of_top], batch.weight, rule, plan) for rule in plan.rules]
    sums = torch.cat(parts)[plan.terms]
    if plan.factors is not None:
        sums = sums * plan.factors
    return states + (sums[0] if len(sums) == 1 else sums.sum(0))


def _bin_sums(confidence: Tensor, outcome: Tensor, weight: Tensor, rule: Rule, plan: Plan) -> Tensor:
    """Return the sums over the bins of a rule `(7 B,)`; 0 for those that are not needed."""
    index = bin_index(confidence, rule.n_bins, rule.right)
    spread = torch.addcmul(confidence, confidence, confidence, value=-1)
    residual = (outcome - confidence).square_()
    columns = [torch.ones_like(spread), confidence, outcome, spread, residual]
    columns += [spread * weight, weight] if plan.is_squared else []
    into = weight.new_zeros(N_QUANTITIES, rule.n_bins)
    stacked = torch.stack(columns).mul_(weight)
    return into.scatter_add_(-1, index.expand(len(columns), -1), stacked).view(-1)


def _weighted(columns: Columns, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, a mask of the rows without weight, and the number of invalid rows, given a mask of valid ones."""
    weights = None if columns.weights is None else columns.weights.to(torch.float64)
    present = None if columns.ignore_index is None else columns.target.long() != columns.ignore_index
    if weights is not None:
        # 0 or from 1e-150 to 1e150, as in `checks.weight_rule`
        valid = valid & (weights == weights.clamp(1e-150, 1e150))
        present = weights != 0 if present is None else present & (weights != 0)
    used = valid if present is None else valid & present
    absent = ~used
    n_invalid = (absent if present is None else present ^ used).sum()
    weight = used.to(torch.float64) if weights is None else weights.masked_fill(absent, 0)
    return weight, absent, n_invalid


def _binary(columns: Columns, plan: Plan) -> _Batch:
    x, label = columns.values.to(torch.float64), columns.target.long()
    valid = x == (x if columns.from_logits else x.clamp(0, 1))  # False for NaN
    weight, absent, n_invalid = _weighted(columns, valid & (label == label.clamp(0, 1)))
    x, y = x.masked_fill(absent, 0), label.to(torch.float64)
    tops = "hit" in plan.scores or "confidence" in plan.scores or any(rule.of_top for rule in plan.rules)
    p = x.sigmoid() if columns.from_logits else x
    events, scores = {False: (p, y)}, {}
    if tops:
        is_one = x > (0 if columns.from_logits else 0.5)
        confidence = x.abs().sigmoid() if columns.from_logits else torch.where(is_one, p, 1 - p)
        hit = (is_one == y).to(torch.float64)
        events[True] = confidence, hit
        scores |= {"confidence": confidence, "hit": hit}
    if "squared_error" in plan.scores:
        # (1 - y) p - y (1 - p), without the cancellation in 1 - p
        difference = (1 - y) * p - y * (-x).sigmoid() if columns.from_logits else p - y
        scores["squared_error"] = difference.square()
    if not plan.scores.isdisjoint(("log_prob", "neg_entropy")):
        log_p, log_not_p = logs.binary_log_probs(x, columns.from_logits)
        scores["log_prob"] = torch.where(label == 1, log_p, log_not_p).masked_fill_(absent, 0)
        if "neg_entropy" in plan.scores:
            scores["neg_entropy"] = logs.binary_neg_entropy(log_p, log_not_p)
    return _Batch(weight, n_invalid, events, scores)


def _multiclass(columns: Columns, rows: Rows, plan: Plan) -> _Batch:
    weight, absent, n_invalid = _weighted(columns, rows.log_prob == rows.log_prob)
    confidence = rows.confidence.masked_fill(absent, 1)
    hit = (columns.target == rows.top).to(torch.float64)
    safe = {name: getattr(rows, name).masked_fill(absent, 0) for name in SCORES[:3] if name in plan.scores}
    return _Batch(weight, n_invalid, {True: (confidence, hit)}, {**safe, "confidence": confidence, "hit": hit})


