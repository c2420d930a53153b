"""Counter-based random numbers, equal on every device and for every batch size.

Each number is a hash of a seed, a stream number and a counter, so it does not depend on the order of calls. No data is
copied from the host to the device.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.operation import is_plain

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64 constants 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB, as signed integers."""

_ROUNDS = ((30, _FIRST), (27, _SECOND))  # shifts and factors of the output function
_MAX_COPIES = 12  # largest Poisson(1) count; P(X > 12) < 1e-10 is below the resolution of 32 bits
_IN_CACHE = 2**15  # number of random numbers that the CPU generates at a time, small enough for its cache


def random_words(seed: int, streams: Tensor, counters: Tensor) -> Tensor:
    """Return a uniform random integer in [0, 2^32) for each stream `(R,)` and counter `(N,)`, int64 `(R, N)`.

    The numbers are the upper 32 bits of the SplitMix64 outputs. `seed` has 64 bits.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), fig. 17.
    """
    source, keys = keyed(seed, streams, len(counters))
    found: Tensor = source.words(keys, counters)
    return found


def keyed(seed: int, streams: Tensor, n: int) -> tuple[Any, Tensor]:
    """Return the module that computes n numbers of each stream, and the state of each generator, int64 `(R,)`."""
    backend: Backend = "auto" if is_plain(streams) else "torch"
    source = source_of("random", streams.device.type, torch.int64, n * len(streams), backend)
    keys = _mix(streams * _GOLDEN + seed)
    return source, _mix(keys + _GOLDEN)  # mix twice, because neighbouring seeds must give unrelated keys


def words(keys: Tensor, counters: Tensor) -> Tensor:
    """Return `random_words` of generators with these states: the number i of a state `key` is mix(key + i golden)."""
    if not (keys.is_cpu and is_plain(keys, counters)):
        return _shift(_mix(keys.unsqueeze(-1) + counters * _GOLDEN), 32)
    # The same in numpy, whose unsigned integers need half of the operations
    states, numbers = (x.numpy().view(np.uint64) for x in (keys, counters))
    z = np.add.outer(states, numbers * np.uint64(_GOLDEN % 2**64))
    for shift, factor in _ROUNDS:
        z ^= z >> np.uint64(shift)
        z *= np.uint64(factor % 2**64)
    z ^= z >> np.uint64(31)
    z >>= np.uint64(32)
    return torch.from_numpy(z.view(np.int64))


def _mix(z: Tensor) -> Tensor:
    """Apply the output function of SplitMix64 to `z` in place: xor-shifts and multiplications."""
    for shift, factor in _ROUNDS:
        z.bitwise_xor_(_shift(z.clone(), shift)).mul_(factor)
    return z.bitwise_xor_(_shift(z.clone(), 31))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift `z` right in place by `bits`, filling with zeros. The operator of torch fills with the sign bit."""
    return z.bitwise_right_shift_(bits).bitwise_and_((1 << (64 - bits)) - 1)


def poisson_counts(seed: int, streams: Tensor, counters: Tensor, dtype: torch.dtype) -> Tensor:
    """Return independent Poisson counts of mean 1, `(R, N)` of `dtype`; see `random_words` for the arguments."""
    # Inverse transform sampling: the bounds are 2^32 P(X <= k), from exact fractions. Count those up to the word.
    cumulative, term = Fraction(0), Fraction(1)
    bounds = []
    for k in range(_MAX_COPIES):
        cumulative += term
        bounds.append(int(cumulative / Fraction(math.e) * 2**32))
        term /= k + 1
    source, keys = keyed(seed, streams, len(counters))
    counts = torch.empty(len(streams), len(counters), dtype=dtype, device=streams.device)
    source.count_bounds(keys, counters, bounds, counts)
    return counts


def multinomial_counts(seed: int, streams: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return how often each of n < 2^31 units occurs in n draws with replacement, `(R, n)` of `dtype` for R streams."""
    source, keys = keyed(seed, streams, n)
    counts = torch.empty(len(streams), n, dtype=dtype, device=streams.device)
    source.count_draws(keys, counts)
    return counts


def count_bounds(keys: Tensor, counters: Tensor, bounds: list[int], counts: Tensor) -> None:
    """Fill `counts` `(R, N)` with the number of bounds that do not exceed each random word."""

    def fill(words: Tensor, into: Tensor) -> None:
        if words.device.type == "cpu":
            into.copy_(torch.bucketize(words, torch.tensor(bounds, device="cpu"), right=True))
            return
        into.zero_()
        for bound in bounds:  # no table, because a copy to a GPU would synchronise
            into += words >= bound

    _in_batches(fill, keys, counters, counts)


def count_draws(keys: Tensor, counts: Tensor) -> None:
    """Fill `counts` `(R, n)` with the numbers of occurrences in n draws; see `multinomial_counts`."""
    n = counts.shape[1]

    def fill(words: Tensor, into: Tensor) -> None:
        # floor(u n / 2^32) for a word u: an index in [0, n) whose probability differs from 1/n by less than 2^-32.
        drawn = words.mul_(n).bitwise_right_shift_(32)
        # Sums of ones are exact, so on a GPU they do not depend on the order of atomic additions.
        into.zero_().scatter_add_(1, drawn, torch.ones_like(drawn, dtype=into.dtype))

    _in_batches(fill, keys, torch.arange(n, device=keys.device), counts)


def _in_batches(fill: Callable[[Tensor, Tensor], None], keys: Tensor, counters: Tensor, counts: Tensor) -> None:
    """Call `fill` with the random words of R keys and `counts` `(R, N)`; on the CPU, for a few keys at a time."""
    batch_size = max(1, _IN_CACHE // max(1, len(counters))) if keys.device.type == "cpu" else max(1, len(keys))
    for batch, into in zip(torch.split(keys, batch_size), torch.split(counts, batch_size), strict=True):
        fill(words(batch, counters), into)
