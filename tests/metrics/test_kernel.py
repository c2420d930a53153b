"""Kernel calibration error and its test, canonical calibration error: limits, simulations, memory.

tests/contract compares values with slow loops.
"""

from functools import partial

import oracles
import pytest
import torch
from cases import CALLS, N_CLASSES, Case
from helpers import compare
from helpers.null_distribution import check_valid
from oracles import canonical as oracle
from torch.utils._python_dispatch import TorchDispatchMode

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.functional.kernel import _GRID
from torchcalib.inference import skce_test
from torchcalib.ops import leave_one_out, pairwise

F64 = torch.float64
close = partial(compare.close, rtol=1e-11, atol=1e-13)


def data(task, n, **how):
    return Case("", F.skce, tc.SKCE, task).data(n=n, **how)


def calibrated(n_sets, n, concentration=1.0):
    """Return data sets of predictions `(S, N, 3)`, and labels drawn from them."""
    generator = torch.Generator().manual_seed(0)
    preds = (torch.randn(n_sets, n, 3, generator=generator, dtype=F64) / concentration).softmax(-1)
    target = torch.multinomial(preds.flatten(0, 1), 1, generator=generator).reshape(n_sets, n)
    return preds, target


# Canonical calibration error


def error(preds, target, task="multiclass", **options):
    return F.canonical_error(preds, target, task=task, **options)


@pytest.mark.parametrize("weighted", [False, True])
def test_bandwidth_by_likelihood_equals_slow_loop(weighted):
    """Each batch element has a separate bandwidth."""
    preds, target = calibrated(2, 20)
    preds[1] = preds[1] ** 3 / (preds[1] ** 3).sum(-1, keepdim=True)
    weights = torch.arange(20) % 3 if weighted else torch.ones(20, dtype=torch.int64)
    chosen = []
    for rows in preds.tolist():
        found = [oracle.leave_one_out_likelihood(rows, weights.tolist(), h) for h in _GRID]
        chosen.append(_GRID[found.index(max(found))])
    assert chosen[0] != chosen[1]
    value = error(preds, target, weights=weights.expand(2, -1) if weighted else None, batch_dims=1)
    for k in range(2):
        close(value[k], error(preds[k], target[k], bandwidth=chosen[k], weights=weights))


def test_canonical_error_with_zero_probabilities_is_the_limit_of_small_ones():
    """A certain sample is beyond the reach of all other kernels, so that only the nearest samples contribute."""
    preds = torch.tensor([[0.6, 0.4, 0], [0.7, 0.3, 0], [0.2, 0.8, 0], [0.5, 0.3, 0.2]], dtype=F64)
    target = torch.tensor([0, 1, 1, 2])
    labels = [oracles.one_hot(h, 3) for h in target.tolist()]
    for p in (1, 2):
        expected = oracle.canonical_error(preds.tolist(), labels, [1] * 4, p, 0.1)
        close(error(preds, target, p=p, bandwidth=0.1), torch.tensor(expected, dtype=F64))
    preds[2] = torch.tensor([0, 1, 0])
    at_zero = error(preds, target, bandwidth=0.5)
    near = (preds + 1e-200) / (preds + 1e-200).sum(-1, keepdim=True)
    assert at_zero.isfinite()
    close(error(near, target, bandwidth=0.5), at_zero, rtol=1e-9)
    close(error(preds.log(), target, bandwidth=0.5, from_logits=True), at_zero)
    preds, target = calibrated(1, 60)
    alone = torch.cat((preds[0], torch.tensor([[0.0, 1, 0]], dtype=F64)))
    labels = torch.cat((target[0], torch.tensor([1])))
    chosen = error(alone, labels)
    assert any(torch.equal(chosen, error(alone, labels, bandwidth=h)) for h in _GRID[5:18]), (
        "zeros choose the bandwidth"
    )


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("bandwidth", [0.001, 0.1, "likelihood"])
def test_gradient_is_finite_for_probabilities_0_and_1(from_logits, bandwidth):
    generator = torch.Generator().manual_seed(0)
    logits = 60 * torch.randn(50, 4, generator=generator)
    logits[:10] = torch.where(logits[:10] == logits[:10].amax(-1, keepdim=True), 0.0, -torch.inf)
    probs = logits.softmax(-1)
    probs = probs.masked_fill(probs < 1e-20, 0)  # below 1e-20, 1 / q exceeds the range of float32
    preds = (logits if from_logits else probs).requires_grad_()
    value = error(preds, torch.randint(0, 4, (50,), generator=generator), bandwidth=bandwidth, from_logits=from_logits)
    value.backward()
    assert value.isfinite()
    assert preds.grad.isfinite().all()


# Squared kernel calibration error


@pytest.mark.parametrize("kernel", ["laplacian", "gaussian"])
@pytest.mark.parametrize("estimator", ["block", "linear"])
def test_blocks_with_the_median_bandwidth_equal_slow_loop(estimator, kernel):
    """The bandwidth is the median over pairs of all samples of a batch element, not of a block."""
    preds, target = data("multiclass", 23, lead=(2,))
    how = {"estimator": estimator, "kernel": kernel, "bandwidth": "median", "block_size": 5}
    found = F.skce(preds, target, "multiclass", batch_dims=1, **how)
    for value, q, y in zip(found, preds.tolist(), target.tolist(), strict=True):
        labels = [oracles.one_hot(h, len(q[0])) for h in y]
        assert value.item() == pytest.approx(oracle.skce(q, labels, [1] * len(q), **how), rel=1e-9)


@pytest.mark.parametrize("kernel", ["laplacian", "gaussian"])
def test_gradients_for_predictions_and_weights_equal_finite_differences(kernel):
    """The batch elements have different incoming gradients."""
    preds, target = data("binary", 9, lead=(2,))
    weights = torch.linspace(0.5, 2, 18, dtype=F64).reshape(2, 9).requires_grad_()

    def value(preds, weights):
        given = {"task": "binary", "estimator": "biased", "kernel": kernel, "chunk": 4, "batch_dims": 1}
        found = F.skce(preds, target, weights=weights, **given)
        return found * torch.tensor([2.0, 3.0])

    assert torch.autograd.gradcheck(value, (preds.requires_grad_(), weights))


@pytest.mark.parametrize("case", [case for case in CALLS if case.in_blocks], ids=str)
def test_incomplete_blocks_are_dropped_and_batch_elements_are_separate(case):
    """Laws of states have updates with whole blocks."""
    size = case.options.get("block_size", 2)
    preds, target = case.data(n=5 * size + 1, lead=(2,))
    expected = case.call(preds, target)
    assert case.call(preds[:, : size - 1], target[:, : size - 1]).isnan().all()
    series = case.metric(batch_shape=(2,))
    for piece in (slice(0, 2 * size), slice(0, 0), slice(2 * size, None), slice(0, size - 1)):
        series.update(preds[:, piece], target[:, piece])
    close(series.compute(), expected)
    assert (series.statistic().n == 5).all()


# Test of the squared kernel calibration error


@pytest.mark.parametrize(("estimator", "size"), [("linear", 2), ("block", 4)])
def test_p_value_equals_slow_loop(estimator, size):
    preds, target = calibrated(1, 41)
    found = skce_test(preds[0], target[0], task="multiclass", estimator=estimator, block_size=size)
    ts = [oracles.one_hot(h, 3) for h in target[0].tolist()]
    means = oracle.block_means(preds[0].tolist(), ts, [1] * 41, "laplacian", 1.0, size)
    assert found.statistic.item() == pytest.approx(sum(means) / len(means), rel=1e-11)
    assert found.p_value.item() == pytest.approx(oracle.p_value(means), rel=1e-9)


def test_p_value_bound_is_valid_and_rejects_gross_miscalibration():
    preds, target = calibrated(500, 60)
    bound = skce_test(preds, target, task="multiclass", estimator="unbiased", batch_dims=1).p_value
    check_valid(bound)
    for level in (0.5, 0.2, 0.05):
        assert (bound <= level).double().mean() <= level
    preds, target = calibrated(1, 4000, concentration=0.2)
    found = skce_test(preds, (target + 1) % 3, task="multiclass", estimator="unbiased").p_value
    assert found < 1e-3


def test_certain_correct_predictions_have_p_value_1():
    preds, target = torch.eye(3)[[0, 1, 2, 1, 0, 2]], torch.tensor([0, 1, 2, 1, 0, 2])
    for estimator in ("linear", "unbiased"):
        found = skce_test(preds, target, task="multiclass", estimator=estimator)
        assert found.statistic == 0
        assert found.p_value == 1  # all residuals are 0


def test_streamed_test_equals_one_call_for_every_label():
    preds, target = data("multilabel", 200)
    metric = tc.SKCE(task="multilabel", num_labels=N_CLASSES)
    for piece in (slice(0, 80), slice(80, 200)):
        metric.update(preds[piece], target[piece])
    found, expected = metric.test(), skce_test(preds, target, task="multilabel")
    for name in ("statistic", "p_value", "low", "high"):
        close(getattr(found, name), getattr(expected, name))
    assert metric.test().p_value.shape == (N_CLASSES,)


@pytest.mark.parametrize("estimator", ["linear", "block", "unbiased"])
def test_p_value_of_less_than_two_blocks_is_nan(estimator):
    """The variance of one block is 0 up to rounding."""
    preds, target = calibrated(300, 1 if estimator == "unbiased" else 3)
    given = {"task": "multiclass", "estimator": estimator, "block_size": 3, "batch_dims": 1}
    assert bool(skce_test(preds, target, **given).p_value.isnan().all())


@pytest.mark.parametrize("case", [case for case in CALLS if case.function in (F.skce, F.canonical_error)], ids=str)
def test_a_single_sample_gives_nan_except_for_the_biased_estimator(case):
    """The sum over pairs of a sample is 0 up to rounding, also if weights or `ignore_index` leave one sample."""
    preds, target = case.data(n=40)
    weights = torch.eye(40, dtype=torch.int64)
    marked = target.where(weights[3].bool() if case.task != "multilabel" else weights[3].bool().unsqueeze(-1), -1)
    alone = case.call(preds.unsqueeze(1), target.unsqueeze(1))
    for values in (alone, case.call(preds, target, weights=weights), case.call(preds, marked, ignore_index=-1)):
        assert bool((values.isfinite() if case.options.get("estimator") == "biased" else values.isnan()).all())
    kept = case.call(preds, target, weights=weights[3] + weights[4])
    close(kept, case.call(preds[3:5], target[3:5]))


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor returned by any operation."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.size = max([self.size, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return out


def test_largest_tensor_is_a_chunk_of_pairs():
    """Both the forward and the backward pass."""
    x, one = torch.rand(600, 3), torch.ones(600)
    ways, grads = one.unsqueeze(0), torch.ones(1)
    for kernel in ("laplacian", "gaussian"):
        with Largest() as seen:
            pairwise._pair_sums._function(x, x, ways, kernel, 50)
            pairwise._pair_sums_backward._function(x, x, ways, grads, kernel, 50)
        assert 50 * 50 <= seen.size <= 600 * 50
    with Largest() as seen:
        mean, total = leave_one_out._leave_one_out._function(x, x, one, x, one, 50)
        leave_one_out._leave_one_out_backward._function(x, x, one, x, one, mean, total, x, 50)
    assert 50 * 50 <= seen.size <= 600 * 50
    logits, target, one = torch.rand(6000, 5), torch.zeros(6000, dtype=torch.int64), torch.ones(())
    given = (True, "laplacian", 4, False, 10)
    with Largest() as seen:
        pairwise._block_sums._function(logits, target, None, one, *given)
    assert seen.size <= 10 * 4 * 5
    with Largest() as seen:
        pairwise._block_sums_backward._function(logits, target, None, one, torch.ones(3), *given)
    assert seen.size == logits.numel()  # the gradient
