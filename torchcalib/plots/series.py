"""The columns of one table, ready to be drawn."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchcalib.core.bins import BinTable

Column = NDArray[np.float64]


class Bins(NamedTuple):
    """The columns of one series that are drawn, on the CPU."""

    lower: Column
    upper: Column
    n: Column
    share: Column
    confidence: Column
    frequency: Column
    gap: Column
    band_low: Column
    band_high: Column

    @property
    def is_real(self) -> NDArray[np.bool_]:
        """False for bins of no width and no samples, which only fill up a row of a batch."""
        return (self.n > 0) | (self.upper > self.lower)

    def mean(self, column: Column) -> float:
        """Mean of a column over all samples; empty bins hold NaN, and no share."""
        held = self.n > 0
        return float((self.share * column)[held].sum())


def columns_of(table: BinTable, name: str = "table") -> Bins:
    """Return the columns of a table of one series; a batch is a ValueError, which calls the table by `name`."""
    if table.n.dim() != 1:
        raise ValueError(
            f"`{name}` must hold one series of bins, got a batch of shape {tuple(table.n.shape)}. "
            f"Draw one of them: `{name}[k]`."
        )
    columns = table.to_dict()
    return Bins(**{name: columns[name] for name in Bins._fields})
