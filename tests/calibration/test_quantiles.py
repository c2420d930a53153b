"""Bayesian binning into quantiles and spline recalibration compared with slow loops of their definitions."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.fits import BBQ, SPLINE, fresh, name, single
from helpers.refusals import assert_refused
from scipy.interpolate import CubicSpline

from torchcalib.calibration import BayesianBinning, SplineCalibration


def mean_of_histograms(probs, target, new, prior_size=2.0, factor=10.0):
    """Bayesian model averaging of equal-mass histograms, as in Naeini et al. (AAAI 2015), for sorted distinct scores.

    The marginal likelihood of a bin is the Beta-binomial probability of its labels.
    """
    order = np.argsort(probs)
    p, y, n = probs[order], target[order], len(probs)
    evidence, predictions = [], []
    least, most = max(1, math.floor(n ** (1 / 3) / factor)), min(n, math.ceil(n ** (1 / 3) * factor))
    for n_bins in range(least, most + 1):
        cuts = [i * n // n_bins for i in range(n_bins + 1)]
        edges = [0.0, *((p[k - 1] + p[k]) / 2 for k in cuts[1:-1]), 1.0]
        log_likelihood, prediction = 0.0, np.zeros(len(new))
        for low, high, start, end in zip(edges, edges[1:], cuts, cuts[1:], strict=False):
            size, middle, count, k = prior_size / n_bins, (low + high) / 2, end - start, y[start:end].sum()
            a, b = size * middle, size * (1 - middle)
            log_likelihood += math.lgamma(size) - math.lgamma(count + size)
            log_likelihood += math.lgamma(k + a) - math.lgamma(a) + math.lgamma(count - k + b) - math.lgamma(b)
            prediction[(new >= low) & (new <= high)] = (k + a) / (count + size)
        evidence.append(log_likelihood)
        predictions.append(prediction)
    share = np.exp(np.array(evidence) - max(evidence))
    return share / share.sum() @ np.array(predictions)


@pytest.mark.parametrize(("n", "options"), [(1, {}), (4, {}), (60, {"prior_size": 5.0}), (200, {"factor": 2.5})])
def test_bayesian_binning_equals_a_loop(n, options):
    logits, target = single(n)
    probs = logits.sigmoid()
    new = np.random.default_rng(1).random(300)
    expected = mean_of_histograms(probs.numpy(), target.numpy(), new, **options)
    fitted = BayesianBinning(**options).fit(probs, target, task="binary")
    assert fitted(torch.from_numpy(new)).tolist() == pytest.approx(expected.tolist(), abs=1e-13)
    of_logits = BayesianBinning(**options).fit(logits, target, task="binary", from_logits=True)
    assert of_logits.predict_proba(torch.from_numpy(new).logit()).tolist() == pytest.approx(
        expected.tolist(), abs=1e-12
    )


def test_equal_predictions_share_a_bin():
    """Six samples in three bins: the middle cut is inside a group of equal predictions, and moves to its end."""
    probs = torch.tensor([0.1, 0.2, 0.2, 0.2, 0.6, 0.9], dtype=torch.float64)
    target = torch.tensor([0, 0, 1, 0, 1, 1])
    fitted = fresh(BBQ).fit(probs, target, task="binary")
    shuffled = torch.tensor([3, 5, 1, 0, 4, 2])
    assert fitted(probs).allclose(fresh(BBQ).fit(probs[shuffled], target[shuffled], task="binary")(probs), atol=1e-15)
    assert len(set(fitted(probs[1:4]).tolist())) == 1
    # A prediction of 1 has no room for an edge above it.
    saturated = fresh(BBQ).fit(torch.tensor([0.0, 0, 1, 1]), torch.tensor([0, 0, 1, 1]), task="binary")
    assert bool(((saturated(torch.tensor([0.0, 1])) - torch.tensor([0.0, 1])).abs() < 0.2).all())


def slope_of_spline(scores, target, n_knots):
    """Mean slopes of the least-squares natural spline of the cumulative frequency (Gupta et al., ICLR 2021).

    The spline is 0 at t = 0. Scores are distinct.
    """
    order, n = np.argsort(scores), len(scores)
    t = np.arange(n + 1) / n
    knots = np.linspace(0, 1, n_knots)
    basis = np.stack([CubicSpline(knots, row, bc_type="natural")(t) for row in np.eye(n_knots)[1:]], -1)
    heights = np.linalg.lstsq(basis[1:], np.cumsum(target[order]) / n, rcond=None)[0]
    return scores[order], (n * np.diff(basis @ heights)).clip(0, 1)


@pytest.mark.parametrize(("n", "n_knots"), [(50, 6), (400, 6), (400, 3), (400, 2)])
def test_spline_calibration_equals_the_spline_of_scipy(n, n_knots):
    logits, target = single(n)
    scores, rates = slope_of_spline(logits.numpy(), target.numpy(), n_knots)
    new = np.linspace(-8, 8, 333)
    fitted = SplineCalibration(n_knots).fit(logits, target, task="binary", from_logits=True)
    assert fitted.predict_proba(torch.from_numpy(new)).tolist() == pytest.approx(
        np.interp(new, scores, rates).tolist(), abs=1e-10
    )
    of_probs = SplineCalibration(n_knots).fit(logits.sigmoid(), target, task="binary")
    assert of_probs(logits.sigmoid().sort().values).tolist() == pytest.approx(rates.tolist(), abs=1e-10)


def test_a_spline_of_few_different_predictions_is_their_frequency():
    """A spline with 6 knots goes through the ends of up to 5 groups of equal predictions."""
    levels, sizes, positives = torch.tensor([0.1, 0.3, 0.6, 0.8]), [5, 20, 10, 8], [1, 12, 4, 8]
    probs = levels.repeat_interleave(torch.tensor(sizes))
    target = torch.cat([(torch.arange(n) < k).long() for n, k in zip(sizes, positives, strict=True)])
    for kept in (4, 2, 1):
        used = probs <= levels[kept - 1]
        expected = [k / n for n, k in zip(sizes[:kept], positives[:kept], strict=True)]
        found = fresh(SPLINE).fit(probs[used], target[used], task="binary")
        assert found(levels[:kept].double()).tolist() == pytest.approx(expected, abs=1e-9)
        shuffled = torch.randperm(int(used.sum()), generator=torch.Generator().manual_seed(0))
        again = fresh(SPLINE).fit(probs[used][shuffled], target[used][shuffled], task="binary")
        assert again(levels[:kept]).allclose(found(levels[:kept]), atol=1e-9)


@pytest.mark.parametrize("calibrator", [BBQ, SPLINE], ids=name)
def test_weights_equal_copies_of_few_samples(calibrator):
    """The number of models of Bayesian binning depends on the sum of the weights, and not on the number of rows."""
    probs, target = torch.tensor([0.1, 0.2, 0.6, 0.6, 0.9]), torch.tensor([0, 0, 1, 0, 1])
    weights = torch.tensor([3, 0, 40, 25, 700])
    weighted = fresh(calibrator).fit(probs, target, task="binary", weights=weights)
    copies = (x.repeat_interleave(weights) for x in (probs, target))
    assert weighted(probs).allclose(fresh(calibrator).fit(*copies, task="binary")(probs), atol=1e-6)
    assert weighted(probs).isfinite().all()


def test_words_and_wrong_arguments():
    logits, target = single(60)
    fitted = [fresh(each).fit(logits, target, task="binary", from_logits=True) for each in (BBQ, SPLINE)]
    assert fitted[0].in_words() == f"a step function with {int((fitted[0].rates.diff() != 0).sum())} steps"
    assert repr(fitted[1]).count("n_knots") == 1
    assert fitted[1].in_words() == "the slope of a spline with 6 knots"
    rows = [
        (f"{kind.__name__} {name}", partial(kind, **{name: value}), (TypeError, ValueError), [f"`{name}` must"])
        for kind, name, value in [
            (BayesianBinning, "prior_size", 0),
            (BayesianBinning, "factor", 0.5),
            (SplineCalibration, "n_knots", 1),
        ]
    ]
    assert_refused(rows)
