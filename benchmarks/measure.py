"""Measurements of jobs: seconds of all sides in turn, memory of one call, and seconds at other sizes.

`benchmarks.run` calls them in new processes, so that they share no memory, caches or imports. Only jobs that are not
`alone` share a process.
"""

import ctypes
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from benchmarks.job import OURS, Call, Job, jobs_of, named
from torchcalib.ops import dispatch

FEW_ROWS = 64  # enough for a call that compiles and imports all required code


def seconds(call: Call, repeats: int = 1, device: str = "cpu") -> float:
    """Return the mean time of repeated calls, until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize(device)


def captured(call: Call) -> Call:
    """Return a function that replays a call as a CUDA graph.

    Capturing runs nothing. An earlier call must have compiled all kernels.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = call()

    def replay(kept: object = held) -> object:  # the results are in the memory of the graph
        graph.replay()
        return kept

    return replay


def seconds_of_graph(replay: Call) -> float:
    """Return the time of a replay on the device, after its cache was overwritten."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    size = 4 * torch.cuda.get_device_properties().L2_cache_size
    torch.empty(size, dtype=torch.uint8, device="cuda").fill_(1)
    begin.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def hide_numba() -> None:
    """Make the import of numba fail in this process."""
    sys.modules["numba"] = None  # type: ignore[assignment]


def use_numba() -> None:
    """Use compiled loops for small calls, too, as a process does after many of them."""
    dispatch.RULE = "always"


def of_job(quantity: Callable[..., Any], family: str, name: str, *options: Any) -> Any:
    """Return a quantity of a job by its name."""
    return quantity(named(jobs_of(family), name), *options)


def times(job: Job, rounds: int | None = None, device: str = "cpu") -> dict[str, Any]:
    """Return seconds by side, differences of values, and the sizes of states.

    The first round (compilation, caches) is dropped.

    Raises:
        ValueError: if the values of the sides differ by more than the tolerance.
    """
    calls = job.calls(device)
    for call in calls.values() if job.graph else ():
        call()
    graphs = {side: captured(call) for side, call in calls.items() if job.graph}
    taken: dict[str, list[float]] = {side: [] for side in calls}
    for _ in range((rounds or job.rounds) + 1):
        for side, so_far in taken.items():
            once = seconds_of_graph(graphs[side]) if job.graph else seconds(calls[side], job.repeats, device)
            so_far.append(once / job.shares.get(side, 1))
    return {
        "differences": differences(job, calls),
        "seconds": {side: so_far[1:] for side, so_far in taken.items()},
        "shares": dict(job.shares),
        "state_bytes": {
            side: {updates: state_bytes(call(updates)) for updates in job.updates}
            for side, call in calls.items()
            if job.updates
        },
    }


def state_bytes(metric: Metric) -> int:
    """Return the size of all state tensors of a metric in bytes."""
    states = [getattr(metric, name) for name in metric._defaults]
    return sum(x.nbytes for state in states for x in (state if isinstance(state, list) else [state]))


def differences(job: Job, calls: Mapping[str, Call]) -> dict[str, float]:
    """Return the difference of our result from that of every peer; no differences without a tolerance."""
    if job.tolerance is None:
        return {}
    results = {side: call() for side, call in calls.items()}
    found = {side: difference(results[OURS], result) for side, result in results.items() if side != OURS}
    for side, value in found.items():
        if not value <= job.tolerance:
            raise ValueError(f"`{job.name}`: the values must agree to {job.tolerance:g} with {side}, got {value:.2g}.")
    return found


def difference(ours: Any, theirs: Any) -> float:
    """Return the largest difference of numbers, divided by the largest number of the peer.

    Values are numbers, arrays, tensors, or dictionaries of them. The peer may have further keys.
    """
    ours, theirs = (x.compute() if isinstance(x, Metric) else x for x in (ours, theirs))
    expected = vector({name: theirs[name] for name in ours} if isinstance(ours, Mapping) else theirs)
    return ((vector(ours) - expected).abs().max() / expected.abs().max()).item()


def vector(value: Any) -> Tensor:
    if isinstance(value, Mapping | list | tuple):
        parts = value.values() if isinstance(value, Mapping) else value
        return torch.cat([vector(each) for each in parts])
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().flatten()


def extra_bytes(job: Job, side: str) -> int | None:
    """Return the peak of resident memory during one call, minus the memory before it and the size of its result.

    Before the call the data are prepared, a call with few rows has compiled and imported all code, and freed memory is
    returned to the system. None on systems other than Linux, where a process cannot reset its peak.
    """
    high_water_mark = Path("/proc/self/clear_refs")
    if not high_water_mark.exists():
        return None
    job.calls(n=FEW_ROWS)[side]()
    call = job.calls()[side]
    result = sum(x.nbytes for x in call.args if isinstance(x, Tensor) and x.requires_grad)
    ctypes.CDLL(None).malloc_trim(0)
    high_water_mark.write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    call()
    return resident_bytes("VmHWM") - before - result


def resident_bytes(field: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) resident memory of this process."""
    found = re.search(rf"^{field}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def growth(job: Job, rounds: int | None = None) -> list[dict[str, Any]]:
    """Return the seconds of our side at other sizes."""
    points = []
    for sizes in job.grows:
        ours = job.calls(**sizes)[OURS]
        points.append({**sizes, "seconds": [seconds(ours) for _ in range((rounds or job.rounds) + 1)][1:]})
    return points
