"""The order of a sample: a stable sort of floats, by their bits."""

import torch
from torch import Tensor

from torchcalib.ops.operation import operation

# torch sorts one row of integers by radix and everything else by comparison: from about this length on, row by row
# is faster than a batch at once.
_ROW_BY_ROW = 2048


def order_bits(scores: Tensor) -> Tensor:
    """Return integers in the order of the floats: int32 of float32 and narrower, int64 of float64.

    A float is sign and magnitude, an integer two's complement: the bits of a negative float are turned round. -0 is
    0, and NaN of either sign comes last and all alike.
    """
    scores = scores.detach()
    scores = scores.double() if scores.dtype == torch.float64 else scores.float()
    kind, magnitude = (torch.int64, 2**63 - 1) if scores.dtype == torch.float64 else (torch.int32, 2**31 - 1)
    bits = (scores + 0.0).contiguous().view(kind)
    bits = torch.where(bits < 0, bits ^ magnitude, bits)
    return bits.masked_fill(scores.isnan(), magnitude)


def stable_sort(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sorted integers and their order along the last axis, int64; equal ones stay in the order given.

    On the CPU about ten times as fast as `torch.sort` of the floats.
    """
    n = bits.shape[-1]
    if bits.device.type != "cpu" or n < _ROW_BY_ROW or bits.dim() == 1:
        return torch.sort(bits, dim=-1, stable=True)
    values, order = torch.empty_like(bits), torch.empty_like(bits, dtype=torch.int64)
    for row, out, into in zip(bits.view(-1, n), values.view(-1, n), order.view(-1, n), strict=True):
        torch.sort(row, stable=True, out=(out, into))
    return values, order


@operation("order_of(Tensor score) -> Tensor", fake=lambda score: torch.empty_like(score, dtype=torch.int64))
def order_of(score: Tensor) -> Tensor:
    """Return the ascending order of scores along the last axis, int64; equal ones as given, NaN last."""
    return stable_sort(order_bits(score))[1]
