"""The row op as Triton kernels: some rows of few classes to a program, one of many, a part of one of very many.

What a program does depends on the number of classes and the dtype alone, never on the number of rows: a row gets the
same bits in every batch. A row is read a block of entries at a time; of each the top one is set apart, and two blocks
are merged by the larger top (online softmax). Blocks are of the dtype of the row, and at least float32; what is merged
is float64. Addresses are int64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcalib.kernels.launching import check_launch

check_launch()

_TILE = 2048  # entries that a program holds at once, rows times classes
_BLOCK = 4096  # entries of one row, where it has more
_PART = 16384  # entries of one row that a program reads, where it has more than twice as many
_LOWEST = tl.constexpr(-1000.0)  # a shift whose exp is 0 in any dtype


def forward(values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor) -> None:
    """See `row_op_reference.forward`. Nothing waits for the device."""
    n_rows, n_classes = values.shape
    rows, block, parts, warps = _shape_of_work(n_classes)
    found = [values, *values.stride(), target, scores, scores.stride(0), top, n_rows, n_classes]
    with torch.cuda.device_of(values):  # Triton launches on the current device
        if parts == 1:
            grid = (triton.cdiv(n_rows, rows),)
            _read_rows[grid](*found, from_logits, rows, block, num_warps=warps)
            return
        kept = torch.empty(4, parts, n_rows, dtype=torch.float64, device=values.device)
        places = torch.empty(parts, n_rows, dtype=torch.int64, device=values.device)
        _read_parts[(n_rows, parts)](
            values, *values.stride(), kept, places, n_rows, n_classes, from_logits, _PART, block, num_warps=warps
        )
        grid = (triton.cdiv(n_rows, 128),)
        _merge_parts[grid](*found, kept, places, parts, from_logits, 128, num_warps=4)


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """See `row_op_reference.backward`. Nothing waits for the device."""
    n_rows, n_classes = values.shape
    rows, block, _, warps = _shape_of_work(n_classes)
    with torch.cuda.device_of(values):
        _fill_gradient[(triton.cdiv(n_rows, rows), triton.cdiv(n_classes, block))](
            values, *values.stride(), target, scores, scores.stride(0), top, grads, grads.stride(0), out, n_rows,
            n_classes, from_logits, rows, block, num_warps=warps,
        )  # fmt: skip


def _shape_of_work(n_classes: int) -> tuple[int, int, int, int]:
    """Return rows and entries that a program holds, parts that a row is cut into, and warps."""
    block = min(triton.next_power_of_2(n_classes), _BLOCK)
    rows = max(1, min(_TILE // block, 512))
    parts = triton.cdiv(n_classes, _PART) if n_classes > 2 * _PART else 1
    return rows, block, parts, 8 if block == _BLOCK else 4


@triton.jit
def _log1p(x):
    """Return log(1 + x) of x >= 0, with the rounding of the sum divided out again."""
    u = 1 + x
    exact = u == 1
    return tl.where(exact, x, tl.log(u) * (x / tl.where(exact, 1, u - 1)))


@triton.jit
def _block(pointers, inside, columns, n_classes, logits: tl.constexpr):
    """Return largest entry, its first place, and sums over the others of a tile, all `[rows]` and float64.

    Of logits the sums are those of e, e^2 and e d with d = x - largest and e = exp d; of probabilities 0, of q^2 and of
    q log q.
    """
    x = tl.load(pointers, mask=inside, other=float("-inf"))
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    largest = tl.max(x, 1)
    at_top = x == largest[:, None]
    # None is, if the largest is NaN.
    place = tl.minimum(tl.min(tl.where(at_top & inside, columns[None, :], n_classes), 1), n_classes - 1)
    others = inside & (columns[None, :] != place[:, None])
    if logits:
        # At the limit: 0 where x is the largest, be it infinite. Where all are -inf none is in the sums.
        d = tl.where(at_top, 0.0, x - largest[:, None])
        d = tl.where(d < _LOWEST, _LOWEST, d)
        e = tl.where(others & (largest[:, None] != float("-inf")), tl.exp(d), 0.0)
        rest, product = tl.sum(e, 1), tl.sum(tl.where(e == 0, 0.0, e * d), 1)
        squares = tl.sum(e * e, 1)
    else:
        q = tl.where(others, x, 0.0)
        log = tl.log(tl.where(q == 0, 1.0, q))
        rest, product = tl.zeros_like(largest), tl.sum(q * log, 1)
        squares = tl.sum(q * q, 1)
        product = tl.where(squares == squares, product, float("nan"))
    # Nothing else carries NaN out of a block whose place of the top is taken by it.
    lost = tl.sum(tl.where(inside & (x != x), 1, 0), 1) > 0
    rest = tl.where(lost, float("nan"), rest)
    product = tl.where(lost, float("nan"), product)
    squares = tl.where(lost, float("nan"), squares)
    return (
        largest.to(tl.float64),
        place.to(tl.int64),
        rest.to(tl.float64),
        squares.to(tl.float64),
        product.to(tl.float64),
    )


@triton.jit
def _merged(largest, place, rest, squares, product, largest_, place_, rest_, squares_, product_, logits: tl.constexpr):
    """Return the same of two blocks together, the first one first."""
    later = largest_ > largest
    high = tl.where(later, largest_, largest)
    low = tl.where(later, largest, largest_)
    high_rest, low_rest = tl.where(later, rest_, rest), tl.where(later, rest, rest_)
    high_squares, low_squares = tl.where(later, squares_, squares), tl.where(later, squares, squares_)
    high_product, low_product = tl.where(later, product_, product), tl.where(later, product, product_)
    nothing = low == float("-inf")
    if logits:
        gap = tl.where(low == high, 0.0, low - high)
        factor = tl.where(nothing, 0.0, tl.exp(gap))
        gap = tl.where(factor == 0, 0.0, gap)
        high_rest += factor * (1 + low_rest)
        high_squares += factor * factor * (1 + low_squares)
        high_product += factor * (low_product + gap * (1 + low_rest))
    else:
        q = tl.where(nothing, 0.0, low)
        high_rest += low_rest
        high_squares += low_squares + q * q
        high_product += low_product + q * tl.log(tl.where(q == 0, 1.0, q))
    return high, tl.where(later, place_, place), high_rest, high_squares, high_product


@triton.jit
def _store_scores(
    values, row_stride, column_stride, target, scores, score_stride, tops, row, present, n_classes,
    largest, place, rest, squares, product, logits: tl.constexpr,
):  # fmt: skip
    """Store what `Rows` says, from what a whole row was merged into."""
    label = tl.load(target + row, mask=present, other=0)
    known = (label >= 0) & (label < n_classes)
    x = tl.load(values + row * row_stride + label * column_stride, mask=present & known, other=0).to(tl.float64)
    hit = label == place
    nan = float("nan")
    if logits:
        empty = largest == float("-inf")
        rest = tl.where(empty, nan, rest)
        total = 1 + rest
        log_total = _log1p(rest)
        shift = tl.where(x == largest, 0.0, x - largest)
        log_prob = shift - log_total
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
    tl.store(scores + row, tl.where(known, log_prob, nan), mask=present)
    tl.store(scores + score_stride + row, tl.where(known, error, nan), mask=present)
    tl.store(scores + 2 * score_stride + row, entropy, mask=present)
    tl.store(scores + 3 * score_stride + row, confidence, mask=present)
    tl.store(tops + row, place, mask=present)


@triton.jit
def _read(values, row_stride, column_stride, row, present, begin, end, n_classes, logits, rows: tl.constexpr,
          block: tl.constexpr):  # fmt: skip
    """Return what the entries `begin..end-1` of some rows are merged into."""
    largest = tl.full([rows], float("-inf"), tl.float64)
    place = tl.zeros([rows], tl.int64)
    rest = tl.zeros([rows], tl.float64)
    squares = tl.zeros([rows], tl.float64)
    product = tl.zeros([rows], tl.float64)
    for start in range(begin, end, block):
        columns = start + tl.arange(0, block)
        inside = present[:, None] & (columns < end)[None, :]
        pointers = values + row[:, None] * row_stride + columns.to(tl.int64)[None, :] * column_stride
        one = _block(pointers, inside, columns, n_classes, logits)
        largest, place, rest, squares, product = _merged(
            largest, place, rest, squares, product, one[0], one[1], one[2], one[3], one[4], logits
        )
    return largest, place, rest, squares, product


@triton.jit(do_not_specialize=["n_rows"])
def _read_rows(
    values, row_stride, column_stride, target, scores, score_stride, tops, n_rows, n_classes,
    logits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Read whole rows."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    largest, place, rest, squares, product = _read(
        values, row_stride, column_stride, row, present, 0, n_classes, n_classes, logits, rows, block
    )
    _store_scores(
        values, row_stride, column_stride, target, scores, score_stride, tops, row, present, n_classes,
        largest, place, rest, squares, product, logits,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _read_parts(
    values, row_stride, column_stride, kept, places, n_rows, n_classes,
    logits: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Read a part of a row, and keep what it is merged into."""
    part = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    begin = part * size
    end = tl.minimum(begin + size, n_classes)
    largest, place, rest, squares, product = _read(
        values, row_stride, column_stride, row, row < n_rows, begin, end, n_classes, logits, 1, block
    )
    to = part.to(tl.int64) * n_rows + row
    all_parts = tl.num_programs(1).to(tl.int64) * n_rows
    tl.store(kept + to, largest)
    tl.store(kept + all_parts + to, rest)
    tl.store(kept + 2 * all_parts + to, squares)
    tl.store(kept + 3 * all_parts + to, product)
    tl.store(places + to, place)


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def _merge_parts(
    values, row_stride, column_stride, target, scores, score_stride, tops, n_rows, n_classes, kept, places, n_parts,
    logits: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Merge the parts of rows in their order."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    largest = tl.full([rows], float("-inf"), tl.float64)
    place = tl.zeros([rows], tl.int64)
    rest = tl.zeros([rows], tl.float64)
    squares = tl.zeros([rows], tl.float64)
    product = tl.zeros([rows], tl.float64)
    all_rows = tl.full([], 0, tl.int64) + n_rows
    all_parts = all_rows * n_parts
    for part in range(n_parts):
        at = row + all_rows * part
        largest, place, rest, squares, product = _merged(
            largest, place, rest, squares, product,
            tl.load(kept + at, mask=present, other=0),
            tl.load(places + at, mask=present, other=0),
            tl.load(kept + all_parts + at, mask=present, other=0),
            tl.load(kept + 2 * all_parts + at, mask=present, other=0),
            tl.load(kept + 3 * all_parts + at, mask=present, other=0),
            logits,
        )  # fmt: skip
    _store_scores(
        values, row_stride, column_stride, target, scores, score_stride, tops, row, present, n_classes,
        largest, place, rest, squares, product, logits,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_rows"])
def _fill_gradient(
    values, row_stride, column_stride, target, scores, score_stride, tops, grads, grad_stride, out, n_rows, n_classes,
    logits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Fill in a tile of the gradient. At the label and the top it is made in float64: see `row_op_reference`."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n_rows
    label = tl.load(target + row, mask=present, other=0)
    place = tl.load(tops + row, mask=present, other=0)
    of_log = tl.load(grads + row, mask=present, other=0)
    of_square = tl.load(grads + grad_stride + row, mask=present, other=0)
    of_entropy = tl.load(grads + 2 * grad_stride + row, mask=present, other=0)
    of_confidence = tl.load(grads + 3 * grad_stride + row, mask=present, other=0)
    known = (label >= 0) & (label < n_classes)
    at_top = tl.load(values + row * row_stride + place * column_stride, mask=present, other=0)
    at_label = tl.load(values + row * row_stride + label * column_stride, mask=present & known, other=0)
    hit = label == place
    untouched = (of_log == 0) & (of_square == 0) & (of_entropy == 0) & (of_confidence == 0)

    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = (present & ~untouched)[:, None] & (columns < n_classes)[None, :]
    far = columns.to(tl.int64)[None, :]
    x = tl.load(values + row[:, None] * row_stride + far * column_stride, mask=inside, other=0)
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    is_label, is_top = far == label[:, None], far == place[:, None]
    b = 2 * of_square
    if logits:
        log_prob = tl.load(scores + row, mask=present, other=0)
        error = tl.load(scores + score_stride + row, mask=present, other=0)
        entropy = tl.load(scores + 2 * score_stride + row, mask=present, other=0)
        q_top = tl.load(scores + 3 * score_stride + row, mask=present, other=1)
        q_h = tl.exp(log_prob)
        a = -of_log - of_confidence * q_top - b * (error - 1 + q_h) - of_entropy * (entropy - tl.log(q_top))
        own = of_log - b * q_h
        for_top = q_top * (a + b * q_top + of_confidence)
        shift = tl.where(q_h == 0, 0.0, at_label.to(tl.float64) - at_top.to(tl.float64))
        for_label = tl.where(hit, for_top, q_h * (a + b * q_h + of_entropy * shift)) + own
        d = x - at_top.to(x.dtype)[:, None]
        d = tl.where(d < _LOWEST, _LOWEST, d)
        q = tl.exp(d) * q_top.to(x.dtype)[:, None]
        found = q * (a.to(x.dtype)[:, None] + b.to(x.dtype)[:, None] * q + of_entropy.to(x.dtype)[:, None] * d)
        found = tl.where(is_top, for_top.to(x.dtype)[:, None], found)
        untouched = untouched | (at_top == float("inf"))
    else:
        q_h = at_label.to(tl.float64)
        safe = tl.where(q_h == 0, 1.0, q_h)
        for_label = tl.where(q_h == 0, 0.0, of_log / safe + of_entropy * (tl.log(safe) + 1)) + b * (q_h - 1)
        for_label = tl.where(hit, for_label + of_confidence, for_label)
        slope = tl.where(x == 0, 0.0, tl.log(tl.where(x == 0, 1.0, x)) + 1)
        found = b.to(x.dtype)[:, None] * x + of_entropy.to(x.dtype)[:, None] * slope
        found = tl.where(is_top, found + of_confidence.to(x.dtype)[:, None], found)
    found = tl.where(is_label, for_label.to(x.dtype)[:, None], found)
    found = tl.where(known[:, None], found, float("nan"))
    found = tl.where(untouched[:, None], 0.0, found)
    reached = present[:, None] & (columns < n_classes)[None, :]
    tl.store(out + row[:, None] * n_classes + far, found.to(out.dtype.element_ty), mask=reached)
