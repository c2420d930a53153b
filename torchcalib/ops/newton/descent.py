"""Damped Newton steps: the one iteration of all fits in this package.

A batch of convex problems is solved together. Each has an objective f, and parameters on the last axes of theta. All of
them are evaluated until the last one has finished.

Source: Nocedal, Wright: Numerical optimization (2nd ed., 2006), algorithm 3.2 (line search Newton) with backtracking,
algorithm 3.1. Steps are accepted by the condition of sufficient decrease (Armijo), eq. 3.4.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available

GRADIENT = 1e-10  # largest gradient norm at convergence, in the units of the problem
DECREMENT = 1e-15  # largest Newton decrement at convergence: twice the expected decrease of f in the next step
ROUNDING_LIMITS = 1e-9, 1e-12  # gradient norm and Newton decrement accepted where rounding errors prevent convergence
OBJECTIVE_ROUNDING = 1e-13  # rounding error of f in float64, relative to 1 + |f|
ROUNDS = 200  # largest number of iterations
SUFFICIENT = 1e-4  # c1 in eq. 3.4: part of the decrease predicted by the slope that a step must reach
SMALLEST_FRACTION = 1e-6  # of a step; if no longer one decreases f, the fit stops


class Value(NamedTuple):
    """Objective and its derivatives, for a batch of problems `(...)`."""

    f: Tensor  # objective `(...)`
    gradient: Tensor  # `(..., *)`, with the axes of the parameters
    norm: Tensor  # norm of the gradient in the units of the stopping rule, `(...)`
    parts: tuple[Tensor, ...] = ()  # what else the problem computes at theta, such as the Hessian, `(..., *)` each


class Iterate(NamedTuple):
    """Parameters and their value, from which the next step starts."""

    theta: Tensor  # `(..., *)`
    value: Value
    fraction: Tensor  # of the step, to be tried next `(...)`
    is_stopped: Tensor  # problems that are not iterated, or whose f does not decrease, `(...)`


class Step(NamedTuple):
    """Direction of the search, and whether it is needed."""

    p: Tensor  # `(..., *)`
    slope: Tensor  # g'p, the derivative of f along p `(...)`; minus the Newton decrement for a Newton step
    is_done: Tensor  # problems for which theta is the result `(...)`
    # whether the Hessian is that at theta; if not, a step that fails has another direction next
    is_current: bool = True


class Minimum(NamedTuple):
    """Last iterate, and the step from it that was not needed."""

    theta: Tensor
    value: Value
    step: Step


def damped_newton(
    theta: Tensor,
    evaluate: Callable[[Tensor], Value],
    newton_step: Callable[[Iterate], Step],
    fixed: Tensor | None = None,
    *,
    value: Value | None = None,
    rounds: int = ROUNDS,
    noise: float = 0.0,
    second_fraction: float = 0.25,
) -> Minimum:
    """Minimise convex objectives from `theta` `(..., *)`, in at most `rounds` iterations.

    Problems with `fixed` `(...)` return the initial theta, whose value can be passed as `value`. Below the relative
    predicted decrease `noise` of f, steps are judged by the gradient alone. After a full step, `second_fraction` of it
    is tried, and then quarters of the previous step.
    """
    eps = torch.finfo(theta.dtype).eps
    value = evaluate(theta) if value is None else value
    fraction = full = torch.ones_like(value.f)
    for _ in range(rounds):
        is_stopped = value.f.isnan() | (fraction < SMALLEST_FRACTION)
        is_stopped = is_stopped if fixed is None else is_stopped | fixed
        # Algorithm 3.2: solve H p = -g.
        step = newton_step(Iterate(theta, value, fraction, is_stopped))
        is_finished = step.is_done | is_stopped
        if all_true(is_finished):
            break
        # Algorithm 3.1: try the step length `fraction`, first 1.
        moved = theta + over_axes(fraction, theta) * step.p
        new = evaluate(moved)
        level = 1 + value.f.abs()
        # Eq. 3.4: f(x + a p) <= f(x) + c1 a g'p, up to a few roundings of f.
        has_decreased = new.f <= value.f + SUFFICIENT * fraction * step.slope + 4 * eps * level
        if noise:
            has_decreased = has_decreased & (step.slope.abs() > noise * level)
        # The usual case, without copies. Elsewhere, copies are cheaper than another synchronisation.
        if theta.device.type == "cpu" and all_true(has_decreased & ~is_finished):
            theta, value, fraction = moved, new, full
            continue
        # Near the minimum, f is constant up to rounding errors. There accept a step that halves the gradient.
        is_level = new.f <= value.f + max(noise, OBJECTIVE_ROUNDING) * level
        better = ~is_finished & (has_decreased | (is_level & (new.norm <= value.norm / 2)))
        theta = torch.where(over_axes(better, theta), moved, theta)
        value = chosen(better, new, value)
        # Algorithm 3.1: contract the step length. A step from an old Hessian is replaced instead.
        shorter = torch.where(fraction == 1, second_fraction * full, fraction / 4) if step.is_current else fraction
        fraction = torch.where(better, full, shorter).where(~is_finished, fraction)
    return Minimum(theta, value, step)


def over_axes(x: Tensor, like: Tensor) -> Tensor:
    """Return x `(...)` with axes of size 1 for the parameters of `like`, `(..., *)`."""
    return x[(..., *[None] * (like.dim() - x.dim()))]


def chosen(mask: Tensor, value: Value, other: Value) -> Value:
    """Return `value` where the mask is True, and `other` elsewhere."""
    pairs = zip((*value[:3], *value.parts), (*other[:3], *other.parts), strict=True)
    f, gradient, norm, *parts = [torch.where(over_axes(mask, x), x, y) for x, y in pairs]
    return Value(f, gradient, norm, tuple(parts))


def all_true(flag: Tensor) -> bool:
    """Return whether all elements are True; False under `vmap` and `torch.compile`, where values cannot be read."""
    return value_if_available(flag.all()) is True


def is_within_rounding(norm: Tensor, slope: Tensor) -> Tensor:
    """Return True where the gradient norm and the Newton decrement, -slope, are within `ROUNDING_LIMITS`."""
    gradient, decrement = ROUNDING_LIMITS
    return (norm < gradient) & (slope >= -decrement)


def separation_bound(w: Tensor) -> Tensor:
    """Return the mean negative log-likelihood below which every label has a probability above 1/2, `(...)`.

    One label with a lower probability would add at least its weight times log 2; the weights `(..., N)` have sum 1. The
    data are then separable, and the objective without penalty has no minimum.
    """
    return torch.where(w > 0, w, torch.inf).amin(-1) * math.log(2)


def newton_direction(hessian: Tensor, gradient: Tensor) -> Tensor:
    """Return -H^-1 g `(..., K)` for positive semidefinite Hessians H `(..., K, K)` and gradients g `(..., K)`.

    The diagonal is scaled to 1, because class frequencies and units can differ by orders of magnitude. A small ridge is
    added, and increased where the Cholesky decomposition fails (Nocedal, Wright, algorithm 3.3). Parameters with a
    diagonal of 0 do not move.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    nonzero = diagonal > 0
    # With D = diag(H): H^-1 = D^-1/2 (D^-1/2 H D^-1/2)^-1 D^-1/2.
    unit = torch.where(nonzero, diagonal, 1).rsqrt()
    matrix = hessian * unit.unsqueeze(-1) * unit.unsqueeze(-2) + torch.diag_embed((~nonzero).to(unit.dtype))
    eye = torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)
    eps = torch.finfo(unit.dtype).eps
    factor, failed = torch.linalg.cholesky_ex(matrix + 50 * eps * eye)
    # Algorithm 3.3: increase the multiple of the identity until the factorisation succeeds.
    for ridge in (1e5 * eps, 1e-4, 1e-1):
        if all_true(failed == 0):
            break
        new_factor, new_failed = torch.linalg.cholesky_ex(matrix + max(ridge, 1e2 * eps) * eye)
        factor = torch.where((failed > 0)[..., None, None], new_factor, factor)
        failed = torch.where(failed > 0, new_failed, failed)
    return -torch.cholesky_solve((gradient * unit).unsqueeze(-1), factor).squeeze(-1) * unit


def without_constant(hessian: Tensor, ones: Tensor, trace: Tensor) -> Tensor:
    """Return H + c e e' for Hessians H `(..., K, K)` that are singular in the direction e, `ones` `(..., K)`.

    Adding a constant to all biases changes no probability. So H e = 0, where e is 1 for the biases and 0 for scales.
    The Newton step for H + c e e' is the same, and does not change the sum of the biases: the gradient is orthogonal to
    e. The weight c is the mean diagonal element of the biases, divided by their number. `trace` is the sum of these
    elements.
    """
    weight = trace / ones.sum(-1).clamp(min=1).square()
    return hessian + weight[..., None, None] * ones.unsqueeze(-1) * ones.unsqueeze(-2)
