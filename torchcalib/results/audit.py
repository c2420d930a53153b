"""Audit of a log of a language model: its calibration under each definition of the confidence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torchcalib._version import __version__
from torchcalib.display.tables import Cell, Column, Table, Tabular, number, p_value, to_text
from torchcalib.display.words import capitalised, count, listed, p_words, printable_lines, rounded, significant
from torchcalib.io.confidences import CONFIDENCES as CONFIDENCES
from torchcalib.io.errors import quoted, shown
from torchcalib.results.base import SCHEMA_VERSION, Exported, plain, today
from torchcalib.results.comparison import Comparison, system_table
from torchcalib.results.lines import Line
from torchcalib.results.report import Report

EVENTS = {
    "chosen": "the option of greatest confidence is right",
    "each": "an option is right; all options of all questions",
    "answer": "the answer is right",
    "most frequent": "the most frequent answer to a question is right",
}
"""Words for the events whose probability a confidence is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditedConfidence:
    """Calibration of a log under one definition.

    Attributes:
        source: key in `CONFIDENCES`.
        event: key in `EVENTS`.
        report: report of these confidences; None if they are degenerate.
        equal: further sources with the same confidences, such as `"choices_per_byte"` for ASCII text.
        mean: mean confidence.
        frequency: frequency of the event: the accuracy of the answers with this confidence, except for all options.
        field: field of the log that the caller named; empty for none.
        detectable: smallest ECE that a test at level 5% calls significant for these confidences: the 95% quantile of
            ECE for a calibrated model. NaN without a report.
        marks: reasons why the numbers are not what they seem, as sentences.
        scale: the rule that determined the scale of stated confidences, as a sentence.
    """

    source: str
    event: str
    report: Report | None
    equal: tuple[str, ...] = ()
    mean: float = math.nan
    frequency: float = math.nan
    field: str = ""
    detectable: float = math.nan
    marks: tuple[str, ...] = ()
    scale: str = ""

    @property
    def key(self) -> str:
        """Key in `Audit`: the source, followed by "/each" for all options."""
        return f"{self.source}/each" if self.event == "each" else self.source

    @property
    def keys(self) -> tuple[str, ...]:
        """`key`, and the keys of the definitions that have the same confidences."""
        return (self.key, *(f"{source}{self.key[len(self.source) :]}" for source in self.equal))

    @property
    def name(self) -> str:
        """Name of the confidence in tables, with those of equal ones."""
        return " = ".join(_short(CONFIDENCES[source].name, k) for k, source in enumerate((self.source, *self.equal)))

    @property
    def direction(self) -> str:
        """Sign of the mean confidence minus the frequency of the event, in words.

        Empty if both round to one number, and without a report. All options of a question are neither over- nor
        under-confident: their probabilities sum to 1.
        """
        if self.report is None or self.event == "each" or not abs(self.mean - self.frequency) >= _SMALL_GAP:
            return ""
        line = self.line("ece")
        is_significant = line is None or line.p_value is None or line.p_value < _LEVEL
        word = "over-confident" if self.mean > self.frequency else "under-confident"
        return word if is_significant else f"{word}, not significant"

    @property
    def means(self) -> str:
        """Mean confidence and frequency of the event, with the direction of their difference."""
        outcome = "frequency of the event" if self.source == "forecast" else "accuracy"
        direction = f" ({self.direction})" if self.direction else ""
        return f"mean confidence {significant(self.mean)}, {outcome} {significant(self.frequency)}{direction}"

    @property
    def happens(self) -> str:
        """Event whose probability the confidence is, in words."""
        return "the event occurs" if self.source == "forecast" else EVENTS[self.event]

    @property
    def page(self) -> str:
        """Name of the file with the page of the report."""
        return f"{self.key.replace('/', '_')}.html"

    def line(self, key: str) -> Line | None:
        """Return a line of the report by its key; None if it has none."""
        return None if self.report is None else self.report.line(key)

    def value(self, key: str) -> float:
        """Return a value of the report by its key; NaN if it has none."""
        line = self.line(key)
        return math.nan if line is None else float(line.value)

    @property
    def formula(self) -> str:
        """Definition of the confidence."""
        return CONFIDENCES[self.source].formula + (f" (field `{self.field}`)" if self.field else "")

    @property
    def definition(self) -> str:
        """Definition of the confidence, and the event whose probability it is."""
        return f"{self.formula}; event: {self.happens}"

    def card(self, n_answers: int) -> dict[str, str]:
        """Return the definition card of the numbers: what a publication must state beside them."""
        words = CONFIDENCES[self.source]
        card = {
            "confidence": self.formula,
            "scored answer": words.scored,
            "context": words.context,
        }
        card |= {"scale": self.scale} if self.scale else {}
        card["event"] = self.happens
        line = self.line("ece")
        if self.report is None or line is None:
            return card
        of_ece = self.report.definitions[line.key]
        card["ECE"] = f"{of_ece.n_bins} equal-width bins {of_ece.edges}, norm {of_ece.norm}"
        n = count(int(self.report.n))
        rows = {"each": f"{n} options", "most frequent": f"{n} questions"}
        card["n"] = rows.get(self.event, f"{n} of {count(n_answers)} answers")
        if not math.isnan(self.detectable):
            card["smallest significant ECE"] = significant(self.detectable)
        clusters = of_ece.clusters
        card["clusters"] = "none, rows are independent" if clusters is None else f"{count(clusters)} questions"
        return card


@dataclass(frozen=True, kw_only=True)
class Published:
    """Calibration error of the stated confidences as a benchmark publishes it.

    Attributes:
        benchmark: name of the benchmark.
        value: its number, in percent.
        complete: the same error of the answers with a confidence, with all bins and not rounded, in percent.
        n: number of answers in `value`.
        n_missing: number of answers without a confidence.
        deviations: differences of `value` from its definition, as sentences.
    """

    benchmark: str
    value: float
    complete: float
    n: int
    n_missing: int
    deviations: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """Both numbers and the reasons for their difference."""
        missing = f" and without {count(self.n_missing)} missing confidences" if self.n_missing else ""
        return (
            f"{self.benchmark} publishes a calibration error of {significant(self.value)}% for these {count(self.n)} "
            f"answers. With all bins{missing} it is {significant(self.complete)}%. {' '.join(self.deviations)}"
        )


class AuditResults(Exported):
    """Base class of the results of `torchcalib.audit`."""

    def save(self, path: str | Path, *, pages: bool = False) -> tuple[Path, ...]:
        """Write one file, or a folder of files. Existing files are replaced, and never left incomplete.

        Args:
            path: a file name that ends in `.html` (page), `.json` (all numbers), `.md` or `.tex` (table); for several
                logs only `.json`. Any other path is a folder for the page and the JSON file. It also contains a folder
                with the audit of each part or log, and the page of each comparison.
            pages: add a page with the report of each definition to the folder, which takes a few seconds.

        Returns:
            The paths of the written files.

        Raises:
            ImportError: if the extra `report` is not installed, for a page or a folder.
        """
        return self._save(path, pages)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Audit(AuditResults, Mapping[str, AuditedConfidence], Tabular):
    """Calibration of the answers in a log under each definition of the confidence; see `torchcalib.audit`.

    An audit is a mapping from the keys of `AuditedConfidence` to the results.

    Attributes:
        kind: program that wrote the log.
        file: name of the file.
        part: value of `by`, or the task, to which all answers belong; empty for all answers.
        chosen: filter or scorer whose answers were read; empty if the log has none.
        others: further filters or scorers of the log.
        n_answers: number of answers.
        n_documents: number of questions.
        n_options: smallest and largest number of options; (0, 0) without options.
        n_bins: number of equal-width bins of ECE.
        nll_of_truth: mean negative log-probability of the right answer, if the log contains nothing else; else NaN.
        counts: numbers of rows by finding, such as those that were left out.
        confidences: the results, in the order of the table.
        fields: names of the fields of the log by their role, in words, and of those that are not used.
        pooled: number of values of each field that names systems, such as models, whose answers are pooled.
        tasks: audits by task, if the log has several.
        notes: sentences on the log.
        published: the number of a benchmark, if `as_published` names one.
        version, created: version of torchcalib, and date as yyyy-mm-dd.
    """

    kind: str
    file: str
    chosen: str
    others: tuple[str, ...]
    n_answers: int
    n_documents: int
    n_options: tuple[int, int]
    n_bins: int
    nll_of_truth: float
    counts: Mapping[str, int]
    confidences: tuple[AuditedConfidence, ...]
    part: str = ""
    fields: Mapping[str, str] = field(default_factory=dict)
    pooled: Mapping[str, int] = field(default_factory=dict)
    tasks: AuditGroups | None = None
    notes: tuple[str, ...] = ()
    published: Published | None = None
    version: str = __version__
    created: str = field(default_factory=today)

    def __getitem__(self, key: str) -> AuditedConfidence:
        for each in self.confidences:
            if key in each.keys:
                return each
        raise KeyError(f"`key` must be one of {quoted(self) if len(self) else 'no keys'}, got {shown(key)}.")

    def __iter__(self) -> Iterator[str]:
        return (each.key for each in self.confidences)

    def __len__(self) -> int:
        return len(self.confidences)

    @property
    def clustered(self) -> bool:
        """Whether questions have several answers, which are then not independent."""
        return self.n_answers > self.n_documents

    @property
    def input_line(self) -> str:
        """Description of the log in one line."""
        parts = [f"{self.kind}: {count(self.n_answers)} answers to {count(self.n_documents)} questions"]
        low, high = self.n_options
        parts += [f"{low} options" if low == high else f"{low} to {high} options"] * bool(high)
        parts += [f"{self.chosen!r} of {listed([self.chosen, *self.others])}"] * bool(self.others)
        parts += [f"{len(self.tasks)} tasks pooled"] if self.tasks is not None else []
        parts += [f"{n} values of `{name}` pooled" for name, n in self.pooled.items()]
        return ", ".join(parts)

    @property
    def main(self) -> AuditedConfidence | None:
        """Definition that the caller chose, or the first one that is not degenerate; None without a report."""
        return next((each for each in self.confidences if each.report is not None), None)

    @property
    def report(self) -> Report | None:
        """Report of the main definition; None if no definition has one."""
        return None if self.main is None else self.main.report

    @property
    def verdict(self) -> str:
        """Verdict on the main definition in few words, with its name if there are several."""
        if self.main is None or self.report is None:
            return "Calibration cannot be measured"
        is_single = len({each.source for each in self.confidences}) == 1
        return f"{self.report.decision.verdict}{'' if is_single else f' ({self.main.name})'}"

    @property
    def sentence(self) -> str:
        """A sentence for a paper on the main definition; empty without a report."""
        each = self.main
        if each is None or each.report is None or (line := each.line("ece")) is None:
            return ""
        n = int(each.report.n)
        floor = "" if line.noise_floor is None else f", {significant(line.noise_floor)} expected if calibrated"
        p_value = "" if line.p_value is None else f", p {p_words(line.p_value, '= ')}"
        rows = f"{count(self.n_answers)} answers"
        if each.event == "each":
            rows = f"{count(n)} options of {rows}"
        elif n < self.n_answers:
            rows = f"{count(n)} of {rows}"
        rows += f" to {count(self.n_documents)} questions, which are clusters" if self.clustered else ""
        rows = f"{count(n)} questions" if each.event == "most frequent" else rows
        rows += f", {self.chosen!r}" if self.others else ""
        means = "" if each.event == "each" else f" {each.means[0].upper()}{each.means[1:]}."
        pooled = "".join(f" The {n} values of `{name}` are pooled." for name, n in self.pooled.items())
        pooled += f" {len(self.tasks)} tasks are pooled." if self.tasks is not None else ""
        return (
            f"The expected calibration error was {significant(line.value)} ({self.n_bins} equal-width bins{floor}"
            f"{p_value}; {rows}), with the confidence defined as {each.definition}.{means}{pooled}"
        )

    @property
    def remarks(self) -> list[str]:
        """All remarks: on definitions, on the log, and on rows, such as abstentions."""
        named: dict[str, list[str]] = {}
        for each in self.confidences:
            for mark in each.marks:
                named.setdefault(mark, []).append(f"{each.name} ({each.event})")
        marks = [f"{listed(names)}: {mark}" for mark, names in named.items()]
        return [*marks, *self.notes, *(f"{capitalised(reason)}: {count(n)}." for reason, n in self.counts.items())]

    @property
    def explanations(self) -> list[str]:
        """The number of a benchmark, the sentence for a paper, all definitions, and the fields that were read."""
        published = [] if self.published is None else [self.published.sentence]
        formulas = dict.fromkeys(f"{each.name}: {each.formula}." for each in self.confidences)
        events = dict.fromkeys(f"{each.event}: {each.happens}" for each in self.confidences)
        cards = [*formulas, f"Events: {'. '.join(events)}."] if events else []
        read = "; ".join(f"{role}: {names}" for role, names in self.fields.items())
        fields, words = [f"Fields: {read}."] * bool(read), [EXPLAINED] * bool(self.confidences)
        return [*published, *filter(None, [self.sentence]), *cards, *words, *fields]

    def layout(self) -> Table:
        """Return the table of all definitions."""
        return Table.from_items(_columns(), {"": self.confidences}, index=("confidence", "event"))

    def __str__(self) -> str:
        """Return the description of the log, the table and all remarks as plain text."""
        found = [f"{self.verdict}."]
        if self.report is not None:
            decision = self.report.decision
            found = [f"{self.verdict}. {decision.cause}", f"What to do: {decision.action}"]
        tables = [to_text(self.layout().folded())] if self.confidences else []
        tasks = [] if self.tasks is None else [to_text(self.tasks.layout().folded())]
        blocks = [[self.input_line], found, tables, self.remarks, tasks, self.explanations]
        return printable_lines("\n\n".join("\n".join(block) for block in blocks if block))

    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the attributes as plain Python values; see `Report.to_dict`."""
        names = [each.name for each in dataclasses.fields(self) if each.name not in ("confidences", "tasks")]
        found = {name: plain(getattr(self, name)) for name in names}
        found["tasks"] = None if self.tasks is None else self.tasks.to_dict()
        found["confidences"] = {
            each.key: {
                "definition": each.definition,
                "card": each.card(self.n_answers),
                "event": each.event,
                "equal": list(each.keys[1:]),
                "mean_confidence": plain(each.mean),
                "frequency": plain(each.frequency),
                "direction": each.direction,
                "detectable": plain(each.detectable),
                "marks": list(each.marks),
                "report": None if each.report is None else each.report.to_dict(),
            }
            for each in self.confidences
        }
        return {"schema_version": SCHEMA_VERSION, **found, "sentence": self.sentence}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AuditGroups(AuditResults, Mapping[str, Audit], Tabular):
    """Audits of the parts of a log, such as the answers of each model; see the argument `by` of `torchcalib.audit`.

    It is a mapping from the values of a field to audits.

    Attributes:
        by: name of the field, or `"task"` for files with one task each.
        audits: audits by value, in the order of the log.
    """

    by: str
    audits: Mapping[str, Audit]

    def __getitem__(self, key: str) -> Audit:
        if str(key) in self.audits:
            return self.audits[str(key)]
        raise KeyError(f"`key` must be one of {quoted(self)}, got {shown(key)}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.audits)

    def __len__(self) -> int:
        return len(self.audits)

    def layout(self) -> Table:
        """Return the table of all definitions of each part."""
        sections = {f"{self.by}: {name}": audit.confidences for name, audit in self.audits.items()}
        return Table.from_items(_columns(), sections, heading_name=self.by, index=(self.by, "confidence", "event"))

    @property
    def title(self) -> str:
        """Number of parts, in words."""
        return f"{len(self.audits)} values of `{self.by}`"

    @property
    def remarks(self) -> list[str]:
        """Remarks and sentence of each part."""
        found = []
        for name, audit in self.audits.items():
            words = [f"{audit.verdict}.", *audit.remarks, *filter(None, [audit.sentence])]
            found.append(f"{self.by}: {name}. {audit.input_line}. {' '.join(words)}")
        return found

    @property
    def verdict(self) -> str:
        """Number of parts whose main definition is miscalibrated, in words."""
        reports = [audit.report for audit in self.audits.values() if audit.report is not None]
        n = sum(report.decision.is_fault for report in reports)
        found = f"Miscalibrated for {n}" if n else "No significant miscalibration for any"
        return f"{found} of {len(self.audits)} values of {self.by}"

    def __str__(self) -> str:
        """Return the table, and the remarks and the sentence of each part, as plain text."""
        lines = [f"{self.verdict}.", "", to_text(self.layout().folded()), "", *self.remarks, EXPLAINED]
        return printable_lines("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the attributes as plain Python values."""
        audits = {name: audit.to_dict() for name, audit in self.audits.items()}
        return {"schema_version": SCHEMA_VERSION, "by": self.by, "audits": audits}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AuditComparison(AuditResults, Mapping[str, Comparison]):
    """Comparison of several logs of the same questions, under each definition of the confidence that all contain.

    It is a mapping from the keys of `AuditedConfidence` to comparisons of the answers that all logs have in common.
    Whether a stated or generated answer is right differs between logs.

    Attributes:
        audits: the audit of each log, by name; the baseline first.
        comparisons: the comparison under each definition.
        n_paired: number of answers of each definition that all logs have in common, by its key.
        notes: sentences on answers that were left out.
    """

    audits: Mapping[str, Audit]
    comparisons: Mapping[str, Comparison]
    n_paired: Mapping[str, int]
    notes: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> Comparison:
        if key in self.comparisons:
            return self.comparisons[key]
        raise KeyError(f"`key` must be one of {quoted(self) if len(self) else 'no keys'}, got {shown(key)}.")

    def __iter__(self) -> Iterator[str]:
        return iter(self.comparisons)

    def __len__(self) -> int:
        return len(self.comparisons)

    def __str__(self) -> str:
        """Return the number of paired answers, the values of all logs and the main findings as plain text."""
        lines = [f"{name}: {audit.input_line}" for name, audit in self.audits.items()]
        for key, compared in self.comparisons.items():
            accuracies = [f"{name} {significant(audit[key].value('accuracy'))}" for name, audit in self.audits.items()]
            lines += ["", f"{CONFIDENCES[key].name}, {count(self.n_paired[key])} answers in pairs"]
            lines += [f"Accuracy of all answers: {', '.join(accuracies)}.", to_text(system_table(compared))]
            lines += compared.sentences.values()
        return printable_lines("\n".join([*lines, *([""] * bool(self.notes)), *self.notes]))

    def to_dict(self) -> dict[str, Any]:
        """Return `schema_version` and the attributes as plain Python values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "audits": {name: audit.to_dict() for name, audit in self.audits.items()},
            "comparisons": {key: compared.to_dict() for key, compared in self.comparisons.items()},
            "n_paired": dict(self.n_paired),
            "notes": list(self.notes),
        }


_LEVEL = 0.05  # of the test whose result stands beside a direction
_SMALL_GAP = 0.0005  # difference of mean confidence and accuracy without a direction
EXPLAINED = (
    "If calibrated: expected ECE of a calibrated model with these confidences; p: probability of an ECE at least as "
    "large for this model. Direction: over-confident if the mean confidence is above the accuracy, significant if p is "
    "below 0.05."
)
"""Explanation of the columns of a table in a terminal."""

EXPLAINED_ON_PAGES = (
    "AUROC: probability that a right answer has a higher confidence than a wrong one. Accuracy at 80%: accuracy of the "
    "most confident 80% of the answers, if the others are left out. Gain of calibration: decrease of the negative "
    "log-likelihood by the recommended calibrator, cross-validated; for all options of a question, in the row of the "
    "chosen one."
)
"""Explanation of further columns, which only pages show."""


def _columns() -> list[Column]:
    """Return the columns of a table of `AuditedConfidence`."""

    def value(header: str, key: str, shown: Literal["always", "page"] = "always") -> Column:
        data = {key: lambda each: each.value(key)}
        return Column(header, lambda each: _number(each.value(key)), data=data, shown=shown)

    def of_ece(header: str, name: str, cell: Callable[[float | None], Cell]) -> Column:
        return Column(header, lambda each: cell(getattr(each.line("ece"), name, None)))

    def gain(each: AuditedConfidence) -> Cell:
        found = None if each.report is None else each.report.decision.gain
        return Cell() if found is None or math.isnan(found) else Cell(f"{rounded(found, '.1f')}%", found)

    def mean(each: AuditedConfidence) -> float:
        return math.nan if each.event == "each" else each.mean

    return [
        Column("confidence", lambda each: Cell(each.name, style="name", tip=each.definition), is_number=False),
        Column("event", lambda each: Cell(each.event), is_number=False),
        Column("n", lambda each: Cell() if each.report is None else Cell(count(each.report.n), each.report.n)),
        value("ECE", "ece"),
        of_ece("if calibrated", "noise_floor", number),
        of_ece("p", "p_value", p_value),
        value("accuracy", "accuracy"),
        Column("mean confidence", lambda each: _number(mean(each))),
        Column("direction", lambda each: Cell(each.direction.rpartition(", ")[2]), is_number=False, wraps=True),
        value("NLL", "nll", "page"),
        value("Brier score", "brier", "page"),
        Column("significant from", lambda each: _number(each.detectable), shown="data"),
        value("AUROC", "correctness_auroc", "page"),
        value("accuracy at 80%", "accuracy_at_coverage", "page"),
        Column("gain of calibration", gain, shown="page"),
    ]


def _short(name: str, k: int) -> str:
    """Return the name of a definition, after the first one without the word that they share."""
    return name if k == 0 else name.rpartition(", ")[2]


def _number(value: float) -> Cell:
    return Cell() if math.isnan(value) else Cell(significant(value), value)
