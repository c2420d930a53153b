"""Write files atomically, and load them safely. All loaded values are checked: a file may be damaged or malicious."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from torchcalib.io.archives import load_tensors

T = TypeVar("T")


def write_whole(path: Path, content: bytes) -> Path:
    """Write a file completely or not at all. A symbolic link at `path` is replaced, never followed."""
    return write_all(path.parent, {path.name: content})[0]


def write_all(folder: Path, contents: Mapping[str, bytes]) -> tuple[Path, ...]:
    """Write files into an existing folder, and return their paths. If the disk is full, the folder is unchanged."""
    paths = {name: folder / name for name in contents}
    with _named(next(iter(paths.values()))):
        temporary_folder = TemporaryDirectory(prefix=".torchcalib-", dir=folder)
    with temporary_folder as temporary:
        for name, content in contents.items():
            with _named(paths[name]):
                Path(temporary, name).write_bytes(content)
        for name, path in paths.items():
            with _named(path):
                Path(temporary, name).replace(path)
    return tuple(paths.values())


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Name `path` in errors of the operating system: that of a full disk has no name, others a temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def saved_bytes(value: Any) -> bytes:
    """Return a tensor, or nested lists and dicts of tensors and plain values, as the bytes of a `torch.save` file.

    Equal values have equal bytes. `torch.save` would store the whole storage of a tensor that is a part of it.
    """

    def alone(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: alone(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(alone, value))
        if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.numel() * value.element_size():
            return value.clone()
        return value

    content = BytesIO()
    torch.save(alone(value), content)
    return content.getvalue()


def load_saved(content: Path | bytes) -> Any:
    """Load copies of the tensors and plain values in a file or its bytes, which take no more memory than the file.

    The type of the error for a damaged file depends on the parser.
    """
    remaining = len(content) if isinstance(content, bytes) else content.stat().st_size

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

    return copied(load_tensors(content))


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
