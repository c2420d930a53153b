"""Implementations, random events and rows, and numbers of threads for tests of kernels."""

import importlib.util

import pytest
import torch

from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.softmax_stats import rows

NUMBA = ["numba"] if importlib.util.find_spec("numba") else []
BACKENDS = ["torch", *NUMBA]
of_backends = pytest.mark.parametrize("backend", BACKENDS)
of_either_input = pytest.mark.parametrize("from_logits", [True, False])
F64 = torch.float64
# `rows` documents a relative error of 2e-6 for float32 probabilities. Sums of positive terms have the same error.
SUMS_OF_FLOAT32 = {"rtol": 2e-6, "atol": 1e-12}


def assert_same_on_any_number_of_threads(read):
    """Return the tensors of `read()`, and check that they have the same bits on 1, 2, 3 and again 3 threads."""
    before, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 3):
            torch.set_num_threads(number)
            found.append(read())
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    return found[0]


def events(n, dtype=torch.float32, seed=0):
    """Return confidences, outcomes, weights (every fifth is 0) and scores."""
    generator = torch.Generator().manual_seed(seed)
    confidence = torch.rand(n, generator=generator, dtype=F64).to(dtype)
    outcome = torch.rand(n, generator=generator) < confidence
    weights = torch.rand(n, generator=generator, dtype=F64)
    weights[::5] = 0
    return confidence, outcome, weights, torch.randn(n, generator=generator, dtype=F64)


def random_class_rows(n, n_classes, from_logits, dtype=torch.float32, n_bins=1):
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


def assert_empty_input_gives_zero_sums(shape, backend, device="cpu"):
    """Check that sums over no events and no rows are 0, and that gradients have the shape of the input."""
    nothing = torch.zeros(shape, device=device)
    leaf = torch.zeros(*shape, 5, device=device, requires_grad=True)
    of_rows = rows(leaf, nothing.long(), from_logits=True, backend=backend)
    assert all(x.shape == shape for x in of_rows)
    options = {"n_bins": 4, "backend": backend}
    found = event_bins(nothing, nothing, **options)
    of_classes = class_bins(leaf, nothing.long(), None, of_rows, from_logits=True, **options)
    for sums, width in ((found, ()), (of_classes, (5,))):
        assert torch.equal(sums.cpu(), torch.zeros(*shape[:-1], *width, 3, 4, dtype=F64))
    (of_rows.log_prob.sum() + of_classes.sum()).backward()
    assert leaf.grad.shape == leaf.shape
