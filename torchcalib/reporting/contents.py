"""Tables and explanations of reports and comparisons, which pages, terminals and `str` show alike."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

from torchcalib.core.events import NamedMode
from torchcalib.core.tables import (
    Cell,
    Column,
    Table,
    interval,
    number,
    p_value,
    short,
)
from torchcalib.core.words import count, gain, listed, percent, significant
from torchcalib.io.errors import printable

if TYPE_CHECKING:
    from torchcalib.reporting.data import CalibrationStage, Comparison, Quantity, Report, Results

WORST_CLASSES = 10

NAIVE_WORDS = (
    "Perfect: the value of a predictor that is always right and certain. Naive: the value of a predictor that always "
    "predicts the class frequencies of this data."
)

CONFIDENCE_WORDS = (
    "Scores are means over the data. For errors, confidence is the probability of y = 1 (positive class), the largest "
    "probability of a sample (top label), or the probability of each class or label, followed by the mean over them "
    "(class-wise)."
)

EVIDENCE_WORDS = (
    "Noise floor: the expected value if the model were perfectly calibrated with these confidences. Only the part "
    "above it is due to miscalibration. p: the probability of a value at least as large if the model were perfectly "
    "calibrated. Ties count, so that few samples seldom give a small p. The p-values are not corrected for multiple "
    "testing: with twenty lines of a perfectly calibrated model, one is expected below 0.05."
)
"""Explanation of noise floors and p-values."""

INTERVAL_WORDS = (
    "95 % interval: for a calibration error, a confidence interval of the population error without sampling noise, so "
    "that it may lie below the value; for TCE, of its expected value at this sample size; for scores, DSC and UNC, a "
    "bootstrap interval."
)
"""Explanation of the intervals of a report."""

DIFFERENCE_WORDS = (
    "Difference: the value of a system minus that of the first one; absolute values for signed metrics, where nearer "
    "to 0 is better. 95 % interval: paired bootstrap, all systems get the same replicates. Better or worse: the "
    "interval excludes 0, also after subtracting the part that sampling noise adds to an error."
)
"""Explanation of the differences and intervals of a comparison."""

GROUP_WORDS = (
    "The groups whose ECE is furthest above its noise floor, the expected value of a calibrated model at their size. "
    "p is that of a calibrated group, adjusted for the number of groups (Benjamini-Hochberg). "
    "Shrunk is the error without noise, shrunk to the mean of all groups in proportion to its uncertainty "
    "(empirical Bayes)."
)
"""Explanation of the groups of a report."""

RCL_SOURCE = "[EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2."
"""Source of the relative calibration loss."""


def explanations(report: "Report") -> list[str]:
    """Return explanations of the columns and groups of `line_table`."""
    has_evidence = any(line.p_value is not None for line in report.lines)
    has_intervals = any(line.interval for line in report.lines)
    return [NAIVE_WORDS, CONFIDENCE_WORDS, *[EVIDENCE_WORDS] * has_evidence, *[INTERVAL_WORDS] * has_intervals]


def sources_of(results: "Results[Any]") -> list[str]:
    """Return all cited sources, in the order of their numbers."""
    cited = [line.source for line in results.lines if line.source]
    if getattr(results, "calibration", None) is not None:
        cited.append(RCL_SOURCE)
    return list(dict.fromkeys(cited))


def event_name(results: "Results[Any]", mode: NamedMode) -> str:
    """Return the name of a kind of confidence, with that of the positive class if it is known."""
    if mode == "positive":
        return "positive class" + (f" ({printable(results.class_names[-1])})" if results.class_names else "")
    return "top label" if mode == "top_label" else "all labels pooled"


def input_line(results: "Results[Any]") -> str:
    """Return one line on the input: task, number of samples, classes and bins."""
    task = f"{results.task}{' (inferred from the shapes)' if results.task_is_inferred else ''}"
    dropped = f" ({results.n_dropped:,} left out for NaN)" if results.n_dropped else ""
    outputs = f"{results.num_classes} {'labels' if results.task == 'multilabel' else 'classes'}"
    if results.settings.get("kind") == "confidence":
        return f"confidence in predictions, n = {count(results.n)}{dropped}, {_bins_in_words(results.settings)}"
    return f"{task}, n = {count(results.n)}{dropped}, {outputs}, {_bins_in_words(results.settings)}"


def facts(results: "Results[Any]", source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return source, input and settings as pairs of a name and words."""
    settings = dict(results.settings)
    is_multilabel = results.task == "multilabel"
    found = [(str(key).replace("_", " "), formatted(value)) for key, value in source.items()]
    found.append(("task", f"{results.task}{', inferred from the shapes' if results.task_is_inferred else ''}"))
    found.append(("labelled entries" if is_multilabel else "samples", count(results.n)))
    if settings.pop("nan_policy", "raise") == "drop" or results.n_dropped:
        found.append(("left out for NaN", count(results.n_dropped)))
    kind = "labels" if is_multilabel else "classes"
    found.append((kind, count(results.num_classes)))
    if results.class_names:
        found.append((f"names of {kind}", formatted([printable(name) for name in results.class_names])))
    if priors := getattr(results, "priors", ()):
        low, high = percent(min(priors)), percent(max(priors))
        share = "share of 1s, by label" if is_multilabel else "share, by class"
        found.append((share, f"{low} each" if low == high else f"{low} to {high}"))
    found.append(("bins", _bins_in_words(settings)))
    for key, value in settings.items():
        if value is not None and key not in ("n_bins", "right"):
            found.append((str(key).replace("_", " "), formatted(value)))
    return found


def formatted(value: Any, most: int = 5) -> str:
    """Format a setting; a long list by its first items."""
    if value is None or value == [] or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{str(key).replace('_', ' ')} {formatted(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        more = [f"and {len(value) - most} more"] if len(value) > most else []
        return ", ".join([formatted(item) for item in value[:most]] + more)
    return str(value)


def _bins_in_words(settings: Mapping[str, Any]) -> str:
    """Return number and kind of the bins."""
    return f"{count(settings['n_bins'])} equal-width bins {'(a, b]' if settings.get('right') else '[a, b)'}"


def line_table(report: "Report") -> Table:
    """Return every line of a report."""
    columns = [
        _name_column(),
        Column("value", lambda line: number(line.value, "main")),
        Column("noise floor", lambda line: number(line.noise_floor)),
        _interval_column(lambda line: line.interval),
        Column("p", lambda line: p_value(line.p_value), is_number=False, data={"p_value": lambda line: line.p_value}),
        Column("perfect", lambda line: short(line.perfect), shown="wide"),
        Column("naive", lambda line: short(line.naive)),
        *_about(report),
    ]
    return Table.of(columns, _by_group(report.lines), index=["key"])


def _name_column() -> Column:
    """Return the column of the names of lines; a DataFrame has their keys, too."""
    data = {"key": attrgetter("key"), "name": attrgetter("name")}
    return Column("name", lambda line: Cell(line.name), is_number=False, data=data)


def _interval_column(of: Callable[[Any], Any], prefix: str = "") -> Column:
    """Return the column of an interval of a line; a DataFrame has its ends."""

    def end(line: Any, name: str) -> float:
        found = of(line)
        return math.nan if found is None else float(getattr(found, name))

    data = {f"{prefix}{name}": partial(end, name=name) for name in ("low", "high")}
    return Column("95 % interval", lambda line: interval(of(line)), is_number=False, data=data)


def difference_table(comparison: "Comparison", *names: str) -> Table:
    """Return every line of the baseline and of other systems, and their differences to the baseline.

    Args:
        comparison: of several systems.
        *names: the other systems; with more than one, each has its own columns.
    """
    first = comparison.baseline
    columns = [_name_column(), _value_column(first)]
    for name in names:
        columns += [_value_column(name), *_difference_columns(first, name, alone=len(names) == 1)]
    columns += [Column("better is", lambda line: Cell(line.better), is_number=False, shown="page"), *_about(comparison)]
    title = f"{listed([printable(name) for name in names])} against {printable(first)}"
    return Table.of(columns, _by_group(comparison.lines), title, index=["key"])


def _value_column(system: str) -> Column:
    """Return the column of the values of a system."""
    return Column(
        printable(system),
        lambda line: number(line.values[system]),
        wraps=True,
        data={system: lambda line: line.values[system]},
    )


def _difference_columns(first: str, name: str, alone: bool) -> list[Column]:
    """Return the columns of the difference of a system to the first one, with both names unless it is alone."""
    header = "difference" if alone else f"{printable(name)} − {printable(first)}"

    def difference(line: Any) -> Cell:
        value = line.differences[name].value
        return Cell(significant(value), value, f"{round(value, 6) + 0:+.6f}", "main")

    def verdict(line: Any) -> Cell:
        found = line.differences[name]
        if found.interval is None:
            return Cell()
        return Cell(found.verdict, style="quiet" if found.verdict == "not told apart" else found.verdict)

    key = f"{name} - {first}"
    return [
        Column(header, difference, data={key: lambda line: line.differences[name].value}),
        _interval_column(lambda line: line.differences[name].interval, f"{key}: "),
        Column("verdict", verdict, is_number=False, data={f"{key}: verdict": lambda line: verdict(line).text}),
    ]


def _by_group(lines: Iterable[Any]) -> dict[str, list[Any]]:
    """Return lines by their group."""
    return {group: list(some) for group, some in groupby(lines, attrgetter("group"))}


def _about(results: "Results[Any]") -> list[Column]:
    """Return the columns that explain a line."""
    sources = sources_of(results)

    def source(line: "Quantity") -> Cell:
        place = sources.index(line.source) + 1 if line.source else 0
        return Cell(f"[{place}]", link=f"source-{place}") if place else Cell()

    return [
        Column("unit", lambda line: Cell(line.unit), is_number=False, shown="wide"),
        Column("question", lambda line: Cell(line.question, style="question"), is_number=False, shown="page"),
        Column("source", source, is_number=False, shown="page", data={"source": attrgetter("source")}),
    ]


def gain_table(stage: "CalibrationStage") -> Table:
    """Return the scores before and after calibration by each calibrator."""
    sections = {
        score: [
            (score, "none", raw, None),
            *((score, found.calibrator, found.value, found.rcl) for found in stage.gains if found.score == score),
        ]
        for score, raw in stage.raw.items()
    }

    def bar(row: tuple[str, str, float, float | None]) -> Cell:
        longest = max((value for _, _, value, _ in sections[row[0]] if math.isfinite(value)), default=0) or 1
        return Cell(style="bar", bar=100 * row[2] / longest if math.isfinite(row[2]) else math.inf)

    columns = [
        Column("calibrator", lambda row: Cell(row[1]), is_number=False),
        Column("score", lambda row: number(row[2]), data={"value": lambda row: row[2]}),
        Column("gain", lambda row: Cell() if row[3] is None else Cell(gain(row[3]), row[3], style="main")),
        Column("shorter is better", bar, is_number=False, shown="page", data={}),
    ]
    title = f"Cross-validated gain of a calibration stage, {stage.n_folds} folds"
    return Table.of(columns, sections, title, heading_name="score")


def class_table(report: "Report", most: int | None = None) -> Table | None:
    """Return classes by their class-wise ECE, the largest first and undefined ones last; None for a binary task.

    Args:
        report: of any task.
        most: number of classes; None for all.
    """
    if not report.per_class:
        return None
    kind, members, ones = ("label", "labels", "1s") if report.task == "multilabel" else ("class", "classes", "samples")
    names = report.class_names or tuple(map(str, range(len(report.per_class))))
    order = sorted(enumerate(report.per_class), key=lambda item: math.inf if math.isnan(item[1]) else -item[1])
    columns = [
        Column(
            kind,
            lambda row: Cell(printable(names[row[0]]), style="name" if report.class_names else ""),
            is_number=not report.class_names,
            wraps=bool(report.class_names),
            data={kind: lambda row: names[row[0]] if report.class_names else row[0]},
        ),
        Column(
            f"share of {ones}",
            lambda row: Cell(percent(report.priors[row[0]])),
            data={"share": lambda row: report.priors[row[0]]},
        ),
        Column("ECE", lambda row: number(row[1]), data={"ece": itemgetter(1)}),
    ]
    title = f"{kind.capitalize()} by {kind}"
    if most is not None and len(order) > most:
        title = f"The {most} of {count(len(order))} {members} with the largest error"
    return Table.of(columns, {"": order[:most]}, title, is_wide=False, index=[kind])
