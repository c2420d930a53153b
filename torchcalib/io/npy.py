"""Numpy's formats: `.npz` archives, decompressed as they are read, and `.npy` files, mapped into memory."""

from __future__ import annotations

import io
import math
import zipfile
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib import format as npy_format

from torchcalib.io.reader import MAX_RESIDENT, Array, InputError, Reader, check_count_of_arrays, check_unique, single

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_LONGEST_TEXT = 4 * 1000  # bytes of a name, of 4 bytes a letter
_LONG = "must hold names of at most 1,000 letters, got longer ones. Save shorter names."
_LONGEST_HEADER = 10_000  # that numpy parses
_READ_AT_ONCE = 2**18  # what a larger read of a compressed member returns is joined in quadratic time

_PICKLED = "must hold numbers, got pickled Python objects, which are never loaded. Save an array of numbers."
_BY_COLUMNS = (
    "must be in C order to be read in pieces, got more than 2 GiB in Fortran order. Save `np.ascontiguousarray` of it."
)


class Npz(Reader):
    """An archive of arrays. It may be larger than memory, except for arrays stored column by column."""

    format = "npz"

    def inspect(self) -> dict[str, Array]:
        """List the arrays, from the head of every member."""
        arrays = {}
        with zipfile.ZipFile(self.paths[0]) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            check_count_of_arrays(self.label, len(members))
            check_unique(self.label, [info.filename for info in members])
            for info in members:
                with archive.open(info) as member:
                    shape, by_columns, dtype = _read_header(member, info.file_size)
                name = info.filename.removesuffix(".npy")
                arrays[name] = _described(name, shape, by_columns and info.file_size > MAX_RESIDENT, dtype)
        return arrays

    def rows(self, names: Sequence[str], count: int) -> Iterator[tuple[Any, ...]]:
        """Yield pieces of the members, each decompressed in a stream of its own."""
        with zipfile.ZipFile(self.paths[0]) as archive, ExitStack() as opened:
            members = [archive.getinfo(f"{name}.npy") for name in names]
            streams = [(opened.enter_context(archive.open(info)), info.file_size) for info in members]
            yield from zip(*(_pieces(stream, size, count) for stream, size in streams), strict=True)


class Npy(Reader):
    """Two or three files of one array each, which go by the stems of their file names."""

    format = "npy"

    def inspect(self) -> dict[str, Array]:
        """List the array of every file, from its head."""
        if len(self.paths) not in (2, 3, 4):
            raise InputError(
                f"`{self.label}` must be a pair of .npy files, predictions and targets (more with weights or groups), "
                f"got {len(self.paths)}. Name both, or save shards in another format, such as .npz."
            )
        check_unique(self.label, [path.stem for path in self.paths])
        arrays = {}
        for path in self.paths:
            with path.open("rb") as file:
                shape, _, dtype = _read_header(file, path.stat().st_size)
            arrays[path.stem] = _described(path.stem, shape, False, dtype)
        return arrays

    def rows(self, names: Sequence[str], count: int) -> Iterator[tuple[Any, ...]]:
        """Yield pieces of the mapped files, copied because a map is read-only."""
        paths = {path.stem: path for path in self.paths}
        mapped = [np.load(paths[name], mmap_mode="r", allow_pickle=False) for name in names]
        for start in range(0, len(mapped[0]), count):
            yield tuple(_tensor(np.array(array[start : start + count])) for array in mapped)


def _described(name: str, shape: tuple[int, ...], too_large: bool, dtype: np.dtype[Any]) -> Array:
    if dtype.kind == "U":
        return single(name, "string", shape, _LONG if dtype.itemsize > _LONGEST_TEXT else "")
    return single(name, dtype.name, shape, _PICKLED if dtype.hasobject else _BY_COLUMNS if too_large else "")


def _read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the numbers are stored column by column, dtype; the file then stands at the first number."""
    version = npy_format.read_magic(file)
    # Version 3 differs from 2 only in the encoding of field names, and arrays with fields are refused anyway.
    width, read = (2, npy_format.read_array_header_1_0) if version == (1, 0) else (4, npy_format.read_array_header_2_0)
    length = file.read(width)
    n = int.from_bytes(length, "little")
    if n > _LONGEST_HEADER:  # numpy would read all of it, up to 4 GiB, before it looks
        raise ValueError(f"a header of {n:,} bytes is too long")
    shape, by_columns, dtype = read(io.BytesIO(length + file.read(n)))
    honest = min(shape, default=0) >= 0 and file.tell() + math.prod(shape) * dtype.itemsize == size
    if not (honest or dtype.hasobject):
        raise ValueError(f"{size} bytes cannot hold the promised {dtype.name} array of shape {shape}")
    return shape, by_columns and len(shape) > 1, dtype


def _pieces(file: IO[bytes], size: int, count: int) -> Iterator[Any]:
    """Rows of an array in a stream that cannot jump."""
    shape, by_columns, dtype = _read_header(file, size)
    if by_columns:
        whole = _read(file, math.prod(shape), dtype).reshape(shape[::-1]).T
        for start in range(0, shape[0], count):
            yield _tensor(whole[start : start + count])
        return
    for start in range(0, shape[0], count):
        piece = (min(count, shape[0] - start), *shape[1:])
        yield _tensor(_read(file, math.prod(piece), dtype).reshape(piece))


def _read(file: IO[bytes], n: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    numbers = np.empty(n * dtype.itemsize, np.uint8)
    missing = numbers.data
    while missing:
        data = file.read(min(_READ_AT_ONCE, len(missing)))
        if not data:
            raise EOFError(f"{len(missing)} bytes are missing")
        missing[: len(data)] = data
        missing = missing[len(data) :]
    return numbers.view(dtype)


def _tensor(array: np.ndarray[Any, Any]) -> Any:
    """In this machine's byte order and row by row, as torch needs it; text as a list."""
    if array.dtype.kind == "U":
        return array.tolist()
    return torch.from_numpy(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))
