"""Reports of the partitions of a table, which engines such as Ray, Spark and Dask compute and merge as bytes.

An engine calls `Partitions.state` for each partition, merges the results with `Partitions.merged` in a tree, and passes
the last one to `Partitions.report` or `Partitions.comparison`. Nothing here depends on an engine.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from torch import Tensor

from torchcalib.core.arguments import NanPolicy, Task, check_count
from torchcalib.io.errors import InputError, NoSamplesError, shown
from torchcalib.io.opening import PIECE_BYTES, PredictionFiles, open_predictions
from torchcalib.io.rows import Rows
from torchcalib.io.text import hashes_of
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.comparison.reading import settings_of
from torchcalib.results.comparison import Comparison
from torchcalib.results.report import Report

try:
    import pyarrow as pa
except ImportError as error:
    raise ImportError(
        "`torchcalib.integrations` of engines need pyarrow, which is not installed. Install it: "
        "pip install 'torchcalib[data]'."
    ) from error

SPLIT_EVERY = 16
"""Number of states that a node of the tree merges. A node holds two of them at a time, and the bytes of all."""

SCHEMA = pa.schema([("partition", pa.int64()), ("state", pa.binary())])
"""Schema of the row that an engine stores for a partition: its number, by which rows are sorted, and its state."""

_OPENING = ("target", "weights", "clusters", "from_logits", "task", "class_names", "nan_policy", "ignore_index")
"""Options that find the columns, with the names of the arguments of `open_predictions`."""
_OPENING_OF_REPORTS = (*_OPENING, "preds", "groups", "pred")
_OPENING_OF_COMPARISONS = (*_OPENING, "ids")


class TableOptions(TypedDict, total=False):
    """Options of `report` and `compare` of all engines. Columns are given by name, as in `Report.from_files`.

    - `target`, `weights`: names of columns; None (default) searches for common names, such as "label".
    - `clusters`: name of the column of clusters; None (default) for independent rows. `compare` needs clusters or ids.
    - `from_logits`, `task`: None (default) infers them from the names and shapes of the columns.
    - `class_names` (default None): names of the classes in the order of the predictions. They must be given for text
      targets, unless the columns of predictions are named after the classes.
    - `n_bins` (default 15), `right` (default False): number of bins, and whether they are `(a, b]`.
    - `ignore_index` (default None): rows with this target are dropped.
    - `nan_policy` (default "raise"): `"drop"` drops and counts rows with missing values.
    - `n_rows` (default None): number of rows of the whole table, if it is known. The right number changes no result.
      Above the limits of exact samples, the states of partitions are then smaller.
    """

    target: str | None
    weights: str | None
    clusters: str | None
    from_logits: bool | None
    task: Task | None
    class_names: Sequence[str | int] | None
    n_bins: int
    right: bool
    ignore_index: int | None
    nan_policy: NanPolicy
    n_rows: int | None


class ReportTableOptions(TableOptions, total=False):
    """Options of `report`: those of `TableOptions`, and these.

    - `preds`: name of the predictions: a column of numbers or lists, the stem of numbered columns, a list `"a,b,c"`, a
      pattern `"prob_*"`, or a range `"0..3"`; None (default) searches for a common name, such as "probs".
    - `groups`: name of the column of groups; None (default) for no groups.
    - `pred`: name of the column of predicted labels, if predictions are their probabilities.
    - `safe_threshold`, `with_calibration`, `with_intervals`: see `torchcalib.report`.
    """

    preds: str | None
    groups: str | None
    pred: str | None
    safe_threshold: float | None
    with_calibration: bool
    with_intervals: bool


class ComparisonTableOptions(TableOptions, total=False):
    """Options of `compare`: those of `TableOptions`, and these.

    - `ids`: name of the column of distinct ids of the rows; None (default) for none.
    - `n_replicates`, `seed`: see `torchcalib.compare`.
    """

    ids: str | None
    n_replicates: int
    seed: int


@dataclass(frozen=True)
class Partitions:
    """How to read the partitions of a table, and which statistics to accumulate. It can be pickled."""

    opening: Mapping[str, Any]  # arguments of `open_predictions`
    settings: Mapping[str, Any]  # arguments of the builder
    n_rows: int | None = None  # number of rows of the whole table, if it is known
    systems: Mapping[str, str] = field(default_factory=dict)  # name of the predictions of each system of a comparison

    @classmethod
    def of_report(cls, **options: Unpack[ReportTableOptions]) -> Self:
        """Return partitions for a report. Columns are found in the workers, so only these options are checked here."""
        return cls._of_options(options)

    @classmethod
    def of_comparison(cls, systems: Mapping[str, str], **options: Unpack[ComparisonTableOptions]) -> Self:
        """Return partitions for a comparison of systems, given as names of predictions by system name."""
        if not isinstance(systems, Mapping) or not all(isinstance(preds, str) for preds in systems.values()):
            raise TypeError(
                f"`systems` must be a dict of column names, got {shown(systems)}. "
                "Pass the predictions of each system by name: {'a': 'prob_a', 'b': 'prob_b'}."
            )
        if options.get("clusters") is None and options.get("ids") is None:
            raise ValueError(
                "`ids` or `clusters` must be the name of a column, got None. Partitions have no row numbers: name a "
                "column of distinct ids, or one of clusters if rows are dependent."
            )
        return cls._of_options(options, dict(systems))

    @classmethod
    def _of_options(cls, options: Mapping[str, Any], systems: Mapping[str, str] | None = None) -> Self:
        settings = dict(options)
        n_rows = settings.pop("n_rows", None)
        if n_rows is not None:
            check_count("n_rows", n_rows)
        names = _OPENING_OF_REPORTS if systems is None else _OPENING_OF_COMPARISONS
        opening = {name: settings.pop(name) for name in names if name in settings}
        settings["nan_policy"], settings["ignore_index"] = (
            opening.get("nan_policy", "raise"),
            opening.get("ignore_index"),
        )
        task: Any = opening.get("task") or "binary"  # the options are checked before any data is read
        if systems is None:
            ReportBuilder(task=task, **settings)
        else:
            ComparisonBuilder(tuple(systems), task=task, **settings)
        return cls(opening, settings, n_rows, systems or {})

    @property
    def builder(self) -> type[ReportBuilder] | type[ComparisonBuilder]:
        """Class of the builder of a partition."""
        return ComparisonBuilder if self.systems else ReportBuilder

    def state(self, partition: int | str, tables: Iterable[Any]) -> bytes | None:
        """Return the state of a partition as bytes; None for a partition without rows.

        Args:
            partition: identifier of the partition, which must be unique in the data set. A partition that an engine
                computes twice must have the same identifier.
            tables: the rows, in one or more tables of pyarrow, pandas or polars, record batches, or lists of dicts.

        Raises:
            InputError: for missing columns and other values; the message names the partition.
        """
        try:
            return self._state(partition, tables)
        except InputError as error:
            raise InputError(f"Partition {partition}: {error}") from error

    def _state(self, partition: int | str, tables: Iterable[Any]) -> bytes | None:
        builder: Any = None
        digest = _Digest()
        for table in _pieces(tables):
            names: Mapping[str, str | None] = self.systems or {"": self.opening.get("preds")}
            files = {name: self._opened(table, preds) for name, preds in names.items()}
            first = next(iter(files.values()))
            if builder is None and self.systems:
                builder = ComparisonBuilder(**{**self.settings, **settings_of(files)})
            elif builder is None:
                builder = ReportBuilder(**{**self.settings, **first.settings})
            elif not self.systems:
                builder.source += first.source  # raises an error for other columns or dtypes
            for parts in zip(*(each.chunks(2 * PIECE_BYTES) for each in files.values()), strict=True):
                rows = dict(zip(files, parts, strict=True))
                digest.add(rows)
                parts_of_first = next(iter(rows.values()))
                if self.systems:
                    preds_of = {name: each.preds for name, each in rows.items()}
                    others = {name: getattr(parts_of_first, name) for name in ("weights", "clusters", "ids")}
                    builder.update(preds_of, parts_of_first.target, **others)
                else:
                    builder.update(**parts_of_first.arguments)
            # Apply the size limits of the whole table to a partition, because merging would apply them later.
            if self.n_rows is not None and isinstance(builder, ReportBuilder) and builder.source is not None:
                n = builder.source.shape[0]
                builder.limit(*(math.ceil(size / n * max(n, self.n_rows)) for size in builder.held))
        if builder is None:
            return None
        builder.as_part(str(partition), digest.text)
        content: bytes = builder.state_bytes()
        return content

    def row(self, partition: int, tables: Iterable[Any], identifier: str | None = None) -> pa.Table:
        """Return a table with the row of a partition; without rows if the partition has none. See `SCHEMA`."""
        state = self.state(partition if identifier is None else identifier, tables)
        return _table([] if state is None else [(partition, state)])

    def merged(self, states: Iterable[bytes | None]) -> bytes | None:
        """Merge the states of partitions, in their order, into the state of all of them.

        States of the same partition are counted once. Empty partitions may be None.

        Raises:
            ValueError: if the options or columns differ, or if the rows of the same partition do.
        """
        whole = self._merged(states)
        return None if whole is None else whole.state_bytes()

    def merged_row(self, rows: pa.Table) -> pa.Table:
        """Merge the rows of a table from `row`, in the order of their numbers, to one."""
        rows = rows.sort_by("partition")  # stable
        state = self.merged(content.as_py() for content in rows.column("state"))
        return _table([] if state is None else [(rows.column("partition")[0].as_py(), state)])

    def report(self, states: Iterable[bytes | None]) -> Report:
        """Return the report of merged states.

        Raises:
            ValueError: if there are no rows.
        """
        found: Report = self._finished(states).report()
        return replace(found, task_is_inferred=self.opening.get("task") is None)

    def comparison(self, states: Iterable[bytes | None]) -> Comparison:
        """Return the comparison of merged states; see `report`."""
        found: Comparison = self._finished(states).comparison()
        return replace(found, task_is_inferred=self.opening.get("task") is None)

    def _finished(self, states: Iterable[bytes | None]) -> Any:
        whole = self._merged(states)
        if whole is None:
            raise NoSamplesError("table")
        return whole

    def _merged(self, states: Iterable[bytes | None]) -> Any:
        whole: Any = None
        for state in states:
            if state is None:
                continue
            part = self.builder.from_bytes(state)
            if whole is None:
                whole = part
            elif not part.parts.items() <= whole.parts.items():  # else computed and merged before
                whole.merge(part)
        return whole

    def _opened(self, table: pa.Table, preds: str | None) -> PredictionFiles:
        files = open_predictions((), frame=table, is_part=True, **{**self.opening, "preds": preds})
        if files.has_names_of_labels and self.opening.get("class_names") is None:
            raise InputError(
                "`class_names` must be given for text targets in several partitions, got None. Pass the names of all "
                "classes in the order of the predictions."
            )
        if files.kind_from_values:
            raise InputError(
                f"`from_logits` must be given for `{files.source.preds}` in several partitions, got None and an "
                "ambiguous name. Pass from_logits=True for logits, or from_logits=False for probabilities."
            )
        return files


class _Digest:
    """Digest of the rows of a partition, which does not depend on how they are divided into batches."""

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {}

    def add(self, rows: Mapping[str, Rows]) -> None:
        """Add rows of each system."""
        for system, each in rows.items():
            for role, values in vars(each).items():
                if isinstance(values, np.ndarray):  # ids that are text
                    values = hashes_of(values.tolist())
                if isinstance(values, Tensor):
                    if role == "groups" and each.group_names is not None:
                        values = hashes_of([*each.group_names, ""])[values]  # -1 is the last
                    column = self._columns.setdefault(f"{system} {role}", blake2b(digest_size=16))
                    column.update(np.ascontiguousarray(values.numpy()).data)

    @property
    def text(self) -> str:
        """The digest of all columns, in hexadecimal digits."""
        digests = {name: column.hexdigest() for name, column in self._columns.items()}
        return blake2b(repr(sorted(digests.items())).encode(), digest_size=16).hexdigest()


def _pieces(tables: Iterable[Any]) -> Iterator[pa.Table]:
    """Yield the rows of tables in tables of about `PIECE_BYTES` in one chunk, without empty ones."""
    waiting: list[pa.Table] = []
    for table in map(_as_table, tables):
        size = max(1, PIECE_BYTES * table.num_rows // max(1, table.nbytes))
        for start in range(0, table.num_rows, size):
            waiting.append(table.slice(start, size))
            if sum(each.nbytes for each in waiting) >= PIECE_BYTES // 2:
                yield pa.concat_tables(waiting).combine_chunks()
                waiting.clear()
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()


def _as_table(table: Any) -> pa.Table:
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    if isinstance(table, list):
        return pa.Table.from_pylist(table)
    if hasattr(table, "to_arrow"):  # polars
        table = table.to_arrow()
    return table if isinstance(table, pa.Table) else pa.Table.from_pandas(table, preserve_index=False)


def _table(rows: Sequence[tuple[int, bytes]]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA)
