"""Reports of named classes and of classifiers of scikit-learn. For other surfaces see test_laws_of_surfaces.py."""

import numpy as np
import pytest
import torch
from helpers.reports import QUICK, assert_values, miscalibrated_data
from sklearn.datasets import load_breast_cancer, load_iris, make_multilabel_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.multiclass import OneVsRestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import torchcalib as tc

NAMES = [f"kind {k}" for k in range(12)]


def test_report_of_arrays_equals_that_of_tensors_and_notes_the_inferred_task():
    probs, target = miscalibrated_data("multiclass")
    expected = tc.report(probs, target, task="multiclass", **QUICK)
    weights = np.ones((400, 1))
    words = np.array(NAMES)[target]
    for given in ((probs.numpy(), target.numpy()), (probs.tolist(), target.tolist()), (probs, words)):
        found = tc.Report.from_predictions(*given, class_names=NAMES, sample_weight=weights, **QUICK)
        assert_values(found, expected)
        assert (found.task_is_inferred, expected.task_is_inferred) == (True, False)
        assert "multiclass (inferred from the shapes), n = 400" in str(found)
    column = miscalibrated_data("binary")[0][:, None]
    assert_values(
        tc.report(column, miscalibrated_data("binary")[1], **QUICK),
        tc.report(*miscalibrated_data("binary"), task="binary", **QUICK),
    )
    implied = tc.report(*miscalibrated_data("multilabel"), num_labels=3, **QUICK)
    assert (implied.task, implied.task_is_inferred) == ("multilabel", False)


def labelled(load, labels):
    x, y = load(return_X_y=True)
    return x, np.array(labels)[y]


CLASSIFIERS = {
    "text": (LogisticRegression(max_iter=5000), labelled(load_iris, ["b", "c", "a"])),
    "numbers from 1 and a pipeline": (
        make_pipeline(StandardScaler(), LogisticRegression()),
        labelled(load_iris, [1, 2, 3]),
    ),
    "two classes": (RandomForestClassifier(9, random_state=0), labelled(load_breast_cancer, ["malignant", "benign"])),
    "-1 and 1": (RandomForestClassifier(9, random_state=0), labelled(load_breast_cancer, [-1, 1])),
    "bool": (RandomForestClassifier(9, random_state=0), labelled(load_breast_cancer, [False, True])),
}


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_report_of_a_classifier_has_its_accuracy_log_loss_and_class_names(case):
    classifier, (x, y) = CLASSIFIERS[case]
    classifier.fit(x[::2], y[::2])
    x, y = x[1::2], y[1::2]
    report = tc.Report.from_estimator(classifier, x, y, sample_weight=np.full(len(y), 2), **QUICK)
    assert report["accuracy"] == pytest.approx(classifier.score(x, y), abs=1e-12)
    probs = classifier.predict_proba(x)
    of_label = probs[np.arange(len(y)), np.searchsorted(classifier.classes_, y)]
    with np.errstate(divide="ignore"):
        assert report["nll"] == pytest.approx(-np.log(of_label).mean(), rel=1e-12)
    assert report.class_names == tuple(map(str, classifier.classes_))
    assert report.n == 2 * len(y)
    if len(classifier.classes_) == 2:
        ece = tc.functional.ece(torch.tensor(probs[:, 1]), torch.tensor(y == classifier.classes_[1]), task="binary")
        assert (report.task, report["ece"]) == ("binary", pytest.approx(ece.item(), abs=1e-12))
    names = [f"name {k}" for k in range(len(classifier.classes_))]
    assert tc.Report.from_estimator(classifier, x, y, class_names=names, **QUICK).class_names == tuple(names)


@pytest.mark.parametrize("classifier", [OneVsRestClassifier(LogisticRegression()), RandomForestClassifier(5)])
def test_classifiers_with_several_outputs_are_multilabel(classifier):
    x, y = make_multilabel_classification(120, random_state=0)
    y[:60, 0] = 0  # the first label is never 1 during the fit
    y = y if isinstance(classifier, RandomForestClassifier) else y[:, 1:]
    classifier.fit(x[:60], y[:60])
    report = tc.Report.from_estimator(classifier, x[60:], y[60:], **QUICK)
    assert (report.task, report.num_classes) == ("multilabel", y.shape[1])
    probs = classifier.predict_proba(x[60:])
    if isinstance(probs, list):
        probs = np.stack([p[:, 1] if p.shape[1] == 2 else np.zeros(60) for p in probs], -1)
    expected = ((probs - y[60:]) ** 2).mean()
    assert report["brier"] == pytest.approx(expected, rel=1e-12)
