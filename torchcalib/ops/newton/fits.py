"""Maximum likelihood fits of softmax(alpha s + beta) with both parameters or one of them, as torch operations.

Each fit converts scores s to standard form, calls a solver, and converts the results to the units of the scores.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import AT_ZERO, CONVERGED, NO_DATA, SEPARABLE, STOPPED
from torchcalib.ops.newton.descent import (
    DECREMENT,
    GRADIENT,
    ROUNDS,
    Iterate,
    Step,
    Value,
    all_true,
    damped_newton,
    is_within_rounding,
    newton_direction,
    separation_bound,
    without_constant,
)
from torchcalib.ops.newton.scores import (
    MASKED_SCORE,
    PIECE,
    ZERO_SLOPE,
    LabelledScores,
    Solution,
    WeightedSamples,
    is_certain,
    standard_form,
)
from torchcalib.ops.newton.temperature import approximate_alpha, solve_temperature
from torchcalib.ops.operation import operation


class AffineFit(NamedTuple):
    """Fits of softmax(alpha s + beta), which minimise the mean negative log-likelihood (NLL).

    Samples with a single class of finite score, their label, are excluded too: their NLL is 0 for all parameters.
    """

    # Inverse temperature `(R, S)`, positive; 1 for `SEPARABLE`, 0 for `AT_ZERO`. Classes with a score of -inf have
    # probability 0, also for alpha = 0.
    alpha: Tensor
    # Biases `(R, S, C)`, 0 for `SEPARABLE`. Their sum over the classes with samples in the fit is 0. The biases of
    # other classes are -inf.
    beta: Tensor
    # Norm of the gradient of the mean NLL in alpha and beta, `(R, S)`; NaN for `SEPARABLE`. The derivative in alpha
    # does not count for `AT_ZERO`. The mean is over the samples in the fit.
    grad_norm: Tensor
    # int64 `(R, S)`: `CONVERGED`; `AT_ZERO` (no positive alpha is better than 0); `SEPARABLE` (the NLL has no finite
    # minimiser, or is constant, as no sample is in the fit); `STOPPED` (the NLL could not be decreased, but the
    # gradient is not small); or `NO_DATA` (total weight 0, all values NaN)
    outcome: Tensor
    # Weight of the samples whose label has a score of -inf, `(R, S)`. They are excluded from the fit, because their NLL
    # is infinite for every alpha > 0.
    lost: Tensor


def fit_temperature(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s) with alpha > 0 (temperature scaling) by a bracketed search; beta is 0.

    Scores `(S, N, C)` are log-probabilities or logits, without +inf and with a finite score in every row. The `target`
    has int64 labels `(S, N)`. Samples with weight 0, of the replicate weights `(R, S, N)`, are ignored.
    """
    return AffineFit(*_fit(scores, target, weights, False, True))


def fit_affine(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(alpha s + beta) with alpha > 0 (affine scaling of the logits) by damped Newton steps.

    Arguments are as for `fit_temperature`. The bias beta of a class without samples in the fit is -inf, which
    maximises the likelihood.
    """
    return AffineFit(*_fit(scores, target, weights, True, True))


def fit_bias(scores: Tensor, target: Tensor, weights: Tensor) -> AffineFit:
    """Fit softmax(s + beta) by damped Newton steps; for the arguments see `fit_affine`."""
    return AffineFit(*_fit(scores, target, weights, True, False))


def _empty_results(scores: Tensor, target: Tensor, weights: Tensor, *_: bool) -> tuple[Tensor, ...]:
    shape = weights.shape[:-1]
    one = weights.new_empty(shape, dtype=wide_dtype(weights.device))
    outcome = target.new_empty(shape)
    return one, one.new_empty((*shape, scores.shape[-1])), one.clone(), outcome, one.clone()


@operation(
    "fit_affine(Tensor scores, Tensor target, Tensor weights, bool bias, bool scale)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _empty_results,
)
def _fit(scores: Tensor, target: Tensor, weights: Tensor, bias: bool, scale: bool) -> tuple[Tensor, ...]:
    """Fit `(..., N, C)` with any batch axes, few batch elements at a time; return the fields of `AffineFit`."""
    given = WeightedSamples.flattened(scores, target, weights)
    n_elements, n, n_classes = given.x.shape
    batch_size = max(1, PIECE // max(1, n * n_classes))
    pieces = [slice(i, i + batch_size) for i in range(0, max(1, n_elements), batch_size)]
    solve = partial(solve_affine, free_scale=scale) if bias else solve_temperature
    solutions = [_solve_batch(given.x[i], given.target[i], given.w[:, i], solve) for i in pieces]
    return given.batch_axes_restored([torch.cat(column, 1) for column in zip(*solutions, strict=True)])


def _solve_batch(
    scores: Tensor, target: Tensor, weights: Tensor, solve: Callable[[LabelledScores], Solution]
) -> AffineFit:
    n_classes = scores.shape[-1]
    wide = wide_dtype(scores.device)
    weights = weights.to(wide)
    top = scores.amax(-1, keepdim=True)
    label_score = scores.gather(-1, target.unsqueeze(-1)).to(wide).sub_(top).squeeze(-1)
    lost = label_score == -torch.inf
    unused = (weights == 0).all(0)
    w = weights.masked_fill(lost | (weights == 0), 0)
    has_samples = w.sum(-1) > 0

    # Without very low scores, no class can be masked, and no row is certain.
    standard, mean, scale, is_moderate = standard_form(scores, top, unused)
    if not is_moderate:
        w = w.masked_fill(is_certain(scores), 0)
    total = w.sum(-1)
    w = w / total.unsqueeze(-1)
    label_score = (label_score / scale.unsqueeze(-1)).masked_fill(lost | unused, 0).clamp(min=MASKED_SCORE)
    share = w.new_zeros((*w.shape[:-1], n_classes)).scatter_add(-1, target.expand(w.shape), w)
    kept, kept_top = (scores, top) if standard is None else (standard, None)
    label_mean = (w * label_score).sum(-1)
    in_standard_form = LabelledScores(
        kept, kept_top, mean, label_score, target, w, share, scale, label_mean, has_masked=not is_moderate
    )
    alpha, beta, grad_norm, outcome = solve(in_standard_form)
    if not is_moderate:  # with scores of MASKED_SCORE, iterations approach but do not reach a minimum at alpha = 0
        vanishing = (outcome == CONVERGED) & (alpha < 1e-12)
        alpha, outcome = alpha.masked_fill(vanishing, 0), outcome.masked_fill(vanishing, AT_ZERO)
    # Results in the units of the original scores.
    empty = ~has_samples
    outcome = outcome.masked_fill(~(total > 0), SEPARABLE).masked_fill(empty, NO_DATA)
    separable = outcome == SEPARABLE
    return AffineFit(
        torch.where(separable, 1.0, alpha / scale).masked_fill(empty, torch.nan),
        beta.masked_fill(separable.unsqueeze(-1), 0).masked_fill(empty.unsqueeze(-1), torch.nan),
        grad_norm.masked_fill(empty | separable, torch.nan),
        outcome,
        weights.masked_fill(~lost, 0).sum(-1),
    )


def solve_affine(p: LabelledScores, free_scale: bool = True) -> Solution:
    """Minimise the NLL over alpha > 0 and beta; the bias of classes without samples is -inf.

    Without `free_scale`, alpha is 1 in the units of the original scores.
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
    theta, *_ = _minimise(averaged, start, averaged.label_mean > 0, free_scale, 1e-3)
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


def _bias_of_constant(p: LabelledScores) -> Tensor:
    """Return log class frequencies minus log mean probabilities, the solution for constant predictions, `(1, S, C)`."""
    # From beta = 0, Newton steps would be too long where the Hessian is almost 0, far from the solution.
    log_mean = torch.full_like(p.share, -torch.inf)
    for s, w in p.pieces():
        log_q = (p.scale[:, None, None] * s).log_softmax(-1)
        log_mean = torch.logaddexp(log_mean, (w[0].log().unsqueeze(-1) + log_q).logsumexp(-2).unsqueeze(0))
    return (p.share.log() - log_mean).masked_fill(p.share == 0, 0)


def _limit_at_zero(p: LabelledScores) -> tuple[Tensor, Tensor]:
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
    # The mean NLL of scores of 0, with the bias as the only parameter.
    theta, _, outcome = _by_replicates(flat, start, is_unknown, False)
    beta = theta[..., 1:]
    slope = -(w * p.label_score).sum(-1)
    finite_scores = p.scores.masked_fill(excluded, 0)
    for scores, (s, of_rows) in zip(torch.split(finite_scores, flat.rows_of_piece, 1), flat.pieces(), strict=True):
        q = (beta.unsqueeze(-2) + s).softmax(-1)
        slope = slope + torch.einsum("rsn,rsnc,snc->rs", of_rows, q, scores)
    return beta, slope.masked_fill(is_unknown | (outcome != CONVERGED), torch.nan)


def _by_replicates(p: LabelledScores, theta: Tensor, fixed: Tensor, free_scale: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise few fits at a time, because all fits of a batch run until the last one converges."""
    batch_size = max(1, PIECE // max(1, p.scores.numel()))
    pieces = [slice(i, i + batch_size) for i in range(0, max(1, p.w.shape[0]), batch_size)]
    solutions = [_minimise(p.for_replicates(i), theta[i], fixed[i], free_scale) for i in pieces]
    theta, gradient, outcome = map(torch.cat, zip(*solutions, strict=True))
    return theta, gradient, outcome


def _minimise(
    p: LabelledScores, theta: Tensor, fixed: Tensor, free_scale: bool, relative: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimise the NLL by damped Newton steps. Return theta `(R, S, C + 1)`, its gradient and the outcome `(R, S)`.

    theta is (alpha, beta) with positive alpha, which stays constant without `free_scale`. Fits with `fixed` return the
    initial theta. `relative` stops at a step of this length, after at most 25 iterations. The gradient is then that one
    step earlier. None stops at `GRADIENT` and `DECREMENT`.
    """
    theta = torch.cat((theta[..., :1], theta[..., 1:].masked_fill(~(p.share > 0), MASKED_SCORE)), -1)
    nll = _NLL(p, free_scale, relative)
    theta, value, step = damped_newton(theta, nll.value, nll.step, fixed, rounds=ROUNDS if relative is None else 25)
    is_separated, length = nll.is_separated(value), _length(step.p)
    if relative is None:
        done = nll.is_exact(value, step.slope) | is_within_rounding(value.norm, step.slope)
        # For separable data the gradient vanishes, but the Newton steps remain long.
        may_be_separable = done & ~fixed & (length > 0.01)
    else:
        done = length <= relative
        theta = torch.where(done.unsqueeze(-1), theta + step.p, theta)
        may_be_separable = is_separated
    if value_if_available(may_be_separable.any()):
        may_be_separable = may_be_separable & _is_separation(p, step.p)
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(is_separated | may_be_separable, SEPARABLE)
    return theta, value.gradient, outcome


def _length(step: Tensor) -> Tensor:
    """Return the change of alpha plus the largest change of a bias, `(R, S)`."""
    return step[..., 0].abs() + step[..., 1:].abs().amax(-1)


class _NLL:
    """Mean NLL of (alpha, beta), and its Newton steps; for the arguments see `_minimise`."""

    def __init__(self, p: LabelledScores, free_scale: bool, relative: float | None) -> None:
        self.p, self.free_scale, self.relative = p, free_scale, relative
        self.hessian: Tensor | None = None  # of the last iterate, if the next value reuses it
        # e of `without_constant`: 0 for alpha, 1 for the biases of classes with samples.
        self.ones = torch.cat((torch.zeros_like(p.share[..., :1]), (p.share > 0).to(p.share.dtype)), -1)
        # The gradient must be small in standard and in original units of alpha.
        self.units = torch.cat((p.scale.clamp(min=1)[:, None], torch.ones_like(p.share[0])), -1)
        self.bound = separation_bound(p.w)

    def value(self, theta: Tensor) -> Value:
        """Return the mean NLL and its derivatives at theta."""
        nll, gradient, hessian = _evaluate(self.p, theta, self.hessian)
        if not self.free_scale:  # derivatives for which the Newton step does not change alpha
            gradient = torch.cat((torch.zeros_like(gradient[..., :1]), gradient[..., 1:]), -1)
            hessian = hessian.clone()
            hessian[..., 0, :] = 0
            hessian[..., :, 0] = 0
            hessian[..., 0, 0] = 1
        return Value(nll, gradient, (gradient * self.units).square().sum(-1).sqrt(), (hessian,))

    def step(self, at: Iterate) -> Step:
        """Return the Newton step, which does not change the sum of beta, and keeps at least a tenth of alpha."""
        theta, value, fraction, is_stopped = at
        (hessian,) = value.parts
        trace = hessian.diagonal(dim1=-2, dim2=-1)[..., 1:].sum(-1)
        step = newton_direction(without_constant(hessian, self.ones, trace), value.gradient)
        shrink = (-0.9 * theta[..., 0] / step[..., 0]).where(step[..., 0] < 0, fraction).clamp(max=1)
        step = step * shrink.unsqueeze(-1)
        slope = (step * value.gradient).sum(-1)
        length = _length(step)
        is_done = self.is_exact(value, slope) if self.relative is None else length <= self.relative
        is_done = is_done | self.is_separated(value)
        # After a short step, which is usually the last one, reuse the nearly unchanged Hessian once.
        is_last = self.relative is None and all_true(is_done | is_stopped | (fraction * length <= 1e-5))
        self.hessian = hessian if self.hessian is None and is_last else None
        return Step(step, slope, is_done)

    def is_exact(self, value: Value, slope: Tensor) -> Tensor:
        """Return whether the gradient and the expected decrease are small, `(R, S)`."""
        return (value.norm <= GRADIENT) & (slope >= -DECREMENT)

    def is_separated(self, value: Value) -> Tensor:
        """Return whether every label has a probability above 1/2, so that no finite alpha is best, `(R, S)`."""
        return (value.f < self.bound) & self.free_scale


def _is_separation(p: LabelledScores, step: Tensor) -> Tensor:
    """Return whether the data are separable in the direction `step`, bool `(R, S)`.

    They are separable if the score of every label grows along `step` at least as fast as all other scores of its row.
    No likelihood then decreases, at any length of the step.

    Source: Albert, Anderson: On the existence of maximum likelihood estimates in logistic regression models (1984).
    """
    beta, present = step[..., 1:], p.share > 0
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


def _evaluate(p: LabelledScores, theta: Tensor, hessian: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mean NLL, its gradient and its Hessian at theta; a given Hessian is returned unchanged.

    Let q be the softmax of a row and m = sum_k q_k s_k. The Hessian contains weighted means over the rows:
    sum_k q_k s_k^2 - m^2 for alpha, q_k (s_k - m) for alpha and beta_k, and the matrix diag(q) - q q' for beta.
    """
    alpha, beta = theta[..., :1, None], theta[..., None, 1:]
    nll = -theta[..., 0] * p.label_mean - (theta[..., 1:] * p.share).sum(-1)
    mean_q, mean_qs, mixed = [torch.zeros_like(p.share) for _ in range(3)]
    square = torch.zeros_like(p.label_mean)
    outer = theta.new_zeros(*p.share.shape, p.share.shape[-1])
    buffers: tuple[Tensor, Tensor] | None = None  # reused, because allocation is slower than the arithmetic
    for s, w in p.pieces():
        if buffers is None:
            buffers = s.new_empty(*w.shape, s.shape[-1]), s.new_empty(*w.shape, s.shape[-1])
        buffer, second_buffer = [x[..., : s.shape[1], :] for x in buffers]
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
    return nll, gradient, hessian
