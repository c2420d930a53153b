"""Kernel sums over pairs of rows, for the squared kernel calibration error (SKCE).

The term of rows i and j with residuals r and kernel arguments x is h_ij = (r_i . r_j) k(x_i, x_j). The kernel k is
"laplacian", exp(-sum_c |x_ic - x_jc|), or "gaussian", exp(-sum_c (x_ic - x_jc)^2). `pairs` sums over all pairs of rows.
`blocks` sums over the pairs within blocks of rows.

The N x N matrix of terms is computed one tile at a time and never stored. The backward pass recomputes the tiles.

Source: Widmann, Lindsten, Zachariah: Calibration tests in multi-class classification (NeurIPS 2019), eq. 4-5, table 1.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits, wide_dtype
from torchcalib.ops.operation import operation

Kernel = Literal["laplacian", "gaussian"]

_TILE = 2**17  # number of float64 matrix entries (1 MB) that are computed at a time


def pairs(x: Tensor, r: Tensor, weights: Tensor, kernel: Kernel, chunk: int | None = None) -> Tensor:
    """Return sum_ij w_i w_j (r_i . r_j) k(x_i, x_j) over all pairs of rows, including i = j, `(..., R)`.

    `x` and `r` are `(..., N, C)`. `weights` are R replicates of the row weights w, `(..., R, N)`. Tiles have `chunk`
    rows and columns, by default about 1 MB.

    Gradient: first-order, in `x`, `r` and `weights`, in reverse mode. |x_ic - x_jc| has gradient 0 at x_ic = x_jc.
    """
    side = chunk or max(16, math.isqrt(_TILE // max(1, math.prod(x.shape[:-2]))))
    sums: Tensor = _pair_sums.direct(x, r, weights, kernel, side)
    return sums


@operation(
    "pair_sums(Tensor x, Tensor r, Tensor weights, str kernel, int side) -> Tensor",
    fake=lambda x, r, weights, *_: weights.new_empty(weights.shape[:-1]),  # noqa: ARG005
)
def _pair_sums(x: Tensor, r: Tensor, weights: Tensor, kernel: Kernel, side: int) -> Tensor:
    """Compute `pairs`. Tiles above the diagonal are added twice, because the matrix of terms is symmetric."""
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
    """Return the gradients in `x`, `r` and `weights` for gradient `grads` in the sums, from recomputed tiles."""
    found = torch.zeros_like(x), torch.zeros_like(r), torch.zeros_like(weights)
    for a, b, times in _tiles(x.shape[-2], side):
        # A tile (a, b) above the diagonal stands for (b, a) too. So its gradients in both sets of rows count twice.
        pullback = torch.func.vjp(partial(_tile_sum, kernel), *_rows_of_tile(x, r, weights, a, b))[1]
        for into, grad in zip(_rows_of_tile(*found, a, b), pullback(times * grads), strict=True):
            into += grad
    return found


def _rows_of_tile(x: Tensor, r: Tensor, weights: Tensor, a: slice, b: slice) -> list[Tensor]:
    """Return views [x_a, r_a, w_a, x_b, r_b, w_b] of the rows `a` and the columns `b` of a tile."""
    return [t for rows in (a, b) for t in (x[..., rows, :], r[..., rows, :], weights[..., rows])]


def _tile_sum(kernel: Kernel, x_a: Tensor, r_a: Tensor, w_a: Tensor, x_b: Tensor, r_b: Tensor, w_b: Tensor) -> Tensor:
    """Return sum_ij w_i w_j (r_i . r_j) k(x_i, x_j) over the rows i and columns j of a tile, `(..., R)`."""
    h = (r_a @ r_b.mT) * _kernel_matrix(x_a, x_b, kernel)
    return ((w_a @ h) * w_b).sum(-1)


def _tiles(n: int, side: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the rows and columns of every tile, and its factor in the sum: 1 on the diagonal, 2 above it."""
    starts = range(0, n, side)
    for i in starts:
        for j in starts[i // side :]:
            yield slice(i, i + side), slice(j, j + side), 1 if i == j else 2


def _kernel_matrix(x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
    """Return the kernel `(..., a, b)` between the rows of `x`, `(..., a, C)`, and of `y`, `(..., b, C)`."""
    if kernel == "laplacian":
        return (-torch.cdist(x.contiguous(), y.contiguous(), p=1.0)).exp_()
    # |x - y|^2 = |x|^2 + |y|^2 - 2 x . y. Rounding errors can make it negative, hence the clamp.
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    return (2 * (x @ y.mT)).sub_(squares).clamp_(max=0).exp_()


_pair_sums.differentiate(_pair_sums_backward)


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
    """Return the number of blocks, and the sum of their means and of the squared means, `(..., 3)`.

    Consecutive rows form blocks of `size` rows; an incomplete last block is ignored. A block mean is the mean of
    (r_i . r_j) k(x_i, x_j) over the pairs i != j of rows in the block. Here k is the kernel, r = target - probability
    and x = scale * probability, with constant `scale` `(...)`.

    `values` are `(..., N, C)`. `target` has labels `(..., N)` or distributions `(..., N, C)`. The `copies` of a row,
    int64 `(..., N)`, are consecutive. `at_most_once` states that all `copies` are 0 or 1, which is faster. `chunk` is
    the number of blocks computed together, by default at most 1 MB.

    Gradient: first-order, in `values`, in reverse mode.
    """
    most_blocks = _TILE // max(1, math.prod(values.shape[:-2]) * size * max(size, values.shape[-1]))
    options = from_logits, kernel, size, at_most_once, chunk or max(1, most_blocks)
    sums: Tensor = _block_sums.direct(values, target, copies, scale, *options)
    return sums


class _Blocks(NamedTuple):
    """K blocks of rows that are processed at a time."""

    rows: Tensor | slice  # row indices of each block, `(..., K, size)`; or a slice of consecutive rows
    past_end: Tensor | None = None  # True where a block extends beyond the last row, bool `(..., K, size)`
    times: Tensor | None = None  # 1 for a valid block, 0 for a block to ignore, `(..., K)`
    n_uniform: Tensor | None = None  # further blocks with only copies of the first row in a block, int64 `(..., K)`


def _divide(copies: Tensor | None, n: int, size: int, at_most_once: bool, chunk: int) -> Iterator[_Blocks]:
    """Divide `n` rows, each repeated `copies` times, into blocks of `size` rows. Yield `chunk` blocks at a time."""
    if copies is None:
        for start in range(0, n // size * size, size * chunk):
            yield _Blocks(slice(start, min(start + size * chunk, n // size * size)))
        return
    end = copies.cumsum(-1)  # position after the last copy of each row, in the sequence of all copies
    n_blocks = end[..., -1:] // size
    places = torch.arange(size, device=copies.device)
    for start in range(0, n // size if at_most_once else n, chunk):
        if at_most_once:
            block = torch.arange(start, min(start + chunk, n // size), device=copies.device).expand(*end.shape[:-1], -1)
            times, n_uniform = block < n_blocks, None
        else:  # Each row yields the block of its last copy, and the number of blocks that contain only its copies.
            part = slice(start, start + chunk)
            begin = (end - copies)[..., part]
            block = (end[..., part] - 1) // size
            # Skip a block with the last copy of the previous row too: the previous row has already yielded it.
            is_first = (copies[..., part] > 0) & (block > (begin - 1) // size)
            times = is_first & (block < n_blocks)
            n_uniform = (block - (begin + size - 1) // size).clamp(min=0)
        wanted = (block.clamp(min=0).unsqueeze(-1) * size + places).flatten(-2)
        rows = torch.searchsorted(end, wanted.contiguous(), right=True).clamp(max=n - 1)
        rows, past_end = (t.reshape(*t.shape[:-1], -1, size) for t in (rows, wanted >= end[..., -1:]))
        yield _Blocks(rows, past_end, times.to(wide_dtype(copies.device)), n_uniform)


def _gather_rows(x: Tensor, rows: Tensor | slice, size: int, per_class: bool) -> Tensor:
    """Gather `x` `(..., N)`, or `(..., N, C)` if `per_class`, at the rows of every block, `(..., K, size[, C])`."""
    if isinstance(rows, slice):
        found = x[..., rows, :] if per_class else x[..., rows]
    else:
        flat = rows.flatten(-2)
        found = x.gather(-2, flat.unsqueeze(-1).expand(*flat.shape, x.shape[-1])) if per_class else x.gather(-1, flat)
    samples = found.shape[:-1] if per_class else found.shape
    return found.reshape(*samples[:-1], -1, size, *found.shape[len(samples) :])


def _gather_inputs(values: Tensor, target: Tensor, part: _Blocks, size: int) -> tuple[Tensor, Tensor]:
    """Gather values `(..., K, size, C)` of K blocks, and their labels `(..., K, size)` or target distributions."""

    def clean(x: Tensor) -> Tensor:
        x = x.to(wide_dtype(x.device))
        return x if part.past_end is None else x.masked_fill(part.past_end.unsqueeze(-1), 0)

    soft = target.is_floating_point()
    labels = _gather_rows(target, part.rows, size, per_class=soft)
    return clean(_gather_rows(values, part.rows, size, per_class=True)), clean(labels) if soft else labels


def _sums_of_blocks(
    values: Tensor, target: Tensor, scale: Tensor, part: _Blocks, from_logits: bool, kernel: Kernel
) -> Tensor:
    """Return the number of blocks, the sum of the block means and the sum of squared block means, `(..., 3)`."""
    q = spread_infinite_logits(values).softmax(-1) if from_logits else values
    if target.is_floating_point():
        r = target - q
    else:
        r = (-q).scatter_add(-1, target.unsqueeze(-1), torch.ones_like(q[..., :1]))
    x = q * scale[..., None, None, None]
    size = x.shape[-2]
    products = r @ r.mT
    products.diagonal(dim1=-2, dim2=-1).zero_()  # exclude the pairs i = j
    # The kernel matrix is symmetric, so its gradient is twice the gradient in its first argument.
    # 2 x - x.detach() has value x and derivative 2. This halves the cost of the backward pass.
    kernel_matrix = _kernel_matrix(2 * x - x.detach(), x.detach(), kernel)
    mean = (products * kernel_matrix).mean((-2, -1)) * (size / (size - 1))
    times = torch.ones_like(mean) if part.times is None else part.times
    sums = torch.stack([(times * h).sum(-1) for h in (torch.ones_like(mean), mean, mean.square())], -1)
    if part.n_uniform is not None:  # a block with copies of one row has kernel 1, so its mean is |r|^2
        mean = r[..., 0, :].square().sum(-1)
        powers = torch.ones_like(mean), mean, mean.square()
        sums = sums + torch.stack([(part.n_uniform * power).sum(-1) for power in powers], -1)
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
    """Compute `blocks`, with `chunk` blocks at a time."""
    sums = scale.new_zeros((*values.shape[:-2], 3))
    for part in _divide(copies, values.shape[-2], size, at_most_once, chunk):
        sums += _sums_of_blocks(*_gather_inputs(values, target, part, size), scale, part, from_logits, kernel)
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
    """Return the gradient in `values` for gradient `grads` in the sums. The blocks are computed again."""
    out = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    for part in _divide(copies, values.shape[-2], size, at_most_once, chunk):
        given, labels = _gather_inputs(values, target, part, size)
        of_values = partial(
            _sums_of_blocks, target=labels, scale=scale, part=part, from_logits=from_logits, kernel=kernel
        )
        pullback = torch.func.vjp(of_values, given)[1]
        found = pullback(grads)[0].flatten(-3, -2).to(out.dtype)
        if isinstance(part.rows, slice):
            out[..., part.rows, :] = found
        else:
            out.scatter_add_(-2, part.rows.flatten(-2).unsqueeze(-1).expand_as(found), found)
    return out


_block_sums.differentiate(_block_sums_backward)
