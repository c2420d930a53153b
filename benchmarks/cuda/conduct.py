"""How ops and collections behave on a device: nothing waits for it, graphs replay, every run gives the same bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchcalib as tc
from benchmarks.cuda.check import Check, guarded, relative_error
from benchmarks.cuda.ops import predictions
from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.dispatch import Backend
from torchcalib.ops.softmax_stats import rows

MEMBERS: tuple[Callable[..., Any], ...] = (tc.NLL, tc.Brier, tc.ECD, tc.Accuracy, tc.ECE, tc.ESCE, tc.MCE, tc.RMSCE)
N_BINS = 15


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """Make every synchronisation of the host with the device an error; there is none with a CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Make every operation of torch that may differ from run to run an error."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a CUDA graph of what `step` does on the device, to be called; on a CPU `step` itself.

    Capturing runs nothing. Kernels must have been compiled by a call before.
    """
    if device.type != "cuda":
        return step
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()

    def replay(kept: object = held) -> object:  # the results live in the memory of the graph
        graph.replay()
        return kept

    return replay


def collection(device: torch.device, n_classes: int, *, classwise: bool = False) -> tc.CalibrationCollection:
    """Return the eight metrics of top-label calibration over logits, and if asked for the error of all classes."""
    options: dict[str, Any] = {"task": "multiclass", "num_classes": n_classes, "from_logits": True}
    members = {member.__name__: member(**options) for member in MEMBERS}
    if classwise:
        members["ClasswiseECE"] = tc.ECE(**options, reduction="classwise")
    return tc.CalibrationCollection(members).to(device)


def conduct(device: torch.device, shapes: tuple[tuple[int, int], ...], backend: Backend = "auto") -> Iterator[Check]:
    """Check ops and collections at every shape `(N, C)`."""
    for n, c in shapes:
        for check in (check_ops, check_update, check_graph):
            name = f"{check.__name__.removeprefix('check_')} {n} x {c}"
            yield from guarded(name, "float32", partial(check, name, device, n, c, backend))


def all_ops(values: Tensor, target: Tensor, weights: Tensor, backend: Backend) -> list[Tensor]:
    """Return what every op gives, and the gradient of all of it together."""
    leaf = values.detach().requires_grad_()
    found = rows(leaf, target, from_logits=True, backend=backend)
    classes = class_bins(leaf, target, weights, found, from_logits=True, n_bins=N_BINS, backend=backend)
    options: dict[str, Any] = {"n_bins": N_BINS, "backend": backend}
    events = event_bins(found.confidence, found.top == target, weights, found.neg_entropy, **options)
    whole = found.log_prob.sum() + found.squared_error.sum() + classes[:, 1].square().sum() + events.square().sum()
    (gradient,) = torch.autograd.grad(whole, leaf)
    return [x.detach() for x in (*found, classes, events, gradient)]


def differing(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return how many elements differ in any bit that counts: NaN is NaN."""
    pairs = zip(found, expected, strict=True)
    return float(sum(int(((a != b) & ~(a.isnan() & b.isnan())).sum()) for a, b in pairs))


def check_ops(name: str, device: torch.device, n: int, c: int, backend: Backend) -> Iterator[Check]:
    """All ops, forward and backward: no wait, deterministic, the same bits in every run and in a graph."""
    values, target = predictions(device, torch.float32, n, c, True)
    weights = torch.ones(n, dtype=torch.float64, device=device)
    run = partial(all_ops, values, target, weights, backend)
    first = run()
    with without_waiting(device):
        second = run()
    yield Check(name, "float32", "no wait; same bits again", differing(second, first), 0)
    with deterministic_algorithms():
        yield Check(name, "float32", "deterministic algorithms", differing(run(), first), 0)
    replay = captured(run, device)
    found = replay()
    assert isinstance(found, list)
    yield Check(name, "float32", "replayed in a graph", differing(found, first), 0)


def batches(device: torch.device, n: int, c: int) -> list[tuple[Tensor, Tensor]]:
    """Return three batches of finite logits."""
    drawn = [predictions(device, torch.float32, n, c, True, seed) for seed in range(3)]
    return [(values.nan_to_num(posinf=50.0, neginf=-50.0), target) for values, target in drawn]


def check_update(name: str, device: torch.device, n: int, c: int, _: Backend) -> Iterator[Check]:
    """A collection, class-wise too: no wait, deterministic, the same bits in two runs."""
    states: list[list[Tensor]] = []
    for _run in range(2):
        metrics = collection(device, c, classwise=True)
        for k, batch in enumerate(batches(device, n, c)):
            if k == 0:
                metrics.update(*batch)
            elif k == 1:
                with without_waiting(device):
                    metrics.update(*batch)
            else:
                with deterministic_algorithms():
                    metrics.update(*batch)
        states.append([metrics[str(name)].state for name in metrics])
    yield Check(name, "float32", "same bits in two runs", differing(*states), 0)


def check_graph(name: str, device: torch.device, n: int, c: int, _: Backend) -> Iterator[Check]:
    """Replays of a captured update add the batches that lie in its buffers."""
    first, *others = batches(device, n, c)
    metrics = collection(device, c, classwise=True)
    metrics.update(*first)  # compiles
    metrics.reset()
    preds, target = (x.clone() for x in first)
    replay = captured(lambda: metrics.update(preds, target), device)
    for batch in others:
        preds.copy_(batch[0])
        target.copy_(batch[1])
        replay()
    expected = collection(device, c, classwise=True)
    for batch in others:
        expected.update(*batch)
    for member, value in expected.compute().items():
        yield Check(name, "float32", f"{member} after replays", relative_error(metrics.compute()[member], value), 1e-12)
