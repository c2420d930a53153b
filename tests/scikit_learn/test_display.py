"""`CalibrationDisplay` of `torchcalib.sklearn` against that of scikit-learn."""

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import pyplot as plt
from sklearn import calibration
from sklearn.datasets import make_classification
from sklearn.model_selection import cross_validate
from sklearn.naive_bayes import GaussianNB

import torchcalib as tc
from torchcalib.sklearn import CalibrationDisplay

X, Y = make_classification(600, n_informative=6, n_classes=3, random_state=0)
BINARY = np.where(Y == 1, "yes", "no")
MODEL = GaussianNB().fit(X[:300], BINARY[:300])


@pytest.fixture(autouse=True)
def closed_figures():
    mpl.use("agg")
    yield
    plt.close("all")


@pytest.mark.parametrize("pos_label", [None, "no"])
def test_attributes_equal_those_of_scikit_learn(pos_label):
    how = {"n_bins": 8, "pos_label": pos_label}
    found = CalibrationDisplay.from_estimator(MODEL, X[300:], BINARY[300:], **how)
    expected = calibration.CalibrationDisplay.from_estimator(MODEL, X[300:], BINARY[300:], **how)
    assert isinstance(found, calibration.CalibrationDisplay)
    for name in ("prob_true", "prob_pred", "y_prob"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-12)
    assert (found.estimator_name, found.pos_label) == (expected.estimator_name, expected.pos_label)
    assert found.figure_ is found.ax_.figure
    assert found.figure_.number in plt.get_fignums()
    assert found.line_.get_xydata() == pytest.approx(np.stack([expected.prob_pred, expected.prob_true], 1))
    assert found.ax_.get_xlabel() == expected.ax_.get_xlabel()
    assert found.ax_.get_ylabel() == expected.ax_.get_ylabel()
    assert bool(found.table.band_low[found.table.n > 0].isfinite().all())
    probs = MODEL.predict_proba(X[300:])
    again = CalibrationDisplay.from_predictions(BINARY[300:], probs, labels=MODEL.classes_, **how)
    assert again.prob_true == pytest.approx(expected.prob_true, abs=1e-12)
    assert again.estimator_name == "Classifier"


def test_weights_bins_and_several_classes_are_those_of_the_calibration_curve():
    model = GaussianNB().fit(X[:300], Y[:300])
    probs, weights = model.predict_proba(X[300:]), np.arange(300) % 3
    found = CalibrationDisplay.from_estimator(
        model, X[300:], Y[300:], strategy="quantile", n_bins=6, sample_weight=weights
    )
    table = tc.calibration_curve(probs, Y[300:], bins="equal_mass", n_bins=6, weights=weights)
    assert found.prob_true == pytest.approx(table.frequency[table.n > 0].numpy(), abs=1e-12)
    assert found.ax_.get_xlabel() == "mean confidence of the bin"
    assert found.pos_label is None


def test_several_displays_share_axes():
    first = CalibrationDisplay.from_estimator(MODEL, X, BINARY, name="first")
    second = CalibrationDisplay.from_estimator(
        MODEL, X, BINARY, ax=first.ax_, name="second", color="red", ref_line=False
    )
    assert second.ax_ is first.ax_
    assert second.line_.get_color() == "red"
    words = [text.get_text().partition("\n")[0] for text in first.ax_.get_legend().get_texts()]
    assert {"first", "second"} <= set(words)
    alone = CalibrationDisplay.from_estimator(MODEL, X, BINARY, ref_line=False)
    assert "Perfectly calibrated" not in [line.get_label() for line in alone.ax_.lines]
    axes = plt.figure().subplots(1, 2)
    assert alone.plot(ax=axes[1], name="other").ax_ is axes[1]


@pytest.mark.parametrize("names", [("c", "lw", "ls", "ds"), ("color", "linewidth", "linestyle", "drawstyle")])
@pytest.mark.parametrize("several", [False, True])
def test_options_of_the_curve_are_those_of_matplotlib(names, several):
    given = dict(zip(names, ("red", 2, "-.", "steps"), strict=True))
    ax = CalibrationDisplay.from_estimator(MODEL, X, BINARY).ax_ if several else None
    line = CalibrationDisplay.from_estimator(MODEL, X, BINARY, ax=ax, label="mine", marker="s", **given).line_
    assert (line.get_color(), line.get_linewidth(), line.get_linestyle()) == ("red", 2, "-.")
    assert (line.get_drawstyle(), line.get_label(), line.get_marker()) == ("steps", "mine", "s")


def test_arrays_of_scikit_learn_give_a_curve():
    true, mean = calibration.calibration_curve(Y == 1, X[:, 0].clip(0, 1))
    display = CalibrationDisplay(true, mean, X[:, 0].clip(0, 1), estimator_name="given").plot()
    assert display.line_.get_xydata() == pytest.approx(np.stack([mean, true], 1))
    words = [text.get_text() for text in display.ax_.get_legend().get_texts()]
    assert words == ["Perfectly calibrated", "given"]  # as in scikit-learn


def test_cross_validated_predictions():
    cv = cross_validate(GaussianNB(), X, BINARY, cv=3, return_estimator=True, return_indices=True)
    pooled = CalibrationDisplay.from_cv_results(cv, X, BINARY, n_bins=6)
    tests = cv["indices"]["test"]
    rows = np.concatenate(tests)
    probs = np.concatenate([m.predict_proba(X[test])[:, 1] for m, test in zip(cv["estimator"], tests, strict=True)])
    true, mean = calibration.calibration_curve(BINARY[rows] == "yes", probs, n_bins=6)
    assert pooled.prob_true == pytest.approx(true, abs=1e-12)
    assert pooled.prob_pred == pytest.approx(mean, abs=1e-12)
    folds = CalibrationDisplay.from_cv_results(cv, X, BINARY, n_bins=6, per_fold=True, sample_weight=np.ones(len(X)))
    assert len(folds.line_) == len(folds.prob_true) == len(folds.table) == 3
    assert folds.estimator_name == ["GaussianNB, fold 0", "GaussianNB, fold 1", "GaussianNB, fold 2"]
    lengths = [len(each) for each in folds.y_prob]
    assert lengths == [len(test) for test in tests]
    assert pooled.pos_label == folds.pos_label == "yes"
    with pytest.raises(ValueError, match="`name` must be a list of 3 different names, one for each curve, got 'one'"):
        folds.plot(name="one")
