"""Work in threads of its own, for loops that let go of Python's lock."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch

_PER_THREAD = 2**18  # entries below which a thread costs more than it brings


def in_threads(work: Callable[[int, int], None], n: int, n_entries: int) -> None:
    """Call `work(begin, end)` over ranges that make up `0..n-1`, side by side on as many threads as torch may use.

    The threads are made for the call: a pool would not live on in a process that is forked.

    Args:
        work: must not depend on how the range is cut. What it raises is raised here.
        n: how many pieces of work there are.
        n_entries: how many numbers are read; few are read by one thread.
    """
    n_threads = min(torch.get_num_threads(), max(1, n_entries // _PER_THREAD), n)
    if n_threads <= 1:
        work(0, n)
        return
    cuts = [n * k // n_threads for k in range(n_threads + 1)]
    with ThreadPoolExecutor(n_threads - 1) as pool:
        others = [pool.submit(work, *pair) for pair in pairwise(cuts[1:])]
        work(0, cuts[1])
        for other in others:
            other.result()
