"""How samples are split into folds."""

import pytest
import torch
from helpers.fits import data, multi, turns

import torchcalib as tc
from torchcalib.calibration.cross_validation import folds_of
from torchcalib.core.inputs import read_input


def dealt(target, n_classes=2, weights=None, **options):
    preds = torch.full((*target.shape, n_classes), 1 / n_classes)
    return folds_of(read_input("multiclass", preds, target, {"weights": weights}), options)[0]


def test_folds_hold_every_class_alike_and_rows_of_weight_0_take_no_turn():
    target = torch.tensor([0] * 33 + [1] * 12 + [2] * 7)
    counts = torch.zeros(5, 3).index_put_((dealt(target, 3, n_folds=5), target), torch.ones(52), accumulate=True)
    assert (counts.amax(0) - counts.amin(0) <= 1).all()
    assert counts.sum(1).amax() - counts.sum(1).amin() <= 1
    folds = dealt(torch.tensor([0, 1] * 20), weights=(torch.arange(40) < 20).float())[:20]
    assert torch.bincount(folds).tolist() == [4] * 5


def test_folds_come_from_the_seed_alone():
    target = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(0))
    state = torch.get_rng_state()
    assert torch.equal(dealt(target, 3, seed=1), dealt(target, 3, seed=1))
    assert not torch.equal(dealt(target, 3, seed=1), dealt(target, 3, seed=2))
    assert torch.equal(torch.get_rng_state(), state)


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
