"""Residuals smoothed by a reflected Gaussian kernel on a grid, and the width at which their mean equals that width.

The published procedure rounds every sample linearly to the nodes of a grid, whose step follows from the width that is
tried. Its widths are multiples of 1/1024: from 0.01 on they share a grid of 1,000 steps, and each below has its own.
Rounding is linear between nodes, so it needs no more than four sums over each cell that the nodes of all grids
together leave: of weight and residual, each also times the confidence. They are taken once, and add.
"""

import math

import torch
from torch import Tensor

from torchcalib.kernels.looking import look
from torchcalib.kernels.operation import operation

LEVELS = 1024  # widths are multiples of 1 / LEVELS: ten halvings of [0, 1]
_EPS = 1e-4  # added to every density
_FEWEST_POINTS = 200  # at which the smoothed residual is looked at; 10 / width for less than 0.05

FINEST = 2  # widths in 1024ths: the published search stops above 0.001
_COARSE_STEPS = 1000
_COARSEST_OWN = 10  # widths up to this many 1024ths have grids of their own


def steps_of(width: float) -> int:
    """Return how many steps the grid of a width has."""
    return max(2 * _COARSE_STEPS, round(20 / width)) // 2


# Every grid, but for those whose nodes are among another's: that of 8 / 1024 has every fourth node of that of 2 / 1024.
_OWN = [steps_of(level / LEVELS) for level in range(FINEST, _COARSEST_OWN + 1)]
GRIDS = [_COARSE_STEPS, *(m for m in _OWN if not any(other > m and other % m == 0 for other in _OWN))]
N_CELLS = sum(GRIDS)
FINEST_STEPS = max(GRIDS)


def _middles() -> Tensor:
    """Return the middle of every cell `(K,)`."""
    nodes = torch.cat([torch.arange(1, steps + 1, dtype=torch.float64) / steps for steps in GRIDS]).sort().values
    return (nodes + torch.cat((nodes.new_zeros(1), nodes[:-1]))) / 2


_MIDDLE = _middles()


def cell_index(confidence: Tensor) -> Tensor:
    """Return the cell of every confidence in [0, 1]: how many nodes of the grids lie at it or below, 0 not counted.

    A node that several grids share counts for each, and so leaves cells that are empty. A confidence that rounding puts
    on the wrong side of a node adds the same to the nodes, for what it adds is continuous.

    Args:
        confidence: floating, of any shape; NaN goes to the first cell.

    Returns:
        int64 in 0 to `N_CELLS` - 1.
    """
    value = confidence.detach()
    total = torch.zeros_like(value)
    for steps in GRIDS:
        total = total + (value * steps).floor()
    return total.nan_to_num(0).clamp(0, N_CELLS - 1).long()


def smoothed_error(weight: Tensor, residual: Tensor, width: Tensor | float) -> Tensor:
    """Mean of the |smoothed residual|, weighed by the smoothed density.

    Args:
        weight: weight, and its product with the confidence, of every cell: `(..., 2, K)`, K = `N_CELLS`.
        residual: weighed confidence less outcome, and its product with the confidence, `(..., 2, K)`.
        width: standard deviation of the kernel: a number from 2 / 1024 to 1, or for each series a multiple of 1 / 1024
            in that range `(...)`.

    Returns:
        `(...)`; NaN without data.

    Gradient: in the sums; none in the width.
    """
    sums = torch.stack((residual, weight), -3)
    value = _error_at(sums, width) if isinstance(width, float) else _Candidates(sums)((width * LEVELS).round().long())
    return value.masked_fill(weight[..., 0, :].sum(-1) == 0, torch.nan)


@operation(
    "best_width(Tensor weight, Tensor residual) -> Tensor",
    fake=lambda weight, residual: weight.new_empty(weight.shape[:-2]),  # noqa: ARG005
)
def _best_width(weight: Tensor, residual: Tensor) -> Tensor:
    errors = _Candidates(torch.stack((residual, weight), -3).detach())
    low = torch.zeros(weight.shape[:-2], dtype=torch.int64, device=weight.device)
    high = torch.full_like(low, LEVELS)
    for _ in range(int(math.log2(LEVELS))):
        middle = (low + high) // 2
        reached = (middle < FINEST) | (middle / LEVELS < errors(middle))
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return high.to(weight.dtype) / LEVELS


def best_width(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the first of the widths k / 1024 that is not below the error at this width `(...)`.

    By ten halvings of [0, 1], as published. The arguments are those of `smoothed_error`.

    Gradient: none.
    """
    width: Tensor = _best_width(weight.detach(), residual.detach())
    return width


class _Candidates:
    """Errors of the same samples at one width after another; what depends on the samples alone is computed once.

    On the CPU grids of their own are made for the widths that are asked for. Elsewhere the host would have to wait to
    learn which these are, and each has its grid from the start.
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums
        self._spectrum = _spectrum(_at_nodes(sums, _COARSE_STEPS))
        self._own: dict[int, Tensor] = {}

    def __call__(self, level: Tensor) -> Tensor:
        """Return the error of every series at its width, in 1024ths: int64 `(...)` to `(...)`."""
        value = self._on_shared_grid(level.clamp(min=_COARSEST_OWN + 1))
        for own in range(FINEST, _COARSEST_OWN + 1):
            chosen = level == own
            if level.device.type == "cpu" and look(chosen.any()) is False:
                continue
            if own not in self._own:
                self._own[own] = _error_at(self._sums, own / LEVELS)
            value = torch.where(chosen, self._own[own], value)
        return value

    def _on_shared_grid(self, level: Tensor) -> Tensor:
        width = level.to(self._sums.dtype) / LEVELS
        n_points = (10 / width).round().clamp(min=_FEWEST_POINTS)
        return _error(self._spectrum, width, n_points, _points_of((_COARSEST_OWN + 1) / LEVELS))


def _error_at(sums: Tensor, width: float) -> Tensor:
    """Error of every series at one width; `sums (..., 2, 2, K)` are residual and weight, alone and by confidence."""
    n_points = _points_of(width)
    at = torch.full((), width, dtype=sums.dtype, device=sums.device)
    return _error(_spectrum(_at_nodes(sums, _steps_for(width))), at, torch.full_like(at, n_points), n_points)


def _steps_for(width: float) -> int:
    """Steps of the grid for a width: as published, or where the cells do not know that grid, the finest there is."""
    steps = steps_of(width)
    return steps if any(own % steps == 0 for own in GRIDS) else FINEST_STEPS


def _points_of(width: float) -> int:
    return max(round(10 / width), _FEWEST_POINTS)


def _at_nodes(sums: Tensor, steps: int) -> Tensor:
    """Round linearly to the nodes i / steps: a sample at f between nodes b and b + 1 adds f steps - b to the upper one.

    Args:
        sums: of every cell, alone and times the confidence: `(..., 2, K)`.
        steps: a number of steps of which all nodes are borders of cells.

    Returns:
        `(..., steps + 1)`.
    """
    middle = _MIDDLE.to(sums)
    below = (middle * steps).floor().clamp(max=steps - 1).long()
    alone, by_confidence = sums.unbind(-2)
    upper = by_confidence * steps - alone * below
    at_nodes = sums.new_zeros((*alone.shape[:-1], steps + 1))
    index = below.expand(alone.shape)
    return at_nodes.scatter_add(-1, index, alone - upper).scatter_add(-1, index + 1, upper)


def _spectrum(at_nodes: Tensor) -> Tensor:
    """Fourier transform of `(..., m + 1)` nodes, reflected at both ends: a function of period 2 m."""
    spectrum: Tensor = torch.fft.rfft(torch.cat((at_nodes, at_nodes[..., 1:-1].flip(-1)), -1))
    return spectrum


def _error(spectrum: Tensor, width: Tensor, n_points: Tensor, most_points: int) -> Tensor:
    """Mean of |smoothed residual| at equally spaced points, weighed by the smoothed density.

    Args:
        spectrum: of residual and weight at the nodes `(..., 2, m + 1)`.
        width: broadcastable to `(...)`.
        n_points: how many points, of the shape of `width`.
        most_points: the largest of them.

    Returns:
        `(...)`.
    """
    m = spectrum.shape[-1] - 1
    of_kernel = torch.fft.rfft(_kernel(m, width.unsqueeze(-1)))
    smoothed = torch.fft.irfft(spectrum * of_kernel.unsqueeze(-2), n=2 * m)[..., : m + 1]
    point = torch.arange(most_points, dtype=smoothed.dtype, device=smoothed.device)
    last = n_points.unsqueeze(-1) - 1
    place = (point / last).clamp(max=1) * m
    node = place.floor().clamp(max=m - 1)
    above = (place - node).unsqueeze(-2)
    index = node.long().expand(*smoothed.shape[:-2], most_points).unsqueeze(-2).expand(*smoothed.shape[:-1], -1)
    value = smoothed.gather(-1, index) * (1 - above) + smoothed.gather(-1, index + 1) * above
    residual, density = value.masked_fill((point > last).unsqueeze(-2), 0).unbind(-2)
    error: Tensor = residual.abs().sum(-1) / (density.sum(-1) + n_points * _EPS)
    return error


def _kernel(m: int, width: Tensor) -> Tensor:
    """Density of N(0, width^2) at the offsets between nodes, within 1/2: `(..., 2 m)`, in the order of a transform.

    As published, the offsets of a grid with an odd number of steps are half a step off.
    """
    place = torch.arange(2 * m, dtype=width.dtype, device=width.device)
    before = (m + 1) // 2
    offset = torch.where(place <= m - before, place, place - 2 * m)
    distance = ((offset + before) / m - 0.5) / width
    density = torch.exp(-distance.square() / 2) / (math.sqrt(2 * math.pi) * width)
    return density * (offset >= -before)
