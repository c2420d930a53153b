"""Log-odds of events over classes, from logits: log P(event) - log P(the other classes), without cancellation.

A probability near 1 has no digits left for 1 - p. The two logarithms keep them: each is a log-sum-exp of logits,
relative to the largest logit of its own classes. All arithmetic is in the dtype of sums.

Events of equal rows must tie, wherever the rows stand in a batch. Softmax ensures this, because it runs row by row.
Other functions run over blocks that no thread splits, by `logs.elementwise`.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.logs import elementwise, spread_infinite_logits, wide_dtype
from torchcalib.ops.operation import fused, gradient_of
from torchcalib.ops.softmax_stats import matrices

_BLOCK = 2**15  # numbers; torch splits larger tensors among threads
_BLOCK_ELSEWHERE = 2**24  # on other devices, where the launch of a kernel costs more than its arithmetic


def log_odds(values: Tensor, members: Tensor | None = None) -> Tensor:
    """Return the log-odds of one event for each row, or of every class against the others.

    Args:
        values: logits `(..., N, C)` of any floating dtype and with any strides. Entries of +inf share
            the probability of their row.
        members: classes of the event of each row `(..., N, k)`, int64; None for every class on its own.

    Returns:
        `(..., N)`, or `(..., N, C)` for every class, in the dtype of sums. +inf where the other classes have
        probability 0, -inf where the event has probability 0. NaN in a row that has a NaN or no logit above -inf.

    Gradient:
        In `values`, in reverse and forward mode, of any order. It is 0 for infinite log-odds and in a row with +inf. A
        row whose incoming gradients are all 0 has gradient 0 and may hold NaN.
    """
    found: Tensor = _log_odds(values, members)
    return found


def log_ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return log-sum-exp of `above` minus that of `below`, each `(..., C)` in the dtype of sums and without +inf.

    The largest entries and the remainders are subtracted separately, so that equal rows give exactly 0.
    """
    (top, beyond), (other_top, other_beyond) = _log_total(above), _log_total(below)
    return (top - other_top) + (beyond - other_beyond)


def _log_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry `(...)` and log-sum-exp minus it; -inf and a finite value if all are -inf.

    The difference is minus the log-softmax of the largest entry. Softmax runs row by row; see the top of this module.
    """
    top, place = logits.max(-1, keepdim=True)
    log_q = logits.masked_fill(top == -torch.inf, 0).log_softmax(-1)
    return top.squeeze(-1), -log_q.gather(-1, place).squeeze(-1)


def _forward(_: str, values: Tensor, members: Tensor | None) -> Tensor:
    """Compute the log-odds in blocks of rows."""
    *lead, n_classes = values.shape
    width = (n_classes,) if members is None else ()
    out = torch.empty((math.prod(lead), *width), dtype=wide_dtype(values.device), device=values.device)
    for rows, logits, own in _chunks(values, members):
        z = spread_infinite_logits(logits)
        out[rows] = _of_each(z) if own is None else _of_event(z, own)
    return out.reshape(*lead, *width)


def _formula(values: Tensor, members: Tensor | None) -> Tensor:
    """Return the log-odds by operations that torch can differentiate; infinite ones are constants."""
    z = values.to(wide_dtype(values.device))
    broken = ~(z.amax(-1, keepdim=True) > -torch.inf)
    z = spread_infinite_logits(z.masked_fill(broken, 0))
    found = _of_each(z) if members is None else _of_event(z, members)
    found = torch.where(found.isinf(), found.detach(), found)
    return found.masked_fill(broken if members is None else broken.squeeze(-1), torch.nan)


def _gradient(
    _: str,
    arguments: list[Any],
    results: tuple[Tensor],  # noqa: ARG001
    needed: list[int],  # noqa: ARG001
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradient of the formula, a block of rows at a time."""
    values, members = arguments
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    flat, upstream = out.view(-1, out.shape[-1]), grads.reshape(-1, *grads.shape[values.dim() - 1 :])
    for rows, z, own in _chunks(values, members):
        (found,) = gradient_of(_formula, (z, own), [0], upstream[rows])
        asked = (upstream[rows] != 0).view(len(z), -1).any(-1)
        flat[rows] = found.masked_fill((asked & ~(z.amax(-1) > -torch.inf)).unsqueeze(-1), torch.nan)
    return [out]


def _chunks(values: Tensor, members: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield a slice of the rows, their logits in the dtype of sums, and the members of their events."""
    flat = None if members is None else members.reshape(-1, members.shape[-1])
    block = _BLOCK if values.device.type == "cpu" else _BLOCK_ELSEWHERE
    size = max(1, block // max(1, values.shape[-1]))
    for part, matrix in matrices(values.detach()):
        for start in range(0, len(matrix), size):
            some = matrix[start : start + size].to(wide_dtype(values.device)).contiguous()
            rows = slice(part.start + start, part.start + start + len(some))
            yield rows, some, None if flat is None else flat[rows]


def _of_event(z: Tensor, members: Tensor) -> Tensor:
    return log_ratio(z.gather(-1, members), z.scatter(-1, members, -torch.inf))


def _of_each(z: Tensor) -> Tensor:
    """Return the log-odds of every class `(n, C)`.

    With D the log-odds of the top class and r_k the log-softmax among the others, class k has the log-odds
    r_k - log(1 + e^D - e^{r_k}). As r_k <= D nothing cancels, and a class that ties with the top has exactly D.
    """
    top = z.argmax(-1, keepdim=True)
    rest, of_top = _against_rest(z, top)
    scale = of_top.clamp(min=0)
    among = rest.log_softmax(-1) - scale
    below = torch.where(of_top < 0, of_top, -of_top)  # with the slope that matches `scale` at a tie, unlike abs
    ratio = elementwise(torch.exp, below) - elementwise(torch.exp, among)
    return (among - elementwise(torch.log1p, ratio)).scatter(-1, top, of_top)


def _against_rest(z: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits with -inf for the top class, and the log-odds of the top class `(..., 1)`."""
    rest = z.scatter(-1, top, -torch.inf)
    of_top = log_ratio(z.gather(-1, top), rest).unsqueeze(-1)
    # If all others have probability 0, D = inf, so any finite logits give the same result.
    return rest.masked_fill(rest.amax(-1, keepdim=True) == -torch.inf, 0), of_top


_log_odds = fused(_forward, _formula, _gradient)
