"""Simulation of the outcomes of a calibrated model, in bins and in ranked samples (consistency resampling).

Let cell k (a bin, or a run of scores) have rows with weights w_i and confidences p_i. For a calibrated model, the sum
of outcomes O_k has the mean E_k = sum w_i p_i and the variance V_k = `Cells.noise`. Each replicate draws a standardised
deviation d_k from the distribution of a sum of independent trials, and computes the metric from the gaps
d_k sqrt(V_k) / n_k (Broecker and Smith 2007).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.core.ranked import RankedSample, SortedSample
from torchcalib.core.sums import BinStats, unbiased_variance
from torchcalib.ops.count_moments import deviation_quantiles, effective_weight
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.host_values import once
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.segments import run_index, run_sums
from torchcalib.ops.sorting import end_of_ties, sorted_columns

Metric = Callable[[Any], Tensor]
"""Function that computes values `(...)` from a statistic."""

MAX_RUNS = 2**11
"""Largest number of runs into which a ranked sample is divided."""

_MAX_CELLS = 2**32  # offset between the random number counters of consecutive batch elements
_LOG_ODDS_CUTS = [8 * 1.25**k for k in range(21)]  # limits of runs up to 694; the smallest normal float64 is exp(-708)
MAX_DRAWN = 2**23  # largest number of random numbers in memory
GAPS_AT_ONCE = 2**18  # simulated gaps per call of a metric


@dataclass(frozen=True, eq=False)
class Cells:
    """Weighted sums over K cells whose outcomes are simulated, `(..., K)`: bins or runs of samples."""

    n: Tensor  # total weight
    expected: Tensor  # sum of confidences: expected sum of outcomes for a calibrated model
    outcomes: Tensor  # observed sum of outcomes
    spread: Tensor  # sum of w p (1 - p) for weights w and confidences p; see `BinStats`
    noise: Tensor  # variance of `outcomes` for a calibrated model; see `BinStats`
    upper: Tensor | None = None  # largest score in each cell, if cells are runs of a sorted sample
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @once
    def positive_n(self) -> Tensor:
        """Weight of each cell, `(..., K)`; 1 for an empty cell, to avoid division by 0."""
        return self.n.masked_fill(self.n == 0, 1)

    @once
    def confidence(self) -> Tensor:
        """Mean confidence, `(..., K)`; 0 in an empty cell."""
        return self.expected / self.positive_n

    @once
    def gap(self) -> Tensor:
        """Observed frequency minus mean confidence, `(..., K)`; 0 in an empty cell."""
        return (self.outcomes - self.expected) / self.positive_n

    @once
    def variance(self) -> Tensor:
        """Variance of the gap for a calibrated model, `(..., K)`."""
        return self.noise / self.positive_n.square()

    @once
    def unit(self) -> Tensor:
        """Effective weight of one independent outcome, `(..., K)`; see `effective_weight`."""
        return effective_weight(self.spread, self.noise)

    def variance_of_outcomes(self, gaps: Tensor) -> Tensor:
        """Return the variance of `outcomes` after adding the expected gap `(..., K)` of the cell to each confidence."""
        # sum w (p + g) (1 - p - g) = sum w p (1 - p) + n g (1 - 2 p - g) for the mean confidence p and the gap g
        return self.unit * (self.spread + self.n * gaps * (1 - 2 * self.confidence - gaps)).clamp(min=0)

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return new cells with a function applied to every field."""
        changed: dict[str, Any] = {}
        for field_of in fields(self):
            value = getattr(self, field_of.name)
            if field_of.init and value is not None:
                changed[field_of.name] = change(value)
        return replace(self, **changed)


@dataclass(frozen=True, eq=False)
class BinCells(Cells):
    """Bins whose outcomes are simulated. Their edges do not depend on the outcomes."""

    weight_square: Tensor | None = None  # see `BinStats`

    @classmethod
    def from_bins(cls, b: BinStats) -> Self:
        """Create cells from the sums over bins."""
        return cls(b.n, b.sums[..., 1, :], b.outcomes, b.spread, b.noise, b.upper, weight_square=b.weight_square)

    def with_gaps(self, gaps: Tensor) -> BinStats:
        """Return the sums of the bins with the observed gaps replaced, `(..., B)` or `(R, ..., B)`."""
        return BinsWithGaps(self, gaps)

    @once
    def share(self) -> Tensor:
        """Fraction of the total weight in each bin, `(..., B)`; 0 without data."""
        return (self.n / self.n.sum(-1, keepdim=True)).nan_to_num(0)

    @once
    def share_of_one(self) -> Tensor:
        """Effective weight of one independent outcome in each bin, divided by the total weight, `(..., B)`."""
        return (self.unit / self.n.sum(-1, keepdim=True)).nan_to_num(0, posinf=0)

    @once
    def one_outcome(self) -> Tensor:
        """Change of the gap if one outcome changes, `(..., B)`; 0 in an empty bin."""
        return (self.unit / self.positive_n).masked_fill(self.n == 0, 0)

    @once
    def shrunk_gap(self) -> Tensor:
        """Gap after adding one outcome whose value is the mean confidence, `(..., B)`.

        Its variance is positive even if all outcomes are equal (Agresti and Coull, The American Statistician, 1998).
        """
        return self.gap / (1 + self.one_outcome)

    def within_bounds(self, gaps: Tensor) -> Tensor:
        """Clip gaps `(..., B)` to the range where frequencies are in [0, 1]."""
        return gaps.maximum(-self.confidence).minimum(1 - self.confidence)

    def variance_at(self, gaps: Tensor) -> Tensor:
        """Return the variance of each gap `(..., B)`, after adding the expected gap of the bin to each confidence."""
        return self.variance_of_outcomes(gaps) / self.positive_n.square()

    def with_noise_times(self, factor: Tensor) -> Self:
        """Return bins whose noise is larger by a factor `(...)`, as if each outcome counted for several rows.

        The continuity correction and the shrinkage of gaps are then also larger, which makes intervals wider.
        """
        return replace(self, noise=self.noise * factor.unsqueeze(-1))


class BinsWithGaps(BinStats):
    """Bins `cells` with given gaps `(R, ..., B)`. Replicates share the memory of weights and confidences."""

    cells: BinCells
    _gaps: Tensor

    def __init__(self, cells: BinCells, gaps: Tensor) -> None:
        for name, value in {"cells": cells, "_gaps": gaps, "has_noise": False}.items():
            object.__setattr__(self, name, value)

    @property
    def sums(self) -> Tensor:
        """See `BinStats`."""
        return torch.stack((self.n, self.cells.expected.expand_as(self._gaps), self.outcomes), -2)

    @property
    def n(self) -> Tensor:
        """See `BinStats`."""
        # Expanded without a copy: the weights are equal in all replicates.
        return self.cells.n.expand_as(self._gaps)

    @property
    def share(self) -> Tensor:
        """See `BinStats`."""
        return self.cells.share.expand_as(self._gaps)

    @property
    def outcomes(self) -> Tensor:
        """See `BinStats`."""
        return self.cells.expected + self.cells.n * self._gaps

    @property
    def gap(self) -> Tensor:
        """See `BinStats`."""
        return self._gaps

    @property
    def weighted_gap(self) -> Tensor:
        """See `BinStats`."""
        return self.cells.share * self._gaps

    @property
    def gap_variance(self) -> Tensor:
        """See `BinStats`. Simulated outcomes have no residuals, but this variance for the expected gap of a bin."""
        cells = self.cells
        assert cells.weight_square is not None  # of bins
        return unbiased_variance(cells.variance_of_outcomes(self._gaps), cells.n, cells.weight_square)


@dataclass(frozen=True, eq=False)
class RunCells(Cells):
    """Runs of consecutive scores in a ranked sample, whose outcomes are simulated."""

    log_odds: Tensor | None = None  # log-odds of the mean confidence, without saturation; only for a log score

    @classmethod
    def from_sample(cls, sample: RankedSample, at_most: int = MAX_RUNS) -> Self:
        """Divide a sample into at most `at_most` runs of similar size; a smaller sample has one run per element.

        Equal scores share a run. A log score adds about 40 runs. In each run, log-odds above 8 or below -8 then differ
        by at most 25%. A longer run would hide the large score of a wrong, nearly certain prediction.
        """
        s = sample.sorted()
        size, length = s.size.unsqueeze(-1), s.score.shape[-1]
        # Run j of K ends at element j n / K, moved to the end of its ties.
        places = torch.arange(1, min(at_most, length) + 1, device=size.device)
        ends = places.minimum(size)
        # `length` includes ignored elements. With `size`, the number of runs would depend on other batch elements.
        if length > at_most:
            ends = torch.where(size > at_most, end_of_ties(s.score.detach(), places * size // at_most), ends)
            if sample.log_scored:
                ends = torch.cat((ends, _ends_at_log_odds(s)), -1).sort(-1).values
        n, p = s.counts.to(s.confidence.dtype), s.confidence
        columns = (n, (n * p).masked_fill(~s.counted, 0), s.positives, *s.variances)
        weight, expected, outcomes, spread, noise = (run_sums(column, ends) for column in columns)
        log_odds = _log_odds_of_runs(s, n, ends) if sample.log_scored else None
        return cls(weight, expected, outcomes, spread, noise, s.upper(ends), log_odds)

    def with_gaps(self, gaps: Tensor) -> RankedSample:
        """Return a sample with these gaps and one element per run. An empty run has the score of the previous run."""
        from_logits = self.log_odds is not None
        score = self.confidence if self.log_odds is None else self.log_odds
        score = score.masked_fill(self.n == 0, -torch.inf if from_logits else 0).cummax(-1).values
        runs = OrderedSample(score, self.outcomes, self.n, from_logits)
        return runs.with_outcomes(torch.addcmul(self.expected, self.n, gaps))


@dataclass(frozen=True, eq=False)
class OrderedSample(RankedSample):
    """Ranked sample, already sorted by score with NaN last. Metrics share the result of `sorted`."""

    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_sample(cls, sample: RankedSample) -> Self:
        """Sort a sample."""
        score, positives, n, size = sorted_columns(sample.score, sample.positives, sample.n)
        ignored = torch.arange(score.shape[-1], device=score.device) >= size.unsqueeze(-1)
        return cls(score.masked_fill(ignored, torch.nan), positives, n, sample.from_logits)

    def with_outcomes(self, outcomes: Tensor) -> Self:
        """Return the sample with simulated sums of outcomes `(R, ..., M)`, without the rounding errors of counts."""
        outcomes = outcomes.masked_fill(self.score.isnan(), 0)
        whole = outcomes.round()
        outcomes = torch.where((outcomes - whole).abs() < 1e-6, whole, outcomes)
        n = None if self.n is None else self.n.expand_as(outcomes)
        return type(self)(self.score.expand_as(outcomes), outcomes, n, self.from_logits)

    @once
    def _sorted(self) -> SortedSample:
        missing = self.score.isnan()
        size = missing.logical_not().sum(-1)
        score = self.score.masked_fill(missing, torch.inf)
        return SortedSample(score, self.positives.expand_as(score), self.n, size, self.from_logits)

    def sorted(self, stable: bool = False) -> SortedSample:  # noqa: ARG002
        """Return the elements, which are sorted."""
        return self._sorted


def _log_odds(s: SortedSample) -> Tensor:
    """Return the log-odds of the score of every element `(..., M)`; +inf for ignored elements."""
    p = s.confidence
    log_odds = s.score.to(p.dtype) if s.from_logits else p.log() - torch.log1p(-p)
    return log_odds.masked_fill(~s.counted, torch.inf)


def _ends_at_log_odds(s: SortedSample) -> Tensor:
    """Return the ends `(..., 44)` of runs divided at plus and minus `_LOG_ODDS_CUTS`, and at infinite log-odds."""
    log_odds = _log_odds(s)
    most = torch.finfo(log_odds.dtype).max
    cuts = [-most, *(-cut for cut in reversed(_LOG_ODDS_CUTS)), *_LOG_ODDS_CUTS, torch.inf]
    places = torch.searchsorted(log_odds, log_odds.new_tensor(cuts).expand(*log_odds.shape[:-1], -1).contiguous())
    return places.minimum(s.size.unsqueeze(-1))


def _log_odds_of_runs(s: SortedSample, n: Tensor, ends: Tensor) -> Tensor:
    """Return log(sum of p) - log(sum of 1 - p) for every run `(..., K)`, by a log-sum-exp over the run."""
    log_odds, run = _log_odds(s), run_index(ends, s.score.shape[-1]).clamp(max=ends.shape[-1] - 1)
    first = torch.cat((torch.zeros_like(ends[..., :1]), ends[..., :-1]), -1)

    # log sum_i n_i exp(l_i) = t + log sum_i n_i exp(l_i - t), with the greatest l_i of the run as t
    def log_sum(log_p: Tensor, greatest: Tensor) -> Tensor:
        top = log_p.gather(-1, greatest)
        top = top.masked_fill(top == -torch.inf, 0)
        shares = (n * (log_p - top.gather(-1, run)).exp()).masked_fill(~s.counted, 0)
        return run_sums(shares, ends).log() + top

    # Scores increase: log p is greatest in the last element of a run, and log(1 - p) in the first.
    log_of_ones = log_sum(logsigmoid(log_odds), (ends - 1).clamp(min=0))
    log_of_zeros = log_sum(logsigmoid(-log_odds), first.clamp(max=log_odds.shape[-1] - 1))
    return log_of_ones - log_of_zeros


def replicated(metrics: Collection[Metric], statistics: Iterable[Any]) -> dict[Metric, Tensor]:
    """Return all replicates `(R, ...)` of each metric, from statistics of parts of the replicates.

    The metrics of a part share what they compute from it, such as its sorted elements.
    """
    parts = [[metric(statistic) for metric in metrics] for statistic in statistics]
    return {metric: torch.cat(values) for metric, *values in zip(metrics, *parts, strict=True)}


class Simulation:
    """Simulation of R replicates of the outcomes in K cells (bins or runs) `(..., K)`.

    The random number of a cell depends on the seed, the replicate, the batch element and the cell only. `first` is the
    index of the first batch element in a larger batch.
    """

    def __init__(self, cells: BinCells | RunCells, first: int, seed: int, n_replicates: int) -> None:
        self.cells, self.first, self.seed, self.n_replicates = cells, first, seed, n_replicates

    def statistics(self) -> Iterator[Any]:
        """Yield the simulated statistic of a part of the replicates `(r, ...)`; see `with_gaps`."""
        cells = self.cells
        streams = torch.arange(self.n_replicates, device=cells.n.device)
        size = max(1, cells.n.numel())
        for some in torch.split(streams, max(1, MAX_DRAWN // size)):
            for deviation in torch.split(self._deviations(some), max(1, GAPS_AT_ONCE // size)):
                yield cells.with_gaps(deviation * cells.variance.sqrt())

    def _deviations(self, streams: Tensor) -> Tensor:
        """Return the standardised sums of outcomes `(r, ..., K)` for the replicates with indices `streams`, `(r,)`."""
        cells = self.cells
        # One random number for each replicate (stream), batch element and cell (counter)
        elements = torch.arange(self.first, self.first + math.prod(cells.n.shape[:-1]), device=streams.device)
        counters = elements.unsqueeze(-1) * _MAX_CELLS + torch.arange(cells.n.shape[-1], device=streams.device)
        words = random_words(self.seed, streams, counters.flatten())
        chance = ((words.to(cells.n.dtype) + 0.5) / 2**32).reshape(-1, *cells.n.shape)  # uniform in (0, 1)
        # Inverse transform sampling: the quantile of the standardised sum of outcomes
        return deviation_quantiles(chance, cells.n, cells.expected, cells.spread, cells.noise)


MAX_LABELS = 2**25
"""Largest number of simulated labels, rows times replicates. With more, the p-values of the classes are combined."""

_MAX_ELEMENTS = 2**32  # offset between the random number counters of consecutive batch elements
_MAX_SUMS = 2**24  # simulated sums of outcomes in memory (64 MB); if all fit, they are stored for the next metric
_AT_ONCE = 2**16  # labels that are drawn at a time, which fit in the cache
_MAX_ENTRIES = 2**20  # entries of distribution functions in memory


@dataclass(frozen=True, eq=False)
class LabelRows:
    """Rows of one batch element of a multi-class task."""

    score: Tensor  # probability, or log-odds, of every class (C, N)
    from_logits: bool  # whether `score` contains log-odds
    weights: Tensor | None  # importance of each row, float64 (N,); None for 1. Copies of a row are separate rows
    cell: Callable[[Tensor], Tensor] | None  # from scores to cells (C, n); None finds the cells by `Cells.upper`

    @classmethod
    def from_sample(
        cls, sample: RankedSample, *, copies: bool = True, cell: Callable[[Tensor], Tensor] | None = None
    ) -> list[Self] | None:
        """Return the rows of each batch element of class-wise events `(..., C, N)`.

        It is None if targets are soft, or if `sample` is a sketch. `copies` states that weights count copies of a row.
        """
        n_classes, length = sample.score.shape[-2:]
        n = torch.ones_like(sample.positives) if sample.n is None else sample.n
        n = n.expand(sample.score.shape)
        # A row has one label if all copies of one class, and none of the others, are positive.
        absent = sample.score.isnan().any(-2, keepdim=True)
        is_label = (sample.positives == 0) | (sample.positives == n)
        one = (sample.positives.sum(-2, keepdim=True) == n).all(-2, keepdim=True) & is_label.all(-2, keepdim=True)
        if not bool((one | absent).all()):
            return None
        n_elements = sample.score.shape[:-2].numel()
        columns = (x.reshape(n_elements, n_classes, length) for x in (sample.score, n))
        rows = []
        for score, weight, missing in zip(*columns, absent.reshape(n_elements, length), strict=True):
            present = _in_order(score, weight[0], (~missing).nonzero().squeeze(-1), sample.from_logits)
            weights = None
            if sample.n is not None and copies:
                present = present.repeat_interleave(weight[0, present].long())
            elif sample.n is not None:
                weights = weight[0, present].to(wide_dtype(score.device))
            rows.append(cls(score[:, present], sample.from_logits, weights, cell))
        return rows

    def __len__(self) -> int:
        return self.score.shape[-1]


def _in_order(score: Tensor, weight: Tensor, rows: Tensor, from_logits: bool) -> Tensor:
    """Return the indices `rows` `(n,)`, sorted by a projection of the probabilities `(C, N)`, then by weight `(N,)`.

    Random numbers then do not depend on the order of the rows, for example on batches. Equal rows are exchangeable.
    """
    # Sort by the last key first, because the second sort is stable.
    rows = rows[weight[rows].argsort(stable=True)]
    values = score[:, rows].to(wide_dtype(score.device))
    # The projection sum_c sqrt(c) p_c differs for rows that differ, except by coincidence.
    factors = torch.arange(1, len(score) + 1, dtype=values.dtype, device=values.device).sqrt()
    projection = factors @ (values.sigmoid() if from_logits else values)
    return rows[projection.argsort(stable=True)]


class LabelSimulation:
    """Simulation of R replicates of the labels of all rows of a batch element, in cells `(1, C, K)` of all classes.

    The random number of a row depends on the seed, the replicate, the batch element and the rank of the row only; see
    `_in_order`.
    """

    def __init__(self, cells: BinCells | RunCells, rows: LabelRows, index: int, seed: int, n_replicates: int) -> None:
        self.cells, self.rows, self.index, self.seed, self.n_replicates = cells, rows, index, seed, n_replicates

    def statistics(self) -> Iterator[Any]:
        """Yield the simulated statistic of a part of the replicates `(r, 1, C, ...)`; see `Simulation.statistics`."""
        cells, size = self.cells, self.cells.n.numel()
        for some in torch.split(torch.arange(self.n_replicates, device=cells.n.device), max(1, _MAX_SUMS // size)):
            for outcomes in torch.split(self._outcomes(some), max(1, GAPS_AT_ONCE // size)):
                gaps = (outcomes.to(cells.n.dtype) - cells.expected) / cells.positive_n
                # The cells of a score near an edge may differ by rounding.
                yield cells.with_gaps(gaps.masked_fill(cells.n == 0, 0))

    def _outcomes(self, streams: Tensor) -> Tensor:
        """Return the sums of outcomes `(r, 1, C, K)` in the replicates with indices `streams`, `(r,)`."""
        rows, (_, n_classes, n_cells) = self.rows, self.cells.n.shape
        dtype = torch.int32 if rows.weights is None else rows.weights.dtype
        sums = torch.zeros(len(streams) * n_classes * n_cells, dtype=dtype, device=streams.device)
        for some in torch.split(torch.arange(len(rows), device=streams.device), max(1, _MAX_ENTRIES // n_classes)):
            # Inverse transform sampling: the label is the first class whose distribution function exceeds the word.
            limits, cells = self._limits_and_cells(some)
            weights = None if rows.weights is None else rows.weights[some].unsqueeze(-1)
            counters = self.index * _MAX_ELEMENTS + some
            for chunk in torch.split(
                torch.arange(len(streams), device=some.device), max(1, _AT_ONCE // max(1, len(some)))
            ):
                words = random_words(self.seed, streams[chunk], counters).T.contiguous()
                label = torch.searchsorted(limits, words, right=True)
                # Index in the flat sums (r, C, K): only the cell of the label gets an outcome.
                place = (cells.gather(-1, label) + chunk * (n_classes * n_cells)).flatten()
                added = torch.ones((), dtype=dtype, device=sums.device) if weights is None else weights
                sums.scatter_add_(0, place, added.expand(label.shape).reshape(-1))
        return sums.reshape(len(streams), *self.cells.n.shape)

    def _limits_and_cells(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distribution functions times 2^32, int64 `(n, C - 1)`, and the cells of all classes `(n, C)`."""
        score = self.rows.score[:, rows]
        wide = score.T.to(wide_dtype(score.device))
        cumulative = (wide.sigmoid() if self.rows.from_logits else wide).cumsum(-1)
        limits = (cumulative[:, :-1] / cumulative[:, -1:] * 2**32).long().contiguous()
        n_classes, n_cells = self.cells.n.shape[-2:]
        if self.rows.cell is not None:
            cells = self.rows.cell(score)
        else:
            assert self.cells.upper is not None  # cells of a ranked sample are runs
            cells = torch.searchsorted(self.cells.upper[0].to(score.dtype).contiguous(), score.contiguous())
        cells = cells.clamp(max=n_cells - 1) + n_cells * torch.arange(n_classes, device=cells.device).unsqueeze(-1)
        return limits, cells.T.contiguous()
