"""What torchcalib saved with `torch.save`, read as if somebody else had."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torchcalib.io.tensors import load_tensors

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")


def load_saved(path: Path) -> Any:
    """Return the tensors and plain values of a file, in memory of their own.

    Nothing is unpickled that could run. No more memory is taken than the file is long, whatever it says of itself: it
    is mapped, nothing in it may be compressed, and every tensor must lie there in full and for itself.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
        Exception: it is damaged; of whatever kind the parser raises.
    """
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        raise ValueError("what torch.save has not written, or not to its end")
    return _Copy(size).of(load_tensors(path, mmap=True))


class _Copy:
    """Copies tensors and plain values, of so many bytes in all; a value that is there many times counts many times."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes

    def of(self, value: Any) -> Any:
        """Return the copy; raise a ValueError for what is neither plain nor a tensor as it is saved."""
        self._left -= 1
        if isinstance(value, torch.Tensor):
            self._left -= value.numel() * value.element_size()
        if self._left < 0:
            raise ValueError("more values than a file of its size holds")
        if isinstance(value, dict):
            return {self.of(key): self.of(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        if type(value) is torch.Tensor and value.layout == torch.strided and value.device.type == "cpu":
            return value.detach().clone()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise ValueError(f"a {type(value).__name__}, which is neither a plain value nor a dense tensor")


def saved_value(state: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return a value of exactly this type, such as a bool, out of what was saved, or raise a ValueError."""
    value = state.get(name)
    if type(value) is not kind:
        raise ValueError(f"`{name}` must be a {kind.__name__}, got a {type(value).__name__}")
    return value


def saved_tensor(
    state: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> torch.Tensor:
    """Return a tensor of this dtype and shape, of which None is any size, or raise a ValueError."""
    value = saved_value(state, name, torch.Tensor)
    fits = value.dim() == len(shape) and all(size in (None, n) for n, size in zip(value.shape, shape, strict=True))
    if value.dtype != dtype or not fits:
        raise ValueError(f"`{name}` must be {dtype} of shape {shape}, got {value.dtype} of {tuple(value.shape)}")
    return value
