"""Jobs of the order-based metrics."""

from functools import partial

import numpy as np
import torch
from torch import Tensor

import torchcalib as tc
from benchmarks import peers
from benchmarks.job import Job, Sides


def like_imagenet_dogs(n: int) -> tuple[Tensor, Tensor]:
    """P(positive) and labels, float64: one in eight is positive, and most predictions are certain to many digits."""
    generator = torch.Generator().manual_seed(0)
    target = torch.rand(n, generator=generator) < 0.125
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return torch.where(target, 4 + 3 * noise, 4 * noise - 10).sigmoid(), target.long()


def softmax_outputs(n: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Float32 softmax outputs and labels; three in four are right."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, num_classes, (n,), generator=generator)
    guess = torch.where(torch.rand(n, generator=generator) < 0.75, target, target.roll(1))
    logits = torch.randn(n, num_classes, generator=generator)
    logits[torch.arange(n), guess] += 9
    return logits.softmax(-1), target


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
        lambda: peers.one_test_per_prediction(*subset),
        len(every) / n,
    )


def rejections_alone(n: int = 50_000) -> Sides:
    """The tests of samples that are sorted, in blocks that are known."""
    from torchcalib.binomial import rejected_in_bins

    preds, target = like_imagenet_dogs(n)
    table = tc.tce_table(preds, target, task="binary")
    sizes, positives = table.n.long(), (table.n * table.frequency).round().long()
    ordered = preds.sort().values
    ends = sizes.cumsum(-1)
    return Sides(lambda: rejected_in_bins(ordered, ends, positives, sizes, 0.05))


def pava_bc_loop(n: int = 50_000_000) -> Sides:
    """The loop of PAVA-BC as the library calls it: columns in the order of the score, buffers made within."""
    from torchcalib.kernels.dispatch import implementation

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
    return Sides(lambda: tc.ace(preds, target, task="binary", n_bins=n_bins), peer)


def tce_of_classes(n: int = 50_000, num_classes: int = 1_000) -> Sides:
    preds, target = softmax_outputs(n, num_classes)
    return Sides(lambda: tc.tce(preds, target, task="multiclass"))


def ks_of_binary(n: int = 1_000_000) -> Sides:
    preds, target = like_imagenet_dogs(n)
    return Sides(lambda: tc.ks(preds, target, task="binary"))


def corp_of_binary(n: int = 1_000_000) -> Sides:
    preds, target = like_imagenet_dogs(n)
    peer = partial(peers.isotonic_fit, target.numpy(), preds.numpy())
    return Sides(lambda: tc.corp(preds, target, task="binary"), peer)


_ONE_TEST_EACH = "authors' procedure: one scipy.stats.binomtest a prediction"
_QUANTILE_CURVE = "sklearn calibration_curve(strategy='quantile')"

JOBS = [
    Job("TCE, 50,000", tce_of_binary, _ONE_TEST_EACH, within=0.010, of_peer=1 / 1000),
    Job("TCE, 50,000, without numba", tce_of_binary, _ONE_TEST_EACH, of_peer=1 / 300, numba=False),
    Job("rejections alone, 50,000", rejections_alone),
    Job("PAVA-BC, the loop alone, 50 million", pava_bc_loop, within=0.3),
    Job("ACE, 1 million, float32", partial(ace_of_binary, torch.float32), _QUANTILE_CURVE, of_peer=1 / 15),
    Job("ACE, 1 million, float64", partial(ace_of_binary, torch.float64), _QUANTILE_CURVE),
    Job("class-wise TCE, 50,000 x 1,000", tce_of_classes, within=15, rounds=3),
    Job("KS, 1 million", ks_of_binary),
    Job("CORP, 1 million", corp_of_binary, "sklearn IsotonicRegression.fit"),
]
