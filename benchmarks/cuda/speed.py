"""Speed of the operations: bytes per second, relative to a device-to-device copy in the same run.

The bytes are the minimum: every input is read once, and every output written once. A copy of n bytes moves 2 n.
Times are medians over repeats, between which the cache is overwritten. By default a CUDA graph is replayed, so that
times exclude the host. "eager" times include kernel launches by the host. Goals are for a Hopper GPU.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import torchcalib.functional as F
from benchmarks import peers
from benchmarks.cuda.behaviour import captured, collection
from benchmarks.cuda.check import label_of
from benchmarks.measure import seconds
from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.softmax_stats import rows

SHAPES = ((50_000, 1000), (8192, 128_256))
N_EVENTS = 10**7
DTYPES = (torch.float32, torch.bfloat16)
ROWS_GOAL, CLASSES_GOAL, COLLECTION_GOAL = 0.85, 0.60, 1.15
N_BINS = 15
ROW_OP = "row op"


@dataclass(frozen=True)
class Speed:
    """Result of one job.

    Attributes:
        job: name of the job.
        shape: shape of the input.
        dtype: dtype of the input.
        seconds: median time of one run; None after an exception.
        share: bytes per second divided by those of a copy; None for jobs that are not limited by memory.
        ratio: time divided by that of the forward row operation, for jobs with such a goal.
        goal: smallest share, or largest ratio.
        how: "graph", "eager", or the exception.
    """

    job: str
    shape: str
    dtype: str
    seconds: float | None
    share: float | None = None
    ratio: float | None = None
    goal: float | None = None
    how: str = "graph"

    @property
    def met(self) -> bool | None:
        """Whether the goal was met; None without a goal or without a time."""
        if self.goal is None or self.seconds is None:
            return None
        if self.ratio is not None:
            return self.ratio <= self.goal
        return self.share is not None and self.share >= self.goal


@dataclass(frozen=True)
class Job:
    """A call to measure, with its bytes, goal, and whether to run it eagerly and compare it with the row operation."""

    name: str
    call: Callable[[], object]
    n_bytes: int | None = None
    goal: float | None = None
    eager: bool = False
    to_rows: bool = False


class Clock:
    """Timer that overwrites the cache of the device between repeats."""

    def __init__(self, device: torch.device, repeats: int = 30) -> None:
        self.device, self.repeats = device, repeats
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**16
        self._cache = torch.empty(max(size, 2**16), dtype=torch.uint8, device=device)

    def seconds(self, call: Callable[[], object], eager: bool = False) -> float:
        """Return the median seconds of a call, or of replays of its graph."""
        call()  # compiles kernels
        replay = call if eager else captured(call, self.device)
        for _ in range(3):
            replay()
        if self.device.type == "cpu":
            return statistics.median(seconds(replay) for _ in range(self.repeats))
        event: Callable[..., Any] = torch.cuda.Event
        spans = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(self.repeats)]
        for begin, end in spans:
            self._cache.fill_(1)
            begin.record()
            replay()
            end.record()
        torch.cuda.synchronize(self.device)
        taken: list[float] = [begin.elapsed_time(end) / 1000 for begin, end in spans]
        return statistics.median(taken)


def speeds(
    device: torch.device,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    n_events: int = N_EVENTS,
    repeats: int = 30,
    backend: Backend = "auto",
) -> Iterator[Speed]:
    """Measure every job at every shape and dtype. A job that raises an error does not stop the others."""
    clock = Clock(device, repeats)
    for n, c in shapes:
        for dtype in DTYPES:
            values = (3 * torch.randn(n, c, generator=seeded(device), device=device)).to(dtype)
            target = torch.randint(c, (n,), generator=seeded(device), device=device)
            jobs = [
                *row_jobs(values, target, backend),
                *collection_jobs(values, target),
                *function_jobs(values, target),
            ]
            yield from measured(clock, jobs, values, f"{n:,} x {c:,}", label_of(dtype))
    buffer = torch.zeros(4 * n_events, dtype=torch.uint8, device=device)
    yield from measured(clock, event_jobs(device, n_events, backend), buffer, f"{n_events:,}", "float32")


def seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def measured(clock: Clock, jobs: list[Job], copied: Tensor, shape: str, dtype: str) -> Iterator[Speed]:
    """Measure a copy of a tensor, then the jobs relative to the copy."""
    other = torch.empty_like(copied)
    copy_seconds = clock.seconds(lambda: other.copy_(copied))
    per_second = 2 * copied.nbytes / copy_seconds
    yield Speed("copy", shape, dtype, copy_seconds, share=1.0)
    row_seconds = torch.nan
    for job in jobs:
        try:
            taken = clock.seconds(job.call, job.eager)
        except Exception as error:
            how = f"{type(error).__name__}: {error}"[:200]
            yield Speed(job.name, shape, dtype, seconds=None, goal=job.goal, how=how)
            continue
        row_seconds = taken if job.name == ROW_OP else row_seconds
        share = None if job.n_bytes is None else job.n_bytes / taken / per_second
        ratio = taken / row_seconds if job.to_rows else None
        yield Speed(job.name, shape, dtype, taken, share, ratio, job.goal, "eager" if job.eager else "graph")


def bytes_of(*tensors: Tensor) -> int:
    return sum(x.nbytes for x in tensors)


def row_jobs(values: Tensor, target: Tensor, backend: Backend) -> list[Job]:
    """Return jobs for the row operation and the class-wise bins: forward, and with their gradients."""
    options: dict[str, Any] = {"from_logits": True, "backend": backend}
    found = rows(values, target, **options)
    leaf = values.detach().requires_grad_()
    upstream = [torch.ones_like(x) for x in found[:4]]
    slope = torch.ones(values.shape[-1], 3, N_BINS, dtype=torch.float64, device=values.device)  # shape of the sums

    def bins(x: Tensor) -> Tensor:
        return class_bins(x, target, None, found, n_bins=N_BINS, **options)

    def rows_gradient() -> object:
        return torch.autograd.grad([*rows(leaf, target, **options)[:4]], leaf, upstream)

    # The backward pass reads the row, its scores and their gradients again, and writes the gradient.
    both_bytes = 3 * bytes_of(values) + 2 * bytes_of(target, *found) + bytes_of(*upstream)
    bins_bytes = bytes_of(values, target, found.top, found.confidence, slope)
    return [
        Job(ROW_OP, lambda: rows(values, target, **options), bytes_of(values, target, *found), ROWS_GOAL),
        Job("row op, forward and backward", rows_gradient, both_bytes),
        Job("class bins", lambda: bins(values), bins_bytes, CLASSES_GOAL),
        Job(
            "class bins, forward and backward",
            lambda: torch.autograd.grad(bins(leaf), leaf, slope),
            2 * bins_bytes + bytes_of(values, slope),
        ),
    ]


def collection_jobs(values: Tensor, target: Tensor) -> list[Job]:
    """Return jobs for updates of a whole collection, which includes the row operation."""
    jobs = []
    for name, classwise, goal in (
        ("collection of 8", False, COLLECTION_GOAL),
        ("collection of 8 and class-wise", True, None),
    ):
        metrics = collection(values.device, values.shape[-1], classwise=classwise)
        update = partial(metrics.update, values, target)
        jobs += [Job(name, update, goal=None if eager else goal, eager=eager, to_rows=True) for eager in (False, True)]
    return jobs


def function_jobs(values: Tensor, target: Tensor) -> list[Job]:
    """Return jobs for `torchcalib.functional.ece` and its alternatives in torch and torchmetrics."""
    options: dict[str, Any] = {"n_bins": N_BINS, "validate_args": False}
    ece = partial(F.ece, values, target, task="multiclass", from_logits=True, **options)
    theirs = partial(peers.torchmetrics_ece, values, target, **options)
    return [
        Job("eager torch: scores, top and bins", lambda: scores_and_bins(values, target), eager=True),
        Job("torch.nn.functional.cross_entropy", lambda: cross_entropy(values, target)),
        Job("torchmetrics: multiclass_calibration_error", theirs, eager=True),
        Job("torchcalib.functional.ece", ece, eager=True),
    ]


def event_jobs(device: torch.device, n: int, backend: Backend) -> list[Job]:
    confidence = torch.rand(n, device=device)
    outcome = torch.rand(n, device=device) < confidence
    weights = torch.rand(n, device=device, dtype=torch.float64)
    options: dict[str, Any] = {"n_bins": N_BINS, "backend": backend}
    given, weighted = (confidence, outcome), (confidence, outcome, weights)
    return [
        Job("event bins", lambda: event_bins(*given, **options), bytes_of(*given)),
        Job("event bins, weighted", lambda: event_bins(*weighted, **options), bytes_of(*weighted)),
    ]


def scores_and_bins(values: Tensor, target: Tensor) -> list[Tensor]:
    """Compute the row operation and the bins of the top label in plain eager torch."""
    log_q = values.float().log_softmax(-1)
    q = log_q.exp()
    confidence, top = q.max(-1)
    of_label = log_q.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    squared_error = q.square().sum(-1) - 2 * of_label.exp() + 1
    neg_entropy = (q * log_q).sum(-1)
    index = (confidence * N_BINS).long().clamp(max=N_BINS - 1)
    hit = (top == target).float()
    zero = torch.zeros_like(confidence[:N_BINS])
    sums = [zero.index_add(0, index, x) for x in (torch.ones_like(hit), confidence, hit)]
    return [of_label, squared_error, neg_entropy, *sums]
