"""The bin op as loops. Imported by `dispatch` alone, at first use.

Threads share no sum: events are cut into pieces by their number alone, whose sums are added in order, and of classes
each thread takes its own.
"""

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.kernels.bin_sums import BELOW_EDGE
from torchcalib.kernels.numba_math import (
    BLOCK,
    CONVERTED,
    by_rows,
    column_of,
    compiled_loop,
    exps_of,
    lanes,
    limits_of,
    step,
)
from torchcalib.kernels.threads import in_threads

_PIECE = 2**16  # events
_PIECES = 64  # at most: each has sums of its own
_PER_CELL = 32  # events of a piece for each cell of groups: what is added afterwards is less than what is read
_TURNS = 8  # a power of two. A sum waits for the one before it: events that fall in one bin take turns
_PROBE = 64  # entries among which those that reach 1/B are looked for
_F = np.float32
_ZERO, _INF = _F(0), _F(math.inf)


@step
def _bin(value: Any, edges: Any, right: Any) -> Any:
    """Return `bin_sums.bin_index`, where `edges` are `i / n_bins`."""
    last = edges.size - 2
    scaled = value * (last + 1)
    scaled = scaled if scaled > 0 else 0.0  # NaN too
    scaled = scaled if scaled < last + 1 else last + 1.0
    if right:
        k: Any = max(np.intp(math.ceil(scaled)) - 1, 0)
        k += np.intp(value > edges[k + 1]) - np.intp(value <= edges[k])
    else:
        k = min(np.intp(scaled), last)
        k += np.intp(value >= edges[k + 1]) - np.intp(value < edges[k])
    return min(max(k, 0), last)


@compiled_loop
def _events(
    confidence: Any, outcome: Any, weights: Any, ecd: Any, noise: Any, edges: Any, right: Any, sums: Any
) -> None:
    """Add events; `noise` is None, or whether outcomes are shares, and whether weights are squared in it."""
    n_bins, last = edges.size - 1, np.uintp(3 if noise is None else 5)
    width = 4 if noise is None else 8
    turns = np.zeros(_TURNS * n_bins * width)
    w = 1.0
    for i in range(confidence.size):
        if weights is not None:
            w = weights[i]
            if w == 0:
                continue
        value = np.float64(confidence[i])
        # Unsigned: not counted from the end.
        cell = np.uintp(width * ((i & (_TURNS - 1)) * n_bins + _bin(value, edges, right)))
        turns[cell] += w
        turns[cell + np.uintp(1)] += w * value
        turns[cell + np.uintp(2)] += w * outcome[i]
        if noise is not None:
            spread = value * (1.0 - value)
            variance = (outcome[i] - value) ** 2 if noise[0] else spread
            turns[cell + np.uintp(3)] += w * spread
            turns[cell + np.uintp(4)] += w * variance * (w if noise[1] else 1.0)
        if ecd is not None:
            turns[cell + last] += w * ecd[i]
    for k in range(_TURNS * n_bins):
        for column in range(len(sums)):
            sums[column, k % n_bins] += turns[width * k + column]


@step
def _cells(confidence: Any, n_bins: Any, first: Any, out: Any) -> Any:
    """Fill in cells, the bins counted from `first`, and return how many values are too near an inner edge for that.

    In the dtype of the values, as their product with the number of bins says: at least 0.3 from the outer edges, so
    that no value is near these, nor in another bin by `right`.
    """
    number = confidence.dtype.type
    factor, low, high = number(n_bins), number(0.3), number(n_bins - 0.3)
    half, tolerance = number(0.5), number(2e-7 * n_bins)
    near = np.int32(0)
    for i in range(confidence.size):
        scaled = confidence[i] * factor
        scaled = scaled if scaled > low else low  # NaN too
        scaled = scaled if scaled < high else high
        near += np.int32(abs(scaled - np.floor(scaled + half)) <= tolerance)
        out[i] = np.int32(scaled) + first[i]
    return near


@step
def _all_bits(x: Any) -> Any:
    bits = x[0]
    for i in range(x.size):
        bits |= x[i]
    return bits


@compiled_loop
def _countable_events(confidence: Any, outcome: Any, noise: Any, edges: Any, right: Any, sums: Any) -> None:
    """Add the same as `_events` for integer outcomes; faster where all of a block are 0 and 1.

    Bins are found for a block at a time, again and exactly where an edge is near, and an event makes two additions: of
    its confidence, and to a number whose lower half counts events and whose upper half those that came true. The noise
    is a third one, beside the confidence.
    """
    n_bins, width = edges.size - 1, 1 if noise is None else 2
    counts, totals = np.zeros(_TURNS * n_bins, np.int64), np.zeros(_TURNS * n_bins * width)
    first, cells = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    for i in range(BLOCK):
        first[i] = (i & (_TURNS - 1)) * n_bins
    for start in range(0, confidence.size, BLOCK):
        values, outcomes = confidence[start : start + BLOCK], outcome[start : start + BLOCK]
        if _all_bits(outcomes) & ~1:
            _events(values, outcomes, None, None, noise, edges, right, sums)
            continue
        if _cells(values, n_bins, first, cells):
            for i in range(values.size):
                cells[i] = first[i] + _bin(np.float64(values[i]), edges, right)
        for i in range(values.size):
            cell = np.uintp(cells[i])  # unsigned: not counted from the end
            counts[cell] += 1 + (np.int64(outcomes[i]) << 32)
            if noise is None:
                totals[cell] += values[i]
            else:
                value = np.float64(values[i])
                cell *= np.uintp(2)
                totals[cell] += value
                totals[cell + np.uintp(1)] += value * (1.0 - value)
    for i in range(_TURNS * n_bins):
        k = i % n_bins
        sums[0, k] += counts[i] & 0xFFFFFFFF
        sums[1, k] += totals[width * i]
        sums[2, k] += counts[i] >> 32
        if noise is not None:
            sums[3, k] += totals[2 * i + 1]
            sums[4, k] += totals[2 * i + 1]


@step
def _grouped_cells(confidence: Any, groups: Any, edges: Any, right: Any, first: Any, out: Any) -> None:
    """Fill in the cells of a block, those of one group after those of the other."""
    n_bins = edges.size - 1
    for i in range(confidence.size):
        first[i] = np.int32(groups[i] * n_bins)
    if _cells(confidence, n_bins, first, out):
        for i in range(confidence.size):
            out[i] = first[i] + _bin(np.float64(confidence[i]), edges, right)


@compiled_loop
def _grouped_events(
    confidence: Any,
    outcome: Any,
    weights: Any,
    ecd: Any,
    groups: Any,
    noise: Any,
    edges: Any,
    right: Any,
    sums: Any,
) -> None:
    """Add events to cells `(G * B, W)`, of which each is a part of one line of a cache.

    `noise` is that of `_events`; its second sum is left out where it is the first one. ECD comes last.
    """
    apart = False if noise is None else noise[0] or noise[1]
    last = (3 if noise is None else 4) + np.intp(apart)
    first, cells = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    w = 1.0
    for start in range(0, confidence.size, BLOCK):
        values = confidence[start : start + BLOCK]
        _grouped_cells(values, groups[start : start + BLOCK], edges, right, first, cells)
        for i in range(values.size):
            if weights is not None:
                w = weights[start + i]
                if w == 0:
                    continue
            cell, value, hit = np.uintp(cells[i]), np.float64(values[i]), np.float64(outcome[start + i])
            sums[cell, 0] += w
            sums[cell, 1] += w * value
            sums[cell, 2] += w * hit
            if noise is not None:
                spread = value * (1.0 - value)
                sums[cell, 3] += w * spread
                if apart:
                    variance = (hit - value) ** 2 if noise[0] else spread
                    sums[cell, 4] += w * variance * (w if noise[1] else 1.0)
            if ecd is not None:
                sums[cell, last] += w * ecd[start + i]


@compiled_loop
def _countable_grouped_events(
    confidence: Any, outcome: Any, groups: Any, noise: Any, edges: Any, right: Any, counts: Any, sums: Any
) -> None:
    """Add the same for integer outcomes, with as few additions as `_countable_events`.

    A cell is four numbers: the two counts in `counts`, which is the memory of `sums` as integers; the confidence; the
    noise; and the outcomes of blocks in which some are neither 0 nor 1.
    """
    first, cells = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    for start in range(0, confidence.size, BLOCK):
        values, outcomes = confidence[start : start + BLOCK], outcome[start : start + BLOCK]
        _grouped_cells(values, groups[start : start + BLOCK], edges, right, first, cells)
        is_label = not _all_bits(outcomes) & ~1
        for i in range(values.size):
            cell, value = np.uintp(cells[i]) * np.uintp(4), np.float64(values[i])
            counts[cell] += 1 + ((np.int64(outcomes[i]) << 32) if is_label else 0)
            sums[cell + np.uintp(1)] += value
            if noise is not None:
                sums[cell + np.uintp(2)] += value * (1.0 - value)
            if not is_label:
                sums[cell + np.uintp(3)] += outcomes[i]


@lanes
def _count_from(x: Any, low: Any) -> Any:
    """Return how many entries are at least `low`, in a float."""
    count = _ZERO
    for k in range(x.size):
        count += _F(1) if x[k] >= low else _ZERO
    return count


@step
def _multiple(x: Any, scale: Any, out: Any) -> None:
    for k in range(x.size):
        out[k] = x[k] * scale


@step
def _add_below(x: Any, low: Any, scale: Any, total: Any) -> None:
    """Add the multiple of entries below `low`, and of NaN."""
    for k in range(x.size):
        total[k] += scale * np.float64(_ZERO if x[k] >= low else x[k])


@step
def _add_below_with_spread(x: Any, low: Any, scale: Any, w: Any, total: Any, spread: Any) -> None:
    """Add also q (1 - q) of these probabilities q; what `_add_below` adds, to the last bit."""
    factor = scale * w
    for k in range(x.size):
        part = np.float64(_ZERO if x[k] >= low else x[k])
        total[k] += factor * part
        q = scale * part
        spread[k] += w * (q - q * q)


@step
def _add_below_with_noise(x: Any, low: Any, scale: Any, w: Any, total: Any, spread: Any, noise: Any) -> None:
    """Add also the same by the square of the weight."""
    factor = scale * w
    for k in range(x.size):
        part = np.float64(_ZERO if x[k] >= low else x[k])
        total[k] += factor * part
        q = scale * part
        of_spread = w * (q - q * q)
        spread[k] += of_spread
        noise[k] += w * of_spread


@step
def _count_below(x: Any, low: Any, w: Any, weight: Any) -> None:
    for k in range(x.size):
        weight[k] += 0.0 if x[k] >= low else w


@step
def _proportional(x: Any, largest: Any, from_logits: Any, shifted: Any, out: Any) -> None:
    """Fill in a multiple of the probabilities of a block of a row: what is left to do is times the top one."""
    if not from_logits:
        out[:] = x
    elif largest == _INF:
        limits_of(x, shifted, out)
    else:
        exps_of(x, largest, shifted, out)


@compiled_loop
def _classes(
    values: Any,
    target: Any,
    weights: Any,
    largest: Any,
    confidence: Any,
    from_logits: Any,
    edges: Any,
    right: Any,
    first: Any,
    sums: Any,
) -> None:
    """Add K classes, in columns from `first` on and numbered from 0 by `target`, to sums `(F, B, K)`.

    Without weights the number of rows in the first bin is left out. F is 4 with one sum of noise, 5 with two.
    """
    n_sums, _, n_classes = sums.shape
    shifted, block = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    w = 1.0
    for i in range(len(values)):
        if weights is not None:
            w = weights[i]
            if w == 0:
                continue
        row = values[i]
        scale = confidence[i] if from_logits else 1.0
        low = _F(BELOW_EDGE * edges[1] / scale)
        for start in range(0, n_classes, BLOCK):
            x = row[first + start : first + min(start + BLOCK, n_classes)]
            e = block[: x.size]
            _proportional(x, largest[i], from_logits, shifted[: x.size], e)
            held = slice(start, start + BLOCK)
            if n_sums == 3:
                _add_below(e, low, scale * w, sums[1, 0, held])
            elif n_sums == 4:
                _add_below_with_spread(e, low, scale, w, sums[1, 0, held], sums[3, 0, held])
            else:
                _add_below_with_noise(e, low, scale, w, sums[1, 0, held], sums[3, 0, held], sums[4, 0, held])
            if weights is not None:
                _count_below(e, low, w, sums[0, 0, start : start + BLOCK])
            for begin in range(0, x.size, _PROBE):
                part = e[begin : begin + _PROBE]
                if _count_from(part, low) > 0:
                    for k in range(part.size):
                        if part[k] >= low:
                            value = scale * np.float64(part[k])
                            b = _bin(value, edges, right)
                            sums[0, b, start + begin + k] += w
                            sums[1, b, start + begin + k] += w * value
                            if n_sums > 3:
                                spread = w * value * (1.0 - value)
                                sums[3, b, start + begin + k] += spread
                                if n_sums > 4:
                                    sums[4, b, start + begin + k] += w * spread
            label = target[i] - start
            if 0 <= label < x.size:
                sums[2, _bin(scale * np.float64(e[label]), edges, right), start + label] += w


@lanes
def _dot(x: Any, y: Any) -> Any:
    total = _ZERO
    for k in range(x.size):
        total += x[k] * y[k]
    return total


@step
def _softmax_gradient(e: Any, slope: Any, mean: Any, scale: Any, out: Any) -> None:
    for k in range(e.size):
        out[k] = scale * e[k] * (slope[k] - mean)


@compiled_loop
def _classes_backward(
    values: Any,
    weights: Any,
    largest: Any,
    confidence: Any,
    grads: Any,
    of_first: Any,
    from_logits: Any,
    edges: Any,
    right: Any,
    out: Any,
) -> None:
    n_rows, n_classes = values.shape
    shifted, e, slope = np.empty(BLOCK, np.float32), np.empty(n_classes, np.float32), np.empty(n_classes, np.float32)
    w = 1.0
    for i in range(n_rows):
        if weights is not None:
            w = weights[i]
        if w == 0 or (from_logits and largest[i] == _INF):
            out[i] = 0
            continue
        slope[:] = of_first
        mean = 0.0
        scale = confidence[i] if from_logits else 1.0
        low = _F(BELOW_EDGE * edges[1] / scale)
        for start in range(0, n_classes, BLOCK):
            x = values[i, start : start + BLOCK]
            part = e[start : start + BLOCK]
            _proportional(x, largest[i], from_logits, shifted[: x.size], part)
            for begin in range(0, x.size, _PROBE):
                if _count_from(part[begin : begin + _PROBE], low) > 0:
                    for k in range(begin, min(begin + _PROBE, x.size)):
                        if part[k] >= low:
                            b = _bin(scale * np.float64(part[k]), edges, right)
                            slope[start + k] = grads[start + k, b]
            mean += _dot(part, slope[start : start + BLOCK])
        if from_logits:
            _softmax_gradient(e, slope, _F(mean * scale), _F(w * scale), out[i])
        else:
            _multiple(slope, _F(w), out[i])


def event_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    right: bool,
    noise: str,
    copies: bool,
    sums: Tensor,
) -> None:
    """See `bin_op_reference.event_sums`."""
    n = confidence.shape[-1]
    edges = _edges(sums.shape[-1])
    size = max(_PIECE, -(-n // _PIECES))
    starts = range(0, n, size)
    kind = None if noise == "none" else (noise == "shares", not copies)
    countable = weights is None and ecd is None and noise != "shares" and not outcome.is_floating_point()
    for series, into in enumerate(sums.numpy()):
        pieces = into[None] if len(starts) == 1 else np.zeros((len(starts), *into.shape))

        def add(begin: int, end: int, series: int = series, pieces: Any = pieces) -> None:
            for piece in range(begin, end):
                held = slice(starts[piece], starts[piece] + size)
                part = [None if x is None else column_of(x[series, held]) for x in (confidence, outcome, weights, ecd)]
                if countable:
                    _countable_events(*part[:2], kind, edges, right, pieces[piece])
                else:
                    _events(*part, kind, edges, right, pieces[piece])

        in_threads(add, len(starts), n)
        if len(starts) > 1:
            into[:] = pieces.sum(0)


def group_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    groups: Tensor,
    right: bool,
    noise: str,
    copies: bool,
    sums: Tensor,
) -> None:
    """See `bin_op_reference.group_sums`."""
    n = confidence.shape[-1]
    n_groups, _, n_bins = sums.shape[1:]
    edges, n_cells = _edges(n_bins), n_groups * n_bins
    kind = None if noise == "none" else (noise == "shares", weights is not None and not copies)
    countable = weights is None and ecd is None and noise != "shares" and not outcome.is_floating_point()
    size = -(-n // max(1, min(_PIECES, n // max(_PIECE, _PER_CELL * n_cells))))
    starts = range(0, n, size)
    for series, into in enumerate(sums.numpy()):
        pieces = _lines(len(starts), n_cells, 4 if countable else 8)

        def add(begin: int, end: int, series: int = series, pieces: Any = pieces) -> None:
            for piece in range(begin, end):
                held = slice(starts[piece], starts[piece] + size)
                given = confidence, outcome, weights, ecd, groups
                part = [None if x is None else column_of(x[series, held]) for x in given]
                if countable:
                    flat = pieces[piece].reshape(-1)
                    of_labels = part[0], part[1], part[4]
                    _countable_grouped_events(*of_labels, kind, edges, right, flat.view(np.int64), flat)
                else:
                    _grouped_events(*part, kind, edges, right, pieces[piece])

        in_threads(add, len(starts), n)
        columns = _columns_of_labels(pieces) if countable else list(pieces.sum(0).T)
        if kind is not None and not any(kind):  # one sum of noise is both
            columns.insert(4, columns[3])
        for row, column in zip(into.swapaxes(0, 1), columns, strict=False):
            row[:] = column.reshape(n_groups, n_bins)


def _columns_of_labels(pieces: Any) -> list[Any]:
    """Return the sums of pieces of `_countable_grouped_events`."""
    counts, (confidence, spread, others) = pieces.view(np.int64)[..., 0], pieces[..., 1:].sum(0).T
    return [(counts & 0xFFFFFFFF).sum(0), confidence, (counts >> 32).sum(0) + others, spread]


def _lines(n_pieces: int, n_cells: int, width: int) -> Any:
    """Return zeros `(P, K, W)`, where no cell of 4 or 8 numbers lies across two lines of 64 bytes."""
    memory = np.zeros(n_pieces * n_cells * width + 8)
    start = -(memory.ctypes.data // 8) % 8
    return memory[start : start + n_pieces * n_cells * width].reshape(n_pieces, n_cells, width)


def class_sums(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    from_logits: bool,
    right: bool,
    copies: bool,
    sums: Tensor,
) -> None:
    """See `bin_op_reference.class_sums`."""
    n_classes, n_sums, n_bins = sums.shape
    apart = n_sums if weights is not None and not copies else min(n_sums, 4)
    edges = _edges(n_bins)
    labels = target.numpy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]
    whole = values.dtype == torch.float32 and values.is_contiguous()

    def add(begin: int, end: int) -> None:
        into = np.zeros((apart, n_bins, end - begin))
        n = len(values) if whole else max(1, CONVERTED // (end - begin))
        buffer = torch.empty(0 if whole else min(n, len(values)), end - begin, dtype=torch.float32)
        for start in range(0, len(values), n):
            rows = values[start : start + n]
            x = rows if whole else buffer[: len(rows)].copy_(rows[:, begin:end])
            own = labels[start : start + n] - begin
            some = [None if column is None else column[start : start + n] for column in columns]
            _classes(x.numpy(), own, *some, from_logits, edges, right, begin if whole else 0, into)
        if weights is None:
            into[0, 0] = len(values) - into[0, 1:].sum(0)
        sums[begin:end, :apart] = torch.from_numpy(into).movedim(-1, 0)
        if apart < n_sums:
            sums[begin:end, 4] = sums[begin:end, 3]

    in_threads(add, n_classes, values.numel() if n_classes >= 2 * _PROBE else 0)


def class_sums_backward(
    values: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    grads: Tensor,
    from_logits: bool,
    right: bool,
    out: Tensor,
) -> None:
    """See `bin_op_reference.class_sums_backward`."""
    n_bins = grads.shape[-1]
    edges = _edges(n_bins)
    slopes = grads.float().contiguous().numpy()
    of_first = slopes[:, 0].copy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]

    def fill(begin: int, end: int, rows: Tensor) -> None:
        into = out[begin:end]
        filled = into if out.dtype == torch.float32 else torch.empty_like(into, dtype=torch.float32)
        some = [None if column is None else column[begin:end] for column in columns]
        _classes_backward(rows.numpy(), *some, slopes, of_first, from_logits, edges, right, filled.numpy())
        if filled is not into:
            into.copy_(filled)

    by_rows(fill, values)


@cache
def _edges(n_bins: int) -> Any:
    return np.arange(n_bins + 1) / n_bins


def _largest(values: Tensor, top: Tensor) -> Tensor:
    """Return the entries at the top."""
    return values.gather(-1, top.unsqueeze(-1)).squeeze(-1).float()
