"""Paths from calibration to miscalibration, along which a test is turned into an interval."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.inference.replicates import Cells
from torchcalib.ops.count_moments import counts_by_chance
from torchcalib.ops.isotonic import isotonic_regression

N_STEPS = 32
"""A power of two: a step is found by halving."""

_MEAN_GAP_STEPS = 24

_NOISE = 1.5  # standard deviations


def concentrated(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` as they would be if few cells had them: the part of each that noise does not explain."""
    gap, variance = cells.gap, cells.variance
    certain = gap * (1 - _NOISE**2 * variance / gap.square()).nan_to_num(0, neginf=-1).clamp(min=0)
    # Where none is certain the greatest has most.
    return certain + 1e-6 * gap * (gap.square() / (gap.square() + variance)).nan_to_num(0)


def spread_out(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` as they would be if all cells had some: the root of the mean square of each, given what
    was seen of it, if all come from one normal distribution (empirical Bayes).

    No cell is known better than to an outcome: one that was always right, of confidences of 1, may have been lucky.
    """
    gap, variance = cells.gap, cells.variance.maximum(cells.of_one_outcome.square())
    share = cells.n / cells.n.sum(-1, keepdim=True)
    of_gaps = (share * (gap.square() - variance)).sum(-1, keepdim=True).clamp(min=0)
    # And by as much as that may be too small: where it is 0 cells have gaps by as much as noise can hide them.
    of_gaps = of_gaps + (2 * (share * variance).square().sum(-1, keepdim=True)).sqrt()
    of_both = of_gaps + variance
    square = of_gaps * (gap.square() * of_gaps / of_both + variance) / of_both
    size = square.nan_to_num(0).sqrt().masked_fill(cells.n == 0, 0)
    return torch.where(_downwards(gap, variance.sqrt(), cells.confidence), -size, size)


def spread_out_to_one_side(cells: Cells) -> Tensor:
    """Return gaps of the size of `spread_out`, all to the side of the mean gap: frequencies that rise still do.

    Bins that follow from the outcomes pool cells whose frequencies fall, and hide gaps of both signs in their means.
    """
    whole = cells.map(lambda x: x.sum(-1, keepdim=True))
    noise = whole.variance.maximum(whole.of_one_outcome.square()).sqrt()
    size = spread_out(cells).abs()
    return torch.where(_downwards(whole.gap, noise, whole.confidence), -size, size)


def rising(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` of the best frequencies that rise with the confidence (isotonic regression).

    Part of the way to them frequencies rise as well, and what pools falling ones sees the whole gaps. Few cells that
    deviate by themselves would hide some, and their outcomes vary less than those of a model that is wrong everywhere.
    """
    frequency = cells.confidence + cells.gap
    return (isotonic_regression(frequency, cells.n) - cells.confidence).masked_fill(cells.n == 0, 0)


def _downwards(gap: Tensor, noise: Tensor, confidence: Tensor) -> Tensor:
    """Return whether a gap is taken to be below 0: as it was seen, but where noise could have turned it and there is
    less room on that side than noise takes up, and more on the other one.
    """
    seen = gap < 0
    room = torch.where(seen, confidence, 1 - confidence)
    return seen ^ ((gap.abs() <= _NOISE * noise) & (room < (2 * noise).clamp(max=0.5)))


def in_units_of_noise_and_gaps(cells: Cells, direction: Tensor) -> Tensor:
    """Return a direction `(..., K)` as large, on average, as the gaps that were seen and those that chance makes."""
    by_chance = (2 / math.pi * cells.variance).sqrt().maximum(cells.of_one_outcome)
    size = (cells.n * (cells.gap.abs() + by_chance)).sum(-1, keepdim=True)
    return direction * (size / (cells.n * direction.abs()).sum(-1, keepdim=True)).nan_to_num(0, posinf=0)


def multiple_at(step: Tensor) -> Tensor:
    """Return how many units of a path lie behind so many steps, from 0 to 32: fine at first."""
    return step / (N_STEPS + 1 - step)


class MeanGap(NamedTuple):
    """The mean gap over all cells, as one sum whose expectation is moved down and up.

    Attributes:
        error: the mean gap, step by step `(S, ...)`.
        replicates: what it is with what chance adds `(S, R, ...)`.
    """

    error: Tensor
    replicates: Tensor


def mean_gap_to_both_sides(cells: Cells, chance: Tensor) -> MeanGap:
    """Return mean gaps below and above what was seen, and replicates of each.

    The variance is that of the frequencies that were seen, less noise: gaps of both signs leave little of a mean, but
    not of its variance. From there all frequencies are moved by the same amount.

    Args:
        cells: what was seen `(..., K)`.
        chance: in (0, 1), one number for each replicate and series `(R, ...)`.
    """
    seen = cells.gap * (cells.gap.square() / (cells.gap.square() + cells.variance)).nan_to_num(0)
    spread = (cells.spread + cells.n * seen * (1 - 2 * cells.confidence - seen)).clamp(min=0).sum(-1)
    total, outcomes = cells.n.sum(-1), (cells.expected + cells.n * seen).sum(-1)
    unit = (cells.noise.sum(-1) / cells.spread.sum(-1)).nan_to_num(1)
    frequency, confidence = outcomes / total, cells.expected.sum(-1) / total
    # In steps of a deviation, or of an outcome where all are certain; the last ones are 23 of them, or all there is.
    most = cells.spread.sum(-1).maximum(spread)
    scale = (unit * torch.where(most > 0, most, unit)).sqrt() / total
    part = torch.linspace(-1, 1, 2 * _MEAN_GAP_STEPS + 1, dtype=total.dtype, device=total.device)[1:-1]
    part = part.reshape(-1, *[1] * total.dim())
    moved = (frequency + part / (1 - part.abs()) * scale).clamp(0, 1)
    by = moved - frequency
    # Where frequencies are so unequal that the same amount takes some out of [0, 1], at least that of the same factor:
    # of t f it is t sum f (1 - t f), and so of 1 - f.
    downwards = by < 0
    factor = torch.where(downwards, moved / frequency, (1 - moved) / (1 - frequency)).nan_to_num(1)
    all_certain = (1 - factor) * torch.where(downwards, outcomes, total - outcomes)
    at_least = factor * torch.where(spread > 0, spread, all_certain)
    variance = (spread + total * by * (1 - 2 * frequency - by)).maximum(at_least) / unit
    ones, zeros = total * moved / unit, total * (1 - moved) / unit
    few = torch.minimum(ones, zeros)
    sign = torch.where(ones <= zeros, 1.0, -1.0).to(few)
    # Steps behind replicates for the draws, in front of them for what is read.
    counts = counts_by_chance(0.5 + sign * (chance.unsqueeze(1) - 0.5), few, variance.minimum(few))
    error = moved - confidence
    return MeanGap(error, (error + (counts - few) * sign * unit / total).transpose(0, 1))


class Reached(NamedTuple):
    """How far a step of a path is from one that is looked for, below 0 in front of it, and the error there `(...)`."""

    excess: Tensor
    error: Tensor


def first_reached(excess: Tensor, error: Tensor) -> Tensor:
    """Return the error `(...)` at the step where an excess `(S, ...)` first gets to 0, straight between two steps.

    Where it never does, that of the last step.
    """
    reached = excess >= 0
    last = torch.full_like(reached[0], len(excess) - 1, dtype=torch.int64)
    step = torch.where(reached.any(0), reached.to(torch.uint8).argmax(0), last)
    before = (step - 1).clamp(min=0)

    def at(step: Tensor) -> Reached:
        return Reached(*(x.gather(0, step.unsqueeze(0)).squeeze(0) for x in (excess, error)))

    return _between(at(before), at(step))


def reached_by_halving(at: Callable[[Tensor], Reached], start: Reached) -> Tensor:
    """Return what `first_reached` does of a path on which the excess rises, from few of its steps.

    Args:
        at: what there is at a step of each series, int64 `(g)`, of 1 to `N_STEPS` - 1.
        start: what there is at step 0.
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
    return _between(before, behind)


def _between(before: Reached, behind: Reached) -> Tensor:
    """Return the error where the excess is 0, straight between two steps."""
    part = (before.excess / (before.excess - behind.excess)).nan_to_num(1).clamp(0, 1)
    return before.error + part * (behind.error - before.error)
