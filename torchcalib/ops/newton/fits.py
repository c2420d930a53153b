"""Fits of softmax(alpha s + beta): temperature scaling, where beta is 0, and DP calibration [EPSR].

Axes: `R` weight vectors of one sample (folds, bootstrap replicates), `S` series, `N` samples, `C` classes. All fits of
a call are one batched problem, in pieces that fit into the cache; the scores are never copied R times.

The mean NLL is convex in (alpha, beta), so the start only affects the number of rounds. It is a float32 fit to the mean
of the weights.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton.minimise import Minimum, Value, minimise, newton_step
from torchcalib.ops.newton.problem import (
    AT_ZERO,
    CONVERGED,
    FAR,
    NO_DATA,
    PIECE,
    SEPARABLE,
    STOPPED,
    Problem,
    standard_form,
)
from torchcalib.ops.operation import operation

_TARGET = 1e-10, 1e-15  # gradient norm of the mean NLL, and twice the NLL that one more step would gain
_ENOUGH = 1e-9, 1e-12  # both, where rounding prevents the targets
_FLAT = 1e-14  # a slope within rounding error of 0
_LONGEST = 8.0  # longest step in beta: further away, the likelihood is no parabola
_FEW = 1024  # samples of the first rough fit


class AffineFit(NamedTuple):
    """Fits of softmax(alpha s + beta).

    Attributes:
        alpha: `(R, S)`, positive. 0 under `AT_ZERO`, as a limit: a score of -inf stays -inf. 1 under `SEPARABLE`.
        beta: `(R, S, C)`, of sum 0 over the classes with samples, and -inf for the others; 0 under `SEPARABLE`.
        grad_norm: norm of the gradient of the mean NLL in the parameters that are not at a bound `(R, S)`; NaN under
            `SEPARABLE`.
        outcome: int64 `(R, S)`. `CONVERGED`. `AT_ZERO`: the best alpha is not positive, the scores carry no
            information about the class. `SEPARABLE`: no finite (alpha, beta) is best. `STOPPED`: the NLL could not be
            decreased further, but the gradient is not small. `NO_DATA`: no weight, all values are NaN.
        lost: weight of the samples whose label has a score of -inf `(R, S)`. Their NLL is infinite for every
            alpha > 0, so they are left out of the fit.
    """

    alpha: Tensor
    beta: Tensor
    grad_norm: Tensor
    outcome: Tensor
    lost: Tensor


def fit_temperature(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s), alpha > 0.

    Args:
        scores: log-probabilities or logits `(S, N, C)`, without +inf and with a finite score in every row.
        target: labels, int64 `(S, N)`.
        weights: `(R, S, N)`. Samples of weight 0 are ignored.
    """
    return AffineFit(*_fit(scores, target, weights, False))


def fit_dp(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s + beta), alpha > 0; see `fit_temperature`.

    A class without samples gets beta = -inf, which maximises the likelihood.
    """
    return AffineFit(*_fit(scores, target, weights, True))


def _like(scores: Tensor, target: Tensor, weights: Tensor, _: bool) -> tuple[Tensor, ...]:
    """Return tensors in the shapes of the results of `_fit`."""
    shape = weights.shape[:-1]
    one = weights.new_empty(shape, dtype=wide_dtype(weights.device))
    return one, one.new_empty((*shape, scores.shape[-1])), one.clone(), target.new_empty(shape), one.clone()


@operation(
    "fit_affine(Tensor scores, Tensor target, Tensor weights, bool bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like,
)
def _fit(scores: Tensor, target: Tensor, weights: Tensor, bias: bool) -> tuple[Tensor, ...]:
    """Fit some series at a time; further leading axes are series, too."""
    series, n_weightings = scores.shape[:-2], weights.shape[-3]
    n_series, n, n_classes = series.numel(), *scores.shape[-2:]
    scores, target = scores.reshape(n_series, n, n_classes), target.reshape(n_series, n)
    weights = weights.movedim(-3, 0).reshape(n_weightings, n_series, n)
    if not n:  # one sample of weight 0 stands for no data
        scores, target, weights = pad(scores, (0, 0, 0, 1)), pad(target, (0, 1)), pad(weights, (0, 1))
    at_once = max(1, PIECE // max(1, n * n_classes))
    pieces = [slice(i, i + at_once) for i in range(0, max(1, n_series), at_once)]
    found = [_fit_series(scores[i], target[i], weights[:, i], bias) for i in pieces]
    joined = (torch.cat(column, 1) for column in zip(*found, strict=True))
    return tuple(x.reshape(n_weightings, *series, *x.shape[2:]).movedim(0, len(series) - 1) for x in joined)


def _fit_series(scores: Tensor, target: Tensor, weights: Tensor, bias: bool) -> AffineFit:
    """Convert to standard form, solve, and convert the results back."""
    wide = wide_dtype(scores.device)
    weights = weights.to(wide)
    top = scores.amax(-1, keepdim=True)
    s_label = scores.gather(-1, target.unsqueeze(-1)).to(wide).sub_(top).squeeze(-1)
    lost = s_label == -torch.inf
    unread = (weights == 0).all(0)
    w = weights.masked_fill(lost | (weights == 0), 0)
    total = w.sum(-1)
    w = w / total.unsqueeze(-1)
    standard, mean, scale, usual = standard_form(scores, top, unread)
    s_label = (s_label / scale.unsqueeze(-1)).masked_fill(lost | unread, 0).clamp(min=FAR)
    p = Problem(*standard, s_label, target, w, scale)

    alpha, beta, grad_norm, outcome = _solve_dp(p) if bias else _solve_temperature(p, mean)
    if not usual:  # with a score of FAR, alpha can converge to 0 but never equals it
        vanishing = (outcome == CONVERGED) & (alpha < 1e-12)
        alpha, outcome = alpha.masked_fill(vanishing, 0), outcome.masked_fill(vanishing, AT_ZERO)
    empty = ~(total > 0)
    outcome = outcome.masked_fill(empty, NO_DATA)
    separable = outcome == SEPARABLE
    return AffineFit(
        torch.where(separable, 1.0, alpha / scale).masked_fill(empty, torch.nan),
        beta.masked_fill(separable.unsqueeze(-1), 0).masked_fill(empty.unsqueeze(-1), torch.nan),
        grad_norm.masked_fill(empty | separable, torch.nan),
        outcome,
        weights.masked_fill(~lost, 0).sum(-1),
    )


Solved = tuple[Tensor, Tensor, Tensor, Tensor]
"""alpha and beta, in units of the standard form, gradient norm and outcome"""


def _solve_temperature(p: Problem, mean: Tensor) -> Solved:
    """Return the best scale and biases of 0; `mean` is that of every row of scores."""
    # The NLL is convex: where it does not fall from alpha = 0 on, no positive alpha is better.
    at_bound = (p.w * mean).sum(-1) - p.of_label >= -_FLAT
    separable = p.of_label >= 0  # every label has the largest score of its row
    found = _search(p, _start(p, bias=False).expand(*p.of_label.shape, 1), at_bound | separable)
    outcome = _outcome(found).masked_fill(separable, SEPARABLE).masked_fill(at_bound, AT_ZERO)
    alpha = found.at.squeeze(-1).masked_fill(at_bound, 0)
    return alpha, torch.zeros_like(p.share), _grad_norm(found, p).masked_fill(at_bound, 0), outcome


def _solve_dp(p: Problem) -> Solved:
    """Return the best scale and biases; biases of classes without samples are -inf."""
    present = p.share > 0
    # The slope in alpha at alpha = 0 and the best biases there, the log class frequencies.
    mean = torch.zeros_like(p.share)
    for s, w in p.pieces():
        mean = mean + torch.einsum("rsn,snc->rsc", w, s)
    at_bound = (mean * p.share).sum(-1) - p.of_label >= -_FLAT
    theta = _start(p, bias=True)

    # Few weightings at a time, so that a slow one delays few others.
    at_once = max(1, PIECE // max(1, p.scores.numel()))
    solved = []
    for i in range(0, max(1, len(p.w)), at_once):
        some, fixed = p.some(slice(i, i + at_once)), at_bound[i : i + at_once]
        found = _search(some, theta.expand(len(some.w), -1, -1), fixed)
        outcome = _outcome(found)
        # Under separation the gradient vanishes but the Newton step does not.
        endless = (outcome == CONVERGED) & ~fixed & (found.step.abs().amax(-1) > 0.01)
        if bool(endless.any()):
            endless = endless & _never_falls(some, found.step)
        separable = endless | (found.function.value < _least(some))
        outcome = outcome.masked_fill(separable, SEPARABLE).masked_fill(fixed, AT_ZERO)
        solved.append((found.at, _grad_norm(found, some), outcome))
    theta, grad_norm, outcome = (torch.cat(column) for column in zip(*solved, strict=True))

    beta = torch.where(at_bound.unsqueeze(-1), p.share.log(), theta[..., 1:]).masked_fill(~present, 0)
    beta = (beta - beta.sum(-1, keepdim=True) / present.sum(-1, keepdim=True)).masked_fill(~present, -torch.inf)
    return theta[..., 0].masked_fill(at_bound, 0), beta, grad_norm.masked_fill(at_bound, 0), outcome


def _start(p: Problem, bias: bool) -> Tensor:
    """Return unknowns `(1, S, P)` near the optimum of the mean of all weightings; the identity if there are few scores.

    Float32 costs half as much, and alpha needs some samples only.
    """
    theta = p.scale.float().clamp(0.1, 100)[None, :, None]
    many = p.w.numel() * p.scores.shape[-1] > PIECE
    if many:
        theta = _rough(p.rough(_FEW), theta)
    if bias:
        theta = pad(theta, (0, p.scores.shape[-1]))
    return (_rough(p.rough(), theta) if many else theta).to(p.w.dtype)


def _rough(p: Problem, start: Tensor) -> Tensor:
    """Return the unknowns in float32, with an error near 1e-5."""
    found = minimise(
        _function(p, start),
        start,
        _limited,
        lambda here: here.step.abs().amax(-1) <= 5e-3,
        fixed=torch.zeros_like(p.of_label, dtype=torch.bool),
        units=_units(p, start, 1),
        lowest=_least(p),
        rounds=25,
    )
    theta = torch.where(found.converged.unsqueeze(-1), found.at + found.step, found.at)
    return torch.where(theta.isfinite().all(-1, keepdim=True), theta, start)


def _search(p: Problem, start: Tensor, fixed: Tensor) -> Minimum:
    """Minimise the NLL to rounding error; unknowns are alpha and, if `start` has more than one, beta."""
    if start.shape[-1] > 1:
        start = torch.cat((start[..., :1], start[..., 1:].masked_fill(p.share == 0, FAR)), -1)
    gradient, decrement = _TARGET
    return minimise(
        _function(p, start),
        start,
        _limited,
        lambda here: (here.norm <= gradient) & (here.slope >= -decrement),
        fixed=fixed,
        units=_units(p, start, 1),
        lowest=_least(p),
    )


def _limited(theta: Tensor, value: Value, step: Tensor) -> Tensor:
    """Return the best step that reduces alpha to a tenth at most, so that it stays positive, with a short beta."""
    change = -0.9 * theta[..., :1]
    if theta.shape[-1] == 1:
        return torch.maximum(step, change)
    short = step[..., :1] < change
    if short.any():
        gradient = value.gradient[..., 1:] + change * value.hessian[..., 1:, 0]
        rest = newton_step(Value(value.value, gradient, value.hessian[..., 1:, 1:]))
        step = torch.where(short, torch.cat((change, rest), -1), step)
    return step * (_LONGEST / step[..., 1:].abs().amax(-1, keepdim=True)).clamp(max=1)


def _least(p: Problem) -> Tensor:
    """Return the smallest NLL with an error: a label that is not the most likely class costs its weight times log 2."""
    return torch.where(p.w > 0, p.w, torch.inf).amin(-1) * math.log(2)


def _units(p: Problem, theta: Tensor, least: float) -> Tensor:
    """Return factors that convert a gradient to the units of the scores, or to those of a scale of `least`."""
    return pad(p.scale.clamp(min=least)[:, None], (0, theta.shape[-1] - 1), value=1.0)


def _grad_norm(found: Minimum, p: Problem) -> Tensor:
    """Return the norm of the gradient in units of the scores."""
    norm: Tensor = torch.linalg.vector_norm(found.function.gradient * _units(p, found.at, 0), dim=-1)
    return norm


def _outcome(found: Minimum) -> Tensor:
    """Return `CONVERGED` or `STOPPED`: whether the fit is good enough, even if rounding prevented the target."""
    gradient, decrement = _ENOUGH
    enough = (found.norm < gradient) & (found.slope >= -decrement)
    return torch.where(found.converged | enough, CONVERGED, STOPPED)


def _function(p: Problem, theta: Tensor) -> Callable[[Tensor, Tensor | None], Value]:
    return partial(_of_temperature if theta.shape[-1] == 1 else _of_affine, p)


def _of_temperature(p: Problem, theta: Tensor, hessian: Tensor | None) -> Value:
    """Sum the NLL of softmax(alpha s) over the pieces. Its derivatives are the cumulants of s under this softmax.

    A given Hessian is returned as it is.
    """
    nll, slope, curvature = -theta.squeeze(-1) * p.of_label, -p.of_label, torch.zeros_like(p.of_label)
    alpha = theta[..., None]
    room: Tensor | None = None  # one buffer: new memory for each piece costs more than the arithmetic
    for s, w in p.pieces():
        room = s.new_empty(*w.shape, s.shape[-1]) if room is None else room[..., : s.shape[1], :]
        q = torch.mul(alpha, s, out=room).exp_()  # at most 1, because no score is positive
        norm = q.sum(-1)
        mean = q.mul_(s).sum(-1).div_(norm)
        nll = nll + (w * norm.log()).sum(-1)
        slope = slope + (w * mean).sum(-1)
        if hessian is None:
            square = q.mul_(s).sum(-1).div_(norm)
            curvature = curvature + (w * square.sub_(mean.square_())).sum(-1)
    return Value(nll, slope.unsqueeze(-1), curvature[..., None, None] if hessian is None else hessian)


def _of_affine(p: Problem, theta: Tensor, hessian: Tensor | None) -> Value:
    """Sum the NLL of softmax(alpha s + beta) over the pieces, as `_of_temperature`.

    With q the softmax of a row and m = sum_k q_k s_k, the Hessian is the weighted mean of sum_k q_k s_k^2 - m^2 in
    alpha, of q_k (s_k - m) between alpha and beta_k, and of diag(q) - q q' in beta. A constant added to every beta
    changes no probability, so it is singular along ones. Their outer product makes it regular and changes no step,
    because the gradient is orthogonal to ones: a step keeps the sum of beta.
    """
    alpha, beta = theta[..., :1, None], theta[..., None, 1:]
    nll = -theta[..., 0] * p.of_label - (theta[..., 1:] * p.share).sum(-1)
    mean_q, mean_qs, mixed = (torch.zeros_like(p.share) for _ in range(3))
    square = torch.zeros_like(p.of_label)
    outer = theta.new_zeros(*p.share.shape, p.share.shape[-1])
    rooms: tuple[Tensor, Tensor] | None = None  # buffers, as above
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
        present = (p.share > 0).to(mean_q)
        size = (mean_q - outer.diagonal(dim1=-2, dim2=-1)).sum(-1) / present.sum(-1).clamp(min=1).square()
        of_ones = size[..., None, None] * present.unsqueeze(-1) * present.unsqueeze(-2)
        mixed = (mean_qs - mixed).unsqueeze(-1)
        left = torch.cat((square[..., None, None], mixed), -2)
        right = torch.cat((mixed.mT, torch.diag_embed(mean_q) - outer + of_ones), -2)
        hessian = torch.cat((left, right), -1)
    gradient = torch.cat((mean_qs.sum(-1, keepdim=True) - p.of_label.unsqueeze(-1), mean_q - p.share), -1)
    return Value(nll, gradient, hessian)


def _never_falls(p: Problem, step: Tensor) -> Tensor:
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
        best = torch.addcmul(beta.masked_fill(p.share == 0, FAR).unsqueeze(-2), step[..., :1, None], s).amax(-1)
        margin = of_label[..., start : start + s.shape[1]] - best
        worst = torch.minimum(worst, margin.masked_fill(w == 0, torch.inf).amin(-1))
        start += s.shape[1]
    return worst >= -1e-6 * step.abs().amax(-1)
