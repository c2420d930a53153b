"""Run scikit-learn's own tests of its calibration module on `torchcalib.sklearn`: `make test-sklearn`.

The tests are in the package of scikit-learn. Their imports of what torchcalib replaces are changed in a temporary file.
Names that torchcalib does not replace stay: they are the references. The tests in `WORDS` must fail, all others pass.
"""

import copy
import importlib.util
import os
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ["SCIPY_ARRAY_API"] = "1"  # read by the first import of scipy, for tests with other array libraries

import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator
from sklearn.svm import LinearSVC
from sklearn.utils import column_or_1d

from torchcalib import PlattScaling
from torchcalib.core.arrays import as_tensor, is_foreign_array
from torchcalib.sklearn import CalibratedClassifier, CalibrationDisplay  # noqa: F401 - imported by the tests
from torchcalib.sklearn.conversion import like
from torchcalib.sklearn.estimators import CalibratedPair

FILE = Path(importlib.util.find_spec("sklearn").origin).parent / "tests" / "test_calibration.py"
IMPORT = re.compile(r"from sklearn\.calibration import \(([^)]*)\)")
REPLACED = "CalibratedClassifierCV", "CalibrationDisplay", "_SigmoidCalibration", "_sigmoid_calibration"
_LEGEND = "the legend also contains the ECE and the consistency band, and not the diagonal"
WORDS = {
    "test_calibration_display_compute": _LEGEND,
    "test_plot_calibration_curve_pipeline": _LEGEND,
    "test_calibration_display_name_multiple_calls": _LEGEND,
    "test_calibration_display_pos_label": _LEGEND,
}
"""Tests, with all of their parameters, that fail because of words in the diagram, with the reason."""

__all__ = [*REPLACED, "WORDS"]


class _Fitted(BaseEstimator):
    """Fitted calibrator of a pair, with the inverse temperature as `beta_`."""

    def __init__(self, calibrator=None, X=None):
        self.calibrator, self.X = calibrator, X
        if hasattr(calibrator, "alpha"):
            self.beta_ = like(calibrator.alpha.to(as_tensor("X", X)), X)

    def fit(self, X, y):
        raise NotImplementedError  # never called: scikit-learn asks only whether an estimator has this method


class _Pair(CalibratedPair):
    """Pair with the names of scikit-learn."""

    def predict_proba(self, X):
        model = copy.copy(self.model)
        model.calibrated_classifiers_ = [self]
        return model.predict_proba(X)


class CalibratedClassifierCV(CalibratedClassifier):
    """`CalibratedClassifier` with the signature of scikit-learn."""

    response_method = "auto"

    def __init__(self, estimator=None, *, method="sigmoid", cv=None, n_jobs=None, ensemble="auto"):
        self.estimator, self.method, self.cv, self.n_jobs, self.ensemble = estimator, method, cv, n_jobs, ensemble

    @property
    def calibrator(self):
        return self.method

    def fit(self, X, y, sample_weight=None, **params):
        self.estimator = LinearSVC(random_state=0) if self.estimator is None else self.estimator
        super().fit(X, y, sample_weight, **params)
        self.calibrated_classifiers_ = [_Pair(*pair) for pair in self.calibrated_classifiers_]
        for pair in self.calibrated_classifiers_:
            pair.model = self
            is_array = isinstance(X, np.ndarray | torch.Tensor) or is_foreign_array(X)
            pair.calibrators = [_Fitted(pair.calibration.calibrator_, X if is_array else np.empty(0))]
        return self


def _sigmoid_calibration(predictions, y, sample_weight=None, max_abs_prediction_threshold=30):
    """Return A and B of sigmoid(-(A F + B)) by `PlattScaling`."""
    scores, labels = torch.from_numpy(column_or_1d(predictions)), torch.from_numpy(column_or_1d(y) > 0).long()
    fit = PlattScaling().fit(scores.double(), labels, "binary", from_logits=True, weights=sample_weight)
    intercept, slope = fit.coefficients.tolist()
    return -slope, -intercept


class _SigmoidCalibration(BaseEstimator):
    def fit(self, X, y, sample_weight=None):
        self.a_, self.b_ = _sigmoid_calibration(X, y, sample_weight)
        return self

    def predict(self, T):
        return torch.from_numpy(-(self.a_ * column_or_1d(T) + self.b_)).sigmoid().numpy()


class _Expected:
    """Plugin of pytest that expects the tests in `WORDS` to fail, and no others."""

    def pytest_collection_modifyitems(self, config, items):
        known = {item.originalname for item in items}
        if missing := WORDS.keys() - known:
            raise pytest.UsageError(f"`WORDS` contains tests that do not exist: {sorted(missing)}.")
        for item in items:
            if item.originalname in WORDS:
                item.add_marker(pytest.mark.xfail(reason=WORDS[item.originalname], strict=True, raises=AssertionError))


def main():
    """Run the tests, and return the exit code of pytest."""
    text = FILE.read_text(encoding="utf-8")
    names = re.findall(r"\w+", ",".join(IMPORT.findall(text)))
    if not {*REPLACED} <= {*names}:
        raise SystemExit(f"{FILE} must import {', '.join(REPLACED)}.")
    kept = ", ".join(name for name in names if name not in REPLACED)
    replaced = f"from {Path(__file__).stem} import {', '.join(REPLACED)}"
    text = IMPORT.sub(f"from sklearn.calibration import {kept}\n{replaced}", text)
    with TemporaryDirectory() as name:
        file = Path(name, FILE.name)
        file.write_text(text, encoding="utf-8")
        Path(name, "pytest.ini").write_text("[pytest]\nfilterwarnings = ignore\n")
        # Tests in processes of their own import this file.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        options = [
            "-q",
            "-rfEX",
            "--rootdir",
            name,
            "-p",
            "sklearn.conftest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
        ]
        return pytest.main([*options, *sys.argv[1:], str(file)], plugins=[_Expected()])


if __name__ == "__main__":
    raise SystemExit(main())
