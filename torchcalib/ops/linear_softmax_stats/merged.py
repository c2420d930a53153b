"""Sums over all classes, merged from those of blocks and of ranks of a process group."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchcalib.ops.linear_softmax_stats.blocks import Blocks, Head
from torchcalib.ops.softmax_stats import sums
from torchcalib.ops.softmax_stats.logit_sums import Sums, joined, merge

T = TypeVar("T")


def in_blocks(
    hidden: Tensor, head: Head, block: int | None, work: Callable[[slice, slice, Tensor], T]
) -> list[list[T]]:
    """Return `work(rows, classes, logits)` of all blocks, for each slice of rows in the order of classes.

    The logits, before the temperature, are overwritten by those of the next block.
    """
    blocks = Blocks(hidden.reshape(-1, hidden.shape[-1]), head, block)
    return [[work(part, classes, x) for classes, x in blocks.of_rows(part)] for part in blocks.row_slices()]


def all_sums(hidden: Tensor, target: Tensor, head: Head, first: Tensor, group: Any, block: int | None) -> Sums:
    """Return the sums over all classes, `(K, R)` for R rows and K temperatures; `first` is that of `first_class`."""

    def work(part: slice, classes: slice, x: Tensor) -> Sums:
        return sums_of_block(x, target.reshape(-1)[part], head, first + classes.start)

    return merge_all(in_blocks(hidden, head, block, work), group)


def sums_of_block(x: Tensor, target: Tensor, head: Head, first: Tensor) -> Sums:
    """Return sums over parts of the classes of a block, `(P, K, n)`; `first` is the index of the first class."""
    alphas = [None] if head.temperature is None else head.alphas().unbind()
    found = joined(torch.stack, [sums(x, target - first, alpha) for alpha in alphas], 1)
    return found._replace(top=found.top + first)


def merge_all(parts: list[list[Sums]], group: Any) -> Sums:
    """Merge the sums of blocks, as returned by `in_blocks`, and then those of the ranks of a group."""
    own = joined(torch.cat, [merge(joined(torch.cat, blocks, 0)) for blocks in parts], -1)
    if group is None:
        return own
    # All ranks merge the sums of all ranks in the same order. Classes are exact in float64.
    ranks = Sums(*of_all_ranks(torch.stack([x.to(own.rest.dtype) for x in own]), group).unbind(1))
    return merge(ranks._replace(top=ranks.top.to(own.top.dtype)))


def first_class(n_classes: int, group: Any, device: torch.device) -> Tensor:
    """Return the number of classes of lower ranks, as a tensor, because reading it would synchronise the device."""
    if group is None:
        return torch.zeros((), dtype=torch.int64, device=device)
    sizes = of_all_ranks(torch.full((), n_classes, device=device), group)
    return sizes[: torch.distributed.get_rank(group)].sum()


def of_all_ranks(x: Tensor, group: Any) -> Tensor:
    """Return the tensors `x` of all ranks, which have the same shape, along a new first axis."""
    found = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(found, x.contiguous(), group=group)
    return torch.stack(found)
