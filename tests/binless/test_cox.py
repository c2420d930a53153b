"""Cox's logistic regression: every part against a slow fit, closed forms, certain logits, its distribution."""

import math

import pytest
import torch
from cases import cox_part
from helpers.binless import F64, calibrated
from oracles import binless as oracle
from scipy import stats

import torchcalib as tc


@pytest.mark.parametrize("component", tc.CoxCalibration._fields)
@pytest.mark.parametrize("seed", range(3))
def test_slow_loop_every_part_of_cox(component, seed):
    preds, target = calibrated(50, seed=seed, scale=0.6)
    weights = torch.arange(50) % 3
    expected = oracle.cox(preds.tolist(), target.tolist(), weights.tolist(), component)
    value = cox_part(preds, target, task="binary", component=component, weights=weights)
    assert value.item() == pytest.approx(expected, rel=1e-10)


def test_closed_form_cox_without_a_maximum():
    def fit(preds, target, **options):
        return tc.cox(torch.tensor(preds, dtype=F64), torch.tensor(target), task="binary", **options)

    def undetermined(found, but=()):
        return all(value.isnan() for name, value in found._asdict().items() if name not in ("in_the_large", *but))

    for order, limit in (([0, 0, 1, 1], math.inf), ([1, 1, 0, 0], -math.inf), ([0, 1, 1, 1], math.inf)):
        separated = fit([0.2, 0.4, 0.6, 0.7], order)
        assert separated.slope.item() == limit
        assert undetermined(separated, ("slope",))
        assert separated.in_the_large.isfinite()
    quasi = fit([0.2, 0.5, 0.5, 0.7], [0, 0, 1, 1])  # both outcomes at the border
    assert quasi.slope.item() == math.inf
    equal = fit([0.3, 0.3, 0.3, 0.3], [0, 1, 0, 1])
    assert undetermined(equal)
    assert equal.in_the_large.item() == pytest.approx(-math.log(0.3 / 0.7), abs=1e-12)
    for label, limit in ((1, math.inf), (0, -math.inf)):
        same = fit([0.3, 0.4, 0.6], [label] * 3)
        assert undetermined(same)
        assert same.in_the_large.item() == limit
    certain = [0.0, 0.2, 0.4, 0.7, 1.0], [0, 1, 0, 1, 1]
    assert all(value.isnan() for value in fit(*certain))
    clipped = fit(*certain, eps=0.01)
    assert all(value.isfinite() for value in clipped)
    torch.testing.assert_close(clipped, fit([0.01, 0.2, 0.4, 0.7, 0.99], certain[1]))


def test_logits_beyond_what_probabilities_hold_are_taken_as_they_are():
    logits, target = torch.tensor([-60.0, -50, 55, 70, 45, -40], dtype=F64), torch.tensor([0, 1, 1, 1, 0, 0])
    a, b, _ = oracle.logistic((logits / 50).tolist(), target.tolist(), [1.0] * 6)
    fit = tc.cox(logits, target, task="binary", from_logits=True)
    assert fit.slope.item() == pytest.approx(b / 50, rel=1e-10)
    assert fit.intercept.item() == pytest.approx(a, rel=1e-10)


@pytest.mark.parametrize(("factor", "shift"), [(300, 0), (1e4, 0), (1, 100), (300, -1e4)])
def test_law_cox_knows_neither_the_unit_nor_the_origin_of_logits(factor, shift):
    p, target = calibrated(500)
    logits = p.logit()
    near = tc.cox(logits, target, task="binary", from_logits=True)
    far = tc.cox(factor * logits + shift, target, task="binary", from_logits=True)
    assert (far.slope * factor).item() == pytest.approx(near.slope.item(), rel=1e-9)
    assert (far.intercept + far.slope * shift).item() == pytest.approx(near.intercept.item(), abs=1e-9)
    assert far.p_value < 1e-9
    if (factor, shift) == (300, -1e4):
        assert far.in_the_large.isnan()  # an offset that is not found


def test_law_p_values_of_cox_are_uniform_for_calibrated_predictions():
    """The test is asymptotic: over 1,000 samples, 1,000 times."""
    preds, target = calibrated(1000, lead=(1000,), seed=2)
    fit = tc.cox(preds, target, task="binary")
    assert stats.kstest(fit.p_value.numpy(), "uniform").pvalue > 0.01
    inside = ((fit.slope - 1).abs() < 1.96 * fit.slope_se).double().mean().item()
    assert inside == pytest.approx(0.95, abs=3 * math.sqrt(0.05 * 0.95 / 1000))


def test_parts_of_cox_are_those_of_the_stream_and_of_a_sketch_nearly():
    preds, target = calibrated(3000, scale=0.7)
    expected = tc.cox(preds, target, task="binary")
    for options, tolerance in (({}, 1e-10), ({"resolution": 512}, 1e-3)):
        metric = tc.Cox(task="binary", **options)
        metric.update(preds[:1000], target[:1000])
        metric.update(preds[1000:], target[1000:])
        for found, value in zip(metric.fit(), expected, strict=True):
            torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["top_label", "classwise", tc.TopK(2, only=True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
def test_slow_loop_cox_of_classes_whose_probability_rounds_to_1(dtype, reduction):
    """The log-odds by their definition, of the logits as they are."""
    rows = [[40, 0, 0], [0, 1, 0], [1, 0, 2], [0, 0, 0.5], [3, 2, 0], [0, 2, 3], [0, -1, 4], [4, 0, 0.25]]
    logits, target = torch.tensor(rows).to(dtype), torch.tensor([1, 1, 2, 0, 0, 2, 1, 2])
    rest = [[row[:k] + row[k + 1 :] for k in range(3)] for row in rows]
    odds = torch.tensor(rows, dtype=F64) - torch.tensor(rest, dtype=F64).logsumexp(-1)
    ranks = torch.tensor(rows).argsort(dim=-1, descending=True, stable=True)
    claimed = torch.arange(3).expand(8, 3) if reduction == "classwise" else ranks[:, :1]
    claimed = ranks[:, 1:2] if isinstance(reduction, tc.TopK) else claimed
    happened = (claimed == target[:, None]).double()
    columns = zip((odds.gather(-1, claimed) / 20).T.tolist(), happened.T.tolist(), strict=True)
    expected = torch.tensor([oracle.logistic(x, y, [1.0] * 8)[1] / 20 for x, y in columns], dtype=F64)
    given = {"task": "multiclass", "reduction": reduction, "from_logits": True}
    slope = tc.cox(logits, target, **given).slope
    torch.testing.assert_close(slope.double().reshape(-1), expected, rtol=4 * torch.finfo(slope.dtype).eps, atol=1e-9)
    for resolution in (None, 2048):
        metric = tc.Cox(num_classes=3, resolution=resolution, **given)
        metric.update(logits, target)
        torch.testing.assert_close(metric.compute().reshape(-1), expected, rtol=1e-9, atol=1e-9)
