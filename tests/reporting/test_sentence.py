"""The sentence of a report agrees with the values, and does not report differences within the sampling noise."""

import math

import pytest
import torch
from helpers.reports import QUICK

import torchcalib as tc


def multiclass_data(confidence):
    """Return rows of 4 classes with this confidence and an accuracy of one half, and targets."""
    target = torch.arange(400) % 4
    guess = torch.where(torch.arange(400) < 200, target, (target + 1) % 4)
    rows = torch.full((400, 4), (1 - confidence) / 3, dtype=torch.float64)
    return rows.scatter_(1, guess.unsqueeze(1), confidence), target


@pytest.mark.parametrize(
    ("preds", "target", "words"),
    [
        ([0.9] * 100, [1] * 60 + [0] * 40, ["badly too high", "90.0%", "60.0%"]),
        ([0.6] * 1000, [1] * 650 + [0] * 350, ["clearly too low", "60.0%", "65.0%"]),
        ([0.6] * 10, [1] * 6 + [0] * 4, ["too small to detect"]),
        ([0.6] * 1000, [1] * 600 + [0] * 400, ["no significant miscalibration"]),
        ([0.2] * 500 + [0.8] * 500, [1] * 200 + [0] * 300 + [1] * 300 + [0] * 200, ["too high in some ranges"]),
        ([0.0, 0.5], [1, 0], ["NLL is infinite"]),
        (*multiclass_data(0.9), ["badly over-confident"]),
        (*multiclass_data(0.3), ["badly under-confident"]),
    ],
)
def test_sentence_follows_the_numbers(preds, target, words):
    preds, target = torch.as_tensor(preds), torch.as_tensor(target)
    report = tc.report(preds, target, task="binary" if preds.dim() == 1 else "multiclass", **QUICK)
    for word in words:
        assert word in report.sentence, report.sentence


def test_sentence_rarely_reports_miscalibration_of_a_calibrated_model():
    """About 5 % of 40 calibrated samples have p < 0.05; 6 is three standard deviations more."""
    generator, accused = torch.Generator().manual_seed(0), 0
    for _ in range(40):
        p = torch.rand(30, generator=generator) ** 4
        report = tc.report(p, torch.bernoulli(p, generator=generator).long(), task="binary", **QUICK)
        accused += "miscalibration" not in report.sentence
        assert ("miscalibration" in report.sentence) == (report.main_line.p_value >= 0.05)
    assert accused <= 6


def test_noise_floor_does_not_treat_importance_weights_as_copies():
    """For one bin of 10,000 samples with confidence 0.9, the mean |gap| is sqrt(2 / pi * 0.9 * 0.1 / 10,000).

    The noise floor is a mean over 999 replicates: 4 of its standard deviations are 10 %.
    """
    p, y = torch.full((10_000,), 0.9), (torch.arange(10_000) % 10 < 7).long()
    floor = pytest.approx(math.sqrt(2 / math.pi * 0.9 * 0.1 / 10_000), rel=0.1)
    given = [(p, y, torch.full((10_000,), scale)) for scale in (1e-4, 1.0, 1e4)]
    for preds, target, weights in (*given, (p[:10], y[:10], torch.full((10,), 1000))):
        report = tc.report(preds, target, task="binary", weights=weights, **QUICK)
        assert report.main_line.noise_floor == floor
        assert f"noise floor {report.main_line.noise_floor:.4f}" in report.sentence
        assert "badly too high" in report.sentence
