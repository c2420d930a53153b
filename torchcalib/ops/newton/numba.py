"""Row means and derivatives of `temperature` by compiled loops. Only `dispatch` imports this module, at first use.

One pass over a row computes its exponentials and all moments, without tensors of the size of the scores.
"""

import math

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.newton.scores import LabelledScores
from torchcalib.ops.numba_math import BLOCK, by_rows, clipped, compiled_loop, exp, float_rows, lanes, step
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
        out[i] = _sum_of_differences(x[i], top[i]) / x.shape[1]


def row_means(scores: Tensor, top: Tensor) -> Tensor:
    """Return the mean of scores - top for each row `(S, N)`; see `temperature.row_means`."""
    means = torch.empty(scores.shape[:-1], dtype=torch.float64)
    columns = top.reshape(-1).double().numpy(), means.view(-1).numpy()
    by_rows(_fill_means, scores.reshape(-1, scores.shape[-1]), columns)
    return means


def derivatives_of(p: LabelledScores, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives for one fit to scores that are not in standard form; see `nll_derivatives`."""
    assert p.top is not None
    pieces, w, top = float_rows(p.scores[0]), p.w.flatten().double().numpy(), p.top.flatten().double().numpy()
    factor, at = 1 / p.scale.item(), alpha.item()
    # Rows are float32 in the first steps of a fit, unless scores are float64.
    is_wide = torch.float64 in (p.scores.dtype, p.w.dtype)
    n = max(1, _PIECE // p.scores.shape[-1])
    n_sums = -(-w.size // n)
    sums = np.zeros((n_sums, 3))

    def add_pieces(begin: int, end: int) -> None:
        s, e = np.empty((2, BLOCK), np.float64 if is_wide else np.float32)
        for k in range(begin, end):
            for part, x in pieces(k * n, min((k + 1) * n, w.size)):
                _add_rows(x, top[part], w[part], factor, at, s, e, sums[k])

    in_threads(add_pieces, n_sums, p.scores.numel())
    total = [math.fsum(column) for column in sums.T]
    mean, curvature, skew = (torch.full_like(p.label_mean, each) for each in total)
    return mean - p.label_mean, curvature, skew
