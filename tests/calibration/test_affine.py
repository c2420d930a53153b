"""Affine calibrators: against scipy's L-BFGS-B, closed forms, and where there is no optimum."""

import math

import numpy as np
import pytest
import torch
from helpers.fits import AFFINE, D, T, binary, data, fresh, gumbel, multi, name, single
from scipy.optimize import minimize
from scipy.special import logsumexp

from torchcalib.ops.newton.problem import AT_ZERO, CONVERGED, PIECE, SEPARABLE


def lbfgs(scores, target, bias):
    """The smallest mean NLL that scipy's L-BFGS-B finds, alpha >= 0, on scores of unit scale."""
    s, y = scores.double().numpy(), target.numpy()
    s = s - s.max(1, keepdims=True)
    s = s / np.sqrt((s**2).mean())
    rows = np.arange(len(s))

    def nll(theta):
        z = theta[0] * s + (theta[1:] if bias else 0)
        norm = logsumexp(z, 1)
        residual = np.exp(z - norm[:, None])
        residual[rows, y] -= 1
        gradient = [(residual * s).sum(1).mean()]
        return (norm - z[rows, y]).mean(), np.array([*gradient, *residual.mean(0)] if bias else gradient)

    start = np.array([1.0] + [0.0] * (s.shape[1] if bias else 0))
    bounds = [(0, None)] + [(None, None)] * (len(start) - 1)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-16, "gtol": 1e-13}
    return minimize(nll, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).fun


def check_optimal(calibrator, scores, target):
    """Fit, and compare with L-BFGS-B: the fit has no gradient and no larger NLL, by more than rounding.

    A log-sum-exp of C terms is off by C + 2 roundings of its largest logit, the label's logit by 2, and a pairwise
    mean of N losses by log2 N of the largest; the scores are scaled once more for L-BFGS-B. Both sides have this error.
    """
    fitted = fresh(calibrator).fit(scores, target, **multi)
    parameters = [x.clone().requires_grad_() for x in (fitted.alpha, fitted.beta)][: 1 + (calibrator is D)]
    value = torch.nn.functional.cross_entropy(parameters[0] * scores.double() + sum(parameters[1:]), target)
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
    assert value.item() <= lbfgs(scores, target, calibrator is D) + rounding
    return fitted


def ill_conditioned(seed):
    """Scores whose columns differ in scale by up to six orders of magnitude, and rare classes."""
    g = torch.Generator().manual_seed(seed)
    n_classes = int(torch.randint(2, 12, (), generator=g))
    n = int(torch.randint(200, 2000, (), generator=g))
    spread = 10 ** torch.linspace(-3, 3, n_classes, dtype=torch.float64)[torch.randperm(n_classes, generator=g)]
    scores = torch.randn(n, n_classes, generator=g, dtype=torch.float64) * spread * 10 ** torch.randn((), generator=g)
    noise = gumbel(n, n_classes, generator=g)
    return scores, (scores * 10 ** (-2 * torch.rand((), generator=g)) + 10 * noise).argmax(-1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_ill_conditioned_fit_is_no_worse_than_lbfgs(calibrator, seed):
    check_optimal(calibrator, *ill_conditioned(seed))


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_law_more_scores_than_stay_in_cache_are_fitted_alike(calibrator):
    """Scores are then brought to standard form piece by piece, but for those with a row that is not read."""
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


def test_closed_form_of_constant_scores_of_a_binary_task():
    """Every prediction is p: a bias alone fits, to the share of ones; log-odds of 0 leave alpha nothing to do."""
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        fitted = fresh(D).fit(torch.full((8,), 0.5, dtype=torch.float64), torch.tensor([1, 0, 0, 0] * 2), task="binary")
    assert fitted(torch.tensor([0.5, 0.9])).tolist() == pytest.approx([0.25, 0.25])
    assert fitted.outcome == AT_ZERO
    assert fitted.converged


def test_closed_form_of_two_scores():
    """Log-odds -1 and 1 with 1 and 3 ones of 4: the optimum has log-odds -log 3 and log 3 there."""
    preds = torch.tensor([-1.0] * 4 + [1.0] * 4, dtype=torch.float64)
    target = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0])
    for calibrator in AFFINE:
        fitted = fresh(calibrator).fit(preds, target, task="binary", from_logits=True)
        assert fitted.alpha.item() == pytest.approx(math.log(3), abs=1e-12)
        assert fitted.beta.tolist() == pytest.approx([0, 0], abs=1e-12)
        assert fitted.temperature.item() == pytest.approx(1 / math.log(3), abs=1e-12)


@pytest.mark.parametrize("logits", [[-2.0, -1.0, 1.0, 2.0], [-1.0, 0.0, 0.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_separable_data_are_reported_and_left_alone(calibrator, logits):
    """By the sign; but for a tie, towards which the likelihood rises with alpha; by a bias, which only DP has."""
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


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_predictions_that_point_the_wrong_way_become_the_shares(calibrator):
    logits, target = data(200, 3)
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        fitted = fresh(calibrator).fit(-logits, target, **multi)
    shares = torch.bincount(target, minlength=3).double() / 200 if calibrator is D else torch.ones(3).double() / 3
    assert fitted.converged
    assert fitted.grad_norm == 0
    assert fitted(logits).softmax(-1)[7].tolist() == pytest.approx(shares.tolist(), abs=1e-9)


def test_a_class_without_samples_gets_probability_0():
    logits, target = data(200, 3)
    present = target != 1
    with pytest.warns(UserWarning, match="no samples of class 1"):
        fitted = fresh(D).fit(logits[present], target[present], **multi)
    q = fitted(logits).softmax(-1)
    assert (q[:, 1] == 0).all()
    others = fresh(D).fit(logits[present][:, ::2], target[present] // 2, **multi)
    assert q[:, ::2].allclose(others(logits[:, ::2]).softmax(-1), atol=1e-12)
    certain = torch.tensor([[-math.inf, 0.0, -math.inf]], dtype=torch.float64)
    assert fitted(certain).tolist() == certain.tolist()  # nothing else is possible: left as it is
    assert fresh(T).fit(logits[present], target[present], **multi).converged


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_samples_of_infinite_nll_are_left_out_and_named(calibrator):
    logits, target = data(200, 3)
    broken = logits.clone()
    broken[0] = torch.tensor([-math.inf, 0.0, 0.0])
    broken[1, 2] = -math.inf  # not the label's: an ordinary sample
    labels = target.clone()
    labels[:2] = 0
    with pytest.warns(UserWarning, match="probability 0 to the label of samples of total weight 1"):
        fitted = fresh(calibrator).fit(broken, labels, **multi)
    assert fitted.converged
    assert fitted.lost == 1
    rest = fresh(calibrator).fit(broken[1:].masked_fill(broken[1:] == -math.inf, -1e5), labels[1:], **multi)
    assert fitted.alpha.item() == pytest.approx(rest.alpha.item(), rel=1e-9)
    assert fitted(broken)[0].softmax(-1)[0] == 0


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_masked_classes_are_those_of_probability_0(calibrator, mask):
    """Masks as of attention layers: how low they are says nothing of the scale of the other logits."""
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
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_certain_predictions_stay_so_where_the_others_are_worth_nothing(calibrator, from_logits):
    """Certain and right beside uncertain and wrong: the NLL falls towards a temperature of infinity, which is said."""
    logits = torch.tensor([-math.inf, math.inf, 0.5, -0.5, math.inf, 1.0], dtype=torch.float64)
    target = torch.tensor([0, 1, 0, 1, 1, 0])
    share = 1 / 3 if calibrator is D else 0.5  # of the uncertain ones
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


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_logits_of_any_size_are_one_problem(calibrator, scale):
    """Of log-odds of 1e-6 a float32 log-probability, near -log 2, would keep one digit."""
    logits, target = data(200, 4)
    log_odds, labels = single(200)
    narrow = (scale * log_odds).float()
    for scores, of, given in ((scale * logits, target, multi), (narrow, labels, binary)):
        exact_scores = scores.double() / scale
        fitted, exact = fresh(calibrator).fit(scores, of, **given), fresh(calibrator).fit(exact_scores, of, **given)
        assert fitted.converged
        assert scale * fitted.alpha.item() == pytest.approx(exact.alpha.item(), rel=1e-9)
        tolerance = {"rtol": 0, "atol": 1e-9} if given is multi else {"rtol": 1e-5, "atol": 1e-6}
        assert fitted(scores).double().allclose(exact(exact_scores), **tolerance)


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_dtypes_axes_and_probabilities_are_read_as_they_are(calibrator):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits, target = data(60, 3, dtype=dtype)
        fitted, exact = (fresh(calibrator).fit(scores, target, **multi) for scores in (logits, logits.double()))
        assert fitted(logits).dtype == torch.float32
        assert fitted.alpha.item() == pytest.approx(exact.alpha.item(), abs=1e-12)
        assert fitted(logits).double().allclose(exact(logits.double()), atol=1e-5)
        turned = fresh(calibrator).fit(logits.T, target, class_axis=0, **multi)
        assert turned(logits.T).T.allclose(fitted(logits))
    logits, probs = logits.double(), logits.double().softmax(-1)
    by_probs = fresh(calibrator).fit(probs, target, task="multiclass")(probs)
    assert exact(logits).exp().allclose(by_probs, atol=1e-9)  # log-probabilities
    log_odds, labels = single(80)
    pairs = torch.stack((-log_odds / 2, log_odds / 2), -1)
    two = fresh(calibrator).fit(pairs, labels, **multi)(pairs).exp()[:, 1]
    assert fresh(calibrator).fit(log_odds, labels, **binary)(log_odds).sigmoid().allclose(two, atol=1e-9)
