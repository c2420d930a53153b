"""Calibration loss and score divergence, compared with loops, closed forms and laws."""

import math
from functools import partial

import pytest
import torch
from helpers.fits import ALL, OF_CLASSES, D, T, binary, data, fresh, multi, name, single, turns

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.ops.newton.fits import fit_affine

COSTS = [tc.CostMatrix.imbalanced(k).with_reject(0.4) for k in (2, 3)]
RISKS = [partial(F.bayes_risk, cost=cost) for cost in COSTS]
SCORES = {"nll": F.nll, "brier": F.brier_score} | {risk: risk for risk in RISKS}
LOOPS = [(binary, each, "nll") for each in ALL] + [(binary, each, "brier") for each in ALL[::4]]


@pytest.mark.parametrize(("task", "calibrator", "score"), [*LOOPS, (binary, T, RISKS[0]), (multi, T, RISKS[1])])
def test_cross_validated_loss_equals_a_loop_over_folds(task, calibrator, score):
    logits, target = data(100, 3) if task is multi else single(100)
    folds = turns(100)
    after = torch.empty_like(logits)
    for f in range(5):
        fit = fresh(calibrator).fit(logits[folds != f], target[folds != f], **task)
        after[folds == f] = fit(logits[folds == f])
    raw, cal = (SCORES[score](preds, target, **task) for preds in (logits, after))
    assert raw != cal
    given = {"score": score, "calibrator": calibrator, "folds": folds, **task}
    assert tc.cross_val_calibrate(logits, target, calibrator=calibrator, folds=folds, **task).allclose(after, atol=1e-8)
    assert tc.calibration_loss(logits, target, **given).item() == pytest.approx((raw - cal).item(), abs=1e-9)
    relative = tc.relative_calibration_loss(logits, target, **given).item()
    assert relative == pytest.approx((100 * (1 - cal / raw)).item(), abs=1e-7)
    # [EPSR] eq. 24-26: the divergence is the expected excess under calibrated probabilities
    seen = after.exp() if task is multi else after.sigmoid()
    expected, least = (SCORES[score](preds, seen, **task) for preds in (logits, after))
    found = tc.score_divergence(logits, target, **given)
    if score == "brier":  # the score of soft targets is the squared distance, which is the divergence itself
        p = logits.sigmoid()
        expected, least = (seen * (1 - p) ** 2 + (1 - seen) * p**2).mean(), (seen * (1 - seen)).mean()
    assert found.semi_empirical.item() == pytest.approx(expected.item(), abs=1e-8)
    assert found.divergence.item() == pytest.approx((expected - least).item(), abs=1e-8)
    assert found.divergence >= 0  # the scores are proper


def test_losses_without_folds_equal_a_single_fit():
    """The fit is to the test data, or to other data with or without weights. It is constant in the gradient."""
    logits, target = data(100, 3)
    x, y = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = tc.calibration_loss(x, target, train_on_test=True, **multi)
    expected = F.nll(y, target, **multi) - F.nll(fresh(D).fit(logits, target, **multi)(y), target, **multi)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-14)
    assert loss >= 0
    loss.backward()
    expected.backward()
    assert x.grad.allclose(y.grad, atol=1e-14)
    other, labels = data(50, 3, seed=1)
    for weights in ((), (torch.arange(50.0),)):
        given = {"calibration": (other, labels, *weights), "weights": torch.rand(100)}
        expected = fresh(D).fit(other, labels, weights=weights[0] if weights else None, **multi)(logits)
        assert tc.cross_val_calibrate(logits, target, **given, **multi).allclose(expected, atol=1e-12)


def test_infinite_scores_give_relative_losses_of_100_nan_or_minus_infinity():
    preds = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5, 0.5])
    target = torch.tensor([0, 1, 1, 1, 0, 1])
    given = {"task": "binary", "train_on_test": True}
    assert (
        tc.relative_calibration_loss(preds, target, calibrator=tc.HistogramBinning(n_bins=3), **given) == 100
    )  # only the raw score is infinite
    # affine scaling excludes the infinite sample, whose score stays infinite
    assert tc.relative_calibration_loss(preds, target, **given).isnan()
    halves = torch.tensor([0.1, 0.1, 0.2, 0.9, 0.9, 0.8])
    labels, folds = torch.tensor([0, 0, 1, 1, 1, 0]), torch.tensor([0, 1, 2, 0, 1, 2])
    found = tc.relative_calibration_loss(
        halves, labels, task="binary", calibrator=tc.HistogramBinning(n_bins=2), folds=folds
    )
    # only the calibrated score is infinite: the bin of the positive sample has frequency 0 of 2
    assert found == -math.inf


@pytest.mark.parametrize("score", ["nll", "brier", F.nll, F.bayes_risk])
@pytest.mark.parametrize("n", [0, 6])
def test_losses_without_data_are_nan(score, n):
    preds, target = torch.full((n,), 0.3), torch.zeros(n, dtype=torch.int64)
    given = {"task": "binary", "weights": torch.zeros(n), "score": score}
    assert tc.calibration_loss(preds, target, **given).isnan()
    assert tc.relative_calibration_loss(preds, target, **given).isnan()
    assert all(value.isnan() for value in tc.score_divergence(preds, target, **given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positive_classes_are_accurate_if_their_probability_rounds_to_1(dtype):
    """Probabilities of a set of classes and of its complement give the same loss as their logarithms."""
    logits, target = data(100)
    logits[0], target[0] = torch.tensor([30.0, 0, -1, 29]), 1  # P(class 0 or 3) rounds to 1
    probs = logits.softmax(-1).to(dtype)
    of_logits = partial(
        tc.relative_calibration_loss,
        probs.double().log(),
        target,
        task="multiclass",
        from_logits=True,
        folds=turns(100),
    )
    of_probs = partial(tc.relative_calibration_loss, probs, target, task="multiclass", folds=turns(100))
    tolerance = 100 * torch.finfo(dtype).eps  # rows of probabilities sum to 1 up to the rounding of their dtype
    for calibrator in ALL[:3]:
        for classes in ([0, 3], [1, 2]):
            given = {"positive_classes": classes, "calibrator": calibrator}
            assert of_probs(**given).item() == pytest.approx(of_logits(**given).item(), abs=tolerance)
    given = {"task": "multiclass", "positive_classes": [0, 3], "train_on_test": True}
    calibrated = tc.cross_val_calibrate(probs, target, **given)
    fitted = fresh(D).fit(probs, target, task="multiclass", positive_classes=[0, 3])
    torch.testing.assert_close(calibrated[1:], fitted(probs[1:]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("function", [tc.calibration_loss, tc.relative_calibration_loss])
def test_batches_labels_and_class_axes_equal_a_loop(function):
    logits, target = data(80, 4, lead=(2,))
    expected = [function(*series, seed=3, **multi).item() for series in zip(logits, target, strict=True)]
    assert function(logits, target, seed=3, batch_dims=1, **multi).tolist() == pytest.approx(expected, abs=1e-7)
    turned = function(logits[0].T, target[0], class_axis=0, seed=3, **multi)
    assert turned.item() == pytest.approx(expected[0], abs=1e-9)
    logs = logits[0].log_softmax(-1)
    inside = logs[:, [1, 3]].logsumexp(-1) - logs[:, [0, 2]].logsumexp(-1)
    given = {"folds": turns(80)}
    of_set = function(logits[0], target[0], positive_classes=[1, 3], **given, **multi)
    assert of_set.item() == pytest.approx(function(inside, target[0] % 2, **given, **binary).item(), abs=1e-8)
    logits, target = single(80, lead=(3,))
    for of in (tc.calibration_loss, lambda *data, **options: tc.score_divergence(*data, **options).divergence):
        values = [of(*label, **given, **binary) for label in zip(logits, target, strict=True)]
        found = of(logits.T, target.T, task="multilabel", from_logits=True, **given)
        assert found.item() == pytest.approx(torch.stack(values).mean().item(), abs=1e-9)


def test_integer_weights_equal_repeated_rows_and_ignored_rows_have_no_effect():
    logits, target = data(80, 3)
    counts, folds = torch.arange(80) * 7 % 4, turns(80)
    repeats, labels, of_repeats = (x.repeat_interleave(counts, 0) for x in (logits, target, folds))
    expected = tc.relative_calibration_loss(repeats, labels, folds=of_repeats, **multi).item()
    gone = counts == 0
    unread, no_label = logits.masked_fill(gone[:, None], math.nan), target.masked_fill(gone, -1)
    found = tc.relative_calibration_loss(unread, no_label, weights=counts, folds=folds, **multi)
    assert found.item() == pytest.approx(expected, abs=1e-8)
    expected = tc.relative_calibration_loss(logits[~gone], target[~gone], folds=folds[~gone], **multi)
    found = tc.relative_calibration_loss(logits, no_label, ignore_index=-1, folds=folds, **multi)
    assert found.item() == pytest.approx(expected.item(), abs=1e-8)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        value = tc.relative_calibration_loss(logits.to(dtype), target, **multi)
        assert value.dtype == torch.promote_types(dtype, torch.float32)
        assert value.item() == pytest.approx(
            tc.relative_calibration_loss(logits.to(dtype).double(), target, **multi).item(), abs=2e-3
        )


@pytest.mark.parametrize("calibrator", [*ALL, *OF_CLASSES], ids=name)
def test_vmap_of_a_loss_equals_its_batch(calibrator):
    logits, target = data(60, 3, lead=(3,)) if calibrator in OF_CLASSES else single(60, lead=(3,))
    task = multi if calibrator in OF_CLASSES else binary

    def loss(logits, target, **options):
        given = {"score": "brier", "calibrator": calibrator, "train_on_test": True, **task, **options}
        return tc.calibration_loss(logits, target, **given)

    # A fit of vector or structured scaling ends within 1e-9 of a gradient of 0.
    close = partial(torch.allclose, rtol=0, atol=1e-8 if calibrator in OF_CLASSES else 1e-12)
    expected = loss(logits, target, batch_dims=1)
    assert close(torch.vmap(loss)(logits, target), expected)
    assert close(torch.vmap(loss, in_dims=(1, 1))(logits.movedim(0, 1), target.T), expected)
    logits[1, 5] = math.nan
    assert torch.vmap(loss)(logits, target).isnan().tolist() == [False, True, False]


def test_a_fit_compiles_to_one_operation():
    """An unrolled fit took minutes to trace."""
    logits, target = data(60, 3)
    p = D.read(logits, target, task="multiclass", options={"from_logits": True})
    given = p.values[None], p.target[None], torch.ones(2, 1, 60, dtype=torch.float64)
    found = torch.compile(fit_affine, fullgraph=True, backend="eager")(*given)
    for a, b in zip(found, fit_affine(*given), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)  # a fit ends within 1e-9 of its optimum


# Expected score under a reference distribution


def slow_expected_score(of, q, t, w, priors=None, normalize=None):
    """Mean over samples of sum_k t_k of(q, k), with the weight w_i of a sample times the ratio of the class priors."""
    classes, total = range(len(q[0])), math.fsum(w)
    share = [math.fsum(wi * row[k] for wi, row in zip(w, t, strict=True)) / total for k in classes]
    priors = priors or share
    joint = [[wi / total * row[k] * priors[k] / share[k] for k in classes] for wi, row in zip(w, t, strict=True)]
    value = math.fsum(j[k] * of(row, k) for row, j in zip(q, joint, strict=True) for k in classes)
    return value / math.fsum(priors[k] * of(priors, k) for k in classes) if normalize else value


COST = [[0.0, 1.0, 0.3], [2.0, 0.0, 0.3], [1.0, 4.0, 0.3]]


def risk_of(row, k):
    costs = [math.fsum(q * row_of[d] for q, row_of in zip(row, COST, strict=True)) for d in range(3)]
    return COST[k][costs.index(min(costs))]


EXPECTED = {
    "nll": ("nll", lambda row, k: -math.log(row[k])),
    "brier": ("brier", lambda row, k: math.fsum((q - (j == k)) ** 2 for j, q in enumerate(row))),
    "function": (F.nll, lambda row, k: -math.log(row[k])),
    "risk": (partial(F.bayes_risk, cost=COST), risk_of),
}


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("reference", ["labels", "soft targets", "calibrator"])
def test_expected_score_under_a_reference_equals_a_loop(reference, name):
    """[EPSR] sec. 3.4: empirical, true and semi-empirical reference, also with other priors and normalised."""
    logits, target = data(50, 3)
    weights = 0.5 + torch.rand(50, dtype=torch.float64)
    given = {"weights": weights, **multi}
    if reference == "labels":
        t = torch.nn.functional.one_hot(target, 3).double()
    elif reference == "soft targets":
        t = target = torch.rand(50, 3, dtype=torch.float64).softmax(-1)
    else:
        trained = {"calibrator": T, "folds": turns(50)}
        t = tc.cross_val_calibrate(logits, target, **trained, **given).softmax(-1)
        given |= {"reference": T, "folds": turns(50)}
    score, of = EXPECTED[name]
    for options in ({}, {"normalize": "prior"}, {"priors": [0.2, 0.5, 0.3]}):
        expected = slow_expected_score(of, logits.softmax(-1).tolist(), t.tolist(), weights.tolist(), **options)
        found = tc.expected_score(logits, target, score=score, **options, **given)
        assert found.item() == pytest.approx(expected, rel=1e-9)


def test_expected_score_equals_the_metrics_and_their_normalised_forms():
    logits, target = single(80)
    both = {"priors": [0.3, 0.7], "normalize": "prior"}
    given = {"weights": torch.rand(80, dtype=torch.float64), **binary}
    for score, function in (("nll", F.nll), ("brier", F.brier_score)):
        x = logits.clone().requires_grad_()
        found, expected = (
            tc.expected_score(x, target, score=score, **both, **given),
            function(x, target, **both, **given),
        )
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (found, expected)))
        found = tc.score_divergence(logits, target, score=score, folds=turns(80), **given).semi_empirical
        same = tc.expected_score(logits, target, score=score, reference=D, folds=turns(80), **given)
        torch.testing.assert_close(same, found)
    pairs = torch.stack((logits, -logits / 2), -1), torch.stack((target, 1 - target), -1)
    labels = {"task": "multilabel", "from_logits": True, "normalize": "prior"}
    for score in ("brier", F.brier_score):
        torch.testing.assert_close(tc.expected_score(*pairs, score=score, **labels), F.brier_score(*pairs, **labels))
    copies = torch.randint(0, 3, (4, 80))
    found = tc.expected_score(logits, target, weights=copies, normalize="prior", **binary)
    torch.testing.assert_close(found, F.nll(logits, target, weights=copies, normalize="prior", **binary))


# Expected score divergence


@pytest.mark.parametrize("score", ["nll", "brier", F.nll])
def test_divergence_with_replicate_weights_equals_a_loop(score):
    logits, target = data(60, 3)
    weights = 1 + torch.arange(180).reshape(3, 60) % 7
    call = partial(tc.score_divergence, logits, target, score=score, folds=turns(60), **multi)
    expected = zip(*(call(weights=row) for row in weights), strict=True)
    for found, loop in zip(call(weights=weights), expected, strict=True):
        assert found.allclose(torch.stack(loop), atol=1e-9)
    if score is F.nll:
        assert all(map(partial(torch.allclose, atol=1e-12), call(weights=weights), call(weights=weights, score="nll")))


@pytest.mark.parametrize("cost", [[[0, 1e16], [1, 0]], [[0, 1], [1e16, 0]]])
def test_rare_costly_errors_of_saturated_logits_have_the_closed_form(cost):
    """The data are separable, so that predictions stay unchanged: an error with probability e^-|z| costs 1e16."""
    logits = torch.tensor([40.0, -40, 40, -40, 38, -38], dtype=torch.float64)
    target = torch.tensor([1, 0, 1, 0, 1, 0])
    options = {"score": partial(F.bayes_risk, cost=cost), "train_on_test": True}
    with pytest.warns(UserWarning, match="separated without error"):
        found = tc.score_divergence(logits, target, **options, **binary)
    assert found.semi_empirical.item() == pytest.approx(1e16 * (2 * math.exp(-40) + math.exp(-38)) / 6, rel=1e-9)
    with pytest.warns(UserWarning, match="separated without error"):
        classes = tc.score_divergence(torch.stack((0 * logits, logits), -1), target, **options, **multi)
    assert classes.semi_empirical.item() == pytest.approx(found.semi_empirical.item(), rel=1e-9)
