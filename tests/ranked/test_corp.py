"""CORP decomposition against slow loops, scikit-learn's isotonic regression, closed forms and laws."""

import math

import pytest
import torch
from helpers.ranked import N_CLASSES, assert_gradient, assert_slow_loop, sample, samples, setting
from hypothesis import given, settings
from oracles import ranked as oracle

import torchcalib as tc

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
