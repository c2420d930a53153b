"""`torchcalib report --save-calibrator`: recommended calibrator, complete files, and one-line errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fits import fresh
from helpers.reports import TASKS, calibrated_report, realistic

from torchcalib.calibration import load_calibrator
from torchcalib.cli import main
from torchcalib.reporting import buffer
from torchcalib.reporting.building import ReportBuilder


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Return a function that writes `a.npz` to an empty working directory, and returns predictions and targets."""
    monkeypatch.chdir(tmp_path)

    def save(task="binary", **given):
        preds, target = realistic(task, **given)
        np.savez("a.npz", logits=preds.numpy(), targets=target.numpy())
        return preds, target

    return save


def failing(capsys, *arguments):
    """Run a command that fails, and return its single line of output."""
    assert main(["report", "--no-intervals", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    return line.removeprefix("torchcalib: error: ")


@pytest.mark.parametrize("task", TASKS)
def test_recommended_calibrator_is_saved(task, saved, capsys):
    preds, target = saved(task)
    assert main(["report", "a.npz", "--task", task, "--no-intervals", "--save-calibrator", "cal [1].pt"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    report = calibrated_report(task)
    assert report.decision.action in shown
    assert f"saved {report.recommendation.best}, as advised: cal [1].pt" in shown
    expected = fresh(report.calibration.calibrator).fit(preds, target, task=task, from_logits=True)
    torch.testing.assert_close(load_calibrator("cal [1].pt")(preds), expected(preds), rtol=1e-9, atol=1e-9)


def test_no_calibrator_is_saved_if_none_is_recommended(saved, capsys):
    saved("multiclass", scale=1, n=1000)
    assert main(["report", "a.npz", "--no-intervals", "--save-calibrator", "cal.pt"]) == 0
    assert not Path("cal.pt").exists()
    printed = capsys.readouterr()
    assert "no calibrator is saved to `cal.pt`, because none is recommended for this data." in printed.err
    assert "saved" not in printed.out


def test_paths_that_cannot_be_written_give_an_error(saved, capsys, monkeypatch):
    saved()
    before = Path("a.npz").read_bytes()
    for place, words in (
        (".", "must be a file, got the folder"),
        ("a.npz/cal.pt", "must be in a folder that exists"),
        ("a.npz", "must not be an input file"),
    ):
        error = failing(capsys, "a.npz", "--out", "out", "--save-calibrator", place)
        assert error.startswith(f"`--save-calibrator` {words}"), error
    both = ("--save-calibrator", "both.pt", "--save-state", "out/../both.pt")
    error = failing(capsys, "a.npz", "--out", "out", *both)
    assert error.startswith("`--save-state` must not be the file of `--save-calibrator`"), error
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "can be written to" in failing(capsys, "a.npz", "--save-calibrator", "cal.pt")
    assert Path("a.npz").read_bytes() == before
    assert sorted(map(str, Path().rglob("*"))) == ["a.npz", "out"]


def test_data_without_folds_or_with_too_many_samples_give_an_early_error(saved, capsys, monkeypatch):
    saved()
    with monkeypatch.context() as patch:
        patch.setattr(buffer, "MAX_SAMPLES", 100)
        patch.setattr("torchcalib.cli.report.PIECE_BYTES", 400)
        patch.setattr(ReportBuilder, "report", lambda *_, **__: pytest.fail("it went on"))
        error = failing(capsys, "a.npz", "--save-calibrator", "cal.pt")
    assert error.startswith(
        "`--save-calibrator` must be used with data to which calibrators can be fitted, got unsuitable data"
    )
    assert "are more than 100 samples" in error
    np.savez("a.npz", probs=np.array([0.2, 0.9, 0.5]), targets=np.array([1, 1, 1]))
    error = failing(capsys, "a.npz", "--out", "out", "--save-calibrator", "cal.pt")
    assert "All targets are class 1" in error
    assert sorted(map(str, Path().rglob("*"))) == ["a.npz", "out"]
