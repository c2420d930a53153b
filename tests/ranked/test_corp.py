"""CORP decomposition against slow loops, scikit-learn's isotonic regression, closed forms and laws."""

import math
from dataclasses import replace

import pytest
import torch
from helpers.ranked import N_CLASSES, assert_gradient, assert_slow_loop, sample, samples, setting
from hypothesis import given, settings
from oracles import ranked as oracle

import torchcalib as tc
from torchcalib.consistency.samples import run_cells
from torchcalib.predictions import InputFormat
from torchcalib.samples import ExactSample

CORP = [(score, name) for score in ("brier", "nll") for name in ("score", "mcb", "dsc", "unc")]


def component(name, score):
    """One part of the CORP decomposition, from the function and from the loop."""

    def function(preds, target, **options):
        return getattr(tc.corp(preds, target, score=score, **options), name)

    def loop(scores, outcomes, weights=None):
        return oracle.corp(score, scores, outcomes, weights)[["score", "mcb", "dsc", "unc"].index(name)]

    return function, loop


@setting
@pytest.mark.parametrize("weighted", [False, True])
def test_slow_loop_corp(weighted, task, how):
    preds, target, weights = sample(task, n=40, weighted=weighted)
    preds = preds * 0.875 + 0.125 / (N_CLASSES if task == "multiclass" else 2)  # no zeros: no infinite scores
    for score, name in CORP:
        function, loop = component(name, score)
        assert_slow_loop(function, loop, task, how, (preds, target, weights))


@setting
@pytest.mark.parametrize("score", ["brier", "nll"])
def test_slow_loop_gradient_of_corp(score, task, how):
    assert_gradient(*component("mcb", score), task, how)


def test_closed_form_corp_of_an_infinite_score():
    """A certain prediction that is wrong: infinite score and miscalibration; the other two parts stay finite."""
    d = tc.corp(torch.tensor([0.0, 0.5]), torch.tensor([1, 0]), task="binary", score="nll")
    assert [part.item() for part in d] == pytest.approx([math.inf, math.inf, 0, math.log(2)])


@pytest.mark.parametrize("score", ["brier", "nll"])
@given(data=samples())
@settings(max_examples=40)
def test_law_corp_is_the_fit_of_scikit_learn(score, data):
    isotonic = pytest.importorskip("sklearn.isotonic")
    preds, target, weights = data
    kept = weights > 0
    x, y, w = (column[kept].double().numpy() for column in data)
    fitted = isotonic.IsotonicRegression(y_min=0, y_max=1).fit(x, y, sample_weight=w).predict(x)
    function = {"brier": tc.brier_score, "nll": tc.nll}[score]
    best = function(torch.from_numpy(fitted).clamp(0, 1), target[kept], task="binary", weights=weights[kept])
    d = tc.corp(preds, target, task="binary", weights=weights, score=score)
    assert (d.unc - d.dsc).item() == pytest.approx(best.item(), abs=1e-9)


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
    target = (logits > 0).long()
    cells = run_cells(
        replace(
            ExactSample("positive_class").of(InputFormat("binary", from_logits=True).read(logits, target)),
            log_scored=True,
        ),
        8,
    )
    held = cells.n > 0
    inner = held & (cells.log_odds.abs() < 8)
    expected = torch.logit(cells.confidence)
    torch.testing.assert_close(cells.log_odds[inner], expected[inner])
    most = 600 - math.log((1 + math.exp(-5)) / 2)
    torch.testing.assert_close(cells.log_odds[held][[0, -1]], torch.tensor([-most, most], dtype=torch.float64))
