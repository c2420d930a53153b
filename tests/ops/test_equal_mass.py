"""Sums over equal-mass bins: by partitioning, compared with the sorted sample; compiled, compared with those."""

import pytest
import torch
from helpers.kernels import F64, NUMBA, assert_same_on_any_number_of_threads

from torchcalib.ops import equal_mass, segments, sorting
from torchcalib.ops.equal_mass import equal_mass_sums
from torchcalib.ops.labelled import sort_labelled

needs_numba = pytest.mark.skipif(not NUMBA, reason="numba is not installed")


@pytest.mark.parametrize("levels", [2, 50, 2**30])
@pytest.mark.parametrize("most_ties", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_mass_sums_equal_those_of_the_sorted_sample(dtype, most_ties, levels, monkeypatch):
    monkeypatch.setattr(equal_mass, "_MAX_TIES", most_ties)
    generator = torch.Generator().manual_seed(levels)
    for length in (1, 7, 300):
        score = (torch.randint(0, levels, (3, length), generator=generator).to(F64) / (levels - 1)).to(dtype)
        score = torch.where(score == 0, -score, score)  # -0 becomes 0
        score[1, torch.rand(length, generator=generator) < 0.3] = torch.nan
        score[2] = torch.nan
        label = torch.randint(0, 2, (3, length), generator=generator).to(torch.uint8)
        for n_bins in (1, 2, 15, 40):
            sums, ends = equal_mass.sums_and_ends(score, label, n_bins)
            in_order, labels, size = sort_labelled(score, label)
            cuts = torch.arange(1, n_bins + 1) * size.unsqueeze(-1) // n_bins
            assert torch.equal(ends, sorting.end_of_ties(in_order, cuts))
            expected = [ends.diff(prepend=torch.zeros(3, 1)), *(segments.run_sums(x, ends) for x in (in_order, labels))]
            torch.testing.assert_close(sums, torch.stack(expected, -2).to(F64), rtol=1e-14, atol=0)


def test_equal_mass_cut_inside_a_tie_moves_to_its_end():
    """8 samples in 2 bins: the cut at 4 is inside the tie of samples 2 to 5, and moves to 6. 7 in 3: cuts at 2, 4."""
    scores, labels = torch.tensor([0.1, 0.2, 0.5, 0.5, 0.5, 0.5, 0.8, 0.9]), torch.zeros(8, dtype=torch.uint8)
    assert equal_mass.sums_and_ends(scores, labels, 2)[1].tolist() == [6, 8]
    assert equal_mass.sums_and_ends(torch.linspace(0, 1, 7), labels[:7], 3)[1].tolist() == [2, 4, 7]


@needs_numba
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


@needs_numba
def test_compiled_equal_mass_sums_do_not_depend_on_the_number_of_threads():
    generator = torch.Generator().manual_seed(0)
    score = torch.rand(2**20 + 5, generator=generator)
    label = (torch.rand(len(score), generator=generator) < score).to(torch.uint8)
    found = assert_same_on_any_number_of_threads(lambda: equal_mass_sums(score, label, 15, backend="numba"))
    assert torch.equal(found[1], equal_mass_sums(score, label, 15, backend="torch")[1])
