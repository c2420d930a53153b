"""Compute a `Report` from the statistics of all predictions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchcalib.core.mistakes import MIN_ROWS
from torchcalib.core.predictions import Predictions
from torchcalib.core.sums import BinStats
from torchcalib.inference.clusters import FEW_CLUSTERS
from torchcalib.inference.testing import CalibrationTest, clusters_in_words
from torchcalib.io.errors import quoted
from torchcalib.reporting.calibration import calibration_stage
from torchcalib.reporting.classes import class_lines, class_tests
from torchcalib.reporting.confidences import report_of_confidences
from torchcalib.reporting.diagnosis import evidence_of
from torchcalib.reporting.findings import Findings, Gaps, Labels, decide
from torchcalib.reporting.groups import GroupBins
from torchcalib.reporting.lines import Statistics
from torchcalib.reporting.testing import run_tests, why_few_events, with_evidence, with_intervals
from torchcalib.results.lines import SELECTIVE_GROUP
from torchcalib.results.report import Report


@dataclass(frozen=True, eq=False)
class Collected:
    """Input of `report_of`.

    Attributes:
        statistics: sums and ranked samples of all predictions.
        predictions: all predictions; None if they were not stored, because there are many, or need too much memory.
        why_not: reason why `predictions` is None, as a clause.
        has_ranked_samples: whether ranked samples were collected, because all weights are whole numbers.
        resolution: cells per unit of log-odds if ranked samples are sketches; None if they are exact.
        groups: sums of each group; None without groups.
        has_several_samples_per_item: whether an item has several samples, such as pixels, without clusters.
        n_dropped: number of rows excluded by nan_policy='drop'.
        class_names: names of the classes; empty if unknown.
        with_calibration, with_intervals: see `ReportBuilder`.
        settings: numbers of bins and rule for their edges.
        options: options of the input for the settings of the report.
        source: origin of the predictions.
    """

    statistics: Statistics
    predictions: Predictions | None
    why_not: str
    has_ranked_samples: bool
    resolution: int | None
    groups: GroupBins | None
    has_several_samples_per_item: bool
    n_dropped: int
    class_names: tuple[str, ...]
    with_calibration: bool
    with_intervals: bool
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    source: Mapping[str, Any]


def report_of(c: Collected) -> Report:
    """Compute a `Report` from accumulated statistics."""
    s, p, why_not = c.statistics, c.predictions, c.why_not
    evidence, notes_of_tests = run_tests(s, p, with_intervals=c.with_intervals)
    notes = [*notes_of_tests, *_notes_on_ranked_samples(c)]
    warnings = _warnings(c)
    untested = s.lines()
    main = next(line for line in with_evidence(untested, evidence) if line.key in evidence)
    lines = with_evidence(untested, evidence, with_intervals=c.with_intervals)
    of_main = evidence[main.key]
    effect = float(of_main.design_effect or 1)
    if c.with_intervals:
        decomposed = list(s.samples) if s.has_labels else []
        of_few = "" if p is None else why_few_events(p, next(iter(s.bins.values())), effect)
        of_bootstrap = (None, of_few) if of_few else (p, why_not)
        lines, notes_of_intervals = with_intervals(lines, *of_bootstrap, decomposed, s.selective_mode)
        notes += notes_of_intervals
    of_clusters = {}
    if of_main.n_clusters is not None and of_main.effective_clusters is not None:
        number = float(of_main.effective_clusters)
        of_clusters = {"clusters": of_main.n_clusters, "effective_clusters": number, "design_effect": effect}
        notes[:0] = _cluster_notes(of_main, s.clusters_determine_label)
    only_class = s.only_class
    stage = whole = None
    if c.with_calibration:
        if p is not None and not p.hard:
            p, why_not = None, "calibrators need labels, and some targets are soft"
        stage, whole, stage_notes = calibration_stage(p, why_not, c.class_names, **c.settings)
        notes += stage_notes
        if only_class is not None:  # calibrators cannot be evaluated
            stage = whole = None
    groups = c.groups if c.groups is not None and c.groups.places else None
    tables = s.tables()
    by_key = {line.key: line for line in with_evidence(untested, evidence)}
    mode, bins = next(iter(s.bins.items()))
    size = by_key[f"rmsce_debiased/{mode}"]
    tests = class_tests(s)
    findings = Findings(
        task=s.task,
        n=s.n,
        ece=main,
        size=size,
        nll=by_key["nll"],
        table=next(iter(tables.values())),
        gaps=Gaps.from_bins(bins, effect),
        classwise_size=by_key["rmsce_debiased/classwise"] if s.task == "multiclass" else None,
        class_names=c.class_names,
        evidence=None if p is None or whole is None else evidence_of(p, whole.fits, whole.nll, effect),
        groups=None if groups is None else groups.gaps(),
        labels=None if tests is None or s.task != "multilabel" else _labels(bins, tests[0].p_value, effect),
        only_class=only_class,
        n_clusters=of_main.n_clusters,
        are_confidences=s.are_confidences,
        clusters_determine_label=s.clusters_determine_label,
    )
    stage = None if stage is None else stage.advised(findings.worthwhile)
    decision = decide(findings, stage)
    report = Report(
        task=s.task,
        n=s.n,
        n_dropped=c.n_dropped,
        num_classes=s.num_classes,
        priors=s.priors,
        lines=tuple(lines),
        tables=tables,
        class_lines=class_lines(s, tests),
        decision=decision,
        settings={
            **c.settings,
            **c.options,
            "order_based": _method_of_ranked_errors(c),
            "p_values": of_main.method,
            **of_clusters,
        },
        source=dict(c.source),
        tests=s.tests(),
        calibration=stage,
        notes=(*notes, *warnings),
        warnings=warnings,
        groups=None if groups is None else groups.table(),
        class_names=c.class_names,
    )
    return report_of_confidences(report, c.has_ranked_samples) if s.are_confidences else report


def _labels(bins: BinStats, p_values: Tensor, effect: float) -> Labels:
    """Return the tests of each label, with its bins."""
    flags = [None] * len(bins.sums) if bins.noise_flag is None else bins.noise_flag
    gaps = [
        Gaps.from_bins(replace(bins, sums=x, noise_flag=flag), effect) for x, flag in zip(bins.sums, flags, strict=True)
    ]
    return Labels(p_values, gaps)


_RANKED_NAMES = f"ACE, TCE, KS, ATB, MCB, DSC, UNC and metrics of {SELECTIVE_GROUP}"


def _method_of_ranked_errors(c: Collected) -> str:
    """Return how rank-based errors are computed."""
    if not c.statistics.samples:
        return "left out"
    return "exact" if c.resolution is None else f"sketch, {c.resolution:,} cells per unit of log-odds"


def _notes_on_ranked_samples(c: Collected) -> list[str]:
    """Return notes on rank-based errors that are omitted, or computed from a sketch."""
    s = c.statistics
    if not s.samples:
        return [f"{_RANKED_NAMES} are omitted: they need weights that are whole numbers."]
    notes = []
    if not s.has_labels:
        notes.append(
            f"TCE, MCB, DSC, UNC and metrics of {SELECTIVE_GROUP} are omitted: they need labels, and targets are soft."
        )
    if c.resolution is not None:
        notes.append(
            f"{_RANKED_NAMES if s.has_labels else 'ACE, KS and ATB'} are computed from a sketch, because there are "
            f"many samples. Each probability is rounded by less than 1 / {c.resolution:,} in log-odds."
        )
    return notes


def _cluster_notes(test: CalibrationTest, determine_label: bool) -> list[str]:
    """Return notes on the clusters of a report. `determine_label` is True if each cluster has only one label."""
    n_clusters, effect = test.n_clusters or 0, float(test.design_effect or 1)
    if n_clusters < 2:
        return ["All rows are in one cluster. Tests and intervals are not meaningful: they need several clusters."]
    notes = [
        f"There are {clusters_in_words('independent clusters of rows', n_clusters, test.n_merged)}. "
        f"The design effect, {effect:.3g}, is the variance of the mean gap divided by that of independent rows. "
        "Noise floors, p-values and intervals of scores and errors account for clusters; tests of groups and of single "
        "bins treat rows as independent."
    ]
    if (number := float(test.effective_clusters or 0)) < FEW_CLUSTERS:
        notes.append(
            f"The effective number of clusters is {number:.3g}: the mean gap depends on few or on large clusters. "
            f"Below {FEW_CLUSTERS}, p-values can be too small and intervals too narrow, if outcomes are rare or if "
            "each cluster has one label. In simulations, p <= 0.01 occurred up to 7 times too often."
        )
    if determine_label:
        notes.append(
            "The clusters determine the label: all rows of a cluster have the same label. Each cluster therefore "
            "counts as one outcome. If clusters were formed from the labels, no test is possible: pass other clusters."
        )
    return notes


def _warnings(c: Collected) -> tuple[str, ...]:
    """Return notes on dependent samples, empty groups, dropped rows, and targets of a single class."""
    s, notes = c.statistics, []
    if c.has_several_samples_per_item:
        notes.append(
            "An item has several samples (axes after the first), which are treated as independent. If they are "
            "not, p-values are too small and intervals too narrow: pass `clusters` (cluster_by='batch item')."
        )
    if c.groups is not None and not c.groups.places:
        notes.append("No row has a group: all group numbers are -1.")
    if c.n_dropped:
        units = "entries" if s.task == "multilabel" else "samples"
        notes.append(
            f"{c.n_dropped:,} {units} with NaN or invalid infinite values are excluded (nan_policy='drop'). "
            "Their effect on the results is unknown."
        )
    if only := s.only_class_in_words:
        notes.append(
            f"All targets are {only}: values relative to the class frequencies are undefined. "
            "Check that `target` is the right array."
        )
    elif (
        s.n >= MIN_ROWS
        and s.task == "multilabel"
        and (constant := [k for k, share in enumerate(s.priors) if share in (0, 1)])
    ):
        labels = quoted([c.class_names[k] if c.class_names else k for k in constant], 5)
        notes.append(f"All targets are equal for the labels {labels}. Check that these columns of `target` are right.")
    return tuple(notes)
