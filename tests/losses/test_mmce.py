"""Maximum mean calibration error: the authors' kernel, closed forms, all pairs, and wrong settings."""

import math
from functools import partial

import pytest
import torch
from helpers.refusals import assert_refused

import torchcalib as tc


def test_default_kernel_is_that_of_the_authors_code():
    """exp(-|c - c'| / (2 * 0.2)) in Kumar et al.'s code; netcal, which has it too, gives 0.2325 for these rows."""
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    target = torch.tensor([1, 0, 1])
    confidences, residuals = (0.9, 0.8, 0.6), (0 - 0.9, 1 - 0.8, 1 - 0.6)
    claims = list(zip(confidences, residuals, strict=True))
    square = sum(d * e * math.exp(-abs(a - b) / (2 * 0.2)) for a, d in claims for b, e in claims)
    for found in (tc.mmce(probs, target, task="multiclass"), tc.MMCELoss(task="multiclass")(probs, target)):
        assert found.item() == pytest.approx(math.sqrt(square) / 3, rel=1e-12)
        assert found.item() == pytest.approx(0.2325, abs=5e-5)


def test_closed_form_of_two_claims():
    """Residuals far apart do not add."""
    apart = tc.mmce(torch.tensor([0.8, 0.3], dtype=torch.float64), torch.tensor([1, 0]), task="binary", bandwidth=0.001)
    assert float(apart) == pytest.approx(math.sqrt(0.2**2 + 0.3**2) / 2)
    hits = tc.mmce(torch.tensor([0.8, 0.8]), torch.tensor([1, 1]), task="binary", weighted=True)
    assert float(hits) == pytest.approx(0.2)  # of a batch without mistakes


def test_a_narrow_kernel_of_many_samples_is_that_of_all_pairs():
    """In one pass over sorted confidences, where exponentials of them run over hundreds of orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3000, generator=generator, dtype=torch.float64)
    p[:300] = p[300:600]
    y = torch.randint(0, 2, (3000,), generator=generator)
    for bandwidth in (0.001, 0.03, 5.0):
        kernel = ((p[:, None] - p).abs() / -bandwidth).exp()
        expected = ((y - p) @ kernel @ (y - p)).sqrt() / 3000
        torch.testing.assert_close(tc.mmce(p, y, task="binary", bandwidth=bandwidth), expected, rtol=1e-11, atol=0)


WRONG = [
    ("narrow", partial(tc.mmce, bandwidth=1e-4), ValueError,
     "`bandwidth` must be finite and at least 0.001, got 0.0001"),
    ("text", partial(tc.mmce, weighted="yes"), TypeError, "`weighted` must be True or False, got 'yes'"),
    ("classwise", partial(tc.mmce, reduction="classwise"), ValueError,
     "`reduction` must be one of 'positive_class', 'top_label'"),
    ("average", partial(tc.mmce, average=None), ValueError, "`average` must be 'macro' where there is a single value"),
]  # fmt: skip


def test_wrong_settings():
    preds, target = torch.tensor([0.2, 0.7]), torch.tensor([0, 1])
    assert_refused(
        (name, partial(call, preds, target, task="binary"), error, [said]) for name, call, error, said in WRONG
    )
