"""Hostile names from files and callers are harmless in output and files."""

import json
import os
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.inference import CalibrationTest
from torchcalib.io.saved import write_whole
from torchcalib.metrics.groups.table import GroupTable
from torchcalib.reporting import terminal
from torchcalib.reporting.building import ReportBuilder
from torchcalib.reporting.html.report import render

HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "{% raw %}", "../../../outside",
    "/tmp/outside", "\x1b[31mred\x1b]0;title\x07", "[red]markup[/red][/]", "right\u202eleft", "a\r\nb", "$x_{", "-->",
)  # fmt: skip


@pytest.fixture(scope="module")
def compared():
    """Return a comparison of two systems, whose names contain all hostile names."""
    g = torch.Generator().manual_seed(0)
    names = (" ".join(HOSTILE[::2]), " ".join(HOSTILE[1::2]))
    probs = {name: torch.rand(50, generator=g) for name in names}
    return tc.compare(probs, torch.arange(50) % 2, task="binary", n_replicates=39)


def assert_harmless(text):
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_names_of_systems_are_escaped_on_pages_in_pictures_and_in_the_terminal(compared, capsys):
    from torchcalib.plots import difference_plot, to_svg
    from torchcalib.reporting.html.comparison import render_comparison

    page, svg = render_comparison(compared), to_svg(difference_plot(compared))
    for markup in (*HOSTILE[:2], "<script", "<img"):
        assert markup not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "{{ 7 * 7 }}" in page, "no name is a template"
    assert "<script" not in svg
    ElementTree.fromstring(svg)  # of our own making: it must be well formed
    terminal.show_comparison(compared)
    terminal.show_paths([Path("/x/\x1b[31m[red].html")])
    output = capsys.readouterr().out
    assert_harmless(output)
    assert "[red]markup[/red][/]" in output
    assert "[red].html" in output


def test_names_of_groups_are_shown_as_text(tmp_path, capsys):
    """In the terminal, on the page and in JSON; names that look alike remain different."""
    plain = ("=1+1", "@SUM(A1)", ":bomb:", "back\\", "[/bold]\\", "&lt;b&gt;")
    names = [*HOSTILE, *plain, "🧨👩\u200d🚒", "\ud800", "a\nb", "\u200e"]
    groups = torch.arange(40 * len(names)) % len(names)
    p = torch.rand(len(groups), generator=torch.Generator().manual_seed(0))
    builder = ReportBuilder(task="binary", with_calibration=False, with_intervals=False)
    builder.update(p, groups % 2, groups=groups, group_names=names)
    builder.save(tmp_path / "state.pt")
    found = ReportBuilder.load(tmp_path / "state.pt").report()
    assert found.groups.n_groups == len(names)
    x = torch.full((len(names),), 0.1, dtype=torch.float64)
    evidence = CalibrationTest(x, x / 2, x, x / 2, 2 * x, 0.95)
    whole = replace(found, groups=GroupTable.of(names, torch.full((len(names),), 40.0), evidence))
    terminal.show(whole)
    for text in (capsys.readouterr().out, str(whole)):
        assert_harmless(text)
        for name in (*plain, "[red]markup[/red][/]", "🧨", "{{ 7 * 7 }}"):
            assert name in text, name
    page = render(replace(whole, tables={}, tests={}))
    page.encode()  # of what no file can hold nothing is left
    assert "<script" not in page
    assert "<img" not in page
    for name in ("&lt;script&gt;alert(1)&lt;/script&gt;", "=1+1", ":bomb:", "{{ 7 * 7 }}", "&amp;lt;b&amp;gt;"):
        assert f"<bdi>{name}</bdi>" in page
    assert page.count('<th scope="row" class="name">') == len(names)
    assert json.loads(whole.to_json())["groups"]["group"] == names


def test_errors_are_one_line_without_control_characters(tmp_path, capsys):
    for name in ("\x1b]0;owned\x07.npz", "a\r\nb.npz", "\u202e.xyz"):
        assert main(["report", str(tmp_path / name)]) == 2
        assert main(["compare", f"a={tmp_path / name}", f"b={tmp_path}/*{name}"]) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 2
        assert_harmless(errors)


@pytest.mark.extended
def test_output_stays_in_its_folder_for_hostile_names_and_links(compared, tmp_path):
    outside, out = tmp_path / "outside", tmp_path / "deep" / "out"
    outside.mkdir()
    out.mkdir(parents=True)
    (outside / "mine").write_text("mine")
    part = f".compare.html.{os.getpid()}.part"
    for name in ("compare.json", "compare.svg", "report.json", "report.html", "reliability.png", part):
        (out / name).symlink_to(outside / "mine")
    (out / "compare.png").symlink_to(outside / "new")  # which is not there
    (tmp_path / "link").symlink_to(out)  # a folder that is a link is followed, because it was named
    report = tc.report(torch.rand(20), torch.arange(20) % 2, task="binary", with_calibration=False)
    written = [*compared.save(out), *report.save(tmp_path / "link")]
    assert {path.parent.resolve() for path in written} == {out}
    assert [path.read_text() for path in outside.iterdir()] == ["mine"]
    assert all(path.is_file() and not path.is_symlink() for path in written)
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} <= {out, outside, tmp_path / "link"}
    assert not list(out.glob(".*")), "no part is left"


def test_a_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "x").symlink_to(tmp_path / "mine")
    write_whole(tmp_path / "x", b"new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "x").read_bytes() == b"new"
