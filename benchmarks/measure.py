"""Measure one thing about one job in this process, and print it as JSON.

    python -m benchmarks.measure FAMILY JOB times [--rounds K]   seconds of all sides in turn; error; size of the state
    python -m benchmarks.measure FAMILY JOB memory --side SIDE   bytes that one call takes beside data and result
    python -m benchmarks.measure FAMILY JOB growth [--rounds K]  seconds of our side at other sizes

`benchmarks.run` starts such a process for each, so that none finds the memory, the caches or the imports of another.
"""

import argparse
import ctypes
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.families import jobs_of
from benchmarks.job import OURS, Call, Job, named

FEW_ROWS = 64  # what is called with them compiles and imports all that it needs


def seconds(call: Call) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def times(job: Job, rounds: int) -> dict[str, Any]:
    """Seconds of every round, by side, all sides in turn; the error, and the size of the state of every side.

    One round before them is not counted (compilation, page faults).
    """
    sides = job.prepare()
    taken: dict[str, list[float]] = {side: [] for side in job.sides}
    for _ in range(rounds + 1):
        for side, so_far in taken.items():
            so_far.append(seconds(sides.call(side)) / sides.shares.get(side, 1))
    return {
        "seconds": {side: so_far[1:] for side, so_far in taken.items()},
        "shares": dict(sides.shares),
        "error": None if sides.error is None else sides.error(),
        "state_bytes": {
            side: {updates: sides.states[side](updates) for updates in job.updates}
            for side in job.sides
            if side in sides.states
        },
    }


def extra_bytes(job: Job, side: str) -> int | None:
    """Most resident memory during one call of a side, less what was resident before it and less its result.

    Before it, the data is ready, a call on a few rows has compiled and imported all that there is, and memory that was
    freed on the way has gone back to the system: the call cannot fill it unseen. None where the system (Linux) does not
    let a process start its high-water mark anew: the mark that `getrusage` gives includes the making of the data.
    """
    restart_mark = Path("/proc/self/clear_refs")
    if not restart_mark.exists():
        return None
    job.prepare(n=FEW_ROWS).call(side)()
    sides = job.prepare()
    ctypes.CDLL(None).malloc_trim(0)
    restart_mark.write_text("5")
    before = resident_bytes("VmRSS")
    sides.call(side)()
    return resident_bytes("VmHWM") - before - sides.result_bytes


def resident_bytes(field: str) -> int:
    """Resident memory of this process: VmRSS now, VmHWM at most since the mark was started anew."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def growth(job: Job, rounds: int) -> list[dict[str, Any]]:
    """Seconds of our side at other sizes, one size after another."""
    points = []
    for sizes in job.grows:
        ours = job.prepare(**sizes).ours
        points.append({**sizes, "seconds": [seconds(ours) for _ in range(rounds + 1)][1:]})
    return points


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("job")
    parser.add_argument("what", choices=("times", "memory", "growth"))
    parser.add_argument("--side", default=OURS)
    parser.add_argument("--rounds", type=int)
    chosen = parser.parse_args()
    job = named(jobs_of(chosen.family), chosen.job)
    if not job.numba:
        sys.modules["numba"] = None  # type: ignore[assignment]  # an import of it raises from now on
    rounds = chosen.rounds or job.rounds
    measured = {
        "times": lambda: times(job, rounds),
        "memory": lambda: extra_bytes(job, chosen.side),
        "growth": lambda: growth(job, rounds),
    }
    print(json.dumps(measured[chosen.what]()))


if __name__ == "__main__":
    main()
