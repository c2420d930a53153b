"""Loops that add events to bins, those of groups apart or not; see `bin_op_numba`, which calls them."""

import math
from typing import Any

import numpy as np

from torchcalib.ops.numba_math import BLOCK, compiled_loop, step

_TURNS = 8  # a power of two. A sum waits for the one before it: events that fall in one bin take turns


@step
def bin_of(value: Any, edges: Any, right: Any) -> Any:
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
def add_events(
    confidence: Any, outcome: Any, weights: Any, ecd: Any, noise: Any, edges: Any, right: Any, sums: Any
) -> None:
    """Add events; `noise` is that of `told_of_noise`."""
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
        # unsigned: not counted from the end
        cell = np.uintp(width * ((i & (_TURNS - 1)) * n_bins + bin_of(value, edges, right)))
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
def add_labels(confidence: Any, outcome: Any, noise: Any, edges: Any, right: Any, sums: Any) -> None:
    """Add the same as `add_events` for integer outcomes; faster where all of a block are 0 and 1.

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
            add_events(values, outcomes, None, None, noise, edges, right, sums)
            continue
        if _cells(values, n_bins, first, cells):
            for i in range(values.size):
                cells[i] = first[i] + bin_of(np.float64(values[i]), edges, right)
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
            out[i] = first[i] + bin_of(np.float64(confidence[i]), edges, right)


@compiled_loop
def add_grouped_events(
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

    `noise` is that of `add_events`; its second sum is left out where it is the first one. ECD comes last.
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
def add_grouped_labels(
    confidence: Any, outcome: Any, groups: Any, noise: Any, edges: Any, right: Any, counts: Any, sums: Any
) -> None:
    """Add the same for integer outcomes, with as few additions as `add_labels`.

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
