"""The row op in tensor operations: in chunks of rows that stay in cache, and as a formula that can be differentiated.

Rows get the same bits wherever they stand: softmax and sums work row by row, sums and products of two numbers are
rounded in one way only, and functions of one number per row are taken over padded columns (`_of`). Vectorised and
scalar code of a function differ in the last digit, and what stands at the end of a tensor gets the latter.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.kernels.row_stats import safe_log, spread_infinite_logits, wide_dtype, xmul

_CHUNK = 2**18  # entries: three arrays of float32 are 3 MB
_COLUMN = 2**14  # below the length from which torch divides the work among threads
_LANES = 64  # at least what any processor computes at once
_LOWEST = -1000  # a shift whose exp is 0 in any dtype


class _Chunk(NamedTuple):
    """Rows, of which all but the last few may mean nothing, and two arrays to work in.

    Attributes:
        held: which rows of all they are.
        x: the rows `(n, C)`, not to be written into.
        q: array like `x`.
        buffer: array like `x`.
        labels: `(n, 1)`.
    """

    held: slice
    x: Tensor
    q: Tensor
    buffer: Tensor
    labels: Tensor

    @property
    def size(self) -> int:
        """How many rows mean something."""
        return int(self.held.stop - self.held.start)


def forward(values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor) -> None:
    """Fill in what `row_op.rows` says of every row.

    Args:
        values: `(R, C)` of any floating dtype, with any strides.
        target: `(R,)` int64.
        from_logits: whether `values` are logits.
        scores: `(4, R)` of the wide dtype.
        top: `(R,)` int64.
    """
    known = (target >= 0) & (target < values.shape[-1])
    labels = target.masked_fill(~known, 0)
    sums = scores.new_empty((5, len(target)))
    sums_of = _logit_sums if from_logits else _probability_sums
    for chunk in _chunks(values, labels):
        first = _first_largest(chunk.x)
        columns = torch.cat(sums_of(chunk, first), -1)
        sums[:, chunk.held], top[chunk.held] = columns[: chunk.size].T, first[: chunk.size, 0]
    found = (_of_logit_sums if from_logits else _of_probability_sums)(sums, labels == top)
    for row, column in zip(scores, found, strict=True):
        row.copy_(column)
    scores[:2].masked_fill_(~known, torch.nan)


def backward(
    values: Tensor, target: Tensor, from_logits: bool, scores: Tensor, top: Tensor, grads: Tensor, out: Tensor
) -> None:
    """Fill in the gradient in `values`.

    Args:
        values: see `forward`.
        target: see `forward`.
        from_logits: see `forward`.
        scores: what `forward` found.
        top: what `forward` found.
        grads: gradient in `scores`.
        out: `(R, C)` of the dtype of `values`.
    """
    known = (target >= 0) & (target < values.shape[-1])
    labels = target.masked_fill(~known, 0)
    at_label, at_top = (values.gather(-1, index.unsqueeze(-1)).squeeze(-1).to(scores.dtype) for index in (labels, top))
    factors_of = _logit_factors if from_logits else _probability_factors
    factors = torch.stack(factors_of(at_label, at_top, labels == top, scores, grads), -1)
    # A row whose gradients are all 0 is left out, and may hold anything.
    untouched = (grads == 0).all(0) | (from_logits & (at_top == torch.inf))
    constant = torch.where(untouched, 0.0, torch.where(known, 1.0, torch.nan)).to(factors.dtype)
    any_constant = _may_be(constant != 1)
    for chunk in _chunks(values, labels):
        padded = factors.new_zeros(len(chunk.x), factors.shape[-1])
        padded[: chunk.size] = factors[chunk.held]
        first = torch.zeros_like(chunk.labels)
        first[: chunk.size, 0] = top[chunk.held]
        filled = (_logit_gradient if from_logits else _probability_gradient)(chunk, first, padded)[: chunk.size]
        if any_constant:
            fixed = constant[chunk.held].unsqueeze(-1).to(filled.dtype)
            filled = torch.where(fixed == 1, filled, fixed)
        out[chunk.held] = filled


def gradient(values: Tensor, target: Tensor, from_logits: bool, grads: Tensor) -> Tensor:
    """Return the gradient of `row_op.rows` in `values`, itself differentiable in `values` and `grads`.

    Args:
        values: `(..., N, C)`.
        target: `(..., N)` int64.
        from_logits: whether `values` are logits.
        grads: gradient in the scores, `(..., 4, N)`.
    """
    x = values.to(wide_dtype(values.device))
    of_log, of_square, of_entropy, of_confidence = grads.to(x.dtype).unsqueeze(-1).unbind(-3)
    classes = torch.arange(x.shape[-1], device=x.device)
    is_label = (classes == target.unsqueeze(-1)).to(x.dtype)
    is_top = (classes == x.detach().argmax(-1, keepdim=True)).to(x.dtype)
    if not from_logits:
        certain = safe_log(x)
        slope = xmul(torch.ones_like(x), certain + 1).masked_fill(x == 0, 0)
        inverse = is_label / x.masked_fill(x == 0, 1) * (x != 0)
        found = of_log * inverse + 2 * of_square * (x - is_label) + of_entropy * slope + of_confidence * is_top
    else:
        log_q = spread_infinite_logits(x).log_softmax(-1)
        q = log_q.exp()
        log_q = log_q.masked_fill(q == 0, 0)
        entropy = (q * log_q).sum(-1, keepdim=True)
        miss = q - is_label
        found = of_log * (is_label - q) + of_entropy * q * (log_q - entropy)
        found = found + 2 * of_square * q * (miss - (q * miss).sum(-1, keepdim=True))
        found = found + of_confidence * (q * is_top).sum(-1, keepdim=True) * (is_top - q)
        found = found.masked_fill(x.amax(-1, keepdim=True) == torch.inf, 0)
    return found.to(values.dtype)


def _chunks(values: Tensor, labels: Tensor) -> Iterator[_Chunk]:
    """Yield rows a chunk at a time.

    All chunks are of one length. They hold two rows even for one: a sum over a whole tensor is divided among threads.
    """
    n_rows, n_classes = values.shape
    n = max(2, min(_CHUNK // n_classes, _COLUMN, n_rows))
    dtype = torch.promote_types(values.dtype, torch.float32)
    q, buffer = (torch.zeros(n, n_classes, dtype=dtype, device=values.device) for _ in range(2))
    copy: Tensor | None = None
    label = labels.new_zeros(n, 1)
    for start in range(0, n_rows, n):
        held = slice(start, min(start + n, n_rows))
        x = values[held]
        if len(x) < n or x.dtype != dtype or not x.is_contiguous():
            copy = torch.zeros_like(q) if copy is None else copy
            copy[: len(x)] = x
            x = copy
        label[: held.stop - start, 0] = labels[held]
        yield _Chunk(held, x, q, buffer, label)


def _may_be(condition: Tensor) -> bool:
    """Return whether a condition holds anywhere; True where an answer would have to be waited for."""
    return condition.device.type != "cpu" or bool(condition.any())


def _of(function: Literal["exp", "log", "log1p"], column: Tensor) -> Tensor:
    """Return a function of a column, with every element in the middle of a tensor that one thread computes."""
    padded = torch.nn.functional.pad(column, (0, -len(column) % _LANES))
    parts = [getattr(torch, function)(part) for part in torch.split(padded, _COLUMN)]
    return torch.cat(parts)[: len(column)]


def _first_largest(x: Tensor) -> Tensor:
    """Return the place of the first maximum of every row `(n, 1)`; numpy finds it at the speed of memory."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy().argmax(-1)).unsqueeze(-1)
    return x.argmax(-1, keepdim=True)


def _shifted(x: Tensor, at_top: Tensor, out: Tensor) -> Tensor:
    """Fill in logits less the largest of the row, cut off below."""
    return torch.sub(x, at_top, out=out).clamp_(min=_LOWEST)


def _logit_sums(chunk: _Chunk, first: Tensor) -> list[Tensor]:
    """Return the logits of the label and the top, and sums of q, q^2 and q (x - largest) over all but the top."""
    x, q = chunk.x, chunk.q
    at_top = x.gather(-1, first)
    if _may_be(at_top == torch.inf):
        x = spread_infinite_logits(x)
        at_top = x.gather(-1, first)
    shift = x.gather(-1, chunk.labels).to(wide_dtype(x.device)) - at_top
    torch.softmax(x, -1, out=q)
    confidence = q.gather(-1, first)
    # The rest keeps its digits where the top one has none left to 1.
    q.scatter_(-1, first, 0)
    product = _shifted(x, at_top, chunk.buffer).mul_(q).sum(-1, keepdim=True)
    return [shift, confidence, q.sum(-1, keepdim=True), q.mul_(q).sum(-1, keepdim=True), product]


def _of_logit_sums(sums: Tensor, hit: Tensor) -> tuple[Tensor, ...]:
    shift, confidence, rest, squares, product = sums
    # Softmax divides by a plain sum of float32, which for many classes is off by more than these sums.
    total = confidence + rest
    rest, confidence, product, squares = rest / total, confidence / total, product / total, squares / (total * total)
    most = rest < 0.5
    log_top = torch.where(most, _of("log1p", -rest), _of("log", confidence))
    confidence = torch.where(most, 1 - rest, confidence)
    missed = 1 - 2 * _of("exp", shift) * confidence + (confidence * confidence + squares)
    return shift + log_top, torch.where(hit, rest * rest + squares, missed), product + log_top, confidence


def _probability_sums(chunk: _Chunk, first: Tensor) -> list[Tensor]:
    """Return q of the label and the top, and sums of q^2 over all but the top and of -q log q, and how many are NaN."""
    x = chunk.x
    columns = [x.gather(-1, chunk.labels).to(wide_dtype(x.device)), x.gather(-1, first)]
    squares = torch.mul(x, x, out=chunk.q).scatter_(-1, first, 0).sum(-1, keepdim=True)
    entropy = torch.special.entr(x, out=chunk.buffer).sum(-1, keepdim=True)
    return [*columns, squares, entropy, torch.where(entropy.isfinite(), 0.0, torch.nan).to(x.dtype)]


def _of_probability_sums(sums: Tensor, hit: Tensor) -> tuple[Tensor, ...]:
    of_label, confidence, squares, entropy, poison = sums
    others = (confidence * confidence - of_label * of_label).masked_fill(hit, 0)
    miss = 1 - of_label
    return _of("log", of_label), miss * miss + squares + others, poison - entropy, poison + confidence


def _logit_factors(at_label: Tensor, at_top: Tensor, hit: Tensor, scores: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
    """Return q_top and a, b, c of the gradient q (a + b q + c (x - largest)), and the gradient at top and label.

    These two are made here, in wide numbers: where 1 - q is a factor float32 would lose it.
    """
    log_prob, squared_error, neg_entropy, confidence = scores
    of_log, of_square, of_entropy, of_confidence = grads
    q_h = _of("exp", log_prob)
    # Of the shifts x - largest, of which log q differs by a constant.
    mean_shift = neg_entropy - _of("log", confidence)
    a = -of_log - of_confidence * confidence - 2 * of_square * (squared_error - 1 + q_h) - of_entropy * mean_shift
    b = 2 * of_square
    own = of_log - b * q_h
    at_top_ = confidence * (a + b * confidence + of_confidence)
    shift = (at_label - at_top).masked_fill(q_h == 0, 0)
    at_label_ = torch.where(hit, at_top_, q_h * (a + b * q_h + of_entropy * shift)) + own
    return confidence, a, b, of_entropy, at_top_, at_label_


def _logit_gradient(chunk: _Chunk, first: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient in rows of logits."""
    x, q = chunk.x, chunk.q
    confidence, a, b, c, at_top, at_label = factors.to(x.dtype).unsqueeze(-1).unbind(1)
    torch.softmax(x, -1, out=q)
    q.mul_(confidence / q.gather(-1, first))
    found = _shifted(x, x.gather(-1, first), chunk.buffer).mul_(c).add_(a).mul_(q)
    found.add_(q.mul_(q).mul_(b))
    return found.scatter_(-1, first, at_top).scatter_(-1, chunk.labels, at_label)


def _probability_factors(q_h: Tensor, _: Tensor, __: Tensor, ___: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
    """Return b and c of the gradient b q + c (log q + 1), the gradient at the label, and what the top has more."""
    of_log, of_square, of_entropy, of_confidence = grads
    of_label = (of_log / q_h + of_entropy * (_of("log", q_h) + 1)).masked_fill(q_h == 0, 0)
    return 2 * of_square, of_entropy, of_label + 2 * of_square * (q_h - 1), of_confidence


def _probability_gradient(chunk: _Chunk, first: Tensor, factors: Tensor) -> Tensor:
    """Return the gradient in rows of probabilities."""
    x = chunk.x
    b, c, at_label, more_at_top = factors.to(x.dtype).unsqueeze(-1).unbind(1)
    # log q by way of -q log q, which torch computes one by one.
    slope: Tensor = torch.special.entr(x, out=chunk.buffer).div_(x).neg_().add_(1).masked_fill_(x == 0, 0)
    found = slope.mul_(c).add_(torch.mul(x, b, out=chunk.q))
    found.scatter_(-1, chunk.labels, at_label).scatter_add_(-1, first, more_at_top)
    return found
