"""Statistics of the softmax of a linear layer, from hidden states and weight, without a tensor of all logits.

The logits are computed in blocks of rows and classes. `softmax_stats.sums` reduces a block to a few sums per row, and
sums over different classes are merged. Ranks of a process group that hold different classes merge their sums likewise.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.bin_sums import event_bins
from torchcalib.ops.linear_softmax_stats.blocks import (
    Head,
    all_sums,
    first_class,
    in_blocks,
    merge_all,
    of_all_ranks,
    sums_of_block,
)
from torchcalib.ops.linear_softmax_stats.gradient import gradient
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats import Detail, Rows
from torchcalib.ops.softmax_stats.chunked import first_largest
from torchcalib.ops.softmax_stats.formula import row_formula
from torchcalib.ops.softmax_stats.logit_sums import Sums, scores_of

__all__ = ["Head", "Moments", "all_bins", "largest", "moments", "rows"]


class Moments(NamedTuple):
    """Moments of the logits x of a row before the temperature T, under the probabilities q at this temperature.

    In 1 / T, the negative log-likelihood -log q_h has the first derivative `mean - label`, and the second derivative
    `variance`.
    """

    log_prob: Tensor  # log q_h in nats
    label: Tensor  # x_h - max_k x_k, at most 0
    mean: Tensor  # sum_k q_k x_k - max_k x_k, at most 0
    variance: Tensor  # sum_k q_k x_k^2 - (sum_k q_k x_k)^2


def rows(
    hidden: Tensor,
    target: Tensor,
    head: Head,
    *,
    detail: Detail = "entropy",
    vocab_group: Any = None,
    block: int | None = None,
) -> Rows:
    """Return the statistics of `softmax_stats.rows` for the logits of a linear layer.

    `hidden` is `(..., N, H)` and `target` `(..., N)`. Results are `(..., N)`, or `(K, ..., N)` for K temperatures. The
    relative error is that of `softmax_stats.rows`, for float32 logits: products of narrower numbers are accumulated in
    float32, and not rounded. `block` is the number of classes per block. If None, a block fits into the cache.

    `vocab_group` is a process group whose ranks hold consecutive rows of the weight, and of the bias, in the order of
    ranks. All ranks must have the same hidden states and targets, which are classes of the whole layer. All ranks
    return the same results. They are bitwise those of one process with the same blocks, if every rank has one block.

    Gradient: in `hidden`, and in all tensors of `head`. Logits are computed again, in blocks. Forward mode, derivatives
    of higher order, `vmap` and `torch.compile` compute all logits, and do not support `vocab_group`. With it, all ranks
    must compute the same loss. Gradients in hidden states, scale and temperature are then sums over the ranks.
    """
    weight, bias, scale, cap, temperature = head
    scores, top, *_ = _rows(hidden, target, weight, bias, scale, temperature, cap, detail, vocab_group, block)
    log_prob, squared_error, neg_entropy, confidence = scores.unbind(-2)
    return Rows(log_prob, squared_error, neg_entropy, confidence, top)


@torch.no_grad()
def moments(
    hidden: Tensor, target: Tensor, head: Head, *, vocab_group: Any = None, block: int | None = None
) -> Moments:
    """Return the moments of logits that a fit of the temperature requires, for all temperatures in one pass.

    Results are `(..., N)`, or `(K, ..., N)` for K temperatures, without gradient. For other arguments see `rows`.
    """
    first = first_class(len(head.weight), vocab_group, hidden.device)
    found = all_sums(hidden, target, head, first, vocab_group, block)
    total, alpha = 1 + found.rest, head.alphas().unsqueeze(-1)
    log_prob, *_ = scores_of(found, found.top == target.reshape(-1))
    label = (found.label - found.largest).masked_fill(found.label == found.largest, 0)
    mean = found.product / total
    variance = found.spread / total - mean * mean
    columns = log_prob, label / alpha, mean / alpha, variance / (alpha * alpha)
    return Moments(*(x.reshape(*head.axes(), *target.shape) for x in columns))


@torch.no_grad()
def largest(
    hidden: Tensor, head: Head, k: int, *, vocab_group: Any = None, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return the k largest probabilities of every row in descending order, and their classes, in one pass.

    Both are `(..., N, k)`, or `(K, ..., N, k)` for K temperatures, without gradient. Tied classes are in ascending
    order. The classes of probabilities of 0, and of rows with NaN, are undefined. For other arguments see `rows`.
    """
    first = first_class(len(head.weight), vocab_group, hidden.device)
    no_label = torch.full(hidden.shape[:-1], -1, device=hidden.device).reshape(-1)

    def work(part: slice, classes: slice, x: Tensor) -> tuple[Sums, Tensor, Tensor]:
        found = sums_of_block(x, no_label[part], head, first + classes.start)
        logits, index = _k_largest(x, min(k, x.shape[-1]))  # overwrites the block
        return found, logits, index + (first + classes.start)

    parts = in_blocks(hidden, head, block, work)
    found = merge_all([[x for x, _, _ in blocks] for blocks in parts], vocab_group)
    logits = torch.cat([torch.cat([x for _, x, _ in blocks], -1) for blocks in parts])
    classes = torch.cat([torch.cat([index for _, _, index in blocks], -1) for blocks in parts])
    if vocab_group is not None:  # with the same number of candidates from every rank
        logits, index = _k_largest(pad(logits, (0, k), value=-torch.inf), k)
        classes = pad(classes, (0, k)).gather(-1, index)
        logits, classes = (of_all_ranks(x, vocab_group).movedim(0, 1).flatten(1) for x in (logits, classes))
    logits, index = _k_largest(logits, k)
    alpha, largest_logit = head.alphas().view(-1, 1, 1), found.largest.unsqueeze(-1)
    y = logits.to(found.rest.dtype) * alpha
    q = (y - largest_logit).masked_fill(y == largest_logit, 0).exp() / (1 + found.rest).unsqueeze(-1)
    shape = *head.axes(), *hidden.shape[:-1], k
    return q.view(shape), classes.gather(-1, index).expand(q.shape).reshape(shape)


def _k_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of every row with their indices, the first ones if tied. `x` is overwritten."""
    entries, indices = [], []
    for _ in range(k):
        index = first_largest(x).unsqueeze(-1)
        entries.append(x.gather(-1, index))
        indices.append(index)
        x.scatter_(-1, index, -torch.inf)
    return torch.cat(entries, -1), torch.cat(indices, -1)


@torch.no_grad()
def all_bins(
    hidden: Tensor,
    target: Tensor,
    head: Head,
    *,
    n_bins: int,
    right: bool = False,
    vocab_group: Any = None,
    block: int | None = None,
) -> Tensor:
    """Return the sums of `bin_sums.event_bins` over the one-vs-rest events of all classes, separately for every row.

    Results are `(..., N, 3, B)`, or `(K, ..., N, 3, B)` for K temperatures: number, sum of probabilities and number of
    labels in B bins of the probability, as for Full-ECE. The first pass computes the normalisation of probabilities,
    the second one the probabilities. Results have no gradient. For other arguments see `rows`.
    """
    first = first_class(len(head.weight), vocab_group, hidden.device)
    found = all_sums(hidden, target, head, first, vocab_group, block)
    alphas, labels = head.alphas(), target.reshape(-1, 1) - first
    confidence, largest_logit = 1 / (1 + found.rest), found.largest[0] / alphas[0]

    def work(part: slice, classes: slice, x: Tensor) -> Tensor:
        outcome = torch.arange(classes.start, classes.stop, device=x.device) == labels[part]
        top = largest_logit[part].to(x.dtype).unsqueeze(-1)
        shifted = torch.where(x == top, 0, x - top)
        of_alphas = []
        for k, alpha in enumerate(alphas):
            q = (shifted * alpha).exp_().mul_(confidence[k, part].to(x.dtype).unsqueeze(-1))
            of_alphas.append(event_bins(q, outcome, n_bins=n_bins, right=right))
        return torch.stack(of_alphas)

    parts = in_blocks(hidden, head, block, work)
    sums = torch.cat([torch.stack(blocks).sum(0) for blocks in parts], 1)
    if vocab_group is not None:
        sums = of_all_ranks(sums, vocab_group).sum(0)
    return sums.view(*head.axes(), *target.shape, 3, n_bins)


def _forward(
    backend: str,  # noqa: ARG001
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float | Tensor | None,
    temperature: float | Tensor | None,
    cap: float | None,
    detail: Detail,  # noqa: ARG001
    group: Any,
    block: int | None,
) -> tuple[Tensor, ...]:
    """Return scores `(..., 4, N)` and top classes `(..., N)`; for `gradient` also largest logits and first class."""
    head = Head(weight, bias, scale, cap, temperature).detach()
    first = first_class(len(weight), group, hidden.device)
    found = all_sums(hidden.detach(), target, head, first, group, block)
    shape = *head.axes(), *target.shape
    scores = scores_of(found, found.top == target.reshape(-1)).view(4, *shape)
    return scores.movedim(0, -2), found.top.view(shape), found.largest[0] / head.alphas()[0], first


def _formula(
    hidden: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float | Tensor | None,
    temperature: float | Tensor | None,
    cap: float | None,
    detail: Detail,
    group: Any,
    block: int | None,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Return scores and top classes by differentiable operations, from a tensor of all logits."""
    if group is not None:
        raise ValueError("`vocab_group` must be None under torch.compile, vmap, and for second derivatives. Omit it.")
    x = Head(weight, bias, scale, cap, temperature).logits(hidden)
    return row_formula(x, target.expand(x.shape[:-1]), True, detail=detail)


_rows = fused(_forward, _formula, gradient)
