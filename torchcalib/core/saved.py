"""The saved form of states and calibrators: a safetensors file that contains a header, the parts and a checksum.

The metadata of the safetensors header have one entry, `torchcalib`: a checksum of 8 hexadecimal digits, followed by a
JSON object. The object has the kind of the state, the version of the form and of the package, and the content, in which
each tensor is replaced by its name. Any program that reads safetensors shows the tensors.

The checksum is the CRC-32 of all bytes of the file, with digits 0 in its place. It finds any change of up to 32
consecutive bits. It does not protect from intent: each kind of state checks the values that it loads. JSON and tensors
contain no code, so nothing is unpickled.

Checkpoints of torch contain the state of a metric in its `state_dict`, without this form: the parts, and a description
of the metric as a tensor.
"""

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchcalib._version import __version__
from torchcalib.core.state import SampleState, SumState
from torchcalib.io.errors import InputError, shown

T = TypeVar("T")

FORM = 24
"""Version of the saved form, for all kinds. Increase it when the content of a state or its meaning changes."""

DESCRIPTION = "description"
"""Key of the description in the state of a metric."""

_START = b'{"__metadata__":{"torchcalib":"'  # after the length of the header in 8 bytes
_CHECKSUM = slice(8 + len(_START), 16 + len(_START))
_MAX_HEADER = 8 * 2**20  # largest size of a header in bytes, whose objects take about 20 times as much memory
_TENSOR = "$tensor"  # key of the name of a tensor

_IRRELEVANT = {"nan_policy"}
"""Options that may differ from the saved state. Training can resume with `nan_policy="drop"` after a NaN."""


def saved_bytes(kind: str, content: Mapping[str, Any]) -> bytes:
    """Return the saved form of nested dicts and lists of tensors and plain values. Equal values have equal bytes."""
    from safetensors.torch import save  # imported only by calls that save

    tensors: dict[str, Tensor] = {}
    described = {"kind": kind, "form": FORM, "torchcalib": __version__, "byteorder": sys.byteorder}
    text = json.dumps({**described, "content": _with_names(content, "", tensors)})
    whole = save(tensors, {"torchcalib": f"{0:08x}{text}"})
    if (size := int.from_bytes(whole[:8], "little")) > _MAX_HEADER:
        raise ValueError(
            f"`state` must have at most 8 MiB of names and settings, got {size:,} bytes. Use fewer or shorter names."
        )
    return b"".join((whole[: _CHECKSUM.start], _checksum(whole), whole[_CHECKSUM.stop :]))


def _with_names(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Return the value with a name instead of each tensor, and add copies of the tensors to `tensors`."""
    if isinstance(value, Tensor):
        name = f"{len(tensors)}{place}"
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {key: _with_names(item, f"{place}/{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_names(item, f"{place}/{k}", tensors) for k, item in enumerate(value)]
    return value


def _checksum(content: bytes) -> bytes:
    """Return the checksum of a saved form, with digits 0 in its place."""
    view = memoryview(content)
    crc = zlib.crc32(view[_CHECKSUM.stop :], zlib.crc32(b"0" * 8, zlib.crc32(view[: _CHECKSUM.start])))
    return f"{crc:08x}".encode()


@contextmanager
def loading(kind: str, argument: str, writer: str) -> Iterator[None]:
    """Raise `InputError`, which names the kind and its writer, for any error in a block that reads a saved form.

    `argument` is the name of the file or argument in errors. Errors of the operating system do not change.
    """
    try:
        yield
    except (OSError, _OtherFormError):
        raise
    # Invalid content causes many types of errors, such as SafetensorError, KeyError and RecursionError.
    except Exception as error:
        message = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InputError(
            f"`{argument}` must be a complete {kind}, got {type(error).__name__}: {message}. Create it with {writer}."
        ) from error


class _OtherFormError(InputError):
    """Saved form of another version."""


def check_is_file(path: Path) -> None:
    """Raise ValueError for a pipe, a device or a socket, which may block."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError("it must be a file, got a pipe, device or socket")


def content_of(given: Path | bytes | bytearray | memoryview, kind: str) -> dict[str, Any]:
    """Return the content of a saved form, whose tensors are copies. Other content raises an error of any type."""
    from safetensors.torch import load

    if isinstance(given, Path):
        check_is_file(given)
        given = given.read_bytes()
    content = given if isinstance(given, bytes) else bytes(memoryview(given))
    length = int.from_bytes(content[:8], "little")
    if content[8 : _CHECKSUM.start] != _START or length > _MAX_HEADER:
        old = ": a zip archive, as versions before 0.1.0 wrote" if content[:2] == b"PK" else ""
        raise ValueError(f"it must begin with the header of a saved form, got other content{old}")
    if content[_CHECKSUM] != _checksum(content):
        raise ValueError("it must have the checksum in its header, got damaged content")
    tensors: dict[str, Tensor] = load(content)
    text = json.loads(content[8 : 8 + length])["__metadata__"]["torchcalib"][8:]
    described = json.loads(text, object_hook=lambda x: tensors.pop(x[_TENSOR]) if x.keys() == {_TENSOR} else x)
    if described["kind"] != kind:
        raise ValueError(f"it must be of this kind, got a {shown(described['kind'])}")
    check_form(kind, described["form"], described["torchcalib"])
    if described["byteorder"] != sys.byteorder:
        raise ValueError(f"it must have the byte order of this machine, {sys.byteorder}, got another one")
    if tensors:
        raise ValueError(f"it must name each tensor once, got no place for {shown(next(iter(tensors)))}")
    found: dict[str, Any] = described["content"]
    if type(found) is not dict:
        raise TypeError(f"it must contain an object, got a {type(found).__name__}")
    return found


def check_form(what: str, form: object, version: object) -> None:
    """Raise an error if the version of a form, which a version of torchcalib wrote, is not that of this package."""
    if type(form) is not int or form < 1:
        raise ValueError(f"its version of the form must be a positive integer, got {shown(form)}")
    if form != FORM:
        advice = f"Update torchcalib from version {__version__}." if form > FORM else "Create it again from the data."
        raise _OtherFormError(
            f"A {what} must have version {FORM} of the saved form, got {form}, written by torchcalib "
            f"{shown(version)}. {advice}"
        )


def saved_value(state: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """Return `state[name]` after a check that its type is exactly `kind`."""
    value = state.get(name)
    if type(value) is not kind:
        raise ValueError(f"`{name}` must be a {kind.__name__}, got a {type(value).__name__}")
    return value


def saved_count(state: Mapping[str, Any], name: str) -> int:
    """Return the number `state[name]`, which must not be negative."""
    value = saved_value(state, name, int)
    if value < 0:
        raise ValueError(f"`{name}` must not be negative, got {value}")
    return value


def saved_tensor(state: Mapping[str, Any], name: str, dtype: torch.dtype, shape: tuple[int | None, ...]) -> Tensor:
    """Return the tensor `state[name]` after a check of its dtype and shape. None in `shape` permits any size."""
    value = saved_value(state, name, Tensor)
    fits = value.dim() == len(shape) and all(size in (None, n) for n, size in zip(value.shape, shape, strict=True))
    if value.dtype != dtype or not fits:
        raise ValueError(f"`{name}` must be {dtype} of shape {shape}, got {value.dtype} of {tuple(value.shape)}")
    return value


# Metrics


class Description(NamedTuple):
    """Description of the state of a metric: the metric's configuration and the number of updates."""

    configuration: Mapping[str, Any]  # arguments that the state depends on, as values that JSON supports
    n_updates: int  # number of calls of `update`
    likely_axis: int | None  # see `InputFormat.likely_axis`
    draws: list[int] | None  # seed and rank for the replicate weights of `Bootstrapped`; None for all other metrics

    def plain(self) -> dict[str, Any]:
        """Return the description as plain values, with the versions of the form and the package."""
        described = {"form": FORM, "torchcalib": __version__, **self._asdict()}
        values: dict[str, Any] = json.loads(json.dumps(described, default=repr))
        return values

    def encoded(self) -> Tensor:
        """Encode the description as JSON in a uint8 tensor `(n,)`, which all checkpoint formats support."""
        return torch.frombuffer(bytearray(json.dumps(self.plain()).encode()), dtype=torch.uint8)


def contains_state(saved: Mapping[str, Any], prefix: str) -> bool:
    """Return True if a dict contains any part of a metric state under keys with this prefix."""
    return any(prefix + name in saved for name in (*SumState.names, *SampleState.names, DESCRIPTION))


def read_state(
    kind: Any, state: Any, configuration: Mapping[str, Any], argument: str, saved: Mapping[str, Any], prefix: str = ""
) -> tuple[Any, Description]:
    """Check the saved state of a metric. Return a copy on the device of the metric, and the description.

    Args:
        kind: operations on the state of the metric.
        state: the state of the metric.
        configuration: the configuration of the metric.
        argument: name in error messages.
        saved: the saved state, with a description as plain values or as a tensor. Other keys are ignored.
        prefix: start of the keys of the saved state.

    Raises:
        ValueError: if the saved state is damaged, or belongs to a different metric or form.
    """
    described = _read_description(argument, saved, prefix)
    _check_alike(argument, described.configuration, configuration, f" at {prefix!r}" if prefix else "")
    names = [prefix + name for name in kind.names]
    complete = all(name in saved for name in names)
    checked = kind.check([saved[name] for name in names], state) if complete else None
    if checked is None:
        mine = zip(names, kind.parts(state), strict=True)
        expected = {name: _shape(part) for name, part in mine}
        found = {name: _shape(saved[name]) for name in names if name in saved}
        raise ValueError(
            f"`{argument}` must contain {expected}, got {found}. It is damaged, or its dtype was changed. Load the "
            "state exactly as it was saved."
        )
    return checked, described


def _read_description(argument: str, saved: Mapping[str, Any], prefix: str) -> Description:
    name = prefix + DESCRIPTION
    found = saved.get(name)
    if found is None:
        raise ValueError(
            f"`{argument}` must contain {name!r}, got only {sorted(saved)}. "
            "Save the state with state_dict() of a persistent metric and this version of torchcalib."
        )
    try:
        values = found if isinstance(found, dict) else json.loads(_text(found))
        check_form("state", values["form"], values.get("torchcalib"))
        described = Description(*(values[field] for field in Description._fields))
        is_valid = isinstance(described.configuration, dict) and described.likely_axis in (None, -1, 1)
        is_valid &= type(described.n_updates) is int and described.n_updates >= 0
        is_valid &= type(described.likely_axis) is not bool
        draws = described.draws
        is_valid &= draws is None or (isinstance(draws, list) and all(type(x) is int for x in draws))
    except _OtherFormError:
        raise
    # Damaged JSON may raise UnicodeDecodeError, JSONDecodeError, KeyError, TypeError, RecursionError or other errors.
    except Exception as error:
        raise _damage_error(argument, name, f"{type(error).__name__}: {error}") from error
    if not is_valid:
        raise _damage_error(argument, name, f"{values!r:.200}")
    return described


def _check_alike(argument: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Raise ValueError with the differing arguments if the saved configuration does not match the metric."""
    mine = json.loads(json.dumps(mine, default=repr))
    differing = [
        f"{name}={theirs.get(name)!r} instead of {name}={mine.get(name)!r}"
        for name in {**mine, **theirs}
        if name not in _IRRELEVANT and mine.get(name) != theirs.get(name)
    ]
    if differing:
        raise ValueError(
            f"`{argument}` must have the configuration of this metric, got {'; '.join(differing)}{where}. "
            "Merge or load the state of a metric with the same arguments."
        )


def _text(encoded: Any) -> bytes:
    """Return the bytes of an encoded description. Any dtype is accepted, because casts preserve ASCII codes."""
    if not isinstance(encoded, Tensor) or encoded.dim() != 1 or not 0 < encoded.numel() <= 2**20:
        raise TypeError(f"`description` must be a tensor of up to 2^20 bytes, got {encoded!r:.100}")
    return bytes(encoded.detach().cpu().to(torch.int64).tolist())


def _damage_error(argument: str, name: str, what: str) -> ValueError:
    return ValueError(
        f"`{argument}` must contain a valid description as {name!r}, got a damaged one ({what}). "
        "Load an earlier checkpoint."
    )


def _shape(part: Any) -> Any:
    """Return shape and dtype of a tensor, or the number of chunks in a list, for an error message."""
    if isinstance(part, Tensor):
        return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
    return f"{len(part)} chunks" if isinstance(part, list) else part
