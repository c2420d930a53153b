"""Laws of canonical metrics that do not stream: batches, weights, order, dtypes, gradients, vmap and compile."""

from functools import partial

import pytest
import torch
from cases import N_CLASSES
from helpers.canonical import close, data

import torchcalib as tc

skce, error = tc.skce, tc.canonical_error
FUNCTIONS = {
    "skce-unbiased-binary": (skce, "binary", {"bandwidth": 0.5}),
    "skce-unbiased-logits": (skce, "multiclass", {"bandwidth": 0.5, "from_logits": True}),
    "skce-biased-multilabel": (skce, "multilabel", {"estimator": "biased", "bandwidth": 0.5, "chunk": 7}),
    "skce-biased-gaussian": (skce, "multiclass", {"estimator": "biased", "kernel": "gaussian", "bandwidth": 0.5}),
    "skce-median-logits": (skce, "multiclass", {"bandwidth": "median", "kernel": "gaussian", "from_logits": True}),
    "error-l1-logits": (error, "multiclass", {"bandwidth": 0.1, "from_logits": True}),
    "error-l2-binary": (error, "binary", {"p": 2, "bandwidth": 0.3, "chunk": 7}),
    "error-chosen-multilabel": (error, "multilabel", {}),
}


@pytest.fixture(params=FUNCTIONS)
def law(request):
    """A function with its options, and its data of n rows."""
    function, task, options = FUNCTIONS[request.param]
    call = partial(function, task=task, **options)

    def rows(n, **how):
        preds, target = data(task, n, **how)
        if options.get("from_logits"):
            preds = preds.log().to(preds.dtype)
        return preds, target

    return call, rows, task


def test_order_and_layout_of_rows_and_classes_change_nothing(law):
    call, rows, task = law
    preds, target = rows(20)
    value = call(preds, target)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    close(call(preds[order], target[order]), value)
    if task != "binary":
        close(call(preds.T, target.T if task == "multilabel" else target, class_axis=0), value)
    soft = torch.nn.functional.one_hot(target, N_CLASSES) if task == "multiclass" else target
    close(call(preds, soft.double()), value)
    close(call(torch.stack([preds, preds], 1)[:, 0], target), value)  # strided


def test_weights_are_copies_and_their_leading_axes_a_loop(law):
    call, rows, _ = law
    preds, target = rows(30)
    weights = torch.stack([(torch.arange(30) * k + k) % 4 for k in (1, 2, 3)])
    weights[1, 4:9], weights[:, 11] = 0, 0
    values = call(preds, target, weights=weights)
    for times, value in zip(weights, values, strict=True):
        close(value, call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0)))
        close(value, call(preds, target, weights=times.half()))
    series, labels = rows(30, lead=(2,))
    shared = weights.unsqueeze(1).expand(3, 2, 30)
    close(call(series, labels, weights=shared)[2, 1], call(series[1], labels[1], weights=weights[2]))


def test_rows_of_weight_zero_are_not_read_and_have_no_gradient(law):
    call, rows, _ = law
    preds, target = rows(20)
    spoiled, labels, weights = preds.clone(), target.clone(), 1 + torch.arange(20) % 2
    spoiled[3], labels[3], weights[3] = torch.nan, 99, 0
    kept = torch.arange(20) != 3
    spoiled.requires_grad_()
    times = weights[kept]
    alone = preds[kept].requires_grad_()
    value, expected = (
        call(spoiled, labels, weights=weights),
        call(alone.repeat_interleave(times, 0), target[kept].repeat_interleave(times, 0)),
    )
    close(value, expected)
    value.backward()
    expected.backward()
    close(spoiled.grad[kept], alone.grad, rtol=1e-9, atol=1e-12)
    assert not spoiled.grad[3].any()


def test_a_half_precision_prediction_is_used_as_it_is(law):
    call, rows, _ = law
    for dtype in (torch.float16, torch.bfloat16):
        preds, target = rows(30, dtype=dtype)
        value = call(preds, target, validate_args=False)
        assert value.dtype == torch.float32
        expected = call(preds.double(), target, validate_args=False)
        close(value, expected.float(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "median" not in name])
def test_gradient_is_that_of_finite_differences(name):
    """But for a median bandwidth, which finite differences move and the gradient takes for a constant."""
    function, task, options = FUNCTIONS[name]
    preds, target = data(task, 12)
    preds = preds.log() if options.get("from_logits") else preds
    call = partial(function, task=task, validate_args=False, **options)
    assert torch.autograd.gradcheck(lambda p: call(p, target), preds.requires_grad_())


COMPILED = ("skce-unbiased-logits", "skce-biased-gaussian", "error-chosen-multilabel")


def test_batched_mapped_or_compiled_it_is_the_function_of_each_series_and_nan_where_a_row_is(law, request):
    call, rows, _ = law
    preds, target = rows(12, lead=(2, 2))
    expected = torch.stack([call(p, t) for p, t in zip(preds.flatten(0, 1), target.flatten(0, 1), strict=True)])
    close(call(preds, target), expected.reshape(2, 2))
    ways = [torch.vmap]
    if request.node.callspec.params["law"] in COMPILED:
        torch.compiler.reset()
        ways.append(partial(torch.compile, fullgraph=True, backend="eager"))
    spoiled = preds[0].clone()
    spoiled[0, 3] = torch.nan
    for way in ways:
        wrapped = way(call)
        close(wrapped(preds[0], target[0]), expected[:2])
        value = wrapped(spoiled, target[0])
        assert value[0].isnan()
        close(value[1], expected[1])
