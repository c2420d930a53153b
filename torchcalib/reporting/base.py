"""Base class of the builders of reports and comparisons: parts that are merged once, and saved states."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from torchcalib.core.saved import content_of, loading, saved_bytes, saved_value
from torchcalib.io.errors import shown


class Builder(ABC):
    """Base class of the builders of reports and comparisons, which can be saved, loaded and merged."""

    KIND: ClassVar[str]
    """Kind of the saved form."""
    _WRITERS: ClassVar[str]
    """Commands and methods that write such states, for errors."""

    def __init__(self) -> None:
        # Identifiers of all merged builders, to reject a second merge, and a digest of their rows, empty if unknown
        self._parts: dict[str, str] = {}

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All arguments of the builder, as a dict of plain Python values."""

    @property
    @abstractmethod
    def num_classes(self) -> int | None:
        """Number of classes of the predictions; None for a binary task, and before the first batch."""

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
        comparison takes at most 64 MB for each sum of a system, and 32 bytes for each of up to 2^20 ranked samples
        (34 MB).

        Example:
            >>> import torch
            >>> from torchcalib import ReportBuilder
            >>> builder = ReportBuilder(task="binary")
            >>> builder.update(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]))
            >>> ReportBuilder.from_bytes(builder.state_bytes()).report().n
            2.0
        """
        return saved_bytes(self.KIND, self.state())

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
        with loading(cls.KIND, name, cls._WRITERS):
            return cls.of_state(content_of(content, cls.KIND))

    def _check_other(self, other: Self) -> None:
        """Raise ValueError if another builder has other arguments or classes, or a part of this one."""
        mine, theirs = self.settings, other.settings
        if None not in (self.num_classes, other.num_classes):
            mine["classes"], theirs["classes"] = self.num_classes, other.num_classes
        names = [name for name in mine if mine[name] != theirs.get(name, mine[name]) and name != "validate_args"]
        if names:
            found = ", ".join(f"{name}={theirs[name]!r} instead of {name}={mine[name]!r}" for name in names)
            raise ValueError(
                f"`other` must have the same arguments, got {found}. Create all parts with the same arguments."
            )
        shared = [part for part in other._parts if part in self._parts]
        changed = [part for part in shared if self._parts[part] != other._parts[part]]
        if changed:
            raise ValueError(
                f"Part {shown(changed[0])} must have the same rows in all states, got different rows in two of them. "
                "Merge states of one run, in which the rows of a partition do not change."
            )
        if shared:
            raise ValueError(
                "`other` must contain no predictions of this builder, got a part that was merged before. "
                "Merge each builder once."
            )

    def _take_parts(self, state: Mapping[str, Any]) -> None:
        """Take the identifiers of merged builders from a state."""
        self._parts = dict(saved_value(state, "parts", dict))
        if not all(type(digest) is str for digest in self._parts.values()):
            raise ValueError("`parts` must have digests as text, got other values")


def agreed(name: str, mine: bool | None, theirs: bool | None) -> bool | None:
    """Return whether two builders have groups, clusters or ids; None for builders without predictions."""
    given = {mine, theirs} - {None}
    if len(given) > 1:
        raise ValueError(
            f"`other` must have {name} if this builder has {name}, got {name} in only one of them. "
            f"Pass `{name}` to `update` of both builders."
        )
    return next(iter(given), None)
