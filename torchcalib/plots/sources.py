"""Convert the arguments of diagrams, such as predictions, metrics and reports, to tables of bins and curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torchcalib.core.arguments import Task, task_read_as
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import Mode, modes_of
from torchcalib.core.ranked import RankedSample
from torchcalib.core.tasks import check_name_count, per_sample, prepare
from torchcalib.display.words import ends
from torchcalib.io.errors import printable, shown
from torchcalib.metrics.base import CalibrationMetric
from torchcalib.metrics.binned import BinnedMetric, calibration_curve
from torchcalib.metrics.ranked import CORPCurve, RankedMetric, corp_curve, curve_of
from torchcalib.metrics.smooth import (
    SmECE,
    SmoothCurve,
    SmoothingCells,
    cells_of_sample,
    smooth_curve_of,
    smoothing_cells,
)
from torchcalib.metrics.test_based import TCE, tce_table

MAX_CURVES = 10
"""Largest number of curves in one diagram, because there are ten combinations of colour and line style."""


Named = TypeVar("Named")


class TableOptions(NamedTuple):
    """Options of a diagram that determine its table.

    Attributes:
        mode: kind of confidence, such as "top_label"; None for the first kind of the task.
        class_names: names of the classes, if known.
        options: further options for predictions, such as `task` and `n_bins`.
    """

    mode: Mode | None
    class_names: Sequence[str] | None
    options: Mapping[str, Any]


class Series(NamedTuple):
    """Data of a model in a reliability diagram.

    Attributes:
        name: name in the legend; None if unknown.
        data: bins, or a smooth curve; None for a curve without data.
        error: calibration error as text, with its interval and its noise floor if known.
    """

    name: str | None
    data: BinTable | SmoothCurve | None
    error: str

    @property
    def label(self) -> str:
        """Text for the legend."""
        return self.error if self.name is None else f"{printable(self.name)}\n{self.error}"


def by_model(source: Any, label: str | None, curves_of: Callable[[Any, str | None], list[Named]]) -> list[Named]:
    """Return the curves of each model in a mapping, or those of `source`, the argument `preds` of a diagram."""
    if isinstance(source, Mapping) and not hasattr(source, "tables"):
        if not source:
            raise ValueError(
                "`preds` must contain at least one model, got none. Pass a mapping of model names to predictions."
            )
        found = [curve for name, one in source.items() for curve in curves_of(one, str(name))]
    else:
        found = curves_of(source, label)
    if len(found) > MAX_CURVES:
        raise ValueError(
            f"`preds` must contain at most {MAX_CURVES} curves for one diagram, got {len(found)}. "
            "Pass fewer models, or a mapping with some classes: {'cat': curves[3], ...}."
        )
    return found


def names_of_curves(label: str | None, kind: str, count: int, given: TableOptions) -> list[str]:
    """Return names for the curves of each class or label (`kind`), which start with the name of the model if known."""
    names = tuple(given.class_names or ())
    check_name_count(names, count)
    names = names or tuple(f"{kind} {k}" for k in range(count))
    return list(names) if label is None else [f"{label}, {name}" for name in names]


def series_from(source: Any, target: Any, label: str | None, given: TableOptions, *, smooth: bool) -> list[Series]:
    """Return the data for `source`, the argument `preds` of a diagram: one per model, or one per class and model."""
    make = _smooth_series if smooth else _binned_series
    return by_model(source, label, lambda one, name: make(one, target, name, given))


def _binned_series(source: Any, target: Any, name: str | None, given: TableOptions) -> list[Series]:
    if hasattr(source, "tables"):
        return [_series_from_report(source, name, given)]
    if hasattr(source, "best"):  # `Report.calibration`
        return [Series(name or f"after {source.name}", source.table, f"ECE {source.best.ece:.3g}")]
    table = bins_from(source, target, given)
    if isinstance(source, BinTable) or table.n.dim() != 2:
        return [Series(name, table, error_of(source, table))]
    names = names_of_curves(name, "class", len(table.n), given)
    return [Series(each, table[k], error_of(None, table[k])) for k, each in enumerate(names)]


def _smooth_series(source: Any, target: Any, name: str | None, given: TableOptions) -> list[Series]:
    cells = _cells_from(source, target, given)
    if cells.n.dim() > 2:
        raise ValueError(f"`preds` must have at most one batch axis, got {cells.n.dim() - 1}. Draw each curve.")
    bandwidth = source.settings["bandwidth"] if isinstance(source, SmECE) else None
    if cells.n.dim() == 1:
        return [_smooth_one(name, cells, bandwidth)]
    names = names_of_curves(name, "class", len(cells.n), given)
    return [_smooth_one(each, SmoothingCells(cells.sums[k]), bandwidth) for k, each in enumerate(names)]


def _smooth_one(name: str | None, cells: SmoothingCells, bandwidth: float | None) -> Series:
    if not cells.n.any():
        return Series(name, None, "no data")
    curve = smooth_curve_of(cells, bandwidth)
    return Series(name, curve, f"smECE {curve.error:.3g}\nkernel width {curve.width:.2g}")


def error_of(source: Any, table: BinTable) -> str:
    """Return the error of a metric over bins as text, or else the expected calibration error of a table."""
    if isinstance(source, BinnedMetric) and table.n.dim() == 1:
        return error_text(source, float(source.compute()))
    return error_text(None, ece_of(table))


def errors_of_classes(source: Any, table: BinTable) -> list[float]:
    """Return the error of each class: of a metric over bins, or else the expected calibration error."""
    if isinstance(source, BinnedMetric):
        errors: list[float] = source.estimator.values(source._synced_statistic()).tolist()
        return errors
    return [ece_of(table[k]) for k in range(len(table.n))]


def error_text(source: Any, error: float) -> str:
    """Return the name and the value of the error of a metric over bins, or of the expected calibration error."""
    if not isinstance(source, BinnedMetric):
        return f"ECE {error:.3g}"
    unit = "%" if source.unit == "percent" else ""
    return f"{type(source).__name__} {error:.3g}{unit}".replace("-", "−")


def _cells_from(source: Any, target: Any, given: TableOptions) -> SmoothingCells:
    """Return the sums for a smooth curve of `source`: predictions, or a metric that stores such sums or samples."""
    if isinstance(source, SmECE):
        return source._synced_statistic()
    statistic = source._synced_statistic() if isinstance(source, BinnedMetric | RankedMetric) else None
    if isinstance(statistic, RankedSample):
        return cells_of_sample(statistic)
    if statistic is not None or isinstance(source, BinTable) or hasattr(source, "tables"):
        raise ValueError(
            f"`smooth` must be False for {type(source).__name__}, got True: it stores bins, which are too wide for a "
            "smooth curve. Pass predictions, torchcalib.SmECE, or a metric that stores samples, such as ACE."
        )
    options = {name: value for name, value in given.options.items() if name != "n_bins"}
    cells: SmoothingCells = from_predictions(smoothing_cells, source, target, given._replace(options=options))
    return cells


def confidence_words(source: Any, target: Any, given: TableOptions) -> str:
    """Return the name of the confidence in `source`, the argument `preds` of a diagram, for the label of an axis.

    "Confidence" is the probability of a predicted class or of an answer. Other modes have a "predicted probability".
    """
    if isinstance(source, Mapping) and not hasattr(source, "tables"):
        named = {confidence_words(one, target, given) for one in source.values()}
        return named.pop() if len(named) == 1 else "predicted probability"
    mode, options = given.mode, given.options
    if hasattr(source, "tables"):
        mode = mode or next(iter(source.tables), None)
    elif isinstance(source, CalibrationMetric):
        read_as = task_read_as(source.settings["task"], source.settings)
        mode = source.settings.get("mode") or modes_of(read_as)[0]
    elif mode is None and not isinstance(source, BinTable | CORPCurve) and not hasattr(source, "best"):
        preds, target = source if target is None and isinstance(source, tuple) else (source, target)
        positive = options.get("positive_classes")
        p = prepare(preds, target, options.get("task"), class_names=given.class_names, positive_classes=positive)
        mode = modes_of(task_read_as(p.task, options))[0]
    return "confidence" if mode == "top_label" else "predicted probability"


def bins_from(source: Any, target: Any, given: TableOptions) -> BinTable:
    """Return the bin table for `source`: a bin table, a metric over bins, a report, or predictions."""
    if hasattr(source, "tables"):
        return _report_table(source, given)
    if isinstance(source, BinTable):
        return source
    if isinstance(source, BinnedMetric):
        return source.bin_table()
    if isinstance(source, SmECE):
        raise ValueError("`smooth` must be True for SmECE, which has no bins, got False. Pass smooth=True.")
    table: BinTable = from_predictions(calibration_curve, source, target, given)
    return table


def decisions_from(source: Any, target: Any, given: TableOptions) -> TCETable:
    """Return the table with test decisions for `source`: such a table, a `TCE`, a report, or predictions."""
    if hasattr(source, "tests"):
        decisions: TCETable = _table_for_mode(source.tests, given.mode)
        return decisions
    if isinstance(source, TCETable):
        return source
    if isinstance(source, TCE):
        return source.table()
    if isinstance(source, BinTable):
        raise TypeError(
            "`preds` must contain test decisions, got a BinTable without them. "
            "Compute a table with torchcalib.functional.tce_table, or use reliability_diagram."
        )
    table: TCETable = from_predictions(tce_table, source, target, given)
    return table


def curve_from(source: Any, target: Any, given: TableOptions) -> CORPCurve:
    """Return the `CORPCurve` for `source`: a curve, a metric that stores samples, or predictions."""
    if isinstance(source, CORPCurve):
        return source
    if isinstance(source, RankedMetric):
        return curve_of(source._synced_statistic())
    curve: CORPCurve = from_predictions(corp_curve, source, target, given)
    return curve


def _series_from_report(report: Any, label: str | None, given: TableOptions) -> Series:
    """Return the bin table and the expected calibration error in a report, for the mode in `given`."""
    table = _report_table(report, given)
    mode = given.mode or next(iter(report.tables))
    line = next(line for line in report.lines if line.key == f"ece/{mode}")
    # The bins pool all labels. Their ECE would differ from that of the report, which is a mean over labels.
    parts = [f"{'mean ECE of labels' if report.task == 'multilabel' else 'ECE'} {line.value:.3g}"]
    if line.interval is not None:
        parts.append(f"95%: {ends(line.interval.low, line.interval.high, 3)}")
    if line.noise_floor is not None:
        parts.append(f"expected if calibrated: {line.noise_floor:.2g}")
    return Series(label, table, "\n".join(parts))


def _report_table(report: Any, given: TableOptions) -> BinTable:
    table: BinTable = _table_for_mode(report.tables, given.mode)
    return table


def _table_for_mode(tables: Mapping[Any, Any], mode: Mode | None) -> Any:
    """Return the table of a report for a mode; the first table for None."""
    if not tables:
        raise ValueError(
            "`preds` must be a report with tables for this diagram, got none. See the reason in `report.notes`."
        )
    if mode is None:
        return next(iter(tables.values()))
    if mode not in tables:
        raise ValueError(
            f"`mode` must be one of {', '.join(map(repr, tables))} for this report, got "
            f"{shown(mode)}. Pass one of them."
        )
    return tables[mode]


def from_predictions(make: Callable[..., Any], preds: Any, target: Any, given: TableOptions) -> Any:
    """Return `make(...)` of predictions in any array-like; the task is inferred if it is not given.

    Without `target`, `preds` may be a tuple of predictions and targets.
    """
    if target is None and isinstance(preds, tuple) and len(preds) == 2:
        preds, target = preds
    if target is None:
        raise TypeError(
            f"`target` must be given for predictions, got None with `preds` of type {type(preds).__name__}. "
            "Pass predictions and targets, or a table, a metric or a report."
        )
    options = dict(given.options)
    task: Task | None = options.pop("task", None)
    p = prepare(preds, target, task, class_names=given.class_names, positive_classes=options.get("positive_classes"))
    if options.get("weights") is not None:
        options["weights"] = per_sample("weights", options["weights"], p.preds).detach()
    # Diagrams need numbers, which torch does not convert from tensors with a gradient.
    return make(p.preds.detach(), p.target.detach(), task=p.task, mode=given.mode, **options)


def ece_of(table: BinTable) -> float:
    """Return the expected calibration error: the mean absolute gap over all samples."""
    return float((table.share * table.gap.abs()).sum().detach())
