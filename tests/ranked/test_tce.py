"""Test-based calibration error against slow loops, closed forms and laws."""

from itertools import pairwise

import pytest
import torch
from helpers.ranked import F64, KINDS, N_CLASSES, NORMS, SETTINGS, assert_slow_loop, sample
from oracles import ranked as oracle

import torchcalib as tc


@pytest.mark.parametrize(
    ("bins", "norm", "task", "how"),
    [
        pytest.param(bins, NORMS[(i + j) % 3], task, how, id=f"{bins}-{NORMS[(i + j) % 3]}-{task}-{how}")
        for i, bins in enumerate(KINDS)
        for j, (task, how) in enumerate(SETTINGS)
    ],
)
def test_slow_loop_tce(bins, norm, task, how):
    """All pairs of bins, norm and events."""
    for weighted in (False, True):
        data = sample(task, weighted=weighted)
        assert_slow_loop(
            tc.tce, lambda *columns: oracle.tce(bins, *columns, n_bins=5, norm=norm), task, how, data,
            bins=bins, n_bins=5, norm=norm,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("bins", "options"),
    [
        ("pava_bc", {"n_min": 3, "n_max": 9}),
        ("pava_bc", {"n_min": 5, "n_max": 30, "variant": "paper"}),
        ("pava_bc", {"n_min": 5, "n_max": 30, "ties": "split"}),
        ("pava", {"ties": "split"}),
        ("equal_mass", {"n_bins": 4, "ties": "split"}),
        ("equal_width", {"n_bins": 8, "right": True}),
        ([0, 0.25, 0.5, 1], {"right": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("decision", [{"alpha": 0.2}, {"alpha": 0.01}, {"test": "t"}], ids=str)
def test_slow_loop_tce_options(bins, options, decision):
    for seed in range(3):
        data = sample("binary", n=90, seed=seed, weighted=seed > 0 and "ties" not in options)
        assert_slow_loop(
            tc.tce, lambda *columns: oracle.tce(bins, *columns, **options, **decision), "binary", {}, data,
            bins=bins, **options, **decision,
        )  # fmt: skip


@pytest.mark.parametrize("bins", KINDS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_slow_loop_tce_table(bins, weighted):
    preds, target, weights = sample("binary", n=90, weighted=weighted)
    columns = preds.tolist(), target.tolist(), None if weights is None else weights.tolist()
    table = tc.tce_table(preds, target, task="binary", bins=bins, n_bins=6, weights=weights)
    blocks = oracle.blocks_of(bins, *columns, n_bins=6)
    held = table.n > 0
    found = [table.n, table.confidence, table.frequency, table.gap, table.share, table.rejected]
    found = zip(*(column[held].tolist() for column in found), strict=True)
    counts = oracle.rejected(blocks, *columns)
    total = 90 if weights is None else int(weights.sum())
    for row, (_, n, confidence, frequency, _), count in zip(
        found, oracle.rows_of(blocks, *columns), counts, strict=True
    ):
        assert row == pytest.approx((n, confidence, frequency, frequency - confidence, n / total, count), abs=1e-12)
    if bins in ("pava", "pava_bc"):
        ordered = [sorted(preds[block].tolist()) for block in blocks]
        middle = [(a[-1] + b[0]) / 2 for a, b in pairwise(ordered)]
        assert table.lower.tolist() == pytest.approx([0, *middle], rel=1e-12)
        assert table.upper.tolist() == pytest.approx([*middle, 1], rel=1e-12)
    assert table.quantiles.shape == (*table.n.shape, 33)
    for block, quantiles in zip(blocks, table.quantiles[held].tolist(), strict=True):
        own = sorted(preds[block].tolist())
        assert (quantiles[0], quantiles[-1]) == (own[0], own[-1])
        assert quantiles == sorted(quantiles)
        assert set(quantiles) <= set(own)


def test_closed_form_rejections_are_not_an_interval():
    """1 of 30: the p-value is 0.0491 at p = 0.170 and 0.0507 at p = 0.177, farther out than what is rejected."""
    preds = torch.tensor([0.170] * 10 + [0.177] * 20, dtype=F64)
    target = torch.tensor([1] + [0] * 29)
    given = {"preds": preds, "target": target, "task": "binary", "bins": [0, 1]}
    assert tc.tce(**given).item() == pytest.approx(100 * 10 / 30)
    assert tc.tce_table(**given).rejected.tolist() == [10]


@pytest.mark.parametrize(("p", "positives", "value"), [(0.5, 10, 0), (0.5, 0, 100), (1.0, 19, 100), (0.0, 0, 0)])
def test_closed_form_tce_of_a_constant_prediction(p, positives, value):
    target = (torch.arange(20) < positives).long()
    assert tc.tce(torch.full((20,), p), target, task="binary").item() == value


@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_law_that_no_series_have_no_values(bins):
    preds, target = torch.zeros(2, 0, 5), torch.zeros(2, 0, 5).long()
    assert tc.tce(preds, target, task="binary", bins=bins).shape == (2, 0)
    assert tc.tce_table(preds, target, task="binary", bins=bins).n.shape[:-1] == (2, 0)
    assert tc.corp(preds, target, task="binary").mcb.shape == (2, 0)
    assert tc.mce(torch.zeros(4, 0), torch.zeros(4, 0).long(), task="multilabel", bins=bins).isnan()


def test_closed_form_tce_of_classes_is_the_mean_of_one_against_the_rest():
    """[TCE] Remark 2, and the default of a multi-class task."""
    preds, target, _ = sample("multiclass")
    each = [tc.tce(preds[:, k], (target == k).long(), task="binary").item() for k in range(N_CLASSES)]
    assert tc.tce(preds, target, task="multiclass").item() == pytest.approx(sum(each) / N_CLASSES)
    assert tc.tce(preds, target, task="multiclass", average=None).tolist() == each
