"""Sums over bins by Triton kernels. Their speed on a GPU has not been measured.

Each program stores its own sums. These are then added in a fixed order, without atomic operations, which makes results
reproducible. Addresses are int64, because offsets can exceed 2^31.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcalib.ops.bin_sums import chunked
from torchcalib.ops.bin_sums.chunked import ClassRows, Events
from torchcalib.ops.bin_sums.formula import Bins
from torchcalib.ops.segments import BELOW_EDGE

_EVENTS = 256  # events that a program loads at a time
_PIECE = 512  # smallest number of events per program
_PIECES = 1024  # largest number of programs that share the events of a batch element
_BINS = 32  # largest number of bins per program
_TILE, _CLASSES = 512, 128  # entries that a program loads at a time, and largest number of classes per program
_SUMS = 2**15  # limit for the number of classes times the number of pieces of rows, which determines the memory
_LOWEST = tl.constexpr(-1000.0)  # exp of this number is 0 in every dtype
_BELOW_EDGE = tl.constexpr(BELOW_EDGE)


def event_sums(events: Events, bins: Bins, shape: tuple[int, int], countable: bool) -> Tensor:
    """Compute `chunked.event_sums` without synchronising the device. Groups have no kernel."""
    confidence, outcome, weights, ecd, groups = events
    if groups is not None:
        return chunked.event_sums(events, bins, shape, countable)
    n_series, n = confidence.shape
    size = max(_PIECE, -(-n // _PIECES))
    pieces = triton.cdiv(n, size)
    parts = torch.empty(n_series, pieces, *shape, dtype=torch.float64, device=confidence.device)
    width = min(_BINS, triton.next_power_of_2(bins.n_bins))
    columns = [confidence if x is None else _contiguous(x) for x in (confidence, outcome, weights, ecd)]
    with torch.cuda.device_of(confidence):
        _add_events[(n_series, pieces, triton.cdiv(bins.n_bins, width))](
            *columns, parts, n, size, bins.n_bins, weights is not None, ecd is not None, bins.right,
            bins.noise != "none", bins.noise == "shares", not bins.copies, _EVENTS, width,
        )  # fmt: skip
    return parts.sum(1)


def class_sums(rows: ClassRows, target: Tensor, bins: Bins, sums: Tensor) -> None:
    """Fill `sums` as `chunked.class_sums` does, without synchronising the device."""
    values, from_logits, weights, top, confidence = rows
    n_rows, n_classes = values.shape
    _, n_sums, n_bins = sums.shape
    n_distinct = n_sums if weights is not None and not bins.copies else min(n_sums, 4)
    size = max(64, -(-n_rows // max(1, _SUMS // n_classes)))
    pieces = triton.cdiv(n_rows, size)
    classes = min(_CLASSES, triton.next_power_of_2(n_classes))
    parts = torch.zeros(pieces, n_distinct, n_bins, n_classes, dtype=sums.dtype, device=sums.device)
    with torch.cuda.device_of(values):
        _add_classes[(triton.cdiv(n_classes, classes), pieces)](
            values, *values.stride(), target.contiguous(), confidence if weights is None else weights.contiguous(),
            top.contiguous(), confidence.contiguous(), parts, n_rows, n_classes, size, n_bins, weights is not None,
            from_logits, bins.right, n_distinct, _TILE // classes, classes,
        )  # fmt: skip
    sums[:, :n_distinct] = parts.sum(0).movedim(-1, 0)
    if n_distinct < n_sums:
        sums[:, 4] = sums[:, 3]


def _contiguous(x: Tensor) -> Tensor:
    """Return a contiguous tensor, with bool viewed as uint8 for Triton."""
    return (x.view(torch.uint8) if x.dtype == torch.bool else x).contiguous()


@triton.jit
def _bin(value, n_bins, right: tl.constexpr):
    """Return the `segments.bin_index` of float64 values, int32 of the same shape."""
    scaled = value * n_bins
    scaled = tl.where(scaled > 0, scaled, 0.0)  # NaN becomes 0
    scaled = tl.where(scaled < n_bins, scaled, n_bins.to(tl.float64))
    index = tl.ceil(scaled) - 1 if right else tl.floor(scaled)
    index = tl.where(index < 0, 0.0, index)
    index = tl.where(index > n_bins - 1, (n_bins - 1).to(tl.float64), index)
    lower, upper = index / n_bins, (index + 1) / n_bins
    if right:
        step = (value > upper).to(tl.int32) - (value <= lower).to(tl.int32)
    else:
        step = (value >= upper).to(tl.int32) - (value < lower).to(tl.int32)
    return tl.minimum(tl.maximum(index.to(tl.int32) + step, 0), n_bins - 1)


@triton.jit(do_not_specialize=["n", "size", "n_bins"])
def _add_events(
    confidence, outcome, weights, ecd, parts, n, size, n_bins,
    weighted: tl.constexpr, has_ecd: tl.constexpr, right: tl.constexpr, has_noise: tl.constexpr, shares: tl.constexpr,
    squared: tl.constexpr, chunk: tl.constexpr, bins: tl.constexpr,
):  # fmt: skip
    """Sum a piece of the events of a batch element over a range of bins. Grid: batch elements, pieces, ranges."""
    # 1. The program compares its events with its own bins, a tile of events x bins. Sums are in registers: atomic
    #    additions to shared bins would be in an arbitrary order, and results would differ between calls.
    series = tl.program_id(0).to(tl.int64) * n
    piece = tl.program_id(1).to(tl.int64)
    program_bins = tl.program_id(2) * bins + tl.arange(0, bins)
    count = tl.zeros([bins], tl.float64)
    sum_confidence = tl.zeros([bins], tl.float64)
    sum_outcome = tl.zeros([bins], tl.float64)
    sum_spread = tl.zeros([bins], tl.float64)
    sum_noise = tl.zeros([bins], tl.float64)
    sum_ecd = tl.zeros([bins], tl.float64)
    end = tl.minimum((piece + 1) * size, n)
    for start in range(piece * size, end, chunk):
        # 2. Weights w, confidences p and bins of a chunk of events. Masked loads skip events of weight 0, which may be
        #    NaN.
        event = start + tl.arange(0, chunk)
        present = event < end
        w = tl.load(weights + series + event, mask=present, other=0) if weighted else present.to(tl.float64)
        present = w != 0
        value = tl.load(confidence + series + event, mask=present, other=0).to(tl.float64)
        in_bin = present[:, None] & (_bin(value, n_bins, right)[:, None] == program_bins[None, :])
        # 3. Sums of w, w p, w y, w p (1 - p), w v and w ecd in float64.
        y = tl.load(outcome + series + event, mask=present, other=0).to(tl.float64)
        count += tl.sum(tl.where(in_bin, w[:, None], 0.0), 0)
        sum_confidence += tl.sum(tl.where(in_bin, (w * value)[:, None], 0.0), 0)
        sum_outcome += tl.sum(tl.where(in_bin, (w * y)[:, None], 0.0), 0)
        if has_noise:
            spread = w * value * (1 - value)
            sum_spread += tl.sum(tl.where(in_bin, spread[:, None], 0.0), 0)
            if shares or squared:
                variance = w * (y - value) * (y - value) if shares else spread
                variance = w * variance if squared else variance
                sum_noise += tl.sum(tl.where(in_bin, variance[:, None], 0.0), 0)
        if has_ecd:
            ecds = tl.load(ecd + series + event, mask=present, other=0).to(tl.float64)
            sum_ecd += tl.sum(tl.where(in_bin, (w * ecds)[:, None], 0.0), 0)
    # 4. Store the sums of the piece, which `event_sums` adds in order.
    n_columns: tl.constexpr = 3 + (2 if has_noise else 0) + (1 if has_ecd else 0)
    to = parts + (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + piece) * n_columns * n_bins + program_bins
    tl.store(to, count, mask=program_bins < n_bins)
    tl.store(to + n_bins, sum_confidence, mask=program_bins < n_bins)
    tl.store(to + 2 * n_bins, sum_outcome, mask=program_bins < n_bins)
    if has_noise:
        tl.store(to + 3 * n_bins, sum_spread, mask=program_bins < n_bins)
        tl.store(to + 4 * n_bins, sum_noise if shares or squared else sum_spread, mask=program_bins < n_bins)
    if has_ecd:
        tl.store(to + (n_columns - 1) * n_bins, sum_ecd, mask=program_bins < n_bins)


@triton.jit
def _proportional(x, largest, logits: tl.constexpr):
    """Return the probabilities of a tile of rows; for logits, divided by the probability of the top class."""
    if x.dtype != tl.float64:
        x = x.to(tl.float32)
    if logits:
        largest = largest.to(x.dtype)[:, None]
        d = tl.where(x == largest, 0.0, x - largest)
        x = tl.where(largest == float("-inf"), float("nan"), tl.exp(tl.where(d < _LOWEST, _LOWEST, d)))
    return x


@triton.jit(do_not_specialize=["n_rows", "size", "n_bins"])
def _add_classes(
    values, row_stride, column_stride, target, weights, tops, confidence, parts, n_rows, n_classes, size, n_bins,
    weighted: tl.constexpr, logits: tl.constexpr, right: tl.constexpr, n_sums: tl.constexpr, rows: tl.constexpr,
    classes: tl.constexpr,
):  # fmt: skip
    """Sum a piece of the rows over the bins of a range of classes. Grid: ranges of classes, pieces.

    Sums are as for `numba._add_classes`. Those of the first bin are in registers. Entries of other bins are added to
    sums in memory, one bin at a time. With many classes, most tiles have only entries of the first bin.
    """
    columns = tl.program_id(0).to(tl.int64) * classes + tl.arange(0, classes)
    real = columns < n_classes
    piece = tl.program_id(1).to(tl.int64)
    column = (tl.full([], 0, tl.int64) + n_classes) * n_bins
    to = parts + piece * n_sums * column + columns
    threshold = _BELOW_EDGE / n_bins
    count = tl.zeros([classes], tl.float64)
    total = tl.zeros([classes], tl.float64)
    hits = tl.zeros([classes], tl.float64)
    spread = tl.zeros([classes], tl.float64)
    noise = tl.zeros([classes], tl.float64)
    end = tl.minimum((piece + 1) * size, n_rows)
    for start in range(piece * size, end, rows):
        # 1. Weight, top class and scale of each row. The largest logit is loaded again, instead of stored by `rows`.
        row = start + tl.arange(0, rows)
        present = row < end
        w = tl.load(weights + row, mask=present, other=0) if weighted else present.to(tl.float64)
        present = w != 0
        place = tl.load(tops + row, mask=present, other=0)
        largest = tl.load(values + row * row_stride + place * column_stride, mask=present, other=0)
        scale = tl.load(confidence + row, mask=present, other=0)
        # 2. Probabilities q of a tile of rows x classes.
        inside = present[:, None] & real[None, :]
        x = tl.load(values + row[:, None] * row_stride + columns[None, :] * column_stride, mask=inside, other=0)
        x = _proportional(x, largest, logits)
        q = x * scale.to(x.dtype)[:, None] if logits else x
        is_label = inside & (columns[None, :] == tl.load(target + row, mask=present, other=-1)[:, None])
        # 3. First bin: sums in registers.
        reaches = inside & (q >= threshold)
        first = inside & ~reaches
        if weighted:
            count += tl.sum(tl.where(first, w[:, None], 0.0), 0)
            total += tl.sum(tl.where(first, w[:, None] * q, 0.0), 0)
            hits += tl.sum(tl.where(first & is_label, w[:, None], 0.0), 0)
        else:
            count += tl.sum(first.to(tl.int32), 0)
            total += tl.sum(tl.where(first, q, 0.0), 0)
            hits += tl.sum((first & is_label).to(tl.int32), 0)
        if n_sums > 3:
            weighted_spread = w[:, None] * (q * (1 - q))
            spread += tl.sum(tl.where(first, weighted_spread, 0.0), 0)
            if n_sums > 4:
                noise += tl.sum(tl.where(first, w[:, None] * weighted_spread, 0.0), 0)
        # 4. Probabilities >= 1/B: loop over the bins that occur in the tile, from the last bin down. The bin is
        #    computed in float64, because a product in float32 can be on the other side of an edge.
        if tl.max(tl.max(reaches.to(tl.int32), 1), 0) > 0:
            wide = x.to(tl.float64)
            if logits:
                wide *= scale[:, None]
            index = tl.where(reaches, _bin(wide, n_bins, right), -1)
            bin_ = tl.max(tl.max(index, 1), 0)
            while bin_ >= 0:
                in_bin = index == bin_
                weighted_spread = w[:, None] * (wide * (1 - wide))
                _add(
                    to + bin_.to(tl.int64) * n_classes, column, real,
                    tl.sum(tl.where(in_bin, w[:, None], 0.0), 0),
                    tl.sum(tl.where(in_bin, w[:, None] * wide, 0.0), 0),
                    tl.sum(tl.where(in_bin & is_label, w[:, None], 0.0), 0),
                    tl.sum(tl.where(in_bin, weighted_spread, 0.0), 0),
                    tl.sum(tl.where(in_bin, w[:, None] * weighted_spread, 0.0), 0),
                    n_sums,
                )  # fmt: skip
                index = tl.where(in_bin, -1, index)
                bin_ = tl.max(tl.max(index, 1), 0)
    _add(to, column, real, count, total, hits, spread, noise, n_sums)


@triton.jit
def _add(to, column, mask, count, total, hits, spread, noise, n_sums: tl.constexpr):
    """Add five sums of one bin to memory. Barriers order the loads and stores of different threads."""
    count += tl.load(to, mask=mask, other=0)
    total += tl.load(to + column, mask=mask, other=0)
    hits += tl.load(to + 2 * column, mask=mask, other=0)
    if n_sums > 3:
        spread += tl.load(to + 3 * column, mask=mask, other=0)
    if n_sums > 4:
        noise += tl.load(to + 4 * column, mask=mask, other=0)
    tl.debug_barrier()
    tl.store(to, count, mask=mask)
    tl.store(to + column, total, mask=mask)
    tl.store(to + 2 * column, hits, mask=mask)
    if n_sums > 3:
        tl.store(to + 3 * column, spread, mask=mask)
    if n_sums > 4:
        tl.store(to + 4 * column, noise, mask=mask)
    tl.debug_barrier()
