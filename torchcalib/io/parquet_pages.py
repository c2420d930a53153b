"""Sizes of the pages of a parquet file, from its footer and the headers of the pages.

A reader allocates the uncompressed size that the header of a page declares, up to 2 GiB for a page of a few bytes. The
sizes in the footer are never compared with those of the pages. Both are structures in Thrift's compact protocol:
https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md. Their fields are defined in
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.

The metadata of pyarrow is not used, because damaged metadata ends the process: pyarrow 26 throws an exception in
`RowGroupMetaData.column` that Python cannot catch, and versions before 26 overflow the stack for a nested schema.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_MAX_PAGE_HEADER = 2**16  # largest header in bytes: three numbers, and statistics with two values of the column
_MAX_SCHEMA_DEPTH = 64  # nested groups of the schema
_MAX_SCHEMA = 2**16  # columns and groups of the schema: pyarrow needs 1.4 kB for each
_MAX_CHUNKS = 2**17  # columns times row groups: pyarrow needs 0.7 kB for each
_MAX_PATHS = 2**24  # total length of the paths of columns, which contain the names of all enclosing groups
_MAX_DEPTH = 16  # nested structures and lists in a value that is skipped
_MAX_FIELD = 2**15  # larger numbers of fields overflow in readers
_MIN_PAGE = 64  # mean bytes of a page, except for a few
_FEW_PAGES = 1000

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)

# Fields by number and type. Thrift skips a field of another type.
_SCHEMA, _ROW_GROUPS = (2, _LIST), (4, _LIST)  # of the footer
_NAME, _NUM_CHILDREN = (4, _BINARY), (5, _I32)  # of a schema element
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


def row_groups_of(footer: bytes, file_size: int) -> list[list[Chunk]]:
    """Return the chunks of each row group, in the order of the stored columns."""
    reader = _CompactReader(footer)
    found = reader.structure({_SCHEMA: reader.schema, _ROW_GROUPS: reader.row_groups})
    groups: list[list[Chunk]] = found.get(_ROW_GROUPS, [])
    stored = sum(chunk.n_bytes for group in groups for chunk in group)
    if stored > file_size:
        raise ValueError(f"columns must not overlap, got {stored:,} bytes in a file of {file_size:,}")
    return groups


def pages_of(content: Any, chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield uncompressed bytes and number of values (0 for a dictionary) of each page, from a `pyarrow.NativeFile`."""
    position, end = chunk.start, chunk.start + chunk.n_bytes
    n_pages = 0
    while position < end:
        content.seek(position)
        reader = _CompactReader(memoryview(content.read_buffer(_MAX_PAGE_HEADER)).cast("B"))  # without a copy
        compressed, uncompressed, n_values = reader.page_header()
        if min(compressed, uncompressed, n_values) < 0:
            raise ValueError("the header of a page must declare its size, got none")
        yield uncompressed, n_values
        position += reader.position + compressed
        n_pages += 1
        if n_pages > _FEW_PAGES + chunk.n_bytes // _MIN_PAGE:
            raise ValueError(f"pages must not be empty, got more than {n_pages:,} in {chunk.n_bytes:,} bytes")
    if position != end:
        raise ValueError("the pages of a column must end with the column, got a longer page")


class _CompactReader:
    """Reader of the compact protocol. The caller reads or skips each value that an iterator announces."""

    def __init__(self, content: bytes | memoryview) -> None:
        self.content = content
        self.position = 0
        self.n_columns = 0  # stored columns, according to the schema

    def page_header(self) -> tuple[int, int, int]:
        """Read a page header. Return the compressed and uncompressed sizes and the number of values; -1 if missing."""
        sizes = {_COMPRESSED_SIZE: self.int32, _UNCOMPRESSED_SIZE: self.int32}
        data_page = dict.fromkeys(_DATA_PAGES, lambda: self.structure({_NUM_VALUES: self.int32}).get(_NUM_VALUES, -1))
        found = self.structure({**sizes, **data_page})
        # If a damaged page has headers of two versions, the larger number of values counts.
        n_values = max((found[page] for page in _DATA_PAGES if page in found), default=0)
        return found.get(_COMPRESSED_SIZE, -1), found.get(_UNCOMPRESSED_SIZE, -1), n_values

    def row_groups(self) -> list[list[Chunk]]:
        """Read the column chunks of each row group. The row groups follow the schema."""
        columns = {_COLUMNS: lambda: [self.chunk() for _ in self.elements(_STRUCT, self.n_columns)]}
        groups: list[list[Chunk]] = []
        for _ in self.elements(_STRUCT, _MAX_CHUNKS // max(1, self.n_columns)):
            groups.append(self.structure(columns).get(_COLUMNS, []))
            if len(groups[-1]) != self.n_columns:
                raise ValueError(f"a row group must have {self.n_columns:,} columns, got {len(groups[-1]):,}")
        return groups

    def chunk(self) -> Chunk:
        """Read a column chunk."""
        numbers = {_TYPE: self.int32, _TOTAL_COMPRESSED_SIZE: self.integer}
        numbers |= dict.fromkeys((_DATA_PAGE_OFFSET, _DICTIONARY_PAGE_OFFSET), self.integer)
        encodings = {_ENCODINGS: lambda: {self.integer() for _ in self.elements(_I32)}}
        found = self.structure({_META_DATA: lambda: self.structure({**numbers, **encodings})}).get(_META_DATA, {})
        if min(found.get(name, -1) for name in (_DATA_PAGE_OFFSET, _TOTAL_COMPRESSED_SIZE)) < 0:
            raise ValueError("the footer must declare the position of every column, got none")
        dictionary = found.get(_DICTIONARY_PAGE_OFFSET, 0)
        start = min(found[_DATA_PAGE_OFFSET], dictionary if dictionary > 0 else found[_DATA_PAGE_OFFSET])
        itemsize = _ITEMSIZES.get(found.get(_TYPE, -1), 8)
        has_prefixes = not _DELTA_ENCODINGS.isdisjoint(found.get(_ENCODINGS, ()))
        return Chunk(start, found[_TOTAL_COMPRESSED_SIZE], itemsize, has_prefixes)

    def schema(self) -> None:
        """Read the schema, which lists each group before its children, and count the stored columns."""
        missing: list[int] = []  # children to come, for each group that encloses the next element
        lengths: list[int] = []  # length of the path of each of these groups
        n_letters = 0
        for _ in self.elements(_STRUCT, _MAX_SCHEMA):
            element = self.structure({_NAME: self.text, _NUM_CHILDREN: self.int32})
            children, length = element.get(_NUM_CHILDREN, 0), element.get(_NAME, 0)
            while missing and missing[-1] == 0:
                missing.pop()
                lengths.pop()
            if missing:
                missing[-1] -= 1
            length += lengths[-1] if lengths else 0
            if children > 0:
                missing.append(children)
                lengths.append(length)
            else:
                self.n_columns += 1
                n_letters += length
            if len(missing) > _MAX_SCHEMA_DEPTH or n_letters > _MAX_PATHS:
                raise ValueError(f"the schema must have at most {_MAX_SCHEMA_DEPTH} nested groups and short names")

    def structure(self, wanted: Mapping[tuple[int, int], Callable[[], Any]]) -> dict[tuple[int, int], Any]:
        """Read a structure. Return the results of the functions that read the wanted fields, and skip other fields."""
        found: dict[tuple[int, int], Any] = {}
        for field in self.fields():
            if field in wanted:
                found[field] = wanted[field]()
            else:
                self.skip(field[1])
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """Yield the number and the type of each field of a structure. Raise for repeated or unordered fields."""
        number = 0
        while (byte := self.byte()) != _STOP:
            previous, number = number, number + (byte >> 4) if byte >> 4 else self.integer()
            if not previous < number < _MAX_FIELD:
                raise ValueError(f"fields must have increasing numbers, got {previous}, {number}")
            yield number, byte & 15

    def elements(self, kind: int, most: int = 2**15) -> Iterator[None]:
        """Yield once for each element of a list. Raise for elements of another type, or for more than `most`."""
        byte = self.byte()
        n = byte >> 4 if byte >> 4 < 15 else self.unsigned()
        if n and (byte & 15 != kind or n > most):
            raise ValueError(f"a list must have at most {most:,} elements of the type {kind}, got {n:,} of {byte & 15}")
        for _ in range(n):
            yield

    def skip(self, kind: int, depth: int = 0) -> None:
        """Skip a value. Booleans in a structure have no content, because their type is their value."""
        if depth > _MAX_DEPTH:
            raise ValueError("values must not be deeply nested, got nested structures or lists")
        if kind in (_I16, _I32, _I64):
            self.unsigned()
        elif kind == _BINARY:
            self.text()
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

    def int32(self) -> int:
        """Return a signed integer of 32 bits. Readers would use the lower bits of a longer one."""
        value = self.integer()
        if not -(2**31) <= value < 2**31:
            raise ValueError("numbers must have 32 bits, got a longer one")
        return value

    def text(self) -> int:
        """Skip a text, and return its length in bytes."""
        length = self.unsigned()
        self.advance(length)
        return length
