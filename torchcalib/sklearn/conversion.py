"""Conversion between arrays and labels in the conventions of scikit-learn and tensors."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.arrays import as_tensor, is_foreign_array
from torchcalib.io.errors import first_of, shown
from torchcalib.reporting.estimators import class_indices


class Labelled(NamedTuple):
    """Predictions, class indices, weights and the task, as metric functions accept them."""

    preds: Tensor
    target: Tensor
    task: Task
    weights: Tensor | None
    positive: Any = None  # positive class of a binary task


def labelled(
    y_true: Any, y_proba: Any, *, sample_weight: Any = None, labels: Any = None, pos_label: Any = None
) -> Labelled:
    """Convert the arguments of a metric of scikit-learn.

    Args:
        y_true: Labels `(N,)`, numbers or text; or for several labels per sample 0 and 1, `(N, L)`.
        y_proba: Probabilities: of `pos_label` `(N,)`, of both classes `(N, 2)`, of each class `(N, C)`, or of each
            label `(N, L)`.
        sample_weight: Weights `(N,)`.
        labels: Classes in the order of the columns, as `classes_` of a classifier. None: the sorted values of `y_true`.
        pos_label: Positive class of a binary task. None: the last class.

    Raises:
        ValueError: If `y_true` has a label that `labels` does not contain. Also if the classes are unknown, because
            `labels` is None and not all of them occur in `y_true`.
    """
    preds = as_tensor("y_proba", y_proba)
    if preds.dim() == 2 and preds.shape[1] == 1:
        preds = preds[:, 0]
    weights = None if sample_weight is None else as_tensor("sample_weight", sample_weight, preds.device)
    y = as_labels(y_true)
    if y.ndim == 2:
        return Labelled(preds, as_tensor("y_true", y, preds.device), "multilabel", weights)
    n_classes = 2 if preds.dim() == 1 else preds.shape[-1]
    classes = _classes(y, labels, n_classes, pos_label)
    target = index_tensor(y, classes, preds.device)
    if n_classes > 2:
        return Labelled(preds, target, "multiclass", weights)
    positive = 1
    if pos_label is not None:
        try:
            positive = int(class_indices(np.asarray([pos_label]), classes)[0])
        except ValueError:
            raise ValueError(
                f"`pos_label` must be one of the classes {first_of([str(label) for label in classes])}, got "
                f"{shown(pos_label)}. Pass the label of the event."
            ) from None
    preds = preds if preds.dim() == 1 else preds[:, positive]
    return Labelled(preds, (target == positive).long(), "binary", weights, classes[positive])


def as_labels(y: Any) -> Any:
    """Return labels as a tensor if they are on a device or in a tensor, else as an array; a column becomes `(N,)`."""
    y = as_tensor("y_true", y) if isinstance(y, Tensor) or is_foreign_array(y) else np.asarray(y)
    return y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y


def classes_of(y: Any) -> NDArray[Any]:
    """Return the sorted distinct labels."""
    return array_of(torch.unique(y)) if isinstance(y, Tensor) else np.unique(y)


def index_tensor(y: Any, classes: NDArray[Any], device: torch.device) -> Tensor:
    """Return the index of each label in `classes`, int64 `(N,)`."""
    if not isinstance(y, Tensor):
        return torch.from_numpy(class_indices(y, classes)).to(device)
    if classes.dtype.kind not in "biuf":
        return torch.from_numpy(class_indices(array_of(y), classes)).to(device)
    values, order = torch.as_tensor(classes, device=y.device).sort()
    index = order[torch.searchsorted(values, y.to(values.dtype)).clamp(max=len(values) - 1)]
    if not bool((values[order.argsort()[index]] == y).all()):
        class_indices(array_of(y), classes)  # raises
    return index.to(device)


def _classes(y: Any, labels: Any, n_classes: int, pos_label: Any) -> NDArray[Any]:
    if labels is not None:
        classes = classes_of_argument(labels)
        if len(classes) != n_classes:
            raise ValueError(
                f"`labels` must have one label for each of the {n_classes} classes of `y_proba`, got {len(classes)}: "
                f"{first_of([str(label) for label in classes])}. Pass classes_ of the classifier."
            )
        check_distinct("labels", classes)
        return classes
    classes = classes_of(y)
    if len(classes) == n_classes:
        return classes
    if n_classes == 2:
        for usual in (np.array([0, 1]), np.array([-1, 1])):  # as in scikit-learn
            if classes.dtype.kind in "biuf" and np.isin(classes, usual).all():
                return usual
        if len(classes) == 1 and pos_label is not None:
            return classes if classes[0] == pos_label else np.append(classes, pos_label)
    raise ValueError(
        f"`labels` must be given unless all {n_classes} classes occur in `y_true`, got "
        f"{first_of([str(label) for label in classes])}. Pass classes_ of the classifier."
    )


def like(values: Tensor, x: Any) -> Any:
    """Return values in the kind of array that `x` is: a tensor, an array of another array library, or numpy."""
    if isinstance(x, Tensor):
        return values
    return x.__array_namespace__().from_dlpack(values) if is_foreign_array(x) else array_of(values)


def array_of(values: Tensor) -> NDArray[Any]:
    """Return a tensor as a numpy array."""
    array: NDArray[Any] = values.detach().cpu().numpy()
    return array


def classes_of_argument(classes: Any) -> NDArray[Any]:
    """Return given classes as an array, in their order."""
    labels = as_labels(classes)
    return array_of(labels) if isinstance(labels, Tensor) else labels


def placed(values: Tensor, columns: Tensor, n_columns: int, fill: float) -> Tensor:
    """Return values `(N, K)` in the given columns of a tensor `(N, n_columns)`, and `fill` in the other columns."""
    result = values.new_full((len(values), n_columns), fill)
    result[:, columns] = values
    return result


def placed_in_classes(probs: Any, own: Any, classes: NDArray[Any]) -> NDArray[Any]:
    """Return probabilities for the classes `own` in columns for all `classes`; others have probability 0."""
    values = as_tensor("predictions", probs)
    columns = index_tensor(classes_of_argument(own), classes, values.device)
    return array_of(placed(values, columns, len(classes), 0.0))


def check_distinct(name: str, classes: NDArray[Any]) -> None:
    """Raise ValueError if a class occurs several times."""
    values, numbers = np.unique(classes, return_counts=True)
    if len(values) < len(classes):
        raise ValueError(
            f"`{name}` must be distinct classes, got {shown(values[numbers > 1].tolist()[0])} several times. "
            "Pass classes_ of the classifier."
        )


def check_classes(classes: NDArray[Any], n_columns: int) -> None:
    """Raise ValueError unless predictions have one column for each class, or one column for two classes."""
    if len(classes) < 2:
        raise ValueError(f"`y` must have at least 2 classes, got one class: {shown(classes[:1].tolist())}.")
    if n_columns != len(classes) and (len(classes) > 2 or n_columns != 1):
        columns = "1 or 2 columns" if len(classes) == 2 else f"{len(classes)} columns"
        raise ValueError(
            f"`X` must have {columns} of predictions for {len(classes)} classes, got {n_columns}. Pass predict_proba "
            "or decision_function of a classifier, and its classes_ as `classes` if a class is missing in `y`."
        )
