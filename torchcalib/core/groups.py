"""Rows that belong to groups: which row to which."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchcalib.core.checks import GroupRule, check_numbering, enforce
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.ops.host_values import look
from torchcalib.ops.logs import wide_dtype

NO_GROUP = -1
"""The number of a row that belongs to no group and counts nowhere, as in `pandas.factorize`."""


def check_groups(groups: Tensor, device: torch.device, samples: Sequence[int]) -> None:
    """Raise unless `groups` is a tensor of integers of the shape of the samples; no value is looked at."""
    check_numbering("groups", groups)
    if groups.device != device:
        raise ValueError(
            f"`groups` must be on the device of `preds` ({device}), got {groups.device}. "
            "Move it with groups.to(preds.device)."
        )
    if groups.shape != tuple(samples):
        raise ValueError(
            f"`groups` must have one number per sample, shape {tuple(samples)}, got {tuple(groups.shape)}. "
            "Where samples share one, expand it to their shape."
        )


def check_group_range(groups: Tensor, num_groups: int) -> None:
    """Raise unless all numbers are those of groups, or -1."""
    groups = groups.long()
    enforce([GroupRule(groups, num_groups)], None, groups == NO_GROUP, False)


def in_groups(
    p: Predictions, groups: Tensor, num_groups: int, *, validate_args: bool = True, drop_invalid: bool = False
) -> Predictions:
    """Return the same rows, each with the group that it belongs to; what has been computed of them is shared.

    Args:
        p: predictions.
        groups: integers in [0, num_groups), or -1 for none: such a row is left out. As many as there are samples, in
            the order of these. Those of rows that are left out are not read.
        num_groups: G.
        validate_args: look at the numbers; False trusts them.
        drop_invalid: count bad rows and leave them out instead of raising, without waiting for the device.

    Raises:
        ValueError: a number is out of range.
    """
    per_sample = (*p.samples[:-2], 1, p.samples[-1]) if p.task == "multilabel" else p.samples
    groups = groups.reshape(per_sample).long()
    if groups.device.type == "cpu" and (not groups.numel() or look(_all_within(groups, num_groups))):
        return p.in_groups(groups, p.weights, p.n_invalid)
    wide = wide_dtype(groups.device)
    ones = torch.ones((), dtype=wide, device=groups.device)
    held = torch.where(groups == NO_GROUP, 0.0, ones if p.weights is None else p.weights)
    rules = [GroupRule(groups, num_groups)] if validate_args else []
    weights, broken = enforce(rules, held, in_all_replicates(held == 0, len(p.samples)), drop_invalid)
    n_invalid = p.n_invalid
    if drop_invalid and broken is not None:
        n_invalid = broken.sum() + (0 if n_invalid is None else n_invalid)
    # A row that is left out indexes something too, and adds nothing there.
    return p.in_groups(groups.clamp(0, num_groups - 1), weights, n_invalid)


def _all_within(groups: Tensor, num_groups: int) -> Tensor:
    least, greatest = groups.aminmax()
    return (least >= 0) & (greatest < num_groups)
