"""Logistic regression on one variable for batches of samples, by damped Newton steps in intercept and slope."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.newton.descent import Iterate, Step, Value, chosen, damped_newton
from torchcalib.ops.operation import is_plain, operation
from torchcalib.ops.threads import in_threads

_PIECE = 2**14  # elements computed together; more would not fit into the cache, and would start threads
_SAMPLED = 2**16  # smallest number of elements for which a fit to a subsample of them gives the starting point
_STRIDE = 32  # the subsample contains every 32nd element
_ROUNDS = 40  # largest number of iterations
_DECREMENT = 1e-22  # largest Newton decrement of the mean log-likelihood at convergence
_MAX_STEP = 8.0  # longest step in standardised parameters, because the quadratic approximation is only local
_CERTAIN = 8.0  # absolute log-odds above which a prediction has almost no Fisher information
_RISE = 1e-6  # largest accepted absolute derivative of the mean log-likelihood at the maximum


class LogisticFit(NamedTuple):
    """Maximum likelihood fits of P(y = 1) = sigmoid(intercept + slope x); every field has shape `(...)`.

    Slope, intercept and offset are NaN if the iteration does not converge, which happens for |x| in the hundreds. All
    fields but the offset and the last one are NaN if the slope is not finite.
    """

    slope: Tensor  # slope of x; inf or -inf if x separates the outcomes, NaN if x or the outcomes do not vary
    intercept: Tensor  # the log-odds at x = 0
    offset: Tensor  # intercept of the fit with slope 1; inf or -inf if the outcomes do not vary
    slope_variance: Tensor  # from the inverse Fisher information
    intercept_variance: Tensor  # from the inverse Fisher information
    log_likelihood: Tensor  # total log-likelihood of the fit
    log_likelihood_of_identity: Tensor  # total log-likelihood at intercept 0 and slope 1


class _LogLikelihood(NamedTuple):
    """Log-likelihood, gradient, and Fisher information [[w, wx], [wx, wxx]] = sum n q (1 - q) [[1, x], [x, x^2]]."""

    total: Tensor
    grad_intercept: Tensor
    grad_slope: Tensor
    w: Tensor
    wx: Tensor
    wxx: Tensor

    def step(self, free_slope: bool) -> tuple[Tensor, Tensor]:
        """Return the Newton step in intercept and slope; 0 if the Fisher information is singular."""
        if not free_slope:
            return self.grad_intercept / self.w.masked_fill(self.w == 0, 1), torch.zeros_like(self.w)
        # Cramer's rule for the inverse of a matrix of two rows.
        determinant = self.w * self.wxx - self.wx.square()
        is_regular = determinant > 0
        determinant = determinant.masked_fill(~is_regular, 1)
        step_a = (self.wxx * self.grad_intercept - self.wx * self.grad_slope) / determinant
        step_b = (self.w * self.grad_slope - self.wx * self.grad_intercept) / determinant
        return step_a.masked_fill(~is_regular, 0), step_b.masked_fill(~is_regular, 0)


def logistic_fit(x: Tensor, k: Tensor, n: Tensor) -> LogisticFit:
    """Fit P(y = 1) = sigmoid(intercept + slope x) for every batch element `(..., M)` by maximum likelihood.

    At each finite x, `k` of `n` outcomes are 1; elements with n = 0 are ignored.

    Gradient: of slope, intercept and offset in `x`, by implicit differentiation. Other attributes have no gradient.
    """
    x_detached = x.detach()
    total, ones = n.sum(-1), k.sum(-1)
    divisor = total.masked_fill(total == 0, 1)
    mean = (n * x_detached).sum(-1) / divisor
    scale = ((n * (x_detached - mean.unsqueeze(-1)).square()).sum(-1) / divisor).sqrt()
    positive, negative = _range(x_detached, k), _range(x_detached, n - k)
    # Complete or quasi-complete separation: all x of one outcome are at least as large as all x of the other outcome.
    rises, falls = positive[0] >= negative[1], positive[1] <= negative[0]
    no_variation = (ones == 0) | (ones == total)
    determined = ~(rises | falls | no_variation)

    unit = scale.masked_fill(~determined | (scale == 0), 1)
    standard = (x - mean.unsqueeze(-1)) / unit.unsqueeze(-1)
    # Start at intercept 0 and slope 1 in original units. Reduce both parameters in standardised units if predictions
    # are almost certain, because their Fisher information is almost 0.
    doubt = _CERTAIN / (mean.abs() + unit).clamp(min=_CERTAIN)
    a, b, best, _ = _maximum(standard, k, n, doubt * mean, doubt * unit, free_slope=True, is_fixed=~determined)
    slope, intercept = b / unit, a - b / unit * mean
    determinant = best.w * best.wxx - best.wx.square()
    # Variance of the intercept in original units, from the inverse information in standardised parameters.
    shift = mean / unit
    in_intercept = (best.wxx + 2 * shift * best.wx + shift.square() * best.w) / determinant

    zero = torch.zeros_like(mean)
    offset, _, offset_value, identity = _maximum(x, k, n, zero, zero + 1, free_slope=False, is_fixed=no_variation)
    offset = offset.masked_fill(offset_value.grad_intercept.abs() > _RISE * divisor, torch.nan)
    not_converged = torch.maximum(best.grad_intercept.abs(), best.grad_slope.abs()) > _RISE * divisor
    offset_limit = torch.where(ones > 0, torch.inf, -torch.inf).masked_fill(total == 0, torch.nan)
    slope_limit = torch.where(rises, torch.inf, -torch.inf).masked_fill((rises & falls) | no_variation, torch.nan)

    def fitted(value: Tensor) -> Tensor:
        return value.masked_fill(~determined | not_converged, torch.nan)

    return LogisticFit(
        torch.where(determined, fitted(slope), slope_limit),
        fitted(intercept),
        torch.where(no_variation, offset_limit, offset),
        fitted(best.w / determinant / unit.square()),
        fitted(in_intercept),
        fitted(best.total),
        identity,
    )


def _range(x: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest x of the elements with n > 0, each `(...)`."""
    lowest, highest = [], []
    size = _PIECE if x.device.type == "cpu" else max(1, x.shape[-1])
    for x_piece, n_piece in zip(torch.split(x, size, -1), torch.split(n, size, -1), strict=True):
        absent = n_piece <= 0
        lowest.append(x_piece.masked_fill(absent, torch.inf).amin(-1))
        highest.append(x_piece.masked_fill(absent, -torch.inf).amax(-1))
    return torch.stack(lowest).amin(0), torch.stack(highest).amax(0)


@operation(
    "logistic_maximum(Tensor x, Tensor k, Tensor n, Tensor a, Tensor b, Tensor is_fixed, bool free_slope) -> Tensor",
    fake=lambda x, k, n, a, b, is_fixed, free_slope: a.new_empty((*a.shape, 9)),  # noqa: ARG005
)
def _maximise(x: Tensor, k: Tensor, n: Tensor, a: Tensor, b: Tensor, is_fixed: Tensor, free_slope: bool) -> Tensor:
    """Maximise the likelihood from intercept a and slope b, by damped Newton steps on the mean NLL.

    For many elements, the iteration starts at the maximum for a subsample, if that has a larger likelihood. It then
    needs about half as many steps. Return intercept, slope, the six fields of `_LogLikelihood`, and the log-likelihood
    at the given a and b, `(..., 9)`.
    """
    total = n.sum(-1).clamp(min=1)

    def evaluate(theta: Tensor) -> Value:
        found = _log_likelihood(x, k, n, *theta.unbind(-1)).movedim(0, -1)
        mean = -found / total.unsqueeze(-1)
        gradient = mean[..., 1:3]
        if not free_slope:
            gradient = torch.stack((mean[..., 1], torch.zeros_like(mean[..., 1])), -1)
        return Value(mean[..., 0], gradient, gradient.square().sum(-1).sqrt(), (found,))

    def newton_step(at: Iterate) -> Step:
        step = torch.stack(_LogLikelihood(*at.value.parts[0].unbind(-1)).step(free_slope), -1)
        slope = (step * at.value.gradient).sum(-1)
        within = _MAX_STEP / step.abs().amax(-1).clamp(min=_MAX_STEP)
        return Step(within.unsqueeze(-1) * step, slope * within, slope >= -_DECREMENT)

    theta = torch.stack((a, b), -1)
    value = evaluate(theta)
    given = value.parts[0][..., 0]
    if x.shape[-1] >= _SAMPLED:
        part = (column[..., ::_STRIDE].contiguous() for column in (x, k, n))
        near = _maximise.registered(*part, a, b, is_fixed, free_slope)[..., :2]
        start = evaluate(near)
        is_better = ~is_fixed & (start.f < value.f)
        theta, value = torch.where(is_better.unsqueeze(-1), near, theta), chosen(is_better, start, value)
    theta, value, _ = damped_newton(theta, evaluate, newton_step, is_fixed, value=value, rounds=_ROUNDS)
    return torch.cat((theta, value.parts[0], given.unsqueeze(-1)), -1)


def _maximum(
    x: Tensor, k: Tensor, n: Tensor, a: Tensor, b: Tensor, *, free_slope: bool, is_fixed: Tensor
) -> tuple[Tensor, Tensor, _LogLikelihood, Tensor]:
    """Return intercept, slope and `_LogLikelihood` at the maximum, and the log-likelihood at the start.

    The iteration starts at intercept a and slope b, which are the result where `is_fixed` is True. It is not
    differentiated. At the maximum the gradient is 0 (implicit differentiation). One more Newton step with constant
    Fisher information therefore has the same derivative in x as the maximum.
    """
    a, b, *found, start = _maximise(x.detach(), k.detach(), n.detach(), a, b, is_fixed, free_slope).unbind(-1)
    value = _LogLikelihood(*found)
    last = value
    if not is_plain(x):
        moving = _LogLikelihood(*_log_likelihood(x, k, n, a, b).unbind(0))
        last = _LogLikelihood(value.total, moving.grad_intercept, moving.grad_slope, value.w, value.wx, value.wxx)
    step_a, step_b = last.step(free_slope)
    return a + step_a.masked_fill(is_fixed, 0), b + step_b.masked_fill(is_fixed, 0), value, start


def _log_likelihood(x: Tensor, k: Tensor, n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the fields of `_LogLikelihood` at intercept a and slope b, summed over the samples, `(6, ...)`."""
    n_pieces = max(1, -(-x.shape[-1] // _PIECE))

    def sums(piece: int) -> Tensor:
        part = slice(piece * _PIECE, (piece + 1) * _PIECE)
        return _sums(x[..., part], k[..., part], n[..., part], a.unsqueeze(-1), b.unsqueeze(-1))

    # The pieces of one sample are computed in threads. Those of a batch are long enough for the threads of torch.
    if n_pieces == 1 or a.numel() > 1 or a.device.type != "cpu" or not is_plain(x, k, n, a, b):
        return torch.stack([sums(piece) for piece in range(n_pieces)]).sum(0)
    found = x.new_empty((n_pieces, len(_LogLikelihood._fields), *a.shape))

    def work(begin: int, end: int) -> None:
        for piece in range(begin, end):
            found[piece] = sums(piece)

    in_threads(work, n_pieces, x.numel())
    return found.sum(0)


def _sums(x: Tensor, k: Tensor, n: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return the six fields of `_LogLikelihood` for one piece of x, k and n, `(6, ...)`."""
    eta = a + b * x
    q = eta.sigmoid()
    residual, w = k - n * q, n * q * (1 - q)
    wx = w * x
    likelihood = k * eta - n * torch.logaddexp(eta, torch.zeros_like(eta))
    columns = (likelihood, residual, residual * x, w, wx, wx * x)
    return torch.stack([column.sum(-1) for column in columns])
