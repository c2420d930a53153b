"""Implementations, random events and rows, and thread counts for tests of kernels."""

import contextlib
import importlib.util

import pytest
import torch

NUMBA = ["numba"] if importlib.util.find_spec("numba") else []
BACKENDS = ["torch", *NUMBA]
NO_WARNING = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in forward mode
F64 = torch.float64
# `rows` documents a relative error of 2e-6 for float32 probabilities, and sums of positive terms keep it.
SUMS_OF_FLOAT32 = {"rtol": 2e-6, "atol": 1e-12}


@contextlib.contextmanager
def threads_of_torch(number):
    """Use `number` threads within the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def events(n, dtype=torch.float32, seed=0):
    """Return confidence, outcome, weights (every fifth is 0), and ECD."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(n, generator=generator, dtype=F64).to(dtype)
    outcome = torch.rand(n, generator=generator) < confidence
    weights = torch.rand(n, generator=generator, dtype=F64)
    weights[::5] = 0
    return confidence, outcome, weights, torch.randn(n, generator=generator, dtype=F64)


def class_case(n, n_classes, from_logits, dtype=torch.float32, n_bins=1):
    """Return rows, labels and weights. No probability is within rounding error of a bin edge."""
    generator = torch.Generator().manual_seed(0)
    values = 3 * torch.randn(4 * n, n_classes, generator=generator)
    values = (values if from_logits else values.softmax(-1)).to(dtype)
    place = n_bins * (values.double().softmax(-1) if from_logits else values.double())
    away = (place - place.round()).abs() > 1e-5 * place
    values = values[(away | (place.round() == 0)).all(-1)][:n] if n_classes > 1 else values[:n]
    assert len(values) == n
    target = torch.randint(0, n_classes, (n,), generator=generator)
    weights = torch.rand(n, generator=generator, dtype=F64)
    weights[::5] = 0
    return values, target, weights


def assert_compiled_and_mapped(value, x, backend, **tolerance):
    """Demand that `value(x)` is the same compiled whole, with its gradient, and mapped over any axis."""
    torch.compiler.reset()
    a, b = (x.clone().requires_grad_() for _ in range(2))
    compiled, expected = torch.compile(value, fullgraph=True, backend=backend)(a), value(b)
    torch.testing.assert_close(compiled, expected, **tolerance)
    for found in (compiled, expected):
        found.sum().backward()
    torch.testing.assert_close(a.grad, b.grad, **tolerance)
    for axis in range(x.dim() + 1):
        mapped = torch.vmap(value, in_dims=axis)(torch.stack((x, x / 2), axis))
        torch.testing.assert_close(mapped, torch.stack((value(x), value(x / 2))), **tolerance)
