"""Paths from calibration to miscalibration, along which a test is turned into an interval."""

from typing import NamedTuple

import torch
from torch import Tensor

from torchcalib.consistency.replicates import Cells
from torchcalib.kernels.counts import counts_by_chance

N_STEPS = 24


def concentrated(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` as they would be if few cells had them: the part of each that noise does not explain."""
    gap, variance = cells.gap, cells.variance
    certain = gap * (1 - _NOISE**2 * variance / gap.square()).nan_to_num(0, neginf=-1).clamp(min=0)
    # Where none is certain the greatest has most.
    return certain + 1e-6 * gap * (gap.square() / (gap.square() + variance)).nan_to_num(0)


_NOISE = 1.5  # standard deviations


def spread_out(cells: Cells) -> Tensor:
    """Return gaps `(..., K)` as they would be if all cells had some: the root of the mean square of each, given what
    was seen of it, if all come from one normal distribution (empirical Bayes).
    """
    gap, variance = cells.gap, cells.variance
    share = cells.n / cells.n.sum(-1, keepdim=True)
    of_gaps = (share * (gap.square() - variance)).sum(-1, keepdim=True).clamp(min=0)
    of_both = of_gaps + variance
    # In units of the standard deviation of the gaps, which leaves something where that is 0.
    square = (gap.square() * of_gaps / of_both + variance) / of_both
    return torch.where(gap < 0, -1, 1) * square.nan_to_num(1).sqrt().masked_fill(cells.n == 0, 0)


def outwards(direction: Tensor, unit: Tensor) -> Tensor:
    """Return multiples of a direction `(..., K)` from 0 to 23 units `(...)`, fine at first: `(S, ..., K)`."""
    part = torch.arange(N_STEPS, dtype=direction.dtype, device=direction.device) / N_STEPS
    size = (part / (1 - part)).reshape(-1, *[1] * direction.dim())
    return size * (unit.unsqueeze(-1) * direction).nan_to_num(0)


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
    part = torch.linspace(-1, 1, 2 * N_STEPS + 1, dtype=total.dtype, device=total.device)[1:-1]
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


def first_reached(excess: Tensor, error: Tensor) -> Tensor:
    """Return the error `(...)` at the step where an excess `(S, ...)` first gets to 0, straight between two steps.

    Where it never does, that of the last step.
    """
    reached = excess >= 0
    last = torch.full_like(reached[0], len(excess) - 1, dtype=torch.int64)
    step = torch.where(reached.any(0), reached.to(torch.uint8).argmax(0), last)
    before = (step - 1).clamp(min=0)

    def at(x: Tensor, place: Tensor) -> Tensor:
        return x.gather(0, place.unsqueeze(0)).squeeze(0)

    short, over = at(excess, before), at(excess, step)
    part = (short / (short - over)).nan_to_num(1).clamp(0, 1)
    return at(error, before) + part * (at(error, step) - at(error, before))
