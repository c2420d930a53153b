"""Fit of the scale alone: a bracketed search with Halley steps on the slope of the NLL."""

import torch
from torch import Tensor

from torchcalib.ops.newton.problem import (
    AT_ZERO,
    CONVERGED,
    DECREMENT,
    FLAT,
    GRADIENT,
    ROUNDS,
    SEPARABLE,
    STOPPED,
    Problem,
    Solved,
    all_true,
    enough,
)


def solve_temperature(p: Problem) -> Solved:
    """Return the best scale and biases of 0."""
    # The NLL is convex: where it does not fall from alpha = 0 on, no positive alpha is better.
    at_bound = (p.w * p.mean).sum(-1) - p.of_label >= -FLAT
    separable = p.of_label >= 0  # every label has the largest score of its row
    # Start near the optimum: a float32 fit to a thousand samples, then one to all of them.
    start = rough_alpha(p.rough(), rough_alpha(p.rough(1024), p.scale), 0.05)
    alpha, slope, done = _bracketed(p, start.to(p.w.dtype).expand_as(p.of_label), at_bound | separable, None, ROUNDS)

    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separable, SEPARABLE).masked_fill(at_bound, AT_ZERO)
    grad_norm = (slope * p.scale).abs().masked_fill(at_bound, 0)
    return alpha.masked_fill(at_bound, 0), torch.zeros_like(p.share), grad_norm, outcome


def rough_alpha(p: Problem, start: Tensor, relative: float = 0.3) -> Tensor:
    """Return a rough alpha `(1, S)` in [1e-3, 1e3]; see `_bracketed`."""
    start = start.float().clamp(0.1, 100).expand_as(p.of_label)
    alpha, *_ = _bracketed(p, start, torch.zeros_like(start, dtype=torch.bool), relative, 15)
    return alpha.nan_to_num(1).clamp(1e-3, 1e3)


def _derivatives(p: Problem, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first three derivatives of the NLL in alpha > 0 `(R, S)`: minus the label score plus the cumulants."""
    slope, curvature, skew = -p.of_label, torch.zeros_like(p.of_label), torch.zeros_like(p.of_label)
    alpha = alpha[..., None, None]
    room: Tensor | None = None  # one buffer: new memory for each piece costs more than the arithmetic
    for s, w in p.pieces():
        room = s.new_empty(*w.shape, s.shape[-1]) if room is None else room[..., : s.shape[1], :]
        q = torch.mul(alpha, s, out=room).exp_()  # at most 1, because no score is positive
        norm = q.sum(-1)
        mean, square, cube = (q.mul_(s).sum(-1).div_(norm) for _ in range(3))
        variance = square - mean.square()
        slope = slope + (w * mean).sum(-1)
        curvature = curvature + (w * variance).sum(-1)
        skew = skew + (w * (cube - mean * (square + 2 * variance))).sum(-1)
    return slope, curvature, skew


def _bracketed(
    p: Problem, x: Tensor, fixed: Tensor, relative: float | None, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the root of the slope, starting at `x`.

    The slope increases with alpha, so every evaluation narrows the bracket. A Newton step, corrected by up to a half
    for the third derivative (Halley's method), is taken if it stays inside the bracket and is at most half as long as
    the step before. Otherwise the bracket is divided at its geometric mean, or widened fourfold if it is open.

    Args:
        p: the problem.
        x: start, positive.
        fixed: fits that need no search.
        relative: largest last step as a share of alpha; None for the targets `GRADIENT` and `DECREMENT`.
        rounds: largest number of evaluations.

    Returns:
        alpha, its slope (with `relative`, one step before), and whether the target is met, each `(R, S)`.
    """
    low, high = torch.zeros_like(x), torch.full_like(x, torch.inf)
    last, slope, done = high, low, fixed
    for _ in range(rounds):
        slope, curvature, skew = _derivatives(p, x)
        step = -slope / curvature
        step = step / (1 + step * skew / (2 * curvature)).clamp(2 / 3, 2)
        exact = ((slope * p.scale.clamp(min=1)).abs() <= GRADIENT) & (slope * step >= -DECREMENT)
        done = exact if relative is None else step.abs() <= relative * x
        low, high = torch.where(slope < 0, x, low), torch.where(slope < 0, high, x)
        stays = done | fixed | slope.isnan() | (high - low <= 1e-15 * x)
        if all_true(stays):
            break
        newton = x + step
        taken = (newton > low) & (newton < high) & (newton < 4 * x) & (step.abs() <= last / 2)
        cut = torch.where(low > 0, (low * high).sqrt(), high / 4)
        cut = torch.where(high == torch.inf, 4 * x, cut)
        following = torch.where(stays, x, torch.where(taken, newton, cut))
        last, x = (following - x).abs(), following
    if relative is None:
        return x, slope, done | enough((slope * p.scale).abs(), slope * step)
    return torch.where(done, x + step, x), slope, done
