"""p-values hold for one look at the data: docstrings of tests, gates and monitors, and their output, say so."""

import inspect
from dataclasses import replace
from pkgutil import resolve_name

import pytest
import torch

import torchcalib as tc
from torchcalib.display.words import ONE_LOOK
from torchcalib.reporting.render import terminal
from torchcalib.reporting.render.html import render
from torchcalib.results.history import History, HistoryRow
from torchcalib.testing import assert_calibrated

TESTS = (
    "ECE.test",
    "KS.test",
    "TCE.test",
    "SKCE.test",
    "Cox.test",
    "Spiegelhalter.test",
    "Clustered.test",
    "ByGroup.test",
    "ByGroup.worst",
    "calibration_test",
    "compare",
    "functional.spiegelhalter",
    "functional.tce",
    "inference.CalibrationTest",
    "inference.skce_test",
    "integrations.CalibrationMonitor",
    "Monitor",
    "results.Difference",
    "results.Line",
    "testing.assert_calibrated",
)


@pytest.mark.parametrize("name", TESTS)
def test_docstrings_of_tests_gates_and_monitors_name_the_one_look(name):
    module, _, attribute = name.rpartition(".") if name.split(".")[0].islower() else ("", "", name)
    place = f"torchcalib.{module}:{attribute}" if module else f"torchcalib:{attribute}"
    assert "one look at the data" in " ".join((inspect.getdoc(resolve_name(place)) or "").split())


@pytest.fixture(scope="module")
def report():
    p = torch.rand(300, generator=torch.Generator().manual_seed(0))
    y = torch.bernoulli(p.square(), generator=torch.Generator().manual_seed(1))
    history = History().with_row(HistoryRow(1, 1, {"nll": 0.9})).with_row(HistoryRow(2, 2, {"nll": 0.7}))
    return replace(tc.report(p, y, with_calibration=False, with_intervals=False), history=history)


def test_pages_with_p_values_and_with_a_training_history_name_the_one_look(report):
    page = render(report)
    assert page.count(ONE_LOOK) == 2, "explanation of p-values, and training history"


def test_terminal_output_with_all_p_values_names_the_one_look(report, capsys):
    terminal.show(report, True)
    assert ONE_LOOK in " ".join(capsys.readouterr().out.split())


def test_failures_of_the_gate_and_comparisons_name_the_one_look():
    p = torch.rand(500, generator=torch.Generator().manual_seed(0))
    y = torch.bernoulli(p, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match=ONE_LOOK):
        assert_calibrated(p.square(), y)
    assert ONE_LOOK in tc.compare({"a": p, "b": p.square()}, y, n_replicates=39).caution
