"""Statistics of rows in plain torch, in chunks that fit into the CPU cache.

Results of a row are bitwise equal at any position in the input. torch computes softmax and sums separately for every
row, but not elementwise functions, so `logs.elementwise` replaces these. A chunk has at least two rows, because torch
splits the sum of a single row among threads.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.logs import LANES, elementwise, spread_infinite_logits, wide_dtype
from torchcalib.ops.softmax_stats.formula import LOWEST

_CHUNK = 2**19  # entries per chunk on the CPU: fewer would need more calls, and more would not fit the cache
_CHUNK_OFF_CPU = 2**24  # entries per chunk on other devices: larger chunks need fewer kernel launches
_COLUMN = 2**14  # rows per block, because torch splits longer columns among threads
_FEW_CLASSES = 16  # largest number of classes for which chunks are transposed


class _Chunk(NamedTuple):
    """Rows `(n, C)`, or their transpose `(C, n)` for few classes, so that vector instructions span many rows."""

    x: Tensor  # rows, float32 or float64, read-only
    q: Tensor  # uninitialised tensor of the shape of `x`, for intermediate results
    buffer: Tensor  # like `q`
    dim: int  # class axis of `x`
    columns: tuple[Tensor, ...]  # tensors with one number per row, of size 1 along the class axis


def forward(values: Tensor, target: Tensor, from_logits: bool, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the first four statistics of `Rows` `(4, R)`, and the top classes `(R,)`, of rows `(R, C)`; see `rows`."""
    if len(values) == 1:  # duplicate the row, because torch would split the sum of a single row among threads
        scores, top = forward(values.expand(2, -1), target.expand(2), from_logits, tolerance)
        return scores[:, :1], top[:1]
    scores = torch.empty(4, len(values), dtype=wide_dtype(values.device), device=values.device)
    top = torch.empty(len(values), dtype=torch.int64, device=values.device)
    # Infinite logits are rare. On the CPU they are replaced only if a sum is not finite. On other devices they are
    # always replaced, because testing the sums would synchronise the device.
    replace_infinite = values.device.type != "cpu"
    for block in _blocks(len(values)):
        x, h, first = values[block], target[block], top[block]
        label = h.clamp(0, values.shape[-1] - 1)
        if from_logits:
            sums = _logit_sums(x, label, first, replace_infinite)
            if not replace_infinite and not math.isfinite(sums.sum()):
                replace_infinite = True
                sums = _logit_sums(x, label, first, replace_infinite)
            result = _scores_from_logit_sums(sums.to(scores.dtype), label == first)
        else:
            sums = _probability_sums(x, label, first).to(scores.dtype)
            result = _scores_from_probability_sums(sums, label == first, tolerance)
        scores[:, block] = result
        scores[:2, block].masked_fill_(label != h, torch.nan)
    return scores, top


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill `out` with the gradient in `values`, given the results of `forward` and the gradients in them, `(4, R)`.

    For logits x the gradient is q (a + b q + c (x - max x)). For probabilities q it is b q + c (log q + 1). The scores
    and incoming gradients of a row determine its coefficients a, b, c. The label and the top class have further terms.
    Their gradients can have the factor 1 - q, which float32 would round to 0, and are computed in `wide_dtype`.
    """
    size = max(2, (_CHUNK if values.device.type == "cpu" else _CHUNK_OFF_CPU) // values.shape[-1])
    for start in range(0, len(values), size):
        block = slice(start, start + size)
        x, h, first, upstream = values[block].to(_dtype(values)), target[block], top[block], grads[:, block]
        # An invalid label is replaced by class 0, and its gradient by NaN at the end.
        known = (h >= 0) & (h < x.shape[-1])
        label, first = h.masked_fill(~known, 0).unsqueeze(-1), first.unsqueeze(-1)
        at_label, at_top = (x.gather(-1, at).squeeze(-1).to(scores.dtype) for at in (label, first))
        if from_logits:
            result = _logit_gradient(x, label, first, at_label, at_top, scores[:, block], upstream)
        else:
            result = _probability_gradient(x, label, first, at_label, upstream)
        # Rows with +inf, and all rows whose incoming gradients are 0, have gradient 0.
        flat = (upstream == 0).all(0) | (from_logits & (at_top == torch.inf))
        result = result.masked_fill(~known.unsqueeze(-1), torch.nan).masked_fill(flat.unsqueeze(-1), 0)
        out[block] = result


def _logit_gradient(
    x: Tensor, label: Tensor, first: Tensor, at_label: Tensor, at_top: Tensor, scores: Tensor, grads: Tensor
) -> Tensor:
    """Return the gradient in logits `(n, C)` by the formula of `backward`, with its terms for label and top class."""
    log_prob, squared_error, neg_entropy, confidence = scores
    grad_log, grad_square, grad_entropy, grad_top = grads
    q_h = elementwise(torch.exp, log_prob)
    # sum_k q_k (x_k - max x), from log q = x - max x + log max q
    mean_shift = neg_entropy - elementwise(torch.log, confidence)
    a = -grad_log - grad_top * confidence - 2 * grad_square * (squared_error - 1 + q_h) - grad_entropy * mean_shift
    b, c = 2 * grad_square, grad_entropy
    for_top = confidence * (a + b * confidence + grad_top)
    shift = (at_label - at_top).masked_fill(q_h == 0, 0)
    for_label = torch.where((label == first).squeeze(-1), for_top, q_h * (a + b * q_h + c * shift)) + grad_log - b * q_h
    # All classes by the formula, then the label and the top class again by their terms in `wide_dtype`.
    shifts = (x - x.gather(-1, first)).clamp_(min=LOWEST)
    q = shifts.softmax(-1)  # not exp, whose rounding depends on the position of the row
    columns = (column.to(x.dtype).unsqueeze(-1) for column in (confidence, a, b, c, for_top, for_label))
    confidence, a, b, c, for_top, for_label = columns
    q = q.mul_(confidence / q.gather(-1, first))
    result = shifts.mul_(c).add_(a).addcmul_(q, b).mul_(q)
    return result.scatter_(-1, first, for_top).scatter_(-1, label, for_label)


def _probability_gradient(x: Tensor, label: Tensor, first: Tensor, q_h: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient in probabilities `(n, C)` by the formula of `backward`, with its terms at label and top."""
    grad_log, grad_square, grad_entropy, grad_top = grads
    grad_label = (grad_log / q_h + grad_entropy * (elementwise(torch.log, q_h) + 1)).masked_fill(q_h == 0, 0)
    columns = 2 * grad_square, grad_entropy, grad_label + 2 * grad_square * (q_h - 1), grad_top
    b, c, for_label, more_at_top = (column.to(x.dtype).unsqueeze(-1) for column in columns)
    result = torch.log(x).add_(1).masked_fill_(x == 0, 0).mul_(c).addcmul_(x, b)
    return result.scatter_(-1, label, for_label).scatter_add_(-1, first, more_at_top)


def _dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _blocks(n: int) -> Iterator[slice]:
    """Yield slices of n rows: at most `_COLUMN` rows each, and at least two rows if n >= 2."""
    n_blocks = -(-n // _COLUMN)
    for k in range(n_blocks):
        yield slice(n * k // n_blocks, n * (k + 1) // n_blocks)


def _chunks(values: Tensor, columns: tuple[Tensor, ...]) -> Iterator[_Chunk]:
    """Yield chunks of at least two rows of `values` `(n, C)`, with the same rows of `columns`, `(n,)` or `(n, C)`.

    For few classes, columns can have more than n rows; `values` is then padded with 0.
    """
    n, n_classes = values.shape
    dtype = _dtype(values)
    parts = [column if column.dim() == 2 else column.unsqueeze(-1) for column in columns]
    if n_classes <= _FEW_CLASSES:  # transpose; a block is one chunk
        x, q, buffer = torch.empty(3, n_classes, len(parts[0]), dtype=dtype, device=values.device)
        x[:, :n] = values.T
        x[:, n:] = 0
        yield _Chunk(x, q, buffer, 0, tuple(part.T for part in parts))
        return
    n_chunks = max(1, min(n // 2, -(-n * n_classes // _CHUNK)))
    arrays = torch.empty(3, -(-n // n_chunks), n_classes, dtype=dtype, device=values.device)
    rows = (values, *parts)
    chunks = zip(*(each.tensor_split(n_chunks) for each in rows), strict=True) if n_chunks > 1 else [rows]
    for x, *chunk_columns in chunks:
        copy, q, buffer = arrays[:, : len(x)]
        direct = x.dtype == dtype and x.is_contiguous()
        yield _Chunk(x if direct else copy.copy_(x), q, buffer, -1, tuple(chunk_columns))


def _columns(n: int, values: Tensor, label: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `n` uninitialised result columns, the labels and the top classes, all padded for few classes."""
    # Pad to a multiple of `LANES`. Otherwise torch would sum the last rows in a different order.
    extra = -len(label) % LANES if values.shape[-1] <= _FEW_CLASSES else 0
    columns = torch.empty(n, len(label) + extra, dtype=_dtype(values), device=values.device)
    if extra:
        label, top = pad(label, (0, extra)), pad(top, (0, extra))
    return columns, label, top


def _fill_first_largest(chunk: _Chunk, out: Tensor) -> None:
    """Fill `out` with the index of the first maximum of every row; arbitrary for a row with NaN."""
    x, dim = chunk.x, chunk.dim
    if dim == 0:
        # Index of the first maximum: C plus the minimum over k of k - C, restricted to maxima.
        n_classes = len(x)
        before_end = torch.arange(-n_classes, 0, dtype=x.dtype, device=x.device).unsqueeze(-1)
        is_top = torch.eq(x, x.amax(0, keepdim=True), out=chunk.q)
        out.copy_(is_top.mul_(before_end).amin(0, keepdim=True).add_(n_classes).clamp_(max=n_classes - 1))
    elif x.device.type == "cpu":
        np.argmax(x.numpy(), -1, out=out.numpy()[:, 0])  # numpy vectorises argmax, torch does not
    else:
        torch.argmax(x, -1, True, out=out)


def _logit_sums(values: Tensor, label: Tensor, top: Tensor, replace_infinite: bool) -> Tensor:
    """Fill `top` with the top classes, and return six numbers of every row, `(6, n)`.

    Let x be the logits, and q a multiple of the probabilities. The numbers are x of the label, x and q of the top
    class, and the sums of q, q^2 and q (x - max x) over the other classes. Logits of +inf can give NaN if
    `replace_infinite` is False.
    """
    sums, labels, places = _columns(6, values, label, top)
    for chunk in _chunks(values, (labels, places, *sums)):
        # 1. exp(x - max x) or softmax: the scores need q up to a factor only.
        x, q, shifted, dim, (h, first, at_label, at_top, q_top, rest, squares, product) = chunk
        if replace_infinite:
            x = spread_infinite_logits(x.movedim(dim, -1)).movedim(-1, dim)
        # Softmax is faster than exp. For transposed rows it would use scalar code at the end, which rounds differently.
        if dim:  # first, because it loads x into the cache in all threads
            torch.softmax(x, dim, out=q)
        _fill_first_largest(chunk, first)
        torch.gather(x, dim, h, out=at_label)
        torch.gather(x, dim, first, out=at_top)
        torch.sub(x, at_top, out=shifted)
        if replace_infinite:
            shifted.clamp_min_(LOWEST)
        if not dim:
            torch.exp(shifted, out=q)
        # 2. The three sums over the other classes, which overwrite q and the shifted logits.
        torch.gather(q, dim, first, out=q_top)
        q.scatter_(dim, first, 0)  # exclude the top class: adding its q would round small q of other classes to 0
        torch.sum(q, dim, True, out=rest)
        torch.sum(shifted.mul_(q), dim, True, out=product)
        torch.sum(q.mul_(q), dim, True, out=squares)
    if len(places) > len(top):
        top.copy_(places[: len(top)])
    return sums[:, : len(top)]


def _scores_from_logit_sums(sums: Tensor, hit: Tensor) -> Tensor:
    """Compute the four scores from the result of `_logit_sums`; `hit` is True where the label is the top class."""
    at_label, at_top, q_top, rest, squares, product = sums
    # Normalise by this sum in `wide_dtype`, which is more accurate than the float32 sum of softmax.
    total = q_top + rest
    log_total = elementwise(torch.log1p, rest / q_top)
    shift = at_label - at_top
    # Squared error sum_k q_k^2 - 2 q_h + 1, without cancellation if the label is the top class: 1 - q_h = rest / total.
    confidence = q_top / total
    label_terms = 1 - 2 * elementwise(torch.exp, shift) * confidence
    squared_error = torch.where(hit, rest * rest, q_top * q_top).add_(squares).div_(total * total)
    squared_error += label_terms.masked_fill_(hit, 0)
    return torch.stack((shift - log_total, squared_error, product / total - log_total, confidence))


def _probability_sums(values: Tensor, label: Tensor, top: Tensor) -> Tensor:
    """Fill `top` with the top classes, and return five numbers of every row with probabilities q, `(5, n)`.

    These are q of the label, q of the top class, and the sums of q^2 (without the top class), q log q and q.
    """
    sums, labels, places = _columns(5, values, label, top)
    for chunk in _chunks(values, (labels, places, *sums)):
        x, q, logs, dim, (h, first, at_label, at_top, squares, entropy, total) = chunk
        _fill_first_largest(chunk, first)
        torch.gather(x, dim, h, out=at_label)
        torch.gather(x, dim, first, out=at_top)
        torch.sum(torch.mul(x, x, out=q).scatter_(dim, first, 0), dim, True, out=squares)
        torch.sum(x, dim, True, out=total)
        torch.sum(torch.log(x, out=logs).clamp_min_(LOWEST).mul_(x), dim, True, out=entropy)
    if len(places) > len(top):
        top.copy_(places[: len(top)])
    return sums[:, : len(top)]


def _scores_from_probability_sums(sums: Tensor, hit: Tensor, tolerance: float) -> Tensor:
    """Compute the four scores from the result of `_probability_sums`; NaN for rows that violate `tolerance`."""
    at_label, at_top, squares, entropy, total = sums
    others = (at_top * at_top - at_label * at_label).masked_fill_(hit, 0)
    miss = 1 - at_label
    invalid = entropy.isfinite().logical_not_()
    scores = torch.stack((elementwise(torch.log, at_label), miss * miss + squares + others, entropy, at_top))
    scores[2:].masked_fill_(invalid, torch.nan)
    if math.isfinite(tolerance):
        scores.masked_fill_(~(((total - 1).abs() <= tolerance) & (at_top <= 1)) | invalid, torch.nan)
    return scores
