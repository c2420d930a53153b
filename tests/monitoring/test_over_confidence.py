"""Over-confidence is told of once it has grown beyond the threshold, with numbers, epochs and advice."""

import math

import pytest
import torch
from helpers.trainings import epochs_of

import torchcalib as tc
from torchcalib.monitoring import crossings


def test_over_confidence_is_told_of_when_it_has_grown_beyond_the_threshold():
    cases = (
        ([-0.5, -0.2, 0.1, 0.11], [0, 0, 0, 1]),  # from 0 on, whatever was below, and beyond the threshold
        ([0.3, 0.35, 0.41], [0, 0, 1]),  # above the least so far
        ([0, 0.2, 0.3, 0.1, 0.2], [0, 1, 0, 0, 0]),  # told once: more than half of the threshold was left
        ([0, 0.2, 0.04, 0.2], [0, 1, 0, 1]),  # and again
        ([math.nan, 0, math.nan, 0.2], [0, 0, 0, 1]),
        ([0, math.inf, math.inf], [0, 1, 0]),
        ([math.inf, math.inf], [0, 0]),
        ([], []),
    )
    assert [crossings(ecd, 0.1) for ecd, _ in cases] == [[bool(told) for told in expected] for _, expected in cases]


def test_the_warning_has_numbers_epochs_and_advice():
    monitor, told = epochs_of([0.2, 1.0, 2.5, 3.0])  # log 3 is what calibration asks for
    (row,) = monitor.history.warnings
    assert [*told] == [row.warning[:1].upper() + row.warning[1:]]
    assert row.epoch == 3
    p, log_odds = 1 / (1 + math.exp(-2.5)), 2.5
    by_hand = 0.75 * (p - 1) * log_odds + 0.25 * p * log_odds
    assert f"in epoch 3 the outcomes surprise the model by {by_hand:.3g} nats more" in row.warning
    assert row.warning.endswith("has not risen since: keep the model of epoch 2 (early stopping).")
    assert epochs_of([0, 3], threshold=math.inf)[1] == []


def test_the_advice_follows_nll_and_accuracy():
    monitor = tc.Monitor(task="multiclass", num_classes=2, from_logits=True)
    target = torch.arange(40) % 2

    def epoch(sure, n_right):
        wrong = torch.arange(40) >= n_right
        label = torch.where(wrong, 1 - target, target)
        monitor.update(sure * torch.nn.functional.one_hot(label, 2).float(), target)
        monitor.end_epoch()

    epoch(0.5, 20)
    still_falls = r"claims to be right with 88.1% .* right in 80.0% of samples. Its NLL still falls: train on, and cal"
    with pytest.warns(tc.OverConfidenceWarning, match=still_falls):
        epoch(2.0, 32)
    epoch(1.4, 32)
    rises = r"Its NLL was least in epoch 3, .*, while its accuracy has risen from 80.0% to 82.5%: .* or calibrate this"
    with pytest.warns(tc.OverConfidenceWarning, match=rises):
        epoch(5.0, 33)
    _, told = epochs_of([0, 3], metrics={"ecd": tc.ECD(task="binary", from_logits=True)})
    assert told[0].endswith("Calibrate the model (torchcalib.Temperature).")
