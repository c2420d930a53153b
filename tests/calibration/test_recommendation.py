"""Recommended calibrators with their intervals, and the sentences that explain the recommendation."""

import math
import re
from functools import partial

import pytest
import torch
from helpers.fits import B, D, T, binary
from processes import ROOT

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.calibration.recommendation import CALIBRATORS, ON_REQUEST, recommendation_of
from torchcalib.calibration.selection import Candidate, _optimism_of_choice, chi_squared_tail

NORMAL = 1.959963984540054  # 97.5% quantile of the normal distribution


def shifted(scale, shift, n=2000):
    """Return log-odds with a wrong scale and a shift, and labels."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(n, generator=g, dtype=torch.float64)
    return scale * logits + shift, (torch.rand(n, generator=g) < logits.sigmoid()).long()


def test_the_guide_describes_every_calibrator_and_names_those_on_request():
    page = (ROOT / "docs/guide/calibrators.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \{py:class\}`~torchcalib\.calibration\.(\w+)`", page, re.MULTILINE)
    assert sorted(rows) == sorted(kind.__name__ for kind in (*CALIBRATORS, *ON_REQUEST))
    (on_request,) = re.findall(r"compare all of them by default, except for (.*?), which", page, re.DOTALL)
    assert re.findall(r"`(\w+)`", on_request) == [kind.__name__ for kind in ON_REQUEST]


def test_recommendation_text_names_the_gain_its_interval_and_another_calibrator():
    found = tc.recommend(*shifted(2, 3), calibrators=[T, B, D], **binary)
    simple, affine = found.rcl["temperature scaling"], found.rcl["affine scaling"]
    low, high = found.interval
    assert found.best == "affine scaling"
    assert low < found.gain <= affine < high
    assert found.text == (
        f"Add affine scaling: it cuts NLL by {found.gain:.1f}% (95% interval {low:.3g} to {high:.3g}); "
        f"temperature scaling gains {simple:.1f}%."
    )
    assert affine == pytest.approx(tc.relative_calibration_loss(*shifted(2, 3), **binary).item())
    found = tc.recommend(*shifted(2, 3), score=partial(F.bayes_risk, cost=[[0, 1], [2, 0]]), **binary)
    assert (found.score, found.intervals) == ("bayes_risk", {})
    assert "it cuts Bayes risk by " in found.text
    few, many = tc.HistogramBinning(n_bins=2), tc.HistogramBinning(n_bins=20)
    found = tc.recommend(*shifted(4, 0), calibrators=[T, few, many], score="brier", **binary)
    assert found.best == "temperature scaling"
    assert found.text.startswith("Add temperature scaling: it cuts Brier score by ")
    assert list(found.rcl) == ["temperature scaling", repr(few), repr(many)]
    for scale, words in ((1, "no calibrator lowers NLL"), (1.6, "temperature scaling, cuts NLL by only ")):
        found = tc.recommend(*shifted(scale, 0), calibrators=[T, B, D], **binary)
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
    effective number N of samples, and the optimism is at least 1 / N. For a significant likelihood ratio of k
    parameters, the variance is that of the decreases of the NLL in the sample, plus 2 (k - 1) (o / k)^2, and the centre
    is higher by o / k; see `interval_of`.
    """
    logits, target = shifted(2, 0.5, 60)
    weights = 0.5 + torch.arange(60, dtype=torch.float64) % 3 if weighted else torch.ones(60, dtype=torch.float64)
    groups = torch.arange(60) // 4 if clustered else torch.arange(60)
    given = {**binary, **({"weights": weights} if weighted else {}), **({"groups": groups} if clustered else {})}
    how = {key: value for key, value in given.items() if key != "groups"}
    smallest = weights.square().sum().item() / weights.sum().item() ** 2
    found = tc.recommend(logits, target, calibrators=[T, D], score=score, n_repeats=1, **given)
    for calibrator, k in ((T, 1), (D, 2)):
        calibrated = tc.cross_val_calibrate(logits, target, calibrator=calibrator, **given)
        before, after, inside, decreases = {}, {}, {}, []
        whole = tc.cross_val_calibrate(logits, target, calibrator=calibrator, train_on_test=True, **how)
        for parts, values in ((before, logits), (after, calibrated), (inside, whole)):
            for x, y, w, group in zip(values.tolist(), target.tolist(), weights.tolist(), groups.tolist(), strict=True):
                q = 1 / (1 + math.exp(-x if y else x))  # probability of the label
                loss = -math.log(q) if score == "nll" else (1 - q) ** 2
                parts[group] = parts.get(group, 0.0) + w * loss
        total = weights.sum().item()
        for x, z, y, w in zip(logits.tolist(), whole.tolist(), target.tolist(), weights.tolist(), strict=True):
            losses = [math.log1p(math.exp(-v if y else v)) for v in (x, z)]
            decreases.append(w * (losses[0] - losses[1]))
        by_group = [sum(d for d, g in zip(decreases, groups.tolist(), strict=True) if g == group) for group in before]
        spreads = [sum((d - sum(x) / len(x)) ** 2 for d in x) for x in (by_group, decreases)]
        effect = max(1.0, spreads[0] / spreads[1])
        kish = total / weights.square().sum().item() if weighted else 1.0
        statistic = 2 * kish / effect * sum(decreases)
        tail = math.erfc(math.sqrt(statistic / 2)) if k == 1 else math.exp(-statistic / 2)
        n, base, ratio = len(before), sum(before.values()), sum(after.values()) / sum(before.values())
        optimism = max((sum(after.values()) - sum(inside.values())) / total, smallest)
        is_exact = score == "nll" and tail < 0.01 and 1 / smallest / effect >= 5 * (k + 1)
        used = inside if is_exact else after
        residuals = [used[u] - sum(used.values()) / base * before[u] for u in before]  # their sum is 0
        of_fit = optimism**2 / max(1, min(n, 1 / smallest) * optimism)
        if is_exact:
            of_fit = 2 * (k - 1) * (optimism / k) ** 2
        half = NORMAL * math.sqrt(n / (n - 1) * sum(r**2 for r in residuals) + of_fit * total**2) / base
        gain, centre = 1 - ratio, 1 - ratio + is_exact * optimism / k * total / base
        assert found.rcl[calibrator.name] == pytest.approx(100 * gain, abs=1e-9)
        expected = (100 * min(gain, centre - half), 100 * max(gain, centre + half))
        assert found.intervals[calibrator.name] == pytest.approx(expected, abs=1e-7)


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
        # Of two calibrators with equally many parameters, the better one is preferred unless they are equal.
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


@pytest.mark.parametrize("rounding", [0.0, 2e-9, -2e-9, 1e-7])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_ties_up_to_rounding_go_to_the_candidate_with_fewer_parameters_or_to_the_first_one(rounding, order):
    """The variance of a difference of 1e-9 is rounding error, so that the difference could be called significant."""
    before = 0.5 + torch.rand(300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    same = 0.9 * before
    sizes = {"a": 1, "b": 3}
    for equal_size in (False, True):
        after = {
            name: Candidate(same * (1 + rounding * (name == "b")), n_parameters=1 if equal_size else sizes[name])
            for name in order
        }
        assert recommendation_of("nll", before, after, 0.0).best == (order[0] if equal_size else "a")


def test_likelihood_ratios_decide_about_calibrators_that_contain_the_identity():
    """The paired difference of these scores is 1.8 standard errors, so that it is not significant by itself."""
    before = torch.full((400,), 0.5, dtype=torch.float64) / 400
    noise = (torch.arange(400) % 2).double() - 0.5
    d = (8 / 400 + 2 * noise * math.sqrt(20 / 400)) / 400
    of_one = Candidate(before - d, in_sample=before - d - 1 / 400 / 400, n_parameters=1)
    without = recommendation_of("nll", before, {"a": of_one}, 0.0)
    assert (without.best, without.p_value) == (None, None)
    found = recommendation_of("nll", before, {"a": of_one._replace(statistic=18.0)}, 0.0)
    assert found.best == "a"
    assert found.p_value == pytest.approx(chi_squared_tail(18.0, 1))
    assert found.gain == pytest.approx(found.rcl["a"])  # not conditioned on its significance
    assert ("This gain is uncertain: fit it to more samples." in found.text) == (found.interval[0] <= 0)
    weak = recommendation_of("nll", before, {"a": of_one._replace(statistic=4.0)}, 0.0)
    assert weak.best is None
    assert "not significant at the 1% level (p = 0.046), " in weak.text
    assert weak.text.startswith("Use the predictions as they are: ")
    assert weak.advised(0.0, is_faulty=True).text.startswith("No calibrator is advised for this sample: ")
    # A second parameter with a likelihood ratio of 10 is needed, although the difference of scores is within noise.
    of_two = of_one._replace(n_parameters=2, statistic=28.0)
    both = {"a": of_one._replace(statistic=18.0), "b": of_two}
    assert recommendation_of("nll", before, both, 0.0).best == "b"
    worse_on_new_data = of_two._replace(parts=of_one.parts + 1e-6)
    assert recommendation_of("nll", before, {**both, "b": worse_on_new_data}, 0.0).best == "a"
    assert recommendation_of("nll", before, {**both, "b": of_two._replace(statistic=20.0)}, 0.0).best == "a"
    p_value = recommendation_of("nll", before, both, 0.0).p_value  # shares of the level: 2 / 3 and 1 / 3
    assert p_value == pytest.approx(min(1.5 * chi_squared_tail(18.0, 1), 3 * math.exp(-14)))


def test_a_simpler_calibrator_with_a_larger_gain_is_called_within_noise():
    """The gain of the preferred calibrator is corrected for its choice, that of temperature scaling is not."""
    before, simple = torch.full((100,), 2.0, dtype=torch.float64), torch.full((100,), 1.6, dtype=torch.float64)
    small = Candidate(simple, simple - 0.02, 100, 1, statistic=60.0)
    large = Candidate(simple - 1e-4, simple - 0.03, 100, 2, statistic=90.0)
    after = {"temperature scaling": small, "affine scaling": large, "beta calibration": large}
    found = recommendation_of("nll", before, after)
    assert found.best == "affine scaling"
    assert found.gain < found.rcl["temperature scaling"] < found.rcl["affine scaling"]
    assert found.text.endswith("; temperature scaling gains 20.0%, a difference within noise.")
    worse = recommendation_of("nll", before, {**after, "temperature scaling": small._replace(parts=before + 0.01)})
    assert worse.text.endswith("; temperature scaling gains −0.5%.")


def test_calibrators_that_can_assign_probability_0_are_not_advised_by_nll():
    logits, target = shifted(2, 3)
    found = tc.recommend(logits, target, calibrators=[tc.IsotonicCalibration(), tc.HistogramBinning()], **binary)
    assert found.best is None
    assert found.text == (
        "Use the predictions as they are: no calibrator was compared that keeps NLL finite on new data."
    )
    both = [tc.IsotonicCalibration(), T]
    assert tc.recommend(logits, target, calibrators=both, **binary).best == "temperature scaling"
    by_brier = tc.recommend(logits, target, calibrators=both, score="brier", **binary)
    assert by_brier.best == "isotonic calibration"
    # A class without samples would get probability 0 by a bias.
    three = torch.cat((logits[:, None], -logits[:, None], torch.zeros(len(logits), 1)), -1)
    found = tc.recommend(three, target, calibrators=[D, T], task="multiclass", from_logits=True)
    assert found.preferred == "temperature scaling"


def test_brier_score_replaces_an_infinite_nll():
    p, y = torch.rand(300, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 2
    p[1] = 0
    found = tc.recommend(p, y, task="binary", calibrators=[T, D])
    assert (found.score, found.nll_is_infinite, math.isfinite(found.gain)) == ("brier", True, True)
    assert found.text.startswith("NLL is infinite, so calibrators are compared by the Brier score. Add ")
    assert found.rcl == pytest.approx(tc.recommend(p, y, task="binary", calibrators=[T, D], score="brier").rcl)


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


def test_choice_among_equally_good_fits_is_corrected_by_the_expected_maximum():
    """E[max] of m chi-squared variables: 2 H_m for 2 degrees of freedom, and 1 + 2 / pi for m = 2 and 1 degree."""
    parts = torch.full((50,), 0.02, dtype=torch.float64)
    for k, m, largest in ((2, 3, 2 * (1 + 1 / 2 + 1 / 3)), (2, 1, 2), (1, 2, 1 + 2 / math.pi), (math.inf, 4, math.inf)):
        candidate = Candidate(parts, in_sample=parts * (1 - 0.06), n_parameters=k)
        expected = 0 if m == 1 or math.isinf(k) else 0.06 * (largest / k - 1)
        assert _optimism_of_choice(candidate, m) == pytest.approx(expected, abs=1e-5)
    # Two calibrators with nearly equal scores: the gain of the better one is decreased by 2 / pi times its optimism.
    before = torch.full((400,), 1 / 400, dtype=torch.float64)
    noise = 0.001 * (torch.arange(400) % 2 - 0.5)
    pair = {
        name: Candidate(before * (0.9 + side * noise), in_sample=0.89 * before, n_parameters=1)
        for name, side in (("a", 1), ("b", -1))
    }
    alone = recommendation_of("nll", before, {"a": pair["a"]})
    assert recommendation_of("nll", before, pair).gain == pytest.approx(alone.gain - 100 * 0.01 * 2 / math.pi, abs=0.01)
