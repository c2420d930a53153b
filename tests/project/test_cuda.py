"""`cuda_check.py` on a GPU, and its code on the CPU with small sizes."""

import json

import pytest
import torch
from processes import ROOT, run_python

from benchmarks import readme
from benchmarks.cuda import behaviour, metrics, ops, speed
from benchmarks.cuda.check import Check, elementwise_error
from cuda_check import content, exit_code, print_checks, print_speeds
from torchcalib import CostMatrix

SCRIPT = ROOT / "cuda_check.py"
CPU = torch.device("cpu")


@pytest.mark.cuda
@pytest.mark.timeout(3600)
def test_cuda_check_passes_on_a_gpu(tmp_path):
    out = tmp_path / "result.json"
    done = run_python(SCRIPT, "--no-speed", "--out", out, timeout=3600)
    assert done.returncode == 0, done.stdout
    assert out.is_file()


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_check_does_nothing_without_a_device(tmp_path):
    out = tmp_path / "result.json"
    done = run_python(SCRIPT, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout
    assert not out.exists()


@pytest.mark.filterwarnings("ignore:the fitted scale is 0")
def test_checks_pass_on_the_cpu(monkeypatch):
    monkeypatch.setattr(metrics, "N", 300)
    some = list(metrics.settings())[::9]
    monkeypatch.setattr(metrics, "settings", lambda: some)
    monkeypatch.setattr(metrics, "check_bad_rows", lambda device: iter(()))  # on the CPU `update` raises the error
    sizes = ops.Sizes(((33, 2), (17, 10), (9, 1001)), ((33, 2), (17, 10), (9, 301)), (1, 500))
    found = [*ops.ops(CPU, sizes, "torch"), *behaviour.check_behaviour(CPU, ((40, 5),), "torch")]
    found += [*metrics.metrics(CPU, (torch.float32,)), *metrics.fits(CPU)]
    assert [check for check in found if not check.passed] == []
    assert {"float16", "bfloat16", "float32", "float64"} <= {check.dtype for check in found}
    assert "ClasswiseECE after replays" in {check.what for check in found}


def test_wrong_values_fail_a_check():
    right = torch.tensor([1.0, 2.0])
    assert elementwise_error(right, right) == 0
    for wrong in (torch.tensor([1.0, 2.1]), torch.tensor([1.0, torch.nan])):
        assert not Check("", "", "", elementwise_error(wrong, right), 1e-6).passed
    assert not Check("", "", "", behaviour.differing([right], [right + 1]), 0).passed


def test_failed_checks_and_missed_goals_set_the_exit_code(capsys):
    measured = print_speeds(speed.speeds(CPU, ((20, 5),), 100, repeats=2, backend="torch"))
    assert [line for line in measured if line.seconds is None] == []
    checks = print_checks(iter([Check("a", "float32", "value", error, 1e-6) for error in (0.0, torch.nan)]))
    written = json.loads(content({"device": "none", "torch": "2.13"}, checks, measured))
    assert readme.gpu_table(written).startswith("On none, torch 2.13: 2 checks, 1 failed:")
    slow = speed.Speed("row op", "1 x 1", "float32", 1.0, share=0.5, goal=0.85)
    assert exit_code(checks, measured, strict=False) == exit_code([], [slow], strict=True) == 1
    assert exit_code(checks[:1], [], strict=True) == exit_code([], [slow], strict=False) == 0
    print_speeds([slow])
    assert "goal 0.85: MISSED" in capsys.readouterr().out


@pytest.mark.cuda
def test_costs_copied_in_inference_mode_support_a_backward_pass():
    costs = CostMatrix.zero_one(3)
    with torch.inference_mode():
        costs.tensor(torch.device("cuda"))
    priors = torch.full((3,), 1 / 3, dtype=torch.float64, device="cuda", requires_grad=True)
    (priors @ costs.tensor(priors.device)).sum().backward()
    assert priors.grad.tolist() == [2, 2, 2]
