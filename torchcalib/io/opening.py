"""Open predictions in one or more files, and read their rows in chunks.

Opening reads headers, and does not import torch, except for `.pt` files and for checks that need values: of targets
in tables, of text targets, and of predictions with an ambiguous name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from importlib import import_module
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torchcalib.io.columns import check_gold, ignored, numbers_of, positions, split
from torchcalib.io.errors import InputError, NoSamplesError, quoted, reading, warn
from torchcalib.io.limits import check_samples
from torchcalib.io.names import PROBS, Task, are_logits_by_values, outcome_names
from torchcalib.io.paths import TABLES, check_paths, format_of
from torchcalib.io.reader import TEXT, Reader
from torchcalib.io.roles import ROLES, find_preds, find_roles, set_kind_of_predictions, source_of
from torchcalib.io.source import Conversion, Source

if TYPE_CHECKING:
    from torchcalib.io.rows import Rows


PIECE_BYTES = 4 * 2**20
"""Bytes of predictions in a chunk for metrics. Class-wise bins need about 40 bytes for each float32 prediction."""

Unconverted = list[tuple[Reader, str]]
"""Readers of the shards of a data set, with the name of the predictions in each."""


@dataclass(frozen=True, kw_only=True)
class PredictionFiles(Conversion):
    """Predictions of one data set in one or more files. Files are open only while rows are read."""

    readers: tuple[Reader, ...]  # one reader per file with rows, in order; `.npy` files share a reader
    kind_from_values: bool = False  # whether all values decided that predictions are logits or probabilities

    @property
    def n_rows(self) -> int:
        """Total number of rows in all files."""
        return self.source.shape[0]

    @property
    def task_of_report(self) -> Task:
        """Task of a report on the rows: "confidence" for confidences, else `task`."""
        return "confidence" if self.source.are_confidences else self.task

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of a `ReportBuilder` for the rows. The last axis in a file contains the classes."""
        return {
            "source": self.source,
            "task": self.task_of_report,
            "from_logits": self.source.from_logits,
            "class_axis": -1,
            "class_names": self.source.class_names or None,
            "ignore_index": self.ignore_index,
        }

    @property
    def ignore_index(self) -> int | None:
        """Label of ignored rows in the targets of `chunks`."""
        return ignored(self.ignored_label, self.classes) if self.task == "multiclass" else self.ignored_label

    @property
    def has_names_of_labels(self) -> bool:
        """True if targets are text, and the prediction columns are not named after classes."""
        arrays = self.readers[0].arrays
        is_text = arrays[self.source.target].dtype in TEXT and self.source.pred is None
        return is_text and not arrays[self.source.preds].classes

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
        from torchcalib.io.rows import decided, group_column, rows_of  # imports torch
        from torchcalib.io.text import crossed_text

        roles = {role: name for role in ROLES if (name := getattr(self.source, role)) is not None}
        columns = reader.arrays[roles["groups"]].columns if "groups" in roles else ()
        names = [*(name for role, name in roles.items() if not (columns and role == "groups")), *columns]
        start = 0
        without_group = [name for name in names if name in columns or name == roles.get("groups")]
        for chunk in reader.stream(names, max_bytes, self.allow_missing, without_group):
            read = dict(zip(names, chunk, strict=True))
            if columns:
                found = {name: group_column(read[name], f"`{name}` in `{reader.label}`") for name in columns}
                read[roles["groups"]] = crossed_text(found)
            values = {role: read[name] for role, name in roles.items()}
            values = decided(values, self.left_out) if self.left_out else values
            if len(values["target"]):
                yield rows_of(self, reader, values, start)
            start += len(chunk[0])


def open_predictions(
    paths: Sequence[str | Path],
    *,
    frame: Any = None,
    preds: str | None = None,
    target: str | None = None,
    weights: str | None = None,
    groups: str | Sequence[str] | None = None,
    clusters: str | None = None,
    ids: str | None = None,
    pred: str | None = None,
    from_logits: bool | None = None,
    task: Task | None = None,
    class_names: Sequence[str | int] | None = None,
    ignore_index: int | None = None,
    nan_policy: Literal["raise", "drop"] = "raise",
    normalize: bool = False,
    is_part: bool = False,
    earlier: Source | None = None,
) -> PredictionFiles:
    """Open prediction files: find the arrays by name, and check their shapes and dtypes.

    Args:
        paths: shards of one data set with the same format, names and dtypes. A `.npy` data set consists of one file of
            predictions, one of targets, and optional files of weights, groups, clusters and
            ids.
        frame: DataFrame of pandas, polars or pyarrow instead of files; `paths` is then ignored.
        preds: name of the predictions: a key, a column, the stem of numbered columns, or the stem of a `.npy` file.
            A list `"a,b,c"`, a pattern `"prob_*"` or a range `"0..3"` selects one column per class. None searches for
            the common names in `torchcalib.io.names`, and for columns named like text targets. Columns are ordered and
            named by the rules in `torchcalib.io.columns`.
        target: name of the targets, or None to find a common name. Targets are names of class columns. Whole numbers
            are positions if columns are not numbered.
        weights: name of the weights, or None to find a common name. Weights are optional.
        groups: name of the groups, which are whole numbers or text; None for no groups. Several columns, as a list or
            "age,sex", form the groups "age=old, sex=f".
        clusters: name of the clusters of dependent rows, which are whole numbers or text; None for independent rows.
        ids: name of the ids by which rows are joined, which are whole numbers or text; None for no ids.
        pred: name of the predicted labels, beside a probability of the prediction. The event is that the predicted
            label is the target. None searches for a common name.
        from_logits: whether predictions are logits. None infers it from their name. If the name is ambiguous, they are
            logits if more than 5% of all values are negative.
            Otherwise one confidence per sample may be a percentage, such as 70 or "70%", if the whole column shows it.
            It is divided by 100 with a warning.
        task: task of the predictions. None infers it from the shapes, and raises for ambiguous shapes. Targets with the
            shape of multi-class predictions are ambiguous: multi-label targets, one-hot labels or annotator counts.
            With `"confidence"`, predictions are confidences, and targets are 1 for correct predictions.
        class_names: names of the classes or labels in the order of `preds`; for a binary task the negative class first.
            None uses the column names, or else the sorted text targets if the predictions agree with this order. Names
            of columns select these columns, in this order.
        ignore_index: rows with this label are ignored.
        nan_policy: `"drop"` sets predictions to NaN in rows with a missing value; `"raise"` raises an error.
        normalize: divide rounded multi-class probabilities by their sum.
        is_part: whether other rows of the data set are read elsewhere. Targets that are always the choice of the model
            then raise no error.
        earlier: source of earlier rows of a data set that grows. Whole numbers are then read as its predictions were.

    Returns:
        The opened files. Before `chunks` is called, rows are only read to check targets of tables. Samples are on the
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
    groups = groups if groups is None or isinstance(groups, str) else ",".join(groups)
    given = {"preds": preds, "target": target, "weights": weights, "groups": groups, "clusters": clusters, "pred": pred}
    given["ids"] = ids
    names = None if class_names is None else tuple(str(name).strip() for name in class_names)
    readers = _readers_of(check_paths(paths)) if frame is None else [_reader_of_frame(frame)]
    named = [reader for reader in readers if reader.arrays or "json" not in reader.format]  # without rows, no keys
    if earlier is not None:
        for reader in named:
            set_kind_of_predictions(reader, earlier)
    roles_of = {reader: find_roles(reader, given, task, from_logits, names or ()) for reader in named}
    filled = tuple(reader for reader, roles in roles_of.items() if reader.arrays[roles["preds"]].shape[0] > 0)
    if not filled:
        raise NoSamplesError(readers[0].label)
    found = [source_of(reader, roles_of[reader], from_logits, task) for reader in filled]
    files = tuple(str(path) for reader in readers for path in reader.paths)
    source = replace(reduce(add, (source for source, _, _ in found)), files=files)  # raises if names or dtypes differ
    _, task_found, from_logits = found[0]
    if source.are_percentages:
        warn(f"`{source.preds}` in `{filled[0].label}` contains percentages, which are divided by 100.")
    preds_found, target_found = filled[0].arrays[source.preds], filled[0].arrays[source.target]
    may_be_systems = preds_found.stem and source.class_names and target_found.dtype not in TEXT
    is_numbered = numbers_of(preds_found.classes) is not None
    if may_be_systems and from_logits and names is None and not is_numbered and not target_found.columns:
        raise InputError(
            f"`{source.preds}` in `{filled[0].label}` must be logits of classes, got columns that may belong to "
            f"several systems. Pass class_names={list(preds_found.classes)} for classes, or choose one with "
            "preds='NAME'."
        )
    opened = PredictionFiles(
        source=source,
        task=task_found,
        readers=filled,
        allow_missing=nan_policy == "drop",
        normalize=normalize,
        classes=preds_found.classes,
        kind_from_values=from_logits is None,
    )
    opened = replace(
        opened, source=replace(source, from_logits=_from_values(opened) if from_logits is None else from_logits)
    )
    if normalize and (opened.task != "multiclass" or opened.source.from_logits):
        raise InputError(
            f"`normalize` must be used with multi-class probabilities, got {opened.task} "
            f"{'logits' if opened.source.from_logits else 'probabilities'}. Omit it."
        )
    if names is not None:
        _check_class_names(names, 2 if opened.task == "binary" else source.shape[-1], source.preds)
        opened = replace(opened, source=replace(opened.source, class_names=names), classes=names)
    elif target_found.dtype in TEXT and source.pred is None and not source.class_names:
        opened = _with_names_of_labels(opened)
    elif preds is None and opened.task == "binary" and source.pred is None:
        _check_event(source.preds, target_found.name, filled[0].label)
    opened = replace(opened, ignored_label=ignore_index)
    is_named = target is not None or source.format not in (*TABLES, "DataFrame")
    if not is_named and not is_part and (source.pred is not None or task_found == "multiclass"):
        _check_choices(opened)
    return opened


def _check_event(preds: str, target: str, label: str) -> None:
    """Raise if a column such as `prob_no` or `prob_0` has the probability of the outcome 0 of a numeric target."""
    named = split(preds)
    if named is None or named[0].rstrip("_. ") not in PROBS or named[1].lower() in ("n", "f"):  # letters may be classes
        return
    if outcome_names([named[1]])[:1] == (named[1],):
        raise InputError(
            f"`{preds}` in `{label}` must be the probability that `{target}` is 1, got the name of the other outcome. "
            "Store 1 minus the probability in a column `prob`; or rename the column, if it is the probability of 1."
        )


def _check_choices(files: PredictionFiles) -> None:
    """Raise if the targets are the choices of the model in all rows; see `check_gold`."""
    source = files.source
    for rows in files.chunks(PIECE_BYTES):  # usually the first chunk has an error of the model
        if source.pred is not None:
            are_choices = rows.target == 1
        elif rows.target.shape == rows.preds.shape[:-1]:
            are_choices = rows.preds.argmax(-1) == rows.target
        else:
            return
        if not bool(are_choices.all()):
            return
    choice = "the class with the largest prediction" if source.pred is None else f"the predicted label `{source.pred}`"
    check_gold(source.target, files.readers[0].label, files.n_rows, files.n_rows, choice)


def _from_values(files: PredictionFiles) -> bool:
    """Return whether predictions with an ambiguous name are logits, by all values; see `are_logits_by_values`."""
    n_negative = n = 0
    for reader in files.readers:
        for (values,) in reader.stream([files.source.preds], PIECE_BYTES, allow_missing=True):
            n_negative, n = n_negative + int((values < 0).sum()), n + values.numel()
    try:
        return are_logits_by_values(n_negative, n, files.task)
    except ValueError as error:
        raise InputError(f"`{files.source.preds}` in `{files.readers[0].label}`: {error}") from error


def _with_names_of_labels(files: PredictionFiles) -> PredictionFiles:
    """Return files whose class names are the text labels, unless these are the numbers of the columns."""
    from torchcalib.io.text import labels_in, names_of_labels  # imports torch

    source, readers = files.source, files.readers
    counts = labels_in(readers, source.target)
    if files.classes:
        with suppress(ValueError):
            positions(counts.keys() - {""}, files.classes)
            return files
    is_resolution = readers[0].arrays[source.target].key == "resolution" and files.task == "binary"
    decided = {text for text in counts if text.lower() in ("yes", "no")} if is_resolution else set()
    names = outcome_names(decided)
    others = {text for text in counts if text not in decided and text} if names else set()
    if others:
        n = sum(counts[text] for text in others)
        warn(
            f"`{source.target}` in `{readers[0].label}` has {n} of {counts.total()} rows with other resolutions than "
            f"yes and no ({quoted(sorted(others))}), which are left out."
        )
        files = replace(files, left_out=frozenset(others))
        source = replace(source, shape=(source.shape[0] - n, *source.shape[1:]))
    else:
        names = names_of_labels(readers, source.preds, source.target, files.task_of_report)
    return replace(files, source=replace(source, class_names=names), classes=names)


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


def _check_class_names(names: Sequence[str], n_classes: int, preds: str) -> None:
    """Check that there are `n_classes` unique names."""
    if len(names) != n_classes or len(set(names)) < len(names) or "" in names:
        raise InputError(
            f"`class_names` must be {n_classes} different names in the class order of `{preds}`, got {quoted(names)}. "
            "Pass one name for each class."
        )


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
