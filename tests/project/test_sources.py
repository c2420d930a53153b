"""Page on names in the sources: every term has a call that runs with the example of the page."""

import importlib
import re

import pytest
import torch
from processes import ROOT

SOURCES = ("ecd", "talk", "epsr", "ce", "tce")


@pytest.fixture(scope="module")
def source_terms():
    pytest.importorskip("sphinx")
    pytest.importorskip("matplotlib")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))  # benchmarks
        patch.syspath_prepend(str(ROOT / "docs/_ext"))
        yield importlib.import_module("directives")


def test_terms_of_a_source_are_unique_and_complete(source_terms):
    assert tuple(source_terms.contents("sources")["sources"]) == SOURCES
    found = [(source, term.name) for source in SOURCES for term in source_terms.terms(source)]
    assert len(found) == len(set(found))
    assert len(found) >= 120
    for source in SOURCES:
        assert all(term.name and term.call for term in source_terms.terms(source)), source


@pytest.mark.parametrize("source", SOURCES)
def test_every_call_gives_a_finite_value_or_a_diagram(source_terms, source):
    for term in source_terms.terms(source):
        value = source_terms.value_of(term.call)
        text = source_terms.shown(value, term.name)
        if not text.startswith("<img"):
            parts = value if isinstance(value, tuple) else [getattr(value, "value", value)]
            numbers = torch.cat([torch.as_tensor(part).reshape(-1) for part in parts])
            assert numbers.numel(), term.name
            assert not numbers.isinf().any(), term.name
            assert not numbers.isnan().all(), term.name  # bins may be empty


def test_remarks_with_printed_numbers_agree_with_the_value(source_terms):
    """A remark such as "7.28 is printed" agrees if the value rounds to it."""
    compared = 0
    for source in SOURCES:
        for term in source_terms.terms(source):
            found = re.fullmatch(r"(\d+\.(\d+)) is printed", term.remark)
            if found:
                value = float(source_terms.value_of(term.call))
                assert value == pytest.approx(float(found[1]), abs=0.6 * 10.0 ** -len(found[2])), term.name
                compared += 1
    assert compared == 7


def test_calibration_error_of_the_post_has_its_worked_value(source_terms):
    values = {term.name: source_terms.value_of(term.call) for term in source_terms.terms("ce")}
    assert values["calibration error (CE)"].item() == pytest.approx(0.241, abs=1e-12)


def test_page_contains_every_source(source_terms):
    page = (ROOT / "docs/guide/sources.md").read_text(encoding="utf-8")
    assert re.findall(r"^```{source-terms} (\w+)$", page, re.MULTILINE) == list(SOURCES)
    assert "```{literalinclude} ../sources.toml" in page
