"""Jobs for metrics computed in one pass: ECE, a whole collection, class-wise bins, gradients."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torchmetrics import Metric

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import by_hand, peers
from benchmarks.job import OURS, Job, Peer, Sides, gradient, job, peer_of
from benchmarks.samples import binary, logits

GIVEN = {"task": "multiclass", "from_logits": True}
ONE_ECE, ONE_GROUP = "ECE alone", "the same of all rows as one group"
TORCHMETRICS_CLASS = "torchmetrics MulticlassCalibrationError"

network_logits = partial(logits, separation=4.0)  # for an accuracy of 70 % with 1,000 classes
rows_of_1000 = partial(network_logits, n=50_000, num_classes=1_000)


def streamed_ece(n: int = 50_000, num_classes: int = 1_000, n_bins: int = 15, rows: int = 256) -> Sides:
    """ECE as a metric: each side creates it, updates it with every batch, and computes the value."""
    z, y = network_logits(n, num_classes)
    batches = list(zip(z.split(rows), y.split(rows), strict=True))
    metrics: dict[str, Callable[[], Metric]] = {
        OURS: partial(tc.ECE, num_classes=num_classes, n_bins=n_bins, **GIVEN),
        TORCHMETRICS_CLASS: partial(by_hand.torchmetrics_ece, num_classes, n_bins),
    }
    calls = {side: lambda new=new: streamed(new(), batches).compute() for side, new in metrics.items()}
    states = {
        side: lambda updates, new=new: state_bytes(streamed(new(), batches[:updates])) for side, new in metrics.items()
    }
    return Sides(calls.pop(OURS), calls, states=states)


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
    z, y = network_logits(rows * n_updates, num_classes)
    batches = list(zip(z.split(rows), y.split(rows), strict=True))
    eight = tc.CalibrationCollection(eight_metrics(num_classes))
    one = tc.ECE(num_classes=num_classes, **GIVEN)
    return Sides(lambda: streamed(eight, batches), {ONE_ECE: lambda: streamed(one, batches)})


def values_of_collection(z: Tensor, y: Tensor, n_bins: int = 15, classwise: bool = False) -> dict[str, Tensor]:
    members = eight_metrics(z.shape[-1], n_bins)
    if classwise:
        members["classwise_ECE"] = tc.ECE(n_bins=n_bins, mode="classwise", num_classes=z.shape[-1], **GIVEN)
    metrics = tc.CalibrationCollection(members)
    metrics.update(z, y)
    return metrics.compute()


def ece_of_groups(n: int = 1_000_000, num_classes: int | None = None, num_groups: int = 1_000) -> Sides:
    """ECE of random groups of rows, compared with the ECE of all rows; both get one batch."""
    data, given = (binary, {"task": "binary"}) if num_classes is None else (network_logits, GIVEN)
    sizes = {} if num_classes is None else {"num_classes": num_classes}
    preds, target = data(n, **sizes)
    groups = torch.randint(num_groups, (n,), generator=torch.Generator().manual_seed(1))
    by_group, whole = tc.ByGroup(tc.ECE(**given, **sizes), num_groups=num_groups), tc.ECE(**given, **sizes)

    def value(metric: Metric, **options: Tensor) -> Tensor:
        metric.reset()
        metric.update(preds, target, **options)
        return metric.compute()

    return Sides(partial(value, by_group, groups=groups), {ONE_GROUP: partial(value, whole)})


def float64_ece(p: Tensor, y: Tensor, n_bins: int = 15) -> float:
    """Return the ECE of the same probabilities, in float64."""
    p = p.double()
    edges = torch.arange(1, n_bins, dtype=torch.float64) / n_bins
    index = torch.bucketize(p, edges, right=True)
    return (torch.bincount(index, p - y, minlength=n_bins).abs().sum() / len(p)).item()


def loss_of_collection(z: Tensor, y: Tensor) -> Tensor:
    given = {"num_classes": z.shape[-1], **GIVEN}
    values = tc.CalibrationCollection([tc.ECE(**given), tc.NLL(**given)])(z, y)
    return values["ECE"] + values["NLL"]


def loss_of_functions(z: Tensor, y: Tensor) -> Tensor:
    return F.ece(z, y, **GIVEN) + F.nll(z, y, **GIVEN)


ENTRIES = 2**23
OF_ROWS = tuple({"n": n, "num_classes": 1_000} for n in (1, 16, 256, 4_096, 50_000, 200_000))
OF_CLASSES = tuple({"n": ENTRIES // c, "num_classes": c} for c in (2, 10, 100, 1_000, 10_000, 128_256))
OF_BINS = tuple({"n": 1_000_000, "n_bins": b} for b in (5, 15, 100, 1_000, 10_000))
OF_EVENTS = tuple({"n": n} for n in (1, 100, 10_000, 100_000, 1_000_000, 10_000_000))
OF_CLASSWISE_BINS = tuple({"n": 5_000, "num_classes": 1_000, "n_bins": b} for b in (5, 15, 100, 1_000))

EXTRA_BYTES, EXTRA_BYTES_IN_PLAIN_TORCH = 10_000_000, 20_000_000

WITH_NUMBA = [
    job(
        "ECE, 50,000 x 1,000",
        rows_of_1000,
        partial(F.ece, n_bins=15, **GIVEN),
        {peers.softmax_in_chunks: 0.6, peers.torchmetrics_ece: 1 / 7},
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
    Job("100 updates of eight metrics, 256 x 1,000", updated_collection, (Peer(ONE_ECE, 1.2),)),
    job(
        "NLL, Brier, ECD, accuracy, ECE, ESCE, MCE and RMSCE, 50,000 x 1,000",
        rows_of_1000,
        values_of_collection,
        {peers.softmax_in_chunks: 1.0, peers.probmetrics_values: 1 / 20},
        extra_bytes=EXTRA_BYTES,
    ),
    job(
        "the same and class-wise ECE, 50,000 x 1,000",
        rows_of_1000,
        partial(values_of_collection, classwise=True),
        {peers.softmax_in_chunks: 2.0},
        extra_bytes=EXTRA_BYTES,
        grows=OF_CLASSWISE_BINS,
    ),
    *(
        job(
            f"binary ECE, {size}",
            partial(binary, n=n),
            partial(F.ece, task="binary", n_bins=15),
            {peers.relplot_ece: goal, peers.torchmetrics_binary_ece: None},
            exact=float64_ece,
            extra_bytes=EXTRA_BYTES,
            error=1e-7,
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
        job(
            f"gradient of ECE + NLL, {how}, 50,000 x 1,000",
            partial(rows_of_1000, gradient=True),
            partial(gradient, loss),
            {peers.gradient_of_cross_entropy: 1.0},
            extra_bytes=extra_bytes,
        )
        for how, loss, extra_bytes in (
            ("one collection", loss_of_collection, EXTRA_BYTES),
            ("two functions", loss_of_functions, EXTRA_BYTES_IN_PLAIN_TORCH),
        )
    ),
]

TORCHMETRICS, SOFTMAX = (peer_of(call).name for call in (peers.torchmetrics_ece, peers.softmax_in_chunks))
GOALS_IN_PLAIN_TORCH = {
    "ECE, 50,000 x 1,000": {TORCHMETRICS: 0.25},
    "binary ECE, 50,000": {TORCHMETRICS: 1.0},
    "binary ECE, 1 million": {TORCHMETRICS: 0.25},
    "the same and class-wise ECE, 50,000 x 1,000": {SOFTMAX: 5.0},
}
"""Ratios by job and peer."""


def in_plain_torch(job: Job) -> Job:
    extra_bytes = None if job.extra_bytes is None else EXTRA_BYTES_IN_PLAIN_TORCH
    return job.without_numba(GOALS_IN_PLAIN_TORCH.get(job.name, {}), rounds=5, extra_bytes=extra_bytes)


JOBS = [*WITH_NUMBA, *map(in_plain_torch, WITH_NUMBA)]
