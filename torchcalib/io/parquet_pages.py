"""Sizes of the pages of a parquet file, from its footer and the headers of the pages.

A reader allocates the uncompressed size that the header of a page declares, up to 2 GiB for a page of a few bytes. The
sizes in the footer are never compared with those of the pages. Both are structures in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. Their fields are defined in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.

The metadata of pyarrow is not used, because damaged metadata ends the process: pyarrow 26 throws an exception in
`RowGroupMetaData.column` that Python cannot catch, and versions before 26 overflow the stack for a nested schema.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

_MAX_PAGE_HEADER = 2**16  # largest header in bytes: three numbers, and statistics with two values of the column
_MAX_SCHEMA_DEPTH = 64  # nested groups of the schema
_MAX_DEPTH = 16  # nested structures and lists in a value that is skipped

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)

# Fields by number and type. Thrift skips a field of another type.
_SCHEMA, _ROW_GROUPS = (2, _LIST), (4, _LIST)  # of the footer
_NUM_CHILDREN = (5, _I32)  # of a schema element
_COLUMNS = (1, _LIST)  # of a row group
_META_DATA = (3, _STRUCT)  # of a column chunk
_TYPE, _ENCODINGS, _TOTAL_COMPRESSED_SIZE = (1, _I32), (2, _LIST), (7, _I64)  # of the metadata of a column chunk
_DATA_PAGE_OFFSET, _DICTIONARY_PAGE_OFFSET = (9, _I64), (11, _I64)
_UNCOMPRESSED_SIZE, _COMPRESSED_SIZE, _DATA_PAGES = (2, _I32), (3, _I32), ((5, _STRUCT), (8, _STRUCT))  # of a page
_NUM_VALUES = (1, _I32)  # of a data page

# Bytes of a decoded value by physical type: BOOLEAN, INT32, INT64, INT96, FLOAT, DOUBLE, FIXED_LEN_BYTE_ARRAY (float16)
_ITEMSIZES = {0: 1, 1: 4, 2: 8, 3: 12, 4: 4, 5: 8, 7: 2}
_DELTA_ENCODINGS = frozenset({6, 7})  # DELTA_LENGTH_BYTE_ARRAY and DELTA_BYTE_ARRAY


class Chunk(NamedTuple):
    """Values of one stored column in one row group."""

    start: int  # position of the first page in the file
    n_bytes: int  # size of all pages in the file
    itemsize: int  # bytes of a decoded value
    has_prefixes: bool  # whether texts may share a prefix with the preceding one, which takes no space


def row_groups_of(footer: bytes) -> list[list[Chunk]]:
    """Return the chunks of each row group, in the order of the stored columns.

    Raises:
        ValueError: if the footer is damaged, or the schema is deeply nested.
    """
    reader = _CompactReader(footer)
    groups: list[list[Chunk]] = []
    for field in reader.fields():
        if field == _SCHEMA:
            reader.check_schema()
        elif field == _ROW_GROUPS:
            groups = [reader.row_group() for _ in reader.elements(_STRUCT)]
        else:
            reader.skip(field[1])
    return groups


def pages_of(content: Any, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the uncompressed size in bytes and the number of values of each page of a column chunk.

    A dictionary counts as no values.

    Args:
        content: the file, opened for reading.
        chunk: position and size of the chunk.

    Raises:
        ValueError: if a header is damaged.
    """
    position, end = chunk.start, chunk.start + chunk.n_bytes
    while position < end:
        content.seek(position)
        reader = _CompactReader(content.read(_MAX_PAGE_HEADER))
        compressed = uncompressed = -1
        n_values = 0
        for field in reader.fields():
            if field == _COMPRESSED_SIZE:
                compressed = reader.integer()
            elif field == _UNCOMPRESSED_SIZE:
                uncompressed = reader.integer()
            elif field in _DATA_PAGES:
                n_values += reader.integers().get(_NUM_VALUES, 0)
            else:
                reader.skip(field[1])
        if min(compressed, uncompressed, n_values) < 0:
            raise ValueError("the header of a page must declare its size, got none")
        yield uncompressed, n_values
        position += reader.position + compressed


class _CompactReader:
    """Reader of the compact protocol. The caller reads or skips each value that an iterator announces."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0

    def row_group(self) -> list[Chunk]:
        """Read a row group."""
        chunks: list[Chunk] = []
        for field in self.fields():
            if field == _COLUMNS:
                chunks = [self.chunk() for _ in self.elements(_STRUCT)]
            else:
                self.skip(field[1])
        return chunks

    def chunk(self) -> Chunk:
        """Read a column chunk."""
        found: dict[tuple[int, int], int] = {}
        encodings: set[int] = set()
        for field in self.fields():
            if field != _META_DATA:
                self.skip(field[1])
                continue
            for inner in self.fields():
                if inner == _ENCODINGS:
                    encodings.update(self.integer() for _ in self.elements(_I32))
                elif inner[1] in (_I32, _I64):
                    found[inner] = self.integer()
                else:
                    self.skip(inner[1])
        if _DATA_PAGE_OFFSET not in found or _TOTAL_COMPRESSED_SIZE not in found:
            raise ValueError("the footer must declare the position of every column, got none")
        dictionary = found.get(_DICTIONARY_PAGE_OFFSET, 0)
        start = min(found[_DATA_PAGE_OFFSET], dictionary if dictionary > 0 else found[_DATA_PAGE_OFFSET])
        itemsize = _ITEMSIZES.get(found.get(_TYPE, -1), 8)
        return Chunk(start, found[_TOTAL_COMPRESSED_SIZE], itemsize, not encodings.isdisjoint(_DELTA_ENCODINGS))

    def check_schema(self) -> None:
        """Read the schema, which lists each group before its children. Raise if groups are deeply nested."""
        missing: list[int] = []  # children to come, for each group that encloses the next element
        for _ in self.elements(_STRUCT):
            children = self.integers().get(_NUM_CHILDREN, 0)
            while missing and missing[-1] <= 0:
                missing.pop()
            if missing:
                missing[-1] -= 1
            missing.append(children)
            if len(missing) > _MAX_SCHEMA_DEPTH:
                raise ValueError(f"the schema must have at most {_MAX_SCHEMA_DEPTH} nested groups, got more")

    def integers(self) -> dict[tuple[int, int], int]:
        """Read a structure, and return its integers by field. Other fields are skipped."""
        found = {}
        for field in self.fields():
            if field[1] in (_I16, _I32, _I64):
                found[field] = self.integer()
            else:
                self.skip(field[1])
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the type of each field of a structure."""
        number = 0
        while (byte := self.byte()) != _STOP:
            number = number + (byte >> 4) if byte >> 4 else self.integer()
            yield number, byte & 15

    def elements(self, kind: int) -> Iterator[None]:
        """Yield once for each element of a list with elements of a type. Raise for other types."""
        byte = self.byte()
        n = byte >> 4 if byte >> 4 < 15 else self.unsigned()
        if n and byte & 15 != kind:
            raise ValueError(f"a list must have elements of the type {kind}, got {byte & 15}")
        for _ in range(n):
            yield

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip a value. Booleans in a structure have no content, because their type is their value."""
        if depth > _MAX_DEPTH:
            raise ValueError("values must not be deeply nested, got nested structures or lists")
        if kind in (_I16, _I32, _I64):
            self.unsigned()
        elif kind == _BINARY:
            self.advance(self.unsigned())
        elif kind == _STRUCT:
            for _, inner in self.fields():
                self.skip(inner, depth + 1)
        elif kind in (_LIST, _SET):
            byte = self.byte()
            n, inner = byte >> 4 if byte >> 4 < 15 else self.unsigned(), byte & 15
            for _ in range(n):
                if inner in (_TRUE, _FALSE):
                    self.advance(1)
                else:
                    self.skip(inner, depth + 1)
        elif kind == _DOUBLE:
            self.advance(8)
        elif kind == _BYTE:
            self.advance(1)
        elif kind not in (_TRUE, _FALSE):
            raise ValueError(f"values must have known types, got {kind}")

    def byte(self) -> int:
        """Return the next byte."""
        self.advance(1)
        return self.content[self.position - 1]

    def advance(self, n: int) -> None:
        """Skip n bytes. Raise if there are fewer, so that a list of many elements ends with the content."""
        self.position += n
        if self.position > len(self.content):
            raise ValueError("the metadata must be complete, got too few bytes")

    def unsigned(self) -> int:
        """Return an unsigned integer: 7 bits in each byte, the lowest first."""
        value = shift = 0
        while (byte := self.byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise ValueError("numbers must have 64 bits, got a longer one")
        return value | byte << shift

    def integer(self) -> int:
        """Return a signed integer, stored as 0, -1, 1, -2 ... (zigzag)."""
        value = self.unsigned()
        return value >> 1 ^ -(value & 1)
