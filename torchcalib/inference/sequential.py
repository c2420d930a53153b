"""Evidence against calibration that holds at every look at a stream of forecasts.

A forecast p_t of an event y_t is calibrated if E[y_t | past, p_t] = p_t. Let q_t = sigmoid(a + b logit p_t) be a
recalibrated forecast with fixed shift a and slope b. Then

    L_t = q_t^y_t (1 - q_t)^(1 - y_t) / (p_t^y_t (1 - p_t)^(1 - y_t))

has the mean p_t q_t / p_t + (1 - p_t) (1 - q_t) / (1 - p_t) = 1 given the past. The product of these likelihood ratios
is a test martingale. So is E_t, the mean of the products of all components (a, b). By Ville's inequality,
P(E_t >= 1 / alpha for any t) <= alpha for a calibrated model. Soft targets y in [0, 1] also have mean p_t. The mean of
L_t is then at most 1, because the exponential function is convex.

Dependent rows, such as the pixels of an image, make one bet together: the mean of their likelihood ratios. It also has
mean 1 given the past.

References: Ville: Etude critique de la notion de collectif (1939). Ramdas, Grunwald, Vovk, Shafer: Game-theoretic
statistics and safe anytime-valid inference (Statistical Science 2023, arXiv 2210.01948). Arnold, Henzi, Ziegel:
Sequentially valid tests for forecast calibration (Annals of Applied Statistics 2023, arXiv 2109.11761). Shin, Ramdas,
Rinaldo: E-detectors (arXiv 2203.03532), for the detector of changes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from torchcalib.core.arguments import Task
from torchcalib.core.events import Mode, n_events, reduce_to_scores
from torchcalib.core.predictions import Predictions
from torchcalib.core.state import N_IGNORED, SumState, check_counts
from torchcalib.core.sums import EventCells, Ranges, Sums, check_sums, mode_shape, weighted
from torchcalib.ops.host_values import constant
from torchcalib.ops.logs import wide_dtype

DIRECTIONS = ("too low", "too high", "over-confident", "under-confident")
"""Meaning of the components for the forecasts, four for each: shifts a > 0, a < 0, slopes b < 1, b > 1."""

_SIZES = (0.1, 0.2, 0.4, 0.8)
N_COMPONENTS = 4 * len(_SIZES)
_COMPONENTS = (  # shifts a and slopes b; the last pair is the forecast itself
    [*_SIZES, *(-size for size in _SIZES), *[0.0] * (N_COMPONENTS // 2 + 1)],
    [*[1.0] * (N_COMPONENTS // 2), *(math.exp(-size) for size in _SIZES), *(math.exp(size) for size in _SIZES), 1.0],
)


def components(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return shift a and slope b of each component `(J + 1, 1)`.

    The values of a, then -a, -log b and log b, are 0.1, 0.2, 0.4 and 0.8. The forecast itself follows: a = 0, b = 1.
    """
    a, b = constant(_COMPONENTS, like.dtype, like.device).unsqueeze(-1)
    return a, b


CHUNK = 2**12
"""Number of rows whose likelihood ratios stay in the cache."""


def log_ratios(log_odds: Tensor, outcome: Tensor) -> Tensor:
    """Return log L for each component `(..., J, N)`, from log-odds of the forecasts and outcomes in [0, 1], `(..., N)`.

    An outcome of probability 0 is infinite evidence: log L = inf for y > 0 and p = 0, and for y < 1 and p = 1. Other
    rows with p = 0 or 1 are no evidence, because q = p.
    """
    certain = log_odds.isinf()
    impossible = certain & torch.where(log_odds > 0, outcome < 1, outcome > 0)
    z = log_odds.masked_fill(certain, 0).unsqueeze(-2)
    w = torch.addcmul(*components(z), z).masked_fill_(
        certain.unsqueeze(-2), 0
    )  # (..., J + 1, N); the last row is the forecast
    # With log q = logsigmoid(w) and log(1 - q) = logsigmoid(w) - w, the log-likelihood is logsigmoid(w) + (y - 1) w.
    found = torch.addcmul(logsigmoid(w), w, (outcome - 1).unsqueeze(-2))
    found[..., -1, :].masked_fill_(impossible, -torch.inf)
    return found[..., :-1, :] - found[..., -1:, :]


@dataclass(frozen=True)
class LogRatioAccumulator:
    """Accumulator of log-likelihood ratios. `groups` of the predictions, if given, are clusters of dependent rows."""

    mode: Mode
    averages: bool  # whether the evidence of classes or labels is averaged
    level: float  # level of `since`
    restart: bool  # whether evidence also starts anew at each look, to detect changes
    only_confidences: ClassVar[bool] = True
    """Whether the accumulator needs only confidences and outcomes; see `core.pieces.detail_of`."""

    @property
    def ranges(self) -> Ranges:
        """Ranges of the weight and of the log-likelihood ratios."""
        return ((1, 1), *[(-math.inf, math.inf)] * N_COMPONENTS)

    def shape(self, task: Task, num_classes: int | None) -> tuple[int, ...]:
        """Return the shape `(1 + J, 1)` of the sums, with a leading axis for classes or labels."""
        return (*mode_shape(self.mode, task, num_classes), 1 + N_COMPONENTS, 1)

    def wrap(self, sums: Tensor) -> Sums:
        """Convert a tensor `(..., 1 + J, 1)` to sums."""
        return Sums(sums)

    def n_events(self, p: Predictions) -> int:
        """Return the number of values in memory for each replicate."""
        return N_COMPONENTS * n_events(p, self.mode)

    def columns(self, p: Predictions, size: int | None = None) -> Iterator[Tensor]:
        """Yield weights and weighted log-likelihood ratios `(..., 1 + J, n)` of `size` rows at a time, in order."""
        for ratios, n in self._chunks(p, size):
            ratios = ratios if p.weights is None else weighted(ratios, n.unsqueeze(-2), ratios.dtype)
            yield torch.cat((n.unsqueeze(-2), ratios), -2)

    def _chunks(self, p: Predictions, size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield log-likelihood ratios `(..., J, n)` and weights `(..., n)`."""
        p = p.set_in_log_odds()  # for sets of classes, whose 1 - p is known exactly
        score, outcome = reduce_to_scores(p, self.mode)
        wide = wide_dtype(score.device)
        n = torch.ones_like(score, dtype=wide)
        if p.weights is not None:
            n = n * (p.weights.unsqueeze(-2) if p.task == "multiclass" and self.mode == "classwise" else p.weights)
        size = max(1, score.shape[-1]) if size is None else size
        for start in range(0, max(1, score.shape[-1]), size):
            rows = (..., slice(start, start + size))
            some = score[rows].detach().to(wide)
            yield log_ratios(some if p.from_logits else some.logit(), outcome[rows].detach().to(wide)), n[rows]

    def from_predictions(self, p: Predictions) -> Sums:
        """Return the sums over all rows of a batch."""
        if p.groups is not None:
            ((ratios, n),) = self._chunks(p, None)
            return Sums(torch.cat((n.sum(-1)[..., None, None], bets_of_clusters(ratios, n, p.groups)), -2))
        sums = [columns.sum(-1, keepdim=True) for columns in self.columns(p, CHUNK)]
        return Sums(torch.stack(sums).sum(0) if len(sums) > 1 else sums[0])

    def cells(self, p: Predictions) -> EventCells:
        """Return the summands of each row, for sums by group."""
        (columns,) = self.columns(p)
        return EventCells(torch.zeros_like(columns[..., 0, :], dtype=torch.int64), columns, 1)


def bets_of_clusters(ratios: Tensor, n: Tensor, clusters: Tensor) -> Tensor:
    """Return the sum over clusters of the logarithm of the mean of L over the rows of a cluster, `(..., J, 1)`.

    `ratios` is log L `(..., J, N)`, `n` the weights and `clusters` the identifiers of the rows, both `(..., N)`.
    """
    clusters, order = clusters.expand(n.shape).sort(stable=True, dim=-1)
    first = torch.ones_like(clusters[..., :1], dtype=torch.bool)
    slot = torch.cat((first, clusters.diff(dim=-1) != 0), -1)[..., : n.shape[-1]].cumsum(-1) - 1
    n = n.gather(-1, order)
    size = torch.zeros_like(n).scatter_add(-1, slot, n).unsqueeze(-2)
    ratios = ratios.gather(-1, order.unsqueeze(-2).expand_as(ratios))
    slot, absent = slot.unsqueeze(-2).expand_as(ratios), (n == 0).unsqueeze(-2)
    ratios = ratios.masked_fill(absent, -torch.inf)
    # log sum n L = m + log sum n exp(log L - m), with the largest log L of the cluster as m
    m = torch.full_like(ratios, -torch.inf).scatter_reduce(-1, slot, ratios, "amax")
    m = m.masked_fill(m.isinf(), 0)
    parts = (n.unsqueeze(-2) * (ratios - m.gather(-1, slot)).exp()).masked_fill(absent, 0)
    total = m + torch.zeros_like(ratios).scatter_add(-1, slot, parts).log() - size.log()
    return total.masked_fill(size == 0, 0).sum(-1, keepdim=True)


def after_looks(before: Tensor, columns: Tensor, restart: bool) -> Tensor:
    """Return the logarithm of the evidence of each component after each look, `(..., J, n)`.

    It is the evidence `before` the looks `(..., J, 1)` times products of likelihood ratios. `columns` are weights and
    weighted log-likelihood ratios at the looks, `(..., 1 + J, n)`. With `restart`, an e-process starts at each look
    with data. The evidence is their sum, M_t = (M_(t-1) + 1) L_t.

    Reference:
        Shin, Ramdas, Rinaldo: E-detectors (arXiv 2203.03532), for the e-SR detector.
    """
    n, ratios = columns[..., :1, :], columns[..., 1:, :]
    products = ratios.cumsum(-1)
    if not restart:
        return before + products
    # M_t = P_t (M_0 + sum over s <= t of 1 / P_(s-1)), with the products P_t
    earlier = torch.cat((torch.zeros_like(before), products[..., :-1]), -1)
    starts = torch.cat((before, (-earlier).masked_fill(n == 0, -torch.inf)), -1)
    return products + starts.logcumsumexp(-1)[..., 1:]


def log_mean(x: Tensor) -> Tensor:
    """Return log(mean(exp(x))) over the last axis."""
    return x.logsumexp(-1) - math.log(x.shape[-1])


def log_evidence(of_components: Tensor, averages: bool) -> Tensor:
    """Return the logarithm of the evidence `(...)` from that of components `(..., J)`, or of classes `(..., C, J)`."""
    found = log_mean(of_components)
    return log_mean(found) if averages else found


def direction_of(of_components: Tensor, averages: bool) -> Tensor:
    """Return the index in `DIRECTIONS` of the components with the most evidence, int64 `(...)`.

    It is -1 without evidence, and for infinite evidence.
    """
    shape = *of_components.shape[:-1], len(DIRECTIONS), of_components.shape[-1] // len(DIRECTIONS)
    found = log_mean(of_components.reshape(shape))
    found = log_mean(found.transpose(-1, -2)) if averages else found
    most, index = found.max(-1)
    return index.masked_fill(~(most > 0) | most.isinf(), -1)  # infinite evidence is that of all components


@dataclass(frozen=True, eq=False)
class SequentialSums(Sums):
    """Sum of the weights and logarithm of the evidence of each component `(..., 1 + J, 1)`, and results of looks."""

    log_max: Tensor  # largest logarithm of the evidence at any look, at least 0, `(...)`
    since: Tensor  # number of the first look with evidence of at least 1 / level, `(...)`; 0 for none

    @classmethod
    def empty(cls, how: LogRatioAccumulator, like: Tensor) -> Self:
        """Return the sums before the first look, with the axes of `like` `(..., 1 + J, n)`: evidence 1, or 0."""
        sums = like.new_zeros((*like.shape[:-1], 1))
        if how.restart:
            sums[..., 1:, :] = -torch.inf
        zeros = like.new_zeros(like.shape[: -3 if how.averages else -2])
        return cls(sums, zeros, zeros)

    def after(self, how: LogRatioAccumulator, columns: Tensor, number: Tensor | int) -> Self:
        """Return the sums after looks at `columns` `(..., 1 + J, n)`, the first of which has the given number."""
        if not columns.shape[-1]:
            return self
        of_components = after_looks(self.sums[..., 1:, :], columns, how.restart)
        log_e = log_evidence(of_components.movedim(-1, 0), how.averages)  # (n, ...)
        is_above = log_e >= -math.log(how.level)
        first = number + is_above.byte().argmax(0)
        since = torch.where((self.since == 0) & is_above.any(0), first.to(self.since), self.since)
        n = self.sums[..., :1, :] + columns[..., :1, :].sum(-1, keepdim=True)
        sums = torch.cat((n, of_components[..., -1:]), -2)
        return type(self)(sums, self.log_max.maximum(log_e.amax(0)), since)


@dataclass(frozen=True)
class SequentialState(SumState[Any]):
    """Operations on the state of a sequential test, one float64 tensor, in which each update is a look.

    The state of `SumState` is followed by `log_max` and `since` of `SequentialSums`, and by the number of looks. Adding
    a state is one look at all its rows, whose own looks do not count.
    """

    accumulator: LogRatioAccumulator
    has_payload: ClassVar[bool] = True
    """Ranks gather their states, because an all-reduce would add the results of looks."""

    @property
    def is_additive(self) -> bool:  # type: ignore[override]  # depends on an option
        """Whether sums do not depend on the order of looks."""
        return not self.accumulator.restart

    @property
    def _value_shape(self) -> tuple[int, ...]:
        return self.shape[: -3 if self.accumulator.averages else -2]

    def _split(self, state: Tensor) -> tuple[Tensor, SequentialSums, Tensor]:
        """Return the counts of ignored rows, the sums, and the number of looks `(1,)`."""
        n_values = math.prod(self._value_shape)
        sizes = [N_IGNORED, math.prod(self.shape), n_values, n_values, 1]
        ignored, sums, *of_looks, looks = torch.split(state, sizes)
        log_max, since = (x.reshape(self._value_shape) for x in of_looks)
        return ignored, SequentialSums(sums.reshape(self.shape), log_max, since), looks

    def empty(self) -> Tensor:
        """Return the state before the first look."""
        start = SequentialSums.empty(self.accumulator, torch.zeros(self.shape, dtype=torch.float64))
        return self._joined(start.sums.new_zeros(N_IGNORED), start, start.sums.new_zeros(1))

    def _joined(self, ignored: Tensor, sums: SequentialSums, looks: Tensor) -> Tensor:
        return torch.cat((ignored, sums.sums.flatten(), sums.log_max.flatten(), sums.since.flatten(), looks))

    def from_predictions(self, p: Predictions) -> Tensor:
        """Return the sums of one batch, as a state with one look."""
        state = super().from_predictions(p)
        tail = state.new_zeros(2 * math.prod(self._value_shape))
        return torch.cat((state, tail, state.new_ones(1)))

    def add(self, state: Tensor, more: Tensor) -> Tensor:
        """Return the state after one more look, at the rows of another state, on the device of the first."""
        more_ignored, batch, more_looks = self._split(more.to(state))
        ignored, sums, looks = self._split(state)
        looks = looks + more_looks
        return self._joined(ignored + more_ignored, sums.after(self.accumulator, batch.sums, looks), looks)

    def statistic(self, state: Tensor) -> SequentialSums:
        """Return the sums and the results of all looks."""
        return self._split(state)[1]

    def _check_sums(self, state: Tensor) -> None:
        """Raise ValueError unless counts, sums and results of looks are possible."""
        ignored, found, looks = self._split(state)
        check_counts("the numbers of ignored rows and of looks", torch.cat((ignored, found.since.flatten(), looks)))
        check_sums(found.sums.masked_fill(found.sums == -torch.inf, 0), self.accumulator.ranges, None)
        is_crossed = found.log_max >= -math.log(self.accumulator.level)
        if not bool(((found.log_max >= 0) & (found.since <= looks) & ((found.since > 0) == is_crossed)).all()):
            raise ValueError("`state` must be possible: the results of looks contradict each other. It is corrupt.")

    def merged(self, announced: Sequence[Tensor], payloads: Sequence[Tensor]) -> Tensor:  # noqa: ARG002
        """Return the state of all ranks, with one look at the rows of all of them."""
        if len(announced) == 1:
            return announced[0]
        self.check_merges()
        return self.add(self.empty(), torch.stack(list(announced)).sum(0))

    def check_merges(self) -> None:
        """Raise ValueError for a detector of changes."""
        if not self.is_additive:
            raise ValueError(
                "`restart` must be False to add the states of ranks or shards, got True: the evidence of a detector of "
                "changes depends on the order of looks. Update one detector with the rows of all shards in order."
            )
