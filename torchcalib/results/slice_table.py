"""`SliceTable`: calibration of the intersections of several columns."""

import math
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchcalib.display.tables import Cell, Column, Table, attribute_column, fraction
from torchcalib.display.words import count, p_words, printable
from torchcalib.io.errors import short_name
from torchcalib.results.base import above
from torchcalib.results.group_table import MAX_NAME, SMALL_P, ColumnTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, eq=False, repr=False)
class SliceTable(ColumnTable):
    """Calibration of slices, the intersections of several columns, with the most significant first; see `slices`.

    Fields that are tuples have an entry for each slice in the table.

    Attributes:
        slice: Name of the slice, such as "age=old, sex=f".
        n: Total weight of the rows in the slice; the number of rows without weights.
        gap: Signed error: mean outcome minus mean confidence, in [-1, 1]. Below 0, confidences are too high.
        shrunk: Signed error without sampling noise, shrunk towards the mean of all slices; see `shrunk_to_mean`.
        ece: Expected calibration error (ECE) over equal-width bins, in [0, 1].
        noise_floor: Expected ECE of a calibrated model for these rows.
        ecce: Empirical cumulative calibration error (ECCE-R) of the rows: Kuiper's statistic, as
            `torchcalib.ks(norm="range")`. NaN without `cumulative`, and in a report.
        statistic: Larger statistic of the slice, mean gap or slope of the gaps, in standard deviations.
        p_value: p-value of the hypothesis that the model is calibrated in the slice, adjusted for all slices. In a
            calibrated model, the smallest one is at most 0.05 with probability 0.05.
        detectable: Smallest absolute signed error that is found with probability 0.8, for a level of 0.05 of all slices
            together.
        spread: Standard deviation of the signed error of a calibrated model.
        n_slices: Number of slices that were tested, including those that are not in the table.
        n_small: Number of slices that were not tested, because they have fewer than `min_size` rows.
        critical_value: A calibrated model has a larger statistic in any slice with probability 0.05.
        multicalibration_error: Largest quotient of ECCE and `spread` over all slices and all rows, times the spread of
            all rows: the value `mce` of MCGrad. NaN without `cumulative`, and in a report.
    """

    slice: tuple[str, ...]
    n: tuple[float, ...]
    gap: tuple[float, ...]
    shrunk: tuple[float, ...]
    ece: tuple[float, ...]
    noise_floor: tuple[float, ...]
    ecce: tuple[float, ...]
    statistic: tuple[float, ...]
    p_value: tuple[float, ...]
    detectable: tuple[float, ...]
    spread: tuple[float, ...]
    n_slices: int
    n_small: int
    critical_value: float
    multicalibration_error: float = math.nan

    @classmethod
    def empty(cls, n_small: int) -> "SliceTable":
        """Return the table of no slices, if `n_small` slices have too few rows."""
        names = [field.name for field in fields(cls)]
        columns: dict[str, Any] = dict.fromkeys(names[: names.index("n_slices")], ())
        return cls(**columns, n_slices=0, n_small=n_small, critical_value=math.nan)

    @property
    def smallest_p_value(self) -> float:
        """Smallest p-value, that of the hypothesis that all slices are calibrated; NaN without slices."""
        return min(self.p_value, default=math.nan)

    @property
    def sentence(self) -> str:
        """Result of the search as a clause."""
        if not self.n_slices:
            return "no slice has enough rows"
        n_found = sum(p < SMALL_P for p in self.p_value)
        if not n_found:
            p_value = p_words(self.smallest_p_value, equals="= ")
            return f"none of {count(self.n_slices)} is significantly miscalibrated (p {p_value})"
        return f"{count(n_found)} of {count(self.n_slices)} significantly miscalibrated"

    def layout(self, longest_name: int = MAX_NAME) -> Table:
        """Return a formatted `Table` with one row per slice.

        Args:
            longest_name: Maximum number of characters of the name of a slice. Longer names are shortened.
        """

        def name(text: str) -> Cell:
            return Cell(short_name(printable(text), longest_name), style="name")

        def direction(row: Any) -> Cell:
            too = "too low" if row.gap > 0 else "too high"
            return Cell(too if row.p_value < SMALL_P else "within chance")

        data = {key: attrgetter(key) for key in ("ecce", "statistic", "spread")}
        columns = [
            attribute_column("slice", "slice", name, is_number=False, wraps=True),
            attribute_column("n", "n", lambda n: Cell(count(n))),
            attribute_column("signed error", "gap", lambda x: fraction(x, "+")),
            attribute_column("shrunk", "shrunk", lambda x: fraction(x, "+")),
            attribute_column("ECE", "ece", fraction),
            attribute_column("expected if calibrated", "noise_floor", fraction),
            attribute_column("adjusted p", "p_value", lambda p: Cell(p_words(p))),
            attribute_column("detectable", "detectable", fraction),
            Column("probabilities", direction, is_number=False, data=data),
        ]
        small = f", {count(self.n_small)} have too few rows" if self.n_small else ""
        shown = f", the first {count(len(self))}" if len(self) < self.n_slices else ""
        title = f"Slices: {self.sentence}{small}{shown}"
        return self._table(columns, title, lambda row: not row.p_value < SMALL_P)

    def plot(self, ax: "Axes | None" = None, **options: Any) -> "Axes":
        """Draw the signed errors of the largest slices; see `torchcalib.plots.slice_diagram`."""
        axes: Axes = above("torchcalib.plots.slices:slice_diagram")(self, ax=ax, **options)
        return axes
