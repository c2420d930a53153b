"""Logits of a linear layer in blocks of rows and classes, and sums over all classes, merged from blocks and ranks."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.softmax_stats import sums
from torchcalib.ops.softmax_stats.logit_sums import Sums, joined, merge

T = TypeVar("T")

_ROWS = 512  # largest number of rows per block
_ENTRIES = 2**22  # largest number of entries of all buffers: 16 MB of float32. More would not stay in the cache.
_ROWS_OFF_CPU = 2**10  # the same on other devices, whose products need larger blocks
_ENTRIES_OFF_CPU = 2**23


class Head(NamedTuple):
    """Linear layer from hidden states h `(..., H)` to logits `(..., V)`, and the elementwise functions that follow it.

    With y = logit_scale * (W h + bias), the logits are softcap * tanh(y / softcap) / temperature. None omits a step.
    """

    weight: Tensor  # W, (V, H)
    bias: Tensor | None = None  # (V,); -inf masks a class
    logit_scale: float | Tensor | None = None
    softcap: float | None = None  # positive
    temperature: float | Tensor | None = None  # positive and finite; `(K,)` for K temperatures in the same pass

    def detach(self) -> "Head":
        """Return the head without gradient."""
        parts: Any = (x.detach() if isinstance(x, Tensor) else x for x in self)
        return Head(*parts)

    def alphas(self) -> Tensor:
        """Return the factors of logits 1 / temperature, `(K,)` in `wide_dtype`; 1 without a temperature."""
        dtype, device = wide_dtype(self.weight.device), self.weight.device
        temperature = 1.0 if self.temperature is None else self.temperature
        return torch.as_tensor(temperature, dtype=dtype, device=device).detach().reciprocal().reshape(-1)

    def axes(self) -> tuple[int, ...]:
        """Return the leading axes of results: `(K,)` for a tensor of K temperatures, and otherwise none."""
        return tuple(self.temperature.shape) if isinstance(self.temperature, Tensor) else ()

    def logits(self, hidden: Tensor) -> Tensor:
        """Return all logits `(..., V)`, or `(K, ..., V)`, in `wide_dtype` by differentiable operations."""
        dtype = _logit_dtype(hidden, self.weight)
        x = hidden.to(dtype) @ self.weight.to(dtype).mT
        x = x if self.bias is None else x + self.bias
        x = x if self.logit_scale is None else x * self.logit_scale
        x = x if self.softcap is None else self.softcap * (x / self.softcap).tanh()
        x = x.to(wide_dtype(x.device))
        if isinstance(self.temperature, Tensor):
            return x / self.temperature.view(*self.axes(), *(1 for _ in x.shape))
        return x if self.temperature is None else x / self.temperature


class Blocks:
    """Blocks of logits, before the temperature.

    Products of float16 and bfloat16 numbers are accumulated in float32 and not rounded.
    """

    def __init__(self, hidden: Tensor, head: Head, n_classes: int | None, n_buffers: int = 1) -> None:
        """Allocate buffers for blocks of `n_classes` classes, or of as many as fit into the cache if None."""
        weight, on_cpu = head.weight, hidden.device.type == "cpu"
        self.hidden, self.head = hidden, head
        self.dtype = _logit_dtype(hidden, weight)
        # Tensor cores multiply narrow numbers with float32 results. Other processors multiply float32 faster.
        narrow = hidden.is_cuda and hidden.dtype == weight.dtype and weight.dtype.itemsize == 2
        self.factor_dtype = weight.dtype if narrow else self.dtype
        self.converts = weight.dtype != self.factor_dtype
        self.n_rows = max(1, min(len(hidden), _ROWS if on_cpu else _ROWS_OFF_CPU))
        if n_classes is None:
            per_class = n_buffers * self.n_rows + self.converts * weight.shape[1]
            n_classes = (_ENTRIES if on_cpu else _ENTRIES_OFF_CPU) // per_class
        self.n_classes = max(1, min(n_classes, len(weight)))
        self.buffers = hidden.new_empty(n_buffers, self.n_rows * self.n_classes, dtype=self.dtype)
        self.converted = hidden.new_empty(self.n_classes * self.converts, weight.shape[1], dtype=self.factor_dtype)

    def row_slices(self) -> Iterator[slice]:
        """Yield the rows of blocks: at least one block, which is empty without rows."""
        n = len(self.hidden)
        return (slice(k, min(k + self.n_rows, n)) for k in range(0, max(1, n), self.n_rows))

    def class_slices(self) -> Iterator[slice]:
        """Yield the classes of blocks."""
        n = len(self.head.weight)
        return (slice(k, min(k + self.n_classes, n)) for k in range(0, n, self.n_classes))

    def of_rows(self, part: slice) -> Iterator[tuple[slice, Tensor]]:
        """Yield the classes of blocks with the logits of some rows. Each block overwrites the previous one."""
        hidden = self.rows(part)
        return ((classes, self.logits(hidden, self.weight(classes), classes)) for classes in self.class_slices())

    def rows(self, part: slice) -> Tensor:
        """Return hidden states as a factor of the product."""
        return self.hidden[part].to(self.factor_dtype)

    def weight(self, classes: slice) -> Tensor:
        """Return rows of the weight as a factor of the product. The next call can overwrite them."""
        weight = self.head.weight[classes]
        return self.converted[: len(weight)].copy_(weight) if self.converts else weight

    def logits(self, hidden: Tensor, weight: Tensor, classes: slice) -> Tensor:
        """Return logits in the first buffer. The next call overwrites them."""
        out = self.buffers[0, : len(hidden) * len(weight)].view(len(hidden), len(weight))
        if self.factor_dtype == self.dtype:
            x = torch.mm(hidden, weight.T, out=out)
        else:
            x = torch.mm(hidden, weight.T, self.dtype, out=out)
        _, bias, scale, cap, _ = self.head
        if bias is not None:
            x += bias[classes]
        if scale is not None:
            x *= scale
        return x if cap is None else x.div_(cap).tanh_().mul_(cap)


def _logit_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)


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
