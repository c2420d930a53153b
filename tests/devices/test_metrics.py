"""Every metric in every task, as function and as class, on the emulated device."""

import pytest
import torch
from cases import CASES, covering, differentiable, formula_of, path_of
from helpers.emulated_device import recorded_reads

import torchcalib as tc
import torchcalib.functional as F

pytestmark = pytest.mark.emulated
close = torch.testing.assert_close


GRADIENTS = list(covering(filter(differentiable, CASES), lambda case: {case.cls}, formula_of))
PATHS = list(covering(CASES, lambda case: {path_of(case)}, path_of))
PATHS_AND_CLASSES = list(covering(CASES, lambda case: {path_of(case), case.cls}, formula_of))


ROUNDS = "1: largest number of groups or blocks, 2: large counts, 2 and 1 per round of pooling"
LOOPS = "1: validity of block sizes, 1: counts for loops on the CPU, 1: number of blocks"
# Largest number of reads of a function or of `compute`, besides 1 for the validity of the rows, with the reasons
READS = {
    tc.Cox: (24, "1 per Newton step"),
    tc.CORP: (9, ROUNDS),
    tc.Cllr: (9, ROUNDS),
    tc.GCE: (3, LOOPS),
    tc.EstimationError: (9, f"blocks: {LOOPS}, or {ROUNDS}"),
    tc.TCE: (16, f"blocks: {LOOPS}, or {ROUNDS}; tests: 1: NaN, 6: bins, counts and samples that need a test"),
}


def most_reads(case):
    """Return the largest number of reads of a case."""
    uses_pava = case.options.get("bins") == "pava"
    return 1 + READS.get(case.cls, (9 if uses_pava else 0, ROUNDS))[0]


# Rows of narrow types are computed in float32.
NARROW = (torch.float32, torch.float16, torch.bfloat16)


def on(device, *tensors):
    return [x.to(device) for x in tensors]


@pytest.mark.parametrize("case", PATHS_AND_CLASSES)
def test_function_and_class_give_the_values_of_the_cpu(case, device):
    given = case.data()
    expected = case.call(*given)
    preds, target = on(device, *given)
    with recorded_reads() as reads:
        value = case.call(preds, target)
    assert reads.at_most(most_reads(case))
    assert reads.uploads == 0
    assert value.device == device
    close(value.cpu(), expected)
    (weights,) = on(device, torch.ones(len(target)))
    metric, dropping = (case.metric(**how).to(device) for how in ({}, {"ignore_index": -100, "nan_policy": "drop"}))
    with recorded_reads() as reads:
        metric.update(preds[:20], target[:20])
        metric.update(preds[20:], target[20:])
        dropping.update(preds, target, weights=weights)
    assert (list(reads), reads.uploads) == ([], 0)
    with recorded_reads() as reads:
        value = metric.compute()
    assert reads.at_most(most_reads(case))
    assert reads.uploads == 0
    assert value.device == device
    if not case.in_blocks:  # blocks end with each update
        close(value.cpu(), expected.double())


@pytest.mark.extended
@pytest.mark.parametrize("case", PATHS)
def test_values_of_narrow_types_are_those_of_float64_on_the_cpu(case, device):
    for dtype in NARROW:
        preds, target = case.data(500, dtype=dtype)
        expected = case.call(preds.double(), target, validate_args=False)
        close(case.call(preds.to(device), target.to(device)).cpu().double(), expected.double(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients_are_those_of_the_cpu(case, device):
    def gradient(where):
        preds, target = on(where, *case.data())
        preds.requires_grad_()
        case.call(preds, target).sum().backward()
        return preds.grad.cpu()

    close(gradient(device), gradient("cpu"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("function", [F.ece, F.mce, F.rmsce, F.smece, F.spiegelhalter])
def test_gradients_of_top_k_in_half_precision_are_rounded_once(function, dtype, device):
    """The tolerance is the relative error of one rounding, 2^-8 or 2^-11, and that of sums in float32.

    A gradient below the smallest normal float16 number has the absolute error 2^-25.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(300, 9, generator=generator)).to(dtype)
    target = torch.randint(0, 9, (300,), generator=generator)

    def gradient(values, where):
        leaf = values.to(where).requires_grad_()
        options = {"task": "multiclass", "mode": tc.TopK(5), "from_logits": True}
        function(leaf, target.to(where), **options).backward()
        return leaf.grad.cpu().double()

    expected = gradient(logits.double(), "cpu")
    rounding, sums = torch.finfo(dtype).eps / 2, 1e-5 * float(expected.abs().max())
    close(gradient(logits, device), expected, rtol=rounding, atol=2**-25 + sums)
