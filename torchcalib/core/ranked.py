"""Samples of rank-based metrics, exact or as a sketch.

A `RankedSample` has one element for each sample, or, from a sketch, one for each cell of scores that holds samples.
Metrics treat both alike.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.arguments import Task, check_count
from torchcalib.core.events import Mode, n_events, reduce_to_scores
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats, Cells, series_shape, weighted
from torchcalib.ops.host_values import look
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.once import once
from torchcalib.ops.operation import is_plain
from torchcalib.ops.segments import bin_sums
from torchcalib.ops.sorting import sort_labelled, sorted_columns, tie_begins

MOST_CELLS_PER_UNIT = 2**14
_LOWEST, _HIGHEST = -104, 37
"""Log-odds of the least float32 above 0 and of the greatest float64 below 1, rounded outwards."""
_LOWEST_LOGIT = -70
"""Lower end of the cells of log-odds. There are as many as for probabilities, so that they end at 71."""

_PIECE = 2**21  # elements that are read at a time where many series are kept apart: what lies in memory beside them


@dataclass(frozen=True, eq=False)
class RankedSample:
    """Elements with scores, in any order.

    Attributes:
        score: `(..., M)`, a probability or with `from_logits` its log-odds; NaN for an element that is left out.
        positives: number of samples with outcome 1 of the element `(..., M)`; the sum of soft targets.
        n: number of samples of the element `(..., M)`, whole; None for one each.
        from_logits: whether scores are log-odds.
        poisoned: batch elements with a bad row that could not raise `(...)`; None for none.
        log_scored: whether a log score is computed from the sample, so that runs of elements keep their log-odds.
    """

    score: Tensor
    positives: Tensor
    n: Tensor | None
    from_logits: bool
    poisoned: Tensor | None = None
    log_scored: bool = False

    def pieces(self) -> list["RankedSample"]:
        """Split a large batch into smaller ones, so that each fits into memory."""
        *lead, size = self.score.shape
        series = max(1, _PIECE // max(size, 1))
        if not lead or math.prod(lead) <= series:
            return [self]
        columns = (self.score, self.positives, self.n, self.poisoned)
        flat = [
            None if c is None else c.expand(*lead, *c.shape[len(lead) :]).flatten(0, len(lead) - 1) for c in columns
        ]
        parts = zip(*(itertools.repeat(None) if c is None else torch.split(c, series) for c in flat), strict=False)
        return [replace(self, score=s, positives=k, n=n, poisoned=bad) for s, k, n, bad in parts]

    def narrow(self, start: int, length: int) -> "RankedSample":
        """Return at most `length` elements of every batch element from element `start` on."""
        run = slice(start, start + length)
        n = None if self.n is None else self.n[..., run]
        return replace(self, score=self.score[..., run], positives=self.positives[..., run], n=n)

    def pooled(self) -> "RankedSample":
        """Return all batch elements as one."""
        score, positives = self.score.flatten(), self.positives.expand_as(self.score).flatten()
        n = None if self.n is None else self.n.expand_as(self.score).flatten()
        return RankedSample(
            score, positives, n, self.from_logits, None if self.poisoned is None else self.poisoned.any()
        )

    @property
    def is_labelled(self) -> bool:
        """Whether elements are labelled probabilities on the CPU without gradient, which bits can sort."""
        plain = self.n is None and self.positives.dtype == torch.uint8 and not self.from_logits
        return plain and self.score.device.type == "cpu" and is_plain(self.score)

    def sorted(self, stable: bool = False) -> "SortedSample":
        """Sort the elements by score; `stable` keeps the order of equal scores.

        Raises:
            ValueError: if weights sum to more than 2^53.
        """
        score, positives, n = self.score, self.positives, self.n
        if n is not None and look((n.sum(-1) > 2**53).any()):
            raise ValueError(
                f"`weights` must sum to at most 2^53 where samples are counted, got {float(n.sum(-1).max()):g}. "
                "Divide them by what they have in common."
            )
        if not score.shape[-1]:  # one element that is left out: no caller handles an empty axis
            score, positives = (
                score.new_full((*score.shape[:-1], 1), torch.nan),
                positives.new_zeros((*positives.shape[:-1], 1)),
            )
            n = None if n is None else n.new_zeros((*n.shape[:-1], 1))
        if self.is_labelled and not stable:
            score, positives, size = sort_labelled(score.contiguous(), positives.contiguous())
        else:
            score, positives, n, size = sorted_columns(score, positives, n)
        return SortedSample(score, positives, n, size, self.from_logits)


def by_pieces(read: Callable[[RankedSample], Tensor], sample: RankedSample) -> Tensor:
    """Return the value `(..., *)` of every batch element; NaN for one with a bad row that could not raise."""
    pieces = sample.pieces()
    lead = sample.score.shape[:-1]
    values = read(sample) if len(pieces) == 1 else torch.cat([read(piece) for piece in pieces])
    values = values.reshape((*lead, *values.shape[len(lead) if len(pieces) == 1 else 1 :]))
    if sample.poisoned is None:
        return values
    return values.masked_fill(sample.poisoned.reshape((*lead, *[1] * (values.dim() - len(lead)))), torch.nan)


@dataclass(frozen=True, eq=False)
class SortedSample:
    """Elements in ascending order of their scores; those that are left out come last.

    Attributes:
        score: `(..., M)`, M >= 1; +inf, or a number above all others, for elements that are left out.
        positives: `(..., M)`; see `RankedSample`.
        n: `(..., M)`, or None for one each.
        size: number of elements that are not left out `(...)`, int64.
        from_logits: whether scores are log-odds.
    """

    score: Tensor
    positives: Tensor
    n: Tensor | None
    size: Tensor
    from_logits: bool
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @once
    def counted(self) -> Tensor:
        """Whether elements are not left out, bool `(..., M)`."""
        places = torch.arange(self.score.shape[-1], device=self.score.device)
        return places < self.size.unsqueeze(-1)

    @once
    def confidence(self) -> Tensor:
        """Probability of every element `(..., M)`, float64; undefined for elements that are left out."""
        wide = self.score.to(wide_dtype(self.score.device))
        return wide.sigmoid() if self.from_logits else wide

    @once
    def counts(self) -> Tensor:
        """Number of samples of every element `(..., M)`, int64; 0 for elements that are left out."""
        return self.counted.long() if self.n is None else self.n.long().masked_fill(~self.counted, 0)

    @once
    def total(self) -> Tensor:
        """Number of samples `(...)`, int64."""
        return self.size if self.n is None else self.counts.sum(-1)

    @once
    def variances(self) -> tuple[Tensor, Tensor]:
        """Summands of every element in `BinStats.spread` and `BinStats.noise` `(..., M)`.

        An element of several samples has only the sum of their soft targets: it counts as labels, with larger variance.
        """
        n, p = self.counts.to(self.confidence.dtype), self.confidence.detach()
        spread = (n * p * (1 - p)).masked_fill(~self.counted, 0)
        if not self.positives.is_floating_point():
            return spread, spread
        positives = self.positives.detach().masked_fill(~self.counted, 0)
        is_soft = (positives != positives.round()).any(-1, keepdim=True) & (n == 1)
        return spread, torch.where(is_soft, (positives - p).square().masked_fill(~self.counted, 0), spread)

    @once
    def begins(self) -> Tensor:
        """Whether a score differs from the one before it `(..., M)`; True for the first."""
        return tie_begins(self.score)


@dataclass(frozen=True)
class ExactSample:
    """All samples, with the scores of the events of a mode."""

    mode: Mode

    def lead(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the batch axes that the mode adds: `(C,)` for classes that are kept apart."""
        return series_shape(self.mode, task, num_classes)

    def of(self, p: Predictions) -> RankedSample:
        """Return the sample of events of `p`."""
        scores = reduce_to_scores(p, self.mode)
        score, outcome = scores.score, scores.outcome
        weights = _weights_of_events(p, self.mode)
        if weights is None:
            return RankedSample(score, outcome, None, scores.from_logits)
        absent = ~(weights > 0)  # 0 is left out; NaN is a bad row that could not be raised
        score = torch.where(absent, torch.nan, score)
        poisoned = weights.isnan().any(-1).expand(score.shape[:-1])
        if not p.weighted:
            return RankedSample(score, outcome.masked_fill(absent, 0), None, scores.from_logits, poisoned)
        n = weights.masked_fill(absent, 0).expand(score.shape)
        return RankedSample(score, (n * outcome).masked_fill(absent, 0), n, scores.from_logits, poisoned)

    def n_events(self, p: Predictions) -> int:
        """Return the number of elements."""
        return n_events(p, self.mode)


@dataclass(frozen=True)
class LogitCells:
    """A sketch: sums over cells of scores, 1 / `resolution` wide in log-odds; 0 and 1 have a cell of their own.

    What is kept of a cell is its number of samples, its positives and the sum of its probabilities; a reading takes it
    for that many samples at their mean. So every metric is exact for data in which each score has moved by less than
    1 / resolution in log-odds, which is less than 1 / (4 resolution) in probability, and has become equal to those of
    its cell. (Log-odds below -104, where the least float32 above 0 lies, share a cell, and those above 37 another one.)

    With `from_logits` the cells reach from -70 to 71, and the sum is over the probability of the less probable outcome,
    which does not round to 1. The first and the last cell hold all finite log-odds beyond, and sum these instead.

    It is exact for the data as they are if no cell holds two different scores. That is so for float16 and bfloat16
    probabilities from a resolution of 2,048 on, for they are more than 1 / 2,048 apart in log-odds.

    Otherwise let s be the largest share of the samples in a cell that holds different scores. Then

    - KS is too small by at most s: sums at the borders of cells are exact, and within a cell they drift by its share;
    - ACE over B bins is off by at most 2 (B - 1) s: each cut moves by less than a cell, from one bin into the next;
    - PAVA recalibrates worse by at most s / 2 in the Brier score (by which DSC is too small): with the exact fit f,
      which rises, the mean of f over each cell is a candidate that loses at most 2 cov(f, y) <= range(f) / 2 in each;
    - TCE errs by the samples whose cell holds a critical value of the test, at most 4 cells for each bin, so 400 B s
      percent, as long as the blocks are those of the whole sample. Those follow from the outcomes and may jump, as
      they do when a single score moves; over bins that are given no block can.

    Attributes:
        mode: see `ExactSample`.
        resolution: cells for each unit of log-odds.
        from_logits: whether scores are log-odds rather than probabilities.
    """

    mode: Mode
    resolution: int
    from_logits: bool = False

    def __post_init__(self) -> None:
        check_count("resolution", self.resolution, at_most=MOST_CELLS_PER_UNIT)

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return `(3, K)`, or `(C, 3, K)` for C classes apart."""
        return (*series_shape(self.mode, task, num_classes), 3, self._n_cells)

    @property
    def _n_cells(self) -> int:
        return (_HIGHEST - _LOWEST) * self.resolution + 2

    def of(self, p: Predictions) -> BinStats:
        """Count the events of `p` in cells."""
        cells, columns = self._counted(p)
        return BinStats(bin_sums(cells, columns, self._n_cells))

    def cells(self, p: Predictions) -> Cells:
        """Say in which cell every event counts."""
        cells, columns = self._counted(p)
        return Cells(cells, torch.stack(columns, -2), self._n_cells)

    def _counted(self, p: Predictions) -> tuple[Tensor, list[Tensor]]:
        """Return the cell of every event, and its summands."""
        scores = reduce_to_scores(p, self.mode)
        cells, wide = self._cell(scores.score), wide_dtype(scores.score.device)
        weights = _weights_of_events(p, self.mode)
        quantities = (torch.ones_like(scores.score), self._summand(scores.score, cells), scores.outcome)
        return cells, [weighted(quantity, weights, wide) for quantity in quantities]

    def of_sample(self, sample: RankedSample) -> BinStats:
        """Count the elements of a sample in cells, as `of` counts the events that it was made of."""
        score = sample.score.to(wide_dtype(sample.score.device))
        n = torch.ones_like(score) if sample.n is None else sample.n.to(score.dtype)
        cells = self._cell(score)
        columns = (n, n * self._summand(score, cells), sample.positives.to(score.dtype))
        return BinStats(bin_sums(cells, [column.masked_fill(score.isnan(), 0) for column in columns], self._n_cells))

    @property
    def _lowest(self) -> int:
        return _LOWEST_LOGIT if self.from_logits else _LOWEST

    def _cell(self, score: Tensor) -> Tensor:
        """The cell of every score: 0 for p = 0, the last for p = 1, the others of even width in between."""
        score = score.detach().to(wide_dtype(score.device))
        log_odds = score if self.from_logits else score.log() - torch.log1p(-score)
        # An element that is left out has no log-odds; it adds nothing to whichever cell it is given.
        cell = ((log_odds - self._lowest) * self.resolution).nan_to_num().floor().clamp(0, self._n_cells - 3).long() + 1
        return cell.masked_fill(log_odds == -torch.inf, 0).masked_fill(log_odds == torch.inf, self._n_cells - 1)

    def _summand(self, score: Tensor, cell: Tensor) -> Tensor:
        """Return the summand of each score: the probability, or for log-odds that of the less probable outcome.

        In the two outermost cells of finite log-odds, where that probability is almost 0, it is |log-odds|.
        """
        score = score.to(wide_dtype(score.device))
        if not self.from_logits:
            return score
        distance = torch.where(self._is_above(cell), score, -score).masked_fill(score.isinf(), 0)
        return torch.where(self._is_outermost(cell), distance, torch.sigmoid(-distance)).masked_fill(score.isinf(), 0)

    def _is_above(self, cell: Tensor) -> Tensor:
        """Return whether cells hold log-odds of 0 and above."""
        return cell > -self._lowest * self.resolution

    def _is_outermost(self, cell: Tensor) -> Tensor:
        """Return whether cells are the first or the last of finite log-odds."""
        return (cell == 1) | (cell == self._n_cells - 2)

    def wrap(self, sums: Tensor) -> RankedSample:
        """Return the cells that hold samples as elements."""
        n, total, positives = sums.unbind(-2)
        cell = torch.arange(self._n_cells, device=n.device)
        held = n > 0
        if n.device.type == "cpu":  # elsewhere looking for them would make the host wait
            some = held.reshape(-1, held.shape[-1]).any(0)
            n, total, positives, held, cell = (t[..., some] for t in (n, total, positives, held, cell))
        mean = total / n
        score = self._log_odds_of(mean.masked_fill(~held, 0.5), cell) if self.from_logits else mean.clamp(0, 1)
        return RankedSample(score.masked_fill(~held, torch.nan), positives, n, self.from_logits)

    def _log_odds_of(self, mean: Tensor, cell: Tensor) -> Tensor:
        """Return the log-odds of cells of log-odds, from the means of their summands."""
        outermost = self._is_outermost(cell)
        certain = (cell == 0) | (cell == self._n_cells - 1)
        share = mean.masked_fill(outermost | certain, 0.5).clamp(0, 0.5)
        distance = torch.where(outermost, mean, torch.log1p(-share) - share.log()).masked_fill(certain, torch.inf)
        return torch.where(self._is_above(cell), distance, -distance)

    def n_events(self, p: Predictions) -> int:
        """Return the number of events, or of cells where these are more."""
        n = p.samples[-1]
        return n_events(p, self.mode) // max(1, n) * max(n, self._n_cells)


def _weights_of_events(p: Predictions, mode: Mode) -> Tensor | None:
    """Return the weights, broadcastable to the scores of the events."""
    per_class = p.task == "multiclass" and mode == "classwise"
    return p.weights.unsqueeze(-2) if p.weights is not None and per_class else p.weights
