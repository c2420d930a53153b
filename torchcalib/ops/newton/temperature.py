"""Fit of alpha in softmax(alpha s) by bracketed Halley steps, to the root of the derivative of the log-likelihood.

The derivative of one parameter brackets its root, which `descent` cannot use. Halley steps need the third derivative,
which costs one more product for each score.
"""

import torch
from torch import Tensor

from torchcalib.ops.newton import AT_ZERO, CONVERGED, SEPARABLE, STOPPED
from torchcalib.ops.newton.descent import DECREMENT, GRADIENT, ROUNDS, all_true, is_within_rounding
from torchcalib.ops.newton.scores import ZERO_SLOPE, LabelledScores, Solution


def solve_temperature(p: LabelledScores) -> Solution:
    """Minimise the negative log-likelihood (NLL) over alpha >= 0; the returned biases are 0."""
    # The NLL is convex: if its slope at alpha = 0 is not negative, no positive alpha is better.
    at_bound = (p.w * p.mean).sum(-1) - p.label_mean >= -ZERO_SLOPE
    separable = p.label_mean >= 0  # every label has the largest score of its row: the NLL has no finite minimiser
    # Start: the result of a float32 fit to all samples, which itself starts at a fit to about a thousand samples.
    start = approximate_alpha(p.averaged(), approximate_alpha(p.averaged(1024), p.scale), 0.05)
    alpha, slope, done = _bracketed(p, start.to(p.w.dtype).expand_as(p.label_mean), at_bound | separable, None, ROUNDS)

    # A minimum at the bound has priority: with equal scores, every label has the largest score of its row.
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separable, SEPARABLE).masked_fill(at_bound, AT_ZERO)
    grad_norm = (slope * p.scale).abs().masked_fill(at_bound, 0)
    return alpha.masked_fill(at_bound, 0), torch.zeros_like(p.share), grad_norm, outcome


def approximate_alpha(p: LabelledScores, start: Tensor, relative: float = 0.3) -> Tensor:
    """Return an approximate alpha, `(1, S)` in [1e-3, 1e3], with relative tolerance `relative`."""
    start = start.float().clamp(0.1, 100).expand_as(p.label_mean)
    alpha, *_ = _bracketed(p, start, torch.zeros_like(start, dtype=torch.bool), relative, 15)
    return alpha.nan_to_num(1).clamp(1e-3, 1e3)


def _derivatives(p: LabelledScores, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first three derivatives of the mean NLL in alpha, `(R, S)` each.

    Each is a weighted mean over the rows. The scores of a row have the distribution softmax(alpha s). The derivatives
    are their mean minus the score of the label, their variance, and their third central moment.
    """
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


def _bracketed(
    p: LabelledScores, x: Tensor, fixed: Tensor, relative: float | None, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the root alpha of the slope of the NLL, the slope and whether it converged, each `(R, S)`.

    The slope increases with alpha, so every evaluation narrows the bracket of the root. A Halley step is a Newton step
    corrected by the third derivative, here by a factor in [1/2, 3/2]. It is accepted if it remains in the bracket, is
    at most half as long as the previous step, and does not quadruple alpha. Otherwise alpha becomes the geometric mean
    of the bounds, or 4 alpha without an upper bound, or a quarter of the upper bound without a lower bound.

    The iteration starts at `x`, and stops at a step of the fraction `relative` of alpha. The slope is then that at the
    previous alpha. None stops at `GRADIENT` and `DECREMENT`.
    """
    low, high = torch.zeros_like(x), torch.full_like(x, torch.inf)
    previous_length, slope, done = high, low, fixed
    for _ in range(rounds):
        slope, curvature, skew = _derivatives(p, x)
        # Halley's method for the root of slope(x): Newton step / (1 + step * skew / (2 * curvature)).
        step = -slope / curvature
        step = step / (1 + step * skew / (2 * curvature)).clamp(2 / 3, 2)
        exact = ((slope * p.scale.clamp(min=1)).abs() <= GRADIENT) & (slope * step >= -DECREMENT)
        done = exact if relative is None else step.abs() <= relative * x
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
    if relative is None:
        return x, slope, done | is_within_rounding((slope * p.scale).abs(), slope * step)
    return torch.where(done, x + step, x), slope, done
