"""Weighted sums from which metrics are computed, and accumulators that compute the sums from predictions.

The sums of several batches or processes are added. Metrics with equal accumulators share one pass over the same input.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vecdot

from torchcalib.core.arguments import Task
from torchcalib.core.events import Events, Mode
from torchcalib.core.pieces import Piece
from torchcalib.core.predictions import Predictions, zero_in_all_replicates
from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.bin_sums.formula import ONE_ROW
from torchcalib.ops.dispatch import source_of
from torchcalib.ops.logs import wide_dtype, xmul
from torchcalib.ops.segments import bin_sums, bin_sums_of_replicates, cell_sums

if TYPE_CHECKING:
    from torchcalib.ops.batch.formula import Demand
    from torchcalib.ops.binary_scores import Kind


@dataclass(frozen=True, eq=False)
class Sums:
    """Weighted sums of F quantities, such as the confidence, over the samples in each of K cells (bins or classes)."""

    sums: Tensor  # float64 `(..., F, K)`; the subclass defines the order of the quantities
    # Number `(...)` that is 0 if and only if all targets are 0 or 1 and no weights are floating; see `noise_flag_of`.
    # None without `BinStats.noise`, and after `with_noise_row`.
    noise_flag: Tensor | None = field(default=None, kw_only=True)

    @property
    def n(self) -> Tensor:
        """Total weight in each cell `(..., K)`: the number of samples if all weights are 1."""
        return self.sums[..., 0, :]

    @property
    def total(self) -> Tensor:
        """Total weight over all cells `(...)`."""
        return self.n.sum(-1)

    @property
    def share(self) -> Tensor:
        """Fraction of the total weight in each cell `(..., K)`; NaN without data."""
        n = self.sums[..., 0, :]
        return n / n.sum(-1, keepdim=True)

    def __add__(self, other: Self) -> Self:
        noise_flag = None if self.noise_flag is None or other.noise_flag is None else self.noise_flag + other.noise_flag
        return replace(self, sums=self.sums + other.sums, noise_flag=noise_flag)


@dataclass(frozen=True, eq=False)
class ScoreSum(Sums):
    """Weighted sums of a per-sample score, over all samples (K = 1) or for each true class (K = C).

    The quantities are the weight and the score. For K = C the third one is sum_k t_k^2 for target t, 1 for labels.
    """

    @property
    def score(self) -> Tensor:
        """Weighted sum of the scores in each cell `(..., K)`."""
        return self.sums[..., 1, :]


@dataclass(frozen=True, eq=False)
class BinStats(Sums):
    """Weighted sums over the samples in each of B bins, from which binned calibration errors are computed.

    Attributes:
        sums: `(..., F, B)`. The quantities are weight, confidence, outcome, and with `has_noise` also `spread`,
            `noise`, `weight_square` and `residual_square`. The entropic calibration difference (ECD) may follow.
        has_noise: whether the sums contain these four. The variances `spread` and `noise` have no gradient.
        upper: largest score in each bin `(..., B)`, if the bins are runs of a sorted sample; else None.
    """

    has_noise: bool = field(default=False, kw_only=True)
    upper: Tensor | None = field(default=None, kw_only=True)

    @property
    def outcomes(self) -> Tensor:
        """Weighted sum of outcomes `(..., B)`: the number of events that occurred if all weights are 1."""
        return self.sums[..., 2, :]

    @property
    def confidence(self) -> Tensor:
        """Mean confidence `(..., B)`; NaN in an empty bin."""
        return self.sums[..., 1, :] / self.n

    @property
    def frequency(self) -> Tensor:
        """Mean outcome `(..., B)`; NaN in an empty bin."""
        return self.outcomes / self.n

    @property
    def ecd(self) -> Tensor:
        """Mean entropic calibration difference in nats `(..., B)`; NaN in an empty bin, or if it was not summed."""
        row = 7 if self.has_noise else 3
        return self.sums[..., row, :] / self.n if self.sums.shape[-2] > row else torch.full_like(self.n, torch.nan)

    @property
    def spread(self) -> Tensor:
        """Sum of w p (1 - p) `(..., B)` for weights w and confidences p; NaN if not summed."""
        return self.sums[..., 3, :] if self.has_noise else torch.full_like(self.n, torch.nan)

    @property
    def noise(self) -> Tensor:
        """Variance of the weighted sum of outcomes under perfect calibration `(..., B)`; NaN if not summed.

        Rows are assumed to be independent, with outcome variance v. Integer weights w count independent copies of a
        row: the variance is the sum of w v. Floating weights express importance: the variance is the sum of w^2 v.
        For labels, v = p (1 - p). A soft target t is the mean of an unknown number of labels, with a smaller variance.
        For soft targets, v = (t - p)^2, whose expectation under perfect calibration is the variance of t.

        Floating targets of a batch element are treated as labels if all of them are 0 or 1. With floating weights they
        are treated as soft targets, because the sum of w^2 p (1 - p) is not stored. The expectation is the same, but
        (t - p)^2 varies more, and p-values require more rows. Pass labels as integers.
        """
        if not self.has_noise:
            return torch.full_like(self.n, torch.nan)
        return self.sums[..., 4, :] if self.noise_flag is None else _noise(self.sums, self.noise_flag)

    @property
    def weight_square(self) -> Tensor:
        """Sum of w^2 `(..., B)` for floating weights w. An integer weight k adds k, as k rows do. NaN if not summed."""
        return self._row_of_residuals(5)

    @property
    def effective_n(self) -> Tensor:
        """Number of samples `(..., B)`; for floating weights Kish's effective number. NaN if not summed."""
        return kish_number(self.n, self.weight_square)

    @property
    def residual_square(self) -> Tensor:
        """Sum of w (o - p)^2 `(..., B)` for weights w, outcomes o and confidences p; NaN if not summed."""
        return self._row_of_residuals(6)

    def _row_of_residuals(self, row: int) -> Tensor:
        # Cells of the smooth error have other sums, and only those of the variances.
        has_row = self.has_noise and self.sums.shape[-2] > 6
        return self.sums[..., row, :] if has_row else torch.full_like(self.n, torch.nan)

    @property
    def gap_variance(self) -> Tensor:
        """Estimated variance of `gap` `(..., B)`, from the residuals e = o - p of the rows in a bin.

        It is S2 R / (W (W^2 - S2)). Here W and S2 are the sums of w and w^2, and R is the sum of w (e - m)^2 for the
        weighted mean m of e. A bin with one row has the variance 0. The variance does not depend on the unit of
        floating weights.
        """
        n, square = self.n, self.weight_square
        # R = sum w e^2 - W m^2 is a rounding error of either sign if all residuals are equal.
        around_mean = (self.residual_square - n * self.gap.square()).clamp(min=0)
        return unbiased_variance(square * around_mean / n.masked_fill(n == 0, 1), n, square)

    @property
    def gap(self) -> Tensor:
        """Frequency minus confidence `(..., B)`; 0 in an empty bin, NaN without data."""
        n, confidence, outcomes, *_ = self.sums.unbind(-2)
        empty = (n == 0) & (n.sum(-1, keepdim=True) > 0)
        return (outcomes - confidence) / n.masked_fill(empty, 1)

    @property
    def weighted_gap(self) -> Tensor:
        """Share times gap `(..., B)`, in which the weight of the bin cancels; NaN without data."""
        sums = self.sums
        return (sums[..., 2, :] - sums[..., 1, :]) / sums[..., 0, :].sum(-1)[..., None]


def kish_number(n: Tensor, weight_square: Tensor) -> Tensor:
    """Return Kish's effective number of rows, (sum w)^2 / sum w^2, from the sums of w and w^2; 0 without rows."""
    return (n.square() / weight_square).masked_fill(n == 0, 0)


def unbiased_variance(of_sum: Tensor, n: Tensor, weight_square: Tensor) -> Tensor:
    """Return the variance of the mean outcome from that of the weighted sum of outcomes; 0 for a single row.

    `n` and `weight_square` are the sums of w and w^2 of the rows.
    """
    difference = n.square() - weight_square
    is_single = difference <= ONE_ROW * torch.finfo(n.dtype).eps * n.square()
    return (of_sum / difference.masked_fill(is_single, 1)).masked_fill(is_single, 0)


S = TypeVar("S", covariant=True)


def kind_of_noise(p: Predictions, with_noise: bool) -> Noise:
    """Return the variance formula: that of labels, or of soft targets; see `ops.bin_sums.Noise`."""
    return ("labels" if p.has_labels else "shares") if with_noise else "none"


def _noise(sums: Tensor, noise_flag: Tensor) -> Tensor:
    return torch.where(noise_flag.unsqueeze(-1) == 0, sums[..., 3, :], sums[..., 4, :])


def with_noise_row(sums: Tensor, noise_flag: Tensor) -> Tensor:
    """Return `BinStats.sums`, with the values of `BinStats.noise` in row 4. Do not add the result to other sums."""
    return torch.cat((sums[..., :4, :], _noise(sums, noise_flag).unsqueeze(-2), sums[..., 5:, :]), -2)


def noise_flag_of(
    p: Predictions, sums: Tensor, events: Events | None, groups: Tensor | None = None, n_groups: int = 1
) -> Tensor:
    """Return the contribution of a batch to `Sums.noise_flag`, which is 0 if `BinStats.noise` equals `BinStats.spread`.

    The two are equal for labels with integer weights. A soft target t with weight w contributes w t (1 - t), which is 0
    for a label. A floating weight w contributes w, because the noise is then a sum of squared weights. Contributions
    `(...)`, or `(G, ...)` with groups, are not negative. `events` is None for integer labels.
    """
    if not p.copies:
        return sums[..., 0, :].detach().sum(-1)
    if p.has_labels or events is None:
        return sums.new_zeros(sums.shape[:-2])
    outcome, weights = events.outcome.detach(), None if events.weights is None else events.weights.detach()
    added = (1 - outcome).mul_(outcome)  # in place to save memory
    added = added if weights is None else added.nan_to_num_(0, 0, 0)  # rows with weight 0 may be NaN
    if groups is None:
        total: Tensor = added.sum(-1, dtype=sums.dtype) if weights is None else vecdot(added.to(sums.dtype), weights)
        return total
    added = added.to(sums.dtype) if weights is None else added * weights
    return cell_sums(groups.expand_as(added), added.unsqueeze(-2), n_groups).squeeze(-2).movedim(-1, 0)


def has_noise_flag(accumulator: object) -> bool:
    """Return whether the sums of an accumulator have a `Sums.noise_flag`."""
    return bool(getattr(accumulator, "with_noise", False))


Ranges = Sequence[tuple[float, float]]
"""Smallest and largest value of each summed quantity, for a row of weight 1. The first quantity is the weight."""


def check_sums(sums: Tensor, ranges: Ranges, noise_flag: Tensor | None) -> None:
    """Raise ValueError unless sums `(..., F, K)` of a saved state are possible for weights that are not negative.

    With a `noise_flag` of 0, weights and outcomes are whole numbers; see `noise_flag_of`.
    """
    n = sums[..., 0, :]
    is_possible = (n >= 0) & n.isfinite()
    for k, (low, high) in enumerate(ranges[1:], 1):
        total, tolerance = sums[..., k, :], 1e-6 * n
        # Infinite limits would be NaN for n = 0. A sum without rows is 0.
        least = low * n - tolerance if math.isfinite(low) else n.new_full((), low)
        most = high * n + tolerance if math.isfinite(high) else n.new_full((), high)
        is_possible &= (total >= least) & (total <= most) & ((n > 0) | (total == 0))
    if noise_flag is not None:
        counts = sums[..., (0, 2), :]
        are_counts = (counts == counts.round()).all(-2)
        is_possible &= (noise_flag >= 0).unsqueeze(-1) & noise_flag.isfinite().unsqueeze(-1)
        is_possible &= are_counts | (noise_flag != 0).unsqueeze(-1)
    if not bool(is_possible.all()):
        first = sums.transpose(-1, -2)[~is_possible][0].tolist()
        raise ValueError(
            f"`state` must be possible: sums of weights and quantities must be finite and in their ranges, got "
            f"{', '.join(f'{x:g}' for x in first)}. The state is corrupt."
        )


@dataclass(frozen=True, eq=False)
class EventCells:
    """Cell index and weighted summands of every event: `Sums.sums` contains the sum of the summands in each cell."""

    index: Tensor  # Cell index of each event, int64 `(..., E)`. Events from the same sample are adjacent.
    columns: Tensor  # weighted summands, float64 `(..., F, E)`
    n_cells: int  # number of cells K


class SumsAccumulator(Protocol[S]):
    """Interface of accumulators, which sum functions of predictions and targets over cells, such as bins."""

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape `(..., F, K)` of the sums for one batch element."""

    def from_predictions(self, p: Predictions) -> Sums:
        """Return the sums over all samples of a batch of predictions."""

    def wrap(self, sums: Tensor) -> S:
        """Convert sums `(..., F, K)` to the statistic of the metric, for example `BinStats`."""

    @property
    def ranges(self) -> Ranges:
        """Range of each quantity, by which saved sums are checked."""

    def n_events(self, p: Predictions) -> int:
        """Return the number of values that `from_predictions` stores in memory for each replicate weight."""


@dataclass(frozen=True)
class ScoreAccumulator:
    """Accumulator for the weighted sum of a per-sample score, such as the log loss."""

    # Function of predictions and `arguments` that returns scores `(..., N)`. It must be a module-level function, which
    # can be pickled.
    per_sample: Callable[..., Tensor]
    arguments: tuple[Hashable, ...]  # further arguments of `per_sample`
    by_class: bool  # Whether to sum separately for each true class. A soft target is weighted by its probabilities.
    # Name of the score in `Predictions.score_sum`, which computes the sum over all classes in one pass; or None
    kind: "Kind | None" = field(default=None, compare=False)
    # coefficients of the score of a label as a sum of the statistics in `Piece.totals`; None for other scores
    of_statistics: tuple[float, ...] | None = field(default=None, compare=False, repr=False)
    # smallest and largest score
    score_range: tuple[float, float] = field(default=(-math.inf, math.inf), compare=False, repr=False)

    @property
    def ranges(self) -> Ranges:
        """Ranges of weight and score and, by class, of the sum of squared targets."""
        return ((1, 1), self.score_range, *[(0, 1)] * self.by_class)

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape of the sums: `(2, 1)`, or `(3, C)` by class, with a leading axis for L labels."""
        labels = (known("num_labels", num_classes),) if task == "multilabel" else ()
        if not self.by_class:
            return (*labels, 2, 1)
        return (*labels, 3, known("num_classes", num_classes) if task == "multiclass" else 2)

    def from_predictions(self, p: Predictions) -> ScoreSum:
        """Return the weighted sums of the score over all samples of a batch."""
        total = None if self.kind is None or self.by_class else p.score_sum(self.kind)
        if total is not None:
            return ScoreSum(torch.stack((torch.full_like(total, p.samples[-1]), total), -1).unsqueeze(-1))
        score = self.per_sample(p, *self.arguments)
        if p.weights is None and not self.by_class:  # without a vector of ones, for the speed of small batches
            total = score.sum(-1, dtype=wide_dtype(score.device))
            return ScoreSum(torch.stack((torch.full_like(total, score.shape[-1]), total), -1).unsqueeze(-1))
        if p.replicates and p.weights is not None and (p.has_labels or not self.by_class):
            index = p.target.long() if self.by_class else torch.zeros_like(score, dtype=torch.int64)
            ones = torch.ones_like(score)
            quantities = (ones, score, ones) if self.by_class else (ones, score)
            return ScoreSum(sums_of_replicates(index, quantities, p.weights, p.num_classes if self.by_class else 1))
        score, n = self._weighted(score, p)
        if not self.by_class:
            return ScoreSum(torch.stack((n.sum(-1), score.sum(-1)), -1).unsqueeze(-1))
        if p.has_labels:
            return ScoreSum(bin_sums(p.target.long(), (n, score, n), p.num_classes))
        return ScoreSum(self._split_by_class(score, n, p).sum(-2))

    def demand(self, task: Task, copies: bool) -> "Demand | None":  # noqa: ARG002 - sums of other accumulators differ
        """Return the sums of a batch of labels on an accelerator; None if `ops.batch` has other ones."""
        is_own = type(self) is ScoreAccumulator and not self.by_class and task != "multilabel"
        if not is_own or not self.of_statistics:
            return None
        from torchcalib.ops.batch.formula import Demand

        return Demand(None, coefficients=self.of_statistics)

    def takes_pieces(self, task: Task, from_logits: bool) -> bool:  # noqa: ARG002 - logits of any score
        """Return whether `add_piece` can replace `from_predictions` for labels; see `core.pieces`."""
        is_own = type(self) is ScoreAccumulator and not self.by_class  # a subclass may have other sums
        score = self.kind if task == "binary" else self.of_statistics
        return is_own and task != "multilabel" and score is not None

    def add_piece(self, piece: Piece, sums: Any) -> bool:
        """Add the weights of rows and their scores to the numpy array `sums` `(2, G)` in place.

        Return False, and add nothing, for invalid values.
        """
        if piece.totals is None:
            assert self.kind is not None  # see `takes_pieces`
            source: Any = source_of("binary_scores", "cpu", torch.float64, piece.n_values, "auto")
            columns = piece.weights, piece.groups, piece.n_groups, piece.ignored
            weight, score = source.labelled_sums(piece.values, piece.label, self.kind, piece.from_logits, *columns)
        else:
            totals = piece.totals if piece.groups is not None else piece.totals[:, 0].tolist()
            weight, score = totals[-1], 0.0
            for c, total in zip(self.of_statistics or (), totals, strict=False):
                if c:  # 0 times infinity is NaN
                    score += c * total
        if piece.groups is None:  # numbers, whose operations take less time than those of arrays
            if math.isnan(score):
                return False
            sums[0, 0] += weight
            sums[1, 0] += score
            return True
        if np.isnan(score).any():
            return False
        sums[0] += weight
        sums[1] += score
        return True

    def checks(self, p: Predictions) -> bool:
        """Compute the sum for unchecked predictions, and return whether this pass has found all values to be valid."""
        return self.kind is not None and not self.by_class and p.score_sum(self.kind) is not None

    def cells(self, p: Predictions) -> EventCells:
        """Return the cell index and summands of each sample; soft targets by class have one event per class."""
        score, n = self._weighted(self.per_sample(p, *self.arguments), p)
        if not self.by_class:
            return EventCells(torch.zeros_like(score, dtype=torch.int64), torch.stack((n, score), -2), 1)
        if p.has_labels:
            return EventCells(p.target.long(), torch.stack((n, score, n), -2), p.num_classes)
        classes = torch.arange(p.num_classes, device=score.device).expand(*score.shape, -1)
        return EventCells(classes.flatten(-2), self._split_by_class(score, n, p).flatten(-2), p.num_classes)

    def _weighted(self, score: Tensor, p: Predictions) -> tuple[Tensor, Tensor]:
        """Return the weighted scores and the weights, each `(..., N)`."""
        score = weighted(score, p.weights, wide_dtype(score.device))
        return score, torch.ones_like(score) if p.weights is None else p.weights.expand_as(score)

    def _split_by_class(self, score: Tensor, n: Tensor, p: Predictions) -> Tensor:
        """Return quantity times target probability of each class `(..., F, N, K)`; infinity times 0 is 0."""
        probs = p.target if p.soft else torch.stack((1 - p.target, p.target), -1)
        probs = probs.to(score).nan_to_num()  # NaN only in rows with weight 0
        columns = torch.stack((n, score, n * probs.square().sum(-1)), -2)
        return xmul(probs.unsqueeze(-3), columns.unsqueeze(-1))

    def wrap(self, sums: Tensor) -> ScoreSum:
        """Convert sums `(..., F, K)` to a `ScoreSum`."""
        return ScoreSum(sums)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory per replicate: N, or N C for soft targets that are summed by class."""
        return p.samples.numel() * (p.num_classes if p.soft and self.by_class else 1)


def sums_of_replicates(
    index: Tensor, columns: Sequence[Tensor], weights: Tensor, n_cells: int, *, finite: bool = False
) -> Tensor:
    """Return the sums `(R, ..., F, K)` of F columns over K cells, for R replicates of the weights.

    `finite` states that all summands are finite where a weight is not 0, which allows a faster algorithm.
    """
    wide = wide_dtype(index.device)
    absent = zero_in_all_replicates(weights, index.dim())
    columns = [column.to(wide).masked_fill(absent, 0) for column in columns]
    replicates = weights.shape[: weights.dim() - index.dim()]
    sums = bin_sums_of_replicates(index, columns, weights.flatten(0, len(replicates) - 1), n_cells, finite)
    return sums.reshape(*replicates, *sums.shape[1:])


def mode_shape(mode: Mode, task: Task, num_classes: int | None) -> tuple[int, ...]:
    """Return the shape of the batch axis that a mode adds: `(C,)` or `(L,)` for "classwise", otherwise `()`."""
    if mode != "classwise":
        return ()
    return (known("num_labels" if task == "multilabel" else "num_classes", num_classes),)


def known(name: str, count: int | None) -> int:
    """Return the number of classes or labels unchanged. Raise ValueError if it is None."""
    if count is None:
        raise ValueError(f"`{name}` must be given for values per class or label, got None. Pass {name}=...")
    return count


def weighted(x: Tensor, weights: Tensor | None, wide: torch.dtype) -> Tensor:
    """Return `x * weights` in dtype `wide`. A row with weight 0 becomes exactly 0, even if it is infinite or NaN."""
    x = x.to(wide)
    return x if weights is None else (x * weights).masked_fill(weights == 0, 0)
