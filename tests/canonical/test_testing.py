"""The test by SKCE: slow loops, simulated p-values, closed forms, and the streamed test."""

import math

import oracles
import pytest
import torch
from helpers.canonical import F64, calibrated, close
from helpers.null_distribution import check_uniform, check_valid
from oracles import canonical as oracle

import torchcalib as tc


@pytest.mark.parametrize(("estimator", "size"), [("linear", 2), ("block", 4)])
def test_slow_loop_p_value(estimator, size):
    preds, target = calibrated(1, 41)
    found = tc.skce_test(preds[0], target[0], task="multiclass", estimator=estimator, block_size=size)
    ts = [oracles.one_hot(h, 3) for h in target[0].tolist()]
    means = oracle.block_means(preds[0].tolist(), ts, [1] * 41, "laplacian", 1.0, size)
    assert found.value.item() == pytest.approx(sum(means) / len(means), rel=1e-11)
    assert found.p_value.item() == pytest.approx(oracle.p_value(means), rel=1e-9)


@pytest.mark.parametrize("given", [{"estimator": "linear"}, {"estimator": "block", "block_size": 4}], ids=str)
def test_simulated_p_values_are_uniform(given):
    preds, target = calibrated(1000, 1000)
    check_uniform(tc.skce_test(preds, target, task="multiclass", **given).p_value, math.inf)


def test_simulated_bound_rejects_no_more_often_than_it_says_and_finds_what_is_plain():
    preds, target = calibrated(500, 60)
    bound = tc.skce_test(preds, target, task="multiclass", estimator="unbiased").p_value
    check_valid(bound)
    for level in (0.5, 0.2, 0.05):
        assert (bound <= level).double().mean() <= level
    wrong = calibrated(1, 4000, concentration=0.2)
    found = tc.skce_test(wrong[0], (wrong[1] + 1) % 3, task="multiclass", estimator="unbiased").p_value
    assert found < 1e-3


def test_closed_form_a_model_that_is_right_and_sure_is_not_rejected():
    preds, target = torch.eye(3)[[0, 1, 2, 1, 0, 2]], torch.tensor([0, 1, 2, 1, 0, 2])
    for estimator in ("linear", "unbiased"):
        found = tc.skce_test(preds, target, task="multiclass", estimator=estimator)
        assert found.value == 0
        assert found.p_value == 1  # every calibrated model shows as much
    assert tc.skce_test(preds[:3], target[:3], task="multiclass").p_value.isnan()


@pytest.mark.parametrize("estimator", ["linear", "block", "unbiased"])
def test_law_classes_against_the_rest_are_a_binary_task(estimator):
    preds, target = calibrated(1, 80, num_classes=4)
    found = tc.skce_test(preds[0], target[0], task="multiclass", positive_classes=[1, 2], estimator=estimator)
    rest = preds[0, :, 1:3].sum(-1), ((target[0] == 1) | (target[0] == 2)).long()
    for a, b in zip(found, tc.skce_test(*rest, task="binary", estimator=estimator), strict=True):
        close(a, b)


def test_streamed_test_is_that_of_one_call_and_of_every_label():
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(200, 3, generator=generator, dtype=F64)
    target = (torch.rand(200, 3, generator=generator) < preds).long()
    metric = tc.SKCE(task="multilabel", num_labels=3)
    for piece in (slice(0, 80), slice(80, 200)):
        metric.update(preds[piece], target[piece])
    found, expected = metric.test(), tc.skce_test(preds, target, task="multilabel")
    for a, b in zip(found, expected, strict=True):
        close(a, b)
    assert found.p_value.shape == (3,)


@pytest.mark.parametrize("estimator", ["linear", "block", "unbiased"])
def test_p_value_of_less_than_two_blocks_is_nan(estimator):
    """The variance of one block is 0 but for rounding: 300 sets of one block, or of one sample."""
    n = 1 if estimator == "unbiased" else 3
    preds, target = calibrated(300, n)
    given = {"task": "multiclass", "estimator": estimator, "block_size": 3}
    assert bool(tc.skce_test(preds, target, **given).p_value.isnan().all())
