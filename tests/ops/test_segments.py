"""Sums over cells, runs, weighted rows, and cells of smoothing, compared with loops over samples."""

import itertools
import math

import pytest
import torch
from helpers.kernels import F64, events

from torchcalib.ops.segments import cell_sums, run_sums, weighted_sums
from torchcalib.ops.smoothing.cells import GRIDS, N_CELLS, cell_formula, cell_index, smoothing_sums


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


# Cells of smoothing


INF, NAN = math.inf, math.nan


def slow(confidence, outcome, weights, noise="none", copies=True):
    """Return the sums of 1, p, y, p (1 - p), variance of y, and p y over every cell, by a loop over Python floats."""
    sums = [[0.0] * N_CELLS for _ in range(6)]
    ones = [1.0] * len(confidence) if weights is None else weights.tolist()
    for p, y, w in zip(confidence.tolist(), outcome.double().tolist(), ones, strict=True):
        cell = min(sum(int(p * steps) for steps in GRIDS), N_CELLS - 1)
        variance = (y - p) ** 2 if noise == "shares" else p * (1 - p)
        share = 1 if weights is None or copies else w
        for column, x in zip(sums, (1, p, y, p * (1 - p), share * variance, p * y), strict=True):
            column[cell] += w * x if w else 0
    found = torch.tensor(sums, dtype=F64)
    return found if noise != "none" else found[[0, 1, 2, 3, 5]]


@pytest.mark.parametrize(
    ("dtype", "outcome_dtype"),
    [(torch.float32, torch.bool), (F64, torch.int64), (torch.bfloat16, torch.uint8), (F64, F64)],
    ids=str,
)
def test_smoothing_sums_equal_slow_loop(dtype, outcome_dtype):
    confidence, outcome, weights, _ = events(500, dtype)
    confidence[:3] = torch.tensor([0.0, 1.0, 0.5])
    outcome = outcome.to(outcome_dtype)
    for w, noise, copies in itertools.product((None, weights), ("none", "labels", "shares"), (True, False)):
        found = smoothing_sums(confidence, outcome, w, noise=noise, copies=copies)
        expected = slow(confidence, outcome, w, noise, copies)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)
        formula = cell_formula(confidence, outcome, w, noise, copies)
        torch.testing.assert_close(formula, expected, rtol=1e-13, atol=1e-15)


def test_cell_index_of_nodes_their_neighbours_and_invalid_probabilities():
    nodes = torch.cat([torch.arange(m + 1, dtype=F64) / m for m in GRIDS])
    near = [torch.nextafter(nodes, torch.full_like(nodes, far)) for far in (-1.0, 2.0)]
    values = torch.cat((nodes, *near)).clamp(0, 1)
    for given in (values, values.float(), values.half()):
        expected = sum((given.double() * m).long() for m in GRIDS).clamp(max=N_CELLS - 1)
        assert torch.equal(cell_index(given), expected)
    beyond = torch.tensor([[NAN, -0.0, -1, -INF], [2, INF, 1e30, 1]], dtype=F64)
    assert cell_index(beyond).tolist() == [[0] * 4, [N_CELLS - 1] * 4]
    found = smoothing_sums(beyond, torch.zeros(2, 4))
    assert found[0, 0, 0] == 4
    assert found[1, 0, -1] == 4
    assert found[0, 1, 0].isnan()
    assert not found[0, :, 1:].any()
