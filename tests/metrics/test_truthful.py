"""Truthfulness of the averaged two-bin calibration error (ATB), by exact enumeration, and its closed forms."""

from functools import partial
from itertools import product

import pytest
import torch
from helpers.null_distribution import calibrated
from helpers.samples import updated

import torchcalib as tc
import torchcalib.functional as F

F64 = torch.float64
OUTCOMES = torch.tensor(list(product((0, 1), repeat=6)))
TRUTHS = [
    torch.tensor([0.08, 0.25, 0.4, 0.45, 0.7, 0.93], dtype=F64),
    torch.tensor([0.3, 0.3, 0.3, 0.6, 0.6, 0.6], dtype=F64),
    torch.tensor([0.0, 0.02, 0.05, 0.5, 0.99, 1.0], dtype=F64),
]


def expected(function, preds, truth, **options):
    """Return the expected value of a binary metric over all outcomes of independent samples."""
    chance = torch.where(OUTCOMES == 1, truth, 1 - truth).prod(-1)
    values = function(preds.expand(64, 6).contiguous(), OUTCOMES, task="binary", batch_dims=1, **options)
    return float((chance * values).sum())


def lies(truth):
    """Yield predictions that differ from the true probabilities: moved, shrunk towards their mean, and scaled."""
    step = 0.05 * torch.eye(6, dtype=F64)
    moves = torch.cat((step, -step, step.sum(0, keepdim=True), -step.sum(0, keepdim=True)))
    yield from (truth + moves).clamp(0, 1)
    for factor in (0.1, 0.5, 0.9, 1.1):
        yield (truth.mean() + factor * (truth - truth.mean())).clamp(0, 1)
    for factor in (0.7, 0.95, 1.05, 1.5):
        yield (factor * truth).clamp(0, 1)
        yield torch.sigmoid(factor * torch.logit(truth))


@pytest.mark.parametrize("truth", TRUTHS, ids=["spread", "tied", "certain"])
def test_expected_atb_is_smallest_for_the_true_probabilities_and_expected_ece_is_not(truth):
    others = [lie for lie in lies(truth) if not torch.equal(lie, truth)]
    honest = expected(F.atb, truth, truth)
    for lie in others:
        found = expected(F.atb, lie, truth)
        assert found > honest + 1e-9, lie
        # Variances of independent outcomes add up: the expected excess is the error of the true probabilities.
        excess = float(F.atb(lie, truth, task="binary"))
        assert found - honest == pytest.approx(excess, abs=1e-15)
    rate = truth.mean().expand(6)  # less informed, but calibrated
    assert expected(F.atb, rate, truth) == pytest.approx(honest, abs=1e-15)
    ece = partial(expected, F.ece, truth=truth, n_bins=15)
    assert min(ece(lie) for lie in others) < 0.97 * ece(truth)


@pytest.mark.parametrize("n", [5, 3000])
def test_noise_floor_equals_the_mean_variance_of_an_outcome_divided_by_the_number_of_samples(n):
    """For any number of samples in a run. The mean of 1,999 replicates has a relative standard error of about 2%."""
    (p,), (y,), _ = calibrated("uniform", n, 1)
    found = updated(tc.ATB(task="binary"), (p, y)).test(n_replicates=1_999)
    assert float(found.noise_floor) == pytest.approx(float((p * (1 - p)).mean()) / n, rel=0.08)
    assert found.low.isnan()
    assert found.high.isnan()


def test_classwise_atb_is_truthful_and_top_label_atb_is_not():
    """For one sample, a sure but wrong top label has the smaller variance."""
    truth = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    lie = torch.tensor([0.33, 0.33, 0.34], dtype=F64)

    def mean(preds, mode):
        values = F.atb(preds.expand(3, 1, 3), torch.arange(3).unsqueeze(-1), task="multiclass", mode=mode, batch_dims=1)
        return float((truth * values).sum())

    assert mean(truth, "classwise") < mean(lie, "classwise")
    assert mean(lie, "top_label") < mean(truth, "top_label")


def test_atb_of_one_constant_is_the_squared_mean_gap():
    """The boundary is above the constant with probability p, and below it otherwise: one bin is empty."""
    p, y = torch.full((8,), 0.3, dtype=F64), torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])
    assert F.atb(p, y, task="binary").item() == pytest.approx(0.2**2)
    zeros_and_ones = torch.tensor([0.0, 1.0], dtype=F64)
    assert F.atb(zeros_and_ones, torch.tensor([1, 0]), task="binary").item() == pytest.approx(0.5)  # opposite residuals
    assert F.atb(zeros_and_ones, torch.tensor([0, 1]), task="binary").item() == 0
    assert F.atb(zeros_and_ones, torch.tensor([0, 0]), task="binary").item() == pytest.approx(0.25)
    assert F.atb(torch.ones(3, dtype=F64), torch.zeros(3, dtype=torch.long), task="binary").item() == 1


def test_atb_is_continuous_where_two_confidences_become_equal():
    y = torch.tensor([1, 0, 1])
    tied = F.atb(torch.tensor([0.4, 0.4, 0.9], dtype=F64), y, task="binary")
    for gap in (1e-9, -1e-9):
        near = F.atb(torch.tensor([0.4 + gap, 0.4, 0.9], dtype=F64), y, task="binary")
        torch.testing.assert_close(near, tied, rtol=0, atol=1e-8)
