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

from torchcalib.ops.newton.problem import GRADIENT, NLL_ROUNDING, ROUNDING_LIMITS, ROUNDS, all_true

_FEW = 1e-14  # penalty per component, relative to the NLL: of equal components, only the first one gets weight


class MixtureFit(NamedTuple):
    """Weights of K components on the simplex.

    Attributes:
        weights: `(..., K)`, at least 0 with sum 1; NaN without samples.
        grad_norm: norm of the violation of the optimality conditions `(...)`: with the gradient g of the mean NLL,
            g_k + 1 is 0 for components with weight, and not negative for other components.
        converged: whether `grad_norm` is small, `(...)`.
    """

    weights: Tensor
    grad_norm: Tensor
    converged: Tensor


def fit_mixture(p: Tensor, w: Tensor) -> MixtureFit:
    """Fit the weights of a mixture by maximum likelihood.

    Args:
        p: probability of the label of each sample under each component, float64 `(..., N, K)`, positive for at least
            one component. The last component must be positive for all samples.
        w: weights of the samples `(..., N)`, with sum 1.
    """
    subsets = torch.tensor(sorted(product((True, False), repeat=p.shape[-1]), key=sum)[1:], device=p.device)
    pi = torch.full((*w.shape[:-1], p.shape[-1]), 1 / p.shape[-1], dtype=p.dtype, device=p.device)
    nll, gradient, hessian = _derivatives(p, w, pi)
    fraction = torch.ones_like(nll)
    for _ in range(ROUNDS):
        norm = _violation(pi, gradient)
        is_finished = (norm <= GRADIENT) | nll.isnan() | (fraction < 1e-6)
        if all_true(is_finished):
            break
        step = _best_on_simplex(gradient, hessian, subsets) - pi
        moved = pi + fraction.unsqueeze(-1) * step
        new = _derivatives(p, w, moved)
        slope = (step * gradient).sum(-1)
        meets_armijo = new[0] <= nll + 1e-4 * fraction * slope + 1e-15 * (1 + nll.abs())
        # Near the minimum the NLL is constant up to rounding. There accept a step that halves the violation.
        is_level = new[0] <= nll + NLL_ROUNDING * (1 + nll.abs())
        better = ~is_finished & (meets_armijo | (is_level & (_violation(moved, new[1]) <= norm / 2)))
        pi = torch.where(better[..., None], moved, pi)
        nll = torch.where(better, new[0], nll)
        gradient = torch.where(better[..., None], new[1], gradient)
        hessian = torch.where(better[..., None, None], new[2], hessian)
        # A full step may give weight 0 to a component without which a label is impossible. Then keep a tenth of it.
        shorter = torch.where(fraction == 1, 0.9, fraction / 4)
        fraction = torch.where(better, 1, shorter).where(~is_finished, fraction)
    return MixtureFit(pi.masked_fill(nll.isnan().unsqueeze(-1), torch.nan), norm, norm <= ROUNDING_LIMITS[0])


def _derivatives(p: Tensor, w: Tensor, pi: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean NLL `(...)`, its gradient `(..., K)` and its Hessian `(..., K, K)`."""
    likelihood = (p @ pi.unsqueeze(-1)).squeeze(-1)
    ratio = p / likelihood.unsqueeze(-1)
    weighted = ratio * w.unsqueeze(-1)
    return -(w * likelihood.log()).sum(-1), -weighted.sum(-2), weighted.mT @ ratio


def _violation(pi: Tensor, gradient: Tensor) -> Tensor:
    """Return the norm of the violation of the optimality conditions, `(...)`."""
    excess = gradient + 1
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
    is_feasible = (x >= -1e-12).all(-1) & value.isfinite()
    best = value.masked_fill(~is_feasible, torch.inf).argmin(-1)
    x = x.gather(-2, best[..., None, None].expand(*best.shape, 1, n)).squeeze(-2).clamp(min=0)
    return x / x.sum(-1, keepdim=True)
