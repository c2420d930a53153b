"""Recommended calibrators with their intervals, and the sentences that explain the recommendation."""

import math
from functools import partial
from statistics import NormalDist

import pytest
import torch
from helpers.fits import B, D, T, binary

import torchcalib.functional as F
from torchcalib.calibration import (
    HistogramBinning,
    IsotonicCalibration,
    cross_val_calibrate,
    recommend,
    relative_calibration_loss,
)
from torchcalib.calibration.recommendation import recommendation_of
from torchcalib.calibration.selection import Candidate, _given_significance, _optimism_of_choice

NORMAL = 1.959963984540054  # 97.5% quantile of the normal distribution


def shifted(scale, shift, n=2000):
    """Return log-odds with a wrong scale and a shift, and labels."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(n, generator=g, dtype=torch.float64)
    return scale * logits + shift, (torch.rand(n, generator=g) < logits.sigmoid()).long()


def test_recommendation_text_names_the_gain_its_interval_and_another_calibrator():
    found = recommend(*shifted(2, 3), calibrators=[T, B, D], **binary)
    simple, affine = found.rcl["temperature scaling"], found.rcl["affine scaling"]
    low, high = found.interval
    assert found.best == "affine scaling"
    assert low < found.gain <= affine < high
    assert found.text == (
        f"Add affine scaling: it cuts NLL by {found.gain:.1f}% (95% interval {low:.3g} to {high:.3g}); "
        f"temperature scaling gains {simple:.1f}%."
    )
    assert affine == pytest.approx(relative_calibration_loss(*shifted(2, 3), **binary).item())
    found = recommend(*shifted(2, 3), score=partial(F.bayes_risk, cost=[[0, 1], [2, 0]]), **binary)
    assert (found.score, found.intervals) == ("bayes_risk", {})
    assert "it cuts Bayes risk by " in found.text
    few, many = HistogramBinning(n_bins=2), HistogramBinning(n_bins=20)
    found = recommend(*shifted(4, 0), calibrators=[T, few, many], score="brier", **binary)
    assert found.best == "temperature scaling"
    assert found.text.startswith("Add temperature scaling: it cuts Brier score by ")
    assert list(found.rcl) == ["temperature scaling", repr(few), repr(many)]
    for scale, words in ((1, "no calibrator lowers NLL"), (1.6, "temperature scaling, cuts NLL by only ")):
        found = recommend(*shifted(scale, 0), calibrators=[T, B, D], **binary)
        assert found.best is None
        assert found.text.startswith("Use the predictions as they are: ")
        assert words in found.text
        assert max(found.rcl.values()) < 5
    assert found.advised(0.0).text.startswith("Add temperature scaling: it cuts NLL by ")
    assert found.advised(0.0).best == "temperature scaling"


@pytest.mark.parametrize("gain", [3e-4, 1e-7])
def test_a_gain_that_rounds_to_0_percent_is_described_as_small(gain):
    before = torch.full((1000,), 1e-3, dtype=torch.float64)
    noise = 1e-9 * gain * torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    after = {"temperature scaling": Candidate(before * (1 - gain) + noise)}
    found = recommendation_of("nll", before, after)
    assert (found.best, found.is_significant) == (None, True)
    assert "temperature scaling, cuts NLL by less than 0.1% (95% interval " in found.text
    found = found.advised(0.0)
    assert found.text.startswith("Add temperature scaling: it cuts NLL by less than 0.1% (95% interval ")


@pytest.mark.parametrize("score", ["nll", "brier"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("clustered", [False, True])
def test_intervals_equal_a_slow_loop_with_the_delta_method(score, weighted, clustered):
    """The gain is 1 - R with R = mean(a) / mean(b) of the scores a after and b before calibration.

    The variance of a ratio of means over n independent units is that of the mean of (a - R b) / mean(b); see Cochran,
    Sampling Techniques (1977), eq. 2.46. The unit is a cluster, if there are any. The variation of the fit adds
    o^2 / k, for the optimism o of the fit on its own samples and k = n o; see `standard_error`. Here n is at most the
    effective number N of samples, and the optimism is at least 1 / N.
    """
    logits, target = shifted(2, 0.5, 60)
    weights = 0.5 + torch.arange(60, dtype=torch.float64) % 3 if weighted else torch.ones(60, dtype=torch.float64)
    groups = torch.arange(60) // 4 if clustered else torch.arange(60)
    given = {**binary, **({"weights": weights} if weighted else {}), **({"groups": groups} if clustered else {})}
    how = {key: value for key, value in given.items() if key != "groups"}
    smallest = weights.square().sum().item() / weights.sum().item() ** 2
    found = recommend(logits, target, calibrators=[T, B], score=score, n_repeats=1, **given)
    for calibrator in (T, B):
        calibrated = cross_val_calibrate(logits, target, calibrator=calibrator, **given)
        before, after, inside = {}, {}, {}
        whole = cross_val_calibrate(logits, target, calibrator=calibrator, train_on_test=True, **how)
        for parts, values in ((before, logits), (after, calibrated), (inside, whole)):
            for x, y, w, group in zip(values.tolist(), target.tolist(), weights.tolist(), groups.tolist(), strict=True):
                q = 1 / (1 + math.exp(-x if y else x))  # probability of the label
                loss = -math.log(q) if score == "nll" else (1 - q) ** 2
                parts[group] = parts.get(group, 0.0) + w * loss
        n, ratio = len(before), sum(after.values()) / sum(before.values())
        residuals = [after[k] - ratio * before[k] for k in before]  # their sum is 0
        optimism = max((sum(after.values()) - sum(inside.values())) / weights.sum().item(), smallest)
        of_fit = optimism**2 / max(1, min(n, 1 / smallest) * optimism) * weights.sum().item() ** 2
        half = NORMAL * math.sqrt(n / (n - 1) * sum(r**2 for r in residuals) + of_fit) / sum(before.values())
        assert found.rcl[calibrator.name] == pytest.approx(100 * (1 - ratio), abs=1e-9)
        expected = (100 * (1 - ratio - half), 100 * (1 - ratio + half))
        assert found.intervals[calibrator.name] == pytest.approx(expected, abs=1e-9)


def test_smaller_calibrator_is_preferred_unless_the_difference_is_significant():
    """Scores of 100 units. The noise of +-0.5 has a standard error of 5.03 in the sum: the limit is 9.85."""
    before, noise = torch.full((100,), 2.0, dtype=torch.float64), 0.5 - torch.arange(100) % 2
    better = torch.ones(100, dtype=torch.float64)
    for difference, best in ((0.098, "a"), (0.099, "b"), (-0.1, "a")):
        small, large = Candidate(better + difference + noise, n_parameters=2), Candidate(better, n_parameters=3)
        for after in ({"a": small, "b": large}, {"b": large, "a": small}):
            found = recommendation_of("nll", before, after)
            assert found.best == found.preferred == best
            assert found.rcl == pytest.approx({"a": 50 * (1 - difference), "b": 50})
            assert ("a difference within noise" in found.text) == (difference == 0.098)
        # Of two calibrators with equally many parameters, the better one is preferred, however small the difference.
        after = {"a": small, "b": large._replace(n_parameters=2)}
        assert recommendation_of("nll", before, after).preferred == ("a" if difference < 0 else "b")
    noisy = better + torch.cat((torch.tensor([80.0]), torch.zeros(99)))
    found = recommendation_of("nll", before, {"a": Candidate(noisy)})
    assert found.rcl["a"] == pytest.approx(10)
    assert found.intervals["a"][0] < 0
    assert found.best is None
    words = "Use the predictions as they are: the gain of a is not significant at the 1% level, 10.0% (95%"
    assert found.text.startswith(words)


def test_gain_of_the_choice_equals_a_loop_over_bootstrap_samples():
    """BBC-CV (Tsamardinos et al. 2018, algorithm 2): choose on the drawn units, and evaluate on the others."""
    generator = torch.Generator().manual_seed(7)
    before = 1 + torch.rand(40, generator=generator, dtype=torch.float64)
    parts = before - 0.1 + 0.3 * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    sizes = (3, 1, 2, 1, 3, 2)
    candidates = {str(k): Candidate(each, n_parameters=sizes[k]) for k, each in enumerate(parts)}
    found = recommendation_of("nll", before, candidates)
    same = torch.Generator().manual_seed(0)
    order = torch.randperm(40, generator=same).tolist()  # one unit a block
    units = [[float(column[order.index(k)]) for k in range(40)] for column in (before, *parts)]
    numerator = denominator = 0.0
    for drawn in torch.randint(40, (200, 40), generator=same).tolist():
        means = [sum(unit[k] for k in drawn) / 40 for unit in units[1:]]
        best = min(range(6), key=means.__getitem__)
        within_noise = []
        for k in range(6):
            differences = [units[1 + k][i] - units[1 + best][i] for i in drawn]
            mean = sum(differences) / 40
            error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 39 / 40)
            if mean <= NORMAL * error + 1e-12:
                within_noise.append(k)
        chosen = min(within_noise, key=lambda k: (sizes[k], means[k]))
        numerator += sum(units[1 + chosen][k] for k in range(40) if k not in drawn)
        denominator += sum(units[0][k] for k in range(40) if k not in drawn)
    assert found.gain == pytest.approx(100 * (1 - numerator / denominator), abs=1e-9)
    assert found.gain < found.rcl[found.preferred]
    assert found.interval[1] - found.rcl[found.preferred] == pytest.approx(found.gain - found.interval[0])


def test_calibrators_that_can_assign_probability_0_are_not_advised_by_nll():
    logits, target = shifted(2, 3)
    found = recommend(logits, target, calibrators=[IsotonicCalibration(), HistogramBinning()], **binary)
    assert found.best is None
    assert found.text == (
        "Use the predictions as they are: no calibrator was compared that keeps NLL finite on new data."
    )
    both = [IsotonicCalibration(), T]
    assert recommend(logits, target, calibrators=both, **binary).best == "temperature scaling"
    by_brier = recommend(logits, target, calibrators=both, score="brier", **binary)
    assert by_brier.best == "isotonic calibration"
    # A class without samples would get probability 0 by a bias.
    three = torch.cat((logits[:, None], -logits[:, None], torch.zeros(len(logits), 1)), -1)
    found = recommend(three, target, calibrators=[D, T], task="multiclass", from_logits=True)
    assert found.preferred == "temperature scaling"


def test_brier_score_replaces_an_infinite_nll():
    p, y = torch.rand(300, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 2
    p[1] = 0
    found = recommend(p, y, task="binary", calibrators=[T, D])
    assert (found.score, found.nll_is_infinite, math.isfinite(found.gain)) == ("brier", True, True)
    assert found.text.startswith("NLL is infinite, so calibrators are compared by the Brier score. Add ")
    assert found.rcl == pytest.approx(recommend(p, y, task="binary", calibrators=[T, D], score="brier").rcl)


@pytest.mark.parametrize(
    ("values", "best"),
    [((0.9, 0.89), 1), ((0.9, 0.9), 0), ((1.1, 1.2), 0), ((math.nan, 0.8), 1), ((0.8, math.nan), 0),
     ((math.inf, 1.01), 1), ((math.inf, math.inf), 0)],
)  # fmt: skip
def test_calibrator_with_the_lowest_score_is_recommended_without_contributions(values, best):
    scores = {name: Candidate(torch.tensor(value)) for name, value in zip("ab", values, strict=True)}
    found = recommendation_of("cost", torch.tensor(1.0), scores, worthwhile=-math.inf)
    assert (found.preferred, found.intervals) == ("ab"[best], {})
    assert found.best == (None if values == (math.inf, math.inf) else found.preferred)


def test_significant_gains_are_corrected_by_the_conditional_likelihood():
    """Density of Z given Z > c for Z ~ N(m, 1): phi(z - m) / Phi(m - c). The estimate m maximises it on a fine grid."""
    normal = NormalDist()
    for z in (2.9, 3.5, 6.0):
        grid = [-5 + k / 1000 for k in range(int(1000 * (z + 5)) + 1)]
        likelihood = [normal.pdf(z - m) / normal.cdf(m - 2.5758293035489004) for m in grid]
        share = [normal.cdf(m - z) / normal.cdf(m - 2.5758293035489004) for m in grid]
        estimate, limit = _given_significance(z)
        assert estimate == pytest.approx(grid[max(range(len(grid)), key=likelihood.__getitem__)], abs=2e-3)
        below = [m for m, x in zip(grid, share, strict=True) if x <= 0.025]
        assert limit == pytest.approx(max(below, default=-5), abs=2e-3)
    # Scores of 400 units with z = 3.5 and 2.7 standard errors: the first gain shrinks, the second is not significant.
    before = torch.full((400,), 1.0, dtype=torch.float64)
    noise = (torch.arange(400) % 2).double() - 0.5
    error = math.sqrt(400 / 399 * 400 * 0.25) / 400
    for z, is_significant in ((3.5, True), (2.7, False)):
        found = recommendation_of("nll", before / 400, {"a": Candidate((before - z * error + noise) / 400)}, 0.0)
        assert (found.is_significant, found.best) == (is_significant, "a" if is_significant else None)
        expected = _given_significance(z)[0] * error if is_significant else z * error
        assert found.gain == pytest.approx(100 * expected, rel=0.02)  # the error of a ratio differs slightly
        assert ("not significant at the 1% level" in found.text) == (not is_significant)


def test_choice_among_equally_good_fits_is_corrected_by_the_expected_maximum():
    """E[max] of m chi-squared variables: 2 H_m for 2 degrees of freedom, and 1 + 2 / pi for m = 2 and 1 degree."""
    parts = torch.full((50,), 0.02, dtype=torch.float64)
    for k, m, largest in ((2, 3, 2 * (1 + 1 / 2 + 1 / 3)), (2, 1, 2), (1, 2, 1 + 2 / math.pi), (math.inf, 4, math.inf)):
        candidate = Candidate(parts, in_sample=1 - 0.06, n_parameters=k)
        expected = 0 if m == 1 or math.isinf(k) else 0.06 * (largest / k - 1)
        assert _optimism_of_choice(candidate, m) == pytest.approx(expected, abs=1e-5)
    # Two calibrators with nearly equal scores: the gain of the better one is decreased by 2 / pi times its optimism.
    before = torch.full((400,), 1 / 400, dtype=torch.float64)
    noise = 0.001 * (torch.arange(400) % 2 - 0.5)
    pair = {
        name: Candidate(before * (0.9 + side * noise), in_sample=0.89, n_parameters=1)
        for name, side in (("a", 1), ("b", -1))
    }
    alone = recommendation_of("nll", before, {"a": pair["a"]})
    assert recommendation_of("nll", before, pair).gain == pytest.approx(alone.gain - 100 * 0.01 * 2 / math.pi, abs=0.01)
