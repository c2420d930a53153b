"""`Report` and `Comparison`: results as data classes, with methods to print, export and save them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from torchcalib.calibration.recommendation import Recommendation
from torchcalib.core.arguments import InputOptions, NanPolicy, Task, task_of, weights_from
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.documentation import documented
from torchcalib.core.events import NamedMode
from torchcalib.core.tables import Table, to_text
from torchcalib.core.tasks import cluster_ids, per_sample, prepare
from torchcalib.io.errors import printable, shown
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting.classes import ClassLine
from torchcalib.reporting.contents import input_line
from torchcalib.reporting.monitoring.history import History
from torchcalib.reporting.results import CalibrationStage, ComparedLine, Line, Results
from torchcalib.reporting.tables import WORST_CLASSES, class_table, difference_table, line_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from torchcalib.reporting.decision import Decision


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Report(Results[float]):
    """Scores, calibration errors and bin tables of one set of predictions.

    Create a report with `from_predictions` (also `torchcalib.report`), `from_estimator`, `from_files` or
    `torchcalib.evaluate`. Print it, show it in a notebook, or look up a value by key: `report["nll"]`,
    `report["ece"]`. `save` writes files, `plot` draws the reliability diagram, and `to_pandas`, `to_markdown`,
    `to_latex` and `to_dict` export the lines.

    Attributes:
        task, n, num_classes, settings, notes, n_dropped, version, created, class_names, task_is_inferred: see
            `Results`.
        lines: every value with its noise floor, p-value and interval; see `Line`.
        priors: frequency of each class; multi-label: of each label.
        tables: table of equal-width bins for each mode; multi-label: all labels pooled.
        class_lines: calibration of each class against the rest, or of each label, in the order of the classes; see
            `torchcalib.reporting.classes.ClassLine`. Empty for a binary task.
        decision: verdict on calibration, its cause, and what to do; all other texts on these agree with it.
        source: origin of the predictions, such as files.
        tests: table of the bins of the test-based calibration error (TCE) for each mode; multi-label: all labels
            pooled. Empty for soft targets and for fractional weights.
        calibration: cross-validated gains of calibrators; None if omitted (`notes` contains the reason).
        history: training history from a `torchcalib.Monitor`, or None. Add it by
            `dataclasses.replace(report, history=monitor.history)`.
        groups: table of the groups with the largest excess of ECE over its noise floor; None without groups.
        warnings: those of `notes` that may make the data or the tests invalid, such as dropped rows.
    """

    lines: tuple[Line, ...]
    priors: tuple[float, ...]
    tables: Mapping[NamedMode, BinTable]
    class_lines: tuple[ClassLine, ...]
    decision: "Decision"
    source: Mapping[str, Any] = field(default_factory=dict)
    tests: Mapping[NamedMode, TCETable] = field(default_factory=dict)
    calibration: CalibrationStage | None = None
    history: History | None = None
    groups: GroupTable | None = None
    warnings: tuple[str, ...] = ()

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
        clusters: Any = None,
        sample_weight: Any = None,
        **options: Unpack[InputOptions],
    ) -> "Report":
        """Compute scores and calibration errors of one set of predictions.

        - Scores: accuracy, negative log-likelihood (NLL), Brier score, and entropic calibration difference (ECD).
        - Relative scores: NLL and Brier score divided by the score of predicting the class frequencies (NCE, NBS).
        - Errors over equal-width bins, for every mode: expected (ECE), expected signed (ESCE), maximum (MCE) and root
          mean squared calibration error (RMSCE).
        - Rank-based errors, except class-wise for a multi-class task: adaptive (ACE), test-based (TCE),
          Kolmogorov-Smirnov (KS) and averaged two-bin calibration error (ATB).
        - Brier score decomposition, for the same modes: miscalibration (MCB), discrimination (DSC), uncertainty (UNC).
        - Selective prediction, for the top label: area under the risk-coverage curve (AURC), its excess over the ideal
          order (E-AURC), area under the generalised risk-coverage curve (AUGRC), area under the receiver operating
          characteristic curve (AUROC) of correctness, accuracy at 80% coverage, and coverage at 5% risk.

        TCE, MCB, DSC, UNC and selective prediction are omitted for soft targets. They are also omitted for fractional
        weights, as are ACE, KS and ATB. Above 2^24 samples (multi-label: samples times labels) all of them are computed
        from a sketch. It rounds probabilities by less than 1 / 2,048 in log-odds (more above 16 labels). It is exact
        for float16 and bfloat16; see `torchcalib.core.ranked.LogitCells`.

        `calibration` contains accuracy, NLL, Brier score and ECE after each calibrator of `torchcalib.calibration`
        that supports the task, cross-validated in 5 random folds, and recommends one; see
        `torchcalib.calibration.recommend`. It is omitted above 2^20 samples or 2^26 elements of `preds`. It needs
        labels of at least two classes. Slow calibrators are omitted for many classes.

        `decision` contains the verdict, the cause of miscalibration, and what to do; see
        `torchcalib.reporting.decision.Decision`.

        Every calibration error has a noise floor and a p-value; see `torchcalib.inference.CalibrationTest`. The noise
        floor is the expected value under perfect calibration. ECE, ACE, ESCE and RMSCE also have a 95% interval, except
        for averages over classes. Scores, DSC, UNC and metrics of selective prediction have a 95% bootstrap interval
        from 199 replicates, minus a bias above a quarter of its standard error. It is omitted above 2^18 events
        (samples, or samples times classes). For DSC, UNC and selective prediction it is omitted above 2^13 events.

        `notes` lists all omissions.

        Args:
            preds: probabilities, or logits with `from_logits=True`: binary `(N,)`, multi-class `(N, C)`, multi-label
                `(N, L)`. Further axes are samples. Any array-like is accepted. Text column names of a DataFrame become
                the class names.
            target: labels or soft targets; see `torchcalib.functional.nll`. Strings are class names.
            task: `"binary"`, `"multiclass"` or `"multilabel"`. None infers the task from the shapes and sets
                `task_is_inferred`. Targets of shape `(N, C)` are ambiguous and need a task.
            class_names: names of the classes or labels in the order of the class axis; the negative class first if
                binary.
            n_bins: number of equal-width bins, and of equal-mass bins for ACE.
            right: use bins `(a, b]` instead of `[a, b)`.
            with_calibration: compute `calibration`.
            with_intervals: compute 95% intervals, and the p-values and noise floors of rank-based errors.
            groups: group number of each sample, integers `(N,)`, or -1 for no group. The report then contains the
                groups with the largest excess of ECE over its noise floor.
            group_names: names of the groups, indexed by group number; None uses the numbers.
            clusters: cluster of each sample, integers or strings `(N,)`, such as an image, a document or a patient.
                Only samples of different clusters are treated as independent; see `torchcalib.Clustered`. With further
                sample axes, there is one cluster for each sample or for each item of the first axis.
            sample_weight: alias of `weights`, as in scikit-learn.

        Returns:
            The report.

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

        weights = weights_from(options.pop("weights", None), sample_weight)
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
            clusters=None if clusters is None else cluster_ids(clusters, p.preds),
        )
        return replace(builder.report(), task_is_inferred=task is None)

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,  # noqa: N803 - the name in scikit-learn
        y: Any,
        *,
        sample_weight: Any = None,
        class_names: Sequence[str] | None = None,
        **options: Any,
    ) -> "Report":
        """Compute the report of a fitted scikit-learn classifier on held-out data.

        The report evaluates `estimator.predict_proba(X)`: as binary for two classes (P(y = second class)), as
        multi-class for more classes, and as multi-label for several outputs.

        Args:
            estimator: a fitted classifier, pipeline or search with `predict_proba` and `classes_`.
            X: input for `predict_proba`. Use data to which the classifier was not fitted.
            y: labels from `estimator.classes_`, numbers or strings; multi-label: 0 and 1 of shape `(N, L)`.
            sample_weight: non-negative weights `(N,)`.
            class_names: display names in the order of `estimator.classes_` (multi-label: of the labels); None uses
                `estimator.classes_`.
            **options: other arguments of `torchcalib.report`, such as `n_bins`, `groups` and `clusters`.

        Returns:
            The report.

        Raises:
            TypeError: if the estimator has no `predict_proba`.
            ValueError: if `y` contains labels that are not in `estimator.classes_`, and for other invalid input.

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
                    f"`{name}` must not be passed, because the classifier determines it, got {shown(options[name])}. "
                    "Call torchcalib.report(clf.predict_proba(X), y, ...) to set it."
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
        clusters: str | None = None,
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
        """Compute the report of predictions in files, like the command `torchcalib report`.

        Files are read in chunks of bounded size.

        Args:
            *paths: parts of one data set, `.npz`, `.pt`, `.safetensors`, `.csv` or `.parquet`; or `.npy` files of
                predictions and targets.
            preds: name of the array or column of predictions; None searches for a common name, such as "probs".
            target: name of the targets; None searches for a common name.
            weights: name of the weights; None searches for a common name. Weights are optional.
            groups: name of the groups, which are whole numbers or strings; None for no groups.
            clusters: name of the clusters of dependent rows, which are whole numbers or strings; None for no clusters.
            from_logits: whether predictions are logits; None infers it from their name.
            task: `"binary"`, `"multiclass"` or `"multilabel"`; None infers it from the shapes.
            class_names: names of the classes in the order of the class axis.
            n_bins: number of equal-width bins, and of equal-mass bins for the adaptive calibration error (ACE).
            right: use bins `(a, b]` instead of `[a, b)`.
            with_calibration: compute `calibration`.
            with_intervals: compute 95% intervals, and the p-values and noise floors of rank-based errors.
            ignore_index: rows with this target are dropped.
            nan_policy: `"drop"` drops and counts rows with NaN; `"raise"` raises an error.

        Returns:
            The report. `source` contains the names of the files and arrays.

        Raises:
            OSError: if a file cannot be read.
            TypeError, ValueError: if the content of a file is invalid, or a required argument is missing.

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

        names = {"preds": preds, "target": target, "weights": weights, "groups": groups, "clusters": clusters}
        builder = builder_of(
            paths,
            {**names, "from_logits": from_logits, "task": task, "class_names": class_names},
            n_bins=n_bins,
            right=right,
            with_calibration=with_calibration,
            with_intervals=with_intervals,
            ignore_index=ignore_index,
            nan_policy=nan_policy,
        )
        return replace(builder.report(), task_is_inferred=task is None)

    @property
    def sentence(self) -> str:
        """Verdict and cause of miscalibration, as text."""
        return self.decision.sentence

    @property
    def main_table(self) -> BinTable:
        """Bin table of the main mode, the first entry of `tables`."""
        return next(iter(self.tables.values()))

    @property
    def main_line(self) -> Line:
        """Line of the expected calibration error (ECE) of the main mode."""
        return next(line for line in self.lines if line.key.startswith("ece/"))

    @property
    def per_class(self) -> tuple[float, ...]:
        """Class-wise expected calibration error (ECE) of each class or label; empty for a binary task."""
        return tuple(line.value for line in self.class_lines)

    @property
    def n_rows(self) -> float:
        """Total weight of the rows: `n`; multi-label: the largest total weight of the labelled entries of a label."""
        return max(line.n for line in self.class_lines) if self.task == "multilabel" else self.n

    @property
    def classes(self) -> Table | None:
        """Table of the calibration of each class or label, the largest errors first; None for a binary task."""
        return class_table(self)

    @property
    def recommendation(self) -> Recommendation | None:
        """Recommended calibrator, or the advice not to calibrate; None if calibrators were not evaluated."""
        return None if self.calibration is None else self.calibration.recommendation

    def plot(self, ax: "Axes | None" = None, *, mode: NamedMode | None = None, **options: Any) -> "Axes":
        """Draw the reliability diagram.

        Args:
            ax: axes to draw on; None creates a new figure, `ax.figure`.
            mode: a key of `tables`; None for the main mode.
            **options: other arguments of `torchcalib.plots.reliability_diagram`, such as `label` and `title`.

        Returns:
            The axes of the diagram.

        Example:
            >>> import torch, torchcalib
            >>> r = torchcalib.report(torch.tensor([0.2, 0.7]), torch.tensor([0, 1]), with_intervals=False)
            >>> r.plot(title="two samples").get_title(loc="left")
            'two samples'
        """
        from torchcalib.plots.reliability import reliability_diagram

        return reliability_diagram(self, ax=ax, mode=mode, **options)

    def layout(self) -> Table:
        """Return the table of all scores and calibration errors."""
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
        """Return HTML for a notebook: main findings, table of all lines, and the classes with the largest errors."""
        words = [self.sentence, input_line(self)]
        worst = class_table(self, WORST_CLASSES)
        tables = [super()._repr_html_(), *([] if worst is None else [worst._repr_html_()])]
        return "\n".join([*(f"<p>{escape(printable(text))}</p>" for text in words), *tables])

    def __str__(self) -> str:
        stage = self.calibration
        advice = [self.decision.action, *([] if stage is None or not stage.notes else [" ".join(stage.notes)])]
        worst = class_table(self, WORST_CLASSES) if self.class_names else None
        others = [
            *([] if worst is None else [worst]),
            *([] if self.groups is None else [self.groups.layout(metric="ECE")]),
        ]
        numbers = "\n".join([to_text(line_table(self)), *self.notes])
        tables = [self.main_table.layout(), *others]
        parts = [self.sentence, *advice, input_line(self), str(self.main_line), numbers, *map(to_text, tables)]
        return "\n\n".join(parts)


report = Report.from_predictions


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Comparison(Results[ComparedLine]):
    """Scores and calibration errors of several systems on the same targets, and their differences.

    `torchcalib.compare` creates it. Print it, show it in a notebook, or look up a line by key:
    `comparison["nll"].differences["b"].value`. `save` writes files, and `to_pandas`, `to_markdown`, `to_latex` and
    `to_dict` export the lines.

    Attributes:
        task, n, num_classes, settings, notes, version, created, class_names, task_is_inferred: see `Results`.
        n_dropped: number of rows dropped from all systems because a prediction or target is NaN.
        lines: one entry for each score and calibration error; see `ComparedLine`.
        systems: names of the systems, the baseline first.
        sentences: the main findings as text, by name of each system except the baseline.
        sources: origin of the predictions, such as files, by system name.
    """

    lines: tuple[ComparedLine, ...]
    systems: tuple[str, ...]
    sentences: Mapping[str, str]
    sources: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """Name of the first system, with which all other systems are compared."""
        return self.systems[0]

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
            "most 0.05 is at most 5%."
        )

    @property
    def main_lines(self) -> tuple[ComparedLine, ...]:
        """Scores, and calibration errors of the main mode. `difference_plot` draws only these lines."""
        groups = list(dict.fromkeys(line.group for line in self.lines))[:2]
        return tuple(line for line in self.lines if line.group in groups)

    def layout(self) -> Table:
        """Return the table of all scores and calibration errors, with columns for each system."""
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
        """Return HTML for a notebook: the main findings and the table of all lines."""
        words = [*self.sentences.values(), input_line(self)]
        return "\n".join([*(f"<p>{escape(printable(text))}</p>" for text in words), super()._repr_html_()])

    def __str__(self) -> str:
        tables = [to_text(difference_table(self, name)) for name in self.systems[1:]]
        return "\n\n".join([" ".join(self.sentences.values()), *tables, "\n".join([self.caution, *self.notes])])
