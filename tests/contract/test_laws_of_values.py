"""Laws of values: batch axes, weights, gradients, bounds, no data, equivalent targets, and transforms of torch.

They run once per formula; see `formulas` in cases.py. A new metric is tested once it is in the table of cases. Laws of
calls also hold for targets of several annotators, and for functions without a streaming class.
"""

from functools import partial
from itertools import product

import pytest
import torch
from cases import (
    CALLS,
    CASES,
    N_CLASSES,
    covering,
    differentiable,
    formula_of,
    formulas,
    has_reduction,
    kind_of,
    path_of,
    paths,
)
from helpers.compare import close

import torchcalib as tc
from torchcalib.metrics.base import CalibrationMetric

of_calls = pytest.mark.parametrize("formula", formulas(cases=CALLS))


@of_calls
def test_law_batch_axes_equal_a_loop(formula):
    preds, target = formula.data(lead=(2, 3))
    whole = formula.call(preds, target)
    assert whole.shape[:2] == (2, 3)
    for at in product(range(2), range(3)):
        close(whole[at], formula.call(preds[at], target[at]))


@of_calls
def test_law_integer_weights_equal_repeated_rows(formula):
    preds, target = formula.data(n=30)
    times = torch.arange(30) % 4  # includes 0 copies
    repeated = formula.call(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0))
    close(formula.call(preds, target, weights=times), repeated)
    if formula.options.get("debiased"):  # floating weights are not numbers of rows
        values = (
            formula.call(preds, target, weights=k * times.half()) for k in (5, 35)
        )  # equal-mass bins: 5 divides N
        close(*values)
    else:
        close(formula.call(preds, target, weights=times.half()), repeated)


@pytest.mark.parametrize(
    "is_whole", [False, pytest.param(True, marks=pytest.mark.extended)], ids=["projected", "whole"]
)
@pytest.mark.parametrize(
    "case", list(covering(filter(differentiable, CALLS), lambda case: {formula_of(case), path_of(case)}, kind_of))
)
def test_law_gradient_equals_finite_differences(case, is_whole):
    """The extended run compares all entries of the Jacobian; the normal run compares a projection of it."""
    preds, target = case.data(n=12)
    value = partial(case.call, target=target, validate_args=False)
    assert torch.autograd.gradcheck(value, preds.requires_grad_(), rtol=1e-6, atol=1e-8, fast_mode=not is_whole)


@pytest.mark.parametrize("formula", formulas(differentiable, CALLS))
def test_law_weighted_gradient_equals_that_of_repeated_rows(formula):
    preds, target = formula.data(n=12)
    times = torch.arange(12) % 3
    a, b = preds.clone().requires_grad_(), preds.clone().requires_grad_()
    formula.call(a, target, weights=times).sum().backward()
    formula.call(b.repeat_interleave(times, 0), target.repeat_interleave(times, 0)).sum().backward()
    close(a.grad, b.grad)


@of_calls
def test_law_no_data_gives_nan_with_the_usual_shape_and_dtype(formula):
    preds, target = formula.data(n=10, dtype=torch.float32)
    usual, empty = formula.call(preds, target), formula.call(preds[:0], target[:0])
    assert empty.isnan().all()
    assert (empty.shape, empty.dtype) == (usual.shape, usual.dtype)
    weightless = formula.call(preds, target, weights=torch.zeros(10))
    assert weightless.isnan().all()
    if formula.cls is None:
        return
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


@pytest.mark.parametrize("formula", formulas(has_reduction, CALLS))
def test_law_reduction_none_gives_the_value_of_each_sample(formula):
    preds, target = formula.data(n=9)
    found = formula.call(preds, target, reduction="none")
    assert found.shape == (target.shape[:2] if formula.task == "multilabel" else (9,))
    is_per_label = formula.options.get("average", "macro") is None
    values = found if is_per_label else found.reshape(9, -1).mean(-1)
    close(values, formula.call(preds.unsqueeze(1), target.unsqueeze(1)))


def test_law_one_hot_labels_give_the_value_of_labels_or_an_error(formula):
    preds, target = formula.data(n=20)
    n_classes = N_CLASSES if formula.task == "multiclass" else 2
    annotator_counts = torch.nn.functional.one_hot(target, n_classes)
    shares = (annotator_counts if formula.task == "multiclass" else target).double()
    hard, expected = formula.format.hard_targets, formula.call(preds, target)
    refuses_shares = formula.format.min_annotators or (hard and formula.task == "multiclass")
    why = "`target` must be integer labels, got" if hard else "Pass annotator counts"
    for refused in [shares] * bool(refuses_shares) + [annotator_counts] * hard:
        with pytest.raises(TypeError, match=why):
            formula.call(preds, refused)
    if not refuses_shares:
        close(formula.call(preds, shares), expected)
    if not hard:
        close(formula.call(preds, annotator_counts), expected)
        metric = formula.metric()
        metric.update(preds, annotator_counts.to(torch.uint8))
        close(metric.compute(), expected)


# torch.compile and vmap return the same values; a bad row gives NaN, because traced code cannot raise an error.


def traced(case):
    """Return the keys of the code that is traced: the family, and the path from input to state."""
    family = case.cls.__bases__[0] if case.cls else case.function
    return {family, (case.task, case.options.get("mode")), case.counts, "positive_classes" in case.options}


def normal_keys(case):
    """Return the keys of a case in the normal run, which has each task and each mode, but not all pairs of them."""
    return {*traced(case) - {(case.task, case.options.get("mode"))}, case.task, case.options.get("mode")}


def part(case):
    """Return the key of a case in the extended run."""
    return case.cls or case.function, case.task, "cost" in case.options, case.counts


def check_transformed(case, call):
    """Compare a transformed function with the function itself, also with a bad row."""
    preds, target = case.data(n=12, lead=(2,))
    torch.testing.assert_close(call(preds, target), case.call(preds, target), rtol=1e-12, atol=1e-12)
    preds[0, 3] = torch.nan
    value = call(preds, target)
    assert value[0].isnan().all()
    torch.testing.assert_close(value[1], case.call(preds[1], target[1]), rtol=1e-12, atol=1e-12)


@of_calls
def test_law_vmap_equals_the_function(formula):
    check_transformed(formula, torch.vmap(formula.call))


COMPILED = [param.values[0] for param in covering(CALLS, traced, part)]  # cases of the extended run


@pytest.mark.parametrize("case", list(covering(COMPILED, normal_keys)))
def test_law_torch_compile_equals_the_function_without_a_graph_break(case):
    torch.compiler.reset()
    check_transformed(case, torch.compile(case.call, fullgraph=True, backend="eager"))


def test_every_streaming_class_is_in_the_table_of_cases():
    """Each class also has a case in the normal run, both per formula and per path."""
    public = {getattr(tc, name) for name in tc.__all__}
    streaming = {cls for cls in public if isinstance(cls, type) and issubclass(cls, CalibrationMetric)}
    streaming -= {tc.Bootstrapped, tc.ByGroup, tc.Clustered}  # wrappers, whose metrics are in the table
    assert streaming == {case.cls for case in CASES}
    assert streaming == {param.values[0].cls for param in formulas() if not param.marks}
    assert {path_of(case) for case in CASES} == {path_of(param.values[0]) for param in paths() if not param.marks}
