"""What every file format offers: the arrays a file holds, and the rows of some of them, piece by piece."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
TEXT = frozenset({"string", "large_string"})
WHOLE = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})

MOST_ARRAYS = 2**17  # arrays or columns of a file; one with more is broken, and listing them would take for ever
MAX_RESIDENT = 2 * 2**30  # bytes of what must fit in memory whole, a row above all; a file that asks for more is broken


class InputError(ValueError):
    """A file that cannot be read as predictions; the message says what was found and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """Return a text that steers no terminal: names and parser messages come out of files."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


@dataclass(frozen=True)
class Array:
    """What a file says about one of its arrays before any row of it is read."""

    dtype: str
    shape: tuple[int, ...]
    key: str  # lower-case name it is found by; numbered columns share their stem
    columns: tuple[str, ...]  # the names in the file that make it up: itself, or the numbered columns in order
    problem: str = ""  # why it cannot be used; raised only if it is chosen

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, for the dtypes that can be read."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return math.prod(self.shape[1:]) * itemsize


def single(name: str, dtype: str, shape: Sequence[int], problem: str = "") -> Array:
    """Describe an array that goes by its own name."""
    return Array(dtype, tuple(shape), name.strip().lower(), (name,), problem)


class Reader(ABC):
    """One file, or one pair of `.npy` files. It holds no open file, so that thousands of shards can be opened."""

    format: ClassVar[str]

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.label = " + ".join(str(path) for path in paths)
        with reading(self.label, self.format):
            self.arrays = self.inspect()

    @abstractmethod
    def inspect(self) -> dict[str, Array]:
        """List the arrays of the file by name, from headers alone."""

    @abstractmethod
    def rows(self, names: Sequence[str], count: int) -> Iterator[tuple[Any, ...]]:
        """Yield pieces of at most `count` rows of the named arrays, which have equally many rows and at least one.

        Numbers come as tensors, text as lists of strings.
        """

    def stream(self, names: Sequence[str], count: int) -> Iterator[tuple[Any, ...]]:
        """Yield `rows`, with damage that shows only in later pieces as an `InputError` too."""
        pieces = self.rows(names, count)
        while True:
            with reading(self.label, self.format):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece


@contextmanager
def reading(label: str, file_format: str) -> Iterator[None]:
    """Turn whatever a parser raises on a damaged file into an `InputError`."""
    try:
        yield
    except InputError:
        raise
    # Six parsers raise a dozen kinds of errors on damaged bytes: zlib.error, KeyError, struct.error, ArrowInvalid ...
    except Exception as error:
        said = shorten(str(error), 160, placeholder=" ...") or "no details"
        raise InputError(
            f"`{label}` must be a complete, readable {file_format} file, got {type(error).__name__}: "
            f"{said.rstrip('.')}. Check that it was written to its end, and that its suffix is right."
        ) from error


def check_count_of_arrays(label: str, count: int) -> None:
    """Refuse a file of so many arrays that listing them would take for ever."""
    if count > MOST_ARRAYS:
        raise InputError(
            f"`{label}` must hold at most {MOST_ARRAYS:,} arrays or columns, got {count:,}. Save predictions of all "
            "classes as one array."
        )


def check_unique(label: str, names: Iterable[str]) -> None:
    """Refuse a file in which one name stands for two things."""
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise InputError(f"`{label}` must name every array once, got {quoted(twice)} twice. Rename one of them.")


def quoted(names: Iterable[object], most: int = 12) -> str:
    """List the first few names for a message."""
    shown = [f"`{name}`" for name in names]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return (", ".join(shown[:most]) or "nothing") + rest


def slices(arrays: Sequence[Tensor], count: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield pieces of `count` rows of arrays that are in memory, or mapped into it."""
    for start in range(0, len(arrays[0]), count):
        yield tuple(array[start : start + count] for array in arrays)
