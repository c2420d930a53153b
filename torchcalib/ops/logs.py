"""Logarithms of probabilities, cross entropy and entropy in plain torch, well defined at probability 0.

A distribution over classes is a pair `(q, log_q)` with classes on the last axis. A binary distribution is the pair
`(log_p, log_not_p)`, because `log(1 - p)` is inaccurate if p rounds to 1. `safe_log` defines log 0 = -inf with
gradient 0, and `xmul` defines 0 * -inf = 0. So a score is infinite only where the outcome has probability 0. Scores are
computed as `0 - x` instead of `-x`, so that a certain and correct prediction has score 0 instead of -0.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from torchcalib.ops.host_values import value_if_available

LANES = 64  # `elementwise` pads to a multiple of this length, which is a multiple of every vector width


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums on a device: float64, or float32 on Apple MPS, which does not support float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function, with equal results for equal numbers at every position.

    torch uses vector instructions for exp, log and log1p, but scalar ones at the end of a tensor. Their results can
    differ in the last digit. Padding avoids scalar code. `x` must be too short for torch to split it among threads.
    """
    extra = -x.numel() % LANES
    if not extra and x.is_contiguous():
        return function(x)
    flat = pad(x.reshape(-1), (0, extra)) if extra else x.reshape(-1)
    return function(flat)[: x.numel()].view(x.shape)


def safe_log(x: Tensor) -> Tensor:
    """Return log x with log 0 = -inf. Gradient: 1/x, but 0 at x = 0."""
    zero = x == 0
    return x.masked_fill(zero, 1).log().masked_fill(zero, -torch.inf)


def root(x: Tensor) -> Tensor:
    """Return sqrt(x), with gradient 0 at 0 instead of infinity."""
    zero = x == 0
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def xmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a * b with 0 * inf = 0. Gradient: finite where a and b are finite; 0 in `b` where a = 0."""
    return a * b.masked_fill(a == 0, 0)


def spread_infinite_logits(logits: Tensor, dim: int = -1) -> Tensor:
    """Replace each row with +inf by logits of its limiting softmax: 0 at entries of +inf, and -inf elsewhere."""
    top = logits.amax(dim, keepdim=True) == torch.inf
    if logits.device.type == "cpu" and value_if_available(top.any()) is False:  # on a GPU this would synchronise
        return logits
    limit = torch.where(logits == torch.inf, 0.0, -torch.inf).to(logits.dtype)
    return torch.where(top, limit, logits)


def through_softmax(q: Tensor, change: Tensor, logits: Tensor) -> Tensor:
    """Multiply `change` by diag(q) - q q', the Jacobian of q = softmax(logits); 0 in a row with +inf."""
    found = q * (change - (q * change).sum(-1, keepdim=True))
    return found.masked_fill(logits.amax(-1, keepdim=True) == torch.inf, 0)


def binary_log_probs(values: Tensor, from_logits: bool) -> tuple[Tensor, Tensor]:
    """Return log P(y = 1) and log P(y = 0) for probabilities or logits, accurate even near 0 and 1."""
    if from_logits:
        return logsigmoid(values), logsigmoid(-values)
    one = values == 1
    return safe_log(values), torch.log1p(-values.masked_fill(one, 0)).masked_fill(one, -torch.inf)


def binary_cross_entropy(log_p: Tensor, log_not_p: Tensor, target: Tensor) -> Tensor:
    """Return the binary cross entropy -(t log p + (1 - t) log(1 - p)) for targets t in [0, 1]."""
    return 0 - xmul(target, log_p) - xmul(1 - target, log_not_p)


def binary_neg_entropy(log_p: Tensor, log_not_p: Tensor) -> Tensor:
    """Return the negative binary entropy p log p + (1 - p) log(1 - p), with 0 log 0 = 0."""
    return xmul(log_p.exp(), log_p) + xmul(log_not_p.exp(), log_not_p)


def cross_entropy(log_q: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy -sum_k t_k log q_k `(..., N)` for target distributions t `(..., N, C)`."""
    return 0 - xmul(target, log_q).sum(-1, dtype=wide_dtype(log_q.device))


def neg_entropy(q: Tensor, log_q: Tensor) -> Tensor:
    """Return the negative entropy sum_k q_k log q_k `(...)`, with 0 log 0 = 0."""
    return xmul(q, log_q).sum(-1, dtype=wide_dtype(q.device))


def one_vs_rest_log_probs(q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """Return log q_k and log(1 - q_k) for every class `(..., C)`.

    The probability of the top class can round to 1, so its 1 - q_k is computed as the sum over the other classes.
    """
    top = q.argmax(-1, keepdim=True)
    log_rest = log_q.scatter(-1, top, -torch.inf).logsumexp(-1, keepdim=True)
    return log_q, torch.log1p(-q.scatter(-1, top, 0)).scatter(-1, top, log_rest)


def softmax(logits: Tensor, dim: int = -1) -> Tensor:
    """Return the softmax. Only logits of -inf give 0: other results are at least the smallest normal number."""
    q = logits.softmax(dim)
    return torch.where(logits == -torch.inf, q, q.clamp(min=torch.finfo(q.dtype).tiny))


def sigmoid(log_odds: Tensor) -> Tensor:
    """Return the sigmoid, in which only infinite log-odds give 0 and 1."""
    p = log_odds.sigmoid()
    return torch.where(log_odds.isinf(), p, inside(p))


def inside(p: Tensor) -> Tensor:
    """Clip probabilities to the smallest normal number and the largest number below 1, because 0 and 1 are rounded."""
    limits = torch.finfo(p.dtype)
    return p.clamp(limits.tiny, 1 - limits.eps / 2)
