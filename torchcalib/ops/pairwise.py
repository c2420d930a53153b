"""Sums over pairs of rows of the product of two vectors and a kernel: over all pairs, or over the pairs in blocks.

A pair adds h_ij = (r_i . r_j) k(x_i, x_j), with the kernel "laplacian", exp(-sum_c |x_ic - x_jc|), or "gaussian",
exp(-sum_c (x_ic - x_jc)^2). Pairs are computed one tile at a time. The backward pass computes each tile again and
differentiates it, so no N x N matrix is ever stored.

Source: Widmann, Lindsten, Zachariah: Calibration tests in multi-class classification (NeurIPS 2019), eq. 4-5, table 1.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits, wide_dtype
from torchcalib.ops.operation import operation

Kernel = Literal["laplacian", "gaussian"]

_TILE = 2**18  # pairs of a tile, and entries of the rows of the blocks of a chunk: 2 MB of float64


def pairs(x: Tensor, r: Tensor, weights: Tensor, kernel: Kernel, chunk: int | None = None) -> Tensor:
    """Return sum_ij w_i w_j h_ij over all pairs of rows, the pairs of a row with itself included, `(..., R)`.

    Args:
        x: `(..., N, C)`, floating.
        r: `(..., N, C)`, of the same dtype.
        weights: `(..., R, N)`, of the same dtype: R weights of each row.
        kernel: which kernel.
        chunk: rows on a side of a tile; None for a side that keeps a tile small.

    Gradient: in `x`, `r` and `weights`, in reverse mode, once. That of |x_ic - x_jc| is 0 where the two are equal.
    """
    side = chunk or max(16, math.isqrt(_TILE // max(1, math.prod(x.shape[:-2]))))
    sums: Tensor = _pair_sums.direct(x, r, weights, kernel, side)
    return sums


@operation(
    "pair_sums(Tensor x, Tensor r, Tensor weights, str kernel, int side) -> Tensor",
    fake=lambda x, r, weights, *_: weights.new_empty(weights.shape[:-1]),  # noqa: ARG005
)
def _pair_sums(x: Tensor, r: Tensor, weights: Tensor, kernel: Kernel, side: int) -> Tensor:
    """Sum over the tiles on and above the diagonal; the sum is symmetric."""
    sums = weights.new_zeros(weights.shape[:-1])
    for a, b, times in _tiles(x.shape[-2], side):
        sums += times * _tile_sum(kernel, *_rows_of_tile(x, r, weights, a, b))
    return sums


@operation(
    "pair_sums_backward(Tensor x, Tensor r, Tensor weights, Tensor grads, str kernel, int side)"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda x, r, weights, *_: (torch.empty_like(x), torch.empty_like(r), torch.empty_like(weights)),
)
def _pair_sums_backward(
    x: Tensor, r: Tensor, weights: Tensor, grads: Tensor, kernel: Kernel, side: int
) -> tuple[Tensor, ...]:
    """Return the gradients in `x`, `r` and `weights`: each tile is computed again and differentiated by torch."""
    found = torch.zeros_like(x), torch.zeros_like(r), torch.zeros_like(weights)
    for a, b, times in _tiles(x.shape[-2], side):
        pullback = torch.func.vjp(partial(_tile_sum, kernel), *_rows_of_tile(x, r, weights, a, b))[1]
        for into, grad in zip(_rows_of_tile(*found, a, b), pullback(times * grads), strict=True):
            into += grad
    return found


def _rows_of_tile(x: Tensor, r: Tensor, weights: Tensor, a: slice, b: slice) -> list[Tensor]:
    """Return views of the rows and of the columns of a tile: x, r and weights of each."""
    return [t for rows in (a, b) for t in (x[..., rows, :], r[..., rows, :], weights[..., rows])]


def _tile_sum(kernel: Kernel, x_a: Tensor, r_a: Tensor, w_a: Tensor, x_b: Tensor, r_b: Tensor, w_b: Tensor) -> Tensor:
    """Return sum_ij w_i w_j h_ij of a tile `(..., R)`."""
    h = (r_a @ r_b.mT) * _near(x_a, x_b, kernel)
    return ((w_a @ h) * w_b).sum(-1)


def _tiles(n: int, side: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield rows, columns and multiplicity of the tiles on the diagonal (1) and above it (2)."""
    starts = range(0, n, side)
    for i in starts:
        for j in starts[i // side :]:
            yield slice(i, i + side), slice(j, j + side), 1 if i == j else 2


def _near(x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
    """Return the kernel of each row of `x` `(..., a, C)` with each row of `y` `(..., b, C)`: `(..., a, b)`."""
    if kernel == "laplacian":
        return (-torch.cdist(x.contiguous(), y.contiguous(), p=1.0)).exp_()
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    return (2 * (x @ y.mT)).sub_(squares).clamp_(max=0).exp_()


def _keep_pairs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    x, r, weights, ctx.kernel, ctx.side = inputs
    ctx.save_for_backward(x, r, weights)


def _pairs_backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    found = _pair_sums_backward(*ctx.saved_tensors, grads, ctx.kernel, ctx.side)
    return (*found, None, None)


torch.library.register_autograd("torchcalib::pair_sums", _pairs_backward, setup_context=_keep_pairs)


def blocks(
    values: Tensor,
    target: Tensor,
    copies: Tensor | None,
    scale: Tensor,
    *,
    from_logits: bool,
    kernel: Kernel,
    size: int,
    at_most_once: bool = False,
    chunk: int | None = None,
) -> Tensor:
    """Divide the rows, in their order, into blocks; sum the mean of h over pairs of different rows of each block.

    r is target minus probability, x the probability times `scale`. An incomplete block at the end is left out.

    Args:
        values: probabilities or logits `(..., N, C)`, floating.
        target: labels `(..., N)`, int64, or distributions `(..., N, C)`.
        copies: copies of each row in the series that is divided, int64 `(..., N)`; None for one each. Rows of 0 copies
            are ignored.
        scale: `(...)` in the dtype of sums; a constant.
        from_logits: whether `values` are logits.
        kernel: which kernel.
        size: rows of a block, at least 2.
        at_most_once: whether all `copies` are 0 or 1.
        chunk: blocks that are computed at a time; None for as many as stay small.

    Returns:
        Number of blocks, sum of their means, and sum of the squared means, `(..., 3)` in the dtype of sums.

    Gradient: in `values`, in reverse mode, once.
    """
    room = _TILE // max(1, math.prod(values.shape[:-2]) * size * max(size, values.shape[-1]))
    how = from_logits, kernel, size, at_most_once, chunk or max(1, room)
    sums: Tensor = _block_sums.direct(values, target, copies, scale, *how)
    return sums


class _Blocks(NamedTuple):
    """Some blocks of rows.

    Attributes:
        rows: indices of the rows of each block, `(..., K, size)`; or a slice of rows that are blocks in their order.
        past_end: places of a block behind the end of the series `(..., K, size)`, where `rows` is arbitrary.
        times: 1 for a block, 0 for a place without one, `(..., K)`.
        alone: further blocks that consist of copies of the first row of the block only, `(..., K)`, int64.
    """

    rows: Tensor | slice
    past_end: Tensor | None = None
    times: Tensor | None = None
    alone: Tensor | None = None


def _cut(copies: Tensor | None, n: int, size: int, at_most_once: bool, chunk: int) -> Iterator[_Blocks]:
    """Yield all blocks of a series of N rows and their copies, one chunk at a time."""
    if copies is None:
        for start in range(0, n // size * size, size * chunk):
            yield _Blocks(slice(start, min(start + size * chunk, n // size * size)))
        return
    end = copies.cumsum(-1)  # of the copies of each row, among all
    n_blocks = end[..., -1:] // size
    places = torch.arange(size, device=copies.device)
    for start in range(0, n // size if at_most_once else n, chunk):
        if at_most_once:
            block = torch.arange(start, min(start + chunk, n // size), device=copies.device).expand(*end.shape[:-1], -1)
            times, alone = block < n_blocks, None
        else:  # every block holds the last copy of a row, except for blocks inside the copies of one row
            some = slice(start, start + chunk)
            begin = (end - copies)[..., some]
            block = (end[..., some] - 1) // size
            is_first = (copies[..., some] > 0) & (block > (begin - 1) // size)  # else it belongs to the row before
            times = is_first & (block < n_blocks)
            alone = (block - (begin + size - 1) // size).clamp(min=0)
        wanted = (block.clamp(min=0).unsqueeze(-1) * size + places).flatten(-2)
        rows = torch.searchsorted(end, wanted.contiguous(), right=True).clamp(max=n - 1)
        rows, past_end = (t.reshape(*t.shape[:-1], -1, size) for t in (rows, wanted >= end[..., -1:]))
        yield _Blocks(rows, past_end, times.to(wide_dtype(copies.device)), alone)


def _taken(x: Tensor, rows: Tensor | slice, size: int, per_class: bool) -> Tensor:
    """Take `x` `(..., N)`, or `(..., N, C)` with `per_class`, at the rows of each block: `(..., K, size[, C])`."""
    if isinstance(rows, slice):
        found = x[..., rows, :] if per_class else x[..., rows]
    else:
        flat = rows.flatten(-2)
        found = x.gather(-2, flat.unsqueeze(-1).expand(*flat.shape, x.shape[-1])) if per_class else x.gather(-1, flat)
    samples = found.shape[:-1] if per_class else found.shape
    return found.reshape(*samples[:-1], -1, size, *found.shape[len(samples) :])


def _values_and_target(values: Tensor, target: Tensor, some: _Blocks, size: int) -> tuple[Tensor, Tensor]:
    """Return values `(..., K, size, C)`, and labels or shares, of some blocks; floats in the dtype of sums."""

    def clean(x: Tensor) -> Tensor:
        x = x.to(wide_dtype(x.device))
        return x if some.past_end is None else x.masked_fill(some.past_end.unsqueeze(-1), 0)

    soft = target.is_floating_point()
    held = _taken(target, some.rows, size, per_class=soft)
    return clean(_taken(values, some.rows, size, per_class=True)), clean(held) if soft else held


def _sums_of_blocks(
    values: Tensor, target: Tensor, scale: Tensor, some: _Blocks, from_logits: bool, kernel: Kernel
) -> Tensor:
    """Return number, sum of the means and sum of the squared means of some blocks `(..., 3)`."""
    q = spread_infinite_logits(values).softmax(-1) if from_logits else values
    if target.is_floating_point():
        r = target - q
    else:
        r = (-q).scatter_add(-1, target.unsqueeze(-1), torch.ones_like(q[..., :1]))
    x = q * scale[..., None, None, None]
    size = x.shape[-2]
    products = r @ r.mT
    products.diagonal(dim1=-2, dim2=-1).zero_()  # only pairs of different rows
    # The kernel is symmetric: twice the gradient in its first argument is the whole, at half the cost.
    near = _near(2 * x - x.detach(), x.detach(), kernel)
    mean = (products * near).mean((-2, -1)) * (size / (size - 1))
    times = torch.ones_like(mean) if some.times is None else some.times
    sums = torch.stack([(times * h).sum(-1) for h in (torch.ones_like(mean), mean, mean.square())], -1)
    if some.alone is not None:  # the kernel of a row and its copy is 1
        own = r[..., 0, :].square().sum(-1)
        sums = sums + torch.stack([(some.alone * h).sum(-1) for h in (torch.ones_like(own), own, own.square())], -1)
    return sums


@operation(
    "block_sums(Tensor values, Tensor target, Tensor? copies, Tensor scale, bool from_logits, str kernel, int size,"
    " bool at_most_once, int chunk) -> Tensor",
    fake=lambda values, target, copies, scale, *_: scale.new_empty((*values.shape[:-2], 3)),  # noqa: ARG005
)
def _block_sums(
    values: Tensor,
    target: Tensor,
    copies: Tensor | None,
    scale: Tensor,
    from_logits: bool,
    kernel: Kernel,
    size: int,
    at_most_once: bool,
    chunk: int,
) -> Tensor:
    """See `blocks`."""
    sums = scale.new_zeros((*values.shape[:-2], 3))
    for some in _cut(copies, values.shape[-2], size, at_most_once, chunk):
        sums += _sums_of_blocks(*_values_and_target(values, target, some, size), scale, some, from_logits, kernel)
    return sums


@operation(
    "block_sums_backward(Tensor values, Tensor target, Tensor? copies, Tensor scale, Tensor grads, bool from_logits,"
    " str kernel, int size, bool at_most_once, int chunk) -> Tensor",
    fake=lambda values, *_: torch.empty_like(values),
)
def _block_sums_backward(
    values: Tensor,
    target: Tensor,
    copies: Tensor | None,
    scale: Tensor,
    grads: Tensor,
    from_logits: bool,
    kernel: Kernel,
    size: int,
    at_most_once: bool,
    chunk: int,
) -> Tensor:
    """Return the gradient in `values`: each block is computed again and differentiated by torch."""
    out = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    for some in _cut(copies, values.shape[-2], size, at_most_once, chunk):
        given, held = _values_and_target(values, target, some, size)
        of_values = partial(
            _sums_of_blocks, target=held, scale=scale, some=some, from_logits=from_logits, kernel=kernel
        )
        pullback = torch.func.vjp(of_values, given)[1]
        found = pullback(grads)[0].flatten(-3, -2).to(out.dtype)
        if isinstance(some.rows, slice):
            out[..., some.rows, :] = found
        else:
            out.scatter_add_(-2, some.rows.flatten(-2).unsqueeze(-1).expand_as(found), found)
    return out


def _keep_blocks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.from_logits, ctx.kernel, ctx.size, ctx.at_most_once, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _blocks_backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    how = ctx.from_logits, ctx.kernel, ctx.size, ctx.at_most_once, ctx.chunk
    found = _block_sums_backward(*ctx.saved_tensors, grads, *how)
    return (found, *(None,) * 8)


torch.library.register_autograd("torchcalib::block_sums", _blocks_backward, setup_context=_keep_blocks)
