"""Commands in general: `--json`, width of the output, options in errors; `torchcalib compare` and `demo`."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from helpers.logs import write_lines
from helpers.reports import QUICK, QUICK_COMMAND, realistic
from helpers.systems import systems

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.cli.commands import COMMANDS, metrics
from torchcalib.cli.messages import line_of
from torchcalib.cli.parser import make_parser
from torchcalib.display.words import significant
from torchcalib.io.errors import InputError
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


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Pass preds='NAME' and target='NAME'.", "Pass --preds NAME --target NAME."),
        (
            "Pass task='multilabel', or task='multiclass' (one-hot).",
            "Pass --task multilabel, or --task multiclass (one-hot).",
        ),
        ("Pass from_logits=True or from_logits=False.", "Pass --from-logits or --from-probs."),
        ("pass from_logits=False, normalize=True.", "pass --from-probs --normalize."),
        ("Pass class_names=['World', \"it's\"] if so.", "Pass --class-names World,it's if so."),
        ("with class_names=[...].", "with --class-names."),
        ("class_names=['A', 'B', ...].", "--class-names A,B,...."),
        ("Pass ignore_index=-100, the default.", "Pass --ignore-index -100, the default."),
        ("nan_policy='drop' drops rows.", "--nan-policy drop drops rows."),
        ("Omit from_logits=True for probabilities.", "Pass --from-probs for probabilities."),
        ("`n_bins` must be an int, got 1.5.", "`--n-bins` must be an int, got 1.5."),
        (
            "`other` must have the same arguments, got n_bins=13 instead of n_bins=11.",
            "every part must have the same arguments, got --n-bins 13 instead of --n-bins 11.",
        ),
        (
            "`other` must have groups if this builder has groups. Pass `groups` to `update` of both builders.",
            "every part must have groups if another part has groups. Pass --groups for every part.",
        ),
        (
            "`other` must contain no predictions of this builder. Merge each builder once.",
            "every part must contain no predictions of another part. Merge each part once.",
        ),
        ("Pass average=None, mode='classwise'.", "Pass average=None, mode='classwise'."),
    ],
)
def test_arguments_become_options(message, line):
    assert line_of(ValueError(message)) == line


def test_only_errors_for_files_name_an_option_by_the_name_of_data():
    message = "`preds` must be floats, got `preds`."
    assert line_of(ValueError(message)) == message
    assert line_of(InputError(message)) == "`--preds` must be floats, got `preds`."
    assert line_of(InputError("`preds` in `a.npz` must be floats.")) == "`preds` in `a.npz` must be floats."


# Comparisons


@pytest.fixture
def few_replicates(tmp_path, monkeypatch):
    """Change to an empty working directory, and use few replicates and small pieces of files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcalib.reporting.comparison.reading.PIECE_BYTES", 700)
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)


def saved(path, task="multiclass", **changes):
    """Write predictions and targets of a system, and return those of all systems."""
    logits, target = systems(task, 90)
    np.savez(path, **{"logits": logits["calibrated"].numpy(), "targets": target.numpy(), **changes})
    return logits, target


def test_compare_accepts_systems_in_different_formats_and_shards(tmp_path, few_replicates, capsys):
    logits, target = saved("a.npz")
    torch.save({"probs": logits["sure"].softmax(-1).float(), "labels": target.int()}, "b.pt")
    (tmp_path / "shards").mkdir()
    for k, piece in enumerate((slice(0, 33), slice(33, 33), slice(33, 90))):
        np.savez(f"shards/{k}.npz", logits=logits["noisy"][piece].numpy(), y=target[piece].numpy())
    np.save("preds.npy", logits["calibrated"].numpy())
    np.save("target.npy", target.numpy())
    assert main(["compare", "a.npz", "too [red]sure=b.pt", "shards/*.npz", "--out", "out", "--diagrams"]) == 0
    assert (
        "too [red]sure is worse calibrated than a: the ECE of too [red]sure is higher by 0.178"
        in capsys.readouterr().out
    )
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["systems"] == ["a", "too [red]sure", "shards"]
    assert content["settings"]["from_logits"] == {"a": True, "too [red]sure": False, "shards": True}
    expected = tc.compare(logits, target, task="multiclass", from_logits=True)
    values = {line["key"]: [line["values"][name] for name in ("a", "shards")] for line in content["lines"]}
    for key, line in expected.items():
        assert values[key] == pytest.approx([line.values[name] for name in ("calibrated", "noisy")], abs=1e-12)
    names = {f"compare.{end}" for end in ("html", "json", "png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert "too [red]sure compared with a" in (tmp_path / "out" / "compare.html").read_text()
    assert main(["compare", "a.npz", "pair=preds.npy,target.npy", "--from-logits", "--preds", "logits"]) == 2
    assert "--preds` must name an array in" in capsys.readouterr().err


def test_systems_with_equal_file_names_are_named_by_their_folder(tmp_path, few_replicates, capsys):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        saved(f"{folder}/a.npz", "binary")
    saved("x/a=1.npz", "binary")
    assert main(["compare", "x/a.npz", "y/a.npz", "x/a=1.npz", "--nan-policy", "drop", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "y/a compared with x/a" in shown
    assert "a=1 compared with x/a" in shown


# Demo


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
