"""Common properties of operations on rows, bins and cells: derivatives, batches, torch.compile, vmap, registration."""

import itertools
import math
from functools import partial

import pytest
import torch
from helpers.kernels import (
    BACKENDS,
    F64,
    SUMS_OF_FLOAT32,
    assert_empty_input_gives_zero_sums,
    events,
    of_backends,
    random_class_rows,
)
from helpers.rows import sample

from torchcalib.ops.bin_sums import class_bins, event_bins
from torchcalib.ops.log_odds import log_odds
from torchcalib.ops.smoothing import cells
from torchcalib.ops.smoothing.cells import cell_index, smoothing_sums
from torchcalib.ops.softmax_stats import rows

N_GROUPS = 4


# Each returns a function of columns, and columns `(*lead, n)` or `(*lead, n, C)` of a dtype that all backends support.


def scores_of_rows(from_logits, n, lead=(), dtype=torch.float32):
    values, target = sample(math.prod(lead) * n, 5, from_logits, dtype, scale=1.0)

    def call(x, labels, backend="auto", noise=False):
        return torch.stack(rows(x, labels, from_logits=from_logits, backend=backend)[:4], -2)

    return call, [values.view(*lead, n, 5), target.view(*lead, n)]


def sums_of_classes(from_logits, n, lead=(), dtype=torch.float32):
    values, target, weights = random_class_rows(math.prod(lead) * n, 4, from_logits, dtype, n_bins=3)

    def call(x, labels, w, backend="auto", noise=False):
        of_rows = backend
        found = rows(x, labels, from_logits=from_logits, backend=of_rows)
        options = {"from_logits": from_logits, "n_bins": 3, "noise": noise, "copies": False}
        return class_bins(x, labels, w, found, **options, backend=backend)

    return call, [values.view(*lead, n, 4), target.view(*lead, n), weights.view(*lead, n) + 0.1]


def sums_of_events(has_groups, n, lead=(), dtype=F64):
    confidence, outcome, weights, ecd = (x.view(*lead, n) for x in events(math.prod(lead) * n, dtype))
    groups = torch.arange(math.prod(lead) * n).view(*lead, n) % (N_GROUPS - 1)  # the last group has no events

    def call(c, o, w, d, of=None, backend="auto", noise=False):
        options = {"n_bins": 3, "noise": "shares" if noise else "none", "copies": False}
        options |= {} if of is None else {"groups": of, "n_groups": N_GROUPS}
        return event_bins(c, o, w, d, **options, backend=backend)

    columns = [0.1 + 0.8 * confidence, outcome.double(), weights + 0.1, ecd]
    return call, [*columns, groups] if has_groups else columns


def sums_of_smoothing(n, lead=(), dtype=F64):
    confidence, outcome, weights, _ = (x.view(*lead, n) for x in events(math.prod(lead) * n, dtype))
    confidence = 0.1 + 0.8 * confidence
    cells = torch.cat((cell_index(confidence).flatten(), torch.zeros(1).long()))  # cell 0, to which NaN is assigned

    def call(c, o, w, backend="auto", noise=False):
        return smoothing_sums(c, o, w, noise="shares" if noise else "none")[..., cells]

    return call, [confidence, outcome.double(), weights + 0.1]


def odds_of_events(size, n, lead=(), dtype=F64):
    values, _ = sample(math.prod(lead) * n, 5, True, dtype)
    values = values.view(*lead, n, 5)

    def call(x, members=None, backend="auto", noise=False):
        return log_odds(x, members, backend=backend).unsqueeze(-2)

    return call, [values, values.topk(size, -1).indices] if size else [values]


OPERATIONS = {
    "rows of logits": partial(scores_of_rows, True),
    "rows of probabilities": partial(scores_of_rows, False),
    "classes of logits": partial(sums_of_classes, True),
    "classes of probabilities": partial(sums_of_classes, False),
    "events": partial(sums_of_events, False),
    "events of groups": partial(sums_of_events, True),
    "smoothing": sums_of_smoothing,
    "odds of each class": partial(odds_of_events, 0),
    "odds of the top class": partial(odds_of_events, 1),
    "odds of two classes": partial(odds_of_events, 2),
}
PLAIN = "odds of each class", "odds of two classes", "smoothing"  # which have no compiled loops
CONSTANT_SUMS = {"classes": (3, 4), "events": (3, 4), "smoothing": (4,)}
IMPLEMENTATIONS = [(name, b) for name in OPERATIONS for b in (["auto"] if name.startswith(PLAIN) else BACKENDS)]
# Sums of few terms may be in another order. Rows and log-odds are documented to have the same bits in any batch.
SAME_BITS = {"rtol": 0, "atol": 0}
ROUNDING = {torch.float32: SUMS_OF_FLOAT32, F64: {"rtol": 1e-12, "atol": 1e-13}}
GRADIENTS = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, F64: {"rtol": 1e-12, "atol": 1e-13}}
OF_ROWS = [name for name in OPERATIONS if name.startswith(("rows", "odds"))]
of_operations = pytest.mark.parametrize("name", OPERATIONS)
of_implementations = pytest.mark.parametrize(("name", "backend"), IMPLEMENTATIONS)


def with_leaves(columns, leaves):
    """Return the columns, with the first floating ones replaced by leaves."""
    leaves = list(leaves)
    return [leaves.pop(0) if leaves and x.is_floating_point() else x for x in columns]


def floating(columns):
    return [x.clone().requires_grad_() for x in columns if x.is_floating_point()]


def differentiable(name, sums):
    """Return sums `(..., F, K)` without the sums of noise that are constant."""
    constant = CONSTANT_SUMS.get(name.split()[0], ())
    return sums[..., [k for k in range(sums.shape[-2]) if k not in constant], :]


def slope_of(sums):
    return torch.randn(sums.shape, generator=torch.Generator().manual_seed(1), dtype=F64)


@of_operations
def test_first_and_second_derivatives_equal_finite_differences(name):
    """Rows of probabilities are moved off the simplex, so that each entry has a separate derivative."""
    call, columns = OPERATIONS[name](6, dtype=F64)

    def of_leaves(*leaves):
        return differentiable(name, call(*with_leaves(columns, leaves), noise=True))

    assert torch.autograd.gradcheck(of_leaves, floating(columns), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(of_leaves, floating(columns))


@of_implementations
def test_functional_derivatives_equal_backward_and_noise_is_constant(name, backend):
    call, columns = OPERATIONS[name](6)
    tolerance = GRADIENTS[columns[0].dtype]

    slopes = {noise: slope_of(call(*columns, noise=noise)) for noise in (False, True)}

    def value(*leaves, noise, kept=lambda sums: sums):
        sums = call(*with_leaves(columns, leaves), backend=backend, noise=noise)
        return (kept(sums) * kept(slopes[noise])).sum()

    batch = torch.stack((columns[0], columns[0]))
    leaves = floating(columns)
    for noise in (False, True):
        kept = partial(differentiable, name) if noise else lambda sums: sums
        expected = torch.autograd.grad(value(leaves[0], noise=noise, kept=kept), leaves[0])[0]
        of_all = torch.autograd.grad(value(*leaves, noise=noise, kept=kept), leaves)
        noisy = partial(value, noise=noise)
        found = torch.autograd.grad(noisy(*leaves), leaves)
        torch.testing.assert_close(found, of_all, **tolerance)
        for differentiate in (torch.func.grad, torch.func.jacfwd):
            found = differentiate(noisy)(columns[0])
            torch.testing.assert_close(found.to(expected.dtype), expected, **tolerance)
        mapped = torch.func.vmap(noisy)
        found = torch.func.grad(lambda x, mapped=mapped: mapped(x).sum())(batch)
        torch.testing.assert_close(found[1], expected, **tolerance)
        many = batch.clone().requires_grad_()
        mapped(many).sum().backward()
        torch.testing.assert_close(many.grad[1], expected, **tolerance)
        _, tangents = torch.func.jvp(mapped, (batch,), (torch.ones_like(batch),))
        wider = {key: 10 * bound for key, bound in tolerance.items()}  # sum of up to 30 derivatives
        torch.testing.assert_close(tangents.to(expected.dtype), expected.sum().expand(2), **wider)


@pytest.mark.parametrize(("name", "backend"), [case for case in IMPLEMENTATIONS if case[0] not in OF_ROWS])
def test_bad_values_with_weight_0_do_not_affect_sums_and_derivatives(name, backend):
    call, columns = OPERATIONS[name](6)
    columns[2][0] = 0
    clean = call(*columns, backend=backend, noise=True)
    spoiled = [x.clone() for x in columns]
    for k, bad in ((0, math.nan), (1, math.inf), (3, -math.inf)):
        if k < len(columns) and spoiled[k].is_floating_point():
            spoiled[k][0] = bad
    leaves = floating(spoiled)
    for own in (leaves[:1], leaves):
        found = call(*with_leaves(spoiled, own), backend=backend, noise=True)
        assert torch.equal(found, clean)
        first = torch.autograd.grad((found * slope_of(found)).sum(), own)
        again = torch.autograd.grad(call(*with_leaves(spoiled, own)).square().sum(), own, create_graph=True)
        (second,) = torch.autograd.grad(sum(x.square().sum() for x in again), own[0])
        for derivative in (*first, *again, second):
            assert derivative.isfinite().all()
            assert not derivative[0].any()
        primals = tuple(x.detach() for x in own)
        forward = torch.func.jvp(
            lambda *x: call(*with_leaves(spoiled, x)), primals, tuple(map(torch.ones_like, primals))
        )
        assert forward[1].isfinite().all()


@of_implementations
def test_batches_in_any_layout_equal_a_loop_and_weights_and_groups_broadcast(name, backend):
    call, columns = OPERATIONS[name](10, lead=(2, 3))
    dtype = columns[0].dtype
    of_sums = SAME_BITS if name in OF_ROWS else ROUNDING[dtype]
    of_gradients = SAME_BITS if name.startswith("rows") else GRADIENTS[dtype]

    def read(given):
        leaf = given[0].detach().requires_grad_()  # detach() keeps the layout
        sums = call(leaf, *given[1:], backend=backend, noise=True)
        return sums.detach(), torch.autograd.grad((sums * slope_of(sums[0, 0])).sum(), leaf)[0]

    turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in columns]
    whole, slopes = read(turned)
    for i, j in itertools.product(range(2), range(3)):
        sums, slope = read([x[None, None, i, j] for x in columns])
        torch.testing.assert_close(sums[0, 0], whole[i, j], **of_sums)
        torch.testing.assert_close(slope[0, 0], slopes[i, j], **of_gradients)
    for k in (2, 4):
        if k < len(columns):
            shared = [x[0, 0] if i == k else x for i, x in enumerate(columns)]
            repeated = [x[0, 0].expand(2, 3, 10).clone() if i == k else x for i, x in enumerate(columns)]
            found, expected = (call(*given, backend=backend) for given in (shared, repeated))
            torch.testing.assert_close(found, expected, **ROUNDING[dtype])
    assert not call(*(x[:, :, :0] for x in columns), backend=backend, noise=True).any()


@of_backends
def test_empty_input_gives_zero_sums(backend):
    for shape in ((0,), (3, 0), (0, 3)):
        assert_empty_input_gives_zero_sums(shape, backend)


@of_operations
def test_operations_run_on_the_meta_device_without_reading_values(name):
    call, columns = OPERATIONS[name](6, lead=(3,))
    expected = call(*columns, noise=True)
    found = call(*(x.to("meta") for x in columns), noise=True)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@of_operations
def test_compile_and_vmap_over_any_axis_give_the_same_values(name):
    call, (x, *others) = OPERATIONS[name](12)
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if x.dtype == F64 else {"rtol": 1e-5, "atol": 1e-5}
    slope = slope_of(call(x, *others))

    def value(x):
        return (call(x, *others) * slope).sum()

    torch.compiler.reset()
    a, b = (x.clone().requires_grad_() for _ in range(2))
    compiled, expected = torch.compile(value, fullgraph=True, backend="aot_eager")(a), value(b)
    torch.testing.assert_close(compiled, expected, **tolerance)
    for found in (compiled, expected):
        found.backward()
    torch.testing.assert_close(a.grad, b.grad, **tolerance)
    for axis in range(x.dim() + 1):
        mapped = torch.vmap(value, in_dims=axis)(torch.stack((x, x / 2), axis))
        torch.testing.assert_close(mapped, torch.stack((value(x), value(x / 2))), **tolerance)


def test_registration_of_operations_passes_opcheck():
    confidence, *_ = events(20)
    torch.library.opcheck(cells._cell_index.registered, (confidence,))
