"""Compare kernels with the limits of the machine: `python -m benchmarks.limits`.

A kernel that reads B bytes and computes E exponentials takes at least max(B / bandwidth, E / rate): the roofline model
(Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785). Bandwidth and rate are measured on all threads of
torch. `exp` is the function of `ops.numba_math`, on data in the level-1 cache. The results are written to the results
file of the machine. They require numba.
"""

import json
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.job import Call
from benchmarks.measure import seconds
from benchmarks.one_pass import network_logits
from benchmarks.run import machine, path_of
from benchmarks.samples import like_imagenet_dogs
from torchcalib.ops import bin_sums, largest, softmax_stats
from torchcalib.ops.threads import in_threads

ROUNDS = 9
SIZE = 50_000, 1_000
EVENTS = 10_000_000
REPEATS = 20_000  # passes over a block that fits into the level-1 cache, on each thread


class Kernel(NamedTuple):
    """A call, the number of bytes that it reads and writes at least, and its number of exponentials or logarithms."""

    name: str
    call: Call
    n_bytes: int
    n_exps: int


def kernels() -> Iterator[Kernel]:
    logits, target = network_logits(*SIZE)
    probs = logits.softmax(-1)
    given = {"from_logits": True}
    rows = softmax_stats.rows(logits, target, **given)
    n_bytes, n = logits.nbytes, logits.numel()
    yield Kernel("statistics of rows of logits", lambda: softmax_stats.rows(logits, target, **given), n_bytes, n)
    yield Kernel(
        "statistics of rows of probabilities",
        lambda: softmax_stats.rows(probs, target, from_logits=False, tolerance=1e-3),
        n_bytes,
        n,
    )
    leaf = logits.detach().requires_grad_()
    loss = softmax_stats.rows(leaf, target, **given).log_prob.mean()

    def backward() -> Tensor:
        (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        return found

    yield Kernel("gradient of the statistics", backward, 2 * n_bytes, n)
    yield Kernel(
        "bin sums of every class",
        lambda: bin_sums.class_bins(logits, target, None, rows, from_logits=True, n_bins=15, right=False, noise=True),
        n_bytes,
        n,
    )
    yield Kernel("5 largest entries of rows", lambda: largest.largest(logits, target, 5, **given), n_bytes, 0)
    preds, labels = like_imagenet_dogs(EVENTS)
    preds = preds.float()
    yield Kernel(
        "bin sums of binary events",
        lambda: bin_sums.event_bins(preds, labels, None, None, n_bins=15, right=False, noise="labels"),
        preds.nbytes + labels.nbytes,
        0,
    )


def read_bandwidth() -> float:
    """Return the number of bytes per second that torch reads when it sums a large tensor."""
    x = torch.ones(SIZE)
    return x.nbytes / typical(x.sum)


def exp_rate() -> float:
    """Return the number of exponentials per second, on all threads together."""
    import numba

    from torchcalib.ops.numba_math import BLOCK, F, fill_exps

    @numba.njit(nogil=True)
    def repeat(x: Any, shifted: Any, exps: Any, n: int) -> None:
        for _ in range(n):
            fill_exps(x, F(0), shifted, exps)

    n_threads = torch.get_num_threads()

    def work(begin: int, end: int) -> None:
        x, shifted, exps = -np.ones((3, BLOCK), np.float32)
        repeat(x, shifted, exps, (end - begin) * REPEATS)

    work(0, 1)
    n = n_threads * REPEATS * BLOCK
    return n / typical(lambda: in_threads(work, n_threads, n))


def typical(call: Callable[[], object]) -> float:
    """Return the median time in seconds, after one call that compiles."""
    call()
    return median(seconds(call) for _ in range(ROUNDS))


def measured() -> dict[str, Any]:
    bandwidth, rate = read_bandwidth(), exp_rate()
    found = []
    for kernel in kernels():
        taken = typical(kernel.call)
        bounds = {"memory": kernel.n_bytes / bandwidth, "exponentials": kernel.n_exps / rate}
        limit = max(bounds, key=bounds.__getitem__)
        found.append({"kernel": kernel.name, "seconds": taken, "limit": limit, "share": bounds[limit] / taken})
    return {"bytes_per_second": bandwidth, "exps_per_second": rate, "kernels": found}


def main() -> int:
    here = machine()
    path = path_of(here)
    content = json.loads(path.read_text()) if path.is_file() else {"machine": here, "families": {}}
    content["limits"] = measured()
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["limits"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
