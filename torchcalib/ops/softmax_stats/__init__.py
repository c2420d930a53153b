"""Statistics of the class probabilities of every row: label log-probability, squared error, entropy, top class.

Scoring rules and top-label bins need only these statistics of a row. One pass over the input computes them, without a
temporary tensor of the size of the input. The gradient takes one more pass.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats.formula import Detail, row_formula

if TYPE_CHECKING:
    from torchcalib.ops.softmax_stats.logit_sums import LogitSums

__all__ = ["Detail", "RowStatistics", "matrices", "rows", "scores_and_tops", "sums"]

_N_SCORES = 4


class RowStatistics(NamedTuple):
    """Statistics of rows with probabilities q and label h, each `(..., N)`. In a row with NaN, all but `top` are NaN.

    Without a tolerance, `log_prob` of a row of probabilities with NaN can be log q_h.
    """

    log_prob: Tensor  # log q_h in nats; -inf where q_h = 0
    squared_error: Tensor  # sum_k (q_k - 1[k = h])^2, accurate even for q_h near 1
    neg_entropy: Tensor  # sum_k q_k log q_k in nats, with 0 log 0 = 0
    confidence: Tensor  # max_k q_k
    top: Tensor  # class with the largest probability, the first one if tied; int64


def rows(
    values: Tensor,
    target: Tensor,
    *,
    from_logits: bool,
    tolerance: float = math.inf,
    detail: Detail = "entropy",
    backend: Backend = "auto",
) -> RowStatistics:
    """Return label log-probability, squared error, negative entropy, confidence and top class of every row.

    The results of a row are bitwise equal in every batch. Arithmetic is float64 for float64 input. For narrower dtypes
    it is float32 within a block of entries, and float64 across blocks. The relative error is then below 2e-6 for logits
    at most 20 below their maximum, and grows linearly for lower logits. For float64 it is below 1e-13. Backends differ
    by at most this error.

    In a row with logits of +inf, their classes have equal probabilities and all other classes have probability 0. For a
    label outside [0, C), `log_prob` and `squared_error` are NaN. `tolerance` is the largest accepted |sum_k q_k - 1|.
    If finite, a row that exceeds it or contains probabilities outside [0, 1] has NaN statistics. For logits, only rows
    with NaN or with only -inf have NaN statistics. `detail` can omit statistics, which then are undefined; see
    `Detail`. The logarithms of probabilities are most of the work.

    Gradient: in `values`, in reverse and forward mode and of any order. It is 0 for log 0, for a row with a logit of
    +inf, and for a row whose incoming gradients are all 0, even with NaN. At ties, `confidence` is differentiated as
    the probability of the class `top`.
    """
    if detail == "label" and values.requires_grad:  # the gradient needs the confidence
        detail = "confidence"
    scores, top = scores_and_tops(values, target, from_logits, tolerance, detail, backend=backend)
    log_prob, squared_error, neg_entropy, confidence = scores.unbind(-2)
    return RowStatistics(log_prob, squared_error, neg_entropy, confidence, top)


def _forward(
    backend: Backend, values: Tensor, target: Tensor, from_logits: bool, tolerance: float, detail: Detail
) -> tuple[Tensor, Tensor]:
    """Return the first four `RowStatistics` as one tensor `(..., 4, N)`, and the top classes `(..., N)`."""
    values = values.detach()
    lead = values.shape[:-1]
    if not values.numel():
        scores = values.new_empty((*lead[:-1], _N_SCORES, lead[-1]), dtype=wide_dtype(values.device))
        return scores, values.new_empty(lead, dtype=torch.int64)
    source = source_of("rows", values.device.type, values.dtype, values.numel(), backend)
    if values.dim() == 2:
        scores, top = source.forward(values, target, from_logits, tolerance, detail)
        return scores, top
    labels = target.reshape(-1)
    options = from_logits, tolerance, detail
    parts = [source.forward(matrix, labels[rows], *options) for rows, matrix in matrices(values)]
    scores, top = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    return scores.view(_N_SCORES, *lead).movedim(0, -2), top.view(lead)


def _gradient(
    backend: Backend, arguments: list[Any], results: tuple[Tensor, Tensor], needed: list[int], grads: Tensor
) -> list[Tensor]:
    values, target, from_logits, _, detail = arguments
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    source = source_of("rows", values.device.type, values.dtype, values.numel(), backend)
    scores, upstream = (x.detach().movedim(-2, 0).reshape(_N_SCORES, -1) for x in (results[0], grads))
    if detail != "entropy":  # undefined statistics have no gradient, but 0 times NaN is NaN
        scores = torch.cat((scores[:1], scores[1:3].masked_fill(upstream[1:3] == 0, 0), scores[3:]))
    columns = target.reshape(-1), scores, results[1].reshape(-1), upstream, out.view(-1, out.shape[-1]).T
    for row_slice, matrix in matrices(values.detach()):
        labels, row_scores, row_tops, grad_scores, filled = (x[..., row_slice] for x in columns)
        source.backward(matrix, labels, from_logits, row_scores, row_tops, grad_scores, filled.T)
    return [out for _ in needed]


scores_and_tops = fused(_forward, row_formula, _gradient)
"""Function of the arguments of `rows` by position, which returns its results as `_forward` does."""


def sums(logits: Tensor, label: Tensor, alpha: Tensor | None = None, *, backend: Backend = "auto") -> "LogitSums":
    """Return sums over parts of the classes of `alpha` * `logits` `(n, C)`, each `(P, n)`, to merge with other parts.

    A label outside [0, C) belongs to other classes. Logits are float32 or float64, without gradient. `alpha` is a
    number in `wide_dtype`.
    """
    from torchcalib.ops.softmax_stats.logit_sums import LogitSums

    found, top = source_of("rows", logits.device.type, logits.dtype, logits.numel(), backend).sums(logits, alpha)
    known = (label >= 0) & (label < logits.shape[-1])
    own = logits.gather(-1, label.masked_fill(~known, 0).unsqueeze(-1)).squeeze(-1).masked_fill_(~known, torch.nan)
    at_label = torch.full(top.shape, torch.nan, dtype=found.dtype, device=found.device)
    at_label[0] = own  # the label of all parts
    largest = logits.gather(-1, top.T).T.to(found.dtype)
    if alpha is not None:
        at_label, largest = at_label * alpha, largest * alpha
    return LogitSums(at_label, largest, top, *found)


def matrices(values: Tensor, start: int = 0) -> list[tuple[slice, Tensor]]:
    """Split rows `(..., N, C)` into views `(n, C)`. Return them with slices of row indices, which begin at `start`."""
    if not values.numel():
        return []
    if values.dim() == 2:
        return [(slice(start, start + len(values)), values)]
    try:
        matrix = values.view(-1, values.shape[-1])
    except RuntimeError:  # no common row stride: process each element of the first axis
        n = values[0].numel() // values.shape[-1]
        return [piece for k, part in enumerate(values) for piece in matrices(part, start + k * n)]
    return [(slice(start, start + len(matrix)), matrix)]
