"""Intervals: ends are replicates at their ranks, also infinite ones and NaN."""

import torch
from helpers.bootstrap import close

import torchcalib as tc


def test_ends_are_replicates_at_their_ranks():
    replicates = torch.arange(1, 1000.0)[torch.randperm(999, generator=torch.Generator().manual_seed(0))]
    found = tc.Interval(torch.tensor(500.0), replicates, 0.95)
    assert (float(found.low), float(found.high)) == (25, 975)  # 25 of 1000 at or below, 25 at or above
    assert float(found.bias) == 0
    close(found.standard_error, replicates.std())
    assert "low=25.0" in repr(found)
    least = tc.Interval(torch.tensor(0.0), torch.arange(39.0), 0.95)
    assert (float(least.low), float(least.high)) == (0, 38)


def test_an_infinite_replicate_is_an_end_and_one_that_is_nan_makes_both_nan():
    replicates = torch.arange(1, 40.0).repeat(2, 1).T.contiguous()
    replicates[[3, 7, 12], 0] = torch.inf
    replicates[5, 1] = torch.nan
    found = tc.Interval(torch.zeros(2), replicates, 0.9)
    close(found.low, torch.tensor([2.0, torch.nan]))
    close(found.high, torch.tensor([torch.inf, torch.nan]))
