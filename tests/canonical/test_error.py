"""Canonical calibration error: slow loops, probabilities of 0, few samples, simulations with a known error."""

import math
from functools import partial

import pytest
import torch
from helpers.canonical import COPIES, F64, TASKS, Largest, calibrated, close, data, rows_of
from helpers.refusals import assert_refused
from oracles import canonical as oracle

import torchcalib as tc
from torchcalib.canonical.error import _GRID
from torchcalib.kernels import others_op


def error(preds, target, task="multiclass", **options):
    return tc.canonical_error(preds, target, task=task, **options)


@pytest.mark.parametrize(("p", "bandwidth"), [(1, 0.1), (2, 0.02), (2, 1.0)])
@pytest.mark.parametrize("task", TASKS)
def test_slow_loop_canonical_error(task, p, bandwidth):
    preds, target = data(task, 23)
    for weights in (None, COPIES):
        copies = [1] * 23 if weights is None else weights.tolist()
        expected = [oracle.canonical_error(q, t, copies, p, bandwidth) for q, t in rows_of(task, preds, target)]
        given = {"p": p, "bandwidth": bandwidth, "weights": weights, **TASKS[task]}
        close(error(preds, target, task, chunk=5, **given).reshape(-1), torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("p", [1, 2])
def test_slow_loop_gradient_of_canonical_error(p):
    """Of probabilities that are moved by themselves, which is what a derivative in one of them is."""
    preds, target = data("multiclass", 8)
    leaf, step = preds.clone().requires_grad_(), 1e-6
    error(leaf, target, p=p, bandwidth=0.1, chunk=3).backward()
    ((_, targets),) = rows_of("multiclass", preds, target)
    for at in [(0, 0), (3, 2), (7, 3)]:
        values = []
        for sign in (1, -1):
            moved = preds.clone()
            moved[at] += sign * step
            values.append(oracle.canonical_error(moved.tolist(), targets, [1] * 8, p, 0.1))
        assert leaf.grad[at].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
def test_slow_loop_bandwidth_of_greatest_likelihood(weighted):
    """Of each series by itself."""
    preds, target = calibrated(2, 20)
    preds[1] = preds[1] ** 3 / (preds[1] ** 3).sum(-1, keepdim=True)
    weights = torch.arange(20) % 3 if weighted else torch.ones(20, dtype=torch.int64)
    chosen = []
    for rows in preds.tolist():
        found = [oracle.leave_one_out_likelihood(rows, weights.tolist(), h) for h in _GRID]
        chosen.append(_GRID[found.index(max(found))])
    assert chosen[0] != chosen[1]
    value = error(preds, target, weights=weights.expand(2, -1) if weighted else None)
    for k in range(2):
        close(value[k], error(preds[k], target[k], bandwidth=chosen[k], weights=weights))


def test_law_too_few_samples_are_nan():
    preds, target = calibrated(1, 3)
    for n in range(3):
        for bandwidth in (0.1, "likelihood"):
            value = error(preds[0, :n].float(), target[0, :n], bandwidth=bandwidth)
            assert value.isnan() == (n < 2)
            assert (value.shape, value.dtype) == ((), torch.float32)
            rows = torch.arange(3) < n
            assert error(preds[0], target[0], bandwidth=bandwidth, weights=rows).isnan() == (n < 2)
            marked = target[0].where(rows, -1)
            assert error(preds[0], marked, bandwidth=bandwidth, ignore_index=-1).isnan() == (n < 2)


def test_probabilities_of_zero_slow_loop_and_limit_of_small_ones():
    """Also where no other kernel reaches: of the third sample, which alone is sure, those nearest to it are left."""
    preds = torch.tensor([[0.6, 0.4, 0], [0.7, 0.3, 0], [0.2, 0.8, 0], [0.5, 0.3, 0.2]], dtype=F64)
    target = torch.tensor([0, 1, 1, 2])
    ((rows, targets),) = rows_of("multiclass", preds, target)
    for p in (1, 2):
        expected = oracle.canonical_error(rows, [t[:3] for t in targets], [1] * 4, p, 0.1)
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
def test_gradient_is_finite_where_probabilities_are_0_or_1(from_logits, bandwidth):
    generator = torch.Generator().manual_seed(0)
    logits = 60 * torch.randn(50, 4, generator=generator)
    logits[:10] = torch.where(logits[:10] == logits[:10].amax(-1, keepdim=True), 0.0, -torch.inf)
    probs = logits.softmax(-1)
    probs = probs.masked_fill(probs < 1e-20, 0)  # below, 1 / q is more than float32 holds
    preds = (logits if from_logits else probs).requires_grad_()
    value = error(preds, torch.randint(0, 4, (50,), generator=generator), bandwidth=bandwidth, from_logits=from_logits)
    value.backward()
    assert value.isfinite()
    assert preds.grad.isfinite().all()


def test_closed_form_of_few_predictions():
    """Where all predictions are the same the others' mean outcome is the expectation, whatever the bandwidth."""
    preds = torch.tensor([0.7, 0.3], dtype=F64).expand(10, 2)
    target = torch.tensor([0] * 8 + [1] * 2)
    gaps = [8 * abs(7 / 9 - 0.7), 2 * abs(8 / 9 - 0.7)]
    for bandwidth in (0.01, 1.0, "likelihood"):
        close(error(preds, target, bandwidth=bandwidth), torch.tensor(2 * sum(gaps) / 10, dtype=F64))


def mixed(n_sets, n, share, seed=0):
    """Labels of which a share is drawn from the prediction, all others from all classes alike."""
    preds, target = calibrated(n_sets, n, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    guess = torch.randint(0, 3, target.shape, generator=generator)
    return preds, torch.where(torch.rand(target.shape, generator=generator) < share, target, guess)


@pytest.mark.parametrize("p", [1, 2])
def test_simulated_error_goes_to_0_or_to_the_known_one(p):
    """E[y | q] = share q + (1 - share) / 3, so that the error is E sum_k |(1 - share)(q_k - 1/3)|^p."""
    distance = []
    for share in (1.0, 0.3):
        truth = ((1 - share) * (calibrated(1, 10**5)[0] - 1 / 3)).abs().pow(p).sum(-1).mean()
        values = [error(*mixed(8, n, share), p=p, bandwidth=n**-0.5).mean() for n in (60, 240, 960)]
        distance.append([float(abs(value - truth)) for value in values])
    for apart in distance:  # halves, or better, with each fourfold of the sample
        assert apart[1] < 0.8 * apart[0]
        assert apart[2] < 0.8 * apart[1]
    assert distance[1][2] < {1: 0.04, 2: 0.02}[p]


def test_nothing_of_all_pairs_is_held():
    x, one = torch.rand(600, 3, dtype=F64), torch.ones(600, dtype=F64)
    with Largest() as seen:
        mean, total = others_op._others._function(x, x, one, x, one, 50)
        others_op._others_backward._function(x, x, one, x, one, mean, total, x, 50)
    assert 50 * 50 <= seen.size <= 600 * 50


def test_no_value_is_asked_for_in_a_training_step():
    """Meta tensors have no values: whatever would wait for a GPU to read one raises here."""
    logits = torch.rand(24, 3, device="meta", requires_grad=True)
    target = torch.zeros(24, dtype=torch.int64, device="meta")
    for function in (tc.canonical_error, tc.skce):
        given = {"from_logits": True, "validate_args": False}
        function(logits, target, task="multiclass", **given).backward()
        assert logits.grad.shape == logits.shape


def test_bad_arguments_are_refused():
    preds, target = calibrated(1, 10)
    bandwidth = "`bandwidth` must be a positive number or 'likelihood', got {}".format
    wrong = [
        ({"p": 3}, ValueError, "`p` must be one of 1, 2, got 3"),
        ({"bandwidth": -1.0}, ValueError, bandwidth(-1.0)),
        ({"bandwidth": math.inf}, ValueError, bandwidth("inf")),
        ({"bandwidth": "median"}, TypeError, bandwidth("'median'")),
        ({"chunk": 0}, ValueError, "`chunk` must be at least 1"),
        ({"average": None}, ValueError, "`average` must be 'macro'"),
        ({"weights": torch.full((10,), 0.5)}, ValueError, "`weights` must be whole"),
    ]
    assert_refused((given, partial(error, preds[0], target[0], **given), kind, [part]) for given, kind, part in wrong)
