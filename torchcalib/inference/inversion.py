"""Confidence intervals for calibration errors, by inversion of a calibration test.

The interval contains the errors that the test does not reject. Samples are summed in cells: bins, or runs of scores.
The gap of a cell is its frequency minus its mean confidence. A path consists of increasing multiples of fixed gaps, one
per cell, and starts at perfect calibration. At each step outcomes are simulated with these gaps, and the observed error
is compared with the simulated errors. The interval ends where the test starts to reject.

Reference:
    Feldman, Cousins: Unified approach to the classical statistical analysis of small signals (Physical Review D, 1998),
    for the transition from a one-sided to a two-sided test.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.inference.simulation import BinCells, RunCells, Simulation
from torchcalib.ops.count_moments import count_quantiles
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.isotonic import isotonic_regression

N_STEPS = 32
"""Number of steps of a path; a power of two, as `bisected` requires."""

_MEAN_GAP_STEPS = 24
_MAX_NOISE = 1.5  # largest gap that noise may explain, in standard deviations
_N_GROUPS = 15  # number of groups of neighbouring runs; all runs of a group have equal hypothetical gaps

Cells = BinCells | RunCells
Metric = Callable[[Any], Tensor]
Ends = tuple[Tensor, Tensor]


def error_interval(
    test_formula: Metric,
    noise_free_error: Metric | None,
    simulations: Sequence[Simulation],
    observed: Tensor,
    calibrated: Tensor,
    is_rejected: Tensor,
    level: float,
) -> Ends:
    """Return both ends, each `(g)`, of the interval for an unsigned error, averaged over C classes.

    Args:
        test_formula: function that computes the test statistic.
        noise_free_error: function that computes the error from frequencies; None: see `ErrorTest`.
        simulations: one simulation per batch of c consecutive classes, with K bins or runs each.
        observed: test statistic of the data `(g, C)`.
        calibrated: test statistic of the replicates under perfect calibration `(R, g, C)`.
        is_rejected: whether the p-value rejects calibration, bool `(g)`. Where it does not, the lower end is 0, or the
            noise floor if `noise_free_error` is None.
        level: level of the interval, in (0, 1).
    """
    wide = widening(observed.shape[-1])
    sizes = [simulation.cells.n.shape[-2] for simulation in simulations]
    typical = torch.split(observed + calibrated.mean(0), sizes, -1)
    paths = [
        _paths(test_formula, noise_free_error, s.cells, size) for s, size in zip(simulations, typical, strict=True)
    ]
    observed, calibrated = observed.mean(-1), _widened(calibrated.mean(-1), wide)
    edge = _edge(calibrated, level)
    start = calibrated.mean(0) if noise_free_error is None else 0 * observed

    def along(path: Sequence[Tensor], step: Tensor) -> tuple[Ends, Tensor]:
        """Return the margins of `acceptance` and the hypothetical error, each `(g)`, at steps `(g)` of a path."""
        size = multiple_at(step)[:, None, None]
        simulated, errors = [], []
        for simulation, direction in zip(simulations, path, strict=True):
            gaps = simulation.cells.within_bounds(size * direction)
            simulated.append(simulation.compute(test_formula, gaps))
            if noise_free_error is not None:
                errors.append(noise_free_error(simulation.cells.with_gaps(gaps)))
        mean = torch.cat(simulated, -1).mean(-1)
        error = torch.cat(errors, -1).mean(-1) if errors else mean.mean(0)
        return acceptance(_widened(mean, wide), observed, edge, level), error

    def end(path: Sequence[Tensor], excess: Callable[[Ends], Tensor], at_start: Tensor) -> Tensor:
        """Return one end of the interval `(g)`: the error on a path at which the excess of its margins reaches 0."""

        def reached(step: Tensor) -> Reached:
            accepted, error = along(path, step)
            return Reached(excess(accepted), error)

        return bisected(reached, Reached(at_start, start))

    *downwards, upwards = zip(*paths, strict=True)
    from_below, from_above = acceptance(calibrated, observed, edge, level)
    low = start
    if value_if_available(is_rejected.any()) is not False:
        ends = [end(path, lambda accepted: accepted[0], from_below.clamp(max=-1e-9)) for path in downwards]
        low = torch.where(is_rejected, torch.stack(ends).amin(0), low)
    return low, end(upwards, lambda accepted: -accepted[1], -from_above.clamp(min=1e-9))


def mean_gap_interval(simulations: Sequence[Simulation], observed: Tensor, is_rejected: Tensor, level: float) -> Ends:
    """Return the lower and upper end, each `(g)`, of the interval for the mean gap; see `error_interval`."""
    errors, simulated = zip(*(_moved_mean_gaps(s.cells, s.uniform()) for s in simulations), strict=True)
    error, replicates = torch.cat(errors, -1).mean(-1), torch.cat(simulated, -1).mean(-1)
    accepted = [acceptance(step, observed.mean(-1), None, level) for step in replicates]
    too_low, too_high = (torch.stack(side) for side in zip(*accepted, strict=True))
    low, high = first_reached(too_low, error), first_reached(too_high.flip(0), error.flip(0))
    # Include 0 unless the p-value rejects calibration. The p-value may differ: it uses the variance under calibration.
    return torch.where(is_rejected, low, low.clamp(max=0)), torch.where(is_rejected, high, high.clamp(min=0))


def rounding_of(observed: Tensor) -> Tensor:
    """Return the tolerance `(...)` within which simulated and observed errors are considered equal."""
    return 1e-9 * observed.abs() + 1e-12  # the constant applies to errors near 0


def widening(n_classes: int) -> float:
    """Return the standard deviation of the mean absolute gap of C exclusive classes, relative to independent classes.

    The gaps of two classes have correlation -1 / (C - 1), so their absolute values are positively correlated. For C = 2
    they are equal.
    """
    if n_classes == 1:
        return 1.0
    rho = -1 / (n_classes - 1)
    # E|X||Y| = 2 / pi (sqrt(1 - rho^2) + rho asin(rho)) for standard normal X and Y.
    product = 2 / math.pi * (math.sqrt(1 - rho**2) + rho * math.asin(rho))
    correlation = (product - 2 / math.pi) / (1 - 2 / math.pi)
    return math.sqrt(1 + (n_classes - 1) * correlation)


def _widened(values: Tensor, by: float) -> Tensor:
    """Multiply the deviations of values `(R, ...)` from their mean over R by the factor `by`."""
    if by == 1:
        return values
    mean = values.mean(0, keepdim=True)
    return mean + by * (values - mean)


def _edge(calibrated: Tensor, level: float) -> Tensor:
    """Return the critical value `(g)` of the test of calibration: the `level` quantile of replicates `(R, g)`."""
    place = min(math.ceil(level * (len(calibrated) + 1)), len(calibrated)) - 1
    return calibrated.sort(0).values[place]


def acceptance(replicates: Tensor, observed: Tensor, edge: Tensor | None, level: float) -> Ends:
    """Return two margins `(g)`, negative if a hypothetical error is rejected as too low, or as too high.

    A margin is the normal quantile of a tail probability minus the normal quantile of its significance level. The tail
    probability is the fraction of replicates at least (at most) as large as the observation. The test is one-sided for
    errors that cannot be distinguished from calibration, and gradually becomes two-sided for larger errors. The
    interval for a calibrated model then contains 0 with probability `level`.

    Args:
        replicates: test statistic of replicates, simulated with the hypothetical error `(R, g)`.
        observed: test statistic of the data `(g)`.
        edge: critical value `(g)`; see `_edge`. None for a signed error, whose test is always two-sided.
        level: level of the interval, in (0, 1).
    """
    rounding, two_sided = rounding_of(observed), torch.ones_like(observed)
    if edge is not None:
        power = (replicates > edge + rounding_of(edge)).to(edge.dtype).mean(0)
        two_sided = ((power - (1 - level)) / level).clamp(0, 1)
    above = _normal_quantile(replicates >= observed - rounding)
    below = _normal_quantile(replicates <= observed + rounding)
    share_above, share_below = (1 - level) * (1 - two_sided / 2), (1 - level) * two_sided / 2
    return (
        above - torch.special.ndtri(share_above.clamp(min=1e-12)),
        below - torch.special.ndtri(share_below.clamp(min=1e-12)),
    )


def _normal_quantile(counted: Tensor) -> Tensor:
    """Return the standard normal quantile `(...)` of the fraction of True values in `counted`, bool `(R, ...)`."""
    share = (counted.to(torch.float64).sum(0) + 0.5) / (len(counted) + 1)
    quantile: Tensor = torch.special.ndtri(share)
    return quantile


# The size of an error does not determine the gap of each bin or run. Each end of an interval therefore uses the least
# favourable distribution of the gaps.


def _paths(test_formula: Metric, noise_free_error: Metric | None, cells: Cells, typical: Tensor) -> list[Tensor]:
    """Return hypothetical gaps, each `(g, c, K)`, which define one path per element of the list.

    The last path is for the upper end of the interval. The lower end is the minimum over the other paths.

    Args:
        test_formula: function that computes the test statistic.
        noise_free_error: see `error_interval`.
        cells: bins or runs `(g, c, K)`.
        typical: observed test statistic plus its mean for a calibrated model `(g, c)`.
    """
    if isinstance(cells, RunCells):
        few, group = cells.grouped(_N_GROUPS)
        one_side = _spread_out_to_one_side(few)
        directions = rising(few), one_side, one_side if noise_free_error is None else _spread_out(few)
        return [_in_typical_units(few, direction).gather(-1, group) for direction in directions]
    one_outcome = cells.within_bounds(torch.where(cells.confidence > 0.5, -1, 1) * cells.one_outcome)
    found = []
    for direction in (_concentrated(cells), _spread_out(cells)):
        gaps = _in_typical_units(cells, direction)
        # Scale to a typical error, not to the mean gap, because a single bin may dominate the error.
        error, least = (test_formula(cells.with_gaps(x)) for x in (cells.within_bounds(gaps), one_outcome))
        found.append(gaps * (typical.maximum(least) / error).nan_to_num(0, posinf=0).unsqueeze(-1))
    return found


def _concentrated(cells: Cells) -> Tensor:
    """Return gaps in few bins or runs `(..., K)`: the part of each observed gap that noise does not explain."""
    gap, variance = cells.gap, cells.variance
    certain = gap * (1 - _MAX_NOISE**2 * variance / gap.square()).nan_to_num(0, neginf=-1).clamp(min=0)
    # If noise may explain all gaps, this small term selects the gaps that are large relative to their noise.
    return certain + 1e-6 * gap * (gap.square() / (gap.square() + variance)).nan_to_num(0)


def _spread_out(cells: Cells) -> Tensor:
    """Return gaps in all bins or runs `(..., K)`: the posterior root mean square of each gap (empirical Bayes).

    The prior is a normal distribution with mean 0 that is common to all gaps. The noise of a gap is at least the
    effect of one outcome, because certain predictions have variance 0.
    """
    gap, variance = cells.gap, cells.variance.maximum(cells.one_outcome.square())
    share = cells.n / cells.n.sum(-1, keepdim=True)
    of_gaps = (share * (gap.square() - variance)).sum(-1, keepdim=True).clamp(min=0)
    # Add the standard error of the prior variance: even if the estimate is 0, noise may hide gaps of this size.
    of_gaps = of_gaps + (2 * (share * variance).square().sum(-1, keepdim=True)).sqrt()
    of_both = of_gaps + variance
    square = of_gaps * (gap.square() * of_gaps / of_both + variance) / of_both
    size = square.nan_to_num(0).sqrt().masked_fill(cells.n == 0, 0)
    return torch.where(_is_downward(gap, variance.sqrt(), cells.confidence), -size, size)


def _spread_out_to_one_side(cells: Cells) -> Tensor:
    """Return the gaps of `_spread_out` `(..., K)`, all with the sign of the mean gap.

    Isotonic bins pool neighbouring runs with falling frequencies, in which gaps of both signs would cancel.
    """
    whole = cells.map(lambda x: x.sum(-1, keepdim=True))
    noise = whole.variance.maximum(whole.one_outcome.square()).sqrt()
    size = _spread_out(cells).abs()
    return torch.where(_is_downward(whole.gap, noise, whole.confidence), -size, size)


def rising(cells: Cells) -> Tensor:
    """Return the isotonic regression of the observed frequencies, minus the mean confidences, `(..., K)`.

    Frequencies between the confidences and the regression are non-decreasing. Therefore isotonic bins do not pool them.
    """
    frequency = cells.confidence + cells.gap
    return (isotonic_regression(frequency, cells.n) - cells.confidence).masked_fill(cells.n == 0, 0)


def _is_downward(gap: Tensor, noise: Tensor, confidence: Tensor) -> Tensor:
    """Return a mask of negative gaps. Small gaps point away from the limit 0 or 1 if the confidence is near it."""
    observed = gap < 0
    room = torch.where(observed, confidence, 1 - confidence)
    return observed ^ ((gap.abs() <= _MAX_NOISE * noise) & (room < (2 * noise).clamp(max=0.5)))


def _in_typical_units(cells: Cells, direction: Tensor) -> Tensor:
    """Scale gaps `(..., K)` to the observed mean absolute gap plus its expected value for a calibrated model."""
    expected_noise = (2 / math.pi * cells.variance).sqrt().maximum(cells.one_outcome)
    size = (cells.n * (cells.gap.abs() + expected_noise)).sum(-1, keepdim=True)
    return direction * (size / (cells.n * direction.abs()).sum(-1, keepdim=True)).nan_to_num(0, posinf=0)


def _moved_mean_gaps(cells: Cells, chance: Tensor) -> Ends:
    """Return S hypothetical mean gaps in ascending order `(S, ...)`, and their replicates `(S, R, ...)`.

    The expected sum of all outcomes is shifted in S steps. Its variance is computed from the observed gaps, shrunken
    towards 0 by their noise. Gaps of opposite sign do not cancel in the variance.

    Args:
        cells: bins or runs `(..., K)`.
        chance: uniform random numbers in (0, 1), `(R, ...)`.
    """
    shrunk = cells.gap * (cells.gap.square() / (cells.gap.square() + cells.variance)).nan_to_num(0)
    spread = cells.spread_at(shrunk).sum(-1)
    total, outcomes = cells.n.sum(-1), (cells.expected + cells.n * shrunk).sum(-1)
    unit = (cells.noise.sum(-1) / cells.spread.sum(-1)).nan_to_num(1)
    frequency, confidence = outcomes / total, cells.expected.sum(-1) / total
    # Steps are multiples of a standard deviation, or of one outcome if all predictions are certain.
    most = cells.spread.sum(-1).maximum(spread)
    scale = (unit * torch.where(most > 0, most, unit)).sqrt() / total
    part = torch.linspace(-1, 1, 2 * _MEAN_GAP_STEPS + 1, dtype=total.dtype, device=total.device)[1:-1]
    part = part.reshape(-1, *[1] * total.dim())
    moved = (frequency + part / (1 - part.abs()) * scale).clamp(0, 1)
    by = moved - frequency
    # All frequencies f are shifted by the same amount. If one would leave [0, 1], f is multiplied by a factor t
    # instead, with variance t sum f (1 - t f). For upward shifts, 1 - f is multiplied.
    downwards = by < 0
    factor = torch.where(downwards, moved / frequency, (1 - moved) / (1 - frequency)).nan_to_num(1)
    all_certain = (1 - factor) * torch.where(downwards, outcomes, total - outcomes)
    at_least = factor * torch.where(spread > 0, spread, all_certain)
    variance = (spread + total * by * (1 - 2 * frequency - by)).maximum(at_least) / unit
    ones, zeros = total * moved / unit, total * (1 - moved) / unit
    few = torch.minimum(ones, zeros)
    sign = torch.where(ones <= zeros, 1.0, -1.0).to(few)
    # `count_quantiles` requires the axis of replicates first, so the axis of steps is the second one.
    counts = count_quantiles(0.5 + sign * (chance.unsqueeze(1) - 0.5), few, variance.minimum(few))
    error = moved - confidence
    return error, (error + (counts - few) * sign * unit / total).transpose(0, 1)


def multiple_at(step: Tensor) -> Tensor:
    """Convert a step from 0 to `N_STEPS` to the factor from 0 to `N_STEPS` that multiplies all gaps."""
    return step / (N_STEPS + 1 - step)


class Reached(NamedTuple):
    """Excess and error at one step of the search for an end of the interval, each `(...)`. The end has excess 0."""

    excess: Tensor
    error: Tensor


def first_reached(excess: Tensor, error: Tensor) -> Tensor:
    """Return the error `(...)` at which an excess `(S, ...)` first reaches 0, by linear interpolation between S steps.

    If the excess stays negative, return the error of the last step.
    """
    reached = excess >= 0
    last = torch.full_like(reached[0], len(excess) - 1, dtype=torch.int64)
    step = torch.where(reached.any(0), reached.to(torch.uint8).argmax(0), last)

    def at(step: Tensor) -> Reached:
        return Reached(*(x.gather(0, step.unsqueeze(0)).squeeze(0) for x in (excess, error)))

    return _interpolated(at((step - 1).clamp(min=0)), at(step))


def bisected(at: Callable[[Tensor], Reached], start: Reached) -> Tensor:
    """Return the error `(g)` at which a non-decreasing excess reaches 0, by bisection over steps.

    Args:
        at: function of the steps, int64 `(g)` from 1 to `N_STEPS` - 1, that returns the excess and the error.
        start: excess and error at step 0.
    """
    before, behind = start, Reached(torch.full_like(start.excess, torch.inf), start.error)
    first = torch.zeros_like(start.excess, dtype=torch.int64)
    length = N_STEPS
    while length > 1:
        length //= 2
        found = at(first + length)
        reached = found.excess >= 0
        behind = Reached(*(torch.where(reached, new, old) for new, old in zip(found, behind, strict=True)))
        before = Reached(*(torch.where(reached, old, new) for new, old in zip(found, before, strict=True)))
        first = torch.where(reached, first, first + length)
    return _interpolated(before, behind)


def _interpolated(before: Reached, behind: Reached) -> Tensor:
    """Return the error `(...)` at which the excess is 0, by linear interpolation between two steps."""
    part = (before.excess / (before.excess - behind.excess)).nan_to_num(1).clamp(0, 1)
    return before.error + part * (behind.error - before.error)
