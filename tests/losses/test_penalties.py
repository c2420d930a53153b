"""Penalties for training: closed forms, modules, and extreme batches.

tests/contract has laws of the functions, and compares them with slow loops.
"""

import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch
from cases import N_CLASSES, Case

import torchcalib.functional as F
from torchcalib.losses import CanonicalLoss, ECELoss, MMCELoss, SKCELoss, SoftBinnedECELoss, mmce, soft_binned_ece

TASKS = ("binary", "multiclass", "multilabel")
PENALTIES = {  # function, module, options
    "soft l1": (soft_binned_ece, SoftBinnedECELoss, {"n_bins": 7, "norm": "l1"}),
    "soft l2": (soft_binned_ece, SoftBinnedECELoss, {"temperature": 0.002}),
    "mmce": (mmce, MMCELoss, {}),
    "mmce weighted": (mmce, MMCELoss, {"bandwidth": 0.05, "weighted": True}),
    "ece": (F.ece, ECELoss, {"n_bins": 6}),
    "canonical": (F.canonical_error, CanonicalLoss, {"bandwidth": 0.1, "p": 2}),
    "skce": (partial(F.skce, estimator="biased"), SKCELoss, {"bandwidth": 0.5}),
}
tasks = pytest.mark.parametrize("task", TASKS)


extended = partial(pytest.param, marks=pytest.mark.extended)


@pytest.fixture(params=PENALTIES)
def penalty(request):
    return PENALTIES[request.param]


def data(task, n=24, **how):
    return Case("", mmce, MMCELoss, task, {"from_logits": True}).data(n, **how)


def probabilities(task, logits):
    return logits.softmax(-1) if task == "multiclass" else logits.sigmoid()


def test_default_kernel_of_mmce_equals_that_of_the_authors_code():
    """The kernel is exp(-|c - c'| / (2 * 0.2)) in Kumar et al.'s code and in netcal, which gives 0.2325 here."""
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    target = torch.tensor([1, 0, 1])
    for found in (mmce(probs, target, task="multiclass"), MMCELoss(task="multiclass")(probs, target)):
        assert found.item() == pytest.approx(0.2325, abs=5e-5)


def test_weighted_mmce_without_errors_has_the_closed_form():
    hits = mmce(torch.tensor([0.8, 0.8]), torch.tensor([1, 1]), task="binary", weighted=True)
    assert float(hits) == pytest.approx(0.2)


def test_mmce_of_many_samples_equals_the_sum_over_all_pairs():
    """The implementation sorts the confidences. Their exponentials span hundreds of orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1000, generator=generator, dtype=torch.float64)
    p[:100] = p[100:200]
    y = torch.randint(0, 2, (1000,), generator=generator)
    for bandwidth in (0.001, 0.03, 5.0):
        kernel = ((p[:, None] - p).abs() / -bandwidth).exp()
        expected = ((y - p) @ kernel @ (y - p)).sqrt() / 1000
        torch.testing.assert_close(mmce(p, y, task="binary", bandwidth=bandwidth), expected, rtol=1e-11, atol=0)


# Modules


@tasks
def test_modules_equal_their_functions(penalty, task):
    function, module, options = penalty
    logits, target = data(task)
    loss = module(task=task, from_logits=True, **options)
    expected = function(logits, target, task=task, from_logits=True, **options)
    images, labels = logits.unflatten(0, (2, 3, 4)), target.unflatten(0, (2, 3, 4))
    of_images = loss
    if task != "binary":
        images, labels = images.movedim(-1, 1), labels.movedim(-1, 1) if task == "multilabel" else labels
        of_images = module(task=task, from_logits=True, class_axis=1, **options)
    torch.testing.assert_close(pickle.loads(pickle.dumps(loss))(logits, target), expected)
    torch.testing.assert_close(of_images(images, labels), expected)
    marked, spoiled = target.clone(), logits.clone()
    marked[3], spoiled[7] = -100, torch.nan
    masking = module(task=task, from_logits=True, ignore_index=-100, nan_policy="drop", **options)
    kept = ~torch.isin(torch.arange(24), torch.tensor([3, 7, 9]))
    found = masking(spoiled, marked, weights=torch.arange(24) != 9)
    torch.testing.assert_close(found, loss(logits[kept], target[kept]))
    assert not list(loss.parameters())
    assert f"task='{task}', from_logits=True" in repr(loss)
    with pytest.raises(AttributeError):
        loss.penalty.n_bins = 3


@pytest.mark.parametrize("name", ["mmce weighted", extended("soft l2"), extended("canonical")])
def test_compiled_modules_equal_eager_ones_and_give_nan_for_bad_rows(name):
    torch.compiler.reset()
    _, module, options = PENALTIES[name]
    loss = module(task="multiclass", from_logits=True, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits, target = data("multiclass", dtype=torch.float32)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value, expected = compiled(a, target), loss(b, target)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    torch.testing.assert_close(a.grad, b.grad)
    logits[3] = torch.nan
    assert compiled(logits, target).isnan()
    with pytest.raises(ValueError, match="`preds` must not contain NaN"):
        loss(logits, target)


@pytest.mark.parametrize("cls", [MMCELoss, extended(SKCELoss), extended(CanonicalLoss)])
def test_modules_with_equal_arguments_share_compiled_graphs(cls):
    torch.compiler.reset()
    logits, target = data("multiclass")
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    for width, n_graphs in ((0.5, 1), (0.5, 1), (0.25, 2)):
        loss = cls(task="multiclass", from_logits=True, bandwidth=width)
        torch.compile(loss, fullgraph=True, backend=count)(logits, target)
        assert len(graphs) == n_graphs


# Extreme input


EXTREMES = list(product((torch.float16, torch.float32, torch.float64), (0.0, 30.0, 6e4, math.inf), (1, 2, 7), (0, 1)))
FEW = EXTREMES[::5]  # every dtype, size, number of samples and label occurs


@pytest.mark.parametrize("extremes", [FEW, extended(EXTREMES)], ids=["few", "all"])
@tasks
def test_gradients_are_finite_at_extreme_predictions_and_for_single_samples(penalty, task, extremes):
    """Right, wrong, saturated, infinite and even predictions, for batches of 1, 2 and 7 samples."""
    _, module, options = penalty
    for dtype, size, n, label in extremes:
        z = torch.full((n,) if task == "binary" else (n, N_CLASSES), -size, dtype=dtype)
        (z if task != "multiclass" else z[:, 0]).fill_(size)
        target = torch.full((n,) if task != "multilabel" else (n, N_CLASSES), label)
        for from_logits in (True, False):
            leaf = z.clone() if from_logits else probabilities(task, z.clamp(-1e4, 1e4))
            value = module(task=task, from_logits=from_logits, **options)(leaf.requires_grad_(), target)
            value.backward()
            assert value.isfinite(), (dtype, size, n, label)
            assert leaf.grad.isfinite().all(), (dtype, size, n, label)


def test_infinite_logits_give_the_value_of_certain_probabilities(penalty):
    """Infinite logits, also for tasks that are computed as two classes."""
    _, module, options = penalty
    logits, probs = torch.tensor([math.inf, -math.inf, 0.0]), torch.tensor([1.0, 0.0, 0.5])
    target = torch.tensor([0, 1, 1])
    found = module(task="binary", from_logits=True, **options)(logits, target)
    torch.testing.assert_close(found, module(task="binary", **options)(probs, target))


def test_task_by_position_or_implied():
    preds, target, weights = torch.rand(20), torch.randint(0, 2, (20,)), torch.rand(20)
    expected = ECELoss(task="binary")(preds, target, weights=weights)
    assert ECELoss("binary")(preds, target, sample_weight=weights) == expected
    rows, classes = torch.rand(20, 3).softmax(-1), torch.randint(0, 3, (20,))
    assert MMCELoss(num_classes=3)(rows, classes) == MMCELoss(task="multiclass")(rows, classes)
