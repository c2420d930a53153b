"""`Calibration` and `CalibratedClassifier` of `torchcalib.sklearn`, in scikit-learn."""

import pickle
import warnings
from functools import partial

import joblib
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import sklearn
import torch
from helpers.foreign_arrays import OnDevice
from helpers.products import each_value
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, PredefinedSplit, cross_val_predict, cross_validate
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.svm import LinearSVC
from sklearn.tree import DecisionTreeClassifier
from sklearn.utils.estimator_checks import parametrize_with_checks

import torchcalib as tc
from torchcalib.sklearn import CalibratedClassifier, Calibration, get_scorer
from torchcalib.sklearn.estimators import NAMES

X, NUMBERS = make_classification(500, n_informative=6, n_classes=3, class_sep=0.8, random_state=0)
TEXT = np.array(["pear", "apple", "plum"])[NUMBERS]
BINARY = np.where(NUMBERS == 1, "yes", "no")
WEIGHTS = np.random.default_rng(0).uniform(0.2, 3, len(X))
HAS_TAGS = tuple(map(int, sklearn.__version__.split(".")[:2])) >= (1, 6)
LINEAR = partial(LogisticRegression, C=1.0)


class OfFeatures(Calibration):
    """Calibration whose input has any number of columns: fixed sums of them are the scores of the classes."""

    def fit(self, X, y, sample_weight=None):
        self.n_scores_ = 1 if y is None or (n := len(np.unique(np.asarray(y)))) < 3 else n
        return super().fit(X, y, sample_weight)

    def _predictions(self, X, *, reset):
        values = super()._predictions(X, reset=reset)
        angles = torch.outer(torch.arange(values.shape[1]), torch.arange(1, self.n_scores_ + 1)).to(values)
        return 3 * values @ (angles + 0.3).cos()

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = False  # otherwise the checks pass one column for several classes
        tags.classifier_tags.poor_score = True  # the scores are not trained
        return tags


def expected_failures(estimator):
    """Return the checks that fail by design, with reasons."""
    if isinstance(estimator, Calibration):
        reason = "one-dimensional scores of binary classifiers are accepted"
        return {"check_fit1d": reason}
    return {}


def checks(*estimators):
    if not HAS_TAGS:
        return pytest.mark.skip()
    return parametrize_with_checks(estimators, expected_failed_checks=expected_failures)


@checks(CalibratedClassifier(LINEAR(), cv=2), OfFeatures())
@pytest.mark.filterwarnings("ignore")
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.extended
@checks(CalibratedClassifier(LINEAR(), "affine", cv=2, ensemble=False))
@pytest.mark.filterwarnings("ignore")
def test_checks_of_one_calibrator_for_cross_validated_predictions(estimator, check):
    check(estimator)


@pytest.mark.parametrize("name", NAMES)
def test_calibration_is_the_calibrator_of_that_name(name):
    y = NUMBERS if "binary" not in (kind := NAMES[name]).tasks or "multiclass" in kind.tasks else BINARY
    scores = LINEAR().fit(X[:200], y[:200])
    probs = scores.predict_proba(X[200:])
    own = probs if probs.shape[1] > 2 else probs[:, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Calibration(name).fit(probs, y[200:])
        expected = kind().fit(own, np.searchsorted(scores.classes_, y[200:]), from_logits=False)
    assert found.predict_proba(probs)[:, -1] == pytest.approx(
        np.asarray(expected.predict_proba(own)).reshape(len(own), -1)[:, -1], abs=1e-12
    )
    assert found.predict_proba(probs).sum(1) == pytest.approx(1, abs=1e-9)
    assert set(found.predict(probs)) <= set(y)


def test_probabilities_and_scores_of_the_same_classifier_agree():
    model = LINEAR().fit(X[:200], TEXT[:200])
    by_scores = Calibration().fit(model.decision_function(X[200:]), TEXT[200:])
    by_probs = Calibration().fit(model.predict_proba(X[200:]), TEXT[200:])
    assert (by_scores.from_logits_, by_probs.from_logits_) == (True, False)
    expected = by_probs.predict_proba(model.predict_proba(X))
    assert by_scores.predict_proba(model.decision_function(X)) == pytest.approx(expected, abs=1e-6)
    model = LINEAR().fit(X[:200], BINARY[:200])
    p, s = model.predict_proba(X), model.decision_function(X)
    inputs = [p, p[:, 1], p[:, 1:], s, s[:, None], np.stack([-s / 2, s / 2], 1)]
    found = [Calibration("affine").fit(each[200:], BINARY[200:]).predict_proba(each) for each in inputs]
    for each in found[1:]:
        assert each == pytest.approx(found[0], abs=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_ensemble_is_the_mean_over_folds(weighted):
    cv, weights = KFold(3), WEIGHTS if weighted else None
    found = CalibratedClassifier(LINEAR(), "affine", cv=cv).fit(X, TEXT, weights)
    index, expected = np.searchsorted(np.unique(TEXT), TEXT), 0
    for train, test in cv.split(X):
        given = [None if weights is None else weights[rows] for rows in (train, test)]
        model = LINEAR().fit(X[train], TEXT[train], given[0])
        fit = tc.AffineScaling().fit(model.decision_function(X[test]), index[test], from_logits=True, weights=given[1])
        expected += fit.predict_proba(model.decision_function(X)).numpy() / 3
    assert found.predict_proba(X) == pytest.approx(expected, abs=1e-9)
    assert (found.predict(X) == np.unique(TEXT)[expected.argmax(1)]).all()
    assert found.n_features_in_ == X.shape[1]
    assert len(found.calibrated_classifiers_) == 3


@pytest.mark.parametrize("y", [TEXT, BINARY], ids=["multiclass", "binary"])
@pytest.mark.parametrize("method", ["decision_function", "predict_proba"])
def test_one_calibrator_for_cross_validated_predictions(y, method):
    found = CalibratedClassifier(LINEAR(), cv=4, ensemble=False, response_method=method).fit(X, y)
    scores = cross_val_predict(LINEAR(), X, y, cv=4, method=method)
    calibration = Calibration(from_logits=method == "decision_function").fit(scores, y)
    expected = calibration.predict_proba(getattr(LINEAR().fit(X, y), method)(X))
    assert found.predict_proba(X) == pytest.approx(expected, abs=1e-9)
    assert found.response_method_ == method


def test_temperature_is_that_of_scikit_learn():
    pytest.importorskip("sklearn", minversion="1.8")
    reference = CalibratedClassifierCV(LINEAR(), method="temperature", cv=3).fit(X, TEXT)
    found = CalibratedClassifier(LINEAR(), "temperature", cv=3).fit(X, TEXT)
    assert found.predict_proba(X) == pytest.approx(reference.predict_proba(X), abs=1e-4)


@each_value(
    method={
        "binary": ("sigmoid", BINARY, 2e-5),
        "classes": ("sigmoid", TEXT, 5e-5),
        "pav": ("isotonic", BINARY, 1e-10),
    },
    model={"scores": LinearSVC(), "probabilities": GaussianNB()},
    weights={"": None, "weights": WEIGHTS},
    ensemble=[True, False],
)
def test_methods_are_those_of_scikit_learn(method, model, weights, ensemble):
    (method, y, tolerance), how = method, {"cv": 3, "ensemble": ensemble}
    reference = CalibratedClassifierCV(model, method=method, **how).fit(X, y, weights).predict_proba(X)
    found = CalibratedClassifier(model, method, **how).fit(X, y, weights).predict_proba(X)
    assert found == pytest.approx(reference, abs=tolerance)


@pytest.mark.parametrize("name", ["sigmoid", "temperature"])
@pytest.mark.parametrize("y", [NUMBERS, BINARY], ids=["multiclass", "binary"])
def test_probabilities_of_trees_and_of_separable_scores_are_positive(name, y):
    """Trees predict 0 and 1. Large scores separate the classes, so that no finite temperature is optimal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = CalibratedClassifier(DecisionTreeClassifier(random_state=0), name, cv=3).fit(X, y).predict_proba(X)
    codes = np.unique(y, return_inverse=True)[1]
    scores = 1e6 * np.eye(codes.max() + 1)[codes] + X[:, : codes.max() + 1]
    separable = Calibration(name, from_logits=True).fit(scores, y).predict_proba(scores)
    for probs in (tree, separable):
        assert ((probs > 0) & (probs < 1)).all()
        assert probs.sum(1) == pytest.approx(1, abs=1e-9)
    assert (separable.argmax(1) == codes).all()
    if name == "temperature":  # the rule of succession
        assert separable.max(1).mean() == pytest.approx((len(y) + 1) / (len(y) + 2), abs=1e-4)


SITE = np.arange(200) // 40
OF_FOLDS = {
    "one site has all rows of a class": np.where(SITE == 0, 2, np.arange(200) % 2),
    "each site is a class": SITE,
    "some rows of one class": np.where((SITE == 0) & (np.arange(200) % 3 > 0), 2, np.arange(200) % 2),
}


OF_CLASSES = [name for name, kind in NAMES.items() if "multiclass" in kind.tasks]


@each_value(name=OF_CLASSES, y=OF_FOLDS, cv={"rows": KFold(5), "sites": PredefinedSplit(SITE)}, ensemble=[True, False])
@pytest.mark.filterwarnings("ignore")
def test_folds_that_lack_a_class_give_probabilities(ensemble, cv, y, name):
    model = DecisionTreeClassifier(max_depth=3, random_state=0)
    found = CalibratedClassifier(model, name, cv=cv, ensemble=ensemble).fit(X[:200], y).predict_proba(X[:200])
    assert np.isfinite(found).all()
    assert found.sum(1) == pytest.approx(1, abs=1e-9)


@pytest.mark.filterwarnings("ignore:`sample_weight` is used only")
@pytest.mark.parametrize(("ensemble", "n_pairs"), [(True, 5), (False, 1)])
def test_pairs_without_usable_rows_keep_the_probabilities_of_their_classifiers(ensemble, n_pairs):
    how = {"cv": KFold(5), "ensemble": ensemble}
    with pytest.warns(UserWarning, match=f"got none for {n_pairs} of {n_pairs} calibrators") as warned:
        found = CalibratedClassifier(LINEAR(), **how).fit(X[:200], SITE)
    assert len(warned) == 1
    expected = np.zeros((200, 5))
    for pair in found.calibrated_classifiers_:
        expected[:, pair.estimator.classes_] += pair.estimator.predict_proba(X[:200]) / n_pairs
    assert found.predict_proba(X[:200]) == pytest.approx(expected, abs=1e-9)
    weights = (SITE == 0).astype(float)  # the other test parts have weight 0
    with pytest.warns(UserWarning, match="got none for 4 of 5"):
        found = CalibratedClassifier(KNeighborsClassifier(), cv=KFold(5)).fit(X[:200], np.arange(200) % 2, weights)
    assert np.isfinite(found.predict_proba(X)).all()


def test_a_training_part_of_one_class_predicts_it_with_certainty():
    y = np.where(SITE == 0, "rare", "usual")
    with pytest.warns(UserWarning, match="got none for 1 of 5 calibrators"):
        found = CalibratedClassifier(GaussianNB(), "isotonic", cv=KFold(5)).fit(X[:200], y)
    first = found.calibrated_classifiers_[0]
    assert list(first.calibration.classes_) == ["usual"]
    assert found.predict_proba(X).sum(1) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("ensemble", [True, False])
def test_text_labels_of_tensors_are_encoded_for_the_classifier(ensemble):
    class OfTensors(GaussianNB):
        def fit(self, X, y):
            assert isinstance(y, torch.Tensor)
            return super().fit(X.numpy(), y.numpy())

    found = CalibratedClassifier(OfTensors(), cv=3, ensemble=ensemble).fit(torch.from_numpy(X), TEXT)
    expected = CalibratedClassifier(GaussianNB(), cv=3, ensemble=ensemble).fit(X, TEXT)
    assert found.predict_proba(X) == pytest.approx(expected.predict_proba(X), abs=1e-12)
    assert found.predict(X).tolist() == expected.predict(X).tolist()
    assert list(found.classes_) == ["apple", "pear", "plum"]


def test_fitted_classifiers():
    model = LINEAR().fit(X[:250], TEXT[:250])
    expected = Calibration().fit(model.decision_function(X[250:]), TEXT[250:])
    expected = expected.predict_proba(model.decision_function(X))
    assert CalibratedClassifier(model, cv="prefit").fit(X[250:], TEXT[250:]).predict_proba(X) == pytest.approx(expected)
    if HAS_TAGS:
        from sklearn.frozen import FrozenEstimator

        found = CalibratedClassifier(FrozenEstimator(model)).fit(X[250:], TEXT[250:])
        assert found.predict_proba(X) == pytest.approx(expected)
        assert (
            len(CalibratedClassifier(FrozenEstimator(model), ensemble=True).fit(X, TEXT).calibrated_classifiers_) == 5
        )
    some = TEXT[250:] != "pear"  # the classifier knows more classes than the data contain
    with pytest.warns(UserWarning, match="class"):
        found = CalibratedClassifier(model, "vector", cv="prefit").fit(X[250:][some], TEXT[250:][some])
    assert list(found.classes_) == ["apple", "pear", "plum"]
    assert found.predict_proba(X).shape == (len(X), 3)


@pytest.mark.parametrize("ensemble", [True, False])
@pytest.mark.parametrize("model", [LINEAR(), KNeighborsClassifier()], ids=["scores", "probabilities"])
def test_a_class_that_is_missing_in_a_training_part_does_not_shift_columns(ensemble, model):
    y, fold = np.array(TEXT), np.arange(len(X)) % 3
    y[(y == "apple") & (fold > 0)] = "plum"  # "apple", the first class, occurs in fold 0 only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # KNN gives probability 0 to labels
        found = CalibratedClassifier(model, "temperature", cv=PredefinedSplit(fold), ensemble=ensemble).fit(X, y)
    probs = found.predict_proba(X)
    assert list(found.classes_) == ["apple", "pear", "plum"]
    assert probs.sum(1) == pytest.approx(1, abs=1e-9)
    assert np.isfinite(probs).all()
    reference = clone(model).fit(X, y).predict_proba(X)
    assert np.corrcoef(probs.ravel(), reference.ravel())[0, 1] > 0.7
    if ensemble:
        known = [list(pair.calibration.classes_) for pair in found.calibrated_classifiers_]
        assert known == [["pear", "plum"], ["apple", "pear", "plum"], ["apple", "pear", "plum"]]


def test_kinds_of_features():
    frame = pd.DataFrame(X, columns=[f"f{k}" for k in range(X.shape[1])])
    expected = CalibratedClassifier(LINEAR(), cv=3).fit(X, TEXT).predict_proba(X)
    of_frame = CalibratedClassifier(LINEAR(), cv=3).fit(frame, pd.Series(TEXT))
    assert of_frame.predict_proba(frame) == pytest.approx(expected)
    assert list(of_frame.feature_names_in_) == list(frame.columns)
    sparse = scipy.sparse.csr_matrix(X)
    assert CalibratedClassifier(LINEAR(), cv=3).fit(sparse, TEXT).predict_proba(sparse) == pytest.approx(
        expected, abs=1e-4
    )
    model = make_pipeline(StandardScaler(), CalibratedClassifier(LINEAR(), cv=3, n_jobs=2))
    with joblib.parallel_config("threading"):
        assert model.fit(frame, TEXT).predict_proba(frame).shape == (len(X), 3)
    frame = pd.DataFrame(LINEAR().fit(X, TEXT).predict_proba(X), columns=["a", "b", "c"])
    found = Calibration().fit(frame, TEXT)
    assert list(found.feature_names_in_) == ["a", "b", "c"]
    assert found.predict_proba(frame) == pytest.approx(
        Calibration().fit(frame.to_numpy(), TEXT).predict_proba(frame.to_numpy())
    )


def test_tensors_stay_tensors_and_arrays_of_other_libraries_stay_such():
    probs = LINEAR().fit(X, NUMBERS).predict_proba(X)
    expected = Calibration().fit(probs, NUMBERS)
    p, y, w = map(torch.as_tensor, (probs, NUMBERS, np.ones(len(X))))
    found = Calibration().fit(p, y, w)
    assert isinstance(found.predict_proba(p), torch.Tensor)
    assert found.predict_proba(p).numpy() == pytest.approx(expected.predict_proba(probs), abs=1e-12)
    assert torch.equal(found.predict(p), torch.as_tensor(expected.predict(probs)))
    other = Calibration().fit(OnDevice(p), OnDevice(y), OnDevice(w))
    assert isinstance(other.predict_proba(OnDevice(p)), OnDevice)
    assert other.predict(OnDevice(p)).values.tolist() == expected.predict(probs).tolist()
    names = ["pear", "apple", "plum"]
    assert list(Calibration(classes=names).fit(p, TEXT).predict(p)) == [names[k] for k in expected.predict(probs)]


def test_search_over_calibrators_and_their_options():
    grid = {"calibrator": ["temperature", tc.HistogramBinning(n_bins=5)], "estimator__var_smoothing": [1e-9, 0.1]}
    model = CalibratedClassifier(GaussianNB(), cv=3)
    search = GridSearchCV(model, grid, scoring=get_scorer("neg_nll"), cv=3, error_score="raise").fit(X, TEXT)
    assert np.isfinite(search.cv_results_["mean_test_score"]).sum() >= 2
    scores = FunctionTransformer(LINEAR().fit(X[:250], TEXT[:250]).decision_function)
    search = GridSearchCV(make_pipeline(scores, Calibration()), {"calibration__calibrator": ["temperature", "affine"]})
    assert search.fit(X[250:], TEXT[250:]).predict(X).shape == (len(X),)


def test_copies_and_files(tmp_path):
    template = tc.HistogramBinning(n_bins=4)
    model = CalibratedClassifier(GaussianNB(), template, cv=2)
    copy = clone(model)
    assert (copy.calibrator is not template, copy.calibrator.n_bins) == (True, 4)
    assert model.get_params()["estimator__var_smoothing"] == 1e-9
    model.fit(X, TEXT)
    assert template.task is None  # the argument is not fitted
    joblib.dump(model, tmp_path / "model.joblib")
    for other in (joblib.load(tmp_path / "model.joblib"), pickle.loads(pickle.dumps(model))):
        assert np.array_equal(other.predict_proba(X), model.predict_proba(X))
    assert "HistogramBinning" in repr(model)


def test_metadata_routing_of_weights_and_groups():
    groups = np.arange(len(X)) % 7
    with sklearn.config_context(enable_metadata_routing=True):
        plain = LINEAR().set_fit_request(sample_weight=True)
        model = CalibratedClassifier(plain, "affine", cv=GroupKFold(3)).set_fit_request(sample_weight=True)
        model.set_score_request(sample_weight=False)
        found = model.fit(X, TEXT, sample_weight=WEIGHTS, groups=groups).predict_proba(X)
        scored = cross_validate(model, X, TEXT, params={"sample_weight": WEIGHTS, "groups": groups}, cv=2)
    assert np.isfinite(scored["test_score"]).all()
    splits = list(GroupKFold(3).split(X, TEXT, groups))
    expected = CalibratedClassifier(LINEAR(), "affine", cv=splits).fit(X, TEXT, WEIGHTS).predict_proba(X)
    assert found == pytest.approx(expected, abs=1e-12)


def test_weights_for_the_calibrator_only():
    with pytest.warns(UserWarning, match="`sample_weight` is used only for the calibrator, because KNeighbors"):
        found = CalibratedClassifier(KNeighborsClassifier(50), cv=2).fit(X, TEXT, WEIGHTS)
    other = CalibratedClassifier(KNeighborsClassifier(50), cv=2).fit(X, TEXT)
    assert not np.allclose(found.predict_proba(X), other.predict_proba(X), atol=1e-6)


def test_calibration_helps_on_held_out_data():
    forest = RandomForestClassifier(50, min_samples_leaf=20, random_state=0)
    x, y = make_classification(4000, n_informative=6, n_classes=3, random_state=1)
    raw = clone(forest).fit(x[:2000], y[:2000]).predict_proba(x[2000:])
    found = CalibratedClassifier(forest, cv=3).fit(x[:2000], y[:2000]).predict_proba(x[2000:])
    assert log_loss(y[2000:], found) < log_loss(y[2000:], raw) - 0.05
