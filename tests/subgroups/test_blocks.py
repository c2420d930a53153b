"""SKCE by group: blocks are cut within each group of each update. Values are those of the function over each group."""

import itertools

import pytest
import torch
from cases import N_CLASSES, Case

import torchcalib as tc

N_GROUPS = 6
SIZES = {"binary": {}, "multiclass": {"num_classes": N_CLASSES}, "multilabel": {"num_labels": N_CLASSES}}


def close(a, b):
    """Means of at most 200 blocks of values up to 2, summed in another order: 200 * 2 * 2.2e-16, with room."""
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12, equal_nan=True)


def data(task, soft, n=120):
    """Logits, targets and groups: group 2 is empty, -1 is none."""
    g = torch.Generator().manual_seed(0)
    logits, target = Case("", tc.skce, tc.SKCE, task, {"from_logits": True}).data(n=n)
    if soft:
        target = torch.rand(logits.shape, generator=g, dtype=torch.float64)
        target = target.softmax(-1) if task == "multiclass" else target
    groups = torch.randint(-1, N_GROUPS - 1, (n,), generator=g)
    return logits, target, groups.masked_fill(groups == 2, 3)


@pytest.mark.parametrize(("task", "estimator"), list(itertools.product(SIZES, ("linear", "block"))))
def test_values_and_gradients_are_those_of_the_function_over_each_group(task, estimator):
    options = {"task": task, "from_logits": True, "estimator": estimator, "block_size": 5}
    options["average"] = None if task == "multilabel" else "macro"
    for copies, soft in itertools.product((1, 3, 40), (False, True)):  # of 40 copies of a row whole blocks are made
        preds, target, groups = data(task, soft)
        weights = None if copies == 1 else torch.arange(len(groups)) * 7 % copies
        metric = tc.ByGroup(tc.SKCE(**options, **SIZES[task]), num_groups=N_GROUPS)
        mine, theirs = (preds.clone().requires_grad_() for _ in range(2))
        expected = []
        for k in range(N_GROUPS):
            rows = groups == k
            own = None if weights is None else weights[rows]
            expected.append(tc.skce(theirs[rows], target[rows], weights=own, **options))
        expected = torch.stack(expected)
        value = metric(mine, target, groups=groups, weights=weights)
        close(value, expected)
        held = ~expected.isnan()
        value[held].sum().backward()
        expected[held].sum().backward()
        close(mine.grad, theirs.grad)
        other = metric.clone()
        other.reset()
        other.update(preds, target, groups=groups, weights=weights)
        metric.merge_state(other)  # the same blocks once more
        close(metric.compute(), expected)


def test_series_of_a_batch_and_batches_without_a_block():
    preds, target, groups = (t.reshape(2, 60, *t.shape[1:]) for t in data("multiclass", soft=False))
    metric = tc.ByGroup(tc.SKCE(task="multiclass", from_logits=True, batch_shape=(2,)), num_groups=N_GROUPS)
    metric.update(preds, target, groups=groups)
    for n in (0, 1):  # too few for a block
        for weights in (None, torch.ones(2, n, dtype=torch.int64)):
            metric.update(preds[:, :n], target[:, :n], groups=groups[:, :n], weights=weights)
    for b, k in itertools.product(range(2), range(N_GROUPS)):
        rows = groups[b] == k
        expected = tc.skce(preds[b][rows], target[b][rows], task="multiclass", from_logits=True, estimator="linear")
        close(metric.compute()[k, b], expected)
        assert metric.n()[k, b] == rows.sum() // 2, "n is the number of blocks"


def test_a_weight_of_any_size_takes_no_memory():
    """Blocks of copies of one row alone are counted, not made: h = |r|^2 each, whatever the kernel."""
    p = torch.tensor([0.2, 0.5], dtype=torch.float64)
    metric = tc.ByGroup(tc.SKCE(task="binary", estimator="block"), num_groups=2)
    metric.update(p, torch.ones(2, dtype=torch.int64), groups=torch.arange(2), weights=torch.tensor([32 * 10**10, 64]))
    assert metric.n().tolist() == [10**10, 2]
    close(metric.compute(), 2 * (1 - p) ** 2)


def test_update_off_the_cpu_never_asks_for_a_value():
    preds, target, groups = (t.to("meta") for t in data("multiclass", soft=False))
    for weights in (None, torch.ones(120, dtype=torch.int64, device="meta")):
        metric = tc.ByGroup(tc.SKCE(task="multiclass", from_logits=True), num_groups=N_GROUPS).to("meta")
        metric.update(preds, target, groups=groups, weights=weights)
        assert metric.state.device.type == "meta"
