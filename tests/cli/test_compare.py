"""`torchcalib compare`: files of any format and size, names of systems, and one-line errors."""

import json

import numpy as np
import pytest
import torch
from helpers.systems import systems

import torchcalib as tc
from torchcalib.cli import main


def saved(path, task="multiclass", **changes):
    """Write predictions and targets of a system, and return those of all systems."""
    logits, target = systems(task, 90)
    np.savez(path, **{"logits": logits["calibrated"].numpy(), "targets": target.numpy(), **changes})
    return logits, target


def test_compare_accepts_systems_in_different_formats_and_shards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    logits, target = saved("a.npz")
    torch.save({"probs": logits["sure"].softmax(-1).float(), "labels": target.int()}, "b.pt")
    (tmp_path / "shards").mkdir()
    for k, piece in enumerate((slice(0, 33), slice(33, 33), slice(33, 90))):
        np.savez(f"shards/{k}.npz", logits=logits["noisy"][piece].numpy(), y=target[piece].numpy())
    np.save("preds.npy", logits["calibrated"].numpy())
    np.save("target.npy", target.numpy())
    monkeypatch.setattr("torchcalib.cli.compare.PIECE_BYTES", 700)
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)  # fewer replicates are faster
    assert main(["compare", "a.npz", "too [red]sure=b.pt", "shards/*.npz", "--out", "out"]) == 0
    assert "too [red]sure is worse calibrated than a: its ECE is higher by 0.178" in capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["systems"] == ["a", "too [red]sure", "shards"]
    assert content["settings"]["from_logits"] == {"a": True, "too [red]sure": False, "shards": True}
    expected = tc.compare(logits, target, task="multiclass", from_logits=True)
    for line in content["lines"]:
        found, interval = expected[line["key"]], line["differences"]["shards"]["interval"]
        assert line["values"]["a"] == pytest.approx(found.values["calibrated"], abs=1e-12)
        assert line["values"]["shards"] == pytest.approx(found.values["noisy"], abs=1e-12)
        if found.differences["noisy"].interval is not None:
            assert interval["low"] == pytest.approx(found.differences["noisy"].interval.low, abs=1e-12)
    names = {f"compare.{end}" for end in ("html", "json", "png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert "too [red]sure compared with a" in (tmp_path / "out" / "compare.html").read_text()
    assert main(["compare", "a.npz", "pair=preds.npy,target.npy", "--from-logits", "--preds", "logits"]) == 2
    assert "--preds` must name an array in" in capsys.readouterr().err


TARGETS = systems("multiclass", 90)[1].numpy()
LOGITS = systems("multiclass", 90)[0]["sure"].numpy()
UNLIKE = {  # changes of the second file, by part of the error message
    f"must have the same targets, got {TARGETS[41]} in `a` and {3 - TARGETS[41]} in `b` in row 42, the first that": {
        "targets": np.where(np.arange(90) == 41, 3 - TARGETS, TARGETS)
    },
    "the same number of rows, got 90 in `a` and 80 in `b`": {"logits": LOGITS[:80], "targets": TARGETS[:80]},
    "the same shape of a row of predictions, got (4,)": {"logits": LOGITS[:, :3], "targets": TARGETS % 3},
    "got none in `a` and some in `b`": {"weights": np.ones(90)},
    "the same task, got multiclass in `a` and binary in": {"logits": LOGITS[:, 0], "targets": TARGETS % 2},
    "in rows 1 to 90: system 'b'": {"logits": LOGITS * np.nan},
}


def test_repeated_names_and_incompatible_systems_give_one_line_errors(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        saved(f"{folder}/a.npz", "binary")
    saved("x/a=1.npz", "binary")
    assert main(["compare", "x/a.npz", "y/a.npz", "x/a=1.npz", "--nan-policy", "drop", "--all"]) == 0
    shown = capsys.readouterr().out
    assert "y/a compared with x/a" in shown
    assert "a=1 compared with x/a" in shown
    saved("a.npz")
    saved("b.npz", logits=LOGITS)
    wrong = [
        (["x/a.npz"], "There must be at least two systems"),
        (["b=x/a.npz", "b=y/a.npz"], "must have different names, got `b` twice"),
        (["x/a.npz", "x/a.npz"], "must have different names"),
        (["x/a.npz", "=y/a.npz"], "must be NAME=FILES with a name"),
        (["x/a.npz", "b=y/*.csv"], "`y/*.csv` must match at least one file, got none"),
        (["a.npz", "b.npz", "--out", ""], "`--out` must be a folder"),
    ]
    for arguments, words in [*wrong, *((["a.npz", "b.npz"], words) for words in UNLIKE)]:
        if words in UNLIKE:
            saved("b.npz", **{"logits": LOGITS, **UNLIKE[words]})
        assert main(["compare", *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
