"""Check torchcalib on a GPU: `python cuda_check.py [--no-speed] [--jobs N]`, in an environment with `.[dev]`.

- Tests marked `cuda`: Triton kernels against tensor operations, up to 10^6 rows and 128,256 classes. Operations and
  collections do not synchronise the device, and give the same bits in two runs.
- The laws of `tests/devices`: functions, classes, calibrators, losses and reports give the values of the CPU.
- Times: `python -m benchmarks.run device everyday --device cuda`.

Writes the number of tests, the failed ones and the times to `benchmarks/results/<GPU>.json`. The exit code is 1 after a
failed test. A missed goal of speed changes nothing, because goals are for one type of GPU. Without a GPU nothing runs
and the exit code is 0; `tests/ops` run the Triton kernels in Triton's interpreter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks.run import machine, path_of

ROOT = Path(__file__).parent
TESTS = ("tests", "-m", "cuda or emulated", "--ignore", "tests/devices/test_emulated_device.py")
# Matrix products are deterministic only with this setting.
VARIABLES = {"TORCHCALIB_TEST_DEVICE": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
QUIET = ("-q", "--no-header", "-p", "no:cacheprovider", "--timeout", "3600")


def checked(jobs: int) -> dict[str, object]:
    """Run the tests, and return their number and the names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tests.xml"
        command = [sys.executable, "-m", "pytest", *TESTS, *QUIET, "-n", str(jobs), f"--junitxml={path}"]
        subprocess.run(command, cwd=ROOT, env=os.environ | VARIABLES, check=False)
        return found_in(path.read_text(encoding="utf-8"))


def found_in(xml: str) -> dict[str, object]:
    """Return the number of tests that ran, and the names of those that failed, from a file in the format of JUnit."""
    tests = [test for test in ElementTree.fromstring(xml).iter("testcase") if test.find("skipped") is None]
    failed = [test for test in tests if test.find("failure") is not None or test.find("error") is not None]
    return {"n": len(tests), "failed": [f"{test.get('classname')}: {test.get('name')}" for test in failed]}


def main() -> int:
    """Run the tests and measure the times, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check torchcalib on a GPU.")
    parser.add_argument("--no-speed", action="store_true", help="run the tests without measuring speed")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes for the tests")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"cuda_check: no CUDA device (torch {torch.__version__}). Nothing was run.")
        return 0
    checks, path = checked(arguments.jobs), path_of(machine("cuda"))
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"families": {}}
    path.write_text(json.dumps({**stored, "machine": machine("cuda"), "checks": checks}, indent=1) + "\n")
    print(f"{checks['n']} tests, failed: {checks['failed'] or 'none'}; written to {path}")
    if not arguments.no_speed:
        times = [sys.executable, "-m", "benchmarks.run", "device", "everyday", "--device", "cuda"]
        subprocess.run(times, cwd=ROOT, check=False)
    return int(bool(checks["failed"]) or not checks["n"])


if __name__ == "__main__":
    sys.exit(main())
