"""Definition of the sums over equal-width bins, in differentiable torch operations.

With bin index b(p) of a confidence p, weight w and outcome y, bin b has the sums of w, w p and w y over the events with
b(p) = b.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.ops.logs import spread_infinite_logits, wide_dtype
from torchcalib.ops.segments import bin_index, bin_sums

Noise = Literal["none", "labels", "shares"]
"""Outcome type for the four sums that estimate the sampling noise, or "none" to omit these sums; see `event_bins`."""
Norm = Literal["l1", "l2", "max", "mean", "signed", "debiased_l1", "debiased_l2"]
"""Norm over bins of the gaps between frequency and mean confidence; see `bin_sums.bin_errors`."""
N_NOISE = 4  # number of these sums
ONE_ROW = 1e3  # largest 1 - sum w^2 / (sum w)^2 of a single row with rounding errors, in units of the precision


class Bins(NamedTuple):
    """Options of the sums; see `bin_sums.event_bins`."""

    n_bins: int  # number of bins B
    right: bool  # whether bins include their right edge
    noise: Noise  # outcome type for the four sums of the sampling noise, or "none"
    copies: bool  # whether weights are frequency weights
    n_groups: int = 1  # number of groups G; the cell of bin b in group g is g * B + b


def event_formula(
    confidence: Tensor, outcome: Tensor, weights: Tensor | None, ecd: Tensor | None, groups: Tensor | None, bins: Bins
) -> Tensor:
    """Return the result of `bin_sums.event_bins` for tensors of equal shape."""
    index = bin_index(confidence, bins.n_bins, bins.right)
    columns = weighted_columns(confidence, outcome, weights, ecd, bins)
    if groups is None:
        return bin_sums(index, columns, bins.n_bins)
    sums = bin_sums(groups * bins.n_bins + index, columns, bins.n_groups * bins.n_bins)
    return sums.reshape(*sums.shape[:-1], bins.n_groups, bins.n_bins).movedim(-2, -3)


def weighted_columns(
    confidence: Tensor, outcome: Tensor, weights: Tensor | None, ecd: Tensor | None, bins: Bins
) -> list[Tensor]:
    """Return the weighted terms of the F sums of `event_bins`, `(..., N)` each; 0 with gradient 0 for weight 0.

    Weights may have further leading axes, of replicates.
    """
    wide = wide_dtype(confidence.device)
    p, y, more = confidence.to(wide), outcome.to(wide), None if ecd is None else ecd.to(wide)
    if weights is None:
        w = square = torch.ones_like(p)
    else:  # values in rows of weight 0 may be NaN or infinite, and have gradient 0
        absent = weights == 0
        p, y = p.masked_fill(absent, 0), y.masked_fill(absent, 0)
        w = weights.masked_fill(absent, 0).expand_as(p)
        more = None if more is None else more.masked_fill(absent, 0)
        square = w if bins.copies else w.square()

    def times(x: Tensor, factor: Tensor) -> Tensor:
        return x if weights is None else x * factor

    columns = [w, times(p, w), times(y, w)]
    if bins.noise != "none":
        residual = (y - p).square()
        spread = (p * (1 - p)).detach()
        variance = residual.detach() if bins.noise == "shares" else spread
        columns += [times(spread, w.detach()), times(variance, square.detach()), square, times(residual, w)]
    return columns if more is None else [*columns, times(more, w)]


def class_formula(
    values: Tensor,
    target: Tensor,
    weights: Tensor | None,
    top: Tensor | None,  # noqa: ARG001
    confidence: Tensor | None,  # noqa: ARG001
    from_logits: bool,
    bins: Bins,
) -> Tensor:
    """Return the result of `bin_sums.class_bins`: event k of a row is (q_k, 1[k = target]). `top` etc. are unused."""
    x = values.to(wide_dtype(values.device))
    w = torch.ones_like(x[..., 0]) if weights is None else weights
    ignored = w == 0
    w = w.masked_fill(ignored, 0).unsqueeze(-1)  # a weight of 0 has gradient 0
    x = x.masked_fill(ignored.unsqueeze(-1), 0)
    q = spread_infinite_logits(x).softmax(-1) if from_logits else x
    n_classes = q.shape[-1]
    classes = torch.arange(n_classes, device=q.device)
    is_label = target.unsqueeze(-1) == classes
    columns = [w.expand_as(q), w * q, w * is_label]
    if bins.noise != "none":
        square = w if bins.copies else w * w
        spread = (q * (1 - q)).detach()
        residual = w * (is_label.to(q.dtype) - q).square()
        columns += [w.detach() * spread, square.detach() * spread, square.expand_as(q), residual]
    cell = classes * bins.n_bins + bin_index(q, bins.n_bins, bins.right)
    sums = bin_sums(cell.flatten(-2), [column.flatten(-2) for column in columns], n_classes * bins.n_bins)
    return sums.reshape(*sums.shape[:-1], n_classes, bins.n_bins).movedim(-2, -3)
