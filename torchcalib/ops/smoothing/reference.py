"""Cells of smoothing, and sums over them, in tensor operations: on the CPU in chunks that stay in its cache."""

import torch
from torch import Tensor

from torchcalib.ops.bin_sums.reference import pieces_of, weighed_columns
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.smoothing.grids import GRIDS, N_CELLS

_IN_CACHE = 2**13  # events
_AT_ONCE = 2**20


def cells(confidence: Tensor, index: Tensor) -> None:
    """Fill in what `smoothing_cells.cell_index` says.

    Args:
        confidence: `(N,)`.
        index: `(N,)` int64.
    """
    size = _size(confidence)
    for values, some in zip(torch.split(confidence, size), torch.split(index, size), strict=True):
        some.copy_(_cells(values.to(wide_dtype(index.device))))


def sums(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: str, copies: bool, into: Tensor) -> None:
    """Add what `smoothing_cells.smoothing_sums` says of every series.

    Args:
        confidence: `(S, N)`.
        outcome: `(S, N)`.
        weights: `(S, N)` of the dtype of sums, or None.
        noise: "labels" or "shares" if sum 4 is of noise, else "none".
        copies: whether weights are numbers of copies.
        into: zeros `(S, 5, K)`, with noise `(S, 6, K)`.
    """
    for totals, (values, outcomes, w) in pieces_of(into, _size(confidence), confidence, outcome, weights):
        p, y = values.to(into.dtype), outcomes.to(into.dtype)
        columns = weighed_columns(p, y, w, p * y, "labels" if noise == "none" else noise, copies, into.dtype)
        if noise == "none":
            del columns[4]
        index = _cells(p)
        for total, column in zip(totals, columns, strict=True):
            total.scatter_add_(0, index, column)


def sums_backward(confidence: Tensor, outcome: Tensor, weights: Tensor | None, grads: Tensor, out: Tensor) -> None:
    """Fill in the gradient in the confidence.

    Args:
        confidence: see `sums`.
        outcome: see `sums`.
        weights: see `sums`.
        grads: gradient in the sums of p, p (1 - p) and p y, `(S, 3, K)`.
        out: `(S, N)` of the dtype of `confidence`.
    """
    pieces = pieces_of(grads, _size(confidence), confidence, outcome, weights, out)
    for of_sums, (values, outcomes, w, found) in pieces:
        p, y = values.to(grads.dtype), outcomes.to(grads.dtype)
        of_p, of_spread, of_product = of_sums[:, _cells(p)]
        slope = of_p + of_spread * (1 - 2 * p) + of_product * y
        found.copy_(slope if w is None else (slope * w).masked_fill(w == 0, 0))


def _cells(p: Tensor) -> Tensor:
    """Return the cells of confidences of the dtype of sums."""
    value = p.nan_to_num(0).clamp(0, 1)
    total = torch.zeros_like(value, dtype=torch.int32)
    scaled, whole = torch.empty_like(value), torch.empty_like(total)
    for steps in GRIDS:  # a conversion rounds down what is not negative, and at less cost than `floor`
        total += whole.copy_(torch.mul(value, steps, out=scaled))
    return total.clamp_(max=N_CELLS - 1).long()


def _size(confidence: Tensor) -> int:
    return _IN_CACHE if confidence.device.type == "cpu" else _AT_ONCE
