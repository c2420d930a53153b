"""Rank-based metrics against slow loops, with ties and weights, for every way to make events of a task."""

import math
from itertools import pairwise, product

import oracles
import pytest
import torch
from cases import N_CLASSES, corp_part
from helpers.numbers import central_difference
from oracles import ranked as oracle

import torchcalib as tc

F64 = torch.float64
SETTINGS = [
    ("binary", {"reduction": "positive_class"}),
    ("binary", {"reduction": "top_label"}),
    ("multiclass", {"reduction": "top_label"}),
    ("multiclass", {"reduction": "classwise"}),
    ("multiclass", {"reduction": tc.TopK(2)}),
    ("multiclass", {"positive_classes": [0, 2]}),
    ("multilabel", {}),
]
KINDS = ["pava_bc", "pava", "equal_mass", "equal_width", [0, 0.125, 0.25, 0.75, 1]]
NORMS = ["l1", "l2", "max"]
MASS = {"bins": "equal_mass", "n_bins": 7}
PARTS = ["score", "mcb", "dsc", "unc"]
METRICS = [
    (tc.ace, {"n_bins": 7}),
    (tc.ace, {"n_bins": 7, "ties": "split"}),
    (tc.mce, MASS),
    (tc.rmsce, MASS),
    (tc.rmsce, {**MASS, "debiased": True}),
    (tc.ks, {}),
    (tc.ks, {"norm": "range"}),
    *((corp_part, {"score": score, "component": part}) for score in ("brier", "nll") for part in PARTS),
]
setting = pytest.mark.parametrize(("task", "how"), SETTINGS, ids=str)


def sample(task, n=60, seed=0, weighted=False, heaviest=3):
    """Return predictions in steps of 1/64 (ties, and exact sums), targets drawn from them, and weights."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        votes = torch.randint(0, N_CLASSES, (n, 64), generator=generator)
        votes = torch.where(torch.rand(n, 64, generator=generator) < 0.5, votes[:, :1], votes)
        preds = torch.nn.functional.one_hot(votes, N_CLASSES).sum(1).to(F64) / 64
        target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    else:
        shape = (n, N_CLASSES) if task == "multilabel" else (n,)
        preds = torch.randint(0, 65, shape, generator=generator).to(F64) / 64
        target = (torch.rand(shape, generator=generator) < 0.3 + 0.5 * preds).long()
    weights = torch.randint(0, heaviest + 1, (n,), generator=generator) if weighted else None
    return preds, target, weights


def rows_of(columns, bins="equal_mass", **binning):
    return oracle.rows_of(oracle.blocks_of(bins, *columns, **binning), *columns)


def ks(*columns, norm="max"):
    """The largest sum of w (y - p) up to a score, or (Kuiper) the range of these sums and 0."""
    if norm == "max":
        return oracle.ks(*columns)
    rows = list(zip(*columns[:2], columns[2] or [1] * len(columns[0]), strict=True))
    sums = [math.fsum(w * (y - p) for p, y, w in rows if p <= end) for end in {p for p, _, w in rows if w}]
    return (max(0, *sums) - min(0, *sums)) / sum(w for *_, w in rows)


def loss(b):
    """A loss of all three quantities of a bin."""
    return b.gap.square() / (1 + b.n)


def gce(*columns, loss, norm, **binning):
    return oracle.gce(lambda n, c, f: (f - c) ** 2 / (1 + n), rows_of(columns, **binning), norm)


LOOPS = {
    tc.ace: lambda *columns, **binning: oracles.ece(rows_of(columns, **binning)),
    tc.mce: lambda *columns, **binning: oracles.mce(rows_of(columns, **binning)),
    tc.rmsce: lambda *columns, debiased=False, **binning: oracles.rmsce(rows_of(columns, **binning), debiased),
    tc.ks: ks,
    tc.tce: lambda *columns, bins, **options: oracle.tce(bins, *columns, **options),
    tc.gce: gce,
    corp_part: lambda *columns, score, component: oracle.corp(score, *columns)[PARTS.index(component)],
}


def looped(function, options, task, how, preds, target, weights=None):
    """Return the value of the loop for each column of events of the reduction."""
    columns = oracle.events(task, how.get("reduction"), preds.tolist(), target.tolist(), how.get("positive_classes"))
    weights = None if weights is None else weights.tolist()
    return [LOOPS[function](confidence, outcome, weights, **options) for confidence, outcome in columns]


def assert_slow_loop(function, options, task, how, data):
    """Compare the mean, and the value of every class or label if there are several, with the loop."""
    preds, target, weights = data
    values = looped(function, options, task, how, *data)
    given = {"task": task, "weights": weights, **how, **options}
    found = function(preds, target, **given)
    assert found.item() == pytest.approx(sum(values) / len(values), rel=1e-11, abs=1e-12)
    if len(values) > 1:
        assert function(preds, target, average=None, **given).tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)


@setting
@pytest.mark.parametrize(("function", "options"), METRICS)
def test_slow_loop_value(function, options, task, how):
    for weighted, seed in product((False, True), range(3)):
        heaviest = 1 if options.get("ties") == "split" else 3
        preds, target, weights = sample(task, seed=seed, weighted=weighted, heaviest=heaviest)
        if function is corp_part:  # no zeros: no infinite scores
            preds = preds * 0.875 + 0.125 / (N_CLASSES if task == "multiclass" else 2)
        assert_slow_loop(function, options, task, how, (preds, target, weights))


@setting
@pytest.mark.parametrize(("function", "options"), [m for m in METRICS if m[1].get("component", "mcb") == "mcb"])
def test_slow_loop_gradient(function, options, task, how):
    generator = torch.Generator().manual_seed(0)
    shape = (24,) if task == "binary" else (24, N_CLASSES)
    preds = torch.rand(shape, generator=generator, dtype=F64) * 0.9 + 0.05
    target = (torch.rand(shape, generator=generator) < preds).long()
    if task == "multiclass":
        preds = preds / preds.sum(-1, keepdim=True)
        target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)

    def value(preds):
        values = looped(function, options, task, how, preds, target)
        return sum(values) / len(values)

    leaf = preds.clone().requires_grad_()
    function(leaf, target, task=task, validate_args=False, **how, **options).backward()
    for at in [(0,), (7,), (20,)] if task == "binary" else [(0, 0), (7, 2), (20, 3)]:
        assert leaf.grad[at].item() == pytest.approx(central_difference(value, preds, at), rel=1e-6, abs=1e-8)


@setting
@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_slow_loop_tce_and_gce(bins, task, how):
    """All pairs of bins, norm and events."""
    norm = NORMS[(KINDS.index(bins) + SETTINGS.index((task, how))) % 3]
    options = {"bins": bins, "n_bins": 5, "norm": norm}
    for weighted in (False, True):
        data = sample(task, weighted=weighted)
        assert_slow_loop(tc.tce, options, task, how, data)
        assert_slow_loop(tc.gce, {**options, "loss": loss}, task, how, data)


@pytest.mark.parametrize(
    "options",
    [
        {"bins": "pava_bc", "n_min": 3, "n_max": 9},
        {"bins": "pava_bc", "n_min": 5, "n_max": 30, "variant": "paper"},
        {"bins": "pava_bc", "n_min": 5, "n_max": 30, "ties": "split"},
        {"bins": "pava", "ties": "split"},
        {"bins": "equal_mass", "n_bins": 4, "ties": "split"},
        {"bins": "equal_width", "n_bins": 8, "right": True},
        {"bins": [0, 0.25, 0.5, 1], "right": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("decision", [{"alpha": 0.2}, {"alpha": 0.01}, {"test": "t"}], ids=str)
def test_slow_loop_tce_options(options, decision):
    for seed in range(3):
        data = sample("binary", n=90, seed=seed, weighted=seed > 0 and "ties" not in options)
        assert_slow_loop(tc.tce, options | decision, "binary", {}, data)


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
    total = 90 if weights is None else int(weights.sum())
    expected = zip(oracle.rows_of(blocks, *columns), oracle.rejected(blocks, *columns), strict=True)
    for row, ((_, n, confidence, frequency, _), count) in zip(found, expected, strict=True):
        assert row == pytest.approx((n, confidence, frequency, frequency - confidence, n / total, count), abs=1e-12)
    ordered = [sorted(preds[block].tolist()) for block in blocks]
    if bins in ("pava", "pava_bc"):
        middle = [(a[-1] + b[0]) / 2 for a, b in pairwise(ordered)]
        assert table.lower.tolist() == pytest.approx([0, *middle], rel=1e-12)
        assert table.upper.tolist() == pytest.approx([*middle, 1], rel=1e-12)
    assert table.quantiles.shape == (*table.n.shape, 33)
    for own, quantiles in zip(ordered, table.quantiles[held].tolist(), strict=True):
        assert (quantiles[0], quantiles[-1]) == (own[0], own[-1])
        assert quantiles == sorted(quantiles)
        assert set(quantiles) <= set(own)
