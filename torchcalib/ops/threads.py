"""Thread pool for compiled loops that release the global interpreter lock."""

import math
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

PER_RANGE = 2**17  # smallest number of input values per range; fewer are not worth the start of a thread
_RANGES_PER_THREAD = 4


_QUOTAS = {  # files of a quota in microseconds, and of the period for which it holds, in control groups of Linux
    "cpu.max": "",  # version 2: "quota period" in one file; the quota may be "max"
    "cpu/cpu.cfs_quota_us": "cpu/cpu.cfs_period_us",  # version 1: -1 is no quota
}


def available_cpus(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of CPUs that this process may use: those of its affinity, at most the quota of its container.

    torch and Python count all CPUs of the machine. More threads than the quota wait for each other.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # not on macOS and Windows
    n_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for quota, period in _QUOTAS.items():
        try:
            words = [word for name in (quota, period) if name for word in (groups / name).read_text().split()]
            limit = float(words[0]) / float(words[1])
        except (OSError, ValueError, IndexError):  # no such file, or "max"
            continue
        if limit > 0:
            n_cpus = min(n_cpus, math.ceil(limit))
    return n_cpus


_N_CPUS = available_cpus()
_here = threading.local()  # `is_working`: whether this thread works on a range of `in_threads`


def n_threads() -> int:
    """Return the number of threads for a large problem."""
    return min(torch.get_num_threads(), _N_CPUS)


def limit_threads() -> None:
    """Make torch use at most `n_threads()` threads in this process. For programs, not for a library."""
    torch.set_num_threads(n_threads())


@cache
def _workers(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, thread_name_prefix="torchcalib")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a forked process has no worker threads


def in_threads(work: Callable[[int, int], None], n: int, n_entries: int, per_range: int = PER_RANGE) -> None:
    """Call `work(begin, end)` on ranges that cover `0..n-1`, in up to `n_threads()` threads.

    Results must not depend on the ranges. A range has at least `per_range` of the `n_entries` input values. If `work`
    calls this function again, the calling thread does all of that work. Errors of `work` are raised again after all
    threads have finished.

    Each thread takes the next range when it has finished one. A thread that starts late, because other programs or the
    waiting threads of torch use its CPU, thus leaves more ranges to the others.
    """
    threads = n_threads()
    n_ranges = min(_RANGES_PER_THREAD * threads, n_entries // per_range, n)
    if threads == 1 or n_ranges <= 1 or getattr(_here, "is_working", False):
        work(0, n)
        return
    n_ranges -= n_ranges % min(threads, n_ranges)  # as many for each thread
    ranges = iter([(n * k // n_ranges, n * (k + 1) // n_ranges) for k in range(n_ranges)])
    inference = torch.is_inference_mode_enabled()

    def work_on_ranges() -> None:
        _here.is_working = True
        try:
            with torch.inference_mode(inference):  # it is thread-local
                for begin, end in ranges:
                    work(begin, end)
        finally:
            _here.is_working = False

    pool = _workers(threads - 1)  # the calling thread is not in the pool
    futures: list[Future[None]] = []
    try:
        futures.extend(pool.submit(work_on_ranges) for _ in range(min(threads, n_ranges) - 1))
    except RuntimeError as error:
        if "shutdown" not in str(error):  # at the end of the interpreter, the calling thread does the rest
            raise
    try:
        work_on_ranges()
    finally:  # wait even after an error, because the threads write to arrays of the caller
        raised = [future.exception() for future in futures if not future.cancel()]
    for each in filter(None, raised):
        raise each
