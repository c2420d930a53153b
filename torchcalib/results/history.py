"""`History`: metric values of all validations of a training run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torchcalib.display.tables import Cell, Column, Table, Tabular, fraction
from torchcalib.io.errors import shown

VERSION = 1
"""Version of the format of `History.to_dict`."""


@dataclass(frozen=True)
class HistoryRow:
    """Metric values of one validation."""

    epoch: int  # number of the epoch
    step: int  # training progress, such as the epoch or the number of optimizer steps; increases from row to row
    values: Mapping[str, float]  # metric values by name, without a prefix: `{"nll": 0.31, "ece": 0.04}`
    warning: str = ""  # text of the warning about over-confidence; empty without a warning


@dataclass(frozen=True)
class History(Tabular):
    """Metric values of all validations of a training run, in order.

    Attributes:
        rows: one row for each validation, sorted by `step`.

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
        """Names of all metric values, in the order of their first appearance."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))

    def column(self, name: str) -> tuple[float, ...]:
        """Return the metric value `name` of every row; NaN for rows without this value."""
        return tuple(row.values.get(name, math.nan) for row in self.rows)

    @property
    def best(self) -> HistoryRow | None:
        """First row with the lowest negative log-likelihood `"nll"`; None if this value is missing in all rows."""
        known = [row for row in self.rows if not math.isnan(row.values.get("nll", math.nan))]
        return min(known, key=lambda row: row.values["nll"], default=None)

    @property
    def warnings(self) -> tuple[HistoryRow, ...]:
        """Rows with a warning about over-confidence."""
        return tuple(row for row in self.rows if row.warning)

    @property
    def summary(self) -> str:
        """Sentences on the whole history: the validation with the lowest NLL, and what happened afterwards."""
        best = self.best
        if best is None:
            return "The history contains no NLL."
        last, unit = self.rows[-1], self.unit
        accuracy = best.values.get("accuracy", math.nan)
        with_accuracy = "" if math.isnan(accuracy) else f", accuracy {accuracy:.1%}"
        place, end = getattr(best, unit), getattr(last, unit)
        lowest = f"NLL was lowest in {unit} {place:,} of {end:,}: {best.values['nll']:.3g}{with_accuracy}."
        if len(self) == 1:
            return lowest
        if best is last:
            return f"{lowest} It was still falling at the end: training longer may help."
        nll, accuracy = (last.values.get(name, math.nan) for name in ("nll", "accuracy"))
        if math.isnan(nll):
            return f"{lowest} Use the model of that {unit}."
        with_accuracy = "" if math.isnan(accuracy) else f", and accuracy is {accuracy:.1%}"
        now = f"At the end it is {nll:.3g}{with_accuracy}."
        if accuracy > best.values.get("accuracy", math.nan):
            return f"{lowest} {now} Use the model of {unit} {place:,}, or calibrate the last model."
        return f"{lowest} {now} Use the model of {unit} {place:,}."

    @property
    def findings(self) -> tuple[str, ...]:
        """First sentence of each warning, without the advice, which refers to the epoch of the warning."""
        return tuple(row.warning.partition(". ")[0].removesuffix(".") + "." for row in self.warnings)

    @property
    def unit(self) -> str:
        """Field that identifies a row: `"epoch"`, or `"step"` if an epoch has several rows."""
        return "epoch" if len({row.epoch for row in self.rows}) == len(self.rows) else "step"

    def with_row(self, row: HistoryRow) -> Self:
        """Return a history with this row appended, after removing rows of the same or a later step.

        A training run that is resumed from a checkpoint repeats these steps.
        """
        return type(self)((*(known for known in self.rows if known.step < row.step), row))

    def layout(self) -> Table:
        """Return the table of all validations."""

        def position(row: HistoryRow) -> int:
            return int(getattr(row, self.unit))

        def column(name: str) -> Column:
            return Column(name, lambda row: fraction(row.values.get(name, math.nan)))

        first = Column(self.unit, lambda row: Cell(str(position(row))), data={self.unit: position})
        return Table.from_items([first, *map(column, self.names)], {"": self.rows}, index=[self.unit])

    def to_dict(self) -> dict[str, Any]:
        """Return the history as plain Python values, for a checkpoint or a file."""
        return {"version": VERSION, "rows": [{**vars(row), "values": dict(row.values)} for row in self.rows]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> Self:
        """Return the history from a result of `to_dict`.

        Raises:
            ValueError: if the version of the format differs.
        """
        version = saved.get("version")
        if version != VERSION:
            raise ValueError(
                f"`saved` must have format version {VERSION}, got {shown(version)}. "
                "Load it with the version of torchcalib that saved it."
            )
        return cls(tuple(HistoryRow(**row) for row in saved["rows"]))
