"""Jobs for waiting times: imports, commands in a new process, and reports."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.job import Job, Peer, Sides
from benchmarks.samples import binary, folder, logits

IMPORT_TORCH, IMPORT_TORCHMETRICS = "import torch", "import torch, torchmetrics"
COMMAND = "-m", "torchcalib"


def process(*arguments: str, code: int = 0) -> Callable[[], object]:
    """Return a call that runs a new Python process, and checks its exit code.

    The first call writes the bytecode of modules, as in an installation.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def run() -> None:
        call = [sys.executable, *arguments]
        done = subprocess.run(call, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == code, done.stderr

    return run


def imports(what: str) -> Sides:
    peers = {name: process("-c", name) for name in (IMPORT_TORCH, IMPORT_TORCHMETRICS)}
    return Sides(process("-c", f"import torch, torchcalib; {what}"), peers)


def light_command(*arguments: str, code: int = 0) -> Sides:
    return Sides(process(*COMMAND, *arguments, code=code))


def sample(n: int, num_classes: int | None) -> tuple[Tensor, Tensor]:
    """Return logits of several classes, or binary probabilities."""
    return binary(n, torch.float64) if num_classes is None else logits(n, num_classes)


def command(n: int = 10_000, num_classes: int | None = 10) -> Sides:
    """`torchcalib report` of a file."""
    preds, target = sample(n, num_classes)
    path = folder() / "predictions.npz"
    np.savez(path, **{"probs" if num_classes is None else "logits": preds.numpy(), "targets": target.numpy()})
    return Sides(process(*COMMAND, "report", str(path)), {IMPORT_TORCHMETRICS: process("-c", IMPORT_TORCHMETRICS)})


def report(n: int = 10_000, num_classes: int | None = 10) -> Sides:
    preds, target = sample(n, num_classes)
    given = {"task": "binary" if num_classes is None else "multiclass", "from_logits": num_classes is not None}
    return Sides(lambda: tc.report(preds, target, **given))


JOBS = [
    Job("import torchcalib", partial(imports, ""), (Peer(IMPORT_TORCH, 1.1),), rounds=5),
    Job(
        "import torchcalib, and one metric",
        partial(imports, "torchcalib.ECE"),
        (Peer(IMPORT_TORCH), Peer(IMPORT_TORCHMETRICS)),
        rounds=5,
    ),
    Job("torchcalib --help", partial(light_command, "--help"), seconds=0.5, rounds=5),
    Job("torchcalib report, wrong path", partial(light_command, "report", "no.csv", code=2), seconds=0.5, rounds=5),
    Job(
        "torchcalib report, 10,000 x 10, new process",
        command,
        (Peer(IMPORT_TORCHMETRICS),),
        seconds=3,
        rounds=5,
    ),
    Job("report, 10,000 x 10", report, seconds=1.5, rounds=5),
    Job("report, binary, 50,000", partial(report, n=50_000, num_classes=None), seconds=4, rounds=5),
    Job(
        "report, 50,000 x 1,000",
        partial(report, n=50_000, num_classes=1_000),
        seconds=10,
        extra_bytes=700_000_000,
        rounds=3,
    ),
]
