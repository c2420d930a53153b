"""Compiled loops for the bin sums of every class, and for their gradient.

Probabilities in the first bin of their class are added by vector instructions; see `bin_sums.class_bins`.
"""

import numpy as np

from torchcalib.ops.numba_math import BLOCK, INF, ZERO, F, bin_of, compiled_loop, fill_exps, fill_limits, lanes, step
from torchcalib.ops.segments import BELOW_EDGE

PROBE = 64  # entries per group; a vector comparison skips groups without probabilities >= 1/B


@lanes
def _count_at_least(x, low):
    """Return the number of entries >= `low`, as a float."""
    count = ZERO
    for k in range(x.size):
        count += F(1) if x[k] >= low else ZERO
    return count


@step
def _add_below(x, low, scale, total):
    """Add scale * x[k] to total[k] for every entry x[k] that is below `low` or NaN."""
    for k in range(x.size):
        total[k] += scale * np.float64(ZERO if x[k] >= low else x[k])


@step
def _add_below_with_spread(x, low, scale, w, total, spread):
    """Add w q to total[k] and w q (1 - q) to spread[k] for q = scale * x[k], if x[k] is below `low` or NaN."""
    factor = scale * w
    for k in range(x.size):
        part = np.float64(ZERO if x[k] >= low else x[k])
        total[k] += factor * part
        q = scale * part
        spread[k] += w * (q - q * q)


@step
def _add_weight_below(x, low, w, weight):
    """Add `w` to weight[k] for every entry x[k] that is below `low` or NaN."""
    for k in range(x.size):
        weight[k] += 0.0 if x[k] >= low else w


@step
def _proportional(x, largest, from_logits, shifted, out):
    """Fill `out` with probabilities; for logits, with probabilities divided by the probability of the top class."""
    if not from_logits:
        out[:] = x
    elif largest == INF:
        fill_limits(x, shifted, out)
    else:
        fill_exps(x, largest, shifted, out)


@compiled_loop
def add_classes(values, target, weights, largest, confidence, from_logits, edges, right, first, sums):
    """Add rows to the bin sums of K consecutive classes; without weights, omit the weight of the first bin.

    The classes are the columns of `values` from `first` on, and `target` is the label minus the number of the first
    class. `largest` is the largest entry of each row, and `confidence` the probability of its top class.

    `sums` `(F, B, K)` is updated in place. It has w, w q and w y for weight w, probability q and outcome y. F > 3 adds
    the sum of w q (1 - q), and F = 5 also that of w^2 q (1 - q).
    """
    # Partial results of a row are float32, because a row has few entries and twice as many fit into a vector. Sums over
    # rows are float64, because a class can have millions of rows.
    n_sums, _, n_classes = sums.shape
    shifted, block, unused = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK)
    w = 1.0
    for i in range(len(values)):
        if weights is not None:
            w = weights[i]
            if w == 0:
                continue
        # 1. q_k = scale e_k with e_k = exp(x_k - max x) and scale = max_k q_k. The threshold 1/B is divided by the
        #    scale once, instead of multiplying every entry. It is lowered by the rounding error of q.
        row = values[i]
        scale = confidence[i] if from_logits else 1.0
        low = F(BELOW_EDGE * edges[1] / scale)
        for start in range(0, n_classes, BLOCK):
            # 2. Entries e of a block, which stays in the level-1 cache for steps 3 to 5.
            x = row[first + start : first + min(start + BLOCK, n_classes)]
            e = block[: x.size]
            _proportional(x, largest[i], from_logits, shifted[: x.size], e)
            columns = slice(start, start + BLOCK)
            # 3. Add probabilities in the first bin by vector instructions. Larger entries are replaced by 0 instead of
            #    skipped, because a branch would prevent them.
            if n_sums == 3:
                _add_below(e, low, scale * w, sums[1, 0, columns])
            else:
                _add_below_with_spread(e, low, scale, w, sums[1, 0, columns], sums[3, 0, columns])
            if n_sums == 5:
                _add_below_with_spread(e, low, scale, w * w, unused[: x.size], sums[4, 0, columns])
            if weights is not None:
                _add_weight_below(e, low, w, sums[0, 0, start : start + BLOCK])
            # 4. Add probabilities >= 1/B one by one. One comparison of a vector skips 64 entries without any.
            for begin in range(0, x.size, PROBE):
                part = e[begin : begin + PROBE]
                if _count_at_least(part, low) > 0:
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
            # 5. Add the outcome to the bin that contains the probability of the label.
            label = target[i] - start
            if 0 <= label < x.size:
                sums[2, bin_of(scale * np.float64(e[label]), edges, right), start + label] += w


@step
def _multiple(x, scale, out):
    for k in range(x.size):
        out[k] = x[k] * scale


@lanes
def _dot(x, y):
    total = ZERO
    for k in range(x.size):
        total += x[k] * y[k]
    return total


@step
def _softmax_gradient(e, slope, mean, scale, out):
    """Fill `out` with scale * e_k (slope_k - mean), the product of the softmax Jacobian and `slope`."""
    for k in range(e.size):
        out[k] = scale * e[k] * (slope[k] - mean)


@compiled_loop
def fill_class_gradients(values, weights, largest, confidence, grads, first_grads, from_logits, edges, right, out):
    """Fill `out` with the gradient in `values`: w g_k for probabilities q, w q_k (g_k - sum_j q_j g_j) for logits.

    g_k is the entry of `grads`, the gradient in the sums of confidence `(C, B)`, for class k and the bin of q_k.
    `first_grads` is a contiguous copy of `grads[:, 0]`. Other arguments are as for `add_classes`.
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
        # 1. g_k: start with the gradients of the first bin, which contains most probabilities.
        slope[:] = first_grads
        mean = 0.0
        scale = confidence[i] if from_logits else 1.0
        low = F(BELOW_EDGE * edges[1] / scale)
        for start in range(0, n_classes, BLOCK):
            x = values[i, start : start + BLOCK]
            part = e[start : start + BLOCK]
            _proportional(x, largest[i], from_logits, shifted[: x.size], part)
            # 2. Replace g_k where q_k >= 1/B, as in step 4 of `add_classes`.
            for begin in range(0, x.size, PROBE):
                if _count_at_least(part[begin : begin + PROBE], low) > 0:
                    for k in range(begin, min(begin + PROBE, x.size)):
                        if part[k] >= low:
                            b = bin_of(scale * np.float64(part[k]), edges, right)
                            slope[start + k] = grads[start + k, b]
            # 3. sum_j q_j g_j: float32 within a block, float64 across blocks. The scale follows in step 4.
            mean += _dot(part, slope[start : start + BLOCK])
        # 4. w q_k (g_k - sum_j q_j g_j), or w g_k.
        if from_logits:
            _softmax_gradient(e, slope, F(mean * scale), F(w * scale), out[i])
        else:
            _multiple(slope, F(w), out[i])
