"""Compiled sums over equal-mass bins."""

import pytest
import torch
from helpers.kernels import assert_same_on_any_number_of_threads

from torchcalib.ops.equal_mass import equal_mass_sums

pytest.importorskip("torchcalib.ops.equal_mass.numba", reason="needs numba")


@pytest.mark.parametrize("lowest", [0, 0.5, 1e-38, 1e-42])
@pytest.mark.parametrize("levels", [2, 50, 2**30])
def test_compiled_equal_mass_sums_equal_those_by_partitioning(levels, lowest):
    """Scores are in several cells, in one cell, or not normal. float64 sums of M scores differ by about M eps."""
    generator = torch.Generator().manual_seed(levels)
    for length in (1, 7, 3000):
        score = torch.randint(0, levels, (4, length), generator=generator) / (levels - 1)
        score = lowest + (score if lowest == 0 else score * lowest / 200)
        score = torch.where(score == 0, -score, score)  # -0 becomes 0
        score[1, torch.rand(length, generator=generator) < 0.3] = torch.nan
        score[2] = torch.nan
        score[3, ::3] = 1
        label = torch.randint(0, 2, (4, length), generator=generator).to(torch.uint8)
        for n_bins in (1, 2, 15, 40):
            sums, ends = equal_mass_sums(score, label, n_bins, backend="numba")
            expected, expected_ends = equal_mass_sums(score, label, n_bins, backend="torch")
            assert torch.equal(ends, expected_ends)
            torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)


def test_compiled_equal_mass_sums_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(2**20 + 5, generator=generator)
    label = (torch.rand(len(score), generator=generator) < score).to(torch.uint8)
    found = assert_same_on_any_number_of_threads(lambda: equal_mass_sums(score, label, 15, backend="numba"))
    assert torch.equal(found[1], equal_mass_sums(score, label, 15, backend="torch")[1])
