"""Tables of reports and comparisons, for HTML pages, terminals and `str`."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from torchcalib.display.tables import Cell, Column, Table, interval, number, p_value
from torchcalib.display.words import capitalised, count, ends, gain, listed, percent, significant
from torchcalib.io.errors import printable, short_name
from torchcalib.results.contents import sources_of

if TYPE_CHECKING:
    from torchcalib.results.base import Results
    from torchcalib.results.calibration import CalibrationStage
    from torchcalib.results.comparison import Comparison
    from torchcalib.results.lines import ClassLine, Quantity
    from torchcalib.results.report import Report

WORST_CLASSES = 10
"""Number of classes in the tables of a terminal, of a notebook and of `str`."""


def line_table(report: "Report", only_main: bool = False) -> Table:
    """Return the table of all scores and calibration errors in a report.

    Args:
        report: the report.
        only_main: only the errors of the main mode that are tested, with one ECE and its debiased RMSCE.
    """
    columns = [
        _name_column(),
        Column("value", lambda line: number(line.value, "main")),
        Column(
            "expected if calibrated",
            lambda line: number(line.noise_floor),
            data={"noise_floor": lambda line: line.noise_floor},
        ),
        Column(
            "p-value", lambda line: p_value(line.p_value), is_number=False, data={"p_value": lambda line: line.p_value}
        ),
        _interval_column(lambda line: line.interval),
        Column("perfect", lambda line: number(line.perfect), shown="data"),
        Column("naive", lambda line: number(line.naive), shown="data"),
        *_explanation_columns(report),
    ]
    main = report.main_line.group
    lines = list(report.lines)
    if only_main:
        lines = [line for line in lines if line.group == main and line.noise_floor is not None]
        lines = [line for line in lines if not line.key.startswith("ece_debiased/")]
    return Table.from_items(columns, _by_group(lines), index=["key"])


def _name_column() -> Column:
    """Return the column of line names; in a DataFrame, the columns `key` and `name`."""
    data = {"key": attrgetter("key"), "name": attrgetter("name")}
    return Column("name", lambda line: Cell(line.name, tip=_tip(line)), is_number=False, data=data)


def _tip(line: Any) -> str:
    """Return the explanation of a line: what it measures, its unit, and the values of two simple predictors."""
    sentences = [f"{capitalised(line.question)}. Unit: {line.unit}."]
    sentences.append(f"A predictor that is always right and certain has the value {significant(line.perfect)}.")
    if hasattr(line, "naive") and line.group == "scores":
        sentences.append(f"Always predicting the class frequencies has the value {significant(line.naive)}.")
    return " ".join(sentences)


def _interval_column(interval_of: Callable[[Any], Any], prefix: str = "") -> Column:
    """Return the column of intervals; in a DataFrame, the columns `{prefix}low` and `{prefix}high`."""

    def end(line: Any, name: str) -> float:
        found = interval_of(line)
        return math.nan if found is None else float(getattr(found, name))

    data = {f"{prefix}{name}": partial(end, name=name) for name in ("low", "high")}
    return Column("95% interval", lambda line: interval(interval_of(line)), is_number=False, data=data)


def compared_verdict(comparison: "Comparison", name: str) -> str:
    """Return in few words how a system differs from the baseline in calibration (ECE) and in NLL.

    Differences with an adjusted p-value of at most 0.05 are named.
    """
    if name == comparison.baseline:
        return "baseline"
    words = []
    for line, what in ((comparison.line("ece"), "calibrated"), (comparison.line("nll"), "NLL")):
        if line is not None and line.differences[name].adjusted_verdict != "not significant":
            words.append(f"{line.differences[name].adjusted_verdict} {what}")
    if words:
        return ", ".join(words)
    has_intervals = any(line.differences[name].interval is not None for line in comparison.lines)
    return "no significant difference" if has_intervals else "significance unknown"


def system_table(comparison: "Comparison") -> Table:
    """Return the table of the main values of all systems: verdict, ECE and NLL with their differences, accuracy."""
    columns = [
        Column(
            "system",
            lambda name: Cell(short_name(name), style="name"),
            is_number=False,
            wraps=True,
            data={"system": str},
        ),
        Column("verdict", lambda name: Cell(compared_verdict(comparison, name)), is_number=False, wraps=True),
    ]
    for key in ("ece", "nll", "accuracy"):
        if (line := comparison.line(key)) is not None:
            columns.append(_system_column(line))
            columns.append(_difference_column(line, "always" if key == "ece" else "page"))
    return Table.from_items(columns, {"": comparison.systems}, index=["system"])


def _system_column(line: Any) -> Column:
    """Return the column of values of a line by system."""
    return Column(line.name, lambda name: number(line.values[name]))


def _difference_column(line: Any, shown_on: Literal["always", "page"]) -> Column:
    """Return the column of differences from the baseline with their intervals."""

    def shown(name: str) -> Cell:
        found = line.differences.get(name)
        if found is None:
            return Cell()
        bounds = "" if found.interval is None else f" ({ends(found.interval.low, found.interval.high, 3)})"
        return Cell(f"{significant(found.value)}{bounds}".replace("-", "−"), found.value)

    return Column(f"{line.name} difference (95% interval)", shown, is_number=False, shown=shown_on)


def difference_table(comparison: "Comparison", *names: str) -> Table:
    """Return the table of scores and errors of the baseline and other systems, with their differences.

    Args:
        comparison: the comparison.
        *names: names of the other systems. Each has columns for its value, difference, interval, p-values and verdict.
    """
    first = comparison.baseline
    columns = [_name_column(), _value_column(first)]
    for name in names:
        columns += [_value_column(name), *_difference_columns(first, name, alone=len(names) == 1)]
    columns += [
        Column("better is", lambda line: Cell(line.better), is_number=False, shown="page"),
        *_explanation_columns(comparison),
    ]
    title = f"{listed([short_name(name) for name in names])} compared with {short_name(first)}"
    return Table.from_items(columns, _by_group(comparison.lines), title, index=["key"])


def _value_column(system: str) -> Column:
    return Column(
        short_name(system),
        lambda line: number(line.values[system]),
        wraps=True,
        data={system: lambda line: line.values[system]},
    )


def _difference_columns(first: str, name: str, alone: bool) -> list[Column]:
    """Return the columns of the difference `name` - `first`: value, chance, interval, p-values and verdict.

    `alone` is True if the table contains no other differences. The header then contains no names.
    """
    header = "difference" if alone else f"{short_name(name)} − {short_name(first)}"

    def difference(line: Any) -> Cell:
        value = line.differences[name].value
        return Cell(significant(value), value, style="main")

    def verdict(line: Any) -> str:
        found = line.differences[name]
        return "" if found.interval is None else str(found.verdict)

    def verdict_cell(line: Any) -> Cell:
        text = verdict(line)
        return Cell(text, style="quiet" if text == "not significant" else text)

    def number_column(header: str, attribute: str, cell: Callable[[float | None], Cell], **options: Any) -> Column:
        def value(line: Any) -> float | None:
            found: float | None = getattr(line.differences[name], attribute)
            return found

        return Column(header, lambda line: cell(value(line)), data={f"{key}: {attribute}": value}, **options)

    key = f"{name} - {first}"
    return [
        Column(header, difference, data={key: lambda line: line.differences[name].value}),
        number_column("by chance", "chance", number, shown="page"),
        _interval_column(lambda line: line.differences[name].interval, f"{key}: "),
        number_column("p", "p_value", p_value, is_number=False),
        number_column("adjusted p", "adjusted_p_value", p_value, is_number=False),
        Column("verdict", verdict_cell, is_number=False, data={f"{key}: verdict": verdict}),
    ]


def _by_group(lines: Iterable[Any]) -> dict[str, list[Any]]:
    return {group: list(members) for group, members in groupby(lines, attrgetter("group"))}


def _explanation_columns(results: "Results[Any]") -> list[Column]:
    sources = sources_of(results)

    def source(line: "Quantity") -> Cell:
        place = sources.index(line.source) + 1 if line.source else 0
        return Cell(f"[{place}]", link=f"source-{place}") if place else Cell()

    return [
        Column("unit", lambda line: Cell(line.unit), is_number=False, shown="data"),
        Column("question", lambda line: Cell(line.question), is_number=False, shown="data"),
        Column("source", source, is_number=False, shown="page", data={"source": attrgetter("source")}),
    ]


def calibrator_table(stage: "CalibrationStage", most: int | None = None) -> Table:
    """Return the table of scores without calibration and after each calibrator, or after the `most` best ones."""
    ranked = sorted(stage.lines[1:], key=attrgetter("nll"))[:most]
    best = [line for line in stage.lines[1:] if line is stage.best or line in ranked]

    def name(line: Any) -> Cell:
        is_advised = line.calibrator == stage.recommendation.best
        return Cell(f"{line.calibrator} (advised)", style="better") if is_advised else Cell(line.calibrator)

    def accuracy(line: Any) -> Cell:
        return Cell(percent(line.accuracy), line.accuracy)

    columns = [
        Column("calibrator", name, is_number=False, data={"calibrator": attrgetter("calibrator")}),
        Column("accuracy", accuracy),
        Column("NLL", lambda line: number(line.nll), data={"nll": attrgetter("nll")}),
        Column("gain", lambda line: Cell() if line.gain is None else Cell(gain(line.gain), line.gain, style="main")),
        _interval_column(attrgetter("interval")),
        Column("Brier score", lambda line: number(line.brier_score), shown="wide"),
        Column("ECE", lambda line: number(line.ece), data={"ece": attrgetter("ece")}),
        Column("fitted parameters", lambda line: Cell(line.parameters), is_number=False, shown="page", wraps=True),
    ]
    repeats = f", mean of {stage.n_repeats} random splits" if stage.n_repeats > 1 else ""
    title = "" if most else f"Scores after calibration, {stage.n_folds}-fold cross-validation{repeats}"
    return Table.from_items(columns, {"": [stage.raw, *best]}, title, index=["calibrator"])


def class_table(report: "Report", most: int | None = None) -> Table | None:
    """Return the calibration of each class against the rest, or of each label; see `CLASS_WORDS`.

    Rows are sorted by ECE (expected calibration error) minus its noise floor, in descending order. Undefined values are
    last.

    Args:
        report: the report.
        most: maximum number of rows; None for all classes.

    Returns:
        The table; None for a binary task.
    """
    if not report.class_lines:
        return None
    kind, members = ("label", "labels") if report.task == "multilabel" else ("class", "classes")
    names = report.class_names or tuple(map(str, range(len(report.class_lines))))
    order = sorted(report.class_lines, key=lambda line: -line.excess)

    def share(key: str, value: Callable[["ClassLine"], float]) -> Column:
        header = key.replace("_", " ")
        return Column(header, lambda line: Cell(percent(value(line))), data={key: value})

    columns = [
        Column(
            kind,
            lambda line: Cell(printable(names[line.index]), style="name" if report.class_names else ""),
            is_number=not report.class_names,
            wraps=bool(report.class_names),
            data={kind: lambda line: names[line.index] if report.class_names else line.index},
        ),
        Column("count", lambda line: Cell(count(line.n)), shown="page", data={"n": attrgetter("n")}),
        share("frequency", attrgetter("frequency")),
        share("mean_probability", lambda line: line.frequency - line.gap),
        Column("ECE", lambda line: number(line.value, "main"), data={"ece": attrgetter("value")}),
        Column(
            "expected if calibrated",
            lambda line: number(line.noise_floor),
            data={"noise_floor": attrgetter("noise_floor")},
        ),
        Column("p-value", lambda line: p_value(line.p_value), is_number=False, data={"p_value": attrgetter("p_value")}),
        Column(
            "probabilities",
            lambda line: Cell(line.direction, style="quiet" if line.direction == "not significant" else ""),
            is_number=False,
            data={
                "gap": attrgetter("gap"),
                "gap_p_value": attrgetter("gap_p_value"),
                "direction": attrgetter("direction"),
            },
        ),
    ]
    title = f"Calibration by {kind}"
    if most is not None and len(order) > most:
        title = f"The {most} worst calibrated of {count(len(order))} {members}"
    return Table.from_items(columns, {"": order[:most]}, title, is_wide=False, index=[kind])
