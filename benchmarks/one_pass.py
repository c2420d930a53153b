"""Jobs for metrics computed in one pass: ECE, a whole collection, class-wise bins, gradients."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torchmetrics import Metric

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import by_hand, peers
from benchmarks.job import OURS, Job, Peer, Sides
from benchmarks.samples import like_imagenet_dogs, overconfident_logits

GIVEN = {"task": "multiclass", "from_logits": True}

SOFTMAX = "torch.softmax into a reused buffer, 1,024 rows at a time"
ONE_ECE = "ECE alone"
TORCHMETRICS = "torchmetrics functional calibration error"
TORCHMETRICS_CLASS = "torchmetrics MulticlassCalibrationError"
PROBMETRICS = "probmetrics log loss + Brier + ECE + accuracy"
RELPLOT = "relplot binnedECE"
ONE_GROUP = "the same of all rows as one group"
CROSS_ENTROPY = "torch cross_entropy, forward + backward"

network_logits = partial(overconfident_logits, separation=4.0)  # for an accuracy of 70 % with 1,000 classes


def ece(n: int = 50_000, num_classes: int = 1_000, n_bins: int = 15) -> Sides:
    logits, target = network_logits(n, num_classes)
    return Sides(
        lambda: F.ece(logits, target, n_bins=n_bins, **GIVEN),
        {
            SOFTMAX: lambda: peers.softmax_in_chunks(logits),
            TORCHMETRICS: lambda: peers.torchmetrics_ece(logits, target, n_bins),
        },
    )


def streamed_ece(n: int = 50_000, num_classes: int = 1_000, n_bins: int = 15, rows: int = 256) -> Sides:
    """ECE as a metric: each side creates it, updates it with every batch, and computes the value."""
    logits, target = network_logits(n, num_classes)
    batches = list(zip(logits.split(rows), target.split(rows), strict=True))

    ours = partial(tc.ECE, num_classes=num_classes, n_bins=n_bins, **GIVEN)
    theirs = partial(by_hand.torchmetrics_ece, num_classes, n_bins)
    return Sides(
        lambda: streamed(ours(), batches).compute(),
        {TORCHMETRICS_CLASS: lambda: streamed(theirs(), batches).compute()},
        states={
            OURS: lambda updates: state_bytes(streamed(ours(), batches[:updates])),
            TORCHMETRICS_CLASS: lambda updates: state_bytes(streamed(theirs(), batches[:updates])),
        },
    )


def streamed(metric: Metric, batches: Iterable[tuple[Tensor, Tensor]]) -> Metric:
    for preds, target in batches:
        metric.update(preds, target)
    return metric


def state_bytes(metric: Metric) -> int:
    """Return the size of all state tensors of a metric in bytes."""
    states = [getattr(metric, name) for name in metric._defaults]
    return sum(x.nbytes for state in states for x in (state if isinstance(state, list) else [state]))


def eight_metrics(num_classes: int, n_bins: int = 15) -> dict[str, Metric]:
    given = {"num_classes": num_classes, **GIVEN}
    scores = {cls.__name__: cls(**given) for cls in (tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy)}
    return scores | {cls.__name__: cls(n_bins=n_bins, **given) for cls in (tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE)}


def updated_collection(rows: int = 256, num_classes: int = 1_000, n_updates: int = 100) -> Sides:
    """Updates of a collection with small batches, compared with those of one of its metrics."""
    logits, target = network_logits(rows * n_updates, num_classes)
    batches = list(zip(logits.split(rows), target.split(rows), strict=True))
    eight = tc.CalibrationCollection(eight_metrics(num_classes))
    one = tc.ECE(num_classes=num_classes, **GIVEN)
    return Sides(lambda: streamed(eight, batches), {ONE_ECE: lambda: streamed(one, batches)})


def collection(n: int = 50_000, num_classes: int = 1_000, n_bins: int = 15, classwise: bool = False) -> Sides:
    logits, target = network_logits(n, num_classes)

    def ours() -> dict[str, Tensor]:
        members = eight_metrics(num_classes, n_bins)
        if classwise:
            members["classwise_ECE"] = tc.ECE(n_bins=n_bins, mode="classwise", num_classes=num_classes, **GIVEN)
        metrics = tc.CalibrationCollection(members)
        metrics.update(logits, target)
        return metrics.compute()

    return Sides(
        ours,
        {
            SOFTMAX: lambda: peers.softmax_in_chunks(logits),
            PROBMETRICS: lambda: peers.probmetrics_values(logits, target),
        },
    )


def binary_ece(n: int = 1_000_000, n_bins: int = 15) -> Sides:
    """Binary ECE of float32 probabilities and int64 labels."""
    preds, target = like_imagenet_dogs(n)
    preds = preds.float()
    p, y = preds.numpy(), target.numpy()

    def ours() -> Tensor:
        return F.ece(preds, target, task="binary", n_bins=n_bins)

    return Sides(
        ours,
        {
            RELPLOT: lambda: peers.relplot_ece(p, y, n_bins),
            TORCHMETRICS: lambda: peers.torchmetrics_binary_ece(preds, target, n_bins),
        },
        error=lambda: abs(ours().item() - float64_ece(preds, target, n_bins)),
    )


def ece_of_groups(n: int = 1_000_000, num_classes: int | None = None, num_groups: int = 1_000) -> Sides:
    """ECE of random groups of rows, compared with the ECE of all rows; both get one batch."""
    if num_classes is None:
        preds, target = like_imagenet_dogs(n)
        preds, given = preds.float(), {"task": "binary"}
    else:
        preds, target = network_logits(n, num_classes)
        given = {"num_classes": num_classes, **GIVEN}
    groups = torch.randint(num_groups, (n,), generator=torch.Generator().manual_seed(1))

    by_group, whole = tc.ByGroup(tc.ECE(**given), num_groups=num_groups), tc.ECE(**given)

    def ours() -> Tensor:
        by_group.reset()
        by_group.update(preds, target, groups=groups)
        return by_group.compute()

    def theirs() -> Tensor:
        whole.reset()
        whole.update(preds, target)
        return whole.compute()

    return Sides(ours, {ONE_GROUP: theirs})


def float64_ece(p: Tensor, y: Tensor, n_bins: int) -> float:
    """Return the ECE of the same probabilities, in float64."""
    p = p.double()
    edges = torch.arange(1, n_bins, dtype=torch.float64) / n_bins
    index = torch.bucketize(p, edges, right=True)
    return (torch.bincount(index, p - y, minlength=n_bins).abs().sum() / len(p)).item()


def gradient(n: int = 50_000, num_classes: int = 1_000, together: bool = True) -> Sides:
    """Forward and backward pass of ECE + NLL, from a collection in one pass or from two functions."""
    logits, target = network_logits(n, num_classes)
    logits.requires_grad_()
    given = {"num_classes": num_classes, **GIVEN}

    def ours() -> Tensor | None:
        logits.grad = None
        if together:
            values = tc.CalibrationCollection([tc.ECE(**given), tc.NLL(**given)])(logits, target)
            loss = values["ECE"] + values["NLL"]
        else:
            loss = F.ece(logits, target, **GIVEN) + F.nll(logits, target, **GIVEN)
        loss.backward()
        return logits.grad

    peer = {CROSS_ENTROPY: lambda: by_hand.torch_gradient_of_cross_entropy(logits, target)}
    return Sides(ours, peer, result_bytes=logits.nbytes)


ENTRIES = 2**23
OF_ROWS = tuple({"n": n, "num_classes": 1_000} for n in (1, 16, 256, 4_096, 50_000, 200_000))
OF_CLASSES = tuple({"n": ENTRIES // c, "num_classes": c} for c in (2, 10, 100, 1_000, 10_000, 128_256))
OF_BINS = tuple({"n": 1_000_000, "n_bins": b} for b in (5, 15, 100, 1_000, 10_000))
OF_EVENTS = tuple({"n": n} for n in (1, 100, 10_000, 100_000, 1_000_000, 10_000_000))
OF_CLASSWISE_BINS = tuple({"n": 5_000, "num_classes": 1_000, "n_bins": b} for b in (5, 15, 100, 1_000))

EXTRA_BYTES, EXTRA_BYTES_IN_PLAIN_TORCH = 10_000_000, 20_000_000
ERROR = 1e-7

WITH_NUMBA = [
    Job(
        "ECE, 50,000 x 1,000",
        ece,
        (Peer(SOFTMAX, 0.6), Peer(TORCHMETRICS, 1 / 7)),
        extra_bytes=EXTRA_BYTES,
        grows=OF_ROWS + OF_CLASSES,
    ),
    Job(
        "ECE in batches of 256, 50,000 x 1,000",
        streamed_ece,
        (Peer(TORCHMETRICS_CLASS, 0.35),),
        extra_bytes=EXTRA_BYTES,
        updates=(1, 196),
    ),
    Job(
        "100 updates of eight metrics, 256 x 1,000",
        updated_collection,
        (Peer(ONE_ECE, 1.2),),
    ),
    Job(
        "NLL, Brier, ECD, accuracy, ECE, ESCE, MCE and RMSCE, 50,000 x 1,000",
        collection,
        (Peer(SOFTMAX, 1.0), Peer(PROBMETRICS, 1 / 20, needs=("probmetrics", "numba"))),
        extra_bytes=EXTRA_BYTES,
    ),
    Job(
        "the same and class-wise ECE, 50,000 x 1,000",
        partial(collection, classwise=True),
        (Peer(SOFTMAX, 2.0),),
        extra_bytes=EXTRA_BYTES,
        grows=OF_CLASSWISE_BINS,
    ),
    *(
        Job(
            f"binary ECE, {size}",
            partial(binary_ece, n=n),
            (Peer(RELPLOT, goal, needs=("relplot",)), Peer(TORCHMETRICS)),
            extra_bytes=EXTRA_BYTES,
            error=ERROR,
            grows=OF_BINS + OF_EVENTS if n == 1_000_000 else (),
        )
        for n, size, goal in ((50_000, "50,000", 2.5), (1_000_000, "1 million", 0.7), (10_000_000, "10 million", 1.0))
    ),
    *(
        Job(
            f"ECE of 1,000 groups, {size}",
            partial(ece_of_groups, n=n, num_classes=num_classes),
            (Peer(ONE_GROUP, 1.5),),
            grows=() if num_classes else tuple({"n": n, "num_groups": 10**k} for k in range(7)),
        )
        for n, num_classes, size in ((1_000_000, None, "binary, 1 million"), (50_000, 1_000, "50,000 x 1,000"))
    ),
    *(
        Job(
            f"gradient of ECE + NLL, {how}, 50,000 x 1,000",
            partial(gradient, together=together),
            (Peer(CROSS_ENTROPY, 1.0),),
            extra_bytes=EXTRA_BYTES if together else EXTRA_BYTES_IN_PLAIN_TORCH,
        )
        for how, together in (("one collection", True), ("two functions", False))
    ),
]

GOALS_IN_PLAIN_TORCH = {
    "ECE, 50,000 x 1,000": {TORCHMETRICS: 0.25},
    "binary ECE, 50,000": {TORCHMETRICS: 1.0},
    "binary ECE, 1 million": {TORCHMETRICS: 0.25},
    "the same and class-wise ECE, 50,000 x 1,000": {SOFTMAX: 5.0},
}
"""Ratios by job and peer."""


def in_plain_torch(job: Job) -> Job:
    plain = job.without_numba(rounds=5)
    goals = GOALS_IN_PLAIN_TORCH.get(job.name, {})
    extra_bytes = None if job.extra_bytes is None else EXTRA_BYTES_IN_PLAIN_TORCH
    return replace(
        plain, peers=tuple(replace(peer, goal=goals.get(peer.name)) for peer in plain.peers), extra_bytes=extra_bytes
    )


JOBS = [*WITH_NUMBA, *map(in_plain_torch, WITH_NUMBA)]
