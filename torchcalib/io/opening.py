"""Opening of predictions in one or more files, and their rows piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchcalib.io.errors import InputError, NoSamplesError
from torchcalib.io.labels import check_class_names, class_indices, names_of_labels
from torchcalib.io.paths import check_paths
from torchcalib.io.readers import TEXT, WHOLE, Reader, readers_of
from torchcalib.io.roles import (
    ROLES,
    FileTask,
    Task,
    check_arrays,
    check_per_sample,
    find_roles,
    infer_from_logits,
    infer_task,
    is_confidence,
)
from torchcalib.io.rounding import without_rounding
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
    gaps: bool = False  # missing values become predictions of NaN instead of an error
    normalize: bool = False  # probabilities are divided by their sum

    @property
    def n_rows(self) -> int:
        """Number of rows in all files together."""
        return self.source.shape[0]

    @property
    def has_names_of_labels(self) -> bool:
        """True if targets are text, and no column of the predictions has the name of a class."""
        arrays = self.readers[0].arrays
        return arrays[self.source.target].dtype in TEXT and not arrays[self.source.preds].classes

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
        start = 0
        for piece in reader.stream(list(roles.values()), max(1, max_bytes // preds.row_bytes), self.gaps):
            yield self._rows_of(reader, dict(zip(roles, piece, strict=True)), is_column, start)
            start += len(piece[0])

    def _rows_of(self, reader: Reader, arrays: dict[str, Any], is_column: bool, start: int) -> Rows:
        """Return arrays by role as rows: columns, (n, 1, ...), as (n, ...), and names as numbers."""
        label = f"`{self.source.target}` of `{reader.label}`"
        target = arrays["target"]
        if isinstance(target, list):
            arrays["target"] = class_indices(target, self.source.class_names, label, start, self.gaps)
        elif self.task == "multiclass" and target.is_floating_point() and target.dim() == arrays["preds"].dim() - 1:
            arrays["target"] = self._whole_labels(target, label, start)
        group_names = None
        if isinstance(texts := arrays.get("groups"), list):
            group_names = sorted(set(texts) - {""})
            numbers = {"": -1, **{name: k for k, name in enumerate(group_names)}}
            arrays["groups"] = torch.tensor([numbers[name] for name in texts])
        held = {role: v.squeeze(1) if is_column and v.dim() > 1 else v for role, v in arrays.items()}
        if self.task == "multiclass" and held["target"].dtype == torch.bool:
            self._check_one_hot(held["target"], label, start)
        if self.gaps:
            held = self._marked(reader, held)
        if self.normalize:
            held["preds"] = without_rounding(held["preds"], f"`{self.source.preds}` of `{reader.label}`", start)
        return Rows(
            **{role: v if role == "preds" or v.is_floating_point() else v.to(torch.int64) for role, v in held.items()},
            group_names=group_names,
        )

    def _whole_labels(self, target: Tensor, label: str, start: int) -> Tensor:
        """Return class indices that are stored as floating-point numbers, as a column with gaps is."""
        wrong = (target != target.round()) & ~target.isnan() if self.gaps else target != target.round()
        if bool(wrong.any()):
            row = int(wrong.reshape(len(target), -1).any(1).int().argmax())
            found = float(target[row].flatten()[0])
            raise InputError(
                f"{label} must hold class indices, which are whole numbers, got {found:g} in row {start + row + 1}. "
                + ("Pass --nan-policy drop to leave such rows out." if found != found else "Save class indices.")
            )
        return target if bool(target.isnan().any()) else target.to(torch.int64)

    def _check_one_hot(self, target: Tensor, label: str, start: int) -> None:
        """Check that every row of boolean targets names one class."""
        n_true = target.sum(-1).reshape(len(target), -1)
        wrong = (n_true != 1).any(1)
        if bool(wrong.any()):
            row = int(wrong.int().argmax())
            raise InputError(
                f"{label} must be true for one class in every row (--task multiclass), got {int(n_true[row][0])} in "
                f"row {start + row + 1}. Pass --task multilabel for labels that do not exclude each other."
            )

    def _marked(self, reader: Reader, held: dict[str, Tensor]) -> dict[str, Tensor]:
        """Give predictions NaN where another value is missing, so that `nan_policy` drops and counts them."""
        preds = held["preds"]
        for role, fill in (("target", 0), ("weights", 1), ("groups", -1)):
            values = held.get(role)
            if values is None or not values.is_floating_point():
                continue
            missing = values.isnan()
            if role == "groups" or not bool(missing.any()):
                pass  # a row without a group belongs to no group
            elif missing.shape == preds.shape and self.task != "multiclass":
                preds = preds.masked_fill(missing, torch.nan)
            else:
                rows = missing.reshape(len(preds), -1).any(1)
                preds = preds.masked_fill(rows.reshape(-1, *[1] * (preds.dim() - 1)), torch.nan)
            whole = reader.arrays[getattr(self.source, role)].dtype in (*WHOLE, *TEXT)
            is_label = role == "target" and self.task == "multiclass" and values.dim() < preds.dim()
            held[role] = values.masked_fill(missing, fill)
            held[role] = held[role].to(torch.int64) if whole or is_label else held[role]
        return {**held, "preds": preds}


def open_predictions(
    paths: Sequence[str | Path],
    *,
    preds: str | None = None,
    target: str | None = None,
    weights: str | None = None,
    groups: str | None = None,
    from_logits: bool | None = None,
    task: FileTask | None = None,
    class_names: Sequence[str] | None = None,
    nan_policy: Literal["raise", "drop"] = "raise",
    normalize: bool = False,
) -> PredictionFiles:
    """Open files of predictions: find the arrays and check that they fit together. No rows are read yet.

    Args:
        paths: shards of one data set with the same format, names and dtypes; or two `.npy` files, predictions and
            targets, with optional files of weights and groups.
        preds: name of the predictions: a key, a column, the stem of numbered columns, the stem of a `.npy` file; or
            columns of one class each as a list `"a,b,c"`, a pattern `"prob_*"` or a range `"0..3"`. None uses the
            common names of `torchcalib.io.names`.
        target: the same for the targets. Text names classes.
        weights: the same for the weights: "weights" or "sample_weight". Weights are optional.
        groups: the same for the groups, whole numbers or text, which have no common names; None for no groups.
        from_logits: whether predictions are logits. None infers it from the name; other names are an error.
        task: None infers it from the shapes; ambiguous shapes are an error. Targets with the shape of multi-class
            predictions are ambiguous: multi-label targets, one-hot labels or vote counts. `"confidence"` is the
            confidence in a prediction, with targets that are 1 where it is correct.
        class_names: names of the classes or labels in the order of `preds`; of a binary task those of 0 and 1. None
            uses the names of columns. Names of text targets are sorted, after a check against the predictions.
        nan_policy: `"drop"` gives NaN to the predictions of rows in which a value is missing; `"raise"` raises.
        normalize: divide rounded probabilities of classes by their sum.

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
    named = [reader for reader in readers if reader.arrays or reader.format != "jsonl"]  # without lines, no names
    roles_of = {reader: find_roles(reader, given, task) for reader in named}
    filled = tuple(reader for reader, roles in roles_of.items() if check_arrays(reader, roles) > 0)
    if not filled:
        raise NoSamplesError(readers[0].label)
    found = [_source_of(reader, roles_of[reader], from_logits, task) for reader in filled]
    files = tuple(str(path) for reader in readers for path in reader.paths)
    source = reduce(add, (source for source, _ in found))  # an error if they differ in names, dtypes or shapes
    opened = PredictionFiles(replace(source, files=files), found[0][1], filled, nan_policy == "drop", normalize)
    if normalize and (opened.task != "multiclass" or source.from_logits):
        raise InputError(
            f"--normalize must get probabilities of several classes, got {opened.task} "
            f"{'logits' if source.from_logits else 'probabilities'}. Leave it out."
        )
    preds_found, target_found = filled[0].arrays[source.preds], filled[0].arrays[source.target]
    may_be_systems = preds_found.stem and preds_found.classes and target_found.dtype not in TEXT
    if may_be_systems and source.from_logits and class_names is None:
        raise InputError(
            f"`{source.preds}` in `{filled[0].label}` must be logits of classes, but their names may be those of "
            f"systems. Pass --class-names {','.join(preds_found.classes)} for classes, or choose one with --preds."
        )
    names = tuple(class_names) if class_names is not None else source.class_names
    if names:
        names = check_class_names(names, 2 if opened.task == "binary" else source.shape[-1], source.preds)
    elif target_found.dtype in TEXT:
        names = names_of_labels(filled, source.preds, source.target, opened.task)
    return replace(opened, source=replace(opened.source, class_names=names))


def _source_of(
    reader: Reader, roles: Mapping[str, str], from_logits: bool | None, given_task: FileTask | None
) -> tuple[Source, Task]:
    """Infer the meaning of the arrays of a file."""
    task, sample_shape = infer_task(reader, roles, given_task)
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
        class_names=arrays[0].classes,
        are_confidences=is_confidence(reader, roles, given_task),
    )
    return source, task
