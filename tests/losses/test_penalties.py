"""Penalties for training: slow loops for values and gradients, laws, modules, and extreme batches."""

import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch
from cases import N_CLASSES, Case
from helpers.compare import central_difference
from oracles import events
from oracles import losses as slow

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.losses import CanonicalLoss, ECELoss, MMCELoss, SKCELoss, SoftBinnedECELoss, mmce, soft_binned_ece

TASKS = ("binary", "multiclass", "multilabel")
PENALTIES = {  # function, module, options, and for functions of this package the loop over events with its arguments
    "soft l1": (soft_binned_ece, SoftBinnedECELoss, {"n_bins": 7, "norm": "l1"},
                partial(slow.soft_binned_ece, n_bins=7, temperature=0.01, norm="l1")),
    "soft l2": (soft_binned_ece, SoftBinnedECELoss, {"temperature": 0.002},
                partial(slow.soft_binned_ece, n_bins=15, temperature=0.002, norm="l2")),
    "mmce": (mmce, MMCELoss, {}, partial(slow.mmce, bandwidth=0.4, weighted=False)),
    "mmce weighted": (mmce, MMCELoss, {"bandwidth": 0.05, "weighted": True},
                      partial(slow.mmce, bandwidth=0.05, weighted=True)),
    "ece": (F.ece, ECELoss, {"n_bins": 6}, None),
    "canonical": (F.canonical_error, CanonicalLoss, {"bandwidth": 0.1, "p": 2}, None),
    "skce": (partial(F.skce, estimator="biased"), SKCELoss, {"bandwidth": 0.5}, None),
}  # fmt: skip
KINDS = [
    *(("binary", mode) for mode in ("positive", "top_label")),
    *(("multiclass", mode) for mode in ("top_label", "classwise", tc.TopK(2))),
    ("multilabel", "classwise"),
]
tasks = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(params=PENALTIES)
def penalty(request):
    return PENALTIES[request.param]


@pytest.fixture(params=[name for name in PENALTIES if PENALTIES[name][-1]])
def new_penalty(request):
    """Penalties that are defined in `losses`. The others are tested with their metrics."""
    return PENALTIES[request.param]


def data(task, n=24, **how):
    return Case("", mmce, MMCELoss, task, {"from_logits": True}).data(n, **how)


def probabilities(task, logits):
    return logits.softmax(-1) if task == "multiclass" else logits.sigmoid()


@pytest.mark.parametrize(("task", "mode"), KINDS)
def test_values_and_gradients_equal_slow_loops(new_penalty, task, mode):
    """Gradients with respect to logits, and to probabilities by the chain rule; with ties."""
    function, _, options, loop = new_penalty
    logits, target = data(task)
    logits[10:15] = logits[9]
    weights = torch.arange(24) % 4 / 2

    def value(logits):
        columns = events(task, mode, probabilities(task, logits).tolist(), target.tolist())
        values = [loop([(*pair, w) for pair, w in zip(column, weights.tolist(), strict=True)]) for column in columns]
        return sum(values) / len(values)

    given = {"task": task, "mode": mode, "weights": weights, **options}
    for from_logits in (True, False):
        leaf = logits.clone().requires_grad_()
        found = function(leaf if from_logits else probabilities(task, leaf), target, from_logits=from_logits, **given)
        found.backward()
        assert found.item() == pytest.approx(value(logits), rel=1e-11)
        for at in [(3,), (7,), (18,)] if task == "binary" else [(3, 0), (7, 2), (18, 3)]:
            slope = central_difference(value, logits, at)
            assert leaf.grad[at].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


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
    p = torch.rand(3000, generator=generator, dtype=torch.float64)
    p[:300] = p[300:600]
    y = torch.randint(0, 2, (3000,), generator=generator)
    for bandwidth in (0.001, 0.03, 5.0):
        kernel = ((p[:, None] - p).abs() / -bandwidth).exp()
        expected = ((y - p) @ kernel @ (y - p)).sqrt() / 3000
        torch.testing.assert_close(mmce(p, y, task="binary", bandwidth=bandwidth), expected, rtol=1e-11, atol=0)


# Laws of batches and masks


@tasks
def test_batches_and_class_axes_equal_a_loop(new_penalty, task):
    function, _, options, _ = new_penalty
    logits, target = data(task, lead=(3,))
    call = partial(function, task=task, from_logits=True, **options)
    expected = torch.stack([call(*pair) for pair in zip(logits, target, strict=True)])
    found = [call(logits, target, batch_dims=1), torch.vmap(call)(logits, target)]
    if task != "binary":
        labels = target.movedim(-1, 1) if task == "multilabel" else target
        found.append(call(logits.movedim(-1, 1), labels, class_axis=1, batch_dims=1))
    for value in found:
        torch.testing.assert_close(value, expected)
    ways = torch.stack([torch.arange(24) % 4, torch.arange(24) % 5, torch.ones(24)])
    expected = torch.stack([call(logits[0], target[0], weights=weights) for weights in ways])
    torch.testing.assert_close(call(logits[0], target[0], weights=ways), expected, rtol=1e-12, atol=1e-13)


@tasks
def test_masked_rows_have_no_effect(penalty, task):
    """Rows are masked by weight, by `ignore_index` and as missing. Gradients of ignored and missing rows are 0."""
    function, module, options, _ = penalty
    logits, target = data(task)
    keep = torch.arange(24) % 3 > 0
    expected = function(logits[keep], target[keep], task=task, from_logits=True, **options)
    marked, spoiled = target.clone(), logits.clone()
    marked[~keep], spoiled[~keep] = -100, torch.nan
    make = partial(module, task=task, from_logits=True, **options)
    for loss, preds, labels, given in (
        (make(ignore_index=-100), logits, marked, {}),
        (make(), spoiled, marked, {"weights": keep}),
        (make(nan_policy="drop"), spoiled, target, {}),
    ):
        leaf = preds.clone().requires_grad_()
        value = loss(leaf, labels, **given)
        value.backward()
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)
        if not given:
            assert (leaf.grad[~keep] == 0).all()
            assert leaf.grad.isfinite().all()
    assert make()(logits[:0], target[:0]).isnan()
    assert make()(logits, target, weights=torch.zeros(24)).isnan()


# Modules


@tasks
def test_modules_equal_their_functions(penalty, task):
    function, module, options, _ = penalty
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
    assert not list(loss.parameters())
    assert f"task='{task}', from_logits=True" in repr(loss)
    with pytest.raises(AttributeError):
        loss.penalty.n_bins = 3


@pytest.mark.parametrize("name", ["soft l2", "mmce weighted", "canonical"])
def test_compiled_modules_equal_eager_ones_and_give_nan_for_bad_rows(name):
    torch.compiler.reset()
    _, module, options, _ = PENALTIES[name]
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


@pytest.mark.parametrize("cls", [SKCELoss, CanonicalLoss, MMCELoss])
def test_instances_with_equal_arguments_share_compiled_graphs(cls):
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


def test_penalties_do_not_synchronise_the_device(penalty):
    """Reading a value of a meta tensor raises an error."""
    _, module, options, _ = penalty
    for task, policy in product(TASKS, ("raise", "drop")):
        logits, target = (tensor.to("meta") for tensor in data(task, dtype=torch.float32))
        loss = module(task=task, from_logits=True, ignore_index=-100, nan_policy=policy, **options)
        leaf = logits.clone().requires_grad_()
        loss(leaf, target, weights=torch.ones(24, device="meta")).backward()
        assert leaf.grad.shape == logits.shape


def test_half_types_give_the_float64_value_and_autocast_has_no_effect(penalty):
    _, module, options, _ = penalty
    loss = module(task="multiclass", from_logits=True, **options)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits, target = data("multiclass", dtype=dtype)
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, target)
        value.backward()
        assert value.dtype == torch.float32
        assert leaf.grad.dtype == dtype
        torch.testing.assert_close(value.double(), loss(logits.double(), target), rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(loss(logits, target), value.detach(), rtol=0, atol=0)


# Extreme input


@tasks
def test_gradients_are_finite_at_extreme_predictions_and_for_single_samples(penalty, task):
    """Right, wrong, saturated, infinite and even predictions, for batches of 1, 2 and 7 samples."""
    _, module, options, _ = penalty
    dtypes = (torch.float16, torch.float32, torch.float64)
    for dtype, size, n, label in product(dtypes, (0.0, 30.0, 6e4, math.inf), (1, 2, 7), (0, 1)):
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
    _, module, options, _ = penalty
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
