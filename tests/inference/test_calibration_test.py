"""Noise floors and p-values: binomial distribution, slow loops over replicates, validity, and chunking."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from helpers.null_distribution import (
    CONFIDENCES,
    ERRORS,
    F64,
    FEW,
    calibrated,
    check_uniform,
    check_valid,
    metric_of,
    one_bin,
    same,
)
from scipy import stats

import torchcalib as tc
from torchcalib.core.sums import BinStats
from torchcalib.functional.binned import ece_from_bins
from torchcalib.inference import calibration_test, simulation, testing
from torchcalib.inference.testing import ErrorTest, run_error_test


def deviations(share, n_replicates):
    """Return five standard deviations of a fraction of replicates, plus one step of the fraction."""
    return 5 * math.sqrt(share * (1 - share) / n_replicates) + 1 / (n_replicates + 1)


@pytest.mark.parametrize(("p", "n", "k"), [(0.3, 10, 5), (0.99, 60, 57), (0.07, 30, 3), (0.5, 400, 230)])
def test_noise_floor_and_p_value_of_one_bin_equal_the_binomial_distribution(p, n, k):
    found = run_error_test(ErrorTest(ece_from_bins), one_bin(p, n, k), n_replicates=9_999)
    gaps = [abs(j / n - p) for j in range(n + 1)]
    pmf = stats.binom.pmf(range(n + 1), n, p)
    floor = math.fsum(a * b for a, b in zip(gaps, pmf, strict=True))
    deviation = math.sqrt(math.fsum(a * a * b for a, b in zip(gaps, pmf, strict=True)) - floor**2)
    assert abs(float(found.noise_floor) - floor) < 5 * deviation / 100
    at_least = math.fsum(b for a, b in zip(gaps, pmf, strict=True) if a >= abs(k / n - p) - 1e-9)
    assert float(found.p_value) == pytest.approx(at_least, abs=deviations(at_least, 9_999))


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(("n", "expected"), [(4, 1 / 8), (5, 1 / 16)])
def test_p_value_of_equal_rows_with_outcome_1_equals_scipy_binomtest_for_every_seed(n, expected, seed):
    assert stats.binomtest(n, n, 0.5).pvalue == expected
    for error in (tc.ECE, tc.ESCE, tc.MCE, tc.KS, tc.ACE, tc.CORP):
        given = torch.full((n,), 0.5), torch.ones(n, dtype=torch.int64)
        found = calibration_test(error(task="binary"), *given, seed=seed)
        assert float(found.p_value) == pytest.approx(expected, abs=deviations(expected, 999)), error


@pytest.mark.parametrize("error", [tc.ECE, tc.ESCE, tc.RMSCE, tc.KS, tc.CORP, tc.SmECE])
def test_p_value_of_an_error_of_exactly_0_is_1(error):
    p, y = torch.full((10,), 0.5), torch.arange(10) % 2
    found = calibration_test(error(task="binary"), p, y, **FEW)
    assert abs(float(found.statistic)) < 1e-12
    assert float(found.p_value) == 1
    if error is tc.ECE:
        p, y, _ = calibrated("uniform", 60, 20)
        found = metric_of(tc.TCE, p, y).test(**FEW)
        assert bool((found.statistic == 0).any())
        assert bool((found.p_value[found.statistic == 0] == 1).all())


def test_p_value_counts_replicates_at_least_as_large_as_the_statistic():
    """The recorded values are those of the data, then of the replicates."""
    for signed in (False, True):
        seen = []

        def error(b, signed=signed, seen=seen):
            value = (b.share * (b.gap if signed else b.gap.abs())).sum(-1)
            seen.append(value.flatten().tolist())
            return value

        bins = BinStats(torch.cat([one_bin(0.3, 6, 4).sums, one_bin(0.6, 5, 2).sums], -1), has_noise=True)
        found = run_error_test(ErrorTest(error, signed=signed), bins, n_replicates=499)
        (observed,), replicates = seen[0], seen[1]
        assert len(replicates) == 499
        larger = sum(abs(x) >= abs(observed) - 1e-9 for x in replicates)
        assert larger > sum(abs(x) > abs(observed) + 1e-9 for x in replicates), "the test needs ties"
        assert float(found.p_value) == pytest.approx((1 + larger) / 500, rel=1e-12)
        assert float(found.noise_floor) == pytest.approx(math.fsum(map(abs, replicates)) / 499, rel=1e-12)


def test_values_that_differ_only_by_rounding_are_ties():
    """All confidences are equal, so that the KS distance is |k - np| / n for any order of summation."""
    n, p = 200, 0.03
    y = torch.stack([(torch.arange(n) * 37 % n < k).long() for k in range(13)])
    found = metric_of(tc.KS, torch.full((13, n), p, dtype=F64), y).test(n_replicates=1_999)
    pmf = stats.binom.pmf(range(n + 1), n, p)
    for k, p_value in enumerate(found.p_value.tolist()):
        expected = math.fsum(pmf[j] for j in range(n + 1) if abs(j - n * p) >= abs(k - n * p) - 1e-9)
        assert p_value == pytest.approx(expected, abs=deviations(min(expected, 1), 1_999)), k


@pytest.mark.parametrize(
    "error", [tc.KS, partial(tc.ECE, average="macro"), tc.ESCE], ids=["in order", "average", "signed"]
)
def test_draws_do_not_depend_on_chunking(error, monkeypatch):
    p, y = (x.reshape(3, 40, 4) for x in calibrated("uniform", 160, 3)[:2])
    metric = error(task="multilabel", num_labels=4, batch_shape=(3,))
    metric.update(p, y)
    whole = metric.test(**FEW)
    monkeypatch.setattr(testing, "_IN_CACHE", 39 * 40)  # one batch element at a time
    same(metric.test(**FEW), whole)
    monkeypatch.setattr(simulation, "GAPS_AT_ONCE", 40 * 40)
    monkeypatch.setattr(simulation, "MAX_DRAWN", 10 * 40)
    same(metric.test(**FEW), whole)


def test_draws_do_not_depend_on_dropped_samples(monkeypatch):
    p, y, _ = calibrated("uniform", 60, 2)
    gone = p.clone()
    gone[0, [3, 5, 20]] = gone[1, 50] = torch.nan
    # the number of samples of the first batch element; the second has more
    monkeypatch.setattr(testing, "MAX_RUNS", 57)
    together = metric_of(partial(tc.KS, nan_policy="drop"), gone, y).test(**FEW)
    for k in range(2):
        kept = ~gone[k].isnan()
        rows = torch.stack((p[k, kept], p[k, kept]))  # two batch elements with equal numbers of samples
        alone = metric_of(tc.KS, rows, torch.stack((y[k, kept], y[k, kept])))
        same(alone.test(**FEW)[k], together[k])


def test_floating_weights_are_not_copies_and_noise_of_soft_targets_is_estimated():
    """Floating weights of 2 do not change the noise; two copies of each row divide it by sqrt(2).

    The standard deviation of soft labels from 16 annotators is a quarter of that of labels.
    """
    (p,), (y,), _ = calibrated("uniform", 4_000, 1)
    twice = torch.full((4_000,), 2.0)
    evidence = partial(calibration_test, tc.ECE(task="binary", n_bins=7), p)
    plain, important, copied = (evidence(y, weights=w) for w in (None, twice, twice.long()))
    assert float(important.noise_floor) == pytest.approx(float(plain.noise_floor), rel=1e-9)
    assert float(plain.noise_floor / copied.noise_floor) == pytest.approx(math.sqrt(2), rel=0.05)
    generator = torch.Generator().manual_seed(2)
    shares = evidence((torch.rand(16, 4_000, generator=generator, dtype=F64) < p).double().mean(0))
    assert float(plain.noise_floor / shares.noise_floor) == pytest.approx(4, rel=0.1)
    assert float(shares.p_value) > 0.01


@pytest.mark.parametrize("error", [tc.ECE, tc.RMSCE])
def test_p_values_of_debiased_errors_are_those_of_the_errors(error):
    (p,), (y,), _ = calibrated("uniform", 500, 1)
    plain, debiased = (calibration_test(error(task="binary", debiased=d), p, y) for d in (False, True))
    assert float(plain.p_value) == float(debiased.p_value)
    assert float(debiased.noise_floor) < float(plain.noise_floor) / (2 if error is tc.RMSCE else 1)
    assert math.isnan(debiased.low) == (error is tc.ECE)


FEW_ROWS = [
    pytest.param(name, n, marks=[pytest.mark.extended] * ((name, n) != ("ece", 12)))
    for k, name in enumerate(ERRORS)
    for n in ((1, 12), (2, 5))[k % 2]
    if name != "tce"
]


@pytest.mark.parametrize(("name", "n"), FEW_ROWS)
def test_p_values_of_few_rows_are_valid(name, n):
    for kind in CONFIDENCES:
        p, y, _ = calibrated(kind, n, 500, seed=n)
        check_valid(metric_of(ERRORS[name][0], p, y).test(n_replicates=99).p_value)


SETTINGS = [("ece", 200, "uniform"), pytest.param("ece", 200, "mostly 0.99", marks=pytest.mark.extended)]
SETTINGS += [pytest.param(*row, marks=pytest.mark.long) for row in product(ERRORS, (200, 2_000, 20_000), CONFIDENCES)]


@pytest.mark.parametrize(("name", "n", "kind"), SETTINGS)
def test_p_values_of_every_error_are_valid_and_uniform_if_ties_are_rare(name, n, kind):
    error, n_data = ERRORS[name]
    at_once = max(1, 2_000_000 // n)
    found, atoms = [], []
    for seed in range(0, n_data, at_once):
        p, y, _ = calibrated(kind, n, min(at_once, n_data - seed), seed)
        found.append(metric_of(error, p, y).test(n_replicates=199, seed=seed).p_value)
        atoms.append((2 * math.pi * (p * (1 - p)).sum(-1)) ** -0.5)
    check_valid(torch.cat(found))
    # ESCE depends only on the number of positives. Its most frequent value has about the probability of a normal
    # density at its mean. TCE counts rejected samples, and few rows near 0.99 have few possible outcomes.
    atom = float(torch.cat(atoms).mean()) if name == "esce" else 0.0
    if name != "tce" and (kind != "mostly 0.99" or n > 200):
        check_uniform(torch.cat(found), 199, atom)


@pytest.mark.extended
def test_p_values_of_ece_with_floating_weights_are_uniform():
    metric = metric_of(tc.ECE, *calibrated("beta(1,12)", 2_000, 1_000, weighted=True))
    check_uniform(metric.test(n_replicates=199).p_value, 199)
