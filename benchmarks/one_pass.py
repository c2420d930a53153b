"""Jobs for metrics computed in one pass: ECE, a whole collection, class-wise bins, gradients."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torchmetrics import Metric

import torchcalib as tc
import torchcalib.functional as F
from benchmarks import by_hand, peers
from benchmarks.job import Job, alternative, gradient, peer_of
from benchmarks.samples import binary, grouped, logits

GIVEN = {"task": "multiclass", "from_logits": True}
Batches = Sequence[tuple[Tensor, Tensor]]

network_logits = partial(logits, separation=4.0)  # for an accuracy of 70 % with 1,000 classes
rows_of_1000 = partial(network_logits, n=50_000, num_classes=1_000)


def batches_of_256(n: int = 50_000, num_classes: int = 1_000, rows: int = 256) -> tuple[Batches]:
    z, y = network_logits(n, num_classes)
    return (list(zip(z.split(rows), y.split(rows), strict=True)),)


def streamed(metric: Metric, batches: Batches, updates: int | None = None) -> Metric:
    """Return a metric after all updates or some, and after its value was computed."""
    for preds, target in batches[:updates]:
        metric.update(preds, target)
    metric.compute()
    return metric


def streamed_ece(batches: Batches, updates: int | None = None) -> Metric:
    return streamed(tc.ECE(num_classes=batches[0][0].shape[-1], n_bins=15, **GIVEN), batches, updates)


@alternative(title="torchmetrics MulticlassCalibrationError")
def streamed_by_torchmetrics(batches: Batches, updates: int | None = None) -> Metric:
    return streamed(by_hand.torchmetrics_ece(batches[0][0].shape[-1], 15), batches, updates)


def eight_metrics(num_classes: int, n_bins: int = 15) -> dict[str, Metric]:
    given = {"num_classes": num_classes, **GIVEN}
    scores = {cls.__name__: cls(**given) for cls in (tc.NLL, tc.BrierScore, tc.ECD, tc.Accuracy)}
    return scores | {cls.__name__: cls(n_bins=n_bins, **given) for cls in (tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE)}


def collection_and_batches() -> tuple[Metric, Metric, Batches]:
    """Return eight metrics, one of them, and batches."""
    eight = tc.CalibrationCollection(eight_metrics(1_000))
    return eight, tc.ECE(num_classes=1_000, **GIVEN), *batches_of_256(25_600)


def update_eight(eight: Metric, _: Metric, batches: Batches) -> None:
    for batch in batches:
        eight.update(*batch)


@alternative(title="ECE alone")
def update_one(_: Metric, one: Metric, batches: Batches) -> None:
    update_eight(one, one, batches)


def values_of_collection(z: Tensor, y: Tensor, n_bins: int = 15, classwise: bool = False) -> dict[str, Tensor]:
    members = eight_metrics(z.shape[-1], n_bins)
    if classwise:
        members["classwise_ECE"] = tc.ECE(n_bins=n_bins, mode="classwise", num_classes=z.shape[-1], **GIVEN)
    metrics = tc.CalibrationCollection(members)
    metrics.update(z, y)
    return metrics.compute()


def ece_of(preds: Tensor) -> Metric:
    """Return the metric for log-odds, or for logits of classes."""
    return tc.ECE(task="binary") if preds.dim() == 1 else tc.ECE(num_classes=preds.shape[-1], **GIVEN)


def ece_of_groups(preds: Tensor, target: Tensor, groups: Tensor) -> Tensor:
    metric = tc.ByGroup(ece_of(preds), num_groups=int(groups.max()) + 1)
    metric.update(preds, target, groups=groups)
    return metric.compute()


@alternative(title="the same of all rows as one group")
def ece_of_all(preds: Tensor, target: Tensor, _: Tensor) -> Tensor:
    metric = ece_of(preds)
    metric.update(preds, target)
    return metric.compute()


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
    Job(
        "ECE, 50,000 x 1,000",
        rows_of_1000,
        partial(F.ece, n_bins=15, **GIVEN),
        {peers.softmax_in_chunks: 0.6, peers.torchmetrics_ece: 1 / 7},
        extra_bytes=EXTRA_BYTES,
        grows=OF_ROWS + OF_CLASSES,
    ),
    Job(
        "ECE in batches of 256, 50,000 x 1,000",
        batches_of_256,
        streamed_ece,
        {streamed_by_torchmetrics: 0.35},
        extra_bytes=EXTRA_BYTES,
        updates=(1, 196),
    ),
    Job("100 updates of eight metrics, 256 x 1,000", collection_and_batches, update_eight, {update_one: 1.2}),
    Job(
        "NLL, Brier, ECD, accuracy, ECE, ESCE, MCE and RMSCE, 50,000 x 1,000",
        rows_of_1000,
        values_of_collection,
        {peers.softmax_in_chunks: 1.0, peers.probmetrics_values: 1 / 20},
        extra_bytes=EXTRA_BYTES,
    ),
    Job(
        "the same and class-wise ECE, 50,000 x 1,000",
        rows_of_1000,
        partial(values_of_collection, classwise=True),
        {peers.softmax_in_chunks: 2.0},
        extra_bytes=EXTRA_BYTES,
        grows=OF_CLASSWISE_BINS,
    ),
    *(
        Job(
            f"binary ECE, {size}",
            partial(binary, n=n),
            partial(F.ece, task="binary", n_bins=15),
            {peers.relplot_ece: goal, peers.torchmetrics_binary_ece: None},
            extra_bytes=EXTRA_BYTES,
            grows=OF_BINS + OF_EVENTS if n == 1_000_000 else (),
        )
        for n, size, goal in ((50_000, "50,000", 2.5), (1_000_000, "1 million", 0.7), (10_000_000, "10 million", 1.0))
    ),
    *(
        Job(
            f"ECE of 1,000 groups, {size}",
            data,
            ece_of_groups,
            {ece_of_all: 1.5},
            grows=tuple({"n": 1_000_000, "num_groups": 10**k} for k in range(7)) if size.startswith("binary") else (),
        )
        for size, data in (
            ("binary, 1 million", partial(grouped, binary, n=1_000_000, num_groups=1_000)),
            ("50,000 x 1,000", partial(grouped, network_logits, n=50_000, num_classes=1_000, num_groups=1_000)),
        )
    ),
    *(
        Job(
            f"gradient of ECE + NLL, {how}, 50,000 x 1,000",
            partial(rows_of_1000, gradient=True),
            partial(gradient, loss),
            {by_hand.torch_gradient_of_cross_entropy: 1.0},
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
