"""Sums of events over cells, the sufficient statistic of the smooth calibration error for every kernel width.

The published procedure divides every sample between the two neighbouring nodes of a grid (linear rounding). The number
of grid steps depends on the kernel width, a multiple of 1/1024. Widths above 10/1024 share a grid of 1,000 steps. Each
smaller width has its own grid.

A cell is an interval between neighbouring nodes of all grids. Within a cell, linear rounding is a linear function of
the confidence p. Only the sums of weight, residual and their products with p are needed. These sums are additive.

Source: Blasiok, Nakkiran: Smooth ECE: Principled reliability diagrams via kernel smoothing (ICLR 2024), and its code.
"""

from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.dispatch import Backend, source_of
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


def cell_index(confidence: Tensor, backend: Backend = "auto") -> Tensor:
    """Return the cell of every confidence: the number of grid nodes in (0, confidence].

    A node of several grids is counted once per grid, so cells between equal nodes stay empty. Rounding errors at a node
    do not matter, because linear rounding is continuous.

    Args:
        confidence: floating in [0, 1], of any shape; NaN belongs to the first cell.
        backend: implementation, see `dispatch.choose`.

    Returns:
        Index of the cell, int64 in [0, `N_CELLS`), of the same shape.
    """
    index: Tensor = _cell_index.direct(confidence.detach(), backend)
    return index


@operation(
    "smoothing_cells(Tensor confidence, str backend) -> Tensor",
    fake=lambda confidence, backend: torch.empty_like(confidence, dtype=torch.int64),  # noqa: ARG005
)
def _cell_index(confidence: Tensor, backend: Backend) -> Tensor:
    index = torch.empty(confidence.shape, dtype=torch.int64, device=confidence.device)
    if index.numel():
        source = source_of("smoothing", confidence.device.type, confidence.dtype, backend)
        source.cells(confidence.reshape(-1), index.view(-1))
    return index


def smoothing_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None = None,
    *,
    noise: Noise = "none",
    copies: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Sum w, w p, w y, w p (1 - p), sampling variance (optional) and w p y over the events of every cell.

    Args:
        confidence: confidence p, floating `(..., N)` in [0, 1]. NaN is added to the first cell; its sums are then NaN.
        outcome: outcome y, `(..., N)` of any real dtype.
        weights: weight w, broadcastable to `(..., N)`, or None for all ones. Events with weight 0 are ignored.
        noise: "labels" or "shares" to add the sampling variance: the sum of w v for frequency weights, and of w^2 v
            for other weights. `bin_sums.event_bins` defines v.
        copies: whether weights are frequency weights (numbers of copies of an event).
        backend: implementation, see `dispatch.choose`.

    Returns:
        Sums `(..., 5, K)`, or `(..., 6, K)` with noise, of dtype `wide_dtype`, for K = `N_CELLS` cells.

    Gradient: in `confidence`, `outcome` and `weights`, in reverse and forward mode and of any order. Cell indices and
        the sampling variance are constants. Events with weight 0 have gradient 0.
    """
    weights = None if weights is None else weights.to(wide_dtype(weights.device)).expand_as(confidence)
    sums: Tensor = _sums(confidence, outcome, weights, noise, copies, backend=backend)
    return sums


def _compute_sums(
    backend: Backend, confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool
) -> Tensor:
    shape = (*confidence.shape[:-1], 5 + (noise != "none"), N_CELLS)
    sums = torch.zeros(shape, dtype=wide_dtype(confidence.device), device=confidence.device)
    if confidence.numel():
        source = source_of("smoothing", confidence.device.type, confidence.dtype, backend)
        flattened = _flatten_batch(confidence, outcome, weights)
        source.sums(*flattened, noise, copies, sums.view(-1, *shape[-2:]))
    return sums


def _formula(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool) -> Tensor:
    wide = wide_dtype(confidence.device)
    columns = event_columns(confidence.to(wide), outcome.to(wide), weights, noise, copies)
    index, zeros = cell_index(confidence), columns[0].new_zeros((*confidence.shape[:-1], N_CELLS))
    # Scatter the columns one by one, because stacking them first takes twice as long.
    return torch.stack([zeros.scatter_add(-1, index, column) for column in columns], -2)


def _gradient(
    backend: Backend,
    arguments: list[Any],
    results: tuple[Tensor, ...],  # noqa: ARG001
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradient in the confidence; if other gradients are needed, differentiate `_formula` instead."""
    if needed != [0]:
        return gradient_of(_formula, arguments, needed, grads)
    confidence = arguments[0]
    slopes = torch.empty(confidence.shape, dtype=confidence.dtype, device=confidence.device)
    if confidence.numel():
        source = source_of("smoothing", confidence.device.type, confidence.dtype, backend)
        # Only the sums of p, p (1 - p) and p y are differentiated in p; the sampling variance is a constant.
        upstream = grads[..., (1, 3, -1), :].reshape(-1, 3, N_CELLS)
        source.gradient(*_flatten_batch(*arguments[:3]), upstream, slopes.view(-1, slopes.shape[-1]))
    return [slopes]


def _flatten_batch(*columns: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.detach().reshape(-1, x.shape[-1]) for x in columns]


_sums = fused(_compute_sums, _formula, _gradient)


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
