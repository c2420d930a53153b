"""A job for values that are synchronised across ranks, each a process with one thread."""

import atexit
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

import torchcalib as tc
from benchmarks.job import Job
from benchmarks.one_pass import eight_metrics, network_logits

VALUES = 20  # values per call; starting a call takes about as long as one value


def started(n: int = 256, num_classes: int = 1_000, ranks: int = 2) -> list[Connection]:
    """Start the ranks, and return a connection to each."""
    context, store = get_context("spawn"), tempfile.mkdtemp()
    atexit.register(shutil.rmtree, store)
    pipes = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, rank, ranks, store, n, num_classes), daemon=True).start()
        pipes.append(ours)
    return pipes


def synced_values(*pipes: Connection) -> None:
    """Update eight metrics with n rows on every rank, and compute the values over all ranks, several times."""
    for pipe in pipes:
        pipe.send(None)
    for pipe in pipes:
        pipe.recv()


def serve(pipe: Connection, rank: int, ranks: int, store: str, n: int, num_classes: int) -> None:
    """Compute `VALUES` values on one rank for each request, until the connection is closed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=rank, world_size=ranks)
    logits, target = network_logits(n, num_classes)
    metrics = tc.CalibrationCollection(eight_metrics(num_classes))
    with suppress(EOFError):
        while True:
            pipe.recv()
            for _ in range(VALUES):
                metrics.update(logits, target)
                metrics.compute()
            pipe.send(None)


JOBS = [
    Job(
        f"{VALUES} updates and values of eight metrics, 256 x 1,000, 2 ranks",
        started,
        synced_values,
        grows=tuple({"n": 256, "ranks": ranks} for ranks in (1, 2, 3, 4)),
    )
]
