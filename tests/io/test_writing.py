"""Files are written completely or not at all, and only where a file may be. Hostile files are no calibrators."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.hostile_files import Corpus, add_pt
from processes import SCRIPTS, run_together

from torchcalib.calibration import TemperatureScaling, load_calibrator, save_calibrator
from torchcalib.cli import main
from torchcalib.io.writing import check_writable, write_all


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


def special(folder):
    """Return paths that must not be replaced: a folder, a pipe, and links to a pipe and to a device."""
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    for name, target in (("to_pipe", folder / "pipe"), ("to_device", Path("/dev/full"))):
        (folder / name).symlink_to(target)
    return [folder / name for name in ("folder", "pipe", "to_pipe", "to_device")]


def test_folders_pipes_and_devices_are_never_replaced(tmp_path, capsys):
    np.savez(tmp_path / "a.npz", probs=np.linspace(0, 1, 9), y=np.arange(9) % 2)
    for path in special(tmp_path):
        mode = path.lstat().st_mode
        with pytest.raises(OSError, match=r"must be a file, got a (folder|device)"):
            write_all(path.parent, {"new": b"new", path.name: b"new"})
        with pytest.raises(OSError, match=r"must be a file, got a (folder|device)"):
            save_calibrator(TemperatureScaling().fit([0.9, 0.99, 0.3, 0.8], [1, 1, 0, 0]), path)
        for command in ("report", "calibrate"):
            options = ["--out", path] if command == "calibrate" else ["--save-state", path]
            assert main([command, str(tmp_path / "a.npz"), *map(str, options)]) == 2
            assert "must be a file, got the" in capsys.readouterr().err
        assert path.lstat().st_mode == mode
    assert not (tmp_path / "new").exists()
    for name in ("/dev/stdout", "/dev/no_file"):  # behind the link can be a file
        with pytest.raises(OSError, match="must be a file, got a place of the system"):
            check_writable(Path(name))
    if Path("/dev/shm").is_dir():  # a folder in memory for any files
        check_writable(Path("/dev/shm/no_file"))
    assert main(["calibrate", str(tmp_path / "a.npz"), "--out", "/dev/no_file"]) == 2
    assert "must be a file, got the device or pipe '/dev/no_file'" in capsys.readouterr().err


def test_files_in_folders_below_are_written_and_links_are_replaced(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "a.html").write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / "log_1").symlink_to(tmp_path / "outside")
    (out / "a.html").symlink_to(tmp_path / "outside")
    contents = {"a.html": b"1", "log_1/a.html": b"2", "log_2/a.html": b"3"}
    assert [path.read_bytes() for path in write_all(out, contents)] == [b"1", b"2", b"3"]
    assert not (out / "log_1").is_symlink()
    assert (tmp_path / "outside" / "a.html").read_text() == "mine"
    (out / "log_3").write_text("a file")
    with pytest.raises(NotADirectoryError, match=r"`.*log_3` must be a folder, got a file"):
        write_all(out, {"b.html": b"1", "log_3/a.html": b"2"})
    (out / "log_2" / "b.html").mkdir()
    with pytest.raises(OSError, match=r"`.*b\.html` must be a file, got a folder"):
        write_all(out, {"b.html": b"1", "log_2/b.html": b"2"})
    assert not (out / "b.html").exists()


@pytest.mark.extended  # reads millions of pickle operations
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
