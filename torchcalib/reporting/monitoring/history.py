"""Values of all validations of a training, as data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torchcalib.core.tables import Cell, Column, Table, Tabular, fraction

VERSION = 1
"""Version of `History.to_dict`."""


@dataclass(frozen=True)
class HistoryRow:
    """One validation.

    Attributes:
        epoch: number of the epoch.
        step: progress of the training: the epoch again, or a finer count such as optimizer steps. Rows are in this
            order.
        values: by name, without a prefix: `{"nll": 0.31, "ece": 0.04}`.
        warning: of over-confidence; empty for none.
    """

    epoch: int
    step: int
    values: Mapping[str, float]
    warning: str = ""


@dataclass(frozen=True)
class History(Tabular):
    """The validations of a training, from the first to the last.

    Attributes:
        rows: one for each, by rising `step`.

    Example:
        >>> history = History().with_row(HistoryRow(1, 1, {"nll": 0.9})).with_row(HistoryRow(2, 2, {"nll": 0.7}))
        >>> history.column("nll"), history.best.epoch
        ((0.9, 0.7), 2)
    """

    rows: tuple[HistoryRow, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all values."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))

    def column(self, name: str) -> tuple[float, ...]:
        """Return the values of this name, one for each row; NaN for a row without."""
        return tuple(row.values.get(name, math.nan) for row in self.rows)

    @property
    def best(self) -> HistoryRow | None:
        """The row of the lowest NLL, the first on ties; None if there is no NLL."""
        known = [row for row in self.rows if not math.isnan(row.values.get("nll", math.nan))]
        return min(known, key=lambda row: row.values["nll"], default=None)

    @property
    def warnings(self) -> tuple[HistoryRow, ...]:
        """Rows with a warning."""
        return tuple(row for row in self.rows if row.warning)

    @property
    def unit(self) -> str:
        """The field that identifies rows: `"epoch"`, or `"step"` where some epoch has several."""
        return "epoch" if len({row.epoch for row in self.rows}) == len(self.rows) else "step"

    def with_row(self, row: HistoryRow) -> Self:
        """Return the history up to this row, and this row.

        Later rows are removed: a training that returns to a checkpoint repeats their steps.
        """
        return type(self)((*(known for known in self.rows if known.step < row.step), row))

    def layout(self) -> Table:
        """Return every validation."""

        def at(row: HistoryRow) -> int:
            return int(getattr(row, self.unit))

        def column(name: str) -> Column:
            return Column(name, lambda row: fraction(row.values.get(name, math.nan)))

        first = Column(self.unit, lambda row: Cell(str(at(row))), data={self.unit: at})
        return Table.of([first, *map(column, self.names)], {"": self.rows}, index=[self.unit])

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, for a checkpoint or a file."""
        return {"version": VERSION, "rows": [{**vars(row), "values": dict(row.values)} for row in self.rows]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Return the history of `to_dict`.

        Raises:
            ValueError: for another version.
        """
        version = saved.get("version")
        if version != VERSION:
            raise ValueError(
                f"`saved` must be a history of version {VERSION}, got {version!r}. "
                "Read it with the version of torchcalib that wrote it."
            )
        return cls(tuple(HistoryRow(**row) for row in saved["rows"]))
