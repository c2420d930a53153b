"""`torchcalib compare`: files of any format and size, systems by their names, and errors of one line."""

import json

import numpy as np
import pytest
import torch
from helpers.systems import systems

import torchcalib as tc
from torchcalib.cli import main


def saved(folder, task="multiclass", n=90):
    logits, target = systems(task, n)
    np.savez(folder / "a.npz", logits=logits["calibrated"].numpy(), targets=target.numpy())
    return logits, target


def test_it_takes_shards_of_other_formats_and_sizes(tmp_path, monkeypatch, capsys):
    logits, target = saved(tmp_path)
    torch.save({"probs": logits["sure"].softmax(-1).float(), "labels": target.int()}, tmp_path / "b.pt")
    (tmp_path / "shards").mkdir()
    for k, piece in enumerate((slice(0, 33), slice(33, 33), slice(33, 90))):
        np.savez(tmp_path / "shards" / f"{k}.npz", logits=logits["noisy"][piece].numpy(), y=target[piece].numpy())
    np.save(tmp_path / "preds.npy", logits["calibrated"].numpy())
    np.save(tmp_path / "target.npy", target.numpy())
    monkeypatch.setattr("torchcalib.cli.compare.PIECE_BYTES", 700)
    monkeypatch.setattr("torchcalib.comparison.system.REPLICATES_IN_ORDER", 39)  # fewer, for speed
    named = ["too [red]sure=" + str(tmp_path / "b.pt"), str(tmp_path / "shards" / "*.npz")]
    assert main(["compare", str(tmp_path / "a.npz"), *named, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "too [red]sure is worse calibrated than a" in said
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["systems"] == ["a", "too [red]sure", "shards"]
    expected = tc.compare(logits, target, task="multiclass", from_logits=True)
    for line in content["lines"]:
        found, interval = expected[line["key"]], line["differences"]["shards"]["interval"]
        assert line["values"]["a"] == pytest.approx(found.values["calibrated"], abs=1e-12)
        assert line["values"]["shards"] == pytest.approx(found.values["noisy"], abs=1e-12)
        if found.differences["noisy"].interval is not None:
            assert interval["low"] == pytest.approx(found.differences["noisy"].interval.low, abs=1e-12)
    assert content["settings"]["from_logits"] == {"a": True, "too [red]sure": False, "shards": True}
    names = {f"compare.{end}" for end in ("html", "json", "png", "svg")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert "too [red]sure against a" in (tmp_path / "out" / "compare.html").read_text()
    pair = f"pair={tmp_path / 'preds.npy'},{tmp_path / 'target.npy'}"
    assert main(["compare", str(tmp_path / "a.npz"), pair, "--from-logits", "--preds", "logits"]) == 2
    assert "--preds must name what is in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("write", "arguments", "words"),
    [
        (lambda f, x, t: np.savez(f, logits=x, targets=np.where(np.arange(90) == 41, 3 - t, t)), (),
         "must have the same targets, got {a} in `a` and {b} in `b` in row 42, the first that differs"),
        (lambda f, x, t: np.savez(f, logits=x[:80], targets=t[:80]), (),
         "one number of rows, got 90 in `a` and 80 in `b`"),
        (lambda f, x, t: np.savez(f, logits=x[:, :3], targets=t % 3), (),
         "one shape of a row of predictions, got (4,)"),
        (lambda f, x, t: np.savez(f, logits=x, targets=t, weights=np.ones(90)), (),
         "got none in `a` and some in `b`"),
        (lambda f, x, t: np.savez(f, logits=x[:, 0], targets=t % 2), (),
         "one task, got multiclass in `a` and binary in"),
        (lambda f, x, t: np.savez(f, logits=x * np.nan, targets=t), (), "in rows 1 to 90: system 'b'"),
        (lambda f, x, t: np.savez(f, logits=x, targets=t), ("--out", ""), "`--out` must be a folder"),
    ],
)  # fmt: skip
def test_it_says_what_does_not_fit_in_one_line(write, arguments, words, tmp_path, capsys):
    logits, target = saved(tmp_path)
    t = target.numpy()
    write(tmp_path / "b.npz", logits["sure"].numpy(), t)
    assert main(["compare", str(tmp_path / "a.npz"), str(tmp_path / "b.npz"), *arguments]) == 2
    said = capsys.readouterr().err
    assert words.format(a=t[41], b=3 - t[41]) in said
    assert said.count("\n") == 1


def test_it_gives_every_system_a_name_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torchcalib.comparison.system.REPLICATES_IN_ORDER", 39)
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        saved(tmp_path / folder, "binary")
    (tmp_path / "x" / "a=1.npz").write_bytes((tmp_path / "x" / "a.npz").read_bytes())
    assert main(["compare", "x/a.npz", "y/a.npz", "x/a=1.npz", "--nan-policy", "drop"]) == 0
    said = capsys.readouterr().out
    assert "y/a against x/a" in said
    assert "a=1 against x/a" in said
    for wrong, words in (
        (["x/a.npz"], "Systems must be two at least"),
        (["b=x/a.npz", "b=y/a.npz"], "must have a name each, got `b` twice"),
        (["x/a.npz", "x/a.npz"], "must have a name each"),
        (["x/a.npz", "=y/a.npz"], "must be NAME=FILES with a name"),
        (["x/a.npz", "b=y/*.csv"], "`y/*.csv` must match at least one file, got none"),
    ):
        assert main(["compare", *wrong]) == 2
        assert words in capsys.readouterr().err
