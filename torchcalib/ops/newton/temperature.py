"""The scale alone: a bracketed Newton search."""

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
    """Return the best scale, and biases of 0."""
    # The NLL is convex: where it does not fall from alpha = 0 on, no positive alpha is better.
    at_bound = (p.w * p.mean).sum(-1) - p.of_label >= -FLAT
    separable = p.of_label >= 0  # every label has the largest score of its row
    # A thousand samples lead near the optimum, all of them to it: in float32, and then to the last digit.
    start = rough_alpha(p.rough(), rough_alpha(p.rough(1024), p.scale), 0.05)
    alpha, slope, done = _bracketed(p, start.to(p.w.dtype).expand_as(p.of_label), at_bound | separable, None, ROUNDS)

    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separable, SEPARABLE).masked_fill(at_bound, AT_ZERO)
    grad_norm = (slope * p.scale).abs().masked_fill(at_bound, 0)
    return alpha.masked_fill(at_bound, 0), torch.zeros_like(p.share), grad_norm, outcome


def rough_alpha(p: Problem, start: Tensor, relative: float = 0.3) -> Tensor:
    """Return alpha `(1, S)` to a few digits, within reason; see `_bracketed`."""
    start = start.float().clamp(0.1, 100).expand_as(p.of_label)
    alpha, *_ = _bracketed(p, start, torch.zeros_like(start, dtype=torch.bool), relative, 15)
    return alpha.nan_to_num(1).clamp(1e-3, 1e3)


def _derivatives(p: Problem, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first three derivatives of the NLL in alpha > 0 `(R, S)`: cumulants of the scores."""
    slope, curvature, skew = -p.of_label, torch.zeros_like(p.of_label), torch.zeros_like(p.of_label)
    alpha = alpha[..., None, None]
    room: Tensor | None = None  # fresh memory for every piece costs more than the arithmetic
    for s, w in p.pieces():
        room = s.new_empty(*w.shape, s.shape[-1]) if room is None else room[..., : s.shape[1], :]
        q = torch.mul(alpha, s, out=room).exp_()  # at most 1, for no score is positive
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
    """Find where the slope is 0, from `x` on.

    The slope rises with alpha, so that every value of it narrows the bracket. A Newton step, lengthened or shortened by
    up to a half for the third derivative (Halley's method), is taken if it stays inside and is at most half as long as
    the one before it; else the bracket is cut, or widened fourfold where it is open.

    Args:
        p: the problem.
        x: start, positive.
        fixed: what needs no search.
        relative: how long the last step may be, as a share of alpha; None asks for `GRADIENT` and `DECREMENT`.
        rounds: evaluations, at most.

    Returns:
        alpha, the slope there (with `relative`, one step before), and whether it is what was asked for, each `(R, S)`.
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
