"""Limit the Python calls and the files of this package that a call passes before and between the compiled loops.

For a small batch, these calls take most of the time. A reader follows the same files. Rounding, which depends on the
CPU, decides on the number of steps of a fit. Functions that a fit calls therefore count once per fit.
"""

import sys
from pathlib import Path

import pytest
import torch

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.ops import dispatch

PACKAGE = str(Path(tc.__file__).parent)
FITS = "ops/newton"  # files of iterative fits
LOGITS, TARGET = torch.randn(64, 10, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
METRIC = tc.ECE(task="multiclass", num_classes=10, from_logits=True)
PREDS = torch.randn(60, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)


def ece():
    F.ece(LOGITS, TARGET, task="multiclass", from_logits=True)


def update():
    METRIC.update(LOGITS, TARGET)


def report():
    tc.report(PREDS, TARGET[:60] % 5, task="multiclass")


def walk(function):
    """Return the code of the package that a call enters, as "file: function", in order."""
    function()  # the first call imports, compiles, and creates the estimator
    entered, fit, names = [], None, set()  # the frame that fits, and the code that it has entered

    def note(frame, event, _):
        nonlocal fit
        if event == "return" and frame is fit:
            fit = None
        elif event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            path = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            if fit is None and path.startswith(FITS):
                fit = frame
                names.clear()
            name = f"{path}: {frame.f_code.co_qualname}"
            if fit is None or name not in names:
                entered.append(name)
            names.add(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered


@pytest.mark.parametrize(("function", "calls", "files"), [(ece, 30, 9), (update, 20, 9), (report, 9_000, 92)])
def test_number_of_python_calls_and_files_is_limited(function, calls, files, monkeypatch):
    pytest.importorskip("numba")  # plain torch processes chunks instead of running compiled loops
    monkeypatch.setattr(dispatch, "RULE", "always")
    entered = walk(function)
    assert len(entered) <= calls, entered[:200]
    passed = dict.fromkeys(entry.partition(":")[0] for entry in entered)
    assert len(passed) <= files, list(passed)
