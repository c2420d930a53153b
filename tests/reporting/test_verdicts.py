"""Verdicts on data with a known truth: impossible outcomes, useless models, rare events, degrees, soft targets."""

import dataclasses
import math

import pytest
import torch

import torchcalib as tc
from torchcalib.reporting.findings import BAD, SLIGHT, Ratio, _degree, degree_of

QUICK = {"with_calibration": False, "with_intervals": False}
NO_BETTER = "no better than always predicting the class frequencies"
IMPOSSIBLE = "utcomes with predicted probability 0 occurred"


def normal(n, seed=0, *shape):
    return 2 * torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcomes(log_odds, seed=1):
    return torch.bernoulli(log_odds.sigmoid(), generator=torch.Generator().manual_seed(seed)).long()


def labels(logits, seed=1):
    return torch.multinomial(logits.softmax(-1), 1, generator=torch.Generator().manual_seed(seed)).squeeze(-1)


def four_values(k, k_of_one=0):
    """Return predictions 0, 0.3, 0.7 and 1, each in 100 rows; k predictions of 0 and `k_of_one` of 1 are wrong."""
    p = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64).repeat_interleave(100)
    y = (torch.arange(400) % 100 < 100 * p).long()
    y[:k], y[300 : 300 + k_of_one] = 1, 0
    return p, y


Z, Z5 = normal(2000), normal(500, 0, 5)
ROUNDED = (Z.sigmoid() * 10).round() / 10
TWENTIETHS = (Z5.softmax(-1) * 20).round()
THREE_LABELS = [torch.stack(x, -1) for x in zip(four_values(2), four_values(0), four_values(0), strict=True)]
WEIGHTS = torch.ones(400, dtype=torch.float64)
WEIGHTS[:8] = 0

# Arguments of a report, and parts of its sentence and action
IMPOSSIBLE_CASES = {
    "one of 100": (
        (*four_values(1), {}),
        ["In 1 of 100 rows with P(y = 1) = 0, y = 1 occurred.", "Brier score is 4", "between 0.015 and 0.995"],
    ),
    "eight of 100": (
        (*four_values(8), {}),
        ["In 8 of 100 rows with P(y = 1) = 0, y = 1 occurred.", "rounded to 1 decimal: use more digits, or clip"],
    ),
    "certain predictions that fail": (
        (*four_values(0, 3), {}),
        ["In 3 of 100 rows with P(y = 1) = 1, y = 0 occurred.", "between 0.005 and 0.965"],
    ),
    "often wrong": ((*four_values(30), {}), ["30 of 100 rows", "Check the labels and the inputs of these rows"]),
    "rounded": ((ROUNDED, outcomes(Z), {}), ["rows with P(y = 1) = 0", "rounded to 1 decimal"]),
    "classes": (
        (TWENTIETHS / TWENTIETHS.sum(-1, keepdim=True), labels(Z5), {}),
        ["of 500 labels had predicted probability 0", "Clip probabilities to values at least 0.00"],
    ),
    "labels": (
        (*THREE_LABELS, {"task": "multilabel"}),
        ["In 2 of 300 entries with predicted probability 0, outcome 1 occurred", "between 0.0083 and"],
    ),
    "confidences": (
        (*four_values(0, 4), {"task": "confidence"}), ["4 of 100 answers with confidence 1 are wrong"],
    ),
    "decisions": (
        (torch.tensor([0.0, 1.0] * 50), torch.tensor([0, 1] * 45 + [1, 0] * 5), {}),
        ["All predictions are 0 or 1: evaluate probabilities instead of decisions."],
    ),
    "fractional weights": (
        (*four_values(8), {"weights": WEIGHTS * 0.5 + 0.1}), ["In 1.43% of the rows with P(y = 1) = 0"],
    ),
}  # fmt: skip


def decision(preds, target, given, **options):
    return tc.report(preds, target, **{"with_intervals": False, **options, **given}).decision


@pytest.mark.parametrize("case", IMPOSSIBLE_CASES)
@pytest.mark.filterwarnings("ignore:.*got only 0 and 1")
def test_outcomes_with_predicted_probability_0_are_named_first_with_their_number_and_a_remedy(case):
    (preds, target, given), parts = IMPOSSIBLE_CASES[case]
    found = decision(preds, target, given, with_calibration=False)
    assert found.kind == "impossible outcomes"
    assert found.verdict.startswith((f"O{IMPOSSIBLE}", f"Not calibrated: o{IMPOSSIBLE}"))
    assert found.cause.index("This has probability 0 if the model is calibrated") < 250
    text = f"{found.cause} {found.action}"
    assert [part for part in parts if part not in text] == [], text
    assert NO_BETTER not in found.verdict
    assert "No action is needed" not in text


def test_advice_on_impossible_outcomes_does_not_contradict_the_verdict():
    """Without other errors, no calibrator mends predictions of 0, which stay 0 for every temperature."""
    found = decision(*four_values(8), {})
    assert "Use the predictions as they are" not in found.action
    assert "Calibrated" not in found.verdict
    over = decision((3 * Z).sigmoid().mul(10).round() / 10, outcomes(Z), {})
    assert over.verdict.startswith(f"O{IMPOSSIBLE}; ")
    assert over.verdict.endswith("over-confident")
    assert over.calibrator


def test_impossible_outcomes_need_a_positive_weight_and_a_probability_that_is_exactly_0():
    given = {**QUICK, "task": "binary"}
    assert tc.report(*four_values(8), weights=WEIGHTS, **given).decision.kind == "calibrated"
    logits = torch.tensor([200.0, 0.0, -200.0, 1.0] * 50)
    report = tc.report(logits, torch.tensor([0, 1, 0, 1] * 50), from_logits=True, **given)
    assert float(logits.sigmoid()[0]) == 1
    assert math.isfinite(report["nll"])
    assert "probability 0" not in report.sentence
    infinite = torch.tensor([math.inf, 0.0, -math.inf, 1.0] * 50)
    report = tc.report(infinite, torch.tensor([0, 1, 0, 1] * 50), from_logits=True, **given)
    assert "In 50 of 50 rows with P(y = 1) = 1, y = 0 occurred" in report.sentence


def test_a_model_is_called_useless_only_if_neither_nll_nor_brier_score_is_better():
    p, y = four_values(8)
    p = p.clamp(1e-9, 1 - 1e-9)
    report = tc.report(p, y, **QUICK)
    assert report["nce"] > 1
    assert NO_BETTER not in report.sentence
    assert "of that of the class frequencies. Brier score is 5" in report.sentence
    constant = tc.report(torch.full((400,), 0.25), (torch.arange(400) % 4 == 0).long(), **QUICK)
    assert NO_BETTER in constant.sentence


@pytest.mark.parametrize(
    ("value", "low", "high", "degree"),
    [
        (0.2, 0.05, 0.3, "badly"), (0.2, 0.01, 0.3, "clearly"), (0.2, 0.0, 0.3, ""), (0.0433, 0.0, 0.0992, ""),
        (0.05, 0.01, 0.09, "clearly"), (0.01, 0.0, 0.05, "slightly"), (0.01, 0.0, 0.12, ""), (0.3, 0.3, 0.3, "badly"),
    ],
)  # fmt: skip
def test_a_degree_needs_an_interval_that_shows_it(value, low, high, degree):
    assert _degree(value, low, high, SLIGHT, BAD) == degree


@pytest.mark.parametrize(("observed", "expected"), [(0.3, 0.2), (0.0, 0.2), (0.1, 0.3)])
def test_effective_numbers_of_events_below_one_show_no_degree(observed, expected):
    size = tc.report(torch.tensor([0.2, 0.8]), torch.tensor([0, 1]), **QUICK).line("rmsce_debiased")
    size = dataclasses.replace(size, value=0.01, interval=None)
    assert degree_of(size, Ratio.from_counts("Events", observed, expected)) == ""


def test_degree_of_rare_events_is_that_of_the_ratio_of_frequency_and_mean():
    """An RMSCE of 0.01 is a factor of 6 if events are rare. Intervals are close to exact ones (chi-squared)."""
    torch.manual_seed(0)
    q = torch.distributions.Beta(0.5, 50.0).sample((8000,)).double().clamp(1e-12)
    y = torch.bernoulli(q).long()
    ratio = float(y.double().mean() / (1.5 * q.logit()).sigmoid().mean())
    report = tc.report(1.5 * q.logit(), y, from_logits=True, **QUICK)
    assert report["rmsce_debiased"] < 0.02
    assert report.decision.degree == "badly"
    assert f"Events (y = 1) are {ratio:.2g} times as frequent as predicted (95% interval " in report.sentence
    mirrored = tc.report(-1.5 * q.logit(), 1 - y, from_logits=True, **QUICK)
    assert f"Events (y = 0) are {ratio:.2g} times as frequent as predicted" in mirrored.sentence
    few = tc.report(-1 + q.logit(), y, from_logits=True, **QUICK)
    assert few.decision.degree == "badly"
    calibrated = tc.report(q.logit(), y, from_logits=True, **QUICK)
    assert "times as frequent" not in calibrated.sentence
    # scipy.stats.chi2.ppf of 0.025 and 0.975 for 2 k and 2 k + 2 degrees of freedom, divided by 2
    for k, low, high in ((0, 0, 3.689), (5, 1.623, 11.668), (50, 37.111, 65.919)):
        found = Ratio.from_counts("Events", k, 10)
        assert (found.low * 10, found.high * 10) == pytest.approx((low, high), abs=0.06)


@pytest.mark.parametrize(
    ("change", "calibrator", "kind"),
    [
        (lambda z: z - 1, "bias correction", "class bias"),
        (lambda z: z + 0.5, "bias correction", "class bias"),
        (lambda z: 0.6 * z, "temperature scaling", "under-confidence"),
        (lambda z: 1.5 * z, "temperature scaling", "over-confidence"),
    ],
)
def test_the_calibrator_of_a_clear_cause_is_advised(change, calibrator, kind):
    z = normal(1000, 3)
    found = tc.report(change(z), outcomes(z, 13), from_logits=True, with_intervals=False).decision
    assert found.kind in (kind, "spread")
    assert found.calibrator == calibrator
    assert found.action.startswith(f"Add {calibrator}: it cuts NLL by {found.gain:.1f}% (95% interval ")
    assert found.interval.low < found.gain < found.interval.high
    assert (found.interval.low <= 0) == ("This gain is uncertain" in found.action)


def soft_targets(name, q, seed=5):
    """Return soft targets with the expectations `q` `(N, C)`."""
    torch.manual_seed(seed)
    if name == "annotators":
        return torch.distributions.Multinomial(5, q).sample() / 5
    return torch.distributions.Dirichlet(5 * q).sample()


@pytest.mark.parametrize(("targets", "task"), [("annotators", "multiclass"), ("shares", "binary")])
def test_causes_of_miscalibration_are_tested_for_soft_targets(targets, task):
    z = normal(500, 2, 4) if task == "multiclass" else torch.stack((torch.zeros(500), normal(500, 2)), -1)
    t = soft_targets(targets, z.softmax(-1))
    given = {"task": task, "from_logits": True, "with_intervals": False}

    def reported(change):
        preds = change(z)
        preds, target = (preds, t) if task == "multiclass" else (preds[:, 1] - preds[:, 0], t[:, 1])
        return tc.report(preds, target, **given)

    calibrated = reported(lambda z: z)
    assert calibrated.decision.kind == "calibrated"
    assert "No other cause is significant: a temperature and class biases." in calibrated.sentence
    assert calibrated.decision.calibrator == ""
    for factor, kinds in ((1.6, ("over-confidence", "spread")), (0.6, ("under-confidence", "spread"))):
        found = reported(lambda z, factor=factor: factor * z)
        assert found.decision.kind in kinds
        advice = found.recommendation
        assert (advice.preferred, advice.is_significant) == ("temperature scaling", True)
        assert advice.p_value < 0.01
        assert (found.decision.calibrator != "") == (advice.gain >= 5 or found.decision.degree != "slightly")
    biased = reported(lambda z: z + torch.tensor([0.0, 0.8] + [0.0] * (z.shape[-1] - 2)))
    assert (biased.decision.kind, biased.recommendation.preferred) == ("class bias", "bias correction")
    assert "isotonic calibration" in biased.recommendation.rcl
