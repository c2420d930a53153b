"""Conversion of array-likes and class names to tensors, and inference of the task."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchcalib.core.arguments import Task, is_int, task_by_position, task_of, with_own_names
from torchcalib.core.arrays import (
    as_tensor,
    as_tensors,
    check_has_values,
    column_names,
    label_tensor,
    names_of_outcomes,
    single_axis,
)
from torchcalib.core.checks import MAX_LOGIT, SUM_TOLERANCE
from torchcalib.core.mistakes import check_not_swapped
from torchcalib.io.errors import shown, warn
from torchcalib.io.names import task_of_shapes
from torchcalib.ops.host_values import value_if_available

F = TypeVar("F", bound=Callable[..., Any])
_FEW_NEGATIVE = 0.05
"""Predictions with a larger fraction of negative values are treated as logits."""


class Prepared(NamedTuple):
    """Predictions and targets as tensors, their task, and the class names; `()` if the classes have no names."""

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
    from_logits: bool | None = None,
) -> Prepared:
    """Return predictions and targets as tensors, with the given or inferred task and the class names.

    Data are tensors or inputs of `numpy.asarray` and `from_lists`. Column names of a DataFrame, if text, name the
    classes, and text targets are class names. `class_names` are in the order of the class axis. `positive_classes`
    count as y=1 in multi-class predictions. Values that are not numbers raise TypeError, and unknown classes or
    ambiguous shapes ValueError.
    """
    preds = from_lists(preds, target, from_logits)
    columns = column_names(preds)
    names = columns if class_names is None else checked_names(class_names)
    if names != columns and set(names) == set(columns):
        raise ValueError(
            f"`class_names` must have the order of the columns of `preds`, got {shown(names[0])} for the column "
            f"{shown(columns[0])}. Leave class_names out, because the columns have names."
        )
    preds = as_tensor("preds", preds)
    names = names or names_of_outcomes(target)
    target = label_tensor(target, names, preds.device)
    n_axes = preds.dim()
    preds, target = _without_single_axes(preds, target)
    if task is None and preds.dim() < n_axes:  # a class axis of size 1 was removed
        task = "binary"
    elif task is None:
        task = "multiclass" if positive_classes is not None else infer_task(preds, target)
    return Prepared(preds, target, task_of(task), names)


def from_lists(preds: Any, target: Any, from_logits: bool | None) -> Any:
    """Return predictions without two properties that only lists and arrays have, and warn about a conversion.

    Rows with different numbers of choices get the probability 0, or the logit -inf, for missing choices. Whole numbers
    are percentages if the targets are outcomes, and if the numbers are too large for ratings. Other predictions are
    returned unchanged. `from_logits` None infers it; see `infer_from_logits`.
    """
    if isinstance(preds, Tensor):
        return preds
    if isinstance(preds, list | tuple) and (padded := _padded(preds, target, from_logits)) is not None:
        return padded
    return preds if from_logits else _fractions(preds, target)


def _padded(rows: Sequence[Any], target: Any, from_logits: bool | None) -> Tensor | None:
    """Return rows of different lengths, one for each target, as one tensor; None for other lists."""
    n_targets = target.shape[:1] if hasattr(target, "shape") else (len(target),) if isinstance(target, Sequence) else ()
    if n_targets != (len(rows),) or not all(isinstance(row, list | tuple | np.ndarray | Tensor) for row in rows):
        return None
    sizes = {tuple(row.shape) if isinstance(row, np.ndarray | Tensor) else (len(row),) for row in rows}
    if len(sizes) < 2 or (0,) in sizes or any(len(size) != 1 for size in sizes):
        return None
    choices = [as_tensor("preds", row) for row in rows]
    dtype = torch.cat([row[:1] for row in choices]).dtype
    if not dtype.is_floating_point or any(row.dim() != 1 for row in choices):
        return None
    if from_logits is None:
        from_logits = infer_from_logits(torch.cat(choices), "multiclass")
    fill, words = (-torch.inf, "logit -inf") if from_logits else (0.0, "probability 0")
    (least,), (most,) = min(sizes), max(sizes)
    warn(f"`preds` has rows of {least} to {most} choices. Missing choices have {words}.")
    return pad_sequence([row.to(dtype) for row in choices], batch_first=True, padding_value=fill)


def _fractions(preds: Any, target: Any) -> Any:
    """Return whole percentages of outcomes as fractions; other predictions are unchanged."""
    is_whole = isinstance(preds, list | tuple) and bool(preds) and isinstance(preds[0], int | np.integer)
    if not is_whole and getattr(getattr(preds, "dtype", None), "kind", "") not in ("i", "u"):
        return preds
    values = np.asarray(preds)
    if values.dtype.kind not in "iu" or values.ndim != 1 or not values.size:
        return preds
    if values.min() < 0 or not MAX_LOGIT < values.max() <= 100:  # smaller numbers may be ratings
        return preds
    outcome = label_tensor(target, names_of_outcomes(target), torch.device("cpu"))
    if outcome.shape != values.shape or not value_if_available(((outcome == 0) | (outcome == 1)).all()):
        return preds
    warn("`preds` contains percentages, which are divided by 100.")
    return values / 100


def in_own_order(preds: Any, target: Any, options: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return predictions, targets and options without names of scikit-learn; see `with_own_names`."""
    found = with_own_names({**options, "preds": preds, "target": target})
    return found.pop("preds"), found.pop("target"), found


def per_sample(name: str, values: Any, preds: Tensor) -> Tensor:
    """Return per-sample values, such as weights or groups, as a tensor; a column `(N, 1)` becomes `(N,)`."""
    column = as_tensor(name, values, preds.device)
    return column.squeeze(-1) if column.dim() > 1 and column.shape == (len(preds), 1) else column


def cluster_ids(clusters: Any, preds: Tensor) -> Tensor:
    """Return the identifiers of clusters, which may be integers or text: the same as those of a stream."""
    from torchcalib.core.clusters import identifiers

    check_has_values("preds", preds)
    return per_sample("clusters", identifiers(clusters, preds.device), preds)


def checked_names(class_names: Iterable[str]) -> tuple[str, ...]:
    """Return class names as a tuple. Raise an error unless they are distinct strings."""
    names = class_names if isinstance(class_names, str) else tuple(class_names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`class_names` must be a list of strings, got {shown(names)}. Write str(name) for each.")
    names = tuple(map(str, names))  # converts numpy.str_
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueError(f"`class_names` must be distinct, got {shown(repeated[0])} more than once. Rename one.")
    from torchcalib.io.limits import MAX_NAME

    longest = max(map(len, names), default=0)
    if longest > MAX_NAME:
        raise ValueError(
            f"`class_names` must have at most {MAX_NAME:,} characters each, got {longest:,}. Use shorter names."
        )
    return names


def check_name_count(class_names: Sequence[str], n_classes: int) -> None:
    """Raise ValueError unless there are no class names or one name for each class."""
    if class_names and len(class_names) != n_classes:
        raise ValueError(
            f"`class_names` must have a name for each of the {n_classes} classes, got {len(class_names)}. "
            "Give them in the order of the class axis; for binary predictions the negative class first."
        )


def infer_task(preds: Tensor, target: Tensor) -> Task:
    """Return the task, inferred from the shapes of predictions and targets, and from the targets if shapes are equal.

    Equal shapes with one axis imply a binary task, and a class axis that labels do not have implies a multi-class task.
    Equal shapes with two axes imply a multi-label task if there are at least three columns, and targets are 0 or 1 with
    different numbers of 1s in the rows. Other equal shapes are ambiguous: the target may contain one-hot labels,
    annotator counts, class probabilities, or binary labels. The ValueError then names the likely task.
    """
    shapes = f"shapes {tuple(preds.shape)} and {tuple(target.shape)}"
    single = preds.dim() > 1 and 1 in (preds.shape[1], preds.shape[-1])
    if preds.shape == target.shape and single:
        return "binary"
    if implied := task_of_shapes(preds.shape, target.shape):
        return implied
    if target.shape == (*preds.shape, 2) and not target.is_floating_point():
        task = "binary" if preds.dim() == 1 else "multilabel"
        raise ValueError(
            f"`task` must be given if `target` may contain annotator counts for no and yes, got {shapes}. "
            f"Pass task={task!r} if it contains counts."
        )
    if preds.dim() > 1 and preds.shape == target.shape:
        if preds.dim() == 2 and preds.shape[1] > 2 and value_if_available(_are_label_sets(target)):
            return "multilabel"
        maps = ", or task='binary' if every entry is the probability of its own event" if preds.dim() > 2 else ""
        raise ValueError(
            f"`task` must be given if `target` has the shape of `preds`, got {tuple(preds.shape)} for both. "
            f"{_one_hot_hint(target)}Pass task='multiclass' if every sample has one class (one-hot labels, class "
            f"probabilities or annotator counts), task='multilabel' if it can have several labels{maps}."
        )
    check_not_swapped(preds, target)
    raise ValueError(
        f"`target` must have one label for each sample of `preds`, got {shapes}. Pass binary (N,) and (N,), "
        "multi-class (N, C) and (N,), or multi-label (N, L) and (N, L) with task='multilabel'."
    )


def inferred_task(preds: Tensor, target: Tensor, options: Mapping[str, Any]) -> Task:
    """Return the task that input options imply, or else the data, as by `infer_task` for each batch element."""
    if options.get("positive_classes") is not None:
        return "multiclass"
    if options.get("num_classes") is not None or options.get("num_labels") is not None:
        return task_of(None, options.get("num_classes"), options.get("num_labels"))
    if preds.dim() == 1 and preds.shape == target.shape:
        return "binary"
    n_batch = options.get("batch_dims", 0)
    if is_int(n_batch) and 0 < n_batch < min(preds.dim(), target.dim()) and preds.numel():
        preds, target = preds.flatten(0, n_batch - 1)[0], target.flatten(0, n_batch - 1)[0]
    squeezed, target = _without_single_axes(preds, target)
    return "binary" if squeezed.dim() < preds.dim() else infer_task(preds, target)


def infers_task(function: F) -> F:
    """Decorate a function of data as `task_by_position` does, and infer the task unless an argument implies it."""
    names = list(signature(function).parameters)

    @wraps(function)
    def call(*data: Any, **options: Any) -> Any:
        given = dict(zip(names, data, strict=False)) | options
        if given.get("task") is None and given.keys() >= {"preds", "target"}:
            preds = from_lists(given["preds"], given["target"], options.get("from_logits", False))
            given["preds"], given["target"], _ = as_tensors(preds, given["target"])
            given["task"] = inferred_task(given["preds"], given["target"], options)
            return function(**given)
        return function(*data, **options)

    return cast(F, task_by_position(call))


def infer_from_logits(preds: Tensor, task: Task) -> bool:
    """Return whether predictions are logits, inferred from the fraction of negative values.

    Up to 5% negative values may be errors or ignored rows, and do not imply logits. Raise ValueError if all values of a
    binary or multi-label task are negative (log-odds or log-probabilities), or there are none (meta device).
    """
    check_has_values("preds", preds)
    if preds.dtype not in SUM_TOLERANCE:
        return False  # the check of the dtype raises an error later
    share = float((preds < 0).double().mean()) if preds.numel() else 0.0
    if share == 1 and task != "multiclass" and preds.numel() > 1:
        raise ValueError(
            "`from_logits` must be given if all predictions are negative, which are log-odds or log-probabilities. "
            "Pass from_logits=True for log-odds (the input of a sigmoid), or preds.exp() for log-probabilities."
        )
    return share > _FEW_NEGATIVE


def _are_label_sets(target: Tensor) -> Tensor:
    """Return a bool scalar: whether all targets are 0 or 1, and rows have different numbers of 1s.

    Rows of one-hot labels, and those of counts with the same number of annotators, have equal sums.
    """
    sums = target.sum(-1)
    return ((target == 0) | (target == 1)).all() & (sums != sums[:1]).any()


def _one_hot_hint(target: Tensor) -> str:
    """Return a sentence for an error message: whether the rows of a 0/1 target are one-hot. "" for other targets."""
    if not bool(((target == 0) | (target == 1)).all()):
        return ""
    if bool((target.long().sum(-1) == 1).all()):
        return "Every row of `target` contains a single 1, as in one-hot labels. "
    return "Rows of `target` contain several 1s or none, as in multi-label targets. "


def _without_single_axes(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Remove an axis of size 1 that only one of the two tensors has, as in `(N, 1)` and `(N,)`."""
    axis, extra = single_axis(preds.shape, target.shape), single_axis(target.shape, preds.shape)
    if axis is not None:
        return preds.squeeze(axis), target
    if extra is None and target.dim() > 1 and (*preds.shape[:-1], 1) == target.shape != preds.shape:
        extra = -1  # multi-class labels
    return preds, target if extra is None else target.squeeze(extra)
