"""Sums over bins by loops compiled with numba. Only `dispatch` imports this module, at first use.

Results do not depend on the number of threads. The division into pieces depends only on the number of events and cells,
and the sums of the pieces are added in order. Each class is summed by one thread.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.bin_sums.numba_classes import PROBE, add_classes, fill_class_gradients
from torchcalib.ops.bin_sums.numba_events import add_events, add_labels
from torchcalib.ops.bin_sums.reference import allows_counting
from torchcalib.ops.numba_math import CONVERTED, by_rows, columns_of
from torchcalib.ops.threads import in_threads

_PIECE = 2**16  # smallest number of events in a piece
_PIECES = 64  # largest number of pieces, which limits the memory for their sums
_PER_CELL = 32  # smallest number of events per cell in a piece with groups; with fewer, adding the pieces is slow


def event_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    groups: Tensor | None,
    n_bins: int,
    right: bool,
    noise: str,
    copies: bool,
    sums: Tensor,
) -> None:
    """Fill `sums` with the bin sums of events; arguments as for `reference.event_sums`."""
    n, n_cells = confidence.shape[-1], sums.shape[-1]
    noise_kind = None if noise == "none" else (noise == "shares", weights is not None and not copies)
    countable = allows_counting(outcome, weights, ecd, noise)
    c, o, w, d, g = columns_of(confidence, outcome, weights, ecd, groups)
    edges = _edges(n_bins)

    def add(element: int, block: slice, into: Any) -> None:
        group = None if g is None else g[element, block]
        if countable:
            add_labels(c[element, block], o[element, block], group, noise_kind, edges, right, into)
        else:
            weight, ecds = (None if x is None else x[element, block] for x in (w, d))
            add_events(c[element, block], o[element, block], weight, ecds, group, noise_kind, edges, right, into)

    size = max(_PIECE, _PER_CELL * n_cells if groups is not None else 0, -(-n // _PIECES))
    starts = range(0, n, size)
    for element, into in enumerate(sums.numpy()):
        if len(starts) == 1:
            add(element, slice(None), into)
            continue
        pieces = np.zeros((len(starts), *into.shape))

        def add_pieces(begin: int, end: int, element: int = element, pieces: Any = pieces) -> None:
            for piece in range(begin, end):
                add(element, slice(starts[piece], starts[piece] + size), pieces[piece])

        in_threads(add_pieces, len(starts), n)
        into[:] = pieces.sum(0)


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
    """Fill `sums` with the bin sums of every class; arguments as for `reference.class_sums`."""
    n_classes, n_sums, n_bins = sums.shape
    n_distinct = n_sums if weights is not None and not copies else min(n_sums, 4)
    edges = _edges(n_bins)
    labels = target.numpy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]
    direct = values.dtype == torch.float32 and values.is_contiguous()

    def add(begin: int, end: int) -> None:
        into = np.zeros((n_distinct, n_bins, end - begin))
        n = len(values) if direct else max(1, CONVERTED // (end - begin))
        buffer = torch.empty(0 if direct else min(n, len(values)), end - begin, dtype=torch.float32)
        for start in range(0, len(values), n):
            rows = values[start : start + n]
            x = rows if direct else buffer[: len(rows)].copy_(rows[:, begin:end])
            chunk_labels = labels[start : start + n] - begin
            chunk = [None if column is None else column[start : start + n] for column in columns]
            add_classes(x.numpy(), chunk_labels, *chunk, from_logits, edges, right, begin if direct else 0, into)
        if weights is None:  # number of rows in the first bin: all rows minus the rows in other bins
            into[0, 0] = len(values) - into[0, 1:].sum(0)
        sums[begin:end, :n_distinct] = torch.from_numpy(into).movedim(-1, 0)
        if n_distinct < n_sums:
            sums[begin:end, 4] = sums[begin:end, 3]

    in_threads(add, n_classes, values.numel() if n_classes >= 2 * PROBE else 0)


def class_gradient(
    values: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    from_logits: bool,
    right: bool,
    grads: Tensor,
    out: Tensor,
) -> None:
    """Fill `out` with the gradient in `values`; arguments as for `reference.class_gradient`."""
    slopes = grads.float().contiguous().numpy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]
    options = slopes, slopes[:, 0].copy(), from_logits, _edges(grads.shape[-1]), right
    by_rows(fill_class_gradients, values, columns, options, out)


@cache
def _edges(n_bins: int) -> Any:
    return np.arange(n_bins + 1) / n_bins


def _largest(values: Tensor, top: Tensor) -> Tensor:
    return values.gather(-1, top.unsqueeze(-1)).squeeze(-1).float()
