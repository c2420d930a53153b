"""Squared kernel calibration error and its test: slow loops, simulations, few samples, blocks of a stream."""

from itertools import product

import oracles
import pytest
import torch
from cases import N_CLASSES, Case
from helpers.canonical import COPIES, F64, TASKS, calibrated, close, data, rows_of
from helpers.null_distribution import check_valid
from oracles import canonical as oracle

import torchcalib as tc

ESTIMATORS = ["unbiased", "biased", "linear", "block"]
# Every pair of an estimator, a kernel, a bandwidth and a task.
SETTINGS = [
    (list(TASKS)[(k + k // 4) % 3], *setting)
    for k, setting in enumerate(product(ESTIMATORS, ["laplacian", "gaussian"], [0.4, "median"]))
]


@pytest.mark.parametrize(("task", "estimator", "kernel", "bandwidth"), SETTINGS)
def test_slow_loop_skce(task, estimator, kernel, bandwidth):
    preds, target = data(task, 23)
    given = {"estimator": estimator, "kernel": kernel, "bandwidth": bandwidth, "block_size": 3}
    for weights in (None, COPIES):
        copies = [1] * 23 if weights is None else weights.tolist()
        expected = [oracle.skce(q, t, copies, **given) for q, t in rows_of(task, preds, target)]
        found = tc.skce(preds, target, task=task, weights=weights, chunk=5, **given, **TASKS[task])
        close(found.reshape(-1), torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("kernel", ["laplacian", "gaussian"])
def test_gradients_in_predictions_and_weights_are_those_of_finite_differences(kernel):
    """Each value of a batch by itself, so that the incoming gradients differ."""
    preds, target = data("binary", 9, lead=(2,))
    weights = torch.linspace(0.5, 2, 18, dtype=F64).reshape(2, 9).requires_grad_()

    def value(preds, weights):
        found = tc.skce(preds, target, task="binary", estimator="biased", kernel=kernel, weights=weights, chunk=4)
        return found * torch.tensor([2.0, 3.0])

    assert torch.autograd.gradcheck(value, (preds.requires_grad_(), weights))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("task", TASKS)
def test_a_single_sample_is_nan_and_never_infinite_but_for_the_biased_estimator(task, estimator):
    """The sum over pairs of one sample is 0 but for rounding: 300 samples, alone, by weights and by `ignore_index`."""
    preds, target = data(task, 300)
    given = {"task": task, "estimator": estimator, "block_size": 2, **TASKS[task]}
    alone = tc.skce(preds.unsqueeze(1), target.unsqueeze(1), **given)
    weights = torch.eye(40, dtype=torch.int64)
    weighted = tc.skce(preds[:40], target[:40], weights=weights, **given)
    marked = target[:40].where(weights[3].bool() if task != "multilabel" else weights[3].bool().unsqueeze(-1), -1)
    ignored = tc.skce(preds[:40], marked, ignore_index=-1, **given)
    for values in (alone, weighted, ignored):
        assert bool((values.isfinite() if estimator == "biased" else values.isnan()).all())
    if estimator != "biased":
        kept = tc.skce(preds[:40], target[:40], weights=weights[3] + weights[4], **given)
        close(kept, tc.skce(preds[3:5], target[3:5], **given))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_law_updates_of_whole_blocks_are_one_call_and_their_rests_no_blocks(task, size):
    """Streamed, merged or kept apart: the laws that do not hold for updates that cut through blocks."""
    case = Case("", tc.skce, tc.SKCE, task, {}, {"multilabel": {"num_labels": N_CLASSES}}.get(task, {}))
    preds, target = case.data(n=5 * size + 1, lead=(2,))
    given = {"estimator": "block", "block_size": size}
    expected = case.call(preds, target, **given)
    series = case.metric(batch_shape=(2,), **given)
    one, other = case.metric(**given), case.metric(**given)
    for piece in (slice(0, 2 * size), slice(2 * size, 2 * size), slice(2 * size, 5 * size + 1)):
        series.update(preds[:, piece], target[:, piece])
    close(series.compute(), expected)
    one.update(preds[0, : 2 * size], target[0, : 2 * size])
    other.update(preds[0, 2 * size :], target[0, 2 * size :])
    one.merge_state(other)
    close(one.compute(), expected[0])
    one.update(preds[0, : size - 1], target[0, : size - 1])
    close(one.compute(), expected[0])
    assert (one.statistic().n == 5).all()


# The test


@pytest.mark.parametrize(("estimator", "size"), [("linear", 2), ("block", 4)])
def test_slow_loop_p_value(estimator, size):
    preds, target = calibrated(1, 41)
    found = tc.skce_test(preds[0], target[0], task="multiclass", estimator=estimator, block_size=size)
    ts = [oracles.one_hot(h, 3) for h in target[0].tolist()]
    means = oracle.block_means(preds[0].tolist(), ts, [1] * 41, "laplacian", 1.0, size)
    assert found.value.item() == pytest.approx(sum(means) / len(means), rel=1e-11)
    assert found.p_value.item() == pytest.approx(oracle.p_value(means), rel=1e-9)


def test_simulated_bound_rejects_no_more_often_than_it_says_and_finds_what_is_plain():
    preds, target = calibrated(500, 60)
    bound = tc.skce_test(preds, target, task="multiclass", estimator="unbiased").p_value
    check_valid(bound)
    for level in (0.5, 0.2, 0.05):
        assert (bound <= level).double().mean() <= level
    preds, target = calibrated(1, 4000, concentration=0.2)
    found = tc.skce_test(preds, (target + 1) % 3, task="multiclass", estimator="unbiased").p_value
    assert found < 1e-3


def test_closed_form_a_model_that_is_right_and_sure_is_not_rejected():
    preds, target = torch.eye(3)[[0, 1, 2, 1, 0, 2]], torch.tensor([0, 1, 2, 1, 0, 2])
    for estimator in ("linear", "unbiased"):
        found = tc.skce_test(preds, target, task="multiclass", estimator=estimator)
        assert found.value == 0
        assert found.p_value == 1  # every calibrated model shows as much


def test_streamed_test_is_that_of_one_call_and_of_every_label():
    preds, target = data("multilabel", 200)
    metric = tc.SKCE(task="multilabel", num_labels=N_CLASSES)
    for piece in (slice(0, 80), slice(80, 200)):
        metric.update(preds[piece], target[piece])
    close(metric.test(), tc.skce_test(preds, target, task="multilabel"))
    assert metric.test().p_value.shape == (N_CLASSES,)


@pytest.mark.parametrize("estimator", ["linear", "block", "unbiased"])
def test_p_value_of_less_than_two_blocks_is_nan(estimator):
    """The variance of one block is 0 but for rounding: 300 sets of one block, or of one sample."""
    preds, target = calibrated(300, 1 if estimator == "unbiased" else 3)
    given = {"task": "multiclass", "estimator": estimator, "block_size": 3}
    assert bool(tc.skce_test(preds, target, **given).p_value.isnan().all())
