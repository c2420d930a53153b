"""On a real GPU: everything that `cuda_check.py` checks. Without one it says so, which is checked everywhere."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[1] / "cuda_check.py"


def run(tmp_path):
    out = tmp_path / "result.json"
    return out, subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out)], capture_output=True, text=True, check=False
    )


@pytest.mark.cuda
def test_cuda_agrees_with_the_cpu(tmp_path):
    out, done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    assert out.is_file()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_it_says_so_and_exits_with_zero(tmp_path):
    out, done = run(tmp_path)
    assert done.returncode == 0
    assert "no CUDA device" in done.stdout
    assert not out.exists()
