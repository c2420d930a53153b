"""Several tests or estimates at once: p-values adjusted for their number, and estimates shrunk to their mean."""

from collections.abc import Iterable

import torch
from torch import Tensor


def holm(p_values: Tensor) -> Tensor:
    """Adjust p-values `(m,)` for multiple testing by the method of Holm (family-wise error rate); NaN stays NaN.

    For ascending p_1, ..., p_m, the adjusted p_k is min(1, max_{j <= k} (m - j + 1) p_j).

    Reference:
        Holm: A simple sequentially rejective multiple test procedure (Scandinavian Journal of Statistics, 1979),
        sec. 3.
    """
    m = int(p_values.isfinite().sum())
    order = p_values.argsort()[:m]  # NaN is last
    scaled = p_values[order] * torch.arange(m, 0, -1, dtype=p_values.dtype, device=p_values.device)
    return torch.full_like(p_values, torch.nan).index_copy(0, order, scaled.cummax(0).values.clamp(max=1))


def benjamini_hochberg(p_values: Tensor) -> Tensor:
    """Adjust p-values `(m,)` for multiple testing by the Benjamini-Hochberg method (false discovery rate).

    For ascending p-values p_1, ..., p_m, the adjusted value of p_k is the minimum of 1 and p_j m / j over j >= k.

    Reference:
        Benjamini, Hochberg: Controlling the false discovery rate (Journal of the Royal Statistical Society B, 1995),
        sec. 3.1.
    """
    m = len(p_values)
    ascending, order = p_values.sort()
    scaled = ascending * m / torch.arange(1, m + 1, dtype=ascending.dtype, device=ascending.device)
    adjusted = scaled.flip(0).cummin(0).values.flip(0).clamp(max=1) if m else scaled
    return torch.empty_like(p_values).index_copy(0, order, adjusted)


def step_down(observed: Tensor, replicates: Iterable[Tensor]) -> tuple[Tensor, float]:
    """Return p-values `(S,)` of S statistics, adjusted for all of them, and the 95% quantile of the largest one.

    `observed` are the statistics `(S,)`, and `replicates` those under the null hypothesis, in pieces `(r, S)`. The k-th
    largest statistic is compared with the largest replicate of those that are not larger.

    Reference:
        Westfall, Young: Resampling-based multiple testing (Wiley 1993), algorithms 2.8 and 4.1: step-down max-T. The
        null distribution of true hypotheses must not depend on the others (subset pivotality, sec. 2.2), such as that
        all rows of a slice are calibrated.
    """
    order = observed.argsort(descending=True, stable=True)
    exceeding, greatest = torch.zeros_like(observed), []
    for some in replicates:
        # Largest statistic of this hypothesis and of those below it
        successive = some[:, order].flip(-1).cummax(-1).values.flip(-1)
        exceeding += (successive >= observed[order] - 1e-9).sum(0)
        greatest.append(successive[:, 0])
    largest = torch.cat(greatest)
    p_values = ((1 + exceeding) / (len(largest) + 1)).cummax(0).values
    return torch.empty_like(p_values).index_copy(0, order, p_values), float(largest.quantile(0.95))


def shrunk_to_mean(estimates: Tensor, spread: Tensor) -> Tensor:
    """Shrink estimates for groups `(G,)` towards their common mean (empirical Bayes).

    The true errors of the groups are assumed to be normal with a common mean and variance tau^2. Each estimate is
    assumed to be normal around the true error with standard deviation `spread`. The posterior mean for group g is

        mean + tau^2 / (tau^2 + spread_g^2) (estimate_g - mean),

    with tau^2 >= 0 by the method of moments, and weights 1 / (tau^2 + spread_g^2) in the mean. An estimate with spread
    0 is practically unchanged. NaN where the spread is NaN. Fewer than two finite estimates are returned unchanged.

    Reference:
        Efron, Morris: Data analysis using Stein's estimator (Journal of the American Statistical Association, 1975),
        sec. 2, for the rule; DerSimonian, Laird: Meta-analysis in clinical trials (Controlled Clinical Trials, 1986),
        eq. 8, for tau^2.
    """
    known = estimates.isfinite() & spread.isfinite()
    if int(known.sum()) < 2:
        return estimates
    x, variance = estimates[known], spread[known].square()
    least = variance[variance > 0].min() if bool((variance > 0).any()) else torch.ones_like(variance[0])
    w = 1 / variance.clamp(min=1e-6 * float(least))  # the clamp prevents an infinite weight for spread 0
    mean = (w * x).sum() / w.sum()
    surplus = (w * (x - mean).square()).sum() - (len(x) - 1)
    tau_square = (surplus / (w.sum() - w.square().sum() / w.sum())).clamp(min=0)
    weight = 1 / (tau_square + 1 / w)
    mean = (weight * x).sum() / weight.sum()
    shrunk = mean + tau_square * weight * (x - mean)
    return torch.full_like(estimates, torch.nan).masked_scatter(known, shrunk)
