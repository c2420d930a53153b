"""Sums over equal-width bins by torch and numpy, in chunks that fit into the CPU cache."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.ops.bin_sums.formula import Bins, class_formula, weighted_columns
from torchcalib.ops.logs import elementwise, spread_infinite_logits, through_softmax
from torchcalib.ops.segments import BELOW_EDGE, bin_index, bin_sums, kept, with_weight

_FEW_EVENTS = 2**11  # largest number of events for which a binary search of bins is faster than calls of torch
_SAMPLES = 2**17  # events per chunk
_BLOCK = 2**15  # events with labels per block: the largest number that torch does not divide among threads
_PARTS, _MAX_SUMS = 8, 2**15  # numbers of parts of many such events, and of sums for which there are several parts
_ENTRIES = 2**18  # probabilities per chunk on the CPU: more would not fit into the cache
_ENTRIES_OFF_CPU = 2**22  # probabilities per chunk on other devices: larger chunks need fewer kernel launches
_FEW_CLASSES = 16  # largest number of classes whose probabilities are all added to their bins one by one
_COLUMN = 2**15  # rows of a transposed block, which torch does not split among threads
_MAX_EXACT = 2**14  # largest number of bins whose product with a float32 number is exact in float64
_ROWS = 2**14  # rows per block; the probabilities >= 1/B of a block are added to their bins together

# Sums over the events of a cell as combinations of sums over its events with the outcomes 0 and 1: of w, w p and, with
# noise, w p (1 - p). The sum of w (y - p)^2 is that of w |y - p| minus that of w p (1 - p).
_OF_LABELS = np.array(
    [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1],
     [1, 1, 0, 0, 0, 0], [0, 1, 1, -1, -1, -1]], np.float64,
)  # fmt: skip
# With squared weights, sums of w^2 p (1 - p) and w^2 follow.
_OF_SQUARES = np.pad(_OF_LABELS, ((0, 0), (0, 4)))
_OF_SQUARES[4:6] = [[0, 0, 0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]]


class EventColumns(NamedTuple):
    """Events of S batch elements, in columns `(S, N)`; None for a column that is not given."""

    confidence: Tensor
    outcome: Tensor
    weights: Tensor | None
    ecd: Tensor | None
    groups: Tensor | None


class ClassRows(NamedTuple):
    """Rows `(N, C)` of one batch element, with columns `(N,)`."""

    values: Tensor
    from_logits: bool
    weights: Tensor | None
    top: Tensor  # class with the largest probability
    confidence: Tensor  # its probability


def event_sums(events: EventColumns, bins: Bins, shape: tuple[int, int]) -> Tensor:
    """Return the result of `bin_sums.event_bins` for S batch elements, `(S, F, G * B)`; `shape` is (F, G * B)."""
    confidence, outcome, weights, ecd, groups = events
    n_cells = shape[-1]
    if not confidence.is_cpu:  # few operations, for all batch elements at once
        index = bin_index(confidence, bins.n_bins, bins.right)
        index = index if groups is None else index.add_(groups, alpha=bins.n_bins)
        return bin_sums(index, weighted_columns(confidence, outcome, weights, ecd, bins), n_cells)
    # A chunk of 2^17 events stays in the cache while it is read for each of the F sums. With more cells than that, a
    # chunk has as many events as cells, so that its count of all cells is not the larger part of the work.
    size = max(_SAMPLES, n_cells)
    sums = np.zeros((len(confidence), *shape))
    for element, into in enumerate(sums):
        for p, y, w, more, group in _event_chunks(element, size, events):
            cell = _fast_bin_index(p, bins.n_bins, bins.right, p.double())
            cell = cell if group is None else cell.add_(group, alpha=bins.n_bins)
            columns = [cell, *[None if x is None else x.double() for x in (p, y, w, more)]]
            if w is not None and not w.all():  # values of weight 0 may be NaN
                columns = [None if x is None else x[w != 0] for x in columns]
            arrays: Any = [None if x is None else x.numpy() for x in columns]
            _add_to_cells(bins, into, *arrays)
    return torch.from_numpy(sums)


def column_sums(confidence: Tensor, outcome: Tensor, bins: Bins, n_sums: int) -> Tensor | None:
    """Return the sums `(F, S * B)` over the events of the columns of a matrix `(n, S)`, with labels as outcomes.

    The cell of bin b of column s is s * B + b. Return None if an outcome is neither 0 nor 1. The matrix is read in the
    order of its memory. Noise must not be that of "shares".
    """
    n_columns, n_cells = confidence.shape[1], confidence.shape[1] * bins.n_bins
    n_rows = min(len(confidence), max(1, max(_SAMPLES, n_cells) // n_columns))
    sums, first = np.zeros((n_sums, n_cells)), np.tile(np.arange(0, n_cells, bins.n_bins), n_rows)
    values, labels = confidence.reshape(-1), outcome.reshape(-1).numpy()
    for start in range(0, len(values), len(first)):
        p, y = values[start : start + len(first)], labels[start : start + len(first)]
        if y.dtype != np.bool_ and not (y.min() >= 0 and y.max() <= 1):
            return None
        wide = p.double()
        cell = _fast_bin_index(p, bins.n_bins, bins.right, wide).numpy()
        cell += first[: len(p)]  # torch has no vector instructions for sums of integers
        cell += np.int64(n_cells) * y
        _add_labels(bins, sums, cell, wide.numpy(), None)
    return torch.from_numpy(sums)


def add_labelled(
    confidence: Any,
    label: Any,
    weights: Any,
    groups: Any,
    bins: Bins,
    sums: Any,
    event: int = 1,
    n_labels: int = 2,
    ignored: int | None = None,
) -> bool:
    """Add events with labels to `sums` `(F, G * B)` in place. Return False, with incomplete sums, if one is invalid.

    All arguments are numpy arrays. Labels are in [0, n_labels), and the outcome of a row is 1 if its label is `event`.
    Rows with the label `ignored` or the weight 0 are not added. `weights` are float32, float64 or integers, or None for
    1; `groups` are in [0, G), or None for G = 1.
    """
    if len(label) > 2 * _BLOCK:
        from torchcalib.ops.threads import in_threads

        # Parts with sums of their own are added in several threads, in blocks that torch does not divide among others.
        n_parts = _PARTS if sums.size <= _MAX_SUMS else 1
        columns, of_parts, are_added = (confidence, label, weights, groups), np.zeros((n_parts, *sums.shape)), [True]

        def add(begin: int, end: int) -> None:
            for k in range(begin, end):
                last = len(label) * (k + 1) // n_parts
                for start in range(len(label) * k // n_parts, last, _BLOCK):
                    p, y, w, g = (None if x is None else x[start : min(start + _BLOCK, last)] for x in columns)
                    are_added.append(add_labelled(p, y, w, g, bins, of_parts[k], event, n_labels, ignored))

        in_threads(add, n_parts, len(label))
        sums += of_parts.sum(0)
        return all(are_added)
    if ignored is not None:
        _, confidence, label, weights, groups = kept(label != ignored, None, confidence, label, weights, groups)
    if weights is not None:
        found = with_weight(weights, None, confidence, label, groups)
        if found is None:
            return False
        weights, _, confidence, label, groups = found
    if not len(label):
        return True
    if label.dtype == np.int64:  # not of rows, which are valid
        is_valid = confidence.min() >= 0 and confidence.max() <= 1 and label.view(np.uint64).max() < n_labels
        if not is_valid:
            return False
    if len(confidence) > _FEW_EVENTS:
        values = torch.from_numpy(np.ascontiguousarray(confidence))
        wide = values.double()
        cell, confidence = _fast_bin_index(values, bins.n_bins, bins.right, wide).numpy(), wide.numpy()
    else:  # the index of a bin is the number of inner edges below its values
        confidence = confidence.astype(np.float64, copy=False)
        cell = _inner_edges(bins.n_bins).searchsorted(confidence, "left" if bins.right else "right")
    if groups is not None:
        cell = cell + groups * bins.n_bins
    _add_labels(bins, sums, cell + np.int64(sums.shape[1]) * (label == event), confidence, weights)
    return True


def _add_labels(bins: Bins, sums: Any, cell: Any, confidence: Any, weights: Any) -> None:
    """Add events with the outcomes 0 and 1 to the sums `(F, K)` of their cells in place, as `_add_to_cells` does.

    The cells of events with the outcome 1 are increased by K. Separate sums for the outcomes 0 and 1 give those of
    outcomes and residuals without a pass of their own.
    """
    n_cells = sums.shape[1]

    def total(column: Any) -> Any:
        if column is None or len(cell) <= _FEW_EVENTS:
            return np.bincount(cell, column, 2 * n_cells)
        found = torch.zeros(2 * n_cells, dtype=torch.float64, device="cpu")  # faster, but a call takes more time
        return found.scatter_add_(0, torch.from_numpy(cell), torch.from_numpy(column)).numpy()

    mass = confidence if weights is None else weights * confidence
    columns, combined = [weights, mass], _OF_LABELS[:3, :4]
    if bins.noise != "none":
        columns.append(spread := mass * (1 - confidence))
        combined = _OF_LABELS
        if weights is not None and not bins.copies:
            columns += [weights * spread, weights * weights]
            combined = _OF_SQUARES
    by_outcome = np.concatenate([total(column) for column in columns])
    if math.isfinite(by_outcome.sum()):
        sums += combined.dot(by_outcome.reshape(-1, n_cells))
    else:  # 0 times NaN is NaN
        _add_to_cells(bins, sums, cell % n_cells, confidence, cell >= n_cells, weights)


def _add_to_cells(
    bins: Bins, sums: Any, cell: Any, confidence: Any, outcome: Any, weights: Any, ecd: Any = None
) -> None:
    """Add events to the sums `(F, K)` of their cells in place. Weights are positive, or None for 1."""

    def total(column: Any) -> Any:
        if weights is not None:
            column = weights if column is None else weights * column
        return np.bincount(cell, column, sums.shape[1])

    n = total(None)
    sums[0] += n
    sums[1] += total(confidence)
    sums[2] += total(outcome)
    if bins.noise != "none":
        spread, residual = confidence * (1 - confidence), (outcome - confidence) ** 2
        of_spread, of_residual, squares = total(spread), total(residual), n
        of_variance = of_residual if bins.noise == "shares" else of_spread
        if weights is not None and not bins.copies:
            of_variance = total(weights * (residual if bins.noise == "shares" else spread))
            squares = total(weights)
        for row, column in zip(sums[3:7], (of_spread, of_variance, squares, of_residual), strict=True):
            row += column
    if ecd is not None:
        sums[-1] += total(ecd)


@cache
def _inner_edges(n_bins: int) -> Any:
    return np.arange(1, n_bins) / n_bins


def _event_chunks(element: int, size: int, events: EventColumns) -> Iterator[list[Any]]:
    """Yield `size` events of one batch element at a time, as columns `(n,)`."""
    for start in range(0, events.confidence.shape[-1], size):
        yield [None if column is None else column[element, start : start + size] for column in events]


def class_sums(rows: ClassRows, target: Tensor, bins: Bins, sums: Tensor) -> None:
    """Fill zeros `sums` `(C, F, B)` with the result of `bin_sums.class_bins`; F = 7 adds the sums of noise to F = 3."""
    values, from_logits, weights, top, confidence = rows
    n_classes, n_sums, n_bins = sums.shape
    right = bins.right
    if values.device.type != "cpu":  # collecting the probabilities >= 1/B would synchronise the device
        size = max(1, _ENTRIES_OFF_CPU // n_classes)
        for start in range(0, len(values), size):
            block = slice(start, start + size)
            w = None if weights is None else weights[block]
            sums += class_formula(values[block], target[block], w, None, None, from_logits, bins)
        return
    if n_classes <= _FEW_CLASSES and weights is None:
        _add_few_classes(rows, target, bins, sums)
        return
    # A block of rows: 1. collect the probabilities >= 1/B, at most B in a row; 2. sum all others over whole columns;
    # 3. add the collected ones to their bins; 4. add the outcomes. `scatter_add` of all entries would be slower,
    # because it adds one entry at a time.
    noise, squared = n_sums == 7, weights is not None and not bins.copies
    flat = sums.view(-1)
    for start in range(0, len(values), _ROWS):
        block = slice(start, start + _ROWS)
        w = torch.ones_like(confidence[block]) if weights is None else weights[block]
        known = (target[block] >= 0) & (target[block] < n_classes)
        label = target[block].masked_fill(~known, 0)
        flat_indices, reached, label_probs = [], [], []
        # Allocate the buffers once. Temporary tensors for every chunk would fragment the heap.
        size = min(_ENTRIES, values[block].numel()) + n_classes
        mask = np.empty(size, bool)
        wide = torch.empty(1 if weights is None else 2, size, dtype=sums.dtype, device="cpu")
        for part, q in _chunks(values[block], top[block], confidence[block], from_logits):
            # 1. Collect the probabilities >= 1/B, and replace them by 0.
            row_weight = w[part].unsqueeze(-1)
            if weights is not None:
                q.masked_fill_(row_weight == 0, 0)
            label_probs.append(q.gather(-1, label[part].unsqueeze(-1)).view(-1))
            entries = q.view(-1)
            above = _indices_at_least(entries, BELOW_EDGE / n_bins, mask)
            reached.append(entries.index_select(0, above))
            entries.index_fill_(0, above, 0)
            # 2. Add all other probabilities to the first bin of their class, by sums over whole columns.
            terms = weighted = wide[0, : len(entries)].view(q.shape).copy_(q)
            if weights is not None:
                weighted = wide[1, : len(entries)].view(q.shape)
                # Sum the weights in the first bin: subtraction from the total would lose small weights.
                sums[:, 0, 0] += weighted.copy_(row_weight).view(-1).index_fill_(0, above, 0).view(q.shape).sum(0)
                if noise and squared:
                    sums[:, 5, 0] += weighted.square_().sum(0)
                torch.mul(terms, row_weight, out=weighted)
            sums[:, 1, 0] += (total := weighted.sum(0))
            if noise:  # sum w q (1 - q) = sum w q - sum w q^2, with little cancellation for q < 1/B
                sums[:, 3, 0] += total
                sums[:, 3, 0] -= weighted.mul_(terms).sum(0)
            if noise and squared:
                sums[:, 4, 0] -= weighted.mul_(row_weight).sum(0)
                sums[:, 4, 0] += terms.mul_(row_weight.square()).sum(0)
            flat_indices.append(above.add_(part.start * n_classes))
        # 3. Add the collected probabilities to their bins one by one.
        flat_index, entry = torch.cat(flat_indices), torch.cat(reached).to(sums.dtype)
        row = flat_index // n_classes
        k = flat_index.sub_(row * n_classes)
        cell = k * (n_sums * n_bins) + bin_index(entry, n_bins, right)
        share = w[row]
        flat.index_add_(0, cell, share)
        flat.index_add_(0, cell + n_bins, share * entry)
        if noise:
            spread = share * (entry * (1 - entry))
            flat.index_add_(0, cell + 3 * n_bins, spread)
            if squared:
                flat.index_add_(0, cell + 4 * n_bins, spread.mul_(share))
                flat.index_add_(0, cell + 5 * n_bins, share.square())
        # 4. Outcomes: add the weight of every row to the bin of its label.
        value = torch.cat(label_probs).to(sums.dtype)
        cell = label * (n_sums * n_bins) + 2 * n_bins + bin_index(value, n_bins, right)
        share = w.masked_fill((w == 0) | ~known, 0)
        flat.index_add_(0, cell, share)
        if noise:  # (1 - q)^2 = q^2 + 1 - 2 q; the sum of q^2 is added below
            flat.index_add_(0, cell + 4 * n_bins, share * (1 - 2 * value))
    if weights is None:  # number of rows in the first bin: all rows minus the rows in other bins
        sums[:, 0, 0] += len(values) - sums[:, 0].sum(-1)
    if noise:
        sums[:, 6] += sums[:, 1] - sums[:, 3]
        if not squared:
            sums[:, 4], sums[:, 5] = sums[:, 3], sums[:, 0]


def _add_few_classes(rows: ClassRows, target: Tensor, bins: Bins, sums: Tensor) -> None:
    """Compute `class_sums` of few classes without weights, of whose probabilities many are above 1/B.

    Blocks are transposed, because softmax of short rows uses no vector instructions.
    """
    values, from_logits, _, _, confidence = rows
    for start in range(0, len(values), _COLUMN):
        block = slice(start, start + _COLUMN)
        x, scale, label = values[block].to(_dtype(values)), confidence[block], target[block].numpy()
        columns = torch.from_numpy(np.ascontiguousarray(x.numpy().T))  # for a transpose faster than torch
        if from_logits:
            largest = columns.amax(0)
            if not largest.isfinite().all():  # rare
                columns = spread_infinite_logits(columns, 0)
                largest = columns.amax(0)
            scale = scale.to(x.dtype)
        for k, of_class in enumerate(sums.numpy()):
            q = elementwise(torch.exp, columns[k] - largest).mul_(scale) if from_logits else columns[k]
            wide = q.double()
            cell = _fast_bin_index(q, bins.n_bins, bins.right, wide).numpy()
            cell += np.int64(bins.n_bins) * (label == k)
            _add_labels(bins, of_class, cell, wide.numpy(), None)


def store(found: Tensor, sums: Tensor) -> None:
    """Fill the result `(C, F, B)` of `class_sums` with the sums of compiled loops.

    For weight w, probability q and outcome y, they are those of w, w q, w y and, if noise is included, w q (1 - q) and
    w (y - q)^2 - w q^2 = w y (1 - 2 q), which is 0 except for the label. With squared weights, those of w^2 q (1 - q)
    and w^2 follow.
    """
    sums[:, :3] = found[:, :3]
    if sums.shape[1] > 3:
        sums[:, 3] = found[:, 3]
        sums[:, 4], sums[:, 5] = (found[:, 5], found[:, 6]) if found.shape[1] > 5 else (found[:, 3], found[:, 0])
        sums[:, 6] = found[:, 4] + found[:, 1] - found[:, 3]  # the sum of w q^2 is that of w q minus w q (1 - q)


def class_gradient(rows: ClassRows, target: Tensor, right: bool, grads: Tensor, out: Tensor) -> None:
    """Fill `out` with the gradient in `values`: w g_k for probabilities q, w q_k (g_k - sum_j q_j g_j) for logits.

    g_k = a_k + 2 c_k (q_k - y_k) for outcome y_k. Here a_k and c_k are the entries of `grads` `(C, F, B)`, the gradient
    in the sums, for class k and the bin of q_k: those for the sums of w q and of w (y - q)^2.
    """
    values, from_logits, weights, top, confidence = rows
    n_bins = grads.shape[-1]
    curves = grads[:, 6] if grads.shape[1] > 3 else None
    grads = grads[:, 1]
    for block, q in _chunks(values, top, confidence, from_logits):
        if q.device.type == "cpu":  # start with the gradients of the first bin, which contains most probabilities
            slope = grads[:, 0].to(q.dtype).repeat(len(q), 1)
            row, k = (q >= BELOW_EDGE / n_bins).nonzero(as_tuple=True)
            slope[row, k] = grads[k, bin_index(q[row, k], n_bins, right)].to(q.dtype)
        else:
            slope = grads.T.gather(0, bin_index(q, n_bins, right)).to(q.dtype)
        if curves is not None:
            curve = 2 * curves.T.gather(0, bin_index(q, n_bins, right)).to(q.dtype)
            label = target[block].unsqueeze(-1)
            known = (label >= 0) & (label < q.shape[-1])
            label = label.masked_fill(~known, 0)
            slope = slope.addcmul(curve, q).scatter_add(1, label, -curve.gather(1, label) * known)
        slope = through_softmax(q, slope, values[block]) if from_logits else slope
        if weights is not None:
            w = weights[block].unsqueeze(-1)
            slope = slope.mul_(w.to(q.dtype)).masked_fill_(w == 0, 0)
        out[block] = slope


def _chunks(values: Tensor, top: Tensor, confidence: Tensor, from_logits: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows with their probabilities `(n, C)`, in a reused buffer that the caller may overwrite."""
    on_cpu = values.device.type == "cpu"
    n = max(1, (_ENTRIES if on_cpu else _ENTRIES_OFF_CPU) // values.shape[-1])
    dtype = _dtype(values)
    buffer = torch.empty(min(n, len(values)), values.shape[-1], dtype=dtype, device=values.device)
    first, confidences = top.unsqueeze(-1), confidence.unsqueeze(-1).to(dtype)
    for start in range(0, len(values), n):
        block = slice(start, min(start + n, len(values)))
        x, q = values[block], buffer[: block.stop - start]
        if from_logits:
            torch.softmax(x if on_cpu else spread_infinite_logits(x), -1, dtype=dtype, out=q)
            q_top = q.gather(-1, first[block])
            if on_cpu and not math.isfinite(q_top.sum()):  # rare: softmax is NaN for rows with a logit of +inf
                torch.softmax(spread_infinite_logits(x), -1, dtype=dtype, out=q)
                q_top = q.gather(-1, first[block])
            # Scale rows to the given confidence of the top class, which is more accurate than a float32 softmax.
            q.mul_(confidences[block] / q_top).scatter_(-1, first[block], confidences[block])
        else:
            q.copy_(x)
        yield block, q


def _dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _fast_bin_index(values: Tensor, n_bins: int, right: bool, wide: Tensor) -> Tensor:
    """Return `bin_index`: floor(values * n_bins), except near bin edges, where this can be wrong by rounding errors.

    `wide` are the same values in float64.
    """
    scaled = wide * n_bins
    if values.dtype != torch.float64 and not right and n_bins <= _MAX_EXACT:
        # The product has at most 24 + 14 bits. No number of 24 bits is between an edge and its float64 value.
        return scaled.clamp_(max=n_bins - 1).long().clamp_(min=0)
    scaled.clamp_(0.3, n_bins - 0.3)  # 0 and 1 do not count as edges: all values near them are in the outer bins
    index = scaled.long()
    tolerance = 1e-15 * n_bins
    low, high = (x.item() for x in scaled.frac_().aminmax())
    if not (low > tolerance and high < 1 - tolerance):  # negated to include NaN
        near = torch.from_numpy(np.flatnonzero(~(abs(scaled.numpy() - 0.5) < 0.5 - tolerance)))
        index[near] = bin_index(values[near], n_bins, right)
    return index


def _indices_at_least(entries: Tensor, low: float, mask: NDArray[np.bool_]) -> Tensor:
    """Return the indices of the entries >= `low`, by numpy because its comparison and search are faster."""
    x = entries.numpy()
    return torch.from_numpy(np.flatnonzero(np.greater_equal(x, x.dtype.type(low), out=mask[: len(x)])))
