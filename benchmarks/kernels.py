"""Jobs for kernels, against the limits of the machine.

A kernel that reads and writes B bytes and computes E exponentials takes at least the time of either: the roofline model
(Williams, Waterman, Patterson 2009, doi:10.1145/1498765.1498785). The alternative is the slower one of them, on all
threads of torch: to sum a tensor of B bytes, or to compute E exponentials in the level-1 cache by `ops.numba_math`. The
goal is 40% of this limit.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.job import Call, Job, alternative
from benchmarks.one_pass import network_logits
from benchmarks.samples import binary, logits
from torchcalib.ops import bin_sums, softmax_stats
from torchcalib.ops.binary_scores import score_sums
from torchcalib.ops.counter_rng import multinomial_counts
from torchcalib.ops.dispatch import Op
from torchcalib.ops.equal_mass import equal_mass_sums
from torchcalib.ops.isotonic import augmented_means, block_ends
from torchcalib.ops.log_odds import log_odds
from torchcalib.ops.newton.fits import fit_temperature
from torchcalib.ops.threads import in_threads

GIVEN, BINS = {"from_logits": True}, {"n_bins": 15}
EVENTS = 10_000_000

Kernel = tuple[Call, Any]
"""Call of a kernel, and the work of its limit: a tensor of as many bytes, or the number of exponentials."""


def bytes_of(*tensors: Tensor) -> Tensor:
    return torch.ones(sum(x.nbytes for x in tensors) // 4)


def run_kernel(call: Call, _: Any) -> object:
    return call()


@alternative(title="reading as many bytes")
def read(_: Call, work: Tensor) -> Tensor:
    return work.sum()


@alternative("numba", title="computing as many exponentials")
def exponentials(_: Call, n: int) -> int:
    """Compute about n exponentials, in passes over one block for each thread, and return their number."""
    loop, block = exponential_loop()
    done = []

    def passes(begin: int, end: int) -> None:
        x, shifted, exps = -np.ones((3, block), np.float32)
        loop(x, shifted, exps, end - begin)
        done.append(end - begin)

    in_threads(passes, -(-n // block), n)
    return sum(done) * block


@cache
def exponential_loop() -> tuple[Callable[..., None], int]:
    """Return a compiled loop of passes over a block, and the size of the block."""
    import numba

    from torchcalib.ops.numba_math import BLOCK, F, fill_exps

    @numba.njit(nogil=True)
    def repeat(x: Any, shifted: Any, exps: Any, n: int) -> None:
        for _ in range(n):
            fill_exps(x, F(0), shifted, exps)

    return repeat, BLOCK


def rows(n: int = 50_000, num_classes: int = 1_000) -> Kernel:
    values, target = network_logits(n, num_classes)
    return partial(softmax_stats.rows, values, target, **GIVEN), values.numel()


def few_classes(n: int = 5_000_000) -> Kernel:
    """The results are about as large as the rows."""
    values, target = logits(n, 10)
    call = partial(softmax_stats.rows, values, target, **GIVEN)
    return call, bytes_of(values, target, *call())


def probabilities(n: int = 50_000, num_classes: int = 1_000) -> Kernel:
    values, target = network_logits(n, num_classes)
    call = partial(softmax_stats.rows, values.softmax(-1), target, from_logits=False, tolerance=1e-3)
    return call, values.numel()


def classes(n: int = 50_000, num_classes: int = 1_000) -> Kernel:
    values, target = network_logits(n, num_classes)
    found = softmax_stats.rows(values, target, **GIVEN)
    return partial(bin_sums.class_bins, values, target, None, found, noise=True, **BINS, **GIVEN), values.numel()


def gradient(n: int = 50_000, num_classes: int = 1_000) -> Kernel:
    values, target = network_logits(n, num_classes, gradient=True)
    found = softmax_stats.rows(values, target, **GIVEN)
    loss = found.log_prob.mean() + found.squared_error.mean()
    return partial(torch.autograd.grad, loss, values, retain_graph=True), bytes_of(values, values)


def events(n: int = EVENTS) -> Kernel:
    p, y = binary(n)
    return partial(bin_sums.event_bins, p, y, noise="labels", **BINS), bytes_of(p, y)


def weighted_events(n: int = EVENTS) -> Kernel:
    p, y = binary(n)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return partial(bin_sums.event_bins, p, y, weights, **BINS), bytes_of(p, y, weights)


def grouped_events(n: int = EVENTS) -> Kernel:
    p, y = binary(n)
    groups = torch.randint(1_000, (n,), generator=torch.Generator().manual_seed(1))
    return partial(bin_sums.event_bins, p, y, groups=groups, n_groups=1_000, **BINS), bytes_of(p, y, groups)


def log_loss(n: int = EVENTS) -> Kernel:
    return partial(score_sums, *binary(n), "log", from_logits=False), 2 * n


def equal_mass(n: int = EVENTS) -> Kernel:
    p, y = binary(n)
    labels = y.to(torch.uint8)
    return partial(equal_mass_sums, p, labels, 15), bytes_of(p, labels)


def odds(n: int = EVENTS // 10) -> Kernel:
    values, _ = logits(n, 10)
    return partial(log_odds, values, values.argmax(-1, keepdim=True)), values.numel()


def temperature(n: int = EVENTS // 100) -> Kernel:
    values, target = logits(n, 100)
    weights = torch.ones(1, 1, n, dtype=torch.float64)
    return partial(fit_temperature, values[None], target[None], weights), values.numel()


def counts(n: int = EVENTS) -> Kernel:
    call = partial(multinomial_counts, 0, torch.arange(1_000), n // 1_000, torch.float64)
    return call, bytes_of(call())


def isotonic(op: Literal["pava", "pava_bc"], n: int = EVENTS // 10) -> Kernel:
    """Blocks of a sorted sample."""
    p, y = binary(n, torch.float64)
    positives = y[p.argsort()]
    size, begins = torch.ones_like(positives), torch.ones_like(positives, dtype=torch.bool)
    return partial(block_ends, op, begins, positives, size), bytes_of(positives, size)


def isotonic_means(n: int = EVENTS // 10) -> Kernel:
    p, y = binary(n, torch.float64)
    score, order = p.sort()
    positives = y[order]
    size, begins = torch.ones_like(positives), torch.ones_like(positives, dtype=torch.bool)
    call = partial(augmented_means, score, begins, positives, size, torch.tensor(n))
    return call, bytes_of(positives, size, score, score)


KERNELS: tuple[tuple[Op, str, Callable[..., Kernel], Callable[..., object]], ...] = (
    ("rows", "statistics of rows of logits", rows, exponentials),
    ("rows", "statistics of rows of 10 logits", few_classes, read),
    ("rows", "statistics of rows of probabilities", probabilities, exponentials),
    ("classes", "bin sums of every class", classes, exponentials),
    ("rows", "gradient of logits", gradient, read),
    ("events", "bin sums of binary events", events, read),
    ("events", "bin sums of weighted events", weighted_events, read),
    ("events", "bin sums of 1,000 groups", grouped_events, read),
    ("binary_scores", "log loss of binary probabilities", log_loss, exponentials),
    ("equal_mass", "equal-mass bins", equal_mass, read),
    ("log_odds", "log-odds of the top class", odds, exponentials),
    ("moments", "fit of a temperature", temperature, exponentials),
    ("random", "random resampling counts", counts, read),
    ("pava", "isotonic blocks", partial(isotonic, "pava"), read),
    ("pava_bc", "isotonic blocks of bounded size", partial(isotonic, "pava_bc"), read),
    ("augmented", "isotonic means at all test scores", isotonic_means, read),
)
"""Operation in `ops.dispatch`, name of the job, its data, and its limit."""
JOBS = [Job(name, data, run_kernel, {limit: 1 / 0.4}) for _, name, data, limit in KERNELS]
