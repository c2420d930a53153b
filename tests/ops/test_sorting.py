"""Sorting of samples."""

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
