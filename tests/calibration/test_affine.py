"""Affine calibrators: comparison with scipy's L-BFGS-B, closed forms, and data without an optimum.

Ensembles of temperatures: optimality conditions, and labels of probability 0.
"""

import math
from itertools import product

import numpy as np
import pytest
import torch
from helpers.fits import AFFINE, ENSEMBLE, SCALED, B, D, T, binary, data, fresh, gumbel, multi, name, single
from scipy.optimize import minimize
from scipy.special import logsumexp

from torchcalib.calibration import EnsembleTemperatureScaling, TemperatureScaling, VectorScaling
from torchcalib.ops.newton import AT_ZERO, CONVERGED, SEPARABLE
from torchcalib.ops.newton.scores import PIECE


def lbfgs(scores, target, calibrator, weights=None):
    """Return the smallest mean log loss found by scipy's L-BFGS-B, for alpha >= 0 and scores of unit scale.

    Classes with a score of -inf have probability 0 for every alpha, and samples with such a label are left out.
    """
    s, y = scores.double().numpy(), target.numpy()
    w = np.ones(len(y)) if weights is None else weights.double().numpy()
    is_possible = np.isfinite(np.take_along_axis(s, y[:, None], 1).squeeze(1))
    s, y, w = s[is_possible], y[is_possible], w[is_possible] / w[is_possible].sum()
    s = s - s.max(1, keepdims=True)
    excluded = np.isneginf(s)
    s = np.where(excluded, 0, s)
    scale = np.sqrt((s**2).mean())
    s, bias, rows = s / scale, calibrator is not T, np.arange(len(s))

    def nll(theta):
        z = np.where(excluded, -np.inf, theta[0] * s + (theta[1:] if bias else 0))
        norm = logsumexp(z, 1)
        residual = np.exp(z - norm[:, None])
        residual[rows, y] -= 1
        gradient = [w @ (residual * s).sum(1)]
        return w @ (norm - z[rows, y]), np.array([*gradient, *w @ residual] if bias else gradient)

    start = np.array([scale if calibrator is B else 1.0] + [0.0] * (s.shape[1] if bias else 0))
    bounds = [(scale, scale) if calibrator is B else (0, None)] + [(None, None)] * (len(start) - 1)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-16, "gtol": 1e-13}
    return minimize(nll, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).fun


def check_optimal(calibrator, scores, target):
    """Fit, and check that the gradient is 0 and that the loss exceeds that of L-BFGS-B only by rounding.

    The loss is the negative log-likelihood. A log-sum-exp of C terms has an error of C + 2 roundings of its largest
    logit, the logit of the label one of 2, and a pairwise mean of N losses one of log2 N of the largest. L-BFGS-B
    scales the scores once more. The error of both sides is counted.
    """
    fitted = fresh(calibrator).fit(scores, target, **multi)
    alpha, beta = (x.clone().requires_grad_() for x in (fitted.alpha, fitted.beta))
    parameters = [alpha] * (calibrator is not B) + [beta] * (calibrator is not T)
    value = torch.nn.functional.cross_entropy(alpha * scores.double() + beta, target)
    value.backward()
    assert fitted.outcome == CONVERGED
    assert fitted.remarks() == []
    assert fitted.converged
    assert fitted.grad_norm < 1e-9
    assert torch.cat([x.grad.reshape(-1) for x in parameters]).norm() < 1e-9
    n, n_classes = scores.shape
    logits = fitted.alpha * (scores.double() - scores.double().amax(-1, keepdim=True)) + fitted.beta
    largest = max(1.0, logits[logits.isfinite()].abs().max().item())
    rounding = 2 * (n_classes + 6 + math.log2(n)) * torch.finfo(torch.float64).eps * largest
    assert value.item() <= lbfgs(scores, target, calibrator) + rounding
    return fitted


def ill_conditioned(seed):
    """Return scores whose columns differ in scale by up to six orders of magnitude, and labels with rare classes."""
    g = torch.Generator().manual_seed(seed)
    n_classes = int(torch.randint(2, 12, (), generator=g))
    n = int(torch.randint(200, 2000, (), generator=g))
    spread = 10 ** torch.linspace(-3, 3, n_classes, dtype=torch.float64)[torch.randperm(n_classes, generator=g)]
    scores = torch.randn(n, n_classes, generator=g, dtype=torch.float64) * spread * 10 ** torch.randn((), generator=g)
    noise = gumbel(n, n_classes, generator=g)
    return scores, (scores * 10 ** (-2 * torch.rand((), generator=g)) + 10 * noise).argmax(-1)


def test_bias_of_constant_predictions_is_the_difference_of_log_odds():
    """For log-odds of log 3 and 1 of 4 ones, the bias is log(1/3) - log 3, at any distance from the optimum."""
    for offset in (0.0, 30.0, -600.0):
        preds = torch.full((8,), math.log(3) + offset, dtype=torch.float64)
        fitted = fresh(B).fit(preds, torch.tensor([1, 0, 0, 0] * 2), **binary)
        bias = (fitted.beta[1] - fitted.beta[0]).item()
        assert bias == pytest.approx(-2 * math.log(3) - offset, abs=1e-8)
        assert fitted.in_words() == f"bias {bias:+.2g} in log-odds".replace("-", "−").replace("log−odds", "log-odds")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_ill_conditioned_fit_is_no_worse_than_lbfgs(calibrator, seed):
    check_optimal(calibrator, *ill_conditioned(seed))


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_scores_larger_than_the_cache_get_the_fit_of_lbfgs(calibrator):
    """Large inputs are normalised piece by piece, except when a row has weight 0."""
    g = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(6000, 50, generator=g) + 1e3 * torch.randn(6000, 1, generator=g)
    assert scores.numel() > PIECE
    noise = gumbel(6000, 50, generator=g, dtype=torch.float32)
    target = (0.6 * scores + 0.3 * torch.randn(50, generator=g) + noise).argmax(-1)
    fitted = check_optimal(calibrator, scores, target)
    more = torch.cat((scores, torch.full((1, 50), torch.nan)))
    weights = torch.ones(6001).index_fill(0, torch.tensor([6000]), 0)
    whole = fresh(calibrator).fit(more, torch.cat((target, target[:1])), weights=weights, **multi)
    torch.testing.assert_close(fitted.alpha, whole.alpha, rtol=1e-9, atol=0)
    torch.testing.assert_close(fitted.beta, whole.beta, rtol=0, atol=1e-8)


def test_constant_binary_scores_are_fitted_to_the_frequency_of_ones():
    """Every prediction is 0.5: the bias alone fits the frequency of ones, and alpha has no effect on log-odds of 0."""
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        fitted = fresh(D).fit(torch.full((8,), 0.5, dtype=torch.float64), torch.tensor([1, 0, 0, 0] * 2), task="binary")
    assert fitted(torch.tensor([0.5, 0.9])).tolist() == pytest.approx([0.25, 0.25])
    assert fitted.outcome == AT_ZERO
    assert fitted.converged
    assert fitted.in_words() == "infinite temperature (constant probabilities), bias −1.1 in log-odds"


@pytest.mark.parametrize("logits", [[-2.0, -1.0, 1.0, 2.0], [-1.0, 0.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
@pytest.mark.parametrize("calibrator", SCALED, ids=name)
def test_separable_data_give_a_warning_and_unchanged_predictions(calibrator, logits):
    """Separation by the sign; with a tie, where the likelihood rises with alpha; by a bias, if it is fitted."""
    logits, target = torch.tensor(logits, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    if calibrator is T and logits[0] > 0:
        assert fresh(T).fit(logits, target, **binary).converged
        return
    with pytest.warns(UserWarning, match="separated without error"):
        fitted = fresh(calibrator).fit(logits, target, **binary)
    assert not fitted.converged
    assert fitted.outcome == SEPARABLE
    assert fitted.alpha == 1
    assert fitted.grad_norm.isnan()
    assert fitted(logits).tolist() == pytest.approx(logits.tolist())


def test_a_class_without_samples_gets_the_mean_bias_of_the_others():
    logits, target = data(200, 3)
    present = target != 1
    with pytest.warns(UserWarning, match="no samples of class 1"):
        fitted = fresh(D).fit(logits[present], target[present], **multi)
    others = fresh(D).fit(logits[present][:, ::2], target[present] // 2, **multi)
    bias = torch.stack((others.beta[0], torch.zeros((), dtype=torch.float64), others.beta[1]))
    assert fitted(logits).allclose((others.alpha * logits + bias).log_softmax(-1), atol=1e-9)
    certain = torch.tensor([[-math.inf, 0.0, -math.inf]], dtype=torch.float64)
    assert fitted(certain).tolist() == certain.tolist()
    with pytest.warns(UserWarning, match="no samples of class 1, 2"):
        assert fresh(D).fit(logits[target == 0], target[target == 0], **multi)(logits).allclose(logits.log_softmax(-1))
    assert fresh(T).fit(logits[present], target[present], **multi).converged


@pytest.mark.parametrize("calibrator", [*SCALED, B, VectorScaling()], ids=name)
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_labels_of_probability_1_do_not_affect_the_fit(calibrator, from_logits):
    """A class that only they have is treated as one without samples. Its remark holds for both."""
    logits, target = data(200, 3)
    logits, target = logits[target > 0], target[target > 0]
    certain = torch.tensor([[0.0, -math.inf, -math.inf]], dtype=torch.float64)
    given = torch.cat((certain, logits, certain))
    given = given if from_logits else given.softmax(-1)
    padded = torch.nn.functional.pad(target, (1, 1))
    fitted = fresh(calibrator).fit(given, padded, task="multiclass", from_logits=from_logits)
    rest = fresh(calibrator).fit(given[1:-1], target, task="multiclass", from_logits=from_logits)
    assert fitted.converged
    assert fitted.remarks() == rest.remarks()
    assert calibrator is T or "class 0 with a predicted probability between 0 and 1" in fitted.remarks()[0]
    assert fitted.predict_proba(given).allclose(rest.predict_proba(given), rtol=0, atol=1e-8)
    assert fitted.predict_proba(given)[0].tolist() == [1, 0, 0]
    only = fresh(calibrator).fit(given[:1], padded[:1], task="multiclass", from_logits=from_logits)
    assert only.predict_proba(given[:1]).tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("calibrator", [D, B], ids=name)
@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float64).min])
def test_labels_that_are_certain_by_finite_masks_keep_their_predictions(calibrator, mask):
    """The best bias of their class is -inf, but a large negative one gives the same loss up to rounding."""
    logits, target = data(200, 3)
    logits, target = logits[target > 0], target[target > 0]
    logits[:2, 1:], target[:2] = mask, 0
    fitted = fresh(calibrator).fit(logits, target, **multi)
    assert fitted.converged
    q = fitted.predict_proba(logits)
    assert (q[:2, 0] == 1).all()
    assert (q[2:, 0] < 1e-6).all()
    rest = fresh(calibrator).fit(logits[2:, 1:], target[2:] - 1, **multi)
    assert q[2:, 1:].allclose(rest.predict_proba(logits[2:, 1:]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("calibrator", [*AFFINE, VectorScaling()], ids=name)
def test_samples_with_infinite_nll_are_excluded_with_a_warning(calibrator):
    logits, target = data(200, 3)
    broken = logits.clone()
    broken[0] = torch.tensor([-math.inf, 0.0, 0.0])
    broken[1, 2] = -math.inf  # not the class of the label: an ordinary sample
    labels = target.clone()
    labels[:2] = 0
    with pytest.warns(UserWarning, match="probability 0 to the label of samples of total weight 1"):
        fitted = fresh(calibrator).fit(broken, labels, **multi)
    assert fitted.converged
    assert fitted.lost == 1
    low = -1e5 if calibrator in AFFINE else -1e12  # vector scaling fits other low scores
    rest = fresh(calibrator).fit(broken[1:].masked_fill(broken[1:] == -math.inf, low), labels[1:], **multi)
    if calibrator in AFFINE:
        assert fitted.alpha.item() == pytest.approx(rest.alpha.item(), rel=1e-9)
        assert fitted.beta.tolist() == pytest.approx(rest.beta.tolist(), abs=1e-9)
    else:
        assert rest.scale.allclose(fitted.scale, rtol=1e-8)
    q = fitted(broken).softmax(-1)
    assert (q[0, 0], q[1, 2]) == (0, 0)


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_masked_logits_are_fitted_as_logits_of_minus_infinity(calibrator, mask):
    """Masks as used in attention layers. Their value must not affect the scale of the other logits."""
    logits, target = data(200, 4)
    masked = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    masked[torch.arange(200), target] = False
    exact = fresh(calibrator).fit(logits.masked_fill(masked, -math.inf), target, **multi)
    found = fresh(calibrator).fit(logits.masked_fill(masked, mask), target, **multi)
    assert exact.converged
    assert found.converged
    assert found.alpha.item() == pytest.approx(exact.alpha.item(), rel=1e-9)
    assert found.beta.tolist() == pytest.approx(exact.beta.tolist(), abs=1e-9)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("calibrator", SCALED, ids=name)
def test_certain_correct_predictions_are_unchanged_if_the_fitted_scale_is_0(calibrator, from_logits):
    """With certain correct and uncertain wrong predictions, the loss falls as the temperature grows to infinity."""
    logits = torch.tensor([-math.inf, math.inf, 0.5, -0.5, math.inf, 1.0], dtype=torch.float64)
    target = torch.tensor([0, 1, 0, 1, 1, 0])
    share = 1 / 3 if calibrator is D else 0.5  # frequency of ones among the uncertain samples
    p, q = logits.sigmoid(), torch.stack(((-logits).sigmoid(), logits.sigmoid()), -1)
    of_classes = torch.stack((-logits.clamp(min=0), logits.clamp(max=0)), -1)
    for task, preds in (("binary", logits if from_logits else p), ("multiclass", of_classes if from_logits else q)):
        with pytest.warns(UserWarning, match="fitted scale is 0"):
            fitted = fresh(calibrator).fit(preds, target, task=task, from_logits=from_logits)
        assert fitted.outcome == AT_ZERO
        assert fitted.alpha == 0
        found = fitted(preds)
        if from_logits:
            found = found.softmax(-1) if task == "multiclass" else found.sigmoid()
        found = found[:, 1] if task == "multiclass" else found
        assert found.tolist() == pytest.approx([0, 1, share, share, 1, share], abs=1e-9)


def sometimes_certain(seed, kind, slope, n_classes):
    """Return scores whose true scale is `slope`, labels and weights; a few rows are certain, and right or wrong."""
    g = np.random.default_rng(seed)
    n = int(g.integers(12, 60))
    scores = g.normal(0, 1.5, (n, n_classes))
    target = (slope * scores + g.gumbel(size=scores.shape)).argmax(1)
    for i in range(0 if kind == "none" else int(g.integers(1, n // 4))):
        is_right = kind == "right" or (kind == "both" and i % 2 == 0)
        scores[i] = -math.inf
        scores[i, target[i] if is_right else (target[i] + 1) % n_classes] = 0
    weights = g.integers(1, 4, n) + (g.random(n) if seed % 2 else 0)
    return (torch.from_numpy(np.asarray(x)) for x in (scores, target, weights))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "n_seeds", [1, pytest.param(8, marks=pytest.mark.extended), pytest.param(150, marks=pytest.mark.long)]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fits_with_certain_samples_reach_the_optimum_of_lbfgs(n_seeds):
    """A positive and a negative true scale; the optimum of the latter is usually alpha = 0."""
    outcomes = []
    for calibrator, kind, slope, n_classes, seed in product(
        AFFINE, ("none", "right", "wrong", "both"), (0.8, -0.5), (2, 4), range(n_seeds)
    ):
        scores, target, weights = sometimes_certain(seed, kind, slope, n_classes)
        fitted = fresh(calibrator).fit(scores, target, weights=weights, **multi)
        outcomes.append(fitted.outcome.item())
        if fitted.outcome == SEPARABLE:
            continue
        at = f"{name(calibrator)}, {kind}, {slope}, {n_classes} classes, seed {seed}"
        assert fitted.converged, at
        loss = torch.nn.functional.cross_entropy(fitted(scores), target, reduction="none")
        is_possible = loss < math.inf
        mean = (loss * weights)[is_possible].sum() / weights[is_possible].sum()
        # both minima have a gradient below 1e-9, and a Hessian that is far from singular
        assert mean.item() == pytest.approx(lbfgs(scores, target, calibrator, weights), abs=1e-9), at
        if n_classes == 2 and calibrator is not B:
            single = fresh(calibrator).fit(scores[:, 1] - scores[:, 0], target, weights=weights, **binary)
            assert single.outcome == fitted.outcome, at
            assert (single.beta - fitted.beta).abs().max() < 1e-6, at
    assert len({CONVERGED, AT_ZERO} & {*outcomes}) == 2
    assert outcomes.count(SEPARABLE) < len(outcomes) / 20


@pytest.mark.parametrize(("sign", "outcome"), [(1, CONVERGED), (-1, AT_ZERO)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_float16_probabilities_of_0_and_1_are_fitted_to_the_optimum(sign, outcome):
    logits, target = single(300)
    preds = (sign * 4 * logits).sigmoid().half()
    fitted = fresh(D).fit(preds, target, task="binary")
    is_certain, is_right = (preds == 0) | (preds == 1), (preds > 0.5) == (target == 1)
    assert (is_certain & is_right).any()
    assert fitted.lost == (is_certain & ~is_right).sum() > 0
    assert fitted.outcome == outcome
    q, calibrated = preds.double(), fitted(preds.double())
    loss = torch.nn.functional.binary_cross_entropy(calibrated, target.double(), reduction="none")
    expected = lbfgs(torch.stack((1 - q, q), -1).log(), target, D)
    assert loss[is_right | ~is_certain].mean().item() == pytest.approx(expected, abs=1e-9)


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
