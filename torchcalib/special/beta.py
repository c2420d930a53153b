"""Regularised incomplete beta function and its gradient.

I_x(a, b) is the product of two factors. Let n = a + b and d = n x - a.

1. The first factor is the saddle-point form of Loader (Fast and Accurate Computation of Binomial Probabilities, 2000).
   S(a) is the error of Stirling's formula for log Gamma(a), and L(u) = log(1+u) - u. If d is exact, no terms cancel.

       x^a (1-x)^b / B(a, b) = sqrt(a b / (2 pi n)) exp(a L(d/a) + b L(-d/b) + S(n) - S(a) - S(b))

2. The second factor is an integral. The substitution w = logit t - logit x makes its integrand log-concave.

       I_x(a, b) = x^a (1-x)^b / B(a, b) * integral_{-inf}^0 exp(h(w)) dw,   h(w) = a w - n log(1 + x (e^w - 1))

   If x is below the mean a/n, the integrand decreases from 1 at w = 0 to 0 for w -> -inf. One quadrature rule is then
   accurate for all a and b. A continued fraction would need about sqrt(min(a, b)) terms.

If a parameter is below 1/2, the range of integration is too long for the quadrature. `_small_lower_tail` then uses a
power series on the side of the smaller parameter.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.host_values import constant, value_if_available

_PIECE = 4096
_SMALL = 0.5  # below this parameter a power series is used, because the quadrature would need more nodes
_TERMS = 48  # number of terms in the power series; term k is of order 2^-k
_DEPTH = 36.0  # the range of integration ends where the integrand is exp(-36) = 2e-16


def in_pieces(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply an elementwise function in pieces, to limit its memory of 40 values per element; tensors of one shape."""
    if tensors[0].numel() <= _PIECE or torch.compiler.is_compiling():
        return function(*tensors)
    pieces = zip(*(torch.split(t.reshape(-1), _PIECE) for t in tensors), strict=True)
    return torch.cat([function(*piece) for piece in pieces]).reshape(tensors[0].shape)


def is_true_without_sync(flag: Tensor) -> bool:
    """Return True if a bool scalar tensor is True and on the CPU; False where its value is not available."""
    return flag.device.type == "cpu" and value_if_available(flag) is True


# Gauss-Legendre quadrature in z for integrals over s in [0, 1]. s = ((1 + z) / 2)^2 concentrates nodes near s = 0.
# Only a = b = 1/2 requires all 40 nodes. With 32 nodes the relative error is 1e-10 there.
_Z, _LEGENDRE = np.polynomial.legendre.leggauss(40)
_NODES, _WEIGHTS = ((1 + _Z) ** 2 / 4).tolist(), ((1 + _Z) / 2 * _LEGENDRE).tolist()


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    """Return c0 + c1 x + c2 x^2 + ... by few torch calls, whose overhead dominates for small tensors."""
    powers = x.unsqueeze(-1).expand(*x.shape, len(coefficients) - 1).cumprod(-1)
    value: Tensor = powers @ constant(coefficients[1:], x.dtype, x.device) + coefficients[0]
    return value


_ATANH = [1 / (2 * i + 3) for i in range(9)]
# Cumulants k2 to k10 of the Bernoulli distribution, divided by v = x (1-x). Odd cumulants are also divided by 1 - 2x.
# Each row contains the coefficients of a polynomial in v.
_CUMULANTS = [
    [1, 0, 0, 0, 0],
    [1, 0, 0, 0, 0],
    [1, -6, 0, 0, 0],
    [1, -12, 0, 0, 0],
    [1, -30, 120, 0, 0],
    [1, -60, 360, 0, 0],
    [1, -126, 1680, -5040, 0],
    [1, -252, 5040, -20160, 0],
    [1, -510, 17640, -151200, 362880],
]
_TAYLOR = [[-c / math.factorial(i) for c in row] for i, row in enumerate(_CUMULANTS, start=2)]
_STIRLING = [1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156]


def _log1p_minus(u: Tensor) -> Tensor:
    """Return log(1+u) - u for u > -1, with relative error 1e-15."""
    near = u.abs() < 0.25
    v = u.masked_fill(~near, 0)
    r = v / (v + 2)
    square = r * r
    series = r * (2 * square * _polynomial(_ATANH, square) - v)  # log(1+u) = 2 atanh(r), and 2 r - u = -r u
    return torch.where(near, series, torch.log1p(u) - u)


def _stirling_error(a: Tensor) -> Tensor:
    """Return S(a) = log Gamma(a) - ((a - 1/2) log a - a + log(2 pi)/2)."""
    large, small = a.clamp(min=9), a.clamp(max=9)
    series = _polynomial(_STIRLING, 1 / (large * large)) / large
    direct = torch.lgamma(small) - ((small - 0.5) * small.log() - small + 0.5 * math.log(2 * math.pi))
    return torch.where(a >= 9, series, direct)


def deviation(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return d = (a + b) x - a, compensated for the rounding errors of the sum and the product."""
    n = a + b
    # Rounding error of the sum: Knuth's TwoSum.
    part = n - a
    sum_error = (a - (n - part)) + (b - part)
    # Rounding error of the product: Dekker's algorithm. Products of the halves are exact.
    n_high, x_high = n.float().double(), x.float().double()
    n_low, x_low = n - n_high, x - x_high
    product = n * x
    product_error = ((n_high * x_high - product) + n_high * x_low + n_low * x_high) + n_low * x_low
    return (product - a) + (product_error + sum_error * x)


def log_kernel(a: Tensor, b: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Return log(x^a (1-x)^b / B(a, b)) for x <= 1/2 and d = (a + b) x - a."""
    n = a + b
    u = d / a
    near_a, near_b = _log1p_minus(torch.stack((u, -d / b))).unbind()
    log_ratio = torch.where(u > -0.9, near_a, x.log() + (n / a).log() - u)
    whole, left, right = _stirling_error(torch.stack((n, a, b))).unbind()
    return a * log_ratio + b * near_b + (whole - left - right) + 0.5 * (a / n * (b / (2 * math.pi))).log()


def mirrored(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the mask x > 1/2, and a, b, x. Where the mask is True, these are b, a, 1 - x instead (exact)."""
    swap = x > 0.5
    return swap, torch.where(swap, b, a), torch.where(swap, a, b), torch.where(swap, 1 - x, x)


def log_integrand(w: Tensor, a: Tensor, n: Tensor, x: Tensor) -> Tensor:
    """Return h(w) = a w - n log(1 + x (e^w - 1)). The absolute rounding error is 2e-16 |a w|."""
    return a * w - n * torch.log1p(x * torch.expm1(w))


def _log_integrand_series(w: Tensor, n: Tensor, x: Tensor, d: Tensor) -> Tensor:
    """Return h(w) for |w| < 1/8 from its series -d w - n (k2 w^2/2! + k3 w^3/3! + ...) with Bernoulli cumulants k_i.

    `log_integrand` would lose precision by cancellation there.
    """
    v = x * (1 - x)
    table = constant(_TAYLOR, torch.float64, x.device)
    terms = v.unsqueeze(-1).expand(*v.shape, 5).cumprod(-1) @ table.T * n.unsqueeze(-1)
    even, odd = terms[..., ::2], terms[..., 1::2] * (1 - 2 * x).unsqueeze(-1)
    value = even[..., 4:5]
    for i in (3, 2, 1, 0):
        value = torch.addcmul(even[..., i : i + 1], torch.addcmul(odd[..., i : i + 1], value, w), w)
    return torch.addcmul(-d.unsqueeze(-1), value, w) * w


def integral_beyond(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integral in the second factor, for the tail of Beta(a, b) that starts at x and excludes the mean.

    This is the tail probability divided by x^a (1-x)^b / B(a, b). The mask is True for the lower tail.
    """
    swap, a, b, x = mirrored(a, b, x)
    n, d = a + b, deviation(a, b, x)
    sign = torch.where(d > 0, 1.0, -1.0).double()  # w = sign * s with s >= 0 points away from the mean
    slope = d.abs()
    # Step 1: find the end of the range, where h = -36. The rest is less than exp(-36) = 2e-16 of the integral, because
    # h is concave. Newton's method starts from bounds for a Poisson distribution and passes the root at most once. A
    # range that is slightly too long remains accurate.
    spread = n * x * (1 - x)
    linear, square = 2 * slope - _DEPTH, 2 * (spread + slope)
    below = ((linear * linear + 4 * _DEPTH * square).sqrt() - linear) / square
    root = (2 * _DEPTH / spread).sqrt()
    end = torch.where(d > 0, torch.minimum(torch.log1p(root + root * root / 2), _DEPTH / slope), below)
    for _ in range(2):
        w = sign * end
        odds = x * w.exp()
        end = end - (log_integrand(w, a, n, x) + _DEPTH) / (sign * (a - n * odds / (1 - x + odds)))
    # Step 2: quadrature. In a long range |a w| is at most 1,500, because 36 = slope s + spread s^2/2 bounds both terms.
    # `log_integrand` then has an error of 3e-13.
    node, weight = (constant(t, torch.float64, x.device) for t in (_NODES, _WEIGHTS))
    w = (sign * end).unsqueeze(-1) * node
    height = log_integrand(w, a.unsqueeze(-1), n.unsqueeze(-1), x.unsqueeze(-1))
    short = end < 0.125
    if not is_true_without_sync(~short.any()):
        height = torch.where(short.unsqueeze(-1), _log_integrand_series(w, n, x, d), height)
    return end * (height.exp() @ weight), (d > 0) == swap


def _log_gamma_ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return log(Gamma(1+a+b) / (Gamma(1+a) Gamma(1+b))) for a <= 1, without cancellation for large b."""
    whole, part = _stirling_error(torch.stack((1 + a + b, 1 + b))).unbind()
    powers = a * torch.log1p(a + b) + (b + 0.5) * torch.log1p(a / (1 + b)) - a
    return powers + (whole - part) - torch.lgamma(1 + a)


def _series(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return the sum S over k >= 1 of (1-b)_k / k! x^k / (a+k), with B_x(a, b) = x^a (1/a + S).

    (1-b)_k is the Pochhammer symbol. Source: NIST Digital Library of Mathematical Functions, eq. 8.17.7.
    """
    k = torch.arange(1, _TERMS + 1, dtype=torch.float64, device=x.device)
    # Include x in each ratio of terms, because the Pochhammer symbol alone would overflow for large b.
    terms = ((k - b.unsqueeze(-1)) / k * x.unsqueeze(-1)).cumprod(-1)
    return (terms / (a.unsqueeze(-1) + k)).sum(-1)


def _small_lower_tail(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b) for min(a, b) < 1/2.

    Let a be the smaller parameter, after a reflection if necessary. The threshold c = min(1/2, 1 / (1+b)) is above the
    mean:

        below c     I_x = x^a / (a B(a, b)) (1 + a * series)
        above c     1 - I_x: the series for I_{1-x}(b, a) if b <= 1, the integral if b > 1
        below c     1 - I_x = (1 - I_c) + (I_c - I_x), with the difference of the series at c and x

    A tail of order a is never computed as 1 minus the other tail, which would lose precision. If b > 1, the series
    alternates. Because b x < 1, its sum is still at least exp(-1) times its largest term.
    """
    swap = b < a
    y = 1 - x
    a, b = torch.where(swap, b, a), torch.where(swap, a, b)
    x, y = torch.where(swap, y, x), torch.where(swap, x, y)  # the smaller of x and y is exact
    cut = (1 / (1 + b)).clamp(max=0.5)
    share, ratio = b / (a + b), _log_gamma_ratio(a, b).exp()  # 1 / B(a, b) = a * share * ratio

    # Below c: the series for I_x and for 1 - I_x.
    low = torch.minimum(x, cut)
    at_low, at_cut = _series(a.expand(2, *a.shape), b.expand(2, *b.shape), torch.stack((low, cut))).unbind()
    log_low, log_cut = low.log(), cut.log()
    power, power_cut = (a * log_low).exp(), (a * log_cut).exp()
    lower = share * ratio * power * (1 + a * at_low)
    between = (
        share * ratio * (-power_cut * torch.expm1(a * (log_low - log_cut)) + a * (power_cut * at_cut - power * at_low))
    )

    # Above c: 1 - I_x by the series for b <= 1, and by the integral for b > 1.
    high, rest = torch.maximum(x, cut), torch.where(x > cut, y, 1 - cut)
    flip = high > 0.5
    least = torch.where(flip, rest, high)
    log_near, log_far = least.log(), torch.log1p(-least)
    log_high, log_rest = torch.where(flip, log_far, log_near), torch.where(flip, log_near, log_far)
    by_series = a / (a + b) * (b * log_rest).exp() * (1 + b * _series(b, a, rest))
    integral, _ = integral_beyond(torch.where(flip, b, a), torch.where(flip, a, b), least)
    by_integral = a * share * (a * log_high + b * log_rest).exp() * integral
    above = ratio * torch.where(b > 1, by_integral, by_series)
    return torch.where(swap, above + between, torch.where(x < cut, lower, 1 - above))


def _large_lower_tail(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b) for a >= 1/2 and b >= 1/2."""
    integral, is_lower = integral_beyond(a, b, x)
    _, c, d, y = mirrored(a, b, x)
    tail = log_kernel(c, d, y, deviation(c, d, y)).exp() * integral
    return torch.where(is_lower, tail, 1 - tail)


def lower_tail(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return I_x(a, b) for float64 tensors of one shape; NaN for arguments out of range."""
    small = torch.minimum(a, b) < _SMALL
    if is_true_without_sync(~small.any()):
        value = _large_lower_tail(a, b, x)
    else:
        value = torch.where(small, _small_lower_tail(a, b, x), _large_lower_tail(a, b, x))
    value = torch.where(x == 0, 0.0, torch.where(x == 1, 1.0, value))
    return value.where((a > 0) & (b > 0) & (a + b < torch.inf) & (x >= 0) & (x <= 1), torch.nan)


def _density(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Return the Beta density x^(a-1) (1-x)^(b-1) / B(a, b), differentiable in x to any order inside (0, 1)."""
    is_end = (x == 0) | (x == 1)
    inner = x.masked_fill(is_end, 0.5)
    log_powers = (a - 1) * inner.log() + (b - 1) * torch.log1p(-inner)
    with torch.no_grad():
        _, c, d, y = mirrored(a, b, x)
        log_near, log_far = y.log(), torch.log1p(-y)
        value = torch.exp(log_kernel(c, d, y, deviation(c, d, y)) - log_near - log_far)
        least, most = torch.minimum(a, b), torch.maximum(a, b)
        # Stirling's form divides by a, which overflows for tiny a. The plain powers are inaccurate only at underflow.
        log_scale = least.log() + (most / (a + b)).log() + _log_gamma_ratio(least, most)
        plain = torch.exp(log_scale + (c - 1) * log_near + (d - 1) * log_far)
        value = torch.where(least < _SMALL, plain, value)
        own, other = torch.where(x == 0, a, b), torch.where(x == 0, b, a)
        at_end = torch.where(own == 1, other, torch.where(own < 1, torch.inf, 0.0))
        value = torch.where(is_end, at_end, value)
        value = value.where((a > 0) & (b > 0) & (x >= 0) & (x <= 1), torch.nan)
    return value * (log_powers - log_powers.detach()).exp()  # the factor is 1 and provides the derivatives


class _Betainc(torch.autograd.Function):
    """I_x(a, b) with its gradient in x."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
        """Return I_x(a, b)."""
        return in_pieces(lower_tail, a, b, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004
        """Save the inputs for `backward`."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        """Return the gradient in x."""
        a, b, x = ctx.saved_tensors
        return None, None, grad * _density(a, b, x)


def betainc(a: Tensor | float, b: Tensor | float, x: Tensor) -> Tensor:
    """Regularised incomplete beta function I_x(a, b): the probability that a Beta(a, b) variable is at most x.

    It is computed elementwise in float64, without synchronising the device. For a and b from 1e-6 to 1e8, the relative
    error is below 1e-12, also in the tails down to 1e-300. If the upper tail 1 - I_x(a, b) is small, compute it as
    I_{1-x}(b, a).

    Args:
        a: first parameter, positive and finite; a number or a tensor.
        b: second parameter, positive and finite; a number or a tensor.
        x: floating tensor with values in [0, 1]. The three arguments are broadcast.

    Returns:
        Values in [0, 1], with the broadcast shape and the dtype of `x`. NaN if an argument is NaN, x is outside [0, 1],
        or a or b is not positive and finite.

    Raises:
        TypeError: if `x` is not a floating tensor, or `a` or `b` is complex.

    Gradient:
        In x: x^(a-1) (1-x)^(b-1) / B(a, b), which is infinite at x = 0 if a < 1 and at x = 1 if b < 1. None in a and b,
        which are treated as constants.

    Reference:
        NIST Digital Library of Mathematical Functions, sec. 8.17. The method is described in
        `torchcalib/special/beta.py`.

    Example:
        >>> import torch
        >>> from torchcalib.special import betainc
        >>> betainc(2, 3, torch.tensor([0.0, 0.5, 1.0]))
        tensor([0.0000, 0.6875, 1.0000])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"`x` must be a floating tensor, got {kind(x)}. Convert it with torch.as_tensor(x).double().")
    wide = [to_float64("a", a, x.device).detach(), to_float64("b", b, x.device).detach(), x.double()]
    result: Tensor = _Betainc.apply(*torch.broadcast_tensors(*wide))  # type: ignore[no-untyped-call]
    return result.to(x.dtype)


def kind(value: object) -> str:
    """Return the type of an argument for an error message, such as "a tensor of torch.int64"."""
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def to_float64(name: str, value: Tensor | float, device: torch.device) -> Tensor:
    """Convert a real number or tensor to a float64 tensor."""
    if isinstance(value, Tensor) and not value.is_complex():
        return value.double()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return torch.tensor(value, dtype=torch.float64, device=device)
    raise TypeError(f"`{name}` must be a real tensor or number, got {kind(value)}. Convert it with torch.as_tensor.")
