"""Simulated outcomes of bins and of ranked samples: replicates of a data set, given the frequencies of the outcomes."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.core.ranked import RankedSample, SortedSample
from torchcalib.core.sums import BinStats
from torchcalib.ops.count_moments import deviation_quantiles, effective_weight
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.once import once
from torchcalib.ops.sorting import end_of_ties, run_index, run_sums

MOST_RUNS = 2**11
RUNS_ON_PATHS = 2**9
"""Number of runs where an interval is computed, which evaluates a sample many times."""

_FEW = 8  # expected outcomes of the rarer kind, below which the distribution is not close to normal
_MOST_CELLS = 2**32  # distance between the counters of two batch elements
_LOG_ODDS_CUTS = [8 * 1.25**k for k in range(21)]  # up to 694, close to the limit of float64 probabilities
_REPLICATES_OF_RUNS = 199  # simulated at each step of a path
MOST_DRAWN = 2**23  # numbers that are drawn at a time, and kept if no more are needed; each piece builds new tables
_AT_ONCE = 2**18  # numbers from which a metric is computed at a time


@dataclass(frozen=True, eq=False)
class Cells:
    """Sums over cells whose outcomes are simulated: `BinCells` or `RunCells`. All are `(..., K)`."""

    n: Tensor  # weight
    expected: Tensor  # sum of confidences, which is the expected sum of outcomes of a calibrated model
    outcomes: Tensor  # observed sum of outcomes
    spread: Tensor  # see `BinStats`
    noise: Tensor  # see `BinStats`
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @once
    def held(self) -> Tensor:
        """Weight, or 1 in an empty cell."""
        return self.n.masked_fill(self.n == 0, 1)

    @once
    def confidence(self) -> Tensor:
        """Mean confidence; 0 in an empty cell."""
        return self.expected / self.held

    @once
    def gap(self) -> Tensor:
        """Observed frequency minus confidence; 0 in an empty cell."""
        return (self.outcomes - self.expected) / self.held

    @once
    def variance(self) -> Tensor:
        """Variance of the gap of a calibrated model."""
        return self.noise / self.held.square()

    @once
    def unit(self) -> Tensor:
        """Weight of one independent row."""
        return effective_weight(self.spread, self.noise)

    @once
    def one_outcome(self) -> Tensor:
        """Change of the gap by one outcome; 0 in an empty cell."""
        return (self.unit / self.held).masked_fill(self.n == 0, 0)

    def within_bounds(self, gaps: Tensor) -> Tensor:
        """Clamp gaps `(..., K)` so that frequencies lie in [0, 1]."""
        return gaps.maximum(-self.confidence).minimum(1 - self.confidence)

    def spread_at(self, gaps: Tensor) -> Tensor:
        """Return `spread` for other expected gaps `(..., K)`: sum of p (1 - p) after adding the gap to each p."""
        return (self.spread + self.n * gaps * (1 - 2 * self.confidence - gaps)).clamp(min=0)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        changed: dict[str, Any] = {name: change(x) for name, x in tensors.items() if x is not None}
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class BinCells(Cells):
    """Bins whose limits do not depend on the outcomes."""

    @classmethod
    def of(cls, b: BinStats) -> Self:
        """Return bins as cells."""
        return cls(b.n, b.sums[..., 1, :], b.outcomes, b.spread, b.noise)

    def with_gaps(self, gaps: Tensor) -> BinStats:
        """Return the bins with other gaps `(R, ..., B)`."""
        return _BinsWithGaps(self, gaps)

    @property
    def not_normal(self) -> Tensor:
        """Bins with few expected outcomes, whose distribution changes not only its width with the frequency."""
        rarer = torch.minimum(self.expected, self.n - self.expected) / self.unit
        return (self.n > 0) & (rarer < _FEW)


class _BinsWithGaps(BinStats):
    """The same bins with other gaps `(R, ..., B)`. Replicates share the memory of weights and confidences."""

    _cells: Cells
    _gaps: Tensor

    def __init__(self, cells: Cells, gaps: Tensor) -> None:
        for name, value in {"_cells": cells, "_gaps": gaps, "has_noise": False}.items():
            object.__setattr__(self, name, value)

    @property
    def sums(self) -> Tensor:
        return torch.stack((self.n, self._cells.expected.expand_as(self._gaps), self.outcomes), -2)

    @property
    def n(self) -> Tensor:
        return self._cells.n.expand_as(self._gaps)

    @property
    def share(self) -> Tensor:
        return (self._cells.n / self._cells.n.sum(-1, keepdim=True)).expand_as(self._gaps)

    @property
    def outcomes(self) -> Tensor:
        return self._cells.expected + self._cells.n * self._gaps

    @property
    def gap(self) -> Tensor:
        return self._gaps


@dataclass(frozen=True, eq=False)
class RunCells(Cells):
    """Runs of neighbouring scores in a ranked sample."""

    log_odds: Tensor | None = None  # of the mean confidence, which do not saturate; only for a log score

    @classmethod
    def of(cls, sample: RankedSample, at_most: int = MOST_RUNS) -> Self:
        """Return the runs of a sample; each element is a run if there are at most that many elements.

        Equal scores share a run. A sample with a log score has about 40 runs more: a run spans at most a quarter of its
        log-odds beyond 8. Otherwise the mean of a run would hide the large score of a nearly certain prediction that is
        wrong.
        """
        s = sample.sorted()
        size, length = s.size.unsqueeze(-1), s.score.shape[-1]
        places = torch.arange(1, min(at_most, length) + 1, device=size.device)
        ends = places.minimum(size)
        if length > at_most:  # decided by the length: elements that are left out must not change the runs of others
            ends = torch.where(size > at_most, end_of_ties(s.score.detach(), places * size // at_most), ends)
            if sample.log_scored:
                ends = torch.cat((ends, _ends_at_log_odds(s)), -1).sort(-1).values
        n, p = s.counts.to(s.confidence.dtype), s.confidence
        columns = (n, (n * p).masked_fill(~s.counted, 0), s.positives, *s.variances)
        weight, expected, outcomes, spread, noise = (run_sums(column, ends) for column in columns)
        log_odds = _log_odds_of_runs(s, n, ends) if sample.log_scored else None
        return cls(weight, expected, outcomes, spread, noise, log_odds)

    def with_gaps(self, gaps: Tensor) -> RankedSample:
        """Return the runs as a sample at their mean scores. A run without elements has the score before it."""
        from_logits = self.log_odds is not None
        score = self.confidence if self.log_odds is None else self.log_odds
        score = score.masked_fill(self.n == 0, -torch.inf if from_logits else 0).cummax(-1).values
        outcomes = torch.addcmul(self.expected, self.n, gaps)
        whole = outcomes.round()
        outcomes = torch.where((outcomes - whole).abs() < 1e-6, whole, outcomes)  # remove the rounding errors of counts
        return _OrderedSample(score.expand_as(gaps), outcomes, self.n.expand_as(gaps), from_logits)

    @property
    def not_normal(self) -> Tensor:
        """All runs with data: metrics of ranked samples need whole counts."""
        return self.n > 0

    def grouped(self, n_groups: int) -> tuple[Self, Tensor]:
        """Return groups of neighbouring runs of about equal weight, and the group of every run `(..., K)`."""
        before = self.n.cumsum(-1) - self.n
        group = (before * n_groups / self.n.sum(-1, keepdim=True)).nan_to_num(0).long().clamp(0, n_groups - 1)

        def summed(x: Tensor) -> Tensor:
            return x.new_zeros((*x.shape[:-1], n_groups)).scatter_add_(-1, group, x)

        return replace(self, log_odds=None).map(summed), group


@dataclass(frozen=True, eq=False)
class _OrderedSample(RankedSample):
    """A sample whose elements are in order already."""

    def sorted(self, stable: bool = False) -> SortedSample:  # noqa: ARG002
        assert self.n is not None
        size = torch.full(self.score.shape[:-1], self.score.shape[-1], device=self.score.device)
        return SortedSample(self.score.contiguous(), self.positives, self.n, size, self.from_logits)


def _log_odds(s: SortedSample) -> Tensor:
    """Return the log-odds of every element `(..., M)`; +inf for elements that are left out."""
    p = s.confidence
    log_odds = s.score.to(p.dtype) if s.from_logits else p.log() - torch.log1p(-p)
    return log_odds.masked_fill(~s.counted, torch.inf)


def _ends_at_log_odds(s: SortedSample) -> Tensor:
    """Return the first element beyond each of the cuts, and beyond probability 0 and before probability 1."""
    log_odds = _log_odds(s)
    most = torch.finfo(log_odds.dtype).max
    cuts = [-most, *(-cut for cut in reversed(_LOG_ODDS_CUTS)), *_LOG_ODDS_CUTS, torch.inf]
    places = torch.searchsorted(log_odds, log_odds.new_tensor(cuts).expand(*log_odds.shape[:-1], -1).contiguous())
    return places.minimum(s.size.unsqueeze(-1))


def _log_odds_of_runs(s: SortedSample, n: Tensor, ends: Tensor) -> Tensor:
    """Return log(mean of p) - log(mean of 1 - p) of every run, by a log-sum-exp over each run."""
    log_odds, run = _log_odds(s), run_index(ends, s.score.shape[-1]).clamp(max=ends.shape[-1] - 1)
    first = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)

    def log_sum(log_p: Tensor, greatest: Tensor) -> Tensor:
        top = log_p.gather(-1, greatest)
        top = top.masked_fill(top == -torch.inf, 0)
        shares = (n * (log_p - top.gather(-1, run)).exp()).masked_fill(~s.counted, 0)
        return run_sums(shares, ends).log() + top

    of_ones = log_sum(logsigmoid(log_odds), (ends - 1).clamp(min=0))
    of_zeros = log_sum(logsigmoid(-log_odds), first.clamp(max=log_odds.shape[-1] - 1))
    return of_ones - of_zeros


_Draws = tuple[Tensor, Tensor]
"""Draws of replicates: deviations of the sums of outcomes `(R, ..., K)`, in standard deviations of a calibrated model,
and uniform numbers in (0, 1) of the cells in `not_normal`, `(R, F)`."""


class Simulation:
    """Replicates of the outcomes of cells.

    The draws of a cell depend on the seed, the replicate, the number of its batch element and its place there. They do
    not depend on how the work is split.

    Args:
        cells: `(..., K)`.
        first: number of the first batch element. Elements of different numbers have different draws.
        seed: seed of all draws.
        n_replicates: R.
    """

    def __init__(self, cells: BinCells | RunCells, first: int, seed: int, n_replicates: int) -> None:
        self.cells, self.first, self.seed, self.n_replicates = cells, first, seed, n_replicates
        self._redrawn = cells.not_normal.flatten().nonzero().squeeze(-1)
        self._keeps = n_replicates * cells.n.numel() <= MOST_DRAWN
        self._kept: _Draws | None = None

    def forget(self) -> None:
        """Free the draws. They are drawn again when they are needed."""
        self._keeps, self._kept = False, None

    def compute(self, metric: Callable[[Any], Tensor], gaps: Tensor | None = None) -> Tensor:
        """Compute a metric of every replicate, `(R, ...)`, from the statistic that `with_gaps` of the cells returns.

        `gaps` are the expected ones `(..., K)`; None for a calibrated model. With gaps, runs have 199 replicates only.
        """
        cells, n_replicates = self.cells, self.n_replicates
        if gaps is not None and isinstance(cells, RunCells):
            n_replicates = min(n_replicates, _REPLICATES_OF_RUNS)
        streams = torch.arange(n_replicates, device=cells.n.device)
        size, found = max(1, cells.n.numel()), []
        for some in torch.split(streams, max(1, MOST_DRAWN // size)):
            draws = self._draws(some)
            for deviation, chance in zip(*(torch.split(x, max(1, _AT_ONCE // size)) for x in draws), strict=True):
                if gaps is None:
                    by_chance = deviation * cells.variance.sqrt()
                else:
                    by_chance = self._gaps_around(gaps, deviation, chance)
                found.append(metric(cells.with_gaps(by_chance)))
        return torch.cat(found)

    def uniform(self) -> Tensor:
        """Return one number in (0, 1) for every replicate and batch element, `(R, ...)`, that no cell uses."""
        numbers = self._numbers()
        streams = self.n_replicates + torch.arange(self.n_replicates, device=numbers.device)
        return self._uniform(streams, numbers).reshape(-1, *self.cells.n.shape[:-1])

    def _numbers(self) -> Tensor:
        """Return the numbers of all batch elements."""
        return torch.arange(self.first, self.first + math.prod(self.cells.n.shape[:-1]), device=self.cells.n.device)

    def _uniform(self, streams: Tensor, counters: Tensor) -> Tensor:
        """Return numbers in (0, 1), `(R, N)`."""
        words = random_words(self.seed, streams, counters)
        return (words.to(self.cells.n.dtype) + 0.5) / 2**32

    def _draws(self, streams: Tensor) -> _Draws:
        """Draw deviations and quantiles for these replicates, or return those that were kept, which are the first."""
        if self._kept is not None and len(streams) <= len(self._kept[0]):
            deviation, chance = self._kept
            return deviation[: len(streams)], chance[: len(streams)]
        cells = self.cells
        counters = self._numbers().unsqueeze(-1) * _MOST_CELLS + torch.arange(cells.n.shape[-1], device=streams.device)
        chance = self._uniform(streams, counters.flatten()).reshape(-1, *cells.n.shape)
        deviation = deviation_quantiles(chance, cells.n, cells.expected, cells.spread, cells.noise)
        draws = deviation, chance.flatten(1)[:, self._redrawn]
        if self._keeps:
            self._kept = draws
        return draws

    def _gaps_around(self, gaps: Tensor, deviation: Tensor, chance: Tensor) -> Tensor:
        """Return simulated gaps `(R, ..., K)` with these expectations.

        The deviations of a calibrated model are scaled. Cells that are not close to normal have the same quantiles of
        the new distribution instead.
        """
        cells, few = self.cells, self._redrawn
        spread = cells.spread_at(gaps)
        found = torch.addcmul(gaps, deviation, (cells.unit * spread).sqrt() / cells.held)
        n, expected, spread, unit, gaps = (
            x.flatten()[few] for x in (cells.n, cells.expected, spread, cells.unit, gaps)
        )
        redrawn = deviation_quantiles(chance, n, expected + n * gaps, spread, unit * spread)
        found.flatten(1).index_copy_(1, few, gaps + redrawn * (unit * spread).sqrt() / n)
        return found
