"""Test-based calibration error against slow loops, closed forms and laws."""

import math
from itertools import pairwise

import pytest
import torch
from helpers.ranked import F64, KINDS, N_CLASSES, NORMS, SETTINGS, assert_slow_loop, looped, sample, samples
from hypothesis import given, settings
from hypothesis import strategies as st
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
        assert_slow_loop(
            tc.tce, lambda *columns: oracle.tce(bins, *columns, **options, **decision), "binary", {},
            sample("binary", n=90, seed=seed), bins=bins, **options, **decision,
        )  # fmt: skip


@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_slow_loop_tce_of_t_tests_with_weights(bins):
    """A weight counts as copies here too. Undecided, and so kept: one sample, or labels all alike that p meets."""
    data = sample("binary", n=90, weighted=True)
    assert_slow_loop(
        tc.tce, lambda *columns: oracle.tce(bins, *columns, test="t"), "binary", {}, data, bins=bins, test="t"
    )


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


def test_slow_loop_tce_of_a_class_without_samples():
    preds, target, _ = sample("multiclass")
    target = target % (N_CLASSES - 1)
    how = {"reduction": "classwise"}
    expected = looped(lambda *columns: oracle.tce("pava_bc", *columns), "multiclass", how, preds, target)
    assert tc.tce(preds, target, task="multiclass", average=None).tolist() == pytest.approx(expected)


def test_closed_form_rejections_are_not_an_interval():
    """1 of 30: the p-value is 0.0491 at p = 0.170 and 0.0507 at p = 0.177, farther out than what is rejected."""
    preds = torch.tensor([0.170] * 10 + [0.177] * 20, dtype=F64)
    target = torch.tensor([1] + [0] * 29)
    given = {"preds": preds, "target": target, "task": "binary", "bins": [0, 1]}
    assert tc.tce(**given).item() == pytest.approx(100 * 10 / 30)
    assert tc.tce_table(**given).rejected.tolist() == [10]


def test_closed_form_tce_norms():
    """0 of 20: 0.95^20 = 0.36 keeps p = 0.05, 0.6^20 rejects 0.4. 10 of 10: 0.9 is kept, 0.6 is not (0.008)."""
    preds = torch.tensor([0.05] * 15 + [0.4] * 5 + [0.6] * 4 + [0.9] * 6, dtype=F64)
    target = torch.tensor([0] * 20 + [1] * 10)
    given = {"preds": preds, "target": target, "task": "binary", "bins": [0, 0.5, 1]}
    left, right = 5 / 20, 4 / 10
    assert tc.tce(**given).item() == pytest.approx(100 * (20 * left + 10 * right) / 30)
    assert tc.tce(**given, norm="l2").item() == pytest.approx(100 * math.sqrt((20 * left**2 + 10 * right**2) / 30))
    assert tc.tce(**given, norm="max").item() == pytest.approx(100 * right)


@pytest.mark.parametrize(("p", "positives", "value"), [(0.5, 10, 0), (0.5, 0, 100), (1.0, 19, 100), (0.0, 0, 0)])
def test_closed_form_tce_of_a_constant_prediction(p, positives, value):
    target = (torch.arange(20) < positives).long()
    assert tc.tce(torch.full((20,), p), target, task="binary").item() == value


def test_closed_form_tce_of_classes_is_the_mean_of_one_against_the_rest():
    """[TCE] Remark 2, and the default of a multi-class task."""
    preds, target, _ = sample("multiclass")
    each = [tc.tce(preds[:, k], (target == k).long(), task="binary").item() for k in range(N_CLASSES)]
    assert tc.tce(preds, target, task="multiclass").item() == pytest.approx(sum(each) / N_CLASSES)
    assert tc.tce(preds, target, task="multiclass", average=None).tolist() == each


@given(samples(), st.sampled_from(KINDS))
@settings(max_examples=20)
def test_law_tce_grows_with_alpha(data, bins):
    preds, target, weights = data
    given = {"preds": preds, "target": target, "task": "binary", "bins": bins, "weights": weights}
    values = [tc.tce(**given, alpha=alpha).item() for alpha in (0.001, 0.05, 0.3, 0.999)]
    assert values == sorted(values)
    assert values[0] >= 0
    assert values[-1] <= 100 + 1e-9


@pytest.mark.parametrize("variant", ["code", "paper"])
@given(st.integers(0, 10**6), st.integers(3, 80), st.data())
@settings(max_examples=40)
def test_law_size_of_blocks(variant, seed, n, data):
    """Distinct scores: all but the last two blocks hold n_min or more; none passes n_max but as `pava_bc` says."""
    n_min = data.draw(st.integers(1, n - 1))
    n_max = data.draw(st.integers(n_min, n))
    generator = torch.Generator().manual_seed(seed)
    preds, target = torch.randperm(n, generator=generator) / n, torch.randint(0, 2, (n,), generator=generator)
    sizes = tc.tce_table(preds, target, task="binary", n_min=n_min, n_max=n_max, variant=variant).n.tolist()
    assert sum(sizes) == n
    assert all(size >= n_min for size in [*sizes[:-2], sizes[-1]])
    if variant == "code":
        assert all(size <= n_max for size in sizes[:-1])
        assert sizes[-1] <= n_max + n_min


@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_law_that_no_series_have_no_values(bins):
    preds, target = torch.zeros(2, 0, 5), torch.zeros(2, 0, 5).long()
    assert tc.tce(preds, target, task="binary", bins=bins).shape == (2, 0)
    assert tc.tce_table(preds, target, task="binary", bins=bins).n.shape[:-1] == (2, 0)
    assert tc.corp(preds, target, task="binary").mcb.shape == (2, 0)
    assert tc.mce(torch.zeros(4, 0), torch.zeros(4, 0).long(), task="multilabel", bins=bins).isnan()
