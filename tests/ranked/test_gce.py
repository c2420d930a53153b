"""Generalised calibration error against slow loops, and as what it generalises."""

import pytest
import torch
from helpers.ranked import KINDS, NORMS, SETTINGS, assert_slow_loop, sample
from oracles import ranked as oracle

import torchcalib as tc


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_slow_loop_gce(bins, norm):
    """A loss of all three quantities of a bin."""

    def loss(n, confidence, frequency):
        return (frequency - confidence) ** 2 / (1 + n)

    def loop(*columns):
        return oracle.gce(loss, oracle.rows_of(oracle.blocks_of(bins, *columns, n_bins=5), *columns), norm)

    for task, how in SETTINGS:
        assert_slow_loop(
            tc.gce, loop, task, how, sample(task, weighted=True), bins=bins, n_bins=5, norm=norm,
            loss=lambda b: b.gap.square() / (1 + b.n),
        )  # fmt: skip


def test_closed_form_gce_instances():
    """[TCE] Definition 1: ECE, MCE, RMSCE and ACE are choices of loss, bins and norm."""
    preds, target, weights = sample("binary", weighted=True)
    given = {"preds": preds, "target": target, "task": "binary", "weights": weights, "n_bins": 7}

    def gap(b):
        return b.gap.abs()

    for norm, function in (("l1", tc.ece), ("l2", tc.rmsce), ("max", tc.mce)):
        torch.testing.assert_close(tc.gce(**given, loss=gap, norm=norm), function(**given))
    torch.testing.assert_close(tc.gce(**given, loss=gap, bins="equal_mass"), tc.ace(**given))
