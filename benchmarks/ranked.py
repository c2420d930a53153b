"""Jobs of the order-based metrics, and of those without bins."""

from functools import partial

import numpy as np
import torch

import torchcalib as tc
from benchmarks import peers
from benchmarks.job import Job, Peer, Sides
from benchmarks.samples import like_imagenet_dogs, softmax_outputs

ONE_TEST_EACH = "authors' procedure: one scipy.stats.binomtest a prediction"
QUANTILE_CURVE = "sklearn calibration_curve(strategy='quantile')"
ISOTONIC_FIT = "sklearn IsotonicRegression.fit"
SMOOTH = "relplot smECE"
SKLEARN = ("scikit-learn",)


def tce_of_binary(n: int = 50_000, tested: int = 1_000) -> Sides:
    """The peer tests every 50th of the sorted predictions, against the same blocks."""
    preds, target = like_imagenet_dogs(n)
    table = tc.tce_table(preds, target, task="binary")
    sizes, positives = table.n.long(), (table.n * table.frequency).round().long()
    every = torch.arange(0, n, n // tested)
    block = torch.searchsorted(sizes.cumsum(-1), every, right=True)
    subset = (preds.sort().values[every].numpy(), positives[block].numpy(), sizes[block].numpy())
    return Sides(
        lambda: tc.tce(preds, target, task="binary"),
        {ONE_TEST_EACH: lambda: peers.one_test_per_prediction(*subset)},
        {ONE_TEST_EACH: len(every) / n},
    )


def rejections_alone(n: int = 50_000) -> Sides:
    """The tests of samples that are sorted, in blocks that are known."""
    from torchcalib.special.bin_tests import rejected_in_bins

    preds, target = like_imagenet_dogs(n)
    table = tc.tce_table(preds, target, task="binary")
    sizes, positives = table.n.long(), (table.n * table.frequency).round().long()
    ordered = preds.sort().values
    ends = sizes.cumsum(-1)
    return Sides(lambda: rejected_in_bins(ordered, ends, positives, sizes, 0.05))


def pava_bc_loop(n: int = 50_000_000) -> Sides:
    """The loop of PAVA-BC as the library calls it: columns in the order of the score, buffers made within."""
    from torchcalib.ops.dispatch import implementation

    generator = torch.Generator().manual_seed(0)
    rising = torch.linspace(0, 1, n, dtype=torch.float32)
    positives = (torch.rand(n, generator=generator) < rising).long().numpy()
    weight = np.ones_like(positives)
    loop = implementation("pava_bc", "numba").pava_bc

    def ours() -> int:
        buffers = [np.empty_like(weight), np.empty_like(weight), np.empty_like(weight)]
        return loop(weight, positives, n // 20, n // 5, False, *buffers)

    return Sides(ours)


def ace_of_binary(dtype: torch.dtype, n: int = 1_000_000, n_bins: int = 15) -> Sides:
    preds, target = like_imagenet_dogs(n)
    preds = preds.to(dtype)
    peer = partial(peers.quantile_calibration_curve, target.numpy(), preds.numpy(), n_bins)
    return Sides(lambda: tc.ace(preds, target, task="binary", n_bins=n_bins), {QUANTILE_CURVE: peer})


def tce_of_classes(n: int = 50_000, num_classes: int = 1_000) -> Sides:
    preds, target = softmax_outputs(n, num_classes)
    return Sides(lambda: tc.tce(preds, target, task="multiclass"))


def ks_of_binary(n: int = 1_000_000) -> Sides:
    preds, target = like_imagenet_dogs(n)
    return Sides(lambda: tc.ks(preds, target, task="binary"))


def corp_of_binary(n: int = 1_000_000) -> Sides:
    preds, target = like_imagenet_dogs(n)
    peer = partial(peers.isotonic_fit, target.numpy(), preds.numpy())
    return Sides(lambda: tc.corp(preds, target, task="binary"), {ISOTONIC_FIT: peer})


def smece_of_binary(n: int = 1_000_000) -> Sides:
    preds, target = like_imagenet_dogs(n)
    peer = partial(peers.relplot_smece, preds.numpy(), target.numpy())
    return Sides(lambda: tc.smece(preds, target, task="binary"), {SMOOTH: peer})


def ici_of_binary(n: int = 1_000_000) -> Sides:
    preds, target = like_imagenet_dogs(n)
    return Sides(lambda: tc.ici(preds, target, task="binary"))


def cox_of_binary(n: int = 1_000_000) -> Sides:
    """Some predictions are 1 to the last digit."""
    preds, target = like_imagenet_dogs(n)
    return Sides(lambda: tc.cox(preds, target, task="binary", eps=1e-12))


TCE = Job(
    "TCE, 50,000",
    tce_of_binary,
    (Peer(ONE_TEST_EACH, 1 / 1000, needs=("scipy",)),),
    seconds=0.010,
    why="the tests alone take most of it",
)

JOBS = [
    TCE,
    TCE.without_numba(peers=(Peer(ONE_TEST_EACH, 1 / 300, needs=("scipy",)),)),
    Job("rejections alone, 50,000", rejections_alone),
    Job("PAVA-BC, the loop alone, 50 million", pava_bc_loop, seconds=0.3),
    Job(
        "ACE, 1 million, float32",
        partial(ace_of_binary, torch.float32),
        (Peer(QUANTILE_CURVE, 1 / 15, SKLEARN),),
        why="the keys are parted at the cuts on one core",
    ),
    Job("ACE, 1 million, float64", partial(ace_of_binary, torch.float64), (Peer(QUANTILE_CURVE, needs=SKLEARN),)),
    Job("class-wise TCE, 50,000 x 1,000", tce_of_classes, seconds=15, rounds=3),
    Job("KS, 1 million", ks_of_binary),
    Job("CORP, 1 million", corp_of_binary, (Peer(ISOTONIC_FIT, needs=SKLEARN),)),
    Job("smECE, 1 million", smece_of_binary, (Peer(SMOOTH, 1 / 10, needs=("relplot",)),)),
    Job("ICI, 1 million", ici_of_binary, seconds=1),
    Job("Cox slope and intercept, 1 million", cox_of_binary, seconds=1),
]
