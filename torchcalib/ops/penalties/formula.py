"""Definition of the training penalties of events, in differentiable torch operations.

Events have confidences p, outcomes y and weights w, `(..., N)`. Rows with weight 0 have p = 0.5 and y = 0.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.logs import root


class SoftBinning(NamedTuple):
    """Equal-width bins with soft membership softmax_b(-(p - centre_b)^2 / temperature), and the norm of their gaps."""

    n_bins: int
    temperature: float
    norm: Literal["l1", "l2"]


class Laplacian(NamedTuple):
    """Kernel exp(-|p_i - p_j| / bandwidth), and the mean of the residuals; see `losses.mmce`."""

    bandwidth: float
    weighted: bool


def soft_error(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor,
    bins: SoftBinning,
    of_sums: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Return the norm `of_sums` of the sums of w, w p and w y over soft bins, which are `(..., 3, B)`."""
    centers = (torch.arange(bins.n_bins, dtype=confidence.dtype, device=confidence.device) + 0.5) / bins.n_bins
    member = ((confidence.unsqueeze(-1) - centers).square() / -bins.temperature).softmax(-1)
    sums = torch.stack((weights, weights * confidence, weights * outcome), -2) @ member
    return of_sums(sums).to(dtype)


def embedding_error(
    confidence: Tensor, outcome: Tensor, weights: Tensor, kernel: Laplacian, dtype: torch.dtype
) -> Tensor:
    """Return the root of sum_ij d_i d_j exp(-|p_i - p_j| / bandwidth) for residuals d; NaN without weight."""
    if kernel.weighted:
        residual = _terms_of_mean(1 - confidence, weights * outcome)
        residual = residual - _terms_of_mean(confidence, weights * (1 - outcome))
    else:
        residual = _terms_of_mean(outcome - confidence, weights)
    columns = torch.stack((confidence.expand_as(residual), residual))
    # The gradient for equal confidences depends on their order.
    # The mean over both orders gives |a - b| the gradient 0 where a = b.
    of_orders = _laplacian_form(torch.stack((columns, columns.flip(-1)), 1), kernel.bandwidth)
    error = root(of_orders.mean(0).clamp(min=0))
    return torch.where(weights.sum(-1) > 0, error, torch.nan).to(dtype)


def _terms_of_mean(x: Tensor, weights: Tensor) -> Tensor:
    """Return the terms x_i w_i / sum_j w_j of the weighted mean of x, `(..., N)`; 0 if all weights w are 0."""
    total = weights.sum(-1, keepdim=True)
    return x * weights / total.masked_fill(total == 0, 1)


def _laplacian_form(columns: Tensor, bandwidth: float) -> Tensor:
    """Return sum_ij d_i d_j exp(-|x_i - x_j| / bandwidth), `(...)`, for columns x in [0, 1] and d, `(2, ..., N)`.

    For ascending x and i < j, the kernel is exp(x_i / bandwidth) / exp(x_j / bandwidth). So a cumulative sum replaces
    the sum over N^2 pairs. No differences are computed, so there is no cancellation.
    """
    order = columns[0].detach().argsort(dim=-1, stable=True)
    x, d = columns.gather(-1, order.expand_as(columns)).unbind()
    rise = ((x - 0.5) / bandwidth).exp()
    upto = (d * rise).cumsum(-1) / rise  # sum over j <= i of d_j times the kernel
    return (d * (2 * upto - d)).sum(-1)
