"""Limits of the memory for a file: at most 4 times its size and 300 MB, whatever its content declares.

A compressed file can declare arrays that are a million times as large as the file. Readers compare the declared sizes
with these limits before they decode any values.
"""

from collections.abc import Iterable
from pathlib import Path

from torchcalib.io.errors import InputError

MAX_ARRAYS = 2**17  # largest number of arrays or columns in a file; listing more would be slow
MAX_HEADER = 16 * 2**20  # largest size of the directory or header of a file in bytes
MAX_TEXT_BYTES = 4 * 1000  # largest size of a text in bytes: 1,000 characters of 4 bytes
BUFFER = 96 * 2**20
"""Bytes that a reader may decode at once, in addition to 3 times the size of the file.

The rest of the limit, the size of the file and 200 MB, is left for the mapped file and the computation.
"""

_MAX_ROW_BYTES = 16 * 2**20  # size of a row in a small file
_MAX_CLASSES = 2**18  # classes in a small file
_BYTES_PER_CLASS = 1024  # sums of a report for each class, and their copies during an update
_MAX_ROWS = 2**21  # rows of a small file
_MAX_COLUMNS = 2**14  # columns in a small text file
_BYTES_PER_COLUMN = 2**12  # a text column needs 10,000 bytes of memory


def decoded_limit(paths: Iterable[Path]) -> int:
    """Return the number of bytes that may be decoded at once from these files."""
    return BUFFER + 3 * _size(paths)


def row_limit(paths: Iterable[Path]) -> int:
    """Return the largest accepted size in bytes of a row in these files."""
    return max(_MAX_ROW_BYTES, _size(paths))


def check_classes(n: int, paths: Iterable[Path], label: str) -> None:
    """Raise if the sums of a report for `n` classes need more memory than a file of this size may use."""
    size = _size(paths)
    most = max(_MAX_CLASSES, size // _BYTES_PER_CLASS)
    if n > most:
        raise InputError(
            f"`{label}` must have at most {most:,} classes in {size:,} bytes, got {n:,}. Check the axis of the classes."
        )


def check_rows(n: int, paths: Iterable[Path], label: str) -> None:
    """Raise if a file declares more than one row for each of its bytes, unless these are few rows."""
    size = _size(paths)
    most = max(_MAX_ROWS, size)
    if n > most:
        raise InputError(
            f"`{label}` must have at most {most:,} rows in {size:,} bytes, got {n:,}. "
            "Check the program that wrote it, or split the file."
        )


def check_columns(n: int, paths: Iterable[Path], label: str) -> None:
    """Raise if a text file of this size has too many columns."""
    size = _size(paths)
    most = min(MAX_ARRAYS, max(_MAX_COLUMNS, size // _BYTES_PER_COLUMN))
    if n > most:
        raise InputError(
            f"`{label}` must have at most {most:,} columns in {size:,} bytes, got {n:,}. "
            "Save predictions of all classes as one array, such as in .npz or .parquet."
        )


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
