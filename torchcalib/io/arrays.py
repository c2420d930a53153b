"""Readers of array files: `.npz`, `.npy`, `.pt` and `.safetensors`. See `tables` for files with columns.

Describing the arrays imports torch for `.pt` files only.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
import zipfile
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.lib import format as npy_format

from torchcalib.io.archives import load_tensors, open_archive
from torchcalib.io.errors import InputError, quoted
from torchcalib.io.limits import MAX_HEADER, MAX_TEXT_BYTES, decoded_limit
from torchcalib.io.reader import Array, Reader, Text

if TYPE_CHECKING:
    import torch

_MAX_NPY_HEADER = 10_000  # largest header in bytes, as in numpy
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})  # of numpy; others decompress a byte to a megabyte
_DECOMPRESSED_AT_ONCE = 2**18  # bytes per read: the time of `ZipExtFile.read` is quadratic in this size

_SAFETENSORS_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}


class _ArrayReader(Reader):
    """Reader of a format that stores arrays. Unlike tables, arrays have no missing values."""

    @abstractmethod
    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[Any]:
        """Return the named arrays. Their rows can be sliced once, in order, until `stack` closes the file."""

    def rows(self, names: Sequence[str], count: int, optional: Collection[str] = ()) -> Iterator[tuple[Any, ...]]:  # noqa: ARG002
        """Yield slices of the arrays; see `Reader.rows`."""
        with ExitStack() as stack:
            arrays = self.open(names, stack)
            for start in range(0, self.arrays[names[0]].shape[0], count):
                yield tuple(_tensor(array[start : start + count]) for array in arrays)


class Npz(_ArrayReader):
    """Reader of `.npz` archives. Only arrays in Fortran order must fit in memory."""

    format = "npz"

    def inspect(self) -> Iterator[Array]:
        """Describe every array in the archive, from its header."""
        with open_archive(self.paths[0], _METHODS) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".npy")]
            self.check_names([info.filename for info in members])
            for info in members:
                with archive.open(info) as member:
                    name = info.filename.removesuffix(".npy")
                    yield _described(name, member, info.file_size, decoded_limit(self.paths))

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[_Member]:
        """Open the archive, and return one `_Member` per name, whose rows can be sliced in order."""
        archive = stack.enter_context(open_archive(self.paths[0], _METHODS))
        members = [archive.getinfo(f"{name}.npy") for name in names]
        at_once = sum(self.arrays[name].is_fortran * info.file_size for name, info in zip(names, members, strict=True))
        if at_once > (most := decoded_limit(self.paths)):
            raise InputError(
                f"`{self.label}` must have at most {most:,} bytes in Fortran order, got {at_once:,} in "
                f"{quoted(names)}. Save np.ascontiguousarray(array)."
            )
        return [_Member(stack.enter_context(archive.open(info)), info.file_size) for info in members]


class _Member:
    """Compressed array whose rows are decompressed when sliced. `numpy.load` would decompress all rows at once."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file = file
        self._shape, fortran_order, self._dtype = _read_header(file, size)
        self._in_memory = self._read(self._shape[::-1]).T if fortran_order else None

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        if self._in_memory is not None:
            return self._in_memory[rows]
        return self._read((len(range(*rows.indices(self._shape[0]))), *self._shape[1:]))

    def _read(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        numbers = np.empty(math.prod(shape) * self._dtype.itemsize, np.uint8)
        missing = numbers.data
        while missing:
            data = self._file.read(min(_DECOMPRESSED_AT_ONCE, len(missing)))
            if not data:
                raise EOFError(f"the array must be complete, got {len(missing):,} bytes too few")
            missing[: len(data)] = data
            missing = missing[len(data) :]
        return numbers.view(self._dtype).reshape(shape)


class Npy(_ArrayReader):
    """Reader of one to four `.npy` files with one array each, mapped into memory. File stems are the array names."""

    format = "npy"

    def inspect(self) -> Iterator[Array]:
        """Describe the array in every file."""
        if len(self.paths) > 4:
            raise InputError(
                f"`{self.label}` must be a pair of .npy files, predictions and targets (more with weights or groups), "
                f"got {len(self.paths)} files. Name both files, or save shards in another format, such as .npz."
            )
        self.check_names([path.stem for path in self.paths])
        for path in self.paths:
            with path.open("rb") as file:
                yield _described(path.stem, file, path.stat().st_size)

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[Any]:  # noqa: ARG002 - numpy closes memory maps
        """Map the files into memory, and return one array per name."""
        paths = {path.stem: path for path in self.paths}
        return [np.load(paths[name], mmap_mode="r", allow_pickle=False) for name in names]


class Pt(_ArrayReader):
    """Reader of `.pt` files: a dict of tensors, or a tuple or list (preds, target[, weights]), mapped into memory."""

    format = "pt"

    def inspect(self) -> Iterator[Array]:
        """Describe every value. Values other than dense CPU tensors have a `problem`."""
        import torch

        for name, value in self._load().items():
            if not isinstance(value, torch.Tensor):
                found = type(value).__name__
            elif value.is_nested or value.layout is not torch.strided or value.device.type != "cpu":
                found = f"{'nested' if value.is_nested else value.layout} tensor on {value.device}"
            elif value.numel() * value.element_size() > value.untyped_storage().nbytes():
                found = "tensor with more numbers than the file stores (expanded; .clone() it before saving)"
            else:
                yield Array(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
                continue
            yield Array(name, "", (), f"must be a dense CPU tensor, got a {found}. Save a dict of dense tensors.")

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[torch.Tensor]:  # noqa: ARG002
        """Map the file into memory, and return one tensor per name."""
        tensors = self._load()
        return [tensors[name].detach() for name in names]

    def _load(self) -> dict[str, Any]:
        try:
            loaded = load_tensors(self.paths[0])
        except pickle.UnpicklingError as error:
            raise InputError(
                f"`{self.label}` must contain only tensors, got other Python objects, which are never unpickled."
                " Save a dict of tensors: torch.save({'logits': logits, 'targets': targets}, ...)."
            ) from error
        if isinstance(loaded, dict):
            return {name: value for name, value in loaded.items() if isinstance(name, str)}
        if isinstance(loaded, (tuple, list)) and len(loaded) in (2, 3):
            return dict(zip(("preds", "target", "weights"), loaded, strict=False))
        raise InputError(
            f"`{self.label}` must contain a dict of tensors or (preds, target[, weights]), got a "
            f"{type(loaded).__name__}{f' of {len(loaded)}' if isinstance(loaded, (tuple, list)) else ''}. "
            "Save a dict of tensors."
        )


class Safetensors(_ArrayReader):
    """Reader of `.safetensors` files: a header, then named tensors. Slices are read when needed."""

    format = "safetensors"

    def inspect(self) -> Iterator[Array]:
        """Describe every tensor in the header."""
        with self.paths[0].open("rb") as start:
            length = int.from_bytes(start.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(f"the header must have at most {MAX_HEADER:,} bytes, got {length:,}")
        with ExitStack() as stack:
            file = self._opened(stack, framework="np")  # "pt" imports torch
            names = list(file.keys())
            self.check_names(names)
            for name in names:
                tensor = file.get_slice(name)
                dtype = tensor.get_dtype()
                yield Array(name, _SAFETENSORS_DTYPES.get(dtype, dtype), tuple(tensor.get_shape()))

    def open(self, names: Sequence[str], stack: ExitStack) -> Sequence[Any]:
        """Open the file, and return one slice object per name, which loads rows when indexed."""
        file = self._opened(stack)
        return [file.get_slice(name) for name in names]

    def _opened(self, stack: ExitStack, framework: str = "pt") -> Any:
        from safetensors import safe_open  # only this format needs it

        return stack.enter_context(safe_open(self.paths[0], framework=framework))


READERS: dict[str, type[Reader]] = {kind.format: kind for kind in (Npz, Npy, Pt, Safetensors)}
"""Reader by file format."""


def _described(name: str, file: IO[bytes], size: int, most_at_once: float = math.inf) -> Array:
    """Describe an array from its `.npy` header. `most_at_once` limits arrays that must be decompressed at once."""
    shape, fortran_order, dtype = _read_header(file, size)
    is_text = dtype.kind == "U"
    problem = ""
    if dtype.hasobject:
        problem = "must contain numbers, got pickled Python objects, which are never loaded. Save an array of numbers."
    elif is_text and dtype.itemsize > MAX_TEXT_BYTES:
        problem = "must contain text of at most 1,000 characters, got longer text. Save shorter names."
    elif fortran_order and size > most_at_once:
        problem = f"must be in C order, got {size:,} bytes in Fortran order. Save np.ascontiguousarray(array)."
    kind = "string" if is_text else dtype.name
    return Array(name, kind, shape, problem, itemsize=dtype.itemsize, is_fortran=fortran_order)


def _read_header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read a `.npy` header up to the first element. Return the shape, whether it is in Fortran order, and the dtype.

    numpy reads headers of up to 4 GiB, and accepts shapes that do not match a file of `size` bytes.
    """
    version = npy_format.read_magic(file)
    # Version 3 differs from 2 only in the encoding of field names, and arrays with fields are refused.
    width, read = (2, npy_format.read_array_header_1_0) if version == (1, 0) else (4, npy_format.read_array_header_2_0)
    length = file.read(width)
    n = int.from_bytes(length, "little")
    if n > _MAX_NPY_HEADER:
        raise ValueError(f"the header must have at most {_MAX_NPY_HEADER:,} bytes, got {n:,}")
    with warnings.catch_warnings(action="ignore"):  # the header is a Python literal, which may cause syntax warnings
        shape, fortran_order, dtype = read(io.BytesIO(length + file.read(n)))
    fits = min(shape, default=0) >= 0 and file.tell() + math.prod(shape) * dtype.itemsize == size
    if not (fits or dtype.hasobject):
        raise ValueError(f"the data must match the declared {dtype.name} array of shape {shape}, got {size:,} bytes")
    return shape, fortran_order and len(shape) > 1, dtype


def _tensor(rows: Any) -> torch.Tensor | Text:
    """Convert numbers to a tensor in native byte order, and text to a `Text`."""
    import torch

    if isinstance(rows, torch.Tensor):
        return rows
    if rows.dtype.kind == "U":
        numbers: dict[str, int] = {}
        codes = [numbers.setdefault(text, len(numbers)) for text in rows.ravel().tolist()]
        return Text(list(numbers), torch.tensor(codes, dtype=torch.int64, device="cpu"))
    # torch requires writeable memory ("W"), so the rows of a read-only memory map are copied.
    return torch.from_numpy(np.require(rows, rows.dtype.newbyteorder("="), ["C", "W", "E"]))
