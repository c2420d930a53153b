"""Sums of scores of binary predictions in plain torch, in pieces that fit into the cache."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.ops.logs import safe_log, xmul

_PIECE = 2**17  # values per piece: smaller pieces need more calls, and copies of larger ones do not fit the cache


def score_sums(values: Tensor, target: Tensor, kind: str, from_logits: bool) -> Tensor:
    """Return sums of scores; see `binary_scores.score_sums`."""
    n = values.shape[-1]
    x, t = values.reshape(-1, n), target.reshape(-1, n)
    size = max(1, _PIECE // len(x))
    total = torch.zeros(len(x), dtype=torch.float64)
    for start in range(0, n, size):
        part = slice(start, start + size)
        total += _sums_of_piece(x[:, part], t[:, part], kind, from_logits)
    return total.view(values.shape[:-1])


def summary_score(values: Any, target: Any, kind: str, from_logits: bool) -> float:
    """Return the sum of scores of a batch; see `ScoreAccumulator.add_summary`."""
    return score_sums(torch.from_numpy(values), torch.from_numpy(target), kind, from_logits).item()


def _sums_of_piece(values: Tensor, target: Tensor, kind: str, from_logits: bool) -> Tensor:
    """Return the sums over one piece `(S, n)`, NaN if it has an invalid value."""
    least, greatest = (x.item() for x in values.aminmax())
    first, last = (x.item() for x in target.aminmax())
    valid = least == least if from_logits else least >= 0 and greatest <= 1
    if not (valid and first >= 0 and last <= 1):
        return torch.full((len(values),), torch.nan, dtype=torch.float64)
    x = values.double()
    if kind == "square" and not from_logits:
        return (x - target.double()).square_().sum(-1)
    if not target.is_floating_point() or bool(((target == 0) | (target == 1)).all()):
        scores = _scores_of_labels(x, target, kind, from_logits)
    else:
        scores = _scores_of_shares(x, target.double(), kind, from_logits)
    return scores.sum(-1)


def _scores_of_labels(x: Tensor, label: Tensor, kind: str, from_logits: bool) -> Tensor:
    """Return the scores for labels, with a single logarithm for each value."""
    if from_logits:
        own = (2 * label - 1) * x  # logit of the outcome that occurred
        return 0 - logsigmoid(own) if kind == "log" else torch.sigmoid(-own).square_()
    one = label == 1
    # log u with u = p or 1 - p in float64. The rounding error of 1 - p is added as in `numba_math.log_of_complement`.
    u = torch.where(one, x, 1 - x)
    error = (1 - u).sub_(x).masked_fill_(one, 0)
    return 0 - u.log_().add_(error)


def _scores_of_shares(x: Tensor, t: Tensor, kind: str, from_logits: bool) -> Tensor:
    """Return the scores for targets between 0 and 1."""
    if kind == "square":
        return ((1 - t) * x.sigmoid() - t * (-x).sigmoid()).square_()
    log_p = logsigmoid(x) if from_logits else safe_log(x)
    log_not_p = logsigmoid(-x) if from_logits else torch.log1p(-x)
    return 0 - xmul(t, log_p) - xmul(1 - t, log_not_p)
