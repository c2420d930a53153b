"""Logistic regression on D features for batches of fits: damped Newton steps in float64, with an optional ridge.

Axes: R replicate weights, S batch elements, N samples, K = D + 1 columns (the intercept first).

The features of a batch element are replaced by orthonormal ones. Without a ridge, neither a factor of a feature nor a
correlation between features changes the iterations. Features that the previous columns determine get coefficient 0.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.ops.host_values import constant
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import CONVERGED, NO_DATA, SEPARABLE, STOPPED
from torchcalib.ops.newton.descent import (
    DECREMENT,
    GRADIENT,
    Iterate,
    Step,
    Value,
    damped_newton,
    is_within_rounding,
    newton_direction,
    separation_bound,
)
from torchcalib.ops.newton.scores import PIECE, WeightedSamples
from torchcalib.ops.operation import operation

RANK = 1e-12  # a feature is determined by others if this fraction of its norm or less remains without them
GROWTH = 0.01, -1e-6  # largest growth of a margin along a separating step, at least; and smallest, relative to it


class RegressionFit(NamedTuple):
    """Fits of P(y = 1) = sigmoid(intercept + coefficients * x) with the smallest mean negative log-likelihood (NLL)."""

    coefficients: Tensor  # `(R, S, D)`; 0 if all labels are equal
    intercept: Tensor  # `(R, S)`; inf or -inf if all labels are equal, which maximises the likelihood
    nll: Tensor  # mean NLL `(R, S)`, without the ridge
    grad_norm: Tensor  # norm of the gradient in the coefficients of the orthonormal features, `(R, S)`
    # int64 `(R, S)`: `CONVERGED`; `SEPARABLE` (no finite minimiser: coefficients of the last iteration); `STOPPED` (the
    # gradient is not small); or `NO_DATA` (total weight 0, all values NaN)
    outcome: Tensor


class LogisticRegression(NamedTuple):
    """Fits of the parameters phi in P(label of row n) = sigmoid(phi * x_n)."""

    x: Tensor  # columns, multiplied by 1 for label 1 and by -1 for label 0, `(S, K, N)`
    w: Tensor  # weights with sum 1, `(S, R, N)`
    ridge: Tensor  # matrix A of the penalty phi' A phi, `(S, K, K)`


class RegressionMinimum(NamedTuple):
    """Parameters `(S, R, K)`; mean NLL without penalty, norm of the gradient and outcome, `(S, R)` each."""

    phi: Tensor
    nll: Tensor
    grad_norm: Tensor
    outcome: Tensor


def fit_logistic_regression(
    x: Tensor,
    target: Tensor,
    weights: Tensor,
    ridge: Sequence[float] | None = None,
) -> RegressionFit:
    """Fit P(y = 1) = sigmoid(intercept + coefficients * x) by maximum likelihood.

    Features `x` `(S, D, N)` are finite where a weight `(R, S, N)` is positive. Samples with weight 0 are ignored. The
    penalty sum_k r_k theta_k^2 with the factors r = `ridge` is added to the mean NLL. theta contains the intercept and
    the D coefficients.
    """
    factors = [0.0] * (x.shape[-2] + 1) if ridge is None else list(ridge)
    return RegressionFit(*_fit(x, target, weights, factors))


def _empty_results(x: Tensor, target: Tensor, weights: Tensor, _: list[float]) -> tuple[Tensor, ...]:
    one = weights.new_empty(weights.shape[:-1], dtype=wide_dtype(weights.device))
    outcome = target.new_empty(one.shape, dtype=torch.int64)
    return one.new_empty((*one.shape, x.shape[-2])), one, one.clone(), one.clone(), outcome


@operation(
    "logistic_regression(Tensor x, Tensor target, Tensor weights, float[] ridge)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _empty_results,
)
def _fit(x: Tensor, target: Tensor, weights: Tensor, ridge: list[float]) -> tuple[Tensor, ...]:
    """Fit `(..., D, N)` with any batch axes; return the fields of `RegressionFit`."""
    given = WeightedSamples.flattened(x, target, weights, sample_axis=-1)
    wide = wide_dtype(x.device)
    fit = _solve(given.x.to(wide), given.target.to(wide), given.w.to(wide), ridge)
    return given.batch_axes_restored(fit)


def _solve(x: Tensor, target: Tensor, weights: Tensor, ridge: list[float]) -> RegressionFit:
    total = weights.sum(-1)
    w = weights / total.unsqueeze(-1)
    ones, zeros = (((weights > 0) & (target == k)).any(-1) for k in (1, 0))
    frequency = w.masked_fill(target != 1, 0).sum(-1)
    empty, has_one_class = ~(total > 0), ones != zeros
    x, triangle, penalty = _orthonormal(x, w.nan_to_num(0), ridge)
    problem = LogisticRegression(x * (2 * target - 1).unsqueeze(-2), w.nan_to_num(0).transpose(0, 1), penalty)

    # Start at the class frequency with all coefficients 0, where the Hessian is well conditioned.
    start = torch.zeros((*total.shape, triangle.shape[-1]), dtype=w.dtype, device=w.device)
    start[..., 0] = frequency.clamp(1e-12, 1 - 1e-12).logit() * triangle[..., 0, 0]
    found = _minimise(problem, start.transpose(0, 1), (empty | has_one_class).transpose(0, 1))
    phi, nll, grad_norm, outcome = (t.transpose(0, 1) for t in found)

    theta = torch.linalg.solve_triangular(triangle, phi.unsqueeze(-1), upper=True).squeeze(-1)
    certain = torch.where(ones, torch.inf, -torch.inf)
    outcome = outcome.masked_fill(has_one_class, CONVERGED).masked_fill(empty, NO_DATA)
    intercept = torch.where(has_one_class, certain, theta[..., 0])
    coefficients = theta[..., 1:].masked_fill(has_one_class.unsqueeze(-1), 0)
    return RegressionFit(
        coefficients.masked_fill(empty.unsqueeze(-1), torch.nan),
        intercept.masked_fill(empty, torch.nan),
        nll.masked_fill(has_one_class, 0).masked_fill(empty, torch.nan),
        grad_norm.masked_fill(has_one_class, 0).masked_fill(empty | (outcome == SEPARABLE), torch.nan),
        outcome,
    )


def _orthonormal(x: Tensor, w: Tensor, ridge: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Return columns x R^-1 `(S, K, N)`, the triangles R `(S, K, K)`, and the penalty in the new parameters.

    The new columns are orthonormal for the mean of the replicate weights (modified Gram-Schmidt process).
    """
    mean_w = w.mean(0) if len(w) else w.new_zeros(w.shape[1:])
    columns = torch.cat((torch.ones_like(mean_w).unsqueeze(-2), x), -2).masked_fill((mean_w == 0).unsqueeze(-2), 0)
    # Divide by the largest value first, because squares of large features would overflow.
    size = columns.abs().amax(-1)
    size = torch.where(size > 0, size, 1)
    remaining = list((columns / size.unsqueeze(-1)).unbind(-2))
    triangle = torch.diag_embed(size)
    # Modified Gram-Schmidt process: subtract the projections on the previous columns one after the other.
    for k, column in enumerate(remaining):
        norm = (mean_w * column.square()).sum(-1).sqrt()
        for j in range(k):
            part = (mean_w * remaining[j] * column).sum(-1)
            triangle[:, j, k] = part * size[:, k]
            column = column - part.unsqueeze(-1) * remaining[j]
        # A column that the previous ones determine is set to 0: its coefficient is then 0.
        rest = (mean_w * column.square()).sum(-1).sqrt()
        determined = rest <= RANK * norm
        remaining[k] = (column / torch.where(determined, 1, rest).unsqueeze(-1)).masked_fill(
            determined.unsqueeze(-1), 0
        )
        triangle[:, k, k] *= torch.where(determined, 1, rest)
    # theta = R^-1 phi: the penalty theta' diag(r) theta is quadratic in phi.
    eye = torch.eye(len(remaining), dtype=w.dtype, device=w.device).expand_as(triangle)
    inverse = torch.linalg.solve_triangular(triangle, eye, upper=True)
    factors = constant(ridge, w.dtype, w.device)
    return torch.stack(remaining, -2), triangle, inverse.mT @ (factors.unsqueeze(-1) * inverse)


def _minimise(p: LogisticRegression, phi: Tensor, fixed: Tensor) -> RegressionMinimum:
    """Minimise the mean NLL plus penalty from `phi` `(S, R, K)`, which is the result where `fixed` `(S, R)` is True."""
    bound = separation_bound(p.w)

    def evaluate(phi: Tensor) -> Value:
        return _evaluate(p, phi)

    def is_exact(value: Value, slope: Tensor) -> Tensor:
        return (value.norm <= GRADIENT) & (slope >= -DECREMENT)

    def step(at: Iterate) -> Step:
        hessian, _ = at.value.parts
        direction = newton_direction(hessian, at.value.gradient)
        slope = (direction * at.value.gradient).sum(-1)
        return Step(direction, slope, is_exact(at.value, slope) | (at.value.f < bound))

    phi, value, (direction, slope, *_) = damped_newton(phi, evaluate, step, fixed)
    done = is_exact(value, slope) | is_within_rounding(value.norm, slope)
    # For data that are separable with ties, the gradient vanishes, but the Newton steps remain long.
    is_separated = ((value.f < bound) | (done & _is_separation(p, direction))) & ~fixed
    outcome = torch.where(done, CONVERGED, STOPPED).masked_fill(is_separated, SEPARABLE)
    return RegressionMinimum(phi, value.parts[1], value.norm, outcome)


def _evaluate(p: LogisticRegression, phi: Tensor) -> Value:
    """Compute the objective and its derivatives, a few rows at a time; `parts` are the Hessian and the mean NLL.

    Let m = phi * x be the margin of a row, and q = sigmoid(-m) the probability of the other label. The NLL is the mean
    of -log sigmoid(m), with gradient -q x and Hessian q (1 - q) x x'.
    """
    n_columns = phi.shape[-1]
    nll, gradient = torch.zeros_like(phi[..., 0]), torch.zeros_like(phi)
    hessian = phi.new_zeros((*phi.shape[:-1], n_columns**2))
    rows = max(1, PIECE // max(1, p.w.shape[0] * p.w.shape[1]))
    for x, w in zip(torch.split(p.x, rows, -1), torch.split(p.w, rows, -1), strict=True):
        margin = phi @ x
        wrong = (-margin).sigmoid()  # probability of the other label
        weighted = w * wrong
        nll = nll - (w * logsigmoid(margin)).sum(-1)
        gradient = gradient - weighted @ x.mT
        products = (x.unsqueeze(-2) * x.unsqueeze(-3)).flatten(-3, -2)
        hessian = hessian + (weighted * (1 - wrong)) @ products.mT
    # Penalty phi' A phi, with gradient 2 A phi and Hessian 2 A.
    change = 2 * phi @ p.ridge
    gradient, hessian = gradient + change, hessian.view(*phi.shape, n_columns) + 2 * p.ridge.unsqueeze(1)
    objective = nll + (change * phi).sum(-1) / 2
    return Value(objective, gradient, gradient.square().sum(-1).sqrt(), (hessian, nll))


def _is_separation(p: LogisticRegression, step: Tensor) -> Tensor:
    """Return whether the log-odds of no label fall along a long `step`, bool `(S, R)`; see `affine._is_separation`."""
    growth, unused = step @ p.x, p.w == 0
    worst, best = growth.masked_fill(unused, torch.inf).amin(-1), growth.masked_fill(unused, -torch.inf).amax(-1)
    return (best > GROWTH[0]) & (worst >= GROWTH[1] * best)
