"""Text files as lines: decompressed, with limits of their sizes, and the rows of JSON files as one object per line."""

import gzip
import json
import re
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy as np

from torchcalib.io.errors import InputError
from torchcalib.io.names import TARGETS

WIDE = re.compile(rb"[\xf0-\xf4]")  # first byte of a character of 4 bytes
_MAX_LINE = 8 * 2**20  # largest line in bytes: a parsed number takes up to 16 times the bytes of its text
_MAX_JSON = 128 * 2**20  # largest array of JSON in bytes, which is in memory as text
_MAX_WIDE = 2**25  # the same with characters of 4 bytes, which make each character of the text take 4 bytes
_MAX_DEPTH = 100  # largest nesting depth of lists and objects in a JSON file, whose rows may be logs
_LISTS = ("results", "data", "rows", "samples", "records", "answers", "predictions", "responses", "items", "questions")
"""Keys of a list of rows in a JSON object, before others."""
_SPACE = re.compile(r"[\s,]*")
_BLANK = re.compile(r"\s*")
_KEY = re.compile(r'[{,]\s*"((?:[^"\\]|\\.)*+)"\s*:\s*', re.DOTALL)
_ARRAYS = re.compile(r"\s*\[\s*([^{\]\s])")  # of other values than objects
_ROWS = re.compile(r"\[\s*[{\]]")
# Possessive quantifiers make the time linear; text without an end extends to the end of the line.
_TEXT_OF_JSON = re.compile(rb'"(?:[^"\\]|\\.)*+"?+', re.DOTALL)


def opened_text(path: Path) -> IO[bytes]:
    """Open a text file, which is decompressed if its name ends in `.gz`."""
    return gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # type: ignore[return-value]


def blocks_of_lines(path: Path, size: int) -> Iterator[bytes]:
    """Yield blocks of whole lines of a file of JSON lines, about `size` bytes each; see `opened_lines`."""
    with opened_lines(path) as file:
        while block := file.read(size):
            rest = file.readline(_MAX_LINE)
            if len(rest) == _MAX_LINE:
                raise InputError(f"`{path}` must have lines of at most 8 MiB, got a longer one. Check the file.")
            yield block + rest


def opened_lines(path: Path) -> IO[bytes]:
    """Open a file of JSON lines. The rows of a `.json` file become lines.

    They are an array of objects, alone or in an object, or an object of columns. Of several arrays in an object, the
    first in `_LISTS` counts.
    """
    if path.suffix.lower() != ".json":
        return opened_text(path)
    if path.stat().st_size > _MAX_JSON:
        raise InputError(f"`{path}` must have at most 128 MiB, got more. Write one object per line to .jsonl.")
    content = path.read_bytes()
    if len(content) > _MAX_WIDE and WIDE.search(content):
        raise InputError(
            f"`{path}` must have at most 32 MiB, because it has characters of 4 bytes, got more. Write one object per "
            "line to .jsonl."
        )
    check_encoding(str(path), content)
    check_depth(str(path), content, _MAX_DEPTH)
    text = content.decode("utf-8-sig")
    if match := _ARRAYS.match(text):
        found = "lists" if match[1] == "[" else "values"
        raise InputError(
            f"`{path}` must contain objects with named values, got an array of {found}. Name the values of each row, "
            "such as by df.to_json(path, orient='records')."
        )
    if rows := _rows_of_columns(text):
        return BytesIO("".join(f"{json.dumps(row)}\n" for row in rows).encode())
    place = _start_of_rows(text, len(text) - len(text.lstrip()))
    end = "" if place is None else "]"  # other values follow each other until the end of the file
    start, lines, decode = place or 0, BytesIO(), json.JSONDecoder().raw_decode
    while text[(first := _SPACE.match(text, start).end()) : first + 1] != end:  # type: ignore[union-attr]
        start = decode(text, first)[1]
        lines.write(" ".join(text[first:start].splitlines()).encode() + b"\n")
    lines.seek(0)
    return lines


def _start_of_rows(text: str, start: int, depth: int = 2) -> int | None:
    """Return the place after the bracket of an array of objects: the value at `start`, or a value in this object."""
    if match := _ROWS.match(text, start):
        return match.end() - 1
    found: dict[str, int] = {}
    while text[start : start + 1] in ("{", ",") and depth and (key := _KEY.match(text, start)):
        below = _start_of_rows(text, key.end(), depth - 1)
        if below is not None:
            found[key[1]] = below
        start = json.JSONDecoder().raw_decode(text, key.end())[1]
        start = _BLANK.match(text, start).end()  # type: ignore[union-attr]
    return next((found[name] for name in (*_LISTS, *found) if name in found), None)


def _rows_of_columns(text: str) -> list[dict[str, Any]]:
    """Return the rows of an object of columns, as `DataFrame.to_json` or `json.dump(df.to_dict("list"))` writes it.

    A column is an object of values by index (`orient="columns"`, the default of pandas) or a list. With
    `orient="index"`, rows are objects by index, whose keys name a target or are text beside a numbered index. With
    `orient="split"`, they are lists. A list of objects is an array of rows
    if its key is in `_LISTS`, or if all lists consist of objects.
    """
    try:
        found: Any = json.loads(text) if text.lstrip()[:1] == "{" else None
    except ValueError:  # lines
        return []
    if not isinstance(found, dict) or len(found) < 2:
        return []
    is_split = found.keys() == {"columns", "index", "data"} and all(isinstance(x, list) for x in found.values())
    if is_split and all(isinstance(row, list) for row in found["data"]):
        return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]
    columns = list(found.values())
    if all(isinstance(each, dict) for each in columns) and len({tuple(each) for each in columns}) == 1:
        has_numbers = all(map(str.isdecimal, columns[0]))  # as the index usually has
        names_target = [any(name.lower() in TARGETS for name in keys) for keys in (columns[0], found)]
        if (all(map(str.isdecimal, found)) and not has_numbers) or names_target == [True, False]:
            return columns
        cells = [list(each.values()) for each in columns]
        if not has_numbers and any(isinstance(cell, list | dict) for each in cells for cell in each):
            return []
    elif all(isinstance(each, list) for each in columns) and len({*map(len, columns)}) == 1:
        arrays = {name for name, each in found.items() if all(isinstance(value, dict) for value in each)}
        if len(arrays) == len(found) or arrays.intersection(_LISTS):
            return []
        cells = columns
    else:
        return []
    return [dict(zip(found, row, strict=True)) for row in zip(*cells, strict=True)]


def check_encoding(label: str, start: bytes) -> None:
    """Raise if a file begins like UTF-16 text."""
    if start.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or b"\0" in start[:64]:
        raise InputError(f"`{label}` must be text in UTF-8, got UTF-16 or binary data. Save it with encoding='utf-8'.")


def check_depth(label: str, text: bytes, most: int) -> None:
    """Raise for deeply nested values, which could overflow the stack of the recursive parser."""
    if text.count(b"[") + text.count(b"{") > most and _depth(text) > most:
        raise InputError(
            f"`{label}` must contain flat objects, got deeply nested ones. Store one number or list per key."
        )


def _depth(line: bytes) -> int:
    """Return the nesting depth of a line of JSON."""
    letters = np.frombuffer(_TEXT_OF_JSON.sub(b"", line), np.uint8)
    letters = letters[np.isin(letters, list(b"[]{}"))]
    opening, closing = np.isin(letters, list(b"[{")), np.isin(letters, list(b"]}"))
    return int(np.max(np.cumsum(opening.astype(np.int8) - closing, dtype=np.int32), initial=0))
