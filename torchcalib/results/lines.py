"""Lines of reports and comparisons: a score or calibration error with its evidence, and columns of their tables."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal

from torchcalib.display.tables import Cell, Column, attribute_column, interval
from torchcalib.display.words import capitalised, ends, in_one_line, significant
from torchcalib.functional.estimator import Better

SELECTIVE_GROUP = "selective prediction"
"""Group of the metrics of selective prediction in `Line.group`. Their keys have no mode."""

Verdict = Literal["better", "worse", "not significant"]


def is_significant(p_value: float | None) -> bool:
    """Return True for a p-value of at most 5%. Rounding errors are ignored."""
    return p_value is not None and p_value <= 0.05 * (1 + 1e-9)


@dataclass(frozen=True)
class LineInterval:
    """95% interval of a score, a calibration error or a difference.

    Attributes:
        low: lower bound.
        high: upper bound.
    """

    low: float
    high: float

    def __str__(self) -> str:
        return ends(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """Metadata of a score or calibration error.

    Attributes:
        key: unique key, such as `"nll"` or `"ece/top_label"`.
        name: display name, such as `"ECE"`.
        group: `"scores"`, `"selective prediction"`, or the mode of the error: `"positive class"`, `"top label"`,
            `"class-wise"`.
        unit: unit of the value.
        perfect: value of a predictor that is always right and certain.
        question: one-line description, a noun phrase.
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
    """One score or calibration error of a report, with its noise floor, p-value and interval.

    `str(line)` is one line of text: `"ECE 0.0210 (noise floor 0.0040, 95% 0.0180-0.0240, p < 0.001)"`.

    Attributes:
        key, name, group, unit, perfect, question, source: see `Quantity`.
        value: the value.
        naive: value of a predictor that always predicts the class frequencies of this data.
        noise_floor: expected value if the model were perfectly calibrated with these confidences; for a signed error,
            expected absolute value. None for scores, and if omitted.
        p_value: probability of a value at least as large if the model were perfectly calibrated. Not corrected for
            multiple testing, and for one look at the data. None without `noise_floor`.
        interval: 95% confidence interval of the expected value at this sample size; for debiased RMSCE, of the error
            without sampling noise. None if omitted. For the method of calibration errors, see
            `torchcalib.inference.CalibrationTest`. Scores, DSC (discrimination), UNC (uncertainty) and metrics of
            selective prediction have a bootstrap interval; see `torchcalib.inference.Interval`.
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
    """Value of one system minus value of the baseline.

    The hypothesis of the test is that the expected difference is 0 for scores. For calibration errors, to which
    sampling noise adds unequal amounts, it is between 0 and `chance`. This holds if both systems are calibrated, and
    approximately if their gaps have the same pattern. `p_value`, `interval` and `verdict` agree: p is at most 0.05 if
    and only if the interval excludes 0.

    Attributes:
        value: the difference; for a signed metric, the difference of absolute values.
        chance: expected difference if both systems are calibrated: the noise floor of the system minus that of the
            baseline. None for scores, which have no noise floor, and without an interval.
        beyond_chance: `value` minus `chance`; for scores `value`. None without an interval.
        interval: 95% interval of the difference beyond chance; None if omitted. For scores it is the percentile
            interval of the paired bootstrap. For calibration errors it also contains the interval from the null
            replicates, in which both systems are calibrated. Noise adds less to large gaps, so that the expected
            difference contains an unknown part of `chance`: the interval allows for every part from none to all of it.
        p_value: p-value of the hypothesis, from the replicates of `interval`. Not adjusted for other differences, and
            for one look at the data. None without an interval.
        adjusted_p_value: p-value adjusted for all differences of a comparison (step-down max-T of Westfall and Young):
            the probability of one or more values of at most 0.05 is at most 5% if no system differs.
        verdict: `"better"` or `"worse"` if `p_value` is at most 0.05; otherwise `"not significant"`.
    """

    value: float
    chance: float | None
    beyond_chance: float | None
    interval: LineInterval | None
    p_value: float | None
    adjusted_p_value: float | None
    verdict: Verdict


@dataclass(frozen=True, kw_only=True)
class ComparedLine(Quantity):
    """Values of one score or calibration error for all systems of a comparison, and their differences.

    Attributes:
        key, name, group, unit, perfect, question, source: see `Quantity`.
        better: direction of better values: `"higher"`, `"lower"` or `"nearer to 0"`.
        values: value of each system, by system name.
        intervals: 95% interval of each value or None, by system name.
        differences: difference from the baseline for each other system, by system name.
    """

    better: Better
    values: Mapping[str, float]
    intervals: Mapping[str, LineInterval | None]
    differences: Mapping[str, Difference]


Direction = Literal["too high", "too low", "not significant", ""]


@dataclass(frozen=True)
class ClassLine:
    """Calibration of one class against the rest, or of one label.

    Attributes:
        index: number of the class or label, from 0.
        n: total weight of the samples, for a label of the samples in which it is known.
        frequency: frequency of the class or label, in [0, 1].
        gap: frequency minus mean probability.
        value: expected calibration error (ECE).
        noise_floor: expected ECE of a calibrated model. None if omitted, as are the p-values.
        p_value: p-value of ECE, adjusted for the number of classes by the method of Holm (family-wise error rate); see
            `torchcalib.inference.CalibrationTest`.
        gap_p_value: two-sided p-value of `gap`, adjusted in the same way.
    """

    index: int
    n: float
    frequency: float
    gap: float
    value: float
    noise_floor: float | None = None
    p_value: float | None = None
    gap_p_value: float | None = None

    @property
    def excess(self) -> float:
        """ECE minus its noise floor, or ECE without a noise floor; -inf if undefined. It orders the classes."""
        excess = self.value - (self.noise_floor or 0.0)
        return -math.inf if math.isnan(excess) else excess

    @property
    def direction(self) -> Direction:
        """Whether probabilities are too high or too low on average; empty if it was not tested."""
        if self.gap_p_value is None:
            return ""
        if not self.gap_p_value < 0.05:
            return "not significant"
        return "too low" if self.gap > 0 else "too high"


def name_column() -> Column:
    """Return the column of line names; in a DataFrame, the columns `key` and `name`."""

    def name(line: Quantity) -> Cell:
        """Return the name with an explanation: question, unit, and the values of two simple predictors."""
        tip = f"{capitalised(line.question)}. Unit: {line.unit}. "
        tip += f"A predictor that is always right and certain has the value {significant(line.perfect)}."
        if isinstance(line, Line) and line.group == "scores":
            tip += f" Always predicting the class frequencies has the value {significant(line.naive)}."
        return Cell(line.name, tip=tip)

    return Column("name", name, is_number=False, data={"key": attrgetter("key"), "name": attrgetter("name")})


def interval_column(interval_of: Callable[[Any], Any], prefix: str = "") -> Column:
    """Return the column of intervals; in a DataFrame, the columns `{prefix}low` and `{prefix}high`."""

    def end(line: Any, name: str) -> float:
        found = interval_of(line)
        return math.nan if found is None else float(getattr(found, name))

    data = {f"{prefix}{name}": partial(end, name=name) for name in ("low", "high")}
    return Column("95% interval", lambda line: interval(interval_of(line)), is_number=False, data=data)


def by_group(lines: Iterable[Any]) -> dict[str, list[Any]]:
    """Return consecutive lines of each group, the sections of a table."""
    return {group: list(members) for group, members in groupby(lines, attrgetter("group"))}


def explanation_columns(sources: Sequence[str]) -> list[Column]:
    """Return the columns with unit, question and source of a line. A page shows a source as its number in `sources`."""

    def source(line: Quantity) -> Cell:
        place = sources.index(line.source) + 1 if line.source else 0
        return Cell(f"[{place}]", link=f"source-{place}") if place else Cell()

    return [
        attribute_column("unit", "unit", Cell, is_number=False, shown="data"),
        attribute_column("question", "question", Cell, is_number=False, shown="data"),
        Column("source", source, is_number=False, shown="page", data={"source": attrgetter("source")}),
    ]
