"""Everyday jobs: common sizes, dtypes and entry points, against at most ten lines that a person would write.

The alternatives are in `by_hand`. Both sides get the same data, and `benchmarks.measure` checks that their values
agree. The goal is at most the time of the alternative, unless a job has another goal. Every job also runs without
numba, with a goal of at least 1.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

import torchcalib as tc
from benchmarks import by_hand, samples
from benchmarks.job import Job, alternative, gradient, peer_of
from benchmarks.one_pass import GIVEN, ece_of_groups, eight_metrics

TIES = 1e-3  # relative difference of values that average over the orders of ties, and values of one order
NOISE = 0.05  # the same for two bootstrap intervals with different random numbers
OPTIMUM = 1e-3  # the same for two optimisers
SINGLE = 1e-5  # the same for float32 rows
SUMS = 1e-3  # the same for float32 sums of many updates
DOUBLE = 1e-9
IGNORED = 255  # label of voxels that are ignored
ROUNDED = 0.01  # the same for confidences of bfloat16 logits, of which some move to the next bin

doubles = partial(samples.binary, dtype=torch.float64)
SIZES = (50_000, 10), (50_000, 100), (50_000, 1_000), (10_000, 100), (64, 10), (128, 100), (32, 1_000), (256, 1_000)
DATA = {
    **{f"{n:,} x {c:,}": partial(samples.logits, n=n, num_classes=c) for n, c in SIZES},
    "1 million": partial(samples.binary, n=1_000_000),
    "binary, 1 million": partial(samples.binary, n=1_000_000),
    "binary, 1 million, float64": partial(doubles, n=1_000_000),
    "binary, 1 million logits": partial(samples.binary_logits, n=1_000_000),
    "binary, 1 million, numpy float64": partial(samples.arrays, doubles, n=1_000_000),
    "binary, 100,000, numpy float32": partial(samples.arrays, samples.binary, n=100_000),
    "binary, 10,000, lists": partial(samples.lists, doubles, n=10_000),
    "binary, 1,000": partial(samples.binary, n=1_000),
    "binary, 256": partial(samples.binary, n=256),
    "50,000 x 10, numpy float64": partial(samples.arrays, samples.probabilities, n=50_000, num_classes=10),
    "50,000 x 100, float64": partial(samples.logits, n=50_000, num_classes=100, dtype=torch.float64),
    "50,000 x 100, bfloat16": partial(samples.logits, n=50_000, num_classes=100, dtype=torch.bfloat16),
    "20,000 x 80": partial(samples.multi_label, n=20_000, num_labels=80),
    "10,000, 1,000 replicates": partial(doubles, n=10_000),
    "10,000 x 10": partial(samples.csv_file, n=10_000),
}
"""Functions that return the data, by the size in the name of a job."""
groups_of_binary = partial(samples.grouped, samples.binary, n=1_000_000, num_groups=1_000)


def compared(
    what: str,
    size: str,
    ours: Callable[..., object],
    theirs: Callable[..., object],
    goal: float = 1.0,
    tolerance: float = SINGLE,
    data: Callable[..., Any] | None = None,
    repeats: int = 1,
) -> Job:
    """Job of two functions of `data`, or of those in the table. It runs on a GPU if its alternative is in torch."""
    options = {"tolerance": tolerance, "repeats": repeats, "on_device": peer_of(theirs).name.startswith("torch")}
    return Job(f"{what}, {size}", data or DATA[size], ours, {theirs: goal}, alone=False, **options)


def update_job(
    what: str,
    size: str,
    ours: Callable[[], Metric],
    theirs: Callable[[], Metric],
    goal: float = 1.0,
    seconds: float | None = None,
) -> Job:
    """Job of updates of two metrics with the same batch. `seconds` is the goal for one update."""

    def data(**sizes: int) -> tuple[Any, ...]:
        return *DATA[size](**sizes), ours(), theirs()

    @alternative(title=peer_of(theirs).name)
    def update_theirs(preds: Tensor, target: Tensor, _: Metric, metric: Metric) -> Metric:
        metric.update(preds, target)
        return metric

    options = {"repeats": 100, "tolerance": SUMS, "alone": False, "on_device": True}
    return Job(f"update of {what}, {size}", data, update_ours, {update_theirs: goal}, seconds=seconds, **options)


def update_ours(preds: Tensor, target: Tensor, metric: Metric, _: Metric) -> Metric:
    """Return the metric, or the ECE of a collection."""
    metric.update(preds, target)
    return metric["ECE"] if isinstance(metric, tc.CalibrationCollection) else metric


@alternative(title="torchcalib ECE alone")
def ece_of_1000_classes() -> Metric:
    return tc.ECE(num_classes=1_000, **GIVEN)


def penalised_loss(z: Tensor, y: Tensor) -> Tensor:
    return ece(z, y) + nll(z, y)


def four_scores(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    metrics = tc.CalibrationCollection(
        [cls(num_classes=z.shape[-1], **GIVEN) for cls in (tc.NLL, tc.BrierScore, tc.ECE, tc.Accuracy)]
    )
    metrics.update(z, y)
    return metrics.compute()


def temperature(z: Tensor, y: Tensor) -> Tensor:
    return tc.TemperatureScaling().fit(z, y, **GIVEN).temperature


def interval_of_brier_score(p: Tensor, y: Tensor) -> list[Tensor]:
    found = tc.bootstrap(tc.brier_score, p, y, task="binary")
    return [found.low, found.high]


def report_of_file(path: Path) -> dict[str, float]:
    found = tc.Report.from_files(path).flat()
    return {"ECE": found["ece/top_label"], "NLL": found["nll"], "Brier": found["brier"]}


nll, brier, ece = (partial(function, **GIVEN) for function in (tc.nll, tc.brier_score, tc.ece))
leaf = partial(samples.logits, n=50_000, num_classes=100, gradient=True)
cross_entropy = by_hand.torch_binary_cross_entropy
squared_error = by_hand.torch_mean_squared_error
classwise_ece = partial(ece, mode="classwise")

WITH_NUMBA = [
    compared("NLL", "binary, 1 million", tc.nll, cross_entropy, 0.8, 1e-4),
    compared("NLL", "binary, 1 million, float64", tc.nll, cross_entropy),
    compared(
        "NLL",
        "binary, 1 million logits",
        partial(tc.nll, from_logits=True),
        by_hand.torch_binary_cross_entropy_with_logits,
    ),
    compared("NLL", "binary, 1 million, numpy float64", tc.nll, by_hand.sklearn_log_loss),
    compared("Brier score", "binary, 1 million", tc.brier_score, squared_error, 1.2),
    compared("Brier score", "binary, 1 million, float64", tc.brier_score, squared_error),
    compared(
        "Brier score", "binary, 100,000, numpy float32", tc.brier_score, by_hand.numpy_mean_squared_error, repeats=10
    ),
    compared("Brier score", "binary, 10,000, lists", tc.brier_score, by_hand.sklearn_brier_score, repeats=5),
    compared("ECE", "binary, 1 million", tc.ece, by_hand.torch_binary_ece, 1.0, 1e-4),
    compared("ECE", "binary, 1 million, numpy float64", tc.ece, by_hand.numpy_binary_ece),
    compared("ECE", "binary, 1,000", tc.ece, by_hand.torch_binary_ece, 1.0, 1e-4, repeats=100),
    compared("ECE", "50,000 x 10, numpy float64", tc.ece, by_hand.numpy_ece, 0.6, DOUBLE),
    compared("NLL", "50,000 x 10, numpy float64", tc.nll, by_hand.sklearn_log_loss, 0.3, DOUBLE),
    compared("ECE", "50,000 x 10", ece, by_hand.torch_ece),
    compared("ECE", "50,000 x 100", ece, by_hand.torch_ece),
    compared("NLL", "50,000 x 10", nll, by_hand.torch_cross_entropy),
    compared("NLL", "50,000 x 100", nll, by_hand.torch_cross_entropy),
    compared("Brier score", "50,000 x 100", brier, by_hand.torch_brier_score),
    compared("ECE", "50,000 x 1,000", ece, by_hand.torch_ece_in_a_reused_buffer, 0.6),
    compared("ECE", "50,000 x 100, float64", ece, by_hand.torch_ece_of_float64, 1.0, DOUBLE),
    compared("ECE", "50,000 x 100, bfloat16", ece, by_hand.torch_ece, 1.0, ROUNDED),
    compared("NLL, Brier, ECE and accuracy", "50,000 x 100", four_scores, by_hand.torch_four_scores),
    compared("class-wise ECE", "50,000 x 10", classwise_ece, by_hand.torch_loop_over_classes, 1.0, 1e-4),
    compared("class-wise ECE", "50,000 x 100", classwise_ece, by_hand.torch_one_bincount_of_all_classes, 1.0, 1e-4),
    compared(
        "ECE of 1,000 groups",
        "binary, 1 million",
        ece_of_groups,
        by_hand.torch_one_bincount_of_all_groups,
        1.0,
        TIES,
        groups_of_binary,
    ),
    compared(
        "multi-label ECE", "20,000 x 80", partial(tc.ece, task="multilabel"), by_hand.torch_loop_over_labels, 0.3, 1e-4
    ),
    compared(
        "gradient of NLL",
        "50,000 x 100",
        partial(gradient, nll),
        by_hand.torch_gradient_of_cross_entropy,
        0.9,
        1e-3,
        leaf,
    ),
    compared(
        "gradient of ECE + NLL",
        "50,000 x 100",
        partial(gradient, penalised_loss),
        by_hand.torch_gradient_of_ece_and_cross_entropy,
        1.0,
        1e-3,
        leaf,
    ),
    update_job("ECE", "binary, 256", partial(tc.ECE, task="binary"), by_hand.torchmetrics_binary_ece, seconds=40e-6),
    *(
        update_job(
            "ECE", size, partial(tc.ECE, num_classes=c, **GIVEN), partial(by_hand.torchmetrics_ece, c), seconds=seconds
        )
        for size, c, seconds in (("64 x 10", 10, 60e-6), ("128 x 100", 100, 80e-6), ("32 x 1,000", 1_000, 90e-6))
    ),
    update_job(
        "eight metrics",
        "256 x 1,000",
        lambda: tc.CalibrationCollection(eight_metrics(1_000)),
        ece_of_1000_classes,
        1.2,
    ),
    compared("AURC", "1 million", tc.aurc, by_hand.torch_argsort_and_cumsum, 0.3, TIES),
    compared("AURC", "50,000 x 10", partial(tc.aurc, **GIVEN), by_hand.torch_aurc),
    compared("AUROC of correctness", "1 million", tc.correctness_auroc, by_hand.sklearn_roc_auc_score),
    compared(
        "accuracy at a coverage of 80%",
        "1 million",
        partial(tc.accuracy_at_coverage, coverage=0.8),
        by_hand.torch_topk_accuracy,
    ),
    compared("temperature", "10,000 x 100", temperature, by_hand.torch_lbfgs_temperature, 0.4, OPTIMUM),
    compared(
        "interval of the Brier score",
        "10,000, 1,000 replicates",
        interval_of_brier_score,
        by_hand.numpy_bootstrap_of_brier_score,
        1.0,
        NOISE,
    ),
    compared("report of a CSV file", "10,000 x 10", report_of_file, by_hand.pandas_and_sklearn_report),
]


def in_plain_torch(job: Job) -> Job:
    """Return the job without numba, with a goal of at least 1."""
    return job.without_numba({peer.name: max(1.0, peer.goal or 0) for peer in job.peers})


of_images = partial(classwise_ece, per_image=True, from_logits=False)


def partly_ignored(shape: tuple[int, ...], n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return volumes, their labels with a tenth of them ignored, and all labels."""
    q, y = samples.volumes(n, shape)
    hidden = torch.rand(y.shape, generator=torch.Generator().manual_seed(1)) < 0.1
    return q, y.masked_fill(hidden, IGNORED), y


def of_labelled_voxels(q: Tensor, y: Tensor, _: Tensor) -> Tensor:
    return of_images(q, y, ignore_index=IGNORED)


@alternative(title="torchcalib with all voxels")
def of_all_voxels(q: Tensor, _: Tensor, y: Tensor) -> Tensor:
    return of_images(q, y)


def volumes_job(
    shape: tuple[int, ...],
    goal: float,
    what: str = "",
    ours: Callable[..., object] = of_images,
    theirs: Callable[..., object] = by_hand.torch_monai_float32,
    data: Callable[..., Any] = samples.volumes,
) -> Job:
    """Job of class-wise ECE per image, with the size of volumes `(B, C, ...)` in its name."""
    data = partial(data, n=shape[0] * math.prod(shape[2:]), shape=shape)
    size, tolerance = " x ".join(map(str, shape)), 0.1  # float32 sums of many voxels
    job = compared(f"class-wise ECE per image{what}", size, ours, theirs, goal, tolerance, data)
    return replace(job, extra_bytes=64_000_000)


VOLUMES = [
    volumes_job((2, 3, 128, 128), 0.2),
    volumes_job((1, 3, 96, 96, 96), 0.2),
    volumes_job((2, 14, 96, 96, 64), 0.2),
    volumes_job((1, 2, 192, 192, 96), 0.1),
    volumes_job((1, 3, 96, 96, 96), 1.15, ", a tenth ignored", of_labelled_voxels, of_all_voxels, partly_ignored),
]

JOBS = [*WITH_NUMBA, *map(in_plain_torch, WITH_NUMBA), *VOLUMES]
