"""Laws of values: batch axes, weights, gradients, bounds, no data, and targets that say the same in another way.

A case for each formula keeps them; see `formulas` in cases.py. A new metric joins by a line in the table of cases.
"""

import numpy as np
import pytest
import torch
from cases import CASES, N_CLASSES, differentiable, formulas, path_of, paths

import torchcalib as tc
from torchcalib.streaming import StreamingMetric

with_gradient = pytest.mark.parametrize("formula", formulas(differentiable))


def close(a, b, **tolerance):
    """Equal but for the order of float64 sums over at most 40 rows: 40 * 2.2e-16, times numbers of order 10."""
    torch.testing.assert_close(a, b, **{"rtol": 1e-12, "atol": 1e-12, **tolerance}, equal_nan=True)


def test_law_batch_axis_is_a_loop(formula):
    preds, target = formula.data(lead=(2, 3))
    whole = formula.call(preds, target)
    assert whole.shape[:2] == (2, 3)
    for i in range(2):
        for j in range(3):
            close(whole[i, j], formula.call(preds[i, j], target[i, j]))


def test_law_integer_weights_are_repeats(formula):
    preds, target = formula.data(n=30)
    times = torch.arange(30) % 4  # 0 copies included
    repeated = formula.call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
    close(formula.call(preds, target, weights=times), repeated)
    close(formula.call(preds, target, weights=times.half()), repeated)


@with_gradient
def test_law_gradient_is_that_of_finite_differences(formula):
    preds, target = formula.data(n=12)
    assert torch.autograd.gradcheck(lambda p: formula.call(p, target, validate_args=False), preds.requires_grad_())


@with_gradient
def test_law_weighted_gradient_is_that_of_repeats(formula):
    preds, target = formula.data(n=12)
    times = torch.arange(12) % 3
    a, b = preds.clone().requires_grad_(), preds.clone().requires_grad_()
    formula.call(a, target, weights=times).sum().backward()
    formula.call(b.repeat_interleave(times, 0), target.repeat_interleave(times, 0)).sum().backward()
    close(a.grad, b.grad)


def test_law_no_data_is_nan_of_the_usual_shape_and_dtype(formula):
    preds, target = formula.data(n=10, dtype=torch.float32)
    usual, empty = formula.call(preds, target), formula.call(preds[:0], target[:0])
    assert empty.isnan().all()
    assert (empty.shape, empty.dtype) == (usual.shape, usual.dtype)
    weightless = formula.call(preds, target, weights=torch.zeros(10))
    assert weightless.isnan().all()
    metric = formula.metric()
    metric.update(preds[:0], target[:0])
    assert metric.compute().isnan().all()
    assert metric.compute().shape == usual.shape


def test_law_values_are_within_the_declared_bounds(formula):
    metric = formula.metric()
    low, high = metric.plot_lower_bound, metric.plot_upper_bound
    for seed in range(5):
        value = metric(*formula.data(n=40, seed=seed))
        assert low is None or bool((value >= low).all())
        assert high is None or bool((value <= high).all())


def takes_shares(case):
    return not (case.format.hard_targets or case.format.least_votes)


def takes_votes(case):
    return not case.format.hard_targets


def takes_labels_alone(case):
    return case.format.hard_targets


@pytest.mark.parametrize("formula", formulas(takes_shares))
def test_law_soft_targets_of_certainty_are_labels(formula):
    preds, target = formula.data(n=20)
    soft = torch.nn.functional.one_hot(target, N_CLASSES) if formula.task == "multiclass" else target
    close(formula.call(preds, soft.double()), formula.call(preds, target))


def votes_of(case, target):
    """Each label as a single vote."""
    return torch.nn.functional.one_hot(target, N_CLASSES if case.task == "multiclass" else 2)


@pytest.mark.parametrize("formula", formulas(takes_votes))
def test_law_a_single_vote_is_a_label(formula):
    preds, target = formula.data(n=20)
    votes = votes_of(formula, target)
    close(formula.call(preds, votes), formula.call(preds, target))
    metric = formula.metric()
    metric.update(preds, votes.to(torch.uint8))
    close(metric.compute(), formula.call(preds, target))


@pytest.mark.parametrize("formula", formulas(takes_labels_alone))
def test_law_where_labels_are_counted_soft_targets_and_votes_are_refused(formula):
    preds, target = formula.data(n=20)
    soft = preds if formula.task != "binary" else target.double()
    for given in (soft, votes_of(formula, target)):
        with pytest.raises(TypeError, match="`target` must be integer labels where labels are counted"):
            formula.call(preds, given)


@pytest.mark.parametrize("formula", formulas(lambda case: case.format.least_votes > 0))
def test_law_where_votes_are_counted_shares_are_refused(formula):
    preds, target = formula.data(n=20)
    with pytest.raises(TypeError, match="Pass vote counts"):
        formula.call(preds, torch.nn.functional.one_hot(target, N_CLASSES).double())


def test_every_streaming_class_is_in_the_table_of_cases():
    """And each class has a case that the normal run takes, in the laws of values and of paths."""
    public = {getattr(tc, name) for name in tc.__all__}
    streaming = {cls for cls in public if isinstance(cls, type) and issubclass(cls, StreamingMetric)}
    streaming -= {tc.Bootstrapped, tc.ByGroup}  # which are what the metric is that they wrap
    assert streaming == {case.cls for case in CASES}
    assert streaming == {param.values[0].cls for param in formulas() if not param.marks}
    assert {path_of(case) for case in CASES} == {path_of(param.values[0]) for param in paths() if not param.marks}
    for cls in streaming:
        assert cls.unit
        assert cls.question
        assert cls.source
        assert np.isfinite(cls.perfect)
