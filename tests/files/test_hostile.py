"""Files made to take all memory or time are refused."""

import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from processes import quick_environment

import torchcalib as tc
from torchcalib.report import ReportBuilder

CHILD = """
import os, resource, signal, sys, json
import pyarrow.csv, pyarrow.parquet, safetensors, torch
import torchcalib.html, torchcalib.terminal, torchcalib.files.tables, torchcalib.files.npy
from torchcalib.cli import main
torch.set_num_threads(1)
for arguments in json.loads(sys.stdin.read()):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        limit = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + 3 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os.dup2(1, 2)
        os._exit(main(["report", *arguments, "--no-intervals", "--no-calibration"]))
    status = os.waitpid(pid, 0)[1]
    print("STATUS", status, flush=True)
"""


def npy_header(shape, dtype="<f4", fortran=False):
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def packed(path, **members):
    """An archive with members of zeros, given their first bytes and how many zeros follow."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (start, zeros) in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(start)
                for begin in range(0, zeros, 2**24):
                    member.write(b"\0" * min(2**24, zeros - begin))
    return [str(path)]


def write(path, content):
    path.write_bytes(content)
    return [str(path)]


def safetensors_of(header, tail=b""):
    return struct.pack("<Q", len(header)) + header + tail


def made_fifo(path):
    os.mkfifo(path)
    return [str(path)]


def linked(path, to):
    path.symlink_to(to)
    return [str(path)]


def too_large(f):
    """Hostile files, and what must be said of each."""
    labels = (npy_header((1,), "<i8"), 8)
    long = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1)
    yield (
        packed(f / "lie.npz", logits=(npy_header((10**13,)), 8), targets=(npy_header((10**13,), "<i8"), 8)),
        "promised",
    )
    yield packed(f / "negative.npz", logits=(npy_header((-4, 2)), 8), targets=labels), "promised"
    yield packed(f / "overflow.npz", logits=(npy_header((2**62, 8)), 0), targets=labels), "promised"
    yield packed(f / "width.npz", logits=(npy_header((1,), "<U900000000"), 0), targets=labels), "must be a complete"
    yield packed(f / "void.npz", logits=(npy_header((1,), "|V8"), 8), targets=labels), "floating-point predictions"
    yield (
        packed(f / "head.npz", logits=(long, 10**7), targets=labels),
        "a header of 4,294,967,295 bytes is too long",
    )
    yield (
        packed(f / "row.npz", logits=(npy_header((1, 2 * 10**7)), 8 * 10**7), targets=labels),
        ("must have at most 2,354,696 classes with 15 bins, got 20,000,000"),
    )
    votes = (npy_header((1, 2 * 10**7), "<i8"), 16 * 10**7)
    labelled = packed(f / "labels.npz", probs=(npy_header((1, 2 * 10**7)), 8 * 10**7), targets=votes)
    yield [*labelled, "--task", "multilabel"], "must have at most"
    yield (
        write(f / "length.safetensors", struct.pack("<Q", 10**18) + b"{}"),
        "header of 1,000,000,000,000,000,000 bytes",
    )
    yield write(f / "json.safetensors", safetensors_of(b'{"a": ' + b" " * 2**25 + b"1}")), "is too long"
    yield write(f / "deep.safetensors", safetensors_of(b'{"a":' + b"[" * 10**6)), "must be a complete"
    shape = json.dumps({"logits": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]}}).encode()
    yield write(f / "shape.safetensors", safetensors_of(shape, b"0" * 8)), "must be a complete"
    yield write(f / "line.csv", b"prob,target\n" + b"1" * 2 * 10**7), "must be a complete"
    yield write(f / "head.csv", b"a" * 2 * 10**7 + b"\n1\n"), "must be a complete"
    names, numbers = ",".join(f"p{k}" for k in range(2 * 10**5)), ",".join("0" for _ in range(2 * 10**5))
    yield write(f / "columns.csv", f"{names}\n{numbers}\n".encode()), "at most 131,072 arrays or columns, got 200,000"
    yield made_fifo(f / "pipe.npz"), "must be a file, got a pipe or device"
    yield made_fifo(f / "pipe.csv"), "must be a file, got a pipe or device"
    for suffix in ("npz", "csv", "pt", "parquet", "safetensors"):
        yield linked(f / f"zero.{suffix}", "/dev/zero"), "must be a file, got a pipe or device"
    rows = 10**9
    expanded = {"probs": torch.zeros(1).expand(rows), "targets": torch.zeros(1, dtype=torch.int64).expand(rows)}
    torch.save(expanded, f / "expanded.pt")
    yield [str(f / "expanded.pt")], "more numbers than the file holds"
    torch.save({"probs": torch.zeros(100), "targets": torch.zeros(100).long()}, f / "plain.pt")
    with zipfile.ZipFile(f / "plain.pt") as plain, zipfile.ZipFile(f / "packed.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for info in plain.infolist():
            content = plain.read(info.filename)
            bomb.writestr(info.filename, content + b"\0" * 10**8 if info.filename.endswith("data.pkl") else content)
    yield [str(f / "packed.pt")], "is compressed, which torch.save never does"
    old = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({}, 2)
    yield write(f / "old.pt", old + b"\x80\x02" + b"(" * 10**4), "must"
    a = f / "nan.npz"
    np.savez(a, logits=np.array([0x7FC12345, 0x7F812345], np.uint32).view(np.float32), targets=np.array([0, 1]))
    yield [str(a)], "must not hold NaN"


@pytest.mark.extended
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
def test_hostile_files_are_errors_before_memory_or_time_is_gone(tmp_path):
    """Every file is read in a process that may take 3 GiB more than it has, and 100 seconds."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("safetensors")
    cases = list(too_large(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps([arguments for arguments, _ in cases]), text=True,
        env=quick_environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("STATUS")
    wrong = {}
    for (arguments, words), before, after in zip(cases, said, said[1:], strict=False):
        line = before.partition("\n")[2] if before[:1] == " " else before
        status = int(after.split()[0])
        if status != 2 << 8 or words not in line or line.count("\n") != 1 or "torchcalib: error: " not in line:
            wrong[Path(arguments[0]).name] = (status, line[:300])
    assert len(said) == len(cases) + 1
    assert wrong == {}


@pytest.mark.parametrize(("task", "width"), [("multiclass", 10**9), ("multilabel", 10**9)])
def test_a_report_and_a_comparison_of_a_billion_classes_are_refused_before_sums_are_made(task, width):
    row = torch.zeros(1, dtype=torch.float16).expand(1, width)  # two bytes
    target = torch.zeros(1, dtype=torch.int64) if task == "multiclass" else torch.zeros(1).long().expand(1, width)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        ReportBuilder(task=task, from_logits=True).update(row, target)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        tc.compare({"a": row, "b": row}, target, task=task, from_logits=True)
