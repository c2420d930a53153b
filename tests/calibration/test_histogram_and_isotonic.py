"""Histogram binning compared with a loop, and isotonic calibration compared with scikit-learn."""

from functools import partial

import pytest
import torch
from helpers.fits import ISO, H, fresh, single
from helpers.refusals import assert_refused
from sklearn.isotonic import IsotonicRegression

from torchcalib.calibration import HistogramBinning


def test_histogram_binning_equals_a_loop():
    p, y = torch.sigmoid(single()[0]), single()[1]
    fitted = fresh(H).fit(p, y, task="binary")(p).tolist()
    for value, found in zip(p.tolist(), fitted, strict=True):
        inside = [int(b) for a, b in zip(p.tolist(), y.tolist(), strict=True) if int(a * 5) == int(value * 5)]
        assert found == pytest.approx(sum(inside) / len(inside), abs=1e-15)


def test_empty_bins_keep_the_prediction_or_return_zero():
    preds, target = torch.tensor([0.1, 0.15, 0.9, 0.95]), torch.tensor([0, 1, 1, 1])
    new = torch.tensor([0.1, 0.5])
    assert fresh(H).fit(preds, target, task="binary")(new).tolist() == pytest.approx([0.5, 0.5])
    zero = HistogramBinning(n_bins=5, empty="zero").fit(preds, target, task="binary")
    assert zero(torch.tensor([0.1, 0.4])).tolist() == pytest.approx([0.5, 0])


@pytest.mark.parametrize("from_logits", [False, True])
def test_isotonic_calibration_equals_scikit_learn(from_logits):
    logits, target = single(300)
    preds = logits.round(decimals=1) if from_logits else logits.sigmoid().round(decimals=2)
    weights = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(2))
    fitted = fresh(ISO).fit(preds, target, task="binary", from_logits=from_logits, weights=weights)
    sk = IsotonicRegression(out_of_bounds="clip").fit(preds, target, sample_weight=weights)
    new = torch.linspace(preds.min() - 0.1, preds.max() + 0.1, 999, dtype=torch.float64)
    new = new if from_logits else new.clamp(0, 1)
    found = fitted(new).sigmoid() if from_logits else fitted(new)
    assert found.tolist() == pytest.approx(sk.predict(new).tolist(), abs=1e-12)


def test_gradient_of_isotonic_calibration_is_the_slope_between_blocks():
    preds, target = torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    x = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    fresh(ISO).fit(preds, target, task="binary")(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([0, 1 / (0.5 - 0.3), 0])


def test_wrong_options_and_weights_raise_errors():
    rows = [
        (option, partial(HistogramBinning, **{option: value}), (TypeError, ValueError), [f"`{option}` must"])
        for option, value in {"n_bins": 0, "right": 1, "empty": "mean"}.items()
    ]
    preds = torch.tensor([0.2, 0.7])
    copies = partial(ISO.fit, preds, torch.tensor([0, 1]), weights=preds, task="binary")
    assert_refused([*rows, ("copies", copies, ValueError, ["`weights` must be whole numbers"])])
