"""p-values and intervals of averages over classes: closed forms, validity with ties, and dependent classes."""

import math
from functools import partial

import pytest
import torch
from helpers.null_distribution import F64, calibrated, check_uniform, check_valid, close
from scipy import stats

import torchcalib as tc
from torchcalib.inference import calibration_test, testing
from torchcalib.inference.testing import cauchy_combination
from torchcalib.ops.counter_rng import random_words


def test_cauchy_combination_has_the_closed_form():
    """The mean of the quantiles tan(0.4 pi) = 3.0777 and tan(0.3 pi) = 1.3764 is tan(0.3655 pi).

    For ties over all of (0, 1) the quantiles cancel: with 9 such classes, a tenth of the tenth quantile remains.
    """

    def expected(mean):
        return torch.tensor(0.5 - math.atan(mean) / math.pi, dtype=F64)

    def combined(p, tied, n_replicates):
        return cauchy_combination(torch.tensor(p, dtype=F64), torch.tensor(tied, dtype=F64), n_replicates)

    for p in (0.001, 0.2, 0.5, 0.9, 1):
        # resolution of the replicates
        close(combined([p] * 7, [1e-6] * 7, 10**6), torch.tensor(p, dtype=F64), atol=2e-6)
    mean = (math.tan(0.4 * math.pi) + math.tan(0.3 * math.pi)) / 2
    close(combined([0.1, 0.2], [1e-6, 1e-6], 10**6), expected(mean))
    ties = [1.0] * 9
    close(combined([0.001, *ties], [0.001, *ties], 999), expected(math.tan(0.499 * math.pi) / 10), rtol=1e-9)
    assert float(combined(ties, ties, 999)) == 1


@pytest.mark.parametrize(("n", "p"), [(4, 0.5), (1, 0.2), (1, 0.01), (10, 0.3), (20, 0.02)])
def test_combined_p_values_of_few_outcomes_are_valid(n, p):
    """The exact p-values of |k - np| are computed with scipy's binomial distribution."""
    pmf = torch.from_numpy(stats.binom.pmf(range(n + 1), n, p))
    size = (torch.arange(n + 1, dtype=F64) - n * p).abs()
    at_least = torch.stack([pmf[size >= own - 1e-9].sum() for own in size]).clamp(max=1)
    tied = torch.stack([pmf[(size - own).abs() < 1e-9].sum() for own in size])
    generator = torch.Generator().manual_seed(0)
    for n_classes in (2, 3, 10, 100):
        drawn = torch.multinomial(pmf, 4_000 * n_classes, replacement=True, generator=generator).reshape(4_000, -1)
        for outcomes in (drawn, drawn[:, :1].expand_as(drawn)):  # independent classes, and equal classes
            check_valid(cauchy_combination(at_least[outcomes], tied[outcomes], 10**6))


def test_test_of_two_classes_equals_that_of_the_binary_task():
    """P(y=1) and P(y=0) have the same gaps. The simulated outcomes of the two tests differ."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1_000, generator=generator, dtype=F64)
    y = (torch.rand(1_000, generator=generator, dtype=F64) < (0.9 * p.logit() + 0.1).sigmoid()).long()
    one = calibration_test(tc.ECE(task="binary"), p, y, n_replicates=4_999)
    how = tc.ECE(task="multiclass", num_classes=2, mode="classwise")
    two = calibration_test(how, torch.stack((1 - p, p), -1), y, n_replicates=4_999)
    assert float(two.statistic) == pytest.approx(float(one.statistic))
    assert float(two.noise_floor) == pytest.approx(float(one.noise_floor), rel=0.1, abs=1e-3)
    # 5 standard deviations of the difference of two shares of 4,999 replicates
    assert float(two.p_value) == pytest.approx(float(one.p_value), abs=0.04)


def test_p_value_of_two_classes_with_four_equal_rows_has_the_closed_form():
    metric = tc.ECE(task="multiclass", num_classes=2, mode="classwise")
    found = calibration_test(metric, torch.full((4, 2), 0.5), torch.ones(4, dtype=torch.int64), n_replicates=9_999)
    # 5 standard deviations of the fraction of replicates
    assert float(found.p_value) == pytest.approx(1 / 8, abs=5 * math.sqrt(1 / 8 * 7 / 8 / 9_999))


def test_p_values_of_signed_averages_over_labels_are_uniform():
    """Gaps of labels cancel in the mean, in the noise floor and in the p-value."""
    p, y = (x.reshape(1_000, 100, 3) for x in calibrated("uniform", 300, 1_000)[:2])
    metric = tc.ESCE(task="multilabel", num_labels=3, batch_shape=(1_000,))
    metric.update(p, y)
    found = metric.test(n_replicates=99)
    check_uniform(found.p_value, 99)
    size = found.statistic.abs()
    assert float(found.noise_floor.mean()) == pytest.approx(float(size.mean()), abs=4 * float(size.std()) / 1_000**0.5)


def test_class_wise_average_of_esce_is_0_for_every_model():
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(500, 4, generator=generator, dtype=F64).softmax(-1)
    how = {"task": "multiclass", "num_classes": 4, "mode": "classwise"}
    for target in (torch.zeros(500, dtype=torch.int64), torch.multinomial(preds, 1, generator=generator).squeeze(-1)):
        found = calibration_test(tc.ESCE(**how), preds, target)
        assert abs(float(found.statistic)) < 1e-12
        assert (float(found.noise_floor), float(found.p_value)) == (0, 1)
        assert float(found.low) == float(found.high) == 0
    separate = calibration_test(tc.ESCE(**how, average=None), preds, torch.zeros(500, dtype=torch.int64))
    assert bool((separate.p_value < 0.01).all())


SETTINGS = [(5, 8, 1_000, 99), pytest.param(2, 8, 1_000, 99, marks=pytest.mark.extended)]
SETTINGS += [pytest.param(n_classes, 500, 2_000, 199, marks=pytest.mark.long) for n_classes in (2, 3, 10)]


@pytest.mark.parametrize(("n_classes", "n", "n_data", "n_replicates"), SETTINGS)
def test_p_values_of_class_wise_averages_are_valid(n_classes, n, n_data, n_replicates):
    generator = torch.Generator().manual_seed(n_classes)
    preds = (1.5 * torch.randn(n_data, n, n_classes, generator=generator, dtype=F64)).softmax(-1)
    target = torch.multinomial(preds.flatten(0, 1), 1, generator=generator).reshape(n_data, n)
    metric = tc.ECE(task="multiclass", num_classes=n_classes, mode="classwise", batch_shape=(n_data,))
    metric.update(preds, target)
    check_valid(metric.test(n_replicates=n_replicates).p_value)


@pytest.mark.parametrize("reading", [tc.KS, partial(tc.ECE, n_bins=3)], ids=["in order", "bins"])
def test_p_values_of_averages_over_labels_with_few_rows_are_valid(reading):
    p, y, _ = calibrated("beta(1,12)", 4 * 10, 1_000)
    metric = reading(task="multilabel", num_labels=4, batch_shape=(1_000,))
    metric.update(p.reshape(1_000, 10, 4), y.reshape(1_000, 10, 4))
    check_valid(metric.test(n_replicates=99).p_value)


def slow_label_simulation(preds, cell, n_cells, weights, seed, n_replicates):
    """Return the class-wise ECE of every replicate: a loop over replicates, rows and classes.

    The label of row i in replicate r is the first class whose cumulative probability exceeds the random number.
    """
    n, n_classes = preds.shape
    words = random_words(seed, torch.arange(n_replicates), torch.arange(n)).tolist()
    found = []
    for r in range(n_replicates):
        gaps = [[0.0] * n_cells for _ in range(n_classes)]
        for i in range(n):
            cumulative, label = 0.0, None
            for c in range(n_classes):
                cumulative += float(preds[i, c])
                if label is None and words[r][i] < int(cumulative * 2**32):
                    label = c
            for c in range(n_classes):
                gaps[c][cell[c][i]] += float(weights[i]) * ((c == label) - float(preds[i, c]))
        found.append(sum(abs(gap) for row in gaps for gap in row) / float(weights.sum()) / n_classes)
    return found


@pytest.mark.parametrize("kind", ["equal width", "equal mass", "floating weights", "copies"])
def test_joint_simulation_of_labels_equals_a_slow_loop(kind):
    generator = torch.Generator().manual_seed(3)
    preds = torch.randn(30, 4, generator=generator, dtype=F64).softmax(-1)
    target = torch.randint(0, 4, (30,), generator=generator)
    weights = torch.randint(1, 4, (30,), generator=generator)
    error, cell = tc.ECE, (preds.T * 5).long()
    if kind == "equal mass":
        error, cell = tc.ACE, preds.T.argsort().argsort() // 6
    how = {"copies": weights, "floating weights": weights.double()}.get(kind)
    metric = error(task="multiclass", num_classes=4, mode="classwise", n_bins=5)
    found = calibration_test(metric, preds, target, weights=how, n_replicates=20, seed=7)
    # Random numbers belong to ranks of rows, not to positions, so that results do not depend on their order.
    rows = torch.tensor(sorted(range(30), key=lambda i: sum((c + 1) ** 0.5 * float(preds[i, c]) for c in range(4))))
    rows = rows.repeat_interleave(weights[rows]) if kind == "copies" else rows
    ones = how[rows] if kind == "floating weights" else torch.ones(len(rows), dtype=F64)
    expected = slow_label_simulation(preds[rows], cell[:, rows].tolist(), 5, ones, 7, 20)
    assert float(found.noise_floor) == pytest.approx(sum(expected) / 20, rel=1e-9)
    at_least = sum(x >= float(found.statistic) - 1e-9 for x in expected)
    assert float(found.p_value) == pytest.approx((1 + at_least) / 21)
    assert found.smallest_p_value == pytest.approx(1 / 21)
    order = torch.randperm(30, generator=generator)
    shuffled = None if how is None else how[order]
    again = calibration_test(metric, preds[order], target[order], weights=shuffled, n_replicates=20, seed=7)
    assert float(again.noise_floor) == pytest.approx(float(found.noise_floor), rel=1e-12)
    assert float(again.p_value) == float(found.p_value)


def test_class_wise_averages_detect_a_fault_of_all_of_many_classes():
    """50 classes and 700 rows: the smallest Cauchy combination is 0.05 if one class deviates."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(6, 700, 50, generator=generator)
    target = torch.multinomial(logits.softmax(-1).flatten(0, 1), 1, generator=generator).reshape(6, 700)
    how = {"task": "multiclass", "num_classes": 50, "mode": "classwise"}
    found = calibration_test(tc.ECE(**how, batch_shape=(6,)), (1.3 * logits).softmax(-1), target, n_replicates=199)
    assert int((found.p_value <= 0.01).sum()) >= 4  # expected: more than 5
    streamed = tc.ECE(**how)
    streamed.update((1.3 * logits[0]).softmax(-1), target[0])
    combined = streamed.test(n_replicates=999)
    assert combined.smallest_p_value == pytest.approx(0.05, rel=0.02)
    assert "0.05 if one class deviates" in combined.method
    assert "smallest p of one deviating class 0.05" in str(combined)


def test_soft_targets_and_many_rows_have_combined_p_values(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(40, 3, generator=generator, dtype=F64).softmax(-1)
    metric = tc.ECE(task="multiclass", num_classes=3, mode="classwise")
    assert "Cauchy" in calibration_test(metric, preds, preds.roll(1, -1), n_replicates=19).method
    target = torch.randint(0, 3, (40,), generator=generator)
    assert "Cauchy" not in calibration_test(metric, preds, target, n_replicates=19).method
    monkeypatch.setattr(testing, "MAX_LABELS", 40 * 19 - 1)
    assert "Cauchy" in calibration_test(metric, preds, target, n_replicates=19).method
