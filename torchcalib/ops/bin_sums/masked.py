"""The bin op in tensor operations for a device that the host must not wait for, where no compiled one runs.

Every bin is a sum over all samples with those of other bins masked: no atomics, so that every run gives the same, and
no list of entries, whose length the host would have to know.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torchcalib.ops.bin_sums.reference import gradient_of, pieces_of, weighed_columns
from torchcalib.ops.logs import spread_infinite_logits
from torchcalib.ops.segments import bin_index

_AT_ONCE = 2**22  # entries


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
    n_bins = sums.shape[-1]
    bins = torch.arange(n_bins, device=sums.device)
    pieces = pieces_of(sums, max(1, _AT_ONCE // n_bins), confidence, outcome, weights, ecd)
    for into, (values, outcomes, w, more) in pieces:
        outside = bin_index(values, n_bins, right) != bins.unsqueeze(-1)
        outside = outside if w is None else outside | (w == 0)
        columns = weighed_columns(values, outcomes, w, more, noise, copies, sums.dtype)
        for row, column in zip(into, columns, strict=True):
            row += column.expand_as(outside).masked_fill(outside, 0).sum(-1)


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
    """See `bin_op_reference.group_sums`. Events are put in the order of their cells, and each of these is a run.

    Runs are summed by doubling: every event adds what stands 1, 2, 4, ... places before it, as long as that is of the
    same run. So what is NaN stays in its own, and sums are no differences of larger ones.
    """
    n_groups, n_sums, n_bins = sums.shape[1:]
    cells = torch.arange(n_groups * n_bins, device=sums.device)
    pieces = pieces_of(sums, max(1, _AT_ONCE // n_sums), confidence, outcome, weights, ecd, groups)
    for into, (values, outcomes, w, more, of) in pieces:
        cell, order = (of * n_bins + bin_index(values, n_bins, right)).sort(stable=True)
        columns = weighed_columns(values, outcomes, w, more, noise, copies, sums.dtype)
        totals = torch.stack(columns)[:, order]
        step = 1
        while step < len(cell):
            apart = cell[step:] != cell[:-step]
            totals[:, step:] += totals[:, :-step].masked_fill(apart, 0)  # which is a tensor of its own
            step *= 2
        ends = torch.searchsorted(cell, cells, right=True)
        empty = ends == torch.searchsorted(cell, cells)
        found = totals[:, (ends - 1).clamp(min=0)].masked_fill(empty, 0)
        into += found.view(n_sums, n_groups, n_bins).movedim(0, 1)


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
    classes = torch.arange(len(sums), device=sums.device)
    for held, q in _chunks(values, top, confidence, from_logits):
        w = torch.ones_like(confidence[held]) if weights is None else weights[held]
        q, w = q.to(sums.dtype).masked_fill((w == 0).unsqueeze(-1), 0), w.unsqueeze(-1)
        columns = [w.expand_as(q), w * q, w * (target[held].unsqueeze(-1) == classes)]
        if sums.shape[1] == 5:
            columns.append(columns[1] * (1 - q))
            columns.append(columns[3] if copies else w * columns[3])
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
    """See `bin_op_reference.class_sums_backward`."""
    for held, q in _chunks(values, top, confidence, from_logits):
        found = grads.T.gather(0, bin_index(q, grads.shape[-1], right)).to(q.dtype)
        out[held] = gradient_of(q, found, values[held], None if weights is None else weights[held], from_logits)


def _chunks(values: Tensor, top: Tensor, confidence: Tensor, from_logits: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield which rows, and their probabilities."""
    n = max(1, _AT_ONCE // values.shape[-1])
    for start in range(0, len(values), n):
        held = slice(start, start + n)
        q = values[held].to(torch.promote_types(values.dtype, torch.float32))
        if from_logits:
            first, own = top[held].unsqueeze(-1), confidence[held].unsqueeze(-1)
            q = spread_infinite_logits(q).softmax(-1)
            q = q * (own / q.gather(-1, first)).to(q.dtype)  # what softmax's own sum is off by
            q = q.scatter(-1, first, own.to(q.dtype))
        yield held, q
