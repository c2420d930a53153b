"""Check torchcalib on a real GPU: `python cuda_check.py [--out FILE.json] [--strict] [--no-speed]`.

- Every op of `torchcalib.ops`, in float32, bfloat16, float16 and float64, over rows of 2 to 128,256 classes with
  ties, saturation and infinite logits, against float64: outputs and gradients.
- How they behave: no op and no `update` of a collection waits for the device, both pass
  `torch.use_deterministic_algorithms`, give the same bits in two runs, and can be captured in a CUDA graph.
- Every function and streaming class against float64 on the CPU.
- The speed of every op as a share of a device-to-device copy, beside eager torch and torchmetrics, and the goals.

Prints a table and writes JSON, by default `benchmarks/results/cuda-<GPU>.json`. Exits with 1 if anything is wrong: a
value, a gradient, a wait, a difference between runs, an exception. A goal of speed that is missed is printed and
written, and is no such failure: the goals are those of one kind of GPU that nothing else runs on, and a wrong number is
wrong on any. With `--strict` it is one. Without a GPU it says so, runs the logic of the Triton kernels in Triton's
interpreter, if Triton is installed, and exits with 0 if they are right.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import torchcalib as tc
from benchmarks.cuda.check import Check
from benchmarks.cuda.conduct import conduct
from benchmarks.cuda.metrics import metrics
from benchmarks.cuda.ops import INTERPRETED, ON_GPU, ops
from benchmarks.cuda.speed import Speed, speeds
from benchmarks.job import version_of

RESULTS = Path(__file__).parent / "benchmarks" / "results"
CONDUCTED = ((1000, 10), (300, 1001), (40, 40_000))


def triton_version() -> str | None:
    """Return the version of Triton, or None where it is not installed."""
    packages = ("triton", "triton-windows", "pytorch-triton")
    return next((found for package in packages if (found := version_of(package))), None)


def shown(checks: Iterable[Check]) -> list[Check]:
    """Print checks as they are made, the failed ones in full, and return them."""
    kept = []
    for check in checks:
        kept.append(check)
        verdict = "ok  " if check.passed else "FAIL"
        print(f"{verdict} {check.name:44} {check.dtype:9} {check.what:28} {check.error:9.2e} {check.said}", flush=True)
    return kept


def timed(results: Iterable[Speed]) -> list[Speed]:
    """Print speeds as they are measured and return them."""
    kept = []
    for speed in results:
        kept.append(speed)
        seconds = "         -" if speed.seconds is None else f"{1e6 * speed.seconds:8.1f}us"
        share = "" if speed.share is None else f"{speed.share:7.1%} of a copy"
        ratio = "" if speed.ratio is None else f"{speed.ratio:6.2f} x row op"
        goal = "" if speed.met is None else f"goal {speed.goal}: {'met' if speed.met else 'MISSED'}"
        print(
            f"{speed.job:42} {speed.shape:16} {speed.dtype:9} {seconds} {share}{ratio}  {goal}  {speed.how}", flush=True
        )
    return kept


def exit_code(checks: list[Check], measured: list[Speed], strict: bool) -> int:
    """Print how many checks failed and goals were missed; return the exit code."""
    failed = [check for check in checks if not check.passed]
    missed = [speed for speed in measured if speed.met is False]
    broken = [speed for speed in measured if speed.goal is not None and speed.seconds is None]
    print(f"{len(checks) - len(failed)} checks passed, {len(failed)} failed; {len(missed)} goals of speed missed")
    for check in failed:
        print(f"FAIL {check.name}, {check.dtype}: {check.what}: {check.error:.2e} > {check.tolerance:.2e} {check.said}")
    for speed in broken:
        print(f"FAIL {speed.job}, {speed.shape}, {speed.dtype}: {speed.how}")
    return 1 if failed or broken or (strict and missed) else 0


def content(machine: dict[str, Any], checks: list[Check], measured: list[Speed]) -> str:
    """Return everything as JSON, in which errors are strings, as they may be infinite."""
    found = {
        **machine,
        "speed": [{**asdict(speed), "met": speed.met} for speed in measured],
        "checks": [{**asdict(check), "error": str(check.error), "passed": check.passed} for check in checks],
    }
    return json.dumps(found, indent=1)


def in_interpreter() -> int:
    """Run the kernels' logic on the CPU, in a process of its own: Triton reads the variable when it is imported."""
    found = triton_version()
    if found is None:
        print("Triton is not installed, so its kernels were not run in its interpreter either.")
        return 0
    if tuple(int(part) for part in found.split(".")[:2]) < (3, 6):
        print(f"Triton {found} has an interpreter that numpy 2.4 breaks, so its kernels were not run there either.")
        return 0
    print(f"The kernels' logic in the interpreter of Triton {found}:", flush=True)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, __file__, "--interpret"], env=environment, check=False).returncode


def main() -> int:
    """Run, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description="Check torchcalib on a real GPU.")
    parser.add_argument("--out", type=Path, help="where to write the results")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a goal of speed is missed")
    parser.add_argument("--no-speed", action="store_true", help="check, but measure nothing")
    parser.add_argument("--interpret", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.interpret:
        cpu = torch.device("cpu")
        return exit_code(shown(chain(ops(cpu, INTERPRETED, "triton"), conduct(cpu, ((9, 10),), "triton"))), [], False)
    if not torch.cuda.is_available():
        print(f"cuda_check: no CUDA device (torch {torch.__version__}). Nothing was run on a GPU.", flush=True)
        return in_interpreter()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic products ask for
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    machine = {
        "device": gpu,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton_version(),
        "torchcalib": tc.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    checks = shown(ops(device, ON_GPU))
    checks += shown(conduct(device, CONDUCTED))
    checks += shown(metrics(device))
    measured = [] if arguments.no_speed else timed(speeds(device))
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    out = arguments.out or RESULTS / f"cuda-{slug}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(content(machine, checks, measured))
    code = exit_code(checks, measured, arguments.strict)
    print(f"written to {out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
