"""Leave-one-out attention: for every row, the softmax-weighted mean of the values of the other rows.

The N x N matrix of scores is computed one tile at a time and never stored. The backward pass recomputes the tiles.

Source:
    Rabe, Staats: Self-attention does not need O(n^2) memory (2021);
    Dao et al.: FlashAttention (NeurIPS 2022), Algorithm 1 (forward) and appendix B.2 (backward).
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.operation import operation

_TILE = 2**18  # number of scores in a tile, over all batch elements: 2 MB of float64
_LOWEST = -1e30  # replaces -inf in queries, because -inf times a key of 0 is NaN


class LeaveOneOut(NamedTuple):
    """Leave-one-out statistics of every row i, from the scores s_ij and values_j of `leave_one_out_mean`.

    The number of copies of row j is n_ij, not counting row i itself.
    """

    mean: Tensor  # sum_j n_ij exp(s_ij) values_j / sum_j n_ij exp(s_ij), `(..., N, D)`; NaN if all n_ij are 0
    log_total: Tensor  # log sum_j n_ij exp(s_ij), `(..., N)`; not differentiable


def leave_one_out_mean(
    queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor, copies: Tensor, chunk: int | None = None
) -> LeaveOneOut:
    """Return the softmax-weighted mean of the values of the other rows, for every row.

    The score of row j for row i is s_ij = queries_i . keys_j + bias_j. `queries` and non-negative `keys` are
    `(..., N, C)`. `values` are `(..., N, D)`, and are not differentiable. The other copies of a row, `copies`
    `(..., N)` in number, count as other rows. Queries of -inf are replaced by -1e30, so that their product with a key
    of 0 is 0. Tiles have `chunk` rows and columns, by default about 2 MB.

    Gradient: first-order, in `queries`, `keys` and `bias`, in reverse mode. A query of -inf adds no gradient to keys.
    """
    side = chunk or max(16, math.isqrt(_TILE // max(1, math.prod(queries.shape[:-2]))))
    return LeaveOneOut(*_leave_one_out.direct(queries, keys, bias, values, copies, side))


def _slices(n: int, side: int) -> Iterator[slice]:
    return (slice(start, min(start + side, n)) for start in range(0, n, side))


def _scores(queries: Tensor, keys: Tensor, bias: Tensor, copies: Tensor, a: slice, b: slice) -> Tensor:
    """Return s_ij + log n_ij for the rows i in `a` and columns j in `b`, `(..., a, b)`; see `LeaveOneOut`."""
    scores = queries[..., a, :].clamp(min=_LOWEST) @ keys[..., b, :].mT + (bias + copies.log())[..., None, b]
    if a == b:  # diagonal tile: exclude one copy of row i from its own mean
        diagonal = scores.diagonal(dim1=-2, dim2=-1)
        diagonal += (copies - 1).clamp(min=0).log()[..., a] - copies.clamp(min=1).log()[..., a]
    return scores


@operation(
    "leave_one_out_mean(Tensor queries, Tensor keys, Tensor bias, Tensor values, Tensor copies, int side)"
    " -> (Tensor, Tensor)",
    fake=lambda queries, keys, bias, values, *_: (torch.empty_like(values), torch.empty_like(bias)),  # noqa: ARG005
)
def _leave_one_out(
    queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor, copies: Tensor, side: int
) -> tuple[Tensor, Tensor]:
    """Compute `leave_one_out_mean` (FlashAttention, Algorithm 1)."""
    mean, log_total = torch.empty(values.shape, dtype=values.dtype, device=values.device), torch.empty_like(bias)
    lowest = torch.finfo(bias.dtype).min
    for a in _slices(keys.shape[-2], side):
        # A block of rows i. In the notation of the paper, `top` is m_i, the running maximum of the scores, and `total`
        # is l_i. All sums are scaled by exp(-m_i), so that they cannot overflow.
        top = torch.full_like(bias[..., a], lowest)
        total, weighted_values = torch.zeros_like(top), torch.zeros_like(values[..., a, :])
        for b in _slices(keys.shape[-2], side):
            # A block of columns j: S_ij (line 9), its row maxima and P_ij = exp(S_ij - m_i) (line 10).
            scores = _scores(queries, keys, bias, copies, a, b)
            new_top = torch.maximum(top, scores.amax(-1))
            weights = scores.sub_(new_top.unsqueeze(-1)).exp_()
            rescale = (top - new_top).exp()  # factor to the new maximum (Algorithm 1, lines 11-12)
            total = total * rescale + weights.sum(-1)
            weighted_values = weighted_values * rescale.unsqueeze(-1) + weights @ values[..., b, :]
            top = new_top
        # Normalise once at the end (line 12 normalises in each step). log L_i = m_i + log l_i is kept for the gradient.
        mean[..., a, :] = weighted_values / total.unsqueeze(-1)
        log_total[..., a] = top + total.log()
    return mean, log_total


@operation(
    "others_mean_backward(Tensor queries, Tensor keys, Tensor bias, Tensor values, Tensor copies, Tensor mean,"
    " Tensor log_total, Tensor grads, int side) -> (Tensor, Tensor, Tensor)",
    fake=lambda queries, keys, bias, *_: (torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(bias)),
)
def _leave_one_out_backward(
    queries: Tensor,
    keys: Tensor,
    bias: Tensor,
    values: Tensor,
    copies: Tensor,
    mean: Tensor,
    log_total: Tensor,
    grads: Tensor,
    side: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in `queries`, `keys` and `bias` for gradient `grads` in the means (appendix B.2)."""
    grad_queries, grad_keys, grad_bias = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(bias)
    finite = queries.masked_fill(queries == -torch.inf, 0)
    grads_dot_mean = (grads * mean).sum(-1, keepdim=True)
    for a in _slices(keys.shape[-2], side):
        for b in _slices(keys.shape[-2], side):
            # P_ij = exp(S_ij - log L_i): the tile is computed again, instead of N^2 stored weights.
            weights = (_scores(queries, keys, bias, copies, a, b) - log_total[..., a].unsqueeze(-1)).exp_()
            # dS_ij = P_ij (dO_i . V_j - dO_i . O_i), with softmax weights P, values V and means O.
            grad_scores = weights * (grads[..., a, :] @ values[..., b, :].mT - grads_dot_mean[..., a, :])
            grad_queries[..., a, :] += grad_scores @ keys[..., b, :]
            grad_keys[..., b, :] += grad_scores.mT @ finite[..., a, :]
            grad_bias[..., b] += grad_scores.sum(-2)
    return grad_queries, grad_keys, grad_bias


_leave_one_out.differentiate(_leave_one_out_backward, with_results=True)
