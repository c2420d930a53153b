"""A report as data: its numbers, its tables, what they say."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from torchcalib._version import __version__
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.recommendation import Recommendation
from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import NamedReduction
from torchcalib.inference.words import in_one_line, p_words
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting.monitoring.history import History

EVIDENCE_WORDS = (
    "Noise floor: what the number would be on average if the model were perfectly calibrated and had predicted the "
    "same. Only the part above it is the model's own error. p: the probability of a number at least as large if the "
    "model were perfectly calibrated. Ties count, so that few samples seldom give a small p. The p-values are not "
    "corrected for multiple testing: of twenty lines of a perfectly calibrated model one is below 0.05 by chance."
)
"""Explanation of noise floors and p-values on a page."""

INTERVAL_WORDS = (
    "95 % interval: of a calibration error where that of the model itself lies, without what chance adds, so that it "
    "may lie below the number; of TCE what it is on average for samples of this size; of scores, DSC and UNC where the "
    "number lies for other samples of this size (bootstrap)."
)
"""What the intervals of lines are."""


@dataclass(frozen=True)
class LineInterval:
    """95 % interval of a number.

    Attributes:
        low: lower end.
        high: upper end.
    """

    low: float
    high: float

    def __str__(self) -> str:
        """Ends, to four digits and no more than six decimals."""
        return " to ".join(f"{round(end, 6) + 0:.4g}" for end in (self.low, self.high))  # + 0 turns -0 into 0


@dataclass(frozen=True)
class Line:
    """One number of a report.

    `str` says it in words: `"ECE 0.0210 (noise floor 0.0040, 95 % 0.0180-0.0240, p < 0.001)"`.

    Attributes:
        key: unique name, for files: `"nll"`, `"ece/top_label"`.
        name: short name, for people: `"ECE"`.
        group: `"scores"`, or what the confidence is of: `"positive class"`, `"top label"`, `"class-wise"`.
        value: the number.
        unit: what it is measured in.
        perfect: what a predictor gets that is right and sure every time.
        naive: what always predicting the class shares of this data gets.
        question: what the number answers.
        source: publication and equation.
        noise_floor: what the number would be on average if the model were perfectly calibrated and had predicted the
            same; of a signed error that of its size. None of what is no calibration error, or where it was left out.
        p_value: probability of a number at least as large if the model were perfectly calibrated; ties count. Not
            corrected for multiple testing. None where there is no `noise_floor`.
        interval: of a calibration error that of the model itself, without what chance adds, of TCE that of its expected
            value; see `torchcalib.Evidence`. Of scores, DSC and UNC where the number lies for other samples of this
            size; see `torchcalib.Interval`. None where it was left out.
    """

    key: str
    name: str
    group: str
    value: float
    unit: str
    perfect: float
    naive: float
    question: str
    source: str
    noise_floor: float | None = None
    p_value: float | None = None
    interval: LineInterval | None = None

    def __str__(self) -> str:
        floor, p = (math.nan if x is None else x for x in (self.noise_floor, self.p_value))
        ends = () if self.interval is None else (self.interval.low, self.interval.high)
        return f"{self.name} {in_one_line(self.value, floor, p, *ends)}"


@dataclass(frozen=True)
class CalibrationGain:
    """What one calibrator would gain in one score.

    Attributes:
        score: name of the score, for people: `"NLL"`, `"Brier score"`.
        calibrator: name of the calibrator: `"DP calibration"`.
        value: score of the calibrated predictions, each calibrated without its own label.
        rcl: relative calibration loss, what the calibrator takes off the raw score, in percent of it; below 0 if it
            adds to it.
    """

    score: str
    calibrator: str
    value: float
    rcl: float


@dataclass(frozen=True)
class CalibrationStage:
    """What a calibration stage would gain, by cross-validation.

    Attributes:
        recommendation: whether to calibrate, and by what, for the NLL.
        raw: the scores of the predictions as they are, by name.
        gains: of every score, what every calibrator that was tried would gain.
        calibrator: the recommended one; where none is worthwhile the most thorough one that cannot do much harm, DP
            calibration (temperature scaling where that was not tried). `calibrator.fit(preds, target, task=...)`
            returns the transform.
        n_folds: how many folds, stratified by class.
        seed: of the deal.
        notes: what a reader must know of the fits, to all samples, and what was not tried; sentences.
    """

    recommendation: Recommendation
    raw: Mapping[str, float]
    gains: tuple[CalibrationGain, ...]
    calibrator: Calibrator[Any]
    n_folds: int
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What people call `calibrator`."""
        return self.calibrator.name

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        gains = [asdict(gain) for gain in self.gains]
        return {**values, "recommendation": asdict(self.recommendation), "gains": gains}


@dataclass(frozen=True, eq=False, repr=False)
class Report(Mapping[str, float]):
    """What is known about a set of predictions. Data only; `torchcalib.save_report` makes files of it.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n: sum of weights, the number of samples where all weights are 1 (multi-label: of labelled entries).
        num_classes: C, or L labels; 2 for a binary task.
        priors: share of every class (multi-label: of 1s for every label).
        lines: every number.
        tables: bin tables by what the confidence is of; multi-label: all labels pooled.
        per_class: class-wise ECE of every class or label; empty for a binary task.
        sentence: what the numbers say, in words.
        settings: how the input was read and binned.
        source: what was read, from which files.
        tests: tables of bins with what a test says of their predictions, by what the confidence is of; multi-label: all
            labels pooled. Empty where there are no labels, or no counts, to test them against.
        calibration: what a calibration stage would gain; None where it was left out, and `notes` say why.
        notes: what a reader must know of the numbers, such as why some are left out; sentences.
        n_dropped: samples (multi-label: entries) that `nan_policy="drop"` left out of all of this; `notes` say so too.
        history: of the validations of the training that the predictions came from, if a `torchcalib.Monitor` kept it:
            `dataclasses.replace(report, history=monitor.history)`.
        groups: the worst groups of rows, by their ECE of the main reduction; None where no groups were given.
        version: of torchcalib.
    """

    task: Task
    n: float
    num_classes: int
    priors: tuple[float, ...]
    lines: tuple[Line, ...]
    tables: Mapping[NamedReduction, BinTable]
    per_class: tuple[float, ...]
    sentence: str
    settings: Mapping[str, Any]
    source: Mapping[str, Any] = field(default_factory=dict)
    tests: Mapping[NamedReduction, TCETable] = field(default_factory=dict)
    calibration: CalibrationStage | None = None
    notes: tuple[str, ...] = ()
    n_dropped: int = 0
    history: History | None = None
    groups: GroupTable | None = None
    version: str = __version__

    @property
    def main_table(self) -> BinTable:
        """The table that the sentence and the first diagram are about."""
        return next(iter(self.tables.values()))

    @property
    def main_line(self) -> Line:
        """The calibration error that the sentence is about: the ECE of the confidence that is looked at first."""
        return next(line for line in self.lines if line.key.startswith("ece/"))

    @property
    def recommendation(self) -> Recommendation | None:
        """Whether to add a calibration stage, and which; None where calibrators were not tried."""
        return None if self.calibration is None else self.calibration.recommendation

    def __getitem__(self, key: str) -> float:
        """Return the value of the line with this key: `report["nll"]`."""
        for line in self.lines:
            if line.key == key:
                return line.value
        raise KeyError(f"{key!r} is not in the report; it has {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return (line.key for line in self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, tables as columns (without quantiles, which are there to be drawn).

        Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf".
        """
        nested = ("lines", "tables", "tests", "calibration", "history", "groups")
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in nested}
        values["lines"] = [asdict(line) for line in self.lines]
        values["calibration"] = None if self.calibration is None else self.calibration.to_dict()
        values["history"] = None if self.history is None else self.history.to_dict()
        values["groups"] = None if self.groups is None else self.groups.to_dict()
        for tables in ("tables", "tests"):
            values[tables] = {
                name: {column: array.tolist() for column, array in table.to_dict().items() if column != "quantiles"}
                for name, table in getattr(self, tables).items()
            }
        return {name: plain(value) for name, value in values.items()}

    def to_json(self) -> str:
        """Return `to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __str__(self) -> str:
        width = 24 if any(line.interval for line in self.lines) else 0
        header = f"{'':16}{'':14}{'value':>12}{'noise floor':>13}  {'p':9}{'95 % interval' if width else '':{width}}"
        rows = [f"{header}{'perfect':>8}{'naive':>10}  unit"]
        group = None
        for line in self.lines:
            shown = "" if line.group == group else line.group
            floor = "" if line.noise_floor is None else f"{line.noise_floor:.6f}"
            p = "" if line.p_value is None else p_words(line.p_value)
            row = f"{shown:16}{line.name:14}{line.value:12.6f}{floor:>13}  {p:9}{line.interval or ''!s:{width}}"
            rows.append(f"{row}{line.perfect:8.4g}{line.naive:10.4g}  {line.unit}")
            group = line.group
        stage = self.calibration
        advice = [] if stage is None else ["", " ".join([stage.recommendation.text, *stage.notes])]
        groups = [] if self.groups is None else ["", str(self.groups)]
        parts = [self.sentence, *advice, "", str(self.main_line), "", *rows, *self.notes, "", str(self.main_table)]
        return "\n".join([*parts, *groups])


def plain(value: Any) -> Any:
    """Turn nested values into what strict JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
