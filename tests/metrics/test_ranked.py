"""Rank-based and test-based metrics: options, tables, closed forms and large counts.

tests/contract compares every metric with a slow loop.
"""

import math
import pickle
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from cases import corp_part, z_test
from helpers.samples import tied, updated
from oracles import ranked as oracle

import torchcalib as tc
import torchcalib.functional as F
from torchcalib.core.inputs import InputFormat
from torchcalib.core.ranked import ExactSample
from torchcalib.inference.simulation import RunCells

F64 = torch.float64
KINDS = ["pava_bc", "pava", "equal_mass", "equal_width", [0, 0.125, 0.25, 0.75, 1]]


def sample(n=90, seed=0, weighted=False, heaviest=3):
    """Return tied binary predictions, targets, and weights or None."""
    weights = torch.randint(0, heaviest + 1, (n,), generator=torch.Generator().manual_seed(seed)) if weighted else None
    return *tied("binary", n, seed), weights


@pytest.mark.parametrize("bins", KINDS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_tce_table_equals_slow_loop(bins, weighted):
    preds, target, weights = sample(weighted=weighted)
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


def test_rejected_confidences_are_not_an_interval():
    """For 1 of 30 the p-value is 0.0491 at p = 0.170, and 0.0507 at p = 0.177, which is farther from 1/30."""
    preds = torch.tensor([0.170] * 10 + [0.177] * 20, dtype=F64)
    given = {"preds": preds, "target": torch.tensor([1] + [0] * 29), "task": "binary", "bins": [0, 1]}
    assert F.tce(**given).item() == pytest.approx(100 * 10 / 30)
    assert F.tce_table(**given).rejected.tolist() == [10]


def exact(successes, n, probability):
    return tc.special.binomial_test(successes.long(), n.long(), probability)


@pytest.mark.parametrize("options", [{}, {"weights": torch.arange(90) % 4}, {"batch_dims": 1}], ids=str)
def test_function_as_test_has_the_decisions_of_the_test_of_that_name(options):
    """Rows without weight have no bin, and must not reach the function as invalid values."""
    preds, target = tied("binary", 90)
    if "batch_dims" in options:
        preds, target = preds.reshape(3, 30), target.reshape(3, 30)
    given = {"preds": preds, "target": target, "task": "binary", **options}
    assert torch.equal(F.tce_table(**given, test=exact).rejected, F.tce_table(**given).rejected)
    assert torch.equal(F.tce(**given, test=exact), F.tce(**given))


@pytest.mark.parametrize(
    ("test", "found"),
    [
        (lambda k, n, p: p.tolist(), "got list"),
        (lambda k, n, p: p[:2], r"got shape \(2,\)"),
        (lambda k, n, p: p.mean(), r"got shape \(\)"),
        (lambda k, n, p: p - 1, "got -0.8"),
        (lambda k, n, p: p + 0.2, "got 1.1"),
        (lambda k, n, p: p * math.nan, "got nan"),
    ],
)
def test_function_that_does_not_return_p_values_raises_an_error(test, found):
    metric = updated(tc.TCE(task="binary", bins="pava", test=test), (P, Y))
    for call in (metric.compute, metric.table, partial(F.tce, **BINARY, bins="pava", test=test)):
        with pytest.raises(ValueError, match=f"`test` must return .*{found}"):
            call()
    assert metric.update_count == 1


def test_metric_with_a_function_as_test_is_described_by_its_name():
    for test, name in ((z_test, "test=z_test"), (lambda k, n, p: p, "<lambda>"), (partial(z_test, n=3), "z_test, n=3")):
        metric = updated(tc.TCE(task="binary", test=test, persistent=True), (P, Y))
        assert name in repr(metric)
        assert " at 0x" not in repr(metric)
        other = tc.TCE(task="binary", persistent=True)
        other.load_state_dict(metric.state_dict())  # the state has all samples, from which any test can be computed
        assert other.compute() == F.tce(**BINARY)
    assert "test=z_test" in repr(pickle.loads(pickle.dumps(tc.TCE(task="binary", test=z_test))))


def test_tce_of_classes_is_by_default_their_mean():
    """[TCE] Remark 2."""
    given = {"task": "multiclass"}
    assert F.tce(*tied("multiclass"), **given) == F.tce(*tied("multiclass"), **given, mode="classwise")


def test_corp_of_an_infinite_score_has_two_finite_components():
    """A certain wrong prediction has infinite score and miscalibration. The other components are finite."""
    d = F.corp(torch.tensor([0.0, 0.5]), torch.tensor([1, 0]), task="binary", score="nll")
    assert [part.item() for part in d] == pytest.approx([math.inf, math.inf, 0, math.log(2)])


def test_cllr_is_the_normalised_cross_entropy_for_equal_priors_and_its_minimum_depends_on_the_order():
    generator = torch.Generator().manual_seed(0)
    s = 2 * torch.randn(80, generator=generator, dtype=torch.float64)
    y = (torch.rand(80, generator=generator, dtype=torch.float64) < (s - 1).sigmoid()).long()
    given = {"task": "binary", "from_logits": True}
    value, least, loss = (F.cllr(s, y, component=part, **given) for part in ("value", "min", "loss"))
    torch.testing.assert_close(value, F.nll(s, y, priors=[0.5, 0.5], normalize="prior", **given))
    torch.testing.assert_close(value, least + loss)
    assert 0 < least < value
    for other in (3 * s - 1, s.exp()):
        torch.testing.assert_close(F.cllr(other, y, component="min", **given), least)
    repeats = torch.where(y == 1, 3, 1)  # other class frequencies
    torch.testing.assert_close(F.cllr(s, y, weights=repeats, component="min", **given), least)
    scores, labels = torch.tensor([-2.0, 0, 0, 0, 2]), torch.tensor([0, 0, 1, 1, 1])
    # block of ties: 1/2 of the weight of class 0 and 2/3 of that of class 1
    expected = (0.5 * math.log2(7 / 3) + 2 / 3 * math.log2(7 / 4)) / 2
    assert F.cllr(scores, labels, component="min", **given).item() == pytest.approx(expected)
    assert F.cllr(scores, labels.clamp(min=1), **given).isnan()


@pytest.mark.parametrize("copies", [10**8, 10**10, 10**13])
def test_large_equal_counts_give_the_value_of_one_copy(copies):
    preds, target = tied("binary")
    weights = torch.full_like(target, copies)
    for function in (
        *(partial(F.gce, bins=bins, loss=lambda b: b.gap.abs()) for bins in ("pava", "pava_bc")),
        *(partial(corp_part, component=part) for part in F.CORPDecomposition._fields),
        partial(F.ace, n_bins=2**20),
    ):
        many, one = function(preds, target, task="binary", weights=weights), function(preds, target, task="binary")
        torch.testing.assert_close(many, one)


def test_binning_of_long_samples_equals_that_of_short_ones(monkeypatch):
    preds, target = tied("multilabel", 500)
    options = {"task": "multilabel", "bins": "equal_mass"}
    table, value = F.calibration_curve(preds, target, **options), F.ace(preds, target, task="multilabel", average=None)
    monkeypatch.setattr("torchcalib.core.ranked_bins._MIN_PARTITIONED", 1)
    assert torch.equal(F.ace(preds, target, task="multilabel", average=None), value)
    again = F.calibration_curve(preds, target, **options)
    for column in ("lower", "upper", "n", "confidence", "frequency"):
        torch.testing.assert_close(getattr(again, column), getattr(table, column), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [F.ace, F.ks, F.atb, corp_part, partial(F.rmsce, bins="equal_mass", n_bins=4)])
def test_functional_gradients_equal_backward(function):
    preds, target = tied("binary", 12)
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
BINARY = {"preds": P, "target": Y, "task": "binary"}


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
