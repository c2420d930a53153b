"""Accumulated statistics of one system of a comparison, and their replicates, in bounded memory.

Each row is assigned to a random group, and each replicate weights the groups by Poisson variables of mean 1. With many
more groups than rows, this is the bootstrap of single rows. Fewer groups estimate the same variance. Each replicate is
computed from the weighted sum of the group sums.

Groups and weights depend only on the seed and the row number, and not on the batch size. All systems therefore have the
same replicates, and common errors cancel in their differences.

Null replicates are the errors of each system if it were calibrated, with the dependence between the systems.
The distribution of a sum of outcomes is that of the noise floor: a sum of independent trials with known mean and
variance (consistency resampling, Broecker and Smith 2007). Its quantile levels determine the dependence:

- Bins: the level of bin k in replicate r is the rank of its residual (outcomes minus confidences) in bootstrap
  replicate r. The sums therefore have the rank correlations of the bootstrap (Iman and Conover 1982), and all systems
  share the bootstrap replicates.
- Ranked samples: all systems share a uniform number u for each row. The level is u if the event of the system occurred,
  otherwise 1 - u. If two systems have equal outcomes in a row, their simulated outcomes have a positive correlation.
  For the top label, if only one of two predictions is correct, the correlation is negative.

For clusters of dependent rows, a second null distribution multiplies the residuals of each cluster by a random sign,
which all systems share (wild bootstrap, Cameron, Gelbach and Miller 2008).

Reference:
    Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007). Iman, Conover:
    A distribution-free approach to inducing rank correlation among input variables (Communications in Statistics,
    1982).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.arguments import Task
from torchcalib.core.clusters import ClusteredSample, ClusteredSums
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.group_samples import GroupedSample, GroupedSampleState
from torchcalib.core.groups import in_groups
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sample_or_sketch import are_labels
from torchcalib.core.saved import saved_value
from torchcalib.core.sums import BinStats, check_sums
from torchcalib.inference.resampling import Weights
from torchcalib.inference.simulation import BinCells, OrderedSample
from torchcalib.io.errors import first_of, shown
from torchcalib.ops.count_moments import deviation_quantiles
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.logs import wide_dtype
from torchcalib.ops.sorting import order_of
from torchcalib.reporting.catalogue import Member, catalogue_of, values
from torchcalib.reporting.comparison.differences import SystemReplicates
from torchcalib.reporting.lines import Data

MAX_KEPT = 2**20
"""Maximum number of stored samples for rank-based errors (multi-label: samples times labels)."""

MAX_RANKED = 2**14
"""Maximum number of samples for intervals of rank-based errors."""

RANKED_REPLICATES = 199
"""Maximum number of replicates of rank-based errors and metrics of selective prediction."""

MAX_NULL_SUMS = 2**22
"""Intended maximum number of simulated sums over bins, in all null replicates of one system."""

MAX_GROUPS, MIN_GROUPS = 2**13, 2**7
"""Limits of the number of groups G. Bootstrap standard deviations have a relative error of 1 / sqrt(2 G): 1% and 6%."""

_TARGET_SIZE = 2**20  # intended number of sums over all groups; at least `MIN_GROUPS` groups may need more
_MAX_SIZE = 2**23  # maximum number of sums over all groups (64 MB); above it there are no replicates

_GROUP_STREAM = -1  # number of the random stream that assigns rows to groups; replicates use 0, 1, ...


def words_of(seed: int, numbers: Tensor) -> Tensor:
    """Return a random integer in [0, 2^32) for each row `(n,)`, from the number of the row."""
    return random_words(seed, torch.full((1,), _GROUP_STREAM, device=numbers.device), numbers)[0]


def group_of(words: Tensor, n_groups: int) -> Tensor:
    """Map random integers `words` in [0, 2^32) to group numbers in [0, n_groups), int64."""
    return (words * n_groups) >> 32


class Draws:
    """Poisson weights and signs of random groups of rows in `n` = R replicates, which all systems share."""

    def __init__(self, seed: int, n: int, device: torch.device) -> None:
        self.seed, self._replicates = seed, torch.arange(n, device=device)
        self._drawn: dict[int, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._replicates)

    def weights(self, groups: Tensor) -> Tensor:
        """Return the weights of the groups with these numbers `(g,)` in R replicates, uint8 `(R, g)`; cached."""
        numbers, weights = self._drawn.get(len(groups), (groups[:0], None))
        if weights is None or not torch.equal(numbers, groups):
            weights = Weights(self.seed, groups, "poisson").in_replicates(self._replicates, torch.uint8)
            self._drawn[len(groups)] = groups, weights
        return weights

    def signs(self, groups: Tensor) -> Tensor:
        """Return random signs -1 and 1 of the groups with these numbers `(g,)`, float64 `(R, g)`."""
        return Weights(self.seed, groups, "sign", first=UNIFORM_STREAMS).in_replicates(self._replicates, torch.float64)


class GroupedSums:
    """Sums of an accumulator for each random group of rows.

    `shape` `(..., F, K)` is that of one group, for F summands and K cells (bins or classes). `add` changes `sums` in
    place, because there can be many more groups than rows in a batch.
    """

    def __init__(self, accumulator: Any, task: Task, num_classes: int, device: torch.device) -> None:
        shape: tuple[int, ...] = accumulator.shape(task, num_classes)
        size = math.prod(shape)
        n_groups = max(MIN_GROUPS, min(MAX_GROUPS, _TARGET_SIZE // size))
        n_groups = n_groups if n_groups * size <= _MAX_SIZE else 1
        self._accumulator = accumulator
        *lead, n_cells = shape
        self._sums = torch.zeros(*lead, n_groups, n_cells, dtype=wide_dtype(device), device=device)
        # (G, ..., F, K); with a single group there are no replicates
        self.sums = self._sums.movedim(-2, 0)
        # Bins of all rows, with their noise
        self._with_noise = replace(accumulator, with_noise=True) if isinstance(accumulator, EqualWidthBins) else None
        self._bins: BinStats | None = None
        if self._with_noise is not None:
            sums = self._sums.new_zeros(self._with_noise.shape(task, num_classes))
            self._bins = replace(self._with_noise.wrap(sums), noise_flag=sums.new_zeros(sums.shape[:-2]))

    def add(self, p: Predictions, words: Tensor) -> None:
        """Add a batch with the random integer of each row from `words_of`. A row can contain several samples."""
        cells = self._accumulator.cells(p)
        group = group_of(words, len(self.sums)).repeat_interleave(cells.index.shape[-1] // max(1, len(words)))
        place = (group * cells.n_cells + cells.index).unsqueeze(-2).expand(cells.columns.shape)
        self._sums.flatten(-2).scatter_add_(-1, place, cells.columns)
        if self._bins is not None and self._with_noise is not None:
            self._bins = self._bins + self._with_noise.from_predictions(p)

    def parts(self) -> list[Tensor]:
        """Return the sums to save: those of all groups and, for bins, those of all rows with their noise flags."""
        bins = self._bins
        return [self._sums, *([] if bins is None or bins.noise_flag is None else [bins.sums, bins.noise_flag])]

    def add_parts(self, parts: Sequence[Tensor]) -> None:
        """Add the sums of other groups, in the same order as `parts`."""
        self._sums += parts[0].to(self._sums)
        if self._bins is not None:
            bins, noise_flag = (part.to(self._sums) for part in parts[1:])
            self._bins = self._bins + replace(self._bins, sums=bins, noise_flag=noise_flag)

    def check(self, parts: Any) -> None:
        """Raise ValueError unless saved `parts` have the dtypes and shapes of these."""
        mine = [(part.dtype, part.shape) for part in self.parts()]
        theirs = [(part.dtype, part.shape) for part in parts if isinstance(part, Tensor)]
        if not isinstance(parts, list) or len(theirs) != len(parts) or theirs != mine:
            raise ValueError(f"`sums` must have dtypes and shapes {mine}, got {theirs}. The file is corrupt.")
        check_sums(parts[0].movedim(-2, 0), self._accumulator.ranges, None)
        if self._with_noise is not None:
            check_sums(parts[1], self._with_noise.ranges, parts[2])

    @property
    def clusters(self) -> ClusteredSums[Any]:
        """The groups as clusters of rows."""
        return ClusteredSums(self.sums.contiguous(), self._accumulator)

    @property
    def whole(self) -> Any:
        """Statistic of all rows; bins include the sums of their noise."""
        return self.clusters.whole if self._bins is None else self._bins

    @property
    def occupied(self) -> Tensor:
        """Numbers of the groups with data, int64 `(g,)`."""
        return (self.clusters.sizes.reshape(len(self.sums), -1) > 0).any(-1).nonzero().squeeze(-1)

    def replicates(self, draws: Draws) -> Iterator[Any]:
        """Yield the sums of all bootstrap replicates, in chunks of r replicates `(r, ...)` to bound the memory."""
        if len(self.sums) == 1:
            return
        groups = self.occupied
        clusters = ClusteredSums(self.sums[groups], self._accumulator)
        for weights in torch.split(draws.weights(groups), replicates_at_once(max(len(groups), self.sums[0].numel()))):
            yield clusters.replicate(weights)

    def null_replicates(self, draws: Draws, flips: bool) -> Iterator[BinStats]:
        """Yield the bins of a calibrated system in R replicates `(R, ..., B)`, with random signs of groups if `flips`.

        R is reduced for many bins, but is at least 199. Scores have no null replicates: calibration does not determine
        them.
        """
        b = self._bins
        if b is None or len(self.sums) == 1:
            return
        groups = self.occupied
        n_replicates = min(len(draws), max(RANKED_REPLICATES, MAX_NULL_SUMS // b.n.numel()))
        factors = (draws.signs if flips else draws.weights)(groups)[:n_replicates]
        sums = self.sums[groups]
        table = (sums[..., 2, :] - sums[..., 1, :]).flatten(1)  # outcomes minus confidences in each bin
        parts = torch.split(factors, replicates_at_once(max(table.shape)))
        residuals = torch.cat([part.to(table) @ table for part in parts]).reshape(len(factors), *b.n.shape)
        if flips:
            yield BinCells.from_bins(b).with_gaps(residuals / b.n.masked_fill(b.n == 0, 1))
        else:
            yield bins_of_calibrated(b, residuals, draws.seed)


class GroupedRanks:
    """Ranked samples, with the random group of each row."""

    def __init__(self, accumulator: ExactSample, task: Task, num_classes: int, from_logits: bool) -> None:
        lead = accumulator.leading_shape(task, num_classes)
        self._kind = GroupedSampleState(accumulator, lead, from_logits, (), MAX_GROUPS)
        self._state = self._kind.empty()

    def add(self, p: Predictions) -> None:
        """Add a batch whose rows have groups."""
        self.add_state(self._kind.detach(self._kind.from_predictions(p)))

    def add_state(self, more: Any) -> None:
        """Add the samples of another state."""
        self._state = self._kind.add(self._state, more) if self._state.scores else more

    def parts(self) -> list[Any]:
        """Return the parts of the samples to save."""
        return list(self._kind.parts(self._state))

    def checked(self, parts: Any) -> Any:
        """Return a state from saved parts; raise ValueError if they are not valid."""
        is_complete = isinstance(parts, list) and len(parts) == len(self._kind.names)
        state = self._kind.check(parts, self._kind.empty()) if is_complete else None
        if state is None:
            raise ValueError(
                f"`ranks` must contain the {', '.join(self._kind.names)} of samples, got {shown(parts)}. The file is "
                "corrupt: save the comparison again."
            )
        return state

    @property
    def size(self) -> int:
        """Number of stored samples (multi-label: samples times labels)."""
        return sum(scores.numel() for scores in self._state.scores)

    @property
    def sample(self) -> GroupedSample:
        """All samples with their groups."""
        return self._kind.statistic(self._state)

    def replicates(self, draws: Draws) -> Iterator[RankedSample]:
        """Yield the ranked samples of at most 199 bootstrap replicates, in chunks of r replicates `(r, ..., N)`."""
        sample = self.sample
        groups, index = sample.groups.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
        clusters = ClusteredSample(sample.whole, index)
        weights = draws.weights(groups)[:RANKED_REPLICATES]
        for some in torch.split(weights, replicates_at_once(sample.whole.score.numel())):
            yield OrderedSample.from_sample(clusters.replicate(some))  # sorted once for all metrics

    def null_replicates(self, draws: Draws, flips: bool) -> Iterator[RankedSample]:
        """Yield the ranked samples of at most 199 null replicates, in chunks of r replicates `(r, ..., N)`.

        `flips` multiplies the residuals of each group by a random sign. Otherwise outcomes are simulated for each row.
        """
        sample = self.sample
        order = order_of(sample.whole.score)
        ordered = OrderedSample.from_sample(sample.whole)  # the same stable order
        if flips:
            groups, index = sample.groups.long().unique(return_inverse=True)  # type: ignore[no-untyped-call]
            signs = draws.signs(groups)[:RANKED_REPLICATES]
            return samples_of_flipped(ordered, index.expand(order.shape).gather(-1, order), signs)
        rows = torch.arange(order.numel(), device=order.device).reshape(order.shape).gather(-1, order)
        return samples_of_calibrated(ordered, rows, draws.seed, min(RANKED_REPLICATES, len(draws)))


class System:
    """Accumulated sums and ranked samples of one system, for each random group of rows, by name of the statistic.

    `num_classes` is 2 for a binary task. `ranks` is empty for too many samples and for fractional weights.
    """

    def __init__(
        self,
        task: Task,
        num_classes: int,
        from_logits: bool,
        device: torch.device,
        *,
        n_bins: int,
        right: bool,
        are_confidences: bool,
    ) -> None:
        self.from_logits = from_logits
        self.catalogue = catalogue_of(task, n_bins, right, are_confidences=are_confidences, with_noise=False)
        self.sums: dict[str, GroupedSums] = {}
        self.ranks: dict[str, GroupedRanks] = {}
        for name, accumulator in self.catalogue.accumulators.items():
            if isinstance(accumulator, ExactSample):
                self.ranks[name] = GroupedRanks(accumulator, task, num_classes, from_logits)
            else:
                self.sums[name] = GroupedSums(accumulator, task, num_classes, device)

    @classmethod
    def like(cls, p: Predictions, **options: Any) -> Self:
        """Return an empty system with the task, number of classes and device of a batch."""
        num_classes = p.samples[0] if p.task == "multilabel" else p.num_classes
        return cls(p.task, num_classes, p.from_logits, p.input_preds.device, **options)

    def parts(self) -> dict[str, Any]:
        """Return the sums and ranked samples to save, by name of the statistic, and `from_logits`."""
        kinds: tuple[Mapping[str, Any], ...] = (self.sums, self.ranks)
        sums, ranks = ({name: each.parts() for name, each in kind.items()} for kind in kinds)
        return {"from_logits": self.from_logits, "sums": sums, "ranks": ranks}

    def add_parts(self, parts: Mapping[str, Any]) -> None:
        """Add the sums and ranked samples of another system, from its `parts`, after a check of all of them."""
        sums, ranks = saved_value(parts, "sums", dict), saved_value(parts, "ranks", dict)
        if sums.keys() != self.sums.keys() or (ranks and self.ranks and ranks.keys() != self.ranks.keys()):
            raise ValueError(f"`sums` must have the keys {first_of(self.sums)}, got {first_of(sums)}.")
        for name, each in self.sums.items():
            each.check(sums[name])
        self.ranks = self.ranks if ranks else {}
        states = {name: each.checked(ranks[name]) for name, each in self.ranks.items()}
        for name, each in self.sums.items():
            each.add_parts(sums[name])
        for name, state in states.items():
            self.ranks[name].add_state(state)
        if self.size > MAX_KEPT:
            self.ranks = {}

    def add(self, p: Predictions, words: Tensor, are_counts: bool) -> None:
        """Add a batch. `words` is the result of `words_of`; `are_counts` is True if all weights are whole numbers."""
        for sums in self.sums.values():
            sums.add(p, words)
        if not are_counts:
            self.ranks = {}
        if self.ranks:
            groups = group_of(words, MAX_GROUPS).repeat_interleave(p.samples[-1] // max(1, len(words)))
            p = in_groups(p, groups, MAX_GROUPS, validate_args=False)
        for ranks in self.ranks.values():
            ranks.add(p)
        if self.size > MAX_KEPT:
            self.ranks = {}

    @property
    def size(self) -> int:
        """Number of stored samples (multi-label: samples times labels), the maximum over modes."""
        return max((ranks.size for ranks in self.ranks.values()), default=0)

    @property
    def has_labels(self) -> bool:
        """True if all outcomes in the ranked samples are 0 or 1."""
        return all(are_labels(ranks.sample.whole) for ranks in self.ranks.values())

    def data(self, has_labels: bool) -> Data:
        """Return the sums and ranked samples of all rows. `has_labels`: all outcomes of all systems are 0 or 1."""
        statistics: dict[str, Any] = {name: sums.whole for name, sums in self.sums.items()}
        statistics |= {name: ranks.sample.whole for name, ranks in self.ranks.items()}
        return Data(self.catalogue, statistics, has_labels)

    @torch.no_grad()
    def replicates(self, draws: Draws, data: Data, has_clusters: bool) -> SystemReplicates:
        """Return each line of `data` in R bootstrap replicates, and each calibration error in the null replicates.

        R is at most 199 for metrics of ranked samples. With clusters, there is a second set of null replicates.
        """
        # The bootstrap is invalid for debiased errors: debiasing does not subtract the noise of repeated samples.
        members = [each for each in data.members if not each.settings.get("debiased")]
        if not data.weights_are_copies:  # simulated outcomes of copies would be independent
            members = [each for each in members if not each.is_error or each.statistic in self.sums]
        errors = [each for each in members if each.is_error]
        bootstrap = self._values(members, lambda part: part.replicates(draws))
        null = [self._values(errors, lambda part: part.null_replicates(draws, flips=False))]
        if has_clusters:
            null.append(self._values(errors, lambda part: part.null_replicates(draws, flips=True)))
        return SystemReplicates(bootstrap, null)

    def _values(
        self, members: list[Member], replicates: Callable[[GroupedSums | GroupedRanks], Iterator[Any]]
    ) -> dict[str, Tensor]:
        """Return each metric in the replicates of its statistic `(R,)`, by `Line.key`."""
        parts: dict[str, GroupedSums | GroupedRanks] = {**self.sums, **(self.ranks if self.size <= MAX_RANKED else {})}
        found: dict[str, list[Tensor]] = defaultdict(list)
        for name, part in parts.items():
            sharing = [each for each in members if each.statistic == name]
            for statistic in replicates(part) if sharing else ():
                for key, column in values(sharing, {name: statistic}).items():
                    found[key].append(column.cpu())
        return {key: torch.cat(columns) for key, columns in found.items()}


UNIFORM_STREAMS, _TIE_STREAMS = 2**32, 2**33
"""First random streams of the uniform numbers of rows, and of ties. The bootstrap uses streams with smaller numbers."""


def bins_of_calibrated(b: BinStats, residuals: Tensor, seed: int) -> BinStats:
    """Return bins `(..., B)`, with sums of noise, as if calibrated in R replicates `(R, ..., B)`.

    `residuals` `(R, ..., B)` are the sums of outcomes minus confidences in bootstrap replicates. `seed` orders ties.
    """
    cells = BinCells.from_bins(b)
    flat = residuals.flatten(1)
    streams = _TIE_STREAMS + torch.arange(len(flat), device=residuals.device)
    order = random_words(seed, streams, torch.arange(flat.shape[-1], device=residuals.device)).argsort(0)
    # Sorting is stable: equal values keep their random order. Equal sums may differ by rounding errors.
    scale = flat.abs().amax(0).clamp(min=torch.finfo(flat.dtype).tiny)
    rounded = (flat / scale * 2**40).round()
    order = order.gather(0, rounded.gather(0, order).sort(dim=0, stable=True).indices)
    ranks = torch.arange(len(flat), dtype=residuals.dtype, device=residuals.device).unsqueeze(-1).expand_as(flat)
    level = (torch.zeros_like(flat).scatter_(0, order, ranks).reshape(residuals.shape) + 0.5) / len(residuals)
    deviation = deviation_quantiles(level, cells.n, cells.expected, cells.spread, cells.noise)
    return cells.with_gaps(deviation * cells.variance.sqrt())


def samples_of_calibrated(sample: OrderedSample, rows: Tensor, seed: int, n_replicates: int) -> Iterator[OrderedSample]:
    """Yield a sample `(..., N)` as if calibrated, in chunks of r replicates `(r, ..., N)`.

    `rows` is the number of the row of each element, int64 `(..., N)`, equal for all systems.
    """
    s = sample.sorted()
    n, p = s.counts.to(s.confidence.dtype), s.confidence.masked_fill(~s.counted, 0)
    occurred = s.positives.to(p.dtype) > n * p
    is_plain = sample.n is None and not s.positives.is_floating_point()
    streams = UNIFORM_STREAMS + torch.arange(n_replicates, device=p.device)
    for some in torch.split(streams, replicates_at_once(sample.score.numel())):
        u = (random_words(seed, some, rows.flatten()).to(p.dtype) + 0.5).div_(2**32).reshape(len(some), *rows.shape)
        level = torch.where(occurred, u, 1 - u)
        if is_plain:  # one trial per element
            outcomes = (level > 1 - p).to(p.dtype)
        else:
            columns = n, n * p, *s.variances
            outcomes = columns[1] + deviation_quantiles(level, *columns) * columns[3].sqrt()
        yield sample.with_outcomes(outcomes)


def samples_of_flipped(sample: OrderedSample, clusters: Tensor, signs: Tensor) -> Iterator[OrderedSample]:
    """Yield a sample `(..., N)` whose residuals have a random sign for each cluster, `(r, ..., N)`.

    `clusters` is the number of the cluster of each element, int64 `(..., N)`. `signs` are those of G clusters `(R, G)`.
    """
    s = sample.sorted()
    expected = s.counts * s.confidence.masked_fill(~s.counted, 0)
    residual = s.positives - expected
    for some in torch.split(signs, replicates_at_once(sample.score.numel())):
        yield sample.with_outcomes(torch.addcmul(expected, some[:, clusters], residual))
