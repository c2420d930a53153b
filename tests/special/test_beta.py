"""Incomplete beta function, compared with 50-digit arithmetic and closed forms."""

import math
from itertools import product

import mpmath as mp
import numpy as np
import pytest
import torch
from helpers.binomial import tensor
from oracles.binomial import beta_tail_by_series, beta_tails_50_digits, log_beta_density
from scipy import special

from torchcalib.special import betainc

F64 = torch.float64


def beta_points(count, seed, largest):
    """Return a and b, log-uniform from 0.5 to `largest`, and x within 40 standard deviations of the mean, in logit."""
    rng = np.random.default_rng(seed)
    a, b = np.exp(rng.uniform(math.log(0.5), math.log(largest), (2, count)))
    a[::3], b[::3] = np.round(2 * a[::3]) / 2, np.round(2 * b[::3]) / 2
    w = np.log(a / b) + rng.normal(size=count) * rng.choice([0.01, 1, 5, 15], count) * np.sqrt(1 / a + 1 / b)
    x = special.expit(w)
    return [point for point in zip(a.tolist(), b.tolist(), x.tolist(), strict=True) if 0 < point[2] < 1]


def small_points(count, seed):
    """Return a and b with the smaller one in [1e-6, 1/2] and the other up to 1e8, and x from 1e-300 to 1."""
    rng = np.random.default_rng(seed)
    points = []
    for _ in range(count):
        a, b = 10 ** rng.uniform(-6, math.log10(0.5)), 10 ** rng.uniform(-6, rng.choice([0, 2, 8]))
        about_the_mean = 10 ** rng.uniform(-3, 1.5) / (1 + b)
        near_one = 1 - 10 ** rng.uniform(-15.9, 0)
        x = rng.choice([rng.random(), 10 ** rng.uniform(-300, 0), near_one, about_the_mean])
        if 0 < x < 1 and (b <= 1 or b * x <= 40):
            points.append((a, b, float(x)))
            points.extend([(b, a, float(1 - x))] if x >= 0.5 else [])
    return [*points, *((b, a, 1 - x) for a, b, x in points if x > 0.01)]


def tails_of_small_parameters(a, b, x):
    """Return both tails to 50 digits, by the series on the side where it converges."""
    with mp.workdps(80):
        if x <= 0.5 and b * x <= 40:
            lower = beta_tail_by_series(a, b, x)
            return lower, 1 - lower
        upper = beta_tail_by_series(b, a, 1 - mp.mpf(x))
        return 1 - upper, upper


def assert_digits(points, tails, of_tiny, of_slopes):
    """Check values to a relative error of 1e-12 above 1e-15 and `of_tiny` below, and gradients to `of_slopes`."""
    a, b, x = (tensor(column) for column in zip(*points, strict=True))
    x.requires_grad_()
    lower, upper = betainc(a, b, x), betainc(b, a, 1 - x)
    (slopes,) = torch.autograd.grad(lower.sum(), x)
    assert lower.isfinite().all()
    for (a, b, x), *found, slope in zip(points, lower.tolist(), upper.tolist(), slopes.tolist(), strict=True):
        # Test the upper tail only for x >= 1/2, where 1 - x is exact.
        for got, want in zip(found, tails(a, b, x)[: 2 if x >= 0.5 else 1], strict=False):
            assert want < 1e-300 or abs(mp.mpf(got) / want - 1) < (1e-12 if want > 1e-15 else of_tiny), (a, b, x)
        with mp.workdps(50):
            log_slope = log_beta_density(mp.mpf(a), mp.mpf(b), mp.mpf(x)) - mp.log(x) - mp.log(1 - mp.mpf(x))
            want = mp.exp(log_slope)
        assert not 1e-290 < want < 1e290 or abs(mp.mpf(slope) / want - 1) < of_slopes, (a, b, x)


def test_betainc_and_its_gradient_equal_50_digits():
    points = [*beta_points(120, 0, 1e3), *beta_points(40, 1, 1e8)]
    for a, b, z in product((0.5, 1e8), (0.5, 1e4, 1e8), (-8, 0, 6)):  # z is in standard deviations from the mean
        points.append((a, b, special.expit(special.logit(a / (a + b)) + z * math.sqrt(1 / a + 1 / b))))
    assert_digits(points, beta_tails_50_digits, of_tiny=1e-11, of_slopes=1e-11)


def test_betainc_of_small_parameters_and_its_gradient_equal_50_digits():
    """Rounding of the powers x^a (1-x)^b above 1e-300 costs 690 * 2^-53 = 8e-14; the gradient has two of them."""
    # The first row is from Boost's table ibeta_large, for which betainc returned NaN.
    points = [
        (1e-5, 0.02, 0.2),
        (1e-6, 1e-6, 1e-300),
        (1e-6, 1.0, 1 - 1e-10),
        (1.0, 1e-6, 1 - 1e-10),
        (30.0, 1e-3, 0.7),
    ]
    for a, b, x in points:
        with mp.workdps(60):
            by_mpmath = mp.betainc(a, b, 0, x, regularized=True)
        assert abs(tails_of_small_parameters(a, b, x)[0] / by_mpmath - 1) < 1e-15
    assert_digits([*points, *small_points(200, 6)], tails_of_small_parameters, of_tiny=1e-12, of_slopes=1e-12)


def test_betainc_of_the_smallest_parameters_and_x_is_the_limit():
    """For a = b -> 0 half of the probability is at each end; for a -> 0 alone all of it is at 0."""
    least = 5e-324
    limits = [(least, least, 0.5, 0.5), (least, 3, least, 1), (least, least, least, 0.5), (3, least, 0.3, 0)]
    for a, b, x, want in limits:
        t = tensor(x).requires_grad_()
        value = betainc(a, b, t)
        assert value.item() == pytest.approx(want, rel=1e-11, abs=1e-300)
        assert not torch.autograd.grad(value, t)[0].isnan()


def test_betainc_closed_forms():
    x = torch.linspace(0, 1, 201, dtype=F64)
    forms = [(1, 1, x), (7.5, 1, x**7.5), (1, 7.5, -torch.expm1(7.5 * torch.log1p(-x)))]
    forms += [(0.5, 0.5, x.sqrt().asin() * 2 / math.pi), (2, 3, 6 * x**2 - 8 * x**3 + 3 * x**4)]
    for a, b, want in forms:
        torch.testing.assert_close(betainc(a, b, x), want, rtol=1e-12, atol=0)
    torch.testing.assert_close(betainc(x + 3, x + 3, torch.full_like(x, 0.5)), torch.full_like(x, 0.5))


def test_betainc_at_the_ends():
    ends, near = tensor([0.0, 1.0]), [1e-300, 1e-19, 1 - 1e-16]
    for a, b in product((1e-6, 0.3, 0.5, 1.0, 3.0, 1e8), repeat=2):
        assert betainc(a, b, ends).tolist() == [0, 1]
        exact = beta_tails_50_digits if min(a, b) >= 0.5 else tails_of_small_parameters
        want = [float(exact(a, b, x)[0]) for x in near]
        np.testing.assert_allclose(betainc(a, b, tensor(near)), want, rtol=1e-12)
    denormal = tensor([5e-324, 1e-310])
    torch.testing.assert_close(betainc(0.5, 0.5, denormal), denormal.sqrt() * 2 / math.pi, rtol=1e-12, atol=0)


def test_betainc_is_nan_for_invalid_arguments():
    nan = math.nan
    for a, b, x in [(nan, 1, 0.5), (1, nan, 0.5), (1, 1, nan), (0, 1, 0.5), (1, -1, 0.5), (1, 1, -0.1), (1, 1, 1.1),
                    (math.inf, 1, 0.5), (0, 1, 0.0), (1, 0, 1.0)]:  # fmt: skip
        assert betainc(a, b, tensor(x)).isnan(), (a, b, x)


def test_betainc_broadcasts_and_follows_the_dtype_of_x():
    a = torch.tensor([[1], [2], [3], [4]])
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.rand(3, 1, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
        got = betainc(a, 2.5, x)
        assert got.dtype == dtype
        assert got.shape == (3, 4, 5)
        want = special.betainc(a.numpy(), 2.5, x.double().numpy())
        torch.testing.assert_close(got, torch.tensor(want).to(dtype))
    assert betainc(a[:0], 2.5, x[:1]).shape == (1, 0, 5)


def test_betainc_gradient_equals_finite_differences_and_limits_at_the_ends():
    x = tensor([0.01, 0.2, 0.5, 0.9]).requires_grad_()
    a, b = tensor([[0.2], [1.0], [2.0], [30.0]]), tensor([3.0, 0.3, 1.0, 40.0])
    assert torch.autograd.gradcheck(lambda t: betainc(a, b, t), x)
    assert torch.autograd.gradgradcheck(lambda t: betainc(a, b, t), x)
    x = tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0]).requires_grad_()
    a, b = tensor([0.5, 1, 2, 3, 3, 3]).requires_grad_(), tensor([3, 3, 3, 0.5, 1, 2])
    betainc(a, b, x).sum().backward()
    assert x.grad.tolist() == [math.inf, 3, 0, math.inf, 3, 0]
    assert a.grad is None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # raised within dynamo
def test_betainc_under_vmap_and_compile():
    x, a = torch.rand(4, 6, generator=torch.Generator().manual_seed(0), dtype=F64), tensor([0.01, 2, 3, 4])
    want = betainc(a[:, None], 2, x)
    torch.testing.assert_close(torch.vmap(lambda s, t: betainc(s, 2, t))(a, x), want, rtol=1e-12, atol=0)
    per_sample = torch.vmap(torch.func.grad(lambda t: betainc(3, 2, t)))(x[0])
    torch.testing.assert_close(per_sample, 12 * x[0] ** 2 * (1 - x[0]))
    compiled = torch.compile(lambda t: betainc(a[:, None], 2, t), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), want, rtol=1e-12, atol=0)
