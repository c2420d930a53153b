"""Calibration tests and intervals for clusters of dependent rows, such as the pixels of an image.

Only clusters are independent. Outcomes in the same cluster may depend on each other in any way.

P-value: under perfect calibration the residual of a cluster (outcomes minus confidences) has mean 0. The residuals of
all clusters are multiplied by random signs, one for each cluster, and the error is recomputed (wild bootstrap with
Rademacher weights). This is exact for symmetric residuals, and an approximation for many clusters. Residuals of rare
outcomes are asymmetric: if none occurred, all have the same sign. Therefore the p-value is the larger one of this test
and of the test for independent rows. It is still too small if rare outcomes occur in few clusters only.

Noise floor: the larger one of that of independent rows, and the mean over random signs for residuals after subtracting
the mean gap of 15 ranges of scores (fewer for less than 150 clusters).

Interval of a mean gap: the design effect is the variance of the mean gap, from the residuals of the clusters, divided
by that of independent rows. Noise is multiplied by the design effect if it is above 1, and the normal quantile is
replaced by that of a t-distribution. Its degrees of freedom are the effective number of clusters (sum n)^2 / sum n^2,
minus 1. Interval of another error: see `replicated_interval`.

Reference:
    Cameron, Gelbach, Miller: Bootstrap-based improvements for inference with clustered errors (Review of Economics and
    Statistics, 2008), for random signs; Kish: Survey Sampling (1965), ch. 5.4 and 11.7, for the design effect and the
    effective number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchcalib.inference.simulation import BinCells, RunCells
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.segments import cell_sums
from torchcalib.special.bin_tests import t_critical

_AT_ONCE = 2**22  # gaps of replicates in memory
_N_BLOCKS = 15  # largest number of ranges of scores in which the mean gap is subtracted for the noise floor


class SignFlips:
    """Replicates of the gaps in K cells, in which the residual of each of G clusters has a random sign.

    Args:
        cells: bins or runs `(..., K)`.
        table: weight and residual of every cluster in each cell, `(..., G, 2, K)`; see `cluster_table`.
        seed: seed of the signs.
        n_replicates: number R of replicates.
    """

    def __init__(self, cells: BinCells | RunCells, table: Tensor, seed: int, n_replicates: int) -> None:
        self.cells = cells
        self._n, self._residual = n, _ = table.unbind(-2)
        centred = self._residual - n * _gap_of_blocks(cells, min(_N_BLOCKS, n.shape[-2] // 10)).unsqueeze(-2)
        self._centred = centred * _jackknife_factor(n).unsqueeze(-1)
        self._signs = _random_signs(n[..., 0], seed, n_replicates)

    def noise(self) -> tuple[Tensor, Tensor]:
        """Return replicates of the noise of the gaps, and of the share of each cell, each `(R, ..., K)`."""
        n, total = self._n, self._n.sum((-1, -2)).clamp(min=1e-300)
        shares = n - n.sum(-1, keepdim=True) * (self.cells.n / total.unsqueeze(-1)).unsqueeze(-2)
        gaps = (self._signs @ self._centred).movedim(-2, 0) / self.cells.positive_n
        return gaps, (self._signs @ shares).movedim(-2, 0) / total.unsqueeze(-1)

    def compute(self, metric: Callable[[Any], Tensor], *, centred: bool = False) -> Tensor:
        """Return the metric of every replicate `(R, ...)`; `centred` subtracts the gap of each cell beforehand."""
        residual = self._centred if centred else self._residual
        found = []
        for signs in torch.split(self._signs, max(1, _AT_ONCE // max(1, self.cells.n.numel()))):
            gaps = (signs @ residual).movedim(-2, 0) / self.cells.positive_n
            found.append(metric(self.cells.with_gaps(gaps)))
        return torch.cat(found)


def _gap_of_blocks(cells: BinCells | RunCells, n_blocks: int) -> Tensor:
    """Return the mean gap `(..., K)` of the block of each cell. Blocks are ranges of scores with similar weights."""
    n, total, n_blocks = cells.n, cells.n.sum(-1, keepdim=True), max(1, n_blocks)
    block = ((n.cumsum(-1) - n / 2) / total * n_blocks).nan_to_num(0).long().clamp(0, n_blocks - 1)
    columns = torch.stack((n, cells.outcomes - cells.expected), -2)
    weight, residual = cell_sums(block, columns, n_blocks).unbind(-2)
    return (residual / weight.masked_fill(weight == 0, 1)).gather(-1, block)


def _jackknife_factor(n: Tensor) -> Tensor:
    """Return sqrt((G - 1) / G) / (1 - h) for each of G clusters with a share h of the weight `(..., G, K)`, `(..., G)`.

    Residuals are smaller because the mean gap was estimated from them. The sum of the squares of residuals times these
    factors is the jackknife estimate of the variance of the mean. The share is at most 1/2 here.
    """
    weight = n.sum(-1)
    share = (weight / weight.sum(-1, keepdim=True)).nan_to_num(0).clamp(max=0.5)
    occupied = (weight > 0).sum(-1, keepdim=True).clamp(min=2)
    return ((occupied - 1) / occupied).sqrt() / (1 - share)


def _random_signs(like: Tensor, seed: int, n_replicates: int) -> Tensor:
    """Return random signs -1 and 1, `(R, G)`, for G clusters on the last axis of `like`."""
    streams = torch.arange(n_replicates, device=like.device)
    bits = random_words(seed, streams, torch.arange(like.shape[-1], device=like.device)) >> 31
    return (2 * bits - 1).to(like.dtype)


def sign_p_value(residuals: Tensor, seed: int, n_replicates: int) -> Tensor:
    """Return the p-value `(...)` of the absolute sum of the residuals of G clusters `(..., G)`, by random signs."""
    observed = residuals.sum(-1).abs()
    sums = (_random_signs(residuals, seed, n_replicates) @ residuals.unsqueeze(-1)).squeeze(-1).abs()
    at_least = (sums >= observed.unsqueeze(-1) * (1 - 1e-9)).sum(-1)
    p_value = (1 + at_least).to(observed.dtype) / (n_replicates + 1)
    return p_value.masked_fill(observed.isnan(), torch.nan)


def design_effect(cells: BinCells | RunCells, table: Tensor) -> Tensor:
    """Return the variance of the mean gap from the residuals of clusters, divided by that of independent rows, `(...)`.

    1 if the variance of independent rows is 0.

    Args:
        cells: bins or runs `(..., K)`.
        table: weight and residual of every cluster in each cell, `(..., G, 2, K)`.
    """
    n, residual = table.unbind(-2)
    gap = cells.gap
    mean = (cells.outcomes - cells.expected).sum(-1, keepdim=True) / cells.n.sum(-1, keepdim=True)
    of_clusters = (residual.sum(-1) - n.sum(-1) * mean) * _jackknife_factor(n)
    variance = of_clusters.square().sum(-1)
    independent = cells.variance_of_outcomes(gap) + cells.unit * cells.n * (gap - mean).square()
    ratio = variance / independent.sum(-1)
    return torch.where(ratio.isfinite(), ratio, 1)


def t_quantile(table: Tensor, level: float) -> Tensor:
    """Return the quantile of the t-distribution `(...)` for the effective number of clusters, at most 1e6."""
    n = table[..., 0, :].sum(-1)
    effective = (n.sum(-1).square() / n.square().sum(-1)).nan_to_num(1)
    return t_critical((effective - 1).clamp(1, 1e6).double(), 1 - level).to(n.dtype)


def number_of_clusters(table: Tensor) -> Tensor:
    """Return the number of clusters with data, int64 `(...)`."""
    return (table[..., 0, :] > 0).any(-1).sum(-1)
