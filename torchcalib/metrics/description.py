"""What a saved state says of itself, so that it is never taken for another one."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib._version import __version__

STATE_FORMAT = 4
"""Goes up by one whenever the parts of a state, or what they mean, change."""

DESCRIPTION = "description"
"""Name of the description among the parts of a saved state."""

_MOST_BYTES = 2**20
_SUMS_MEAN_THE_SAME = {"nan_policy"}
"""Options that two states need not agree on: a run that ends with a NaN goes on from its checkpoint with "drop"."""


class Description(NamedTuple):
    """What a state counts.

    Attributes:
        configuration: the arguments that the state depends on, as JSON holds them.
        n_updates: how often the metric had been updated.
        draws: seed and rank of the draws of a bootstrap; None for others.
    """

    configuration: Mapping[str, Any]
    n_updates: int
    draws: list[int] | None

    def encoded(self) -> Tensor:
        """Return a uint8 tensor of JSON: every tool that saves tensors can save it."""
        text = json.dumps({"format": STATE_FORMAT, "torchcalib": __version__, **self._asdict()}, default=repr)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def read_description(argument: str, saved: Mapping[str, Any], prefix: str = "") -> Description:
    """Find the description in a saved state, and read it.

    Args:
        argument: what the error is about.
        saved: a dict of states.
        prefix: of the names of this one.

    Raises:
        ValueError: there is none, it is damaged, or it is of another format.
    """
    name = prefix + DESCRIPTION
    encoded = saved.get(name)
    if encoded is None:
        raise ValueError(
            f"`{argument}` must hold {name!r}, which says what the state counts, got only {sorted(saved)}. "
            "Save it with state_dict() of a persistent metric of this version of torchcalib."
        )
    try:
        values = json.loads(_text(encoded))
        described = values["format"], values["configuration"], values["n_updates"], values["draws"]
    # A damaged text fails in many ways: UnicodeDecodeError, JSONDecodeError, KeyError, TypeError, RecursionError ...
    except Exception as error:
        raise _damaged(argument, name, f"{type(error).__name__}: {error}") from error
    written_as, configuration, n_updates, draws = described
    if type(written_as) is not int or written_as < 1:
        raise _damaged(argument, name, f"format {written_as!r}")
    if written_as > STATE_FORMAT:
        raise ValueError(
            f"`{argument}` must be of format {STATE_FORMAT}, got {name!r} of format {written_as}, which "
            f"torchcalib {values.get('torchcalib')} has written. Update torchcalib, which is {__version__} here."
        )
    if written_as < STATE_FORMAT:
        raise ValueError(
            f"`{argument}` must be of format {STATE_FORMAT}, got {name!r} of format {written_as}, which "
            f"torchcalib {values.get('torchcalib')} has written: states held less then. Read it with that version, "
            "or start anew."
        )
    is_whole = isinstance(configuration, dict) and type(n_updates) is int and n_updates >= 0
    if not is_whole or not (draws is None or (isinstance(draws, list) and all(type(x) is int for x in draws))):
        raise _damaged(argument, name, f"{values!r:.200}")
    return Description(configuration, n_updates, draws)


def check_alike(argument: str, theirs: Mapping[str, Any], mine: Mapping[str, Any], where: str = "") -> None:
    """Raise unless two configurations count the same thing, and name what differs."""
    theirs, mine = (json.loads(json.dumps(c, default=repr)) for c in (theirs, mine))
    differing = [
        f"{name}={theirs.get(name)!r} into {name}={mine.get(name)!r}"
        for name in {**mine, **theirs}
        if name not in _SUMS_MEAN_THE_SAME and mine.get(name) != theirs.get(name)
    ]
    if differing:
        raise ValueError(
            f"`{argument}` must count the same thing, got {'; '.join(differing)}{where}. "
            "Merge or load the state of a metric that was made with the same arguments."
        )


def _text(encoded: Any) -> bytes:
    """The bytes of a description, whatever dtype a tool has cast them to: all of ASCII is exact in any."""
    if not isinstance(encoded, Tensor) or encoded.dim() != 1 or not 0 < encoded.numel() <= _MOST_BYTES:
        raise TypeError(f"no uint8 tensor (n,), but {encoded!r:.100}")
    return bytes(encoded.detach().cpu().to(torch.int64).tolist())


def _damaged(argument: str, name: str, what: str) -> ValueError:
    return ValueError(
        f"`{argument}` must hold a whole description as {name!r}, got a damaged one ({what}). "
        "Take an earlier checkpoint."
    )
