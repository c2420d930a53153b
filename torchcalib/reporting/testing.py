"""Add noise floors, p-values and intervals to the lines of a report.

The noise floor, p-value and interval of a calibration error are computed from accumulated sums or ranked samples.
Scores have bootstrap intervals, which need all predictions. For the acronyms see `torchcalib.reporting.lines`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchcalib.calibration.row_scores import effective_samples
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sums import BinStats
from torchcalib.core.words import listed
from torchcalib.inference.resampling import Interval, Resampling
from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_tests
from torchcalib.metrics.binned import ACE, ece_from_bins, equal_width_rows, rmsce_from_bins
from torchcalib.metrics.ranked import CORP, KS, RankedMetric
from torchcalib.metrics.test_based import TCE
from torchcalib.metrics.truthful import ATB
from torchcalib.reporting.contents import SELECTIVE_GROUP
from torchcalib.reporting.lines import (
    ERRORS,
    GROUPS,
    LineEstimator,
    Statistics,
    cluster_sums_name,
    corp_values,
    key_of,
    sample_name,
    score_estimators,
    selective_values,
)
from torchcalib.reporting.results import Line, LineInterval

MAX_EVENTS = 2**18
"""Maximum number of events (samples, or samples times classes) for bootstrap intervals of scores."""

MAX_RANKED = 2**13
"""Maximum number of events, summed over labels, for tests of rank-based errors.

Tests of large samples count runs of neighbouring scores instead of events.
"""

LEVEL, N_REPLICATES, SEED = 0.95, 199, 0
"""Options of bootstrap intervals. At this level, 4 of 199 replicates lie below the interval and 4 above."""

_REPLICATES = (999, 399, 199, 99)
"""Numbers of simulated replicates, the same for all p-values of a report: the first that does not need too much time.

0.025 (R + 1) is a whole number for all but the last one.
"""

_MAX_CELLS = 2**20  # bins or runs times replicates
_MAX_LABELS = 2**22  # rows times replicates, for class-wise averages
_MAX_RUNS = 256  # runs of a sample, over all labels; more would not change the power
_MIN_RUNS = 64  # for each label
_LARGE_P = 0.005  # a note is added if the smallest possible p-value is larger


def run_tests(
    s: Statistics, p: Predictions | None, *, with_intervals: bool
) -> tuple[dict[str, CalibrationTest], tuple[str, ...]]:
    """Test all calibration errors; return the results by `Line.key`, and notes on omissions.

    Without intervals, only errors over equal-width bins are tested, because rank-based errors take longer. With
    predictions `p`, the labels of a multi-class task are simulated jointly for class-wise errors.
    """
    found: dict[str, CalibrationTest] = {}
    notes: list[str] = []
    ranked = {mode: _RankedTests.of(s, mode) for mode in s.samples} if with_intervals else {}
    n_replicates = _number_of_replicates(s, p, ranked)
    for mode in s.bins:
        found |= _test_binned(s, p, mode, n_replicates, notes)
        if mode in ranked:
            found |= _test_ranked(s, ranked[mode], mode, n_replicates, notes)
    smallest = 1 / (n_replicates + 1)
    if found and n_replicates < _REPLICATES[0]:
        notes.append(
            f"All noise floors and p-values are computed from {n_replicates} replicates, because the data are large. "
            f"The smallest possible p is {smallest:.2g}."
        )
    for mode in s.bins:
        combined = next((t.smallest_p_value for key, t in found.items() if key.endswith(f"/{mode}")), None)
        if combined is not None and combined > max(_LARGE_P, 1.001 * smallest):
            notes.append(
                f"p of {GROUPS[mode]} errors combines the p-values of single classes. If one class is miscalibrated, "
                f"the smallest possible p is {combined:.2g}."
            )
    return found, tuple(notes)


def _number_of_replicates(s: Statistics, p: Predictions | None, ranked: Mapping[NamedMode, "_RankedTests"]) -> int:
    """Return the number of replicates of all tests of a report."""
    n_cells = max([b.n.numel() for b in s.bins.values()] + [tests.n_cells for tests in ranked.values()])
    n_rows = 0 if p is None or s.task != "multiclass" or not p.hard else p.samples.numel()
    n_rows = 0 if n_rows * _REPLICATES[2] > _MAX_LABELS else n_rows  # p-values of classes are combined instead
    fitting = (r for r in _REPLICATES if r * n_cells <= _MAX_CELLS and r * n_rows <= _MAX_LABELS)
    return next(fitting, _REPLICATES[-1])


def _test_binned(
    s: Statistics, p: Predictions | None, mode: NamedMode, n_replicates: int, notes: list[str]
) -> dict[str, CalibrationTest]:
    """Test the errors over equal-width bins for one mode, and append to `notes`.

    The signed error of exclusive classes is always 0, and not tested.
    """
    b, average = s.bins[mode], mode == "classwise"
    over_classes = average and s.task == "multiclass"
    tests = {
        key_of(metric): ErrorTest(metric.from_bins, signed=metric.is_signed, interval=metric.interval_kind)
        for metric in ERRORS
        if not (metric.is_signed and over_classes)
    }
    tests["ece_debiased"] = ErrorTest(partial(ece_from_bins, debiased=True), test_formula=ece_from_bins)
    debiased = partial(rmsce_from_bins, debiased=True)
    tests["rmsce_debiased"] = ErrorTest(debiased, test_formula=rmsce_from_bins, interval="debiased")
    clusters = rows = None
    if s.clusters is not None and (clusters := s.clusters.get(cluster_sums_name(mode))) is None:
        notes.append(f"Noise floor and p of errors over bins, {GROUPS[mode]}, are omitted for clusters: many classes.")
        return {}
    if over_classes and p is not None and p.hard and p.samples.numel() * n_replicates <= _MAX_LABELS:
        rows = equal_width_rows(p, EqualWidthBins("classwise", b.n.shape[-1], s.right))
    found = run_error_tests(tests, b, clusters=clusters, rows=rows, average=average, n_replicates=n_replicates)
    return {f"{name}/{mode}": evidence for name, evidence in found.items()}


class _RankedTests(NamedTuple):
    """Metrics of a ranked sample whose errors are tested, and their number of cells, summed over labels."""

    ace: ACE | None
    over_runs: dict[str, RankedMetric | TCE]
    omitted: tuple[str, ...]
    max_runs: int  # for each label
    n_cells: int

    @classmethod
    def of(cls, s: Statistics, mode: NamedMode) -> Self:
        """Choose the metrics for a mode. TCE and MCB need labels as targets."""
        options: dict[str, Any] = {"task": s.task, "mode": mode}
        if s.task == "multilabel":
            options["num_labels"] = s.num_classes
        over_runs: dict[str, RankedMetric | TCE] = {"ks": KS(**options), "atb": ATB(**options)}
        if s.has_labels:
            over_runs |= {"tce": TCE(**options), "mcb": CORP(**options)}
        sample = s.samples[mode]
        n_labels = max([1, *sample.score.shape[:-1]])
        # without NaN padding, which depends on batch sizes
        length = int(sample.score.isnan().logical_not().sum(-1).max())
        max_runs = min(length, max(_MIN_RUNS, _MAX_RUNS // n_labels))
        n_cells = {"ace": n_labels * s.n_bins, "runs": n_labels * max_runs}
        tested = {name: n for name, n in n_cells.items() if n <= MAX_RANKED}
        omitted = [*(["ace"] if "ace" not in tested else []), *(over_runs if "runs" not in tested else [])]
        return cls(
            ACE(**options, n_bins=s.n_bins) if "ace" in tested else None,
            over_runs if "runs" in tested else {},
            tuple(name.upper() for name in omitted),
            max_runs,
            max(tested.values(), default=0),
        )


def _test_ranked(
    s: Statistics, tests: _RankedTests, mode: NamedMode, n_replicates: int, notes: list[str]
) -> dict[str, CalibrationTest]:
    """Test the rank-based errors for one mode, and append to `notes`. One simulation serves all errors over runs."""
    sample = s.samples[mode]
    if tests.omitted:
        notes.append(
            f"{listed(tests.omitted)}, {GROUPS[mode]}, have no noise floor and p with so many labels. "
            "Call `calibration_test` with the metric to compute them."
        )
    clusters = None
    names = [*(["ace"] if tests.ace is not None else []), *tests.over_runs]
    if s.clusters is not None and (clusters := s.clusters.get(sample_name(mode))) is None:
        notes.append(
            f"{listed([name.upper() for name in names])}, {GROUPS[mode]}, have no noise floor and p for clusters: "
            "they need all predictions."
        )
        return {}
    found: dict[str, CalibrationTest] = {}
    if tests.ace is not None:
        found["ace"] = tests.ace.test_from(sample, clusters=clusters, n_replicates=n_replicates)
    if tests.over_runs:
        found |= run_error_tests(
            {name: metric.error_test() for name, metric in tests.over_runs.items()},
            sample,
            clusters=clusters,
            average=mode == "classwise",
            max_runs=tests.max_runs,
            n_replicates=n_replicates,
        )
    return {f"{name}/{mode}": found[name] for name in names}


def with_evidence(
    lines: Iterable[Line], results: Mapping[str, CalibrationTest], *, with_intervals: bool = True
) -> list[Line]:
    """Return the lines with the noise floors, p-values and, optionally, intervals of test results by `Line.key`."""
    # All results are read at once, because each read waits for the device.
    rows = [torch.stack((each.low, each.high, each.noise_floor, each.p_value)) for each in results.values()]
    numbers = dict(zip(results, torch.stack(rows).tolist() if rows else [], strict=True))

    def changed(line: Line) -> Line:
        if line.key not in numbers:
            return line
        low, high, floor, p_value = numbers[line.key]
        # The bounds are NaN if there is no interval.
        interval = LineInterval(low, high) if with_intervals and low <= high else None
        return replace(line, noise_floor=floor, p_value=p_value, interval=interval)

    return [changed(line) for line in lines]


_OMITTED = "Bootstrap intervals are omitted: {}."
MIN_EVENTS = 10.0  # with fewer, 95% intervals of NLL cover less than 93%; see `benchmarks.interval_targets`


def why_few_events(p: Predictions, bins: BinStats, effect: float) -> str:
    """Return the reason to omit bootstrap intervals of scores as a clause: few events or complements.

    A bootstrap sample contains no outcome that did not occur. Intervals are therefore too narrow if the mean score
    depends on rare outcomes.

    Args:
        p: predictions.
        bins: bins of the main mode.
        effect: design effect of clusters.
    """
    total, expected, observed = (float(bins.sums[..., row, :].sum()) for row in range(3))
    share = max(min(x, total - x) for x in (expected, observed)) / max(total, 1e-300)
    n = total if p.copies else effective_samples(p) * p.samples[:-1].numel()  # of all labels
    n_events = share * n / max(1.0, effect)
    return "" if n_events >= MIN_EVENTS else f"they are too narrow for fewer than {MIN_EVENTS:g} events"


def with_intervals(
    lines: Sequence[Line],
    p: Predictions | None,
    why_not: str,
    decomposed: Sequence[NamedMode],
    selective: NamedMode | None,
) -> tuple[list[Line], list[str]]:
    """Add bootstrap intervals to lines without an interval; return the lines, and notes on omitted intervals.

    Args:
        lines: lines with the results of `run_tests`.
        p: predictions; None if they are not available.
        why_not: reason why the predictions are not available, as a clause.
        decomposed: modes with a decomposition of the Brier score into miscalibration, discrimination and uncertainty.
        selective: mode of the metrics of selective prediction; None if they are omitted.
    """
    if p is None:
        return list(lines), [_OMITTED.format(why_not)] if why_not else []
    limits = [(estimator, MAX_EVENTS) for estimator in score_estimators(p.task)]
    for mode in decomposed:
        corp = LineEstimator(mode, ExactSample(mode), partial(corp_values, mode=mode), f"DSC and UNC, {GROUPS[mode]}")
        limits.append((corp, MAX_RANKED))
    if selective is not None:
        values = partial(selective_values, mode=selective)
        name = f"metrics of {SELECTIVE_GROUP}"
        limits.append((LineEstimator(selective, ExactSample(selective), values, name), MAX_RANKED))
    fast, notes = [], []
    for estimator, limit in limits:
        n_events = estimator.accumulator.n_events(p)
        if n_events <= limit:
            fast.append(estimator)
            continue
        unit = "samples times classes" if n_events > p.samples.numel() else "samples"
        notes.append(
            f"The interval of {estimator.name} is omitted above {limit:,} {unit}. "
            "Call torchcalib.inference.bootstrap to compute it."
        )
    try:
        replicates, n_clusters = _bootstrap(p, fast)
    except (RuntimeError, ValueError) as error:  # out of memory, or integer overflow of counts
        return list(lines), [_OMITTED.format(f"the bootstrap failed with {failure(error)}")]

    changed, undefined = [], []
    for line in lines:
        # MCB is a calibration error, for which no interval is computed, as for KS and TCE.
        if line.interval is None and line.key in replicates and not line.key.startswith("mcb/"):
            line = replace(line, interval=interval_of(line, replicates[line.key], n_clusters))
            if line.interval is None and not math.isnan(line.value):
                undefined.append(line.name)
        changed.append(line)
    if undefined:
        why = "the value of some replicates is undefined" if n_clusters is None else "there are too few clusters"
        notes.append(f"Intervals of {listed(undefined)} are omitted: {why}.")
    return changed, notes


@torch.no_grad()
def _bootstrap(p: Predictions, estimators: Sequence[LineEstimator]) -> tuple[dict[str, Tensor], float | None]:
    """Return each line in R bootstrap replicates `(R,)` by `Line.key`, and `Resampling.n_clusters`."""
    draws = Resampling(p, SEED, None if p.groups is None else p.groups.reshape(-1))
    streams = torch.arange(N_REPLICATES, device=p.given.device)
    found: dict[str, list[Tensor]] = defaultdict(list)
    n_events = max((estimator.accumulator.n_events(p) for estimator in estimators), default=1)
    # The weights of a chunk of replicates are computed once for all estimators. The chunk size bounds the memory.
    for chunk in torch.split(streams, replicates_at_once(n_events)) if estimators else ():
        replicate = p.resampled(draws.counts(chunk))
        for estimator in estimators:
            for key, values in estimator.values(estimator.accumulator.of(replicate)).items():
                found[key].append(values)
    return {key: torch.cat(values) for key, values in found.items()}, draws.n_clusters


def interval_of(line: Line, replicates: Tensor, n_clusters: float | None = None) -> LineInterval | None:
    """Return the bootstrap interval of a line, without its bias, from its values in R replicates `(R,)`.

    None if a bound is not finite; see `none_if_undefined`. For `n_clusters` see `Interval`.
    """
    replicates = replicates.cpu()
    interval = Interval(torch.tensor(line.value, dtype=replicates.dtype), replicates, LEVEL, n_clusters)
    low, high = (float(end) for end in interval.without_bias)
    # Without the bias, the ends may be outside the range of the metric.
    low = max(low, 0.0) if bool((replicates >= 0).all()) else low
    high = min(high, 1.0) if line.perfect == 1 else high
    return none_if_undefined(LineInterval(low, high))


def none_if_undefined(interval: LineInterval) -> LineInterval | None:
    """Return the interval, or None if a bound is NaN or infinite (empty replicates or infinite values)."""
    return interval if math.isfinite(interval.low) and math.isfinite(interval.high) else None


def failure(error: Exception) -> str:
    """Return the type of an error and the first line of its message, without the final full stop."""
    return f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
