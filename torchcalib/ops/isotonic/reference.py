"""The order-based algorithms, each written once: as loops over one sequence, and PAVA also as rounds over tensors.

The loops run as they stand on Python lists (much faster there than arrays or tensors), and `isotonic_numba` compiles
the same functions for arrays. Each fills the buffers it is given (`size`, `total`, `ends`, as long as the sequence)
and returns how many blocks it found: block b is the elements `ends[b-1]..ends[b]-1`, of weight `size[b]` and sum
`total[b]`. The block that grows is held in `w` and `s`, those below it in the buffers. An element of weight 0 opens no
block: it falls to the block before it, and to the first if there is none. Means are compared as products, which is
exact for int64 counts up to 3e9 samples; lists hold Python integers and have no limit.
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
    """Isotonic least squares by pooling adjacent violators: a block joins the one before it unless its mean is higher.

    Args:
        weight: weight of every element, in the order of the scores.
        values: weight times target of every element.
        size: filled with the weight of every block.
        total: filled with the sum of every block.
        ends: filled with where every block ends.
    """
    count = 0
    w = weight[0] * 0  # zero of the sequence's own type
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
        n_min: the smallest block wanted.
        n_max: the largest block wanted.
        paper: as the paper is printed; otherwise as the authors' code runs.
        size: filled with the weight of every block.
        total: filled with the sum of every block.
        ends: filled with where every block ends.
    """
    # The last n_min samples are set apart; a tied group is never split, so the group that holds the first of them
    # comes whole.
    tail = len(weight)
    tail_size = 0
    tail_total = 0
    while tail > 0 and tail_size < n_min:
        tail -= 1
        tail_size += weight[tail]
        tail_total += values[tail]

    # Algorithm 2, the loop over the other samples: a sample is a new block, and the top two blocks are merged for as
    # long as the rule allows.
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
            continue  # the top two are apart, and no others are asked
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

    # Algorithm 2, its last lines. The authors' code compares with n_min where the paper has the size of the block.
    if tail_size > 0:
        if count > 0 and (size[count - 1] if paper else n_min) + tail_size <= n_max:
            size[count - 1] += tail_size
            total[count - 1] += tail_total
        else:
            size[count] = tail_size
            total[count] = tail_total
            count += 1
        ends[count - 1] = len(weight)

    # Algorithm 3: neighbours of equal mean are one block. A merged block keeps its mean, so one pass is enough.
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
    """PAVA on whole tensors: in every round all adjacent violators are pooled at once, until there are none.

    A run of blocks whose means do not rise lies in one block of the solution, so a run is pooled whole. Labels of 0 and
    1 take about 15 rounds for a million samples, each on a shorter list; targets that rise block by block to one low
    value at the end take a round each, which is why real targets are left to the loop.

    Args:
        weight: `(R, G)`.
        values: weight times target, `(R, G)`.

    Returns:
        Where a block begins, bool `(R, G)`. Rows do not mix. Every round reads one flag back from the device.
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
    # A row's first block takes what of weight 0 stands before it; a row without weight is one block.
    leads = torch.ones_like(row, dtype=torch.bool)
    leads[1:] = row[1:] != row[:-1]
    first = torch.zeros_like(weight, dtype=torch.bool)
    first.view(-1)[start[~leads]] = True
    first[:, :1] = True
    return first
