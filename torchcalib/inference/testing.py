"""Evidence of any reading: what it is of outcomes that are drawn anew, for a calibrated model and for others."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchcalib.core.arguments import check_count, check_level, check_seed
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats
from torchcalib.inference.averages import cauchy_combination, widening
from torchcalib.inference.evidence import Evidence
from torchcalib.inference.inversion import Inversion, rounding_of
from torchcalib.inference.paths import (
    Reached,
    concentrated,
    first_reached,
    in_units_of_noise_and_gaps,
    mean_gap_to_both_sides,
    multiple_at,
    reached_by_halving,
    rising,
    spread_out,
    spread_out_to_one_side,
)
from torchcalib.inference.replicates import Cells, Drawn, bin_cells
from torchcalib.inference.samples import MOST_RUNS, RUNS_ON_PATHS, grouped, run_cells
from torchcalib.ops.counter_rng import random_words
from torchcalib.ops.host_values import look

Statistic = BinStats | RankedSample
Read = Callable[[Any], Tensor]
"""From a statistic to a value for each of its series `(...)`."""
Draws = dict[int, Drawn]
"""What was drawn of some cells, by the piece of replicates."""


class Reading(NamedTuple):
    """What is read of a statistic, and how that is tested; see `evidence_of`."""

    value: Read
    tested_by: Read | None = None
    without_noise: Read | Literal["tested_by"] | None = "tested_by"
    signed: bool = False
    with_interval: bool = True


_AT_ONCE = 2**18  # numbers that are read at a time, of series with many cells
_ON_PATHS = 199  # replicates of a sample in order, at each step of a path
_MOST_KEPT = 2**23  # numbers that are kept from one reading to the next, and not drawn anew
_DRAWN_AT_ONCE = 2**23  # numbers, of one series: each piece makes its tables anew
_IN_CACHE = 2**16  # numbers of replicates that are worked on at a time: fresh memory costs more than the arithmetic


def evidence_of(
    from_statistic: Read,
    statistic: Statistic,
    *,
    tested_by: Read | None = None,
    without_noise: Read | Literal["tested_by"] | None = "tested_by",
    signed: bool = False,
    average: bool = False,
    cancels: bool = False,
    with_interval: bool = True,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
) -> Evidence:
    """Return a value with its noise floor, its p-value and its interval, from the statistic alone.

    Outcomes are simulated from the confidences, as if the model were perfectly calibrated (consistency resampling),
    and the error of each replicate is computed. In a bin the sum of outcomes is a sum of independent trials with known
    mean and variance; see `counts_by_chance`. The p-value is (1 + number of replicates with an error at least that of
    the data) / (R + 1). For averages over classes the p-values of the classes are combined; see `cauchy_combination`.

    The interval is that of the errors which the test would not reject, at the given level: outcomes are drawn too for
    frequencies ever further from the confidences. How the error is spread over the bins is not known: the lower end
    supposes that the bins have it whose gaps stand out from the noise, the upper end that all have some. Of a sample in
    order the lower end is the lower one of two: of the best frequencies that rise with the score, part of the way to
    them, and of gaps that are all to one side. Near 0 the test is one-sided, and far from there two-sided (Feldman and
    Cousins), so that the interval of a calibrated model holds 0 as often as its level says.

    Args:
        from_statistic: the value of each series.
        statistic: bins with sums of noise, or a sample. A sample of many elements is put into runs of neighbouring
            scores, of which the test goes by both the sample and its replicates; the value is that of the sample.
        tested_by: what the test goes by, the larger the less calibrated; by default the value.
        without_noise: the error `(...)` of outcomes that are frequencies, which is what the interval is of; by default
            `tested_by` reads it. None if there is no such thing, where bins follow from the outcomes or decisions are
            counted: the interval is then that of the expected value of what the test goes by, at this number of
            samples, of which the noise floor is the least.
        signed: the value is the mean gap, on both sides of 0.
        average: average over the last axis of series, which are classes of the same rows. What is signed is averaged
            before its size is taken; classes are independent then, as labels of a row are.
        cancels: the classes of a row exclude each other, so that a signed average is 0 whatever the model: noise floor
            and interval are 0, and the p-value 1, for every data set is as far from calibration.
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
    if signed and average and cancels:
        check_arguments(level, n_replicates, seed)
        return Evidence.by_construction(from_statistic(statistic).detach().mean(-1), level)
    reading = Reading(from_statistic, tested_by, without_noise, signed, with_interval)
    found = evidence_of_each(
        {"": reading}, statistic, average=average, level=level, n_replicates=n_replicates, seed=seed
    )
    return found[""]


def evidence_of_each(
    readings: Mapping[str, Reading],
    statistic: Statistic,
    *,
    average: bool = False,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
) -> dict[str, Evidence]:
    """Return the evidence of several readings of one statistic, all from the same draws; see `evidence_of`.

    Of many classes the draws take longer than what is read from them. If they are more than is kept, they are held for
    some classes at a time.
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
        return run_cells(statistic, RUNS_ON_PATHS if with_interval else MOST_RUNS)
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
    """What was read at a step of a path, mean over classes: of replicates `(R, g)`, and the error there `(g)`."""

    replicates: Tensor
    error: Tensor


class _Part(NamedTuple):
    """Some classes of a piece, and what was read of them.

    Attributes:
        cells: `(g, c, K)`.
        first: number of their first series.
        draws: of these cells; None where they are made anew each time.
        seen: what the test goes by, as it was observed `(g, c)`.
        read, values: the same and the value, of replicates `(R, g, c)` of a calibrated model.
    """

    cells: Cells
    first: int
    draws: Draws | None
    seen: Tensor
    read: Tensor
    values: Tensor


_Found = tuple[Tensor, Tensor, Tensor, Tensor]
"""Noise floor, p-value and both ends of the interval for averages over classes `(g)`."""


def _of_each(tests: Mapping[str, "_Test"], cells: Cells, first: int, n_replicates: int) -> dict[str, _Found]:
    """Make all tests of averages over classes.

    Args:
        tests: by the names of what they test.
        cells: `(g, C, K)`.
        first: how many series came before these.
        n_replicates: R.
    """
    n_series, n_classes, n_cells = cells.n.shape
    at_once = max(1, _IN_CACHE // max(1, n_replicates * n_cells)) if n_series == 1 else n_classes
    walks = any(test.reading.with_interval for test in tests.values())
    are_kept = walks and n_replicates * cells.n.numel() <= _MOST_KEPT  # from one step of a path to the next
    parts: dict[str, list[_Part]] = {name: [] for name in tests}
    for start in range(0, n_classes, at_once):
        some = cells.map(itemgetter((slice(None), slice(start, start + at_once))))
        draws: Draws | None = {} if n_replicates * some.n.numel() <= _MOST_KEPT else None
        for name, test in tests.items():
            part = test.part(some, first + start, draws)
            parts[name].append(part if are_kept else part._replace(draws=None))
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
    def without_noise(self) -> Read | None:
        """What reads the error of outcomes that are frequencies."""
        return self.tested_by if self.reading.without_noise == "tested_by" else self.reading.without_noise

    def part(self, cells: Cells, first: int, draws: Draws | None) -> _Part:
        """Read what was seen of some classes, and what it would be of a calibrated model.

        Args:
            cells: `(g, c, K)`.
            first: how many series came before these.
            draws: what has been drawn of these cells, to which more is added; None if it is too much to be held.
        """
        seen = self.tested_by(cells.with_gaps(cells, cells.gap))
        read = values = self._read(self.tested_by, cells, first, draws)
        if self.reading.value is not self.tested_by:
            values = self._read(self.reading.value, cells, first, draws)
        return _Part(cells, first, draws, seen, read, values)

    def of_all(self, parts: list[_Part]) -> _Found:
        """Return what follows from all classes together."""
        seen, read, values = (torch.cat(each, -1) for each in zip(*(part[3:] for part in parts), strict=True))
        n_classes = seen.shape[-1]
        if self.reading.signed:  # classes make up for each other in the mean, and so they do in what chance adds
            floor = values.mean(-1).abs().mean(0)
            p_value, _ = _p_value(seen.mean(-1).abs(), read.mean(-1).abs())
        else:
            floor = values.mean(-1).mean(0)
            p_value, tied = _p_value(seen, read)
            p_value = cauchy_combination(p_value, tied, len(read)) if n_classes > 1 else p_value.squeeze(-1)
        if not self.reading.with_interval:
            return floor, p_value, torch.full_like(floor, torch.nan), torch.full_like(floor, torch.nan)
        wide = 1.0 if self.reading.signed else widening(n_classes)
        calibrated = _widened(read.mean(-1), wide)
        test = Inversion.of(self.level, seen.mean(-1), calibrated, signed=self.reading.signed)
        is_rejected = p_value < 1 - self.level - 1e-9
        if self.reading.signed:
            return floor, p_value, *self._mean_gaps(parts, test, is_rejected)
        return floor, p_value, *self._on_paths(parts, test, calibrated, is_rejected, wide)

    def _read(self, read: Read, cells: Cells, first: int, draws: Draws | None, gaps: Tensor | None = None) -> Tensor:
        """Read replicates `(R, ...)` of a calibrated model, or if gaps are given of one of which they are expected."""
        n_replicates = self.n_replicates if gaps is None or cells.are_bins else min(self.n_replicates, _ON_PATHS)
        streams = torch.arange(n_replicates, device=cells.n.device)
        found = []
        for place, some in enumerate(torch.split(streams, max(1, _DRAWN_AT_ONCE // max(1, cells.n.numel())))):
            drawn = self._drawn(cells, some, place, first, draws)
            # Series with many cells a few at a time.
            for few in zip(*(torch.split(x, max(1, _AT_ONCE // max(1, cells.n.numel()))) for x in drawn), strict=True):
                chance = Drawn(*few)
                by_chance = cells.gaps_if_calibrated(chance) if gaps is None else cells.gaps_around(gaps, chance)
                found.append(read(cells.with_gaps(cells, by_chance)))
        return torch.cat(found)

    def _drawn(self, cells: Cells, streams: Tensor, place: int, first: int, draws: Draws | None) -> Drawn:
        """Draw replicates `(r, g, C, K)`, or return those that were drawn for another reading."""
        if draws is None:
            return cells.drawn(self.seed, streams, first)
        if place not in draws:
            draws[place] = cells.drawn(self.seed, streams, first)
        return Drawn(*(x[: len(streams)] for x in draws[place]))

    def _chance(self, numbers: Tensor) -> Tensor:
        """Return random numbers in (0, 1) for every series, `(R, ...)`, from streams that the cells do not use."""
        streams = self.n_replicates + torch.arange(self.n_replicates, device=numbers.device)
        words = random_words(self.seed, streams, numbers.flatten())
        chance: Tensor = (words.to(torch.float64) + 0.5) / 2**32
        return chance.reshape(-1, *numbers.shape)

    def _mean_gaps(self, parts: list[_Part], test: Inversion, is_rejected: Tensor) -> tuple[Tensor, Tensor]:
        """Return both ends of the interval of a mean gap. It contains 0 unless calibration is rejected."""
        errors, replicates = [], []
        for part in parts:
            numbers = part.first + torch.arange(part.seen.numel(), device=part.seen.device).reshape(part.seen.shape)
            moved = mean_gap_to_both_sides(part.cells, self._chance(numbers).to(part.cells.n.dtype))
            errors.append(moved.error)
            replicates.append(moved.replicates)
        error, read = torch.cat(errors, -1).mean(-1), torch.cat(replicates, -1).mean(-1)
        too_low, too_high = (torch.stack([of(step) for step in read]) for of in (test.too_low, test.too_high))
        low, high = first_reached(too_low, error), first_reached(too_high.flip(0), error.flip(0))
        # Agree with the p-value, which is two-sided and uses the noise of a calibrated model.
        return torch.where(is_rejected, low, low.clamp(max=0)), torch.where(is_rejected, high, high.clamp(min=0))

    def _on_paths(
        self, parts: list[_Part], test: Inversion, calibrated: Tensor, is_rejected: Tensor, wide: float
    ) -> tuple[Tensor, Tensor]:
        """Return both ends of the interval, each looked for on paths of its own."""
        calibrated_error = calibrated.mean(0) if self.without_noise is None else 0 * test.observed
        *downwards, upwards = zip(*(self._directions(part) for part in parts), strict=True)

        def too_low(way: Sequence[Tensor], step: Tensor) -> Reached:
            along = self._along(parts, way, step, wide)
            return Reached(test.too_low(along.replicates), along.error)

        def too_high(step: Tensor) -> Reached:
            along = self._along(parts, upwards, step, wide)
            return Reached(-test.too_high(along.replicates), along.error)

        # A path starts at calibration, which is rejected exactly where `is_rejected` is true.
        low = calibrated_error
        if look(is_rejected.any()) is not False:
            start = Reached(test.too_low(calibrated).clamp(max=-1e-9), calibrated_error)
            ends = torch.stack([reached_by_halving(partial(too_low, way), start) for way in downwards])
            low = torch.where(is_rejected, ends.amin(0), low)
        kept = Reached(-test.too_high(calibrated).clamp(min=1e-9), calibrated_error)
        return low, reached_by_halving(too_high, kept)

    def _directions(self, part: _Part) -> list[Tensor]:
        """Return gaps `(g, c, K)` that are one unit of each path away from calibration: those of the lower end, of
        which the lowest counts, and last that of the upper one.
        """
        cells = part.cells
        if not cells.are_bins:
            few, group = grouped(cells)
            one_side = spread_out_to_one_side(few)
            ways = rising(few), one_side, one_side if self.without_noise is None else spread_out(few)
            return [in_units_of_noise_and_gaps(few, way).gather(-1, group) for way in ways]
        found = []
        for direction in (concentrated(cells), spread_out(cells)):
            gaps = in_units_of_noise_and_gaps(cells, direction)
            # In units of the error itself, of which a single bin may have most.
            there, of_one = (
                self.tested_by(cells.with_gaps(cells, x)) for x in (cells.within_bounds(gaps), cells.gap_of_one_outcome)
            )
            size = ((part.seen + part.read.mean(0)).maximum(of_one) / there).nan_to_num(0, posinf=0)
            found.append(gaps * size.unsqueeze(-1))
        return found

    def _along(self, parts: list[_Part], way: Sequence[Tensor], step: Tensor, wide: float) -> _Along:
        """Read replicates, and the error without noise, so many steps `(g)` along a path of every part."""
        size = multiple_at(step).unsqueeze(-1).unsqueeze(-1)
        replicates, errors = [], []
        for part, direction in zip(parts, way, strict=True):
            gaps = part.cells.within_bounds(size * direction)
            replicates.append(self._read(self.tested_by, part.cells, part.first, part.draws, gaps))
            if self.without_noise is not None:
                errors.append(self.without_noise(part.cells.with_gaps(part.cells, gaps)))
        read = torch.cat(replicates, -1).mean(-1)
        return _Along(_widened(read, wide), torch.cat(errors, -1).mean(-1) if errors else read.mean(0))


def _p_value(observed: Tensor, replicates: Tensor) -> tuple[Tensor, Tensor]:
    """Return p-values `(...)`, and the part of each that is due to ties.

    The p-value is (1 + number of replicates `(R, ...)` at least as large as the data) / (R + 1). For a calibrated
    model the data are one more replicate, so that P(p <= a) <= a for every a. Values that differ only by rounding
    count as equal.

    Source:
        Phipson, Smyth: Permutation p-values should never be zero (Statistical Applications in Genetics and Molecular
        Biology, 2010), sec. 4.
    """
    rounding = rounding_of(observed)
    at_least = 1 + (replicates >= observed - rounding).sum(0)
    larger = (replicates > observed + rounding).sum(0)
    n = len(replicates) + 1
    return at_least.to(observed.dtype) / n, (at_least - larger).to(observed.dtype) / n


def _widened(values: Tensor, by: float) -> Tensor:
    """Return values `(R, ...)` whose distance from their mean is larger."""
    if by == 1:
        return values
    mean = values.mean(0, keepdim=True)
    return mean + by * (values - mean)
