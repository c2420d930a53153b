"""Bins of equal mass of a sample in order: closed forms, ties, bounds."""

import pytest
import torch
from helpers.ranked import assert_slow_loop, sample, setting
from oracles import ranked as oracle

import torchcalib as tc


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
