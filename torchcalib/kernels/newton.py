"""Maximum likelihood fits of softmax(alpha s + beta), by Newton's method in float64.

Axes: `R` weightings of one sample (folds, bootstrap replicates), `S` series, `N` samples, `C` classes. All fits of a
call are one solve, in pieces that stay in cache; the scores are never copied R times.

The mean NLL is convex in (alpha, beta), so the start decides about nothing but the number of rounds. It is a float32
fit to the mean of the weightings. Scores are divided by their scale, so that logits a hundred times too large are the
same problem; what is returned is in units of the scores given.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.kernels.looking import look
from torchcalib.kernels.operation import operation
from torchcalib.kernels.row_stats import wide_dtype

CONVERGED, AT_ZERO, SEPARABLE, STOPPED, NO_DATA = range(5)
"""How a fit can end; see `AffineFit`."""

GRADIENT = 1e-10  # what is aimed at: norm of the gradient of the mean NLL, in units of the scores and of their scale
DECREMENT = 1e-15  # and what a further Newton step would take off the NLL, twice
PROMISED = 1e-9, 1e-12  # what is enough of both where rounding allows no more
FLAT = 1e-14  # a slope that is rounding
NOISE = 1e-13  # what rounding does to the sum of an NLL, as a share of it and of 1
ROUNDS = 200
FAR = -1e18  # stands for a score of -inf: its probability is 0, and 0 times it is 0
UNUSUAL = 1e6  # a scale from which scores are looked at for such as stand for -inf
PIECE = 2**18  # scores that are worked on at a time


class AffineFit(NamedTuple):
    """Fits of softmax(alpha s + beta).

    Attributes:
        alpha: `(R, S)`, positive; 0 under `AT_ZERO`, where it is the limit: a score of -inf stays so; 1 under
            `SEPARABLE`.
        beta: `(R, S, C)`, of sum 0 over the classes that have samples, and -inf for those that have none; 0 under
            `SEPARABLE`.
        grad_norm: norm of the gradient of the mean NLL in the parameters that are not at a bound `(R, S)`; NaN under
            `SEPARABLE`.
        outcome: int64 `(R, S)`. `CONVERGED`; `AT_ZERO`: the best alpha is not positive, the scores say nothing of the
            class; `SEPARABLE`: no finite (alpha, beta) is best; `STOPPED`: the NLL could not be decreased further
            before the gradient was small; `NO_DATA`: no weight, all is NaN.
        lost: weight of the samples whose label has a score of -inf `(R, S)`. Their NLL is infinite for every
            alpha > 0, so that the fit is to the others.
    """

    alpha: Tensor
    beta: Tensor
    grad_norm: Tensor
    outcome: Tensor
    lost: Tensor


def fit_temperature(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s), alpha > 0: a bracketed Newton search, which cannot leave the bracket nor cycle.

    Args:
        scores: log-probabilities or logits `(S, N, C)`, without +inf and with a finite score in every row.
        target: labels, int64 `(S, N)`.
        weights: `(R, S, N)`. A sample of weight 0 is not read.
    """
    return AffineFit(*_fit(scores, target, weights, False))


def fit_dp(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s + beta), alpha > 0: a Newton search, damped until the NLL falls; see `fit_temperature`.

    A class without samples gets beta = -inf, which is where its likelihood is largest.
    """
    return AffineFit(*_fit(scores, target, weights, True))


# --------------------------------------------------------------------------------------------------------------------
# Standard form


@dataclass(frozen=True)
class _Problem:
    """Fits in standard form.

    Attributes:
        scores: less the row's largest, over their scale `(S, N, C)`; if `top` is there, as they were given.
        top: the largest of every row `(S, N, 1)` where scores are brought to standard form as they are read: one
            float64 copy of many scores would cost more than all that is done with it. None where they are in it.
        mean: mean of every row, in standard form `(S, N)`.
        s_label: scores of the labels, in standard form `(S, N)`.
        target: labels `(S, N)`.
        w: weights of sum 1 `(R, S, N)`.
        share: shares of the classes `(R, S, C)`.
        scale: what the scores were divided by `(S,)`.
        of_label: mean score of the label `(R, S)`.
    """

    scores: Tensor
    top: Tensor | None
    mean: Tensor
    s_label: Tensor
    target: Tensor
    w: Tensor
    share: Tensor
    scale: Tensor
    of_label: Tensor

    def pieces(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of scores in standard form `(S, n, C)` and of `w` `(R, S, n)` that stay in cache."""
        n_weightings, n_series, n = self.w.shape
        rows = max(1, PIECE // max(1, n_weightings * n_series * self.scores.shape[-1]))
        weights = torch.split(self.w, rows, -1) if n else ()
        if self.top is None:
            return zip((s.to(self.w.dtype) for s in torch.split(self.scores, rows, 1)), weights, strict=True)
        pieces = _standard_pieces(self.scores, self.top, 1 / self.scale, self.w.dtype, rows)
        return zip(pieces, weights, strict=True)

    def rough(self, at_most: int | None = None) -> "_Problem":
        """Return the problem of the mean of all weightings in float32, on about `at_most` samples if given."""
        every = slice(None, None, 1 if at_most is None else max(1, self.scores.shape[1] // at_most))
        w = self.w.mean(0, keepdim=True)[..., every]
        w = w / w.sum(-1, keepdim=True)
        s_label = self.s_label[:, every]
        of_label = (w * s_label).sum(-1)
        return _Problem(
            self.scores[:, every],
            None if self.top is None else self.top[:, every],
            self.mean[:, every].float(),
            s_label.float(),
            self.target[:, every],
            w.float(),
            self.share.mean(0, keepdim=True).float(),
            self.scale.float(),
            of_label.float(),
        )

    def some(self, weightings: slice) -> "_Problem":
        """Return the problem of some of the weightings."""
        return replace(self, w=self.w[weightings], share=self.share[weightings], of_label=self.of_label[weightings])


_Solved = tuple[Tensor, Tensor, Tensor, Tensor]
"""alpha and beta, in units of the standard form, gradient norm and outcome"""


def _like(scores: Tensor, target: Tensor, weights: Tensor, _: bool) -> tuple[Tensor, ...]:
    """Return tensors shaped as the fits of `_fit`."""
    shape = weights.shape[:-1]
    one = weights.new_empty(shape, dtype=wide_dtype(weights.device))
    outcome = target.new_empty(shape)
    return one, one.new_empty((*shape, scores.shape[-1])), one.clone(), outcome, one.clone()


@operation(
    "fit_affine(Tensor scores, Tensor target, Tensor weights, bool bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _like,
)
def _fit(scores: Tensor, target: Tensor, weights: Tensor, bias: bool) -> tuple[Tensor, ...]:
    """Fit some series at a time; more axes in front are series too."""
    series, n_weightings = scores.shape[:-2], weights.shape[-3]
    n_series, n, n_classes = series.numel(), *scores.shape[-2:]
    scores, target = scores.reshape(n_series, n, n_classes), target.reshape(n_series, n)
    weights = weights.movedim(-3, 0).reshape(n_weightings, n_series, n)
    if not n:  # a sample of weight 0 is not read, and spares every step the case of none
        scores, target, weights = pad(scores, (0, 0, 0, 1)), pad(target, (0, 1)), pad(weights, (0, 1))
    at_once = max(1, PIECE // max(1, n * n_classes))
    pieces = [slice(i, i + at_once) for i in range(0, max(1, n_series), at_once)]
    solve = _solve_dp if bias else _solve_temperature
    found = [_fit_series(scores[i], target[i], weights[:, i], solve) for i in pieces]
    joined = (torch.cat(column, 1) for column in zip(*found, strict=True))
    return tuple(x.reshape(n_weightings, *series, *x.shape[2:]).movedim(0, len(series) - 1) for x in joined)


def _fit_series(scores: Tensor, target: Tensor, weights: Tensor, solve: Callable[[_Problem], _Solved]) -> AffineFit:
    n_classes = scores.shape[-1]
    wide = wide_dtype(scores.device)
    weights = weights.to(wide)
    top = scores.amax(-1, keepdim=True)
    s_label = scores.gather(-1, target.unsqueeze(-1)).to(wide).sub_(top).squeeze(-1)
    lost = s_label == -torch.inf
    unread = (weights == 0).all(0)
    w = weights.masked_fill(lost | (weights == 0), 0)
    total = w.sum(-1)
    w = w / total.unsqueeze(-1)

    standard, mean, scale, usual = _standard_form(scores, top, unread)
    s_label = (s_label / scale.unsqueeze(-1)).masked_fill(lost | unread, 0).clamp(min=FAR)
    share = w.new_zeros((*w.shape[:-1], n_classes)).scatter_add(-1, target.expand(w.shape), w)
    held, taken = (scores, top) if standard is None else (standard, None)
    whole = _Problem(held, taken, mean, s_label, target, w, share, scale, (w * s_label).sum(-1))

    alpha, beta, grad_norm, outcome = solve(whole)
    if not usual:  # where a score is FAR, alpha is never 0 but may have no other limit
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


def _standard_form(scores: Tensor, top: Tensor, unread: Tensor) -> tuple[Tensor | None, Tensor, Tensor, bool | None]:
    """Return scores in standard form, means of their rows `(S, N)`, their scale `(S,)`, and whether it is usual.

    In place of the scores None, where they are many and need no more than what `_standard_pieces` does.
    """
    wide = wide_dtype(scores.device)
    any_unread = look(unread.any())
    if any_unread is False and scores.numel() > PIECE:
        one = torch.ones(scores.shape[0], dtype=wide, device=scores.device)
        pieces = _standard_pieces(scores, top, one, wide, max(1, PIECE // scores.shape[-1]))
        mean = torch.cat([s.mean(-1) for s in pieces], 1)
        scale = _rms(mean)
        if look((scale <= UNUSUAL).all()):
            scale = torch.where(scale > 0, scale, 1)
            return None, mean / scale.unsqueeze(-1), scale, True
    s = scores.to(wide, copy=True).sub_(top)  # the one copy, worked on in place
    if any_unread is not False:
        s = s.masked_fill_(unread.unsqueeze(-1), 0)
    scale = _rms(s.mean(-1))
    usual = look((scale <= UNUSUAL).all())
    scale = scale if usual else _scale_of_near(s, scale)
    scale = torch.where(scale > 0, scale, 1)
    s = s.div_(scale[:, None, None])
    s = s if usual else s.clamp_(min=FAR)
    return s, s.mean(-1), scale, usual


def _rms(mean: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(mean, dim=-1)
    return norm / math.sqrt(max(1, mean.shape[-1]))


def _standard_pieces(scores: Tensor, top: Tensor, factor: Tensor, dtype: torch.dtype, rows: int) -> Iterator[Tensor]:
    """Bring so many rows at a time to standard form, all in the same memory."""
    wide = torch.promote_types(scores.dtype, dtype)
    top, factor = top.to(wide), factor.to(wide)[:, None, None]
    room: Tensor | None = None
    for given, largest in zip(torch.split(scores, rows, 1), torch.split(top, rows, 1), strict=True):
        room = torch.empty_like(given, dtype=wide) if room is None else room[:, : given.shape[1]]
        yield room.copy_(given).sub_(largest).mul_(factor).to(dtype)


def _scale_of_near(s: Tensor, scale: Tensor) -> Tensor:
    """Return the scale of the scores that do not stand for -inf, as masked classes do, or are it.

    Which these are is told by how far the second class of a row is from its first, in the median row.
    """
    if not s.shape[1]:
        return scale
    second = -s.topk(2, -1).values[..., 1]
    usual = second.masked_fill((second == 0) | (second == torch.inf), torch.nan).nanmedian(-1).values
    near = s >= -1e9 * usual[:, None, None]
    size = s.masked_fill(~near, 0).abs_().amax((-1, -2))
    size = torch.where(size > 0, size, 1)
    square = (s / size[:, None, None]).masked_fill_(~near, 0).square_().sum((-1, -2))
    found = size * (square / near.sum((-1, -2))).sqrt()
    return torch.where(usual.isnan(), scale.nan_to_num(1, 1, 1), found)


def _all(flag: Tensor) -> bool:
    return look(flag.all()) is True


# --------------------------------------------------------------------------------------------------------------------
# One parameter


def _solve_temperature(p: _Problem) -> _Solved:
    # The NLL is convex: where it does not fall from alpha = 0 on, no positive alpha is better.
    at_bound = (p.w * p.mean).sum(-1) - p.of_label >= -FLAT
    separable = p.of_label >= 0  # every label has the largest score of its row
    # A thousand samples lead near the optimum, all of them to it: in float32, and then to the last digit.
    start = _rough_alpha(p.rough(), _rough_alpha(p.rough(1024), p.scale), 0.05)
    alpha, slope, done = _bracketed(p, start.to(p.w.dtype).expand_as(p.of_label), at_bound | separable, None, ROUNDS)

    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separable, SEPARABLE).masked_fill(at_bound, AT_ZERO)
    grad_norm = (slope * p.scale).abs().masked_fill(at_bound, 0)
    return alpha.masked_fill(at_bound, 0), torch.zeros_like(p.share), grad_norm, outcome


def _enough(norm: Tensor, slope: Tensor) -> Tensor:
    """Return whether a fit that could not go on has what is promised: from its gradient, and the slope along a step."""
    gradient, decrement = PROMISED
    return (norm < gradient) & (slope >= -decrement)


def _rough_alpha(p: _Problem, start: Tensor, relative: float = 0.3) -> Tensor:
    """Return alpha `(1, S)` to a few digits, within reason; see `_bracketed`."""
    start = start.float().clamp(0.1, 100).expand_as(p.of_label)
    alpha, *_ = _bracketed(p, start, torch.zeros_like(start, dtype=torch.bool), relative, 15)
    return alpha.nan_to_num(1).clamp(1e-3, 1e3)


def _derivatives(p: _Problem, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
    p: _Problem, x: Tensor, fixed: Tensor, relative: float | None, rounds: int
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
        if _all(stays):
            break
        newton = x + step
        taken = (newton > low) & (newton < high) & (newton < 4 * x) & (step.abs() <= last / 2)
        cut = torch.where(low > 0, (low * high).sqrt(), high / 4)
        cut = torch.where(high == torch.inf, 4 * x, cut)
        following = torch.where(stays, x, torch.where(taken, newton, cut))
        last, x = (following - x).abs(), following
    if relative is None:
        return x, slope, done | _enough((slope * p.scale).abs(), slope * step)
    return torch.where(done, x + step, x), slope, done


# --------------------------------------------------------------------------------------------------------------------
# All parameters


class _Value(NamedTuple):
    """NLL `(R, S)` with gradient `(R, S, C + 1)` and Hessian `(R, S, C + 1, C + 1)`, alpha before beta."""

    nll: Tensor
    gradient: Tensor
    hessian: Tensor


def _solve_dp(p: _Problem) -> _Solved:
    present = p.share > 0
    at_bound = _slope_at_zero(p) >= -FLAT
    rough = p.rough()
    ahead = _rough_alpha(p.rough(1024), p.scale).unsqueeze(-1)
    begin = torch.cat((ahead, torch.zeros_like(rough.share)), -1)
    theta, *_ = _damped(rough, begin, rough.of_label > 0, 1e-3, 25)
    theta = torch.where(theta.isfinite().all(-1, keepdim=True), theta, begin).to(p.w.dtype)

    # Few weightings at a time, which then need no more rounds than they do themselves.
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


def _slope_at_zero(p: _Problem) -> Tensor:
    """Return the slope of the NLL in alpha where alpha is 0 and the probabilities are the shares `(R, S)`.

    The NLL is convex: where this is not negative, no positive alpha is better than 0.
    """
    mean = torch.zeros_like(p.share)
    for s, w in p.pieces():
        mean = mean + torch.einsum("rsn,snc->rsc", w, s)
    return (mean * p.share).sum(-1) - p.of_label


def _damped(
    p: _Problem, theta: Tensor, fixed: Tensor, relative: float | None, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Find where the NLL is smallest, from `theta` on.

    A Newton step is taken if the NLL falls by its share of what the slope promises; else a quarter of it is tried.
    Alpha falls to a tenth in a step at most, so it stays positive.

    Args:
        p: the problem.
        theta: start `(R, S, C + 1)`, alpha positive.
        fixed: what needs no search `(R, S)`.
        relative: how long the last step may be; None asks for `GRADIENT` and `DECREMENT`.
        rounds: evaluations, at most.

    Returns:
        theta, the gradient there (with `relative`, one step before), and the outcome `(R, S)`.
    """
    present = p.share > 0
    theta = torch.cat((theta[..., :1], theta[..., 1:].masked_fill(~present, FAR)), -1)
    eps = torch.finfo(theta.dtype).eps
    in_units = torch.cat((p.scale.clamp(min=1)[:, None], torch.ones_like(p.share[0])), -1)  # of a gradient
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
        # A sample whose label is not the likeliest costs its weight times log 2: below that there is none.
        separated = value.nll < least * math.log(2)
        stays = done | fixed | separated | value.nll.isnan() | (part < 1e-6)
        if _all(stays):
            break
        moved = theta + part.unsqueeze(-1) * step
        # After a step this short the Hessian is as good as it was, and mostly nothing is left to do with it.
        kept = not kept and relative is None and _all(stays | (part * length <= 1e-5))
        new = _evaluate(p, moved, value.hessian if kept else None)
        falls = new.nll <= value.nll + 1e-4 * part * slope + 4 * eps * (1 + value.nll)
        # Near the optimum the NLL of many samples changes by less than their sum is rounded; its gradient still falls.
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
        done = done | _enough(norm(value), slope)
    else:
        theta = torch.where(done.unsqueeze(-1), theta + step, theta)
    # Where the likelihood rises for ever, its slope fades and the step that it asks for does not.
    endless = done & ~fixed & (length > 0.01) if relative is None else separated
    if look(endless.any()):
        endless = endless & _never_falls(p, step, present)
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(separated | endless, SEPARABLE)
    return theta, value.gradient, outcome


def _never_falls(p: _Problem, step: Tensor, present: Tensor) -> Tensor:
    """Return whether the likelihood of no sample falls along `step`, however far one goes `(R, S)`.

    That is so if the score of no other class gains on that of the label. (A step along which nothing changes at all
    is another matter: there the slope is rounding, and some samples would lose.)
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


def _evaluate(p: _Problem, theta: Tensor, hessian: Tensor | None = None) -> _Value:
    """Sum the NLL and its derivatives over the pieces; if a Hessian is given, it stands for the one here.

    With q the softmax of a row and m = sum_k q_k s_k, the Hessian is the weighted mean of sum_k q_k s_k^2 - m^2 in
    alpha, of q_k (s_k - m) between alpha and beta_k, and of diag(q) - q q' in beta.
    """
    alpha, beta = theta[..., :1, None], theta[..., None, 1:]
    nll = -theta[..., 0] * p.of_label - (theta[..., 1:] * p.share).sum(-1)
    mean_q, mean_qs, mixed = (torch.zeros_like(p.share) for _ in range(3))
    square = torch.zeros_like(p.of_label)
    outer = theta.new_zeros(*p.share.shape, p.share.shape[-1])
    rooms: tuple[Tensor, Tensor] | None = None  # fresh memory for every piece costs more than the arithmetic
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
        mean_q = outer.sum(-1)  # for the q of a row sum to 1
        mixed = (mean_qs - mixed).unsqueeze(-1)
        left = torch.cat((square[..., None, None], mixed), -2)
        hessian = torch.cat((left, torch.cat((mixed.mT, torch.diag_embed(mean_q) - outer), -2)), -1)
    gradient = torch.cat((mean_qs.sum(-1, keepdim=True) - p.of_label.unsqueeze(-1), mean_q - p.share), -1)
    return _Value(nll, gradient, hessian)


def _newton_step(value: _Value, present: Tensor) -> Tensor:
    """Solve for the Newton step; it leaves the sum of beta as it is, and so what no sample depends on.

    A constant added to every beta changes nothing. The outer product of ones makes the matrix regular and leaves the
    solution alone, for the gradient has no part along it. The diagonal is scaled to 1, since classes may differ in
    share by any factor, and a ridge of the size of rounding meets what is left of a null space.
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
        if _all(failed == 0):
            break
        again, still = torch.linalg.cholesky_ex(matrix + max(ridge, 1e2 * eps) * eye)
        factor = torch.where((failed > 0)[..., None, None], again, factor)
        failed = torch.where(failed > 0, still, failed)
    return -torch.cholesky_solve((value.gradient * unit).unsqueeze(-1), factor).squeeze(-1) * unit
