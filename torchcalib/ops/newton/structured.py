"""Fits of softmax(W x + b) to labels, where W is diagonal (one scale per class) or a full matrix.

Axes: F fits that are solved together, N samples, C classes. The parameters of a class are a row of W without the
entries that are fixed to 0, followed by its bias: `(F, C, 2)` for a diagonal W, `(F, C, C + 1)` for a matrix.

The fit minimises the mean negative log-likelihood (NLL) plus a ridge penalty by damped Newton steps. The Newton step
of up to `DENSE` parameters is a Cholesky solution. For more parameters, the Hessian would not fit into memory. The step
is then found by conjugate gradients, which need products of the Hessian with vectors only.

Sources: Nocedal, Wright: Numerical optimization (2006), algorithms 3.2 (line search) and 7.1 (Newton with conjugate
gradients).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.newton.affine import solve_scaled
from torchcalib.ops.newton.problem import (
    CONVERGED,
    GRADIENT,
    NLL_ROUNDING,
    PIECE,
    ROUNDING_LIMITS,
    ROUNDS,
    SEPARABLE,
    STOPPED,
    all_true,
)

DENSE = 512  # largest number of parameters whose Hessian is stored and factored
CONJUGATE_ROUNDS = 500  # largest number of products of the Hessian in one Newton step


class Layout(Protocol):
    """Parameters of W. Every function takes features or residuals `(F, n, C)`."""

    def scores(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return W x + b, `(F, n, C)`."""

    def sums(self, r: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of the sum of r * (W x + b) in the parameters."""

    def own(self, theta: Tensor) -> Tensor:
        """Return a view of the diagonal of W, `(F, C)`."""

    def slopes(self, q: Tensor, x: Tensor) -> Tensor:
        """Return q_k times the derivative of the score of class k in its parameters, `(F, n, C, parameters of k)`."""

    def blocks(self, wq: Tensor, x: Tensor) -> Tensor:
        """Return the sum over rows of wq_k d d', with the derivative d of the score of class k, `(F, C, D, D)`."""


class Diagonal:
    """Layout of a diagonal W: the parameters of class k are W_kk and b_k."""

    def scores(self, theta: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(theta[..., 1].unsqueeze(-2), theta[..., 0].unsqueeze(-2), x)

    def sums(self, r: Tensor, x: Tensor) -> Tensor:
        return torch.stack(((r * x).sum(-2), r.sum(-2)), -1)

    def own(self, theta: Tensor) -> Tensor:
        return theta[..., 0]

    def slopes(self, q: Tensor, x: Tensor) -> Tensor:
        return torch.stack((q * x, q), -1)

    def blocks(self, wq: Tensor, x: Tensor) -> Tensor:
        scaled = wq * x
        mixed = scaled.sum(-2)
        return torch.stack(((scaled * x).sum(-2), mixed, mixed, wq.sum(-2)), -1).unflatten(-1, (2, 2))


class Full:
    """Layout of a full W: the parameters of class k are row k of W and b_k."""

    def scores(self, theta: Tensor, x: Tensor) -> Tensor:
        return torch.baddbmm(theta[..., -1].unsqueeze(-2), x, theta[..., :-1].mT)

    def sums(self, r: Tensor, x: Tensor) -> Tensor:
        return torch.cat((r.mT @ x, r.sum(-2).unsqueeze(-1)), -1)

    def own(self, theta: Tensor) -> Tensor:
        return theta[..., :-1].diagonal(dim1=-2, dim2=-1)

    def slopes(self, q: Tensor, x: Tensor) -> Tensor:
        return q.unsqueeze(-1) * _with_one(x).unsqueeze(-2)

    def blocks(self, wq: Tensor, x: Tensor) -> Tensor:
        n_parameters = x.shape[-1] + 1
        return (self.slopes(wq, x).flatten(-2).mT @ _with_one(x)).unflatten(-2, (-1, n_parameters))


def _with_one(x: Tensor) -> Tensor:
    """Return the features with a feature of 1 for the bias."""
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


@dataclass(frozen=True)
class Problem:
    """Features, labels, weights and penalties of F fits.

    Attributes:
        layout: which entries of W are parameters.
        x: finite features `(F, N, C)`.
        excluded: classes that have probability 0 in a row, `(F, N, C)`; None for no such classes.
        target: labels `(F, N)`.
        w: weights with sum 1, or 0 for fits without data, `(F, N)`.
        ridge: factor of the squared distance of each parameter from W = 1, b = 0; None without penalty.
    """

    layout: Layout
    x: Tensor
    excluded: Tensor | None
    target: Tensor
    w: Tensor
    ridge: Tensor | None

    def pieces(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
        """Yield features, excluded classes, labels, and weights `(F, n, 1)`, in pieces that fit into the cache."""
        n_fits, n, n_classes = self.x.shape
        rows = max(1, PIECE // max(1, n_fits * n_classes))
        for start in range(0, n, rows):
            i = slice(start, start + rows)
            excluded = None if self.excluded is None else self.excluded[:, i]
            yield self.x[:, i], excluded, self.target[:, i], self.w[:, i].unsqueeze(-1)


class _Value(NamedTuple):
    """Objective `(F,)`, its gradient, and its Hessian `(F, P, P)` or the probabilities of the pieces."""

    objective: Tensor
    gradient: Tensor
    hessian: Tensor | None
    probs: list[Tensor]


class Minimum(NamedTuple):
    """Parameters at the minimum, the gradient there, and the outcome `(F,)`."""

    theta: Tensor
    gradient: Tensor
    outcome: Tensor


def identity(layout: Layout, n_fits: int, like: Tensor) -> Tensor:
    """Return the parameters of W = 1, b = 0."""
    n_classes = like.shape[-1]
    n_parameters = 2 if isinstance(layout, Diagonal) else n_classes + 1
    theta = like.new_zeros(n_fits, n_classes, n_parameters)
    layout.own(theta).fill_(1)
    return theta


def minimise(p: Problem, theta: Tensor, fixed: Tensor) -> Minimum:
    """Minimise the mean NLL plus the penalty by damped Newton steps.

    A step is accepted if the objective decreases by at least 1e-4 of the decrease predicted by the slope (Armijo
    condition). Otherwise a quarter of the step is tried.

    Args:
        p: features, labels, weights and penalties.
        theta: initial parameters.
        fixed: True for fits that are not iterated and return the initial theta, `(F,)`.
    """
    dense = theta[0].numel() <= DENSE
    origin = identity(p.layout, 1, p.x)
    labels = torch.zeros_like(theta)
    for x, _, target, w in p.pieces():
        labels += p.layout.sums(torch.zeros_like(x).scatter_(-1, target.unsqueeze(-1), w), x)
    # Classes without samples and without penalty have a bias of -inf and are excluded in every row.
    present = labels[..., -1] > 0
    smallest_weight = torch.where(p.w > 0, p.w, torch.inf).amin(-1)
    eps = torch.finfo(theta.dtype).eps

    value = _evaluate(p, theta, labels, origin, dense)
    step, fraction = torch.zeros_like(theta), torch.ones_like(value.objective)
    better = torch.ones_like(value.objective, dtype=torch.bool)
    for _ in range(ROUNDS):
        size = _norm(value.gradient)
        # Separation: below this NLL every label has probability > 1/2. One label with a lower probability would add at
        # least its weight times log 2 to the NLL.
        is_separated = (value.objective < smallest_weight * math.log(2)) & (p.ridge is None)
        is_finished = fixed | (size <= GRADIENT) | is_separated | value.objective.isnan() | (fraction < 1e-6)
        if all_true(is_finished):
            break
        if value_if_available((better & ~is_finished).any()) is not False:
            newton = _newton_step(p, value, present) if dense else _conjugate_step(p, value, is_finished)
            step = torch.where(is_finished[:, None, None], step, newton)
        slope = _dot(step, value.gradient)
        moved = theta + fraction[:, None, None] * step
        new = _evaluate(p, moved, labels, origin, dense)
        level = 1 + value.objective.abs()
        meets_armijo = new.objective <= value.objective + 1e-4 * fraction * slope + 4 * eps * level
        # Near the minimum the objective is constant up to rounding errors. There accept a step that halves the gradient.
        is_level = new.objective <= value.objective + NLL_ROUNDING * level
        halves = _norm(new.gradient) <= size / 2
        better = ~is_finished & torch.where(slope.abs() > NLL_ROUNDING * level, meets_armijo, is_level & halves)
        theta = torch.where(better[:, None, None], moved, theta)
        value = _chosen(better, new, value)
        fraction = torch.where(better, 1, fraction / 4).where(~is_finished, fraction)
    outcome = torch.where(_norm(value.gradient) <= ROUNDING_LIMITS[0], CONVERGED, STOPPED)
    if p.ridge is None:
        is_long = step.abs().amax((-1, -2)) > 0.01  # for separable data the gradient vanishes, but steps remain long
        if value_if_available((is_long & ~is_separated).any()) is not False:
            is_separated = is_separated | (is_long & _is_separation(p, step))
        outcome = outcome.masked_fill(is_separated, SEPARABLE)
    return Minimum(theta, value.gradient, outcome)


def _norm(gradient: Tensor) -> Tensor:
    return gradient.square().sum((-1, -2)).sqrt()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-1, -2))


def _chosen(better: Tensor, new: _Value, old: _Value) -> _Value:
    """Return the values of `new` where `better` is True, and of `old` elsewhere."""
    if all_true(better):
        return new
    hessian = None
    if new.hessian is not None and old.hessian is not None:
        hessian = torch.where(better[:, None, None], new.hessian, old.hessian)
    probs = [torch.where(better[:, None, None], a, b) for a, b in zip(new.probs, old.probs, strict=True)]
    gradient = torch.where(better[:, None, None], new.gradient, old.gradient)
    return _Value(torch.where(better, new.objective, old.objective), gradient, hessian, probs)


def _evaluate(p: Problem, theta: Tensor, labels: Tensor, origin: Tensor, dense: bool) -> _Value:
    """Compute the objective and its derivatives. `labels` are the derivatives of the mean score of the labels.

    Let q be the softmax of a row, and d_k the derivative of the score of class k in its parameters. The Hessian is the
    weighted mean of diag(q_k d_k d_k') - (q d) (q d)' over the rows.
    """
    objective, gradient = -_dot(theta, labels), -labels
    n_parameters = theta[0].numel()
    hessian = theta.new_zeros(len(theta), n_parameters, n_parameters) if dense else None
    probs = []
    for x, excluded, _, w in p.pieces():
        q = p.layout.scores(theta, x)
        if excluded is not None:
            q = q.masked_fill_(excluded, -torch.inf)
        top = q.amax(-1, keepdim=True)
        top = top.masked_fill_(top == -torch.inf, 0)  # rows of weight 0 may have no class
        q = q.sub_(top).exp_()
        norm = q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
        q = q.div_(norm)
        objective = objective + (w * norm.log().add_(top)).sum((-1, -2))
        wq = w * q
        gradient = gradient + p.layout.sums(wq, x)
        if hessian is None:
            probs.append(q)
            continue
        slopes = p.layout.slopes(q, x).flatten(-2)
        hessian.baddbmm_((slopes * w).mT, slopes, alpha=-1)
        _class_blocks(hessian, theta).add_(p.layout.blocks(wq, x).movedim(1, -1))
    if p.ridge is not None:
        away = theta - origin
        objective, gradient = objective + _dot(p.ridge * away, away), gradient + 2 * p.ridge * away
        if hessian is not None:
            hessian.diagonal(dim1=-2, dim2=-1).add_(2 * p.ridge.flatten(-2))
    return _Value(objective, gradient, hessian, probs)


def _class_blocks(hessian: Tensor, theta: Tensor) -> Tensor:
    """Return a view of the second derivatives in the parameters of the same class, `(F, D, D, C)`."""
    n_fits, n_classes, n_parameters = theta.shape
    return hessian.view(n_fits, n_classes, n_parameters, n_classes, n_parameters).diagonal(dim1=1, dim2=3)


def _newton_step(p: Problem, value: _Value, present: Tensor) -> Tensor:
    """Return the Newton step by a Cholesky decomposition."""
    assert value.hessian is not None
    matrix = value.hessian
    if p.ridge is None:
        # Adding a constant to all biases changes no probability. The Hessian H is therefore singular in the direction e
        # of the biases. H + c e e' gives the same step, because the gradient is orthogonal to e.
        ones = torch.zeros_like(value.gradient)
        ones[..., -1] = present.to(ones.dtype)
        ones = ones.flatten(-2)
        trace = (matrix.diagonal(dim1=-2, dim2=-1) * ones).sum(-1)
        weight = trace / present.sum(-1).clamp(min=1).square()
        matrix = matrix + weight[:, None, None] * ones.unsqueeze(-1) * ones.unsqueeze(-2)
    return solve_scaled(matrix, -value.gradient.flatten(-2)).view_as(value.gradient)


def _conjugate_step(p: Problem, value: _Value, is_finished: Tensor) -> Tensor:
    """Return an approximate Newton step by preconditioned conjugate gradients.

    The tolerance decreases with the gradient, so that the Newton iteration converges superlinearly.
    """
    inverse = _Preconditioner(p, value)
    size = _norm(value.gradient)
    tolerance = size * size.sqrt().clamp(1e-4, 0.1)
    step, residual = torch.zeros_like(value.gradient), -value.gradient
    conditioned = inverse(residual)
    direction, product = conditioned, _dot(residual, conditioned)
    for _ in range(CONJUGATE_ROUNDS):
        active = ~is_finished & (_norm(residual) > tolerance)
        if value_if_available(active.any()) is False:
            break
        curved = _hessian_product(p, value.probs, direction)
        curvature = _dot(direction, curved)
        length = torch.where(active & (curvature > 0), product / curvature, 0)[:, None, None]
        step, residual = step + length * direction, residual - length * curved
        conditioned = inverse(residual)
        previous, product = product, _dot(residual, conditioned)
        direction = conditioned + (product / previous)[:, None, None] * direction
    return step


def _hessian_product(p: Problem, probs: list[Tensor], v: Tensor) -> Tensor:
    """Return the product of the Hessian with v."""
    result = torch.zeros_like(v) if p.ridge is None else 2 * p.ridge * v
    for (x, _, _, w), q in zip(p.pieces(), probs, strict=True):
        change = p.layout.scores(v, x).mul_(q)
        change = change.sub_(q * change.sum(-1, keepdim=True)).mul_(w)
        result = result + p.layout.sums(change, x)
    return result


class _Preconditioner:
    """Inverse of the diagonal of the Hessian, and of its 2 x 2 blocks of the scale W_kk and the bias b_k."""

    def __init__(self, p: Problem, value: _Value) -> None:
        diagonal = torch.zeros_like(value.gradient)
        mixed = torch.zeros_like(value.gradient[..., 0])
        for (x, _, _, w), q in zip(p.pieces(), value.probs, strict=True):
            curvature = (1 - q).mul_(q).mul_(w)
            diagonal = diagonal + p.layout.sums(curvature, x.square())
            mixed = mixed + (curvature * x).sum(-2)
        if p.ridge is not None:
            diagonal = diagonal + 2 * p.ridge
        diagonal = diagonal.masked_fill(diagonal <= 0, 1)
        self.layout, self.diagonal = p.layout, diagonal
        own, bias = self.layout.own(diagonal), diagonal[..., -1]
        determinant = own * bias - mixed.square()
        # Nearly singular blocks are replaced by their diagonals.
        is_regular = determinant > 1e-6 * own * bias
        self.mixed = torch.where(is_regular, mixed, 0)
        self.determinant = torch.where(is_regular, determinant, own * bias)

    def __call__(self, residual: Tensor) -> Tensor:
        result = residual / self.diagonal
        own, bias = self.layout.own(residual), residual[..., -1]
        scale = (self.diagonal[..., -1] * own - self.mixed * bias) / self.determinant
        shift = (self.layout.own(self.diagonal) * bias - self.mixed * own) / self.determinant
        self.layout.own(result).copy_(scale)
        result[..., -1] = shift
        return result


def _is_separation(p: Problem, step: Tensor) -> Tensor:
    """Return whether the data are separable in the direction `step`, bool `(F,)`.

    They are separable if the score of every label grows along `step` at least as fast as all other scores of its row.
    No likelihood then decreases, at any length of the step.

    Source: Albert, Anderson: On the existence of maximum likelihood estimates in logistic regression models (1984).
    """
    worst = torch.full_like(p.w[:, 0], torch.inf)
    for x, excluded, target, w in p.pieces():
        growth = p.layout.scores(step, x)
        growth = growth if excluded is None else growth.masked_fill(excluded, -torch.inf)
        margin = growth.gather(-1, target.unsqueeze(-1)) - growth.amax(-1, keepdim=True)
        worst = torch.minimum(worst, margin.masked_fill(w == 0, torch.inf).amin((-1, -2)))
    return worst >= -1e-6 * step.abs().amax((-1, -2))
