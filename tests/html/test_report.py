"""The page of a report holds every number, loads nothing, and escapes what it did not write."""

import json
import math
import re
import runpy
import sys
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
import torch
from helpers.reports import QUICK, REDUCTIONS, TASKS, full, page
from helpers.tables import TESTED

import torchcalib as tc
from torchcalib import TCETable, html
from torchcalib.html import page as pages
from torchcalib.html import render, save_report
from torchcalib.html.report import _words, _worst_classes
from torchcalib.plots import DARK, LIGHT

VOID = {"meta", "br", "hr", "img", "link", "input"}
HOSTILE = "<script>alert(1)</script>"
BARE = {"tables": {}, "tests": {}}
"""In place of what takes long to draw."""


class Checker(HTMLParser):
    """Collects elements, and raises where tags are not balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def every(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@cache
def parsed(task: str) -> Checker:
    return Checker(page(task))


def shown(**changes):
    """The page of a report with changes, without pictures."""
    return render(replace(full("binary"), **{**BARE, **changes}))


def in_words(text):
    return " ".join(Checker(text).words)


@pytest.mark.parametrize("task", TASKS)
def test_tags_are_balanced_and_the_outline_is_in_order(task):
    checker = parsed(task)
    assert checker.every("html")[0]["lang"] == "en"
    headings = [int(tag[1]) for tag, _ in checker.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(deeper - level <= 1 for level, deeper in pairwise(headings))
    assert all(cell.get("scope") in ("col", "row", "rowgroup") for cell in checker.every("th"))


@pytest.mark.parametrize("task", TASKS)
def test_nothing_is_loaded_and_nothing_runs(task):
    text, checker = page(task), parsed(task)
    loading = {"script", "link", "img", "iframe", "object", "embed", "image", "video", "audio", "base", "form"}
    assert not loading & {tag for tag, _ in checker.elements}
    for _, attributes in checker.elements:
        assert not [name for name in attributes if name.startswith("on")]
        for name in ("href", "xlink:href", "src", "srcset", "action"):
            assert (attributes.get(name) or "#").startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?(.)", text))
    assert "@import" not in text
    # Names of the SVG vocabulary are not addresses that anything is fetched from.
    assert set(re.findall(r"https?://[^\"'\s<>]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


@pytest.mark.parametrize("task", TASKS)
def test_ids_are_unique_and_every_reference_has_its_target(task):
    checker = parsed(task)
    ids = [attributes["id"] for _, attributes in checker.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = set(re.findall(r'(?:href="|url\()#([^")]+)', page(task)))
    referred |= {attributes["aria-labelledby"] for _, attributes in checker.elements if "aria-labelledby" in attributes}
    assert referred <= set(ids)


@pytest.mark.parametrize("task", TASKS)
def test_every_number_is_on_the_page(task):
    r, checker = full(task), parsed(task)
    values = [data["value"] for data in checker.every("data")]
    words = " ".join(checker.words)
    assert r.sentence in words
    for line in r.lines:
        assert str(line.value) in values
        assert pages.number(line.value) in words
        assert line.question in words
        assert line.source in words
    for table in r.tables.values():
        for frequency in table.frequency[table.n > 0].tolist():
            assert str(frequency) in values


@pytest.mark.parametrize("task", TASKS)
def test_every_picture_is_there_for_light_and_dark_with_a_name(task):
    pictures = parsed(task).every("svg")
    n_figures = 2 * (len(full(task).tables) + len(full(task).tests))
    assert [picture["class"] for picture in pictures] == ["light", "dark"] * n_figures
    assert len(parsed(task).every("figure")) == len(parsed(task).every("figcaption")) == n_figures
    assert all(picture["role"] == "img" and len(picture["aria-label"]) > 20 for picture in pictures)
    assert "@media screen and (prefers-color-scheme: dark)" in page(task)
    assert {LIGHT.below, DARK.below} <= set(re.findall("#[0-9a-f]{6}", page(task)))


@pytest.mark.parametrize("task", TASKS)
def test_what_is_read_in_order_is_on_the_page(task):
    assert page(task).count('<h2 id="test-') == len(REDUCTIONS[task])
    for name in ("ACE", "TCE", "KS", "MCB", "DSC", "UNC"):
        assert f'<th scope="row">{name}</th>' in page(task)
    assert "<dt>order-based numbers</dt><dd>exact</dd>" in page(task)
    assert "MCB − DSC + UNC" in page(task)


def test_main_bin_table_is_open_and_others_closed():
    assert ["open" in details for details in parsed("binary").every("details")] == [True, False, False, False]


def test_tests_have_a_section_with_two_pictures_each_and_a_table_of_their_bins():
    r = replace(full("binary"), tests={"positive_class": TESTED, "top_label": TESTED})
    text = render(r)
    checker = Checker(text)
    ids = [attributes["id"] for _, attributes in checker.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"test-1", "test-2"} <= set(ids)
    assert len(checker.every("figure")) == 2 * len(r.tables) + 4
    pictures = [svg["aria-label"] for svg in checker.every("svg") if "Test-based" in svg["aria-label"]]
    assert len(pictures) == 2 * 2 * 2
    assert sum("logit" in label for label in pictures) == 4
    assert "50 of 400" in pictures[0]
    assert ["open" in details for details in checker.every("details")] == [True, False, False, False]
    assert str(12.5) in [data["value"] for data in checker.every("data")]
    rows = [" ".join(row.split()) for row in re.findall(r"<tr>(.*?)</tr>", text) if "2.500e-06" in row]
    assert [re.sub(r"<[^>]*>", " ", row).split() for row in rows[:2]] == [
        ["0", "to", "2.500e-06", "100", "≈", "0", "0", "0", "0.00%"],
        ["2.500e-06", "to", "0.5000", "0", "empty"],
    ]
    assert "16.67%" in checker.words
    assert "Predictions that the outcomes refute" not in shown()


def test_tests_of_no_data_are_said_to_be_of_none():
    table = TCETable(*(torch.zeros(1) for _ in range(11)), quantiles=torch.full((1, 33), torch.nan))
    text = shown(tests={"positive_class": table})
    assert "no data" in text
    assert "TCE =" not in in_words(text)


@pytest.mark.parametrize("task", TASKS)
def test_every_gain_of_a_calibration_stage_is_on_the_page(task):
    stage, checker = full(task).calibration, parsed(task)
    values = [data["value"] for data in checker.every("data")]
    words = " ".join(checker.words)
    assert stage.recommendation.text in words
    assert "What a calibration stage would gain" in words
    for gain in stage.gains:
        assert {str(gain.value), str(gain.rcl)} <= set(values)
        assert pages.gain(gain.rcl) in words
    assert {str(raw) for raw in stage.raw.values()} <= set(values)
    bars = [float(span["style"].split()[1][:-1]) for span in checker.every("span") if "style" in span]
    finite = [x for x in [*stage.raw.values(), *(gain.value for gain in stage.gains)] if math.isfinite(x)]
    assert len(bars) == len(finite)
    assert max(bars) == 100
    assert min(bars) >= 0


def test_a_bar_of_an_infinite_score_has_no_end_and_notes_are_there():
    r = full("binary")
    lost = replace(r.calibration.gains[0], value=math.inf, rcl=-math.inf)
    stage = replace(r.calibration, gains=(lost, *r.calibration.gains[1:]), notes=(HOSTILE,))
    checker = Checker(shown(calibration=stage))
    n_infinite = sum(math.isinf(gain.value) for gain in stage.gains)
    assert sum(span.get("class") == "endless" for span in checker.every("span")) == n_infinite >= 1
    assert "−infinite" in checker.words
    assert HOSTILE in checker.words
    assert "A calibrator that makes the NLL infinite" in " ".join(checker.words)


def test_without_a_calibration_stage_there_is_no_section():
    assert "calibration stage" not in shown(calibration=None).lower()


@pytest.mark.parametrize("best", [None, "DP calibration"])
def test_the_page_says_what_the_command_would_save(best):
    r = full("binary")
    stage = replace(r.calibration, recommendation=replace(r.recommendation, best=best))
    words = " ".join(in_words(shown(calibration=stage)).split())
    assert f"fits {stage.name} to all samples and saves it" in words
    assert ("though no calibrator is worth its trouble" in words) == (best is None)


def test_tests_are_files_and_data_without_their_quantiles(tmp_path):
    written = save_report(replace(full("binary"), tables={}, tests={"top_label": TESTED}), tmp_path)
    names = ["report.json", "report.html", "test_top_label.png", "test_top_label.svg"]
    assert [path.name for path in written] == names
    read = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["tests"]["top_label"]
    assert read["rejected"] == [0, 0, 50]
    assert read["frequency"] == [0, "nan", 0.8125]
    assert "quantiles" not in read


def test_names_of_others_are_escaped():
    fields = ("name", "unit", "question", "source", "group")
    lines = tuple(replace(line, **dict.fromkeys(fields, HOSTILE)) for line in full("binary").lines)
    checker = Checker(
        shown(
            source={"file": HOSTILE, HOSTILE: [HOSTILE, {"x": HOSTILE}]},
            settings={**full("binary").settings, HOSTILE: HOSTILE},
            notes=(HOSTILE,),
            lines=lines,
            **dict.fromkeys(("sentence", "version"), HOSTILE),
        )
    )
    assert checker.every("script") == []
    assert HOSTILE in checker.words


def test_title_names_the_file():
    for source, title in (
        ({}, "Calibration report"),
        ({"file": "a/b/val.npz"}, "Calibration report of val.npz"),
        ({"files": ["a/x.npy", "a/y.npy", "z"]}, "Calibration report of x.npy and 2 more"),
        ({"paths": (Path("a/x.npy"),)}, "Calibration report of x.npy"),
        ({"keys": "probs"}, "Calibration report"),
    ):
        text = shown(source=source)
        assert f"<title>{title}</title>" in text
        assert f"<h1>{title}</h1>" in text


def test_settings_and_source_are_told_long_lists_by_their_first_items():
    files = [f"part-{i}" for i in range(1000)]
    source = {"files": files, "weights_key": None, "reading": {"chunk_rows": 10}, "unused": []}
    settings = {"right": True, "from_logits": True, "ignore_index": -1, "shuffled": False}
    words = in_words(shown(source=source, settings={**full("binary").settings, **settings}))
    for told in ("part-4, and 995 more", "chunk rows 10", "(a, b]", "logits", "ignore index", "shuffled"):
        assert told in words
    assert "part-5" not in words
    assert [_words(value) for value in ([], None, True, 3)] == ["none", "none", "yes", "3"]


def test_infinite_and_undefined_values_are_words_with_an_explanation():
    preds, target = torch.tensor([[1.0], [0.8]]), torch.tensor([[0], [0]])
    r = tc.report(preds, target, task="multilabel", n_bins=5, **QUICK)
    assert math.isinf(r["nll"])
    words = in_words(render(replace(r, **BARE)))
    assert "infinite" in words
    assert "Infinite: a probability of 0 was given to something that happened." in words
    undefined = replace(r, **BARE, lines=(replace(r.lines[0], value=math.nan), r.main_line))
    assert "Undefined: the data do not say" in in_words(render(undefined))
    assert "Infinite:" not in page("binary")
    assert "Undefined:" not in page("binary")


def test_worst_classes_are_the_ten_with_the_largest_ece_and_undefined_ones_come_last():
    r = full("multiclass")
    values = (0.3, math.nan, 0.5) + (0.1,) * 9
    worst = _worst_classes(replace(r, per_class=values))
    assert [index for index, _, _ in worst] == [2, 0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert [share for _, share, _ in worst] == [r.priors[index] for index, _, _ in worst]
    assert [index for index, _, _ in _worst_classes(replace(r, per_class=values[:3]))] == [2, 0, 1]


def test_classes_are_listed_where_there_are_any():
    assert [task for task in TASKS if 'id="worst"' in page(task)] == ["multiclass", "multilabel"]


def test_same_report_gives_the_same_page_whatever_matplotlib_is_set_to():
    expected = page("multilabel")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "lines.linewidth": 9}):
        before = matplotlib.rcParams.copy()
        assert render(full("multilabel")) == expected
        assert matplotlib.rcParams.copy() == before


@pytest.mark.parametrize(
    ("task", "others", "tested"),
    [
        ("binary", ["_top_label"], ["positive_class", "top_label"]),
        pytest.param("multilabel", [], ["classwise"], marks=pytest.mark.extended),
    ],
)
def test_folder_holds_exactly_the_files_returned(task, others, tested, tmp_path):
    out = tmp_path / "a" / "b"
    written = save_report(full(task), out)
    expected = {"report.json", "report.html"}
    for suffix in ["", *others]:
        expected |= {f"{kind}{suffix}.{end}" for kind in ("reliability", "confidence") for end in ("png", "svg")}
    expected |= {f"test_{name}.{end}" for name in tested for end in ("png", "svg")}
    assert {path.name for path in written} == expected
    assert sorted(written) == sorted(out.iterdir())
    assert (out / "report.html").read_text(encoding="utf-8") == page(task)
    content = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert content["notes"] == []
    for name in tested:
        assert content["tests"][name]["rejected"] == full(task).tests[name].rejected.tolist()
        assert "quantiles" not in content["tests"][name]


def test_second_report_replaces_the_first_and_leaves_other_files(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "report.html").write_text("old")
    bare = replace(full("multilabel"), **BARE)
    save_report(bare, tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(bare)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("below", ["", "deeper"])
def test_file_in_place_of_the_folder_is_refused(below, tmp_path):
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"`out` must be a folder, got '.*taken.*Name another folder\."):
        save_report(replace(full("multilabel"), **BARE), tmp_path / "taken" / below)
    assert (tmp_path / "taken").read_text() == "mine"


def test_missing_jinja_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"pip install 'torchcalib\[report\]'"):
        runpy.run_path(html.__file__)
