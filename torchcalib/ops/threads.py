"""Thread pool for compiled loops that release the global interpreter lock."""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import torch

PER_THREAD = 2**18  # smallest number of input values per thread; fewer are not worth the start of a thread


@cache
def _workers(n_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n_threads, thread_name_prefix="torchcalib")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.cache_clear)  # a forked process has no worker threads


def in_threads(work: Callable[[int, int], None], n: int, n_entries: int) -> None:
    """Call `work(begin, end)` on ranges that cover `0..n-1`, in up to `torch.get_num_threads()` threads.

    Results must not depend on the ranges, and `work` must not call `in_threads`. A thread gets at least `PER_THREAD` of
    the `n_entries` input values. Errors of `work` are raised again after all threads have finished.
    """
    n_threads = min(torch.get_num_threads(), max(1, n_entries // PER_THREAD), n)
    if n_threads <= 1:
        work(0, n)
        return
    inference = torch.is_inference_mode_enabled()

    def as_caller(begin: int, end: int) -> None:  # inference mode is thread-local
        with torch.inference_mode(inference):
            work(begin, end)

    cuts = [n * k // n_threads for k in range(n_threads + 1)]
    futures = _submit(as_caller, cuts[1:])
    try:
        work(0, cuts[1])
        # The calling thread runs the ranges that the pool did not accept.
        if (begin := cuts[1 + len(futures)]) < n:
            work(begin, n)
    finally:  # wait even after an error, because the threads write to tensors of the caller
        errors = [future.exception() for future in futures]
    for error in filter(None, errors):
        raise error


def _submit(work: Callable[[int, int], None], cuts: list[int]) -> list[Future[None]]:
    """Submit `work` for each range between consecutive cuts. Return fewer futures if the interpreter shuts down."""
    pool = _workers(torch.get_num_threads() - 1)  # the calling thread is not in the pool
    futures: list[Future[None]] = []
    try:
        for begin, end in pairwise(cuts):
            futures.append(pool.submit(work, begin, end))
    except RuntimeError as error:
        if "shutdown" not in str(error):
            raise
    return futures
