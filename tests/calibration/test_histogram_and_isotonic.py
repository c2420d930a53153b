"""Histogram binning and centred isotonic calibration compared with loops, isotonic calibration with scikit-learn."""

import math

import numpy as np
import pytest
import torch
from helpers.fits import CIR, ISO, SPLINE, VA, H, data, fresh, name, single, turns
from sklearn.isotonic import IsotonicRegression

from torchcalib.calibration import HistogramBinning, cross_val_calibrate


def test_histogram_binning_equals_a_loop():
    p, y = torch.sigmoid(single()[0]), single()[1]
    fitted = fresh(H).fit(p, y, task="binary")(p).tolist()
    for value, found in zip(p.tolist(), fitted, strict=True):
        inside = [int(b) for a, b in zip(p.tolist(), y.tolist(), strict=True) if int(a * 5) == int(value * 5)]
        assert found == pytest.approx(sum(inside) / len(inside), abs=1e-15)


def test_empty_bins_keep_the_prediction_or_return_zero():
    preds, target = torch.tensor([0.1, 0.15, 0.9, 0.95]), torch.tensor([0, 1, 1, 1])
    new = torch.tensor([0.1, 0.5])
    assert fresh(H).fit(preds, target, task="binary")(new).tolist() == pytest.approx([0.5, 0.5])
    zero = HistogramBinning(n_bins=5, empty="zero").fit(preds, target, task="binary")
    assert zero(torch.tensor([0.1, 0.4])).tolist() == pytest.approx([0.5, 0])


def fit_ties(calibrator, from_logits):
    """Fit to tied predictions with weights. Return the fit, its predictions, labels and weights, and a grid."""
    logits, target = single(300)
    preds = logits.round(decimals=1) if from_logits else logits.sigmoid().round(decimals=2)
    weights = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(2))
    fitted = fresh(calibrator).fit(preds, target, task="binary", from_logits=from_logits, weights=weights)
    grid = torch.linspace(preds.min() - 0.1, preds.max() + 0.1, 999, dtype=torch.float64)
    return fitted, (preds, target, weights), grid if from_logits else grid.clamp(0, 1)


@pytest.mark.parametrize("from_logits", [False, True])
def test_isotonic_calibration_equals_scikit_learn(from_logits):
    fitted, (preds, target, weights), new = fit_ties(ISO, from_logits)
    sk = IsotonicRegression(out_of_bounds="clip").fit(preds, target, sample_weight=weights)
    found = fitted(new).sigmoid() if from_logits else fitted(new)
    assert found.tolist() == pytest.approx(sk.predict(new).tolist(), abs=1e-12)


def test_gradient_of_isotonic_calibration_is_the_slope_between_blocks():
    preds, target = torch.tensor([0.1, 0.3, 0.5, 0.9], dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    x = torch.tensor([0.2, 0.4, 0.7], dtype=torch.float64, requires_grad=True)
    fresh(ISO).fit(preds, target, task="binary")(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([0, 1 / (0.5 - 0.3), 0])


def centred(scores, target, weights, new):
    """Centred isotonic regression by a loop (Oron, Flournoy 2017): interpolate between the centres of blocks.

    Blocks with mean 0 or 1 keep their ends.
    """
    fit = IsotonicRegression().fit(scores, target, sample_weight=weights).predict(scores)
    x, y = [], []
    for mean in sorted(set(fit.round(12))):
        block = [(s, w) for s, f, w in zip(scores, fit, weights, strict=True) if abs(f - mean) < 1e-9]
        ends = [min(block)[0], max(block)[0]]
        x += ends if mean in (0, 1) else [sum(s * w for s, w in block) / sum(w for _, w in block)]
        y += [mean] * (2 if mean in (0, 1) else 1)
    return np.interp(new, x, y)


@pytest.mark.parametrize("from_logits", [False, True])
def test_centred_isotonic_calibration_equals_a_loop(from_logits):
    """The loop rounds means to 12 digits."""
    fitted, columns, new = fit_ties(CIR, from_logits)
    given = (x[columns[-1] > 0].tolist() for x in columns)
    assert fitted.predict_proba(new).tolist() == pytest.approx(centred(*given, new).tolist(), abs=1e-11)
    inside = new[(new > fitted.knots[2]) & (new < fitted.knots[-3])]
    assert bool((fitted(inside).diff() > 0).all())
    words = fitted.in_words()
    assert words == f"increasing through {len(set(fitted.knots.tolist()))} points, from 0 to 1"


def test_infinite_logits_do_not_move_the_centre_of_a_block():
    logits, target = torch.tensor([-math.inf, -3.0, -1.0, 2.0, 4.0, math.inf]), torch.tensor([0, 1, 0, 1, 0, 1])
    fitted = fresh(CIR).fit(logits, target, task="binary", from_logits=True)
    assert fitted.knots.tolist() == [-1e30, -1e30, 0.5, 0.5, 1e30, 1e30]
    pooled = fresh(CIR).fit(logits, 1 - target, task="binary", from_logits=True)
    assert pooled.knots.tolist() == [0.5, 0.5]
    assert pooled.predict_proba(logits).tolist() == [0.5] * 6


@pytest.mark.parametrize("from_logits", [False, True])
@pytest.mark.parametrize("calibrator", [H, ISO, CIR, VA], ids=name)
def test_classes_are_calibrated_against_the_rest_and_normalised(calibrator, from_logits):
    """Here class 3 has no samples, and folds are one batch."""
    logits, target = data(90, 4)
    target = target.masked_fill(target == 3, 0)
    preds = logits if from_logits else logits.softmax(-1)
    given = {"task": "multiclass", "from_logits": from_logits}

    def expected(rows):
        fits = [fresh(calibrator).fit(preds[rows], target[rows], positive_classes=[k], **given) for k in range(4)]
        p = torch.stack([one.predict_proba(preds) for one in fits], -1)
        return p / p.sum(-1, keepdim=True)

    # The probabilities are quotients of float64 numbers, and log-odds are rounded relative to at most about 10.
    found = fresh(calibrator).fit(preds, target, **given).predict_proba(preds)
    assert found.allclose(expected(slice(None)), atol=1e-13)
    if calibrator in (ISO, CIR):
        assert found[:, 3].tolist() == [0] * 90
    folds = turns(90, 3)
    found = cross_val_calibrate(preds, target, folds=folds, calibrator=calibrator, **given)
    found = found.softmax(-1) if from_logits else found
    for f in range(3):
        assert found[folds == f].allclose(expected(folds != f)[folds == f], atol=1e-13)


@pytest.mark.parametrize("scale", [1e-9, 1, 1e9])
def test_isotonic_fits_with_fractional_weights_equal_scikit_learn(scale):
    for seed in range(10):
        g = torch.Generator().manual_seed(seed)
        p = torch.randint(0, 40, (1 + 9 * seed,), generator=g).double() / 40
        y, w = (torch.rand(len(p), generator=g) < p).long(), scale * torch.rand(len(p), generator=g).double()
        w[torch.rand(len(p), generator=g) < 0.1] = 0
        w[0] = scale
        new, used = torch.linspace(0, 1, 97, dtype=torch.float64), w > 0
        reference = IsotonicRegression(out_of_bounds="clip").fit(p[used].numpy(), y[used].numpy(), w[used].numpy())
        found = fresh(ISO).fit(p, y, task="binary", from_logits=False, weights=w)(new)
        assert found.numpy() == pytest.approx(reference.predict(new.numpy()), abs=1e-10)
        whole = fresh(CIR).fit(p, y, task="binary", from_logits=False, weights=w)(new)
        scaled = fresh(CIR).fit(p, y, task="binary", from_logits=False, weights=7.3 * w)(new)
        torch.testing.assert_close(whole, scaled, rtol=0, atol=1e-10)


def test_whole_and_fractional_weights_are_one_method():
    """Weights of 3 are three copies, and weights of 1.5 twice half of them, for methods that depend on proportions."""
    logits, target = single()
    copies = fresh(CIR).fit(logits.repeat(3), target.repeat(3), task="binary", from_logits=True)(logits)
    for calibrator, weight in ((CIR, 3.0), (CIR, 1.5), (SPLINE, 1.5)):
        expected = (
            copies if calibrator is CIR else fresh(SPLINE).fit(logits, target, task="binary", from_logits=True)(logits)
        )
        weights = torch.full((len(target),), weight)
        found = fresh(calibrator).fit(logits, target, task="binary", from_logits=True, weights=weights)(logits)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("from_logits", [False, True])
def test_rows_of_zeros_become_uniform(from_logits):
    """Without samples of class 2, high confidence in it gives probability 0 for every class."""
    logits = torch.tensor([[3.0, 0, 0], [0, 3, 0], [3, 0, 1], [0, 3, 1]], dtype=torch.float64)
    target, new = torch.tensor([0, 1, 0, 1]), torch.tensor([[0.0, 0, 9]], dtype=torch.float64)
    for calibrator in (ISO, CIR):
        preds, row = (x if from_logits else x.softmax(-1) for x in (logits, new))
        fitted = fresh(calibrator).fit(preds, target, task="multiclass", from_logits=from_logits)
        assert fitted.predict_proba(row)[0].tolist() == pytest.approx([1 / 3] * 3, abs=1e-15)
