"""What chance may make of a bin: the sums `spread` and `noise` against a slow loop, and laws that they keep."""

import itertools
import math

import oracles
import pytest
import torch
from cases import N_CLASSES
from helpers.bins import N_BINS, REDUCTIONS, WEIGHTS, data, weights_of
from helpers.kernels import BACKENDS, F64, NO_WARNING, class_case, events

import torchcalib as tc
from torchcalib.binned.reading import BinReading
from torchcalib.binnings import Binning
from torchcalib.kernels.bin_op import class_bins, class_sums, event_bins, event_sums
from torchcalib.kernels.bin_sums import bin_index, bin_sums
from torchcalib.kernels.row_op import rows
from torchcalib.predictions import read_input
from torchcalib.statistics import EqualWidthBins


@pytest.fixture(params=REDUCTIONS, ids="-".join)
def how(request):
    return request.param


def bins_of(preds, target, task, reduction, weights=None, with_ecd=False, **options):
    p = read_input(task, preds, target, {**options, "weights": weights})
    return EqualWidthBins(reduction, N_BINS, False, with_ecd, with_noise=True).of(p)


def pairs_of(preds, target, task, reduction):
    """One list of (confidence, outcome) per series."""
    rows = preds.tolist()
    truths = target.tolist()
    if task == "multiclass":
        truths = truths if target.is_floating_point() else [oracles.one_hot(h, N_CLASSES) for h in truths]
        if reduction == "top_label":
            return [[oracles.top_label(q, t) for q, t in zip(rows, truths, strict=True)]]
        return [[(q[k], t[k]) for q, t in zip(rows, truths, strict=True)] for k in range(N_CLASSES)]
    if task == "multilabel":
        return [[(q[k], t[k]) for q, t in zip(rows, truths, strict=True)] for k in range(3)]
    if reduction == "top_label":
        both = zip(*oracles.as_rows(rows, truths), strict=True)
        return [[oracles.top_label(q, t) for q, t in both]]
    return [list(zip(rows, truths, strict=True))]


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "shares"])
def test_slow_loop_noise_of_bins(how, soft):
    preds, target = data(how[0], soft=soft)
    for kind, with_ecd in itertools.product(WEIGHTS, (False, True)):
        weights = weights_of(kind)
        b = bins_of(preds, target, *how, weights, with_ecd)
        w = [1.0] * 50 if weights is None else weights.tolist()
        expected = [
            oracles.noise_of_bins(pairs, w, N_BINS, copies=kind != "importance", soft=soft)
            for pairs in pairs_of(preds, target, *how)
        ]
        expected = torch.tensor(expected, dtype=F64).movedim(1, 0).reshape(2, *b.n.shape)
        torch.testing.assert_close(torch.stack((b.spread, b.noise)), expected, rtol=1e-12, atol=1e-15)
        p = read_input(how[0], preds, target, {"weights": weights})
        without = EqualWidthBins(how[1], N_BINS, False, with_ecd).of(p)
        assert without.spread.isnan().all()
        assert without.noise.isnan().all()
        for name in ("n", "confidence", "frequency", "gap", "ecd"):
            torch.testing.assert_close(getattr(b, name), getattr(without, name), rtol=1e-12, atol=1e-13, equal_nan=True)


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "shares"])
def test_law_integer_weights_are_copies(how, soft):
    preds, target = data(how[0], soft=soft)
    times = torch.arange(50) % 4
    repeated = bins_of(preds.repeat_interleave(times, 0), target.repeat_interleave(times, 0), *how)
    torch.testing.assert_close(bins_of(preds, target, *how, times).sums, repeated.sums, rtol=1e-12, atol=1e-13)
    as_important = bins_of(preds, target, *how, times.double())
    torch.testing.assert_close(as_important.spread, repeated.spread)
    assert (as_important.noise >= repeated.noise).all()
    assert (as_important.noise > repeated.noise).any()


def test_law_rows_of_weight_0_and_rows_that_are_dropped_add_nothing(how):
    preds, target = data(how[0])
    expected = bins_of(preds[1:], target[1:], *how).sums
    spoiled, labels = preds.clone(), target.clone()
    spoiled[0], labels[0] = math.nan, 99
    for weights in (torch.arange(50) > 0, (torch.arange(50) > 0).double()):
        torch.testing.assert_close(bins_of(spoiled, labels, *how, weights).sums, expected)
    dropped = bins_of(spoiled, target, *how, nan_policy="drop")
    torch.testing.assert_close(dropped.sums, expected)
    if how[0] != "multilabel":  # where a label alone can be ignored
        labels[0] = -1
        torch.testing.assert_close(bins_of(preds, labels, *how, ignore_index=-1).sums, expected)


def test_a_bad_row_that_cannot_be_raised_poisons_all_sums_of_its_bin(how):
    preds, target = data(how[0])
    preds[0] = math.nan
    found = torch.vmap(lambda q, t: bins_of(q, t, *how).sums)(preds[None], target[None])[0]
    assert found.isnan().any(-1)[..., [0, 1, 3, 4]].all()  # outcomes of class k hold the rows of class k


def test_sums_of_noise_are_constants_to_autograd(how):
    preds, target = data(how[0])
    preds.requires_grad_()
    weights = weights_of("importance").requires_grad_()
    b = bins_of(preds, target, *how, weights, validate_args=False)
    of_noise = torch.autograd.grad(
        (b.spread + b.noise).sum(), (preds, weights), retain_graph=True, allow_unused=True, materialize_grads=True
    )
    assert not any(gradient.any() for gradient in of_noise)
    found = torch.autograd.grad((b.share * b.gap.abs()).sum(), (preds, weights))
    bare = EqualWidthBins(how[1], N_BINS, False).of(
        read_input(how[0], preds, target, {"weights": weights, "validate_args": False})
    )
    torch.testing.assert_close(found, torch.autograd.grad((bare.share * bare.gap.abs()).sum(), (preds, weights)))


@NO_WARNING
def test_noise_in_forward_mode_and_compiled_and_mapped(how):
    preds, target = data(how[0])

    def sums(q):
        return bins_of(q, target, *how, validate_args=False).sums

    _, tangent = torch.func.jvp(sums, (preds,), (torch.ones_like(preds),))
    assert not tangent[..., 3:, :].any()
    assert tangent[..., 1, :].any()
    torch.testing.assert_close(torch.vmap(sums)(preds[None])[0], sums(preds))
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(sums, fullgraph=True, backend="eager")(preds), sums(preds))


def test_law_noise_is_the_variance_of_outcomes_of_a_calibrated_model():
    """Labels and shares of votes, drawn anew many times: the variance of the sum of outcomes of every bin."""
    draws, n, n_votes = 4000, 200, 5
    generator = torch.Generator().manual_seed(0)
    preds = torch.rand(n, generator=generator, dtype=F64)
    importance = torch.rand(n, generator=generator, dtype=F64)
    votes = torch.rand(draws, n, n_votes, generator=generator) < preds.unsqueeze(-1)
    many = preds.expand(draws, n)
    for target in (votes[..., 0].long(), votes.double().mean(-1)):
        b = bins_of(many, target, "binary", "positive_class", importance.expand(draws, n))
        # A variance of 4,000 draws is off by about sqrt(2 / 4,000) = 2.2 % of it; four of these.
        torch.testing.assert_close(b.outcomes.var(0), b.noise.mean(0), rtol=0.09, atol=0)


def test_streaming_errors_sum_the_noise_and_functions_and_replicates_do_not():
    preds, target = data("binary")
    metric = tc.ECE(task="binary", n_bins=N_BINS, with_ecd=True)
    for some in torch.arange(50).split(13):
        metric.update(preds[some], target[some])
    b = metric.statistic()
    whole = bins_of(preds, target, "binary", "positive_class", with_ecd=True)
    torch.testing.assert_close(b.sums, whole.sums)
    assert b.has_noise
    assert (b + b).has_noise
    torch.testing.assert_close((b + b).noise, 2 * whole.noise)
    assert metric.state.numel() == 3 + 6 * N_BINS  # after two counts what tells shares from labels
    assert not BinReading("binary", Binning(n_bins=N_BINS)).recipe().with_noise
    replicates = tc.Bootstrapped(metric, n_replicates=50)
    assert not replicates.recipe.with_noise
    assert replicates.state.numel() == 2 + 51 * 4 * N_BINS + 1


def test_cells_are_what_the_sums_are_made_of(how):
    for kind in WEIGHTS:
        preds, target = data(how[0])
        p = read_input(how[0], preds, target, {"weights": weights_of(kind)})
        recipe = EqualWidthBins(how[1], N_BINS, False, with_ecd=True, with_noise=True)
        cells = recipe.cells(p)
        index = cells.index.unsqueeze(-2).expand(cells.columns.shape)
        sums = cells.columns.new_zeros((*cells.columns.shape[:-1], N_BINS)).scatter_add(-1, index, cells.columns)
        torch.testing.assert_close(sums, recipe.of(p).sums)
        assert recipe.of(p).sums.shape == recipe.shape(how[0], 3 if how[0] == "multilabel" else N_CLASSES)


# The kernels.

KERNELS = [*BACKENDS, "masked"]


def noise_columns(confidence, outcome, weights, noise, copies):
    """What every event adds to the two sums, in float64; a row of weight 0 nothing."""
    p, w = confidence.double(), torch.ones_like(confidence, dtype=F64) if weights is None else weights
    variance = (outcome.double() - p) ** 2 if noise == "shares" else p * (1 - p)
    columns = w * p * (1 - p), (w if copies else w**2) * variance
    return [column.masked_fill(w == 0, 0) for column in columns]


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(
    ("outcome_dtype", "with_ecd"), [(torch.bool, True), (torch.int64, False), (torch.float32, True)], ids=str
)
def test_noise_of_events_of_every_kernel(backend, outcome_dtype, with_ecd):
    """3,001 terms below 4 in any order: 3,001 * 2^-53 * 3,001 * 4 / 7 = 5.7e-10 at most."""
    confidence, outcome, weights, ecd = events(3001)
    outcome = outcome.to(outcome_dtype)
    if outcome_dtype == torch.int64:
        outcome[70:75] = -3  # no label, which is for others to refuse
    confidence[:2], outcome[:2] = math.nan, 1
    weights[:2] = 0
    for noise, w, copies in itertools.product(("labels", "shares"), (None, weights), (True, False)):
        given = confidence.nan_to_num(), outcome, w, ecd if with_ecd else None
        given = given if w is None else (confidence, *given[1:])
        found = event_bins(*given, n_bins=7, noise=noise, copies=copies, backend=backend)
        expected = event_bins(*given, n_bins=7, backend="torch")
        torch.testing.assert_close(found[[0, 1, 2, *([5] if with_ecd else [])]], expected, rtol=1e-12, atol=6e-10)
        columns = noise_columns(*given[:3], noise, copies or w is None)
        columns = [column.nan_to_num() for column in columns]
        expected = bin_sums(bin_index(given[0], 7), columns, 7)
        torch.testing.assert_close(found[3:5], expected, rtol=1e-12, atol=6e-10)


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize(("n_classes", "n_bins"), [(2, 1), (10, 15), (1030, 40)])
def test_noise_of_classes_of_every_kernel(backend, from_logits, n_classes, n_bins):
    values, target, weights = class_case(60, n_classes, from_logits, n_bins=n_bins)
    wide = values.double().softmax(-1) if from_logits else values.double()
    for w, copies in ((None, True), (weights, True), (weights, False)):
        found = rows(values, target, from_logits=from_logits, backend="torch")
        options = {"from_logits": from_logits, "n_bins": n_bins, "copies": copies, "backend": backend}
        sums = class_bins(values, target, w, found, noise=True, **options)
        # The loops with noise and without are compiled apart, and each may contract other products and sums.
        without = class_bins(values, target, w, found, **options)
        torch.testing.assert_close(sums[..., :3, :], without, rtol=4e-6, atol=1e-12)
        if w is None:
            assert torch.equal(sums[..., [0, 2], :], without[..., [0, 2], :])  # counts
        columns = noise_columns(wide, wide, None if w is None else w.unsqueeze(-1), "labels", copies)
        expected = bin_sums(bin_index(wide, n_bins).T, [column.T for column in columns], n_bins)
        # q (1 - q) is off by at most 2e-6 q, and no weight exceeds 1.
        assert ((sums[..., 3:, :] - expected).abs() <= 2e-6 * without[..., 1:2, :] + 1e-12).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_law_noise_in_derivatives_is_a_constant(backend):
    """With the two sums and without them, all other derivatives are the same."""
    confidence, outcome, weights, ecd = events(40, F64)
    values, target, _ = class_case(40, 6, True, n_bins=5)
    slope = torch.randn(6, 6, 5, generator=torch.Generator().manual_seed(1), dtype=F64)
    found = rows(values, target, from_logits=True)
    gradients = []
    for noise in (True, False):
        leaves = [x.clone().requires_grad_() for x in (confidence, outcome.double(), weights, ecd, values)]
        of_events = event_bins(*leaves[:4], n_bins=5, noise="shares" if noise else "none", backend=backend)
        options = {"from_logits": True, "n_bins": 5, "noise": noise, "backend": backend}
        of_classes = class_bins(leaves[4], target, leaves[2], found, **options)
        kept = [0, 1, 2, 5] if noise else [0, 1, 2, 3]
        loss = (of_events[kept] * slope[0, kept if noise else [0, 1, 2, 5]]).sum()
        loss = loss + (of_classes[:, :3] * slope[:, :3]).sum() + of_events.detach().sum()
        loss = loss + 0 * of_events.sum() + (7 * of_events[3:5].sum() + 7 * of_classes[:, 3:].sum() if noise else 0)
        gradients.append(torch.autograd.grad(loss, leaves))
    for with_noise, without in zip(*gradients, strict=True):
        close = {"rtol": 1e-12, "atol": 1e-14} if without.dtype == F64 else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(with_noise, without, **close)


def test_with_noise_they_are_operations_as_torch_wants_them():
    confidence, outcome, weights, ecd = events(20)
    for noise, w, d in (("labels", None, None), ("shares", weights, ecd)):
        given = confidence.clone().requires_grad_(), outcome, w, d
        torch.library.opcheck(event_sums.registered, (*given, None, 1, 5, False, noise, False, "auto"))
    values, target, weights = class_case(12, 7, True)
    found = rows(values, target, from_logits=True)
    given = values.clone().requires_grad_(), target, weights, found.top, found.confidence
    torch.library.opcheck(class_sums.registered, (*given, True, 5, False, True, False, "auto"))
