"""Readers of tables with named columns: `.csv` and `.parquet`. Needs pyarrow."""

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv, parquet

from torchcalib.io.errors import InputError, quoted
from torchcalib.io.readers import FLOATS, MAX_RESIDENT, NUMBERED, TEXT, WHOLE, Array, Reader

_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}
# Bytes of text that are parsed at once. A row must fit in a block, the first block determines the type of a column,
# and arrow reads about thirty blocks ahead.
_BLOCK = 4 * 2**20
_WIDEST = 8  # bytes of a number
_MOST_UNFOLDED = 256  # ratio of sizes in memory and in the file, reached by list columns of few different numbers


class _Table(Reader):
    """Columns of numbers, of text or, in parquet, of lists; `prob_0 .. prob_9` form one more array."""

    @abstractmethod
    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of some columns, given by name with the dtype that is needed."""

    def rows(self, names: Sequence[str], count: int) -> Iterator[tuple[Any, ...]]:
        """Yield the batches, divided into at most `count` rows."""
        wanted = [self.arrays[name] for name in names]
        start = 0
        for batch in self.batches({column: array.dtype for array in wanted for column in _columns(array)}, count):
            for offset in range(0, batch.num_rows, count):
                piece = batch.slice(offset, count)
                yield tuple(self._values(array, piece, start + offset) for array in wanted)
            start += batch.num_rows

    def _values(self, array: Array, piece: pa.RecordBatch, start: int) -> Any:
        """Return a tensor, or a list of strings."""
        columns = []
        for name in _columns(array):
            values, width = piece.column(name), 1
            self._check_present(name, values, start, width)
            if array.dtype in TEXT:
                return values.to_pylist()
            if not pa.types.is_primitive(values.type):
                (width,) = array.shape[1:]
                lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
                if (lengths != width).any():
                    row = int((lengths != width).argmax())
                    raise InputError(
                        f"Column `{name}` of `{self.label}` must hold lists of equal length, got {width} numbers in "
                        f"row 1 and {lengths[row]} in row {start + row + 1}. Write one number per class in every row."
                    )
                values = values.flatten()
                self._check_present(name, values, start, width)
            columns.append(values.to_numpy(zero_copy_only=False))
        return torch.from_numpy(np.stack(columns, -1).reshape(piece.num_rows, *array.shape[1:]))

    def _check_present(self, name: str, values: Any, start: int, width: int) -> None:
        """Check that no value is missing, with `width` values in a row."""
        if values.null_count:
            row = start + int(values.is_null().to_numpy(zero_copy_only=False).argmax()) // width + 1
            raise InputError(
                f"Column `{name}` of `{self.label}` must hold a number in every row, got none in row {row}. "
                "Fill it in, or remove the row."
            )


class Csv(_Table):
    """Text with a header line and commas. Numbers without a decimal point are integers, `true` and `false` are bool."""

    format = "csv"

    def inspect(self) -> Iterable[Array]:
        """Describe the columns by the first block, and count the rows of the file."""
        with csv.open_csv(self.paths[0], csv.ReadOptions(block_size=_BLOCK)) as file:
            schema = file.schema
        if all(_is_number(name) for name in schema.names):
            raise InputError(
                f"`{self.label}` must begin with a line of column names, got the numbers {quoted(schema.names)}. "
                "Add a first line such as prob,target."
            )
        self.check_names(schema.names)
        n = sum(batch.num_rows for batch in self.batches({schema.names[0]: "binary"}, 1))
        return _with_numbered([Array(column.name, _dtype(column.type), (n,)) for column in schema])

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Yield one batch per block of text, whatever the count."""
        wanted = csv.ConvertOptions(
            include_columns=list(dtypes),
            column_types={name: pa.type_for_alias(dtype) for name, dtype in dtypes.items()},
        )
        with csv.open_csv(
            self.paths[0], csv.ReadOptions(block_size=_BLOCK, use_threads=False), convert_options=wanted
        ) as file:
            for batch in file:
                yield batch
                del batch  # before the next one is made
                pa.default_memory_pool().release_unused()  # threads that read ahead keep memory they have freed


class Parquet(_Table):
    """A parquet file, of which only the columns in use are read."""

    format = "parquet"

    def inspect(self) -> Iterable[Array]:
        """Describe the columns by the footer. The first row determines the length of lists, unless their type does."""
        with self._mapped() as file:
            self.check_names(file.schema_arrow.names)
            return _with_numbered([_described(file, column) for column in file.schema_arrow])

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `count` rows."""
        with self._mapped() as file:
            yield from file.iter_batches(batch_size=count, columns=list(dtypes))

    def _mapped(self) -> Any:
        """Open the file. Without the map, all columns of a row group would be in memory."""
        return parquet.ParquetFile(self.paths[0], memory_map=True)


def _described(file: Any, column: Any) -> Array:
    kind, shape = column.type, (file.metadata.num_rows,)
    if pa.types.is_fixed_size_list(kind):
        return Array(column.name, _dtype(kind.value_type), (*shape, kind.list_size))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _check_unfolded(file.metadata, column.name)
        first = next(file.iter_batches(batch_size=1, columns=[column.name]), None)
        width = first and pc.list_value_length(first.column(0))[0].as_py()
        return Array(column.name, _dtype(kind.value_type), (*shape, width or 0))
    return Array(column.name, _dtype(kind), shape)


def _check_unfolded(metadata: Any, name: str) -> None:
    """Refuse large lists that are stored in a few bytes: a single row could take all memory."""
    for k in range(metadata.num_row_groups):
        group = metadata.row_group(k)
        for chunk in map(group.column, range(group.num_columns)):
            size = chunk.num_values * _WIDEST
            if chunk.path_in_schema.split(".")[0] == name and size > max(
                MAX_RESIDENT, _MOST_UNFOLDED * chunk.total_uncompressed_size
            ):
                raise ValueError(f"{chunk.num_values:,} numbers of {name} in {chunk.total_uncompressed_size:,} bytes")


def _with_numbered(arrays: list[Array]) -> list[Array]:
    """Add one array for every stem that two or more numbered columns share."""
    numbered = defaultdict(list)
    for array in arrays:
        match = NUMBERED.fullmatch(array.key)
        if match and len(array.shape) == 1:
            numbered[match[1]].append((int(match[2]), array.name, array))
    together = []
    for stem, members in numbered.items():
        if len(members) == 1:
            continue
        numbers, names, parts = zip(*sorted(members), strict=True)
        found = ", ".join(map(str, numbers[:12]))
        gaps = f"must be numbered from 0 without gaps, got {found}. Add what is missing, or name a single column."
        is_complete = numbers == tuple(range(len(numbers)))
        together.append(
            Array(
                f"{names[0]}..{names[-1]}",
                _common_dtype({part.dtype for part in parts}),
                (*parts[0].shape, len(parts)),
                "" if is_complete else gaps,
                names,
                stem,
            )
        )
    return arrays + together


def _columns(array: Array) -> tuple[str, ...]:
    """Return the columns in the file that form an array."""
    return array.columns or (array.name,)


def _dtype(arrow_type: Any) -> str:
    if pa.types.is_dictionary(arrow_type) and pa.types.is_string(arrow_type.value_type):
        return "string"  # categories
    return _DTYPES.get(str(arrow_type), str(arrow_type))


def _common_dtype(dtypes: set[str]) -> str:
    """Return the dtype of numbered columns together; in text, some of them may happen to be integers."""
    return np.result_type(*dtypes).name if dtypes <= FLOATS | WHOLE else " and ".join(sorted(dtypes))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
