"""Limit the number of Python calls before the compiled loops, which take most of the time for a small batch."""

import sys
from pathlib import Path

import pytest
import torch

import torchcalib as tc
import torchcalib.functional as F

PACKAGE = str(Path(tc.__file__).parent)
LOGITS, TARGET = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
METRIC = tc.ECE(task="multiclass", num_classes=10, from_logits=True)


def ece():
    F.ece(LOGITS, TARGET, task="multiclass", from_logits=True)


def update():
    METRIC.update(LOGITS, TARGET)


@pytest.mark.parametrize(("function", "most"), [(ece, 47), (update, 52)])
def test_number_of_python_calls_per_batch_is_limited(function, most):
    pytest.importorskip("numba")  # plain torch processes chunks instead of running compiled loops
    function()  # the first call compiles, and creates the estimator
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    assert len(calls) <= most, calls
