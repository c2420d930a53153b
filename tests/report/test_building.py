"""A builder adds pieces as one call reads them; what is bad changes nothing, and what was given may be written over."""

import math

import pytest
import torch
from helpers.refusals import assert_refused
from helpers.reports import QUICK, ordered, predictions

import torchcalib as tc
from torchcalib.report import ReportBuilder


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


def test_wrong_calls_name_what_is_wrong():
    quick = ReportBuilder(task="multiclass", **QUICK)
    quick.update(torch.full((2, 2), 0.5), torch.tensor([0, 1]))
    wide = torch.full((2, 4), 0.25), torch.tensor([0, 1])
    empty, dp = ReportBuilder(task="binary"), tc.DPCalibration()
    assert_refused(
        [
            ("another width", lambda: quick.update(*wide), ValueError, ["must have 2 entries on its class axis"]),
            ("not kept", lambda: quick.fit(dp), ValueError, ["with_calibration is False"]),
            ("nothing to fit", lambda: empty.fit(dp), ValueError, ["got none: nothing was added"]),
            ("a number", lambda: ReportBuilder(task="binary", with_calibration=1), TypeError, ["`with_calibration`"]),
        ]
    )
