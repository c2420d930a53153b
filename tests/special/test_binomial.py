"""Exact two-sided binomial test of one count, compared with scipy and 50-digit arithmetic."""

import math

import mpmath as mp
import numpy as np
import torch
from helpers.binomial import SPECIAL_P, tensor
from oracles.binomial import beta_tails_50_digits
from scipy.stats import binomtest

from torchcalib.special import binomial_test

F64 = torch.float64


def test_binomial_test_equals_scipy_for_every_count():
    grid = [*SPECIAL_P, *np.linspace(0.005, 0.995, 67)]
    for n in (1, 2, 3, 5, 8, 12):
        got = binomial_test(torch.arange(n + 1)[:, None], n, tensor(grid)).numpy()
        want = np.array([[binomtest(i, n, q).pvalue for q in grid] for i in range(n + 1)])
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-300)


def test_binomial_test_equals_50_digits():
    """For large n, scipy has the larger error: 3e-11 for a million trials."""
    rng = np.random.default_rng(0)
    for n in (50, 10**4, 10**6, 10**8):
        for z in rng.normal(size=8) * 2.5:
            q = 10 ** rng.uniform(-0.2 * math.log10(n), -0.3)
            k = int(np.clip(round(n * q), 0, n))
            p = float(np.clip(q + z * math.sqrt(q * (1 - q) / n), 0, 1))
            got = binomial_test(k, n, p).item()
            with mp.workdps(50):

                def log_pmf(j, n=n, p=p):
                    log_count = mp.loggamma(n + 1) - mp.loggamma(j + 1) - mp.loggamma(n - j + 1)
                    return log_count + j * mp.log(mp.mpf(p)) + (n - j) * mp.log(1 - mp.mpf(p))

                limit, step = log_pmf(k) + mp.log(1 + mp.mpf("1e-7")), 1 if k < n * p else -1
                inner, outer = math.ceil(n * p) - step, (n + 1 if step > 0 else -1)
                while abs(outer - inner) > 1:
                    middle = (inner + outer) // 2
                    inner, outer = (middle, outer) if log_pmf(middle) > limit else (inner, middle)
            low, high = (k, outer) if step > 0 else (outer, k)
            below = beta_tails_50_digits(low + 1, n - low, p)[1] if low >= 0 else 0
            above = beta_tails_50_digits(high, n - high + 1, p)[0] if high <= n else 0
            assert abs(got / min(1, below + above) - 1) < 1e-12, (k, n, p)


def test_binomial_test_is_nan_for_invalid_arguments():
    k, p = torch.tensor([-1, 4, 1, 1, 1, 1]), tensor([0.5, 0.5, -0.1, 1.1, math.nan, 0.5])
    assert binomial_test(k, 3, p).isnan().tolist() == [True] * 5 + [False]
    assert binomial_test(0, 0, 0.3) == 1


def test_binomial_test_under_vmap_and_compile():
    k, n, p = torch.arange(8), torch.full((8,), 9), torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=F64)
    want = binomial_test(k, n, p)
    for transform in (torch.vmap, lambda call: torch.compile(call, fullgraph=True, backend="eager")):
        torch.testing.assert_close(transform(binomial_test)(k, n, p), want, rtol=1e-12, atol=0)
