"""What all metrics of a sample in order have in common: slow loops, laws under ties, ways to differentiate."""

import pytest
import torch
from helpers.ranked import EQUAL_MASS, F64, N_CLASSES, assert_gradient, assert_slow_loop, sample, samples, setting
from hypothesis import given, settings
from hypothesis import strategies as st

import torchcalib as tc

READINGS = {
    "ace": tc.ace,
    "mce": lambda *a, **k: tc.mce(*a, bins="equal_mass", **k),
    "rmsce": lambda *a, **k: tc.rmsce(*a, bins="equal_mass", **k),
    "tce": tc.tce,
    "tce-paper": lambda *a, **k: tc.tce(*a, variant="paper", **k),
    "tce-pava": lambda *a, **k: tc.tce(*a, bins="pava", **k),
    "tceq": lambda *a, **k: tc.tce(*a, bins="equal_mass", **k),
    "gce": lambda *a, **k: tc.gce(*a, bins="pava", loss=lambda b: b.gap.abs(), **k),
    "ks": tc.ks,
    "corp": lambda *a, **k: torch.stack(tc.corp(*a, **k), -1),
}


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


def test_closed_form_one_positive_class_is_its_column_and_the_rest_its_complement():
    preds, target, _ = sample("multiclass")
    for k in range(N_CLASSES):
        column, label = preds[:, k], (target == k).long()
        others = [j for j in range(N_CLASSES) if j != k]
        for function in (tc.ace, tc.ks, tc.tce):
            one = function(preds, target, task="multiclass", positive_classes=[k])
            assert one == function(column, label, task="binary")
        rest = tc.ks(preds, target, task="multiclass", positive_classes=others)
        assert rest == tc.ks(1 - column, 1 - label, task="binary")


def test_closed_form_a_class_without_samples():
    """Class 3 is never true: no positives anywhere, frequency 0 in every bin."""
    preds, target, _ = sample("multiclass")
    given = {"target": target % (N_CLASSES - 1), "task": "multiclass", "reduction": "classwise", "average": None}
    for function in (tc.ace, tc.ks):
        assert function(preds, **given)[-1].item() == pytest.approx(preds[:, -1].mean().item())


@given(samples(), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_law_with_ties_neither_the_order_nor_writing_out_copies_changes_a_value(data, random):
    order = list(range(len(data[0])))
    random.shuffle(order)
    preds, target, weights = data
    shuffled = [column[order] for column in data]
    copies = [column.repeat_interleave(weights) for column in (preds, target)]
    for function in READINGS.values():
        value = function(preds, target, task="binary", weights=weights)
        moved = function(*shuffled[:2], task="binary", weights=shuffled[2].double())
        for other in (moved, function(*copies, task="binary")):
            torch.testing.assert_close(other, value, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", READINGS)
def test_logits_are_their_probabilities(name):
    generator = torch.Generator().manual_seed(0)
    logits, target = torch.randn(60, generator=generator, dtype=F64), sample("binary")[1]
    value = READINGS[name](logits, target, task="binary", from_logits=True)
    torch.testing.assert_close(value, READINGS[name](logits.sigmoid(), target, task="binary"))
    rows, classes = torch.randn(60, 5, generator=generator, dtype=F64), torch.randint(0, 5, (60,), generator=generator)
    reductions = [{"reduction": reduction} for reduction in ("classwise", "top_label", tc.TopK(2))]
    for how in (*reductions, {"positive_classes": [1, 3]}):
        given = {"task": "multiclass", **how}
        value = READINGS[name](rows, classes, from_logits=True, **given)
        torch.testing.assert_close(value, READINGS[name](rows.softmax(-1), classes, **given))


@pytest.mark.parametrize("name", READINGS)
def test_no_data_is_nan_of_the_usual_shape(name):
    function, last = READINGS[name], (4,) if name == "corp" else ()
    empty = function(torch.empty(0), torch.empty(0, dtype=torch.int64), task="binary")
    assert (empty.shape, empty.dtype) == (last, torch.float32)
    assert empty.isnan().all()
    target = torch.ones(3, 5, dtype=torch.int64)
    batch = function(torch.rand(3, 5, dtype=F64), target, task="binary", weights=torch.zeros(3, 5))
    assert (batch.shape, batch.dtype) == ((3, *last), F64)
    assert batch.isnan().all()


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


DIFFERENTIABLE = {
    "ace": lambda p, y: tc.ace(p, y, task="binary"),
    "ks": lambda p, y: tc.ks(p, y, task="binary"),
    "corp": lambda p, y: tc.corp(p, y, task="binary").mcb,
    "rmsce": lambda p, y: tc.rmsce(p, y, task="binary", bins="equal_mass", n_bins=4),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, on the way to its forward mode
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_law_that_every_way_to_differentiate_agrees_with_backward(name):
    preds, target, _ = sample("binary", n=12)
    preds = preds.clamp(0.01, 0.99) + torch.arange(12) * 1e-4  # no ties: the gradient is one

    def value(p):
        return DIFFERENTIABLE[name](p, target)

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
