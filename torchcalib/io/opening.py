"""Opening a data set: its files are found, agree with one another, and say what they predict."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchcalib.io.checks import check_alike, check_numbers, check_per_sample, check_rows, declares_logits, infer_task
from torchcalib.io.names import find_roles
from torchcalib.io.reader import InputError, Reader, quoted, reading
from torchcalib.io.source import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from torchcalib.io.checks import Task

# By name, so that pyarrow and safetensors are imported only where such a file is read.
_READERS = {
    ".npz": ("npy", "Npz"),
    ".npy": ("npy", "Npy"),
    ".pt": ("pt", "Pt"),
    ".pth": ("pt", "Pt"),
    ".safetensors": ("safetensors", "Safetensors"),
    ".csv": ("tables", "Csv"),
    ".parquet": ("tables", "Parquet"),
}


class NoSamplesError(InputError):
    """Files that hold no samples, which of several processes one may well be given."""

    def __init__(self, label: object) -> None:
        super().__init__(f"`{label}` must hold predictions, but holds no samples. Check what wrote it.")


class Groups(NamedTuple):
    """Groups of rows.

    Attributes:
        numbers: int64, one for every sample; -1 where a text is empty.
        names: of the groups by their numbers, of these rows alone; None where the file has the numbers.
    """

    numbers: Tensor
    names: list[str] | None


@dataclass(frozen=True)
class PredictionFiles:
    """One data set of predictions in one or more files (shards), opened but not yet read.

    Attributes:
        paths: the files, in the order in which their rows are read.
        format: "npz", "npy", "pt", "safetensors", "csv" or "parquet".
        preds_name: key, column, numbered columns (`prob_0..prob_9`) or `.npy` stem that holds the predictions.
        target_name: the same for the targets.
        weights_name: the same for the weights; None without weights.
        groups_name: the same for the groups; None without groups.
        from_logits: whether the predictions are logits; log-probabilities are.
        task: "binary", "multiclass" or "multilabel".
        shape: of the predictions of all shards together: binary (N, ...), else (N, ..., C). A single binary column,
            (N, 1), is read as (N,).
        dtype: of the predictions, such as "float32".
        ignored: other arrays or columns that were found and are not used.
    """

    paths: tuple[Path, ...]
    format: str
    preds_name: str
    target_name: str
    weights_name: str | None
    groups_name: str | None
    from_logits: bool
    task: Task
    shape: tuple[int, ...]
    dtype: str
    ignored: tuple[str, ...]
    _readers: tuple[Reader, ...] = field(repr=False, compare=False)

    @property
    def n_rows(self) -> int:
        """Number of rows in all files together."""
        return self.shape[0]

    @property
    def source(self) -> Source:
        """What is read, as a value that is saved and that adds."""
        arrays = [self._readers[0].arrays[name] for name in self._names]
        return Source(
            files=tuple(map(str, self.paths)),
            format=self.format,
            preds=self.preds_name,
            target=self.target_name,
            weights=self.weights_name,
            from_logits=self.from_logits,
            shape=self.shape,
            dtype=self.dtype,
            rows=tuple(f"{array.dtype} {array.shape[1:]}" for array in arrays),
            ignored=self.ignored,
            groups=self.groups_name,
        )

    def shards(self) -> Iterator[PredictionFiles]:
        """Yield the files that hold rows one by one, in order; the files of a `.npy` pair are one."""
        for reader in self._readers:
            n_rows = reader.arrays[self.preds_name].shape[0]
            yield replace(self, paths=reader.paths, shape=(n_rows, *self.shape[1:]), _readers=(reader,))

    @property
    def _names(self) -> tuple[str, ...]:
        names = (self.preds_name, self.target_name, self.weights_name, self.groups_name)
        return tuple(name for name in names if name is not None)

    def chunks(self, max_bytes: int = 64 * 2**20) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield (preds, target, weights) piece by piece, in file order.

        Predictions keep their dtype. Whole-number targets and weights become int64, floating ones keep theirs.
        A piece holds one row at least, and never rows of two files.

        Args:
            max_bytes: about how many bytes of predictions a piece holds at most.

        Raises:
            InputError: a file is damaged, or lacks a value, beyond what opening it shows.
        """
        for preds, target, weights, _ in self.grouped_chunks(max_bytes):
            yield preds, target, weights

    def grouped_chunks(
        self, max_bytes: int = 64 * 2**20
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Groups | None]]:
        """Yield the same as `chunks`, and the groups of the rows; None where `groups` was not asked for."""
        count = max(1, max_bytes // self._readers[0].arrays[self.preds_name].row_bytes)
        for reader in self._readers:
            for piece in reader.stream(self._names, count):
                column = dict(zip(self._names, piece, strict=True))
                if column[self.preds_name].dim() > len(self.shape):  # a single binary column
                    column = {name: _without_column(values) for name, values in column.items()}
                preds, target = column[self.preds_name], column[self.target_name]
                weights = None if self.weights_name is None else _int64_unless_floating(column[self.weights_name])
                groups = None if self.groups_name is None else _numbered(column[self.groups_name])
                yield preds, _int64_unless_floating(target), weights, groups


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
    """Open files of predictions: find the arrays, check that they fit together, and read no rows yet.

    Args:
        paths: shards of one data set, alike in format, names and dtypes. `.npy` files come as one pair of predictions
            and targets, or three with weights.
        preds: what holds the predictions: a key, a column, the stem of numbered columns, the stem of a `.npy` file.
            None finds it by name: "logits", "log_probs", "probs", "preds" and the like.
        target: the same for the targets: "targets", "labels", "y" and the like.
        weights: the same for the weights: "weights" or "sample_weight". There may be none.
        groups: what holds the group of every row, whole numbers or text, by its name; None for no groups.
        from_logits: whether predictions are logits. None goes by the name, and is an error where it does not tell.
        task: None infers it from the shapes, and raises if they are ambiguous: targets with the shape of predictions
            with a class axis may be multi-label, one-hot labels or vote counts. Values are not used.

    Returns:
        The opened files, with samples on the first axis and classes on the last.

    Raises:
        InputError: a file is missing, damaged or unsuitable, or needs an option to be understood.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> with TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/valid.npz", logits=np.zeros((5, 3), np.float32), labels=np.arange(5) % 3)
        ...     files = open_predictions([f"{folder}/valid.npz"])
        ...     pieces = [target.tolist() for _, target, _ in files.chunks(max_bytes=24)]
        >>> files.task, files.shape, files.from_logits
        ('multiclass', (5, 3), True)
        >>> pieces
        [[0, 1], [2, 0], [1]]
    """
    files = existing(paths)
    readers = _readers(files)
    roles = find_roles(readers[0], preds, target, weights, groups)
    for reader in readers:
        found = find_roles(reader, preds, target, weights, groups)
        if found != roles:
            raise InputError(
                f"`{reader.label}` must name its arrays as `{readers[0].label}` does ({quoted(roles.names)}), "
                f"got {quoted(found.names)}. Read the files apart, or write them alike."
            )
        check_rows(reader, roles)
    # A shard without samples is fine, and what it says about dtypes means nothing (a csv of one line knows none).
    filled = [reader for reader in readers if reader.arrays[roles.preds].shape[0] > 0]
    if not filled:
        raise NoSamplesError(readers[0].label)
    first = filled[0]
    for reader in filled:
        check_numbers(reader, roles)
        check_alike(reader, first, roles)
    task, sample_shape = infer_task(first, roles, task)
    check_per_sample(first, roles, task, sample_shape)
    used = {column for name in roles.names for column in first.arrays[name].columns}
    return PredictionFiles(
        paths=files,
        format=first.format,
        preds_name=roles.preds,
        target_name=roles.target,
        weights_name=roles.weights,
        groups_name=roles.groups,
        from_logits=declares_logits(first, roles, task) if from_logits is None else from_logits,
        task=task,
        shape=(sum(reader.arrays[roles.preds].shape[0] for reader in filled), *sample_shape),
        dtype=first.arrays[roles.preds].dtype,
        ignored=tuple(n for n, array in first.arrays.items() if len(array.columns) == 1 and n not in used),
        _readers=tuple(filled),
    )


def existing(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Check that the files are there, each once, all of one known format."""
    files = tuple(Path(path) for path in ([paths] if isinstance(paths, str) else paths))
    if not files:
        raise InputError("There must be a file to read, got none. Name one or more files.")
    for path in files:
        known = ", ".join(_READERS)
        if path.suffix.lower() not in _READERS:
            raise InputError(
                f"`{path}` must end in one of {known}, got `{path.suffix}`. Save it in one of these formats."
            )
        with reading(str(path), path.suffix.lower()[1:]):
            if path.is_dir():
                raise InputError(f"`{path}` must be a file, got a directory. Name the files in it.")
            if path.exists() and not path.is_file():  # opening a pipe would wait for ever, a device end never
                raise InputError(f"`{path}` must be a file, got a pipe or device. Save its content in a file.")
            if not path.is_file():
                raise InputError(f"`{path}` must be a file, got nothing of this name. Check the path.")
        if _READERS[path.suffix.lower()] != _READERS[files[0].suffix.lower()]:
            raise InputError(
                f"`{files[0]}` and `{path}` must have one format, got two. Read them apart, or convert one."
            )
    if len({path.resolve() for path in files}) < len(files):
        raise InputError(f"Every file must be named once, got one twice in {quoted(files)}. Leave the repetition out.")
    return files


def _readers(files: tuple[Path, ...]) -> list[Reader]:
    suffix = files[0].suffix.lower()
    module, name = _READERS[suffix]
    try:
        reader: type[Reader] = getattr(import_module(f"torchcalib.io.{module}"), name)
    except ImportError as error:
        raise InputError(
            f"`{files[0]}` must be read with the package {error.name}, which is not installed. "
            "Run pip install 'torchcalib[data]'."
        ) from error
    return [reader(*files)] if suffix == ".npy" else [reader(path) for path in files]


def _numbered(column: Tensor | list[str]) -> Groups:
    if not isinstance(column, list):
        return Groups(column.to(torch.int64), None)
    names = sorted(set(column) - {""})
    numbers = {"": -1, **{name: k for k, name in enumerate(names)}}
    return Groups(torch.tensor([numbers[name] for name in column], dtype=torch.int64), names)


def _without_column(values: Any) -> Any:
    """Return (n, 1, ...) as (n, ...), and anything else unchanged, for example a list of names."""
    return values.squeeze(1) if isinstance(values, torch.Tensor) and values.dim() > 1 else values


def _int64_unless_floating(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.to(torch.int64)
