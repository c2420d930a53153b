"""The bin op in tensor operations, in chunks that stay in cache. `bincount` adds in the order of the samples.

Off the CPU nothing waits and nothing is added by atomics: every bin is a sum over all samples, the others masked.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchcalib.kernels.bin_sums import bin_index
from torchcalib.kernels.row_stats import spread_infinite_logits

_SAMPLES = 2**16
_ENTRIES = 2**18
_ON_DEVICE = 2**22  # entries at a time where memory is not the cache of a CPU
_BELOW = 1 - 1e-6  # of 1/B: from here on an entry may be in another bin than the first


def event_sums(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    right: bool,
    sums: Tensor,
) -> None:
    """Add what `bin_op.event_bins` says of every series.

    Args:
        confidence: `(S, N)`.
        outcome: `(S, N)`.
        weights: `(S, N)` or None.
        ecd: `(S, N)` or None.
        right: the edge rule.
        sums: zeros `(S, F, B)`.
    """
    wide, n_bins = sums.dtype, sums.shape[-1]
    size = max(1, _ON_DEVICE // n_bins) if _is_waited_for(sums) else _SAMPLES
    for series, into in enumerate(sums):
        for start in range(0, confidence.shape[-1], size):
            held = slice(start, start + size)
            values, w = confidence[series, held], None if weights is None else weights[series, held]
            ones = torch.ones_like(values, dtype=wide)
            columns = [ones, values, outcome[series, held], *(() if ecd is None else (ecd[series, held],))]
            index = bin_index(values, n_bins, right)
            for row, column in zip(into, columns, strict=True):
                weighted = column.to(wide)
                if w is not None:
                    weighted = (weighted * w).masked_fill(w == 0, 0)
                row += _sums(index, weighted, n_bins)


def class_sums(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    from_logits: bool,
    right: bool,
    sums: Tensor,
) -> None:
    """Add what `bin_op.class_bins` says of one series.

    Args:
        values: `(N, C)` of any floating dtype, with any strides.
        target: `(N,)` int64.
        weights: `(N,)` of the dtype of `sums`, or None.
        top: of `row_op.rows`.
        confidence: of `row_op.rows`.
        from_logits: whether `values` are logits.
        right: the edge rule.
        sums: zeros `(C, 3, B)`.
    """
    n_classes, _, n_bins = sums.shape
    if _is_waited_for(values):
        _class_sums_of_a_device(values, target, weights, top, confidence, from_logits, right, sums)
        return
    for held, q in _chunks(values, top, confidence, from_logits):
        w = torch.ones_like(confidence[held]) if weights is None else weights[held]
        present = w != 0
        if weights is not None:
            q = q.masked_fill(~present.unsqueeze(-1), 0)
        above = q >= _BELOW / n_bins
        below = q.masked_fill(above, 0)
        if weights is None:
            sums[:, 0, 0] += len(q) - above.sum(0)
            sums[:, 1, 0] += below.sum(0, dtype=sums.dtype)
        else:
            sums[:, 0, 0] += (~above * w.unsqueeze(-1)).sum(0)
            sums[:, 1, 0] += (below * w.unsqueeze(-1)).sum(0)
        row, k = above.nonzero(as_tuple=True)
        reached = q[row, k].to(sums.dtype)
        cell = k * n_bins + bin_index(reached, n_bins, right)
        for column, added in enumerate((w[row], w[row] * reached)):
            sums[:, column] += _sums(cell, added, n_classes * n_bins).view(n_classes, n_bins)
        row = (present & (target[held] >= 0) & (target[held] < n_classes)).nonzero().squeeze(-1)
        label = target[held][row]
        cell = label * n_bins + bin_index(q[row, label], n_bins, right)
        sums[:, 2] += _sums(cell, w[row], n_classes * n_bins).view(n_classes, n_bins)


def _class_sums_of_a_device(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor,
    confidence: Tensor,
    from_logits: bool,
    right: bool,
    sums: Tensor,
) -> None:
    """`class_sums` bin by bin: to find the few entries beyond the first bin would make the host wait."""
    classes = torch.arange(len(sums), device=sums.device)
    for held, q in _chunks(values, top, confidence, from_logits):
        w = torch.ones_like(confidence[held]) if weights is None else weights[held]
        q, w = q.to(sums.dtype).masked_fill((w == 0).unsqueeze(-1), 0), w.unsqueeze(-1)
        columns = w.expand_as(q), w * q, w * (target[held].unsqueeze(-1) == classes)
        index = bin_index(q, sums.shape[-1], right)
        for b in range(sums.shape[-1]):
            for into, column in zip(sums.unbind(1), columns, strict=True):
                into[:, b] += torch.where(index == b, column, 0).sum(0)


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
    """Fill in the gradient in `values`.

    Args:
        values: see `class_sums`.
        weights: see `class_sums`.
        top: see `class_sums`.
        confidence: see `class_sums`.
        grads: gradient in the sums of confidence, `(C, B)`.
        from_logits: see `class_sums`.
        right: see `class_sums`.
        out: `(N, C)` of the dtype of `values`.
    """
    n_bins = grads.shape[-1]
    for held, q in _chunks(values, top, confidence, from_logits):
        if _is_waited_for(q):
            found = grads.T.gather(0, bin_index(q, n_bins, right)).to(q.dtype)
        else:
            found = grads[:, 0].to(q.dtype).repeat(len(q), 1)
            row, k = (q >= _BELOW / n_bins).nonzero(as_tuple=True)
            found[row, k] = grads[k, bin_index(q[row, k], n_bins, right)].to(q.dtype)
        if from_logits:
            found = q * (found - (q * found).sum(-1, keepdim=True))
            found = found.masked_fill((values[held].amax(-1) == torch.inf).unsqueeze(-1), 0)
        if weights is not None:
            w = weights[held].unsqueeze(-1)
            found = (found * w.to(q.dtype)).masked_fill(w == 0, 0)
        out[held] = found


def _chunks(values: Tensor, top: Tensor, confidence: Tensor, from_logits: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield which rows, and their probabilities."""
    n = max(1, (_ON_DEVICE if _is_waited_for(values) else _ENTRIES) // values.shape[-1])
    dtype = torch.promote_types(values.dtype, torch.float32)
    for start in range(0, len(values), n):
        held = slice(start, start + n)
        q = values[held].to(dtype)
        if from_logits:
            first = top[held].unsqueeze(-1)
            at_top = q.gather(-1, first)
            if _is_waited_for(at_top) or bool((at_top == torch.inf).any()):
                q = spread_infinite_logits(q)
            q = q.softmax(-1)
            own = confidence[held].unsqueeze(-1)
            q.mul_((own / q.gather(-1, first)).to(q.dtype))  # what softmax's own sum is off by
            q.scatter_(-1, first, own.to(q.dtype))
        yield held, q


def _sums(index: Tensor, column: Tensor, n_cells: int) -> Tensor:
    """Sum over cells: one by one, or where that would need atomics every cell over all samples."""
    if not _is_waited_for(index):
        return torch.bincount(index, column, n_cells)
    cells = torch.arange(n_cells, device=index.device)
    return torch.where(index.unsqueeze(-1) == cells, column.unsqueeze(-1), 0).sum(0)


def _is_waited_for(x: Tensor) -> bool:
    """Return whether the host would have to wait for what values say."""
    return x.device.type != "cpu"
