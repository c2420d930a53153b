"""Sums over the cells of smoothing, compared with slow loops: values and cells."""

import itertools
import math

import pytest
import torch
from helpers.kernels import F64, events

from torchcalib.ops.smoothing.cells import GRIDS, N_CELLS, cell_formula, cell_index, smoothing_sums

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
