"""Canonical calibration error: slow loops, the bandwidth of greatest likelihood, probabilities of 0."""

import pytest
import torch
from helpers.canonical import COPIES, F64, TASKS, calibrated, close, data, rows_of
from oracles import canonical as oracle

import torchcalib as tc
from torchcalib.metrics.canonical import _GRID


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
    soft = preds.flip(0)
    sets = [(preds.tolist(), soft.tolist())] if task == "multiclass" else rows_of(task, preds, soft)
    expected = [oracle.canonical_error(q, t, [1] * 23, p, bandwidth) for q, t in sets]
    found = error(preds, soft, task, p=p, bandwidth=bandwidth, **TASKS[task])
    close(found.reshape(-1), torch.tensor(expected, dtype=F64))


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
