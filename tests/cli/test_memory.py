"""A file that is larger than memory is streamed, in every format."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.written import WRITERS
from processes import quick_environment

CLASSES = 1000
MB = 2**20

# In a process of its own, which has written none of the files.
SCRIPT = """
import ctypes, json, sys, threading, time
from pathlib import Path
import pyarrow
import torchcalib.cli.report, torchcalib.io.tables
from torchcalib.cli import main

MB = 2**20
torchcalib.cli.report.PIECE_BYTES = MB // 2
torchcalib.io.tables._BLOCK = MB // 16  # a row must fit in; arrow reads some thirty of them ahead

def resident():
    # of memory that is no mapped file, which the system takes back as it likes
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))

def in_use():
    # without what allocators keep of files that were read before, which would hide as much of the next one
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
    peak_of(files)  # what is imported and compiled
print(json.dumps({name: peak_of(files) for name, files in many.items()}), file=sys.stderr)
"""


FORMATS = ("npy", "npz", "pt", "safetensors", "csv", "parquet")


def write(folder, n):
    """Write logits that are all 0 in every format, and return the files of each."""
    folder.mkdir()
    arrays = {"logits": np.zeros((n, CLASSES), np.float32), "targets": np.arange(n) % CLASSES}
    few = CLASSES // 3  # in text, where a number takes as much as in binary
    for suffix in FORMATS[1:]:
        some = {"logits": arrays["logits"][:, :few], "targets": np.arange(n) % few} if suffix == "csv" else arrays
        WRITERS[suffix](folder / f"a.{suffix}", some)
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    files = {suffix: [str(folder / f"a.{suffix}")] for suffix in FORMATS}
    return files | {"npy": [str(folder / f"{name}.npy") for name in arrays]}


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read in the way of Linux")
@pytest.mark.extended
def test_a_file_takes_far_less_memory_than_it_is_large(tmp_path):
    """Pieces are made small, and files with them, so that this takes seconds: a file of any size takes as much."""
    megabytes = 96
    files = write(tmp_path / "few", 250), write(tmp_path / "many", megabytes * MB // (4 * CLASSES))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(files)],
        # Large blocks go back to the system as soon as they are freed: what the allocator keeps of them differs from
        # run to run by as much as is looked for.
        env=quick_environment(MALLOC_MMAP_THRESHOLD_=str(MB // 16)),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    peaks = {name: peak / MB for name, peak in json.loads(done.stderr).items()}
    sizes = dict.fromkeys(FORMATS, megabytes) | {"csv": os.path.getsize(files[1]["csv"][0]) / MB}  # noqa: PTH202
    assert sizes["csv"] > megabytes / 4
    too_much = {name: (peaks[name], sizes[name]) for name in FORMATS if not 0 < peaks[name] < sizes[name] / 3}
    assert not too_much
