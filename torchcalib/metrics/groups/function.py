"""Any function of predictions, of every group of rows."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import InputOptions, Task, check_count
from torchcalib.core.arrays import as_tensor
from torchcalib.core.groups import check_group_range, check_groups
from torchcalib.core.inputs import flattened

_PER_SAMPLE = ("weights", "folds")
"""Options that have a value for every sample, on the last axis."""


def by_group(
    function: Callable[..., Any],
    preds: Tensor,
    target: Tensor,
    groups: Tensor,
    *,
    task: Task,
    num_groups: int | None = None,
    **options: Any,
) -> Any:
    """Compute a metric of every group of rows.

    The rows of each group are taken out and given to the function, one group after the other. For what streams,
    `ByGroup` computes all groups in one pass.

    Args:
        function: a function of torchcalib such as `ece` or `relative_calibration_loss`, or another one that is called
            as `function(preds, target, task=task, **options)`. It may return a named tuple of tensors.
        preds: binary `(..., N)`, multi-class `(..., N, C)`, multi-label `(..., N, L)`, as for the function.
        target: as for the function.
        groups: integers `(N,)` in [0, num_groups), or -1 for none; the same for all leading axes of `preds`.
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        num_groups: G; None is one more than the largest number.
        **options: those of the function. `weights` and `folds` have a value for every sample, and go with it. (The
            `groups` of `relative_calibration_loss` and `bootstrap`, which are something else, cannot be given here.)

    Returns:
        `(G, ...)`; NaN for a group without samples. For a named tuple one of its kind.

    Raises:
        TypeError, ValueError: for bad input, and whatever the function raises of a group, which a note then names: a
            calibration loss needs samples of each class.

    Gradient:
        That of the function.

    Example:
        >>> from torchcalib.calibration import relative_calibration_loss
        >>> g = torch.Generator().manual_seed(0)
        >>> logits, target = 2 * torch.randn(300, generator=g), torch.randint(0, 2, (300,), generator=g)
        >>> groups = torch.arange(300) % 3
        >>> by_group(relative_calibration_loss, logits, target, groups, task="binary", from_logits=True).shape
        torch.Size([3])
    """
    if not callable(function):
        raise TypeError(f"`function` must be a function such as torchcalib.functional.ece, got {function!r}.")
    given = {name: options.pop(name) for name in InputOptions.__annotations__ if name in options}
    preds, target, given = flattened(task, preds, target, given)
    options |= given
    axis = preds.dim() - 1 - (task != "binary")
    if target.dim() <= axis or target.shape[axis] != preds.shape[axis]:
        raise ValueError(
            f"`target` must have as many samples as `preds`, got shapes {tuple(target.shape)} and {tuple(preds.shape)}."
        )
    groups = as_tensor("groups", groups, preds.device).reshape(-1)
    check_groups(groups, preds.device, preds.shape[axis : axis + 1])
    if num_groups is None:
        num_groups = max(1, int(groups.max()) + 1 if groups.numel() else 1)
    check_count("num_groups", num_groups)
    check_group_range(groups, num_groups)
    per_sample = {name: options.pop(name) for name in _PER_SAMPLE if isinstance(options.get(name), Tensor)}
    order = groups.argsort(stable=True)
    present, sizes = groups[order].unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
    values: list[Any] = []
    held: list[int] = []
    for k, rows in zip(present.tolist(), torch.split(order, sizes.tolist()), strict=True):
        if k < 0:
            continue
        given = {name: column.index_select(-1, rows) for name, column in per_sample.items()}
        try:
            taken = (preds.index_select(axis, rows), target.index_select(axis, rows))
            values.append(function(*taken, task=task, **given, **options))
        except Exception as error:
            error.add_note(
                f"in group {k}, of {len(rows)} samples; give rows of groups that are too small the number -1"
            )
            raise
        held.append(k)
    return _in_places(values, torch.tensor(held, dtype=torch.int64, device=preds.device), num_groups)


def _in_places(values: Sequence[Any], places: Tensor, num_groups: int) -> Any:
    """Stack the values of the groups that have any, with NaN for all others."""
    if not values:
        return torch.full((num_groups,), torch.nan, device=places.device)
    first = values[0]
    if isinstance(first, tuple):
        parts = [_in_places(part, places, num_groups) for part in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if not isinstance(first, Tensor):
        raise TypeError(f"`function` must return a tensor, or a named tuple of tensors, got {type(first).__name__}.")
    nothing = first.new_full((num_groups, *first.shape), torch.nan)
    return nothing.index_copy(0, places, torch.stack(list(values)))
