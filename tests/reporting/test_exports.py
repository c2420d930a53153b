"""Exports of reports, comparisons and tables contain the numbers of the objects."""

import json
import math
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.html import Parsed
from helpers.reports import MODES, QUICK, TASKS, bare, calibrated_report, full_report, miscalibrated_data, quick_report
from helpers.systems import compared
from report_schema import report_schema

import torchcalib as tc
from torchcalib.display.tables import Cell, Column, Table, number
from torchcalib.reporting.render.html import render
from torchcalib.results.history import History, HistoryRow
from torchcalib.results.schema import PATH

HOSTILE = "<b>|_%$&#{}~^\\"
HISTORY = History((HistoryRow(1, 1, {"nll": 1.5}), HistoryRow(2, 2, {"nll": 0.25, "ece": 0.125})))


def grouped():
    preds, target = miscalibrated_data("binary")
    groups = torch.arange(400) % 3
    return tc.report(preds, target, task="binary", groups=groups, group_names=["a", HOSTILE, "c"], **QUICK).groups


TABLES = {
    "report": lambda: full_report("multiclass"),
    "comparison": lambda: compared("multiclass"),
    "bins": lambda: quick_report("binary").main_table,
    "tested bins": lambda: quick_report("binary").tests["positive"],
    "groups": grouped,
    "gains": lambda: calibrated_report("binary").calibration,
    "history": lambda: HISTORY,
    "classes": lambda: full_report("multilabel").classes,
}


TAGS = {"p", "table", "thead", "tbody", "tr", "th", "td", "data", "bdi", "abbr", "a"}


def unescaped(text):
    return re.sub(r"\\(.)", r"\1", text.strip())


def shown_rows(table):
    """Return the texts of a table by row. The heading of a section is a row of its own."""
    layout = table.layout().shown_on("always", "wide")
    rows = [[column.header for column in layout.columns]]
    for section in layout.sections:
        rows += [[section.heading]] * bool(section.heading)
        rows += [[cell.page for cell in row.cells] for row in section.rows]
    return rows


@pytest.mark.parametrize("name", TABLES)
def test_html_and_markdown_contain_exactly_the_cells(name):
    table = TABLES[name]()
    expected = [[" ".join(cell.split()) for cell in row] for row in shown_rows(table)]
    found = Parsed(table._repr_html_())
    assert {tag for tag, _ in found.elements} <= TAGS
    assert found.rows[: len(expected)] == expected
    lines = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
    cells = [[unescaped(cell) for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert all(set(cell) <= {":", "-"} for cell in cells.pop(1))
    assert {len(row) for row in cells} == {len(expected[0])}
    bold = [row if len(row) > 1 else [f"**{row[0]}**", *[""] * (len(expected[0]) - 1)] for row in expected]
    assert cells == bold


@pytest.mark.parametrize("name", TABLES)
def test_latex_is_one_tabular_with_rows_of_equal_length(name):
    table = TABLES[name]()
    latex = table.to_latex()
    begin, *rows, end = [line for line in latex.splitlines() if not line.startswith(("%", r"\toprule", r"\midrule"))]
    n_columns = len(shown_rows(table)[0])
    assert re.fullmatch(rf"\\begin{{tabular}}{{[lr]{{{n_columns}}}}}", begin)
    assert (rows.pop(), end) == (r"\bottomrule", r"\end{tabular}")
    assert all(row.endswith(r" \\") for row in rows)
    assert len(rows) == len(shown_rows(table))
    counts = {len(re.findall(r"(?<!\\)&", row)) for row in rows if r"\multicolumn" not in row}
    assert counts == {n_columns - 1}
    assert latex.isascii(), "other characters require LaTeX packages"


def test_special_characters_are_escaped():
    columns = [Column("n", lambda item: Cell(item, style="name"), is_number=False), Column("x", lambda _: number(-0.5))]
    table = Table.from_items(columns, {HOSTILE: [HOSTILE]}, HOSTILE)
    assert Parsed(table._repr_html_()).rows[1:] == [[HOSTILE], [HOSTILE, "−0.500"]]
    assert table.to_markdown().count(r"\<b\>\|\_%$&#{}~^\\") == 3
    latex = r"$<$b$>$|\_\%\$\&\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}"
    assert table.to_latex().count(latex) == 3
    assert rf"{latex} & $-$0.500 \\" in table.to_latex()


def frame_of(table):
    pytest.importorskip("pandas")
    return table.to_pandas()


def test_data_frame_of_a_report_has_all_lines_in_full_precision():
    report = full_report("multiclass")
    frame = frame_of(report)
    assert list(frame.index) == list(report)
    assert frame["value"].to_dict() == dict(report)
    for line in report.lines:
        row = frame.loc[line.key]
        expected = [line.noise_floor, line.p_value, *(vars(line.interval).values() if line.interval else (None, None))]
        found = [None if math.isnan(x) else x for x in row[["noise_floor", "p_value", "low", "high"]]]
        assert found == expected, line.key
        assert list(row[["group", "name", "unit", "source"]]) == [line.group, line.name, line.unit, line.source]
    assert frame_of(quick_report("binary"))["low"].isna().all()


def test_data_frame_of_a_comparison_has_columns_for_systems_and_differences():
    comparison = compared("multiclass")
    frame = frame_of(comparison)
    for line in comparison.lines:
        row = frame.loc[line.key]
        assert list(row[["calibrated", "sure", "noisy"]]) == list(line.values.values())
        for name, found in line.differences.items():
            prefix = f"{name} - calibrated"
            assert row[prefix] == found.value
            if found.interval is not None:
                assert row[f"{prefix}: low"] == found.interval.low
                assert row[f"{prefix}: high"] == found.interval.high
                assert row[f"{prefix}: verdict"] == found.verdict


@pytest.mark.parametrize("name", ["bins", "tested bins"])
def test_data_frame_of_bins_has_the_columns_of_the_table(name):
    table = TABLES[name]()
    frame, columns = frame_of(table), table.to_dict()
    for column in set(frame) & set(columns):
        np.testing.assert_array_equal(frame[column], columns[column])
    assert set(columns) - set(frame) <= {"quantiles", "share", "gap", "ecd", "band_low", "band_high"}
    np.testing.assert_array_equal(frame["n"], columns["n"])
    if name == "tested bins":
        assert 100 * frame["rejected"].sum() / frame["n"].sum() == pytest.approx(float(table.tce), rel=1e-12)


def test_data_frames_of_batches_groups_gains_histories_and_classes():
    probs, target = miscalibrated_data("multiclass")
    batch = tc.functional.calibration_curve(probs, target, task="multiclass", mode="classwise", n_bins=5)
    frame = frame_of(batch)
    assert list(frame["index"].unique()) == [f"[{k}]" for k in range(12)]
    np.testing.assert_array_equal(frame["frequency"], batch.frequency.flatten())
    groups = grouped()
    assert frame_of(groups).reset_index().to_dict("records") == groups.rows()
    stage = calibrated_report("binary").calibration
    scores = frame_of(stage)
    for line in stage.lines:
        row = scores.loc[line.calibrator]
        expected = [getattr(line, name) for name in ("accuracy", "nll", "brier_score", "ece")]
        assert list(row[["accuracy", "nll", "Brier_score", "ece"]]) == expected
        assert scores["gain"].isna()[line.calibrator] == (line.gain is None)
        assert scores["low"].isna()[line.calibrator] == (line.interval is None)
    gained = {line.calibrator: (line.gain, *vars(line.interval).values()) for line in stage.lines if line.interval}
    assert {name: tuple(scores.loc[name, ["gain", "low", "high"]]) for name in gained} == gained
    assert {"temperature scaling", "affine scaling"} <= set(gained)
    assert "isotonic calibration" not in gained, "its NLL is infinite"
    assert frame_of(HISTORY)["nll"].to_dict() == {1: 1.5, 2: 0.25}
    report = full_report("multilabel")
    assert frame_of(report.classes)["ece"].sort_index().tolist() == list(report.per_class)
    assert frame_of(report.classes)["ece"].is_monotonic_decreasing


def test_missing_pandas_raises_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'torchcalib\[pandas\]'"):
        HISTORY.to_pandas()


@pytest.mark.parametrize("task", TASKS)
def test_key_without_a_mode_returns_the_main_mode(task):
    report, main = quick_report(task), MODES[task][0]
    for name in ("ece", "ks", "mcb"):
        assert report[name] == report[f"{name}/{main}"]
    assert compared(task)["ece"] is compared(task)[f"ece/{main}"]
    assert "ece" in report


def test_suffix_of_a_path_selects_the_format(tmp_path):
    for result in (bare(quick_report("binary")), compared("binary")):
        folder = tmp_path / type(result).__name__
        for name in ("r.html", "r.json", "r.md", "r.tex"):
            assert result.save(folder / "deep" / name) == (folder / "deep" / name,)
        texts = {path.suffix: path.read_text(encoding="utf-8") for path in (folder / "deep").iterdir()}
        assert texts[".html"].startswith("<!DOCTYPE html>")
        assert json.loads(texts[".json"]) == result.to_dict()
        assert texts[".md"] == result.to_markdown() + "\n"
        assert texts[".tex"] == result.to_latex() + "\n"
        (folder / "v.html").mkdir()
        written = result.save(folder / "v.html")  # an existing folder is not replaced by a file
        assert {path.parent for path in written} == {folder / "v.html"}
        assert {path.suffix for path in written} >= {".html", ".json"}
        assert len(result.save(str(folder / "run-0.5"))) == len(written)
        with pytest.raises(ValueError, match=r"`path` must end in \.html, \.json, \.md, \.tex, or be a folder, got"):
            result.save(folder / "r.pdf")


@pytest.mark.parametrize("task", TASKS)
def test_saved_results_are_loaded(task, tmp_path):
    """The page of a loaded report has the same diagrams, and thus the same tables of bins."""
    report = replace(full_report(task) if task == "binary" else bare(full_report(task)), history=HISTORY)
    for result, file in ((report, "report.json"), (compared(task), "compare.json")):
        result.save(tmp_path / file)
        for path in (tmp_path / file, str(tmp_path)):
            again = type(result).load(path)
            assert again.to_dict() == result.to_dict()
            assert str(again) == str(result)
    assert render(tc.Report.load(tmp_path)) == render(report)


def test_other_files_are_no_reports(tmp_path):
    saved = quick_report("binary").to_dict()
    wrong = {
        "version": {**saved, "schema_version": 99},
        "kind": {**saved, "task": "regression"},
        "type": {**saved, "num_classes": "two"},
        "missing": {name: value for name, value in saved.items() if name != "lines"},
        "list": [],
    }
    for name, content in wrong.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"must be a complete Report, got .* Create it with the method `save`\."):
            tc.Report.load(tmp_path / f"{name}.json")
    with pytest.raises(ValueError, match=r"`path` must be a folder or a \.json file, got 'r\.html'"):
        tc.Report.load("r.html")
    with pytest.raises(FileNotFoundError):
        tc.Report.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="`no folder` must be a folder or a file"):
        tc.Report.load("no folder")


def names_by_error(report):
    """Return the class names in descending order of the class errors minus their noise floors."""
    order = sorted(range(12), key=lambda k: report.class_lines[k].noise_floor - report.per_class[k])
    return [report.class_names[k] for k in order]


def test_class_names_are_in_text_page_tables_and_diagrams():
    probs, target = miscalibrated_data("multiclass")
    names = [f"kind {k}" for k in range(11)] + [HOSTILE]
    report = tc.report(probs, target, class_names=names, **QUICK)
    worst = names_by_error(report)[0]
    assert shown_rows(report.classes)[1][0] == worst
    assert worst in str(report)
    table = re.search(r'aria-labelledby="classes".*?</table>', render(report), flags=re.DOTALL)[0]
    assert [row[0] for row in Parsed(table[table.index("<table") :]).rows[1:]] == names_by_error(report)
    assert report.to_dict()["class_names"] == names
    binary = tc.report([0.1, 0.7, 0.8], ["ham", "spam", "spam"], class_names=["ham", "spam"], **QUICK)
    assert "positive class (spam)" in render(binary)
    assert tc.report(probs, target, positive_classes=[1], class_names=names, **QUICK).class_names == ()


@pytest.mark.parametrize("task", TASKS)
def test_flat_contains_every_number_of_the_lines(task):
    report = full_report(task)
    flat = report.flat()
    assert flat.pop("n") == report.n
    assert flat.pop("minimum_detectable_error") == report.minimum_detectable_error
    for line in report.lines:
        assert flat.pop(line.key) == pytest.approx(line.value, nan_ok=True)
        ends = {} if line.interval is None else {"low": line.interval.low, "high": line.interval.high}
        evidence = {"noise_floor": line.noise_floor, "p_value": line.p_value, **ends}
        for name, value in evidence.items():
            assert value is None or flat.pop(f"{line.key}/{name}") == value
    assert not flat


def assert_valid(value, schema, definitions, where="report"):
    """Check a value against the keywords of JSON Schema that `report_schema` uses."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in schema:
        errors = []
        for one in schema["anyOf"]:
            try:
                return assert_valid(value, one, definitions, where)
            except AssertionError as error:
                errors.append(str(error))
        raise AssertionError(f"{where}: {errors}")
    assert value in schema.get("enum", [value]), where
    assert value == schema.get("const", value), where
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    kinds |= {"integer": int, "number": int | float}
    if kind := schema.get("type"):
        assert isinstance(value, kinds[kind]), f"{where}: {value!r} is not of type {kind}"
        assert kind == "boolean" or not isinstance(value, bool), where
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        assert set(schema.get("required", ())) <= set(value), where
        assert set(value) <= set(properties) or "additionalProperties" in schema, f"{where}: {set(value)}"
        for name, item in value.items():
            assert_valid(item, properties.get(name, schema.get("additionalProperties")), definitions, f"{where}.{name}")
    if schema.get("type") == "array":
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf), where
        for k, item in enumerate(value):
            items = schema["prefixItems"][k] if "prefixItems" in schema else schema["items"]
            assert_valid(item, items, definitions, f"{where}[{k}]")
    return None


@pytest.mark.parametrize("task", TASKS)
def test_json_of_a_report_agrees_with_its_schema(task):
    schema = json.loads(PATH.read_text(encoding="utf-8"))
    assert schema == report_schema(), "`python tests/report_schema.py` writes the file"
    reports = [full_report(task), replace(quick_report(task), history=HISTORY)]
    if task == "binary":
        reports += [replace(quick_report("binary"), groups=grouped()), calibrated_report("binary")]
    for report in reports:
        assert_valid(json.loads(report.to_json()), schema, schema["$defs"])
    wrong = {"schema_version": 0, "task": "regression", "n": "many", "lines": [{}], "decision": None}
    for name, value in wrong.items():
        with pytest.raises(AssertionError):
            assert_valid(json.loads(reports[0].to_json()) | {name: value}, schema, schema["$defs"])
