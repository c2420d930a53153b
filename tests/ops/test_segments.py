"""Sums over cells, runs and weighted rows, compared with loops over samples."""

import math

import pytest
import torch

from torchcalib.ops.segments import cell_sums, run_sums, weighted_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
def test_cell_sums_and_their_gradient_equal_slow_loop(lead, dtype):
    """float32 uses the code for other devices. A sum of 30 numbers below 4 has an error below 30 * 4 * eps."""
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 5, (*lead, 30), generator=generator)
    columns = torch.randn(*lead, 2, 30, generator=generator, dtype=dtype, requires_grad=True)
    found = cell_sums(index, columns, 7)
    expected = torch.zeros(*lead, 2, 7, dtype=torch.float64)
    for at in torch.cartesian_prod(*map(torch.arange, (*lead, 2, 30))).tolist():
        *series, column, sample = at
        expected[(*series, column, index[(*series, sample)])] += columns[tuple(at)].item()
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=120 * torch.finfo(dtype).eps)
    upstream = torch.randn(found.shape, generator=generator, dtype=dtype)
    (gradient,) = torch.autograd.grad(found, columns, upstream)
    assert torch.equal(gradient, upstream.gather(-1, index.unsqueeze(-2).expand(columns.shape)))


def test_weighted_sums_with_infinite_entries_equal_slow_loop():
    """Weight 0 excludes an infinite entry; weight 1 does not."""
    weights = torch.tensor([[1.0, 0, 0], [2, 1, 0], [0, 0, 3], [0, 2, 0]], dtype=torch.float64)
    table = torch.tensor([[1.5, math.inf], [-math.inf, 2], [0.25, -1]], dtype=torch.float64)
    for row, found in zip(weights.tolist(), weighted_sums(weights, table).tolist(), strict=True):
        for k, column in enumerate(table.T.tolist()):
            assert found[k] == sum(w * x for w, x in zip(row, column, strict=True) if w)


def test_run_sums_equal_a_loop_with_and_without_gradient():
    """Runs of any length, including empty runs. An infinite element behind the last run is in no sum."""
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0, 8] = torch.inf
    ends = torch.tensor([[0, 3, 3, 8], [2, 9, 9, 9]])
    expected = [
        [row[a:b].sum() for a, b in zip([0, *e], e, strict=False)] for row, e in zip(x, ends.tolist(), strict=True)
    ]
    expected = torch.tensor(expected, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    for found in (run_sums(x, ends), run_sums(leaf, ends), torch.vmap(run_sums)(x, ends)):
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)
    x = x.nan_to_num(posinf=0)
    assert torch.autograd.gradcheck(
        lambda x: run_sums(x, ends), x.requires_grad_(), check_forward_ad=True, check_batched_grad=True
    )
