"""Render a `Report` as an HTML page, and as the files of a folder."""

import math
from functools import partial
from typing import Any

from markupsafe import Markup
from matplotlib import style as matplotlib_style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchcalib.core.bins import BinTable, TCETable
from torchcalib.core.events import NamedMode
from torchcalib.display.words import count
from torchcalib.plots.canvas import Style
from torchcalib.plots.confidence import confidence_histogram
from torchcalib.plots.reliability import reliability_diagram
from torchcalib.plots.tce import tce_diagram
from torchcalib.plots.training import training_curve
from torchcalib.reporting.render.html.page import both_themes, pictures, render_template
from torchcalib.results.calibration import CalibrationStage
from torchcalib.results.contents import (
    GROUP_WORDS,
    RCL_SOURCE,
    calibrator_advice,
    class_words,
    event_name,
    explanations,
    facts,
    input_line,
    key_numbers,
    sources_of,
    title_words,
)
from torchcalib.results.history import History
from torchcalib.results.report import Report
from torchcalib.results.tables import class_table, line_table

_MAX_CLASSES = 1000  # maximum number of classes in the table; each adds about 400 bytes to the page
_MAX_NAME_LENGTH = 200  # maximum number of characters of a group name in the table; longer names are truncated

_EVENTS = {
    "positive": "Confidence is the probability of y = 1; the outcome is whether y is 1.",
    "top_label": (
        "Confidence is the largest probability of a sample; the outcome is whether that class is the true class."
    ),
    "classwise": (
        "Confidence is the probability of a label; the outcome is whether that label is present. All pairs of a sample "
        "and a label are pooled."
    ),
}
"""Definition of confidence and outcome for each mode."""


def render(report: Report) -> str:
    """Return a report as a self-contained HTML page. Equal reports have identical pages."""
    with matplotlib_style.context("default"):  # ignore matplotlib settings of the caller
        tables = [_bin_values(report, name, table) for name, table in report.tables.items()]
        tests = [_test_values(report, name, table) for name, table in report.tests.items()]
        training = _training_values(report.history) if report.history else None
        overview, overview_after = _overview(report)
    stage, groups = report.calibration, report.groups
    shown = [line.value for line in report.lines] + [x for t in report.tables.values() for x in t.ecd.tolist()]
    decision = report.decision
    return render_template(
        "report.html.jinja",
        results=report,
        title=" of ".join(filter(None, ["Calibration report", title_words(report.source)])),
        about=input_line(report),
        verdict=decision.verdict,
        colour=_COLOURS.get(decision.degree or decision.kind, "unknown"),
        key_numbers=key_numbers(report),
        overview=overview,
        overview_after=overview_after,
        has_band=tables[0]["has_band"],
        facts=facts(report, report.source),
        explanations=explanations(report),
        lines=line_table(report),
        sources=sources_of(report),
        calibration=stage,
        advice=calibrator_advice(report),
        calibrators=None if stage is None else stage.layout(),
        made_infinite=stage is not None
        and any(math.isinf(line.nll) and math.isfinite(stage.raw.nll) for line in stage.lines),
        rcl_source=RCL_SOURCE,
        training=training,
        tables=tables,
        tests=tests,
        classes=class_table(report, _MAX_CLASSES),
        class_words=class_words(report),
        groups=None if groups is None else groups.layout(_MAX_NAME_LENGTH, "ECE"),
        group_words=GROUP_WORDS,
        has_infinite=any(math.isinf(value) for value in shown),
        has_undefined=any(math.isnan(line.value) or math.isnan(line.naive) for line in report.lines),
    )


_COLOURS = {"calibrated": "good", "slightly": "slight", "clearly": "clear", "badly": "bad"}
"""CSS class of the verdict, by degree, or by kind without a degree."""


def _overview(report: Report) -> tuple[Markup, str]:
    """Return the reliability diagram before and after the calibrator to add, and the name of the calibrator.

    Without a calibrator to add, it contains the predictions as they are, and the name is empty.
    """
    stage = report.calibration
    if stage is None or not report.decision.calibrator:
        label = f"Reliability diagram, {event_name(report, next(iter(report.tables)))}."
        return both_themes(_square_diagram, report, "overview", label), ""
    label = f"Reliability diagram before and after {stage.name}."
    return both_themes(partial(_square_diagram, stage=stage), report, "overview", label), stage.name


def _square_diagram(report: Report, style: Style, stage: CalibrationStage | None = None) -> Axes:
    """Draw a reliability diagram with the legend inside the axes, and the curve after calibration if `stage` is given.

    Only the predictions as they are have consistency bands.
    """
    ax = Figure(figsize=(4.8, 4.8), facecolor=style.paper).subplots()
    reliability_diagram(report, ax=ax, style=style)
    if stage is not None:
        reliability_diagram(stage, ax=ax, mode=next(iter(report.tables)), style=style)
    return ax


def report_files(report: Report) -> dict[str, bytes]:
    """Return the contents of `report.json`, `report.html`, and of every diagram as PNG and SVG, by file name.

    The diagrams of the main mode are `reliability` and `confidence`. Other modes have a suffix, as in
    `reliability_top_label`. Diagrams of tests are named `test_<mode>`, and the training curve is `training`.
    """
    files = {"report.json": report.to_json().encode() + b"\n", "report.html": render(report).encode()}
    with matplotlib_style.context("default"):
        for index, (name, table) in enumerate(report.tables.items()):
            suffix, title = f"_{name}" if index else "", event_name(report, name)
            files |= pictures(f"reliability{suffix}", reliability_diagram(report, mode=name, title=title))
            files |= pictures(f"confidence{suffix}", confidence_histogram(table, title=title))
        for name, tested in report.tests.items():
            files |= pictures(f"test_{name}", tce_diagram(tested, title=event_name(report, name)))
        if report.history:
            files |= pictures("training", training_curve(report.history))
    return files


def _bin_values(report: Report, key: NamedMode, table: BinTable) -> dict[str, Any]:
    name, explanation = event_name(report, key), _EVENTS[key]
    unit = "labelled entries" if report.task == "multilabel" else "samples"
    size = f"{table.n.numel()} bins, {count(report.n)} {unit}"
    reliability = (
        f"Reliability diagram, {name}: observed frequency against mean confidence, {size}. "
        "The table of bins contains the values."
    )
    histogram = f"Histogram of confidence, {name}: {size}."
    return {
        "name": name,
        "explanation": explanation,
        "reliability": both_themes(partial(reliability_diagram, mode=key), report, f"reliability-{key}", reliability),
        "histogram": both_themes(confidence_histogram, table, f"confidence-{key}", histogram),
        "table": table.layout(),
        "has_band": not bool(table.band_low.isnan().all()),
    }


def _test_values(report: Report, key: NamedMode, table: TCETable) -> dict[str, Any]:
    name, explanation = event_name(report, key), _EVENTS[key]
    rejected, n = float(table.rejected.sum()), float(table.n.sum())
    label = (
        f"Test-based reliability diagram, {name}: predictions and observed frequency of {len(table.n)} bins; "
        f"the test rejects {count(rejected)} of {count(n)} predictions"
    )
    logit = partial(tce_diagram, logit=True)
    return {
        "name": name,
        "explanation": explanation,
        "diagram": both_themes(tce_diagram, table, f"test-{key}", f"{label}."),
        "logit_diagram": both_themes(logit, table, f"test-logit-{key}", f"{label}; probabilities on the logit scale."),
        "table": table.layout(),
        "tce": float(table.tce),
        "rejected": rejected,
        "n": n,
    }


def _training_values(history: History) -> dict[str, Any]:
    warned = ", ".join(f"{row.epoch:,}" for row in history.warnings)
    label = (
        f"Training curve: NLL, ECD, accuracy, confidence and ECE of {len(history)} validations"
        f"{f', with a warning in epoch {warned}' if warned else ''}. The table of validations contains the values."
    )
    return {
        "curve": both_themes(training_curve, history, "training", label),
        "summary": history.summary,
        "warnings": history.findings,
        "table": history.layout(),
    }
