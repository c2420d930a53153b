"""Sums over cells in plain torch, in chunks that fit into the cache of a CPU."""

import torch
from torch import Tensor

from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.smoothing.formula import GRIDS, N_CELLS, event_columns

_CPU_CHUNK = 2**13  # events per chunk on the CPU
_OTHER_CHUNK = 2**20  # events per chunk on other devices, which limits the memory


def cells(confidence: Tensor, index: Tensor) -> None:
    """Fill `index`, int64 `(N,)`, with the cell of every confidence `(N,)`, as defined in `cells.cell_index`."""
    size = _chunk_size(confidence)
    for values, part in zip(torch.split(confidence, size), torch.split(index, size), strict=True):
        part.copy_(_cells(values.to(wide_dtype(index.device))))


def sums(confidence: Tensor, outcome: Tensor, weights: Tensor | None, noise: Noise, copies: bool, into: Tensor) -> None:
    """Fill `into`, zeros `(S, 5 or 6, K)`, with the result of `cells.smoothing_sums` for S batch elements `(S, N)`."""
    size = _chunk_size(confidence)
    for element, totals in enumerate(into):
        for start in range(0, confidence.shape[-1], size):
            part = element, slice(start, start + size)
            p, y = confidence[part].to(into.dtype), outcome[part].to(into.dtype)
            columns = event_columns(p, y, None if weights is None else weights[part], noise, copies)
            index = _cells(p)
            for total, column in zip(totals, columns, strict=True):
                total.scatter_add_(0, index, column)


def gradient(confidence: Tensor, outcome: Tensor, weights: Tensor | None, upstream: Tensor, slopes: Tensor) -> None:
    """Fill `slopes` `(S, N)` with the gradient in the confidence p.

    `upstream` are the incoming gradients in the sums of p, p (1 - p) and p y, `(S, 3, K)`.
    """
    size = _chunk_size(confidence)
    for element, grad_sums in enumerate(upstream):
        for start in range(0, confidence.shape[-1], size):
            part = element, slice(start, start + size)
            p = confidence[part].to(upstream.dtype)
            grad_p, grad_spread, grad_product = grad_sums[:, _cells(p)]
            slope = grad_p + grad_spread * (1 - 2 * p) + grad_product * outcome[part]
            if weights is not None:
                slope = (slope * weights[part]).masked_fill_(weights[part] == 0, 0)
            slopes[part] = slope


def _cells(p: Tensor) -> Tensor:
    """Return the cell of every confidence: the sum of floor(p * steps) over all grids."""
    value = p.nan_to_num(0).clamp(0, 1)
    total = torch.zeros_like(value, dtype=torch.int32)
    scaled, truncated = torch.empty_like(value), torch.empty_like(total)
    for steps in GRIDS:  # conversion to int truncates, which is faster than `floor`
        total += truncated.copy_(torch.mul(value, steps, out=scaled))
    return total.clamp_(max=N_CELLS - 1).long()


def _chunk_size(confidence: Tensor) -> int:
    return _CPU_CHUNK if confidence.device.type == "cpu" else _OTHER_CHUNK
