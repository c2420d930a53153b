"""Sums over cells in plain torch: their definition, and computation in chunks that fit into the cache of a CPU.

A kernel width is a multiple of 1 / 1024, and has a grid of m steps with the nodes i / m. With weight w, confidence p
and outcome y, a cell has the sums of w, w p, w y, w p (1 - p) and w p y.
"""

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.logs import wide_dtype

_CPU_CHUNK = 2**13  # events per chunk on the CPU
_OTHER_CHUNK = 2**20  # events per chunk on other devices, which limits the memory
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


def cell_of(confidence: Tensor) -> Tensor:
    """Return the cell of every confidence p, the number of nodes in (0, p]: the sum of floor(p m) over the grids."""
    p = confidence.detach().to(wide_dtype(confidence.device)).nan_to_num(0).clamp(0, 1)
    return torch.stack([(p * m).long() for m in GRIDS]).sum(0).clamp(max=N_CELLS - 1)


def cell_formula(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool) -> Tensor:
    """Return the result of `cells.smoothing_sums` for tensors of equal shape."""
    wide = wide_dtype(confidence.device)
    columns = event_columns(confidence.to(wide), outcome.to(wide), weights, noise, copies)
    index, zeros = cell_of(confidence), columns[0].new_zeros((*confidence.shape[:-1], N_CELLS))
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


def cells(confidence: Tensor, index: Tensor) -> None:
    """Fill `index`, int64 `(N,)`, with the cell of every confidence `(N,)`, as defined in `cells.cell_index`."""
    size = _chunk_size(confidence)
    for values, part in zip(torch.split(confidence, size), torch.split(index, size), strict=True):
        part.copy_(_cells(values.to(wide_dtype(index.device))))


def sums(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool, into: Tensor) -> None:
    """Fill `into`, zeros `(S, 5 or 6, K)`, with the result of `cells.smoothing_sums` for S batch elements `(S, N)`."""
    size = _chunk_size(confidence)
    for element, totals in enumerate(into):
        for start in range(0, confidence.shape[-1], size):
            part = element, slice(start, start + size)
            p, y = confidence[part].to(into.dtype), outcome[part].to(into.dtype)
            columns = event_columns(p, y, None if weights is None else weights[part], noise, copies)
            index = _cells(p)
            for total, column in zip(totals, columns, strict=True):
                total.scatter_add_(0, index, column)


def gradient(confidence: Tensor, outcome: Tensor, weights: Tensor | None, upstream: Tensor, slopes: Tensor) -> None:
    """Fill `slopes` `(S, N)` with the gradient in the confidence p.

    `upstream` are the incoming gradients in the sums of p, p (1 - p) and p y, `(S, 3, K)`.
    """
    size = _chunk_size(confidence)
    for element, grad_sums in enumerate(upstream):
        for start in range(0, confidence.shape[-1], size):
            part = element, slice(start, start + size)
            p = confidence[part].to(upstream.dtype)
            grad_p, grad_spread, grad_product = grad_sums[:, _cells(p)]
            slope = grad_p + grad_spread * (1 - 2 * p) + grad_product * outcome[part]
            if weights is not None:
                slope = (slope * weights[part]).masked_fill_(weights[part] == 0, 0)
            slopes[part] = slope


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
