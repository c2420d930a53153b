"""What all penalties keep: slow loops in values and gradients, laws, modules, and extreme batches."""

import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch
from helpers.penalties import KINDS, PENALTIES, TASKS, C, data, slow_value
from torch import nn

import torchcalib as tc


@pytest.fixture(params=PENALTIES)
def penalty(request):
    return PENALTIES[request.param]


@pytest.fixture(params=[name for name in PENALTIES if PENALTIES[name][-1]])
def new_penalty(request):
    """Those that are functions of this package; values and laws of the others are tested where these are."""
    return PENALTIES[request.param]


def probabilities(task, logits):
    return logits.softmax(-1) if task == "multiclass" else logits.sigmoid()


@pytest.mark.parametrize(("task", "reduction"), KINDS)
def test_slow_loop_value_and_gradient(new_penalty, task, reduction):
    """Of logits, and of their probabilities by the chain rule."""
    function, _, options, loop = new_penalty
    logits, target = data(task)
    weights = torch.arange(24) % 4 / 2
    value = partial(slow_value, loop, task, reduction, target=target.tolist(), weights=weights.tolist())
    expected, slopes, step = value(logits=logits.tolist()), {}, 1e-6
    for at in [(3,), (7,), (18,)] if task == "binary" else [(3, 0), (7, 2), (18, 3)]:
        moved = [logits.clone(), logits.clone()]
        for sign, tensor in zip((1, -1), moved, strict=True):
            tensor[at] += sign * step
        up, down = (value(logits=tensor.tolist()) for tensor in moved)
        slopes[at] = (up - down) / (2 * step)
    given = {"task": task, "reduction": reduction, "weights": weights, **options}
    for from_logits in (True, False):
        leaf = logits.clone().requires_grad_()
        found = function(leaf if from_logits else probabilities(task, leaf), target, from_logits=from_logits, **given)
        found.backward()
        assert found.item() == pytest.approx(expected, rel=1e-11)
        for at, slope in slopes.items():
            assert leaf.grad[at].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


# Laws that the streaming metrics keep too.


@pytest.mark.parametrize("task", TASKS)
def test_law_order_ties_and_integer_weights_as_repeats(new_penalty, task):
    function, _, options, _ = new_penalty
    logits, target = data(task)
    logits[5:10] = logits[4]
    times = torch.arange(24) % 4
    rows = torch.arange(24).repeat_interleave(times)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]
    call = partial(function, task=task, from_logits=True, **options)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    one, other = call(a, target, weights=times), call(b[rows], target[rows])
    one.backward()
    other.backward()
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
def test_law_batches_are_loops_and_classes_stand_anywhere(new_penalty, task):
    function, _, options, _ = new_penalty
    logits, target = data(task, lead=(3,))
    call = partial(function, task=task, from_logits=True, **options)
    expected = torch.stack([call(*pair) for pair in zip(logits, target, strict=True)])
    found = [call(logits, target), torch.vmap(call)(logits, target)]
    if task != "binary":
        labels = target.movedim(-1, 1) if task == "multilabel" else target
        found.append(call(logits.movedim(-1, 1), labels, class_axis=1))
    for value in found:
        torch.testing.assert_close(value, expected)
    ways = torch.stack([torch.arange(24) % 4, torch.arange(24) % 5, torch.ones(24)])
    expected = torch.stack([call(logits[0], target[0], weights=weights) for weights in ways])
    torch.testing.assert_close(call(logits[0], target[0], weights=ways), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
def test_law_what_is_masked_is_not_there(penalty, task):
    """By weight, also where it is NaN; by `ignore_index` and as missing, and there gradients are 0."""
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


def test_law_soft_targets_and_votes(new_penalty):
    function, _, options, _ = new_penalty
    logits, target = data("multiclass")
    call = partial(function, task="multiclass", from_logits=True, **options)
    votes = 3 * nn.functional.one_hot(target, C)
    torch.testing.assert_close(call(logits, votes), call(logits, target))
    votes[:, 0] += 1
    torch.testing.assert_close(call(logits, votes), call(logits, votes / votes.sum(-1, keepdim=True).double()))


# Modules.


@pytest.mark.parametrize("task", TASKS)
def test_modules_are_their_functions_of_all_samples(penalty, task):
    function, module, options, _ = penalty
    logits, target = data(task)
    loss = module(task=task, from_logits=True, **options)
    expected = function(logits, target, task=task, from_logits=True, **options)
    images, labels = logits.unflatten(0, (2, 3, 4)), target.unflatten(0, (2, 3, 4))
    if task != "binary":
        images, labels = images.movedim(-1, 1), labels.movedim(-1, 1) if task == "multilabel" else labels
    of_images = module(task=task, from_logits=True, class_axis=-1 if task == "binary" else 1, **options)
    for value in (
        loss(logits, target),
        pickle.loads(pickle.dumps(loss))(logits, target),
        of_images(images, labels),
    ):
        torch.testing.assert_close(value, expected)
    assert not list(loss.parameters())
    assert f"task='{task}', from_logits=True" in repr(loss)
    with pytest.raises(AttributeError):
        loss.penalty.n_bins = 3
    with pytest.raises(AttributeError):
        loss.input_format.from_logits = True


@pytest.mark.parametrize(
    ("name", "task"),
    [
        pytest.param(name, task, marks=[pytest.mark.extended] * (task != "multiclass" or name not in quick))
        for quick in [("soft l2", "mmce weighted", "canonical")]
        for name, task in product(PENALTIES, TASKS)
    ],
)
def test_modules_compile_whole_and_there_a_bad_row_gives_nan(name, task):
    torch.compiler.reset()
    _, module, options, _ = PENALTIES[name]
    loss = module(task=task, from_logits=True, **options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    logits, target = data(task, dtype=torch.float32)
    a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    value, expected = compiled(a, target), loss(b, target)
    torch.testing.assert_close(value, expected)
    value.backward()
    expected.backward()
    torch.testing.assert_close(a.grad, b.grad)
    logits[3] = torch.nan
    assert compiled(logits, target).isnan()
    with pytest.raises(ValueError, match="`preds` must not hold NaN"):
        loss(logits, target)


@pytest.mark.parametrize("cls", [tc.SKCELoss, tc.CanonicalLoss, tc.MMCELoss])
def test_instances_with_equal_arguments_share_what_was_compiled(cls):
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


def test_nothing_waits_for_the_device(penalty):
    """On the meta device there are no values, so that whoever looks at one fails."""
    _, module, options, _ = penalty
    for task, policy in product(TASKS, ("raise", "drop")):
        logits, target = (tensor.to("meta") for tensor in data(task, dtype=torch.float32))
        loss = module(task=task, from_logits=True, ignore_index=-100, nan_policy=policy, **options)
        leaf = logits.clone().requires_grad_()
        loss(leaf, target, weights=torch.ones(24, device="meta")).backward()
        assert leaf.grad.shape == logits.shape


def test_half_types_are_read_as_they_are_and_autocast_changes_nothing(penalty):
    _, module, options, _ = penalty
    loss = module(task="multiclass", from_logits=True, **options)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits, target = data("multiclass", dtype=dtype)
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, target)
        value.backward()
        assert value.dtype == torch.float32
        assert leaf.grad.dtype == dtype
        assert leaf.grad.isfinite().all()
        torch.testing.assert_close(value.double(), loss(logits.double(), target), rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(loss(logits, target), value.detach(), rtol=0, atol=0)


# Extremes.


@pytest.mark.parametrize("task", TASKS)
def test_gradients_are_finite_at_certain_predictions_and_of_single_samples(penalty, task):
    """All right, all wrong, saturated so that probabilities are 0 and 1, infinite, exactly even; one sample alone."""
    _, module, options, _ = penalty
    dtypes = (torch.float16, torch.float32, torch.float64)
    for dtype, size, n, label in product(dtypes, (0.0, 30.0, 6e4, math.inf), (1, 2, 7), (0, 1)):
        z = torch.full((n,) if task == "binary" else (n, C), -size, dtype=dtype)
        (z if task != "multiclass" else z[:, 0]).fill_(size)
        target = torch.full((n,) if task != "multilabel" else (n, C), label)
        for from_logits in (True, False):
            leaf = z.clone() if from_logits else probabilities(task, z.clamp(-1e4, 1e4))
            value = module(task=task, from_logits=from_logits, **options)(leaf.requires_grad_(), target)
            value.backward()
            assert value.isfinite(), (dtype, size, n, label)
            assert leaf.grad.isfinite().all(), (dtype, size, n, label)


def test_certain_logits_are_what_certain_probabilities_are(penalty):
    """Infinite ones too, also of tasks that are read as two classes."""
    _, module, options, _ = penalty
    logits, probs = torch.tensor([math.inf, -math.inf, 0.0]), torch.tensor([1.0, 0.0, 0.5])
    target = torch.tensor([0, 1, 1])
    found = module(task="binary", from_logits=True, **options)(logits, target)
    torch.testing.assert_close(found, module(task="binary", **options)(probs, target))


def test_wrong_tasks_of_functions_and_modules(penalty):
    function, module, options, _ = penalty
    for make in (module, partial(function, torch.tensor([0.2]), torch.tensor([0]))):
        with pytest.raises(ValueError, match="`task` must be one of 'binary', 'multiclass', 'multilabel', got 'any'"):
            make(task="any", **options)
    with pytest.raises(ValueError, match="Pass from_logits=True"):
        module(task="binary", **options)(torch.tensor([0.2, 7.0]), torch.tensor([0, 1]))
