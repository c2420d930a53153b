"""Logistic regression on D features for batches of fits: damped Newton steps in float64, with an optional ridge.

Axes: R replicate weights, S batch elements, N samples, K = D + 1 columns (the intercept first).

The features of a batch element are replaced by orthonormal ones, from a QR decomposition of the weighted columns.
Without a ridge, neither a factor of a feature nor a correlation between features changes the iterations. Features that
the previous columns determine get coefficient 0.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton.problem import (
    CONVERGED,
    DECREMENT,
    GRADIENT,
    NLL_ROUNDING,
    NO_DATA,
    PIECE,
    ROUNDS,
    SEPARABLE,
    STOPPED,
    all_true,
    is_within_rounding,
    newton_direction,
)
from torchcalib.ops.operation import operation

RANK = 1e-12  # a feature is determined by others if this fraction of its norm or less remains without them


class RegressionFit(NamedTuple):
    """Fits of P(y = 1) = sigmoid(intercept + coefficients * x), which minimise the mean negative log-likelihood (NLL).

    Attributes:
        coefficients: `(R, S, D)`; 0 if all labels are equal.
        intercept: `(R, S)`; inf or -inf if all labels are equal, which maximises the likelihood.
        nll: mean NLL `(R, S)`, without the ridge.
        grad_norm: norm of the gradient in the coefficients of the orthonormal features, `(R, S)`.
        outcome: int64 `(R, S)`: `CONVERGED`; `SEPARABLE` (no finite minimiser: coefficients of the last iteration);
            `STOPPED` (the gradient is not small); or `NO_DATA` (total weight 0, all values NaN).
    """

    coefficients: Tensor
    intercept: Tensor
    nll: Tensor
    grad_norm: Tensor
    outcome: Tensor


class _Problem(NamedTuple):
    """Orthonormal columns x `(S, N, K)`, signs 2 y - 1 `(S, N)`, weights `(R, S, N)` and ridge `(S, K, K)`."""

    x: Tensor
    sign: Tensor
    w: Tensor
    ridge: Tensor


class _Value(NamedTuple):
    """Mean NLL `(R, S)`, and with the ridge: objective `(R, S)`, gradient `(R, S, K)`, Hessian `(R, S, K, K)`."""

    nll: Tensor
    objective: Tensor
    gradient: Tensor
    hessian: Tensor


def fit_logistic_regression(
    x: Tensor, target: Tensor, weights: Tensor, ridge: Sequence[float] | None = None
) -> RegressionFit:
    """Fit P(y = 1) = sigmoid(intercept + coefficients * x) by maximum likelihood.

    Args:
        x: features `(S, N, D)`, finite where a weight is positive.
        target: labels 0 and 1, `(S, N)`.
        weights: weights of the samples in each replicate, `(R, S, N)`. Samples with weight 0 are ignored.
        ridge: factors r of the penalty sum_k r_k theta_k^2, which is added to the mean NLL. theta contains the
            intercept and the D coefficients. None for no penalty.

    Returns:
        The fits; see `RegressionFit`.
    """
    return RegressionFit(*_fit(x, target, weights, [0.0] * (x.shape[-1] + 1) if ridge is None else list(ridge)))


def _empty_results(x: Tensor, target: Tensor, weights: Tensor, _: list[float]) -> tuple[Tensor, ...]:
    one = weights.new_empty(weights.shape[:-1], dtype=wide_dtype(weights.device))
    outcome = target.new_empty(one.shape, dtype=torch.int64)
    return one.new_empty((*one.shape, x.shape[-1])), one, one.clone(), one.clone(), outcome


@operation(
    "logistic_regression(Tensor x, Tensor target, Tensor weights, float[] ridge)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _empty_results,
)
def _fit(x: Tensor, target: Tensor, weights: Tensor, ridge: list[float]) -> tuple[Tensor, ...]:
    """Fit `(..., N, D)` with any batch axes; return the fields of `RegressionFit`."""
    batch_shape, n_replicates = x.shape[:-2], weights.shape[-3]
    n_elements, n, n_features = batch_shape.numel(), *x.shape[-2:]
    x, target = x.reshape(n_elements, n, n_features), target.reshape(n_elements, n)
    weights = weights.movedim(-3, 0).reshape(n_replicates, n_elements, n)
    if not n:  # add a sample of weight 0, because the QR decomposition needs at least one row
        x, target, weights = pad(x, (0, 0, 0, 1)), pad(target, (0, 1)), pad(weights, (0, 1))
    wide = wide_dtype(x.device)
    fit = _solve(x.to(wide), target.to(wide), weights.to(wide), ridge)
    return tuple(t.reshape(n_replicates, *batch_shape, *t.shape[2:]).movedim(0, len(batch_shape) - 1) for t in fit)


def _solve(x: Tensor, target: Tensor, weights: Tensor, ridge: list[float]) -> RegressionFit:
    total = weights.sum(-1)
    w = weights / total.unsqueeze(-1)
    frequency = (w * target.masked_fill((weights == 0).all(0), 0)).sum(-1)
    empty, has_one_class = ~(total > 0), (frequency <= 0) | (frequency >= 1)
    problem, triangle = _orthonormal(x, 2 * target - 1, w.nan_to_num(0), ridge)

    # Start at the class frequency with all coefficients 0, where the Hessian is well conditioned.
    start = torch.zeros((*total.shape, triangle.shape[-1]), dtype=w.dtype, device=w.device)
    start[..., 0] = frequency.clamp(1e-12, 1 - 1e-12).logit() * triangle[..., 0, 0]
    phi, value, outcome = _damped(problem, start, empty | has_one_class)

    theta = torch.linalg.solve_triangular(triangle, phi.unsqueeze(-1), upper=True).squeeze(-1)
    certain = torch.where(frequency > 0.5, torch.inf, -torch.inf)
    grad_norm = value.gradient.square().sum(-1).sqrt()
    outcome = outcome.masked_fill(has_one_class, CONVERGED).masked_fill(empty, NO_DATA)
    intercept = torch.where(has_one_class, certain, theta[..., 0])
    coefficients = theta[..., 1:].masked_fill(has_one_class.unsqueeze(-1), 0)
    return RegressionFit(
        coefficients.masked_fill(empty.unsqueeze(-1), torch.nan),
        intercept.masked_fill(empty, torch.nan),
        value.nll.masked_fill(has_one_class, 0).masked_fill(empty, torch.nan),
        grad_norm.masked_fill(has_one_class, 0).masked_fill(empty | (outcome == SEPARABLE), torch.nan),
        outcome,
    )


def _orthonormal(x: Tensor, sign: Tensor, w: Tensor, ridge: list[float]) -> tuple[_Problem, Tensor]:
    """Return the problem in orthonormal columns x R^-1, and the triangles R `(S, K, K)`.

    Columns are orthonormal for the mean of the replicate weights.
    """
    mean_w = w.mean(0) if len(w) else w.new_zeros(w.shape[1:])
    columns = pad(x, (1, 0), value=1.0).masked_fill((mean_w == 0).unsqueeze(-1), 0)
    # Divide by the largest value first, because squares of large features would overflow.
    size = columns.abs().amax(-2, keepdim=True)
    size = torch.where(size > 0, size, 1)
    columns = columns / size
    weighted = columns * mean_w.sqrt().unsqueeze(-1)
    _, triangle = torch.linalg.qr(pad(weighted, (0, 0, 0, columns.shape[-1])), mode="r")
    remaining = triangle.diagonal(dim1=-2, dim2=-1).abs()
    determined = remaining <= RANK * torch.linalg.vector_norm(triangle, dim=-2)
    triangle = torch.where(torch.diag_embed(determined), 1.0, triangle)
    columns = torch.linalg.solve_triangular(triangle, columns, upper=True, left=False)
    columns = columns.masked_fill(determined.unsqueeze(-2), 0)
    triangle = triangle * size
    # theta = R^-1 phi: the penalty theta' diag(r) theta is quadratic in phi.
    eye = torch.eye(columns.shape[-1], dtype=w.dtype, device=w.device).expand_as(triangle)
    inverse = torch.linalg.solve_triangular(triangle, eye, upper=True)
    factors = torch.tensor(ridge, dtype=w.dtype, device=w.device)
    return _Problem(columns, sign, w, inverse.mT @ (factors.unsqueeze(-1) * inverse)), triangle


def _evaluate(p: _Problem, phi: Tensor) -> _Value:
    """Compute the mean NLL and its derivatives, a few samples at a time."""
    n_columns = phi.shape[-1]
    nll, gradient = torch.zeros_like(phi[..., 0]), torch.zeros_like(phi)
    hessian = phi.new_zeros((*phi.shape, n_columns)).flatten(-2)
    rows = max(1, PIECE // max(1, p.w.shape[0] * p.w.shape[1]))
    for x, sign, w in zip(*(torch.split(t, rows, 1) for t in (p.x, p.sign)), torch.split(p.w, rows, 2), strict=True):
        # Margin: the log-odds of the label. The probability of the other label is sigmoid(-margin).
        margin = sign * torch.einsum("rsk,snk->rsn", phi, x)
        wrong = (-margin).sigmoid()
        nll = nll - (w * logsigmoid(margin)).sum(-1)
        weighted = w * wrong
        gradient = gradient - torch.einsum("rsn,snk->rsk", weighted * sign, x)
        products = (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
        hessian = hessian + torch.einsum("rsn,snk->rsk", weighted * (1 - wrong), products)
    penalty_gradient = 2 * (p.ridge @ phi.unsqueeze(-1)).squeeze(-1)
    return _Value(
        nll,
        nll + (penalty_gradient * phi).sum(-1) / 2,
        gradient + penalty_gradient,
        hessian.view(*phi.shape, n_columns) + 2 * p.ridge,
    )


def _damped(p: _Problem, phi: Tensor, fixed: Tensor) -> tuple[Tensor, _Value, Tensor]:
    """Minimise the objective by damped Newton steps, and return phi, its value and the outcome `(R, S)`.

    A step is accepted if it meets the Armijo condition (Nocedal, Wright: Numerical optimization, 2006, algorithm 3.2).
    Otherwise a quarter of the step is tried.
    """
    eps = torch.finfo(phi.dtype).eps
    smallest_weight = torch.where(p.w > 0, p.w, torch.inf).amin(-1)
    value, fraction = _evaluate(p, phi), torch.ones_like(phi[..., 0])
    for _ in range(ROUNDS):
        step = newton_direction(value.hessian, value.gradient)
        slope, norm = (step * value.gradient).sum(-1), value.gradient.square().sum(-1).sqrt()
        done = (norm <= GRADIENT) & (slope >= -DECREMENT)
        # Below this NLL every label has probability > 1/2. Another label would add at least its weight times log 2.
        is_separated = value.objective < smallest_weight * math.log(2)
        is_finished = done | fixed | is_separated | value.objective.isnan() | (fraction < 1e-6)
        if all_true(is_finished):
            break
        new = _evaluate(p, moved := phi + fraction.unsqueeze(-1) * step)
        meets_armijo = new.objective <= value.objective + 1e-4 * fraction * slope + 4 * eps * (1 + value.objective)
        # Near the minimum the objective is constant up to rounding. There accept a step that halves the gradient.
        is_level = new.objective <= value.objective + NLL_ROUNDING * (1 + value.objective)
        halves = is_level & (new.gradient.square().sum(-1).sqrt() <= norm / 2)
        better = ~is_finished & (meets_armijo | halves)
        phi = torch.where(better[..., None], moved, phi)
        value = _Value(
            torch.where(better, new.nll, value.nll),
            torch.where(better, new.objective, value.objective),
            torch.where(better[..., None], new.gradient, value.gradient),
            torch.where(better[..., None, None], new.hessian, value.hessian),
        )
        fraction = torch.where(better, 1, fraction / 4).where(~is_finished, fraction)
    done = done | is_within_rounding(norm, slope)
    # For data that are separable with ties, the gradient vanishes, but the Newton steps remain long.
    is_separated = is_separated | (done & _is_separation(p, step))
    return phi, value, torch.where(done, CONVERGED, STOPPED).masked_fill(is_separated & ~fixed, SEPARABLE)


def _is_separation(p: _Problem, step: Tensor) -> Tensor:
    """Return whether the log-odds of every label grow along a long `step`, or stay the same, bool `(R, S)`.

    Then the likelihood rises without bound along it (Albert, Anderson: On the existence of maximum likelihood estimates
    in logistic regression models, 1984).
    """
    growth = p.sign * torch.einsum("rsk,snk->rsn", step, p.x)
    unused = p.w == 0
    worst, best = growth.masked_fill(unused, torch.inf).amin(-1), growth.masked_fill(unused, -torch.inf).amax(-1)
    return (best > 0.01) & (worst >= -1e-6 * best)
