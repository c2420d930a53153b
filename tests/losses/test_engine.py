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


@pytest.mark.parametrize(("task", "reduction"), KINDS)
def test_slow_loop_value_and_gradient(new_penalty, task, reduction):
    function, _, options, loop = new_penalty
    logits, target = data(task)
    weights = torch.arange(24) % 4 / 2
    value = partial(slow_value, loop, task, reduction, target=target.tolist(), weights=weights.tolist())
    leaf = logits.clone().requires_grad_()
    found = function(leaf, target, task=task, reduction=reduction, from_logits=True, weights=weights, **options)
    assert found.item() == pytest.approx(value(logits=logits.tolist()), rel=1e-11)
    found.backward()
    step = 1e-6
    for at in [(3,), (7,), (18,)] if task == "binary" else [(3, 0), (7, 2), (18, 3)]:
        moved = [logits.clone(), logits.clone()]
        for sign, tensor in zip((1, -1), moved, strict=True):
            tensor[at] += sign * step
        up, down = (value(logits=tensor.tolist()) for tensor in moved)
        assert leaf.grad[at].item() == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("task", "reduction"),
    [pytest.param(*kind, marks=[pytest.mark.extended] * (kind not in KINDS[:3:2])) for kind in KINDS],
)
def test_gradient_is_that_of_finite_differences(new_penalty, task, reduction):
    function, _, options, _ = new_penalty
    logits, target = data(task, n=6)
    call = partial(function, target=target, task=task, reduction=reduction, **options)
    assert torch.autograd.gradcheck(partial(call, from_logits=True), logits.requires_grad_())
    probs = (logits.softmax(-1) if task == "multiclass" else logits.sigmoid()).detach().requires_grad_()
    assert torch.autograd.gradcheck(partial(call, validate_args=False), probs)


def test_a_step_along_the_gradient_alone_lowers_the_penalty_by_its_square_to_first_order(penalty):
    """Exact in the limit of short steps, of any penalty: f(z) - f(z - t g) = t |g|^2 + O(t^2)."""
    _, module, options, _ = penalty
    logits, target = data("multiclass")
    loss = module(task="multiclass", from_logits=True, **options)
    leaf = logits.clone().requires_grad_()
    value = loss(leaf, target)
    value.backward()
    square = leaf.grad.square().sum()
    step = 1e-6 / square.sqrt()
    fall = value.detach() - loss(logits - step * leaf.grad, target)
    assert square > 0
    assert (fall / (step * square)).item() == pytest.approx(1, abs=1e-3)


# Laws that the streaming metrics keep too.


def test_law_sample_order_ties_included(new_penalty):
    function, _, options, _ = new_penalty
    for task in TASKS:
        logits, target = data(task)
        logits[5:10] = logits[4]
        order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
        a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        one = function(a, target, task=task, from_logits=True, **options)
        other = function(b[order], target[order], task=task, from_logits=True, **options)
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        one.backward()
        other.backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)


def test_law_integer_weights_are_repeats(new_penalty):
    function, _, options, _ = new_penalty
    for task in TASKS:
        logits, target = data(task)
        times = torch.arange(24) % 4
        call = partial(function, task=task, from_logits=True, **options)
        a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        one = call(a, target, weights=times)
        other = call(b.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
        one.backward()
        other.backward()
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-13)
        ways = torch.stack([times, times.flip(0), torch.ones(24)])
        loop = torch.stack([call(logits, target, weights=w) for w in ways])
        torch.testing.assert_close(call(logits, target, weights=ways), loop, rtol=1e-12, atol=1e-13)


def test_law_batches_are_loops_and_classes_stand_anywhere(new_penalty):
    function, _, options, _ = new_penalty
    for task in TASKS:
        logits, target = data(task, lead=(3,))
        call = partial(function, task=task, from_logits=True, **options)
        whole = call(logits, target)
        torch.testing.assert_close(whole, torch.stack([call(*pair) for pair in zip(logits, target, strict=True)]))
        torch.testing.assert_close(torch.vmap(call)(logits, target), whole)
        if task != "binary":
            labels = target.movedim(-1, 1) if task == "multilabel" else target
            torch.testing.assert_close(call(logits.movedim(-1, 1), labels, class_axis=1), whole)


def test_law_what_is_masked_is_not_there(penalty):
    """By weight, also where it is NaN; by `ignore_index`; as missing. Gradients there are 0."""
    function, module, options, _ = penalty
    for task in TASKS:
        logits, target = data(task)
        keep = torch.arange(24) % 3 > 0
        expected = function(logits[keep], target[keep], task=task, from_logits=True, **options)
        marked, spoiled = target.clone(), logits.clone()
        marked[~keep], spoiled[~keep] = -100, torch.nan
        make = partial(module, task=task, from_logits=True, **options)
        leaf = logits.clone().requires_grad_()
        masked = make(ignore_index=-100)(leaf, marked)
        masked.backward()
        assert (leaf.grad[~keep] == 0).all()
        assert leaf.grad.isfinite().all()
        found = [masked, make()(spoiled, marked, weights=keep), make(nan_policy="drop")(spoiled, target)]
        for value in found:
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)
        leaf = spoiled.clone().requires_grad_()
        make(nan_policy="drop")(leaf, target).backward()
        assert (leaf.grad[~keep] == 0).all()
        assert leaf.grad.isfinite().all()


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
    torch.testing.assert_close(loss(logits, target), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(loss))(logits, target), expected)
    assert not list(loss.parameters())
    assert f"task='{task}', from_logits=True" in repr(loss)
    if task == "binary":
        torch.testing.assert_close(loss(logits.reshape(2, 3, 4), target.reshape(2, 3, 4)), expected)
        return
    images = logits.reshape(2, 3, 4, C).movedim(-1, 1)
    of_images = target.reshape(2, 3, 4, -1).movedim(-1, 1) if task == "multilabel" else target.reshape(2, 3, 4)
    loss = module(task=task, from_logits=True, class_axis=1, **options)
    torch.testing.assert_close(loss(images, of_images), expected)


def test_settings_of_a_module_are_frozen(penalty):
    _, module, options, _ = penalty
    loss = module(task="binary", **options)
    with pytest.raises(AttributeError):
        loss.penalty.n_bins = 3
    with pytest.raises(AttributeError):
        loss.input_format.from_logits = True


def _compiled():
    """A few; the others take long."""
    for name in PENALTIES:
        for task in TASKS:
            quick = task == "multiclass" and name in ("soft l2", "mmce weighted", "canonical")
            yield pytest.param(name, task, marks=() if quick else pytest.mark.extended)


@pytest.mark.parametrize(("name", "task"), list(_compiled()))
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

    losses = [cls(task="multiclass", from_logits=True, bandwidth=width) for width in (0.5, 0.5, 0.5, 0.25)]
    for loss, n_graphs in zip(losses, (1, 1, 1, 2), strict=True):
        torch.compile(loss, fullgraph=True, backend=count)(logits, target)
        assert len(graphs) == n_graphs


def test_nothing_waits_for_the_device(penalty):
    """On the meta device there are no values, so that whoever looks at one fails."""
    _, module, options, _ = penalty
    for task in TASKS:
        logits, target = (tensor.to("meta") for tensor in data(task, dtype=torch.float32))
        weights = torch.ones(24, device="meta")
        for policy in ("raise", "drop"):
            loss = module(task=task, from_logits=True, ignore_index=-100, nan_policy=policy, **options)
            leaf = logits.clone().requires_grad_()
            loss(leaf, target, weights=weights).backward()
            assert leaf.grad.shape == logits.shape


def test_half_types_are_read_as_they_are_and_autocast_changes_nothing(penalty):
    _, module, options, _ = penalty
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        loss = module(task="multiclass", from_logits=True, **options)
        logits, target = data("multiclass", dtype=dtype)
        exact = loss(logits.double(), target)
        leaf = logits.clone().requires_grad_()
        value = loss(leaf, target)
        value.backward()
        assert value.dtype == torch.float32
        assert leaf.grad.dtype == dtype
        assert leaf.grad.isfinite().all()
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(loss(logits, target), value.detach(), rtol=0, atol=0)


# Extremes.


@pytest.mark.parametrize("task", TASKS)
def test_gradients_are_finite_at_certain_predictions_and_of_single_samples(penalty, task):
    """All right, all wrong, saturated so that probabilities are 0 and 1, infinite, exactly even; one sample alone."""
    _, module, options, _ = penalty
    loss = module(task=task, from_logits=True, **options)
    dtypes = (torch.float16, torch.float32, torch.float64)
    for dtype, size, n in product(dtypes, (0.0, 30.0, 6e4, math.inf), (1, 2, 7)):
        z = torch.full((n,) if task == "binary" else (n, C), -size, dtype=dtype)
        (z if task != "multiclass" else z[:, 0]).fill_(size)
        for label in (0, 1):
            target = torch.full((n,) if task != "multilabel" else (n, C), label)
            leaf = z.clone().requires_grad_()
            value = loss(leaf, target)
            value.backward()
            assert value.isfinite(), (dtype, size, n, label)
            assert leaf.grad.isfinite().all(), (dtype, size, n, label)
    target = torch.tensor([0, 1, 0, 1])
    for dtype in dtypes:
        probs = torch.tensor([0.0, 1.0, 1.0, 0.5] if task == "binary" else [[1.0, 0, 0, 0]] * 4, dtype=dtype)
        leaf = probs.requires_grad_()
        module(task=task, **options)(leaf, target if task != "multilabel" else target.expand(4, 4)).backward()
        assert leaf.grad.isfinite().all(), dtype


def test_certain_logits_are_what_certain_probabilities_are():
    """Infinite ones too, also of tasks that are read as two classes."""
    logits, probs = torch.tensor([math.inf, -math.inf, 0.0]), torch.tensor([1.0, 0.0, 0.5])
    target = torch.tensor([0, 1, 1])
    for _, module, options, _ in PENALTIES.values():
        found = module(task="binary", from_logits=True, **options)(logits, target)
        torch.testing.assert_close(found, module(task="binary", **options)(probs, target))


def test_nothing_that_counts_gives_nan(penalty):
    _, module, options, _ = penalty
    for task in TASKS:
        logits, target = data(task)
        loss = module(task=task, from_logits=True, **options)
        assert loss(logits[:0], target[:0]).isnan()
        assert loss(logits, target, weights=torch.zeros(24)).isnan()


def test_wrong_tasks_of_functions_and_modules():
    for make in (tc.SoftBinnedECELoss, tc.MMCELoss, tc.ECELoss):
        with pytest.raises(ValueError, match="`task` must be one of 'binary', 'multiclass', 'multilabel', got 'any'"):
            make(task="any")
        with pytest.raises(ValueError, match="Pass from_logits=True"):
            make(task="binary")(torch.tensor([0.2, 7.0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="`task` must be one of"):
        tc.mmce(torch.tensor([0.2]), torch.tensor([0]), task="any")
