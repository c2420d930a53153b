"""Sizes of the pages of a parquet file, from the headers of the pages.

A reader allocates the uncompressed size that the header of a page declares, up to 2 GiB for a page of a few bytes. The
footer of the file also has sizes, but readers do not compare them with those of the pages. Headers are structures in
Thrift's compact protocol: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. Their
fields are defined in https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from collections.abc import Iterator
from typing import Any

_MAX_PAGE_HEADER = 2**16  # largest header in bytes: three numbers, and statistics with two values of the column
_MAX_DEPTH = 4  # nested structures in a header
_MAX_FIELD = 2**15  # larger numbers of fields overflow in readers
# Numbers of the fields in a page header, and of the number of values in the header of a data page (version 1 and 2)
_UNCOMPRESSED_SIZE, _COMPRESSED_SIZE, _DATA_PAGES, _NUM_VALUES = 2, 3, (5, 8), 1

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)


def pages_of(content: Any, chunk: Any) -> Iterator[tuple[int, int]]:
    """Yield the uncompressed size in bytes and the number of values of each page of a column chunk.

    A dictionary counts as no values.

    Args:
        content: the file, a `pyarrow.MemoryMappedFile`.
        chunk: metadata of the column chunk, a `pyarrow.parquet.ColumnChunkMetaData`.

    Raises:
        ValueError: if a header is damaged.
    """
    starts = [chunk.data_page_offset]
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        starts.append(chunk.dictionary_page_offset)
    position = min(starts)
    end = position + chunk.total_compressed_size
    while position < end:
        content.seek(position)
        header = _Header(memoryview(content.read_buffer(_MAX_PAGE_HEADER)).cast("B"))  # without a copy
        fields = header.fields()
        compressed, uncompressed = fields.get(_COMPRESSED_SIZE, -1), fields.get(_UNCOMPRESSED_SIZE, -1)
        n_values = max((fields[k].get(_NUM_VALUES, -1) for k in _DATA_PAGES if k in fields), default=0)
        if min(compressed, uncompressed, n_values) < 0:
            raise ValueError("the header of a page must declare its size, got none")
        yield uncompressed, n_values
        position += header.position + compressed


class _Header:
    """Structure in the compact protocol."""

    def __init__(self, content: memoryview) -> None:
        self.content = content
        self.position = 0

    def fields(self, depth: int = 0) -> dict[int, Any]:
        """Return the 32-bit integers and structures in a structure by the number of the field, and skip other fields.

        Readers ignore fields of other types. They use the last one of repeated fields, which programs never write.
        """
        if depth > _MAX_DEPTH:
            raise ValueError("the header of a page must be flat, got nested structures")
        found: dict[int, Any] = {}
        field = 0
        while (byte := self.byte()) != _STOP:
            previous, kind = field, byte & 15
            field = field + (byte >> 4) if byte >> 4 else self.integer()
            if not previous < field < _MAX_FIELD:
                raise ValueError(f"the fields of a page header must have increasing numbers, got {previous}, {field}")
            if kind == _I32:
                found[field] = self.integer()
            elif kind == _STRUCT:
                found[field] = self.fields(depth + 1)
            elif kind not in (_TRUE, _FALSE):  # these have no content
                self.skip(kind, depth)
        return found

    def skip(self, kind: int, depth: int) -> None:
        """Skip a value of one of the types of the protocol. Structures and lists may be nested in `depth` others."""
        if kind in (_TRUE, _FALSE, _BYTE):
            self.advance(1)
        elif kind in (_I16, _I32, _I64):
            self.integer()
        elif kind == _DOUBLE:
            self.advance(8)
        elif kind == _BINARY:
            self.advance(self.unsigned())
        elif kind in (_LIST, _SET):
            byte = self.byte()
            if byte & 15 in (_LIST, _SET):
                raise ValueError("the header of a page must be flat, got nested lists")
            for _ in range(byte >> 4 if byte >> 4 < 15 else self.unsigned()):
                self.skip(byte & 15, depth)
        elif kind == _STRUCT:
            self.fields(depth + 1)
        else:
            raise ValueError(f"the header of a page must have known types, got {kind}")

    def advance(self, n: int) -> None:
        """Skip n bytes."""
        self.position += n
        if self.position > len(self.content):
            raise ValueError("the header of a page must be complete, got too few bytes")

    def byte(self) -> int:
        """Return the next byte."""
        self.advance(1)
        return self.content[self.position - 1]

    def unsigned(self) -> int:
        """Return an unsigned integer: 7 bits in each byte, the lowest first."""
        value = shift = 0
        while (byte := self.byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("the header of a page must have numbers of 64 bits, got a longer one")
        return value | byte << shift

    def integer(self) -> int:
        """Return a signed integer, stored as 0, -1, 1, -2 ... (zigzag)."""
        value = self.unsigned()
        return value >> 1 ^ -(value & 1)
