"""The largest entries of every row by one compiled loop. Only `dispatch` imports this module, at first use.

A row is read in blocks. A block is skipped if its maximum, found by vector instructions, is at most the k-th largest
entry so far. In random order, few of the later blocks have a larger entry, which is inserted in order.
"""

import numpy as np
from torch import Tensor

from torchcalib.ops.numba_math import INF, NAN, ONE, ZERO, by_rows, compiled_loop, lanes

_BLOCK = 64  # entries per block: a few vectors


@lanes
def _maximum(x):
    most = x[0]
    for k in range(1, x.size):
        most = max(most, x[k])
    return most


@lanes
def _has_nan(x):
    count = ZERO  # a sum uses vector instructions, unlike a loop that ends at the first NaN
    for k in range(x.size):
        count += ONE if x[k] != x[k] else ZERO
    return count > ZERO


@lanes
def _number_above(x, own):
    count = 0
    for k in range(x.size):
        count += x[k] > own
    return count


@lanes
def _number_at_least(x, own):
    count = 0
    for k in range(x.size):
        count += x[k] >= own
    return count


@compiled_loop
def _fill_rows(values, target, entries, rank, from_logits):
    """Fill `entries` `(k, R)` and `rank` `(R,)` for float32 rows `(R, C)`."""
    n_rows, n_classes = values.shape
    k = len(entries)
    best, limits = np.empty(k, np.float32), np.empty((1, n_classes), np.float32)
    for i in range(n_rows):
        row = values[i]
        if _has_nan(row):
            entries[:, i], rank[i] = NAN, n_classes
            continue
        if from_logits and _maximum(row) == INF:  # replace the logits by those of the limit of the softmax
            for j in range(n_classes):
                limits[0, j] = ZERO if row[j] == INF else -INF
            row = limits[0]
        best[:] = -INF
        for start in range(0, n_classes, _BLOCK):
            block = row[start : start + _BLOCK]
            if _maximum(block) <= best[k - 1]:
                continue
            for j in range(block.size):
                x = block[j]
                if x > best[k - 1]:  # shift smaller entries, and insert x before them
                    place = k - 1
                    while place > 0 and best[place - 1] < x:
                        best[place] = best[place - 1]
                        place -= 1
                    best[place] = x
        entries[:, i] = best
        h = target[i]
        if 0 <= h < n_classes:
            rank[i] = _number_at_least(row[:h], row[h]) + _number_above(row[h + 1 :], row[h])
        else:
            rank[i] = n_classes


def fill(values: Tensor, target: Tensor, from_logits: bool, entries: Tensor, rank: Tensor) -> None:
    """Fill `entries` and `rank` as `largest.fill` does, for float32 and narrower dtypes."""
    by_rows(_fill_rows, values, [target.numpy(), entries.numpy(), rank.numpy()], (from_logits,))
