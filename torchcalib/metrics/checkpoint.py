"""Saved states: a state describes what it counts, so that it is never taken for that of another metric."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchcalib._version import __version__
from torchcalib.core.state import SamplesKind, SumsKind

if TYPE_CHECKING:
    from torchcalib.metrics.base import CalibrationMetric

STATE_FORMAT = 4
"""Goes up by one whenever the parts of a state, or their meaning, change."""

DESCRIPTION = "description"
"""Name of the description among the parts of a saved state."""

_MOST_BYTES = 2**20
_IRRELEVANT = {"nan_policy"}
"""Options in which two states may differ: a run that ends with a NaN can continue from its checkpoint with "drop"."""

_UNDESCRIBED = (*SumsKind.names, *SamplesKind.names[:-1], "invalid")
"""Prefixes of the names in states that had no description."""


class Description(NamedTuple):
    """What a state counts.

    Attributes:
        configuration: the arguments that the state depends on, as JSON holds them.
        n_updates: number of updates of the metric.
        draws: seed and rank of the draws of a bootstrap; None for others.
    """

    configuration: Mapping[str, Any]
    n_updates: int
    draws: list[int] | None

    def encoded(self) -> Tensor:
        """Return a uint8 tensor of JSON: every tool that saves tensors can save it."""
        text = json.dumps({"format": STATE_FORMAT, "torchcalib": __version__, **self._asdict()}, default=repr)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def holds_state(saved: Mapping[str, Any], prefix: str) -> bool:
    """Return whether a dict holds a state, or part of one, of any kind and format, at this prefix."""
    names = {prefix + name for name in (*SumsKind.names, *SamplesKind.names, DESCRIPTION)}
    stems = tuple(f"{prefix}{name}_" for name in _UNDESCRIBED)
    return any(name in names or name.startswith(stems) for name in saved)


def read_state(
    metric: "CalibrationMetric[Any]", argument: str, saved: Mapping[str, Any], prefix: str = ""
) -> tuple[Any, Description]:
    """Return a copy of a saved state, on the device of the metric, and its description.

    Args:
        metric: the metric that is to take over the state.
        argument: the argument that errors name.
        saved: a dict of states.
        prefix: prefix of the names of this state.

    Raises:
        ValueError: for a damaged state, and for one of another metric or format.
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
            f"`{argument}` must hold {expected}, got {found}. It is damaged, or was cast: take it as it was saved."
        )
    return state, described


def _read_description(argument: str, saved: Mapping[str, Any], prefix: str) -> Description:
    name = prefix + DESCRIPTION
    encoded = saved.get(name)
    if encoded is None:
        raise ValueError(
            f"`{argument}` must hold {name!r}, which says what the state counts, got only {sorted(saved)}. "
            "Save it with state_dict() of a persistent metric of this version of torchcalib."
        )
    try:
        values = json.loads(_text(encoded))
        written_as, configuration = values["format"], values["configuration"]
        n_updates, draws = values["n_updates"], values["draws"]
    # A damaged text fails in many ways: UnicodeDecodeError, JSONDecodeError, KeyError, TypeError, RecursionError ...
    except Exception as error:
        raise _damaged(argument, name, f"{type(error).__name__}: {error}") from error
    if type(written_as) is not int or written_as < 1:
        raise _damaged(argument, name, f"format {written_as!r}")
    if written_as != STATE_FORMAT:
        advice = (
            f". Update torchcalib, which is {__version__} here."
            if written_as > STATE_FORMAT
            else ": states held less then. Read it with that version, or start anew."
        )
        raise ValueError(
            f"`{argument}` must be of format {STATE_FORMAT}, got {name!r} of format {written_as}, which "
            f"torchcalib {values.get('torchcalib')} has written{advice}"
        )
    is_whole = isinstance(configuration, dict) and type(n_updates) is int and n_updates >= 0
    if not is_whole or not (draws is None or (isinstance(draws, list) and all(type(x) is int for x in draws))):
        raise _damaged(argument, name, f"{values!r:.200}")
    return Description(configuration, n_updates, draws)


def _check_alike(argument: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], where: str) -> None:
    """Raise unless two configurations count the same thing, and name the difference."""
    theirs, mine = (json.loads(json.dumps(c, default=repr)) for c in (theirs, mine))
    differing = [
        f"{name}={theirs.get(name)!r} into {name}={mine.get(name)!r}"
        for name in {**mine, **theirs}
        if name not in _IRRELEVANT and mine.get(name) != theirs.get(name)
    ]
    if differing:
        raise ValueError(
            f"`{argument}` must count the same thing, got {'; '.join(differing)}{where}. "
            "Merge or load the state of a metric that was made with the same arguments."
        )


def _text(encoded: Any) -> bytes:
    """Return the bytes of a description, of any dtype that a tool has cast them to: ASCII is exact in all."""
    if not isinstance(encoded, Tensor) or encoded.dim() != 1 or not 0 < encoded.numel() <= _MOST_BYTES:
        raise TypeError(f"no uint8 tensor (n,), but {encoded!r:.100}")
    return bytes(encoded.detach().cpu().to(torch.int64).tolist())


def _damaged(argument: str, name: str, what: str) -> ValueError:
    return ValueError(
        f"`{argument}` must hold a whole description as {name!r}, got a damaged one ({what}). "
        "Take an earlier checkpoint."
    )


def _shape(part: Any) -> Any:
    """Describe a part of a state, for an error."""
    if isinstance(part, Tensor):
        return f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}"
    return f"{len(part)} chunks" if isinstance(part, list) else part
