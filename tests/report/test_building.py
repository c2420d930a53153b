"""A builder adds pieces as one call reads them; what is bad changes nothing, and what was given may be written over."""

import math

import pytest
import torch
from helpers.reports import QUICK, TASKS, ordered, predictions, quick, values_are

import torchcalib as tc
from torchcalib.report import ReportBuilder


@pytest.mark.parametrize("task", TASKS)
def test_in_pieces_is_one_call_and_bad_pieces_change_nothing(task):
    logits, target = predictions(task)
    builder = ReportBuilder(task=task, from_logits=True, **QUICK)
    for piece in (slice(0, 50), slice(50, 50), slice(50, 200)):
        builder.update(logits[piece], target[piece])
        with pytest.raises(ValueError, match="NaN"):
            builder.update(logits[:2] * torch.nan, target[:2])
    pieces = builder.report()
    values_are(pieces, quick(task))
    assert pieces.n == quick(task).n == (1000 if task == "multilabel" else 200)


def test_a_piece_of_another_width_is_refused():
    builder = ReportBuilder(task="multiclass")
    builder.update(torch.full((2, 2), 0.5), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="must have 2 entries on its class axis"):
        builder.update(torch.full((2, 4), 0.25), torch.tensor([0, 1]))


def test_bad_weights_leave_the_order_as_it_was_and_predictions_may_be_changed_afterwards():
    logits, target = predictions("binary")
    builder = ReportBuilder(task="binary", from_logits=True, **QUICK)
    builder.update(logits, target)
    before = ordered(builder.report())
    for bad in (math.nan, -0.5, math.inf):
        with pytest.raises(ValueError, match="weights"):
            builder.update(logits, target, weights=torch.full((200,), bad))
    logits.fill_(0.5)
    target.fill_(0)
    assert ordered(builder.report()) == before


def test_calibrators_are_not_tried_if_not_asked_for():
    builder = ReportBuilder(task="binary", from_logits=True, **QUICK)
    builder.update(*predictions("binary"))
    report = builder.report()
    assert (report.calibration, report.notes) == (None, ())
    with pytest.raises(ValueError, match="with_calibration is False"):
        builder.fit(tc.DPCalibration())
    with pytest.raises(TypeError, match="`with_calibration` must be True or False"):
        ReportBuilder(task="binary", with_calibration=1)


def test_nothing_to_fit():
    with pytest.raises(ValueError, match="got none: nothing was added"):
        ReportBuilder(task="binary").fit(tc.DPCalibration())
