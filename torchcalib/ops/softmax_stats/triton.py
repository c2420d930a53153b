"""Statistics of rows by Triton kernels, and their gradient.

A program loads several rows of few classes, one row of many classes, or a part of a very long row. Its computation
depends on the number of classes, dtype and strides, but not on the number of rows. Results of a row are therefore
bitwise equal in every batch.

The sums exclude the top entry, which would round small entries to 0. They are float64 for float64 rows, and otherwise
float32. For many classes a second kernel merges the parts of rows and computes the scores in float64. In the first
kernel every thread of a warp would repeat these computations. Addresses are int64, because offsets can exceed 2^31.

A row of C classes is passed as C / `unit` units. A unit has at most 16 bytes. Its size determines the alignment
that the compiler can use for vector loads.
"""

import math
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcalib.ops.softmax_stats.formula import Detail

_FEW_CLASSES = 64  # largest number of classes for which one kernel computes sums and scores
_TILE = 2048  # entries per program for rows of at most `_FEW_CLASSES` classes
_PER_WARP = 1024  # entries per warp for rows of more than `_FEW_CLASSES` classes: 32 per thread
_PART = 4096  # largest part of a row that one program processes, in entries
_MERGED = 512  # parts of rows that one program merges
_LOWEST = tl.constexpr(-1000.0)  # exp of this number is 0 in every dtype
_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter lacks inline assembly


def forward(
    values: Tensor,
    target: Tensor,
    from_logits: bool,
    tolerance: float,
    detail: Detail = "entropy",  # noqa: ARG001 - arithmetic takes no time while the GPU waits for memory
) -> tuple[Tensor, Tensor]:
    """Compute `plain.forward` without synchronising the device."""
    n_rows, n_classes = values.shape
    scores = torch.empty(4, n_rows, dtype=torch.float64, device=values.device)
    top = torch.empty(n_rows, dtype=torch.int64, device=values.device)
    rows, block, warps = _launch_shape(n_classes)
    layout = in_units(values)
    row_arguments = [target.contiguous(), scores, n_rows, top, n_rows, tolerance]
    with torch.cuda.device_of(values):  # Triton launches kernels on the current device
        if block <= _FEW_CLASSES:
            _read_rows[(triton.cdiv(n_rows, rows),)](
                values, *layout, *row_arguments, from_logits, rows, block, num_warps=warps
            )
            return scores, top
        parts = triton.cdiv(n_classes, block)
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        partial = torch.empty(4, n_rows, parts, dtype=dtype, device=values.device)
        places = torch.empty(n_rows, parts, dtype=torch.int64, device=values.device)
        _read_parts[(triton.cdiv(n_rows, rows), parts)](
            values, *layout, partial, places, n_rows, from_logits, rows, block, num_warps=warps
        )
        n_slots = triton.next_power_of_2(parts)
        rows = max(1, _MERGED // n_slots) if n_slots > 1 else 128
        _merge_parts[(triton.cdiv(n_rows, rows),)](
            values, *layout, partial, places, parts, *row_arguments, from_logits, rows, n_slots, num_warps=4
        )
    return scores, top


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill `out` as `plain.backward` does, without synchronising the device.

    `grads` are the gradients in all scores `(4, n)`, or in the confidence only `(n,)`.
    """
    n_rows, n_classes = values.shape
    rows, block, warps = _launch_shape(n_classes)
    columns = target.contiguous(), scores.contiguous(), top.contiguous(), grads.contiguous()
    with torch.cuda.device_of(values):
        _fill_gradient[(triton.cdiv(n_rows, rows), triton.cdiv(n_classes, block))](
            values, *in_units(values), *columns, out, n_rows, grads.dim() == 1, from_logits, rows, block,
            num_warps=warps,
        )  # fmt: skip


def sums(logits: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `plain.sums` without synchronising the device, for parts of long rows."""
    n_rows, n_classes = logits.shape
    rows, block, warps = _launch_shape(n_classes)
    parts = triton.cdiv(n_classes, block)
    numbers = torch.empty(4, parts, n_rows, dtype=torch.float64, device=logits.device)
    places = torch.empty(parts, n_rows, dtype=torch.int64, device=logits.device)
    factor = torch.ones((), dtype=torch.float64, device=logits.device) if alpha is None else alpha
    if n_rows:
        with torch.cuda.device_of(logits):
            _fill_sums[(triton.cdiv(n_rows, rows), parts)](
                logits, *in_units(logits), factor, numbers, places, n_rows, rows, block, num_warps=warps
            )
    return numbers, places


def in_units(values: Tensor) -> tuple[int, int, int, int]:
    """Return row stride in units, column stride, number of units per row, and entries per unit."""
    n_classes, (row_stride, column_stride) = values.shape[1], values.stride()
    unit = math.gcd(16 // values.element_size(), n_classes, row_stride) if column_stride == 1 else 1
    return row_stride // unit, column_stride, n_classes // unit, unit


def _launch_shape(n_classes: int) -> tuple[int, int, int]:
    """Return the number of rows per program, the number of entries per row and program, and the number of warps."""
    block = min(triton.next_power_of_2(n_classes), _PART)
    if block <= _FEW_CLASSES:
        return min(_TILE // block, 512), block, 4
    return max(1, _PER_WARP // block), block, max(1, block // _PER_WARP)


@triton.jit
def log1p(x):  # noqa: ANN201
    """Return log(1 + x) for x > -1, compensated for the rounding error of 1 + x."""
    u = 1 + x
    exact = u == 1
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1, u - 1)))


@triton.jit
def exp(x):  # noqa: ANN201
    """Return exp x; float32 results below the smallest normal number are 0, which is faster than `tl.exp`."""
    if x.dtype == tl.float64 or _INTERPRETED:
        result = tl.exp(x)
    else:
        scaled = x * 1.4426950408889634
        result = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [scaled], tl.float32, True, 1)
    return result


@triton.jit
def _sums(values, row_at, column_stride, present, begin, n_classes, alpha, logits: tl.constexpr, block: tl.constexpr):
    """Return the largest entry of a block of each row, its first index, and four sums over the other entries.

    For logits x these are the sums of e, e^2, e d and e d^2 with d = alpha (x - max x) and e = exp d. For probabilities
    q they are the sums of q, q^2 and q log q, and 0. NaN in a row makes its sums NaN. Results have the shape `[rows]`.
    """
    # 1. Load a tile of rows x classes. Missing entries are -inf, which has no effect on the maximum and on exp.
    columns = begin + tl.arange(0, block)
    inside = present[:, None] & (columns < n_classes)[None, :]
    pointers = values + row_at[:, None] + columns.to(tl.int64)[None, :] * column_stride
    x = tl.load(pointers, mask=inside, other=float("-inf"))
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    # 2. Maximum m and its first index.
    largest = tl.max(x, 1)
    # No entry equals a maximum of NaN; `place` is then n_classes.
    place = tl.min(tl.where(x == largest[:, None], columns[None, :], n_classes), 1)
    others = columns[None, :] != place[:, None]
    # 3. Sums over the other entries: R, S and P of `numba._forward_logits`, relative to the maximum of this block.
    if logits:
        # Subtract 0 if all entries are -inf, so that every e is 0 and not NaN.
        d = alpha * (x - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
        e = tl.where(others, exp(d), 0.0)
        rest, squares = tl.sum(e, 1), tl.sum(e * e, 1)
        d = tl.where(d < _LOWEST, _LOWEST, d)
        product, spread = tl.sum(e * d, 1), tl.sum(e * d * d, 1)
        infinite = largest == float("inf")
        if tl.max(infinite.to(tl.int32), 0) > 0:  # limit of softmax: entries of +inf have e = 1, others e = 0
            ties = tl.sum(tl.where(x == float("inf"), 1.0, tl.where(x == x, 0.0, float("nan"))), 1).to(x.dtype)
            rest, squares = tl.where(infinite, ties - 1, rest), tl.where(infinite, ties - 1, squares)
            product, spread = tl.where(infinite, 0 * ties, product), tl.where(infinite, 0 * ties, spread)
    else:
        q = tl.where(others & inside, x, 0.0)
        rest, squares = tl.sum(q, 1), tl.sum(q * q, 1)
        product = tl.sum(q * tl.log(tl.where(q == 0, 1.0, q)), 1)
        product = tl.where(squares == squares, product, float("nan"))
        spread = 0 * rest
    return largest, tl.minimum(place, n_classes - 1).to(tl.int64), rest, squares, product, spread


@triton.jit
def _store_scores(
    values, row_at, column_stride, target, scores, score_stride, tops, row, present, tolerance, n_classes,
    largest, place, rest, squares, product, logits: tl.constexpr,
):  # fmt: skip
    """Compute and store the statistics of rows, from their largest entries and the sums over their other entries."""
    # 1. Load the entry of the label again, which is faster than a search in the tile.
    label = tl.load(target + row, mask=present, other=0)
    known = (label >= 0) & (label < n_classes)
    x = tl.load(values + row_at + label * column_stride, mask=present & known, other=0).to(tl.float64)
    hit = label == place
    nan = float("nan")
    # 2. Scores in float64, by steps 3 and 4 of `numba._forward_logits`.
    if logits:
        empty = largest == float("-inf")
        rest = tl.where(empty, nan, rest)
        total = 1 + rest
        log_total = log1p(rest)
        shift = tl.where(x == largest, 0.0, x - largest)
        log_prob = shift - log_total
        # Squared error sum_k q_k^2 - 2 q_h + 1, without cancellation if the label is the top class.
        missed = 1 - 2 * tl.exp(shift) / total + (1 + squares) / (total * total)
        error = tl.where(hit, (rest * rest + squares) / (total * total), missed)
        entropy = product / total - log_total
        confidence = 1 / total
    else:
        log_prob = tl.where(x == 0, float("-inf"), tl.log(tl.where(x == 0, 1.0, x)))
        missed = (1 - x) * (1 - x) + squares
        error = tl.where(hit, missed, missed + largest * largest - x * x)
        entropy = product + largest * tl.log(tl.where(largest == 0, 1.0, largest))
        confidence = tl.where(entropy == entropy, largest, nan)
        valid = (tl.abs(largest + rest - 1) <= tolerance) & (largest <= 1) & (entropy == entropy)
        known = known & (valid | (tolerance == float("inf")))
        entropy = tl.where(valid | (tolerance == float("inf")), entropy, nan)
        confidence = tl.where(valid | (tolerance == float("inf")), confidence, nan)
    tl.store(scores + row, tl.where(known, log_prob, nan), mask=present)
    tl.store(scores + score_stride + row, tl.where(known, error, nan), mask=present)
    tl.store(scores + 2 * score_stride + row, entropy, mask=present)
    tl.store(scores + 3 * score_stride + row, confidence, mask=present)
    tl.store(tops + row, place, mask=present)


@triton.jit(do_not_specialize=["n_rows", "tolerance"])
def _read_rows(
    values, row_units, column_stride, units, unit: tl.constexpr, target, scores, score_stride, tops, n_rows,
    tolerance, logits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute the statistics of rows of few classes, with `rows` rows per program."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    n_classes, row_at = units * unit, row * row_units * unit
    largest, place, rest, squares, product, _ = _sums(
        values, row_at, column_stride, present, 0, n_classes, 1.0, logits, block
    )
    _store_scores(
        values, row_at, column_stride, target, scores, score_stride, tops, row, present, tolerance, n_classes,
        largest.to(tl.float64), place, rest.to(tl.float64), squares.to(tl.float64), product.to(tl.float64), logits,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _read_parts(
    values, row_units, column_stride, units, unit: tl.constexpr, partial, places, n_rows,
    logits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the results of `_sums` for one part of each row. Grid: groups of rows, parts."""
    part = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    largest, place, rest, squares, product, _ = _sums(
        values, row * row_units * unit, column_stride, present, part * block, units * unit, 1.0, logits, block
    )
    n_parts = tl.num_programs(1)
    to = row * n_parts + part
    column = (tl.full([], 0, tl.int64) + n_rows) * n_parts
    tl.store(partial + to, largest, mask=present)
    tl.store(partial + column + to, rest, mask=present)
    tl.store(partial + 2 * column + to, squares, mask=present)
    tl.store(partial + 3 * column + to, product, mask=present)
    tl.store(places + to, place, mask=present)


@triton.jit(do_not_specialize=["n_rows"])
def _fill_sums(
    values, row_units, column_stride, units, unit: tl.constexpr, alpha, numbers, places, n_rows,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the four sums and the top class for one part of each row. Grid: groups of rows, parts."""
    part = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    factor = tl.load(alpha)
    factor = factor if values.dtype.element_ty == tl.float64 else factor.to(tl.float32)
    _, place, rest, squares, product, spread = _sums(
        values, row * row_units * unit, column_stride, present, part * block, units * unit, factor, True, block
    )
    to = part.to(tl.int64) * n_rows + row
    column = (tl.full([], 0, tl.int64) + n_rows) * tl.num_programs(1)
    tl.store(numbers + to, rest.to(tl.float64), mask=present)
    tl.store(numbers + column + to, squares.to(tl.float64), mask=present)
    tl.store(numbers + 2 * column + to, product.to(tl.float64), mask=present)
    tl.store(numbers + 3 * column + to, spread.to(tl.float64), mask=present)
    tl.store(places + to, place, mask=present)


@triton.jit(do_not_specialize=["n_rows", "tolerance"])
def _merge_parts(
    values, row_units, column_stride, units, unit: tl.constexpr, partial, places, n_parts, target, scores, score_stride,
    tops, n_rows, tolerance, logits: tl.constexpr, rows: tl.constexpr, n_slots: tl.constexpr,
):  # fmt: skip
    """Merge the results of `_read_parts` for each row, and store the statistics of the row."""
    # 1. Maxima m_j, their indices and the sums of all parts j of a row.
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    part = tl.arange(0, n_slots)
    inside = present[:, None] & (part < n_parts)[None, :]
    n_classes = units * unit
    at = row[:, None] * n_parts + part[None, :]
    column = (tl.full([], 0, tl.int64) + n_rows) * n_parts
    high = tl.load(partial + at, mask=inside, other=float("-inf")).to(tl.float64)
    high_place = tl.load(places + at, mask=inside, other=0)
    rest = tl.load(partial + column + at, mask=inside, other=0).to(tl.float64)
    squares = tl.load(partial + 2 * column + at, mask=inside, other=0).to(tl.float64)
    product = tl.load(partial + 3 * column + at, mask=inside, other=0).to(tl.float64)
    # 2. Maximum m of the row. The first part with this maximum has its first index.
    largest = tl.max(high, 1)
    place = tl.min(tl.where(inside & (high == largest[:, None]), high_place, n_classes), 1)
    place = tl.minimum(place, n_classes - 1)
    # 3. The sums of a part exclude its top entry. Add these entries, except for the top entry of the row.
    is_extra = inside & (high_place != place[:, None]) & (high != float("-inf"))
    if logits:
        # Rescale from m_j to m: with gap = m_j - m and factor = exp gap, e d becomes factor e (d + gap).
        gap = tl.where(high == largest[:, None], 0.0, high - largest[:, None])
        factor = tl.where(high == float("-inf"), 0.0, tl.exp(gap))
        gap = tl.where(factor == 0, 0.0, gap)
        more = tl.where(is_extra, factor, 0.0)
        product = tl.sum(factor * (product + gap * rest) + more * gap, 1)
        squares = tl.sum(factor * factor * squares + more * more, 1)
        rest = tl.sum(factor * rest + more, 1)
    else:
        q = tl.where(is_extra, high, 0.0)
        product = tl.sum(product + q * tl.log(tl.where(q == 0, 1.0, q)), 1)
        squares = tl.sum(squares + q * q, 1)
        rest = tl.sum(rest + q, 1)
    _store_scores(
        values, row * row_units * unit, column_stride, target, scores, score_stride, tops, row, present, tolerance,
        n_classes, largest, place, rest, squares, product, logits,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _fill_gradient(
    values, row_units, column_stride, units, unit: tl.constexpr, target, scores, tops, grads, out, n_rows,
    only_confidence: tl.constexpr, logits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store a part of the gradient of rows, by the formula of `plain.backward`. Grid: groups of rows, parts."""
    # 1. Scores of the rows, the gradients in them, and the entries of label and top class.
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    n_classes, row_at = units * unit, row * row_units * unit
    if only_confidence:
        of_log = tl.zeros([rows], tl.float64)
        of_square = of_log
        of_entropy = of_log
        of_confidence = tl.load(grads + row, mask=present, other=0)
    else:
        of_log = tl.load(grads + row, mask=present, other=0)
        of_square = tl.load(grads + n_rows.to(tl.int64) + row, mask=present, other=0)
        of_entropy = tl.load(grads + 2 * n_rows.to(tl.int64) + row, mask=present, other=0)
        of_confidence = tl.load(grads + 3 * n_rows.to(tl.int64) + row, mask=present, other=0)
    flat = (of_log == 0) & (of_square == 0) & (of_entropy == 0) & (of_confidence == 0)
    label = tl.load(target + row, mask=present, other=0)
    known = (label >= 0) & (label < n_classes)
    place = tl.load(tops + row, mask=present, other=0)
    at_label = tl.load(values + row_at + label * column_stride, mask=present & known, other=0).to(tl.float64)
    at_top = tl.load(values + row_at + place * column_stride, mask=present, other=0).to(tl.float64)
    hit = label == place
    # 2. A tile of rows x classes.
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = present[:, None] & (columns < n_classes)[None, :]
    x = tl.load(values + row_at[:, None] + columns.to(tl.int64)[None, :] * column_stride, mask=inside, other=0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    # 3. Gradient of all classes in the dtype of the tile; for the label and the top class in float64.
    b, c = (2 * of_square).to(x.dtype)[:, None], of_entropy.to(x.dtype)[:, None]
    if logits:
        q_h = tl.exp(tl.load(scores + row, mask=present, other=0))
        error = tl.load(scores + n_rows.to(tl.int64) + row, mask=present, other=0)
        entropy = tl.load(scores + 2 * n_rows.to(tl.int64) + row, mask=present, other=0)
        q_top = tl.load(scores + 3 * n_rows.to(tl.int64) + row, mask=present, other=1)
        mean_shift = entropy - tl.log(q_top)
        a = -of_log - of_confidence * q_top - 2 * of_square * (error - 1 + q_h) - of_entropy * mean_shift
        for_top = q_top * (a + 2 * of_square * q_top + of_confidence)
        shift = tl.where(q_h == 0, 0.0, at_label - at_top)
        for_label = tl.where(hit, for_top, q_h * (a + 2 * of_square * q_h + of_entropy * shift))
        for_label += of_log - 2 * of_square * q_h
        d = x - at_top.to(x.dtype)[:, None]
        d = tl.where(d < _LOWEST, _LOWEST, d)
        q = exp(d) * q_top.to(x.dtype)[:, None]
        result = q * (a.to(x.dtype)[:, None] + b * q + c * d)
        result = tl.where(columns[None, :] == place[:, None], for_top.to(x.dtype)[:, None], result)
        flat = flat | (at_top == float("inf"))
    else:
        log_label = tl.log(tl.where(at_label == 0, 1.0, at_label))
        of_label = of_log / tl.where(at_label == 0, 1.0, at_label) + of_entropy * (log_label + 1)
        for_label = tl.where(at_label == 0, 0.0, of_label) + 2 * of_square * (at_label - 1)
        for_label = tl.where(hit, for_label + of_confidence, for_label)
        slope = tl.where(x == 0, 0.0, tl.log(tl.where(x == 0, 1.0, x)) + 1)
        result = b * x + c * slope
        at_place = result + of_confidence.to(x.dtype)[:, None]
        result = tl.where(columns[None, :] == place[:, None], at_place, result)
    result = tl.where(columns[None, :] == label[:, None], for_label.to(x.dtype)[:, None], result)
    # 4. Rows with an unknown label have gradient NaN. Rows with +inf, or without incoming gradients, have gradient 0.
    result = tl.where(known[:, None], result, float("nan"))
    result = tl.where(flat[:, None], 0.0, result)
    at = row.to(tl.int64)[:, None] * n_classes + columns[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
