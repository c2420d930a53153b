"""Readers of tables with named columns: `.csv`, `.tsv`, `.json`, `.jsonl` and `.parquet`. Requires pyarrow.

A field of objects in a column `probs`, such as label -> probability, is a column too: `probs.cat`.
"""

import json
import re
from abc import abstractmethod
from codecs import BOM_UTF8
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv, parquet
from pyarrow import json as arrow_json

from torchcalib.io.cells import LABEL_KEYS, SCORE_KEYS, scores_in
from torchcalib.io.columns import class_columns, classes_among, groups_of, split
from torchcalib.io.errors import FILL_IN, InputError, quoted, shown
from torchcalib.io.limits import (
    BUFFER,
    MAX_ARRAYS,
    MAX_HEADER,
    MAX_TEXT_BYTES,
    check_columns,
    check_samples,
    decoded_limit,
    row_limit,
)
from torchcalib.io.lines import blocks_of_lines, check_depth, check_encoding, opened_text
from torchcalib.io.names import LOGITS, NEUTRAL, PROBS, TARGETS, WEIGHTS, is_numeral
from torchcalib.io.parquet_pages import Chunk, pages_of, row_groups_of
from torchcalib.io.reader import FLOATS, TEXT, WHOLE, Array, Reader, Text

_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}
# Size in bytes of the blocks of text that pyarrow parses. A row must fit in a block. The first block determines the
# column types. pyarrow reads about 30 blocks ahead.
_BLOCK = 2 * 2**20
_JSON_DTYPES = {bool: "bool", int: "int64", float: "float64", str: "string"}
_MAX_DEPTH = 10  # largest nesting depth of lists and objects in JSON
_NO_TEXTS = ("", "NaN", "nan")
"""Cells of text files without a value."""
_NO_NUMBERS = (*csv.ConvertOptions().null_values, "<NA>", "None")
"""The same in columns of numbers. In columns of text, `None` and `NA` may be classes."""
_SEPARATOR = re.compile(rb'"?sep=([;,\t|])"?', re.IGNORECASE)
_DECIMAL_COMMA = re.compile(rb"-?\d{0,9},\d+(?:[eE][-+]?\d+)?")
_DECIMAL_POINT = re.compile(rb"-?\d*\.\d+(?:[eE][-+]?\d+)?")
_BYTES_OF_LEVELS = 4  # two levels of 2 bytes for each value in a list


class _Table(Reader):
    """Reader of columns of numbers, text or lists. Class columns such as `prob_0 .. prob_9` also form one array."""

    @abstractmethod
    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield record batches of about `count` rows. `dtypes` maps the names of the columns to their dtypes."""

    def compose(self, columns: Sequence[str], labels: Collection[str] = (), wanted: Sequence[str] = ()) -> str:
        """Combine columns of predictions, one per class, into an array, and return its name; see `class_columns`."""
        found = class_columns(columns, labels, wanted)
        stems = {parts[0] if (parts := split(name)) else "" for name in found.columns}
        array = _joined(
            [self.arrays[name] for name in found.columns], min(stems) if len(stems) == 1 else "", found.classes
        )
        self.arrays[array.name] = array
        return array.name

    def rows(self, names: Sequence[str], count: int, optional: Collection[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Split the batches into chunks of at most `count` rows; see `Reader.rows`."""
        wanted = [self.arrays[name] for name in names]
        start = 0
        dtypes = {column: array.stored or array.dtype for array in wanted for column in _columns(array)}
        for batch in self.batches(dtypes, count):
            for offset in range(0, batch.num_rows, count):
                piece = batch.slice(offset, count)
                yield tuple(self._values(array, piece, start + offset, array.name in optional) for array in wanted)
            start += batch.num_rows

    def _values(self, array: Array, piece: pa.RecordBatch, start: int, allow_missing: bool) -> Any:
        """Convert the columns of an array to a tensor `(rows, ...)`, or text to a list of strings."""
        import torch  # describing the columns does not require torch

        columns = []
        for name in _columns(array):
            values = piece.column(name)
            if not allow_missing:
                self._check_present(name, values, start, 1)
            if (array.stored or array.dtype) in TEXT:
                return self._text(name, values, MAX_TEXT_BYTES if not array.stored else row_limit(self.paths))
            values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
            if pa.types.is_primitive(values.type):
                columns.append(_numbers(values))
            else:
                columns.append(self._lists(name, values, array.shape[1], start, allow_missing))
        return torch.from_numpy(np.stack(columns, -1).reshape(piece.num_rows, *array.shape[1:]))

    def _lists(self, name: str, values: Any, width: int, start: int, allow_missing: bool) -> np.ndarray[Any, Any]:
        """Convert a column of lists to an array `(rows, width)`. A missing list becomes a row of NaN."""
        present = _numbers(values.is_valid())
        lengths = _numbers(_compute("list_value_length", values).fill_null(width))
        if (lengths != width).any():
            row = int((lengths != width).argmax())
            raise InputError(
                f"Column `{name}` in `{self.label}` must contain lists of equal length, got {width} numbers in row 1 "
                f"and {lengths[row]} in row {start + row + 1}. Write one number per class in every row."
            )
        flat = values.drop_null().flatten()
        if not allow_missing:
            self._check_present(name, flat, start, width)
        numbers = _numbers(flat).reshape(-1, width)
        if present.all():
            return numbers
        rows = np.full((len(present), width), np.nan, np.result_type(numbers, np.float16))
        rows[present] = numbers
        return rows

    def _text(self, name: str, values: Any, most: int) -> Text:
        """Convert a column of text. Missing texts become empty. A long text in a dictionary is never repeated."""
        import torch

        values = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
        indices = _numbers(values.indices.cast(pa.int64()).fill_null(-1))  # those of polars are unsigned
        used, codes = np.unique(indices, return_inverse=True)
        texts = values.dictionary.take(pa.array(used[used >= 0]))
        longest = _compute("max", _compute("binary_length", texts)).as_py() or 0
        if longest > most:
            raise InputError(
                f"Column `{name}` in `{self.label}` must contain text of at most {most:,} bytes, got "
                f"{longest:,}. Save shorter names."
            )
        missing = [""] if (used < 0).any() else []  # -1 is the first of the sorted indices
        return Text([*missing, *texts.to_pylist()], torch.from_numpy(codes.astype(np.int64)))

    def _check_present(self, name: str, values: Any, start: int, width: int) -> None:
        """Raise if one of `values` is missing. `start` rows precede the first row, and each row has `width` values."""
        if values.null_count:
            row = start + int(_numbers(values.is_null()).argmax()) // width + 1
            raise InputError(
                f"Column `{name}` in `{self.label}` must contain a value in every row, got none in row {row}. {FILL_IN}"
            )


class Csv(_Table):
    """Reader of text with a header line and columns separated by commas, or by other marks; see `text_layout`.

    Columns of numbers without decimal points have an integer dtype. `true` and `false` are booleans. Files that end in
    `.gz` are decompressed in chunks. Cells in quotes may have several lines. Comments after `#` are skipped.
    """

    format = "csv"

    def inspect(self) -> Iterable[Array]:
        """Describe the columns from the first block of text, and count the rows."""
        self._layout = text_layout(self.paths[0])
        check_columns(self._layout.n_columns, self.paths, self.label)
        with self._opened() as file:
            schema = file.schema
        if all(map(is_numeral, schema.names)) and schema.names != list(map(str, range(len(schema.names)))):
            raise InputError(
                f"`{self.label}` must begin with a line of column names, got the numbers {quoted(schema.names)}. "
                "Add a first line such as prob,target."
            )
        if all(map(is_numeral, schema.names)):
            self.advice += " If the first line contains values, add a line of names before it, such as prob,target."
        self.check_names(schema.names)
        n = sum(batch.num_rows for batch in self.batches({schema.names[0]: "binary"}, 1))
        return _with_composed([Array(column.name, _dtype(column.type), (n,)) for column in schema])

    @contextmanager
    def _opened(self, **options: Any) -> Iterator[Any]:
        """Open the file for batches. A row with too few or too many cells raises `InputError`."""
        ragged = []

        def skip_comment(row: Any) -> str:  # pyarrow ignores errors in it
            ragged.extend([] if row.text.startswith("#") else [row])
            return "error" if ragged else "skip"

        wanted = csv.ConvertOptions(decimal_point=self._layout.decimal_point, null_values=_NO_NUMBERS, **options)
        how = csv.ReadOptions(block_size=_BLOCK, use_threads=False, skip_rows=self._layout.skipped)
        form = csv.ParseOptions(
            delimiter=self._layout.separator, newlines_in_values=True, invalid_row_handler=skip_comment
        )
        try:
            with csv.open_csv(self.paths[0], how, form, wanted) as file:
                yield file
        except pa.ArrowInvalid as error:
            if not ragged:
                raise
            row = ragged[0]
            raise InputError(
                f"`{self.label}` must have {row.expected_columns} cells in every row, as in its header, got "
                f"{row.actual_columns} in row {row.number}: {shown(row.text)}. Put cells with the separator into "
                "quotes, and fill missing cells."
            ) from error

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Yield one batch per block of text. `count` is ignored."""
        kinds = {name: pa.type_for_alias(dtype) for name, dtype in dtypes.items()}
        with self._opened(include_columns=list(dtypes), column_types=kinds) as file:
            for batch in file:
                yield batch
                del batch  # free the memory before the next batch is read
                pa.default_memory_pool().release_unused()  # reader threads otherwise keep freed memory

    def texts(self) -> Iterator[dict[str, str | None]]:
        """Yield the cells of each row as text, by column. Missing cells are None. A number has a decimal point."""
        own = {name: array.dtype in TEXT for name, array in self.arrays.items() if not array.columns}
        for batch in self.batches(dict.fromkeys(own, "string"), 1):
            columns: list[list[str | None]] = []
            for column, is_text in zip(batch.columns, own.values(), strict=True):
                missing = {*_NO_TEXTS} if is_text else {*_NO_NUMBERS}
                cells = [None if cell in missing else cell for cell in column.to_pylist()]
                if not is_text and self._layout.decimal_point == ",":
                    cells = [cell and cell.replace(",", ".") for cell in cells]
                columns.append(cells)
            yield from (dict(zip(own, cells, strict=True)) for cells in zip(*columns, strict=True))


class Tsv(Csv):
    """Reader of text with a header line and tab-separated columns."""

    format = "tsv"


class Jsonl(_Table):
    """Reader of lines with one JSON object each, all with the same keys. The first lines determine the dtypes."""

    format = "jsonl"
    _paths: dict[str, tuple[str, ...]]  # keys of the objects around each value, by the name of the column
    _in_lists: dict[str, Any]  # type of the lists of objects in a column

    def inspect(self) -> Iterable[Array]:
        """Describe the keys in the first block of lines, and count the lines."""
        kinds: dict[str, set[str]] = {}
        widths: dict[str, int] = {}
        self._paths, self._in_lists = {}, {}
        orders: dict[str, list[str]] = {}  # of the keys of an object
        unordered: set[str] = set()
        n = 0
        for block in self._blocks():
            lines = block.splitlines()
            if n == 0:
                check_encoding(self.label, block)
                for line in lines:
                    row = json.loads(line)
                    self._add_kinds(row, kinds, widths)
                    for key, value in row.items():
                        if isinstance(value, dict) and orders.setdefault(key, [*value]) != [*value]:
                            unordered.add(key)
            n += len(lines)
        described = []
        for name, found in kinds.items():
            shape = (n, widths[name]) if name in widths else (n,)
            found = {"float64"} if found == {"int64", "float64"} else found
            dtype = " and ".join(sorted(found)) or "null"
            described.append(Array(name, dtype, shape, is_unordered=self._paths[name][0] in unordered))
        return _with_composed(described)

    def _add_kinds(self, row: Any, kinds: dict[str, set[str]], widths: dict[str, int]) -> None:
        """Add the dtypes in a line to `kinds`, by key, and the length of the first list that is not empty to `widths`.

        pyarrow allocates a value for every key in every line: different keys in each line exhaust the memory.
        """
        if not isinstance(row, dict):
            raise ValueError(f"each line must be an object, got {type(row).__name__}")
        for path, value in _fields(row):
            key = ".".join(path)
            self._paths.setdefault(key, path)
            items = value if isinstance(value, list) else [value]
            if isinstance(value, list) and isinstance(scores_in(value), dict):  # read as text
                self._in_lists[key] = _type_of_option(value)
                items = [""]
            kinds.setdefault(key, set()).update(_kind_of(item) for item in items if item is not None)
            if isinstance(value, list) and key not in self._in_lists:
                widths[key] = widths.get(key) or len(value)
        if len(kinds) > MAX_ARRAYS:
            self.check_names(list(kinds))

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `count` rows."""
        fields: dict[str, Any] = {}
        for name, dtype in dtypes.items():
            kind, inside = pa.type_for_alias(dtype), fields
            for key in self._paths[name][:-1]:
                inside = inside.setdefault(key, {})
            is_list = len(self.arrays[name].shape) > 1 and not self.arrays[name].stored
            inside[self._paths[name][-1]] = self._in_lists.get(name, pa.list_(kind) if is_list else kind)
        schema = pa.schema(_struct(fields))
        options = arrow_json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        for block in self._blocks():
            table = arrow_json.read_json(BytesIO(block), arrow_json.ReadOptions(block_size=2 * len(block)), options)
            if table.num_rows != len(block.splitlines()):
                raise ValueError("each line must be one object, got several in a line")
            yield from _flat(table).to_batches(max_chunksize=count)

    def _blocks(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, about `_BLOCK` bytes each, without blank lines."""
        for block in blocks_of_lines(self.paths[0], _BLOCK):
            if block.isspace():  # without a list of many lines
                continue
            lines = [line for line in block.splitlines(keepends=True) if not line.isspace()]
            for line in lines:
                check_depth(self.label, line, _MAX_DEPTH)
            if lines:
                yield b"".join(lines)


class Json(Jsonl):
    """Reader of JSON files whose rows become lines; see `torchcalib.io.lines.opened_lines`."""

    format = "json"


class Parquet(_Table):
    """Reader of parquet files. Only the columns in use are read."""

    format = "parquet"

    def inspect(self) -> Iterable[Array]:
        """Describe the columns from the file footer. The first non-empty list determines the width of a list column."""
        self._row_groups = row_groups_of(self._footer(), self.paths[0].stat().st_size)
        with self._opened() as file:
            check_samples(file.metadata.num_rows, self.paths, self.label)
            self.check_names(file.schema_arrow.names)
            columns = {name: kind for column in file.schema_arrow for name, kind in _leaf_columns(column)}
            stored = iter(range(len(file.schema)))
            self._leaves = {name: [next(stored) for _ in range(_n_leaves(kind))] for name, kind in columns.items()}
            self._in_lists = {name for name, kind in columns.items() if pa.types.is_nested(kind)}
            return _with_composed([self._described(file, name, kind) for name, kind in columns.items()])

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `count` rows."""
        text = [name for name, dtype in dtypes.items() if dtype in TEXT and name not in self._in_lists]
        largest = self._check_pages(list(dtypes))
        has_prefixes = any(group[self._leaves[name][0]].has_prefixes for group in self._row_groups for name in text)
        if has_prefixes:
            count = max(1, min(count, BUFFER // max(1, largest)))
        with self._opened(read_dictionary=None if has_prefixes else text) as file:
            for batch in file.iter_batches(batch_size=count, columns=list(dtypes)):
                yield from _flat(pa.Table.from_batches([batch])).to_batches()

    def _footer(self) -> bytes:
        """Read the footer, which is followed by its length and a mark."""
        with self.paths[0].open("rb") as file:
            size = self.paths[0].stat().st_size
            file.seek(max(0, size - 8))
            length, mark = int.from_bytes(file.read(4), "little"), file.read()
            if mark != b"PAR1":
                raise ValueError("the file must end with a Parquet footer, got other content")
            if length > min(MAX_HEADER, size - 8):
                raise ValueError(f"the footer must have at most {MAX_HEADER:,} bytes, got {length:,}")
            file.seek(size - 8 - length)
            return file.read(length)

    def _opened(self, **options: Any) -> Any:
        """Open the file as a memory map. Otherwise all columns of a row group would be in memory."""
        return parquet.ParquetFile(self.paths[0], memory_map=True, **options)

    def _described(self, file: Any, name: str, kind: Any) -> Array:
        shape = (file.metadata.num_rows,)
        if pa.types.is_fixed_size_list(kind):
            return Array(name, _dtype(kind.value_type), (*shape, kind.list_size))
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or _has_objects(kind):
            return Array(name, _dtype(kind), shape)
        dtype = _dtype(kind.value_type)
        if dtype not in FLOATS | WHOLE:
            return Array(name, f"list<{dtype}>", shape)
        try:
            largest_group = self._check_pages([name])
        except ValueError as error:
            advice = "Write smaller row groups: df.to_parquet(path, row_group_size=100_000)."
            return Array(name, dtype, shape, f"must be less compressed: {error}. {advice}")
        per_row = max(1, largest_group // max(1, *shape))
        for batch in file.iter_batches(batch_size=max(1, 2**20 // per_row), columns=[name]):
            column = _flat(pa.Table.from_batches([batch])).column(0)
            lengths = _compute("list_value_length", column).drop_null()
            if len(lengths) and lengths[0].as_py():
                return Array(name, dtype, (*shape, lengths[0].as_py()))
        return Array(name, dtype, (*shape, 0))

    def _check_pages(self, names: Sequence[str]) -> int:
        """Return the largest decoded size of columns in a row group, in bytes. Raise if it exceeds the limit."""
        limit, largest = decoded_limit(self.paths), 0
        with pa.memory_map(str(self.paths[0])) as content:
            for group in self._row_groups:
                size = sum(self._decoded(content, group[leaf], name) for name in names for leaf in self._leaves[name])
                if size > limit:
                    raise ValueError(f"got {size:,} bytes in a row group, more than the limit of {limit:,}")
                largest = max(largest, size)
        return largest

    def _decoded(self, content: Any, chunk: Chunk, name: str) -> int:
        """Return the bytes that a chunk may need at once: its largest page, and its values if they are in lists."""
        largest = n_values = 0
        for size, n in pages_of(content, chunk):
            largest, n_values = max(largest, size), n_values + n
        # One list may contain all values of a row group.
        return largest + (n_values * (chunk.itemsize + _BYTES_OF_LEVELS) if name in self._in_lists else 0)


class Frame(_Table):
    """Reader of a DataFrame of pandas, polars or pyarrow."""

    format = "DataFrame"
    advice = "Pass them separately: report(df[['NAME', ...]], df['NAME'])."

    def __init__(self, frame: Any) -> None:
        cells = frame.items() if hasattr(frame, "items") else ()  # of pandas and of a dict; other objects have an order
        self._unordered = tuple(f"{name}." for name, column in cells if _are_unordered(column))
        if isinstance(frame, dict):
            frame = pa.table({str(name): pa.array(column) for name, column in frame.items()})
        if hasattr(frame, "to_arrow"):  # polars
            frame = frame.to_arrow()
        if isinstance(frame, pa.RecordBatch):
            frame = pa.Table.from_batches([frame])
        if not isinstance(frame, pa.Table):
            named = frame.rename(columns=str)  # columns without names have numbers
            if named.columns.has_duplicates:
                repeated = {*named.columns[named.columns.duplicated()]}
                raise InputError(f"The frame must have unique column names, got {quoted(repeated)} twice. Rename one.")
            frame = pa.Table.from_pandas(named, preserve_index=False)
        self._table = _flat(pa.table([*map(_without_extension, frame.columns)], names=frame.column_names))
        super().__init__()

    def inspect(self) -> Iterable[Array]:
        """Describe the columns. The first non-empty list determines the width of a list column."""
        self.check_names(self._table.column_names)
        return _with_composed([self._described(name) for name in self._table.column_names])

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `count` rows."""
        yield from self._table.select(list(dtypes)).to_batches(max_chunksize=count)

    def _described(self, name: str) -> Array:
        column, shape = self._table.column(name), (self._table.num_rows,)
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return Array(name, _dtype(kind), shape, is_unordered=name.startswith(self._unordered))
        lengths = _compute("list_value_length", column)
        return Array(name, _dtype(kind.value_type), (*shape, _compute("max", lengths.slice(0, 1)).as_py() or 0))


def _are_unordered(column: Any) -> bool:
    """Return whether the cells of a column are objects with their keys in different orders."""
    is_of_objects = isinstance(next(iter(column), None), dict)
    return is_of_objects and len({tuple(cell) for cell in column if isinstance(cell, dict)}) > 1


def _without_extension(column: Any) -> Any:
    """Return a column of an extension type, such as tensors of Ray, as its numbers or lists."""
    if not isinstance(column.type, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)


READERS: dict[str, type[Reader]] = {kind.format: kind for kind in (Csv, Tsv, Json, Jsonl, Parquet)}
"""Reader by file format."""


def _with_composed(arrays: list[Array]) -> list[Array]:
    """Append one combined array per common stem of columns, such as `prob_0`, `prob_1` or `prob_cat`, `prob_dog`."""
    known, keys = {*LOGITS, *PROBS, *NEUTRAL, *TARGETS, *WEIGHTS}, {array.key for array in arrays}
    single = {array.name: array for array in arrays if len(array.shape) == 1 and array.key not in known}
    together = []
    for stem, names in groups_of(single).items():
        if stem in (keys if stem in TARGETS else ()) and not all(
            name[len(stem) :].strip("_.").isdecimal() for name in names
        ):
            continue  # other columns about the target
        rests = [(split(name) or ("", name))[1] for name in names]
        if len(classes_among(rests)) < 2:
            continue  # columns about the prediction, such as `pred_label` and `pred_prob`, or `prob_cat` and `prob_max`
        found = class_columns(names)
        columns = [single[name] for name in found.columns]
        dtypes = {column.dtype for column in columns}
        are_numbers = dtypes <= WHOLE if stem in TARGETS and dtypes & WHOLE else bool(dtypes & FLOATS)
        fits = dtypes <= FLOATS | WHOLE and are_numbers
        if len(columns) > 1 and (fits or all(map(str.isdecimal, found.classes))):
            together.append(_joined(columns, stem, found.classes))
    return arrays + together


def _joined(columns: Sequence[Array], stem: str, classes: Sequence[str]) -> Array:
    """Combine columns, one per class, into one array."""
    names = tuple(column.name for column in columns)
    dtypes = {column.dtype for column in columns}
    # In text files, a column without decimal points has an integer dtype.
    dtype = np.result_type(*dtypes).name if dtypes <= FLOATS | WHOLE else " and ".join(sorted(dtypes))
    problem = ""
    if lists := [column.name for column in columns if len(column.shape) > 1]:
        problem = f"must be columns with one number per row, got lists in {quoted(lists)}. Name one column."
    elif len({int(name) if name.isdecimal() else name for name in classes}) < len(classes):
        problem = f"must be columns of different classes, got {quoted(names)}. Rename one."
    shape = (*columns[0].shape, len(columns))
    is_unordered = any(column.is_unordered for column in columns)
    return Array(f"{names[0]}..{names[-1]}", dtype, shape, problem, names, stem, tuple(classes), is_unordered)


def _compute(function: str, column: Any) -> Any:
    """Call a function of `pyarrow.compute`, which most files do not need, and whose import takes 0.1 s."""
    import pyarrow.compute as pc

    return getattr(pc, function)(column)


def _flat(table: Any) -> Any:
    """Return a table with a column for each field of objects, `probs.cat`, and lists of objects as text."""
    while any(pa.types.is_struct(kind) for kind in table.schema.types):
        table = table.flatten()
    for k, column in enumerate(table.columns):
        if _has_objects(column.type):
            texts = [None if cell is None else json.dumps(cell, default=str) for cell in column.to_pylist()]
            table = table.set_column(k, table.column_names[k], pa.array(texts, pa.string()))
    return table


def _has_objects(kind: Any) -> bool:
    """Return whether the cells of a column are lists of objects, which are read as text."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list and pa.types.is_struct(kind.value_type))


def _type_of_option(options: Sequence[Mapping[str, Any]]) -> Any:
    """Return the type of a list of objects with a label and a score."""
    label = next(key for key in LABEL_KEYS if key in options[0])
    score = next(key for key in SCORE_KEYS if key in options[0])
    kind = pa.int64() if isinstance(options[0][label], int) else pa.string()
    return pa.list_(pa.struct([(label, kind), (score, pa.float64())]))


def _leaf_columns(column: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and type of a column, or of each field of objects."""
    name = before + column.name
    if not pa.types.is_struct(column.type):
        yield name, column.type
        return
    for k in range(column.type.num_fields):
        yield from _leaf_columns(column.type.field(k), f"{name}.")


def _fields(row: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys and the value of each field of nested objects."""
    for key, value in row.items():
        if isinstance(value, dict) and value:
            yield from _fields(value, (*before, key))
        else:
            yield (*before, key), value


def _struct(fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, pa.struct(_struct(kind)) if isinstance(kind, dict) else kind) for name, kind in fields.items()]


def _n_leaves(kind: Any) -> int:
    kind = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    return sum(_n_leaves(kind.field(k).type) for k in range(kind.num_fields)) if kind.num_fields else 1


class TextLayout(NamedTuple):
    """How a text file separates columns."""

    skipped: int  # lines before the header
    separator: str
    decimal_point: str
    n_columns: int


def text_layout(path: Path) -> TextLayout:
    """Return the layout of a text file with a header line.

    The first separator of commas, semicolons, tabs and vertical bars in the header counts; in `.tsv` files, tabs are
    first. Lines before the header are blank, comments after `#`, or name the separator, as Excel writes them: `sep=;`.
    A comment with as many cells as the numbers below it is the header, as numpy writes it.
    """
    with opened_text(path) as file:
        start = file.read(_BLOCK)
    check_encoding(str(path), start)
    lines = start.removeprefix(BOM_UTF8).splitlines() or [b""]
    is_header = [bool(line.strip()) and line[:1] != b"#" and not _SEPARATOR.fullmatch(line.strip()) for line in lines]
    first = is_header.index(True) if True in is_header else 0
    marks = [b"\t", b",", b";", b"|"] if ".tsv" in path.name.lower() else [b",", b";", b"\t", b"|"]
    named = next((match[1] for line in lines[:first] if (match := _SEPARATOR.fullmatch(line.strip()))), None)
    mark = named or next((mark for mark in marks if mark in lines[first]), marks[0])
    if first and lines[first - 1][:1] == b"#":
        above, below = ([cell.decode(errors="replace") for cell in line.split(mark)] for line in lines[first - 1 :][:2])
        are_columns = len(above) == len(below) > 1 and any(map(is_numeral, below)) and not any(map(is_numeral, above))
        first -= are_columns
    cells = [cell for line in lines[first + 1 : first + 100] for cell in line.split(mark)]
    has_commas = (
        mark != b"," and any(map(_DECIMAL_COMMA.fullmatch, cells)) and not any(map(_DECIMAL_POINT.fullmatch, cells))
    )
    return TextLayout(first, mark.decode(), "," if has_commas else ".", lines[first].count(mark) + 1)


def _kind_of(value: object) -> str:
    """Return the dtype of a value in JSON."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        return "float64"
    return _JSON_DTYPES.get(type(value), type(value).__name__)


def _numbers(values: Any) -> np.ndarray[Any, Any]:
    """Convert a column to a numpy array. Missing numbers become NaN, in float64 for integers.

    `to_numpy` of pyarrow would import pandas, which takes longer than reading a small file.
    """
    if values.null_count:
        values = values if pa.types.is_floating(values.type) else values.cast(pa.int64()).cast(pa.float64())
        values = values.fill_null(pa.scalar(np.nan, values.type))
    if pa.types.is_boolean(values.type):
        return _numbers(values.cast(pa.uint8())).view(np.bool_)
    kind, stop = values.type.to_pandas_dtype(), values.offset + len(values)
    return np.frombuffer(values.buffers()[1], kind, stop)[values.offset :] if len(values) else np.empty(0, kind)


def _columns(array: Array) -> tuple[str, ...]:
    return array.columns or (array.name,)


def _dtype(arrow_type: Any) -> str:
    if _has_objects(arrow_type):
        return "string"
    if pa.types.is_dictionary(arrow_type):  # categorical columns of pandas
        return _dtype(arrow_type.value_type)
    return _DTYPES.get(str(arrow_type), str(arrow_type))
