"""Jobs for waiting times: imports, commands in a new process, and reports."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchcalib as tc
from benchmarks.job import Job, alternative
from benchmarks.samples import binary, folder, logits

COMMAND = "-m", "torchcalib"


def process(*arguments: str, code: int = 0) -> Callable[[], None]:
    """Return a call that runs a new Python process, and checks its exit code.

    The first call writes the bytecode of modules, as in an installation.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run() -> None:
        call = [sys.executable, *arguments]
        done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == code, done.stderr

    return run


@alternative(title="import torch")
def import_torch(*_: Any) -> None:
    process("-c", "import torch")()


@alternative(title="import torch, torchmetrics")
def import_torchmetrics(*_: Any) -> None:
    process("-c", "import torch, torchmetrics")()


def no_data() -> tuple[()]:
    return ()


def multiclass_file(n: int = 10_000, num_classes: int = 10) -> tuple[Path]:
    preds, target = logits(n, num_classes)
    path = folder() / "predictions.npz"
    np.savez(path, logits=preds.numpy(), targets=target.numpy())
    return (path,)


def report_of_file(path: Path) -> None:
    process(*COMMAND, "report", str(path))()


binary_rows = partial(binary, n=50_000, dtype=torch.float64)
binary_report = partial(tc.report, task="binary", from_logits=False)
multiclass_report = partial(tc.report, task="multiclass", from_logits=True)
importing = process("-c", "import torch, torchcalib; ")
of_one_metric = process("-c", "import torch, torchcalib; torchcalib.ECE")
wrong_path = process(*COMMAND, "report", "no.csv", code=2)
both = {import_torch: None, import_torchmetrics: None}
JOBS = [
    Job("import torchcalib", no_data, importing, {import_torch: 1.1}, rounds=5),
    Job("import torchcalib, and one metric", no_data, of_one_metric, both, rounds=5),
    Job("torchcalib --help", no_data, process(*COMMAND, "--help"), seconds=0.5, rounds=5),
    Job("torchcalib report, wrong path", no_data, wrong_path, seconds=0.5, rounds=5),
    Job(
        "torchcalib report, 10,000 x 10, new process",
        multiclass_file,
        report_of_file,
        {import_torchmetrics: None},
        seconds=3,
        rounds=5,
    ),
    Job("report, 10,000 x 10", partial(logits, n=10_000, num_classes=10), multiclass_report, seconds=1.5, rounds=5),
    Job("report, binary, 50,000", binary_rows, binary_report, seconds=4, rounds=5),
    Job(
        "report, 50,000 x 1,000",
        partial(logits, n=50_000, num_classes=1_000),
        multiclass_report,
        seconds=10,
        extra_bytes=700_000_000,
        rounds=3,
    ),
]
