"""Tables and explanations of reports and comparisons, which pages, terminals and `str` show alike."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torchcalib.core.bins import BinTable, TCETable
from torchcalib.inference.words import count, edge, gain, p_words, percent, significant
from torchcalib.io.reader import printable
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting.monitoring.history import History
from torchcalib.reporting.tables import (
    Cell,
    Column,
    Row,
    Section,
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

_EXPLANATIONS = {
    "scores": "means over the data",
    "positive class": "confidence is the probability of y = 1",
    "top label": "confidence is the largest probability of a sample",
    "class-wise": "each class or label separately, then the mean over them",
}
"""Explanations of groups of lines; other groups have none."""


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
    has_evidence = any(line.p_value is not None for line in report.lines)
    has_intervals = any(line.interval for line in report.lines)
    evidence = [Column("noise floor")] * has_evidence
    p_column = [Column("p", is_number=False)] * has_evidence
    intervals = [Column("95 % interval", is_number=False)] * has_intervals
    columns = [
        Column("name", is_number=False),
        Column("value"),
        *evidence,
        *intervals,
        *p_column,
        Column("perfect", shown="wide"),
        Column("naive"),
        *_about_columns(),
    ]
    sources = sources_of(report)

    def row(line: Any) -> Row:
        floor = [number(line.noise_floor)] * has_evidence
        ends = [interval(line.interval)] * has_intervals
        p = [p_value(line.p_value)] * has_evidence
        cells = [Cell(line.name), number(line.value, "main"), *floor, *ends, *p, short(line.perfect), short(line.naive)]
        return Row([*cells, *_about(line, sources)])

    return Table(columns, _by_group(report.lines, row))


def difference_table(comparison: "Comparison", name: str) -> Table:
    """Return every line of two systems, the baseline and another one, and their difference."""
    first, sources = comparison.baseline, sources_of(comparison)
    columns = [
        Column("name", is_number=False),
        Column(printable(first), wraps=True),
        Column(printable(name), wraps=True),
        Column("difference"),
        Column("95 % interval", is_number=False),
        Column("verdict", is_number=False),
        Column("better is", is_number=False, shown="page"),
        *_about_columns(),
    ]

    def row(line: Any) -> Row:
        found = line.differences[name]
        told = found.verdict != "not told apart"
        cells = [
            Cell(line.name),
            number(line.values[first]),
            number(line.values[name]),
            Cell(significant(found.value), found.value, f"{round(found.value, 6) + 0:+.6f}", "main"),
            interval(found.interval),
            Cell(found.verdict if found.interval else "", style=found.verdict if told else "quiet"),
            Cell(line.better),
        ]
        return Row([*cells, *_about(line, sources)])

    return Table(columns, _by_group(comparison.lines, row), f"{printable(name)} against {printable(first)}")


def _by_group(lines: Iterable[Any], row: Any) -> list[Section]:
    """Return sections of lines of equal groups."""
    return [
        Section([row(line) for line in some], group, _EXPLANATIONS.get(group, ""))
        for group, some in groupby(lines, attrgetter("group"))
    ]


def _about_columns() -> list[Column]:
    """Return the columns of `_about`."""
    return [
        Column("unit", is_number=False, shown="wide"),
        Column("question", is_number=False, shown="page"),
        Column("source", is_number=False, shown="page"),
    ]


def _about(line: "Quantity", sources: Sequence[str]) -> list[Cell]:
    """Return the cells that explain a quantity."""
    place = sources.index(line.source) + 1 if line.source else 0
    source = Cell(f"[{place}]", link=f"source-{place}") if place else Cell()
    return [Cell(line.unit), Cell(line.question, style="question"), source]


def bin_table(table: BinTable, title: str = "") -> Table:
    """Return the bins of a reliability diagram."""
    has_band = not bool(table.band_low.isnan().all())
    columns = [
        Column("bin", is_number=False),
        Column("count"),
        Column("share"),
        Column("mean confidence"),
        Column("frequency"),
        *[Column("if calibrated, 95 %", shown="page")] * has_band,
        Column("gap"),
        Column("mean ECD (nats)"),
    ]

    def row(found: Mapping[str, float]) -> Row:
        cells = [Cell(f"{edge(found['lower'])} to {edge(found['upper'])}"), Cell(count(found["n"]), found["n"])]
        cells.append(Cell(percent(found["share"])))
        if not found["n"]:
            return _empty(cells, len(columns))
        means = [fraction(found["confidence"]), fraction(found["frequency"])]
        band = [Cell(" to ".join(fraction(found[end]).page for end in ("band_low", "band_high")))] * has_band
        return Row([*cells, *means, *band, fraction(found["gap"], "+"), fraction(found["ecd"], "+")])

    return Table.of_rows(columns, map(row, _rows(table)), title)


def tested_table(table: TCETable) -> Table:
    """Return the bins of a test-based reliability diagram."""
    headers = ("count", "mean prediction", "empirical probability", "rejected", "share rejected")
    columns = [Column("bin", is_number=False), *map(Column, headers)]

    def row(found: Mapping[str, float]) -> Row:
        n = found["n"]
        cells = [Cell(f"{significant(found['lower'])} to {significant(found['upper'])}"), Cell(count(n), n)]
        if not n:
            return _empty(cells, len(columns))
        means = [short(found["confidence"]), short(found["frequency"])]
        return Row([*cells, *means, Cell(count(found["rejected"])), Cell(percent(found["rejected"] / n))])

    return Table.of_rows(columns, map(row, _rows(table)))


def _empty(cells: list[Cell], n_columns: int) -> Row:
    """Return the row of a bin without data."""
    rest = [Cell()] * (n_columns - len(cells) - 1)
    return Row([*cells, Cell("empty", style="quiet"), *rest], is_quiet=True)


def _rows(table: BinTable) -> list[dict[str, float]]:
    """Return one dictionary for each bin."""
    columns = {name: values.tolist() for name, values in table.to_dict().items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def gain_table(stage: "CalibrationStage") -> Table:
    """Return the scores before and after calibration by each calibrator."""
    columns = [
        Column("calibrator", is_number=False),
        Column("score"),
        Column("gain"),
        Column("shorter is better", is_number=False, shown="page"),
    ]

    def row(name: str, value: float, gained: Cell, longest: float) -> Row:
        bar = 100 * value / longest if math.isfinite(value) else math.inf
        return Row([Cell(name), number(value), gained, Cell(style="bar", bar=bar)])

    sections = []
    for score, raw in stage.raw.items():
        gains = [found for found in stage.gains if found.score == score]
        longest = max((x for x in (raw, *(found.value for found in gains)) if math.isfinite(x)), default=0) or 1
        rows = [row("none", raw, Cell(), longest)]
        for found in gains:
            gained = Cell(gain(found.rcl), found.rcl, style="main")
            rows.append(row(found.calibrator, found.value, gained, longest))
        sections.append(Section(rows, score))
    return Table(columns, sections, f"Cross-validated gain of a calibration stage, {stage.n_folds} folds")


def group_table(table: GroupTable, longest_name: int) -> Table:
    """Return the worst groups, with names of at most so many letters."""
    headers = ("n", "ECE", "noise floor", "p", "shrunk")
    columns = [Column("group", False, wraps=True), *map(Column, headers), Column("by chance", is_number=False)]

    def row(name: str, found: Mapping[str, Any]) -> Row:
        errors = [fraction(found["value"]), fraction(found["noise_floor"])]
        cells = [Cell(name, style="name"), Cell(count(found["n"])), *errors, Cell(p_words(found["p_value"]))]
        chance = Cell("within chance" if found["by_chance"] else "")
        return Row([*cells, fraction(found["shrunk"]), chance], is_quiet=found["by_chance"])

    rows = map(row, table.shown_names(longest_name), table.rows())
    of_all = f"The {len(table)} worst of {count(table.n_groups)} groups"
    title = of_all if len(table) < table.n_groups else "Groups, the worst first"
    return Table.of_rows(columns, rows, title, is_wide=False)


def class_table(report: "Report") -> Table | None:
    """Return the classes with the largest class-wise ECE, undefined values last; None for a binary task."""
    if not report.per_class:
        return None
    kind, members, ones = ("label", "labels", "1s") if report.task == "multilabel" else ("class", "classes", "samples")
    order = sorted(enumerate(report.per_class), key=lambda item: math.inf if math.isnan(item[1]) else -item[1])
    rows = [Row([Cell(str(k)), Cell(percent(report.priors[k])), number(ece)]) for k, ece in order[:WORST_CLASSES]]
    title = f"{kind.capitalize()} by {kind}"
    if len(rows) < len(order):
        title = f"The {len(rows)} of {count(len(order))} {members} with the largest error"
    return Table.of_rows([Column(kind), Column(f"share of {ones}"), Column("ECE")], rows, title, is_wide=False)


def history_table(history: History) -> Table:
    """Return every validation of a training."""
    rows = [
        Row(
            [
                Cell(str(getattr(row, history.unit))),
                *(fraction(row.values.get(name, math.nan)) for name in history.names),
            ]
        )
        for row in history.rows
    ]
    return Table.of_rows([Column(history.unit), *map(Column, history.names)], rows)
