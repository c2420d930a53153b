"""Statistics of rows in plain torch, in chunks. `cpu` computes their values on the CPU."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.ops.logs import elementwise, spread_infinite_logits, wide_dtype
from torchcalib.ops.softmax_stats import cpu
from torchcalib.ops.softmax_stats.formula import LOWEST, Detail
from torchcalib.ops.softmax_stats.logit_sums import Sums, gradient_terms, scores_of

_CHUNK = 2**19  # entries per chunk on the CPU: fewer would need more calls, and more would not fit the cache
_CHUNK_OFF_CPU = 2**24  # entries per chunk on other devices: larger chunks need fewer kernel launches


def forward(
    values: Tensor, target: Tensor, from_logits: bool, tolerance: float, detail: Detail = "entropy"
) -> tuple[Tensor, Tensor]:
    """Return the first four statistics of `Rows` `(4, R)`, and the top classes `(R,)`, of rows `(R, C)`; see `rows`."""
    if values.device.type == "cpu":
        found = cpu.forward(values.resolve_neg(), target.numpy(), from_logits, tolerance, detail)
        return torch.from_numpy(found[0]), torch.from_numpy(found[1])
    wide, parts = wide_dtype(values.device), []
    size = max(1, _CHUNK_OFF_CPU // values.shape[-1])
    for start in range(0, len(values), size):
        x, h = values[start : start + size].to(_dtype(values)), target[start : start + size]
        label = h.clamp(0, x.shape[-1] - 1)
        if from_logits:
            top, sums = _logit_sums(spread_infinite_logits(x), label, detail)
            at_label, at_top, q_top, rest, *more = sums.to(wide)
            rest = rest / q_top  # relative to the top class, like e = exp(x - max x)
            squares = more[0] / (q_top * q_top) if more else rest
            product = more[1] / q_top if len(more) > 1 else rest
            scores = scores_of(Sums(at_label, at_top, top, rest, squares, product, rest), label == top)
        else:
            top, sums = _probability_sums(x, label, detail)
            scores = _scores_from_probability_sums(sums.to(wide), label == top, tolerance, detail)
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


def _logit_sums(x: Tensor, label: Tensor, detail: Detail) -> tuple[Tensor, Tensor]:
    """Return four to six numbers of every row, `(4, n)` to `(6, n)`, and the top classes `(n,)`.

    Let x be the logits, and q their softmax. The numbers are x of the label, x and q of the top class, and the sum of q
    over the other classes. With more `detail` they include the sums of q^2 and q (x - max x) over the other classes.
    """
    label, top = label.unsqueeze(-1), x.argmax(-1, True)
    at_top, q = x.gather(-1, top), x.softmax(-1)
    columns = [x.gather(-1, label), at_top, q.gather(-1, top)]
    q.scatter_(-1, top, 0)  # exclude the top class: adding its q would round small q of other classes to 0
    columns.append(q.sum(-1, True))
    product = (x - at_top).clamp_min_(LOWEST).mul_(q).sum(-1, True) if detail == "entropy" else None
    if detail in ("squares", "entropy"):
        columns.append(q.mul_(q).sum(-1, True))
    if product is not None:
        columns.append(product)
    return top.squeeze(-1), torch.cat(columns, -1).T


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


def _probability_sums(x: Tensor, label: Tensor, detail: Detail) -> tuple[Tensor, Tensor]:
    """Return five numbers of every row with probabilities q, `(5, n)`, and the top classes `(n,)`.

    These are q of the label, q of the top class, and the sums of q, q log q and q^2 (without the top class). Without
    the entropy, the smallest q replaces the sum of q log q. Only with more `detail` is q^2 summed.
    """
    top = x.argmax(-1, True)
    columns = [x.gather(-1, label.unsqueeze(-1)), x.gather(-1, top), x.sum(-1, True)]
    if detail == "entropy":
        columns.append(x.log().clamp_min_(LOWEST).mul_(x).sum(-1, True))
    else:
        columns.append(x.amin(-1, True))
    if detail in ("squares", "entropy"):
        columns.append((x * x).scatter_(-1, top, 0).sum(-1, True))
    return top.squeeze(-1), torch.cat(columns, -1).T


def _scores_from_probability_sums(sums: Tensor, hit: Tensor, tolerance: float, detail: Detail) -> Tensor:
    """Compute the four scores from the result of `_probability_sums`; NaN for rows that violate `tolerance`.

    Scores without their sums are undefined.
    """
    at_label, at_top, total, entropy, *squares = sums.unbind()
    valid = entropy.isfinite() if detail == "entropy" else (entropy >= 0) & total.isfinite()
    invalid = valid.logical_not_()
    squared_error = at_label
    if squares:
        miss, others = 1 - at_label, (at_top * at_top - at_label * at_label).masked_fill_(hit, 0)
        squared_error = miss * miss + squares[0] + others
    scores = torch.stack((elementwise(torch.log, at_label), squared_error, entropy, at_top))
    scores[2:].masked_fill_(invalid, torch.nan)
    if math.isfinite(tolerance):
        scores.masked_fill_(~(((total - 1).abs() <= tolerance) & (at_top <= 1)) | invalid, torch.nan)
    return scores
