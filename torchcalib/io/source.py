"""What predictions were read from, as a value that adds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torchcalib.io.reader import InputError, printable
from torchcalib.io.saved import saved_value

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """What was read, of one or more files that are alike.

    Attributes:
        files: their names, in the order in which their rows are read.
        format: see `PredictionFiles`, as for the names.
        preds: key, columns or stem that holds the predictions.
        target: the same for the targets.
        weights: the same for the weights; None without weights.
        from_logits: how the predictions are read.
        shape: of all predictions.
        dtype: of the predictions.
        rows: dtype and shape of one row of predictions, targets and weights, in words.
        ignored: other arrays that were found in the first file.
        groups: what holds the groups; None without groups.
    """

    files: tuple[str, ...]
    format: str
    preds: str
    target: str
    weights: str | None
    from_logits: bool
    shape: tuple[int, ...]
    dtype: str
    rows: tuple[str, ...]
    ignored: tuple[str, ...]
    groups: str | None = None

    def __add__(self, other: Self) -> Self:
        """Return the source of the rows of both.

        Raises:
            InputError: their files could not be read together.
        """
        for name in ("format", "preds", "target", "weights", "groups", "from_logits", "dtype", "rows"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise InputError(
                    f"`{other.files[0]}` must be read as `{self.files[0]}` is, got {name}={theirs!r} and {mine!r}. "
                    "Read the files apart, or write them alike."
                )
        shape = (self.shape[0] + other.shape[0], *self.shape[1:])
        return replace(self, files=self.files + other.files, shape=shape)

    def in_words(self) -> dict[str, Any]:
        """Return what was read, for people."""
        source = {
            "files": list(self.files),
            "format": self.format,
            "predictions": f"{self.preds}, read as {'logits' if self.from_logits else 'probabilities'}",
            "targets": self.target,
            "weights": self.weights or "none",
            **({} if self.groups is None else {"groups": self.groups}),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "not used": list(self.ignored),
        }
        return {
            name: [_shown(v) for v in value] if isinstance(value, list) else _shown(value)
            for name, value in source.items()
        }

    def state(self) -> dict[str, Any]:
        """Return plain values, of which `of_state` makes the source again."""
        return asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the source that was saved.

        Raises:
            ValueError: these are not the values of one.
        """

        def text(name: str) -> str:
            return saved_value(state, name, str)

        def several(name: str, kind: type[T]) -> tuple[T, ...]:
            values = saved_value(state, name, tuple)
            return tuple(saved_value({name: value}, name, kind) for value in values)

        source = cls(
            files=several("files", str),
            format=text("format"),
            preds=text("preds"),
            target=text("target"),
            weights=None if state.get("weights") is None else text("weights"),
            from_logits=saved_value(state, "from_logits", bool),
            shape=several("shape", int),
            dtype=text("dtype"),
            rows=several("rows", str),
            ignored=several("ignored", str),
            groups=None if state.get("groups") is None else text("groups"),
        )
        if not source.files or not source.shape:
            raise ValueError("a source must have files and a shape, got none")
        return source


def _shown(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value
