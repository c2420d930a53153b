"""Laws of the path from input to state: order, batches, weights, merging, saving, dtype and memory layout.

They run once per path; see `paths` in cases.py. A new metric is tested once it is in the table of cases. Laws of calls
also hold for functions without a streaming class.
"""

from itertools import product

import pytest
import torch
from cases import CALLS, is_order_independent, paths
from helpers.compare import close

order_independent = pytest.mark.parametrize("path", paths(is_order_independent))
of_calls = pytest.mark.parametrize("path", paths(cases=CALLS))


@order_independent
def test_law_sample_order_does_not_change_the_value(path):
    preds, target = path.data()
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(1))
    close(path.call(preds[order], target[order]), path.call(preds, target))


@of_calls
def test_law_leading_axes_of_weights_equal_a_loop(path):
    """The leading axes of the weights are leading axes of the value."""
    preds, target = path.data(n=30)
    weights = torch.stack([path.weights(30, seed) for seed in range(6)]).reshape(2, 3, 30)
    weights[0, 1, 4:9] = 0
    weights[..., 11] = 0
    preds[11] = torch.nan  # weight 0 in every replicate
    values = path.call(preds, target, weights=weights)
    for at in product(range(2), range(3)):
        close(values[at], path.call(preds, target, weights=weights[at]))
    series, labels = path.data(n=30, lead=(2,))
    shared = weights[0].unsqueeze(1).expand(3, 2, 30)
    close(path.call(series, labels, weights=shared)[2, 1], path.call(series[1], labels[1], weights=weights[0, 2]))


@of_calls
def test_law_values_of_rows_with_weight_zero_have_no_effect(path):
    preds, target = path.data(n=20)
    spoiled, bad_target, weights = preds.clone(), target.clone(), torch.ones(20)
    spoiled[3], bad_target[3], weights[3] = torch.nan, 99, 0
    keep = torch.arange(20) != 3
    a, b = spoiled.requires_grad_(), preds[keep].requires_grad_()
    value, expected = path.call(a, bad_target, weights=weights), path.call(b, target[keep])
    close(value, expected)
    if path.differentiable:
        value.sum().backward()
        expected.sum().backward()
        assert not a.grad[3].any()
        close(a.grad[keep], b.grad)


@of_calls
def test_law_ignored_rows_are_dropped(path):
    preds, target = path.data(n=20)
    marked = target.clone()
    marked[[2, 5, 11]] = -100
    keep = marked[:, 0] != -100 if path.task == "multilabel" else marked != -100
    close(path.call(preds, marked, ignore_index=-100), path.call(preds[keep], target[keep]))
    if path.cls is None:
        return
    metric = path.metric(ignore_index=-100)
    metric.update(preds, marked)
    close(metric.compute(), path.call(preds[keep], target[keep]).double())


@order_independent
def test_law_batch_size_and_memory_layout_do_not_change_the_value(path):
    """Single rows, all rows at once, and strided rows. Vectorised and scalar code differ in the last float32 digit."""
    for dtype in (torch.float32, torch.bfloat16):
        preds, target = path.data(n=35, dtype=dtype, seed=8)
        whole, single, strided = path.metric(), path.metric(), path.metric()
        whole.update(preds, target)
        for k in range(35):
            single.update(preds[k : k + 1], target[k : k + 1])
        strided.update(torch.stack([preds, preds], 1)[:, 0], target)
        for metric in (single, strided):
            close(metric.compute(), whole.compute(), msg=lambda m, dtype=dtype: f"{dtype}: {m}")


def test_law_forward_returns_the_batch_value_with_its_gradient(path):
    preds, target = path.data(n=20)
    metric = path.metric()
    metric.update(*path.data(n=9, seed=5))
    a, b = preds.clone().requires_grad_(), preds.clone().requires_grad_()
    value = metric(a, target)
    expected = path.call(b, target)
    close(value, expected.double())
    if path.differentiable:
        value.sum().backward()
        expected.sum().backward()
        close(a.grad, b.grad)
    assert not any(t.requires_grad for part in metric.kind.parts(metric.state) for t in part)
    if not path.in_blocks:  # the first batch has an incomplete block, which is dropped
        first, second = path.data(n=9, seed=5)
        close(metric.compute(), path.call(torch.cat([first, preds]), torch.cat([second, target])))


@order_independent
def test_law_batch_shape_computes_a_value_for_each_batch_element(path):
    preds, target = path.data(n=20, lead=(3,))
    metric = path.metric(batch_shape=(3,))
    metric.update(preds[:, :7], target[:, :7])
    metric.update(preds[:, :0], target[:, :0])
    metric.update(preds[:, 7:], target[:, 7:])
    close(metric.compute(), path.call(preds, target))


@of_calls
def test_law_low_precision_input_gives_the_value_of_its_float64_copy(path):
    """Row arithmetic is float32, also in autocast: each sum of a few terms has a relative error of a few times 6e-8."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        preds, target = path.data(n=30, dtype=dtype)
        value = path.call(preds, target)
        assert value.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close(path.call(preds, target), value, rtol=0, atol=0)
        expected = path.call(preds.double(), target, validate_args=False).float()
        close(value, expected, rtol=2e-5, atol=2e-6, msg=lambda m, dtype=dtype: f"{dtype}: {m}")


@of_calls
def test_law_any_class_axis_is_accepted_and_other_axes_are_samples(path):
    preds, target = path.data(n=24)
    with_classes, axis = path.task == "multilabel", {} if path.task == "binary" else {"class_axis": 1}
    images, labels = (preds.reshape(2, 3, 4, *preds.shape[1:]), target.reshape(2, 3, 4, *target.shape[1:]))
    if path.cls:
        metric = path.metric(**axis)
        metric.update(images.movedim(-1, 1) if axis else images, labels.movedim(-1, 1) if with_classes else labels)
        close(metric.compute(), path.call(preds, target))
    if axis:
        close(path.call(preds.T, target.T if with_classes else target, class_axis=0), path.call(preds, target))
