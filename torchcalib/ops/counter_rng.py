"""Random numbers that follow from their place: the same for a seed on every device, however the work is cut up.

A number is a hash of (seed, stream, counter) in whole numbers of 64 bits, so that neither the order in which numbers
are drawn nor how many at a time makes a difference, and nothing is copied from the host.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

_GOLDEN, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as signed numbers."""

_MOST_COPIES = 12  # P(X > 12) < 1e-10 for a Poisson variable of mean 1, below what 32 bits resolve
_IN_CACHE = 2**15  # numbers that are mixed at a time on a CPU


def random_words(seed: int, streams: Tensor, counters: Tensor) -> Tensor:
    """Return a random whole number in [0, 2^32) for each stream and counter.

    Args:
        seed: of all streams, a whole number of 64 bits.
        streams: int64 `(R,)`.
        counters: int64 `(N,)`, on the device of `streams`.

    Returns:
        int64 `(R, N)`, each number as likely as any other.

    Source:
        Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), fig. 17: SplitMix64, of which
        the upper half is taken.
    """
    keys = _mix(streams * _GOLDEN + seed)
    keys = _mix(keys + _GOLDEN)  # neighbouring seeds and streams must not be neighbours as keys
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
        counts = torch.zeros_like(words, dtype=torch.uint8)  # a GPU would wait for a table to be copied to it
        for bound in bounds:
            counts += words >= bound
        return counts

    return _by_pieces(reached, seed, streams, counters, dtype)


def multinomial_counts(seed: int, streams: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return how often each of n units, n below 2^31, is drawn in n draws, in every stream: `(R, n)` of `dtype`."""

    def counted(words: Tensor) -> Tensor:
        first = n * torch.arange(len(words), device=words.device).unsqueeze(-1)
        drawn = _shift(words.mul_(n), 32).add_(first).reshape(-1)
        # Flat, for which there is an order-free sum on every device.
        return torch.zeros_like(drawn).scatter_add_(0, drawn, torch.ones_like(drawn)).reshape(words.shape)

    return _by_pieces(counted, seed, streams, torch.arange(n, device=streams.device), dtype)


def _by_pieces(
    read: Callable[[Tensor], Tensor], seed: int, streams: Tensor, counters: Tensor, dtype: torch.dtype
) -> Tensor:
    """Read whole streams of words, on a CPU a few at a time: fresh memory costs more there than the arithmetic."""
    counts = torch.empty(len(streams), len(counters), dtype=dtype, device=streams.device)
    at_once = max(1, _IN_CACHE // max(1, len(counters))) if streams.device.type == "cpu" else max(1, len(streams))
    for some, into in zip(torch.split(streams, at_once), torch.split(counts, at_once), strict=True):
        into.copy_(read(random_words(seed, some, counters)))
    return counts
