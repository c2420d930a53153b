"""Expected score divergence: against loops over classes, laws, and saturated predictions."""

import math
from functools import partial

import pytest
import torch
from helpers.fits import T, binary, data, multi, single, turns

import torchcalib as tc


def test_divergence_of_the_nll_is_a_loop():
    """[EPSR] eq. 24-26: classes drawn from the calibrated predictions."""
    logits, target = data(60, 3)
    q = logits.softmax(-1).tolist()
    t = tc.calibrated(logits, target, train_on_test=True, **multi).exp().tolist()
    semi = sum(-tk * math.log(qk) for row, at in zip(q, t, strict=True) for qk, tk in zip(row, at, strict=True)) / 60
    kl = sum(tk * math.log(tk / qk) for row, at in zip(q, t, strict=True) for qk, tk in zip(row, at, strict=True)) / 60
    found = tc.score_divergence(logits, target, train_on_test=True, **multi)
    assert found.semi_empirical.item() == pytest.approx(semi, abs=1e-12)
    assert found.divergence.item() == pytest.approx(kl, abs=1e-12)


def test_divergence_of_the_brier_score_is_a_loop():
    logits, target = data(60, 3)
    q = logits.softmax(-1).tolist()
    t = tc.calibrated(logits, target, train_on_test=True, **multi).exp().tolist()
    apart = sum((qk - tk) ** 2 for row, at in zip(q, t, strict=True) for qk, tk in zip(row, at, strict=True)) / 60
    semi = 0.0
    for row, at in zip(q, t, strict=True):
        semi += sum(tk * sum((qj - (j == k)) ** 2 for j, qj in enumerate(row)) for k, tk in enumerate(at)) / 60
    found = tc.score_divergence(logits, target, score="brier", train_on_test=True, **multi)
    assert found.divergence.item() == pytest.approx(apart, abs=1e-12)
    assert found.semi_empirical.item() == pytest.approx(semi, abs=1e-12)


@pytest.mark.parametrize("task", ["binary", "multiclass"])
@pytest.mark.parametrize("score", ["nll", "brier"])
def test_divergence_of_a_function_is_that_of_the_score_by_name(task, score):
    logits, target = data(60, 3) if task == "multiclass" else single(60)
    given = {"task": task, "from_logits": True, "folds": turns(60), "weights": torch.rand(60)}
    by_name = tc.score_divergence(logits, target, score=score, **given)
    function = {"nll": tc.nll, "brier": tc.brier_score}[score]
    by_function = tc.score_divergence(logits, target, score=function, **given)
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


def test_law_after_dp_on_the_test_set_semi_empirical_is_empirical():
    """By the first-order conditions of the fit: sum_k t_k log q_k has the mean of log q_h."""
    logits, target = data(200, 3)
    found = tc.score_divergence(logits, target, train_on_test=True, **multi)
    assert found.semi_empirical.item() == pytest.approx(tc.nll(logits, target, **multi).item(), abs=1e-9)
    loss = tc.calibration_loss(logits, target, train_on_test=True, **multi)
    assert found.divergence.item() == pytest.approx(loss.item(), abs=1e-9)


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
