"""Sums over the bins of every class against sums over whole tensors: values, gradients, every run alike."""

import itertools
import math

import pytest
import torch
from helpers.kernels import (
    BACKENDS,
    F64,
    NO_WARNING,
    NUMBA,
    SUMS_OF_FLOAT32,
    assert_compiled_and_mapped,
    class_case,
    threads_of_torch,
)

from torchcalib.kernels.bin_op import class_bins, class_sums, class_sums_backward, event_bins
from torchcalib.kernels.bin_sums import bin_index, bin_sums
from torchcalib.kernels.row_op import rows

INF, NAN = math.inf, math.nan
KERNELS = [*BACKENDS, "masked"]  # the last runs on devices that must not be waited for


def whole_class_sums(values, target, weights, from_logits, n_bins, right, copies=True):
    """The sums over one tensor of all probabilities in float64, a bin index for each."""
    q = values.double().softmax(-1) if from_logits else values.double()
    hit = torch.nn.functional.one_hot(target, q.shape[-1]).double()
    w = torch.ones_like(q) if weights is None else weights.unsqueeze(-1).expand_as(q)
    spread = q.detach() * (1 - q.detach())
    columns = [w, w * q, w * hit, w * spread, (w if copies else w**2) * spread]
    index = bin_index(q, n_bins, right)
    return bin_sums(index.transpose(-1, -2), [x.transpose(-1, -2) for x in columns], n_bins)


def of_classes(values, target, weights, from_logits, n_bins=15, right=False, backend="auto", **more):
    found = rows(values, target, from_logits=from_logits, backend="torch" if backend == "masked" else backend)
    options = {"from_logits": from_logits, "n_bins": n_bins, "right": right, "backend": backend, **more}
    return class_bins(values, target, weights, found, **options)


# Rounding of the gradient, relative to the probability and to the largest gradient of a sum.
ROUNDING = {torch.float32: 6e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7, F64: 1e-12}
SHAPES = [(1, 5, False, True), (2, 1, True, False), (3, 10, True, True), (10, 15, False, False), (10, 15, True, True),
          (1001, 15, False, True), (1030, 100, True, False), (1030, 100, False, True)]  # fmt: skip
CASES = [(b, torch.float32, logits, *shape) for b in KERNELS for logits in (True, False) for shape in SHAPES]
CASES += [("auto", dtype, dtype != torch.bfloat16, 200, 15, False, True) for dtype in ROUNDING]
CASES += [("auto", F64, False, 200, 15, False, True)]


@pytest.mark.parametrize(
    ("backend", "dtype", "from_logits", "n_classes", "n_bins", "right", "weighted"), CASES, ids=str
)
def test_class_bins_and_their_gradient_are_those_of_the_whole_tensor(
    backend, dtype, from_logits, n_classes, n_bins, right, weighted
):
    values, target, weights = class_case(60, n_classes, from_logits, dtype, n_bins=n_bins)
    weights = weights if weighted else None
    leaf, wide = values.clone().requires_grad_(), values.double().requires_grad_()
    found = of_classes(leaf, target, weights, from_logits, n_bins, right, backend)
    expected = whole_class_sums(wide, target, weights, from_logits, n_bins, right)
    torch.testing.assert_close(found, expected[..., :3, :], **SUMS_OF_FLOAT32)
    if not weighted:
        assert torch.equal(found[..., [0, 2], :], expected[..., [0, 2], :])  # counts
    for copies in (True, False):
        sums = of_classes(leaf, target, weights, from_logits, n_bins, right, backend, noise=True, copies=copies)
        # The loops with noise and without are compiled apart, and each may contract other products and sums.
        torch.testing.assert_close(sums[..., :3, :], found, rtol=4e-6, atol=1e-12)
        all_sums = whole_class_sums(wide, target, weights, from_logits, n_bins, right, copies)
        # q (1 - q) is off by at most 2e-6 q, and no weight exceeds 1.
        assert ((sums - all_sums)[..., 3:, :].abs() <= 2e-6 * expected[..., 1:2, :] + 1e-12).all()
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    (found * upstream).sum().backward()
    (expected[..., :3, :] * upstream).sum().backward()
    assert leaf.grad.dtype == dtype
    # q (g - sum of q g): q is off by 2e-6 of itself, and the sum by 2e-6 of the largest g. Else it is g, rounded.
    q = wide.detach().softmax(-1) if from_logits else 1
    least = 6e-8 if dtype == torch.float16 else 1e-12
    bound = ROUNDING[dtype] * q * upstream.abs().max() + least
    assert ((leaf.grad.double() - wide.grad).abs() <= bound).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_difference_of_sums_would_lose_is_exact(backend):
    """An empty first bin, of whose rounding a gap would be made, and small weights there beside large ones."""
    values = torch.tensor([[0.4, 0.6], [0.55, 0.45], [0.7, 0.3]])
    for w in (None, torch.tensor([0.1, 0.2, 0.3], dtype=F64)):
        found = of_classes(values, torch.tensor([0, 1, 0]), w, False, n_bins=5, backend=backend)
        assert torch.equal(found[..., 0], torch.zeros(2, 3, dtype=F64))
    values, weights = torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1e-10, 1e10], dtype=F64)
    found = of_classes(values, torch.tensor([1, 0]), weights, False, 3, backend=backend)
    assert found[:, 0].tolist() == [[1e-10, 0, 1e10], [1e10, 0, 1e-10]]
    # 1/C for C classes and C bins: the second bin, and not the one that float32 would round it into.
    for n_classes in range(2, 60) if backend in NUMBA else ():
        found = of_classes(torch.zeros(3, n_classes), torch.zeros(3).long(), None, True, n_classes, backend=backend)
        assert found[:, 0, 1].tolist() == [3] * n_classes


@pytest.mark.parametrize("backend", KERNELS)
def test_infinite_logits_nan_and_labels_that_are_no_class(backend):
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
    poisoned = of_classes(values, target, None, True, n_bins=4, backend=backend, noise=True)
    assert poisoned[:, [1, 3, 4], 0].isnan().all()
    assert poisoned[:, 0].sum(-1).tolist() == [4] * 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_class_sums_are_the_same_in_every_layout_and_on_any_number_of_threads(backend, dtype):
    values, target, weights = class_case(900, 1000, True, dtype, n_bins=15)
    whole = of_classes(values, target, weights, True, backend=backend)
    turned = of_classes(values.T.contiguous().T, target, weights, True, backend=backend)
    torch.testing.assert_close(turned, whole, **SUMS_OF_FLOAT32)
    for threads in (1, 3):
        with threads_of_torch(threads):
            leaf = values.clone().requires_grad_()
            found = of_classes(leaf, target, weights, True, backend=backend)
            assert torch.equal(found, whole)
            found[:, 1].sum(0)[3].backward()
            # The gradient of a row sums to 0, but that each entry is rounded to 8 bits or to 24.
            assert (leaf.grad.double().sum(-1).abs() <= 2**-7 * leaf.grad.double().abs().sum(-1)).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("from_logits", [True, False])
def test_batches_of_rows_are_loops(backend, from_logits):
    values, target, weights = class_case(30, 6, from_logits, n_bins=5)
    values, target, weights = values.view(2, 3, 5, 6), target.view(2, 3, 5), weights.view(2, 3, 5)
    leaf = values.movedim(-1, 1).contiguous().movedim(1, -1).requires_grad_()
    whole = of_classes(leaf, target, weights, from_logits, 5, backend=backend)
    whole[..., 1, :].square().sum().backward()
    for i, j in itertools.product(range(2), range(3)):
        part = values[i, j].clone().requires_grad_()
        found = of_classes(part, target[i, j], weights[i, j], from_logits, 5, backend=backend)
        torch.testing.assert_close(found, whole[i, j], **SUMS_OF_FLOAT32)
        found[..., 1, :].square().sum().backward()
        torch.testing.assert_close(part.grad, leaf.grad[i, j], rtol=1e-5, atol=1e-5)
    empty = of_classes(values[:, :, :0], target[:, :, :0], None, from_logits, 5, backend=backend)
    assert torch.equal(empty, torch.zeros(2, 3, 6, 3, 5, dtype=F64))


@NO_WARNING
@pytest.mark.parametrize("from_logits", [True, False])
def test_gradients_of_any_kind_in_which_noise_is_a_constant(from_logits):
    values, target, weights = class_case(5, 4, from_logits, F64)
    leaves = [values.requires_grad_(), (weights + 0.1).requires_grad_()]

    def take(x, w):
        return of_classes(x, target, w, from_logits, 3)

    assert torch.autograd.gradcheck(take, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(take, leaves)

    def value(x, noise=False):
        return of_classes(x, target, None, from_logits, 3, noise=noise)[..., 1:, :].square().sum()

    x = values.detach().requires_grad_()
    value(x).backward()
    for noise in (False, True):
        for how in (torch.func.grad, torch.func.jacfwd):
            torch.testing.assert_close(how(value)(values.detach(), noise), x.grad)
    slope = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    for backend in BACKENDS:
        gradients = []
        for n_sums in (5, 3):  # with the two of noise, and without
            given = (values.detach().float().requires_grad_(), leaves[1])
            sums = of_classes(given[0], target, leaves[1], from_logits, 3, backend=backend, noise=n_sums == 5)
            gradients.append(torch.autograd.grad((sums * slope[:, :n_sums]).sum(), given))
        torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


def test_rows_of_weight_0_are_in_no_derivative():
    values, target, weights = class_case(6, 4, True, F64)
    values[0] = NAN
    leaf = values.requires_grad_()
    of_values, of_weights = torch.autograd.grad(
        of_classes(leaf, target, weights.requires_grad_(), True, 3).square().sum(), (leaf, weights), create_graph=True
    )
    (second,) = torch.autograd.grad(of_values.square().sum() + of_weights.square().sum(), leaf)
    for derivative in (of_values, of_weights, second):
        assert derivative.isfinite().all()
        assert (derivative[0] == 0).all()


def test_shapes_without_numbers_have_sums_without_numbers():
    """On the meta device there is nothing to be waited for."""
    values, target, weights = (x.to("meta") for x in class_case(6, 4, True))
    found = rows(values, target, from_logits=True)
    assert class_bins(values, target, weights, found, from_logits=True, n_bins=5).shape == (4, 3, 5)
    assert event_bins(found.confidence, found.top == target, weights, n_bins=5).shape == (3, 5)


# torch.compile, vmap, registration.


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_and_mapped_it_is_the_same(backend):
    values, target, weights = class_case(12, 7, True, n_bins=5)

    def value(x):
        found = rows(x, target, from_logits=True)
        by_class = class_bins(x, target, weights, found, from_logits=True, n_bins=5)
        top = event_bins(found.confidence, found.top == target, weights, found.neg_entropy, n_bins=5)
        return by_class[..., 1, :].square().sum((-1, -2)) + top.square().sum((-1, -2))

    # Squares of sums of float32 probabilities.
    assert_compiled_and_mapped(value, values, backend, rtol=1e-5, atol=1e-4)


def test_registered_as_torch_wants_an_operation():
    values, target, weights = class_case(12, 7, True)
    found = rows(values, target, from_logits=True)
    kept = (found.top, found.confidence)
    for w, noise, copies in ((None, False, True), (weights, False, True), (weights, True, False)):
        given = values.clone().requires_grad_(), target, w, *kept
        torch.library.opcheck(class_sums.registered, (*given, True, 5, False, noise, copies, "auto"))
        given = values, target, w, *kept, torch.ones(7, 5, dtype=F64)
        torch.library.opcheck(class_sums_backward.registered, (*given, True, False, "auto"))
