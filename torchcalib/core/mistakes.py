"""Mistakes in input of valid types, shapes and values: swapped arguments, decisions, and probabilities as logits.

A rule must not apply to valid input by chance. It therefore requires a minimum number of rows.
"""

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from torchcalib.core.checks import SUM_TOLERANCE
from torchcalib.core.predictions import Predictions
from torchcalib.ops.host_values import value_if_available

MIN_ROWS = 20
"""Smallest number of rows of multi-class probabilities that are recognised, and of swapped arguments."""

MIN_VALUES = 100
"""Smallest number of binary or multi-label probabilities, and of rows of decisions, that are recognised."""

_NEAR = 0.005  # largest distance from 0 and 1 of the smallest and the largest of many probabilities
_FEW_TARGETS = 2  # number of different soft targets with label smoothing
_OTHERS = ("torchcalib", "torch", "torchmetrics")
"""Packages whose frames are not the caller of a warning."""

_DECISIONS = (
    "These are decisions, which have no calibration. Pass probabilities: predict_proba(X) in scikit-learn, or the "
    "output of a softmax or sigmoid."
)


def warn(message: str) -> None:
    """Issue a warning at the first caller outside torch, torchmetrics and this package, once for each call site."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OTHERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def check_mistakes(p: Predictions, first: Sequence[float]) -> None:
    """Raise ValueError for swapped arguments, and warn for decisions and for probabilities that are passed as logits.

    Args:
        p: predictions on the CPU, because values are read.
        first: the first predicted values, which rule out most mistakes.
    """
    may_be_decisions = all(x in (0, 1) for x in first)
    may_be_probabilities = p.from_logits and min(first) >= 0 and max(first) <= 1
    per_class = p.task == "multiclass"
    if may_be_decisions and _are_decisions(p.given, per_class):
        if not p.hard and p.n_annotators is None and has_probabilities(p.given_target):
            raise swapped("only 0 and 1", p.given_target)
        if n_rows(p.given, per_class) >= MIN_VALUES:
            warn(f"`preds` must be probabilities or logits, got only 0 and 1. {_DECISIONS}")
    elif may_be_probabilities and look_like_probabilities(p.given, per_class):
        sums = "rows sum to 1" if per_class else "some are near 0 and near 1"
        warn(
            "`preds` must be logits with from_logits=True, got values that look like probabilities: all are in [0, 1], "
            f"and {sums}. Omit from_logits=True for probabilities."
        )


def n_rows(values: Tensor, per_class: bool) -> int:
    """Return the number of rows of predictions, whose last axis contains classes with `per_class`."""
    return values.numel() // max(1, values.shape[-1]) if per_class else values.numel()


def look_like_probabilities(values: Tensor, per_class: bool) -> bool:
    """Return whether values that should be logits are probabilities.

    Multi-class rows are probabilities if all values are in [0, 1], all rows sum to 1, and there are at least `MIN_ROWS`
    rows. Other values are probabilities if all of at least `MIN_VALUES` are in [0, 1], the smallest is at most
    0.005, and the largest at least 0.995. Logits exceed this interval, or fill only a part of it.

    Args:
        values: multi-class `(..., N, C)`, otherwise any shape.
        per_class: whether the last axis contains classes.
    """
    values = values.detach()
    if n_rows(values, per_class) < (MIN_ROWS if per_class else MIN_VALUES):
        return False
    low, high = values.aminmax()
    if not per_class:
        return value_if_available((low >= 0) & (low <= _NEAR) & (high >= 1 - _NEAR) & (high <= 1)) is True
    if value_if_available((low >= 0) & (high <= 1)) is not True:
        return False
    total = values.sum(-1, dtype=torch.promote_types(values.dtype, torch.float32))
    return value_if_available(((total - 1).abs() <= SUM_TOLERANCE[values.dtype]).all()) is True


def _are_decisions(values: Tensor, per_class: bool) -> bool:
    """Return whether all of at least `MIN_ROWS` rows are 0 or 1, and not all rows are equal."""
    values = values.detach()
    if n_rows(values, per_class) < MIN_ROWS or value_if_available(((values == 0) | (values == 1)).all()) is not True:
        return False
    rows = values.reshape(-1, values.shape[-1]) if per_class else values.reshape(-1)
    return value_if_available((rows != rows[0]).any()) is True


def has_probabilities(target: Tensor) -> bool:
    """Return whether most floating targets are between 0 and 1, with more different values than label smoothing."""
    between = target[(target > 0) & (target < 1)] if target.is_floating_point() else target[:0]
    return 2 * between.numel() > target.numel() and torch.unique(between).numel() > _FEW_TARGETS


def swapped(found: str, target: Tensor) -> ValueError:
    """Return the error for predictions that are labels, with probabilities as targets."""
    example = float(target[(target > 0) & (target < 1)].flatten()[0])
    return ValueError(
        f"`preds` must be probabilities or logits, got {found}, and {example:.6g} in `target`. The arguments seem to "
        "be swapped. Pass the predictions first, then the targets."
    )


def are_swapped(preds: Tensor, target: Tensor) -> bool:
    """Return whether predictions contain only whole numbers, and most targets are probabilities."""
    return has_probabilities(target) and bool((preds == preds.round()).all())


def wrong_dtype(preds: Tensor, target: Tensor, task: str) -> Exception:
    """Return the error for predictions of a dtype that is not floating, with the likely cause."""
    if has_probabilities(target):
        return swapped(f"{preds.dtype}", target)
    rule = f"`preds` must be float16, bfloat16, float32 or float64, got {preds.dtype}"
    if preds.is_floating_point():  # for example float8
        return TypeError(f"{rule}. Convert them with preds.float().")
    if preds.dtype == torch.bool or not preds.numel():
        return TypeError(f"{rule}. {_DECISIONS}")
    preds, target = preds.cpu().double(), target.cpu().double()  # torch does not compare unsigned integers
    low, high = (int(end) for end in preds.aminmax())
    # Class indices are as large as labels.
    is_index = (task == "multiclass" and preds.dim() < 2) or (target.numel() > 0 and 1 < high <= int(target.max()))
    if not is_index and low >= 0 and 1 < high <= 100:
        return TypeError(f"{rule} with values from {low} to {high}. If these are percentages, pass preds / 100.")
    if not is_index and (low < 0 or high > 100):
        return TypeError(f"{rule} with values from {low} to {high}. Convert logits with preds.float().")
    return TypeError(f"{rule}. {_DECISIONS}")
