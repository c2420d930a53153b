"""Tests of the mean gap and the slope of the gaps of groups, labels or slices, from their sums over bins.

A group has two statistics S = sum_k x_k D_k over its bins k, where D_k is the sum of outcomes minus confidences. With
x = 1, S is the mean gap. With the log-odds of the mean confidence as x, it is the slope of the gaps: the derivative of
the log-likelihood in the logarithm of 1 / T for a temperature T. With extreme confidences, S is far from normal in a
small group. The tests therefore use the signed root r* of its deviance, which is standard normal in the tails too.
"""

import math

import torch
from torch import Tensor

from torchcalib.core.sums import BinStats
from torchcalib.inference.simulation import BinCells
from torchcalib.ops.bisection import bisect_each

_MIN_VARIANCE = 3.0  # smallest variance of the number of independent outcomes in a group that is tested
_SMALLEST = 1e-4  # confidences are clipped to [1e-4, 1 - 1e-4] before their log-odds are computed
_NOT_SMALL = 1.0  # statistics below it, in standard errors, are never significant and stay unchanged
_MAX_SHIFT = 1e6  # largest exponent of the tilted distribution
_N_BISECTIONS = 64


def cells_of(bins: BinStats, effect: float | Tensor) -> BinCells:
    """Return the bins of groups or labels, with the noise of a design effect of at least 1, or of one for each."""
    return BinCells.from_bins(bins).with_noise_times((effect * bins.n.new_ones(len(bins.n))).clamp(min=1))


def clipped_log_odds(cells: BinCells) -> Tensor:
    """Return the log-odds of the mean confidence of each bin, clipped to [1e-4, 1 - 1e-4]."""
    return cells.confidence.clamp(_SMALLEST, 1 - _SMALLEST).logit()


def large_groups(cells: BinCells) -> Tensor:
    """Return whether the number of independent outcomes of a group has a variance of at least 3, `(..., G)`."""
    # The square of the spread, divided by the noise, does not depend on the unit of the weights.
    return cells.spread.sum(-1).square() >= _MIN_VARIANCE * cells.noise.sum(-1).clamp(min=1e-300)


def roots_of_gaps(cells: BinCells) -> Tensor:
    """Return the signed roots of mean gap and slope `(..., G, 2)` of groups with the bins `(..., G, K)`."""
    return _roots(cells, cells.outcomes - cells.expected, cells.confidence, cells.noise)


def scores_of_gaps(cells: BinCells) -> Tensor:
    """Return the score statistic of a bias and a slope of the log-odds together, `(..., G)`.

    It ranks a group or label among other causes. With few outcomes it is far from a chi-squared distribution, so
    p-values are those of the signed roots.
    """
    log_odds = clipped_log_odds(cells)
    design = torch.stack((torch.ones_like(log_odds), log_odds), -2)
    score = design @ (cells.outcomes - cells.expected).unsqueeze(-1)
    information = (design * cells.noise.unsqueeze(-2)) @ design.mT
    found: Tensor = score.mT @ torch.linalg.pinv(information, hermitian=True) @ score
    return found.flatten(-3)


def p_values_of_roots(roots: Tensor) -> Tensor:
    """Return the p-value of the larger root of each group `(G,)`, times the number of all roots (Bonferroni)."""
    p: Tensor = roots.numel() * torch.special.erfc(roots.abs().amax(-1) / math.sqrt(2))
    return p.clamp(max=1)


def roots_of_differences(cells: BinCells) -> Tensor:
    """Return the signed roots of the differences of each group from all groups, like `roots_of_gaps`."""
    total = cells.n.sum(-2, keepdim=True)
    gap = ((cells.outcomes - cells.expected).sum(-2, keepdim=True) / total).nan_to_num(0)  # of all groups in a bin
    share = (cells.n / total).nan_to_num(0)
    variance = cells.variance_of_outcomes(gap.expand_as(cells.n))
    # Variance of D_g minus the share of group g in the sum of all D, for independent D
    variance = variance * (1 - 2 * share) + share.square() * variance.sum(-2, keepdim=True)
    n_rows = (cells.n / cells.unit).sum(-2, keepdim=True)
    variance = variance * torch.where(n_rows > 1, n_rows / (n_rows - 1), 0)  # the gap of the bin is estimated
    deviation = cells.outcomes - cells.expected - cells.n * gap
    return _roots(cells, deviation, (cells.confidence + gap).clamp(0, 1), variance.clamp(min=0))


def _roots(cells: BinCells, deviation: Tensor, confidence: Tensor, variance: Tensor) -> Tensor:
    """Return the signed roots of mean gap and slope `(..., G, 2)` for deviations D `(..., G, K)`."""
    log_odds = clipped_log_odds(cells)
    weight = torch.stack((torch.ones_like(log_odds), log_odds), -2)
    return signed_roots(weight, *(x.unsqueeze(-2) for x in (deviation, confidence, variance, cells.unit)))


def signed_roots(weight: Tensor, deviation: Tensor, confidence: Tensor, variance: Tensor, unit: Tensor) -> Tensor:
    """Return the signed root r* of the deviance of sums S = sum_k x_k D_k, `(...)`.

    D_k is a sum of independent trials minus its mean. Each trial counts u_k and succeeds with probability p_k. Their
    number, N_k = V_k / (u_k^2 p_k (1 - p_k)), follows from the variance V_k of D_k. S has the cumulant generating
    function

        K(t) = sum_k N_k (log(1 - p_k + p_k exp(t h_k)) - t h_k p_k),   h_k = x_k u_k.

    With K'(t) = S, the deviance is r^2 = 2 (t S - K(t)), the likelihood-ratio statistic of the shift t x_k of all
    log-odds. r* = r + log(u / r) / r is standard normal with a small relative error in the tails, where
    u = 2 sinh(t d) sqrt(K''(t)) / (2 d) for values of S in steps of 2 d. S is moved towards 0 by half a step, so that
    tail probabilities include the observed value. Without equal steps, 1 / (2 d) is the mean of 1 / |h_k|, weighted by
    the variances.

    All arguments broadcast to `(..., K)`: the weights x, D, p, V and u.

    Reference:
        Barndorff-Nielsen: Inference on full or partial parameters based on the standardized signed log likelihood ratio
        (Biometrika, 1986), eq. 3.3; Daniels: Tail probability approximations (International Statistical Review, 1987),
        sec. 6, for values in steps.
    """
    terms = weight * deviation
    sums = terms.sum(-1)
    spread = (weight.square() * variance).sum(-1)
    z = (sums / spread.sqrt()).nan_to_num(0, posinf=0, neginf=0)
    tested = z.abs() >= _NOT_SMALL
    if not bool(tested.any()):
        return z
    step, p, v, u = (x.expand(terms.shape)[tested] for x in (weight * unit, confidence, variance, unit))
    s, sign = sums[tested].abs(), sums[tested].sign()
    step = step * sign.unsqueeze(-1)
    p = p.clamp(1e-12, 1 - 1e-12)
    n = (v / (u.square() * p * (1 - p))).nan_to_num(0, posinf=0)
    log_odds = p.logit()
    half = v.sum(-1) / (v / step.abs().clamp(min=1e-12)).sum(-1) / 2
    # The law of the trials of a bin, with equal p, has a slightly smaller range than the data.
    largest = (n * step * torch.where(step > 0, 1 - p, -p)).sum(-1)
    s = (s.minimum(largest) - half).clamp(min=0)

    def is_below(t: Tensor) -> Tensor:
        shift = t.unsqueeze(-1) * step
        return (n * step * ((log_odds + shift).sigmoid() - p)).sum(-1) < s

    limit = _MAX_SHIFT / step.abs().amax(-1)
    t = bisect_each(is_below, torch.zeros_like(s), limit, _N_BISECTIONS)[0]
    shift = t.unsqueeze(-1) * step
    cumulants = (n * (torch.logaddexp((-p).log1p(), p.log() + shift) - p * shift)).sum(-1)
    q = (log_odds + shift).sigmoid()
    curvature = (n * step.square() * q * (1 - q)).sum(-1)
    r = (2 * (t * s - cumulants)).clamp(min=0).sqrt()
    # log(2 sinh(t d) / (2 d)), without overflow
    log_u = t * half + torch.log(-torch.expm1(-2 * t * half) / (2 * half)) + curvature.log() / 2
    corrected = (r + (log_u - r.log()) / r).clamp(min=0)
    # Near 0 the quotient is undefined. The curvature is 0 if the variance is.
    found = torch.where((r > 0.3) & corrected.isfinite(), corrected, r)
    return z.masked_scatter(tested, sign * found)
