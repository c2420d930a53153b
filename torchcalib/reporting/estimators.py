"""Convert predictions of scikit-learn classifiers to tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchcalib.core.tasks import Prepared
from torchcalib.io.errors import shown


def predictions_of(estimator: Any, X: Any, y: Any) -> Prepared:  # noqa: N803 - the name in scikit-learn
    """Return probabilities and labels of a fitted classifier; see `Report.from_estimator`."""
    if not hasattr(estimator, "predict_proba"):
        raise TypeError(
            f"`estimator` must have predict_proba, got {type(estimator).__name__}. Wrap a classifier in "
            "torchcalib.sklearn.CalibratedClassifier, or pass predictions to torchcalib.report."
        )
    probs, target = estimator.predict_proba(X), np.asarray(y)
    if target.ndim == 2 and target.shape[1] == 1:
        target = target[:, 0]
    classes = getattr(estimator, "classes_", None)
    if classes is None:
        raise TypeError(
            f"`estimator` must be fitted and have classes_, got {type(estimator).__name__}. "
            "Fit it, or pass its predictions to torchcalib.report with class_names."
        )
    if isinstance(probs, list):  # a classifier with several outputs returns one array for each
        columns = []
        for output, output_classes in zip([np.asarray(each) for each in probs], classes, strict=True):
            if not set(np.asarray(output_classes).tolist()) <= {0, 1}:
                raise ValueError(
                    "`estimator` must have outputs 0 and 1 for a multi-label report, got classes "
                    f"{np.asarray(output_classes).tolist()}. Create one report for each output with torchcalib.report."
                )
            column = np.flatnonzero(np.asarray(output_classes) == 1)
            columns.append(output[:, column[0]] if len(column) else np.zeros(len(output)))
        stacked = np.stack(columns, -1)
        _check_rows(stacked, target)
        return Prepared(torch.from_numpy(stacked), _flags(target), "multilabel", ())
    probs, names = np.asarray(probs), tuple(map(str, classes))
    if target.ndim == 2:
        _check_rows(probs, target)
        numbers = tuple(map(str, range(probs.shape[1])))  # not shown as names
        names = names if len(names) == len(numbers) and names != numbers else ()
        return Prepared(torch.from_numpy(probs.copy()), _flags(target), "multilabel", names)
    if probs.ndim != 2 or probs.shape[1] != len(classes) or len(classes) < 2:
        raise ValueError(
            f"`estimator` must return one probability for each of at least 2 classes, got shape {probs.shape} for "
            f"{len(classes)} classes in classes_. Fit it to data of several classes."
        )
    _check_rows(probs, target)
    labels = torch.from_numpy(class_indices(target, classes))
    if len(classes) == 2:
        return Prepared(torch.from_numpy(probs[:, 1].copy()), labels, "binary", names)
    return Prepared(torch.from_numpy(probs.copy()), labels, "multiclass", names)


def _check_rows(probs: NDArray[Any], target: NDArray[Any]) -> None:
    if len(probs) != len(target) or (target.ndim == 2 and target.shape != probs.shape):
        raise ValueError(
            f"`y` must have one label for each row of `X`, got shape {target.shape} for predictions of shape "
            f"{probs.shape}. Pass the same rows to both."
        )


def _flags(target: NDArray[Any]) -> torch.Tensor:
    if not np.isin(target, (0, 1)).all():
        found = np.setdiff1d(target, (0, 1))[0]
        raise ValueError(f"`y` must contain only 0 and 1 for several labels, got {shown(found)}. Binarize the labels.")
    return torch.from_numpy(target.astype(np.int64))


def class_indices(target: NDArray[Any], classes: Sequence[Any] | NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of each label in `classes`, int64 `(N,)`; labels are numbers or strings."""
    names = np.asarray(classes)
    if names.dtype.kind in "OUS":
        names, target = names.astype(str), target.astype(str)
    order = np.argsort(names)
    try:
        position = np.searchsorted(names, target, sorter=order).clip(max=len(names) - 1)
        indices: NDArray[np.int64] = order[position].astype(np.int64)
        unknown = np.flatnonzero(names[indices] != target)
    except TypeError:  # numpy cannot compare strings in `y` with numeric classes
        unknown = np.arange(len(target))
    if len(unknown):
        raise ValueError(
            f"`y` must contain only the classes of the classifier, {names.tolist()}, got "
            f"{target[unknown[0]].item()!r} ({len(unknown)} of {len(target)} rows). Encode the labels as for `fit`."
        )
    return indices
