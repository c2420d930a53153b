"""Statistics of rows by compiled loops. Only `dispatch` imports this module, at first use.

A loop processes a row in blocks of 1,024 entries, which stay in the level-1 cache for several vector passes. The passes
compute exp of the differences from the maximum, and sums. The sums exclude the top entry, whose exp is 1, because it
would round small entries to 0. Arithmetic is float32 within a block and float64 across blocks, and all float64 for
float64 input. Every loop is compiled for both dtypes.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.numba_math import (
    BLOCK,
    FEW_CLASSES,
    INF,
    LANES,
    LOGITS_PER_RANGE,
    NAN,
    ONE,
    ZERO,
    add_four,
    bits_of,
    borrowed,
    by_rows,
    clipped,
    compiled_loop,
    copy,
    exp,
    fill_limits,
    fill_logs,
    float_of_bits,
    lanes,
    log,
    log1p,
    step,
)
from torchcalib.ops.softmax_stats.formula import Detail
from torchcalib.ops.threads import in_threads


@step
def _most_bits(x):
    most = bits_of(x[0])
    for k in range(x.size):
        most = max(most, bits_of(x[k]))
    return most


@step
def _least_bits(x):
    least = bits_of(x[0])
    for k in range(x.size):
        least = min(least, bits_of(x[k]))
    return least


@step
def _first_equal(x, value):
    """Return the index of the first entry that equals `value`, or the number of entries if there is none."""
    none = np.int32(x.size)
    first = none
    for k in range(x.size):
        first = min(first, np.int32(k) if x[k] == value else none)
    return first


@compiled_loop
def _first_largest(row):
    """Return the index of the first maximum of a row; arbitrary for a row with NaN, whose sums are NaN.

    The maximum is computed from the bits of the entries, because the float maximum does not compile to vector
    instructions. Non-negative floats have the order of their bits. Negative floats have the opposite order.
    """
    most = _most_bits(row)
    largest = float_of_bits(most if most >= 0 else _least_bits(row))
    for start in range(0, row.size, BLOCK):
        part = row[start : start + BLOCK]
        k = _first_equal(part, largest)
        if k < part.size:
            return start + k
    return 0


@lanes
def _sums(x, y):
    """Return the sums of x, x^2 and x y over a block."""
    zero = x.dtype.type(0)
    once, square, product = zero, zero, zero
    for k in range(x.size):
        once += x[k]
        square += x[k] * x[k]
        product += x[k] * y[k]
    return once, square, product


@lanes
def _spread(x, y):
    """Return the sum of x y^2 over a block."""
    total = x.dtype.type(0)
    for k in range(x.size):
        total += x[k] * y[k] * y[k]
    return total


@step
def _fill_scaled_exps(x, top, alpha, shifted, exps):
    """Fill `shifted` and `exps` like `fill_exps`, with differences multiplied by `alpha`."""
    for k in range(x.size):
        shift = clipped(alpha * (x[k] - top))
        shifted[k] = shift
        exps[k] = exp(shift)


@step
def _logit_gradient(x, largest, scale, a, b, c, out):
    """Fill `out` with q (a + b q + c d) for d = x - largest, q = scale * exp d; `plain.backward` defines a, b and c."""
    for k in range(x.size):
        d = clipped(x[k] - largest)
        q = exp(d) * scale
        out[k] = q * (a + b * q + c * d)


@step
def _probability_gradient(q, logs, b, c, out):
    """Fill `out` with b q + c (log q + 1), or 0 where q = 0; `plain.backward` defines b and c."""
    for k in range(q.size):
        slope = logs[k] + ONE if q[k] != ZERO else ZERO
        out[k] = b * q[k] + c * slope


@lanes
def _sums_of_exps(x, largest, top):
    """Return the sums of e, e^2 and e d over a block without the entry `top`, for d = x - largest and e = exp d."""
    zero = x.dtype.type(0)
    once, square, product = zero, zero, zero
    for k in range(x.size):
        d = clipped(x[k] - largest)
        # The top entry has e = 1. Adding it to float32 sums would round small entries to 0.
        e = zero if np.int32(k) == top else exp(d)
        once += e
        square += e * e
        product += e * d
    return once, square, product


@compiled_loop
def _forward_logits(values, target, scores, tops, places):
    """Fill `scores` and `tops` from logits, one row at a time; arguments as for `plain.forward`.

    The rows of `target` are those of `values` at `places`, or all of them if it is empty.
    """
    values = borrowed(values)
    n_rows, n_classes = target.size, values.shape[1]
    shifted, exps = np.empty(BLOCK, values.dtype), np.empty(BLOCK, values.dtype)
    for i in range(n_rows):
        # 1. Top class and maximum m of the row, in a separate pass: exp(x - m) cannot overflow, and no sum has to be
        #    rescaled later, unlike in an online softmax. A row of 1,000 classes stays in the cache between the passes.
        row, h = values[places[i] if places.size else i], target[i]
        top = _first_largest(row)
        largest = row[top]
        # 2. With d = x - m and e = exp d, the sums over the other classes of e (R), of e^2 (S) and of e d (P).
        rest, squares, product = 0.0, 0.0, 0.0  # sums that exclude the top entry, whose exp is 1
        for start in range(0, n_classes, BLOCK):
            x = row[start : start + BLOCK]
            if largest == INF:
                y, e = shifted[: x.size], exps[: x.size]
                fill_limits(x, y, e)
                if start <= top < start + x.size:
                    e[top - start] = ZERO
                sums = _sums(e, y)
            else:
                sums = _sums_of_exps(x, largest, np.int32(top - start))
            rest += sums[0]
            squares += sums[1]
            product += sums[2]
        # 3. Z = 1 + R is the sum of all e. The entropy is sum_k q_k log q_k = P / Z - log Z, and max_k q_k = 1 / Z.
        total = 1 + rest
        log_total = math.log1p(rest)
        tops[i] = top
        scores[2, i] = product / total - log_total
        scores[3, i] = 1 / total
        if not 0 <= h < n_classes:
            scores[0, i] = scores[1, i] = math.nan
            continue
        shift = 0.0 if row[h] == largest else np.float64(row[h]) - np.float64(largest)
        scores[0, i] = shift - log_total
        # 4. log q_h = x_h - m - log Z, and the squared error sum_k q_k^2 - 2 q_h + 1. If h is the top class, it is
        #    (R^2 + S) / Z^2, because 1 - q_h = R / Z: no cancellation.
        if h == top:
            scores[1, i] = (rest * rest + squares) / (total * total)
        else:
            scores[1, i] = 1 - 2 * math.exp(shift) / total + (1 + squares) / (total * total)


@lanes
def _sum_of_exps(x, largest, top):
    """Return the sum of exp(x - largest) over a block, without the entry `top`."""
    zero = x.dtype.type(0)
    total = zero
    for k in range(x.size):
        e = exp(clipped(x[k] - largest))
        total += zero if np.int32(k) == top else e
    return total


@compiled_loop
def _forward_many_labels(values, target, scores, tops, places):
    """Fill `tops`, log-probabilities and confidences like `_forward_logits`, and other scores with 0 or NaN.

    They need the sum R only, which is computed without arrays for a block.
    """
    values = borrowed(values)
    n_classes = values.shape[1]
    for i in range(target.size):
        k = places[i] if places.size else i
        row, h = values[k], target[i]
        top = _first_largest(row)
        largest = row[top]
        if largest == INF:
            one = slice(i, i + 1)
            _forward_logits(values[k : k + 1], target[one], scores[:, one], tops[one], places[:0])
            continue
        rest = 0.0
        for start in range(0, n_classes, BLOCK):
            rest += _sum_of_exps(row[start : start + BLOCK], largest, np.int32(top - start))
        tops[i] = top
        scores[1, i] = scores[2, i] = 0.0
        scores[3, i] = 1 / (1 + rest)
        if not 0 <= h < n_classes:
            scores[0, i] = scores[1, i] = math.nan
            continue
        shift = 0.0 if row[h] == largest else np.float64(row[h]) - np.float64(largest)
        scores[0, i] = shift - math.log1p(rest)


@compiled_loop
def _fill_sums(values, _, sums, tops, alpha, __):
    """Fill `sums` `(4, R)` and `tops` with the sums R, S, P and Q of `alpha` times the logits of every row.

    R, S and P are those of `_forward_logits`, and Q is the sum of e d^2. A separate loop, because that one is faster
    without a factor and Q.
    """
    n_rows, n_classes = values.shape
    factor = values.dtype.type(alpha)
    shifted, exps = np.empty(BLOCK, values.dtype), np.empty(BLOCK, values.dtype)
    for i in range(n_rows):
        row = values[i]
        top = _first_largest(row)
        largest = row[top]
        tops[i], sums[:, i] = top, 0.0
        for start in range(0, n_classes, BLOCK):
            x = row[start : start + BLOCK]
            y, e = shifted[: x.size], exps[: x.size]
            if abs(largest) == INF:
                fill_limits(x, y, e)
            else:
                _fill_scaled_exps(x, largest, factor, y, e)
            if start <= top < start + x.size and e[top - start] == ONE:
                e[top - start] = ZERO
            found = _sums(e, y)
            sums[0, i] += found[0]
            sums[1, i] += found[1]
            sums[2, i] += found[2]
            sums[3, i] += _spread(e, y)


# Functions of arrays with one number per row, for `LANES` rows. They have few arguments, because the compiler uses
# vector instructions only if it can prove that the arrays do not overlap.


@step
def _update_largest(x, largest):
    """Update the running maxima of `LANES` rows with the entries `x` of one class; NaN does not replace a maximum."""
    for i in range(LANES):
        largest[i] = x[i] if x[i] > largest[i] else largest[i]


@step
def _update_maximum(x, k, largest, tops):
    """Update the running maxima `largest` and their classes `tops` with the logits `x` of class `k`."""
    for i in range(LANES):
        tops[i] = np.int32(k) if x[i] > largest[i] else tops[i]
    _update_largest(x, largest)


@step
def _add_exps(x, largest, rest):
    """Add exp of the differences from the maxima of the rows to the sums `rest`."""
    for i in range(LANES):
        rest[i] += exp(clipped(x[i] - largest[i]))


@step
def _add_terms(x, largest, sums):
    """Add e, e^2 and e d to three sums of each row, where d is the difference from the maximum, and e = exp d.

    The sums `(3 * LANES,)` are one array, so that few pairs of arrays have to be tested for overlap.
    """
    for i in range(LANES):
        d = clipped(x[i] - largest[i])
        e = exp(d)
        sums[i] += e
        sums[LANES + i] += e * e
        sums[2 * LANES + i] += e * d


@step
def _add_product(x, y, total):
    for i in range(LANES):
        total[i] += x[i] * y[i]


@step
def _replace_by_limits(x, largest):
    """Replace logits of rows with +inf by logits with the limit of their softmax: 0 for +inf, and otherwise -inf."""
    for i in range(LANES):
        if largest[i] == INF:
            largest[i] = ZERO
            for k in range(len(x)):
                x[k, i] = (ZERO if x[k, i] == INF else -INF) if x[k, i] == x[k, i] else NAN


@step
def _column(x):
    """Return an array for one number per row. Separate arrays do not overlap, unlike rows of a matrix."""
    return np.empty(LANES, x.dtype)


@step
def _transpose(values, places, start, n, x):
    """Fill `x` `(C, LANES)` with n <= `LANES` rows, so that a vector instruction processes one class of several."""
    for i in range(n if places.size else 0):
        row = values[places[start + i]]
        for k in range(len(x)):
            x[k, i] = row[k]
    rows = values[start : start + (0 if places.size else n)]
    for i in range(len(rows)):
        for k in range(len(x)):
            x[k, i] = rows[i, k]


@step
def _fill_scores(sums, shifts, level, found):
    """Fill `found` `(4, LANES)` with the scores of `_forward_logits`, given sums of `_add_terms` and d of each label.

    Labels with d = 0 have the probability of the top class. `level` is that of `_LEVELS`.
    """
    for i in range(LANES):
        found[3, i] = 1 / (1 + np.float64(sums[i]))
    if level > 0:
        for i in range(LANES):
            log_total = log1p(sums[i])
            found[0, i] = shifts[i] - log_total
            found[2, i] = np.float64(sums[2 * LANES + i]) / (1 + np.float64(sums[i])) - log_total
    for i in range(LANES if level > 1 else 0):
        rest, square = np.float64(sums[i]), np.float64(sums[LANES + i])
        confidence = 1 / (1 + rest)
        if_miss = 1 - 2 * exp(shifts[i]) * confidence + (1 + square) * (confidence * confidence)
        if_hit = (rest * rest + square) * (confidence * confidence)
        found[1, i] = if_hit if shifts[i] == 0 else if_miss


@compiled_loop
def _forward_few_logits(values, target, scores, tops, places, level):
    """Fill `scores` and `tops` like `_forward_logits`, by vector instructions that span 64 rows of few classes."""
    values = borrowed(values)
    n_rows, n_classes = target.size, values.shape[1]
    x, first = np.zeros((n_classes, LANES), values.dtype), np.zeros(LANES, np.int32)
    largest, sums = _column(x), np.zeros(3 * LANES, values.dtype)
    shifts, found = np.zeros(LANES), np.zeros((4, LANES))
    for start in range(0, n_rows, LANES):
        n = min(LANES, n_rows - start)
        _transpose(values, places, start, n, x)
        # 1. Maximum m and first top class of each row.
        copy(x[0], largest)
        first[:] = 0
        for k in range(1, n_classes):
            _update_maximum(x[k], k, largest, first)
        if _first_equal(largest, INF) < LANES:
            _replace_by_limits(x, largest)
        # 2. Difference d of the label. An entry of -inf has e = 0: sums then exclude the top class.
        for i in range(n):
            h = target[start + i]
            shifts[i] = np.float64(x[h, i]) - np.float64(largest[i]) if 0 <= h < n_classes else math.nan
            found[1, i] = 0.0 if 0 <= h < n_classes else math.nan
        for i in range(n):
            x[first[i], i] = -INF
            tops[start + i] = first[i]
        # 3. The sums R, S and P of `_forward_logits`. With at most 48 classes, float32 sums are accurate enough.
        sums[:] = ZERO
        for k in range(n_classes):
            if level > 1:
                _add_terms(x[k], largest, sums)
            else:
                _add_exps(x[k], largest, sums)
        # 4. Scores in float64.
        _fill_scores(sums, shifts, level, found)
        for k in range(4):
            copy(found[k, :n], scores[k, start : start + n])


@step
def _fill_log_probs(rest, shifts, out):
    """Fill `out` with the log-probabilities of labels, given d of each label and the sum R of e over other classes.

    It is -log(1 + R) if d = 0, and otherwise d - log(R + exp d), where R >= 1 includes the top class.
    """
    for i in range(LANES):
        other = (rest[i] - ONE) + exp(clipped(shifts[i]))
        out[i] = np.float64(shifts[i]) - log1p(rest[i] if shifts[i] == ZERO else other)


@compiled_loop
def _forward_few_labels(values, target, scores, _, places):
    """Fill `scores[0]` with log q_h as `_forward_few_logits` does. This needs no top class, and only one sum."""
    values = borrowed(values)
    n_rows, n_classes = target.size, values.shape[1]
    x = np.zeros((n_classes, LANES), values.dtype)
    largest, shifts, rest, log_probs = _column(x), _column(x), _column(x), np.empty(LANES)
    for start in range(0, n_rows, LANES):
        n = min(LANES, n_rows - start)
        _transpose(values, places, start, n, x)
        copy(x[0], largest)
        for k in range(1, n_classes):
            _update_largest(x[k], largest)
        if _first_equal(largest, INF) < LANES:
            _replace_by_limits(x, largest)
        for i in range(n):
            h = target[start + i]
            if 0 <= h < n_classes:
                shifts[i] = x[h, i] - largest[i]
                x[h, i] = -INF
            else:
                shifts[i] = NAN
        rest[:] = ZERO
        for k in range(n_classes):
            _add_exps(x[k], largest, rest)
        _fill_log_probs(rest, shifts, log_probs)
        copy(log_probs[:n], scores[0, start : start + n])


@lanes
def _count_negative(x):
    """Return the number of negative entries, as a float."""
    count = ZERO
    for k in range(x.size):
        count += ONE if x[k] < ZERO else ZERO
    return count


@compiled_loop
def _forward_probabilities(values, target, scores, tops, places, tolerance, with_entropy):
    """Fill `scores` and `tops` from probabilities, one row at a time; arguments as for `plain.forward`."""
    values = borrowed(values)
    n_classes = values.shape[1]
    buffer = np.zeros(BLOCK, values.dtype)
    for i in range(target.size):
        row, h = values[places[i] if places.size else i], target[i]
        # 1. Start the sums of q and q log q with the top entry.
        top = _first_largest(row)
        q_top = np.float64(row[top])
        squares = 0.0  # without the top entry, whose square would round small squares to 0
        total = q_top
        entropy = q_top * math.log(q_top) if q_top != 0 else 0.0
        for start in range(0, n_classes, BLOCK):
            q = row[start : start + BLOCK]
            logs = buffer[: q.size]
            if with_entropy:
                fill_logs(q, logs)
            elif _count_negative(q) > 0:
                entropy = math.nan
            # 2. Sum the entries before and after the top entry. Subtracting its terms from the sums would lose digits.
            here = min(max(top - start, 0), q.size)
            below, above = _sums(q[:here], logs[:here]), _sums(q[here:], logs[here:])
            if here < q.size and start <= top:
                above = _sums(q[here + 1 :], logs[here + 1 :])
            total += below[0] + above[0]
            squares += below[1] + above[1]
            entropy += below[2] + above[2]
        tops[i] = top
        # 3. Reject invalid rows. entropy == entropy is False for NaN, which a negative probability causes.
        if tolerance < math.inf and not (abs(total - 1) <= tolerance and q_top <= 1 and entropy == entropy):
            scores[:, i] = math.nan
            continue
        scores[2, i] = entropy
        scores[3, i] = q_top if squares == squares else math.nan
        if not 0 <= h < n_classes:
            scores[0, i] = scores[1, i] = math.nan
            continue
        # 4. log q_h, and the squared error (1 - q_h)^2 + sum_(k != h) q_k^2.
        q_h = np.float64(row[h])
        scores[0, i] = math.log(q_h) if q_h > 0 else (-math.inf if q_h == 0 else math.nan)
        scores[1, i] = (1 - q_h) * (1 - q_h) + squares + (0.0 if h == top else q_top * q_top - q_h * q_h)


@step
def _fill_logs_of_rows(x, out):
    """Fill `out` with log x, or with 0 where x <= 0."""
    for i in range(LANES):
        value = log(x[i])  # outside of the condition, which would be a branch
        out[i] = value if x[i] > ZERO else ZERO


@compiled_loop
def _sums_of_row(row):
    """Return top class, maximum and minimum of a row, and the sums of q and q^2 over the other classes."""
    top, largest, least = 0, np.float64(row[0]), np.float64(row[0])
    rest, squares = 0.0, 0.0
    for k in range(1, row.size):
        # The smaller one of entry and maximum is not the top entry. NaN is never larger, and is added.
        q = np.float64(row[k])
        above = q > largest
        other = largest if above else q
        top, largest = (k, q) if above else (top, largest)
        least = min(least, q)
        rest += other
        squares += other * other
    return top, largest, least, rest, squares


@compiled_loop
def _forward_few_probabilities(values, target, scores, tops, places, tolerance, with_entropy):
    """Fill `scores` and `tops` like `_forward_probabilities`, for few classes.

    Logarithms are computed by vector instructions that span 64 rows.
    """
    values = borrowed(values)
    n_rows, n_classes = target.size, values.shape[1]
    x = np.ones((n_classes, LANES), values.dtype)
    logs, entropies = _column(x), _column(x)
    at_label, log_labels = np.ones(LANES), np.empty(LANES)
    for start in range(0, n_rows, LANES):
        n = min(LANES, n_rows - start)
        # 1. Sum of q log q. The rows are transposed, so that a vector instruction processes one class of several rows.
        #    With at most 48 classes, float32 sums are accurate enough. NaN makes the sum NaN.
        if with_entropy:
            _transpose(values, places, start, n, x)
            entropies[:] = ZERO
            for k in range(n_classes):
                _fill_logs_of_rows(x[k], logs)
                _add_product(x[k], logs, entropies)
        # 2. log q_h
        for i in range(n):
            h = target[start + i]
            row = places[start + i] if places.size else start + i
            at_label[i] = values[row, h] if 0 <= h < n_classes else math.nan
        _fill_logs_of_rows(at_label, log_labels)
        for i in range(n):
            # 3. Sums of the row, and scores as in `_forward_probabilities`, in float64.
            row = places[start + i] if places.size else start + i
            top, q_top, least, rest, squares = _sums_of_row(values[row])
            h, q_h = target[start + i], at_label[i]
            tops[start + i] = top
            valid = abs(q_top + rest - 1) <= tolerance and q_top <= 1 and least >= 0
            if tolerance < math.inf and not valid:
                scores[:, start + i] = math.nan
                continue
            scores[2, start + i] = np.float64(entropies[i]) if with_entropy and least >= 0 else math.nan
            scores[3, start + i] = q_top if squares == squares else math.nan
            scores[0, start + i] = log_labels[i] if q_h > 0 else (-math.inf if q_h == 0 else math.nan)
            others = 0.0 if h == top else q_top * q_top - q_h * q_h
            scores[1, start + i] = (1 - q_h) * (1 - q_h) + squares + others


@compiled_loop
def _backward_logits(values, target, scores, tops, grads, out):
    """Fill `out` with the gradient in logits; see `plain.backward` for the formula."""
    values, out = borrowed(values), borrowed(out)
    n_rows, n_classes = values.shape
    number = values.dtype.type
    for i in range(n_rows):
        row, h, top = values[i], target[i], tops[i]
        grad_log, grad_square, grad_entropy, grad_confidence = grads[0, i], grads[1, i], grads[2, i], grads[3, i]
        if row[top] == INF or (grad_log == 0 and grad_square == 0 and grad_entropy == 0 and grad_confidence == 0):
            out[i] = 0
            continue
        if not 0 <= h < n_classes:
            out[i] = math.nan
            continue
        # 1. Coefficients of the gradient q (a + b q + c d) with d = x - max x; `plain.backward` has the formula.
        q_h, q_top = math.exp(scores[0, i]), scores[3, i]
        mean_shift = scores[2, i] - math.log(q_top)
        a = -grad_log - grad_confidence * q_top - 2 * grad_square * (scores[1, i] - 1 + q_h) - grad_entropy * mean_shift
        b = 2 * grad_square
        # 2. All classes in the dtype of the row, with q = q_top exp d: no sum over the row is computed again.
        _logit_gradient(row, row[top], number(q_top), number(a), number(b), number(grad_entropy), out[i])
        # 3. Top class and label in float64: their gradients can have the factor 1 - q, which float32 rounds to 0.
        at_top = q_top * (a + b * q_top) + grad_confidence * q_top
        at_label = grad_log - b * q_h
        if h == top:
            out[i, top] = at_top + at_label
        else:
            shift = np.float64(row[h]) - np.float64(row[top]) if q_h > 0 else 0.0
            out[i, top] = at_top
            out[i, h] = q_h * (a + b * q_h + grad_entropy * shift) + at_label


@compiled_loop
def _backward_probabilities(values, target, scores, tops, grads, out):  # noqa: ARG001
    """Fill `out` with the gradient in probabilities; see `plain.backward` for the formula."""
    values, out = borrowed(values), borrowed(out)
    n_rows, n_classes = values.shape
    number = values.dtype.type
    buffer = np.zeros(BLOCK, values.dtype)
    for i in range(n_rows):
        row, h = values[i], target[i]
        grad_log, grad_square, grad_entropy, grad_confidence = grads[0, i], grads[1, i], grads[2, i], grads[3, i]
        if grad_log == 0 and grad_square == 0 and grad_entropy == 0 and grad_confidence == 0:
            out[i] = 0
            continue
        if not 0 <= h < n_classes:
            out[i] = math.nan
            continue
        # 1. b q + c (log q + 1) for all classes. The logarithm is the larger part of the work, and often not needed.
        for start in range(0, n_classes, BLOCK):
            q = row[start : start + BLOCK]
            logs = buffer[: q.size]
            if grad_entropy != 0:
                fill_logs(q, logs)
            part = out[i, start : start + BLOCK]
            _probability_gradient(q, logs, number(2 * grad_square), number(grad_entropy), part)
        # 2. The terms of the label and of the top class, in float64.
        q_h = np.float64(row[h])
        out[i, h] = 2 * grad_square * (q_h - 1)
        if q_h > 0:
            out[i, h] += grad_log / q_h + grad_entropy * (math.log(q_h) + 1)
        out[i, tops[i]] += grad_confidence


_ALL = np.empty(0, np.int64)  # places of all rows
_LEVELS: dict[Detail, int] = {"classes": 0, "top": 0, "label": 1, "confidence": 1, "squares": 2, "entropy": 2}
"""Work of the loop over few classes: confidences, log-probabilities of labels, and all scores."""


def _loop_for(from_logits: bool, n_classes: int, tolerance: float, detail: Detail) -> tuple[Any, tuple[Any, ...]]:
    """Return the loop that fills scores and top classes of rows, and its last arguments."""
    if not from_logits:
        few = n_classes <= FEW_CLASSES
        return _forward_few_probabilities if few else _forward_probabilities, (tolerance, detail == "entropy")
    if n_classes <= FEW_CLASSES:
        return (_forward_few_labels, ()) if detail == "label" else (_forward_few_logits, (_LEVELS[detail],))
    return _forward_logits if _LEVELS[detail] > 1 else _forward_many_labels, ()


def forward(
    values: Tensor, target: Tensor, from_logits: bool, tolerance: float, detail: Detail = "entropy"
) -> tuple[Tensor, Tensor]:
    """Return the statistics of every row as `plain.forward` does."""
    n, n_classes = values.shape
    scores, top = torch.empty(4, n, dtype=torch.float64, device="cpu"), torch.empty(n, dtype=torch.int64, device="cpu")
    loop, options = _loop_for(from_logits, n_classes, tolerance, detail)
    columns = *(x.numpy() for x in (target.contiguous(), scores, top)), _ALL
    by_rows(loop, values, columns, options)
    return scores, top


def sums(logits: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return sums and top classes of rows as `plain.sums` does."""
    found, top = (
        torch.empty(4, len(logits), dtype=torch.float64, device="cpu"),
        torch.empty(len(logits), dtype=torch.int64, device="cpu"),
    )
    # The loop does not read labels.
    columns = [x.numpy() for x in (top, found, top)]
    by_rows(_fill_sums, logits, columns, (1.0 if alpha is None else float(alpha), False))
    return found.unsqueeze(1), top.unsqueeze(0)


@lanes
def _total(x, weights):
    """Return the sum of x times the weights, or of x without weights."""
    total = 0.0
    for i in range(x.size):
        total += x[i] if weights is None else weights[i] * x[i]
    return total


@step
def _fill_outcomes(tops, target, outcomes):
    for i in range(tops.size):
        outcomes[i] = tops[i] == target[i]


@compiled_loop
def _fill_outcomes_and_totals(scores, tops, target, weights, groups, only_labels, outcomes, totals):
    """Fill `outcomes`, and add rows to `totals`, as for `labelled_rows`. Return False if a row or a label is invalid.

    With `only_labels`, only log-probabilities are defined.
    """
    n_scores = 1 if only_labels else 4
    if not only_labels:
        _fill_outcomes(tops, target, outcomes)
    # 1. Without groups, sums by vector instructions. Otherwise, one vector of four sums for each row.
    if groups is None:
        for k in range(n_scores):
            totals[k, 0] = _total(scores[k], weights)
        totals[4, 0] = 0.0 if only_labels else _total(outcomes, weights)
        totals[5, 0] = tops.size if weights is None else _total(weights, None)
    else:
        sums, w = np.zeros(8 * totals.shape[1]), 1.0
        for i in range(tops.size):
            if weights is not None:
                w = weights[i]
            at = np.uintp(8 * groups[i])
            others = (0.0, 0.0, 0.0) if only_labels else (scores[1, i], scores[2, i], scores[3, i])
            add_four(sums, at, w * scores[0, i], w * others[0], w * others[1], w * others[2])
            add_four(sums, at + np.uintp(4), 0.0 if only_labels else w * outcomes[i], w, 0.0, 0.0)
        for group in range(totals.shape[1]):
            for k in range(6):
                totals[k, group] = sums[8 * group + k]
    # 2. The squared error is NaN for an invalid label, and the confidence for an invalid row.
    check = 0.0
    for group in range(totals.shape[1]):
        check += totals[0, group] if only_labels else totals[1, group] + totals[3, group]
    return check == check


def labelled_rows(
    values: Any,
    target: Any,
    from_logits: bool,
    tolerance: float,
    detail: Detail,
    weights: Any,
    groups: Any,
    n: int,
    places: Any = None,
) -> tuple[Any, Any, Any, Any] | None:
    """Return confidences, outcomes, top classes and totals as `plain.labelled_rows` does."""
    n_rows, n_classes = len(target), values.shape[1]
    rows, tops = np.empty((4, n_rows)), np.empty(n_rows, np.int64)
    loop, options = _loop_for(from_logits, n_classes, tolerance, detail)
    if n_classes > FEW_CLASSES:  # loops over few classes transpose blocks, and thus read any layout
        values = np.ascontiguousarray(values)
    target = np.ascontiguousarray(target)

    def fill(begin: int, end: int) -> None:
        part = slice(begin, end)
        some, at = (values[part], _ALL) if places is None else (values, places[part])
        loop(some, target[part], rows[:, part], tops[part], at, *options)

    n_values = n_rows * n_classes
    if n_values < 2 * LOGITS_PER_RANGE:
        loop(values, target, rows, tops, _ALL if places is None else places, *options)
    else:
        in_threads(fill, n_rows, n_values, LOGITS_PER_RANGE)
    outcomes, totals = np.empty(n_rows, np.uint8), np.zeros((6, n))
    columns = rows, tops, target, weights, groups
    is_valid = _fill_outcomes_and_totals(*columns, detail == "label", outcomes, totals)
    return (rows[3], outcomes, tops, totals) if is_valid else None


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill `out` as `plain.backward` does."""
    loop = _backward_logits if from_logits else _backward_probabilities
    by_rows(loop, values, [x.numpy() for x in (target, scores, top, grads)], out=out)
