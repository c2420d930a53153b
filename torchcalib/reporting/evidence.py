"""Noise floors, p-values and intervals of calibration errors, from accumulated statistics of any number of samples."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torchcalib.core.events import NamedReduction
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats
from torchcalib.inference.evidence import ErrorTest, Evidence, evidence_of_each
from torchcalib.inference.simulation import RUNS_ON_PATHS
from torchcalib.inference.words import listed
from torchcalib.metrics.binned import ACE, BinnedMetric, rmsce_from_bins
from torchcalib.metrics.ranked import CORP, KS, RankedMetric
from torchcalib.metrics.test_based import TCE
from torchcalib.reporting.data import Line, LineInterval
from torchcalib.reporting.lines import ERRORS, GROUPS, Statistics

MOST_CELLS = 2**15
"""Number of bins of all classes together up to which binned errors have intervals."""

MOST_IN_ORDER = 2**13
"""Number of runs of ranked samples, of all labels together, up to which rank-based errors have evidence."""

_FEW_REPLICATES = 199
"""With fewer replicates no p-value can be small, and a note is added."""

_MOST_REPLICATES = 1039
"""The smallest p-value is then below 0.001, and 95 % intervals end at order statistics."""


Found = tuple[dict[str, Evidence], tuple[str, ...]]
"""Evidence by the keys of lines, and notes on omissions."""


def evidence_of(s: Statistics, *, with_intervals: bool) -> Found:
    """Return the evidence of every calibration error, by the keys of lines, and notes on omissions.

    Without intervals there is only that of errors over equal-width bins.
    """
    given: dict[str, Any] = {"task": s.task}
    if s.task == "multilabel":
        given["num_labels"] = s.num_classes
    evidence: dict[str, Evidence] = {}
    notes: tuple[str, ...] = ()
    for reduction, bins in s.bins.items():
        exclusive = s.task == "multiclass"
        found = [evidence_of_bins(bins, reduction, with_intervals=with_intervals, exclusive=exclusive)]
        if with_intervals and reduction in s.samples:
            found.append(evidence_in_order(s.samples[reduction], s.has_labels, reduction, s.n_bins, given))
        for of_lines, of_omissions in found:
            evidence |= of_lines
            notes += of_omissions
    return evidence, notes


def evidence_of_bins(b: BinStats, reduction: NamedReduction, *, with_intervals: bool, exclusive: bool) -> Found:
    """Return the evidence of errors over equal-width bins, by the keys of lines, and notes on omissions.

    The ECE always has an interval, unless there are too many bins, because the sentence of a report needs it; but not
    the ECE of an average over exclusive classes. The mean of a signed error over these has no evidence: it is always 0.

    Args:
        b: with sums of noise, `(F, B)`, or `(C, F, B)` for classes or labels.
        reduction: the kind of confidence.
        with_intervals: whether the other errors have intervals.
        exclusive: whether classes exclude each other, unlike labels.
    """
    has_most = b.n.numel() > MOST_CELLS
    averaged = reduction == "classwise"
    over_classes = averaged and exclusive
    metrics = [metric for metric in ERRORS if not (metric.is_signed and over_classes)]
    readings = {m.__name__.lower(): ErrorTest(m.from_bins, signed=m.is_signed) for m in metrics}
    readings["rmsce_debiased"] = ErrorTest(partial(rmsce_from_bins, debiased=True), tested_by=rmsce_from_bins)
    readings = {
        name: reading._replace(with_interval=not has_most and (with_intervals or (name == "ece" and not over_classes)))
        for name, reading in readings.items()
    }
    n_replicates = _replicates(2**19 // b.n.numel(), at_least=39)
    found = evidence_of_each(readings, b, average=averaged, n_replicates=n_replicates)
    notes = _of_few({"errors over bins": n_replicates}, reduction)
    if has_most:
        notes += (
            f"Errors over bins, {GROUPS[reduction]}, have no interval with so many classes or labels; `evidence` of "
            "their metrics computes it.",
        )
    return {f"{name}/{reduction}": evidence for name, evidence in found.items()}, notes


def evidence_in_order(
    sample: RankedSample, has_labels: bool, reduction: NamedReduction, n_bins: int, given: Mapping[str, Any]
) -> Found:
    """Return the evidence of rank-based errors, by the keys of lines, and notes on omissions.

    Args:
        sample: `(N,)`, or `(L, N)` for labels.
        has_labels: whether outcomes are labels; if not, TCE and MCB are left out.
        reduction: the kind of confidence.
        n_bins: of the ACE.
        given: arguments of metrics: the task, and the number of labels.
    """
    metrics: dict[str, BinnedMetric | RankedMetric] = {
        "ace": ACE(**given, reduction=reduction, n_bins=n_bins),
        "ks": KS(**given, reduction=reduction),
    }
    if has_labels:
        metrics |= {"tce": TCE(**given, reduction=reduction), "mcb": CORP(**given, reduction=reduction)}
    series = sample.score.shape[:-1]
    length = int(sample.score.isnan().logical_not().sum(-1).max())  # absent elements must not change the replicates
    found, without, drawn = {}, [], {}
    for name, metric in metrics.items():
        n_cells = max([1, *series]) * (n_bins if name == "ace" else min(length, RUNS_ON_PATHS))
        if n_cells > MOST_IN_ORDER:
            without.append(name.upper())
        else:
            drawn[name.upper()] = n_replicates = _replicates(2**19 // n_cells, at_least=99)
            found[f"{name}/{reduction}"] = metric.evidence_from(sample, n_replicates=n_replicates)
    if not without:
        return found, _of_few(drawn, reduction)
    return found, (
        *_of_few(drawn, reduction),
        f"There is no noise floor of {listed(without)}, {GROUPS[reduction]}, with so many labels; `evidence` of their "
        "metrics computes it.",
    )


def _of_few(drawn: Mapping[str, int], reduction: NamedReduction) -> tuple[str, ...]:
    """Return notes on evidence from few replicates."""
    few = sorted({n for n in drawn.values() if n < _FEW_REPLICATES})
    names = [listed([what for what in drawn if drawn[what] == n]) for n in few]
    return tuple(
        f"Noise floor and p of {what}, {GROUPS[reduction]}, are from {n} replicates, so that p is at least "
        f"{1 / (n + 1):.2g}."
        for what, n in zip(names, few, strict=True)
    )


def _replicates(affordable: int, at_least: int) -> int:
    """Return the number of replicates."""
    return min(max(affordable, at_least), _MOST_REPLICATES)


def with_evidence(lines: Iterable[Line], found: Mapping[str, Evidence], *, with_intervals: bool = True) -> list[Line]:
    """Return lines with their evidence."""
    return [_with(line, found[line.key], with_intervals) if line.key in found else line for line in lines]


def _with(line: Line, evidence: Evidence, with_interval: bool) -> Line:
    floor, p_value, low, high = (
        float(x) for x in (evidence.noise_floor, evidence.p_value, evidence.low, evidence.high)
    )
    interval = LineInterval(low, high) if with_interval and low <= high else None  # NaN if there is no interval
    return replace(line, noise_floor=floor, p_value=p_value, interval=interval)
