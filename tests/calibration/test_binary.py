"""Beta calibration, quadratic and Platt scaling: optimality, closed forms, and data without an optimum."""

import math

import pytest
import torch
from helpers.fits import BETA, PLATT, QUADRATIC, binary, fresh, name
from sklearn.calibration import _SigmoidCalibration

from torchcalib.calibration import QuadraticScaling
from torchcalib.ops.newton import AT_ZERO, SEPARABLE

both = pytest.mark.parametrize("calibrator", [BETA, QUADRATIC], ids=name)


def quadratic_data(n=500):
    g = torch.Generator().manual_seed(3)
    s = 3 * torch.randn(n, generator=g, dtype=torch.float64) + 1
    return s, (torch.rand(n, generator=g, dtype=torch.float64) < (0.3 + 0.7 * s - 0.05 * s * s).sigmoid()).long()


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_gradient_of_the_log_loss_is_zero_for_quadratic_scaling(ridge):
    """The mean log loss of a + b s + c s^2 plus ridge (a^2 + c^2) is convex; see `test_newton` for the bound."""
    s, y = quadratic_data()
    fitted = QuadraticScaling(ridge).fit(s, y, **binary)
    theta = [x.clone().requires_grad_() for x in (fitted.a, fitted.b, fitted.c)]
    z = theta[0] + theta[1] * s + theta[2] * s.square()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(z, y.double())
    (loss + ridge * (theta[0].square() + theta[2].square())).backward()
    sizes = [1, s.square().mean().sqrt(), s.square().square().mean().sqrt()]
    assert all(abs(x.grad) <= 1e-9 * size for x, size in zip(theta, sizes, strict=True))
    assert fitted.remarks() == []


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_logits_of_any_scale_are_fitted(scale):
    """Quadratic scaling is equivariant. Beta calibration is not, but its fit converges and no curve is worse."""
    s, y = quadratic_data()
    fitted, exact = (fresh(QUADRATIC).fit(scores, y, **binary) for scores in (scale * s, s))
    assert fitted(scale * s).allclose(exact(s), atol=1e-8)
    beta = fresh(BETA).fit(scale * s, y, **binary)
    assert beta.converged
    frequency = y.double().mean().expand(len(y))
    cross_entropy = torch.nn.functional.binary_cross_entropy
    assert cross_entropy(beta(scale * s).sigmoid(), y.double()) < cross_entropy(frequency, y.double())


@both
def test_separable_data_leave_predictions_unchanged_with_a_warning(calibrator):
    logits = torch.tensor([1.0, 2, 3, 4], dtype=torch.float64)
    for target in ([0, 0, 1, 1], [1, 1, 0, 0]):
        with pytest.warns(UserWarning, match="separated without error|curve is constant"):
            fitted = fresh(calibrator).fit(logits, torch.tensor(target), **binary)
        if calibrator is BETA and target[0] == 1:  # a decreasing curve would separate these classes
            assert fitted.outcome == AT_ZERO
            assert fitted(logits).tolist() == [0, 0, 0, 0]
        else:
            assert fitted.outcome == SEPARABLE
            assert not fitted.converged
            assert fitted(logits).tolist() == pytest.approx(logits.tolist(), abs=1e-15)


@both
def test_a_single_class_leaves_predictions_unchanged(calibrator):
    preds = torch.tensor([0.2, 0.7, 0.9], dtype=torch.float64)
    for k in (0, 1):
        with pytest.warns(UserWarning, match=f"no samples of class {1 - k}"):
            fitted = fresh(calibrator).fit(preds, torch.full((3,), k), task="binary")
        assert fitted.converged
        assert fitted(preds).tolist() == pytest.approx(preds.tolist(), abs=1e-15)


@both
def test_certain_predictions_are_calibrated_and_infinite_logits_are_left_out(calibrator):
    s, y = quadratic_data()
    p, wrong = s.sigmoid(), 1 - y[:2]
    p[:2] = wrong.double()
    found = fresh(calibrator).fit(p, y, task="binary")(p)
    assert ((found > 0) & (found < 1)).all()
    clipped = fresh(calibrator).fit(p.clamp(2.0**-52, 1 - 2.0**-52), y, task="binary")(p)
    assert found.equal(clipped)
    infinite = torch.where(torch.arange(len(s)) < 2, (2 * wrong[0] - 1) * math.inf, s)
    y[:2] = y[0]
    with pytest.warns(UserWarning, match="infinite logits with the wrong sign in samples of total weight 2"):
        fitted = fresh(calibrator).fit(infinite, y, **binary)
    rest = fresh(calibrator).fit(s[2:], y[2:], **binary)
    assert fitted(s).allclose(rest(s), atol=1e-8)
    assert fitted(infinite)[:2].equal(infinite[:2])


@both
def test_words_give_the_calibrated_probabilities_of_three_predictions(calibrator):
    s, y = quadratic_data()
    fitted = fresh(calibrator).fit(s, y, **binary)
    low, middle, high = (100 * fitted.predict_proba(torch.tensor([0.1, 0.5, 0.9]).double().logit())).tolist()
    expected = f": 10% becomes {low:.3g}%, 50% becomes {middle:.3g}% and 90% becomes {high:.3g}%"
    assert fitted.in_words().startswith(f"a {fitted.a:.4g}, b {fitted.b:.4g}, c {fitted.c:.4g}")
    assert fitted.in_words().endswith(expected)


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
