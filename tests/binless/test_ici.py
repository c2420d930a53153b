"""Integrated calibration index: closed forms, ties, pooled points; slow loops are in test_reading."""

import numpy as np
import pytest
import torch
from helpers.binless import F64, calibrated
from oracles import binless as oracle

import torchcalib as tc


@pytest.mark.parametrize("degree", [0, 1, 2])
def test_closed_form_ici_of_a_polynomial(degree):
    """Soft targets on a polynomial of p: a local polynomial of that degree meets it everywhere."""
    preds = torch.rand(80, generator=torch.Generator().manual_seed(0), dtype=F64)
    curve = 0.3 + (0.2 * preds if degree else 0) + (0.4 * preds.square() if degree == 2 else 0)
    distance = (preds - curve).abs()
    target = torch.as_tensor(curve, dtype=F64).expand(80)
    for component, value in (("ici", distance.mean()), ("emax", distance.max()), ("e50", distance.quantile(0.5))):
        found = tc.ici(preds, target, task="binary", degree=degree, component=component, span=0.4)
        assert found.item() == pytest.approx(value.item(), abs=1e-9)


def test_slow_loop_ici_with_ties_that_fill_neighbourhoods():
    preds = torch.tensor([0.1] * 8 + [0.4, 0.5, 0.6, 0.9], dtype=F64)
    target = (torch.arange(12) % 3 == 0).long()
    found = tc.ici(preds, target, task="binary", span=0.6, component="emax")
    # Eight at 0.1 are more than 60 %: they have their mean, 3/8. Elsewhere the fit is determined.
    x, y = preds.numpy(), target.numpy()
    fitted = oracle.loess(x, y, span=0.6)
    assert (fitted[:8] == 3 / 8).all()
    assert found.item() == pytest.approx(np.abs(fitted - x).max(), abs=1e-9)


def test_law_pooled_points_change_little():
    preds, target = calibrated(6000, scale=0.7)
    for component, tolerance in (("ici", 2e-5), ("e50", 2e-4), ("e90", 2e-4)):
        exact = tc.ici(preds, target, task="binary", n_points=6000, component=component)
        pooled = tc.ici(preds, target, task="binary", component=component)
        assert pooled.item() == pytest.approx(exact.item(), abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [60, 300])
def test_a_sketch_of_half_precision_probabilities_and_copies_are_pooled_as_samples_are(n, dtype):
    """What exceeds `n_points` is the number of samples, wherever they are elements: equal up to the order of sums."""
    preds, target = calibrated(n, scale=0.7)
    preds = (preds * 32).round().div(32).to(dtype)  # some 30 distinct scores, fewer than points
    for component in ("ici", "e50", "e90", "emax"):
        options = {"task": "binary", "n_points": 64, "component": component}
        expected = tc.ici(preds.double(), target, **options)
        metric = tc.ICI(resolution=2048, **options)
        metric.update(preds[:50], target[:50])
        metric.update(preds[50:], target[50:])
        torch.testing.assert_close(metric.compute(), expected, rtol=1e-10, atol=1e-12)
    pairs, counts = torch.stack((preds.double(), target.double())).unique(dim=1, return_counts=True)
    copies = tc.ici(pairs[0], pairs[1].long(), weights=counts, **options)
    torch.testing.assert_close(copies, expected, rtol=1e-10, atol=1e-12)
