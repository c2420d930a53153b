"""Fit of alpha in softmax(alpha s) by bracketed Halley steps, to the root of the derivative of the log-likelihood.

The derivative of one parameter brackets its root, which `descent` cannot use. Halley steps need the third derivative,
which costs one more product for each score.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE, STOPPED
from torchcalib.ops.newton.descent import DECREMENT, GRADIENT, ROUNDS, all_true, is_within_rounding
from torchcalib.ops.newton.scores import PIECE, ZERO_SLOPE, LabelledScores, Solution, standard_pieces


def solve_temperature(p: LabelledScores) -> Solution:
    """Minimise the negative log-likelihood (NLL) over alpha >= 0; the returned biases are 0."""
    # The NLL is convex: if its slope at alpha = 0 is not negative, no positive alpha is better.
    at_bound = (p.w * p.mean).sum(-1) - p.label_mean >= -ZERO_SLOPE
    separable = p.label_mean >= 0  # every label has the largest score of its row: the NLL has no finite minimiser
    # Start: the result of a float32 fit to all samples, which itself starts at a fit to about a thousand samples.
    start = approximate_alpha(p.averaged(), approximate_alpha(p.averaged(1024), p.scale), 0.05)
    start = start.to(p.w.dtype).expand_as(p.label_mean)
    alpha, slope, done = _bracketed(nll_derivatives(p), p.scale, start, at_bound | separable, None, ROUNDS)

    # A minimum at the bound has priority: with equal scores, every label has the largest score of its row.
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separable, SEPARABLE).masked_fill(at_bound, AT_ZERO)
    grad_norm = (slope * p.scale).abs().masked_fill(at_bound, 0)
    return alpha.masked_fill(at_bound, 0), torch.zeros_like(p.share), grad_norm, outcome


# Values of alpha in the first pass, relative to its estimate. The first one is practically 0.
_GRID = (2.0**-20, 0.5, 0.8, 1.25, 2.0)


def solve_by_moments(
    moments: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], w: Tensor, estimate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Minimise the negative log-likelihood (NLL) over alpha >= 0, in few passes over the scores.

    `moments` returns the score of the label, the mean and the variance of the scores of every row at K values of alpha,
    `(K, N)` each, where the largest score of a row is 0. `w` are the weights `(N,)`. Return alpha, the gradient at the
    last but one alpha, the outcome and the weight of the samples whose label has the score -inf, as scalars.

    The first pass evaluates several values of alpha at once. Inverse Hermite interpolation of the derivative, between
    those values that bracket its root, starts the Newton steps. A step of a relative size of 1e-5 is the last one. With
    an `estimate` of alpha from some of the samples, three or four passes are sufficient.
    """
    grid = w.new_tensor(_GRID) * estimate
    label, mean, variance = moments(grid)
    is_lost = label[0] == -torch.inf
    lost = w.masked_fill(~is_lost, 0).sum()
    used = (w != 0) & ~is_lost
    share = w.masked_fill(~used, 0)
    share = share / share.sum()

    def derivatives(of: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        label, mean, variance = of
        slope = (share * (mean - label)).masked_fill(~used, 0).sum(-1)
        return slope, (share * variance).masked_fill(~used, 0).sum(-1)

    slopes, curvatures = derivatives((label, mean, variance))
    at_bound, separable = slopes[0] >= -ZERO_SLOPE, ((label[0] >= 0) | ~used).all()
    # The interval of the root; above the last value, the Newton step from it.
    k = (slopes[1:-1] < 0).sum()
    a, b, slope_a, slope_b = (x[i] for x in (grid, slopes) for i in (k, k + 1))
    # Cubic Hermite interpolation of alpha as a function of the slope, whose derivative is 1 / curvature, at slope 0.
    h = slope_b - slope_a
    t = -slope_a / h
    start = (1 + 2 * t) * (1 - t).square() * a + t * (1 - t).square() * h / curvatures[k]
    start = start + t.square() * (3 - 2 * t) * b + t.square() * (t - 1) * h / curvatures[k + 1]
    start = torch.where((start > a) & (start < b), start, (a * b).sqrt())
    start = torch.where(slope_b < 0, (b - slope_b / curvatures[k + 1]).clamp(max=4 * b), start)

    def at(alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        slope, curvature = (x.squeeze(0) for x in derivatives(moments(alpha.reshape(1))))
        return slope, curvature, torch.zeros_like(slope)

    start, one = torch.where(start.isfinite(), start, estimate), torch.ones_like(start)
    alpha, slope, done = _bracketed(at, one, start, at_bound | separable, 1e-5, ROUNDS)
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separable, SEPARABLE).masked_fill(at_bound, AT_ZERO)
    outcome = outcome.masked_fill(~used.any(), SEPARABLE).masked_fill((w == 0).all(), NO_DATA)
    alpha = alpha.masked_fill(at_bound, 0).masked_fill(outcome == SEPARABLE, 1)
    grad_norm = slope.abs().masked_fill(at_bound, 0).masked_fill(outcome == SEPARABLE, torch.nan)
    has_none = outcome == NO_DATA
    return alpha.masked_fill(has_none, torch.nan), grad_norm.masked_fill(has_none, torch.nan), outcome, lost


def approximate_alpha(p: LabelledScores, start: Tensor, relative: float = 0.3) -> Tensor:
    """Return an approximate alpha, `(1, S)` in [1e-3, 1e3], with relative tolerance `relative`."""
    start = start.float().clamp(0.1, 100).expand_as(p.label_mean)
    fixed = torch.zeros_like(start, dtype=torch.bool)
    alpha, *_ = _bracketed(nll_derivatives(p), p.scale, start, fixed, relative, 15)
    return alpha.nan_to_num(1).clamp(1e-3, 1e3)


def nll_derivatives(p: LabelledScores, backend: Backend = "auto") -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return a function from alpha `(R, S)` to the first three derivatives of the mean NLL in alpha, `(R, S)` each.

    Each is a weighted mean over the rows. The scores of a row have the distribution softmax(alpha s). The derivatives
    are their mean minus the score of the label, their variance, and their third central moment.
    """
    if p.top is None or p.w[..., 0].numel() > 1:  # few scores, or several fits, which share operations of torch
        return partial(derivatives_of, p)
    source: Any = source_of("moments", p.scores.device.type, p.scores.dtype, p.scores.numel(), backend)
    return partial(source.derivatives_of, p)


def row_means(scores: Tensor, top: Tensor) -> Tensor:
    """Return the mean of scores - top for each row `(S, N)`, in pieces that fit into the cache."""
    wide = wide_dtype(scores.device)
    one = torch.ones(scores.shape[0], dtype=wide, device=scores.device)
    pieces = standard_pieces(scores, top, one, wide, max(1, PIECE // scores.shape[-1]))
    return torch.cat([s.mean(-1) for s in pieces], 1)


def derivatives_of(p: LabelledScores, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the derivatives in plain torch; see `nll_derivatives`."""
    slope, curvature, skew = -p.label_mean, torch.zeros_like(p.label_mean), torch.zeros_like(p.label_mean)
    alpha = alpha[..., None, None]
    buffer: Tensor | None = None  # reused, because allocation is slower than the arithmetic
    for s, w in p.pieces():
        buffer = s.new_empty(*w.shape, s.shape[-1]) if buffer is None else buffer[..., : s.shape[1], :]
        q = torch.mul(alpha, s, out=buffer).exp_()  # at most 1, because no score is positive
        norm = q.sum(-1)
        # Compute the raw moments of the scores of order 1 to 3: multiply by s once more for each order.
        mean = q.mul_(s).sum(-1).div_(norm)
        square = q.mul_(s).sum(-1).div_(norm)
        cube = q.mul_(s).sum(-1).div_(norm)
        variance = square - mean.square()
        slope = slope + (w * mean).sum(-1)
        curvature = curvature + (w * variance).sum(-1)
        skew = skew + (w * (cube - mean * (square + 2 * variance))).sum(-1)
    return slope, curvature, skew


_SHARE = 0.01  # the error of the Taylor series in units of its estimate varies with the scores, and this covers it


def _bracketed(
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]],
    scale: Tensor,
    x: Tensor,
    fixed: Tensor,
    relative: float | None,
    rounds: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the root alpha of the slope of the NLL, the slope and whether it converged, each `(R, S)`.

    The slope increases with alpha, so every evaluation narrows the bracket of the root. A Halley step is a Newton step
    corrected by the third derivative, here by a factor in [1/2, 3/2]. It is accepted if it remains in the bracket, is
    at most half as long as the previous step, and does not quadruple alpha. Otherwise alpha becomes the geometric mean
    of the bounds, or 4 alpha without an upper bound, or a quarter of the upper bound without a lower bound.

    `derivatives` returns the first three derivatives of the mean NLL, for scores in units of `scale`. With a third
    derivative of 0, a Halley step is a Newton step.

    The iteration starts at `x`. A step of at most the fraction `relative` of alpha is the last one. The slope is then
    that at the previous alpha. None stops at `GRADIENT` and `DECREMENT`, or after a step that is short enough for the
    Taylor series of the slope, whose value is then returned. Its error is the fourth derivative of the NLL times
    step^3 / 6. That derivative is the fourth cumulant of the scores, which vary by multiples of 1 / alpha under the
    fitted probabilities. So the error is a multiple of |step / alpha|^3 / alpha, which must be below `_SHARE` of
    `GRADIENT`.
    """
    low, high = torch.zeros_like(x), torch.full_like(x, torch.inf)
    previous_length, slope, done, unit = high, low, fixed, scale.clamp(min=1)
    for _ in range(rounds):
        slope, curvature, skew = derivatives(x)
        # Halley's method for the root of slope(x): Newton step / (1 + step * skew / (2 * curvature)).
        step = -slope / curvature
        step = step / (1 + step * skew / (2 * curvature)).clamp(2 / 3, 2)
        if relative is None:
            is_last = ~fixed & (unit / x * (step / x).abs() ** 3 <= _SHARE * GRADIENT)
            done = is_last | ((slope * unit).abs() <= GRADIENT) & (slope * step >= -DECREMENT)
        else:
            done = is_last = step.abs() <= relative * x
        # Narrow the bracket by the sign of the slope.
        low, high = torch.where(slope < 0, x, low), torch.where(slope < 0, high, x)
        is_finished = done | fixed | slope.isnan() | (high - low <= 1e-15 * x)
        if all_true(is_finished):
            break
        # Safeguard: replace a step that leaves the bracket, or shrinks too slowly, by a bisection of log alpha.
        newton = x + step
        is_accepted = (newton > low) & (newton < high) & (newton < 4 * x) & (step.abs() <= previous_length / 2)
        middle = torch.where(low > 0, (low * high).sqrt(), high / 4)
        middle = torch.where(high == torch.inf, 4 * x, middle)
        next_x = torch.where(is_finished, x, torch.where(is_accepted, newton, middle))
        previous_length, x = (next_x - x).abs(), next_x
    x = torch.where(is_last, x + step, x)
    if relative is None:
        slope = torch.where(is_last, slope + step * (curvature + step * skew / 2), slope)
        done = done | is_within_rounding((slope * scale).abs(), slope * step)
    return x, slope, done
