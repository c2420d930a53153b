"""Fits of softmax(W x + b) to labels, where W is diagonal (one scale per class) or a full matrix.

Axes: F fits that are solved together, N samples, C classes. The parameters of a class are a row of W without the
entries that are fixed to 0, followed by its bias: `(F, C, 2)` for a diagonal W, `(F, C, C + 1)` for a matrix.

The fit minimises the mean negative log-likelihood (NLL) plus a ridge penalty by damped Newton steps. The Newton step
of up to `DENSE` parameters is a Cholesky solution. For more parameters, the Hessian would not fit into memory. The step
is then found by conjugate gradients, which need products of the Hessian with vectors only. A float32 fit precedes the
float64 fit. As long as the gradient decreases quickly, the Hessian is not computed again.

Sources: Nocedal, Wright: Numerical optimization (2006), algorithms 3.2 (line search) and 7.1 (Newton with conjugate
gradients).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import CONVERGED, NO_DATA, SEPARABLE, STOPPED
from torchcalib.ops.newton.descent import (
    GRADIENT,
    OBJECTIVE_ROUNDING,
    ROUNDING_LIMITS,
    Iterate,
    Step,
    Value,
    all_true,
    damped_newton,
    newton_direction,
    separation_bound,
    without_constant,
)
from torchcalib.ops.newton.scores import LARGE_SCALE, PIECE, WeightedSamples, is_certain, is_near_top
from torchcalib.ops.operation import operation

DENSE = 512  # largest number of parameters whose Hessian is stored and factored
SINGLE_GRADIENT = 1e-5  # gradient norm at the end of the float32 fit
SINGLE_ROUNDING = OBJECTIVE_ROUNDING * 2.0**29  # rounding error of a float32 objective, whose mantissa has 29 bits less
CONJUGATE_ROUNDS = 500  # largest number of products of the Hessian in one Newton step


class _Diagonal:
    """Diagonal W: the parameters of class k are W_kk and b_k. Features and residuals are `(F, n, C)`."""

    def scores(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return W x + b, `(F, n, C)`."""
        return torch.addcmul(theta[..., 1].unsqueeze(-2), theta[..., 0].unsqueeze(-2), x)

    def sums(self, r: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the sum of r * (W x + b) in the parameters."""
        return torch.stack(((r * x).sum(-2), r.sum(-2)), -1)

    def own(self, theta: Tensor) -> Tensor:
        """Return a view of the diagonal of W, `(F, C)`."""
        return theta[..., 0]

    def slopes(self, q: Tensor, x: Tensor) -> Tensor:
        """Return q_k times the derivative of the score of class k in its parameters, `(F, n, C, parameters of k)`."""
        return torch.stack((q * x, q), -1)

    def blocks(self, wq: Tensor, x: Tensor) -> Tensor:
        """Return the sum over rows of wq_k d d', with the derivative d of the score of class k, `(F, C, D, D)`."""
        scaled = wq * x
        mixed = scaled.sum(-2)
        rows = torch.stack(((scaled * x).sum(-2), mixed), -1), torch.stack((mixed, wq.sum(-2)), -1)
        return torch.stack(rows, -2)


class _Full:
    """Full W: the parameters of class k are row k of W and b_k. Methods are as for `_Diagonal`."""

    def scores(self, theta: Tensor, x: Tensor) -> Tensor:
        return torch.baddbmm(theta[..., -1].unsqueeze(-2), x, theta[..., :-1].mT)

    def sums(self, r: Tensor, x: Tensor) -> Tensor:
        return torch.cat((r.mT @ x, r.sum(-2).unsqueeze(-1)), -1)

    def own(self, theta: Tensor) -> Tensor:
        return theta[..., :-1].diagonal(dim1=-2, dim2=-1)

    def slopes(self, q: Tensor, x: Tensor) -> Tensor:
        return q.unsqueeze(-1) * _with_one(x).unsqueeze(-2)

    def blocks(self, wq: Tensor, x: Tensor) -> Tensor:
        products = self.slopes(wq, x).flatten(-2).mT @ _with_one(x)
        return products.view(len(x), x.shape[-1], *[x.shape[-1] + 1] * 2)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


DIAGONAL, FULL = _Diagonal(), _Full()
Layout = _Diagonal | _Full


@dataclass(frozen=True)
class SoftmaxRegression:
    """Features, labels, weights and penalties of F fits of softmax(W x + b)."""

    layout: Layout  # which entries of W are parameters
    x: Tensor  # finite features `(F, N, C)`
    excluded: Tensor | None  # classes that have probability 0 in a row, `(F, N, C)`; None for no such classes
    target: Tensor  # labels `(F, N)`
    w: Tensor  # weights with sum 1, or 0 for fits without data, `(F, N)`
    ridge: Tensor | None  # factor of the squared distance of each parameter from W = 1, b = 0; None without penalty

    def single(self) -> "SoftmaxRegression":
        """Return the problem in float32."""
        ridge = None if self.ridge is None else self.ridge.float()
        return replace(self, x=self.x.float(), w=self.w.float(), ridge=ridge)

    def pieces(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
        """Yield features, excluded classes, labels, and weights `(F, n, 1)`, in pieces that fit into the cache."""
        n_fits, n, n_classes = self.x.shape
        rows = max(1, PIECE // max(1, n_fits * n_classes))
        for start in range(0, n, rows):
            i = slice(start, start + rows)
            excluded = None if self.excluded is None else self.excluded[:, i]
            yield self.x[:, i], excluded, self.target[:, i], self.w[:, i].unsqueeze(-1)


class StructuredMinimum(NamedTuple):
    """Result of F fits, and what similar fits start from."""

    theta: Tensor
    gradient: Tensor
    outcome: Tensor  # `(F,)`
    curvature: "_Curvature | None"  # float32 Hessian near the minimum


def identity(layout: Layout, n_fits: int, like: Tensor) -> Tensor:
    """Return the parameters of W = 1, b = 0."""
    n_classes = like.shape[-1]
    n_parameters = 2 if layout is DIAGONAL else n_classes + 1
    theta = like.new_zeros(n_fits, n_classes, n_parameters)
    layout.own(theta).fill_(1)
    return theta


def minimise(
    p: SoftmaxRegression, theta: Tensor, fixed: Tensor, similar: StructuredMinimum | None = None
) -> StructuredMinimum:
    """Minimise the mean NLL plus the penalty from `theta`; fits with `fixed` `(F,)` return it.

    The iteration can start at the result of `similar` fits instead, such as those to another fold.
    """
    near = theta if similar is None else torch.where(fixed[:, None, None], theta, similar.theta)
    curvature = None if similar is None else similar.curvature
    # A float32 fit, whose last Hessian serves the float64 fit while the gradient decreases quickly.
    single = _Objective(p.single(), SINGLE_GRADIENT, curvature)
    start = damped_newton(near.float(), single.value, single.step, fixed, noise=SINGLE_ROUNDING).theta
    is_finite = start.isfinite().all(-1).all(-1)[:, None, None]
    start = torch.where(is_finite, start.to(theta.dtype), theta)
    exact = _Objective(p, GRADIENT, single.curvature)
    theta, value, step = damped_newton(start, exact.value, exact.step, fixed, noise=OBJECTIVE_ROUNDING)

    outcome = torch.where(value.norm <= ROUNDING_LIMITS[0], CONVERGED, STOPPED)
    if p.ridge is None:
        is_separated = exact.is_separated(value)
        is_long = step.p.abs().amax((-1, -2)) > 0.01  # for separable data the gradient vanishes, but steps remain long
        if value_if_available((is_long & ~is_separated).any()) is not False:
            is_separated = is_separated | (is_long & _is_separation(p, step.p))
        outcome = outcome.masked_fill(is_separated, SEPARABLE)
    kept = single.curvature if exact.curvature is single.curvature else None
    return StructuredMinimum(theta, value.gradient, outcome, kept)


class _Objective:
    """Mean NLL plus the penalty, and its Newton steps.

    `goal` is the gradient norm at convergence, and `curvature` the Hessian near the initial parameters, or None.
    """

    def __init__(self, p: SoftmaxRegression, goal: float, curvature: "_Curvature | None") -> None:
        self.p, self.goal, self.curvature = p, goal, curvature
        self.bound = separation_bound(p.w)
        self.origin = identity(p.layout, 1, p.x)
        # Gradient of the mean score of the labels, which is linear in the parameters.
        self.labels = torch.zeros_like(identity(p.layout, len(p.x), p.x))
        for x, _, target, w in p.pieces():
            self.labels += p.layout.sums(torch.zeros_like(x).scatter_(-1, target.unsqueeze(-1), w), x)
        self.last_step = torch.zeros_like(self.labels)
        self.last: tuple[Tensor, Tensor] | None = None  # gradient norm at the last iterate, and fits finished there

    def value(self, theta: Tensor) -> Value:
        """Return the objective and its gradient: sum_i w_i (log sum_k exp z_ik - z_i,label), with scores z."""
        p = self.p
        objective, gradient = -_dot(theta, self.labels), -self.labels
        for x, w, q, log_sum in _softmax_pieces(p, theta):
            objective = objective + (w * log_sum).sum((-1, -2))
            gradient = gradient + p.layout.sums(q.mul_(w), x)
        if p.ridge is not None:
            away = theta - self.origin
            objective, gradient = objective + _dot(p.ridge * away, away), gradient + 2 * p.ridge * away
        return Value(objective, gradient, _norm(gradient))

    def step(self, at: Iterate) -> Step:
        """Return the Newton step, with a new Hessian if the gradient did not decrease to a quarter."""
        value = at.value
        if self.last is not None:
            norm, was_finished = self.last
            if value_if_available((~was_finished & ~(value.norm <= norm / 4)).any()) is not False:
                self.curvature = None
        is_done = (value.norm <= self.goal) | self.is_separated(value)
        is_finished = is_done | at.is_stopped
        self.last = value.norm, is_finished
        if all_true(is_finished):
            return Step(self.last_step, torch.zeros_like(value.f), is_done)
        is_current = self.curvature is None
        self.curvature = self.curvature or _Curvature(self.p, at.theta, self.labels[..., -1] > 0)
        newton = self.curvature.step(value.gradient, is_finished)
        self.last_step = torch.where(is_finished[:, None, None], self.last_step, newton)
        return Step(self.last_step, _dot(self.last_step, value.gradient), is_done, is_current)

    def is_separated(self, value: Value) -> Tensor:
        """Return whether every label has a probability above 1/2, so that no finite W is best, `(F,)`."""
        return (value.f < self.bound) & (self.p.ridge is None)


def _norm(gradient: Tensor) -> Tensor:
    return gradient.square().sum((-1, -2)).sqrt()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-1, -2))


def _softmax_pieces(p: SoftmaxRegression, theta: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield features, weights, the softmax q of the scores, and their log-sum-exp `(F, n, 1)`."""
    for x, excluded, _, w in p.pieces():
        q = p.layout.scores(theta, x)
        if excluded is not None:
            q = q.masked_fill_(excluded, -torch.inf)
        top = q.amax(-1, keepdim=True)
        top = top.masked_fill_(top == -torch.inf, 0)  # rows of weight 0 may have no class
        q = q.sub_(top).exp_()
        norm = q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
        yield x, w, q.div_(norm), norm.log().add_(top)


class _Curvature:
    """Hessian at given parameters, for Newton steps. With many parameters, only q and a preconditioner are stored.

    Let q be the softmax of a row, and d_k the derivative of the score of class k in its parameters. The Hessian of the
    NLL is the weighted mean of diag(q_k d_k d_k') - (q d) (q d)' over the rows.
    """

    def __init__(self, p: SoftmaxRegression, theta: Tensor, present: Tensor) -> None:
        self.dtype = theta.dtype
        self.hessian: Tensor | None = None
        self.probs: list[Tensor] = []
        if theta[0].numel() <= DENSE:
            self.hessian = self._dense(p, theta, present)
        else:
            self.p = p
            self._prepare(theta)

    def step(self, gradient: Tensor, is_finished: Tensor) -> Tensor:
        """Return the Newton step for the gradient, in the dtype of the gradient."""
        size = _norm(gradient)
        unit = size.masked_fill(size == 0, 1)[:, None, None]  # float32 cannot represent very small gradients
        scaled = (gradient / unit).to(self.dtype)
        if self.hessian is not None:
            step = newton_direction(self.hessian, scaled.flatten(-2)).view_as(scaled)
        else:
            # The tolerance decreases with the gradient: the Newton iteration then converges superlinearly.
            step = self._conjugate(-scaled, size.sqrt().clamp(2e-2, 0.1).to(scaled.dtype), is_finished)
        return step.to(gradient.dtype) * unit

    def _dense(self, p: SoftmaxRegression, theta: Tensor, present: Tensor) -> Tensor:
        """Return the Hessian `(F, P, P)`."""
        n_fits, n_classes, n_own = theta.shape
        hessian = theta.new_zeros(n_fits, n_classes * n_own, n_classes * n_own)
        of_classes = hessian.view(n_fits, n_classes, n_own, n_classes, n_own).diagonal(dim1=1, dim2=3)
        for x, w, q, _ in _softmax_pieces(p, theta):
            slopes = p.layout.slopes(q, x).flatten(-2)
            hessian.baddbmm_((slopes * w).mT, slopes, alpha=-1)
            of_classes.add_(p.layout.blocks(q.mul_(w), x).movedim(1, -1))
        diagonal = hessian.diagonal(dim1=-2, dim2=-1)
        if p.ridge is not None:
            diagonal.add_(2 * p.ridge.flatten(-2))
            return hessian
        # Without penalty, a constant that is added to all biases changes no probability.
        ones = torch.zeros_like(theta)
        ones[..., -1] = present.to(ones.dtype)
        ones = ones.flatten(-2)
        return without_constant(hessian, ones, (diagonal * ones).sum(-1))

    def _prepare(self, theta: Tensor) -> None:
        """Store q, and for each class the diagonal and the mean derivative of its block of the Hessian.

        The block of class k is sum g d d' over the rows, with the weights g = w q_k (1 - q_k). It is approximated by a
        diagonal matrix plus h m m', where h is the sum of g, and m the mean of d. For a diagonal W, this is exact.
        """
        p = self.p
        square, total, mixed = torch.zeros_like(theta), torch.zeros_like(theta[..., 0]), torch.zeros_like(theta)
        for x, w, q, _ in _softmax_pieces(p, theta):
            g = (1 - q).mul_(q).mul_(w)
            square = square + p.layout.sums(g, x.square())
            mixed = mixed + p.layout.sums(g, x)
            total = total + g.sum(-2)
            self.probs.append(q)
        tiny = torch.finfo(theta.dtype).tiny
        self.mean = mixed / total.clamp(min=tiny).unsqueeze(-1)
        # The bias has no variance. Without penalty, a small part of its second moment keeps the inverse finite.
        diagonal = (square - mixed * self.mean).clamp(min=0) + 1e-3 * square
        diagonal = diagonal if p.ridge is None else diagonal + 2 * p.ridge
        self.diagonal = diagonal.masked_fill(diagonal <= 0, 1)
        spread = (self.mean.square() / self.diagonal).sum(-1, keepdim=True)
        self.factor = 1 / (1 / total.clamp(min=tiny).unsqueeze(-1) + spread)

    def _inverse(self, r: Tensor) -> Tensor:
        """Return the product of the inverse of the approximate Hessian with r, by the Sherman-Morrison formula."""
        scaled = r / self.diagonal
        along = (self.mean * scaled).sum(-1, keepdim=True)
        return scaled - self.mean / self.diagonal * (self.factor * along)

    def _conjugate(self, residual: Tensor, tolerance: Tensor, is_finished: Tensor) -> Tensor:
        """Return an approximate Newton step by preconditioned conjugate gradients; the first residual has norm 1."""
        step = torch.zeros_like(residual)
        conditioned = self._inverse(residual)
        direction, product = conditioned, _dot(residual, conditioned)
        for _ in range(CONJUGATE_ROUNDS):
            active = ~is_finished & (_norm(residual) > tolerance)
            if value_if_available(active.any()) is False:
                break
            # Nocedal, Wright, algorithm 5.3: step length, residual, and the next conjugate direction.
            curved = self._product(direction)
            curvature = _dot(direction, curved)
            length = torch.where(active & (curvature > 0), product / curvature, 0)[:, None, None]
            step, residual = step + length * direction, residual - length * curved
            conditioned = self._inverse(residual)
            # beta = r'M^-1 r / previous r'M^-1 r makes the directions conjugate.
            previous, product = product, _dot(residual, conditioned)
            direction = conditioned + (product / previous)[:, None, None] * direction
        return step

    def _product(self, v: Tensor) -> Tensor:
        """Return the product of the Hessian with v."""
        p = self.p
        result = torch.zeros_like(v) if p.ridge is None else 2 * p.ridge * v
        for (x, _, _, w), q in zip(p.pieces(), self.probs, strict=True):
            # H v = sum_i w_i (diag(q) - q q') (d v): the change of the scores, through the Jacobian of the softmax.
            change = p.layout.scores(v, x).mul_(q)
            change = torch.addcmul(change, q, change.sum(-1, keepdim=True), value=-1).mul_(w)
            result = result + p.layout.sums(change, x)
        return result


def _is_separation(p: SoftmaxRegression, step: Tensor) -> Tensor:
    """Return whether the data are separable in the direction `step`, bool `(F,)`; see `affine._is_separation`."""
    worst = torch.full_like(p.w[:, 0], torch.inf)
    for x, excluded, target, w in p.pieces():
        growth = p.layout.scores(step, x)
        growth = growth if excluded is None else growth.masked_fill(excluded, -torch.inf)
        margin = growth.gather(-1, target.unsqueeze(-1)) - growth.amax(-1, keepdim=True)
        worst = torch.minimum(worst, margin.masked_fill(w == 0, torch.inf).amin((-1, -2)))
    return worst >= -1e-6 * step.abs().amax((-1, -2))


class StructuredFit(NamedTuple):
    """Fits of softmax(W x + b)."""

    weight: Tensor  # diagonal of W `(R, S, C)`, or W `(R, S, C, C)`
    bias: Tensor  # b `(R, S, C)`
    grad_norm: Tensor  # norm of the gradient of the objective in all parameters, `(R, S)`; NaN for `SEPARABLE`
    # int64 `(R, S)`: `CONVERGED`, `SEPARABLE` (the NLL has no finite minimiser), `STOPPED` (the gradient is not small)
    # or `NO_DATA` (total weight 0, all values NaN)
    outcome: Tensor


def fit_vector(scores: Tensor, target: Tensor, weights: Tensor, alpha: Tensor) -> StructuredFit:
    """Fit softmax(a * s + b) with a scale and a bias per class, by minimising the negative log-likelihood (NLL).

    Classes with a score of -inf have probability 0. Samples whose label has a score of -inf are left out. The bias of a
    class without samples is -inf. The other biases have sum 0. Arguments are as for `fits.fit_temperature`, and the
    initial scale `alpha` `(R, S)`. `SEPARABLE` fits have this scale and bias 0.
    """
    return StructuredFit(*_fit(scores, target, weights, alpha, None, None, alpha, False))


def fit_structured(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,
    alpha: Tensor,
    smoothing: Tensor,
    ridge: Tensor,
    start: Tensor,
    full: bool,
) -> StructuredFit:
    """Fit softmax(W x + b) with a ridge penalty, where x are smoothed log-probabilities; see `smoothed_log_probs`.

    The objective is the mean negative log-likelihood plus

        ridge_0 sum_k (W_kk - 1)^2 + ridge_1 sum_{k != l} W_kl^2 + ridge_2 sum_k b_k^2

    with positive factors `ridge` `(R, S, 3)`. It is strictly convex, so that every fit with data has one minimum.
    Arguments are as for `fits.fit_temperature`, and the inverse temperature `alpha`, the `smoothing` and the initial
    diagonal `start`, each `(R, S)`. W is diagonal unless `full`.
    """
    return StructuredFit(*_fit(scores, target, weights, alpha, smoothing, ridge, start, full))


def smoothed_log_probs(log_q: Tensor, alpha: Tensor, smoothing: Tensor) -> Tensor:
    """Return log((1 - e) softmax(alpha log q) + e / C) for the smoothing e in (0, 1], finite also where q = 0.

    `log_q` are log-probabilities up to a constant per row, `(..., N, C)`. `alpha` and `smoothing` are `(...)`.
    """
    smoothing = smoothing[..., None, None]
    log_q = log_q - log_q.detach().amax(-1, keepdim=True)
    z = (alpha[..., None, None] * log_q).masked_fill(log_q == -torch.inf, -torch.inf)
    return torch.log(z.softmax(-1) * (1 - smoothing) + smoothing / log_q.shape[-1])


Solution = tuple[Tensor, ...]


def _empty_results(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,  # noqa: ARG001
    alpha: Tensor,
    smoothing: Tensor | None,  # noqa: ARG001
    ridge: Tensor | None,  # noqa: ARG001
    start: Tensor,  # noqa: ARG001
    full: bool,
) -> Solution:
    bias = alpha.new_empty((*alpha.shape, scores.shape[-1]))
    weight = bias.new_empty((*bias.shape, scores.shape[-1])) if full else bias.clone()
    return weight, bias, torch.empty_like(alpha), target.new_empty(alpha.shape)


@operation(
    "fit_structured(Tensor scores, Tensor target, Tensor weights, Tensor alpha, Tensor? smoothing, Tensor? ridge,"
    " Tensor start, bool full) -> (Tensor, Tensor, Tensor, Tensor)",
    _empty_results,
)
def _fit(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,
    alpha: Tensor,
    smoothing: Tensor | None,
    ridge: Tensor | None,
    start: Tensor,
    full: bool,
) -> Solution:
    """Solve the fits of all replicates and batch elements `(..., S, N, C)`, few at a time; None is vector scaling."""
    given = WeightedSamples.flattened(scores, target, weights)
    n_replicates, n_elements, n = given.w.shape
    wide = wide_dtype(scores.device)
    alpha, start = (each.movedim(-2, 0).reshape(n_replicates * n_elements).to(wide) for each in (alpha, start))
    if smoothing is not None and ridge is not None:
        smoothing = smoothing.movedim(-2, 0).reshape(alpha.shape).to(wide)
        ridge = ridge.movedim(-3, 0).reshape(-1, 3).to(wide)
    element = torch.arange(n_elements, device=scores.device).repeat(n_replicates)
    batch_size = max(1, PIECE // max(1, n * scores.shape[-1]))
    solutions, similar = [], None
    for first in range(0, max(1, len(element)), batch_size):
        i = slice(first, first + batch_size)
        of_scores, of_target, w = given.x[element[i]], given.target[element[i]], given.w.flatten(0, 1)[i]
        if batch_size == 1 and scores.device.type == "cpu":
            used = w[0] != 0
            if value_if_available(used.any() & ~used.all()):  # for folds, leave out the samples of the held-out fold
                of_scores, of_target, w = of_scores[:, used], of_target[:, used], w[:, used]
        samples = of_scores.to(wide), of_target, w.to(wide), alpha[i]
        if smoothing is None or ridge is None:
            solution, found = _solve_vector(*samples, similar)
        else:
            solution, found = _solve_structured(*samples, similar, smoothing[i], ridge[i], start[i], full)
        solutions.append(solution)
        # A single fit is large. The next one starts at its result if it is a fit to the same samples.
        is_similar = batch_size == n_elements == 1 and found is not None and all_true(found.outcome == CONVERGED)
        similar = found if is_similar else None
    joined = [torch.cat(column) for column in zip(*solutions, strict=True)]
    return given.batch_axes_restored([x.reshape(n_replicates, n_elements, *x.shape[1:]) for x in joined])


def _solve_vector(
    scores: Tensor, target: Tensor, weights: Tensor, alpha: Tensor, similar: StructuredMinimum | None
) -> tuple[Solution, StructuredMinimum | None]:
    if not len(scores):
        return _empty_results(scores, target, weights, alpha, None, None, alpha, False), None
    # Unused rows may contain NaN.
    unused = weights == 0
    scores = scores.masked_fill_(unused.unsqueeze(-1), 0)
    certain = is_certain(scores)
    extent = scores.amax((-1, -2)) - scores.masked_fill(scores == -torch.inf, 0).amin((-1, -2))
    if value_if_available((extent <= LARGE_SCALE).all()) is not True:
        # Very low scores may represent the -inf of masked classes.
        near = is_near_top(scores - scores.amax(-1, keepdim=True))
        scores = scores.masked_fill(~near, -torch.inf)
    excluded = scores == -torch.inf
    # Leave out samples whose label has probability 0 or 1: their NLL is infinite, or 0 for all parameters.
    lost = excluded.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    w = weights.masked_fill(lost, 0)
    empty = ~(w.sum(-1, keepdim=True) > 0)
    w = w.masked_fill(certain, 0)
    total = w.sum(-1, keepdim=True)
    all_certain = ~(total > 0)
    w = (w / total).masked_fill(all_certain, 0)
    share = torch.zeros_like(scores[:, 0]).scatter_add(-1, target, w)
    present = share > 0
    separable = _separates_a_class(scores, target, w) | all_certain.squeeze(-1)
    excluded = excluded | ~present.unsqueeze(-2)
    given = None if value_if_available(excluded.any()) is False else excluded

    # Standardise the scores of each class. Newton steps do not depend on this, but their rounding errors do.
    scores = scores.masked_fill_(excluded, 0)
    weight_of = w.unsqueeze(-1) * ~excluded
    norm = weight_of.sum(-2).clamp(min=torch.finfo(w.dtype).tiny)
    mean = (weight_of * scores).sum(-2) / norm
    scores = scores.sub_(mean.unsqueeze(-2)).masked_fill_(excluded | unused.unsqueeze(-1), 0)
    spread = ((weight_of * scores.square()).sum(-2) / norm).sqrt()
    spread = torch.where(spread > 0, spread, 1)
    x = scores.div_(spread.unsqueeze(-2))

    # Temperature scaling in the parameters of the standardised scores.
    start = torch.stack((alpha.unsqueeze(-1) * spread, alpha.unsqueeze(-1) * mean), -1)
    start = start.nan_to_num(0).masked_fill(~present.unsqueeze(-1), 0)
    fixed = separable | empty.squeeze(-1)
    minimum = minimise(SoftmaxRegression(DIAGONAL, x, given, target, w, None), start, fixed, similar)
    theta, gradient, outcome, _ = minimum
    # Convert from standardised scores (s - mean) / spread to the original ones.
    scale = theta[..., 0] / spread
    bias = theta[..., 1] - scale * mean
    gradient = torch.stack((gradient[..., 0] * spread + gradient[..., 1] * mean, gradient[..., 1]), -1)
    # Biases have sum 0 over the classes with samples, and are -inf for the others.
    bias = bias.masked_fill(~present, 0)
    bias = bias - bias.sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp(min=1)
    scale = torch.where(present, scale, alpha.unsqueeze(-1))
    bias = bias.masked_fill(~present, -torch.inf)

    outcome = outcome.masked_fill(separable, SEPARABLE).masked_fill(empty.squeeze(-1), NO_DATA)
    separable = (outcome == SEPARABLE).unsqueeze(-1)
    scale = torch.where(separable, alpha.unsqueeze(-1), scale).masked_fill(empty, torch.nan)
    bias = bias.masked_fill(separable, 0).masked_fill(empty, torch.nan)
    grad_norm = gradient.square().sum((-1, -2)).sqrt().masked_fill((separable | empty).squeeze(-1), torch.nan)
    return (scale, bias, grad_norm, outcome), minimum


def _separates_a_class(scores: Tensor, target: Tensor, w: Tensor) -> Tensor:
    """Return whether the score of some class separates its samples from all others, bool `(F,)`.

    The likelihood of vector scaling then rises without bound with the scale of this class. Few samples per class often
    have this property. Other separable data are recognised by the Newton steps.
    """
    n_classes = scores.shape[-1]
    label = target.unsqueeze(-1)
    is_used = (w > 0).unsqueeze(-1)
    own = scores.gather(-1, label).masked_fill(~is_used, torch.inf).squeeze(-1)
    lowest = scores.new_full((len(scores), n_classes), torch.inf).scatter_reduce(-1, target, own, "amin")
    others = scores.scatter(-1, label, -torch.inf).masked_fill(~is_used, -torch.inf).amax(-2)
    return ((lowest >= others) & (lowest < torch.inf)).any(-1)


def _solve_structured(
    scores: Tensor,
    target: Tensor,
    weights: Tensor,
    alpha: Tensor,
    similar: StructuredMinimum | None,
    smoothing: Tensor,
    ridge: Tensor,
    start: Tensor,
    full: bool,
) -> tuple[Solution, StructuredMinimum | None]:
    if not len(scores):
        return _empty_results(scores, target, weights, alpha, None, None, alpha, full), None
    unused = weights == 0
    total = weights.sum(-1)
    empty = ~(total > 0)
    total = total.masked_fill(empty, 1)
    w = weights / total.unsqueeze(-1)
    x = smoothed_log_probs(scores, alpha, smoothing).masked_fill_(unused.unsqueeze(-1), 0)
    layout = FULL if full else DIAGONAL
    theta = identity(layout, len(x), x) * start[:, None, None]
    of_diagonal, of_others, of_biases = ridge.unsqueeze(-1).unbind(-2)
    factors = of_others.unsqueeze(-1).expand_as(theta).clone()
    layout.own(factors).copy_(of_diagonal.expand_as(theta[..., 0]))
    factors[..., -1] = of_biases
    minimum = minimise(SoftmaxRegression(layout, x, None, target, w, factors), theta, empty, similar)
    theta, gradient, outcome, _ = minimum
    theta = theta.masked_fill(empty[:, None, None], torch.nan)
    weight = theta[..., :-1] if full else theta[..., 0]
    grad_norm = gradient.square().sum((-1, -2)).sqrt().masked_fill(empty, torch.nan)
    return (weight, theta[..., -1], grad_norm, outcome.masked_fill(empty, NO_DATA)), minimum
