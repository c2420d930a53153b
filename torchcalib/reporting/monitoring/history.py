"""What was measured in every epoch, as data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

VERSION = 1
"""Of the layout of `History.to_dict`."""


@dataclass(frozen=True)
class HistoryRow:
    """One validation.

    Attributes:
        epoch: in which epoch it was, in the numbering of who trains.
        step: how far training had come: the epoch again, or a finer count such as optimizer steps. Rows are in its
            order.
        values: what was measured, by name, without a prefix: `{"nll": 0.31, "ece": 0.04}`.
        warning: what was said of it; empty if there was nothing to say.
    """

    epoch: int
    step: int
    values: Mapping[str, float]
    warning: str = ""


@dataclass(frozen=True)
class History:
    """The validations of a training, from the first to the last.

    Attributes:
        rows: one for each, by rising `step`.

    Example:
        >>> history = History().with_row(HistoryRow(1, 1, {"nll": 0.9})).with_row(HistoryRow(2, 2, {"nll": 0.7}))
        >>> history.column("nll"), history.best.epoch
        ((0.9, 0.7), 2)
    """

    rows: tuple[HistoryRow, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that was measured."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))

    def column(self, name: str) -> tuple[float, ...]:
        """Return the values of this name, one for each row; NaN where there is none."""
        return tuple(row.values.get(name, math.nan) for row in self.rows)

    @property
    def best(self) -> HistoryRow | None:
        """The row of the least NLL, the first on ties; None if there is none."""
        known = [row for row in self.rows if not math.isnan(row.values.get("nll", math.nan))]
        return min(known, key=lambda row: row.values["nll"], default=None)

    @property
    def warnings(self) -> tuple[HistoryRow, ...]:
        """Rows of which something was said."""
        return tuple(row for row in self.rows if row.warning)

    @property
    def unit(self) -> str:
        """What tells rows apart: `"epoch"`, or `"step"` where some epoch has several."""
        return "epoch" if len({row.epoch for row in self.rows}) == len(self.rows) else "step"

    def with_row(self, row: HistoryRow) -> Self:
        """Return the history with another row, in place of those that are not before it.

        A training that goes back to a checkpoint goes the same steps again: what was seen of them before is no part of
        the history of the model that it ends with.
        """
        return type(self)((*(known for known in self.rows if known.step < row.step), row))

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, for a checkpoint or a file."""
        rows = [
            {"epoch": row.epoch, "step": row.step, "values": dict(row.values), "warning": row.warning}
            for row in self.rows
        ]
        return {"version": VERSION, "rows": rows}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Return the history that `to_dict` was called on.

        Raises:
            ValueError: for what `to_dict` of this version does not return.
        """
        version = saved.get("version")
        if version != VERSION:
            raise ValueError(
                f"`saved` must be a history of version {VERSION}, got {version!r}. "
                "Read it with the version of torchcalib that wrote it."
            )
        return cls(tuple(HistoryRow(**row) for row in saved["rows"]))
