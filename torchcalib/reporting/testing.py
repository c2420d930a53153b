"""Add noise floors, p-values and intervals to the lines of a report.

The noise floor, p-value and interval of a calibration error are computed from accumulated sums or ranked samples.
Scores have bootstrap intervals, which need all predictions. For the acronyms see `torchcalib.reporting.lines`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchcalib.core.events import NamedMode
from torchcalib.core.predictions import Predictions, replicates_at_once
from torchcalib.core.ranked import ExactSample
from torchcalib.core.words import listed
from torchcalib.inference.resampling import Interval, Resampling
from torchcalib.inference.simulation import MAX_RUNS
from torchcalib.inference.testing import CalibrationTest, ErrorTest, run_error_tests
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import ACE, rmsce_from_bins
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

_FEW_REPLICATES = 199
"""With fewer replicates the smallest possible p-value exceeds 0.005, and a note is added."""

_MAX_REPLICATES = 1039
"""Maximum number of simulated replicates. It allows p-values below 0.001, and 0.025 (R + 1) is a whole number."""


def run_tests(s: Statistics, *, with_intervals: bool) -> tuple[dict[str, CalibrationTest], tuple[str, ...]]:
    """Test all calibration errors; return the results by `Line.key`, and notes on omissions.

    Without intervals, only errors over equal-width bins are tested, because rank-based errors take longer.
    """
    found: dict[str, CalibrationTest] = {}
    notes: list[str] = []
    for mode in s.bins:
        found |= _test_binned(s, mode, notes)
        if with_intervals and mode in s.samples:
            found |= _test_ranked(s, mode, notes)
    return found, tuple(notes)


def _test_binned(s: Statistics, mode: NamedMode, notes: list[str]) -> dict[str, CalibrationTest]:
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
    debiased = partial(rmsce_from_bins, debiased=True)
    tests["rmsce_debiased"] = ErrorTest(debiased, test_formula=rmsce_from_bins, interval="debiased")
    n_replicates = _replicates(2**19 // b.n.numel(), at_least=39)
    _note_few({"errors over bins": n_replicates}, mode, notes)
    clusters = None
    if s.clusters is not None and (clusters := s.clusters.get(cluster_sums_name(mode))) is None:
        notes.append(f"Noise floor and p of errors over bins, {GROUPS[mode]}, are omitted for clusters: many classes.")
        return {}
    found = run_error_tests(tests, b, clusters=clusters, average=average, n_replicates=n_replicates)
    return {f"{name}/{mode}": evidence for name, evidence in found.items()}


def _test_ranked(s: Statistics, mode: NamedMode, notes: list[str]) -> dict[str, CalibrationTest]:
    """Test the rank-based errors for one mode, and append to `notes`. TCE and MCB need labels as targets."""
    options: dict[str, Any] = {"task": s.task, "mode": mode}
    if s.task == "multilabel":
        options["num_labels"] = s.num_classes
    over_runs: dict[str, RankedMetric] = {"ks": KS(**options), "atb": ATB(**options)}
    metrics: dict[str, CalibrationMetric[Any]] = {"ace": ACE(**options, n_bins=s.n_bins), **over_runs}
    if s.has_labels:
        over_runs["mcb"] = CORP(**options)
        metrics |= {"tce": TCE(**options), "mcb": over_runs["mcb"]}
    sample = s.samples[mode]
    n_labels = max([1, *sample.score.shape[:-1]])
    length = int(sample.score.isnan().logical_not().sum(-1).max())  # without NaN padding, which depends on batch sizes
    n_cells = {name: n_labels * (s.n_bins if name == "ace" else min(length, MAX_RUNS)) for name in metrics}
    n_replicates = {name: _replicates(2**19 // n, at_least=99) for name, n in n_cells.items() if n <= MAX_RANKED}
    _note_few({name.upper(): n for name, n in n_replicates.items()}, mode, notes)
    if omitted := [name.upper() for name in metrics if name not in n_replicates]:
        notes.append(
            f"{listed(omitted)}, {GROUPS[mode]}, have no noise floor and p with so many labels. "
            "Call `calibration_test` with the metric to compute them."
        )
    clusters = None
    if s.clusters is not None and (clusters := s.clusters.get(sample_name(mode))) is None:
        notes.append(
            f"{listed([name.upper() for name in metrics])}, {GROUPS[mode]}, have no noise floor and p for clusters: "
            "they need all predictions."
        )
        return {}
    found = {
        name: metrics[name].test_from(sample, clusters=clusters, n_replicates=n)
        for name, n in n_replicates.items()
        if name not in over_runs
    }
    if "ks" in n_replicates:  # one simulation for all, which takes most of the time
        tests = {name: metric.error_test() for name, metric in over_runs.items()}
        average = over_runs["ks"].estimator.averages
        found |= run_error_tests(tests, sample, clusters=clusters, average=average, n_replicates=n_replicates["ks"])
    return {f"{name}/{mode}": test for name, test in found.items()}


def _note_few(n_replicates: Mapping[str, int], mode: NamedMode, notes: list[str]) -> None:
    """Append a note for each number of replicates below `_FEW_REPLICATES`, with the metrics concerned."""
    for n in sorted({n for n in n_replicates.values() if n < _FEW_REPLICATES}):
        names = listed([name for name in n_replicates if n_replicates[name] == n])
        notes.append(
            f"Noise floor and p of {names}, {GROUPS[mode]}, are computed from {n} replicates. The smallest possible p "
            f"is {1 / (n + 1):.2g}."
        )


def _replicates(affordable: int, at_least: int) -> int:
    return min(max(affordable, at_least), _MAX_REPLICATES)


def with_evidence(
    lines: Iterable[Line], results: Mapping[str, CalibrationTest], *, with_intervals: bool = True
) -> list[Line]:
    """Return the lines with the noise floors, p-values and, optionally, intervals of test results by `Line.key`."""

    def changed(line: Line) -> Line:
        if (evidence := results.get(line.key)) is None:
            return line
        low, high = float(evidence.low), float(evidence.high)
        # The bounds are NaN if there is no interval.
        interval = LineInterval(low, high) if with_intervals and low <= high else None
        floor, p_value = float(evidence.noise_floor), float(evidence.p_value)
        return replace(line, noise_floor=floor, p_value=p_value, interval=interval)

    return [changed(line) for line in lines]


_OMITTED = "Bootstrap intervals are omitted: {}."


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

    None if a bound is NaN; see `none_if_nan`. For `n_clusters` see `Interval`.
    """
    interval = Interval(torch.tensor(line.value, dtype=replicates.dtype), replicates.cpu(), LEVEL, n_clusters)
    low, high = (float(end) for end in interval.without_bias)
    # Without the bias, the ends may be outside the range of the metric.
    low = max(low, 0.0) if bool((replicates >= 0).all()) else low
    high = min(high, 1.0) if line.perfect == 1 else high
    return none_if_nan(LineInterval(low, high))


def none_if_nan(interval: LineInterval) -> LineInterval | None:
    """Return the interval, or None if a bound is NaN (empty replicates or infinite values)."""
    return None if math.isnan(interval.low) or math.isnan(interval.high) else interval


def failure(error: Exception) -> str:
    """Return the type of an error and the first line of its message, without the final full stop."""
    return f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
