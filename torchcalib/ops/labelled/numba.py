"""Keys and sums of scores with labels by compiled loops. Only `dispatch` imports this module, at first use.

Each function of keys makes one pass in all threads. Plain torch makes several, and fills a new tensor in each.
"""

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.labelled import largest_key
from torchcalib.ops.numba_math import BLOCK, compiled_loop, lanes
from torchcalib.ops.threads import in_threads


@compiled_loop
def _fill_keys(bits, label, largest, keys):
    """Fill `keys`; `largest` are the bits of a missing score. Twice its value and 1 are all bits except the sign."""
    for i in range(keys.size):
        keys[i] = min(bits[i] & (largest << 1 | 1), largest) << 1 | label[i]  # the sign of -0 is dropped


@compiled_loop
def _split(keys, label):
    """Move the last bit of each key to `label`."""
    for i in range(keys.size):
        label[i] = keys[i] & 1
        keys[i] >>= 1


@compiled_loop
def _fill_confidences(p, label, confidence, correct):
    for i in range(p.size):
        x = np.float64(p[i])
        predicts_one = x > 0.5
        confidence[i] = x if predicts_one else 1 - x
        correct[i] = (label[i] == 1) == predicts_one


def label_keys(score: Tensor, label: Tensor) -> Tensor:
    """Return the same as `labelled.label_keys`."""
    integer, largest = largest_key(score.dtype)
    keys = torch.empty(score.shape, dtype=integer)
    bits, labels, out = score.view(integer).reshape(-1).numpy(), label.reshape(-1).numpy(), keys.view(-1).numpy()
    in_threads(lambda a, b: _fill_keys(bits[a:b], labels[a:b], largest, out[a:b]), bits.size, bits.size)
    return keys


def split(keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the same as `labelled.split`."""
    label = torch.empty(keys.shape, dtype=torch.uint8)
    packed, labels = keys.view(-1).numpy(), label.view(-1).numpy()
    in_threads(lambda a, b: _split(packed[a:b], labels[a:b]), packed.size, packed.size)
    return keys.view(dtype), label


def confidences(p: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same as `labelled.confidences`."""
    confidence, correct = torch.empty(p.shape, dtype=torch.float64), torch.empty(p.shape, dtype=torch.uint8)
    given = [x.reshape(-1).numpy() for x in (p, label, confidence, correct)]
    in_threads(lambda a, b: _fill_confidences(*(x[a:b] for x in given)), p.numel(), p.numel())
    return confidence, correct


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
