"""Log-odds of sets of classes, from logits and without cancellation.

An event is a set of classes. Its log-odds are log P(event) - log P(other classes). Each term is a log-sum-exp, relative
to the largest logit of its classes. So the result is accurate even where a probability rounds to 1. Arithmetic is
float64 where the device supports it (`wide_dtype`).

Equal rows must give equal log-odds at any position in a batch, because ranks depend on ties. Softmax processes rows
separately, which ensures this. `logs.elementwise` ensures it for exp and log1p.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import LANES, elementwise, spread_infinite_logits, wide_dtype
from torchcalib.ops.operation import fused, gradient_of
from torchcalib.ops.softmax_stats import matrices, plain

_BLOCK = 2**15  # number of logits computed at a time on the CPU; torch would split more among threads
_BLOCK_OF_CLASSES = 2**16  # the same for the log-odds of one class, which need fewer passes
_BLOCK_ELSEWHERE = 2**24  # the same on other devices, where a kernel launch is slower than the arithmetic
_MAX_CLASSES = 2**10  # largest number of classes for the compiled loop, whose blocks then fit into the cache


def log_odds(values: Tensor, members: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """Return the log-odds of one event per row `(..., N)`, or of every class against the others `(..., N, C)`.

    `members` are the k classes in the event of each row, int64 `(..., N, k)`. Logits of +inf share the probability of
    their row equally. The result is +inf if the other classes have probability 0, and -inf if the event has probability
    0. It is NaN for a row with NaN or with only -inf.

    Gradient: in `values`, in forward and reverse mode, of any order. It is 0 for infinite log-odds and for a row with
    +inf. It is also 0 for a row whose incoming gradients are all 0, even if the row contains NaN.
    """
    found: Tensor = _log_odds(values, members, backend=backend)
    return found


def log_ratio(above: Tensor, below: Tensor) -> Tensor:
    """Return logsumexp(above) - logsumexp(below) over the last axis, for logits without +inf.

    The largest entries and the remainders are subtracted separately, so that equal rows give exactly 0.
    """
    (top, beyond), (other_top, other_beyond) = _log_total(above), _log_total(below)
    return (top - other_top) + (beyond - other_beyond)


def _log_total(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit m of each row, and logsumexp - m, both `(...)`.

    The difference is minus the log-softmax of m, because softmax gives equal results for equal rows. It is finite even
    if all logits are -inf.
    """
    top, place = logits.max(-1, keepdim=True)
    log_q = logits.masked_fill(top == -torch.inf, 0).log_softmax(-1)
    return top.squeeze(-1), -log_q.gather(-1, place).squeeze(-1)


def _forward(backend: Backend, values: Tensor, members: Tensor | None) -> Tensor:
    *lead, n_classes = values.shape
    width = (n_classes,) if members is None else ()
    out = torch.empty((math.prod(lead), *width), dtype=wide_dtype(values.device), device=values.device)
    if members is not None and members.shape[-1] == 1 and values.is_cpu:
        classes = members.reshape(-1)
        if classes.numel() and not (classes.min() >= 0 and classes.max() < n_classes):
            least, greatest = classes.min().item(), classes.max().item()
            raise IndexError(
                f"`members` must be classes from 0 to {n_classes - 1}, got {least} to {greatest}. Check the labels."
            )
        backend = "torch" if backend == "auto" and n_classes > _MAX_CLASSES else backend
        source = source_of("log_odds", "cpu", values.dtype, values.numel(), backend)
        for part, matrix in matrices(values.detach()):
            source.fill(matrix, classes[part], out[part])
            if not math.isfinite(out[part].sum()):  # rare: infinite logits, or NaN
                rest = part.start + out[part].isfinite().logical_not_().nonzero().squeeze(-1)
                out[rest] = _formula(matrix[rest - part.start], classes[rest].unsqueeze(-1))
        return out.reshape(*lead)
    for rows, logits, own in _chunks(values, members):
        out[rows] = _of_logits(spread_infinite_logits(logits), own)
    return out.reshape(*lead, *width)


def fill(values: Tensor, classes: Tensor, out: Tensor) -> None:
    """Fill `out` `(N,)` with the log-odds of a class for each row `(N, C)`, which may be wrong for infinite logits."""
    n, n_classes = values.shape
    if n == 1:  # duplicate the row, because torch and numpy sum a single row in a different order
        found = torch.empty(2, dtype=torch.float64)
        fill(values.expand(2, -1), classes.expand(2), found)
        out.copy_(found[:1])
        return
    axis, blocks = plain.class_axis(n_classes), plain.blocks_of(n, n_classes, _BLOCK_OF_CLASSES)
    memory, filled = np.empty(-(-n // len(blocks)) * n_classes + LANES), out.numpy()
    with np.errstate(all="ignore"):
        for rows in blocks:
            z = plain.copied(plain.array_of(values[rows]), memory, axis)
            entries, at_class = z.reshape(-1), plain.places(classes[rows].numpy(), z.shape, axis)
            own, entries[at_class] = entries[at_class], -np.inf
            largest = torch.from_numpy(z).amax(axis, keepdim=True)
            torch.from_numpy(z).sub_(largest)
            plain.applied(torch.exp, memory, z.size)
            filled[rows] = own - largest.view(-1).numpy() - plain.applied(torch.log, plain.sum_of_rows(z, axis))


def _formula(values: Tensor, members: Tensor | None) -> Tensor:
    """Compute the log-odds by differentiable torch operations. Infinite log-odds get gradient 0."""
    z = values.to(wide_dtype(values.device))
    broken = ~(z.amax(-1, keepdim=True) > -torch.inf)
    found = _of_logits(spread_infinite_logits(z.masked_fill(broken, 0)), members)
    found = torch.where(found.isinf(), found.detach(), found)
    return found.masked_fill(broken if members is None else broken.squeeze(-1), torch.nan)


def _gradient(
    _: str,
    arguments: list[Any],
    results: tuple[Tensor],  # noqa: ARG001
    needed: list[int],  # noqa: ARG001
    grads: Tensor,
) -> list[Tensor]:
    values, members = arguments
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    flat, upstream = out.view(-1, out.shape[-1]), grads.reshape(-1, *grads.shape[values.dim() - 1 :])
    for rows, z, own in _chunks(values, members):
        (found,) = gradient_of(_formula, (z, own), [0], upstream[rows])
        has_gradient = (upstream[rows] != 0).view(len(z), -1).any(-1)
        flat[rows] = found.masked_fill((has_gradient & ~(z.amax(-1) > -torch.inf)).unsqueeze(-1), torch.nan)
    return [out]


def _chunks(values: Tensor, members: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield slices of the rows in `values`, with logits `(n, C)` of dtype `wide_dtype` and members `(n, k)` or None."""
    flat = None if members is None else members.reshape(-1, members.shape[-1])
    block = _BLOCK if values.device.type == "cpu" else _BLOCK_ELSEWHERE
    size = max(1, block // max(1, values.shape[-1]))
    for part, matrix in matrices(values.detach()):
        for start in range(0, len(matrix), size):
            logits = matrix[start : start + size].to(wide_dtype(values.device)).contiguous()
            rows = slice(part.start + start, part.start + start + len(logits))
            yield rows, logits, None if flat is None else flat[rows]


def _of_logits(z: Tensor, members: Tensor | None) -> Tensor:
    """Return `log_odds` for logits without +inf: of every class in O(C) per row if `members` is None.

    Let D be the log-odds of the top class, and r_k the log-softmax over the other classes. Then class k has log-odds
    r_k - log(1 + e^D - e^{r_k}). Nothing cancels, because r_k <= D. A class tied with the top class gets exactly D.
    """
    if members is not None:
        return log_ratio(z.gather(-1, members), z.scatter(-1, members, -torch.inf))
    # 1. D, and the logits of the other classes, of which -inf is replaced by 0 if all are -inf: it would cause NaN.
    top = z.argmax(-1, keepdim=True)
    rest = z.scatter(-1, top, -torch.inf)
    top_log_odds = log_ratio(z.gather(-1, top), rest).unsqueeze(-1)
    rest = rest.masked_fill(rest.amax(-1, keepdim=True) == -torch.inf, 0)
    # 2. Divide e^{r_k} and 1 + e^D - e^{r_k} by e^max(D, 0), so that e^D cannot overflow.
    scale = top_log_odds.clamp(min=0)
    log_share = rest.log_softmax(-1) - scale
    # 3. Compute -|D| without `abs`, whose derivative at D = 0 does not match the derivative of `clamp`.
    below = torch.where(top_log_odds < 0, top_log_odds, -top_log_odds)
    ratio = elementwise(torch.exp, below) - elementwise(torch.exp, log_share)
    return (log_share - elementwise(torch.log1p, ratio)).scatter(-1, top, top_log_odds)


_log_odds = fused(_forward, _formula, _gradient)
