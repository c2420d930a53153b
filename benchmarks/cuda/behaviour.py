"""Behaviour of operations and collections on a device: synchronisation, CUDA graphs, reproducibility."""

import warnings
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

MEMBERS: tuple[Callable[..., Any], ...] = (
    tc.NLL,
    tc.BrierScore,
    tc.ECD,
    tc.Accuracy,
    tc.ECE,
    tc.ESCE,
    tc.MCE,
    tc.RMSCE,
)
N_BINS = 15


@contextmanager
def forbid_synchronisation(device: torch.device) -> Iterator[None]:
    """Raise an error when the host synchronises with a CUDA device; do nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Raise an error in every torch operation that is not deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def captured(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays `step` as a CUDA graph. On the CPU return `step` itself.

    Capturing runs nothing. An earlier call must have compiled all kernels.
    """
    if device.type != "cuda":
        return step
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = step()

    def replay(kept: object = held) -> object:  # the results are in the memory of the graph
        graph.replay()
        return kept

    return replay


def collection(device: torch.device, n_classes: int, *, classwise: bool = False) -> tc.CalibrationCollection:
    """Return eight top-label metrics of logits, and with `classwise` the class-wise ECE."""
    options: dict[str, Any] = {"task": "multiclass", "num_classes": n_classes, "from_logits": True}
    members = {member.__name__: member(**options) for member in MEMBERS}
    if classwise:
        members["ClasswiseECE"] = tc.ECE(**options, mode="classwise")
    return tc.CalibrationCollection(members).to(device)


def check_behaviour(
    device: torch.device, shapes: tuple[tuple[int, int], ...], backend: Backend = "auto"
) -> Iterator[Check]:
    for n, c in shapes:
        ops, collections = f"ops {n} x {c}", f"collection {n} x {c}"
        yield from guarded(ops, "float32", partial(check_ops, ops, device, n, c, backend))
        yield from guarded(collections, "float32", partial(check_collection, collections, device, n, c))


def all_ops(values: Tensor, target: Tensor, weights: Tensor, backend: Backend) -> list[Tensor]:
    """Return the results of all operations, and the gradient of their sum."""
    leaf = values.detach().requires_grad_()
    found = rows(leaf, target, from_logits=True, backend=backend)
    classes = class_bins(leaf, target, weights, found, from_logits=True, n_bins=N_BINS, backend=backend)
    options: dict[str, Any] = {"n_bins": N_BINS, "backend": backend}
    events = event_bins(found.confidence, found.top == target, weights, found.neg_entropy, **options)
    whole = found.log_prob.sum() + found.squared_error.sum() + classes[:, 1].square().sum() + events.square().sum()
    (gradient,) = torch.autograd.grad(whole, leaf)
    return [x.detach() for x in (*found, classes, events, gradient)]


def differing(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return float(sum(int(((a != b) & ~(a.isnan() & b.isnan())).sum()) for a, b in pairs))


def check_ops(name: str, device: torch.device, n: int, c: int, backend: Backend) -> Iterator[Check]:
    """Check that all operations, forward and backward, do not synchronise and have the same bits in runs and graphs."""
    values, target = predictions(device, torch.float32, n, c, True)
    weights = torch.ones(n, dtype=torch.float64, device=device)
    run = partial(all_ops, values, target, weights, backend)
    first = run()
    with forbid_synchronisation(device):
        second = run()
    yield Check(name, "float32", "no host sync, same bits", differing(second, first), 0)
    with deterministic_algorithms():
        yield Check(name, "float32", "deterministic algorithms", differing(run(), first), 0)
    found = captured(run, device)()
    assert isinstance(found, list)
    yield Check(name, "float32", "replayed in a graph", differing(found, first), 0)


def check_collection(name: str, device: torch.device, n: int, c: int) -> Iterator[Check]:
    """Check that updates of a collection do not synchronise, are reproducible, and can be captured in a graph."""
    drawn = [predictions(device, torch.float32, n, c, True, seed) for seed in range(3)]
    first, *others = [(values.nan_to_num(posinf=50.0, neginf=-50.0), target) for values, target in drawn]

    def states() -> list[Tensor]:
        metrics = collection(device, c, classwise=True)
        metrics.update(*first)  # compiles kernels
        with forbid_synchronisation(device):
            metrics.update(*others[0])
        with deterministic_algorithms():
            metrics.update(*others[1])
        return [metrics[str(member)].state for member in metrics]

    yield Check(name, "float32", "same bits in two runs", differing(states(), states()), 0)
    metrics, expected = (collection(device, c, classwise=True) for _ in range(2))
    metrics.update(*first)  # run code that may run only once before the capture
    metrics.reset()
    preds, target = (x.clone() for x in first)
    replay = captured(lambda: metrics.update(preds, target), device)
    for batch in others:
        preds.copy_(batch[0])
        target.copy_(batch[1])
        replay()
        expected.update(*batch)
    values = metrics.compute()
    for member, value in expected.compute().items():
        yield Check(name, "float32", f"{member} after replays", relative_error(values[member], value), 1e-12)
