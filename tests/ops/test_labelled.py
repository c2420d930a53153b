"""Sorted scores with labels, and confidences of the more probable outcome, compared with plain loops."""

import math

import pytest
import torch
from helpers.kernels import F64

from torchcalib.ops.labelled import most_probable, sort_labelled


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


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_confidence_of_the_more_probable_outcome_is_exact(dtype):
    p = torch.tensor([[0, 1e-20, 0.3, 0.5], [math.nan, 0.7, 1 - 2**-24, 1]], dtype=dtype)
    for kind in (torch.int64, torch.uint8, torch.bool, torch.float32):
        target = torch.tensor([[0, 1, 0, 0], [1, 1, 0, 1]]).to(kind)
        confidence, correct = most_probable(p, target)
        assert confidence.dtype == F64
        torch.testing.assert_close(confidence, 0.5 + (p.double() - 0.5).abs(), rtol=0, atol=2**-53, equal_nan=True)
        assert correct.tolist() == [[1, 0, 1, 1], [0, 1, 0, 1]]
