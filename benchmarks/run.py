"""Run jobs, print their table, and write it to `benchmarks/results/<machine>.json`.

    python -m benchmarks.run                    all families
    python -m benchmarks.run ranked             one family
    python -m benchmarks.run ranked --job TCE   its jobs with "TCE" in their names
    python -m benchmarks.run --trial 2          two rounds of everything; writes nothing
    python -m benchmarks.run --check            list ratios that are worse than the stored ones; writes nothing

Every job runs all its sides in turn in a separate process. Ratios of times are comparable between machines, but times
are not. Memory and growth are measured in further processes. `python -m benchmarks.limits` then compares kernels with
the limits of the machine, and `python -m benchmarks.readme` writes the tables of the README and of
`benchmarks/results/README.md`. The exit code is 1 if a goal is missed, or, with `--check`, if a
ratio is more than 20% above the stored one. Stored ratios are those of this processor, or of all others.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.job import FAMILIES, OURS, Job, jobs_of, version_of
from benchmarks.record import WORSE, Line, Record, compared_ratios, growth_lines, lines, missed, recorded

BASE_PACKAGES = ("torchcalib", "torch", "torchmetrics", "numba", "numpy")
PEER_PACKAGES = ("scipy", "scikit-learn", "probmetrics", "psrcal", "relplot")
RESULTS = Path(__file__).parent / "results"
WIDTHS = {"ours": 32, "theirs": 32, "ratio": 10, "goal": 10, "verdict": 30}


def machine() -> dict[str, Any]:
    """Return the properties of the machine that affect times, without the host name."""
    here = {"cpu": cpu_model(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    versions = {package: version_of(package) for package in BASE_PACKAGES + PEER_PACKAGES}
    return here | {"python": platform.python_version()} | versions


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def run(family: str, job: Job, trial: int | None = None) -> Record:
    rounds = ["--rounds", str(trial)] if trial else []
    times = measured(family, job, "times", *rounds)
    sides = [] if job.extra_bytes is None else job.sides if job.numba else [OURS]  # peers do not depend on numba
    extra_bytes = {side: measured(family, job, "memory", "--side", side) for side in sides}
    growth = measured(family, job, "growth", *rounds) if job.grows else []
    return recorded(job, times, extra_bytes, growth)


def measured(family: str, job: Job, what: str, *options: str) -> Any:
    """Measure one quantity in a new process."""
    command = [sys.executable, "-m", "benchmarks.measure", family, job.name, what, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.name}: {done.stderr}")
    return json.loads(done.stdout)


def show(job: Job, record: Record) -> None:
    print(f"\n{job.name}")
    for line in lines(job, record):
        print(columns(line))
    for line in growth_lines(record):
        print(f"  {line}")
    sys.stdout.flush()


def columns(line: Line) -> str:
    """Return a line of the table as text, with its longest column last."""
    return f"{''.join(f'{getattr(line, column):>{width}}' for column, width in WIDTHS.items())}  {line.what}"


def path_of(here: dict[str, Any]) -> Path:
    """Return the results file of a machine."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{here['cpu']} {here['cores']} cores".lower()).strip("-")
    return RESULTS / f"{name}.json"


def stored_records(here: dict[str, Any]) -> list[Record]:
    """Return the records of this machine, or of all others if there are none."""
    own = path_of(here)
    paths = [own] if own.is_file() else sorted(RESULTS.glob("*.json"))
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [record for file in files for records in file.get("families", {}).values() for record in records]


def check(here: dict[str, Any], jobs: dict[str, list[Job]], trial: int | None) -> int:
    """Measure ratios, compare them with the stored ones, and return 1 if one is worse."""
    stored, worse, n_compared = stored_records(here), [], 0
    for family, some in jobs.items():
        for job in some:
            if job.sides == [OURS]:
                continue
            only_times = replace(job, extra_bytes=None, grows=())
            record = run(family, only_times, trial)
            show(only_times, record)
            more, n = compared_ratios(record, stored)
            worse, n_compared = worse + more, n_compared + n
    limit = f"{WORSE - 1:.0%} above the stored one"
    print("", *worse, f"{n_compared} ratios compared, {len(worse)} of them more than {limit}", sep="\n")
    return int(bool(worse))


def save(here: dict[str, Any], family: str, records: list[Record]) -> Path:
    """Write records of this machine. Keep records of jobs that did not run, and drop those of removed jobs."""
    path = path_of(here)
    kept = json.loads(path.read_text()) if path.is_file() else {"families": {}}
    by_name = {record["job"]: record for record in (*kept["families"].get(family, []), *records)}
    kept["machine"] = here
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
    chosen = parser.parse_args()
    if unknown := [family for family in chosen.families if family not in FAMILIES]:
        parser.error(f"no family {unknown[0]!r}; there are {', '.join(FAMILIES)}")
    if chosen.trial is not None and chosen.trial < 1:
        parser.error(f"--trial must be at least 1, got {chosen.trial}")
    jobs = {
        family: [job for job in jobs_of(family) if chosen.job.lower() in job.name.lower()]
        for family in chosen.families or FAMILIES
    }
    if not any(jobs.values()):
        parser.error(f"no job with {chosen.job!r} in its name")
    here = machine()
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    print(columns(Line("held against", "ours: median [least, most]", "theirs", "ratio", "goal", "")))
    if chosen.check:
        return check(here, jobs, chosen.trial)
    any_missed = False
    for family, some in jobs.items():
        records = []
        for job in some:
            records.append(run(family, job, chosen.trial))
            show(job, records[-1])
        if records and not chosen.trial:
            print(f"\nwritten to {save(here, family, records)}")
        any_missed |= any(map(missed, some, records))
    return int(any_missed)


if __name__ == "__main__":
    sys.exit(main())
