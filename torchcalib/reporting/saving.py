"""Base class of builders: serialize the state, load it from files, and gather it from all ranks."""

import io
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.distributed as dist

from torchcalib.core.gathering import exchanged, gathered_bytes
from torchcalib.io.errors import InputError, shown
from torchcalib.io.saved import load_saved, saved_bytes

if TYPE_CHECKING:
    from torchcalib.reporting.building import ReportBuilder

GATHER = "gather a report"


class Builder(ABC):
    """Base class of the builders of reports and comparisons, which can be saved, loaded and merged."""

    FORMAT: ClassVar[tuple[str, int]]
    """Name and version of the format of a state. Increase the version when the content of a state changes."""
    _WRITERS: ClassVar[str]
    """What writes such states, for errors."""

    def __init__(self) -> None:
        # Identifiers of all merged builders, to reject a second merge, and a digest of their rows, empty if unknown
        self._parts: dict[str, str] = {}

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return settings and accumulated data as a dict of tensors and Python values, which `of_state` restores."""

    @classmethod
    @abstractmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return a builder on the CPU from a result of `state()`. An invalid state raises an exception of any type."""

    @property
    def parts(self) -> dict[str, str]:
        """Identifier of each merged builder, with the digest of its rows from `as_part`; else an empty string."""
        return dict(self._parts)

    def as_part(self, identifier: str, digest: str) -> None:
        """Name a builder after the partition of a data set that it contains, and store a digest of its rows.

        Builders with the same identifier cannot be merged. A partition is therefore counted once.
        """
        self._parts = {identifier: digest}

    def state_bytes(self) -> bytes:
        """Return the state as bytes, the content of a file that `save` writes; `from_bytes` restores the builder.

        The size is bounded. Sums take a few kilobytes for each class, and sums by cluster up to 128 MB for each mode.
        Up to 2^24 exact samples take 5 to 17 bytes each (multi-label: for each label), and a sketch of more samples at
        most 110 MB. Predictions for calibrators and intervals take up to 2^26 values, 256 MB for float32. They are
        omitted with `with_calibration=False` and `with_intervals=False`, and above their limits. The state of a
        comparison takes at most 64 MB for each sum of a system, and 20 MB for its ranked samples.

        Example:
            >>> import torch
            >>> from torchcalib import ReportBuilder
            >>> builder = ReportBuilder(task="binary")
            >>> builder.update(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
            >>> ReportBuilder.from_bytes(builder.state_bytes()).report().n
            2.0
        """
        name, version = self.FORMAT
        return saved_bytes({"format": name, "version": version, **self.state()})

    @classmethod
    def from_bytes(cls, content: bytes) -> Self:
        """Restore a builder from `state_bytes`, with the checks of `load`: untrusted bytes are safe.

        Args:
            content: bytes from `state_bytes`, or the content of a file that `save` wrote.

        Returns:
            The builder, on the CPU.

        Raises:
            ValueError: if the bytes are not such a state, are damaged, or have another version.
        """
        return cls._loaded(content, "content")

    @classmethod
    def _loaded(cls, content: Path | bytes, name: str) -> Self:
        """Load a builder from a file, or from its content. `name` is that in errors."""
        try:
            return cls._of_saved(load_saved(content))
        except (OSError, _OtherVersionError):
            raise
        # Damaged files cause many types of errors, such as BadZipFile, UnpicklingError and KeyError.
        except Exception as error:
            what, message = cls.FORMAT[0].partition(" ")[2], shorten(str(error), 200, placeholder=" ...").rstrip(".")
            raise InputError(
                f"`{name}` must be a complete {what}, got {type(error).__name__}: {message}. Create it with "
                f"{cls._WRITERS}."
            ) from error

    @classmethod
    def _of_saved(cls, state: Any) -> Self:
        """Return the saved builder; raise an exception of any type if the state is invalid."""
        name, version = cls.FORMAT
        if not isinstance(state, dict) or state.get("format") != name:
            raise ValueError(f"`format` must be {name!r}, got another file. Load a {name.partition(' ')[2]}.")
        if state.get("version") != version:
            raise _OtherVersionError(
                f"`version` of the {name.partition(' ')[2]} must be {version}, got {shown(state.get('version'))}. "
                "Save and merge all parts with the same version of torchcalib."
            )
        return cls.of_state(state)


class _OtherVersionError(InputError):
    """State in another version of the format."""


def parts_of_ranks(builder: "ReportBuilder | None", process_group: Any = None) -> "list[ReportBuilder]":
    """Gather the builders of all ranks on rank 0, in the order of ranks; return an empty list on other ranks.

    `builder` is None on a rank without data. Size limits are applied to the totals of all ranks before sending.
    """
    from torchcalib.reporting.building import ReportBuilder

    sizes = exchanged(GATHER, (0, 0, 0) if builder is None else builder.held, process_group)
    rank, mine, problem = dist.get_rank(process_group), b"", None
    try:
        if builder is not None:
            builder.limit(*map(sum, zip(*sizes, strict=True)))
            mine = b"" if rank == 0 else builder.state_bytes()
    except Exception as error:  # for example too little memory; without an answer, other ranks would wait
        problem = error
    received = gathered_bytes(GATHER, mine, process_group, problem=problem)
    parts = [builder] if builder is not None and rank == 0 else []
    try:
        states = (io.BytesIO(content) for content in received if content)
        parts += [ReportBuilder._of_saved(torch.load(state, map_location="cpu", weights_only=True)) for state in states]
    except Exception as error:
        problem = error
    exchanged(GATHER, (), process_group, problem=problem)
    return parts
