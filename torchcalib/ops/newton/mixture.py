"""Maximum likelihood weights of a mixture of given distributions: sequential quadratic programming in float64.

The mean negative log-likelihood (NLL) of weights pi, -sum_i w_i log(sum_k pi_k p_ik), is convex in pi. Each step
minimises its quadratic approximation over the simplex exactly, by trying every subset of the components.

Source: Kim, Carbonetto, Stephens, Anitescu: A fast algorithm for maximum likelihood estimation of mixture proportions
using sequential quadratic programming (2020), sec. 3, here with few components and many samples.
"""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.newton.descent import GRADIENT, ROUNDING_LIMITS, Iterate, Step, Value, all_true, damped_newton

_FEW = 1e-14  # penalty per component, relative to the NLL: of equal components, only the first one gets weight


class MixtureFit(NamedTuple):
    """Weights of K components on the simplex."""

    weights: Tensor  # `(..., K)`, at least 0 with sum 1; NaN without samples
    grad_norm: Tensor  # norm of the violation of the optimality conditions `(...)`; see `_violation`
    converged: Tensor  # whether `grad_norm` is small, `(...)`


def fit_mixture(p: Tensor, w: Tensor) -> MixtureFit:
    """Fit the weights of a mixture by maximum likelihood.

    `p` `(..., N, K)` is the probability of the label of each sample under each component. It must be positive for the
    last component. The sample weights `w` `(..., N)` have sum 1.
    """
    subsets = torch.tensor(sorted(product((True, False), repeat=p.shape[-1]), key=sum)[1:], device=p.device)
    start = torch.full((*w.shape[:-1], p.shape[-1]), 1 / p.shape[-1], dtype=p.dtype, device=p.device)

    def evaluate(pi: Tensor) -> Value:
        likelihood = (p @ pi.unsqueeze(-1)).squeeze(-1)
        ratio = p / likelihood.unsqueeze(-1)
        weighted = ratio * w.unsqueeze(-1)
        gradient = -weighted.sum(-2)
        # Hessian: sum_i w_i p_ij p_ik / (sum_l pi_l p_il)^2.
        return Value(-(w * likelihood.log()).sum(-1), gradient, _violation(pi, gradient), (weighted.mT @ ratio,))

    def step(at: Iterate) -> Step:
        (hessian,) = at.value.parts
        is_done = at.value.norm <= GRADIENT
        if all_true(is_done | at.is_stopped):  # the step is not needed
            return Step(at.theta, at.value.f, is_done)
        to_best = _best_on_simplex(at.value.gradient, hessian, subsets) - at.theta
        return Step(to_best, (to_best * at.value.gradient).sum(-1), is_done)

    # A full step may give weight 0 to a component without which a label is impossible. Then keep a tenth of it.
    pi, value, _ = damped_newton(start, evaluate, step, second_fraction=0.9)
    return MixtureFit(
        pi.masked_fill(value.f.isnan().unsqueeze(-1), torch.nan), value.norm, value.norm <= ROUNDING_LIMITS[0]
    )


def _violation(pi: Tensor, gradient: Tensor) -> Tensor:
    """Return the norm of the violation of the optimality conditions, `(...)`."""
    excess = gradient + 1  # at the optimum 0 for components with weight, and not negative for others
    return torch.where(pi > 0, excess, excess.clamp(max=0)).square().sum(-1).sqrt()


def _best_on_simplex(gradient: Tensor, hessian: Tensor, subsets: Tensor) -> Tensor:
    """Minimise the quadratic approximation of the NLL over the simplex, `(..., K)`.

    At pi, H pi = -g. The approximation is therefore x' H x / 2 + 2 g' x up to a constant. For each subset of the
    components, the linear system with the multiplier of sum x = 1 gives the minimum without inequalities.
    """
    n = gradient.shape[-1]
    inside = subsets.to(gradient.dtype)
    eye = torch.eye(n, dtype=gradient.dtype, device=gradient.device)
    # A small ridge relative to the largest curvature, because components may be equal.
    ridged = hessian + 1e-14 * hessian.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None] * eye
    block = ridged.unsqueeze(-3) * inside.unsqueeze(-1) * inside.unsqueeze(-2) + torch.diag_embed(1 - inside)
    border = inside.expand(*block.shape[:-1])
    # Bordered system [[H, 1], [1', 0]] [x, multiplier] = [-2 g, 1], restricted to each subset.
    system = torch.cat(
        (
            torch.cat((block, border.unsqueeze(-1)), -1),
            torch.zeros_like(block[..., :1, :1]).expand(*block.shape[:-2], 1, n + 1),
        ),
        -2,
    )
    system[..., n, :n] = border
    right = torch.cat((-2 * gradient.unsqueeze(-2) * inside, torch.ones_like(border[..., :1])), -1)
    x: Tensor = torch.linalg.solve_ex(system, right)[0][..., :n]
    value = (x * ((hessian.unsqueeze(-3) @ x.unsqueeze(-1)).squeeze(-1) / 2 + 2 * gradient.unsqueeze(-2))).sum(-1)
    value = value + _FEW * value.abs() * inside.sum(-1)
    # The best subset with weights of at least 0 contains the constrained minimum.
    is_feasible = (x >= -1e-12).all(-1) & value.isfinite()
    best = value.masked_fill(~is_feasible, torch.inf).argmin(-1)
    x = x.gather(-2, best[..., None, None].expand(*best.shape, 1, n)).squeeze(-2).clamp(min=0)
    return x / x.sum(-1, keepdim=True)
