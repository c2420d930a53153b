"""Counter-based random numbers: the same for a seed on every device and for every division of the work.

A number is a 64-bit integer hash of (seed, stream, counter). It does not depend on the order of the draws or on the
batch size, and nothing is copied from the host.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers."""

_MOST_COPIES = 12  # P(X > 12) < 1e-10 for a Poisson variable of mean 1, below what 32 bits resolve
_IN_CACHE = 2**15  # numbers of a piece on a CPU


def random_words(seed: int, streams: Tensor, counters: Tensor) -> Tensor:
    """Return a uniform random integer in [0, 2^32) for each stream and counter.

    Args:
        seed: 64-bit integer.
        streams: int64 `(R,)`.
        counters: int64 `(N,)`, on the device of `streams`.

    Returns:
        int64 `(R, N)`.

    Source:
        Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), fig. 17: upper half
        of SplitMix64.
    """
    keys = _mix(streams * _GOLDEN + seed)
    keys = _mix(keys + _GOLDEN)  # keys of neighbouring seeds and streams must be unrelated
    return _shift(_mix(keys.unsqueeze(-1) + counters * _GOLDEN), 32)


def _mix(z: Tensor) -> Tensor:
    """Mix the bits of `z` in place."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z.bitwise_xor_(_shift(z.clone(), shift)).mul_(factor)
    return z.bitwise_xor_(_shift(z.clone(), 31))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift to the right, in place, and fill with zeros."""
    return z.bitwise_right_shift_(bits).bitwise_and_((1 << (64 - bits)) - 1)


def poisson_counts(seed: int, streams: Tensor, counters: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an independent Poisson variable of mean 1 for each stream and counter, `(R, N)` of `dtype`."""
    cumulative, term = Fraction(0), Fraction(1)
    bounds = []
    for k in range(_MOST_COPIES):
        cumulative += term
        bounds.append(int(cumulative / Fraction(math.e) * 2**32))
        term /= k + 1

    def reached(words: Tensor) -> Tensor:
        if words.device.type == "cpu":
            return torch.bucketize(words, torch.tensor(bounds), right=True)
        counts = torch.zeros_like(words, dtype=torch.uint8)  # copying a table would synchronise a GPU
        for bound in bounds:
            counts += words >= bound
        return counts

    return _by_pieces(reached, seed, streams, counters, dtype)


def multinomial_counts(seed: int, streams: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return the number of times that each of n < 2^31 units is drawn in n draws, per stream: `(R, n)` of `dtype`."""

    def counted(words: Tensor) -> Tensor:
        first = n * torch.arange(len(words), device=words.device).unsqueeze(-1)
        drawn = _shift(words.mul_(n), 32).add_(first).reshape(-1)
        # The sum of a flat integer tensor does not depend on its order on any device.
        return torch.zeros_like(drawn).scatter_add_(0, drawn, torch.ones_like(drawn)).reshape(words.shape)

    return _by_pieces(counted, seed, streams, torch.arange(n, device=streams.device), dtype)


def _by_pieces(
    read: Callable[[Tensor], Tensor], seed: int, streams: Tensor, counters: Tensor, dtype: torch.dtype
) -> Tensor:
    """Convert whole streams of words; a few at a time on a CPU, where new memory costs more than the arithmetic."""
    counts = torch.empty(len(streams), len(counters), dtype=dtype, device=streams.device)
    at_once = max(1, _IN_CACHE // max(1, len(counters))) if streams.device.type == "cpu" else max(1, len(streams))
    for some, into in zip(torch.split(streams, at_once), torch.split(counts, at_once), strict=True):
        into.copy_(read(random_words(seed, some, counters)))
    return counts
