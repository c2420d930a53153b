"""Files that would exhaust memory or time give an error."""

import gzip
import json
import os
import pickle
import re
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
from processes import quick_environment

import torchcalib as tc
from torchcalib.reporting.building import ReportBuilder

CHILD = """
import os, resource, signal, sys, json
import pyarrow.csv, pyarrow.parquet, safetensors, torch
import torchcalib.reporting.html, torchcalib.reporting.terminal, torchcalib.io.tables, torchcalib.io.opening
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
    """Write an archive. Each member has given first bytes, followed by a given number of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, (start, zeros) in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(start)
                for begin in range(0, zeros, 2**24):
                    member.write(b"\0" * min(2**24, zeros - begin))


def safetensors_of(header, tail=b""):
    return struct.pack("<Q", len(header)) + header + tail


def write_hostile(f):
    """Write hostile files, and return a part of the error message for each."""
    numbers, labels = (npy_header((1, 2 * 10**7)), 8 * 10**7), (npy_header((1,), "<i8"), 8)
    shape = json.dumps({"logits": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]}}).encode()
    archives = {  # logits, targets, part of the error message
        "lie": ((npy_header((10**13,)), 8), (npy_header((10**13,), "<i8"), 8), "declared"),
        "overflow": ((npy_header((2**62, 8)), 0), labels, "declared"),
        "width": ((npy_header((1,), "<U900000000"), 0), labels, "must be a complete"),
        "head": (
            (b"\x93NUMPY\x02\x00" + bytes([255] * 4), 10**7),
            labels,
            "the header must have at most 10,000 bytes, got 4,294,967,295",
        ),
        "row": (numbers, labels, "must have at most 2,354,696 classes with 15 bins, got 20,000,000"),
        "labels": (numbers, (npy_header((1, 2 * 10**7), "<i8"), 16 * 10**7), "must have at most"),
    }
    contents = {
        "length.safetensors": (
            struct.pack("<Q", 10**18) + b"{}",
            "header must have at most 16,777,216 bytes, got 1,000,000,000,000,000,000",
        ),
        "json.safetensors": (
            safetensors_of(b'{"a": ' + b" " * 2**25 + b"1}"),
            "the header must have at most 16,777,216 bytes",
        ),
        "shape.safetensors": (safetensors_of(shape, b"0" * 8), "must be a complete"),
        "line.csv": (b"prob,target\n" + b"1" * 2 * 10**7, "must be a complete"),
        "columns.csv": (
            b"%s\n%s\n" % (b",".join(b"p%d" % k for k in range(200_000)), b",".join([b"0"] * 200_000)),
            "at most 131,072 arrays or columns, got 200,000",
        ),
        "old.pt": (
            b"".join(pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {})) + b"\x80\x02" + b"(" * 10**4,
            "must",
        ),
    }
    row = b'{"probs": 0.5, "target": 1}\n'
    contents |= {
        "bomb.csv.gz": (gzip.compress(b"prob,target\n" + b"1" * 2**28), "must be a complete"),
        "header.tsv.gz": (gzip.compress(b"a" * 2**28), "must be a complete"),
        "line.jsonl.gz": (gzip.compress(row + b" " * 2**28), "must have lines of at most 64 MiB"),
        "deep.jsonl": (b'{"probs": ' + b"[" * 10**6 + b"]" * 10**6 + b"}\n", "deeply nested"),
        "keys.jsonl": (b"{%s}\n" % b",".join(b'"p%d": 0' % k for k in range(200_000)), "at most 131,072 arrays"),
        "types.jsonl": (row + b'{"probs": "a", "target": 1}\n', "must be a complete"),
        "half.jsonl": (row + row[:9], "must be a complete"),
    }
    words = {}
    for name, (logits, targets, words[f"{name}.npz"]) in archives.items():
        packed(f / f"{name}.npz", logits=logits, targets=targets)
    for name, (content, words[name]) in contents.items():
        (f / name).write_bytes(content)
    for suffix in ("npz", "csv", "pt", "parquet", "safetensors"):
        os.mkfifo(f / f"pipe.{suffix}")
        (f / f"zero.{suffix}").symlink_to("/dev/zero")
        words |= dict.fromkeys((f"pipe.{suffix}", f"zero.{suffix}"), "must be a file, got a pipe or device")
    rows = 10**9
    expanded = {"probs": torch.zeros(1).expand(rows), "targets": torch.zeros(1, dtype=torch.int64).expand(rows)}
    torch.save(expanded, f / "expanded.pt")
    words["expanded.pt"] = "more numbers than the file stores"
    torch.save({"probs": torch.zeros(100), "targets": torch.zeros(100).long()}, f / "plain.pt")
    with zipfile.ZipFile(f / "plain.pt") as plain, zipfile.ZipFile(f / "packed.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name) + b"\0" * 10**8 * name.endswith("data.pkl"))
    words["packed.pt"] = "must be uncompressed, got the compressed member"
    return words


@pytest.mark.extended
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
def test_hostile_files_give_errors_within_limits_of_memory_and_time(tmp_path):
    """Each file is read in a process that is limited to 3 GiB of additional memory and to 100 seconds."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("safetensors")
    words = write_hostile(tmp_path)
    calls = [[str(tmp_path / name), *["--task", "multilabel"] * (name == "labels.npz")] for name in words]
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(calls), text=True,
        env=quick_environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = re.findall(r"(.*?)STATUS (\d+)\n", done.stdout, flags=re.DOTALL)
    assert len(found) == len(words)
    for (name, part), (output, status) in zip(words.items(), found, strict=True):
        assert int(status) == 2 << 8, (name, output[:300])
        assert re.fullmatch(rf".*torchcalib: error: .*{re.escape(part)}.*\n", output), (name, output[:300])


@pytest.mark.extended
@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_a_billion_classes_give_an_error_before_memory_is_allocated(task):
    row = torch.zeros(1, dtype=torch.float16).expand(1, 10**9)  # an expanded tensor of two bytes
    target = torch.zeros(1, dtype=torch.int64)
    target = target if task == "multiclass" else target.expand(1, 10**9)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        ReportBuilder(task=task, from_logits=True).update(row, target)
    with pytest.raises(ValueError, match=r"must have at most .* with 15 bins, got 1,000,000,000"):
        tc.compare({"a": row, "b": row}, target, task=task, from_logits=True)
