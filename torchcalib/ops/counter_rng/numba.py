"""Counter-based random numbers by compiled loops, bit by bit as in torch. Only `dispatch` imports this module.

A word is a hash of a few multiplications and shifts of 64 bits. A loop keeps them in registers, and counts a word at
once. Operations on whole arrays read and write every word ten to twenty times.
"""

import numpy as np
from torch import Tensor

from torchcalib.ops.numba_math import compiled_loop, step
from torchcalib.ops.threads import in_threads

_GOLDEN, _FIRST, _SECOND = (np.uint64(x) for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S27, _S30, _S31, _S32 = (np.uint64(bits) for bits in (27, 30, 31, 32))


@step
def _word(key, counter):
    """Return the upper 32 bits of the SplitMix64 output for a state and a counter."""
    z = np.uint64(key) + np.uint64(counter) * _GOLDEN
    z = (z ^ (z >> _S30)) * _FIRST
    z = (z ^ (z >> _S27)) * _SECOND
    return (z ^ (z >> _S31)) >> _S32


@compiled_loop
def _fill_words(keys, counters, out):
    for r in range(keys.size):
        for k in range(counters.size):
            out[r, k] = _word(keys[r], counters[k])


@compiled_loop
def _count_draws(keys, counts):
    n = counts.shape[1]
    for r in range(keys.size):
        row = counts[r]
        row[:] = 0  # just before its use, so that it is in the cache
        for k in range(n):
            row[np.int64((_word(keys[r], k) * np.uint64(n)) >> _S32)] += 1


@compiled_loop
def _count_bounds(keys, counters, bounds, counts):
    for r in range(keys.size):
        for k in range(counters.size):
            word, count = np.int64(_word(keys[r], counters[k])), 0
            for bound in bounds:
                count += word >= bound
            counts[r, k] = count


def words(keys: Tensor, counters: Tensor) -> Tensor:
    """Return random words; see `counter_rng.words`."""
    found = keys.new_empty(len(keys), len(counters))
    states, numbers, out = keys.numpy(), counters.contiguous().numpy(), found.numpy()
    in_threads(lambda start, end: _fill_words(states[start:end], numbers, out[start:end]), len(keys), found.numel())
    return found


def count_bounds(keys: Tensor, counters: Tensor, bounds: list[int], counts: Tensor) -> None:
    """Fill `counts`; see `counter_rng.count_bounds`."""
    states, numbers, limits, out = keys.numpy(), counters.contiguous().numpy(), np.array(bounds), counts.numpy()

    def fill(start: int, end: int) -> None:
        _count_bounds(states[start:end], numbers, limits, out[start:end])

    in_threads(fill, len(keys), counts.numel())


def count_draws(keys: Tensor, counts: Tensor) -> None:
    """Fill `counts`; see `counter_rng.count_draws`."""
    states, out = keys.numpy(), counts.numpy()
    in_threads(lambda start, end: _count_draws(states[start:end], out[start:end]), len(keys), counts.numel())
