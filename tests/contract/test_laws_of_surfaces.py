"""Laws of surfaces: the same question has the same number and the same words through every surface.

The tables are in surfaces.py. The answers for tensors are those of slow loops; see test_oracles.py and tests/reporting.
"""

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from contract.surfaces import (
    BY_NAME,
    COMPARED,
    COMPARISONS,
    QUESTIONS,
    REPORTS,
    ROWS,
    VALUES,
    WRONG,
    Surface,
    called,
    compared,
    of_arrays,
    of_command,
)
from helpers.pages import words_without_pictures

from torchcalib.cli.messages import line_of
from torchcalib.reporting.comparison.building import ComparisonBuilder
from torchcalib.reporting.render import terminal


@pytest.fixture(autouse=True, scope="module")
def few_replicates():
    """Use few replicates, which are enough to compare results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchcalib.reporting.testing._REPLICATES", (39,) * 4)
        patch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)
        few = partial(ComparisonBuilder, n_replicates=39)
        patch.setattr("torchcalib.cli.compare.ComparisonBuilder", few)
        patch.setattr("torchcalib.cli.report.PIECE_BYTES", 1200)
        patch.setattr("torchcalib.cli.files.PIECE_BYTES", 1200)
        yield


OF_FILES = ("source", "sources", "task_is_inferred", "created")


def numbers_of(answer):
    """Return the values of a report, a comparison or its JSON, without names of files and what depends on them."""
    content = answer if isinstance(answer, dict) else json.loads(answer.to_json())
    return {name: value for name, value in content.items() if name not in OF_FILES}


def words_of(report):
    """Return the words of the terminal, of `str` and of the page."""
    report = replace(report, source={}, task_is_inferred=False)
    with redirect_stdout(io.StringIO()) as shown:
        terminal.show(report, everything=True)
    return [shown.getvalue(), str(report), [word.strip() for word in words_without_pictures(report)]]


def assert_equal(found, expected, rtol=1e-12, where=""):
    """Compare JSON values: text exactly, numbers with a tolerance."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
    if isinstance(expected, dict | list):
        assert len(found) == len(expected), where
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_equal(found[key], expected[key], rtol, f"{where}/{key}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=rtol, abs=rtol, nan_ok=True), where
    else:
        assert found == expected, where


@cache
def report_of(rows):
    report = of_arrays(rows, None)
    return numbers_of(report), words_of(report)


def pairs(asked, surfaces):
    """Return parameters for each question and each surface that can answer it.

    The normal run has as few of them as ask every question and every surface at least once, the diagonals first.
    """
    found = [(i, name) for i, question in enumerate(asked) for name, each in surfaces.items() if each.can(question)]
    place, seen, normal = {name: j for j, name in enumerate(surfaces)}, set(), set()
    for i, name in sorted(found, key=lambda pair: (place[pair[1]] - pair[0]) % len(surfaces)):
        if not {i, name} <= seen:
            normal.add((i, name))
            seen |= {i, name}
    return [
        pytest.param(
            asked[i],
            surfaces[name],
            id=f"{asked[i]}, {name}",
            marks=[pytest.mark.extended] * ((i, name) not in normal),
        )
        for i, name in found
    ]


@pytest.mark.parametrize(("rows", "surface"), pairs(ROWS, REPORTS))
def test_law_reports_of_all_surfaces_have_the_same_numbers_and_words(rows, surface, tmp_path):
    found = surface.ask(rows, tmp_path)
    numbers, words = report_of(rows)
    assert_equal(numbers_of(found), numbers, surface.rtol)
    if not isinstance(found, dict):
        assert words_of(found) == words
    elif surface.ask is of_command:
        assert found["source"].get("clusters") == rows.roles.get("clusters")


NUMBERS_OF_ROWS = r"in rows \d+ to \d+( of `\w+.npz`)?: |\(\d+ of \d+ rows\)"  # depend on the pieces that are read


def refusal_of(surface, rows, folder):
    """Return the message of an error, and whether a command printed it, which names options instead of arguments."""
    with pytest.raises(ValueError, match="must") as raised:
        surface.ask(rows, folder)
    line = str(raised.value).removeprefix("torchcalib: error: ")
    return re.sub(NUMBERS_OF_ROWS, "", line), line != str(raised.value)


@pytest.mark.parametrize(("rows", "surface"), pairs(WRONG, REPORTS))
def test_law_all_surfaces_refuse_wrong_values_with_the_same_words(rows, surface, tmp_path):
    expected, _ = refusal_of(Surface(of_arrays), rows, tmp_path)
    found, is_printed = refusal_of(surface, rows, tmp_path)
    assert found == (line_of(ValueError(expected)) if is_printed else expected)


@cache
def value_of(question):
    return called(question).double()


@pytest.mark.parametrize(("question", "surface"), pairs(QUESTIONS, VALUES))
def test_law_values_of_all_surfaces_are_the_same(question, surface, tmp_path):
    found = torch.as_tensor(surface.ask(question, tmp_path), dtype=torch.float64).detach()
    torch.testing.assert_close(
        found.reshape(value_of(question).shape), value_of(question), rtol=surface.rtol, atol=surface.rtol
    )


@cache
def comparison_of(rows):
    return numbers_of(compared(rows, None))


@pytest.mark.parametrize(("rows", "surface"), pairs(COMPARED, COMPARISONS))
def test_law_comparisons_of_all_surfaces_have_the_same_numbers(rows, surface, tmp_path):
    assert_equal(numbers_of(surface.ask(rows, tmp_path)), comparison_of(rows), surface.rtol)


def test_every_surface_is_asked_in_the_normal_run():
    for asked, surfaces in ((ROWS, REPORTS), (QUESTIONS, VALUES), (COMPARED, COMPARISONS)):
        params = [param.values for param in pairs(asked, surfaces) if not param.marks]
        for place, all_of_them in ((0, asked), (1, surfaces.values())):
            assert [each for each in all_of_them if not any(each is values[place] for values in params)] == []


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "uint16", "uint32", "bool", "float16", "float64"])
@pytest.mark.parametrize("name", ["whole weights", "annotator counts of classes"])
def test_law_commands_read_numbers_of_every_dtype(name, dtype, tmp_path):
    """Weights of every dtype, and annotator counts of whole numbers."""
    column = "weights" if name == "whole weights" else "targets"
    if column == "targets" and np.dtype(dtype).kind not in "iu":
        return
    rows = BY_NAME[name]
    rows = replace(rows, arrays={**rows.arrays, column: rows.arrays[column].astype(dtype)})
    assert_equal(numbers_of(REPORTS["command"].ask(rows, tmp_path)), numbers_of(of_arrays(rows, None)))


def test_rounded_text_has_the_words_of_the_exact_numbers(tmp_path):
    """A float32 column in Parquet, and its shortest decimals in CSV, differ in the 8th digit, and not in any word."""
    rows = BY_NAME["binary"]
    rows = replace(rows, arrays={**rows.arrays, "probs": rows.preds.astype(np.float32)})
    found = [words_of(REPORTS[suffix].ask(rows, tmp_path)) for suffix in ("csv", "parquet")]
    texts = [re.sub(r"[\d.,+-]+", "", f"{shown} {text} {page}") for shown, text, page in found]
    assert texts[0] == texts[1]
