"""The table of bins, with the band in which the frequencies of a calibrated model lie."""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchcalib.core.sums import BinStats
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


@dataclass(frozen=True, eq=False, repr=False)
class BinTable:
    """What every bin holds. All fields have shape `(..., B)`; an empty bin has n = 0, gap 0 and NaN means.

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

    @property
    def tce(self) -> Tensor:
        """Share of all samples that the test rejects, in percent `(...)`; NaN without data."""
        return 100 * self.rejected.sum(-1) / self.n.sum(-1)


def _cell(name: str, value: float, empty: bool) -> str:
    if empty and name not in ("lower", "upper", "n", "share", "rejected"):
        return "-"
    return f"{value:.10g}" if name in ("n", "rejected") else f"{value:.4f}"
