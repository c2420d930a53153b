"""How fast the ops are: bytes per second as a share of those of a device-to-device copy, measured in the same run.

Bytes are counted as the least that must move: every input read once, every output written once; a copy of n bytes
moves 2 n. Times are medians over repeats between which the cache is overwritten, of the work as a CUDA graph replays
it, so that they are the device's own; "eager" times have the host's launches in them. Goals are those of a Hopper GPU.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks import peers
from benchmarks.cuda.check import label_of
from benchmarks.cuda.conduct import captured, collection
from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.softmax_stats import Rows, rows

SHAPES = ((50_000, 1000), (8192, 128_256))
N_EVENTS = 10**7
DTYPES = (torch.float32, torch.bfloat16)
ROWS_GOAL, CLASSES_GOAL, COLLECTION_GOAL = 0.85, 0.60, 1.15
N_BINS = 15


@dataclass(frozen=True)
class Speed:
    """One measured job.

    Attributes:
        job: what was done.
        shape: over which input.
        dtype: of the input.
        seconds: median of one run; "graph" in `how` says that a graph was replayed.
        share: of the bytes per second of a copy; None where bytes say nothing.
        ratio: of the time of the row op forward, where there is a goal for it.
        goal: least share, or largest ratio; None where there is none.
        how: "graph", "eager", or why there is no time.
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
        """Whether the goal was met; None without one."""
        if self.goal is None or self.seconds is None:
            return None
        if self.ratio is not None:
            return self.ratio <= self.goal
        return self.share is not None and self.share >= self.goal


class Clock:
    """Median seconds of a call, over repeats between which the cache of the device is overwritten."""

    def __init__(self, device: torch.device, repeats: int = 30) -> None:
        self.device, self.repeats = device, repeats
        size = 4 * torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**16
        self._cache = torch.empty(max(size, 2**16), dtype=torch.uint8, device=device)

    def eager(self, call: Callable[[], object]) -> float:
        """Time calls as they are."""
        for _ in range(3):
            call()
        if self.device.type != "cuda":
            return self._on_cpu(call)
        event: Callable[..., Any] = torch.cuda.Event
        spans = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(self.repeats)]
        for begin, end in spans:
            self._cache.fill_(1)
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        milliseconds: list[float] = [begin.elapsed_time(end) for begin, end in spans]
        return statistics.median(milliseconds) / 1000

    def graph(self, call: Callable[[], object]) -> float:
        """Time replays of a call."""
        call()  # compiles
        return self.eager(captured(call, self.device))

    def _on_cpu(self, call: Callable[[], object]) -> float:
        seconds = []
        for _ in range(self.repeats):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)


def speeds(
    device: torch.device,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    n_events: int = N_EVENTS,
    repeats: int = 30,
    backend: Backend = "auto",
) -> Iterator[Speed]:
    """Measure every job at every shape and dtype. What fails is a line that says why, and no reason to stop."""
    clock = Clock(device, repeats)
    for n, c in shapes:
        for dtype in DTYPES:
            yield from of_shape(clock, n, c, dtype, backend)
    yield from of_events(clock, n_events, backend)


def bytes_of(*tensors: Tensor) -> int:
    """Return how many bytes tensors hold."""
    return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class Bench:
    """Rows to be read, and what a job over them is held against: the bytes per second of a copy of them."""

    clock: Clock
    values: Tensor
    target: Tensor
    backend: Backend
    per_second: float

    @property
    def where(self) -> tuple[str, str]:
        """Shape and dtype, in words."""
        n, c = self.values.shape
        return f"{n:,} x {c:,}", label_of(self.values.dtype)

    def measured(
        self,
        job: str,
        call: Callable[[], object],
        n_bytes: int | None = None,
        goal: float | None = None,
        *,
        eager: bool = False,
    ) -> Speed:
        """Time a call that moves so many bytes."""
        try:
            seconds = (self.clock.eager if eager else self.clock.graph)(call)
        except Exception as error:
            return Speed(job, *self.where, seconds=None, goal=goal, how=f"{type(error).__name__}: {error}"[:200])
        share = None if n_bytes is None else n_bytes / seconds / self.per_second
        return Speed(job, *self.where, seconds, share, goal=goal, how="eager" if eager else "graph")


def of_shape(clock: Clock, n: int, c: int, dtype: torch.dtype, backend: Backend) -> Iterator[Speed]:
    """Measure everything that reads rows."""
    generator = torch.Generator(clock.device).manual_seed(0)
    values = (3 * torch.randn(n, c, generator=generator, device=clock.device)).to(dtype)
    target = torch.randint(c, (n,), generator=generator, device=clock.device)
    other = torch.empty_like(values)
    copy_seconds = clock.graph(lambda: other.copy_(values))
    bench = Bench(clock, values, target, backend, 2 * bytes_of(values) / copy_seconds)
    yield Speed("copy", *bench.where, copy_seconds, share=1.0)
    with torch.no_grad():
        found = rows(values, target, from_logits=True, backend=backend)
    of_rows, *others = of_row_op(bench, found)
    yield of_rows
    yield from others
    yield from of_class_bins(bench, found)
    yield from of_collections(bench, of_rows)
    yield from of_functions(bench)


def of_row_op(bench: Bench, found: Rows) -> Iterator[Speed]:
    """Measure the row op, which gives `found`: forward, and with its gradient."""
    values, target = bench.values, bench.target
    options: dict[str, Any] = {"from_logits": True, "backend": bench.backend}

    def forward() -> object:
        with torch.no_grad():
            return rows(values, target, **options)

    yield bench.measured("row op", forward, bytes_of(values, target, *found), ROWS_GOAL)
    leaf = values.detach().requires_grad_()
    upstream = [torch.ones_like(x) for x in found[:4]]

    def both() -> object:
        return torch.autograd.grad([*rows(leaf, target, **options)[:4]], leaf, upstream)

    # The row, its scores and their gradient are read once more, and the gradient is written.
    both_bytes = 3 * bytes_of(values) + 2 * bytes_of(target, *found) + bytes_of(*upstream)
    yield bench.measured("row op, forward and backward", both, both_bytes)


def of_class_bins(bench: Bench, found: Rows) -> Iterator[Speed]:
    """Measure sums over bins of all classes: forward, and with their gradient."""
    values, target = bench.values, bench.target
    options: dict[str, Any] = {"from_logits": True, "n_bins": N_BINS, "backend": bench.backend}

    def forward() -> object:
        with torch.no_grad():
            return class_bins(values, target, None, found, **options)

    slope = torch.ones(values.shape[-1], 3, N_BINS, dtype=torch.float64, device=values.device)  # as the sums are
    n_bytes = bytes_of(values, target, found.top, found.confidence, slope)
    yield bench.measured("class bins", forward, n_bytes, CLASSES_GOAL)
    leaf = values.detach().requires_grad_()

    def both() -> object:
        return torch.autograd.grad(class_bins(leaf, target, None, found, **options), leaf, slope)

    yield bench.measured("class bins, forward and backward", both, 2 * n_bytes + bytes_of(values, slope))


def of_collections(bench: Bench, of_rows: Speed) -> Iterator[Speed]:
    """Measure updates of a whole collection, beside the row op that it cannot do without."""
    device, n_classes = bench.clock.device, bench.values.shape[-1]
    for job, metrics, goal in (
        ("collection of 8", collection(device, n_classes), COLLECTION_GOAL),
        ("collection of 8 and class-wise", collection(device, n_classes, classwise=True), None),
    ):
        update = partial(metrics.update, bench.values, bench.target)
        for eager in (False, True):
            speed = bench.measured(job, update, eager=eager)
            ratio = None if speed.seconds is None or of_rows.seconds is None else speed.seconds / of_rows.seconds
            yield replace(speed, ratio=ratio, goal=None if eager else goal)
        metrics.reset()


def of_functions(bench: Bench) -> Iterator[Speed]:
    """Measure what one would write or call instead, and our function beside it."""
    values, target = bench.values, bench.target
    yield bench.measured("eager torch: scores, top and bins", lambda: by_tensors(values, target), eager=True)
    yield bench.measured("torch.nn.functional.cross_entropy", lambda: torch.nn.functional.cross_entropy(values, target))
    options: dict[str, Any] = {"n_bins": N_BINS, "validate_args": False}
    theirs = "torchmetrics: multiclass_calibration_error"
    yield bench.measured(theirs, lambda: peers.torchmetrics_ece(values, target, **options), eager=True)
    options |= {"task": "multiclass", "from_logits": True}
    yield bench.measured("torchcalib.ece", lambda: tc.ece(values, target, **options), eager=True)


def of_events(clock: Clock, n: int, backend: Backend) -> Iterator[Speed]:
    """Measure sums over bins of events."""
    device = clock.device
    confidence = torch.rand(n, device=device)
    outcome = torch.rand(n, device=device) < confidence
    weights = torch.rand(n, device=device, dtype=torch.float64)
    other = torch.empty(4 * n, dtype=torch.uint8, device=device)
    source = torch.zeros_like(other)
    per_second = 2 * bytes_of(other) / clock.graph(lambda: other.copy_(source))
    for job, columns in (
        ("event bins", (confidence, outcome)),
        ("event bins, weighted", (confidence, outcome, weights)),
    ):
        seconds = clock.graph(lambda c=columns: event_bins(*c, n_bins=N_BINS, backend=backend))  # type: ignore[misc]
        yield Speed(job, f"{n:,}", "float32", seconds, bytes_of(*columns) / seconds / per_second)


def by_tensors(values: Tensor, target: Tensor) -> list[Tensor]:
    """Return what the row op and the bins of the top label give, as one writes it in eager torch."""
    log_q = values.float().log_softmax(-1)
    q = log_q.exp()
    confidence, top = q.max(-1)
    of_label = log_q.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    squared_error = q.square().sum(-1) - 2 * of_label.exp() + 1
    neg_entropy = (q * log_q).sum(-1)
    index = (confidence * N_BINS).long().clamp(max=N_BINS - 1)
    hit = (top == target).float()
    sums = [
        torch.zeros_like(confidence[:N_BINS]).index_add_(0, index, x) for x in (torch.ones_like(hit), confidence, hit)
    ]
    return [of_label, squared_error, neg_entropy, *sums]
