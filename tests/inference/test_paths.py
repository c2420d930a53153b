"""Steps of a path from calibration to miscalibration: closed forms, and bisection against all steps."""

import torch
from helpers.null_distribution import F64, close, one_bin

from torchcalib.core.sums import BinStats
from torchcalib.inference.inversion import N_STEPS, Reached, bisected, first_reached, rising
from torchcalib.inference.simulation import BinCells


def test_best_rising_frequencies_pool_falling_ones_closed_form():
    """Of three confidences of 100 rows: 0.3 and 0.1 are pooled to 0.2, and 0.9 stays."""
    bins = [one_bin(p, 100, k).sums for p, k in ((0.2, 30), (0.5, 10), (0.8, 90))]
    close(rising(BinCells.of(BinStats(torch.cat(bins, -1), has_noise=True))), torch.tensor([0.0, -0.3, 0.1], dtype=F64))


def test_a_crossing_lies_straight_between_two_steps():
    excess = torch.tensor([[-1.0, 0.0, -3.0], [1.0, 1.0, -2.0], [3.0, 2.0, -1.0]], dtype=F64)
    error = torch.tensor([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]], dtype=F64)
    close(first_reached(excess, error), torch.tensor([2.0, 0.0, 8.0], dtype=F64))


def test_bisection_finds_the_first_step_with_excess():
    steps = torch.arange(N_STEPS, dtype=F64).unsqueeze(-1)
    excess = steps - torch.tensor([0.5, 1.0, 7.25, 30.5, 40.0], dtype=F64)
    error = steps.square().expand_as(excess)

    def at(step):
        return Reached(*(x.gather(0, step.unsqueeze(0)).squeeze(0) for x in (excess, error)))

    close(bisected(at, at(torch.zeros(5, dtype=torch.int64))), first_reached(excess, error))
