"""Sums over the logits of a part of the classes: how parts merge, and the statistics and gradients that follow."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.logs import elementwise
from torchcalib.ops.softmax_stats.formula import LOWEST


class LogitSums(NamedTuple):
    """Sums over classes of rows with logits x, each `(..., n)` and in `wide_dtype`, except for `top`.

    With d = x - max x and e = exp d, the sums exclude the top class. Its e = 1 would round small e to 0.
    """

    label: Tensor  # logit of the label; NaN if the label is not one of the classes
    largest: Tensor  # max x
    top: Tensor  # class with the largest logit, the first one if tied; int64
    rest: Tensor  # sum of e, the R of `numba._forward_logits`
    squares: Tensor  # sum of e^2
    product: Tensor  # sum of e d
    spread: Tensor  # sum of e d^2


def merge(parts: LogitSums) -> LogitSums:
    """Merge sums over disjoint classes, in the order of the classes, along the first axis `(parts, ..., n)`.

    Relative to the maximum m of all parts, a part with the maximum m_j has e = factor exp(x - m_j) with
    factor = exp gap and gap = m_j - m. Its top class is added to its sums, unless it is the top class of all parts.
    """
    label, high, top, rest, squares, product, spread = parts
    first = high.argmax(0, keepdim=True)
    largest = high.gather(0, first)
    # Equal maxima have gap 0, also if both are infinite.
    gap = (high - largest).masked_fill(high == largest, 0)
    factor, gap = gap.exp(), gap.clamp(min=LOWEST)
    absent = label.isnan()
    others = torch.ones_like(rest).scatter_(0, first, 0)
    rest, squares = rest + others, squares + others
    return LogitSums(
        label.masked_fill(absent, -torch.inf).amax(0).masked_fill(absent.all(0), torch.nan),
        largest[0],
        top.gather(0, first)[0],
        (factor * rest).sum(0),
        (factor * factor * squares).sum(0),
        (factor * (product + gap * rest)).sum(0),
        (factor * (spread + gap * (2 * product + gap * rest))).sum(0),
    )


def joined(join: Callable[[tuple[Tensor, ...], int], Tensor], parts: list[LogitSums], dim: int) -> LogitSums:
    """Join sums by `torch.stack` or `torch.cat` along an axis."""
    return LogitSums(*(join(column, dim) for column in zip(*parts, strict=True)))


def scores_of(sums: LogitSums, hit: Tensor) -> Tensor:
    """Return the four scores of `Rows` as `(4, ..., n)`. `hit` is True where the label is the top class.

    They are NaN without a logit above -inf, and where a sum is NaN.
    """
    label, largest, _, rest, squares, product, _ = sums
    rest = rest.masked_fill(largest == -torch.inf, torch.nan)
    total = 1 + rest
    log_total = elementwise(torch.log1p, rest)
    shift = (label - largest).masked_fill(label == largest, 0)
    confidence = 1 / total
    log_prob = shift - log_total
    # Squared error sum_k q_k^2 - 2 q_h + 1, without cancellation if the label is the top class: 1 - q_h = rest / total.
    label_terms = 1 - 2 * elementwise(torch.exp, shift) * confidence
    squared_error = torch.where(hit, rest * rest, 1).add_(squares).div_(total * total)
    squared_error += label_terms.masked_fill_(hit, 0)
    return torch.stack((log_prob, squared_error, product / total - log_total, confidence))


def gradient_terms(scores: Tensor, grads: Tensor, hit: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return a, b, c of the gradient q (a + b q + c (x - max x)) in logits x, and the gradients of top class and label.

    `scores` are those of `scores_of`, and `grads` the gradients in them. The gradients of top class and label can have
    the factor 1 - q, and are therefore computed in `wide_dtype`.
    """
    log_prob, squared_error, neg_entropy, confidence = scores
    grad_log, grad_square, grad_entropy, grad_top = grads
    q_h, log_top = elementwise(torch.exp, log_prob), elementwise(torch.log, confidence)
    # log q = x - max x + log max q, so that sum_k q_k (x_k - max x) = neg_entropy - log max q.
    mean_shift = neg_entropy - log_top
    a = -grad_log - grad_top * confidence - 2 * grad_square * (squared_error - 1 + q_h) - grad_entropy * mean_shift
    b, c = 2 * grad_square, grad_entropy
    for_top = confidence * (a + b * confidence + grad_top)
    shift = (log_prob - log_top).masked_fill(q_h == 0, 0)
    for_label = torch.where(hit, for_top, q_h * (a + b * q_h + c * shift)) + grad_log - b * q_h
    return a, b, c, for_top, for_label
