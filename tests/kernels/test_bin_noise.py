"""What chance may make of a bin: the sums `spread` and `noise` of statistics against a slow loop, and laws."""

import itertools

import oracles
import pytest
import torch
from cases import N_CLASSES
from helpers.bins import N_BINS, REDUCTIONS, WEIGHTS, data, weights_of
from helpers.kernels import F64

import torchcalib as tc
from torchcalib.binned.reading import BinReading
from torchcalib.binnings import Binning
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
    rows, truths = preds.tolist(), target.tolist()
    if task == "multiclass" and not target.is_floating_point():
        truths = [oracles.one_hot(h, N_CLASSES) for h in truths]
    if task == "binary" and reduction == "top_label":
        rows, truths = oracles.as_rows(rows, truths)
    if reduction == "top_label":
        return [[oracles.top_label(q, t) for q, t in zip(rows, truths, strict=True)]]
    if task == "binary":
        return [list(zip(rows, truths, strict=True))]
    return [[(q[k], t[k]) for q, t in zip(rows, truths, strict=True)] for k in range(len(rows[0]))]


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
        assert torch.stack((without.spread, without.noise)).isnan().all()
        for name in ("n", "confidence", "frequency", "gap", "ecd"):
            torch.testing.assert_close(getattr(b, name), getattr(without, name), rtol=1e-12, atol=1e-13, equal_nan=True)


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
