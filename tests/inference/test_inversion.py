"""Confidence intervals: closed forms for one bin, coverage by simulation, and agreement with the p-value."""

import math
from itertools import product

import pytest
import torch
from helpers.null_distribution import (
    CONFIDENCES,
    ERRORS,
    F64,
    FEW,
    MOVED,
    calibrated,
    close,
    covers,
    metric_of,
    miscalibrated,
    one_bin,
)
from scipy import stats

import torchcalib as tc
from torchcalib.core.sums import BinStats
from torchcalib.inference import calibration_test
from torchcalib.inference.inversion import N_STEPS, Reached, bisected, first_reached, rising
from torchcalib.inference.simulation import BinCells
from torchcalib.inference.testing import ErrorTest, run_error_test


def mean_gap(b):
    return (b.share * b.gap).sum(-1)


def test_interval_of_the_signed_error_of_one_bin_is_close_to_wilson():
    """The test uses the variance of each candidate frequency, which gives Wilson's interval for a single frequency."""
    p, n, k = 0.7, 300, 180
    found = run_error_test(ErrorTest(mean_gap, signed=True), one_bin(p, n, k), n_replicates=9_999)
    wilson = stats.binomtest(k, n).proportion_ci(0.95, "wilson")
    assert (float(found.low) + p, float(found.high) + p) == pytest.approx((wilson.low, wilson.high), abs=4e-3)


def test_interval_of_the_signed_error_has_coverage_for_very_unequal_confidences():
    """Most rows are almost certain, so that their probabilities cannot all be decreased by the same amount."""
    torch.manual_seed(0)
    p = torch.distributions.Beta(torch.tensor(0.05, dtype=F64), 5.0).sample((1000, 50))
    metric = tc.ESCE(task="binary", batch_shape=(1000,))
    metric.update(p, (torch.rand(1000, 50, dtype=F64) < p).long())
    found = metric.test(n_replicates=199)
    assert ((found.low <= 0) & (found.high >= 0)).double().mean() > 0.93


@pytest.mark.parametrize("n", [10, 50, 1_000])
@pytest.mark.parametrize("error", [tc.ECE, tc.MCE, tc.RMSCE, tc.ACE, tc.KS])
def test_intervals_of_certain_and_right_rows_have_the_closed_form(error, n):
    """Zero errors in n rows have a probability of at least 0.025 up to an error rate of 1 - 0.025^(1/n)."""
    for confidence in (0, 1):
        p = torch.full((n,), float(confidence), dtype=F64)
        found = calibration_test(error(task="binary"), p, p.long())
        assert (float(found.statistic), float(found.noise_floor), float(found.low)) == (0, 0, 0)
        assert float(found.high) > 1 - 0.05 ** (1 / n)
        assert float(found.high) < 1.2 * (1 - 0.025 ** (1 / n))


def test_intervals_of_almost_certain_rows_have_the_closed_form():
    """Zero errors in n rows have a probability of at least 0.025 up to an error rate of 1 - 0.025^(1/n)."""
    always = run_error_test(ErrorTest(mean_gap, signed=True), one_bin(0.98, 100, 100))
    assert -0.03 < float(always.low) < 0.0
    assert float(always.high) == pytest.approx(0.02, abs=1e-3)
    signed = calibration_test(tc.ESCE(task="binary"), torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 1, 1]))
    # two of two rows are right: error rates up to 1 - 0.025^(1/2) = 0.84 are not excluded
    assert -0.7 < signed.low < -0.3
    assert signed.low <= 0 <= signed.high
    error, ones = tc.ECE(task="binary"), torch.ones(100, dtype=F64)
    rare = calibration_test(error, 0.998 * ones, ones.long())
    one_sided, two_sided = 1 - 0.05 ** (1 / 100), 1 - 0.025 ** (1 / 100)  # upper bounds of the error rate
    assert one_sided - 0.002 < float(rare.high) < 1.2 * two_sided
    wrong = calibration_test(error, ones[:50], (torch.arange(50) > 0).long())
    assert float(wrong.p_value) <= 2 / 1000
    exact = stats.binomtest(1, 50).proportion_ci(0.95, "exact")
    assert 0 < float(wrong.low) < 10 * exact.low
    assert exact.high / 1.2 < float(wrong.high) < 1.2 * exact.high


def test_certain_rows_do_not_shrink_the_interval_of_other_rows():
    """Half of the rows are certain and right. The upper end must be that of the other half alone."""
    (p,), (y,), _ = calibrated("uniform", 200, 1)
    alone = calibration_test(tc.ECE(task="binary"), p, y)
    both = calibration_test(
        tc.ECE(task="binary"), torch.cat((p, torch.ones_like(p))), torch.cat((y, torch.ones_like(y)))
    )
    assert float(both.high) > 0.9 * float(alone.high) / 2


@pytest.mark.parametrize(
    ("cls", "n", "n_data", "moved"),
    [(tc.ECE, 300, 200, lambda z: 0.8 * z + 0.1)]
    + [(tc.ESCE, n, 400, lambda z, n=n: z + 2 / n**0.5) for n in (4, 20, 200)],
)
def test_interval_contains_0_if_the_test_does_not_reject(cls, n, n_data, moved):
    p, y, _ = miscalibrated("uniform", n, n_data, moved)
    found = metric_of(cls, p, y).test(n_replicates=199)
    kept, holds = found.p_value >= 0.05 - 1e-9, (found.low <= 0) & (found.high >= 0)
    assert 20 < int(kept.sum()) < n_data
    assert bool(holds[kept].all())
    if cls is tc.ECE:
        assert torch.equal(holds, kept)


SETTINGS = [("uniform", 100, "shift 0.4", 40, 39, 0.95)]
SETTINGS += [
    pytest.param(kind, n, moved, 400, 99, 0.93, marks=pytest.mark.long)
    for kind, n, moved in product(("uniform", "beta(8,1)"), (200, 500), ("temperature 1.4", "shift 0.4"))
]


@pytest.mark.parametrize("cls", [tc.TCE, tc.CORP])
@pytest.mark.parametrize(("kind", "n", "moved", "n_data", "n_replicates", "level"), SETTINGS)
def test_intervals_of_tce_and_mcb_cover_their_expected_values(cls, kind, n, moved, n_data, n_replicates, level):
    """The tolerance is three standard deviations of a fraction of data sets.

    The expected TCE is computed by Monte Carlo over outcomes of the same confidences. The true frequencies rise with
    the confidence, so that they are the best recalibration, whose gain MCB estimates.
    """
    p, y, frequency = miscalibrated(kind, n, 1 if cls is tc.TCE else n_data, MOVED[moved])
    truth = (p - frequency).square().mean(-1)
    if cls is tc.TCE:
        y = (torch.rand(10 * n_data, n, generator=torch.Generator().manual_seed(2), dtype=F64) < frequency).long()
        truth = metric_of(tc.TCE, p.expand(len(y), -1), y).compute().mean()
        p, y = p.expand(n_data, -1), y[:n_data]
    found = metric_of(cls, p, y).test(n_replicates=n_replicates)
    if cls is tc.TCE:
        assert torch.equal(found.low == found.noise_floor, found.p_value >= 0.05 - 1e-9)
    assert covers(found, truth) > level - 3 * math.sqrt(level * (1 - level) / n_data)


@pytest.mark.parametrize("bins", ["pava", "pava_bc"])
def test_errors_over_isotonic_bins_have_intervals_for_their_expected_value(bins):
    p, y, _ = calibrated("uniform", 150, 20)
    metric = tc.GCE(task="binary", loss=lambda b: b.gap.abs(), bins=bins, batch_shape=(20,))
    metric.update(p, y)
    found = metric.test(**FEW)
    assert torch.equal(found.low == found.noise_floor, found.p_value >= 0.05 - 1e-9)
    assert bool((found.high > found.noise_floor).all())
    assert int((found.low == found.noise_floor).sum()) >= 16  # 19 expected; three standard deviations below


MISCALIBRATED = [("ece", "temperature 1.4", 1_000, "uniform", 300), ("esce", "shift 0.4", 1_000, "uniform", 300)]
MISCALIBRATED += [
    pytest.param(*setting, 1_000, marks=pytest.mark.long)
    for setting in product(("ece", "esce", "mce", "ace"), MOVED, (200, 2_000), CONFIDENCES)
]


@pytest.mark.parametrize(("name", "moved", "n", "kind", "n_data"), MISCALIBRATED)
def test_intervals_cover_the_error_of_a_miscalibrated_model(name, moved, n, kind, n_data):
    """At least 90% instead of 95%, because the distribution of the error over bins is unknown; see `inversion`."""
    p, y, frequency = miscalibrated(kind, n, n_data, MOVED[moved])
    error = ERRORS[name][0]
    assert covers(metric_of(error, p, y).test(n_replicates=199), metric_of(error, p, frequency).compute()) > 0.9


def test_isotonic_frequencies_pool_decreasing_frequencies():
    """Three confidences with 100 rows each: 0.3 and 0.1 are pooled to 0.2, and 0.9 is unchanged."""
    bins = [one_bin(p, 100, k).sums for p, k in ((0.2, 30), (0.5, 10), (0.8, 90))]
    close(rising(BinCells.of(BinStats(torch.cat(bins, -1), has_noise=True))), torch.tensor([0.0, -0.3, 0.1], dtype=F64))


def test_crossing_is_interpolated_linearly_between_two_steps():
    excess = torch.tensor([[-1.0, 0.0, -3.0], [1.0, 1.0, -2.0], [3.0, 2.0, -1.0]], dtype=F64)
    error = torch.tensor([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]], dtype=F64)
    close(first_reached(excess, error), torch.tensor([2.0, 0.0, 8.0], dtype=F64))


def test_bisection_finds_the_first_step_with_excess():
    steps = torch.arange(N_STEPS, dtype=F64).unsqueeze(-1)
    excess = steps - torch.tensor([0.5, 1.0, 7.25, 30.5, 40.0], dtype=F64)
    error = steps.square().expand_as(excess)

    def at(step):
        return Reached(*(x.gather(0, step.unsqueeze(0)).squeeze(0) for x in (excess, error)))

    close(bisected(at, at(torch.zeros(5, dtype=torch.int64))), first_reached(excess, error))
