"""Convert arrays, labels with names and the task, as callers give them, to the input of `InputFormat`."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.arrays import as_tensor


class Prepared(NamedTuple):
    """Predictions and targets as tensors, their task, and the names of classes, which may be missing."""

    preds: Tensor
    target: Tensor
    task: Task
    class_names: tuple[str, ...]


def prepare(
    preds: Any,
    target: Any,
    task: Task | None = None,
    *,
    class_names: Sequence[str] | None = None,
    positive_classes: Sequence[int] | None = None,
) -> Prepared:
    """Convert predictions and targets to tensors, and infer the task from their shapes if it is None.

    Args:
        preds: a tensor, or anything that `numpy.asarray` takes. Text columns of a DataFrame name the classes.
        target: the same. Text is a class name.
        task: None infers it.
        class_names: names of the classes in the order of their probabilities.
        positive_classes: not None for multi-class predictions that are evaluated as binary.

    Raises:
        TypeError, ValueError: if the values are no numbers, a name is unknown, or the shapes leave the task open.
    """
    names = _names_of(preds) if class_names is None else checked_names(class_names)
    preds = as_tensor("preds", preds)
    target = _labels(target, names, preds.device)
    n_axes = preds.dim()
    preds, target = _without_single_axes(preds, target)
    if task is None and preds.dim() < n_axes:  # there was an axis of one class
        task = "binary"
    elif task is None:
        task = "multiclass" if positive_classes is not None else infer_task(preds, target)
    return Prepared(preds, target, task, names)


def per_sample(name: str, values: Any, preds: Tensor) -> Tensor:
    """Return weights or groups of samples as a tensor, a column `(N, 1)` as `(N,)`."""
    column = as_tensor(name, values, preds.device)
    return column.squeeze(-1) if column.dim() > 1 and column.shape == (len(preds), 1) else column


def checked_names(class_names: Iterable[str]) -> tuple[str, ...]:
    """Return class names as a tuple, or raise if they are not different strings."""
    names = class_names if isinstance(class_names, str) else tuple(class_names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`class_names` must be a list of strings, got {names!r:.80}. Write str(name) for each.")
    names = tuple(map(str, names))  # without the subclass of numpy
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueError(f"`class_names` must be different names, got {repeated[0]!r} more than once. Rename one.")
    return names


def check_name_count(class_names: Sequence[str], n_classes: int) -> None:
    """Raise unless there is one name for each class, if there are any."""
    if class_names and len(class_names) != n_classes:
        raise ValueError(
            f"`class_names` must have a name for each of the {n_classes} classes, got {len(class_names)}. "
            "Give them in the order of the class axis; for binary predictions the negative class first."
        )


def infer_task(preds: Tensor, target: Tensor) -> Task:
    """Infer the task from the shapes of predictions and targets.

    Targets of the shape of the predictions mean a binary task if there is one axis. With more axes they are ambiguous:
    one-hot labels, multi-label targets, or maps of a binary task.

    Raises:
        ValueError: if the shapes are ambiguous or do not fit together. The message names the likely task.
    """
    shapes = f"shapes {tuple(preds.shape)} and {tuple(target.shape)}"
    single = preds.dim() > 1 and 1 in (preds.shape[1], preds.shape[-1])
    if preds.shape == target.shape and (preds.dim() == 1 or single):
        return "binary"
    if target.shape == (*preds.shape, 2) and not target.is_floating_point():
        task = "binary" if preds.dim() == 1 else "multilabel"
        raise ValueError(
            f"`task` must be given if `target` may hold counts of annotators who said no and yes, got {shapes}. "
            f"Pass task={task!r} if they are counts."
        )
    if preds.dim() > 1 and target.dim() == preds.dim() - 1:
        return "multiclass"
    if preds.dim() > 1 and preds.shape == target.shape:
        maps = ", or task='binary' if every entry is the probability of its own event" if preds.dim() > 2 else ""
        raise ValueError(
            f"`task` must be given if `target` has the shape of `preds`, got {tuple(preds.shape)} for both. "
            f"{_evidence(target)}Pass task='multiclass' if every sample has one class (one-hot labels, class shares or "
            f"annotator counts), task='multilabel' if it can have several labels{maps}."
        )
    raise ValueError(
        f"`target` must have one label for each sample of `preds`, got {shapes}. Pass binary (N,) and (N,), "
        "multi-class (N, C) and (N,), or multi-label (N, L) and (N, L) with task='multilabel'."
    )


def infer_from_logits(preds: Tensor) -> bool:
    """Infer whether predictions are logits: logits have negative values.

    Values that are neither negative nor probabilities are read as probabilities, and the checks of the input raise.
    """
    return bool((preds < 0).any())


def _evidence(target: Tensor) -> str:
    """Return what the values of a target with a class axis show, as a sentence."""
    if not bool(((target == 0) | (target == 1)).all()):
        return ""
    if bool((target.long().sum(-1) == 1).all()):
        return "Every row of `target` holds a single 1, as one-hot labels do. "
    return "Rows of `target` hold several 1s or none, as multi-label targets do. "


def _without_single_axes(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Remove an axis of one entry that only one of them has, such as that of `(N, 1)` beside `(N,)`."""
    for axis in (-1, 1):
        if target.dim() == preds.dim() - 1 and preds.shape[axis] == 1 and preds.squeeze(axis).shape == target.shape:
            return preds.squeeze(axis), target
    if target.dim() > 1 and target.shape[-1] == 1 and target.dim() - preds.dim() in (0, 1):
        column = target.squeeze(-1)
        if column.shape in (preds.shape, preds.shape[:-1]) and target.shape != preds.shape:
            return preds, column
    return preds, target


def _names_of(preds: Any) -> tuple[str, ...]:
    """Return the column names of a DataFrame with several columns, if all are text."""
    columns = () if isinstance(preds, Tensor) else tuple(getattr(preds, "columns", ()))
    is_text = len(columns) > 1 and all(isinstance(name, str) for name in columns)
    return tuple(map(str, columns)) if is_text else ()


def _labels(values: Any, class_names: Sequence[str], device: torch.device) -> Tensor:
    """Return targets as a tensor; names as indices of classes."""
    labels = None if isinstance(values, Tensor) or values is None else _objects(values)
    if labels is None or not any(isinstance(label, str) for label in labels.flat):
        return as_tensor("target", values, device)
    row = next((k for k, label in enumerate(labels.flat) if not isinstance(label, str)), None)
    if row is not None:
        raise ValueError(
            f"`target` must hold a class name in every row, got {labels.flat[row]!r} in row {row} (counted from 0). "
            "Fill it in, or leave the row out."
        )
    found, place = np.unique(labels.astype(str), return_inverse=True)
    if not class_names:
        raise ValueError(
            f"`target` must hold numbers if classes have no names, got text: {_some(found.tolist())}. "
            "Pass class_names, the names of all classes in the order of the class axis; `clf.classes_` of scikit-learn."
        )
    index = {name: k for k, name in enumerate(class_names)}
    unknown = [str(label) for label in found if label not in index]
    if unknown:
        raise ValueError(
            f"`target` must hold the class names {_some(class_names)}, got {_some(unknown)}. "
            "Check the spelling, or pass class_names with all classes in the order of the class axis."
        )
    numbers = torch.tensor([index[str(label)] for label in found])
    return numbers[torch.from_numpy(place.reshape(labels.shape))].to(device)


def _objects(values: Any) -> NDArray[Any] | None:
    """Return values as an array if they may be text."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):  # `as_tensor` names the cause
        return None
    return array.astype(object) if array.dtype.kind in "OUT" else None


def _some(names: Sequence[str]) -> str:
    """Return the first names of a list."""
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
