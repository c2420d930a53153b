"""Reports and comparisons as data: mappings of lines, with tables and notes."""

import json
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from torchcalib._version import __version__
from torchcalib.calibration.calibrator import Calibrator
from torchcalib.calibration.recommendation import Recommendation
from torchcalib.core.arguments import InputOptions, NanPolicy, Task, task_of
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.documentation import documented
from torchcalib.core.events import NamedMode
from torchcalib.core.tables import Table, Tabular, to_text
from torchcalib.core.tasks import per_sample, prepare
from torchcalib.core.words import ends, in_one_line
from torchcalib.io.errors import printable
from torchcalib.io.saved import write_whole
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting.contents import (
    WORST_CLASSES,
    class_table,
    difference_table,
    gain_table,
    input_line,
    line_table,
)
from torchcalib.reporting.monitoring.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

V = TypeVar("V")

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
        calibrator: name of the calibrator: `"affine scaling"`.
        value: score of the calibrated predictions, each calibrated without its own label.
        rcl: relative calibration loss: the decrease of the score in percent of the raw score; negative for an increase.
    """

    score: str
    calibrator: str
    value: float
    rcl: float


@dataclass(frozen=True)
class CalibrationStage(Tabular):
    """Cross-validated gain of a calibration stage.

    Attributes:
        recommendation: whether to calibrate, and with which calibrator, for the NLL.
        raw: the scores of the uncalibrated predictions, by name.
        gains: of every score and calibrator.
        calibrator: the recommended one; where none is worthwhile, the most flexible one that can do little harm:
            affine scaling, or temperature scaling where that was not tried. It is not fitted:
            `calibrator.fit(preds, target)` fits it to all samples.
        n_folds: number of folds, stratified by class.
        seed: of the split into folds.
        notes: remarks on the fits, and calibrators that were not tried; sentences.
    """

    recommendation: Recommendation
    raw: Mapping[str, float]
    gains: tuple[CalibrationGain, ...]
    calibrator: Calibrator = field(compare=False)
    n_folds: int
    seed: int
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of `calibrator` for people."""
        return self.calibrator.name

    def layout(self) -> Table:
        """Return the scores before and after calibration by each calibrator."""
        return gain_table(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain Python values; see `Results.to_dict`."""
        return {each.name: plain(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Results(Mapping[str, V], Tabular):
    """A mapping of lines by their keys, and how they were computed.

    The key of an error without its kind of confidence is that of the main one: `"ece"` for `"ece/top_label"`.

    Attributes:
        task: `"binary"`, `"multiclass"` or `"multilabel"`.
        n: sum of weights, the number of samples where all weights are 1 (multi-label: of labelled entries).
        num_classes: C, or L labels; 2 for a binary task.
        lines: all of them.
        settings: of the input and of the bins.
        notes: limitations of the values, such as why some are left out; sentences.
        n_dropped: samples (multi-label: entries) that `nan_policy="drop"` left out.
        version: of torchcalib.
        class_names: of the classes or labels, for a binary task the negative class first; empty if they are unknown.
        task_is_inferred: whether the task follows from the shapes, because it was not given.
    """

    task: Task
    n: float
    num_classes: int
    lines: tuple[Any, ...]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    n_dropped: int = 0
    version: str = __version__
    class_names: tuple[str, ...] = ()
    task_is_inferred: bool = False

    @abstractmethod
    def _entry(self, line: Any) -> V:
        """Return what the mapping has for a line."""

    @abstractmethod
    def _page(self) -> str:
        """Return the HTML page."""

    @abstractmethod
    def _files(self) -> Mapping[str, bytes]:
        """Return the files of a folder by their names."""

    def __getitem__(self, key: str) -> V:
        for line in self.lines:
            if line.key == key:
                return self._entry(line)
        for line in self.lines:  # those of the main mode are first
            if line.key.startswith(f"{key}/"):
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

    def save(self, path: str | Path) -> tuple[Path, ...]:
        """Write one file, or a folder with everything. Each file is complete or absent, and replaces an older one.

        Args:
            path: a file that ends in `.html` (the page), `.json` (all numbers), `.md` or `.tex` (the table of the
                lines). Any other path is a folder for the page, the numbers, and PNG and SVG of every diagram.
                Missing folders are made.

        Returns:
            The files written.

        Raises:
            ImportError: a page or a folder needs the extra `report`.
            ValueError: for another file ending.
            NotADirectoryError: if the folder, or something above it, is a file.

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
                f"Make the folder first if it shall have this name."
            )
        content = writers[ending]().encode()
        place.parent.mkdir(parents=True, exist_ok=True)
        return (write_whole(place, content),)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Report(Results[float]):
    """Scores, calibration errors and tables of a set of predictions.

    Print it, show it in a notebook, or index it by the key of a line for its value: `report["nll"]`, `report["ece"]`.
    `save` writes it to files, `plot` draws its reliability diagram, and `to_pandas`, `to_markdown`, `to_latex` and
    `to_dict` export its lines. `from_predictions`, `from_estimator` and `from_files` make one, as does
    `torchcalib.evaluate`.

    Attributes:
        task, n, num_classes, settings, notes, n_dropped, version, class_names, task_is_inferred: see `Results`.
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

    @classmethod
    @partial(documented, without=["batch_dims"])
    def from_predictions(
        cls,
        preds: Any,
        target: Any,
        *,
        task: Task | None = None,
        class_names: Sequence[str] | None = None,
        n_bins: int = 15,
        right: bool = False,
        with_calibration: bool = True,
        with_intervals: bool = True,
        groups: Any = None,
        group_names: Sequence[str] | None = None,
        sample_weight: Any = None,
        **options: Unpack[InputOptions],
    ) -> "Report":
        """Compute every score and calibration error of a set of predictions.

        - Scores: accuracy, NLL, Brier, ECD.
        - For every mode, errors over equal-width bins: ECE, ESCE, MCE, RMSCE.
        - Rank-based values for one series of confidences, and for labels: ACE with the same number of bins, TCE with
          the defaults of `torchcalib.functional.tce` (`tests` has its decisions), KS, and the parts of the Brier score
          of the event, MCB - DSC + UNC. For each class of a multi-class task they take too long; use
          `torchcalib.functional.ace` and the others.

        TCE, MCB, DSC and UNC need labels and are omitted for soft targets. All rank-based values need weights that are
        whole numbers. Above 2^24 samples (for labels: samples times labels) they come from a sketch, which is exact for
        float16 and bfloat16 probabilities, and else for data in which every probability has moved by less than 1 /
        2,048 in log-odds (more for more than 16 labels, see `settings`); `torchcalib.core.ranked.LogitCells` gives the
        bounds.

        `calibration` is the cross-validated gain of a calibration stage: NLL and Brier score after temperature scaling,
        affine scaling and, for one probability a sample or label, histogram binning and isotonic calibration, in 5
        stratified folds. It is omitted above 2^20 samples (for labels: samples times labels) or 2^26 values of `preds`,
        for soft targets, and where a class, or an outcome of a label, has too few samples for two folds. Affine scaling
        is omitted where samples times squared classes exceed 2^31.

        Every calibration error has a noise floor (its expected value if the model were perfectly calibrated), a p-value
        and a 95 % interval of its population value, for TCE of its expected value; see
        `torchcalib.inference.CalibrationTest`. They need no predictions, only accumulated sums. Errors over more than
        2^15 bins of classes have no interval, and rank-based errors of many labels have none of them. `sentence` is
        based on those of the main ECE.

        Scores, DSC and UNC have a 95 % percentile bootstrap interval of 199 replicates, up to 2^18 events (samples, or
        samples times classes), or 2^13 for DSC and UNC. `torchcalib.inference.bootstrap` computes intervals of other
        values.

        `notes` lists all omissions.

        Args:
            preds: probabilities, or logits with `from_logits=True`: binary `(N,)`, multi-class `(N, C)`, multi-label
                `(N, L)`; further axes are samples too. A tensor, or anything that numpy takes. Text columns of a
                DataFrame are the class names.
            target: labels or soft targets; see `torchcalib.functional.nll`. Text is a class name.
            task: `"binary"`, `"multiclass"` or `"multilabel"`; None infers it from the shapes, and
                `task_is_inferred` of the report is True. Targets of the shape `(N, C)` are ambiguous and need a task.
            class_names: names of the classes in the order of the class axis, for a binary task the negative class
                first, for a multi-label task of the labels.
            n_bins: number of equal-width bins, and for ACE of equal-mass bins.
            right: bins are `(a, b]` instead of `[a, b)`.
            with_calibration: compute `calibration`.
            with_intervals: compute intervals of scores, and of rank-based errors.
            groups: integers `(N,)`, the group of each sample, or -1 for none. The report then has the worst groups.
            group_names: of the groups by their numbers; None if the numbers are the names.
            sample_weight: the same as `weights`, under the name that scikit-learn has.

        Raises:
            TypeError, ValueError: for bad input; the message names the rule.

        Example:
            >>> import torch, torchcalib
            >>> preds, target = torch.tensor([0.2, 0.7, 0.9, 0.4]), torch.tensor([0, 1, 1, 1])
            >>> r = torchcalib.report(preds, target, task="binary", n_bins=2)
            >>> round(r["ece"], 6)
            0.2
            >>> torchcalib.report([0.2, 0.7], ["ham", "spam"], class_names=["ham", "spam"]).task
            'binary'
        """
        from torchcalib.reporting.building import ReportBuilder

        if sample_weight is not None:
            if options.get("weights") is not None:
                raise TypeError("`sample_weight` must not be given beside `weights`, got both. They mean the same.")
            options["weights"] = sample_weight
        weights = options.pop("weights", None)
        sizes = options.get("num_classes"), options.get("num_labels")
        if task is None and sizes != (None, None):
            task = task_of(task, *sizes)
        p = prepare(preds, target, task, class_names=class_names, positive_classes=options.get("positive_classes"))
        builder = ReportBuilder(
            task=p.task,
            class_names=p.class_names,
            n_bins=n_bins,
            right=right,
            with_calibration=with_calibration,
            with_intervals=with_intervals,
            **options,
        )
        builder.update(
            p.preds,
            p.target,
            weights=None if weights is None else per_sample("weights", weights, p.preds),
            groups=None if groups is None else per_sample("groups", groups, p.preds),
            group_names=group_names,
        )
        return replace(builder.report(), task_is_inferred=task is None)

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,  # noqa: N803 - the name that scikit-learn has
        y: Any,
        *,
        sample_weight: Any = None,
        class_names: Sequence[str] | None = None,
        **options: Any,
    ) -> "Report":
        """Return the report of a fitted scikit-learn classifier on data that it was not fitted to.

        Probabilities are those of `estimator.predict_proba(X)`. With two classes they are evaluated as P(y = the second
        class), with more as multi-class, and with several outputs as multi-label.

        Args:
            estimator: a fitted classifier with `predict_proba` and `classes_`; pipelines and searches too.
            X: data for `predict_proba`.
            y: labels as the classifier has them, numbers or text; multi-label `(N, L)` of 0 and 1.
            sample_weight: non-negative weights `(N,)`.
            class_names: names to show instead of `estimator.classes_`, in that order; multi-label: of the labels.
            **options: other arguments of `torchcalib.report`, such as `n_bins` and `groups`.

        Raises:
            TypeError: if there is no `predict_proba`.
            ValueError: if `y` has labels that the classifier does not know, and for other bad input.

        Example:
            >>> from sklearn.datasets import load_iris
            >>> from sklearn.linear_model import LogisticRegression
            >>> X, y = load_iris(return_X_y=True)
            >>> classifier = LogisticRegression(max_iter=1000).fit(X[::2], y[::2])
            >>> r = Report.from_estimator(classifier, X[1::2], y[1::2])
            >>> r.task, r.n
            ('multiclass', 75.0)
        """
        from torchcalib.reporting.estimators import predictions_of

        given = predictions_of(estimator, X, y)
        for name in ("task", "from_logits", "positive_classes", "class_axis"):
            if name in options:
                raise TypeError(
                    f"`{name}` must not be given, got {options[name]!r}: it follows from the classifier. "
                    "Use torchcalib.report(clf.predict_proba(X), y, ...) for another meaning."
                )
        return cls.from_predictions(
            given.preds,
            given.target,
            task=given.task,
            class_names=given.class_names if class_names is None else class_names,
            sample_weight=sample_weight,
            **options,
        )

    @classmethod
    def from_files(
        cls,
        *paths: str | Path,
        preds: str | None = None,
        target: str | None = None,
        weights: str | None = None,
        groups: str | None = None,
        from_logits: bool | None = None,
        task: Task | None = None,
        class_names: Sequence[str] | None = None,
        n_bins: int = 15,
        right: bool = False,
        with_calibration: bool = True,
        with_intervals: bool = True,
        ignore_index: int | None = None,
        nan_policy: NanPolicy = "raise",
    ) -> "Report":
        """Return the report of predictions in files, as the command `torchcalib report` makes it.

        Files are read piece by piece, so that memory is bounded.

        Args:
            *paths: parts of one data set, `.npz`, `.pt`, `.safetensors`, `.csv` or `.parquet`; or `.npy` files of
                predictions and targets.
            preds: name of the array or column of predictions; None for a common name. This holds for all names.
            target: of the targets.
            weights: of the weights, which are optional.
            groups: of the groups, whole numbers or text, which have no common names; None for no groups.
            from_logits: whether predictions are logits; None infers it from their name.
            task: `"binary"`, `"multiclass"` or `"multilabel"`; None infers it from the shapes.
            class_names: names of the classes in the order of the class axis.
            n_bins: number of equal-width bins, and for ACE of equal-mass bins.
            right: bins are `(a, b]` instead of `[a, b)`.
            with_calibration: compute `calibration`.
            with_intervals: compute intervals of scores, and of rank-based errors.
            ignore_index: rows with this target are dropped.
            nan_policy: `"drop"` leaves out rows with NaN and counts them; `"raise"` raises.

        Returns:
            The report; `source` has the names of the files and arrays.

        Raises:
            OSError: a file cannot be read.
            TypeError, ValueError: a file is unsuitable or needs an argument.

        Example:
            >>> import tempfile
            >>> import numpy as np
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     np.savez(f"{folder}/valid.npz", probs=np.array([0.2, 0.7, 0.9]), targets=np.array([0, 1, 1]))
            ...     r = Report.from_files(f"{folder}/valid.npz")
            >>> r.task, r.n
            ('binary', 3.0)
        """
        from torchcalib.reporting.reading import builder_of

        names = {"preds": preds, "target": target, "weights": weights, "groups": groups}
        builder = builder_of(
            paths,
            {**names, "from_logits": from_logits, "task": task},
            class_names=class_names,
            n_bins=n_bins,
            right=right,
            with_calibration=with_calibration,
            with_intervals=with_intervals,
            ignore_index=ignore_index,
            nan_policy=nan_policy,
        )
        return replace(builder.report(), task_is_inferred=task is None)

    @property
    def main_table(self) -> BinTable:
        """The table of the main mode, which the sentence is about."""
        return next(iter(self.tables.values()))

    @property
    def main_line(self) -> Line:
        """The ECE of the main mode, which the sentence is about."""
        return next(line for line in self.lines if line.key.startswith("ece/"))

    @property
    def classes(self) -> Table | None:
        """The class-wise ECE of every class or label, the largest first; None for a binary task."""
        return class_table(self)

    @property
    def recommendation(self) -> Recommendation | None:
        """Whether to add a calibration stage, and which; None where calibrators were not tried."""
        return None if self.calibration is None else self.calibration.recommendation

    def plot(self, ax: "Axes | None" = None, *, mode: NamedMode | None = None, **options: Any) -> "Axes":
        """Draw the reliability diagram.

        Args:
            ax: axes to draw on; by default those of a new figure, `ax.figure`.
            mode: kind of confidence, one of `tables`; None for the main one.
            **options: further arguments of `torchcalib.plots.reliability_diagram`, such as `label` and `title`.

        Returns:
            The axes.

        Example:
            >>> import torch, torchcalib
            >>> r = torchcalib.report(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), with_intervals=False)
            >>> r.plot(title="two samples").get_title(loc="left")
            'two samples'
        """
        from torchcalib.plots.reliability import reliability_diagram

        return reliability_diagram(self, ax=ax, mode=mode, **options)

    def layout(self) -> Table:
        """Return every line."""
        return line_table(self)

    def _entry(self, line: Line) -> float:
        return line.value

    def _page(self) -> str:
        from torchcalib.reporting.html.report import render

        return render(self)

    def _files(self) -> Mapping[str, bytes]:
        from torchcalib.reporting.html.report import files_of

        return files_of(self)

    def _repr_html_(self) -> str:
        """Return the sentence, the lines and the worst classes for a notebook."""
        words = [self.sentence, input_line(self)]
        worst = class_table(self, WORST_CLASSES)
        tables = [super()._repr_html_(), *([] if worst is None else [worst._repr_html_()])]
        return "\n".join([*(f"<p>{escape(printable(text))}</p>" for text in words), *tables])

    def __str__(self) -> str:
        stage = self.calibration
        advice = [] if stage is None else [" ".join([stage.recommendation.text, *stage.notes])]
        worst = class_table(self, WORST_CLASSES) if self.class_names else None
        others = [
            *([] if worst is None else [worst]),
            *([] if self.groups is None else [self.groups.layout(metric="ECE")]),
        ]
        numbers = "\n".join([to_text(line_table(self)), *self.notes])
        tables = [self.main_table.layout(), *others]
        parts = [self.sentence, *advice, input_line(self), str(self.main_line), numbers, *map(to_text, tables)]
        return "\n\n".join(parts)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Comparison(Results[ComparedLine]):
    """Scores and calibration errors of several systems that predicted the same targets, and their differences.

    Print it, show it in a notebook, or index it by key: `comparison["nll"].differences["b"].value`. `save` writes it to
    files, and `to_pandas`, `to_markdown`, `to_latex` and `to_dict` export it.

    Attributes:
        task, n, num_classes, settings, notes, version, class_names, task_is_inferred: see `Results`.
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

    def layout(self) -> Table:
        """Return every line, with columns for each system."""
        return difference_table(self, *self.systems[1:])

    def _entry(self, line: ComparedLine) -> ComparedLine:
        return line

    def _page(self) -> str:
        from torchcalib.reporting.html.comparison import render_comparison

        return render_comparison(self)

    def _files(self) -> Mapping[str, bytes]:
        from torchcalib.reporting.html.comparison import files_of

        return files_of(self)

    def _repr_html_(self) -> str:
        """Return the findings and the table for a notebook."""
        words = [*self.sentences.values(), input_line(self)]
        return "\n".join([*(f"<p>{escape(printable(text))}</p>" for text in words), super()._repr_html_()])

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
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, str | int | bool | None) else str(value)
