"""Damped Newton steps for logistic regression in plain torch.

A step is accepted if it meets the Armijo condition (Nocedal, Wright: Numerical optimization, 2006, algorithm 3.2).
Otherwise a quarter of the step is tried.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.ops.newton.problem import (
    CONVERGED,
    DECREMENT,
    GRADIENT,
    NLL_ROUNDING,
    PIECE,
    ROUNDS,
    SEPARABLE,
    STOPPED,
    all_true,
    is_within_rounding,
    newton_direction,
)

SMALLEST_FRACTION = 1e-6  # of a Newton step; if no longer step decreases the objective, the fit stops
GROWTH = 0.01, -1e-6  # largest growth of a margin along a separating step, at least; and smallest, relative to it


class Problem(NamedTuple):
    """Fits of the parameters phi in P(label of row n) = sigmoid(phi * x_n).

    Attributes:
        x: columns, multiplied by 1 for label 1 and by -1 for label 0, `(S, K, N)`.
        w: weights with sum 1, `(S, R, N)`.
        ridge: matrix A of the penalty phi' A phi, `(S, K, K)`.
    """

    x: Tensor
    w: Tensor
    ridge: Tensor


class Minimum(NamedTuple):
    """Parameters `(S, R, K)`; mean NLL without penalty, norm of the gradient and outcome, `(S, R)` each."""

    phi: Tensor
    nll: Tensor
    grad_norm: Tensor
    outcome: Tensor


class _Value(NamedTuple):
    """Mean NLL `(S, R)`, and with the penalty: objective `(S, R)`, gradient `(S, R, K)`, Hessian `(S, R, K, K)`."""

    nll: Tensor
    objective: Tensor
    gradient: Tensor
    hessian: Tensor

    @property
    def norm(self) -> Tensor:
        return self.gradient.square().sum(-1).sqrt()


def minimise(p: Problem, phi: Tensor, fixed: Tensor) -> Minimum:
    """Minimise the mean NLL plus penalty from `phi` `(S, R, K)`, which is the result where `fixed` `(S, R)` is True."""
    eps = torch.finfo(phi.dtype).eps
    smallest_weight = torch.where(p.w > 0, p.w, torch.inf).amin(-1)
    value, fraction = _evaluate(p, phi), torch.ones_like(phi[..., 0])
    for _ in range(ROUNDS):
        step = newton_direction(value.hessian, value.gradient)
        slope, norm = (step * value.gradient).sum(-1), value.norm
        done = (norm <= GRADIENT) & (slope >= -DECREMENT)
        # Below this NLL every label has probability > 1/2. Another label would add at least its weight times log 2.
        is_separated = value.objective < smallest_weight * math.log(2)
        is_finished = done | fixed | is_separated | value.objective.isnan() | (fraction < SMALLEST_FRACTION)
        if all_true(is_finished):
            break
        moved = phi + fraction.unsqueeze(-1) * step
        new = _evaluate(p, moved)
        meets_armijo = new.objective <= value.objective + 1e-4 * fraction * slope + 4 * eps * (1 + value.objective)
        # Near the minimum the objective is constant up to rounding. There accept a step that halves the gradient.
        is_level = new.objective <= value.objective + NLL_ROUNDING * (1 + value.objective)
        better = ~is_finished & (meets_armijo | (is_level & (new.norm <= norm / 2)))
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
    is_separated = (is_separated | (done & _is_separation(p, step))) & ~fixed
    return Minimum(phi, value.nll, norm, torch.where(done, CONVERGED, STOPPED).masked_fill(is_separated, SEPARABLE))


def _evaluate(p: Problem, phi: Tensor) -> _Value:
    """Compute the mean NLL and its derivatives, a few rows at a time."""
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
    penalty_gradient = 2 * phi @ p.ridge
    return _Value(
        nll,
        nll + (penalty_gradient * phi).sum(-1) / 2,
        gradient + penalty_gradient,
        hessian.view(*phi.shape, n_columns) + 2 * p.ridge.unsqueeze(1),
    )


def _is_separation(p: Problem, step: Tensor) -> Tensor:
    """Return whether the log-odds of every label grow along a long `step`, or stay the same, bool `(S, R)`.

    Then the likelihood rises without bound along it (Albert, Anderson: On the existence of maximum likelihood estimates
    in logistic regression models, 1984).
    """
    growth, unused = step @ p.x, p.w == 0
    worst, best = growth.masked_fill(unused, torch.inf).amin(-1), growth.masked_fill(unused, -torch.inf).amax(-1)
    return (best > GROWTH[0]) & (worst >= GROWTH[1] * best)
