"""Recommended calibrators, and the sentences that explain the recommendation."""

import math
from functools import partial

import pytest
import torch
from helpers.fits import T, binary

import torchcalib.functional as F
from torchcalib.calibration import HistogramBinning, recommend, relative_calibration_loss
from torchcalib.calibration.recommendation import recommendation_of


def shifted(scale, shift, n=2000):
    """Return log-odds with a wrong scale and a shift, and labels."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(n, generator=g, dtype=torch.float64)
    return scale * logits + shift, (torch.rand(n, generator=g) < logits.sigmoid()).long()


def test_recommendation_text_names_the_gain():
    found = recommend(*shifted(2, 3), **binary)
    temperature, dp = found.rcl["temperature scaling"], found.rcl["affine scaling"]
    assert found.best == "affine scaling"
    assert found.text == (
        f"Calibration would cut NLL by {dp:.1f}%: add affine scaling; temperature scaling gains {temperature:.1f}%."
    )
    assert dp == pytest.approx(relative_calibration_loss(*shifted(2, 3), **binary).item())
    found = recommend(*shifted(2, 3), score=partial(F.bayes_risk, cost=[[0, 1], [2, 0]]), **binary)
    assert found.score == "bayes_risk"
    assert found.text.startswith("Calibration would cut Bayes risk by ")
    few, many = HistogramBinning(n_bins=2), HistogramBinning(n_bins=20)
    found = recommend(*shifted(4, 0), calibrators=[T, few, many], score="brier", **binary)
    assert found.best == "temperature scaling"
    assert found.text.startswith("Calibration would cut Brier score by ")
    assert list(found.rcl) == ["temperature scaling", repr(few), repr(many)]
    for scale, words in ((1, ": leave"), (1.4, "% only (temperature scaling): leave")):
        found = recommend(*shifted(scale, 0), **binary)
        assert found.best is None
        assert found.text.endswith("leave the predictions as they are.")
        assert words in found.text
        assert max(found.rcl.values()) < 5


@pytest.mark.parametrize(
    ("gains", "best"),
    [((10.0, 10.9), 0), ((10.0, 11.1), 1), ((-10.0, -10.5), 0), ((-10.0, -9.9), 1), ((-3.0, 2.0), 1),
     ((math.nan, 20.0), 1), ((20.0, math.nan), 0), ((-math.inf, -1.0), 1), ((-math.inf, -math.inf), 0)],
)  # fmt: skip
def test_calibrator_with_more_parameters_must_gain_a_tenth_more(gains, best):
    """It must gain a tenth more. If both calibrators increase the loss, the better one is named."""
    found = recommendation_of("nll", 1.0, dict(zip("ab", gains, strict=True)), worthwhile=-math.inf)
    assert found.best == "ab"[best]
