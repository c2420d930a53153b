"""`calibration_error` and scorers of `torchcalib.sklearn`, in scikit-learn."""

import pickle
from functools import partial

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from helpers.foreign_arrays import OnDevice
from sklearn.datasets import make_classification
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import brier_score_loss, log_loss
from sklearn.model_selection import GridSearchCV, PredefinedSplit, cross_val_score, cross_validate
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import torchcalib as tc
from torchcalib.sklearn import calibration_error, get_scorer, get_scorer_names

X, NUMBERS = make_classification(400, n_informative=6, n_classes=3, class_sep=0.7, random_state=0)
TEXT = np.array(["pear", "apple", "plum"])[NUMBERS]  # not in alphabetical order of the numbers
WEIGHTS = np.random.default_rng(0).uniform(0.1, 3, len(X))
MODEL = LogisticRegression()


def bin_gaps(p, y, w, n_bins, strategy):
    """Return (share, gap) of each bin with data, by a loop: [a, b), and the last bin [a, 1]."""
    order, n = np.argsort(p, kind="stable"), len(p)
    if strategy == "uniform":
        cell = [min(int(value * n_bins), n_bins - 1) for value in p]
    else:
        cell = np.empty(n, int)
        for k in range(n_bins):
            cell[order[k * n // n_bins : (k + 1) * n // n_bins]] = k
    gaps = []
    for k in range(n_bins):
        weight = outcome = confidence = 0.0
        for i in range(n):
            if cell[i] == k:
                weight, outcome, confidence = weight + w[i], outcome + w[i] * y[i], confidence + w[i] * p[i]
        if weight:
            gaps.append((weight / sum(w), (outcome - confidence) / weight))
    return gaps


def error_of(gaps, norm):
    """Kumar et al. (NeurIPS 2019), sec. 2 for l2; Naeini et al. (AAAI 2015), sec. 2 for l1 and max."""
    if norm == "max":
        return max(abs(gap) for _, gap in gaps)
    if norm == "l1":
        return sum(share * abs(gap) for share, gap in gaps)
    return sum(share * gap**2 for share, gap in gaps) ** 0.5


def top_label(probs, index):
    return probs.max(1), (probs.argmax(1) == index).astype(float)


@pytest.fixture(scope="module")
def predictions():
    probs = MODEL.fit(X, TEXT).predict_proba(X)
    return probs, TEXT, MODEL.classes_


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
@pytest.mark.parametrize("strategy", ["uniform", "quantile"])
@pytest.mark.parametrize("weighted", [False, True])
def test_calibration_error_equals_a_slow_loop(norm, strategy, weighted, predictions):
    probs, y, classes = predictions
    w = WEIGHTS if weighted and strategy == "uniform" else np.ones(len(y))
    given = w if weighted else None
    how = {"norm": norm, "strategy": strategy, "n_bins": 7, "sample_weight": given}
    index = np.searchsorted(classes, y)
    expected = error_of(bin_gaps(*top_label(probs, index), w, 7, strategy), norm)
    found = calibration_error(y, probs, **how)
    assert type(found) is float
    assert found == pytest.approx(expected, abs=1e-12)
    binary, positive = probs[:, 1] / probs[:, :2].sum(1), np.where(index == 1, "yes", "no")
    expected = error_of(bin_gaps(binary, index == 1, w, 7, strategy), norm)
    assert calibration_error(positive, binary, **how) == pytest.approx(expected, abs=1e-12)
    both = np.stack([1 - binary, binary], 1)
    assert calibration_error(positive, both, **how) == pytest.approx(expected, abs=1e-12)
    if norm == "l2":
        assert calibration_error(positive, both, squared=True, **how) == pytest.approx(expected**2, abs=1e-12)


def test_order_of_labels_and_positive_class_determine_the_columns(predictions):
    probs, y, classes = predictions
    expected = calibration_error(y, probs)
    order = [2, 0, 1]
    assert calibration_error(y, probs[:, order], labels=classes[order]) == pytest.approx(expected, abs=1e-12)
    without = y != "plum"  # a class is missing in the labels
    found = calibration_error(y[without], probs[without], labels=classes)
    assert found == pytest.approx(float(tc.ece(probs[without], np.searchsorted(classes, y[without]))), abs=1e-12)
    with pytest.raises(ValueError, match=r"`labels` must be given unless all 3 classes occur"):
        calibration_error(y[without], probs[without])
    y, p = np.where(NUMBERS == 1, "a", "b"), probs[:, 1]
    assert calibration_error(y, p, pos_label="a") == pytest.approx(float(tc.ece(p, y == "a")), abs=1e-12)
    assert calibration_error(y, p) == pytest.approx(float(tc.ece(p, y == "b")), abs=1e-12)
    assert calibration_error(y[:1], p[:1], pos_label="a") == pytest.approx(abs((y[0] == "a") - p[0]), abs=1e-12)
    assert calibration_error([-1, -1], [0.2, 0.4]) == pytest.approx(0.3, abs=1e-12)


@pytest.mark.parametrize("kind", [torch.as_tensor, OnDevice, pd.Series, list])
def test_kinds_of_arrays_give_the_same_value(kind):
    p, y, w = np.array([0.2, 0.7, 0.9, 0.4]), np.array([3, 5, 5, 3]), np.array([1.0, 2.0, 0.5, 1.0])
    expected = calibration_error(y, p, sample_weight=w)
    wrap = (lambda x: OnDevice(torch.as_tensor(x))) if kind is OnDevice else kind
    assert calibration_error(wrap(y), wrap(p), sample_weight=wrap(w)) == pytest.approx(expected, abs=1e-12)
    assert calibration_error(wrap(y), wrap(p), pos_label=3) == pytest.approx(float(tc.ece(p, y == 3)), abs=1e-12)
    outcome = (y == 5).astype(int)
    assert float(tc.ece(wrap(p), wrap(outcome))) == pytest.approx(float(tc.ece(p, outcome)), abs=1e-6)
    with pytest.raises(ValueError, match="must contain only the classes"):
        calibration_error(wrap(y), wrap(p), labels=[3, 4])


def test_scores_with_gradient_are_floats():
    p = torch.tensor([0.2, 0.7], requires_grad=True)
    assert type(calibration_error([0, 1], p)) is float


NAMES = [name for name in get_scorer_names() if not name.endswith("calibration_error")]


CLASSES = {cls.function.__name__: cls for cls in map(partial(getattr, tc), dir(tc)) if hasattr(cls, "function")}


@pytest.mark.parametrize("name", NAMES)
def test_scorer_is_the_metric_with_the_sign_of_its_direction(name, predictions):
    probs, y, classes = predictions
    metric = name.removeprefix("neg_").removeprefix("abs_")
    value, better = float(getattr(tc, metric)(probs, np.searchsorted(classes, y))), CLASSES[metric].better
    found = get_scorer(name)(MODEL, X, y)
    assert type(found) is float
    assert found == pytest.approx({"lower": -value, "higher": value}.get(better, -abs(value)), rel=1e-9, abs=1e-12)
    assert name.startswith("neg_") == (better != "higher")


def test_every_metric_with_one_value_and_direction_has_a_scorer():
    functions = {name.removeprefix("neg_").removeprefix("abs_") for name in NAMES}
    assert {"nll", "brier_score", "ece", "ace", "esce", "ks", "smece", "accuracy", "skce"} <= functions
    assert functions.isdisjoint({"corp", "cox", "gce", "calibration_curve"})


def test_scores_equal_those_of_scikit_learn(predictions):
    probs, y, _ = predictions
    assert get_scorer("neg_nll")(MODEL, X, y) == pytest.approx(-log_loss(y, probs), abs=1e-12)
    binary = LogisticRegression().fit(X, NUMBERS == 1)
    expected = -brier_score_loss(NUMBERS == 1, binary.predict_proba(X)[:, 1])
    assert get_scorer("neg_brier_score")(binary, X, NUMBERS == 1) == pytest.approx(expected, abs=1e-12)


def test_scorers_in_grid_search_cross_validation_and_processes():
    scoring = {name: get_scorer(name) for name in ("neg_nll", "neg_l1_calibration_error", "accuracy")}
    model = make_pipeline(StandardScaler(), LogisticRegression())
    search = GridSearchCV(model, {"logisticregression__C": [0.01, 1]}, scoring=scoring, refit="neg_nll", cv=3)
    search.fit(pd.DataFrame(X), pd.Series(TEXT))
    reference = GridSearchCV(model, {"logisticregression__C": [0.01, 1]}, scoring="neg_log_loss", cv=3).fit(X, TEXT)
    found = search.cv_results_["mean_test_neg_nll"]
    assert found == pytest.approx(reference.cv_results_["mean_test_score"], abs=1e-9)
    assert search.best_params_ == reference.best_params_
    assert search.score(X, TEXT) == pytest.approx(reference.score(X, TEXT), abs=1e-9)
    found = cross_validate(model, X, NUMBERS, scoring={"a": get_scorer("neg_ece")}, cv=3)
    assert cross_val_score(model, X, TEXT, scoring=get_scorer("neg_ece"), cv=3) == pytest.approx(found["test_a"])
    copy = pickle.loads(pickle.dumps(get_scorer("neg_ece", n_bins=5)))
    model.fit(X, TEXT)
    expected = -float(tc.ece(model.predict_proba(X), np.searchsorted(model.classes_, TEXT), n_bins=5))
    assert copy(model, X, TEXT) == pytest.approx(expected, abs=1e-12)


def test_a_class_that_is_missing_in_a_test_part_does_not_shift_columns():
    part = np.arange(len(X))
    fold = np.where(NUMBERS == 0, 2 * (part % 2), part % 3)  # no "pear" in test part 1
    found = cross_val_score(
        MODEL, X, TEXT, scoring=get_scorer("neg_nll"), cv=PredefinedSplit(fold), error_score="raise"
    )
    model = LogisticRegression().fit(X[fold != 1], TEXT[fold != 1])
    expected = -log_loss(TEXT[fold == 1], model.predict_proba(X[fold == 1]), labels=model.classes_)
    assert found[1] == pytest.approx(expected, abs=1e-9)


def test_weights_directly_and_through_metadata_routing():
    model = LogisticRegression().fit(X, TEXT)
    index = np.searchsorted(model.classes_, TEXT)
    expected = -float(tc.ece(model.predict_proba(X), index, sample_weight=WEIGHTS))
    assert get_scorer("neg_ece")(model, X, TEXT, sample_weight=WEIGHTS) == pytest.approx(expected, abs=1e-12)
    with sklearn.config_context(enable_metadata_routing=True):
        scorer = get_scorer("neg_ece").set_score_request(sample_weight="importance")
        plain = LogisticRegression().set_fit_request(sample_weight=False)
        how = {"params": {"importance": WEIGHTS}, "cv": 3, "return_indices": True, "return_estimator": True}
        found = cross_validate(plain, X, TEXT, scoring=scorer, **how)
        search = GridSearchCV(plain, {"C": [1.0]}, scoring={"a": scorer, "b": get_scorer("neg_nll")}, refit="a", cv=3)
        search.fit(X, TEXT, importance=WEIGHTS)
    for value, fitted, test in zip(found["test_score"], found["estimator"], found["indices"]["test"], strict=True):
        expected = -float(tc.ece(fitted.predict_proba(X[test]), index[test], sample_weight=WEIGHTS[test]))
        assert value == pytest.approx(expected, abs=1e-12)
    assert search.best_score_ == pytest.approx(found["test_score"].mean(), abs=1e-12)


def test_positive_class_and_several_labels():
    y = np.where(NUMBERS == 1, "sick", "well")
    model = LogisticRegression().fit(X, y)
    p = model.predict_proba(X)
    assert get_scorer("neg_ece")(model, X, y) == pytest.approx(-float(tc.ece(p[:, 1], y == "well")), abs=1e-12)
    found = get_scorer("neg_ece", pos_label="sick")(model, X, y)
    assert found == pytest.approx(-float(tc.ece(p[:, 0], y == "sick")), abs=1e-12)
    labels = np.stack([NUMBERS == 0, NUMBERS > 0, NUMBERS != 1], 1).astype(int)
    for model in (OneVsRestClassifier(LogisticRegression()), RandomForestClassifier(20, max_depth=3, random_state=0)):
        probs = model.fit(X, labels).predict_proba(X)
        probs = np.stack([each[:, 1] for each in probs], 1) if isinstance(probs, list) else probs
        expected = -float(tc.ece(probs, labels, task="multilabel"))
        assert get_scorer("neg_l1_calibration_error")(model, X, labels) == pytest.approx(expected, abs=1e-9)


def test_a_scorer_of_constant_predictions():
    assert "ece" in repr(get_scorer("neg_ece"))
    dummy = DummyClassifier(strategy="prior").fit(X, TEXT)
    assert get_scorer("neg_max_calibration_error")(dummy, X, TEXT) == pytest.approx(0, abs=1e-9)


def test_brier_scores_of_one_and_two_columns_are_those_of_scikit_learn():
    """The factors in the migration page: `scale_by_half="auto"` halves the score of two columns."""
    pytest.importorskip("sklearn", minversion="1.7")
    p, y = np.linspace(0.05, 0.95, 40), np.arange(40) % 3 // 2
    two, several = np.stack([1 - p, p], 1), np.stack([p / 2, 1 - p, p / 2], 1)
    half = brier_score_loss(y, p)
    assert brier_score_loss(y, two) == pytest.approx(half)
    assert tc.brier_score(p, y).item() == pytest.approx(half)
    assert tc.brier_score(two, y, normalize="classes").item() == pytest.approx(half)
    assert tc.brier_score(two, y).item() == pytest.approx(2 * half)
    assert brier_score_loss(y, two, scale_by_half=False) == pytest.approx(2 * half)
    labels = np.arange(40) % 3
    assert tc.brier_score(several, labels).item() == pytest.approx(brier_score_loss(labels, several))
    halved = brier_score_loss(labels, several, scale_by_half=True)
    assert tc.brier_score(several, labels).item() / 2 == pytest.approx(halved)
