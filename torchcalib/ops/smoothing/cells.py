"""Cells between the nodes of the smoothing grids, and sums of the events in each cell.

The published procedure rounds every sample linearly to the nodes of a grid whose step depends on the kernel width. The
widths are multiples of 1/1024: from 0.01 on they share a grid of 1,000 steps, below each has its own. Linear rounding
is linear in the confidence between two nodes. So it needs only four sums over each cell between neighbouring nodes of
all grids: weight and residual, each also times the confidence. The sums are additive, and every width uses them.

Source: Blasiok, Nakkiran: Smooth ECE: Principled reliability diagrams via kernel smoothing (ICLR 2024), and its code.
"""

from typing import Any

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused, gradient_of, operation

LEVELS = 1024  # widths are multiples of 1 / LEVELS: ten halvings of [0, 1]
FINEST = 2  # smallest width in 1024ths: the published search stops above 0.001
COARSE_STEPS = 1000
COARSEST_OWN = 10  # widths up to this many 1024ths have grids of their own


def steps_of(width: float) -> int:
    """Return the number of steps of the grid of a width."""
    return max(2 * COARSE_STEPS, round(20 / width)) // 2


# A grid whose nodes all belong to a finer one is left out: 8 / 1024 has every fourth node of 2 / 1024.
_OWN = [steps_of(level / LEVELS) for level in range(FINEST, COARSEST_OWN + 1)]
GRIDS = [COARSE_STEPS, *(m for m in _OWN if not any(other > m and other % m == 0 for other in _OWN))]
N_CELLS = sum(GRIDS)
FINEST_STEPS = max(GRIDS)


def cell_index(confidence: Tensor, backend: Backend = "auto") -> Tensor:
    """Return the cell of every confidence in [0, 1]: the number of grid nodes in (0, confidence].

    A node of several grids counts for each of them, which leaves some cells empty. A confidence that rounding moves to
    the other side of a node adds the same to the nodes, since linear rounding is continuous.

    Args:
        confidence: floating, of any shape; NaN belongs to the first cell.
        backend: see `dispatch`.

    Returns:
        int64 in 0 to `N_CELLS` - 1.
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
    """Sum 1, p, y, p (1 - p), the noise if wanted, and p y over the events of each cell: confidence p, outcome y.

    Args:
        confidence: `(..., N)` in [0, 1], floating. NaN belongs to the first cell and makes its sums NaN.
        outcome: `(..., N)` of any real dtype.
        weights: broadcastable to `(..., N)`, or None for all ones. Events of weight 0 are ignored.
        noise: sum the variances of the outcomes, too; see `event_bins`, whose second sum of noise it is.
        copies: whether weights are numbers of copies.
        backend: see `dispatch`.

    Returns:
        `(..., 5, K)`, or `(..., 6, K)` with noise, K = `N_CELLS`, in the dtype of sums.

    Gradient: in confidence, outcome and weights, in every mode and of any order; cell and noise are constants, and so
    is an event of weight 0.
    """
    weights = None if weights is None else weights.to(wide_dtype(weights.device)).expand_as(confidence)
    sums: Tensor = _sums(confidence, outcome, weights, noise, copies, backend=backend)
    return sums


def _fast(
    backend: Backend, confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool
) -> Tensor:
    shape = (*confidence.shape[:-1], 5 + (noise != "none"), N_CELLS)
    sums = torch.zeros(shape, dtype=wide_dtype(confidence.device), device=confidence.device)
    if confidence.numel():
        source = source_of("smoothing", confidence.device.type, confidence.dtype, backend)
        series = _by_series(confidence, outcome, weights)
        source.sums(*series, noise, copies, sums.view(-1, *shape[-2:]))
    return sums


def _formula(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool) -> Tensor:
    wide = wide_dtype(confidence.device)
    columns = event_columns(confidence.to(wide), outcome.to(wide), weights, noise, copies)
    index, zeros = cell_index(confidence), columns[0].new_zeros((*confidence.shape[:-1], N_CELLS))
    # One column at a time: one scatter of all would copy them into one tensor, at twice the time.
    return torch.stack([zeros.scatter_add(-1, index, column) for column in columns], -2)


def _gradient(
    backend: Backend,
    arguments: list[Any],
    results: tuple[Tensor, ...],  # noqa: ARG001
    needed: list[int],
    grads: Tensor,
) -> list[Tensor]:
    """Return the gradient in the confidence, from those in the sums of p, p (1 - p) and p y; others by the formula."""
    if needed != [0]:
        return gradient_of(_formula, arguments, needed, grads)
    confidence = arguments[0]
    slopes = torch.empty(confidence.shape, dtype=confidence.dtype, device=confidence.device)
    if confidence.numel():
        source = source_of("smoothing", confidence.device.type, confidence.dtype, backend)
        upstream = grads[..., (1, 3, -1), :].reshape(-1, 3, N_CELLS)
        source.gradient(*_by_series(*arguments[:3]), upstream, slopes.view(-1, slopes.shape[-1]))
    return [slopes]


def _by_series(*columns: Tensor | None) -> list[Tensor | None]:
    """Return columns `(..., N)` as `(S, N)`."""
    return [None if x is None else x.detach().reshape(-1, x.shape[-1]) for x in columns]


_sums = fused(_fast, _formula, _gradient)


def event_columns(p: Tensor, y: Tensor, weights: Tensor | None, noise: Noise, copies: bool) -> list[Tensor]:
    """Return the summands of every event; see `smoothing_sums`. All arguments have the dtype of sums."""
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
