"""Sums of scores of binary predictions in plain torch, in pieces that fit into the cache."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from torchcalib.ops.logs import safe_log, xmul
from torchcalib.ops.segments import kept, with_weight

_PIECE = 2**18  # values per piece: smaller pieces need more calls, and larger ones do not fit the cache
_LARGE = 40  # log(1 + e^x) is x for larger x, with a relative error below 1e-18


def score_sums(values: Tensor, target: Tensor, kind: str, from_logits: bool) -> Tensor:
    """Return sums of scores; see `binary_scores.score_sums`."""
    n = values.shape[-1]
    x, t = values.reshape(-1, n), target.reshape(-1, n)
    size = max(1, _PIECE // len(x))
    is_narrow = kind == "log" and from_logits and values.dtype != torch.float64 and not target.is_floating_point()
    # Scores of all pieces have the same memory: the first use of new memory takes as long as a score.
    memory = torch.empty(len(x), min(size, n), dtype=torch.float32 if is_narrow else torch.float64, device="cpu")
    total = torch.zeros(len(x), dtype=torch.float64, device="cpu")
    for start in range(0, n, size):
        part = slice(start, start + size)
        total += _sums_of_piece(x[:, part], t[:, part], kind, from_logits, memory[:, : n - start])
    return total.view(values.shape[:-1])


def labelled_sums(
    values: Any, label: Any, kind: str, from_logits: bool, weights: Any, groups: Any, n_groups: int, ignored: int | None
) -> Any:
    """Return the weight and the sum of scores of all rows, or of each group `(G,)`; NaN if a value is invalid.

    All arguments are numpy arrays. `weights` are float32, float64 or integers, or None for 1; `groups` are in [0, G),
    or None. Rows with the label `ignored` or the weight 0 are not added, and may be invalid.
    """
    invalid = (0, math.nan) if groups is None else (0, np.full(n_groups, math.nan))
    if ignored is not None:
        _, values, label, weights, groups = kept(label != ignored, None, values, label, weights, groups)
    if weights is not None:
        found = with_weight(weights, None, values, label, groups)
        if found is None:
            return invalid
        weights, _, values, label, groups = found
    if not len(label):
        return (0, 0.0) if groups is None else (0, np.zeros(n_groups))
    x, t = torch.from_numpy(values)[None], torch.from_numpy(label)[None]
    if weights is None and groups is None:
        return len(label), score_sums(x, t, kind, from_logits).item()
    is_narrow = kind == "log" and from_logits and x.dtype != torch.float64
    dtype = torch.float32 if is_narrow else torch.float64
    scores = _scores(x, t, kind, from_logits, torch.empty(x.shape, dtype=dtype, device="cpu"))
    if scores is None:
        return invalid
    column = scores.double().numpy()[0]
    column = column if weights is None else column * weights
    if groups is None:
        return weights.sum(), column.sum()
    return np.bincount(groups, weights, n_groups), np.bincount(groups, column, n_groups)


def _sums_of_piece(values: Tensor, target: Tensor, kind: str, from_logits: bool, memory: Tensor) -> Tensor:
    """Return the sums over one piece `(S, n)`, NaN if it has an invalid value. Overwrite the `memory`."""
    scores = _scores(values, target, kind, from_logits, memory)
    if scores is None:
        return torch.full((len(values),), torch.nan, dtype=torch.float64, device="cpu")
    return scores.double().sum(-1)


def _scores(values: Tensor, target: Tensor, kind: str, from_logits: bool, memory: Tensor) -> Tensor | None:
    """Return the scores of one piece `(S, n)`, None if it has an invalid value. Overwrite the `memory`."""
    t = memory.copy_(target)
    low, high = (x.item() for x in t.aminmax())
    valid = low >= 0 and high <= 1
    if not from_logits:  # the score of a logit of NaN is NaN
        low, high = (x.item() for x in values.aminmax())
        valid = valid and low >= 0 and high <= 1
    if not valid:
        return None
    if kind == "square" and not from_logits:
        return t.sub_(values).square_()
    if target.is_floating_point() and not bool(((t == 0) | (t == 1)).all()):
        return _scores_of_shares(values.double(), t, kind, from_logits)
    if not from_logits:
        return _log_losses_of_labels(values.double(), t)
    logit = t.mul_(-2).add_(1).mul_(values)  # of the outcome that did not occur
    return softplus(logit, 1, _LARGE) if kind == "log" else logit.sigmoid_().square_()


def _log_losses_of_labels(x: Tensor, label: Tensor) -> Tensor:
    """Return the log losses of probabilities, with a single logarithm for each value."""
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
