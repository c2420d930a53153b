"""Histogram binning: against a slow loop, empty bins, and wrong settings."""

import pytest
import torch
from helpers.fits import H, single

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


@pytest.mark.parametrize(
    ("options", "error", "part"),
    [({"n_bins": 0}, ValueError, "`n_bins` must"), ({"n_bins": 1.5}, TypeError, "`n_bins` must"),
     ({"right": 1}, TypeError, "`right` must"), ({"empty": "mean"}, ValueError, "`empty` must")],
)  # fmt: skip
def test_wrong_histogram(options, error, part):
    with pytest.raises(error, match=part):
        tc.HistogramBinning(**options)
