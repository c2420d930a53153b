"""Opening of predictions in one or more files, and their rows piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchcalib.io.errors import NoSamplesError
from torchcalib.io.paths import check_paths
from torchcalib.io.readers import Reader, readers_of
from torchcalib.io.roles import ROLES, Task, check_arrays, check_per_sample, find_roles, infer_from_logits, infer_task
from torchcalib.io.source import Source


@dataclass(frozen=True)
class Rows:
    """Some rows of one file. Everything but predictions is int64 or floating."""

    preds: Tensor  # in the dtype of the file
    target: Tensor
    weights: Tensor | None = None
    groups: Tensor | None = None  # int64, one for every sample, -1 where a text is empty
    group_names: list[str] | None = None  # of the groups in these rows, by number; None if the file has numbers

    def __len__(self) -> int:
        return len(self.preds)

    def __getitem__(self, part: slice) -> Rows:
        sliced: dict[str, Any] = {name: held[part] for name, held in vars(self).items() if isinstance(held, Tensor)}
        return replace(self, **sliced)


@dataclass(frozen=True)
class PredictionFiles:
    """One data set of predictions in one or more files. No file stays open."""

    source: Source
    task: Task
    readers: tuple[Reader, ...]  # of the files with rows, in order; `.npy` files have one reader together

    @property
    def n_rows(self) -> int:
        """Number of rows in all files together."""
        return self.source.shape[0]

    def chunks(self, max_bytes: int = 64 * 2**20) -> Iterator[Rows]:
        """Yield the rows piece by piece. A piece has at least one row, and rows of one file only.

        Args:
            max_bytes: approximate limit of the bytes of predictions in a piece.

        Raises:
            InputError: a file is damaged, or lacks a value, in a way that its header does not show.
        """
        for reader in self.readers:
            yield from self.chunks_of(reader, max_bytes)

    def chunks_of(self, reader: Reader, max_bytes: int) -> Iterator[Rows]:
        """Yield the rows of one reader piece by piece."""
        roles = {role: name for role in ROLES if (name := getattr(self.source, role)) is not None}
        preds = reader.arrays[self.source.preds]
        is_column = len(preds.shape) > len(self.source.shape)
        for piece in reader.stream(list(roles.values()), max(1, max_bytes // preds.row_bytes)):
            yield _rows_of(dict(zip(roles, piece, strict=True)), is_column)


def open_predictions(
    paths: Sequence[str | Path],
    *,
    preds: str | None = None,
    target: str | None = None,
    weights: str | None = None,
    groups: str | None = None,
    from_logits: bool | None = None,
    task: Task | None = None,
) -> PredictionFiles:
    """Open files of predictions: find the arrays and check that they fit together. No rows are read yet.

    Args:
        paths: shards of one data set with the same format, names and dtypes; or two `.npy` files, predictions and
            targets, with optional files of weights and groups.
        preds: name of the predictions: a key, a column, the stem of numbered columns, the stem of a `.npy` file.
            None uses common names: "logits", "log_probs", "probs", "preds", ...
        target: the same for the targets: "targets", "labels", "y", ...
        weights: the same for the weights: "weights" or "sample_weight". Weights are optional.
        groups: the same for the groups, whole numbers or text, which have no common names; None for no groups.
        from_logits: whether predictions are logits. None infers it from the name; other names are an error.
        task: None infers it from the shapes; ambiguous shapes are an error. Targets with the shape of multi-class
            predictions are ambiguous: multi-label targets, one-hot labels or vote counts. Values are not used.

    Returns:
        The opened files, with samples on the first axis and classes on the last.

    Raises:
        InputError: a file is missing, damaged or unsuitable, or needs an option.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> with TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/valid.npz", logits=np.zeros((5, 3), np.float32), labels=np.arange(5) % 3)
        ...     files = open_predictions([f"{folder}/valid.npz"])
        ...     pieces = [rows.target.tolist() for rows in files.chunks(max_bytes=24)]
        >>> files.task, files.source.shape, files.source.from_logits
        ('multiclass', (5, 3), True)
        >>> pieces
        [[0, 1], [2, 0], [1]]
    """
    given = {"preds": preds, "target": target, "weights": weights, "groups": groups}
    readers = readers_of(check_paths(paths))
    roles_of = {reader: find_roles(reader, given) for reader in readers}
    filled = tuple(reader for reader, roles in roles_of.items() if check_arrays(reader, roles) > 0)
    if not filled:
        raise NoSamplesError(readers[0].label)
    found = [_source_of(reader, roles_of[reader], from_logits, task) for reader in filled]
    files = tuple(str(path) for reader in readers for path in reader.paths)
    source = reduce(add, (source for source, _ in found))  # an error if they differ in names, dtypes or shapes
    return PredictionFiles(replace(source, files=files), found[0][1], filled)


def _source_of(
    reader: Reader, roles: Mapping[str, str], from_logits: bool | None, task: Task | None
) -> tuple[Source, Task]:
    """Infer the meaning of the arrays of a file."""
    task, sample_shape = infer_task(reader, roles, task)
    check_per_sample(reader, roles, task, sample_shape)
    arrays = [reader.arrays[name] for name in roles.values()]
    used = {name for array in arrays for name in (array.name, *array.columns)}
    source = Source(
        files=tuple(map(str, reader.paths)),
        format=reader.format,
        preds=roles["preds"],
        target=roles["target"],
        weights=roles.get("weights"),
        from_logits=infer_from_logits(reader, roles, task) if from_logits is None else from_logits,
        shape=(arrays[0].shape[0], *sample_shape),
        dtype=arrays[0].dtype,
        rows=tuple(f"{array.dtype} {array.shape[1:]}" for array in arrays),
        ignored=tuple(array.name for array in reader.arrays.values() if not array.columns and array.name not in used),
        groups=roles.get("groups"),
    )
    return source, task


def _rows_of(arrays: Mapping[str, Any], is_column: bool) -> Rows:
    """Return arrays by role as rows: columns, (n, 1, ...), as (n, ...), text as numbers, and int64 for all integers."""
    held: dict[str, Any] = {}
    for role, values in arrays.items():
        if isinstance(values, list):
            names = sorted(set(values) - {""})
            numbers = {"": -1, **{name: k for k, name in enumerate(names)}}
            held |= {role: torch.tensor([numbers[name] for name in values]), "group_names": names}
            continue
        squeezed = values.squeeze(1) if is_column and values.dim() > 1 else values
        held[role] = squeezed if squeezed.is_floating_point() else squeezed.to(torch.int64)
    return Rows(**held)
