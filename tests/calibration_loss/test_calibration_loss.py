"""Calibration loss: against slow loops over folds, closed forms and laws; folds; wrong calls."""

import math
from functools import partial

import pytest
import torch
from calibrators.test_calibrators import data, single

import torchcalib as tc
from torchcalib.calibration_loss.folds import folds_of
from torchcalib.calibration_loss.recommendation import recommendation_of
from torchcalib.kernels.newton import fit_dp
from torchcalib.predictions import read_input

T, D, H, ISO = tc.Temperature(), tc.DPCalibration(), tc.HistogramBinning(n_bins=5), tc.Isotonic()
multi = {"task": "multiclass", "from_logits": True}
binary = {"task": "binary", "from_logits": True}


def dealt(target, n_classes=2, weights=None, **options):
    preds = torch.full((*target.shape, n_classes), 1 / n_classes)
    return folds_of(read_input("multiclass", preds, target, {"weights": weights}), options)[0]


def turns(n, n_folds=5):
    return torch.arange(n) % n_folds


# --------------------------------------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("calibrator", [T, D, H, ISO], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("score", ["nll", "brier"])
def test_cross_validated_loss_is_a_loop_over_folds(calibrator, score):
    logits, target = single(100)
    folds = turns(100)
    after = torch.empty_like(logits)
    for f in range(5):
        fit = calibrator.fit(logits[folds != f], target[folds != f], **binary)
        after[folds == f] = fit(logits[folds == f])
    function = {"nll": tc.nll, "brier": tc.brier_score}[score]
    raw, cal = function(logits, target, **binary), function(after, target, **binary)
    given = {"score": score, "calibrator": calibrator, "folds": folds, **binary}
    assert tc.calibrated(logits, target, calibrator=calibrator, folds=folds, **binary).allclose(after, atol=1e-8)
    assert tc.calibration_loss(logits, target, **given).item() == pytest.approx((raw - cal).item(), abs=1e-9)
    assert tc.rcl(logits, target, **given).item() == pytest.approx((100 * (1 - cal / raw)).item(), abs=1e-7)


def test_trained_on_test_loss_is_a_fit_and_a_difference():
    logits, target = data(100, 3)
    after = tc.nll(D.fit(logits, target, **multi)(logits), target, **multi)
    loss = tc.calibration_loss(logits, target, train_on_test=True, **multi)
    assert loss.item() == pytest.approx((tc.nll(logits, target, **multi) - after).item(), abs=1e-14)
    assert loss >= 0


def test_held_out_loss_is_a_fit_to_the_other_set():
    logits, target = data(100, 3)
    other, labels = data(50, 3, seed=1)
    weights = torch.arange(50.0)
    after = D.fit(other, labels, weights=weights, **multi)(logits)
    found = tc.calibrated(logits, target, calibration=(other, labels, weights), **multi)
    assert found.allclose(after, atol=1e-12)
    unweighted = tc.calibrated(logits, target, calibration=(other, labels), weights=torch.rand(100), **multi)
    assert unweighted.allclose(D.fit(other, labels, **multi)(logits), atol=1e-12)


def test_closed_form_of_two_scores():
    """Log-odds -1 and 1 with 1 and 3 ones of 4: calibrated NLL is the entropy of 1/4."""
    logits, target = torch.tensor([-1.0] * 4 + [1.0] * 4), torch.tensor([1, 0, 0, 0, 1, 1, 1, 0])
    raw = 0.75 * math.log1p(math.exp(-1)) + 0.25 * math.log1p(math.e)
    entropy = -0.25 * math.log(0.25) - 0.75 * math.log(0.75)
    given = {"calibrator": T, "train_on_test": True, **binary}
    assert tc.calibration_loss(logits, target, **given).item() == pytest.approx(raw - entropy, abs=1e-6)
    assert tc.rcl(logits, target, **given).item() == pytest.approx(100 * (1 - entropy / raw), abs=1e-4)


def test_infinite_scores_have_a_relative_loss():
    preds = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5, 0.5])
    target = torch.tensor([0, 1, 1, 1, 0, 1])
    given = {"task": "binary", "train_on_test": True}
    assert tc.rcl(preds, target, calibrator=tc.HistogramBinning(n_bins=3), **given) == 100  # only raw is infinite
    assert tc.rcl(preds, target, **given).isnan()  # under DP the sample that was excluded stays so
    halves = torch.tensor([0.1, 0.1, 0.2, 0.9, 0.9, 0.8])
    labels, folds = torch.tensor([0, 0, 1, 1, 1, 0]), torch.tensor([0, 1, 2, 0, 1, 2])
    found = tc.rcl(halves, labels, task="binary", calibrator=tc.HistogramBinning(n_bins=2), folds=folds)
    assert found == -math.inf  # only calibrated is infinite: 0 of 2 in the bin of the one that is 1


def test_any_function_is_a_score():
    logits, target = data(80, 3)

    def error(preds, target, *, task, from_logits):
        return (preds.argmax(-1) != target).double().mean(-1)

    folds = turns(80)
    after = tc.calibrated(logits, target, folds=folds, **multi)
    expected = error(logits, target, **multi) - error(after, target, **multi)
    assert tc.calibration_loss(logits, target, score=error, folds=folds, **multi) == expected
    ece = tc.calibration_loss(logits, target, score=partial(tc.ece, n_bins=5), train_on_test=True, **multi)
    assert 0 < ece < 1


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


@pytest.mark.parametrize("score", ["nll", "brier", tc.nll, tc.bayes_risk])
@pytest.mark.parametrize("n", [0, 6])
def test_no_data_give_nan(score, n):
    preds, target = torch.full((n,), 0.3), torch.zeros(n, dtype=torch.int64)
    given = {"task": "binary", "weights": torch.zeros(n), "score": score}
    assert tc.calibration_loss(preds, target, **given).isnan()
    assert tc.rcl(preds, target, **given).isnan()
    assert all(value.isnan() for value in tc.score_divergence(preds, target, **given))


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


def test_law_after_dp_on_the_test_set_semi_empirical_is_empirical():
    """By the first-order conditions of the fit: sum_k t_k log q_k has the mean of log q_h."""
    logits, target = data(200, 3)
    found = tc.score_divergence(logits, target, train_on_test=True, **multi)
    assert found.semi_empirical.item() == pytest.approx(tc.nll(logits, target, **multi).item(), abs=1e-9)
    loss = tc.calibration_loss(logits, target, train_on_test=True, **multi)
    assert found.divergence.item() == pytest.approx(loss.item(), abs=1e-9)


# --------------------------------------------------------------------------------------------------------------------
# Laws


@pytest.mark.parametrize("function", [tc.calibration_loss, tc.rcl])
def test_law_a_batch_is_a_loop(function):
    logits, target = data(80, 3, lead=(2, 2))
    batched = function(logits, target, seed=3, **multi)
    for i in range(2):
        for j in range(2):
            one = function(logits[i, j], target[i, j], seed=3, **multi)
            assert batched[i, j].item() == pytest.approx(one.item(), abs=1e-7)


def test_law_integer_weights_are_repeats_that_share_a_fold():
    logits, target = data(80, 3)
    counts = torch.randint(0, 4, (80,), generator=torch.Generator().manual_seed(1))
    repeats = [x.repeat_interleave(counts, 0) for x in (logits, target, turns(80))]
    weighted = tc.rcl(logits, target, weights=counts, folds=turns(80), **multi)
    assert weighted.item() == pytest.approx(tc.rcl(repeats[0], repeats[1], folds=repeats[2], **multi).item(), abs=1e-8)


def test_law_labels_are_averaged():
    logits, target = single(80, lead=(3,))
    folds = turns(80)
    values = [tc.calibration_loss(logits[k], target[k], folds=folds, **binary) for k in range(3)]
    found = tc.calibration_loss(logits.T, target.T, task="multilabel", from_logits=True, folds=folds)
    assert found.item() == pytest.approx(torch.stack(values).mean().item(), abs=1e-9)
    divergences = [tc.score_divergence(logits[k], target[k], folds=folds, **binary).divergence for k in range(3)]
    label = tc.score_divergence(logits.T, target.T, task="multilabel", from_logits=True, folds=folds).divergence
    assert label.item() == pytest.approx(torch.stack(divergences).mean().item(), abs=1e-9)


def test_law_absent_rows_do_not_matter():
    logits, target = data(80, 3)
    more = torch.cat((logits, torch.full((5, 3), math.nan)))
    labels = torch.cat((target, torch.full((5,), -1)))
    folds = turns(85)
    plain = tc.rcl(logits, target, folds=folds[:80], **multi)
    ignored = tc.rcl(more.nan_to_num(0), labels, ignore_index=-1, folds=folds, **multi)
    assert ignored.item() == pytest.approx(plain.item(), abs=1e-8)
    weights = (labels >= 0).float()
    assert tc.rcl(more, labels, weights=weights, folds=folds, **multi).item() == pytest.approx(plain.item(), abs=1e-8)


def test_law_classes_may_stand_on_any_axis_and_be_a_set():
    logits, target = data(80, 4)
    plain = tc.rcl(logits, target, folds=turns(80), **multi)
    assert tc.rcl(logits.T, target, class_axis=0, folds=turns(80), **multi).item() == pytest.approx(plain.item())
    assert tc.calibrated(logits.T, target, class_axis=0, **multi).shape == (4, 80)
    inside = logits.log_softmax(-1)[:, [1, 3]].logsumexp(-1) - logits.log_softmax(-1)[:, [0, 2]].logsumexp(-1)
    of_set = tc.rcl(logits, target, positive_classes=[1, 3], folds=turns(80), **multi)
    assert of_set.item() == pytest.approx(tc.rcl(inside, target % 2, folds=turns(80), **binary).item(), abs=1e-8)


def test_gradient_in_the_predictions_at_a_fixed_transform():
    logits, target = data(30, 3)
    transform = D.fit(logits, target, **multi)
    x = logits.clone().requires_grad_()
    tc.calibration_loss(x, target, train_on_test=True, **multi).backward()
    y = logits.clone().requires_grad_()
    (tc.nll(y, target, **multi) - tc.nll(transform(y), target, **multi)).backward()
    assert x.grad.allclose(y.grad, atol=1e-14)


@pytest.mark.parametrize("calibrator", [T, D, H, ISO], ids=lambda c: type(c).__name__)
def test_fits_map(calibrator):
    logits, target = single(60, lead=(3,))

    def loss(logits, target):
        return tc.calibration_loss(logits, target, score="brier", calibrator=calibrator, train_on_test=True, **binary)

    expected = loss(logits, target)
    assert torch.vmap(loss)(logits, target).allclose(expected, atol=1e-12)
    assert torch.vmap(loss, in_dims=(1, 1))(logits.T, target.T).allclose(expected, atol=1e-12)
    spoiled = logits.masked_fill(torch.arange(60) + torch.zeros(3, 1) == torch.tensor([[-1], [5], [-1]]), math.nan)
    assert torch.vmap(loss)(spoiled, target).isnan().tolist() == [False, True, False]


def test_a_fit_compiles_to_one_operation():
    """Unrolled, its rounds took minutes to trace."""
    logits, target = data(60, 3)
    p = D.read(logits, target, task="multiclass", options={"from_logits": True})
    weights = torch.ones(2, 1, 60, dtype=torch.float64)
    expected = fit_dp(p.values[None], p.target[None], weights)
    found = torch.compile(fit_dp, fullgraph=True, backend="eager")(p.values[None], p.target[None], weights)
    for name, a, b in zip(expected._fields, found, expected, strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_have_the_dtype_of_the_predictions(dtype):
    logits, target = data(60, 3, dtype=dtype)
    value = tc.rcl(logits, target, **multi)
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    assert value.item() == pytest.approx(tc.rcl(logits.double(), target, **multi).item(), abs=2e-3)


# --------------------------------------------------------------------------------------------------------------------
# Folds


def test_folds_hold_every_class_alike():
    target = torch.tensor([0] * 33 + [1] * 12 + [2] * 7)
    folds = dealt(target, 3, n_folds=5)
    counts = torch.zeros(5, 3).index_put_((folds, target), torch.ones(52), accumulate=True)
    assert (counts.amax(0) - counts.amin(0) <= 1).all()
    assert counts.sum(1).amax() - counts.sum(1).amin() <= 1


def test_folds_come_from_the_seed_alone():
    target = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(dealt(target, 3, seed=1), dealt(target, 3, seed=1))
    assert not torch.equal(dealt(target, 3, seed=1), dealt(target, 3, seed=2))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    dealt(target, 3)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_of_weight_0_take_no_turn():
    target = torch.tensor([0, 1] * 20)
    weights = torch.ones(40)
    weights[20:] = 0
    folds = dealt(target, weights=weights)[:20]
    assert torch.bincount(folds).tolist() == [4] * 5


def test_groups_are_kept_whole_and_spread():
    g = torch.Generator().manual_seed(2)
    groups = torch.randint(0, 40, (400,), generator=g)
    target = torch.randint(0, 3, (400,), generator=g)
    folds = dealt(target, 3, groups=groups)
    for k in range(40):
        assert folds[groups == k].unique().numel() == 1
    assert (torch.bincount(folds) - 80).abs().max() <= 8
    batch = dealt(torch.stack((target, target.flip(0))), 3, groups=groups)
    assert torch.equal(batch[0], folds)
    assert torch.equal(batch[1], dealt(target.flip(0), 3, groups=groups))


def test_folds_may_have_any_numbers():
    logits, target = data(60, 3)
    numbers = torch.tensor([-7, 3, 900])[turns(60, 3)]
    found = tc.rcl(logits, target, folds=numbers, **multi)
    assert found.item() == pytest.approx(tc.rcl(logits, target, folds=turns(60, 3), **multi).item(), abs=1e-12)


# --------------------------------------------------------------------------------------------------------------------
# Words


def shifted(scale, shift, n=2000):
    """Predictions that are off by a factor and by a shift."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(n, generator=g, dtype=torch.float64)
    return scale * logits + shift, (torch.rand(n, generator=g) < logits.sigmoid()).long()


def test_words_for_predictions_that_need_a_bias():
    found = tc.recommend(*shifted(2, 3), **binary)
    temperature, dp = found.rcl["temperature scaling"], found.rcl["DP calibration"]
    assert found.best == "DP calibration"
    assert found.text == (
        f"Calibration would cut NLL by {dp:.1f} %: add DP calibration; temperature scaling gains {temperature:.1f} %."
    )
    assert dp == pytest.approx(tc.rcl(*shifted(2, 3), **binary).item())


def test_words_for_predictions_that_are_too_sure():
    found = tc.recommend(*shifted(4, 0), score="brier", **binary)
    assert found.best == "temperature scaling"
    assert found.text.startswith("Calibration would cut Brier score by ")
    assert "add temperature scaling; DP calibration gains" in found.text


def test_words_for_bayes_risk():
    found = tc.recommend(*shifted(2, 3), score=partial(tc.bayes_risk, cost=[[0, 1], [2, 0]]), **binary)
    assert found.score == "bayes_risk"
    assert found.text.startswith("Calibration would cut Bayes risk by ")


def test_calibrators_of_one_kind_are_told_apart():
    few, many = tc.HistogramBinning(n_bins=2), tc.HistogramBinning(n_bins=20)
    found = tc.recommend(*shifted(4, 0), calibrators=[T, few, many], score="brier", **binary)
    assert list(found.rcl) == ["temperature scaling", repr(few), repr(many)]


@pytest.mark.parametrize(
    ("gains", "best"),
    [((10.0, 10.9), 0), ((10.0, 11.1), 1), ((-10.0, -10.5), 0), ((-10.0, -9.9), 1), ((-3.0, 2.0), 1),
     ((math.nan, 20.0), 1), ((20.0, math.nan), 0), ((-math.inf, -1.0), 1), ((-math.inf, -math.inf), 0)],
)  # fmt: skip
def test_a_later_calibrator_must_gain_more(gains, best):
    """A tenth more; and of two that harm, the one that harms less is named."""
    found = recommendation_of("nll", 1.0, dict(zip("ab", gains, strict=True)), worthwhile=-math.inf)
    assert found.best == "ab"[best]


def test_words_for_calibrated_predictions():
    found = tc.recommend(*shifted(1, 0), **binary)
    assert found.best is None
    assert found.text.endswith("leave the predictions as they are.")
    assert max(found.rcl.values()) < 5
    slight = tc.recommend(*shifted(1.4, 0), **binary)
    assert 0 < max(slight.rcl.values()) < 5
    assert " % only (temperature scaling): leave" in slight.text


# --------------------------------------------------------------------------------------------------------------------
# Wrong calls

P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9, 0.3, 0.6]), torch.tensor([0, 1, 1, 1, 0, 0])
CALLS = [
    ("one fold", {"n_folds": 1}, ValueError, "`n_folds` must be at least 2"),
    ("half a fold", {"n_folds": 2.5}, TypeError, "`n_folds` must be an int"),
    ("seed is text", {"seed": "a"}, TypeError, "`seed` must be an int"),
    ("seed of 70 bits", {"seed": 2**70}, ValueError, "`seed` must fit in 64 bits"),
    ("seed is True", {"seed": True}, TypeError, "`seed` must be an int"),
    ("folds of another length", {"folds": torch.arange(5)}, ValueError, "`folds` must have one number per sample"),
    ("folds are floats", {"folds": P}, TypeError, "`folds` must be a tensor of integers"),
    ("folds are a list", {"folds": [0, 1, 0, 1, 0, 1]}, TypeError, "`folds` must be a tensor of integers"),
    ("folds are all one", {"folds": torch.zeros(6, dtype=torch.int64)}, ValueError, "at least 2 folds"),
    ("folds leave a class out", {"folds": Y}, ValueError, "`folds` must leave samples of every class"),
    ("groups leave a class out", {"groups": Y}, ValueError, "`groups` must leave samples of every class"),
    ("groups of another length", {"groups": torch.arange(7)}, ValueError, "`groups` must have one number per sample"),
    ("groups are floats", {"groups": P}, TypeError, "`groups` must be a tensor of integers"),
    ("groups and folds", {"groups": turns(6), "folds": turns(6, 2)}, ValueError, "`groups` must be None"),
    ("train_on_test is a number", {"train_on_test": 1}, TypeError, "`train_on_test` must be True or False"),
    ("test and calibration", {"train_on_test": True, "calibration": (P, Y)}, ValueError, "`calibration` must be None"),
    ("folds and test", {"train_on_test": True, "folds": turns(6, 2)}, ValueError, "`folds` must be left out"),
    ("seed and calibration", {"calibration": (P, Y), "seed": 3}, ValueError, "`seed` must be left out"),
    ("calibration is a tensor", {"calibration": P}, TypeError, r"`calibration` must be \(preds, target\)"),
    ("calibration of one", {"calibration": (P,)}, TypeError, r"`calibration` must be \(preds, target\)"),
    ("calibration of no samples", {"calibration": (P[:0], Y[:0])}, ValueError, "`calibration` must have samples"),
    ("calibration of no weight", {"calibration": (P, Y, 0 * P)}, ValueError, "`calibration` must have samples"),
    ("calibration of another shape", {"calibration": (P[None], Y[None])}, ValueError, "`calibration` must have"),
    ("calibration with bad values", {"calibration": (3 * P, Y)}, ValueError, "from_logits=True"),
    ("calibrator is a class", {"calibrator": tc.Temperature}, TypeError, "`calibrator` must be"),
    ("calibrator is text", {"calibrator": "dp"}, TypeError, "`calibrator` must be"),
    ("unknown score", {"score": "log"}, ValueError, "`score` must be 'nll', 'brier'"),
    ("unknown option", {"shuffle": True}, TypeError, "shuffle"),
    ("soft targets", {"target": P}, TypeError, "`target` must be integer labels"),
    ("logits", {"preds": 9 * P}, ValueError, "from_logits=True"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "part"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS])
@pytest.mark.parametrize("function", [tc.calibration_loss, tc.rcl, tc.score_divergence])
def test_wrong_call(function, options, error, part):
    with pytest.raises(error, match=part):
        function(**{"preds": P, "target": Y, "task": "binary", "n_folds": 2, "seed": 0} | options
                 if not {"calibration", "train_on_test"} & options.keys()
                 else {"preds": P, "target": Y, "task": "binary"} | options)  # fmt: skip


def test_a_class_of_one_sample_cannot_be_cross_validated():
    with pytest.raises(ValueError, match=r"at least 2 samples of every class.*got 1 of class 1"):
        tc.rcl(P, torch.tensor([0, 1, 0, 0, 0, 0]), task="binary")


@pytest.mark.parametrize("trained", [{}, {"train_on_test": True}, {"calibration": (P, (P > 0.5).long())}],
                         ids=["cross-validated", "on test", "held out"])  # fmt: skip
def test_separable_labels_are_warned_of_where_the_function_was_called(trained):
    separable = torch.tensor([0, 1, 0, 1, 0, 1])  # by 0.5: no scale is too large
    given = {"preds": P, "target": separable, "task": "binary", "calibrator": tc.Temperature(), **trained}
    given |= {"n_folds": 3} if not trained else {}
    for function in (tc.rcl, tc.calibration_loss, tc.calibrated, lambda **g: tc.score_divergence(**g).divergence):
        with pytest.warns(UserWarning, match="can be separated without error") as warned:
            found = function(**given)
        assert [warning.filename for warning in warned] == [__file__]
        assert torch.equal(found, P if function is tc.calibrated else torch.zeros_like(found))
    del given["calibrator"]
    with pytest.warns(UserWarning, match="can be separated without error") as warned:
        assert tc.recommend(**given).best is None
    assert len(warned) == 2  # temperature and DP calibration


def test_separable_replicates_are_not_warned_of():
    weights = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])  # without the two samples that overlap
    found = tc.rcl(P, Y, task="binary", train_on_test=True, weights=weights)
    assert found[0] == pytest.approx(tc.rcl(P, Y, task="binary", train_on_test=True).item())
    assert found[1] == 0


def test_wrong_recommendations():
    with pytest.raises(ValueError, match="`calibrators` must hold"):
        tc.recommend(P, Y, task="binary", calibrators=[])
    with pytest.raises(ValueError, match="`preds` must be of one series"):
        tc.recommend(P[None], Y[None], task="binary", train_on_test=True)
    with pytest.raises(ValueError, match="`score` must be 'nll' or 'brier' for task='multilabel'"):
        tc.score_divergence(P[:, None], Y[:, None], task="multilabel", score=tc.nll, train_on_test=True)
