"""Fit of alpha and beta in softmax(alpha s + beta): damped Newton steps on the negative log-likelihood (NLL).

Source: Nocedal, Wright: Numerical optimization (2006), algorithm 3.2 with the Armijo condition.
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.newton.problem import (
    AT_ZERO,
    CONVERGED,
    DECREMENT,
    GRADIENT,
    MASKED_SCORE,
    NLL_ROUNDING,
    PIECE,
    ROUNDS,
    SEPARABLE,
    STOPPED,
    ZERO_SLOPE,
    Problem,
    Solution,
    all_true,
    is_within_rounding,
    newton_direction,
)
from torchcalib.ops.newton.temperature import approximate_alpha


class _Value(NamedTuple):
    """Mean NLL `(R, S)`, its gradient `(R, S, C + 1)` and Hessian `(R, S, C + 1, C + 1)` in (alpha, beta)."""

    nll: Tensor
    gradient: Tensor
    hessian: Tensor


def solve_affine(p: Problem, free_scale: bool = True) -> Solution:
    """Minimise the NLL over alpha > 0 and beta; the bias of classes without samples is -inf.

    Args:
        p: scores, labels and weights in standard form.
        free_scale: False for alpha = 1 in the units of the original scores.
    """
    present = p.share > 0
    at_bound, beta_at_zero = torch.zeros_like(present[..., 0]), p.share
    if free_scale:
        beta_at_zero, slope = _limit_at_zero(p)
        at_bound = slope >= -ZERO_SLOPE  # the NLL is convex: no positive alpha is better than 0
    averaged = p.averaged()
    # Start: a float32 temperature fit to about a thousand samples, then a float32 fit to the mean replicate weights.
    if free_scale:
        alpha, beta = approximate_alpha(p.averaged(1024), p.scale), torch.zeros_like(averaged.share)
    else:
        alpha, beta = averaged.scale.unsqueeze(0), _bias_of_constant(averaged)
    start = torch.cat((alpha.unsqueeze(-1), beta), -1)
    theta, *_ = _damped(averaged, start, averaged.label_mean > 0, 1e-3, 25, free_scale)
    theta = torch.where(theta.isfinite().all(-1, keepdim=True), theta, start).to(p.w.dtype)
    if not free_scale:
        theta = torch.cat((p.scale[:, None].expand_as(theta[..., :1]), theta[..., 1:]), -1)  # without float32 rounding

    theta, gradient, outcome = _by_replicates(p, theta.expand(p.w.shape[0], -1, -1), at_bound, free_scale)

    # Subtract the mean over classes with samples.
    beta = torch.where(at_bound.unsqueeze(-1), beta_at_zero, theta[..., 1:]).masked_fill(~present, 0)
    beta = (beta - beta.sum(-1, keepdim=True) / present.sum(-1, keepdim=True)).masked_fill(~present, -torch.inf)
    gradient = torch.cat((gradient[..., :1] * p.scale[:, None], gradient[..., 1:]), -1)
    grad_norm = gradient.square().sum(-1).sqrt().masked_fill(at_bound, 0)
    return theta[..., 0].masked_fill(at_bound, 0), beta, grad_norm, outcome.masked_fill(at_bound, AT_ZERO)


def _bias_of_constant(p: Problem) -> Tensor:
    """Return log class frequencies minus log mean probabilities, the solution for constant predictions, `(1, S, C)`.

    From beta = 0, Newton steps would be too long where the Hessian is almost 0, far from the solution.
    """
    log_mean = torch.full_like(p.share, -torch.inf)
    for s, w in p.pieces():
        log_q = (p.scale[:, None, None] * s).log_softmax(-1)
        log_mean = torch.logaddexp(log_mean, (w[0].log().unsqueeze(-1) + log_q).logsumexp(-2).unsqueeze(0))
    return (p.share.log() - log_mean).masked_fill(p.share == 0, 0)


def _limit_at_zero(p: Problem) -> tuple[Tensor, Tensor]:
    """Return the optimal beta `(R, S, C)` for alpha -> 0, and the slope of the NLL in alpha there, `(R, S)`.

    A class with a score of -inf has probability 0 for every alpha > 0, also in the limit. A row with a single possible
    class therefore does not affect the fit. Without such scores, beta is the log class frequencies. The slope is NaN if
    a class has samples only in rows without another possible class, because its optimal bias is -inf.
    """
    if not p.has_masked:
        mean = torch.zeros_like(p.share)
        for s, w in p.pieces():
            mean = mean + torch.einsum("rsn,snc->rsc", w, s)
        return p.share.log(), (mean * p.share).sum(-1) - p.label_mean
    excluded = p.scores <= MASKED_SCORE / 2
    is_certain = excluded.sum(-1) == excluded.shape[-1] - 1
    w = p.w.masked_fill(is_certain, 0)
    w = w / w.sum(-1, keepdim=True)
    share = torch.zeros_like(p.share).scatter_add(-1, p.target.expand(w.shape), w)
    flat = replace(
        p,
        scores=torch.zeros_like(p.scores).masked_fill_(excluded, MASKED_SCORE),
        label_score=torch.zeros_like(p.label_score),
        w=w,
        share=share,
        scale=torch.ones_like(p.scale),
        label_mean=torch.zeros_like(p.label_mean),
    )
    log_share = share.log().masked_fill(share == 0, 0)
    start = torch.cat((torch.ones_like(log_share[..., :1]), log_share), -1)
    is_unknown = ((share > 0) != (p.share > 0)).any(-1)
    theta, _, outcome = _by_replicates(flat, start, is_unknown, False)
    beta = theta[..., 1:]
    slope = -(w * p.label_score).sum(-1)
    finite_scores = p.scores.masked_fill(excluded, 0)
    for scores, (s, of_rows) in zip(torch.split(finite_scores, flat.rows_of_piece, 1), flat.pieces(), strict=True):
        q = (beta.unsqueeze(-2) + s).softmax(-1)
        slope = slope + torch.einsum("rsn,rsnc,snc->rs", of_rows, q, scores)
    return beta, slope.masked_fill(is_unknown | (outcome != CONVERGED), torch.nan)


def _by_replicates(p: Problem, theta: Tensor, fixed: Tensor, free_scale: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the NLL for few fits at a time, because all fits of a batch are evaluated until the last one converges.

    For the arguments see `_damped`.
    """
    batch_size = max(1, PIECE // max(1, p.scores.numel()))
    pieces = [slice(i, i + batch_size) for i in range(0, max(1, p.w.shape[0]), batch_size)]
    solutions = [_damped(p.for_replicates(i), theta[i], fixed[i], None, ROUNDS, free_scale) for i in pieces]
    theta, gradient, outcome = (torch.cat(column) for column in zip(*solutions, strict=True))
    return theta, gradient, outcome


def _damped(
    p: Problem, theta: Tensor, fixed: Tensor, relative: float | None, rounds: int, free_scale: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the NLL by damped Newton steps.

    A step is accepted if the NLL decreases by at least 1e-4 of the decrease predicted by the slope (Armijo condition).
    Otherwise a quarter of the step is tried. A step reduces alpha to a tenth of its value at most, so alpha remains
    positive.

    Args:
        p: scores, labels and weights in standard form.
        theta: initial (alpha, beta), `(R, S, C + 1)` with positive alpha.
        fixed: True for fits that are not iterated and return the initial theta, `(R, S)`.
        relative: stop at a step of this length; None to stop at `GRADIENT` and `DECREMENT`.
        rounds: largest number of evaluations.
        free_scale: False to keep alpha.

    Returns:
        theta `(R, S, C + 1)`; its gradient (with `relative`, the gradient one step earlier); and the outcome `(R, S)`.
    """
    present = p.share > 0
    theta = torch.cat((theta[..., :1], theta[..., 1:].masked_fill(~present, MASKED_SCORE)), -1)
    eps = torch.finfo(theta.dtype).eps
    # The gradient must be small in standard and in original units of alpha.
    units = torch.cat((p.scale.clamp(min=1)[:, None], torch.ones_like(p.share[0])), -1)
    smallest_weight = torch.where(p.w > 0, p.w, torch.inf).amin(-1)

    def norm(value: _Value) -> Tensor:
        return (value.gradient * units).square().sum(-1).sqrt()

    def evaluate(theta: Tensor, hessian: Tensor | None = None) -> _Value:
        value = _evaluate(p, theta, hessian)
        return value if free_scale else _with_fixed_scale(value)

    value, reused = evaluate(theta), False
    fraction = torch.ones_like(p.label_mean)
    for _ in range(rounds):
        step = _newton_step(value, present)
        shrink = (-0.9 * theta[..., 0] / step[..., 0]).where(step[..., 0] < 0, fraction).clamp(max=1)
        step = step * shrink.unsqueeze(-1)
        slope = (step * value.gradient).sum(-1)
        length = step[..., 0].abs() + step[..., 1:].abs().amax(-1)
        exact = (norm(value) <= GRADIENT) & (slope >= -DECREMENT)
        done = exact if relative is None else length <= relative
        # Separation: below this NLL every label has probability > 1/2. One label with a lower probability would add at
        # least its weight times log 2 to the NLL.
        is_separated = (value.nll < smallest_weight * math.log(2)) & free_scale
        is_finished = done | fixed | is_separated | value.nll.isnan() | (fraction < 1e-6)
        if all_true(is_finished):
            break
        moved = theta + fraction.unsqueeze(-1) * step
        # After a short step, which is usually the last one, reuse the nearly unchanged Hessian once.
        reused = not reused and relative is None and all_true(is_finished | (fraction * length <= 1e-5))
        new = evaluate(moved, value.hessian if reused else None)
        meets_armijo = new.nll <= value.nll + 1e-4 * fraction * slope + 4 * eps * (1 + value.nll)
        # Near the minimum the NLL is constant up to rounding errors. There accept a step that halves the gradient.
        is_level = new.nll <= value.nll + NLL_ROUNDING * (1 + value.nll)
        better = ~is_finished & (meets_armijo | (is_level & (norm(new) <= norm(value) / 2)))
        theta = torch.where(better[..., None], moved, theta)
        value = _Value(
            torch.where(better, new.nll, value.nll),
            torch.where(better[..., None], new.gradient, value.gradient),
            torch.where(better[..., None, None], new.hessian, value.hessian),
        )
        fraction = torch.where(better, 1, fraction / 4).where(~is_finished, fraction)
    if relative is None:
        done = done | is_within_rounding(norm(value), slope)
    else:
        theta = torch.where(done.unsqueeze(-1), theta + step, theta)
    # For separable data the gradient vanishes, but the Newton steps remain long.
    may_be_separable = done & ~fixed & (length > 0.01) if relative is None else is_separated
    if value_if_available(may_be_separable.any()):
        may_be_separable = may_be_separable & _is_separation(p, step, present)
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(is_separated | may_be_separable, SEPARABLE)
    return theta, value.gradient, outcome


def _is_separation(p: Problem, step: Tensor, present: Tensor) -> Tensor:
    """Return whether the data are separable in the direction `step`, bool `(R, S)`.

    They are separable if the score of every label grows along `step` at least as fast as all other scores of its row.
    No likelihood then decreases, at any length of the step.

    Source: Albert, Anderson: On the existence of maximum likelihood estimates in logistic regression models (1984).
    """
    beta = step[..., 1:]
    growth = step[..., :1] * p.label_score + beta.gather(-1, p.target.expand(p.w.shape))
    worst = torch.full_like(p.label_mean, torch.inf)
    start = 0
    for s, w in p.pieces():
        best = torch.addcmul(beta.masked_fill(~present, MASKED_SCORE).unsqueeze(-2), step[..., :1, None], s).amax(-1)
        margin = growth[..., start : start + s.shape[1]] - best
        worst = torch.minimum(worst, margin.masked_fill(w == 0, torch.inf).amin(-1))
        start += s.shape[1]
    tolerance = 1e-6 * step.abs().amax(-1)
    # Without growth of alpha, the bias of a class whose labels are certain by masks falls. The NLL has then converged.
    return (worst >= -tolerance) & (step[..., 0] > tolerance)


def _evaluate(p: Problem, theta: Tensor, hessian: Tensor | None = None) -> _Value:
    """Compute the mean NLL and its derivatives at theta; a given Hessian is returned unchanged.

    Let q be the softmax of a row and m = sum_k q_k s_k. The Hessian contains weighted means over the rows:
    sum_k q_k s_k^2 - m^2 for alpha, q_k (s_k - m) for alpha and beta_k, and the matrix diag(q) - q q' for beta.
    """
    alpha, beta = theta[..., :1, None], theta[..., None, 1:]
    nll = -theta[..., 0] * p.label_mean - (theta[..., 1:] * p.share).sum(-1)
    mean_q, mean_qs, mixed = (torch.zeros_like(p.share) for _ in range(3))
    square = torch.zeros_like(p.label_mean)
    outer = theta.new_zeros(*p.share.shape, p.share.shape[-1])
    buffers: tuple[Tensor, Tensor] | None = None  # reused, because allocation is slower than the arithmetic
    for s, w in p.pieces():
        if buffers is None:
            buffers = s.new_empty(*w.shape, s.shape[-1]), s.new_empty(*w.shape, s.shape[-1])
        buffer, second_buffer = (x[..., : s.shape[1], :] for x in buffers)
        # Softmax of each row, relative to its largest logit.
        q = torch.addcmul(beta, alpha, s, out=buffer)
        top = q.amax(-1, keepdim=True)
        q = q.sub_(top).exp_()
        norm = q.sum(-1, keepdim=True)
        q = q.div_(norm)
        qs = torch.mul(q, s, out=second_buffer)
        # Weighted sums of log-sum-exp and of the gradient.
        row = w.unsqueeze(-2)
        nll = nll + (row @ norm.log().add_(top)).squeeze((-1, -2))
        mean_qs = mean_qs + (row @ qs).squeeze(-2)
        if hessian is not None:
            mean_q = mean_q + (row @ q).squeeze(-2)
            continue
        # Weighted sums of the Hessian blocks.
        m = qs.sum(-1, keepdim=True)
        square = square + (row @ qs.mul_(s)).sum((-1, -2)) - (row @ m.square()).squeeze((-1, -2))
        weighted = torch.mul(q, w.unsqueeze(-1), out=second_buffer).mT
        mixed = mixed + (weighted @ m).squeeze(-1)
        outer = outer + weighted @ q
    if hessian is None:
        mean_q = outer.sum(-1)  # because the q of a row sum to 1
        mixed = (mean_qs - mixed).unsqueeze(-1)
        left = torch.cat((square[..., None, None], mixed), -2)
        hessian = torch.cat((left, torch.cat((mixed.mT, torch.diag_embed(mean_q) - outer), -2)), -1)
    gradient = torch.cat((mean_qs.sum(-1, keepdim=True) - p.label_mean.unsqueeze(-1), mean_q - p.share), -1)
    return _Value(nll, gradient, hessian)


def _with_fixed_scale(value: _Value) -> _Value:
    """Return derivatives for which the Newton step does not change alpha."""
    gradient = torch.cat((torch.zeros_like(value.gradient[..., :1]), value.gradient[..., 1:]), -1)
    hessian = value.hessian.clone()
    hessian[..., 0, :] = 0
    hessian[..., :, 0] = 0
    hessian[..., 0, 0] = 1
    return _Value(value.nll, gradient, hessian)


def _newton_step(value: _Value, present: Tensor) -> Tensor:
    """Return the Newton step `(R, S, C + 1)`, which does not change the sum of beta.

    Adding a constant to all beta changes no probability. The Hessian H is therefore singular in the direction e, which
    is 0 for alpha and 1 for beta. H + c e e' is used instead. This does not change the step, because the gradient is
    orthogonal to e.
    """
    ones = torch.cat((torch.zeros_like(present[..., :1]), present), -1).to(value.gradient.dtype)
    trace = value.hessian.diagonal(dim1=-2, dim2=-1)[..., 1:].sum(-1)
    weight = trace / present.sum(-1).clamp(min=1).square()
    matrix = value.hessian + weight[..., None, None] * ones.unsqueeze(-1) * ones.unsqueeze(-2)
    return newton_direction(matrix, value.gradient)
