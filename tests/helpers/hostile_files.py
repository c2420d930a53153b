"""Write hostile files: small files that declare, or decode to, far more data than they contain.

`PYTHONPATH=tests python -m helpers.hostile_files FOLDER` writes the corpus, and lists the arguments of the commands.
"""

import gzip
import io
import json
import os
import pickle
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

MB = 2**20


@dataclass(frozen=True)
class Hostile:
    """Arguments of a command, and a part of its error message; None if the file is accepted."""

    arguments: tuple[str, ...]
    error: str | None
    unpacked: int = 0  # size of a log in bytes after decompression, which is larger than that of the file

    @property
    def size(self):
        """Size of the files in bytes."""
        return max(self.unpacked, sum(Path(word).stat().st_size for word in self.arguments if Path(word).is_file()))


class Corpus:
    """Folder with hostile files, and the cases that were added. Slow cases are left out of the short form."""

    def __init__(self, folder, is_long):
        self.folder, self.is_long, self.cases = folder, is_long, []

    def add(self, name, error, *options, files=None, command="report", unpacked=0):
        """Add a case for the file `name`, which has been written, or for several files."""
        paths = [str(self.folder / file) for file in files or [name]]
        self.cases.append(Hostile((command, *paths, *options), error, unpacked))

    def write(self, name, content, error, *options):
        """Write a file, and add its case. A slow case has a function that returns the content."""
        if callable(content) and not self.is_long:
            return
        (self.folder / name).write_bytes(content() if callable(content) else content)
        self.add(name, error, *options)


# npy and npz


def npy_header(shape, dtype="<f4", fortran=False):
    text = f"{{'descr': {dtype!r}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()
    text += b" " * (63 - (10 + len(text)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def array_of_zeros(shape, dtype="<f4", **options):
    """Return the header of an array, and its number of bytes."""
    return npy_header(shape, dtype, **options), int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize


def packed(path, method=zipfile.ZIP_DEFLATED, **members):
    """Write an archive. Each member has given first bytes, followed by a given number of zeros."""
    with zipfile.ZipFile(path, "w", method, compresslevel=1) as archive:
        for name, (start, zeros) in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(start)
                for begin in range(0, zeros, 2**24):
                    member.write(b"\0" * min(2**24, zeros - begin))


def add_npz(corpus):
    folder = corpus.folder
    labels = array_of_zeros((1,), "<i8")
    huge = array_of_zeros((1, 2 * 10**7)), labels
    archives = {  # logits, targets, part of the error message, options
        "lie": ((npy_header((10**13,)), 8), (npy_header((10**13,), "<i8"), 8), "declared"),
        "overflow": ((npy_header((2**62, 8)), 0), labels, "declared"),
        "width": ((npy_header((1,), "<U900000000"), 0), labels, "must be a complete"),
        "head": ((b"\x93NUMPY\x02\x00" + b"\xff" * 4, 10**7), labels, "the header must have at most 10,000 bytes"),
        "nested": ((b"\x93NUMPY\x01\x00\x10\x27" + b"(" * 10_000, 0), labels, "must be a complete"),
        "row": (*huge, "non-empty rows of at most 16,777,216 bytes"),
        "classes": (array_of_zeros((1, 3 * 10**6)), labels, "at most 25,021 classes in"),
        "by_columns": (
            array_of_zeros((10**7, 20), fortran=True), array_of_zeros((10**7,), "<i8"), "must be in C order",
        ),
        "labels": (huge[0], array_of_zeros((1, 2 * 10**7), "<i8"), "non-empty rows", "--task", "multilabel"),
        "many_rows": (array_of_zeros((10**8, 1), "<f2"), array_of_zeros((10**8,), "?"), "at most 2,097,152 samples"),
    }  # fmt: skip
    for name, (logits, targets, error, *options) in archives.items():
        if corpus.is_long or name not in ("by_columns", "many_rows"):
            packed(folder / f"{name}.npz", logits=logits, targets=targets)
            corpus.add(f"{name}.npz", error, *options)
    n = 100_000 if corpus.is_long else 10_000
    for role in ("target", "groups", "clusters"):  # 400 MB of text in 400 kB
        packed(
            folder / f"text_{role}.npz",
            probs=array_of_zeros((n,)), y=array_of_zeros((n,), "<i8"), name=array_of_zeros((n,), "<U1000"),
        )  # fmt: skip
        error = {"clusters": "must contain the cluster of each row, got an empty text", "target": "must contain the"}
        options = ("--target", "name") if role == "target" else (f"--{role}", "name")
        corpus.add(f"text_{role}.npz", error.get(role), *options)
    two = array_of_zeros((2,), "<i8")
    packed(folder / "long.npz", probs=array_of_zeros((2,)), y=two, name=array_of_zeros((2,), "<U2000000"))
    corpus.add("long.npz", "text of at most 1,000 characters", "--groups", "name")
    packed(folder / "wide.npz", probs=array_of_zeros((2,)), y=two, w=array_of_zeros((2, 10**7)))
    corpus.add("wide.npz", "must have non-empty rows", "--weights", "w")
    both = array_of_zeros((2**20, 20), fortran=True), array_of_zeros((2**20, 20), "|b1", fortran=True)
    packed(folder / "fortran.npz", logits=both[0], y=both[1])
    corpus.add("fortran.npz", "bytes in Fortran order, got", "--task", "multiclass")
    arrays = {"logits": array_of_zeros((2 * 10**6,)), "targets": array_of_zeros((2 * 10**6,), "<i8")}
    for method, name in ((zipfile.ZIP_BZIP2, "bzip2.npz"), (zipfile.ZIP_LZMA, "lzma.npz")):
        with zipfile.ZipFile(folder / name, "w", method) as archive:
            for member, (start, zeros) in arrays.items():
                archive.writestr(f"{member}.npy", start + b"\0" * zeros)
        corpus.add(name, "must be uncompressed or deflated")
    corpus.write("many.npz", archive_of_many_members, "the directory must have at most")
    buffer = io.BytesIO()
    np.savez(buffer, probs=np.zeros(9, np.float32), y=np.zeros(9, np.int64))
    corpus.write(
        "comment.npz", buffer.getvalue()[:-2] + b"\x04\x00PK\x05\x06", "complete zip archive without a comment"
    )
    corpus.write("behind.npz", b"PK" * 99 + buffer.getvalue(), "directly before the end record")
    overlapping = io.BytesIO()
    with zipfile.ZipFile(overlapping, "w") as archive:
        archive.writestr("logits.npy", array_of_zeros((MB,))[0] + bytes(4 * MB))
        for k in range(50):
            info = archive.getinfo("logits.npy")
            copied = zipfile.ZipInfo(f"a{k}.npy")
            for field in ("compress_size", "file_size", "CRC", "header_offset", "compress_type"):
                setattr(copied, field, getattr(info, field))
            archive.filelist.append(copied)
    corpus.write("overlap.npz", overlapping.getvalue(), "must not overlap")


def archive_of_many_members():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for k in range(150_000):
            archive.writestr(f"{k:040}.npy", b"")
    return buffer.getvalue()


def add_npy(corpus):
    for name, content in {
        "warnings": npy_header((9,)).replace(b"False", b"1if 1else 1") + bytes(36),
        "cut": npy_header((10**9,)) + bytes(8),
        "version": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f" + bytes(99),
        "objects": npy_header((9,), "|O") + pickle.dumps(["a"] * 9),
        "negative": npy_header((-4, -2)) + bytes(32),
    }.items():
        (corpus.folder / f"{name}.npy").write_bytes(content)
        np.save(corpus.folder / "y.npy", np.zeros(9, np.int64))
        error = "never loaded" if name == "objects" else "must be a complete"
        corpus.add(f"{name}.npy", error, "--preds", name, files=[f"{name}.npy", "y.npy"])


# pt


def pt_of(content, storages=None, method=zipfile.ZIP_STORED, name="a/data.pkl"):
    """Return an archive of torch with a given pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        archive.writestr(name, content)
        archive.writestr("a/version", b"3\n")
        archive.writestr("a/byteorder", b"little")
        for key, values in (storages or {}).items():
            archive.writestr(f"a/data/{key}", values)
    return buffer.getvalue()


def text_op(text):
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def number_op(n):
    return b"\x8a\x08" + struct.pack("<q", n)


ZERO = text_op("0")


def storage_op(n, key=ZERO):
    """Return the operations of a pickle for a storage of n float32 values."""
    return b"(" + text_op("storage") + b"ctorch\nFloatStorage\n" + key + text_op("cpu") + number_op(n) + b"tQ"


def tensor_op(shape, stride, n, offset=0):
    """Return the operations of a pickle that create a tensor in the storage "0" of n values."""
    sizes = b"".join(b"(" + b"".join(map(number_op, part)) + b"t" for part in (shape, stride))
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage_op(n) + number_op(offset) + sizes + b"\x89" + hooks + b"tR"


def doubled(times, start=b")", end=b""):
    """Return a pickle of tuples that are nested and doubled through the memo."""
    steps = b"".join(b"q\x00h\x00\x86" for _ in range(times))
    return start + steps + end


def add_pt(corpus):
    two = b"}(" + text_op("probs") + b"%s" + text_op("y") + b"%s" + b"u."
    plain, expanded = tensor_op((4,), (1,), 4), tensor_op((10**9,), (0,), 4)
    coo = b"ctorch.serialization\n_get_layout\n" + text_op("torch.sparse_coo") + b"\x85R"
    parts = b"(" + tensor_op((1, 10**9), (0, 0), 4) + expanded + b"(" + number_op(4) + b"t\x88t"
    sparse = b"ctorch._utils\n_rebuild_sparse_tensor\n(" + coo + parts + b"tR"
    converted = b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(" + expanded + b"ctorch\nfloat64\n"
    converted += text_op("cpu") + b"\x89tR"
    set_to = b"(" + storage_op(4) + b"K\x00(" + number_op(10**9) + b"t(K\x01ttb"
    collisions = b"".join(b"\x8a\x10" + (k * (2**61 - 1)).to_bytes(16, "little") + b"N" for k in range(1, 300_000))
    values = {"0": bytes(16)}
    for name, content, error in (
        ("tuple_key", b"\x80\x02}" + doubled(26) + b"Ns.", "must contain only tensors"),
        ("doubled", b"\x80\x02}" + text_op("probs") + doubled(40, b"]") + b"s.", "must contain targets"),
        ("beyond", b"\x80\x02" + two % (tensor_op((10**9,), (1,), 4), plain), "must lie within its storage"),
        ("offset", b"\x80\x02" + two % (tensor_op((4,), (1,), 4, 10**9), plain), "must lie within its storage"),
        ("negative", b"\x80\x02" + two % (tensor_op((4,), (-1,), 4), plain), "are not negative"),
        ("storage", b"\x80\x02" + two % (tensor_op((4,), (1,), 10**10), plain), "bytes of the storage 0, got fewer"),
        ("expanded", b"\x80\x02" + two % (expanded, plain), "more numbers than the file stores"),
        ("sparse", b"\x80\x02" + two % (sparse, plain), "must be stored completely"),
        ("converted", b"\x80\x02" + two % (converted, plain), "must be stored completely"),
        ("set_to", b"\x80\x02" + two % (plain + set_to, plain), "the operation BUILD in a wrong place"),
        ("filled", b"\x80\x02" + two % (plain + b"NK\x00s", plain), "the operation SETITEM in a wrong place"),
        ("storage_key", b"\x80\x02" + storage_op(4, doubled(40)) + b".", "the operation BINPERSID in a wrong place"),
        ("axes", b"\x80\x02" + two % (tensor_op((2,) * 10**5, (0,) * 10**5, 4), plain), "at most 64 axes"),
        ("collisions", b"\x80\x02}(" + collisions + b"u.", "must contain only tensors"),
        ("memo", b"\x80\x02}r\xff\xff\xff\x7f.", "must contain predictions"),
        ("marks", b"\x80\x02" + b"(" * 2_000_000 + b".", "at most 1,048,576 pickle operations"),
        ("lists", b"\x80\x02" + b"]" * 2_000_000 + b".", "at most 1,048,576 pickle operations"),
        ("deep", b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", "must contain a dict of tensors"),
        ("call", b"\x80\x02cposix\nsystem\n" + text_op("true") + b"\x85R.", "must contain only tensors"),
        ("quantized", b"\x80\x02ctorch._utils\n_rebuild_qtensor\n)R.", "must contain only tensors"),
        ("set", b"\x80\x02cbuiltins\nset\n" + doubled(26) + b"\x85R.", "must contain only tensors"),
        ("counter", b"\x80\x02ccollections\nCounter\n]" + doubled(26) + b"a\x85R.", "must contain only tensors"),
        ("empty", b"\x80\x02.", "must be a complete"),
        ("protocol", b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f.", "must contain only tensors"),
        ("integer", b"\x80\x02\x8b\xff\xff\xff\x7f.", "must be a complete"),
        ("long", b"\x80\x02}" + text_op("x" * 17 * MB) + b"Ns.", "one pickle of at most 16,777,216 bytes"),
    ):  # fmt: skip
        corpus.write(f"{name}.pt", pt_of(content, values), error)
    one = torch.ones(1)
    for role, values in {"weights": one, "groups": one.long(), "clusters": one.long()}.items():
        expanded = {"probs": torch.zeros(10**6), "y": torch.zeros(10**6, dtype=torch.int64), "w": values.expand(10**6)}
        torch.save(expanded, corpus.folder / f"{role}.pt")
        corpus.add(f"{role}.pt", "more numbers than the file stores", f"--{role}", "w")
    buffer = io.BytesIO()
    torch.save({"probs": torch.zeros(MB), "y": torch.zeros(MB, dtype=torch.int64)}, buffer)
    original = buffer.getvalue()
    with zipfile.ZipFile(io.BytesIO(original)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    deflated = io.BytesIO()
    with zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content * (50 if corpus.is_long and "/data/" in name else 1))
    corpus.write("deflated.pt", deflated.getvalue(), "must be uncompressed")
    corpus.write("appended.pt", deflated.getvalue() + bytes(69_000), "complete zip archive without a comment")
    corpus.write("before.pt", original[:4] + deflated.getvalue(), "directly before the end record")
    # torch uses the position of the directory in the end record; other programs search for it before the end record
    bomb, innocent = deflated.getvalue(), original
    start = int.from_bytes(bomb[-6:-2], "little")
    two_directories = bomb[:-22] + innocent[int.from_bytes(innocent[-6:-2], "little") :][:-22]
    corpus.write(
        "two_directories.pt", two_directories + innocent[-22:-6] + struct.pack("<I", start) + b"\0\0",
        "end records of the archive must be consecutive",
    )  # fmt: skip
    corpus.write("case.pt", pt_of(b"\x80\x02N.", name="a/DATA.PKL")[:-22] + b"x" * 22, "complete zip archive")
    twice = io.BytesIO()
    with zipfile.ZipFile(twice, "w") as archive:
        for name in ("a/data.pkl", "a/DATA.pkl", "a/version"):
            archive.writestr(name, b"\x80\x02}.")
    corpus.write("twice.pt", twice.getvalue(), "differ in more than case")
    old = b"".join(pickle.dumps(x, 2) for x in (0x1950A86A20F9469CFC6C, 1001, {})) + b"\x80\x02" + b"(" * 10**4
    corpus.write("old.pt", old, "must be a complete zip archive")
    for command, error in (("merge", "must be a complete report state"),):
        for name in ("tuple_key.pt", "beyond.pt", "deflated.pt", "appended.pt", "lists.pt"):
            corpus.add(name, error, command=command)


def add_safetensors(corpus):
    shape = json.dumps({"logits": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 8]}}).encode()
    many = json.dumps({f"{k}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for k in range(150_000)}).encode()
    whole = json.dumps({"__metadata__": {f"{k}": "" for k in range(10**6)}}).encode()
    same = json.dumps(
        {n: {"dtype": "F32", "shape": [MB], "data_offsets": [0, 4 * MB]} for n in ("probs", "y")}
    ).encode()
    header = json.dumps(
        {"probs": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
        | {"y": {"dtype": "I64", "shape": [1], "data_offsets": [4, 12]}}
        | {"w": {"dtype": "F32", "shape": [1, 3 * MB], "data_offsets": [12, 12 + 12 * MB]}}
    ).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(12 + 12 * MB)
    for name, header, tail, error in (
        ("json", b'{"a": ' + b" " * 2**25 + b"1}", b"", "the header must have at most 16,777,216 bytes"),
        ("shape", shape, b"0" * 8, "must be a complete"),
        ("axes", shape.replace(b"8]", b"8" + b",1" * 10**6 + b"]"), b"0" * 8, "must be a complete"),
        ("names", many, b"", "at most 131,072 arrays or columns, got 150,000"),
        ("metadata", whole, b"", "predictions under a known name"),
        ("overlapping", same, bytes(4 * MB), "must be a complete"),
        ("brackets", b'{"a": ' + b"[" * 10**6, b"", "must be a complete"),
    ):
        if name in ("names", "metadata") and not corpus.is_long:
            continue
        corpus.write(f"{name}.safetensors", struct.pack("<Q", len(header)) + header + tail, error)
    corpus.write("weights.safetensors", weights, "must be one weight per sample", "--weights", "w")
    corpus.write("length.safetensors", struct.pack("<Q", 10**18) + b"{}", "header must have at most 16,777,216 bytes")


# Text


def add_csv(corpus):
    columns = b"%s\n%s\n" % (b",".join(b"p%d" % k for k in range(200_000)), b",".join([b"0"] * 200_000))
    wide = b"%s,y\n" % b",".join(b"prob_%d" % k for k in range(100_000)) + (b"0," * 100_000 + b"0\n") * 40
    long = "must be a complete"
    corpus.write("line.csv", b"prob,target\n" + b"1" * 2 * 10**7, long)
    corpus.write("columns.csv", columns, "at most 16,845 columns in 1,888,890 bytes, got 200,000")
    corpus.write("blank_first.csv", b"\n" + columns, "columns in 1,888,891 bytes, got 200,000")
    corpus.write("wide.csv", wide, "at most 18,602 columns")
    many = b"%s,y\n" % b",".join(b"prob_%d" % k for k in range(2000)) + (b"1.," + b"0.," * 1999 + b"0\n") * 20_000
    many = many[:-2] + b"1\n"  # labels that are always the most probable class may be those of the model
    corpus.write("many.csv.gz", lambda: gzip.compress(many, 1), None)
    corpus.write("header.csv", b"a" * MB + b",b\n1,2\n", "under a known name")
    corpus.write("digits.csv", b"1" * (MB // 2) + b"x," + b"2" * (MB // 2) + b"\n1,2\n", "under a known name")
    corpus.write("field.csv", b"prob,target\n0.5," + b"x" * 3 * MB + b"\n", "at most 4,000 bytes")
    corpus.write("quote.csv", b'prob,target\n0.5,"' + b"x" * 5 * MB, long)
    corpus.write("utf16.csv", "prob,target\n0.5,1\n".encode("utf-16"), "must be text in UTF-8")
    corpus.write("nul.csv", b"\0" * 10**6, "must be text in UTF-8")
    corpus.write("empties.csv", b"\n" * 10**7, long)
    corpus.write("short.csv", b"prob,target\n" + b"0,1\n" * 3 * 10**6, "must be floating-point")
    corpus.write("bomb.csv.gz", lambda: gzip.compress(b"prob,target\n" + b"1" * 2**28), long)
    corpus.write("header.tsv.gz", lambda: gzip.compress(b"a" * 2**28), long)
    corpus.write(
        "rows.csv.gz", lambda: gzip.compress(b"prob,target\n" + b".5,1\n" * 10**7, 1), "at most 2,097,152 samples in"
    )
    for role in ("groups", "clusters"):
        names = b"".join(b".5,1,%d,%x\n" % (k % 2, k) for k in range(300_000))
        error = "at most 10,000 different groups" if role == "groups" else None
        corpus.write(f"{role}.csv", b"prob,weight,target,name\n" + names, error, f"--{role}", "name")
        field = b"prob,target,name\n" + (b".5,1,%s\n" % (b"x" * 2 * MB)) * 2
        corpus.write(f"field_{role}.csv", field, "at most 4,000 bytes", f"--{role}", "name")
    corpus.write("field_weights.csv", b"prob,target,w\n.5,1," + b"9" * 3 * MB + b"\n", "must", "--weights", "w")


def add_jsonl(corpus):
    row = b'{"probs": 0.5, "target": 1}\n'
    quadratic = b'{"a":' + b"[" * 101 + b'"' + b'\\"' * 10**5
    different = b"".join(b'{"k%d":1}\n' % k for k in range(200_000))
    corpus.write("quadratic.jsonl", quadratic, "deeply nested")
    corpus.write("different.jsonl", lambda: different, "at most 131,072 arrays or columns, got")
    corpus.write("line.jsonl.gz", lambda: gzip.compress(row + b" " * 2**28), "must have lines of at most 8 MiB")
    corpus.write("blank.jsonl.gz", lambda: gzip.compress(row + b"\n" * 10**7), None)
    corpus.write("deep.jsonl", b'{"probs": ' + b"[" * 10**6 + b"]" * 10**6 + b"}\n", "deeply nested")
    corpus.write("keys.jsonl", b"{%s}\n" % b",".join(b'"p%d": 0' % k for k in range(200_000)), "at most 131,072 arrays")
    corpus.write("types.jsonl", row + b'{"probs": "a", "target": 1}\n', "float64 and string")
    corpus.write("half.jsonl", row + row[:9], "must be a complete")
    corpus.write("list.jsonl", b'{"probs": [' + b"1.0," * 2 * MB + b'1.0], "target": 1}\n', "non-empty rows of at most")
    corpus.write("digits.jsonl", b'{"probs": ' + b"9" * 5 * MB + b', "target": 1}\n', "must be a complete")
    corpus.write("text.jsonl", b'{"probs": 0.5, "target": "' + b"x" * 5 * MB + b'"}\n', "at most 4,000 bytes")
    long = b'{"probs": 0.5, "target": 1, "site": "' + b"x" * 3 * MB + b'"}\n'
    for role in ("groups", "clusters"):
        corpus.write(f"{role}.jsonl", long, "at most 4,000 bytes", f"--{role}", "site")
    lists = b'{"probs": 0.5, "target": 1, "w": [' + b"1.0," * MB + b"1.0]}\n"
    corpus.write("weights.jsonl", lists, "must be one weight per sample", "--weights", "w")
    corpus.write("utf16.jsonl", row.decode().encode("utf-16"), "must be text in UTF-8")
    corpus.write("several.jsonl", row + row.strip() * 9 + b"\n", "must be a complete")
    corpus.write("uneven.jsonl", row.replace(b"0.5", b"[0.5,0.5]") + row.replace(b"0.5", b"[0.5]"), "equal length")
    corpus.write("braces.jsonl", lambda: b"{}\n" * 10**6, "at least one sample")
    corpus.write("array.jsonl", b"[]\n" * 10**6, "each line must be an object")


# Parquet


def add_json(corpus):
    """Arrays with content that needs much memory or time, and damaged ones."""
    row = b'{"probs": 0.5, "target": 1}'
    corpus.write("valid.json", b"[%s, %s]" % (row, row), None)
    corpus.write("deep.json", b"[" * 10**6 + b"]" * 10**6, "deeply nested")
    corpus.write("deep_object.json", b'{"a": ' * 10**6 + b"1" + b"}" * 10**6, "deeply nested")
    corpus.write("cut.json", b"[%s, " % row + row[:9], "must be a complete")
    corpus.write("open.json", b"[%s" % row, "must be a complete")
    corpus.write("number.json", b"7", "must be a complete")
    corpus.write("numbers.json", b"[%s, 7]" % row, "each line must be an object")
    corpus.write("many_numbers.json", b"[" + b"1, " * 10**6 + b"1]", "got an array of values")
    corpus.write("columns.json", b'{"probs": {"0": 0.5}, "target": {"0": 1}}', None)
    corpus.write("utf16.json", row.decode().encode("utf-16"), "must be text in UTF-8")
    corpus.write("large.json", lambda: b"[%s]" % row + b" " * 129 * MB, "must have at most 128 MiB")
    corpus.write("braces.json", lambda: b"[" + b"{}, " * 10**6 + b"{}]", "at least one sample")


def add_parquet(corpus):
    import pyarrow as pa
    from pyarrow import parquet

    def write(name, columns, error, *options, **how):
        parquet.write_table(pa.table(columns), corpus.folder / name, **how)
        corpus.add(name, error, *options)

    def few(n):
        return {"probs": np.full(n, 0.5, np.float32), "target": np.zeros(n, np.int64)}

    n = 200_000
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), ["x" * MB])
    for role in ("groups", "clusters", "target"):
        name = "target" if role == "target" else "site"
        options = () if role == "target" else (f"--{role}", "site")
        write(f"dictionary_{role}.parquet", few(n) | {name: text}, "at most 4,000 bytes", *options)
        text_rows = 8000 if corpus.is_long else 2000
        write(
            f"prefixes_{role}.parquet", few(text_rows) | {name: ["x" * 2**16] * text_rows}, "at most 4,000 bytes",
            *options, use_dictionary=False, column_encoding={name: "DELTA_BYTE_ARRAY"}, compression="none",
        )  # fmt: skip
    numbers = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array([1.0]))
    write("weights.parquet", few(n) | {"w": numbers}, None, "--weights", "w")
    zeros = pa.array(np.zeros(2 * 10**7, np.float32))
    one_list = pa.ListArray.from_arrays(pa.array([0, 2, len(zeros)], pa.int32()), zeros)
    write("list.parquet", {"probs": one_list, "target": [0, 1]}, "must be less compressed")
    write("unused.parquet", few(n) | {"l": pa.array([[]] * n, pa.list_(pa.float32()))}, None)
    nested = pa.array([[[0.5] * 2] * 2] * 2)
    write("nested.parquet", {"probs": nested, "target": [0, 1]}, "got list<")
    fixed = pa.FixedSizeListArray.from_arrays(zeros, 10**7)
    write("fixed.parquet", {"probs": fixed, "target": [0, 1]}, "non-empty rows")
    write("page.parquet", {"probs": [0.5], "target": ["x" * 2**27]}, "limit of", compression="zstd")
    rows = 3 * 10**6
    constant = {"probs": np.full(rows, 0.5, np.float32), "target": np.zeros(rows, bool)}
    write("rows.parquet", constant, "at most 2,097,152 samples", row_group_size=rows)
    if corpus.is_long:
        write("columns.parquet", {f"c{k}": [0.5] for k in range(140_000)}, "must have at most")
    corpus.write(
        "schema.parquet", nested_schema(100_000), "at most 65,536 elements"
    )  # overflows the stack of pyarrow 25
    doubles = b"\x15\x04\x89\xf7" + b"\xff" * 8 + b"\x7f"  # a list of 2^63 numbers
    corpus.write("doubles.parquet", parquet_of(doubles), "must be a complete")
    corpus.write("footer_only.parquet", b"PAR1" + struct.pack("<I", 2**24 - 1) + b"PAR1", "the footer must have")
    # The metadata of pyarrow 26 ends the process for statistics that do not agree with the schema.
    parquet.write_table(pa.table({"probs": [0.5, 0.5], "target": [1, None]}), corpus.folder / "optional.parquet")
    optional = (corpus.folder / "optional.parquet").read_bytes()
    assert optional.count(b"\x25\x02\x18\x06target") == 1
    required = optional.replace(b"\x25\x02\x18\x06target", b"\x25\x00\x18\x06target")
    corpus.write("required.parquet", required, "must be a complete")
    content = (corpus.folder / "weights.parquet").read_bytes()
    corpus.write(
        "footer.parquet", content[:-8] + struct.pack("<I", 2**31 - 1) + b"PAR1", "the footer must have at most"
    )
    corpus.write("zeros.parquet", b"PAR1" + bytes(10**6) + content[len(content) // 2 :], "must be a complete")


def nested_schema(depth):
    """Return a parquet file without rows, whose only column is nested in `depth` groups."""

    def varint(n):
        return bytes([n]) if n < 128 else bytes([n & 127 | 128]) + varint(n >> 7)

    group, leaf = b"\x35\x02\x18\x01a\x15\x02\x00", b"\x15\x08\x25\x02\x18\x01v\x00"
    schema = b"\xfc" + varint(depth + 2) + b"\x48\x01r\x15\x02\x00" + group * depth + leaf
    return parquet_of(b"\x15\x04\x19" + schema + b"\x16\x00\x19\x0c\x00")


def parquet_of(footer):
    return b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"


def write_logs(corpus):
    """Logs whose objects need much more memory than their text, and blank lines."""
    header = json.dumps({"version": 2, "status": "success", "eval": {}}).encode()
    size = (120 if corpus.is_long else 20) * MB
    for name, value in {"lists": b"[],", "dicts": b"{},", "numbers": b"0,", "keys": b'{"a":{}},'}.items():
        text = b'{"id": [' + value * (size // len(value)) + b"0]}"
        for place in ("header.json", "samples/1_epoch_1.json"):
            members = {"header.json": header, place: text}
            file = f"{name}_{place[:6]}.eval"
            with zipfile.ZipFile(corpus.folder / file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                for member, content in members.items():
                    archive.writestr(member, content)
            corpus.add(file, "must need at most", command="audit", unpacked=len(text))
        (corpus.folder / f"log_{name}.json").write_bytes(text[7:-1])
        corpus.add(f"log_{name}.json", "must need at most", command="audit")
    text = b'{"id": "' + b"a" * size + "😀".encode() + b'"}'
    (corpus.folder / "log_text.json").write_bytes(text)
    corpus.add("log_text.json", "", command="audit")
    n = 64 if corpus.is_long else 1
    with gzip.open(corpus.folder / "newlines.jsonl.gz", "wb") as file:
        for _ in range(n):
            file.write(b"\n" * 2**24)
    corpus.add("newlines.jsonl.gz", "or contain rows, got none", command="audit", unpacked=n * 2**24)


def write_corpus(folder, is_long):
    """Write all files into a folder, or only those that are written and read quickly, and return their cases."""
    corpus = Corpus(folder, is_long)
    for add in (add_npz, add_npy, add_pt, add_safetensors, add_csv, add_json, add_jsonl, add_parquet, write_logs):
        add(corpus)
    for suffix in ("npz", "csv", "pt", "parquet", "safetensors"):
        os.mkfifo(folder / f"pipe.{suffix}")
        (folder / f"zero.{suffix}").symlink_to("/dev/zero")
        for kind in ("pipe", "zero"):
            corpus.add(f"{kind}.{suffix}", "must be a file, got a pipe or device")
    return corpus.cases


if __name__ == "__main__":
    for case in write_corpus(Path(sys.argv[1]), is_long=True):
        print(case.size, *case.arguments)
