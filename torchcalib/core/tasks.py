"""From the data of a person to tensors and a task: lists, batches, frames, names of classes, and shapes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchcalib.core.arguments import Task, is_int, task_by_position, task_of, weights_from
from torchcalib.core.arrays import (
    are_plain,
    as_tensor,
    check_has_values,
    class_table,
    column_names,
    label_tensor,
    names_of_outcomes,
    rows_in_cells,
    starts_with_tensor,
)
from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.core.linear_logits import LinearLogits
from torchcalib.io.errors import first_of, shown, warn
from torchcalib.io.names import MAX_LOGIT, Shapes, are_logits_by_values, extra_axes, named_as_logits
from torchcalib.ops.host_values import value_if_available

F = TypeVar("F", bound=Callable[..., Any])


class Prepared(NamedTuple):
    """Predictions and targets as tensors, their task, and the class names; `()` if the classes have no names."""

    preds: Tensor
    target: Tensor
    task: Task
    class_names: tuple[str, ...]
    from_logits: bool = False


def prepare(
    preds: Any,
    target: Any,
    task: Task | None = None,
    *,
    class_names: Sequence[str | int] | None = None,
    positive_classes: Sequence[int] | None = None,
    from_logits: bool | None = None,
    ignore_index: int | None = None,
) -> Prepared:
    """Return the `data_of` all predictions and targets, their task, and whether they are logits.

    None infers the task from the shapes. For `from_logits` None, names of columns decide, and then all values: see
    `are_logits_by_values`. `positive_classes` count as y=1 in multi-class predictions. Values that are not numbers
    raise TypeError, and unknown classes or ambiguous shapes ValueError.
    """
    from torchcalib.io.columns import shown_classes

    names = () if class_names is None else checked_names(class_names)
    if from_logits is None:
        from_logits = named_as_logits(column_names(preds), "`preds`")
    preds, target, _, classes = data_of(
        preds, target, task=task, from_logits=from_logits, class_names=names, ignore_index=ignore_index
    )
    task = infer_task(preds, target, {"positive_classes": positive_classes}) if task is None else task_of(task)
    preds, target = without_single_axes(preds, target)
    if from_logits is None:
        from_logits = infer_from_logits(preds, task)
    return Prepared(preds, target, task, names or shown_classes(classes), from_logits)


def data_of(
    preds: Any,
    target: Any,
    weights: Any = None,
    *,
    task: Any = None,
    from_logits: bool | None = False,
    class_names: Sequence[str] = (),
    ignore_index: int | None = None,
    batch_dims: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[str, ...]]:
    """Return predictions, targets and weights as tensors, on the device of the predictions, and the class names.

    Batches in lists are concatenated, and rows stacked. Rows with different numbers of choices get the probability 0,
    or the logit -inf, for missing choices. Whole numbers are percentages if the targets are outcomes, and if the
    numbers are too large for ratings. Columns of a frame are classes, by the rules in `io.columns`.
    """
    if isinstance(preds, list | tuple):
        if not batch_dims:
            preds, target, weights = _joined(preds, target, weights, task)
        if isinstance(preds, list | tuple) and (padded := _padded(preds, target, from_logits)) is not None:
            preds = padded
    preds = rows_in_cells(preds)
    if type(preds) is not Tensor and not from_logits:
        preds = _fractions(preds, target)
    classes: tuple[str, ...] = ()
    if column_names(preds):
        _check_index(preds, target)
        preds, classes = class_table("preds", preds, target, class_names)
    classes = tuple(class_names) or classes
    preds = as_tensor("preds", preds)
    if column_names(target):
        target = _columns_of_classes(target, classes)
    elif isinstance(target, list | tuple) and not starts_with_tensor(target):
        with suppress(TypeError, ValueError, RuntimeError):  # `label_tensor` raises the error with its cause
            target = np.asarray(target)
    classes = classes or names_of_outcomes(target)
    target = label_tensor(target, classes, preds.device, ignore_index)
    return preds, target, None if weights is None else as_tensor("weights", weights, preds.device), classes


def as_tensors(
    preds: Any, target: Any, weights: Any = None, sample_weight: Any = None, **how: Any
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tensors of `data_of`. `sample_weight` is an alias of `weights`."""
    weights = weights_from(weights, sample_weight)
    if are_plain((preds, target) if weights is None else (preds, target, weights)):
        return preds, target, weights
    return data_of(preds, target, weights, **how)[:3]


def _check_index(preds: Any, target: Any) -> None:
    """Warn if two objects of pandas have the same index in different orders."""
    own: Any = getattr(preds, "index", None)
    other: Any = getattr(target, "index", None)
    if not (hasattr(own, "equals") and hasattr(other, "equals")) or len(own) != len(other) or own.equals(other):
        return
    if own.is_unique and own.sort_values().equals(other.sort_values()):
        warn(
            "`preds` and `target` have the same index in different orders. Their rows are combined by position. "
            "Pass target.loc[preds.index] to combine them by name."
        )


def _columns_of_classes(target: Any, classes: Sequence[str]) -> Tensor:
    """Return targets with a column for each class, in the order of the predictions."""
    from torchcalib.io.columns import agree

    values, own = class_table("target", target, wanted=classes)
    if agree(own, classes):
        return values
    raise ValueError(
        f"`target` must have the columns of `preds`, {first_of(classes)}, got {first_of(own)}. Rename the columns, or "
        "pass arrays."
    )


def _joined(preds: Sequence[Any], target: Any, weights: Any, task: Any) -> tuple[Any, Any, Any]:
    """Concatenate a list of batches: arrays whose first axis has the samples. Other lists are returned unchanged.

    Targets are such a list too, or have one label for each sample of all batches.
    """
    sizes = _sizes(preds)
    own = _sizes(target) if isinstance(target, list | tuple) else []
    if not sizes or (own and [size[0] for size in own] != [size[0] for size in sizes]):
        return preds, target, weights
    if not own:
        shape = tuple(getattr(target, "shape", ())) or ((len(target),) if isinstance(target, Sequence) else ())
        size = sizes[0]
        if len(size) > 1 < len(sizes) and shape in (size[:-1], size[:1] + size[2:]) and len(set(sizes)) == 1:
            raise ValueError(
                f"`preds` must be one tensor for one target, got a list of {len(sizes)} with targets {shape}. Pass "
                "torchcalib.mean_probabilities(preds) for an ensemble."
            )
        if not shape or shape[0] != sum(size[0] for size in sizes) or shape[0] == len(sizes):
            return preds, target, weights
    elif all(len(size) == 1 for size in sizes) and task not in (None, "binary", "confidence"):
        return preds, target, weights  # rows with several labels
    elif len(sizes[0]) > 2 and all(size[1:] == labels for size, labels in zip(sizes, own, strict=True)):
        raise ValueError(
            f"`preds` must be one tensor, or a list of batches, got a list of shapes {sizes[0]} with targets {own[0]}: "
            "the first axis may have samples or classes. Pass torch.stack(preds) or torch.cat(preds)."
        )
    joined = [_concatenated(name, x) for name, x in (("preds", preds), ("target", target if own else None))]
    if (
        weights is not None
        and isinstance(weights, list | tuple)
        and [s[0] for s in _sizes(weights)] == [s[0] for s in sizes]
    ):
        weights = _concatenated("weights", weights)
    return joined[0], joined[1] if own else target, weights


def _sizes(batches: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the shapes of tensors or arrays with at least one axis; [] if an element is another object."""
    if not batches or not all(isinstance(x, np.ndarray | Tensor) and x.ndim for x in batches):
        return []
    return [tuple(x.shape) for x in batches]


def _concatenated(name: str, batches: Sequence[Any] | None) -> Any:
    if batches is None:
        return None
    if not any(isinstance(x, Tensor) for x in batches):
        return np.concatenate(batches)
    return torch.cat([as_tensor(name, x) for x in batches])


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


def per_sample(name: str, values: Any, preds: Tensor) -> Tensor:
    """Return per-sample values, such as weights or groups, as a tensor; a column `(N, 1)` becomes `(N,)`."""
    column = as_tensor(name, _of_samples(name, values, preds), preds.device)
    return column.squeeze(-1) if column.dim() > 1 and column.shape == (len(preds), 1) else column


def _of_samples(name: str, values: Any, preds: Tensor) -> Any:
    """Return per-sample values, of which a list of batches is concatenated."""
    are_batches = isinstance(values, list | tuple) and len(values) != len(preds)
    if are_batches and sum(size[0] for size in _sizes(values)) == len(preds):
        return _concatenated(name, values)
    return values


def cluster_ids(clusters: Any, preds: Tensor) -> Tensor:
    """Return the identifiers of clusters, which may be integers or text: the same as those of a stream."""
    from torchcalib.core.clusters import identifiers

    check_has_values("preds", preds)
    ids = identifiers(_of_samples("clusters", clusters, preds), preds.device)
    return per_sample("clusters", ids, preds)


def outcomes_of(pred: Any, target: Any) -> np.ndarray[Any, Any]:
    """Return 1 for each predicted label that is the true label, else 0, int64 `(N,)`. Labels are text or numbers."""
    predicted, true = (np.asarray(x.cpu() if isinstance(x, Tensor) else x).ravel() for x in (pred, target))
    if predicted.shape != true.shape:
        raise ValueError(
            f"`pred` must have one predicted label for each target, got shapes {predicted.shape} and {true.shape}. "
            "Pass the labels of the same rows."
        )
    if predicted.dtype.kind in "OUST" or true.dtype.kind in "OUST":
        from torchcalib.io.columns import check_same_words

        predicted, true = predicted.astype(str), true.astype(str)
        check_same_words(set(predicted.tolist()), set(true.tolist()), "`pred`")
    found: np.ndarray[Any, Any] = (predicted == true).astype(np.int64)
    return found


def checked_names(class_names: Iterable[str | int]) -> tuple[str, ...]:
    """Return class names as a tuple of text. Raise an error unless they are distinct texts or whole numbers."""
    from torchcalib.io.limits import MAX_NAME

    names = class_names if isinstance(class_names, str) else tuple(class_names)
    if isinstance(names, str) or not all(isinstance(name, str) or is_int(name) for name in names):
        raise TypeError(f"`class_names` must be a list of strings, got {shown(names)}. Write str(name) for each.")
    names = tuple(map(str, names))  # also numpy.str_
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ValueError(f"`class_names` must be distinct, got {shown(repeated[0])} more than once. Rename one.")

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


def infer_task(preds: Tensor, target: Tensor, options: Mapping[str, Any] | None = None) -> Task:
    """Return the task that input options imply, or else the shapes of a batch element; see `task_of`."""
    options = options or {}
    has_hint = any(options.get(name) is not None for name in ("positive_classes", "num_classes", "num_labels"))
    if preds.dim() == 1 and preds.shape == target.shape and not has_hint:
        return "binary"
    own, other, n = tuple(preds.shape), tuple(target.shape), options.get("batch_dims", 0)
    if is_int(n) and 0 < n < min(len(own), len(other)):
        own, other = own[n:], other[n:]
    shapes = Shapes(own, other, not target.is_floating_point())
    try:
        return task_of(**{**options, "task": None, "shapes": shapes})
    except ValueError:
        from torchcalib.core.mistakes import check_not_swapped

        check_not_swapped(preds, target)
        raise


def infers_task(function: F) -> F:
    """Decorate a function of data as `task_by_position` does, and infer the task unless an argument implies it."""
    names = list(signature(function).parameters)

    @wraps(function)
    def call(*data: Any, **options: Any) -> Any:
        given = dict(zip(names, data, strict=False)) | options
        if given.get("task") is None and given.keys() >= {"preds", "target"}:
            given = with_tensors(given)
            return function(**{**given, "task": infer_task(given["preds"], given["target"], options)})
        return function(*data, **options)

    return cast(F, task_by_position(call))


def with_tensors(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function with tensors for predictions, targets and weights; see `data_of`."""
    how = {name: given[name] for name in ("task", "from_logits", "ignore_index", "batch_dims") if given.get(name)}
    weights = weights_from(given.get("weights"), given.get("sample_weight"))
    preds, target, weights = as_tensors(given["preds"], given["target"], weights, **how)
    found = {name: value for name, value in given.items() if name != "sample_weight"}
    return {**found, "preds": preds, "target": target, **({} if weights is None else {"weights": weights})}


def infer_from_logits(preds: Tensor, task: Task) -> bool:
    """Return whether all predictions together are logits; see `are_logits_by_values`. The meta device has no values."""
    check_has_values("preds", preds)
    if isinstance(preds, LinearLogits):
        return True
    if preds.dtype not in SUM_TOLERANCE:
        return False  # the check of the dtype raises an error later
    return are_logits_by_values(int((preds < 0).sum()), preds.numel(), task)


def without_single_axes(preds: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Remove an axis of size 1 that only one of the two tensors has, as in `(N, 1)` and `(N,)`; see `extra_axes`."""
    axis, extra = extra_axes(preds.shape, target.shape)
    return preds if axis is None else preds.squeeze(axis), target if extra is None else target.squeeze(extra)
