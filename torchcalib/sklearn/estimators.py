"""Calibrators as estimators of scikit-learn."""

import math
import re
from copy import deepcopy
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, MetaEstimatorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import LeaveOneOut, check_cv
from sklearn.utils import _safe_indexing, column_or_1d, indexable
from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, _routing_enabled, process_routing
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.parallel import Parallel, delayed
from sklearn.utils.validation import (
    _check_method_params,
    _check_sample_weight,
    check_consistent_length,
    check_is_fitted,
    has_fit_parameter,
)
from torch import Tensor

from torchcalib.calibration.affine import TemperatureScaling
from torchcalib.calibration.calibrator import Calibrator, sample_weights
from torchcalib.calibration.cross_validation import with_warning
from torchcalib.calibration.one_against_rest import OneAgainstRest, PlattScaling
from torchcalib.calibration.recommendation import CALIBRATORS, ON_REQUEST
from torchcalib.core.arguments import Task, check_choice
from torchcalib.core.arrays import as_tensor, is_foreign_array
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.io.errors import shown, warn
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.newton import CONVERGED, SEPARABLE
from torchcalib.sklearn.conversion import (
    array_of,
    as_labels,
    check_classes,
    check_distinct,
    classes_of,
    classes_of_argument,
    index_tensor,
    like,
    placed,
)

try:
    from sklearn.frozen import FrozenEstimator  # scikit-learn 1.6 or later
except ImportError:
    FrozenEstimator = ()

Response = Literal["decision_function", "predict_proba"]
_RESPONSES: dict[str, tuple[Response, ...]] = {
    "auto": ("decision_function", "predict_proba"),
    "decision_function": ("decision_function",),
    "predict_proba": ("predict_proba",),
}


NAMES: dict[str, type[Calibrator]] = {
    # "temperature" for `TemperatureScaling`: snake case without the last word
    **{"_".join(re.findall(r"[A-Z][a-z]+", x.__name__)[:-1]).lower(): x for x in (*CALIBRATORS, *ON_REQUEST)},
    "sigmoid": PlattScaling,  # as in scikit-learn
}
"""Calibrators by the names that estimators accept."""

_SMALLEST = 1e-12
"""Smallest probability in logarithms, as in scikit-learn. With 0, the negative log-likelihood would be infinite."""


class Calibration(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """Calibrator as a classifier of scikit-learn, whose input are the predictions of another classifier.

    `X` contains probabilities or decision scores. Their shape is `(N,)` or `(N, 1)` for the last of two classes, or
    `(N, C)` with one column for each class. Decision scores count as logits. To fit a classifier too, use
    `CalibratedClassifier`.

    Calibrators of log-odds use probabilities of at least 1e-12, as scikit-learn does for `"temperature"`. So a
    probability of 0 does not remain 0. Decision scores have no unit, and if they separate the classes of N samples, no
    finite temperature is optimal. The temperature is then fitted to labels of the probability (N + 1) / (N + 2), by
    Laplace's rule of succession.

    Args:
        calibrator: Name of a calibrator, or an unfitted calibrator such as `torchcalib.HistogramBinning(n_bins=10)`.
            Names are those of the classes in `torchcalib.calibration` in lower case without the last word, such as
            `"temperature"`, `"structured_matrix"`, `"venn_abers"` and `"isotonic"`; also `"sigmoid"`, as in
            scikit-learn, for `"platt"`.
        classes: Classes in the order of the columns, such as `classes_` of a classifier. None: the sorted labels in
            `y`, which must then contain all classes.
        from_logits: Whether `X` contains decision scores. None: True unless all values are in [0, 1] and rows of
            several columns sum to 1.

    Attributes:
        classes_: Classes in the order of the columns of `predict_proba`.
        calibrator_: The fitted `torchcalib.calibration.Calibrator`. None in a pair of `CalibratedClassifier` whose test
            part has no usable rows; the predictions are then unchanged.
        from_logits_: Whether `X` contains decision scores.
        n_features_in_: Number of columns of `X`.
        feature_names_in_: Column names of `X`, if it is a DataFrame with text names.

    Example:
        >>> import numpy as np
        >>> scores, y = np.array([-2.0, 1.5, 0.5, -0.5, 1.0, -1.0]), ["no", "yes", "no", "yes", "yes", "no"]
        >>> model = Calibration("temperature").fit(scores, y)
        >>> model.predict([0.3, -0.3]).tolist()
        ['yes', 'no']
        >>> model.predict_proba([0.3, -0.3]).round(3).tolist()
        [[0.396, 0.604], [0.604, 0.396]]
    """

    def __init__(
        self, calibrator: str | Calibrator = "temperature", *, classes: Any = None, from_logits: bool | None = None
    ) -> None:
        self.calibrator = calibrator
        self.classes = classes
        self.from_logits = from_logits

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the calibrator.

        Args:
            X: Probabilities or decision scores, `(N,)` or `(N, C)`: an array, a DataFrame, a tensor on any device, or
                an array of a library with the array API.
            y: Labels `(N,)`, numbers or text.
            sample_weight: Weights `(N,)`; whole numbers for `"bayesian"`.

        Returns:
            The estimator itself.

        Raises:
            TypeError, ValueError: For invalid input.

        Warns:
            UserWarning: See `torchcalib.calibration.Calibrator.fit`.
        """
        preds = self._predictions(X, reset=True)
        labels = _checked_labels(y, len(preds))
        classes = classes_of(labels) if self.classes is None else classes_of_argument(self.classes)
        check_classes(classes, preds.shape[1])
        check_distinct("classes", classes)
        from_logits = self.from_logits
        if from_logits is None:
            is_sum_one = preds.shape[1] == 1 or ((preds.sum(-1) - 1).abs() <= SUM_TOLERANCE[preds.dtype]).all()
            from_logits = not (bool(((preds >= 0) & (preds <= 1)).all()) and bool(is_sum_one))
        target = index_tensor(labels, classes, preds.device)
        return self._fit(preds, target, _checked_weights(sample_weight, X, preds), classes, from_logits)

    def _fit(
        self,
        preds: Tensor,
        target: Tensor,
        weights: Tensor | None,
        classes: NDArray[Any],
        from_logits: bool,
        is_fold: bool = False,
    ) -> Self:
        """Fit to predictions `(N, K)` and class indices. A class may be absent in a fold; see `cross_val_calibrate`."""
        self.classes_, self.from_logits_ = classes, from_logits
        calibrator = calibrator_of(self.calibrator)
        self._in_logs = not isinstance(calibrator, OneAgainstRest)
        self._two_columns = "binary" not in calibrator.tasks  # also for two classes
        preds = self._canonical(preds)
        task: Task = "multiclass" if preds.dim() > 1 else "binary"
        p = calibrator.read(preds, target, task=task, options={"from_logits": from_logits, "weights": weights})
        fit = calibrator.fit_to(p)
        if from_logits and type(fit) is TemperatureScaling and bool(fit.outcome == SEPARABLE):
            s = p.values.to(wide_dtype(p.values.device))
            s = torch.stack((torch.zeros_like(s), s), -1) if p.task == "binary" else s
            s, w = s - s.amax(-1, keepdim=True), sample_weights(p)
            share = (w.sum() + 1) / (w.sum() + 2)
            of_label = s.gather(-1, p.target.long().unsqueeze(-1)).squeeze(-1)
            of_target = share * of_label + (1 - share) / (s.shape[-1] - 1) * (s.sum(-1) - of_label)
            low, high = -math.log(float(s.abs().max())) - 100, -math.log(float(s[s < 0].abs().min())) + 100
            for _ in range(100):  # bisection of log alpha
                middle = (low + high) / 2
                excess = ((math.exp(middle) * s).softmax(-1) * s).sum(-1) - of_target
                low, high = (low, middle) if float((w * excess).sum()) > 0 else (middle, high)
            fit.alpha, fit.converged = torch.full_like(w[0], math.exp(middle)), ~fit.converged
            fit.outcome = torch.full_like(fit.outcome, CONVERGED)
        if is_fold:
            fit = with_warning(fit, p)
        else:
            fit.warn()
        self.calibrator_: Calibrator | None = fit
        return self

    def _keep(self, classes: NDArray[Any], from_logits: bool) -> Self:
        """Leave predictions unchanged, because there are no rows for a fit."""
        self.classes_, self.from_logits_, self.calibrator_ = classes, from_logits, None
        self._in_logs, self._two_columns = True, False
        return self

    def predict_proba(self, X: Any) -> Any:
        """Return calibrated probabilities `(N, C)` in the order of `classes_`.

        They are a numpy array. For a tensor, or an array of another library with the array API, they have the kind and
        device of `X`.

        Args:
            X: Predictions as in `fit`.
        """
        check_is_fitted(self)
        return like(self._probabilities(self._predictions(X, reset=False)), X)

    def predict(self, X: Any) -> Any:
        """Return the class with the largest calibrated probability, `(N,)`.

        Args:
            X: Predictions as in `fit`.
        """
        check_is_fitted(self)
        return _labels_at(self._probabilities(self._predictions(X, reset=False)).argmax(-1), self.classes_, X)

    def _probabilities(self, preds: Tensor) -> Tensor:
        calibrator, values = self.calibrator_, self._canonical(preds)
        if calibrator is not None and preds.device != calibrator.grad_norm.device:
            calibrator = deepcopy(calibrator).to(preds.device)
        if len(self.classes_) == 1:
            return torch.ones_like(values).unsqueeze(-1)
        if values.dim() > 1:
            if calibrator is None:
                return values.softmax(-1) if self.from_logits_ else values / values.sum(-1, keepdim=True)
            return calibrator.predict_proba(values)
        if calibrator is not None and not self._in_logs and not self.from_logits_:
            probs = calibrator(values)
            return torch.stack([1 - probs, probs], -1)
        # Log-odds, because the difference from a probability of nearly 1 would be 0.
        values = values if self.from_logits_ else values.log() - torch.log1p(-values)
        values = values if calibrator is None else calibrator.calibrated(values, True)
        return torch.stack([(-values).sigmoid(), values.sigmoid()], -1)

    def _canonical(self, preds: Tensor) -> Tensor:
        """Return predictions `(N, C)`, or those of the last of two classes, `(N,)`. Limit values of logarithms."""
        preds = preds.to(wide_dtype(preds.device))
        if self._in_logs and not self.from_logits_:
            smallest = max(_SMALLEST, torch.finfo(preds.dtype).eps)
            preds = preds.clamp(smallest, 1 - smallest if len(self.classes_) == 2 else 1)
        if len(self.classes_) > 2:
            return preds
        last = preds[:, -1] - (preds[:, 0] if self.from_logits_ and preds.shape[1] == 2 else 0)
        if self._two_columns:
            return torch.stack([torch.zeros_like(last) if self.from_logits_ else 1 - last, last], -1)
        return last

    def _predictions(self, X: Any, *, reset: bool) -> Tensor:
        """Check predictions, and return them as a tensor `(N, K)`. Arrays of other libraries stay on their device."""
        if _is_array(X):
            preds = as_tensor("X", X)
            preds = preds if preds.is_floating_point() else preds.double()
            preds = preds[:, None] if preds.dim() == 1 else preds
            if preds.dim() != 2:
                raise ValueError(f"`X` must have shape (N,) or (N, C), got {tuple(preds.shape)}. Flatten the samples.")
            if reset:
                self.n_features_in_ = preds.shape[1]
            if preds.shape[1] != self.n_features_in_:
                raise ValueError(
                    f"`X` must have {self.n_features_in_} columns as in the fit, got {preds.shape[1]}. Pass the same "
                    "kind of predictions."
                )
            return preds
        X = X if hasattr(X, "shape") else np.asarray(X)
        if len(X.shape) == 1 and (reset or self.n_features_in_ == 1):
            X = np.asarray(X).reshape(-1, 1)
        how = {"reset": reset, "dtype": [np.float64, np.float32]}
        if hasattr(self, "_validate_data"):  # before scikit-learn 1.7
            X = self._validate_data(X, **how)
        else:
            from sklearn.utils.validation import validate_data  # scikit-learn 1.6 or later

            X = validate_data(self, X, **how)
        return torch.from_numpy(np.array(X))  # a copy, because arrays may be read-only

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = True
        return tags


class CalibratedPair(NamedTuple):
    """A fitted classifier, and the calibration of its predictions."""

    estimator: Any
    calibration: Calibration


class CalibratedClassifier(ClassifierMixin, MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier with probabilities from any calibrator, as `sklearn.calibration.CalibratedClassifierCV`.

    The calibrator is fitted to predictions for rows on which the classifier was not trained.

    With `ensemble=True`, each training part of `cv` gives a classifier, and a calibrator is fitted to its predictions
    for the other rows. Probabilities are the mean over these pairs. Test parts of fewer than 2 rows on average, such as
    those of leave-one-out, raise ValueError. With `ensemble=False`, one calibrator is fitted to the predictions for all
    rows, and one classifier to all rows.

    A training part may lack a class. Its classifier then gives this class probability 0, and rows of this class are
    left out of the fit of the calibrator. If no rows are left, the pair keeps the probabilities of its classifier, with
    a warning.

    Args:
        estimator: Classifier with `decision_function` or `predict_proba`.
        calibrator: Calibrator; see `Calibration`.
        cv: Number of folds, a splitter, or an iterable of (train, test) indices; None: 5 folds. Folds of a number are
            stratified. `"prefit"`: `estimator` is fitted, and all rows are used for the calibrator. A
            `sklearn.frozen.FrozenEstimator` has the same effect.
        ensemble: `"auto"`: True unless the classifier is already fitted.
        response_method: Predictions to calibrate: `"decision_function"`, whose scores count as logits, or
            `"predict_proba"`. `"auto"`: the first one that the classifier has, as in scikit-learn.
        n_jobs: Number of parallel jobs.

    Attributes:
        classes_: Classes in the order of the columns of `predict_proba`.
        calibrated_classifiers_: Pairs of `estimator` and `calibration`.
        response_method_: Method of the classifier whose predictions are calibrated.
        n_features_in_: Number of features, if the classifier has this attribute.
        feature_names_in_: Names of the features, if the classifier has this attribute.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.naive_bayes import GaussianNB
        >>> X, y = load_iris(return_X_y=True)
        >>> model = CalibratedClassifier(GaussianNB(), "structured_matrix", cv=3).fit(X, y)
        >>> model.predict_proba(X).shape, len(model.calibrated_classifiers_)
        ((150, 3), 3)
    """

    def __init__(
        self,
        estimator: Any,
        calibrator: str | Calibrator = "temperature",
        *,
        cv: Any = None,
        ensemble: bool | Literal["auto"] = "auto",
        response_method: Literal["auto", "decision_function", "predict_proba"] = "auto",
        n_jobs: int | None = None,
    ) -> None:
        self.estimator = estimator
        self.calibrator = calibrator
        self.cv = cv
        self.ensemble = ensemble
        self.response_method = response_method
        self.n_jobs = n_jobs

    def fit(self, X: Any, y: Any, sample_weight: Any = None, **params: Any) -> Self:
        """Fit classifiers and calibrators.

        Args:
            X: Features, as the classifier accepts them: an array, a sparse matrix, a DataFrame or a list.
            y: Labels `(N,)`, numbers or text.
            sample_weight: Weights `(N,)` for the calibrator, and for the classifier if its `fit` accepts them.
            **params: Arguments for `fit` of the classifier. Values with one entry per row are split into folds. With
                metadata routing also those that the splitter requests.

        Returns:
            The estimator itself.

        Raises:
            TypeError, ValueError: For invalid input.

        Warns:
            UserWarning: If the classifier does not accept weights, or a test part has no usable rows. See also
                `torchcalib.calibration.Calibrator.fit`.
        """
        check_choice("ensemble", self.ensemble, ("auto", True, False))
        check_choice("response_method", self.response_method, tuple(_RESPONSES))
        calibrator_of(self.calibrator)  # raises before the first fit
        X, y = indexable(X, y)
        labels = _checked_labels(y, None)
        y = of_split = y if isinstance(labels, Tensor) else labels
        weights = _checked_weights(sample_weight, X, None)
        of_estimator, of_splitter = self._routed(sample_weight, params)
        has_cv = not (isinstance(self.cv, str) and self.cv == "prefit")
        is_prefit = not has_cv or isinstance(self.estimator, FrozenEstimator)
        ensemble = not is_prefit if self.ensemble == "auto" else self.ensemble
        if is_prefit:
            if not hasattr(self.estimator, "classes_"):
                raise NotFittedError(
                    f"`estimator` must be fitted and have classes_, got {type(self.estimator).__name__} without them. "
                    "Fit it, or pass a number of folds as `cv`."
                )
            self.classes_ = classes_of_argument(self.estimator.classes_)
            index_tensor(labels, self.classes_, torch.device("cpu"))  # raises for labels that it does not know
        else:
            self.classes_ = classes_of(labels)
        if len(self.classes_) < 2:
            check_classes(self.classes_, 2)
        self._own_classes = self.classes_  # labels of the classifiers
        if _is_array(X) and not is_prefit and not isinstance(labels, Tensor) and self.classes_.dtype.kind not in "biuf":
            # Array libraries have no text: classifiers are fitted to class indices.
            self._own_classes = np.arange(len(self.classes_))
            labels = index_tensor(labels, self.classes_, as_tensor("X", X).device)
            y = like(labels, X)
        methods = [name for name in _RESPONSES[self.response_method] if hasattr(self.estimator, name)]
        if not methods:
            raise TypeError(
                f"`estimator` must have {' or '.join(_RESPONSES[self.response_method])}, got "
                f"{type(self.estimator).__name__}. Pass a classifier of scikit-learn."
            )
        self.response_method_ = methods[0]
        if is_prefit and not (ensemble and has_cv):
            scores = _columns(getattr(self.estimator, self.response_method_)(X))
            self.calibrated_classifiers_ = [self._pair(self.estimator, scores, labels, weights)]
        else:
            splits = list(check_cv(self.cv, of_split, classifier=True).split(X, of_split, **of_splitter))
            if ensemble:
                n_rows = sum(len(test) for _, test in splits)
                if n_rows < 2 * len(splits):
                    kind = "LeaveOneOut" if isinstance(self.cv, LeaveOneOut) else f"Requesting {len(splits)}-fold"
                    raise ValueError(
                        f"`cv` must have at least 2 rows in a test part on average with ensemble=True, got {n_rows} in "
                        f"{len(splits)} parts. {kind} cross-validation does not leave enough rows for each calibrator. "
                        "Pass ensemble=False, or fewer folds."
                    )
            method = self.response_method_
            folds = Parallel(n_jobs=self.n_jobs)(
                delayed(_fit_fold)(clone(self.estimator), X, y, train, test, of_estimator, method)
                for train, test in splits
            )
            if ensemble:
                self.calibrated_classifiers_ = [
                    self._pair(model, scores, *_rows(labels, weights, test), is_fold=True)
                    for (model, scores), (_, test) in zip(folds, splits, strict=True)
                ]
            else:
                fitted = clone(self.estimator).fit(X, y, **of_estimator)
                order = np.concatenate([test for _, test in splits])
                if not np.array_equal(np.sort(order), np.arange(len(labels))):
                    raise ValueError(
                        "`cv` must have every row in one test part with ensemble=False, got other parts. "
                        "Pass ensemble=True."
                    )
                parts, kept = [folds[0][1][:0]], [order[:0]]
                for (model, scores), (_, test) in zip(folds, splits, strict=True):
                    if len(model.classes_) > 1:  # a classifier of a single class predicts nothing
                        known = np.flatnonzero(_is_known(labels[test], model.classes_))
                        parts.append(self._in_all_classes(model, scores)[torch.from_numpy(known).to(scores.device)])
                        kept.append(test[known])
                scores = torch.cat(parts[1:] or parts)
                labels, weights = _rows(labels, weights, np.concatenate(kept))
                self.calibrated_classifiers_ = [
                    CalibratedPair(fitted, self._calibration(scores, labels, weights, self._own_classes))
                ]
        n_unchanged = sum(pair.calibration.calibrator_ is None for pair in self.calibrated_classifiers_)
        if n_unchanged:
            warn(
                f"`cv` must leave rows for each calibrator whose classes and weights are usable, got none for "
                f"{n_unchanged} of {len(self.calibrated_classifiers_)} calibrators. The probabilities of their "
                "classifiers are not calibrated. Shuffle or stratify the folds."
            )
        first = self.calibrated_classifiers_[0].estimator
        for name in ("n_features_in_", "feature_names_in_"):
            if hasattr(first, name):
                setattr(self, name, getattr(first, name))
        return self

    def predict_proba(self, X: Any) -> Any:
        """Return calibrated probabilities `(N, C)` in the order of `classes_`.

        They are a numpy array. If the classifier predicts tensors, or arrays of another library with the array API,
        they have the same kind.

        Args:
            X: Features, as the classifier accepts them.
        """
        check_is_fitted(self)
        probs, kind = self._probabilities(X)
        return like(probs, kind)

    def predict(self, X: Any) -> Any:
        """Return the class with the largest calibrated probability, `(N,)`.

        Args:
            X: Features, as the classifier accepts them.
        """
        check_is_fitted(self)
        probs, kind = self._probabilities(X)
        return _labels_at(probs.argmax(-1), self.classes_, kind)

    def get_metadata_routing(self) -> Any:
        """Return the routing of metadata to `fit` of the classifier and to `split` of the splitter."""
        to = MethodMapping().add(caller="fit", callee="fit")
        split = MethodMapping().add(caller="fit", callee="split")
        router = MetadataRouter(owner=self).add_self_request(self).add(estimator=self.estimator, method_mapping=to)
        return router.add(splitter=None if isinstance(self.cv, str) else self.cv, method_mapping=split)

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import get_tags  # scikit-learn 1.6 or later, as is this method

        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = get_tags(self.estimator).input_tags.sparse
        return tags

    def _routed(self, sample_weight: Any, params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if _routing_enabled():
            routed = process_routing(self, "fit", sample_weight=sample_weight, **params)
            return routed.estimator.fit, routed.splitter.split
        if sample_weight is None:
            return params, {}
        if has_fit_parameter(self.estimator, "sample_weight"):
            return {**params, "sample_weight": sample_weight}, {}
        warn(
            f"`sample_weight` is used only for the calibrator, because {type(self.estimator).__name__} does not "
            "accept it."
        )
        return params, {}

    def _probabilities(self, X: Any) -> tuple[Tensor, Any]:
        """Return the mean of the calibrated probabilities of all pairs, and predictions of a classifier."""
        found = []
        for pair in self.calibrated_classifiers_:
            response = getattr(pair.estimator, self.response_method_)(X)
            probs, own = pair.calibration._probabilities(_columns(response)), pair.calibration.classes_
            # The probability is 0 for classes that the classifier does not know.
            columns = index_tensor(own, self._own_classes, probs.device)
            found.append(placed(probs, columns, len(self._own_classes), 0.0))
        return torch.stack(found).mean(0), response

    def _pair(
        self, estimator: Any, scores: Tensor, labels: Any, weights: Tensor | None, is_fold: bool = False
    ) -> CalibratedPair:
        classes = classes_of_argument(estimator.classes_)
        if len(classes) > 1:
            check_classes(classes, scores.shape[1])
        known = _is_known(labels, classes)
        if not known.all():
            rows = np.flatnonzero(known)
            (labels, weights), scores = _rows(labels, weights, rows), scores[torch.from_numpy(rows).to(scores.device)]
        return CalibratedPair(estimator, self._calibration(scores, labels, weights, classes, is_fold))

    def _in_all_classes(self, model: Any, scores: Tensor) -> Tensor:
        """Return predictions with a column for each of more than two classes, in the order of `classes_`."""
        classes = classes_of_argument(model.classes_)
        check_classes(classes, scores.shape[1])
        if len(self.classes_) == 2:
            return scores
        is_logit = self.response_method_ == "decision_function"
        if scores.shape[1] < len(classes):  # log-odds of the second class
            scores = torch.cat([torch.zeros_like(scores), scores], -1)
        columns = index_tensor(classes, self._own_classes, scores.device)
        return placed(scores, columns, len(self.classes_), -torch.inf if is_logit else 0.0)

    def _calibration(
        self, scores: Tensor, labels: Any, weights: Tensor | None, classes: NDArray[Any], is_fold: bool = False
    ) -> Calibration:
        """Fit the calibrator to predictions `(N, K)`, or leave them unchanged if no row can be used."""
        from_logits = self.response_method_ == "decision_function"
        made = Calibration(self.calibrator, classes=classes, from_logits=from_logits)
        if len(classes) < 2 or not len(scores) or (weights is not None and not bool((weights > 0).any())):
            return made._keep(classes, from_logits)
        target = index_tensor(labels, classes, scores.device)
        weights = None if weights is None else weights.to(scores.device)
        return made._fit(scores, target, weights, classes, from_logits, is_fold)


def calibrator_of(calibrator: str | Calibrator) -> Calibrator:
    """Return a new calibrator for a name, or a copy of a calibrator."""
    if isinstance(calibrator, Calibrator):
        return deepcopy(calibrator)
    if not isinstance(calibrator, str) or calibrator not in NAMES:
        raise ValueError(
            f"`calibrator` must be a calibrator such as torchcalib.TemperatureScaling() or one of "
            f"{', '.join(map(repr, NAMES))}, got {shown(calibrator)}."
        )
    return NAMES[calibrator]()


def _checked_labels(y: Any, n: int | None) -> Any:
    """Return labels `(N,)` as an array, or as a tensor if they are in a tensor or on a device."""
    if _is_array(y):
        labels = as_labels(y)
    else:
        labels = column_or_1d(y, warn=True)
        check_classification_targets(labels)
    if n is not None:
        check_consistent_length(range(n), labels)
    return labels


def _checked_weights(sample_weight: Any, X: Any, preds: Tensor | None) -> Tensor | None:
    if sample_weight is None:
        return None
    if not _is_array(sample_weight):
        sample_weight = _check_sample_weight(sample_weight, X if preds is None else range(len(preds)), dtype=np.float64)
    return as_tensor("sample_weight", sample_weight, None if preds is None else preds.device)


def _is_array(x: Any) -> bool:
    return isinstance(x, Tensor) or is_foreign_array(x)


def _columns(response: Any) -> Tensor:
    scores = as_tensor("predictions", response)
    return scores[:, None] if scores.dim() == 1 else scores


def _fit_fold(
    estimator: Any,
    X: Any,
    y: Any,
    train: Any,
    test: Any,
    params: dict[str, Any],
    method: Response,
) -> tuple[Any, Tensor]:
    """Fit a classifier to the training part, and return it with its predictions `(N, K)` for the test part."""
    given = _check_method_params(X, params, indices=train)
    estimator.fit(_safe_indexing(X, train), _safe_indexing(y, train), **given)
    return estimator, _columns(getattr(estimator, method)(_safe_indexing(X, test)))


def _rows(labels: Any, weights: Tensor | None, index: NDArray[Any]) -> tuple[Any, Tensor | None]:
    return labels[index], None if weights is None else weights[index]


def _is_known(labels: Any, classes: Any) -> NDArray[np.bool_]:
    values = array_of(labels) if isinstance(labels, Tensor) else labels
    return np.isin(values, classes_of_argument(classes))


def _labels_at(index: Tensor, classes: NDArray[Any], kind: Any) -> Any:
    """Return labels at indices; in the kind of array of the input if the labels are numbers."""
    if _is_array(kind) and classes.dtype.kind in "biuf":
        return like(torch.from_numpy(classes).to(index.device)[index], kind)
    return classes[array_of(index)]
