"""Smooth ECE against slow loops, closed forms, and its state."""

import pytest
import torch
from cases import N_CLASSES
from helpers.binless import F64, calibrated
from oracles import binless as oracle

import torchcalib as tc
from torchcalib.binless.smece import SmoothingRecipe, smece_from_cells
from torchcalib.kernels.smoothing_grids import N_CELLS
from torchcalib.predictions import read_input
from torchcalib.statistics import BinStats


@pytest.mark.parametrize("width", [*(k / 1024 for k in range(2, 13)), 0.0123, 0.049, 0.05, 0.3, 1.0])
def test_slow_loop_smece_at_a_width(width):
    preds, target = calibrated(40)
    preds[:4] = torch.tensor([0, 1, 0.5, 1 / 1024])
    found = tc.smece(preds, target, task="binary", bandwidth=width)
    expected = oracle.smece_at(width, preds.tolist(), target.tolist(), [1.0] * 40)
    assert found.item() == pytest.approx(expected, abs=1e-13)


@pytest.mark.parametrize("gap", [0.003, 0.006, 0.0095, 0.012, 0.03])
def test_slow_loop_width_where_it_is_small(gap):
    """Soft targets a little above the confidence: widths for which the grids differ."""
    preds = torch.linspace(0.05, 0.9, 60, dtype=F64)
    target, ones = preds + gap, [1.0] * 60
    width = tc.smece_width(preds, target, task="binary").item()
    assert width == oracle.smece_width(preds.tolist(), target.tolist(), ones)
    assert abs(width - gap) < 0.2 * gap + 1 / 1024
    value = oracle.smece(preds.tolist(), target.tolist(), ones)
    assert tc.smece(preds, target, task="binary").item() == pytest.approx(value, abs=1e-13)


def test_law_series_of_very_different_widths_are_a_loop():
    preds = torch.linspace(0.02, 0.9, 50, dtype=F64).expand(6, 50)
    target = preds + torch.tensor([0.002, 0.004, 0.0085, 0.02, 0.05, 0.09], dtype=F64).unsqueeze(-1)
    widths = tc.smece_width(preds, target, task="binary")
    assert len(widths.unique()) == 6
    values = torch.stack([tc.smece(p, y, task="binary") for p, y in zip(preds, target, strict=True)])
    torch.testing.assert_close(tc.smece(preds, target, task="binary"), values, rtol=0, atol=1e-15)


def test_law_smece_is_read_from_bins_alone_as_closely_as_cells_are_narrow():
    """What tests of calibration draw has weight, confidence and outcome of every cell, and no more."""
    preds, target = calibrated(20_000, scale=0.8)
    cells = SmoothingRecipe("positive_class", True).of(read_input("binary", preds, target, {}))
    value = smece_from_cells(cells)
    assert cells.sums.shape == (6, N_CELLS)
    assert cells.noise.sum().item() == pytest.approx((preds * (1 - preds)).sum().item())
    assert smece_from_cells(BinStats(cells.sums[:3])).item() == pytest.approx(value.item(), rel=1e-4)


def test_the_state_of_smece_is_below_a_megabyte_whatever_comes():
    metric = tc.SmECE(task="binary")
    preds, target = calibrated(5000)
    for part in range(0, 5000, 1000):
        metric.update(preds[part : part + 1000], target[part : part + 1000])
    assert metric.state.numel() * 8 < 1e6
    torch.testing.assert_close(metric.compute(), tc.smece(preds, target, task="binary"), rtol=1e-12, atol=0)
    assert metric.width() == tc.smece_width(preds, target, task="binary")


def test_widths_of_classes_are_kept_apart():
    preds, target = calibrated(60, lead=(N_CLASSES,))
    widths = tc.smece_width(preds.T, target.T, task="multilabel")
    assert widths.tolist() == [tc.smece_width(p, y, task="binary").item() for p, y in zip(preds, target, strict=True)]
    assert tc.smece_width(preds[:, :0].T, target[:, :0].T, task="multilabel").isnan().all()
