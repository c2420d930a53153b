"""`torchcalib compare`: files of any format and size, and names of systems."""

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
    monkeypatch.setattr("torchcalib.reporting.comparison.reading.PIECE_BYTES", 700)
    monkeypatch.setattr("torchcalib.reporting.comparison.system.RANKED_REPLICATES", 39)  # fewer replicates are faster
    assert main(["compare", "a.npz", "too [red]sure=b.pt", "shards/*.npz", "--out", "out", "--diagrams"]) == 0
    assert "too [red]sure is worse calibrated than a: its ECE is higher by 0.178" in capsys.readouterr().out
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


def test_systems_with_equal_file_names_are_named_by_their_folder(tmp_path, capsys, monkeypatch):
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
