"""Lines of reports and comparisons, and `Results`, the base class of `Report` and `Comparison`."""

import json
import math
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

from torchcalib._version import __version__
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.recommendation import Recommendation
from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable
from torchcalib.display.tables import Table, Tabular
from torchcalib.display.words import ends, in_one_line
from torchcalib.io.errors import shown
from torchcalib.io.saved import write_whole
from torchcalib.reporting.monitoring.history import History
from torchcalib.reporting.tables import calibrator_table

V = TypeVar("V")


def is_significant(p_value: float | None) -> bool:
    """Return True for a p-value of at most 5%. Rounding errors are ignored."""
    return p_value is not None and p_value <= 0.05 * (1 + 1e-9)


Better = Literal["higher", "lower", "nearer to 0"]
Verdict = Literal["better", "worse", "not significant"]


def today() -> str:
    """Return the current date in UTC, as yyyy-mm-dd.

    The environment variable `SOURCE_DATE_EPOCH`, in seconds since 1970, replaces the current time, for reproducible
    files (https://reproducible-builds.org/specs/source-date-epoch).
    """
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now(UTC)
    return now.date().isoformat()


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
            multiple testing. None without `noise_floor`.
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
    approximately if their gaps have the same pattern.

    Attributes:
        value: the difference; for a signed metric, the difference of absolute values.
        interval: 95% interval of the expected difference; None if omitted. For scores it is the percentile interval of
            the paired bootstrap. For calibration errors it also contains the interval from the null replicates, in
            which both systems are calibrated.
        chance: expected difference if both systems are calibrated: the noise floor of the system minus that of the
            baseline. None for scores, and without an interval.
        p_value: p-value of the hypothesis, from the replicates of `interval`: at most 0.05 if and only if the interval
            excludes all values from 0 to `chance`. Not adjusted for other differences. None without an interval.
        adjusted_p_value: p-value adjusted for all differences of a comparison (step-down max-T of Westfall and Young):
            the probability of one or more values of at most 0.05 is at most 5% if no system differs.
        verdict: `"better"` or `"worse"` if `p_value` is at most 0.05; otherwise `"not significant"`.
    """

    value: float
    interval: LineInterval | None
    chance: float | None
    p_value: float | None
    adjusted_p_value: float | None
    verdict: Verdict

    @property
    def adjusted_verdict(self) -> Verdict:
        """`verdict` if `adjusted_p_value` is at most 0.05, otherwise `"not significant"`."""
        return self.verdict if is_significant(self.adjusted_p_value) else "not significant"


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


@dataclass(frozen=True)
class CalibratorLine:
    """Cross-validated scores after calibration with one calibrator.

    Attributes:
        calibrator: display name of the calibrator, such as `"temperature scaling"`; `"none"` without calibration.
        accuracy: accuracy of the calibrated predictions.
        nll: negative log-likelihood (NLL) in nats.
        brier_score: Brier score.
        ece: expected calibration error (ECE) of the main mode.
        gain: decrease of the NLL, or of the score of the recommendation, in percent of its value without calibration
            (relative calibration loss). Negative for an increase. None without calibration. For the preferred
            calibrator it is corrected for the choice.
        interval: 95% interval of `gain`; see `torchcalib.calibration.Recommendation`. None if undefined.
        parameters: parameters of the fit to all samples, in words.
    """

    calibrator: str
    accuracy: float
    nll: float
    brier_score: float
    ece: float
    gain: float | None = None
    interval: LineInterval | None = None
    parameters: str = ""


@dataclass(frozen=True)
class CalibrationStage(Tabular):
    """Cross-validated scores with and without calibrators.

    Attributes:
        recommendation: whether to calibrate and with which calibrator, based on the negative log-likelihood (NLL), or
            on the Brier score if NLL is infinite.
        lines: scores without calibration, then after each calibrator.
        calibrator: the recommended calibrator, not fitted; the preferred one if none is recommended.
            `calibrator.fit(preds, target)` fits it to all samples.
        table: bins of the main mode after calibration with `calibrator`.
        n_folds: number of random folds.
        n_repeats: number of random splits into folds over which scores are averaged.
        seed: seed of the splits.
        notes: sentences on problems of the fits and on omitted calibrators.
    """

    recommendation: Recommendation
    lines: tuple[CalibratorLine, ...]
    calibrator: Calibrator = field(compare=False)
    table: BinTable = field(compare=False, repr=False)
    n_folds: int
    n_repeats: int
    seed: int
    notes: tuple[str, ...] = ()

    def advised(self, worthwhile: float) -> "CalibrationStage":
        """Return the stage with the recommendation for another smallest worthwhile gain in percent."""
        return replace(self, recommendation=self.recommendation.advised(worthwhile))

    @property
    def name(self) -> str:
        """Display name of `calibrator`."""
        return self.calibrator.name

    @property
    def raw(self) -> CalibratorLine:
        """Scores without calibration."""
        return self.lines[0]

    @property
    def best(self) -> CalibratorLine:
        """Scores after calibration with `calibrator`."""
        return next(line for line in self.lines if line.calibrator == self.name)

    def layout(self) -> Table:
        """Return the table of scores without calibration and after each calibrator."""
        return calibrator_table(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain Python values; see `Results.to_dict`."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self) if each.name != "losses"}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Results(Mapping[str, V], Tabular):
    """Base class of `Report` and `Comparison`: a mapping from keys such as `"nll"` to values, with metadata.

    An error key without a mode refers to the main mode: `"ece"` is `"ece/top_label"` for a multi-class task.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n: sum of weights over the samples; multi-label: over the labelled entries.
        num_classes: number of classes C or labels L; 2 for a binary task.
        lines: scores and calibration errors, in the order of the table.
        settings: options for the input and the bins.
        notes: sentences on limitations, such as omitted values.
        n_dropped: number of samples (multi-label: entries) dropped by `nan_policy="drop"`.
        version: version of torchcalib.
        created: date of creation in UTC, yyyy-mm-dd, or that of the environment variable `SOURCE_DATE_EPOCH`.
        class_names: names of the classes or labels, the negative class first if binary; empty if unknown.
        task_is_inferred: whether the task was inferred from the shapes.
    """

    task: Task
    n: float
    num_classes: int
    lines: tuple[Any, ...]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    n_dropped: int = 0
    version: str = __version__
    created: str = field(default_factory=today)
    class_names: tuple[str, ...] = ()
    task_is_inferred: bool = False

    @abstractmethod
    def _entry(self, line: Any) -> V:
        """Return the value that the mapping has for the key of `line`."""

    @abstractmethod
    def _page(self) -> str:
        """Return the results as a self-contained HTML page."""

    @abstractmethod
    def _files(self) -> Mapping[str, bytes]:
        """Return the contents of all files that `save` writes into a folder, by file name."""

    def __getitem__(self, key: str) -> V:
        line = self.line(key)
        if line is None:
            raise KeyError(f"`key` must be one of {', '.join(self)}, got {shown(key)}.")
        return self._entry(line)

    def line(self, key: str) -> Any:
        """Return the `Line` or `ComparedLine` with a key, as for `self[key]`; None if there is none."""
        # Errors of the main mode precede those of other modes.
        exact = [line for line in self.lines if line.key == key]
        return next(iter(exact or [line for line in self.lines if line.key.startswith(f"{key}/")]), None)

    def __iter__(self) -> Iterator[str]:
        return (line.key for line in self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain Python values; a table is a dict of columns.

        Quantiles of bins are omitted. NaN and infinite numbers are the strings "nan", "inf" and "-inf", because JSON
        has no such numbers.
        """
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}

    def to_json(self) -> str:
        """Return `to_dict()` as strict JSON."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write one file, or a folder of files. Existing files are replaced, and never left incomplete.

        Args:
            path: a file name that ends in `.html` (page), `.json` (all numbers), `.md` or `.tex` (table of all lines).
                Any other path is a folder for the page, the JSON file, and every diagram as PNG and SVG. Missing
                folders are created.

        Returns:
            The paths of the written files.

        Raises:
            ImportError: if the extra `report` is not installed, for a page or a folder.
            ValueError: if the file name has another ending.
            NotADirectoryError: if the folder or one of its parents is a file.

        Example:
            >>> import tempfile, torch, torchcalib
            >>> r = torchcalib.report(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), with_intervals=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     [path.name for path in r.save(f"{folder}/report.json")]
            ['report.json']
        """
        place = Path(path)
        writers: dict[str, Callable[[], str]] = {
            ".html": self._page,
            ".json": lambda: f"{self.to_json()}\n",
            ".md": lambda: f"{self.to_markdown()}\n",
            ".tex": lambda: f"{self.to_latex()}\n",
        }
        ending = place.suffix.lower()
        if place.is_dir() or (ending not in writers and not re.fullmatch(r"\.[a-z]\w*", ending)):
            from torchcalib.reporting.html.page import write_folder

            return write_folder(self._files, place)
        if ending not in writers:
            raise ValueError(
                f"`path` must end in {', '.join(writers)}, or be a folder, got {str(path)!r}. "
                f"To use this name for a folder, create the folder first."
            )
        content = writers[ending]().encode()
        place.parent.mkdir(parents=True, exist_ok=True)
        return (write_whole(place, content),)


def plain(value: Any) -> Any:
    """Convert data classes, tables and containers to values that strict JSON can represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, BinTable):
        return {name: plain(column.tolist()) for name, column in value.to_dict().items() if name != "quantiles"}
    if isinstance(value, History):
        return plain(value.to_dict())
    if isinstance(value, Calibrator):
        return f"{type(value).__name__}()"  # the fitted parameters are omitted
    if isinstance(value, CalibrationStage):
        return value.to_dict()
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
