"""The bin op as loops. Imported by `dispatch` alone, at first use.

Threads share no sum: events are cut into pieces by their number alone, whose sums are added in order, and of classes
each thread takes its own.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.bin_sums.numba_classes import PROBE, add_classes, fill_class_gradients
from torchcalib.ops.bin_sums.numba_events import add_events, add_grouped_events, add_grouped_labels, add_labels
from torchcalib.ops.bin_sums.reference import may_be_counted
from torchcalib.ops.numba_math import CONVERTED, by_rows, column_of, told_of_noise
from torchcalib.ops.threads import in_threads

_PIECE = 2**16  # events
_PIECES = 64  # at most: each has sums of its own
_PER_CELL = 32  # events of a piece for each cell of groups: what is added afterwards is less than what is read


def event_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    right: bool,
    noise: str,
    copies: bool,
    sums: Tensor,
) -> None:
    """See `bin_op_reference.event_sums`."""
    n = confidence.shape[-1]
    edges = _edges(sums.shape[-1])
    size = max(_PIECE, -(-n // _PIECES))
    starts = range(0, n, size)
    told = told_of_noise(noise, weights, copies)
    countable = may_be_counted(outcome, weights, ecd, noise)
    for series, into in enumerate(sums.numpy()):
        pieces = into[None] if len(starts) == 1 else np.zeros((len(starts), *into.shape))

        def add(begin: int, end: int, series: int = series, pieces: Any = pieces) -> None:
            for piece in range(begin, end):
                held = slice(starts[piece], starts[piece] + size)
                part = [None if x is None else column_of(x[series, held]) for x in (confidence, outcome, weights, ecd)]
                if countable:
                    add_labels(*part[:2], told, edges, right, pieces[piece])
                else:
                    add_events(*part, told, edges, right, pieces[piece])

        in_threads(add, len(starts), n)
        if len(starts) > 1:
            into[:] = pieces.sum(0)


def group_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    groups: Tensor,
    right: bool,
    noise: str,
    copies: bool,
    sums: Tensor,
) -> None:
    """See `bin_op_reference.group_sums`."""
    n = confidence.shape[-1]
    n_groups, _, n_bins = sums.shape[1:]
    edges, n_cells = _edges(n_bins), n_groups * n_bins
    told = told_of_noise(noise, weights, copies)
    countable = may_be_counted(outcome, weights, ecd, noise)
    size = -(-n // max(1, min(_PIECES, n // max(_PIECE, _PER_CELL * n_cells))))
    starts = range(0, n, size)
    for series, into in enumerate(sums.numpy()):
        pieces = _lines(len(starts), n_cells, 4 if countable else 8)

        def add(begin: int, end: int, series: int = series, pieces: Any = pieces) -> None:
            for piece in range(begin, end):
                held = slice(starts[piece], starts[piece] + size)
                given = confidence, outcome, weights, ecd, groups
                part = [None if x is None else column_of(x[series, held]) for x in given]
                if countable:
                    flat = pieces[piece].reshape(-1)
                    of_labels = part[0], part[1], part[4]
                    add_grouped_labels(*of_labels, told, edges, right, flat.view(np.int64), flat)
                else:
                    add_grouped_events(*part, told, edges, right, pieces[piece])

        in_threads(add, len(starts), n)
        columns = _columns_of_labels(pieces) if countable else list(pieces.sum(0).T)
        if told is not None and not any(told):  # one sum of noise is both
            columns.insert(4, columns[3])
        for row, column in zip(into.swapaxes(0, 1), columns, strict=False):
            row[:] = column.reshape(n_groups, n_bins)


def _columns_of_labels(pieces: Any) -> list[Any]:
    """Return the sums of pieces of `add_grouped_labels`."""
    counts, (confidence, spread, others) = pieces.view(np.int64)[..., 0], pieces[..., 1:].sum(0).T
    return [(counts & 0xFFFFFFFF).sum(0), confidence, (counts >> 32).sum(0) + others, spread]


def _lines(n_pieces: int, n_cells: int, width: int) -> Any:
    """Return zeros `(P, K, W)`, where no cell of 4 or 8 numbers lies across two lines of 64 bytes."""
    memory = np.zeros(n_pieces * n_cells * width + 8)
    start = -(memory.ctypes.data // 8) % 8
    return memory[start : start + n_pieces * n_cells * width].reshape(n_pieces, n_cells, width)


def class_sums(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    from_logits: bool,
    right: bool,
    copies: bool,
    sums: Tensor,
) -> None:
    """See `bin_op_reference.class_sums`."""
    n_classes, n_sums, n_bins = sums.shape
    apart = n_sums if weights is not None and not copies else min(n_sums, 4)
    edges = _edges(n_bins)
    labels = target.numpy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]
    whole = values.dtype == torch.float32 and values.is_contiguous()

    def add(begin: int, end: int) -> None:
        into = np.zeros((apart, n_bins, end - begin))
        n = len(values) if whole else max(1, CONVERTED // (end - begin))
        buffer = torch.empty(0 if whole else min(n, len(values)), end - begin, dtype=torch.float32)
        for start in range(0, len(values), n):
            rows = values[start : start + n]
            x = rows if whole else buffer[: len(rows)].copy_(rows[:, begin:end])
            own = labels[start : start + n] - begin
            some = [None if column is None else column[start : start + n] for column in columns]
            add_classes(x.numpy(), own, *some, from_logits, edges, right, begin if whole else 0, into)
        if weights is None:
            into[0, 0] = len(values) - into[0, 1:].sum(0)
        sums[begin:end, :apart] = torch.from_numpy(into).movedim(-1, 0)
        if apart < n_sums:
            sums[begin:end, 4] = sums[begin:end, 3]

    in_threads(add, n_classes, values.numel() if n_classes >= 2 * PROBE else 0)


def class_sums_backward(
    values: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    grads: Tensor,
    from_logits: bool,
    right: bool,
    out: Tensor,
) -> None:
    """See `bin_op_reference.class_sums_backward`."""
    n_bins = grads.shape[-1]
    edges = _edges(n_bins)
    slopes = grads.float().contiguous().numpy()
    of_first = slopes[:, 0].copy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]

    def fill(begin: int, end: int, rows: Tensor) -> None:
        into = out[begin:end]
        filled = into if out.dtype == torch.float32 else torch.empty_like(into, dtype=torch.float32)
        some = [None if column is None else column[begin:end] for column in columns]
        fill_class_gradients(rows.numpy(), *some, slopes, of_first, from_logits, edges, right, filled.numpy())
        if filled is not into:
            into.copy_(filled)

    by_rows(fill, values)


@cache
def _edges(n_bins: int) -> Any:
    return np.arange(n_bins + 1) / n_bins


def _largest(values: Tensor, top: Tensor) -> Tensor:
    """Return the entries at the top."""
    return values.gather(-1, top.unsqueeze(-1)).squeeze(-1).float()
