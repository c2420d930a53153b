"""Evaluation of a metric function for every group of rows."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchcalib.core.arguments import InputOptions, Task, check_count, task_of
from torchcalib.core.groups import check_group_range, check_groups, numbered_groups
from torchcalib.core.inputs import flattened
from torchcalib.core.tasks import infers_task
from torchcalib.display.words import printable_lines
from torchcalib.io.errors import first_of, shown
from torchcalib.ops.host_values import constant


class GroupValues(Tensor):
    """Values for named groups: a tensor `(G, ...)` with the names of the groups.

    Operations on it are those of a tensor, and return plain tensors.

    Attributes:
        group_names: Names of the groups along the first axis.

    Example:
        >>> from torchcalib.functional import accuracy
        >>> values = by_group(accuracy, [0.9, 0.2, 0.6], [1, 0, 0], ["f", "m", "f"])
        >>> values
        f: 0.5
        m: 1
        >>> values["f"].item(), values.max().item()
        (0.5, 1.0)
    """

    group_names: tuple[str, ...]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation of torch, and return plain tensors."""
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return result.as_subclass(Tensor) if isinstance(result, cls) else result

    def __deepcopy__(self, memo: Any) -> "GroupValues":
        return _named(deepcopy(self.as_subclass(Tensor), memo), self.group_names)

    def __getitem__(self, index: Any) -> Any:
        """Return the value of a group by its name, or a part of the tensor."""
        if isinstance(index, str):
            if index not in self.group_names:
                raise KeyError(f"`index` must be one of the groups {first_of(self.group_names)}, got {shown(index)}.")
            index = self.group_names.index(index)
        return self.as_subclass(Tensor)[index]

    def __repr__(self) -> str:  # type: ignore[override]
        """Return one line for each group."""
        values = self.as_subclass(Tensor)
        rows = [f"{x:.4g}" if values.dim() == 1 else str(x) for x in values.tolist()]
        return printable_lines("\n".join(f"{name}: {row}" for name, row in zip(self.group_names, rows, strict=True)))

    def to_pandas(self) -> Any:
        """Return a pandas Series with the names as its index, or a DataFrame for values `(G, K)`."""
        import pandas as pd

        values = self.as_subclass(Tensor).detach().cpu().numpy()
        return (pd.Series if values.ndim == 1 else pd.DataFrame)(values, index=list(self.group_names))


_PER_SAMPLE = ("weights", "folds")
"""Options with one value per sample on the last axis, which are split by group."""


@infers_task
def by_group(
    function: Callable[..., Any],
    preds: Tensor,
    target: Tensor,
    groups: Any,
    task: Task | None = None,
    *,
    num_groups: int | None = None,
    **options: Any,
) -> Any:
    """Evaluate a metric function separately for every group of rows.

    The function is called once per group, with the rows in this group. For streaming metrics `ByGroup` is faster,
    because it processes all groups in one pass.

    Args:
        function: Function such as `ece` or `relative_calibration_loss`, called as
            `function(preds, target, task=task, **options)`. It may return a named tuple of tensors.
        preds: Predictions: binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`.
        target: Targets for the function.
        groups: Integers `(N,)` in [0, num_groups), or -1 for rows without a group. Text is numbered in sorted order;
            it is empty for rows without a group. Groups apply to all batch elements. Several columns (a DataFrame, a
            dict or a list of arrays) form groups such as "age=old, sex=f". A row with a missing value has no group.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_groups: Number of groups G. None means one more than the largest number in `groups`, or the number of
            different texts.
        **options: Options of the function. `weights` and `folds` are split by group. An option named `groups`, as in
            `relative_calibration_loss` and `bootstrap`, is not supported.

    Returns:
        Values `(G, ...)`, or a named tuple of tensors `(G, ...)`. For text, they are `GroupValues`, tensors with the
        names of the groups: `values["f"]` and `values.to_pandas()`. NaN for a group without samples, and at the end of
        the last axis if groups differ in its size, such as the number of bins.

    Raises:
        TypeError, ValueError: for invalid input. A note with the group number is added to errors from the function.

    Gradient:
        The gradient of the function.

    Example:
        >>> from torchcalib.calibration import relative_calibration_loss
        >>> g = torch.Generator().manual_seed(0)
        >>> logits, target = 2 * torch.randn(300, generator=g), torch.randint(0, 2, (300,), generator=g)
        >>> groups = torch.arange(300) % 3
        >>> by_group(relative_calibration_loss, logits, target, groups, task="binary", from_logits=True).shape
        torch.Size([3])
    """
    if not callable(function):
        raise TypeError(
            f"`function` must be a function such as torchcalib.functional.ece, got {shown(function)}. "
            "Pass the function without calling it."
        )
    task = task_of(task, **options)
    given = {name: options.pop(name) for name in InputOptions.__annotations__ if name in options}
    preds, target, given = flattened(task, preds, target, given)
    options |= given
    axis = preds.dim() - 1 - (task != "binary")
    if target.dim() <= axis or target.shape[axis] != preds.shape[axis]:
        raise ValueError(
            f"`target` must have as many samples as `preds`, got shapes {tuple(target.shape)} and "
            f"{tuple(preds.shape)}. Pass one target per sample."
        )
    groups, names = numbered_groups(groups, None, preds.device, preds.shape[axis : axis + 1])
    groups = groups.reshape(-1)
    check_groups(groups, preds.device, preds.shape[axis : axis + 1])
    if num_groups is None and names is not None:
        num_groups = max(1, len(names))
    if num_groups is None:
        num_groups = max(1, int(groups.max()) + 1 if groups.numel() else 1)
    check_count("num_groups", num_groups)
    check_group_range(groups, num_groups)
    per_sample = {name: options.pop(name) for name in _PER_SAMPLE if isinstance(options.get(name), Tensor)}
    order = groups.argsort(stable=True)
    present, sizes = groups[order].unique_consecutive(return_counts=True)
    values: list[Any] = []
    present_groups: list[int] = []
    for k, rows in zip(present.tolist(), torch.split(order, sizes.tolist()), strict=True):
        if k < 0:
            continue
        given = {name: column.index_select(-1, rows) for name, column in per_sample.items()}
        try:
            data = (preds.index_select(axis, rows), target.index_select(axis, rows))
            values.append(function(*data, task=task, **given, **options))
        except Exception as error:
            error.add_note(f"in group {k} of size {len(rows)}. Use group -1 for rows in groups that are too small.")
            raise
        present_groups.append(k)
    index = constant(present_groups, torch.int64, preds.device)
    names = None if names is None else [*names, *map(str, range(len(names), num_groups))]
    return _stacked(values, index, num_groups, names)


def _stacked(values: Sequence[Any], groups: Tensor, num_groups: int, names: Sequence[str] | None) -> Any:
    """Stack the values of the given groups into `(num_groups, ...)`, with NaN for absent groups."""
    if not values:
        empty = torch.full((num_groups,), torch.nan, device=groups.device)
        return empty if names is None else _named(empty, names)
    first = values[0]
    if isinstance(first, tuple):
        parts = [_stacked(part, groups, num_groups, names) for part in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if not isinstance(first, Tensor):
        raise TypeError(
            f"`function` must return a tensor, or a named tuple of tensors, got {type(first).__name__}. "
            "Call it with the rows of each group: preds[groups == k], target[groups == k]."
        )
    sizes = {value.shape[-1:] for value in values}
    if len(sizes) > 1:  # groups with different numbers of bins
        longest = max(*sizes)[0]
        values = [pad(value, (0, longest - value.shape[-1]), value=torch.nan) for value in values]
    stacked = torch.stack(list(values))
    empty = stacked.new_full((num_groups, *stacked.shape[1:]), torch.nan)
    found = empty.index_copy(0, groups, stacked)
    return found if names is None else _named(found, names)


def _named(values: Tensor, names: Sequence[str]) -> GroupValues:
    """Return values with the names of the groups."""
    named = values.as_subclass(GroupValues)
    named.group_names = tuple(names)
    return named
