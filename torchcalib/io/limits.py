"""Limits of the memory for a file: at most 4 times its size and 300 MB, whatever its content declares.

A compressed file can declare arrays that are a million times as large as the file. Readers compare the declared sizes
with these limits before they decode any values.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from torchcalib.io.errors import InputError

MAX_ARRAYS = 2**17  # largest number of arrays or columns in a file; listing more would be slow
MAX_HEADER = 16 * 2**20  # largest size of the directory or header of a file in bytes
MAX_TEXT_BYTES = 4 * 1000  # largest size of a text in bytes: 1,000 characters of 4 bytes
MAX_NAME = 1000  # largest number of characters of the name of a class
BUFFER = 96 * 2**20
"""Bytes that a reader may decode at once, in addition to 3 times the size of the file.

The rest of the limit, the size of the file and 200 MB, is left for the mapped file and the computation.
"""

_MAX_ROW_BYTES = 16 * 2**20  # size of a row in a small file
_MAX_CLASSES = 25_000  # classes in a small file
_BYTES_PER_CLASS = 2500  # a report needs 10,000 bytes of memory for each class
_MAX_SAMPLES = 2**21  # samples of a small file
_MAX_COLUMNS = 2**14  # columns in a small text file
_MAX_COLUMNS_COMPRESSED = 2**12
_BYTES_PER_COLUMN = 2**12  # a text column needs 10,000 bytes of memory


def decoded_limit(paths: Iterable[Path]) -> int:
    """Return the number of bytes that may be decoded at once from these files."""
    return BUFFER + 3 * _size(paths)


def row_limit(paths: Iterable[Path]) -> int:
    """Return the largest accepted size in bytes of a row in these files."""
    return max(_MAX_ROW_BYTES, _size(paths))


def check_classes(n: int, paths: Iterable[Path], label: str, cost: int = 1) -> None:
    """Raise if the sums for `n` classes need more memory than a file of this size may use.

    `cost` is the memory for a class, divided by that of a report of a multi-class task.
    """
    size = _size(paths)
    most = (_MAX_CLASSES + size // _BYTES_PER_CLASS) // cost
    _check("classes", n, most, size, label, "Check the axis of the classes.")


def check_samples(n: int, paths: Iterable[Path], label: str) -> None:
    """Raise if a file declares more than one sample for each of its bytes, unless these are few."""
    size = _size(paths)
    _check("samples", n, max(_MAX_SAMPLES, size), size, label, "Check the program that wrote it, or split the file.")


def check_columns(n: int, paths: Sequence[Path], label: str) -> None:
    """Raise if a text file of this size has too many columns."""
    size = _size(paths)
    few = _MAX_COLUMNS_COMPRESSED if paths[0].suffix.lower() == ".gz" else _MAX_COLUMNS
    most = min(MAX_ARRAYS, few + size // _BYTES_PER_COLUMN)
    advice = "Save predictions of all classes as one array, such as in .npz or .parquet."
    _check("columns", n, most, size, label, advice)


def _check(kind: str, n: int, most: int, size: int, label: str, advice: str) -> None:
    if n > most:
        raise InputError(f"`{label}` must have at most {most:,} {kind} in {size:,} bytes, got {n:,}. {advice}")


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
