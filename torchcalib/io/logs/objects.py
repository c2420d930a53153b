"""Read JSON objects from lines, files and archives, with limits of their sizes."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from torchcalib.io.archives import open_archive
from torchcalib.io.errors import InputError
from torchcalib.io.lines import WIDE, blocks_of_lines
from torchcalib.io.tables import Csv, Frame, Parquet

try:
    import orjson  # parses a line three times as fast
except ImportError:
    orjson = None  # type: ignore[assignment]

_MAX_GROUP = 2**17  # bytes of lines that are read at once
_MAX_FILE = 128 * 2**20  # largest file or member of an archive in bytes, which is parsed at once
_MAX_MEMORY = 250 * 2**20  # bytes of memory for it, in addition to 4 times its size
_COSTS = {b"{": 184, b"[": 64, b",": 72, b":": 109}
"""Bytes of an object with up to 5 keys, of an array, of a value after a comma, and of a key with its place."""
_IN_PARTS = "Write a format that is read in parts, such as .eval or .jsonl."
_TABLES = (".csv", ".tsv", ".parquet")  # in the names of tables, whose columns are fields
_BATCH = 2**12  # rows of a table that are converted at once
_NUMBERS_OF_TOKENS = ("input_tokens", "cont_tokens", "output_tokens", "full_prompt", "pred_logits")
"""Columns of leaderboards that take most of the memory, and are not read."""
_ZSTD = 93  # compression method in zip archives, which `zipfile` decodes from Python 3.14 on


def loads(text: bytes | str) -> Any:
    """Parse JSON. Numbers may be NaN and infinite, as Python writes them."""
    if orjson is not None:
        try:
            return orjson.loads(text)
        except ValueError:  # NaN, or damaged
            pass
    return json.loads(text)


def floats_of(numbers: Sequence[Any]) -> list[float]:
    """Return numbers, which may be text, as floats. `float` takes three times as long as orjson for text."""
    if orjson is not None:
        try:
            found: list[Any] = orjson.loads(f"[{','.join(numbers)}]")
            if len(found) == len(numbers) and {*map(type, found)} == {float}:
                return found
        except (TypeError, ValueError):  # no text, or infinite
            pass
    return list(map(float, numbers))


def object_of(text: bytes, place: str) -> dict[str, Any]:
    """Parse a JSON object."""
    found: dict[str, Any] = _checked(loads(text), place)
    return found


def _checked(found: Any, place: str) -> Any:
    if not isinstance(found, Mapping):
        raise ValueError(f"{place} must contain an object, got {type(found).__name__}")
    return found


class RowGroup(NamedTuple):
    """Consecutive rows of a log, lines or objects. Each iteration parses the lines anew, one after another."""

    numbers: Sequence[int]  # of the rows, from 1
    content: Sequence[Any]
    places: Sequence[int]  # numbers of the lines, which blank lines increase, or of the rows
    are_lines: bool = False

    def rows(self) -> Iterator[Any]:
        """Yield the rows. Lines may contain other values than objects, and raise errors for damaged JSON and NaN."""
        if not self.are_lines:
            return iter(self.content)
        return map(json.loads if orjson is None else orjson.loads, self.content)

    def numbered(self) -> Iterator[tuple[int, Mapping[str, Any], str]]:
        """Yield number, content and place of each row. Numbers may be NaN."""
        kind = "line" if self.are_lines else "row"
        rows = map(loads, self.content) if self.are_lines else self.content
        for number, place, row in zip(self.numbers, self.places, rows, strict=True):
            yield number, _checked(row, f"{kind} {place}"), f"{kind} {place}"

    def some(self, places: Sequence[int]) -> RowGroup:
        """Return the rows with these indices."""
        numbers, content, lines = ([of_all[k] for k in places] for of_all in self[:3])
        return RowGroup(numbers, content, lines, self.are_lines)


class RowObjects:
    """Rows of a file or a DataFrame, or objects in memory, which can be read several times.

    Names of columns are without outer spaces, and missing values of tables are left out.
    """

    def __init__(self, given: Any) -> None:
        self._given = given
        self.kind = type(given).__name__

    def groups(self, n: int) -> Iterator[RowGroup]:
        """Yield n rows at once."""
        if isinstance(self._given, Path) and not any(each in self._given.name.lower() for each in _TABLES):
            yield from lines_of(self._given, n)
            return
        rows, first = self._known(), 1
        while group := list(islice(rows, n)):
            numbers = range(first, first + len(group))
            yield RowGroup(numbers, group, numbers)
            first += len(group)

    def _known(self) -> Iterator[dict[str, Any]]:
        names: dict[str, str] = {}
        for number, row in enumerate(self._rows(), 1):
            if not isinstance(row, Mapping):
                raise ValueError(f"row {number} must be a dict, got {type(row).__name__}")
            for name in row.keys() - names.keys():
                names[name] = name.strip() if isinstance(name, str) else str(name)
            # NaN is a missing value of pandas.
            yield {names[name]: value for name, value in row.items() if value is not None and value == value}

    @cached_property
    def _table(self) -> Csv | Frame | Parquet | None:
        if isinstance(self._given, Path):
            return (Parquet if ".parquet" in self._given.name.lower() else Csv)(self._given)
        return Frame(self._given) if hasattr(self._given, "columns") else None

    def _rows(self) -> Iterator[Any]:
        table = self._table
        if table is None:
            yield from self._given
        elif isinstance(table, Csv):
            yield from table.texts()
        else:
            own = {name: array.dtype for name, array in table.arrays.items() if not array.columns}
            for batch in table.batches({name: own[name] for name in own if name not in _NUMBERS_OF_TOKENS}, _BATCH):
                yield from batch.to_pylist()


def lines_of(path: Path, n: int) -> Iterator[RowGroup]:
    """Yield at most n lines at once, without blank lines; see `torchcalib.io.lines`."""
    row = place = 1
    for text in blocks_of_lines(path, _MAX_GROUP):
        if text.isspace():
            place += text.count(b"\n")
            continue
        lines = text.removesuffix(b"\n").split(b"\n")
        places: Sequence[int] = range(place, place + len(lines))
        place += len(lines)
        if b"" in lines or any(map(bytes.isspace, lines)):
            places = [number for number, line in zip(places, lines, strict=True) if line.strip()]
            lines = [line for line in lines if line.strip()]
        for start in range(0, len(lines), n):
            group = slice(start, start + n)
            yield RowGroup(range(row, row + len(lines))[group], lines[group], places[group], are_lines=True)
        row += len(lines)


def whole_file(path: Path) -> Any:
    """Parse a file that contains one JSON value."""
    size = path.stat().st_size
    if size > _MAX_FILE:
        raise InputError(
            f"`{path}` must have at most {_MAX_FILE:,} bytes, because it is read at once, got {size:,}. {_IN_PARTS}"
        )
    text = path.read_bytes()
    _check_memory(text, str(path))
    return loads(text)


def _check_memory(text: bytes, label: str) -> None:
    """Raise unless the objects in a JSON text need at most 4 times its size and 300 MB of memory.

    A value has a comma, a colon or a bracket before it. The text needs memory for itself, for its strings and, without
    orjson, once more as a string, whose widest character determines the bytes of all.
    """
    width = 1 if text.isascii() else 4 if WIDE.search(text) else 2
    needed = len(text) * (1 + width * (1 + (orjson is None)))
    needed += sum(cost * text.count(mark) for mark, cost in _COSTS.items())
    most = 4 * len(text) + _MAX_MEMORY
    if needed > most:
        raise InputError(
            f"`{label}` must need at most {most:,} bytes of memory, for {len(text):,} bytes of JSON, got values that "
            f"need up to {needed:,}. {_IN_PARTS}"
        )


def members_of(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names and objects of the members of a zip archive whose name is wanted."""
    methods = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, _ZSTD}
    with open_archive(path, methods) as archive, path.open("rb") as file:
        for info in archive.infolist():
            if not wanted(info.filename):
                continue
            if info.file_size > _MAX_FILE:
                raise InputError(
                    f"`{path}` must have members of at most {_MAX_FILE:,} bytes, got {info.file_size:,} in "
                    f"`{info.filename}`. Check the file."
                )
            packed = info.compress_type == _ZSTD
            text = _decompressed(file, info) if packed else archive.read(info)
            _check_memory(text, f"{path}/{info.filename}")
            yield info.filename, object_of(text, info.filename)


def _decompressed(file: IO[bytes], info: zipfile.ZipInfo) -> bytes:
    """Read a member with zstd compression. Its size and checksum are those of the directory."""
    file.seek(info.header_offset)
    header = file.read(30)
    if header[:4] != b"PK\x03\x04":
        raise ValueError(f"{info.filename} must begin with a header, got other content")
    file.seek(int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little"), 1)
    packed = file.read(info.compress_size)
    text: bytes = pa.decompress(packed, decompressed_size=info.file_size, codec="zstd", asbytes=True)
    if zlib.crc32(text) != info.CRC:
        raise ValueError(f"{info.filename} must have the checksum of the directory, got another one")
    return text
