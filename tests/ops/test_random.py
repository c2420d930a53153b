"""Random numbers by counters, and random counts of successes with exact distributions."""

import math

import oracles
import pytest
import torch
from scipy import stats

from torchcalib.ops import counter_rng
from torchcalib.ops.count_moments import count_quantiles


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


# Random counts of successes


F64 = torch.float64


def uniform_grid(n):
    """Return n uniform_grid spaced uniform numbers, which represent the uniform distribution."""
    return (torch.arange(n, dtype=F64) + 0.5) / n


@pytest.mark.parametrize(
    ("n", "p"),
    [(1, 0.5), (7, 0.01), (10, 0.3), (400, 0.02), (40, 0.5), (3, 0.4999), *((n, 0.03) for n in (2_000, 10**6, 10**10))],
)
def test_counts_of_equal_trials_equal_scipy(n, p):
    """Few counts are exact, except where a uniform number is at a step. Many have an error of 1e-3 deviations."""
    chance = uniform_grid(10_000)
    mean, variance = torch.tensor([n * p], dtype=F64), torch.tensor([n * p * (1 - p)], dtype=F64)
    found = count_quantiles(chance.unsqueeze(-1), mean, variance).squeeze(-1)
    off = found - torch.from_numpy(stats.binom.ppf(chance.numpy(), n, p))
    if n <= 400:
        assert int((off != 0).sum()) <= n + 1
    else:
        assert float(off.abs().mean()) < 0.02 + 1e-3 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize(
    "p", [torch.linspace(0, 0.07, 100), torch.rand(40, generator=torch.Generator().manual_seed(0)) / 2, [0.9, 0.8]]
)
def test_counts_of_unequal_trials_have_the_exact_mean_and_variance(p):
    p = torch.as_tensor(p, dtype=F64)
    rarer = torch.minimum(p, 1 - p) if float(p.sum()) > len(p) / 2 else p
    mean, variance = rarer.sum().reshape(1), (rarer * (1 - rarer)).sum().reshape(1)
    found = count_quantiles(uniform_grid(100_000).unsqueeze(-1), mean, variance).squeeze(-1)
    assert abs(float(found.mean() - mean)) < 1e-4
    assert abs(float(found.var() / variance) - 1) < 2e-3
    exact = torch.tensor(oracles.poisson_binomial(rarer.tolist()), dtype=F64).cumsum(-1)
    counted = torch.stack([(found <= k).double().mean() for k in range(len(rarer) + 1)])
    assert float((counted - exact).abs().max()) < 0.01


def test_counts_without_variance_equal_the_mean_and_nan_gives_nan():
    mean, variance = torch.tensor([0.0, 3.0, torch.nan], dtype=F64), torch.tensor([0.0, 0.0, torch.nan], dtype=F64)
    found = count_quantiles(uniform_grid(5).unsqueeze(-1).expand(5, 3), mean, variance)
    torch.testing.assert_close(found, mean.expand(5, 3), rtol=0, atol=0, equal_nan=True)
