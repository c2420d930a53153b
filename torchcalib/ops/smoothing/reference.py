"""Cells of smoothing and their sums in plain torch, on the CPU in chunks that fit into the cache."""

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.smoothing.cells import GRIDS, N_CELLS, event_columns

_IN_CACHE = 2**13  # events
_AT_ONCE = 2**20


def cells(confidence: Tensor, index: Tensor) -> None:
    """Write the cells of `confidence` `(N,)` into `index` `(N,)`, int64."""
    size = _size(confidence)
    for values, some in zip(torch.split(confidence, size), torch.split(index, size), strict=True):
        some.copy_(_cells(values.to(wide_dtype(index.device))))


def sums(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool, into: Tensor) -> None:
    """Add the sums of `smoothing_sums` for every series.

    Args:
        confidence: `(S, N)`.
        outcome: `(S, N)`.
        weights: `(S, N)` of the dtype of sums, or None.
        noise: see `smoothing_sums`.
        copies: see `smoothing_sums`.
        into: zeros `(S, 5, K)`, with noise `(S, 6, K)`.
    """
    size = _size(confidence)
    for series, totals in enumerate(into):
        for start in range(0, confidence.shape[-1], size):
            part = series, slice(start, start + size)
            p, y = confidence[part].to(into.dtype), outcome[part].to(into.dtype)
            columns = event_columns(p, y, None if weights is None else weights[part], noise, copies)
            index = _cells(p)
            for total, column in zip(totals, columns, strict=True):
                total.scatter_add_(0, index, column)


def gradient(confidence: Tensor, outcome: Tensor, weights: Tensor | None, upstream: Tensor, slopes: Tensor) -> None:
    """Write the gradients in the confidences into `slopes` `(S, N)`.

    Args:
        confidence: `(S, N)`.
        outcome: `(S, N)`.
        weights: `(S, N)` of the dtype of sums, or None.
        upstream: gradients in the sums of p, p (1 - p) and p y, `(S, 3, K)`.
        slopes: for the results.
    """
    size = _size(confidence)
    for series, of_sums in enumerate(upstream):
        for start in range(0, confidence.shape[-1], size):
            part = series, slice(start, start + size)
            p = confidence[part].to(upstream.dtype)
            in_sum, in_spread, in_product = of_sums[:, _cells(p)]
            slope = in_sum + in_spread * (1 - 2 * p) + in_product * outcome[part]
            if weights is not None:
                slope = (slope * weights[part]).masked_fill_(weights[part] == 0, 0)
            slopes[part] = slope


def _cells(p: Tensor) -> Tensor:
    """Return the cells of confidences of the dtype of sums."""
    value = p.nan_to_num(0).clamp(0, 1)
    total = torch.zeros_like(value, dtype=torch.int32)
    scaled, whole = torch.empty_like(value), torch.empty_like(total)
    for steps in GRIDS:  # the conversion truncates, which costs less than `floor`
        total += whole.copy_(torch.mul(value, steps, out=scaled))
    return total.clamp_(max=N_CELLS - 1).long()


def _size(confidence: Tensor) -> int:
    return _IN_CACHE if confidence.device.type == "cpu" else _AT_ONCE
