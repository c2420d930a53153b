"""Advice in error messages: the likely cause of invalid values, inferred from the whole tensor.

The advice must never lead to a wrong result. If the cause is uncertain, the advice states when an option is correct.
"""

import torch
from torch import Tensor

from torchcalib.io.names import MAX_LOGIT
from torchcalib.io.text import decimals_of

MAX_IGNORED = 0.05
"""Largest plausible fraction of rows with an ignored label. A larger one indicates wrongly encoded labels."""

USUAL_IGNORED = -100
"""Label of ignored rows in `torch.nn.functional.cross_entropy` and Hugging Face, in any fraction of the rows."""

_MIN_VALUES = 8  # at least this many values, none negative, are probably not logits
_MAX_DECIMALS = 4
_MAX_ROUNDING = 0.1  # row sums with a larger rounding error should not be corrected by division


def cause_of_labels(target: Tensor, rows: Tensor, num_classes: int, absent: Tensor | None = None) -> str:
    """Return the likely cause of labels outside [0, num_classes - 1], as text for an error message.

    `rows` is the mask of these labels. `absent` is the mask of ignored rows, whose labels are replaced by 0.
    """
    values = target if absent is None else target[~absent.expand(target.shape)]
    values = values[~values.isnan()] if values.is_floating_point() else values
    low, high = (int(end) for end in values.aminmax())
    rows = rows.expand(target.shape)
    if num_classes == 2 and low == -1 and high == 1 and not bool((values == 0).any()):
        return "Labels seem to be -1 and 1. Replace -1 by 0."
    if low == 1 and high == num_classes:
        which = "of them" if absent is None else "labels that are not ignored"
        return f"Labels seem to count from 1. Subtract 1 from all {which}."
    if bool((target == USUAL_IGNORED).any()):
        return f"Pass ignore_index={USUAL_IGNORED}, the default in torch, to drop the rows with this label."
    least, greatest = (int(end) for end in target[rows].aminmax())
    if least == greatest:
        share = float(rows.double().mean())
        if share <= MAX_IGNORED:
            check = f"Check that class {least} has a prediction. " if least == num_classes else ""
            return f"{check}Pass ignore_index={least} if that value marks rows to drop."
        if not 0 < least <= num_classes:
            numbered = f"number the classes from 0 to {num_classes - 1}."
            if torch.unique(values[values != least]).numel() < 2:  # without these rows, a single class would remain
                return f"It is the label of {share:.0%} of rows: {numbered}"
            return (
                f"It is the label of {share:.0%} of rows. Pass ignore_index={least} if that value marks rows to drop. "
                f"Otherwise {numbered}"
            )
    if low >= 0:
        return (
            f"The largest label is {high}, which implies at least {high + 1} classes, but there are predictions for "
            f"{num_classes}. Check that every class has a prediction, and that labels count from 0."
        )
    return f"Labels range from {low} to {high}. Number the classes from 0 to {num_classes - 1}."


def cause_of_values(name: str, probs: Tensor, rows: Tensor, per_class: bool) -> str:
    """Return the likely cause of probabilities or soft targets outside [0, 1], as text for an error message.

    `rows` is the mask of the invalid values; with `per_class` (classes on the last axis), of the rows that contain
    them.
    """
    finite = probs[probs.isfinite()].double()
    low, high = (float(end) for end in finite.aminmax()) if finite.numel() else (0.0, 0.0)
    if name == "target":
        if not per_class and bool((finite == finite.round()).all()):
            return cause_of_labels(probs, rows, 2)
        return "Soft targets are proportions of annotators; pass annotator counts as integers."
    if low < 0:
        return "Pass from_logits=True if these are logits."
    if high <= 1 + 1e-3 and low >= 0 and finite.numel() == probs.numel():
        return "The excess is rounding error. Clip the probabilities to [0, 1]."
    if per_class:
        total = probs.double().sum(-1)
        mean = float(total.mean())
        if bool(((total - 100).abs() <= 1 + 0.005 * probs.shape[-1]).all()):
            return "Rows sum to 100: these are percentages. Divide them by 100."
        if bool(((total - mean).abs() <= 1e-3 * mean).all()):
            return f"All rows sum to {mean:.6g}. Divide them by their sum."
    elif MAX_LOGIT < high <= 100:
        return "No value is negative: these are probably percentages, not logits. Divide percentages by 100."
    if high <= MAX_LOGIT and bool((finite == finite.round()).all()):
        return (
            "All values are whole numbers: these seem to be class indices or ratings. Pass probabilities, such as "
            "predict_proba(X) in scikit-learn; pass from_logits=True only for logits."
        )
    if not per_class and high <= MAX_LOGIT and finite.numel() >= _MIN_VALUES:
        return (
            "No value is negative. Pass from_logits=True only for the input of a sigmoid. Divide percentages by 100. "
            "Convert other scores to probabilities."
        )
    if finite.numel() >= _MIN_VALUES:
        return (
            "No value is negative: these are probably not logits. Convert them to probabilities; pass "
            "from_logits=True only for the input of a softmax or a sigmoid."
        )
    return "Pass from_logits=True if these are logits."


def cause_of_sums(name: str, probs: Tensor) -> str:
    """Return the likely cause of rows of probabilities or soft targets that do not sum to 1, as text for an error."""
    total = probs.double().sum(-1)
    is_matrix = probs.dim() == 2 and len(probs) > 1
    for axis in range(0 if is_matrix else 1, probs.dim() - 1):
        if bool(((probs.double().sum(axis) - 1).abs() <= 1e-3).all()):
            if is_matrix:
                return "They sum to 1 over the other axis. Pass the shape (N, C), or class_axis=0 for (C, N)."
            return f"They sum to 1 over axis {axis}. Pass class_axis={axis} for class-first input."
    if name == "target":
        return "Divide annotator counts by their sum, or pass them as integers."
    decimals = decimals_of(probs, _MAX_DECIMALS, torch.finfo(probs.dtype).eps)
    decimals = None if decimals is None else max(1, decimals)
    rounding = 1e-3 if decimals is None else 0.5 * probs.shape[-1] * 10.0**-decimals
    farthest = float((total - 1).abs().max())
    if decimals is not None and farthest <= min(_MAX_ROUNDING, rounding):
        return (
            f"They are rounded to {decimals} decimals. Divide every row by its sum: "
            "preds / preds.sum(class_axis, keepdim=True)."
        )
    if decimals is not None and farthest <= min(0.5, rounding):
        return f"They are rounded to {decimals} decimals, which is too coarse. Store more decimals."
    if total.numel() == 1:
        return f"This is one row of {probs.numel()} classes. Pass task='binary' if each value is P(y=1) of a sample."
    if bool((total <= 1 + min(_MAX_ROUNDING, rounding)).all()):
        return "No row has a sum above 1. Check that every class has a prediction: one may be missing."
    return "Pass task='multilabel' if a sample can have several labels, with a target for each label."
