"""Sums over bins by loops compiled with numba. Only `dispatch` imports this module, at first use.

A cell is a bin of one group, with index `group * B + bin`. The processor delays an addition until the previous addition
to the same cell is complete. Without groups, there are few cells. Consecutive events are therefore added to 8 copies of
the sums in turn. The copies are summed at the end.

Results do not depend on the number of threads. The division into pieces depends only on the number of events and cells,
and the sums of the pieces are added in order. Each class is summed by one thread.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.bin_sums.formula import Bins
from torchcalib.ops.bin_sums.plain import ClassRows, EventColumns, store
from torchcalib.ops.numba_math import (
    BLOCK,
    INF,
    ZERO,
    F,
    add_four,
    all_bits,
    bin_of,
    borrowed,
    clipped,
    compiled_loop,
    copy,
    exp,
    fill_exps,
    fill_limits,
    float_rows,
    is_absent,
    is_weight,
    lanes,
    step,
    weights_for_loops,
)
from torchcalib.ops.segments import BELOW_EDGE
from torchcalib.ops.threads import in_threads, n_threads

_PIECE = 2**16  # smallest number of events in a piece
_PIECES = 64  # largest number of pieces, which limits the memory for their sums
_PER_CELL = 32  # smallest number of events per cell in a piece with groups; with fewer, adding the pieces is slow
_COPIES = 8  # number of copies of the sums; a power of two
_FEW_CLASSES = 32  # largest number of classes whose probabilities are all added one by one
_PROBE = 64  # entries per group; a vector comparison skips groups without probabilities >= 1/B


@step
def _cells(confidence, n_bins, first, out):
    """Fill `out` with the cell of each value, and return the number of values near an inner bin edge.

    The cell is `first` plus the bin. The bin is floor(value * n_bins) in the dtype of the values, computed by vector
    instructions. Near inner edges it can be wrong because of rounding errors. Values near 0 and 1 do not count as near
    an edge, because the outer bins are closed: their products are moved 0.3 away from the outer edges.
    """
    number = confidence.dtype.type
    factor, low, high = number(n_bins), number(0.3), number(n_bins - 0.3)
    half, tolerance = number(0.5), number(2e-7 * n_bins)
    near = np.int32(0)
    for i in range(confidence.size):
        scaled = confidence[i] * factor
        scaled = scaled if scaled > low else low  # NaN becomes `low`
        scaled = scaled if scaled < high else high
        near += np.int32(abs(scaled - np.floor(scaled + half)) <= tolerance)
        out[i] = np.int32(scaled) + first[i]
    return near


@compiled_loop
def add_events(confidence, outcome, weights, ecd, groups, noise, edges, right, sums):
    """Add events `(N,)` to the `sums` `(F, K)` of their cells in place, one event at a time.

    Outcomes are float64, because numba compiles each combination of dtypes, which takes half a second.

    `noise` is a pair of bools (outcomes are fractional, weights are squared), or None. `edges` are `(B + 1,)`.
    """
    # 1. Copies of the sums. With many groups, neighbouring events seldom share a cell, so that one copy is enough, and
    #    several would not fit into the cache. The sums of a cell are adjacent, padded to half or all of a cache line.
    n_cells, width = sums.shape[1], 4 if noise is None else 8
    copies = _COPIES if groups is None else 1
    totals = np.zeros(copies * n_cells * width)
    w, group, more = 1.0, 0, 0.0
    for i in range(confidence.size):
        # 2. Weight w, group and confidence of the event. Events of weight 0 are skipped, because they may be NaN.
        if weights is not None:
            w = weights[i]
            if w == 0:
                continue
        if groups is not None:
            group = groups[i]
        if ecd is not None:
            more = w * ecd[i]
        value = np.float64(confidence[i])
        # 3. Cell in the copy i mod 8
        cell = (i & (copies - 1)) * n_cells + group * (edges.size - 1) + bin_of(value, edges, right)
        at = np.uintp(width * cell)
        # 4. Sums of w, w p, w y, w p (1 - p), s v, s, w (y - p)^2 and w ecd. The variance of the outcome y is v, and
        #    s is w or w^2.
        if noise is None:
            add_four(totals, at, w, w * value, w * outcome[i], more)
        else:
            spread = value * (1.0 - value)
            residual = (outcome[i] - value) ** 2
            square = w * (w if noise[1] else 1.0)
            add_four(totals, at, w, w * value, w * outcome[i], w * spread)
            variance = residual if noise[0] else spread
            add_four(totals, at + np.uintp(4), square * variance, square, w * residual, more)
    # 5. Add the copies in order, so that results are the same in every run.
    for k in range(copies * n_cells):
        for column in range(len(sums)):
            sums[column, k % n_cells] += totals[width * k + column]


@step
def _n_invalid(confidence, label, n_labels, ignored, weights, limits):
    """Return the number of events whose confidence is not in [0, 1], or with an invalid weight or label.

    Labels are in [0, n_labels), or any if it is None. Events that are absent are valid.
    """
    invalid = np.int32(0)
    for i in range(confidence.size):  # without branches, which would prevent vector instructions
        is_valid = (confidence[i] >= 0) & (confidence[i] <= 1) & (label[i] >= 0) & (label[i] < n_labels)
        if weights is not None:
            is_valid &= is_weight(weights[i], limits)
        is_valid |= is_absent(label[i], ignored, None if weights is None else weights[i])
        invalid += np.int32(not is_valid)
    return invalid


@step
def _split_by_outcome(label, event, ignored, weights, last, cells):
    """Replace each cell by two: 2 * cell, and 2 * cell + 1 for the outcome 1, that the label is `event`.

    Events that are absent get the cells from `last` on in turn, so that few additions wait for each other.
    """
    for i in range(label.size):
        cell = np.int32(2 * cells[i] + np.int32(label[i] == event))
        absent = is_absent(label[i], ignored, None if weights is None else weights[i])
        cell = np.int32(last + (i & (_COPIES - 1))) if absent else cell
        cells[i] = cell


@step
def _fill_first_cells(groups, n_bins, out):
    for i in range(groups.size):
        out[i] = np.int32(groups[i]) * np.int32(n_bins)


@step
def _add_to(x, totals):
    for k in range(x.size):
        totals[k] += x[k]


@compiled_loop
def add_labels(confidence, label, event, n_labels, ignored, weights, limits, groups, squares, edges, right, sums):
    """Add events with the outcomes 0 and 1, as `add_events` does; `squares` is True for squared weights, or None.

    The outcome of a row is 1 if its label is `event`. Cells are computed by vector instructions, and one more adds an
    event to its sums. Rows with the label `ignored` or the weight 0 are absent, and may have any values. Return False,
    and add nothing, if an event is invalid; see `_n_invalid`. `n_labels` None skips the check.
    """
    confidence, label = borrowed(confidence), borrowed(label)
    # 1. Copies as in `add_events`, with separate sums for the outcomes 0 and 1: of w, w p, w p (1 - p) and w^2. The
    #    fifth one is that of w^2 p (1 - p). For few events, adding the copies would take longer than they save.
    n_bins, n_cells, width = edges.size - 1, sums.shape[1], 4 if squares is None else 8
    copies = _COPIES if groups is None and confidence.size > BLOCK else 1
    last = 2 * copies * n_cells  # first cell of absent events, whose sums are not added
    totals = np.zeros((last + _COPIES) * width)
    first, cells = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    w = 1.0
    for i in range(min(BLOCK, confidence.size)):
        first[i] = (i & (copies - 1)) * n_cells
    for start in range(0, confidence.size, BLOCK):
        values, labels = confidence[start : start + BLOCK], label[start : start + BLOCK]
        shares: Any = None if weights is None else weights[start : start + BLOCK]
        if n_labels is not None and _n_invalid(values, labels, n_labels, ignored, shares, limits):
            return False
        if groups is not None:
            _fill_first_cells(groups[start : start + BLOCK], n_bins, first)
        # 2. Cells by vector instructions. Only if a value is near an edge, compare all with the edges in float64:
        #    a branch per event would prevent vector instructions.
        if _cells(values, n_bins, first, cells):
            for i in range(values.size):
                cells[i] = first[i] + bin_of(np.float64(values[i]), edges, right)
        _split_by_outcome(labels, event, ignored, shares, last, cells)
        # 3. Additions, which are sequential because two events can have the same cell.
        for i in range(values.size):
            at = np.uintp(width * cells[i])
            if weights is not None:
                w = np.float64(shares[i])
            mass = w * np.float64(values[i])
            spread = mass * (1.0 - np.float64(values[i]))
            add_four(totals, at, w, mass, spread, w * w)
            if squares is not None:
                totals[at + np.uintp(4)] += w * spread
    # 4. Add the copies in order. The sum of w (y - p)^2 is that of w |y - p| minus that of w p (1 - p).
    size = 2 * n_cells * width
    for start in range(size, copies * size, size):
        _add_to(totals[start : start + size], totals[:size])
    for i in range(2 * n_cells):
        k, n, mass, spread = i // 2, totals[width * i], totals[width * i + 1], totals[width * i + 2]
        sums[0, k] += n
        sums[1, k] += mass
        if i % 2:
            sums[2, k] += n
        if len(sums) > 3:
            sums[3, k] += spread
            sums[4, k] += spread if squares is None else totals[width * i + 4]
            sums[5, k] += n if squares is None else totals[width * i + 3]
            sums[6, k] += (n - mass if i % 2 else mass) - spread
    return True


@compiled_loop
def _add_columns(confidence, outcome, edges, right, sums):
    """Add rows `(n, S)` of events to the `sums` `(F, S * B)` of all columns, whose cells are column * B + bin.

    The steps are those of `add_labels`. Neighbours have different cells, so that one copy of the sums is enough. Return
    False if an outcome is neither 0 nor 1.
    """
    n_columns, n_bins, n_cells = confidence.shape[1], edges.size - 1, sums.shape[1]
    confidence, outcome = confidence.reshape(-1), outcome.reshape(-1)
    size = max(1, BLOCK // n_columns) * n_columns
    first, cells, totals = np.empty(size, np.int32), np.empty(size, np.int32), np.zeros(8 * n_cells)
    for i in range(size):
        first[i] = i % n_columns * n_bins
    for start in range(0, confidence.size, size):
        values, outcomes = confidence[start : start + size], outcome[start : start + size]
        if all_bits(outcomes) & ~1:
            return False
        if _cells(values, n_bins, first, cells):
            for i in range(values.size):
                cells[i] = first[i] + bin_of(np.float64(values[i]), edges, right)
        _split_by_outcome(outcomes, 1, None, None, 0, cells)
        for i in range(values.size):
            value = np.float64(values[i])
            add_four(totals, np.uintp(4 * cells[i]), 1.0, value, value * (1.0 - value), 0.0)
    for i in range(2 * n_cells):
        k, n, mass, spread = i // 2, totals[4 * i], totals[4 * i + 1], totals[4 * i + 2]
        sums[0, k] += n
        sums[1, k] += mass
        if i % 2:
            sums[2, k] += n
        if len(sums) > 3:
            sums[3, k] += spread
            sums[4, k] += spread
            sums[5, k] += n
            sums[6, k] += (n - mass if i % 2 else mass) - spread
    return True


# Sums of every class. Probabilities in the first bin of their class are added by vector instructions; see
# `bin_sums.class_bins`.


@lanes
def _count_at_least(x, low):
    """Return the number of entries >= `low`, as a float."""
    count = ZERO
    for k in range(x.size):
        count += F(1) if x[k] >= low else ZERO
    return count


@step
def _add_below(x, low, scale, total):
    """Add scale * x[k] to total[k] for every entry x[k] that is below `low` or NaN."""
    for k in range(x.size):
        total[k] += scale * np.float64(ZERO if x[k] >= low else x[k])


@step
def _add_below_with_spread(x, low, scale, w, total, spread):
    """Add w q to total[k] and w q (1 - q) to spread[k] for q = scale * x[k], if x[k] is below `low` or NaN."""
    factor = scale * w
    for k in range(x.size):
        part = np.float64(ZERO if x[k] >= low else x[k])
        total[k] += factor * part
        q = scale * part
        spread[k] += w * (q - q * q)


@step
def _add_weight_below(x, low, w, weight, square):
    """Add w to weight[k] and w^2 to square[k] for every entry x[k] that is below `low` or NaN."""
    for k in range(x.size):
        part = 0.0 if x[k] >= low else w
        weight[k] += part
        square[k] += part * part


@step
def _proportional(x, largest, from_logits, shifted, out):
    """Fill `out` with probabilities; for logits, with probabilities divided by the probability of the top class."""
    if not from_logits:
        copy(x, out)
    elif largest == INF:
        fill_limits(x, shifted, out)
    else:
        fill_exps(x, largest, shifted, out)


@compiled_loop
def _add_classes(values, target, weights, largest, confidence, from_logits, edges, right, first, sums):
    """Add rows to the bin sums of K consecutive classes; without weights, omit the weight of the first bin.

    The classes are the columns of `values` from `first` on, and `target` is the label minus the number of the first
    class. `largest` is the largest entry of each row, and `confidence` the probability of its top class.

    `sums` `(F, B, K)` is updated in place. It has w, w q and w y for weight w, probability q and outcome y. F > 3 adds
    the other sums of `plain.store`.
    """
    # Partial results of a row are float32, because a row has few entries and twice as many fit into a vector. Sums over
    # rows are float64, because a class can have millions of rows.
    n_sums, _, n_classes = sums.shape
    shifted, block, unused = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK)
    w = 1.0
    for i in range(len(values)):
        if weights is not None:
            w = weights[i]
            if w == 0:
                continue
        # 1. q_k = scale e_k with e_k = exp(x_k - max x) and scale = max_k q_k. The threshold 1/B is divided by the
        #    scale once, instead of multiplying every entry. It is lowered by the rounding error of q.
        row = values[i]
        scale = confidence[i] if from_logits else 1.0
        low = F(BELOW_EDGE * edges[1] / scale)
        for start in range(0, n_classes, BLOCK):
            # 2. Entries e of a block, which stays in the level-1 cache for steps 3 to 5.
            x = row[first + start : first + min(start + BLOCK, n_classes)]
            e = block[: x.size]
            _proportional(x, largest[i], from_logits, shifted[: x.size], e)
            columns = slice(start, start + BLOCK)
            # 3. Add probabilities in the first bin by vector instructions. Larger entries are replaced by 0 instead of
            #    skipped, because a branch would prevent them.
            if n_sums == 3:
                _add_below(e, low, scale * w, sums[1, 0, columns])
            else:
                _add_below_with_spread(e, low, scale, w, sums[1, 0, columns], sums[3, 0, columns])
            if n_sums == 7:
                _add_below_with_spread(e, low, scale, w * w, unused[: x.size], sums[5, 0, columns])
            if weights is not None:
                square = sums[6, 0, columns] if n_sums == 7 else unused[: x.size]
                _add_weight_below(e, low, w, sums[0, 0, columns], square)
            # 4. Add probabilities >= 1/B one by one. One comparison of a vector skips 64 entries without any.
            for begin in range(0, x.size, _PROBE):
                part = e[begin : begin + _PROBE]
                if _count_at_least(part, low) > 0:
                    for k in range(part.size):
                        if part[k] >= low:
                            value = scale * np.float64(part[k])
                            b = bin_of(value, edges, right)
                            sums[0, b, start + begin + k] += w
                            sums[1, b, start + begin + k] += w * value
                            if n_sums > 3:
                                spread = w * value * (1.0 - value)
                                sums[3, b, start + begin + k] += spread
                                if n_sums == 7:
                                    sums[5, b, start + begin + k] += w * spread
                                    sums[6, b, start + begin + k] += w * w
            # 5. Add the outcome to the bin that contains the probability of the label.
            label = target[i] - start
            if 0 <= label < x.size:
                value = scale * np.float64(e[label])
                b = bin_of(value, edges, right)
                sums[2, b, start + label] += w
                if n_sums > 3:  # (1 - q)^2 = q^2 + 1 - 2 q
                    sums[4, b, start + label] += w * (1.0 - 2.0 * value)


@step
def _fill_shifted(x, largest, out):
    """Fill flat rows `out` with the entries of the rows `x` minus the largest of the row, from which `exp` follows."""
    n_classes = x.shape[1]
    for i in range(len(x)):
        for k in range(n_classes):
            out[i * n_classes + k] = clipped(x[i, k] - largest[i])


@step
def _replace_by_exps(x):
    for k in range(x.size):
        x[k] = exp(x[k])


@compiled_loop
def _add_few_classes(values, target, largest, confidence, weights, from_logits, edges, right, sums):
    """Add contiguous rows to the `sums` `(F, C * B)` of all classes, whose cells are class * B + bin.

    Unlike in `_add_classes`, all probabilities of a block of rows are computed together, because a row is shorter than
    a few vectors. All of them are added one by one. Neighbours have different classes, so that no addition waits for
    the one before. The sums after the third are as for `plain.store`.
    """
    n_rows, n_classes = values.shape
    n_bins = edges.size - 1
    size = max(1, BLOCK // n_classes)
    first, cells = np.empty(size * n_classes, np.int32), np.empty(size * n_classes, np.int32)
    shares, rounded = np.empty(size * n_classes, np.float32), np.empty(size * n_classes, np.float32)
    scales = np.ones(size)
    totals = np.zeros(4 * sums.shape[1])  # adjacent sums of w, w q, w q (1 - q) and w^2
    has_squares, w = len(sums) == 7, 1.0
    for i in range(first.size):
        first[i] = i % n_classes * n_bins
    for start in range(0, n_rows, size):
        # 1. q_k = scale e_k as in `_add_classes`, in flat rows. Its float32 rounding is sufficient for step 2.
        rows = values[start : start + size]
        e, q = shares[: rows.size], rounded[: rows.size]
        if from_logits:
            copy(confidence[start : start + size], scales[: len(rows)])
            _fill_shifted(rows, largest[start : start + size], e)
            _replace_by_exps(e)
        else:
            copy(rows.reshape(-1), e)
        for i in range(len(rows)):
            flat = slice(i * n_classes, (i + 1) * n_classes)
            if from_logits and largest[start + i] == INF:
                fill_limits(rows[i], q[flat], e[flat])
            _multiple(e[flat], F(scales[i]), q[flat])
        # 2. Cells by vector instructions, and in float64 if a value is near an edge, as in `add_labels`.
        if _cells(q, n_bins, first, cells):
            for i in range(e.size):
                cells[i] = first[i] + bin_of(scales[i // n_classes] * np.float64(e[i]), edges, right)
        # 3. Additions
        for i in range(len(rows)):
            scale = scales[i]
            if weights is not None:
                w = weights[start + i]
                if w == 0:
                    continue
            for k in range(i * n_classes, (i + 1) * n_classes):
                value = scale * np.float64(e[k])
                spread = w * (value * (1.0 - value))
                add_four(totals, np.uintp(4 * cells[k]), w, w * value, spread, w * w)
                if has_squares:
                    sums[5, cells[k]] += w * spread
        # 4. Outcomes
        for i in range(len(rows)):
            label = target[start + i]
            if weights is not None:
                w = weights[start + i]
            if 0 <= label < n_classes and w != 0:
                k = i * n_classes + label
                sums[2, cells[k]] += w
                if len(sums) > 3:
                    sums[4, cells[k]] += w * (1.0 - 2.0 * scales[i] * np.float64(e[k]))
    for k in range(sums.shape[1]):
        sums[0, k] += totals[4 * k]
        sums[1, k] += totals[4 * k + 1]
        if len(sums) > 3:
            sums[3, k] += totals[4 * k + 2]
        if has_squares:
            sums[6, k] += totals[4 * k + 3]


@step
def _multiple(x, scale, out):
    for k in range(x.size):
        out[k] = x[k] * scale


def event_sums(events: EventColumns, bins: Bins, shape: tuple[int, int]) -> Tensor:
    """Return the bin sums of events; arguments as for `plain.event_sums`."""
    squared = events.weights is not None and not bins.copies
    options = None if bins.noise == "none" else (bins.noise == "shares", squared), _edges(bins.n_bins), bins.right
    n_series, n = events.confidence.shape
    has_labels = bins.noise != "shares" and not events.outcome.is_floating_point()
    countable = has_labels and events.weights is None and events.ecd is None
    c, o, w, d, g = columns_of(*events)

    def add(element: int, block: slice, into: Any) -> None:
        group = None if g is None else g[element, block]
        if countable and not all_bits(o[element, block]) & ~1:
            add_labels(c[element, block], o[element, block], 1, None, None, None, None, group, None, *options[1:], into)
        else:
            weight = None if w is None else w[element, block]
            ecds = None if d is None else d[element, block]
            outcome = o[element, block].astype(np.float64, copy=False)
            add_events(c[element, block], outcome, weight, ecds, group, *options, into)

    # The size of a piece depends on the numbers of events and cells, but not on the number of threads. Sums of the same
    # pieces in the same order are equal to the last bit.
    sums = np.zeros((n_series, *shape))
    size = max(_PIECE, _PER_CELL * shape[-1] if g is not None else 0, -(-n // _PIECES))
    starts = range(0, n, size)
    for element, into in enumerate(sums):
        if len(starts) == 1:
            add(element, slice(None), into)
            continue
        pieces = np.zeros((len(starts), *shape))

        def add_pieces(begin: int, end: int, element: int = element, pieces: Any = pieces) -> None:
            for piece in range(begin, end):
                add(element, slice(starts[piece], starts[piece] + size), pieces[piece])

        in_threads(add_pieces, len(starts), n)
        into[:] = pieces.sum(0)
    return torch.from_numpy(sums)


def column_sums(confidence: Tensor, outcome: Tensor, bins: Bins, n_sums: int) -> Tensor | None:
    """Return the bin sums of the columns of a matrix of events; arguments as for `plain.column_sums`."""
    n, n_columns = confidence.shape
    p, y = columns_of(confidence, outcome)
    size = -(-max(_PIECE, _PER_CELL * n_columns * bins.n_bins, p.size // _PIECES) // n_columns)
    starts = range(0, n, size)
    pieces, are_added = np.zeros((len(starts), n_sums, n_columns * bins.n_bins)), [True] * len(starts)

    def add_pieces(begin: int, end: int) -> None:
        for piece in range(begin, end):
            rows = slice(starts[piece], starts[piece] + size)
            are_added[piece] = _add_columns(p[rows], y[rows], _edges(bins.n_bins), bins.right, pieces[piece])

    in_threads(add_pieces, len(starts), p.size)
    return torch.from_numpy(pieces.sum(0)) if all(are_added) else None


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
    """Add events with labels to `sums` `(F, G * B)` in place, as `plain.add_labelled` does."""
    events = np.ascontiguousarray(confidence), np.ascontiguousarray(label), event, n_labels, ignored
    squares = None if weights is None or bins.copies or len(sums) == 3 else True
    return bool(
        add_labels(
            *events,
            *((None, None) if weights is None else weights_for_loops(weights)),
            groups,
            squares,
            _edges(bins.n_bins),
            bins.right,
            sums,
        )
    )


def columns_of(*columns: Tensor | None) -> list[Any]:
    """Convert tensors to contiguous arrays: bool to uint8, float16 and bfloat16 to float32. None is not converted."""
    arrays: list[Any] = list(columns)
    for k, x in enumerate(columns):
        if x is not None:
            narrow = x.dtype in (torch.float16, torch.bfloat16)
            numbers = x.view(torch.uint8) if x.dtype == torch.bool else x.float() if narrow else x
            arrays[k] = np.ascontiguousarray(numbers.numpy())
    return arrays


def class_sums(rows: ClassRows, target: Tensor, bins: Bins, sums: Tensor) -> None:
    """Fill `sums` with the bin sums of every class; arguments as for `plain.class_sums`."""
    values, from_logits, weights, top, confidence = rows
    n_classes, n_sums, n_bins = sums.shape
    n_distinct = n_sums if weights is not None and not bins.copies else min(n_sums, 5)
    if n_classes <= _FEW_CLASSES:
        _sums_of_few_classes(rows, target, bins, sums, n_distinct)
        return
    edges, right = _edges(n_bins), bins.right
    labels = target.numpy()
    columns = [None if x is None else x.numpy() for x in (weights, _largest(values, top), confidence)]
    pieces = float_rows(values)

    def add(begin: int, end: int) -> None:
        into = np.zeros((n_distinct, n_bins, end - begin))
        for part, x in pieces(0, len(values), slice(begin, end)):
            chunk = [None if column is None else column[part] for column in columns]
            first = begin if x.shape[1] == n_classes else 0  # contiguous rows are not copied
            _add_classes(x, labels[part] - begin, *chunk, from_logits, edges, right, first, into)
        if weights is None:  # number of rows in the first bin: all rows minus the rows in other bins
            into[0, 0] = len(values) - into[0, 1:].sum(0)
        store(torch.from_numpy(into).movedim(-1, 0), sums[begin:end])

    n_ranges = max(1, min(n_threads(), n_classes // _PROBE))  # few, because each range of classes reads all rows
    in_threads(lambda k, end: add(n_classes * k // n_ranges, n_classes * end // n_ranges), n_ranges, values.numel())


def _sums_of_few_classes(rows: ClassRows, target: Tensor, bins: Bins, sums: Tensor, n_distinct: int) -> None:
    """Do the same for few classes. The sums of pieces of rows are added in order."""
    values, from_logits, weights, top, confidence = rows
    n_classes, _, n_bins = sums.shape
    n_cells = n_classes * n_bins
    n_rows = -(-max(_PIECE, _PER_CELL * n_cells, values.numel() // _PIECES) // n_classes)
    starts = range(0, len(values), n_rows)
    pieces = np.zeros((len(starts), n_distinct, n_cells))
    weight = None if weights is None else weights.contiguous().numpy()
    columns = [target.numpy(), _largest(values, top).numpy(), confidence.numpy(), weight]
    options = from_logits, _edges(n_bins), bins.right
    rows_of = float_rows(values)

    def add_pieces(begin: int, end: int) -> None:
        for piece in range(begin, end):
            for part, x in rows_of(starts[piece], min(starts[piece] + n_rows, len(values))):
                chunk = [None if column is None else column[part] for column in columns]
                _add_few_classes(x, *chunk, *options, pieces[piece])

    in_threads(add_pieces, len(starts), values.numel())
    store(torch.from_numpy(pieces.sum(0)).view(-1, n_classes, n_bins).transpose(0, 1), sums)


@cache
def _edges(n_bins: int) -> Any:
    return np.arange(n_bins + 1) / n_bins


def _largest(values: Tensor, top: Tensor) -> Tensor:
    return values.gather(-1, top.unsqueeze(-1)).squeeze(-1).float()
