"""Bin sums of events and of groups compared with a slow loop: values, edges, NaN and repeatability."""

import itertools
import math
from functools import cache

import numpy as np
import oracles
import pytest
import torch
from helpers.kernels import F64, assert_same_on_any_number_of_threads, events, of_backends

from torchcalib.ops.bin_sums import event_bins
from torchcalib.ops.bin_sums.formula import Bins, event_formula
from torchcalib.ops.dispatch import implementation
from torchcalib.ops.segments import bin_index, bin_sums

INF, NAN = math.inf, math.nan
G = 6
bin_of = cache(oracles.bin_of)


def grouped(n, dtype=torch.float32):
    """Return events and group numbers. The last group is empty, and the first has most events."""
    groups = torch.randint(0, 2 * (G - 1), (n,), generator=torch.Generator().manual_seed(0))
    return *events(n, dtype), groups.masked_fill(groups >= G - 1, 0)


def slow(confidence, outcome, weights=None, ecd=None, *, n_bins, noise, copies, right=False, groups=None, n_groups=1):
    """Compute `event_bins` by definition: a loop over Python floats, with exact sums."""
    n = len(confidence)
    columns = [[1] * n if x is None else x.tolist() for x in (weights, ecd)]
    of_groups = [0] * n if groups is None else groups.tolist()
    terms = [[[[] for _ in range(n_bins)] for _ in range(8)] for _ in range(n_groups)]
    for c, o, w, d, g in zip(confidence.tolist(), outcome.tolist(), *columns, of_groups, strict=True):
        if w == 0:
            continue
        b = bin_of(c, n_bins, right)
        square, residual = w if copies else w**2, (o - c) ** 2
        variance = square * (residual if noise == "shares" else c * (1 - c))
        of_event = w, w * c, w * o, w * c * (1 - c), variance, square, w * residual, w * d
        for held, term in zip(terms[g], of_event, strict=True):
            held[b].append(term)
    sums = torch.tensor([[[math.fsum(cell) for cell in held] for held in own] for own in terms], dtype=F64)
    kept = [0, 1, 2, *([] if noise == "none" else [3, 4, 5, 6]), *([] if ecd is None else [7])]
    return sums[0, kept] if groups is None else sums[:, kept]


@of_backends
@pytest.mark.parametrize(
    ("dtype", "right", "n_bins", "every"),
    [pytest.param(torch.float32, False, 15, True, marks=pytest.mark.extended), (torch.float32, False, 15, False),
     (torch.float32, True, 1, False), (F64, True, 2, False), (F64, False, 100, False), (F64, True, 15, False),
     (torch.bfloat16, False, 15, False)],
    ids=str,
)  # fmt: skip
def test_event_bins_equal_slow_loop(backend, dtype, right, n_bins, every):
    """2,500 terms below 4 in any order have an error of at most 2,500 * 2^-53 * 2,500 * 4 = 3e-9, and usually 1e-12."""
    confidence, outcome, weights, ecd, groups = grouped(2500, dtype)
    confidence[: n_bins + 1] = (torch.arange(n_bins + 1) / n_bins).to(dtype)
    shares, unweighted, counted, weighted = 0.9 * outcome.double(), (None, True), (weights, True), (weights, False)
    # each combination is compiled on its own
    kinds = [(outcome, "none", counted, ecd, None), (outcome, "none", unweighted, None, None)]
    kinds += [(outcome, "labels", w, None, groups) for w in (unweighted, weighted)]
    if dtype == torch.float32:
        kinds += [(shares, "shares", weighted, ecd, None), (outcome.to(torch.uint8), "labels", weighted, ecd, groups)]
    if every:
        given_of = {"none": outcome, "labels": outcome, "shares": shares}
        found = itertools.product(given_of, (unweighted, counted, weighted), (None, ecd), (None, groups))
        kinds = [(given_of[kind[0]], *kind) for kind in found]
        dtypes = torch.uint8, torch.int64, torch.float32, F64
        kinds += [(outcome.to(x), "none", counted, ecd, None) for x in dtypes]
    for given, noise, (w, copies), d, of in kinds:
        options = {"n_bins": n_bins, "right": right, "noise": noise, "copies": copies}
        options |= {} if of is None else {"groups": of, "n_groups": G}
        expected = slow(confidence, given, w, d, **options)
        found = event_bins(confidence, given, w, d, **options, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-10)
        bins = Bins(n_bins, right, noise, copies, G if of is not None else 1)
        formula = event_formula(confidence, given, w, d, of, bins)
        torch.testing.assert_close(formula, expected, rtol=1e-12, atol=1e-10)


@of_backends
def test_outcomes_may_be_any_integers(backend):
    confidence, outcome, weights, _, groups = grouped(5000)
    outcome = outcome.long()
    kinds = [(noise, None, of) for noise in ("none", "labels") for of in ({}, {"groups": groups, "n_groups": G})]
    for place, value in ((0, -3), (2000, 2**40), (4999, 7)):
        outcome[place] = value
        for noise, w, of in [*kinds, ("shares", weights, {})]:
            options = {"n_bins": 15, "noise": noise, "copies": False, **of}
            found = event_bins(confidence, outcome, w, **options, backend=backend)
            torch.testing.assert_close(found, slow(confidence, outcome, w, **options), rtol=1e-12, atol=1e-11)


@of_backends
@pytest.mark.parametrize("n", [40, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("ignored", [None, 255, 1, -1])
def test_labelled_events_equal_slow_loop(backend, n, dtype, ignored):
    """The outcome is that the label is the event. Rows with the ignored label may have any values."""
    source = implementation("events", backend)
    confidence, _, weights, _, groups = grouped(n, dtype)
    confidence[n - 2] = 0.5
    label = torch.randint(0, 3, (n,), generator=torch.Generator().manual_seed(1))
    weights, weight_of = weights + 0.5, {None: None, "copies": True, "importance": False}
    kept = torch.ones(n, dtype=torch.bool)
    if ignored is not None:
        label[::3] = ignored
        label[n - 2] = 2
        kept, weight_of = label != ignored, {None: None}
        confidence[~kept] = torch.tensor([NAN, -1, 7, INF]).to(dtype).repeat(n)[: int((~kept).sum())]
    kinds = itertools.product(("none", "labels"), weight_of, (None, groups))
    for k, (noise, kind, of) in enumerate(kinds):
        w, event = None if kind is None else weights, k % 3
        options = {"n_bins": 7, "right": k % 2 == 1, "noise": noise, "copies": weight_of[kind] is not False}
        of_groups = {} if of is None else {"groups": of[kept], "n_groups": G}
        outcome = (label == event)[kept].double()
        expected = slow(confidence[kept], outcome, None if w is None else w[kept], **options, **of_groups)
        expected = expected if of is None else expected.movedim(0, 1).flatten(1)
        bins, sums = Bins(*options.values()), np.zeros(expected.shape)
        columns = [None if x is None else x.numpy().copy() for x in (confidence, label, w, of)]
        how = {"event": event, "n_labels": 3, "ignored": ignored}
        assert source.add_labelled(*columns, bins, sums, **how)
        torch.testing.assert_close(torch.from_numpy(sums), expected, rtol=1e-12, atol=1e-11)
        before = sums.copy()
        for p, y in ((1.5, 0), (-0.5, 0), (NAN, 0), (0.5, 3), (0.5, -2)):  # an invalid row that is not ignored
            columns[0][n - 2], columns[1][n - 2] = p, y
            assert not source.add_labelled(*columns, bins, sums, **how)
            assert np.array_equal(sums, before)


@pytest.mark.parametrize("most", [0, 2**15], ids=["one part", "parts"])
def test_plain_labelled_events_are_added_in_blocks(most, monkeypatch):
    source = implementation("events", "torch")
    confidence, _, weights, _, groups = (None if x is None else x.numpy() for x in grouped(1000, torch.float32))
    label, bins = (np.arange(1000) % 3 == 0).astype(np.int64), Bins(7, False, "labels", False)
    sums = np.zeros((2, 7, 7 * G))
    assert source.add_labelled(confidence, label, weights + 0.5, groups, bins, sums[0])
    monkeypatch.setattr(source, "_BLOCK", 64)
    monkeypatch.setattr(source, "_MAX_SUMS", most)
    monkeypatch.setattr("torchcalib.ops.threads.PER_RANGE", 64)
    assert source.add_labelled(confidence, label, weights + 0.5, groups, bins, sums[1])
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-12)
    label[900] = 2
    assert not source.add_labelled(confidence, label, weights + 0.5, groups, bins, sums[1])


@of_backends
@pytest.mark.parametrize("kind", ["float32", "float64", "int64", "uint8", "bool"])
@pytest.mark.parametrize("ignored", [None, 255])
def test_rows_of_weight_0_may_be_invalid_and_invalid_weights_are_found(backend, kind, ignored):
    source, n = implementation("events", backend), 2500
    confidence, outcome, _, _, groups = (x.numpy().copy() for x in grouped(n) if x is not None)
    label, weights = (outcome > 0.5).astype(np.int64), (np.arange(n) % 3).astype(kind)
    confidence[weights == 0] = NAN
    label[weights == 0] = 7
    keep = weights != 0
    if ignored is not None:
        label[1::5] = ignored
        keep &= label != ignored
    for noise, copies, of in itertools.product(("none", "labels"), (True, False), (None, groups)):
        bins, shape = Bins(7, False, noise, copies), (3 if noise == "none" else 7, 7 if of is None else 7 * G)
        found, expected = np.zeros(shape), np.zeros(shape)
        assert source.add_labelled(confidence, label, weights, of, bins, found, ignored=ignored)
        kept = confidence[keep], label[keep], weights[keep].astype(float), None if of is None else of[keep]
        assert source.add_labelled(*kept, bins, expected)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-11)
        invalid = {"f": (-1, NAN, INF), "i": (-1,)}.get(weights.dtype.kind, ())
        for w in (*invalid, *((1e-200, 1e200) if kind == "float64" else ())):
            column, of_bins = weights.copy(), np.zeros(shape)
            column[n - 2] = w
            assert not source.add_labelled(confidence, label, column, of, bins, of_bins, ignored=ignored)
        if ignored is not None and invalid:  # weights of ignored rows are not used
            column = weights.copy()
            column[1] = -1
            assert source.add_labelled(confidence, label, column, of, bins, np.zeros(shape), ignored=ignored)


@of_backends
@pytest.mark.parametrize("n_bins", [1, 3, 10, 15, 49, 1000])
def test_bin_edges_and_their_neighbours_get_the_bin_of_bin_index(backend, n_bins):
    edges = torch.arange(n_bins + 1, dtype=F64) / n_bins
    near = [torch.nextafter(edges, torch.full_like(edges, far)) for far in (2, -1)]
    beyond = torch.tensor([-0.0, NAN, -1, 2, INF, -INF], dtype=F64)
    values = torch.cat((edges, *near, beyond, edges.float().double()))
    for right, confidence in itertools.product((False, True), (values, values.float())):
        index = bin_index(confidence, n_bins, right)
        outcome = torch.zeros(len(confidence), 1)  # each value is a separate batch element
        found = event_bins(confidence.unsqueeze(-1), outcome, n_bins=n_bins, right=right, backend=backend)
        assert torch.equal(found[:, 0], torch.nn.functional.one_hot(index, n_bins).double())


@of_backends
@pytest.mark.parametrize(
    ("dtype", "n_bins"), [(torch.float32, 15), (torch.float32, 20_000), (F64, 15), (torch.bfloat16, 20_000)], ids=str
)
def test_counts_of_many_events_are_exact_and_outcomes_may_be_any_integers(backend, dtype, n_bins):
    confidence, outcome, _, _ = events(150_000, dtype)
    confidence[1000:3000] = (15 * confidence[1000:3000]).round() / 15  # on bin edges, up to rounding to the dtype
    outcome = outcome.long()
    index = bin_index(confidence, n_bins)
    for part, value in ((slice(0), 0), (slice(70_000, 70_100), -3), (slice(140_000, 140_001), 2**40)):
        outcome[part] = value
        found = event_bins(confidence, outcome, n_bins=n_bins, backend=backend)
        assert torch.equal(found[0], torch.bincount(index, minlength=n_bins).double())
        assert torch.equal(found[2], torch.zeros(n_bins).double().index_add(0, index, outcome.double()))
        expected = torch.zeros(n_bins).double().index_add(0, index, confidence.double())
        # Both sums of positive terms have a relative error of at most 150,000 * 2^-53 = 1.7e-11 in any order.
        torch.testing.assert_close(found[1], expected, rtol=4e-11, atol=0)


@of_backends
@pytest.mark.parametrize("has_groups", [False, True])
def test_nan_affects_only_the_cell_of_its_event(backend, has_groups):
    confidence, outcome, weights, ecd, groups = grouped(400)
    groups = groups if has_groups else torch.zeros_like(groups)
    options = {"n_bins": 5, "noise": "labels", "groups": groups if has_groups else None, "backend": backend}
    options["n_groups"] = G if has_groups else 1
    at = (5 * confidence).int()
    weights[1], ecd[2], confidence[3] = NAN, NAN, NAN
    bad = event_bins(confidence, outcome, weights, ecd, **options).isnan()
    expected = torch.zeros(options["n_groups"], 8, 5, dtype=torch.bool)
    expected[groups[1], :, at[1]] = True
    expected[groups[2], 7, at[2]] = True
    expected[groups[3], [1, 3, 4, 6], 0] = True
    assert torch.equal(bad, expected if has_groups else expected[0])


@of_backends
@pytest.mark.parametrize("n_groups", [1, 900])
def test_sums_are_the_same_in_every_run_and_on_any_number_of_threads(backend, n_groups):
    confidence, outcome, weights, ecd, groups = grouped(700_001)
    options = {"n_bins": 15, "backend": backend}
    options |= {"groups": groups, "n_groups": n_groups, "noise": "labels"} if n_groups > 1 else {}
    (found,) = assert_same_on_any_number_of_threads(lambda: [event_bins(confidence, outcome, weights, ecd, **options)])
    p = confidence.double()
    spread, residual = p * (1 - p), (outcome.double() - p).square()
    noise = [spread, spread, torch.ones_like(p), residual] if n_groups > 1 else []
    wide = [weights * x for x in (torch.ones_like(ecd), p, outcome.double(), *noise, ecd)]
    index = bin_index(confidence, 15)
    whole = found.sum(0) if n_groups > 1 else found
    # Two sums of n terms in different orders differ by at most 2 n 2^-53 times the sum of magnitudes.
    magnitude = bin_sums(index, [x.abs() for x in wide], 15)
    assert ((whole - bin_sums(index, wide, 15)).abs() <= 1.6e-10 * magnitude).all()


@of_backends
@pytest.mark.parametrize("noise", ["none", "labels"])
@pytest.mark.parametrize("n_series", [2, 7, 80])
def test_columns_of_a_matrix_have_the_sums_of_separate_series(backend, n_series, noise):
    """Multi-label input is a transposed view. Sums of at most n terms have a relative error below n eps."""
    generator = torch.Generator().manual_seed(n_series)
    for n in (1, 5, 3000):
        confidence = torch.rand(n, n_series, generator=generator)
        confidence[0, 0] = torch.nan
        outcome = torch.randint(0, 2, (n, n_series), generator=generator)
        outcome[-1, 1] = 3
        given = {"n_bins": 15, "noise": noise, "backend": backend}
        found = event_bins(confidence.T, outcome.T, **given)
        expected = [event_bins(confidence[:, k].clone(), outcome[:, k].clone(), **given) for k in range(n_series)]
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=0, equal_nan=True)
