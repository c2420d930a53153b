"""The page of a report contains every number, loads no resources, and escapes external text."""

import json
import math
import re
from dataclasses import replace
from functools import cache, partial

import matplotlib
import pytest
import torch
from helpers.drawings import legend_of
from helpers.html import Parsed
from helpers.reports import QUICK, TASKS, bare, full_report, quick_report
from helpers.systems import compared
from helpers.tables import small_blocks

import torchcalib as tc
from torchcalib import plots
from torchcalib.display.words import significant
from torchcalib.plots import DARK
from torchcalib.reporting.render import html
from torchcalib.reporting.render.contents import key_numbers
from torchcalib.reporting.render.html import _overview, _square_diagram, render
from torchcalib.results.base import today
from torchcalib.results.history import History, HistoryRow
from torchcalib.results.report import class_table

HOSTILE = "<script>alert(1)</script>"
LOADING = {"link", "img", "iframe", "object", "embed", "image", "video", "audio", "base", "form"}
FIRST_SCREEN = ("verdict", "cause", "action", "key-numbers", "diagram")


@cache
def page(task):
    """Return the page of a report with all sections."""
    return Parsed(render(full_report(task)))


def shown(report=None, **changes):
    """Return the page of a report with changed fields, with few figures."""
    return Parsed(render(bare(report or full_report("binary"), **changes)))


@pytest.mark.parametrize("task", TASKS)
def test_page_loads_nothing_runs_only_its_own_script_and_has_valid_references(task):
    assert not {tag for tag, _ in page(task).elements} & LOADING
    assert not [name for _, attributes in page(task).elements for name in attributes if name.startswith("on")]
    assert [attributes for tag, attributes in page(task).elements if tag == "script"] == [{}]
    for name in ("src", "srcset", "action", "data", "formaction"):
        assert page(task).values_of(name) == []
    places = re.compile(r"#|https://(doi\.org/10\.|arxiv\.org/abs/\d)")
    links = [(tag, attributes) for tag, attributes in page(task).elements if {"href", "xlink:href"} & attributes.keys()]
    assert all(places.match(attributes["href"]) for tag, attributes in links if tag == "a")
    assert all(attributes["xlink:href"].startswith("#") for tag, attributes in links if tag != "a")
    text = page(task).text
    script = re.search("<script>(.*)</script>", text, flags=re.DOTALL)[1]
    unsafe = r"fetch|XMLHttp|import\W|eval\W|innerHTML|insertAdjacent|document\.write|storage|cookie"
    assert not re.search(unsafe, script)
    assert set(re.findall(r"url\(['\"]?(.)", text)) <= {"#"}
    assert "@import" not in text
    # Names of SVG namespaces are not fetched.
    named = set(re.findall(r"https?://[^\"'\s<>]+", text)) - {a["href"] for tag, a in links if tag == "a"}
    assert named <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    ids = page(task).values_of("id")
    assert len(ids) == len(set(ids))
    assert {*re.findall(r'(?:href="|url\()#([^")]+)', text), *page(task).values_of("aria-labelledby")} <= set(ids)


@pytest.mark.parametrize("task", TASKS)
def test_page_contains_every_number_and_figure(task):
    """The parser runs no script, so that the page is complete without it."""
    r, words = full_report(task), " ".join("".join(page(task).words).split())
    stage = r.calibration
    assert {r.decision.cause, r.decision.action, r.recommendation.text} <= set(page(task).words)
    assert {word for number in key_numbers(r) for word in number if word} <= set(page(task).words)
    numbers = {x for line in r.lines for x in (line.value, line.p_value)} - {None}
    numbers |= {x for line in stage.lines for x in (line.accuracy, line.nll, line.brier_score, line.ece)}
    numbers |= {line.gain for line in stage.lines[1:]}
    numbers |= {x for table in r.tables.values() for x in table.frequency[table.n > 0].tolist()}
    assert {line.parameters for line in stage.lines[1:]} <= set(page(task).words)
    assert set(map(str, numbers)) <= set(page(task).values_of("value"))
    for line in r.lines:
        assert all(text in words for text in (significant(line.value), line.source)), line.key
        tip = next(tip for tip in page(task).values_of("title") if line.question[1:] in tip)
        assert f"has the value {significant(line.perfect)}." in tip
        if line.interval is not None and line.interval.low > 0.001:
            low, high = (round(end, 6) for end in (line.interval.low, line.interval.high))  # six decimals are shown
            assert f"{low:.3g} to {high:.3g}" in words, line.key
    pictures = [attributes for tag, attributes in page(task).elements if tag == "svg"]
    assert [picture["class"] for picture in pictures] == ["light", "dark"] * 2 * (len(r.tables) + len(r.tests))
    assert all(picture["role"] == "img" and len(picture["aria-label"]) > 20 for picture in pictures)


@pytest.mark.parametrize("task", TASKS)
def test_first_screen_has_verdict_cause_action_numbers_and_diagram_in_this_order(task):
    names = [attributes.get("id", tag) for tag, attributes in page(task).elements]
    first = [name for name in names[: names.index("details")] if name in FIRST_SCREEN]
    assert first == list(FIRST_SCREEN)
    assert not [attributes for _, attributes in page(task).elements if "hidden" in attributes]
    folded = page(task).text[page(task).text.index("<details") :]
    assert folded.count("<summary>") == folded.count("<details") > 5


def test_first_screen_has_date_file_name_and_warnings_but_no_notes_and_no_path():
    source = {"files": ["/home/ann/secret/valid.npz", "/home/ann/secret/b.npz"]}
    text = shown(notes=("omitted", "dropped rows"), warnings=("dropped rows",), source=source).text
    first, _, rest = text[text.index("<main>") :].partition("<details")
    assert f"valid.npz and 1 more, <time>{full_report('binary').created}</time>: binary, n = 400" in first
    assert "secret" not in first
    assert "dropped rows" in first
    assert "omitted" not in first
    notes = rest[rest.index('id="notes"') :].partition("</details>")[0]
    assert "omitted" in notes
    assert "dropped rows" in notes


def test_date_is_in_json_and_can_be_set_for_reproducible_files(monkeypatch):
    assert json.loads(full_report("binary").to_json())["created"] == "2026-01-01"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86399")
    assert today() == "1970-01-01"
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", today())


@pytest.mark.parametrize("task", TASKS)
def test_headline_diagram_has_bands_and_the_curve_after_the_calibrator(task):
    r = full_report(task)
    stage, name = r.calibration, _overview(r)[1]
    ax = _square_diagram(r, stage)
    legend = legend_of(ax)
    assert "95% of bins if calibrated" in legend
    error = "mean ECE of labels" if task == "multilabel" else "ECE"
    assert legend[0].startswith(f"{error} {r['ece']:.3g}")
    assert " ".join(legend[-1].split()) == f"after {stage.name} {error} {stage.best.ece:.3g}"
    assert name in (stage.name, "")
    words = "confidence" if task == "multiclass" else "predicted probability"
    assert ax.get_xlabel() == f"mean {words} of the bin"


def test_multilabel_page_has_one_ece_and_all_labels():
    """The ECE of pooled labels is not shown, because it differs from the mean over labels."""
    r = full_report("multilabel")
    pooled = float((r.main_table.share * r.main_table.gap.abs()).sum())
    first = page("multilabel").text.partition("<details")[0]
    assert f"{pooled:.3g}" != f"{r['ece']:.3g}"
    assert f"ECE {pooled:.3g}" not in first
    table = page("multilabel").text.partition('aria-labelledby="classes"')[2].partition("</table>")[0]
    assert table.count('<th scope="row"') == 3
    for line in r.class_lines:
        assert f'<data value="{line.value}">' in table
        assert f'<data value="{line.noise_floor}">' in table
        assert f'<data value="{line.p_value}">' in table
        assert line.direction in table


def test_external_names_are_escaped():
    r = full_report("binary")
    stage = r.calibration
    fields = ("name", "unit", "question", "source", "group")
    calibrators = (stage.raw, *(replace(line, parameters=HOSTILE) for line in stage.lines[1:]))
    checked = shown(
        source={"file": HOSTILE, HOSTILE: [HOSTILE, {"x": HOSTILE}]},
        settings={**r.settings, HOSTILE: HOSTILE},
        notes=(HOSTILE,),
        lines=tuple(replace(line, **dict.fromkeys(fields, HOSTILE)) for line in r.lines),
        calibration=replace(stage, notes=(HOSTILE,), lines=calibrators),
        decision=replace(r.decision, **dict.fromkeys(("verdict", "cause", "action"), HOSTILE)),
        version=HOSTILE,
    )
    assert [tag for tag, _ in checked.elements].count("script") == 1, "the script of the page"
    assert checked.words.count(HOSTILE) >= 3 + len(r.lines) + len(stage.lines)
    assert any(HOSTILE in tip for tip in checked.values_of("title"))


def test_infinite_and_undefined_values_are_explained():
    r = tc.report(torch.tensor([[1.0], [0.8]]), torch.tensor([[0], [0]]), task="multilabel", n_bins=5, **QUICK)
    undefined = (replace(r.lines[0], value=math.nan), r.main_line)
    assert "Infinite: a probability of 0 was predicted for an outcome that occurred" in shown(r).text
    assert "Undefined: the value cannot be computed from this data" in shown(r, lines=undefined).text
    assert "calibration" not in shown(calibration=None).values_of("id")


def test_classes_are_sorted_by_ece_minus_noise_floor_with_undefined_ones_last():
    r = full_report("multiclass")
    values, floors = (0.3, math.nan, 0.5) + (0.1,) * 9, (0.01, 0.01, 0.3) + (0.01,) * 9
    changed = zip(r.class_lines, values, floors, strict=True)
    lines = tuple(replace(line, value=value, noise_floor=floor) for line, value, floor in changed)
    (worst,) = class_table(replace(r, class_lines=lines), 10).sections
    assert [row.cells[0].page for row in worst.rows] == [str(k) for k in (0, 2, 3, 4, 5, 6, 7, 8, 9, 10)]
    assert [task for task in TASKS if "classes" in page(task).values_of("id")] == ["multiclass", "multilabel"]


def test_save_writes_the_returned_files_and_ignores_matplotlib_settings(tmp_path):
    out = tmp_path / "a" / "b"
    out.mkdir(parents=True)
    (out / "report.html").write_text("old")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "lines.linewidth": 9}):
        before = matplotlib.rcParams.copy()
        written = full_report("binary").save(out, diagrams=True)
        assert matplotlib.rcParams.copy() == before
    pictures = ["reliability", "confidence", "reliability_top_label", "confidence_top_label"]
    pictures += ["test_positive", "test_top_label"]
    expected = {f"{name}.{end}" for name in pictures for end in ("png", "svg")} | {"report.json", "report.html"}
    assert {path.name for path in written} == expected
    assert sorted(written) == sorted(out.iterdir())
    assert (out / "report.html").read_text(encoding="utf-8") == page("binary").text
    assert {path.name for path in full_report("binary").save(tmp_path / "c")} == {"report.json", "report.html"}
    assert (tmp_path / "c/report.html").read_bytes() == (out / "report.html").read_bytes()
    content = json.loads((out / "report.json").read_text(encoding="utf-8"))
    for name, table in full_report("binary").tests.items():
        assert content["tests"][name]["rejected"] == table.rejected.tolist()
        assert content["tests"][name]["quantiles"] == table.quantiles.tolist()


@pytest.mark.parametrize(
    ("draw", "of"),
    [
        (plots.reliability_diagram, lambda: quick_report("binary").main_table),
        (plots.confidence_histogram, lambda: quick_report("binary").main_table),
        (plots.tce_diagram, small_blocks),
        (partial(plots.tce_diagram, logit=True), lambda: quick_report("binary").tests["positive"]),
        (plots.training_curve, lambda: History((HistoryRow(1, 1, {"nll": 1.0}), HistoryRow(2, 2, {"nll": 2.0}, "so")))),
        (plots.difference_plot, lambda: compared("binary")),
    ],
)
def test_dark_figure_equals_a_figure_drawn_with_the_dark_style(draw, of):
    def numbered(svg):
        """Replace ids by consecutive numbers, because they are hashes that include the colours."""
        ids = {}
        return re.sub(r"\b[a-z]?[0-9a-f]{10}\b", lambda found: ids.setdefault(found[0], f"id{len(ids)}"), svg)

    drawn = html.both_themes(plots.to_svg(draw(of())), "p", "label")
    dark = html._inline(plots.to_svg(draw(of(), style=DARK)), "p-dark-", "label", "dark")
    assert numbered(drawn[drawn.index('<svg class="dark"') :]) == numbered(dark)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_saving_to_an_existing_file_raises_an_error(below, tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"`path` must be a folder, got '.*taken.*Choose another folder\."):
        bare(full_report("multilabel")).save(tmp_path / "taken" / below)
    assert (tmp_path / "taken").read_text() == "mine"
