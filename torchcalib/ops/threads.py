"""Work in threads of its own, for loops that let go of Python's lock."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

_PER_THREAD = 2**18  # entries below which a thread costs more than it brings


@cache
def _others(n_threads: int) -> ThreadPoolExecutor:
    """Return the threads that help the one that calls; they wait for the next call."""
    return ThreadPoolExecutor(n_threads, thread_name_prefix="torchcalib")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_others.cache_clear)  # threads do not live on in a process that is forked


def in_threads(work: Callable[[int, int], None], n: int, n_entries: int) -> None:
    """Call `work(begin, end)` over ranges that make up `0..n-1`, side by side on as many threads as torch may use.

    Args:
        work: must not depend on how the range is cut, nor call this. What it raises is raised here, once all are done.
        n: how many pieces of work there are.
        n_entries: how many numbers are read; few are read by one thread.
    """
    n_threads = min(torch.get_num_threads(), max(1, n_entries // _PER_THREAD), n)
    if n_threads <= 1:
        work(0, n)
        return
    inference = torch.is_inference_mode_enabled()

    def as_caller(begin: int, end: int) -> None:  # modes are a thread's own, and memory made in this one needs it
        with torch.inference_mode(inference):
            work(begin, end)

    cuts = [n * k // n_threads for k in range(n_threads + 1)]
    others = _submitted(as_caller, cuts[1:])
    try:
        work(0, cuts[1])
        if (begin := cuts[1 + len(others)]) < n:
            work(begin, n)
    finally:  # they write into what belongs to the caller
        errors = [other.exception() for other in others]
    for error in filter(None, errors):
        raise error


def _submitted(work: Callable[[int, int], None], cuts: list[int]) -> list[Future[None]]:
    """Hand out ranges between cuts; fewer than there are once the interpreter shuts down, which ends all pools."""
    pool = _others(torch.get_num_threads() - 1)
    others: list[Future[None]] = []
    try:
        for begin, end in pairwise(cuts):
            others.append(pool.submit(work, begin, end))
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
    return others
