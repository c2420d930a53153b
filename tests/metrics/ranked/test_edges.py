"""What slow loops on random samples do not reach: closed forms, large counts, infinite scores, modes of autograd."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import N_CLASSES, corp_part

import torchcalib as tc
from torchcalib.core.inputs import InputFormat
from torchcalib.core.ranked import ExactSample
from torchcalib.inference.simulation import RunCells

F64 = torch.float64


def sample(n, *lead):
    generator = torch.Generator().manual_seed(0)
    preds = torch.randint(0, 65, (n, *lead), generator=generator).to(F64) / 64
    return preds, (torch.rand((n, *lead), generator=generator) < 0.3 + 0.5 * preds).long()


def test_closed_form_rejections_are_not_an_interval():
    """1 of 30: the p-value is 0.0491 at p = 0.170 and 0.0507 at p = 0.177, farther out than what is rejected."""
    preds = torch.tensor([0.170] * 10 + [0.177] * 20, dtype=F64)
    given = {"preds": preds, "target": torch.tensor([1] + [0] * 29), "task": "binary", "bins": [0, 1]}
    assert tc.tce(**given).item() == pytest.approx(100 * 10 / 30)
    assert tc.tce_table(**given).rejected.tolist() == [10]


def test_closed_form_tce_of_classes_is_the_mean_of_one_against_the_rest():
    """[TCE] Remark 2, and the default of a multi-class task."""
    generator = torch.Generator().manual_seed(0)
    preds = torch.randn(60, N_CLASSES, generator=generator, dtype=F64).softmax(-1)
    target = torch.multinomial(preds, 1, generator=generator).squeeze(-1)
    each = [tc.tce(preds[:, k], (target == k).long(), task="binary").item() for k in range(N_CLASSES)]
    assert tc.tce(preds, target, task="multiclass").item() == pytest.approx(sum(each) / N_CLASSES)


def test_closed_form_corp_of_an_infinite_score():
    """A certain prediction that is wrong: infinite score and miscalibration; the other two parts stay finite."""
    d = tc.corp(torch.tensor([0.0, 0.5]), torch.tensor([1, 0]), task="binary", score="nll")
    assert [part.item() for part in d] == pytest.approx([math.inf, math.inf, 0, math.log(2)])


@pytest.mark.parametrize("copies", [10**8, 10**10, 10**13])
def test_law_that_counts_larger_than_products_of_them_can_be_give_the_value_of_one_copy_each(copies):
    preds, target = sample(60)
    weights = torch.full_like(target, copies)
    for function in (
        *(partial(tc.gce, bins=bins, loss=lambda b: b.gap.abs()) for bins in ("pava", "pava_bc")),
        *(partial(corp_part, component=part) for part in tc.CORPDecomposition._fields),
        partial(tc.ace, n_bins=2**20),
    ):
        many, one = function(preds, target, task="binary", weights=weights), function(preds, target, task="binary")
        torch.testing.assert_close(many, one)


def test_law_long_samples_are_cut_as_short_ones(monkeypatch):
    preds, target = sample(500, 4)
    options = {"task": "multilabel", "bins": "equal_mass"}
    table, value = tc.bin_table(preds, target, **options), tc.ace(preds, target, task="multilabel", average=None)
    monkeypatch.setattr("torchcalib.core.ranked_bins._LONG", 1)
    assert torch.equal(tc.ace(preds, target, task="multilabel", average=None), value)
    again = tc.bin_table(preds, target, **options)
    for column in ("lower", "upper", "n", "confidence", "frequency"):
        torch.testing.assert_close(getattr(again, column), getattr(table, column), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [tc.ace, tc.ks, corp_part, partial(tc.rmsce, bins="equal_mass", n_bins=4)])
def test_law_that_every_way_to_differentiate_agrees_with_backward(function):
    preds, target = sample(12)
    preds = preds.clamp(0.01, 0.99) + torch.arange(12) * 1e-4  # no ties: the gradient is one

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
def test_evidence_of_the_log_score_rejects_a_contradicted_certain_logit_among_any_number_of_samples(resolution, n):
    """A calibrated model makes such an outcome with probability e^-200, so no replicate has one."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(n, generator=generator)
    target = (torch.rand(n, generator=generator) < logits.sigmoid()).long()
    logits[0], target[0] = 200, 0
    metric = tc.CORP(task="binary", score="nll", from_logits=True, resolution=resolution)
    metric.update(logits, target)
    found = metric.evidence(n_replicates=199, level=0.9)
    assert found.p_value == 1 / 200
    assert 0 < found.low <= found.high < math.inf


def test_evidence_of_the_log_score_uses_the_mean_confidence_of_runs():
    """Of runs with several certain samples the log-odds are those of the mean probabilities, in exact arithmetic."""
    logits = torch.cat([torch.linspace(-5, 5, 600), torch.tensor([600.0, 605.0, -600.0, -605.0])]).double()
    read = InputFormat("binary", from_logits=True).read(logits, (logits > 0).long())
    cells = RunCells.of(replace(ExactSample("positive_class").of(read), log_scored=True), 8)
    held = cells.n > 0
    inner = held & (cells.log_odds.abs() < 8)
    torch.testing.assert_close(cells.log_odds[inner], torch.logit(cells.confidence)[inner])
    most = 600 - math.log((1 + math.exp(-5)) / 2)
    torch.testing.assert_close(cells.log_odds[held][[0, -1]], torch.tensor([-most, most], dtype=F64))
