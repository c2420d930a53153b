"""First screen, explanations and facts of reports, comparisons and audits, for HTML pages and terminals."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchcalib.core.events import NamedMode
from torchcalib.display.words import (
    ONE_LOOK,
    capitalised,
    count,
    gain,
    listed,
    p_words,
    percent,
    printable,
    significant,
)
from torchcalib.io.errors import short_name
from torchcalib.results.audit import CONFIDENCES, Audit, AuditComparison, AuditGroups
from torchcalib.results.base import Results
from torchcalib.results.comparison import Comparison, compared_verdict, direction_of, systems_that_are
from torchcalib.results.lines import SELECTIVE_GROUP, ClassLine, Line
from torchcalib.results.report import Report

CONFIDENCE_WORDS = (
    "Scores are means over the data. Confidence is the probability of y = 1 (positive class) or the largest "
    "probability of a sample (top label). Class-wise errors are means over all classes or labels, where confidence is "
    "the probability of one of them."
)
"""Explanation of scores, confidences and class-wise errors."""

SELECTIVE_WORDS = (
    "Selective prediction: the model abstains from its least confident predictions. Coverage: fraction of accepted "
    "predictions. Risk: their error rate. Multi-label values are means over labels."
)
"""Explanation of the metrics of selective prediction."""

EVIDENCE_WORDS = (
    "Expected if calibrated (noise floor): expected value if the model were perfectly calibrated with these "
    "confidences. Errors and noise do not add: the value minus its noise floor is on average smaller than the error of "
    "a very large sample. p-value: probability of a value at least as large if the model were perfectly calibrated. It "
    "assumes independent rows or clusters, and predictions that were not fitted to these labels. It is not corrected "
    f"for multiple testing. {ONE_LOOK}"
)
"""Explanation of noise floors and p-values."""

INTERVAL_WORDS = (
    "95% interval of a calibration error: for its expected value at this sample size, which includes sampling noise. "
    "95% interval of a debiased error: for the error without sampling noise. Other errors, averages over classes, and "
    "errors of rare events have no interval. The intervals of scores, DSC, UNC and metrics of selective prediction are "
    "bootstrap intervals for the expected value on new data."
)
"""Explanation of the intervals of a report."""

CLASS_WORDS = (
    "Each {kind} is tested like a binary event; frequency and mean probability are those of the {kind}. Expected if "
    "calibrated: expected ECE of a calibrated model. p-value: of ECE, adjusted for the number of {members} "
    "(Holm). Probabilities are too high or too low if their mean differs from the frequency, with an "
    "adjusted p-value below 0.05. They can be miscalibrated although their mean is right."
)
"""Explanation of the table of classes or labels, a format string."""

DIFFERENCE_WORDS = (
    "Difference: value of a system minus value of the first system. For signed metrics, absolute values are compared. "
    "By chance: expected difference if both systems are calibrated, the difference of their noise floors. Beyond "
    "chance: difference minus by chance; scores have no noise floor. 95% interval: of the difference beyond chance, by "
    "the paired bootstrap. For calibration errors, it also contains the interval from simulated outcomes of calibrated "
    "systems, and allows for noise that adds less to large gaps. p-value: at most 0.05 if the interval excludes 0. All "
    "verdicts, sentences and marks use it. Adjusted p: for all differences of the comparison (step-down max-T of "
    "Westfall and Young 1993)."
)
"""Explanation of the differences, intervals and p-values of a comparison."""

GROUP_WORDS = (
    "Groups whose ECE exceeds its expected value most. Expected if calibrated: expected ECE of a calibrated model for "
    "a group of this size. p-value: adjusted for the number of groups (Benjamini-Hochberg). Shrunk: ECE without "
    "sampling noise, shrunk towards the mean of all groups in proportion to its uncertainty (empirical Bayes). "
    "Significant differences: frequencies of the event differ between groups at the same confidence. Each group is "
    "compared with all rows of a bin (Mantel and Haenszel), and p is adjusted for the number of groups (Bonferroni). "
    "The first screen only names a group if p is below 0.05, or if the verdict does."
)
"""Explanation of the groups of a report."""

SLICE_WORDS = (
    "Slices: intersections of the values of up to 3 columns, with at least 50 rows. Signed error: mean outcome minus "
    "mean confidence. Shrunk: signed error without sampling noise, shrunk towards the mean of all slices. Expected if "
    "calibrated: expected ECE of a calibrated model for these rows. Adjusted p: larger of two statistics, mean gap and "
    "slope of the gaps, compared with the largest one of all slices in simulated outcomes (step-down max-T of Westfall "
    "and Young 1993). Detectable: smallest signed error that is found with 80% probability."
)
"""Explanation of the slices of a report."""


DEFINITION_WORDS = (
    "Bins: pava are isotonic blocks (pool-adjacent-violators algorithm), pava bc those of bounded size. Ties: pool if "
    "samples with equal confidence have no order. Norm: over bins, for KS over samples; mean is a signed mean."
)
"""Explanation of the table of definitions."""


def explanations(report: Report) -> list[str]:
    """Return explanations of the columns and groups in `line_table(report)`."""
    has_evidence = any(line.p_value is not None for line in report.lines)
    has_intervals = any(line.interval for line in report.lines)
    is_selective = any(line.group == SELECTIVE_GROUP for line in report.lines)
    return [
        CONFIDENCE_WORDS,
        *[SELECTIVE_WORDS] * is_selective,
        *[f"{EVIDENCE_WORDS} Method: {report.settings['p_values']}."] * has_evidence,
        *[INTERVAL_WORDS] * has_intervals,
    ]


def event_name(results: Results[Any], mode: NamedMode) -> str:
    """Return the display name of a mode, such as "top label" or "positive class (spam)"."""
    if mode == "positive":
        return "positive class" + (f" ({printable(results.class_names[-1])})" if results.class_names else "")
    return "top label" if mode == "top_label" else "all labels pooled"


def class_words(report: Report) -> str:
    """Return the explanation of the table of classes or labels."""
    kind, members = ("label", "labels") if report.task == "multilabel" else ("class", "classes")
    return CLASS_WORDS.format(kind=kind, members=members)


def title_words(source: Mapping[str, Any]) -> str:
    """Return the first file name of a source, without folders, and the number of further files; empty without files."""
    for key in ("file", "path", "files", "paths"):
        if value := source.get(key):
            names = [value] if isinstance(value, str | Path) else list(value)
            return " ".join([printable(Path(names[0]).name), *[f"and {len(names) - 1} more"] * (len(names) > 1)])
    return ""


def without_folders(value: Any) -> Any:
    """Return a value of a source with the names of files instead of absolute paths, which only one machine has."""
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def facts(results: Results[Any], source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the source, the input and the settings as pairs of a name and a formatted value."""
    settings = dict(results.settings)
    is_multilabel = results.task == "multilabel"
    kind, kinds = ("label", "labels") if is_multilabel else ("class", "classes")
    pairs = [(str(key).replace("_", " "), formatted(without_folders(value))) for key, value in source.items()]
    pairs.append(("task", f"{results.task}{', inferred from the shapes' if results.task_is_inferred else ''}"))
    if is_multilabel and isinstance(results, Report):
        pairs.append(("rows", count(results.n_rows)))
    pairs.append(("labelled entries" if is_multilabel else "samples", count(results.n)))
    if settings.pop("nan_policy", "raise") == "drop" or results.n_dropped:
        pairs.append(("dropped for NaN", count(results.n_dropped)))
    pairs.append((kinds, count(results.num_classes)))
    if results.class_names:
        pairs.append((f"{kind} names", formatted([printable(name) for name in results.class_names])))
    if isinstance(results, Report) and results.priors:
        low, high = percent(min(results.priors)), percent(max(results.priors))
        pairs.append((f"{kind} frequencies", f"{low} each" if low == high else f"{low} to {high}"))
    edges = "(a, b]" if settings.pop("right", False) else "[a, b)"
    pairs.append(("bins", f"{count(settings.pop('n_bins'))} equal-width bins {edges}"))
    return pairs + [
        (str(key).replace("_", " "), formatted(value)) for key, value in settings.items() if value is not None
    ]


def formatted(value: Any, most: int = 5) -> str:
    """Format a setting as text. Lists are truncated to the first `most` items."""
    if value is None or value == [] or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {formatted(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        more = [f"and {len(value) - most} more"] if len(value) > most else []
        return ", ".join([formatted(item) for item in value[:most]] + more)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


_FREQUENT = {
    "binary": "the more frequent outcome",
    "multiclass": "the most frequent class",
    "multilabel": "the more frequent outcome of each label",
}
"""What a predictor without input predicts for the highest accuracy, by task."""


class KeyNumber(NamedTuple):
    """One of the numbers on a first screen."""

    name: str
    value: str
    detail: str  # values to compare it with; may be empty


class FirstScreen(NamedTuple):
    """First screen of a page or of terminal output."""

    title: str
    date: str
    input: str  # description of the data
    verdict: str
    colour: str  # "good", "slight", "clear", "bad" or "unknown"
    cause: str  # sentences; may be empty
    action: str  # what to do; may be empty
    numbers: Sequence[KeyNumber]


_COLOURS = {"calibrated": "good", "slightly": "slight", "clearly": "clear", "badly": "bad"}
"""Colour of a verdict, by degree, or by kind without a degree."""


def first_screen(results: Report | Comparison | Audit | AuditGroups | AuditComparison) -> FirstScreen:
    """Return the first screen of results."""
    match results:
        case Report():
            title = " of ".join(filter(None, ["Calibration report", title_words(results.source)]))
            return _decided(results, title, results.decision.verdict, results)
        case Audit():
            return _decided(results, f"Audit of {results.file}", results.verdict, results.report)
        case Comparison():
            return _of_comparison(results)
        case AuditGroups():
            return _of_groups(results)
    key, compared = next(iter(results.items()))
    words = f"confidence: {CONFIDENCES[key].name}, {count(results.n_paired[key])} answers in pairs"
    return _of_comparison(compared)._replace(title=f"Comparison of logs: {listed(list(results.audits))}", input=words)


def _decided(results: Report | Audit, title: str, verdict: str, report: Report | None) -> FirstScreen:
    """Return the first screen with the decision of a report; None for an audit without a report."""
    found = FirstScreen(title, results.created, results.input_line, verdict, _colour(report), "", "", ())
    if report is None:
        return found
    return found._replace(cause=report.decision.cause, action=report.decision.action, numbers=key_numbers(report))


def _colour(report: Report | None) -> str:
    return "unknown" if report is None else _COLOURS.get(report.decision.degree or report.decision.kind, "unknown")


def _of_comparison(comparison: Comparison) -> FirstScreen:
    """Return the verdict, the finding if there is only one, and ECE, verdict and direction of each system."""
    names = [short_name(name) for name in comparison.systems]
    better, worse = systems_that_are("better", comparison), systems_that_are("worse", comparison)
    colour = "good" if better and not worse else "bad" if worse and not better else "unknown"
    numbers = []
    for name, shown in zip(comparison.systems, names, strict=True):
        detail = ", ".join(filter(None, [compared_verdict(comparison, name), direction_of(comparison, name)]))
        numbers.append(KeyNumber(shown, f"ECE {significant(comparison['ece'].values[name])}", detail))
    cause = ""
    if len(comparison.sentences) == 1:  # it begins with the verdict
        (sentence,) = comparison.sentences.values()
        cause = capitalised(sentence[sentence.find("the ECE of") :])
    title = f"Comparison of {listed(names)}"
    about = title, comparison.created, comparison.input_line
    return FirstScreen(*about, comparison.verdict, colour, cause, "", numbers)


def _of_groups(found: AuditGroups) -> FirstScreen:
    """Return the number of miscalibrated parts, and ECE and verdict of each."""
    audits, numbers = found.audits.values(), []
    colour = max((_colour(audit.report) for audit in audits), key=("unknown", *_COLOURS.values()).index)
    for name, audit in found.audits.items():
        value = "" if audit.report is None else f"ECE {significant(audit.report.main_line.value)}"
        numbers.append(KeyNumber(short_name(printable(name)), value, audit.verdict))
    first = next(iter(audits))  # all have the same file and date
    n = f"{count(sum(audit.n_answers for audit in audits))} answers, {found.title}"
    return FirstScreen(f"Audit of {first.file}", first.created, n, found.verdict, colour, "", "", numbers)


def key_numbers(report: Report) -> list[KeyNumber]:
    """Return ECE, accuracy, NLL, gain of calibration, and the worst group, class or range of probabilities.

    If no error was found, they include the smallest one that would have been found.
    """
    accuracy, nll, ece, decision = report.line("accuracy"), report.line("nll"), report.main_line, report.decision
    gap = "confidence and accuracy" if ece.key.endswith("top_label") else "probability and frequency"
    gap = "over labels" if report.task == "multilabel" else f"between {gap}"
    numbers = [KeyNumber("ECE", significant(ece.value), ", ".join([f"mean gap {gap}", *_evidence(ece, "p")]))]
    if accuracy is not None:
        is_confidence = report.settings.get("kind") == "confidence"
        frequent = "" if is_confidence else f"{percent(accuracy.naive)} for always predicting {_FREQUENT[report.task]}"
        numbers.append(KeyNumber("Accuracy", percent(accuracy.value), frequent))
    if nll is not None:
        share = nll.value / nll.naive if nll.naive > 0 else math.nan
        kind = "label" if report.task == "multilabel" else "class"
        relative = f"{percent(share)} of {significant(nll.naive)}, the NLL of the {kind} frequencies"
        if math.isinf(nll.value):
            numbers.append(KeyNumber("NLL", "infinite", "an outcome with predicted probability 0 occurred"))
        else:
            numbers.append(KeyNumber("NLL", f"{significant(nll.value)} nats", relative if math.isfinite(share) else ""))
    if decision.kind in ("calibrated", "too little data") and report.minimum_detectable_error > 0:
        detail = "smallest mean error that is found with 80% probability"
        numbers.append(KeyNumber("Detectable", significant(report.minimum_detectable_error), detail))
    if report.calibration is not None:
        shown = gain(decision.gain if decision.gain is not None else math.nan)
        interval = decision.interval
        bounds = "" if interval is None else f", 95% interval {gain(interval.low)} to {gain(interval.high)}"
        detail = f"{report.calibration.name}{bounds}{'' if decision.calibrator else ', not advised'}"
        numbers.append(KeyNumber("Gain by calibration", f"{shown} of {decision.score}", detail))
    return [*numbers, *_worst(report)]


def _evidence(line: Line | ClassLine, p: str) -> list[str]:
    """Return clauses on the noise floor and the p-value, without those that are None."""
    floor = [] if line.noise_floor is None else [f"{significant(line.noise_floor)} expected if calibrated"]
    return floor + ([] if line.p_value is None else [f"{p} {p_words(line.p_value, equals='= ')}"])


def _worst(report: Report) -> list[KeyNumber]:
    """Return slices, the worst group, class or label, or else the range of probabilities with the largest gap."""
    if report.slices is not None and report.slices.n_slices:
        slices = report.slices
        first = f"first: {short_name(printable(slices.slice[0]), 40)}"
        found = KeyNumber("Slices", slices.sentence, first if slices.smallest_p_value < 0.05 else "")
        # Groups are the smallest slices. They are only named if one of them is bad.
        return [found, *(_groups(report) if report.groups is not None and report.groups.worst is not None else [])]
    return _groups(report) or _class_or_range(report)


def _groups(report: Report) -> list[KeyNumber]:
    if report.groups is not None and len(report.groups):
        groups = report.groups
        if groups.worst is None:
            return [KeyNumber("Groups", groups.difference, f"between {count(groups.n_groups)} groups")]
        name, details = short_name(str(groups.worst), 40), []
        if groups.worst in groups.group:  # the verdict may name a group that is not in the table
            row = groups.group.index(groups.worst)
            name, details = groups.shown_names(40)[row], [f"shrunk ECE {significant(groups.shrunk[row])}"]
        details += [groups.difference] * groups.has_difference
        return [KeyNumber("Worst group", name, ", ".join(details))]
    return []


def _class_or_range(report: Report) -> list[KeyNumber]:
    known = [line for line in report.class_lines if not math.isnan(line.value)]
    if known:
        line = max(known, key=lambda line: line.excess)
        kind, rest = ("label", "") if report.task == "multilabel" else ("class", " against the rest")
        name = printable(report.class_names[line.index]) if report.class_names else str(line.index)
        detail = ", ".join([f"ECE {significant(line.value)}{rest}", *_evidence(line, "adjusted p")])
        return [KeyNumber(f"Worst {kind}", name, detail)]
    table = report.main_table
    weighted = (table.gap.abs() * table.share).nan_to_num(0)
    k = int(weighted.argmax())
    if not float(weighted[k]):
        return []
    found = f"{percent(float(table.confidence[k]))} predicted, {percent(float(table.frequency[k]))} observed"
    return [KeyNumber("Worst range", f"{percent(float(table.lower[k]))} to {percent(float(table.upper[k]))}", found)]
