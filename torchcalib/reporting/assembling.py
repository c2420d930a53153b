"""Compute a `Report` from the statistics of all predictions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from torchcalib.core.mistakes import MIN_ROWS
from torchcalib.core.sums import BinStats
from torchcalib.display.progress import part
from torchcalib.functional.binned import ece_from_bins, esce_from_bins
from torchcalib.inference.adjustment import holm
from torchcalib.inference.clusters import FEW_CLUSTERS
from torchcalib.inference.sample_size import detectable_gap
from torchcalib.inference.testing import CalibrationTest, ErrorTest, clusters_in_words, run_error_test, run_error_tests
from torchcalib.io.errors import quoted
from torchcalib.reporting.calibration import calibration_stage
from torchcalib.reporting.catalogue import bins_of, names_of
from torchcalib.reporting.decision import Z, with_safety
from torchcalib.reporting.findings import Findings, decide
from torchcalib.reporting.lines import Data
from torchcalib.reporting.options import ReportOptions
from torchcalib.reporting.slices import DEPTH, MIN_SIZE, Intersections, n_rows_of, table_of_slices
from torchcalib.reporting.testing import run_tests, why_few_events, with_evidence, with_intervals
from torchcalib.results.group_table import GroupTable, resolved
from torchcalib.results.lines import ClassLine, LineInterval
from torchcalib.results.report import Report
from torchcalib.results.slice_table import SliceTable

_LEAST_REPLICATES, _MIN_REPLICATES = 99, 999  # minimum numbers of simulated replicates, with many classes and with few
_MAX_SIMULATED = 2**22, 2**24  # maximum number of simulated bins over all classes and replicates; for multi-label

_WORST = 10  # number of groups in the table of a report
_REPLICATES, _TOTAL_REPLICATES = 199, 200_000  # maximum numbers of simulated replicates, for one and for all groups


def report_of(data: Data, options: ReportOptions, source: Mapping[str, Any]) -> Report:
    """Compute a `Report` from accumulated data; `source` is the origin of the predictions."""
    # Names are those of the classes of the input, which are not the classes of the report for `positive_classes`.
    class_names = options.class_names if options.input_format.positive_classes is None else ()
    # Shares of the run time of 1,000 samples
    shares = {"tests": 3.0, "intervals": 3.0 * options.with_intervals, "calibrators": 6.0 * options.with_calibration}
    shares = {name: share / (sum(shares.values()) + 1.0) for name, share in shares.items()}
    with part(shares["tests"], "tests"):
        evidence, notes = run_tests(data, with_intervals=options.with_intervals)
    notes += _notes_on_samples(data)
    warnings = _warnings(data, class_names)
    note_on_copies, is_warning = data.note_on_copies
    if is_warning:
        warnings = (note_on_copies, *warnings)
    elif note_on_copies:
        notes.append(note_on_copies)
    lines = with_evidence(data.lines(), evidence)
    tested = {line.key: line for line in lines}
    of_main = evidence[next(key for key in tested if key in evidence)]
    effect = float(of_main.design_effect or 1)
    if not options.with_intervals:
        lines = [replace(line, interval=None) for line in lines]
    else:
        p = data.predictions
        why_not = data.why_not if p is None else why_few_events(p, data.main_bins, effect)
        with part(shares["intervals"], "intervals"):
            lines, notes_on_intervals = with_intervals(lines, data, why_not)
        notes += notes_on_intervals
    of_clusters = {}
    if of_main.n_clusters is not None and of_main.effective_clusters is not None:
        number = float(of_main.effective_clusters)
        of_clusters = {"clusters": of_main.n_clusters, "effective_clusters": number, "design_effect": effect}
        notes[:0] = _cluster_notes(of_main, data.clusters_determine_label)
    stage = whole = None
    if options.with_calibration:
        with part(shares["calibrators"], "calibrators"):
            stage, whole, stage_notes = calibration_stage(
                data.predictions, data.why_not, class_names, effect, **options.bins
            )
        notes += stage_notes
        if data.only_class is not None:  # calibrators cannot be evaluated
            stage = whole = None
    tests = _class_tests(data)
    label_p_values = None if tests is None or data.task != "multilabel" else holm(tests[0].p_value)
    findings = Findings(data, tested, class_names, effect, of_main.n_clusters, whole, label_p_values)
    stage = None if stage is None else stage.advised(findings.worthwhile, is_faulty=findings.is_faulty)
    decision = decide(findings, stage)
    if options.safe_threshold is not None:
        decision = with_safety(decision, next(line for line in lines if line.key == "ecd"), options.safe_threshold)
    ranked = "exact" if data.resolution is None else f"sketch, {data.resolution:,} cells per unit of log-odds"
    positive = options.input_format.positive_classes
    report = Report(
        task=data.task,
        n=data.n,
        n_dropped=data.n_dropped,
        num_classes=data.num_classes,
        priors=data.priors,
        lines=tuple(lines),
        tables=data.tables,
        class_lines=_class_lines(data, tests),
        decision=decision,
        settings={
            **options.bins,
            **{name: getattr(options.input_format, name) for name in ("from_logits", "ignore_index", "nan_policy")},
            **({} if positive is None else {"positive_classes": positive}),
            "order_based": ranked if data.samples else "left out",
            "p_values": of_main.method,
            "safe_threshold": options.safe_threshold,
            **of_clusters,
            **data.catalogue.kind,
        },
        source=dict(source),
        tests=data.tests(),
        calibration=stage,
        notes=(*notes, *warnings),
        warnings=warnings,
        groups=_group_table(data, findings),
        slices=_slice_table(data, effect),
        minimum_detectable_error=_detectable(data.main_bins, effect),
        class_names=class_names,
    )
    return _with_accuracy(report, data.effective_n) if data.catalogue.are_confidences else report


def _with_accuracy(report: Report, n: float) -> Report:
    """Return a report on confidences with the accuracy of the predictions, which calibration does not change.

    The binary accuracy, which it replaces, depends on the threshold 0.5. The interval is that of Wilson for `n`
    samples, the effective number for floating weights: Franco, Little, Louis, Slud: Comparative study of confidence
    intervals for proportions in complex sample surveys (Journal of Survey Statistics and Methodology, 2019).
    """
    accuracy = report.priors[1]
    interval = None
    if any(line.interval is not None for line in report.lines):  # Wilson 1927, for a proportion of n samples
        centre = (accuracy + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * (accuracy * (1 - accuracy) / n + Z**2 / (4 * n**2)) ** 0.5
        interval = LineInterval(max(0.0, centre - half), min(1.0, centre + half))
    lines = tuple(
        replace(line, value=accuracy, naive=accuracy, interval=interval) if line.key == "accuracy" else line
        for line in report.lines
    )
    stage = report.calibration
    if stage is not None:
        stage = replace(stage, lines=tuple(replace(line, accuracy=accuracy) for line in stage.lines))
    return replace(report, calibration=stage, lines=lines)


def _group_table(data: Data, findings: Findings) -> GroupTable | None:
    """Return the groups whose expected calibration error (ECE) most exceeds its noise floor; None without groups."""
    if data.groups is None or findings.groups is None:
        return None
    names, bins = data.groups  # bins of all groups `(G, ..., B)`
    accumulator = data.catalogue.accumulators[bins_of(data.main_mode)]  # of one group
    order = sorted(range(len(names)), key=names.__getitem__)  # simulated outcomes depend on the position of a group
    sums = bins.sums[order]
    n_replicates = max(59, min(_REPLICATES, _TOTAL_REPLICATES // len(names)))
    ece, average = ErrorTest(ece_from_bins, interval="absolute"), accumulator.mode == "classwise"

    def test(group_sums: Tensor, n_replicates: int) -> CalibrationTest:
        return run_error_test(ece, accumulator.wrap(group_sums), average=average, n_replicates=n_replicates)

    found = resolved(test(sums, n_replicates), lambda numbers, n: test(sums[numbers], n), n_replicates)
    n = accumulator.wrap(sums).total.reshape(len(names), -1).amax(-1)
    difference = findings.groups.p_value_of_differences()
    table = GroupTable.from_test([names[k] for k in order], n, found, k=_WORST, difference_p_value=difference)
    if findings.cause is not None and findings.cause.kind == "bad group":  # the headline then agrees with the verdict
        table = replace(table, worst=findings.groups.names[findings.cause.which])
    return table


def _detectable(bins: BinStats, effect: float) -> float:
    """Return the smallest mean signed error that is found, in each of several labels."""
    spread = (bins.noise.sum(-1) * max(1.0, effect)).sqrt() / bins.n.sum(-1)
    return detectable_gap(float(spread.max()), spread.numel())


def _slice_table(data: Data, effect: float) -> SliceTable | None:
    """Return the most significant intersections of several columns of groups, with the design effect of clusters."""
    if data.combinations is None or data.task == "multilabel":
        return None
    parts, bins = data.combinations
    found = Intersections.of(parts, n_rows_of(bins), DEPTH, MIN_SIZE)
    accumulator = data.catalogue.accumulators[bins_of(data.main_mode)]
    return table_of_slices(found, bins, accumulator, effect=effect, k=_WORST)


def _class_lines(data: Data, tests: tuple[CalibrationTest, CalibrationTest] | None) -> tuple[ClassLine, ...]:
    if "classwise" not in data.bins:
        return ()
    bins = data.bins["classwise"]
    gap = esce_from_bins(bins)
    columns = {"n": bins.n.sum(-1), "gap": gap, "value": ece_from_bins(bins)}
    columns["frequency"] = gap.new_tensor(data.priors)
    if tests is not None:
        ece, esce = tests
        columns["noise_floor"] = ece.noise_floor
        columns["p_value"], columns["gap_p_value"] = holm(ece.p_value), holm(esce.p_value)
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return tuple(ClassLine(index, **dict(zip(columns, row, strict=True))) for index, row in enumerate(rows))


def _class_tests(data: Data) -> tuple[CalibrationTest, CalibrationTest] | None:
    """Return the tests of ECE and of the gap of each class `(C,)`; None if binary, or without sums by cluster."""
    if "classwise" not in data.bins:
        return None
    bins, clusters = data.bins["classwise"], None
    if data.clusters is not None and (clusters := data.clusters.get(bins_of("classwise"))) is None:
        return None
    errors = {"ece": ErrorTest(ece_from_bins), "esce": ErrorTest(esce_from_bins, signed=True)}
    most = _MAX_SIMULATED[data.task == "multilabel"] // bins.n.numel()
    # Enough replicates for a significant p-value of one class after adjustment.
    n_replicates = min(max(_MIN_REPLICATES, 40 * len(data.priors)), max(_LEAST_REPLICATES, most))
    tests = run_error_tests(errors, bins, clusters=clusters, n_replicates=n_replicates)
    return tests["ece"], tests["esce"]


def _notes_on_samples(data: Data) -> list[str]:
    ranked = data.catalogue.ranked
    if not data.samples:
        return [f"{names_of(ranked)} are omitted: they need weights that are whole numbers."]
    notes = []
    if not data.has_labels:
        omitted = [each for each in ranked if each.declaration.needs_labels]
        notes.append(f"{names_of(omitted)} are omitted: they need labels, and targets are soft.")
    if data.resolution is not None:
        found = [each for each in ranked if each in data.members]
        notes.append(
            f"{names_of(found)} are computed from a sketch, because there are "
            f"many samples. Each probability is rounded by less than 1 / {data.resolution:,} in log-odds."
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
        "Noise floors, p-values and intervals of scores and errors, and the comparison of groups account for clusters; "
        "the p-values of single groups and bins treat rows as independent."
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


def _warnings(data: Data, class_names: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if data.has_several_samples_per_item:
        notes.append(
            "An item has several samples (axes after the first), which are treated as independent. If they are "
            "not, p-values are too small and intervals too narrow: pass `clusters` (cluster_by='batch item')."
        )
    if data.groups is not None and not data.groups[0]:
        notes.append("No row has a group: all group numbers are -1.")
    if data.combinations is not None and data.task == "multilabel":
        notes.append("Slices are omitted: they need one label. Call torchcalib.slices for a column of the labels.")
    if data.n_dropped:
        units = "entries" if data.task == "multilabel" else "samples"
        notes.append(
            f"{data.n_dropped:,} {units} with NaN or invalid infinite values are excluded (nan_policy='drop'). "
            "Their effect on the results is unknown."
        )
    if only := data.only_class_in_words:
        notes.append(
            f"All targets are {only}: values relative to the class frequencies are undefined. "
            "Check that `target` is the right array."
        )
    elif (
        data.effective_n >= MIN_ROWS
        and data.task == "multilabel"
        and (constant := [k for k, share in enumerate(data.priors) if share in (0, 1)])
    ):
        labels = quoted([class_names[k] if class_names else k for k in constant], 5)
        notes.append(f"All targets are equal for the labels {labels}. Check that these columns of `target` are right.")
    return tuple(notes)
