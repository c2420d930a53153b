"""Soft-binned calibration error: its limit, a closed form, and wrong settings."""

from functools import partial

import torch
from helpers.refusals import assert_refused

import torchcalib as tc


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
