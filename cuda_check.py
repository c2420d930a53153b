"""Check torchcalib on a GPU: `python cuda_check.py [--out FILE.json] [--strict] [--no-speed] [--jobs N]`.

- Every operation of `torchcalib.ops`, in float32, bfloat16, float16 and float64, for rows of 2 to 128,256 classes with
  ties, saturation and infinite logits: outputs and gradients compared with float64.
- Behaviour: no operation and no `update` of a collection synchronises the device. Both run with
  `torch.use_deterministic_algorithms`, give the same bits in two runs, and can be captured in a CUDA graph.
- Every function and streaming class compared with float64 on the CPU.
- Speed of every operation relative to a device-to-device copy, beside eager torch and torchmetrics, and the goals.

`python -m benchmarks.run everyday --device cuda` measures everyday calls on the GPU, with the time of the host.

The checks run in several processes, because most of their time is spent in compiling kernels. Speed is measured alone.
Prints a table and writes JSON, by default to `benchmarks/results/cuda-<GPU>.json`. The exit code is 1 after a failed
check: a wrong value or gradient, a synchronisation, a difference between runs, or an exception. A missed speed goal
gives exit code 1 only with `--strict`, because goals are for one type of GPU. Without a GPU nothing runs and the exit
code is 0; `tests/ops` run the Triton kernels in Triton's interpreter.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import torchcalib as tc
from benchmarks.cuda import metrics, ops
from benchmarks.cuda.behaviour import check_behaviour
from benchmarks.cuda.check import Check
from benchmarks.cuda.speed import Speed, speeds
from benchmarks.job import version_of

RESULTS = Path(__file__).parent / "benchmarks" / "results"
BEHAVIOUR_SHAPES = ((1000, 10), (300, 1001), (40, 40_000))


def sections() -> list[Callable[[torch.device], Iterator[Check]]]:
    """Return the checks in parts, the longest ones first."""
    of_ops = [
        partial(ops.ops, dtypes=[dtype], inputs=[from_logits])
        for dtype in reversed(ops.DTYPES)
        for from_logits in (True, False)
    ]
    return [*of_ops, *(partial(metrics.metrics, dtypes=[dtype]) for dtype in metrics.DTYPES), metrics.fits, behaviour]


def behaviour(device: torch.device) -> Iterator[Check]:
    """Yield the checks of synchronisation, graphs and reproducibility."""
    return check_behaviour(device, BEHAVIOUR_SHAPES)


def listed(section: Callable[[torch.device], Iterator[Check]], device: torch.device) -> list[Check]:
    """Return the checks of a section, in a process of its own."""
    torch.set_num_threads(1)
    return list(section(device))


def check_all(device: torch.device, jobs: int) -> Iterator[Check]:
    """Yield the checks of all sections, as soon as a section ends."""
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(listed, section, device) for section in sections()]):
            yield from done.result()


def print_checks(checks: Iterable[Check]) -> list[Check]:
    """Print checks as they finish, and return them."""
    kept = []
    for check in checks:
        kept.append(check)
        verdict = "ok  " if check.passed else "FAIL"
        print(f"{verdict} {check.name:44} {check.dtype:9} {check.what:28} {check.error:9.2e} {check.note}", flush=True)
    return kept


def print_speeds(results: Iterable[Speed]) -> list[Speed]:
    """Print speeds as they are measured, and return them."""
    kept = []
    for speed in results:
        kept.append(speed)
        seconds = "         -" if speed.seconds is None else f"{1e6 * speed.seconds:8.1f}us"
        share = "" if speed.share is None else f"{speed.share:7.1%} of a copy"
        ratio = "" if speed.ratio is None else f"{speed.ratio:6.2f} x row op"
        goal = "" if speed.met is None else f"goal {speed.goal}: {'met' if speed.met else 'MISSED'}"
        where = f"{speed.job:42} {speed.shape:16} {speed.dtype:9}"
        print(f"{where} {seconds} {share}{ratio}  {goal}  {speed.how}", flush=True)
    return kept


def exit_code(checks: list[Check], measured: list[Speed], strict: bool) -> int:
    """Print the failed checks and the number of missed goals, and return the exit code."""
    failed = [check for check in checks if not check.passed]
    missed = [speed for speed in measured if speed.met is False]
    broken = [speed for speed in measured if speed.goal is not None and speed.seconds is None]
    print(f"{len(checks) - len(failed)} checks passed, {len(failed)} failed; {len(missed)} speed goals missed")
    for check in failed:
        print(f"FAIL {check.name}, {check.dtype}: {check.what}: {check.error:.2e} > {check.tolerance:.2e} {check.note}")
    for speed in broken:
        print(f"FAIL {speed.job}, {speed.shape}, {speed.dtype}: {speed.how}")
    return 1 if failed or broken or (strict and missed) else 0


def content(machine: dict[str, Any], checks: list[Check], measured: list[Speed]) -> str:
    """Return speeds, the number of checks and the failed ones as JSON. Errors are strings: they may be infinite."""
    found = {
        **machine,
        "speed": [{**asdict(speed), "met": speed.met} for speed in measured],
        "n_checks": len(checks),
        "failed": [{**asdict(check), "error": str(check.error)} for check in checks if not check.passed],
    }
    return json.dumps(found, indent=1)


def main() -> int:
    """Run the checks, write the results, and return the exit code."""
    parser = argparse.ArgumentParser(description="Check torchcalib on a GPU.")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--strict", action="store_true", help="exit with code 1 if a speed goal is missed")
    parser.add_argument("--no-speed", action="store_true", help="run the checks without measuring speed")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes for the checks")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"cuda_check: no CUDA device (torch {torch.__version__}). Nothing was run.")
        return 0
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required for deterministic matrix products
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    machine = {
        "device": gpu,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": next(filter(None, map(version_of, ("triton", "triton-windows", "pytorch-triton"))), None),
        "torchcalib": tc.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    checks = print_checks(check_all(device, arguments.jobs))
    measured = [] if arguments.no_speed else print_speeds(speeds(device))
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    out = arguments.out or RESULTS / f"cuda-{slug}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(content(machine, checks, measured))
    code = exit_code(checks, measured, arguments.strict)
    print(f"written to {out}")
    return code


if __name__ == "__main__":
    sys.exit(main())
