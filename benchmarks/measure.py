"""Measure one quantity of one job in this process, and print it as JSON.

    python -m benchmarks.measure FAMILY JOB times [--rounds K]   seconds of all sides in turn; error; size of the state
    python -m benchmarks.measure FAMILY JOB memory --side SIDE   additional bytes of one call
    python -m benchmarks.measure FAMILY JOB growth [--rounds K]  seconds of our side at other sizes

`benchmarks.run` starts a process for each quantity, so that they share no memory, caches or imports.
"""

import argparse
import ctypes
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.job import OURS, Call, Job, jobs_of, named

FEW_ROWS = 64  # enough for a call that compiles and imports all required code


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def times(job: Job, rounds: int) -> dict[str, Any]:
    """Return seconds by side, the error, and the sizes of states. The first round (compilation, caches) is dropped."""
    sides = job.prepare()
    taken: dict[str, list[float]] = {side: [] for side in job.sides}
    for _ in range(rounds + 1):
        for side, so_far in taken.items():
            so_far.append(seconds(sides.call(side)) / sides.shares.get(side, 1))
    measured = [side for side in job.sides if side in sides.states]
    return {
        "seconds": {side: so_far[1:] for side, so_far in taken.items()},
        "shares": dict(sides.shares),
        "error": None if sides.error is None else sides.error(),
        "state_bytes": {side: {updates: sides.states[side](updates) for updates in job.updates} for side in measured},
    }


def extra_bytes(job: Job, side: str) -> int | None:
    """Return the peak of resident memory during one call, minus the memory before it and the size of its result.

    Before the call the data are prepared, a call with few rows has compiled and imported all code, and freed memory is
    returned to the system. None on systems other than Linux, where a process cannot reset its peak.
    """
    high_water_mark = Path("/proc/self/clear_refs")
    if not high_water_mark.exists():
        return None
    job.prepare(n=FEW_ROWS).call(side)()
    sides = job.prepare()
    ctypes.CDLL(None).malloc_trim(0)
    high_water_mark.write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    sides.call(side)()
    return resident_bytes("VmHWM") - before - sides.result_bytes


def resident_bytes(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) resident memory of this process."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def growth(job: Job, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of our side at other sizes."""
    points = []
    for sizes in job.grows:
        ours = job.prepare(**sizes).ours
        points.append({**sizes, "seconds": [seconds(ours) for _ in range(rounds + 1)][1:]})
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("job")
    parser.add_argument("what", choices=("times", "memory", "growth"))
    parser.add_argument("--side", default=OURS)
    parser.add_argument("--rounds", type=int)
    chosen = parser.parse_args()
    job = named(jobs_of(chosen.family), chosen.job)
    if not job.numba:
        sys.modules["numba"] = None  # type: ignore[assignment]  # makes its import fail
    rounds = chosen.rounds or job.rounds
    if chosen.what == "memory":
        found: Any = extra_bytes(job, chosen.side)
    else:
        found = (times if chosen.what == "times" else growth)(job, rounds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
