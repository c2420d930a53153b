"""Incomplete beta function and binomial test, against 50-digit arithmetic, closed forms and scipy."""

import math
from itertools import product

import mpmath as mp
import numpy as np
import pytest
import torch
from scipy import special
from scipy.stats import binom, binomtest

import torchcalib as tc
from torchcalib.binomial import critical_values, rejects

ALPHAS = (0.001, 0.01, 0.05, 0.1)
F64 = torch.float64


def tensor(values):
    return torch.tensor(np.asarray(values), dtype=F64)


def beta_tails_50_digits(a, b, x):
    """I_x(a, b) and 1 - I_x(a, b): the continued fraction of DiDonato and Morris (1992, eq. 9) until it settles."""
    with mp.workdps(50):
        a, b, x = mp.mpf(a), mp.mpf(b), mp.mpf(x)
        mirrored = x > a / (a + b)
        if mirrored:
            a, b, x = b, a, 1 - x

        def partial_denominator(m):
            head = m + m * (b - m) * x / (a + 2 * m - 1) if m else 0
            return head + (a + m) * (a * (1 - x) - b * x + 1 + m * (2 - x)) / (a + 2 * m + 1)

        c = f = partial_denominator(0)
        d, m, change = mp.mpf(0), 0, mp.mpf(0)
        while abs(change - 1) > mp.mpf(10) ** -25:
            m += 1
            numerator = (a + m - 1) * (a + b + m - 1) * m * (b - m) * x * x / (a + 2 * m - 1) ** 2
            if numerator == 0:
                break
            d = 1 / (partial_denominator(m) + numerator * d)
            c = partial_denominator(m) + numerator / c
            change = c * d
            f *= change
        log_power = a * mp.log(x) + b * mp.log(1 - x) + mp.loggamma(a + b) - mp.loggamma(a) - mp.loggamma(b)
        tail = mp.exp(log_power) / f
        return (1 - tail, tail) if mirrored else (tail, 1 - tail)


def assert_right_to_many_digits(points, bulk=1e-10, beyond=1e-6):
    """Hold both tails to a relative error of `bulk` above 1e-15 and of `beyond` below."""
    a, b, x = (tensor(column) for column in zip(*points, strict=True))
    lower, upper = tc.betainc(a, b, x), tc.betainc(b, a, 1 - x)
    for i, point in enumerate(points):
        exact = beta_tails_50_digits(*point)
        # 1 - x is another number than x once it has been rounded; the upper tail is asked for where it has not been.
        for got, want in zip((lower[i], upper[i]), exact if point[2] >= 0.5 else exact[:1], strict=False):
            if want > 1e-300:
                error = abs(mp.mpf(got.item()) / want - 1)
                assert error < (bulk if want > 1e-15 else beyond), (point, got, want)


def beta_points(count, seed, largest):
    """a and b even in log from 0.5 to `largest`, x at up to 40 standard deviations from the mean, in logit."""
    rng = np.random.default_rng(seed)
    a, b = np.exp(rng.uniform(math.log(0.5), math.log(largest), (2, count)))
    a[::3], b[::3] = np.round(2 * a[::3]) / 2, np.round(2 * b[::3]) / 2
    w = np.log(a / b) + rng.normal(size=count) * rng.choice([0.01, 1, 5, 15], count) * np.sqrt(1 / a + 1 / b)
    x = special.expit(w)
    return [point for point in zip(a.tolist(), b.tolist(), x.tolist(), strict=True) if 0 < point[2] < 1]


def test_betainc_equals_50_digits():
    assert_right_to_many_digits(beta_points(250, 0, 1e3) + beta_points(60, 1, 1e8), bulk=1e-12, beyond=1e-11)


def test_betainc_equals_50_digits_at_the_largest_parameters():
    at = [(a, b, a / (a + b)) for a, b in product((0.5, 1e8), (0.5, 1e4, 1e8))]
    points = [
        (a, b, special.expit(special.logit(x) + z * math.sqrt(1 / a + 1 / b))) for a, b, x in at for z in (-8, 0, 6)
    ]
    assert_right_to_many_digits(points, bulk=1e-12, beyond=1e-11)


@pytest.mark.slow
def test_betainc_equals_50_digits_widely():
    assert_right_to_many_digits(beta_points(3000, 2, 1e2) + beta_points(3000, 3, 1e8), bulk=1e-12, beyond=1e-11)


def test_betainc_equals_scipy():
    a, b, x = (tensor(column) for column in zip(*beta_points(20_000, 4, 3e3), strict=True))
    got, want = tc.betainc(a, b, x).numpy(), special.betainc(a.numpy(), b.numpy(), x.numpy())
    np.testing.assert_allclose(got[want > 1e-290], want[want > 1e-290], rtol=1e-10)  # scipy's own error is 1e-11 here


def test_betainc_closed_forms():
    x = torch.linspace(0, 1, 201, dtype=F64)
    torch.testing.assert_close(tc.betainc(1, 1, x), x, rtol=1e-13, atol=0)
    torch.testing.assert_close(tc.betainc(7.5, 1, x), x**7.5, rtol=1e-13, atol=0)
    torch.testing.assert_close(tc.betainc(1, 7.5, x), -torch.expm1(7.5 * torch.log1p(-x)), rtol=1e-13, atol=0)
    torch.testing.assert_close(tc.betainc(0.5, 0.5, x), x.sqrt().asin() * 2 / math.pi, rtol=2e-13, atol=0)
    torch.testing.assert_close(tc.betainc(2, 3, x), 6 * x**2 - 8 * x**3 + 3 * x**4, rtol=1e-12, atol=0)
    torch.testing.assert_close(tc.betainc(x + 3, x + 3, torch.full_like(x, 0.5)), torch.full_like(x, 0.5))


def test_betainc_at_the_ends():
    ends, near = tensor([0.0, 1.0]), [1e-300, 1e-19, 1 - 1e-16]
    for a, b in product((0.5, 1.0, 3.0, 1e8), repeat=2):
        assert tc.betainc(a, b, ends).tolist() == [0, 1]
        want = [float(beta_tails_50_digits(a, b, x)[0]) for x in near]
        np.testing.assert_allclose(tc.betainc(a, b, tensor(near)), want, rtol=1e-12)
    denormal = tensor([5e-324, 1e-310])
    torch.testing.assert_close(tc.betainc(0.5, 0.5, denormal), denormal.sqrt() * 2 / math.pi, rtol=1e-12, atol=0)


def test_betainc_of_what_has_no_value_is_nan():
    nan = math.nan
    for a, b, x in [(nan, 1, 0.5), (1, nan, 0.5), (1, 1, nan), (0, 1, 0.5), (1, -1, 0.5), (1, 1, -0.1), (1, 1, 1.1),
                    (math.inf, 1, 0.5), (0, 1, 0.0), (1, 0, 1.0)]:  # fmt: skip
        assert tc.betainc(a, b, tensor(x)).isnan(), (a, b, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_betainc_broadcasts_and_follows_the_dtype_of_x(dtype):
    x = torch.rand(3, 1, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    a = torch.tensor([[1], [2], [3], [4]])
    got = tc.betainc(a, 2.5, x)
    assert got.dtype == dtype
    assert got.shape == (3, 4, 5)
    want = special.betainc(a.numpy(), 2.5, x.double().numpy())
    torch.testing.assert_close(got, torch.tensor(want).to(dtype))
    assert tc.betainc(a[:0], 2.5, x[:1]).shape == (1, 0, 5)


def test_betainc_gradcheck():
    x = tensor([0.01, 0.2, 0.5, 0.9]).requires_grad_()
    a, b = tensor([[0.5], [1.0], [2.0], [30.0]]), tensor([3.0, 0.7, 1.0, 40.0])
    assert torch.autograd.gradcheck(lambda t: tc.betainc(a, b, t), x)
    assert torch.autograd.gradgradcheck(lambda t: tc.betainc(a, b, t), x)


def test_betainc_gradient_equals_50_digits():
    for a, b, x in beta_points(60, 5, 1e8):
        t = tensor(x).requires_grad_()
        tc.betainc(a, b, t).backward()
        with mp.workdps(50):
            a, b, x = mp.mpf(a), mp.mpf(b), mp.mpf(x)
            log_beta = mp.loggamma(a) + mp.loggamma(b) - mp.loggamma(a + b)
            want = mp.exp((a - 1) * mp.log(x) + (b - 1) * mp.log(1 - x) - log_beta)
        assert want < 1e-290 or abs(t.grad.item() / want - 1) < 1e-11


def test_betainc_gradient_at_the_ends_and_in_a_and_b():
    x = tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).requires_grad_()
    a, b = tensor([0.5, 1, 2, 3, 3, 3]).requires_grad_(), tensor([3, 3, 3, 0.5, 1, 2])
    tc.betainc(a, b, x).sum().backward()
    assert x.grad.tolist() == [math.inf, 3, 0, math.inf, 3, 0]
    assert a.grad is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo itself
def test_betainc_under_vmap_and_compile():
    x, a = torch.rand(4, 6, generator=torch.Generator().manual_seed(0), dtype=F64), torch.arange(1, 5, dtype=F64)
    want = tc.betainc(a[:, None], 2, x)
    torch.testing.assert_close(torch.vmap(lambda s, t: tc.betainc(s, 2, t))(a, x), want, rtol=1e-14, atol=0)
    per_sample = torch.vmap(torch.func.grad(lambda t: tc.betainc(3, 2, t)))(x[0])
    torch.testing.assert_close(per_sample, 12 * x[0] ** 2 * (1 - x[0]))
    compiled = torch.compile(lambda t: tc.betainc(a[:, None], 2, t), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), want, rtol=1e-14, atol=0)


def test_wrong_types_raise():
    half = tensor(0.5)
    for call, message in [
        (lambda: tc.betainc(1, 1, 0.5), "`x` must be a floating tensor, got float"),
        (lambda: tc.betainc(1, 1, torch.tensor(1)), "`x` must be a floating tensor, got a tensor of torch.int64"),
        (lambda: tc.betainc("1", 1, half), "`a` must be a real tensor or number, got str"),
        (
            lambda: tc.binomial_test(half, 3, half),
            "`k` must be an integer tensor or an int, got a tensor of torch.float64",
        ),
        (lambda: tc.binomial_test(1, 3.0, half), "`n` must be an integer tensor or an int, got float"),
        (lambda: tc.binomial_test(1, torch.tensor(True), half), "`n` must be .* torch.bool"),
        (
            lambda: tc.binomial_test(1, 3, half + 1j),
            "`p` must be a real tensor or number, got a tensor of torch.complex128",
        ),
    ]:
        with pytest.raises(TypeError, match=message):
            call()


# ---- the test of one count


def scipy_p_value(k, n, p):
    """The rule of scipy.stats.binomtest over arrays, from scipy's distribution; shares no code with the package."""
    k, n, p = np.broadcast_arrays(np.asarray(k, float), np.asarray(n, float), np.asarray(p, float))
    d, mean = binom.pmf(k, n, p) * (1 + 1e-7), p * n
    below = k < mean
    # `inner` is more probable than d or lies before the search, `outer` is not or lies past all outcomes
    inner = np.where(below, np.ceil(mean) - 1, np.floor(mean) + 1)
    outer = np.where(below, n + 1, -1.0)
    for _ in range(40):
        middle = np.trunc((inner + outer) / 2)
        common, open_ = binom.pmf(middle, n, p) > d, abs(inner - outer) > 1
        inner, outer = np.where(common & open_, middle, inner), np.where(~common & open_, middle, outer)
    low = np.where(below, k, outer)
    high = np.where(below, outer, k)
    return np.where(k == mean, 1.0, np.minimum(1, binom.cdf(low, n, p) + binom.sf(high - 1, n, p)))


SPECIAL_P = (0.0, 1.0, 5e-324, 1e-310, 1e-19, 1 - 1e-16, 0.5, 1 / 3, 2 / 3, 0.9, 0.95, 0.99)


def all_counts(n, p):
    """Every k of n trials against every p: k `(n+1, 1)`, p `(P,)`."""
    return torch.arange(n + 1)[:, None], tensor(p)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 12])
def test_binomial_test_equals_scipy_for_every_count(n):
    grid = [*SPECIAL_P, *np.linspace(0.005, 0.995, 67)]
    k, p = all_counts(n, grid)
    got = tc.binomial_test(k, n, p)
    want = np.array([[binomtest(i, n, q).pvalue for q in grid] for i in range(n + 1)])
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-300)
    for alpha in ALPHAS:
        assert np.array_equal(got <= alpha, want <= alpha)


def test_the_array_form_of_scipys_rule_is_scipys():
    rng = np.random.default_rng(0)
    n = np.round(np.exp(rng.uniform(0, math.log(1e6), 400)))
    k = np.floor(rng.random(400) * (n + 1))
    p = np.clip(k / n + rng.normal(size=400) * 1.5 / np.sqrt(n), 0, 1)
    want = [binomtest(int(a), int(b), c).pvalue for a, b, c in zip(k, n, p, strict=True)]
    assert np.array_equal(scipy_p_value(k, n, p), want)


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 61))
def test_every_decision_equals_scipys_for_every_count(n):
    grid = np.concatenate([SPECIAL_P, np.linspace(0, 1, 4001), np.random.default_rng(n).random(2000)])
    k, p = all_counts(n, grid)
    got, want = tc.binomial_test(k, n, p), scipy_p_value(k, n, grid)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-300)
    for alpha in ALPHAS:
        assert np.array_equal(got <= alpha, want <= alpha)
        bins = torch.arange(n + 1)
        decided = rejects(p.expand(n + 1, -1).reshape(-1), bins.repeat_interleave(len(p)), bins, bins * 0 + n, alpha)
        assert np.array_equal(decided.reshape(n + 1, -1), want <= alpha)


def test_binomial_test_equals_50_digits():
    """Where n is large scipy is off by more: 3e-11 at a million."""
    rng = np.random.default_rng(0)
    for n in (50, 10**4, 10**6, 10**8):
        for z in rng.normal(size=8) * 2.5:
            q = 10 ** rng.uniform(-0.2 * math.log10(n), -0.3)
            k = int(np.clip(round(n * q), 0, n))
            p = float(np.clip(q + z * math.sqrt(q * (1 - q) / n), 0, 1))
            got = tc.binomial_test(k, n, p).item()
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


def test_binomial_test_is_not_monotone_in_p_where_scipy_is_not():
    p = tensor([0.170, 0.177])
    want = [binomtest(1, 30, q).pvalue for q in p.tolist()]
    assert want[0] < 0.05 < want[1]
    torch.testing.assert_close(tc.binomial_test(1, 30, p), tensor(want), rtol=1e-13, atol=0)


def test_binomial_test_of_what_has_no_value_is_nan():
    k, p = torch.tensor([-1, 4, 1, 1, 1, 1]), tensor([0.5, 0.5, -0.1, 1.1, math.nan, 0.5])
    assert tc.binomial_test(k, 3, p).isnan().tolist() == [True] * 5 + [False]
    assert tc.binomial_test(0, 0, 0.3) == 1


def test_binomial_test_under_vmap_and_compile():
    k, n, p = torch.arange(8), torch.full((8,), 9), torch.rand(8, generator=torch.Generator().manual_seed(0), dtype=F64)
    want = tc.binomial_test(k, n, p)
    torch.testing.assert_close(torch.vmap(tc.binomial_test)(k, n, p), want, rtol=1e-12, atol=0)
    compiled = torch.compile(tc.binomial_test, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(k, n, p), want, rtol=1e-12, atol=0)


# ---- decisions


def near_the_boundary(count, per_boundary, seed, largest=1e6):
    """Draw (k, n, p, alpha): p at relative distances of 1e-12 to 1e-2 from where the decision changes."""
    rng = np.random.default_rng(seed)
    n = np.round(np.exp(rng.uniform(0, math.log(largest), count)))
    k = np.where(
        rng.random(count) < 0.7, np.floor(rng.random(count) * (n + 1)), np.minimum(n, rng.integers(0, 4, count))
    )
    k = np.where(rng.random(count) < 0.5, k, n - k)
    alpha = rng.choice(ALPHAS, count)
    up = (rng.random(count) < 0.5) & (k < n) | (k == 0)
    kept, rejected = k / n, np.where(up, 1.0, 0.0)
    for _ in range(60):
        # Halve in p, or where p or 1 - p is tiny in its logarithm: what matters is to come close to some change.
        middle = (kept + rejected) / 2
        keep = scipy_p_value(k, n, middle) > alpha
        kept, rejected = np.where(keep, middle, kept), np.where(keep, rejected, middle)
    edge = np.repeat(np.minimum(kept, 1 - kept), per_boundary)
    p = np.repeat(kept, per_boundary) + edge * rng.choice([-1, 1], len(edge)) * 10 ** rng.uniform(-12, -2, len(edge))
    return *(np.repeat(t, per_boundary) for t in (k, n)), np.clip(p, 0, 1), np.repeat(alpha, per_boundary)


def decisions(k, n, p, alpha):
    """Decide with `rejects`, every case in a bin of its own, and with `binomial_test`."""
    k, n, p = torch.tensor(k).long(), torch.tensor(n).long(), tensor(p)
    by_bin, by_test = torch.zeros(len(p), dtype=torch.bool), torch.zeros(len(p), dtype=torch.bool)
    for level in ALPHAS:
        at = torch.tensor(alpha == level)
        by_bin[at] = rejects(p[at], torch.arange(int(at.sum())), k[at], n[at], level)
        by_test[at] = tc.binomial_test(k[at], n[at], p[at]) <= level
    return by_bin.numpy(), by_test.numpy()


def test_decisions_near_the_boundary_equal_scipys():
    k, n, p, alpha = near_the_boundary(500, 10, 0)
    rule = np.array([binomtest(int(a), int(b), c).pvalue for a, b, c in zip(k, n, p, strict=True)]) <= alpha
    assert 0.3 < rule.mean() < 0.7
    by_bin, by_test = decisions(k, n, p, alpha)
    assert np.array_equal(by_bin, rule)
    assert np.array_equal(by_test, rule)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_million_decisions_near_the_boundary_equal_scipys(seed):
    k, n, p, alpha = near_the_boundary(5_000, 20, seed)
    rule = scipy_p_value(k, n, p) <= alpha
    by_bin, by_test = decisions(k, n, p, alpha)
    assert np.array_equal(by_bin, rule)
    assert np.array_equal(by_test, rule)


@pytest.mark.parametrize("alpha", [*ALPHAS, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 2, 7, 30, 300])
def test_what_critical_values_promise_holds(n, alpha):
    """The argument in `critical_values`, against the test itself over a fine grid."""
    k = torch.arange(0, n + 1, max(1, n // 30))
    known = critical_values(k, torch.tensor(n), alpha)
    p = torch.cat((tensor(SPECIAL_P), torch.linspace(0, 1, 1501, dtype=F64)))
    rejected = tc.binomial_test(k[:, None], n, p) <= alpha
    low, start, end, high = (t[:, None] for t in known)
    assert rejected[(p <= low) | (p >= high)].all()
    assert not rejected[(p >= start) & (p <= end)].any()


def test_the_ratio_in_critical_values_does_not_grow():
    """log r_J = L_J - s_J of the argument in `critical_values`, for every k < J < n and n <= 80."""
    for n in range(2, 81):
        s = [math.log((i + 1) / (n - i)) for i in range(n)]
        for k in range(n - 1):
            sums = np.cumsum([math.log1p(1e-7), *s[k:]])[1:]  # log c + s_k + ... + s_{J-1}
            log_r = sums[:-1] / np.arange(1, n - k) - s[k + 1 :]
            assert np.all(np.diff(log_r) < 1e-12)


def test_few_samples_need_the_test():
    """The slivers between critical values are under a third of a standard deviation, for levels in use."""
    for n, alpha in product((30, 1000, 10**6, 10**8), ALPHAS):
        k = torch.tensor([0, 1, 2, 5, n // 10, n // 3, n // 2, n - 3, n - 1, n])
        known = [t.clamp(0, 1).sqrt().asin() * 2 * math.sqrt(n) for t in critical_values(k, torch.tensor(n), alpha)]
        assert (known[3] - known[2]).max() < 1 / 3
        assert (known[1] - known[0]).max() < 1 / 3


def test_rejects_is_the_test_for_every_sample_of_a_batch_of_bins():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 2, 4000, generator=generator)
    p[..., :3] = torch.tensor([0.0, 1.0, math.nan])
    index = (p.nan_to_num(0.5) * 6).long().clamp(max=5)
    n = torch.zeros(3, 2, 7, dtype=torch.long).scatter_add(-1, index, torch.ones_like(index))  # the last bin is empty
    outcome = torch.rand(p.shape, generator=generator).lt(p).long()
    k = torch.zeros_like(n).scatter_add(-1, index, outcome)
    want = tc.binomial_test(k.gather(-1, index), n.gather(-1, index), p) <= 0.05
    got = rejects(p, index, k, n, 0.05)
    assert got.dtype == torch.bool
    assert 0 < got.double().mean() < 1
    assert torch.equal(got, want)
    assert torch.equal(torch.vmap(lambda *t: rejects(*t, 0.05))(p, index, k, n), want)
    compiled = torch.compile(lambda *t: rejects(*t, 0.05), fullgraph=True, backend="eager")
    assert torch.equal(compiled(p, index, k, n), want)
