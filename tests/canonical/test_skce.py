"""Squared kernel calibration error: slow loops, the laws of what does not stream, simulations, blocks of a stream."""

import math
from functools import partial

import oracles
import pytest
import torch
from cases import N_CLASSES, Case
from contract import test_laws as laws
from oracles import canonical as oracle
from torch.utils._python_dispatch import TorchDispatchMode

import torchcalib as tc
from torchcalib.kernels import pair_op
from torchcalib.predictions import InputFormat

F64 = torch.float64
ESTIMATORS = ["unbiased", "biased", "linear", "block"]
TASKS = {"binary": {}, "multiclass": {}, "multilabel": {"average": None}}


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **{"rtol": 1e-11, "atol": 1e-13, **tolerance})


def rows_of(task, preds, target):
    """One (rows q, rows t) for every value."""
    if task == "multiclass":
        return [(preds.tolist(), [oracles.one_hot(h, N_CLASSES) for h in target.tolist()])]
    columns = [(preds, target)] if task == "binary" else zip(preds.T, target.T, strict=True)
    return [oracles.as_rows(p.tolist(), y.tolist()) for p, y in columns]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bandwidth", [0.4, "median"])
@pytest.mark.parametrize("kernel", ["laplacian", "gaussian"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("task", TASKS)
def test_slow_loop_skce(task, estimator, kernel, bandwidth, weighted):
    preds, target = Case("", tc.skce, tc.SKCE, task).data(n=23)
    weights = torch.tensor([1, 0, 3, 2, 1, 7, 0, 1] * 3)[:23] if weighted else torch.ones(23, dtype=torch.int64)
    given = {"estimator": estimator, "kernel": kernel, "bandwidth": bandwidth, "block_size": 3}
    expected = [oracle.skce(q, t, weights.tolist(), **given) for q, t in rows_of(task, preds, target)]
    found = tc.skce(preds, target, task=task, weights=weights if weighted else None, chunk=5, **given, **TASKS[task])
    close(found.reshape(-1), torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_slow_loop_gradient_of_skce(estimator):
    preds, target = Case("", tc.skce, tc.SKCE, "multiclass").data(n=8)
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


class OfFunction(Case):
    """A case of a function that has no streaming class."""

    @property
    def differentiable(self):
        return self.options.get("bandwidth") != "median"  # which finite differences move, and a derivative does not

    @property
    def format(self):
        return InputFormat(self.task, whole_weights=self.options.get("estimator") != "biased")


UNSTREAMED = [
    OfFunction(f"{name}-{task}", tc.skce, tc.SKCE, task, {**options, "from_logits": task == "multiclass"})
    for task in TASKS
    for name, options in {
        "unbiased": {"bandwidth": 0.5},
        "median": {"bandwidth": "median", "kernel": "gaussian"},
        "biased": {"estimator": "biased", "bandwidth": 0.5, "chunk": 7},
    }.items()
]
LAWS = [
    laws.test_law_sample_order,
    laws.test_law_batch_axis_is_a_loop,
    laws.test_law_integer_weights_are_repeats,
    laws.test_law_leading_axes_of_weights_are_a_loop,
    laws.test_law_rows_of_weight_zero_are_never_read,
    laws.test_law_gradient_is_that_of_finite_differences,
    laws.test_law_weighted_gradient_is_that_of_repeats,
    laws.test_law_class_axis_may_stand_anywhere,
    laws.test_law_soft_targets_of_certainty_are_labels,
    partial(laws.test_law_low_precision_is_read_as_it_is, dtype=torch.bfloat16),
    partial(laws.test_law_low_precision_is_read_as_it_is, dtype=torch.float16),
    partial(laws.test_law_compiled_and_mapped_functions_are_the_function_and_there_a_bad_row_gives_nan, wrap="vmap"),
]
NAMES_OF_LAWS = [getattr(law, "func", law).__name__ for law in LAWS]


@pytest.mark.parametrize("law", LAWS, ids=NAMES_OF_LAWS)
@pytest.mark.parametrize("case", UNSTREAMED, ids=str)
def test_law_of_what_does_not_stream(case, law):
    law(case)


@pytest.mark.parametrize("estimator", ["unbiased", "biased", "linear"])
def test_law_compiled_is_the_function(estimator):
    case = OfFunction(estimator, tc.skce, tc.SKCE, "multiclass", {"estimator": estimator})
    laws.test_law_compiled_and_mapped_functions_are_the_function_and_there_a_bad_row_gives_nan(case, "compile")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_law_too_few_samples_are_nan(estimator):
    preds, target = Case("", tc.skce, tc.SKCE, "multiclass").data(n=10, dtype=torch.float32)
    given = {"task": "multiclass", "estimator": estimator, "block_size": 8}
    least = {"unbiased": 2, "biased": 1, "linear": 2, "block": 8}[estimator]
    for bandwidth in (1.0, "median"):
        for n in range(least + 1):
            value = tc.skce(preds[:n], target[:n], bandwidth=bandwidth, **given)
            assert value.isnan() == (n < least)
            assert (value.shape, value.dtype) == ((), torch.float32)


def calibrated(n_sets, n, num_classes=3, seed=0, concentration=1.0):
    """Sets of predictions `(S, N, C)`, and labels drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    preds = (torch.randn(n_sets, n, num_classes, generator=generator, dtype=F64) / concentration).softmax(-1)
    target = torch.multinomial(preds.flatten(0, 1), 1, generator=generator).reshape(n_sets, n)
    return preds, target


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


def test_simulated_soft_targets_have_the_same_expectation_and_less_variance():
    preds, _ = calibrated(1000, 30)
    truth = (2 * preds).softmax(-1)
    labels = torch.multinomial(truth.flatten(0, 1), 1, generator=torch.Generator().manual_seed(2)).reshape(1000, 30)
    hard, soft = (tc.skce(preds, target, task="multiclass") for target in (labels, truth))
    assert abs(standard_errors(hard - soft)) < 4
    assert soft.std() < hard.std() / 2


# The test that comes with it.


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
    p = tc.skce_test(preds, target, task="multiclass", **given).p_value.sort().values
    steps = torch.arange(1001, dtype=F64) / 1000
    distance = torch.maximum((p - steps[:-1]).abs().max(), (p - steps[1:]).abs().max())
    assert distance < 1.628 / math.sqrt(1000)  # Kolmogorov's distribution at 1 %


def test_simulated_bound_rejects_no_more_often_than_it_says_and_finds_what_is_plain():
    preds, target = calibrated(500, 60)
    bound = tc.skce_test(preds, target, task="multiclass", estimator="unbiased").p_value
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
        assert found.p_value == {"linear": 0.5, "unbiased": 1}[estimator]
    assert tc.skce_test(preds[:3], target[:3], task="multiclass").p_value.isnan()


@pytest.mark.parametrize("estimator", ["linear", "block", "unbiased", "biased"])
@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_law_a_row_of_weight_zero_has_no_part_in_the_gradient(task, estimator):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(80, 3, generator=generator, dtype=F64)
    target = torch.randint(0, 2, (80,), generator=generator)
    if task == "binary":
        logits = logits[:, 0]
    held = torch.arange(80) != 5
    marked = logits.clone()
    marked[5] = torch.nan
    given = {"task": task, "from_logits": True, "estimator": estimator}
    marked.requires_grad_()
    tc.skce(marked, target, weights=held.long(), **given).backward()
    alone = logits[held].requires_grad_()
    tc.skce(alone, target[held], **given).backward()
    close(marked.grad[held], alone.grad)
    assert not marked.grad[5].any()


@pytest.mark.parametrize("estimator", ["linear", "block", "unbiased"])
def test_law_classes_against_the_rest_are_a_binary_task(estimator):
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(80, 4, generator=generator, dtype=F64)
    preds, target = preds / preds.sum(-1, keepdim=True), torch.randint(0, 4, (80,), generator=generator)
    found = tc.skce_test(preds, target, task="multiclass", positive_classes=[1, 2], estimator=estimator)
    rest = preds[:, 1:3].sum(-1), ((target == 1) | (target == 2)).long()
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


# Blocks of a stream.


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


def test_no_value_is_asked_for_off_the_cpu():
    """Meta tensors have no values: whatever would wait for a GPU to read one raises here."""
    preds, target = (t.to("meta") for t in calibrated(1, 24))
    for estimator in ("linear", "block"):
        for more in ({}, {"weights": torch.ones(1, 24, device="meta")}):
            metric = tc.SKCE(task="multiclass", estimator=estimator, ignore_index=-1, nan_policy="drop").to("meta")
            metric.update(preds, target, **more)
            assert metric.state.shape == (2 + 3,)


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.size = max([self.size, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return out


@pytest.mark.parametrize("kernel", ["laplacian", "gaussian"])
def test_nothing_of_all_pairs_is_held(kernel):
    """Neither on the way there nor back."""
    x, weights, grads = torch.rand(600, 3), torch.ones(1, 600), torch.ones(1)
    with Largest() as seen:
        pair_op._pair_sums._function(x, x, weights, kernel, 50)
        pair_op._pair_sums_backward._function(x, x, weights, grads, kernel, 50)
    assert 50 * 50 <= seen.size <= 600 * 50


def test_a_chunk_of_blocks_is_held():
    logits, target, one = torch.rand(6000, 5), torch.zeros(6000, dtype=torch.int64), torch.ones(())
    given = (True, "laplacian", 4, False, 10)
    with Largest() as seen:
        pair_op._block_sums._function(logits, target, None, one, *given)
    assert seen.size <= 10 * 4 * 5
    with Largest() as seen:
        pair_op._block_sums_backward._function(logits, target, None, one, torch.ones(3), *given)
    assert seen.size == logits.numel()  # the gradient


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(estimator="u"), ValueError, "`estimator` must be one of 'unbiased', 'biased'"),
        (lambda f: f(kernel="rbf"), ValueError, "`kernel` must be one of 'laplacian', 'gaussian', got 'rbf'"),
        (lambda f: f(bandwidth=0), ValueError, "`bandwidth` must be a positive number or 'median', got 0"),
        (lambda f: f(bandwidth="mean"), TypeError, "`bandwidth` must be a positive number or 'median', got 'mean'"),
        (lambda f: f(block_size=1), ValueError, "`block_size` must be at least 2"),
        (lambda f: f(chunk=0), ValueError, "`chunk` must be at least 1"),
        (lambda f: f(average=None), ValueError, "`average` must be 'macro'"),
        (lambda f: f(weights=torch.full((10,), 0.5)), ValueError, "`weights` must be whole"),
        (lambda f: tc.SKCE(task="binary", estimator="unbiased"), ValueError, "all pairs of samples cannot be had from"),
        (lambda f: tc.SKCE(task="binary", bandwidth="median"), TypeError, "a positive number, got 'median'"),
        (lambda f: tc.skce_test(torch.rand(4), torch.ones(4).long(), task="binary", estimator="biased"), ValueError,
         "'linear', 'block' or 'unbiased' of a test"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(call, error, message):
    preds, target = calibrated(1, 10)
    with pytest.raises(error, match=message):
        call(partial(tc.skce, preds[0], target[0], task="multiclass"))
