"""Sort samples by score."""

import torch
from torch import Tensor

from torchcalib.ops.operation import operation

# torch uses radix sort for a single row of integers, and a slower comparison sort for several rows.
# For rows of at least this length, one call per row is faster than one call for the batch.
_ROW_BY_ROW = 2048


def order_bits(scores: Tensor) -> Tensor:
    """Convert floats to integers of the same order: int64 for float64, int32 for other dtypes.

    Floats are stored as sign and magnitude, integers in two's complement. So the magnitude bits of negative floats are
    inverted. -0 is converted like 0, and NaN to the largest integer.
    """
    scores = scores.detach()
    scores = scores.double() if scores.dtype == torch.float64 else scores.float()
    kind, magnitude = (torch.int64, 2**63 - 1) if scores.dtype == torch.float64 else (torch.int32, 2**31 - 1)
    # Adding 0 converts -0 to 0.
    bits = (scores + 0.0).contiguous().view(kind)
    bits = torch.where(bits < 0, bits ^ magnitude, bits)
    return bits.masked_fill(scores.isnan(), magnitude)


def stable_sort(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Sort integers along the last axis with a stable sort. Return them and their original indices (int64).

    On the CPU, long rows are sorted one by one, because torch uses radix sort only for a single row.
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
    """Return the indices that sort scores along the last axis, ascending and stable, int64; NaN last."""
    return stable_sort(order_bits(score))[1]


def sorted_columns(score: Tensor, positives: Tensor, n: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Sort columns `(..., M)`, M >= 1, by score, with a stable sort; missing scores (NaN) become +inf and are last.

    The last result is the number of scores that are not missing, int64 `(...)`.

    Gradient: in `score`, `positives` and `n`; the order is constant.
    """
    order = order_of(score.detach())
    size = score.isnan().logical_not().sum(-1)
    score, positives = score.gather(-1, order), positives.expand_as(order).gather(-1, order)
    n = None if n is None else n.expand_as(order).gather(-1, order)
    return score.masked_fill(score.isnan(), torch.inf), positives, n, size


def tie_begins(score: Tensor) -> Tensor:
    """Return True at the first element of each group of equal scores, for sorted scores `(..., M)`."""
    begins = torch.ones_like(score, dtype=torch.bool)
    begins[..., 1:] = score[..., 1:] != score[..., :-1]
    return begins


def end_of_ties(score: Tensor, ends: Tensor) -> Tensor:
    """Move run ends `(..., B)` to the end of their group of equal scores, for sorted scores `(..., M)`."""
    last = score.gather(-1, (ends - 1).clamp(min=0))
    return torch.where(ends > 0, torch.searchsorted(score, last, right=True), 0)
