"""Sums over equal-mass bins by loops compiled with numba. Only `dispatch` imports this module, at first use.

Non-negative floats have the order of their bits. The leading bits of a score are the index of a cell. The method:

1. Count the samples and positives in every cell, and sum the remaining bits of their scores.
2. Find the cells that contain a cut between bins.
3. Collect the samples in these cells, and sort them.
4. Walk through the cells, and through the sorted samples of cells with a cut.

The scores in a cell are a linear function of their remaining bits. All sums within a cell are therefore exact in
integers, and do not depend on the number of threads.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.numba_math import compiled_loop
from torchcalib.ops.threads import in_threads

_REST = 16  # number of bits of a score that do not belong to the cell index
_MASK = np.uint32(2**_REST - 1)
_ONE = np.uint32(0x3F800000)  # bits of 1.0; bits of missing scores are larger
_SIGN = np.uint32(0x7FFFFFFF)  # all bits except the sign: -0 becomes 0
_CELLS = (int(_ONE) >> _REST) + 1
_COUNT = np.int64(2**32 - 1)  # the other bits of the first sum are the number of positives


@compiled_loop
def _count(bits, label, cells):
    """Add samples to `cells`: number of samples plus 2^32 times number of positives, and sum of remaining bits."""
    for i in range(bits.size):
        x = bits[i] & _SIGN
        if x <= _ONE:  # NaN, which marks a missing score, has larger bits
            cell = x >> _REST
            cells[cell, 0] += np.int64(label[i]) << 32 | 1
            cells[cell, 1] += x & _MASK


@compiled_loop
def _mark_cut_cells(cells, cuts, chosen):
    """Mark cells with a cut after the first sample and before the last one. Return the number of their samples."""
    end, k, total = 0, 0, 0
    for cell in range(_CELLS):
        begin, end = end, end + (cells[cell, 0] & _COUNT)
        while k < cuts.size and cuts[k] <= begin:
            k += 1
        chosen[cell] = k < cuts.size and cuts[k] < end
        total += end - begin if chosen[cell] else 0
    return total


@compiled_loop
def _collect(bits, label, chosen, keys):
    """Fill `keys` with score bits and label, as the last bit, of the samples in chosen cells. Return their number."""
    n = 0
    for i in range(bits.size):
        x = bits[i] & _SIGN
        if x <= _ONE and chosen[x >> _REST]:
            keys[n] = x << 1 | label[i]
            n += 1
    return n


@compiled_loop
def _value(cell, n, rest):
    """Return the sum of n scores in a cell whose remaining bits sum to `rest`."""
    # A float32 number is its significand times 2^(exponent - 150): the bias of 127, and 23 bits after the point.
    # Numbers below 2^-126 have the exponent bits 0, but the exponent 1.
    exponent = max(cell >> 23 - _REST, 1)
    first = (cell << _REST) - (exponent - 1 << 23)  # significand of the smallest score in the cell
    return (n * first + rest) * 2.0 ** (exponent - 150)


@compiled_loop
def _add(cell, n, rest, positives, sums, b):
    sums[0, b] += n
    sums[1, b] += _value(cell, n, rest)
    sums[2, b] += positives


@compiled_loop
def _walk(cells, chosen, keys, cuts, sums, ends):
    """Fill `sums` and `ends`. A bin ends before the first score at or after its cut."""
    position, b, place = 0, 0, 0
    for cell in range(_CELLS):
        n = cells[cell, 0] & _COUNT
        if not n:
            continue
        b = _next_bin(position, cuts, ends, b)
        if not chosen[cell]:
            _add(cell, n, cells[cell, 1], cells[cell, 0] >> 32, sums, b)
            position += n
            continue
        # A cut within this cell: `keys` has its samples in order, with the label as the last bit.
        end = place + n
        while place < end:
            # The bin contains all samples before its cut, and further samples with the score of the last one.
            b = _next_bin(position, cuts, ends, b)
            begin, stop = place, min(end, place + cuts[b] - position) if b < cuts.size - 1 else end
            rest, positives = np.int64(0), np.int64(0)
            while place < end and (place < stop or keys[place] >> 1 == keys[place - 1] >> 1):
                rest += keys[place] >> 1 & _MASK
                positives += keys[place] & 1
                place += 1
            _add(cell, place - begin, rest, positives, sums, b)
            position += place - begin
    ends[b:] = position


@compiled_loop
def _next_bin(position, cuts, ends, b):
    """Return the bin of a sample with a new score at this position, and fill the ends of the bins before it."""
    while b < cuts.size - 1 and position >= cuts[b]:
        ends[b] = position
        b += 1
    return b


def sums_and_ends(score: Tensor, label: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Return sums and ends of equal-mass bins for float32 scores; see `equal_mass.equal_mass_sums`."""
    length = score.shape[-1]
    sums = torch.zeros((*score.shape[:-1], 3, n_bins), dtype=torch.float64, device="cpu")
    ends = torch.zeros((*score.shape[:-1], n_bins), dtype=torch.int64, device="cpu")
    rows = score.view(-1, length).numpy().view(np.uint32), label.view(-1, length).numpy()
    for bits, labels, *into in zip(*rows, sums.view(-1, 3, n_bins).numpy(), ends.view(-1, n_bins).numpy(), strict=True):
        _fill_row(bits, labels, *into)
    return sums, ends


def _fill_row(bits: Any, label: Any, sums: Any, ends: Any) -> None:
    tables: list[Any] = []
    parts: list[Any] = []

    def count(begin: int, end: int) -> None:
        table = np.zeros((_CELLS, 2), np.int64)
        _count(bits[begin:end], label[begin:end], table)
        tables.append(table)

    def collect(begin: int, end: int) -> None:
        keys = np.empty(min(total, end - begin), np.uint32)
        parts.append(keys[: _collect(bits[begin:end], label[begin:end], chosen, keys)])

    # Steps 1 to 4 of the module. The integer tables of the threads can be added in any order.
    in_threads(count, bits.size, bits.size)
    cells = sum(tables[1:], start=tables[0])
    size = int((cells[:, 0] & _COUNT).sum())
    cuts = np.array([i * size // ends.size for i in range(1, ends.size + 1)])
    chosen = np.zeros(_CELLS, np.bool_)
    total = _mark_cut_cells(cells, cuts, chosen)
    if total:
        in_threads(collect, bits.size, bits.size)
    keys = np.concatenate(parts) if parts else np.empty(0, np.uint32)
    keys.sort()
    _walk(cells, chosen, keys, cuts, sums, ends)
