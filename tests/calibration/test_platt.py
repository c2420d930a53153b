"""Platt scaling, compared with its equations and with scikit-learn."""

import math

import pytest
import torch
from helpers.fits import PLATT, fresh
from sklearn.calibration import _SigmoidCalibration

SCORES = torch.randn(80, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
NOISE = torch.rand(80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WEIGHTS = torch.rand(80, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = {
    "noisy": (SCORES.sigmoid() > NOISE).long(),
    "inverse": (SCORES.sigmoid() < NOISE).long(),
    "separable": (SCORES > 0).long(),
    "one class": torch.zeros(80, dtype=torch.int64),
}


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weights"])
@pytest.mark.parametrize("labels", LABELS.values(), ids=list(LABELS))
@pytest.mark.parametrize("scale", [1e-3, 1, 1e5])
def test_fit_satisfies_the_equations_of_platt(labels, weights, scale):
    """Lin, Lin, Weng (2007), eq. 3: the derivatives of the NLL of smoothed targets vanish."""
    s, w = (scale * SCORES).tolist(), (torch.ones(80) if weights is None else weights).tolist()
    fitted = fresh(PLATT).fit(scale * SCORES, labels, "binary", from_logits=True, weights=weights)
    p, y = fitted.predict_proba(scale * SCORES).tolist(), labels.tolist()
    positives = math.fsum(w[i] for i in range(80) if y[i])
    negatives = math.fsum(w[i] for i in range(80) if not y[i])
    targets = [(positives + 1) / (positives + 2) if label else 1 / (negatives + 2) for label in y]
    of_b = math.fsum(w[i] * (targets[i] - p[i]) for i in range(80))
    of_a = math.fsum(w[i] * (targets[i] - p[i]) * s[i] / scale for i in range(80))
    assert (of_a, of_b) == pytest.approx((0, 0), abs=1e-7)
    assert bool(fitted.converged)
    assert all(0 < each < 1 for each in p)
    reference = _SigmoidCalibration().fit(
        (scale * SCORES).numpy(), labels.numpy(), None if weights is None else weights.numpy()
    )
    assert p == pytest.approx(reference.predict((scale * SCORES).numpy()), abs=2e-5)


@pytest.mark.parametrize("from_logits", [False, True])
def test_classes_are_calibrated_by_their_own_predictions_and_normalised(from_logits):
    preds = torch.stack((SCORES, SCORES.flip(0), NOISE), -1)
    preds = preds if from_logits else preds.softmax(-1)
    target = torch.arange(80) % 3
    found = fresh(PLATT).fit(preds, target, "multiclass", from_logits=from_logits).predict_proba(preds)
    each = [
        fresh(PLATT)
        .fit(preds[:, k], (target == k).long(), "binary", from_logits=from_logits)
        .predict_proba(preds[:, k])
        for k in range(3)
    ]
    expected = torch.stack(each, -1)
    torch.testing.assert_close(found, expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-12)


def test_infinite_logits_are_unchanged_and_left_out():
    scores, labels = (
        torch.cat((SCORES, torch.tensor([torch.inf, -torch.inf]))),
        torch.cat((LABELS["noisy"], torch.tensor([0, 1]))),
    )
    fitted = fresh(PLATT).fit(scores, labels, "binary", from_logits=True)
    torch.testing.assert_close(
        fitted.coefficients, fresh(PLATT).fit(SCORES, LABELS["noisy"], "binary", from_logits=True).coefficients
    )
    assert fitted(scores[-2:]).tolist() == [math.inf, -math.inf]
