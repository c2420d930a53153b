"""Evidence: draws of outcomes, noise floors, uniform p-values and intervals that cover, from streamed states alone."""

import math
from functools import partial

import oracles
import pytest
import torch
from conftest import CASES
from scipy import stats

import torchcalib as tc
from torchcalib.bins import ece_from_bins
from torchcalib.consistency import evidence_of
from torchcalib.consistency.averages import cauchy_combination, widening
from torchcalib.consistency.counts import counts_by_chance
from torchcalib.consistency.paths import first_reached
from torchcalib.statistics import BinStats

F64 = torch.float64
TESTED = [case for case in CASES if issubclass(case.cls, tc.consistency.TestedMetric)]
WITH_EVIDENCE = [
    case
    for case in TESTED
    if case.options.get("component", "mcb") == "mcb"
    and (case.cls is not tc.TCE or case.name in ("tce-binary-positive_class", "tce-mass-l2-binary"))  # which is slow
]
FEW = {"n_replicates": 39}
FIELDS = ("value", "noise_floor", "p_value", "low", "high")


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **{"rtol": 1e-12, "atol": 1e-12, **tolerance}, equal_nan=True)


def same(a, b):
    for name in FIELDS:
        close(getattr(a, name), getattr(b, name))


def evenly(n):
    """Chances that stand for all there are."""
    return (torch.arange(n, dtype=F64) + 0.5) / n


def draw(p, chance):
    p = torch.as_tensor(p, dtype=F64)
    return counts_by_chance(chance.unsqueeze(-1), p.sum().reshape(1), (p * (1 - p)).sum().reshape(1)).squeeze(-1)


# Draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "p"), [(1, 0.5), (7, 0.01), (10, 0.3), (400, 0.02), (40, 0.5), (3, 0.4999)])
def test_counts_of_equal_trials_are_those_of_scipy(n, p):
    chance = evenly(10_000)
    expected = torch.from_numpy(stats.binom.ppf(chance.numpy(), n, p))
    off = draw([p] * n, chance) != expected
    assert int(off.sum()) <= n + 1  # at most where a chance lies on a step, to rounding


@pytest.mark.parametrize("n", [2_000, 10**6, 10**10])
def test_many_counts_are_within_a_thousandth_of_a_deviation_of_those_of_scipy(n):
    chance, p = evenly(10_000), 0.03
    mean, variance = torch.tensor([n * p], dtype=F64), torch.tensor([n * p * (1 - p)], dtype=F64)
    found = counts_by_chance(chance.unsqueeze(-1), mean, variance).squeeze(-1)
    expected = torch.from_numpy(stats.binom.ppf(chance.numpy(), n, p))
    assert float((found - expected).abs().mean()) < 0.02 + 1e-3 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize(
    "p", [torch.linspace(0, 0.07, 100), torch.rand(40, generator=torch.Generator().manual_seed(0)) / 2, [0.9, 0.8]]
)
def test_counts_of_unequal_trials_have_their_mean_and_variance_and_nearly_their_distribution(p):
    p = torch.as_tensor(p, dtype=F64)
    rarer = torch.minimum(p, 1 - p) if float(p.sum()) > len(p) / 2 else p
    found = draw(rarer, evenly(100_000))
    assert abs(float(found.mean() - rarer.sum())) < 1e-4
    assert abs(float(found.var() / (rarer * (1 - rarer)).sum()) - 1) < 2e-3
    exact = torch.tensor(oracles.poisson_binomial(rarer.tolist()), dtype=F64).cumsum(-1)
    counted = torch.stack([(found <= k).double().mean() for k in range(len(rarer) + 1)])
    assert float((counted - exact).abs().max()) < 0.01


def test_counts_that_chance_has_no_part_in():
    mean, variance = torch.tensor([0.0, 3.0, torch.nan], dtype=F64), torch.tensor([0.0, 0.0, torch.nan], dtype=F64)
    close(counts_by_chance(evenly(5).unsqueeze(-1).expand(5, 3), mean, variance), mean.expand(5, 3))


# One bin, of which everything is known in closed form -------------------------------------------------------------


def one_bin(p, n, k, dtype=F64):
    """Bin of n samples of confidence p, of which k came true."""
    sums = [n, n * p, k, n * p * (1 - p), n * p * (1 - p)]
    return BinStats(torch.tensor(sums, dtype=dtype).unsqueeze(-1), has_noise=True)


@pytest.mark.parametrize(("p", "n", "k"), [(0.3, 10, 5), (0.99, 60, 57), (0.07, 30, 3), (0.5, 400, 230)])
def test_floor_and_p_value_of_one_bin_are_those_of_the_binomial_distribution(p, n, k):
    found = evidence_of(ece_from_bins, one_bin(p, n, k), n_replicates=9_999)
    gaps = [abs(j / n - p) for j in range(n + 1)]
    pmf = stats.binom.pmf(range(n + 1), n, p)
    floor = math.fsum(a * b for a, b in zip(gaps, pmf, strict=True))
    deviation = math.sqrt(math.fsum(a * a * b for a, b in zip(gaps, pmf, strict=True)) - floor**2)
    assert abs(float(found.noise_floor) - floor) < 5 * deviation / 100
    seen = abs(k / n - p)
    beyond = math.fsum(b for a, b in zip(gaps, pmf, strict=True) if a > seen + 1e-9)
    up_to = math.fsum(b for a, b in zip(gaps, pmf, strict=True) if a >= seen - 1e-9)
    assert beyond - 0.025 < float(found.p_value) < up_to + 0.025  # ties are broken by chance, between the two


def test_interval_of_the_signed_error_of_one_bin_is_nearly_that_of_wilson():
    """Inverting the test of every frequency by its own variance is Wilson's interval, for a single frequency."""
    p, n, k = 0.7, 300, 180
    found = evidence_of(lambda b: (b.share * b.gap).sum(-1), one_bin(p, n, k), signed=True, n_replicates=9_999)
    wilson = stats.binomtest(k, n).proportion_ci(0.95, "wilson")
    assert abs(float(found.low) + p - wilson.low) < 4e-3
    assert abs(float(found.high) + p - wilson.high) < 4e-3


def test_a_bin_that_was_always_right_is_not_taken_for_certain():
    """No failure in 100 is no proof against a rate of 3 in 100 (1 - 0.05^(1/100))."""
    found = evidence_of(lambda b: (b.share * b.gap).sum(-1), one_bin(0.98, 100, 100), signed=True)
    assert -0.03 < float(found.low) < 0.0
    assert float(found.high) == pytest.approx(0.02, abs=1e-3)


# What a metric says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", WITH_EVIDENCE, ids=str)
def test_every_error_has_evidence_of_the_shape_of_its_value(case):
    preds, target = case.data(n=60)
    metric = case.metric()
    metric.update(preds, target)
    found = metric.evidence(**FEW)
    close(found.value, metric.compute())
    for name in FIELDS:
        assert getattr(found, name).shape == found.value.shape
        assert getattr(found, name).dtype == F64
    assert bool((found.noise_floor > 0).all())
    assert bool(((found.p_value > 0) & (found.p_value <= 1)).all())
    if metric.plot_lower_bound == 0 and not found.low.isnan().any():
        assert bool((found.low >= 0).all())
    assert not bool((found.low > found.high).any())
    same(found, metric.evidence(**FEW))
    assert not torch.equal(found.noise_floor, metric.evidence(seed=1, **FEW).noise_floor)


@pytest.mark.parametrize("case", WITH_EVIDENCE, ids=str)
def test_evidence_follows_from_the_state_merged_pickled_or_in_pieces(case):
    preds, target = case.data(n=60)
    weights = case.weights(60).long() if case.whole_weights else case.weights(60)
    whole, one, other = case.metric(), case.metric(), case.metric()
    whole.update(preds, target, weights=weights)
    one.update(preds[:13], target[:13], weights=weights[:13])
    other.update(preds[13:], target[13:], weights=weights[13:])
    one.merge_state(other)
    for name in FIELDS:
        close(getattr(one.evidence(**FEW), name), getattr(whole.evidence(**FEW), name), rtol=1e-6, atol=1e-9)
    same(tc.evidence(whole, preds, target, weights=weights, **FEW), whole.evidence(**FEW))


@pytest.mark.parametrize("case", WITH_EVIDENCE, ids=str)
def test_no_data_is_no_evidence(case):
    metric = case.metric()
    preds, target = case.data(n=10)
    metric.update(preds[:0], target[:0])
    found = metric.evidence(**FEW)
    for name in FIELDS:
        assert getattr(found, name).isnan().all()
        assert getattr(found, name).shape == metric.compute().shape


def test_a_series_without_data_does_not_spoil_the_others():
    sums = torch.stack((one_bin(0.3, 10, 5).sums, torch.zeros(5, 1, dtype=F64)))
    found = evidence_of(ece_from_bins, BinStats(sums, has_noise=True))
    assert found.p_value.isnan().tolist() == [False, True]
    assert float(found.p_value[0]) == pytest.approx(float(evidence_of(ece_from_bins, one_bin(0.3, 10, 5)).p_value))


def test_weights_of_importance_are_not_more_samples():
    """Rows that count double are as noisy as before; two copies of each are less so, by sqrt(2)."""
    case = next(case for case in CASES if case.name == "ece-binary-positive_class")
    preds, target = case.data(n=400)
    twice = torch.full((400,), 2.0)
    plain, important, copied = (
        tc.evidence(case.metric(), preds, target, weights=w) for w in (None, twice, twice.long())
    )
    close(important.noise_floor, plain.noise_floor, rtol=1e-9)
    assert float(plain.noise_floor / copied.noise_floor) == pytest.approx(math.sqrt(2), rel=0.05)


def test_soft_targets_are_as_noisy_as_they_vary():
    """Shares of 16 votes vary a quarter as much as labels, in standard deviations."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4_000, generator=generator, dtype=F64)
    votes = (torch.rand(16, 4_000, generator=generator, dtype=F64) < p).double()
    labels = tc.evidence(tc.ECE(task="binary"), p, votes[0].long())
    shares = tc.evidence(tc.ECE(task="binary"), p, votes.mean(0))
    assert float(labels.noise_floor / shares.noise_floor) == pytest.approx(4, rel=0.1)
    assert float(shares.p_value) > 0.01


def test_debiased_rmsce_is_tested_by_what_it_was_before():
    p = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=F64)
    y = (torch.rand(500, generator=torch.Generator().manual_seed(1), dtype=F64) < p).long()
    plain, debiased = (tc.evidence(tc.RMSCE(task="binary", debiased=d), p, y) for d in (False, True))
    assert torch.equal(plain.p_value, debiased.p_value)
    assert float(debiased.noise_floor) < float(plain.noise_floor) / 2


def test_interval_holds_0_just_where_the_test_does_not_reject():
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(200, 300, generator=generator, dtype=F64)
    y = (torch.rand(200, 300, generator=generator, dtype=F64) < (0.8 * p.logit() + 0.1).sigmoid()).long()
    metric = tc.ECE(task="binary", batch_shape=(200,))
    metric.update(p, y)
    found = metric.evidence(n_replicates=199)
    assert 20 < int((found.low == 0).sum()) < 180
    assert torch.equal(found.low == 0, found.p_value >= 0.05)


def test_words():
    one = tc.Evidence(*(torch.tensor(x) for x in (0.021, 0.004, 0.0004, 0.018, 0.024)), level=0.95)
    assert str(one) == "0.0210 (noise floor 0.0040, 95 % 0.0180–0.0240, p < 0.001)"
    signed = tc.Evidence(*(torch.tensor(x) for x in (-0.021, 0.004, 0.043, -0.03, 0.01)), level=0.9)
    assert str(signed) == "-0.0210 (noise floor 0.0040, 90 % -0.0300 to 0.0100, p = 0.043)"
    nan = torch.nan
    without = tc.Evidence(*(torch.tensor(x) for x in (0.021, 0.004, 0.431, nan, nan)), level=0.95)
    assert repr(without) == "0.0210 (noise floor 0.0040, p = 0.43)"
    both = tc.Evidence(*(torch.stack([getattr(e, name) for e in (one, signed)]) for name in FIELDS), level=0.95)
    assert str(both[0]) == str(one)
    assert str(both).splitlines()[0] == f"[0] {one}"
    with pytest.raises(IndexError, match="no batch axis"):
        one[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": 95}, "`level` must be between 0 and 1, got 95"),
        ({"level": "95 %"}, "`level` must be a number"),
        ({"n_replicates": 38}, "`n_replicates` must be at least 39 for level=0.95, got 38"),
        ({"n_replicates": 99.5}, "`n_replicates` must be an int"),
        ({"seed": 1.5}, "`seed` must be an int"),
    ],
)
def test_bad_arguments_are_named(options, message):
    metric = tc.ECE(task="binary")
    metric.update(torch.tensor([0.3]), torch.tensor([1]))
    with pytest.raises((TypeError, ValueError), match=message):
        metric.evidence(**options)


def test_what_has_no_evidence_says_so():
    p, y = torch.tensor([0.3, 0.6]), torch.tensor([0, 1])
    with pytest.raises(TypeError, match="`metric` must be a calibration error of torchcalib"):
        tc.evidence(tc.NLL(task="binary"), p, y)
    with pytest.raises(ValueError, match="`component` must be 'mcb' for evidence"):
        tc.evidence(tc.CORP(task="binary", component="dsc"), p, y)
    with pytest.raises(ValueError, match="`statistic` must have the sums of its noise"):
        evidence_of(ece_from_bins, BinStats(torch.ones(3, 4)))


# Averages over classes --------------------------------------------------------------------------------------------


def test_cauchy_combination_of_equal_p_values_is_that_value_closed_form():
    p = torch.tensor([0.001, 0.2, 0.5, 0.9], dtype=F64)
    close(cauchy_combination(p.unsqueeze(-1).expand(-1, 7)), p)


def test_cauchy_combination_of_independent_p_values_is_uniform():
    p = torch.rand(4_000, 10, generator=torch.Generator().manual_seed(0), dtype=F64)
    assert stats.kstest(cauchy_combination(p).numpy(), "uniform").pvalue > 0.01


def test_widening_is_the_deviation_of_means_of_dependent_absolute_values():
    generator = torch.Generator().manual_seed(0)
    for n_classes in (2, 3, 10):
        z = torch.randn(200_000, n_classes, generator=generator, dtype=F64)
        dependent = (z - z.mean(-1, keepdim=True)).abs()  # correlation -1 / (C - 1)
        independent = dependent.std(0).mean() / math.sqrt(n_classes)
        assert float(dependent.mean(-1).std() / independent) == pytest.approx(widening(n_classes), rel=0.01)
    assert widening(1) == 1
    assert widening(2) == pytest.approx(math.sqrt(2))


def test_evidence_of_two_classes_is_that_of_one():
    """P(y=1) and P(y=0) err together; what the classes' own draws add is chance."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1_000, generator=generator, dtype=F64)
    y = (torch.rand(1_000, generator=generator, dtype=F64) < (0.9 * p.logit() + 0.1).sigmoid()).long()
    one = tc.evidence(tc.ECE(task="binary"), p, y, n_replicates=4_999)
    how = tc.ECE(task="multiclass", num_classes=2, reduction="classwise")
    two = tc.evidence(how, torch.stack((1 - p, p), -1), y, n_replicates=4_999)
    assert float(two.value) == pytest.approx(float(one.value))
    for name in ("noise_floor", "low", "high"):
        assert float(getattr(two, name)) == pytest.approx(float(getattr(one, name)), rel=0.1, abs=1e-3)
    assert float(two.p_value) == pytest.approx(float(one.p_value), abs=0.02)


# Steps of a path --------------------------------------------------------------------------------------------------


def test_a_crossing_lies_straight_between_two_steps():
    excess = torch.tensor([[-1.0, 0.0, -3.0], [1.0, 1.0, -2.0], [3.0, 2.0, -1.0]], dtype=F64)
    error = torch.tensor([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]], dtype=F64)
    close(first_reached(excess, error), torch.tensor([2.0, 0.0, 8.0], dtype=F64))


# Simulation -------------------------------------------------------------------------------------------------------

CONFIDENCES = {
    "uniform": lambda u: u,
    "beta(8,1)": lambda u: u ** (1 / 8),
    "beta(1,12)": lambda u: 1 - u ** (1 / 12),
    "mostly 0.99": lambda u: 1 - (-u.log() / 90).clamp(max=0.98),
}


def calibrated(kind, n, n_data, seed=0, weighted=False):
    """Data sets `(n_data, n)` of confidences that are the probabilities of their outcomes."""
    generator = torch.Generator().manual_seed(seed)
    p = CONFIDENCES[kind](torch.rand(n_data, n, generator=generator, dtype=F64))
    y = (torch.rand(n_data, n, generator=generator, dtype=F64) < p).long()
    return p, y, torch.rand(n_data, n, generator=generator, dtype=F64) if weighted else None


def check_uniform(found):
    assert stats.kstest(found.p_value.numpy(), "uniform").pvalue > 0.01


def check_covers(covered, level=0.95):
    """93 to 97 %, and what 2,000 data sets can be off by chance."""
    share = float(covered.double().mean())
    assert level - 0.02 <= share <= level + 0.02, share


def metric_of(cls, p, y, weights=None):
    """An error that has seen data sets `(D, N)`, each a series."""
    metric = cls(task="binary", batch_shape=(len(p),))
    metric.update(p, y, weights=weights)
    return metric


@pytest.mark.parametrize(
    ("kind", "n", "weighted"),
    [("uniform", 200, False), ("mostly 0.99", 200, False), ("beta(8,1)", 2_000, False), ("beta(1,12)", 2_000, True)],
)
def test_p_values_of_ece_are_uniform_if_calibrated(kind, n, weighted):
    statistic = metric_of(tc.ECE, *calibrated(kind, n, 2_000, weighted=weighted)).statistic()
    check_uniform(evidence_of(ece_from_bins, statistic, n_replicates=199, with_interval=False))


def test_intervals_of_ece_cover_the_error_of_a_calibrated_model_which_is_0():
    found = metric_of(tc.ECE, *calibrated("beta(8,1)", 200, 2_000)).evidence(n_replicates=199)
    check_covers(found.low == 0)


ERRORS = {
    "ece": tc.ECE,
    "mce": tc.MCE,
    "rmsce": tc.RMSCE,
    "rmsce-debiased": partial(tc.RMSCE, debiased=True),
    "esce": tc.ESCE,
    "ace": tc.ACE,
    "ks": tc.KS,
    "corp": tc.CORP,
}
