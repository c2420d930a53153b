"""Sums over the bins of events and of groups of them, against a slow loop: values, gradients, every run alike."""

import itertools
import math
from functools import cache

import pytest
import torch
from cases import N_CLASSES
from helpers.bins import REDUCTIONS, WEIGHTS, data, weights_of
from helpers.kernels import BACKENDS, F64, NO_WARNING, events, threads_of_torch

from torchcalib.kernels.bin_op import event_bins, event_sums
from torchcalib.kernels.bin_sums import bin_index, bin_sums
from torchcalib.predictions import read_input
from torchcalib.statistics import EqualWidthBins

INF, NAN = math.inf, math.nan
KERNELS = [*BACKENDS, "masked"]
G = 6


def grouped(n, dtype=torch.float32):
    """Events, and groups of them, of which the last has none and the first most."""
    groups = torch.randint(0, 2 * (G - 1), (n,), generator=torch.Generator().manual_seed(0))
    return *events(n, dtype), groups.masked_fill(groups >= G - 1, 0)


@cache
def bin_of(c, n_bins, right):
    inside = [
        (i / n_bins < c <= (i + 1) / n_bins or c == i == 0) if right else
        (i / n_bins <= c < (i + 1) / n_bins or (c == 1 and i == n_bins - 1))
        for i in range(n_bins)
    ]  # fmt: skip
    return inside.index(True)


def slow(
    confidence, outcome, weights=None, ecd=None, *, n_bins, right=False, noise="none", copies=True, groups=None,
    n_groups=1,
):  # fmt: skip
    """A loop over Python floats, with exact sums: what `event_bins` says."""
    n = len(confidence)
    columns = [[1] * n if x is None else x.tolist() for x in (weights, ecd)]
    of_groups = [0] * n if groups is None else groups.tolist()
    terms = [[[[] for _ in range(n_bins)] for _ in range(6)] for _ in range(n_groups)]
    for c, o, w, d, g in zip(confidence.tolist(), outcome.tolist(), *columns, of_groups, strict=True):
        if w == 0:
            continue
        b = bin_of(c, n_bins, right)
        variance = (w if copies else w**2) * ((o - c) ** 2 if noise == "shares" else c * (1 - c))
        for held, term in zip(terms[g], (w, w * c, w * o, w * c * (1 - c), variance, w * d), strict=True):
            held[b].append(term)
    sums = torch.tensor([[[math.fsum(cell) for cell in held] for held in own] for own in terms], dtype=F64)
    kept = [0, 1, 2, *([] if noise == "none" else [3, 4]), *([] if ecd is None else [5])]
    return sums[0, kept] if groups is None else sums[:, kept]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "right", "n_bins"),
    [(torch.float32, False, 15), (torch.float32, True, 1), (F64, True, 2), (F64, False, 100), (F64, True, 15),
     (torch.bfloat16, False, 15)],
    ids=str,
)  # fmt: skip
def test_event_bins_are_those_of_a_slow_loop(backend, dtype, right, n_bins):
    """2,500 terms below 4 in any order: 2,500 * 2^-53 * 2,500 * 4 = 3e-9 at most, in practice 1e-12."""
    confidence, outcome, weights, ecd, groups = grouped(2500, dtype)
    confidence[: n_bins + 1] = (torch.arange(n_bins + 1) / n_bins).to(dtype)
    weightings = (None, True), (weights, True), (weights, False)
    kinds = itertools.product(("none", "labels", "shares"), weightings, (None, ecd), (None, groups))
    if dtype != torch.float32:  # every kind is compiled anew for a dtype
        kinds = [("none", (weights, True), ecd, None), ("none", (None, True), None, None)]
        kinds += [("labels", (None, True), None, groups), ("labels", (weights, False), None, groups)]
    for noise, (w, copies), d, of in kinds:
        columns = confidence, 0.9 * outcome.double() if noise == "shares" else outcome, w, d
        options = {"n_bins": n_bins, "right": right, "noise": noise, "copies": copies}
        options |= {} if of is None else {"groups": of, "n_groups": G}
        found = event_bins(*columns, **options, backend=backend)
        torch.testing.assert_close(found, slow(*columns, **options), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("backend", KERNELS)
def test_outcomes_may_be_any_integers(backend):
    confidence, outcome, weights, _, groups = grouped(5000)
    outcome = outcome.long()
    kinds = [("none", None, None), ("labels", None, None), ("shares", weights, None), ("none", None, groups)]
    for place, value in ((0, -3), (2000, 2**40), (4999, 7)):
        outcome[place] = value
        for noise, w, of in [*kinds, ("labels", None, groups)]:
            options = {
                "n_bins": 15,
                "noise": noise,
                "copies": False,
                "groups": of,
                "n_groups": G if of is not None else 1,
            }
            found = event_bins(confidence, outcome, w, **options, backend=backend)
            torch.testing.assert_close(found, slow(confidence, outcome, w, **options), rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_bins", [1, 2, 3, 7, 10, 15, 49, 100, 1000])
def test_every_edge_and_its_neighbours_fall_where_bin_index_says(backend, n_bins):
    edges = torch.arange(n_bins + 1, dtype=F64) / n_bins
    near = [torch.nextafter(edges, torch.full_like(edges, far)) for far in (2, -1)]
    beyond = torch.tensor([-0.0, NAN, -1, 2, INF, -INF], dtype=F64)
    values = torch.cat((edges, *near, beyond, edges.float().double()))
    for right, confidence in itertools.product((False, True), (values, values.float())):
        index = bin_index(confidence, n_bins, right)
        outcome = torch.zeros(len(confidence), 1)  # every value alone, as a series of its own
        found = event_bins(confidence.unsqueeze(-1), outcome, n_bins=n_bins, right=right, backend=backend)
        assert torch.equal(found[:, 0], torch.nn.functional.one_hot(index, n_bins).double())


@pytest.mark.parametrize("backend", KERNELS)
def test_series_in_any_layout_are_a_loop_and_groups_and_weights_may_be_shared(backend):
    columns = [x.view(2, 3, 10) for x in grouped(60)]
    groups = columns.pop()
    for of, w in itertools.product((None, groups, groups[0, 0], groups[:, :1]), (columns[2], columns[2][0, 0])):
        options = {"n_bins": 5, "noise": "labels"} | ({} if of is None else {"n_groups": G})
        given = [*columns[:2], w, columns[3]]
        whole = event_bins(*given, groups=of, **options, backend=backend)
        assert whole.shape == (2, 3, *([] if of is None else [G]), 6, 5)
        for i, j in itertools.product(range(2), range(3)):
            parts = [x.expand(2, 3, 10)[i, j] for x in given]
            expected = slow(*parts, groups=None if of is None else of.expand(2, 3, 10)[i, j], **options)
            torch.testing.assert_close(whole[i, j], expected)
        turned = [x.transpose(0, -1).contiguous().transpose(0, -1) for x in given]
        torch.testing.assert_close(event_bins(*turned, groups=of, **options, backend=backend), whole)
    whole = event_bins(*columns, n_bins=5, backend=backend)
    for dtype in (torch.uint8, torch.int64, torch.float32, F64):
        found = event_bins(columns[0], columns[1].to(dtype), *columns[2:], n_bins=5, backend=backend)
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("backend", KERNELS)
def test_no_events_have_sums_of_zero(backend):
    for shape in ((0,), (3, 0), (0, 3)):
        for groups in (None, torch.zeros(shape).long()):
            options = {"n_bins": 4, "groups": groups, "n_groups": 1 if groups is None else G, "backend": backend}
            expected = torch.zeros(*shape[:-1], *([] if groups is None else [G]), 3, 4, dtype=F64)
            assert torch.equal(event_bins(torch.empty(shape), torch.empty(shape), **options), expected)


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


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("has_groups", [False, True])
def test_nan_stays_in_the_cell_of_its_event_and_weight_0_is_never_read(backend, has_groups):
    confidence, outcome, weights, ecd, groups = grouped(400)
    groups = groups if has_groups else torch.zeros_like(groups)
    options = {"n_bins": 5, "noise": "labels", "groups": groups if has_groups else None, "backend": backend}
    options["n_groups"] = G if has_groups else 1
    clean = event_bins(confidence, outcome.double(), weights, ecd, **options)
    leaves = [x.clone().requires_grad_() for x in (confidence, outcome.double(), ecd)]
    for leaf, bad in zip(leaves, (NAN, INF, -INF), strict=True):
        leaf.data[0] = bad  # of weight 0
    found = event_bins(*leaves[:2], weights, leaves[2], **options)
    assert torch.equal(found, clean)
    found.sum().backward()
    assert [leaf.grad[0].item() for leaf in leaves] == [0, 0, 0]
    at = (5 * confidence).int()
    weights[1], ecd[2], confidence[3] = NAN, NAN, NAN
    bad = event_bins(confidence, outcome, weights, ecd, **options).isnan()
    expected = torch.zeros(options["n_groups"], 6, 5, dtype=torch.bool)
    expected[groups[1], :, at[1]] = True
    expected[groups[2], 5, at[2]] = True
    expected[groups[3], [1, 3, 4], 0] = True
    assert torch.equal(bad, expected if has_groups else expected[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n_groups", [1, 900])
def test_sums_are_the_same_in_every_run_and_on_any_number_of_threads(backend, n_groups):
    confidence, outcome, weights, ecd, groups = grouped(700_001)
    options = {"n_bins": 15, "backend": backend}
    options |= {"groups": groups, "n_groups": n_groups, "noise": "labels"} if n_groups > 1 else {}
    found = []
    for threads in (1, 2, 3, 3):
        with threads_of_torch(threads):
            found.append(event_bins(confidence, outcome, weights, ecd, **options))
    assert all(torch.equal(found[0], other) for other in found[1:])
    p = confidence.double()
    noise = [p * (1 - p)] * 2 if n_groups > 1 else []
    wide = [weights * x for x in (torch.ones_like(ecd), p, outcome.double(), *noise, ecd)]
    index = bin_index(confidence, 15)
    whole = found[0].sum(0) if n_groups > 1 else found[0]
    # Two sums of n terms in different orders differ by at most 2 n 2^-53 times the sum of magnitudes.
    magnitude = bin_sums(index, [x.abs() for x in wide], 15)
    assert ((whole - bin_sums(index, wide, 15)).abs() <= 1.6e-10 * magnitude).all()


@NO_WARNING
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("has_groups", [False, True])
def test_gradients_of_any_kind_in_which_noise_is_a_constant(backend, has_groups):
    confidence, outcome, weights, ecd, groups = grouped(8, F64)
    leaves = tuple(x.clone().requires_grad_() for x in (0.1 + 0.8 * confidence, outcome.double(), weights + 0.1, ecd))
    options = {"n_bins": 3, "backend": backend} | ({"groups": groups, "n_groups": G} if has_groups else {})

    def take(*columns):
        return event_bins(*columns, **options)

    assert torch.autograd.gradcheck(take, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(take, leaves)
    alone = take(leaves[0], outcome)  # neither weights nor ECD
    (grad,) = torch.autograd.grad(alone[..., 1, :].sum(), leaves[0])
    assert grad.tolist() == [1] * 8
    ones = tuple(torch.ones_like(leaf) for leaf in leaves)
    _, tangent = torch.func.jvp(lambda c: take(c, outcome), leaves[:1], ones[:1])
    assert torch.equal(tangent[..., 1, :], alone[..., 0, :])

    kept, slope = [0, 1, 2, 5], torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    options["noise"] = "shares"
    gradients = torch.autograd.grad((take(*leaves) * slope).sum(), leaves)
    tangent = torch.func.jvp(take, leaves, ones)[1]
    assert not tangent[..., 3:5, :].any()
    options["noise"] = "none"
    expected = torch.autograd.grad((take(*leaves) * slope[kept]).sum(), leaves)
    torch.testing.assert_close((*gradients, tangent[..., kept, :]), (*expected, torch.func.jvp(take, leaves, ones)[1]))


def test_registered_and_mapped_as_torch_wants_an_operation():
    confidence, outcome, weights, ecd, groups = grouped(20)
    for noise, w, d, of in (("none", None, None, None), ("shares", weights, ecd, None), ("labels", None, None, groups),
                            ("shares", weights, ecd, groups)):  # fmt: skip
        given = confidence.clone().requires_grad_(), outcome, w, d, of, 1 if of is None else G
        torch.library.opcheck(event_sums.registered, (*given, 5, False, noise, False, "auto"))
    options = {"n_bins": 5, "groups": groups, "n_groups": G}
    stacked = torch.stack((confidence, confidence / 2), 1)
    found = torch.vmap(lambda c: event_bins(c, outcome, weights, **options), in_dims=1)(stacked)
    expected = [event_bins(c, outcome, weights, **options) for c in stacked.T]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("how", REDUCTIONS, ids="-".join)
def test_law_bins_of_groups_are_the_bins_of_each(how):
    task, reduction = how
    groups = torch.arange(50) % (G - 1)
    recipe = EqualWidthBins(reduction, 5, False, with_ecd=True, with_noise=True)
    for soft, kind in itertools.product((False, True), WEIGHTS):
        preds, target = data(task, soft=soft)
        weights = weights_of(kind)
        p = read_input(task, preds, target, {"weights": weights})
        found = recipe.of_groups(p, groups[None] if task == "multilabel" else groups, G)
        assert found.sums.shape == (G, *recipe.shape(task, 3 if task == "multilabel" else N_CLASSES))
        assert not found.sums[G - 1].any()
        for g in range(G - 1):
            held = groups == g
            own = read_input(task, preds[held], target[held], {"weights": None if weights is None else weights[held]})
            torch.testing.assert_close(found.sums[g], recipe.of(own).sums, rtol=1e-12, atol=1e-13)
