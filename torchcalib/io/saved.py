"""Write files atomically, and load them safely. All loaded values are checked: a file may be damaged or malicious."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file completely or not at all: write a temporary file in the same folder, then rename it to `path`.

    A symbolic link at `path` is replaced, never followed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:  # x: fail if another process creates a link here
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def load_tensors(path: str | Path, *, mmap: bool = False) -> Any:
    """Load tensors, and plain containers with tensors, from a `torch.save` file to the CPU.

    Args:
        path: path of the file.
        mmap: map tensors into memory if the file is a zip archive, the default format since torch 1.6.

    Returns:
        The saved tensor or container, with all tensors on the CPU.

    Raises:
        pickle.UnpicklingError: if the file contains other Python objects. None of them is created.
        ValueError: if an archive member is compressed. torch never compresses, and its data could exhaust the memory.
        OSError, RuntimeError: if the file cannot be read.
    """
    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"the archive must be uncompressed, got the compressed member {packed[0]}")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)


def load_saved(path: Path) -> Any:
    """Load copies of the tensors and plain values in a file.

    Tensors with more values than the file stores raise an error. This limits the memory to the file size.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the file is incomplete, or contains other objects.
        Exception: if the file is damaged; the type depends on the parser.
    """
    remaining = path.stat().st_size
    if not zipfile.is_zipfile(path):
        raise ValueError("the file must be a complete zip archive of torch.save, got other content")

    def copied(value: Any) -> Any:
        """Copy nested tensors and plain values. Raise if the copies exceed the file size."""
        nonlocal remaining
        remaining -= 1 + (value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0)
        if remaining < 0:
            raise ValueError("the file must store all values of its tensors, got a file that is too small")
        if isinstance(value, dict):
            return {copied(key): copied(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(copied, value))
        if type(value) is torch.Tensor and value.layout == torch.strided and value.device.type == "cpu":
            return value.detach().clone()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"the file must contain only plain values and dense tensors, got a {type(value).__name__}")

    return copied(load_tensors(path, mmap=True))


def saved_value(state: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return `state[name]` after a check that its type is exactly `kind`."""
    value = state.get(name)
    if type(value) is not kind:
        raise ValueError(f"`{name}` must be a {kind.__name__}, got a {type(value).__name__}")
    return value


def saved_tensor(
    state: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> torch.Tensor:
    """Return the tensor `state[name]` after a check of its dtype and shape. None in `shape` permits any size."""
    value = saved_value(state, name, torch.Tensor)
    fits = value.dim() == len(shape) and all(size in (None, n) for n, size in zip(value.shape, shape, strict=True))
    if value.dtype != dtype or not fits:
        raise ValueError(f"`{name}` must be {dtype} of shape {shape}, got {value.dtype} of {tuple(value.shape)}")
    return value
