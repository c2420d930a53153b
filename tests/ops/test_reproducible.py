"""Operations and collections synchronise nothing, and have the same bits in two runs.

A CUDA graph can capture operations. On the CPU, a replay is another call.
"""

from contextlib import contextmanager

import pytest
import torch
from helpers.emulated_device import recorded_reads
from helpers.kernels import events
from helpers.rows import sample

import torchcalib as tc
from benchmarks.measure import captured
from benchmarks.one_pass import GIVEN, eight_metrics
from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.softmax_stats import rows

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
of_shapes = pytest.mark.parametrize(("n", "n_classes"), [(1000, 10), (300, 1001), (40, 40_000)])
INF = torch.inf


@contextmanager
def deterministic_algorithms():
    """Raise an error in every torch operation that is not deterministic."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def replay_of(step, device):
    return captured(step) if device == "cuda" else step


def edge_cases(n, n_classes, device, seed=0):
    """Return rows with ties, saturation and infinite logits, and labels."""
    values, target = sample(n, n_classes, True, seed=seed)
    values[1::16] = 0.25
    values[2::16, [0, n_classes - 1]] = 20.0
    values[3::16, n_classes // 2] = 700.0
    values[4::16, : n_classes // 2] = -INF
    values[5::16, n_classes - 1] = INF
    return values.to(device), target.to(device)


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@on_devices
@of_shapes
def test_operations_and_their_gradient_are_reproducible(n, n_classes, device):
    values, target = edge_cases(n, n_classes, device)
    weights = torch.ones(n, dtype=torch.float64, device=device)
    leaf = values.requires_grad_()

    def step():
        found = rows(leaf, target, from_logits=True)
        classes = class_bins(leaf, target, weights, found, from_logits=True, n_bins=15)
        sums = event_bins(found.confidence, found.top == target, weights, found.neg_entropy, n_bins=15)
        whole = found.log_prob.sum() + found.squared_error.sum() + classes[:, 1].square().sum() + sums.square().sum()
        return [x.detach() for x in (*found, classes, sums, *torch.autograd.grad(whole, leaf))]

    first = step()
    with recorded_reads() as reads:
        second = step()
    assert reads == []
    assert_same_bits(second, first)
    with deterministic_algorithms():
        assert_same_bits(step(), first)
    assert_same_bits(replay_of(step, device)(), first)


@on_devices
@of_shapes
def test_updates_of_a_collection_are_reproducible(n, n_classes, device):
    first, *others = [edge_cases(n, n_classes, device, seed) for seed in range(3)]

    def collection():
        members = eight_metrics(n_classes) | {"classwise": tc.ECE(num_classes=n_classes, mode="classwise", **GIVEN)}
        return tc.CalibrationCollection(members).to(device)

    def states():
        metrics = collection()
        metrics.update(*first)  # compiles kernels
        with recorded_reads() as reads:
            metrics.update(*others[0])
        assert reads == []
        with deterministic_algorithms():
            metrics.update(*others[1])
        return [metrics[str(name)].state for name in metrics]

    assert_same_bits(states(), states())


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("n", "n_classes"), [(10**6, 2), (10**6, 10), (2**16, 1000), (2**11, 32_000), (500, 128_256)])
def test_large_inputs_on_a_gpu_have_the_values_of_float64(n, n_classes, dtype, from_logits):
    values, target = (x.cuda() for x in sample(n, n_classes, from_logits, dtype))
    leaf, exact = values.clone().requires_grad_(), values.double().requires_grad_()
    found = rows(leaf, target, from_logits=from_logits)
    expected = rows(exact, target, from_logits=from_logits, backend="torch")
    close = torch.testing.assert_close
    close(found[:4], expected[:4], rtol=4e-6, atol=1e-9)
    assert torch.equal(found.top, expected.top)
    (mine,) = torch.autograd.grad(sum(x.sum() for x in found[:4]), leaf)
    (theirs,) = torch.autograd.grad(sum(x.sum() for x in expected[:4]), exact)
    bound = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    theirs = torch.where(theirs.to(dtype).isinf(), theirs.to(dtype).double(), theirs)  # gradients have this dtype
    size = theirs.masked_fill(theirs.isinf(), 0).abs().amax(-1, keepdim=True) + 1
    close(mine.double() / size, theirs / size, rtol=0, atol=bound)


@pytest.mark.cuda
@pytest.mark.parametrize("n", [1, 10**6 + 1])
def test_bins_of_many_events_on_a_gpu_have_the_sums_and_gradients_of_the_cpu(n):
    confidence, outcome, weights, ecd = events(n)
    for columns in ((outcome,), (outcome, weights), (outcome.double(), weights, ecd)):
        results = []
        for device in ("cpu", "cuda"):
            given = [x.to(device).requires_grad_(x.is_floating_point()) for x in (confidence, *columns)]
            sums = event_bins(*given, n_bins=15)
            leaves = [x for x in given if x.requires_grad]
            results.append([x.cpu() for x in (sums.detach(), *torch.autograd.grad(sums.square().mean(), leaves))])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-9)
