"""Sorting of samples, equal-mass bins without sorting, and sums over runs."""

import pytest
import torch

from torchcalib.ops import sorting

F64 = torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_sort_by_bits_equals_the_stable_sort_of_floats(dtype):
    special = [0.5, *(sign * x for x in (0.0, torch.inf, 1.0, 1e-40, torch.nan) for sign in (1, -1))]
    special = torch.tensor(special, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for shape in ((6,), (2, 6), (3, 2500), (5000,)):
        tied = special[torch.randint(0, len(special), shape, generator=generator)]
        for scores in (tied, torch.randn(shape, generator=generator).to(dtype)):
            order = sorting.stable_sort(sorting.order_bits(scores))[1]
            assert torch.equal(order, scores.sort(dim=-1, stable=True).indices)


@pytest.mark.parametrize("levels", [2, 50, 2**30])
@pytest.mark.parametrize("most_ties", [-1, 1])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_mass_sums_equal_those_of_the_sorted_sample(dtype, most_ties, levels, monkeypatch):
    monkeypatch.setattr(sorting, "_MAX_TIES", most_ties)
    generator = torch.Generator().manual_seed(levels)
    for length in (1, 7, 300):
        score = (torch.randint(0, levels, (3, length), generator=generator).to(F64) / (levels - 1)).to(dtype)
        score = torch.where(score == 0, -score, score)  # -0 becomes 0
        score[1, torch.rand(length, generator=generator) < 0.3] = torch.nan
        score[2] = torch.nan
        label = torch.randint(0, 2, (3, length), generator=generator).to(torch.uint8)
        for n_bins in (1, 2, 15, 40):
            sums, ends = sorting.equal_mass_sums(score, label, n_bins)
            in_order, labels, size = sorting.sort_labelled(score, label)
            cuts = torch.arange(1, n_bins + 1) * size.unsqueeze(-1) // n_bins
            assert torch.equal(ends, sorting.end_of_ties(in_order, cuts))
            expected = [ends.diff(prepend=torch.zeros(3, 1)), *(sorting.run_sums(x, ends) for x in (in_order, labels))]
            torch.testing.assert_close(sums, torch.stack(expected, -2).to(F64), rtol=1e-14, atol=0)


def test_equal_mass_cut_inside_a_tie_moves_to_its_end():
    """8 samples in 2 bins: the cut at 4 is inside the tie of samples 2 to 5, and moves to 6. 7 in 3: cuts at 2, 4."""
    scores, labels = torch.tensor([0.1, 0.2, 0.5, 0.5, 0.5, 0.5, 0.8, 0.9]), torch.zeros(8, dtype=torch.uint8)
    assert sorting.equal_mass_sums(scores, labels, 2)[1].tolist() == [6, 8]
    assert sorting.equal_mass_sums(torch.linspace(0, 1, 7), labels[:7], 3)[1].tolist() == [2, 4, 7]


def test_run_sums_equal_a_loop_with_and_without_gradient():
    """Runs of any length, including empty runs. An infinite element behind the last run is in no sum."""
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=F64)
    x[0, 8] = torch.inf
    ends = torch.tensor([[0, 3, 3, 8], [2, 9, 9, 9]])
    expected = [
        [row[a:b].sum() for a, b in zip([0, *e], e, strict=False)] for row, e in zip(x, ends.tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=F64)
    leaf = x.clone().requires_grad_()
    for found in (sorting.run_sums(x, ends), sorting.run_sums(leaf, ends), torch.vmap(sorting.run_sums)(x, ends)):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
    x = x.nan_to_num(posinf=0)
    assert torch.autograd.gradcheck(
        lambda x: sorting.run_sums(x, ends), x.requires_grad_(), check_forward_ad=True, check_batched_grad=True
    )
