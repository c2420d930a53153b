"""Sampling noise of bins: the sums of noise compared with a slow loop, and laws."""

import itertools

import oracles
import pytest
import torch
from cases import N_CLASSES
from helpers.kernels import F64

import torchcalib as tc
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.inputs import read_input
from torchcalib.core.ranked_bins import Binning
from torchcalib.functional.binned import binned, ece_from_bins

N_BINS, N_GROUPS = 5, 6
MODES = [("binary", "positive"), ("binary", "top_label"), ("multiclass", "top_label"),
              ("multiclass", "classwise"), ("multilabel", "classwise")]  # fmt: skip


def data(task, n=50, soft=False):
    """Return probabilities, and labels or soft targets."""
    generator = torch.Generator().manual_seed(0)
    if task == "multiclass":
        preds, shares = (torch.randn(n, N_CLASSES, generator=generator, dtype=F64).softmax(-1) for _ in range(2))
        return preds, shares if soft else torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    shape = (n,) if task == "binary" else (n, 3)
    preds, shares = (torch.rand(shape, generator=generator, dtype=F64) for _ in range(2))
    return preds, shares if soft else (shares < preds).long()


def weights_of(kind, n=50):
    generator = torch.Generator().manual_seed(3)
    copies = torch.randint(0, 4, (n,), generator=generator)
    return {"none": None, "copies": copies, "importance": copies * torch.rand(n, generator=generator, dtype=F64)}[kind]


def read(task, preds, target, weights, held=slice(None)):
    return read_input(task, preds[held], target[held], {"weights": None if weights is None else weights[held]})


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "shares"])
@pytest.mark.parametrize("how", MODES, ids="-".join)
def test_noise_of_bins_cells_and_groups_equals_slow_loop(how, soft):
    task, mode = how
    preds, target = data(task, soft=soft)
    groups = torch.arange(50) % (N_GROUPS - 1)  # the last group has no rows
    width = 3 if task == "multilabel" else N_CLASSES
    for kind, with_ecd in itertools.product(("none", "copies", "importance"), (False, True)):
        weights = weights_of(kind)
        p = read(task, preds, target, weights)
        accumulator = EqualWidthBins(mode, N_BINS, False, with_ecd, with_noise=True)
        b = accumulator.from_predictions(p)
        assert b.sums.shape == accumulator.shape(task, width)
        w = [1.0] * 50 if weights is None else weights.tolist()
        expected = [
            oracles.noise_of_bins(pairs, w, N_BINS, copies=kind != "importance", soft=soft)
            for pairs in oracles.events(*how, preds.tolist(), target.tolist())
        ]
        expected = torch.tensor(expected, dtype=F64).movedim(1, 0).reshape(4, *b.n.shape)
        found = torch.stack((b.spread, b.noise, b.weight_square, b.residual_square))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
        without = EqualWidthBins(mode, N_BINS, False, with_ecd).from_predictions(p)
        assert torch.stack((without.spread, without.noise, without.gap_variance)).isnan().all()
        for name in ("n", "confidence", "frequency", "gap", "ecd"):
            torch.testing.assert_close(getattr(b, name), getattr(without, name), rtol=1e-12, atol=1e-13, equal_nan=True)
        cells = accumulator.cells(p)
        index = cells.index.unsqueeze(-2).expand(cells.columns.shape)
        sums = cells.columns.new_zeros((*cells.columns.shape[:-1], N_BINS)).scatter_add(-1, index, cells.columns)
        torch.testing.assert_close(sums, b.sums)
        by_group = accumulator.of_groups(p, groups[None] if task == "multilabel" else groups, N_GROUPS).sums
        assert not by_group[-1].any()
        for g, found in enumerate(by_group[:-1]):
            own = accumulator.from_predictions(read(task, preds, target, weights, groups == g))
            torch.testing.assert_close(found, own.sums, rtol=1e-12, atol=1e-13)


def test_only_streaming_errors_sum_the_noise():
    preds, target = data("binary")
    metric = tc.ECE(task="binary", n_bins=N_BINS, with_ecd=True)
    for some in torch.arange(50).split(13):
        metric.update(preds[some], target[some])
    b = metric.statistic()
    accumulator = EqualWidthBins("positive", N_BINS, False, True, with_noise=True)
    whole = accumulator.from_predictions(read("binary", preds, target, None))
    torch.testing.assert_close(b.sums, whole.sums)
    assert b.has_noise
    assert (b + b).has_noise
    torch.testing.assert_close((b + b).noise, 2 * whole.noise)
    assert metric.state.numel() == 3 + 8 * N_BINS  # two row counts and the kind of targets, then the sums
    assert not binned(ece_from_bins, Binning(n_bins=N_BINS), "binary", None, "macro", {}).accumulator.with_noise
    replicates = tc.Bootstrapped(metric, n_replicates=50)
    assert not replicates.kind.accumulator.accumulator.with_noise
    assert replicates.state.numel() == 2 + 51 * 4 * N_BINS + 2  # and the numbers of all and of clustered rows
