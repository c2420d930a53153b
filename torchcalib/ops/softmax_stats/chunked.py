"""Statistics of rows in plain torch, in chunks that fit into the CPU cache.

Results of a row are bitwise equal at any position in the input. torch computes softmax and sums separately for every
row, but not elementwise functions, so `logs.elementwise` replaces these. A chunk has at least two rows, because torch
splits the sum of a single row among threads.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.logs import LANES, elementwise, spread_infinite_logits, wide_dtype
from torchcalib.ops.softmax_stats.formula import LOWEST, Detail
from torchcalib.ops.softmax_stats.logit_sums import Sums, gradient_terms, scores_of

_CHUNK = 2**19  # entries per chunk on the CPU: fewer would need more calls, and more would not fit the cache
_CHUNK_OFF_CPU = 2**24  # entries per chunk on other devices: larger chunks need fewer kernel launches
_COLUMN = 2**14  # rows per block, because torch splits longer columns among threads
_FEW_CLASSES = 16  # largest number of classes for which chunks are transposed
_FEW_ROWS = 2**10  # largest number of rows of few classes for which numpy finds the top classes faster
MAX_ROWS = math.inf  # largest number of rows of a `summary`: torch divides its sums among threads


class _Chunk(NamedTuple):
    """Rows `(n, C)`, or their transpose `(C, n)` for few classes, so that vector instructions span many rows."""

    x: Tensor  # rows, float32 or float64, read-only
    q: Tensor  # uninitialised tensor of the shape of `x`, for intermediate results
    buffer: Tensor  # like `q`
    dim: int  # class axis of `x`
    label: Tensor  # labels, of size 1 along the class axis


def forward(
    values: Tensor, target: Tensor, from_logits: bool, tolerance: float, detail: Detail = "entropy"
) -> tuple[Tensor, Tensor]:
    """Return the first four statistics of `Rows` `(4, R)`, and the top classes `(R,)`, of rows `(R, C)`; see `rows`."""
    if len(values) == 1:  # duplicate the row, because torch would split the sum of a single row among threads
        scores, top = forward(values.expand(2, -1), target.expand(2), from_logits, tolerance, detail)
        return scores[:, :1], top[:1]
    # Infinite logits are rare. On the CPU they are replaced only if a sum is not finite. On other devices they are
    # always replaced, because testing the sums would synchronise the device.
    replace_infinite = values.device.type != "cpu"
    wide, parts = wide_dtype(values.device), []
    for x, h in _blocks(values, target):
        label = h.clamp(0, x.shape[-1] - 1)
        if from_logits:
            top, sums = _logit_sums(x, label, replace_infinite, detail)
            if not replace_infinite and not math.isfinite(sums.sum().item()):
                replace_infinite = True
                top, sums = _logit_sums(x, label, replace_infinite, detail)
            at_label, at_top, q_top, rest, *more = sums.to(wide)
            rest = rest / q_top  # relative to the top class, like e = exp(x - max x)
            squares = more[0] / (q_top * q_top) if more else rest
            product = more[1] / q_top if len(more) > 1 else rest
            scores = scores_of(Sums(at_label, at_top, top, rest, squares, product, rest), label == top)
        else:
            top, sums = _probability_sums(x, label, detail)
            scores = _scores_from_probability_sums(sums.to(wide), label == top, tolerance, detail)
        if values.device.type != "cpu" or not torch.equal(label, h):  # on a GPU the test would synchronise the device
            scores[:2].masked_fill_(label != h, torch.nan)
        parts.append((scores, top))
    scores, top = _joined(parts)
    return scores, top


def summary(
    values: Any, target: Any, from_logits: bool, tolerance: float, detail: Detail
) -> tuple[Any, Any, list[float]] | None:
    """Return confidences, outcomes and totals, as in `core.batch_summary`; None if a row or a label is invalid."""
    scores, top = forward(torch.from_numpy(values), torch.from_numpy(target), from_logits, tolerance, detail)
    rows, outcomes = scores.numpy(), (top.numpy() == target).view(np.uint8)
    totals = [*rows.sum(-1).tolist(), np.count_nonzero(outcomes)]
    return None if math.isnan(totals[0]) else (rows[3], outcomes, totals)


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill `out` with the gradient in `values`, given the results of `forward` and the gradients in them, `(4, R)`.

    For logits x the gradient is q (a + b q + c (x - max x)). For probabilities q it is b q + c (log q + 1). The scores
    and incoming gradients of a row determine its coefficients a, b, c. The label and the top class have further terms.
    Their gradients can have the factor 1 - q, which float32 would round to 0, and are computed in `wide_dtype`.
    """
    size = max(2, (_CHUNK if values.device.type == "cpu" else _CHUNK_OFF_CPU) // values.shape[-1])
    on_cpu = values.device.type == "cpu"
    is_linear = on_cpu and not grads[1:3].any()  # then b = c = 0
    for start in range(0, len(values), size):
        block = slice(start, start + size)
        x, h, first, upstream = values[block].to(_dtype(values)), target[block], top[block], grads[:, block]
        # An invalid label is replaced by class 0, and its gradient by NaN at the end.
        known = (h >= 0) & (h < x.shape[-1])
        label, first = h.masked_fill(~known, 0).unsqueeze(-1), first.unsqueeze(-1)
        at_label, at_top = (x.gather(-1, at).squeeze(-1).to(scores.dtype) for at in (label, first))
        if from_logits:
            buffer = out[block] if is_linear and out.dtype == x.dtype else None
            result = _logit_gradient(x, label, first, scores[:, block], upstream, is_linear, buffer)
        else:
            result = _probability_gradient(x, label, first, at_label, upstream)
        # Rows with +inf, and all rows whose incoming gradients are 0, have gradient 0.
        flat = (upstream == 0).all(0) | (from_logits & (at_top == torch.inf))
        if not on_cpu or bool((flat | ~known).any()):  # on a GPU the test would synchronise the device
            result = result.masked_fill(~known.unsqueeze(-1), torch.nan).masked_fill(flat.unsqueeze(-1), 0)
        if result.data_ptr() != out[block].data_ptr():
            out[block] = result


def _logit_gradient(
    x: Tensor, label: Tensor, first: Tensor, scores: Tensor, grads: Tensor, is_linear: bool, buffer: Tensor | None
) -> Tensor:
    """Return the gradient in logits `(n, C)` by the formula of `backward`, with its terms for label and top class.

    If `is_linear`, b and c are 0, and the gradient is computed in the `buffer` if given.
    """
    # All classes by the formula, then the label and the top class again by their terms in `wide_dtype`.
    terms = gradient_terms(scores, grads, (label == first).squeeze(-1))
    confidence, a, b, c, for_top, for_label = (column.to(x.dtype).unsqueeze(-1) for column in (scores[3], *terms))
    if is_linear:
        q = torch.softmax(x, -1, out=buffer)
        return q.mul_(confidence * a / q.gather(-1, first)).scatter_(-1, first, for_top).scatter_(-1, label, for_label)
    shifts = (x - x.gather(-1, first)).clamp_(min=LOWEST)
    q = shifts.softmax(-1)  # not exp, whose rounding depends on the position of the row
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


def _blocks(values: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of rows with their labels: at most `_COLUMN` rows each, and at least two rows if n >= 2."""
    n_blocks = -(-len(values) // _COLUMN)
    if n_blocks == 1:
        return iter([(values, target)])
    return zip(values.tensor_split(n_blocks), target.tensor_split(n_blocks), strict=True)


def _chunks(values: Tensor, label: Tensor) -> Iterator[_Chunk]:
    """Yield chunks of at least two rows of `values` `(n, C)`, or all rows for few classes, padded with rows of 0."""
    n, n_classes = values.shape
    dtype = _dtype(values)
    if n_classes <= _FEW_CLASSES:  # transpose; a block is one chunk
        # Pad to a multiple of `LANES`. Otherwise torch would sum the last rows in a different order.
        extra = -n % LANES
        x, q, buffer = torch.empty(3, n_classes, n + extra, dtype=dtype, device=values.device).unbind()
        if extra:
            x[:, n:] = 0
            x[:, :n] = values.T
            label = pad(label, (0, extra))
        else:
            x.copy_(values.T)
        yield _Chunk(x, q, buffer, 0, label.unsqueeze(0))
        return
    n_chunks = max(1, min(n // 2, -(-n * n_classes // _CHUNK)))
    arrays = torch.empty(3, -(-n // n_chunks), n_classes, dtype=dtype, device=values.device)
    chunks = zip(values.tensor_split(n_chunks), label.tensor_split(n_chunks), strict=True)
    for x, h in chunks if n_chunks > 1 else [(values, label)]:
        copy, q, buffer = arrays[:, : len(x)].unbind()
        direct = x.dtype == dtype and x.is_contiguous()
        yield _Chunk(x if direct else copy.copy_(x), q, buffer, -1, h.unsqueeze(-1))


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the sums `(k, n)` and the top classes `(n,)` of chunks or blocks."""
    if len(parts) == 1:
        return parts[0]
    sums, tops = zip(*parts, strict=True)
    return torch.cat(sums, -1), torch.cat(tops, -1)


def first_largest(x: Tensor) -> Tensor:
    """Return the index of the first maximum of every row `(n, C)`; arbitrary for NaN."""
    # numpy vectorises argmax along rows, torch does not.
    return torch.from_numpy(np.argmax(x.numpy(), -1)) if x.device.type == "cpu" else torch.argmax(x, -1)


def _first_largest(chunk: _Chunk) -> Tensor:
    """Return the index of the first maximum of every row, of size 1 along the class axis; arbitrary for NaN."""
    x, dim = chunk.x, chunk.dim
    if x.device.type == "cpu" and (dim == -1 or x.shape[1] <= _FEW_ROWS):
        # numpy vectorises argmax along rows, torch does not.
        return torch.from_numpy(np.argmax(x.numpy(), dim)).unsqueeze(dim)
    if dim == -1:
        return torch.argmax(x, -1, True)
    # Index of the first maximum: C plus the minimum over k of k - C, restricted to maxima.
    n_classes = len(x)
    before_end = torch.arange(-n_classes, 0, dtype=x.dtype, device=x.device).unsqueeze(-1)
    is_top = torch.eq(x, x.amax(0, keepdim=True), out=chunk.q)
    return is_top.mul_(before_end).amin(0, keepdim=True).add_(n_classes).clamp_(max=n_classes - 1).long()


def _of_rows(columns: list[Tensor], top: Tensor, dim: int, n: int) -> tuple[Tensor, Tensor]:
    """Return numbers of n rows as `(k, n)`, and their top classes `(n,)`, from columns of size 1 along the class axis.

    Columns may be padded.
    """
    if dim == -1:
        return torch.cat(columns, -1).T, top.squeeze(-1)
    sums = torch.cat(columns)
    return (sums, top[0]) if sums.shape[1] == n else (sums[:, :n], top[0, :n])


def _logit_sums(values: Tensor, label: Tensor, replace_infinite: bool, detail: Detail) -> tuple[Tensor, Tensor]:
    """Return four to six numbers of every row, `(4, n)` to `(6, n)`, and the top classes `(n,)`.

    Let x be the logits, and q a multiple of the probabilities. The numbers are x of the label, x and q of the top
    class, and the sum of q over the other classes. With more `detail` they include the sums of q^2 and q (x - max x)
    over the other classes. Logits of +inf can give NaN if `replace_infinite` is False.
    """
    parts = []
    for chunk in _chunks(values, label):
        # 1. exp(x - max x) or softmax: the scores need q up to a factor only.
        x, q, shifted, dim, h = chunk
        if replace_infinite:
            x = spread_infinite_logits(x.movedim(dim, -1)).movedim(-1, dim)
        # Softmax is faster than exp. For transposed rows it would use scalar code at the end, which rounds differently.
        if dim:  # first, because it loads x into the cache in all threads
            torch.softmax(x, dim, out=q)
        top = _first_largest(chunk)
        at_label, at_top = x.gather(dim, h), x.gather(dim, top)
        if not dim or detail == "entropy":
            torch.sub(x, at_top, out=shifted)
            if replace_infinite:
                shifted.clamp_min_(LOWEST)
        if not dim:
            torch.exp(shifted, out=q)
        # 2. The sums over the other classes, which overwrite q and the shifted logits.
        q_top = q.gather(dim, top)
        q.scatter_(dim, top, 0)  # exclude the top class: adding its q would round small q of other classes to 0
        columns = [at_label, at_top, q_top, q.sum(dim, True)]
        product = shifted.mul_(q).sum(dim, True) if detail == "entropy" else None
        if detail != "confidence":
            columns.append(q.mul_(q).sum(dim, True))
        if product is not None:
            columns.append(product)
        parts.append(_of_rows(columns, top, dim, len(x) if dim else len(values)))
    sums, top = _joined(parts)
    return top, sums


def sums(logits: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the four sums of `Sums` over parts of the classes `(4, P, n)`, and their top classes `(P, n)`; P is 1."""
    size, parts = max(1, (_CHUNK if logits.device.type == "cpu" else _CHUNK_OFF_CPU) // logits.shape[-1]), []
    for start in range(0, max(1, len(logits)), size):
        x = logits[start : start + size]
        top = first_largest(x).unsqueeze(-1)
        largest = x.gather(-1, top)
        shifted = torch.where(x == largest, 0, x - largest)  # equal logits have difference 0, also if infinite
        shifted = (shifted if alpha is None else shifted.mul_(alpha)).clamp_(min=LOWEST)
        e = shifted.exp().scatter_(-1, top, 0)
        product = shifted * e
        terms = e, e * e, product, product * shifted
        parts.append((torch.stack([term.sum(-1) for term in terms]), top.squeeze(-1)))
    columns, tops = _joined(parts)
    return columns.to(wide_dtype(logits.device)).unsqueeze(1), tops.unsqueeze(0)


def _probability_sums(values: Tensor, label: Tensor, detail: Detail) -> tuple[Tensor, Tensor]:
    """Return five numbers of every row with probabilities q, `(5, n)`, and the top classes `(n,)`.

    These are q of the label, q of the top class, and the sums of q, q log q and q^2 (without the top class). Without
    the entropy, the smallest q replaces the sum of q log q. Only with more `detail` is q^2 summed.
    """
    parts = []
    for chunk in _chunks(values, label):
        x, q, logs, dim, h = chunk
        top = _first_largest(chunk)
        columns = [x.gather(dim, h), x.gather(dim, top), x.sum(dim, True)]
        if detail == "entropy":
            columns.append(torch.log(x, out=logs).clamp_min_(LOWEST).mul_(x).sum(dim, True))
        else:
            columns.append(x.amin(dim, True))
        if detail != "confidence":
            columns.append(torch.mul(x, x, out=q).scatter_(dim, top, 0).sum(dim, True))
        parts.append(_of_rows(columns, top, dim, len(x) if dim else len(values)))
    sums, top = _joined(parts)
    return top, sums


def _scores_from_probability_sums(sums: Tensor, hit: Tensor, tolerance: float, detail: Detail) -> Tensor:
    """Compute the four scores from the result of `_probability_sums`; NaN for rows that violate `tolerance`.

    Scores without their sums are undefined.
    """
    at_label, at_top, total, entropy, *squares = sums.unbind()
    valid = entropy.isfinite() if detail == "entropy" else (entropy >= 0) & total.isfinite()
    invalid = valid.logical_not_()
    squared_error = at_label
    if squares:
        miss, others = 1 - at_label, (at_top * at_top - at_label * at_label).masked_fill_(hit, 0)
        squared_error = miss * miss + squares[0] + others
    scores = torch.stack((elementwise(torch.log, at_label), squared_error, entropy, at_top))
    scores[2:].masked_fill_(invalid, torch.nan)
    if math.isfinite(tolerance):
        scores.masked_fill_(~(((total - 1).abs() <= tolerance) & (at_top <= 1)) | invalid, torch.nan)
    return scores
