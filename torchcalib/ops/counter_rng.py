"""Counter-based random numbers, equal on every device and for every batch size.

Each number is a hash of a seed, a stream number and a counter, so it does not depend on the order of calls. No data is
copied from the host to the device.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""SplitMix64 constants 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB, as signed integers."""

_MAX_COPIES = 12  # largest Poisson(1) count; P(X > 12) < 1e-10 is below the resolution of 32 bits
_IN_CACHE = 2**15  # number of random numbers that the CPU generates at a time, small enough for its cache


def random_words(seed: int, streams: Tensor, counters: Tensor) -> Tensor:
    """Return a uniform random integer in [0, 2^32) for each stream `(R,)` and counter `(N,)`, int64 `(R, N)`.

    The numbers are the upper 32 bits of the SplitMix64 outputs. `seed` has 64 bits.

    Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), fig. 17.
    """
    # A SplitMix64 generator of state `key` yields mix(key + i * golden) as its i-th number. A stream has its own key.
    keys = _mix(streams * _GOLDEN + seed)
    keys = _mix(keys + _GOLDEN)  # mix twice, because neighbouring seeds must give unrelated keys
    return _shift(_mix(keys.unsqueeze(-1) + counters * _GOLDEN), 32)


def _mix(z: Tensor) -> Tensor:
    """Apply the output function of SplitMix64 to `z` in place: xor-shifts and multiplications."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
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

    def count_below(words: Tensor) -> Tensor:
        if words.device.type == "cpu":
            return torch.bucketize(words, torch.tensor(bounds), right=True)
        counts = torch.zeros_like(words, dtype=torch.uint8)  # no table, because a copy to a GPU would synchronise
        for bound in bounds:
            counts += words >= bound
        return counts

    return _in_batches(count_below, seed, streams, counters, dtype)


def multinomial_counts(seed: int, streams: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return how often each of n < 2^31 units occurs in n draws with replacement, `(R, n)` of `dtype` for R streams."""

    def count_draws(words: Tensor) -> Tensor:
        # floor(u n / 2^32) for a word u: an index in [0, n) whose probability differs from 1/n by less than 2^-32.
        # The counts of stream r have the indices r n to (r + 1) n - 1 in a flat tensor.
        first = n * torch.arange(len(words), device=words.device).unsqueeze(-1)
        drawn = _shift(words.mul_(n), 32).add_(first).reshape(-1)
        # Integer sums are reproducible on a GPU: they do not depend on the order of atomic additions.
        return torch.zeros_like(drawn).scatter_add_(0, drawn, torch.ones_like(drawn)).reshape(words.shape)

    return _in_batches(count_draws, seed, streams, torch.arange(n, device=streams.device), dtype)


def _in_batches(
    convert: Callable[[Tensor], Tensor], seed: int, streams: Tensor, counters: Tensor, dtype: torch.dtype
) -> Tensor:
    """Apply `convert` to the random integers of R streams, `(R, N)` of `dtype`; on the CPU, a few streams at a time."""
    counts = torch.empty(len(streams), len(counters), dtype=dtype, device=streams.device)
    batch_size = max(1, _IN_CACHE // max(1, len(counters))) if streams.device.type == "cpu" else max(1, len(streams))
    for batch, into in zip(torch.split(streams, batch_size), torch.split(counts, batch_size), strict=True):
        into.copy_(convert(random_words(seed, batch, counters)))
    return counts
