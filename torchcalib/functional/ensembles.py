"""Predictions of ensembles, as input of metrics."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import Task, check_choice, check_flag, is_int, task_of
from torchcalib.core.arrays import as_tensor, column_names
from torchcalib.io.errors import quoted, shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import sigmoid, softmax, spread_infinite_logits


def mean_probabilities(
    members: Iterable[Any], task: Task | None = None, *, from_logits: bool = False, class_axis: int | None = None
) -> Tensor:
    """Return the prediction of an ensemble, or of test-time augmentation: the mean of the members' probabilities.

    The mean of logits is another prediction, which is usually more confident. Pass the result to metrics without
    `from_logits`. Metrics concatenate a list of batches; they do not average it.

    The function reads one member at a time, so that a generator never has all members in memory.

    Args:
        members: List or iterator of predictions of equal shape, for the same samples in the same order.
        task: Task of logits: their probabilities are a softmax (multi-class) or a sigmoid. Unused for probabilities.
        from_logits: Whether members are logits.
        class_axis: Axis of the classes of multi-class logits. None selects the last one of `(N, C)`.

    Returns:
        Probabilities of the shape and device of a member, float32, or float64 if a member is.

    Raises:
        TypeError: For a single tensor, and for members or arguments of another type.
        ValueError: For no members, different shapes or columns, and on the CPU for probabilities outside [0, 1].

    Gradient: in all members.

    Reference:
        Lakshminarayanan, Pritzel, Blundell: Simple and scalable predictive uncertainty estimation using deep ensembles
        (2017), arXiv 1612.01474, section 2.4.

    Example:
        >>> members = [torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.5]])]
        >>> mean_probabilities(members)
        tensor([[0.7000, 0.3000]])
        >>> mean_probabilities([torch.tensor([0.0]), torch.tensor([torch.inf])], "binary", from_logits=True)
        tensor([0.7500])
    """
    check_flag("from_logits", from_logits)
    if task is not None:
        check_choice("task", task, ("binary", "multiclass", "multilabel"))
    task = task_of(task) if from_logits else None
    if hasattr(members, "shape") or isinstance(members, Mapping | str) or not isinstance(members, Iterable):
        raise TypeError(
            f"`members` must be a list or an iterator of predictions, got {shown(members)}. Pass [p1, p2], or "
            "list(members) if the members are on the first axis."
        )
    total: Any = None
    n = 0
    columns: tuple[str, ...] = ()
    for n, member in enumerate(members, 1):
        names = column_names(member)
        columns = columns or names
        if names != columns:
            raise ValueError(
                f"`members` must have the same columns in the same order, got {quoted(columns)} and {quoted(names)} of "
                f"member {n - 1} (counted from 0). Pass member[columns] for each."
            )
        values = as_tensor("members", member)
        if not values.is_floating_point() or isinstance(member, int | float) or not values.dim():
            raise TypeError(
                f"`members` must be floating predictions of samples, got {values.dtype} of shape "
                f"{tuple(values.shape)}. Pass a list with one tensor or array for each member."
            )
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        if total is not None and values.shape != total.shape:
            raise ValueError(
                f"`members` must have equal shapes, got {tuple(total.shape)} and {tuple(values.shape)} of member "
                f"{n - 1} (counted from 0). Pass predictions for the same samples."
            )
        probs = _from_logits(values, task, class_axis) if from_logits else values
        if not from_logits and values.is_cpu and values.numel():  # a GPU would be synchronised
            wrong = ((values < 0) | (values > 1)).detach()
            if value_if_available(wrong.any()):
                raise ValueError(
                    f"`members` must be probabilities in [0, 1], got {float(values.detach()[wrong][0]):.3g} in member "
                    f"{n - 1} (counted from 0). Pass from_logits=True for logits."
                )
        total = probs if total is None else total + probs
    if total is None:
        raise ValueError("`members` must have at least one prediction, got none. Pass a list of predictions.")
    mean: Tensor = total / n
    return mean


def _from_logits(logits: Tensor, task: Task | None, class_axis: int | None) -> Tensor:
    """Return the probabilities of logits. `class_axis` is an axis of them, or None."""
    if task != "multiclass":
        return sigmoid(logits)
    axis = -1 if class_axis is None and logits.dim() == 2 else class_axis
    if not is_int(axis) or not -logits.dim() <= axis < logits.dim():
        raise ValueError(
            f"`class_axis` must be an axis of logits of shape {tuple(logits.shape)}, got {shown(class_axis)}. Pass "
            "class_axis=1 for (B, C, ...)."
        )
    return softmax(spread_infinite_logits(logits, axis), axis)
