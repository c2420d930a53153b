"""`torchcalib demo`: training beyond over-confidence, the training curve, and the report of the last epoch."""

import json
from functools import partial

import pytest
from helpers.reports import QUICK, QUICK_COMMAND

from torchcalib.cli import main
from torchcalib.display.words import significant
from torchcalib.reporting.building import ReportBuilder


def test_demo_prints_every_epoch_and_writes_a_report_of_the_last(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torchcalib.cli.demo.ReportBuilder", partial(ReportBuilder, **QUICK))
    assert main(["demo", "--out", str(tmp_path), "--epochs", "3", "--diagrams"]) == 0
    shown = capsys.readouterr().out
    rows = [line.split() for line in shown.splitlines() if line.split()[:1] and line.split()[0].isdigit()][:3]
    written = {path.name for path in tmp_path.iterdir()}
    assert {"report.html", "report.json", "predictions.npz", "training.png", "training.svg"} <= written
    report = json.loads((tmp_path / "report.json").read_text())
    history = report["history"]["rows"]
    assert [int(row[0]) for row in rows] == [row["epoch"] for row in history] == [1, 2, 3]
    for column, name in ((2, "accuracy"), (6, "ecd")):
        printed = [float(row[column]) for row in rows]
        assert printed == pytest.approx([row["values"][name] for row in history], abs=1e-3)
    value = next(line["value"] for line in report["lines"] if line["key"] == "ecd")
    assert history[-1]["values"]["ecd"] == pytest.approx(value, abs=1e-12), "the curve ends at the epoch of the report"
    assert "Training history" in (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path / "predictions.npz"), "--all", *QUICK_COMMAND]) == 0
    assert significant(value).replace("−", "-") in capsys.readouterr().out
