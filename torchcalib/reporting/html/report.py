"""A `Report` as a page, and as a folder of files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib import style as matplotlib_style

from torchcalib.core.bins import BinTable, TCETable
from torchcalib.plots.reliability import confidence_histogram, reliability_diagram
from torchcalib.plots.tce import tce_diagram
from torchcalib.plots.training import training_curve
from torchcalib.reporting.data import EVIDENCE_WORDS, INTERVAL_WORDS, CalibrationStage, Report
from torchcalib.reporting.groups import GROUP_WORDS
from torchcalib.reporting.html.page import both_themes, count, filled, group_of, percent, pictures, write_folder
from torchcalib.reporting.monitoring.history import History

WORST_CLASSES = 10

_TASKS = {"binary": "binary", "multiclass": "multi-class", "multilabel": "multi-label"}

_EVENTS = {
    "positive_class": (
        "positive class",
        "Confidence is the probability of y = 1; the outcome is whether y is 1.",
    ),
    "top_label": (
        "top label",
        "Confidence is the largest probability of a sample; the outcome is whether that class is the true one.",
    ),
    "classwise": (
        "all labels pooled",
        "Confidence is the probability of a label; the outcome is whether that label holds. Every sample counts once "
        "for each label.",
    ),
}
"""What a table's confidence is of: a name, and an explanation."""

_RCL_SOURCE = "[EPSR] Ferrer, Ramos: Evaluating Posterior Probabilities (TMLR), sec. 2.4.2."
"""Where the gain of a calibrator, as a share of the score, comes from."""

_GROUPS = {
    "scores": "means over the data",
    "positive class": "confidence is the probability of y = 1",
    "top label": "confidence is the largest probability of a sample",
    "class-wise": "every class or label by itself, then the mean over them",
}
"""Explanation of a group of lines; a group that is not listed goes without."""


@dataclass(frozen=True)
class _Section:
    """A bin table on the page: its pictures, each light and dark, and its rows."""

    name: str
    explanation: str
    reliability: Markup
    histogram: Markup
    rows: list[dict[str, Any]]
    has_band: bool
    is_main: bool


@dataclass(frozen=True)
class _TestSection:
    """A table with decisions of a test on the page: its pictures, each light and dark, and its rows."""

    name: str
    explanation: str
    diagram: Markup
    logit_diagram: Markup
    rows: list[dict[str, Any]]
    tce: float
    rejected: float
    n: float


@dataclass(frozen=True)
class _TrainingSection:
    """How training went, on the page: its picture, light and dark, what was said, and a row for each validation."""

    curve: Markup
    said: list[str]
    unit: str
    names: tuple[str, ...]
    rows: list[tuple[int, list[float]]]


@dataclass(frozen=True)
class _CalibrationSection:
    """What a calibration stage would gain, on the page: for every score its rows, the predictions as they are first."""

    stage: CalibrationStage
    groups: list[tuple[str, list[dict[str, Any]]]]
    made_infinite: bool


def render(report: Report) -> str:
    """Return the report as one HTML page that loads nothing from anywhere.

    Args:
        report: as made by `torchcalib.report`.

    Returns:
        The page. The same report gives the same page.
    """
    with matplotlib_style.context("default"):  # what the process has set must not show in a report
        sections = [_section(report, name, table) for name, table in report.tables.items()]
        tests = [_test_section(name, table) for name, table in report.tests.items()]
        training = _training_section(report.history) if report.history else None
    calibration = None if report.calibration is None else _calibration_section(report.calibration)
    of_gains = [] if calibration is None else [_RCL_SOURCE]
    sources = list(dict.fromkeys([*(line.source for line in report.lines if line.source), *of_gains]))
    shown = [line.value for line in report.lines] + [row["ecd"] for section in sections for row in section.rows]
    return filled(
        "report.html.jinja",
        report=report,
        title=" ".join(["Calibration report", *_of_file(report.source)]),
        facts=_facts(report),
        groups=[(name, _GROUPS.get(name, ""), list(lines)) for name, lines in groupby(report.lines, group_of)],
        sources=sources,
        calibration=calibration,
        training=training,
        rcl_source=_RCL_SOURCE,
        sections=sections,
        tests=tests,
        worst=_worst_classes(report),
        has_infinite=any(math.isinf(value) for value in shown),
        has_evidence=any(line.p_value is not None for line in report.lines),
        evidence_words=EVIDENCE_WORDS,
        has_intervals=any(line.interval for line in report.lines),
        interval_words=INTERVAL_WORDS,
        group_words=GROUP_WORDS,
        has_undefined=any(math.isnan(line.value) or math.isnan(line.naive) for line in report.lines),
    )


def save_report(report: Report, out: str | Path) -> tuple[Path, ...]:
    """Write the report into a folder: `report.json`, `report.html`, and PNG and SVG of every diagram.

    The pictures of the main table are `reliability` and `confidence`; those of another one carry its name, such as
    `reliability_top_label`. Those of tests are `test_positive_class` and the like, that of a history is `training`. A
    file is there whole or not at all; one of the same name is replaced.

    Args:
        report: as made by `torchcalib.report`.
        out: the folder; made if it is missing.

    Returns:
        The files written.

    Raises:
        NotADirectoryError: if `out`, or something above it, is a file.
    """
    files = {"report.json": report.to_json().encode() + b"\n", "report.html": render(report).encode()}
    with matplotlib_style.context("default"):
        for index, (name, table) in enumerate(report.tables.items()):
            suffix = f"_{name}" if index else ""
            for kind, draw in (("reliability", reliability_diagram), ("confidence", confidence_histogram)):
                ax = draw(table, title=_EVENTS[name][0])
                files |= pictures(f"{kind}{suffix}", ax)
        for name, tested in report.tests.items():
            files |= pictures(f"test_{name}", tce_diagram(tested, title=_EVENTS[name][0]))
        if report.history:
            files |= pictures("training", training_curve(report.history))
    return write_folder(files, out)


def _section(report: Report, name: str, table: BinTable) -> _Section:
    rows = _rows(table)
    called, explanation = _EVENTS[name]
    unit = "labelled entries" if report.task == "multilabel" else "samples"
    held = f"{len(rows)} bins, {count(report.n)} {unit}"
    return _Section(
        name=called,
        explanation=explanation,
        reliability=both_themes(
            reliability_diagram,
            table,
            f"reliability-{name}",
            f"Reliability diagram, {called}: observed frequency against mean confidence, {held}. "
            "The table of the bins holds its values.",
        ),
        histogram=both_themes(
            confidence_histogram, table, f"confidence-{name}", f"Histogram of confidence, {called}: {held}."
        ),
        rows=rows,
        has_band=not bool(table.band_low.isnan().all()),
        is_main=table is report.main_table,
    )


def _calibration_section(stage: CalibrationStage) -> _CalibrationSection:
    groups = []
    for score, raw in stage.raw.items():
        gains = [gain for gain in stage.gains if gain.score == score]
        rows: list[dict[str, Any]] = [{"calibrator": "none: as they are", "value": raw, "rcl": None}]
        rows += [{"calibrator": gain.calibrator, "value": gain.value, "rcl": gain.rcl} for gain in gains]
        longest = max((row["value"] for row in rows if math.isfinite(row["value"])), default=0)
        for row in rows:  # the length of its bar in percent, None for one without an end
            row["bar"] = 100 * row["value"] / (longest or 1) if math.isfinite(row["value"]) else None
        groups.append((score, rows))
    made_infinite = any(math.isinf(gain.value) and math.isfinite(stage.raw[gain.score]) for gain in stage.gains)
    return _CalibrationSection(stage, groups, made_infinite)


def _training_section(history: History) -> _TrainingSection:
    unit = history.unit
    rows = [
        (row.epoch if unit == "epoch" else row.step, [row.values.get(name, math.nan) for name in history.names])
        for row in history.rows
    ]
    warned = ", ".join(f"{row.epoch:,}" for row in history.warnings)
    label = (
        f"Training curve: NLL, ECD, accuracy, confidence and ECE of {len(rows)} validations"
        f"{f', with a warning in epoch {warned}' if warned else ''}. The table of the validations holds its values."
    )
    return _TrainingSection(
        curve=both_themes(training_curve, history, "training", label),
        said=[row.warning[:1].upper() + row.warning[1:] for row in history.warnings],
        unit=unit,
        names=history.names,
        rows=rows,
    )


def _test_section(name: str, table: TCETable) -> _TestSection:
    called, explanation = _EVENTS[name]
    tce, rejected, n = float(table.tce), float(table.rejected.sum()), float(table.n.sum())
    label = (
        f"Test-based reliability diagram, {called}: predictions and empirical probability of {len(table.n)} bins, of "
        f"which a test rejects {count(rejected)} of {count(n)} predictions"
    )
    draw = partial(both_themes, table=table)
    return _TestSection(
        name=called,
        explanation=explanation,
        diagram=draw(tce_diagram, prefix=f"test-{name}", label=f"{label}."),
        logit_diagram=draw(
            partial(tce_diagram, logit=True),
            prefix=f"test-logit-{name}",
            label=f"{label}; probabilities on the logit scale.",
        ),
        rows=_rows(table),
        tce=tce,
        rejected=rejected,
        n=n,
    )


def _rows(table: BinTable) -> list[dict[str, Any]]:
    """One dict for every bin."""
    columns = {column: values.tolist() for column, values in table.to_dict().items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _of_file(source: Mapping[str, Any]) -> list[str]:
    """Words for the title, if it is known which file was read."""
    for key in ("file", "path", "files", "paths"):
        value = source.get(key)
        if value:
            names = [value] if isinstance(value, str | Path) else list(value)
            more = [f"and {len(names) - 1} more"] if len(names) > 1 else []
            return ["of", Path(names[0]).name, *more]
    return []


def _facts(report: Report) -> list[tuple[str, str]]:
    """What was read, and how, as pairs of a name and words."""
    settings = dict(report.settings)
    is_multilabel = report.task == "multilabel"
    facts = [(_spaced(key), _words(value)) for key, value in report.source.items()]
    facts.append(("task", _TASKS[report.task]))
    facts.append(("labelled entries" if is_multilabel else "samples", count(report.n)))
    if settings.pop("nan_policy", "raise") == "drop":
        facts.append(("left out for NaN", count(report.n_dropped)))
    facts.append(("labels" if is_multilabel else "classes", count(report.num_classes)))
    if report.task == "binary":
        facts.append(("share of y = 1", percent(report.priors[1])))
    else:
        low, high = percent(min(report.priors)), percent(max(report.priors))
        share = "share of 1s, by label" if is_multilabel else "share, by class"
        facts.append((share, f"{low} each" if low == high else f"{low} to {high}"))
    interval = "(a, b]" if settings.pop("right", False) else "[a, b)"
    facts.append(("bins", f"{count(settings.pop('n_bins'))} of equal width, {interval}"))
    facts.append(("values read as", "logits" if settings.pop("from_logits", False) else "probabilities"))
    if "order_based" in settings:
        facts.append(("order-based numbers", _words(settings.pop("order_based"))))
    return facts + [(_spaced(key), _words(value)) for key, value in settings.items() if value is not None]


def _worst_classes(report: Report) -> list[tuple[int, float, float]]:
    """Index, share and ECE of the classes with the largest ECE; one without a value comes last."""
    rows = [(index, report.priors[index], error) for index, error in enumerate(report.per_class)]
    rows.sort(key=lambda row: -math.inf if math.isnan(row[2]) else row[2], reverse=True)
    return rows[:WORST_CLASSES]


def _spaced(key: str) -> str:
    return str(key).replace("_", " ")


def _words(value: Any) -> str:
    """Write a setting: a long list by its first items."""
    if value is None or value == [] or value == ():
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{_spaced(key)} {_words(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        more = [f"and {len(value) - 5} more"] if len(value) > 5 else []
        return ", ".join([_words(item) for item in value[:5]] + more)
    return str(value)
