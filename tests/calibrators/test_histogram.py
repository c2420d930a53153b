"""Histogram binning: against a slow loop, empty bins, and wrong settings."""

from functools import partial

import pytest
import torch
from helpers.fits import H, single
from helpers.refusals import assert_refused

import torchcalib as tc


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


def test_wrong_histogram():
    wrong = {"n_bins": 0, "right": 1, "empty": "mean"}
    assert_refused(
        (option, partial(tc.HistogramBinning, **{option: value}), (TypeError, ValueError), [f"`{option}` must"])
        for option, value in wrong.items()
    )
