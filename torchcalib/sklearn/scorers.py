"""Calibration error and scorers in the conventions of scikit-learn."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, signature
from typing import Any, Literal, get_args

from sklearn.metrics import accuracy_score, make_scorer
from torch import Tensor

import torchcalib.functional
from torchcalib._bridges import NAMES
from torchcalib.core.arguments import check_choice, check_flag
from torchcalib.functional.binned import ace, ece, mce, rmsce
from torchcalib.functional.estimator import declaration_of, factory_of, is_metric, options_of
from torchcalib.io.errors import shown
from torchcalib.sklearn.conversion import labelled

Norm = Literal["l1", "l2", "max"]
Strategy = Literal["uniform", "quantile"]

BINS = {"uniform": "equal_width", "quantile": "equal_mass"}
"""Kinds of bins, by their names in scikit-learn."""

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {"l1": ece, "l2": rmsce, "max": mce}

# `make_scorer` returns this class. Its method `_score` receives the classifier, so it can pass `classes_`.
_Scorer: Any = type(make_scorer(accuracy_score))


def calibration_error(
    y_true: Any,
    y_proba: Any,
    *,
    norm: Norm = "l1",
    squared: bool = False,
    n_bins: int = 15,
    strategy: Strategy = "uniform",
    sample_weight: Any = None,
    pos_label: Any = None,
    labels: Any = None,
) -> float:
    r"""Calibration error of probabilities, with the arguments that scikit-learn agreed on.

    For bins b with a fraction share_b of the samples, and gap_b the frequency of the event minus the mean probability:

    - `"l1"`: sum_b share_b |gap_b|, see `torchcalib.ece`; with `strategy="quantile"`, see `torchcalib.ace`
    - `"l2"`: sqrt(sum_b share_b gap_b^2), see `torchcalib.rmsce`
    - `"max"`: max_b |gap_b|, see `torchcalib.mce`

    The event of a binary task is the positive class. The event of a multi-class task is that the class with the largest
    probability (the top label) is right. With several labels per sample, the result is the mean over labels. On a
    finite sample the error is positive even for a calibrated model; see `torchcalib.calibration_test`.

    Args:
        y_true: Labels `(N,)`, numbers or text; or 0 and 1 for each of several labels per sample, `(N, L)`.
        y_proba: Probabilities: of the positive class `(N,)`, of both classes `(N, 2)`, of each class `(N, C)`, or of
            each label `(N, L)`. An array, a tensor on any device, or an array of a library with the array API.
        norm: `"l1"`, `"l2"` or `"max"`.
        squared: Return the square, for `norm="l2"` only.
        strategy: `"uniform"`: bins of equal width. `"quantile"`: bins with equal numbers of samples; weights must then
            be whole numbers.
        sample_weight: Weights `(N,)`.
        pos_label: Positive class of a binary task. None: the last one in `labels`.
        labels: Classes in the order of the columns of `y_proba`, as `classes_` of a classifier. None: the sorted labels
            in `y_true`, which must then contain all classes.

    Returns:
        A difference of probabilities in [0, 1], or its square. NaN without data.

    Raises:
        TypeError, ValueError: For invalid input.

    Reference:
        Kumar, Liang, Ma: Verified Uncertainty Calibration (NeurIPS 2019), sec. 2 (l2); Naeini, Cooper, Hauskrecht:
        Obtaining Well Calibrated Probabilities Using Bayesian Binning (AAAI 2015), sec. 2 (l1 and max).

    Example:
        >>> round(calibration_error(["no", "yes", "yes"], [0.2, 0.7, 0.9], n_bins=2), 4)
        0.2
        >>> round(calibration_error([0, 1, 1], [0.2, 0.7, 0.9], norm="l2", squared=True, n_bins=2), 4)
        0.04
    """
    check_choice("norm", norm, get_args(Norm))
    check_choice("strategy", strategy, get_args(Strategy))
    check_flag("squared", squared)
    if squared and norm != "l2":
        raise ValueError(f"`squared` must be False for norm={norm!r}, got True. Pass norm='l2'.")
    function = _FUNCTIONS[norm]
    options: dict[str, Any] = {"n_bins": n_bins}
    if norm == "l1":
        function = ace if strategy == "quantile" else ece
    else:
        options["bins"] = BINS[strategy]
    how = {"sample_weight": sample_weight, "pos_label": pos_label, "labels": labels}
    value = ScoreFunction(function)(y_true, y_proba, **how, **options)
    return value**2 if squared else value


@dataclass(frozen=True)
class ScoreFunction:
    """Function of a metric with the arguments of scikit-learn. It has one value, and can be pickled."""

    function: Callable[..., Tensor]

    @property
    def __name__(self) -> str:
        """Name of the metric function, which scikit-learn shows in the `repr` of a scorer."""
        return str(self.function.__name__)

    def __call__(
        self,
        y_true: Any,
        y_proba: Any,
        *,
        sample_weight: Any = None,
        pos_label: Any = None,
        labels: Any = None,
        **options: Any,
    ) -> float:
        """Return the value of the metric, or its distance from 0 if values nearer to 0 are better.

        For the arguments see `calibration_error`; `options` are those of the metric function.
        """
        found = labelled(y_true, y_proba, sample_weight=sample_weight, pos_label=pos_label, labels=labels)
        value = self.function(found.preds, found.target, task=found.task, weights=found.weights, **options)
        if value.numel() != 1:
            raise ValueError(
                f"`{self.__name__}` must have one value as a score, got {value.numel()} values. "
                "Select options of the function that average over classes or labels."
            )
        number = float(value.detach())
        return abs(number) if declaration_of(self.function).better == "nearer to 0" else number


class Scorer(_Scorer):  # type: ignore[misc]  # scikit-learn has no types
    """Scorer of scikit-learn that passes `classes_` of the classifier to the score function.

    The labels of a fold do not determine the columns of the predictions, because a class may be missing there.
    """

    def _score(self, method_caller: Any, estimator: Any, X: Any, y_true: Any, **kwargs: Any) -> float:
        classes = getattr(estimator, "classes_", None)
        is_list = isinstance(classes, list)  # one array for each of several labels
        if classes is not None and not is_list and "labels" not in self._kwargs:
            kwargs["labels"] = classes
        return float(super()._score(method_caller, estimator, X, y_true, **kwargs))


def get_scorer(scoring: str, **options: Any) -> Scorer:
    """Return a scorer for `scoring=` of `cross_validate`, `GridSearchCV` and other functions of scikit-learn.

    A scorer is called with a fitted classifier, its input and labels: `scorer(estimator, X, y, sample_weight=None)`.
    Larger scores are better. Names start with `neg_` if smaller values of the metric are better, and with `neg_abs_` if
    values nearer to 0 are better. The classifier must have `predict_proba`. Its `classes_` determine the class of each
    column, so labels may be text, and classes may be missing in a fold. With metadata routing, request weights by
    `scorer.set_score_request(sample_weight=True)`.

    Args:
        scoring: Name in `get_scorer_names()`.
        **options: Arguments of the metric, as in `sklearn.metrics.make_scorer`: of `calibration_error`, or of the
            function in the name, such as `n_bins` for `neg_ece`. Also `pos_label`.

    Returns:
        A new scorer, which can be pickled.

    Raises:
        ValueError: If the name is unknown.

    Example:
        >>> from sklearn.naive_bayes import GaussianNB
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> round(get_scorer("neg_nll")(GaussianNB().fit(X, y), X, y), 3)
        -0.111
        >>> get_scorer("neg_l1_calibration_error", n_bins=10)
        make_scorer(calibration_error, greater_is_better=False, response_method='predict_proba', norm=l1, n_bins=10)
    """
    known = _scorers()
    if scoring not in known:
        similar = _meant(str(scoring), known)
        advice = (
            f"Did you mean {similar!r}?" if similar else "For scores of scikit-learn use sklearn.metrics.get_scorer."
        )
        raise ValueError(
            f"`scoring` must be one of get_scorer_names(), such as 'neg_nll' or 'neg_l1_calibration_error', got "
            f"{shown(scoring)}. {advice}"
        )
    function, sign, own = known[scoring]
    return Scorer(function, sign, {**own, **options}, "predict_proba")


def _meant(name: str, known: Collection[str]) -> str | None:
    """Return the scorer of a metric without the prefix of scorers, or with its name in another package; or None."""
    stem = name.lower().removeprefix("neg_").removeprefix("abs_").removesuffix("_scorer")
    own = NAMES.get(stem, stem)
    return next((each for each in (f"neg_{own}", f"neg_abs_{own}", own) if each in known), None)


def get_scorer_names() -> list[str]:
    """Return the names of all scorers for `get_scorer`, sorted.

    They are the names of calibration errors in scikit-learn, and one name for each metric with a single value.

    Example:
        >>> [name for name in get_scorer_names() if "brier" in name]
        ['neg_brier_score', 'neg_stratified_brier_score']
    """
    return sorted(_scorers())


@cache
def _scorers() -> dict[str, tuple[Callable[..., float], int, dict[str, Any]]]:
    found: dict[str, tuple[Callable[..., float], int, dict[str, Any]]] = {}
    for norm in get_args(Norm):
        found[f"neg_{norm}_calibration_error"] = calibration_error, -1, {"norm": norm}
    found["neg_l2_squared_calibration_error"] = calibration_error, -1, {"norm": "l2", "squared": True}
    prefix = {"lower": "neg_", "nearer to 0": "neg_abs_", "higher": ""}
    for name in dir(torchcalib.functional):
        function = getattr(torchcalib.functional, name)
        if not is_metric(function):
            continue
        better = declaration_of(function).better
        if better is not None and (
            signature(function).return_annotation is Tensor
            and all(option.default is not Parameter.empty for option in options_of(factory_of(function))[1:])
        ):
            found[prefix[better] + name] = ScoreFunction(function), 1 if better == "higher" else -1, {}
    return found
