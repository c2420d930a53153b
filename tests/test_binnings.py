"""Bins of equal mass of a sample in order: closed forms, ties, bounds."""

import math
from itertools import pairwise

import pytest
import torch
from helpers.ranked import F64, assert_slow_loop, sample, samples, setting
from hypothesis import given
from hypothesis import strategies as st
from oracles import ranked as oracle

import torchcalib as tc

FOUR = {"preds": torch.tensor([0.6, 0.1, 0.8, 0.2], dtype=F64), "target": torch.tensor([1, 0, 1, 1]), "task": "binary"}


def test_closed_form_equal_mass_bins():
    """Two bins of two: {0.1, 0.2} with one positive, {0.6, 0.8} with two."""
    gaps = [1 / 2 - (0.1 + 0.2) / 2, 1 - (0.6 + 0.8) / 2]
    given = {**FOUR, "n_bins": 2}
    assert tc.ace(**given).item() == pytest.approx(sum(gaps) / 2)
    assert tc.mce(**given, bins="equal_mass").item() == pytest.approx(max(gaps))
    assert tc.rmsce(**given, bins="equal_mass").item() == pytest.approx(math.sqrt((gaps[0] ** 2 + gaps[1] ** 2) / 2))


def test_closed_form_a_cut_inside_a_tie_moves_to_its_end():
    """The cut at 2 falls between the two 0.5: pooled {0.2, 0.5, 0.5} and {0.9}; split as the samples come."""
    given = {"preds": torch.tensor([0.2, 0.5, 0.5, 0.9]), "target": torch.tensor([0, 1, 0, 1]), "task": "binary"}
    pooled = (3 * abs(1 / 3 - 1.2 / 3) + abs(1 - 0.9)) / 4
    split = (2 * abs(1 / 2 - 0.7 / 2) + 2 * abs(1 / 2 - 1.4 / 2)) / 4
    assert tc.ace(**given, n_bins=2).item() == pytest.approx(pooled, abs=1e-7)
    assert tc.ace(**given, n_bins=2, ties="split").item() == pytest.approx(split, abs=1e-7)


@setting
@pytest.mark.parametrize("weighted", [False, True])
def test_slow_loop_ace_with_split_ties(weighted, task, how):
    data = sample(task, weighted=weighted, heaviest=1)
    assert_slow_loop(
        tc.ace, lambda *columns: oracle.ace(*columns, n_bins=7, ties="split"), task, how, data, n_bins=7, ties="split"
    )


def test_law_long_samples_are_cut_as_short_ones(monkeypatch):
    preds, target, _ = sample("multilabel", n=500)
    options = {"task": "multilabel", "bins": "equal_mass"}
    table, value = tc.bin_table(preds, target, **options), tc.ace(preds, target, task="multilabel", average=None)
    monkeypatch.setattr("torchcalib.binnings._LONG", 1)
    assert torch.equal(tc.ace(preds, target, task="multilabel", average=None), value)
    again = tc.bin_table(preds, target, **options)
    for column in ("lower", "upper", "n", "confidence", "frequency"):
        torch.testing.assert_close(getattr(again, column), getattr(table, column), rtol=0, atol=0, equal_nan=True)


@given(samples(), st.integers(1, 20))
def test_law_bounds_of_binned_errors(data, n_bins):
    """|ESCE| <= ACE <= RMSCE <= MCE <= 1; of one bin ACE is |ESCE|."""
    preds, target, weights = data
    given = {"task": "binary", "weights": weights}
    esce, one = tc.esce(preds, target, **given).abs().item(), tc.ace(preds, target, n_bins=1, **given).item()
    ace = tc.ace(preds, target, n_bins=n_bins, **given).item()
    rmsce = tc.rmsce(preds, target, bins="equal_mass", n_bins=n_bins, **given).item()
    mce = tc.mce(preds, target, bins="equal_mass", n_bins=n_bins, **given).item()
    assert one == pytest.approx(esce, abs=1e-12)
    for less, more in pairwise([esce, ace, rmsce, mce, 1]):
        assert less <= more + 1e-12
