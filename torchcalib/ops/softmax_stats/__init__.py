"""Statistics of the class probabilities of every row: label log-probability, squared error, entropy, top class.

Scoring rules and top-label bins need only these statistics of a row. One pass over the input computes them, without a
temporary tensor of the size of the input. The gradient takes one more pass.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats.formula import row_formula

_N_SCORES = 4


class Rows(NamedTuple):
    """Statistics of rows with probabilities q and label h, each `(..., N)`. In a row with NaN, all but `top` are NaN.

    Without a tolerance, `log_prob` of a row of probabilities with NaN can be log q_h.
    """

    log_prob: Tensor  # log q_h in nats; -inf where q_h = 0
    squared_error: Tensor  # sum_k (q_k - 1[k = h])^2, accurate even for q_h near 1
    neg_entropy: Tensor  # sum_k q_k log q_k in nats, with 0 log 0 = 0
    confidence: Tensor  # max_k q_k
    top: Tensor  # class with the largest probability, the first one if tied; int64


def rows(
    values: Tensor, target: Tensor, *, from_logits: bool, tolerance: float = math.inf, backend: Backend = "auto"
) -> Rows:
    """Return label log-probability, squared error, negative entropy, confidence and top class of every row.

    The results of a row are bitwise equal in every batch. Arithmetic is float64 for float64 input. For narrower dtypes
    it is float32 within a block of entries, and float64 across blocks. The relative error is then below 2e-6 for logits
    at most 20 below their maximum, and grows linearly for lower logits. Backends differ by at most this error. Float64
    on the CPU supports only "torch".

    In a row with logits of +inf, their classes have equal probabilities and all other classes have probability 0. For a
    label outside [0, C), `log_prob` and `squared_error` are NaN. `tolerance` is the largest accepted |sum_k q_k - 1|.
    If finite, a row that exceeds it or contains probabilities outside [0, 1] has NaN statistics. For logits, only rows
    with NaN or with only -inf have NaN statistics.

    Gradient: in `values`, in reverse and forward mode and of any order. It is 0 for log 0, for a row with a logit of
    +inf, and for a row whose incoming gradients are all 0, even with NaN. At ties, `confidence` is differentiated as
    the probability of the class `top`.
    """
    scores, top = _rows(values, target, from_logits, tolerance, backend=backend)
    log_prob, squared_error, neg_entropy, confidence = scores.unbind(-2)
    return Rows(log_prob, squared_error, neg_entropy, confidence, top)


def _forward(
    backend: Backend, values: Tensor, target: Tensor, from_logits: bool, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Return the first four statistics of `Rows` as one tensor `(..., 4, N)`, and the top classes `(..., N)`."""
    values = values.detach()
    lead = values.shape[:-1]
    if not values.numel():
        scores = values.new_empty((*lead[:-1], _N_SCORES, lead[-1]), dtype=wide_dtype(values.device))
        return scores, values.new_empty(lead, dtype=torch.int64)
    source = source_of("rows", values.device.type, values.dtype, backend)
    if values.dim() == 2:
        scores, top = source.forward(values, target, from_logits, tolerance)
        return scores, top
    labels = target.reshape(-1)
    parts = [source.forward(matrix, labels[rows], from_logits, tolerance) for rows, matrix in matrices(values)]
    scores, top = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    return scores.view(_N_SCORES, *lead).movedim(0, -2), top.view(lead)


def _gradient(
    backend: Backend, arguments: list[Any], results: tuple[Tensor, Tensor], needed: list[int], grads: Tensor
) -> list[Tensor]:
    values, target, from_logits, _ = arguments
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    source = source_of("rows", values.device.type, values.dtype, backend)
    scores, upstream = (x.detach().movedim(-2, 0).reshape(_N_SCORES, -1) for x in (results[0], grads))
    columns = target.reshape(-1), scores, results[1].reshape(-1), upstream, out.view(-1, out.shape[-1]).T
    for row_slice, matrix in matrices(values.detach()):
        labels, row_scores, row_tops, grad_scores, filled = (x[..., row_slice] for x in columns)
        source.backward(matrix, labels, from_logits, row_scores, row_tops, grad_scores, filled.T)
    return [out for _ in needed]


_rows = fused(_forward, row_formula, _gradient)


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
