"""Sums of scores of binary predictions by compiled loops. Only `dispatch` imports this module, at first use.

The method, for blocks of at most 1,024 values, which stay in the level-1 cache:

1. Check the values and the targets of the block.
2. Fill a buffer with float64 scores. Labels need one logarithm, of the probability of the outcome. Other targets need
   two. Log losses of float32 logits and integer labels are float32, which doubles the entries of a vector.
3. Add the buffer to the sums. Multi-label input `(N, L)` is read in the order of its memory, and has a sum per column.

A branch for each value would prevent vector instructions. So each step is a loop without branches.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.numba_math import (
    BLOCK,
    ZERO,
    add_four,
    all_bits,
    clipped,
    compiled_loop,
    contiguous_array,
    count_outside,
    exp,
    exp64,
    is_absent,
    is_weight,
    lanes,
    log1p_of_fraction,
    log1p_of_fraction32,
    log64,
    log_of_complement,
    step,
    weights_for_loops,
)
from torchcalib.ops.threads import in_threads

_PIECE = 2**16  # values per partial sum, which are the unit of work of a thread


@step
def _count_shares(t):
    """Return the number of targets that are neither 0 nor 1."""
    count = np.int32(0)
    for k in range(t.size):
        count += np.int32(0) if (t[k] == 0) | (t[k] == 1) else np.int32(1)
    return count


@lanes
def _count_invalid(values, low, high, label, ignored, weights, limits):
    """Return the number of rows that are not absent and have an invalid value, label or weight."""
    count = np.int32(0)
    for k in range(values.size):
        is_valid = (values[k] >= low) & (values[k] <= high) & (label[k] & ~1 == 0)
        if weights is not None:
            is_valid &= is_weight(weights[k], limits)
        is_valid |= is_absent(label[k], ignored, None if weights is None else weights[k])
        count += np.int32(not is_valid)
    return count


@step
def _fill_log_losses(p, t, out):
    """Fill `out` with -log of the probability of the labels `t`, for probabilities p."""
    for k in range(p.size):
        x, one = np.float64(p[k]), t[k] != 0
        # log u with u = p or 1 - p, and the rounding error of 1 - p as in `log_of_complement`
        u = x if one else 1 - x
        error = 0.0 if one else (1 - u) - x
        out[k] = 0 - (log64(u) + error)


@step
def _fill_log_losses_of_logits(z, t, out):
    """Fill `out` with -log of the probability of the labels, log(1 + e^-s) for s = z or -z, without overflow."""
    for k in range(z.size):
        x = np.float64(z[k])
        signed = x if t[k] != 0 else -x
        out[k] = max(-signed, 0.0) + log1p_of_fraction(exp64(-abs(x)))


@step
def _fill_signed(z, t, out):
    """Fill `out` with the logit of the label: z for 1, and -z for 0."""
    for k in range(z.size):
        out[k] = z[k] if t[k] != 0 else -z[k]


@step
def _replace_by_log_losses(s):
    """Replace the float32 logit of each label by log(1 + e^-s). Values below 1e-38 become 0."""
    for k in range(s.size):
        x = s[k]
        s[k] = max(-x, ZERO) + log1p_of_fraction32(exp(clipped(-abs(x))))


@step
def _fill_squares(p, t, out):
    """Fill `out` with (p - t)^2 for labels or other targets."""
    for k in range(p.size):
        d = np.float64(p[k]) - np.float64(t[k])
        out[k] = d * d


@step
def _fill_squares_of_labels(p, t, out):
    """Fill `out` with (p - t)^2 for integer labels: there are no vector instructions to convert them."""
    for k in range(p.size):
        d = np.float64(p[k]) - (1.0 if t[k] != 0 else 0.0)
        out[k] = d * d


@step
def _fill_squares_of_logits(z, t, out):
    """Fill `out` with ((1 - t) p - t (1 - p))^2, where p and 1 - p have the relative error of exp."""
    for k in range(z.size):
        x, share = np.float64(z[k]), np.float64(t[k])
        e = exp64(-abs(x))
        rarer, other = e / (1 + e), 1 / (1 + e)
        d = (1 - share) * (other if x > 0 else rarer) - share * (rarer if x > 0 else other)
        out[k] = d * d


@step
def _fill_cross_entropies(p, t, out):
    """Fill `out` with -t log p - (1 - t) log(1 - p), with 0 log 0 = 0."""
    for k in range(p.size):
        x, share = np.float64(p[k]), np.float64(t[k])
        one, zero = log64(x), log_of_complement(x)
        out[k] = 0 - (share * one if share > 0 else 0.0) - ((1 - share) * zero if share < 1 else 0.0)


@step
def _fill_cross_entropies_of_logits(z, t, out):
    """Fill `out` with t log(1 + e^-z) + (1 - t) log(1 + e^z), where 0 times infinity is 0."""
    for k in range(z.size):
        x, share = np.float64(z[k]), np.float64(t[k])
        rest = log1p_of_fraction(exp64(-abs(x)))
        one, zero = max(-x, 0.0) + rest, max(x, 0.0) + rest
        out[k] = (share * one if share > 0 else 0.0) + ((1 - share) * zero if share < 1 else 0.0)


@step
def _fill_scores_of_shares(values, targets, has_shares, is_log, from_logits, out):
    """Fill `out` with scores for floating targets, of which some are between 0 and 1 if `has_shares`."""
    if not is_log and from_logits:
        _fill_squares_of_logits(values, targets, out)
    elif not is_log:
        _fill_squares(values, targets, out)
    elif has_shares and from_logits:
        _fill_cross_entropies_of_logits(values, targets, out)
    elif has_shares:
        _fill_cross_entropies(values, targets, out)
    elif from_logits:
        _fill_log_losses_of_logits(values, targets, out)
    else:
        _fill_log_losses(values, targets, out)


@lanes
def _sum(x):
    total = 0.0
    for k in range(x.size):
        total += x[k]
    return total


@step
def _add_rows(x, totals):
    """Add the rows of a flat matrix `x` to the totals of its columns."""
    for start in range(0, x.size, totals.size):
        row = x[start : start + totals.size]
        for k in range(totals.size):
            totals[k] += row[k]


@step
def _add(x, totals):
    """Add flat rows of as many values as there are `totals`."""
    if totals.size == 1:
        totals[0] += _sum(x)
    else:
        _add_rows(x, totals)


@lanes
def _weighted_sum(x, label, ignored, weights):
    """Return the sums of the weights and of their products with x, over rows that are not absent."""
    weight, total, w = 0.0, 0.0, 1.0
    for k in range(x.size):
        absent = is_absent(label[k], ignored, None if weights is None else weights[k])
        if weights is not None:
            w = np.float64(weights[k])
        weight += 0.0 if absent else w
        total += 0.0 if absent else w * np.float64(x[k])
    return weight, total


@step
def _add_in_groups(scores, label, ignored, weights, groups, totals):
    """Add weights, and scores times weights, to the totals of their groups, unless a row is absent.

    The totals are in the copy k mod 4, because neighbours often share a group. There are four for each group, of which
    two are 0: a single vector instruction then adds them.
    """
    w, n_groups = 1.0, totals.size // 16
    for k in range(scores.size):
        if is_absent(label[k], ignored, None if weights is None else weights[k]):
            continue
        if weights is not None:
            w = np.float64(weights[k])
        at = np.uintp(4 * ((k & 3) * n_groups + groups[k]))
        add_four(totals, at, w, w * np.float64(scores[k]), 0.0, 0.0)


@compiled_loop
def _add_scores(x, t, labels, shares, ignored, weights, limits, groups, is_log, from_logits, buffer, narrow, totals):
    """Add the scores of flat rows of as many values as there are `totals`; NaN if a value is invalid.

    `labels` is None for floating targets, and `shares` for integer ones: branches for None are not compiled. `buffer`
    is float64, `narrow` float32. With `ignored`, `weights` or `groups`, rows have one value, and the first two `totals`
    are the weight and the score; with `groups`, as for `_add_in_groups`. Rows with the label `ignored` or the weight 0
    are absent, and may have any values.
    """
    width = totals.size if ignored is None and weights is None and groups is None else 1
    size = max(1, BLOCK // width) * width
    is_narrow = is_log and from_logits and labels is not None and x.itemsize == narrow.itemsize
    number = x.dtype.type
    low, high = (number(-math.inf), number(math.inf)) if from_logits else (number(0), number(1))
    for start in range(0, x.size, size):
        # 1. Checks. Floating targets are labels if none is between 0 and 1.
        values, targets = x[start : start + size], t[start : start + size]
        out = buffer[: values.size]
        n_shares = 0
        w = None if weights is None else weights[start : start + size]
        if ignored is not None:
            invalid = _count_invalid(values, low, high, targets, ignored, w, limits) > 0
        elif weights is not None:
            invalid = _count_invalid(values, low, high, targets, None, w, limits) > 0
        else:
            invalid = count_outside(values, low, high) > 0
            if labels is not None:
                invalid |= all_bits(targets) & ~1 != 0
        if shares is not None:
            n_shares = _count_shares(targets)
            invalid |= n_shares > 0 and count_outside(targets, number(0), number(1)) > 0
        if invalid:
            totals[:] = math.nan
            return
        # 2. Scores
        if shares is not None:
            _fill_scores_of_shares(values, targets, n_shares > 0, is_log, from_logits, out)
        elif is_narrow:
            _fill_signed(values, targets, narrow[: values.size])
            _replace_by_log_losses(narrow[: values.size])
        elif not is_log and from_logits:
            _fill_squares_of_logits(values, targets, out)
        elif not is_log:
            _fill_squares_of_labels(values, targets, out)
        elif from_logits:
            _fill_log_losses_of_logits(values, targets, out)
        else:
            _fill_log_losses(values, targets, out)
        # 3. Sums
        if groups is not None:
            g = groups[start : start + size]
            if is_narrow:
                _add_in_groups(narrow[: values.size], targets, ignored, w, g, totals)
            else:
                _add_in_groups(out, targets, ignored, w, g, totals)
        elif ignored is not None or weights is not None:
            columns = targets, ignored, w
            found = _weighted_sum(narrow[: values.size], *columns) if is_narrow else _weighted_sum(out, *columns)
            totals[0] += found[0]
            totals[1] += found[1]
        elif is_narrow:
            _add(narrow[: values.size], totals)
        else:
            _add(out, totals)


@compiled_loop
def _add_pieces(x, t, labels, shares, is_log, from_logits, first, size, sums):
    """Add the scores of consecutive pieces, of which each has a row of `sums`; see `_add_scores`.

    A row of `x` has the values of one series, in pieces of `size` values. `first` is the number of the first piece.
    """
    n_pieces, width = -(-x.shape[1] // size), sums.shape[1]
    buffer, narrow = np.empty(max(BLOCK, width)), np.empty(max(BLOCK, width), np.float32)
    for i in range(len(sums)):
        row, piece = divmod(first + i, n_pieces)
        part = slice(piece * size, (piece + 1) * size)
        options = None, None, None, None, is_log, from_logits, buffer, narrow
        _add_scores(x[row, part], t[row, part], labels, shares, *options, sums[i])


def score_sums(values: Tensor, target: Tensor, kind: str, from_logits: bool) -> Tensor:
    """Return sums of scores; see `binary_scores.score_sums`."""
    n = values.shape[-1]
    # Multi-label input is a transposed view of rows with one value per label. Other input has one series per sum.
    is_transposed = values.dim() == 2 and len(values) > 1 and values.stride() == target.stride() == (1, len(values))
    width = len(values) if is_transposed else 1
    columns = (x.T if is_transposed else x for x in (values, target))
    x, t = (contiguous_array(column).reshape(-1, n * width) for column in columns)
    return torch.from_numpy(_sums(x, t, width, kind, from_logits).reshape(values.shape[:-1]))


def labelled_sums(
    values: Any, label: Any, kind: str, from_logits: bool, weights: Any, groups: Any, n_groups: int, ignored: int | None
) -> Any:
    """Return the weight and the sum of scores of each group as `plain.labelled_sums` does."""
    x, t = np.ascontiguousarray(values), np.ascontiguousarray(label)
    is_plain = ignored is None and weights is None and groups is None
    totals = np.zeros(1 if is_plain else 16 * n_groups)
    buffer, narrow = np.empty(BLOCK), np.empty(BLOCK, np.float32)
    columns = ignored, *((None, None) if weights is None else weights_for_loops(weights)), groups
    _add_scores(x, t, t, None, *columns, kind == "log", from_logits, buffer, narrow, totals)
    if groups is not None:
        return totals.reshape(4, n_groups, 4).sum(0).T[:2]
    return (len(t), totals.item(0)) if is_plain else (totals.item(0), totals.item(1))


def _sums(x: Any, t: Any, width: int, kind: str, from_logits: bool) -> Any:
    """Return sums `(S, width)` of the scores of S series, whose values are rows of `x` and targets rows of `t`."""
    size = max(1, _PIECE // width) * width
    n_pieces = -(-x.shape[1] // size)
    sums = np.zeros((len(x) * n_pieces, width))
    labels, shares = (None, t) if t.dtype.kind == "f" else (t, None)

    def add(begin: int, end: int) -> None:
        _add_pieces(x, t, labels, shares, kind == "log", from_logits, begin, size, sums[begin:end])

    in_threads(add, len(sums), x.size)
    return sums if n_pieces == 1 else sums.reshape(len(x), n_pieces, width).sum(1)
