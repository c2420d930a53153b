"""Diagnosis: statistics of causes equal those of slow fits. For each cause in all texts see test_decision.py."""

import math

import pytest
import torch
from helpers.reports import QUICK, relabelled
from scipy.optimize import minimize, minimize_scalar

import torchcalib as tc
from torchcalib.calibration import BiasCorrection, TemperatureScaling
from torchcalib.inference.adjustment import holm
from torchcalib.reporting.calibration import calibration_stage
from torchcalib.reporting.decision import CAUSES_LEVEL, ERROR_LEVEL, LEVEL, CandidateCause, cause_of
from torchcalib.reporting.diagnosis import _biases_of_classes, evidence_of
from torchcalib.reporting.findings import significant_labels

N, F64 = 1500, torch.float64


def drawn(logits, task, seed=1):
    """Return targets from the probabilities of logits."""
    g = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        return torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)
    return torch.bernoulli(logits.sigmoid(), generator=g).long()


def calibrated(task, scale=1.5):
    """Return logits of 4 classes, or log-odds of one or of 3 labels, and targets from their probabilities."""
    shape = {"binary": (N,), "multiclass": (N, 4), "multilabel": (N, 3)}[task]
    logits = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return logits, drawn(logits, task)


def test_diagnosis_is_made_without_calibrators_labels_classes_and_for_one_row():
    def found(preds, target, task="binary", **given):
        return tc.report(torch.as_tensor(preds), torch.as_tensor(target), task=task, **{**QUICK, **given}).decision

    quick = found([0.9] * 100, [1] * 60 + [0] * 40)
    assert (quick.kind, quick.verdict) == ("class bias", "Badly biased towards y = 1")
    assert quick.cause.startswith("P(y = 1) is too high: mean P(y = 1) is 90.0%, its frequency 60.0%. ")
    assert quick.size.startswith("RMSCE, debiased: 0.2")
    named = found([0.6] * 1000, [1] * 650 + [0] * 350, class_names=["ham", "spam"])
    assert named.verdict == "Clearly biased towards ham"
    assert named.cause.startswith("P(spam) is too low: mean P(spam) is 60.0%, its frequency 65.0%.")
    uneven = found([0.2] * 500 + [0.8] * 500, [1] * 200 + [0] * 300 + [1] * 300 + [0] * 200)
    assert (uneven.kind, uneven.verdict) == ("uneven", "Badly miscalibrated in some ranges")
    assert uneven.cause.startswith(
        "The largest gaps: the probability is too high between 80% and 87% and too low between 20% and 27%."
    )
    assert found([0.6] * 1000, [1] * 600 + [0] * 400).kind == "calibrated"
    few = found([0.6] * 10, [1] * 6 + [0] * 4)
    assert (few.kind, few.degree) == ("too little data", "")
    assert "This sample is too small to detect miscalibration" in few.cause
    for n in (1, 200):
        one_class = found([0.7] * n, [1] * n, with_calibration=True)
        assert (one_class.kind, one_class.degree, one_class.calibrator) == ("one class", "", "")
        assert one_class.verdict == "Only y = 1 in the targets"
    impossible = found([0.0, 0.5], [1, 0])  # y = 1 has probability 0 for a calibrated model
    assert (impossible.kind, impossible.degree) == ("impossible outcomes", "")  # the interval of RMSCE contains 0
    logits, _ = calibrated("multiclass")
    soft = found((3 * logits).softmax(-1), logits.softmax(-1), "multiclass", with_calibration=True)
    assert (soft.kind, soft.verdict) == ("over-confidence", "Badly over-confident")
    assert soft.action.startswith("Add temperature scaling: it cuts NLL by ")
    shares = logits.softmax(-1)
    assert found(shares, shares, "multiclass", with_calibration=True).kind == "calibrated"


def test_confidences_are_over_or_under_confident_and_calibration_keeps_their_accuracy(tmp_path):
    """600 confidences of 0.6 and of 0.7, of which 20% and 40% are correct: the threshold 0.5 is irrelevant."""
    correct = [1] * 120 + [0] * 480 + [1] * 240 + [0] * 360
    rows = [f"{0.6 if k < 600 else 0.7},{y}" for k, y in enumerate(correct)]
    (tmp_path / "a.csv").write_text("\n".join(["confidence,correct", *rows]))
    report = tc.Report.from_files(tmp_path / "a.csv", with_intervals=False)
    found = report.decision
    assert (found.kind, found.verdict) == ("over-confidence", "Badly over-confident")
    assert found.cause.startswith("Confidence is too high: mean confidence is 65.0%, accuracy 30.0%.")
    assert found.calibrator in found.action
    assert "accuracy" not in found.action
    assert {line.accuracy for line in report.calibration.lines} == {0.3}


def fits_of(logits, target, task, weights=None, effect=1.0):
    """Return the evidence for each cause."""
    options = {"from_logits": True, **({} if weights is None else {"weights": weights})}
    p = TemperatureScaling().read(logits, target, task=task, options=options)
    _, whole, _ = calibration_stage(p, "")
    return evidence_of(p, whole.fits, whole.nll, effect)


def log_likelihoods(logits, target, task):
    """Return the log-probability of each label, as a tensor with a function of logits."""
    if task == "multiclass":
        return -torch.nn.functional.cross_entropy(logits, target, reduction="none")
    return -torch.nn.functional.binary_cross_entropy_with_logits(logits, target.double(), reduction="none")


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
def test_statistics_equal_twice_the_gain_of_log_likelihood_of_scipy(task, weighted):
    """Wilks' statistic 2 (log L1 - log L0), with the maximum log L1 found by scipy.

    The error of a maximum is quadratic in that of its parameters, 1e-6: with a curvature of about 300 below 1e-9.
    Weights that are not counts are scaled by sum w / sum w^2, for the effective number of samples (Kish).
    """
    logits, target = calibrated(task)
    logits = 1.3 * logits[:300] + 0.3 * (torch.arange(logits[0].numel()) == 0).reshape(logits[0].shape)
    target = relabelled(target[:300], 4 if task == "multiclass" else 2, 0.1)
    w = 0.5 + torch.arange(300, dtype=torch.float64) % 3 if weighted else torch.ones(300, dtype=torch.float64)
    scale = w.sum() / w.square().sum()
    found = fits_of(logits, target, task, w if weighted else None, effect=2.0)
    of_kind = {candidate.kind: candidate for candidate in reversed(found.candidates)}  # biases of all classes
    columns = [slice(None)] if task != "multilabel" else [(slice(None), k) for k in range(3)]

    def gain(change, bounds, rows=slice(None), at=(slice(None),)):
        """Return the statistic with its parameter for a change of one column of labels or of all logits."""

        def loss(x):
            return -float((w[rows] * change(logits[at], target[at], x)[rows]).sum())

        best = minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-9})
        raw = float((w[rows] * log_likelihoods(logits[at], target[at], task)[rows]).sum())
        return float(scale) / 2 * 2 * (-best.fun - raw), best.x

    def warmed(z, y, t):
        return log_likelihoods(z / t, y, task)

    def mixed(z, y, e):
        n_classes = 4 if task == "multiclass" else 2
        return ((1 - e) * log_likelihoods(z, y, task).exp() + e / n_classes).log()

    temperature = of_kind.get("over-confidence") or of_kind["under-confidence"]
    by_column = [gain(warmed, (0.2, 5), at=at if isinstance(at, tuple) else (at,)) for at in columns]
    assert temperature.statistic == pytest.approx(sum(statistic for statistic, _ in by_column), abs=1e-6)
    assert temperature.value == pytest.approx(sum(t for _, t in by_column) / len(columns), rel=1e-3)
    if task == "multilabel":
        mixtures = minimize_scalar(
            lambda e: -float((w.unsqueeze(-1) * mixed(logits, target, e)).sum()), bounds=(0, 1), method="bounded",
            options={"xatol": 1e-9},
        )  # fmt: skip
        raw = float((w.unsqueeze(-1) * log_likelihoods(logits, target, task)).sum())
        noise, rate = float(scale) * (-mixtures.fun - raw), mixtures.x
    else:
        noise, rate = gain(mixed, (0, 1))
    assert of_kind["label noise"].statistic == pytest.approx(noise, abs=1e-6)
    assert of_kind["label noise"].value == pytest.approx(rate, abs=1e-6)

    n_biases = {"binary": 1, "multiclass": 4, "multilabel": 3}[task]

    def shifted(b):
        b = torch.from_numpy(b).requires_grad_()
        z = logits + b if task != "binary" else logits + b[0]
        weights = w.unsqueeze(-1) if task == "multilabel" else w
        loss = -(weights * log_likelihoods(z, target, task)).sum()
        (gradient,) = torch.autograd.grad(loss, b)
        return float(loss.detach()), gradient.numpy()

    zeros = torch.zeros(n_biases, dtype=torch.float64).numpy()
    best = minimize(shifted, zeros, jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-8})
    biases = float(scale) * (shifted(zeros)[0] - best.fun)
    assert of_kind["class bias"].statistic == pytest.approx(biases, abs=1e-6)
    assert of_kind["class bias"].n_parameters == n_biases - (task == "multiclass")
    if task == "multiclass":
        bad = of_kind["bad class"]
        statistic, t = gain(warmed, (0.1, 10), rows=logits.argmax(-1) == bad.which)
        assert (bad.statistic, bad.value) == pytest.approx((statistic, t), abs=1e-5)
        assert bad.n_choices == 4


def test_statistics_count_copies_and_do_not_depend_on_the_scale_of_weights():
    logits, target = calibrated("multiclass")
    logits, target = 2 * logits[:300], target[:300]
    counts = torch.arange(300) % 3
    repeats = fits_of(logits.repeat_interleave(counts, 0), target.repeat_interleave(counts), "multiclass")
    plain = fits_of(logits, target, "multiclass")
    for found, expected in (
        (fits_of(logits, target, "multiclass", counts), repeats),
        (fits_of(logits, target, "multiclass", torch.full((300,), 0.01, dtype=torch.float64)), plain),
    ):
        for mine, theirs in zip(found.candidates, expected.candidates, strict=True):
            assert (mine.kind, mine.which) == (theirs.kind, theirs.which)
            assert (mine.statistic, mine.value) == pytest.approx(
                (theirs.statistic, theirs.value), rel=1e-6, nan_ok=True
            )


def test_cause_has_the_largest_statistic_after_penalties_for_parameters_and_choices():
    """p-values of chi-squared tables: P(X > 3.841) = 0.05 for 1 degree of freedom, P(X > 16.919) = 0.05 for 9."""
    assert CandidateCause("over-confidence", 3.8414588, 1).p_value == pytest.approx(LEVEL, abs=1e-7)
    assert CandidateCause("class bias", 16.9189776, 9).p_value == pytest.approx(LEVEL, abs=1e-7)
    assert CandidateCause("bad class", 6.6348966, 1, n_choices=5).p_value == pytest.approx(5 * 0.01, abs=1e-7)
    simple, flexible = CandidateCause("over-confidence", 40.0, 1), CandidateCause("class bias", 55.9, 9)
    assert cause_of([simple, flexible], True) is simple
    assert cause_of([simple, flexible._replace(statistic=56.1)], True).kind == "class bias"
    weak, none = CandidateCause("over-confidence", 5.5, 1), CandidateCause("label noise", 0.0, 1)  # p = 0.019
    assert cause_of([weak, none], is_significant=True) is weak
    assert cause_of([weak], is_significant=False) is weak
    assert cause_of([weak, none], is_significant=False) is None, "half of the level for each of two causes"
    assert CAUSES_LEVEL + ERROR_LEVEL == LEVEL


def test_copies_of_each_row_in_a_cluster_carry_no_information():
    logits, target = (x[:150] for x in calibrated("binary"))
    given = {"task": "binary", "from_logits": True, "with_intervals": False}
    whole = tc.report(1.35 * logits.repeat(10), target.repeat(10), **given)
    assert whole.decision.kind != "calibrated"
    clustered = tc.report(1.35 * logits.repeat(10), target.repeat(10), clusters=torch.arange(150).repeat(10), **given)
    assert clustered.decision.kind == "clusters", "copies of a row have one label"


def test_diagnosis_rarely_finds_a_cause_in_calibrated_samples():
    """Without the causes, 2.5% of 40 calibrated samples have p < 0.025 for ECE; 5 is four standard deviations more."""
    generator, accused = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        p = torch.rand(30, generator=generator) ** 4
        report = tc.report(p, torch.bernoulli(p, generator=generator).long(), task="binary", **QUICK)
        is_accused = report.decision.kind not in ("calibrated", "too little data")
        assert is_accused == (report.main_line.p_value < ERROR_LEVEL)
        accused += is_accused
    assert accused <= 5


def test_biases_of_classes_have_a_deviance_that_is_valid_for_few_labels():
    """Deviance of the less frequent outcome, 2 (k log(k / m) - (k - m)), divided by the dispersion v / m."""
    n, scale = 40.0, 0.5
    mean = torch.tensor([0.02, 0.05, 0.13, 0.8], dtype=F64)
    frequency = torch.tensor([0.0, 0.1, 0.15, 0.75], dtype=F64)
    variance = n * mean * (1 - mean) * 0.9
    found = _biases_of_classes(mean, frequency, variance, n, scale)
    for q, f, v, statistic in zip(mean.tolist(), frequency.tolist(), variance.tolist(), found.tolist(), strict=True):
        m, k = (scale * n * min(x, y) for x, y in ((q, 1 - q), (f, 1 - f)))
        expected = 2 * ((k * math.log(k / m) if k else 0) - (k - m)) * m / (scale * v)
        assert statistic == pytest.approx(expected)
    # For many labels, it is the squared gap in standard errors.
    many = _biases_of_classes(mean, mean + 1e-4, 1e6 * variance, 1e6 * n, 1.0)
    assert many.tolist() == pytest.approx((1e-8 * (1e6 * n) ** 2 / (1e6 * variance)).tolist(), rel=0.01)
    # Calibrated predictions of 200 classes for 250 samples: 10 data sets have at most one wrong alarm.
    wrong = 0
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        logits = torch.randn(250, 200, generator=g)
        target = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)
        p = TemperatureScaling().read(logits, target, task="multiclass", options={"from_logits": True})
        fits = {kind: kind().fit_to(p) for kind in (TemperatureScaling, BiasCorrection)}
        nll = {kind: p.with_values(fit.calibrated(p.values, True)).cross_entropy for kind, fit in fits.items()}
        wrong += cause_of(evidence_of(p, fits, nll, 1.0).candidates, is_significant=False) is not None
    assert wrong <= 1


def test_noise_floor_does_not_treat_importance_weights_as_copies():
    """For one bin of 10,000 samples with confidence 0.9, the mean |gap| is sqrt(2 / pi * 0.9 * 0.1 / 10,000).

    The noise floor is a mean over 999 replicates: 4 of its standard deviations are 10 %.
    """
    p, y = torch.full((10_000,), 0.9), (torch.arange(10_000) % 10 < 7).long()
    floor = pytest.approx(math.sqrt(2 / math.pi * 0.9 * 0.1 / 10_000), rel=0.1)
    given = [(p, y, torch.full((10_000,), scale)) for scale in (1e-4, 1.0, 1e4)]
    for preds, target, weights in (*given, (p[:10], y[:10], torch.full((10,), 1000))):
        report = tc.report(preds, target, task="binary", weights=weights, **QUICK)
        assert report.main_line.noise_floor == floor
        assert report.decision.verdict == "Badly biased towards y = 1"


def test_tiny_groups_infinite_nll_and_reversed_predictions_are_not_blamed_on_groups_or_labels():
    logits, target = calibrated("binary")
    tiny = torch.arange(400) // 2
    few = tc.report(logits[:400], target[:400], task="binary", from_logits=True, groups=tiny, **QUICK)
    assert few.decision.kind != "bad group"
    nowhere = torch.full((400,), -1)
    assert tc.report(logits[:400], target[:400], from_logits=True, groups=nowhere, **QUICK).groups is None
    wrong = 3 * logits
    wrong[(target == 1).nonzero()[0]] = -math.inf
    infinite = tc.report(wrong, target, task="binary", from_logits=True, with_intervals=False)
    assert infinite.decision.kind == "impossible outcomes"
    assert infinite.decision.verdict.endswith("over-confident")
    assert "1 of 1 rows with P(y = 1) = 0" in infinite.decision.cause
    reversed_ = tc.report(-3 * logits, target, task="binary", from_logits=True, with_intervals=False).decision
    assert "(confident predictions are not right more often than others)" in reversed_.cause
    assert reversed_.action.endswith("Check the order of the classes and the labels.")


def maximum(log_likelihood, bounds):
    """Return the likelihood-ratio statistic of a slope against 1, and the slope with the largest log-likelihood."""
    best = minimize_scalar(lambda x: -log_likelihood(x), bounds=bounds, method="bounded", options={"xatol": 1e-9})
    return 2 * (-best.fun - log_likelihood(1)), best.x


def other_classes(change):
    """Return the candidates on the classes below the top label by kind, with probabilities and targets of 4 classes."""
    logits, target = calibrated("multiclass")
    q = change(logits).softmax(-1)
    found = fits_of(q.log(), target, "multiclass").candidates
    return {each.kind: each for each in found}, q.tolist(), target.tolist()


def swapped_below_the_top(z):
    return torch.where((z.argmax(-1) < 2).unsqueeze(-1), z[:, [0, 1, 3, 2]], z)


def test_temperature_of_the_other_classes_maximises_the_likelihood_given_that_the_top_class_is_wrong():
    """log r_y^(1/T) - log sum_k r_k^(1/T) over the classes k that are not the top class, for labels y that are not."""
    found, q, target = other_classes(lambda z: torch.where(z == z.amax(-1, keepdim=True), z, 2 * z - 3))

    def log_likelihood(slope):
        total = 0.0
        for row, y in zip(q, target, strict=True):
            top = row.index(max(row))
            if y != top:
                total += math.log(row[y]) * slope - math.log(sum(x**slope for k, x in enumerate(row) if k != top))
        return total

    candidate, (statistic, slope) = found["other classes"], maximum(log_likelihood, (0.01, 5))
    # Log-likelihoods are sums of 1,500 terms near 1.
    assert candidate.statistic == pytest.approx(statistic, abs=1e-6)
    assert candidate.value == pytest.approx(1 / slope, rel=1e-4)
    assert candidate.p_value < CAUSES_LEVEL / 10


def test_swapped_classes_have_a_negative_slope_of_their_log_odds():
    """Sum of log sigmoid(slope * log-odds) over samples with one of both labels, of which none is the top class."""
    found, q, target = other_classes(swapped_below_the_top)
    candidate = found["swapped classes"]
    assert divmod(candidate.which, 4) == (2, 3)

    def log_likelihood(slope):
        total = 0.0
        for row, y in zip(q, target, strict=True):
            if y in (2, 3) and row.index(max(row)) not in (2, 3):
                total -= math.log1p(math.exp(-slope * math.log(row[y] / row[5 - y])))
        return total

    statistic, slope = maximum(log_likelihood, (-5, 5))
    assert candidate.value == pytest.approx(slope, rel=1e-4)
    assert candidate.value < 0
    assert candidate.statistic == pytest.approx(statistic, abs=1e-6)
    assert 0 < candidate.n_choices <= 2 * 6, "pairs of 4 classes, of all samples and of those below the top"


def test_confusion_has_the_largest_poisson_deviance_of_a_predicted_class_and_a_label():
    """2 (k log(k / m) - (k - m)) for k labels and a sum m of probabilities."""
    found, q, target = other_classes(lambda z: z + 2 * (torch.arange(4) == 1) * (z.argmax(-1, keepdim=True) == 0))
    deviances = {}
    for predicted in range(4):
        rows = [(row, y) for row, y in zip(q, target, strict=True) if row.index(max(row)) == predicted]
        for label in range(4):
            k, m = sum(y == label for _, y in rows), sum(row[label] for row, _ in rows)
            if label != predicted:
                deviances[predicted, label] = 2 * ((k * math.log(k / m) if k else 0) - (k - m)), k / len(rows), m
    candidate = found["confusion"]
    predicted, label = divmod(candidate.which, 4)
    statistic, share, expected = deviances[predicted, label]
    assert (predicted, label) == max(deviances, key=lambda pair: deviances[pair][0])
    assert candidate.statistic == pytest.approx(statistic, abs=1e-6)
    n = sum(row.index(max(row)) == predicted for row in q)
    assert (candidate.value, candidate.expected) == (pytest.approx(share), pytest.approx(expected / n))
    assert candidate.n_choices == 12


def test_labels_are_counted_with_the_adjustment_of_holm():
    """Holm (1979): the k-th smallest of n p-values is compared with 0.05 / (n - k + 1), until one is not below."""
    for p_values, expected in (
        ([0.02, 0.001, 0.9, 0.016, 0.03], [1]),  # 0.016 >= 0.05 / 4
        ([0.026, 0.001, 0.9, 0.012, 0.0166], [1, 3, 4]),
        ([0.02, 0.03], [0, 1]),
    ):
        assert significant_labels(holm(torch.tensor(p_values))) == expected


def test_words_of_a_direction_need_a_significant_gap():
    """Two classes swapped below the top label do not change the top label, and half over- and half under-confident
    predictions are not called label noise."""
    logits, target = calibrated("multiclass")
    swapped = tc.report(swapped_below_the_top(logits), target, from_logits=True, with_intervals=False).decision
    assert swapped.kind == "swapped classes"
    assert swapped.verdict == "Clearly miscalibrated for class 2 and class 3"
    z, y = calibrated("binary", 2)
    half = torch.where(torch.arange(N) % 2 == 0, 2.5 * z, z / 2.5)
    uneven = tc.report(half, y, from_logits=True, with_intervals=False).decision
    assert uneven.kind in ("uneven", "spread")
    for decision in (swapped, uneven):
        text = decision.sentence + decision.action
        assert not any(word in text.lower() for word in ("confident", "label noise", "too high:", "too low:"))
