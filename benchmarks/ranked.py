"""Jobs for rank-based and smooth metrics."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import Job, Sides, job
from benchmarks.samples import binary, softmax_outputs

doubles = partial(binary, dtype=torch.float64)
million = partial(doubles, n=1_000_000)
GIVEN = {"task": "binary"}
EVERY = 50
"""The peer of TCE tests every 50th sorted prediction against the same blocks."""


def blocks(n: int) -> tuple[Tensor, ...]:
    """Return sorted predictions, the ends of blocks of the test-based calibration error (TCE), positives and sizes."""
    p, y = doubles(n)
    table = F.tce_table(p, y, **GIVEN)
    sizes = table.n.long()
    return p.sort().values, sizes.cumsum(-1), (table.n * table.frequency).round().long(), sizes


def rows_and_blocks(n: int) -> tuple[object, ...]:
    """Return predictions, labels, and arrays for the peer: every 50th prediction, and the sums of its block."""
    ordered, ends, positives, sizes = blocks(n)
    every = torch.arange(0, n, EVERY)
    block = torch.searchsorted(ends, every, right=True)
    return *doubles(n), tuple(x.numpy() for x in (positives[block], sizes[block], ordered[every]))


def rejections(ordered: Tensor, ends: Tensor, positives: Tensor, sizes: Tensor) -> object:
    from torchcalib.special.bin_tests import rejected_in_bins

    return rejected_in_bins(ordered, ends, positives, sizes, 0.05)


def pava_bc_loop(n: int = 50_000_000) -> Sides:
    """Compiled loop of PAVA-BC, for columns in the order of the score."""
    import numba

    from torchcalib.ops.isotonic.formula import pava_bc

    generator = torch.Generator().manual_seed(0)
    rising = torch.linspace(0, 1, n, dtype=torch.float32)
    positives = (torch.rand(n, generator=generator) < rising).long().numpy()
    weight = np.ones_like(positives)
    loop = numba.njit(nogil=True)(pava_bc)
    return Sides(lambda: loop(weight, positives, n // 20, n // 5, False, *(np.empty_like(weight) for _ in range(3))))


TCE = job(
    "TCE, 50,000",
    partial(rows_and_blocks, n=50_000),
    lambda p, y, _: F.tce(p, y, **GIVEN),
    {peers.one_test_per_prediction: 1 / 1000},
    shares={peers.ONE_TEST_EACH: 1 / EVERY},
    seconds=0.006,
)
JOBS = [
    TCE,
    TCE.without_numba({peers.ONE_TEST_EACH: 1 / 300}),
    job("rejections alone, 50,000", partial(blocks, n=50_000), rejections),
    Job("PAVA-BC, the loop alone, 50 million", pava_bc_loop, seconds=0.3),
    job(
        "ACE, 1 million, float32",
        partial(binary, n=1_000_000),
        partial(F.ace, n_bins=15, **GIVEN),
        {peers.quantile_calibration_curve: 1 / 15},
    ),
    job(
        "ACE, 1 million, float64", million, partial(F.ace, n_bins=15, **GIVEN), {peers.quantile_calibration_curve: None}
    ),
    job(
        "class-wise TCE, 50,000 x 1,000",
        partial(softmax_outputs, n=50_000, num_classes=1_000),
        partial(F.tce, task="multiclass"),
        seconds=15,
        rounds=3,
    ),
    job("KS, 1 million", million, partial(F.ks, **GIVEN), {peers.plain_ks: 1.0}),
    job("CORP, 1 million", million, partial(F.corp, **GIVEN), {peers.isotonic_fit: 1.0}),
    job("smECE, 1 million", million, partial(F.smece, **GIVEN), {peers.relplot_smece: 1 / 10}),
    job("ICI, 1 million", million, partial(F.ici, **GIVEN), seconds=1),
    job(
        "Cox slope and intercept, 1 million",
        million,
        partial(F.cox, eps=1e-12, **GIVEN),
        {peers.logistic_fit: 1.0},
        seconds=1,
    ),
]
