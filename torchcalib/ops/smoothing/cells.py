"""Sums of events over cells, the sufficient statistic of the smooth calibration error for every kernel width.

The published procedure divides every sample between the two neighbouring nodes of a grid (linear rounding). A kernel
width is a multiple of 1 / 1024, and has a grid of m steps with the nodes i / m. Widths above 10 / 1024 share a grid of
1,000 steps. Each smaller width has its own grid.

A cell is an interval between neighbouring nodes of all grids. Within a cell, linear rounding is a linear function of
the confidence p. Only the sums of weight, residual and their products with p are needed. These sums are additive.

Source: Blasiok, Nakkiran: Smooth ECE: Principled reliability diagrams via kernel smoothing (ICLR 2024), and its code.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise, flatten_batch
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused, gradient_of, operation

LEVELS = 1024  # kernel widths are multiples of 1 / 1024, because the search for a width bisects [0, 1] ten times
FINEST = 2  # smallest width in 1024ths, because the published search ends at 0.001
COARSE_STEPS = 1000
WIDEST_OWN_GRID = 10  # largest width in 1024ths that has its own grid


def steps_of(width: float) -> int:
    """Return the number of grid steps for a kernel width, as published."""
    return max(2 * COARSE_STEPS, round(20 / width)) // 2


# Omit a grid if a finer grid contains all its nodes. An example is the grid for 8 / 1024, given the grid for 2 / 1024.
_OWN_STEPS = [steps_of(level / LEVELS) for level in range(FINEST, WIDEST_OWN_GRID + 1)]
GRIDS = [COARSE_STEPS, *(m for m in _OWN_STEPS if not any(other > m and other % m == 0 for other in _OWN_STEPS))]
N_CELLS = sum(GRIDS)
FINEST_STEPS = max(GRIDS)
_CPU_CHUNK = 2**13  # events per chunk on the CPU, which fit into its cache
_OTHER_CHUNK = 2**20  # events per chunk on other devices, which limits the memory


def cell_index(confidence: Tensor) -> Tensor:
    """Return the cell of every confidence, int64 in [0, `N_CELLS`): the number of grid nodes in (0, confidence].

    A node of several grids is counted once per grid, so cells between equal nodes stay empty. Rounding errors at a node
    do not matter, because linear rounding is continuous. NaN belongs to the first cell.
    """
    index: Tensor = _cell_index.direct(confidence.detach())
    return index


@operation(
    "smoothing_cells(Tensor confidence) -> Tensor",
    fake=lambda confidence: torch.empty_like(confidence, dtype=torch.int64),
)
def _cell_index(confidence: Tensor) -> Tensor:
    index = torch.empty(confidence.shape, dtype=torch.int64, device=confidence.device)
    size = _chunk_size(confidence)
    for values, part in zip(torch.split(confidence.reshape(-1), size), torch.split(index.view(-1), size), strict=True):
        part.copy_(_cells(values.to(wide_dtype(index.device))))
    return index


def smoothing_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None = None,
    *,
    noise: Noise = "none",
    copies: bool = True,
) -> Tensor:
    """Return the sums of w, w p, w y, w p (1 - p), sampling variance (optional) and w p y, `(..., F, N_CELLS)`.

    The arguments `(..., N)` are the confidence p, the outcome y and the weight w of events; `noise` and `copies` are
    those of `bin_sums.event_bins`. NaN in `confidence` is added to the first cell, whose sums are then NaN.

    Gradient: in `confidence`, `outcome` and `weights`, in reverse and forward mode and of any order. Cell indices and
    the sampling variance are constants. Events with weight 0 have gradient 0.
    """
    weights = None if weights is None else weights.to(wide_dtype(weights.device)).expand_as(confidence)
    sums: Tensor = _sums(confidence, outcome, weights, noise, copies)
    return sums


def cell_formula(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool) -> Tensor:
    """Return the result of `smoothing_sums` for tensors of equal shape, by differentiable operations."""
    wide = wide_dtype(confidence.device)
    columns = event_columns(confidence.to(wide), outcome.to(wide), weights, noise, copies)
    p = confidence.detach().to(wide).nan_to_num(0).clamp(0, 1)
    index = torch.stack([(p * m).long() for m in GRIDS]).sum(0).clamp(max=N_CELLS - 1)
    zeros = columns[0].new_zeros((*confidence.shape[:-1], N_CELLS))
    # Scatter the columns one by one, because stacking them first takes twice as long.
    return torch.stack([zeros.scatter_add(-1, index, column) for column in columns], -2)


def event_columns(p: Tensor, y: Tensor, weights: Tensor | None, noise: Noise, copies: bool) -> list[Tensor]:
    """Return the 5 or 6 terms of `smoothing_sums` for every event, `(..., N)` each; tensors have dtype `wide_dtype`."""
    if weights is not None:
        absent = weights == 0
        p, y, weights = p.masked_fill(absent, 0), y.masked_fill(absent, 0), weights.masked_fill(absent, 0)
    spread = p * (1 - p)
    columns = [torch.ones_like(p), p, y, spread, p * y]
    columns = columns if weights is None else [column * weights for column in columns]
    if noise != "none":
        variance = (y - p).square() if noise == "shares" else spread
        if weights is not None:
            variance = variance * (weights if copies else weights.square())
        columns.insert(4, variance.detach())
    return columns


def _compute_sums(
    _: str, confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool
) -> Tensor:
    shape, wide = (*confidence.shape[:-1], 5 + (noise != "none"), N_CELLS), wide_dtype(confidence.device)
    sums = torch.zeros(shape, dtype=wide, device=confidence.device)
    if not confidence.numel():
        return sums
    given = flatten_batch(confidence.shape[-1], confidence, outcome, weights)
    for element, totals in enumerate(sums.view(-1, *shape[-2:])):
        for p, y, w in _chunks(element, *given):
            index = _cells(p.to(wide))
            for total, column in zip(totals, event_columns(p.to(wide), y.to(wide), w, noise, copies), strict=True):
                total.scatter_add_(0, index, column)
    return sums


def _gradient(
    _: str,
    arguments: list[Any],
    results: tuple[Tensor, ...],  # noqa: ARG001
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradient in the confidence; if other gradients are needed, differentiate `cell_formula` instead."""
    if needed != [0]:
        return gradient_of(cell_formula, arguments, needed, grads)
    confidence = arguments[0]
    slopes = torch.empty(confidence.shape, dtype=confidence.dtype, device=confidence.device)
    if not confidence.numel():
        return [slopes]
    # Only the sums of p, p (1 - p) and p y are differentiated in p; the sampling variance is a constant.
    upstream = grads[..., (1, 3, -1), :].reshape(-1, 3, N_CELLS)
    given = flatten_batch(confidence.shape[-1], *arguments[:3], slopes)
    for element, grad_sums in enumerate(upstream):
        for p, y, w, into in _chunks(element, *given):
            p = p.to(upstream.dtype)
            grad_p, grad_spread, grad_product = grad_sums[:, _cells(p)]
            slope = grad_p + grad_spread * (1 - 2 * p) + grad_product * y
            into[:] = slope if w is None else (slope * w).masked_fill_(w == 0, 0)
    return [slopes]


def _chunks(element: int, *columns: Any) -> Iterator[list[Any]]:
    """Yield the events of one batch element in chunks, as columns `(n,)`."""
    size = _chunk_size(columns[0])
    for start in range(0, columns[0].shape[-1], size):
        yield [None if x is None else x[element, start : start + size] for x in columns]


def _cells(p: Tensor) -> Tensor:
    """Return the cell of every confidence: the sum of floor(p * steps) over all grids."""
    value = p.nan_to_num(0).clamp(0, 1)
    total = torch.zeros_like(value, dtype=torch.int32)
    scaled, truncated = torch.empty_like(value), torch.empty_like(total)
    for steps in GRIDS:  # conversion to int truncates, which is faster than `floor`
        total += truncated.copy_(torch.mul(value, steps, out=scaled))
    return total.clamp_(max=N_CELLS - 1).long()


def _chunk_size(confidence: Tensor) -> int:
    return _CPU_CHUNK if confidence.device.type == "cpu" else _OTHER_CHUNK


_sums = fused(_compute_sums, cell_formula, _gradient)
