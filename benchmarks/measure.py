"""Time one job in this process, and print the seconds as JSON: `python -m benchmarks.measure FAMILY JOB`.

`benchmarks.run` starts one such process for each job, so that no job finds the memory, the caches or the imports of
another.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable

from benchmarks.job import Job, named


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(job: Job) -> dict[str, list[float]]:
    """Seconds of every round, both sides in turn; one round before them is not counted (compilation, page faults)."""
    sides = job.prepare()
    ours, peer = [], []
    for _ in range(job.rounds + 1):
        ours.append(seconds(sides.ours))
        if sides.peer is not None:
            peer.append(seconds(sides.peer) / sides.peer_share)
    return {"ours": ours[1:], "peer": peer[1:], "peer_share": sides.peer_share}


def main(family: str, name: str) -> None:
    """Print the timings of one job."""
    job = named(importlib.import_module(f"benchmarks.{family}").JOBS, name)
    if not job.numba:
        sys.modules["numba"] = None  # an import of it raises from now on
    print(json.dumps(measure(job)))


if __name__ == "__main__":
    main(*sys.argv[1:])
