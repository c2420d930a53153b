"""Definition of the statistics of rows, in differentiable torch operations.

For probabilities q and the label h of a row: log q_h, sum_k (q_k - 1[k = h])^2, sum_k q_k log q_k and max_k q_k.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from torchcalib.ops.logs import safe_log, spread_infinite_logits, wide_dtype, xmul

LOWEST = -1000  # exp of this number is 0 in every dtype

Detail = Literal["classes", "label", "top", "confidence", "squares", "entropy"]
"""Statistics to compute. With "label" only `log_prob`, and with "top" `confidence` and `top`.

"confidence" adds `log_prob` to those of "top", "squares" adds `squared_error`, and "entropy" adds `neg_entropy`. Other
statistics are undefined. "classes" computes those of "top", but only the probabilities of all classes are needed.
"""


def row_formula(
    values: Tensor,
    target: Tensor,
    from_logits: bool,
    tolerance: float = math.inf,
    detail: Detail = "entropy",  # noqa: ARG001 - `torch.compile` omits what is not used
) -> tuple[Tensor, Tensor]:
    """Return the scores `(..., 4, N)` and the top classes `(..., N)` by differentiable operations.

    For logits, 1 - q of the top class and of the label are computed as sums over the other classes, without
    cancellation. Invalid rows have NaN scores and gradient 0. The arguments are those of `softmax_stats.rows`.
    """
    x = values.to(wide_dtype(values.device))
    # Invalid: NaN, only -inf logits, or a probability that is negative or +inf.
    most = x.amax(-1)
    is_invalid = ~(most > -torch.inf) if from_logits else ~((x.amin(-1) >= 0) & (most < torch.inf))
    x = x.masked_fill(is_invalid.unsqueeze(-1), 0)
    known = (target >= 0) & (target < x.shape[-1])
    label = target.masked_fill(~known, 0).unsqueeze(-1)
    top = x.detach().argmax(-1, keepdim=True)
    if from_logits:
        x = spread_infinite_logits(x)
        q = x.softmax(-1)
        others = q.scatter(-1, top, 0)
        log_top = torch.log1p(-others.sum(-1))
        shift = x - x.gather(-1, top)  # log q - log q_top
        log_prob = shift.gather(-1, label).squeeze(-1) + log_top
        miss = q.scatter(-1, label, 0).sum(-1)
        neg_entropy = (others * shift.clamp(min=LOWEST)).sum(-1) + log_top
    else:
        q = x
        q_label = q.gather(-1, label).squeeze(-1)
        log_prob = safe_log(q_label)
        miss = 1 - q_label
        neg_entropy = xmul(q, safe_log(q)).sum(-1)
        is_invalid = is_invalid | ((q.sum(-1) - 1).abs() > tolerance) | ((q.amax(-1) > 1) & (tolerance < math.inf))
    squared_error = miss.square() + q.scatter(-1, label, 0).square().sum(-1)
    log_prob, squared_error = (score.masked_fill(~known, torch.nan) for score in (log_prob, squared_error))
    scores = torch.stack((log_prob, squared_error, neg_entropy, q.gather(-1, top).squeeze(-1)), -2)
    return scores.masked_fill(is_invalid.unsqueeze(-2), torch.nan), top.squeeze(-1)
