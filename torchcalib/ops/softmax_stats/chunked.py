"""Statistics of rows in plain torch, in chunks. `cpu` computes their values on the CPU."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.logs import elementwise, wide_dtype
from torchcalib.ops.softmax_stats import cpu
from torchcalib.ops.softmax_stats.formula import LOWEST, Detail
from torchcalib.ops.softmax_stats.logit_sums import gradient_terms

_CHUNK = 2**19  # entries per chunk on the CPU: fewer would need more calls, and more would not fit the cache
_CHUNK_OFF_CPU = 2**24  # entries per chunk on other devices: larger chunks need fewer kernel launches


def forward(
    values: Tensor, target: Tensor, from_logits: bool, tolerance: float, detail: Detail = "entropy"
) -> tuple[Tensor, Tensor]:
    """Return the first four statistics of `Rows` `(4, R)`, and the top classes `(R,)`, of rows `(R, C)`; see `rows`."""
    if values.device.type == "cpu":
        found = cpu.forward(values.resolve_neg(), target.numpy(), from_logits, tolerance, detail)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    parts, size = [], max(1, _CHUNK_OFF_CPU // values.shape[-1])
    for start in range(0, len(values), size):
        x, h = values[start : start + size], target[start : start + size]
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
    values: Any, target: Any, from_logits: bool, tolerance: float, detail: Detail, weights: Any, groups: Any, n: int
) -> tuple[Any, Any, Any, Any] | None:
    """Return confidences, outcomes, top classes and totals of rows; None if a row or a label is invalid.

    All arguments are numpy arrays. `weights` are positive, or None for 1; `groups` are in [0, n), or None for n = 1.
    Outcomes are whether the top class is the label, uint8. Totals `(5, n)` are sums of the first four statistics of
    `Rows` and of the outcomes in each group. Those beyond `detail` are undefined.
    """
    scores, top = cpu.of_array(values, target, from_logits, tolerance, detail)
    outcomes = (top == target).view(np.uint8)
    if groups is not None:
        rows = [*scores, outcomes]
        totals = np.stack([np.bincount(groups, x if weights is None else x * weights, n) for x in rows])
    elif weights is not None:
        # Not matrix products, whose threads wait for each other while other programs run
        totals = np.append(np.einsum("kn,n->k", scores, weights), np.einsum("n,n->", outcomes, weights))[:, None]
    else:
        totals = np.append(scores.sum(-1), np.count_nonzero(outcomes))[:, None]
    return None if np.isnan(totals[0] + totals[3]).any() else (scores[3], outcomes, top, totals)


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
        cpu.linear_gradient(values, target, scores, top, grads, out)
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
    """Return the four sums of `Sums` over parts of the classes `(4, P, n)`, and their top classes `(P, n)`; P is 1."""
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
