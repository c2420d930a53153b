"""Run jobs, print their table, and keep it in `benchmarks/results/<machine>.json`.

    python -m benchmarks.run                    all families
    python -m benchmarks.run ranked             one family
    python -m benchmarks.run ranked --job TCE   its jobs with "TCE" in their names

Every job runs in a process of its own, its two sides in turn; what counts is the ratio, for times differ from machine
to machine. A goal that is missed makes the exit code 1.
"""

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.job import Job

FAMILIES = ("ranked", "calibration")
PACKAGES = ("torchcalib", "torch", "numba", "numpy", "scipy", "scikit-learn", "probmetrics", "psrcal")
RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the times depend on; no name of a host."""
    here = {"cpu": cpu_model(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}
    return here | {"python": platform.python_version()} | {package: version_of(package) for package in PACKAGES}


def cpu_model() -> str:
    """Name of the CPU, as the system gives it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def run(family: str, job: Job) -> dict[str, Any]:
    """Time a job and hold it against its goals."""
    command = [sys.executable, "-m", "benchmarks.measure", family, job.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{job.name}: {done.stderr}")
    times = json.loads(done.stdout)
    ours, peer = median(times["ours"]), median(times["peer"]) if times["peer"] else None
    ratio = ours / peer if peer else None
    goals = [(ours, job.within), (ratio, job.of_peer)]
    met = [value <= goal for value, goal in goals if value is not None and goal is not None]
    return {
        "job": job.name,
        "ours_s": summary(times["ours"]),
        "peer": job.peer or None,
        "peer_s": summary(times["peer"]) if peer else None,
        "peer_measured_on_share": times["peer_share"],
        "ratio": ratio,
        "goal_s": job.within,
        "goal_ratio": job.of_peer,
        "met": all(met) if met else None,
    }


def summary(times: list[float]) -> dict[str, float]:
    """Median and spread."""
    return {"median": median(times), "least": min(times), "most": max(times), "rounds": len(times)}


def line(result: dict[str, Any]) -> str:
    """One job of the table."""
    peer, share = result["peer_s"], result["peer_measured_on_share"]
    scaled = f", measured on {share:.3g} of the work and scaled" if share < 1 else ""
    goals = [clock(result["goal_s"])] if result["goal_s"] else []
    goals += [f"1/{1 / result['goal_ratio']:,.1f}".removesuffix(".0")] if result["goal_ratio"] else []
    verdict = {True: "met", False: "MISSED", None: ""}[result["met"]]
    ratio = f"1/{1 / result['ratio']:,.1f}" if peer else ""
    columns = [
        f"{result['job']:<42}",
        f"{spread(result['ours_s']):>30}",
        f"{spread(peer) if peer else '':>30}",
        f"{ratio:>10}",
        f"{' and '.join(goals):>20}",
        f"{verdict:>7}",
        f"  {result['peer'] or ''}{scaled}",
    ]
    return "".join(columns).rstrip()


def spread(times: dict[str, float]) -> str:
    """Median [least, most]."""
    return f"{clock(times['median'])} [{clock(times['least'])}, {clock(times['most'])}]"


def clock(seconds: float) -> str:
    """Seconds or milliseconds, three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def save(here: dict[str, Any], family: str, results: list[dict[str, Any]]) -> Path:
    """Write results of this machine; jobs that did not run now keep what they had."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{here['cpu']} {here['cores']} cores".lower()).strip("-")
    path = RESULTS / f"{name}.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"families": {}}
    jobs = {old["job"]: old for old in kept["families"].get(family, [])} | {new["job"]: new for new in results}
    kept["machine"] = here
    kept["families"][family] = list(jobs.values())
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return path


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help=f"families of jobs, of: {', '.join(FAMILIES)}")
    parser.add_argument("--job", default="", help="only jobs with this in their names")
    chosen = parser.parse_args()
    here = machine()
    print(", ".join(f"{key} {value}" for key, value in here.items()))
    print(f"{'job':<42}{'ours: median [least, most]':>30}{'peer':>30}{'ratio':>10}{'goal':>20}")
    missed = False
    for family in chosen.families or FAMILIES:
        jobs = importlib.import_module(f"benchmarks.{family}").JOBS
        results = []
        for job in jobs:
            if chosen.job.lower() not in job.name.lower():
                continue
            if missing := [package for package in job.needs if version_of(package) is None]:
                print(f"{job.name:<42}left out: {', '.join(missing)} is not installed (extra `benchmarks`)")
                continue
            results.append(run(family, job))
            print(line(results[-1]), flush=True)
        print(f"written to {save(here, family, results)}")
        missed |= any(result["met"] is False for result in results)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
