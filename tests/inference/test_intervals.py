"""Intervals of calibration errors: slow search in scipy, closed forms, coverage, and errors without an interval."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.null_distribution import F64, FEW, MOVED, calibrated, metric_of, miscalibrated, one_bin
from scipy import optimize, stats

import torchcalib as tc
from torchcalib.core.sums import BinStats
from torchcalib.functional.binned import ece_from_bins, esce_from_bins, rmsce_from_bins
from torchcalib.inference import calibration_test
from torchcalib.inference.intervals import ErrorIntervals, GapMoments, absolute, normal_quantile, squared
from torchcalib.inference.simulation import BinCells
from torchcalib.inference.testing import ErrorTest, run_error_test

FORMULAS = {
    "absolute": ece_from_bins,
    "root_mean_square": rmsce_from_bins,
    "debiased": rmsce_from_bins,
    "mean_gap": esce_from_bins,
}
Z = float(stats.norm.ppf(0.975))
KINDS = {
    "absolute": tc.ECE,
    "root_mean_square": tc.RMSCE,
    "debiased": partial(tc.RMSCE, debiased=True),
    "mean_gap": tc.ESCE,
}


def gamma_quantile(z, mean, variance, third):
    """Wilson and Hilferty (1931): a gamma variable divided by its mean is nearly the cube of a normal variable."""
    if variance == 0:
        return mean
    skewness = third / variance**1.5
    skewness = skewness if abs(skewness) > 1e-6 else 1e-6
    return mean + math.sqrt(variance) * 2 / skewness * ((1 + skewness * z / 6 - skewness**2 / 36) ** 3 - 1)


def moments_of_one_bin(kind, gap, variance):
    """Return mean, variance and third central moment of |X| or X^2 for X ~ N(gap, variance), by scipy."""
    if variance == 0:
        return abs(gap) if kind == "absolute" else gap**2, 0, 0
    deviation = math.sqrt(variance)
    if kind == "absolute":
        law = stats.foldnorm(abs(gap) / deviation, scale=deviation)
    else:
        law = stats.ncx2(1, gap**2 / variance, scale=variance)
    mean, variance, skewness = law.stats("mvs")
    return float(mean), float(variance), float(skewness) * float(variance) ** 1.5


def slow_interval(kind, n, expected, outcomes, spread):
    """Return the noise floor and the ends for unweighted bins, bin by bin, with root finding by scipy."""
    total = sum(n)
    bins = [k for k in range(len(n)) if n[k]]
    share = {k: n[k] / total for k in bins}
    confidence = {k: expected[k] / n[k] for k in bins}
    gap = {k: outcomes[k] / n[k] - confidence[k] for k in bins}
    shrunk = {k: gap[k] * n[k] / (n[k] + 1) for k in bins}

    def bounded(k, g):
        return min(max(g, -confidence[k]), 1 - confidence[k])

    def variance_at(k, g):
        return max(spread[k] + n[k] * g * (1 - 2 * confidence[k] - g), 0) / n[k] ** 2

    def between(size):
        mean = sum(share[k] * size[k] for k in bins)
        return sum(share[k] * (size[k] - mean) ** 2 for k in bins) / total

    def shifted(s):
        gaps = {k: bounded(k, shrunk[k] + s) for k in bins}
        variances = {k: variance_at(k, gaps[k]) for k in bins}
        third = [share[k] ** 3 * variances[k] / n[k] * (1 - 2 * (confidence[k] + gaps[k])) for k in bins]
        random = max(between(gap) - sum(share[k] * variance_at(k, shrunk[k]) for k in bins) / total, 0)
        mean = sum(share[k] * gaps[k] for k in bins)
        return mean, sum(share[k] ** 2 * variances[k] for k in bins) + random, sum(third)

    def multiplied(t, gaps_at_1):
        gaps = {k: bounded(k, t * gaps_at_1[k]) for k in bins}
        part = min(t, 1)
        variances = {k: (1 - part) * variance_at(k, 0) + part * variance_at(k, shrunk[k]) for k in bins}
        each = {k: moments_of_one_bin(kind, gaps[k], variances[k]) for k in bins}
        size = {k: abs(gaps[k]) if kind == "absolute" else gaps[k] ** 2 for k in bins}
        sums = [sum(share[k] ** (power + 1) * each[k][power] for k in bins) for power in range(3)]
        return sums[0], sums[1] + between(size), sums[2], math.sqrt(sum(share[k] * gaps[k] ** 2 for k in bins))

    def crossing(moments, observed, z, lower, upper):
        def excess(t):
            mean, variance, third = moments(t)[:3]
            return gamma_quantile(z, mean, variance, third) - observed

        if excess(lower) >= 0 or excess(upper) <= 0:  # the observation is outside the range of the quantiles
            return lower if excess(lower) >= 0 else upper
        return optimize.brentq(excess, lower, upper, xtol=1e-12)

    mean_gap = sum(share[k] * gap[k] for k in bins)
    half = 0.5 / total  # continuity correction
    low = shifted(crossing(shifted, mean_gap - half, Z, -0.9, 0.9))[0]
    high = shifted(crossing(shifted, mean_gap + half, -Z, -0.9, 0.9))[0]
    if kind == "mean_gap":
        return 0, low, high
    largest = max(high, -low)
    power = 1 if kind == "absolute" else 2
    kind, debiased = ("root_mean_square", True) if kind == "debiased" else (kind, False)
    noise = {k: max(variance_at(k, shrunk[k]), 1 / n[k] ** 2) for k in bins}
    away = {k: math.copysign(math.sqrt(gap[k] ** 2 + noise[k]), gap[k]) for k in bins}
    observed = sum(share[k] * abs(gap[k]) ** power for k in bins)
    value = observed ** (1 / power)
    t_low = crossing(lambda t: multiplied(t, gap), max(value - half, 0) ** power, Z, 0, 50)
    t_high = crossing(lambda t: multiplied(t, away), (value + half) ** power, -Z, 0, 50)
    if debiased:
        return 0, multiplied(t_low, gap)[3], max(multiplied(t_high, away)[3], largest)

    def expected_error(moments):
        mean, variance = moments[:2]
        if kind == "absolute":
            return mean
        shape = mean**2 / variance
        return math.sqrt(mean / shape) * math.exp(math.lgamma(shape + 0.5) - math.lgamma(shape))

    floor = expected_error(multiplied(0, gap))
    low = expected_error(multiplied(t_low, gap))
    if t_low == 0:  # the noise of the observed frequencies, without gaps
        low = min(low, expected_error(multiplied(1, dict.fromkeys(bins, 0.0))))
    # The noise floor varies with the confidences: first-order variance of sum sqrt(S_b), or of sum S_b / n_b.
    s = {k: spread[k] / n[k] for k in bins}
    scatter = {k: ((expected[k] - spread[k]) / n[k] - confidence[k] ** 2) * (1 - 2 * confidence[k]) ** 2 for k in bins}
    if kind == "absolute":
        root = {k: math.sqrt(spread[k]) / total for k in bins}
        part = {k: x * floor / sum(root.values()) for k, x in root.items()}
        variance = sum(part[k] ** 2 * (1 + scatter[k] / s[k] ** 2) / (4 * n[k]) for k in bins) - floor**2 / (4 * total)
    else:
        empty = {k: math.exp(-n[k]) for k in bins}
        squares = sum(s[k] ** 2 * empty[k] * (1 - empty[k]) + scatter[k] / n[k] for k in bins) / total**2
        variance = squares / (4 * floor**2)
    margin = Z * math.sqrt(variance)
    high = floor + math.hypot(expected_error(multiplied(t_high, away)) - floor, margin)
    return floor, low - margin * max(1 - t_low, 0), max(high, largest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("law", "moved"), [("uniform", "temperature 1.4"), ("beta(1,12)", "shift 0.4")])
@pytest.mark.parametrize("n", [100, 3_000])
def test_interval_equals_a_slow_search(kind, law, moved, n):
    (p,), (y,), _ = miscalibrated(law, n, 1, MOVED[moved])
    metric = tc.ECE(task="binary", n_bins=6)
    metric.update(p, y)
    cells = BinCells.from_bins(metric.statistic())
    columns = [getattr(cells, name).tolist() for name in ("n", "expected", "outcomes", "spread")]
    floor, *expected = slow_interval(kind, *columns)
    cells = cells.map(lambda x: x.unsqueeze(0))
    z = normal_quantile(0.95, cells.n)
    floor_and_error = torch.tensor([[floor], [0]], dtype=F64)
    found = ErrorIntervals(cells, z).ends(kind, *floor_and_error)
    assert [float(end) for end in found] == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert n == 100 or kind == "mean_gap" or expected[0] > floor, "the lower end is found by a search"


def test_moments_of_one_bin_equal_scipy():
    both_signs = (math.nan,)
    for formula, kind, unknown in ((absolute, "absolute", both_signs), (squared, "root_mean_square", 2 * both_signs)):
        for gap, variance in ((0.0, 0.01), (0.05, 0.01), (-0.3, 0.02), (0.2, 1e-4)):
            found = formula(*(torch.tensor([x], dtype=F64) for x in (gap, variance, *unknown)))
            assert [float(x) for x in found] == pytest.approx(
                moments_of_one_bin(kind, gap, variance), rel=1e-9, abs=1e-14
            )


def test_quantiles_of_a_gamma_variable_are_those_of_scipy():
    for shape in (10.0, 50.0, 1e3):
        found = GapMoments(*(torch.tensor(shape * x, dtype=F64) for x in (1, 1, 2)))
        for z in (-2.0, -1.0, 1.0, 2.0):
            expected = stats.gamma.ppf(stats.norm.cdf(z), shape)
            assert float(found.quantile(torch.tensor(z, dtype=F64))) == pytest.approx(expected, rel=0.02)
        root = stats.gamma(shape).expect(np.sqrt)
        assert float(found.mean_of_root) == pytest.approx(root, rel=1e-6)


def test_interval_of_the_signed_error_of_one_bin_is_close_to_wilson():
    """The variance is that of each candidate frequency, as in the interval of Wilson for a single frequency."""
    p, n, k = 0.7, 300, 180
    mean_gap = ErrorTest(lambda b: (b.share * b.gap).sum(-1), signed=True, interval="mean_gap")
    found = run_error_test(mean_gap, one_bin(p, n, k))
    wilson = stats.binomtest(k, n).proportion_ci(0.95, "wilson")
    assert (float(found.low) + p, float(found.high) + p) == pytest.approx((wilson.low, wilson.high), abs=4e-3)


@pytest.mark.parametrize("n", [10, 50, 1_000])
@pytest.mark.parametrize("error", [tc.ECE, tc.RMSCE, tc.ACE])
def test_certain_and_right_rows_leave_the_error_rates_of_the_exact_interval_possible(error, n):
    """Zero errors in n rows have a probability of at least 0.05 up to an error rate of 1 - 0.05^(1/n)."""
    for confidence in (0, 1):
        p = torch.full((n,), float(confidence), dtype=F64)
        found = calibration_test(error(task="binary"), p, p.long())
        assert (float(found.statistic), float(found.noise_floor), float(found.low)) == (0, 0, 0)
        one_sided, two_sided = 1 - 0.05 ** (1 / n), 1 - 0.025 ** (1 / n)
        assert one_sided < float(found.high) < 1.2 * two_sided


@pytest.mark.parametrize("n", [30, 1_000])
@pytest.mark.parametrize("kind", KINDS)
def test_intervals_of_certain_predictions_cover_every_error_rate(kind, n):
    """Exact coverage: the sum of binomial probabilities of the numbers of errors whose interval contains the rate."""
    wrong = np.arange(min(n, 60) + 1)
    sums = torch.tensor([[n, 0, k, 0, 0] for k in wrong], dtype=F64).unsqueeze(-1)
    test = ErrorTest(FORMULAS[kind], signed=kind == "mean_gap", interval=kind)
    found = run_error_test(test, BinStats(sums, has_noise=True), n_replicates=1)
    for expected in (0.05, 0.1, 0.34, 0.8, 1.5, 3, 5, 10, 15):  # number of errors
        rate = expected / n
        covers = ((found.low <= rate) & (rate <= found.high)).numpy()
        assert float(stats.binom.pmf(wrong[covers], n, rate).sum()) > 0.92, expected


def test_certain_rows_do_not_shrink_the_interval_of_other_rows():
    """Half of the rows are certain and right. The upper end must be that of the other half alone."""
    (p,), (y,), _ = calibrated("uniform", 200, 1)
    alone = calibration_test(tc.ECE(task="binary"), p, y)
    both = calibration_test(
        tc.ECE(task="binary"), torch.cat((p, torch.ones_like(p))), torch.cat((y, torch.ones_like(y)))
    )
    assert float(both.high) > 0.9 * float(alone.high) / 2


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        pytest.param(kind, moved, marks=[pytest.mark.extended] * ((i + j) % 2 or j == 2))
        for i, kind in enumerate(KINDS)
        for j, moved in enumerate((None, "temperature 1.4", "shift 0.4"))
    ],
)
def test_intervals_contain_the_value_and_cover_the_expected_excess(kind, moved):
    """The tolerance is three standard deviations of a coverage of 95% in 1,000 data sets.

    The expected excess is the mean over the data sets. A calibrated model has none. Its interval starts at the noise
    floor unless the error is above its 97.5% quantile.
    """
    p, y, _ = calibrated("uniform", 500, 1_000) if moved is None else miscalibrated("uniform", 500, 1_000, MOVED[moved])
    found = metric_of(KINDS[kind], p, y).test(n_replicates=199)
    assert bool((found.low <= found.statistic).all())
    assert bool((found.statistic <= found.high).all())
    base = 0 if kind == "debiased" else found.noise_floor
    excess = found.statistic - base
    if kind in ("debiased", "mean_gap"):
        base, excess = torch.zeros_like(found.low), found.statistic
    if kind == "debiased":  # the debiased value is clamped to 0, so its mean is not that of the error without noise
        frequency = p if moved is None else (MOVED[moved](p.logit())).sigmoid()
        excess = metric_of(tc.RMSCE, p, frequency).compute()
    target = excess.mean() if moved else torch.zeros((), dtype=F64)
    covered = (found.low - base <= target + 1e-12) & (target <= found.high - base)
    assert float(covered.double().mean()) > 0.95 - 3 * math.sqrt(0.95 * 0.05 / 1_000)


def test_errors_of_rare_events_have_no_interval():
    """At least 5 events and 5 complements must be expected, unless all predictions are certain."""
    for n, has_interval in ((90, False), (110, True)):  # 4.5 and 5.5 expected events
        p = torch.full((n,), 0.05, dtype=F64)
        for confidence in (p, 1 - p):
            y = (torch.arange(n) % 20 == 0).long()
            found = {e: calibration_test(e(task="binary"), confidence, y, **FEW) for e in (tc.ECE, tc.ACE, tc.RMSCE)}
            assert {bool(x.low.isfinite() & x.high.isfinite()) for x in found.values()} == {has_interval}
            assert bool(calibration_test(tc.ESCE(task="binary"), confidence, y, **FEW).low.isfinite())


def test_intervals_of_calibrated_models_cover_the_expected_error_over_samples():
    """The target is an expectation over confidences and outcomes; three standard deviations of 95% in 500 data sets."""
    for law, n in (("uniform", 60), ("beta(1,12)", 100)):
        p, y, _ = calibrated(law, n, 500)
        others = calibrated(law, n, 5_000, seed=1)
        for error in (tc.ECE, tc.RMSCE):
            found, target = metric_of(error, p, y).test(n_replicates=99), metric_of(error, *others[:2]).compute().mean()
            printed = found.low.isfinite()
            covered = ((found.low <= target) & (target <= found.high))[printed].double().mean()
            assert float(printed.double().mean()) > 0.9
            assert float(covered) > 0.95 - 3 * math.sqrt(0.95 * 0.05 / 500)


def test_interval_is_wider_at_a_higher_level_and_shrinks_with_the_square_root_of_n():
    (p,), (y,), _ = miscalibrated("uniform", 8_000, 1, MOVED["temperature 1.4"])
    for error in (tc.ECE, tc.ESCE, tc.RMSCE):
        test = partial(calibration_test, error(task="binary"))
        low, middle, high = (test(p, y, level=level) for level in (0.5, 0.9, 0.99))
        widths = [float(x.high - x.low) for x in (low, middle, high)]
        # widths of a normal distribution, whose quantiles are 0.674, 1.645 and 2.576
        assert widths[1] / widths[0] == pytest.approx(1.645 / 0.674, rel=0.15)
        assert widths[2] / widths[1] == pytest.approx(2.576 / 1.645, rel=0.15)
        few = test(p[:2_000], y[:2_000], level=0.9)
        assert float(few.high - few.low) / widths[1] == pytest.approx(2, rel=0.35)


def test_weights_count_copies_and_floating_weights_widen_the_interval():
    """Two copies of each row halve the variance; floating weights of 2 change nothing."""
    (p,), (y,), _ = miscalibrated("uniform", 2_000, 1, MOVED["temperature 1.4"])
    test = partial(calibration_test, tc.ECE(task="binary"), p, y)
    plain, copies, important = (test(weights=w) for w in (None, torch.full((2_000,), 2), torch.full((2_000,), 2.0)))
    doubled = calibration_test(tc.ECE(task="binary"), p.repeat(2), y.repeat(2))
    assert float(plain.excess) == float(plain.statistic) - float(plain.noise_floor)
    for name in ("low", "high"):
        assert float(getattr(copies, name)) == pytest.approx(float(getattr(doubled, name)), rel=1e-6)
        assert float(getattr(important, name)) == pytest.approx(float(getattr(plain, name)), rel=1e-6)


def test_averages_and_errors_without_a_method_have_no_interval():
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(200, 3, generator=generator, dtype=F64).softmax(-1)
    target = torch.randint(0, 3, (200,), generator=generator)
    how = {"task": "multiclass", "num_classes": 3, "mode": "classwise"}
    average = calibration_test(tc.ECE(**how), preds, target, **FEW)
    assert bool(average.low.isnan() & average.high.isnan() & average.p_value.isfinite())
    classes = calibration_test(tc.ECE(**how, average=None), preds, target, **FEW)
    alone = calibration_test(tc.ECE(task="binary"), preds[:, 1], (target == 1).long(), **FEW)
    assert classes.low.shape == (3,)
    # each class is a binary task; the simulated noise floors differ
    excess = classes[1].high - classes[1].noise_floor
    assert float(excess) == pytest.approx(float(alone.high - alone.noise_floor), abs=1e-3)
    for error in (tc.MCE, tc.KS, tc.CORP, tc.TCE, tc.ATB, tc.SmECE):
        found = calibration_test(error(task="binary"), preds[:50, 1], (target[:50] == 1).long(), **FEW)
        assert math.isnan(found.low), error
        assert math.isnan(found.high), error


def test_dropped_rows_do_not_change_the_interval_of_equal_mass_bins():
    (p,), (y,), _ = miscalibrated("uniform", 300, 1, MOVED["shift 0.4"])
    padded = torch.cat((p, torch.full((20,), torch.nan, dtype=F64)))
    dropping = tc.ACE(task="binary", nan_policy="drop")
    found = calibration_test(dropping, padded, torch.cat((y, torch.zeros(20, dtype=torch.int64))), **FEW)
    expected = calibration_test(tc.ACE(task="binary"), p, y, **FEW)
    assert (float(found.low), float(found.high)) == pytest.approx((float(expected.low), float(expected.high)))
