"""Pool adjacent violators algorithm (PAVA): loops over one sequence, and an implementation in tensor operations.

The loops process Python lists, because indexing a tensor in Python is slow. `numba` compiles them for arrays. They fill
the buffers `size`, `total` and `ends`, each as long as the sequence, and return the number of blocks. Block b consists
of the elements `ends[b-1]..ends[b]-1`, with weight `size[b]` and weighted sum `total[b]`.

The buffers are a stack of finished blocks; `w` and `s` are weight and sum of the current block. An element of weight 0
belongs to the previous block, or at the start to the first block. Means are compared by products without division. This
is exact for int64 counts up to 3e9 samples, and for Python integers.
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
    """Pool adjacent violators (PAVA): merge a block with the previous block unless its mean is higher.

    Source: Ayer et al. (1955); Best, Chakravarti: Active set algorithms for isotonic regression (1990).

    Args:
        weight: weight of every element, in the order of the scores.
        values: weight times target of every element.
        size: buffer for the weight of every block.
        total: buffer for the sum of `values` in every block.
        ends: buffer for the end of every block, the index after its last element.

    Returns:
        Number of blocks.
    """
    count = 0
    w = weight[0] * 0  # zero with the type of the elements, because numba variables have one type
    s = values[0] * 0
    for i in range(len(weight)):
        v = weight[i]
        if v == 0:
            continue
        y = values[i]
        if w > 0 and s * v < y * w:  # the mean increases: push the current block and start a new one
            size[count] = w
            total[count] = s
            ends[count] = i
            count += 1
            w = v
            s = y
            continue
        w += v  # pool the element, then all previous blocks with at least the new mean
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
    """Pool adjacent violators with block constraints (PAVA-BC): [TCE] Algorithm 2, and with `paper` Algorithm 3.

    Args:
        weight: number of samples in every tied group, in the order of the scores.
        values: number of positives in every tied group.
        n_min: smallest block size.
        n_max: largest block size.
        paper: whether to follow the paper instead of the authors' code.
        size: buffer for the number of samples in every block.
        total: buffer for the number of positives in every block.
        ends: buffer for the end of every block, the index after its last group.

    Returns:
        Number of blocks.

    Reference:
        [TCE] Matsubara et al.: TCE: A test-based approach to measuring calibration error (UAI 2023).
    """
    # Reserve the last n_min samples, rounded up to whole tied groups, for the final block.
    tail = len(weight)
    tail_size = 0
    tail_total = 0
    while tail > 0 and tail_size < n_min:
        tail -= 1
        tail_size += weight[tail]
        tail_total += values[tail]

    # Algorithm 2, main loop: each tied group starts a block. Merge the last two blocks as long as the rule requires it.
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
            continue  # the new block is separate, so earlier blocks do not change
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

    # Algorithm 2, last lines: merge the final block with the previous one if n_max allows it.
    # The authors' code assumes that the previous block has n_min samples.
    if tail_size > 0:
        if count > 0 and (size[count - 1] if paper else n_min) + tail_size <= n_max:
            size[count - 1] += tail_size
            total[count - 1] += tail_total
        else:
            size[count] = tail_size
            total[count] = tail_total
            count += 1
        ends[count - 1] = len(weight)

    # Algorithm 3: merge neighbouring blocks of equal mean. Their mean does not change, so one pass is enough.
    if paper and count > 1:
        last = 0
        for j in range(1, count):
            if total[last] * size[j] == total[j] * size[last]:
                size[last] += size[j]
                total[last] += total[j]
            else:
                last += 1
                size[last] = size[j]
                total[last] = total[j]
            ends[last] = ends[j]
        count = last + 1
    return count


def augmented(
    weight: Sequence[int],
    values: Sequence[int],
    run: MutableSequence[int],
    rise: MutableSequence[int],
    x: MutableSequence[int],
    y: MutableSequence[int],
) -> None:
    """Compute the isotonic fit at a test sample with label 1, for every group of equal scores that it may be added to.

    Isotonic means are the slopes of the greatest convex minorant of the cumulative sums P_0, ..., P_G, where P_g is the
    (weight, sum) of the first g groups. A test sample that is added to group g, or just before it, shifts the points
    after it by (1, 1). Here the points before it are shifted by (-1, -1) instead. The fit at the test sample is the
    slope of the segment of the minorant above its step. The corners from this segment to the right are a stack `x`,
    `y`, with the leftmost corner on top. Each point enters the stack at most twice, so the cost is O(G).

    Source: Vovk, Petej, Fedorova: Large-scale probabilistic predictors with and without guarantees of validity (2015),
    Algorithms 1 and 2; here the first minorant is built from right to left, which needs no reversal of the stack.

    Args:
        weight: positive weight of every group, in the order of the scores.
        values: number of positives in every group.
        run: buffer for the weight of the block of the test sample, which is included.
        rise: buffer for the number of positives in this block. The fit is `rise / run`.
        x: buffer for G + 2 corners.
        y: buffer for G + 2 corners.
    """
    length = len(weight)
    u = weight[0] * 0  # zero with the type of the elements, because numba variables have one type
    v = values[0] * 0
    for g in range(length):
        u += weight[g]
        v += values[g]
    # Algorithm 1: the minorant of (-1, -1), P_0, ..., P_G. The step from (-1, -1) to P_0 is the test sample.
    count = 0
    for g in range(length, -2, -1):
        # Remove corners that are not below the line from the new point to the next corner.
        while count > 1 and (y[count - 1] - v) * (x[count - 2] - x[count - 1]) >= (y[count - 2] - y[count - 1]) * (
            x[count - 1] - u
        ):
            count -= 1
        x[count] = u
        y[count] = v
        count += 1
        if g > 0:
            u -= weight[g - 1]
            v -= values[g - 1]
        else:
            u -= 1
            v -= 1
    # Algorithm 2: move one group at a time to the left of the test sample.
    u = x[count - 1]
    v = y[count - 1]
    for g in range(length):
        run[g] = x[count - 2] - x[count - 1]
        rise[g] = y[count - 2] - y[count - 1]
        u += weight[g]
        v += values[g]
        if (v - y[count - 1]) * run[g] >= rise[g] * (u - x[count - 1]):
            continue  # the new point is above the minorant
        count -= 1
        while count > 1 and (y[count - 1] - v) * (x[count - 2] - x[count - 1]) >= (y[count - 2] - y[count - 1]) * (
            x[count - 1] - u
        ):
            count -= 1
        x[count] = u
        y[count] = v
        count += 1


def pava_rounds(weight: Tensor, values: Tensor) -> Tensor:
    """Pool adjacent violators by tensor operations: pool all violators at once, and repeat until there are none.

    A sequence of blocks with non-increasing means is part of one block of the solution, so it is pooled as a whole. A
    million labels require about 15 rounds of decreasing length. Real-valued targets can require one round per block,
    for instance if only the last value is too low. So the loop is preferred for such targets, and on the CPU.

    Args:
        weight: weight of every element, `(R, G)`.
        values: weight times target, `(R, G)`.

    Returns:
        True at the first element of each block, bool `(R, G)`. Every round synchronises the device.
    """
    start = (weight > 0).flatten().nonzero().squeeze(-1)
    w, s = weight.flatten()[start], values.flatten()[start]
    row = start // max(weight.shape[-1], 1)
    while True:
        violates = (s[:-1] * w[1:] >= s[1:] * w[:-1]) & (row[:-1] == row[1:])
        is_start = torch.cat([torch.ones_like(row[:1], dtype=torch.bool), ~violates])
        kept = is_start.nonzero().squeeze(-1)  # the only operation of a round that synchronises the device
        if len(kept) == len(start):
            break
        block = is_start.cumsum(0) - 1
        start, row = start[kept], row[kept]
        w = w.new_zeros(start.shape).index_add_(0, block, w)
        s = s.new_zeros(start.shape).index_add_(0, block, s)
    # The first block of each row starts at its first element, even if this has weight 0.
    leads = torch.ones_like(row, dtype=torch.bool)
    leads[1:] = row[1:] != row[:-1]
    first = torch.zeros_like(weight, dtype=torch.bool)
    first.view(-1)[start] = ~leads
    first[:, :1] = True
    return first
