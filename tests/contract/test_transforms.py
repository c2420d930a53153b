"""Functions under torch.compile and vmap are the functions, and there a bad row gives NaN."""

import pytest
import torch
from cases import CASES, covering


def traced(case):
    """What is traced: a class, and for each family of classes the way from input to state."""
    family = case.cls.__bases__[0], case.task, case.options.get("reduction")
    return {(case.cls, "cost" in case.options), family}


def part(case):
    return case.cls, case.task, case.options.get("component")


def check(case, call):
    """Values cannot be looked at there, so that a bad one cannot be raised."""
    preds, target = case.data(n=12, lead=(2,))
    torch.testing.assert_close(call(preds, target), case.call(preds, target), rtol=1e-12, atol=1e-12)
    preds[0, 3] = torch.nan
    value = call(preds, target)
    assert value[0].isnan().all()
    torch.testing.assert_close(value[1], case.call(preds[1], target[1]), rtol=1e-12, atol=1e-12)


def test_law_mapped_functions_are_the_function(formula):
    check(formula, torch.vmap(formula.call))


@pytest.mark.parametrize("case", list(covering(CASES, traced, part)))
def test_law_compiled_functions_are_the_function_without_a_graph_break(case):
    torch.compiler.reset()
    check(case, torch.compile(case.call, fullgraph=True, backend="eager"))
