"""The table of bins, with the band in which the frequencies of a calibrated model lie."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from operator import itemgetter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.sums import BinStats
from torchcalib.core.tables import Cell, Column, Table, Tabular, fraction, short
from torchcalib.core.words import count, decimals, edge, percent, significant
from torchcalib.ops.count_moments import deviations_by_chance


def root(x: Tensor) -> Tensor:
    """Return sqrt(x), with gradient 0 at 0, where the slope is infinite and of no use."""
    zero = x == 0
    return x.masked_fill(zero, 1).sqrt().masked_fill(zero, 0)


def equal_width_edges(n_bins: int, like: Tensor) -> Tensor:
    """Return the edges `i / n_bins` of equal-width bins, `(n_bins + 1,)`."""
    return torch.arange(n_bins + 1, dtype=like.dtype, device=like.device) / n_bins


def consistency_band(b: BinStats, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """Return between which frequencies those of a calibrated model lie, bin by bin `(..., B)`; see `BinTable`."""
    tail = (1 - level) / 2
    expected, noise = b.sums[..., 1, :].detach(), b.noise
    ends = []
    for chance in (tail, 1 - tail):
        deviation = deviations_by_chance(torch.full_like(noise, chance)[None], b.n.detach(), expected, b.spread, noise)
        ends.append(((expected + deviation[0] * noise.sqrt()) / b.n.detach()).clamp(0, 1))
    return ends[0], ends[1]


Row = Mapping[str, float]


def _unless_empty(cell: Callable[[Row], Cell]) -> Callable[[Row], Cell]:
    """Return a function that leaves cells of bins without data empty."""
    return lambda row: cell(row) if row["n"] else Cell()


def _column(
    header: str, fields: str, cell: Callable[[Row], Cell], *, is_number: bool = True, only_page: bool = False
) -> Column:
    """Return a column of these fields of a bin, empty for bins without data but for edges and counts."""
    shown = cell if fields in ("lower upper", "n", "share") else _unless_empty(cell)
    data = {name: itemgetter(name) for name in fields.split()}
    return Column(header, shown, is_number=is_number, shown="page" if only_page else "always", data=data)


@dataclass(frozen=True, eq=False, repr=False)
class BinTable(Tabular):
    """Bins of predictions. All fields have shape `(..., B)`; an empty bin has n = 0, gap 0 and NaN means.

    A notebook shows it as a table. `to_pandas`, `to_markdown` and `to_latex` export it, and
    `torchcalib.plots.reliability_diagram` draws it.

    Attributes:
        lower, upper: edges of the bin.
        n: sum of weights: the number of samples where all weights are 1.
        share: n / N.
        confidence: mean confidence.
        frequency: mean outcome.
        gap: frequency - confidence; positive is under-confident, for confidences above 0.5.
        ecd: mean entropic calibration difference, in nats.
        band_low, band_high: between which the frequency lies in 95 % of data sets (or more, where few outcomes are
            possible), if the confidences are the probabilities of the outcomes: a consistency band, for each bin by
            itself. NaN where it is not known: of bins that follow from the outcomes, and of sums without noise.

    Source of the band:
        Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007).
    """

    lower: Tensor
    upper: Tensor
    n: Tensor
    share: Tensor
    confidence: Tensor
    frequency: Tensor
    gap: Tensor
    ecd: Tensor
    band_low: Tensor
    band_high: Tensor

    @classmethod
    def of(cls, b: BinStats, edges: Tensor) -> Self:
        """Read the table of bins between `edges (..., B + 1)`. Bins without sums of ECD have NaN there."""
        lower, upper = edges[..., :-1].expand(b.n.shape), edges[..., 1:].expand(b.n.shape)
        return cls(lower, upper, b.n, b.share, b.confidence, b.frequency, b.gap, b.ecd, *consistency_band(b))

    def mean(self, column: str) -> Tensor:
        """Mean of a column over all samples `(...)`, such as the mean confidence; NaN without data."""
        means: Tensor = getattr(self, column)
        return (self.share * means.masked_fill((self.n == 0) & (self.share == 0), 0)).sum(-1)

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes: `table[k]` is the table of class k."""
        if self.n.dim() < 2:
            raise IndexError("a table of one series has no batch axis to index")
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))

    def to_dict(self) -> dict[str, NDArray[np.float64]]:
        """Return every field as a numpy array, by name."""
        return {field.name: getattr(self, field.name).detach().cpu().numpy() for field in fields(self)}

    def layout(self, title: str = "") -> Table:
        """Return a row for each bin, under the index of its series if there are batch axes."""
        values = {name: column for name, column in self.to_dict().items() if column.ndim == self.n.dim()}
        series = list(product(*map(range, self.n.shape[:-1])))
        sections = {
            str(list(index)) if index else "": [
                dict(zip(values, row, strict=True))
                for row in zip(*(column[index].tolist() for column in values.values()), strict=True)
            ]
            for index in series
        }
        is_quiet: Callable[[Row], bool] = lambda row: not row["n"]  # noqa: E731
        return Table.of(self._columns(), sections, title, is_quiet=is_quiet, heading_name="index")

    def _columns(self) -> list[Column]:
        """Return the columns of the layout."""

        def band(row: Row) -> Cell:
            low, high = row["band_low"], row["band_high"]
            return Cell() if math.isnan(low) else Cell(f"{decimals(low)} to {decimals(high)}")

        def edges(row: Row) -> Cell:
            return Cell(f"{edge(row['lower'])} to {edge(row['upper'])}")

        return [
            _column("bin", "lower upper", edges, is_number=False),
            _column("count", "n", lambda row: Cell(count(row["n"]))),
            _column("share", "share", lambda row: Cell(percent(row["share"]))),
            _column("mean confidence", "confidence", lambda row: fraction(row["confidence"])),
            _column("frequency", "frequency", lambda row: fraction(row["frequency"])),
            _column("if calibrated, 95 %", "band_low band_high", band, only_page=True),
            _column("gap", "gap", lambda row: fraction(row["gap"], "+")),
            _column("mean ECD (nats)", "ecd", lambda row: fraction(row["ecd"], "+")),
        ]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        if self.n.dim() > 1:
            return "\n\n".join(f"[{index}]\n{self[index]}" for index in range(self.n.shape[0]))
        # What holds more than one number for a bin is no column of text.
        names = [field.name for field in fields(self) if getattr(self, field.name).dim() == 1]
        lines = ["".join(f"{name:>11}" for name in names)]
        for row in zip(*(getattr(self, name).tolist() for name in names), strict=True):
            cells = dict(zip(names, row, strict=True))
            empty = cells["n"] == 0
            lines.append("".join(f"{_cell(name, cells[name], empty):>11}" for name in names))
        return "\n".join(lines)


@dataclass(frozen=True, eq=False, repr=False)
class TCETable(BinTable):
    """A `BinTable` with what a test says of every bin: which predictions do not fit the outcomes that the bin holds.

    `torchcalib.plots.tce_diagram` draws it. Bins run from the least predictions to the largest.

    Attributes:
        rejected: `(..., B)` samples of the bin whose prediction the test rejects, weights counted; 0 to n.
        quantiles: `(..., B, 33)` the predictions of the bin at 33 evenly spaced ranks, from its least to its largest;
            NaN in an empty bin.

    Source:
        [TCE] Matsubara, Tax, Mudd, Guy: TCE: A Test-Based Approach to Measuring Calibration Error, UAI 2023, eq. 7.
    """

    rejected: Tensor
    quantiles: Tensor

    def _columns(self) -> list[Column]:
        def edges(row: Row) -> Cell:
            return Cell(f"{significant(row['lower'])} to {significant(row['upper'])}")

        return [
            _column("bin", "lower upper", edges, is_number=False),
            _column("count", "n", lambda row: Cell(count(row["n"]))),
            _column("mean prediction", "confidence", lambda row: short(row["confidence"])),
            _column("empirical probability", "frequency", lambda row: short(row["frequency"])),
            _column("rejected", "rejected", lambda row: Cell(count(row["rejected"]))),
            Column(
                "share rejected",
                _unless_empty(lambda row: Cell(percent(row["rejected"] / row["n"]))),
                data={"share_rejected": lambda row: row["rejected"] / row["n"] if row["n"] else math.nan},
            ),
        ]

    @property
    def tce(self) -> Tensor:
        """Share of all samples that the test rejects, in percent `(...)`; NaN without data."""
        return 100 * self.rejected.sum(-1) / self.n.sum(-1)


def _cell(name: str, value: float, empty: bool) -> str:
    if empty and name not in ("lower", "upper", "n", "share", "rejected"):
        return "-"
    return f"{value:.10g}" if name in ("n", "rejected") else f"{value:.4f}"
