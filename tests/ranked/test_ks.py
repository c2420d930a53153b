"""Kolmogorov-Smirnov calibration error and Kuiper's range: closed forms, bounds; slow loops are in test_reading."""

import numpy as np
import pytest
import torch
from helpers.ranked import F64, samples
from hypothesis import given

import torchcalib as tc


def test_closed_form_ks_looks_at_the_end_of_a_tie_only():
    """Sums of y - p: -0.1; then the tie, 0.6 - 0.4, to 0.1; then 0.3. Inside the tie it would be 0.5 or -0.5."""
    preds, target = torch.tensor([0.1, 0.4, 0.4, 0.8], dtype=F64), torch.tensor([0, 1, 0, 1])
    assert tc.ks(preds, target, task="binary").item() == pytest.approx(0.3 / 4)


@given(samples())
def test_law_bounds_of_ks(data):
    """|ESCE| is its last sum. No bin between two of its sums has share |gap| above 2 KS."""
    preds, target, weights = data
    given = {"preds": preds, "target": target, "task": "binary", "weights": weights}
    ks = tc.ks(**given).item()
    assert tc.esce(**given).abs().item() <= ks + 1e-12
    assert ks <= (weights * (target - preds).abs()).sum().item() / weights.sum().item() + 1e-12
    largest = tc.gce(**given, bins="pava", loss=lambda b: b.share * b.gap.abs(), norm="max").item()
    assert largest <= 2 * ks + 1e-12


def test_slow_loop_kuiper():
    generator = torch.Generator().manual_seed(3)
    preds = torch.rand(50, generator=generator, dtype=F64)
    target = (torch.rand(50, generator=generator) < preds).long()
    drift = np.concatenate(([0], np.cumsum((target - preds)[preds.argsort()].numpy()) / 50))
    assert tc.ks(preds, target, task="binary", norm="range").item() == pytest.approx(np.ptp(drift), abs=1e-14)
    up = torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=F64)
    value = tc.ks(up, torch.tensor([1, 1, 0, 0]), task="binary", norm="range")  # up by 1.4, and down to where it began
    assert value.item() == pytest.approx(1.4 / 4, abs=1e-15)
