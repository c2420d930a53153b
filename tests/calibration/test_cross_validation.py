"""Cross-validation: folds, wrong calls, and warnings that point to the caller."""

import inspect
from functools import partial

import pytest
import torch
from helpers.fits import data, multi, turns
from helpers.refusals import assert_refused

import torchcalib.functional as F
from torchcalib.calibration import (
    AffineScaling,
    TemperatureScaling,
    calibration_loss,
    cross_val_calibrate,
    recommend,
    relative_calibration_loss,
    score_divergence,
)
from torchcalib.calibration.cross_validation import folds_of
from torchcalib.core.inputs import read_input

P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9, 0.3, 0.6]), torch.tensor([0, 1, 1, 1, 0, 0])


CALLS = [
    ("one fold", {"n_folds": 1}, ValueError, "`n_folds` must be at least 2"),
    ("seed of 70 bits", {"seed": 2**70}, ValueError, "`seed` must fit in 64 bits"),
    ("folds of another length", {"folds": torch.arange(5)}, ValueError, "`folds` must have one number per sample"),
    ("folds are floats", {"folds": P}, TypeError, "`folds` must be a tensor of integers"),
    ("folds are all one", {"folds": torch.zeros(6, dtype=torch.int64)}, ValueError, "at least 2 folds"),
    ("folds leave a class out", {"folds": Y}, ValueError, "`folds` must leave samples of every class"),
    ("groups leave a class out", {"groups": Y}, ValueError, "`groups` must leave samples of every class"),
    ("groups and folds", {"groups": turns(6), "folds": turns(6, 2)}, ValueError, "`groups` must be None"),
    ("train_on_test is a number", {"train_on_test": 1}, TypeError, "`train_on_test` must be True or False"),
    ("test and calibration", {"train_on_test": True, "calibration": (P, Y)}, ValueError, "`calibration` must be None"),
    ("folds and test", {"train_on_test": True, "folds": turns(6, 2)}, ValueError, "`folds` must be left out"),
    ("seed and calibration", {"calibration": (P, Y), "seed": 3}, ValueError, "`seed` must be left out"),
    ("calibration of one", {"calibration": (P,)}, TypeError, "`calibration` must be (preds, target)"),
    ("calibration of no weight", {"calibration": (P, Y, 0 * P)}, ValueError, "`calibration` must have samples"),
    ("calibration of other classes", {"calibration": (P[None], Y[:5])}, ValueError, "`target` must have the shape"),
    ("calibration with bad values", {"calibration": (3 * P, Y)}, ValueError, "from_logits=True"),
    ("calibrator is a class", {"calibrator": TemperatureScaling}, TypeError, "`calibrator` must be"),
    ("unknown score", {"score": "log"}, ValueError, "`score` must be 'nll', 'brier'"),
    ("soft targets", {"target": P}, TypeError, "`target` must be integer labels"),
]  # fmt: skip


@pytest.mark.parametrize("trained", [{"n_folds": 3}, {"train_on_test": True}, {"calibration": (P, (P > 0.5).long())}])
def test_separable_labels_give_a_warning_at_the_line_of_the_caller(trained):
    separable = torch.tensor([0, 1, 0, 1, 0, 1])  # separable at 0.5: the likelihood rises with the scale without limit
    given = {"preds": P, "target": separable, "task": "binary", **trained}
    for function in (
        relative_calibration_loss,
        calibration_loss,
        cross_val_calibrate,
        lambda **g: score_divergence(**g).divergence,
    ):
        with pytest.warns(UserWarning, match="can be separated without error") as warned:
            found = function(calibrator=TemperatureScaling(), **given)
        assert [warning.filename for warning in warned] == [__file__]
        assert torch.equal(found, P if function is cross_val_calibrate else torch.zeros_like(found))
    with pytest.warns(UserWarning, match="can be separated without error") as warned:
        assert recommend(calibrators=[TemperatureScaling(), AffineScaling()], **given).best is None
    assert len(warned) == 2  # temperature and affine scaling


def test_separable_replicates_give_no_warning():
    # the second replicate drops the two samples that overlap
    weights = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])
    rcl = partial(relative_calibration_loss, P, Y, task="binary", train_on_test=True)
    assert rcl(weights=weights).tolist() == pytest.approx([rcl().item(), 0])


@pytest.mark.parametrize("function", [calibration_loss, relative_calibration_loss, score_divergence])
def test_wrong_calls_raise_errors(function):
    rows = []
    for what, options, error, part in CALLS:
        folds = {} if options.keys() & {"calibration", "train_on_test"} else {"n_folds": 2, "seed": 0}
        call = partial(function, **{"preds": P, "target": Y, "task": "binary"} | folds | options)
        rows.append((what, call, error, [part]))
    assert_refused(rows)


def test_wrong_calls_of_single_functions_raise_errors():
    labels = {"preds": P[:, None], "target": Y[:, None], "task": "multilabel", "score": F.nll, "train_on_test": True}
    wrong = [
        (relative_calibration_loss, {"target": torch.tensor([0, 1, 0, 0, 0, 0])}, "at least 2 samples of every class"),
        (recommend, {"calibrators": []}, "`calibrators` must contain"),
        (recommend, {"preds": P[None], "target": Y[None], "batch_dims": 1}, "`preds` must have no batch axes"),
        (score_divergence, labels, "`score` must be 'nll' or 'brier' for task='multilabel'"),
    ]
    given = {"preds": P, "target": Y, "task": "binary"}
    assert_refused((row, partial(call, **{**given, **row}), ValueError, [part]) for call, row, part in wrong)


@pytest.mark.parametrize(
    "function", [cross_val_calibrate, calibration_loss, relative_calibration_loss, recommend, score_divergence]
)
def test_every_option_is_in_the_signature_and_documented(function):
    parameters = inspect.signature(function).parameters
    assert {"n_folds", "seed", "groups", "folds", "train_on_test", "calibration", *F.InputOptions.__annotations__} <= {
        *parameters
    }
    entries = function.__doc__.partition("    Args:")[2].partition("    Returns:")[0]
    assert [name for name in parameters if f"\n        {name}: " not in entries] == []


def split(target, n_classes=2, weights=None, **options):
    preds = torch.full((*target.shape, n_classes), 1 / n_classes)
    given = {"weights": weights, "batch_dims": target.dim() - 1}
    return folds_of(read_input("multiclass", preds, target, given), options)[0]


def test_folds_are_stratified_over_rows_with_positive_weight():
    target = torch.tensor([0] * 33 + [1] * 12 + [2] * 7)
    counts = torch.zeros(5, 3).index_put_((split(target, 3, n_folds=5), target), torch.ones(52), accumulate=True)
    assert (counts.amax(0) - counts.amin(0) <= 1).all()
    assert counts.sum(1).amax() - counts.sum(1).amin() <= 1
    folds = split(torch.tensor([0, 1] * 20), weights=(torch.arange(40) < 20).float())[:20]
    assert torch.bincount(folds).tolist() == [4] * 5


def test_folds_depend_only_on_the_seed():
    target = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    assert torch.equal(split(target, 3, seed=1), split(target, 3, seed=1))
    assert not torch.equal(split(target, 3, seed=1), split(target, 3, seed=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_groups_are_never_split_and_folds_have_similar_sizes():
    g = torch.Generator().manual_seed(2)
    groups = torch.randint(0, 40, (400,), generator=g)
    target = torch.randint(0, 3, (400,), generator=g)
    folds = split(target, 3, groups=groups)
    for k in range(40):
        assert folds[groups == k].unique().numel() == 1
    assert (torch.bincount(folds) - 80).abs().max() <= 8
    batch = split(torch.stack((target, target.flip(0))), 3, groups=groups)
    assert torch.equal(batch[0], folds)
    assert torch.equal(batch[1], split(target.flip(0), 3, groups=groups))


def test_fold_numbers_may_be_any_integers():
    logits, target = data(60, 3)
    numbers = torch.tensor([-7, 3, 900])[turns(60, 3)]
    found = relative_calibration_loss(logits, target, folds=numbers, **multi)
    assert found.item() == pytest.approx(
        relative_calibration_loss(logits, target, folds=turns(60, 3), **multi).item(), abs=1e-12
    )


def test_batches_of_labels_on_any_axis_equal_a_loop():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 60, 3, generator=g, dtype=torch.float64)
    target = (torch.rand(2, 60, 3, generator=g) < logits.sigmoid()).long()
    calibrate = partial(cross_val_calibrate, task="multilabel", from_logits=True, folds=turns(60, 3))
    expected = torch.stack([calibrate(*pair) for pair in zip(logits, target, strict=True)])
    torch.testing.assert_close(calibrate(logits, target, batch_dims=1), expected, rtol=0, atol=1e-9)
    turned = calibrate(logits.movedim(-1, 1), target.movedim(-1, 1), batch_dims=1, class_axis=1)
    torch.testing.assert_close(turned.movedim(1, -1), expected, rtol=0, atol=1e-9)
