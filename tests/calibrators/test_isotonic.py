"""Isotonic calibration: against scikit-learn, and its gradient."""

import pytest
import torch
from helpers.fits import ISO, single
from sklearn.isotonic import IsotonicRegression


@pytest.mark.parametrize("from_logits", [False, True])
def test_isotonic_is_scikit_learns(from_logits):
    logits, target = single(300)
    preds = logits.round(decimals=1) if from_logits else logits.sigmoid().round(decimals=2)
    weights = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(2))
    transform = ISO.fit(preds, target, task="binary", from_logits=from_logits, weights=weights)
    sk = IsotonicRegression(out_of_bounds="clip").fit(preds, target, sample_weight=weights)
    new = torch.linspace(preds.min() - 0.1, preds.max() + 0.1, 999, dtype=torch.float64)
    found = transform(new).sigmoid() if from_logits else transform(new)
    assert found.tolist() == pytest.approx(sk.predict(new).tolist(), abs=1e-12)


def test_gradient_of_isotonic_is_the_slope_between_blocks():
    preds, target = torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    x = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    ISO.fit(preds, target, task="binary")(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([0, 1 / (0.5 - 0.3), 0])


def test_isotonic_counts_copies():
    preds = torch.tensor([0.2, 0.7])
    with pytest.raises(ValueError, match="`weights` must be whole numbers"):
        ISO.fit(preds, torch.tensor([0, 1]), weights=preds, task="binary")
