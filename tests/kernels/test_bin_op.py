"""The bin op against slow loops and against sums over whole tensors: values, gradients, every run alike."""

import itertools
import math

import pytest
import torch
from helpers.kernels import BACKENDS, F64, NO_WARNING, NUMBA, SUMS_OF_FLOAT32, class_case, events, threads_of_torch

from torchcalib.kernels.bin_op import class_bins, class_sums, class_sums_backward, event_bins, event_sums
from torchcalib.kernels.bin_sums import bin_index, bin_sums
from torchcalib.kernels.row_op import rows

INF, NAN = math.inf, math.nan


def slow(confidence, outcome, weights, ecd, n_bins, right):
    """A loop over Python floats: in every bin the weight, and weighted confidence, outcome and ECD."""
    columns = [[[] for _ in range(n_bins)] for _ in range(4)]
    for c, o, w, d in zip(*(x.tolist() for x in (confidence, outcome, weights, ecd)), strict=True):
        if w == 0:
            continue
        inside = [
            (i / n_bins < c <= (i + 1) / n_bins or c == i == 0) if right else
            (i / n_bins <= c < (i + 1) / n_bins or (c == 1 and i == n_bins - 1))
            for i in range(n_bins)
        ]  # fmt: skip
        for column, value in zip(columns, (1, c, o, d), strict=True):
            column[inside.index(True)].append(w * value)
    return torch.tensor([[math.fsum(cell) for cell in column] for column in columns], dtype=F64)


def whole_class_sums(values, target, weights, from_logits, n_bins, right):
    """The sums over one tensor of all probabilities in float64, a bin index for each."""
    q = values.double().softmax(-1) if from_logits else values.double()
    hit = torch.nn.functional.one_hot(target, q.shape[-1]).double()
    w = torch.ones_like(q) if weights is None else weights.unsqueeze(-1).expand_as(q)
    columns = [(w * x).transpose(-1, -2) for x in (torch.ones_like(q), q, hit)]
    return bin_sums(bin_index(q, n_bins, right).transpose(-1, -2), columns, n_bins)


def of_classes(values, target, weights, from_logits, n_bins=15, right=False, backend="auto"):
    found = rows(values, target, from_logits=from_logits, backend=backend)
    options = {"from_logits": from_logits, "n_bins": n_bins, "right": right, "backend": backend}
    return class_bins(values, target, weights, found, **options)


# Events.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_event_bins_are_those_of_a_slow_loop(backend, dtype):
    """500 terms below 4 are summed in any order: 500 * 500 * 4 * 2^-53 = 1.1e-10 at most, in practice 1e-13."""
    confidence, outcome, weights, ecd = events(500, dtype)
    confidence[:3] = torch.tensor([0.0, 1.0, 0.5])
    ones = torch.ones_like(weights)
    for right, n_bins in itertools.product((False, True), (1, 2, 15, 100)):
        options = {"n_bins": n_bins, "right": right, "backend": backend}
        found = event_bins(confidence, outcome, weights, ecd, **options)
        expected = slow(confidence, outcome, weights, ecd, n_bins, right)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)
        found = event_bins(confidence, outcome, **options)
        expected = slow(confidence, outcome, ones, ecd, n_bins, right)[:3]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_bins", [1, 2, 3, 7, 10, 15, 49, 100, 1000])
def test_every_edge_and_its_neighbours_fall_where_bin_index_says(backend, n_bins):
    edges = torch.arange(n_bins + 1, dtype=F64) / n_bins
    up, down = torch.nextafter(edges, torch.tensor(2.0).double()), torch.nextafter(edges, torch.tensor(-1.0).double())
    beyond = torch.tensor([-0.0, NAN, -1, 2, INF, -INF], dtype=F64)
    values = torch.cat((edges, up, down, beyond, edges.float().double()))
    for right, confidence in itertools.product((False, True), (values, values.float())):
        index = bin_index(confidence, n_bins, right)
        outcome = torch.zeros(len(confidence), 1)  # every value alone, as a series of its own
        found = event_bins(confidence.unsqueeze(-1), outcome, n_bins=n_bins, right=right, backend=backend)
        assert torch.equal(found[:, 0], torch.nn.functional.one_hot(index, n_bins).double())


@pytest.mark.parametrize("backend", BACKENDS)
def test_outcomes_of_any_dtype_and_events_in_any_layout(backend):
    confidence, outcome, weights, ecd = (x.view(2, 3, 10) for x in events(60))
    whole = event_bins(confidence, outcome, weights, ecd, n_bins=5, backend=backend)
    assert whole.shape == (2, 3, 4, 5)
    for dtype in (torch.uint8, torch.int64, torch.float32, F64):
        found = event_bins(confidence, outcome.to(dtype), weights, ecd, n_bins=5, backend=backend)
        torch.testing.assert_close(found, whole)
    for i, j in itertools.product(range(2), range(3)):
        parts = (x[i, j] for x in (confidence, outcome, weights, ecd))
        torch.testing.assert_close(whole[i, j], event_bins(*parts, n_bins=5, backend=backend))
    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in (confidence, outcome, weights, ecd)]
    torch.testing.assert_close(event_bins(*turned, n_bins=5, backend=backend), whole)
    one_row = weights[0, 0]  # broadcast over series
    found = event_bins(confidence, outcome, one_row, n_bins=5, backend=backend)
    torch.testing.assert_close(found, event_bins(confidence, outcome, one_row.expand(2, 3, 10), n_bins=5))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "n_bins"), [(torch.float32, 15), (torch.float32, 20_000), (F64, 15), (torch.bfloat16, 20_000)], ids=str
)
def test_counts_of_many_events_are_exact_and_outcomes_may_be_any_integers(backend, dtype, n_bins):
    confidence, outcome, _, _ = events(150_000, dtype)
    confidence[1000:3000] = (15 * confidence[1000:3000]).round() / 15  # on edges, as near as the dtype has them
    outcome = outcome.long()
    index = bin_index(confidence, n_bins)
    for part, value in ((slice(0), 0), (slice(70_000, 70_100), -3), (slice(140_000, 140_001), 2**40)):
        outcome[part] = value
        found = event_bins(confidence, outcome, n_bins=n_bins, backend=backend)
        assert torch.equal(found[0], torch.bincount(index, minlength=n_bins).double())
        assert torch.equal(found[2], torch.zeros(n_bins).double().index_add(0, index, outcome.double()))
        expected = torch.zeros(n_bins).double().index_add(0, index, confidence.double())
        # Positive terms in any order: both sums are off by 150,000 * 2^-53 = 1.7e-11 at most.
        torch.testing.assert_close(found[1], expected, rtol=4e-11, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_zero_is_never_read_and_nan_poisons(backend):
    confidence, outcome, weights, ecd = events(50)
    spoiled = [x.clone() for x in (confidence, outcome.double(), weights, ecd)]
    for column, bad in ((0, NAN), (1, INF), (3, -INF)):
        spoiled[column][0] = bad  # of weight 0
    for x in spoiled[:2] + spoiled[3:]:
        x.requires_grad_()
    found = event_bins(*spoiled, n_bins=5, backend=backend)
    assert torch.equal(found, event_bins(confidence, outcome, weights, ecd, n_bins=5, backend=backend))
    found.sum().backward()
    assert [x.grad[0].item() for x in (spoiled[0], spoiled[1], spoiled[3])] == [0, 0, 0]
    confidence[1] = NAN
    poisoned = event_bins(confidence, outcome, weights, n_bins=5, backend=backend)
    assert poisoned[1, 0].isnan()
    assert poisoned[1, 1:].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_event_sums_are_the_same_in_every_run_and_on_any_number_of_threads(backend):
    confidence, outcome, weights, ecd = events(700_001)
    found = []
    for threads in (1, 2, 3, 3):
        with threads_of_torch(threads):
            found.append(event_bins(confidence, outcome, weights, ecd, n_bins=15, backend=backend))
    assert all(torch.equal(found[0], other) for other in found[1:])
    wide = [weights * x for x in (torch.ones_like(ecd), confidence.double(), outcome.double(), ecd)]
    index = bin_index(confidence, 15)
    # Two sums of n terms in different orders differ by at most 2 n 2^-53 times the sum of magnitudes.
    magnitude = bin_sums(index, [x.abs() for x in wide], 15)
    assert ((found[0] - bin_sums(index, wide, 15)).abs() <= 1.6e-10 * magnitude).all()


@NO_WARNING
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_event_bins_of_any_kind(backend):
    confidence, outcome, weights, ecd = events(8, torch.float64)
    confidence = 0.1 + 0.8 * confidence
    leaves = [x.clone().requires_grad_() for x in (confidence, outcome.double(), weights + 0.1, ecd)]

    def take(c, o, w, d):
        return event_bins(c, o, w, d, n_bins=3, backend=backend)

    assert torch.autograd.gradcheck(take, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(take, leaves)
    alone = event_bins(leaves[0], outcome, n_bins=3, backend=backend)  # neither weights nor ECD
    (grad,) = torch.autograd.grad(alone[1].sum(), leaves[0])
    assert grad.tolist() == [1] * 8
    one = torch.ones_like(confidence)
    _, tangent = torch.func.jvp(lambda c: event_bins(c, outcome, n_bins=3, backend=backend), (confidence,), (one,))
    assert torch.equal(tangent[1], alone[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_events_have_sums_of_zero(backend):
    for shape in ((0,), (3, 0), (0, 3)):
        found = event_bins(torch.empty(shape), torch.empty(shape), n_bins=4, backend=backend)
        assert torch.equal(found, torch.zeros(*shape[:-1], 3, 4, dtype=F64))


# Classes.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(
    ("n_classes", "n_bins", "right", "weighted"),
    [(1, 5, False, True), (2, 1, True, False), (3, 10, True, True), (10, 15, False, False), (10, 15, True, True),
     (1001, 15, False, True), (1030, 100, True, False), (1030, 100, False, True)],
)  # fmt: skip
def test_class_bins_and_their_gradient_are_those_of_the_whole_tensor(
    backend, from_logits, n_classes, n_bins, right, weighted
):
    values, target, weights = class_case(60, n_classes, from_logits, n_bins=n_bins)
    weights = weights if weighted else None
    leaf, wide = values.clone().requires_grad_(), values.double().requires_grad_()
    found = of_classes(leaf, target, weights, from_logits, n_bins, right, backend)
    expected = whole_class_sums(wide, target, weights, from_logits, n_bins, right)
    torch.testing.assert_close(found, expected, **SUMS_OF_FLOAT32)
    if not weighted:
        assert torch.equal(found[..., [0, 2], :], expected[..., [0, 2], :])  # counts
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    # q (g - sum of q g): q is off by 2e-6 of itself, and the sum by 2e-6 of the largest g. Else it is g in float32.
    q = wide.detach().softmax(-1) if from_logits else 1
    assert ((leaf.grad.double() - wide.grad).abs() <= 6e-6 * q * upstream.abs().max() + 1e-12).all()


@pytest.mark.parametrize(
    ("dtype", "from_logits"), [(torch.float16, True), (torch.bfloat16, False), (F64, True), (F64, False)], ids=str
)
def test_class_bins_of_every_dtype(dtype, from_logits):
    values, target, weights = class_case(60, 200, from_logits, dtype, n_bins=15)
    leaf, wide = values.clone().requires_grad_(), values.double().requires_grad_()
    found = of_classes(leaf, target, weights, from_logits)
    expected = whole_class_sums(wide, target, weights, from_logits, 15, False)
    torch.testing.assert_close(found, expected, **SUMS_OF_FLOAT32)
    found[:, 1].square().sum().backward()
    expected[:, 1].square().sum().backward()
    assert leaf.grad.dtype == dtype
    close = {"rtol": 1e-2, "atol": 1e-5} if dtype != torch.float64 else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(leaf.grad.double(), wide.grad, **close)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_first_bin_is_exactly_empty(backend):
    """What a difference of sums would leave there is rounding, of which a gap is made."""
    values = torch.tensor([[0.4, 0.6], [0.55, 0.45], [0.7, 0.3]])
    weights = torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    for w in (None, weights):
        found = of_classes(values, torch.tensor([0, 1, 0]), w, False, n_bins=5, backend=backend)
        assert torch.equal(found[..., 0], torch.zeros(2, 3, dtype=F64))


@pytest.mark.parametrize("backend", NUMBA)
def test_the_share_of_equal_logits_is_on_its_edge(backend):
    """1/C for C classes and C bins: the second bin, and not the one that float32 would round it into."""
    for n_classes in range(2, 60):
        found = of_classes(torch.zeros(3, n_classes), torch.zeros(3).long(), None, True, n_classes, backend=backend)
        assert found[:, 0, 1].tolist() == [3] * n_classes


@pytest.mark.parametrize("backend", BACKENDS)
def test_infinite_logits_nan_and_labels_that_are_no_class(backend):
    values = torch.tensor([[INF, 0, INF, 0], [0, 0, -INF, -INF], [NAN, 0, 0, 0], [0, 0, 0, 9]])
    target = torch.tensor([0, 7, -1, 3])
    weights = torch.tensor([1.0, 2, 0, 1], dtype=F64)
    leaf = values.clone().requires_grad_()
    found = of_classes(leaf, target, weights, True, n_bins=4, backend=backend)
    expected = torch.zeros(4, 3, 4, dtype=F64)
    q = torch.tensor([[0.5, 0, 0.5, 0], [0.5, 0.5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 9.0]]).double()
    q[3] = q[3].softmax(-1)
    for row, k in ((i, k) for i in (0, 1, 3) for k in range(4)):
        b = min(int(4 * q[row, k]), 3)
        expected[k, 0, b] += weights[row]
        expected[k, 1, b] += weights[row] * q[row, k]
    expected[0, 2, 2] = 1
    expected[3, 2, 3] = 1
    torch.testing.assert_close(found, expected, **SUMS_OF_FLOAT32)
    found[:, 1].square().sum().backward()
    assert torch.equal(leaf.grad[[0, 2]], torch.zeros(2, 4))
    assert leaf.grad.isfinite().all()
    poisoned = of_classes(values, target, None, True, n_bins=4, backend=backend)
    assert poisoned[:, 1, 0].isnan().all()
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
    for i in range(2):
        for j in range(3):
            part = values[i, j].clone().requires_grad_()
            found = of_classes(part, target[i, j], weights[i, j], from_logits, 5, backend=backend)
            torch.testing.assert_close(found, whole[i, j], **SUMS_OF_FLOAT32)
            found[..., 1, :].square().sum().backward()
            torch.testing.assert_close(part.grad, leaf.grad[i, j], rtol=1e-5, atol=1e-5)
    empty = of_classes(values[:, :, :0], target[:, :, :0], None, from_logits, 5, backend=backend)
    assert torch.equal(empty, torch.zeros(2, 3, 6, 3, 5, dtype=F64))


@NO_WARNING
@pytest.mark.parametrize("from_logits", [True, False])
def test_gradients_of_class_bins_of_any_kind(from_logits):
    values, target, weights = class_case(5, 4, from_logits, F64)
    leaves = [values.requires_grad_(), (weights + 0.1).requires_grad_()]

    def take(x, w):
        return of_classes(x, target, w, from_logits, 3)

    assert torch.autograd.gradcheck(take, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(take, leaves)

    def value(x):
        return of_classes(x, target, None, from_logits, 3)[..., 1, :].square().sum()

    x = values.detach().requires_grad_()
    value(x).backward()
    torch.testing.assert_close(torch.func.grad(value)(values.detach()), x.grad)
    torch.testing.assert_close(torch.func.jacfwd(value)(values.detach()), x.grad)


def test_rows_of_weight_0_are_in_no_derivative_of_class_bins():
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_weights_in_the_first_bin_are_not_lost_beside_large_ones(backend):
    values, target = torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 0])
    weights = torch.tensor([1e-10, 1e10], dtype=F64)
    found = of_classes(values, target, weights, False, 3, backend=backend)
    assert found[:, 0].tolist() == [[1e-10, 0, 1e10], [1e10, 0, 1e-10]]


# Devices that must not be waited for.


@pytest.mark.parametrize(("from_logits", "right"), [(True, False), (False, True)])
def test_what_runs_on_a_device_without_triton_gives_the_sums_and_gradients_of_the_cpu(from_logits, right):
    values, target, weights = class_case(60, 40, from_logits, n_bins=7)
    target[3] = -1
    if from_logits:
        values[7, 2] = INF
    values[5] = NAN  # of weight 0
    results = []
    for backend in ("torch", "masked"):
        options = {"n_bins": 7, "right": right, "backend": backend}
        for w in (weights, weights.masked_fill(weights > 0, 1)):
            leaf = values.clone().requires_grad_()
            of_rows = rows(leaf, target, from_logits=from_logits, backend="torch")
            by_class = class_bins(leaf, target, w, of_rows, from_logits=from_logits, **options)
            by_class[:, 1].square().sum().backward()
            results.append((by_class.detach(), leaf.grad))
        results.append((event_bins(*events(3000), **options), event_bins(*events(3000)[:2], **options)))
    # Either rounds probabilities to float32 in its own way: sums are off by 2e-6. The gradient q (2 s - sum of q 2 s),
    # for sums s of up to 48 weights of at most 1, by three times that.
    for (a, a_grad), (b, b_grad) in zip(results[:2], results[3:5], strict=True):
        torch.testing.assert_close(b, a, rtol=4e-6, atol=1e-12)
        torch.testing.assert_close(b_grad, a_grad, rtol=0, atol=6e-6 * 2 * 48)
    for a, b in zip(results[2], results[5], strict=True):  # 3,000 float64 terms below 4 in any order
        torch.testing.assert_close(b, a, rtol=1e-12, atol=3000 * 2**-53 * 3000 / 7)


def test_shapes_without_numbers_have_sums_without_numbers():
    """On the meta device there is nothing to be waited for."""
    values, target, weights = (x.to("meta") for x in class_case(6, 4, True))
    found = rows(values, target, from_logits=True)
    assert class_bins(values, target, weights, found, from_logits=True, n_bins=5).shape == (4, 3, 5)
    assert event_bins(found.confidence, found.top == target, weights, n_bins=5).shape == (3, 5)


@pytest.mark.parametrize("backend", NUMBA)
def test_float64_is_not_for_numba(backend):
    values, target, _ = class_case(3, 4, True, F64)
    found = rows(values, target, from_logits=True)
    with pytest.raises(ValueError, match="`backend` must be 'auto' or 'torch' for float64 on the CPU, got 'numba'"):
        class_bins(values, target, None, found, from_logits=True, n_bins=5, backend=backend)


# torch.compile, vmap, registration.


def both(values, target, weights):
    found = rows(values, target, from_logits=True)
    by_class = class_bins(values, target, weights, found, from_logits=True, n_bins=5)
    top = event_bins(found.confidence, found.top == target, weights, found.neg_entropy, n_bins=5)
    return by_class[..., 1, :].square().sum((-1, -2)) + top.square().sum((-1, -2))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_it_is_the_same(backend):
    torch.compiler.reset()
    values, target, weights = class_case(12, 7, True, n_bins=5)
    a, b = (values.clone().requires_grad_() for _ in range(2))
    compiled = torch.compile(both, fullgraph=True, backend=backend)(a, target, weights)
    compiled.backward()
    expected = both(b, target, weights)
    expected.backward()
    torch.testing.assert_close(compiled, expected, rtol=1e-5, atol=0)  # squares of sums of float32 probabilities
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-4)


def test_vmap_is_a_loop():
    values, target, weights = class_case(12, 7, True, n_bins=5)
    stacked = torch.stack((values, 2 * values), 1)
    found = torch.vmap(lambda x: both(x, target, weights), in_dims=1)(stacked)
    torch.testing.assert_close(found, torch.stack([both(x, target, weights) for x in (values, 2 * values)]))


def test_registered_as_torch_wants_an_operation():
    confidence, outcome, weights, ecd = events(20)
    for w, d in ((None, None), (weights, ecd)):
        torch.library.opcheck(
            event_sums.registered,
            (confidence.clone().requires_grad_(), outcome, w, d, None, 1, 5, False, "none", True, "auto"),
        )
    values, target, weights = class_case(12, 7, True)
    found = rows(values, target, from_logits=True)
    kept = (found.top, found.confidence)
    for w in (None, weights):
        torch.library.opcheck(
            class_sums.registered,
            (values.clone().requires_grad_(), target, w, *kept, True, 5, False, False, True, "auto"),
        )
        grads = torch.ones(7, 5, dtype=F64)
        torch.library.opcheck(class_sums_backward.registered, (values, target, w, *kept, grads, True, False, "auto"))
