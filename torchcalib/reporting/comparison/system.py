"""Accumulated statistics of one system of a comparison, and their replicates, in bounded memory.

Each row is assigned to a group by a hash of its number or id. Each replicate weights the groups by Poisson variables of
mean 1. Up to 1,024 rows have a group each, which is the bootstrap of single rows. Groups of several rows estimate the
same variance, with a relative standard error of 1 / sqrt(2 G) for the width of an interval: 2% for 1,024 groups. Each
replicate is computed from the weighted sum of the group sums.

Groups depend only on the number or the id of the row, and weights on the seed and the group. The batch size has no
effect. All systems therefore have the same replicates, and common errors cancel in their differences. With ids, systems
may have different rows. Rows of a single system are in random groups. They add to its variance, but not to covariances.

Null replicates are the errors of each system if it were calibrated, with the dependence between the systems.
A sum of outcomes is distributed as for the noise floor: as a sum of independent trials with known mean and variance
(consistency resampling, Broecker and Smith 2007). Its quantile levels determine the dependence:

- Bins: the level of bin k in replicate r is the rank of its residual (outcomes minus confidences) in bootstrap
  replicate r. The sums therefore have the rank correlations of the bootstrap (Iman and Conover 1982), and all systems
  share the bootstrap replicates.
- Ranked samples: all systems share a uniform number u for each row. The level is u if the event of the system occurred,
  otherwise 1 - u. If two systems have equal outcomes in a row, their simulated outcomes have a positive correlation.
  For the top label, if only one of two predictions is correct, the correlation is negative.

For clusters of dependent rows, a second null distribution multiplies the residuals of each cluster by a random sign,
which all systems share. This is the wild bootstrap of Cameron, Gelbach and Miller (2008).

Reference:
    Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007). Iman, Conover:
    A distribution-free approach to inducing rank correlation among input variables (Communications in Statistics,
    1982).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from torchcalib.core.clusters import MAX_CLUSTERS, num_clusters_for, number_of_word
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.inputs import InputFormat
from torchcalib.core.partition import AnyPartition, Partition, SumsByPart
from torchcalib.core.predictions import replicates_at_once
from torchcalib.core.ranked import ExactSample, RankedSample
from torchcalib.core.sampled_partition import SampledPartition, SampledPartState
from torchcalib.core.state import SumState
from torchcalib.core.sums import BinStats
from torchcalib.inference.resampling import Weights
from torchcalib.inference.simulation import BinCells, OrderedSample
from torchcalib.ops.count_moments import deviation_quantiles
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.sorting import order_of
from torchcalib.reporting.building import ReportBuilder, is_ranked
from torchcalib.reporting.catalogue import Member, check_size, values_of_replicates
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

_MAX_SIZE = 2**23
"""Maximum number of sums over all groups of a statistic (64 MB). Above it there are no replicates."""

_BY_ROW = " by row"  # suffix of the names of sums of groups of rows
_ROW_BITS = 31  # last bits of a key, with a hash of the id of the row
_STEP = 0x9E3779B1  # odd, so that multiples are distinct modulo 2^31; the golden ratio times 2^32


def keys_of(groups: Tensor, rows: Tensor | int) -> Tensor:
    """Return the keys of rows. `groups` are hashes of rows or clusters in [0, 2^32), `rows` hashes of ids in [0, 2^31).

    Without ids, `rows` is 0.
    """
    return (groups << _ROW_BITS) | rows


def keys_of_samples(groups: Tensor, rows: Tensor, samples: Sequence[int]) -> Tensor:
    """Return the keys of all samples, from hashes of their rows `(n,)`. `samples` is their shape, such as `(n, H, W)`.

    All samples of a row are in its group, and have different random numbers.
    """
    places = torch.arange(prod(samples[1:]), device=rows.device)
    numbers = (rows.unsqueeze(-1) + _STEP * places) % 2**_ROW_BITS
    return keys_of(groups.unsqueeze(-1), numbers).reshape(samples)


def group_of_key(keys: Tensor, n_groups: int) -> Tensor:
    """Return the number of the random group in [0, `n_groups`) of each key, int64."""
    return number_of_word(keys >> _ROW_BITS, n_groups)


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


class SystemBuilder(ReportBuilder):
    """The data of one system: sums of random groups of rows, bins of all rows with their noise, and ranked samples.

    The `clusters` of `update` are `keys_of` rows. Ranked samples are dropped for fractional weights, and above
    `MAX_KEPT`.
    """

    def _kinds_of(self, input_format: InputFormat) -> dict[str, Any]:
        task, num_classes = input_format.read_as, input_format.num_classes
        check_size(task, num_classes or 2, self._options.n_bins)
        kinds: dict[str, Any] = {}
        for name, accumulator in self.catalogue.accumulators.items():
            if isinstance(accumulator, ExactSample):
                lead = accumulator.leading_shape(task, num_classes)
                kinds[name] = SampledPartState(accumulator, lead, input_format.from_logits, (), None)
                continue
            in_groups = name
            if isinstance(accumulator, EqualWidthBins):
                accumulator = replace(accumulator, with_ecd=False)
                kinds[name] = SumState(accumulator, accumulator.shape(task, num_classes))
                accumulator, in_groups = replace(accumulator, with_noise=False), name + _BY_ROW
            shape = accumulator.shape(task, num_classes)
            n_groups = num_clusters_for(shape)
            n_groups = n_groups if n_groups * prod(shape) <= _MAX_SIZE else 1
            kinds[in_groups] = SumState(SumsByPart(accumulator, n_groups, group_of_key), (n_groups, *shape))
        return kinds

    def _sum(self, kinds: Mapping[str, Any], states: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        added = super()._sum(kinds, states, more)
        sizes = {name: sum(x.numel() for x in added[name].scores) for name in added if is_ranked(kinds[name])}
        return {name: state for name, state in added.items() if sizes.get(name, 0) <= MAX_KEPT}

    @property
    def sums(self) -> dict[str, Partition[Any]]:
        """Sums of random groups of rows, by name of the statistic. With a single group there are no replicates."""
        names = [name for name in self._states if not is_ranked(self._kinds[name])]
        found = {name.removesuffix(_BY_ROW): self._statistic(name) for name in names}
        return {name: each for name, each in found.items() if isinstance(each, Partition)}

    @property
    def ranks(self) -> dict[str, SampledPartition]:
        """Ranked samples with the hash of each row, by name; empty for too many, and fractional weights."""
        return {name: self._statistic(name) for name in self._states if is_ranked(self._kinds[name])}

    @property
    def size(self) -> int:
        """Number of stored samples (multi-label: samples times labels), the maximum over modes."""
        return max((each.n_values for each in self.ranks.values()), default=0)

    def without_ranks(self) -> Self:
        """Return a copy without ranked samples."""
        other = copy(self)
        other._states = {name: state for name, state in self._states.items() if not is_ranked(self._kinds[name])}
        return other

    def accumulated(self) -> Data:
        """Return the sums and ranked samples of all rows."""
        self._dropped()
        statistics: dict[str, Any] = {}
        parts: dict[str, AnyPartition] = {**self.sums, **self.ranks}
        for name, part in parts.items():
            statistics[name] = self._statistic(name) if name + _BY_ROW in self._states else part.whole
        return Data(self.catalogue, statistics)

    @torch.no_grad()
    def replicates(self, draws: Draws, data: Data, has_clusters: bool, has_ids: bool) -> SystemReplicates:
        """Return each line of `data` in R bootstrap replicates, and each calibration error in the null replicates.

        R is at most 199 for metrics of ranked samples. With clusters, there is a second set of null replicates.
        """
        ranks = self.ranks
        parts: dict[str, AnyPartition] = {name: each for name, each in self.sums.items() if len(each.sums) > 1}
        parts |= ranks if self.size <= MAX_RANKED else {}

        def of(members: list[Member], replicates: Callable[[str], Iterator[Any]]) -> dict[str, Tensor]:
            """Return each metric in the replicates of its statistic `(R,)`, by `Line.key`."""
            names = [name for name in parts if any(each.statistic == name for each in members)]
            return values_of_replicates(members, ({name: each} for name in names for each in replicates(name)))

        def null_replicates(name: str, flips: bool) -> Iterator[Any]:
            part = parts[name]
            if isinstance(part, SampledPartition):
                return null_samples(part, draws, flips, has_ids)
            # Calibration does not determine scores: only bins have null replicates.
            return null_bins(part, data.statistics[name], draws, flips)

        # The bootstrap is invalid for debiased errors: debiasing does not subtract the noise of repeated samples.
        members = [each for each in data.members if not each.settings.get("debiased")]
        if not data.weights_are_copies:  # simulated outcomes of copies would be independent
            members = [each for each in members if not each.is_error or each.statistic not in ranks]
        errors = [each for each in members if each.is_error]
        null = [of(errors, lambda name: null_replicates(name, flips=False))]
        if has_clusters:
            null.append(of(errors, lambda name: null_replicates(name, flips=True)))
        return SystemReplicates(of(members, lambda name: bootstrap_of(parts[name], draws)), null)


def _occupied(part: Partition[Any]) -> Tensor:
    """Return the numbers of the groups with data, int64 `(g,)`."""
    return (part.sizes.reshape(len(part.sums), -1) > 0).any(-1).nonzero().squeeze(-1)


def _groups_of(part: SampledPartition) -> tuple[Tensor, Tensor]:
    """Return the numbers of the groups with samples `(g,)`, and the index of the group of each sample."""
    numbers = group_of_key(part.keys, MAX_CLUSTERS)
    groups, index = numbers.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    return groups, index


def bootstrap_of(part: AnyPartition, draws: Draws) -> Iterator[Any]:
    """Yield the statistic of all bootstrap replicates, in chunks of r replicates `(r, ...)` to bound the memory.

    Ranked samples have at most 199 replicates.
    """
    if isinstance(part, Partition):
        groups = _occupied(part)
        part, n_values = part.restricted(groups), max(len(groups), part.sums[0].numel())
        for some in torch.split(draws.weights(groups), replicates_at_once(n_values)):
            yield part.replicate(some)
        return
    groups, index = _groups_of(part)
    part = SampledPartition(part.whole, index, len(groups))
    for some in torch.split(draws.weights(groups)[:RANKED_REPLICATES], replicates_at_once(part.n_values)):
        yield OrderedSample.from_sample(part.replicate(some))  # sorted once for all metrics


def null_bins(part: Partition[Any], bins: BinStats, draws: Draws, flips: bool) -> Iterator[BinStats]:
    """Yield the bins of a calibrated system in R replicates `(R, ..., B)`, with random signs of groups if `flips`.

    R is reduced for many bins, but is at least 199.
    """
    groups = _occupied(part)
    n_replicates = min(len(draws), max(RANKED_REPLICATES, MAX_NULL_SUMS // bins.n.numel()))
    factors = (draws.signs if flips else draws.weights)(groups)[:n_replicates]
    sums = part.sums[groups]
    table = (sums[..., 2, :] - sums[..., 1, :]).flatten(1)  # outcomes minus confidences in each bin
    parts = torch.split(factors, replicates_at_once(max(table.shape)))
    residuals = torch.cat([some.to(table) @ table for some in parts]).reshape(len(factors), *bins.n.shape)
    if flips:
        yield BinCells.from_bins(bins).with_gaps(residuals / bins.n.masked_fill(bins.n == 0, 1))
    else:
        yield bins_of_calibrated(bins, residuals, draws.seed)


def null_samples(part: SampledPartition, draws: Draws, flips: bool, has_ids: bool) -> Iterator[RankedSample]:
    """Yield the ranked samples of at most 199 null replicates, in chunks of r replicates `(r, ..., N)`.

    `flips` multiplies the residuals of each group by a random sign. Otherwise outcomes are simulated for each row. The
    random numbers of a row depend on its id, or without ids on its place among all rows.
    """
    order = order_of(part.whole.score)
    ordered = OrderedSample.from_sample(part.whole)  # the same stable order
    if flips:
        groups, index = _groups_of(part)
        signs = draws.signs(groups)[:RANKED_REPLICATES]
        return samples_of_flipped(ordered, index.expand(order.shape).gather(-1, order), signs)
    rows = torch.arange(order.numel(), device=order.device).reshape(order.shape)
    if has_ids:  # labels of a row have different random numbers
        labels = torch.arange(order[..., 0].numel(), device=order.device).reshape(*order.shape[:-1], 1)
        rows = keys_of(labels, part.keys & (2**_ROW_BITS - 1))
    return samples_of_calibrated(ordered, rows.gather(-1, order), draws.seed, min(RANKED_REPLICATES, len(draws)))


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

    `rows` is a number for the row of each element, int64 `(..., N)`, equal for all systems.
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
