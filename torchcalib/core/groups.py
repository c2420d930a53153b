"""Group indices, which assign each sample to a group: conversion of text, and checks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.core.arrays import as_tensor, starts_with_tensor
from torchcalib.core.checks import check_indices, enforce, group_rule
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.io.errors import shown
from torchcalib.ops.host_values import value_if_available
from torchcalib.ops.logs import wide_dtype

NO_GROUP = -1
"""Group index of rows without a group, which are ignored. `pandas.factorize` uses the same value."""


_MAX_NAME_LENGTH = 1000  # maximum number of characters in a group name


def numbered_groups(
    groups: Any, names: Sequence[str] | None, device: torch.device
) -> tuple[Tensor, Sequence[str] | None]:
    """Return the number of the group of each sample, and the names of the groups by number.

    Text is converted to its position in `names`, or without names in the sorted distinct texts. A missing text (None,
    NaN or "") is -1, no group. Numbers are not changed, and need no names.
    """
    column = groups if isinstance(groups, Tensor) or starts_with_tensor(groups) else np.asarray(groups)
    kind = column.dtype.kind if isinstance(column, np.ndarray) else ""
    is_text = kind == "U" or (kind in ("O", "S", "T") and any(isinstance(x, str) for x in column.flat))
    if not is_text:
        return as_tensor("groups", groups, device), names
    is_missing = np.array([x is None or x != x or x == "" for x in column.flat], dtype=bool)
    texts, places = np.unique(column.astype(str).ravel()[~is_missing], return_inverse=True)
    known = list(map(str, texts)) if names is None else list(names)
    number_of = {name: k for k, name in enumerate(known)}
    if unknown := [text for text in texts if text not in number_of]:
        raise ValueError(
            f"`groups` must be among `group_names`, got {shown(str(unknown[0]))}. Add it to `group_names`."
        )
    numbers = np.full(column.size, NO_GROUP)
    numbers[~is_missing] = np.array([number_of[text] for text in texts], dtype=np.int64)[places]
    return torch.from_numpy(numbers.reshape(column.shape)).to(device), known


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
