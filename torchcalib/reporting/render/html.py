"""Render reports, comparisons and audits as HTML pages, and as folders of files.

A page is self-contained: it includes its style sheet, and each diagram in a light and a dark version.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import astuple, replace
from functools import cache
from itertools import islice
from typing import Any

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined, Template
    from markupsafe import Markup
    from matplotlib import style as matplotlib_style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise ImportError(
        "`torchcalib.reporting.render.html` needs jinja2 and matplotlib, which are not installed. "
        "Install them: pip install 'torchcalib[report]'."
    ) from error

from torchcalib.core.events import NamedMode
from torchcalib.display.tables import to_html
from torchcalib.display.words import ONE_LOOK, count, significant
from torchcalib.plots.canvas import DARK, LIGHT, to_png, to_svg
from torchcalib.plots.comparison import difference_plot
from torchcalib.plots.curves import training_curve
from torchcalib.plots.reliability import confidence_histogram, draw_reliability, reliability_diagram
from torchcalib.plots.slices import slice_diagram
from torchcalib.plots.sources import DiagramData
from torchcalib.plots.tce import tce_diagram
from torchcalib.reporting.render.contents import (
    DEFINITION_WORDS,
    DIFFERENCE_WORDS,
    GROUP_WORDS,
    SLICE_WORDS,
    class_words,
    event_name,
    explanations,
    facts,
    first_screen,
    formatted,
    without_folders,
)
from torchcalib.results.audit import CONFIDENCES, EXPLAINED, EXPLAINED_ON_PAGES, Audit, AuditComparison, AuditGroups
from torchcalib.results.calibration import CalibrationStage
from torchcalib.results.comparison import Comparison, difference_table, system_table
from torchcalib.results.definitions import definition_table
from torchcalib.results.report import RCL_SOURCE, Report, class_table

Audits = Audit | AuditGroups | AuditComparison

_MAX_CLASSES = 1000  # maximum number of classes in the table; each adds about 400 bytes to the page
_MAX_CURVES = 6  # curves of parts that differ in colour and mark
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


def render(results: Report | Comparison | Audit | AuditGroups) -> str:
    """Return results as a self-contained HTML page. Equal results have identical pages."""
    with matplotlib_style.context("default"):  # ignore matplotlib settings of the caller
        match results:
            case Audit():
                return _audit_page(results)
            case AuditGroups():
                return _groups_page(results)
        return _page(results, {name: to_svg(ax) for name, ax in _pictures(results, False).items()})


def files_of(results: Report | Comparison | Audits, complete: bool = False) -> dict[str, bytes]:
    """Return the JSON file and the page by file name, and the pages to which this page has links.

    With `complete`, a report or comparison also has every diagram as PNG and SVG, and an audit the page of the report
    of each definition. Diagrams of other modes than the main one have a suffix, as in `reliability_top_label`.
    """
    more: dict[str, bytes] = {}
    with matplotlib_style.context("default"):
        match results:
            case Audit():
                name, page = "audit", _audit_page(results, with_links=complete)
                reports = {each.page: each.report for each in results.confidences if complete}
                more = {file: render(report).encode() for file, report in reports.items() if report is not None}
            case AuditGroups():
                name, page = "audit", _groups_page(results, with_links=True)
                more = _files_in_folders(results.audits, "part", complete)
            case AuditComparison():
                name, page = "audit", _audits_page(results)
                more = {f"compare_{key}.html": render(compared).encode() for key, compared in results.items()}
                more |= _files_in_folders(results.audits, "log", complete)
            case _:
                name = "report" if isinstance(results, Report) else "compare"
                pictures = _pictures(results, complete)
                drawn = {picture: to_svg(ax) for picture, ax in pictures.items()}
                page = _page(results, drawn)
                for picture, ax in pictures.items() if complete else ():
                    more |= {f"{picture}.png": to_png(ax), f"{picture}.svg": drawn[picture].encode()}
    return {f"{name}.json": f"{results.to_json()}\n".encode(), f"{name}.html": page.encode(), **more}


def _files_in_folders(audits: Mapping[str, Audit], name: str, complete: bool) -> dict[str, bytes]:
    """Return the files of each audit, in a folder for each."""
    files = {k: files_of(audit, complete) for k, audit in enumerate(audits.values(), 1)}
    return {f"{name}_{k}/{file}": content for k, each in files.items() for file, content in each.items()}


def _pictures(results: Report | Comparison, with_main: bool) -> dict[str, Axes]:
    """Draw the diagrams that are parts of the page and may be files, by name.

    `with_main` adds the main reliability diagram of a report, of which the page has that of `_overview`.
    """
    if isinstance(results, Comparison):
        return {"compare": difference_plot(results)}
    pictures = {}
    for index, (name, table) in enumerate(results.tables.items()):
        suffix, title = f"_{name}" if index else "", event_name(results, name)
        if index or with_main:
            pictures[f"reliability{suffix}"] = reliability_diagram(results, mode=name, title=title)
        pictures[f"confidence{suffix}"] = confidence_histogram(table, title=title)
    for name, tested in results.tests.items():
        pictures[f"test_{name}"] = tce_diagram(tested, title=event_name(results, name))
    if results.slices is not None and len(results.slices):
        pictures["slices"] = slice_diagram(results.slices)
    if results.history:
        pictures["training"] = training_curve(results.history)
    return pictures


def _page(results: Report | Comparison, drawn: Mapping[str, str]) -> str:
    """Return the page with `_pictures`, which are SVG text."""
    return _report_page(results, drawn) if isinstance(results, Report) else _comparison_page(results, drawn["compare"])


# Reports


def _report_page(report: Report, drawn: Mapping[str, str]) -> str:
    stage, groups = report.calibration, report.groups
    shown = [line.value for line in report.lines] + [x for t in report.tables.values() for x in t.ecd.tolist()]
    tables = [_bin_values(report, name, drawn) for name in report.tables]
    diagram, diagram_after = _overview(report)
    training = ""
    if report.history:
        warned = ", ".join(f"{row.epoch:,}" for row in report.history.warnings)
        training = (
            f"Training curve: NLL, ECD, accuracy, confidence and ECE of {len(report.history)} validations"
            f"{f', with a warning in epoch {warned}' if warned else ''}. The table of validations contains the values."
        )
    return _rendered(
        "report",
        report,
        diagram=diagram,
        diagram_after=diagram_after,
        has_band=tables[0]["has_band"],
        facts=facts(report, report.source),
        notes=report.notes,
        explanations=explanations(report),
        definitions=definition_table(report.lines, report.definitions),
        definition_words=DEFINITION_WORDS,
        input_words=next(iter(report.definitions.values())).of_input,
        made_infinite=stage is not None
        and any(math.isinf(line.nll) and math.isfinite(stage.raw.nll) for line in stage.lines),
        rcl_source=RCL_SOURCE,
        training_curve=both_themes(drawn["training"], "training", training) if report.history else None,
        one_look=ONE_LOOK,
        tables=tables,
        tests=[_test_values(report, name, drawn[f"test_{name}"]) for name in report.tests],
        classes=class_table(report, _MAX_CLASSES),
        class_words=class_words(report),
        groups=None if groups is None else groups.layout(_MAX_NAME_LENGTH, "ECE"),
        group_words=GROUP_WORDS,
        slices=None if report.slices is None else report.slices.layout(_MAX_NAME_LENGTH),
        slice_words=SLICE_WORDS,
        slice_diagram=both_themes(drawn["slices"], "slices", "Signed errors of the largest slices.")
        if "slices" in drawn
        else None,
        has_infinite=any(math.isinf(value) for value in shown),
        has_undefined=any(math.isnan(line.value) or math.isnan(line.naive) for line in report.lines),
    )


def _overview(report: Report) -> tuple[Markup, str]:
    """Return the reliability diagram before and after the calibrator to add, and its name; empty without one."""
    stage = report.calibration
    if stage is None or not report.decision.calibrator:
        label = f"Reliability diagram, {event_name(report, next(iter(report.tables)))}."
        return both_themes(to_svg(_square_diagram(report)), "overview", label), ""
    label = f"Reliability diagram before and after {stage.name}."
    return both_themes(to_svg(_square_diagram(report, stage)), "overview", label), stage.name


def _square_diagram(report: Report, stage: CalibrationStage | None = None) -> Axes:
    """Draw a reliability diagram with the legend inside the axes, and the curve after calibration if `stage` is given.

    The curve after calibration has no consistency bands.
    """
    ax = draw_reliability(DiagramData(report), None, is_square=True).ax
    if stage is not None:
        reliability_diagram(stage, ax=ax, mode=next(iter(report.tables)))
    return ax


def _bin_values(report: Report, key: NamedMode, drawn: Mapping[str, str]) -> dict[str, Any]:
    name, table = event_name(report, key), report.tables[key]
    suffix = "" if table is report.main_table else f"_{key}"
    confidence = "confidence" if key == "top_label" else "predicted probability"
    unit = "labelled entries" if report.task == "multilabel" else "samples"
    size = f"{table.n.numel()} bins, {count(report.n)} {unit}"
    reliability = (
        f"Reliability diagram, {name}: observed frequency against mean {confidence}, {size}. "
        "The table of bins contains the values."
    )
    histogram = f"Histogram of {confidence}, {name}: {size}."
    return {
        "name": name,
        "explanation": _EVENTS[key],
        "reliability": both_themes(drawn[f"reliability{suffix}"], f"reliability-{key}", reliability) if suffix else "",
        "histogram": both_themes(drawn[f"confidence{suffix}"], f"confidence-{key}", histogram),
        "table": table,
        "has_band": not bool(table.band_low.isnan().all()),
    }


def _test_values(report: Report, key: NamedMode, drawn: str) -> dict[str, Any]:
    name, table = event_name(report, key), report.tests[key]
    rejected, n = float(table.rejected.sum()), float(table.n.sum())
    label = (
        f"Test-based reliability diagram, {name}: predictions and observed frequency of {len(table.n)} bins; "
        f"the test rejects {count(rejected)} of {count(n)} predictions"
    )
    logit = to_svg(tce_diagram(table, logit=True, title=name))
    return {
        "name": name,
        "explanation": _EVENTS[key],
        "diagram": both_themes(drawn, f"test-{key}", f"{label}."),
        "logit_diagram": both_themes(logit, f"test-logit-{key}", f"{label}; probabilities on the logit scale."),
        "table": table,
        "tce": float(table.tce),
        "rejected": rejected,
        "n": n,
    }


# Comparisons


def _comparison_page(comparison: Comparison, drawn: str) -> str:
    others = comparison.systems[1:]
    sources = {}
    for name, source in comparison.sources.items():
        files = formatted(without_folders(list(source.get("files", []))), 3)
        sources[name] = "; ".join([files, *[str(source[key]) for key in ("predictions",) if key in source]])
    return _rendered(
        "comparison",
        comparison,
        diagram=_main_differences(comparison),
        baseline=comparison.baseline,
        systems=system_table(comparison),
        facts=facts(comparison, sources),
        notes=comparison.notes,
        picture=both_themes(drawn, "differences", _label_of(comparison)),
        tables=[difference_table(comparison, name) for name in others],
        words=DIFFERENCE_WORDS,
        has_infinite=any(math.isinf(value) for line in comparison.lines for value in line.values.values()),
    )


def _main_differences(comparison: Comparison) -> Markup:
    """Draw the differences in ECE, NLL and accuracy in one column of panels, which fits on a telephone."""
    lines = tuple(filter(None, map(comparison.line, ("ece", "nll", "accuracy"))))
    height = 0.9 + len(lines) * (0.75 + 0.2 * len(comparison.systems[1:]))
    figure = Figure(figsize=(4.2, height), facecolor=LIGHT.paper)
    ax = figure.subplots(gridspec_kw={"left": 0, "right": 1, "bottom": 0, "top": 1})
    drawn = to_svg(difference_plot(replace(comparison, lines=lines), ax=ax))
    return both_themes(drawn, "overview", _label_of(comparison))


def _label_of(comparison: Comparison) -> str:
    return (
        f"Differences between {', '.join(comparison.systems[1:])} and {comparison.baseline} with 95% intervals. "
        "The tables below contain the values."
    )


# Audits of logs


def _audit_page(audit: Audit, with_links: bool = False) -> str:
    """Return the page with the reliability diagram of the main definition.

    `with_links` adds links to the pages of the reports, which have the diagrams of all definitions.
    """
    diagram, after = ("", "") if audit.report is None else _overview(audit.report)
    facts = list(audit.fields.items())
    return _rendered("audit", audit, diagram=diagram, diagram_after=after, facts=facts, with_links=with_links)


def _audits_page(found: AuditComparison) -> str:
    """Return the page with the first comparison, and links to the pages of all comparisons and audits."""
    first = next(iter(found.values()))
    names = {key: CONFIDENCES[key].name for key in found}
    return _rendered(
        "audits", found, diagram=_main_differences(first), baseline=first.baseline, found=found, names=names
    )


def _groups_page(found: AuditGroups, with_links: bool = False) -> str:
    """Return the page with the table of all parts, a curve for each, and their remarks and sentences."""
    reports = {name: audit.report for name, audit in found.items() if audit.report is not None}
    drawn, diagram = dict(islice(reports.items(), _MAX_CURVES)), ""
    if drawn:
        svg = to_svg(draw_reliability(DiagramData(drawn), None, is_square=True).ax)
        diagram = both_themes(svg, "overview", f"Reliability diagram with a curve for each part, by {found.by}.")
    return _rendered("audit_groups", found, diagram=diagram, found=found, n_curves=len(drawn), with_links=with_links)


# Templates and diagrams


def _rendered(name: str, results: Any, **values: Any) -> str:
    """Return the page of a template, with the first screen of results; the version of several audits is that of one."""
    audits = getattr(results, "audits", None)
    shown = results if audits is None else next(iter(audits.values()))
    optional = {"facts": (), "notes": (), **values}
    return _template(f"{name}.html.jinja").render(results=shown, first=first_screen(results), **optional)


@cache
def _template(name: str) -> Template:
    """Return a template, which is compiled once for all pages."""
    # autoescape=True escapes values in every template, because file and class names are not trusted.
    environment = Environment(
        loader=PackageLoader("torchcalib.reporting.render", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        count=count, significant=significant, linked=_linked, table=lambda shown: Markup(to_html(shown.layout()))
    )
    environment.globals.update(light=LIGHT, dark=DARK, explained=f"{EXPLAINED} {EXPLAINED_ON_PAGES}")
    return environment.get_template(name)


_PLACES = re.compile(r"arXiv[: ](?P<arxiv>\d{4}\.\d{4,5})|(?:doi[: ])?(?P<doi>10\.\d{4,9}/[^\s,;()]+[^\s,;().])")
"""arXiv numbers and DOIs in the text of a source."""


def _linked(source: str) -> Markup:
    """Return a source as HTML, with links from its arXiv numbers and DOIs."""
    found, last = Markup(), 0
    for match in _PLACES.finditer(source):
        arxiv = match["arxiv"]
        url = f"https://arxiv.org/abs/{arxiv}" if arxiv else f"https://doi.org/{match['doi']}"
        link = Markup('<a href="{}">{}</a>').format(url, match[0])
        found, last = found + source[last : match.start()] + link, match.end()
    return found + source[last:]


def both_themes(light: str, prefix: str, label: str) -> Markup:
    """Return a diagram as two SVG elements, in the colours of `LIGHT`, as given, and in those of `DARK`.

    `prefix` of element ids is unique on the page. `label` is the description for screen readers.
    """
    # Replace the colours, without drawing again.
    colours = dict(zip(astuple(LIGHT), astuple(DARK), strict=True))
    known = re.compile("|".join(colours))
    dark = re.sub(
        r' (?:style|fill|stroke)="[^"]*"', lambda style: known.sub(lambda found: colours[found[0]], style[0]), light
    )
    return Markup("\n").join(_inline(svg, f"{prefix}-{t}-", label, t) for t, svg in (("light", light), ("dark", dark)))


def _inline(svg: str, prefix: str, label: str, theme: str) -> Markup:
    """Convert an SVG file to an HTML element with a label and unique ids, scaled to the page width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # nothing refers to groups, and curves of models share an id
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    (box,) = re.findall(r'viewBox="[^"]*"', svg)
    opening = Markup('<svg class="{}" role="img" aria-label="{}" {} xmlns:xlink="http://www.w3.org/1999/xlink">')
    return opening.format(theme, label, Markup(box)) + Markup(svg[svg.index(">") + 1 :].strip())
