"""What is read off for a report, line by line and table by table, and put together in the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable, TCETable, equal_width_edges
from torchcalib.core.events import NamedReduction
from torchcalib.core.ranked import RankedSample
from torchcalib.core.sums import BinStats, ScoreSum
from torchcalib.inference.evidence import Evidence
from torchcalib.metrics.binned import ece_from_bins
from torchcalib.reporting.calibration import calibration_stage
from torchcalib.reporting.data import CalibrationStage, Line
from torchcalib.reporting.evidence import Found, evidence_in_order, evidence_of_bins, with_evidence
from torchcalib.reporting.intervals import label_readings, score_readings, with_intervals
from torchcalib.reporting.kept import KeptSamples
from torchcalib.reporting.lines import SCORES, error_lines, order_lines, score_lines
from torchcalib.reporting.metrics import has_table
from torchcalib.reporting.sentence import sentence_of


@dataclass
class Findings:
    """What has been read off so far, in the order in which a report says it.

    Attributes:
        task: as which predictions are read.
        n_bins: of the tables and of the ACE.
        with_intervals: whether to look for more than noise floors and p-values of errors over equal-width bins.
        lines: every number; as long as more are read off, without evidence.
        evidence: by the keys of lines.
        tables: of bins, by what the confidence is of.
        tests: tables of tested bins, likewise.
        per_class: class-wise ECE of every class or label.
        notes: what a reader must know; sentences.
    """

    task: Task
    n_bins: int
    with_intervals: bool
    lines: list[Line] = field(default_factory=list)
    evidence: dict[str, Evidence] = field(default_factory=dict)
    tables: dict[NamedReduction, BinTable] = field(default_factory=dict)
    tests: dict[NamedReduction, TCETable] = field(default_factory=dict)
    per_class: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    def read_scores(self, sums: Mapping[str, ScoreSum]) -> None:
        """Read the scores, given their sums by the names of their metrics."""
        self.lines += [line for m in SCORES for line in score_lines(m, sums[m.__name__], self.task)]

    def read_bins(self, bins: BinStats, reduction: NamedReduction) -> None:
        """Read errors over equal-width bins, and their table: of labels, all pooled."""
        self.lines += error_lines(bins, reduction)
        exclusive = self.task == "multiclass"
        self._take(evidence_of_bins(bins, reduction, with_intervals=self.with_intervals, exclusive=exclusive))
        if reduction == "classwise":
            self.per_class = tuple(ece_from_bins(bins).tolist())
        if has_table(self.task, reduction):
            pooled = replace(bins, sums=bins.sums.sum(0)) if self.task == "multilabel" else bins
            self.tables[reduction] = BinTable.of(pooled, equal_width_edges(self.n_bins, pooled.n))

    def read_order(
        self, sample: RankedSample, has_labels: bool, reduction: NamedReduction, priors: tuple[float, ...]
    ) -> None:
        """Read a sample in order, and the table of its tested bins.

        Args:
            sample: `(N,)`, or `(L, N)` for labels.
            has_labels: whether outcomes are labels; if not, what counts labels is left out.
            reduction: what the scores are of.
            priors: share of every class, or of 1s for every label.
        """
        lines, tested = order_lines(sample, has_labels, reduction, self.n_bins, max(priors))
        self.lines += lines
        if tested is not None:
            self.tests[reduction] = tested
        if self.with_intervals:
            given: dict[str, Any] = {"task": self.task}
            if self.task == "multilabel":
                given["num_labels"] = len(priors)
            self._take(evidence_in_order(sample, has_labels, reduction, self.n_bins, given))

    def say_order(self, resolution: int | None, any_at_all: bool, has_labels: bool) -> str:
        """Note what a reader must know of numbers that need an order, and return what they were read from.

        Args:
            resolution: cells for each unit of log-odds, None if samples are whole.
            any_at_all: whether there are such numbers.
            has_labels: whether there are those that count labels.
        """
        if not any_at_all:
            self._note(
                "ACE, TCE, KS, MCB, DSC and UNC are left out: they count copies of a sample, and weights are no counts."
            )
            return "left out"
        if not has_labels:
            self._note("TCE, MCB, DSC and UNC are left out: they count labels, and targets are shares.")
        if resolution is None:
            return "exact"
        names = "ACE, TCE, KS, MCB, DSC and UNC" if has_labels else "ACE and KS"
        self._note(
            f"{names} are read from a sketch, as samples are many: they are exact for data in which every probability "
            f"has moved by less than 1 / {resolution:,} in log-odds."
        )
        return f"sketch, {resolution:,} cells per unit of log-odds"

    def say_dropped(self, n: int) -> None:
        """Note how many rows (labels of rows) are missing, if any are."""
        if n:
            self._note(
                f"{n:,} {'labels of samples' if self.task == 'multilabel' else 'samples'} hold NaN, or infinities that "
                "leave no distribution, and are left out (nan_policy='drop'). What they would have been is not known: "
                "look for where they come from."
            )

    def sentence(self) -> str:
        """What the numbers say. It goes by the interval of the ECE, whether or not intervals are shown."""
        first = next(line for line in self.lines if line.key in self.evidence)
        (main,) = with_evidence([first], self.evidence)
        values = {line.key: line.value for line in self.lines}
        return sentence_of(self.task, values, next(iter(self.tables.values())), main)

    def finished_lines(self, kept: KeptSamples | None, with_labels: Sequence[NamedReduction]) -> tuple[Line, ...]:
        """Return the lines with their evidence and their intervals.

        Args:
            kept: samples, for the intervals that need them; None where none are wanted.
            with_labels: reductions of which there are numbers that count labels.
        """
        lines = with_evidence(self.lines, self.evidence, with_intervals=self.with_intervals)
        if kept is None or not self.with_intervals:
            return tuple(lines)
        try:
            if not kept.why_not:
                p = kept.read()
                lines, notes = with_intervals(lines, p, [*score_readings(p), *label_readings(with_labels)])
                self._note(*notes)
            why_not = kept.why_not
        except (RuntimeError, ValueError) as error:  # no memory, or more copies in a replicate than can be counted
            why_not = f"computing them failed with {type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}"
        if why_not:
            self._note(f"Bootstrap intervals are left out: {why_not}.")
        return tuple(lines)

    def calibration(self, kept: KeptSamples) -> CalibrationStage | None:
        """Return what a calibration stage would gain; None where this cannot be done."""
        stage, notes = calibration_stage(kept)
        self._note(*notes)
        return stage

    def _take(self, found: Found) -> None:
        evidence, notes = found
        self.evidence |= evidence
        self._note(*notes)

    def _note(self, *sentences: str) -> None:
        self.notes += sentences
