"""Sorted scores, with labels, and sums of risk-coverage curves, compared with plain loops."""

import math
from fractions import Fraction

import pytest
import torch
from helpers.kernels import F64
from oracles.selective import expected_errors

from torchcalib.ops import labelled, sorting
from torchcalib.ops.labelled import most_probable, risk_sums, sort_labelled


@pytest.fixture(params=["one block", "blocks of 3"], autouse=True)
def blocks(request, monkeypatch):
    if request.param == "blocks of 3":
        monkeypatch.setattr(labelled, "_BLOCK", 3)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_labels_move_with_their_scores(dtype):
    generator = torch.Generator().manual_seed(0)
    for levels in (2, 2**30):
        score = (torch.randint(0, levels, (3, 50), generator=generator).to(F64) / (levels - 1)).to(dtype)
        score[0, :3] = torch.tensor([-0.0, math.nan, -math.nan])
        label = torch.randint(0, 2, (3, 50), generator=generator).to(torch.uint8)
        found = sort_labelled(score, label)
        for row, labels, in_order, moved, size in zip(score.tolist(), label.tolist(), *found, strict=True):
            expected = sorted((abs(p), y) for p, y in zip(row, labels, strict=True) if p == p)
            assert size == len(expected)
            assert list(zip(in_order[:size].tolist(), moved[:size].tolist(), strict=True)) == expected
            assert bool((in_order[size:] > 1).all())


def test_confidences_of_float32_probabilities_are_sorted_exactly():
    """Their complements are sorted as 32-bit integers. Probabilities below 2^-53 give the confidence 1."""
    tiny = torch.tensor([0, 1e-45, 1e-20, 2**-54, 2**-53, 3e-10, 0.5, 0.5 + 2**-24, 1 - 2**-24, 1])
    p = torch.cat((tiny, torch.rand(40, generator=torch.Generator().manual_seed(0))))[torch.randperm(50)]
    score, label = most_probable(p.repeat(2, 1), torch.randint(0, 2, (2, 50)))
    assert labelled._complement_keys(score, label) is not None
    for row, labels, in_order, moved, size in zip(score, label, *sort_labelled(score, label), strict=True):
        assert size == 50
        expected = sorted(zip(row.tolist(), labels.tolist(), strict=True))
        assert list(zip(in_order.tolist(), moved.tolist(), strict=True)) == expected
    assert labelled._complement_keys(score - 0.1, label) is None
    assert labelled._complement_keys(score + 0.1, label) is None


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_confidence_of_the_more_probable_outcome_is_exact(dtype):
    p = torch.tensor([[0, 1e-20, 0.3, 0.5], [math.nan, 0.7, 1 - 2**-24, 1]], dtype=dtype)
    for kind in (torch.int64, torch.uint8, torch.bool, torch.float32):
        target = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 1]]).to(kind)
        confidence, correct = most_probable(p, target)
        assert confidence.dtype == F64
        torch.testing.assert_close(confidence, 0.5 + (p.double() - 0.5).abs(), rtol=0, atol=2**-53, equal_nan=True)
        assert correct.tolist() == [[1, 0, 1, 1], [0, 1, 0, 1]]


# Sums of risk-coverage curves


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


# Sorting by bits


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
