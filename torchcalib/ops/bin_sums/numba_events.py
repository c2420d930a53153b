"""Compiled loops that sum events over cells. A cell is a bin of one group, with index `group * B + bin`.

The processor delays an addition until the previous addition to the same cell is complete. Without groups, there are few
cells. Consecutive events are therefore added to 8 copies of the sums in turn. The copies are summed at the end.
"""

import math
from typing import Any

import numpy as np

from torchcalib.ops.numba_math import BLOCK, compiled_loop, step

_COPIES = 8  # number of copies of the sums; a power of two


@step
def bin_of(value: Any, edges: Any, right: Any) -> Any:
    """Return the `segments.bin_index` of one float64 value; `edges` contains the B + 1 bin edges."""
    last = edges.size - 2
    scaled = value * (last + 1)
    scaled = scaled if scaled > 0 else 0.0  # NaN becomes 0
    scaled = scaled if scaled < last + 1 else last + 1.0
    if right:
        k: Any = max(np.intp(math.ceil(scaled)) - 1, 0)
        k += np.intp(value > edges[k + 1]) - np.intp(value <= edges[k])
    else:
        k = min(np.intp(scaled), last)
        k += np.intp(value >= edges[k + 1]) - np.intp(value < edges[k])
    return min(max(k, 0), last)


@step
def _cells(confidence: Any, n_bins: Any, first: Any, out: Any) -> Any:
    """Fill `out` with the cell of each value, and return the number of values near an inner bin edge.

    The cell is `first` plus the bin. The bin is floor(value * n_bins) in the dtype of the values, computed by vector
    instructions. Near inner edges it can be wrong because of rounding errors. Values near 0 and 1 do not count as near
    an edge, because the outer bins are closed: their products are moved 0.3 away from the outer edges.
    """
    number = confidence.dtype.type
    factor, low, high = number(n_bins), number(0.3), number(n_bins - 0.3)
    half, tolerance = number(0.5), number(2e-7 * n_bins)
    near = np.int32(0)
    for i in range(confidence.size):
        scaled = confidence[i] * factor
        scaled = scaled if scaled > low else low  # NaN becomes `low`
        scaled = scaled if scaled < high else high
        near += np.int32(abs(scaled - np.floor(scaled + half)) <= tolerance)
        out[i] = np.int32(scaled) + first[i]
    return near


@step
def _all_bits(x: Any) -> Any:
    """Return the bitwise "or" of all integers: 0 or 1 if every integer is 0 or 1, and another number otherwise."""
    bits = x[0]
    for i in range(x.size):
        bits |= x[i]
    return bits


@compiled_loop
def add_events(
    confidence: Any, outcome: Any, weights: Any, ecd: Any, groups: Any, noise: Any, edges: Any, right: Any, sums: Any
) -> None:
    """Add events to the sums `(F, K)` of their cells, one event at a time.

    Args:
        confidence, outcome, weights, ecd, groups: one number per event, `(N,)`; the last three can be None.
        noise: pair of bools (outcomes are fractional, weights are squared), or None to omit the sums of noise.
        edges: bin edges `(B + 1,)`.
        right: whether bins include their right edge.
        sums: `(F, K)`, updated in place.
    """
    n_cells, width = sums.shape[1], 4 if noise is None else 8
    copies = _COPIES if groups is None else 1
    last = np.uintp(3 if noise is None else 5)
    totals = np.zeros(copies * n_cells * width)  # the sums of a cell are adjacent, in one cache line
    w, group = 1.0, 0
    for i in range(confidence.size):
        if weights is not None:
            w = weights[i]
            if w == 0:
                continue
        if groups is not None:
            group = groups[i]
        value = np.float64(confidence[i])
        cell = (i & (copies - 1)) * n_cells + group * (edges.size - 1) + bin_of(value, edges, right)
        at = np.uintp(width * cell)  # unsigned: numba omits the test for negative indices
        totals[at] += w
        totals[at + np.uintp(1)] += w * value
        totals[at + np.uintp(2)] += w * outcome[i]
        if noise is not None:
            spread = value * (1.0 - value)
            variance = (outcome[i] - value) ** 2 if noise[0] else spread
            totals[at + np.uintp(3)] += w * spread
            totals[at + np.uintp(4)] += w * variance * (w if noise[1] else 1.0)
        if ecd is not None:
            totals[at + last] += w * ecd[i]
    for k in range(copies * n_cells):
        for column in range(len(sums)):
            sums[column, k % n_cells] += totals[width * k + column]


@compiled_loop
def add_labels(confidence: Any, outcome: Any, groups: Any, noise: Any, edges: Any, right: Any, sums: Any) -> None:
    """Add events with integer outcomes and without weights; arguments as for `add_events`.

    Blocks of binary outcomes are counted in 64-bit integers. The lower half counts events, and the upper half counts
    positive outcomes. An event then needs two additions, or three with the sums of noise.
    """
    n_bins, n_cells, width = edges.size - 1, sums.shape[1], 1 if noise is None else 2
    copies = _COPIES if groups is None else 1
    counts, totals = np.zeros(copies * n_cells, np.int64), np.zeros(copies * n_cells * width)
    first, cells = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    for i in range(BLOCK):
        first[i] = (i & (copies - 1)) * n_cells
    for start in range(0, confidence.size, BLOCK):
        values, outcomes = confidence[start : start + BLOCK], outcome[start : start + BLOCK]
        if groups is not None:
            for i in range(values.size):
                first[i] = np.int32(groups[start + i] * n_bins)
        if _all_bits(outcomes) & ~1:  # an outcome is neither 0 nor 1
            part = None if groups is None else groups[start : start + BLOCK]
            add_events(values, outcomes, None, None, part, noise, edges, right, sums)
            continue
        if _cells(values, n_bins, first, cells):  # a value is near an edge: compare with the edges in float64
            for i in range(values.size):
                cells[i] = first[i] + bin_of(np.float64(values[i]), edges, right)
        for i in range(values.size):
            cell = np.uintp(cells[i])  # unsigned: numba omits the test for negative indices
            counts[cell] += 1 + (np.int64(outcomes[i]) << 32)
            if noise is None:
                totals[cell] += values[i]
            else:
                value = np.float64(values[i])
                cell *= np.uintp(2)
                totals[cell] += value
                totals[cell + np.uintp(1)] += value * (1.0 - value)
    for i in range(copies * n_cells):
        k = i % n_cells
        sums[0, k] += counts[i] & 0xFFFFFFFF
        sums[1, k] += totals[width * i]
        sums[2, k] += counts[i] >> 32
        if noise is not None:
            sums[3, k] += totals[2 * i + 1]
            sums[4, k] += totals[2 * i + 1]
