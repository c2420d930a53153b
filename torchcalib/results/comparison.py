"""`Comparison`: several systems on the same targets, as data with methods to print, export and save them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from typing import Any, ClassVar, Literal

from torchcalib.display.tables import Cell, Column, Table, number, p_value, to_text
from torchcalib.display.words import ONE_LOOK, ends, listed, p_words, printable, printable_lines, rounded, significant
from torchcalib.io.errors import short_name
from torchcalib.results.base import Results
from torchcalib.results.lines import (
    ComparedLine,
    Difference,
    Verdict,
    by_group,
    explanation_columns,
    interval_column,
    is_significant,
    name_column,
)


@dataclass(frozen=True, kw_only=True)
class PairedRows:
    """Numbers of rows of a system and the baseline, joined by their ids.

    Attributes:
        common: number of rows of both.
        only: number of rows of the system that the baseline does not have.
        only_baseline: number of rows of the baseline that the system does not have.
        is_exact: False for estimates, if a system has more than 100,000 rows.
    """

    common: int
    only: int
    only_baseline: int
    is_exact: bool = True

    def in_words(self, name: str, baseline: str) -> str:
        """Return the numbers as a sentence."""
        name, baseline = short_name(name, _NAME_LENGTH), short_name(baseline, _NAME_LENGTH)
        about = "" if self.is_exact else "about "
        counts = [f"{name} and {baseline} have {f'{about}{self.common:,}' if self.common else 'no'} common rows by id"]
        counts += [f"{n:,} only in {each}" for n, each in ((self.only, name), (self.only_baseline, baseline)) if n]
        remedy = (
            "" if self.common else " They are compared as independent samples. Check that equal rows have equal ids."
        )
        return f"{', '.join(counts)}.{remedy}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Comparison(Results[ComparedLine]):
    """Scores and calibration errors of several systems on the same targets, and their differences.

    `torchcalib.compare` creates it. Print it, show it in a notebook, or look up a line by key:
    `comparison["nll"].differences["b"].value`. `save` writes files, and `to_pandas`, `to_markdown`, `to_latex` and
    `to_dict` export the lines.

    Attributes:
        task, n, num_classes, settings, notes, version, created, class_names, task_is_inferred: see `Results`. With ids,
            n is that of the baseline.
        n_dropped: number of rows dropped from all systems because a prediction or target is NaN. With ids, they are
            dropped from a single system.
        lines: one entry for each score and calibration error; see `ComparedLine`.
        systems: names of the systems, the baseline first.
        sentences: the main findings as text, by name of each system except the baseline.
        sources: origin of the predictions, such as files, by system name.
        rows: numbers of common rows with the baseline, by name of each other system; empty without ids.
    """

    file_name: ClassVar[str] = "compare.json"

    lines: tuple[ComparedLine, ...]
    systems: tuple[str, ...]
    sentences: Mapping[str, str]
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: Mapping[str, PairedRows] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """Name of the first system, with which all other systems are compared."""
        return self.systems[0]

    @property
    def verdict(self) -> str:
        """Verdict on the second system, or the numbers of better and worse systems, as a sentence without full stop."""
        first, others = short_name(self.baseline), self.systems[1:]
        better, worse = systems_that_are("better", self), systems_that_are("worse", self)
        if len(others) == 1 and not better and not worse:
            return f"{short_name(others[0])} and {first} do not differ significantly in calibration"
        if len(others) == 1:
            return f"{short_name(others[0])} is {'better' if better else 'worse'} calibrated than {first}"
        if worse and not better:
            return f"{len(worse)} of {len(others)} systems are worse calibrated than {first}"
        also = f", {len(worse)} worse" if worse else ""
        return f"{len(better)} of {len(others)} systems are better calibrated than {first}{also}"

    @property
    def caution(self) -> str:
        """Text on multiple comparisons or missing intervals, to show below the tables."""
        n = sum(difference.interval is not None for line in self.lines for difference in line.differences.values())
        if not n:
            return "Without intervals, the significance of differences is unknown."
        return (
            "Intervals, p-values and the verdicts beside them are those of single metrics, chosen in advance: if no "
            f"system differed, up to {max(1, round(0.05 * n))} of {n} p-values would be at most 0.05, on average. "
            f"Adjusted p-values account for all {n} differences: the probability that one or more of them would be at "
            f"most 0.05 is at most 5%. {ONE_LOOK}"
        )

    @property
    def main_lines(self) -> tuple[ComparedLine, ...]:
        """Scores, and calibration errors of the main mode. `difference_plot` draws only these lines."""
        groups = list(dict.fromkeys(line.group for line in self.lines))[:2]
        return tuple(line for line in self.lines if line.group in groups)

    @property
    def input_line(self) -> str:
        """Description of the input, with the numbers of common rows."""
        return " ".join([f"{super().input_line}{'.' if self.rows else ''}", *self.rows_in_words])

    @property
    def rows_in_words(self) -> list[str]:
        """Numbers of common rows, a sentence for each system except the baseline; empty without ids."""
        return [pair.in_words(name, self.baseline) for name, pair in self.rows.items()]

    def layout(self) -> Table:
        """Return the table of all scores and calibration errors, with columns for each system."""
        return difference_table(self, *self.systems[1:])

    def _entry(self, line: ComparedLine) -> ComparedLine:
        return line

    def _repr_html_(self) -> str:
        words = [*self.sentences.values(), self.input_line]
        return "\n".join([*(f"<p>{escape(printable(text))}</p>" for text in words), super()._repr_html_()])

    def __str__(self) -> str:
        tables = [to_text(difference_table(self, name)) for name in self.systems[1:]]
        notes = "\n".join([self.caution, *self.notes])
        return printable_lines("\n\n".join([" ".join(self.sentences.values()), *tables, notes]))


def systems_that_are(verdict: Verdict, comparison: Comparison) -> list[str]:
    """Return the names of the systems that are significantly better or worse calibrated than the baseline."""
    differences = comparison["ece"].differences
    return [name for name in comparison.systems[1:] if differences[name].verdict == verdict]


def compared_verdict(comparison: Comparison, name: str) -> str:
    """Return the significant differences of a system from the baseline in ECE and NLL, in few words."""
    if name == comparison.baseline:
        return "baseline"
    words = []
    for line, what in ((comparison.line("ece"), "calibrated"), (comparison.line("nll"), "NLL")):
        if line is not None and line.differences[name].verdict != "not significant":
            words.append(f"{line.differences[name].verdict} {what}")
    if words:
        return ", ".join(words)
    has_intervals = any(line.differences[name].interval is not None for line in comparison.lines)
    return "no significant difference" if has_intervals else "significance unknown"


def direction_of(comparison: Comparison, name: str) -> str:
    """Return whether the mean prediction of a system is too high or too low; empty unless this is significant.

    It is significant if the 95% interval of the expected signed calibration error does not contain 0.
    """
    line = comparison.line("esce")
    interval = None if line is None else line.intervals[name]
    if interval is None or interval.low <= 0 <= interval.high:
        return ""
    if line.key.endswith("top_label"):
        return "under-confident" if interval.low > 0 else "over-confident"
    return f"probabilities too {'low' if interval.low > 0 else 'high'}"


def system_table(comparison: Comparison) -> Table:
    """Return the table of the main values of all systems: verdict, ECE and NLL with their differences, accuracy."""

    def values(line: ComparedLine, shown: Literal["always", "page"]) -> list[Column]:
        """Return the columns of values, and of differences from the baseline with their intervals."""

        def difference(name: str) -> Cell:
            found = line.differences.get(name)
            if found is None:
                return Cell()
            if found.interval is None or found.beyond_chance is None:
                return number(found.value)
            return Cell(f"{significant(found.beyond_chance)} ({found.interval})", found.beyond_chance)

        has_chance = any(each.chance is not None for each in line.differences.values())
        header = f"{line.name} difference{' beyond chance' if has_chance else ''} (95% interval)"
        return [
            Column(line.name, lambda name: number(line.values[name])),
            Column(header, difference, is_number=False, shown=shown),
        ]

    def name_cell(name: str) -> Cell:
        return Cell(short_name(name), style="name")

    columns = [
        Column("system", name_cell, is_number=False, wraps=True, data={"system": str}),
        Column("verdict", lambda name: Cell(compared_verdict(comparison, name)), is_number=False, wraps=True),
    ]
    for key in ("ece", "nll", "accuracy"):
        if (line := comparison.line(key)) is not None:
            columns += values(line, "always" if key == "ece" else "page")
    return replace(Table.from_items(columns, {"": comparison.systems}, index=["system"]), is_stacked=True)


def difference_table(comparison: Comparison, *names: str) -> Table:
    """Return the table of scores and errors of the baseline and the systems `names`, with their differences."""
    first = comparison.baseline
    columns = [name_column(), _value_column(first)]
    for name in names:
        columns += [_value_column(name), *_difference_columns(first, name, alone=len(names) == 1)]
    columns += [
        Column("better is", lambda line: Cell(line.better), is_number=False, shown="page"),
        *explanation_columns(comparison.publications),
    ]
    title = f"{listed([short_name(name) for name in names])} compared with {short_name(first)}"
    return Table.from_items(columns, by_group(comparison.lines), title, index=["key"])


def _value_column(system: str) -> Column:
    return Column(
        short_name(system),
        lambda line: number(line.values[system]),
        wraps=True,
        data={system: lambda line: line.values[system]},
    )


def _difference_columns(first: str, name: str, alone: bool) -> list[Column]:
    """Return the columns of the difference `name` - `first`. Headers contain the names unless it is `alone`."""
    key = f"{name} - {first}"

    def of(attribute: str) -> Callable[[Any], Any]:
        return lambda line: getattr(line.differences[name], attribute)

    def column(header: str, attribute: str, cell: Callable[[Any], Cell], data: str = "", **options: Any) -> Column:
        value = of(attribute)
        return Column(header, lambda line: cell(value(line)), data={data or f"{key}: {attribute}": value}, **options)

    def verdict(line: Any) -> str:
        found = line.differences[name]
        return "" if found.interval is None else str(found.verdict)

    def verdict_cell(line: Any) -> Cell:
        text = verdict(line)
        return Cell(text, style="quiet" if text == "not significant" else text)

    header = "difference" if alone else f"{short_name(name)} − {short_name(first)}"
    return [
        column(header, "value", number, data=key, shown="wide"),
        column("by chance", "chance", number, shown="wide"),
        column("beyond chance", "beyond_chance", partial(number, style="main")),
        interval_column(of("interval"), f"{key}: "),
        column("p", "p_value", p_value, is_number=False),
        column("adjusted p", "adjusted_p_value", p_value, is_number=False, shown="wide"),
        Column("verdict", verdict_cell, is_number=False, data={f"{key}: verdict": verdict}),
    ]


_SCORES = ("Accuracy", "NLL", "Brier score")
"""Names of the scores in the sentences of a comparison."""

_NAME_LENGTH = 60  # largest number of characters of the name of a system
_ROUNDING = 2.0**-23  # rounding error of float32; the hypotheses of tests contain differences of this size


def comparison_sentence(lines: Sequence[ComparedLine], first: str, second: str) -> str:
    """Return sentences on the difference in ECE between two systems, and on the differences of scores."""
    ece = next(line for line in lines if line.name == "ECE").differences[second]
    scores = {line.name: line.differences[second] for line in lines if line.name in _SCORES}
    first, second = short_name(first, _NAME_LENGTH), short_name(second, _NAME_LENGTH)
    error = f"the ECE of {second} is {_in_words(ece)}"
    if ece.interval is None:
        sentences = [f"The calibration of {second} and {first} cannot be compared: {error}, without an interval"]
    elif ece.verdict == "not significant":
        sentences = [f"The calibration of {second} and {first} does not differ significantly: {error}"]
    else:
        sentences = [f"{second} is {ece.verdict} calibrated than {first}: {error}"]
    for verdict in ("better", "worse"):
        names = [f"{name} ({_in_words(d, ', {}')})" for name, d in scores.items() if d.verdict == verdict]
        sentences += [f"It is {verdict} in {listed(names)}"] if names else []
    undecided = [name for name, d in scores.items() if d.verdict == "not significant" and d.interval]
    sentences += [f"There is no significant difference in {listed(undecided)}"] if undecided else []
    return ". ".join(sentences) + "."


def _in_words(difference: Difference, evidence: str = " ({})") -> str:
    """Return a text such as `"lower by 0.012 (95% interval 0.008 to 0.016, p = 0.005)"`.

    Errors are followed by the difference beyond chance, to which the interval belongs. The adjusted p-value is added if
    only p is at most 0.05.
    """
    if math.isnan(difference.value):
        return "undefined"
    value = difference.value if abs(difference.value) > _ROUNDING else 0.0
    side = "higher" if value > 0 else "lower"
    words = f"{side} by {abs(value):.3g}" if value else "equal"
    if math.isinf(value):
        words = f"infinitely {side}"
    interval, p, adjusted = difference.interval, difference.p_value, difference.adjusted_p_value
    if interval is None or p is None or max(value, interval.high) - min(value, interval.low) <= _ROUNDING:
        return words
    bounds = (interval.low, interval.high)
    if difference.beyond_chance is not None and difference.chance is not None:
        words += f"; the difference beyond chance is {rounded(difference.beyond_chance)}"
    elif value < 0:
        bounds = (-interval.high, -interval.low)
    found = "" if math.isinf(value) else f"95% interval {ends(*bounds)}, "
    found += f"p {p_words(p, '= ')}"
    if adjusted is not None and is_significant(p) and not is_significant(adjusted):
        found += f", adjusted p {p_words(adjusted, '= ')}"
    return words + evidence.format(found)
