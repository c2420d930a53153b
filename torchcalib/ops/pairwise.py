"""Sums over pairs of rows, of the product of two vectors and of how near they are: all pairs, or those in blocks.

What a pair adds is h_ij = (r_i . r_j) k(x_i, x_j), with one of two kernels: "laplacian" exp(-sum_c |x_ic - x_jc|) and
"gaussian" exp(-sum_c (x_ic - x_jc)^2). Pairs are made a tile at a time, on the way back too: nothing of size N x N is
ever held.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits, through_softmax, wide_dtype
from torchcalib.ops.operation import operation

Kernel = Literal["laplacian", "gaussian"]

_TILE = 2**18  # pairs of a tile, and entries of the rows of blocks, that are held at a time: 2 MB of float64


def pairs(x: Tensor, r: Tensor, weights: Tensor, kernel: Kernel, chunk: int | None = None) -> Tensor:
    """Return sum_ij w_i w_j h_ij over all pairs of rows, each with itself too, `(..., R)` in the dtype given.

    Args:
        x: `(..., N, C)`, floating.
        r: `(..., N, C)`, of the same dtype.
        weights: `(..., R, N)`, of the same dtype: R ways to weigh the rows.
        kernel: which kernel.
        chunk: rows on a side of a tile; None for as many as keep it small.

    Gradient: in `x`, `r` and `weights`, in reverse mode, once. That of |x_ic - x_jc| is 0 where the two are equal.
    """
    sums: Tensor = _pair_sums.direct(x, r, weights, kernel, chunk or _side(x))
    return sums


def _side(x: Tensor) -> int:
    """How many rows a side of a tile has, so that the tiles of all series together stay small."""
    series = math.prod(x.shape[:-2])
    return max(16, math.isqrt(_TILE // max(1, series)))


@operation(
    "pair_sums(Tensor x, Tensor r, Tensor weights, str kernel, int side) -> Tensor",
    fake=lambda x, r, weights, *_: weights.new_empty(weights.shape[:-1]),  # noqa: ARG005
)
def _pair_sums(x: Tensor, r: Tensor, weights: Tensor, kernel: Kernel, side: int) -> Tensor:
    """See `pairs`. The sum is symmetric, so tiles below the diagonal are not made."""
    sums = weights.new_zeros(weights.shape[:-1])
    for a, b, times in _tiles(x.shape[-2], side):
        h = (r[..., a, :] @ r[..., b, :].mT) * _near(x[..., a, :], x[..., b, :], kernel)
        sums += times * ((weights[..., a] @ h) * weights[..., b]).sum(-1)
    return sums


@operation(
    "pair_sums_backward(Tensor x, Tensor r, Tensor weights, Tensor grads, str kernel, int side)"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda x, r, weights, *_: (torch.empty_like(x), torch.empty_like(r), torch.empty_like(weights)),
)
def _pair_sums_backward(
    x: Tensor, r: Tensor, weights: Tensor, grads: Tensor, kernel: Kernel, side: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients in `x`, `r` and `weights`; each tile is made anew."""
    of_x, of_r, of_weights = torch.zeros_like(x), torch.zeros_like(r), torch.zeros_like(weights)
    upstream = weights * grads.unsqueeze(-1)
    for a, b, times in _tiles(x.shape[-2], side):
        x_a, x_b, r_a, r_b = x[..., a, :], x[..., b, :], r[..., a, :], r[..., b, :]
        near, product = _near(x_a, x_b, kernel), r_a @ r_b.mT
        h = near * product
        of_weights[..., a] += times * grads.unsqueeze(-1) * (weights[..., b] @ h.mT)
        of_weights[..., b] += times * grads.unsqueeze(-1) * (weights[..., a] @ h)
        of_h = times * (upstream[..., a].mT @ weights[..., b])  # `(..., a, b)`, summed over the ways of weighing
        of_product = of_h * near
        of_r[..., a, :] += of_product @ r_b
        of_r[..., b, :] += of_product.mT @ r_a
        of_distance = -of_h * h
        of_x[..., a, :] += _distance_gradient(of_distance, x_a, x_b, kernel)
        of_x[..., b, :] += _distance_gradient(of_distance.mT, x_b, x_a, kernel)
    return of_x, of_r, of_weights


def _tiles(n: int, side: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the rows and columns of every tile on the diagonal and above it, and how often it stands for."""
    starts = range(0, n, side)
    for i in starts:
        for j in starts[i // side :]:
            yield slice(i, i + side), slice(j, j + side), 1 if i == j else 2


def _near(x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
    """The kernel of every row of `x` `(..., a, C)` with every one of `y` `(..., b, C)`: `(..., a, b)`."""
    if kernel == "laplacian":
        return torch.cdist(x.contiguous(), y.contiguous(), p=1.0).neg_().exp_()
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    return (2 * (x @ y.mT)).sub_(squares).clamp_(max=0).exp_()


def _distance_gradient(of_distance: Tensor, x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
    """The gradient in `x` `(..., a, C)` of distances to `y`, from that in the distances `(..., a, b)`."""
    if kernel == "laplacian":  # sum_b g_ab sign(x_a - y_b), without a tensor (a, b, C)
        given = of_distance.contiguous(), x.contiguous(), y.contiguous(), 1.0
        found: Tensor = torch.ops.aten._cdist_backward(*given, torch.empty_like(given[0]))
        return found
    return 2 * (x * of_distance.sum(-1, keepdim=True) - of_distance @ y)


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
    """Cut the rows, in their order, into blocks, and sum over the blocks their mean of h over pairs of different rows.

    r is target less probability, x the probability times `scale`. What is left at the end is no block.

    Args:
        values: probabilities or logits `(..., N, C)`, floating. Read a chunk at a time.
        target: labels `(..., N)`, int64, or distributions `(..., N, C)`.
        copies: how often each row stands in the series that is cut, int64 `(..., N)`; None for once. Rows that stand
            there no time are not read.
        scale: `(...)` in the dtype of sums; a constant.
        from_logits: whether `values` are logits.
        kernel: which kernel.
        size: rows of a block, at least 2.
        at_most_once: whether no row stands there more than once.
        chunk: blocks that are made at a time; None for as many as keep them small.

    Returns:
        How many blocks, the sum of their means and of the squares of these, `(..., 3)` in the dtype of sums.

    Gradient: in `values`, in reverse mode, once.
    """
    room = _TILE // max(1, math.prod(values.shape[:-2]) * size * max(size, values.shape[-1]))
    how = from_logits, kernel, size, at_most_once, chunk or max(1, room)
    sums: Tensor = _block_sums.direct(values, target, copies, scale, *how)
    return sums


class _Blocks(NamedTuple):
    """Some blocks of rows.

    Attributes:
        rows: which rows a block is made of, `(..., K, size)`; or a slice of rows that are blocks in their order.
        past_end: places of a block behind the end of the series `(..., K, size)`, where `rows` means nothing.
        times: 1 for a block, 0 for what is none, `(..., K)`.
        alone: how many more blocks are made of copies of the first row of the block alone, `(..., K)`, int64.
    """

    rows: Tensor | slice
    past_end: Tensor | None = None
    times: Tensor | None = None
    alone: Tensor | None = None


def _cut(copies: Tensor | None, n: int, size: int, at_most_once: bool, chunk: int) -> Iterator[_Blocks]:
    """Yield all blocks of a series of N rows and their copies, a chunk at a time."""
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
        else:  # every block holds the last copy of a row, but for those inside of the copies of one row
            some = slice(start, start + chunk)
            begin = (end - copies)[..., some]
            block = (end[..., some] - 1) // size
            is_first = (copies[..., some] > 0) & (block > (begin - 1) // size)  # else the row before has it too
            times = is_first & (block < n_blocks)
            alone = (block - (begin + size - 1) // size).clamp(min=0)
        wanted = (block.clamp(min=0).unsqueeze(-1) * size + places).flatten(-2)
        rows = torch.searchsorted(end, wanted.contiguous(), right=True).clamp(max=n - 1)
        rows, past_end = (t.reshape(*t.shape[:-1], -1, size) for t in (rows, wanted >= end[..., -1:]))
        yield _Blocks(rows, past_end, times.to(wide_dtype(copies.device)), alone)


def _taken(x: Tensor, rows: Tensor | slice, size: int, per_class: bool) -> Tensor:
    """Entries of `(..., N)`, or `(..., N, C)` with `per_class`, for every row of every block `(..., K, size[, C])`."""
    if isinstance(rows, slice):
        found = x[..., rows, :] if per_class else x[..., rows]
    else:
        flat = rows.flatten(-2)
        found = x.gather(-2, flat.unsqueeze(-1).expand(*flat.shape, x.shape[-1])) if per_class else x.gather(-1, flat)
    samples = found.shape[:-1] if per_class else found.shape
    return found.reshape(*samples[:-1], -1, size, *found.shape[len(samples) :])


def _distributions(
    values: Tensor, target: Tensor, some: _Blocks, from_logits: bool, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, probabilities and residuals of every row of some blocks, `(..., K, size, C)` of the dtype of sums."""
    taken = [_taken(values, some.rows, size, per_class=True)]
    if soft := target.is_floating_point():
        taken.append(_taken(target, some.rows, size, per_class=True))
    taken = [x.to(wide_dtype(x.device)) for x in taken]
    if some.past_end is not None:
        taken = [x.masked_fill(some.past_end.unsqueeze(-1), 0) for x in taken]
    given = taken[0]
    q = spread_infinite_logits(given).softmax(-1) if from_logits else given
    if soft:
        return given, q, taken[1] - q
    labels = _taken(target, some.rows, size, per_class=False).unsqueeze(-1)
    return given, q, (-q).scatter_add(-1, labels, torch.ones_like(q[..., :1]))


def _means(x: Tensor, r: Tensor, kernel: Kernel) -> Tensor:
    """The mean of h over the pairs of different rows of each block, `(..., K)`, of `(..., K, size, C)`."""
    return ((r @ r.mT) * _near_others(x, kernel)).mean((-2, -1)) * _of_pairs(x)


def _near_others(x: Tensor, kernel: Kernel) -> Tensor:
    """The kernel of every row of a block with every other one, `(..., K, size, size)`, and 0 of a row with itself."""
    near = _near(x, x, kernel)
    near.diagonal(dim1=-2, dim2=-1).zero_()
    return near


def _of_pairs(x: Tensor) -> float:
    """What turns the mean over all pairs, of which those of a row with itself are 0, into that over the others."""
    size = x.shape[-2]
    return size / (size - 1)


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
        _, q, r = _distributions(values, target, some, from_logits, size)
        mean = _means(q * scale[..., None, None, None], r, kernel)
        times = torch.ones_like(mean) if some.times is None else some.times
        sums += torch.stack([(times * h).sum(-1) for h in (torch.ones_like(mean), mean, mean.square())], -1)
        if some.alone is not None:
            own = r[..., 0, :].square().sum(-1)  # a row is as near to its copy as can be
            sums += torch.stack([(some.alone * h).sum(-1) for h in (torch.ones_like(own), own, own.square())], -1)
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
    """Return the gradient in `values`; each block is made anew."""
    out = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    scales = scale[..., None, None, None]
    of_sum, of_squares = (grads[..., k].unsqueeze(-1) for k in (1, 2))
    for some in _cut(copies, values.shape[-2], size, at_most_once, chunk):
        given, q, r = _distributions(values, target, some, from_logits, size)
        x = q * scales
        of_mean = of_sum + 2 * of_squares * _means(x, r, kernel)
        if some.times is not None:
            of_mean = of_mean * some.times
        of_x, of_r = _means_backward(x, r, kernel, of_mean)
        if some.alone is not None:
            own = r[..., 0, :]
            of_own = some.alone * (of_sum + 2 * of_squares * own.square().sum(-1))
            of_r[..., 0, :] += 2 * of_own.unsqueeze(-1) * own
        found = of_x * scales - of_r
        if from_logits:
            found = through_softmax(q, found, given)
        flat = found.flatten(-3, -2).to(out.dtype)
        if isinstance(some.rows, slice):
            out[..., some.rows, :] = flat
        else:
            index = some.rows.flatten(-2).unsqueeze(-1).expand_as(flat)
            out.scatter_add_(-2, index, flat)
    return out


def _means_backward(x: Tensor, r: Tensor, kernel: Kernel, of_mean: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of `_means` in x and r."""
    of_h = of_mean[..., None, None] * (_of_pairs(x) / x.shape[-2] ** 2)
    of_product = of_h * _near_others(x, kernel)
    of_distance = -of_product * (r @ r.mT)
    return 2 * _distance_gradient(of_distance, x, x, kernel), 2 * of_product @ r


def _keep_blocks(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    *tensors, ctx.from_logits, ctx.kernel, ctx.size, ctx.at_most_once, ctx.chunk = inputs
    ctx.save_for_backward(*tensors)


def _blocks_backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
    how = ctx.from_logits, ctx.kernel, ctx.size, ctx.at_most_once, ctx.chunk
    found = _block_sums_backward(*ctx.saved_tensors, grads, *how)
    return (found, *(None,) * 8)


torch.library.register_autograd("torchcalib::block_sums", _blocks_backward, setup_context=_keep_blocks)
