"""A file that is larger than memory is streamed, in every format."""

import subprocess
import sys

import pytest

SCRIPT = '''
import sys, threading, time, zipfile
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq, torch
from safetensors.torch import save_file
import torchcalib.cli.report, torchcalib.files.tables
from torchcalib.cli import main

CLASSES = 1000
MB = 2**20

def zeros(path, n):
    """A .npy file whose zeros take no place on the disk."""
    with open(path, "wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (n, CLASSES)}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + 4 * CLASSES * n)

def npy(folder, n):
    zeros(folder / "logits.npy", n)
    np.save(folder / "targets.npy", np.arange(n) % CLASSES)
    return [folder / "logits.npy", folder / "targets.npy"]

def npz(folder, n):
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in npy(folder, n):
            archive.write(path, path.name)
            path.unlink()
    return [folder / "a.npz"]

def arrays(n):
    return {"logits": torch.zeros(n, CLASSES), "targets": torch.arange(n) % CLASSES}

def pt(folder, n):
    torch.save(arrays(n), folder / "a.pt")
    return [folder / "a.pt"]

def safetensors(folder, n):
    save_file(arrays(n), folder / "a.safetensors")
    return [folder / "a.safetensors"]

def parquet(folder, n):
    flat = pa.array(np.zeros(n * CLASSES, np.float32))
    table = {"logits": pa.FixedSizeListArray.from_arrays(flat, CLASSES), "targets": np.arange(n) % CLASSES}
    pq.write_table(pa.table(table), folder / "a.parquet")
    return [folder / "a.parquet"]

def csv(folder, n):
    line = ",".join(["0.0"] * (CLASSES // 10))
    names = ",".join(f"logit_{k}" for k in range(CLASSES // 10))
    with open(folder / "a.csv", "w") as file:
        file.write(f"{names},target\\n")
        file.writelines(f"{line},{k % (CLASSES // 10)}\\n" for k in range(3 * n))
    return [folder / "a.csv"]

def resident():
    """Memory of this process that is no mapped file, which the system takes back as it likes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))

def peak_of(files):
    """The most memory that a report of files takes beside what there was before."""
    before, peak, done = resident(), [0], threading.Event()
    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], resident() - before)
            time.sleep(0.002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    assert main(["report", *map(str, files), "--no-calibration", "--no-intervals"]) == 0
    done.set()
    watcher.join()
    return peak[0]

if __name__ == "__main__":
    folder, megabytes = Path(sys.argv[1]), int(sys.argv[2])
    torchcalib.cli.report.PIECE_BYTES = MB // 2
    torchcalib.files.tables._BLOCK = MB // 16  # a row must fit in; arrow reads some thirty of them ahead
    torch.set_num_threads(1)
    pa.set_cpu_count(2)
    for write in (npz, npy, pt, safetensors, csv, parquet):
        peak_of(write(folder, 250))  # what is imported, compiled and kept by allocators
        files = write(folder, megabytes * MB // (4 * CLASSES))
        size = max(sum(path.stat().st_size for path in files), write in (npz, parquet) and megabytes * MB)
        print(write.__name__, size / MB, peak_of(files) / MB, file=sys.stderr)
        for path in files:
            path.unlink()
'''


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read in the way of Linux")
@pytest.mark.parametrize("megabytes", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_a_file_takes_far_less_memory_than_it_is_large(megabytes, tmp_path):
    """Pieces are made small, and files with them, so that this takes seconds: a file of any size takes as much."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(megabytes)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    found = {name: (float(size), float(peak)) for name, size, peak in map(str.split, done.stderr.splitlines())}
    assert found.keys() == {"npz", "npy", "pt", "safetensors", "csv", "parquet"}
    for name, (size, peak) in found.items():
        assert size >= megabytes * (0.25 if name == "csv" else 1), name
        assert 0 < peak < size / 4, found
    print(found)
