"""Tables and explanations of reports and comparisons, which pages, terminals and `str` show alike."""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchcalib.core.bins import BinTable, TCETable
from torchcalib.inference.words import count, decimals, edge, gain, p_words, percent, significant
from torchcalib.io.errors import printable
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting.monitoring.history import History
from torchcalib.reporting.tables import (
    Cell,
    Column,
    Table,
    fraction,
    interval,
    number,
    p_value,
    short,
)

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


def input_line(results: "Results[Any]") -> str:
    """Return one line on the input: task, number of samples, classes and bins."""
    dropped = f" ({results.n_dropped:,} left out for NaN)" if results.n_dropped else ""
    outputs = f"{results.num_classes} {'labels' if results.task == 'multilabel' else 'classes'}"
    if results.settings.get("kind") == "confidence":
        return f"confidence in predictions, n = {count(results.n)}{dropped}, {_bins_in_words(results.settings)}"
    return f"{results.task}, n = {count(results.n)}{dropped}, {outputs}, {_bins_in_words(results.settings)}"


def facts(results: "Results[Any]", source: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return source, input and settings as pairs of a name and words."""
    settings = dict(results.settings)
    is_multilabel = results.task == "multilabel"
    found = [(str(key).replace("_", " "), formatted(value)) for key, value in source.items()]
    found.append(("task", results.task))
    found.append(("labelled entries" if is_multilabel else "samples", count(results.n)))
    if settings.pop("nan_policy", "raise") == "drop" or results.n_dropped:
        found.append(("left out for NaN", count(results.n_dropped)))
    found.append(("labels" if is_multilabel else "classes", count(results.num_classes)))
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
        Column("name", lambda line: Cell(line.name), is_number=False),
        Column("value", lambda line: number(line.value, "main")),
        Column("noise floor", lambda line: number(line.noise_floor)),
        Column("95 % interval", lambda line: interval(line.interval), is_number=False),
        Column("p", lambda line: p_value(line.p_value), is_number=False),
        Column("perfect", lambda line: short(line.perfect), shown="wide"),
        Column("naive", lambda line: short(line.naive)),
        *_about(report),
    ]
    return Table.of(columns, _by_group(report.lines))


def difference_table(comparison: "Comparison", name: str) -> Table:
    """Return every line of two systems, the baseline and another one, and their difference."""
    first = comparison.baseline

    def difference(line: Any) -> Cell:
        value = line.differences[name].value
        return Cell(significant(value), value, f"{round(value, 6) + 0:+.6f}", "main")

    def verdict(line: Any) -> Cell:
        found = line.differences[name]
        if found.interval is None:
            return Cell()
        return Cell(found.verdict, style="quiet" if found.verdict == "not told apart" else found.verdict)

    columns = [
        Column("name", lambda line: Cell(line.name), is_number=False),
        Column(printable(first), lambda line: number(line.values[first]), wraps=True),
        Column(printable(name), lambda line: number(line.values[name]), wraps=True),
        Column("difference", difference),
        Column("95 % interval", lambda line: interval(line.differences[name].interval), is_number=False),
        Column("verdict", verdict, is_number=False),
        Column("better is", lambda line: Cell(line.better), is_number=False, shown="page"),
        *_about(comparison),
    ]
    return Table.of(columns, _by_group(comparison.lines), f"{printable(name)} against {printable(first)}")


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
        Column("source", source, is_number=False, shown="page"),
    ]


def bin_table(table: BinTable, title: str = "") -> Table:
    """Return the bins of a reliability diagram."""

    def band(row: Mapping[str, float]) -> Cell:
        low, high = row["band_low"], row["band_high"]
        return Cell() if math.isnan(low) else Cell(f"{decimals(low)} to {decimals(high)}")

    columns = [
        Column("bin", lambda row: Cell(f"{edge(row['lower'])} to {edge(row['upper'])}"), is_number=False),
        Column("count", lambda row: Cell(count(row["n"]))),
        Column("share", lambda row: Cell(percent(row["share"]))),
        Column("mean confidence", _unless_empty(lambda row: fraction(row["confidence"]))),
        Column("frequency", _unless_empty(lambda row: fraction(row["frequency"]))),
        Column("if calibrated, 95 %", _unless_empty(band), shown="page"),
        Column("gap", _unless_empty(lambda row: fraction(row["gap"], "+"))),
        Column("mean ECD (nats)", _unless_empty(lambda row: fraction(row["ecd"], "+"))),
    ]
    return Table.of(columns, {"": _rows(table)}, title, is_quiet=lambda row: not row["n"])


def tested_table(table: TCETable) -> Table:
    """Return the bins of a test-based reliability diagram."""
    columns = [
        Column("bin", lambda row: Cell(f"{significant(row['lower'])} to {significant(row['upper'])}"), is_number=False),
        Column("count", lambda row: Cell(count(row["n"]))),
        Column("mean prediction", _unless_empty(lambda row: short(row["confidence"]))),
        Column("empirical probability", _unless_empty(lambda row: short(row["frequency"]))),
        Column("rejected", _unless_empty(lambda row: Cell(count(row["rejected"])))),
        Column("share rejected", _unless_empty(lambda row: Cell(percent(row["rejected"] / row["n"])))),
    ]
    return Table.of(columns, {"": _rows(table)}, is_quiet=lambda row: not row["n"])


def _unless_empty(cell: Callable[[Any], Cell]) -> Callable[[Any], Cell]:
    """Return a function that leaves cells of bins without data empty."""
    return lambda row: cell(row) if row["n"] else Cell()


def _rows(table: BinTable) -> list[dict[str, float]]:
    """Return one dictionary for each bin."""
    columns = {name: values.tolist() for name, values in table.to_dict().items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


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
        Column("score", lambda row: number(row[2])),
        Column("gain", lambda row: Cell() if row[3] is None else Cell(gain(row[3]), row[3], style="main")),
        Column("shorter is better", bar, is_number=False, shown="page"),
    ]
    return Table.of(columns, sections, f"Cross-validated gain of a calibration stage, {stage.n_folds} folds")


def group_table(table: GroupTable, longest_name: int) -> Table:
    """Return the worst groups, with names of at most so many letters."""
    rows = [{**row, "name": name} for name, row in zip(table.shown_names(longest_name), table.rows(), strict=True)]
    columns = [
        Column("group", lambda row: Cell(row["name"], style="name"), is_number=False, wraps=True),
        Column("n", lambda row: Cell(count(row["n"]))),
        Column("ECE", lambda row: fraction(row["value"])),
        Column("noise floor", lambda row: fraction(row["noise_floor"])),
        Column("p", lambda row: Cell(p_words(row["p_value"]))),
        Column("shrunk", lambda row: fraction(row["shrunk"])),
        Column("", lambda row: Cell("within chance" if row["by_chance"] else ""), is_number=False),
    ]
    of_all = f"The {len(table)} worst of {count(table.n_groups)} groups"
    title = of_all if len(table) < table.n_groups else "Groups, the worst first"
    return Table.of(columns, {"": rows}, title, is_wide=False, is_quiet=lambda row: row["by_chance"])


def class_table(report: "Report") -> Table | None:
    """Return the classes with the largest class-wise ECE, undefined values last; None for a binary task."""
    if not report.per_class:
        return None
    kind, members, ones = ("label", "labels", "1s") if report.task == "multilabel" else ("class", "classes", "samples")
    order = sorted(enumerate(report.per_class), key=lambda item: math.inf if math.isnan(item[1]) else -item[1])
    columns = [
        Column(kind, lambda row: Cell(str(row[0]))),
        Column(f"share of {ones}", lambda row: Cell(percent(report.priors[row[0]]))),
        Column("ECE", lambda row: number(row[1])),
    ]
    title = f"{kind.capitalize()} by {kind}"
    if len(order) > WORST_CLASSES:
        title = f"The {WORST_CLASSES} of {count(len(order))} {members} with the largest error"
    return Table.of(columns, {"": order[:WORST_CLASSES]}, title, is_wide=False)


def history_table(history: History) -> Table:
    """Return every validation of a training."""

    def column(name: str) -> Column:
        return Column(name, lambda row: fraction(row.values.get(name, math.nan)))

    columns = [Column(history.unit, lambda row: Cell(str(getattr(row, history.unit)))), *map(column, history.names)]
    return Table.of(columns, {"": history.rows})
