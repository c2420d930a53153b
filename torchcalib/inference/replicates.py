"""Replicates of outcomes: what else could have come of the same confidences, if frequencies were these."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats
from torchcalib.ops.count_moments import deviations_by_chance, unit_of
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.once import once

_FEW = 8  # outcomes that are expected of a cell, or as many that are not
_MOST_CELLS = 2**32  # of a series: as far apart are the counters that two of them draw by


@dataclass(frozen=True, eq=False)
class Cells:
    """Sums over cells of the confidence, of which the outcomes are random: bins, or runs of a sample in order.

    All are `(..., K)`.

    Attributes:
        n: weight.
        expected: sum of confidences: of the outcomes, if they are calibrated.
        outcomes: sum of outcomes, as it was observed.
        spread, noise: see `BinStats`.
        with_gaps: makes what is read of cells with other gaps `(..., K)`, which may have further axes in front.
        log_odds: log-odds of the mean confidence, which do not saturate; None where nothing needs them.
    """

    n: Tensor
    expected: Tensor
    outcomes: Tensor
    spread: Tensor
    noise: Tensor
    with_gaps: Callable[["Cells", Tensor], BinStats | RankedSample]
    log_odds: Tensor | None = None
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @once
    def held(self) -> Tensor:
        """Weight, or 1 where there is none."""
        return self.n.masked_fill(self.n == 0, 1)

    @once
    def confidence(self) -> Tensor:
        """Mean confidence; 0 in an empty cell."""
        return self.expected / self.held

    @once
    def gap(self) -> Tensor:
        """Frequency less confidence, as it was observed; 0 in an empty cell."""
        return (self.outcomes - self.expected) / self.held

    @once
    def variance(self) -> Tensor:
        """Variance of the gap, if calibrated."""
        return self.noise / self.held.square()

    @once
    def unit(self) -> Tensor:
        """Weight of one independent row."""
        return unit_of(self.spread, self.noise)

    @once
    def of_one_outcome(self) -> Tensor:
        """How far a single outcome moves the gap; 0 in an empty cell."""
        return (self.unit / self.held).masked_fill(self.n == 0, 0)

    @property
    def gap_of_one_outcome(self) -> Tensor:
        """Gaps as a single outcome makes them, to the side where there is room."""
        return self.within_bounds(torch.where(self.confidence > 0.5, -1, 1) * self.of_one_outcome)

    @once
    def drawn_anew(self) -> Tensor:
        """Which cells, counted through, are drawn anew on a path: a few outcomes have another distribution there, and
        not a wider one. What is read from runs takes whole counts.
        """
        rarer = torch.minimum(self.expected, self.n - self.expected) / self.unit
        few = (self.n > 0) & (rarer < _FEW) if self.are_bins else self.n > 0
        return few.flatten().nonzero().squeeze(-1)

    @property
    def are_bins(self) -> bool:
        """Whether each cell deviates by itself on a path; short runs do so with their neighbours."""
        return self.with_gaps is BinsWithGaps

    def within_bounds(self, gaps: Tensor) -> Tensor:
        """Return gaps `(..., K)` cut off where frequencies would leave [0, 1]."""
        return gaps.maximum(-self.confidence).minimum(1 - self.confidence)

    def spread_at(self, gaps: Tensor) -> Tensor:
        """Return `spread` if the gaps are expected to be these, `(..., K)`.

        All confidences of a cell are moved by the same amount, so that the sum of p (1 - p) follows from the sums there
        are.
        """
        return (self.spread + self.n * gaps * (1 - 2 * self.confidence - gaps)).clamp(min=0)

    def deviation(self, gaps: Tensor) -> Tensor:
        """Return the standard deviation of the gaps by chance, if their expectations are these, `(..., K)`."""
        return (self.unit * self.spread_at(gaps)).sqrt() / self.held

    def map(self, change: Callable[[Tensor], Tensor]) -> "Cells":
        """Return the cells with every tensor changed."""
        names = ["n", "expected", "outcomes", "spread", "noise"]
        if self.log_odds is not None:
            names.append("log_odds")
        return replace(self, **{name: change(getattr(self, name)) for name in names})  # type: ignore[arg-type]

    def drawn(self, seed: int, streams: Tensor, first: int) -> "Drawn":
        """Draw what becomes of each cell, `(R, ..., K)`.

        It follows from the series and the place of the cell in it alone, however many cells a series has.

        Args:
            seed: of all draws.
            streams: one for each replicate, int64 `(R,)`.
            first: number of the first series. Series of different numbers draw different numbers.
        """
        *series, n_cells = self.n.shape
        numbers = torch.arange(first, first + math.prod(series), device=self.n.device).unsqueeze(-1)
        counters = numbers * _MOST_CELLS + torch.arange(n_cells, device=self.n.device)
        words = random_words(seed, streams, counters.flatten()).reshape(-1, *self.n.shape)
        chance = (words.to(self.n.dtype) + 0.5) / 2**32
        deviation = deviations_by_chance(chance, self.n, self.expected, self.spread, self.noise)
        return Drawn(deviation, chance.flatten(1)[:, self.drawn_anew])

    def gaps_if_calibrated(self, drawn: "Drawn") -> Tensor:
        """Return gaps `(R, ..., K)` that chance makes, if the model is calibrated."""
        return drawn.deviation * self.variance.sqrt()

    def gaps_around(self, gaps: Tensor, drawn: "Drawn") -> Tensor:
        """Return gaps `(R, ..., K)` that chance makes, if their expectations are these `(..., K)`."""
        found = torch.addcmul(gaps, drawn.deviation, self.deviation(gaps))
        few = self.drawn_anew
        n, expected, spread, unit, around = (
            x.flatten()[few] for x in (self.n, self.expected, self.spread_at(gaps), self.unit, gaps)
        )
        deviation = deviations_by_chance(drawn.chance, n, expected + n * around, spread, unit * spread)
        found.flatten(1).index_copy_(1, few, around + deviation * (unit * spread).sqrt() / n)
        return found


class Drawn(NamedTuple):
    """What becomes of each cell in replicates.

    Attributes:
        deviation: of the sum of outcomes from what is expected, in standard deviations, if the model is calibrated;
            `(R, ..., K)`.
        chance: in (0, 1), the share of sums of outcomes that are less, of the cells that are `drawn_anew` `(R, F)`.
    """

    deviation: Tensor
    chance: Tensor


def bin_cells(b: BinStats) -> Cells:
    """Return bins as cells."""
    return Cells(b.n, b.sums[..., 1, :], b.outcomes, b.spread, b.noise, BinsWithGaps)


class BinsWithGaps(BinStats):
    """The same bins with other gaps `(R, ..., B)`; what replicates have in common is held once."""

    _cells: Cells
    _gaps: Tensor

    def __init__(self, cells: Cells, gaps: Tensor) -> None:
        own = {"_cells": cells, "_gaps": gaps, "has_noise": False}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    @property
    def sums(self) -> Tensor:
        """The sums `(R, ..., 3, B)`, for readings that look at them."""
        return torch.stack((self.n, self._cells.expected.expand_as(self._gaps), self.outcomes), -2)

    @property
    def n(self) -> Tensor:
        """See `Sums`."""
        return self._cells.n.expand_as(self._gaps)

    @property
    def total(self) -> Tensor:
        """See `Sums`."""
        return self._cells.n.sum(-1).expand(self._gaps.shape[:-1])

    @property
    def share(self) -> Tensor:
        """See `Sums`."""
        return (self._cells.n / self._cells.n.sum(-1, keepdim=True)).expand_as(self._gaps)

    @property
    def confidence(self) -> Tensor:
        """See `BinStats`."""
        return self._cells.expected / self._cells.n

    @property
    def outcomes(self) -> Tensor:
        """See `BinStats`."""
        return self._cells.expected + self._cells.n * self._gaps

    @property
    def gap(self) -> Tensor:
        """See `BinStats`."""
        return self._gaps
