"""Sums over bins in plain torch: in chunks that stay in a CPU's cache, and as formulas that can be differentiated."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits, through_softmax, wide_dtype
from torchcalib.ops.segments import BELOW_EDGE, bin_index, bin_sums

_SAMPLES = 2**16
_ENTRIES = 2**18
_ENTRIES_ELSEWHERE = 2**22  # on other devices, where each call has a launch
_ROWS = 2**14  # rows whose entries that reach 1/B are put into bins at a time


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
    """Add the sums of `bin_sums.event_bins` for every series.

    Args:
        confidence: `(S, N)`.
        outcome: `(S, N)`.
        weights: `(S, N)` or None.
        ecd: `(S, N)` or None.
        groups: `(S, N)` int64 or None.
        n_bins: B.
        right: the edge rule.
        noise: "labels" or "shares" if sums 3 and 4 are of noise, else "none".
        copies: whether weights are numbers of copies.
        sums: zeros `(S, F, G * B)`.
    """
    n_cells = sums.shape[-1]
    on_cpu = confidence.device.type == "cpu"
    countable = on_cpu and may_be_counted(outcome, weights, ecd, noise)
    size = max(_SAMPLES, n_cells) if on_cpu else confidence.shape[-1]
    for into, (values, outcomes, w, more, of) in pieces_of(sums, size, confidence, outcome, weights, ecd, groups):
        index = _quick_bin_index(values, n_bins, right) if on_cpu else bin_index(values, n_bins, right)
        cell = index if of is None else of * n_bins + index
        if countable and _zeros_and_ones(outcomes):
            p = values.to(sums.dtype)
            into[1].scatter_add_(0, cell, p)
            if noise == "labels":
                into[3].scatter_add_(0, cell, p * (1 - p))
                into[4] = into[3]
            counts = torch.bincount(cell.add_(outcomes, alpha=n_cells), minlength=2 * n_cells).view(2, n_cells)
            into[0] += counts.sum(0)
            into[2] += counts[1]
        else:
            columns = weighed_columns(values, outcomes, w, more, noise, copies, sums.dtype)
            for row, column in zip(into, columns, strict=True):
                row.scatter_add_(0, cell, column)


def event_formula(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    groups: Tensor | None,
    n_groups: int,
    n_bins: int,
    right: bool,
    noise: str,
    copies: bool,
) -> Tensor:
    """Return `bin_sums.event_bins` by operations that torch can differentiate."""
    index = bin_index(confidence, n_bins, right)
    columns = weighed_columns(confidence, outcome, weights, ecd, noise, copies, wide_dtype(confidence.device))
    if groups is None:
        return bin_sums(index, columns, n_bins)
    sums = bin_sums(groups * n_bins + index, columns, n_groups * n_bins)
    return sums.reshape(*sums.shape[:-1], n_groups, n_bins).movedim(-2, -3)


def pieces_of(sums: Tensor, size: int, *columns: Tensor | None) -> Any:
    """Yield the sums of every series with at most `size` of its events, for columns `(S, N)`."""
    n = next(column.shape[-1] for column in columns if column is not None)
    for series, into in enumerate(sums):
        for start in range(0, n, size):
            yield into, [None if column is None else column[series, start : start + size] for column in columns]


def may_be_counted(outcome: Tensor, weights: Tensor | None, ecd: Tensor | None, noise: str) -> bool:
    """Return whether sums of outcomes that are 0 and 1 are counts."""
    return weights is None and ecd is None and noise != "shares" and not outcome.is_floating_point()


def weighed_columns(
    confidence: Tensor,
    outcome: Tensor,
    weights: Tensor | None,
    ecd: Tensor | None,
    noise: str,
    copies: bool,
    wide: torch.dtype,
) -> list[Tensor]:
    """Return what every event adds to each sum: 0, a constant, where its weight is 0."""
    p = confidence.to(wide)
    y = outcome.to(wide)
    columns = [(torch.ones_like(p), weights), (p, weights), (y, weights)]
    if noise != "none":
        fixed = p.detach()
        spread = fixed * (1 - fixed)
        variance = (y.detach() - fixed).square() if noise == "shares" else spread
        share = None if weights is None else weights.detach()
        columns += [(spread, share), (variance, share if share is None or copies else share.square())]
    columns += [] if ecd is None else [(ecd.to(wide), weights)]
    return [column if share is None else column.masked_fill(share == 0, 0) * share for column, share in columns]


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
    """Add the sums of `bin_sums.class_bins` for one series.

    Args:
        values: `(N, C)` of any floating dtype, with any strides.
        target: `(N,)` int64.
        weights: `(N,)` of the dtype of `sums`, or None.
        top: of `softmax_stats.Rows`.
        confidence: of `softmax_stats.Rows`.
        from_logits: whether `values` are logits.
        right: the edge rule.
        copies: whether weights are numbers of copies.
        sums: zeros `(C, 3, B)`, or `(C, 5, B)` with those of noise.
    """
    n_classes, n_sums, n_bins = sums.shape
    if values.device.type != "cpu":  # the host would have to wait for the number of entries that reach 1/B
        size = max(1, _ENTRIES_ELSEWHERE // n_classes)
        for start in range(0, len(values), size):
            held = slice(start, start + size)
            w = None if weights is None else weights[held]
            options = from_logits, n_bins, right, n_sums == 5, copies
            sums += class_formula(values[held], target[held], w, None, None, *options)
        return
    noise, squared = n_sums == 5, weights is not None and not copies
    flat = sums.view(-1)
    for start in range(0, len(values), _ROWS):
        held = slice(start, start + _ROWS)
        w = torch.ones_like(confidence[held]) if weights is None else weights[held]
        known = (target[held] >= 0) & (target[held] < n_classes)
        label = target[held].masked_fill(~known, 0)
        places, reached, of_label = [], [], []
        # Buffers for all chunks: kept results between temporary tensors would fragment the heap.
        wide = torch.empty(min(_ENTRIES, values[held].numel()) + n_classes, dtype=sums.dtype)
        mask = np.empty(len(wide), bool)
        for rows, q in _chunks(values[held], top[held], confidence[held], from_logits):
            own = w[rows].unsqueeze(-1)
            if weights is not None:
                q.masked_fill_(own == 0, 0)
            of_label.append(q.gather(-1, label[rows].unsqueeze(-1)).view(-1))
            entries = q.view(-1)
            above = _places_from(entries, BELOW_EDGE / n_bins, mask)
            reached.append(entries.index_select(0, above))
            entries.index_fill_(0, above, 0)
            column = wide[: len(entries)].view(q.shape)
            if weights is None:
                total = column.copy_(q).sum(0)
            else:  # not as a difference from the total, in which small weights would be lost
                sums[:, 0, 0] += column.copy_(own).view(-1).index_fill_(0, above, 0).view(q.shape).sum(0)
                total = torch.mul(q, own, out=column).sum(0)
            sums[:, 1, 0] += total
            if noise:  # q (1 - q) = q - q^2, without much cancellation below 1/B
                sums[:, 3, 0] += total - column.mul_(q).sum(0)
            if noise and squared:
                square = column.mul_(own).sum(0)
                sums[:, 4, 0] += torch.mul(q, own.square(), out=column).sum(0) - square
            places.append(above.add_(rows.start * n_classes))
        place, entry = torch.cat(places), torch.cat(reached).to(sums.dtype)
        row = place // n_classes
        k = place.sub_(row * n_classes)
        cell = k * (n_sums * n_bins) + bin_index(entry, n_bins, right)
        share = w[row]
        flat.index_add_(0, cell, share)
        flat.index_add_(0, cell + n_bins, share * entry)
        if noise:
            spread = share * (entry * (1 - entry))
            flat.index_add_(0, cell + 3 * n_bins, spread)
            if squared:
                flat.index_add_(0, cell + 4 * n_bins, spread.mul_(share))
        cell = label * (n_sums * n_bins) + 2 * n_bins + bin_index(torch.cat(of_label), n_bins, right)
        flat.index_add_(0, cell, w.masked_fill((w == 0) | ~known, 0))
    if weights is None:
        sums[:, 0, 0] += len(values) - sums[:, 0].sum(-1)
    if noise and not squared:
        sums[:, 4] = sums[:, 3]


def class_formula(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor | None,  # noqa: ARG001
    confidence: Tensor | None,  # noqa: ARG001
    from_logits: bool,
    n_bins: int,
    right: bool,
    noise: bool,
    copies: bool,
) -> Tensor:
    """Return `bin_sums.class_bins` by operations that torch can differentiate; `top` and `confidence` are not used."""
    x = values.to(wide_dtype(values.device))
    w = torch.ones_like(x[..., 0]) if weights is None else weights
    never = w == 0
    w = w.masked_fill(never, 0).unsqueeze(-1)  # a constant where it is 0
    x = x.masked_fill(never.unsqueeze(-1), 0)
    q = spread_infinite_logits(x).softmax(-1) if from_logits else x
    n_classes = q.shape[-1]
    classes = torch.arange(n_classes, device=q.device)
    columns = [w.expand_as(q), w * q, w * (target.unsqueeze(-1) == classes)]
    if noise:
        spread = (w * (q * (1 - q))).detach()
        columns += [spread, spread if copies else w.detach() * spread]
    cell = classes * n_bins + bin_index(q, n_bins, right)
    sums = bin_sums(cell.flatten(-2), [column.flatten(-2) for column in columns], n_classes * n_bins)
    return sums.reshape(*sums.shape[:-1], n_classes, n_bins).movedim(-2, -3)


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
    """Fill in the gradient in values `(N, C)`: q (g - sum of q g) for logits, with g the gradient in q.

    Arguments as of `class_sums`, with the gradient `grads` in the sums of confidence `(C, B)`, and `out` like `values`.
    """
    n_bins = grads.shape[-1]
    for held, q in _chunks(values, top, confidence, from_logits):
        if q.device.type == "cpu":  # few entries reach 1/B
            found = grads[:, 0].to(q.dtype).repeat(len(q), 1)
            row, k = (q >= BELOW_EDGE / n_bins).nonzero(as_tuple=True)
            found[row, k] = grads[k, bin_index(q[row, k], n_bins, right)].to(q.dtype)
        else:
            found = grads.T.gather(0, bin_index(q, n_bins, right)).to(q.dtype)
        found = through_softmax(q, found, values[held]) if from_logits else found
        if weights is not None:
            w = weights[held].unsqueeze(-1)
            found = found.mul_(w.to(q.dtype)).masked_fill_(w == 0, 0)
        out[held] = found


def _chunks(values: Tensor, top: Tensor, confidence: Tensor, from_logits: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield a slice of the rows, and their probabilities in a buffer that may be overwritten."""
    on_cpu = values.device.type == "cpu"
    n = max(1, (_ENTRIES if on_cpu else _ENTRIES_ELSEWHERE) // values.shape[-1])
    dtype = torch.promote_types(values.dtype, torch.float32)
    buffer = torch.empty(min(n, len(values)), values.shape[-1], dtype=dtype, device=values.device)
    first, of_top = top.unsqueeze(-1), confidence.unsqueeze(-1).to(dtype)
    for start in range(0, len(values), n):
        held = slice(start, min(start + n, len(values)))
        x, q = values[held], buffer[: held.stop - start]
        if from_logits:
            torch.softmax(x if on_cpu else spread_infinite_logits(x), -1, dtype=dtype, out=q)
            found = q.gather(-1, first[held])
            if on_cpu and not math.isfinite(found.sum()):  # an infinite logit, which is rare
                torch.softmax(spread_infinite_logits(x), -1, dtype=dtype, out=q)
                found = q.gather(-1, first[held])
            # Remove the rounding error of softmax's own sum.
            q.mul_(of_top[held] / found).scatter_(-1, first[held], of_top[held])
        else:
            q.copy_(x)
        yield held, q


def _quick_bin_index(values: Tensor, n_bins: int, right: bool) -> Tensor:
    """Return `bin_index`: the floor of the product with `n_bins`, but exact where an inner edge is near."""
    scaled = values.to(torch.promote_types(values.dtype, torch.float32)) * n_bins
    scaled.clamp_(0.3, n_bins - 0.3)  # away from the outer edges, where the rule does not matter
    index = scaled.long()
    distance = scaled.sub_(scaled.round()).abs_()
    near = torch.from_numpy(np.flatnonzero(~(distance.numpy() > 2e-7 * n_bins)))  # NaN too
    if len(near):
        index[near] = bin_index(values[near], n_bins, right)
    return index


def _zeros_and_ones(outcomes: Tensor) -> bool:
    """Return whether all integers of a column are 0 or 1."""
    if outcomes.dtype == torch.bool:
        return True
    least, most = outcomes.aminmax()
    return bool(least >= 0) and bool(most <= 1)


def _places_from(entries: Tensor, low: float, mask: NDArray[np.bool_]) -> Tensor:
    """Return the places of entries that are at least `low`; numpy is faster than `torch.nonzero`."""
    x = entries.numpy()
    return torch.from_numpy(np.flatnonzero(np.greater_equal(x, x.dtype.type(low), out=mask[: len(x)])))
