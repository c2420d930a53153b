"""Vector scaling, structured scaling and Dirichlet calibration: optimality, unusual data, and many classes."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.fits import OF_CLASSES, data, fresh, gumbel, multi, name
from scipy.optimize import minimize
from scipy.special import log_softmax, logsumexp

from torchcalib.calibration import DirichletCalibration, TemperatureScaling, cross_val_calibrate
from torchcalib.ops.newton import AT_ZERO, CONVERGED, SEPARABLE, structured

V, SV, SM, DIRICHLET = OF_CLASSES
STRUCTURED = [SV, SM]
each = pytest.mark.parametrize("calibrator", OF_CLASSES, ids=name)
each_structured = pytest.mark.parametrize("calibrator", STRUCTURED, ids=name)


def slow_features(fitted, logits, n):
    """Return smoothed log-probabilities row by row: ts-mix of probmetrics (Berta et al.), then a logarithm.

    Those of Dirichlet calibration have no temperature, and the smoothing is the float64 precision.
    """
    rows = []
    alpha, e = (float(fitted.alpha), 1 / (n + 1)) if hasattr(fitted, "alpha") else (1, np.finfo(float).eps)
    for row in logits.double().numpy():
        q = np.exp(log_softmax(row * alpha))
        rows.append(np.log(q * (1 - e) + e / len(q)))
    return np.array(rows)


def factors_of(calibrator, n, c):
    """Return the factors of the squares of W_kk - 1, of other entries of W, and of the biases.

    They are those of Berta et al. (AISTATS 2026) for penalty 0.3, and of Kull et al. (NeurIPS 2019), ODIR, for 0.3 and
    0.7, where the diagonal has a factor of 1e-6 / C.
    """
    if calibrator is V:
        return 0, 0, 0
    if calibrator is DIRICHLET:
        return 1e-6 / c, 0.3 / (c * (c - 1)), 0.7 / c
    return 0.3 * c / n, 0.3 * c * (c - 1) / n, 0.3 * c / n


def objective(x, y, w, factors, full):
    """Return the objective of theta = (W, b) with its gradient, in loops over classes.

    It is the mean negative log-likelihood plus a ridge penalty.
    """
    n, c = w.sum(), x.shape[1]
    of_diagonal, of_others, of_biases = factors

    def value(theta):
        matrix = theta[: c * c].reshape(c, c) if full else np.diag(theta[:c])
        bias = theta[-c:]
        z = x @ matrix.T + bias
        norm = logsumexp(z, 1)
        total = (w * (norm - z[np.arange(len(y)), y])).sum() / n
        residual = np.exp(z - norm[:, None])
        residual[np.arange(len(y)), y] -= 1
        residual *= w[:, None] / n
        of_matrix, of_bias = residual.T @ x, residual.sum(0)
        for k in range(c):
            total += of_diagonal * (matrix[k, k] - 1) ** 2 + of_biases * bias[k] ** 2
            of_matrix[k, k] += 2 * of_diagonal * (matrix[k, k] - 1)
            of_bias[k] += 2 * of_biases * bias[k]
            for other in set(range(c)) - {k}:
                total += of_others * matrix[k, other] ** 2
                of_matrix[k, other] += 2 * of_others * matrix[k, other]
        return total, np.concatenate(((of_matrix if full else of_matrix.diagonal()).reshape(-1), of_bias))

    return value


def parameters_of(fitted):
    weight = fitted.matrix if hasattr(fitted, "matrix") else fitted.scale
    return torch.cat((weight.reshape(-1), fitted.bias)).numpy()


@each
def test_fit_has_no_gradient_and_no_larger_objective_than_lbfgs(calibrator, monkeypatch):
    logits, target = data(300, 5, seed=1)
    w = torch.randint(0, 3, (300,), generator=torch.Generator().manual_seed(2))
    given = {"off_diagonal": 0.3, "intercept": 0.7} if calibrator is DIRICHLET else {"penalty": 0.3}
    kind = partial(type(calibrator), **({} if calibrator is V else given))
    fitted = kind().fit(logits, target, weights=w, **multi)
    check_optimum(calibrator, fitted, logits, target, w)
    monkeypatch.setattr(structured, "DENSE", 0)  # conjugate gradients, as for many classes
    check_optimum(calibrator, kind().fit(logits, target, weights=w, **multi), logits, target, w)


def check_optimum(calibrator, fitted, logits, target, w):
    """Compare a fit to 5 classes with the gradient, the minimum of scipy's L-BFGS-B, and the formula."""
    x = logits.numpy() if calibrator is V else slow_features(fitted, logits, int(w.sum()))
    full = calibrator in (SM, DIRICHLET)
    function = objective(x, target.numpy(), w.double().numpy(), factors_of(calibrator, int(w.sum()), 5), full)
    value, gradient = function(parameters_of(fitted))
    assert fitted.outcome == CONVERGED
    assert fitted.converged
    assert fitted.remarks() == []
    assert fitted.grad_norm < 1e-9
    assert np.linalg.norm(gradient) < 1e-9
    start = np.concatenate(((np.eye(5) if full else np.ones(5)).reshape(-1), np.zeros(5)))
    best = minimize(function, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-16}).fun
    # Each of 300 terms has an error of about 10 roundings of a score below 50.
    assert value <= best + 10 * 50 * torch.finfo(torch.float64).eps
    matrix = fitted.matrix.numpy() if full else np.diag(fitted.scale)
    expected = log_softmax(x @ matrix.T + fitted.bias.numpy(), -1)
    assert fitted(logits).allclose(torch.from_numpy(expected), atol=1e-12)


def test_unusual_data_have_the_documented_results_of_vector_scaling():
    logits, target = data(200, 3)
    # Class 0 has the only scores above 5 on its logit: its scale would rise without bound.
    separated = logits.clone()
    separated[:, 0] = torch.where(target == 0, 6 + logits[:, 0].abs(), logits[:, 0].clamp(max=4))
    for scores, labels in ((separated, target), (8 * torch.nn.functional.one_hot(target).double(), target)):
        with pytest.warns(UserWarning, match="no finite scales are best"):
            fitted = fresh(V).fit(scores, labels, **multi)
        alpha = (
            TemperatureScaling().fit_to(V.read(scores, labels, task="multiclass", options={"from_logits": True})).alpha
        )
        assert fitted.outcome == SEPARABLE
        assert not fitted.converged
        assert fitted.grad_norm.isnan()
        assert fitted.scale.tolist() == [alpha] * 3
        assert fitted.bias.tolist() == [0, 0, 0]
    present = target != 1
    with pytest.warns(UserWarning, match="no samples of class 1"):
        fitted = fresh(V).fit(logits[present], target[present], **multi)
    others = fresh(V).fit(logits[present][:, ::2], target[present] // 2, **multi)
    scale, bias = others.scale, others.bias
    scale, bias = (torch.stack((x[0], x.mean(), x[1])) for x in (scale, bias))
    assert fitted(logits).allclose((scale * logits + bias).log_softmax(-1), atol=1e-9)


@each_structured
def test_unusual_data_have_the_documented_results_of_structured_scaling(calibrator):
    logits, target = data(200, 3)
    certain = 20 * torch.nn.functional.one_hot(target).double()
    with pytest.warns(UserWarning, match="all labels have the largest score"):
        fitted = fresh(calibrator).fit(certain, target, **multi)
    assert (fitted.outcome, fitted.alpha, bool(fitted.converged)) == (SEPARABLE, 1e30, False)
    assert fitted.grad_norm < 1e-9
    assert fitted.smoothed(certain[:1], True).exp().max().item() == pytest.approx(1 - 2 / 3 / 201)
    with pytest.warns(UserWarning, match="fitted temperature is infinite"):
        fitted = fresh(calibrator).fit(-logits, target, **multi)
    assert (fitted.outcome, fitted.alpha, bool(fitted.converged)) == (AT_ZERO, 0, True)
    assert fitted.predict_proba(logits).std(0).max() < 1e-12
    present = logits[target != 1]
    fitted = fresh(calibrator).fit(present, target[target != 1], **multi)
    assert fitted.converged
    # The derivative in the bias of class 1 is the mean probability plus 2 C / N times the bias.
    mean = fitted.predict_proba(present)[:, 1].mean().item()
    assert mean == pytest.approx(-2 * 3 / len(present) * fitted.bias[1].item(), abs=1e-9)
    q = logits.softmax(-1)
    q[:2] = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0]], dtype=torch.float64)
    labels = target.clone()
    labels[:2] = torch.tensor([0, 1])
    fitted = fresh(calibrator).fit(q, labels, task="multiclass")
    assert fitted.converged
    assert fitted.remarks() == []
    assert (fitted(q) > 0).all()


def test_unusual_data_have_a_finite_optimum_of_dirichlet_calibration():
    logits, target = data(200, 3)
    separable = 20 * torch.nn.functional.one_hot(target).double(), target
    published = DirichletCalibration(off_diagonal=1, intercept=1)
    without_class = logits, target.clamp(min=1)
    for scores, labels in (separable, without_class, (1e6 * logits, target), (1e-6 * logits, target)):
        fitted = fresh(published).fit(scores, labels, **multi)
        assert fitted.converged
        assert fitted.remarks() == []
        assert fitted.matrix.isfinite().all()
        # The derivatives in the biases are the mean residuals plus 2 intercept / C times the bias.
        residual = fitted.predict_proba(scores) - torch.nn.functional.one_hot(labels, 3)
        assert (residual.mean(0) + 2 / 3 * fitted.bias).abs().max() < 1e-9
    q = logits.softmax(-1)
    q[0] = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    target[0] = 0  # of probability 0
    fitted = fresh(DIRICHLET).fit(q, target, task="multiclass")
    assert fitted.converged
    assert (fitted(q) > 0).all()


def test_many_classes_reach_a_gradient_of_zero():
    """With 300 classes, Newton steps are computed by conjugate gradients."""
    g = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(6000, 300, generator=g)
    target = (0.6 * logits + gumbel(6000, 300, generator=g)).argmax(-1)
    for calibrator in (V, SV):
        fitted = fresh(calibrator).fit(logits, target, **multi)
        assert fitted.converged
        assert fitted.grad_norm < 1e-9


def test_words_name_the_range_of_the_parameters():
    for calibrator in OF_CLASSES:
        logits, target = data(200, 3)
        fitted = fresh(calibrator).fit(logits, target, **multi)
        assert "class 2" in fitted.in_words()
        words = fitted.in_words(["cat", "dog", "cow"])
        assert f"{fitted.bias.max():.3g} (cow)" in words
        has_temperature = calibrator in STRUCTURED
        start = f"temperature {fitted.temperature:.3g} (lowers confidence)" if has_temperature else "scales from"
        assert words.startswith(start)
        assert not words.endswith(".")
        assert cross_val_calibrate(logits, target, calibrator=calibrator, **multi).shape == (200, 3)
