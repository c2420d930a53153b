"""Readers of array files: `.npz`, `.npy`, `.pt` and `.safetensors`. Tables have a module of their own, `tables`.

No file is unpickled. A reader holds a piece of rows in memory, never the file.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np
import torch
from numpy.lib import format as npy_format

from torchcalib.io.errors import InputError, quoted, reading
from torchcalib.io.paths import format_of
from torchcalib.io.saved import load_tensors

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
TEXT = frozenset({"string", "large_string"})
WHOLE = frozenset({"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})

MOST_ARRAYS = 2**17  # arrays or columns of a file; listing more would take too long
MAX_RESIDENT = 2 * 2**30  # bytes that may be in memory at once, such as one row
_LONGEST_TEXT = 4 * 1000  # bytes of a group name, 4 bytes a letter
_LONGEST_NPY_HEADER = 10_000  # bytes, the limit of numpy
_LONGEST_SAFETENSORS_HEADER = 2**24  # bytes of JSON: about 100,000 tensors
_DECOMPRESSED_AT_ONCE = 2**18  # bytes; `ZipExtFile.read` takes quadratic time for large sizes

_SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


@dataclass(frozen=True)
class Array:
    """Description of an array in a file, from the file's header."""

    name: str  # in the file; `first..last` for numbered columns
    dtype: str  # as torch names it, "string", or the name that the file format uses
    shape: tuple[int, ...]  # rows first
    problem: str = ""  # reason why the array cannot be used; an error only for arrays that are chosen
    columns: tuple[str, ...] = ()  # columns that form the array, one a class, in order; empty for all other arrays
    stem: str = ""  # common part of their names
    classes: tuple[str, ...] = ()  # names of the classes, if the columns are named by them

    @property
    def key(self) -> str:
        """Lower-case name by which the array is found."""
        return self.stem or self.name.strip().lower()

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in memory, for numeric dtypes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return math.prod(self.shape[1:]) * itemsize


class Reader(ABC):
    """One file, or the `.npy` files of one data set. No file stays open, so that there can be thousands of shards."""

    format: ClassVar[str]

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.label = " + ".join(map(str, paths))
        with reading(self.label, self.format):
            self.arrays = {array.name: array for array in self.inspect()}

    @abstractmethod
    def inspect(self) -> Iterable[Array]:
        """Describe the arrays of the file from headers alone."""

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[Any]:
        """Return arrays that can be sliced from the first row to the last, once; `stack` closes the file."""
        raise NotImplementedError

    def compose(self, columns: Sequence[str]) -> str:
        """Add an array of several columns, one a class, and return its name. Only tables have columns."""
        raise InputError(f"`{self.label}` must be a table to choose columns, got {quoted(columns)}. Name one array.")

    def rows(self, names: Sequence[str], count: int, gaps: bool = False) -> Iterator[tuple[Any, ...]]:  # noqa: ARG002
        """Yield at most `count` rows of the named arrays: numbers as tensors, text as lists of strings.

        Missing cells of tables are an error unless `gaps`. Numbers are then floats with NaN, and text is empty.
        """
        with ExitStack() as stack:
            arrays = self.open(names, stack)
            for start in range(0, self.arrays[names[0]].shape[0], count):
                yield tuple(_tensor(array[start : start + count]) for array in arrays)

    def stream(self, names: Sequence[str], count: int, gaps: bool = False) -> Iterator[tuple[Any, ...]]:
        """Yield `rows`; damage in later rows is an `InputError`, too."""
        with reading(self.label, self.format):
            yield from self.rows(names, count, gaps)

    def check_names(self, names: Sequence[str]) -> None:
        """Check that the names are unique, and not too many to list."""
        if len(names) > MOST_ARRAYS:
            raise InputError(
                f"`{self.label}` must hold at most {MOST_ARRAYS:,} arrays or columns, got {len(names):,}. "
                "Save predictions of all classes as one array."
            )
        repeated = [name for name, times in Counter(names).items() if times > 1]
        if repeated:
            raise InputError(f"`{self.label}` must name every array once, got {quoted(repeated)} twice. Rename one.")


class Npz(Reader):
    """An archive of arrays. It may be larger than memory, except for arrays in Fortran order."""

    format = "npz"

    def inspect(self) -> Iterator[Array]:
        """Describe every member that is an array."""
        with zipfile.ZipFile(self.paths[0]) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            self.check_names([info.filename for info in members])
            for info in members:
                with archive.open(info) as member:
                    yield _described(info.filename.removesuffix(".npy"), member, info.file_size, compressed=True)

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[_Member]:
        """Open one stream a member."""
        archive = stack.enter_context(zipfile.ZipFile(self.paths[0]))
        members = [archive.getinfo(f"{name}.npy") for name in names]
        return [_Member(stack.enter_context(archive.open(info)), info.file_size) for info in members]


class _Member:
    """A compressed array. Slices must follow one another: `numpy.load` would decompress the whole array instead."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._shape, by_columns, self._dtype = _read_header(file, size)
        self._whole = self._read(self._shape[::-1]).T if by_columns else None

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        if self._whole is not None:
            return self._whole[rows]
        return self._read((len(range(*rows.indices(self._shape[0]))), *self._shape[1:]))

    def _read(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        numbers = np.empty(math.prod(shape) * self._dtype.itemsize, np.uint8)
        missing = numbers.data
        while missing:
            data = self._file.read(min(_DECOMPRESSED_AT_ONCE, len(missing)))
            if not data:
                raise EOFError(f"{len(missing)} bytes are missing")
            missing[: len(data)] = data
            missing = missing[len(data) :]
        return numbers.view(self._dtype).reshape(shape)


class Npy(Reader):
    """Two to four files of one array each, named by the stems of the files, mapped into memory."""

    format = "npy"

    def inspect(self) -> Iterator[Array]:
        """Describe the array of every file."""
        if len(self.paths) not in (2, 3, 4):
            raise InputError(
                f"`{self.label}` must be a pair of .npy files, predictions and targets (more with weights or groups), "
                f"got {len(self.paths)}. Name both, or save shards in another format, such as .npz."
            )
        self.check_names([path.stem for path in self.paths])
        for path in self.paths:
            with path.open("rb") as file:
                yield _described(path.stem, file, path.stat().st_size)

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[Any]:  # noqa: ARG002 - maps close themselves
        """Map the files."""
        paths = {path.stem: path for path in self.paths}
        return [np.load(paths[name], mmap_mode="r", allow_pickle=False) for name in names]


class Pt(Reader):
    """A dict of tensors, or a tuple or list (preds, target[, weights]), mapped into memory."""

    format = "pt"

    def inspect(self) -> Iterator[Array]:
        """Describe every value; values that are no tensors have a `problem`."""
        for name, value in self._load().items():
            if not isinstance(value, torch.Tensor):
                found = type(value).__name__
            elif value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
                found = f"{'nested' if value.is_nested else value.layout} tensor on {value.device}"
            elif value.numel() * value.element_size() > value.untyped_storage().nbytes():
                found = "tensor of more numbers than the file holds (expanded; .clone() it first)"
            else:
                yield Array(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
                continue
            yield Array(name, "", (), f"must be a plain, dense tensor, got a {found}. Save a dict of such tensors.")

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Map the file."""
        held = self._load()
        return [held[name].detach() for name in names]

    def _load(self) -> dict[str, Any]:
        try:
            held = load_tensors(self.paths[0], mmap=True)
        except pickle.UnpicklingError as error:
            raise InputError(
                f"`{self.label}` must hold tensors and nothing else, got other Python objects, which are not unpickled."
                " Save a dict of tensors: torch.save({'logits': logits, 'targets': targets}, ...)."
            ) from error
        if isinstance(held, dict):
            return {str(name): value for name, value in held.items()}
        if isinstance(held, (tuple, list)) and len(held) in (2, 3):
            return dict(zip(("preds", "target", "weights"), held, strict=False))
        raise InputError(
            f"`{self.label}` must hold a dict of tensors or (preds, target[, weights]), got a {type(held).__name__}"
            f"{f' of {len(held)}' if isinstance(held, (tuple, list)) else ''}. Save a dict of tensors."
        )


class Safetensors(Reader):
    """Named tensors behind a header; slices are read from the file when needed."""

    format = "safetensors"

    def inspect(self) -> Iterator[Array]:
        """Describe every tensor."""
        with self.paths[0].open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
        if length > _LONGEST_SAFETENSORS_HEADER:
            raise ValueError(f"a header of {length:,} bytes is too long")
        with ExitStack() as stack:
            file = self._opened(stack)
            for name in file.keys():  # noqa: SIM118 - `file` is no dict
                held = file.get_slice(name)
                dtype = held.get_dtype()
                yield Array(name, _SAFETENSORS_DTYPES.get(dtype, dtype), tuple(held.get_shape()))

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[Any]:
        """Open the file."""
        file = self._opened(stack)
        return [file.get_slice(name) for name in names]

    def _opened(self, stack: ExitStack) -> Any:
        from safetensors import safe_open  # an optional package

        return stack.enter_context(safe_open(self.paths[0], framework="pt"))


def readers_of(files: Sequence[Path]) -> list[Reader]:
    """Return one reader a file; `.npy` files have one together."""
    file_format = str(format_of(files[0]))
    kinds: dict[str, type[Reader]] = {kind.format: kind for kind in (Npz, Npy, Pt, Safetensors)}
    if file_format not in kinds:
        with reading(str(files[0]), file_format):
            from torchcalib.io.tables import Csv, Jsonl, Parquet, Tsv  # needs pyarrow, an optional package
        kinds |= {kind.format: kind for kind in (Csv, Tsv, Jsonl, Parquet)}
    reader = kinds[file_format]
    return [reader(*files)] if reader is Npy else [reader(path) for path in files]


def _described(name: str, file: IO[bytes], size: int, *, compressed: bool = False) -> Array:
    """Describe a numpy array by its header."""
    shape, by_columns, dtype = _read_header(file, size)
    is_text = dtype.kind == "U"
    problem = ""
    if dtype.hasobject:
        problem = "must hold numbers, got pickled Python objects, which are never loaded. Save an array of numbers."
    elif is_text and dtype.itemsize > _LONGEST_TEXT:
        problem = "must hold names of at most 1,000 letters, got longer ones. Save shorter names."
    elif compressed and by_columns and size > MAX_RESIDENT:
        problem = "must be in C order, got more than 2 GiB in Fortran order. Save np.ascontiguousarray of it."
    return Array(name, "string" if is_text else dtype.name, shape, problem)


def _read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether the order is Fortran's, and dtype. The file then stands at the first number.

    numpy alone would read a header of up to 4 GiB, and trust a shape that exceeds the file.
    """
    version = npy_format.read_magic(file)
    # Version 3 differs from 2 only in the encoding of field names, and arrays with fields are refused anyway.
    width, read = (2, npy_format.read_array_header_1_0) if version == (1, 0) else (4, npy_format.read_array_header_2_0)
    length = file.read(width)
    n = int.from_bytes(length, "little")
    if n > _LONGEST_NPY_HEADER:
        raise ValueError(f"a header of {n:,} bytes is too long")
    shape, by_columns, dtype = read(io.BytesIO(length + file.read(n)))
    fits = min(shape, default=0) >= 0 and file.tell() + math.prod(shape) * dtype.itemsize == size
    if not (fits or dtype.hasobject):
        raise ValueError(f"{size} bytes cannot hold the promised {dtype.name} array of shape {shape}")
    return shape, by_columns and len(shape) > 1, dtype


def _tensor(rows: Any) -> Any:
    """Return a tensor in the byte order of this machine, or a list of strings."""
    if isinstance(rows, torch.Tensor):
        return rows
    if rows.dtype.kind == "U":
        return rows.tolist()
    # Writeable: the rows of a mapped file are copied.
    return torch.from_numpy(np.require(rows, rows.dtype.newbyteorder("="), ["C", "W", "E"]))
