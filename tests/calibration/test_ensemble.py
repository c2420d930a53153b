"""Ensemble temperature scaling: optimality conditions, equal tasks, and labels of probability 0."""

import math

import pytest
import torch
from helpers.fits import ENSEMBLE, T, binary, data, fresh, multi

from torchcalib.calibration import EnsembleTemperatureScaling, TemperatureScaling


def components(fitted, logits):
    """Return softmax(s / T), softmax(s) and 1 / C, `(3, N, C)`."""
    n_classes = logits.shape[-1]
    return torch.stack(
        ((fitted.alpha * logits).softmax(-1), logits.softmax(-1), torch.full_like(logits, 1 / n_classes))
    )


@pytest.mark.parametrize("seed", range(2))
def test_weights_meet_the_conditions_of_the_optimum_on_the_simplex(seed):
    """Mean of p_k / m over the samples, for label probabilities p_k and their mixture m, is 1 if w_k > 0, else <= 1.

    These are the conditions of Karush, Kuhn and Tucker for the convex problem of the weights (Zhang et al. 2020, eq.
    9, with the log loss).
    """
    logits, target = data(300, 4, seed=seed)
    target = torch.where(torch.arange(300) % 10 == 0, seed, target)  # label noise, which needs the uniform component
    fitted = fresh(ENSEMBLE).fit(logits * (1 + seed), target, **multi)
    assert fitted.alpha.equal(fresh(T).fit(logits * (1 + seed), target, **multi).alpha)
    assert fitted.converged
    assert fitted.grad_norm <= 1e-9
    assert fitted.weights.sum().item() == pytest.approx(1, abs=1e-14)
    q = components(fitted, logits * (1 + seed))
    mixture = (fitted.weights[:, None, None] * q).sum(0)
    assert fitted(logits * (1 + seed)).exp().allclose(mixture, atol=1e-13)
    rows = torch.arange(300)
    ratios = (q[:, rows, target] / mixture[rows, target]).mean(-1)
    for weight, ratio in zip(fitted.weights.tolist(), ratios.tolist(), strict=True):
        assert ratio <= 1 + 1e-9
        assert weight == 0 or ratio >= 1 - 1e-9


@pytest.mark.parametrize("from_logits", [False, True])
def test_labels_of_probability_0_get_probability_from_the_uniform_component(from_logits):
    logits, target = data(200, 3)
    logits[0, target[0]] = -math.inf
    preds = logits if from_logits else logits.softmax(-1)
    with pytest.warns(UserWarning, match="samples of total weight 1: the fit of the temperature leaves them out"):
        fitted = fresh(ENSEMBLE).fit(preds, target, task="multiclass", from_logits=from_logits)
    assert fitted.converged
    assert fitted.weights[2] > 0
    found = fitted.predict_proba(preds)
    assert found[0, target[0]].item() == pytest.approx(fitted.weights[2].item() / 3, rel=1e-9)
    assert found.sum(-1).allclose(torch.ones(200, dtype=torch.float64))


def test_separable_and_uninformative_predictions_give_weight_to_one_of_equal_components():
    logits, target = torch.tensor([-2.0, -1, 1, 2], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    with pytest.warns(UserWarning, match="separated without error"):
        fitted = fresh(ENSEMBLE).fit(logits, target, **binary)
    assert not fitted.converged
    assert fitted.weights.tolist() == [1, 0, 0]
    assert fitted(logits).tolist() == pytest.approx(logits.tolist(), abs=1e-14)
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        fitted = fresh(ENSEMBLE).fit(-logits, target, **binary)
    assert fitted.converged
    assert fitted.weights.tolist() == [1, 0, 0]
    assert fitted(logits).tolist() == pytest.approx([0] * 4, abs=1e-14)


def test_words_give_the_temperature_and_the_positive_weights():
    preds, target = torch.tensor([0.9, 0.99, 0.01, 0.8, 0.05]), torch.tensor([1, 0, 0, 1, 0])
    words = EnsembleTemperatureScaling().fit(preds, target).in_words()
    assert words == "57% unchanged predictions, 43% uniform distribution"
    logits, labels = data(300, 4)
    temperature = TemperatureScaling().fit(logits, labels, **multi).temperature
    words = EnsembleTemperatureScaling().fit(logits, labels, **multi).in_words()
    assert f"temperature {temperature:.3g} (lowers confidence)" in words
