"""Calibrators compared with published formulas, which scipy fits in float64, and laws that hold for all of them.

Oracles of the other calibrators: `test_quantiles`, `test_histogram_and_isotonic`, `test_venn_abers`, `test_structured`.
"""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from helpers.fits import ALL, OF_CLASSES, data, fresh, name, single
from scipy.optimize import minimize
from scipy.special import expit, logit

import torchcalib as tc
from benchmarks import calibrated

FREE, POSITIVE = (None, None), (0, None)


def beta_curve(p, a, b, c):
    """Kull et al. (AISTATS 2017), eq. 1."""
    return expit(a * np.log(p) - b * np.log(1 - p) + c)


def midpoint_curve(p, a, b):
    """Kull et al. (2017), sec. 3: the beta curve with c = b log(1 - m) - a log m, for the midpoint m = 1/2."""
    return beta_curve(p, a, b, b * np.log(0.5) - a * np.log(0.5))


PUBLISHED = [
    (tc.TemperatureScaling(), lambda p, a: expit(a * logit(p)), [POSITIVE]),  # Guo et al. (ICML 2017), sec. 4.2
    (tc.BiasCorrection(), lambda p, b: expit(logit(p) + b), [FREE]),  # Alexandari et al. (ICML 2020), T = 1
    (tc.AffineScaling(), lambda p, a, b: expit(a * logit(p) + b), [POSITIVE, FREE]),  # Platt (1999), of the log-odds
    (tc.QuadraticScaling(), lambda p, a, b, c: expit(a + b * logit(p) + c * logit(p) ** 2), [FREE] * 3),  # CalArena
    (tc.BetaCalibration(), beta_curve, [POSITIVE, POSITIVE, FREE]),
    (tc.BetaCalibration("am"), lambda p, a, c: beta_curve(p, a, a, c), [POSITIVE, FREE]),
    (tc.BetaCalibration("ab"), midpoint_curve, [POSITIVE, POSITIVE]),
    (tc.BetaCalibration("a"), lambda p, a: midpoint_curve(p, a, a), [POSITIVE]),
]


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    "data_of",
    [lambda s, y: (s, y), lambda s, y: (2 * s + 1, y), lambda s, y: (-s, y)],
    ids=["as is", "sharp", "negated"],
)
@pytest.mark.parametrize(("calibrator", "curve", "bounds"), PUBLISHED, ids=[repr(row[0]) for row in PUBLISHED])
@pytest.mark.filterwarnings("ignore:the fitted:UserWarning")
def test_curves_have_the_least_log_loss_of_their_published_formula(calibrator, curve, bounds, data_of, is_weighted):
    s, y = data_of(*single(200, seed=3))
    p, target = s.sigmoid().numpy(), y.numpy()
    w = torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(1)) if is_weighted else torch.ones(200)

    def loss(theta):
        q = curve(p, *theta)
        own = np.where(target == 1, q, 1 - q).clip(1e-300)
        return -(w.numpy() * np.log(own)).sum() / w.sum().item()

    start = [1.0 if bound is POSITIVE else 0.0 for bound in bounds]
    best = minimize(loss, start, method="L-BFGS-B", bounds=bounds, options={"ftol": 1e-15, "gtol": 1e-9}).x
    fitted = fresh(calibrator).fit(torch.from_numpy(p), y, task="binary", weights=w)
    found = fitted(torch.from_numpy(p))
    assert fitted.converged
    assert found.numpy() == pytest.approx(curve(p, *best), abs=1e-4)
    own = np.where(target == 1, found, 1 - found)
    assert -(w.numpy() * np.log(own)).sum() / w.sum().item() <= loss(best) + 1e-12
    again = fresh(calibrator)
    again.load_state_dict(fitted.state_dict())
    assert repr(again) == repr(fitted)
    assert again(torch.from_numpy(p)).equal(found)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("calibrator", [*ALL, *OF_CLASSES], ids=name)
def test_only_least_squares_and_frequencies_give_probability_0(calibrator, dtype, scale):
    """Predictions in (0, 1) stay there: near 0 and 1, for separable labels, and for classes without samples."""
    fits = []
    with warnings.catch_warnings(action="ignore"):
        if "binary" in calibrator.tasks:
            s, y = single(60)
            p = (scale * s).sigmoid().to(dtype)
            fits += [(p, fresh(calibrator).fit(p, labels, task="binary")) for labels in (y, (s > 0).long(), 0 * y)]
        if "multiclass" in calibrator.tasks:
            z, y = data(60, 4)
            q = (scale * z).softmax(-1).to(dtype)
            labels = (y, z.argmax(-1), y.clamp(max=2), 0 * y)
            fits += [(q, fresh(calibrator).fit(q, each, task="multiclass")) for each in labels]
    found = [((f == 0) & (p > 0)) | ((f == 1) & (p < 1) & (p.dim() == 1)) for p, f in ((p, f(p)) for p, f in fits)]
    assert any(bool(zero.any()) for zero in found) == calibrator.assigns_zero


@pytest.mark.parametrize("calibrator", [*ALL, *OF_CLASSES], ids=name)
def test_the_constructor_takes_the_kind_of_the_predictions(calibrator):
    """Log-odds in [0, 1] look like probabilities. An argument of `fit` wins."""
    kind = type(calibrator)
    z, y = (data(60, 3)) if calibrator in OF_CLASSES else single(60)
    z = z.sigmoid()
    fit = partial(tc.Calibrator.fit, target=y, task="multiclass" if calibrator in OF_CLASSES else "binary")
    declared = fit(kind(from_logits=True), z)
    assert declared.from_logits
    assert declared(z).equal(fit(kind(), z, from_logits=True)(z))
    if calibrator not in OF_CLASSES:
        assert not fit(kind(), z).from_logits
        assert not fit(kind(from_logits=True), z, from_logits=False).from_logits
        losses = [
            tc.recommend(z, y, calibrators=[each], **given).rcl[kind.name]
            for each, given in ((kind(from_logits=True), {}), (kind(), {"from_logits": True}))
        ]
        assert losses[0] == losses[1]


def test_a_spline_that_was_saved_with_another_meaning_is_refused(tmp_path):
    s, y = single(60)
    fitted = tc.SplineCalibration().fit(s, y, task="binary", from_logits=True)
    tc.save_calibrator(fitted, tmp_path / "new.pt")
    assert tc.load_calibrator(tmp_path / "new.pt")(s).equal(fitted(s))
    state = fitted.state_dict()
    state["_extra_state"].pop("format")  # files of the first format have none
    with pytest.raises(ValueError, match=r"must be of format 2 of SplineCalibration, got format 1.*Fit and save it"):
        tc.SplineCalibration().load_state_dict(state)
    torch.save({"torchcalib_calibrator": state}, tmp_path / "old.pt")
    with pytest.raises(ValueError, match="must be of format 2 of SplineCalibration"):
        tc.load_calibrator(tmp_path / "old.pt")


HARM = {tc.HistogramBinning: 5, tc.BayesianBinning: 5, tc.PlattScaling: 6, tc.VennAbersCalibration: 1.5}
"""Largest excess in units of that of isotonic calibration, where the method itself costs more than the goal.

Bins, and a logistic curve of the probability, have an error that does not vanish for many rows. Venn-Abers
probabilities of many classes add up.
"""


@pytest.mark.extended
@pytest.mark.parametrize("cell", calibrated.CELLS, ids=lambda cell: f"{cell.n_classes} classes, {cell.label}")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_calibrated_models_lose_no_more_than_by_isotonic_calibration(cell):
    n_sets = {2: 60, 10: 4, 100: 1}[cell.n_classes]
    found = calibrated.costs(cell, calibrated.methods(cell), n_sets)
    isotonic = found[tc.IsotonicCalibration]
    for kind, cost in found.items():
        goal = calibrated.MOST_OF_MANY if kind in calibrated.MANY_PARAMETERS else calibrated.MOST
        noise = 3 * float((cost.excess - isotonic.excess).std()) / n_sets**0.5 if n_sets > 1 else 0
        assert cost.excess.mean() <= HARM.get(kind, goal) * isotonic.excess.mean() + noise, kind
        assert (cost.n_zeros > 0) <= kind.assigns_zero, kind
        if kind not in calibrated.MANY_PARAMETERS:
            assert cost.lost.mean() <= 1.5 * isotonic.lost.mean() + 1e-3, kind
