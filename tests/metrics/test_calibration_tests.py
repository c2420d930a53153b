"""`CalibrationTest` of every calibration error: shapes, states, no data, and text."""

from functools import partial

import pytest
import torch
from cases import CASES, covering, formula_of, path_of
from helpers.null_distribution import F64, FEW, FIELDS, close, same
from helpers.samples import updated

import torchcalib as tc
from torchcalib.inference import CalibrationTest, calibration_test

TESTABLE = [
    case
    for case in CASES
    if case.cls.has_test
    and case.cls not in (tc.Cox, tc.SKCE, tc.Spiegelhalter)  # these have asymptotic tests
    and case.options.get("component", "mcb") in ("mcb", "ici")
    and (case.cls is not tc.SmECE or case.name == "smece-binary")  # one case, because it has many cells
    # two cases, because the test is slow
    and (case.cls is not tc.TCE or case.name in ("tce-binary-positive", "tce-mass-l2-binary"))
]


@pytest.mark.parametrize("case", list(covering(TESTABLE, lambda case: {formula_of(case)}, formula_of)))
def test_calibration_test_has_the_shape_of_the_value(case):
    preds, target = case.data(n=60)
    metric = case.metric()
    metric.update(preds, target)
    found = metric.test(**FEW)
    close(found.statistic, metric.compute())
    for name in FIELDS:
        assert getattr(found, name).shape == found.statistic.shape
        assert getattr(found, name).dtype == F64
    if case.name == "esce-multiclass-classwise":  # the value is 0 for every model
        assert (float(found.noise_floor), float(found.p_value)) == (0, 1)
        return
    assert bool((found.noise_floor > 0).all())
    assert bool(((found.p_value > 0) & (found.p_value <= 1)).all())
    if metric.plot_lower_bound == 0 and not found.low.isnan().any():
        assert bool((found.low >= 0).all())
    assert not bool((found.low > found.high).any())
    same(found, metric.test(**FEW))
    assert not torch.equal(found.noise_floor, metric.test(seed=1, **FEW).noise_floor)


@pytest.mark.parametrize("case", list(covering(TESTABLE, lambda case: {path_of(case)}, lambda case: case.cls)))
def test_calibration_test_of_merged_states_equals_one_call_and_is_nan_without_data(case):
    preds, target = case.data(n=60)
    weights = case.weights(60).long() if case.whole_weights else case.weights(60)
    whole, one, other, empty = case.metric(), case.metric(), case.metric(), case.metric()
    whole.update(preds, target, weights=weights)
    one.update(preds[:13], target[:13], weights=weights[:13])
    other.update(preds[13:], target[13:], weights=weights[13:])
    one.merge_state(other)
    found = whole.test(**FEW)
    merged, direct = one.test(**FEW), calibration_test(whole, preds, target, weights=weights, **FEW)
    if whole.input_format.read_as == "multiclass" and whole.estimator.averages:
        # Labels are simulated by row. Their random numbers depend on the order of rows, and sums contain no rows.
        for other_test in (merged, direct):
            torch.testing.assert_close(other_test.statistic, found.statistic, rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(other_test.noise_floor, found.noise_floor, rtol=0.3, atol=0.02)
    else:
        same(merged, found, rtol=1e-6, atol=1e-9)
        same(direct, found)
    empty.update(preds[:0], target[:0])
    nothing = empty.test(**FEW)
    for name in FIELDS:
        assert getattr(nothing, name).isnan().all()
        assert getattr(nothing, name).shape == whole.compute().shape


UNTESTABLE = {case.cls: case for case in CASES if not case.cls.has_test}


@pytest.mark.parametrize("case", UNTESTABLE.values(), ids=str)
def test_metrics_that_are_no_calibration_errors_have_no_test(case):
    preds, target = case.data(n=20)
    metric = updated(case.metric(), (preds, target))
    for test in (metric.test, partial(calibration_test, case.metric(), preds, target)):
        with pytest.raises(
            TypeError, match=f"must be a calibration error to have a noise floor, got {case.cls.__name__}"
        ):
            test()


def test_text_of_a_calibration_test():
    def made(*values, level=0.95):
        return CalibrationTest(*map(torch.tensor, values), level=level, method="m")

    one, signed = made(0.021, 0.004, 0.0004, 0.018, 0.024), made(-0.021, 0.004, 0.043, -0.03, 0.01, level=0.9)
    assert str(one) == "0.0210 (noise floor 0.0040, 95% 0.0180-0.0240, p < 0.001)"
    assert str(signed) == "-0.0210 (noise floor 0.0040, 90% -0.0300 to 0.0100, p = 0.043)"
    assert repr(made(0.021, 0.004, 0.431, torch.nan, torch.nan)) == "0.0210 (noise floor 0.0040, p = 0.43)"
    both = CalibrationTest(
        *(torch.stack([getattr(e, name) for e in (one, signed)]) for name in FIELDS), level=0.95, method="m"
    )
    assert str(both[0]) == str(one)
    assert str(both).splitlines()[0] == f"[0] {one}"
    with pytest.raises(IndexError, match="must have a batch axis"):
        one[0]


def test_a_test_without_a_metric_is_that_of_ece():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(80, 3, generator=generator)
    target = torch.randint(3, (80,), generator=generator)
    metric = tc.ECE(task="multiclass", from_logits=True, n_bins=7)
    expected = calibration_test(metric, logits, target, **FEW)
    options = {"from_logits": True, "n_bins": 7, **FEW}
    for found in (
        calibration_test(logits, target, **options),
        calibration_test(logits, target=target, task="multiclass", **options),
        calibration_test(preds=logits.numpy(), target=target.tolist(), **options),
        calibration_test(y_true=target, y_proba=logits, **options),
        calibration_test(metric, logits, target, task="multiclass", **FEW),
    ):
        assert str(found) == str(expected)
