"""Display of scikit-learn for the reliability diagram."""

from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.cbook import normalize_kwargs
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from sklearn import calibration
from sklearn.utils import _safe_indexing

from torchcalib.core.arguments import check_choice
from torchcalib.core.bins import BinTable
from torchcalib.display.words import listed
from torchcalib.functional.binned import calibration_curve
from torchcalib.io.errors import shown
from torchcalib.plots.canvas import DIAGONAL, LIGHT, columns_of
from torchcalib.plots.reliability import draw_reliability, unit_square
from torchcalib.plots.sources import DiagramData
from torchcalib.sklearn.conversion import array_of, as_labels, classes_of, labelled, placed_in_classes
from torchcalib.sklearn.scorers import BINS, Strategy


class CalibrationDisplay(calibration.CalibrationDisplay):  # type: ignore[misc]  # scikit-learn has no types
    """Reliability diagram with the arguments and attributes of `sklearn.calibration.CalibrationDisplay`.

    Create it with `from_estimator`, `from_predictions` or `from_cv_results`. The diagram is that of
    `torchcalib.reliability_diagram`, with consistency bands, counts and the expected calibration error (ECE) of its
    bins. A curve connects the bins. Further displays on the same axes add a curve without bands.

    Several classes are supported: the diagram then shows the confidence in the predicted class (top label).

    Args:
        prob_true: Frequency of the event in each bin `(B,)`; a list of these for several curves.
        prob_pred: Mean predicted probability in each bin `(B,)`, or a list.
        y_prob: Probabilities `(N,)` of the positive class, or of each class `(N, C)`, or a list.
        estimator_name: Name in the legend; a list of names for several curves.
        pos_label: Positive class, for the labels of the axes.
        table: Table of all bins, or a list. Without it, neither bands nor counts are drawn.

    Attributes:
        ax_: Axes of the diagram.
        figure_: Its figure.
        line_: Curve through the bins, or a list of curves.
        table: The `torchcalib.functional.BinTable`, or a list.

    Example:
        >>> display = CalibrationDisplay.from_predictions([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8], n_bins=2)
        >>> display.prob_true.round(2).tolist(), display.prob_pred.round(2).tolist()
        ([0.33, 1.0], [0.28, 0.8])
    """

    def __init__(
        self,
        prob_true: Any,
        prob_pred: Any,
        y_prob: Any,
        *,
        estimator_name: str | Sequence[str] | None = None,
        pos_label: Any = None,
        table: BinTable | Sequence[BinTable] | None = None,
    ) -> None:
        super().__init__(prob_true, prob_pred, y_prob, estimator_name=estimator_name, pos_label=pos_label)
        self.table = table

    def plot(self, *, ax: Any = None, name: Any = None, ref_line: bool = True, **kwargs: Any) -> Self:
        """Draw the diagram.

        Args:
            ax: Axes to draw on. None creates a pyplot figure.
            name: Name in the legend, or a list of different names for several curves. None: `estimator_name`.
            ref_line: Draw the diagonal, which marks perfect calibration.
            **kwargs: Options of `matplotlib.axes.Axes.plot` for the curves, such as `color`.

        Returns:
            The display.

        Raises:
            ValueError: If several curves do not have as many different names.
        """
        name, line = self.estimator_name if name is None else name, normalize_kwargs(kwargs, Line2D)
        place = plt.figure() if ax is None else ax
        if "color" in line:
            line = {"markeredgecolor": line["color"], **line}
        several = [] if self.table is None or isinstance(self.table, BinTable) else list(self.table)
        if several and (isinstance(name, str) or len(set(name or ())) != len(several)):
            raise ValueError(
                f"`name` must be a list of {len(several)} different names, one for each curve, got {shown(name)}. "
                "Omit it to use `estimator_name`."
            )
        if self.table is None:
            canvas = unit_square(place, LIGHT, None)
            canvas.label("Mean predicted probability", "Fraction of positives")
            canvas.curve(self.prob_pred, self.prob_true, name or "", marked=True, **line)
        else:
            data = dict(zip(name, several, strict=True)) if several else self.table
            is_top_label = np.ndim(self.y_prob[0] if several else self.y_prob) > 1
            source = DiagramData(data, mode="top_label" if is_top_label else None)
            canvas = draw_reliability(source, place, label=None if several else name, line=line)
        if self.pos_label is not None:
            event = f"(Positive class: {self.pos_label})"
            canvas.label(f"Mean predicted probability {event}", f"Fraction of positives {event}")
        if not ref_line:
            for drawn in [drawn for drawn in canvas.ax.lines if drawn.get_label() == DIAGONAL]:
                drawn.remove()
        if self.table is None and canvas.ax.get_legend_handles_labels()[1]:
            for text in canvas.ax.legend(loc="lower right").get_texts():
                text.set_parse_math(False)
        self.ax_, self.figure_ = canvas.ax, canvas.ax.figure
        self.line_ = canvas.curves[-len(several) :] if several else canvas.curves[-1]
        return self

    @classmethod
    def from_predictions(
        cls,
        y_true: Any,
        y_prob: Any,
        *,
        n_bins: int = 5,
        strategy: Strategy = "uniform",
        pos_label: Any = None,
        name: str | None = None,
        ax: Any = None,
        ref_line: bool = True,
        sample_weight: Any = None,
        labels: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the diagram of predictions.

        Args:
            y_true: Labels `(N,)`, numbers or text.
            y_prob: Probabilities of the positive class `(N,)`, of both classes `(N, 2)`, or of each class `(N, C)`.
            strategy: `"uniform"`: bins of equal width, which include their upper edges as in scikit-learn.
                `"quantile"`: bins with equal numbers of samples.
            pos_label: Positive class of a binary task. None: the last one in `labels`.
            name: Name in the legend. None: "Classifier".
            ax: Axes to draw on. None creates a pyplot figure.
            ref_line: Draw the diagonal.
            sample_weight: Weights `(N,)`; whole numbers for `strategy="quantile"`.
            labels: Classes in the order of the columns. None: the sorted labels in `y_true`.
            **kwargs: Options of `matplotlib.axes.Axes.plot` for the curve.

        Returns:
            The display.

        Raises:
            TypeError, ValueError: For invalid input.
        """
        how = {"n_bins": n_bins, "strategy": strategy, "pos_label": pos_label, "labels": labels}
        display = cls._of(y_true, y_prob, name or "Classifier", sample_weight=sample_weight, **how)
        return display.plot(ax=ax, ref_line=ref_line, **kwargs)

    @classmethod
    def from_estimator(
        cls,
        estimator: Any,
        X: Any,
        y: Any,
        *,
        n_bins: int = 5,
        strategy: Strategy = "uniform",
        pos_label: Any = None,
        name: str | None = None,
        ax: Any = None,
        ref_line: bool = True,
        sample_weight: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the diagram of a fitted classifier.

        Args:
            estimator: Fitted classifier or pipeline with `predict_proba`.
            X: Features that it accepts.
            y: Labels `(N,)`.
            pos_label: Positive class of a binary task. None: the last one in `classes_`.
            name: Name in the legend. None: the class of the classifier.
            strategy, ax, ref_line, sample_weight: See `from_predictions`.
            **kwargs: See `from_predictions`.

        Returns:
            The display.

        Raises:
            TypeError, ValueError: For invalid input.
        """
        if not hasattr(estimator, "predict_proba"):
            raise TypeError(
                f"`estimator` must have predict_proba, got {type(estimator).__name__}. Wrap it in "
                "torchcalib.sklearn.CalibratedClassifier."
            )
        how = {"n_bins": n_bins, "strategy": strategy, "pos_label": pos_label, "labels": estimator.classes_}
        name = type(estimator).__name__ if name is None else name
        display = cls._of(y, estimator.predict_proba(X), name, sample_weight=sample_weight, **how)
        return display.plot(ax=ax, ref_line=ref_line, **kwargs)

    @classmethod
    def from_cv_results(
        cls,
        cv_results: Any,
        X: Any,
        y: Any,
        *,
        per_fold: bool = False,
        n_bins: int = 5,
        strategy: Strategy = "uniform",
        pos_label: Any = None,
        name: str | None = None,
        ax: Any = None,
        ref_line: bool = True,
        sample_weight: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Draw the diagram of cross-validated predictions: each row is predicted by a classifier of the other folds.

        Args:
            cv_results: Result of `sklearn.model_selection.cross_validate` with `return_estimator=True` and
                `return_indices=True`.
            X: Features, as for `cross_validate`.
            y: Labels `(N,)`.
            per_fold: Draw a curve for each test part, at most 10. Otherwise one diagram of all predictions has bands,
                which requires that each row is in at most one test part.
            pos_label: Positive class of a binary task. None: the last class.
            name: Name in the legend. None: the class of the classifier.
            strategy, ax, ref_line, sample_weight: See `from_predictions`.
            **kwargs: See `from_predictions`.

        Returns:
            The display. With `per_fold`, `prob_true`, `prob_pred`, `y_prob`, `table` and `line_` are lists.

        Raises:
            TypeError, ValueError: For invalid input.
        """
        if missing := [key for key in ("estimator", "indices") if key not in cv_results]:
            raise ValueError(
                f"`cv_results` must contain 'estimator' and 'indices', got no {listed(list(map(repr, missing)))}. Pass "
                "return_estimator=True and return_indices=True to cross_validate."
            )
        models, parts = cv_results["estimator"], cv_results["indices"]["test"]
        classes, y = classes_of(as_labels(y)), as_labels(y)
        probs = [
            placed_in_classes(model.predict_proba(_safe_indexing(X, test)), model.classes_, classes)
            for model, test in zip(models, parts, strict=True)
        ]
        how = {"n_bins": n_bins, "strategy": strategy, "pos_label": pos_label, "labels": classes}
        weights = None if sample_weight is None else np.asarray(sample_weight)
        name = type(models[0]).__name__ if name is None else name

        def of_rows(rows: NDArray[Any], values: Any, label: str) -> CalibrationDisplay:
            return cls._of(y[rows], values, label, sample_weight=None if weights is None else weights[rows], **how)

        if not per_fold:
            rows = np.concatenate(parts)
            if len(np.unique(rows)) < len(rows):
                raise ValueError(
                    "`per_fold` must be True if rows are in several test parts, as in repeated cross-validation, got "
                    "False. Bands require one prediction for each row."
                )
            return cast(Self, of_rows(rows, np.concatenate(probs), name).plot(ax=ax, ref_line=ref_line, **kwargs))
        made = [
            of_rows(test, values, f"{name}, fold {k}")
            for k, (test, values) in enumerate(zip(parts, probs, strict=True))
        ]
        fields = [[getattr(one, field) for one in made] for field in ("prob_true", "prob_pred", "y_prob")]
        display = cls(
            *fields,
            estimator_name=[str(one.estimator_name) for one in made],
            pos_label=made[0].pos_label,
            table=[cast(BinTable, one.table) for one in made],
        )
        return display.plot(ax=ax, ref_line=ref_line, **kwargs)

    @classmethod
    def _of(
        cls,
        y_true: Any,
        y_prob: Any,
        name: str,
        *,
        n_bins: int,
        strategy: Strategy,
        pos_label: Any,
        labels: Any,
        sample_weight: Any,
    ) -> Self:
        """Return the display of predictions, which is not drawn yet."""
        check_choice("strategy", strategy, tuple(BINS))
        found = labelled(y_true, y_prob, sample_weight=sample_weight, pos_label=pos_label, labels=labels)
        if found.task == "multilabel":
            raise ValueError("`y_true` must have one label for each sample, got several. Draw each label separately.")
        if not found.preds.numel():
            raise ValueError("`y_true` must contain at least one label, got none. Pass predictions with their labels.")
        bins: dict[str, Any] = {"bins": BINS[strategy], "n_bins": n_bins, "right": strategy == "uniform"}
        table = calibration_curve(found.preds.detach(), found.target, found.task, weights=found.weights, **bins)
        columns = columns_of(table)
        held = columns.n > 0
        probs = array_of(found.preds)
        positive = found.positive if found.task == "binary" else None
        return cls(
            columns.frequency[held],
            columns.confidence[held],
            probs,
            estimator_name=name,
            pos_label=positive,
            table=table,
        )
