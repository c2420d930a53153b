"""Commands in general: suggestions for unknown ones, `--json`, and the width of the output."""

import json
from functools import partial

import numpy as np
import pytest
from helpers.logs import write_lines
from helpers.reports import QUICK, QUICK_COMMAND, realistic

from torchcalib.cli import main
from torchcalib.cli.parser import COMMANDS, make_parser, metrics
from torchcalib.reporting.building import ReportBuilder
from torchcalib.results.conditions import DEFAULT


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write predictions of two systems to a working directory."""
    monkeypatch.chdir(tmp_path)
    for name, scale in (("a.npz", 2.5), ("b.npz", 1)):
        logits, target = realistic("binary", n=60, scale=scale)
        np.savez(name, logits=logits.numpy(), targets=target.numpy())
    return tmp_path


def test_help_has_the_default_condition():
    assert DEFAULT in " ".join(make_parser().commands["check"].format_help().split())


JSON = {
    "report": (["a.npz", *QUICK_COMMAND], {"lines", "decision"}),
    "metric": (["ece", "a.npz"], {"metric", "value"}),
    "check": (["a.npz", "--fail-if", "ece > 2"], {"passed", "values"}),
    "watch": (["b.npz"], {"log_e", "alarm"}),
    "audit": (["log.jsonl", "--no-calibration"], {"confidences", "sentence"}),
    "plot": (["a.npz"], {"path", "line"}),
    "compare": (["a.npz", "b.npz"], {"lines", "systems"}),
    "calibrate": (["a.npz", "--out", "c.pt", "--calibrator", "temperature scaling"], {"path", "calibrator"}),
    "apply": (["c.pt", "b.npz", "--out", "c.npz"], {"path", "rows"}),
    "merge": (["s.pt", "--all"], {"lines", "decision"}),
    "demo": (["--epochs", "1"], {"lines", "history"}),
}


def test_every_command_prints_json(folder, capsys, monkeypatch):
    assert list(JSON) == list(COMMANDS)
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)
    monkeypatch.setattr("torchcalib.cli.demo.ReportBuilder", partial(ReportBuilder, **QUICK))
    lines = ({"item_id": k, "gold": "ab"[k % 2], "probs": {"a": 0.9 - k / 40, "b": 0.1 + k / 40}} for k in range(20))
    write_lines(folder / "log.jsonl", lines)
    assert main(["report", "a.npz", *QUICK_COMMAND, "--save-state", "s.pt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"state": "s.pt"}
    for command, (arguments, keys) in JSON.items():
        if command == "demo":
            pytest.importorskip("sklearn")
        assert main([command, *arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out).keys() >= keys, command


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 120), ("wide", 120)])
def test_output_to_a_pipe_has_the_width_in_the_environment(columns, width, folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["report", "a.npz", *QUICK_COMMAND]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]  # the first line names the files
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) > width / 2


def test_no_command_prints_the_usage(capsys):
    assert main([]) == 0
    assert "usage: torchcalib" in capsys.readouterr().out


def test_diagrams_are_written_in_the_format_of_the_suffix(folder, capsys):
    pytest.importorskip("matplotlib")
    for name, start in (("r.svg", b"<?xml"), ("r.png", b"\x89PNG"), ("r.pdf", b"%PDF")):
        assert main(["plot", "a.npz", "--out", name, "--mode", "top_label", "--logit"]) == 0
        assert (folder / name).read_bytes().startswith(start)
    assert "wrote r.pdf\nECE 0." in capsys.readouterr().out
    logits, target = realistic("multiclass", n=60)
    np.savez("c.npz", logits=logits.numpy(), targets=target.numpy())
    assert main(["plot", "c.npz", "--mode", "TopK(2)"]) == 0
    assert "\nECE, 2 most probable classes: 0." in capsys.readouterr().out


def test_metrics_are_found_by_name():
    assert {"ece", "brier_score", "smece", "correctness_auroc"} <= metrics().keys()
    assert metrics()["kl_divergence"] == "KLDivergence"


def test_an_unrelated_command_has_no_suggestion(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["unrelated"])
    assert "Did you mean" not in capsys.readouterr().err
