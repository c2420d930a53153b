"""Spiegelhalter's z-test: its distribution, closed forms; slow loops are in test_reading."""

import math

import torch
from helpers.binless import calibrated
from scipy import stats

import torchcalib as tc


def test_law_z_of_calibrated_predictions_is_standard_normal():
    """2,000 data sets: the Kolmogorov-Smirnov test of the p-values, which are uniform."""
    preds, target = calibrated(500, lead=(2000,), seed=1)
    z, p_value = tc.spiegelhalter(preds, target, task="binary")
    assert stats.kstest(z.numpy(), "norm").pvalue > 0.01
    assert stats.kstest(p_value.numpy(), "uniform").pvalue > 0.01


def test_closed_form_z_where_nothing_can_vary():
    def test_of(preds, target):
        return tc.spiegelhalter(torch.tensor(preds), torch.tensor(target), task="binary")

    z, p_value = test_of([1.0, 0.0, 0.5], [0, 0, 1])
    assert (z.item(), p_value.item()) == (math.inf, 0)
    for part in test_of([1.0, 0.0, 0.5], [1, 0, 1]):
        assert part.isnan()


def test_parts_of_the_test_are_those_of_the_stream():
    preds, target = calibrated(100, lead=(3,))
    metric = tc.Spiegelhalter(task="multilabel", num_labels=3)
    metric.update(preds.T, target.T)
    for found, expected in zip(metric.test(), tc.spiegelhalter(preds.T, target.T, task="multilabel"), strict=True):
        torch.testing.assert_close(found, expected)
