"""Statistics of rows by torch and numpy, in blocks.

On the CPU, blocks fit into the cache. A call of numpy takes less time than a call of torch, and calls take most of the
time for a small batch. torch computes exponentials, logarithms and sums of long rows, in all its threads. Results of a
row are bitwise equal at any position in the input: softmax and sums process every row separately, and `applied` pads
the arguments of other functions. Other devices have few operations for large blocks.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.logs import LANES, elementwise, spread_infinite_logits, wide_dtype
from torchcalib.ops.softmax_stats.formula import LOWEST, Detail
from torchcalib.ops.softmax_stats.logit_sums import gradient_terms

_FEW_CLASSES = 16  # largest number of classes for which blocks are transposed
_ENTRIES = 2**17  # entries of a transposed block: fewer would need more calls, and more would not fit the cache
_CHUNK = 2**19  # entries of other blocks on the CPU: fewer would need more calls of threads
_CHUNK_OFF_CPU = 2**24  # entries of blocks on other devices: larger blocks need fewer kernel launches
_CONVERTED = 2**20  # entries of float16 and bfloat16 that are converted at a time
_TINY = 1e-30  # float32 numbers above it have all their digits
_FEW_ENTRIES = 2**11  # largest number of entries of a transposed block for which `argmax` finds the top classes faster


def forward(
    values: Tensor, target: Tensor, from_logits: bool, tolerance: float, detail: Detail = "entropy"
) -> tuple[Tensor, Tensor]:
    """Return the first four `RowStatistics` `(4, R)`, and the top classes `(R,)`, of rows `(R, C)`; see `rows`."""
    on_cpu, parts = values.device.type == "cpu", []
    size = max(1, (_CONVERTED if on_cpu else _CHUNK_OFF_CPU) // values.shape[-1])
    if on_cpu and values.itemsize >= 4:  # without conversion
        size = len(values)
    for start in range(0, len(values), size):
        x, h = values[start : start + size], target[start : start + size]
        if on_cpu:
            found = of_array(array_of(x.resolve_neg()), h.numpy(), from_logits, tolerance, detail)
            parts.append((torch.from_numpy(found[0]), torch.from_numpy(found[1])))
            continue
        label = h.clamp(0, x.shape[-1] - 1)
        if from_logits:
            scores, top = _scores_of_logits(x, label, detail)
        else:
            scores, top = _scores_of_probabilities(x, label, tolerance, detail)
        scores[:2].masked_fill_(label != h, torch.nan)  # testing for invalid labels would synchronise the device
        parts.append((scores, top))
    scores, top = _joined(parts)
    return scores, top


def labelled_rows(
    values: Any,
    target: Any,
    from_logits: bool,
    tolerance: float,
    detail: Detail,
    weights: Any,
    groups: Any,
    n: int,
    places: Any = None,
) -> tuple[Any, Any, Any, Any] | None:
    """Return confidences, outcomes, top classes and totals of rows; None if a row or a label is invalid.

    All arguments are numpy arrays. `weights` are positive, or None for 1; `groups` are in [0, n), or None for n = 1.
    The rows are those of `values` at `places`, in increasing order, or all of them if it is None. Outcomes are whether
    the top class is the label, uint8. Totals `(6, n)` are sums of the first four `RowStatistics`, of the outcomes and
    of the weights in each group. Statistics beyond `detail` are undefined.
    """
    if places is None or class_axis(values.shape[1]) == 0:  # which copies rows in any case
        scores, top = of_array(values, target, from_logits, tolerance, detail, places)
    elif 2 * len(places) < len(values):
        blocks = blocks_of(len(places), values.shape[1], _CONVERTED)
        found = [of_array(values[places[k]], target[k], from_logits, tolerance, detail) for k in blocks]
        scores, top = (np.concatenate(columns, -1) for columns in zip(*found, strict=True))
    else:  # rows that are left out take less time than a copy of the others
        label = np.zeros(len(values), np.int64)
        label[places] = target
        scores, top = of_array(values, label, from_logits, tolerance, detail)
        scores, top = scores.take(places, 1), top.take(places)
    outcomes = (top == target).view(np.uint8)
    if groups is not None:
        rows = [*scores, outcomes]
        columns = [*(rows if weights is None else [x * weights for x in rows]), weights]
        totals = np.stack([np.bincount(groups, x, n) for x in columns])
    elif weights is not None:
        # Not matrix products, whose threads wait for each other while other programs run
        of_outcomes = np.einsum("n,n->", outcomes, weights)
        totals = np.array([*np.einsum("kn,n->k", scores, weights), of_outcomes, weights.sum()])[:, None]
    else:
        totals = np.array([*scores.sum(-1), np.count_nonzero(outcomes), len(outcomes)])[:, None]
    is_valid = not math.isnan((totals[0] + totals[3]).sum())  # log-probabilities are at most 0
    return (scores[3], outcomes, top, totals) if is_valid else None


def of_array(
    values: Any, target: Any, from_logits: bool, tolerance: float, detail: Detail, places: Any = None
) -> tuple[Any, Any]:
    """Return the results of `forward` on the CPU, for arrays of float32 or float64 rows `(n, C)` and labels.

    Few classes may have `places` as for `labelled_rows`. With detail "label" and logits, the top class can be replaced
    by the label.
    """
    n, n_classes = len(target), values.shape[1]
    axis = class_axis(n_classes)
    if axis == 0 and detail == "label":
        detail = "confidence"  # which takes less time than a softmax of short rows
    if n == 1:  # duplicate the row, because torch and numpy sum a single row in a different order
        values = values if places is None else values[places]
        scores, top = of_array(values.repeat(2, 0), target.repeat(2), from_logits, tolerance, detail)
        return scores[:, :1], top[:1]
    blocks = blocks_of(n, n_classes, _CHUNK if axis else _ENTRIES)
    memory = np.empty((3, -(-n // len(blocks)) * n_classes + LANES), values.dtype)
    scores, tops = np.zeros((4, n)), []
    replace_infinite = False  # infinite logits are rare, and only replaced if a sum is not finite
    with np.errstate(all="ignore"):
        for rows in blocks:
            block, label, into, at = values, target, scores, places
            if len(blocks) > 1:
                label, into = target[rows], scores[:, rows]
                block, at = (values[rows], None) if places is None else (values, places[rows])
            is_known = label.view(np.uint64).max() < n_classes  # negative labels are large then
            known = label if is_known else label.clip(0, n_classes - 1)
            if not from_logits:
                x = _rows_of(block, memory, axis, at)
                top = _fill_from_probabilities(x, axis, memory, known, tolerance, detail, into)
            else:
                if not replace_infinite:
                    x = _rows_of(block, memory, axis, at)
                    top = _fill_from_logits(x, axis, memory, known, detail, into, False)
                    replace_infinite = not math.isfinite(into[2:].sum())
                if replace_infinite:
                    block = block if at is None else block[at]
                    x = _rows_of(spread_infinite_logits(torch.from_numpy(block)).numpy(), memory, axis)
                    top = _fill_from_logits(x, axis, memory, known, detail, into, True)
            if not is_known:
                into[:2, label != known] = np.nan
            tops.append(top)
    return scores, tops[0] if len(tops) == 1 else np.concatenate(tops)


def class_axis(n_classes: int) -> int:
    """Return the axis of the classes in a block: few classes are transposed, so that vectors span many rows."""
    return 0 if n_classes <= _FEW_CLASSES else 1


def blocks_of(n: int, n_classes: int, entries: int) -> list[slice]:
    """Split n >= 2 rows into blocks of at least two rows, and of about `entries` entries at most."""
    n_blocks = max(1, min(n // 2, -(-n * n_classes // entries)))
    return [slice(n * k // n_blocks, n * (k + 1) // n_blocks) for k in range(n_blocks)]


def array_of(values: Tensor) -> Any:
    """Return values as an array; float16 and bfloat16 become float32, because numpy has no bfloat16."""
    return (values if values.itemsize >= 4 else values.float()).numpy()


def copied(block: Any, memory: Any, axis: int) -> Any:
    """Copy rows to the memory and its dtype, with the given class axis."""
    source = block if axis else block.T
    x = memory[: source.size].reshape(source.shape)
    np.copyto(x, source)  # for a transpose faster than torch
    return x


def _rows_of(block: Any, memory: Any, axis: int, places: Any = None) -> Any:
    """Return rows, or those at `places`, as a read-only array with the given class axis, copied only if necessary."""
    if places is not None:
        x = memory[0, : len(places) * block.shape[1]].reshape(-1, len(places))
        for column, of_class in zip(block.T, x, strict=True):
            column.take(places, out=of_class, mode="clip")  # other modes copy once more
        return x
    return block if axis and block.flags.c_contiguous else copied(block, memory[0], axis)


def _fill_from_logits(
    x: Any, axis: int, memory: Any, label: Any, detail: Detail, scores: Any, with_infinite: bool
) -> Any:
    """Fill the scores `(4, n)` of logits, and return the top classes.

    Let q be a multiple of the probabilities. The scores need sums of q, q^2 and q (x - max x) over all classes except
    the top class, whose q would round small q of other classes to 0. The last one is NaN for logits of -inf, unless
    `with_infinite`. With detail "label", the label takes the place of the top class.
    """
    entries, entries_of_q = x.reshape(-1), memory[1, : x.size]
    q = entries_of_q.reshape(x.shape)
    if axis:
        torch.softmax(torch.from_numpy(x), 1, out=torch.from_numpy(q))  # faster than `exp`
        top = label if detail == "label" else x.argmax(1)
        at_top = places(top, x.shape, axis)
        q_top = entries_of_q[at_top].astype(np.float64)
        entries_of_q[at_top] = 0
        rest = sum_of_rows(q, axis) / q_top  # relative to the top class
    else:
        x_top = x.max(0)
        top = _first_largest(x, x_top)
        np.subtract(x, x_top, out=q)
        applied(torch.exp, memory[1], x.size)
        at_top = places(top, x.shape, axis)
        entries_of_q[at_top] = 0
        q_top, rest = 1, q.sum(0, dtype=np.float64) + (x_top - x_top)  # NaN for infinite logits and NaN
    total = 1 + rest
    confidence = np.divide(1, total, out=scores[3])
    if detail == "top":
        return top
    log_total = applied(torch.log1p, rest)
    if detail == "label":
        np.subtract(0, log_total, out=scores[0])
        tiny = (q_top < _TINY).nonzero()[0]
        if tiny.size:  # q of the label has few digits, or is 0
            shift = entries[at_top[tiny]] - x[tiny].max(1).astype(np.float64)
            scores[0, tiny] = shift + applied(torch.log, q[tiny].max(1).astype(np.float64))
        return top
    x_top = entries[at_top]
    shift = entries[places(label, x.shape, axis)] - x_top.astype(np.float64)
    np.subtract(shift, log_total, out=scores[0])
    if detail == "confidence":
        return top
    factor = confidence / q_top
    if detail == "entropy":
        product = memory[2, : x.size].reshape(x.shape)
        shifts = torch.from_numpy(product)
        torch.sub(torch.from_numpy(x), torch.from_numpy(x_top).unsqueeze(axis), out=shifts)
        if with_infinite:
            shifts.clamp_(min=LOWEST)
        shifts.mul_(torch.from_numpy(q))
        scores[2] = sum_of_rows(product, axis) * factor - log_total
    torch.from_numpy(q).square_()
    squares = sum_of_rows(q, axis) * (factor * factor)
    # Squared error sum_k q_k^2 - 2 q_h + 1, without cancellation if the label is the top class: 1 - q_h = rest / total.
    if_miss = confidence * confidence + (1 - 2 * confidence * applied(torch.exp, shift))
    scores[1] = squares + np.where(label == top, np.square(rest * confidence), if_miss)
    return top


def _fill_from_probabilities(
    x: Any, axis: int, memory: Any, label: Any, tolerance: float, detail: Detail, scores: Any
) -> Any:
    """Fill the scores `(4, n)` of probabilities, NaN for rows that violate `tolerance`, and return the top classes."""
    other = memory[1, : x.size].reshape(x.shape)
    top = x.argmax(axis) if axis or x.size <= _FEW_ENTRIES else _first_largest(x, x.max(0))
    entries, at_top = x.reshape(-1), places(top, x.shape, axis)
    q_top, total = entries[at_top].astype(np.float64), sum_of_rows(x, axis).astype(np.float64)
    scores[3] = q_top
    if detail != "top":
        q_label = entries[places(label, x.shape, axis)].astype(np.float64)
        scores[0] = applied(torch.log, q_label)
    if detail == "entropy":
        np.copyto(other, x)
        applied(torch.log, memory[1], x.size)
        np.maximum(other, LOWEST, out=other)
        scores[2] = sum_of_rows(np.multiply(other, x, out=other), axis)
    if detail in ("squares", "entropy"):
        np.multiply(x, x, out=other).reshape(-1)[at_top] = 0
        scores[1] = np.square(1 - q_label) + np.where(label == top, 0, np.square(q_top) - np.square(q_label))
        scores[1] += sum_of_rows(other, axis)
    # Usually all rows are valid, which three reductions show. NaN fails every comparison.
    if x.min() >= 0 and np.abs(total - 1).max() <= tolerance < math.inf and q_top.max() <= 1:
        return top
    is_valid = np.isfinite(scores[2]) if detail == "entropy" else (x.min(axis) >= 0) & np.isfinite(total)
    if not is_valid.all():
        scores[2:, ~is_valid] = np.nan
    if math.isfinite(tolerance):
        is_valid &= (np.abs(total - 1) <= tolerance) & (q_top <= 1)
        if not is_valid.all():
            scores[:, ~is_valid] = np.nan
    return top


def _first_largest(x: Any, largest: Any) -> Any:
    """Return the index of the first maximum `largest` of every column of `x` `(C, n)`, C <= 255; that of NaN if any."""
    if x.size > _FEW_ENTRIES and not np.isnan(largest).any():
        is_top = x == largest
        if np.count_nonzero(is_top) == x.shape[1]:  # no ties
            classes = np.arange(len(x), dtype=np.uint8)[:, np.newaxis]
            return np.add.reduce(is_top.view(np.uint8) * classes, 0, np.uint8).astype(np.int64)
    return x.argmax(0)


def places(classes: Any, shape: Sequence[int], axis: int) -> Any:
    """Return the index of a class of each row in a flat array. One index is faster than a row and a column."""
    rows = np.arange(len(classes))
    return rows * shape[1] + classes if axis else classes * shape[1] + rows


def sum_of_rows(x: Any, axis: int) -> Any:
    """Return the sum of every row. torch splits long rows among its threads, and numpy calls are faster for others."""
    return torch.from_numpy(x).sum(1).numpy() if axis else x.sum(0)


def applied(function: Callable[..., Tensor], x: Any, size: int | None = None) -> Any:
    """Apply an elementwise function of torch: a new array, or the first `size` entries of `x` in place.

    The length is a multiple of `LANES`, because torch uses scalar code for the last numbers, which rounds differently.
    """
    if size is not None:
        given = torch.from_numpy(x[: -(-size // LANES) * LANES])
        return function(given, out=given)
    padded = x
    if len(x) % LANES:
        padded = np.ones(-(-len(x) // LANES) * LANES)
        padded[: len(x)] = x
    return function(torch.from_numpy(padded)).numpy()[: len(x)]


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill `out` with the gradient in `values`, given the results of `forward` and the gradients in them, `(4, R)`.

    For logits x the gradient is q (a + b q + c (x - max x)). For probabilities q it is b q + c (log q + 1). The scores
    and incoming gradients of a row determine its coefficients a, b, c. The label and the top class have further terms.
    Their gradients can have the factor 1 - q, which float32 would round to 0, and are computed in `wide_dtype`.
    """
    on_cpu = values.device.type == "cpu"
    if on_cpu and from_logits and not grads[1:3].any():  # then b = c = 0
        _fill_linear_gradient(values, target, scores, top, grads, out)
        return
    size = max(2, (_CHUNK if on_cpu else _CHUNK_OFF_CPU) // values.shape[-1])
    for start in range(0, len(values), size):
        block = slice(start, start + size)
        x, h, first, upstream = values[block].to(_dtype(values)), target[block], top[block], grads[:, block]
        # An invalid label is replaced by class 0, and its gradient by NaN at the end.
        known = (h >= 0) & (h < x.shape[-1])
        label, first = h.masked_fill(~known, 0).unsqueeze(-1), first.unsqueeze(-1)
        # Rows with +inf, and all rows whose incoming gradients are 0, have gradient 0.
        flat = (upstream == 0).all(0)
        if from_logits:
            flat |= x.gather(-1, first).squeeze(-1) == torch.inf
            result = _logit_gradient(x, label, first, scores[:, block], upstream)
        else:
            at_label = x.gather(-1, label).squeeze(-1).to(scores.dtype)
            result = _probability_gradient(x, label, first, at_label, upstream)
        if not on_cpu or bool((flat | ~known).any()):  # on a GPU the test would synchronise the device
            result = result.masked_fill(~known.unsqueeze(-1), torch.nan).masked_fill(flat.unsqueeze(-1), 0)
        out[block] = result


def _logit_gradient(x: Tensor, label: Tensor, first: Tensor, scores: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient in logits `(n, C)` by the formula of `backward`, with its terms for label and top class."""
    # All classes by the formula, then the label and the top class again by their terms in `wide_dtype`.
    terms = gradient_terms(scores, grads, (label == first).squeeze(-1))
    confidence, a, b, c, for_top, for_label = (column.to(x.dtype).unsqueeze(-1) for column in (scores[3], *terms))
    shifts = (x - x.gather(-1, first)).clamp_(min=LOWEST)
    q = shifts.softmax(-1)  # not exp, whose rounding depends on the position of the row
    q = q.mul_(confidence / q.gather(-1, first))
    result = shifts.mul_(c).add_(a).addcmul_(q, b).mul_(q)
    return result.scatter_(-1, first, for_top).scatter_(-1, label, for_label)


def _probability_gradient(x: Tensor, label: Tensor, first: Tensor, q_h: Tensor, grads: Tensor) -> Tensor:
    """Return the gradient in probabilities `(n, C)` by the formula of `backward`, with its terms at label and top."""
    grad_log, grad_square, grad_entropy, grad_top = grads
    grad_label = (grad_log / q_h + grad_entropy * (elementwise(torch.log, q_h) + 1)).masked_fill(q_h == 0, 0)
    columns = 2 * grad_square, grad_entropy, grad_label + 2 * grad_square * (q_h - 1), grad_top
    b, c, for_label, more_at_top = (column.to(x.dtype).unsqueeze(-1) for column in columns)
    result = torch.log(x).add_(1).masked_fill_(x == 0, 0).mul_(c).addcmul_(x, b)
    return result.scatter_(-1, label, for_label).scatter_add_(-1, first, more_at_top)


def _fill_linear_gradient(
    values: Tensor, target: Tensor, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill `out` like `backward` for logits, if only log-probabilities and confidences have gradients.

    The gradient is a q, with further terms for the label and the top class.
    """
    n, n_classes = values.shape
    labels, tops, log_prob, confidence, of_log, of_confidence = (
        x.numpy() for x in (target, top, scores[0], scores[3], grads[0], grads[3])
    )
    known = (labels >= 0) & (labels < n_classes)
    labels = np.where(known, labels, 0)
    with np.errstate(invalid="ignore"):
        a = -of_log - of_confidence * confidence
        at_top = confidence * (a + of_confidence)
        at_label = np.where(labels == tops, at_top, a * applied(torch.exp, log_prob)) + of_log
    factors = torch.from_numpy(a).unsqueeze(1).to(torch.promote_types(values.dtype, torch.float32))
    is_flat = (grads == 0).all(0)
    for rows in blocks_of(n, n_classes, _CHUNK):
        x = values[rows].to(factors.dtype)
        # Memory in the order of rows, unlike that of a transposed `x`
        result = out[rows] if out.dtype == x.dtype else torch.empty(x.shape, dtype=x.dtype, device="cpu")
        torch.softmax(x, 1, out=result).mul_(factors[rows])
        is_flat[rows] |= x.gather(1, top[rows].unsqueeze(1)).squeeze(1) == torch.inf
        entries = result.numpy().reshape(-1)
        entries[places(tops[rows], x.shape, 1)] = at_top[rows]
        entries[places(labels[rows], x.shape, 1)] = at_label[rows]
        if out.dtype != result.dtype:
            out[rows] = result
    # Rows with +inf, and all rows whose incoming gradients are 0, have gradient 0.
    if is_flat.any() or not known.all():
        out[torch.from_numpy(~known)] = torch.nan
        out[is_flat] = 0


def _dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the sums `(k, n)` and the top classes `(n,)` of chunks or blocks."""
    if len(parts) == 1:
        return parts[0]
    sums, tops = zip(*parts, strict=True)
    return torch.cat(sums, -1), torch.cat(tops, -1)


def first_largest(x: Tensor) -> Tensor:
    """Return the index of the first maximum of every row `(n, C)`; arbitrary for NaN."""
    # numpy vectorises argmax along rows, torch does not.
    return torch.from_numpy(np.argmax(x.numpy(), -1)) if x.device.type == "cpu" else torch.argmax(x, -1)


def _scores_of_logits(x: Tensor, label: Tensor, detail: Detail) -> tuple[Tensor, Tensor]:
    """Return the scores `(4, n)` and the top classes `(n,)` of rows `(n, C)`, in few operations.

    Differences of numbers of 16 bits are float32. Scores that `detail` omits are undefined.
    """
    wide, label = wide_dtype(x.device), label.unsqueeze(-1)
    largest, top = x.max(-1, keepdim=True)
    d = (x - largest.to(_dtype(x))).masked_fill_(x == largest, 0)  # equal logits have difference 0, also if infinite
    e = d.exp().scatter_(-1, top, 0)  # without the top class, whose e = 1 would round small e to 0
    rest = e.sum(-1, dtype=wide).masked_fill_((largest == -torch.inf).squeeze(-1), torch.nan)
    confidence = (rest + 1).reciprocal()
    log_prob = squared_error = neg_entropy = confidence
    if detail != "top":
        log_total = rest.log1p()
        log_prob = d.gather(-1, label).squeeze(-1) - log_total
    if detail in ("squares", "entropy"):
        # (1 - q_h)^2 + sum_{k != h} q_k^2, times the square of `total`. `rest` and `squares` exclude the top class; if
        # it is not the label, they include the label instead: 1 - e_h and 1 - e_h^2 replace one by the other.
        e_h = e.gather(-1, label)
        more = (1 - e_h).masked_fill_(label == top, 0)
        miss = rest + more.squeeze(-1)
        others = (e * e).sum(-1, dtype=wide) + (e_h + 1).mul_(more).squeeze(-1)
        squared_error = torch.addcmul(others, miss, miss).mul_(confidence).mul_(confidence)
    if detail == "entropy":
        neg_entropy = d.clamp_min_(LOWEST).mul_(e).sum(-1, dtype=wide) * confidence - log_total
    return torch.stack((log_prob, squared_error, neg_entropy, confidence)), top.squeeze(-1)


def sums(logits: Tensor, alpha: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the four sums of `LogitSums` over parts of the classes `(4, P, n)`, and top classes `(P, n)`; P is 1."""
    size, parts = max(1, (_CHUNK if logits.device.type == "cpu" else _CHUNK_OFF_CPU) // logits.shape[-1]), []
    for start in range(0, max(1, len(logits)), size):
        x = logits[start : start + size]
        top = first_largest(x).unsqueeze(-1)
        largest = x.gather(-1, top)
        shifted = torch.where(x == largest, 0, x - largest)  # equal logits have difference 0, also if infinite
        shifted = (shifted if alpha is None else shifted.mul_(alpha)).clamp_(min=LOWEST)
        e = shifted.exp().scatter_(-1, top, 0)
        product = shifted * e
        terms = e, e * e, product, product * shifted
        parts.append((torch.stack([term.sum(-1) for term in terms]), top.squeeze(-1)))
    columns, tops = _joined(parts)
    return columns.to(wide_dtype(logits.device)).unsqueeze(1), tops.unsqueeze(0)


def _scores_of_probabilities(x: Tensor, label: Tensor, tolerance: float, detail: Detail) -> tuple[Tensor, Tensor]:
    """Return the scores `(4, n)` and the top classes `(n,)` of rows `(n, C)`, as `_scores_of_logits` does.

    Rows with NaN, or with numbers that are negative or infinite, have NaN scores. So have those that violate a finite
    `tolerance`.
    """
    wide, label = wide_dtype(x.device), label.unsqueeze(-1)
    largest, top = x.max(-1, keepdim=True)
    total, confidence = x.sum(-1, dtype=wide), largest.squeeze(-1).to(wide)
    is_invalid = x.amin(-1) < 0
    if math.isfinite(tolerance):
        is_invalid = is_invalid | (total != total.clamp(1 - tolerance, 1 + tolerance)) | (confidence > 1)
    else:
        is_invalid = is_invalid | ~total.isfinite()
    log_prob = squared_error = neg_entropy = confidence
    if detail != "top":
        at_label = x.gather(-1, label).squeeze(-1).to(wide)
        log_prob = at_label.log()
    if detail in ("squares", "entropy"):
        x = x.to(_dtype(x))
        # `squares` exclude the top class; if it is not the label, they include the label instead
        squares = (x * x).scatter_(-1, top, 0).sum(-1, dtype=wide)
        more, miss = (confidence - at_label).masked_fill_((label == top).squeeze(-1), 0), 1 - at_label
        squared_error = torch.addcmul(squares, more, confidence + at_label).addcmul_(miss, miss)
    if detail == "entropy":
        neg_entropy = x.log().clamp_min_(LOWEST).mul_(x).sum(-1, dtype=wide)
    scores = torch.stack((log_prob, squared_error, neg_entropy, confidence))
    return scores.masked_fill_(is_invalid, torch.nan), top.squeeze(-1)
