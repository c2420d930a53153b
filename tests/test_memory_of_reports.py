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
        for k in range(10 * n):
            file.write(f"{line},{k % (CLASSES // 10)}\\n")
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

def main_of(kind, folder, megabytes):
    torchcalib.cli.report.PIECE_BYTES = torchcalib.files.tables._BLOCK = MB // 2
    torch.set_num_threads(1)
    pa.set_cpu_count(2)
    write = globals()[kind]
    peak_of(write(folder, 250))  # what is imported, compiled and kept by allocators
    files = write(folder, megabytes * MB // (4 * CLASSES))
    print(peak_of(files) / MB, file=sys.stderr)

if __name__ == "__main__":
    main_of(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
'''


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is read in the way of Linux")
@pytest.mark.parametrize("megabytes", [128, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["npz", "npy", "pt", "safetensors", "csv", "parquet"])
def test_a_file_takes_far_less_memory_than_it_is_large(kind, megabytes, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, str(tmp_path), str(megabytes)],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    print(done.stderr)
