"""Laws of values: batch axes, weights, gradients, bounds, no data, and targets that say the same in another way.

A case for each formula keeps them; see `formulas` in cases.py. A new metric joins by a line in the table of cases.
"""

from itertools import product

import numpy as np
import pytest
import torch
from cases import CASES, N_CLASSES, differentiable, formulas, path_of, paths
from helpers.numbers import close

import torchcalib as tc
from torchcalib.metrics.base import StreamingMetric

with_gradient = pytest.mark.parametrize("formula", formulas(differentiable))


def test_law_batch_axis_is_a_loop(formula):
    preds, target = formula.data(lead=(2, 3))
    whole = formula.call(preds, target)
    assert whole.shape[:2] == (2, 3)
    for at in product(range(2), range(3)):
        close(whole[at], formula.call(preds[at], target[at]))


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


def test_law_labels_as_shares_and_as_single_votes_are_labels_or_refused(formula):
    preds, target = formula.data(n=20)
    n_classes = N_CLASSES if formula.task == "multiclass" else 2
    votes = torch.nn.functional.one_hot(target, n_classes)
    shares = (votes if formula.task == "multiclass" else target).double()
    hard, expected = formula.format.hard_targets, formula.call(preds, target)
    if hard or formula.format.least_votes:
        why = "`target` must be integer labels where labels are counted" if hard else "Pass vote counts"
        for refused in (shares, votes) if hard else (shares,):
            with pytest.raises(TypeError, match=why):
                formula.call(preds, refused)
    else:
        close(formula.call(preds, shares), expected)
    if not hard:
        close(formula.call(preds, votes), expected)
        metric = formula.metric()
        metric.update(preds, votes.to(torch.uint8))
        close(metric.compute(), expected)


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
