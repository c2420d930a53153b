"""Reports and comparisons as data: mappings of lines, with tables and notes."""

import json
import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar

from torchcalib._version import __version__
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.recommendation import Recommendation
from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import NamedMode
from torchcalib.inference.words import ends, in_one_line
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting.contents import bin_table, difference_table, group_table, line_table
from torchcalib.reporting.monitoring.history import History
from torchcalib.reporting.tables import to_text

V = TypeVar("V")

_LONGEST_NAME = 60  # letters of a group's name in text

Better = Literal["higher", "lower", "nearer to 0"]
Verdict = Literal["better", "worse", "not told apart"]


@dataclass(frozen=True)
class LineInterval:
    """95 % interval of a value.

    Attributes:
        low: lower end.
        high: upper end.
    """

    low: float
    high: float

    def __str__(self) -> str:
        return ends(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A score or calibration error, and the confidence that it is computed for.

    Attributes:
        key: unique name, for files: `"nll"`, `"ece/top_label"`.
        name: short name, for people: `"ECE"`.
        group: `"scores"`, or the kind of confidence: `"positive class"`, `"top label"`, `"class-wise"`.
        unit: of the value.
        perfect: value of a predictor that is always right and certain.
        question: the question that the value answers.
        source: publication and equation.
    """

    key: str
    name: str
    group: str
    unit: str
    perfect: float
    question: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Line(Quantity):
    """One value of a report, and its evidence.

    `str` formats it: `"ECE 0.0210 (noise floor 0.0040, 95 % 0.0180-0.0240, p < 0.001)"`.

    Attributes:
        key, name, group, unit, perfect, question, source: see `Quantity`.
        value: the value.
        naive: value of a predictor that always predicts the class frequencies of this data.
        noise_floor: expected value if the model were perfectly calibrated with these confidences; for a signed error,
            of its absolute value. None for other quantities than calibration errors, and where it was left out.
        p_value: probability of a value at least as large if the model were perfectly calibrated; ties count. Not
            corrected for multiple testing. None where there is no `noise_floor`.
        interval: for a calibration error, of the population error without sampling noise, for TCE of its expected
            value; see `torchcalib.inference.CalibrationTest`. For scores, DSC and UNC a bootstrap interval; see
            `torchcalib.inference.Interval`. None where it was left out.
    """

    value: float
    naive: float
    noise_floor: float | None = None
    p_value: float | None = None
    interval: LineInterval | None = None

    def __str__(self) -> str:
        floor, p = (math.nan if x is None else x for x in (self.noise_floor, self.p_value))
        both = () if self.interval is None else (self.interval.low, self.interval.high)
        return f"{self.name} {in_one_line(self.value, floor, p, *both)}"


@dataclass(frozen=True)
class Difference:
    """Value of one system minus that of the baseline.

    Attributes:
        value: the difference; for a signed metric, the difference of absolute values.
        interval: 95 % paired bootstrap interval; None where it was left out.
        chance: expected part of the difference that is due to the sampling noise of bins, which differs between
            systems; None where the quantity has no such part, or no interval.
        verdict: `"better"` or `"worse"` where the interval excludes 0, also after subtracting `chance`; else
            `"not told apart"`.
    """

    value: float
    interval: LineInterval | None
    chance: float | None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class ComparedLine(Quantity):
    """One quantity of all systems.

    Attributes:
        key, name, group, unit, perfect, question, source: see `Quantity`.
        better: which values are better: `"higher"`, `"lower"` or `"nearer to 0"`.
        values: the value of each system, by its name.
        intervals: the 95 % interval of each system or None, by its name.
        differences: to the baseline, by the names of the other systems.
    """

    better: Better
    values: Mapping[str, float]
    intervals: Mapping[str, LineInterval | None]
    differences: Mapping[str, Difference]


@dataclass(frozen=True)
class CalibrationGain:
    """Gain of one calibrator in one score.

    Attributes:
        score: name of the score, for people: `"NLL"`, `"Brier score"`.
        calibrator: name of the calibrator: `"DP calibration"`.
        value: score of the calibrated predictions, each calibrated without its own label.
        rcl: relative calibration loss: the decrease of the score in percent of the raw score; negative for an increase.
    """

    score: str
    calibrator: str
    value: float
    rcl: float


@dataclass(frozen=True)
class CalibrationStage:
    """Cross-validated gain of a calibration stage.

    Attributes:
        recommendation: whether to calibrate, and with which calibrator, for the NLL.
        raw: the scores of the uncalibrated predictions, by name.
        gains: of every score and calibrator.
        calibrator: the recommended one; where none is worthwhile, the most flexible one that can do little harm: DP
            calibration, or temperature scaling where that was not tried. `calibrator.fit(preds, target, task=...)`
            returns the transform.
        n_folds: number of folds, stratified by class.
        seed: of the split into folds.
        notes: remarks on the fits, and calibrators that were not tried; sentences.
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
        """Name of `calibrator` for people."""
        return self.calibrator.name


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Results(Mapping[str, V]):
    """A mapping of lines by their keys, and how they were computed.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n: sum of weights, the number of samples where all weights are 1 (multi-label: of labelled entries).
        num_classes: C, or L labels; 2 for a binary task.
        lines: all of them.
        settings: of the input and of the bins.
        notes: limitations of the values, such as why some are left out; sentences.
        n_dropped: samples (multi-label: entries) that `nan_policy="drop"` left out.
        version: of torchcalib.
    """

    task: Task
    n: float
    num_classes: int
    lines: tuple[Any, ...]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    n_dropped: int = 0
    version: str = __version__

    @abstractmethod
    def _entry(self, line: Any) -> V:
        """Return what the mapping has for a line."""

    def __getitem__(self, key: str) -> V:
        for line in self.lines:
            if line.key == key:
                return self._entry(line)
        raise KeyError(f"{key!r} is not among the lines, which are {', '.join(self)}")

    def __iter__(self) -> Iterator[str]:
        return (line.key for line in self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values, tables as columns (without quantiles, which only serve for drawing).

        Numbers that JSON cannot hold are the strings "nan", "inf" and "-inf".
        """
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    def to_json(self) -> str:
        """Return `to_dict` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Report(Results[float]):
    """Scores, calibration errors and tables of a set of predictions; `reporting.save_report` writes it to files.

    Index it by the key of a line for its value, `report["nll"]`, or print it.

    Attributes:
        task, n, num_classes, settings, notes, n_dropped, version: see `Results`.
        lines: every value, with its evidence; see `Line`.
        priors: share of every class (multi-label: of 1s for every label).
        tables: bin tables by the kind of confidence; multi-label: all labels pooled.
        per_class: class-wise ECE of every class or label; empty for a binary task.
        sentence: the main findings in words.
        source: origin of the predictions, such as files.
        tests: tables of bins with the decisions of a test, by the kind of confidence; multi-label: all labels pooled.
            Empty for soft targets, and for weights that are not counts.
        calibration: cross-validated gain of a calibration stage; None where it was left out, and `notes` name the
            reason.
        history: the validations of the training, if a `torchcalib.Monitor` kept it:
            `dataclasses.replace(report, history=monitor.history)`.
        groups: the worst groups of rows, by their ECE of the main mode; None where no groups were given.
    """

    lines: tuple[Line, ...]
    priors: tuple[float, ...]
    tables: Mapping[NamedMode, BinTable]
    per_class: tuple[float, ...]
    sentence: str
    source: Mapping[str, Any] = field(default_factory=dict)
    tests: Mapping[NamedMode, TCETable] = field(default_factory=dict)
    calibration: CalibrationStage | None = None
    history: History | None = None
    groups: GroupTable | None = None

    @property
    def main_table(self) -> BinTable:
        """The table of the main mode, which the sentence is about."""
        return next(iter(self.tables.values()))

    @property
    def main_line(self) -> Line:
        """The ECE of the main mode, which the sentence is about."""
        return next(line for line in self.lines if line.key.startswith("ece/"))

    @property
    def recommendation(self) -> Recommendation | None:
        """Whether to add a calibration stage, and which; None where calibrators were not tried."""
        return None if self.calibration is None else self.calibration.recommendation

    def _entry(self, line: Line) -> float:
        return line.value

    def __str__(self) -> str:
        stage = self.calibration
        advice = [] if stage is None else [" ".join([stage.recommendation.text, *stage.notes])]
        groups = [] if self.groups is None else [to_text(group_table(self.groups, _LONGEST_NAME))]
        numbers = "\n".join([to_text(line_table(self)), *self.notes])
        parts = [self.sentence, *advice, str(self.main_line), numbers, to_text(bin_table(self.main_table)), *groups]
        return "\n\n".join(parts)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Comparison(Results[ComparedLine]):
    """Scores and calibration errors of several systems that predicted the same targets, and their differences.

    Index it by key, `comparison["nll"].differences["b"].value`, or print it.

    Attributes:
        task, n, num_classes, settings, notes, version: see `Results`.
        n_dropped: rows that were left out of all systems because a value of one of them is NaN.
        lines: every quantity; see `ComparedLine`.
        systems: names, the baseline first.
        sentences: the main findings in words, by the names of all systems but the baseline.
        sources: origin of the predictions, such as files, by the name of the system.
    """

    lines: tuple[ComparedLine, ...]
    systems: tuple[str, ...]
    sentences: Mapping[str, str]
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """The system that the others are compared with."""
        return self.systems[0]

    @property
    def caution(self) -> str:
        """A warning of multiple comparisons."""
        n = sum(found.interval is not None for line in self.lines for found in line.differences.values())
        if not n:
            return "Without intervals no difference is distinguishable from chance."
        return (
            f"Intervals are not corrected for multiple comparisons: without any real difference, some "
            f"{max(1, round(0.05 * n))} of these {n} intervals would exclude 0. Choose in advance which value decides."
        )

    @property
    def main_lines(self) -> tuple[ComparedLine, ...]:
        """The scores, and the errors of the main mode: the content of the picture."""
        groups = list(dict.fromkeys(line.group for line in self.lines))[:2]
        return tuple(line for line in self.lines if line.group in groups)

    def _entry(self, line: ComparedLine) -> ComparedLine:
        return line

    def __str__(self) -> str:
        tables = [to_text(difference_table(self, name)) for name in self.systems[1:]]
        return "\n\n".join([" ".join(self.sentences.values()), *tables, "\n".join([self.caution, *self.notes])])


def plain(value: Any) -> Any:
    """Turn nested values into values of strict JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BinTable):
        return {name: plain(column.tolist()) for name, column in value.to_dict().items() if name != "quantiles"}
    if isinstance(value, History):
        return plain(value.to_dict())
    if is_dataclass(value) and not isinstance(value, Calibrator):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
