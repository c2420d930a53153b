"""A thread pool for compiled loops, which release Python's lock."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

PER_THREAD = 2**18  # entries; starting a thread for fewer costs more than it saves


@cache
def _others(n_threads: int) -> ThreadPoolExecutor:
    """Return the pool of threads besides the calling one."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix="torchcalib")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_others.cache_clear)  # threads do not survive a fork


def in_threads(work: Callable[[int, int], None], n: int, n_entries: int) -> None:
    """Call `work(begin, end)` for ranges that cover `0..n-1`, on up to `torch.get_num_threads()` threads.

    Args:
        work: its result must not depend on how the range is cut; it must not call `in_threads`. Its errors are raised
            here after all threads have finished.
        n: number of pieces of work.
        n_entries: number of values that all pieces read; one thread reads few of them.
    """
    n_threads = min(torch.get_num_threads(), max(1, n_entries // PER_THREAD), n)
    if n_threads <= 1:
        work(0, n)
        return
    inference = torch.is_inference_mode_enabled()

    def as_caller(begin: int, end: int) -> None:  # inference mode is local to a thread
        with torch.inference_mode(inference):
            work(begin, end)

    cuts = [n * k // n_threads for k in range(n_threads + 1)]
    others = _submitted(as_caller, cuts[1:])
    try:
        work(0, cuts[1])
        if (begin := cuts[1 + len(others)]) < n:
            work(begin, n)
    finally:  # the threads write into memory of the caller: wait for them
        errors = [other.exception() for other in others]
    for error in filter(None, errors):
        raise error


def _submitted(work: Callable[[int, int], None], cuts: list[int]) -> list[Future[None]]:
    """Submit ranges between cuts to the pool; fewer during the shutdown of the interpreter, which closes all pools."""
    pool = _others(torch.get_num_threads() - 1)
    others: list[Future[None]] = []
    try:
        for begin, end in pairwise(cuts):
            others.append(pool.submit(work, begin, end))
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
    return others
