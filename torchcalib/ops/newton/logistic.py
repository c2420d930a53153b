"""Logistic regression on one variable for a batch of series: damped Newton steps in two unknowns."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.ops.operation import operation

# Elements of a piece: small enough for one thread and the cache.
_PIECE = 2**13
_ROUNDS = 40
_DECREMENT = 1e-22  # Newton decrement of the mean NLL at which the unknowns are exact to rounding
_NOISE = 1e-13  # rounding error of the mean NLL
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


class _Value(NamedTuple):
    """Log-likelihood, its gradient in both unknowns, and the entries of the Fisher information."""

    log_likelihood: Tensor
    of_intercept: Tensor
    of_slope: Tensor
    w: Tensor
    wx: Tensor
    wxx: Tensor

    def step(self, free_slope: bool) -> tuple[Tensor, Tensor]:
        """Return the Newton step; 0 if the information is singular."""
        if not free_slope:
            return self.of_intercept / self.w.masked_fill(self.w == 0, 1), torch.zeros_like(self.w)
        determinant = self.w * self.wxx - self.wx.square()
        held = determinant > 0
        determinant = determinant.masked_fill(~held, 1)
        of_intercept = (self.wxx * self.of_intercept - self.wx * self.of_slope) / determinant
        of_slope = (self.w * self.of_slope - self.wx * self.of_intercept) / determinant
        return of_intercept.masked_fill(~held, 0), of_slope.masked_fill(~held, 0)


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
    a, b, best = _maximum(standard, k, n, doubt * mean, doubt * unit, free_slope=True, stays=~determined)
    slope, intercept = b / unit, a - b / unit * mean
    determinant = best.w * best.wxx - best.wx.square()
    shift = mean / unit
    in_intercept = (best.wxx + 2 * shift * best.wx + shift.square() * best.w) / determinant

    zero = torch.zeros_like(mean)
    offset, _, at_offset = _maximum(x, k, n, zero, zero + 1, free_slope=False, stays=one_kind)
    offset = offset.masked_fill(at_offset.of_intercept.abs() > _RISE * held, torch.nan)
    missed = torch.maximum(best.of_intercept.abs(), best.of_slope.abs()) > _RISE * held
    endless = torch.where(ones > 0, torch.inf, -torch.inf).masked_fill(total == 0, torch.nan)
    limit = torch.where(rises, torch.inf, -torch.inf).masked_fill((rises & falls) | one_kind, torch.nan)

    def fitted(value: Tensor) -> Tensor:
        return value.masked_fill(~determined | missed, torch.nan)

    return LogisticFit(
        torch.where(determined, fitted(slope), limit),
        fitted(intercept),
        torch.where(one_kind, endless, offset),
        fitted(best.w / determinant / unit.square()),
        fitted(in_intercept),
        fitted(best.log_likelihood),
        _value(still, k, n, zero, zero + 1).log_likelihood,
    )


def _range(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest x of the elements with outcomes."""
    absent = n <= 0
    return x.masked_fill(absent, torch.inf).amin(-1), x.masked_fill(absent, -torch.inf).amax(-1)


@operation(
    "logistic_maximum(Tensor x, Tensor k, Tensor n, Tensor a, Tensor b, Tensor stays, bool free_slope) -> Tensor",
    fake=lambda x, k, n, a, b, stays, free_slope: a.new_empty((*a.shape, 2 + len(_Value._fields))),  # noqa: ARG005
)
def _climb(x: Tensor, k: Tensor, n: Tensor, a: Tensor, b: Tensor, stays: Tensor, free_slope: bool) -> Tensor:
    """Maximise the likelihood from (a, b) on; a step that does not increase it is reduced to a quarter.

    Returns:
        Both unknowns, and a `_Value` there, `(..., 8)`.
    """
    total = n.sum(-1).clamp(min=1)
    value, part = _value(x, k, n, a, b), torch.ones_like(a)
    for _ in range(_ROUNDS):
        by_a, by_b = value.step(free_slope)
        gain = (by_a * value.of_intercept + by_b * value.of_slope) / total
        finished = stays | (gain <= _DECREMENT) | (part < 1e-4) | value.log_likelihood.isnan()
        if look(finished.all()) is True:
            break
        part = torch.minimum(part, _LONGEST / torch.maximum(by_a.abs(), by_b.abs()).clamp(min=_LONGEST))
        to_a, to_b = a + part * by_a, b + part * by_b
        new = _value(x, k, n, to_a, to_b)
        gains = ~finished & (new.log_likelihood >= value.log_likelihood - _NOISE * total)
        a, b = torch.where(gains, to_a, a), torch.where(gains, to_b, b)
        value = _Value(*(torch.where(gains, after, before) for after, before in zip(new, value, strict=True)))
        part = torch.where(gains, 1.0, torch.where(finished, part, part / 4))
    return torch.stack((a, b, *value), -1)


def _maximum(
    x: Tensor, k: Tensor, n: Tensor, a: Tensor, b: Tensor, *, free_slope: bool, stays: Tensor
) -> tuple[Tensor, Tensor, _Value]:
    """Return the unknowns at the maximum of the likelihood, starting at (a, b); series that stay keep them.

    The maximum is differentiated implicitly: one more Newton step with the information held constant has the
    derivative of the maximum in x, because the gradient is 0 there.
    """
    a, b, *found = _climb(x.detach(), k.detach(), n.detach(), a, b, stays, free_slope).unbind(-1)
    value = _Value(*found)
    moving = _value(x, k, n, a, b)
    last = _Value(value.log_likelihood, moving.of_intercept, moving.of_slope, value.w, value.wx, value.wxx)
    by_a, by_b = last.step(free_slope)
    return a + by_a.masked_fill(stays, 0), b + by_b.masked_fill(stays, 0), value


def _value(x: Tensor, k: Tensor, n: Tensor, a: Tensor, b: Tensor) -> _Value:
    """Sum over the elements, one piece at a time."""
    sums = None
    for some, ones, counts in _pieces(x, k, n):
        eta = a.unsqueeze(-1) + b.unsqueeze(-1) * some
        q = eta.sigmoid()
        residual, w = ones - counts * q, counts * q * (1 - q)
        wx = w * some
        likelihood = ones * eta - counts * torch.logaddexp(eta, torch.zeros_like(eta))
        columns = (likelihood, residual, residual * some, w, wx, wx * some)
        piece = torch.stack([column.sum(-1) for column in columns])
        sums = piece if sums is None else sums + piece
    assert sums is not None  # there is one piece at least
    return _Value(*sums.unbind(0))


def _pieces(*columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    for start in range(0, max(1, columns[0].shape[-1]), _PIECE):
        yield tuple(column[..., start : start + _PIECE] for column in columns)
