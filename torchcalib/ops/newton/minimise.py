"""Damped Newton method for a batch of smooth convex functions.

Source: Nocedal, Wright: Numerical Optimization (2006), algorithms 3.1 (backtracking) and 3.2 (modified Newton).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_NOISE = 1e-13  # rounding error of a value, relative to 1 + value
_SHORTEST = 1e-6  # part of a Newton step below which rounding prevents any progress


class Value(NamedTuple):
    """Value `(...)`, gradient `(..., P)` and Hessian `(..., P, P)` of functions of P unknowns."""

    value: Tensor
    gradient: Tensor
    hessian: Tensor


class Minimum(NamedTuple):
    """A point of the search; the last one is the result.

    Attributes:
        at: unknowns `(..., P)`.
        function: the function there.
        norm: of its gradient `(...)`.
        step: the next step `(..., P)`.
        slope: along this step `(...)`: minus twice the expected gain.
        converged: whether the criterion is met `(...)`.
    """

    at: Tensor
    function: Value
    norm: Tensor
    step: Tensor
    slope: Tensor
    converged: Tensor


def minimise(
    evaluate: Callable[[Tensor, Tensor | None], Value],
    start: Tensor,
    limited: Callable[[Tensor, Value, Tensor], Tensor],
    criterion: Callable[[Minimum], Tensor],
    *,
    fixed: Tensor,
    units: Tensor | float = 1.0,
    lowest: Tensor | float = -torch.inf,
    rounds: int = 200,
) -> Minimum:
    """Minimise convex functions, all in one batch.

    Args:
        evaluate: returns the functions at given unknowns. With a Hessian it may return that one.
        start: unknowns `(..., P)`.
        limited: returns an admissible step from the unknowns, the functions there and the Newton step.
        criterion: returns where the search may end.
        fixed: functions that need no search `(...)`.
        units: factors of the gradient `(..., P)`, for its norm.
        lowest: the search ends below this value.
        rounds: largest number of steps.
    """
    eps = torch.finfo(start.dtype).eps
    theta, value, norm = start, evaluate(start, None), None
    part, kept = torch.ones_like(value.value), False
    for turn in range(rounds + 1):
        norm = torch.linalg.vector_norm(value.gradient * units, dim=-1) if norm is None else norm
        newton = newton_step(value)
        step = limited(theta, value, newton)
        here = Minimum(theta, value, norm, step, (step * value.gradient).sum(-1), fixed)
        here = here._replace(converged=criterion(here))
        stays = here.converged | fixed | (value.value < lowest) | value.value.isnan() | (part < _SHORTEST)
        if turn == rounds or bool(stays.all()):
            break
        moved = theta + part.unsqueeze(-1) * step
        # A short step hardly changes the Hessian, and mostly no further step follows: use it once more.
        kept = not kept and bool((stays | (part * newton.abs().amax(-1) <= 1e-5)).all())
        new = evaluate(moved, value.hessian if kept else None)
        # Armijo condition: the decrease is a share of what the slope predicts. Near the minimum the decrease is below
        # the rounding error of the value, but the gradient still gets smaller.
        noise = 1 + value.value
        falls = new.value <= value.value + 1e-4 * part * here.slope + 4 * eps * noise
        new_norm = torch.linalg.vector_norm(new.gradient * units, dim=-1)
        better = ~stays & (falls | ((new.value <= value.value + _NOISE * noise) & (new_norm <= norm / 2)))
        if bool(better.all()):
            theta, value, norm, part = moved, new, new_norm, torch.ones_like(part)
            continue
        theta = torch.where(better[..., None], moved, theta)
        value = Value(
            torch.where(better, new.value, value.value),
            torch.where(better[..., None], new.gradient, value.gradient),
            torch.where(better[..., None, None], new.hessian, value.hessian),
        )
        norm, part = torch.where(better, new_norm, norm), torch.where(better, 1, part / 4)
    return here


def newton_step(value: Value) -> Tensor:
    """Return the Newton step `(..., P)`.

    The diagonal is scaled to 1, since the unknowns may differ in scale by any factor. A ridge of the size of rounding
    errors, increased where the Cholesky factor fails, covers a null space.
    """
    diagonal = value.hessian.diagonal(dim1=-2, dim2=-1)
    unit = torch.where(diagonal > 0, diagonal, 1).rsqrt()
    scaled = value.gradient * unit
    if unit.shape[-1] == 1:
        return -scaled * unit
    matrix = value.hessian * unit.unsqueeze(-1) * unit.unsqueeze(-2)
    eps = torch.finfo(unit.dtype).eps
    factor, failed = matrix, torch.ones_like(unit[..., 0], dtype=torch.bool)
    for ridge in (50 * eps, 1e5 * eps, 1e-4, 1e-1):
        matrix.diagonal(dim1=-2, dim2=-1).fill_(1 + ridge)
        found, info = torch.linalg.cholesky_ex(matrix)
        factor, failed = torch.where(failed[..., None, None], found, factor), failed & (info > 0)
        if not failed.any():
            break
    return -torch.cholesky_solve(scaled.unsqueeze(-1), factor).squeeze(-1) * unit
