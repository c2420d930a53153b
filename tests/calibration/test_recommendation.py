"""Recommended calibrators with their intervals, and the sentences that explain the recommendation."""

import math
from functools import partial

import pytest
import torch
from helpers.fits import B, D, T, binary

import torchcalib.functional as F
from torchcalib.calibration import HistogramBinning, cross_val_calibrate, recommend, relative_calibration_loss
from torchcalib.calibration.recommendation import recommendation_of

NORMAL = 1.959963984540054  # 97.5% quantile of the normal distribution


def shifted(scale, shift, n=2000):
    """Return log-odds with a wrong scale and a shift, and labels."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(n, generator=g, dtype=torch.float64)
    return scale * logits + shift, (torch.rand(n, generator=g) < logits.sigmoid()).long()


def test_recommendation_text_names_the_gain_its_interval_and_another_calibrator():
    found = recommend(*shifted(2, 3), calibrators=[T, B, D], **binary)
    bias, affine = found.rcl["bias correction"], found.rcl["affine scaling"]
    low, high = found.intervals["affine scaling"]
    assert found.best == "affine scaling"
    assert found.text == (
        f"Calibration would cut NLL by {affine:.1f}% (95% interval {low:.3g} to {high:.3g}): add affine scaling; "
        f"bias correction gains {bias:.1f}%."
    )
    assert affine == pytest.approx(relative_calibration_loss(*shifted(2, 3), **binary).item())
    found = recommend(*shifted(2, 3), score=partial(F.bayes_risk, cost=[[0, 1], [2, 0]]), **binary)
    assert (found.score, found.intervals) == ("bayes_risk", {})
    assert found.text.startswith("Calibration would cut Bayes risk by ")
    few, many = HistogramBinning(n_bins=2), HistogramBinning(n_bins=20)
    found = recommend(*shifted(4, 0), calibrators=[T, few, many], score="brier", **binary)
    assert found.best == "temperature scaling"
    assert found.text.startswith("Calibration would cut Brier score by ")
    assert list(found.rcl) == ["temperature scaling", repr(few), repr(many)]
    for scale, words in ((1, ": leave"), (1.4, "by only "), (1.4, ", with temperature scaling: leave")):
        found = recommend(*shifted(scale, 0), calibrators=[T, B, D], **binary)
        assert found.best is None
        assert found.text.endswith("leave the predictions as they are.")
        assert words in found.text
        assert max(found.rcl.values()) < 5


@pytest.mark.parametrize("score", ["nll", "brier"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clustered", [False, True])
def test_intervals_equal_a_slow_loop_with_the_delta_method(score, weighted, clustered):
    """The gain is 1 - R with R = mean(a) / mean(b) of the scores a after and b before calibration.

    The variance of a ratio of means over n independent units is that of the mean of (a - R b) / mean(b); see Cochran,
    Sampling Techniques (1977), eq. 2.46. The unit is a cluster, if there are any.
    """
    logits, target = shifted(2, 0.5, 60)
    weights = 0.5 + torch.arange(60, dtype=torch.float64) % 3 if weighted else torch.ones(60, dtype=torch.float64)
    groups = torch.arange(60) // 4 if clustered else torch.arange(60)
    given = {**binary, **({"weights": weights} if weighted else {}), **({"groups": groups} if clustered else {})}
    found = recommend(logits, target, calibrators=[T, B], score=score, **given)
    for calibrator in (T, B):
        calibrated = cross_val_calibrate(logits, target, calibrator=calibrator, **given)
        before, after = {}, {}
        for parts, values in ((before, logits), (after, calibrated)):
            for x, y, w, group in zip(values.tolist(), target.tolist(), weights.tolist(), groups.tolist(), strict=True):
                q = 1 / (1 + math.exp(-x if y else x))  # probability of the label
                loss = -math.log(q) if score == "nll" else (1 - q) ** 2
                parts[group] = parts.get(group, 0.0) + w * loss
        n, ratio = len(before), sum(after.values()) / sum(before.values())
        residuals = [after[k] - ratio * before[k] for k in before]  # their sum is 0
        half = NORMAL * math.sqrt(n / (n - 1) * sum(r**2 for r in residuals)) / sum(before.values())
        assert found.rcl[calibrator.name] == pytest.approx(100 * (1 - ratio), abs=1e-9)
        expected = (100 * (1 - ratio - half), 100 * (1 - ratio + half))
        assert found.intervals[calibrator.name] == pytest.approx(expected, abs=1e-9)


def test_earlier_calibrator_is_preferred_unless_the_difference_is_significant():
    """Scores of 100 units. The noise of +-0.5 has a standard error of 5.03 in the sum: the limit is 9.85."""
    before, noise = torch.full((100,), 2.0, dtype=torch.float64), 0.5 - torch.arange(100) % 2
    better = torch.ones(100, dtype=torch.float64)
    for difference, best in ((0.098, "a"), (0.099, "b"), (-0.1, "a")):
        found = recommendation_of("nll", before, {"a": better + difference + noise, "b": better})
        assert found.best == best
        assert found.rcl == pytest.approx({"a": 50 * (1 - difference), "b": 50})
        assert ("the difference is within noise" in found.text) == (difference == 0.098)
    noisy = better + torch.cat((torch.tensor([80.0]), torch.zeros(99)))
    found = recommendation_of("nll", before, {"a": noisy})
    assert found.rcl["a"] == pytest.approx(10)
    assert found.intervals["a"][0] < 0
    assert found.best is None
    assert found.text.startswith("The gain of the best calibrator, a, is not significant, 10.0% (95% interval ")


@pytest.mark.parametrize(
    ("values", "best"),
    [((0.9, 0.89), 1), ((0.9, 0.9), 0), ((1.1, 1.2), 0), ((math.nan, 0.8), 1), ((0.8, math.nan), 0),
     ((math.inf, 1.01), 1), ((math.inf, math.inf), 0)],
)  # fmt: skip
def test_calibrator_with_the_lowest_score_is_recommended_without_contributions(values, best):
    scores = {name: torch.tensor(value) for name, value in zip("ab", values, strict=True)}
    found = recommendation_of("cost", torch.tensor(1.0), scores, worthwhile=-math.inf)
    assert (found.best, found.intervals) == ("ab"[best], {})
