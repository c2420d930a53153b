"""SKCE by group: blocks are cut within each group of each update. Values are those of the function over each group."""

from functools import partial
from itertools import product

import pytest
import torch
from cases import CASES
from helpers.numbers import close

import torchcalib as tc

N_GROUPS = 6
# Means of at most 200 blocks of values up to 2, summed in another order: 200 * 2 * 2.2e-16, with room.
close = partial(close, rtol=1e-10)


@pytest.mark.parametrize("copies", [1, 3, 40])  # of 40 copies of a row whole blocks are made
@pytest.mark.parametrize("case", [case for case in CASES if case.in_blocks], ids=str)
def test_values_and_gradients_are_those_of_the_function_over_each_group(case, copies):
    preds, target = case.data(n=120, lead=(2,))
    groups = torch.randint(-1, N_GROUPS - 1, (2, 120), generator=torch.Generator().manual_seed(0))
    groups = groups.masked_fill(groups == 2, 3)  # group 2 is empty, -1 is none
    weights = None if copies == 1 else torch.arange(240).reshape(2, 120) * 7 % copies
    metric = tc.ByGroup(case.metric(batch_shape=(2,)), num_groups=N_GROUPS)
    mine, theirs = (preds.clone().requires_grad_() for _ in range(2))
    expected = []
    for k, b in product(range(N_GROUPS), range(2)):
        rows = groups[b] == k
        own = None if weights is None else weights[b, rows]
        expected.append(case.call(theirs[b, rows], target[b, rows], weights=own))
    expected = torch.stack(expected).reshape(N_GROUPS, 2)
    value = metric(mine, target, groups=groups, weights=weights)
    close(value, expected)
    held = ~expected.isnan()
    value[held].sum().backward()
    expected[held].sum().backward()
    close(mine.grad, theirs.grad)
    if copies == 1:
        sizes = torch.stack([(groups == k).sum(-1) for k in range(N_GROUPS)])
        close(metric.n(), (sizes // case.options.get("block_size", 2)).double())  # n is the number of blocks
    for n in (0, 1):  # too few for a block
        metric.update(preds[:, :n], target[:, :n], groups=groups[:, :n])
    other = tc.ByGroup(case.metric(batch_shape=(2,)), num_groups=N_GROUPS)
    other.update(preds, target, groups=groups, weights=weights)
    metric.merge_state(other)  # the same blocks once more
    close(metric.compute(), expected)


def test_a_weight_of_any_size_takes_no_memory():
    """Blocks of copies of one row alone are counted, not made: h = |r|^2 each, whatever the kernel."""
    p = torch.tensor([0.2, 0.5], dtype=torch.float64)
    metric = tc.ByGroup(tc.SKCE(task="binary", estimator="block"), num_groups=2)
    metric.update(p, torch.ones(2, dtype=torch.int64), groups=torch.arange(2), weights=torch.tensor([32 * 10**10, 64]))
    assert metric.n().tolist() == [10**10, 2]
    close(metric.compute(), 2 * (1 - p) ** 2)


def test_update_off_the_cpu_never_asks_for_a_value():
    preds, target, groups = torch.empty(9, device="meta"), *torch.empty(2, 9, dtype=torch.int64, device="meta")
    for weights in (None, target):
        metric = tc.ByGroup(tc.SKCE(task="binary", from_logits=True), num_groups=N_GROUPS).to("meta")
        metric.update(preds, target, groups=groups, weights=weights)
        assert metric.state.device.type == "meta"
