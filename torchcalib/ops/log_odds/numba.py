"""Log-odds of one class of each row by compiled loops. Only `dispatch` imports this module, at first use.

The method, for as many rows as fit into the level-1 cache, with the class k of each row:

1. Find the largest of the other logits, and the differences of all other logits from it.
2. Compute the exponentials of the differences, in one loop over all rows.
3. The log-odds are the difference of the logit of k and the largest other one, minus the logarithm of the sum.

Rows of few classes would not fill vectors. They are transposed, so that vector instructions span 64 rows.
"""

import math

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.numba_math import (
    BLOCK,
    FEW_CLASSES,
    LANES,
    by_rows,
    compiled_loop,
    exp64,
    lanes,
    log64,
    step,
)


@step
def _largest_other(z, k):
    """Return the largest logit of the classes except k, NaN if the row has NaN."""
    largest = -math.inf
    is_nan = False
    for j in range(z.size):
        x = np.float64(z[j])
        is_nan |= x != x
        largest = x if (x > largest) & (j != k) else largest
    return math.nan if is_nan else largest


@step
def _fill_differences(z, k, largest, out):
    """Fill `out` with z - largest. The class k gets -inf, because its exponential could overflow."""
    for j in range(z.size):
        out[j] = np.float64(z[j]) - largest
    out[k] = -math.inf


@step
def _replace_by_exps(x):
    for j in range(x.size):
        x[j] = exp64(x[j])


@step
def _subtract_logs(sums, out):
    for i in range(sums.size):
        out[i] -= log64(sums[i])


@lanes
def _sum(x):
    total = 0.0
    for j in range(x.size):
        total += x[j]
    return total


@step
def _limit(z, own, largest):
    """Return the log-odds of a class with logit `own`, for a row with NaN, with +inf, or -inf in all other classes."""
    if largest != largest or (largest < math.inf and own == largest):  # NaN, or only -inf
        return math.nan
    if own < largest or largest < math.inf:
        return -math.inf if own < largest else math.inf
    n_infinite = 0
    for j in range(z.size):
        n_infinite += z[j] == math.inf
    return -log64(n_infinite - 1.0)


@compiled_loop
def _fill_log_odds(rows, classes, out):
    width = rows.shape[1]
    size = max(1, BLOCK // width)
    buffer, sums = np.empty(size * width), np.empty(size)
    for first in range(0, len(rows), size):
        n = min(size, len(rows) - first)
        # 1. Differences
        for i in range(n):
            z, k = rows[first + i], classes[first + i]
            own, largest = np.float64(z[k]), _largest_other(z, k)
            differences = buffer[i * width : (i + 1) * width]
            if largest != largest or own == math.inf or abs(largest) == math.inf:
                out[first + i] = _limit(z, own, largest)
                differences[:] = -math.inf
                differences[0] = 0  # the logarithm of the sum is 0
            else:
                out[first + i] = own - largest
                _fill_differences(z, k, largest, differences)
        # 2. Exponentials
        _replace_by_exps(buffer[: n * width])
        # 3. Sums and logarithms
        for i in range(n):
            sums[i] = _sum(buffer[i * width : (i + 1) * width])
        _subtract_logs(sums[:n], out[first : first + n])


@step
def _fill_largest(z, largest):
    """Fill `largest` with the largest logit of each column; arbitrary if a column has NaN."""
    largest[:] = z[0]
    for j in range(1, len(z)):
        for i in range(LANES):
            largest[i] = z[j, i] if z[j, i] > largest[i] else largest[i]


@step
def _fill_sums_of_exps(z, largest, sums):
    sums[:] = 0.0
    for j in range(len(z)):
        for i in range(LANES):
            sums[i] += exp64(z[j, i] - largest[i])


@compiled_loop
def _fill_few_log_odds(rows, classes, out):
    """Fill `out` like `_fill_log_odds`, for rows of few classes."""
    n_rows, n_classes = rows.shape
    z = np.zeros((n_classes, LANES))
    own, largest, sums, found = np.zeros(LANES), np.empty(LANES), np.empty(LANES), np.empty(LANES)
    for start in range(0, n_rows, LANES):
        n = min(LANES, n_rows - start)
        for i in range(n):
            for j in range(n_classes):
                z[j, i] = rows[start + i, j]
            k = classes[start + i]
            own[i], z[k, i] = z[k, i], -math.inf
        _fill_largest(z, largest)
        _fill_sums_of_exps(z, largest, sums)
        found[:] = own - largest
        _subtract_logs(sums, found)
        for i in range(n):
            if not (sums[i] >= 1 and abs(found[i]) < math.inf):  # infinite logits, or NaN
                row = rows[start + i]
                found[i] = _limit(row, own[i], _largest_other(row, classes[start + i]))
            out[start + i] = found[i]


def of_classes(values: Tensor, classes: Tensor) -> Tensor:
    """Return the log-odds of a class for each row `(N, C)`; see `log_odds`."""
    out = torch.empty(len(values), dtype=torch.float64)
    loop = _fill_few_log_odds if values.shape[-1] <= FEW_CLASSES else _fill_log_odds
    by_rows(loop, values, (classes.contiguous().numpy(), out.numpy()))
    return out
