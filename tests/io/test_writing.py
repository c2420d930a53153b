"""Files are written completely or not at all, and only where a file may be. Hostile files are no calibrators."""

import os
from pathlib import Path

import pytest
from helpers.hostile_files import Corpus, add_pt
from processes import SCRIPTS, run_together

from torchcalib.calibration import load_calibrator
from torchcalib.io.writing import write_all


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_full_disk_leaves_all_files_of_a_folder_as_they_were(tmp_path, monkeypatch, failing):
    old = {name: f"old {name}".encode() for name in ("a.html", "a.json")}
    write_all(tmp_path, old)
    write_bytes, calls = Path.write_bytes, []

    def written(path, content):
        calls.append(path)
        write_bytes(path, content[:2] if len(calls) == failing else content)
        if len(calls) == failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", written)
    with pytest.raises(OSError, match="No space left on device: ") as error:
        write_all(tmp_path, dict.fromkeys((*old, "a.svg"), b"new"))
    assert error.value.filename == str(tmp_path / ("a.html", "a.json", "a.svg")[failing - 1])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


def test_no_hostile_file_is_loaded_as_a_calibrator(tmp_path):
    corpus = Corpus(tmp_path, is_long=False)
    add_pt(corpus)
    files = {case.arguments[1] for case in corpus.cases}
    assert len(files) > 20
    for file in files:
        with pytest.raises(ValueError, match="must be a complete calibrator, got"):
            load_calibrator(file)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="limits of file sizes need POSIX")
def test_killed_writers_leave_the_old_file_and_resumed_runs_give_the_uninterrupted_report(tmp_path):
    codes, output = run_together([[SCRIPTS / "killed_writers.py", tmp_path]])
    assert codes == [0], output
