"""Sums over the cells of smoothing against slow loops: values and gradients of all implementations, every run alike."""

import itertools
import math

import pytest
import torch
from helpers import kernels
from helpers.kernels import BACKENDS, F64, NO_WARNING, assert_compiled_and_mapped, threads_of_torch

from torchcalib.kernels.smoothing_cells import cell_index, smoothing_sums, sums_of_cells, sums_of_cells_backward
from torchcalib.kernels.smoothing_grids import GRIDS, N_CELLS

INF, NAN = math.inf, math.nan


def events(n, dtype=F64, lead=()):
    return [x.view(*lead, n) for x in kernels.events(math.prod(lead) * n, dtype)[:3]]


def slow(confidence, outcome, weights, noise="none", copies=True):
    """A loop over Python floats: in every cell the weighed 1, p, y, p (1 - p), variance of y, and p y."""
    sums = [[0.0] * N_CELLS for _ in range(6)]
    ones = [1.0] * len(confidence) if weights is None else weights.tolist()
    for p, y, w in zip(confidence.tolist(), outcome.double().tolist(), ones, strict=True):
        cell = min(sum(int(p * steps) for steps in GRIDS), N_CELLS - 1)
        variance = (y - p) ** 2 if noise == "shares" else p * (1 - p)
        share = 1 if weights is None or copies else w
        for column, x in zip(sums, (1, p, y, p * (1 - p), share * variance, p * y), strict=True):
            column[cell] += w * x if w else 0
    found = torch.tensor(sums, dtype=F64)
    return found if noise != "none" else found[[0, 1, 2, 3, 5]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "outcome_dtype"),
    [(torch.float32, torch.bool), (F64, torch.int64), (torch.bfloat16, torch.uint8), (F64, F64)],
    ids=str,
)
def test_sums_are_those_of_a_slow_loop(backend, dtype, outcome_dtype):
    confidence, outcome, weights = events(500, dtype)
    confidence[:3] = torch.tensor([0.0, 1.0, 0.5])
    outcome = outcome.to(outcome_dtype)
    for w, noise, copies in itertools.product((None, weights), ("none", "labels", "shares"), (True, False)):
        found = smoothing_sums(confidence, outcome, w, noise=noise, copies=copies, backend=backend)
        torch.testing.assert_close(found, slow(confidence, outcome, w, noise, copies), rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_cells_of_every_node_and_its_neighbours_and_of_what_is_no_probability(backend):
    nodes = torch.cat([torch.arange(m + 1, dtype=F64) / m for m in GRIDS])
    near = [torch.nextafter(nodes, torch.full_like(nodes, far)) for far in (-1.0, 2.0)]
    values = torch.cat((nodes, *near)).clamp(0, 1)
    for given in (values, values.float(), values.half()):
        expected = sum((given.double() * m).long() for m in GRIDS).clamp(max=N_CELLS - 1)
        assert torch.equal(cell_index(given, backend), expected)
    beyond = torch.tensor([[NAN, -0.0, -1, -INF], [2, INF, 1e30, 1]], dtype=F64)
    assert cell_index(beyond, backend).tolist() == [[0] * 4, [N_CELLS - 1] * 4]
    found = smoothing_sums(beyond, torch.zeros(2, 4), backend=backend)
    assert found[0, 0, 0] == 4
    assert found[1, 0, -1] == 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_series_in_any_layout_are_a_loop_and_weights_may_be_shared(backend):
    confidence, outcome, weights = events(7, lead=(2, 3))
    options = {"noise": "labels", "copies": False}
    for w in (weights, weights[0, 0]):
        whole = smoothing_sums(confidence, outcome, w, **options, backend=backend)
        turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in (confidence, outcome)]
        found = smoothing_sums(*turned, w, **options, backend=backend)
        torch.testing.assert_close(found, whole, rtol=1e-13, atol=1e-15)
        for i, j in itertools.product(range(2), range(3)):
            part = slow(confidence[i, j], outcome[i, j], w.expand(2, 3, 7)[i, j], **options)
            torch.testing.assert_close(whole[i, j], part, rtol=1e-13, atol=0)
    for shape in ((0,), (3, 0), (0, 3)):
        found = smoothing_sums(torch.empty(shape), torch.empty(shape), backend=backend)
        assert torch.equal(found, torch.zeros(*shape[:-1], 5, N_CELLS, dtype=F64))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_many_events_are_the_same_on_any_number_of_threads(backend):
    """More than one piece has sums of its own."""
    confidence, outcome, weights = events(600_001)
    found = []
    for threads in (1, 2, 3, 3):
        with threads_of_torch(threads):
            leaf = confidence.clone().requires_grad_()
            sums = smoothing_sums(leaf, outcome, weights, noise="labels", backend=backend)
            (sums * sums.detach()).sum().backward()
            found.append((sums.detach(), leaf.grad))
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
    leaf = confidence.clone().requires_grad_()
    plain = smoothing_sums(leaf, outcome, weights, noise="labels", backend="torch")
    # Positive terms in any order: off by 2 n 2^-53 at most, with all 600,001 in one cell 1.4e-10.
    torch.testing.assert_close(found[0][0], plain.detach(), rtol=1.4e-10, atol=0)
    (plain * plain.detach()).sum().backward()
    torch.testing.assert_close(found[0][1], leaf.grad, rtol=1e-9, atol=1e-9 * leaf.grad.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("noise", "dtype"), [("none", F64), ("labels", torch.float32), ("shares", F64)], ids=str)
def test_the_gradient_is_what_each_event_adds(backend, noise, dtype):
    """d/dp of w (g_1 p + g_3 p (1 - p) + g_5 p y); the noise is a constant."""
    confidence, outcome, weights = events(300, dtype)
    for w in (None, weights):
        leaf = confidence.clone().requires_grad_()
        sums = smoothing_sums(leaf, outcome, w, noise=noise, backend=backend)
        upstream = torch.randn(sums.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
        (sums * upstream).sum().backward()
        at = upstream[:, cell_index(confidence, "torch")]
        expected = at[1] + at[3] * (1 - 2 * confidence.double()) + at[-1] * outcome
        expected = expected if w is None else expected * w
        torch.testing.assert_close(leaf.grad, expected.to(dtype), rtol=1e-6 if dtype != F64 else 1e-13, atol=1e-14)


@NO_WARNING
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("noise", ["none", "labels"])
def test_gradients_of_any_kind(backend, noise):
    confidence, outcome, weights = events(6)
    confidence = 0.1 + 0.8 * confidence
    cells = cell_index(confidence)
    leaves = [x.clone().requires_grad_() for x in (confidence, outcome.double(), weights + 0.1)]

    def take(c, o, w):
        sums = smoothing_sums(c, o, w, noise=noise, backend=backend)
        parts = sums.unbind(-2)  # all but the noise, which is a constant
        return torch.stack((*parts[:4], parts[-1]), -2)[..., cells]

    assert torch.autograd.gradcheck(take, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(take, leaves)

    def alone(c):
        return smoothing_sums(c, outcome, noise=noise, backend=backend)[..., cells].square().sum()

    leaf = confidence.clone().requires_grad_()
    alone(leaf).backward()
    torch.testing.assert_close(torch.func.grad(alone)(confidence), leaf.grad)
    torch.testing.assert_close(torch.func.jacfwd(alone)(confidence), leaf.grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_zero_is_never_read_and_nan_poisons(backend):
    confidence, outcome, weights = events(50)
    outcome = outcome.double()
    expected = smoothing_sums(confidence, outcome, weights, noise="shares", backend=backend)
    spoiled = [confidence.clone(), outcome.clone(), weights.clone()]
    spoiled[0][0], spoiled[1][0] = NAN, INF  # of weight 0
    for n_leaves in (1, 3):
        leaves = [x.requires_grad_(i < n_leaves) for i, x in enumerate(spoiled)]
        found = smoothing_sums(*leaves, noise="shares", backend=backend)
        assert torch.equal(found, expected)
        grads = torch.autograd.grad(found[:4].square().sum(), leaves[:n_leaves], create_graph=n_leaves > 1)
        assert all(grad.isfinite().all() and grad[0] == 0 for grad in grads)
    (second,) = torch.autograd.grad(sum(grad.square().sum() for grad in grads), spoiled[0])
    assert second.isfinite().all()
    assert second[0] == 0
    confidence[1] = NAN
    poisoned = smoothing_sums(confidence, outcome, weights, backend=backend)
    assert poisoned[1, 0].isnan()
    assert poisoned[:, 1:].isfinite().all()


def test_shapes_without_numbers_have_sums_without_numbers():
    """On the meta device there is nothing to be waited for."""
    confidence, outcome, weights = (x.to("meta") for x in events(6, lead=(3,)))
    assert smoothing_sums(confidence, outcome, weights, noise="labels").shape == (3, 6, N_CELLS)
    assert cell_index(confidence).shape == (3, 6)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_and_mapped_it_is_the_same(backend):
    confidence, outcome, weights = events(12)

    def value(p):
        return smoothing_sums(p, outcome, weights).square().sum((-1, -2)) + cell_index(p).sum(-1)

    # Squares of sums of 12 positive terms.
    assert_compiled_and_mapped(value, confidence, backend, rtol=1e-12, atol=0)


def test_registered_as_torch_wants_an_operation():
    confidence, outcome, weights = events(20)
    for w in (None, weights):
        given = (confidence.clone().requires_grad_(), outcome, w)
        torch.library.opcheck(sums_of_cells.registered, (*given, "labels", True, "auto"))
        grads = torch.ones(6, N_CELLS, dtype=F64)
        torch.library.opcheck(sums_of_cells_backward.registered, (confidence, outcome, w, grads, "auto"))
