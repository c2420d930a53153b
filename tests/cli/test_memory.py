"""Files of every format are streamed, and may be larger than the memory."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.prediction_files import WRITERS
from processes import quick_environment

CLASSES = 1000
MB = 2**20

# This script runs in a separate process, whose memory does not include the writing of the files.
SCRIPT = """
import ctypes, json, sys, threading, time
from pathlib import Path
import pyarrow
import torchcalib.cli.report, torchcalib.io.opening, torchcalib.io.tables
from torchcalib.cli import main

MB = 2**20
torchcalib.cli.report.PIECE_BYTES = torchcalib.io.opening.PIECE_BYTES = MB // 2
torchcalib.io.tables._BLOCK = MB // 16  # must contain a row; arrow reads about thirty blocks ahead

def resident():
    # Mapped files do not count, because the system can free their memory.
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))

def in_use():
    # Allocators keep memory of earlier files, which would hide memory of the next one.
    ctypes.CDLL(None).malloc_trim(0)
    pyarrow.default_memory_pool().release_unused()
    return resident()

def peak_of(files):
    before = in_use()
    peak, done = [0], threading.Event()
    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        assert main(["report", *files, "--no-calibration", "--no-intervals"]) == 0
    finally:
        done.set()
        watcher.join()
    return peak[0] - before

few, many = json.loads(sys.argv[1])
for files in few.values():
    peak_of(files)  # imports and compilation
print(json.dumps({name: peak_of(files) for name, files in many.items()}), file=sys.stderr)
"""


FORMATS = ("npy", "npz", "pt", "safetensors", "csv", "jsonl", "parquet")


def write(folder, n):
    """Write logits of 0 in every format, and return the files of each format."""
    folder.mkdir()
    arrays = {"logits": np.zeros((n, CLASSES), np.float32), "targets": np.arange(n) % CLASSES}
    few = CLASSES // 2  # a number takes more bytes as decimal text than in binary
    for suffix in FORMATS[1:]:
        some = (
            {"logits": arrays["logits"][:, :few], "targets": np.arange(n) % few}
            if suffix in ("csv", "jsonl")
            else arrays
        )
        # Lists of equal numbers would be refused: their decoded size is a million times their compressed size.
        options = {"compression": "none", "use_dictionary": False} if suffix == "parquet" else {}
        WRITERS[suffix](folder / f"a.{suffix}", some, **options)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    files = {suffix: [str(folder / f"a.{suffix}")] for suffix in FORMATS}
    return files | {"npy": [str(folder / f"{name}.npy") for name in arrays]}


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read in the way of Linux")
@pytest.mark.extended
def test_memory_is_far_smaller_than_the_file(tmp_path):
    """Small pieces allow small test files, because the memory does not depend on the size of the file."""
    megabytes = 96
    files = write(tmp_path / "few", 250), write(tmp_path / "many", megabytes * MB // (4 * CLASSES))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(files)],
        # Return freed blocks to the system at once. Otherwise the memory retained by the allocator varies too much.
        # The first files load numba, which takes 40 MB.
        env=quick_environment(MALLOC_MMAP_THRESHOLD_=str(MB // 16), TORCHCALIB_NUMBA="always"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = {name: peak / MB for name, peak in json.loads(done.stderr).items()}
    sizes = dict.fromkeys(FORMATS, megabytes) | {"csv": os.path.getsize(files[1]["csv"][0]) / MB}  # noqa: PTH202
    assert sizes["csv"] > megabytes / 4
    too_much = {name: (peaks[name], sizes[name]) for name in FORMATS if not 0 < peaks[name] < sizes[name] / 3}
    assert not too_much
