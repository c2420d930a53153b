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
from typing import Any

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


def compared(
    data: Callable[..., Sequence[Any]],
    ours: Callable[..., object],
    theirs: Callable[..., object],
    tolerance: float,
    repeats: int,
    n: int,
    device: str = "cpu",
) -> Sides:
    """Two functions of the same data."""
    given = data(n, device)
    peer = partial(theirs, *given)
    return Sides(partial(ours, *given), {title(theirs): peer}, repeats=repeats, tolerance=tolerance)


def updated(
    data: Callable[..., tuple[Tensor, Tensor]],
    ours: Callable[[], Metric],
    theirs: Callable[[], Metric],
    name: str,
    n: int,
    device: str = "cpu",
    repeats: int = 100,
) -> Sides:
    """Updates of two metrics with the same batch of n rows. The values of all updates are compared."""
    preds, target = data(n, device)
    metrics = ours().to(device), theirs().to(device)
    calls = [partial(metric.update, preds, target) for metric in metrics]
    values = {OURS: lambda: ece_of(metrics[0].compute()), name: lambda: ece_of(metrics[1].compute())}
    return Sides(calls[0], {name: calls[1]}, repeats=repeats, tolerance=SUMS, values=values)


def ece_of(value: Any) -> Any:
    """Return the ECE of a collection, or the value of one metric."""
    return value["ECE"] if isinstance(value, dict) else value


def title(function: Callable[..., object]) -> str:
    """Return the name of an alternative in the table."""
    while isinstance(function, partial):
        function = function.func
    return function.__name__.replace("_", " ")


def peer_of(name: str, goal: float) -> Peer:
    return Peer(name, goal, PACKAGES.get(name.split()[0], ()))


def job(
    name: str,
    n: int,
    data: Callable[..., Sequence[Any]],
    ours: Callable[..., object],
    theirs: Callable[..., object],
    goal: float = 1.0,
    tolerance: float = SINGLE,
    repeats: int = 1,
) -> Job:
    """Job of two functions. It runs on a GPU if its alternative is in torch."""
    peer = title(theirs)
    sides = partial(compared, data, ours, theirs, tolerance, repeats, n=n)
    why = REASONS.get(name, "")
    return Job(name, sides, (peer_of(peer, goal),), why=why, alone=False, on_device=peer.startswith("torch"))


def update_job(
    name: str,
    n: int,
    data: Callable[..., tuple[Tensor, Tensor]],
    ours: Callable[[], Metric],
    theirs: Callable[[], Metric],
    goal: float = 1.0,
    seconds: float | None = None,
    against: str = "",
) -> Job:
    """Job of two metrics. `seconds` is the goal for one update."""
    peer = against or title(theirs)
    sides = partial(updated, data, ours, theirs, peer, n=n)
    why = REASONS.get(name, "")
    return Job(name, sides, (peer_of(peer, goal),), seconds=seconds, why=why, alone=False, on_device=True)


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

GROUPS = "a quarter of the time sums the sampling noise of every group"
REASONS = {
    "ECE, binary, 1,000": "checks and calls of the compiled loop, whatever the size, take 70% of the time",
    "NLL, 50,000 x 10": "the compiled pass takes 60 to 80% of the time, and checks and the sum the rest",
    "NLL, 50,000 x 100": "the pass also finds the top class of each row, and sums what the other scores need",
    "ECE of 1,000 groups, binary, 1 million": GROUPS,
    "gradient of NLL, 50,000 x 100": "two passes with exponentials of equal length; torch keeps those of the first one",
    "update of ECE, binary, 256": "the spread of runs on this machine is 35 to 53 microseconds",
    "update of ECE, 128 x 100": "calls of Python and numpy take 55% of the time, and the compiled pass the rest",
    "update of eight metrics, 256 x 1,000": "states and bookkeeping of seven more metrics take 35 microseconds",
    "temperature, 10,000 x 100": (
        "two steps over all logits take a third of the time, less if no thread of torch waits for work; steps over a "
        "tenth of the rows, checks, row means and short operations of torch take the rest"
    ),
    "report of a CSV file, 10,000 x 10": (
        "the cross-validation of five calibrators takes 60% of the time, and tests and intervals of 30 metrics a "
        "quarter"
    ),
}
"""Why our call misses its goal, by the name of the job."""

CHECKED = "checks take a fifth of the time, and the conversion of values and labels to float64 half"
TOP = "a quarter of the time finds the top class, in one thread; sums exclude it, which keeps digits"
LABEL = "a third or more of the time is sums without the label, which keep digits, and their float64 logarithms"
FEW_CALLS = "60 calls of Python, numpy and torch, of 1 to 5 microseconds each, whatever the size"
REASONS_WITHOUT_NUMBA = {
    "NLL, binary, 1 million": "logarithms are float64, and those of torch float32",
    "ECE, binary, 1 million": "checks, and counts of outcomes beside the sums of confidences; torch sums differences",
    "NLL, binary, 1 million logits": "checks and signs from labels take a third of the time; sums are float64",
    "Brier score, binary, 1 million": CHECKED,
    "Brier score, binary, 1 million, float64": "checks and the conversion of labels take half of the time",
    "Brier score, binary, 100,000, numpy float32": CHECKED,
    "ECE, binary, 1 million, numpy float64": "checks and separate counts of outcomes take a third of the time",
    "ECE, binary, 1,000": "checks, the events, and short operations of torch, whatever the size",
    "ECE, 50,000 x 10, numpy float64": "sums and smallest values of all rows are checked",
    "ECE, 50,000 x 10": TOP,
    "ECE, 50,000 x 100": TOP,
    "ECE, 50,000 x 100, bfloat16": TOP,
    "NLL, 50,000 x 10": LABEL,
    "NLL, 50,000 x 100": LABEL,
    "Brier score, 50,000 x 100": TOP,
    "class-wise ECE, 50,000 x 10": "a third of the time checks rows in a pass of their own, with a second softmax",
    "ECE of 1,000 groups, binary, 1 million": GROUPS,
    "gradient of NLL, 50,000 x 100": "two softmaxes; new memory to keep the first one takes as long as the second one",
    "gradient of ECE + NLL, 50,000 x 100": "autograd adds up two gradients, each from two softmaxes",
    "update of ECE, 64 x 10": FEW_CALLS,
    "update of ECE, 128 x 100": FEW_CALLS,
    "update of eight metrics, 256 x 1,000": "squares and entropies take as long as the pass for ECE, and states follow",
    "AURC, 50,000 x 10": "a third of the time computes log-odds in float64, which do not saturate",
    "temperature, 10,000 x 100": "two steps over all logits take half of the time, and short operations the rest",
    "interval of the Brier score, 10,000, 1,000 replicates": (
        "two thirds of the time draw weights, equal on every device, by numpy in one thread; they are also checked"
    ),
    "report of a CSV file, 10,000 x 10": (
        "the cross-validation of five calibrators takes three quarters of the time, a third of it for fits of "
        "Venn-Abers by loops in Python; tests and intervals of 30 metrics take a fifth"
    ),
}
"""The same without numba."""

BINARY = [
    job("NLL, binary, 1 million", MILLION, binary, tc.nll, by_hand.torch_binary_cross_entropy, 0.8, tolerance=1e-4),
    job("NLL, binary, 1 million, float64", MILLION, double, tc.nll, by_hand.torch_binary_cross_entropy),
    job(
        "NLL, binary, 1 million logits",
        MILLION,
        binary_logits,
        partial(tc.nll, from_logits=True),
        by_hand.torch_binary_cross_entropy_with_logits,
    ),
    job("NLL, binary, 1 million, numpy float64", MILLION, partial(arrays, double), tc.nll, by_hand.sklearn_log_loss),
    job("Brier score, binary, 1 million", MILLION, binary, tc.brier_score, by_hand.torch_mean_squared_error, 1.2),
    job("Brier score, binary, 1 million, float64", MILLION, double, tc.brier_score, by_hand.torch_mean_squared_error),
    job(
        "Brier score, binary, 100,000, numpy float32",
        100_000,
        partial(arrays, binary),
        tc.brier_score,
        by_hand.numpy_mean_squared_error,
        repeats=10,
    ),
    job(
        "Brier score, binary, 10,000, lists",
        10_000,
        partial(lists, double),
        tc.brier_score,
        by_hand.sklearn_brier_score,
        repeats=5,
    ),
    job("ECE, binary, 1 million", MILLION, binary, tc.ece, by_hand.torch_binary_ece, tolerance=1e-4),
    job("ECE, binary, 1 million, numpy float64", MILLION, partial(arrays, double), tc.ece, by_hand.numpy_binary_ece),
    job("ECE, binary, 1,000", 1_000, binary, tc.ece, by_hand.torch_binary_ece, tolerance=1e-4, repeats=100),
]


def of_arrays(name: str, ours: Callable[..., object], theirs: Callable[..., object], goal: float = 1.0) -> Job:
    """Job for numpy float64 probabilities of 10 classes."""
    data = partial(arrays, partial(probabilities, num_classes=10))
    return job(f"{name}, 50,000 x 10, numpy float64", 50_000, data, ours, theirs, goal, DOUBLE)


MULTI_CLASS = [
    of_arrays("ECE", tc.ece, by_hand.numpy_ece, 0.6),
    of_arrays("NLL", tc.nll, by_hand.sklearn_log_loss, 0.3),
    *(
        job(f"{name}, 50,000 x {c}", 50_000, partial(logits, num_classes=c), ours, theirs)
        for name, ours, theirs in (
            ("ECE", ece, by_hand.torch_ece),
            ("NLL", nll, by_hand.torch_cross_entropy),
        )
        for c in (10, 100)
    ),
    job("Brier score, 50,000 x 100", 50_000, partial(logits, num_classes=100), brier, by_hand.torch_brier_score),
    job(
        "ECE, 50,000 x 1,000",
        50_000,
        partial(logits, num_classes=1_000),
        ece,
        by_hand.torch_ece_in_a_reused_buffer,
        0.6,
    ),
    job(
        "ECE, 50,000 x 100, float64",
        50_000,
        partial(logits, num_classes=100, dtype=torch.float64),
        ece,
        by_hand.torch_ece_of_float64,
        tolerance=DOUBLE,
    ),
    job(
        "ECE, 50,000 x 100, bfloat16",
        50_000,
        partial(logits, num_classes=100, dtype=torch.bfloat16),
        ece,
        by_hand.torch_ece,
        tolerance=ROUNDED,
    ),
    job(
        "NLL, Brier, ECE and accuracy, 50,000 x 100",
        50_000,
        partial(logits, num_classes=100),
        four_scores,
        by_hand.torch_four_scores,
    ),
    *(
        job(
            f"class-wise ECE, 50,000 x {c}",
            50_000,
            partial(logits, num_classes=c),
            partial(ece, mode="classwise"),
            theirs,
            tolerance=1e-4,
        )
        for c, theirs in ((10, by_hand.torch_loop_over_classes), (100, by_hand.torch_one_bincount_of_all_classes))
    ),
    job(
        "ECE of 1,000 groups, binary, 1 million",
        MILLION,
        partial(grouped, binary, 1_000),
        ece_by_group,
        by_hand.torch_one_bincount_of_all_groups,
        tolerance=TIES,
    ),
    job(
        "multi-label ECE, 20,000 x 80",
        20_000,
        partial(multi_label, num_labels=80),
        partial(tc.ece, task="multilabel"),
        by_hand.torch_loop_over_labels,
        0.3,
        tolerance=1e-4,
    ),
]

GRADIENTS = [
    job(
        f"gradient of {name}, 50,000 x 100",
        50_000,
        partial(logits, num_classes=100, gradient=True),
        partial(gradient, loss),
        theirs,
        goal,
        tolerance=1e-3,
    )
    for name, loss, theirs, goal in (
        ("NLL", nll, by_hand.torch_gradient_of_cross_entropy, 0.9),
        ("ECE + NLL", penalised_loss, by_hand.torch_gradient_of_ece_and_cross_entropy, 1.0),
    )
]

UPDATES = [
    update_job(
        "update of ECE, binary, 256",
        256,
        binary,
        partial(tc.ECE, task="binary"),
        by_hand.torchmetrics_binary_ece,
        seconds=40e-6,
    ),
    *(
        update_job(
            f"update of ECE, {n} x {c:,}",
            n,
            partial(logits, num_classes=c),
            partial(tc.ECE, num_classes=c, **GIVEN),
            partial(by_hand.torchmetrics_ece, c),
            seconds=seconds,
        )
        for n, c, seconds in ((64, 10, 60e-6), (128, 100, 80e-6), (32, 1_000, 90e-6))
    ),
    update_job(
        "update of eight metrics, 256 x 1,000",
        256,
        partial(logits, num_classes=1_000),
        lambda: tc.CalibrationCollection(eight_metrics(1_000)),
        partial(tc.ECE, num_classes=1_000, **GIVEN),
        1.2,
        against=ECE_ALONE,
    ),
]

SELECTIVE = [
    job("AURC, 1 million", MILLION, binary, tc.aurc, by_hand.torch_argsort_and_cumsum, 0.3, TIES),
    job("AURC, 50,000 x 10", 50_000, partial(logits, num_classes=10), partial(tc.aurc, **GIVEN), by_hand.torch_aurc),
    job("AUROC of correctness, 1 million", MILLION, binary, tc.correctness_auroc, by_hand.sklearn_roc_auc_score),
    job(
        "accuracy at a coverage of 80%, 1 million",
        MILLION,
        binary,
        partial(tc.accuracy_at_coverage, coverage=0.8),
        by_hand.torch_topk_accuracy,
    ),
]

FITS_AND_REPORTS = [
    job(
        "temperature, 10,000 x 100",
        10_000,
        partial(logits, num_classes=100),
        temperature,
        by_hand.torch_lbfgs_temperature,
        0.4,
        OPTIMUM,
    ),
    job(
        "interval of the Brier score, 10,000, 1,000 replicates",
        10_000,
        double,
        interval_of_brier_score,
        by_hand.numpy_bootstrap_of_brier_score,
        tolerance=NOISE,
    ),
    job(
        "report of a CSV file, 10,000 x 10",
        10_000,
        csv_file,
        report_of_file,
        by_hand.pandas_and_sklearn_report,
        tolerance=SINGLE,
    ),
]

WITH_NUMBA = [*BINARY, *MULTI_CLASS, *GRADIENTS, *UPDATES, *SELECTIVE, *FITS_AND_REPORTS]


def in_plain_torch(job: Job) -> Job:
    """Return the job without numba, with a goal of at least 1."""
    peers = tuple(replace(peer, goal=max(1.0, peer.goal or 0)) for peer in job.peers)
    return replace(job.without_numba(peers=peers), why=REASONS_WITHOUT_NUMBA.get(job.name, ""))


JOBS = [*WITH_NUMBA, *map(in_plain_torch, WITH_NUMBA)]
