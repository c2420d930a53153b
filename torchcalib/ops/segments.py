"""Bin indices, sums over bins and over runs of consecutive samples, and selection of rows that have a weight."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import is_plain

BELOW_EDGE = 1 - 1e-6  # float32 numbers below BELOW_EDGE / B are in the first of B bins, despite rounding errors
LEAST_WEIGHT, MOST_WEIGHT = 1e-150, 1e150  # bounds of weights that are not 0; sums of squares are then finite
COMPILED_WEIGHTS = tuple(map(np.dtype, ("float32", "float64", "int64")))  # dtypes that compiled loops read as they are
_FEW_REMOVED = 2**6  # largest number of removed rows between which copying runs of rows is fastest


def bin_index(values: Tensor, n_bins: int, right: bool = False) -> Tensor:
    """Return the index of the equal-width bin of every value in [0, 1], int64; arbitrary for NaN.

    Bins are `[i/B, (i+1)/B)`, and the last one is closed. With `right` they are `(i/B, (i+1)/B]`, and the first one is
    closed. Edges `i / n_bins` and values are compared in float64. All other code with bins follows this rule.

    Rounding errors of `values * n_bins` change its floor by at most one bin. Two comparisons with the edges correct it,
    which is faster than a binary search, except on a GPU.
    """
    wide = values.detach().to(wide_dtype(values.device))
    if not values.is_cpu:
        return torch.bucketize(wide.contiguous(), equal_width_edges(n_bins, wide)[1:-1], right=not right)
    scaled = wide * n_bins
    index = (scaled.ceil() - 1 if right else scaled.floor()).clamp(0, n_bins - 1)
    lower, upper = index / n_bins, (index + 1) / n_bins
    step = (wide > upper).long() - (wide <= lower).long() if right else (wide >= upper).long() - (wide < lower).long()
    # The clamp assigns 1 to the last bin, or with `right` 0 to the first bin, and gives NaN a valid index.
    return (index.long() + step).clamp(0, n_bins - 1)


def with_same_batch(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Expand the leading axes of tensors `(..., N_i)` to their broadcast shape.

    The first call of `torch.broadcast_shapes` imports sympy, which takes as long as the import of numba.
    """
    # Lists, because each step of a generator expression is a Python call.
    batch = torch.broadcast_tensors(*[t[..., :1] for t in tensors])[0].shape[:-1]  # type: ignore[no-untyped-call]
    return tuple([t.expand(*batch, t.shape[-1]) for t in tensors])


def equal_width_edges(n_bins: int, like: Tensor) -> Tensor:
    """Return the edges `i / n_bins` of equal-width bins `(n_bins + 1,)`, with the dtype and device of `like`."""
    return torch.arange(n_bins + 1, dtype=like.dtype, device=like.device) / n_bins


def cell_sums(index: Tensor, columns: Tensor, n_cells: int) -> Tensor:
    """Sum F columns `(..., F, N)` over the samples of every cell `(..., N)`, giving `(..., F, K)`.

    Gradient: in `columns`; each sample gets the gradient of its cell.
    """
    into = columns.new_zeros((*columns.shape[:-1], n_cells))
    return into.scatter_add(-1, index.unsqueeze(-2).expand(columns.shape), columns)


def bin_sums(index: Tensor, columns: Sequence[Tensor], n_bins: int) -> Tensor:
    """Sum F broadcastable columns `(..., N)` over the samples of every bin, `(..., F, B)`; see `cell_sums`."""
    return cell_sums(index, torch.stack(torch.broadcast_tensors(*columns), dim=-2), n_bins)  # type: ignore[no-untyped-call]


_MAX_SUMS = 256  # number of sums F B per replicate above which `scatter_add` is faster than a matrix product
_IN_MEMORY = 2**22  # largest number of elements in the second factor of the matrix product
_AT_ONCE = 2**20  # largest number of products of weights and columns that `scatter_add` sums at once


def bin_sums_of_replicates(
    index: Tensor, columns: Sequence[Tensor], weights: Tensor, n_bins: int, finite: bool = False
) -> Tensor:
    """Sum F columns over the samples of every bin, for R replicate weights, `(R, ..., F, B)`.

    The sums are a matrix product for many replicates. They use `bin_sums` for few replicates or very many bins. Columns
    `(..., N)` may be infinite where a weight is 0, but not NaN; `finite` states that none is, which is faster. The
    middle axes of `weights` `(R, ..., N)` broadcast.
    """
    stacked = torch.stack(torch.broadcast_tensors(*columns), dim=-2)  # type: ignore[no-untyped-call]
    *lead, n_columns, n = stacked.shape
    weights = weights.expand(len(weights), *lead, n)
    # A product with a dense matrix does F B multiplications for each sample and replicate, but `scatter_add` only F.
    # The product uses vector instructions, so it is faster for few sums and many replicates.
    if n_columns * n_bins > _MAX_SUMS or len(weights) <= n_bins:
        at_once = max(1, _AT_ONCE // max(1, stacked.numel()))
        products = ((w * stacked).masked_fill_(w == 0, 0) for w in torch.split(weights.unsqueeze(-2), at_once))
        return torch.cat([cell_sums(index, product, n_bins) for product in products])
    # Multiply the weights by a matrix (N, F B). Its row of a sample contains the F columns at the bin, 0 elsewhere.
    rows = weights.movedim(0, -2)
    bins = torch.arange(n_bins, device=index.device)
    total = rows.new_zeros(*lead, rows.shape[-2], n_columns * n_bins)
    width = max(1, _IN_MEMORY // (n_columns * n_bins * max(1, math.prod(lead))))
    for start in range(0, n, width):
        part = slice(start, start + width)
        inside = (index[..., part].unsqueeze(-1) == bins).unsqueeze(-2)
        table = torch.where(inside, stacked[..., part].transpose(-1, -2).unsqueeze(-1), 0).flatten(-2)
        total = total + weighted_sums(rows[..., part], table, finite)
    return total.movedim(-2, 0).reshape(len(weights), *lead, n_columns, n_bins)


def weighted_sums(weights: Tensor, table: Tensor, finite: bool = False) -> Tensor:
    """Return the matrix product `weights @ table`, `(..., R, N)` times `(..., N, K)`, with 0 * inf = 0.

    `finite` states that the table has no infinities, which is faster. Otherwise weights must not be negative.
    """
    if finite or (table.is_cpu and value_if_available(table.isfinite().all())):
        return weights @ table.mT.contiguous().mT  # faster for a table of few columns
    # Sum the finite entries. Then add infinity where an infinite entry has positive weight.
    infinite = (table == torch.inf, table == -torch.inf)
    total = weights @ table.masked_fill(infinite[0] | infinite[1], 0)
    for where, value in zip(infinite, (torch.inf, -torch.inf), strict=True):
        total = torch.where(weights @ where.to(weights) > 0, total + value, total)
    return total


def run_index(ends: Tensor, length: int) -> Tensor:
    """Return the index of the run of each element, `(..., length)`, for run ends `(..., B)`; B after the last run."""
    # Count the runs that end at or before the element. A cumulative count is faster than a search.
    counts = torch.zeros((*ends.shape[:-1], length + 1), dtype=ends.dtype, device=ends.device)
    return counts.scatter_add(-1, ends, torch.ones_like(ends)).cumsum(-1)[..., :-1]


def run_sums(x: Tensor, ends: Tensor) -> Tensor:
    """Sum `x` `(..., M)` over runs of consecutive elements, `(..., B)` of dtype `wide_dtype`; 0 for an empty run.

    Run b is `x[ends[b - 1]:ends[b]]`, and run 0 is `x[:ends[0]]`. `ends` `(..., B)` do not decrease and are at most M.

    Gradient: in `x`, in forward and reverse mode, of any order.
    """
    if x.device.type == "cpu" and is_plain(x, ends):
        return _run_sums_numpy(x, ends)
    # Elements after the last run can be infinite, and are summed in an additional run.
    wide = wide_dtype(x.device)
    sums = torch.zeros((*ends.shape[:-1], ends.shape[-1] + 1), dtype=wide, device=x.device)
    return sums.scatter_add(-1, run_index(ends, x.shape[-1]), x.to(wide))[..., :-1]


def _run_sums_numpy(x: Tensor, ends: Tensor) -> Tensor:
    """Compute `run_sums` by one call of `np.add.reduceat`, without empty runs, whose result would not be 0."""
    # `reduceat` sums from each index to the next one, or returns the element at the index if they are equal. So only
    # runs that are not empty are passed.
    values, stops = [t.reshape(ends.shape[:-1].numel(), t.shape[-1]).numpy() for t in (x, ends)]
    begins = np.concatenate((np.zeros_like(stops[:, :1]), stops), -1)  # last run: elements after `stops`
    not_empty = np.diff(begins, append=x.shape[-1]) > 0
    places = (begins + x.shape[-1] * np.arange(len(begins))[:, None])[not_empty]
    sums = np.zeros(begins.shape)
    if places.size:
        sums[not_empty] = np.add.reduceat(values.ravel(), places, dtype=sums.dtype)
    return torch.from_numpy(sums[:, :-1].reshape(ends.shape))


def kept(keep: Any, places: Any, *columns: Any) -> Sequence[Any]:
    """Return the places, None for all, and the entries of columns where `keep` is True.

    A key that all rows share has another length.
    """
    rows = np.flatnonzero(keep)
    n_removed = len(keep) - len(rows)
    if not n_removed:
        return places, *columns
    places = rows if places is None else places[rows]
    if n_removed > _FEW_REMOVED:
        return places, *(x if x is None or len(x) != len(keep) else x.take(rows, 0) for x in columns)
    runs = [slice(begin + 1, end) for begin, end in pairwise([-1, *np.flatnonzero(~keep).tolist(), len(keep)])]
    copies = (x if x is None or len(x) != len(keep) else np.concatenate([x[run] for run in runs]) for x in columns)
    return places, *copies


def with_weight(weights: Any, places: Any, *columns: Any) -> Sequence[Any] | None:
    """Return the weights as float64, places and entries of columns in the rows whose weight is not 0.

    Return None if a weight is invalid.
    """
    if len(weights):
        least = weights.min().item()  # NaN if a weight is NaN
        if not (least >= 0 and (weights.dtype.kind != "f" or weights.max().item() <= MOST_WEIGHT)):
            return None
        if least < LEAST_WEIGHT:
            places, weights, *columns = kept(weights != 0, places, weights, *columns)  # type: ignore[assignment]
            if len(weights) and weights.min().item() < LEAST_WEIGHT:
                return None
    return weights.astype(np.float64, copy=False), places, *columns
