"""Check and load saved metric states, which contain a description of the metric configuration."""

import json
from collections.abc import Mapping
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchcalib._version import __version__
from torchcalib.core.state import SampleState, SumState
from torchcalib.io.errors import InputError, shown
from torchcalib.io.saved import load_saved

if TYPE_CHECKING:
    from torchcalib.metrics.engine import StatefulMetric

STATE_FORMAT = 9
"""Version of the state format. Increase it when the parts of a state or their meaning change."""

DESCRIPTION = "description"
"""Key of the description in a saved state."""

_MAX_BYTES = 2**20
"""Maximum size of a description in bytes. Larger ones are rejected before parsing."""

_IRRELEVANT = {"nan_policy"}
"""Options that may differ from the saved state. Training can resume with `nan_policy="drop"` after a NaN."""

_OLD_PREFIXES = (*SumState.names, *SampleState.names[:-1], "invalid")
"""Prefixes of the entry names in old formats without a description, used to detect such states."""


class Description(NamedTuple):
    """Description of a state: the metric's configuration and the number of updates."""

    configuration: Mapping[str, Any]  # arguments that the state depends on, as values that JSON supports
    n_updates: int  # number of calls of `update`
    likely_axis: int | None  # see `InputFormat.likely_axis`
    draws: list[int] | None  # seed and rank for the replicate weights of `Bootstrapped`; None for all other metrics

    def encoded(self) -> Tensor:
        """Encode the description as JSON in a uint8 tensor `(n,)`, which all checkpoint formats support."""
        text = json.dumps({"format": STATE_FORMAT, "torchcalib": __version__, **self._asdict()}, default=repr)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def contains_state(saved: Mapping[str, Any], prefix: str) -> bool:
    """Return True if a dict contains any part of a metric state, in any format, under keys with this prefix."""
    names = {prefix + name for name in (*SumState.names, *SampleState.names, DESCRIPTION)}
    stems = tuple(f"{prefix}{name}_" for name in _OLD_PREFIXES)
    return any(name in names or name.startswith(stems) for name in saved)


def saved_state(content: bytes) -> dict[str, Any]:
    """Return the dict in the bytes of a state. The bytes are checked before they are decoded, and no code is run."""
    try:
        saved = load_saved(content)
        if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
            raise ValueError("the state must be a dict with names as keys")
        return saved
    # Damaged bytes cause many types of errors, such as BadZipFile, UnpicklingError and KeyError.
    except Exception as error:
        message = shorten(str(error), 200, placeholder=" ...").rstrip(".")
        raise InputError(
            f"`content` must be the complete state of a metric, got {type(error).__name__}: {message}. "
            "Create it with `state_bytes`."
        ) from error


def read_state(
    metric: "StatefulMetric[Any]", argument: str, saved: Mapping[str, Any], prefix: str = ""
) -> tuple[Any, Description]:
    """Check a saved metric state. Return a copy on the device of the metric, and the description.

    Keys of the state start with `prefix`; other keys are ignored. `argument` is the name in error messages. Raise
    ValueError if the state is damaged, or belongs to a different metric or format.
    """
    described = _read_description(argument, saved, prefix)
    _check_alike(argument, described.configuration, metric._configuration(), f" at {prefix!r}" if prefix else "")
    names = [prefix + name for name in metric.kind.names]
    complete = all(name in saved for name in names)
    state = metric.kind.check([saved[name] for name in names], metric.state) if complete else None
    if state is None:
        mine = zip(names, metric.kind.parts(metric.state), strict=True)
        expected = {name: _shape(part) for name, part in mine}
        found = {name: _shape(saved[name]) for name in names if name in saved}
        raise ValueError(
            f"`{argument}` must contain {expected}, got {found}. It is damaged, or its dtype was changed. Load the "
            "state exactly as it was saved."
        )
    return state, described


def _read_description(argument: str, saved: Mapping[str, Any], prefix: str) -> Description:
    name = prefix + DESCRIPTION
    encoded = saved.get(name)
    if encoded is None:
        raise ValueError(
            f"`{argument}` must contain {name!r}, got only {sorted(saved)}. "
            "Save the state with state_dict() of a persistent metric and this version of torchcalib."
        )
    try:
        values = json.loads(_text(encoded))
        written_as, configuration = values["format"], values["configuration"]
        n_updates, likely_axis, draws = values["n_updates"], values["likely_axis"], values["draws"]
    # Damaged JSON may raise UnicodeDecodeError, JSONDecodeError, KeyError, TypeError, RecursionError or other errors.
    except Exception as error:
        raise _damage_error(argument, name, f"{type(error).__name__}: {error}") from error
    if type(written_as) is not int or written_as < 1:
        raise _damage_error(argument, name, f"format {written_as!r}")
    if written_as != STATE_FORMAT:
        advice = (
            f"Update torchcalib from version {__version__}."
            if written_as > STATE_FORMAT
            else "Load it with that version, or update a new metric with the data."
        )
        raise ValueError(
            f"`{argument}` must have state format {STATE_FORMAT}, got "
            f"{shown(name)} with format {written_as}, written by "
            f"torchcalib {values.get('torchcalib')}. {advice}"
        )
    is_whole = isinstance(configuration, dict) and type(n_updates) is int and n_updates >= 0
    is_whole = is_whole and (likely_axis is None or (type(likely_axis) is int and likely_axis in (-1, 1)))
    if not is_whole or not (draws is None or (isinstance(draws, list) and all(type(x) is int for x in draws))):
        raise _damage_error(argument, name, f"{values!r:.200}")
    return Description(configuration, n_updates, likely_axis, draws)


def _check_alike(argument: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Raise ValueError with the differing arguments if the saved configuration does not match the metric."""
    theirs, mine = (json.loads(json.dumps(c, default=repr)) for c in (theirs, mine))
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
    if not isinstance(encoded, Tensor) or encoded.dim() != 1 or not 0 < encoded.numel() <= _MAX_BYTES:
        raise TypeError(f"`description` must be a tensor of up to {_MAX_BYTES} bytes, got {encoded!r:.100}")
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
