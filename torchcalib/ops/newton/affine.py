"""Fit of scale and biases: damped Newton steps with an Armijo condition (Nocedal, Wright: Numerical optimization)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import look
from torchcalib.ops.newton.problem import (
    AT_ZERO,
    CONVERGED,
    DECREMENT,
    FAR,
    FLAT,
    GRADIENT,
    NOISE,
    PIECE,
    ROUNDS,
    SEPARABLE,
    STOPPED,
    Problem,
    Solved,
    all_true,
    enough,
)
from torchcalib.ops.newton.temperature import rough_alpha


class _Value(NamedTuple):
    """NLL `(R, S)` with gradient `(R, S, C + 1)` and Hessian `(R, S, C + 1, C + 1)`, alpha before beta."""

    nll: Tensor
    gradient: Tensor
    hessian: Tensor


def solve_dp(p: Problem) -> Solved:
    """Return the best scale and biases; biases of classes without samples are -inf."""
    present = p.share > 0
    at_bound = _slope_at_zero(p) >= -FLAT
    rough = p.rough()
    ahead = rough_alpha(p.rough(1024), p.scale).unsqueeze(-1)
    begin = torch.cat((ahead, torch.zeros_like(rough.share)), -1)
    theta, *_ = _damped(rough, begin, rough.of_label > 0, 1e-3, 25)
    theta = torch.where(theta.isfinite().all(-1, keepdim=True), theta, begin).to(p.w.dtype)

    # Few weightings at a time, so that a slow one delays few others.
    at_once = max(1, PIECE // max(1, p.scores.numel()))
    pieces = [slice(i, i + at_once) for i in range(0, max(1, p.w.shape[0]), at_once)]
    starts = theta.expand(p.w.shape[0], -1, -1)
    found = [_damped(p.some(i), starts[i], at_bound[i], None, ROUNDS) for i in pieces]
    theta, gradient, outcome = (torch.cat(column) for column in zip(*found, strict=True))

    beta = torch.where(at_bound.unsqueeze(-1), p.share.log(), theta[..., 1:]).masked_fill(~present, 0)
    beta = (beta - beta.sum(-1, keepdim=True) / present.sum(-1, keepdim=True)).masked_fill(~present, -torch.inf)
    gradient = torch.cat((gradient[..., :1] * p.scale[:, None], gradient[..., 1:]), -1)
    grad_norm = gradient.square().sum(-1).sqrt().masked_fill(at_bound, 0)
    return theta[..., 0].masked_fill(at_bound, 0), beta, grad_norm, outcome.masked_fill(at_bound, AT_ZERO)


def _slope_at_zero(p: Problem) -> Tensor:
    """Return the slope of the NLL in alpha at alpha = 0 and the best biases there, the log class frequencies `(R, S)`.

    The NLL is convex: if this slope is not negative, no positive alpha is better than 0.
    """
    mean = torch.zeros_like(p.share)
    for s, w in p.pieces():
        mean = mean + torch.einsum("rsn,snc->rsc", w, s)
    return (mean * p.share).sum(-1) - p.of_label


def _damped(
    p: Problem, theta: Tensor, fixed: Tensor, relative: float | None, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the NLL, starting at `theta`.

    A Newton step is taken if the NLL decreases by 1e-4 of the decrease that the slope predicts (Armijo condition).
    Otherwise a quarter of the step is tried. A step reduces alpha to a tenth at most, so alpha stays positive.

    Args:
        p: the problem.
        theta: start `(R, S, C + 1)`, alpha positive.
        fixed: fits that need no search `(R, S)`.
        relative: largest last step; None for the targets `GRADIENT` and `DECREMENT`.
        rounds: largest number of evaluations.

    Returns:
        theta, its gradient (with `relative`, one step before), and the outcome `(R, S)`.
    """
    present = p.share > 0
    theta = torch.cat((theta[..., :1], theta[..., 1:].masked_fill(~present, FAR)), -1)
    eps = torch.finfo(theta.dtype).eps
    in_units = torch.cat((p.scale.clamp(min=1)[:, None], torch.ones_like(p.share[0])), -1)  # units of a gradient
    least = torch.where(p.w > 0, p.w, torch.inf).amin(-1)

    def norm(value: _Value) -> Tensor:
        return (value.gradient * in_units).square().sum(-1).sqrt()

    value, kept = _evaluate(p, theta), False
    part = torch.ones_like(p.of_label)
    for _ in range(rounds):
        step = _newton_step(value, present)
        shrink = (-0.9 * theta[..., 0] / step[..., 0]).where(step[..., 0] < 0, part).clamp(max=1)
        step = step * shrink.unsqueeze(-1)
        slope = (step * value.gradient).sum(-1)
        length = step[..., 0].abs() + step[..., 1:].abs().amax(-1)
        exact = (norm(value) <= GRADIENT) & (slope >= -DECREMENT)
        done = exact if relative is None else length <= relative
        # A sample whose label is not the most likely class costs at least its weight times log 2.
        separated = value.nll < least * math.log(2)
        stays = done | fixed | separated | value.nll.isnan() | (part < 1e-6)
        if all_true(stays):
            break
        moved = theta + part.unsqueeze(-1) * step
        # A short step hardly changes the Hessian, and mostly no further step follows: keep it once.
        kept = not kept and relative is None and all_true(stays | (part * length <= 1e-5))
        new = _evaluate(p, moved, value.hessian if kept else None)
        falls = new.nll <= value.nll + 1e-4 * part * slope + 4 * eps * (1 + value.nll)
        # Near the optimum the decrease is below the rounding error of the NLL, but the gradient still decreases.
        level = new.nll <= value.nll + NOISE * (1 + value.nll)
        better = ~stays & (falls | (level & (norm(new) <= norm(value) / 2)))
        theta = torch.where(better[..., None], moved, theta)
        value = _Value(
            torch.where(better, new.nll, value.nll),
            torch.where(better[..., None], new.gradient, value.gradient),
            torch.where(better[..., None, None], new.hessian, value.hessian),
        )
        part = torch.where(better, 1, part / 4).where(~stays, part)
    if relative is None:
        done = done | enough(norm(value), slope)
    else:
        theta = torch.where(done.unsqueeze(-1), theta + step, theta)
    # Under separation the gradient vanishes but the Newton step does not.
    endless = done & ~fixed & (length > 0.01) if relative is None else separated
    if look(endless.any()):
        endless = endless & _never_falls(p, step, present)
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separated | endless, SEPARABLE)
    return theta, value.gradient, outcome


def _never_falls(p: Problem, step: Tensor, present: Tensor) -> Tensor:
    """Return whether the likelihood of no sample decreases along `step`, however long: separation `(R, S)`.

    This holds if no class gains on the label of any sample. (Along a step that changes nothing, the slope is rounding
    error, and some samples lose.)

    Source: Albert, Anderson: On the existence of maximum likelihood estimates in logistic regression models (1984).
    """
    beta = step[..., 1:]
    of_label = step[..., :1] * p.s_label + beta.gather(-1, p.target.expand(p.w.shape))
    worst = torch.full_like(p.of_label, torch.inf)
    start = 0
    for s, w in p.pieces():
        best = torch.addcmul(beta.masked_fill(~present, FAR).unsqueeze(-2), step[..., :1, None], s).amax(-1)
        margin = of_label[..., start : start + s.shape[1]] - best
        worst = torch.minimum(worst, margin.masked_fill(w == 0, torch.inf).amin(-1))
        start += s.shape[1]
    return worst >= -1e-6 * step.abs().amax(-1)


def _evaluate(p: Problem, theta: Tensor, hessian: Tensor | None = None) -> _Value:
    """Sum the NLL and its derivatives over the pieces; a given Hessian is returned as it is.

    With q the softmax of a row and m = sum_k q_k s_k, the Hessian is the weighted mean of sum_k q_k s_k^2 - m^2 in
    alpha, of q_k (s_k - m) between alpha and beta_k, and of diag(q) - q q' in beta.
    """
    alpha, beta = theta[..., :1, None], theta[..., None, 1:]
    nll = -theta[..., 0] * p.of_label - (theta[..., 1:] * p.share).sum(-1)
    mean_q, mean_qs, mixed = (torch.zeros_like(p.share) for _ in range(3))
    square = torch.zeros_like(p.of_label)
    outer = theta.new_zeros(*p.share.shape, p.share.shape[-1])
    rooms: tuple[Tensor, Tensor] | None = None  # buffers: new memory for each piece costs more than the arithmetic
    for s, w in p.pieces():
        if rooms is None:
            rooms = s.new_empty(*w.shape, s.shape[-1]), s.new_empty(*w.shape, s.shape[-1])
        room, spare = (x[..., : s.shape[1], :] for x in rooms)
        q = torch.addcmul(beta, alpha, s, out=room)
        top = q.amax(-1, keepdim=True)
        q = q.sub_(top).exp_()
        norm = q.sum(-1, keepdim=True)
        q = q.div_(norm)
        qs = torch.mul(q, s, out=spare)
        row = w.unsqueeze(-2)
        nll = nll + (row @ norm.log().add_(top)).squeeze((-1, -2))
        mean_qs = mean_qs + (row @ qs).squeeze(-2)
        if hessian is not None:
            mean_q = mean_q + (row @ q).squeeze(-2)
            continue
        m = qs.sum(-1, keepdim=True)
        square = square + (row @ qs.mul_(s)).sum((-1, -2)) - (row @ m.square()).squeeze((-1, -2))
        weighted = torch.mul(q, w.unsqueeze(-1), out=spare).mT
        mixed = mixed + (weighted @ m).squeeze(-1)
        outer = outer + weighted @ q
    if hessian is None:
        mean_q = outer.sum(-1)  # because the q of a row sum to 1
        mixed = (mean_qs - mixed).unsqueeze(-1)
        left = torch.cat((square[..., None, None], mixed), -2)
        hessian = torch.cat((left, torch.cat((mixed.mT, torch.diag_embed(mean_q) - outer), -2)), -1)
    gradient = torch.cat((mean_qs.sum(-1, keepdim=True) - p.of_label.unsqueeze(-1), mean_q - p.share), -1)
    return _Value(nll, gradient, hessian)


def _newton_step(value: _Value, present: Tensor) -> Tensor:
    """Return the Newton step, which keeps the sum of beta.

    A constant added to every beta changes no probability, so the Hessian is singular along ones. Their outer product
    makes it regular and does not change the solution, because the gradient is orthogonal to ones. The diagonal is
    scaled to 1, since class frequencies may differ by any factor. A ridge of the size of rounding errors, increased
    where the Cholesky factor fails, covers the rest of a null space.
    """
    ones = torch.cat((torch.zeros_like(present[..., :1]), present), -1).to(value.gradient.dtype)
    trace = value.hessian.diagonal(dim1=-2, dim2=-1)[..., 1:].sum(-1)
    weight = trace / present.sum(-1).clamp(min=1).square()
    matrix = value.hessian + weight[..., None, None] * ones.unsqueeze(-1) * ones.unsqueeze(-2)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    held = diagonal > 0
    unit = torch.where(held, diagonal, 1).rsqrt()
    matrix = matrix * unit.unsqueeze(-1) * unit.unsqueeze(-2) + torch.diag_embed((~held).to(unit.dtype))
    eye = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
    eps = torch.finfo(unit.dtype).eps
    factor, failed = torch.linalg.cholesky_ex(matrix + 50 * eps * eye)
    for ridge in (1e5 * eps, 1e-4, 1e-1):
        if all_true(failed == 0):
            break
        again, still = torch.linalg.cholesky_ex(matrix + max(ridge, 1e2 * eps) * eye)
        factor = torch.where((failed > 0)[..., None, None], again, factor)
        failed = torch.where(failed > 0, still, failed)
    return -torch.cholesky_solve((value.gradient * unit).unsqueeze(-1), factor).squeeze(-1) * unit
