"""Add noise floors, p-values and intervals to the lines of a report.

The noise floor, p-value and interval of a calibration error are computed from accumulated sums or ranked samples.
Scores have bootstrap intervals, which need all predictions. For the acronyms see `torchcalib.reporting.lines`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from torchcalib.calibration.selection import effective_samples
from torchcalib.core.event_sums import EqualWidthBins
from torchcalib.core.events import NamedMode
from torchcalib.core.predictions import Predictions
from torchcalib.core.ranked import ExactSample
from torchcalib.core.sums import BinStats
from torchcalib.display.words import listed
from torchcalib.functional.binned import equal_width_rows
from torchcalib.inference.resampling import Interval, resampled_rows
from torchcalib.inference.testing import CalibrationTest, run_error_tests
from torchcalib.reporting.catalogue import GROUPS, Catalogue, Member, bins_of, names_of, sample_of, values_of_replicates
from torchcalib.reporting.lines import Data
from torchcalib.results.lines import SELECTIVE_GROUP, Line, LineInterval

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


def run_tests(data: Data, *, with_intervals: bool) -> tuple[dict[str, CalibrationTest], list[str]]:
    """Test all calibration errors; return the results by `Line.key`, and notes on omissions.

    Without intervals, only errors over equal-width bins are tested, because rank-based errors take longer. If
    predictions are stored, the labels of a multi-class task are simulated jointly for class-wise errors.
    """
    found: dict[str, CalibrationTest] = {}
    notes: list[str] = []
    ranked = {}
    if with_intervals and data.weights_are_copies:
        ranked = {mode: _Ranked.from_data(data, mode) for mode in data.samples}
    elif with_intervals and data.samples:  # simulated outcomes of copies would be independent
        names = names_of(each for each in data.catalogue.ranked if each.is_error)
        notes.append(f"Noise floor and p of {names} are omitted: floating weights do not count samples.")
    n_cells = max([b.n.numel() for b in data.bins.values()] + [tests.n_cells for tests in ranked.values()])
    p = data.predictions
    n_rows = 0 if p is None or data.task != "multiclass" or not p.has_labels else p.samples.numel()
    n_rows = 0 if n_rows * _REPLICATES[2] > _MAX_LABELS else n_rows  # p-values of classes are combined instead
    fitting = (r for r in _REPLICATES if r * n_cells <= _MAX_CELLS and r * n_rows <= _MAX_LABELS)
    n_replicates = next(fitting, _REPLICATES[-1])
    for mode in data.bins:
        found |= _test_binned(data, mode, n_replicates, notes)
        if mode in ranked:
            found |= _test_ranked(data, ranked[mode], mode, n_replicates, notes)
    smallest = 1 / (n_replicates + 1)
    if found and n_replicates < _REPLICATES[0]:
        notes.append(
            f"All noise floors and p-values are computed from {n_replicates} replicates, because the data are large. "
            f"The smallest possible p is {smallest:.2g}."
        )
    for mode in data.bins:
        combined = next((t.smallest_p_value for key, t in found.items() if key.endswith(f"/{mode}")), None)
        if combined is not None and combined > max(_LARGE_P, 1.001 * smallest):
            notes.append(
                f"p of {GROUPS[mode]} errors combines the p-values of single classes. If one class is miscalibrated, "
                f"the smallest possible p is {combined:.2g}."
            )
    return found, notes


class _Ranked(NamedTuple):
    """Rank-based errors that are tested, of one mode."""

    over_bins: list[Member]  # tested over bins that do not depend on the outcomes
    over_runs: list[Member]  # tested over runs of consecutive scores, with one simulation for all
    omitted: list[str]  # names of the errors that have too many cells
    max_runs: int  # for each label
    n_cells: int  # largest number of cells of a test, over all labels

    @classmethod
    def from_data(cls, data: Data, mode: NamedMode) -> Self:
        sample = data.samples[mode]
        members = [each for each in data.members if each.is_error and each.statistic == sample_of(mode)]
        members.sort(key=lambda each: each.declaration.needs_labels)
        n_labels = max([1, *sample.score.shape[:-1]])
        # without NaN padding, which depends on batch sizes
        length = int(sample.score.isnan().logical_not().sum(-1).max())
        max_runs = min(length, max(_MIN_RUNS, _MAX_RUNS // n_labels))
        n_cells = {True: n_labels * data.catalogue.n_bins, False: n_labels * max_runs}
        tested = [each for each in members if n_cells[each.has_fixed_bins] <= MAX_RANKED]
        return cls(
            over_bins=[each for each in tested if each.has_fixed_bins],
            over_runs=[each for each in tested if not each.has_fixed_bins],
            omitted=[each.declaration.name for each in members if each not in tested],
            max_runs=max_runs,
            n_cells=max((n_cells[each.has_fixed_bins] for each in tested), default=0),
        )


def _test_binned(data: Data, mode: NamedMode, n_replicates: int, notes: list[str]) -> dict[str, CalibrationTest]:
    name, p = bins_of(mode), data.predictions
    b, average = data.bins[mode], mode == "classwise"
    over_classes = average and data.task == "multiclass"
    clusters = rows = None
    if data.clusters is not None and (clusters := data.clusters.get(name)) is None:
        notes.append(f"Noise floor and p of errors over bins, {GROUPS[mode]}, are omitted for clusters: many classes.")
        return {}
    if over_classes and p is not None and p.has_labels and p.samples.numel() * n_replicates <= _MAX_LABELS:
        rows = equal_width_rows(p, EqualWidthBins("classwise", data.catalogue.n_bins, data.catalogue.right))
    members = [each for each in data.catalogue.members if each.statistic == name]
    tests = {each.key: each.error_test for each in members}
    return run_error_tests(tests, b, clusters=clusters, rows=rows, average=average, n_replicates=n_replicates)


def _test_ranked(
    data: Data, tests: _Ranked, mode: NamedMode, n_replicates: int, notes: list[str]
) -> dict[str, CalibrationTest]:
    sample = data.samples[mode]
    if tests.omitted:
        notes.append(
            f"{listed(tests.omitted)}, {GROUPS[mode]}, have no noise floor and p with so many labels. "
            "Call `calibration_test` with the metric to compute them."
        )
    clusters = None
    if data.clusters is not None and (clusters := data.clusters.get(sample_of(mode))) is None:
        names = [each.declaration.name for each in (*tests.over_bins, *tests.over_runs)]
        notes.append(
            f"{listed(names)}, {GROUPS[mode]}, have no noise floor and p for clusters: they need all predictions."
        )
        return {}
    found = {
        each.key: each.estimator.test_from(sample, clusters=clusters, n_replicates=n_replicates)
        for each in tests.over_bins
    }
    return found | run_error_tests(
        {each.key: each.error_test for each in tests.over_runs},
        sample,
        clusters=clusters,
        average=mode == "classwise",
        max_runs=tests.max_runs,
        n_replicates=n_replicates,
    )


def with_evidence(lines: Iterable[Line], results: Mapping[str, CalibrationTest]) -> list[Line]:
    """Return the lines with the noise floors, p-values and intervals of test results by `Line.key`."""
    # All results are read at once, because each read waits for the device.
    rows = [torch.stack((each.noise_floor, each.p_value, each.low, each.high)) for each in results.values()]
    numbers = dict(zip(results, torch.stack(rows).tolist() if rows else [], strict=True))
    changed = []
    for line in lines:
        if line.key in numbers:
            floor, p_value, low, high = numbers[line.key]
            interval = LineInterval(low, high) if low <= high else None  # the bounds are NaN if there is none
            line = replace(line, noise_floor=floor, p_value=p_value, interval=interval)
        changed.append(line)
    return changed


_OMITTED = "Bootstrap intervals are omitted: {}."
MIN_EVENTS = 10.0  # with fewer, 95% intervals of NLL cover less than 93%; see `benchmarks.interval_targets`


def why_few_events(p: Predictions, bins: BinStats, effect: float) -> str:
    """Return the reason to omit bootstrap intervals of scores as a clause: few events or complements.

    A bootstrap sample contains no outcome that did not occur. Intervals are therefore too narrow if the mean score
    depends on rare outcomes. `effect` is the design effect of clusters.
    """
    total, expected, observed = (float(bins.sums[..., row, :].sum()) for row in range(3))
    share = max(min(x, total - x) for x in (expected, observed)) / max(total, 1e-300)
    n = total if p.copies else effective_samples(p) * p.samples[:-1].numel()  # of all labels
    n_events = share * n / max(1.0, effect)
    return "" if n_events >= MIN_EVENTS else f"they are too narrow for fewer than {MIN_EVENTS:g} events"


def with_intervals(lines: Sequence[Line], data: Data, why_not: str) -> tuple[list[Line], list[str]]:
    """Add bootstrap intervals to lines that are not calibration errors; return the lines, and notes on omissions.

    `why_not` is a reason to omit all intervals, as a clause; empty for none.
    """
    p = data.predictions
    if p is None or why_not:
        return list(lines), [_OMITTED.format(why_not)] if why_not else []
    fast: list[Member] = []
    notes = []
    sharing: dict[tuple[str, str], list[Member]] = defaultdict(list)
    for member in data.members:
        if not member.is_error:
            sharing[member.group, member.statistic].append(member)
    named = {}
    for (group, _), members in sharing.items():
        name = f"{listed([each.declaration.name for each in members])}, {group}"
        if members[0].mode is None:
            name = f"metrics of {group}" if group == SELECTIVE_GROUP else members[0].declaration.name
        named[name] = members
    for name, members in named.items():
        accumulator = data.catalogue.accumulators[members[0].statistic]
        n_events, limit = accumulator.n_events(p), MAX_RANKED if isinstance(accumulator, ExactSample) else MAX_EVENTS
        if n_events <= limit:
            fast += members
            continue
        unit = "samples times classes" if n_events > p.samples.numel() else "samples"
        notes.append(
            f"The interval of {name} is omitted above {limit:,} {unit}. "
            "Call torchcalib.inference.bootstrap to compute it."
        )
    try:
        replicates, n_clusters = _bootstrap(p, data.catalogue, fast)
    except (RuntimeError, ValueError) as error:  # out of memory, or integer overflow of counts
        return list(lines), [_OMITTED.format(f"the bootstrap failed with {failure(error)}")]

    changed, undefined = [], []
    for line in lines:
        if line.key in replicates:
            line = replace(line, interval=interval_of(line, replicates[line.key], n_clusters))
            if line.interval is None and not math.isnan(line.value):
                undefined.append(line.name)
        changed.append(line)
    if undefined:
        why = "the value of some replicates is undefined" if n_clusters is None else "there are too few clusters"
        notes.append(f"Intervals of {listed(undefined)} are omitted: {why}.")
    return changed, notes


@torch.no_grad()
def _bootstrap(
    p: Predictions, catalogue: Catalogue, members: Sequence[Member]
) -> tuple[dict[str, Tensor], float | None]:
    """Return each metric in R bootstrap replicates `(R,)` by `Line.key`, and the effective number of clusters."""
    weights, n_clusters = resampled_rows(p, SEED, None if p.groups is None else p.groups.reshape(-1))
    accumulators = {each.statistic: catalogue.accumulators[each.statistic] for each in members}
    n_events = max((accumulator.n_events(p) for accumulator in accumulators.values()), default=1)

    def replicates() -> Iterator[dict[str, Any]]:
        # The weights of a chunk of replicates are computed once for all statistics. The chunk size bounds the memory.
        for counts in weights.chunks(N_REPLICATES, n_events) if members else ():
            replicate = p.resampled(counts)
            yield {name: accumulator.from_predictions(replicate) for name, accumulator in accumulators.items()}

    return values_of_replicates(members, replicates()), n_clusters


def interval_of(line: Line, replicates: Tensor, n_clusters: float | None = None) -> LineInterval | None:
    """Return the bootstrap interval of a line, without its bias, from its replicates `(R,)`; None if undefined."""
    interval = Interval(torch.tensor(line.value, dtype=replicates.dtype, device="cpu"), replicates, LEVEL, n_clusters)
    low, high = (float(end) for end in interval.without_bias)
    # Without the bias, the ends may be outside the range of the metric.
    low = max(low, 0.0) if bool((replicates >= 0).all()) else low
    high = min(high, 1.0) if line.perfect == 1 else high
    # A bound is NaN or infinite for empty replicates and infinite values.
    return LineInterval(low, high) if math.isfinite(low) and math.isfinite(high) else None


def failure(error: Exception) -> str:
    """Return the type of an error and the first line of its message, without the final full stop."""
    return f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
