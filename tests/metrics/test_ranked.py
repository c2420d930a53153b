"""Rank-based and test-based metrics: slow loops with ties and weights, closed forms, large counts, wrong calls."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import oracles
import pytest
import torch
from cases import N_CLASSES, corp_part
from helpers.numbers import central_difference
from helpers.refusals import assert_named
from helpers.streams import updated
from oracles import ranked as oracle

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.inputs import InputFormat
from torchcalib.core.ranked import ExactSample
from torchcalib.inference.simulation import RunCells

# Slow loops, for every mode of a task


F64 = torch.float64
SETTINGS = [
    ("binary", {"mode": "positive"}),
    ("binary", {"mode": "top_label"}),
    ("multiclass", {"mode": "top_label"}),
    ("multiclass", {"mode": "classwise"}),
    ("multiclass", {"mode": tc.TopK(2)}),
    ("multiclass", {"positive_classes": [0, 2]}),
    ("multilabel", {}),
]
KINDS = ["pava_bc", "pava", "equal_mass", "equal_width", [0, 0.125, 0.25, 0.75, 1]]
NORMS = ["l1", "l2", "max"]
MASS = {"bins": "equal_mass", "n_bins": 7}
PARTS = ["score", "mcb", "dsc", "unc"]
METRICS = [
    (F.ace, {"n_bins": 7}),
    (F.ace, {"n_bins": 7, "ties": "split"}),
    (F.mce, MASS),
    (F.rmsce, MASS),
    (F.rmsce, {**MASS, "debiased": True}),
    (F.ks, {}),
    (F.ks, {"norm": "range"}),
    (F.atb, {}),
    *((corp_part, {"score": score, "component": part}) for score in ("brier", "nll") for part in PARTS),
]
setting = pytest.mark.parametrize(("task", "how"), SETTINGS, ids=str)


def sample(task, n=60, seed=0, weighted=False, heaviest=3):
    """Return predictions that are multiples of 1/64 (ties, exact sums), targets drawn from them, and weights."""
    generator = torch.Generator().manual_seed(seed)
    if task == "multiclass":
        draws = torch.randint(0, N_CLASSES, (n, 64), generator=generator)
        draws = torch.where(torch.rand(n, 64, generator=generator) < 0.5, draws[:, :1], draws)
        preds = torch.nn.functional.one_hot(draws, N_CLASSES).sum(1).to(F64) / 64
        target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    else:
        shape = (n, N_CLASSES) if task == "multilabel" else (n,)
        preds = torch.randint(0, 65, shape, generator=generator).to(F64) / 64
        target = (torch.rand(shape, generator=generator) < 0.3 + 0.5 * preds).long()
    weights = torch.randint(0, heaviest + 1, (n,), generator=generator) if weighted else None
    return preds, target, weights


def rows_of(columns, bins="equal_mass", **binning):
    return oracle.rows_of(oracle.blocks_of(bins, *columns, **binning), *columns)


def loss(b):
    """A loss that depends on all three quantities of a bin."""
    return b.gap.square() / (1 + b.n)


def gce(*columns, loss, norm, **binning):
    return oracle.gce(lambda n, c, f: (f - c) ** 2 / (1 + n), rows_of(columns, **binning), norm)


LOOPS = {
    F.ace: lambda *columns, **binning: oracles.ece(rows_of(columns, **binning)),
    F.mce: lambda *columns, **binning: oracles.mce(rows_of(columns, **binning)),
    F.rmsce: lambda *columns, debiased=False, **binning: oracles.rmsce(rows_of(columns, **binning), debiased),
    F.ks: oracle.ks,
    F.atb: oracle.atb,
    F.tce: lambda *columns, bins, **options: oracle.tce(bins, *columns, **options),
    F.gce: gce,
    corp_part: lambda *columns, score, component: oracle.corp(score, *columns)[PARTS.index(component)],
}


def loop_values(function, options, task, how, preds, target, weights=None):
    """Return the value of the loop for each column of events of the mode."""
    columns = oracle.events(task, how.get("mode"), preds.tolist(), target.tolist(), how.get("positive_classes"))
    weights = None if weights is None else weights.tolist()
    return [LOOPS[function](confidence, outcome, weights, **options) for confidence, outcome in columns]


def assert_slow_loop(function, options, task, how, data):
    """Compare the mean, and the value of every class or label if there are several, with the loop."""
    preds, target, weights = data
    values = loop_values(function, options, task, how, *data)
    given = {"task": task, "weights": weights, **how, **options}
    found = function(preds, target, **given)
    assert found.item() == pytest.approx(sum(values) / len(values), rel=1e-11, abs=1e-12)
    if len(values) > 1:
        assert function(preds, target, average=None, **given).tolist() == pytest.approx(values, rel=1e-11, abs=1e-12)


@setting
@pytest.mark.parametrize(("function", "options"), METRICS)
def test_values_equal_slow_loop(function, options, task, how):
    for weighted, seed in product((False, True), range(3)):
        heaviest = 1 if options.get("ties") == "split" else 3
        preds, target, weights = sample(task, seed=seed, weighted=weighted, heaviest=heaviest)
        if function is corp_part:  # no zeros, which have infinite scores
            preds = preds * 0.875 + 0.125 / (N_CLASSES if task == "multiclass" else 2)
        assert_slow_loop(function, options, task, how, (preds, target, weights))


@setting
@pytest.mark.parametrize(("function", "options"), [m for m in METRICS if m[1].get("component", "mcb") == "mcb"])
def test_gradients_equal_finite_differences_of_slow_loop(function, options, task, how):
    generator = torch.Generator().manual_seed(0)
    shape = (24,) if task == "binary" else (24, N_CLASSES)
    preds = torch.rand(shape, generator=generator, dtype=F64) * 0.9 + 0.05
    target = (torch.rand(shape, generator=generator) < preds).long()
    if task == "multiclass":
        preds = preds / preds.sum(-1, keepdim=True)
        target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)

    def value(preds):
        values = loop_values(function, options, task, how, preds, target)
        return sum(values) / len(values)

    leaf = preds.clone().requires_grad_()
    function(leaf, target, task=task, validate_args=False, **how, **options).backward()
    for at in [(0,), (7,), (20,)] if task == "binary" else [(0, 0), (7, 2), (20, 3)]:
        assert leaf.grad[at].item() == pytest.approx(central_difference(value, preds, at), rel=1e-6, abs=1e-8)


@setting
@pytest.mark.parametrize("bins", KINDS, ids=str)
def test_tce_and_gce_equal_slow_loops(bins, task, how):
    """All pairs of bins and norm are covered over the settings."""
    norm = NORMS[(KINDS.index(bins) + SETTINGS.index((task, how))) % 3]
    options = {"bins": bins, "n_bins": 5, "norm": norm}
    for weighted in (False, True):
        data = sample(task, weighted=weighted)
        assert_slow_loop(F.tce, options, task, how, data)
        assert_slow_loop(F.gce, {**options, "loss": loss}, task, how, data)


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
def test_tce_with_other_options_equals_slow_loop(options, decision):
    for seed in range(3):
        data = sample("binary", n=90, seed=seed, weighted=seed > 0 and "ties" not in options)
        assert_slow_loop(F.tce, options | decision, "binary", {}, data)


@pytest.mark.parametrize("bins", KINDS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_tce_table_equals_slow_loop(bins, weighted):
    preds, target, weights = sample("binary", n=90, weighted=weighted)
    columns = preds.tolist(), target.tolist(), None if weights is None else weights.tolist()
    table = F.tce_table(preds, target, task="binary", bins=bins, n_bins=6, weights=weights)
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


# Cases that random samples do not contain


def scores_and_labels(n, *lead):
    generator = torch.Generator().manual_seed(0)
    preds = torch.randint(0, 65, (n, *lead), generator=generator).to(F64) / 64
    return preds, (torch.rand((n, *lead), generator=generator) < 0.3 + 0.5 * preds).long()


def test_rejected_confidences_are_not_an_interval():
    """For 1 of 30 the p-value is 0.0491 at p = 0.170, and 0.0507 at p = 0.177, which is farther from 1/30."""
    preds = torch.tensor([0.170] * 10 + [0.177] * 20, dtype=F64)
    given = {"preds": preds, "target": torch.tensor([1] + [0] * 29), "task": "binary", "bins": [0, 1]}
    assert F.tce(**given).item() == pytest.approx(100 * 10 / 30)
    assert F.tce_table(**given).rejected.tolist() == [10]


def test_multiclass_tce_is_the_mean_over_classes_against_the_rest():
    """[TCE] Remark 2, the default of a multi-class task."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(60, N_CLASSES, generator=generator, dtype=F64).softmax(-1)
    target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    each = [F.tce(preds[:, k], (target == k).long(), task="binary").item() for k in range(N_CLASSES)]
    assert F.tce(preds, target, task="multiclass").item() == pytest.approx(sum(each) / N_CLASSES)


def test_corp_of_an_infinite_score_has_two_finite_components():
    """A certain wrong prediction has infinite score and miscalibration. The other components are finite."""
    d = F.corp(torch.tensor([0.0, 0.5]), torch.tensor([1, 0]), task="binary", score="nll")
    assert [part.item() for part in d] == pytest.approx([math.inf, math.inf, 0, math.log(2)])


@pytest.mark.parametrize("copies", [10**8, 10**10, 10**13])
def test_large_equal_counts_give_the_value_of_one_copy(copies):
    preds, target = scores_and_labels(60)
    weights = torch.full_like(target, copies)
    for function in (
        *(partial(F.gce, bins=bins, loss=lambda b: b.gap.abs()) for bins in ("pava", "pava_bc")),
        *(partial(corp_part, component=part) for part in F.CORPDecomposition._fields),
        partial(F.ace, n_bins=2**20),
    ):
        many, one = function(preds, target, task="binary", weights=weights), function(preds, target, task="binary")
        torch.testing.assert_close(many, one)


def test_binning_of_long_samples_equals_that_of_short_ones(monkeypatch):
    preds, target = scores_and_labels(500, 4)
    options = {"task": "multilabel", "bins": "equal_mass"}
    table, value = F.calibration_curve(preds, target, **options), F.ace(preds, target, task="multilabel", average=None)
    monkeypatch.setattr("torchcalib.core.ranked_bins._MIN_PARTITIONED", 1)
    assert torch.equal(F.ace(preds, target, task="multilabel", average=None), value)
    again = F.calibration_curve(preds, target, **options)
    for column in ("lower", "upper", "n", "confidence", "frequency"):
        torch.testing.assert_close(getattr(again, column), getattr(table, column), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [F.ace, F.ks, F.atb, corp_part, partial(F.rmsce, bins="equal_mass", n_bins=4)])
def test_functional_gradients_equal_backward(function):
    preds, target = scores_and_labels(12)
    preds = preds.clamp(0.01, 0.99) + torch.arange(12) * 1e-4  # no ties, at which the gradient is ambiguous

    def value(p):
        return function(p, target, task="binary")

    leaf = preds.clone().requires_grad_()
    value(leaf).backward()
    batch, mapped = torch.stack((preds, preds)), torch.func.vmap(value)
    leaves = batch.clone().requires_grad_()
    mapped(leaves).sum().backward()
    for gradient in (
        torch.func.grad(value)(preds),
        torch.func.jacfwd(value)(preds),
        torch.func.grad(lambda p: mapped(p).sum())(batch)[1],
        leaves.grad[1],
    ):
        torch.testing.assert_close(gradient, leaf.grad)
    forward = torch.func.jvp(mapped, (batch,), (torch.ones_like(batch),))[1]
    torch.testing.assert_close(forward[0], leaf.grad.sum())


@pytest.mark.parametrize(("resolution", "n"), [(None, 3), (None, 3000), (64, 3000)])
def test_log_score_test_rejects_a_certain_wrong_logit_at_any_sample_size(resolution, n):
    """The probability of such an outcome under calibration is e^-200, so that no replicate contains it."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, generator=generator)
    target = (torch.rand(n, generator=generator) < logits.sigmoid()).long()
    logits[0], target[0] = 200, 0
    metric = updated(tc.CORP(task="binary", score="nll", from_logits=True, resolution=resolution), (logits, target))
    assert metric.test(n_replicates=199).p_value == 1 / 200


def test_log_score_test_uses_the_mean_confidence_of_runs():
    """The log-odds of runs with several certain samples are those of the mean probability in exact arithmetic."""
    logits = torch.cat([torch.linspace(-5, 5, 600), torch.tensor([600.0, 605.0, -600.0, -605.0])]).double()
    read = InputFormat("binary", from_logits=True).read(logits, (logits > 0).long())
    cells = RunCells.from_sample(replace(ExactSample("positive").from_predictions(read), log_scored=True), 8)
    held = cells.n > 0
    inner = held & (cells.log_odds.abs() < 8)
    torch.testing.assert_close(cells.log_odds[inner], torch.logit(cells.confidence)[inner])
    most = 600 - math.log((1 + math.exp(-5)) / 2)
    torch.testing.assert_close(cells.log_odds[held][[0, -1]], torch.tensor([-most, most], dtype=F64))


# Wrong calls


P, Y = torch.tensor([0.2, 0.7, 0.4, 0.9]), torch.tensor([0, 1, 0, 1])
Q = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
BINARY = {"preds": P, "target": Y, "task": "binary"}
MULTI = {"preds": Q, "target": torch.tensor([1, 0, 2, 1]), "task": "multiclass"}
LABELS = {"preds": Q, "target": (Q > 0.3).long(), "task": "multilabel"}
SOFT = {"target": torch.tensor([0.0, 0.5, 0.25, 1.0])}


def gap(b):
    return b.gap.abs()


def gce_of_gap(**options):
    return F.gce(**{"loss": gap, **options})


def with_equal_mass_bins(function):
    return lambda **options: function(bins="equal_mass", **options)


TCE = [F.tce, F.tce_table]
BINS = [*TCE, gce_of_gap, F.mce, F.rmsce]
TIES = [*TCE, F.ace]
VALUES = [F.tce, F.ace, gce_of_gap, F.ks, F.atb, F.corp]
ALL = [*VALUES, F.tce_table]
MASSED = [F.ace, *map(with_equal_mass_bins, (F.tce, F.mce, F.rmsce, gce_of_gap))]


def assert_wrong(functions, given, **wrong):
    for function in functions:
        assert_named(partial(function, **given), wrong)


def test_wrong_bins_and_tests_raise_errors():
    falling, repeated, late, short = [0, 0.6, 0.4, 1], [0, 0.5, 0.5, 1], [0.1, 0.5, 1], [0, 0.5, 0.9]
    assert_wrong(BINS, BINARY, bins=["quantile", [0.0], falling, repeated, late, short, [0, math.nan, 1]])
    assert_wrong(MASSED, BINARY, n_bins=[0, 2.5, 2**20 + 1])
    assert_wrong(TIES, BINARY, ties=["first"])
    crossed = {"n_min": 3, "n_max": 2}
    assert_wrong(TCE, BINARY, n_min=[crossed, {"n_min": 4, "n_max": 9}, 0, 1.0], n_max=[0], variant=["v2"])
    assert_wrong(TCE, BINARY, right=[{"bins": "equal_width", "right": "no"}])
    assert_wrong(TCE, BINARY, alpha=[0.0, 1.0, math.nan, "5%", True], test=["z"])
    assert_wrong([gce_of_gap], BINARY, n_min=[{"bins": "pava_bc", **crossed}], loss=["gap"])
    assert_wrong([F.tce, gce_of_gap], BINARY, norm=["l3"])


def test_wrong_samples_and_modes_raise_errors():
    assert_wrong([*ALL, *MASSED], BINARY, weights=[P])
    assert_wrong(TIES, BINARY, weights=[{"weights": 2 * Y, "ties": "split"}])
    assert_wrong(VALUES, BINARY, weights=[torch.full((4,), 2**52)], average=[None])  # exceeds the largest count
    assert_wrong(TCE, BINARY, target=[SOFT])
    assert_wrong([gce_of_gap], BINARY, target=[SOFT | {"bins": bins} for bins in ("pava", "pava_bc")])
    assert_wrong(ALL, BINARY, positive_classes=[[1]])
    assert_wrong(ALL, MULTI, positive_classes=[[], [0, 3], [-1], [1, 1], [0.5]])
    assert_wrong(ALL, MULTI, mode=["max", {"positive_classes": [1], "mode": "classwise"}])
    assert_wrong(VALUES, LABELS, average=["micro"])
    assert_wrong([F.corp], BINARY, score=["crps"])
    for function in ALL:
        with pytest.raises(TypeError, match="levels"):
            function(**BINARY, levels=3)


def test_wrong_options_of_ranked_metrics_raise_errors():
    massed_classes = [partial(cls, bins="equal_mass") for cls in (tc.MCE, tc.RMSCE)]
    classes, binary = (
        [partial(tc.GCE, loss=gap), tc.ACE, tc.TCE, tc.KS, tc.ATB, tc.CORP, *massed_classes],
        {"task": "binary"},
    )
    assert_wrong(
        classes,
        binary,
        resolution=[0, -5, 64.0, True, "fine", 10**9],
        task=["regression"],
        average=[None],
        mode=["max"],
    )
    assert_wrong([tc.CORP], binary, component=[None])
    assert_wrong([tc.MCE], binary, resolution=[64])  # a sketch is not available for equal-width bins
    assert_wrong([tc.ACE(**binary).update], {"preds": P, "target": Y}, weights=[P])


def test_too_few_samples_for_n_min_raise_an_error_in_compute():
    """The number of samples is unknown before `compute`."""
    metric = updated(tc.TCE(task="binary", n_min=4, n_max=9), (P[:2], Y[:2]), (P[2:], Y[2:]))
    with pytest.raises(ValueError, match=r"`n_min` must .*4"):
        metric.compute()
    metric.update(P, Y)  # eight samples
    assert 0 <= metric.compute().item() <= 100


def test_inner_edges_of_equal_mass_bins_are_midpoints_between_neighbouring_bins():
    """Four bins of one sample each."""
    metric = updated(tc.ACE(task="binary", n_bins=4), (torch.tensor([0.8, 0.1, 0.3, 0.6]), torch.tensor([1, 0, 0, 1])))
    assert metric.bin_table().lower.tolist() == pytest.approx([0, 0.2, 0.45, 0.7], abs=1e-7)
    assert metric.bin_table().upper.tolist() == pytest.approx([0.2, 0.45, 0.7, 1], abs=1e-7)
