"""Sums over bins of equal mass without a sort, against the sorted sample."""

import pytest
import torch

from torchcalib.ops import ranking

F64 = torch.float64


@pytest.mark.parametrize("levels", [2, 50, 2**30])
@pytest.mark.parametrize("most_ties", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_law_equal_mass_sums_are_those_of_the_sorted_sample(dtype, most_ties, levels, monkeypatch):
    monkeypatch.setattr("torchcalib.ops.ranking._MOST_TIES", most_ties)
    generator = torch.Generator().manual_seed(levels)
    for length in (1, 7, 300):
        score = (torch.randint(0, levels, (3, length), generator=generator).to(F64) / (levels - 1)).to(dtype)
        score = torch.where(score == 0, -score, score)  # -0 is 0
        score[1, torch.rand(length, generator=generator) < 0.3] = torch.nan
        score[2] = torch.nan
        label = torch.randint(0, 2, (3, length), generator=generator).to(torch.uint8)
        for n_bins in (1, 2, 15, 40):
            sums, ends = ranking.equal_mass_sums(score, label, n_bins)
            in_order, labels, size = ranking.sort_labelled(score, label)
            cuts = torch.arange(1, n_bins + 1) * size.unsqueeze(-1) // n_bins
            assert torch.equal(ends, ranking.end_of_ties(in_order, cuts))
            expected = [ends.diff(prepend=torch.zeros(3, 1)), *(ranking.run_sums(x, ends) for x in (in_order, labels))]
            torch.testing.assert_close(sums, torch.stack(expected, -2).to(F64), rtol=1e-14, atol=0)
