"""Cell indices and cell sums for smoothing by compiled loops. Only `dispatch` imports this module, at first use.

Results do not depend on the number of threads. The division into pieces depends only on the number of events, and the
sums of the pieces are added in order.
"""

import numpy as np
from torch import Tensor

from torchcalib.ops.bin_sums.numba import columns_of
from torchcalib.ops.numba_math import BLOCK, compiled_loop, step
from torchcalib.ops.smoothing.formula import GRIDS, N_CELLS
from torchcalib.ops.threads import in_threads

_PIECE = 2**16  # events per piece in functions that return one value per event
_PER_CELL = 16  # smallest mean number of events per cell in a piece; with fewer, adding the pieces is slow
_PIECES = 16  # largest number of pieces of a batch element
_STEPS = tuple(float(steps) for steps in GRIDS)
_LAST = np.int32(N_CELLS - 1)


@step
def _cells(confidence, out):
    """Fill `out` with the cell of every confidence p: the sum of floor(p * steps) over all grids."""
    a, b, c, d, e, f, g = _STEPS  # unrolled, because numba does not vectorise a loop over the grids
    for i in range(confidence.size):
        p = min(max(0.0, np.float64(confidence[i])), 1.0)
        total = np.int32(p * a) + np.int32(p * b) + np.int32(p * c) + np.int32(p * d)
        total += np.int32(p * e) + np.int32(p * f) + np.int32(p * g)
        out[i] = min(np.int32(total), _LAST)


@compiled_loop
def _fill_cells(confidence, index):
    block = np.empty(BLOCK, np.int32)
    for start in range(0, confidence.size, BLOCK):
        values = confidence[start : start + BLOCK]
        _cells(values, block)
        for i in range(values.size):
            index[start + i] = block[i]


@compiled_loop
def _sums(confidence, outcome, weights, noise, sums):
    """Add events to the `smoothing_sums` of their cells; outcomes and `noise` as for `bin_sums.numba.add_events`."""
    # There are thousands of cells, so consecutive events seldom wait for each other, unlike in `add_events`.
    product_row = len(sums) - 1
    cells = np.empty(BLOCK, np.int32)
    w = 1.0
    for start in range(0, confidence.size, BLOCK):
        values = confidence[start : start + BLOCK]
        _cells(values, cells)
        for i in range(values.size):
            if weights is not None:
                w = weights[start + i]
                if w == 0:
                    continue
            k = np.uintp(cells[i])  # unsigned: numba omits the test for negative indices
            p, y = np.float64(values[i]), np.float64(outcome[start + i])
            spread = p * (1.0 - p)
            sums[0, k] += w
            sums[1, k] += w * p
            sums[2, k] += w * y
            sums[3, k] += w * spread
            if noise is not None:
                variance = (y - p) ** 2 if noise[0] else spread
                sums[4, k] += w * variance * (w if noise[1] else 1.0)
            sums[product_row, k] += w * (p * y)


@compiled_loop
def _gradient(confidence, outcome, weights, upstream, slopes):
    cells = np.empty(BLOCK, np.int32)
    w = 1.0
    for start in range(0, confidence.size, BLOCK):
        values = confidence[start : start + BLOCK]
        _cells(values, cells)
        for i in range(values.size):
            if weights is not None:
                w = weights[start + i]
            k = np.uintp(cells[i])
            p, y = np.float64(values[i]), np.float64(outcome[start + i])
            slope = upstream[0, k] + upstream[1, k] * (1.0 - 2.0 * p) + upstream[2, k] * y
            slopes[start + i] = w * slope if w != 0 else 0.0


def cells(confidence: Tensor, index: Tensor) -> None:
    """Fill `index` with the cell of every confidence; shapes as for `chunked.cells`."""
    starts = range(0, len(index), _PIECE)

    def fill(begin: int, end: int) -> None:
        for start in starts[begin:end]:
            block = slice(start, start + _PIECE)
            _fill_cells(*columns_of(confidence[block]), index[block].numpy())

    in_threads(fill, len(starts), len(index))


def sums(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: str, copies: bool, into: Tensor) -> None:
    """Fill `into` with the cell sums; arguments as for `chunked.sums`."""
    n_series, n = confidence.shape
    noise_kind = None if noise == "none" else (noise == "shares", weights is not None and not copies)
    size = max(_PER_CELL * N_CELLS, -(-n // _PIECES))
    starts = range(0, n, size)
    pieces = into.numpy()[:, None]  # a single piece adds to the result directly
    if len(starts) > 1:
        pieces = np.zeros((n_series, len(starts), *into.shape[1:]))

    def add(begin: int, end: int) -> None:
        for element, piece in (divmod(k, len(starts)) for k in range(begin, end)):
            block = slice(starts[piece], starts[piece] + size)
            w = None if weights is None else weights[element, block]
            c, o = confidence[element, block], outcome[element, block].double()
            _sums(*columns_of(c, o, w), noise_kind, pieces[element, piece])

    in_threads(add, n_series * len(starts), n_series * n)
    if len(starts) > 1:
        into.numpy()[:] = pieces.sum(1)


def gradient(confidence: Tensor, outcome: Tensor, weights: Tensor | None, upstream: Tensor, slopes: Tensor) -> None:
    """Fill `slopes` with the gradient in the confidence; arguments as for `chunked.gradient`."""
    n_series, n = confidence.shape
    starts = range(0, n, _PIECE)

    def fill(begin: int, end: int) -> None:
        for element, piece in (divmod(k, len(starts)) for k in range(begin, end)):
            block = slice(starts[piece], starts[piece] + _PIECE)
            w = None if weights is None else weights[element, block]
            c, o = confidence[element, block], outcome[element, block].double()
            _gradient(*columns_of(c, o, w), upstream[element].numpy(), slopes[element, block].numpy())

    in_threads(fill, n_series * len(starts), n_series * n)
