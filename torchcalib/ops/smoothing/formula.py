"""Definition of the sums over cells, in differentiable torch operations.

A kernel width is a multiple of 1 / 1024, and has a grid of m steps with the nodes i / m. With weight w, confidence p
and outcome y, a cell has the sums of w, w p, w y, w p (1 - p) and w p y.
"""

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.logs import wide_dtype

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
