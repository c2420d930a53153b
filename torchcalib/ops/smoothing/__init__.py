"""Smooth residuals with a reflected Gaussian kernel, and find the width that equals the error at this width.

Everything is computed from the sums of `cells`: they are rounded to the nodes of a grid, smoothed by a Fourier
transform, and read at equally spaced points.

Source: Blasiok, Nakkiran: Smooth ECE: Principled reliability diagrams via kernel smoothing (ICLR 2024), and its code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.operation import operation
from torchcalib.ops.smoothing.cells import COARSE_STEPS, COARSEST_OWN, FINEST, FINEST_STEPS, GRIDS, LEVELS, steps_of

_EPS = 1e-4  # added to every density
_FEWEST_POINTS = 200  # points at which the smoothed residual is evaluated; 10 / width for widths below 0.05


def smoothed_error(weight: Tensor, residual: Tensor, width: Tensor | float) -> Tensor:
    """Mean of the |smoothed residual|, weighted by the smoothed density.

    Args:
        weight: weight, and its product with the confidence, of every cell: `(..., 2, K)`, K = `N_CELLS`.
        residual: weighted confidence minus outcome, and its product with the confidence, `(..., 2, K)`.
        width: standard deviation of the kernel: a number from 2 / 1024 to 1, or for each series a multiple of 1 / 1024
            in that range `(...)`.

    Returns:
        `(...)`; NaN without data.

    Gradient: in the sums, in reverse and in forward mode; none in the width.
    """
    sums = torch.stack((residual, weight), -3)
    slopes: Tensor = _slopes(sums.detach(), *((width, 0.0) if isinstance(width, Tensor) else (None, width)))
    # With the sign of the residuals held constant, both sums are linear in the sums over the cells.
    distance, density = (slopes * sums).sum((-1, -2)).unbind(-1)
    value = distance / (density + _n_points(width) * _EPS)
    return value.masked_fill(weight[..., 0, :].sum(-1) == 0, torch.nan)


def best_width(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the smallest width k / 1024 that is at least the error at this width `(...)`.

    By ten bisections of [0, 1], as published. The arguments are those of `smoothed_error`.

    Gradient: none.
    """
    width: Tensor = _best_width(torch.stack((residual, weight), -3).detach())
    return width


@operation(
    "smoothed_slopes(Tensor sums, Tensor? width, float at) -> Tensor",
    fake=lambda sums, width, at: torch.empty_like(sums),  # noqa: ARG005
)
def _slopes(sums: Tensor, width: Tensor | None, at: float) -> Tensor:
    """Return the gradient in the sums `(..., 2, 2, K)` of the |residuals| and densities, each summed over the points.

    Args:
        sums: of residual and weight, alone and times the confidence, `(..., 2, 2, K)`.
        width: see `smoothed_error`; None for `at`.
        at: the width of all series.
    """
    if width is not None:
        return _Candidates(sums).read(_slopes_on_grid, (width * LEVELS).round().long())
    grid = _Grid(_spectrum(_at_nodes(sums, _steps_for(at))), torch.full_like(sums[..., 0, 0, 0], at), _n_points(at))
    return _slopes_on_grid(grid)


@operation("best_width(Tensor sums) -> Tensor", fake=lambda sums: sums.new_empty(sums.shape[:-3]))
def _best_width(sums: Tensor) -> Tensor:
    candidates = _Candidates(sums)
    low = torch.zeros(sums.shape[:-3], dtype=torch.int64, device=sums.device)
    high = torch.full_like(low, LEVELS)
    for _ in range(int(math.log2(LEVELS))):
        middle = (low + high) // 2
        reached = (middle < FINEST) | (middle / LEVELS < candidates.read(_error_on_grid, middle))
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return high.to(sums.dtype) / LEVELS


class _Candidates:
    """The same samples at several widths; the spectra, which do not depend on the width, are computed once.

    On the CPU only the grids of the given widths are computed. Elsewhere all are, because the host would have to
    synchronise to know the widths.
    """

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums
        self._spectra: dict[int, Tensor] = {}

    def read(self, read: Callable[["_Grid"], Tensor], level: Tensor) -> Tensor:
        """Apply `read` to every series at its width in 1024ths, int64 `(...)`; return `(..., *)`."""
        on_own = (level >= FINEST) & (level <= COARSEST_OWN)
        value = None
        if level.device.type != "cpu" or not level.numel() or not on_own.all():
            width = level.clamp(min=COARSEST_OWN + 1).to(self._sums.dtype) / LEVELS
            value = read(self._grid(COARSE_STEPS, width, _n_points((COARSEST_OWN + 1) / LEVELS)))
        for own in range(FINEST, COARSEST_OWN + 1):
            chosen = level == own
            if level.device.type == "cpu" and not chosen.any():
                continue
            width = torch.full_like(level, own, dtype=self._sums.dtype) / LEVELS
            at_own = read(self._grid(steps_of(own / LEVELS), width, _n_points(own / LEVELS)))
            chosen = chosen.reshape(level.shape + (1,) * (at_own.dim() - level.dim()))
            value = at_own if value is None else torch.where(chosen, at_own, value)
        assert value is not None  # every width has a grid
        return value

    def _grid(self, steps: int, width: Tensor, most_points: int) -> "_Grid":
        if steps not in self._spectra:
            self._spectra[steps] = _spectrum(_at_nodes(self._sums, steps))
        return _Grid(self._spectra[steps], width, most_points)


@dataclass(frozen=True)
class _Grid:
    """Samples on a grid, and the width of the kernel.

    Attributes:
        spectrum: Fourier transform of residual and weight at the nodes `(..., 2, m + 1)`.
        width: `(...)`.
        most_points: largest number of points of a series.
    """

    spectrum: Tensor
    width: Tensor
    most_points: int

    @property
    def steps(self) -> int:
        """Steps of the grid, m."""
        return self.spectrum.shape[-1] - 1

    def kernel(self) -> Tensor:
        """Fourier transform of the kernel `(..., 1, m + 1)`."""
        return _transform(_kernel(self.steps, self.width.unsqueeze(-1))).unsqueeze(-2)

    def points(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return node below, distance to it in steps, and existence of equally spaced points, `(..., 1, P)` each.

        A series has fewer points than others if its width is larger.
        """
        point = torch.arange(self.most_points, dtype=self.width.dtype, device=self.width.device)
        last = _n_points(self.width).unsqueeze(-1) - 1
        place = (point / last).clamp(max=1) * self.steps
        node = place.long().clamp(max=self.steps - 1)
        return node.unsqueeze(-2), (place - node).unsqueeze(-2), (point <= last).unsqueeze(-2)

    def at_points(self) -> Tensor:
        """Return smoothed residual and density at the points `(..., 2, P)`; 0 at points that do not exist."""
        m = self.steps
        smoothed = _inverse(self.spectrum * self.kernel())[..., : m + 1]
        node, above, is_point = self.points()
        node = node.expand(*smoothed.shape[:-1], -1)
        value: Tensor = smoothed.gather(-1, node) * (1 - above) + smoothed.gather(-1, node + 1) * above
        return value.masked_fill(~is_point, 0)


def _error_on_grid(grid: _Grid) -> Tensor:
    """Mean of |smoothed residual| over the points, weighted by the smoothed density, `(...)`."""
    residual, density = grid.at_points().unbind(-2)
    return residual.abs().sum(-1) / (density.sum(-1) + _n_points(grid.width) * _EPS)


def _slopes_on_grid(grid: _Grid) -> Tensor:
    """See `_slopes`: the transposed steps of the smoothing in reverse order."""
    m = grid.steps
    residual, density = grid.at_points().unbind(-2)
    node, above, is_point = grid.points()
    of_points = torch.stack((residual.sign(), torch.ones_like(density)), -2).masked_fill(~is_point, 0)
    node = node.expand(of_points.shape)
    of_smoothed = of_points.new_zeros((*of_points.shape[:-1], 2 * m))
    of_smoothed = of_smoothed.scatter_add(-1, node, of_points * (1 - above)).scatter_add(
        -1, node + 1, of_points * above
    )
    of_reflected = _inverse(_transform(of_smoothed) * grid.kernel().conj())
    of_nodes = of_reflected[..., : m + 1] + pad(of_reflected[..., m + 1 :].flip(-1), (1, 1))
    below = _node_below(m, of_nodes.device)
    lower, upper = of_nodes[..., below], of_nodes[..., below + 1]
    return torch.stack((lower + below * (lower - upper), m * (upper - lower)), -2)


@overload
def _n_points(width: float) -> int: ...


@overload
def _n_points(width: Tensor) -> Tensor: ...


def _n_points(width: Tensor | float) -> Tensor | int:
    """Return the number of points; Python and torch both round half to even."""
    if isinstance(width, Tensor):
        return (10 / width).round().clamp(min=_FEWEST_POINTS)
    return max(round(10 / width), _FEWEST_POINTS)


def _steps_for(width: float) -> int:
    """Return the steps of the grid for a width: as published, or the finest grid if the cells lack that one."""
    steps = steps_of(width)
    return steps if any(own % steps == 0 for own in GRIDS) else FINEST_STEPS


def _at_nodes(sums: Tensor, steps: int) -> Tensor:
    """Round linearly to the nodes i / steps: a sample at f between nodes b and b + 1 adds f steps - b to the upper one.

    Args:
        sums: of every cell, alone and times the confidence: `(..., 2, K)`.
        steps: a number of steps of which all nodes are borders of cells.

    Returns:
        `(..., steps + 1)`.
    """
    below = _node_below(steps, sums.device)
    alone, by_confidence = sums.unbind(-2)
    upper = by_confidence * steps - alone * below
    at_nodes = sums.new_zeros((*alone.shape[:-1], steps + 1))
    index = below.expand(alone.shape)
    return at_nodes.scatter_add(-1, index, alone - upper).scatter_add(-1, index + 1, upper)


def _node_below(steps: int, device: torch.device) -> Tensor:
    """Return the node of a grid below every cell, int64 `(K,)`."""
    return torch.from_numpy(_nodes_below(steps)).to(device)


@cache
def _nodes_below(steps: int) -> NDArray[np.int64]:
    nodes = np.sort(np.concatenate([np.arange(1, m + 1) / m for m in GRIDS]))
    middles = (nodes + np.concatenate(([0.0], nodes[:-1]))) / 2
    return np.minimum((middles * steps).astype(np.int64), steps - 1)


def _spectrum(at_nodes: Tensor) -> Tensor:
    """Fourier transform of `(..., m + 1)` nodes, reflected at both ends: a function of period 2 m."""
    return _transform(torch.cat((at_nodes, at_nodes[..., 1:-1].flip(-1)), -1))


def _transform(x: Tensor) -> Tensor:
    """Fourier transform of real numbers `(..., 2 m)`: `(..., m + 1)`.

    This and the next two functions use numpy on the CPU: torch divides even one short transform among threads, and
    elementwise functions from 2,048 numbers on. On busy cores the threads wait for each other.
    """
    if x.device.type == "cpu":
        return torch.from_numpy(np.fft.rfft(x.numpy()))
    spectrum: Tensor = torch.fft.rfft(x)
    return spectrum


def _inverse(spectrum: Tensor) -> Tensor:
    """Return the inverse of `_transform`."""
    n = 2 * (spectrum.shape[-1] - 1)
    if spectrum.device.type == "cpu":
        return torch.from_numpy(np.fft.irfft(spectrum.resolve_conj().numpy(), n))
    x: Tensor = torch.fft.irfft(spectrum, n=n)
    return x


def _exp(x: Tensor) -> Tensor:
    return torch.from_numpy(np.exp(x.numpy())) if x.device.type == "cpu" else x.exp()


def _kernel(m: int, width: Tensor) -> Tensor:
    """Density of N(0, width^2) at the offsets between nodes, within 1/2: `(..., 2 m)`, in the order of a transform.

    As published, the offsets of a grid with an odd number of steps are half a step off.
    """
    place = torch.arange(2 * m, dtype=width.dtype, device=width.device)
    before = (m + 1) // 2
    offset = torch.where(place <= m - before, place, place - 2 * m)
    distance = ((offset + before) / m - 0.5) / width
    density = _exp(-distance.square() / 2) / (math.sqrt(2 * math.pi) * width)
    return density * (offset >= -before)
