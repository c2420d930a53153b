"""Sums of moments of scores by loops compiled with numba. Only `dispatch` imports this module, at first use.

One pass over a row computes its exponentials and all moments, without tensors of the size of the scores.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.newton.moments import Derivatives
from torchcalib.ops.newton.scores import LabelledScores
from torchcalib.ops.numba_math import BLOCK, clipped, compiled_loop, contiguous_array, exp, lanes, step
from torchcalib.ops.threads import in_threads

_PIECE = 2**16  # scores per partial sum, which are the unit of work of a thread


@step
def _fill(x, top, factor, alpha, s, e):
    """Fill `s` with scores in standard form, (x - top) * factor, and `e` with exp(alpha s), in the dtype of `s`."""
    for k in range(x.size):
        score = (s.dtype.type(x[k]) - top) * factor
        s[k] = score
        e[k] = exp(clipped(alpha * score))


@lanes
def _moments(s, e):
    """Return the sums of e, e s, e s^2 and e s^3."""
    norm = e.dtype.type(0)
    first, second, third = norm, norm, norm
    for k in range(s.size):
        product = e[k] * s[k]
        norm += e[k]
        first += product
        product *= s[k]
        second += product
        third += product * s[k]
    return norm, first, second, third


@compiled_loop
def _add_rows(x, top, w, factor, alpha, s, e, sums):
    """Add the weighted mean, variance and third central moment of each row of scores to `sums` `(3,)`.

    `s` and `e` are buffers of `BLOCK` values, whose dtype is that of the arithmetic within a row.
    """
    number = s.dtype.type
    for i in range(len(x)):
        if w[i] == 0:
            continue
        norm, mean, square, cube = 0.0, 0.0, 0.0, 0.0
        largest = number(top[i])
        for start in range(0, x.shape[1], BLOCK):
            part = x[i, start : start + BLOCK]
            _fill(part, largest, number(factor), number(alpha), s[: part.size], e[: part.size])
            sum0, sum1, sum2, sum3 = _moments(s[: part.size], e[: part.size])
            norm, mean, square, cube = norm + sum0, mean + sum1, square + sum2, cube + sum3
        mean, square, cube = mean / norm, square / norm, cube / norm
        variance = square - mean * mean
        sums[0] += w[i] * mean
        sums[1] += w[i] * variance
        sums[2] += w[i] * (cube - mean * (square + 2 * variance))


@lanes
def _sum_of_differences(x, top):
    total = 0.0
    for k in range(x.size):
        total += np.float64(x[k]) - top
    return total


@compiled_loop
def _fill_means(x, top, out):
    for i in range(len(x)):
        out[i] = _sum_of_differences(x[i], np.float64(top[i])) / x.shape[1]


def _reader(x: Tensor) -> Callable[[slice], Any]:
    """Return a function from a slice of rows to a contiguous array; float16 and bfloat16 are converted to float32.

    Slices of arrays keep the global interpreter lock. Slices of tensors release it, and wait for other threads.
    """
    if x.dtype in (torch.float16, torch.bfloat16):
        return lambda rows: contiguous_array(x[rows])
    array = x.numpy()
    return lambda rows: np.ascontiguousarray(array[rows])


def row_means(scores: Tensor, top: Tensor) -> Tensor:
    """Return the mean of scores - top for each row `(S, N)` in one pass."""
    rows, largest = _reader(scores.reshape(-1, scores.shape[-1])), top.flatten().double().numpy()
    found = np.empty(largest.size)

    def fill(begin: int, end: int) -> None:
        n = max(1, _PIECE // scores.shape[-1])
        for start in range(begin, end, n):
            part = slice(start, min(start + n, end))
            _fill_means(rows(part), largest[part], found[part])

    in_threads(fill, found.size, scores.numel())
    return torch.from_numpy(found).view(scores.shape[:-1])


def derivatives_of(p: LabelledScores, alpha: Tensor) -> Derivatives:
    """Return the derivatives for one fit to scores that are not in standard form; see `nll_derivatives`."""
    assert p.top is not None
    rows, w, top = _reader(p.scores[0]), p.w.flatten().double().numpy(), p.top.flatten().double().numpy()
    factor, at = 1 / p.scale.item(), alpha.item()
    # Rows are float32 in the first steps of a fit, unless scores are float64.
    is_wide = torch.float64 in (p.scores.dtype, p.w.dtype)
    n = max(1, _PIECE // p.scores.shape[-1])
    starts = range(0, w.size, n)
    sums = np.zeros((len(starts), 3))

    def add_pieces(begin: int, end: int) -> None:
        s, e = np.empty((2, BLOCK), np.float64 if is_wide else np.float32)
        for piece in range(begin, end):
            part = slice(starts[piece], starts[piece] + n)
            _add_rows(rows(part), top[part], w[part], factor, at, s, e, sums[piece])

    in_threads(add_pieces, len(starts), p.scores.numel())
    total = [math.fsum(column) for column in sums.T]
    mean, curvature, skew = (torch.full_like(p.label_mean, each) for each in total)
    return mean - p.label_mean, curvature, skew
