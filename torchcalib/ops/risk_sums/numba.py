"""Sums of risk-coverage curves by a compiled loop. Only `dispatch` imports this module, at first use."""

import numpy as np

from torchcalib.ops.numba_math import BLOCK, compiled_loop, lanes


@lanes
def _sum_of_quotients(errors, first):
    """Return the sum of errors[i] / (first + i), by vector instructions."""
    total = 0.0
    for i in range(errors.size):
        total += errors[i] / (first + np.float64(np.int32(i)))
    return total


@compiled_loop
def fill_sums(score, correct, sums):
    """Fill `sums` with the sums of one row in `risk_sums`, in one pass from the last sample to the first one."""
    errors, n = np.int64(0), score.size
    risk, generalized, above = 0.0, 0.0, 0.0
    block = np.empty(BLOCK)  # E_k of up to `BLOCK` ranks k
    end = n
    while end > 0:
        # 1. Group of equal scores: samples `begin` to `end`.
        begin, wrong = end - 1, 1 - np.int64(correct[end - 1])
        while begin > 0 and score[begin - 1] == score[end - 1]:
            begin -= 1
            wrong += 1 - np.int64(correct[begin])
        size, first = end - begin, n - end
        # 2. E_k for the ranks k = first + 1, ... of the group, linear between its ends. Full blocks are summed.
        rate = np.float64(wrong) if size == 1 else wrong / size
        for i in range(1, size + 1):
            place = (first + i - 1) % BLOCK
            block[place] = errors + i * rate
            if place == BLOCK - 1:
                risk += _sum_of_quotients(block, np.float64(first + i - place))
        # 3. Sums over groups. Their terms are multiples of one half, and exact.
        middle = errors + wrong / 2
        generalized += size * middle
        above += (size - wrong) * middle
        errors += wrong
        end = begin
    rest = n % BLOCK
    risk += _sum_of_quotients(block[:rest], np.float64(n - rest + 1))
    sums[0], sums[1], sums[2], sums[3] = errors, risk, generalized, above
