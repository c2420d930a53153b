"""Read JSON objects from lines, files and archives, with limits of their sizes."""

from __future__ import annotations

import csv
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from torchcalib.io.archives import open_archive
from torchcalib.io.errors import InputError
from torchcalib.io.names import is_numeral
from torchcalib.io.tables import DECIMAL_COMMA, WIDE, Frame, Parquet, opened_lines, opened_text, text_layout

try:
    import orjson  # parses a line three times as fast
except ImportError:
    orjson = None  # type: ignore[assignment]

_MAX_LINE = 8 * 2**20  # largest line in bytes
_MAX_GROUP = 2**16  # bytes of lines that are read at once
_MAX_FILE = 128 * 2**20  # largest file or member of an archive in bytes, which is parsed at once
_MAX_MEMORY = 250 * 2**20  # bytes of memory for it, in addition to 4 times its size
_COSTS = {b"{": 184, b"[": 64, b",": 72, b":": 109}
"""Bytes of an object with up to 5 keys, of an array, of a value after a comma, and of a key with its place."""
_IN_PARTS = "Write a format that is read in parts, such as .eval or .jsonl."
_BATCH = 2**12  # rows of a table that are converted at once
_MISSING = ("", "NaN", "nan")  # cells of text files without a value
_NO_NUMBERS = ("NA", "N/A", "null", "None")  # the same in columns of numbers: in columns of text, they may be classes
_START = 200  # rows that show which columns have text
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
    """Rows of a table, or objects in memory, which can be read several times. Names are without outer spaces."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.kind = type(given).__name__

    def groups(self, n: int) -> Iterator[RowGroup]:
        """Yield n rows at once, without missing values of tables."""
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

    def _rows(self) -> Iterator[Any]:
        given = self._given
        if isinstance(given, Path):
            yield from _csv_rows(given) if ".parquet" not in given.name.lower() else _batches(Parquet(given))
        elif hasattr(given, "columns"):
            yield from _batches(Frame(given))
        else:
            yield from given


def _batches(table: Any) -> Iterator[dict[str, Any]]:
    dtypes = {
        name: array.dtype
        for name, array in table.arrays.items()
        if not array.columns and name not in _NUMBERS_OF_TOKENS
    }
    for batch in table.batches(dtypes, _BATCH):
        yield from batch.to_pylist()


def _csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table as text, without empty cells, by the rules of `tables.Csv`."""
    layout = text_layout(path)
    with opened_text(path) as file, TextIOWrapper(file, "utf-8-sig", newline="") as text:
        for _ in range(layout.skipped):
            text.readline(_MAX_LINE)
        table = csv.reader(text, delimiter=layout.separator, strict=True)
        names = next(table, [])
        rows: Iterator[list[str]] = table
        if _has_no_header(names):  # the layout of MMLU: question, options and letter of the right one
            rows = chain([names], table)
            names = ["question", *(f"option {chr(ord('A') + k)}" for k in range(len(names) - 2)), "answer"]
        if len(set(names)) < len(names):
            raise ValueError("all columns must have different names")
        numbered = ((table.line_num, cells) for cells in rows if not _is_comment(cells, len(names)))
        start = list(islice(numbered, _START))
        of_texts = [any(map(_is_text, column)) for column in zip_longest(*(cells for _, cells in start), fillvalue="")]
        missing = [_MISSING if is_text else (*_MISSING, *_NO_NUMBERS) for is_text in of_texts]
        for line, cells in chain(start, numbered):
            if len(cells) != len(names):
                raise ValueError(f"line {line} must have {len(names)} cells, got {len(cells)}")
            if layout.decimal_point == ",":
                cells = [x.replace(",", ".") if DECIMAL_COMMA.fullmatch(x.strip().encode()) else x for x in cells]
            yield {name: None if x in words else x for name, x, words in zip(names, cells, missing, strict=True)}


def _is_comment(cells: Sequence[str], n: int) -> bool:
    """Return True for a line after `#` that has not n cells."""
    return len(cells) != n and bool(cells) and cells[0].startswith("#")


def _is_text(cell: str) -> bool:
    return cell not in (*_MISSING, *_NO_NUMBERS) and not is_numeral(cell)


def _has_no_header(cells: Sequence[str]) -> bool:
    """Return True if the first cells are a question, its options and the letter of the right option."""
    n, last = len(cells) - 2, cells[-1].strip() if cells else ""
    is_letter = len(last) == 1 and 0 <= ord(last) - ord("A") < n and n > 1
    names = {cell.strip().lower() for cell in cells[:-1]}
    return is_letter and not names & {"question", "answer", "id", "gold", "confidence", *"abcd"}


def lines_of(path: Path, n: int) -> Iterator[RowGroup]:
    """Yield at most n lines at once, without blank lines; see `opened_lines`."""
    row = place = 1
    with opened_lines(path) as file:
        while text := file.read(_MAX_GROUP):
            rest = file.readline(_MAX_LINE)
            if len(rest) == _MAX_LINE:
                raise InputError(f"`{path}` must have lines of at most 8 MiB, got a longer one. Check the file.")
            text += rest
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
