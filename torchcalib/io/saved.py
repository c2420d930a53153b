"""Files that torchcalib writes, and their safe loading. A loaded file is not trusted, whoever wrote it."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file completely or not at all: to a temporary file in its folder, which is then renamed.

    A link at `path` is replaced and never followed.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        with part.open("xb") as file:  # x: fail if a link appears at this moment
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def load_tensors(path: str | Path, *, mmap: bool = False) -> Any:
    """Load a file of `torch.save` on the CPU: tensors, and plain containers of them.

    Args:
        path: the file.
        mmap: map tensors into memory if the file has the zip format, the default of torch since 1.6.

    Raises:
        pickle.UnpicklingError: it holds other Python objects. None of them is created.
        ValueError: a part is compressed. torch never does this, and the part could have any size in memory.
        OSError, RuntimeError: it cannot be read.
    """
    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        with zipfile.ZipFile(path) as archive:
            packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"{packed[0]} is compressed, which torch.save never does")
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and is_zip)


def load_saved(path: Path) -> Any:
    """Return copies of the tensors and plain values of a file.

    The copies need at most as much memory as the file is long: every tensor must be stored completely.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
        Exception: it is damaged; the type depends on the parser.
    """
    left = path.stat().st_size
    if not zipfile.is_zipfile(path):
        raise ValueError("a file that torch.save has not written completely")

    def copied(value: Any) -> Any:
        """Copy tensors and plain values up to the size of the file. A repeated value counts every time."""
        nonlocal left
        left -= 1 + (value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0)
        if left < 0:
            raise ValueError("more values than a file of its size holds")
        if isinstance(value, dict):
            return {copied(key): copied(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(copied, value))
        if type(value) is torch.Tensor and value.layout == torch.strided and value.device.type == "cpu":
            return value.detach().clone()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"a {type(value).__name__}, which is neither a plain value nor a dense tensor")

    return copied(load_tensors(path, mmap=True))


def saved_value(state: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a loaded value after a check that it has exactly this type."""
    value = state.get(name)
    if type(value) is not kind:
        raise ValueError(f"`{name}` must be a {kind.__name__}, got a {type(value).__name__}")
    return value


def saved_tensor(
    state: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> torch.Tensor:
    """Return a loaded tensor after a check of its dtype and shape; None is any size."""
    value = saved_value(state, name, torch.Tensor)
    fits = value.dim() == len(shape) and all(size in (None, n) for n, size in zip(value.shape, shape, strict=True))
    if value.dtype != dtype or not fits:
        raise ValueError(f"`{name}` must be {dtype} of shape {shape}, got {value.dtype} of {tuple(value.shape)}")
    return value
