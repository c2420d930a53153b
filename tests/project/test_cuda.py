"""`cuda_check.py` and the jobs for a GPU, as far as a CPU can run them."""

import pytest
import torch
from processes import ROOT, run_python

import cuda_check
from benchmarks import device, measure, readme
from torchcalib import CostMatrix


@pytest.mark.extended
@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_check_does_nothing_without_a_device():
    done = run_python(ROOT / "cuda_check.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no CUDA device" in done.stdout


def test_failed_tests_are_counted_and_named_in_the_page():
    cases = "".join(f'<testcase classname="a" name="{name}">{found}</testcase>' for name, found in (
        ("b", ""), ("c", "<failure/>"), ("d", "<error/>"), ("e", "<skipped/>")
    ))  # fmt: skip
    checks = cuda_check.found_in(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    assert checks == {"n": 3, "failed": ["a: c", "a: d"]}
    content = {"machine": {"device": "A GPU", "torch": "2"}, "checks": checks, "families": {"device": []}}
    assert "On A GPU, torch 2 (3 checks of `cuda_check.py`, 2 failed)" in readme.section([content])


@pytest.mark.parametrize("job", device.JOBS[:8] + device.JOBS[-2:], ids=lambda job: job.name)
def test_jobs_for_a_gpu_run_with_small_sizes(job):
    assert job.on_device
    calls = job.calls(n=40) if "event bins" in job.name else job.calls(n=20, num_classes=5)
    for call in calls.values():
        call()


@pytest.mark.cuda
def test_graphs_of_jobs_are_timed_on_a_gpu():
    for job in device.JOBS[:8]:
        assert measure.times(job, 1, "cuda")["seconds"].keys() == set(job.sides)


@pytest.mark.cuda
def test_costs_copied_in_inference_mode_support_a_backward_pass():
    costs = CostMatrix.zero_one(3)
    with torch.inference_mode():
        costs.tensor(torch.device("cuda"))
    priors = torch.full((3,), 1 / 3, dtype=torch.float64, device="cuda", requires_grad=True)
    (priors @ costs.tensor(priors.device)).sum().backward()
    assert priors.grad.tolist() == [2, 2, 2]
