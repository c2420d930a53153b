"""Public calls with tensors on the CPU give the same values under any default device of torch."""

import pytest
import torch
from cases import CALLS, covering, path_of
from helpers import fits
from helpers.reports import QUICK

import torchcalib as tc
import torchcalib.functional as F


def same_on_meta(call):
    expected = call()
    with torch.device("meta"):
        found = call()
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", list(covering(CALLS, lambda case: {case.function}, path_of)))
def test_functions_under_another_default_device(case):
    preds, target = case.data()
    weights = case.weights(40)
    same_on_meta(lambda: case.call(preds, target))
    same_on_meta(lambda: case.call(preds, target, weights=weights))


def test_tables_tests_and_curves_under_another_default_device():
    preds, target = (
        torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
        torch.arange(60) % 2,
    )
    how = {"task": "binary"}
    same_on_meta(lambda: F.tce_table(preds, target, **how).to_dict()["gap"])
    same_on_meta(lambda: F.calibration_curve(preds, target, **how).to_dict()["gap"])
    same_on_meta(lambda: list(F.risk_coverage_curve(preds, target, **how)))
    for mode in ("positive", "top_label"):
        same_on_meta(lambda mode=mode: tc.calibration_test(preds, target, mode=mode, n_replicates=39, **how).p_value)


def test_reports_comparisons_and_calibrators_under_another_default_device():
    logits, target = fits.data(60)
    flat = tc.report(logits, target, from_logits=True, **QUICK).flat
    with torch.device("meta"):
        assert tc.report(logits, target, from_logits=True, **QUICK).flat() == flat()
