"""`torchcalib report`: its output, its files, and one-line errors."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import data_folder
from helpers.reports import QUICK, QUICK_COMMAND
from processes import quick_environment, run_python

import torchcalib as tc
from torchcalib.cli import main
from torchcalib.display.words import significant


def test_report_prints_the_recorded_numbers_of_a_system(recorded, capsys):
    data = recorded("cifar100_resnet20.npz")
    assert main(["report", str(data_folder() / "cifar100_resnet20.npz"), "--all", *QUICK_COMMAND]) == 0
    shown = capsys.readouterr().out
    assert "multiclass, n = 10,000, 100 classes" in shown
    report = tc.report(data["logits"], data["targets"], task="multiclass", from_logits=True, **QUICK)
    assert report["nll"] == pytest.approx(1.2252552509307861, abs=2.5e-6)
    for key, number in (("nll", 1.225255), ("brier", 0.445252), ("ece/top_label", 0.103393), ("accuracy", 0.6883)):
        assert report[key] == pytest.approx(number, abs=2.5e-6), key
        assert significant(report[key]) in shown
    assert (
        main(["report", str(data_folder() / "imagenet_dogs_alexnet.npz"), "--n-bins", "10", "--all", *QUICK_COMMAND])
        == 0
    )
    assert "-0.0109" in capsys.readouterr().out


@pytest.mark.extended
@pytest.mark.parametrize("ending", ["| head -c 1", ">&-", "> /dev/full"])
def test_files_are_written_even_if_printing_fails(ending, tmp_path):
    path, out = tmp_path / "a \x1b[31m.npz", tmp_path / "out"
    np.savez(path, probs=np.array([0.2, 0.9]), targets=np.array([0, 1]), **{"\x1b]0;owned\x07": np.zeros(2)})
    command = f"{sys.executable} -m torchcalib report '{path}' --out '{out}' {' '.join(QUICK_COMMAND)} {ending}"
    done = subprocess.run(["bash", "-c", command], env=quick_environment(), capture_output=True, text=True, check=False)
    assert not [word for word in ("Traceback", "Exception") if word in done.stderr], done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert (out / "report.html").is_file()


def test_version_is_printed_and_reports_run_without_stdout(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"torchcalib {tc.__version__}\n"
    monkeypatch.setattr("sys.stdout", None)
    np.savez(tmp_path / "a.npz", probs=np.array([0.2, 0.9]), targets=np.array([0, 1]))
    assert main(["report", str(tmp_path / "a.npz"), *QUICK_COMMAND]) == 0


AT_EXIT = """
import os, sys, torchcalib.cli

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self, write=os.write):
        write(1, b"collected")

cycle = Cycle()
sys.exit(torchcalib.cli.main(sys.argv[1:]))
"""


def test_nothing_is_left_at_exit_and_stderr_is_empty(tmp_path):
    """Objects that are not collected at exit are leaks, which libraries such as nanobind report on stderr."""
    np.savez(tmp_path / "a.npz", probs=np.array([0.2, 0.9]), targets=np.array([0, 1]))
    done = run_python("-c", AT_EXIT, "report", tmp_path / "a.npz", *QUICK_COMMAND)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("collected")


def test_bad_value_gives_an_error_with_its_rows_and_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torchcalib.cli.report.PIECE_BYTES", 80)
    monkeypatch.chdir(tmp_path)
    probs = np.where(np.arange(50) == 37, 1.5, 0.5)
    for name, rows in (("one.npz", slice(None)), ("a0.npz", slice(0, 25)), ("a1.npz", slice(25, None))):
        np.savez(name, probs=probs[rows], targets=np.zeros(50, np.int64)[rows])
    for files, words in (("one.npz", "in rows 31 to 40: "), ("a*.npz", "in rows 11 to 20 of `a1.npz`: ")):
        assert main(["report", files]) == 2
        assert f"{words}`preds` must be probabilities in [0, 1], got 1.5" in capsys.readouterr().err
