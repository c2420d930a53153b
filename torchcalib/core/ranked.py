"""Samples for rank-based metrics, exact or as a sketch (sums over narrow cells of the score).

A `RankedSample` has one element for each sample, or one element for each non-empty cell of a sketch.
"""

import itertools
import math
from collections.abc import Callable, Hashable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from torchcalib.core.arguments import Task, check_count
from torchcalib.core.events import Mode, n_events, reduce_to_events, reduce_to_scores
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats, EventCells, Ranges, mode_shape, weighted
from torchcalib.ops.host_values import once, value_if_available
from torchcalib.ops.logs import binary_cross_entropy, binary_log_probs, binary_neg_entropy, wide_dtype
from torchcalib.ops.operation import is_plain
from torchcalib.ops.segments import cell_sums
from torchcalib.ops.sorting import order_of, sorted_columns, tie_begins

T = TypeVar("T")

MAX_CELLS_PER_UNIT = 2**14
_LOWEST, _HIGHEST = -104, 37
"""Log-odds of the smallest positive float32 and of the largest float64 below 1, rounded outwards."""
_LOWEST_LOGIT = -70
"""Lower end of the cells for log-odds. The upper end is 71, which gives as many cells as for probabilities."""

_CHUNK_SIZE = 2**21  # number of elements that are processed at a time, to limit the memory
_FEW = 2**13  # the same for several operations on the CPU, which then stay in the cache and need no threads


@dataclass(frozen=True, eq=False)
class RankedSample:
    """Unsorted elements, each with a score, a number of samples and a number of positives."""

    score: Tensor  # probability or log-odds `(..., M)`; NaN for an ignored element
    positives: Tensor  # number of samples with outcome 1 in each element, or the sum of the soft targets, `(..., M)`
    n: Tensor | None  # number of samples in each element, whole numbers `(..., M)`; None if each element is one sample
    from_logits: bool  # whether `score` contains log-odds
    # mask `(...)` of batch elements with invalid rows for which no error was raised, or None
    has_invalid_rows: Tensor | None = None
    log_scored: bool = False  # whether the metric is a log score, which requires log-odds for merged elements
    # sum of the entropic calibration difference (ECD) over the samples in each element, in nats `(..., M)`, or None
    ecd: Tensor | None = None
    # sum of the squared outcomes of the samples in each element `(..., M)`; None if they are copies of one sample
    squares: Tensor | None = None
    copies: bool = True  # whether `n` is known to count copies; see `Predictions.copies`
    _views: dict[Hashable, Any] | None = field(default=None, init=False, repr=False)

    def sharing(self) -> Self:
        """Return the same sample with a cache, through which several metrics share views such as sorted elements."""
        other = copy(self)
        object.__setattr__(other, "_views", {})
        return other

    def view(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, a function of this sample. A result of `sharing` calls it once for each key."""
        if self._views is None:
            return make()
        if key not in self._views:
            self._views[key] = make()
        view: T = self._views[key]
        return view

    @property
    def is_counted(self) -> bool:
        """Whether weights count independent samples: they are integers, or all of them are 0 or 1."""
        return self.copies or self.n is None or bool((self.n == self.n.square()).all())

    def with_event_ecd(self) -> Self:
        """Return the same sample with the entropic calibration difference (ECD) of its binary events."""
        score = self.score.to(wide_dtype(self.score.device))
        n = torch.ones_like(score) if self.n is None else self.n
        log_p, log_not_p = binary_log_probs(score, self.from_logits)
        cross_entropy = binary_cross_entropy(log_p, log_not_p, self.positives / n)
        return replace(self, ecd=n * (binary_neg_entropy(log_p, log_not_p) + cross_entropy))

    def pieces(self) -> list["RankedSample"]:
        """Split the batch into samples with about `_CHUNK_SIZE` elements each, to limit the memory."""
        *lead, size = self.score.shape
        n_lines = max(1, _CHUNK_SIZE // max(size, 1))
        if not lead or math.prod(lead) <= n_lines:
            return [self]
        columns = (self.score, self.positives, self.n, self.has_invalid_rows, self.ecd, self.squares)
        flat = [
            None if c is None else c.expand(*lead, *c.shape[len(lead) :]).flatten(0, len(lead) - 1) for c in columns
        ]
        parts = zip(*(itertools.repeat(None) if c is None else torch.split(c, n_lines) for c in flat), strict=False)
        names = ("score", "positives", "n", "has_invalid_rows", "ecd", "squares")
        return [replace(self, **dict(zip(names, part, strict=True))) for part in parts]

    def narrow(self, start: int, length: int) -> "RankedSample":
        """Return the elements at positions `start` to `start + length` (exclusive) in each batch element."""
        selected = slice(start, start + length)
        names = ("score", "positives", "n", "ecd", "squares")
        columns = {name: x[..., selected] for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **columns)

    def pooled(self) -> "RankedSample":
        """Return one sample `(M,)` with the elements of the whole batch."""
        score, positives = self.score.flatten(), self.positives.expand_as(self.score).flatten()
        n = None if self.n is None else self.n.expand_as(self.score).flatten()
        return RankedSample(
            score,
            positives,
            n,
            self.from_logits,
            None if self.has_invalid_rows is None else self.has_invalid_rows.any(),
            copies=self.copies,
        )

    @property
    def is_labelled(self) -> bool:
        """Whether `sort_labelled` is applicable: unweighted probabilities and labels on the CPU, without gradient."""
        plain = self.n is None and self.positives.dtype == torch.uint8 and not self.from_logits
        return plain and self.score.device.type == "cpu" and is_plain(self.score)

    def sorted(self, stable: bool = False) -> "SortedSample":
        """Return the elements in ascending order of their scores; `stable` keeps the order of equal scores.

        Weights that sum to more than 2^53 raise ValueError.
        """
        return self.view(("sorted", stable), lambda: self._sorted_elements(stable))

    def _sorted_elements(self, stable: bool) -> "SortedSample":
        score, positives, n = self.score, self.positives, self.n
        if n is not None and value_if_available((n.sum(-1) > 2**53).any()):
            raise ValueError(
                f"`weights` must sum to at most 2^53 for rank-based metrics, got {float(n.sum(-1).max()):g}. "
                "Divide them by a common factor."
            )
        if not score.shape[-1]:  # add an ignored element, because callers do not support an empty axis
            score, positives = (
                score.new_full((*score.shape[:-1], 1), torch.nan),
                positives.new_zeros((*positives.shape[:-1], 1)),
            )
            n = None if n is None else n.new_zeros((*n.shape[:-1], 1))
        if self.is_labelled and not stable:
            from torchcalib.ops.labelled import sort_labelled

            score, positives, size = sort_labelled(score.contiguous(), positives.contiguous())
        else:
            score, positives, n, size = sorted_columns(score, positives, n)
        squares = self.squares
        if squares is not None:
            squares = squares.gather(-1, order_of(self.score.detach())) if squares.shape[-1] else None
        return SortedSample(score, positives, n, size, self.from_logits, squares, self.copies)


def by_pieces(function: Callable[[RankedSample], Tensor], sample: RankedSample) -> Tensor:
    """Apply a function to parts of the batch that fit into memory, and concatenate the values `(..., *)`.

    Batch elements in `RankedSample.has_invalid_rows` have the value NaN.
    """
    pieces = sample.pieces()
    lead = sample.score.shape[:-1]
    values = function(sample) if len(pieces) == 1 else torch.cat([function(piece) for piece in pieces])
    values = values.reshape((*lead, *values.shape[len(lead) if len(pieces) == 1 else 1 :]))
    if sample.has_invalid_rows is None:
        return values
    return values.masked_fill(sample.has_invalid_rows.reshape((*lead, *[1] * (values.dim() - len(lead)))), torch.nan)


@dataclass(frozen=True, eq=False)
class SortedSample:
    """Elements of a `RankedSample` in ascending order of their scores, with ignored elements last."""

    score: Tensor  # probability or log-odds `(..., M)`, M >= 1; for ignored elements +inf or a number above 1
    positives: Tensor
    n: Tensor | None
    size: Tensor  # number of elements that are not ignored, int64 `(...)`
    from_logits: bool
    squares: Tensor | None = None  # see `RankedSample`
    copies: bool = True  # see `RankedSample`
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @once
    def counted(self) -> Tensor:
        """Mask of the elements that are not ignored, bool `(..., M)`."""
        positions = torch.arange(self.score.shape[-1], device=self.score.device)
        return positions < self.size.unsqueeze(-1)

    @once
    def confidence(self) -> Tensor:
        """Probability of each element, float64 `(..., M)`; undefined for ignored elements."""
        wide = self.score.to(wide_dtype(self.score.device))
        return wide.sigmoid() if self.from_logits else wide

    @once
    def counts(self) -> Tensor:
        """Number of samples in each element, int64 `(..., M)`; 0 for ignored elements."""
        return self.counted.long() if self.n is None else self.n.long().masked_fill(~self.counted, 0)

    @once
    def total(self) -> Tensor:
        """Total number of samples, int64 `(...)`."""
        return self.size if self.n is None else self.counts.sum(-1)

    @once
    def variances(self) -> tuple[Tensor, Tensor]:
        """Summands of each element in `BinStats.spread` and `BinStats.noise`, each `(..., M)`.

        An element of several samples contains only the sum of their soft targets. It is treated as a sum of labels,
        which have a larger variance.
        """
        n, p = self.counts.to(self.confidence.dtype), self.confidence.detach()
        spread = (n * p * (1 - p)).masked_fill(~self.counted, 0)
        noise = spread if self.copies else n * spread
        if not self.positives.is_floating_point():
            return spread, noise
        positives = self.positives.detach().masked_fill(~self.counted, 0)
        is_soft = (positives != positives.round()).any(-1, keepdim=True) & (n == 1)
        return spread, torch.where(is_soft, (positives - p).square().masked_fill(~self.counted, 0), noise)

    @once
    def residual_squares(self) -> Tensor:
        """Sum of (o - p)^2 over the samples in each element `(..., M)`, for outcomes o and probability p."""
        p, k = self.confidence.masked_fill(~self.counted, 0), self.positives.masked_fill(~self.counted, 0)
        k = k.to(p.dtype)
        if self.n is None:
            return (k - p).square()
        n = self.n.masked_fill(~self.counted, 0)
        if self.squares is None:
            return n * (k / n.clamp(min=1) - p).square()
        return (self.squares.masked_fill(~self.counted, 0) - 2 * p * k + n * p.square()).clamp(min=0)

    @once
    def begins(self) -> Tensor:
        """Mask of the first element with each score, bool `(..., M)`."""
        return tie_begins(self.score)

    @once
    def ends(self) -> Tensor:
        """Mask of the last element with each score, bool `(..., M)`."""
        return torch.cat((self.begins[..., 1:], torch.ones_like(self.begins[..., :1])), -1)

    def upper(self, ends: Tensor) -> Tensor:
        """Return the largest score in each run `(..., K)` with the given ends; -inf for an empty run at the start."""
        last = self.score.detach().gather(-1, (ends - 1).clamp(min=0))
        return last.masked_fill(ends == 0, -torch.inf)

    @once
    def drift(self) -> Tensor:
        """Sum of outcome - probability up to each element, divided by the number of samples, `(..., M)`; NaN for none.

        The order of tied elements has an effect, except at the last of them.
        """
        gap = self.positives - self.confidence * (1 if self.n is None else self.n)
        return gap.masked_fill(~self.counted, 0).cumsum(-1) / self.total.unsqueeze(-1)


@dataclass(frozen=True)
class ExactSample:
    """Accumulator that stores the score and outcome of every event, as defined by `mode`."""

    mode: Mode
    with_ecd: bool = False  # whether to compute the entropic calibration difference (ECD), which states do not store
    only_confidences: ClassVar[bool] = True
    """Whether the statistics are scores and outcomes of events, in whatever order."""

    def leading_shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape of the batch axis that the mode adds; see `mode_shape`."""
        return mode_shape(self.mode, task, num_classes)

    def from_predictions(self, p: Predictions) -> RankedSample:
        """Return the events of a batch of predictions as unsorted elements."""
        score, outcome = reduce_to_scores(p, self.mode)
        weights = _weights_of_events(p, self.mode)
        ecd = reduce_to_events(p, self.mode, with_ecd=True).ecd if self.with_ecd else None
        if weights is None:
            return RankedSample(score, outcome, None, p.from_logits, ecd=ecd)
        absent = ~(weights > 0)  # 0 marks an ignored row, NaN an invalid row for which no error was raised
        score = torch.where(absent, torch.nan, score)
        has_invalid_rows = weights.isnan().any(-1).expand(score.shape[:-1])
        if not p.weighted:
            outcome = outcome.masked_fill(absent, 0)
            return RankedSample(score, outcome, None, p.from_logits, has_invalid_rows, ecd=ecd)
        n = weights.masked_fill(absent, 0).expand(score.shape)
        positives, ecd = (n * outcome).masked_fill(absent, 0), None if ecd is None else n * ecd
        return RankedSample(score, positives, n, p.from_logits, has_invalid_rows, ecd=ecd, copies=p.copies)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate: one per event."""
        return n_events(p, self.mode)


@dataclass(frozen=True)
class LogitCells:
    """Accumulator for a sketch of scores: sums over cells of width 1 / `resolution` in log-odds.

    The sums in a cell are the number of samples, the sum of their probabilities, the number of positives and, if
    `with_squares` is True, the sum of squared outcomes. Metrics replace each score by the mean score of its cell, and
    are otherwise exact. This changes a score by less than 1 / resolution in log-odds and 1 / (4 resolution) in
    probability. Scores of 0 and 1 have their own cells. The outermost of the other cells are unbounded. One contains
    all log-odds below -104, which is less than the log-odds of the smallest positive float32. The other one contains
    all log-odds above 37.

    With `from_logits` the cells range from -70 to 71. The second sum is then the probability of the less probable
    outcome, which does not round to 1. For the outermost finite cells it is |log-odds|.

    A sketch is exact for the original data if no cell contains different scores. This holds for float16 and bfloat16
    probabilities if the resolution is at least 2,048: their log-odds differ by more than 1 / 2,048.

    Otherwise let s be the largest fraction of the samples in a cell with different scores. Error bounds:

    - The Kolmogorov-Smirnov error (KS) is too small by at most s. Cumulative sums are exact at the cell borders, and
      within a cell they change by at most its fraction of samples.
    - The averaged two-bin calibration error (ATB) has an error of at most 2 s. The two sums change by opposite amounts
      of at most s, and their absolute values add up to at most 1.
    - The adaptive calibration error (ACE) over B bins has an error of at most 2 (B - 1) s. Each of the B - 1 inner
      edges moves by less than a cell.
    - The Brier score after isotonic recalibration (pool adjacent violators, PAVA) is too large by at most s / 2. The
      discrimination (DSC) is too small by the same amount. The exact fit f is monotone. Its mean over each cell is
      an admissible fit. The loss for outcomes y is larger by at most 2 cov(f, y) <= range(f) / 2 in each cell.
    - The test-based calibration error (TCE) changes by the samples whose cell contains a critical value of the test: at
      most 4 cells for each bin, or 400 B s percent. This assumes that the isotonic blocks do not change. Isotonic
      blocks depend on the outcomes and may change abruptly; edges from the caller do not change.

    Attributes:
        mode: definition of the events.
        resolution: number of cells for each unit of log-odds.
        from_logits: whether scores are log-odds rather than probabilities.
        with_squares: whether to sum squared outcomes, which debiased errors require for soft targets.
    """

    mode: Mode
    resolution: int
    from_logits: bool = False
    with_squares: bool = False
    only_confidences: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("resolution", self.resolution, at_most=MAX_CELLS_PER_UNIT)

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape of the F sums: `(F, K)`, or `(C, F, K)` for class-wise events."""
        return (*mode_shape(self.mode, task, num_classes), 3 + self.with_squares, self._n_cells)

    @property
    def _n_cells(self) -> int:
        return (_HIGHEST - _LOWEST) * self.resolution + 2

    @property
    def ranges(self) -> Ranges:
        """Ranges of the summed quantities. The second one is |log-odds| in the outermost cells of logits."""
        return ((1, 1), (0, math.inf if self.from_logits else 1), (0, 1), *[(0, 1)] * self.with_squares)

    def from_predictions(self, p: Predictions) -> BinStats:
        """Return the sums over all events of a batch of predictions."""
        cells = self.cells(p)
        return BinStats(cell_sums(cells.index, cells.columns, self._n_cells))

    def cells(self, p: Predictions) -> EventCells:
        """Return the cell index and the weighted summands of each event."""
        score, outcome = reduce_to_scores(p, self.mode)
        cells, wide = self._cell(score), wide_dtype(score.device)
        quantities = [torch.ones_like(score), self._summand(score, cells), outcome]
        if self.with_squares:
            quantities.append(outcome.to(wide).square())
        weights = _weights_of_events(p, self.mode)
        columns = torch.stack([weighted(quantity, weights, wide) for quantity in quantities], -2)
        return EventCells(cells, columns, self._n_cells)

    def add_sample(self, sample: RankedSample, sums: Tensor) -> None:
        """Add the sample that `ExactSample` computes to the sums `(..., 3, K)` of `from_predictions`, in place."""
        size = _FEW if sample.score.device.type == "cpu" else _CHUNK_SIZE
        width = max(1, size // max(1, sample.score.shape[:-1].numel()))
        for start in range(0, sample.score.shape[-1], width):
            part = sample.narrow(start, width)
            score = part.score.to(wide_dtype(part.score.device))
            n = torch.ones_like(score) if part.n is None else part.n.to(score.dtype)
            cells = self._cell(score)
            columns = torch.stack((n, n * self._summand(score, cells), part.positives.to(score.dtype)), -2)
            columns.masked_fill_(score.isnan().unsqueeze(-2), 0)
            sums.scatter_add_(-1, cells.unsqueeze(-2).expand(columns.shape), columns)

    @property
    def _lowest(self) -> int:
        return _LOWEST_LOGIT if self.from_logits else _LOWEST

    def _cell(self, score: Tensor) -> Tensor:
        """Return the cell index of each score. The first cell is for p = 0 and the last for p = 1."""
        score = score.detach().to(wide_dtype(score.device))
        log_odds = score if self.from_logits else score.log() - torch.log1p(-score)
        # NaN marks an ignored element. Its summands are 0, so it may be assigned to any cell.
        cell = ((log_odds - self._lowest) * self.resolution).nan_to_num().floor().clamp(0, self._n_cells - 3).long() + 1
        return cell.masked_fill(log_odds == -torch.inf, 0).masked_fill(log_odds == torch.inf, self._n_cells - 1)

    def _summand(self, score: Tensor, cell: Tensor) -> Tensor:
        """Return the number to sum for each score: its probability, with log-odds that of the less probable outcome.

        In the outermost cells for finite log-odds this probability is almost 0, and the number is |log-odds|.
        """
        score = score.to(wide_dtype(score.device))
        if not self.from_logits:
            return score
        distance = torch.where(self._is_above(cell), score, -score).masked_fill(score.isinf(), 0)
        return torch.where(self._is_outermost(cell), distance, torch.sigmoid(-distance)).masked_fill(score.isinf(), 0)

    def _is_above(self, cell: Tensor) -> Tensor:
        """Return a mask of the cells with non-negative log-odds."""
        return cell > -self._lowest * self.resolution

    def _is_outermost(self, cell: Tensor) -> Tensor:
        """Return a mask of the lowest and the highest cell with finite log-odds."""
        return (cell == 1) | (cell == self._n_cells - 2)

    def wrap(self, sums: Tensor) -> RankedSample:
        """Convert sums `(..., F, K)` to a sample with one element per cell. Elements of empty cells are ignored."""
        occupied = sums[..., 0, :] > 0
        cell = torch.arange(self._n_cells, device=sums.device)
        if sums.device.type == "cpu":  # on a GPU, selecting cells by their values would synchronise
            used = occupied.reshape(-1, occupied.shape[-1]).any(0)
            sums, occupied, cell = (t[..., used] for t in (sums, occupied, cell))
        n, total, positives, *squares = sums.unbind(-2)
        mean = total / n
        score = self._log_odds_of(mean.masked_fill(~occupied, 0.5), cell) if self.from_logits else mean.clamp(0, 1)
        score = score.masked_fill(~occupied, torch.nan)
        return RankedSample(score, positives, n, self.from_logits, squares=squares[0] if squares else positives)

    def _log_odds_of(self, mean: Tensor, cell: Tensor) -> Tensor:
        """Return the log-odds of each cell from the mean of its summands, the inverse of `_summand`."""
        outermost = self._is_outermost(cell)
        certain = (cell == 0) | (cell == self._n_cells - 1)
        rarer = mean.masked_fill(outermost | certain, 0.5).clamp(0, 0.5)  # probability of the less probable outcome
        distance = torch.where(outermost, mean, torch.log1p(-rarer) - rarer.log()).masked_fill(certain, torch.inf)
        return torch.where(self._is_above(cell), distance, -distance)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate: max(N, K) per batch element and class."""
        n = p.samples[-1]
        return n_events(p, self.mode) // max(1, n) * max(n, self._n_cells)


def _weights_of_events(p: Predictions, mode: Mode) -> Tensor | None:
    """Return the weights with a shape that broadcasts to the scores of the events."""
    per_class = p.task == "multiclass" and mode == "classwise"
    return p.weights.unsqueeze(-2) if p.weights is not None and per_class else p.weights
