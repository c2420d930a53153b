"""A history goes through checkpoints, and to the page and the JSON of a report."""

import math
from dataclasses import replace

import pytest
from helpers.reports import quick
from helpers.trainings import epochs_of

import torchcalib as tc
from torchcalib import terminal
from torchcalib.monitoring import History, HistoryRow


def test_history_goes_through_a_checkpoint_and_a_training_that_goes_back():
    monitor, _ = epochs_of([0.2, 1.1, 2.5])
    again = tc.Monitor(task="binary", from_logits=True)
    again.load_state_dict(monitor.state_dict())
    assert again.history == monitor.history
    back = monitor.history.with_row(HistoryRow(2, 2, {"nll": 0.1}))
    assert [row.epoch for row in back.rows] == [1, 2], "what was seen after it is of another model"
    assert back.column("ece")[-1:] != back.column("nll")[-1:] == (0.1,)
    assert back.best.epoch == 2
    with pytest.raises(ValueError, match="must be a history of version 1, got 2"):
        History.from_dict({**monitor.state_dict(), "version": 2})


def test_a_report_carries_the_history_to_its_page_and_its_json_and_its_warnings_are_shown(tmp_path, capsys):
    bad = {"nll": math.inf, "ecd": math.nan, "<b>": 0.25}
    history = History((HistoryRow(1, 1, {"nll": 0.5}), HistoryRow(2, 2, bad, "words <script>")))
    report = replace(quick("multiclass"), tables={}, tests={}, history=history)
    assert quick("multiclass").to_dict()["history"] is None
    assert report.to_dict()["history"]["rows"][1]["values"] == {"nll": "inf", "ecd": "nan", "<b>": 0.25}
    files = {path.name: path for path in tc.save_report(report, tmp_path)}
    assert {"training.png", "training.svg"} <= set(files)
    page = files["report.html"].read_text()
    assert "Words &lt;script&gt;" in page
    assert "&lt;b&gt;" in page
    assert "<script>" not in page
    terminal.show_warnings(history)
    assert "words <script>" in capsys.readouterr().out.lower()
