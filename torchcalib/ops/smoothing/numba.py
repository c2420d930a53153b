"""Cells of smoothing, and sums over them, as loops. Imported by `dispatch` alone, at first use.

Events are cut into pieces by their number alone, whose sums are added in order: the same on any number of threads.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.numba_math import BLOCK, column_of, compiled_loop, step, told_of_noise
from torchcalib.ops.smoothing.grids import GRIDS, N_CELLS
from torchcalib.ops.threads import in_threads

_PIECE = 2**16  # events
_PER_CELL = 16  # events of a piece whose sums are its own: to add these takes less than to read them
_PIECES = 16  # at most, of a series
_STEPS = tuple(float(steps) for steps in GRIDS)
_LAST = np.int32(N_CELLS - 1)


@step
def _cells(confidence: Any, out: Any) -> None:
    """Fill in the cells of a block."""
    a, b, c, d, e, f, g = _STEPS  # one pass for all grids: a loop over them inside of it would not become vectors
    for i in range(confidence.size):
        p = min(max(0.0, np.float64(confidence[i])), 1.0)
        total = np.int32(p * a) + np.int32(p * b) + np.int32(p * c) + np.int32(p * d)
        total += np.int32(p * e) + np.int32(p * f) + np.int32(p * g)
        out[i] = min(np.int32(total), _LAST)


@compiled_loop
def _fill_cells(confidence: Any, index: Any) -> None:
    block = np.empty(BLOCK, np.int32)
    for start in range(0, confidence.size, BLOCK):
        values = confidence[start : start + BLOCK]
        _cells(values, block)
        for i in range(values.size):
            index[start + i] = block[i]


@compiled_loop
def _sums(confidence: Any, outcome: Any, weights: Any, noise: Any, sums: Any) -> None:
    """Add events; `noise` is that of `told_of_noise`."""
    last = len(sums) - 1
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
            k = np.uintp(cells[i])  # unsigned: not counted from the end
            p, y = np.float64(values[i]), np.float64(outcome[start + i])
            spread = p * (1.0 - p)
            sums[0, k] += w
            sums[1, k] += w * p
            sums[2, k] += w * y
            sums[3, k] += w * spread
            if noise is not None:
                variance = (y - p) ** 2 if noise[0] else spread
                sums[4, k] += w * variance * (w if noise[1] else 1.0)
            sums[last, k] += w * (p * y)


@compiled_loop
def _sums_backward(confidence: Any, outcome: Any, weights: Any, grads: Any, out: Any) -> None:
    cells = np.empty(BLOCK, np.int32)
    w = 1.0
    for start in range(0, confidence.size, BLOCK):
        values = confidence[start : start + BLOCK]
        _cells(values, cells)
        for i in range(values.size):
            if weights is not None:
                w = weights[start + i]
                if w == 0:
                    out[start + i] = 0
                    continue
            k = np.uintp(cells[i])
            p, y = np.float64(values[i]), np.float64(outcome[start + i])
            out[start + i] = w * (grads[0, k] + grads[1, k] * (1.0 - 2.0 * p) + grads[2, k] * y)


def cells(confidence: Tensor, index: Tensor) -> None:
    """See `smoothing_cells_reference.cells`."""
    starts = range(0, len(index), _PIECE)

    def fill(begin: int, end: int) -> None:
        for start in starts[begin:end]:
            held = slice(start, start + _PIECE)
            _fill_cells(column_of(confidence[held]), index[held].numpy())

    in_threads(fill, len(starts), len(index))


def sums(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: str, copies: bool, into: Tensor) -> None:
    """See `smoothing_cells_reference.sums`."""
    n_series, n = confidence.shape
    told = told_of_noise(noise, weights, copies)
    size = max(_PER_CELL * N_CELLS, -(-n // _PIECES))
    starts = range(0, n, size)
    pieces = into.numpy()[:, None]
    if len(starts) > 1:
        pieces = np.zeros((n_series, len(starts), *into.shape[1:]))

    def add(begin: int, end: int) -> None:
        for series, piece in (divmod(k, len(starts)) for k in range(begin, end)):
            held = slice(starts[piece], starts[piece] + size)
            part = [None if x is None else column_of(x[series, held]) for x in (confidence, outcome, weights)]
            _sums(*part, told, pieces[series, piece])

    in_threads(add, n_series * len(starts), n_series * n)
    if len(starts) > 1:
        into.numpy()[:] = pieces.sum(1)


def sums_backward(confidence: Tensor, outcome: Tensor, weights: Tensor | None, grads: Tensor, out: Tensor) -> None:
    """See `smoothing_cells_reference.sums_backward`."""
    n_series, n = confidence.shape
    starts = range(0, n, _PIECE)
    of_sums = np.ascontiguousarray(grads.numpy())

    def fill(begin: int, end: int) -> None:
        for series, piece in (divmod(k, len(starts)) for k in range(begin, end)):
            held = slice(starts[piece], starts[piece] + _PIECE)
            given = confidence[series, held], outcome[series, held]
            w = None if weights is None else column_of(weights[series, held])
            found = np.empty(len(given[0]), np.float64)
            _sums_backward(*map(column_of, given), w, of_sums[series], found)
            out[series, held] = torch.from_numpy(found)

    in_threads(fill, n_series * len(starts), n_series * n)
