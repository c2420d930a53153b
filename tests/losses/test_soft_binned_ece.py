"""Soft-binned calibration error: its limit, a closed form, and wrong settings."""

from functools import partial

import pytest
import torch
from helpers.penalties import data
from helpers.refusals import assert_refused

import torchcalib as tc


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_cold_soft_bins_are_bins(norm):
    logits, target = data("multiclass", n=200)
    hard = {"l1": tc.ece, "l2": tc.rmsce}[norm](logits, target, task="multiclass", from_logits=True)
    soft = tc.soft_binned_ece(logits, target, task="multiclass", from_logits=True, temperature=1e-7, norm=norm)
    torch.testing.assert_close(soft, hard, rtol=1e-3, atol=0)


def test_closed_form_of_one_bin():
    one = tc.soft_binned_ece(torch.tensor([0.5]), torch.tensor([1]), task="binary", n_bins=1, norm="l1")
    assert float(one) == 0.5


WRONG = [
    ("frozen", {"temperature": 0.0}, ValueError, "`temperature` must be finite and above 0, got 0.0"),
    ("text", {"temperature": "cold"}, TypeError, "`temperature` must be a number, got 'cold'"),
    ("norm", {"norm": "max"}, ValueError, "`norm` must be one of 'l1', 'l2', got 'max'"),
    ("bins", {"n_bins": 0}, ValueError, "`n_bins` must be at least 1, got 0"),
]


def test_wrong_settings():
    call = partial(tc.soft_binned_ece, torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), task="binary")
    assert_refused((name, partial(call, **options), error, [said]) for name, options, error, said in WRONG)
