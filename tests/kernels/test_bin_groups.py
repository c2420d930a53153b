"""Sums over the bins of every group: those of one group after the other; the same in every run."""

import itertools
import math

import pytest
import torch
from cases import N_CLASSES
from helpers.bins import REDUCTIONS, WEIGHTS, data, weights_of
from helpers.kernels import BACKENDS, F64, NO_WARNING, events, threads_of_torch

from torchcalib.kernels.bin_op import event_bins, event_sums
from torchcalib.predictions import read_input
from torchcalib.statistics import EqualWidthBins

KERNELS = [*BACKENDS, "masked"]
G = 6


def grouped(n, dtype=torch.float32, seed=0):
    """Events, and groups of them, of which the last has none and the first most."""
    generator = torch.Generator().manual_seed(seed)
    groups = torch.randint(0, 2 * (G - 1), (n,), generator=generator)
    return *events(n, dtype, seed), groups.masked_fill(groups >= G - 1, 0)


def one_by_one(columns, groups, **options):
    """The sums of each group alone, by tensor operations."""
    held = [[None if x is None else x[groups == g] for x in columns] for g in range(G)]
    return torch.stack([event_bins(*some, **options, backend="torch") for some in held])


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "right", "n_bins"),
    [(torch.float32, False, 15), (torch.float32, True, 1), (F64, True, 15), (torch.bfloat16, False, 15)],
    ids=str,
)
def test_law_groups_are_a_loop(backend, dtype, right, n_bins):
    """2,500 terms below 4 in any order: 2,500 * 2^-53 * 2,500 * 4 = 3e-9 at most, in practice 1e-12."""
    confidence, outcome, weights, ecd, groups = grouped(2500, dtype)
    edges = torch.arange(n_bins + 1) / n_bins
    confidence[: n_bins + 1] = edges.to(dtype)
    kinds = ("none", "labels", "shares"), ((None, True), (weights, True), (weights, False)), (None, ecd)
    if dtype != torch.float32:  # every kind is compiled anew for a dtype
        kinds = ("labels",), ((None, True), (weights, False)), (None,)
    for noise, (w, copies), d in itertools.product(*kinds):
        options = {"n_bins": n_bins, "right": right, "noise": noise, "copies": copies}
        columns = confidence, outcome.double() if noise == "shares" else outcome, w, d
        found = event_bins(*columns, **options, groups=groups, n_groups=G, backend=backend)
        torch.testing.assert_close(found, one_by_one(columns, groups, **options), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("backend", KERNELS)
def test_outcomes_of_groups_may_be_any_integers(backend):
    confidence, outcome, _, _, groups = grouped(5000)
    outcome = outcome.long()
    for place, value in ((0, -3), (2000, 2**40), (4999, 7)):
        outcome[place] = value
        for noise in ("none", "labels"):
            found = event_bins(confidence, outcome, n_bins=15, noise=noise, groups=groups, n_groups=G, backend=backend)
            expected = one_by_one((confidence, outcome, None, None), groups, n_bins=15, noise=noise)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("backend", KERNELS)
def test_law_series_of_groups_are_a_loop_and_groups_may_be_shared(backend):
    confidence, outcome, weights, _, groups = (x.view(2, 3, 10) for x in grouped(60))
    options = {"n_bins": 5, "noise": "labels", "n_groups": G, "backend": backend}
    for of_rows in (groups, groups[0, 0], groups[:, :1]):
        whole = event_bins(confidence, outcome, weights, groups=of_rows, **options)
        assert whole.shape == (2, 3, G, 5, 5)
        for i, j in itertools.product(range(2), range(3)):
            own = of_rows.expand(2, 3, 10)[i, j]
            one = event_bins(confidence[i, j], outcome[i, j], weights[i, j], groups=own, **options)
            torch.testing.assert_close(whole[i, j], one)
    none = event_bins(confidence[..., :0], outcome[..., :0], groups=groups[..., :0], **options)
    assert torch.equal(none, torch.zeros(2, 3, G, 5, 5, dtype=F64))


@pytest.mark.parametrize("backend", KERNELS)
def test_nan_stays_in_the_cell_of_its_event_and_weight_0_is_never_read(backend):
    confidence, outcome, weights, ecd, groups = grouped(400)
    options = {"n_bins": 5, "noise": "labels", "groups": groups, "n_groups": G, "backend": backend}
    clean = event_bins(confidence, outcome, weights, ecd, **options)
    confidence[0], ecd[0] = math.nan, math.inf  # of weight 0
    assert torch.equal(event_bins(confidence, outcome, weights, ecd, **options), clean)
    weights[1], ecd[2] = math.nan, math.nan
    bad = event_bins(confidence, outcome, weights, ecd, **options).isnan()
    at = (5 * confidence).int()
    expected = torch.zeros_like(bad)
    expected[groups[1], :, at[1]] = True
    expected[groups[2], 5, at[2]] = True
    assert torch.equal(bad, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_groups_are_the_same_in_every_run_and_on_any_number_of_threads(backend):
    confidence, outcome, weights, ecd, groups = grouped(700_001)
    options = {"n_bins": 15, "noise": "labels", "n_groups": 900, "backend": backend}
    found = []
    for threads in (1, 2, 3, 3):
        with threads_of_torch(threads):
            found.append(event_bins(confidence, outcome, weights, ecd, groups=groups, **options))
    assert all(torch.equal(found[0], other) for other in found[1:])
    options |= {"n_groups": 1, "backend": "torch"}
    whole = event_bins(confidence, outcome, weights, ecd, groups=None, **options)
    # n terms in other orders: 2 n 2^-53 = 1.6e-10 times the sum of magnitudes, for ECD below 4 times the weight.
    assert ((found[0].sum(0) - whole).abs() <= 1.6e-10 * 4 * whole[:1]).all()


@NO_WARNING
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_groups_of_any_kind(backend):
    confidence, outcome, weights, ecd, groups = grouped(8, F64)
    leaves = [x.clone().requires_grad_() for x in (0.1 + 0.8 * confidence, outcome.double(), weights + 0.1, ecd)]

    def take(c, o, w, d):
        return event_bins(c, o, w, d, n_bins=3, groups=groups, n_groups=G, backend=backend)

    assert torch.autograd.gradcheck(take, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(take, leaves)
    options = {"n_bins": 3, "noise": "shares", "backend": backend}
    slope = torch.randn(G, 6, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = torch.autograd.grad((event_bins(*leaves, groups=groups, n_groups=G, **options) * slope).sum(), leaves)
    expected = torch.autograd.grad((one_by_one(leaves, groups, n_bins=3, noise="shares") * slope).sum(), leaves)
    torch.testing.assert_close(found, expected)
    ones = tuple(torch.ones_like(leaf) for leaf in leaves)
    _, tangent = torch.func.jvp(lambda *x: event_bins(*x, groups=groups, n_groups=G, **options), tuple(leaves), ones)
    _, parted = torch.func.jvp(lambda *x: one_by_one(x, groups, n_bins=3, noise="shares"), tuple(leaves), ones)
    torch.testing.assert_close(tangent, parted)


def test_groups_are_an_argument_as_torch_wants_it():
    confidence, outcome, weights, ecd, groups = grouped(20)
    for noise, w, d in (("none", None, None), ("shares", weights, ecd)):
        given = confidence.clone().requires_grad_(), outcome, w, d, groups, G
        torch.library.opcheck(event_sums.registered, (*given, 5, False, noise, False, "auto"))
    stacked = torch.stack((confidence, confidence / 2), 1)
    options = {"n_bins": 5, "groups": groups, "n_groups": G}
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
