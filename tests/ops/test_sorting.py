"""Sorting of samples, and sums over runs."""

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
