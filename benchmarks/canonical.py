"""Jobs for multi-class calibration errors: canonical, and of the k most probable classes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import peers
from benchmarks.job import Job, Peer, Sides
from benchmarks.samples import overconfident_logits

GIVEN = {"task": "multiclass", "from_logits": True}

AT_ONCE = "torch: the matrix of all pairs"
TOPK = "torch: softmax, topk, bincount"


def skce(estimator: str, at_once: bool = False, n: int = 1_000_000, num_classes: int = 10) -> Sides:
    logits, target = overconfident_logits(n, num_classes)
    peer = {AT_ONCE: lambda: peers.skce_at_once(logits, target)} if at_once else {}
    return Sides(lambda: F.skce(logits, target, estimator=estimator, **GIVEN), peer)


def gradient(function: Callable[..., Tensor], n: int, num_classes: int = 10, **options: Any) -> Sides:
    logits, target = overconfident_logits(n, num_classes)
    leaf = logits.requires_grad_()

    def ours() -> Tensor:
        (found,) = torch.autograd.grad(function(leaf, target, **options, **GIVEN), leaf)
        return found

    return Sides(ours, result_bytes=logits.nbytes)


def canonical_error(n: int = 5_000, num_classes: int = 10, bandwidth: float = 0.05) -> Sides:
    logits, target = overconfident_logits(n, num_classes)
    return Sides(
        lambda: F.canonical_error(logits, target, bandwidth=bandwidth, **GIVEN),
        {AT_ONCE: lambda: peers.dirichlet_error_at_once(logits, target, bandwidth)},
    )


def top_5(n: int = 50_000, num_classes: int = 1_000, n_bins: int = 15) -> Sides:
    logits, target = overconfident_logits(n, num_classes, separation=4.0)
    return Sides(
        lambda: F.ece(logits, target, mode=tc.TopK(5), n_bins=n_bins, **GIVEN),
        {TOPK: lambda: peers.top_k_ece(logits, target, 5, n_bins)},
    )


JOBS = [
    Job("SKCE, linear, 1 million x 10", partial(skce, "linear"), seconds=1.0, extra_bytes=100_000_000),
    Job("SKCE in blocks of 32, 1 million x 10", partial(skce, "block"), extra_bytes=100_000_000, rounds=3),
    Job(
        "SKCE, all pairs, 10,000 x 10",
        partial(skce, "unbiased", at_once=True, n=10_000),
        (Peer(AT_ONCE, 1.0),),
        extra_bytes=50_000_000,
        rounds=3,
    ),
    Job(
        "SKCE, all pairs, 10,000 x 10, forward + backward",
        partial(gradient, F.skce, n=10_000),
        extra_bytes=50_000_000,
        rounds=3,
    ),
    Job(
        "canonical error, 5,000 x 10",
        canonical_error,
        (Peer(AT_ONCE, 1.0),),
        extra_bytes=50_000_000,
        rounds=3,
    ),
    Job(
        "canonical error, 5,000 x 10, forward + backward",
        partial(gradient, F.canonical_error, n=5_000, bandwidth=0.05),
        extra_bytes=50_000_000,
        rounds=3,
    ),
    Job("top-5 ECE, 50,000 x 1,000", top_5, (Peer(TOPK, 0.8),)),
]
