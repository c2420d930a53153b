"""`Reader` of a prediction file, and descriptions of its arrays. Only reading rows imports torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchcalib.io.cells import numbers_in
from torchcalib.io.errors import InputError, quoted, reading
from torchcalib.io.limits import MAX_ARRAYS
from torchcalib.io.names import key_of

if TYPE_CHECKING:
    import torch

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
TEXT = frozenset({"string", "large_string"})
WHOLE = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})

_SHORT_TEXT = 64  # assumed bytes of a text, which has at most `MAX_TEXT_BYTES`


@dataclass(frozen=True)
class Text:
    """Rows of text: the distinct texts, and the index of the text of each row."""

    names: list[str]
    codes: torch.Tensor  # int64 `(n,)`

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True)
class Array:
    """Description of an array in a file, from the file header."""

    name: str  # key or column in the file; `first..last` for combined columns
    dtype: str  # torch name such as "float32", or "string", or the name in the file format
    shape: tuple[int, ...]  # (rows, ...)
    problem: str = ""  # reason why the array is unusable; an error only if the array is selected
    columns: tuple[str, ...] = ()  # columns that form the array, one per class, in class order; else empty
    stem: str = ""  # common start of the column names
    classes: tuple[str, ...] = ()  # class names, if the columns are named after classes
    is_unordered: bool = False  # whether the classes have different orders in different rows
    itemsize: int = 0  # size of a value in bytes; 0 for that of the dtype
    is_fortran: bool = False  # whether a compressed array must be decompressed as a whole
    stored: str = ""  # dtype in the file if percentages or text are read as float64

    @property
    def key(self) -> str:
        """Key for the search by name: the stem of combined columns, else the `key_of` its name."""
        return self.stem or key_of(self.name)

    @property
    def row_bytes(self) -> int:
        """Size of one decoded row in bytes. Text of variable length counts as a short one."""
        itemsize: int = self.itemsize or (_SHORT_TEXT if self.dtype in TEXT else _itemsize(self.dtype))
        return math.prod(self.shape[1:]) * itemsize


def _itemsize(dtype: str) -> int:
    """Return the size in bytes of a number of a dtype in `FLOATS` or `WHOLE`."""
    return 1 if dtype == "bool" else int("".join(filter(str.isdigit, dtype))) // 8


class Reader(ABC):
    """Reader of one file, of the `.npy` files of one data set, or of a DataFrame, which has no paths.

    Files are closed between calls, because thousands of shards would exceed the limit of open files.
    """

    format: ClassVar[str]
    advice: str = "Pass preds='NAME' and target='NAME'."
    """How to choose predictions and targets."""

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.label = " + ".join(map(str, paths)) or self.format
        with reading(self.label, self.format):
            self.arrays = {array.name: array for array in self.inspect()}

    @abstractmethod
    def inspect(self) -> Iterable[Array]:
        """Return a description of each array in the file. No values are loaded."""

    def compose(self, columns: Sequence[str], labels: Collection[str] = (), wanted: Sequence[str] = ()) -> str:  # noqa: ARG002
        """Combine columns of a table, one per class, into an array, and return its name; see `class_columns`.

        Other formats raise an error.
        """
        raise InputError(f"`{self.label}` must be a table to choose columns, got {quoted(columns)}. Name one array.")

    @abstractmethod
    def rows(self, names: Sequence[str], count: int, optional: Collection[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield chunks of at most `count` rows: a tensor of numbers or a `Text` for each array in `names`.

        A missing value in a table raises an error, except in the arrays `optional`. There, missing numbers become NaN
        in a floating-point tensor, and missing texts become empty.
        """

    def stream(
        self, names: Sequence[str], max_bytes: int, allow_missing: bool = False, optional: Collection[str] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Yield chunks of rows in which no array has more than `max_bytes`, or of one row; see `rows`.

        With `allow_missing`, values of all arrays may be missing.
        """
        widest = max(self.arrays[name].row_bytes for name in names)
        with reading(self.label, self.format):
            for chunk in self.rows(names, max(1, max_bytes // widest), names if allow_missing else optional):
                yield tuple(
                    self._converted(self.arrays[name], values) if self.arrays[name].stored else values
                    for name, values in zip(names, chunk, strict=True)
                )

    def _converted(self, array: Array, values: Text | torch.Tensor) -> torch.Tensor:
        """Return percentages as fractions, and texts as their numbers, float64. Missing texts become NaN."""
        import torch

        if not isinstance(values, Text):
            return values.double() / 100
        width = math.prod(array.shape[1:])
        rows = [numbers_in(text, array.classes, width) if text.strip() else [math.nan] * width for text in values.names]
        if None in rows:
            found = values.names[rows.index(None)][:200]
            rule = f"the classes {quoted(array.classes)}" if array.classes else f"{width} numbers"
            raise InputError(
                f"`{array.name}` in `{self.label}` must contain {rule} in every cell, got {found!r}. Write one number "
                "per class in every row."
            )
        return torch.tensor(rows, dtype=torch.float64, device="cpu")[values.codes].reshape(-1, *array.shape[1:])

    def check_names(self, names: Sequence[str]) -> None:
        """Check that array names are unique, and that there are at most `MAX_ARRAYS`."""
        if len(names) > MAX_ARRAYS:
            raise InputError(
                f"`{self.label}` must contain at most {MAX_ARRAYS:,} arrays or columns, got {len(names):,}. "
                "Save predictions of all classes as one array."
            )
        repeated = [name for name, times in Counter(names).items() if times > 1]
        if repeated:
            raise InputError(f"`{self.label}` must have unique array names, got {quoted(repeated)} twice. Rename one.")
