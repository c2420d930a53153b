"""Pool adjacent violators algorithm (PAVA), with block constraints (PAVA-BC), and for an additional test sample.

The loops process Python lists, because indexing a tensor in Python is slow. `numba` compiles them for arrays.
`pava` and `pava_bc` get the weight of every element in the order of the scores, and its weight times target: for a tied
group, the numbers of samples and positives. They fill the buffers `size`, `total` and `ends`, each at least as long as
the sequence, and return the number of blocks. Block b consists of the elements `ends[b-1]..ends[b]-1`, with weight
`size[b]` and weighted sum `total[b]`.

The buffers are a stack of finished blocks; `w` and `s` are weight and sum of the current block. An element of weight 0
belongs to the previous block, or at the start to the first block. Means are compared by products without division. This
is exact for int64 counts up to 3e9 samples, and for Python integers.
"""

from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np


def pava(
    weight: Sequence[float],
    values: Sequence[float],
    size: MutableSequence[float],
    total: MutableSequence[float],
    ends: MutableSequence[int],
) -> int:
    """Pool adjacent violators (PAVA): merge a block with the previous block unless its mean is higher.

    Source: Ayer et al. (1955); Best, Chakravarti: Active set algorithms for isotonic regression (1990).
    """
    # Blocks 0..count-1 have increasing means. The current block (w, s) is merged into them until its mean is higher.
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
        # Pool the element, then all previous blocks with at least the new mean. A block is merged at most once, so the
        # cost is O(N).
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
    """Pool adjacent violators with block constraints for tied groups: Algorithm 2, with `paper` Algorithm 3.

    Without `paper` it follows the authors' code. Source: Matsubara et al.: TCE: A test-based approach to measuring
    calibration error (UAI 2023).
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


def pava_bc_starts(weight: Any, values: Any, n_min: Any, n_max: Any, paper: bool) -> Any:
    """Return True at the first element of each block of `pava_bc`, bool `(R, G)`, for int64 arrays of R rows.

    A step adds one element to all rows, which is faster than `pava_bc` for many rows in Python. The stacks of finished
    blocks have one column for each row. `n_min` and `n_max` are arrays `(R,)`.
    """
    n_rows, length = weight.shape
    from_end = weight[:, ::-1].cumsum(1)[:, ::-1]
    tail = ((from_end >= n_min[:, np.newaxis]).sum(1) - 1).clip(min=0)
    before_tail = np.where(np.arange(length) < tail[:, np.newaxis], (weight, values), 0)
    # Weight, sum and start of all finished blocks, of the last of them, and of the current block
    stack, last, current = (np.zeros((3, *shape, n_rows), np.int64) for shape in ((length + 1,), (), ()))
    count, (w, s, start), (last_w, last_s, last_start) = np.zeros(n_rows, np.int64), current, last
    for i, (v, y) in enumerate(before_tail.transpose(2, 0, 1).copy()):
        # 1. Push the current block if the element starts a new one. Elements of weight 0 change nothing.
        both, is_given = w + v, v > 0
        starts = ((both > n_max) | (s * v < y * w)) & (both > n_min) & is_given & (w > 0)
        rows = starts.nonzero()[0]
        stack[:, count[rows], rows] = last[:, rows] = current[:, rows]
        current[:, rows] = 0
        start[rows] = i
        count += starts
        w += v
        s += y
        # 2. Merge the last two blocks as long as the rule requires it.
        both = last_w + w
        merges = (both <= n_min) | ((both <= n_max) & (last_s * w >= s * last_w))
        rows = (merges & is_given & ~starts & (count > 0)).nonzero()[0]
        while len(rows):
            count[rows] -= 1
            w[rows] += last_w[rows]
            s[rows] += last_s[rows]
            start[rows] = last_start[rows]
            rows = rows[count[rows] > 0]
            last[:, rows] = of_last = stack[:, count[rows] - 1, rows]
            both = of_last[0] + w[rows]
            merges = (both <= n_max[rows]) & (of_last[1] * w[rows] >= s[rows] * of_last[0])
            rows = rows[merges | (both <= n_min[rows])]
    # 3. The current block ends where the final one begins. They are merged if `n_max` allows it.
    columns = np.arange(n_rows)
    stack[:, count, columns] = current
    count += w > 0
    final = np.stack((*(np.stack((weight, values)) - before_tail).sum(2), tail))
    previous = stack[0, count - 1, columns] if paper else n_min
    joins = (count > 0) & (previous + final[0] <= n_max)
    count += ~joins
    stack[:, count - 1, columns] = np.where(joins, stack[:, count - 1, columns] + final * [[1], [1], [0]], final)
    # 4. Algorithm 3: merge neighbouring blocks of equal mean.
    first = np.zeros((n_rows, length), np.bool_)
    first[:, :1] = True
    w, s, _ = stack[:, 0]
    for b in range(1, count.max(initial=0)):
        (v, y, start), differs = stack[:, b], count > b
        if paper:
            differs &= s * v != y * w
            w, s = np.where(differs, 0, w) + v, np.where(differs, 0, s) + y
        first[columns[differs], start[differs]] = True
    return first


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
    `y`, with the leftmost corner on top. Each point enters the stack at most once, so the cost is O(G).

    Source: Vovk, Petej, Fedorova: Large-scale probabilistic predictors with and without guarantees of validity (2015),
    Algorithms 1 and 2; here the first minorant is built from right to left, which needs no reversal of the stack.

    `run` and `rise` are buffers for weight and positives of the block of the test sample, which is included. The fit is
    `rise / run`. `x` and `y` are buffers for G + 2 corners.
    """
    length = len(weight)
    u = weight[0] * 0  # zero with the type of the elements, because numba variables have one type
    v = values[0] * 0
    for g in range(length):
        u += weight[g]
        v += values[g]
    # Algorithm 1: the minorant of (-1, -1), P_0, ..., P_G. The step from (-1, -1) to P_0 is the test sample.
    x[0] = u
    y[0] = v
    count = 1
    # Local variables, because the loop also runs in Python: the top corner, and the vector from it to the next one
    top_x, top_y = u, v
    to_x, to_y = u * 0, v * 0
    for g in range(length - 1, -2, -1):
        if g >= 0:
            u -= weight[g]
            v -= values[g]
            if g > 0 and values[g] * weight[g - 1] == values[g - 1] * weight[g]:
                continue  # a point between groups of equal means, such as 0 or 1, is no corner
        else:
            u -= 1
            v -= 1
        # Remove corners that are not below the line from the new point to the next corner.
        while count > 1 and (top_y - v) * to_x >= to_y * (top_x - u):
            count -= 1
            top_x, top_y = x[count - 1], y[count - 1]
            if count > 1:
                to_x, to_y = x[count - 2] - top_x, y[count - 2] - top_y
        to_x, to_y = top_x - u, top_y - v
        top_x, top_y = u, v
        x[count] = u
        y[count] = v
        count += 1
    # Algorithm 2: move one group at a time to the left of the test sample. A new point below the minorant replaces the
    # top corner, so that the corners right of it, from `following` down, are only removed.
    following = count - 2
    next_x, next_y = x[following], y[following]
    then_x, then_y = u * 0, v * 0  # vector from the next corner to the one after it
    if following > 0:
        then_x, then_y = x[following - 1] - next_x, y[following - 1] - next_y
    for g in range(length):
        run[g] = to_x
        rise[g] = to_y
        u += weight[g]
        v += values[g]
        if (v - top_y) * to_x >= to_y * (u - top_x):
            continue  # the new point is above the minorant
        to_x, to_y = next_x - u, next_y - v
        while following > 0 and to_y * then_x >= then_y * to_x:
            following -= 1
            next_x, next_y = x[following], y[following]
            to_x, to_y = next_x - u, next_y - v
            if following > 0:
                then_x, then_y = x[following - 1] - next_x, y[following - 1] - next_y
        top_x, top_y = u, v


def starts_of_rows(
    weight: Sequence[Any],
    values: Sequence[Any],
    begins: Sequence[Any] | None,
    low: Sequence[int] | None,
    high: Sequence[int] | None,
    paper: bool,
    first: Sequence[Any],
    buffers: Sequence[Any],
) -> None:
    """Set `first` to True at the first element of each block of every row, by `pava`, or by `pava_bc` with bounds.

    The columns are R rows of length N. `begins` is True at the first element of each tied group, or None if no scores
    are equal. `low` and `high` are the bounds of each row. `buffers` are six buffers of length N.
    """
    n, y, start, size, total, ends = buffers
    for r in range(len(weight)):
        # Sum tied groups. Group g begins at the element start[g].
        g = -1
        for i in range(len(weight[r])):
            if begins is None or begins[r][i]:
                g += 1
                n[g] = weight[r][i]
                y[g] = values[r][i]
                start[g] = i
            else:
                n[g] += weight[r][i]
                y[g] += values[r][i]
        if low is None or high is None:
            count = pava(n[: g + 1], y[: g + 1], size, total, ends)
        else:
            count = pava_bc(n[: g + 1], y[: g + 1], low[r], high[r], paper, size, total, ends)
        first[r][0] = True
        for b in range(count - 1):
            first[r][start[ends[b]]] = True


def augmented_of_rows(
    weight: Sequence[Any],
    values: Sequence[Any],
    ends: Sequence[int],
    run: MutableSequence[Any],
    rise: MutableSequence[Any],
    buffers: Sequence[Any],
) -> None:
    """Fill `run` and `rise` by `augmented` for rows of groups. Row r ends before the group `ends[r]`.

    `buffers` are four buffers, each longer by 2 than the longest row.
    """
    own_run, own_rise, x, y = buffers
    begin = 0
    for end in ends:
        if end > begin:
            augmented(weight[begin:end], values[begin:end], own_run, own_rise, x, y)
            run[begin:end] = own_run[: end - begin]
            rise[begin:end] = own_rise[: end - begin]
        begin = end
