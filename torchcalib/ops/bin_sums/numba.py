"""Sums over bins by compiled loops. Only `dispatch` imports this module, at first use.

Threads share no sums. Events are cut into pieces, independent of the number of threads, whose sums are added in order;
for classes each thread has a range of classes. So the result is the same on any number of threads.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.bin_sums.numba_classes import PROBE, add_classes, fill_class_gradients
from torchcalib.ops.bin_sums.numba_events import add_events, add_labels
from torchcalib.ops.bin_sums.reference import may_be_counted
from torchcalib.ops.numba_math import CONVERTED, by_rows, columns_of
from torchcalib.ops.threads import in_threads

_PIECE = 2**16  # events
_PIECES = 64  # at most; each holds sums in memory
_PER_CELL = 32  # events of a piece for each cell of groups, so that adding pieces costs less than reading them


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
    """See `reference.event_sums`."""
    n, n_cells = confidence.shape[-1], sums.shape[-1]
    kind = None if noise == "none" else (noise == "shares", weights is not None and not copies)
    countable = may_be_counted(outcome, weights, ecd, noise)
    c, o, w, d, g = columns_of(confidence, outcome, weights, ecd, groups)
    edges = _edges(n_bins)

    def add(series: int, held: slice, into: Any) -> None:
        of = None if g is None else g[series, held]
        if countable:
            add_labels(c[series, held], o[series, held], of, kind, edges, right, into)
        else:
            own, more = (None if x is None else x[series, held] for x in (w, d))
            add_events(c[series, held], o[series, held], own, more, of, kind, edges, right, into)

    size = max(_PIECE, _PER_CELL * n_cells if groups is not None else 0, -(-n // _PIECES))
    starts = range(0, n, size)
    for series, into in enumerate(sums.numpy()):
        if countable and g is None and len(starts) == 1:
            add_labels(c[series], o[series], None, kind, edges, right, into)
            continue
        pieces = np.zeros((len(starts), *into.shape))

        def add_pieces(begin: int, end: int, series: int = series, pieces: Any = pieces) -> None:
            for piece in range(begin, end):
                add(series, slice(starts[piece], starts[piece] + size), pieces[piece])

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
    """See `reference.class_sums`."""
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
    """See `reference.class_gradient`. Forward and backward of 256 x 1,000 logits take 0.9 ms, 2.3 ms by `reference`."""
    slopes = grads.float().contiguous().numpy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]
    options = slopes, slopes[:, 0].copy(), from_logits, _edges(grads.shape[-1]), right
    by_rows(fill_class_gradients, values, columns, options, out)


@cache
def _edges(n_bins: int) -> Any:
    return np.arange(n_bins + 1) / n_bins


def _largest(values: Tensor, top: Tensor) -> Tensor:
    """Return the entries of the top classes."""
    return values.gather(-1, top.unsqueeze(-1)).squeeze(-1).float()
