"""Derivatives of the NLL in the scale of scores, compared with loops in float64."""

import math

import pytest
import torch
from helpers.kernels import F64

from torchcalib.ops.newton.scores import LabelledScores, row_means
from torchcalib.ops.newton.temperature import nll_derivatives


def labelled(scores, w, label_mean, in_standard_form):
    """Return one batch element, with scores in standard form or scores 2 (s + 1)."""
    scale, unused = torch.ones(1, dtype=w.dtype), torch.zeros(1)
    given = scores if in_standard_form else 2 * scores + 2
    top = None if in_standard_form else given.amax(-1, keepdim=True)[None]
    scale = scale if in_standard_form else 2 * scale
    return LabelledScores(given[None], top, unused, unused, unused, w[None, None], unused, scale, label_mean)


@pytest.mark.parametrize("in_standard_form", [True, False])
@pytest.mark.parametrize(("dtype", "of_weights"), [(torch.float32, torch.float32), (torch.bfloat16, F64), (F64, F64)])
@pytest.mark.parametrize("n_classes", [3, 1500])
def test_derivatives_equal_those_of_loops(in_standard_form, dtype, of_weights, n_classes):
    generator = torch.Generator().manual_seed(n_classes)
    scores = 8 * torch.randn(5, n_classes, generator=generator)
    scores = (scores - scores.amax(-1, keepdim=True)).to(torch.bfloat16).to(dtype)  # sums with 1 are exact in float32
    w = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4], dtype=of_weights)
    if in_standard_form:
        scores[:, 1] = -1e18  # a masked class, whose cube is not finite in float32
    p = labelled(scores, w, torch.tensor([[-0.5]], dtype=of_weights), in_standard_form)
    given = p.scores[0].tolist()
    expected = [0.5, 0.0, 0.0]
    for row, weight in zip(given, w.tolist(), strict=True):
        s = [x if in_standard_form else (x - max(row)) / 2 for x in row]
        q = [math.exp(1.3 * x) for x in s]
        q = [x / math.fsum(q) for x in q]
        mean = math.fsum(map(math.prod, zip(q, s, strict=True)))
        central = [math.fsum(a * (b - mean) ** k for a, b in zip(q, s, strict=True)) for k in (2, 3)]
        expected = [total + weight * x for total, x in zip(expected, (mean, *central), strict=True)]
    found = nll_derivatives(p, torch.tensor([[1.3]], dtype=of_weights))
    rounding = {"rtol": 1e-4, "atol": 1e-4} if of_weights == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    for x, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(x, torch.tensor([[exact]], dtype=of_weights), **rounding)


def test_row_means_are_those_of_differences():
    """The offset is common to all scores of a row, and does not affect the precision of the mean."""
    scores = 1e8 + torch.arange(6, dtype=F64).view(2, 1, 3) ** 2
    found = row_means(scores, scores.amax(-1, keepdim=True))
    torch.testing.assert_close(found, torch.tensor([[-7 / 3], [-25 / 3]], dtype=F64), rtol=1e-14, atol=0)
