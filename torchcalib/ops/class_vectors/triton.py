"""Training penalties of class vectors by Triton kernels: kernel sums over all pairs of rows, one tile at a time.

No tile is stored. The kernels of gradients compute the tiles again. Results are reproducible although programs run in
any order: each program stores its own sums, which one program adds in a fixed order.

All vectors have C classes; a binary prediction has the classes y=0 and y=1.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchcalib.ops.batch.formula import Columns
from torchcalib.ops.batch.triton import flags_of, labels_of, weights_of
from torchcalib.ops.penalties.options import Canonical, Squared
from torchcalib.ops.penalties.triton import number

_TILE = 16  # rows of a tile
_BLOCK = 32  # classes that a program multiplies at a time
_ROW = 1024  # largest number of classes of a row that a program loads at a time
_COPIES = tl.constexpr(1024)  # numbers of copies that a program adds at a time
_LOWEST = tl.constexpr(-1e30)  # replaces -inf, because -inf times 0 is NaN
_BEFORE = tl.constexpr(-1.7976931348623157e308)  # maximum of no scores


def canonical_error(_: Tensor, columns: Columns, options: Canonical, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the canonical calibration error in three launches, with the arguments of its gradient."""
    n, n_classes = _shape(columns)
    make, bandwidth = _empty(columns), number(options.bandwidth, columns.values.device)
    probs, logs, mean = make(n, n_classes), make(n, n_classes), make(n, n_classes)
    copies, normaliser, totals, log_total = make(n), make(n), make(n), make(n)
    width = options.width(n_classes)
    tiles = triton.cdiv(n, _TILE), triton.cdiv(n_classes, width)
    inner, parts = make(tiles[1], n), make(*tiles)
    _store_vectors(columns, (probs, logs, normaliser, totals, copies), bandwidth, True)
    with torch.cuda.device_of(probs):
        _fill_means[tiles](
            columns.target, columns.target.stride(0), probs, logs, normaliser, copies, bandwidth, mean, log_total,
            inner, parts, n, n_classes, options.p, _TILE, min(_BLOCK, width), width, num_warps=8,
        )  # fmt: skip
    error, scale = _mean(parts, copies, dtype, False)
    return error, scale, probs, logs, normaliser, totals, copies, mean, log_total, inner


def canonical_gradient(
    _: Tensor, columns: Columns, options: Canonical, results: tuple[Tensor, ...], upstream: Tensor
) -> Tensor:
    """Return the gradient in the predictions in two launches, from the results of `canonical_error`."""
    _, scale, probs, logs, normaliser, totals, copies, mean, log_total, inner = results
    n, n_classes = probs.shape
    slopes = torch.empty_like(probs)
    width = options.width(n_classes)
    with torch.cuda.device_of(probs):
        _fill_slopes[(triton.cdiv(n, _TILE), triton.cdiv(n_classes, width))](
            columns.target, columns.target.stride(0), probs, logs, normaliser, totals, copies,
            number(options.bandwidth, probs.device), mean, log_total, inner, scale, slopes, n, n_classes, len(inner),
            options.p, columns.from_logits, _TILE, min(_BLOCK, width), width, num_warps=8,
        )  # fmt: skip
    return _through_softmax(columns, probs, copies, slopes, upstream)


def squared_error(_: Tensor, columns: Columns, options: Squared, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the squared kernel calibration error in three launches, with the arguments of its gradient."""
    n, n_classes = _shape(columns)
    make, scale = _empty(columns), number(options.scale, columns.values.device)
    probs, weights, parts = make(n, n_classes), make(n), make(triton.cdiv(n, _TILE))
    _store_vectors(columns, (probs, probs, weights, weights, weights), scale, False)  # fills the first and the last
    with torch.cuda.device_of(probs):
        _add_similar[(len(parts),)](
            columns.target, columns.target.stride(0), probs, weights, scale, parts, n, n_classes,
            options.kernel == "laplacian", _TILE, _TILE, num_warps=4,
        )  # fmt: skip
    error, factor = _mean(parts, weights, dtype, True)
    return error, factor, probs, weights


def squared_gradient(
    _: Tensor, columns: Columns, options: Squared, results: tuple[Tensor, ...], upstream: Tensor
) -> Tensor:
    """Return the gradient in the predictions in two launches, from the results of `squared_error`."""
    _, factor, probs, weights = results
    n, n_classes = probs.shape
    slopes, width = torch.empty_like(probs), options.width(n_classes)
    with torch.cuda.device_of(probs):
        _fill_similar_slopes[(triton.cdiv(n, _TILE), triton.cdiv(n_classes, width))](
            columns.target, columns.target.stride(0), probs, weights, number(options.scale, probs.device), factor,
            slopes, n, n_classes, options.kernel == "laplacian", columns.from_logits, _TILE, _TILE, width, num_warps=4,
        )  # fmt: skip
    return _through_softmax(columns, probs, weights, slopes, upstream)


def _store_vectors(columns: Columns, out: tuple[Tensor, ...], bandwidth: Tensor, with_density: bool) -> None:
    """Fill probabilities, log-probabilities, normalisers, sums of parameters and numbers of copies in one launch."""
    n, n_classes = out[0].shape
    rows, block = _rows(n_classes)
    with torch.cuda.device_of(bandwidth):
        _fill_vectors[(triton.cdiv(n, rows),)](
            *_arguments(columns), *out, bandwidth, n, n_classes, columns.ignore_index or 0, columns.tolerance,
            *flags_of(columns), with_density, rows, block, num_warps=4,
        )  # fmt: skip


def _mean(parts: Tensor, copies: Tensor, dtype: torch.dtype, of_pairs: bool) -> tuple[Tensor, Tensor]:
    """Return a mean from its sums over tiles in one launch, and the factors of `_fill_mean`."""
    mean, factors = parts.new_empty((), dtype=dtype), parts.new_empty(2)
    with torch.cuda.device_of(parts):
        _fill_mean[(1,)](parts, copies, mean, factors, parts.numel(), len(copies), of_pairs, _ROW, num_warps=4)
    return mean, factors


def _through_softmax(columns: Columns, probs: Tensor, copies: Tensor, slopes: Tensor, upstream: Tensor) -> Tensor:
    """Return the gradient in the predictions in one launch; see `_fill_gradient`."""
    values, (n, n_classes) = columns.values, probs.shape
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    rows, block = _rows(n_classes)
    with torch.cuda.device_of(out):
        _fill_gradient[(triton.cdiv(n, rows),)](
            *_arguments(columns)[:3], probs, copies, slopes, upstream, out, n, n_classes, values.dim() == 1,
            columns.from_logits, rows, block, num_warps=4,
        )  # fmt: skip
    return out


def _shape(columns: Columns) -> tuple[int, int]:
    """Return the numbers of rows and classes."""
    return len(columns.values), 2 if columns.values.dim() == 1 else columns.values.shape[1]


def _empty(columns: Columns) -> Any:
    """Return the function that creates float64 tensors of a shape."""
    return lambda *shape: torch.empty(shape, dtype=torch.float64, device=columns.values.device)


def _rows(n_classes: int) -> tuple[int, int]:
    """Return the numbers of rows and classes that a program loads at a time."""
    block = min(_ROW, triton.next_power_of_2(n_classes))
    return _ROW // block, block


def _arguments(columns: Columns) -> list[Any]:
    """Return the columns of a batch as arguments of kernels, with their strides."""
    values = columns.values
    return [values, values.stride(0), 0 if values.dim() == 1 else values.stride(1), *labels_of(columns)]


@triton.jit
def _log_gamma(x):
    """Return log Gamma(x) for x >= 1: x is raised above 10 by Gamma(x + 1) = x Gamma(x), then Stirling's series."""
    product = x * 0 + 1
    for _ in range(10):  # not unrolled, which would take the registers of several steps
        is_small = x < 10
        product = tl.where(is_small, product * x, product)
        x = tl.where(is_small, x + 1, x)
    r = 1 / (x * x)
    series = 1 / 12 - r * (1 / 360 - r * (1 / 1260 - r * (1 / 1680 - r * (1 / 1188 - r * (691 / 360360 - r / 156)))))
    return (x - 0.5) * tl.log(x) - x + 0.9189385332046727418 + series / x - tl.log(product)


@triton.jit
def _digamma(x):
    """Return the derivative of log Gamma(x) for x >= 1, by the steps of `_log_gamma`."""
    total = x * 0
    for _ in range(10):  # not unrolled, which would take the registers of several steps
        is_small = x < 10
        total += tl.where(is_small, 1 / x, 0.0)
        x = tl.where(is_small, x + 1, x)
    r = 1 / (x * x)
    series = 1 / 12 - r * (1 / 120 - r * (1 / 252 - r * (1 / 240 - r * (1 / 132 - r * (691 / 32760 - r / 12)))))
    return tl.log(x) - 0.5 / x - r * series - total


@triton.jit
def _entries(values, row, row_stride, column, column_stride, inside, binary: tl.constexpr, logits: tl.constexpr):
    """Return probabilities or logits of a tile of rows x classes, float64; those outside are 0 or -inf."""
    other: tl.constexpr = float("-inf") if logits else 0.0
    at = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    x = tl.load(values + at, mask=inside, other=other).to(tl.float64)
    if binary:
        is_zero = inside & (column == 0)[None, :]
        x = tl.where(is_zero, 0.0 if logits else 1 - x, x)
    return x


@triton.jit(do_not_specialize=["n", "n_classes", "ignore", "tolerance"])
def _fill_vectors(
    values, row_stride, column_stride, target, label_stride, weights, weight_stride, probs, logs, normaliser, totals,
    copies, bandwidth, n, n_classes, ignore, tolerance, weighted: tl.constexpr, has_ignore: tl.constexpr,
    binary: tl.constexpr, logits: tl.constexpr, with_density: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the probabilities q of rows `(n, C)`, and their numbers of copies: 0 if ignored, and NaN if invalid.

    `with_density` adds log q and the log normaliser of the Dirichlet density with the parameters q / bandwidth + 1,
    whose sum is stored in `totals`. Rows without weight have equal probabilities.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    present = row < n
    # 1. Maximum and sum of each row, and its number of NaN, values out of range and +inf
    largest = tl.full([rows], float("-inf"), tl.float64)
    total = tl.zeros([rows], tl.float64)
    n_wrong = tl.zeros([rows], tl.int32)
    n_infinite = tl.zeros([rows], tl.int32)
    for begin in range(0, n_classes, block):
        column = begin + tl.arange(0, block)
        inside = present[:, None] & (column < n_classes)[None, :]
        x = _entries(values, row, row_stride, column, column_stride, inside, binary, logits)
        wrong = x != x if logits else ~((x >= 0) & (x <= 1))
        n_wrong += tl.sum((inside & wrong).to(tl.int32), 1)
        x = tl.where(inside & wrong, 0.0, x)
        n_infinite += tl.sum((x == float("inf")).to(tl.int32), 1)
        largest = tl.maximum(largest, tl.max(x, 1))
        if not logits:
            total += tl.sum(x, 1)
    valid = (n_wrong == 0) & (largest != float("-inf") if logits else tl.abs(total - 1) <= tolerance)
    # 2. Number of copies, and log sum exp. In a row with +inf, only its classes have a probability.
    label = tl.load(target + row.to(tl.int64) * label_stride, mask=present, other=0).to(tl.int64)
    valid = valid & (label >= 0) & (label < n_classes)
    w, broken = weights_of(row, n, label, weights, weight_stride, valid, ignore, weighted, has_ignore)
    tl.store(copies + row, tl.where(broken, float("nan"), w), mask=present)
    log_total = tl.zeros([rows], tl.float64)
    if logits:
        total = tl.where(n_infinite > 0, n_infinite.to(tl.float64), 0.0)
        for begin in range(0, n_classes, block):
            column = begin + tl.arange(0, block)
            inside = present[:, None] & (column < n_classes)[None, :]
            x = _entries(values, row, row_stride, column, column_stride, inside, binary, logits)
            finite = (n_infinite == 0) & (w != 0)
            d = tl.where(finite[:, None] & inside, x - tl.where(finite, largest, 0.0)[:, None], float("-inf"))
            total += tl.sum(tl.exp(d), 1)
        log_total = tl.log(tl.where(total == 0, 1.0, total))
    # 3. Probabilities and the normaliser log Gamma(sum of parameters) - sum of log Gamma(parameter)
    width = tl.load(bandwidth)
    parameters = tl.zeros([rows], tl.float64)
    log_gammas = tl.zeros([rows], tl.float64)
    for begin in range(0, n_classes, block):
        column = begin + tl.arange(0, block)
        inside = present[:, None] & (column < n_classes)[None, :]
        x = _entries(values, row, row_stride, column, column_stride, inside, binary, logits)
        if logits:
            shift = tl.where(n_infinite > 0, 0.0, largest)[:, None]
            x = tl.where((n_infinite > 0)[:, None], tl.where(x == float("inf"), 0.0, float("-inf")), x)
            log_q = tl.where(x == float("-inf"), x, x - shift - log_total[:, None])
            q = tl.exp(log_q)
        else:
            q = x
            log_q = tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), float("-inf"))
        is_uniform = (w == 0)[:, None]
        q = tl.where(is_uniform, 1 / n_classes.to(tl.float64), q)
        log_q = tl.where(is_uniform, -tl.log(n_classes.to(tl.float64)), log_q)
        at = row.to(tl.int64)[:, None] * n_classes + column[None, :]
        tl.store(probs + at, q, mask=inside)
        if with_density:
            parameter = tl.where(inside, q, 0.0) / width + 1
            parameters += tl.sum(tl.where(inside, parameter, 0.0), 1)
            log_gammas += tl.sum(tl.where(inside, _log_gamma(parameter), 0.0), 1)
            tl.store(logs + at, log_q, mask=inside)
    if with_density:
        tl.store(totals + row, parameters, mask=present)
        tl.store(normaliser + row, _log_gamma(tl.where(present, parameters, 1.0)) - log_gammas, mask=present)


@triton.jit
def _factor(copies, n):
    """Return the total number of copies, and the factor of all copies: 2 if there is a single one, otherwise 1."""
    total = tl.zeros([_COPIES], tl.float64)
    for start in range(0, n, _COPIES):
        row = start + tl.arange(0, _COPIES)
        total += tl.load(copies + row, mask=row < n, other=0)
    number = tl.sum(total, 0)
    factor = tl.where(number == 1, 2.0, 1.0)
    return number * factor, factor


@triton.jit
def _counted(copies, row, n, factor):
    """Return the numbers of copies of rows, 0 for invalid rows."""
    number = tl.load(copies + row, mask=row < n, other=0)
    return tl.where(number == number, number, 0.0) * factor


@triton.jit
def _plus_product(a, b, total):
    """Return `total` plus the matrix product of two float64 tiles, which old versions of `tl.dot` do not take."""
    return total + tl.sum(a[:, :, None] * b[None, :, :], 1)


@triton.jit
def _scores(logs, probs, bandwidth, row, other, n, n_classes, tile: tl.constexpr, block: tl.constexpr):
    """Return the products sum_k log q_ik / bandwidth q_jk of rows i and other rows j, a tile `[i, j]`."""
    found = tl.zeros([tile, tile], tl.float64)
    for begin in range(0, n_classes, block):
        column = begin + tl.arange(0, block)
        of_row = row.to(tl.int64)[:, None] * n_classes + column[None, :]
        of_other = other.to(tl.int64)[None, :] * n_classes + column[:, None]
        is_class = column < n_classes
        a = tl.load(logs + of_row, mask=(row < n)[:, None] & is_class[None, :], other=0) / bandwidth
        b = tl.load(probs + of_other, mask=(other < n)[None, :] & is_class[:, None], other=0)
        found = _plus_product(tl.where(a < _LOWEST, _LOWEST, a), b, found)
    return found


@triton.jit(do_not_specialize=["n", "n_classes", "p"])
def _fill_means(
    target, label_stride, probs, logs, normaliser, copies, bandwidth, mean, log_total, inner, parts, n, n_classes, p,
    tile: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Store the leave-one-out means of the outcomes for a tile of rows and a range of classes. Grid: tiles, ranges.

    The mean m_i has the weights n_ij exp(s_ij), with s_ij = log q_i . q_j / bandwidth + normaliser_j. n_ij is the
    number of copies of row j, without row i itself. Also store log sum_j n_ij exp(s_ij), the sums over the classes of
    the range of m_ik f'(m_ik - q_ik), and the sum over the rows of their copies times f(m_ik - q_ik). Here f(x) is |x|
    or x^2. This is Algorithm 1 of FlashAttention (Dao et al., NeurIPS 2022).
    """
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * width + tl.arange(0, width)
    _, factor = _factor(copies, n)
    h = tl.load(bandwidth)
    top = tl.full([tile], _BEFORE, tl.float64)
    total = tl.zeros([tile], tl.float64)
    sums = tl.zeros([tile, width], tl.float64)
    for start in range(0, n, tile):
        # 1. Scores of a tile, with the weights of the other rows
        other = start + tl.arange(0, tile)
        s = _scores(logs, probs, h, row, other, n, n_classes, tile, block)
        s += tl.load(normaliser + other, mask=other < n, other=0)[None, :]
        number = _counted(copies, other, n, factor)[None, :] - (row[:, None] == other[None, :]).to(tl.float64)
        s = tl.where(number > 0, s + tl.log(tl.where(number > 0, number, 1.0)), float("-inf"))
        # 2. Running maximum, and sums relative to it, which cannot overflow
        new_top = tl.maximum(top, tl.max(s, 1))
        e = tl.where(number > 0, tl.exp(s - new_top[:, None]), 0.0)
        rescale = tl.exp(top - new_top)
        label = tl.load(target + other.to(tl.int64) * label_stride, mask=other < n, other=-1).to(tl.int64)
        is_label = (label[:, None] == column[None, :]).to(tl.float64)
        total = total * rescale + tl.sum(e, 1)
        sums = _plus_product(e, is_label, sums * rescale[:, None])
        top = new_top
    # 3. Means, and their distances from the probabilities
    inside = (row < n)[:, None] & (column < n_classes)[None, :]
    at = row.to(tl.int64)[:, None] * n_classes + column[None, :]
    number = _counted(copies, row, n, factor)
    m = sums / tl.where(total == 0, float("nan"), total)[:, None]
    gap = tl.where(inside, m - tl.load(probs + at, mask=inside, other=0), 0.0)
    distance = tl.sum(tl.where(p == 1, tl.abs(gap), gap * gap), 1)
    tl.store(mean + at, m, mask=inside)
    tl.store(inner + tl.program_id(1) * n + row, tl.sum(tl.where(inside, _slope(gap, p) * m, 0.0), 1), mask=row < n)
    tl.store(log_total + row, top + tl.log(total), mask=(row < n) & (tl.program_id(1) == 0))
    to = parts + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(to, tl.sum(tl.where(number == 0, 0.0, number * distance), 0))


@triton.jit
def _slope(gap, p):
    """Return the derivative of |x| or x^2; 0 for |x| at 0."""
    return tl.where(p == 1, (gap > 0).to(tl.float64) - (gap < 0).to(tl.float64), 2 * gap)


@triton.jit(do_not_specialize=["n_parts", "n"])
def _fill_mean(parts, copies, mean, factors, n_parts, n, of_pairs: tl.constexpr, block: tl.constexpr):
    """Store the sum of parts over the number of copies, or of pairs of copies, in one program.

    Also store 1 / this number, and the factor of all copies; see `_factor`.
    """
    number, factor = _factor(copies, n)
    if of_pairs:
        number = number * number / (factor * factor)
    total = tl.zeros([block], tl.float64)
    for start in range(0, n_parts, block):
        part = start + tl.arange(0, block)
        total += tl.load(parts + part, mask=part < n_parts, other=0)
    number = tl.where(number == 0, float("nan"), number)
    tl.store(mean, (tl.sum(total, 0) / number).to(mean.dtype.element_ty))
    tl.store(factors, 1 / number)
    tl.store(factors + 1, factor)


@triton.jit
def _similarities(
    target, label_stride, probs, scale, row, other, n, n_classes, laplacian: tl.constexpr, tile: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Return kernel k_ij and residual product r_i . r_j of rows i and other rows j, tiles `[i, j]`.

    With a distance d_ij, k_ij = exp(-scale sum_c |q_ic - q_jc|), or exp(-scale^2 sum_c (q_ic - q_jc)^2). A residual is
    the one-hot vector of the label minus q.
    """
    products = tl.zeros([tile, tile], tl.float64)
    distance = tl.zeros([tile, tile], tl.float64)
    for begin in range(0, n_classes, block):
        column = begin + tl.arange(0, block)
        of_row = row.to(tl.int64)[:, None] * n_classes + column[None, :]
        of_other = other.to(tl.int64)[None, :] * n_classes + column[:, None]
        is_class = column < n_classes
        a = tl.load(probs + of_row, mask=(row < n)[:, None] & is_class[None, :], other=0)
        b = tl.load(probs + of_other, mask=(other < n)[None, :] & is_class[:, None], other=0)
        products = _plus_product(a, b, products)
        gap = a[:, :, None] - b[None, :, :]
        distance += tl.sum(tl.abs(gap) if laplacian else gap * gap, 1)
    label = tl.load(target + row.to(tl.int64) * label_stride, mask=row < n, other=-1).to(tl.int64)
    o_label = tl.load(target + other.to(tl.int64) * label_stride, mask=other < n, other=-1).to(tl.int64)
    known = ((label >= 0) & (label < n_classes))[:, None] & (other < n)[None, :]
    o_known = ((o_label >= 0) & (o_label < n_classes))[None, :] & (row < n)[:, None]
    products += (label[:, None] == o_label[None, :]).to(tl.float64)
    products -= tl.load(probs + row.to(tl.int64)[:, None] * n_classes + o_label[None, :], mask=o_known, other=0)
    products -= tl.load(probs + other.to(tl.int64)[None, :] * n_classes + label[:, None], mask=known, other=0)
    return tl.exp(-distance * (scale if laplacian else scale * scale)), products


@triton.jit(do_not_specialize=["n", "n_classes"])
def _add_similar(
    target, label_stride, probs, weights, scale, parts, n, n_classes, laplacian: tl.constexpr, tile: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Store the sum over a tile of rows i and all rows j of w_i w_j (r_i . r_j) k_ij; see `_similarities`."""
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    w = tl.load(weights + row, mask=row < n, other=0)
    unit = tl.load(scale)
    total = tl.zeros([tile], tl.float64)
    for start in range(0, n, tile):
        other = start + tl.arange(0, tile)
        v = tl.load(weights + other, mask=other < n, other=0)
        k, products = _similarities(target, label_stride, probs, unit, row, other, n, n_classes, laplacian, tile, block)
        total += tl.sum(products * k * v[None, :], 1)
    tl.store(parts + tl.program_id(0), tl.sum(w * total, 0))


@triton.jit(do_not_specialize=["n", "n_classes"])
def _fill_similar_slopes(
    target, label_stride, probs, weights, scale, factor, slopes, n, n_classes, laplacian: tl.constexpr,
    logits: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Store the derivatives of the mean of (r_i . r_j) k_ij for a tile of rows and a range of classes.

    Grid: tiles, ranges. That in q_ic is 2 w_i / (sum w)^2 times the sum over j of w_j (k'_ijc r_i . r_j - k_ij r_jc).
    k' is the derivative of the kernel, and 0 for |q_ic - q_jc| = 0. For logits, the result is the derivative in log q.
    """
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = (row < n)[:, None] & (column < n_classes)[None, :]
    at = row.to(tl.int64)[:, None] * n_classes + column[None, :]
    q = tl.load(probs + at, mask=inside, other=0)
    unit = tl.load(scale)
    of_residual = tl.zeros([tile, width], tl.float64)
    of_kernel = tl.zeros([tile, width], tl.float64)
    for start in range(0, n, tile):
        other = start + tl.arange(0, tile)
        v = tl.load(weights + other, mask=other < n, other=0)
        k, products = _similarities(target, label_stride, probs, unit, row, other, n, n_classes, laplacian, tile, block)
        k *= v[None, :]
        mask = (other < n)[:, None] & (column < n_classes)[None, :]
        o = tl.load(probs + other.to(tl.int64)[:, None] * n_classes + column[None, :], mask=mask, other=0)
        label = tl.load(target + other.to(tl.int64) * label_stride, mask=other < n, other=-1).to(tl.int64)
        is_label = (label[:, None] == column[None, :]).to(tl.float64)
        of_residual = _plus_product(k, is_label - o, of_residual)
        gap = q[:, None, :] - o[None, :, :]
        if laplacian:
            gap = (gap > 0).to(tl.float64) - (gap < 0).to(tl.float64)
        of_kernel += tl.sum(gap * (k * products)[:, :, None], 1)
    w = tl.load(weights + row, mask=row < n, other=0)
    of_kernel *= unit if laplacian else 2 * unit * unit
    result = -2 * tl.load(factor) * w[:, None] * (of_kernel + of_residual)
    tl.store(slopes + at, q * result if logits else result, mask=inside)


@triton.jit
def _gap_slopes(mean, probs, row, label, inside, n_classes, p):
    """Return f'(m_ik - q_ik) of `_fill_means` for the class `label` of other rows."""
    at = row.to(tl.int64) * n_classes + label
    gap = tl.load(mean + at, mask=inside, other=0) - tl.load(probs + at, mask=inside, other=0)
    return _slope(gap, p)


@triton.jit(do_not_specialize=["n", "n_classes", "n_ranges", "p"])
def _fill_slopes(
    target, label_stride, probs, logs, normaliser, totals, copies, bandwidth, mean, log_total, inner, scale, slopes, n,
    n_classes, n_ranges, p, logits: tl.constexpr, tile: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Store the derivatives of the error for a tile of rows and a range of classes. Grid: tiles, ranges.

    With softmax weights P_ij and G_ik = f'(m_ik - q_ik), the score s_ij has the derivative
    dS_ij = c_i P_ij (G_i,label_j - G_i . m_i) for c_i = copies / total (FlashAttention, appendix B.2). Then log q_ik
    has the derivative sum_j dS_ij q_jk / bandwidth. q_jk has sum_i dS_ij log q_ik / bandwidth - c_j G_jk, and that
    of the normaliser. For logits, the result is that in log q including q = exp log q, otherwise that in q.
    """
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    column = tl.program_id(1) * width + tl.arange(0, width)
    h, unit, factor = tl.load(bandwidth), tl.load(scale), tl.load(scale + 1)
    # 1. Values of the rows
    label = tl.load(target + row.to(tl.int64) * label_stride, mask=row < n, other=-1).to(tl.int64)
    known = (label >= 0) & (label < n_classes)
    number = _counted(copies, row, n, factor)
    weight_total = tl.load(log_total + row, mask=row < n, other=0)
    own_normaliser = tl.load(normaliser + row, mask=row < n, other=0)
    own_inner = tl.zeros([tile], tl.float64)
    for k in range(n_ranges):
        own_inner += tl.load(inner + k * n + row, mask=row < n, other=0)
    of_log = tl.zeros([tile, width], tl.float64)
    of_prob = tl.zeros([tile, width], tl.float64)
    of_normaliser = tl.zeros([tile], tl.float64)
    for start in range(0, n, tile):
        other = start + tl.arange(0, tile)
        both = (row < n)[:, None] & (other < n)[None, :]
        o_label = tl.load(target + other.to(tl.int64) * label_stride, mask=other < n, other=-1).to(tl.int64)
        o_known = (o_label >= 0) & (o_label < n_classes)
        o_number = _counted(copies, other, n, factor)
        o_total = tl.load(log_total + other, mask=other < n, other=0)
        o_normaliser = tl.load(normaliser + other, mask=other < n, other=0)
        o_inner = tl.zeros([tile], tl.float64)
        for k in range(n_ranges):
            o_inner += tl.load(inner + k * n + other, mask=other < n, other=0)
        is_same = (row[:, None] == other[None, :]).to(tl.float64)
        # 2. The rows as i: dS_ij of the other rows j
        s = _scores(logs, probs, h, row, other, n, n_classes, tile, block) + o_normaliser[None, :]
        count = tl.where(both & (number > 0)[:, None], o_number[None, :] - is_same, 0.0)
        e = tl.where(count > 0, count * tl.exp(tl.where(count > 0, s - weight_total[:, None], 0.0)), 0.0)
        slope = _gap_slopes(mean, probs, row[:, None], o_label[None, :], both & o_known[None, :], n_classes, p)
        d = tl.where(e == 0, 0.0, e * number[:, None] * (slope - own_inner[:, None]))
        at = other.to(tl.int64)[:, None] * n_classes + column[None, :]
        mask = (other < n)[:, None] & (column < n_classes)[None, :]
        of_log = _plus_product(d, tl.load(probs + at, mask=mask, other=0), of_log)
        # 3. The rows as j: dS_ij of the other rows i, transposed
        s = tl.trans(_scores(logs, probs, h, other, row, n, n_classes, tile, block)) + own_normaliser[:, None]
        count = tl.where(both & (o_number > 0)[None, :], number[:, None] - is_same, 0.0)
        e = tl.where(count > 0, count * tl.exp(tl.where(count > 0, s - o_total[None, :], 0.0)), 0.0)
        slope = _gap_slopes(mean, probs, other[None, :], label[:, None], both & known[:, None], n_classes, p)
        d = tl.where(e == 0, 0.0, e * o_number[None, :] * (slope - o_inner[None, :]))
        log_q = tl.load(logs + at, mask=mask, other=0)
        log_q = tl.where(log_q == float("-inf"), 0.0, log_q)
        of_prob = _plus_product(d, log_q, of_prob)
        of_normaliser += tl.sum(d, 1)
    # 4. Derivatives in the normaliser and in the distance
    inside = (row < n)[:, None] & (column < n_classes)[None, :]
    at = row.to(tl.int64)[:, None] * n_classes + column[None, :]
    q = tl.load(probs + at, mask=inside, other=0)
    log_q = tl.load(logs + at, mask=inside, other=0)
    gap = tl.load(mean + at, mask=inside, other=0) - q
    of_parameter = _digamma(tl.load(totals + row, mask=row < n, other=1))[:, None] - _digamma(q / h + 1)
    of_prob = (of_prob + of_normaliser[:, None] * of_parameter) / h - number[:, None] * _slope(gap, p)
    of_log = tl.where(log_q == float("-inf"), 0.0, of_log / h)
    result = of_log + q * of_prob if logits else of_prob + of_log / tl.where(q == 0, 1.0, q)
    tl.store(slopes + at, result * unit, mask=inside)


@triton.jit(do_not_specialize=["n", "n_classes"])
def _fill_gradient(
    values, row_stride, column_stride, probs, copies, slopes, upstream, out, n, n_classes, binary: tl.constexpr,
    logits: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Store the gradient in the predictions of rows, from the derivatives in log q of logits or in probabilities q.

    A logit z_k has the derivative d_k - q_k sum_l d_l. It is 0 in rows without weight, and in rows with +inf.
    """
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    used = tl.load(copies + row, mask=row < n, other=0) != 0
    total = tl.zeros([rows], tl.float64)
    n_infinite = tl.zeros([rows], tl.int32)
    if logits:
        for begin in range(0, n_classes, block):
            column = begin + tl.arange(0, block)
            inside = used[:, None] & (column < n_classes)[None, :]
            at = row.to(tl.int64)[:, None] * n_classes + column[None, :]
            total += tl.sum(tl.load(slopes + at, mask=inside, other=0), 1)
            x = _entries(values, row, row_stride, column, column_stride, inside, binary, logits)
            n_infinite += tl.sum((x == float("inf")).to(tl.int32), 1)
    flat = ~used | (n_infinite > 0)
    scale = tl.load(upstream).to(tl.float64)
    if binary:
        at = row.to(tl.int64) * 2
        of_zero = tl.load(slopes + at, mask=used, other=0)
        of_one = tl.load(slopes + at + 1, mask=used, other=0)
        result = of_one - tl.load(probs + at + 1, mask=used, other=0) * total if logits else of_one - of_zero
        result = tl.where(flat, 0.0, result * scale)
        if out.dtype.element_ty != tl.float64:
            result = result.to(tl.float32)
        tl.store(out + row, result.to(out.dtype.element_ty), mask=row < n)
    else:
        for begin in range(0, n_classes, block):
            column = begin + tl.arange(0, block)
            inside = (row < n)[:, None] & (column < n_classes)[None, :]
            at = row.to(tl.int64)[:, None] * n_classes + column[None, :]
            result = tl.load(slopes + at, mask=inside, other=0)
            if logits:
                result -= tl.load(probs + at, mask=inside, other=0) * total[:, None]
            result = tl.where(flat[:, None], 0.0, result * scale)
            if out.dtype.element_ty != tl.float64:
                result = result.to(tl.float32)
            tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
