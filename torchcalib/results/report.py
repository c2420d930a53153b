"""`Report`: scores, calibration errors and tables of one set of predictions, with methods to print and export them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

from torchcalib.calibration.recommendation import Recommendation
from torchcalib.core.arguments import InputOptions, NanPolicy, Task, task_by_position, task_of, weights_from
from torchcalib.core.arrays import check_columns, is_frame
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import NamedMode
from torchcalib.core.tasks import checked_names, cluster_ids, outcomes_of, per_sample, prepare
from torchcalib.display.tables import Cell, Column, Table, attribute_column, number, p_value, to_text
from torchcalib.display.words import count, percent, printable, printable_lines
from torchcalib.io.errors import shown
from torchcalib.io.opening import PIECE_BYTES, open_predictions
from torchcalib.results.base import Results, above, plain
from torchcalib.results.calibration import CalibrationStage
from torchcalib.results.decision import Decision
from torchcalib.results.definitions import Definition
from torchcalib.results.group_table import GroupTable
from torchcalib.results.history import History
from torchcalib.results.lines import ClassLine, Line, by_group, explanation_columns, interval_column, name_column
from torchcalib.results.slice_table import SliceTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RCL_SOURCE = "[EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2, arXiv 2408.02841."
"""Publication that defines the relative calibration loss (RCL)."""

WORST_CLASSES = 10
"""Number of classes in the tables of a terminal, of a notebook and of `str`."""


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
            `torchcalib.results.ClassLine`. Empty for a binary task.
        decision: verdict on calibration, its cause, and what to do; all other texts on these agree with it.
        source: origin of the predictions, such as files.
        tests: table of the bins of the test-based calibration error (TCE) for each mode; multi-label: all labels
            pooled. Empty for soft targets and for fractional weights.
        calibration: cross-validated gains of calibrators; None if omitted (`notes` contains the reason).
        history: training history from a `torchcalib.Monitor`, or None. Add it by
            `dataclasses.replace(report, history=monitor.history)`.
        groups: table of the groups with the largest excess of ECE over its noise floor, with the p-value of the test
            of differences between groups; None without groups.
        slices: table of the most significant intersections of several columns of groups; see `torchcalib.slices`. None
            with fewer than two columns, and for a multi-label task.
        minimum_detectable_error: smallest absolute mean signed error (ESCE) of the main mode that its test finds with
            probability 0.8, at the level 0.05. It includes the design effect of clusters. Multi-label: that of a single
            label, which is found for all of them (Bonferroni). See `torchcalib.minimum_detectable_error`.
        warnings: those of `notes` that may make the data or the tests invalid, such as dropped rows.
    """

    file_name: ClassVar[str] = "report.json"

    lines: tuple[Line, ...]
    priors: tuple[float, ...]
    tables: Mapping[NamedMode, BinTable]
    class_lines: tuple[ClassLine, ...]
    decision: Decision
    source: Mapping[str, Any] = field(default_factory=dict)
    tests: Mapping[NamedMode, TCETable] = field(default_factory=dict)
    calibration: CalibrationStage | None = None
    history: History | None = None
    groups: GroupTable | None = None
    slices: SliceTable | None = None
    minimum_detectable_error: float = math.nan
    warnings: tuple[str, ...] = ()

    @classmethod
    @task_by_position
    def from_predictions(
        cls,
        preds: Any,
        target: Any = None,
        task: Task | None = None,
        *,
        class_names: Sequence[str | int] | None = None,
        n_bins: int = 15,
        right: bool = False,
        safe_threshold: float | None = None,
        with_calibration: bool = True,
        with_intervals: bool = True,
        groups: Any = None,
        group_names: Sequence[str] | None = None,
        clusters: Any = None,
        pred: Any = None,
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

        `calibration` contains accuracy, NLL, Brier score and ECE after each calibrator that
        `torchcalib.calibration.recommend` compares by default, cross-validated in 5 random folds, and recommends one.
        It is omitted above 2^20 samples or 2^26 elements of `preds`. It needs targets of at least two classes. Slow
        calibrators are omitted for many classes, and isotonic ones for soft targets.

        `decision` contains the verdict, the cause of miscalibration, and what to do; see
        `torchcalib.results.Decision`.

        Every calibration error has a noise floor and a p-value; see `torchcalib.inference.CalibrationTest`. The noise
        floor is the expected value under perfect calibration. ECE, ACE, ESCE and RMSCE also have a 95% interval, except
        for averages over classes. Scores, DSC, UNC and metrics of selective prediction have a 95% bootstrap interval
        from 199 replicates, minus a bias above a quarter of its standard error. It is omitted above 2^18 events
        (samples, or samples times classes). For DSC, UNC and selective prediction it is omitted above 2^13 events.

        `notes` lists all omissions.

        Args:
            preds: probabilities, or logits with `from_logits=True`: binary `(N,)`, multi-class `(N, C)`, multi-label
                `(N, L)`. Further axes are samples. Any array-like is accepted. Text column names of a DataFrame become
                the class names. A DataFrame may also contain all columns, as a file does.
            target: labels or soft targets; see `torchcalib.functional.nll`. Strings are class names. For a DataFrame
                with all columns, the name of the targets, or None to find a common name. `weights`, `groups` and
                `clusters` are then names too.
            task: `"binary"`, `"multiclass"` or `"multilabel"`. `"confidence"` is a binary task in which predictions are
                confidences in the predicted class or answer, and targets are 1 if it is correct. None infers the task
                from the data and sets `task_is_inferred`.
            class_names: names of the classes or labels in the order of the class axis; the negative class first.
            n_bins: number of equal-width or equal-mass bins.
            right: bins are `(a, b]` instead of `[a, b)`.
            safe_threshold: largest entropic calibration difference (ECD) in nats that is called safe; None for none.
            with_calibration: compute the cross-validated gains of calibrators.
            with_intervals: compute 95% intervals, and the p-values and noise floors of rank-based errors.
            groups: group of each sample `(N,)`: text, empty for no group, or integers, -1 for no group. The report then
                contains the groups with the largest excess of ECE over its noise floor. Several columns (a DataFrame, a
                dict, a list of arrays, or a list of names) form the groups "age=old, sex=f". A row with a missing value
                has no group. The report then also contains `slices`, the intersections of the columns.
            group_names: names of numbered groups, indexed by group number; None uses the numbers.
            clusters: cluster of each sample, integers or strings `(N,)`, such as an image, a document or a patient.
                Only samples of different clusters are treated as independent; see `torchcalib.Clustered`. With further
                sample axes, there is one cluster for each sample or for each item of the first axis.
            pred: predicted labels `(N,)`, if `preds` are their probabilities `(N,)`. The event is that the prediction
                is right: the task is `"confidence"`. For a DataFrame with all columns, the name of a column.
            sample_weight: alias of `weights`, as in scikit-learn.
            **options: `from_logits`, `weights`, `ignore_index`, `nan_policy` and others of
                `torchcalib.functional.InputOptions`, without `batch_dims`.

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
        weights = weights_from(options.pop("weights", None), sample_weight)
        settings: dict[str, Any] = {
            "n_bins": n_bins,
            "right": right,
            "safe_threshold": safe_threshold,
            "with_calibration": with_calibration,
            "with_intervals": with_intervals,
        }
        if target is None and not is_frame(preds):
            raise TypeError(
                "`target` must be given for predictions without columns, got None. Call report(preds, target), or "
                "report(df, target='y') for a DataFrame."
            )
        if target is None or (isinstance(target, str) and is_frame(preds)):
            if isinstance(groups, list | tuple) and all(isinstance(name, str) for name in groups):
                groups = ",".join(groups)
            names = {"target": target, "weights": weights, "groups": groups, "clusters": clusters, "pred": pred}
            check_columns(names, {"group_names": group_names, "class_axis": options.pop("class_axis", None)})
            opening = {"frame": preds, **names, "from_logits": options.pop("from_logits", None)}
            return cls._read((), {**opening, "task": task, "class_names": class_names}, **settings, **options)
        for name, value in (("weights", weights), ("groups", groups), ("clusters", clusters)):
            if isinstance(value, str):
                raise TypeError(
                    f"`{name}` must have one value for each sample, got the name {shown(value)}. Pass the column, or "
                    f"the DataFrame with all columns: report(df, target='NAME', {name}={shown(value)})."
                )
        if pred is not None:
            target, task = outcomes_of(pred, target), "confidence"
        sizes = options.get("num_classes"), options.get("num_labels")
        if task is None and sizes != (None, None):
            task = task_of(task, *sizes)
        p = prepare(
            preds,
            target,
            task,
            class_names=class_names,
            positive_classes=options.get("positive_classes"),
            from_logits=options.get("from_logits"),
            ignore_index=options.get("ignore_index"),
        )
        options["from_logits"] = p.from_logits
        builder = above("torchcalib.reporting.building:ReportBuilder")(
            task=task if task == "confidence" else p.task,
            class_names=p.class_names,
            **settings,
            **options,
        )
        builder.update(
            p.preds,
            p.target,
            weights=None if weights is None else per_sample("weights", weights, p.preds),
            groups=groups,
            group_names=group_names,
            clusters=None if clusters is None else cluster_ids(clusters, p.preds),
        )
        found: Report = replace(builder.report(), task_is_inferred=task is None)
        return found

    def flat(self) -> dict[str, float]:
        """Return all numbers as one dictionary for loggers, such as TensorBoard, MLflow and Weights & Biases.

        Keys are those of the report, such as `"ece/top_label"`. Noise floor, p-value and interval of a line follow, as
        in `"ece/top_label/p_value"`, unless they are omitted. Other keys are `"n"`, the number of samples, and
        `"minimum_detectable_error"`. `"groups/difference/p_value"` is that of the test of differences between groups.
        `"slices/p_value"` is the smallest adjusted p-value of the slices.

        Example:
            >>> import torchcalib
            >>> r = torchcalib.report([0.2, 0.7, 0.9], [0, 1, 1], with_intervals=False, with_calibration=False)
            >>> [key for key in r.flat() if key.startswith("ece/positive")]
            ['ece/positive', 'ece/positive/noise_floor', 'ece/positive/p_value']
        """
        found = {"n": self.n, "minimum_detectable_error": self.minimum_detectable_error}
        for line in self.lines:
            ends = (None, None) if line.interval is None else (line.interval.low, line.interval.high)
            evidence = {"noise_floor": line.noise_floor, "p_value": line.p_value, "low": ends[0], "high": ends[1]}
            found[line.key] = line.value
            found |= {f"{line.key}/{name}": value for name, value in evidence.items() if value is not None}
        if self.groups is not None and self.groups.difference_p_value is not None:
            found["groups/difference/p_value"] = self.groups.difference_p_value
        if self.slices is not None:
            found["slices/p_value"] = self.slices.smallest_p_value
        return found

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,  # noqa: N803 - the name in scikit-learn
        y: Any,
        *,
        sample_weight: Any = None,
        class_names: Sequence[str | int] | None = None,
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
        given = above("torchcalib.reporting.estimators:predictions_of")(estimator, X, y)
        for name in ("task", "from_logits", "positive_classes", "class_axis"):
            if name in options:
                raise TypeError(
                    f"`{name}` must not be passed, because the classifier determines it, got {shown(options[name])}. "
                    "Call torchcalib.report(clf.predict_proba(X), y, ...) to set it."
                )
        names = checked_names(given.class_names if class_names is None else class_names)
        labels = given.target
        if len(names) == len(given.class_names) and given.task != "multilabel":
            labels = [names[k] for k in labels.tolist()]
        return cls.from_predictions(
            given.preds,
            labels,
            task=given.task,
            from_logits=False,
            class_names=names or None,
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
        groups: str | Sequence[str] | None = None,
        clusters: str | None = None,
        pred: str | None = None,
        from_logits: bool | None = None,
        task: Task | None = None,
        class_names: Sequence[str | int] | None = None,
        n_bins: int = 15,
        right: bool = False,
        safe_threshold: float | None = None,
        with_calibration: bool = True,
        with_intervals: bool = True,
        ignore_index: int | None = None,
        nan_policy: NanPolicy = "raise",
    ) -> "Report":
        """Compute the report of predictions in files, like the command `torchcalib report`.

        Files are read in chunks of bounded size.

        Args:
            *paths: parts of one data set, such as `.npz` or `.parquet` files; or `.npy` files of predictions and
                targets.
            preds: name of the array or column of predictions; None searches for a common name, such as "probs".
            target: name of the targets; None searches for a common name.
            weights: name of the weights; None searches for a common name. Weights are optional.
            groups: name of the groups, which are whole numbers or strings; None for no groups. Several columns, as a
                list or "age,sex", form the groups "age=old, sex=f", and are searched for `slices`.
            clusters: name of the clusters of dependent rows, which are whole numbers or strings; None for no clusters.
            pred: name of the predicted labels, if predictions are their probabilities; None searches for a common name.
            from_logits: whether predictions are logits; None infers it from their name, or else from all values.
            task: `"binary"`, `"multiclass"` or `"multilabel"`; None infers it from the shapes.

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
        names = {"preds": preds, "target": target, "weights": weights, "groups": groups, "clusters": clusters}
        return cls._read(
            paths,
            {**names, "pred": pred, "from_logits": from_logits, "task": task, "class_names": class_names},
            n_bins=n_bins,
            right=right,
            safe_threshold=safe_threshold,
            with_calibration=with_calibration,
            with_intervals=with_intervals,
            ignore_index=ignore_index,
            nan_policy=nan_policy,
        )

    @classmethod
    def _read(cls, paths: Sequence[Any], opening: Mapping[str, Any], **settings: Any) -> "Report":
        """Return the report of files, or of a table; `opening` has the arguments of `open_predictions`."""
        paths = paths[0] if len(paths) == 1 and isinstance(paths[0], list | tuple) else paths
        shared = {name: settings[name] for name in ("nan_policy", "ignore_index") if name in settings}
        files = open_predictions(paths, **opening, **shared)
        builder = above("torchcalib.reporting.building:ReportBuilder")(**{**settings, **files.settings})
        for rows in files.chunks(PIECE_BYTES):
            builder.update(**rows.arguments)
        found: Report = replace(builder.report(), task_is_inferred=opening["task"] is None)
        return found

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

    @cached_property
    def definitions(self) -> dict[str, Definition]:
        """Definition of each line, by key: confidences, event, bins, norm and excluded rows.

        Example:
            >>> import torchcalib
            >>> r = torchcalib.report([0.2, 0.7, 0.9], [0, 1, 1], with_intervals=False, with_calibration=False)
            >>> r.definitions["ece/positive"].edges
            '[a, b), last bin closed'
        """
        found: dict[str, Definition] = above("torchcalib.reporting.definitions:definitions_of")(self)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and `definitions` as plain Python values; see `Results.to_dict`."""
        return {**super().to_dict(), "definitions": plain(self.definitions)}

    @property
    def publications(self) -> tuple[str, ...]:
        """Publications cited by the lines and the calibrators, in the order of their citation numbers."""
        calibrators = () if self.calibration is None else (RCL_SOURCE,)
        return tuple(dict.fromkeys((*super().publications, *calibrators)))

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
        axes: Axes = above("torchcalib.plots.reliability:reliability_diagram")(self, ax=ax, mode=mode, **options)
        return axes

    def layout(self) -> Table:
        """Return the table of all scores and calibration errors."""
        return line_table(self)

    def _entry(self, line: Line) -> float:
        return line.value

    def _n_in_words(self) -> str:
        """Return the number of samples, for floating weights Kish's effective number (sum w)^2 / sum w^2."""
        table = self.main_table
        effective = self.n**2 / float((table.n.square() / table.effective_n).nan_to_num(0).sum())
        if math.isclose(effective, self.n, rel_tol=1e-6):
            return count(self.n)
        return f"{effective:,.0f} (effective number, sum of weights {count(self.n)})"

    def _multilabel_size(self) -> str:
        size = f"{count(self.n_rows)} rows × {self.num_classes:,} labels"
        is_complete = math.isclose(self.n_rows * self.num_classes, self.n, rel_tol=1e-12)  # sums of weights are rounded
        return size if is_complete else f"{size}, {count(self.n)} labelled entries"

    def _repr_html_(self) -> str:
        words = [self.sentence, self.input_line]
        worst = class_table(self, WORST_CLASSES)
        tables = [super()._repr_html_(), *([] if worst is None else [worst._repr_html_()])]
        return "\n".join([*(f"<p>{escape(printable(text))}</p>" for text in words), *tables])

    def __str__(self) -> str:
        worst = class_table(self, WORST_CLASSES) if self.class_names else None
        groups = None if self.groups is None else self.groups.layout(metric="ECE")
        slices = None if self.slices is None else self.slices.layout()
        tables = [self.main_table.layout(), *filter(None, (worst, groups, slices))]
        stage_notes = "" if self.calibration is None else " ".join(self.calibration.notes)
        numbers = "\n".join([to_text(line_table(self)), *self.notes])
        texts = [self.sentence, self.decision.action, stage_notes, self.input_line, str(self.main_line), numbers]
        return printable_lines("\n\n".join([*filter(None, texts), *map(to_text, tables)]))


report = Report.from_predictions

_EVIDENCE = (
    attribute_column("expected if calibrated", "noise_floor", number),
    attribute_column("p-value", "p_value", p_value, is_number=False),
)
"""Columns of noise floors and p-values."""


def line_table(report: Report, only_main: bool = False) -> Table:
    """Return the table of all scores and calibration errors, or of the tested errors of the main mode."""
    columns = [
        name_column(),
        Column("value", lambda line: number(line.value, "main")),
        *_EVIDENCE,
        interval_column(attrgetter("interval")),
        attribute_column("perfect", "perfect", number, shown="data"),
        attribute_column("naive", "naive", number, shown="data"),
        *explanation_columns(report.publications),
    ]
    lines = list(report.lines)
    if only_main:
        main = report.main_line.group
        lines = [line for line in lines if line.group == main and line.noise_floor is not None]
        lines = [line for line in lines if not line.key.startswith("ece_debiased/")]
    return Table.from_items(columns, by_group(lines), index=["key"])


def class_table(report: Report, most: int | None = None) -> Table | None:
    """Return the calibration of each class against the rest, or of each label; None for a binary task.

    Rows are sorted by ECE minus its noise floor, in descending order. `most` limits their number.
    """
    if not report.class_lines:
        return None
    kind, members = ("label", "labels") if report.task == "multilabel" else ("class", "classes")
    is_named = bool(report.class_names)
    names = report.class_names or tuple(map(str, range(len(report.class_lines))))
    order = sorted(report.class_lines, key=lambda line: -line.excess)

    def share(key: str, value: Callable[[ClassLine], float]) -> Column:
        return Column(key.replace("_", " "), lambda line: Cell(percent(value(line))), data={key: value})

    columns = [
        Column(
            kind,
            lambda line: Cell(printable(names[line.index]), style="name" if is_named else ""),
            is_number=not is_named,
            wraps=is_named,
            data={kind: lambda line: names[line.index] if is_named else line.index},
        ),
        attribute_column("count", "n", lambda n: Cell(count(n)), shown="page"),
        share("frequency", attrgetter("frequency")),
        share("mean_probability", lambda line: line.frequency - line.gap),
        Column("ECE", lambda line: number(line.value, "main"), data={"ece": attrgetter("value")}),
        *_EVIDENCE,
        Column(
            "probabilities",
            lambda line: Cell(line.direction, style="quiet" if line.direction == "not significant" else ""),
            is_number=False,
            data={name: attrgetter(name) for name in ("gap", "gap_p_value", "direction")},
        ),
    ]
    stage = report.calibration
    if stage is not None and stage.label_parameters:
        fits = stage.label_parameters
        name = f"fitted {stage.name}"
        columns.append(Column(name, lambda line: Cell(fits[line.index]), is_number=False, shown="page", wraps=True))
    title = f"Calibration by {kind}"
    if most is not None and len(order) > most:
        title = f"The {most} worst calibrated of {count(len(order))} {members}"
    return Table.from_items(columns, {"": order[:most]}, title, is_wide=False, index=[kind])
