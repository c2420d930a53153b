"""Jobs for rank-based and smooth metrics."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import Job, Peer, Sides
from benchmarks.samples import like_imagenet_dogs, softmax_outputs

ONE_TEST_EACH = "authors' procedure: one scipy.stats.binomtest a prediction"
QUANTILE_CURVE = "sklearn calibration_curve(strategy='quantile')"
ISOTONIC_FIT = "sklearn IsotonicRegression.fit"
SMOOTH = "relplot smECE"
PLAIN_KS = "numpy: argsort, cumsum"
LOGISTIC_FIT = "sklearn LogisticRegression"
SKLEARN = ("scikit-learn",)


def tce_of_binary(n: int = 50_000, tested: int = 1_000) -> Sides:
    """Test-based calibration error (TCE). The peer tests every 50th sorted prediction against the same blocks."""
    preds, target = like_imagenet_dogs(n)
    table = F.tce_table(preds, target, task="binary")
    sizes, positives = table.n.long(), (table.n * table.frequency).round().long()
    every = torch.arange(0, n, n // tested)
    block = torch.searchsorted(sizes.cumsum(-1), every, right=True)
    subset = (preds.sort().values[every].numpy(), positives[block].numpy(), sizes[block].numpy())
    return Sides(
        lambda: F.tce(preds, target, task="binary"),
        {ONE_TEST_EACH: lambda: peers.one_test_per_prediction(*subset)},
        {ONE_TEST_EACH: len(every) / n},
    )


def rejections_alone(n: int = 50_000) -> Sides:
    """Binomial tests of the test-based calibration error (TCE), for sorted samples in given blocks."""
    from torchcalib.special.bin_tests import rejected_in_bins

    preds, target = like_imagenet_dogs(n)
    table = F.tce_table(preds, target, task="binary")
    sizes, positives = table.n.long(), (table.n * table.frequency).round().long()
    ordered = preds.sort().values
    ends = sizes.cumsum(-1)
    return Sides(lambda: rejected_in_bins(ordered, ends, positives, sizes, 0.05))


def pava_bc_loop(n: int = 50_000_000) -> Sides:
    """Compiled loop of PAVA-BC, for columns in the order of the score."""
    import numba

    from torchcalib.ops.isotonic.formula import pava_bc

    generator = torch.Generator().manual_seed(0)
    rising = torch.linspace(0, 1, n, dtype=torch.float32)
    positives = (torch.rand(n, generator=generator) < rising).long().numpy()
    weight = np.ones_like(positives)
    loop = numba.njit(nogil=True)(pava_bc)

    def ours() -> int:
        buffers = [np.empty_like(weight), np.empty_like(weight), np.empty_like(weight)]
        return loop(weight, positives, n // 20, n // 5, False, *buffers)

    return Sides(ours)


def tce_of_classes(n: int = 50_000, num_classes: int = 1_000) -> Sides:
    preds, target = softmax_outputs(n, num_classes)
    return Sides(lambda: F.tce(preds, target, task="multiclass"))


def of_binary(
    function: Callable[..., object],
    peer: str = "",
    call: Callable[..., object] | None = None,
    dtype: torch.dtype = torch.float64,
    n: int = 1_000_000,
    **options: float,
) -> Sides:
    """Function of binary predictions, and a peer that gets labels and predictions."""
    preds, target = like_imagenet_dogs(n)
    preds = preds.to(dtype)
    theirs = {} if call is None else {peer: partial(call, target.numpy(), preds.numpy())}
    return Sides(partial(function, preds, target, task="binary", **options), theirs)


ace = partial(of_binary, F.ace, QUANTILE_CURVE, partial(peers.quantile_calibration_curve, n_bins=15), n_bins=15)

TCE = Job(
    "TCE, 50,000",
    tce_of_binary,
    (Peer(ONE_TEST_EACH, 1 / 1000, needs=("scipy",)),),
    seconds=0.006,
)

JOBS = [
    TCE,
    TCE.without_numba(peers=(Peer(ONE_TEST_EACH, 1 / 300, needs=("scipy",)),)),
    Job("rejections alone, 50,000", rejections_alone),
    Job("PAVA-BC, the loop alone, 50 million", pava_bc_loop, seconds=0.3),
    Job(
        "ACE, 1 million, float32",
        partial(ace, dtype=torch.float32),
        (Peer(QUANTILE_CURVE, 1 / 15, SKLEARN),),
    ),
    Job("ACE, 1 million, float64", ace, (Peer(QUANTILE_CURVE, needs=SKLEARN),)),
    Job("class-wise TCE, 50,000 x 1,000", tce_of_classes, seconds=15, rounds=3),
    Job("KS, 1 million", partial(of_binary, F.ks, PLAIN_KS, peers.plain_ks), (Peer(PLAIN_KS, 1.0),)),
    Job(
        "CORP, 1 million",
        partial(of_binary, F.corp, ISOTONIC_FIT, peers.isotonic_fit),
        (Peer(ISOTONIC_FIT, 1.0, SKLEARN),),
    ),
    Job(
        "smECE, 1 million",
        partial(of_binary, F.smece, SMOOTH, peers.relplot_smece),
        (Peer(SMOOTH, 1 / 10, needs=("relplot",)),),
    ),
    Job("ICI, 1 million", partial(of_binary, F.ici), seconds=1),
    Job(
        "Cox slope and intercept, 1 million",
        partial(of_binary, F.cox, LOGISTIC_FIT, peers.logistic_fit, eps=1e-12),
        (Peer(LOGISTIC_FIT, 1.0, SKLEARN),),
        seconds=1,
    ),
]
