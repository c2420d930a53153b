"""Sums over a batch by two launches of Triton kernels: one sums the rows, and one adds to the states.

Other kernels compute an error from the sums, its gradient in the predictions, and the samples of rank-based metrics.

Results are reproducible, although programs run in any order. Each program stores its own sums, which the second kernel
adds in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcalib.ops.batch.formula import BINS, FIRST_SCORE, BinnedError, BinRule, Columns, MeanScore, Plan, n_sums
from torchcalib.ops.bin_sums.triton import bin_errors, bin_of
from torchcalib.ops.segments import LEAST_WEIGHT, MOST_WEIGHT
from torchcalib.ops.softmax_stats import triton as softmax_stats
from torchcalib.ops.softmax_stats.triton import log1p

_CHUNK = 32  # rows that a program of one warp loads at a time
_PIECE, _PIECES = 128, 2048  # smallest number of rows per program, and largest number of programs that share the rows
_TILE = 1024  # predictions that a program of `_log_odds` or `_rank_classes` loads at a time
_AT_ONCE, _TERMS = 64, 16  # programs whose sums are added together, and numbers of the state per program
_FIRST_SCORE = tl.constexpr(FIRST_SCORE)
_LEAST_WEIGHT, _MOST_WEIGHT = tl.constexpr(LEAST_WEIGHT), tl.constexpr(MOST_WEIGHT)


def added(states: Tensor | None, columns: Columns, rows: tuple[Tensor, Tensor] | None, plan: Plan) -> Tensor:
    """Compute `batch.added` in two launches. `rows` are scores and top classes of multi-class rows."""
    parts = _sums_of_pieces(columns, rows, plan)
    found = torch.empty_like(plan.factors[0])
    n_new = len(found) - (0 if states is None else len(states))
    with torch.cuda.device_of(parts):  # Triton launches kernels on the current device
        _add[(triton.cdiv(len(found), _TERMS),)](
            found if states is None else states, plan.terms, plan.factors, parts, found, len(found), n_new,
            len(plan.terms), *parts.shape, _AT_ONCE, _TERMS, num_warps=4,
        )  # fmt: skip
    return found


def binned_error(
    states: Tensor | None, columns: Columns, rows: tuple[Tensor, Tensor] | None, plan: Plan, error: BinnedError
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `batch.value_with_gradient` in three launches, and the derivatives of the error in the sums over bins."""
    after = added(states, columns, rows, plan)
    sums, n_invalid = after[error.sums].view(-1, plan.rules[0].n_bins), None if error.drops_invalid else after[:1]
    value, slopes = bin_errors(sums, error.norm, n_invalid, error.dtype)
    return value, after, slopes


def binned_gradient(
    columns: Columns,
    rows: tuple[Tensor, Tensor] | None,
    rule: BinRule,
    slopes: Tensor,
    upstream: Tensor,
    error: BinnedError,
) -> Tensor:
    """Return the gradient of `binned_error` in the predictions, in one launch if binary, otherwise in two.

    `slopes` are the derivatives of the error in the sums over bins.
    """
    values = columns.values
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    grads = out if rows is None else torch.empty(len(values), dtype=torch.float64, device=values.device)
    is_debiased = error.norm.startswith("debiased")
    with torch.cuda.device_of(values):
        _slope[(triton.cdiv(len(values), _PIECE),)](
            *_arguments(columns, rows), slopes, upstream, grads, len(values), columns.ignore_index or 0, rule.n_bins,
            int(rule.right), int(rule.of_top), error.drops_invalid, is_debiased, *flags_of(columns), _PIECE,
            num_warps=4,
        )  # fmt: skip
    if rows is not None:
        softmax_stats.backward(values, columns.target, columns.from_logits, *rows, grads, out)
    return out


def mean_score(
    states: Tensor | None, columns: Columns, rows: tuple[Tensor, Tensor] | None, plan: Plan, score: MeanScore
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `batch.value_with_gradient` in three launches, and 1 / sum of the weights."""
    after = added(states, columns, rows, plan)
    mean, unit = after.new_empty(()), after.new_empty(())
    with torch.cuda.device_of(after):
        _fill_mean[(1,)](after[score.sums], mean, unit, num_warps=1)
    return mean, after, unit


def score_gradient(
    columns: Columns, rows: tuple[Tensor, Tensor] | None, score: MeanScore, unit: Tensor, upstream: Tensor
) -> Tensor:
    """Return the gradient of `mean_score` in the predictions, in one launch if binary, otherwise in two."""
    values = columns.values
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    grads = out if rows is None else torch.empty_like(rows[0])
    with torch.cuda.device_of(values):
        _score_slope[(triton.cdiv(len(values), _PIECE),)](
            *_arguments(columns, rows), unit, upstream, grads, len(values), columns.ignore_index or 0,
            *score.coefficients[:4], *flags_of(columns), _PIECE, num_warps=4,
        )  # fmt: skip
    if rows is not None:
        softmax_stats.backward(values, columns.target, columns.from_logits, *rows, grads, out)
    return out


def events(columns: Columns, rows: tuple[Tensor, Tensor] | None, of_top: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `batch.events` in one launch."""
    values, n = columns.values, len(columns.values)
    confidence, outcome, weight = (torch.empty(n, dtype=torch.float64, device=values.device) for _ in range(3))
    with torch.cuda.device_of(values):
        _fill_events[(triton.cdiv(n, _PIECE),)](
            *_arguments(columns, rows), confidence, outcome, weight, n, columns.ignore_index or 0, int(of_top),
            *flags_of(columns), _PIECE, num_warps=4,
        )  # fmt: skip
    return confidence, outcome, weight


def events_gradient(
    columns: Columns, rows: tuple[Tensor, Tensor] | None, of_top: bool, weight: Tensor, grads: Tensor
) -> Tensor:
    """Return the gradient in the predictions in one launch, from `grads` in the confidences of `batch.events`."""
    values = columns.values
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    with torch.cuda.device_of(values):
        if rows is not None:
            softmax_stats.backward(values, columns.target, columns.from_logits, *rows, grads, out)
        else:
            _fill_gradient[(triton.cdiv(len(values), _PIECE),)](
                values, values.stride(0), weight, grads.contiguous(), out, len(values), int(of_top),
                columns.from_logits, _PIECE, num_warps=4,
            )  # fmt: skip
    return out


def ranked(columns: Columns, rows: tuple[Tensor, Tensor] | None, of_top: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `batch.ranked` in one launch, or two for multi-class logits, and one that fills zeros."""
    values, n = columns.values, len(columns.values)
    has_log_odds = rows is not None and columns.from_logits
    is_wide = has_log_odds or (rows is None and of_top and not columns.from_logits)
    dtype = torch.float64 if is_wide else torch.promote_types(values.dtype, torch.float32)
    score = torch.empty(n, dtype=dtype, device=values.device)
    outcome = torch.empty(n, dtype=torch.uint8, device=values.device)
    n_ignored = torch.zeros(2, dtype=torch.float64, device=values.device)
    with torch.cuda.device_of(values):
        _rank[(triton.cdiv(n, _PIECE),)](
            *_arguments(columns, rows), score, outcome, n_ignored, n, columns.ignore_index or 0, int(of_top),
            *flags_of(columns), _PIECE, num_warps=4,
        )  # fmt: skip
        if rows is not None and has_log_odds:
            block = min(triton.next_power_of_2(values.shape[1]), _TILE)
            _log_odds[(triton.cdiv(n, _TILE // block),)](
                values, *values.stride(), values.shape[1], rows[1], score, n, _TILE // block, block, num_warps=4
            )
    return score, outcome, n_ignored


def ranked_classes(columns: Columns) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `batch.ranked_classes` in one launch, and one that fills zeros."""
    values, (n, n_classes) = columns.values, columns.values.shape
    dtype = torch.float64 if columns.from_logits else torch.promote_types(values.dtype, torch.float32)
    score = torch.empty(n_classes, n, dtype=dtype, device=values.device)
    outcome = torch.empty(n_classes, n, dtype=torch.uint8, device=values.device)
    n_ignored = torch.zeros(2, dtype=torch.float64, device=values.device)
    block = min(triton.next_power_of_2(n_classes), _CHUNK)
    with torch.cuda.device_of(values):
        _rank_classes[(triton.cdiv(n, _TILE // block),)](
            values, *values.stride(), columns.target, columns.target.stride(0), score, outcome, n_ignored, n, n_classes,
            columns.ignore_index or 0, columns.tolerance, columns.ignore_index is not None, columns.from_logits,
            _TILE // block, block, num_warps=4,
        )  # fmt: skip
    return score, outcome, n_ignored


def _sums_of_pieces(columns: Columns, rows: tuple[Tensor, Tensor] | None, plan: Plan) -> Tensor:
    """Return the sums of `formula` over pieces of the rows `(pieces, sums)` in one launch."""
    n = len(columns.values)
    size = max(_PIECE, triton.cdiv(n, _PIECES))
    parts = torch.empty(triton.cdiv(n, size), n_sums(plan.rules), dtype=torch.float64, device=columns.values.device)
    with torch.cuda.device_of(parts):
        _read[(len(parts), len(plan.tiles))](
            *_arguments(columns, rows), plan.tiles, parts, n, size, parts.shape[1], columns.ignore_index or 0,
            *flags_of(columns), plan.is_squared, _CHUNK, BINS, num_warps=1,
        )  # fmt: skip
    return parts


def _arguments(columns: Columns, rows: tuple[Tensor, Tensor] | None) -> list[Any]:
    """Return the columns of a batch as arguments of kernels, with their strides."""
    values = columns.values
    of_rows = [values, values, values.stride(0)] if rows is None else [*rows, len(values)]
    return [*of_rows, *labels_of(columns)]


def labels_of(columns: Columns) -> list[Any]:
    """Return labels and weights as arguments of kernels, with their strides."""
    target, weights = columns.target, columns.weights
    of_weights = [target, 0] if weights is None else [weights, weights.stride(0)]
    return [target, target.stride(0), *of_weights]


def flags_of(columns: Columns) -> list[bool]:
    """Return whether rows have weights, some are ignored, they are binary, and predictions are logits."""
    is_binary = columns.values.dim() == 1
    return [columns.weights is not None, columns.ignore_index is not None, is_binary, columns.from_logits]


@triton.jit
def _log(x):
    """Return log x, with log 0 = -inf and without a warning of the interpreter."""
    return tl.where(x == 0, float("-inf"), tl.log(tl.where(x == 0, 1.0, x)))


@triton.jit
def _times(a, b):
    """Return a * b with 0 * inf = 0."""
    return tl.where(a == 0, 0.0, a * tl.where(a == 0, 0.0, b))


@triton.jit
def weights_of(  # noqa: ANN201
    row, end, label, weights, weight_stride, valid, ignore, weighted: tl.constexpr, has_ignore: tl.constexpr
):  # fmt: skip
    """Return the weights of rows, 0 for ignored and invalid rows, and a mask of the invalid ones."""
    present = row < end
    if has_ignore:
        present = present & (label != ignore)
    if weighted:
        w = tl.load(weights + row * weight_stride, mask=present, other=0).to(tl.float64)
        present = present & (w != 0)
        valid = valid & (w >= _LEAST_WEIGHT) & (w <= _MOST_WEIGHT)
    else:
        w = present.to(tl.float64)
    used = present & valid
    return tl.where(used, w, 0.0), present & ~used


@triton.jit
def _event(values, tops, stride, row, inside, label, of_top, binary: tl.constexpr, logits: tl.constexpr):
    """Return confidence and outcome of the events of rows, float64, and whether the rows are valid."""
    if binary:
        x = tl.load(values + row * stride, mask=inside, other=0).to(tl.float64)
        if logits:
            valid = x == x
            one = x > 0
            e = tl.exp(-tl.abs(x))
            most = 1 / (1 + e)
            p = tl.where(x >= 0, most, e / (1 + e))
        else:
            valid = (x >= 0) & (x <= 1)
            one = x > 0.5
            p = x
            most = tl.where(one, x, 1 - x)
        valid = valid & ((label == 0) | (label == 1))
        hit = (label == 1) == one
        p = tl.where(of_top != 0, most, p)
        y = tl.where(of_top != 0, hit.to(tl.float64), (label == 1).to(tl.float64))
    else:
        valid = tl.load(values + row, mask=inside, other=0)
        valid = valid == valid
        p = tl.load(values + 3 * stride + row, mask=inside, other=0)
        y = (tl.load(tops + row, mask=inside, other=0) == label).to(tl.float64)
    return p, y, valid


@triton.jit
def _scores(values, stride, row, inside, label, binary: tl.constexpr, logits: tl.constexpr):
    """Return log-probability of the label, squared error and negative entropy of rows, float64."""
    if binary:
        x = tl.load(values + row * stride, mask=inside, other=0).to(tl.float64)
        y = label == 1
        if logits:
            e = tl.exp(-tl.abs(x))
            p = tl.where(x >= 0, 1 / (1 + e), e / (1 + e))
            q = tl.where(x >= 0, e / (1 + e), 1 / (1 + e))
            # The larger log-probability is -log(1 + e), the smaller one x or -x less.
            log_p = tl.where(x < 0, x, 0.0) - log1p(e)
            log_q = tl.where(x > 0, -x, 0.0) - log1p(e)
        else:
            x = tl.where((x >= 0) & (x <= 1), x, 0.0)
            p = x
            q = 1 - x
            log_p = _log(p)
            log_q = tl.where(q == 0, float("-inf"), log1p(-tl.where(q == 0, 0.0, x)))
        log_prob = tl.where(y, log_p, log_q)
        miss = tl.where(y, q, p)
        error = miss * miss
        entropy = _times(p, log_p) + _times(q, log_q)
    else:
        log_prob = tl.load(values + row, mask=inside, other=0)
        error = tl.load(values + stride + row, mask=inside, other=0)
        entropy = tl.load(values + 2 * stride + row, mask=inside, other=0)
    return log_prob, error, entropy


@triton.jit(do_not_specialize=["n", "size", "n_sums", "ignore"])
def _read(
    values, tops, stride, target, label_stride, weights, weight_stride, tiles, parts, n, size, n_sums, ignore,
    weighted: tl.constexpr, has_ignore: tl.constexpr, binary: tl.constexpr, logits: tl.constexpr,
    squared: tl.constexpr, chunk: tl.constexpr, bins: tl.constexpr,
):  # fmt: skip
    """Sum a piece of the rows. Grid: pieces, tiles. The first tile has the totals, every other one bins of a `BinRule`.

    Binary `values` are predictions. Multi-class ones are the statistics of rows, `stride` apart, and `tops` their most
    probable classes.
    """
    # 1. The bins of this program, from `formula._tiles`.
    piece, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n_bins = tl.load(tiles + 5 * tile)
    right = tl.load(tiles + 5 * tile + 1)
    of_top = tl.load(tiles + 5 * tile + 2)
    first_bin = tl.load(tiles + 5 * tile + 3)
    to = parts + piece * n_sums + tl.load(tiles + 5 * tile + 4)
    start = piece * size
    end = tl.minimum(start + size, n)
    if tile == 0:
        # 2. Totals of the rows in registers: each thread has its own rows.
        n_invalid = tl.zeros([chunk], tl.float64)
        weight = tl.zeros([chunk], tl.float64)
        sum_log = tl.zeros([chunk], tl.float64)
        sum_error = tl.zeros([chunk], tl.float64)
        sum_entropy = tl.zeros([chunk], tl.float64)
        sum_top = tl.zeros([chunk], tl.float64)
        sum_hit = tl.zeros([chunk], tl.float64)
        for begin in range(start, end, chunk):
            row = begin + tl.arange(0, chunk).to(tl.int64)
            inside = row < end
            label = tl.load(target + row * label_stride, mask=inside, other=0).to(tl.int64)
            p, hit, valid = _event(values, tops, stride, row, inside, label, 1, binary, logits)
            w, broken = weights_of(row, end, label, weights, weight_stride, valid, ignore, weighted, has_ignore)
            log_prob, error, entropy = _scores(values, stride, row, inside, label, binary, logits)
            n_invalid += broken.to(tl.float64)
            weight += w
            sum_log += _times(w, log_prob)
            sum_error += _times(w, error)
            sum_entropy += _times(w, entropy)
            sum_top += _times(w, p)
            sum_hit += w * hit
        tl.store(to, tl.sum(n_invalid, 0))
        tl.store(to + 1, tl.sum(weight, 0))
        tl.store(to + _FIRST_SCORE, tl.sum(sum_log, 0))
        tl.store(to + _FIRST_SCORE + 1, tl.sum(sum_error, 0))
        tl.store(to + _FIRST_SCORE + 2, tl.sum(sum_entropy, 0))
        tl.store(to + _FIRST_SCORE + 3, tl.sum(sum_top, 0))
        tl.store(to + _FIRST_SCORE + 4, tl.sum(sum_hit, 0))
    else:
        # 3. Sums over bins in registers, a tile of bins x rows. Atomic additions to shared bins would be in an
        #    arbitrary order. A thread has its own rows for all bins, so that it computes the bin of a row once.
        program_bins = first_bin + tl.arange(0, bins)
        count = tl.zeros([bins, chunk], tl.float64)
        confidence = tl.zeros([bins, chunk], tl.float64)
        outcome = tl.zeros([bins, chunk], tl.float64)
        spread = tl.zeros([bins, chunk], tl.float64)
        residual = tl.zeros([bins, chunk], tl.float64)
        noise = tl.zeros([bins, chunk], tl.float64)
        square = tl.zeros([bins, chunk], tl.float64)
        for begin in range(start, end, chunk):
            row = begin + tl.arange(0, chunk).to(tl.int64)
            inside = row < end
            label = tl.load(target + row * label_stride, mask=inside, other=0).to(tl.int64)
            p, y, valid = _event(values, tops, stride, row, inside, label, of_top, binary, logits)
            w, _ = weights_of(row, end, label, weights, weight_stride, valid, ignore, weighted, has_ignore)
            p = tl.where(w == 0, 0.0, p)
            in_bin = (w != 0)[None, :] & (bin_of(p, n_bins, right != 0)[None, :] == program_bins[:, None])
            v = w * (p * (1 - p))
            count += tl.where(in_bin, w[None, :], 0.0)
            confidence += tl.where(in_bin, (w * p)[None, :], 0.0)
            outcome += tl.where(in_bin, (w * y)[None, :], 0.0)
            spread += tl.where(in_bin, v[None, :], 0.0)
            residual += tl.where(in_bin, (w * (y - p) * (y - p))[None, :], 0.0)
            if squared:
                noise += tl.where(in_bin, (w * v)[None, :], 0.0)
                square += tl.where(in_bin, (w * w)[None, :], 0.0)
        mask = program_bins < n_bins
        at = to + program_bins
        tl.store(at, tl.sum(count, 1), mask=mask)
        tl.store(at + n_bins, tl.sum(confidence, 1), mask=mask)
        tl.store(at + 2 * n_bins, tl.sum(outcome, 1), mask=mask)
        tl.store(at + 3 * n_bins, tl.sum(spread, 1), mask=mask)
        tl.store(at + 4 * n_bins, tl.sum(residual, 1), mask=mask)
        if squared:
            tl.store(at + 5 * n_bins, tl.sum(noise, 1), mask=mask)
            tl.store(at + 6 * n_bins, tl.sum(square, 1), mask=mask)


@triton.jit(do_not_specialize=["n", "n_new", "n_terms", "n_parts", "n_sums"])
def _add(
    states, terms, factors, parts, found, n, n_new, n_terms, n_parts, n_sums, at_once: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Add the sums of all programs of `_read` to the states, by `Plan.terms`. Grid: blocks of the states.

    The first `n_new` numbers of the result have no state before the batch.
    """
    number = tl.program_id(0) * block + tl.arange(0, block)
    inside = number < n
    total = tl.load(states + number - n_new, mask=inside & (number >= n_new), other=0)
    for k in range(n_terms):
        source = tl.load(terms + k * n + number, mask=inside, other=0)
        sums = tl.zeros([at_once, block], tl.float64)
        for start in range(0, n_parts, at_once):
            part = start + tl.arange(0, at_once).to(tl.int64)
            mask = (part < n_parts)[:, None] & inside[None, :]
            sums += tl.load(parts + part[:, None] * n_sums + source[None, :], mask=mask, other=0)
        total += _times(tl.load(factors + k * n + number, mask=inside, other=0), tl.sum(sums, 0))
    tl.store(found + number, total, mask=inside)


@triton.jit(do_not_specialize=["n", "ignore", "n_bins", "right", "of_top"])
def _slope(
    values, tops, stride, target, label_stride, weights, weight_stride, slopes, upstream, out, n, ignore, n_bins,
    right, of_top, drops_invalid: tl.constexpr, debiased: tl.constexpr, weighted: tl.constexpr,
    has_ignore: tl.constexpr, binary: tl.constexpr, logits: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Store the gradient of an error in binary predictions, or in the confidences `(n,)` of multi-class rows.

    A confidence p of weight w and outcome y adds w p, and for a debiased error w (y - p)^2, to the sums of its bin. The
    derivatives in these sums are `slopes` `(F, B)`.
    """
    row = tl.program_id(0).to(tl.int64) * chunk + tl.arange(0, chunk)
    inside = row < n
    label = tl.load(target + row * label_stride, mask=inside, other=0).to(tl.int64)
    p, y, valid = _event(values, tops, stride, row, inside, label, of_top, binary, logits)
    w, broken = weights_of(row, n, label, weights, weight_stride, valid, ignore, weighted, has_ignore)
    bin_slopes = slopes + n_bins + bin_of(tl.where(w == 0, 0.0, p), n_bins, right != 0)
    slope = tl.load(bin_slopes, mask=inside, other=0)
    if debiased:
        slope -= 2 * (y - p) * tl.load(bin_slopes + 5 * n_bins, mask=inside, other=0)
    slope = tl.where(w == 0, 0.0, w * slope * tl.load(upstream).to(tl.float64))
    if not drops_invalid:
        slope = tl.where(broken, float("nan"), slope)
    if binary:
        _store_slope(values, stride, slope, out, row, inside & (w != 0), inside, of_top, logits)
    else:
        tl.store(out + row, slope, mask=inside)


@triton.jit
def _store_slope(values, stride, slope, out, row, used, inside, of_top, logits: tl.constexpr):
    """Store the derivatives in binary predictions, from those in the confidences of their events."""
    x = tl.load(values + row * stride, mask=used, other=0).to(tl.float64)
    centre = 0.0 if logits else 0.5
    falls = (of_top != 0) & (x < centre if logits else x <= centre)  # p is the probability of y=0
    if logits:
        e = tl.exp(-tl.abs(x))
        slope *= e / ((1 + e) * (1 + e))
        slope = tl.where((of_top != 0) & (x == 0), 0.0, slope)  # |x| has the gradient 0
    slope = tl.where(falls, -slope, slope)
    if out.dtype.element_ty != tl.float64:
        slope = slope.to(tl.float32)  # from which every narrower dtype can be rounded
    tl.store(out + row, slope.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fill_mean(sums, mean, unit):
    """Store the mean of a score, NaN without data, and 1 / sum of the weights. One program."""
    weight = tl.load(sums)
    weight = tl.where(weight == 0, float("nan"), weight)
    tl.store(mean, tl.load(sums + 1) / weight)
    tl.store(unit, 1 / weight)


@triton.jit(do_not_specialize=["n", "ignore"])
def _score_slope(
    values, tops, stride, target, label_stride, weights, weight_stride, unit, upstream, out, n, ignore,
    of_log: tl.constexpr, of_square: tl.constexpr, of_entropy: tl.constexpr, of_confidence: tl.constexpr,
    weighted: tl.constexpr, has_ignore: tl.constexpr, binary: tl.constexpr, logits: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a mean score in binary predictions, or in the scores `(4, n)` of multi-class rows."""
    row = tl.program_id(0).to(tl.int64) * chunk + tl.arange(0, chunk)
    inside = row < n
    label = tl.load(target + row * label_stride, mask=inside, other=0).to(tl.int64)
    _, _, valid = _event(values, tops, stride, row, inside, label, 1, binary, logits)
    w, _ = weights_of(row, n, label, weights, weight_stride, valid, ignore, weighted, has_ignore)
    scale = tl.where(w == 0, 0.0, w * tl.load(unit) * tl.load(upstream).to(tl.float64))
    if binary:
        # Derivatives in the logit or the probability of log-probability, squared error and negative entropy
        x = tl.load(values + row * stride, mask=inside & (w != 0), other=0).to(tl.float64)
        y = label == 1
        if logits:
            e = tl.exp(-tl.abs(x))
            spread = e / ((1 + e) * (1 + e))  # p (1 - p)
            miss = tl.where(y == (x >= 0), e / (1 + e), 1 / (1 + e))  # |y - p|
            log_slope = tl.where(y, miss, -miss)
            square_slope = -2 * log_slope * spread
            entropy_slope = _times(spread, x)
        else:
            own = tl.where(y, x, 1 - x)
            log_slope = tl.where(own == 0, 0.0, tl.where(y, 1.0, -1.0) / tl.where(own == 0, 1.0, own))
            square_slope = 2 * (x - y.to(tl.float64))
            # log 0 has the gradient 0
            entropy_slope = tl.where(x == 0, 0.0, _log(x) + 1)
            entropy_slope -= tl.where(x == 1, 0.0, log1p(-tl.where(x == 1, 0.0, x)) + 1)
        slope = of_log * log_slope + of_square * square_slope + of_entropy * entropy_slope
        slope *= scale
        if out.dtype.element_ty != tl.float64:
            slope = slope.to(tl.float32)
        tl.store(out + row, slope.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row, of_log * scale, mask=inside)
        tl.store(out + n.to(tl.int64) + row, of_square * scale, mask=inside)
        tl.store(out + 2 * n.to(tl.int64) + row, of_entropy * scale, mask=inside)
        tl.store(out + 3 * n.to(tl.int64) + row, of_confidence * scale, mask=inside)


@triton.jit(do_not_specialize=["n", "ignore", "of_top"])
def _fill_events(
    values, tops, stride, target, label_stride, weights, weight_stride, confidence, outcome, weight, n, ignore, of_top,
    weighted: tl.constexpr, has_ignore: tl.constexpr, binary: tl.constexpr, logits: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Store confidence, outcome and weight of the event of each row; 0.5, 0 and 0 in a row without weight.

    The weight of an invalid row is NaN.
    """
    row = tl.program_id(0).to(tl.int64) * chunk + tl.arange(0, chunk)
    inside = row < n
    label = tl.load(target + row * label_stride, mask=inside, other=0).to(tl.int64)
    p, y, valid = _event(values, tops, stride, row, inside, label, of_top, binary, logits)
    w, broken = weights_of(row, n, label, weights, weight_stride, valid, ignore, weighted, has_ignore)
    tl.store(confidence + row, tl.where(w == 0, 0.5, p), mask=inside)
    tl.store(outcome + row, tl.where(w == 0, 0.0, y), mask=inside)
    tl.store(weight + row, tl.where(broken, float("nan"), w), mask=inside)


@triton.jit(do_not_specialize=["n", "of_top"])
def _fill_gradient(
    values, stride, weight, grads, out, n, of_top, logits: tl.constexpr, chunk: tl.constexpr
):  # fmt: skip
    """Store the gradient in binary predictions, from that in the confidences of `_fill_events`."""
    row = tl.program_id(0).to(tl.int64) * chunk + tl.arange(0, chunk)
    inside = row < n
    used = tl.load(weight + row, mask=inside, other=0) != 0
    slope = tl.load(grads + row, mask=used, other=0)
    _store_slope(values, stride, slope, out, row, used, inside, of_top, logits)


@triton.jit(do_not_specialize=["n", "ignore", "of_top"])
def _rank(
    values, tops, stride, target, label_stride, weights, weight_stride, score, outcome, n_ignored, n, ignore, of_top,
    weighted: tl.constexpr, has_ignore: tl.constexpr, binary: tl.constexpr, logits: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Store score and outcome of the event of each row, and add the number of invalid rows to `n_ignored`."""
    row = tl.program_id(0).to(tl.int64) * chunk + tl.arange(0, chunk)
    inside = row < n
    label = tl.load(target + row * label_stride, mask=inside, other=0).to(tl.int64)
    p, y, valid = _event(values, tops, stride, row, inside, label, of_top, binary, logits)
    w, broken = weights_of(row, n, label, weights, weight_stride, valid, ignore, weighted, has_ignore)
    if binary and logits:
        p = tl.load(values + row * stride, mask=inside, other=0).to(tl.float64)
        p = tl.where(of_top != 0, tl.abs(p), p)
    tl.store(score + row, tl.where(w == 0, float("nan"), p).to(score.dtype.element_ty), mask=inside)
    tl.store(outcome + row, ((w != 0) & (y > 0)).to(tl.uint8), mask=inside)
    # Sums of integers are exact in float64, and therefore equal in any order.
    count = tl.sum(broken.to(tl.float64), 0)
    tl.atomic_add(n_ignored, count, mask=count > 0, sem="relaxed")


@triton.jit(do_not_specialize=["n"])
def _log_odds(
    values, row_stride, column_stride, n_classes, tops, score, n, rows: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Replace the scores of rows, unless they are NaN, by the log-odds of their top class; see `ops.log_odds`."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n
    top = tl.load(tops + row, mask=present, other=0)
    first = values + row * row_stride
    x_top = tl.load(first + top * column_stride, mask=present, other=0).to(tl.float64)
    # 1. Largest logit m of the other classes. If the top logit is +inf, equal ones become 0, and all others -inf.
    m = tl.full([rows], float("-inf"), tl.float64)
    for begin in range(0, n_classes, block):
        m = tl.maximum(m, tl.max(_others(first, column_stride, n_classes, begin, top, x_top, present, block), 1))
    m = tl.where(m == float("-inf"), 0.0, m)
    # 2. log-odds = z_top - m - log sum exp(z - m)
    total = tl.zeros([rows], tl.float64)
    for begin in range(0, n_classes, block):
        x = _others(first, column_stride, n_classes, begin, top, x_top, present, block)
        total += tl.sum(tl.exp(x - m[:, None]), 1)
    found = tl.where(x_top == float("inf"), 0.0, x_top) - m - _log(total)
    before = tl.load(score + row, mask=present, other=0)
    tl.store(score + row, tl.where(before == before, found, before), mask=present)


@triton.jit
def _others(first, column_stride, n_classes, begin, top, x_top, present, block: tl.constexpr):
    """Return the logits of a block of classes without the top class, float64, in the limit of a top logit of +inf."""
    column = begin + tl.arange(0, block).to(tl.int64)
    inside = present[:, None] & (column < n_classes)[None, :] & (column[None, :] != top[:, None])
    x = tl.load(first[:, None] + column[None, :] * column_stride, mask=inside, other=float("-inf")).to(tl.float64)
    limit = tl.where(x == float("inf"), 0.0, float("-inf"))
    return tl.where((x_top == float("inf"))[:, None], limit, x)


@triton.jit(do_not_specialize=["n", "n_classes", "ignore", "tolerance"])
def _rank_classes(
    values, row_stride, column_stride, target, label_stride, score, outcome, n_ignored, n, n_classes, ignore, tolerance,
    has_ignore: tl.constexpr, logits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store scores and outcomes of the events of all classes, and add the number of invalid rows to `n_ignored`.

    Scores are probabilities, or the log-odds of logits by the steps of `log_odds._of_logits`.
    """
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    present = row < n
    first = values + row * row_stride
    # 1. Check the values, and find the largest one and its first class.
    largest = tl.full([rows], float("-inf"), tl.float64)
    place = tl.zeros([rows], tl.int32)
    total = tl.zeros([rows], tl.float64)
    n_wrong = tl.zeros([rows], tl.int32)
    for begin in range(0, n_classes, block):
        column = begin + tl.arange(0, block)
        inside = present[:, None] & (column < n_classes)[None, :]
        at = first[:, None] + column.to(tl.int64)[None, :] * column_stride
        x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float64)
        wrong = inside & (x != x if logits else ~((x >= 0) & (x <= 1)))
        n_wrong += tl.sum(wrong.to(tl.int32), 1)
        high = tl.max(tl.where(wrong, float("-inf"), x), 1)
        at_high = tl.min(tl.where(x == high[:, None], column[None, :], n_classes), 1)
        place = tl.where(high > largest, at_high, place)
        largest = tl.maximum(largest, high)
        total += tl.sum(tl.where(inside & ~wrong, x, 0.0), 1)
    valid = (n_wrong == 0) & (largest != float("-inf") if logits else tl.abs(total - 1) <= tolerance)
    label = tl.load(target + row * label_stride, mask=present, other=0).to(tl.int64)
    w, broken = weights_of(
        row, n, label, target, 0, valid & (label >= 0) & (label < n_classes), ignore, False, has_ignore
    )
    count = tl.sum(broken.to(tl.float64), 0)
    tl.atomic_add(n_ignored, count, mask=count > 0, sem="relaxed")
    # 2. Log-odds D of the top class from the log-sum-exp of the others, which can all be -inf
    other_largest = tl.full([rows], float("-inf"), tl.float64)
    rest = tl.zeros([rows], tl.float64)
    if logits:
        for begin in range(0, n_classes, block):
            x = _others(first, column_stride, n_classes, begin, place, largest, present, block)
            other_largest = tl.maximum(other_largest, tl.max(x, 1))
        shift = tl.where(other_largest == float("-inf"), 0.0, other_largest)
        for begin in range(0, n_classes, block):
            x = _others(first, column_stride, n_classes, begin, place, largest, present, block)
            rest += tl.sum(tl.exp(x - shift[:, None]), 1)
    log_rest = _log(rest)
    top = tl.where(largest == float("inf"), 0.0, largest)
    odds = tl.where(rest == 0, float("inf"), (top - tl.where(rest == 0, 0.0, other_largest)) - log_rest)
    scale = tl.where(odds > 0, odds, 0.0)
    below = tl.exp(-tl.abs(odds))
    # 3. Scores of all classes. With r_k = z_k - log-sum-exp of the others, class k has r_k - log(1 + e^D - e^r_k).
    for begin in range(0, n_classes, block):
        column = begin + tl.arange(0, block)
        inside = present[:, None] & (column < n_classes)[None, :]
        is_top = column[None, :] == place[:, None]
        if logits:
            x = _others(first, column_stride, n_classes, begin, place, largest, present, block)
            is_zero = (x == float("-inf")) | (odds == float("inf"))[:, None]
            r = tl.where(is_zero, 0.0, x - other_largest[:, None] - log_rest[:, None] - scale[:, None])
            found = tl.where(is_zero, float("-inf"), r - log1p(tl.where(is_zero, 0.0, below[:, None] - tl.exp(r))))
            found = tl.where(is_top, odds[:, None], found)
        else:
            at = first[:, None] + column.to(tl.int64)[None, :] * column_stride
            found = tl.load(at, mask=inside, other=0).to(tl.float64)
        to = column.to(tl.int64)[None, :] * n + row[:, None]
        tl.store(score + to, tl.where((w == 0)[:, None], float("nan"), found).to(score.dtype.element_ty), mask=inside)
        hit = (w != 0)[:, None] & (label[:, None] == column[None, :])
        tl.store(outcome + to, hit.to(tl.uint8), mask=inside)
