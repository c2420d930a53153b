"""Confidence intervals by inversion of a test: the errors that the test does not reject.

The error is increased along a path of gaps that starts at calibration. At each step of the path outcomes are simulated,
and the observed error is compared with the simulated ones. An end of the interval is where the test starts to reject.

Source: Feldman, Cousins: Unified approach to the classical statistical analysis of small signals (Physical Review D,
1998), for the transition from a one-sided to a two-sided test.
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
"""Steps of a path; a power of two for bisection."""

_MEAN_GAP_STEPS = 24
_NOISE = 1.5  # standard deviations up to which a gap may be noise
_N_GROUPS = 15  # groups of neighbouring runs, whose gaps are equal on a path

Cells = BinCells | RunCells
Metric = Callable[[Any], Tensor]
Ends = tuple[Tensor, Tensor]


def error_interval(
    tested_by: Metric,
    without_noise: Metric | None,
    simulations: Sequence[Simulation],
    observed: Tensor,
    calibrated: Tensor,
    is_rejected: Tensor,
    level: float,
) -> Ends:
    """Return both ends `(g)` of the interval of an unsigned error, averaged over classes.

    Args:
        tested_by: test statistic.
        without_noise: error of given frequencies; None for the interval of the expected test statistic.
        simulations: of some classes each, `(g, c, K)`.
        observed: test statistic `(g, C)`.
        calibrated: its replicates for a calibrated model `(R, g, C)`.
        is_rejected: whether the p-value rejects calibration `(g)`. The interval contains 0 exactly where it does not.
        level: level of the interval.
    """
    wide = widening(observed.shape[-1])
    sizes = [simulation.cells.n.shape[-2] for simulation in simulations]
    typical = torch.split(observed + calibrated.mean(0), sizes, -1)
    paths = [_paths(tested_by, without_noise, s.cells, size) for s, size in zip(simulations, typical, strict=True)]
    observed, calibrated = observed.mean(-1), _widened(calibrated.mean(-1), wide)
    edge = _edge(calibrated, level)
    start = calibrated.mean(0) if without_noise is None else 0 * observed

    def along(path: Sequence[Tensor], step: Tensor) -> tuple[Ends, Tensor]:
        """Return the acceptance of the error at a step of a path, and the error."""
        size = multiple_at(step)[:, None, None]
        simulated, errors = [], []
        for simulation, direction in zip(simulations, path, strict=True):
            gaps = simulation.cells.within_bounds(size * direction)
            simulated.append(simulation.compute(tested_by, gaps))
            if without_noise is not None:
                errors.append(without_noise(simulation.cells.with_gaps(gaps)))
        mean = torch.cat(simulated, -1).mean(-1)
        error = torch.cat(errors, -1).mean(-1) if errors else mean.mean(0)
        return acceptance(_widened(mean, wide), observed, edge, level), error

    def end(path: Sequence[Tensor], excess: Callable[[Ends], Tensor], at_start: Tensor) -> Tensor:
        """Return the error where the excess reaches 0 on a path."""

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
    """Return both ends `(g)` of the interval of the mean gap; arguments as of `error_interval`."""
    errors, simulated = zip(*(_moved_mean_gaps(s.cells, s.uniform()) for s in simulations), strict=True)
    error, replicates = torch.cat(errors, -1).mean(-1), torch.cat(simulated, -1).mean(-1)
    accepted = [acceptance(step, observed.mean(-1), None, level) for step in replicates]
    too_low, too_high = (torch.stack(side) for side in zip(*accepted, strict=True))
    low, high = first_reached(too_low, error), first_reached(too_high.flip(0), error.flip(0))
    # Agree with the p-value, which is two-sided and uses the noise of a calibrated model.
    return torch.where(is_rejected, low, low.clamp(max=0)), torch.where(is_rejected, high, high.clamp(min=0))


def rounding_of(observed: Tensor) -> Tensor:
    """Return the difference up to which errors count as equal."""
    return 1e-9 * observed.abs() + 1e-12  # the latter for errors that are 0 but for the order of a sum


def widening(n_classes: int) -> float:
    """Return the standard deviation of an average over C dependent classes, relative to independent ones.

    An outcome that one class gains is lost by another, so that the gaps of two classes have a correlation of
    -1 / (C - 1) and their absolute values a positive one. For two classes the absolute values are equal.
    """
    if n_classes == 1:
        return 1.0
    rho = -1 / (n_classes - 1)
    # E|X||Y| = 2 / pi (sqrt(1 - rho^2) + rho asin(rho)) for standard normal X and Y.
    product = 2 / math.pi * (math.sqrt(1 - rho**2) + rho * math.asin(rho))
    correlation = (product - 2 / math.pi) / (1 - 2 / math.pi)
    return math.sqrt(1 + (n_classes - 1) * correlation)


def _widened(values: Tensor, by: float) -> Tensor:
    """Scale the distances of values `(R, ...)` from their mean."""
    if by == 1:
        return values
    mean = values.mean(0, keepdim=True)
    return mean + by * (values - mean)


def _edge(calibrated: Tensor, level: float) -> Tensor:
    """Return the quantile of replicates `(R, g)` above which calibration is rejected."""
    place = min(math.ceil(level * (len(calibrated) + 1)), len(calibrated)) - 1
    return calibrated.sort(0).values[place]


def acceptance(replicates: Tensor, observed: Tensor, edge: Tensor | None, level: float) -> Ends:
    """Return how far an error is from rejection as too low and as too high; negative where it is rejected.

    Both are differences of normal quantiles: of the share of replicates at least (at most) as large as the observation,
    and of the significance level of that side. The test is one-sided for errors that cannot be distinguished from
    calibration and two-sided for those that always can, so that the interval of a calibrated model contains 0 with the
    probability `level`.

    Args:
        replicates: simulated for this error `(R, g)`.
        observed: `(g)`.
        edge: see `_edge`; None for a signed error, whose test is always two-sided.
        level: level of the interval.
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
    """Return the standard normal quantile of the share of replicates `(R, ...)` that are counted."""
    share = (counted.to(torch.float64).sum(0) + 0.5) / (len(counted) + 1)
    quantile: Tensor = torch.special.ndtri(share)
    return quantile


# Paths: which gaps an error of a given size has is not known, so that each end of an interval supposes the least
# favourable distribution over the cells.


def _paths(tested_by: Metric, without_noise: Metric | None, cells: Cells, typical: Tensor) -> list[Tensor]:
    """Return the gaps `(g, c, K)` of each path at one unit.

    All paths but the last are for the lower end, which is the smallest error that they reach. The last one is for the
    upper end.

    Args:
        tested_by: test statistic.
        without_noise: see `error_interval`.
        cells: `(g, c, K)`.
        typical: sum of the observed test statistic and of its mean for a calibrated model `(g, c)`.
    """
    if isinstance(cells, RunCells):
        few, group = cells.grouped(_N_GROUPS)
        one_side = _spread_out_to_one_side(few)
        directions = rising(few), one_side, one_side if without_noise is None else _spread_out(few)
        return [_in_typical_units(few, direction).gather(-1, group) for direction in directions]
    one_outcome = cells.within_bounds(torch.where(cells.confidence > 0.5, -1, 1) * cells.one_outcome)
    found = []
    for direction in (_concentrated(cells), _spread_out(cells)):
        gaps = _in_typical_units(cells, direction)
        # In units of the error itself: a single bin may dominate it.
        error, least = (tested_by(cells.with_gaps(x)) for x in (cells.within_bounds(gaps), one_outcome))
        found.append(gaps * (typical.maximum(least) / error).nan_to_num(0, posinf=0).unsqueeze(-1))
    return found


def _concentrated(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` of few cells: the part of each observed gap that noise does not explain."""
    gap, variance = cells.gap, cells.variance
    certain = gap * (1 - _NOISE**2 * variance / gap.square()).nan_to_num(0, neginf=-1).clamp(min=0)
    # If noise explains all gaps, the largest ones are the most likely.
    return certain + 1e-6 * gap * (gap.square() / (gap.square() + variance)).nan_to_num(0)


def _spread_out(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` of all cells: the root mean square of each gap given its observation, if the gaps have a
    common normal distribution (empirical Bayes).

    The noise of a cell is at least one outcome: certain predictions that were all right may have been lucky.
    """
    gap, variance = cells.gap, cells.variance.maximum(cells.one_outcome.square())
    share = cells.n / cells.n.sum(-1, keepdim=True)
    of_gaps = (share * (gap.square() - variance)).sum(-1, keepdim=True).clamp(min=0)
    # Add the standard error of this estimate: where it is 0, gaps may be as large as noise can hide.
    of_gaps = of_gaps + (2 * (share * variance).square().sum(-1, keepdim=True)).sqrt()
    of_both = of_gaps + variance
    square = of_gaps * (gap.square() * of_gaps / of_both + variance) / of_both
    size = square.nan_to_num(0).sqrt().masked_fill(cells.n == 0, 0)
    return torch.where(_is_downward(gap, variance.sqrt(), cells.confidence), -size, size)


def _spread_out_to_one_side(cells: Cells) -> Tensor:
    """Return gaps of the size of `_spread_out` with the sign of the mean gap, so that rising frequencies still rise.

    Isotonic bins pool cells whose frequencies fall, so that gaps of both signs would cancel in their means.
    """
    whole = cells.map(lambda x: x.sum(-1, keepdim=True))
    noise = whole.variance.maximum(whole.one_outcome.square()).sqrt()
    size = _spread_out(cells).abs()
    return torch.where(_is_downward(whole.gap, noise, whole.confidence), -size, size)


def rising(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` of the best rising frequencies (isotonic regression).

    Frequencies rise at every step towards them, so that isotonic bins show the whole gaps.
    """
    frequency = cells.confidence + cells.gap
    return (isotonic_regression(frequency, cells.n) - cells.confidence).masked_fill(cells.n == 0, 0)


def _is_downward(gap: Tensor, noise: Tensor, confidence: Tensor) -> Tensor:
    """Return whether a gap is negative: its observed sign, unless noise explains it and there is more room above."""
    observed = gap < 0
    room = torch.where(observed, confidence, 1 - confidence)
    return observed ^ ((gap.abs() <= _NOISE * noise) & (room < (2 * noise).clamp(max=0.5)))


def _in_typical_units(cells: Cells, direction: Tensor) -> Tensor:
    """Scale a direction `(..., K)` to the mean absolute gap: the observed one plus that of a calibrated model."""
    by_chance = (2 / math.pi * cells.variance).sqrt().maximum(cells.one_outcome)
    size = (cells.n * (cells.gap.abs() + by_chance)).sum(-1, keepdim=True)
    return direction * (size / (cells.n * direction.abs()).sum(-1, keepdim=True)).nan_to_num(0, posinf=0)


def _moved_mean_gaps(cells: Cells, chance: Tensor) -> Ends:
    """Return mean gaps below and above the observed one `(S, ...)`, and replicates of each `(S, R, ...)`.

    The mean gap is one sum, whose expectation is moved. Its variance follows from the observed frequencies less noise:
    gaps of both signs cancel in the mean, but not in its variance.

    Args:
        cells: `(..., K)`.
        chance: in (0, 1), one number for each replicate and batch element `(R, ...)`.
    """
    shrunk = cells.gap * (cells.gap.square() / (cells.gap.square() + cells.variance)).nan_to_num(0)
    spread = cells.spread_at(shrunk).sum(-1)
    total, outcomes = cells.n.sum(-1), (cells.expected + cells.n * shrunk).sum(-1)
    unit = (cells.noise.sum(-1) / cells.spread.sum(-1)).nan_to_num(1)
    frequency, confidence = outcomes / total, cells.expected.sum(-1) / total
    # Steps are in standard deviations, or in outcomes if all predictions are certain. They end at 0 and 1.
    most = cells.spread.sum(-1).maximum(spread)
    scale = (unit * torch.where(most > 0, most, unit)).sqrt() / total
    part = torch.linspace(-1, 1, 2 * _MEAN_GAP_STEPS + 1, dtype=total.dtype, device=total.device)[1:-1]
    part = part.reshape(-1, *[1] * total.dim())
    moved = (frequency + part / (1 - part.abs()) * scale).clamp(0, 1)
    by = moved - frequency
    # All frequencies f move by the same amount. Where that would leave [0, 1], they are scaled by a factor t instead,
    # with variance t sum f (1 - t f); upwards the same holds for 1 - f.
    downwards = by < 0
    factor = torch.where(downwards, moved / frequency, (1 - moved) / (1 - frequency)).nan_to_num(1)
    all_certain = (1 - factor) * torch.where(downwards, outcomes, total - outcomes)
    at_least = factor * torch.where(spread > 0, spread, all_certain)
    variance = (spread + total * by * (1 - 2 * frequency - by)).maximum(at_least) / unit
    ones, zeros = total * moved / unit, total * (1 - moved) / unit
    few = torch.minimum(ones, zeros)
    sign = torch.where(ones <= zeros, 1.0, -1.0).to(few)
    # The axis of steps is the second one for the draws.
    counts = count_quantiles(0.5 + sign * (chance.unsqueeze(1) - 0.5), few, variance.minimum(few))
    error = moved - confidence
    return error, (error + (counts - few) * sign * unit / total).transpose(0, 1)


def multiple_at(step: Tensor) -> Tensor:
    """Return the size of the gaps at a step from 0 to 32, in units of the path: fine steps at first."""
    return step / (N_STEPS + 1 - step)


class Reached(NamedTuple):
    """Excess over the point that is searched for, negative before it, and the error at a step `(...)`."""

    excess: Tensor
    error: Tensor


def first_reached(excess: Tensor, error: Tensor) -> Tensor:
    """Return the error `(...)` where an excess `(S, ...)` first reaches 0, by linear interpolation between steps.

    If it never does, return the error of the last step.
    """
    reached = excess >= 0
    last = torch.full_like(reached[0], len(excess) - 1, dtype=torch.int64)
    step = torch.where(reached.any(0), reached.to(torch.uint8).argmax(0), last)

    def at(step: Tensor) -> Reached:
        return Reached(*(x.gather(0, step.unsqueeze(0)).squeeze(0) for x in (excess, error)))

    return _interpolated(at((step - 1).clamp(min=0)), at(step))


def bisected(at: Callable[[Tensor], Reached], start: Reached) -> Tensor:
    """Return the result of `first_reached` for an excess that rises, by bisection over the steps.

    Args:
        at: excess and error at one step for each batch element, int64 `(g)`, of 1 to `N_STEPS` - 1.
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
    """Return the error where the excess is 0, by linear interpolation."""
    part = (before.excess / (before.excess - behind.excess)).nan_to_num(1).clamp(0, 1)
    return before.error + part * (behind.error - before.error)
