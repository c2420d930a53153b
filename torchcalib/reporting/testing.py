"""CalibrationTest and intervals of lines.

Calibration errors have a noise floor, a p-value and an interval, which follow from the accumulated statistics of any
number of samples. Other lines have bootstrap intervals.
"""

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
from torchcalib.inference.simulation import RUNS_ON_PATHS
from torchcalib.inference.testing import CalibrationTest, ErrorTest, evidence_of_each
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import ACE, rmsce_from_bins
from torchcalib.metrics.ranked import CORP, KS
from torchcalib.metrics.test_based import TCE
from torchcalib.reporting.data import Line, LineInterval
from torchcalib.reporting.lines import ERRORS, GROUPS, LineEstimator, Statistics, corp_values, key_of, score_estimators

MOST_CELLS = 2**15
"""Number of bins of all classes together up to which binned errors have intervals."""

MOST_EVENTS = 2**18
"""Events (samples, or samples times classes) up to which scores have bootstrap intervals."""

MOST_IN_ORDER = 2**13
"""Events, or runs of them, of all labels together, up to which rank-based lines have evidence and intervals."""

LEVEL, N_REPLICATES, SEED = 0.95, 199, 0
"""Of bootstrap intervals: five replicates lie below the interval, and five above."""

_FEW_REPLICATES = 199
"""With fewer replicates no p-value can be small, and a note is added."""

_MOST_REPLICATES = 1039
"""The smallest p-value is then below 0.001, and 95 % intervals end at order statistics."""


def evidence_of(s: Statistics, *, with_intervals: bool) -> tuple[dict[str, CalibrationTest], tuple[str, ...]]:
    """Return the evidence of every calibration error, by the keys of lines, and notes on omissions.

    Without intervals there is only that of errors over equal-width bins.
    """
    found: dict[str, CalibrationTest] = {}
    notes: list[str] = []
    for mode in s.bins:
        found |= _of_bins(s, mode, with_intervals, notes)
        if with_intervals and mode in s.samples:
            found |= _in_order(s, mode, notes)
    return found, tuple(notes)


def _of_bins(s: Statistics, mode: NamedMode, with_intervals: bool, notes: list[str]) -> dict[str, CalibrationTest]:
    """Return the evidence of errors over equal-width bins, and add notes.

    The ECE always has an interval, unless there are too many bins, because the sentence of a report needs it; but not
    the ECE of an average over exclusive classes. The mean of a signed error over these has no evidence: it is always 0.
    """
    b, average = s.bins[mode], mode == "classwise"
    has_most, over_classes = b.n.numel() > MOST_CELLS, average and s.task == "multiclass"
    tests = {key_of(m): ErrorTest(m.from_bins, signed=m.is_signed) for m in ERRORS}
    tests["rmsce_debiased"] = ErrorTest(partial(rmsce_from_bins, debiased=True), tested_by=rmsce_from_bins)
    tests = {
        name: test._replace(with_interval=not has_most and (with_intervals or (name == "ece" and not over_classes)))
        for name, test in tests.items()
        if not (test.signed and over_classes)
    }
    n_replicates = _replicates(2**19 // b.n.numel(), at_least=39)
    _note_few({"errors over bins": n_replicates}, mode, notes)
    if has_most:
        notes.append(
            f"Errors over bins, {GROUPS[mode]}, have no interval with so many classes or labels; `calibration_test` of "
            "their metrics computes it."
        )
    found = evidence_of_each(tests, b, average=average, n_replicates=n_replicates)
    return {f"{name}/{mode}": evidence for name, evidence in found.items()}


def _in_order(s: Statistics, mode: NamedMode, notes: list[str]) -> dict[str, CalibrationTest]:
    """Return the evidence of rank-based errors, and add notes. Without labels TCE and MCB have none."""
    given: dict[str, Any] = {"task": s.task, "mode": mode}
    if s.task == "multilabel":
        given["num_labels"] = s.num_classes
    metrics: dict[str, CalibrationMetric[Any]] = {"ace": ACE(**given, n_bins=s.n_bins), "ks": KS(**given)}
    if s.has_labels:
        metrics |= {"tce": TCE(**given), "mcb": CORP(**given)}
    sample = s.samples[mode]
    n_series = max([1, *sample.score.shape[:-1]])
    length = int(sample.score.isnan().logical_not().sum(-1).max())  # absent elements must not change the replicates
    n_cells = {name: n_series * (s.n_bins if name == "ace" else min(length, RUNS_ON_PATHS)) for name in metrics}
    drawn = {name: _replicates(2**19 // n, at_least=99) for name, n in n_cells.items() if n <= MOST_IN_ORDER}
    _note_few({name.upper(): n for name, n in drawn.items()}, mode, notes)
    if without := [name.upper() for name in metrics if name not in drawn]:
        notes.append(
            f"There is no noise floor of {listed(without)}, {GROUPS[mode]}, with so many labels; `calibration_test` of "
            "their metrics computes it."
        )
    return {f"{name}/{mode}": metrics[name].test_from(sample, n_replicates=n) for name, n in drawn.items()}


def _note_few(drawn: Mapping[str, int], mode: NamedMode, notes: list[str]) -> None:
    """Add notes on evidence from few replicates, given their numbers."""
    for n in sorted({n for n in drawn.values() if n < _FEW_REPLICATES}):
        what = listed([name for name in drawn if drawn[name] == n])
        notes.append(
            f"Noise floor and p of {what}, {GROUPS[mode]}, are from {n} replicates, so that p is at least "
            f"{1 / (n + 1):.2g}."
        )


def _replicates(affordable: int, at_least: int) -> int:
    """Return the number of replicates."""
    return min(max(affordable, at_least), _MOST_REPLICATES)


def with_evidence(
    lines: Iterable[Line], found: Mapping[str, CalibrationTest], *, with_intervals: bool = True
) -> list[Line]:
    """Return lines with their evidence."""

    def changed(line: Line) -> Line:
        if (evidence := found.get(line.key)) is None:
            return line
        low, high = float(evidence.low), float(evidence.high)
        interval = LineInterval(low, high) if with_intervals and low <= high else None  # NaN if there is no interval
        floor, p_value = float(evidence.noise_floor), float(evidence.p_value)
        return replace(line, noise_floor=floor, p_value=p_value, interval=interval)

    return [changed(line) for line in lines]


_LEFT_OUT = "Bootstrap intervals are left out: {}."


def with_intervals(
    lines: Sequence[Line], p: Predictions | None, why_not: str, ordered: Sequence[NamedMode]
) -> tuple[list[Line], list[str]]:
    """Return lines with bootstrap intervals where these are fast and missing, and notes on omissions.

    Args:
        lines: with their evidence.
        p: predictions; None if there are none.
        why_not: why there are none, a clause.
        ordered: modes with rank-based lines that need labels.
    """
    if p is None:
        return list(lines), [_LEFT_OUT.format(why_not)] if why_not else []
    limits = [(each, MOST_EVENTS) for each in score_estimators(p.task)]
    for r in ordered:
        corp = LineEstimator(r, ExactSample(r), partial(corp_values, mode=r), f"DSC and UNC, {GROUPS[r]}")
        limits.append((corp, MOST_IN_ORDER))
    fast, notes = [], []
    for each, most in limits:
        n_events = each.accumulator.n_events(p)
        if n_events <= most:
            fast.append(each)
            continue
        what = "samples times classes" if n_events > p.samples.numel() else "samples"
        notes.append(
            f"There is no interval of {each.name}, above {most:,} {what}; torchcalib.inference.bootstrap computes it."
        )
    try:
        replicates = _bootstrap(p, fast)
    except (RuntimeError, ValueError) as error:  # memory, or more copies in a replicate than can be counted
        return list(lines), [_LEFT_OUT.format(f"computing them failed with {failure(error)}")]

    def changed(line: Line) -> Line:
        is_missing = line.interval is None and line.key in replicates
        return replace(line, interval=interval_of(line, replicates[line.key])) if is_missing else line

    return [changed(line) for line in lines], notes


@torch.no_grad()
def _bootstrap(p: Predictions, estimators: Sequence[LineEstimator]) -> dict[str, Tensor]:
    """Return the values of all replicates `(R,)`, by the keys of lines."""
    draws = Resampling(p, SEED)
    streams = torch.arange(N_REPLICATES, device=p.given.device)
    found: dict[str, list[Tensor]] = defaultdict(list)
    most = max((each.accumulator.n_events(p) for each in estimators), default=1)
    # All estimators share the draws of a few replicates, so that memory is bounded.
    for some in torch.split(streams, replicates_at_once(most)) if estimators else ():
        replicate = p.resampled(draws.counts(some))
        for each in estimators:
            for key, values in each.values(each.accumulator.of(replicate)).items():
                found[key].append(values)
    return {key: torch.cat(values) for key, values in found.items()}


def interval_of(line: Line, replicates: Tensor) -> LineInterval:
    """Return the percentile interval of a line, given the values of its replicates `(R,)`."""
    interval = Interval(torch.tensor(line.value, dtype=replicates.dtype), replicates.cpu(), LEVEL)
    return LineInterval(float(interval.low), float(interval.high))


def failure(error: Exception) -> str:
    """Return the first line of an error, for a note."""
    return f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
