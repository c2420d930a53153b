"""Laws that every metric keeps, in every setting. A new metric joins by a line in conftest's table of cases."""

import pickle

import numpy as np
import pytest
import torch
from cases import CASES, once_a_kind, once_a_path

import torchcalib as tc

SETTINGS = {"rtol": 1e-12, "atol": 1e-12}


def close(a, b, **tolerance):
    torch.testing.assert_close(a, b, **{**SETTINGS, **tolerance}, equal_nan=True)


def skip_without_gradient(case):
    if not case.differentiable:
        pytest.skip("a count of decisions has no gradient")


def skip_blocks(case):
    """What such a value is of follows from the order of samples and from the updates; test_canonical has its laws."""
    if case.in_blocks:
        pytest.skip("blocks of samples are cut in their order, and within each update")


def test_law_sample_order(case):
    skip_blocks(case)
    preds, target = case.data()
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(1))
    close(case.call(preds[order], target[order]), case.call(preds, target))


def test_law_batch_axis_is_a_loop(case):
    preds, target = case.data(lead=(2, 3))
    whole = case.call(preds, target)
    assert whole.shape[:2] == (2, 3)
    for i in range(2):
        for j in range(3):
            close(whole[i, j], case.call(preds[i, j], target[i, j]))


def test_law_integer_weights_are_repeats(case):
    preds, target = case.data(n=30)
    times = torch.arange(30) % 4  # 0 copies included
    repeated = case.call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
    close(case.call(preds, target, weights=times), repeated)
    close(case.call(preds, target, weights=times.half()), repeated)


def test_law_leading_axes_of_weights_are_a_loop(case):
    """The same rows, weighed in several ways: the leading axes of the weights are those of the value."""
    preds, target = case.data(n=30)
    weights = torch.stack([case.weights(30, seed) for seed in range(6)]).reshape(2, 3, 30)
    weights[0, 1, 4:9] = 0
    weights[..., 11] = 0
    preds[11] = torch.nan  # left out in all ways
    values = case.call(preds, target, weights=weights)
    for i in range(2):
        for j in range(3):
            close(values[i, j], case.call(preds, target, weights=weights[i, j]))
    series, labels = case.data(n=30, lead=(2,))
    shared = weights[0].unsqueeze(1).expand(3, 2, 30)
    close(case.call(series, labels, weights=shared)[2, 1], case.call(series[1], labels[1], weights=weights[0, 2]))


def test_law_rows_of_weight_zero_are_never_read(case):
    preds, target = case.data(n=20)
    spoiled, bad_target, weights = preds.clone(), target.clone(), torch.ones(20)
    spoiled[3], bad_target[3], weights[3] = torch.nan, 99, 0
    keep = torch.arange(20) != 3
    close(case.call(spoiled, bad_target, weights=weights), case.call(preds[keep], target[keep]))


def test_law_ignored_rows_are_dropped(case):
    preds, target = case.data(n=20)
    marked = target.clone()
    marked[[2, 5, 11]] = -100
    keep = marked[:, 0] != -100 if case.task == "multilabel" else marked != -100
    close(case.call(preds, marked, ignore_index=-100), case.call(preds[keep], target[keep]))
    metric = case.metric(ignore_index=-100)
    metric.update(preds, marked)
    close(metric.compute(), case.call(preds[keep], target[keep]).double())


def test_law_gradient_is_that_of_finite_differences(case):
    skip_without_gradient(case)
    preds, target = case.data(n=12)
    assert torch.autograd.gradcheck(lambda p: case.call(p, target, validate_args=False), preds.requires_grad_())


def test_law_weighted_gradient_is_that_of_repeats(case):
    skip_without_gradient(case)
    preds, target = case.data(n=12)
    times = torch.arange(12) % 3
    a, b = preds.clone().requires_grad_(), preds.clone().requires_grad_()
    case.call(a, target, weights=times).sum().backward()
    case.call(b.repeat_interleave(times, 0), target.repeat_interleave(times, 0)).sum().backward()
    close(a.grad, b.grad)


def test_law_streamed_in_pieces_is_one_call(case):
    skip_blocks(case)
    preds, target = case.data(n=41)
    weights = case.weights(41)
    metric = case.metric()
    for piece in (slice(0, 1), slice(1, 1), slice(1, 30), slice(30, 41)):
        metric.update(preds[piece], target[piece], weights=weights[piece])
    close(metric.compute(), case.call(preds, target, weights=weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_law_batch_size_and_memory_layout_change_nothing(case, dtype):
    """One row at a time, all at once, and strided: vectorised and scalar code differ in the last digit of a float32."""
    skip_blocks(case)
    preds, target = case.data(n=67, dtype=dtype, seed=8)
    whole, single = case.metric(), case.metric()
    whole.update(preds, target)
    for k in range(67):
        single.update(preds[k : k + 1], target[k : k + 1])
    close(single.compute(), whole.compute())
    strided = case.metric()
    strided.update(torch.stack([preds, preds], 1)[:, 0], target)
    close(strided.compute(), whole.compute())


def test_law_merged_is_one_call(case):
    skip_blocks(case)
    preds, target = case.data(n=41)
    one, other = case.metric(), case.metric()
    one.update(preds[:13], target[:13])
    other.update(preds[13:], target[13:])
    one.compute()
    one.merge_state(other)
    close(one.compute(), case.call(preds, target))


def test_law_pickled_goes_on(case):
    skip_blocks(case)
    preds, target = case.data(n=41)
    metric = case.metric()
    metric(preds[:20].requires_grad_(), target[:20])
    for copy in (pickle.loads(pickle.dumps(metric)), metric.clone()):
        copy.update(preds[20:], target[20:])
        close(copy.compute(), case.call(preds, target).detach())


def test_law_forward_is_the_batch_value_with_its_gradient(case):
    preds, target = case.data(n=20)
    metric = case.metric()
    metric.update(*case.data(n=9, seed=5))
    a, b = preds.clone().requires_grad_(), preds.clone().requires_grad_()
    value = metric(a, target)
    expected = case.call(b, target)
    close(value, expected.double())
    if case.differentiable:
        value.sum().backward()
        expected.sum().backward()
        close(a.grad, b.grad)
    assert not any(t.requires_grad for part in metric.kind.parts(metric.state) for t in part)
    if case.in_blocks:
        return  # the rest of the first batch is no part of a block
    first, second = case.data(n=9, seed=5)
    close(metric.compute(), case.call(torch.cat([first, preds]), torch.cat([second, target])))


def test_law_batch_shape_keeps_series_apart(case):
    skip_blocks(case)
    preds, target = case.data(n=20, lead=(3,))
    metric = case.metric(batch_shape=(3,))
    metric.update(preds[:, :7], target[:, :7])
    metric.update(preds[:, :0], target[:, :0])
    metric.update(preds[:, 7:], target[:, 7:])
    close(metric.compute(), case.call(preds, target))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_law_low_precision_is_read_as_it_is(case, dtype):
    preds, target = case.data(n=30, dtype=dtype)
    value = case.call(preds, target)
    assert value.dtype == torch.float32
    close(value, case.call(preds.double(), target, validate_args=False).float(), rtol=2e-5, atol=2e-6)


def paths_to_trace(case):
    """The reading of a metric, and how metrics of its family come from input to what they read."""
    reading = (case.cls, case.options.get("component"), "cost" in case.options)
    return {reading, (case.cls.__bases__[0], case.task, case.options.get("reduction"))}


def _wrapped():
    """Every case mapped; compiled, which takes a second each, those that bring something new to trace."""
    for case in CASES:
        yield pytest.param(case, "vmap", id=f"{case}-vmap")
    for case in once_a_path(CASES, paths_to_trace):
        yield pytest.param(*case.values, "compile", id=f"{case.id}-compile", marks=case.marks)


@pytest.mark.parametrize(("case", "wrap"), list(_wrapped()))
def test_law_compiled_and_mapped_functions_are_the_function_and_there_a_bad_row_gives_nan(case, wrap):
    """Without a graph break; values cannot be looked at there, so that a bad one cannot be raised."""
    torch.compiler.reset()
    call = torch.vmap(case.call) if wrap == "vmap" else torch.compile(case.call, fullgraph=True, backend="eager")
    preds, target = case.data(n=12, lead=(2,))
    close(call(preds, target), case.call(preds, target))
    preds[0, 3] = torch.nan
    value = call(preds, target)
    assert value[0].isnan().all()
    close(value[1], case.call(preds[1], target[1]))


def test_law_no_data_is_nan_of_the_usual_shape_and_dtype(case):
    preds, target = case.data(n=10, dtype=torch.float32)
    usual, empty = case.call(preds, target), case.call(preds[:0], target[:0])
    assert empty.isnan().all()
    assert (empty.shape, empty.dtype) == (usual.shape, usual.dtype)
    weightless = case.call(preds, target, weights=torch.zeros(10))
    assert weightless.isnan().all()
    metric = case.metric()
    metric.update(preds[:0], target[:0])
    assert metric.compute().isnan().all()
    assert metric.compute().shape == usual.shape


def test_law_values_are_within_the_declared_bounds(case):
    metric = case.metric()
    low, high = metric.plot_lower_bound, metric.plot_upper_bound
    for seed in range(5):
        value = metric(*case.data(n=40, seed=seed))
        assert low is None or bool((value >= low).all())
        assert high is None or bool((value <= high).all())


def test_law_class_axis_may_stand_anywhere(case):
    if case.task == "binary":
        pytest.skip("binary input has no class axis")
    preds, target = case.data(n=20)
    first = case.call(preds.T, target.T if case.task == "multilabel" else target, class_axis=0)
    close(first, case.call(preds, target))


def test_law_streaming_flattens_every_axis_but_the_classes(case):
    preds, target = case.data(n=24)
    metric = case.metric(class_axis=1) if case.task != "binary" else case.metric()
    if case.task == "binary":
        metric.update(preds.reshape(2, 3, 4), target.reshape(2, 3, 4))
    else:
        images = preds.reshape(2, 3, 4, -1).movedim(-1, 1)
        labels = target.reshape(2, 3, 4, -1).movedim(-1, 1) if case.task == "multilabel" else target.reshape(2, 3, 4)
        metric.update(images, labels)
    close(metric.compute(), case.call(preds, target))


def test_law_soft_targets_of_certainty_are_labels(case):
    preds, target = case.data(n=20)
    if case.format.hard_targets:
        with pytest.raises(TypeError, match="`target` must be integer labels where labels are counted"):
            case.call(preds, preds if case.task != "binary" else target.double())
        return
    soft = torch.nn.functional.one_hot(target, 4) if case.task == "multiclass" else target
    if case.format.least_votes:
        with pytest.raises(TypeError, match="Pass vote counts"):
            case.call(preds, soft.double())
        return
    close(case.call(preds, soft.double()), case.call(preds, target))


def test_law_a_single_vote_is_a_label(case):
    preds, target = case.data(n=20)
    votes = torch.nn.functional.one_hot(target, 4 if case.task == "multiclass" else 2)
    if case.format.hard_targets:
        with pytest.raises(TypeError, match="`target` must be integer labels where labels are counted"):
            case.call(preds, votes)
        return
    close(case.call(preds, votes), case.call(preds, target))
    metric = case.metric()
    metric.update(preds, votes.to(torch.uint8))
    close(metric.compute(), case.call(preds, target))


def test_every_streaming_class_is_in_the_table_of_cases():

    from torchcalib.streaming import StreamingMetric

    public = {getattr(tc, name) for name in tc.__all__}
    streaming = {cls for cls in public if isinstance(cls, type) and issubclass(cls, StreamingMetric)}
    streaming -= {tc.Bootstrapped, tc.ByGroup}  # which are what the metric is that they wrap
    assert streaming == {case.cls for case in CASES}
    for cases in (once_a_kind(CASES), once_a_path(CASES, paths_to_trace)):
        assert streaming == {case.values[0].cls for case in cases if not case.marks}, "left to the slow run altogether"
    for cls in streaming:
        assert cls.unit
        assert cls.question
        assert cls.source
        assert np.isfinite(cls.perfect)
