"""Calibration tests and intervals for clusters of dependent rows, such as the pixels of an image.

Only clusters are independent. Outcomes in the same cluster may depend on each other in any way.

P-value: under perfect calibration the residual of a cluster (outcomes minus confidences) has mean 0. The residuals of
all clusters are multiplied by random signs, one for each cluster, and the error is recomputed (wild bootstrap with
Rademacher weights). This is exact for symmetric residuals, and an approximation for many clusters. Residuals of rare
outcomes are asymmetric: if none occurred, all have the same sign. Therefore the p-value is the larger one of this test
and of the test for independent rows. It is still too small if rare outcomes occur in few clusters only.

Noise floor: the larger one of that of independent rows, and the mean over random signs for residuals after subtracting
the mean gap of 15 ranges of scores (fewer for less than 150 clusters), with the CR2 correction; see `ClusteredMean`.

Interval of a mean gap: noise is multiplied by the design effect (the CR2 variance of the mean gap divided by that of
independent rows) if it is above 1, and the normal quantile is replaced by that of a t-distribution with Satterthwaite
degrees of freedom. The interval of another error contains that of independent rows and that of `replicated_interval`,
whose noise is widened by the same quantile.

`benchmarks.clusters` measures the coverage of the intervals and the validity of the p-values. P-values can be too small
if the effective number of clusters is small, and outcomes are rare or equal in each cluster. Signs of residuals with
the CR2 correction do not prevent it, because the residuals are skewed. Reports therefore have a note for an effective
number below 100.

Reference:
    Cameron, Gelbach, Miller: Bootstrap-based improvements for inference with clustered errors (Review of Economics and
    Statistics, 2008), for random signs; Kish: Survey Sampling (1965), ch. 5.4, for the design effect; `ClusteredMean`
    for the effective number of clusters and the corrections for small samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.clusters import effective_number
from torchcalib.inference.resampling import Weights
from torchcalib.inference.simulation import GAPS_AT_ONCE, BinCells, RunCells
from torchcalib.ops.segments import cell_sums
from torchcalib.special.binomial import t_critical

FEW_CLUSTERS = 200
"""Effective number of clusters below which p-values can be too small; see `benchmarks.clusters`."""

_AT_ONCE = 2**22  # gaps of replicates in memory
_LEAST = 1e-9  # least value of 1 - h: a single cluster has residual 0
_LARGEST_LEVERAGE = 0.5  # in a range of scores, where the residuals of cells are not 0 even for a single cluster
_N_BLOCKS = 15  # largest number of ranges of scores in which the mean gap is subtracted for the noise floor


class SignFlips:
    """Replicates of the gaps in K cells, in which the residual of each of G clusters has a random sign.

    `table` is the result of `Partition.residuals`.
    """

    def __init__(self, cells: BinCells | RunCells, table: Tensor, seed: int, n_replicates: int) -> None:
        self.cells = cells
        self.table = table
        n, self._residual = table.unbind(-2)  # n_gk and e_gk of cluster g in cell k, (..., G, K)
        # Ranges b of scores: their mean gaps m_b = sum_k e_k / n_b, and the leverage h_gb = n_gb / n_b of each cluster
        block, n_blocks = _blocks(cells, min(_N_BLOCKS, n.shape[-2] // 10))
        sums = cell_sums(block, torch.stack((cells.n, cells.outcomes - cells.expected), -2), n_blocks)
        weight, residual = sums.unbind(-2)
        weight = weight.masked_fill(weight == 0, 1)
        gap = (residual / weight).gather(-1, block).unsqueeze(-2)
        leverage = cell_sums(block, n, n_blocks) / weight.unsqueeze(-2)
        factor = _cr2_factor(leverage.clamp(max=_LARGEST_LEVERAGE)).gather(-1, block.unsqueeze(-2).expand(n.shape))
        # Centred residuals (e_gk - n_gk m_b) / sqrt(1 - h_gb), whose sign flips have the variance of the data
        self._centred = (self._residual - n * gap) * factor
        self._signs = random_signs(n[..., 0], seed, n_replicates)

    def noise(self) -> tuple[Tensor, Tensor]:
        """Return replicates of the noise of the gaps, and of the share of each cell, each `(R, ..., K)`."""
        n = self.table[..., 0, :]
        total = n.sum((-1, -2)).clamp(min=1e-300)
        size = n.sum(-1, keepdim=True)  # of each cluster
        # A cluster changes the share of cell k by (n_gk - n_g n_k / N) / N.
        shares = n - size * (self.cells.n / total.unsqueeze(-1)).unsqueeze(-2)
        shares = shares * _cr2_factor((size / total[..., None, None]).clamp(max=_LARGEST_LEVERAGE))
        gaps = (self._signs @ self._centred).movedim(-2, 0) / self.cells.positive_n
        return gaps, (self._signs @ shares).movedim(-2, 0) / total.unsqueeze(-1)

    def statistics(self, *, centred: bool = False) -> Iterator[Any]:
        """Yield the statistic of a part of the replicates `(r, ...)`.

        `centred` first subtracts the mean gap of up to 15 ranges of scores, and multiplies residuals by the CR2 factor.
        """
        residual = self._centred if centred else self._residual
        for signs in torch.split(self._signs, max(1, _AT_ONCE // max(1, self.cells.n.numel()))):
            # The gap of cell k is sum_g s_g e_gk / n_k for random signs s_g.
            gaps = (signs @ residual).movedim(-2, 0) / self.cells.positive_n
            for some in torch.split(gaps, max(1, GAPS_AT_ONCE // max(1, self.cells.n.numel()))):
                yield self.cells.with_gaps(some)


def _blocks(cells: BinCells | RunCells, n_blocks: int) -> tuple[Tensor, int]:
    """Return the block of each cell `(..., K)`, and the number of blocks: ranges of scores with similar weights."""
    n, total, n_blocks = cells.n, cells.n.sum(-1, keepdim=True), max(1, n_blocks)
    # Divide [0, 1] into equal parts. Cell k is in the part of (N_k - n_k / 2) / N, the middle of its weights.
    block = ((n.cumsum(-1) - n / 2) / total * n_blocks).nan_to_num(0).long()
    return block.clamp(0, n_blocks - 1), n_blocks


def _cr2_factor(leverage: Tensor) -> Tensor:
    """Return the factor 1 / sqrt(1 - h) of the residuals of each cluster, for its leverage h; see `ClusteredMean`."""
    return (1 - leverage.nan_to_num(0)).clamp(min=_LEAST).rsqrt()


def random_signs(like: Tensor, seed: int, n_replicates: int) -> Tensor:
    """Return random signs -1 and 1, `(R, G)`, for G clusters on the last axis of `like`."""
    clusters = torch.arange(like.shape[-1], device=like.device)
    return Weights(seed, clusters, "sign").in_replicates(torch.arange(n_replicates, device=like.device), like.dtype)


def sign_p_value(residuals: Tensor, seed: int, n_replicates: int) -> Tensor:
    """Return the p-value `(...)` of the absolute sum of the residuals of G clusters `(..., G)`, by random signs."""
    observed = residuals.sum(-1).abs()
    sums = (random_signs(residuals, seed, n_replicates) @ residuals.unsqueeze(-1)).squeeze(-1).abs()
    at_least = (sums >= observed.unsqueeze(-1) * (1 - 1e-9)).sum(-1)  # equal sums may differ by rounding
    p_value = (1 + at_least).to(observed.dtype) / (n_replicates + 1)
    return p_value.masked_fill(observed.isnan(), torch.nan)


@dataclass(frozen=True, eq=False)
class ClusteredMean:
    """Variance of the mean of rows in G clusters, with small-sample corrections (CR2).

    The mean m is the coefficient of a regression on a constant. Let cluster g have n_g of N rows, with the sum of
    residuals e_g, which are values minus m. The leverage of the cluster is h_g = n_g / N.

    CR2 [BM, PT: bias-reduced linearisation] multiplies the residuals of a cluster by A_g = (I - H_gg)^(-1/2), where
    H_gg = 1 1' / N is its block of the hat matrix. The vector of ones is an eigenvector of H_gg with eigenvalue h_g.
    Therefore 1' A_g = (1 - h_g)^(-1/2) 1', and the variance of N m is V = sum_g e_g^2 / (1 - h_g). It is unbiased if
    rows are independent with equal variance.

    Degrees of freedom [BM, PT: Satterthwaite's approximation]: V is a quadratic form sum_g (p_g' y)^2 in the values y,
    with p_g = (I - H)_g' A_g 1 = a_g (1_g - h_g 1). Here a_g = (1 - h_g)^(-1/2), and 1_g is 1 in the rows of cluster g.
    For a block-diagonal covariance with the variance v_g of the sum of each cluster, and S = sum_g v_g,

        P_gk = p_g' Cov(y) p_k = a_g a_k (v_g [g = k] - h_g v_k - h_k v_g + h_g h_k S),

    and the degrees of freedom are (sum_g P_gg)^2 / sum_gk P_gk^2 (Satterthwaite).

    Effective number of clusters [CSS]: G* = G / (1 + Gamma), where Gamma is the squared coefficient of
    variation of gamma_g = v_g / N^2. This is (sum_g v_g)^2 / sum_g v_g^2.

    Working model: rows of a cluster have equal variance and correlation rho, so that v_g is proportional to
    n_g (1 + rho (n_g - 1)). [CSS] propose rho = 1 as the worst case. Here rho is the moment estimate: the value in
    [0, 1] for which V has the expected value sum_g v_g.

    Reference:
        [BM] Bell, McCaffrey: Bias reduction in standard errors for linear regression with multi-stage samples (Survey
        Methodology, 2002); [PT] Pustejovsky, Tipton: Small-sample methods for cluster-robust variance estimation and
        hypothesis testing in fixed effects models (Journal of Business & Economic Statistics, 2018); [CSS] Carter,
        Schnepel, Steigerwald: Asymptotic behavior of a t-test robust to cluster heterogeneity (Review of Economics and
        Statistics, 2017).
    """

    n: Tensor  # weight n_g of each cluster (..., G)
    residual: Tensor  # sum e_g of the residuals of each cluster (..., G): values minus the mean of all rows
    independent: Tensor  # variance of N m if all rows are independent (...)
    unit: Tensor  # weight of one row (...)

    @classmethod
    def of_gaps(cls, cells: BinCells | RunCells, table: Tensor) -> "ClusteredMean":
        """Return the mean gap (outcomes minus confidences) of cells `(..., K)`, from the `residuals` of a partition."""
        n, residual = table.sum(-1).unbind(-1)
        total = cells.n.sum(-1, keepdim=True)
        mean = (cells.outcomes - cells.expected).sum(-1, keepdim=True) / total
        # Variance in the cells, plus that of the mean gaps between the cells
        independent = cells.variance_of_outcomes(cells.gap) + cells.unit * cells.n * (cells.gap - mean).square()
        unit = (cells.unit * cells.n).sum(-1) / total.squeeze(-1)
        return cls(n, residual - n * mean, independent.sum(-1), unit)

    @property
    def leverage(self) -> Tensor:
        """Leverage h_g = n_g / N, the share of each cluster in the weight of all rows, `(..., G)`; 0 without data."""
        return (self.n / self.n.sum(-1, keepdim=True)).nan_to_num(0)

    @property
    def variance(self) -> Tensor:
        """CR2 variance V of N m, `(...)`."""
        return (self.residual * _cr2_factor(self.leverage)).square().sum(-1)

    @property
    def design_effect(self) -> Tensor:
        """Variance divided by that of independent rows `(...)`; 1 if the latter is 0."""
        ratio = self.variance / self.independent
        return torch.where(ratio.isfinite(), ratio, 1)

    @property
    def correlation(self) -> Tensor:
        """Moment estimate of the correlation of two rows of the same cluster `(...)`, in [0, 1]."""
        # For rows of weight u, sum_g v_g is proportional to 1 + rho (sum_g n_g^2 / (N u) - 1). Equate it with V.
        pairs = self.n.square().sum(-1) / (self.n.sum(-1) * self.unit) - 1
        return ((self.design_effect - 1) / pairs).nan_to_num(0, posinf=0, neginf=0).clamp(0, 1)

    @property
    def variance_of_clusters(self) -> Tensor:
        """Variance v_g of the sum of each cluster in the working model `(..., G)`, up to a common factor."""
        unit = self.unit.unsqueeze(-1)
        return self.n * (unit + self.correlation.unsqueeze(-1) * (self.n - unit).clamp(min=0))

    @property
    def effective_number(self) -> Tensor:
        """Effective number of clusters `(...)`, in [1, G]; NaN without data."""
        return effective_number(self.variance_of_clusters.movedim(-1, 0))

    @property
    def degrees_of_freedom(self) -> Tensor:
        """Satterthwaite degrees of freedom of the variance `(...)`, at least 1."""
        v, h = self.variance_of_clusters, self.leverage
        a = _cr2_factor(h)
        # P = diag(d) - u w' - w u' + S w w' with d_g = a_g^2 v_g, u_g = a_g v_g and w_g = a_g h_g. The trace and the
        # sum of squares of P then need only sums over clusters, without a matrix (G, G).
        u, w, d, s = a * v, a * h, a.square() * v, v.sum(-1)
        uw, ww = (u * w).sum(-1), w.square().sum(-1)
        low_rank = s.unsqueeze(-1) * w.square() - 2 * u * w  # the diagonal of the terms other than diag(d)
        trace = (d + low_rank).sum(-1)
        # sum of squares: |diag(d)|^2, twice its product with the rest, then the squared norm of the rest
        square = (d.square() + 2 * d * low_rank).sum(-1) + 2 * (u.square().sum(-1) * ww + uw.square())
        square = square + s.square() * ww.square() - 4 * s * uw * ww
        return (trace.square() / square).nan_to_num(1, posinf=1).clamp(min=1)

    def t_quantile(self, level: float) -> Tensor:
        """Return the two-sided quantile `(...)` of the t-distribution with these degrees of freedom."""
        return t_critical(self.degrees_of_freedom.double(), 1 - level).to(self.n.dtype)


def number_of_clusters(table: Tensor) -> Tensor:
    """Return the number of clusters with data, int64 `(...)`."""
    return (table[..., 0, :] > 0).any(-1).sum(-1)
