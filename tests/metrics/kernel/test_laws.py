"""Laws of canonical metrics that do not stream: order, weights, dtypes, gradients, few samples, memory, messages."""

import math
from functools import partial

import pytest
import torch
from helpers.canonical import calibrated, close, data
from helpers.refusals import assert_named
from torch.utils._python_dispatch import TorchDispatchMode

import torchcalib as tc
from torchcalib.ops import leave_one_out, pairwise

skce, error = tc.skce, tc.canonical_error
ALL_PAIRS = {
    "skce-unbiased-binary": (skce, "binary", {"bandwidth": 0.5}),
    "skce-unbiased-logits": (skce, "multiclass", {"bandwidth": 0.5, "from_logits": True}),
    "skce-biased-multilabel": (skce, "multilabel", {"estimator": "biased", "bandwidth": 0.5, "chunk": 7}),
    "skce-biased-gaussian": (skce, "multiclass", {"estimator": "biased", "kernel": "gaussian", "bandwidth": 0.5}),
    "skce-median-logits": (skce, "multiclass", {"bandwidth": "median", "kernel": "gaussian", "from_logits": True}),
    "error-l1-logits": (error, "multiclass", {"bandwidth": 0.1, "from_logits": True}),
    "error-l1-probabilities": (error, "multiclass", {"bandwidth": 0.1, "chunk": 3}),
    "error-l2-binary": (error, "binary", {"p": 2, "bandwidth": 0.3, "chunk": 7}),
    "error-chosen-multilabel": (error, "multilabel", {}),
}
FUNCTIONS = {
    **ALL_PAIRS,
    "skce-linear-binary": (skce, "binary", {"estimator": "linear", "from_logits": True}),
    "skce-block-logits": (skce, "multiclass", {"estimator": "block", "block_size": 4, "from_logits": True}),
}
COMPILED = ("skce-unbiased-logits", "skce-biased-gaussian", "error-chosen-multilabel")


@pytest.fixture(params=FUNCTIONS)
def law(request):
    """A function with its options, its data of n rows, and its task."""
    function, task, options = FUNCTIONS[request.param]

    def rows(n, **how):
        preds, target = data(task, n, **how)
        if options.get("from_logits"):
            preds = (preds.logit() if task == "binary" else preds.log()).to(preds.dtype)
        return preds, target

    return partial(function, task=task, **options), rows, task


def test_leading_axes_of_weights_are_a_loop(law):
    call, rows, _ = law
    preds, target = rows(30)
    weights = torch.stack([(torch.arange(30) * k + k) % 4 for k in (1, 2, 3)])
    weights[1, 4:9], weights[:, 11] = 0, 0
    for times, value in zip(weights, call(preds, target, weights=weights), strict=True):
        close(value, call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0)))
    series, labels = rows(30, lead=(2,))
    shared = weights.unsqueeze(1).expand(3, 2, 30)
    close(call(series, labels, weights=shared)[2, 1], call(series[1], labels[1], weights=weights[2]))


def test_rows_of_weight_zero_are_not_read_and_have_no_gradient(law):
    call, rows, _ = law
    preds, target = rows(20)
    spoiled, labels, weights = preds.clone(), target.clone(), 1 + torch.arange(20) % 2
    spoiled[3], labels[3], weights[3] = torch.nan, 99, 0
    kept = torch.arange(20) != 3
    times = weights[kept]
    spoiled, alone = spoiled.requires_grad_(), preds[kept].requires_grad_()
    value = call(spoiled, labels, weights=weights)
    expected = call(alone.repeat_interleave(times, 0), target[kept].repeat_interleave(times, 0))
    close(value, expected)
    value.backward()
    expected.backward()
    close(spoiled.grad[kept], alone.grad, rtol=1e-9, atol=1e-12)
    assert not spoiled.grad[3].any()


@pytest.mark.parametrize("law", [name for name in FUNCTIONS if "median" not in name], indirect=True)
def test_gradient_is_that_of_finite_differences(law):
    """But for a median bandwidth, which finite differences move and the gradient takes for a constant."""
    call, rows, _ = law
    preds, target = rows(12)
    value = partial(call, target=target, validate_args=False)
    assert torch.autograd.gradcheck(value, preds.requires_grad_(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("law", ALL_PAIRS, indirect=True)
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


def test_too_few_samples_are_nan(law):
    """However few they are: in number, by weights, and by `ignore_index`."""
    call, rows, task = law
    preds, target = rows(5)
    options = call.keywords
    least = {"biased": 1, "block": options.get("block_size")}.get(options.get("estimator"), 2)
    for n in range(5):
        kept = torch.arange(5) < n
        marked = target.where(kept.unsqueeze(-1) if task == "multilabel" else kept, -1)
        short = call(preds[:n].float(), target[:n])
        assert (short.shape, short.dtype) == ((), torch.float32)
        for value in (short, call(preds, target, weights=kept), call(preds, marked, ignore_index=-1)):
            assert value.isnan() == (n < least)


class Largest(TorchDispatchMode):
    """Record the size of the largest tensor that any operation returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple | list) else (out,)
        self.size = max([self.size, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return out


def test_of_all_pairs_and_all_blocks_no_more_than_a_chunk_is_held():
    """Neither on the way there nor back."""
    x, one = torch.rand(600, 3), torch.ones(600)
    ways, grads = one.unsqueeze(0), torch.ones(1)
    for kernel in ("laplacian", "gaussian"):
        with Largest() as seen:
            pairwise._pair_sums._function(x, x, ways, kernel, 50)
            pairwise._pair_sums_backward._function(x, x, ways, grads, kernel, 50)
        assert 50 * 50 <= seen.size <= 600 * 50
    with Largest() as seen:
        mean, total = leave_one_out._others._function(x, x, one, x, one, 50)
        leave_one_out._others_backward._function(x, x, one, x, one, mean, total, x, 50)
    assert 50 * 50 <= seen.size <= 600 * 50
    logits, target, one = torch.rand(6000, 5), torch.zeros(6000, dtype=torch.int64), torch.ones(())
    given = (True, "laplacian", 4, False, 10)
    with Largest() as seen:
        pairwise._block_sums._function(logits, target, None, one, *given)
    assert seen.size <= 10 * 4 * 5
    with Largest() as seen:
        pairwise._block_sums_backward._function(logits, target, None, one, torch.ones(3), *given)
    assert seen.size == logits.numel()  # the gradient


def test_bad_arguments_are_refused():
    preds, target = calibrated(1, 10)
    given = {"preds": preds[0], "target": target[0], "task": "multiclass"}
    shared = {"chunk": [0], "average": [None], "weights": [torch.full((10,), 0.5)]}
    assert_named(partial(error, **given), {"p": [3], "bandwidth": [-1.0, math.inf, "median"], **shared})
    wrong = {"estimator": ["u"], "kernel": ["rbf"], "bandwidth": [0, "mean"], "block_size": [1], **shared}
    assert_named(partial(skce, **given), wrong)
    assert_named(partial(tc.SKCE, task="binary"), {"estimator": ["unbiased"], "bandwidth": ["median"]})
    assert_named(partial(tc.skce_test, **given), {"estimator": ["biased"]})
