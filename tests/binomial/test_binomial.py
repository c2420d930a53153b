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
from torchcalib.binomial import bins as bins_module
from torchcalib.binomial import critical_values, rejected_in_bins

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


@pytest.mark.extended
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


@pytest.mark.extended
@pytest.mark.parametrize("n", range(1, 61))
def test_every_decision_equals_scipys_for_every_count(n):
    grid = np.sort(np.concatenate([SPECIAL_P, np.linspace(0, 1, 4001), np.random.default_rng(n).random(2000)]))
    k, p = all_counts(n, grid)
    code = torch.randint(2**40, (n + 1, len(p)), generator=torch.Generator().manual_seed(n))  # sums that tell which
    one_bin = torch.full_like(k, len(p))
    got, want = tc.binomial_test(k, n, p), scipy_p_value(k, n, grid)
    np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-300)
    for alpha in ALPHAS:
        assert np.array_equal(got <= alpha, want <= alpha)
        decided = rejected_in_bins(p.expand(n + 1, -1), one_bin, k, torch.full_like(k, n), alpha, code)
        assert torch.equal(decided, (code * torch.tensor(want <= alpha)).sum(-1, keepdim=True))


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
    """Decide with `rejected_in_bins`, every case in a bin of its own, and with `binomial_test`."""
    k, n, p = torch.tensor(k).long(), torch.tensor(n).long(), tensor(p)
    by_bin, by_test = torch.zeros(len(p), dtype=torch.bool), torch.zeros(len(p), dtype=torch.bool)
    for level in ALPHAS:
        at = torch.tensor(alpha == level)
        ends = torch.ones(int(at.sum()), 1, dtype=torch.long)
        by_bin[at] = rejected_in_bins(p[at, None], ends, k[at, None], n[at, None], level).bool()[:, 0]
        by_test[at] = tc.binomial_test(k[at], n[at], p[at]) <= level
    return by_bin.numpy(), by_test.numpy()


def test_decisions_near_the_boundary_equal_scipys():
    k, n, p, alpha = near_the_boundary(500, 10, 0)
    rule = np.array([binomtest(int(a), int(b), c).pvalue for a, b, c in zip(k, n, p, strict=True)]) <= alpha
    assert 0.3 < rule.mean() < 0.7
    by_bin, by_test = decisions(k, n, p, alpha)
    assert np.array_equal(by_bin, rule)
    assert np.array_equal(by_test, rule)


@pytest.mark.extended
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


def test_the_far_tail_in_critical_values_does_not_grow_from_jump_to_jump():
    """S_J(p_J) of the argument in `critical_values`, for every k < J <= n and n <= 60, and the bound on its rise."""
    for n in range(2, 61):
        s = [math.log((i + 1) / (n - i)) for i in range(n)]
        for k in range(n - 1):
            j = np.arange(k + 1, n + 1)
            log_odds = np.cumsum([math.log1p(1e-7), *s[k:]])[1:] / (j - k)
            assert np.all(np.diff(log_odds) > 0)
            p = special.expit(log_odds)
            far = binom.sf(j - 1, n, p)
            assert np.all(np.diff(far) <= 1e-12 * far[:-1])
            middle = special.expit((log_odds[:-1] + log_odds[1:]) / 2)  # between jumps, where it is J's turn
            later, count = j[1:], j[1:] - k
            common, rare = (1 + 1e-7) * binom.pmf(k, n, middle), binom.pmf(later, n, middle)
            rise = later * (1 - middle) * (common - rare) / count
            assert np.all(far[1:] <= (binom.sf(later - 1, n, middle) + rise) * (1 + 1e-12))


def test_few_samples_need_the_test(monkeypatch):
    """Of samples spread over 20 standard deviations around k/n: fewer than one in 100 for levels in use."""
    tested = []

    def counting(k, n, p):
        tested.append(len(p))
        return p_value(k, n, p)

    p_value = bins_module.p_value
    monkeypatch.setattr(bins_module, "p_value", counting)
    for n, alpha in product((5, 30, 1000, 10**6, 10**8), ALPHAS):
        k = torch.unique(torch.tensor([0, 1, 2, 5, n // 10, n // 3, n // 2, n - 3, n - 1, n]))[:, None]
        angle = (k / n).double().sqrt().asin() + torch.linspace(-5, 5, 20_000, dtype=F64) / math.sqrt(n)
        p = angle.clamp(0, math.pi / 2).sin().square()
        ends, trials = torch.full_like(k, p.shape[-1]), torch.full_like(k, n)
        tested.clear()
        got = rejected_in_bins(p, ends, k, trials, alpha)
        assert sum(tested) < p.numel() / 100
        if alpha == 0.05:
            assert torch.equal(got, (tc.binomial_test(k, trials, p) <= alpha).sum(-1, keepdim=True))


def sorted_bins(shape, n_bins, seed, dtype=F64, power=1):
    """Sorted p, ends of random bins (some empty), and what outcomes drawn nearly with chance p give."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(shape, generator=generator, dtype=dtype).pow(power).sort(-1).values
    ends = torch.randint(shape[-1] + 1, (*shape[:-1], n_bins), generator=generator)
    ends[..., ::3] = ends[..., 1:2]
    ends[..., 0], ends[..., -1] = 0, shape[-1]
    ends = ends.sort(-1).values
    counts = torch.randint(4, shape, generator=generator)
    outcome = torch.rand(shape, generator=generator) < 0.97 * p + 0.01
    return p, ends, counts, outcome


def of_bins(values, ends):
    """Sums over the bins."""
    total = torch.cat((torch.zeros_like(values[..., :1]), values.cumsum(-1)), -1).gather(-1, ends)
    return total.diff(dim=-1, prepend=torch.zeros_like(total[..., :1]))


def one_by_one(p, ends, k, n, alpha, counts=None):
    """`rejected_in_bins` as a loop over scipy's test."""
    counts = torch.ones_like(p, dtype=torch.long) if counts is None else counts
    result = torch.zeros_like(ends)
    for row in np.ndindex(*p.shape[:-1]):
        start = 0
        for b, end in enumerate(ends[row].tolist()):
            for i in range(start, end):
                if n[row][b]:
                    test = binomtest(k[row][b].item(), n[row][b].item(), p[row][i].item())
                    result[row][b] += counts[row][i] * int(test.pvalue <= alpha)
            start = end
    return result


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("power", [1, 9])
def test_rejected_in_bins_equals_a_loop_over_scipy(dtype, power):
    p, ends, counts, outcome = sorted_bins((2, 3, 90), 8, power, dtype, power)
    p[..., :2], p[..., -2:] = torch.tensor([0.0, 1e-19]), torch.tensor([1.0, 1.0])
    p[0] = (p[0] * 20).round() / 20  # ties
    p[1, 0, 1:5] = torch.tensor([5e-324, 1e-310, 1e-40, 1e-19], dtype=dtype)
    for alpha in (0.05, 0.3):
        k, n = of_bins(outcome.long(), ends), of_bins(torch.ones_like(counts), ends)
        got = rejected_in_bins(p, ends, k, n, alpha)
        assert got.dtype == torch.int64
        assert 0 < got.sum() < p.numel()
        assert torch.equal(got, one_by_one(p, ends, k, n, alpha))
        k, n = of_bins(outcome * counts, ends), of_bins(counts, ends)
        assert torch.equal(rejected_in_bins(p, ends, k, n, alpha, counts), one_by_one(p, ends, k, n, alpha, counts))


@pytest.mark.parametrize("power", [1, 8, 30])
@pytest.mark.parametrize("n_bins", [3, 20, 200])
def test_rejected_in_bins_equals_the_test_of_every_sample(power, n_bins):
    """Wide and narrow bins, with many samples between two critical values and with few."""
    p, ends, counts, outcome = sorted_bins((4, 2000), n_bins, power + n_bins, F64, power)
    for weight in (torch.ones_like(counts), counts, 50 * counts):
        k, n = of_bins(outcome * weight, ends), of_bins(weight, ends)
        owner = torch.searchsorted(ends, torch.arange(2000).repeat(4, 1), right=True)
        for alpha in (0.01, 0.05):
            rejected = tc.binomial_test(k.gather(-1, owner), n.gather(-1, owner), p) <= alpha
            want = torch.zeros_like(k).scatter_add(-1, owner, rejected * weight)
            assert torch.equal(rejected_in_bins(p, ends, k, n, alpha, weight), want)


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.1])
def test_rejected_in_bins_where_the_p_value_rises_above_alpha_again(alpha):
    """Small k: thousands of samples where the decision changes back and forth, as for k = 1, n = 30 at p = 0.17."""
    for n in (5, 13, 30, 77, 1000):
        k = torch.arange(4).minimum(torch.tensor(n))[:, None]
        p = (torch.arange(1, 6001, dtype=F64) / 6000 * min(1, 14 / n)).expand(4, -1)
        for successes, q in ((k, p), (n - k, 1 - p.flip(-1))):
            ends, trials = torch.full_like(k, 6000), torch.full_like(k, n)
            want = (tc.binomial_test(successes, trials, q) <= alpha).sum(-1, keepdim=True)
            assert torch.equal(rejected_in_bins(q, ends, successes, trials, alpha), want)


def test_bins_that_pad_a_row_and_nan_beyond_the_last_end():
    p, ends, _, outcome = sorted_bins((5, 400), 6, 0)
    k, n = of_bins(outcome.long(), ends), of_bins(torch.ones_like(outcome, dtype=torch.long), ends)
    want = rejected_in_bins(p, ends, k, n, 0.05)
    assert want.sum() > 0
    nan = torch.full((5, 100), math.nan, dtype=F64)
    padded = [torch.cat((t, t[:, -1:].expand(-1, 4) * keep), -1) for t, keep in ((ends, 1), (k, 0), (n, 0))]
    got = rejected_in_bins(torch.cat((p, nan), -1), *padded, 0.05)
    assert torch.equal(got[:, :6], want)
    assert not got[:, 6:].any()
    for row in range(5):
        assert torch.equal(rejected_in_bins(p[row], ends[row], k[row], n[row], 0.05), want[row])


def test_rejected_in_bins_without_samples_or_bins():
    none = torch.zeros(3, 2, dtype=torch.long)
    assert torch.equal(rejected_in_bins(torch.zeros(3, 0), none, none, none, 0.05), none)
    assert torch.equal(rejected_in_bins(torch.rand(3, 5), none, none, none, 0.05), none)
    assert rejected_in_bins(torch.rand(3, 5), none[:, :0], none[:, :0], none[:, :0], 0.05).shape == (3, 0)
    assert rejected_in_bins(torch.rand(0, 5), none[:0], none[:0], none[:0], 0.05).shape == (0, 2)
    weightless = torch.tensor([[5, 5]]), torch.tensor([[0, 0]]), torch.tensor([[0, 0]])
    assert not rejected_in_bins(torch.rand(1, 5).sort().values, *weightless, 0.05).any()


@pytest.mark.parametrize("weighted", [False, True])
def test_rejected_in_bins_under_vmap_and_compile(weighted):
    p, ends, counts, outcome = sorted_bins((3, 200), 5, 1)
    p, counts = torch.cat((p, torch.full((3, 2), math.nan, dtype=F64)), -1), torch.cat((counts, counts[:, :2]), -1)
    weight = counts if weighted else torch.ones_like(counts)
    k, n = of_bins(outcome * weight[:, :-2], ends), of_bins(weight, ends)
    inputs = (p, ends, k, n, *((counts,) if weighted else ()))

    def call(p, ends, k, n, counts=None):
        return rejected_in_bins(p, ends, k, n, 0.05, counts)

    want = call(*inputs)
    assert 0 < want.sum() < weight.sum()
    assert torch.equal(torch.vmap(call)(*inputs), want)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(*inputs), want)
