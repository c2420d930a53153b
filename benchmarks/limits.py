"""Compare kernels with the limits of the machine: `python -m benchmarks.limits`.

A kernel that reads B bytes and computes E exponentials takes at least max(B / bandwidth, E / rate): the roofline model
(Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785). Bandwidth and rate are measured on all threads of
torch. `exp` is the function of `ops.numba_math`, on data in the level-1 cache. The results are written to the results
file of the machine. They require numba. The page of results states the reason for every kernel below 40% of its limit.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.job import Call
from benchmarks.measure import seconds, use_numba
from benchmarks.one_pass import network_logits
from benchmarks.run import machine, path_of
from benchmarks.samples import binary, logits
from torchcalib.ops import bin_sums, softmax_stats
from torchcalib.ops.binary_scores import score_sums
from torchcalib.ops.counter_rng import multinomial_counts
from torchcalib.ops.dispatch import Op
from torchcalib.ops.equal_mass import equal_mass_sums
from torchcalib.ops.isotonic import augmented_means, block_ends
from torchcalib.ops.threads import in_threads

ROUNDS = 9
ENOUGH = 0.4
"""Share of the limit below which a kernel needs a reason."""
UNEXPLAINED = "not explained"
REPEATS = 20_000  # passes over a block that fits into the level-1 cache, on each thread


class Kernel(NamedTuple):
    """A call, the number of bytes that it reads and writes at least, and its number of exponentials or logarithms.

    `op` is the name of the operation in `ops.dispatch`.
    """

    op: Op
    name: str
    call: Call
    n_bytes: int
    n_exps: int = 0


def kernels(n: int = 50_000, num_classes: int = 1_000, n_events: int = 10_000_000) -> Iterator[Kernel]:
    yield from row_kernels(n, num_classes)
    yield from event_kernels(n_events)
    yield from sequential_kernels(n_events // 10)


def row_kernels(n: int, num_classes: int) -> Iterator[Kernel]:
    values, target = network_logits(n, num_classes)
    few, few_targets = logits(n * num_classes // 10, 10)
    n_bytes, n_exps = values.nbytes, values.numel()
    given = {"from_logits": True}
    rows = softmax_stats.rows(values, target, **given)
    yield Kernel(
        "rows", "statistics of rows of logits", partial(softmax_stats.rows, values, target, **given), n_bytes, n_exps
    )
    call = partial(softmax_stats.rows, few, few_targets, **given)
    few_bytes = sum(x.nbytes for x in (few, few_targets, *call()))  # the results are about as large as the rows
    yield Kernel("rows", "statistics of rows of 10 logits", call, few_bytes, few.numel())
    probs = values.softmax(-1)
    call = partial(softmax_stats.rows, probs, target, from_logits=False, tolerance=1e-3)
    yield Kernel("rows", "statistics of rows of probabilities", call, n_bytes, n_exps)
    bins = {"n_bins": 15, "noise": True}
    call = partial(bin_sums.class_bins, values, target, None, rows, **given, **bins)
    yield Kernel("classes", "bin sums of every class", call, n_bytes, n_exps)
    leaf = values.detach().requires_grad_()
    found = softmax_stats.rows(leaf, target, **given)
    loss = found.log_prob.mean() + found.squared_error.mean()
    yield Kernel("rows", "gradient of logits", partial(backward, loss, leaf), 2 * n_bytes, n_exps)


def backward(loss: Tensor, leaf: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    return found


def event_kernels(n: int) -> Iterator[Kernel]:
    p, y = binary(n)
    n_bytes = p.nbytes + y.nbytes
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(n, generator=generator, dtype=torch.float64)
    groups = torch.randint(1_000, (n,), generator=generator)
    call = partial(bin_sums.event_bins, p, y, n_bins=15, noise="labels")
    yield Kernel("events", "bin sums of binary events", call, n_bytes)
    call = partial(bin_sums.event_bins, p, y, weights, n_bins=15)
    yield Kernel("events", "bin sums of weighted events", call, n_bytes + weights.nbytes)
    call = partial(bin_sums.event_bins, p, y, n_bins=15, groups=groups, n_groups=1_000)
    yield Kernel("events", "bin sums of 1,000 groups", call, n_bytes + groups.nbytes)
    call = partial(score_sums, p, y, "log", from_logits=False)
    yield Kernel("binary_scores", "log loss of binary probabilities", call, n_bytes, 2 * n)
    labels = y.to(torch.uint8)
    yield Kernel("equal_mass", "equal-mass bins", partial(equal_mass_sums, p, labels, 15), p.nbytes + labels.nbytes)
    call = partial(multinomial_counts, 0, torch.arange(1_000), n // 1_000, torch.float64)
    yield Kernel("random", "random resampling counts", call, 8 * n)


def sequential_kernels(n: int) -> Iterator[Kernel]:
    """Yield kernels of sorted samples."""
    p, y = binary(n, torch.float64)
    order = p.argsort()
    score, positives = p[order], y[order]
    size, begins = torch.ones_like(positives), torch.ones_like(positives, dtype=torch.bool)
    n_bytes = positives.nbytes + size.nbytes
    names: dict[Literal["pava", "pava_bc"], str] = {
        "pava": "isotonic blocks",
        "pava_bc": "isotonic blocks of bounded size",
    }
    for op, name in names.items():
        yield Kernel(op, name, partial(block_ends, op, begins, positives, size), n_bytes)
    call = partial(augmented_means, score, begins, positives, size, torch.tensor(n))
    yield Kernel("augmented", "isotonic means at all test scores", call, n_bytes + 2 * 8 * n)


def read_bandwidth() -> float:
    """Return the number of bytes per second that torch reads when it sums a large tensor."""
    x = torch.ones(50_000, 1_000)
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
    use_numba()
    here = machine()
    path = path_of(here)
    content = json.loads(path.read_text()) if path.is_file() else {"machine": here, "families": {}}
    content["limits"] = measured()
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["limits"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
