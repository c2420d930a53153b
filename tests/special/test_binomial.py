"""Exact two-sided binomial tests: of one count, and decisions for bins of sorted samples by critical values."""

import math

import mpmath as mp
import numpy as np
import pytest
import torch
from helpers.binomial import ALPHAS, SPECIAL_P, tensor
from oracles.binomial import beta_tails_50_digits, scipy_p_value
from scipy.stats import binomtest

from torchcalib.special import binomial as bins_module
from torchcalib.special import binomial_test
from torchcalib.special.binomial import critical_values, rejected_in_bins

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


# Bins of sorted samples, and the critical values that determine most decisions


def near_the_boundary(count, per_boundary, seed):
    """Return (k, n, p, alpha) with p at relative distances of 1e-10 to 1e-2 from a change of the decision.

    An error e of the logarithm of a probability or p-value moves the change by about e in log-odds. The errors of scipy
    are 3e-11 at n = 1e6, so that rounding would decide at smaller distances.
    """
    rng = np.random.default_rng(seed)
    n = np.round(np.exp(rng.uniform(0, math.log(1e6), count)))
    k = np.where(
        rng.random(count) < 0.7, np.floor(rng.random(count) * (n + 1)), np.minimum(n, rng.integers(0, 4, count))
    )
    k = np.where(rng.random(count) < 0.5, k, n - k)
    alpha = rng.choice(ALPHAS, count)
    up = (rng.random(count) < 0.5) & (k < n) | (k == 0)
    kept, rejected = k / n, np.where(up, 1.0, 0.0)
    for _ in range(60):
        # Bisection in p finds one of possibly several changes of the decision.
        middle = (kept + rejected) / 2
        keep = scipy_p_value(k, n, middle) > alpha
        kept, rejected = np.where(keep, middle, kept), np.where(keep, rejected, middle)
    edge = np.repeat(np.minimum(kept, 1 - kept), per_boundary)
    p = np.repeat(kept, per_boundary) + edge * rng.choice([-1, 1], len(edge)) * 10 ** rng.uniform(-10, -2, len(edge))
    return *(np.repeat(t, per_boundary) for t in (k, n)), np.clip(p, 0, 1), np.repeat(alpha, per_boundary)


def test_decisions_near_the_boundary_equal_scipy():
    k, n, p, alpha = near_the_boundary(100, 10, 0)
    rule = np.array([binomtest(int(a), int(b), c).pvalue for a, b, c in zip(k, n, p, strict=True)]) <= alpha
    assert 0.3 < rule.mean() < 0.7
    for level in ALPHAS:  # every case in a separate bin
        at = alpha == level
        successes, trials, q = torch.tensor(k[at]).long(), torch.tensor(n[at]).long(), tensor(p[at])
        ends = torch.ones(len(q), 1, dtype=torch.long)
        by_bin = rejected_in_bins(q[:, None], ends, successes[:, None], trials[:, None], level)[:, 0]
        assert np.array_equal(by_bin.bool(), rule[at])
        assert np.array_equal(binomial_test(successes, trials, q) <= level, rule[at])


@pytest.mark.parametrize("n", [1, 2, 7, 30, 300])
def test_decisions_between_critical_values_equal_the_test(n):
    """Compare the derivation in `critical_values` with the test on a fine grid."""
    p = torch.cat((tensor(SPECIAL_P), torch.linspace(0, 1, 1501, dtype=F64)))
    k = torch.arange(0, n + 1, max(1, n // 30))
    p_value = binomial_test(k[:, None], n, p)
    for alpha in (*ALPHAS, 0.5, 0.9):
        low, start, end, high = (t[:, None] for t in critical_values(k, torch.tensor(n), alpha))
        rejected = p_value <= alpha
        assert rejected[(p <= low) | (p >= high)].all()
        assert not rejected[(p >= start) & (p <= end)].any()


@pytest.mark.parametrize("n", [30, 10**6, *(pytest.param(n, marks=pytest.mark.extended) for n in (5, 1000, 10**8))])
def test_most_samples_are_decided_by_critical_values(n, monkeypatch):
    """For common significance levels, fewer than 1 % of samples within 10 standard deviations of k/n need the test."""
    tested = []

    def counting(k, n, p):
        tested.append(len(p))
        return p_value(k, n, p)

    p_value = bins_module.p_value
    monkeypatch.setattr(bins_module, "p_value", counting)
    for alpha in ALPHAS:
        k = torch.unique(torch.tensor([0, 1, 2, 5, n // 10, n // 3, n // 2, n - 3, n - 1, n]))[:, None]
        angle = (k / n).double().sqrt().asin() + torch.linspace(-5, 5, 20_000, dtype=F64) / math.sqrt(n)
        p = angle.clamp(0, math.pi / 2).sin().square()
        ends, trials = torch.full_like(k, p.shape[-1]), torch.full_like(k, n)
        tested.clear()
        got = rejected_in_bins(p, ends, k, trials, alpha)
        assert sum(tested) < p.numel() / 100
        if alpha == 0.05:
            assert torch.equal(got, (binomial_test(k, trials, p) <= alpha).sum(-1, keepdim=True))


def sorted_bins(shape, n_bins, seed, dtype=F64, power=1):
    """Return sorted p, ends of random bins (some empty), counts, and outcomes with probabilities of about p."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(shape, generator=generator, dtype=dtype).pow(power).sort(-1).values
    ends = torch.randint(shape[-1] + 1, (*shape[:-1], n_bins), generator=generator)
    ends[..., ::3] = ends[..., 1:2]
    ends[..., 0], ends[..., -1] = 0, shape[-1]
    ends = ends.sort(-1).values
    counts = torch.randint(4, shape, generator=generator)
    outcome = torch.rand(shape, generator=generator) < 0.97 * p + 0.01
    return p, ends, counts, outcome


def sums_of(values, ends):
    total = torch.cat((torch.zeros_like(values[..., :1]), values.cumsum(-1)), -1).gather(-1, ends)
    return total.diff(dim=-1, prepend=torch.zeros_like(total[..., :1]))


def scipy_p_values(k, n, p):
    """Return the p-values of scipy, and 1 for no trials."""
    cases = zip(k.flatten().tolist(), n.flatten().tolist(), p.flatten().tolist(), strict=True)
    return tensor([binomtest(a, b, q).pvalue if b else 1 for a, b, q in cases]).view(p.shape)


# Wide and narrow bins, with many and with few samples between two critical values
SAMPLES = [((2, 3, 90), 8, dtype, power, scipy_p_values) for dtype, power in ((torch.float32, 1), (F64, 9))]
SAMPLES += [((4, 2000), n_bins, F64, power, binomial_test) for power, n_bins in ((1, 200), (8, 3), (30, 20))]


@pytest.mark.parametrize(("shape", "n_bins", "dtype", "power", "test"), SAMPLES)
def test_rejected_in_bins_equals_a_test_of_every_sample(shape, n_bins, dtype, power, test):
    p, ends, counts, outcome = sorted_bins(shape, n_bins, power + n_bins, dtype, power)
    if test is scipy_p_values:
        p[..., :2], p[..., -2:] = torch.tensor([0.0, 1e-19]), torch.tensor([1.0, 1.0])
        p[0] = (p[0] * 20).round() / 20  # ties
        p[1, 0, 1:5] = torch.tensor([5e-324, 1e-310, 1e-40, 1e-19], dtype=dtype)
    owner = torch.searchsorted(ends, torch.arange(p.shape[-1]).expand(p.shape).contiguous(), right=True)
    low, high = (0.05, 0.3) if test is scipy_p_values else (0.01, 0.05)
    for alpha, weight in ((low, torch.ones_like(counts)), (high, counts), (low, 50 * counts)):
        k, n = sums_of(outcome * weight, ends), sums_of(weight, ends)
        rejected = test(k.gather(-1, owner), n.gather(-1, owner), p) <= alpha
        want = torch.zeros_like(k).scatter_add(-1, owner, rejected * weight)
        assert 0 < want.sum() < weight.sum()
        found = rejected_in_bins(p, ends, k, n, alpha, None if (weight == 1).all() else weight)
        assert found.dtype == torch.int64
        assert torch.equal(found, want)


@pytest.mark.parametrize("n", [5, 30])
def test_rejected_in_bins_where_the_p_value_rises_above_alpha_again(n):
    """For small k the decision changes repeatedly among thousands of samples, as for k = 1, n = 30 at p = 0.17."""
    for alpha in (0.01, 0.05):
        k = torch.arange(4).minimum(torch.tensor(n))[:, None]
        p = (torch.arange(1, 6001, dtype=F64) / 6000 * min(1, 14 / n)).expand(4, -1)
        for successes, q in ((k, p), (n - k, 1 - p.flip(-1))):
            ends, trials = torch.full_like(k, 6000), torch.full_like(k, n)
            want = (binomial_test(successes, trials, q) <= alpha).sum(-1, keepdim=True)
            assert torch.equal(rejected_in_bins(q, ends, successes, trials, alpha), want)


@pytest.mark.parametrize("weighted", [False, True])
def test_rejected_in_bins_under_vmap_and_compile_with_padded_rows(weighted):
    """Empty bins and NaN beyond the last end have no rejected samples."""
    p, ends, counts, outcome = sorted_bins((3, 200), 5, 1)
    weight = counts if weighted else torch.ones_like(counts)
    k, n = sums_of(outcome * weight, ends), sums_of(weight, ends)
    alone = [rejected_in_bins(p[i], ends[i], k[i], n[i], 0.05, counts[i] if weighted else None) for i in range(3)]
    nan = torch.full((3, 2), math.nan, dtype=F64)
    inputs = [torch.cat((t, t[:, -1:].expand(-1, 4) * keep), -1) for t, keep in ((ends, 1), (k, 0), (n, 0))]
    inputs = [torch.cat((p, nan), -1), *inputs, *([torch.cat((counts, counts[:, :2]), -1)] if weighted else [])]

    def call(p, ends, k, n, counts=None):
        return rejected_in_bins(p, ends, k, n, 0.05, counts)

    want = torch.nn.functional.pad(torch.stack(alone), (0, 4))
    assert 0 < want.sum() < weight.sum()
    compiled = [torch.compile(call, fullgraph=True, backend="eager")] * weighted
    for mode in (call, torch.vmap(call), *compiled):
        assert torch.equal(mode(*inputs), want)


def test_rejected_in_bins_without_samples_or_bins():
    none = torch.zeros(3, 2, dtype=torch.long)
    for p, columns in ((torch.zeros(3, 0), none), (torch.rand(3, 5), none), (torch.rand(3, 5), none[:, :0]),
                       (torch.rand(0, 5), none[:0])):  # fmt: skip
        assert torch.equal(rejected_in_bins(p, columns, columns, columns, 0.05), columns)
    weightless = torch.tensor([[5, 5]]), torch.tensor([[0, 0]]), torch.tensor([[0, 0]])
    assert not rejected_in_bins(torch.rand(1, 5).sort().values, *weightless, 0.05).any()
