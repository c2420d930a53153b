"""Ranks as threads, which communicate only by a function that gathers tensors."""

import threading
from concurrent.futures import ThreadPoolExecutor


def on_ranks(n, work):
    """Return the results of `work(rank, gather)` on n ranks."""
    barrier, sent = threading.Barrier(n, timeout=600), [None] * n

    def gather_of(rank):
        def gather(tensor, *, group):
            sent[rank] = tensor
            barrier.wait()
            everyone = list(sent)
            barrier.wait()
            assert len({(theirs.shape, theirs.dtype) for theirs in everyone}) == 1, "a plain all_gather would fail"
            return everyone

        return gather

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(lambda rank: work(rank, gather_of(rank)), range(n)))


def connected(gather):
    """Return the arguments of a metric on a rank."""
    return {"dist_sync_fn": gather, "distributed_available_fn": lambda: True}
