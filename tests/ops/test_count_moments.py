"""Random counts of successes: scipy's binomial quantiles, and the exact distribution of unequal trials."""

import math

import oracles
import pytest
import torch
from scipy import stats

from torchcalib.ops.count_moments import count_quantiles

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
