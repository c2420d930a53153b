"""Squared kernel calibration error: slow loops, simulations, few samples, blocks of a stream."""

import math
from functools import partial
from itertools import product

import oracles
import pytest
import torch
from cases import N_CLASSES, Case
from helpers.canonical import COPIES, F64, TASKS, Largest, calibrated, close, data, rows_of
from helpers.refusals import assert_refused
from oracles import canonical as oracle

import torchcalib as tc
from torchcalib.kernels import pair_op

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


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_slow_loop_gradient_of_skce(estimator):
    preds, target = data("multiclass", 8)
    leaf, ones, step = preds.clone().requires_grad_(), [1] * 8, 1e-6
    tc.skce(leaf, target, task="multiclass", estimator=estimator, block_size=4, chunk=3).backward()
    targets = [oracles.one_hot(h, N_CLASSES) for h in target.tolist()]
    for at in [(0, 0), (3, 2), (7, 3)]:
        values = []
        for sign in (1, -1):
            moved = preds.clone()
            moved[at] += sign * step
            values.append(oracle.skce(moved.tolist(), targets, ones, estimator, block_size=4))
        assert leaf.grad[at].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-9)


LEAST = {"unbiased": 2, "biased": 1, "linear": 2, "block": 8}
"""Samples that each estimator needs, with blocks of 8."""


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_too_few_samples_are_nan(estimator):
    preds, target = data("multiclass", 10, dtype=torch.float32)
    given = {"task": "multiclass", "estimator": estimator, "block_size": 8}
    for bandwidth in (1.0, "median"):
        for n in range(LEAST[estimator] + 1):
            value = tc.skce(preds[:n], target[:n], bandwidth=bandwidth, **given)
            assert value.isnan() == (n < LEAST[estimator])
            assert (value.shape, value.dtype) == ((), torch.float32)


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


def standard_errors(values, expected=0.0):
    """How many standard errors the mean of simulated values is away from what is expected."""
    return float((values.mean() - expected) / (values.std() / math.sqrt(len(values))))


@pytest.mark.parametrize("given", [{"estimator": "unbiased"}, {"estimator": "linear", "kernel": "gaussian"},
                                   {"estimator": "block", "block_size": 10, "bandwidth": 0.2}], ids=str)  # fmt: skip
def test_simulated_estimates_are_unbiased(given):
    """Calibrated: 0 on average, and half below. Otherwise the same on average for 10 samples and for 40."""
    preds, target = calibrated(4000, 40)
    values = tc.skce(preds, target, task="multiclass", **given)
    assert abs(standard_errors(values)) < 4
    assert 0.4 < (values < 0).double().mean() < 0.75
    wrong = preds.pow(3) / preds.pow(3).sum(-1, keepdim=True)
    few, many = (tc.skce(wrong[:, :n], target[:, :n], task="multiclass", **given) for n in (10, 40))
    assert abs(standard_errors(few - many)) < 4
    assert standard_errors(many) > 8


def test_simulated_bias_of_all_pairs_is_the_mean_of_a_sample_with_itself():
    preds, target = calibrated(4000, 40)
    values = tc.skce(preds, target, task="multiclass", estimator="biased")
    own = (1 - preds.square().sum(-1)).mean()  # E |e_y - p|^2 given p
    assert abs(standard_errors(values, own / 40)) < 4


@pytest.mark.parametrize("estimator", ["linear", "block"])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_law_a_row_of_weight_zero_has_no_part_in_the_gradient(task, estimator):
    preds, target = data(task, 80)
    logits = preds.logit() if task == "binary" else preds.log()
    held = torch.arange(80) != 5
    marked, alone = logits.clone(), logits[held].requires_grad_()
    marked[5] = torch.nan
    given = {"task": task, "from_logits": True, "estimator": estimator}
    tc.skce(marked.requires_grad_(), target, weights=held.long(), **given).backward()
    tc.skce(alone, target[held], **given).backward()
    close(marked.grad[held], alone.grad)
    assert not marked.grad[5].any()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_law_updates_of_whole_blocks_are_one_call(task, size):
    """Streamed, merged, pickled or kept apart: the laws that do not hold for updates that cut through blocks."""
    case = Case("", tc.skce, tc.SKCE, task, {}, {"multilabel": {"num_labels": N_CLASSES}}.get(task, {}))
    preds, target = case.data(n=5 * size, lead=(2,))
    given = {"estimator": "block", "block_size": size}
    series = case.metric(batch_shape=(2,), **given)
    one, other = case.metric(**given), case.metric(**given)
    for piece in (slice(0, 2 * size), slice(2 * size, 2 * size), slice(2 * size, 5 * size)):
        series.update(preds[:, piece], target[:, piece])
    close(series.compute(), case.call(preds, target, **given))
    one.update(preds[0, : 2 * size], target[0, : 2 * size])
    other.update(preds[0, 2 * size :], target[0, 2 * size :])
    one.merge_state(other)
    close(one.compute(), case.call(preds[0], target[0], **given))


def test_law_what_is_left_of_an_update_is_no_block():
    preds, target = calibrated(1, 21)
    metric = tc.SKCE(task="multiclass")
    for piece in (slice(0, 1), slice(1, 8), slice(8, 21)):
        metric.update(preds[0][piece], target[0][piece])
    kept = torch.cat([torch.arange(1, 7), torch.arange(8, 20)])
    close(metric.compute(), tc.skce(preds[0][kept], target[0][kept], task="multiclass", estimator="linear"))
    assert metric.statistic().n == 9


def test_law_rows_of_weight_zero_do_not_cut_blocks():
    preds, target = calibrated(1, 24)
    weights = torch.arange(24) % 3 != 0
    dropped = target[0].masked_fill(~weights, -1)
    for estimator in ("linear", "block"):
        given = {"task": "multiclass", "estimator": estimator, "block_size": 5, "chunk": 2}
        expected = tc.skce(preds[0][weights], target[0][weights], **given)
        close(tc.skce(preds[0], target[0], weights=weights, **given), expected)
        close(tc.skce(preds[0], dropped, ignore_index=-1, **given), expected)


def test_of_all_pairs_and_all_blocks_no_more_than_a_chunk_is_held():
    """Neither on the way there nor back."""
    x, weights, grads = torch.rand(600, 3), torch.ones(1, 600), torch.ones(1)
    for kernel in ("laplacian", "gaussian"):
        with Largest() as seen:
            pair_op._pair_sums._function(x, x, weights, kernel, 50)
            pair_op._pair_sums_backward._function(x, x, weights, grads, kernel, 50)
        assert 50 * 50 <= seen.size <= 600 * 50
    logits, target, one = torch.rand(6000, 5), torch.zeros(6000, dtype=torch.int64), torch.ones(())
    given = (True, "laplacian", 4, False, 10)
    with Largest() as seen:
        pair_op._block_sums._function(logits, target, None, one, *given)
    assert seen.size <= 10 * 4 * 5
    with Largest() as seen:
        pair_op._block_sums_backward._function(logits, target, None, one, torch.ones(3), *given)
    assert seen.size == logits.numel()  # the gradient


def test_bad_arguments_are_refused():
    preds, target = calibrated(1, 10)
    wrong = [
        ({"estimator": "u"}, ValueError, "`estimator` must be one of 'unbiased', 'biased'"),
        ({"kernel": "rbf"}, ValueError, "`kernel` must be one of 'laplacian', 'gaussian', got 'rbf'"),
        ({"bandwidth": 0}, ValueError, "`bandwidth` must be a positive number or 'median', got 0"),
        ({"bandwidth": "mean"}, TypeError, "`bandwidth` must be a positive number or 'median', got 'mean'"),
        ({"block_size": 1}, ValueError, "`block_size` must be at least 2"),
        ({"chunk": 0}, ValueError, "`chunk` must be at least 1"),
        ({"average": None}, ValueError, "`average` must be 'macro'"),
        ({"weights": torch.full((10,), 0.5)}, ValueError, "`weights` must be whole"),
    ]
    call = partial(tc.skce, preds[0], target[0], task="multiclass")
    assert_refused((given, partial(call, **given), error, [part]) for given, error, part in wrong)
    for call, kind, message in (
        (partial(tc.SKCE, estimator="unbiased"), ValueError, "all pairs of samples cannot be had from"),
        (partial(tc.SKCE, bandwidth="median"), TypeError, "a positive number, got 'median'"),
        (partial(tc.skce_test, preds[0, :, 0], target[0] % 2, estimator="biased"), ValueError, "'unbiased' of a test"),
    ):
        with pytest.raises(kind, match=message):
            call(task="binary")
