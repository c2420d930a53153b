"""Cross-validation: folds, and warnings that point to the caller."""

import re
from functools import partial

import pytest
import torch
from helpers.fits import data, multi, turns

import torchcalib as tc
from torchcalib.calibration.folds import FoldOptions, folds_of
from torchcalib.core.inputs import read_input

P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9, 0.3, 0.6]), torch.tensor([0, 1, 1, 1, 0, 0])


@pytest.mark.parametrize("trained", [{"n_folds": 3}, {"train_on_test": True}, {"calibration": (P, (P > 0.5).long())}])
def test_separable_labels_give_a_warning_at_the_line_of_the_caller(trained):
    separable = torch.tensor([0, 1, 0, 1, 0, 1])  # separable at 0.5: the likelihood rises with the scale without limit
    given = {"preds": P, "target": separable, "task": "binary", **trained}
    for function in (
        tc.relative_calibration_loss,
        tc.calibration_loss,
        tc.cross_val_calibrate,
        lambda **g: tc.score_divergence(**g).divergence,
    ):
        with pytest.warns(UserWarning, match="can be separated without error") as warned:
            found = function(calibrator=tc.TemperatureScaling(), **given)
        assert [warning.filename for warning in warned] == [__file__]
        assert torch.equal(found, P if function is tc.cross_val_calibrate else torch.zeros_like(found))
    with pytest.warns(UserWarning, match="can be separated without error") as warned:
        assert tc.recommend(calibrators=[tc.TemperatureScaling(), tc.AffineScaling()], **given).best is None
    assert len(warned) == 2  # temperature and affine scaling


def test_separable_replicates_give_no_warning():
    # the second replicate drops the two samples that overlap
    weights = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])
    rcl = partial(tc.relative_calibration_loss, P, Y, task="binary", train_on_test=True)
    assert rcl(weights=weights).tolist() == pytest.approx([rcl().item(), 0])


def test_every_option_of_folds_is_documented():
    entries = tc.cross_val_calibrate.__doc__.partition("    Args:")[2].partition("    Returns:")[0]
    names = {*FoldOptions.__annotations__, "train_on_test", "calibration"}
    assert [name for name in names if not re.search(rf"\n {{8}}{name}: ", entries)] == []


def split(target, n_classes=2, weights=None, **options):
    preds = torch.full((*target.shape, n_classes), 1 / n_classes)
    given = {"weights": weights, "batch_dims": target.dim() - 1}
    (folds, *_), _ = folds_of(read_input("multiclass", preds, target, given), options)
    return folds


def counts_of(folds, target, n_classes):
    return torch.zeros(5, n_classes).index_put_((folds, target), torch.ones(len(target)), accumulate=True)


def test_stratified_folds_have_equal_class_frequencies_over_rows_with_positive_weight():
    target = torch.tensor([0] * 33 + [1] * 12 + [2] * 7)
    counts = counts_of(split(target, 3, folds="stratified"), target, 3)
    assert (counts.amax(0) - counts.amin(0) <= 1).all()
    assert counts.sum(1).amax() - counts.sum(1).amin() <= 1
    weights = (torch.arange(40) < 20).float()
    folds = split(torch.tensor([0, 1] * 20), weights=weights, folds="stratified")[:20]
    assert torch.bincount(folds).tolist() == [4] * 5


def test_random_folds_have_equal_sizes_and_do_not_depend_on_the_labels():
    target = torch.randint(0, 3, (52,), generator=torch.Generator().manual_seed(0))
    folds = split(target, 3)
    assert torch.bincount(folds).tolist() == [11, 11, 10, 10, 10]
    assert torch.equal(folds, split(target.flip(0), 3))
    weights = (torch.arange(40) < 20).float()
    assert torch.bincount(split(torch.tensor([0, 1] * 20), weights=weights)[:20]).tolist() == [4] * 5
    # The number of positives in a fold varies like a draw without replacement: hypergeometric variance.
    positive = torch.arange(50) < 10
    counts = torch.stack([counts_of(split(positive.long(), seed=k), positive.long(), 2)[:, 1] for k in range(400)])
    variance = 10 * (10 / 50) * (40 / 50) * (40 / 49)
    assert counts.var().item() == pytest.approx(variance, rel=0.2)  # standard error of 2,000 dependent counts: 4%


def test_every_class_that_can_be_is_in_every_training_part():
    target = torch.cat((torch.arange(30).repeat_interleave(2), torch.tensor([30, 31])))  # 30 pairs, 2 single samples
    for seed in range(20):
        in_folds = (counts_of(split(target, 32, seed=seed), target, 32) > 0).sum(0)
        assert in_folds.tolist() == [2] * 30 + [1, 1]
    groups, labels = torch.arange(60) // 3, torch.zeros(60, dtype=torch.int64)
    labels[:6] = 1  # class 1 is in two groups
    for seed in range(20):
        folds = split(labels, groups=groups, seed=seed)
        assert len(folds[:6].unique()) == 2
        assert all(len(folds[groups == k].unique()) == 1 for k in range(20))


OF_CLASSES = [tc.AffineScaling(), tc.BiasCorrection(), tc.VectorScaling(), tc.TemperatureScaling()]
OF_BINARY = [tc.AffineScaling(), tc.BetaCalibration(), tc.QuadraticScaling()]


@pytest.mark.parametrize(
    ("task", "calibrator"), [("multiclass", c) for c in OF_CLASSES] + [("binary", c) for c in OF_BINARY]
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_parts_without_a_class_have_the_fit_to_the_other_classes(task, calibrator):
    """One sample of a class, or one positive sample, is held out."""
    logits, target = data(60, 2)
    if task == "multiclass":
        more = torch.randn(60, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        logits, target[0] = torch.cat((logits, more), -1), 2
    else:
        logits, target = logits[:, 1], (torch.arange(60) == 0).long()
    folds = torch.cat((torch.tensor([0]), turns(59) + 1)) % 5
    given = {"task": task, "from_logits": True}
    found = tc.cross_val_calibrate(logits, target, calibrator=calibrator, folds=folds, **given)
    fit = type(calibrator)().fit(logits[folds != 0], target[folds != 0], **given)
    torch.testing.assert_close(found[folds == 0], fit(logits)[folds == 0], rtol=0, atol=1e-8)


def test_scores_are_averaged_over_repeated_splits():
    logits, target = data(60, 3)
    found = tc.calibration_loss(logits, target, n_repeats=3, seed=4, **multi)
    each = [tc.calibration_loss(logits, target, n_repeats=1, seed=seed, **multi).item() for seed in (4, 5, 6)]
    assert found.item() == pytest.approx(sum(each) / 3, abs=1e-12)
    assert len(set(each)) == 3
    assert tc.calibration_loss(logits, target, **multi).item() == pytest.approx(
        tc.calibration_loss(logits, target, n_repeats=5, **multi).item(), abs=1e-12
    )


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
    balanced = counts_of(split(target, 3, groups=groups, folds="stratified"), target, 3)
    assert (balanced - target.bincount() / 5).abs().max() <= 5


def test_fold_numbers_may_be_any_integers():
    logits, target = data(60, 3)
    numbers = torch.tensor([-7, 3, 900])[turns(60, 3)]
    found = tc.relative_calibration_loss(logits, target, folds=numbers, **multi)
    assert found.item() == pytest.approx(
        tc.relative_calibration_loss(logits, target, folds=turns(60, 3), **multi).item(), abs=1e-12
    )


def test_batches_of_labels_on_any_axis_equal_a_loop():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 60, 3, generator=g, dtype=torch.float64)
    target = (torch.rand(2, 60, 3, generator=g) < logits.sigmoid()).long()
    calibrate = partial(tc.cross_val_calibrate, task="multilabel", from_logits=True, folds=turns(60, 3))
    expected = torch.stack([calibrate(*pair) for pair in zip(logits, target, strict=True)])
    torch.testing.assert_close(calibrate(logits, target, batch_dims=1), expected, rtol=0, atol=1e-9)
    turned = calibrate(logits.movedim(-1, 1), target.movedim(-1, 1), batch_dims=1, class_axis=1)
    torch.testing.assert_close(turned.movedim(1, -1), expected, rtol=0, atol=1e-9)
