"""Sums over bins by Triton kernels.

Results are reproducible although programs run in any order. Programs store their own sums, which are then added in a
fixed order. Class-wise sums of the rare probabilities >= 1/B use atomic additions of numbers that float64 adds without
rounding. Addresses are int64, because offsets can exceed 2^31.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcalib.ops.bin_sums import plain
from torchcalib.ops.bin_sums.formula import ONE_ROW, Bins, Norm
from torchcalib.ops.bin_sums.plain import ClassRows, EventColumns
from torchcalib.ops.segments import BELOW_EDGE
from torchcalib.ops.softmax_stats.triton import exp, in_units

_EVENTS, _BINS = 32, 16  # events that a program of one warp loads at a time, and largest number of its bins
_PIECE = 128  # smallest number of events per program
_PIECES = 4096  # largest number of programs that share the events of a batch element
# Entries that a program of one warp loads at a time, and largest number of its classes. With twice as many entries, an
# H100 has registers for fewer programs, and sums of 50,000 x 1,000 entries take 290 instead of 224 microseconds.
_TILE, _CLASSES = 256, 256
_PROGRAMS = 4096  # programs of one warp that occupy a GPU
_ROWS = 64  # smallest number of rows per program
_ERRORS = 256  # largest number of bins that a program of `_fill_errors` loads at a time
_AT_ONCE = 1024  # sums of parts that it adds together
_BELOW_EDGE = tl.constexpr(BELOW_EDGE)
_ONE_ROW = tl.constexpr(ONE_ROW * torch.finfo(torch.float64).eps)


def event_sums(events: EventColumns, bins: Bins, shape: tuple[int, int]) -> Tensor:
    """Compute `plain.event_sums` without synchronising the device. Groups have no kernel."""
    confidence, outcome, weights, ecd, groups = events
    if groups is not None:
        return plain.event_sums(events, bins, shape)
    n_series, n = confidence.shape
    size = max(_PIECE, -(-n // _PIECES))
    pieces = triton.cdiv(n, size)
    parts = torch.empty(n_series, pieces, *shape, dtype=torch.float64, device=confidence.device)
    width = min(_BINS, triton.next_power_of_2(bins.n_bins))
    columns = [confidence if x is None else _contiguous(x) for x in (confidence, outcome, weights, ecd)]
    with torch.cuda.device_of(confidence):
        _add_events[(n_series, pieces, triton.cdiv(bins.n_bins, width))](
            *columns, parts, n, size, bins.n_bins, weights is not None, ecd is not None, bins.right,
            bins.noise != "none", bins.noise == "shares", not bins.copies, _EVENTS, width, num_warps=1,
        )  # fmt: skip
    return parts.sum(1)


def class_sums(rows: ClassRows, target: Tensor, bins: Bins, sums: Tensor) -> None:
    """Fill `sums` as `plain.class_sums` does, without synchronising the device."""
    values, from_logits, weights, top, confidence = rows
    n_rows, n_classes = values.shape
    _, n_sums, n_bins = sums.shape
    n_distinct = n_sums if weights is not None and not bins.copies else min(n_sums, 5)
    classes = min(_CLASSES, triton.next_power_of_2(n_classes))
    n_ranges = triton.cdiv(n_classes, classes)
    size = max(_ROWS, triton.cdiv(n_rows, max(1, _PROGRAMS // n_ranges)))
    pieces = triton.cdiv(n_rows, size)
    # Sums over the first bin by piece; sums over all bins as two parts of different magnitude, see `_add_exactly`.
    first = torch.empty(pieces, n_distinct, n_classes, dtype=sums.dtype, device=sums.device)
    others = torch.zeros(2, n_distinct, n_bins, n_classes, dtype=sums.dtype, device=sums.device)
    columns = [x.contiguous() for x in (target, confidence if weights is None else weights, top, confidence)]
    heaviest = confidence.new_ones(()) if weights is None else weights.abs().amax()
    scale = heaviest / torch.frexp(heaviest).mantissa  # a power of 2
    with torch.cuda.device_of(values):
        _add_classes[(n_ranges, pieces)](
            values, *in_units(values), *columns, scale, triton.next_power_of_2(n_rows), first, others, n_rows, size,
            n_bins, weights is not None, from_logits, bins.right, n_distinct, _TILE // classes, classes, num_warps=1,
        )  # fmt: skip
    total = others.sum(0)
    total[:, 0] += first.sum(0)
    plain.store(total.movedim(-1, 0), sums)


def bin_errors(
    sums: Tensor,
    norm: Norm,
    n_invalid: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    in_parts: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `bin_sums.bin_errors` in one launch, and its derivatives in the sums `(..., F, B)`.

    If the number `n_invalid` of invalid rows is positive, both are NaN. With `in_parts`, the sums are the
    totals of `sums` `(..., P, F, B)` over P parts.
    """
    sums = sums.contiguous()
    *lead, n_parts, n_sums, n_bins = sums.shape if in_parts else (*sums.shape[:-2], 1, *sums.shape[-2:])
    errors, slopes = sums.new_empty(lead, dtype=dtype), sums.new_empty(*lead, n_sums, n_bins)
    block = min(_ERRORS, triton.next_power_of_2(n_bins))
    at_once = max(1, min(_AT_ONCE // block, triton.next_power_of_2(n_parts)))
    with torch.cuda.device_of(sums):
        _fill_errors[(errors.numel(),)](
            sums, sums if n_invalid is None else n_invalid, errors, slopes, n_parts, n_sums, n_bins,
            n_invalid is not None, norm, at_once, block, num_warps=1 if n_parts == 1 else 4,
        )  # fmt: skip
    return errors, slopes


def _contiguous(x: Tensor) -> Tensor:
    """Return a contiguous tensor, with bool viewed as uint8 for Triton."""
    return (x.view(torch.uint8) if x.dtype == torch.bool else x).contiguous()


@triton.jit
def bin_of(value, n_bins, right):  # noqa: ANN201
    """Return the `segments.bin_index` of float64 values, int32 of the same shape; `right` is a bool, also a scalar."""
    scaled = value * n_bins
    scaled = tl.where(scaled > 0, scaled, 0.0)  # NaN becomes 0
    scaled = tl.where(scaled < n_bins, scaled, n_bins.to(tl.float64))
    index = tl.where(right, tl.ceil(scaled) - 1, tl.floor(scaled))
    index = tl.where(index < 0, 0.0, index)
    index = tl.where(index > n_bins - 1, (n_bins - 1).to(tl.float64), index)
    lower, upper = index / n_bins, (index + 1) / n_bins
    above = tl.where(right, value > upper, value >= upper)
    below = tl.where(right, value <= lower, value < lower)
    step = above.to(tl.int32) - below.to(tl.int32)
    return tl.minimum(tl.maximum(index.to(tl.int32) + step, 0), n_bins.to(tl.int32) - 1)


@triton.jit(do_not_specialize=["n", "size", "n_bins"])
def _add_events(
    confidence, outcome, weights, ecd, parts, n, size, n_bins,
    weighted: tl.constexpr, has_ecd: tl.constexpr, right: tl.constexpr, has_noise: tl.constexpr, shares: tl.constexpr,
    squared: tl.constexpr, chunk: tl.constexpr, bins: tl.constexpr,
):  # fmt: skip
    """Sum a piece of the events of a batch element over a range of bins. Grid: batch elements, pieces, ranges."""
    # 1. The program compares its events with its own bins, a tile of bins x events. Sums are in registers: atomic
    #    additions to shared bins would be in an arbitrary order, and results would differ between calls. A thread has
    #    its own events and their sums for all bins. Otherwise several threads would compute the bin of an event.
    series = tl.program_id(0).to(tl.int64) * n
    piece = tl.program_id(1).to(tl.int64)
    program_bins = tl.program_id(2) * bins + tl.arange(0, bins)
    count = tl.zeros([bins, chunk], tl.float64)
    sum_confidence = tl.zeros([bins, chunk], tl.float64)
    sum_outcome = tl.zeros([bins, chunk], tl.float64)
    sum_spread = tl.zeros([bins, chunk], tl.float64)
    sum_noise = tl.zeros([bins, chunk], tl.float64)
    sum_square = tl.zeros([bins, chunk], tl.float64)
    sum_residual = tl.zeros([bins, chunk], tl.float64)
    sum_ecd = tl.zeros([bins, chunk], tl.float64)
    end = tl.minimum((piece + 1) * size, n)
    for start in range(piece * size, end, chunk):
        # 2. Weights w, confidences p and bins of a chunk of events. Masked loads skip events of weight 0, which may be
        #    NaN.
        event = start + tl.arange(0, chunk)
        present = event < end
        w = tl.load(weights + series + event, mask=present, other=0) if weighted else present.to(tl.float64)
        present = w != 0
        value = tl.load(confidence + series + event, mask=present, other=0).to(tl.float64)
        in_bin = present[None, :] & (bin_of(value, n_bins, right)[None, :] == program_bins[:, None])
        # 3. Sums of w, w p, w y, w p (1 - p), w v, w^2, w (y - p)^2 and w ecd in float64.
        y = tl.load(outcome + series + event, mask=present, other=0).to(tl.float64)
        count += tl.where(in_bin, w[None, :], 0.0)
        sum_confidence += tl.where(in_bin, (w * value)[None, :], 0.0)
        sum_outcome += tl.where(in_bin, (w * y)[None, :], 0.0)
        if has_noise:
            spread = w * value * (1 - value)
            sum_spread += tl.where(in_bin, spread[None, :], 0.0)
            residual = w * (y - value) * (y - value)
            sum_residual += tl.where(in_bin, residual[None, :], 0.0)
            if squared:
                sum_noise += tl.where(in_bin, (w * (residual if shares else spread))[None, :], 0.0)
                sum_square += tl.where(in_bin, (w * w)[None, :], 0.0)
        if has_ecd:
            ecds = tl.load(ecd + series + event, mask=present, other=0).to(tl.float64)
            sum_ecd += tl.where(in_bin, (w * ecds)[None, :], 0.0)
    # 4. Store the sums of the piece, which `event_sums` adds in order.
    n_columns: tl.constexpr = 3 + (4 if has_noise else 0) + (1 if has_ecd else 0)
    to = parts + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + piece) * n_columns * n_bins + program_bins
    tl.store(to, tl.sum(count, 1), mask=program_bins < n_bins)
    tl.store(to + n_bins, tl.sum(sum_confidence, 1), mask=program_bins < n_bins)
    tl.store(to + 2 * n_bins, tl.sum(sum_outcome, 1), mask=program_bins < n_bins)
    if has_noise:
        tl.store(to + 3 * n_bins, tl.sum(sum_spread, 1), mask=program_bins < n_bins)
        noise = sum_noise if squared else (sum_residual if shares else sum_spread)
        tl.store(to + 4 * n_bins, tl.sum(noise, 1), mask=program_bins < n_bins)
        tl.store(to + 5 * n_bins, tl.sum(sum_square if squared else count, 1), mask=program_bins < n_bins)
        tl.store(to + 6 * n_bins, tl.sum(sum_residual, 1), mask=program_bins < n_bins)
    if has_ecd:
        tl.store(to + (n_columns - 1) * n_bins, tl.sum(sum_ecd, 1), mask=program_bins < n_bins)


@triton.jit
def _proportional(x, largest, logits: tl.constexpr):
    """Return the probabilities of a tile of rows; for logits, divided by the probability of the top class."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    if logits:  # equal logits can be infinite, and their difference NaN
        largest = largest.to(x.dtype)[:, None]
        x = exp(tl.where(x == largest, 0.0, x - largest))
    return x


@triton.jit
def _next_at_least_edge(x, reaches, columns):
    """Return the largest entry of each row with True in `reaches`, its column, and `reaches` without it; else -1."""
    best = tl.max(tl.where(reaches, x, -1.0), 1)
    place = tl.max(tl.where(reaches & (x == best[:, None]), columns[None, :], -1), 1)
    return best, place, reaches & (columns[None, :] != place[:, None])


@triton.jit
def _add_exactly(to, level, value, most, n, mask, integers: tl.constexpr = False):
    """Add float64 numbers to memory with the same result in every order.

    `most` is at least the largest number, and `n` at least the number of additions; both are powers of 2. A number is
    split into two parts, which are added to different sums. The first is a multiple of u = 2^-52 n `most`, and at most
    `most`. The second is a multiple of 2^-53 n u, and at most u / 2. So float64 represents all partial sums exactly.
    The lost rest is at most 2^-106 n^2 `most`. Integers need no second part.
    """
    step = 1.5 * n * most  # the last bit of numbers near `step` is u
    coarse = (value + step) - step
    tl.atomic_add(to, coarse, mask=mask, sem="relaxed")
    if not integers:
        step = step * n * (1 / 9007199254740992)  # 2^-53
        fine = ((value - coarse) + step) - step
        tl.atomic_add(to + level, fine, mask=mask, sem="relaxed")


@triton.jit(do_not_specialize=["n_added", "n_rows", "size", "n_bins"])
def _add_classes(
    values, row_units, column_stride, units, unit: tl.constexpr, target, weights, tops, confidence, heaviest, n_added,
    first, others, n_rows, size, n_bins, weighted: tl.constexpr, logits: tl.constexpr, right: tl.constexpr,
    n_sums: tl.constexpr, rows: tl.constexpr, classes: tl.constexpr,
):  # fmt: skip
    """Sum a piece of the rows over the bins of a range of classes. Grid: ranges of classes, pieces.

    Sums are as for `plain.store`. Those of the first bin are in registers. The other entries, at most B in a
    row, are added to sums in memory, one entry of each row at a time.
    """
    columns = tl.program_id(0) * classes + tl.arange(0, classes)
    n_classes = units * unit
    real = columns < n_classes
    piece = tl.program_id(1).to(tl.int64)
    column = (tl.full([], 0, tl.int64) + n_classes) * n_bins
    level = n_sums * column
    n = n_added.to(tl.float64)
    most = tl.load(heaviest)
    threshold = _BELOW_EDGE / n_bins
    count = tl.zeros([classes], tl.float64 if weighted else tl.int32)
    total = tl.zeros([classes], tl.float64)
    hits = tl.zeros([classes], tl.float64 if weighted else tl.int32)
    spread = tl.zeros([classes], tl.float64)
    residual = tl.zeros([classes], tl.float64)
    noise = tl.zeros([classes], tl.float64)
    square = tl.zeros([classes], tl.float64)
    end = tl.minimum((piece + 1) * size, n_rows)
    for start in range(piece * size, end, rows):
        # 1. Weight, label, top class and scale of each row. The largest logit is loaded again, instead of stored.
        row = start + tl.arange(0, rows)
        row_at = row.to(tl.int64) * row_units * unit
        present = row < end
        w = tl.load(weights + row, mask=present, other=0) if weighted else present.to(tl.float64)
        present = w != 0
        label = tl.load(target + row, mask=present, other=-1)
        place = tl.load(tops + row, mask=present, other=0)
        largest = tl.load(values + row_at + place * column_stride, mask=present, other=0)
        scale = tl.load(confidence + row, mask=present, other=0)
        # 2. Probabilities q of a tile of rows x classes.
        inside = present[:, None] & real[None, :]
        at = row_at[:, None] + columns.to(tl.int64)[None, :] * column_stride
        x = _proportional(tl.load(values + at, mask=inside, other=0), largest, logits)
        q = x * scale.to(x.dtype)[:, None] if logits else x
        is_label = columns[None, :] == label.to(tl.int32)[:, None]
        # 3. First bin: sums in registers.
        reaches = inside & (q >= threshold)
        low = inside & ~reaches
        low_q = tl.where(low, q, 0.0)
        if weighted:
            count += tl.sum(tl.where(low, w[:, None], 0.0), 0)
            total += tl.sum(w[:, None] * low_q, 0)
            hits += tl.sum(tl.where(low & is_label, w[:, None], 0.0), 0)
        else:
            count += tl.sum(low.to(tl.int32), 0)
            total += tl.sum(low_q, 0)
            hits += tl.sum((low & is_label).to(tl.int32), 0)
        if n_sums > 3:
            low_spread = w[:, None] * (low_q * (1 - low_q))
            spread += tl.sum(low_spread, 0)
            residual += tl.sum(tl.where(low & is_label, w[:, None] * (1 - 2 * low_q.to(tl.float64)), 0.0), 0)
            if n_sums > 5:
                noise += tl.sum(w[:, None] * low_spread, 0)
                square += tl.sum(tl.where(low, (w * w)[:, None], 0.0), 0)
        # 4. Probabilities >= 1/B, from the largest one of each row down. Most tiles of many classes have none. The bin
        #    is computed in float64, because a product in float32 can be on the other side of an edge.
        n_reached = tl.sum(reaches.to(tl.int32), 1)
        while tl.max(n_reached, 0) > 0:
            best, at_column, reaches = _next_at_least_edge(x, reaches, columns)
            n_reached -= 1
            found = best >= 0
            wide = best.to(tl.float64)
            if logits:
                wide *= scale
            to = others + bin_of(wide, n_bins, right).to(tl.int64) * n_classes + at_column
            _add_exactly(to, level, w, most, n, found, not weighted)
            _add_exactly(to + column, level, w * wide, most, n, found)
            _add_exactly(to + 2 * column, level, w, most, n, found & (at_column == label), not weighted)
            if n_sums > 3:
                row_spread = w * (wide * (1 - wide))
                _add_exactly(to + 3 * column, level, row_spread, most, n, found)
                _add_exactly(to + 4 * column, level, w * (1 - 2 * wide), most, n, found & (at_column == label))
                if n_sums > 5:
                    _add_exactly(to + 5 * column, level, w * row_spread, most * most, n, found)
                    _add_exactly(to + 6 * column, level, w * w, most * most, n, found)
    # 5. Store the sums of the first bin, which `class_sums` adds in order.
    to = first + piece * n_sums * n_classes + columns
    tl.store(to, count, mask=real)
    tl.store(to + n_classes, total, mask=real)
    tl.store(to + 2 * n_classes, hits, mask=real)
    if n_sums > 3:
        tl.store(to + 3 * n_classes, spread, mask=real)
        tl.store(to + 4 * n_classes, residual, mask=real)
    if n_sums > 5:
        tl.store(to + 5 * n_classes, noise, mask=real)
        tl.store(to + 6 * n_classes, square, mask=real)


@triton.jit(do_not_specialize=["n_parts", "n_sums", "n_bins"])
def _fill_errors(
    sums, n_invalid, errors, slopes, n_parts, n_sums, n_bins, checks: tl.constexpr, norm: tl.constexpr,
    at_once: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the error of a batch element, and its derivatives in the sums. One program for each element.

    W_b, P_b and O_b are the sums of weights, confidences and outcomes. d_b = O_b - P_b, g_b = d_b / W_b, W = sum W_b.
    The variance of g_b is v_b, 0 unless the norm is debiased.
    """
    series = tl.program_id(0).to(tl.int64)
    sums += series * n_parts * n_sums * n_bins
    slopes += series * n_sums * n_bins
    debiased: tl.constexpr = norm == "debiased_l1" or norm == "debiased_l2"
    # 1. Sums over bins. `check` is NaN if any sum is NaN.
    total = tl.zeros([block], tl.float64)
    check = tl.zeros([block], tl.float64)
    found = tl.zeros([block], tl.float64)
    n_filled = tl.zeros([block], tl.float64)
    for begin in range(0, n_bins, block):
        n, d, gap, _ = _gaps(sums, begin, n_parts, n_sums, n_bins, at_once, block)
        total += n
        check += n + d
        n_filled += (n > 0).to(tl.float64)
        if norm == "l1":
            found += tl.abs(d)
        elif norm == "signed":
            found += d
        elif norm == "mean":
            found += tl.abs(gap)
        elif norm == "max":
            found = tl.maximum(found, tl.abs(gap))
        else:
            v, _, _, _ = _variances(sums, n, gap, begin, n_parts, n_sums, n_bins, debiased, at_once, block)
            square = gap * gap - v
            check += square
            found += n * (tl.sqrt(tl.where(square > 0, square, 0.0)) if norm == "debiased_l1" else square)
    # 2. The error E, NaN without data
    weight, bins = tl.sum(total, 0), tl.sum(n_filled, 0)
    is_valid = (weight != 0) & (tl.sum(check, 0) == tl.sum(check, 0))
    if checks:
        is_valid = is_valid & (tl.load(n_invalid) == 0)
    weight = tl.where(is_valid, weight, float("nan"))
    bins = tl.where(is_valid, bins, float("nan"))
    if norm == "max":
        error = tl.where(is_valid, tl.max(found, 0), float("nan"))
        n_largest = tl.zeros([block], tl.float64)
        for begin in range(0, n_bins, block):
            _, _, gap, inside = _gaps(sums, begin, n_parts, n_sums, n_bins, at_once, block)
            n_largest += (inside & (tl.abs(gap) == error)).to(tl.float64)
        bins = tl.sum(n_largest, 0)
    elif norm == "mean":
        error = tl.sum(found, 0) / bins
    else:
        error = tl.sum(found, 0) / weight
        if norm == "l2" or norm == "debiased_l2":
            error = tl.sqrt(tl.where(error < 0, 0.0, error))
    tl.store(errors + series, error.to(errors.dtype.element_ty))
    # 3. Derivatives in d_b, and in W_b for constant d_b
    for begin in range(0, n_bins, block):
        n, d, gap, inside = _gaps(sums, begin, n_parts, n_sums, n_bins, at_once, block)
        column = slopes + begin + tl.arange(0, block)
        for k in range(3, n_sums):
            tl.store(column + k * n_bins, tl.zeros([block], tl.float64), mask=inside)
        sign = (d > 0).to(tl.float64) - (d < 0).to(tl.float64)
        if norm == "l2" or debiased:
            # E W, or E^2 W, is the sum of W_b f(x_b) with x_b = g_b^2 - v_b. f(x) is the root of max(0, x), or x.
            v, v_of_n, v_of_square, v_of_residual = _variances(
                sums, n, gap, begin, n_parts, n_sums, n_bins, debiased, at_once, block
            )
            value = gap * gap - v
            if norm == "debiased_l1":
                value = tl.sqrt(tl.where(value > 0, value, 0.0))
                slope = tl.where(value == 0, 0.0, 0.5 / tl.where(value == 0, 1.0, value)) / weight
                of_n = (value - error) / weight
            else:  # 0 where E = 0
                slope = tl.where(error == 0, 0.0, 0.5 / (weight * tl.where(error == 0, 1.0, error)))
                slope += tl.zeros([block], tl.float64)
                of_n = slope * (value - error * error)
            of_n -= slope * (2 * gap * gap + n * (v_of_n + gap * gap * v_of_residual))
            of_d = slope * 2 * (gap + n * gap * v_of_residual)
            if debiased:
                tl.store(column + 5 * n_bins, -slope * n * v_of_square, mask=inside)
                tl.store(column + 6 * n_bins, -slope * n * v_of_residual, mask=inside)
        elif norm == "l1" or norm == "signed":
            of_d = (sign if norm == "l1" else inside.to(tl.float64)) / weight
            of_n = tl.zeros([block], tl.float64) - error / weight
        else:
            share = tl.where(n == 0, 0.0, 1 / (bins * tl.where(n == 0, 1.0, n)))
            if norm == "max":
                share = tl.where(tl.abs(gap) == error, share, 0.0)
            share = tl.where(is_valid, share, float("nan"))
            of_d = sign * share
            of_n = -tl.abs(gap) * share
        tl.store(column, of_n, mask=inside)
        tl.store(column + n_bins, -of_d, mask=inside)
        tl.store(column + 2 * n_bins, of_d, mask=inside)


@triton.jit
def _gaps(sums, begin, n_parts, n_sums, n_bins, at_once: tl.constexpr, block: tl.constexpr):
    """Return W_b, d_b and g_b of a block of bins, 0 in empty bins, and a mask of bins that exist."""
    n, inside = _total(sums, 0, begin, n_parts, n_sums, n_bins, at_once, block)
    p, _ = _total(sums, 1, begin, n_parts, n_sums, n_bins, at_once, block)
    d, _ = _total(sums, 2, begin, n_parts, n_sums, n_bins, at_once, block)
    d -= p
    return n, d, tl.where(n == 0, 0.0, d / tl.where(n == 0, 1.0, n)), inside


@triton.jit
def _variances(
    sums, n, gap, begin, n_parts, n_sums, n_bins, debiased: tl.constexpr, at_once: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Return the variances v_b of `BinStats.gap_variance`, and derivatives in W_b, S_b and R_b; 0 unless `debiased`.

    S_b and R_b are the sums of w^2 and w e^2 for residuals e. With A_b = max(0, R_b - W_b g_b^2) and
    D_b = W_b^2 - S_b, v_b = S_b A_b / (W_b D_b), but 0 for one row. The derivative in W_b is that for constant A_b.
    """
    if debiased:
        square, _ = _total(sums, 5, begin, n_parts, n_sums, n_bins, at_once, block)
        around_mean, _ = _total(sums, 6, begin, n_parts, n_sums, n_bins, at_once, block)
        around_mean -= n * gap * gap
        difference = n * n - square
        is_single = difference <= n * n * _ONE_ROW
        difference = tl.where(is_single, 1.0, difference)
        factor = tl.where(is_single, 0.0, square / (tl.where(is_single, 1.0, n) * difference))
        of_residual = tl.where(around_mean < 0, 0.0, factor)
        around_mean = tl.where(around_mean < 0, 0.0, around_mean)
        of_square = tl.where(is_single, 0.0, n * around_mean / (difference * difference))
        of_n = -factor * around_mean * (3 * n * n - square) / (tl.where(is_single, 1.0, n) * difference)
        v = factor * around_mean
    else:
        v = tl.zeros([block], tl.float64)
        of_n = v
        of_square = v
        of_residual = v
    return v, of_n, of_square, of_residual


@triton.jit
def _total(sums, row, begin, n_parts, n_sums, n_bins, at_once: tl.constexpr, block: tl.constexpr):
    """Return a row of sums over a block of bins, added over the parts, and a mask of bins that exist."""
    index = begin + tl.arange(0, block)
    inside = index < n_bins
    total = tl.zeros([at_once, block], tl.float64)
    for start in range(0, n_parts, at_once):
        part = start + tl.arange(0, at_once)
        at = ((part * n_sums + row) * n_bins)[:, None] + index[None, :]
        total += tl.load(sums + at, mask=(part < n_parts)[:, None] & inside[None, :], other=0)
    return tl.sum(total, 0), inside
