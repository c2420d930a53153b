"""Group indices, which assign each sample to a group: conversion of text and of several columns, and checks."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arrays import as_tensor, is_frame, starts_with_tensor
from torchcalib.core.checks import check_indices, enforce, group_rule
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype

NO_GROUP = -1
"""Group index of rows without a group, which are ignored. `pandas.factorize` uses the same value."""


_MAX_VALUES = 10  # largest number of different numbers in a column that are not divided into ranges
_MAX_NAME_LENGTH = 1000  # maximum number of characters in a group name


def numbered_groups(
    groups: Any, names: Sequence[str] | None, device: torch.device, samples: Sequence[int], keep_partial: bool = False
) -> tuple[Tensor, Sequence[str] | None]:
    """Return the number of the group of each sample, and the names of the groups by number.

    Text is converted to its position in `names`, or without names in the sorted distinct texts. A missing text (None,
    NaN or "") is -1, no group, and so is a missing integer of an array. Numbers are not changed, and need no names.
    Several columns, see `columns_of`, are converted to the text of their combinations, such as "age=old, sex=f". A row
    with a missing value in any column has no group. With `keep_partial` it has one, unless all are missing, and the
    texts have the form of `crossed`.
    """
    columns = columns_of(groups, samples)
    if columns is not None and len(columns) == 1:
        groups = next(iter(columns.values()))
    elif columns is not None:
        from torchcalib.io.text import crossed, shown_group

        numbers, texts = crossed(levels_of(columns, samples, device), keep_partial)
        texts = texts if keep_partial else list(map(shown_group, texts))
        return _positions(numbers, texts, names), names or texts
    column = _column(groups)
    if not _is_text(column):
        numbers = as_tensor("groups", groups, device)
        if isinstance(column, np.ndarray):  # pandas stores integers and missing values as floats
            from torchcalib.io.text import whole_groups

            numbers = whole_groups(numbers)
        return numbers, names
    numbers, texts = _numbered_texts(column)
    return _positions(numbers.to(device), texts, names), names or texts


def columns_of(groups: Any, samples: Sequence[int]) -> dict[str, Any] | None:
    """Return the columns of groups by name; None for groups that are not a DataFrame, a dict or a list of arrays.

    Unnamed arrays of a list are called "column 0" and so on. A list is a list of columns if each element has a value
    for every sample on the first axis.
    """
    if is_frame(groups):
        names = getattr(groups, "column_names", getattr(groups, "columns", groups))
        return {str(name): groups[name] for name in names}
    if not isinstance(groups, list | tuple) or (len(samples) > 1 and len(groups) == samples[0]):
        return None
    if not groups or not all(hasattr(x, "__len__") and not isinstance(x, str | bytes) for x in groups):
        return None
    if any(getattr(x, "ndim", 1) == 0 or len(x) != samples[0] for x in groups):
        return None
    names = [getattr(x, "name", None) for x in groups]
    names = [name if isinstance(name, str) else f"column {k}" for k, name in enumerate(names)]
    return dict(zip(names, groups, strict=True))


def crossed_names(levels: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the names of all combinations of the values of several columns, such as "age=old, sex=f"."""
    from torchcalib.io.text import parts_of_combinations

    return list(map(", ".join, parts_of_combinations(product(*map(range, map(len, levels.values()))), levels)))


def _column(values: Any) -> Any:
    """Return a tensor, a list of tensors, or the values as an array."""
    return values if isinstance(values, Tensor) or starts_with_tensor(values) else np.asarray(values)


def _is_text(column: Any) -> bool:
    """Return whether a column has text, or other objects that are not numbers, such as intervals."""
    kind = column.dtype.kind if isinstance(column, np.ndarray) else ""
    return kind in ("U", "S", "T") or (kind == "O" and any(not isinstance(x, Number | None) for x in column.flat))


def _numbered_texts(column: np.ndarray[Any, Any]) -> tuple[Tensor, list[str]]:
    """Return the position of each text in the sorted distinct texts, -1 if it is missing, and these texts."""
    values = (column.astype(str) if column.dtype.kind == "S" else column).ravel().tolist()
    text_of = {x: "" if _is_missing(x) else str(x) for x in dict.fromkeys(values)}
    texts = sorted(set(text_of.values()) - {""})
    place = {"": NO_GROUP, **{text: k for k, text in enumerate(texts)}}
    place_of = {x: place[text] for x, text in text_of.items()}
    numbers = np.fromiter(map(place_of.__getitem__, values), np.int64, len(values))
    return torch.from_numpy(numbers.reshape(column.shape)), texts


def _is_missing(x: Any) -> bool:
    """Return whether a value is None, NaN, NaT, NA or empty text."""
    return not x if isinstance(x, str) else x is None or str(x) in ("nan", "NaT", "<NA>")


def _positions(numbers: Tensor, texts: Sequence[str], names: Sequence[str] | None) -> Tensor:
    """Return the position in `names` of the text of each number, or the number if there are no names."""
    if names is None:
        return numbers
    place = {name: k for k, name in enumerate(names)}
    if unknown := [text for text in texts if text not in place]:
        raise ValueError(f"`groups` must be among `group_names`, got {shown(unknown[0])}. Add it to `group_names`.")
    places = torch.tensor([*map(place.__getitem__, texts), NO_GROUP], dtype=torch.int64, device=numbers.device)
    return places[numbers]  # the last place is that of -1


def levels_of(
    columns: Mapping[str, Any],
    samples: Sequence[int],
    device: torch.device,
    role: str = "groups",
    n_ranges: int | None = None,
) -> dict[str, tuple[Tensor, list[str]]]:
    """Return the level of each row of columns, -1 for a missing value, and the names of the levels.

    With `n_ranges`, more than 10 different numbers of a column are divided into ranges with similar numbers of rows.
    `role` is the name of the columns in errors.
    """
    levels = {name: _levels(name, values, device, n_ranges) for name, values in columns.items()}
    for name, (numbers, _) in levels.items():
        if numbers.numel() != prod(samples):
            raise ValueError(
                f"`{role}` must have one value per sample, shape {tuple(samples)}, got {tuple(numbers.shape)} in "
                f"{shown(name)}. Pass columns of the same rows."
            )
    return levels


def _levels(name: str, values: Any, device: torch.device, n_ranges: int | None) -> tuple[Tensor, list[str]]:
    """Return the level of each row of a column, and the names of the levels; see `levels_of`."""
    from torchcalib.io.text import distinct_numbers, texts_of_numbers

    column = _column(values)
    if _is_text(column):
        numbers, texts = _numbered_texts(column)
        return numbers.to(device), texts
    if isinstance(column, np.ndarray) and column.dtype.kind == "O":
        values = column.astype(np.float64)  # None becomes NaN
    values = as_tensor(name, values, device)
    numbers, distinct = distinct_numbers(values)
    if n_ranges is None or len(distinct) <= _MAX_VALUES:
        return numbers, texts_of_numbers(distinct)
    ordered = values[~values.isnan()].sort().values
    cuts = ordered[torch.arange(1, n_ranges, device=device) * len(ordered) // n_ranges].unique()
    cuts = cuts[cuts > ordered[0]]
    level = torch.searchsorted(cuts, values, right=True).masked_fill(values.isnan(), NO_GROUP)
    first = torch.cat((ordered[:1], cuts))
    last = torch.cat((ordered[torch.searchsorted(ordered, cuts) - 1], ordered[-1:]))
    return level, [f"{a:.6g} to {b:.6g}" for a, b in zip(first.tolist(), last.tolist(), strict=True)]


def check_names(names: Sequence[str] | None) -> None:
    """Raise an error unless all group names are strings of at most 1,000 characters."""
    if names is None:
        return
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"`group_names` must be a list of strings, got {names!r:.80}. Convert each name with str().")
    longest = max(map(len, names), default=0)
    if longest > _MAX_NAME_LENGTH:
        raise ValueError(
            f"`group_names` must have at most {_MAX_NAME_LENGTH:,} characters each, got {longest:,}. Use shorter names."
        )


def check_groups(groups: Tensor, device: torch.device, samples: Sequence[int]) -> None:
    """Raise an error unless `groups` is an integer tensor on `device` with shape `samples`. Values are not checked."""
    check_indices("groups", groups)
    if groups.device != device:
        raise ValueError(
            f"`groups` must be on the device of `preds` ({device}), got {groups.device}. "
            "Move it with groups.to(preds.device)."
        )
    if groups.shape != tuple(samples):
        raise ValueError(
            f"`groups` must have one number per sample, shape {tuple(samples)}, got {tuple(groups.shape)}. "
            "Expand it to this shape."
        )


def check_group_range(groups: Tensor, num_groups: int) -> None:
    """Raise ValueError unless all indices are in [0, num_groups), or -1 for rows without a group."""
    groups = groups.long()
    enforce([group_rule(groups, num_groups)], None, groups == NO_GROUP, False)


def in_groups(
    p: Predictions, groups: Tensor, num_groups: int, *, validate_args: bool = True, drop_invalid: bool = False
) -> Predictions:
    """Return the predictions with a checked group index in [0, num_groups) for each row, sharing the cache of `p`.

    Rows with index -1 (no group) are ignored. The indices of rows with weight 0 are not used. An index out of range
    raises ValueError. `drop_invalid` counts and ignores such rows instead, without synchronising the device.
    """
    per_sample = (*p.samples[:-2], 1, p.samples[-1]) if p.task == "multilabel" else p.samples
    groups = groups.reshape(per_sample).long()
    if groups.device.type == "cpu":
        least, greatest = groups.aminmax() if groups.numel() else (groups.new_zeros(()), groups.new_zeros(()))
        if value_if_available((least >= 0) & (greatest < num_groups)):
            return p.in_groups(groups, p.weights, p.n_invalid)
    wide = wide_dtype(groups.device)
    ones = torch.ones((), dtype=wide, device=groups.device)
    weights = torch.where(groups == NO_GROUP, 0.0, ones if p.weights is None else p.weights)
    rules = [group_rule(groups, num_groups)] if validate_args else []
    absent = in_all_replicates(weights == 0, len(p.samples))
    checked_weights, broken = enforce(rules, weights, absent, drop_invalid)
    n_invalid = p.n_invalid
    if drop_invalid and broken is not None:
        n_invalid = broken.sum() + (0 if n_invalid is None else n_invalid)
    # Ignored rows have weight 0, but they need a valid index.
    return p.in_groups(groups.clamp(0, num_groups - 1), checked_weights, n_invalid)
