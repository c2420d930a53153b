"""Calibration tests: null distribution of an error under perfect calibration, p-value and confidence interval."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchcalib._bridges import Advising
from torchcalib.core.arguments import check_count, check_level, check_seed
from torchcalib.core.clusters import MAX_DISTINCT
from torchcalib.core.partition import AnyPartition
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats
from torchcalib.display.words import in_one_line
from torchcalib.inference.clusters import ClusteredMean, SignFlips, number_of_clusters
from torchcalib.inference.intervals import ErrorIntervals, IntervalKind, normal_quantile, replicated_interval
from torchcalib.inference.simulation import (
    MAX_LABELS,
    MAX_RUNS,
    BinCells,
    LabelRows,
    LabelSimulation,
    Metric,
    RunCells,
    Simulation,
    replicated,
)
from torchcalib.ops.host_values import once

Statistic = BinStats | RankedSample

_IN_CACHE = 2**16  # number of simulated values that are processed at a time, which fit in the cache


@dataclass(frozen=True, eq=False, repr=False)
class CalibrationTest(Advising):
    """Calibration error with its expected value under perfect calibration, p-value and confidence interval.

    Attributes:
        statistic: error of the data `(...)`, or the test statistic of a metric that is not an error (`Cox`).
        noise_floor: expected value of the error if the model is perfectly calibrated, given its confidences `(...)`.
            For a signed error it is the expected absolute value.
        p_value: probability of an error at least as large if the model is perfectly calibrated, `(...)`. If m of R
            simulated replicates have at least the error of the data, it is (1 + m) / (R + 1). Ties are included:
            an error of exactly 0 has p = 1. For a calibrated model P(p <= a) <= a, if rows are independent and the
            predictions were not fitted to these labels. The p-value is uniform if ties are rare. With few samples ties
            are frequent, and the test is conservative. For averages over classes see `smallest_p_value`. The level is
            that of one look at the data: of repeated looks at growing data, more than a share a have p <= a at some
            look, also for a calibrated model. Use `torchcalib.SequentialTest` for repeated looks.
        low, high: confidence interval `(...)`, which contains `statistic`. Its target is the expected value of
            `statistic` over samples (confidences and outcomes) of this size. A signed error is 0 on average for a
            calibrated model: compare its interval with 0. For a debiased error the target is the error without noise.
            NaN if not computed, for example for few expected events; see `torchcalib.inference.intervals`.
        level: nominal coverage probability of the interval, in (0, 1).
        method: name of the method that computes the p-value.
        design_effect: variance of the mean gap divided by that of independent rows `(...)`, if clusters were given. For
            an average over classes it is the mean of the classes.
        n_clusters: number of distinct clusters with data; 100,001 stands for more than 100,000.
        n_merged: number of clusters after merging clusters with the same hash, from which the test is computed. It
            equals `n_clusters` if no clusters are merged.
        effective_clusters: effective number of clusters `(...)`, in [1, `n_merged`]: the number of clusters of equal
            variance for which a t-test of the mean gap is about equally reliable. For an average over classes it is the
            minimum of the classes. See `ClusteredMean` in `torchcalib.inference.clusters`.
        smallest_p_value: smallest possible p-value, 1 / (R + 1). For an average over C classes whose p-values are
            combined, it is the smallest one if a single class deviates, about C / (R + 1). See `cauchy_combination`.
    """

    statistic: Tensor
    noise_floor: Tensor
    p_value: Tensor
    low: Tensor
    high: Tensor
    level: float
    method: str
    design_effect: Tensor | None = None
    n_clusters: int | None = None
    n_merged: int | None = None
    effective_clusters: Tensor | None = None
    smallest_p_value: float | None = None

    @property
    def excess(self) -> Tensor:
        """Error minus its noise floor `(...)`: an index of miscalibration that is biased downwards.

        Gaps and noise do not add, so the excess is smaller than the error of infinitely many samples. In
        `benchmarks.debiased` its mean is 16% (60 samples) to 75% (5,000 samples) of it. Estimate the size of the
        miscalibration by `RMSCE(debiased=True)` or `ECE(debiased=True)`.

        Not meaningful for a signed error (`ESCE`), whose noise floor is an expected absolute value.
        """
        return self.statistic - self.noise_floor

    def masked(self, invalid: Tensor) -> Self:
        """Return a test with NaN for the batch elements in the mask `invalid`, `(...)`."""
        masked: dict[str, Any] = {
            field.name: x.masked_fill(invalid, torch.nan)
            for field in fields(self)
            if isinstance(x := getattr(self, field.name), Tensor)
        }
        return replace(self, **masked)

    def __getitem__(self, index: Any) -> Self:
        """Index the batch axes: `found[k]` is the test for batch element, group or class k."""
        if self.statistic.dim() < 1:
            raise IndexError("the test must have a batch axis to index, got fields of shape ()")
        columns = [getattr(self, field.name) for field in fields(self)]
        parts: list[Any] = [x[index] if isinstance(x, Tensor) else x for x in columns]
        return type(self)(*parts)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """Return one line of text for each batch element."""
        if self.statistic.dim():
            return "\n".join(f"[{index}] {self[index]}".replace("\n", "\n    ") for index in range(len(self.statistic)))
        value, floor, p, low, high = map(float, (self.statistic, self.noise_floor, self.p_value, self.low, self.high))
        line = in_one_line(value, floor, p, low, high, self.level)
        if "Cauchy" in self.method:
            line += f", smallest p of one deviating class {self.smallest_p_value:.2g}"
        if self.design_effect is None or self.effective_clusters is None:
            return line
        clusters = clusters_in_words("independent clusters", self.n_clusters, self.n_merged)
        number, effect = float(self.effective_clusters), float(self.design_effect)
        return f"{line}, {clusters}, effective number {number:.3g}, design effect {effect:.3g}"


def clusters_in_words(noun: str, n_clusters: int | None, n_merged: int | None) -> str:
    """Return the number of clusters with a noun, and the number after merging if it is smaller."""
    n = n_clusters or 0
    words = f"{n:,} {noun}" if n <= MAX_DISTINCT else f"more than {MAX_DISTINCT:,} {noun}"
    return words if n_merged is None or n_merged >= n else f"{words} (merged into {n_merged:,})"


class ErrorTest(NamedTuple):
    """Definition of a calibration error and its test."""

    value: Metric  # computes the error `(...)` from a statistic
    test_formula: Metric | None = None  # computes the test statistic, larger for worse calibration; None: `value`
    signed: bool = False  # whether the error is the mean gap, which may be negative
    interval: IntervalKind | None = None  # formula of the error over bins, for its interval; None: the interval is NaN

    @property
    def test_statistic(self) -> Metric:
        """Function that computes the test statistic `(...)`."""
        return self.test_formula or self.value


class _Result(NamedTuple):
    """Results of one test for g batch elements, each `(g)`; see `CalibrationTest`."""

    noise_floor: Tensor
    p_value: Tensor
    low: Tensor
    high: Tensor
    design_effect: Tensor
    effective_clusters: Tensor


def run_error_test(test: ErrorTest, statistic: Statistic, **how: Any) -> CalibrationTest:
    """Return the calibration test of one error; see `run_error_tests`."""
    return run_error_tests({"": test}, statistic, **how)[""]


def run_error_tests(
    tests: Mapping[str, ErrorTest],
    statistic: Statistic,
    *,
    clusters: AnyPartition | None = None,
    rows: Sequence[LabelRows] | None = None,
    average: bool = False,
    cancels: bool = False,
    max_runs: int = MAX_RUNS,
    level: float = 0.95,
    n_replicates: int = 999,
    seed: int = 0,
) -> dict[str, CalibrationTest]:
    """Test several errors, computed from one statistic, with the same simulated outcomes. Return tests by name.

    Outcomes are simulated from the confidences, and the errors are recomputed for each replicate (consistency
    resampling). The sum of outcomes in a bin is a sum of independent trials with known mean and variance; see
    `count_quantiles`. For an average over exclusive classes whose rows are given, whole labels are simulated; see
    `LabelSimulation`. Otherwise the p-values of the classes are combined; see `cauchy_combination`. For the interval,
    see `torchcalib.inference.intervals`; an average over several classes has none. For dependent rows, see
    `torchcalib.inference.clusters`. Fields `(...)` are NaN without data.

    Args:
        statistic: bins with sums of noise, or a ranked sample. The test divides a large sample into at most `max_runs`
            runs of consecutive scores. The error is computed from the whole sample.
        clusters: the same statistic by cluster of dependent rows.
        rows: rows of each batch element, for an average over exclusive classes. Ignored for more than 2^25 rows times
            replicates.
        average: average over the last batch axis, the classes of the same rows. Signed errors are averaged before their
            absolute value is computed. Their classes are assumed to be independent, as in multi-label tasks.
        cancels: whether the classes are mutually exclusive. The average of a signed error is then always 0, with
            noise floor 0, interval [0, 0] and p-value 1.

    Reference:
        Broecker, Smith: Increasing the reliability of reliability diagrams (Weather and Forecasting, 2007).
    """
    check_arguments(level, n_replicates, seed)
    # The mean signed error over exclusive classes is 0 for every model, and needs no simulation.
    tested = {name: test for name, test in tests.items() if not (test.signed and average and cancels)}
    with torch.no_grad():
        n_clusters = n_merged = None
        batches: list[dict[str, _Result]] = []
        if tested:
            cells = _cells_of(statistic, max_runs)
            if rows is not None and (not average or sum(map(len, rows)) * n_replicates > MAX_LABELS):
                rows = None
            table = None
            if clusters is not None:
                table = clusters.residuals(cells.upper)  # (..., G, 2, K)
                # Drop clusters without data in any batch element, but keep at least one.
                occupied = (table[..., 0, :] > 0).any(-1).reshape(-1, table.shape[-3]).any(0)
                table = table[..., occupied, :, :] if bool(occupied.any()) else table[..., :1, :, :]
                n_merged = int(number_of_clusters(table).max())
                n_clusters = clusters.n_distinct or n_merged
            batches = list(_tested_batches(tested, cells, table, rows, average, level, n_replicates, seed))
        found = {}
        for name, test in tests.items():
            value = test.value(statistic)
            value = value.mean(-1) if average else value
            if name in tested:
                columns, missing = zip(*[batch[name] for batch in batches], strict=True), value.isnan()
                joined = [torch.cat(parts).reshape(value.shape).masked_fill(missing, torch.nan) for parts in columns]
                result = _Result(*joined)
                # The interval contains the error, which rounding errors could prevent.
                result = result._replace(low=result.low.minimum(value), high=result.high.maximum(value))
            else:
                zero, one = 0 * value, 0 * value + 1
                result = _Result(zero, one, zero, zero, one, one)
            is_combined = name in tested and average and rows is None and not test.signed
            n_combined = cells.n.shape[-2] if is_combined else 1
            is_clustered = clusters is not None and name in tested
            method = f"consistency resampling, {n_replicates:,} replicates"
            if rows is not None:
                method += " of whole labels"
            if n_combined > 1:
                method += (
                    f", Cauchy combination of {n_combined:,} classes "
                    f"(at least {smallest_p_value(n_combined, n_replicates):.2g} if one class deviates)"
                )
            found[name] = CalibrationTest(
                value,
                *result[:4],
                level,
                f"{method}, and random signs of clusters" if is_clustered else method,
                design_effect=result.design_effect if is_clustered else None,
                n_clusters=n_clusters if is_clustered else None,
                n_merged=n_merged if is_clustered else None,
                effective_clusters=result.effective_clusters if is_clustered else None,
                smallest_p_value=smallest_p_value(n_combined, n_replicates),
            )
        return found


def smallest_p_value(n_classes: int, n_replicates: int) -> float:
    """Return the smallest p-value of a Cauchy combination if one class deviates, and all others have p = 1/2."""
    return 0.5 - math.atan(math.tan((0.5 - 1 / (n_replicates + 1)) * math.pi) / n_classes) / math.pi


def check_arguments(level: object, n_replicates: int, seed: object) -> None:
    """Raise unless the level, the number of replicates and the seed are valid."""
    check_count("n_replicates", n_replicates)
    check_level(level)
    check_seed(seed)


def _cells_of(statistic: Statistic, max_runs: int) -> BinCells | RunCells:
    """Return the bins, or the runs of a ranked sample, as cells whose outcomes are simulated."""
    if isinstance(statistic, RankedSample):
        return RunCells.from_sample(statistic, max_runs)
    if not statistic.has_noise:
        raise ValueError(
            "`statistic` must contain sums of noise, got bins without them. Use the bins of a streaming metric."
        )
    return BinCells.from_bins(statistic)


_Simulation = Simulation | LabelSimulation | SignFlips


class _Null(NamedTuple):
    """Test statistic of the data `(g, c)`, and R replicates `(R, g, c)` for a calibrated model."""

    observed: Tensor
    tested: Tensor  # replicates of the test statistic
    values: Tensor  # replicates of the error


def _tested_batches(
    tests: Mapping[str, ErrorTest],
    cells: BinCells | RunCells,
    table: Tensor | None,
    rows: Sequence[LabelRows] | None,
    average: bool,
    level: float,
    n_replicates: int,
    seed: int,
) -> Iterator[dict[str, _Result]]:
    """Yield results by test name for g batch elements, whose bins or runs are `(g, C, K)`; C = 1 without average."""
    *_, n_cells = cells.n.shape
    n_classes = cells.n.shape[-2] if average else 1
    whole = cells.map(lambda x: x.reshape(-1, n_classes, n_cells))
    table = None if table is None else table.reshape(*whole.n.shape[:-1], *table.shape[-3:])
    classes_at_once = max(1, _IN_CACHE // max(1, n_replicates * n_cells))
    at_once = max(1, classes_at_once // max(1, n_classes))
    if rows is not None:  # labels are simulated for all classes of one batch element
        classes_at_once, at_once = n_classes, 1
    for start in range(0, len(whole.n), at_once):
        elements = slice(start, start + at_once)
        piece = whole.map(itemgetter(elements))
        nulls: dict[str, list[list[_Null]]] = {name: [] for name in tests}
        flips: SignFlips | None = None
        means: list[ClusteredMean] = []
        # Simulate the classes of an average in chunks, because there may be many.
        for first in range(0, n_classes, classes_at_once):
            classes = slice(first, first + classes_at_once)
            some = piece.map(itemgetter((slice(None), classes)))
            simulations: list[_Simulation] = (
                [Simulation(some, start * n_classes + first, seed, n_replicates)]
                if rows is None
                else [LabelSimulation(some, rows[start], start, seed, n_replicates)]
            )
            if table is not None:
                flips = SignFlips(some, table[elements, classes], seed, n_replicates)
                simulations.append(flips)
                means.append(ClusteredMean.of_gaps(some, flips.table))
            found = [_nulls_of(tests, some, simulation) for simulation in simulations]
            for name in tests:
                nulls[name].append([each[name] for each in found])
        effect = number = piece.n.new_ones(len(piece.n))
        if means:
            effect = torch.cat([mean.design_effect for mean in means], -1).mean(-1)
            number = torch.cat([mean.effective_number for mean in means], -1).amin(-1)
        intervals = None
        if n_classes == 1 and isinstance(piece, BinCells) and any(test.interval for test in tests.values()):
            # `flips` and `means` are those of the only class.
            intervals = _Intervals(piece.map(lambda x: x.squeeze(-2)), level, flips, means[0] if means else None)
        yield {
            name: _Result(*_evidence(test, nulls[name], intervals, rows is not None), effect, number)
            for name, test in tests.items()
        }


def _nulls_of(tests: Mapping[str, ErrorTest], cells: BinCells | RunCells, simulation: _Simulation) -> dict[str, _Null]:
    """Return the test statistic of the data and its null distribution for each test."""
    data = cells.with_gaps(cells.gap)
    observed = {name: test.test_statistic(data) for name, test in tests.items()}
    tested = {test.test_statistic for test in tests.values()}
    values = {test.value for test in tests.values()}
    if isinstance(simulation, SignFlips):
        of_tests = replicated(tested, simulation.statistics())
        of_values = replicated(values, simulation.statistics(centred=True))
    else:
        of_tests = of_values = replicated(tested | values, simulation.statistics())
    return {
        name: _Null(observed[name], of_tests[test.test_statistic], of_values[test.value])
        for name, test in tests.items()
    }


class _Intervals:
    """Intervals of all errors over the same bins `(g, K)`; `flips` and `mean` are None without clusters."""

    def __init__(self, cells: BinCells, level: float, flips: SignFlips | None, mean: ClusteredMean | None) -> None:
        self.cells, self.level, self.flips, self.mean = cells, level, flips, mean
        self.computed: dict[str, Any] = {}
        self.z = normal_quantile(level, cells.n)
        self.of_independent_rows = ErrorIntervals(cells, self.z)

    def ends(self, kind: IntervalKind, noise_floor: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return both ends, each `(g)`; `values` are replicates of the error for independent rows, `(R, g)`."""
        cells = self.cells
        error_of_floor = values.std(0, correction=0) / len(values) ** 0.5
        low, high = self.of_independent_rows.ends(kind, noise_floor, error_of_floor)
        if self.flips is None:
            return low, high
        t, (gap_low, gap_high) = self._of_clusters
        if kind == "mean_gap":
            return gap_low, gap_high
        gaps, shares = self._noise
        ends = replicated_interval(kind, cells, noise_floor, gaps, shares, self.level, t / self.z)
        # The union with the interval of independent rows; no error is below the absolute mean gap.
        return low.minimum(ends[0]), torch.stack((high, ends[1], gap_high, -gap_low)).amax(0)

    @once
    def _of_clusters(self) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Quantile of Student's t-distribution, and the interval of the mean gap with it and with widened noise."""
        assert self.mean is not None
        t = self.mean.t_quantile(self.level).squeeze(-1)
        widened = self.cells.with_noise_times(self.mean.design_effect.squeeze(-1).clamp(min=1))
        return t, ErrorIntervals(widened, t).mean_gap

    @once
    def _noise(self) -> tuple[Tensor, Tensor]:
        """Replicates of the noise of clusters; see `SignFlips.noise`."""
        assert self.flips is not None
        gaps, shares = self.flips.noise()
        return gaps.squeeze(-2), shares.squeeze(-2)


def _evidence(
    test: ErrorTest, by_classes: Sequence[Sequence[_Null]], intervals: _Intervals | None, joint: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return noise floor, p-value and both interval ends, each `(g)`, from the nulls of each chunk of classes."""
    # All classes of the null distribution of independent rows and, with clusters, of that of random signs.
    joined = partial(torch.cat, dim=-1)
    nulls = [_Null(*map(joined, zip(*each, strict=True))) for each in zip(*by_classes, strict=True)]
    floors, p_values = zip(*[_noise_floor_and_p_value(null, test.signed, joint) for null in nulls], strict=True)
    noise_floor, p_value = torch.stack(floors).amax(0), torch.stack(p_values).amax(0)
    low = high = torch.full_like(p_value, torch.nan)
    if test.interval is not None and intervals is not None:
        low, high = intervals.ends(test.interval, noise_floor, nulls[0].values.squeeze(-1))
    return noise_floor, p_value, low, high


def _noise_floor_and_p_value(null: _Null, signed: bool, joint: bool) -> tuple[Tensor, Tensor]:
    """Return the noise floor and the p-value of an error averaged over classes, each `(g)`.

    `joint` is True if a replicate simulates the labels of all classes together. Replicates of clusters are also joint,
    because their signs are equal for all classes.
    """
    if signed:  # average before the absolute value: gaps of classes cancel
        p_value, _ = _p_value(null.observed.mean(-1).abs(), null.tested.mean(-1).abs())
        return null.values.mean(-1).abs().mean(0), p_value
    if joint:
        p_value, _ = _p_value(null.observed.mean(-1), null.tested.mean(-1))
        return null.values.mean((0, -1)), p_value
    p_value, tied = _p_value(null.observed, null.tested)
    combined = cauchy_combination(p_value, tied, len(null.tested)) if p_value.shape[-1] > 1 else p_value.squeeze(-1)
    return null.values.mean(-1).mean(0), combined


def _p_value(observed: Tensor, replicates: Tensor) -> tuple[Tensor, Tensor]:
    """Return p-values, and their parts that are due to ties, each `(...)`.

    The p-value is (1 + number of replicates `(R, ...)` at least as large as the data) / (R + 1). For a calibrated model
    the data are an additional replicate. Therefore P(p <= a) <= a for every a. Values that differ only by rounding are
    considered equal. A p-value is NaN if the data or a replicate is NaN.

    Source: Phipson, Smyth: Permutation p-values should never be zero (Statistical Applications in Genetics and
    Molecular Biology, 2010), sec. 4.
    """
    # (b + 1) / (m + 1) for b of m replicates that are at least as extreme (Phipson and Smyth 2010)
    rounding = 1e-9 * observed.abs() + 1e-12  # the constant applies to errors near 0
    at_least = 1 + (replicates >= observed - rounding).sum(0)
    larger = (replicates > observed + rounding).sum(0)
    n = len(replicates) + 1
    unknown = observed.isnan() | replicates.isnan().any(0)
    p_value = (at_least.to(observed.dtype) / n).masked_fill(unknown, torch.nan)
    return p_value, (at_least - larger).to(observed.dtype) / n


def cauchy_combination(p_values: Tensor, tied: Tensor, n_replicates: int) -> Tensor:
    """Combine the dependent p-values on the last axis `(..., C)`, from R = `n_replicates` replicates each.

    Each p-value is transformed to the Cauchy quantile tan((1/2 - p) pi). The mean quantile is transformed back. The
    result is exact for independent continuous p-values, and for equal p-values. Otherwise small results are nearly
    exact.

    A p-value that is large only because of ties has a very negative quantile. A class without outcomes, with p = 1,
    would then dominate the mean. So the quantile of a p-value above 1/2 is averaged over its ties, `tied`: (1 + number
    of replicates equal to the data) / (R + 1). If the result exceeds 1/2, it is computed without this correction. No
    result is below the smallest p-value.

    Source: Liu, Xie: Cauchy combination test (Journal of the American Statistical Association, 2020), eq. 1.
    """
    # Liu, Xie, eq. 1: T = sum_c w_c tan((1/2 - p_c) pi) with equal weights
    least = 0.5 / (n_replicates + 1)  # half a step from 0 and 1, where quantiles are infinite
    low, high = (p_values - tied).clamp(min=least), p_values.clamp(max=1 - least)
    quantile = torch.tan((0.5 - high) * math.pi)
    # The integral of tan((1/2 - x) pi) = cot(pi x) is log(sin(pi x)) / pi.
    over_ties = ((math.pi * high).sin().log() - (math.pi * low).sin().log()) / (math.pi * (high - low))
    mean = torch.where(p_values > 0.5, over_ties, quantile).mean(-1)
    mean = torch.where(mean >= 0, mean, quantile.mean(-1))
    # P(T > t) = 1/2 - arctan(t) / pi of the Cauchy distribution
    return (0.5 - torch.atan(mean) / math.pi).maximum(p_values.amin(-1))
