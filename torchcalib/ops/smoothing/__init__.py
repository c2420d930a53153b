"""Smooth calibration error (smECE): residuals smoothed by a reflected Gaussian kernel, and choice of the kernel width.

Algorithm:

1. Divide the cell sums of `cells` among the nodes of a grid, by linear rounding.
2. Convolve residual and density with the kernel by the fast Fourier transform (FFT).
3. Average |residual| over equally spaced points.

Source: Blasiok, Nakkiran: Smooth ECE: Principled reliability diagrams via kernel smoothing (ICLR 2024), and its code.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.ops.operation import operation
from torchcalib.ops.smoothing.cells import (
    COARSE_STEPS,
    FINEST,
    FINEST_STEPS,
    GRIDS,
    LEVELS,
    WIDEST_OWN_GRID,
    steps_of,
)

_EPS = 1e-4  # added to every density, as published
_MIN_POINTS = 200  # smallest number of evaluation points; for widths below 0.05 the number is 10 / width


def smoothed_error(weight: Tensor, residual: Tensor, width: Tensor | float) -> Tensor:
    """Return the sum of |smoothed residual| over the sum of the smoothed density, `(...)`; NaN without data.

    For every cell, `weight` `(..., 2, K)` has the sums of w and w p, and `residual` those of w (p - y) and w (p - y) p.
    The standard deviation `width` of the kernel is in [2 / 1024, 1]; in a tensor, a multiple of 1 / 1024.

    Gradient: in `weight` and `residual`, in reverse and forward mode; none in `width`.
    """
    sums = torch.stack((residual, weight), -3)
    slopes: Tensor = _slopes(sums.detach(), *((width, 0.0) if isinstance(width, Tensor) else (None, width)))
    # With constant signs of the smoothed residuals, numerator and denominator are linear in the cell sums.
    distance, density = (slopes * sums).sum((-1, -2)).unbind(-1)
    value = distance / (density + _n_points(width) * _EPS)
    return value.masked_fill(weight[..., 0, :].sum(-1) == 0, torch.nan)


def smoothed_frequency(weight: Tensor, outcome: Tensor, width: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return points in [0, 1] `(P,)`, the kernel regression of the outcomes there, and the density of the confidence.

    The regression `(..., P)` is NaN where no data are within reach of the kernel. For every cell, `weight`
    `(..., 2, K)` has the sums of w and w p. `outcome` has those of w y and w y p. There is no gradient.
    """
    sums = torch.stack((outcome, weight), -3).detach()
    spectrum = _spectrum(_node_sums(sums, _steps_for(width)))
    n_points = _n_points(width)
    smoothed = _Grid(spectrum, torch.full_like(sums[..., 0, 0, 0], width), n_points).at_points()
    at_points, density = smoothed.unbind(-2)
    # The transform has absolute errors of about eps times the largest value, so smaller densities are noise.
    is_reached = density > 1e-9 * density.amax(-1, keepdim=True)
    frequency = (at_points / density.masked_fill(~is_reached, 1)).clamp(0, 1).masked_fill(~is_reached, torch.nan)
    total = weight[..., 0, :].sum(-1, keepdim=True)
    points = torch.linspace(0, 1, n_points, dtype=density.dtype, device=density.device)
    return points, frequency, (density / total).clamp(min=0)


def errors_of_replicates(confidence: Tensor, weight: Tensor, residual: Tensor, width: float | None = None) -> Tensor:
    """Return the smoothed error `(R, E)` of R replicates of the residuals; None selects `best_width`.

    Replicates with equal kernel width share the kernel and the smoothed density. Selecting them by their widths
    synchronises a GPU. `confidence` and `weight` are `(E, M)`, and the weighted residuals `(R, E, M)`. There is no
    gradient.
    """
    error = _ReplicateErrors(confidence, weight, residual)
    if width is not None:
        return error.at(torch.full_like(residual[..., 0], width))

    def error_at_level(level: Tensor) -> Tensor:
        return error.at(level.clamp(min=FINEST).to(residual.dtype) / LEVELS)

    start = torch.zeros_like(residual[..., 0], dtype=torch.int64)
    return _search(error_at_level, start, error_at_level(start + LEVELS))[1]


def best_width(weight: Tensor, residual: Tensor) -> Tensor:
    """Return the smallest kernel width k / 1024 that is at least the smoothed error at this width, `(...)`.

    The width is found by ten bisections of [0, 1], as in the published code.
    """
    width: Tensor = _best_width(torch.stack((residual, weight), -3).detach())
    return width


@operation(
    "smoothed_slopes(Tensor sums, Tensor? width, float at) -> Tensor",
    fake=lambda sums, width, at: torch.empty_like(sums),  # noqa: ARG005
)
def _slopes(sums: Tensor, width: Tensor | None, at: float) -> Tensor:
    """Return the gradients in `sums` of two sums over the evaluation points: |residual| and density, `(..., 2, 2, K)`.

    Axis -3 of `sums` is residual and weight; axis -2 is without and with factor p. Without `width`, `at` is the width.
    """
    if width is not None:
        return _Candidates(sums).evaluate(_slopes_on_grid, (width * LEVELS).round().long())
    grid = _Grid(_spectrum(_node_sums(sums, _steps_for(at))), torch.full_like(sums[..., 0, 0, 0], at), _n_points(at))
    return _slopes_on_grid(grid)


@operation("best_width(Tensor sums) -> Tensor", fake=lambda sums: sums.new_empty(sums.shape[:-3]))
def _best_width(sums: Tensor) -> Tensor:
    """Return `best_width` from stacked cell sums, as for `_slopes`."""
    error = partial(_Candidates(sums).evaluate, _error_on_grid)
    start = torch.zeros(sums.shape[:-3], dtype=torch.int64, device=sums.device)
    level, _ = _search(error, start, torch.zeros_like(start, dtype=sums.dtype))
    return level.to(sums.dtype) / LEVELS


def _search(error: Callable[[Tensor], Tensor], low: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best widths in 1024ths and their errors, for zeros `low` and the errors `value` at the width 1."""
    high = torch.full_like(low, LEVELS)
    # Invariant: the width `low` is below its error or 0, and the width `high` is at least its error or 1.
    for _ in range(int(math.log2(LEVELS))):
        middle = (low + high) // 2
        found = error(middle)
        reached = (middle < FINEST) | (middle / LEVELS < found)
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
        value = torch.where(reached, value, found)
    return high, value


class _ReplicateErrors:
    """Smoothed errors of replicates; see `errors_of_replicates`."""

    def __init__(self, confidence: Tensor, weight: Tensor, residual: Tensor) -> None:
        self._confidence, self._weight, self._residual = confidence, weight, residual
        # Spectra on the coarse grid are real, because the reflected values are symmetric.
        self._spectra = [self._spectrum(x, confidence, COARSE_STEPS).real.contiguous() for x in (residual, weight)]
        self._cosines: dict[int, Tensor] = {}  # by number of points, shared by all widths from 0.05

    def at(self, width: Tensor) -> Tensor:
        """Return the errors `(R, E)` at the widths `(R, E)`."""
        value = torch.empty_like(width)
        on_host = width.cpu()  # one copy, so that the choices below do not synchronise the device
        for shared in on_host.unique().tolist():  # type: ignore[no-untyped-call]
            chosen = (on_host == shared).nonzero().T.to(width.device, non_blocking=True).unbind()
            on_grid = self._on_coarse_grid if _steps_for(shared) == COARSE_STEPS else self._on_own_grid
            distance, density = on_grid(shared, chosen)
            value[chosen] = distance / (density[chosen[1]] + _n_points(shared) * _EPS)
        return value.masked_fill(self._weight.sum(-1) == 0, torch.nan)

    def _on_coarse_grid(self, width: float, chosen: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the sums over the points of |residual| of the chosen replicates `(r)`, and of the density `(E)`.

        Convolution, inverse transform and interpolation are one matrix, frequencies x points. It has only the
        frequencies that the kernel passes, which are few if the kernel is wide and not cut off at 1/2.
        """
        # 1. Spectrum of the kernel, and its last frequency that float64 distinguishes from 0.
        kernel = _transform(_kernel(COARSE_STEPS, torch.tensor([width], dtype=self._weight.dtype, device="cpu"))).real
        passes = kernel.abs() > torch.finfo(kernel.dtype).eps * kernel.abs().amax()
        n = int(passes.nonzero().amax()) + 1
        kernel = kernel[:n].unsqueeze(-1).to(self._weight.device, non_blocking=True)
        frequency = torch.arange(n, device=kernel.device).unsqueeze(-1)
        # 2. Factors of the inverse transform. Frequencies except the first and the last occur twice, with both signs.
        kernel = kernel * torch.where(frequency % COARSE_STEPS == 0, 1, 2) / (2 * COARSE_STEPS)
        # 3. Cosines of all frequencies at the points, by linear interpolation between the nodes as in `at_points`.
        n_points = _n_points(width)
        if len(self._cosines.get(n_points, ())) < n:
            node, above, _ = _Grid(self._spectra[1], self._weight.new_full((), width), n_points).points()
            phase = frequency.to(kernel.dtype) * (torch.pi / COARSE_STEPS)
            self._cosines[n_points] = (phase * node).cos() * (1 - above) + (phase * (node + 1)).cos() * above
        matrix = kernel * self._cosines[n_points][:n]
        residual, weight = (spectrum[..., :n] for spectrum in self._spectra)
        return (residual[chosen] @ matrix).abs().sum(-1), weight @ matrix.sum(-1)

    def _on_own_grid(self, width: float, chosen: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return the sums of `_on_coarse_grid` for a small width, by Fourier transforms."""

        def smoothed(x: Tensor, confidence: Tensor) -> Tensor:
            spectrum = self._spectrum(x, confidence, _steps_for(width))
            return _Grid(spectrum, x.new_full((), width), _n_points(width)).at_points()

        distance = smoothed(self._residual[chosen], self._confidence[chosen[1]]).abs().sum(-1)
        return distance, smoothed(self._weight, self._confidence).sum(-1)

    @staticmethod
    def _spectrum(x: Tensor, confidence: Tensor, steps: int) -> Tensor:
        below = (confidence * steps).long().clamp(max=steps - 1)
        return _spectrum(_node_sums(torch.stack((x, x * confidence), -2), steps, below))


class _Candidates:
    """Evaluation of cell sums at several kernel widths, with one Fourier transform per grid."""

    def __init__(self, sums: Tensor) -> None:
        self._sums = sums
        self._spectra: dict[int, Tensor] = {}

    def evaluate(self, evaluate: Callable[["_Grid"], Tensor], level: Tensor) -> Tensor:
        """Return `evaluate(grid)`, `(..., *)`, on the grid of each batch element for its width level / 1024."""
        # On the CPU only the grids for the given widths are computed. Elsewhere all are, to avoid a synchronisation.
        has_own_grid = (level >= FINEST) & (level <= WIDEST_OWN_GRID)
        value = None
        if level.device.type != "cpu" or not level.numel() or not has_own_grid.all():
            width = level.clamp(min=WIDEST_OWN_GRID + 1).to(self._sums.dtype) / LEVELS
            value = evaluate(self._grid(COARSE_STEPS, width, _n_points((WIDEST_OWN_GRID + 1) / LEVELS)))
        for own_level in range(FINEST, WIDEST_OWN_GRID + 1):
            chosen = level == own_level
            if level.device.type == "cpu" and not chosen.any():
                continue
            width = torch.full_like(level, own_level, dtype=self._sums.dtype) / LEVELS
            own_value = evaluate(self._grid(steps_of(own_level / LEVELS), width, _n_points(own_level / LEVELS)))
            chosen = chosen.reshape(level.shape + (1,) * (own_value.dim() - level.dim()))
            value = own_value if value is None else torch.where(chosen, own_value, value)
        assert value is not None  # every width uses its own grid or the coarse grid
        return value

    def _grid(self, steps: int, width: Tensor, most_points: int) -> "_Grid":
        if steps not in self._spectra:
            self._spectra[steps] = _spectrum(_node_sums(self._sums, steps))
        return _Grid(self._spectra[steps], width, most_points)


@dataclass(frozen=True)
class _Grid:
    """Residual and weight on a grid of m steps, and the kernel width."""

    spectrum: Tensor  # Fourier transform of residual and weight at the nodes of the grid, `(..., 2, m + 1)`
    width: Tensor  # kernel width `(...)`
    most_points: int  # largest number of evaluation points of a batch element, P

    @property
    def steps(self) -> int:
        """Number of steps m between the nodes 0 and 1 of the grid."""
        return self.spectrum.shape[-1] - 1

    def kernel(self) -> Tensor:
        """Return the Fourier transform of the kernel, `(..., 1, m + 1)`."""
        return _transform(_kernel(self.steps, self.width.unsqueeze(-1))).unsqueeze(-2)

    def points(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return node below, distance in steps, and presence of points, which larger widths have fewer of."""
        point = torch.arange(self.most_points, dtype=self.width.dtype, device=self.width.device)
        last = _n_points(self.width).unsqueeze(-1) - 1
        place = (point / last).clamp(max=1) * self.steps
        node = place.long().clamp(max=self.steps - 1)
        return node.unsqueeze(-2), (place - node).unsqueeze(-2), (point <= last).unsqueeze(-2)

    def at_points(self) -> Tensor:
        """Return smoothed residual and density at the evaluation points, `(..., 2, P)`; 0 at missing points."""
        # Convolution theorem, for the reflected values of period 2 m. Only the nodes 0 to m are needed.
        m = self.steps
        smoothed = _inverse(self.spectrum * self.kernel())[..., : m + 1]
        node, above, is_point = self.points()
        node = node.expand(*smoothed.shape[:-1], -1)
        value: Tensor = smoothed.gather(-1, node) * (1 - above) + smoothed.gather(-1, node + 1) * above
        return value.masked_fill(~is_point, 0)


def _error_on_grid(grid: _Grid) -> Tensor:
    """Return the sum of |residual| divided by the sum of the density, over the evaluation points, `(...)`."""
    residual, density = grid.at_points().unbind(-2)
    return residual.abs().sum(-1) / (density.sum(-1) + _n_points(grid.width) * _EPS)


def _slopes_on_grid(grid: _Grid) -> Tensor:
    """Return `_slopes` for one grid, by the transposed steps of the smoothing in reverse order."""
    # The smoothing is linear in the cell sums: rounding to nodes, convolution, and interpolation at the points.
    m = grid.steps
    residual, density = grid.at_points().unbind(-2)
    node, above, is_point = grid.points()
    # 1. Gradients in the smoothed residual and density at the evaluation points.
    grad_points = torch.stack((residual.sign(), torch.ones_like(density)), -2).masked_fill(~is_point, 0)
    node = node.expand(grad_points.shape)
    # 2. Transpose of the linear interpolation between nodes.
    grad_smoothed = grad_points.new_zeros((*grad_points.shape[:-1], 2 * m))
    grad_smoothed = grad_smoothed.scatter_add(-1, node, grad_points * (1 - above)).scatter_add(
        -1, node + 1, grad_points * above
    )
    # 3. Transpose of the convolution: multiply by the conjugate spectrum of the kernel. Then add the reflected half.
    grad_reflected = _inverse(_transform(grad_smoothed) * grid.kernel().conj())
    grad_nodes = grad_reflected[..., : m + 1] + pad(grad_reflected[..., m + 1 :].flip(-1), (1, 1))
    # 4. Transpose of the linear rounding of samples to nodes.
    below = _node_below(m, grad_nodes.device)
    lower, upper = grad_nodes[..., below], grad_nodes[..., below + 1]
    return torch.stack((lower + below * (lower - upper), m * (upper - lower)), -2)


@overload
def _n_points(width: float) -> int: ...


@overload
def _n_points(width: Tensor) -> Tensor: ...


def _n_points(width: Tensor | float) -> Tensor | int:
    """Return the number of evaluation points: 10 / width, rounded half to even, but at least `_MIN_POINTS`."""
    if isinstance(width, Tensor):
        return (10 / width).round().clamp(min=_MIN_POINTS)
    return max(round(10 / width), _MIN_POINTS)


def _steps_for(width: float) -> int:
    """Return the published number of grid steps for a width, or `FINEST_STEPS` if its nodes are not cell edges."""
    steps = steps_of(width)
    return steps if any(grid % steps == 0 for grid in GRIDS) else FINEST_STEPS


def _node_sums(sums: Tensor, steps: int, below: Tensor | None = None) -> Tensor:
    """Round cell sums of z and z p `(..., 2, K)` linearly to the nodes i / steps of a grid, `(..., steps + 1)`.

    Let p be the confidence of a sample between nodes b and b + 1, and u = p steps - b. A fraction u of its weight (or
    weighted residual) z is added to the upper node, and 1 - u to the lower node. `below` is the node b of every cell,
    by default for the cells of `cells`. All nodes must be edges of cells.
    """
    below = _node_below(steps, sums.device) if below is None else below
    alone, by_confidence = sums.unbind(-2)
    upper = by_confidence * steps - alone * below
    at_nodes = sums.new_zeros((*alone.shape[:-1], steps + 1))
    index = below.expand(alone.shape)
    return at_nodes.scatter_add(-1, index, alone - upper).scatter_add(-1, index + 1, upper)


def _node_below(steps: int, device: torch.device) -> Tensor:
    """Return the index of the grid node at or below the start of every cell, int64 `(K,)`."""
    return torch.from_numpy(_nodes_below(steps)).to(device, non_blocking=True)


@cache
def _nodes_below(steps: int) -> NDArray[np.int64]:
    """Return `_node_below` as an array, by rounding the middle of every cell down to a node."""
    nodes = np.sort(np.concatenate([np.arange(1, m + 1) / m for m in GRIDS]))
    middles = (nodes + np.concatenate(([0.0], nodes[:-1]))) / 2
    return np.minimum((middles * steps).astype(np.int64), steps - 1)


def _spectrum(at_nodes: Tensor) -> Tensor:
    """Return the Fourier transform of values at m + 1 nodes, `(..., m + 1)`, after reflection to a period of 2 m."""
    return _transform(torch.cat((at_nodes, at_nodes[..., 1:-1].flip(-1)), -1))


def _transform(x: Tensor) -> Tensor:
    """Return the Fourier transform `(..., m + 1)` of real numbers `(..., 2 m)`."""
    # By numpy on the CPU: torch splits even a short transform among threads, which is slow on busy cores.
    if x.device.type == "cpu":
        return torch.from_numpy(np.fft.rfft(x.numpy()))
    spectrum: Tensor = torch.fft.rfft(x)
    return spectrum


def _inverse(spectrum: Tensor) -> Tensor:
    n = 2 * (spectrum.shape[-1] - 1)
    if spectrum.device.type == "cpu":
        return torch.from_numpy(np.fft.irfft(spectrum.resolve_conj().numpy(), n))
    x: Tensor = torch.fft.irfft(spectrum, n=n)
    return x


def _kernel(m: int, width: Tensor) -> Tensor:
    """Return the density of N(0, width^2) at multiples of 1 / m in [-1/2, 1/2], in FFT order, `(..., 2 m)`."""
    # If m is odd, these points are shifted by half a step, because the published code has this error.
    place = torch.arange(2 * m, dtype=width.dtype, device=width.device)
    half = (m + 1) // 2
    offset = torch.where(place <= m - half, place, place - 2 * m)
    distance = ((offset + half) / m - 0.5) / width
    power = -distance.square() / 2
    # By numpy on the CPU, because torch would split it among threads.
    density = torch.from_numpy(np.exp(power.numpy())) if power.device.type == "cpu" else power.exp()
    density = density / (math.sqrt(2 * math.pi) * width)
    return density * (offset >= -half)
