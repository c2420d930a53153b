"""Everyday jobs: common sizes, dtypes and entry points, against at most ten lines that a person would write.

The alternatives are in `by_hand`. Both sides get the same data, and `benchmarks.measure` checks that their values
agree. The goal is at most the time of the alternative, unless a job has another goal. Every job also runs without
numba, with a goal of at least 1.
"""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

import torchcalib as tc
from benchmarks import by_hand
from benchmarks.job import OURS, Job, Peer, Sides
from benchmarks.one_pass import GIVEN, eight_metrics
from benchmarks.samples import like_imagenet_dogs, overconfident_logits

PACKAGES = {"sklearn": ("scikit-learn",), "pandas": ("pandas", "scikit-learn")}
"""Packages that an alternative requires, by the first word of its name."""

TIES = 1e-3  # relative difference of values that average over the orders of ties, and values of one order
NOISE = 0.05  # the same for two bootstrap intervals with different random numbers
OPTIMUM = 1e-3  # the same for two optimisers
SINGLE = 1e-5  # the same for float32 rows
SUMS = 1e-3  # the same for float32 sums of many updates
DOUBLE = 1e-9
ROUNDED = 0.01  # the same for confidences of bfloat16 logits, of which some move to the next bin


def binary(n: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return P(positive) and labels."""
    p, y = like_imagenet_dogs(n)
    return p.to(device, dtype), y.to(device)


def binary_logits(n: int, device: str) -> tuple[Tensor, Tensor]:
    p, y = like_imagenet_dogs(n)
    return p.logit().to(device, torch.float32), y.to(device)


def logits(
    n: int, device: str, num_classes: int, dtype: torch.dtype = torch.float32, gradient: bool = False
) -> tuple[Tensor, Tensor]:
    z, y = overconfident_logits(n, num_classes)
    return z.to(device, dtype).requires_grad_(gradient), y.to(device)


def probabilities(n: int, device: str, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return float64 probabilities and labels."""
    z, y = logits(n, device, num_classes, torch.float64)
    return z.softmax(-1), y


def multi_label(n: int, device: str, num_labels: int) -> tuple[Tensor, Tensor]:
    """Return float32 probabilities and 0/1 targets, both `(N, L)`."""
    p, y = binary(n * num_labels, device)
    return p.view(n, num_labels), y.view(n, num_labels)


def grouped(data: Callable[..., tuple[Tensor, Tensor]], num_groups: int, n: int, device: str) -> tuple[Tensor, ...]:
    """Return predictions, labels and random groups."""
    num_groups = min(num_groups, n)
    groups = torch.randint(num_groups, (n,), generator=torch.Generator().manual_seed(1))
    groups[:num_groups] = torch.arange(num_groups)  # no group is empty
    return *data(n, device), groups.to(device)


def arrays(data: Callable[..., tuple[Tensor, Tensor]], n: int, device: str) -> tuple[Any, ...]:
    return tuple(x.numpy() for x in data(n, device))


def lists(data: Callable[..., tuple[Tensor, Tensor]], n: int, device: str) -> tuple[Any, ...]:
    return tuple(x.tolist() for x in data(n, device))


def csv_file(n: int, device: str, num_classes: int = 10) -> tuple[Path]:
    """Return a file with a column for each class and the column "target"."""
    q, y = probabilities(n, device, num_classes)
    path = Path(tempfile.mkdtemp()) / "predictions.csv"
    atexit.register(shutil.rmtree, path.parent)
    names = ",".join([*(f"prob_{k}" for k in range(num_classes)), "target"])
    table = np.column_stack((q.numpy(), y.numpy()))
    np.savetxt(path, table, ["%.17g"] * num_classes + ["%d"], delimiter=",", header=names, comments="")
    return (path,)


class Data(NamedTuple):
    """Data of a job: kind and size in the table, number of rows, and function of a number of rows and a device."""

    title: str
    n: int
    draw: Callable[[int, str], Sequence[Any]]


def compared(
    data: Data,
    ours: Callable[..., object],
    theirs: Callable[..., object],
    tolerance: float,
    repeats: int,
    n: int,
    device: str = "cpu",
) -> Sides:
    """Two functions of the same data."""
    given = data.draw(n, device)
    peer = partial(theirs, *given)
    return Sides(partial(ours, *given), {title(theirs): peer}, repeats=repeats, tolerance=tolerance)


def updated(
    data: Data, ours: Callable[[], Metric], theirs: Callable[[], Metric], name: str, n: int, device: str = "cpu"
) -> Sides:
    """Updates of two metrics with the same batch of n rows. The values of all updates are compared."""
    preds, target = data.draw(n, device)
    metrics = ours().to(device), theirs().to(device)
    calls = [partial(metric.update, preds, target) for metric in metrics]
    values = {OURS: lambda: ece_of(metrics[0].compute()), name: lambda: ece_of(metrics[1].compute())}
    return Sides(calls[0], {name: calls[1]}, repeats=100, tolerance=SUMS, values=values)


def ece_of(value: Any) -> Any:
    """Return the ECE of a collection, or the value of one metric."""
    return value["ECE"] if isinstance(value, dict) else value


def title(function: Callable[..., object]) -> str:
    """Return the name of an alternative in the table."""
    while isinstance(function, partial):
        function = function.func
    return function.__name__.replace("_", " ")


def job(
    what: str,
    data: Data,
    ours: Callable[..., object],
    theirs: Callable[..., object],
    goal: float = 1.0,
    tolerance: float = SINGLE,
    repeats: int = 1,
) -> Job:
    """Job of two functions. It runs on a GPU if its alternative is in torch."""
    name = title(theirs)
    peer = Peer(name, goal, PACKAGES.get(name.split()[0], ()))
    sides = partial(compared, data, ours, theirs, tolerance, repeats, n=data.n)
    return Job(f"{what}, {data.title}", sides, (peer,), alone=False, on_device=name.startswith("torch"))


def update_job(
    what: str,
    data: Data,
    ours: Callable[[], Metric],
    theirs: Callable[[], Metric],
    goal: float = 1.0,
    seconds: float | None = None,
    against: str = "",
) -> Job:
    """Job of two metrics. `seconds` is the goal for one update."""
    name = against or title(theirs)
    sides = partial(updated, data, ours, theirs, name, n=data.n)
    peers = (Peer(name, goal),)
    return Job(f"update of {what}, {data.title}", sides, peers, seconds=seconds, alone=False, on_device=True)


def gradient(loss: Callable[[Tensor, Tensor], Tensor], z: Tensor, y: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss(z, y), z)
    return found


def penalised_loss(z: Tensor, y: Tensor) -> Tensor:
    return ece(z, y) + nll(z, y)


def four_scores(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    metrics = tc.CalibrationCollection(
        [cls(num_classes=z.shape[-1], **GIVEN) for cls in (tc.NLL, tc.BrierScore, tc.ECE, tc.Accuracy)]
    )
    metrics.update(z, y)
    return metrics.compute()


def ece_by_group(p: Tensor, y: Tensor, groups: Tensor) -> Tensor:
    metric = tc.ByGroup(tc.ECE(task="binary"), num_groups=int(groups.max()) + 1)
    metric.update(p, y, groups=groups)
    return metric.compute()


def temperature(z: Tensor, y: Tensor) -> Tensor:
    return tc.TemperatureScaling().fit(z, y, **GIVEN).temperature


def interval_of_brier_score(p: Tensor, y: Tensor) -> list[Tensor]:
    found = tc.bootstrap(tc.brier_score, p, y, task="binary")
    return [found.low, found.high]


def report_of_file(path: Path) -> dict[str, float]:
    found = tc.Report.from_files(path).flat()
    return {"ECE": found["ece/top_label"], "NLL": found["nll"], "Brier": found["brier"]}


nll, brier, ece = (partial(function, **GIVEN) for function in (tc.nll, tc.brier_score, tc.ece))
double = partial(binary, dtype=torch.float64)
MILLION = 1_000_000
ECE_ALONE = "torchcalib ECE alone"

MILLION_ROWS = Data("1 million", MILLION, binary)
BINARY = Data("binary, 1 million", MILLION, binary)
FLOAT64 = Data("binary, 1 million, float64", MILLION, double)
LOGITS = Data("binary, 1 million logits", MILLION, binary_logits)
NUMPY = Data("binary, 1 million, numpy float64", MILLION, partial(arrays, double))
NUMPY_FLOAT32 = Data("binary, 100,000, numpy float32", 100_000, partial(arrays, binary))
LISTS = Data("binary, 10,000, lists", 10_000, partial(lists, double))
FEW = Data("binary, 1,000", 1_000, binary)
NUMPY_CLASSES = Data("50,000 x 10, numpy float64", 50_000, partial(arrays, partial(probabilities, num_classes=10)))
GROUPS = Data("binary, 1 million", MILLION, partial(grouped, binary, 1_000))
LABELS = Data("20,000 x 80", 20_000, partial(multi_label, num_labels=80))
REPLICATES = Data("10,000, 1,000 replicates", 10_000, double)
CSV_FILE = Data("10,000 x 10", 10_000, csv_file)


def rows(num_classes: int, n: int = 50_000, kind: str = "", **options: Any) -> Data:
    """Return logits of several classes."""
    return Data(f"{n:,} x {num_classes:,}{kind}", n, partial(logits, num_classes=num_classes, **options))


C10, C100, C1000 = rows(10), rows(100), rows(1_000)
C100_FLOAT64 = rows(100, kind=", float64", dtype=torch.float64)
C100_BFLOAT16 = rows(100, kind=", bfloat16", dtype=torch.bfloat16)
LEAF = rows(100, gradient=True)
cross_entropy = by_hand.torch_binary_cross_entropy
squared_error = by_hand.torch_mean_squared_error
gradients = partial(gradient, nll), partial(gradient, penalised_loss)
classwise_ece = partial(ece, mode="classwise")

WITH_NUMBA = [
    job("NLL", BINARY, tc.nll, cross_entropy, 0.8, tolerance=1e-4),
    job("NLL", FLOAT64, tc.nll, cross_entropy),
    job("NLL", LOGITS, partial(tc.nll, from_logits=True), by_hand.torch_binary_cross_entropy_with_logits),
    job("NLL", NUMPY, tc.nll, by_hand.sklearn_log_loss),
    job("Brier score", BINARY, tc.brier_score, squared_error, 1.2),
    job("Brier score", FLOAT64, tc.brier_score, squared_error),
    job("Brier score", NUMPY_FLOAT32, tc.brier_score, by_hand.numpy_mean_squared_error, repeats=10),
    job("Brier score", LISTS, tc.brier_score, by_hand.sklearn_brier_score, repeats=5),
    job("ECE", BINARY, tc.ece, by_hand.torch_binary_ece, tolerance=1e-4),
    job("ECE", NUMPY, tc.ece, by_hand.numpy_binary_ece),
    job("ECE", FEW, tc.ece, by_hand.torch_binary_ece, tolerance=1e-4, repeats=100),
    job("ECE", NUMPY_CLASSES, tc.ece, by_hand.numpy_ece, 0.6, DOUBLE),
    job("NLL", NUMPY_CLASSES, tc.nll, by_hand.sklearn_log_loss, 0.3, DOUBLE),
    job("ECE", C10, ece, by_hand.torch_ece),
    job("ECE", C100, ece, by_hand.torch_ece),
    job("NLL", C10, nll, by_hand.torch_cross_entropy),
    job("NLL", C100, nll, by_hand.torch_cross_entropy),
    job("Brier score", C100, brier, by_hand.torch_brier_score),
    job("ECE", C1000, ece, by_hand.torch_ece_in_a_reused_buffer, 0.6),
    job("ECE", C100_FLOAT64, ece, by_hand.torch_ece_of_float64, tolerance=DOUBLE),
    job("ECE", C100_BFLOAT16, ece, by_hand.torch_ece, tolerance=ROUNDED),
    job("NLL, Brier, ECE and accuracy", C100, four_scores, by_hand.torch_four_scores),
    job("class-wise ECE", C10, classwise_ece, by_hand.torch_loop_over_classes, tolerance=1e-4),
    job("class-wise ECE", C100, classwise_ece, by_hand.torch_one_bincount_of_all_classes, tolerance=1e-4),
    job("ECE of 1,000 groups", GROUPS, ece_by_group, by_hand.torch_one_bincount_of_all_groups, tolerance=TIES),
    job("multi-label ECE", LABELS, partial(tc.ece, task="multilabel"), by_hand.torch_loop_over_labels, 0.3, 1e-4),
    job("gradient of NLL", LEAF, gradients[0], by_hand.torch_gradient_of_cross_entropy, 0.9, 1e-3),
    job("gradient of ECE + NLL", LEAF, gradients[1], by_hand.torch_gradient_of_ece_and_cross_entropy, 1.0, 1e-3),
    update_job(
        "ECE",
        Data("binary, 256", 256, binary),
        partial(tc.ECE, task="binary"),
        by_hand.torchmetrics_binary_ece,
        seconds=40e-6,
    ),
    *(
        update_job(
            "ECE",
            rows(c, n),
            partial(tc.ECE, num_classes=c, **GIVEN),
            partial(by_hand.torchmetrics_ece, c),
            seconds=seconds,
        )
        for n, c, seconds in ((64, 10, 60e-6), (128, 100, 80e-6), (32, 1_000, 90e-6))
    ),
    update_job(
        "eight metrics",
        rows(1_000, 256),
        lambda: tc.CalibrationCollection(eight_metrics(1_000)),
        partial(tc.ECE, num_classes=1_000, **GIVEN),
        1.2,
        against=ECE_ALONE,
    ),
    job("AURC", MILLION_ROWS, tc.aurc, by_hand.torch_argsort_and_cumsum, 0.3, TIES),
    job("AURC", C10, partial(tc.aurc, **GIVEN), by_hand.torch_aurc),
    job("AUROC of correctness", MILLION_ROWS, tc.correctness_auroc, by_hand.sklearn_roc_auc_score),
    job(
        "accuracy at a coverage of 80%",
        MILLION_ROWS,
        partial(tc.accuracy_at_coverage, coverage=0.8),
        by_hand.torch_topk_accuracy,
    ),
    job("temperature", rows(100, 10_000), temperature, by_hand.torch_lbfgs_temperature, 0.4, OPTIMUM),
    job(
        "interval of the Brier score",
        REPLICATES,
        interval_of_brier_score,
        by_hand.numpy_bootstrap_of_brier_score,
        tolerance=NOISE,
    ),
    job("report of a CSV file", CSV_FILE, report_of_file, by_hand.pandas_and_sklearn_report),
]


def in_plain_torch(job: Job) -> Job:
    """Return the job without numba, with a goal of at least 1."""
    peers = tuple(replace(peer, goal=max(1.0, peer.goal or 0)) for peer in job.peers)
    return job.without_numba(peers=peers)


JOBS = [*WITH_NUMBA, *map(in_plain_torch, WITH_NUMBA)]
