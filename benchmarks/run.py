"""Run jobs, print their table, and write it to `benchmarks/results/<machine>.json`.

    python -m benchmarks.run                    all families
    python -m benchmarks.run metrics             one family
    python -m benchmarks.run metrics --job TCE   its jobs with "TCE" in their names
    python -m benchmarks.run --trial 2          two rounds of everything; writes nothing
    python -m benchmarks.run --check            list ratios that are worse than the stored ones; writes nothing
    python -m benchmarks.run --device cuda      jobs that can run on a GPU, in a results file of its own

Every job runs all its sides in turn, in a separate process unless it shares one. Ratios of times are comparable between
machines, but times are not. Memory and growth are measured in further processes. `python -m benchmarks.readme` then
writes the tables of the README and of `benchmarks/results/README.md`. The exit code is 1 if a goal is missed, or, with
`--check`, if a ratio is more than 20% above the stored one. Stored ratios are those of this processor, or of all
others. Without a GPU, `--device cuda` runs nothing, and the exit code is 0.
"""

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure
from benchmarks.job import DEVICE, FAMILIES, OURS, Job, jobs_of, version_of
from benchmarks.record import WORSE, Line, Record, growth_lines, lines, missed, recorded, worse

BASE_PACKAGES = ("torchcalib", "torch", "torchmetrics", "numba", "numpy")
PEER_PACKAGES = ("scipy", "scikit-learn", "probmetrics", "psrcal", "relplot")
RESULTS = Path(__file__).parent / "results"
WIDTHS = {"ours": 32, "theirs": 32, "ratio": 10, "goal": 10, "verdict": 30}


def machine(device: str = "cpu") -> dict[str, Any]:
    """Return the properties of the machine that affect times, without the host name."""
    gpu = {} if device == "cpu" else {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    here = gpu | {"cpu": cpu_model(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    versions = {package: version_of(package) for package in BASE_PACKAGES + PEER_PACKAGES}
    return here | {"python": platform.python_version()} | versions


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def run(family: str, jobs: list[Job], trial: int | None = None, device: str = "cpu") -> Iterator[Record]:
    """Yield the record of each job as soon as it is measured."""
    for _, together in groupby(jobs, key=lambda job: job.process):
        some = list(together)
        for job, times in zip(some, measured(family, some, measure.times, trial, device), strict=True):
            sides = [] if job.extra_bytes is None else job.sides if job.numba else [OURS]  # peers do not need numba
            extra_bytes = {side: next(measured(family, [job], measure.extra_bytes, side)) for side in sides}
            growth = next(measured(family, [job], measure.growth, trial)) if job.grows else []
            yield recorded(job, times, extra_bytes, growth)


def measured(family: str, jobs: list[Job], quantity: Callable[..., Any], *options: Any) -> Iterator[Any]:
    """Measure one quantity of jobs in a new process, and yield it for each job as soon as it is known."""
    prepared = measure.use_numba if all(job.numba for job in jobs) else measure.hide_numba
    with ProcessPoolExecutor(1, get_context("spawn"), prepared) as process:
        for job in jobs:
            yield process.submit(measure.of_job, quantity, family, job.name, *options).result()


def runnable(jobs: list[Job], device: str) -> list[Job]:
    """Return the jobs that run on a device. On a GPU, numba makes no difference."""
    return jobs if device == "cpu" else [job for job in jobs if job.on_device and job.numba]


def show(job: Job, record: Record) -> None:
    print(f"\n{job.name}")
    for line in lines(job, record):
        print(columns(line))
    for growth in growth_lines(record):
        print(f"  {growth}")
    sys.stdout.flush()


def columns(line: Line) -> str:
    """Return a line of the table as text, with its longest column last."""
    return f"{''.join(f'{getattr(line, column):>{width}}' for column, width in WIDTHS.items())}  {line.what}"


def path_of(here: dict[str, Any]) -> Path:
    """Return the results file of a machine."""
    title = here.get("device") or f"{here['cpu']} {here['cores']} cores"
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return RESULTS / f"{name}.json"


def stored_records(here: dict[str, Any]) -> list[Record]:
    """Return the records of this machine, or of all others of its kind (CPU or GPU) if there are none."""
    own = path_of(here)
    paths = [own] if own.is_file() else sorted(RESULTS.glob("*.json"))
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    alike = [file["families"] for file in files if "families" in file and is_gpu(file["machine"]) == is_gpu(here)]
    return [record for families in alike for records in families.values() for record in records]


def is_gpu(machine: dict[str, Any]) -> bool:
    return "device" in machine


def save(here: dict[str, Any], family: str, records: list[Record]) -> Path:
    """Write records of this machine. Keep records of jobs that did not run, and drop those of removed jobs.

    Also keep versions of packages that are not installed now, because kept records depend on them.
    """
    path = path_of(here)
    kept = json.loads(path.read_text()) if path.is_file() else {"families": {}}
    by_name = {record["job"]: record for record in (*kept["families"].get(family, []), *records)}
    kept["machine"] = kept.get("machine", {}) | {key: value for key, value in here.items() if value is not None}
    kept["families"][family] = [by_name[job.name] for job in jobs_of(family) if job.name in by_name]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"families of jobs: {', '.join(FAMILIES)}")
    parser.add_argument("--job", default="", help="run only jobs whose names contain this text")
    parser.add_argument("--trial", type=int, metavar="ROUNDS", help="rounds of each job; writes nothing")
    parser.add_argument("--check", action="store_true", help="compare ratios with the stored ones; writes nothing")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the data")
    chosen = parser.parse_args()
    if unknown := [family for family in chosen.families if family not in FAMILIES]:
        parser.error(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    if chosen.trial is not None and chosen.trial < 1:
        parser.error(f"--trial must be at least 1, got {chosen.trial}")
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print(f"benchmarks.run: no CUDA device (torch {torch.__version__}). Nothing was run.")
        return 0
    jobs = {
        family: [job for job in runnable(jobs_of(family), chosen.device) if chosen.job.lower() in job.name.lower()]
        for family in chosen.families or FAMILIES
        if family != DEVICE or chosen.device != "cpu"
    }
    if not any(jobs.values()):
        parser.error(f"no job with {chosen.job!r} in its name")
    here = machine(chosen.device)
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    print(columns(Line("held against", "ours: median [least, most]", "theirs", "ratio", "goal", "")))
    stored, any_missed, n_worse = stored_records(here), False, 0
    for family, some in jobs.items():
        if chosen.check:
            some = [replace(job, extra_bytes=None, grows=()) for job in some if job.sides != [OURS]]
        records = []
        for job, record in zip(some, run(family, some, chosen.trial, chosen.device), strict=True):
            records.append(record)
            show(job, record)
        if chosen.check:
            found = worse(records, stored)
            n_worse += len(found)
            print("", *found, sep="\n")
        elif records and not chosen.trial:
            print(f"\nwritten to {save(here, family, records)}")
        any_missed |= any(map(missed, some, records))
    if chosen.check:
        print(f"{n_worse} ratios are more than {WORSE - 1:.0%} above the stored one")
    return int(n_worse > 0 if chosen.check else any_missed)


if __name__ == "__main__":
    sys.exit(main())
