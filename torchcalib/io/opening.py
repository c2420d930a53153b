"""Open predictions in one or more files, and read their rows in chunks.

Opening reads headers, and does not import torch, except for `.pt` files and for checks that need values: of text
targets, and of predictions with an ambiguous name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchcalib.io.errors import InputError, NoSamplesError, quoted, reading, warn
from torchcalib.io.limits import check_samples
from torchcalib.io.names import Task
from torchcalib.io.paths import TABLES, check_paths, format_of
from torchcalib.io.reader import TEXT, Reader
from torchcalib.io.roles import ROLES, find_preds, find_roles, source_of
from torchcalib.io.source import Source

if TYPE_CHECKING:
    from torchcalib.io.rows import Rows


PIECE_BYTES = 4 * 2**20
"""Bytes of predictions in a chunk for metrics. Class-wise bins need about 40 bytes for each float32 prediction."""

Unconverted = list[tuple[Reader, str]]
"""Readers of the shards of a data set, with the name of the predictions in each."""


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
        from torchcalib.io.rows import rows_of  # imports torch

        roles = {role: name for role in ROLES if (name := getattr(self.source, role)) is not None}
        start = 0
        for chunk in reader.stream(list(roles.values()), max_bytes, self.allow_missing):
            yield rows_of(self, reader, dict(zip(roles, chunk, strict=True)), start)
            start += len(chunk[0])


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
            Otherwise one confidence per sample may be a percentage, such as 70 or "70%", if the whole column shows it.
            It is divided by 100 with a warning.
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
    readers = _readers_of(check_paths(paths)) if frame is None else [_reader_of_frame(frame)]
    named = [reader for reader in readers if reader.arrays or reader.format != "jsonl"]  # empty .jsonl has no keys
    roles_of = {reader: find_roles(reader, given, task, from_logits) for reader in named}
    filled = tuple(reader for reader, roles in roles_of.items() if reader.arrays[roles["preds"]].shape[0] > 0)
    if not filled:
        raise NoSamplesError(readers[0].label)
    found = [source_of(reader, roles_of[reader], from_logits, task) for reader in filled]
    files = tuple(str(path) for reader in readers for path in reader.paths)
    source = reduce(add, (source for source, _ in found))  # raises if names, dtypes or shapes differ
    if source.are_percentages:
        warn(f"`{source.preds}` in `{filled[0].label}` contains percentages, which are divided by 100.")
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
        names = _check_class_names(names, 2 if opened.task == "binary" else source.shape[-1], source.preds)
        if names != source.class_names and set(names) == set(source.class_names):
            raise InputError(
                f"`class_names` must have the order of the columns, {quoted(source.class_names)}, got {quoted(names)}. "
                "Omit it, because the columns have names."
            )
    elif target_found.dtype in TEXT:
        from torchcalib.io.text import names_of_labels  # imports torch

        names = names_of_labels(filled, source.preds, source.target, opened.task_of_report)
    return replace(opened, source=replace(opened.source, class_names=names))


def open_without_targets(paths: Sequence[Path], preds: str | None) -> Unconverted:
    """Open shards of one data set, in which targets are not required, and find the predictions in each.

    Args:
        paths: files of one format.
        preds: name of the predictions, or None to find a common name.

    Raises:
        InputError: if a file is damaged or unsuitable.
    """
    found = [(reader, find_preds(reader, preds)) for reader in _readers_of(check_paths(paths))]
    for reader, name in found:
        check_samples(reader.arrays[name].shape[0], reader.paths, reader.label)
    return found


def _check_class_names(names: Sequence[str], n_classes: int, preds: str) -> tuple[str, ...]:
    """Check that there are `n_classes` unique names, and return them without surrounding spaces."""
    found = tuple(name.strip() for name in names)
    if len(found) != n_classes or len(set(found)) < len(found) or "" in found:
        raise InputError(
            f"`class_names` must be {n_classes} different names in the class order of `{preds}`, got {quoted(found)}. "
            "Pass one name for each class."
        )
    return found


def _reader_of_frame(frame: Any) -> Reader:
    with reading("DataFrame", "DataFrame"):
        reader: Reader = import_module("torchcalib.io.tables").Frame(frame)
    return reader


def _readers_of(files: Sequence[Path]) -> list[Reader]:
    """Return one reader per file, or a single reader for all `.npy` files."""
    file_format = str(format_of(files[0]))
    with reading(str(files[0]), file_format):
        # Tables require pyarrow, an optional dependency. Help does not require numpy.
        module = "tables" if file_format in TABLES else "arrays"
        reader: type[Reader] = import_module(f"torchcalib.io.{module}").READERS[file_format]
    return [reader(*files)] if file_format == "npy" else [reader(path) for path in files]
