"""Bin indices and sums over bins and cells, in plain torch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcalib.ops.logs import wide_dtype

BELOW_EDGE = 1 - 1e-6  # a float32 below this multiple of 1/B is in the first bin, despite rounding


def bin_index(values: Tensor, n_bins: int, right: bool = False) -> Tensor:
    """Return the equal-width bin of every value in [0, 1]: int64, the shape of `values`.

    The edge rule of the package: edges are `i / n_bins` computed in float64 and compared with the value widened to
    float64. Bins are `[i/B, (i+1)/B)`, and the last one is closed. With `right` they are `(i/B, (i+1)/B]`, and the
    first one is closed.

    `values * n_bins` is off by less than one unit in the last place, so its floor is the bin or a neighbour. Two
    comparisons with the edges correct it. A binary search gives the same at ten times the cost.
    """
    wide = values.detach().to(wide_dtype(values.device))
    scaled = wide * n_bins
    index = (scaled.ceil() - 1 if right else scaled.floor()).clamp(0, n_bins - 1)
    lower, upper = index / n_bins, (index + 1) / n_bins
    step = (wide > upper).long() - (wide <= lower).long() if right else (wide >= upper).long() - (wide < lower).long()
    # The outer clamp closes the bin at the end of the range, and puts NaN into some bin.
    return (index.long() + step).clamp(0, n_bins - 1)


def cell_sums(index: Tensor, columns: Tensor, n_cells: int) -> Tensor:
    """Sum columns over the samples of every cell.

    Args:
        index: cell of every sample, int64 `(..., N)`.
        columns: F columns with one index, `(..., F, N)`.
        n_cells: K.

    Returns:
        `(..., F, K)` in the columns' dtype. Gradient: the value of a cell flows to its samples.
    """
    into = columns.new_zeros((*columns.shape[:-1], n_cells))
    return into.scatter_add(-1, index.unsqueeze(-2).expand(columns.shape), columns)


def bin_sums(index: Tensor, columns: Sequence[Tensor], n_bins: int) -> Tensor:
    """Sum each of F columns `(..., N)`, which may be broadcast, over the samples of every bin; see `cell_sums`."""
    return cell_sums(index, torch.stack(torch.broadcast_tensors(*columns), dim=-2), n_bins)  # type: ignore[no-untyped-call]


_MOST_SUMS = 256  # for more sums a matrix product costs more than scatter_add
_IN_MEMORY = 2**22  # elements of the matrix


def bin_sums_of_replicates(
    index: Tensor, columns: Sequence[Tensor], weights: Tensor, n_bins: int, finite: bool = False
) -> Tensor:
    """Sum every column over the samples of every bin, under R replicate weights.

    For many replicates this is a matrix product; for few replicates or very many bins it is R times `bin_sums`.

    Args:
        index: bin of every sample, int64 `(..., N)`.
        columns: F tensors `(..., N)` of the wide dtype. They may be infinite where a weight is 0, but not NaN.
        weights: `(R, ..., N)` of the wide dtype, its middle axes broadcastable.
        n_bins: B.
        finite: whether all columns are finite, which saves work.

    Returns:
        `(R, ..., F, B)`.
    """
    stacked = torch.stack(torch.broadcast_tensors(*columns), dim=-2)  # type: ignore[no-untyped-call]
    *lead, n_columns, n = stacked.shape
    weights = weights.expand(len(weights), *lead, n)
    if n_columns * n_bins > _MOST_SUMS or len(weights) <= n_bins:  # the matrix has n_bins entries for each sample
        weighed = [(weights * c).masked_fill(weights == 0, 0) for c in stacked.unbind(-2)]
        return bin_sums(index, weighed, n_bins)
    rows = weights.movedim(0, -2)
    bins = torch.arange(n_bins, device=index.device)
    total = rows.new_zeros(*lead, rows.shape[-2], n_columns * n_bins)
    width = max(1, _IN_MEMORY // (n_columns * n_bins * max(1, math.prod(lead))))
    for start in range(0, n, width):
        part = slice(start, start + width)
        inside = (index[..., part].unsqueeze(-1) == bins).unsqueeze(-2)
        table = torch.where(inside, stacked[..., part].transpose(-1, -2).unsqueeze(-1), 0).flatten(-2)
        total = total + weighed_sums(rows[..., part], table, finite)
    return total.movedim(-2, 0).reshape(len(weights), *lead, n_columns, n_bins)


def weighed_sums(weights: Tensor, table: Tensor, finite: bool = False) -> Tensor:
    """Return the product of weights `(..., R, N)` and a table `(..., N, K)`, with 0 times infinity as 0.

    With `finite` the table must have no infinite entry, which saves work.
    """
    if finite:
        return weights @ table
    infinite = (table == torch.inf, table == -torch.inf)
    total = weights @ table.masked_fill(infinite[0] | infinite[1], 0)
    for where, value in zip(infinite, (torch.inf, -torch.inf), strict=True):
        total = torch.where(weights @ where.to(weights) > 0, total + value, total)
    return total
