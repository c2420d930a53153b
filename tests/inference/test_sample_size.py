"""Numbers of rows against closed forms and simulated tests, and their inverse."""

import math
from statistics import NormalDist

import pytest
import torch
from helpers.reports import QUICK

import torchcalib as tc
from torchcalib import minimum_detectable_error, required_n
from torchcalib.inference import sample_size
from torchcalib.testing import assert_calibrated

Z = NormalDist().inv_cdf
G = torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True)
def few_replicates(monkeypatch):
    """Simulate fewer gaps, which are the same in all calls. The docstring has values of the usual number."""
    monkeypatch.setattr(sample_size, "_N_REPLICATES", 2**13)


def closed_form(c, b, error, power=0.8, level=0.05):
    """Return n for the mean signed error of a shift b: the two-sided test of a mean with two variances."""
    q = (c.logit() + b).sigmoid()
    of_calibrated = float((c * (1 - c)).mean().sqrt())
    of_shifted = float(((q * (1 - q) + (q - c) ** 2).mean() - (q - c).mean() ** 2).sqrt())
    return ((Z(1 - level / 2) * of_calibrated + Z(power) * of_shifted) / error) ** 2


@pytest.mark.parametrize(("power", "level", "n_tests"), [(0.8, 0.05, 1), (0.9, 0.01, 1), (0.8, 0.05, 10)])
def test_a_shift_needs_the_rows_of_the_closed_form(power, level, n_tests):
    c = torch.rand(5_000, generator=G, dtype=torch.float64) * 0.3
    b = 0.2
    error = float(((c.logit() + b).sigmoid() - c).mean())
    given = {"power": power, "level": level, "n_tests": n_tests}
    expected = closed_form(c, b, error, power, level / n_tests)
    assert required_n(error, test="esce", preds=c, **given) == pytest.approx(expected, rel=1e-3)
    assert required_n(error, test="esce", preds=c.logit(), from_logits=True, **given) == pytest.approx(
        expected, rel=1e-3
    )
    two = required_n(error, test="esce", preds=c, design_effect=2, **given)
    assert two == pytest.approx(2 * expected, rel=1e-3)


def test_the_beta_distribution_has_its_mean_and_spread():
    c = torch.distributions.Beta(2.0, 6.0)
    mean, spread = float(c.mean), float(c.stddev)
    drawn = torch._standard_gamma(torch.tensor([[2.0, 6.0]], dtype=torch.float64).expand(400_000, 2), generator=G)
    drawn = drawn[:, 0] / drawn.sum(-1)
    found = required_n(0.02, prevalence=mean, spread=spread)
    assert found == pytest.approx(required_n(0.02, preds=drawn), rel=0.01)
    assert required_n(0.02) == pytest.approx(required_n(0.02, preds=(torch.arange(2000) + 0.5) / 2000), rel=0.01)


def test_the_smallest_error_is_the_inverse_and_nan_for_few_rows():
    for given in (
        {"fault": "temperature"},
        {"fault": "temperature", "test": "rmsce"},
        {"prevalence": 0.02, "spread": 0.02},
        {"n_tests": 20, "design_effect": 3.0},
    ):
        error = minimum_detectable_error(5_000, **given)
        needed = [required_n(sign * error, **given) for sign in (-1, 1)]
        assert max(needed) == pytest.approx(5_000, rel=0.01), given
    assert math.isnan(minimum_detectable_error(3))


def test_the_test_with_the_fewest_rows_is_used():
    for fault, best in (("shift", "esce"), ("temperature", "ece")):
        by_test = {test: required_n(-0.03, fault=fault, test=test) for test in ("ece", "rmsce")}
        if fault == "shift":
            by_test["esce"] = required_n(-0.03, test="esce")
        assert min(by_test, key=by_test.__getitem__) == best
        assert required_n(-0.03, fault=fault) == by_test[best]


def test_multi_class_rows_have_the_event_of_the_top_label():
    logits = torch.randn(4_000, 5, generator=G, dtype=torch.float64)
    probs = logits.softmax(-1)
    assert required_n(-0.05, preds=probs) == required_n(-0.05, preds=probs.amax(-1))
    assert required_n(-0.05, preds=logits, from_logits=True) == pytest.approx(required_n(-0.05, preds=probs), rel=0.01)
    over_confident = required_n(-0.05, preds=probs, fault="temperature")
    assert over_confident != required_n(
        -0.05, preds=probs.amax(-1), fault="temperature"
    )  # by the logits of all classes


def test_two_systems_are_compared_by_the_differences_of_their_scores():
    spread, difference = 0.4, 0.01
    n = required_n(difference, spread=spread, systems=2)
    assert n == math.ceil(((Z(0.975) + Z(0.8)) * spread / difference) ** 2)
    assert minimum_detectable_error(n, spread=spread, systems=2) == pytest.approx(difference, rel=1e-3)


def test_power_at_the_number_of_rows():
    """`benchmarks.required_n` has more settings and data sets."""
    n, error = required_n(0.06), 0.06
    c = torch.rand(1_000, n, generator=G, dtype=torch.float64)
    low, high = 0.0, 3.0
    for _ in range(40):
        b = (low + high) / 2
        low, high = (b, high) if float(((c.logit() + b).sigmoid() - c).mean()) < error else (low, b)
    metric = tc.ESCE(task="binary", batch_shape=(1_000,))
    metric.update(c, torch.bernoulli((c.logit() + b).sigmoid(), generator=G).long())
    assert float((metric.test(n_replicates=399).p_value <= 0.05).double().mean()) == pytest.approx(0.8, abs=0.05)


def test_a_report_has_the_smallest_error_of_its_rows():
    p = torch.rand(2_000, generator=G, dtype=torch.float64)
    y = torch.bernoulli(p, generator=G)
    report = tc.report(p, y, **QUICK)
    found = report.minimum_detectable_error
    assert found == pytest.approx((Z(0.975) + Z(0.8)) * float((p * (1 - p)).sum().sqrt()) / 2_000)
    assert found == pytest.approx(minimum_detectable_error(preds=p), rel=0.02)
    assert report.flat()["minimum_detectable_error"] == found
    twice = tc.report(p.repeat(2), y.repeat(2), clusters=torch.arange(2_000).repeat(2), **QUICK)
    assert twice.minimum_detectable_error == pytest.approx(found, rel=0.1)  # not that of 4,000 independent rows
    of_labels = tc.report(torch.stack((p, p / 9), 1), torch.stack((y, y), 1).long(), "multilabel", **QUICK)
    assert of_labels.minimum_detectable_error == pytest.approx(found * (Z(0.9875) + Z(0.8)) / (Z(0.975) + Z(0.8)))


def test_assertions_require_enough_rows():
    p = torch.rand(2_000, generator=G, dtype=torch.float64)
    y = torch.bernoulli(p, generator=G)
    assert_calibrated(p, y, require_detectable=0.05)
    with pytest.raises(AssertionError, match=r"too few rows to find a mean error of 0.02: the smallest one .* is 0.02"):
        assert_calibrated(p, y, require_detectable=0.02)
