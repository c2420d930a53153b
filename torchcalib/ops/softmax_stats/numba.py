"""Statistics of rows by compiled loops. Only `dispatch` imports this module, at first use.

A loop processes a row in blocks of 1,024 entries, which stay in the level-1 cache for several vector passes. The passes
compute exp of the differences from the maximum, and sums. The sums exclude the top entry, whose exp is 1, because it
would round small entries to 0. Arithmetic is float32 within a block and float64 across blocks.
"""

import math
import struct
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.numba_math import (
    BLOCK,
    INF,
    LOWEST,
    NAN,
    ONE,
    ZERO,
    F,
    as_float,
    by_rows,
    compiled_loop,
    exp,
    fill_exps,
    fill_limits,
    fill_logs,
    lanes,
    log1p,
    step,
)
from torchcalib.ops.openmp import in_openmp, pointer, range_of_thread

_FEW_CLASSES = 48  # largest number of classes for which vector instructions span 64 rows instead of one row
_LANES = 64  # rows per block for few classes; the last block has unused rows, because scalar code rounds differently


@step
def _extreme_bits(bits: Any) -> Any:
    most, least = np.int32(-(2**31)), np.int32(2**31 - 1)
    for k in range(bits.size):
        most, least = max(most, bits[k]), min(least, bits[k])
    return most, least


@step
def _first_equal(x: Any, value: Any) -> Any:
    """Return the index of the first entry that equals `value`, or the number of entries if there is none."""
    none = np.int32(x.size)
    first = none
    for k in range(x.size):
        first = min(first, np.int32(k) if x[k] == value else none)
    return first


@compiled_loop
def _first_largest(row: Any, bits: Any) -> Any:
    """Return the index of the first maximum of a row; arbitrary for a row with NaN, whose sums are NaN.

    The maximum is computed from `bits`, the row as integers, because the float maximum does not compile to vector
    instructions. Non-negative floats have the order of their bits. Negative floats have the opposite order.
    """
    most, least = _extreme_bits(bits)
    largest = as_float(most if most >= 0 else least)
    for start in range(0, row.size, BLOCK):
        part = row[start : start + BLOCK]
        k = _first_equal(part, largest)
        if k < part.size:
            return start + k
    return 0


@lanes
def _sums(x: Any, y: Any) -> Any:
    """Return the sums of x, x^2 and x y over a block."""
    once, square, product = ZERO, ZERO, ZERO
    for k in range(x.size):
        once += x[k]
        square += x[k] * x[k]
        product += x[k] * y[k]
    return once, square, product


@step
def _logit_gradient(shifted: Any, exps: Any, scale: Any, a: Any, b: Any, c: Any, out: Any) -> None:
    """Fill `out` with q (a + b q + c shifted) for q = scale * exps; `reference.backward` defines a, b and c."""
    for k in range(exps.size):
        q = exps[k] * scale
        out[k] = q * (a + b * q + c * shifted[k])


@step
def _probability_gradient(q: Any, logs: Any, b: Any, c: Any, out: Any) -> None:
    """Fill `out` with b q + c (log q + 1), or 0 where q = 0; `reference.backward` defines b and c."""
    for k in range(q.size):
        slope = logs[k] + ONE if q[k] != ZERO else ZERO
        out[k] = b * q[k] + c * slope


@compiled_loop
def _forward_logits(values: Any, target: Any, scores: Any, tops: Any) -> None:
    """Fill `scores` and `tops` from float32 logits, one row at a time; arguments as for `reference.forward`."""
    n_rows, n_classes = values.shape
    bits = values.view(np.int32)
    shifted, exps = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for i in range(n_rows):
        row, h = values[i], target[i]
        top = _first_largest(row, bits[i])
        largest = row[top]
        rest, squares, product = 0.0, 0.0, 0.0  # sums that exclude the top entry, whose exp is 1
        for start in range(0, n_classes, BLOCK):
            x = row[start : start + BLOCK]
            y, e = shifted[: x.size], exps[: x.size]
            if largest == INF:
                fill_limits(x, y, e)
            else:
                fill_exps(x, largest, y, e)
            if start <= top < start + x.size and e[top - start] == ONE:
                e[top - start] = ZERO
            sums = _sums(e, y)
            rest += sums[0]
            squares += sums[1]
            product += sums[2]
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
        # Squared error sum_k q_k^2 - 2 q_h + 1; for the top class, 1 - q_h = rest / total avoids cancellation.
        if h == top:
            scores[1, i] = (rest * rest + squares) / (total * total)
        else:
            scores[1, i] = 1 - 2 * math.exp(shift) / total + (1 + squares) / (total * total)


# Functions of arrays with one number per row, for `_LANES` rows. They have few arguments, because the compiler uses
# vector instructions only if it can prove that the arrays do not overlap.


@step
def _update_maximum(x: Any, k: Any, largest: Any, tops: Any) -> None:
    """Update the running maxima `largest` and their classes `tops` with the logits `x` of class `k`."""
    for i in range(_LANES):
        tops[i] = np.int32(k) if x[i] > largest[i] else tops[i]
    for i in range(_LANES):
        largest[i] = x[i] if x[i] > largest[i] else largest[i]


@step
def _fill_exps_of_rows(x: Any, largest: Any, shifted: Any, exps: Any) -> None:
    """Fill `shifted` with the differences from the maxima of the rows, at least `LOWEST`, and `exps` with their exp."""
    for i in range(_LANES):
        shift = max(x[i] - largest[i], LOWEST)
        shifted[i] = shift
        exps[i] = exp(shift)


@step
def _clear_at(k: Any, places: Any, x: Any) -> None:
    """Set `x` to 0 in the rows whose top class is `k`."""
    for i in range(_LANES):
        x[i] = ZERO if places[i] == k else x[i]


@step
def _add(x: Any, total: Any) -> None:
    for i in range(_LANES):
        total[i] += x[i]


@step
def _add_product(x: Any, y: Any, total: Any) -> None:
    for i in range(_LANES):
        total[i] += x[i] * y[i]


@step
def _replace_by_limits(x: Any, largest: Any) -> None:
    """Replace logits of rows with +inf by logits with the limit of their softmax: 0 for +inf, and otherwise -inf."""
    for i in range(_LANES):
        if largest[i] == INF:
            largest[i] = ZERO
            for k in range(len(x)):
                x[k, i] = (ZERO if x[k, i] == INF else -INF) if x[k, i] == x[k, i] else NAN


@step
def _column() -> Any:
    """Return an uninitialised array with one number per row."""
    return np.empty(_LANES, np.float32)


@step
def _log_totals(rest: Any, out: Any) -> None:
    for i in range(_LANES):
        out[i] = log1p(rest[i])


@compiled_loop
def _forward_few_logits(values: Any, target: Any, scores: Any, tops: Any) -> None:
    """Fill `scores` and `tops` from float32 logits of few classes, by vector instructions that span 64 rows.

    One row is too short for vector instructions. Arguments as for `reference.forward`.
    """
    n_rows, n_classes = values.shape
    x = np.zeros((n_classes, _LANES), np.float32)
    places, labels = np.zeros(_LANES, np.int32), np.zeros(_LANES, np.int32)
    largest, shifted, exps, rest = _column(), _column(), _column(), _column()
    squares, product, log_totals = _column(), _column(), np.empty(_LANES)
    for start in range(0, n_rows, _LANES):
        n = min(_LANES, n_rows - start)
        for i in range(n):
            h = target[start + i]
            labels[i] = h if 0 <= h < n_classes else -1
            for k in range(n_classes):
                x[k, i] = values[start + i, k]
        largest[:], places[:] = x[0], 0
        for k in range(1, n_classes):
            _update_maximum(x[k], k, largest, places)
        if _first_equal(largest, INF) < _LANES:
            _replace_by_limits(x, largest)
        rest[:], squares[:], product[:] = ZERO, ZERO, ZERO
        for k in range(n_classes):
            _fill_exps_of_rows(x[k], largest, shifted, exps)
            _clear_at(k, places, exps)
            _add(exps, rest)
            _add_product(exps, exps, squares)
            _add_product(exps, shifted, product)
        _log_totals(rest, log_totals)
        for i in range(n):
            h, top, log_total = labels[i], places[i], log_totals[i]
            others, square = np.float64(rest[i]), np.float64(squares[i])
            confidence = 1 / (1 + others)
            tops[start + i] = top
            scores[2, start + i] = product[i] * confidence - log_total
            scores[3, start + i] = confidence
            if h < 0:
                scores[0, start + i] = scores[1, start + i] = math.nan
                continue
            shift = np.float64(x[h, i]) - np.float64(largest[i])
            scores[0, start + i] = shift - log_total
            if h == top:
                scores[1, start + i] = (others * others + square) * (confidence * confidence)
            else:
                scores[1, start + i] = 1 - 2 * math.exp(shift) * confidence + (1 + square) * (confidence * confidence)


@compiled_loop
def _forward_probabilities(values: Any, target: Any, scores: Any, tops: Any, tolerance: Any) -> None:
    """Fill `scores` and `tops` from float32 probabilities; arguments as for `reference.forward`."""
    n_rows, n_classes = values.shape
    bits = values.view(np.int32)
    buffer = np.empty(BLOCK, np.float32)
    for i in range(n_rows):
        row, h = values[i], target[i]
        top = _first_largest(row, bits[i])
        q_top = np.float64(row[top])
        squares = 0.0  # without the top entry, whose square would round small squares to 0
        total = q_top
        entropy = q_top * math.log(q_top) if q_top != 0 else 0.0
        for start in range(0, n_classes, BLOCK):
            q = row[start : start + BLOCK]
            logs = buffer[: q.size]
            fill_logs(q, logs)
            # Sum the entries before and after the top entry. Subtracting its terms from the sums would lose digits.
            here = min(max(top - start, 0), q.size)
            below, above = _sums(q[:here], logs[:here]), _sums(q[here:], logs[here:])
            if here < q.size and start <= top:
                above = _sums(q[here + 1 :], logs[here + 1 :])
            total += below[0] + above[0]
            squares += below[1] + above[1]
            entropy += below[2] + above[2]
        tops[i] = top
        # entropy == entropy is False for NaN, which a negative probability causes.
        if tolerance < math.inf and not (abs(total - 1) <= tolerance and q_top <= 1 and entropy == entropy):
            scores[:, i] = math.nan
            continue
        scores[2, i] = entropy
        scores[3, i] = q_top if squares == squares else math.nan
        if not 0 <= h < n_classes:
            scores[0, i] = scores[1, i] = math.nan
            continue
        q_h = np.float64(row[h])
        scores[0, i] = math.log(q_h) if q_h > 0 else (-math.inf if q_h == 0 else math.nan)
        scores[1, i] = (1 - q_h) * (1 - q_h) + squares + (0.0 if h == top else q_top * q_top - q_h * q_h)


_SMALL = 2**20  # largest number of entries that are converted at once, before the threads start; 4 MB in float32
_TASK = struct.Struct("3q4qd")  # rows, classes, stride of `scores`; four addresses; tolerance


@step
def _own_rows(task: Any) -> Any:
    """Return the arguments of a forward loop for the rows of the calling thread."""
    numbers = numba.carray(task, 7, np.int64)
    n, n_classes, stride = numbers[0], numbers[1], numbers[2]
    begin, end = range_of_thread(n)
    values = numba.carray(pointer(numbers[3]), (n, n_classes), np.float32)[begin:end]
    target = numba.carray(pointer(numbers[4]), n, np.int64)[begin:end]
    scores = numba.carray(pointer(numbers[5]), (4, stride), np.float64)[:, begin:end]
    tops = numba.carray(pointer(numbers[6]), n, np.int64)[begin:end]
    return values, target, scores, tops


def _own_logits(task: Any) -> None:
    values, target, scores, tops = _own_rows(task)
    _forward_logits(values, target, scores, tops)


def _own_few_logits(task: Any) -> None:
    values, target, scores, tops = _own_rows(task)
    _forward_few_logits(values, target, scores, tops)


def _own_probabilities(task: Any) -> None:
    values, target, scores, tops = _own_rows(task)
    _forward_probabilities(values, target, scores, tops, numba.carray(task, 8, np.float64)[7])


@compiled_loop
def _backward_logits(values: Any, target: Any, scores: Any, tops: Any, grads: Any, out: Any) -> None:
    """Fill `out` with the gradient in logits; see `reference.backward` for the formula."""
    n_rows, n_classes = values.shape
    shifted, exps = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for i in range(n_rows):
        row, h, top = values[i], target[i], tops[i]
        grad_log, grad_square, grad_entropy, grad_confidence = grads[0, i], grads[1, i], grads[2, i], grads[3, i]
        if row[top] == INF or (grad_log == 0 and grad_square == 0 and grad_entropy == 0 and grad_confidence == 0):
            out[i] = 0
            continue
        if not 0 <= h < n_classes:
            out[i] = math.nan
            continue
        q_h, q_top = math.exp(scores[0, i]), scores[3, i]
        mean_shift = scores[2, i] - math.log(q_top)
        a = -grad_log - grad_confidence * q_top - 2 * grad_square * (scores[1, i] - 1 + q_h) - grad_entropy * mean_shift
        b = 2 * grad_square
        for start in range(0, n_classes, BLOCK):
            x = row[start : start + BLOCK]
            y, e = shifted[: x.size], exps[: x.size]
            fill_exps(x, row[top], y, e)
            _logit_gradient(y, e, F(q_top), F(a), F(b), F(grad_entropy), out[i, start : start + BLOCK])
        # Compute top class and label in float64: their gradients can have the factor 1 - q, which float32 rounds to 0.
        at_top = q_top * (a + b * q_top) + grad_confidence * q_top
        at_label = grad_log - b * q_h
        if h == top:
            out[i, top] = at_top + at_label
        else:
            shift = np.float64(row[h]) - np.float64(row[top]) if q_h > 0 else 0.0
            out[i, top] = at_top
            out[i, h] = q_h * (a + b * q_h + grad_entropy * shift) + at_label


@compiled_loop
def _backward_probabilities(values: Any, target: Any, scores: Any, tops: Any, grads: Any, out: Any) -> None:  # noqa: ARG001
    """Fill `out` with the gradient in probabilities; see `reference.backward` for the formula."""
    n_rows, n_classes = values.shape
    buffer = np.zeros(BLOCK, np.float32)
    for i in range(n_rows):
        row, h = values[i], target[i]
        grad_log, grad_square, grad_entropy, grad_confidence = grads[0, i], grads[1, i], grads[2, i], grads[3, i]
        if grad_log == 0 and grad_square == 0 and grad_entropy == 0 and grad_confidence == 0:
            out[i] = 0
            continue
        if not 0 <= h < n_classes:
            out[i] = math.nan
            continue
        for start in range(0, n_classes, BLOCK):
            q = row[start : start + BLOCK]
            logs = buffer[: q.size]
            if grad_entropy != 0:
                fill_logs(q, logs)
            _probability_gradient(q, logs, F(2 * grad_square), F(grad_entropy), out[i, start : start + BLOCK])
        q_h = np.float64(row[h])
        out[i, h] = 2 * grad_square * (q_h - 1)
        if q_h > 0:
            out[i, h] += grad_log / q_h + grad_entropy * (math.log(q_h) + 1)
        out[i, tops[i]] += grad_confidence


def forward(values: Tensor, target: Tensor, from_logits: bool, tolerance: float, scores: Tensor, top: Tensor) -> None:
    """Fill `scores` and `top` as `reference.forward` does, for float32 and narrower dtypes."""
    few = values.shape[-1] <= _FEW_CLASSES
    if values.numel() <= _SMALL:
        values, target = values.to(torch.float32).contiguous(), target.contiguous()
    if values.dtype == torch.float32 and values.is_contiguous() and target.is_contiguous():
        addresses = values.data_ptr(), target.data_ptr(), scores.data_ptr(), top.data_ptr()
        task = _TASK.pack(*values.shape, scores.stride(0), *addresses, tolerance)
        function = _own_probabilities if not from_logits else _own_few_logits if few else _own_logits
        if in_openmp(function, task, values.numel()):
            return
    columns = target.numpy(), scores.numpy(), top.numpy()
    if from_logits:
        by_rows(_forward_few_logits if few else _forward_logits, values, columns)
    else:
        by_rows(_forward_probabilities, values, columns, (tolerance,))


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill `out` as `reference.backward` does, for float32 and narrower dtypes."""
    loop = _backward_logits if from_logits else _backward_probabilities
    by_rows(loop, values, [x.numpy() for x in (target, scores, top, grads)], out=out)
