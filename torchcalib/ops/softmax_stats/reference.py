"""The row op in tensor operations: in chunks of rows that stay in cache, and as a formula that can be differentiated.

Rows get the same bits wherever they stand: softmax and sums work row by row, sums and products of two numbers are
rounded in one way only, and functions of one number per row are taken over padded columns (`_of`). Vectorised and
scalar code of a function differ in the last digit, and what stands at the end of a tensor gets the latter. There are
always two rows, for a sum over a whole tensor is divided among threads.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.logs import safe_log, spread_infinite_logits, wide_dtype, xmul

_CHUNK = 2**18  # entries: fewer pay for the calls, more for leaving the cache
_COLUMN = 2**14  # rows: below the length from which torch divides a column among threads
_FEW = 16  # classes up to which rows stand side by side
_LANES = 64  # at least what any processor computes at once
_LOWEST = -1000  # a shift whose exp is 0 in any dtype


class _Chunk(NamedTuple):
    """Some rows: `(n, C)`, or side by side `(C, n)`, where a row of few classes would leave a processor's lanes empty.

    Attributes:
        x: the rows, at least float32, not to be written into.
        q: array like `x` to work in.
        buffer: array like `x` to work in.
        dim: the axis of classes.
        columns: what else there is to a row, of length 1 along the axis of classes.
    """

    x: Tensor
    q: Tensor
    buffer: Tensor
    dim: int
    columns: tuple[Tensor, ...]


def forward(values: Tensor, target: Tensor, from_logits: bool, tolerance: float, scores: Tensor, top: Tensor) -> None:
    """Fill in what `row_op.rows` says of every row.

    Args:
        values: `(R, C)` of any floating dtype, with any strides.
        target: `(R,)` int64.
        from_logits: whether `values` are logits.
        tolerance: of the sum of probabilities; infinite for none of these checks.
        scores: `(4, R)` of the wide dtype.
        top: `(R,)` int64.
    """
    if len(values) == 1:
        found, place = scores.new_empty(len(scores), 2), top.new_empty(2)
        forward(values.expand(2, -1), target.expand(2), from_logits, tolerance, found, place)
        scores.copy_(found[:, :1])
        top.copy_(place[:1])
        return
    # Infinite logits are rare: they are looked for in the results, but where that would wait for a device.
    careful = values.device.type != "cpu"
    for block in _blocks(len(values)):
        x, h, first = values[block], target[block], top[block]
        known = (h >= 0) & (h < values.shape[-1])
        label = h.masked_fill(~known, 0)
        if from_logits:
            sums = _logit_sums(x, label, first, careful)
            if not careful and not math.isfinite(sums.sum()):
                careful = True
                sums = _logit_sums(x, label, first, careful)
            found = _of_logit_sums(sums.to(scores.dtype), label == first)
        else:
            sums = _probability_sums(x, label, first).to(scores.dtype)
            found = _of_probability_sums(sums, label == first, tolerance)
        scores[:, block] = found
        scores[:2, block].masked_fill_(~known, torch.nan)


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill in the gradient in `values`.

    Args:
        values: see `forward`.
        target: see `forward`.
        from_logits: see `forward`.
        scores: what `forward` found.
        top: what `forward` found.
        grads: gradient in `scores`.
        out: `(R, C)` of the dtype of `values`.
    """
    factors_of = _logit_factors if from_logits else _probability_factors
    fill = _logit_gradient if from_logits else _probability_gradient
    for block in _blocks(len(values)):
        x, h, first, upstream = values[block], target[block], top[block], grads[:, block]
        known = (h >= 0) & (h < values.shape[-1])
        label = h.masked_fill(~known, 0)
        at_label, at_top = (x.gather(-1, at.unsqueeze(-1)).squeeze(-1).to(scores.dtype) for at in (label, first))
        factors = factors_of(at_label, at_top, label == first, scores[:, block], upstream)
        # A row whose gradients are all 0 is left out, and may hold anything.
        untouched = (upstream == 0).all(0) | (from_logits & (at_top == torch.inf))
        fixed = torch.where(untouched, 0.0, torch.where(known, 1.0, torch.nan)).to(scores.dtype)
        any_fixed = _may_be(fixed != 1)
        dtype = _dtype(values)
        for chunk in _chunks(x, (label, first, out[block], *(column.to(dtype) for column in (fixed, *factors)))):
            at, place, into, constant, *own = chunk.columns
            found = fill(chunk, at, place, own)
            into.copy_(torch.where(constant == 1, found, constant) if any_fixed else found)


def gradient(values: Tensor, target: Tensor, from_logits: bool, grads: Tensor) -> Tensor:
    """Return the gradient of `row_op.rows` in `values`, itself differentiable in `values` and `grads`.

    Args:
        values: `(..., N, C)`.
        target: `(..., N)` int64.
        from_logits: whether `values` are logits.
        grads: gradient in the scores, `(..., 4, N)`.
    """
    x = values.to(wide_dtype(values.device))
    # A row of which nothing is asked may hold anything, as in `backward`; others keep how that changes with `grads`.
    readable = x.amax(-1) > -torch.inf if from_logits else (x >= 0).all(-1)
    x = x.masked_fill(((grads == 0).all(-2) & ~readable).unsqueeze(-1), 0)
    of_log, of_square, of_entropy, of_confidence = grads.to(x.dtype).unsqueeze(-1).unbind(-3)
    classes = torch.arange(x.shape[-1], device=x.device)
    is_label = (classes == target.unsqueeze(-1)).to(x.dtype)
    is_top = (classes == x.detach().argmax(-1, keepdim=True)).to(x.dtype)
    if not from_logits:
        certain = safe_log(x)
        slope = xmul(torch.ones_like(x), certain + 1).masked_fill(x == 0, 0)
        inverse = is_label / x.masked_fill(x == 0, 1) * (x != 0)
        found = of_log * inverse + 2 * of_square * (x - is_label) + of_entropy * slope + of_confidence * is_top
    else:
        log_q = spread_infinite_logits(x).log_softmax(-1)
        q = log_q.exp()
        log_q = log_q.masked_fill(q == 0, 0)
        entropy = (q * log_q).sum(-1, keepdim=True)
        miss = q - is_label
        found = of_log * (is_label - q) + of_entropy * q * (log_q - entropy)
        found = found + 2 * of_square * q * (miss - (q * miss).sum(-1, keepdim=True))
        found = found + of_confidence * (q * is_top).sum(-1, keepdim=True) * (is_top - q)
        found = found.masked_fill(x.amax(-1, keepdim=True) == torch.inf, 0)
    return found.to(values.dtype)


def _dtype(values: Tensor) -> torch.dtype:
    """Return the dtype of arithmetic on entries."""
    return torch.promote_types(values.dtype, torch.float32)


def _blocks(n: int) -> Iterator[slice]:
    """Cut rows into blocks, none of one row."""
    n_blocks = -(-n // _COLUMN)
    for k in range(n_blocks):
        yield slice(n * k // n_blocks, n * (k + 1) // n_blocks)


def _chunks(values: Tensor, columns: tuple[Tensor, ...]) -> Iterator[_Chunk]:
    """Yield rows a chunk at a time, none of one row, with their parts of columns `(n,)` or `(n, C)`.

    Columns may be longer than the rows. Then rows that stand side by side are followed by others that mean nothing.
    """
    n, n_classes = values.shape
    dtype = _dtype(values)
    parts = [column if column.dim() == 2 else column.unsqueeze(-1) for column in columns]
    if n_classes <= _FEW:  # as many as a block holds are one chunk
        x, q, buffer = torch.empty(3, n_classes, len(parts[0]), dtype=dtype, device=values.device)
        x[:, :n] = values.T
        x[:, n:] = 0
        yield _Chunk(x, q, buffer, 0, tuple(part.T for part in parts))
        return
    n_chunks = max(1, min(n // 2, -(-n * n_classes // _CHUNK)))
    arrays = torch.empty(3, -(-n // n_chunks), n_classes, dtype=dtype, device=values.device)
    rows = (values, *parts)
    for x, *own in zip(*(each.tensor_split(n_chunks) for each in rows), strict=True) if n_chunks > 1 else [rows]:
        copy, q, buffer = arrays[:, : len(x)]
        direct = x.dtype == dtype and x.is_contiguous()
        yield _Chunk(x if direct else copy.copy_(x), q, buffer, -1, tuple(own))


def _columns(n: int, values: Tensor, label: Tensor, top: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `n` columns to fill in, the labels and a column for the top; all padded where rows stand side by side.

    There what stands at the end of a tensor is added in another order than the rest.
    """
    extra = -len(label) % _LANES if values.shape[-1] <= _FEW else 0
    columns = torch.empty(n, len(label) + extra, dtype=_dtype(values), device=values.device)
    return columns, _padded(label, extra), _padded(top, extra)


def _padded(column: Tensor, extra: int) -> Tensor:
    return torch.nn.functional.pad(column, (0, extra)) if extra else column


def _may_be(condition: Tensor) -> bool:
    """Return whether a condition holds anywhere; True where an answer would have to be waited for."""
    return condition.device.type != "cpu" or bool(condition.any())


def _of(function: Literal["exp", "log", "log1p"], column: Tensor) -> Tensor:
    """Return a function of a column of a block, with every element in the middle of a tensor."""
    result: Tensor = getattr(torch, function)(_padded(column, -len(column) % _LANES))
    return result[: len(column)]


def _fill_first_largest(chunk: _Chunk, out: Tensor) -> None:
    """Fill in the place of the first maximum of every row. Of a row that holds NaN, any place."""
    x, dim = chunk.x, chunk.dim
    if dim == 0:
        # Of the maxima the least k - C; 0 of all else.
        n_classes = len(x)
        before_end = torch.arange(-n_classes, 0, dtype=x.dtype, device=x.device).unsqueeze(-1)
        is_top = torch.eq(x, x.amax(0, keepdim=True), out=chunk.q)
        out.copy_(is_top.mul_(before_end).amin(0, keepdim=True).add_(n_classes).clamp_(max=n_classes - 1))
    elif x.device.type == "cpu":
        np.argmax(x.numpy(), -1, out=out.numpy()[:, 0])  # at the speed of memory, where torch compares one by one
    else:
        torch.argmax(x, -1, True, out=out)


def _fill_proportional(shifted: Tensor, dim: int, out: Tensor) -> None:
    """Fill in multiples of probabilities. Softmax is the faster exp, but side by side some rows get scalar code."""
    if dim == 0:
        torch.exp(shifted, out=out)
    else:
        torch.softmax(shifted, dim, out=out)


def _logit_sums(values: Tensor, label: Tensor, top: Tensor, careful: bool) -> Tensor:
    """Fill in `top`. Return, each `(n,)`, the logits of label and top, q of the top, and sums over all others.

    Of q, q^2 and q (x - largest), with q a multiple of the probabilities. If not `careful`, rows in which a logit is
    infinite may hold NaN.
    """
    sums, labels, places = _columns(6, values, label, top)
    for chunk in _chunks(values, (labels, places, *sums)):
        x, q, shifted, dim, (h, first, at_label, at_top, of_top, rest, squares, product) = chunk
        _fill_first_largest(chunk, first)
        if careful:
            x = spread_infinite_logits(x.movedim(dim, -1)).movedim(-1, dim)
        torch.gather(x, dim, h, out=at_label)
        torch.gather(x, dim, first, out=at_top)
        torch.sub(x, at_top, out=shifted)
        if careful:
            shifted.clamp_min_(_LOWEST)
        _fill_proportional(shifted, dim, q)
        torch.gather(q, dim, first, out=of_top)
        q.scatter_(dim, first, 0)  # the rest keeps its digits where the top one has none left to 1
        torch.sum(q, dim, True, out=rest)
        torch.sum(shifted.mul_(q), dim, True, out=product)
        torch.sum(q.mul_(q), dim, True, out=squares)
    if len(places) > len(top):
        top.copy_(places[: len(top)])
    return sums[:, : len(top)]


def _of_logit_sums(sums: Tensor, hit: Tensor) -> Tensor:
    at_label, at_top, of_top, rest, squares, product = sums
    # What q is a multiple by: softmax divides by a plain sum of float32, which is off by more than these sums.
    total = of_top + rest
    log_total = _of("log1p", rest / of_top)
    shift = at_label - at_top
    confidence = of_top / total
    own = 1 - 2 * _of("exp", shift) * confidence
    squared_error = torch.where(hit, rest * rest, of_top * of_top).add_(squares).div_(total * total)
    squared_error += own.masked_fill_(hit, 0)
    return torch.stack((shift - log_total, squared_error, product / total - log_total, confidence))


def _probability_sums(values: Tensor, label: Tensor, top: Tensor) -> Tensor:
    """Fill in `top`. Return, each `(n,)`, q of label and top, and sums: q^2 of all but the top, q log q, and q."""
    sums, labels, places = _columns(5, values, label, top)
    for chunk in _chunks(values, (labels, places, *sums)):
        x, q, logs, dim, (h, first, at_label, at_top, squares, entropy, total) = chunk
        _fill_first_largest(chunk, first)
        torch.gather(x, dim, h, out=at_label)
        torch.gather(x, dim, first, out=at_top)
        torch.sum(torch.mul(x, x, out=q).scatter_(dim, first, 0), dim, True, out=squares)
        torch.sum(x, dim, True, out=total)
        torch.sum(torch.log(x, out=logs).clamp_min_(_LOWEST).mul_(x), dim, True, out=entropy)
    if len(places) > len(top):
        top.copy_(places[: len(top)])
    return sums[:, : len(top)]


def _of_probability_sums(sums: Tensor, hit: Tensor, tolerance: float) -> Tensor:
    at_label, at_top, squares, entropy, total = sums
    others = (at_top * at_top - at_label * at_label).masked_fill_(hit, 0)
    miss = 1 - at_label
    poison = entropy.isfinite().logical_not_()
    scores = torch.stack((_of("log", at_label), miss * miss + squares + others, entropy, at_top))
    scores[2:].masked_fill_(poison, torch.nan)
    if math.isfinite(tolerance):
        scores.masked_fill_(~(((total - 1).abs() <= tolerance) & (at_top <= 1)) | poison, torch.nan)
    return scores


def _logit_factors(at_label: Tensor, at_top: Tensor, hit: Tensor, scores: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
    """Return q_top and a, b, c of the gradient q (a + b q + c (x - largest)), and the gradient at top and label.

    These two are made here, in wide numbers: where 1 - q is a factor float32 would lose it.
    """
    log_prob, squared_error, neg_entropy, confidence = scores
    of_log, of_square, of_entropy, of_confidence = grads
    q_h = _of("exp", log_prob)
    # Of the shifts x - largest, of which log q differs by a constant.
    mean_shift = neg_entropy - _of("log", confidence)
    a = -of_log - of_confidence * confidence - 2 * of_square * (squared_error - 1 + q_h) - of_entropy * mean_shift
    b = 2 * of_square
    own = of_log - b * q_h
    at_top_ = confidence * (a + b * confidence + of_confidence)
    shift = (at_label - at_top).masked_fill(q_h == 0, 0)
    at_label_ = torch.where(hit, at_top_, q_h * (a + b * q_h + of_entropy * shift)) + own
    return confidence, a, b, of_entropy, at_top_, at_label_


def _logit_gradient(chunk: _Chunk, label: Tensor, first: Tensor, factors: list[Tensor]) -> Tensor:
    """Return the gradient in rows of logits."""
    x, q, found, dim, _ = chunk
    confidence, a, b, c, at_top, at_label = factors
    torch.sub(x, x.gather(dim, first), out=found).clamp_min_(_LOWEST)
    _fill_proportional(found, dim, q)
    q.mul_(confidence / q.gather(dim, first))
    found.mul_(c).add_(a).addcmul_(q, b).mul_(q)
    return found.scatter_(dim, first, at_top).scatter_(dim, label, at_label)


def _probability_factors(q_h: Tensor, _: Tensor, __: Tensor, ___: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
    """Return b and c of the gradient b q + c (log q + 1), the gradient at the label, and what the top has more."""
    of_log, of_square, of_entropy, of_confidence = grads
    of_label = (of_log / q_h + of_entropy * (_of("log", q_h) + 1)).masked_fill(q_h == 0, 0)
    return 2 * of_square, of_entropy, of_label + 2 * of_square * (q_h - 1), of_confidence


def _probability_gradient(chunk: _Chunk, label: Tensor, first: Tensor, factors: list[Tensor]) -> Tensor:
    """Return the gradient in rows of probabilities."""
    x, q, found, dim, _ = chunk
    b, c, at_label, more_at_top = factors
    torch.log(x, out=found).add_(1).masked_fill_(x == 0, 0)
    found.mul_(c).add_(torch.mul(x, b, out=q))
    return found.scatter_(dim, label, at_label).scatter_add_(dim, first, more_at_top)
