"""The number of Python calls between a caller and the compiled loops, which is most of the time of a small batch."""

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


@pytest.mark.parametrize(("function", "most"), [(ece, 45), (update, 50)])
def test_few_functions_of_the_package_are_called_for_a_batch(function, most):
    pytest.importorskip("numba")  # plain torch takes chunks instead of compiled loops
    function()  # the first call compiles, and makes the estimator
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
