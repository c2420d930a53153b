"""Which bin a value falls in, and sums over bins, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcalib.kernels.row_stats import wide_dtype


def bin_index(values: Tensor, n_bins: int, right: bool = False) -> Tensor:
    """Return the equal-width bin of every value in [0, 1]: int64, the shape of `values`.

    The one edge rule: edges are `i / n_bins` computed in float64 and compared with the value widened to float64;
    bins are `[i/B, (i+1)/B)` and the last one is closed, or with `right` `(i/B, (i+1)/B]` and the first one is.

    `values * n_bins` is off by less than one unit in the last place, so its floor is the bin or a neighbour of it:
    two comparisons with the edges themselves mend it. (A binary search gives the same at ten times the cost.)
    """
    wide = values.detach().to(wide_dtype(values.device))
    scaled = wide * n_bins
    index = (scaled.ceil() - 1 if right else scaled.floor()).clamp(0, n_bins - 1)
    lower, upper = index / n_bins, (index + 1) / n_bins
    step = (wide > upper).long() - (wide <= lower).long() if right else (wide >= upper).long() - (wide < lower).long()
    # The outer clamp closes the bin at the end of the range, and gives rows of weight 0 that hold NaN some bin.
    return (index.long() + step).clamp(0, n_bins - 1)


def bin_sums(index: Tensor, columns: Sequence[Tensor], n_bins: int) -> Tensor:
    """Sum every column over the samples of every bin.

    Args:
        index: bin of every sample, int64 `(..., N)`.
        columns: F tensors `(..., N)` of the wide dtype.
        n_bins: B.

    Returns:
        `(..., F, B)` in the columns' dtype. Gradient: the value of a bin flows to each of its samples.
    """
    source = torch.stack(torch.broadcast_tensors(*columns), dim=-2)  # type: ignore[no-untyped-call]
    index = index.unsqueeze(-2).expand(source.shape)
    return source.new_zeros((*source.shape[:-1], n_bins)).scatter_add(-1, index, source)
