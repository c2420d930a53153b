"""Convert the arguments of diagrams, such as predictions, metrics and reports, to tables of bins and curves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torchcalib.core.arguments import Task
from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import Mode
from torchcalib.core.tasks import check_name_count, per_sample, prepare
from torchcalib.metrics.binned import BinnedMetric, calibration_curve
from torchcalib.metrics.ranked import CORPCurve, RankedMetric, corp_curve, curve_of
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
    """Curve of a reliability diagram: its name in the legend, its bins, and its calibration error as text."""

    name: str | None
    table: BinTable
    error: str


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


def series_from(source: Any, target: Any, label: str | None, given: TableOptions) -> list[Series]:
    """Return the curves for `source`, the argument `preds` of a diagram: one per model, or one per class and model."""

    def series_of(one: Any, name: str | None) -> list[Series]:
        if hasattr(one, "tables"):
            return [_series_from_report(one, name, given)]
        table = bins_from(one, target, given)
        if isinstance(one, BinTable) or table.n.dim() != 2:
            return [Series(name, table, f"ECE {_ece(table):.3g}")]
        names = names_of_curves(name, "class", len(table.n), given)
        return [Series(each, table[k], f"ECE {_ece(table[k]):.3g}") for k, each in enumerate(names)]

    return by_model(source, label, series_of)


def bins_from(source: Any, target: Any, given: TableOptions) -> BinTable:
    """Return the bin table for `source`: a bin table, a metric over bins, a report, or predictions."""
    if hasattr(source, "tables"):
        return _series_from_report(source, None, given).table
    if isinstance(source, BinTable):
        return source
    if isinstance(source, BinnedMetric):
        return source.bin_table()
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
        return curve_of(source.statistic())
    curve: CORPCurve = from_predictions(corp_curve, source, target, given)
    return curve


def _series_from_report(report: Any, label: str | None, given: TableOptions) -> Series:
    """Return the bin table and the expected calibration error in a report, for the mode in `given`."""
    mode = given.mode or next(iter(report.tables))
    table = _table_for_mode(report.tables, mode)
    if report.task == "multilabel":
        return Series(label, table, f"ECE of pooled labels {_ece(table):.3g}")
    line = next(line for line in report.lines if line.key == f"ece/{mode}")
    floor = "" if line.noise_floor is None else f" (noise floor {line.noise_floor:.3g})"
    return Series(label, table, f"ECE {line.value:.3g}{floor}")


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
            f"`mode` must be one of {', '.join(map(repr, tables))} for this report, got {mode!r}. Pass one of them."
        )
    return tables[mode]


def from_predictions(make: Callable[..., Any], preds: Any, target: Any, given: TableOptions) -> Any:
    """Return `make(...)` of predictions in any array-like; the task is inferred if it is not given."""
    if target is None:
        raise TypeError(
            f"`target` must be given for predictions, got None with `preds` of type {type(preds).__name__}. "
            "Pass predictions and targets, or a table, a metric or a report."
        )
    options = dict(given.options)
    task: Task | None = options.pop("task", None)
    p = prepare(preds, target, task, class_names=given.class_names, positive_classes=options.get("positive_classes"))
    if options.get("weights") is not None:
        options["weights"] = per_sample("weights", options["weights"], p.preds)
    return make(p.preds, p.target, task=p.task, mode=given.mode, **options)


def _ece(table: BinTable) -> float:
    """Return the expected calibration error: the mean absolute gap over all samples."""
    return float((table.share * table.gap.abs()).sum())
