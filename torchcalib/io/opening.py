"""Open predictions in one or more files, and read their rows in chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import add
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchcalib.io import arrays
from torchcalib.io.errors import InputError, NoSamplesError, quoted, reading
from torchcalib.io.names import Task
from torchcalib.io.paths import check_paths, format_of
from torchcalib.io.reader import TEXT, WHOLE, Reader, Text
from torchcalib.io.roles import ROLES, find_roles, source_of
from torchcalib.io.source import Source
from torchcalib.io.text import (
    check_class_names,
    class_indices,
    cluster_hashes,
    first_row,
    group_numbers,
    names_of_labels,
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

    def __len__(self) -> int:
        return len(self.preds)

    def __getitem__(self, part: slice) -> Rows:
        sliced: dict[str, Any] = {name: value[part] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **sliced)


@dataclass(frozen=True)
class PredictionFiles:
    """Predictions of one data set in one or more files. Files are open only while rows are read."""

    source: Source
    task: Task
    readers: tuple[Reader, ...]  # one reader per file with rows, in order; `.npy` files share a reader
    allow_missing: bool = False  # set predictions to NaN in rows with missing values, instead of raising an error
    normalize: bool = False  # divide probabilities by their sum over classes

    @property
    def n_rows(self) -> int:
        """Total number of rows in all files."""
        return self.source.shape[0]

    @property
    def task_of_report(self) -> Task:
        """Task of a report on the rows: "confidence" for confidences, else `task`."""
        return "confidence" if self.source.are_confidences else self.task

    @property
    def has_names_of_labels(self) -> bool:
        """True if targets are text, and the prediction columns are not named after classes."""
        arrays = self.readers[0].arrays
        return arrays[self.source.target].dtype in TEXT and not arrays[self.source.preds].classes

    def chunks(self, max_bytes: int = 64 * 2**20) -> Iterator[Rows]:
        """Yield the rows in chunks. Each chunk contains one or more rows from a single file.

        Args:
            max_bytes: approximate maximum size of an array in a chunk, in bytes.

        Raises:
            InputError: if rows of a file are damaged, or a value is missing.
        """
        for reader in self.readers:
            yield from self.chunks_of(reader, max_bytes)

    def chunks_of(self, reader: Reader, max_bytes: int) -> Iterator[Rows]:
        """Yield the rows of one reader in chunks; see `chunks`."""
        roles = {role: name for role in ROLES if (name := getattr(self.source, role)) is not None}
        start = 0
        for chunk in reader.stream(list(roles.values()), max_bytes, self.allow_missing):
            yield self._rows_of(reader, dict(zip(roles, chunk, strict=True)), start)
            start += len(chunk[0])

    def _rows_of(self, reader: Reader, values: dict[str, Any], start: int) -> Rows:
        """Convert arrays by role to `Rows`: text to numbers, and columns `(n, 1, ...)` to `(n, ...)`."""
        labels = {role: f"`{getattr(self.source, role)}` in `{reader.label}`" for role in values}
        target, group_names = values["target"], None
        if isinstance(target, Text):
            values["target"] = class_indices(
                target, self.source.class_names, labels["target"], start, self.allow_missing
            )
        elif self.task == "multiclass" and target.is_floating_point() and target.dim() == values["preds"].dim() - 1:
            values["target"] = self._whole_labels(target, labels["target"], start)
        if isinstance(groups := values.get("groups"), Text):
            values["groups"], group_names = group_numbers(groups)
        if isinstance(clusters := values.get("clusters"), Text):
            values["clusters"] = cluster_hashes(clusters, labels["clusters"], start)
        is_column = values["preds"].dim() > len(self.source.shape)
        tensors = {role: v.squeeze(1) if is_column and v.dim() > 1 else v for role, v in values.items()}
        if self.task == "multiclass" and tensors["target"].dtype == torch.bool:
            _check_one_hot(tensors["target"], labels["target"], start)
        if self.allow_missing:
            tensors = self._with_missing_as_nan(reader, tensors)
        if self.normalize:
            tensors["preds"] = _normalized(tensors["preds"], labels["preds"], start)
        whole = {role for role, v in tensors.items() if role != "preds" and not v.is_floating_point()}
        tensors = {role: v.to(torch.int64) if role in whole else v for role, v in tensors.items()}
        return Rows(**tensors, group_names=group_names)

    def _whole_labels(self, target: Tensor, label: str, start: int) -> Tensor:
        """Convert floating-point class indices to int64, unless some are missing (NaN)."""
        wrong = target != target.round()
        row = first_row(wrong & ~target.isnan() if self.allow_missing else wrong)
        if row is not None:
            found = float(target[row].flatten()[0])
            raise InputError(
                f"{label} must contain class indices, which are whole numbers, got {found:g} in row {start + row + 1}. "
                + ("Pass nan_policy='drop' to drop rows with NaN." if found != found else "Save class indices.")
            )
        return target if bool(target.isnan().any()) else target.to(torch.int64)

    def _with_missing_as_nan(self, reader: Reader, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Set predictions to NaN where the target or weight is missing. Metrics then drop and count these samples."""
        preds = tensors["preds"]
        for role, fill in (("target", 0), ("weights", 1), ("groups", -1), ("clusters", 0)):
            values = tensors.get(role)
            if values is None or not values.is_floating_point():
                continue
            missing = values.isnan()
            if role == "groups" or not bool(missing.any()):
                pass  # a row without a group still contributes to the overall results
            elif missing.shape == preds.shape and self.task != "multiclass":
                preds = preds.masked_fill(missing, torch.nan)
            else:
                rows = missing.reshape(len(preds), -1).any(1)
                preds = preds.masked_fill(rows.reshape(-1, *[1] * (preds.dim() - 1)), torch.nan)
            whole = reader.arrays[getattr(self.source, role)].dtype in (*WHOLE, *TEXT)
            is_label = role == "target" and self.task == "multiclass" and values.dim() < preds.dim()
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
    farthest = min(_MAX_ROUNDING_ERROR, probs.shape[-1] * 0.5 * 10.0 ** -_decimals_of(probs)) + 1e-3
    row = first_row((total - 1).abs() > farthest)
    if row is not None:
        raise InputError(
            f"{label} must sum to 1 within {farthest:.2g} for normalize=True, which corrects rounding only, got "
            f"{float(total[row].flatten()[0]):g} in row {start + row + 1}. Check that every class has a column."
        )
    return (probs.double() / total).to(probs.dtype)


def _decimals_of(probs: Tensor) -> int:
    """Return the smallest number of decimals that represents all finite values, at most 6."""
    values = probs[probs.isfinite()].double()
    for decimals in range(_MAX_DECIMALS):
        if bool(((values * 10**decimals).round() / 10**decimals - values).abs().le(1e-7).all()):
            return decimals
    return _MAX_DECIMALS


def open_predictions(
    paths: Sequence[str | Path],
    *,
    frame: Any = None,
    preds: str | None = None,
    target: str | None = None,
    weights: str | None = None,
    groups: str | None = None,
    clusters: str | None = None,
    from_logits: bool | None = None,
    task: Task | None = None,
    class_names: Sequence[str] | None = None,
    nan_policy: Literal["raise", "drop"] = "raise",
    normalize: bool = False,
) -> PredictionFiles:
    """Open prediction files: find the arrays by name, and check their shapes and dtypes.

    Args:
        paths: shards of one data set with the same format, names and dtypes. A `.npy` data set consists of one file of
            predictions, one of targets, and optional files of weights, groups and clusters.
        frame: DataFrame of pandas, polars or pyarrow instead of files; `paths` is then ignored.
        preds: name of the predictions: a key, a column, the stem of numbered columns, or the stem of a `.npy` file.
            A list `"a,b,c"`, a pattern `"prob_*"` or a range `"0..3"` selects one column per class. None searches for
            the common names in `torchcalib.io.names`.
        target: name of the targets, or None to find a common name. Text targets are class names.
        weights: name of the weights, or None to find a common name. Weights are optional.
        groups: name of the groups, which are whole numbers or text; None for no groups.
        clusters: name of the clusters of dependent rows, which are whole numbers or text; None for independent rows.
        from_logits: whether predictions are logits. None infers it from their name, and raises for ambiguous names.
        task: task of the predictions. None infers it from the shapes, and raises for ambiguous shapes. Targets with the
            shape of multi-class predictions are ambiguous: multi-label targets, one-hot labels or annotator counts.
            With `"confidence"`, predictions are confidences, and targets are 1 for correct predictions.
        class_names: names of the classes or labels in the order of `preds`; for a binary task the negative class first.
            None uses the column names, or else the sorted text targets if the predictions agree with this order.
        nan_policy: `"drop"` sets predictions to NaN in rows with a missing value; `"raise"` raises an error.
        normalize: divide rounded multi-class probabilities by their sum.

    Returns:
        The opened files. No rows are read before `chunks` is called, except to check text targets. Samples are on the
        first axis of every array, and classes are on the last axis.

    Raises:
        InputError: if a file is missing, damaged or unsuitable, or if names or shapes are ambiguous.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> with TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/valid.npz", logits=np.zeros((5, 3), np.float32), labels=np.arange(5) % 3)
        ...     files = open_predictions([f"{folder}/valid.npz"])
        ...     targets = [rows.target.tolist() for rows in files.chunks(max_bytes=24)]
        >>> files.task, files.source.shape, files.source.from_logits
        ('multiclass', (5, 3), True)
        >>> targets
        [[0, 1], [2, 0], [1]]
    """
    given = {"preds": preds, "target": target, "weights": weights, "groups": groups, "clusters": clusters}
    readers = readers_of(check_paths(paths)) if frame is None else [_reader_of_frame(frame)]
    named = [reader for reader in readers if reader.arrays or reader.format != "jsonl"]  # empty .jsonl has no keys
    roles_of = {reader: find_roles(reader, given, task) for reader in named}
    filled = tuple(reader for reader, roles in roles_of.items() if reader.arrays[roles["preds"]].shape[0] > 0)
    if not filled:
        raise NoSamplesError(readers[0].label)
    found = [source_of(reader, roles_of[reader], from_logits, task) for reader in filled]
    files = tuple(str(path) for reader in readers for path in reader.paths)
    source = reduce(add, (source for source, _ in found))  # raises if names, dtypes or shapes differ
    opened = PredictionFiles(replace(source, files=files), found[0][1], filled, nan_policy == "drop", normalize)
    if normalize and (opened.task != "multiclass" or source.from_logits):
        raise InputError(
            f"`normalize` must be used with multi-class probabilities, got {opened.task} "
            f"{'logits' if source.from_logits else 'probabilities'}. Omit it."
        )
    preds_found, target_found = filled[0].arrays[source.preds], filled[0].arrays[source.target]
    may_be_systems = preds_found.stem and preds_found.classes and target_found.dtype not in TEXT
    if may_be_systems and source.from_logits and class_names is None:
        raise InputError(
            f"`{source.preds}` in `{filled[0].label}` must be logits of classes, got columns that may belong to "
            f"several systems. Pass class_names={list(preds_found.classes)} for classes, or choose one with "
            "preds='NAME'."
        )
    names = tuple(class_names) if class_names is not None else source.class_names
    if names:
        names = check_class_names(names, 2 if opened.task == "binary" else source.shape[-1], source.preds)
        if names != source.class_names and set(names) == set(source.class_names):
            raise InputError(
                f"`class_names` must have the order of the columns, {quoted(source.class_names)}, got {quoted(names)}. "
                "Omit it, because the columns have names."
            )
    elif target_found.dtype in TEXT:
        names = names_of_labels(filled, source.preds, source.target, opened.task)
    return replace(opened, source=replace(opened.source, class_names=names))


def _reader_of_frame(frame: Any) -> Reader:
    with reading("DataFrame", "DataFrame"):
        reader: Reader = import_module("torchcalib.io.tables").Frame(frame)
    return reader


def readers_of(files: Sequence[Path]) -> list[Reader]:
    """Return one reader per file, or a single reader for all `.npy` files."""
    file_format = str(format_of(files[0]))
    kinds = arrays.READERS
    if file_format not in kinds:
        with reading(str(files[0]), file_format):
            kinds = import_module("torchcalib.io.tables").READERS  # requires pyarrow, an optional dependency
    reader = kinds[file_format]
    return [reader(*files)] if reader is arrays.Npy else [reader(path) for path in files]
