"""Evidence: draws of outcomes, noise floors, uniform p-values and intervals that cover, from streamed states alone."""

import math
from functools import partial

import oracles
import pytest
import torch
from cases import CASES
from scipy import stats

import torchcalib as tc
from torchcalib.bins import ece_from_bins
from torchcalib.consistency import evidence_of, testing
from torchcalib.consistency.averages import cauchy_combination, widening
from torchcalib.consistency.paths import N_STEPS, Reached, first_reached, reached_by_halving, rising
from torchcalib.consistency.replicates import bin_cells
from torchcalib.kernels.counts import counts_by_chance
from torchcalib.statistics import BinStats

F64 = torch.float64
TESTED = [case for case in CASES if issubclass(case.cls, tc.consistency.TestedMetric)]
WITH_EVIDENCE = [
    case
    for case in TESTED
    if case.options.get("component", "mcb") in ("mcb", "ici")
    and (case.cls is not tc.SmECE or case.name == "smece-binary")  # of many cells
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


def test_interval_of_the_signed_error_covers_where_confidences_are_very_unequal():
    """Most rows are all but certain: what makes an outcome is a few of them, and by the same amount none goes down."""
    torch.manual_seed(0)
    p = torch.distributions.Beta(torch.tensor(0.05, dtype=F64), 5.0).sample((1000, 50))
    metric = tc.ESCE(task="binary", batch_shape=(1000,))
    metric.update(p, (torch.rand(1000, 50, dtype=F64) < p).long())
    found = metric.evidence(n_replicates=199)
    assert ((found.low <= 0) & (found.high >= 0)).double().mean() > 0.93


def test_signed_error_of_certain_rows_has_an_interval():
    found = tc.evidence(tc.ESCE(task="binary"), torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0, 1, 1]))
    assert -0.7 < found.low < -0.3  # two of two: no rate above 1 - 0.025^(1/2) = 0.84 of failures is excluded
    assert found.low <= 0 <= found.high


@pytest.mark.parametrize("n", [10, 50, 1_000])
@pytest.mark.parametrize("error", [tc.ECE, tc.MCE, tc.RMSCE, tc.ACE, tc.KS])
def test_rows_that_are_certain_and_right_may_have_been_lucky_closed_form(error, n):
    """None of n is wrong with a probability of at least 0.025 up to a rate of 1 - 0.025^(1/n)."""
    for confidence in (0, 1):
        p = torch.full((n,), float(confidence), dtype=F64)
        found = tc.evidence(error(task="binary"), p, p.long())
        assert (float(found.value), float(found.noise_floor), float(found.low)) == (0, 0, 0)
        assert float(found.high) > 1 - 0.05 ** (1 / n)
        assert float(found.high) < 1.2 * (1 - 0.025 ** (1 / n))


def test_a_wrong_row_among_certain_ones_is_no_calibration():
    p = torch.ones(50, dtype=F64)
    found = tc.evidence(tc.ECE(task="binary"), p, (torch.arange(50) > 0).long())
    assert float(found.p_value) <= 2 / 1000
    exact = stats.binomtest(1, 50).proportion_ci(0.95, "exact")
    assert 0 < float(found.low) < 10 * exact.low
    assert exact.high / 1.2 < float(found.high) < 1.2 * exact.high


def test_certain_rows_among_others_do_not_make_the_others_certain():
    """Half of the rows are certain and right, and the others may have as much error as they may by themselves."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(200, generator=generator, dtype=F64)
    y = (torch.rand(200, generator=generator, dtype=F64) < p).long()
    alone = tc.evidence(tc.ECE(task="binary"), p, y)
    ones = torch.ones(200, dtype=F64)
    both = tc.evidence(tc.ECE(task="binary"), torch.cat((p, ones)), torch.cat((y, ones.long())))
    assert float(both.high) > 0.9 * float(alone.high) / 2


def test_a_rare_outcome_that_was_not_seen_may_be_less_rare():
    """None of 100 at 0.998: the true frequency may lie as far below as 1 - 0.025^(1/100)."""
    found = tc.evidence(tc.ECE(task="binary"), torch.full((100,), 0.998, dtype=F64), torch.ones(100, dtype=torch.int64))
    assert float(found.high) > 1 - 0.05 ** (1 / 100) - 0.002
    assert float(found.high) < 1.2 * (1 - 0.025 ** (1 / 100))


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
    if case.name == "esce-multiclass-classwise":  # 0 whatever the model, and so is what chance makes of it
        assert (float(found.noise_floor), float(found.p_value)) == (0, 1)
        return
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


@pytest.mark.parametrize(
    "error", [tc.KS, partial(tc.ECE, average="macro"), tc.ESCE], ids=["in order", "average", "signed"]
)
def test_draws_do_not_depend_on_how_the_work_is_cut(error, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(3, 40, 4, generator=generator, dtype=F64)
    y = (torch.rand(3, 40, 4, generator=generator, dtype=F64) < p).long()
    metric = error(task="multilabel", num_labels=4, batch_shape=(3,))
    metric.update(p, y)
    whole = metric.evidence(**FEW)
    monkeypatch.setattr(testing, "_IN_CACHE", 39 * 40)  # a series at a time
    same(metric.evidence(**FEW), whole)
    monkeypatch.setattr(testing, "_AT_ONCE", 40 * 40)
    monkeypatch.setattr(testing, "_DRAWN_AT_ONCE", 10 * 40)
    same(metric.evidence(**FEW), whole)


def test_draws_do_not_depend_on_what_is_left_out_of_a_series_or_of_others(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(2, 60, generator=generator, dtype=F64)
    y = (torch.rand(2, 60, generator=generator, dtype=F64) < p).long()
    gone = p.clone()
    gone[0, [3, 5, 20]] = gone[1, 50] = torch.nan
    monkeypatch.setattr(testing, "MOST_RUNS", 57)  # as many as the first has samples, and the second more
    monkeypatch.setattr(testing, "RUNS_ON_PATHS", 57)
    for with_interval in (True, False):
        together = metric_of(partial(tc.KS, nan_policy="drop"), gone, y).evidence(with_interval=with_interval, **FEW)
        for k in range(2):
            kept = ~gone[k].isnan()
            rows = torch.stack((p[k, kept], p[k, kept]))  # the series has the number that it has together
            alone = metric_of(tc.KS, rows, torch.stack((y[k, kept], y[k, kept])))
            same(alone.evidence(with_interval=with_interval, **FEW)[k], together[k])


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
    assert str(one) == "0.0210 (noise floor 0.0040, 95 % 0.0180-0.0240, p < 0.001)"
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
    with pytest.raises(TypeError, match="Cox and Spiegelhalter are tests already"):
        tc.evidence(tc.Cox(task="binary"), p, y)
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


def test_signed_average_over_labels_is_judged_by_its_own_size_and_uniform():
    """Gaps of labels make up for each other in the mean, and so they do in noise floor and p-value."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1_000, 100, 3, generator=generator, dtype=F64)
    y = (torch.rand(1_000, 100, 3, generator=generator, dtype=F64) < p).long()
    metric = tc.ESCE(task="multilabel", num_labels=3, batch_shape=(1_000,))
    metric.update(p, y)
    found = metric.evidence(n_replicates=99, with_interval=False)
    check_uniform(found)
    size = found.value.abs()
    assert float(found.noise_floor.mean()) == pytest.approx(float(size.mean()), abs=4 * float(size.std()) / 1_000**0.5)
    some = tc.evidence(tc.ESCE(task="multilabel", num_labels=3, batch_shape=(100,)), p[:100], y[:100], **FEW)
    assert int(((some.low <= 0) & (some.high >= 0)).sum()) >= 89  # of 95: 2.75 standard deviations


def test_signed_average_over_classes_that_exclude_each_other_is_0_whatever_the_model():
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(500, 4, generator=generator, dtype=F64).softmax(-1)
    for target in (torch.zeros(500, dtype=torch.int64), torch.multinomial(preds, 1, generator=generator).squeeze(-1)):
        how = {"task": "multiclass", "num_classes": 4, "reduction": "classwise"}
        found = tc.evidence(tc.ESCE(**how), preds, target)
        assert abs(float(found.value)) < 1e-12
        assert (float(found.noise_floor), float(found.p_value)) == (0, 1)
        assert float(found.low) == float(found.high) == 0
    apart = tc.evidence(tc.ESCE(**how, average=None), preds, torch.zeros(500, dtype=torch.int64))
    assert bool((apart.p_value < 0.01).all())
    with pytest.raises(ValueError, match="`level` must be between 0 and 1"):
        tc.evidence(tc.ESCE(**how), preds, target, level=95)


def test_best_rising_frequencies_pool_falling_ones_closed_form():
    """Of three confidences of 100 rows: 0.3 and 0.1 are pooled to 0.2, and 0.9 stays."""
    bins = [one_bin(p, 100, k).sums for p, k in ((0.2, 30), (0.5, 10), (0.8, 90))]
    close(rising(bin_cells(BinStats(torch.cat(bins, -1), has_noise=True))), torch.tensor([0.0, -0.3, 0.1], dtype=F64))


# Steps of a path --------------------------------------------------------------------------------------------------


def test_a_crossing_lies_straight_between_two_steps():
    excess = torch.tensor([[-1.0, 0.0, -3.0], [1.0, 1.0, -2.0], [3.0, 2.0, -1.0]], dtype=F64)
    error = torch.tensor([[0.0, 0.0, 0.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]], dtype=F64)
    close(first_reached(excess, error), torch.tensor([2.0, 0.0, 8.0], dtype=F64))


def test_halving_finds_the_step_that_a_look_at_all_of_them_does():
    steps = torch.arange(N_STEPS, dtype=F64).unsqueeze(-1)
    excess = steps - torch.tensor([0.5, 1.0, 7.25, 30.5, 40.0], dtype=F64)
    error = steps.square().expand_as(excess)

    def at(step):
        return Reached(*(x.gather(0, step.unsqueeze(0)).squeeze(0) for x in (excess, error)))

    close(reached_by_halving(at, at(torch.zeros(5, dtype=torch.int64))), first_reached(excess, error))


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
    "ece": (tc.ECE, 2_000),
    "mce": (tc.MCE, 2_000),
    "rmsce": (partial(tc.RMSCE, debiased=True), 2_000),
    "esce": (tc.ESCE, 2_000),
    "ace": (tc.ACE, 2_000),
    "ks": (tc.KS, 2_000),
    "corp": (tc.CORP, 500),
    "tce": (tc.TCE, 200),
}


@pytest.mark.extended
@pytest.mark.parametrize("kind", CONFIDENCES)
@pytest.mark.parametrize("n", [200, 2_000, 20_000])
@pytest.mark.parametrize("name", ERRORS)
def test_p_values_of_every_error_are_uniform_if_calibrated(name, n, kind):
    error, n_data = ERRORS[name]
    at_once = max(1, 2_000_000 // n)
    found = []
    for seed in range(0, n_data, at_once):
        metric = metric_of(error, *calibrated(kind, n, min(at_once, n_data - seed), seed))
        found.append(metric.evidence(n_replicates=199, seed=seed, with_interval=False).p_value)
    assert stats.kstest(torch.cat(found).numpy(), "uniform").pvalue > 0.01


@pytest.mark.extended
@pytest.mark.parametrize("n_classes", [2, 3, 10])
def test_p_values_of_class_wise_averages_are_uniform_if_calibrated(n_classes):
    generator = torch.Generator().manual_seed(n_classes)
    preds = (1.5 * torch.randn(2_000, 500, n_classes, generator=generator, dtype=F64)).softmax(-1)
    target = torch.multinomial(preds.flatten(0, 1), 1, generator=generator).reshape(2_000, 500)
    metric = tc.ECE(task="multiclass", num_classes=n_classes, reduction="classwise", batch_shape=(2_000,))
    metric.update(preds, target)
    found = metric.evidence(n_replicates=199)
    check_uniform(found)
    check_covers(found.low == 0)


def miscalibrated(kind, n, n_data, moved, seed=0):
    """Data sets, and the frequencies that their outcomes have."""
    p, _, _ = calibrated(kind, n, n_data, seed)
    frequency = moved(p.clamp(1e-12, 1 - 1e-12).logit()).sigmoid()
    generator = torch.Generator().manual_seed(seed + 1)
    return p, (torch.rand(n_data, n, generator=generator, dtype=F64) < frequency).long(), frequency


MOVED = {
    "temperature 1.4": lambda z: z / 1.4,
    "temperature 0.7": lambda z: z / 0.7,
    "shift 0.4": lambda z: z + 0.4,
    "a fifth of the samples": lambda z: torch.where((z > 0) & (z < 0.8), z - 0.8, z),
}


def coverage(error, kind, n, moved, n_data):
    p, y, frequency = miscalibrated(kind, n, n_data, MOVED[moved])
    truth = metric_of(error, p, frequency).compute()
    found = metric_of(error, p, y).evidence(n_replicates=199)
    return float(((found.low <= truth) & (truth <= found.high)).double().mean())


@pytest.mark.parametrize(("error", "moved"), [(tc.ECE, "temperature 1.4"), (tc.ESCE, "shift 0.4")])
def test_intervals_cover_the_error_of_a_miscalibrated_model(error, moved):
    """At least nine in ten of 300, of 95 %: the bins that have the error are not known, see `evidence_of`."""
    assert coverage(error, "uniform", 1_000, moved, 300) > 0.9


def coverage_of_expected(kind, n, moved, n_data, n_replicates):
    """Of the expected TCE, by Monte Carlo over outcomes of the same confidences, which all data sets have."""
    p, _, frequency = miscalibrated(kind, n, 1, MOVED[moved])
    generator = torch.Generator().manual_seed(2)
    y = (torch.rand(10 * n_data, n, generator=generator, dtype=F64) < frequency).long()
    truth = metric_of(tc.TCE, p.expand(len(y), -1), y).compute().mean()
    found = metric_of(tc.TCE, p.expand(n_data, -1), y[:n_data]).evidence(n_replicates=n_replicates)
    assert torch.equal(found.low == found.noise_floor, found.p_value >= 0.05 - 1e-9)
    return float(((found.low <= truth) & (truth <= found.high)).double().mean())


def coverage_of_mcb(kind, n, moved, n_data, n_replicates):
    p, y, frequency = miscalibrated(kind, n, n_data, MOVED[moved])
    truth = (p - frequency).square().mean(-1)  # frequencies rise with the confidence: they are the best recalibration
    found = metric_of(tc.CORP, p, y).evidence(n_replicates=n_replicates)
    return float(((found.low <= truth) & (truth <= found.high)).double().mean())


@pytest.mark.parametrize("coverage_of", [coverage_of_expected, coverage_of_mcb])
def test_intervals_of_tce_and_mcb_cover_what_they_are_of(coverage_of):
    """95 % of 40 data sets, less three standard deviations."""
    assert coverage_of("uniform", 100, "shift 0.4", 40, 39) > 0.95 - 3 * math.sqrt(0.95 * 0.05 / 40)


@pytest.mark.extended
@pytest.mark.parametrize("coverage_of", [coverage_of_expected, coverage_of_mcb])
@pytest.mark.parametrize("n", [200, 500])
@pytest.mark.parametrize("moved", ["temperature 1.4", "shift 0.4"])
@pytest.mark.parametrize("kind", ["uniform", "beta(8,1)"])
def test_intervals_of_tce_and_mcb_cover_what_they_are_of_in_many_data_sets(coverage_of, kind, moved, n):
    """93 % of 400 data sets, less three standard deviations."""
    assert coverage_of(kind, n, moved, 400, 99) > 0.93 - 3 * math.sqrt(0.93 * 0.07 / 400)


@pytest.mark.parametrize("bins", ["pava", "pava_bc"])
def test_errors_over_isotonic_bins_have_intervals_of_their_expected_value(bins):
    p, y, _ = calibrated("uniform", 150, 20)
    metric = tc.GCE(task="binary", loss=lambda b: b.gap.abs(), bins=bins, batch_shape=(20,))
    metric.update(p, y)
    found = metric.evidence(**FEW)
    assert torch.equal(found.low == found.noise_floor, found.p_value >= 0.05 - 1e-9)
    assert bool((found.high > found.noise_floor).all())
    assert int((found.low == found.noise_floor).sum()) >= 16  # of 19: three standard deviations


@pytest.mark.extended
@pytest.mark.parametrize("kind", CONFIDENCES)
@pytest.mark.parametrize("n", [200, 2_000])
@pytest.mark.parametrize("moved", MOVED)
@pytest.mark.parametrize("name", ["ece", "esce", "mce", "ace"])
def test_intervals_cover_errors_of_miscalibrated_models(name, moved, n, kind):
    assert coverage(ERRORS[name][0], kind, n, moved, 1_000) > 0.9


# Bands ------------------------------------------------------------------------------------------------------------


def test_bands_of_bins_of_one_confidence_are_quantiles_of_scipy():
    table = tc.bin_table(torch.full((100,), 0.8), torch.ones(100, dtype=torch.int64), task="binary", n_bins=2)
    low, high = stats.binom.ppf([0.025, 0.975], 100, float(torch.tensor(0.8))) / 100
    assert float(table.band_low[1]) == pytest.approx(low, abs=1e-6)
    assert float(table.band_high[1]) == pytest.approx(high, abs=1e-6)
    assert table.band_low[0].isnan()


@pytest.mark.parametrize("bins", ["equal_width", "equal_mass"])
def test_bands_hold_the_frequencies_of_calibrated_models(bins):
    p, y, _ = calibrated("uniform", 1_000, 200)
    table = tc.bin_table(p, y, task="binary", bins=bins, n_bins=10)
    inside = (table.band_low <= table.frequency) & (table.frequency <= table.band_high)
    assert 0.94 < float(inside.double().mean()) < 0.98  # of 2,000 bins; above 95 %, for counts are whole


def test_bands_stream_and_are_not_known_where_bins_follow_from_the_outcomes():
    p, y, _ = calibrated("uniform", 500, 1)
    metric = tc.ECE(task="binary")
    metric.update(p[0], y[0])
    plain = tc.bin_table(p[0], y[0], task="binary")
    close(metric.bin_table().band_low, plain.band_low)
    close(metric.bin_table().band_high, plain.band_high)
    assert tc.bin_table(p[0], y[0], task="binary", bins="pava").band_low.isnan().all()
    assert tc.tce_table(p[0], y[0], task="binary").band_high.isnan().all()
    assert not tc.tce_table(p[0], y[0], task="binary", bins="equal_mass").band_high.isnan().any()


def test_corp_curve_is_the_isotonic_regression_of_scikit_learn():
    regression = pytest.importorskip("sklearn.isotonic").IsotonicRegression()
    p, y, _ = calibrated("beta(8,1)", 300, 1)
    curve = tc.corp_curve(p[0], y[0], task="binary", n_replicates=39)
    order = p[0].argsort()
    close(curve.confidence, p[0][order])
    expected = regression.fit_transform(p[0][order].numpy(), y[0][order].numpy())
    close(curve.frequency, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


def test_corp_bands_hold_the_curves_of_calibrated_models_and_not_of_others():
    p, y, _ = calibrated("uniform", 300, 40)
    curve = tc.corp_curve(p, y, task="binary", n_replicates=99)
    inside = (curve.band_low <= curve.frequency) & (curve.frequency <= curve.band_high)
    assert 0.92 < float(inside.double().mean()) < 0.98  # points of a curve go together: 40 curves, no 12,000 points
    wrong, outcomes, _ = miscalibrated("uniform", 300, 10, MOVED["temperature 1.4"])
    curve = tc.corp_curve(wrong.square(), outcomes, task="binary", n_replicates=99)
    outside = (curve.frequency < curve.band_low) | (curve.frequency > curve.band_high)
    assert float(outside.double().mean()) > 0.5


def test_corp_curve_of_many_samples_is_that_of_runs_and_of_none_is_nan():
    p, y, _ = calibrated("uniform", 3_000, 2)
    many = tc.corp_curve(p, y, task="binary", n_replicates=39)
    assert many.n.shape == (2, 1_024)
    assert many.n.sum(-1).tolist() == [3_000, 3_000]
    close(many[1].frequency, many.frequency[1])
    assert tc.corp_curve(p[0, :0], y[0, :0], task="binary", n_replicates=39).frequency.isnan().all()
    with pytest.raises(IndexError, match="no batch axis"):
        many[0][0]


@pytest.mark.parametrize("style", ["LIGHT", "DARK"])
def test_corp_diagram_draws_curve_and_band(style):
    plots = pytest.importorskip("torchcalib.plots")
    p, y, _ = calibrated("uniform", 200, 2)
    curve = tc.corp_curve(p, y, task="binary", n_replicates=39)
    ax = plots.corp_diagram(curve[0], style=getattr(plots, style), title="one")
    drawn = ax.lines[1].get_xydata()
    close(torch.from_numpy(drawn).T.contiguous(), torch.stack((curve[0].confidence, curve[0].frequency)))
    assert len(ax.collections) == 2  # the band and the points
    with pytest.raises(ValueError, match="`curve` must be of one series"):
        plots.corp_diagram(curve)
    empty = tc.corp_curve(p[0, :0], y[0, :0], task="binary", n_replicates=39)
    assert "no data" in [text.get_text() for text in plots.corp_diagram(empty).texts]


def test_reliability_diagram_draws_the_bands_of_its_table():
    plots = pytest.importorskip("torchcalib.plots")
    p, y, _ = calibrated("uniform", 2_000, 1)
    table = tc.bin_table(p[0], y[0], task="binary", n_bins=10)
    boxes = plots.reliability_diagram(table).containers[0]
    close(torch.tensor([box.get_y() for box in boxes], dtype=F64), table.band_low)
    close(torch.tensor([box.get_y() + box.get_height() for box in boxes], dtype=F64), table.band_high)


def test_p_values_are_uniform_where_only_whole_counts_are_possible():
    """All confidences are equal: sums that are 0 but for rounding are ties, and ties are broken by chance."""
    g = torch.Generator().manual_seed(0)
    p = torch.full((300, 200), 0.03, dtype=F64)
    y = (torch.rand(p.shape, dtype=F64, generator=g) < p).long()
    check_uniform(metric_of(tc.KS, p, y).evidence(n_replicates=99, with_interval=False))
