"""Every metric in every task, as function and as class, on the emulated device."""

import pytest
import torch
from cases import CASES, covering, formula_of, formulas, path_of
from helpers.emulated_device import recorded_reads

pytestmark = pytest.mark.emulated
close = torch.testing.assert_close


COVERING = list(covering(CASES, lambda case: {(case.cls, case.task), path_of(case), formula_of(case)}))


def on(device, *tensors):
    return [x.to(device) for x in tensors]


@pytest.mark.parametrize("case", COVERING)
def test_function_and_class_give_the_values_of_the_cpu(case, device):
    given = case.data()
    expected = case.call(*given)
    preds, target = on(device, *given)
    value = case.call(preds, target)
    assert value.device == device
    close(value.cpu(), expected)
    metric = case.metric().to(device)
    with recorded_reads() as reads:
        metric.update(preds[:20], target[:20])
        metric.update(preds[20:], target[20:])
    assert (list(reads), reads.uploads) == ([], 0)
    if not case.in_blocks:
        assert metric.compute().device == device
        close(metric.compute().cpu(), expected.double())


@pytest.mark.parametrize("case", formulas(lambda case: case.differentiable))
def test_gradients_are_those_of_the_cpu(case, device):
    def gradient(where):
        preds, target = on(where, *case.data())
        preds.requires_grad_()
        case.call(preds, target).sum().backward()
        return preds.grad.cpu()

    close(gradient(device), gradient("cpu"))
