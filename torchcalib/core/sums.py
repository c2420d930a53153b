"""Statistics that add: each is one tensor of sums.

So streaming, merging, saving and syncing are an addition of tensors. An accumulator describes which sums to take. It is
a frozen value: metrics with equal accumulators over equal input share one pass.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.linalg import vecdot

from torchcalib.core.arguments import Task
from torchcalib.core.events import Events, Mode
from torchcalib.core.predictions import Predictions, in_all_replicates
from torchcalib.ops.bin_sums import Noise
from torchcalib.ops.logs import wide_dtype, xmul
from torchcalib.ops.segments import bin_sums, bin_sums_of_replicates, cell_sums


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums in float64, `(..., F, K)`: F quantities, each over K cells.

    Attributes:
        sums: in the order of the subclass.
        apart: `(...)`, 0 if all targets so far are labels; see `apart_of`. None without noise, and after `settled`.
    """

    sums: Tensor
    apart: Tensor | None = field(default=None, kw_only=True)

    @property
    def n(self) -> Tensor:
        """Sum of weights in each cell `(..., K)`; the number of samples if all weights are 1."""
        return self.sums[..., 0, :]

    @property
    def total(self) -> Tensor:
        """Sum of all weights `(...)`."""
        return self.n.sum(-1)

    @property
    def share(self) -> Tensor:
        """Share of each cell in the sum of weights `(..., K)`; NaN without data."""
        n = self.sums[..., 0, :]
        return n / n.sum(-1, keepdim=True)

    def __add__(self, other: Self) -> Self:
        apart = None if self.apart is None or other.apart is None else self.apart + other.apart
        return replace(self, sums=self.sums + other.sums, apart=apart)


@dataclass(frozen=True, eq=False)
class ScoreSum(Sums):
    """Sums of a per-sample score: over all samples (K = 1), or over the samples of each class (K = C).

    The quantities are weight, score and, by class, sum_k t_k^2, which equals the weight for labels.
    """

    @property
    def score(self) -> Tensor:
        """Sum of the score `(..., K)`."""
        return self.sums[..., 1, :]

    @property
    def label_square(self) -> Tensor:
        """Sum of sum_k t_k^2 `(..., K)`."""
        return self.sums[..., 2, :]


@dataclass(frozen=True, eq=False)
class BinStats(Sums):
    """Sums over the samples of each bin: weight, confidence, outcome and, optionally, noise (two) and ECD (last).

    Binned errors are functions of `share`, `confidence`, `frequency` and `gap`. An empty bin has gap 0, so it adds
    nothing to a sum or a maximum. Without data every gap is NaN. `spread` and `noise` are variances under perfect
    calibration, and constants to autograd.

    Attributes:
        sums: `(..., F, B)`, in this order.
        has_noise: whether quantities 3 and 4 are `spread` and `noise`.
    """

    has_noise: bool = field(default=False, kw_only=True)

    @property
    def outcomes(self) -> Tensor:
        """Sum of outcomes `(..., B)`; the number of events that occurred if all weights are 1."""
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
        """Mean ECD in nats `(..., B)`; NaN in an empty bin, and everywhere if it was not summed."""
        row = 5 if self.has_noise else 3
        return self.sums[..., row, :] / self.n if self.sums.shape[-2] > row else torch.full_like(self.n, torch.nan)

    @property
    def spread(self) -> Tensor:
        """Sum of w p (1 - p) `(..., B)`, the variances of labels in a calibrated model; NaN if it was not summed."""
        return self.sums[..., 3, :] if self.has_noise else torch.full_like(self.n, torch.nan)

    @property
    def noise(self) -> Tensor:
        """Variance of the sum of outcomes in a calibrated model `(..., B)`; NaN if it was not summed.

        Rows are assumed to be independent. Integer weights are numbers of independent copies: the sum of w v. Floating
        weights are the importance of a row and do not make it more certain: the sum of w^2 v. For labels v is
        p (1 - p). A soft target t is a mean of an unknown number of annotators, with a smaller variance: there v is
        (t - p)^2, whose expectation in a calibrated model is the variance of t.

        Floating targets of a batch element are labels if all of them are 0 or 1, and soft targets otherwise. (Integer
        targets are labels.) With floating weights they are always soft targets, because the sum of w^2 p (1 - p) is not
        kept. For labels both sums have the same expectation, but that of squares is noisier, so that p-values are valid
        for many rows only: pass labels as integers.
        """
        if not self.has_noise:
            return torch.full_like(self.n, torch.nan)
        return self.sums[..., 4, :] if self.apart is None else _noise(self.sums, self.apart)

    @property
    def gap(self) -> Tensor:
        """Frequency minus confidence `(..., B)`; 0 in an empty bin, NaN without data."""
        n, confidence, outcomes = self.sums[..., 0, :], self.sums[..., 1, :], self.sums[..., 2, :]
        empty = (n == 0) & (n.sum(-1, keepdim=True) > 0)
        return (outcomes - confidence) / n.masked_fill(empty, 1)


S = TypeVar("S", covariant=True)

KIND_OF_NOISE: dict[bool, Noise] = {True: "labels", False: "shares"}
"""Which variances of outcomes are summed, for labels and for soft targets; see `ops.bin_sums.Noise`."""


def _noise(sums: Tensor, apart: Tensor) -> Tensor:
    return torch.where(apart.unsqueeze(-1) == 0, sums[..., 3, :], sums[..., 4, :])


def settled(sums: Tensor, apart: Tensor) -> Tensor:
    """Return `BinStats.sums` with the noise that applies to all rows together; they do not add any more."""
    return torch.cat((sums[..., :4, :], _noise(sums, apart).unsqueeze(-2), sums[..., 5:, :]), -2)


def apart_of(
    p: Predictions, sums: Tensor, events: Events | None, groups: Tensor | None = None, n_groups: int = 1
) -> Tensor:
    """Return what a batch adds to `Sums.apart`, which is 0 as long as `BinStats.noise` equals `BinStats.spread`.

    They are equal for labels whose weights are copies. A soft target t of weight w adds w t (1 - t), which is 0 for a
    label. Floating weights add themselves, because their noise is a sum of squares.

    Args:
        p: the batch.
        sums: of its events `(..., F, B)`, or `(G, ..., F, B)`.
        events: the events; None for integer labels.
        groups: the group of every event `(..., N)`; None for no groups.
        n_groups: G.

    Returns:
        `(...)`, or `(G, ...)`. No summand is negative, so the sum is 0 if and only if each of them is.
    """
    if not p.copies:
        return sums[..., 0, :].detach().sum(-1)
    if p.hard or events is None:
        return sums.new_zeros(sums.shape[:-2])
    outcome, weights = events.outcome.detach(), None if events.weights is None else events.weights.detach()
    added = (1 - outcome).mul_(outcome)  # in place: memory for many events costs more than the arithmetic
    added = added if weights is None else added.nan_to_num_(0, 0, 0)  # rows of weight 0 may be NaN
    if groups is None:
        total: Tensor = added.sum(-1, dtype=sums.dtype) if weights is None else vecdot(added.to(sums.dtype), weights)
        return total
    added = added.to(sums.dtype) if weights is None else added * weights
    return cell_sums(groups.expand_as(added), added.unsqueeze(-2), n_groups).squeeze(-2).movedim(-1, 0)


def with_apart(accumulator: object) -> bool:
    """Return whether the sums of an accumulator have `Sums.apart`, as those of bins with noise do."""
    return bool(getattr(accumulator, "with_noise", False))


@dataclass(frozen=True, eq=False)
class Cells:
    """Events before they are summed: the cell of each, and its summands.

    Attributes:
        index: cell of every event, int64 `(..., E)`; several events of a sample are neighbours.
        columns: weighted summands in float64 `(..., F, E)`.
        n_cells: number of cells K.
    """

    index: Tensor
    columns: Tensor
    n_cells: int


class SumsAccumulator(Protocol[S]):
    """Description of sums over predictions, and of the statistic that they are."""

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape `(..., F, K)` of the sums of one batch element."""

    def of(self, p: Predictions) -> Sums:
        """Return the sums over the samples of `p`."""

    def wrap(self, sums: Tensor) -> S:
        """Return the statistic of accumulated sums."""

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate."""


@dataclass(frozen=True)
class ScoreAccumulator:
    """Sums of a per-sample score.

    Attributes:
        per_sample: predictions (and `arguments`) to scores `(..., N)`; a module-level function, so that it pickles.
        arguments: further arguments of `per_sample`.
        by_class: keep the samples of each class apart. A soft target belongs to each class with its probability.
    """

    per_sample: Callable[..., Tensor]
    arguments: tuple[Hashable, ...]
    by_class: bool

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return `(2, 1)`, by class `(3, C)`; and that for each of L labels."""
        labels = (known("num_labels", num_classes),) if task == "multilabel" else ()
        if not self.by_class:
            return (*labels, 2, 1)
        return (*labels, 3, known("num_classes", num_classes) if task == "multiclass" else 2)

    def of(self, p: Predictions) -> ScoreSum:
        """Sum the score over the samples of `p`."""
        score = self.per_sample(p, *self.arguments)
        if p.replicates and p.weights is not None and (p.hard or not self.by_class):
            index = p.target.long() if self.by_class else torch.zeros_like(score, dtype=torch.int64)
            ones = torch.ones_like(score)
            quantities = (ones, score, ones) if self.by_class else (ones, score)
            return ScoreSum(sums_of_replicates(index, quantities, p.weights, p.num_classes if self.by_class else 1))
        score, n = self._weighted(score, p)
        if not self.by_class:
            return ScoreSum(torch.stack((n.sum(-1), score.sum(-1)), -1).unsqueeze(-1))
        if p.task == "multiclass" and not p.soft:
            return ScoreSum(bin_sums(p.target, (n, score, n), p.num_classes))
        return ScoreSum(self._shared_out(score, n, p).sum(-2))

    def cells(self, p: Predictions) -> Cells:
        """Return the cell and the summands of every sample; a soft target by class is an event of each class."""
        score, n = self._weighted(self.per_sample(p, *self.arguments), p)
        if not self.by_class:
            return Cells(torch.zeros_like(score, dtype=torch.int64), torch.stack((n, score), -2), 1)
        if p.hard:
            return Cells(p.target.long(), torch.stack((n, score, n), -2), p.num_classes)
        classes = torch.arange(p.num_classes, device=score.device).expand(*score.shape, -1)
        return Cells(classes.flatten(-2), self._shared_out(score, n, p).flatten(-2), p.num_classes)

    def _weighted(self, score: Tensor, p: Predictions) -> tuple[Tensor, Tensor]:
        """Return weighted scores and weights `(..., N)`."""
        score = weighted(score, p.weights, wide_dtype(score.device))
        return score, torch.ones_like(score) if p.weights is None else p.weights.expand_as(score)

    def _shared_out(self, score: Tensor, n: Tensor, p: Predictions) -> Tensor:
        """Return the quantities of every sample, divided among classes by its soft target, `(..., F, N, K)`."""
        shares = p.target if p.soft else torch.stack((1 - p.target, p.target), -1)
        shares = shares.to(score).nan_to_num()  # NaN only in rows of weight 0
        columns = torch.stack((n, score, n * shares.square().sum(-1)), -2)
        # xmul: an infinite score stays out of the classes in which the row has no share.
        return xmul(shares.unsqueeze(-3), columns.unsqueeze(-1))

    def wrap(self, sums: Tensor) -> ScoreSum:
        """Return `sums` as a `ScoreSum`."""
        return ScoreSum(sums)

    def n_events(self, p: Predictions) -> int:
        """Return the number of samples; with soft targets by class each is one of every class."""
        return p.samples.numel() * (p.num_classes if p.soft and self.by_class else 1)


def noise_of(events: Events, p: Predictions) -> tuple[Tensor, Tensor]:
    """Return what each event adds to `BinStats.spread` and `BinStats.noise`, `(..., N)`."""
    wide = wide_dtype(events.confidence.device)
    confidence = events.confidence.detach().to(wide)
    weights = None if events.weights is None else events.weights.detach()
    spread = confidence * (1 - confidence)
    variance = spread if p.hard else (events.outcome.detach().to(wide) - confidence).square()
    share = weights if weights is None or p.copies else weights.square()
    return weighted(spread, weights, wide), weighted(variance, share, wide)


def sums_of_replicates(
    index: Tensor, columns: Sequence[Tensor], weights: Tensor, n_cells: int, *, finite: bool = False
) -> Tensor:
    """Sum columns `(..., N)` over the samples of every cell under weights `(R, ..., N)`: `(R, ..., F, K)`."""
    wide = wide_dtype(index.device)
    never = in_all_replicates(weights == 0, index.dim())
    columns = [column.to(wide).masked_fill(never, 0) for column in columns]
    ways = weights.shape[: weights.dim() - index.dim()]
    sums = bin_sums_of_replicates(index, columns, weights.flatten(0, len(ways) - 1), n_cells, finite)
    return sums.reshape(*ways, *sums.shape[1:])


def series_shape(mode: Mode, task: Task, num_classes: int | None) -> tuple[int, ...]:
    """Return the batch axes that a mode adds: `(C,)` for classes that are kept apart."""
    if mode != "classwise":
        return ()
    return (known("num_labels" if task == "multilabel" else "num_classes", num_classes),)


def known(name: str, count: int | None) -> int:
    """Return a count that the shape of a state depends on; raise if it was not given."""
    if count is None:
        raise ValueError(f"`{name}` must be given where classes or labels are kept apart, got None. Pass {name}=...")
    return count


def weighted(x: Tensor, weights: Tensor | None, wide: torch.dtype) -> Tensor:
    """Widen and weigh. A row of weight 0 adds exactly 0, whatever its value: it may be inf or NaN."""
    x = x.to(wide)
    return x if weights is None else (x * weights).masked_fill(weights == 0, 0)
