"""Expected score divergence: against loops over classes, laws, and saturated predictions."""

import math
from functools import partial

import pytest
import torch
from helpers.fits import T, binary, data, multi, single, turns

import torchcalib as tc


@pytest.mark.parametrize("score", ["nll", "brier"])
def test_divergence_is_a_loop(score):
    """[EPSR] eq. 24-26: classes drawn from the calibrated predictions; the score may be a function too."""

    def of(row, k):
        return -math.log(row[k]) if score == "nll" else sum((q - (j == k)) ** 2 for j, q in enumerate(row))

    logits, target = data(60, 3)
    q = logits.softmax(-1).tolist()
    t = tc.calibrated(logits, target, train_on_test=True, **multi).exp().tolist()
    drawn = [(row, at, k) for row, at in zip(q, t, strict=True) for k in range(3)]
    semi = sum(at[k] * of(row, k) for row, at, k in drawn) / 60
    least = sum(at[k] * of(at, k) for _, at, k in drawn) / 60
    function = {"nll": tc.nll, "brier": tc.brier_score}[score]
    for given in (score, function):
        found = tc.score_divergence(logits, target, score=given, train_on_test=True, **multi)
        assert found.semi_empirical.item() == pytest.approx(semi, abs=1e-12)
        assert found.divergence.item() == pytest.approx(semi - least, abs=1e-12)
    logits, target = single(60)
    given = {"folds": turns(60), "weights": torch.rand(60), **binary}
    by_name, by_function = (tc.score_divergence(logits, target, score=s, **given) for s in (score, function))
    assert torch.stack(by_name).allclose(torch.stack(by_function), atol=1e-12)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
def test_bayes_risk_is_a_score(task):
    """By a loop over folds; and its divergence, what decisions cost if classes are drawn from the calibrated."""
    logits, target = data(80, 3) if task == "multiclass" else single(80)
    cost = tc.CostMatrix.imbalanced(3 if task == "multiclass" else 2).with_reject(0.4)
    given, folds = {"task": task, "from_logits": True}, turns(80)
    after = torch.empty_like(logits)
    for f in range(5):
        after[folds == f] = T.fit(logits[folds != f], target[folds != f], **given)(logits[folds == f])
    raw, cal = (tc.bayes_risk(preds, target, cost=cost, **given) for preds in (logits, after))
    options = {"score": partial(tc.bayes_risk, cost=cost), "calibrator": T, "folds": folds, **given}
    assert raw != cal
    assert tc.calibration_loss(logits, target, **options).item() == pytest.approx((raw - cal).item(), abs=1e-12)
    assert tc.rcl(logits, target, **options).item() == pytest.approx((100 * (1 - cal / raw)).item(), abs=1e-9)
    seen = after.exp() if task == "multiclass" else after.sigmoid()
    expected, least = (tc.bayes_risk(preds, seen, cost=cost, **given) for preds in (logits, after))
    found = tc.score_divergence(logits, target, **options)
    assert found.semi_empirical.item() == pytest.approx(expected.item(), abs=1e-8)
    assert found.divergence.item() == pytest.approx((expected - least).item(), abs=1e-8)
    assert found.divergence >= 0  # a proper score


@pytest.mark.parametrize("cost", [[[0, 1e16], [1, 0]], [[0, 1], [1e16, 0]]])
def test_closed_form_of_rare_costly_errors_at_saturated_logits(cost):
    """Separable, so that the predictions stay as they are: an error of probability e^-|z| costs 1e16."""
    logits = torch.tensor([40.0, -40, 40, -40, 38, -38], dtype=torch.float64)
    target = torch.tensor([1, 0, 1, 0, 1, 0])
    options = {"score": partial(tc.bayes_risk, cost=cost), "train_on_test": True}
    with pytest.warns(UserWarning, match="separated without error"):
        found = tc.score_divergence(logits, target, **options, **binary)
    assert found.semi_empirical.item() == pytest.approx(1e16 * (2 * math.exp(-40) + math.exp(-38)) / 6, rel=1e-9)
    with pytest.warns(UserWarning, match="separated without error"):
        classes = tc.score_divergence(torch.stack((0 * logits, logits), -1), target, **options, **multi)
    assert classes.semi_empirical.item() == pytest.approx(found.semi_empirical.item(), rel=1e-9)
