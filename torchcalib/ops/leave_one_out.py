"""Leave-one-out means with softmax weights: for every row, a weighted mean of the values of the other rows.

The score of row j for row i is s_ij = queries_i . keys_j + bias_j. Only one tile of scores is in memory, also in the
backward pass, which computes the tiles again.

Source:
    Rabe, Staats: Self-attention does not need O(n^2) memory (2021);
    Dao et al.: FlashAttention (NeurIPS 2022), Algorithm 1 (forward) and appendix B.2 (backward).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.operation import operation

_TILE = 2**18  # scores of a tile over all series: 2 MB of float64
_LOWEST = -1e30  # replaces -inf: times 0 it is 0, and times any other key it is below all other scores


class Others(NamedTuple):
    """Sums over the other rows.

    Attributes:
        mean: sum_j n_ij exp(s_ij) values_j / sum_j n_ij exp(s_ij), `(..., N, D)`; NaN if there are no other rows.
        log_total: log sum_j n_ij exp(s_ij), `(..., N)`; not differentiable.
    """

    mean: Tensor
    log_total: Tensor


def others_mean(
    queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor, copies: Tensor, chunk: int | None = None
) -> Others:
    """Average over the other rows.

    Args:
        queries: `(..., N, C)`, floating. -inf is the limit of a number that decreases to -inf: times a key of 0 it is
            0, times a positive key it is below all scores with a smaller key.
        keys: `(..., N, C)`, not negative.
        bias: `(..., N)`.
        values: `(..., N, D)`; a constant.
        copies: copies of each row `(..., N)`. n_ij is the number of copies of row j, for row i itself one less: the
            other copies of a row count as other rows.
        chunk: rows on a side of a tile; None for a side that keeps a tile small.

    Gradient: in `queries`, `keys` and `bias`, in reverse mode, once. A query of -inf has no gradient in the keys.
    """
    side = chunk or max(16, math.isqrt(_TILE // max(1, math.prod(queries.shape[:-2]))))
    return Others(*_others.direct(queries, keys, bias, values, copies, side))


def _pieces(n: int, side: int) -> Iterator[slice]:
    return (slice(start, min(start + side, n)) for start in range(0, n, side))


def _scores(queries: Tensor, keys: Tensor, bias: Tensor, copies: Tensor, a: slice, b: slice) -> Tensor:
    """Return s_ij + log n_ij of a tile, `(..., a, b)`."""
    scores = queries[..., a, :].clamp(min=_LOWEST) @ keys[..., b, :].mT + (bias + copies.log())[..., None, b]
    if a == b:  # a tile on the diagonal
        own = scores.diagonal(dim1=-2, dim2=-1)
        own += (copies - 1).clamp(min=0).log()[..., a] - copies.clamp(min=1).log()[..., a]
    return scores


@operation(
    "others_mean(Tensor queries, Tensor keys, Tensor bias, Tensor values, Tensor copies, int side) -> (Tensor, Tensor)",
    fake=lambda queries, keys, bias, values, *_: (torch.empty_like(values), torch.empty_like(bias)),  # noqa: ARG005
)
def _others(
    queries: Tensor, keys: Tensor, bias: Tensor, values: Tensor, copies: Tensor, side: int
) -> tuple[Tensor, Tensor]:
    """See `others_mean`."""
    mean, log_total = torch.empty(values.shape, dtype=values.dtype, device=values.device), torch.empty_like(bias)
    lowest = torch.finfo(bias.dtype).min
    for a in _pieces(keys.shape[-2], side):
        top = torch.full_like(bias[..., a], lowest)  # running maximum of the scores; sums are relative to it
        total, of_values = torch.zeros_like(top), torch.zeros_like(values[..., a, :])
        for b in _pieces(keys.shape[-2], side):
            scores = _scores(queries, keys, bias, copies, a, b)
            above = torch.maximum(top, scores.amax(-1))
            weights = scores.sub_(above.unsqueeze(-1)).exp_()
            shrunk = (top - above).exp()
            total = total * shrunk + weights.sum(-1)
            of_values = of_values * shrunk.unsqueeze(-1) + weights @ values[..., b, :]
            top = above
        mean[..., a, :] = of_values / total.unsqueeze(-1)
        log_total[..., a] = top + total.log()
    return mean, log_total


@operation(
    "others_mean_backward(Tensor queries, Tensor keys, Tensor bias, Tensor values, Tensor copies, Tensor mean,"
    " Tensor log_total, Tensor grads, int side) -> (Tensor, Tensor, Tensor)",
    fake=lambda queries, keys, bias, *_: (torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(bias)),
)
def _others_backward(
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
    """Return the gradients in `queries`, `keys` and `bias`; each tile is computed again."""
    of_queries, of_keys, of_bias = torch.zeros_like(queries), torch.zeros_like(keys), torch.zeros_like(bias)
    finite = queries.masked_fill(queries == -torch.inf, 0)
    at_mean = (grads * mean).sum(-1, keepdim=True)
    for a in _pieces(keys.shape[-2], side):
        for b in _pieces(keys.shape[-2], side):
            weights = (_scores(queries, keys, bias, copies, a, b) - log_total[..., a].unsqueeze(-1)).exp_()
            of_scores = weights * (grads[..., a, :] @ values[..., b, :].mT - at_mean[..., a, :])
            of_queries[..., a, :] += of_scores @ keys[..., b, :]
            of_keys[..., b, :] += of_scores.mT @ finite[..., a, :]
            of_bias[..., b] += of_scores.sum(-2)
    return of_queries, of_keys, of_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.side = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grads: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return (*_others_backward(*ctx.saved_tensors, grads, ctx.side), None, None, None)


torch.library.register_autograd("torchcalib::others_mean", _backward, setup_context=_keep)
