"""Confidence intervals for calibration errors over bins, in closed form.

An interval contains all expected errors that the observed error does not reject (a score interval). Each error is a
weighted sum over bins: of the gap (frequency minus mean confidence), its absolute value, or its square. Gaps are nearly
normal and independent, so that the sum has moments in closed form. A shifted gamma distribution (Pearson type III) with
its mean, variance and skewness approximates it. Half an outcome is subtracted from or added to the observed error
(continuity correction).

The hypothetical gaps are multiples t >= 0 of the observed ones. At t = 0 the model is calibrated. The variance of each
gap changes linearly from that of a calibrated model at t = 0 to the observed one at t = 1, and is constant for t > 1.
Noise hides small gaps. For the upper end each observed gap g is therefore replaced by sqrt(g^2 + v) with the same sign,
where v is its variance, and at least the square of the effect of one outcome.

Target: for ECE, ACE and RMSCE, the expected error over samples (confidences and outcomes) of this size. For ESCE, the
mean gap. For the debiased RMSCE, the error over the same bins without noise. The simulated noise floor is given the
confidences. The ends of ECE, ACE and RMSCE are moved outwards by its variation over samples of confidences: the
lower end if the model may be calibrated (t < 1), the upper end always. If fewer than 5 events, or fewer than 5 of their
complements, are expected, this variation cannot be estimated, and these errors have no interval. Predictions that are
all 0 or 1 are an exception, because their noise floor is 0.

`benchmarks.coverage` measures the coverage. An average over classes has no interval, because its variance depends on
the covariances of the classes, which the sums do not contain. Other errors have no interval either. The debiased ECE
has none, because its bias depends on the unknown gaps.

Reference:
    Wilson: Probable inference, the law of succession, and statistical inference (Journal of the American Statistical
    Association, 1927), for the inversion; Leone, Nelson, Nottingham: The folded normal distribution (Technometrics,
    1961), for the moments of absolute values; Wilson, Hilferty: The distribution of chi-square (PNAS, 1931), for the
    quantile; Sun et al.: A Confidence Interval for the l2 Expected Calibration Error (arXiv 2408.08998), for the
    variance of the squared error.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.inference.simulation import BinCells
from torchcalib.ops.bisection import bisect_each, bisect_in_parts
from torchcalib.ops.host_values import constant, once

IntervalKind = Literal["mean_gap", "absolute", "root_mean_square", "debiased"]
"""Sum over bins: of gaps, of their absolute values, or the root of that of squared gaps, with or without noise."""

Ends = tuple[Tensor, Tensor]

_LARGEST_MULTIPLE = 50.0  # of the observed gaps
_N_BISECTIONS = 28  # the last step changes a multiple by 2e-7


class GapMoments(NamedTuple):
    """Moments of a sum over bins, each `(...)`."""

    mean: Tensor
    variance: Tensor
    third: Tensor  # third central moment

    def quantile(self, z: Tensor) -> Tensor:
        """Return the approximate quantile (Wilson-Hilferty) of a shifted gamma distribution at normal `z`."""
        deviation = self.variance.sqrt()
        skewness = (self.third / deviation**3).nan_to_num(0, posinf=0, neginf=0)
        # 2 / s ((1 + s a)^3 - 1) with a = z / 6 - s / 36, expanded to avoid the division by s
        a = z / 6 - skewness / 36
        x = skewness * a
        return self.mean + deviation * 2 * a * (3 + 3 * x + x.square())

    @property
    def mean_of_root(self) -> Tensor:
        """Expected square root of a gamma variable with this mean and variance; the root of the mean without noise."""
        shape = (self.mean.square() / self.variance).nan_to_num(1e12, posinf=1e12).clamp(1e-6, 1e12)
        ratio = (torch.lgamma(shape + 0.5) - torch.lgamma(shape)).exp() / shape.sqrt()
        # The difference of large numbers is inexact; the series has an error below 1e-8.
        return self.mean.sqrt() * torch.where(shape > 1e3, 1 - 1 / (8 * shape), ratio)


def normal_quantile(level: float, like: Tensor) -> Tensor:
    """Return the quantile z of the normal distribution for two-sided intervals, a scalar of the dtype of `like`."""
    quantile: Tensor = torch.special.ndtri(constant((1 + level) / 2, like.dtype, like.device))
    return quantile


MIN_EXPECTED = 5.0
"""Least expected number of events, and of their complements, for the interval of ECE, ACE and RMSCE."""


class ErrorIntervals:
    """Intervals for expected errors over the bins `(g, K)`, at the `normal_quantile` `z` of their level."""

    def __init__(self, cells: BinCells, z: Tensor) -> None:
        self.cells, self.z = cells, z
        self.computed: dict[str, Any] = {}

    def ends(self, kind: IntervalKind, noise_floor: Tensor, error_of_floor: Tensor) -> Ends:
        """Return both ends, each `(g)`, for a kind of error.

        `noise_floor` and `error_of_floor` are the expected error of a calibrated model and its standard error.
        """
        gaps_low, gaps_high = self.mean_gap
        if kind == "mean_gap":
            return gaps_low, gaps_high
        search = self._of_absolute_gaps if kind == "absolute" else self._of_squared_gaps
        if kind == "debiased":
            gaps = self.cells.within_bounds(search.multiple.unsqueeze(-1) * search.directions)
            low, high = (self.cells.share * gaps.square()).sum(-1).sqrt()
        else:
            low, high = self._with_noise(search, noise_floor, error_of_floor)
        # Neither error is below the absolute mean gap. This matters if few or no outcomes differ from certain
        # predictions: the normal distribution then underestimates the gaps that remain possible.
        return low, high.maximum(gaps_high).maximum(-gaps_low)

    @once
    def mean_gap(self) -> Ends:
        """Both ends `(g)` of the interval for the mean gap, shifting all frequencies within [0, 1]."""
        cells, base = self.cells, self.cells.shrunk_gap
        # Variance of the mean gap because the shares of bins are random, without the part from noise of the gaps
        noise = (cells.share * cells.share_of_one * cells.variance_at(base)).sum(-1)
        between = (_variance_of_shares(cells, cells.gap) - noise).clamp(min=0)

        def moments(shift: Tensor) -> GapMoments:
            gaps = cells.within_bounds(base + shift.unsqueeze(-1))
            variance = cells.variance_at(gaps)
            return _sum_over_bins(cells, GapMoments(gaps, variance, _third_of_gap(cells, gaps, variance)), between)

        # Both ends are expected mean gaps at shifts that the observed one does not reject (inversion of the test).
        observed, half = (cells.share * cells.gap).sum(-1), _half_outcome(cells)
        limits = torch.stack((observed - half, observed + half))
        low, high = moments(_not_rejected(moments, limits, self.z, lower=-1.0, upper=1.0)).mean
        return low, high

    @once
    def _of_absolute_gaps(self) -> "_Search":
        return _Search(self.cells, self.z, is_absolute=True)

    @once
    def _of_squared_gaps(self) -> "_Search":
        return _Search(self.cells, self.z, is_absolute=False)

    def _with_noise(self, search: "_Search", noise_floor: Tensor, error_of_floor: Tensor) -> Ends:
        """Return both ends `(g)` for the mean absolute gap, or for the root of the mean square."""
        cells, multiple = self.cells, search.multiple
        # Expected errors at both multiples: the simulated noise floor, plus the increase in closed form from t = 0
        at_start = search.expected(search.moments(torch.zeros_like(multiple)))
        low, high = noise_floor + search.expected(search.moments(multiple)) - at_start
        # An under-confident model may have less noise than a calibrated one, and a smaller expected error.
        without_gaps = search.moments(torch.ones_like(multiple[0]), torch.zeros_like(cells.gap))
        floor_of_observed = noise_floor + search.expected(without_gaps) - at_start[0]
        low = torch.where(multiple[0] < 1e-6, low.minimum(floor_of_observed), low)
        # The noise floor is given the confidences of this sample, but the target is an expectation over confidences. It
        # varies more than the rest of the interval allows for, if the model is nearly calibrated.
        # The margin therefore widens the lower end for t < 1, and always the upper end.
        variance = _variance_of_floor(search.is_absolute, cells, noise_floor)
        margin = self.z * (variance + error_of_floor.square()).sqrt()
        low = low - margin * (1 - multiple[0]).clamp(min=0)
        high = noise_floor + torch.hypot((high - noise_floor).clamp(min=0), margin)
        n_events = torch.minimum(_in_outcomes(cells, cells.expected), _in_outcomes(cells, cells.n - cells.expected))
        few = (n_events < MIN_EXPECTED) & (cells.noise.sum(-1) > 0)  # the floor of certain predictions is always 0
        return low.clamp(min=0).masked_fill(few, torch.nan), high.clamp(max=1).masked_fill(few, torch.nan)


class _Search:
    """Multiples t of the observed gaps that the observed mean absolute gap, or mean square, does not reject."""

    def __init__(self, cells: BinCells, z: Tensor, is_absolute: bool) -> None:
        self.cells, self.is_absolute = cells, is_absolute
        # Variance of the gaps at t = 0 (calibrated) and at t = 1 (observed)
        self.calibrated, self.observed = cells.variance, cells.variance_at(cells.shrunk_gap)
        self.directions = _directions(cells, self.observed.maximum(cells.one_outcome.square()))
        half = _half_outcome(cells)
        if is_absolute:
            value = (cells.share * cells.gap.abs()).sum(-1)
            limits = torch.stack(((value - half).clamp(min=0), value + half))
        else:
            value = (cells.share * cells.gap.square()).sum(-1).sqrt()
            limits = torch.stack(((value - half).clamp(min=0), value + half)).square()
        self.multiple = _not_rejected(self.moments, limits, z, lower=0.0, upper=_LARGEST_MULTIPLE)

    def moments(self, multiple: Tensor, directions: Tensor | None = None) -> GapMoments:
        """Return the moments of the sum at both multiples t `(..., 2, g)` of the observed gaps, or of other gaps."""
        cells, t = self.cells, multiple.unsqueeze(-1)
        gaps = cells.within_bounds(t * (self.directions if directions is None else directions))
        variance = torch.lerp(self.calibrated, self.observed, t.clamp(max=1))
        # Gaps of certain predictions have one sign: their third moment is known, and marks them for `absolute`.
        third = torch.where(self.calibrated == 0, _third_of_gap(cells, gaps, variance), torch.nan)
        if self.is_absolute:
            return _sum_over_bins(cells, absolute(gaps, variance, third), _variance_of_shares(cells, gaps.abs()))
        each = squared(gaps, variance, third, variance * cells.one_outcome.square())
        return _sum_over_bins(cells, each, _variance_of_shares(cells, gaps.square()))

    def expected(self, moments: GapMoments) -> Tensor:
        return moments.mean if self.is_absolute else moments.mean_of_root


def _in_outcomes(cells: BinCells, weight: Tensor) -> Tensor:
    """Return the sum of weights `(..., K)` as a number of independent outcomes `(...)`."""
    return (weight / cells.unit.masked_fill(cells.unit == 0, 1)).sum(-1)


def _variance_of_floor(is_absolute: bool, cells: BinCells, noise_floor: Tensor) -> Tensor:
    """Return the variance `(g)` of the noise floor over samples of confidences, to first order.

    Let bin b have n_b rows and the sum S_b of p (1 - p). The floor of the mean absolute gap is proportional to the sum
    of sqrt(S_b). That of the mean square is the sum of S_b / n_b over non-empty bins, divided by the number of rows. A
    bin of n_b rows is empty in a sample of the same size with probability exp(-n_b).
    """
    rows = (1 / cells.one_outcome).masked_fill(cells.n == 0, 1)  # n_b, the effective number
    mean = cells.spread / cells.positive_n  # S_b / n_b
    # Delta method: Var p (1 - p) = Var p (1 - 2 p)^2, where Var p is the mean of p^2 minus the square of the mean
    of_confidence = ((cells.expected - cells.spread) / cells.positive_n - cells.confidence.square()).clamp(min=0)
    of_rows = of_confidence * (1 - 2 * cells.confidence).square()
    if is_absolute:
        # Part of bin b in the floor, proportional to sqrt(S_b), and its relative variance / (4 n_b)
        part = cells.share * cells.variance.sqrt()
        part = part * (noise_floor / part.sum(-1).clamp(min=1e-300)).unsqueeze(-1)
        relative = 1 + (of_rows / mean.square()).nan_to_num(0, posinf=0)
        own = (part.square() * relative / (4 * rows)).sum(-1)
        # minus the covariance of the shares of bins, which sum to 1
        return (own - part.sum(-1).square() / (4 * rows.masked_fill(cells.n == 0, 0).sum(-1))).clamp(min=0)
    empty = (-rows).exp()  # probability of an empty bin
    each = mean.square() * empty * (1 - empty) + of_rows / rows
    square = (cells.share_of_one.square() * each.masked_fill(cells.n == 0, 0)).sum(-1)
    # Delta method for the square root: Var sqrt(x) = Var x / (4 x)
    return (square / (4 * noise_floor.square())).nan_to_num(0, posinf=0)


def replicated_interval(
    kind: IntervalKind,
    cells: BinCells,
    noise_floor: Tensor,
    gaps: Tensor,
    shares: Tensor,
    level: float,
    factor: Tensor,
) -> Ends:
    """Return both ends `(g)` of the interval for an expected error, from replicates of the noise of dependent bins.

    The method is that of `ErrorIntervals`, with quantiles of the replicates instead of approximations. `gaps` and
    `shares` are replicates of the noise of the gaps and of the shares of the bins, each `(R, g, K)`. `factor` widens
    the noise for few clusters.
    """
    size_of: Callable[[Tensor], Tensor] = torch.abs if kind == "absolute" else torch.square
    noise, moved = (factor.unsqueeze(-1) * x for x in (gaps, shares))
    directions = _directions(cells, noise.square().mean(0).maximum(cells.variance_at(cells.shrunk_gap)))

    def sums(multiple: Tensor) -> Tensor:
        # Replicates of the observed sum at both multiples t, with noise of gaps and of shares: (R, 2, g)
        gap = cells.within_bounds(multiple.unsqueeze(-1) * directions)
        of_gaps = (cells.share * size_of(gap + noise.unsqueeze(1))).sum(-1)
        return of_gaps + (moved.unsqueeze(1) * size_of(gap)).sum(-1)

    def quantiles(multiple: Tensor) -> Tensor:
        found = sums(multiple).sort(0).values
        rank = min(len(found), math.ceil((len(found) + 1) * (1 + level) / 2 - 1e-9)) - 1
        return torch.stack((found[rank, 0], found[len(found) - 1 - rank, 1]))

    def expected(multiple: Tensor) -> Tensor:
        found = sums(multiple).clamp(min=0)
        return (found if kind == "absolute" else found.sqrt()).mean(0)

    observed = (cells.share * size_of(cells.gap)).sum(-1)
    start = torch.zeros_like(directions[..., 0])
    largest = torch.full_like(start, _LARGEST_MULTIPLE)
    multiple, _ = bisect_each(lambda t: quantiles(t) < observed, start, largest, _N_BISECTIONS)
    if kind == "debiased":
        ends = (cells.share * cells.within_bounds(multiple.unsqueeze(-1) * directions).square()).sum(-1).sqrt()
    else:
        ends = noise_floor + expected(multiple) - expected(start)
    return ends[0].clamp(min=0), ends[1].clamp(max=1)


def _directions(cells: BinCells, variance: Tensor) -> Tensor:
    """Return the gaps `(2, g, K)` whose multiples are tested for the lower and for the upper end.

    Those for the upper end are larger, because noise of this variance `(g, K)` hides small gaps.
    """
    sign = torch.where(cells.gap == 0, torch.where(cells.confidence > 0.5, -1.0, 1.0), cells.gap.sign())
    return torch.stack((cells.gap, sign * (cells.gap.square() + variance).sqrt()))


def _half_outcome(cells: BinCells) -> Tensor:
    """Return the continuity correction `(g)`: half of the mean effect of one outcome on the mean gap."""
    return (cells.share * cells.share_of_one).sum(-1) / 2


def _third_of_gap(cells: BinCells, gaps: Tensor, variance: Tensor) -> Tensor:
    """Return the third central moment of each gap `(..., K)`, that of a binomial frequency."""
    return variance * cells.one_outcome * (1 - 2 * (cells.confidence + gaps))


def _sum_over_bins(cells: BinCells, each: GapMoments, variance_of_shares: Tensor) -> GapMoments:
    """Return the moments of the sum over bins, weighted by the shares, from those of each bin `(..., K)`."""
    share = cells.share
    variance = (share.square() * each.variance).sum(-1) + variance_of_shares
    return GapMoments((share * each.mean).sum(-1), variance, (share**3 * each.third).sum(-1))


def _variance_of_shares(cells: BinCells, size: Tensor) -> Tensor:
    """Return the variance `(...)` of the mean of `size` `(..., K)` because the shares of bins are random."""
    mean = (cells.share * size).sum(-1, keepdim=True)
    return (cells.share * cells.share_of_one * (size - mean).square()).sum(-1)


def absolute(gap: Tensor, variance: Tensor, third: Tensor) -> GapMoments:
    """Return the moments of |gap| for each bin `(..., K)`, which is folded normal for a nearly normal gap.

    `third` is the third central moment of a gap of one sign; NaN for both signs.
    """
    # Raw moments of the folded normal distribution (Leone, Nelson and Nottingham 1961) for mean m and deviation s:
    # E|x| = s sqrt(2 / pi) exp(-m^2 / (2 s^2)) + m (2 Phi(m / s) - 1), E|x|^2 = m^2 + s^2, and E|x|^3 similarly
    deviation = variance.sqrt()
    ratio = torch.where(deviation > 0, gap / deviation, gap.sign() * torch.inf).nan_to_num(0, posinf=40, neginf=-40)
    density = math.sqrt(2 / math.pi) * (-ratio.square() / 2).exp()
    side = 2 * torch.special.ndtr(ratio) - 1
    first = deviation * density + gap * side
    second = gap.square() + variance
    folded = deviation**3 * density * (2 + ratio.square()) + gap * (gap.square() + 3 * variance) * side
    central = folded - 3 * first * second + 2 * first**3
    has_one_sign = third.isfinite()
    return GapMoments(
        torch.where(has_one_sign, gap.abs(), first),
        torch.where(has_one_sign, variance, (second - first.square()).clamp(min=0)),
        torch.where(has_one_sign, gap.sign() * third, central),
    )


def squared(gap: Tensor, variance: Tensor, third: Tensor, fourth: Tensor) -> GapMoments:
    """Return the moments of gap^2 for each bin `(..., K)`; see `absolute`.

    For a gap of one sign, `fourth` is the fourth cumulant of a count of rare outcomes.
    """
    # Noncentral chi-square for normal gaps: variance 4 m^2 v + 2 v^2, third central moment 24 m^2 v^2 + 8 v^3
    square = gap.square()
    spread = 4 * square * variance + 2 * variance.square()
    of_counts = 4 * gap * third + fourth  # the cumulants of a count that a normal distribution does not have
    central = 24 * square * variance.square() + 8 * variance**3
    return GapMoments(
        square + variance,
        spread + torch.where(third.isfinite(), of_counts, 0),
        central + torch.where(third.isfinite(), 8 * gap**3 * third, 0),
    )


def _not_rejected(
    moments: Callable[[Tensor], GapMoments], limits: Tensor, z: Tensor, lower: float, upper: float
) -> Tensor:
    """Return the smallest and the largest parameter that the observed sum does not reject, `(2, g)`.

    `limits` are the sum minus and plus the continuity correction, `(2, g)`. The sum is too large for a parameter if it
    exceeds the quantile at `z`, and too small if it is below that at -z. The search assumes that the quantiles increase
    with the parameter, which is between `lower` and `upper`.
    """
    quantiles = torch.stack((z, -z)).reshape(2, -1)  # for the lower and the upper end

    def is_below(parameter: Tensor) -> Tensor:
        upper_quantile, lower_quantile = moments(parameter).quantile(quantiles).unbind(-2)
        return torch.stack((upper_quantile < limits[0], lower_quantile <= limits[1]), -2)

    ends = torch.full_like(limits, lower), torch.full_like(limits, upper)
    return bisect_in_parts(is_below, *ends, _N_BISECTIONS)[0]
