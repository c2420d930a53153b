"""Statistics of the softmax of every row: log-probability of the label, squared error, entropy, confidence, top class.

These are all that scores and top-label bins need of a row `(q_1 .. q_C)` with label h. One pass over the input computes
them, without a temporary tensor of its size; the gradient takes one more pass.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.dispatch import Backend, source_of
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.operation import fused
from torchcalib.ops.softmax_stats.reference import formula

_N_SCORES = 4


class Rows(NamedTuple):
    """Statistics of rows, each `(..., N)`; all but `top` in the dtype of sums, and NaN in a row with NaN.

    Attributes:
        log_prob: log q_h, in nats; -inf where q_h is 0.
        squared_error: sum_k (q_k - 1[h = k])^2, without cancellation for q_h near 1.
        neg_entropy: sum_k q_k log q_k, in nats, with 0 log 0 = 0.
        confidence: max_k q_k.
        top: the class with the largest q, the first one at ties; int64.
    """

    log_prob: Tensor
    squared_error: Tensor
    neg_entropy: Tensor
    confidence: Tensor
    top: Tensor


def rows(
    values: Tensor, target: Tensor, *, from_logits: bool, tolerance: float = math.inf, backend: Backend = "auto"
) -> Rows:
    """Return statistics of every row.

    A row is computed separately: its bits do not depend on other rows, their number or the place in memory. Arithmetic
    is float32 for float32 and narrower within a block of entries, and float64 over blocks. The relative error of each
    result is below 2e-6 if logits lie up to 20 below the largest one of their row, and grows in proportion beyond.
    Float64 stays float64.

    Args:
        values: logits or probabilities `(..., N, C)` of any floating dtype and with any strides. Logits may be +inf,
            which share the mass, and -inf.
        target: labels `(..., N)`, int64. A label outside the classes gives a NaN log-probability and squared error.
        from_logits: whether `values` are logits.
        tolerance: if finite, all statistics are NaN in a row of probabilities with a number outside [0, 1] or a sum
            further from 1. For logits only a row with NaN, or of -inf only, gives NaN.
        backend: see `dispatch`; float64 on the CPU runs by "torch". All agree within the bound above.

    Gradient: in `values`, in reverse and forward mode, of any order. The log of a probability 0 has gradient 0, see
    `logs.safe_log`; so has a row with a logit of +inf. At ties the confidence is that of the first class. A row whose
    incoming gradients are all 0 has gradient 0 and may hold NaN.
    """
    scores, top = _rows(values, target, from_logits, tolerance, backend=backend)
    log_prob, squared_error, neg_entropy, confidence = scores.unbind(-2)
    return Rows(log_prob, squared_error, neg_entropy, confidence, top)


def _forward(
    backend: Backend, values: Tensor, target: Tensor, from_logits: bool, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Return `Rows` as one tensor of scores `(..., 4, N)`, and the top classes `(..., N)`."""
    values = values.detach()
    lead = values.shape[:-1]
    scores = torch.empty((_N_SCORES, *lead), dtype=wide_dtype(values.device), device=values.device)
    top = torch.empty(lead, dtype=torch.int64, device=values.device)
    source = source_of("rows", values.device.type, values.dtype, backend)
    if values.dim() == 2:
        if values.numel():
            source.forward(values, target, from_logits, tolerance, scores, top)
        return scores.movedim(0, -2), top
    labels, of_rows, tops = target.reshape(-1), scores.view(_N_SCORES, -1), top.view(-1)
    for held, matrix in matrices(values):
        source.forward(matrix, labels[held], from_logits, tolerance, of_rows[:, held], tops[held])
    return scores.movedim(0, -2), top


def _gradient(
    backend: Backend, arguments: list[Any], results: tuple[Tensor, Tensor], needed: list[int], grads: Tensor
) -> list[Tensor]:
    """Return the gradient in `values`."""
    values, target, from_logits, _ = arguments
    out = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    source = source_of("rows", values.device.type, values.dtype, backend)
    scores, upstream = (x.detach().movedim(-2, 0).reshape(_N_SCORES, -1) for x in (results[0], grads))
    columns = target.reshape(-1), scores, results[1].reshape(-1), upstream, out.view(-1, out.shape[-1]).T
    for held, matrix in matrices(values.detach()):
        labels, of_rows, tops, of_scores, filled = (x[..., held] for x in columns)
        source.backward(matrix, labels, from_logits, of_rows, tops, of_scores, filled.T)
    return [out for _ in needed]


_rows = fused(_forward, formula, _gradient)


def matrices(values: Tensor, start: int = 0) -> list[tuple[slice, Tensor]]:
    """Cut `(..., N, C)` into matrices that are views of it: their places among all rows, and their rows."""
    if not values.numel():
        return []
    if values.dim() == 2:
        return [(slice(start, start + len(values)), values)]
    try:
        matrix = values.view(-1, values.shape[-1])
    except RuntimeError:  # no one stride leads from row to row
        n = values[0].numel() // values.shape[-1]
        return [piece for k, part in enumerate(values) for piece in matrices(part, start + k * n)]
    return [(slice(start, start + len(matrix)), matrix)]
