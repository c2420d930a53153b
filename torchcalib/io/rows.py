"""Convert arrays that a reader returns to `Rows`: consecutive rows of a prediction file, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcalib.io.columns import check_same_words, shown_classes
from torchcalib.io.errors import InputError
from torchcalib.io.reader import TEXT, WHOLE, Reader, Text
from torchcalib.io.roles import codes_of
from torchcalib.io.source import Conversion
from torchcalib.io.text import (
    check_present,
    class_indices,
    class_positions,
    cluster_hashes,
    decimals_of,
    first_row,
    group_numbers,
    whole_groups,
)

_MAX_DECIMALS = 6
_MAX_ROUNDING_ERROR = 0.1  # largest accepted distance of a sum from 1


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a prediction file. All tensors except predictions are int64 or floating-point."""

    preds: Tensor  # same dtype as in the file
    target: Tensor
    weights: Tensor | None = None
    groups: Tensor | None = None  # group number of each sample, int64; -1 for no group
    group_names: list[str] | None = None  # names by group number, for these rows only; None if the file stores numbers
    clusters: Tensor | None = None  # identifier of the cluster of each sample, int64; a hash of text
    ids: Any = None  # id of each row, int64, or an array of text objects

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `ReportBuilder.update`, which has no ids."""
        return {name: value for name, value in vars(self).items() if name != "ids"}

    def __len__(self) -> int:
        return len(self.preds)

    def __getitem__(self, part: slice) -> Rows:
        sliced: dict[str, Any] = {name: value[part] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **sliced)


def rows_of(files: Conversion, reader: Reader, values: dict[str, Any], start: int) -> Rows:
    """Convert arrays by role to `Rows`: text to numbers, and columns `(n, 1, ...)` to `(n, ...)`."""
    labels = {role: f"`{getattr(files.source, role)}` in `{reader.label}`" for role in values}
    target, group_names = values["target"], None
    if "pred" in values:
        values["target"] = _is_right(values.pop("pred"), target, labels, start, files.allow_missing)
    elif isinstance(target, Text):
        values["target"] = class_indices(target, files.classes, labels["target"], start, files.allow_missing)
    elif files.task == "multiclass" and (target.dim() == values["preds"].dim() - 1 or target.shape[1:] == (1,)):
        if target.is_floating_point():
            target = _whole_labels(files, target, labels["target"], start)
        if shown_classes(files.classes):
            target = class_positions(target, files.classes, labels["target"], files.ignored_label)
        values["target"] = target
    if "groups" in values:
        groups = values["groups"] = group_column(values["groups"], labels["groups"])
        if isinstance(groups, Text):
            values["groups"], group_names = group_numbers(groups)
    if isinstance(clusters := values.get("clusters"), Text):
        values["clusters"] = cluster_hashes(clusters, labels["clusters"], start)
    ids = None
    if isinstance(values.get("ids"), Text):
        texts = values.pop("ids")
        ids = np.asarray(texts.names, dtype=object)[texts.codes.numpy()]
    is_column = values["preds"].dim() > len(files.source.shape)
    tensors = {role: v.squeeze(1) if is_column and v.dim() > 1 else v for role, v in values.items()}
    if files.task == "multiclass" and tensors["target"].dtype == torch.bool and tensors["target"].dim() > 1:
        _check_one_hot(tensors["target"], labels["target"], start)
    if files.allow_missing:
        tensors = _with_missing_as_nan(files, reader, tensors)
    if files.normalize:
        tensors["preds"] = _normalized(tensors["preds"], labels["preds"], start)
    whole = {role for role, v in tensors.items() if role != "preds" and not v.is_floating_point()}
    tensors = {role: v.to(torch.int64) if role in whole else v for role, v in tensors.items()}
    return Rows(**{"ids": ids, **tensors}, group_names=group_names)


def group_column(values: Text | Tensor, label: str) -> Text | Tensor:
    """Return a column of groups, whose numbers are converted to integers, -1 for a missing one."""
    if isinstance(values, Text):
        return values
    found = whole_groups(values)
    if found.is_floating_point():
        first = float(found[(found != found.round()) & ~found.isnan()][0])
        raise InputError(
            f"{label} must contain whole numbers or text as groups, got {first:g}. Store one number or name per sample."
        )
    return found


def decided(values: dict[str, Any], left_out: frozenset[str]) -> dict[str, Any]:
    """Return the rows whose text target is not left out."""
    target = values["target"]
    is_kept = [text.strip() not in left_out for text in target.names]
    kept = torch.tensor(is_kept, dtype=torch.bool, device="cpu")[target.codes]
    found = {role: replace(v, codes=v.codes[kept]) if isinstance(v, Text) else v[kept] for role, v in values.items()}
    numbers = torch.tensor(is_kept, device="cpu").cumsum(0) - 1  # of the texts that are left
    names = [text for text, kept_text in zip(target.names, is_kept, strict=True) if kept_text]
    return {**found, "target": Text(names, numbers[found["target"].codes])}


def _is_right(predicted: Any, true: Any, labels: Mapping[str, str], start: int, allow_missing: bool) -> Tensor:
    """Return 1 in rows whose predicted label is the true one, else 0; NaN without a true label if `allow_missing`."""
    codes, texts = codes_of(predicted)
    true_codes, true_texts = codes_of(true)
    is_missing = torch.tensor([text in ("", "nan") for text in true_texts], dtype=torch.bool, device="cpu")[true_codes]
    if not allow_missing:
        check_present(is_missing, labels["target"], start)
    try:
        check_same_words(texts, true_texts, labels["pred"])
    except ValueError as error:
        raise InputError(str(error)) from None
    numbers = {text: k for k, text in enumerate(dict.fromkeys((*texts, *true_texts)))}
    own, other = (
        torch.tensor([numbers[text] for text in each], dtype=torch.int64, device="cpu") for each in (texts, true_texts)
    )
    right = own[codes] == other[true_codes]
    return right.double().masked_fill(is_missing, torch.nan) if bool(is_missing.any()) else right.long()


def _whole_labels(files: Conversion, target: Tensor, label: str, start: int) -> Tensor:
    """Convert floating-point class indices to int64, unless some are missing (NaN)."""
    wrong = target != target.round()
    row = first_row(wrong & ~target.isnan() if files.allow_missing else wrong)
    if row is not None:
        found = float(target[row].flatten()[0])
        raise InputError(
            f"{label} must contain class indices, which are whole numbers, got {found:g} in row {start + row + 1}. "
            + ("Pass nan_policy='drop' to drop rows with NaN." if found != found else "Save class indices.")
        )
    return target if bool(target.isnan().any()) else target.to(torch.int64)


def _with_missing_as_nan(files: Conversion, reader: Reader, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Set predictions to NaN where the target or weight is missing. Metrics then drop and count these samples."""
    preds = tensors["preds"]
    for role, fill in (("target", 0), ("weights", 1), ("groups", -1), ("clusters", 0), ("ids", 0)):
        values = tensors.get(role)
        if values is None or not values.is_floating_point():
            continue
        missing = values.isnan()
        if role == "groups" or not bool(missing.any()):
            pass  # a row without a group still contributes to the overall results
        elif missing.shape == preds.shape and files.task != "multiclass":
            preds = preds.masked_fill(missing, torch.nan)
        else:
            rows = missing.reshape(len(preds), -1).any(1)
            preds = preds.masked_fill(rows.reshape(-1, *[1] * (preds.dim() - 1)), torch.nan)
        whole = reader.arrays[getattr(files.source, role)].dtype in (*WHOLE, *TEXT)
        is_label = role == "target" and files.task == "multiclass" and values.dim() < preds.dim()
        filled = values.masked_fill(missing, fill)
        tensors[role] = filled.to(torch.int64) if whole or is_label else filled
    return {**tensors, "preds": preds}


def _check_one_hot(target: Tensor, label: str, start: int) -> None:
    n_true = target.sum(-1).reshape(len(target), -1)
    row = first_row(n_true != 1)
    if row is not None:
        raise InputError(
            f"{label} must be true for one class in every row (task='multiclass'), got {int(n_true[row][0])} in "
            f"row {start + row + 1}. Pass task='multilabel' if several labels can be true in a row."
        )


def _normalized(probs: Tensor, label: str, start: int) -> Tensor:
    """Divide rounded probabilities `(N, ..., C)` by their sum over classes. Rows with NaN become NaN.

    A sum that differs from 1 by more than the rounding raises an error.
    """
    total = probs.double().sum(-1, keepdim=True)
    decimals = decimals_of(probs[probs.isfinite()], _MAX_DECIMALS, 1e-7)
    decimals = _MAX_DECIMALS if decimals is None else decimals
    farthest = min(_MAX_ROUNDING_ERROR, probs.shape[-1] * 0.5 * 10.0**-decimals) + 1e-3
    row = first_row((total - 1).abs() > farthest)
    if row is not None:
        raise InputError(
            f"{label} must sum to 1 within {farthest:.2g} for normalize=True, which corrects rounding only, got "
            f"{float(total[row].flatten()[0]):g} in row {start + row + 1}. Check that every class has a column."
        )
    return (probs.double() / total).to(probs.dtype)
