"""Convert the arguments of diagrams, such as predictions, metrics and reports, to tables of bins and curves."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from torchcalib.core.arguments import Average, task_read_as
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import Mode, modes_of
from torchcalib.core.images import mean_over_images
from torchcalib.core.ranked import RankedSample
from torchcalib.core.tasks import Prepared, check_name_count, per_sample, prepare
from torchcalib.display.words import printable, rounded
from torchcalib.functional.binned import BinnedEstimator, calibration_curve
from torchcalib.functional.decision import BayesRiskCurve, bayes_risk_curve
from torchcalib.functional.estimator import Estimator
from torchcalib.functional.ranked import CORPCurve, RankedEstimator, corp_curve, curve_of
from torchcalib.functional.risk_area import AreaWeight, bayes_risk_area
from torchcalib.functional.selective import RiskCoverageCurve, SelectiveEstimator, risk_coverage_curve
from torchcalib.functional.smooth import (
    SmoothCurve,
    SmoothEstimator,
    SmoothingCells,
    cells_of_sample,
    smooth_curve_of,
    smoothing_cells,
)
from torchcalib.functional.test_based import tce_table
from torchcalib.io.errors import shown
from torchcalib.plots.canvas import columns_of
from torchcalib.results.calibration import CalibrationStage
from torchcalib.results.report import Report

MAX_CURVES = 10
"""Largest number of curves in one diagram, because there are ten combinations of colour and line style."""

C = TypeVar("C")
T = TypeVar("T")


@dataclass(frozen=True)
class DiagramData:
    """The argument `preds` of a diagram, and the arguments that determine its table or curve."""

    data: Any  # predictions with or without targets, a table, a metric or a report; or a mapping of names to these
    target: Any = None
    mode: Mode | None = None
    class_names: Sequence[str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # of predictions, such as `task` and `n_bins`

    @property
    def estimator(self) -> Estimator[Any] | None:
        """Estimator of a streaming metric; None for other data."""
        found = getattr(self.data, "estimator", None)
        return found if isinstance(found, Estimator) else None

    @property
    def is_mapping(self) -> bool:
        """Whether the data are a mapping of names of models. A report is a mapping, too."""
        return isinstance(self.data, Mapping) and not isinstance(self.data, Report)

    def by_model(self, label: str | None, curves_of: Callable[["DiagramData", str | None], list[C]]) -> list[C]:
        """Return the curves of each model in a mapping, or those of this source with the name `label`."""
        if not self.is_mapping:
            found = curves_of(self, label)
        elif self.data:
            named = ((replace(self, data=one), str(name)) for name, one in self.data.items())
            found = [curve for one, name in named for curve in curves_of(one, name)]
        else:
            raise ValueError(
                "`preds` must contain at least one model, got none. Pass a mapping of model names to predictions."
            )
        if len(found) > MAX_CURVES:
            raise ValueError(
                f"`preds` must contain at most {MAX_CURVES} curves for one diagram, got {len(found)}. "
                "Pass fewer models, or a mapping with some classes: {'cat': curves[3], ...}."
            )
        return found

    def curve_names(self, label: str | None, kind: str, count: int) -> list[str]:
        """Return the names of the classes or labels (`kind`), after the name of the model if it is known."""
        names = tuple(self.class_names or ())
        check_name_count(names, count)
        images = None if self.estimator is None else self.estimator.images
        if images is not None and not names:
            chosen = images.names(self.data.num_classes)
            names = tuple(f"{kind} {name}" if isinstance(name, int) else name for name in chosen)
        names = names or tuple(f"{kind} {k}" for k in range(count))
        return list(names) if label is None else [f"{label}, {name}" for name in names]

    def confidence_name(self) -> str:
        """Return "confidence" for a predicted class or an answer, else "predicted probability"."""
        if self.is_mapping:
            names = {replace(self, data=one).confidence_name() for one in self.data.values()}
            return names.pop() if len(names) == 1 else "predicted probability"
        data, mode = self.data, self.mode
        if isinstance(data, Report):
            mode = mode or next(iter(data.tables), None)
        elif self.estimator is not None:
            mode = data.settings.get("mode") or modes_of(task_read_as(data.settings["task"], data.settings))[0]
        elif mode is None and not isinstance(data, BinTable | CORPCurve | CalibrationStage):
            preds, target = data if self.target is None and isinstance(data, tuple) else (data, self.target)
            mode = modes_of(task_read_as(self._prepared(preds, target).task, self.options))[0]
        return "confidence" if mode == "top_label" else "predicted probability"

    def bins(self) -> BinTable:
        """Return the bin table of a report, a table, a metric over bins, or predictions."""
        if isinstance(self.data, Report):
            return self._for_mode(self.data.tables)
        if isinstance(self.data, BinTable):
            return self.data
        if isinstance(self.estimator, BinnedEstimator):
            return self.data.bin_table()  # type: ignore[no-any-return]
        if isinstance(self.estimator, SmoothEstimator):
            raise ValueError("`smooth` must be True for SmECE, which has no bins, got False. Pass smooth=True.")
        return self._computed(calibration_curve)

    def decisions(self) -> TCETable:
        """Return the table with test decisions of a report, a table, a `TCE`, or predictions."""
        if isinstance(self.data, Report):
            return self._for_mode(self.data.tests)
        if isinstance(self.data, TCETable):
            return self.data
        if self.estimator is not None and self.data.key == "tce":
            return self.data.table()  # type: ignore[no-any-return]
        if isinstance(self.data, BinTable):
            raise TypeError(
                "`preds` must contain test decisions, got a BinTable without them. "
                "Compute a table with torchcalib.functional.tce_table, or use reliability_diagram."
            )
        return self._computed(tce_table)

    def isotonic_curve(self) -> CORPCurve:
        """Return the curve of a metric that stores samples, of predictions, or the data itself."""
        if isinstance(self.data, CORPCurve):
            return self.data
        if isinstance(self.estimator, RankedEstimator):
            return curve_of(self.data._synced_statistic())
        return self._computed(corp_curve)

    def risk_curve(self) -> RiskCoverageCurve:
        """Return the curve of a metric of selective prediction, of predictions, or the data itself."""
        if isinstance(self.data, Report):
            raise TypeError(
                "`preds` must be predictions, a curve or a metric of selective prediction, got a report, which has no "
                "risk-coverage curve. Pass the predictions."
            )
        if isinstance(self.data, RiskCoverageCurve):
            return self.data
        if isinstance(self.estimator, SelectiveEstimator):
            return self.data.curve()  # type: ignore[no-any-return]
        return self._computed(risk_coverage_curve)

    def bayes_risk(self, points: Tensor, weight: AreaWeight) -> tuple[BayesRiskCurve, Tensor]:
        """Return the Bayes risk at operating points, and the area under the weighted curve, of predictions."""

        def computed(preds: Tensor, target: Tensor, **options: Any) -> tuple[BayesRiskCurve, Tensor]:
            del options["mode"]
            curve = bayes_risk_curve(preds, target, points=points.to(preds.device), **options)
            average: Average | None = None if curve.risk.dim() > 1 else "macro"
            return curve, bayes_risk_area(preds, target, weight=weight, average=average, **options)

        return self._computed(computed)

    def cells(self) -> SmoothingCells:
        """Return the sums for a smooth curve of predictions, or of a metric that stores such sums or samples."""
        data = self.data
        if isinstance(self.estimator, SmoothEstimator):
            return data._synced_statistic()  # type: ignore[no-any-return]
        is_error = isinstance(self.estimator, BinnedEstimator | RankedEstimator)
        statistic = data._synced_statistic() if is_error else None
        if isinstance(statistic, RankedSample):
            return cells_of_sample(statistic)
        if statistic is not None or isinstance(data, BinTable | Report):
            raise ValueError(
                f"`smooth` must be False for {type(data).__name__}, got True: it stores bins, which are too wide for a "
                "smooth curve. Pass predictions, torchcalib.SmECE, or a metric that stores samples, such as ACE."
            )
        options = {name: value for name, value in self.options.items() if name != "n_bins"}
        return replace(self, options=options)._computed(smoothing_cells)

    def _for_mode(self, tables: Mapping[Any, T]) -> T:
        """Return the table of a report for the mode; the first table for None."""
        if not tables:
            raise ValueError(
                "`preds` must be a report with tables for this diagram, got none. See the reason in `report.notes`."
            )
        if self.mode is None:
            return next(iter(tables.values()))
        if self.mode not in tables:
            raise ValueError(
                f"`mode` must be one of {', '.join(map(repr, tables))} for this report, got "
                f"{shown(self.mode)}. Pass one of them."
            )
        return tables[self.mode]

    def _prepared(self, preds: Any, target: Any) -> Prepared:
        positive = self.options.get("positive_classes")
        task, from_logits = self.options.get("task"), self.options.get("from_logits", False)
        return prepare(
            preds,
            target,
            task,
            class_names=self.class_names,
            positive_classes=positive,
            from_logits=from_logits,
            ignore_index=self.options.get("ignore_index"),
        )

    def _computed(self, function: Callable[..., T]) -> T:
        """Return the table or curve that a metric function computes for predictions, with an inferred task."""
        preds, target = self.data, self.target
        if target is None and isinstance(preds, tuple) and len(preds) == 2:
            preds, target = preds
        if target is None:
            raise TypeError(
                f"`target` must be given for predictions, got None with `preds` of type {type(preds).__name__}. "
                "Pass predictions and targets, or a table, a metric or a report."
            )
        p = self._prepared(preds, target)
        options = {**self.options, "task": p.task, "mode": self.mode}
        if options.get("weights") is not None:
            options["weights"] = per_sample("weights", options["weights"], p.preds).detach()
        # Diagrams need numbers, which torch does not convert from tensors with a gradient.
        return function(p.preds.detach(), p.target.detach(), **options)


class Series(NamedTuple):
    """Data of a model in a reliability diagram."""

    name: str | None  # name in the legend
    data: SimpleNamespace | SmoothCurve | None  # columns of bins, or a smooth curve; None without data
    error: str  # calibration error as text, with its interval and its noise floor if known

    @property
    def label(self) -> str:
        """Text for the legend."""
        return self.error if self.name is None else f"{printable(self.name)}\n{self.error}"


def binned_series(source: DiagramData, name: str | None) -> list[Series]:
    """Return the bins of a model, or of each class, with their errors."""
    data = source.data
    if isinstance(data, CalibrationStage):
        error = f"{_ece_name(bool(data.label_parameters))} {data.best.ece:.3g}"
        return [Series(name or f"after {data.name}", columns_of(data.table), error)]
    table = source.bins()
    if isinstance(data, Report):
        line = next(line for line in data.lines if line.key == f"ece/{source.mode or next(iter(data.tables))}")
        parts = [f"{_ece_name(data.task == 'multilabel')} {line.value:.3g}"]
        if line.interval is not None:
            parts.append(f"95%: {line.interval}")
        if line.noise_floor is not None:
            parts.append(f"expected if calibrated: {line.noise_floor:.2g}")
        return [Series(name, columns_of(table), "\n".join(parts))]
    if isinstance(data, BinTable) or table.n.dim() != 2:
        return [Series(name, columns_of(table), error_text(data, float(errors_of(data, table))))]
    names, errors = source.curve_names(name, "class", len(table.n)), errors_of(None, table)
    return [Series(each, columns_of(table[k]), error_text(None, float(errors[k]))) for k, each in enumerate(names)]


def smooth_series(source: DiagramData, name: str | None) -> list[Series]:
    """Return the smooth curve of a model, or of each class, with its error."""
    cells = source.cells()
    if cells.n.dim() > 2:
        raise ValueError(f"`preds` must have at most one batch axis, got {cells.n.dim() - 1}. Draw each curve.")
    bandwidth = source.estimator.bandwidth if isinstance(source.estimator, SmoothEstimator) else None
    if cells.n.dim() == 1:
        return [_smooth_one(name, cells, bandwidth)]
    names = source.curve_names(name, "class", len(cells.n))
    return [_smooth_one(each, SmoothingCells(cells.sums[k]), bandwidth) for k, each in enumerate(names)]


def _smooth_one(name: str | None, cells: SmoothingCells, bandwidth: float | None) -> Series:
    if not cells.n.any():
        return Series(name, None, "no data")
    curve = smooth_curve_of(cells, bandwidth)
    return Series(name, curve, f"smECE {curve.error:.3g}\nkernel width {curve.width:.2g}")


def _ece_name(is_multilabel: bool) -> str:
    # The bins pool all labels. Their ECE would differ from that of a report, which is a mean over labels.
    return "mean ECE of labels" if is_multilabel else "ECE"


def errors_of(data: Any, table: BinTable) -> Tensor:
    """Return the errors `(...)` of a metric over bins, or else the expected calibration errors of a table."""
    estimator = getattr(data, "estimator", None)
    if isinstance(estimator, BinnedEstimator):
        statistic = data._synced_statistic()
        if estimator.images is not None:
            return mean_over_images(estimator.values_of_images(statistic.each), over_classes=False)
        return estimator.values(statistic)
    return (table.share * table.gap.abs()).sum(-1).detach()


def error_text(data: Any, error: float) -> str:
    """Return the name and the value of the error of a metric over bins, or of the expected calibration error."""
    if not isinstance(getattr(data, "estimator", None), BinnedEstimator):
        return f"ECE {error:.3g}"
    unit = "%" if data.unit == "percent" else ""
    return f"{type(data).__name__} {rounded(error)}{unit}"
