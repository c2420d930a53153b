"""Log-odds of one class of each row by a compiled loop. Only `dispatch` imports this module, at first use.

One pass computes all exponentials of 64 rows while they are in the cache. Rows are transposed, so that a vector
instruction processes one class of several rows, also if there are few classes.
"""

import math

import numpy as np
from torch import Tensor

from torchcalib.ops.numba_math import LANES, by_rows, compiled_loop, exp64, log64, step


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


@step
def _fill_log_odds(own, largest, sums, out):
    """Fill `out` with the log-odds; NaN for infinite logits and NaN, of which at least one of the others is not 0."""
    for i in range(LANES):
        value = (own[i] - largest[i]) - log64(sums[i])
        out[i] = value if sums[i] >= 1 and abs(value) < math.inf else math.nan


@compiled_loop
def _fill_rows(rows, classes, out):
    """Fill `out` with the log-odds of the class of each row `(N, C)`; NaN if a logit is infinite or NaN."""
    n_rows, n_classes = rows.shape
    z = np.zeros((n_classes, LANES))
    own, largest, sums, found = np.zeros(LANES), np.empty(LANES), np.empty(LANES), np.empty(LANES)
    for start in range(0, n_rows, LANES):
        # 1. Transpose a block of rows, without the logit of the class. The last block keeps rows of the previous one.
        n = min(LANES, n_rows - start)
        for i in range(n):
            for j in range(n_classes):
                z[j, i] = rows[start + i, j]
            k = classes[start + i]
            own[i], z[k, i] = z[k, i], -math.inf
        # 2. Log-sum-exp of the other logits, relative to the largest one, and its difference from the logit.
        _fill_largest(z, largest)
        _fill_sums_of_exps(z, largest, sums)
        _fill_log_odds(own, largest, sums, found)
        for i in range(n):
            out[start + i] = found[i]


def fill(values: Tensor, classes: Tensor, out: Tensor) -> None:
    """Fill `out` `(N,)` as `log_odds.fill` does."""
    by_rows(_fill_rows, values, (classes.contiguous().numpy(), out.numpy()))
