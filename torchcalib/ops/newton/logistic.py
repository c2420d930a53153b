"""Logistic regression on one variable, for a batch of series."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.newton.minimise import Value, minimise
from torchcalib.ops.operation import operation

# Elements of a piece: small enough for one thread and the cache.
_PIECE = 2**13
_ROUNDS = 40
_DECREMENT = 1e-22  # Newton decrement of the mean NLL at which the unknowns are exact to rounding
_LONGEST = 8.0  # longest step in standardised unknowns: further away, the likelihood is no parabola
_CERTAIN = 8.0  # log-odds beyond which the information of an outcome is almost 0
_RISE = 1e-6  # slope of the mean log-likelihood above which a point is not the maximum


class LogisticFit(NamedTuple):
    """Fits of P(1) = sigmoid(intercept + slope x); all `(...)`.

    Attributes:
        slope: inf or -inf if x separates the outcomes, NaN if x or the outcomes do not vary.
        intercept: NaN if the slope is not finite.
        offset: the intercept with the slope fixed at 1; inf or -inf if the outcomes do not vary. Like slope and
            intercept it is NaN if no maximum was found, which happens for |x| in the hundreds.
        slope_variance: inverse of the Fisher information; NaN if the slope is not finite.
        intercept_variance: as `slope_variance`.
        log_likelihood: at the fit; NaN where the slope is not finite.
        log_likelihood_of_identity: at intercept 0 and slope 1.
    """

    slope: Tensor
    intercept: Tensor
    offset: Tensor
    slope_variance: Tensor
    intercept_variance: Tensor
    log_likelihood: Tensor
    log_likelihood_of_identity: Tensor


def logistic_fit(x: Tensor, k: Tensor, n: Tensor) -> LogisticFit:
    """Fit the outcomes of every series.

    Args:
        x: `(..., M)`, finite, of the dtype of sums.
        k: outcomes of 1 that an element stands for `(..., M)`.
        n: outcomes `(..., M)`; elements of 0 outcomes are ignored.

    Returns:
        See `LogisticFit`. Gradient: slope, intercept and offset in x (implicit differentiation); none of the others.
    """
    still = x.detach()
    total, ones = n.sum(-1), k.sum(-1)
    held = total.masked_fill(total == 0, 1)
    mean = (n * still).sum(-1) / held
    scale = ((n * (still - mean.unsqueeze(-1)).square()).sum(-1) / held).sqrt()
    low, high = _range(still, k), _range(still, n - k)
    rises, falls = low[0] >= high[1], low[1] <= high[0]  # separation
    one_kind = (ones == 0) | (ones == total)
    determined = ~(rises | falls | one_kind)

    unit = scale.masked_fill(~determined | (scale == 0), 1)
    standard = (x - mean.unsqueeze(-1)) / unit.unsqueeze(-1)
    # Start at the identity. Where it is almost certain, scale it down: its information would be almost 0.
    doubt = _CERTAIN / (mean.abs() + unit).clamp(min=_CERTAIN)
    theta, best = _maximum(standard, k, n, torch.stack((doubt * mean, doubt * unit), -1), ~determined)
    slope, intercept = theta[..., 1] / unit, theta[..., 0] - theta[..., 1] / unit * mean
    missed = (best.gradient.abs() > _RISE).any(-1)
    # The intercept is a - b mean / unit for the unknowns a and b of the standardised variable.
    inverse, shift = best.hessian / held[..., None, None], mean / unit
    in_intercept = inverse[..., 0, 0] - 2 * shift * inverse[..., 0, 1] + shift.square() * inverse[..., 1, 1]

    zero = torch.zeros_like(mean).unsqueeze(-1)
    offset, at_offset = _maximum(x, k, n, zero, one_kind)
    offset = offset.squeeze(-1).masked_fill((at_offset.gradient.abs() > _RISE).any(-1), torch.nan)
    endless = torch.where(ones > 0, torch.inf, -torch.inf).masked_fill(total == 0, torch.nan)
    limit = torch.where(rises, torch.inf, -torch.inf).masked_fill((rises & falls) | one_kind, torch.nan)

    def fitted(value: Tensor) -> Tensor:
        return value.masked_fill(~determined | missed, torch.nan)

    return LogisticFit(
        torch.where(determined, fitted(slope), limit),
        fitted(intercept),
        torch.where(one_kind, endless, offset),
        fitted(inverse[..., 1, 1] / unit.square()),
        fitted(in_intercept),
        fitted(-best.value * held),
        -_nll(still, k, n, zero).value * held,
    )


def _range(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest x of the elements with outcomes."""
    absent = n <= 0
    return x.masked_fill(absent, torch.inf).amin(-1), x.masked_fill(absent, -torch.inf).amax(-1)


def _maximum(x: Tensor, k: Tensor, n: Tensor, start: Tensor, stays: Tensor) -> tuple[Tensor, Value]:
    """Return the unknowns `(..., P)` at the maximum of the likelihood; series that stay keep the start.

    The maximum is differentiated implicitly: one more Newton step with the information held constant has the
    derivative of the maximum in x, because the gradient is 0 there.

    Returns:
        The unknowns, and the mean NLL there with the inverse of its Hessian.
    """
    at, nll, gradient, inverse = _climb(x.detach(), k.detach(), n.detach(), start, stays)
    step = (inverse @ _nll(x, k, n, at).gradient.unsqueeze(-1)).squeeze(-1)
    return at - step.masked_fill(stays.unsqueeze(-1), 0), Value(nll, gradient, inverse)


@operation(
    "logistic_maximum(Tensor x, Tensor k, Tensor n, Tensor start, Tensor stays) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda x, k, n, start, stays: (  # noqa: ARG005
        torch.empty_like(start),
        start.new_empty(stays.shape),
        torch.empty_like(start),
        start.new_empty((*start.shape, start.shape[-1])),
    ),
)
def _climb(x: Tensor, k: Tensor, n: Tensor, start: Tensor, stays: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the unknowns at the maximum, the mean NLL there, its gradient and the inverse of its Hessian."""
    found = minimise(
        lambda theta, _: _nll(x, k, n, theta),
        start,
        lambda _theta, _value, step: step * (_LONGEST / step.abs().amax(-1, keepdim=True)).clamp(max=1),
        lambda here: here.slope >= -_DECREMENT,
        fixed=stays,
        rounds=_ROUNDS,
    )
    nll, gradient, hessian = found.function
    inverse = torch.linalg.inv_ex(hessian).inverse
    return found.at, nll, gradient, inverse.masked_fill(~inverse.isfinite(), 0)


def _nll(x: Tensor, k: Tensor, n: Tensor, theta: Tensor) -> Value:
    """Return the mean NLL of intercept and slope `(..., 2)`, or of the intercept with a slope of 1 `(..., 1)`."""
    size = theta.shape[-1]
    a, b = theta[..., :1], theta[..., 1:] if size == 2 else 1.0
    sums = None
    for some, ones, counts in _pieces(x, k, n):
        eta = a + b * some
        q = eta.sigmoid()
        residual, w = counts * q - ones, counts * q * (1 - q)
        wx = w * some
        nll = counts * torch.logaddexp(eta, torch.zeros_like(eta)) - ones * eta
        columns = (nll, residual, residual * some, w, wx, wx * some)
        piece = torch.stack([column.sum(-1) for column in columns])
        sums = piece if sums is None else sums + piece
    assert sums is not None  # there is one piece at least
    nll, *entries = (sums / n.sum(-1).clamp(min=1)).unbind()
    gradient = torch.stack(entries[:2], -1)
    hessian = torch.stack((*entries[2:4], *entries[3:]), -1).reshape(*nll.shape, 2, 2)
    return Value(nll, gradient[..., :size], hessian[..., :size, :size])


def _pieces(*columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, max(1, columns[0].shape[-1]), _PIECE):
        yield tuple(column[..., start : start + _PIECE] for column in columns)
