"""Readers of tables with named columns: `.csv`, `.tsv`, `.jsonl` and `.parquet`. Requires pyarrow."""

import gzip
import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from os.path import commonprefix
from typing import IO, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv, json, parquet

from torchcalib.io.errors import InputError, quoted
from torchcalib.io.names import LOGITS, NEUTRAL, NUMBERED, PROBS, TARGETS, WEIGHTS, class_of
from torchcalib.io.readers import FLOATS, MAX_RESIDENT, TEXT, WHOLE, Array, Reader

_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}
# Size in bytes of the blocks of text that pyarrow parses. A row must fit in a block. The first block determines the
# column types. pyarrow reads about 30 blocks ahead.
_BLOCK = 4 * 2**20
_MAX_HEADER = 2**16  # largest number of bytes of the first line that are searched for the separator
_MAX_DEPTH = 100  # largest nesting depth of lists and objects in JSON
_TEXT_OF_JSON = re.compile(rb'"(?:[^"\\]|\\.)*"')
_MAX_ITEMSIZE = 8  # size of the widest number in bytes
_MAX_UNFOLDED = 256  # largest accepted ratio of decoded to stored size; columns of few distinct numbers may reach it


class _Table(Reader):
    """Reader of columns of numbers, text or lists. Class columns such as `prob_0 .. prob_9` also form one array."""

    @abstractmethod
    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield record batches of about `count` rows. `dtypes` maps the names of the columns to their dtypes."""

    def compose(self, columns: Sequence[str]) -> str:
        """Combine columns, one per class, into an array, and return its name."""
        array = _composed([self.arrays[name] for name in columns], "")
        known = (other.name for other in self.arrays.values() if other.columns == array.columns)
        name = next(known, array.name)
        self.arrays.setdefault(name, array)
        return name

    def rows(self, names: Sequence[str], count: int, allow_missing: bool = False) -> Iterator[tuple[Any, ...]]:
        """Split the batches into chunks of at most `count` rows; see `Reader.rows`."""
        wanted = [self.arrays[name] for name in names]
        start = 0
        for batch in self.batches({column: array.dtype for array in wanted for column in _columns(array)}, count):
            for offset in range(0, batch.num_rows, count):
                piece = batch.slice(offset, count)
                yield tuple(self._values(array, piece, start + offset, allow_missing) for array in wanted)
            start += batch.num_rows

    def _values(self, array: Array, piece: pa.RecordBatch, start: int, allow_missing: bool) -> Any:
        """Convert the columns of an array to a tensor `(rows, ...)`, or text to a list of strings."""
        columns = []
        for name in _columns(array):
            values = piece.column(name)
            values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
            if not allow_missing:
                self._check_present(name, values, start, 1)
            if array.dtype in TEXT:
                return ["" if text is None else text for text in values.to_pylist()]
            if pa.types.is_primitive(values.type):
                columns.append(_numbers(values))
            else:
                columns.append(self._lists(name, values, array.shape[1], start, allow_missing))
        return torch.from_numpy(np.stack(columns, -1).reshape(piece.num_rows, *array.shape[1:]))

    def _lists(self, name: str, values: Any, width: int, start: int, allow_missing: bool) -> np.ndarray[Any, Any]:
        """Convert a column of lists to an array `(rows, width)`. A missing list becomes a row of NaN."""
        present = values.is_valid().to_numpy(zero_copy_only=False)
        lengths = pc.list_value_length(values).fill_null(width).to_numpy(zero_copy_only=False)
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

    def _check_present(self, name: str, values: Any, start: int, width: int) -> None:
        """Raise if one of `values` is missing. `start` rows precede the first row, and each row has `width` values."""
        if values.null_count:
            row = start + int(values.is_null().to_numpy(zero_copy_only=False).argmax()) // width + 1
            raise InputError(
                f"Column `{name}` in `{self.label}` must contain a value in every row, got none in row {row}. "
                "Fill it in, or pass --nan-policy drop to drop rows with missing values."
            )


class Csv(_Table):
    """Reader of text with a header line and comma-separated columns.

    Columns of numbers without decimal points have an integer dtype. `true` and `false` are booleans. Files that end in
    `.gz` are decompressed in chunks.
    """

    format = "csv"
    delimiter: ClassVar[str] = ","

    def inspect(self) -> Iterable[Array]:
        """Describe the columns from the first block of text, and count the rows."""
        self._check_separator()
        with self._opened() as file:
            schema = file.schema
        self._check_header(schema.names)
        self.check_names(schema.names)
        n = sum(batch.num_rows for batch in self.batches({schema.names[0]: "binary"}, 1))
        return with_composed([Array(column.name, _dtype(column.type), (n,)) for column in schema])

    def _opened(self, **options: Any) -> Any:
        options["read_options"] = csv.ReadOptions(block_size=_BLOCK, use_threads=not options)
        return csv.open_csv(self.paths[0], parse_options=csv.ParseOptions(delimiter=self.delimiter), **options)

    def _check_header(self, names: Sequence[str]) -> None:
        if all(_is_number(name) for name in names):
            raise InputError(
                f"`{self.label}` must begin with a line of column names, got the numbers {quoted(names)}. "
                "Add a first line such as prob,target."
            )

    def _check_separator(self) -> None:
        """Raise if the first line contains separators of other formats, but not the separator of this format."""
        with pa.input_stream(self.paths[0], compression="detect") as file:
            first = file.read(_MAX_HEADER).partition(b"\n")[0].decode(errors="replace").strip()
        words = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
        other = next((mark for mark in words if mark in first), None)
        if self.delimiter in first or other is None:
            return
        remedy = {"\t": "Rename it to .tsv.", ",": "Rename it to .csv."}.get(
            other, f"Write it with commas and decimal points; pandas.read_csv(path, sep='{other}') reads it."
        )
        raise InputError(
            f"`{self.label}` must separate columns by {words[self.delimiter]}, got {words[other]} in the first line, "
            f"`{first[:200]}`. {remedy}"
        )

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Yield one batch per block of text. `count` is ignored."""
        wanted = csv.ConvertOptions(
            include_columns=list(dtypes),
            column_types={name: pa.type_for_alias(dtype) for name, dtype in dtypes.items()},
        )
        with self._opened(convert_options=wanted) as file:
            for batch in file:
                yield batch
                del batch  # free the memory before the next batch is read
                pa.default_memory_pool().release_unused()  # reader threads otherwise keep freed memory


class Tsv(Csv):
    """Reader of text with a header line and tab-separated columns."""

    format = "tsv"
    delimiter = "\t"


class Jsonl(_Table):
    """Reader of lines with one JSON object each, all with the same keys. The first lines determine the dtypes."""

    format = "jsonl"

    def inspect(self) -> Iterable[Array]:
        """Describe the keys in the first block of lines, and count the lines."""
        first, n = None, 0
        for block in self._blocks():
            if first is None:
                first = json.read_json(BytesIO(block), json.ReadOptions(block_size=2 * len(block)))
            n += len(block.splitlines())
        if first is None:
            return []  # an empty file has no keys
        self.check_names(first.schema.names)
        described = []
        for column in first.schema:
            shape: tuple[int, ...] = (n,)
            kind = column.type
            if pa.types.is_list(kind):
                kind, shape = kind.value_type, (n, _width(first.column(column.name)))
            described.append(Array(column.name, _dtype(kind), shape))
        return with_composed(described)

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `count` rows."""
        fields = []
        for name, dtype in dtypes.items():
            kind = pa.type_for_alias(dtype)
            fields.append((name, pa.list_(kind) if len(self.arrays[name].shape) > 1 else kind))
        options = json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore")
        for block in self._blocks():
            table = json.read_json(BytesIO(block), json.ReadOptions(block_size=2 * len(block)), options)
            yield from table.to_batches(max_chunksize=count)

    def _blocks(self) -> Iterator[bytes]:
        """Yield blocks of whole lines, about `_BLOCK` bytes each, without blank lines."""
        path = self.paths[0]
        opened: IO[bytes]
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as opened:  # type: ignore[assignment]
            while lines := self._lines(opened):
                block = b"".join(line for line in lines if line.strip())
                if block:
                    yield block

    def _lines(self, file: IO[bytes]) -> list[bytes]:
        """Return the next lines, about `_BLOCK` bytes in total."""
        lines, size = [], 0
        while size < _BLOCK and (line := file.readline(16 * _BLOCK)):
            if len(line) >= 16 * _BLOCK:
                raise InputError(f"`{self.label}` must have lines of at most 64 MiB, got a longer one. Check the file.")
            # Deeper nesting could overflow the stack of the recursive parser.
            if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _depth(line) > _MAX_DEPTH:
                raise InputError(
                    f"`{self.label}` must contain flat objects, got deeply nested ones. "
                    "Store one number or list per key."
                )
            lines.append(line)
            size += len(line)
        return lines


class Parquet(_Table):
    """Reader of parquet files. Only the columns in use are read."""

    format = "parquet"

    def inspect(self) -> Iterable[Array]:
        """Describe the columns from the file footer. The first non-empty list determines the width of a list column."""
        with self._mapped() as file:
            self.check_names(file.schema_arrow.names)
            return with_composed([_described(file, column) for column in file.schema_arrow])

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `count` rows."""
        with self._mapped() as file:
            yield from file.iter_batches(batch_size=count, columns=list(dtypes))

    def _mapped(self) -> Any:
        """Open the file as a memory map. Otherwise all columns of a row group would be in memory."""
        return parquet.ParquetFile(self.paths[0], memory_map=True)


def _depth(line: bytes) -> int:
    """Return the largest nesting depth of lists and objects in a line of JSON."""
    letters = np.frombuffer(_TEXT_OF_JSON.sub(b"", line), np.uint8)
    opening, closing = np.isin(letters, list(b"[{")), np.isin(letters, list(b"]}"))
    return int(np.max(np.cumsum(opening.astype(int) - closing), initial=0))


def _described(file: Any, column: Any) -> Array:
    kind, shape = column.type, (file.metadata.num_rows,)
    if pa.types.is_fixed_size_list(kind):
        return Array(column.name, _dtype(kind.value_type), (*shape, kind.list_size))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_unfolded(file.metadata, column.name)
        widths = (_width(batch.column(0)) for batch in file.iter_batches(batch_size=1, columns=[column.name]))
        return Array(column.name, _dtype(kind.value_type), (*shape, next(filter(None, widths), 0)))
    return Array(column.name, _dtype(kind), shape)


def _check_unfolded(metadata: Any, name: str) -> None:
    """Raise for large lists that are stored in few bytes, because a single row could exhaust the memory."""
    for k in range(metadata.num_row_groups):
        group = metadata.row_group(k)
        for chunk in map(group.column, range(group.num_columns)):
            n, stored = chunk.num_values, chunk.total_uncompressed_size
            is_large = n * _MAX_ITEMSIZE > max(MAX_RESIDENT, _MAX_UNFOLDED * stored)
            if chunk.path_in_schema.split(".")[0] == name and is_large:
                raise ValueError(f"column {name} must be less compressed, got {n:,} numbers in {stored:,} bytes")


def _numbers(values: Any) -> np.ndarray[Any, Any]:
    """Convert a column to a numpy array. Integers with missing values become float64 with NaN."""
    if values.null_count and not pa.types.is_floating(values.type):
        values = values.cast(pa.int64()).cast(pa.float64())
    found: np.ndarray[Any, Any] = values.to_numpy(zero_copy_only=False)
    return found


def _width(lists: Any) -> int:
    """Return the length of the first list in a column that is not missing, or 0."""
    lengths = pc.list_value_length(lists).drop_null()
    return lengths[0].as_py() if len(lengths) else 0


def with_composed(arrays: list[Array]) -> list[Array]:
    """Append one combined array per common stem of columns, such as `prob_0`, `prob_1` or `prob_cat`, `prob_dog`."""
    by_number, by_class = defaultdict(list), defaultdict(list)
    known = {*LOGITS, *PROBS, *NEUTRAL, *TARGETS, *WEIGHTS}
    keys = {array.key for array in arrays}
    for array in arrays:
        if len(array.shape) > 1:
            continue
        if match := NUMBERED.fullmatch(array.key):
            by_number[match[1] or ""].append((int(match[2]), array.name, array))
        elif array.key not in known and (named := class_of(array.name)) and named[0] not in {"y", *keys}:
            by_class[named[0]].append(array)
    together = [_numbered(stem, sorted(members)) for stem, members in by_number.items() if len(members) > 1]
    for stem, members in by_class.items():
        dtypes = {member.dtype for member in members}
        are_numbers = dtypes <= WHOLE if stem in TARGETS and dtypes & WHOLE else bool(dtypes & FLOATS)
        if len(members) > 1 and dtypes <= FLOATS | WHOLE and are_numbers:
            together.append(_composed(members, stem))
    return arrays + together


def _numbered(stem: str, members: Sequence[tuple[int, str, Array]]) -> Array:
    """Combine numbered columns into one array, in the order of their numbers."""
    numbers, names, parts = zip(*members, strict=True)
    problem = ""
    if numbers != tuple(range(numbers[0], numbers[0] + len(numbers))) or numbers[0] > 1:
        found = ", ".join(map(str, numbers[:12]))
        problem = f"must be numbered from 0 or 1 without gaps, got {found}. Add the missing columns."
    dtype = _common_dtype({part.dtype for part in parts})
    return Array(f"{names[0]}..{names[-1]}", dtype, (*parts[0].shape, len(parts)), problem, names, stem)


def _composed(members: Sequence[Array], stem: str) -> Array:
    """Combine columns, one per class, into one array with class names."""
    names = tuple(member.name for member in members)
    shape = (*members[0].shape, len(members))
    dtype = _common_dtype({member.dtype for member in members})
    lists = [member.name for member in members if len(member.shape) > 1]
    problem = (
        f"must be columns with one number per row, got lists in {quoted(lists)}. Name one column." if lists else ""
    )
    return Array(f"{names[0]}..{names[-1]}", dtype, shape, problem, names, stem, _classes(names, stem))


def _classes(names: Sequence[str], stem: str) -> tuple[str, ...]:
    """Return the class names: column names without the stem, or without common prefix and suffix. () for numbers."""
    parts = [name.strip()[len(stem) + 1 :] for name in names] if stem else [name.strip() for name in names]
    if not stem:
        start = len(commonprefix(parts))  # noqa: RUF071 - names are not paths
        while start and parts[0][start - 1] not in "_.:- ":
            start -= 1
        parts = [part[start:] for part in parts]
        end = len(commonprefix([part[::-1] for part in parts]))  # noqa: RUF071
        while end and parts[0][len(parts[0]) - end] not in "_.:- ":
            end -= 1
        parts = [part[: len(part) - end] for part in parts]
    return () if all(part.isdecimal() for part in parts) else tuple(parts)


def _columns(array: Array) -> tuple[str, ...]:
    return array.columns or (array.name,)


def _dtype(arrow_type: Any) -> str:
    if pa.types.is_dictionary(arrow_type):  # categorical columns of pandas
        return _dtype(arrow_type.value_type)
    return _DTYPES.get(str(arrow_type), str(arrow_type))


def _common_dtype(dtypes: set[str]) -> str:
    """Return the promoted dtype of columns. In text files, a column without decimal points has an integer dtype."""
    return np.result_type(*dtypes).name if dtypes <= FLOATS | WHOLE else " and ".join(sorted(dtypes))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
