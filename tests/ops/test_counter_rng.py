"""Counter-based random numbers: words, distributions, and independence of chunking."""

import math

import pytest
import torch

from torchcalib.ops import counter_rng


def splitmix(z):
    """Compute SplitMix64's finalizer with Python integers."""
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1])
def test_random_words_equal_integer_arithmetic(seed):
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    streams, counters = torch.tensor([0, 1, 2**32 + 7]), torch.tensor([0, 1, 99, 10**9])
    words = counter_rng.random_words(seed, streams, counters)
    for i, stream in enumerate(streams.tolist()):
        key = splitmix((splitmix((stream * golden + seed) & mask) + golden) & mask)
        for j, counter in enumerate(counters.tolist()):
            assert int(words[i, j]) == splitmix((key + counter * golden) & mask) >> 32


def test_poisson_counts_have_their_distribution_and_do_not_depend_on_chunking():
    counts = counter_rng.poisson_counts(0, torch.arange(50), torch.arange(40_000), torch.float64)
    for k in range(7):
        p = math.exp(-1) / math.factorial(k)
        share = float((counts == k).double().mean())
        assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / counts.numel())
    piece = counter_rng.poisson_counts(0, torch.arange(7, 9), torch.arange(123, 130), torch.float64)
    assert torch.equal(piece, counts[7:9, 123:130])


def test_multinomial_counts_are_draws_of_n_samples_with_replacement():
    counts = counter_rng.multinomial_counts(0, torch.arange(2000), 50, torch.float64)
    assert torch.equal(counts.sum(-1), torch.full((2000,), 50.0, dtype=torch.float64))
    assert abs(float(counts.var()) - (1 - 1 / 50)) < 0.03
    assert float((counts.mean(0) - 1).abs().max()) < 5 / math.sqrt(2000)
    assert torch.equal(counter_rng.multinomial_counts(0, torch.arange(5, 7), 50, torch.int64), counts[5:7].long())


def test_compiled_numbers_equal_those_of_torch():
    """Documented: a number depends only on seed, stream and counter."""
    compiled = pytest.importorskip("torchcalib.ops.counter_rng.numba")
    _, keys = counter_rng.keyed(-3, torch.arange(5, 12), 6)
    counters = torch.tensor([0, 7, 2**40, -2]).repeat(3)[::2]
    assert torch.equal(compiled.words(keys, counters), counter_rng.words(keys, counters))
    for name, arguments in (("count_bounds", (counters, [2**30, 2**31])), ("count_draws", ())):
        found, expected = torch.zeros(2, len(keys), 6, dtype=torch.float64)
        getattr(compiled, name)(keys, *arguments, found)
        getattr(counter_rng, name)(keys, *arguments, expected)
        assert torch.equal(found, expected)
        assert float(found.sum())
