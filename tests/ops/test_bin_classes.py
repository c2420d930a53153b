"""Class-wise bin sums compared with their float64 formula: values, gradients, layouts and threads."""

import itertools
import math

import pytest
import torch
from helpers.kernels import (
    BACKENDS,
    F64,
    NUMBA,
    SUMS_OF_FLOAT32,
    assert_same_on_any_number_of_threads,
    of_backends,
    random_class_rows,
)

from torchcalib.ops.bin_sums import class_bins
from torchcalib.ops.bin_sums.formula import Bins, class_formula
from torchcalib.ops.softmax_stats import rows

INF, NAN = math.inf, math.nan


def of_classes(values, target, weights, from_logits, n_bins=15, right=False, backend="auto", **more):
    found = rows(values, target, from_logits=from_logits, backend=backend)
    options = {"from_logits": from_logits, "n_bins": n_bins, "right": right, "backend": backend, **more}
    return class_bins(values, target, weights, found, **options)


# Rounding of the gradient, relative to the probability and to the largest gradient of a sum
ROUNDING = {torch.float32: 6e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7, F64: 1e-12}
SHAPES = [(1, 5, False, True), (2, 1, True, False), (3, 10, True, True), (10, 15, False, False), (10, 15, True, True),
          (1001, 15, False, True), (1030, 100, True, False), (1030, 100, False, True)]  # fmt: skip
CASES = [(b, torch.float32, logits, *shape) for b in BACKENDS for logits in (True, False) for shape in SHAPES]
CASES += [("auto", dtype, dtype != torch.bfloat16, 200, 15, False, True) for dtype in ROUNDING]
CASES += [("auto", F64, False, 200, 15, False, True)]


@pytest.mark.parametrize(
    ("backend", "dtype", "from_logits", "n_classes", "n_bins", "right", "weighted"), CASES, ids=str
)
def test_class_bins_and_their_gradient_equal_the_formula(
    backend, dtype, from_logits, n_classes, n_bins, right, weighted
):
    values, target, weights = random_class_rows(60, n_classes, from_logits, dtype, n_bins=n_bins)
    weights = weights if weighted else None
    leaf, wide = values.clone().requires_grad_(), values.double().requires_grad_()
    found = of_classes(leaf, target, weights, from_logits, n_bins, right, backend)
    expected = class_formula(wide, target, weights, None, None, from_logits, Bins(n_bins, right, "labels", True))
    torch.testing.assert_close(found, expected[..., :3, :], **SUMS_OF_FLOAT32)
    if not weighted:
        assert torch.equal(found[..., [0, 2], :], expected[..., [0, 2], :])  # counts and positives are exact
    for copies in (True, False):
        sums = of_classes(leaf, target, weights, from_logits, n_bins, right, backend, noise=True, copies=copies)
        # The loops with and without noise are compiled separately, and may fuse different products and sums.
        torch.testing.assert_close(sums[..., :3, :], found, rtol=4e-6, atol=1e-12)
        options = Bins(n_bins, right, "labels", copies)
        all_sums = class_formula(wide, target, weights, None, None, from_logits, options)
        # q (1 - q) has an error of at most 2e-6 q, (y - q)^2 twice that, and no weight exceeds 1.
        bound = torch.tensor([2e-6, 2e-6, 0, 4e-6], dtype=F64).unsqueeze(-1) * expected[..., 1:2, :] + 1e-12
        assert ((sums - all_sums)[..., 3:, :].abs() <= bound).all()
    # The gradient for logits is q (g - sum of q g). q has a relative error of 2e-6, the sum 2e-6 times the largest g.
    # The gradient for probabilities is g, rounded. In the sum of (y - q)^2, g is 2 (q - y) times that of the sum.
    q = wide.detach().softmax(-1) if from_logits else 1
    least = 6e-8 if dtype == torch.float16 else 1e-12
    for own, whole in ((found, expected[..., :3, :]), (sums, all_sums)):
        upstream = torch.randn(own.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
        (slope,) = torch.autograd.grad((own * upstream).sum(), leaf)
        (exact,) = torch.autograd.grad((whole * upstream).sum(), wide, retain_graph=True)
        assert slope.dtype == dtype
        assert ((slope.double() - exact).abs() <= ROUNDING[dtype] * q * 3 * upstream.abs().max() + least).all()


@of_backends
def test_class_bins_have_no_cancellation(backend):
    """An empty first bin must be exactly 0, and small weights must not be lost beside large weights."""
    values = torch.tensor([[0.4, 0.6], [0.55, 0.45], [0.7, 0.3]])
    for w in (None, torch.tensor([0.1, 0.2, 0.3], dtype=F64)):
        found = of_classes(values, torch.tensor([0, 1, 0]), w, False, n_bins=5, backend=backend)
        assert torch.equal(found[..., 0], torch.zeros(2, 3, dtype=F64))
    values, weights = torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1e-10, 1e10], dtype=F64)
    found = of_classes(values, torch.tensor([1, 0]), weights, False, 3, backend=backend)
    assert found[:, 0].tolist() == [[1e-10, 0, 1e10], [1e10, 0, 1e-10]]
    # The edge 1/C for C classes and C bins belongs to the second bin, but a float32 1/C may round below it.
    for n_classes in range(2, 60) if backend in NUMBA else ():
        found = of_classes(torch.zeros(3, n_classes), torch.zeros(3).long(), None, True, n_classes, backend=backend)
        assert found[:, 0, 1].tolist() == [3] * n_classes


@of_backends
def test_noise_of_one_bin_has_no_cancellation(backend):
    values = torch.tensor([[0.999998, 2e-6]]).expand(20_000, 2)
    found = of_classes(values, torch.zeros(20_000, dtype=torch.int64), None, False, 1, False, backend, noise=True)
    p = values[0].double()
    torch.testing.assert_close(found[:, 3, 0], 20_000 * p * (1 - p), rtol=1e-5, atol=0)


@of_backends
def test_class_bins_with_infinite_logits_nan_and_invalid_labels(backend):
    values = torch.tensor([[INF, 0, INF, 0], [0, 0, -INF, -INF], [NAN, 0, 0, 0], [0, 0, 0, 9]])
    target = torch.tensor([0, 7, -1, 3])
    weights = torch.tensor([1.0, 2, 0, 1], dtype=F64)
    leaf = values.clone().requires_grad_()
    found = of_classes(leaf, target, weights, True, n_bins=4, backend=backend)
    expected = torch.zeros(4, 3, 4, dtype=F64)
    q = torch.tensor([[0.5, 0, 0.5, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 9.0]]).double()
    q[3] = q[3].softmax(-1)
    for row, k in itertools.product((0, 1, 3), range(4)):
        b = min(int(4 * q[row, k]), 3)
        expected[k, 0, b] += weights[row]
        expected[k, 1, b] += weights[row] * q[row, k]
    expected[0, 2, 2] = 1
    expected[3, 2, 3] = 1
    torch.testing.assert_close(found, expected, **SUMS_OF_FLOAT32)
    found[:, 1].square().sum().backward()
    assert torch.equal(leaf.grad[[0, 2]], torch.zeros(2, 4))
    assert leaf.grad.isfinite().all()
    has_invalid_rows = of_classes(values, target, None, True, n_bins=4, backend=backend, noise=True)
    assert has_invalid_rows[:, [1, 3, 4], 0].isnan().all()
    assert has_invalid_rows[:, 0].sum(-1).tolist() == [4] * 4


@of_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_class_sums_are_the_same_in_every_layout_and_on_any_number_of_threads(backend, dtype):
    values, target, weights = random_class_rows(900, 1000, True, dtype, n_bins=15)
    whole = of_classes(values, target, weights, True, backend=backend)
    turned = of_classes(values.T.contiguous().T, target, weights, True, backend=backend)
    torch.testing.assert_close(turned, whole, **SUMS_OF_FLOAT32)

    def read():
        leaf = values.clone().requires_grad_()
        found = of_classes(leaf, target, weights, True, backend=backend)
        found[:, 1].sum(0)[3].backward()
        return found.detach(), leaf.grad

    found, grad = assert_same_on_any_number_of_threads(read)
    assert torch.equal(found, whole)
    # The gradient of a row sums to 0 up to the rounding of each entry to 8 or 24 bits.
    assert (grad.double().sum(-1).abs() <= 2**-7 * grad.double().abs().sum(-1)).all()
