"""Predictions of scikit-learn classifiers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchcalib.core.tasks import Prepared


def predictions_of(estimator: Any, X: Any, y: Any) -> Prepared:  # noqa: N803 - the name that scikit-learn has
    """Return probabilities and labels of a fitted classifier; see `Report.from_estimator`."""
    if not hasattr(estimator, "predict_proba"):
        raise TypeError(
            f"`estimator` must have predict_proba, got {type(estimator).__name__}. Wrap a classifier without it in "
            "sklearn.calibration.CalibratedClassifierCV; pass predictions to torchcalib.report."
        )
    probs, target = estimator.predict_proba(X), np.asarray(y)
    if target.ndim == 2 and target.shape[1] == 1:
        target = target[:, 0]
    classes = getattr(estimator, "classes_", None)
    if classes is None:
        raise TypeError(
            f"`estimator` must have classes_ after its fit, got {type(estimator).__name__}. "
            "Pass its predictions to torchcalib.report with class_names."
        )
    if isinstance(probs, list):  # one array for each output
        return _of_outputs([np.asarray(each) for each in probs], classes, target)
    probs = np.asarray(probs)
    if target.ndim == 2:
        _check_rows(probs, target)
        return Prepared(torch.from_numpy(probs.copy()), _flags(target), "multilabel", _names(classes, probs.shape[1]))
    if probs.ndim != 2 or probs.shape[1] != len(classes) or len(classes) < 2:
        raise ValueError(
            f"`estimator` must give a probability for each of at least 2 classes, got shape {probs.shape} for the "
            f"{len(classes)} classes of classes_. Fit it to data of several classes."
        )
    _check_rows(probs, target)
    names = tuple(map(str, classes))
    labels = torch.from_numpy(_indices(target, classes))
    if len(classes) == 2:
        return Prepared(torch.from_numpy(probs[:, 1].copy()), labels, "binary", names)
    return Prepared(torch.from_numpy(probs.copy()), labels, "multiclass", names)


def _of_outputs(probs: Sequence[NDArray[Any]], classes: Sequence[Any], target: NDArray[Any]) -> Prepared:
    """Return the probabilities of 1 of several outputs as multi-label predictions."""
    columns = []
    for each, known in zip(probs, classes, strict=True):
        if not set(np.asarray(known).tolist()) <= {0, 1}:
            raise ValueError(
                f"`estimator` must have outputs of 0 and 1 for a multi-label report, got classes {list(known)}. "
                "Make a report of each output with torchcalib.report."
            )
        where = np.flatnonzero(np.asarray(known) == 1)
        columns.append(each[:, where[0]] if len(where) else np.zeros(len(each)))
    stacked = np.stack(columns, -1)
    _check_rows(stacked, target)
    return Prepared(torch.from_numpy(stacked), _flags(target), "multilabel", ())


def _check_rows(probs: NDArray[Any], target: NDArray[Any]) -> None:
    """Raise unless there is one target for each row."""
    if len(probs) != len(target) or (target.ndim == 2 and target.shape != probs.shape):
        raise ValueError(
            f"`y` must have one label for each row of `X`, got shape {target.shape} for predictions {probs.shape}. "
            "Pass the rows of the same split."
        )


def _flags(target: NDArray[Any]) -> torch.Tensor:
    """Return multi-label targets as integers."""
    if not np.isin(target, (0, 1)).all():
        raise ValueError("`y` must hold 0 and 1 for several labels, got other values. Binarize the labels first.")
    return torch.from_numpy(target.astype(np.int64))


def _names(classes: Sequence[Any], n_labels: int) -> tuple[str, ...]:
    """Return the names of labels, if the classifier has some that are not mere numbers."""
    names = tuple(map(str, classes))
    return names if len(names) == n_labels and names != tuple(map(str, range(n_labels))) else ()


def _indices(target: NDArray[Any], classes: Sequence[Any]) -> NDArray[np.int64]:
    """Return the places of labels among the classes of a classifier, numbers or text."""
    known = np.asarray(classes)
    if known.dtype.kind in "OUS":
        known, target = known.astype(str), target.astype(str)
    order = np.argsort(known)
    try:
        place = np.searchsorted(known, target, sorter=order).clip(max=len(known) - 1)
        indices: NDArray[np.int64] = order[place].astype(np.int64)
        unknown = np.flatnonzero(known[indices] != target)
    except TypeError:  # text where the classifier has numbers
        unknown = np.arange(len(target))
    if len(unknown):
        raise ValueError(
            f"`y` must hold the classes of the classifier, {known.tolist()}, got {target[unknown[0]].item()!r} "
            f"({len(unknown)} of {len(target)} rows). Encode labels as in its fit."
        )
    return indices
