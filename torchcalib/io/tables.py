"""Tables with named columns: `.csv` and `.parquet`. Needs pyarrow, and is imported only to read such a file."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv, parquet

from torchcalib.io.names import NUMBERED
from torchcalib.io.reader import (
    FLOATS,
    MAX_RESIDENT,
    TEXT,
    WHOLE,
    Array,
    InputError,
    Reader,
    check_count_of_arrays,
    check_unique,
    quoted,
    single,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_GAPS = "must be numbered from 0 without gaps, got {}. Add what is missing, or name a single column."
_DTYPES = {"halffloat": "float16", "float": "float32", "double": "float64"}
# Bytes of text that are parsed at once. A row must fit in a block, the first block tells the type of a column, and
# arrow reads some thirty blocks ahead.
_BLOCK = 4 * 2**20
_WIDEST = 8  # bytes of a number
_MOST_UNFOLDED = 256  # times as large in memory as encoded: what few different numbers in a list column come to


class _Table(Reader):
    """Columns of numbers or, in parquet, of lists of numbers; `prob_0 .. prob_9` also count as one array."""

    @abstractmethod
    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of some columns, given by name and with the dtype each is wanted in."""

    def rows(self, names: Sequence[str], count: int) -> Iterator[tuple[Any, ...]]:
        """Yield pieces of the batches, column by column turned into tensors."""
        wanted = [self.arrays[name] for name in names]
        start = 0
        for batch in self.batches({column: array.dtype for array in wanted for column in array.columns}, count):
            for offset in range(0, batch.num_rows, count):
                piece = batch.slice(offset, count)
                yield tuple(self._tensor(array, piece, start + offset) for array in wanted)
            start += batch.num_rows

    def _tensor(self, array: Array, piece: pa.RecordBatch, start: int) -> Any:
        if array.dtype in TEXT:
            (name,) = array.columns
            self._check_present(name, piece.column(name), start, 1)
            return piece.column(name).to_pylist()
        columns = [self._numbers(name, piece.column(name), array, start) for name in array.columns]
        # A stack of columns has the numbers of a row side by side, as a list column has.
        return torch.from_numpy(np.stack(columns, -1).reshape(piece.num_rows, *array.shape[1:]))

    def _numbers(self, name: str, values: Any, array: Array, start: int) -> np.ndarray[Any, Any]:
        self._check_present(name, values, start, 1)
        if not pa.types.is_primitive(values.type):
            (width,) = array.shape[1:]
            lengths = pc.list_value_length(values).to_numpy(zero_copy_only=False)
            if (lengths != width).any():
                row = int((lengths != width).argmax())
                raise InputError(
                    f"Column `{name}` of `{self.label}` must hold lists of equal length, got {width} numbers in row 1 "
                    f"and {lengths[row]} in row {start + row + 1}. Write one number per class in every row."
                )
            values = values.flatten()
            self._check_present(name, values, start, width)
        return np.asarray(values.to_numpy(zero_copy_only=False))

    def _check_present(self, name: str, values: Any, start: int, width: int) -> None:
        if values.null_count:
            row = start + int(values.is_null().to_numpy(zero_copy_only=False).argmax()) // width + 1
            raise InputError(
                f"Column `{name}` of `{self.label}` must hold a number in every row, got none in row {row}. "
                "Fill it in, or leave the row out."
            )


class Csv(_Table):
    """Text with a header line and commas. Numbers without a point are whole, `true` and `false` are bool."""

    format = "csv"

    def inspect(self) -> dict[str, Array]:
        """List the columns, from the first block; counting the rows takes a pass over the file."""
        with csv.open_csv(self.paths[0], csv.ReadOptions(block_size=_BLOCK)) as file:
            schema = file.schema
        check_count_of_arrays(self.label, len(schema.names))
        if all(_is_number(name) for name in schema.names):
            raise InputError(
                f"`{self.label}` must begin with a line of column names, got the numbers {quoted(schema.names)}. "
                "Add a first line such as prob,target."
            )
        check_unique(self.label, schema.names)
        n = sum(batch.num_rows for batch in self.batches({schema.names[0]: "binary"}, 1))
        return _with_numbered({column.name: single(column.name, _dtype(column.type), (n,)) for column in schema})

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
                pa.default_memory_pool().release_unused()  # threads that read ahead keep what they let go of


class Parquet(_Table):
    """A parquet file, of which only the wanted columns are read."""

    format = "parquet"

    def inspect(self) -> dict[str, Array]:
        """List the columns, from the footer; where only the data tells how long lists are, from the first row."""
        with self._mapped() as file:
            check_count_of_arrays(self.label, file.metadata.num_columns)
            schema, n = file.schema_arrow, file.metadata.num_rows
            check_unique(self.label, schema.names)
            return _with_numbered({column.name: self._described(file, column, n) for column in schema})

    def batches(self, dtypes: dict[str, str], count: int) -> Iterator[pa.RecordBatch]:
        """Yield batches of at most `count` rows."""
        with self._mapped() as file:
            yield from file.iter_batches(batch_size=count, columns=list(dtypes))

    def _mapped(self) -> Any:
        """Without the map, a row group's columns would be held in memory whole."""
        return parquet.ParquetFile(self.paths[0], memory_map=True)

    @staticmethod
    def _described(file: Any, column: Any, n: int) -> Array:
        if pa.types.is_fixed_size_list(column.type):
            return single(column.name, _dtype(column.type.value_type), (n, column.type.list_size))
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            _check_unfolded(file, column.name)
            first = next(file.iter_batches(batch_size=1, columns=[column.name]), None)
            width = first and pc.list_value_length(first.column(0))[0].as_py()
            return single(column.name, _dtype(column.type.value_type), (n, width or 0))
        return single(column.name, _dtype(column.type), (n,))


def _check_unfolded(file: Any, name: str) -> None:
    """Refuse lists that a few bytes stand for: a single row, which is read whole, could take all memory."""
    for k in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(k)
        for j in range(group.num_columns):
            chunk = group.column(j)
            if chunk.path_in_schema.split(".")[0] != name or chunk.num_values * _WIDEST <= MAX_RESIDENT:
                continue
            if chunk.num_values * _WIDEST > _MOST_UNFOLDED * chunk.total_uncompressed_size:
                raise ValueError(f"{chunk.num_values:,} numbers of {name} in {chunk.total_uncompressed_size:,} bytes")


def _with_numbered(arrays: dict[str, Array]) -> dict[str, Array]:
    """Add one array for every stem that two or more numbered columns share."""
    numbered = defaultdict(list)
    for name, array in arrays.items():
        match = NUMBERED.fullmatch(array.key)
        if match and len(array.shape) == 1:
            numbered[match[1]].append((int(match[2]), name))
    together = {}
    for stem, members in numbered.items():
        if len(members) > 1:
            numbers, names = zip(*sorted(members), strict=True)
            parts = [arrays[name] for name in names]
            gaps = numbers != tuple(range(len(numbers)))
            together[f"{names[0]}..{names[-1]}"] = Array(
                _common_dtype({part.dtype for part in parts}),
                (*parts[0].shape, len(parts)),
                stem,
                names,
                _GAPS.format(", ".join(map(str, numbers[:12]))) if gaps else "",
            )
    return arrays | together


def _dtype(arrow_type: Any) -> str:
    if pa.types.is_dictionary(arrow_type) and pa.types.is_string(arrow_type.value_type):
        return "string"  # few different texts, each written once
    return _DTYPES.get(str(arrow_type), str(arrow_type))


def _common_dtype(dtypes: set[str]) -> str:
    """Tell the dtype of numbered columns together; in text, some of them may hold whole numbers by chance."""
    return np.result_type(*dtypes).name if dtypes <= FLOATS | WHOLE else " and ".join(sorted(dtypes))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
