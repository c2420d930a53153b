"""Algorithms of isotonic regression: loops over one sequence, and PAVA also as rounds of tensor operations.

The loops run on Python lists, which are much faster there than arrays or tensors; `numba` compiles the same functions
for arrays. Each fills the buffers `size`, `total` and `ends`, as long as the sequence, and returns the number of
blocks: block b is the elements `ends[b-1]..ends[b]-1`, of weight `size[b]` and sum `total[b]`. The buffers are a stack
of finished blocks, and `w` and `s` hold weight and sum of the growing block. An element of weight 0 begins no block: it
belongs to the block before it, or to the first one. Means are compared as products, which is exact for int64 counts up
to 3e9 samples; Python integers have no limit.
"""

from collections.abc import MutableSequence, Sequence

import torch
from torch import Tensor


def pava(
    weight: Sequence[float],
    values: Sequence[float],
    size: MutableSequence[float],
    total: MutableSequence[float],
    ends: MutableSequence[int],
) -> int:
    """Pool adjacent violators (PAVA): merge a block with the one before it unless its mean is higher.

    Source: Ayer et al. (1955); Best, Chakravarti: Active set algorithms for isotonic regression (1990).

    Args:
        weight: weight of every element, in the order of the scores.
        values: weight times target of every element.
        size: filled with the weight of every block.
        total: filled with the sum of every block.
        ends: filled with the end of every block.
    """
    count = 0
    w = weight[0] * 0  # zero in the type of the sequence
    s = values[0] * 0
    for i in range(len(weight)):
        v = weight[i]
        if v == 0:
            continue
        y = values[i]
        if w > 0 and s * v < y * w:
            size[count] = w
            total[count] = s
            ends[count] = i
            count += 1
            w = v
            s = y
            continue
        w += v
        s += y
        while count > 0 and total[count - 1] * w >= s * size[count - 1]:
            count -= 1
            w += size[count]
            s += total[count]
    if w > 0:
        size[count] = w
        total[count] = s
        ends[count] = len(weight)
        count += 1
    return count


def pava_bc(
    weight: Sequence[int],
    values: Sequence[int],
    n_min: int,
    n_max: int,
    paper: bool,
    size: MutableSequence[int],
    total: MutableSequence[int],
    ends: MutableSequence[int],
) -> int:
    """PAVA with bounds on the size of a block ([TCE] Algorithm 2, and with `paper` Algorithm 3).

    Args:
        weight: number of samples in every tied group, in the order of the scores.
        values: number of positives in every tied group.
        n_min: smallest block.
        n_max: largest block.
        paper: as in the paper; otherwise as in the authors' code.
        size: filled with the weight of every block.
        total: filled with the sum of every block.
        ends: filled with the end of every block.
    """
    # Reserve the last n_min samples; the tied group with the first of them is reserved as a whole.
    tail = len(weight)
    tail_size = 0
    tail_total = 0
    while tail > 0 and tail_size < n_min:
        tail -= 1
        tail_size += weight[tail]
        tail_total += values[tail]

    # Algorithm 2, main loop: each sample is a new block, and the top two blocks are merged while the rule allows it.
    count = 0
    w = 0
    s = 0
    for i in range(tail):
        v = weight[i]
        if v == 0:
            continue
        y = values[i]
        both = w + v
        if w > 0 and both > n_min and (both > n_max or s * v < y * w):
            size[count] = w
            total[count] = s
            ends[count] = i
            count += 1
            w = v
            s = y
            continue  # the top two stay apart, so the blocks below do, too
        w = both
        s += y
        while count > 0:
            both = size[count - 1] + w
            if both > n_min and (both > n_max or total[count - 1] * w < s * size[count - 1]):
                break
            count -= 1
            w = both
            s += total[count]
    if w > 0:
        size[count] = w
        total[count] = s
        ends[count] = tail
        count += 1

    # Algorithm 2, last lines. The authors' code uses n_min in place of the size of the block.
    if tail_size > 0:
        if count > 0 and (size[count - 1] if paper else n_min) + tail_size <= n_max:
            size[count - 1] += tail_size
            total[count - 1] += tail_total
        else:
            size[count] = tail_size
            total[count] = tail_total
            count += 1
        ends[count - 1] = len(weight)

    # Algorithm 3: merge neighbours of equal mean. A merged block keeps its mean, so one pass is enough.
    if paper and count > 1:
        kept = 0
        for j in range(1, count):
            if total[kept] * size[j] == total[j] * size[kept]:
                size[kept] += size[j]
                total[kept] += total[j]
            else:
                kept += 1
                size[kept] = size[j]
                total[kept] = total[j]
            ends[kept] = ends[j]
        count = kept + 1
    return count


def pava_rounds(weight: Tensor, values: Tensor) -> Tensor:
    """PAVA on whole tensors: pool all adjacent violators at once, and repeat until there are none.

    A run of blocks with non-increasing means lies in one block of the solution, so it is pooled as a whole. Labels take
    about 15 rounds for a million samples, each on a shorter list. Increasing targets with one low value at the end take
    a round for each block, so real targets use the loop. On a CPU it is many times slower than the compiled loop.

    Args:
        weight: `(R, G)`.
        values: weight times target, `(R, G)`.

    Returns:
        Whether a block begins at the element, bool `(R, G)`. Every round reads one flag back from the device.
    """
    start = (weight > 0).flatten().nonzero().squeeze(-1)
    w, s = weight.flatten()[start], values.flatten()[start]
    row = start // max(weight.shape[-1], 1)
    while True:
        violates = (s[:-1] * w[1:] >= s[1:] * w[:-1]) & (row[:-1] == row[1:])
        if not violates.any():
            break
        opens = torch.cat([violates.new_ones(1), ~violates])
        block = opens.cumsum(0) - 1
        start, row = start[opens], row[opens]
        w = w.new_zeros(start.shape).index_add_(0, block, w)
        s = s.new_zeros(start.shape).index_add_(0, block, s)
    # The first block of a row includes the elements of weight 0 before it; a row without weight is one block.
    leads = torch.ones_like(row, dtype=torch.bool)
    leads[1:] = row[1:] != row[:-1]
    first = torch.zeros_like(weight, dtype=torch.bool)
    first.view(-1)[start[~leads]] = True
    first[:, :1] = True
    return first
