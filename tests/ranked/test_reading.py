"""What all metrics of a sample in order have in common: slow loops, laws under ties, ways to differentiate."""

from functools import partial

import pytest
import torch
from helpers.ranked import EQUAL_MASS, assert_gradient, assert_slow_loop, sample, samples, setting
from hypothesis import given, settings
from hypothesis import strategies as st

import torchcalib as tc

READINGS = [
    tc.ace,
    partial(tc.mce, bins="equal_mass"),
    partial(tc.rmsce, bins="equal_mass"),
    tc.tce,
    partial(tc.tce, variant="paper"),
    partial(tc.tce, bins="pava"),
    partial(tc.tce, bins="equal_mass"),
    partial(tc.gce, bins="pava", loss=lambda b: b.gap.abs()),
    tc.ks,
    lambda *a, **k: torch.stack(tc.corp(*a, **k), -1),
]


@setting
@pytest.mark.parametrize("name", EQUAL_MASS)
def test_slow_loop_value(name, task, how):
    function, options, loop = EQUAL_MASS[name]
    for weighted in (False, True):
        for seed in range(3):
            assert_slow_loop(function, loop, task, how, sample(task, seed=seed, weighted=weighted), **options)


@setting
@pytest.mark.parametrize("name", EQUAL_MASS)
def test_slow_loop_gradient(name, task, how):
    function, options, loop = EQUAL_MASS[name]
    assert_gradient(function, loop, task, how, **options)


@given(samples(), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_law_with_ties_neither_the_order_nor_writing_out_copies_changes_a_value(data, random):
    order = list(range(len(data[0])))
    random.shuffle(order)
    preds, target, weights = data
    shuffled = [column[order] for column in data]
    copies = [column.repeat_interleave(weights) for column in (preds, target)]
    for function in READINGS:
        value = function(preds, target, task="binary", weights=weights)
        moved = function(*shuffled[:2], task="binary", weights=shuffled[2].double())
        for other in (moved, function(*copies, task="binary")):
            torch.testing.assert_close(other, value, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("copies", [10**8, 10**10, 10**13])
def test_law_that_counts_larger_than_products_of_them_can_be_give_the_value_of_one_copy_each(copies):
    preds, target, _ = sample("binary")
    weights = torch.full_like(target, copies)
    for bins in ("pava", "pava_bc"):
        options = {"task": "binary", "bins": bins, "loss": lambda b: b.gap.abs()}
        torch.testing.assert_close(tc.gce(preds, target, weights=weights, **options), tc.gce(preds, target, **options))
    many, one = (torch.stack(tc.corp(preds, target, task="binary", weights=w)) for w in (weights, None))
    torch.testing.assert_close(many, one)
    options = {"task": "binary", "n_bins": 2**20}
    torch.testing.assert_close(tc.ace(preds, target, weights=weights, **options), tc.ace(preds, target, **options))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on the way to its forward mode
@pytest.mark.parametrize(
    "function",
    [tc.ace, tc.ks, lambda *a, **k: tc.corp(*a, **k).mcb, partial(tc.rmsce, bins="equal_mass", n_bins=4)],
    ids=["ace", "ks", "corp", "rmsce"],
)
def test_law_that_every_way_to_differentiate_agrees_with_backward(function):
    preds, target, _ = sample("binary", n=12)
    preds = preds.clamp(0.01, 0.99) + torch.arange(12) * 1e-4  # no ties: the gradient is one

    def value(p):
        return function(p, target, task="binary")

    leaf = preds.clone().requires_grad_()
    value(leaf).backward()
    torch.testing.assert_close(torch.func.grad(value)(preds), leaf.grad)
    torch.testing.assert_close(torch.func.jacfwd(value)(preds), leaf.grad)
    batch, mapped = torch.stack((preds, preds)), torch.func.vmap(value)
    torch.testing.assert_close(torch.func.grad(lambda p: mapped(p).sum())(batch)[1], leaf.grad)
    leaves = batch.clone().requires_grad_()
    mapped(leaves).sum().backward()
    torch.testing.assert_close(leaves.grad[1], leaf.grad)
    ones = torch.ones_like(batch)
    torch.testing.assert_close(torch.func.jvp(mapped, (batch,), (ones,))[1][0], leaf.grad.sum())
