"""Row statistics in the OpenMP threads of torch, compared with those in Python threads."""

import os
import subprocess
import sys

import pytest
import torch
from helpers.kernels import assert_same_on_any_number_of_threads
from helpers.rows import sample

from torchcalib.ops.softmax_stats import rows

loops = pytest.importorskip("torchcalib.ops.softmax_stats.numba", reason="numba is not installed")

OF_A_FORKED_PROCESS = """
import os, torch
from torchcalib.functional import ece

x, y = torch.randn(256, 1000), torch.zeros(256, dtype=torch.int64)
before = ece(x, y, task="multiclass", from_logits=True)
child = os.fork()
if child == 0:
    os._exit(not torch.equal(ece(x, y, task="multiclass", from_logits=True), before))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("n_classes", [10, 1000])
@pytest.mark.parametrize("from_logits", [True, False])
def test_rows_have_the_same_bits_without_openmp(n_classes, from_logits, monkeypatch):
    values, target = sample(331, n_classes, from_logits)
    monkeypatch.setattr(loops, "_PER_THREAD", 1)
    found = assert_same_on_any_number_of_threads(lambda: rows(values, target, from_logits=from_logits, tolerance=1e-3))
    monkeypatch.setattr(loops, "_parallel", lambda: None)
    for a, b in zip(found, rows(values, target, from_logits=from_logits, tolerance=1e-3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_computes_the_same_rows():
    """The threads of OpenMP do not exist in a forked process, which would wait for them forever."""
    done = subprocess.run([sys.executable, "-c", OF_A_FORKED_PROCESS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
