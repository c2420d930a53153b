"""Confidence intervals for calibration errors over bins, in closed form.

An interval contains all expected errors that the observed error does not reject (a score interval). Each error is a
weighted sum over bins: of the gap (frequency minus mean confidence), its absolute value, or its square. Gaps are nearly
normal and independent. The mean, variance and skewness of the sum therefore have closed forms, and a gamma distribution
with these moments approximates its distribution.

The hypothetical gaps are multiples t >= 0 of the observed ones. At t = 0 the model is calibrated. The variance of each
gap changes linearly from that of a calibrated model at t = 0 to the observed one at t = 1. Noise hides small gaps, so
for the upper end each observed gap g with variance v is replaced by sqrt(g^2 + v), with the same sign.

`benchmarks.coverage` measures the coverage. An average over classes has no interval, because its variance depends on
the covariances of the classes, which the sums do not contain. Neither has an error without a closed form.

Reference:
    Wilson: Probable inference, the law of succession, and statistical inference (Journal of the American Statistical
    Association, 1927), for the inversion; Leone, Nelson, Nottingham: The folded normal distribution (Technometrics,
    1961), for the moments of absolute values; Wilson, Hilferty: The distribution of chi-square (PNAS, 1931), for the
    quantile; Sun et al.: A Confidence Interval for the l2 Expected Calibration Error (arXiv 2408.08998), for the
    variance of the squared error.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.inference.simulation import BinCells

IntervalKind = Literal["mean_gap", "absolute", "squared", "debiased"]
"""Sum over bins for which an interval is computed: of gaps, of their absolute values, or the root of squared gaps.

"debiased" is the root of the sum of squared gaps without noise.
"""

Ends = tuple[Tensor, Tensor]

_LARGEST_MULTIPLE = 50.0  # of the observed gaps
_N_BISECTIONS = 32


class Moments(NamedTuple):
    """Mean, variance and third central moment of a sum over bins, each `(...)`."""

    mean: Tensor
    variance: Tensor
    third: Tensor

    def quantile(self, z: Tensor) -> Tensor:
        """Return the quantile of a gamma distribution with these moments at the level of the normal quantile `z`."""
        deviation = self.variance.sqrt()
        skewness = (self.third / deviation**3).nan_to_num(0, posinf=0, neginf=0)
        skewness = torch.where(skewness.abs() < 1e-6, 1e-6, skewness)
        standardised = 2 / skewness * ((1 + skewness * z / 6 - skewness.square() / 36) ** 3 - 1)
        return self.mean + deviation * standardised

    @property
    def mean_of_root(self) -> Tensor:
        """Expected square root of a gamma variable with this mean and variance; the root of the mean without noise."""
        shape = (self.mean.square() / self.variance).nan_to_num(1e12, posinf=1e12).clamp(1e-6, 1e12)
        ratio = (torch.lgamma(shape + 0.5) - torch.lgamma(shape)).exp() / shape.sqrt()
        return self.mean.sqrt() * torch.where(shape > 1e6, 1.0, ratio)  # the difference of large numbers is inexact


def error_interval(kind: IntervalKind, cells: BinCells, noise_floor: Tensor, level: float) -> Ends:
    """Return both ends, each `(g)`, of the interval for an expected error, given the confidences.

    Args:
        kind: formula of the error.
        cells: bins `(g, K)`.
        noise_floor: expected error of a calibrated model `(g)`. Differences from it are computed in closed form.
        level: level of the interval, in (0, 1).
    """
    z = torch.special.ndtri(torch.tensor((1 + level) / 2, dtype=cells.n.dtype, device=cells.n.device))
    gaps_low, gaps_high = _mean_gap_ends(cells, z)
    if kind == "mean_gap":
        return gaps_low, gaps_high
    low, high = _error_ends(kind, cells, noise_floor, z)
    # Neither error is below the absolute mean gap. This matters if few or no outcomes differ from certain predictions:
    # the normal distribution then underestimates the gaps that remain possible.
    return low, high.maximum(gaps_high).maximum(-gaps_low)


def _mean_gap_ends(cells: BinCells, z: Tensor) -> Ends:
    """Return both ends `(g)` for the mean gap. All frequencies are shifted by the same amount, within [0, 1]."""
    observed = (cells.share * cells.gap).sum(-1)
    base = cells.shrunk_gap
    between = _variance_of_shares(cells, cells.gap)
    # The observed gaps also vary between bins because of their noise.
    of_noise = (cells.share * cells.share_of_one * cells.variance_at(base)).sum(-1)
    between = (between - of_noise).clamp(min=0)

    def moments(shift: Tensor) -> Moments:
        gaps = cells.within_bounds(base + shift.unsqueeze(-1))
        variance = cells.variance_at(gaps)
        skew = variance * cells.one_outcome * (1 - 2 * (cells.confidence + gaps))
        return Moments(
            (cells.share * gaps).sum(-1),
            (cells.share.square() * variance).sum(-1) + between,
            (cells.share**3 * skew).sum(-1),
        )

    low, high = moments(_bisected(moments, observed, z, lower=-1.0, upper=1.0)).mean
    return low.minimum(observed), high.maximum(observed)


def _error_ends(kind: IntervalKind, cells: BinCells, noise_floor: Tensor, z: Tensor) -> Ends:
    """Return both ends `(g)` for the mean absolute gap, or for the root of the mean square; see `error_interval`."""
    of_sum = absolute if kind == "absolute" else squared
    calibrated, observed = cells.variance, cells.variance_at(cells.shrunk_gap)
    away = torch.where(cells.gap == 0, torch.where(cells.confidence > 0.5, -1.0, 1.0), cells.gap.sign())
    upwards = away * (cells.gap.square() + observed.maximum(cells.one_outcome.square())).sqrt()
    directions = torch.stack((cells.gap, upwards))

    def gaps_at(multiple: Tensor) -> Tensor:
        return cells.within_bounds(multiple.unsqueeze(-1) * directions)

    def moments(multiple: Tensor) -> Moments:
        gaps = gaps_at(multiple)
        variance = torch.lerp(calibrated, observed, multiple.clamp(max=1).unsqueeze(-1))
        mean, spread, third = of_sum(gaps, variance, cells.share)
        size = gaps.abs() if kind == "absolute" else gaps.square()
        return Moments(mean, spread + _variance_of_shares(cells, size), third)

    def expected(found: Moments) -> Tensor:
        return found.mean if kind == "absolute" else found.mean_of_root

    size = cells.gap.abs() if kind == "absolute" else cells.gap.square()
    total = (cells.share * size).sum(-1)
    multiple = _bisected(moments, total, z, lower=0.0, upper=_LARGEST_MULTIPLE)
    if kind == "debiased":
        low, high = (cells.share * gaps_at(multiple).square()).sum(-1).sqrt()
        return low, high
    at_start = expected(moments(torch.zeros_like(multiple)))
    low, high = noise_floor + expected(moments(multiple)) - at_start
    # An under-confident model may have less noise than a calibrated one, and a smaller expected error.
    quiet = noise_floor + expected(of_sum(torch.zeros_like(cells.gap), observed, cells.share)) - at_start[0]
    value = total if kind == "absolute" else total.sqrt()
    low = torch.where(multiple[0] < 1e-6, low.minimum(quiet), low)
    return low.minimum(value).clamp(min=0), high.maximum(value).clamp(max=1)


def _variance_of_shares(cells: BinCells, size: Tensor) -> Tensor:
    """Return the variance `(...)` of the mean of `size` `(..., K)` because the shares of bins are random."""
    mean = (cells.share * size).sum(-1, keepdim=True)
    return (cells.share * cells.share_of_one * (size - mean).square()).sum(-1)


def absolute(gaps: Tensor, variance: Tensor, share: Tensor) -> Moments:
    """Return the moments of the sum of share |gap| for normal gaps (folded normal distribution)."""
    deviation = variance.sqrt()
    ratio = torch.where(deviation > 0, gaps / deviation, gaps.sign() * torch.inf).nan_to_num(0, posinf=40, neginf=-40)
    density = math.sqrt(2 / math.pi) * (-ratio.square() / 2).exp()
    side = 2 * torch.special.ndtr(ratio) - 1
    first = deviation * density + gaps * side
    second = gaps.square() + variance
    third = deviation**3 * density * (2 + ratio.square()) + gaps * (gaps.square() + 3 * variance) * side
    central = third - 3 * first * second + 2 * first**3
    spread = (second - first.square()).clamp(min=0)
    return Moments((share * first).sum(-1), (share.square() * spread).sum(-1), (share**3 * central).sum(-1))


def squared(gaps: Tensor, variance: Tensor, share: Tensor) -> Moments:
    """Return the moments of the sum of share gap^2 for normal gaps (noncentral chi-square distribution)."""
    square = gaps.square()
    spread = 4 * square * variance + 2 * variance.square()
    third = 24 * square * variance.square() + 8 * variance**3
    return Moments((share * (square + variance)).sum(-1), (share.square() * spread).sum(-1), (share**3 * third).sum(-1))


def _bisected(moments: Callable[[Tensor], Moments], observed: Tensor, z: Tensor, lower: float, upper: float) -> Tensor:
    """Return the smallest and the largest parameter that the observed sum does not reject, `(2, g)`.

    The sum is too large for a parameter if it exceeds the quantile at `z`, and too small if it is below that at -z. The
    quantiles increase with the parameter, which is between `lower` and `upper`.
    """
    low, high = torch.full_like(observed, lower).expand(2, -1), torch.full_like(observed, upper).expand(2, -1)
    for _ in range(_N_BISECTIONS):
        middle = (low + high) / 2
        found = moments(middle)
        is_below = torch.stack((found.quantile(z)[0] < observed, found.quantile(-z)[1] <= observed))
        low, high = torch.where(is_below, middle, low), torch.where(is_below, high, middle)
    return low
