"""Loops that add rows to the bins of all their classes, and the gradient.

At most B - 1 entries of a row reach 1/B, because they sum to 1. All other entries are in the first bin of their class
and are added as vectors. The few others are found by probing 64 entries at a time and are added one by one.
"""

from typing import Any

import numpy as np

from torchcalib.ops.bin_sums.numba_events import bin_of
from torchcalib.ops.numba_math import BLOCK, INF, ZERO, F, compiled_loop, exps_of, lanes, limits_of, step
from torchcalib.ops.segments import BELOW_EDGE

PROBE = 64  # entries in which those that reach 1/B are counted at once


@lanes
def _count_from(x: Any, low: Any) -> Any:
    """Return the number of entries that are at least `low`, as a float."""
    count = ZERO
    for k in range(x.size):
        count += F(1) if x[k] >= low else ZERO
    return count


@step
def _add_below(x: Any, low: Any, scale: Any, total: Any) -> None:
    """Add `scale` times the entries below `low`, and NaN."""
    for k in range(x.size):
        total[k] += scale * np.float64(ZERO if x[k] >= low else x[k])


@step
def _add_below_with_spread(x: Any, low: Any, scale: Any, w: Any, total: Any, spread: Any) -> None:
    """Add the same as `_add_below`, up to rounding, and w q (1 - q) of these probabilities q."""
    factor = scale * w
    for k in range(x.size):
        part = np.float64(ZERO if x[k] >= low else x[k])
        total[k] += factor * part
        q = scale * part
        spread[k] += w * (q - q * q)


@step
def _count_below(x: Any, low: Any, w: Any, weight: Any) -> None:
    for k in range(x.size):
        weight[k] += 0.0 if x[k] >= low else w


@step
def _proportional(x: Any, largest: Any, from_logits: Any, shifted: Any, out: Any) -> None:
    """Fill in the probabilities of a block of a row, for logits divided by that of the top class."""
    if not from_logits:
        out[:] = x
    elif largest == INF:
        limits_of(x, shifted, out)
    else:
        exps_of(x, largest, shifted, out)


@compiled_loop
def add_classes(
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
    """Add K classes, the columns from `first` on, to sums `(F, B, K)`; labels count from 0 at the first of them.

    Without weights the number of rows in the first bin is left out. F is 3, or 4 with one sum of noise, or 5 with two:
    by the weights and by their squares.
    """
    n_sums, _, n_classes = sums.shape
    shifted, block, unused = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK)
    w = 1.0
    for i in range(len(values)):
        if weights is not None:
            w = weights[i]
            if w == 0:
                continue
        row = values[i]
        scale = confidence[i] if from_logits else 1.0
        low = F(BELOW_EDGE * edges[1] / scale)
        for start in range(0, n_classes, BLOCK):
            x = row[first + start : first + min(start + BLOCK, n_classes)]
            e = block[: x.size]
            _proportional(x, largest[i], from_logits, shifted[: x.size], e)
            held = slice(start, start + BLOCK)
            if n_sums == 3:
                _add_below(e, low, scale * w, sums[1, 0, held])
            else:
                _add_below_with_spread(e, low, scale, w, sums[1, 0, held], sums[3, 0, held])
            if n_sums == 5:
                _add_below_with_spread(e, low, scale, w * w, unused[: x.size], sums[4, 0, held])
            if weights is not None:
                _count_below(e, low, w, sums[0, 0, start : start + BLOCK])
            for begin in range(0, x.size, PROBE):
                part = e[begin : begin + PROBE]
                if _count_from(part, low) > 0:
                    for k in range(part.size):
                        if part[k] >= low:
                            value = scale * np.float64(part[k])
                            b = bin_of(value, edges, right)
                            sums[0, b, start + begin + k] += w
                            sums[1, b, start + begin + k] += w * value
                            if n_sums > 3:
                                spread = w * value * (1.0 - value)
                                sums[3, b, start + begin + k] += spread
                                if n_sums > 4:
                                    sums[4, b, start + begin + k] += w * spread
            label = target[i] - start
            if 0 <= label < x.size:
                sums[2, bin_of(scale * np.float64(e[label]), edges, right), start + label] += w


@step
def _multiple(x: Any, scale: Any, out: Any) -> None:
    for k in range(x.size):
        out[k] = x[k] * scale


@lanes
def _dot(x: Any, y: Any) -> Any:
    total = ZERO
    for k in range(x.size):
        total += x[k] * y[k]
    return total


@step
def _softmax_gradient(e: Any, slope: Any, mean: Any, scale: Any, out: Any) -> None:
    for k in range(e.size):
        out[k] = scale * e[k] * (slope[k] - mean)


@compiled_loop
def fill_class_gradients(
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
    """Fill in the gradient in `values`: q (g - sum of q g) for logits, with g the gradient in the probabilities q.

    Args:
        values, weights, from_logits, edges, right: as for `add_classes`.
        largest: the entry of the top class of each row.
        confidence: its probability.
        grads: gradient in the sums of confidence, `(C, B)`.
        of_first: its first column, for the entries below 1/B.
        out: of the shape of `values`.
    """
    n_rows, n_classes = values.shape
    shifted, e, slope = np.empty(BLOCK, np.float32), np.empty(n_classes, np.float32), np.empty(n_classes, np.float32)
    w = 1.0
    for i in range(n_rows):
        if weights is not None:
            w = weights[i]
        if w == 0 or (from_logits and largest[i] == INF):
            out[i] = 0
            continue
        slope[:] = of_first
        mean = 0.0
        scale = confidence[i] if from_logits else 1.0
        low = F(BELOW_EDGE * edges[1] / scale)
        for start in range(0, n_classes, BLOCK):
            x = values[i, start : start + BLOCK]
            part = e[start : start + BLOCK]
            _proportional(x, largest[i], from_logits, shifted[: x.size], part)
            for begin in range(0, x.size, PROBE):
                if _count_from(part[begin : begin + PROBE], low) > 0:
                    for k in range(begin, min(begin + PROBE, x.size)):
                        if part[k] >= low:
                            b = bin_of(scale * np.float64(part[k]), edges, right)
                            slope[start + k] = grads[start + k, b]
            mean += _dot(part, slope[start : start + BLOCK])
        if from_logits:
            _softmax_gradient(e, slope, F(mean * scale), F(w * scale), out[i])
        else:
            _multiple(slope, F(w), out[i])
