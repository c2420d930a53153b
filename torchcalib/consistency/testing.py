"""Evidence of any reading: what it is of outcomes that are drawn anew, for a calibrated model and for others."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchcalib.consistency.averages import cauchy_combination, widening
from torchcalib.consistency.evidence import Evidence
from torchcalib.consistency.paths import concentrated, first_reached, mean_gap_to_both_sides, outwards, spread_out
from torchcalib.consistency.replicates import Cells, bin_cells
from torchcalib.consistency.samples import MOST_RUNS, grouped, run_cells
from torchcalib.kernels.draws import random_words
from torchcalib.predictions import check_count, check_level, check_seed
from torchcalib.samples import RankedSample
from torchcalib.statistics import BinStats

Statistic = BinStats | RankedSample
Read = Callable[[Any], Tensor]
"""From a statistic to a value for each of its series `(...)`."""


class Reading(NamedTuple):
    """What is read of a statistic, and how that is tested; see `evidence_of`."""

    value: Read
    tested_by: Read | None = None
    signed: bool = False
    with_interval: bool = True


_FEW_RUNS = 2**9  # of a sample that is read at many steps of a path
_AT_ONCE = 2**18  # numbers that are read at a time, of series with many cells
_ROUNDING = 1e-12  # of errors that are 0 but for the order of a sum: they are ties
_DRAWN_AT_ONCE = 2**23  # numbers, of one series: each piece makes its tables anew
_IN_CACHE = 2**16  # numbers of replicates that are worked on at a time: fresh memory costs more than the arithmetic


def evidence_of(
    from_statistic: Read,
    statistic: Statistic,
    *,
    tested_by: Read | None = None,
    signed: bool = False,
    average: bool = False,
    with_interval: bool = True,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
) -> Evidence:
    """Return a value with its noise floor, its p-value and its interval, from the statistic alone.

    Outcomes are drawn anew, with the confidences as they are, as if the model were perfectly calibrated (consistency
    resampling), and the same reading is made of each such replicate. In a bin the sum of outcomes is a sum of
    independent trials, of which mean and variance are known; see `counts_by_chance`.

    The interval is that of the errors which the test would not reject, at the given level: outcomes are drawn too for
    frequencies ever further from the confidences. How the error is spread over the bins is not known: the lower end
    supposes that the bins have it whose gaps stand out from the noise, the upper end that all have some. Near 0 the
    test is one-sided, and far from there two-sided (Feldman and Cousins), so that the interval of a calibrated model
    holds 0 as often as its level says.

    Args:
        from_statistic: the value of each series.
        statistic: bins with sums of noise, or a sample. A sample of many elements is put into runs of neighbouring
            scores, of which the test goes by both the sample and its replicates; the value is that of the sample.
        tested_by: what the test goes by, the larger the less calibrated; by default the value.
        signed: the value is the mean gap, on both sides of 0.
        average: average over the last axis of series, which are classes of the same rows.
        with_interval: False leaves the interval NaN.
        level: of the interval, in (0, 1).
        n_replicates: R; the least p-value is 1 / (R + 1).
        seed: of the draws, which are the same on every device.

    Returns:
        `Evidence` of `(...)`, without the last axis for an average. NaN without data.

    Raises:
        TypeError, ValueError: for bad arguments.

    Source:
        Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007), for the
        replicates; Feldman, Cousins: Unified approach to the classical statistical analysis of small signals (Physical
        Review D, 1998), for the interval.
    """
    reading = Reading(from_statistic, tested_by, signed, with_interval)
    how = average, level, n_replicates, seed
    return evidence_of_each({"": reading}, statistic, *how)[""]


def evidence_of_each(
    readings: Mapping[str, Reading],
    statistic: Statistic,
    average: bool = False,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
) -> dict[str, Evidence]:
    """Return the evidence of several readings of one statistic, all from the same draws; see `evidence_of`.

    Of many classes the draws take longer than what is read from them. They are held for some classes at a time.
    """
    check_arguments(level, n_replicates, seed)
    with torch.no_grad():
        cells = cells_of(statistic, any(reading.with_interval for reading in readings.values()))
        tests = {name: _Test(reading, level, n_replicates, seed) for name, reading in readings.items()}
        pieces = [_of_each(tests, piece, place, n_replicates) for piece, place in _pieces(cells, n_replicates, average)]
        found = {}
        for name, reading in readings.items():
            value = reading.value(statistic)
            value = value.mean(-1) if average else value
            columns = [torch.cat(x).reshape(value.shape) for x in zip(*(of[name] for of in pieces), strict=True)]
            floor, p_value, low, high = (column.masked_fill(value.isnan(), torch.nan) for column in columns)
            found[name] = Evidence(value, floor, p_value, low, high, level)
        return found


def check_arguments(level: object, n_replicates: int, seed: object) -> None:
    """Raise unless the arguments of `evidence_of` are what they must be."""
    check_count("n_replicates", n_replicates)
    check_level(level, n_replicates)
    check_seed(seed)


def cells_of(statistic: Statistic, with_interval: bool) -> Cells:
    """Return what the outcomes of a statistic are sums over."""
    if isinstance(statistic, RankedSample):
        return run_cells(statistic, _FEW_RUNS if with_interval else MOST_RUNS)
    if not statistic.has_noise:
        raise ValueError(
            "`statistic` must have the sums of its noise, got bins without. Take those of a streaming metric."
        )
    return bin_cells(statistic)


def _pieces(cells: Cells, n_replicates: int, average: bool) -> Iterator[tuple[Cells, int]]:
    """Cut `(..., C, K)` into pieces `(g, C, K)` of whole averages, with the number of their first series.

    What is no average has one class.
    """
    *_, n_cells = cells.n.shape
    n_classes = cells.n.shape[-2] if average else 1
    whole = cells.map(lambda x: x.reshape(-1, n_classes, n_cells))
    at_once = max(1, _IN_CACHE // max(1, n_replicates * n_classes * n_cells))
    for start in range(0, len(whole.n), at_once):
        run = slice(start, start + at_once)
        yield whole.map(itemgetter(run)), start * n_classes


class _Along(NamedTuple):
    """What was read on a path, sum or mean over classes: of replicates `(S, R, g)`, and without noise `(S, g)`."""

    replicates: Tensor
    error: Tensor


class _OfSome(NamedTuple):
    """What a test has of some classes `(g, C)`: what was seen, replicates of it `(R, g, C)`, and what follows.

    The replicates and both paths are there only for an interval.
    """

    seen: Tensor
    replicates: Tensor
    floor: Tensor
    p_value: Tensor
    paths: list[_Along]


_Found = tuple[Tensor, Tensor, Tensor, Tensor]
"""Noise floor, p-value and both ends of the interval for averages over classes `(g)`."""


def _of_each(tests: Mapping[str, "_Test"], cells: Cells, first: int, n_replicates: int) -> dict[str, _Found]:
    """Make all tests of averages over classes, some classes at a time, of which all read the same draws.

    Args:
        tests: by the names of what they test.
        cells: `(g, C, K)`.
        first: how many series came before these.
        n_replicates: R.
    """
    n_series, n_classes, n_cells = cells.n.shape
    at_once = max(1, _IN_CACHE // max(1, n_replicates * n_cells)) if n_series == 1 else n_classes
    parts: dict[str, list[_OfSome]] = {name: [] for name in tests}
    for start in range(0, n_classes, at_once):
        some = cells.map(itemgetter((slice(None), slice(start, start + at_once))))
        draws: dict[int, Tensor] | None = {} if len(tests) > 1 else None
        for name, test in tests.items():
            parts[name].append(test.of_some(some, first + start, draws))
    return {name: test.of_all(parts[name]) for name, test in tests.items()}


@dataclass(frozen=True, eq=False)
class _Test:
    """A test of calibration; arguments as of `evidence_of`."""

    reading: Reading
    level: float
    n_replicates: int
    seed: int

    @property
    def tested_by(self) -> Read:
        """What the test goes by."""
        return self.reading.tested_by or self.reading.value

    @property
    def signed(self) -> bool:
        """Whether that is the mean gap."""
        return self.reading.signed

    def of_some(self, some: Cells, first: int, draws: dict[int, Tensor] | None) -> _OfSome:
        """Return what some classes `(g, C, K)` add to the test of all; see `_of_each`.

        Args:
            some: cells of these classes.
            first: how many series came before these.
            draws: of these cells, for all tests; None if there is but one.
        """
        seen = self.tested_by(some.with_gaps(some, some.gap))
        z, read, values = self._if_calibrated(some, first, draws)
        size, sizes = (seen.abs(), read.abs()) if self.signed else (seen, read)
        floor = (values.abs() if self.signed else values).mean(0)
        p_value = self._p_value(size, sizes, first)
        if not self.reading.with_interval:
            return _OfSome(seen, read[:0], floor, p_value, [])
        return _OfSome(seen, read, floor, p_value, self._both_paths(some, z, seen, read, first))

    def of_all(self, parts: list[_OfSome]) -> _Found:
        """Return what follows from all classes together."""
        p_value = torch.cat([part.p_value for part in parts], -1)
        n_classes = p_value.shape[-1]
        p_value = cauchy_combination(p_value - 0.5 / (self.n_replicates + 1)) if n_classes > 1 else p_value.squeeze(-1)
        floor = torch.cat([part.floor for part in parts], -1).mean(-1)
        if not self.reading.with_interval:
            return floor, p_value, torch.full_like(floor, torch.nan), torch.full_like(floor, torch.nan)
        wide = widening(n_classes)
        null = _widened(torch.cat([part.replicates for part in parts], -1).mean(-1), 0, wide)
        low, high = (_mean_of(ways, n_classes, wide) for ways in zip(*(part.paths for part in parts), strict=True))
        seen = torch.cat([part.seen for part in parts], -1).mean(-1)
        return floor, p_value, *self._interval(seen, null, p_value, low, high)

    def _if_calibrated(
        self, cells: Cells, first: int, draws: dict[int, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw deviations `(R, ..., K)`, and read statistic and value of each replicate `(R, ...)`.

        The deviations are kept where an interval needs them.
        """
        calibrated = torch.zeros_like(cells.n), cells.variance.sqrt()
        streams = torch.arange(self.n_replicates, device=cells.n.device)
        value, tested_by = self.reading.value, self.tested_by
        drawn, read, values = [], [], []
        for place, some in enumerate(torch.split(streams, max(1, _DRAWN_AT_ONCE // max(1, cells.n.numel())))):
            z = self._drawn(cells, some, first, place, draws)
            read.append(_read(tested_by, cells, z, *calibrated))
            values.append(read[-1] if value is tested_by else _read(value, cells, z, *calibrated))
            drawn.append(z if self.reading.with_interval else z[:0])
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn), torch.cat(read), torch.cat(values)

    def _drawn(self, cells: Cells, streams: Tensor, first: int, place: int, draws: dict[int, Tensor] | None) -> Tensor:
        """Draw replicates `(r, g, C, K)`, or return those that were drawn for another reading."""
        if draws is None:
            return cells.drawn(self.seed, streams, first)
        if place not in draws:
            draws[place] = cells.drawn(self.seed, streams, first)
        return draws[place]

    def _p_value(self, observed: Tensor, replicates: Tensor, first: int) -> Tensor:
        """Return the rank of what was seen among the replicates `(R, ...)`, from 1 / (R + 1) to 1.

        Ties are broken by chance: where few outcomes are possible, many replicates equal the data, and a rank before
        or behind all of them would not be uniform.
        """
        rounding = 1e-9 * observed.abs() + _ROUNDING
        larger = (replicates > observed + rounding).sum(0)
        ties = ((replicates - observed).abs() <= rounding).sum(0)
        chance = self._chance(observed, first, self.n_replicates, 1)[0]
        return (1 + larger + (chance * (ties + 1)).floor()) / (len(replicates) + 1)

    def _chance(self, like: Tensor, first: int, first_stream: int, n_streams: int) -> Tensor:
        """Return random numbers in (0, 1) for every series, `(n_streams, ...)`."""
        places = first + torch.arange(like.numel(), device=like.device)
        streams = first_stream + torch.arange(n_streams, device=like.device)
        chance: Tensor = (random_words(self.seed, streams, places).to(like.dtype) + 0.5) / 2**32
        return chance.reshape(-1, *like.shape)

    def _both_paths(self, cells: Cells, z: Tensor, observed: Tensor, null: Tensor, first: int) -> list[_Along]:
        """Read replicates on the paths on which the lower and the upper end are looked for."""
        if self.signed:
            chance = self._chance(observed, first, self.n_replicates + 1, self.n_replicates)
            error, replicates = mean_gap_to_both_sides(cells, chance)
            return 2 * [_Along(replicates.sum(-1), error.sum(-1))]
        few, group = (cells, None) if cells.are_bins else grouped(cells)
        paths = []
        for direction in (concentrated(few), spread_out(few)):
            of_cells = direction if group is None else direction.gather(-1, group)
            there = self.tested_by(cells.with_gaps(cells, cells.within_bounds(of_cells)))
            path = outwards(of_cells, (observed + null.mean(0)) / there)
            paths.append(self._along(cells, z, path))
        return paths

    def _along(self, cells: Cells, z: Tensor, path: Tensor) -> _Along:
        """Read replicates, and what they vary about, at every step of a path; summed over classes."""
        path = cells.within_bounds(path)
        deviation = cells.deviation(path)
        with_error = torch.cat((torch.zeros_like(z[:1]), z))  # and first what they vary about
        read = [
            _read(self.tested_by, cells, with_error, gaps, by).sum(-1) for gaps, by in zip(path, deviation, strict=True)
        ]
        whole = torch.stack(read)
        return _Along(whole[:, 1:], whole[:, 0])

    def _interval(
        self, observed: Tensor, null: Tensor, p_value: Tensor, low: _Along, high: _Along
    ) -> tuple[Tensor, Tensor]:
        """Return the errors between which the test rejects none."""
        alpha = 1 - self.level
        edge = null.sort(0).values[min(math.ceil(self.level * (self.n_replicates + 1)), self.n_replicates) - 1]

        def sidedness(along: _Along) -> Tensor | float:
            """From 0 where errors cannot be told from calibration, to 1 where they always can."""
            if self.signed:
                return 1.0
            return (((along.replicates > edge).to(edge.dtype).mean(1) - alpha) / self.level).clamp(0, 1)

        rounding = 1e-9 * observed.abs() + _ROUNDING
        above = self._share(low.replicates >= observed - rounding)
        below = self._share(high.replicates <= observed + rounding)
        too_low = above - torch.special.ndtri(self._tail(alpha * (1 - sidedness(low) / 2), edge))
        too_high = below - torch.special.ndtri(self._tail(alpha * sidedness(high) / 2, edge))
        lower, upper = low.error, high.error
        if not self.signed:  # the first step is calibration, of which the p-value has its say on ties
            too_low[0] = torch.where(p_value >= alpha - 1e-9, 0.0, too_low[0].clamp(max=-1e-9))
            # Its error is 0, whatever rounding made of sums over many elements; NaN stays.
            lower, upper = (torch.cat((0 * error[:1], error[1:])) for error in (lower, upper))
        return first_reached(too_low, lower), first_reached(too_high.flip(0), upper.flip(0))

    def _share(self, counted: Tensor) -> Tensor:
        """Standard normal quantile of the share of replicates `(S, R, ...)`."""
        share = (counted.to(torch.float64).sum(1) + 0.5) / (self.n_replicates + 1)
        quantile: Tensor = torch.special.ndtri(share)
        return quantile

    def _tail(self, share: Tensor | float, like: Tensor) -> Tensor:
        return torch.as_tensor(share, dtype=like.dtype, device=like.device).clamp(min=1e-12)


def _read(read: Read, cells: Cells, z: Tensor, gaps: Tensor, deviation: Tensor) -> Tensor:
    """Read replicates `(R, ...)` of cells with these gaps, some at a time."""
    at_once = max(1, _AT_ONCE // max(1, cells.n.numel()))
    some_at_a_time = torch.split(z, at_once)
    return torch.cat([read(cells.with_gaps(cells, torch.addcmul(gaps, some, deviation))) for some in some_at_a_time])


def _mean_of(parts: tuple[_Along, ...], n_classes: int, wide: float) -> _Along:
    """Put together sums over classes, some of them each."""
    replicates, error = (torch.stack(sums).sum(0) / n_classes for sums in zip(*parts, strict=True))
    return _Along(_widened(replicates, 1, wide), error)


def _widened(values: Tensor, axis: int, by: float) -> Tensor:
    """Return values whose distance from their mean is larger."""
    if by == 1:
        return values
    mean = values.mean(axis, keepdim=True)
    return mean + by * (values - mean)
