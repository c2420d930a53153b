"""Sums of risk-coverage curves, compared with exact loops over the samples."""

import math
from fractions import Fraction

import pytest
import torch
from oracles.selective import expected_errors

from torchcalib.ops.labelled import risk_sums


def exact_sums(score, correct):
    """Return the four sums of a row by the loop over groups in exact fractions."""
    errors = [0, *expected_errors(score, correct)]
    risk = math.fsum(float(e / k) for k, e in enumerate(errors[1:], 1))
    generalized = sum((a + b) / 2 for a, b in zip(errors[1:], errors[:-1], strict=True))
    pairs = [(i, j) for i, y in enumerate(correct) if y for j, z in enumerate(correct) if not z]
    above = sum(Fraction(1 if score[j] > score[i] else 0) + Fraction(score[j] == score[i], 2) for i, j in pairs)
    return [float(errors[-1]), risk, float(generalized), float(above)]


@pytest.mark.parametrize("levels", [1, 3, 2**30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_equal_exact_ones(levels, dtype):
    generator = torch.Generator().manual_seed(levels)
    for length in (1, 2, 7, 100):
        score = torch.randint(0, levels, (3, length), generator=generator).to(dtype).sort(-1).values
        correct = torch.randint(0, 2, (3, length), generator=generator).to(torch.uint8)
        size = torch.tensor([length, length // 2, 0])
        found = risk_sums(score, correct, size)
        for row, n in enumerate(size.tolist()):
            expected = exact_sums(score[row, :n].tolist(), correct[row, :n].tolist())
            assert found[row].tolist() == pytest.approx(expected, rel=1e-14, abs=0)
