"""Damped Newton steps for logistic regression in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.ops.newton import CONVERGED, SEPARABLE, STOPPED
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
from torchcalib.ops.newton.scores import PIECE

GROWTH = 0.01, -1e-6  # largest growth of a margin along a separating step, at least; and smallest, relative to it


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


def minimise(p: LogisticRegression, phi: Tensor, fixed: Tensor) -> RegressionMinimum:
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
    """Return whether the log-odds of every label grow along a long `step`, or stay the same, bool `(S, R)`.

    Then the likelihood rises without bound along it (Albert, Anderson: On the existence of maximum likelihood estimates
    in logistic regression models, 1984).
    """
    growth, unused = step @ p.x, p.w == 0
    worst, best = growth.masked_fill(unused, torch.inf).amin(-1), growth.masked_fill(unused, -torch.inf).amax(-1)
    return (best > GROWTH[0]) & (worst >= GROWTH[1] * best)
