"""Calibrators: against scipy's L-BFGS-B and scikit-learn's isotonic regression, slow loops, closed forms and laws."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from sklearn.isotonic import IsotonicRegression

import torchcalib as tc
from torchcalib.calibrators import AffineTransform, HistogramTransform, IsotonicTransform
from torchcalib.kernels.newton import AT_ZERO, CONVERGED, NO_DATA, PIECE, SEPARABLE

T, D, H, ISO = tc.Temperature(), tc.DPCalibration(), tc.HistogramBinning(n_bins=5), tc.Isotonic()
AFFINE = [T, D]
ALL = [T, D, H, ISO]
multi = {"task": "multiclass", "from_logits": True}


def name(calibrator):
    return type(calibrator).__name__


def lbfgs(scores, target, bias, weights=None):
    """The smallest mean NLL that scipy's L-BFGS-B finds, alpha >= 0, on scores of unit scale."""
    s, y = scores.double().numpy(), target.numpy()
    s = s - s.max(1, keepdims=True)
    s = s / np.sqrt((s**2).mean())
    w = np.ones(len(s)) if weights is None else weights.numpy()
    w = w / w.sum()
    rows = np.arange(len(s))

    def nll(theta):
        z = theta[0] * s + (theta[1:] if bias else 0)
        norm = logsumexp(z, 1)
        residual = np.exp(z - norm[:, None])
        residual[rows, y] -= 1
        gradient = [(w * (residual * s).sum(1)).sum()]
        return (w * (norm - z[rows, y])).sum(), np.array([*gradient, *(w @ residual)] if bias else gradient)

    start = np.array([1.0] + [0.0] * (s.shape[1] if bias else 0))
    bounds = [(0, None)] + [(None, None)] * (len(start) - 1)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-16, "gtol": 1e-13}
    return minimize(nll, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).fun


def gradient_norm(transform, scores, target):
    """Norm of the gradient of the mean NLL in (alpha, beta), by autograd."""
    alpha = transform.alpha.clone().requires_grad_()
    beta = transform.beta.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(alpha * scores.double() + beta, target)
    loss.backward()
    gradients = [alpha.grad, *([] if (transform.beta == 0).all() else [beta.grad])]
    return loss.item(), torch.cat([g.reshape(-1) for g in gradients]).norm().item()


def check_optimal(calibrator, scores, target):
    transform = calibrator.fit(scores, target, **multi)
    value, norm = gradient_norm(transform, scores, target)
    assert transform.converged
    assert transform.grad_norm < 1e-9
    assert norm < 1e-9
    assert value <= lbfgs(scores, target, isinstance(calibrator, tc.DPCalibration)) + 1e-12
    return transform


def ill_conditioned(seed):
    """Scores whose columns differ in scale by up to six orders of magnitude, and rare classes."""
    g = torch.Generator().manual_seed(seed)
    n_classes = int(torch.randint(2, 12, (), generator=g))
    n = int(torch.randint(200, 2000, (), generator=g))
    spread = 10 ** torch.linspace(-3, 3, n_classes, dtype=torch.float64)[torch.randperm(n_classes, generator=g)]
    scores = torch.randn(n, n_classes, generator=g, dtype=torch.float64) * spread * 10 ** torch.randn((), generator=g)
    noise = -(-torch.rand(n, n_classes, generator=g, dtype=torch.float64).log()).log()
    return scores, (scores * 10 ** (-2 * torch.rand((), generator=g)) + 10 * noise).argmax(-1)


def data(n=60, n_classes=4, lead=(), seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(*lead, n, n_classes, generator=g, dtype=torch.float64)
    noise = -(-torch.rand(*lead, n, n_classes, generator=g, dtype=torch.float64).log()).log()
    return logits.to(dtype), (0.6 * logits + 0.7 * torch.arange(n_classes) + noise).argmax(-1)


def single(n=60, lead=(), seed=0):
    """Log-odds and labels of a binary task."""
    logits, target = data(n, 2, lead, seed)
    return logits[..., 1], target


# --------------------------------------------------------------------------------------------------------------------
# The optimum


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_ill_conditioned_fit_is_no_worse_than_lbfgs(calibrator, seed):
    check_optimal(calibrator, *ill_conditioned(seed))


@pytest.mark.parametrize("scale", [1.0, 0.01, 100.0])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
@pytest.mark.parametrize("system", ["adrenal_resnet50", "sst2_gpt2", "agnews_gpt2", "cifar10_resnet20"])
def test_recorded_systems_are_fitted_no_worse_than_lbfgs(recorded, system, calibrator, scale):
    arrays = recorded(f"{system}.npz")
    scores = arrays.get("logits", arrays.get("log_probs")).double()
    transform = check_optimal(calibrator, scale * scores, arrays["targets"].long())
    if scale != 1:
        assert scale * transform.alpha == pytest.approx(calibrator.fit(scores, arrays["targets"], **multi).alpha.item())


@pytest.mark.parametrize("scale", [1.0, 0.01, 100.0])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
@pytest.mark.parametrize("system", ["cal", "mcp", "mcs", "mcps"])
@pytest.mark.parametrize("n_classes", [2, 10])
def test_simulated_systems_are_fitted_no_worse_than_lbfgs(recorded, n_classes, system, calibrator, scale):
    arrays = recorded(f"sim_ferrer_k{n_classes}.npz")
    check_optimal(calibrator, scale * arrays[system], arrays["targets"].long())


@pytest.mark.parametrize("scale", [1.0, 0.01, 100.0])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
@pytest.mark.parametrize("case", ["50-50", "50-40", "50-60", "01-01", "01-02"])
def test_gaussian_discriminants_are_fitted_no_worse_than_lbfgs(recorded, case, calibrator, scale):
    arrays = recorded("sim_gda.npz")
    log_odds = scale * arrays[f"p_{case}"].logit()
    check_optimal(calibrator, torch.stack((-log_odds / 2, log_odds / 2), -1), arrays[f"y_{case}"].long())


@pytest.mark.extended
@pytest.mark.parametrize("scale", [1.0, 0.01, 100.0])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_a_hundred_recorded_classes_are_fitted_no_worse_than_lbfgs(recorded, calibrator, scale):
    arrays = recorded("cifar100_resnet20.npz")
    check_optimal(calibrator, scale * arrays["logits"].double(), arrays["targets"].long())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_law_more_scores_than_stay_in_cache_are_fitted_alike(calibrator, dtype):
    """Scores are then brought to standard form piece by piece, but for those with a row that is not read."""
    g = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(6000, 50, generator=g) + 1e3 * torch.randn(6000, 1, generator=g)).to(dtype)
    assert scores.numel() > PIECE
    noise = -(-torch.rand(6000, 50, generator=g).log()).log()
    target = (0.6 * scores + 0.3 * torch.randn(50, generator=g) + noise).argmax(-1)
    transform = check_optimal(calibrator, scores, target)
    more = torch.cat((scores, torch.full((1, 50), torch.nan, dtype=dtype)))
    weights = torch.ones(6001).index_fill(0, torch.tensor([6000]), 0)
    whole = calibrator.fit(more, torch.cat((target, target[:1])), weights=weights, **multi)
    torch.testing.assert_close(transform.alpha, whole.alpha, rtol=1e-9, atol=0)
    torch.testing.assert_close(transform.beta, whole.beta, rtol=0, atol=1e-8)


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_weighted_fit_is_no_worse_than_lbfgs(calibrator):
    scores, target = data(300)
    weights = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    transform = calibrator.fit(scores, target, weights=weights, **multi)
    after = tc.nll(transform(scores), target, weights=weights, **multi)
    assert after <= lbfgs(scores, target, calibrator is D, weights) + 1e-12


def test_closed_form_of_constant_scores_of_a_binary_task():
    """Every prediction is p: a bias alone fits, to the share of ones; log-odds of 0 leave alpha nothing to do."""
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        transform = D.fit(torch.full((8,), 0.5, dtype=torch.float64), torch.tensor([1, 0, 0, 0] * 2), task="binary")
    assert transform(torch.tensor([0.5, 0.9])).tolist() == pytest.approx([0.25, 0.25])
    assert transform.outcome == AT_ZERO
    assert transform.converged


def test_closed_form_of_two_scores():
    """Log-odds -1 and 1 with 1 and 3 ones of 4: the optimum has log-odds -log 3 and log 3 there."""
    preds = torch.tensor([-1.0] * 4 + [1.0] * 4, dtype=torch.float64)
    target = torch.tensor([1, 0, 0, 0, 1, 1, 1, 0])
    for calibrator in AFFINE:
        transform = calibrator.fit(preds, target, task="binary", from_logits=True)
        assert transform.alpha.item() == pytest.approx(math.log(3), abs=1e-12)
        assert transform.beta.tolist() == pytest.approx([0, 0], abs=1e-12)
        assert transform.temperature.item() == pytest.approx(1 / math.log(3), abs=1e-12)


def test_histogram_is_the_slow_loop():
    p, y = torch.sigmoid(single()[0]), single()[1]
    fitted = H.fit(p, y, task="binary")(p).tolist()
    for value, found in zip(p.tolist(), fitted, strict=True):
        inside = [int(b) for a, b in zip(p.tolist(), y.tolist(), strict=True) if int(a * 5) == int(value * 5)]
        assert found == pytest.approx(sum(inside) / len(inside), abs=1e-15)


def test_empty_bins_keep_predictions_or_become_zero():
    preds, target = torch.tensor([0.1, 0.15, 0.9, 0.95]), torch.tensor([0, 1, 1, 1])
    new = torch.tensor([0.1, 0.5])
    assert H.fit(preds, target, task="binary")(new).tolist() == pytest.approx([0.5, 0.5])
    zero = tc.HistogramBinning(n_bins=5, empty="zero").fit(preds, target, task="binary")
    assert zero(torch.tensor([0.1, 0.4])).tolist() == pytest.approx([0.5, 0])


@pytest.mark.parametrize("from_logits", [False, True])
def test_isotonic_is_scikit_learns(from_logits):
    logits, target = single(300)
    preds = logits.round(decimals=1) if from_logits else logits.sigmoid().round(decimals=2)
    weights = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(2))
    transform = ISO.fit(preds, target, task="binary", from_logits=from_logits, weights=weights)
    sk = IsotonicRegression(out_of_bounds="clip").fit(preds, target, sample_weight=weights)
    new = torch.linspace(preds.min() - 0.1, preds.max() + 0.1, 999, dtype=torch.float64)
    found = transform(new).sigmoid() if from_logits else transform(new)
    assert found.tolist() == pytest.approx(sk.predict(new).tolist(), abs=1e-12)


# --------------------------------------------------------------------------------------------------------------------
# Where there is no optimum


def test_separable_data_are_reported_and_left_alone():
    preds, target = torch.tensor([0.1, 0.3, 0.8, 0.9], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    for calibrator in AFFINE:
        with pytest.warns(UserWarning, match="separated without error"):
            transform = calibrator.fit(preds, target, task="binary")
        assert not transform.converged
        assert transform.outcome == SEPARABLE
        assert transform.alpha == 1
        assert transform.grad_norm.isnan()
        assert transform(preds).tolist() == pytest.approx(preds.tolist())


def test_data_that_a_bias_separates_are_separable_for_dp_alone():
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
    target = torch.tensor([0, 0, 1, 1])
    with pytest.warns(UserWarning, match="separated without error"):
        assert not D.fit(logits, target, task="binary", from_logits=True).converged
    assert T.fit(logits, target, task="binary", from_logits=True).converged


def test_data_separated_but_for_a_tie_are_separable():
    """The class changes at a score that both classes have: the likelihood rises with alpha towards that one tie."""
    logits = torch.tensor([-2.0, -1.0, 0.0, 0.0, 1.0, 2.0], dtype=torch.float64)
    target = torch.tensor([0, 0, 0, 1, 1, 1])
    for calibrator in AFFINE:
        with pytest.warns(UserWarning, match="separated without error"):
            transform = calibrator.fit(logits, target, task="binary", from_logits=True)
        assert transform.outcome == SEPARABLE
        assert transform.alpha == 1


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_predictions_that_point_the_wrong_way_become_the_shares(calibrator):
    logits, target = data(200, 3)
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        transform = calibrator.fit(-logits, target, **multi)
    shares = torch.bincount(target, minlength=3).double() / 200 if calibrator is D else torch.ones(3).double() / 3
    assert transform.converged
    assert transform.grad_norm == 0
    assert transform(logits).softmax(-1)[7].tolist() == pytest.approx(shares.tolist(), abs=1e-9)


def test_a_class_without_samples_gets_probability_0():
    logits, target = data(200, 3)
    present = target != 1
    with pytest.warns(UserWarning, match="no samples of class 1"):
        transform = D.fit(logits[present], target[present], **multi)
    q = transform(logits).softmax(-1)
    assert (q[:, 1] == 0).all()
    others = D.fit(logits[present][:, ::2], target[present] // 2, **multi)
    assert q[:, ::2].allclose(others(logits[:, ::2]).softmax(-1), atol=1e-12)
    certain = torch.tensor([[-math.inf, 0.0, -math.inf]], dtype=torch.float64)
    assert transform(certain).tolist() == certain.tolist()  # nothing else is possible: left as it is
    assert T.fit(logits[present], target[present], **multi).converged


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_samples_of_infinite_nll_are_left_out_and_named(calibrator):
    logits, target = data(200, 3)
    broken = logits.clone()
    broken[0] = torch.tensor([-math.inf, 0.0, 0.0])
    broken[1, 2] = -math.inf  # not the label's: an ordinary sample
    labels = target.clone()
    labels[:2] = 0
    with pytest.warns(UserWarning, match="probability 0 to the label of samples of total weight 1"):
        transform = calibrator.fit(broken, labels, **multi)
    assert transform.converged
    assert transform.lost == 1
    rest = calibrator.fit(broken[1:].masked_fill(broken[1:] == -math.inf, -1e5), labels[1:], **multi)
    assert transform.alpha.item() == pytest.approx(rest.alpha.item(), rel=1e-9)
    assert transform(broken)[0].softmax(-1)[0] == 0


@pytest.mark.parametrize("mask", [-1e9, torch.finfo(torch.float32).min, -1e300, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_masked_classes_are_those_of_probability_0(calibrator, mask):
    """Masks as of attention layers: how low they are says nothing of the scale of the other logits."""
    logits, target = data(200, 4)
    masked = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.3
    masked[torch.arange(200), target] = False
    exact = calibrator.fit(logits.masked_fill(masked, -math.inf), target, **multi)
    found = calibrator.fit(logits.masked_fill(masked, mask), target, **multi)
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
    preds = logits if from_logits else logits.sigmoid()
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        transform = calibrator.fit(preds, target, task="binary", from_logits=from_logits)
    assert transform.outcome == AT_ZERO
    assert transform.alpha == 0
    p = transform(preds).sigmoid() if from_logits else transform(preds)
    shares = [1 / 3] * 3 if calibrator is D else [0.5] * 3  # of the uncertain ones
    assert p[[0, 1, 4]].tolist() == [0, 1, 1]
    assert p[[2, 3, 5]].tolist() == pytest.approx(shares, abs=1e-9)
    two = (
        torch.stack((-preds.clamp(min=0), preds.clamp(max=0)), -1)
        if from_logits
        else torch.stack((1 - preds, preds), -1)
    )
    with pytest.warns(UserWarning, match="fitted scale is 0"):
        of_classes = calibrator.fit(two, target, task="multiclass", from_logits=from_logits)
    q = of_classes(two).softmax(-1) if from_logits else of_classes(two)
    assert q[:, 1].tolist() == pytest.approx(p.tolist(), abs=1e-9)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_logits_of_any_size_are_one_problem(calibrator, scale):
    logits, target = data(200, 4)
    transform, exact = (calibrator.fit(scores, target, **multi) for scores in (scale * logits, logits))
    assert transform.converged
    assert scale * transform.alpha.item() == pytest.approx(exact.alpha.item(), rel=1e-9)
    assert transform(scale * logits).allclose(exact(logits), rtol=0, atol=1e-9)


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_small_log_odds_lose_no_digits(calibrator):
    """Of log-odds of 1e-6 a float32 log-probability, near -log 2, would keep one digit."""
    logits, target = single(200)
    small = (1e-6 * logits).float()
    transform = calibrator.fit(small, target, task="binary", from_logits=True)
    exact = calibrator.fit(1e6 * small.double(), target, task="binary", from_logits=True)
    assert 1e-6 * transform.alpha.item() == pytest.approx(exact.alpha.item(), rel=1e-9)
    assert transform(small).double().allclose(exact(1e6 * small.double()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_no_series_and_no_labels_have_no_fits(calibrator):
    none = calibrator.fit(torch.rand(0, 5), torch.zeros(0, 5, dtype=torch.int64), task="binary")
    assert none.converged.shape == (0,)
    assert none(torch.rand(0, 7)).shape == (0, 7)
    labels = calibrator.fit(torch.rand(5, 0), torch.zeros(5, 0, dtype=torch.int64), task="multilabel")
    assert labels(torch.rand(7, 0)).shape == (7, 0)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_without_data_a_fit_is_not_converged(calibrator):
    preds, target = torch.tensor([0.2, 0.7]), torch.tensor([0, 1])
    with pytest.warns(UserWarning, match="no samples of positive weight"):
        transform = calibrator.fit(preds, target, weights=torch.zeros(2), task="binary")
    assert not transform.converged
    with pytest.warns(UserWarning, match="no samples of positive weight"):
        transform = calibrator.fit(preds[:0], target[:0], task="binary")
    assert not transform.converged
    if calibrator in AFFINE:
        assert transform.outcome == NO_DATA
        assert transform(preds).isnan().all()


# --------------------------------------------------------------------------------------------------------------------
# Laws


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_law_a_batch_of_series_is_a_loop(calibrator):
    logits, target = data(80, 3, lead=(2, 3))
    batched = calibrator.fit(logits, target, **multi)
    assert batched.alpha.shape == batched.converged.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = calibrator.fit(logits[i, j], target[i, j], **multi)
            assert batched.alpha[i, j].item() == pytest.approx(one.alpha.item(), abs=1e-9)
            assert batched(logits)[i, j].allclose(one(logits[i, j]), atol=1e-8)
            assert batched.part(i).part(j)(logits[i, j]).allclose(one(logits[i, j]), atol=1e-8)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_labels_are_series(calibrator):
    logits, target = single(90, lead=(3,))
    preds, labels = logits.sigmoid().T, target.T
    batched = calibrator.fit(preds, labels, task="multilabel")
    for k in range(3):
        one = calibrator.fit(preds[:, k], labels[:, k], task="binary")
        assert batched(preds)[:, k].allclose(one(preds[:, k]), atol=1e-8)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_weightings_are_fits_of_their_own(calibrator):
    """What folds and bootstrap replicates use: a leading axis of weights, one solve."""
    logits, target = single(90)
    g = torch.Generator().manual_seed(5)
    weights = torch.randint(0, 3, (7, 90), generator=g).double()
    p = calibrator.read(logits, target, task="binary", options={"from_logits": True})
    batched = calibrator.fit_to(p, weights)
    for r in range(7):
        one = calibrator.fit(logits, target, weights=weights[r], task="binary", from_logits=True)
        assert batched(logits.expand(7, -1))[r].allclose(one(logits), atol=1e-8)
        assert batched.part(r)(logits).allclose(one(logits), atol=1e-8)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_integer_weights_are_repeats(calibrator):
    logits, target = single(70)
    counts = torch.randint(0, 4, (70,), generator=torch.Generator().manual_seed(3))
    weighted = calibrator.fit(logits, target, weights=counts, task="binary", from_logits=True)
    repeated = calibrator.fit(
        logits.repeat_interleave(counts), target.repeat_interleave(counts), task="binary", from_logits=True
    )
    assert weighted(logits).allclose(repeated(logits), atol=1e-9)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_law_order_and_absent_rows_do_not_matter(calibrator):
    logits, target = single(70)
    given = {"task": "binary", "from_logits": True}
    plain = calibrator.fit(logits, target, **given)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(4))
    assert calibrator.fit(logits[order], target[order], **given)(logits).allclose(plain(logits), atol=1e-9)
    more = torch.cat((logits, torch.tensor([math.nan, 3.0])))
    labels = torch.cat((target, torch.tensor([7, 0])))
    weights = torch.cat((torch.ones(70), torch.zeros(2)))
    assert calibrator.fit(more, labels, weights=weights, **given)(logits).allclose(plain(logits), atol=1e-9)
    ignored = torch.cat((target, torch.tensor([-1, -1])))
    assert calibrator.fit(more, ignored, ignore_index=-1, **given)(logits).allclose(plain(logits), atol=1e-9)


@pytest.mark.parametrize("calibrator", AFFINE, ids=name)
def test_law_probabilities_and_logits_are_the_same_predictions(calibrator):
    logits, target = data(80, 3)
    by_logits = calibrator.fit(logits, target, **multi)(logits)
    by_probs = calibrator.fit(logits.softmax(-1), target, task="multiclass")(logits.softmax(-1))
    assert by_logits.exp().allclose(by_probs, atol=1e-9)
    assert by_logits.exp().sum(-1).allclose(torch.ones(80, dtype=torch.float64))  # log-probabilities
    binary, labels = single(80)
    log_odds = calibrator.fit(binary, labels, task="binary", from_logits=True)(binary)
    two = calibrator.fit(torch.stack((-binary / 2, binary / 2), -1), labels, **multi)
    assert log_odds.sigmoid().allclose(two(torch.stack((-binary / 2, binary / 2), -1)).exp()[:, 1], atol=1e-9)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_gradient_in_the_predictions(calibrator, from_logits):
    logits, target = single(40)
    preds = logits if from_logits else logits.sigmoid()
    transform = calibrator.fit(preds, target, task="binary", from_logits=from_logits)
    middle = (preds[:6] + 1e-3).clone().requires_grad_()
    if calibrator in AFFINE:
        assert torch.autograd.gradcheck(transform, middle)
        values, labels = data(40, 3)
        of_classes = calibrator.fit(values, labels, **multi)
        assert torch.autograd.gradcheck(of_classes, values[:4].clone().requires_grad_())
    else:
        transform(middle).clamp(-5, 5).sum().backward()
        assert middle.grad.isfinite().all()
    ends = torch.tensor([-math.inf, math.inf] if from_logits else [0.0, 1.0], dtype=torch.float64, requires_grad=True)
    assert (transform(ends).sigmoid() if from_logits else transform(ends)).isfinite().all()
    transform(ends).clamp(-5, 5).sum().backward()
    assert ends.grad.isfinite().all()


def test_gradient_of_isotonic_is_the_slope_between_blocks():
    preds, target = torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    x = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    ISO.fit(preds, target, task="binary")(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([0, 1 / (0.5 - 0.3), 0])


# --------------------------------------------------------------------------------------------------------------------
# A module


@pytest.mark.parametrize(
    ("calibrator", "cls"),
    [(T, AffineTransform), (D, AffineTransform), (H, HistogramTransform), (ISO, IsotonicTransform)],
)
def test_state_dict_goes_to_a_file_and_into_a_bare_transform(calibrator, cls, tmp_path):
    logits, target = single(50)
    transform = calibrator.fit(logits, target, task="binary", from_logits=True)
    model = torch.nn.Sequential(torch.nn.Identity(), transform)
    torch.save(model.state_dict(), tmp_path / "cal.pt")
    bare = torch.nn.Sequential(torch.nn.Identity(), cls())
    bare.load_state_dict(torch.load(tmp_path / "cal.pt", weights_only=True))
    assert torch.equal(bare(logits), transform(logits))
    assert bare[1].converged.equal(transform.converged)
    assert torch.equal(copy.deepcopy(transform)(logits), transform(logits))
    assert not list(transform.parameters())


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_numbers_stay_float64_when_the_model_is_halved(calibrator):
    logits, target = single(50)
    transform = calibrator.fit(logits, target, task="binary", from_logits=True)
    before = transform(logits)
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), transform).to(torch.bfloat16).half()
    assert model[0].weight.dtype == torch.float16
    assert torch.equal(model[1](logits), before)


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_counts_and_flags_keep_their_kind_when_a_model_changes_type(calibrator):
    transform = calibrator.fit(*single(50), task="binary", from_logits=True)
    before = {key: x.dtype for key, x in transform.named_buffers()}
    transform.type(torch.float16)
    assert {key: x.dtype for key, x in transform.named_buffers()} == before


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_a_transform_fitted_in_inference_mode_takes_gradients(calibrator):
    logits, target = single(50)
    with torch.inference_mode():
        transform = calibrator.fit(logits.clone(), target, task="binary", from_logits=True)
    x = logits.clone().requires_grad_()
    transform(x).clamp(-9, 9).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_nan_stays_nan(calibrator):
    transform = calibrator.fit(*single(50), task="binary", from_logits=True)
    assert transform(torch.tensor([math.nan, 0.3])).isnan().tolist() == [True, False]


@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_wrong_axes_of_predictions(calibrator):
    logits, target = single(30, lead=(2,))
    series = calibrator.fit(logits, target, task="binary", from_logits=True)
    labels = calibrator.fit(logits.T, target.T, task="multilabel", from_logits=True)
    for call, part in (
        (lambda: series(torch.tensor(0.3)), r"at least 1 axes.*got shape \(\)"),
        (lambda: series(logits[0]), r"leading axes \(2,\) of the batch.*got \(\)"),
        (lambda: series(torch.rand(3, 30)), r"leading axes \(2,\) of the batch.*got \(3,\)"),
        (lambda: labels(torch.rand(7)), "at least 2 axes"),
        (lambda: labels(torch.rand(2, 7)), r"leading axes \(2,\).*labels last, got \(7,\)"),
    ):
        with pytest.raises(ValueError, match=part):
            call()
    assert series(torch.rand(5, 2, 3)).shape == (5, 2, 3)
    assert series.part(1)(torch.rand(4)).shape == (4,)


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_a_transform_compiles_whole_and_maps(calibrator, from_logits):
    logits, target = single(60)
    preds = logits if from_logits else logits.sigmoid()
    transform = calibrator.fit(preds, target, task="binary", from_logits=from_logits)
    whole = torch.compile(transform, fullgraph=True, backend="eager")
    assert whole(preds).allclose(transform(preds))
    assert torch.vmap(transform)(preds.view(6, 10)).allclose(transform(preds).view(6, 10))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes_are_read_as_they_are(dtype):
    logits, target = data(60, 3, dtype=dtype)
    transform = D.fit(logits, target, **multi)
    assert transform(logits).dtype == torch.float32
    exact = D.fit(logits.double(), target, **multi)
    assert transform.alpha.item() == pytest.approx(exact.alpha.item(), abs=1e-12)
    assert transform(logits).double().allclose(exact(logits.double()), atol=1e-5)


def test_images_have_their_classes_where_class_axis_says():
    logits, target = data(60, 3)
    transform = D.fit(logits.T, target, class_axis=0, **multi)
    assert transform(logits.T).T.allclose(D.fit(logits, target, **multi)(logits))
    with pytest.raises(ValueError, match=r"`preds` must have 3 classes.*got 60"):
        transform(logits)


def test_a_set_of_classes_is_a_binary_task():
    logits, target = data(60, 4)
    transform = D.fit(logits, target, positive_classes=[1, 2], **multi)
    assert transform.task == "binary"
    inside = logits.softmax(-1)[:, 1:3].sum(-1)
    assert transform(inside.logit()).shape == (60,)


def test_repr_and_equality_of_calibrators():
    assert tc.HistogramBinning(n_bins=5) == H
    assert hash(D) == hash(tc.DPCalibration())
    assert "task='binary', from_logits=True" in repr(T.fit(*single(), task="binary", from_logits=True))


P, Y = torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0, 1, 1])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
EITHER = (TypeError, ValueError)
CALLS = [
    ("shapes differ", lambda c: c.fit(P, Y[:2], task="binary"), ValueError, "`target` must"),
    ("soft targets", lambda c: c.fit(P, P, task="binary"), TypeError, "`target` must be integer labels"),
    ("logits as probabilities", lambda c: c.fit(3 * P, Y, task="binary"), ValueError, "from_logits=True"),
    ("NaN", lambda c: c.fit(P * math.nan, Y, task="binary"), ValueError, "`preds` must not hold NaN"),
    ("label 3", lambda c: c.fit(P, 3 * Y, task="binary"), ValueError, "`target` must be a class index"),
    ("negative weights", lambda c: c.fit(P, Y, weights=-P, task="binary"), ValueError, "`weights` must"),
    ("a list", lambda c: c.fit([0.2], Y, task="binary"), TypeError, "`preds` must be a torch.Tensor"),
    ("unknown task", lambda c: c.fit(P, Y, task="ordinal"), ValueError, "`task` must"),
    ("unknown option", lambda c: c.fit(P, Y, task="binary", l2=1), TypeError, "l2"),
    ("no task", lambda c: c.fit(P, Y), TypeError, "task"),
    ("integers in forward", lambda c: c.fit(P, Y, task="binary")(Y), TypeError, "`preds` must be floating"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:no finite scale:UserWarning")
@pytest.mark.parametrize(("call", "error", "part"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
@pytest.mark.parametrize("calibrator", ALL, ids=name)
def test_wrong_fit(calibrator, call, error, part):
    with pytest.raises(error, match=part):
        call(calibrator)


@pytest.mark.parametrize("calibrator", [H, ISO], ids=name)
def test_wrong_task_of_binary_calibrators(calibrator):
    with pytest.raises(ValueError, match=r"`task` must be one of 'binary', 'multilabel'.*positive_classes"):
        calibrator.fit(Q, torch.tensor([1, 0, 2]), task="multiclass")


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [({"n_bins": 0}, ValueError, "`n_bins` must"), ({"n_bins": 1.5}, TypeError, "`n_bins` must"),
     ({"right": 1}, TypeError, "`right` must"), ({"empty": "mean"}, ValueError, "`empty` must")],
)  # fmt: skip
def test_wrong_histogram(options, error, part):
    with pytest.raises(error, match=part):
        tc.HistogramBinning(**options)


def test_isotonic_counts_copies():
    with pytest.raises(ValueError, match="`weights` must be whole numbers"):
        ISO.fit(P, Y, weights=P, task="binary")


def test_converged_fits_say_so_and_warn_of_nothing():
    transform = D.fit(*data(), **multi)
    assert transform.outcome == CONVERGED
    assert transform.remarks() == []
