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

from torchcalib.ops.bin_sums import Noise, flatten_batch
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused, gradient_of, operation
from torchcalib.ops.smoothing import chunked
from torchcalib.ops.smoothing.formula import N_CELLS, cell_formula


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
    if index.numel():
        chunked.cells(confidence.reshape(-1), index.view(-1))
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


def _compute_sums(
    _: str, confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool
) -> Tensor:
    shape = (*confidence.shape[:-1], 5 + (noise != "none"), N_CELLS)
    sums = torch.zeros(shape, dtype=wide_dtype(confidence.device), device=confidence.device)
    if confidence.numel():
        p, y, w = flatten_batch(confidence.shape[-1], confidence, outcome, weights)
        chunked.sums(p, y, w, noise, copies, sums.view(-1, *shape[-2:]))  # type: ignore[arg-type]
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
    if confidence.numel():
        # Only the sums of p, p (1 - p) and p y are differentiated in p; the sampling variance is a constant.
        upstream = grads[..., (1, 3, -1), :].reshape(-1, 3, N_CELLS)
        p, y, w = flatten_batch(confidence.shape[-1], *arguments[:3])
        chunked.gradient(p, y, w, upstream, slopes.view(-1, slopes.shape[-1]))  # type: ignore[arg-type]
    return [slopes]


_sums = fused(_compute_sums, cell_formula, _gradient)
