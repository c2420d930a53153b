"""Bayesian binning into quantiles and spline recalibration compared with slow loops of their definitions."""

import math

import numpy as np
import pytest
import torch
from helpers.fits import BBQ, SPLINE, fresh, single
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


def natural_basis(t, n_knots):
    """Return the natural splines that are 1 at one of the equidistant knots, and their derivatives, at t."""
    spline = CubicSpline(np.linspace(0, 1, n_knots), np.eye(n_knots), bc_type="natural")
    return spline(t), spline(t, 1)


def spline_of_authors(probs, target, n_knots):
    """Recalibrated probabilities of sorted samples: `get_recalibration_function` of Gupta et al. (ICLR 2021)."""
    order, n = np.argsort(probs), len(probs)
    values, slopes = natural_basis(np.linspace(0, 1, n), n_knots)
    difference = np.cumsum(target[order] - probs[order]) / n
    return probs[order], probs[order] + slopes @ np.linalg.lstsq(values, difference, rcond=None)[0]


def spline_of_groups(probs, target, n_knots):
    """The definition in the docstring, in a loop over groups of equal probabilities."""
    levels = sorted(set(probs))
    sizes = np.array([(probs == p).sum() for p in levels])
    t, n = np.r_[0, np.cumsum(sizes)] / len(probs), len(probs)
    difference = np.r_[0, np.cumsum([(target[probs == p] - p).sum() for p in levels])] / n
    weight = (np.r_[0, sizes] + np.r_[sizes, 0]) / 2 / n
    basis = natural_basis(t, n_knots)[0]
    root = np.sqrt(weight)
    fitted = basis @ np.linalg.lstsq(root[:, None] * basis, root * difference, rcond=None)[0]
    rates, expected = [], probs.sum()
    for p, slope in zip(levels, np.diff(fitted) / np.diff(t), strict=True):
        rate = max(p + slope, p / (1 + expected))
        rates.append(min(rate, 1 - (1 - p) / (1 + n - expected)))
    return np.array(levels), np.array(rates)


@pytest.mark.parametrize(("n", "n_knots", "digits"), [(50, 6, 9), (400, 6, 9), (400, 3, 9), (400, 2, 9), (400, 6, 1)])
def test_spline_calibration_equals_a_loop_and_the_code_of_the_authors(n, n_knots, digits):
    logits, target = single(n)
    probs = logits.sigmoid().numpy().round(digits)
    levels, rates = spline_of_groups(probs, target.numpy(), n_knots)
    new = np.linspace(0, 1, 333)
    fitted = SplineCalibration(n_knots).fit(torch.from_numpy(probs), target, task="binary")
    assert fitted(torch.from_numpy(new)).tolist() == pytest.approx(np.interp(new, levels, rates).tolist(), abs=1e-10)
    of_logits = SplineCalibration(n_knots).fit(torch.from_numpy(probs).logit(), target, task="binary", from_logits=True)
    found = of_logits.predict_proba(torch.from_numpy(new).logit())
    assert found.tolist() == pytest.approx(fitted(torch.from_numpy(new)).tolist(), abs=1e-10)
    if digits == 9:  # the differences that the docstring names vanish for many samples
        scores, theirs = spline_of_authors(probs, target.numpy(), n_knots)
        assert np.interp(scores, levels, rates) == pytest.approx(theirs.clip(0, 1), abs=3 / n)


def test_a_spline_keeps_a_calibrated_model_and_its_accuracy():
    """For 6 knots and 2,000 samples the excess of the Brier score is 1.6e-4 (standard deviation 1.5e-4)."""
    g = np.random.default_rng(0)
    p, new = g.beta(0.1, 0.9, (40, 2_000)), torch.from_numpy(g.beta(0.1, 0.9, 2_000))
    fitted = SplineCalibration().fit(p, (g.random(p.shape) < p).astype(int), task="binary", batch_dims=1)
    found = fitted(new.expand(40, -1))
    assert (found - new).square().mean().item() < 2.5e-4
    assert ((found > 0) & (found < 1)).all()
    z = 4 * g.standard_normal((4_000, 100))
    q = torch.from_numpy(z).softmax(-1)
    target = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(0)).squeeze(-1)
    after = SplineCalibration().fit(q[:3_000], target[:3_000], task="multiclass")(q[3_000:])
    lost = q[3_000:].amax(-1) - q[3_000:].gather(-1, after.argmax(-1, keepdim=True)).squeeze(-1)
    assert lost.mean() < 0.005
    assert (after > 0).all()


def test_a_spline_of_few_different_predictions_is_their_frequency():
    """A spline with 6 knots goes through the ends of up to 5 groups of equal predictions.

    A frequency of 1 becomes the upper limit 1 - (1 - p) / (1 + N - S).
    """
    levels, sizes, positives = torch.tensor([0.1, 0.3, 0.6, 0.8]), [5, 20, 10, 8], [1, 12, 4, 8]
    probs = levels.repeat_interleave(torch.tensor(sizes))
    target = torch.cat([(torch.arange(n) < k).long() for n, k in zip(sizes, positives, strict=True)])
    for kept in (4, 2, 1):
        used = probs <= levels[kept - 1]
        expected = [k / n for n, k in zip(sizes[:kept], positives[:kept], strict=True)]
        if kept == 4:
            expected[3] = 1 - 0.2 / (1 + (1 - probs.double()).sum().item())
        found = fresh(SPLINE).fit(probs[used], target[used], task="binary")
        assert found(levels[:kept].double()).tolist() == pytest.approx(expected, abs=1e-7)
        shuffled = torch.randperm(int(used.sum()), generator=torch.Generator().manual_seed(0))
        again = fresh(SPLINE).fit(probs[used][shuffled], target[used][shuffled], task="binary")
        assert again(levels[:kept]).allclose(found(levels[:kept]), atol=1e-9)


def test_words():
    logits, target = single(60)
    fitted = [fresh(each).fit(logits, target, task="binary", from_logits=True) for each in (BBQ, SPLINE)]
    assert fitted[0].in_words() == f"a step function with {int((fitted[0].rates.diff() != 0).sum())} steps"
    assert repr(fitted[1]).count("n_knots") == 1
    assert fitted[1].in_words() == "the probability plus the slope of a spline with 6 knots"
