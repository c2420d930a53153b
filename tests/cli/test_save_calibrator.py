"""`torchcalib report --save-calibrator`: the one it recommends, whole or not at all, and errors of one line."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.reports import QUICK_COMMAND, TASKS, calibrated, realistic

import torchcalib as tc
from torchcalib.calibrators import AffineTransform
from torchcalib.cli import main
from torchcalib.report import ReportBuilder, kept
from torchcalib.report import calibration as module


def saved(folder, task="binary", **given):
    """A file, and what is in it."""
    path = folder / "predictions.npz"
    preds, target = realistic(task, **given)
    np.savez(path, logits=preds.numpy(), targets=target.numpy())
    return path, preds, target


@pytest.mark.parametrize("task", TASKS)
def test_it_saves_the_recommended_calibrator(task, tmp_path, capsys):
    path, preds, target = saved(tmp_path, task)
    options = ["--task", task, "--no-intervals", "--save-calibrator", str(tmp_path / "cal [1].pt")]
    assert main(["report", str(path), *options]) == 0
    said = " ".join(capsys.readouterr().out.split())
    report = calibrated(task)
    assert report.recommendation.text in said
    assert f"saved {report.recommendation.best}, as recommended: {tmp_path}/cal [1].pt" in said
    expected = report.calibration.calibrator.fit(preds, target, task=task, from_logits=True)
    loaded = tc.load_calibrator(tmp_path / "cal [1].pt")
    torch.testing.assert_close(loaded(preds), expected(preds), rtol=1e-9, atol=1e-9)


def test_it_saves_dp_calibration_where_none_is_worthwhile(tmp_path, capsys):
    path, *_ = saved(tmp_path, "multiclass", scale=1, n=1000)
    assert main(["report", str(path), "--no-intervals", "--save-calibrator", str(tmp_path / "cal.pt")]) == 0
    assert "saved DP calibration, though no calibrator is worth its trouble here" in capsys.readouterr().out
    assert isinstance(tc.load_calibrator(tmp_path / "cal.pt"), AffineTransform)
    np.savez(path, probs=np.array([0.1, 0.2, 0.7, 0.9]), targets=np.array([0, 0, 1, 1]))  # which fits leave alone
    assert main(["report", str(path), "--no-intervals", "--save-calibrator", str(tmp_path / "cal.pt")]) == 0


def test_it_tries_no_calibrators_if_told_so(tmp_path, capsys, monkeypatch):
    path, *_ = saved(tmp_path)
    monkeypatch.setattr(module, "out_of_fold", lambda *_: pytest.fail("it tried one"))
    assert main(["report", str(path), *QUICK_COMMAND]) == 0
    assert "calibration stage" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        main(["report", str(path), "--no-calibration", "--save-calibrator", str(tmp_path / "cal.pt")])
    assert left.value.code == 2
    assert "not allowed with argument" in capsys.readouterr().err


def failing(arguments, capsys):
    """What a failing command says, which is one line."""
    assert main(["report", "--no-intervals", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line.removeprefix("torchcalib: error: ")


def test_it_refuses_places_that_no_file_can_be_written_to(tmp_path, capsys, monkeypatch):
    path, *_ = saved(tmp_path)
    before = path.read_bytes()
    out = tmp_path / "out"
    for place, words in (
        (tmp_path, "must be a file, got the folder"),
        ("", "must be a file, got the folder"),
        (tmp_path / "no" / "cal.pt", "must be in a folder that exists"),
        (path / "cal.pt", "must be in a folder that exists"),
        (path, "must not be a file that is read"),
    ):
        said = failing([path, "--out", out, "--save-calibrator", place], capsys)
        assert said.startswith(f"`--save-calibrator` {words}"), said
    both = tmp_path / "both.pt"
    said = failing([path, "--out", out, "--save-calibrator", both, "--save-state", out / ".." / "both.pt"], capsys)
    assert said.startswith("`--save-state` must not be the file of `--save-calibrator`"), said
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "can be written to" in failing([path, "--save-calibrator", tmp_path / "cal.pt"], capsys)
    assert list(out.iterdir()) == []
    assert path.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"predictions.npz", "out"}


def test_it_refuses_data_without_folds_and_too_many_before_it_has_read_all(tmp_path, capsys, monkeypatch):
    path, *_ = saved(tmp_path)
    monkeypatch.setattr(kept, "MOST_SAMPLES", 100)
    monkeypatch.setattr("torchcalib.cli.report.PIECE_BYTES", 400)
    monkeypatch.setattr(ReportBuilder, "report", lambda *_, **__: pytest.fail("it went on"))
    said = failing([path, "--save-calibrator", tmp_path / "cal.pt"], capsys)
    assert said.startswith("`--save-calibrator` must be given data that a calibrator can be tried on, got others")
    assert "are more than 100 samples" in said
    monkeypatch.undo()
    np.savez(path, probs=np.array([0.2, 0.9, 0.5]), targets=np.array([0, 1, 1]))
    said = failing([path, "--out", tmp_path / "out", "--save-calibrator", tmp_path / "cal.pt"], capsys)
    assert said.endswith("there is one of class 0.")
    assert not (tmp_path / "cal.pt").exists()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("option", ["--save-calibrator", "--save-state"])
@pytest.mark.parametrize("broken", ["open", "replace"])
def test_it_leaves_nothing_half_saved(option, broken, tmp_path, capsys, monkeypatch):
    path, *_ = saved(tmp_path)
    (tmp_path / "a.pt").write_bytes(b"old")
    original = Path.open

    class Full(io.FileIO):
        def write(self, content):
            super().write(content[:100])
            raise OSError(28, "No space left on device")

    def opened(self, mode="r", *args, **options):
        return Full(self, mode) if "x" in mode else original(self, mode, *args, **options)

    def fail(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, broken, {"open": opened, "replace": fail}[broken])
    said = failing([path, "--out", tmp_path / "out", option, tmp_path / "a.pt"], capsys)
    assert said == "[Errno 28] No space left on device"
    assert (tmp_path / "a.pt").read_bytes() == b"old"
    assert {each.name for each in tmp_path.iterdir()} == {"predictions.npz", "a.pt", "out"}
    assert list((tmp_path / "out").iterdir()) == []
